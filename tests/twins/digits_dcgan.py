"""scripts/digits_dcgan.py with mixed precision written by hand."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from digits_dcgan import (
    FAKE_LABEL,
    NOISE,
    REAL_LABEL,
    Discriminator,
    Generator,
    frechet_distance,
    load_data,
    make_parser,
    weights_init,
)


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

    loader, images = load_data(args.batch_size)
    generator, discriminator = Generator(), Discriminator()
    generator.apply(weights_init)
    discriminator.apply(weights_init)
    criterion = nn.BCELoss()
    fixed_noise = torch.randn(512, NOISE, 1, 1)
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    autocast = {
        "device_type": "cpu",
        "dtype": getattr(torch, args.dtype),
        "enabled": args.dtype != "float32",
    }
    # One scaler for both optimizers, updated after each step: every loss is scaled by what the
    # step before it left.
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=args.init_scale,
        growth_interval=args.growth_interval,
        enabled=args.dtype == "float16",
    )

    step = 0
    while step < args.steps:
        for (real,) in loader:
            # Update the discriminator: maximize log(D(x)) + log(1 - D(G(z))).
            discriminator.zero_grad()
            label = torch.full((args.batch_size,), REAL_LABEL)
            with torch.autocast(**autocast):
                output = discriminator(real)
            output = output.float()
            loss_real = criterion(output, label)
            scaler.scale(loss_real).backward()
            d_x = output.mean().item()

            noise = torch.randn(args.batch_size, NOISE, 1, 1)
            with torch.autocast(**autocast):
                fake = generator(noise)
            fake = fake.float()
            label.fill_(FAKE_LABEL)
            with torch.autocast(**autocast):
                output = discriminator(fake.detach())
            output = output.float()
            loss_fake = criterion(output, label)
            scaler.scale(loss_fake).backward()
            loss_d = loss_real + loss_fake
            scaler.step(optimizer_d)
            scaler.update()

            # Update the generator: maximize log(D(G(z))).
            generator.zero_grad()
            label.fill_(REAL_LABEL)
            with torch.autocast(**autocast):
                output = discriminator(fake)
            output = output.float()
            loss_g = criterion(output, label)
            scaler.scale(loss_g).backward()
            d_g_z = output.mean().item()
            scaler.step(optimizer_g)
            scaler.update()

            step += 1
            if step % args.log_every == 0:
                print(
                    f"step {step} loss {loss_d.item():.4f} loss_g {loss_g.item():.4f} "
                    f"D(x) {d_x:.4f} D(G(z)) {d_g_z:.4f}"
                )
            if step == args.steps:
                break

    generator.eval()
    with torch.no_grad():
        with torch.autocast(**autocast):
            samples = generator(fixed_noise)
        samples = samples.float()
    distance = frechet_distance(images, samples)
    if args.save:
        state = {
            "generator": generator.state_dict(),
            "discriminator": discriminator.state_dict(),
            "optimizer_g": optimizer_g.state_dict(),
            "optimizer_d": optimizer_d.state_dict(),
            "scaler": scaler.state_dict(),
            "step": step,
        }
        torch.save(state, args.save)
    print(f"metric distance {distance!r}")


if __name__ == "__main__":
    main()
