"""scripts/digits_vae.py with mixed precision written by hand."""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from digits_vae import VAE, load_data, loss_function, make_parser


def evaluate(model, images, autocast):
    model.eval()
    with torch.no_grad():
        with torch.autocast(**autocast):
            reconstruction, _, _ = model(images)
        reconstruction = reconstruction.float()
    model.train()
    error = 16 * (reconstruction.numpy() - images.numpy())
    return float(np.sqrt(np.mean(error**2)))


def show(model, autocast, latent=8):
    with torch.no_grad():
        noise = torch.randn(1, latent)
        with torch.autocast(**autocast):
            digit = model.decoder(noise)
        digit = digit.float().view(8, 8).numpy()
    for row in np.rint(digit * 4).astype(int):
        print("".join(" .:o#"[level] for level in row))


def main():
    parser = make_parser()
    parser.add_argument(
        "--dtype",
        choices=["float16", "bfloat16", "float32"],
        default="float16",
        metavar="{float16,bfloat16}",
    )
    parser.add_argument("--init-scale", type=float, default=65536.0)
    parser.add_argument("--growth-interval", type=int, default=2000)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    loader, test = load_data(args.batch_size)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    autocast = {
        "device_type": "cpu",
        "dtype": getattr(torch, args.dtype),
        "enabled": args.dtype != "float32",
    }
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=args.init_scale,
        growth_interval=args.growth_interval,
        enabled=args.dtype == "float16",
    )

    step = 0
    while step < args.steps:
        for (images,) in loader:
            with torch.autocast(**autocast):
                reconstruction, mu, logvar = model(images)
            reconstruction, mu, logvar = reconstruction.float(), mu.float(), logvar.float()
            loss = loss_function(reconstruction, images, mu, logvar)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

            step += 1
            if step % args.log_every == 0:
                print(f"step {step} loss {loss.item():.4f}")
            if step == args.steps:
                break

    error = evaluate(model, test, autocast)
    show(model, autocast)
    if args.save:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "step": step,
        }
        torch.save(state, args.save)
    print(f"metric error {error!r}")


if __name__ == "__main__":
    main()
