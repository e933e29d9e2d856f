"""scripts/char_transformer.py with mixed precision written by hand.

nn.TransformerEncoderLayer leaves its fused inference path when autocast is on, but asks only for
CUDA (torch.is_autocast_enabled() without a device, torch 2.13): under autocast on the CPU,
evaluation runs aten::_transformer_encoder_layer_fwd, and its layer norms, in the lower precision.
Training is not affected.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from char_transformer import CharTransformer, load_data, make_parser, random_batch, warm_up


def evaluate(model, text, context, autocast, batches=10, batch_size=32):
    model.eval()
    total = 0.0
    windows = text[: batches * batch_size * context + 1]
    inputs = windows[:-1].view(batches, batch_size, context)
    targets = windows[1:].view(batches, batch_size, context)
    with torch.no_grad():
        for x, y in zip(inputs, targets):
            with torch.autocast(**autocast):
                logits = model(x)
            total += F.cross_entropy(logits.float().flatten(0, 1), y.flatten()).item()
    model.train()
    return total / batches


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

    train, valid, alphabet = load_data()
    model = CharTransformer(len(alphabet), args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up(args.warm_up))
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
    first = 0

    def save(path, step):
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "scaler": scaler.state_dict(),
            "random": torch.get_rng_state(),
            "step": step,
        }
        torch.save(checkpoint, path)

    if args.resume:
        checkpoint = torch.load(args.resume)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        if checkpoint.get("scaler"):
            scaler.load_state_dict(checkpoint["scaler"])
        torch.set_rng_state(checkpoint["random"])
        first = checkpoint["step"]

    for step in range(first + 1, args.steps + 1):
        total = 0.0
        for _ in range(args.accumulate):
            inputs, targets = random_batch(train, args.batch_size, args.context)
            with torch.autocast(**autocast):
                logits = model(inputs)
            logits = logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / args.accumulate
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()

        if step % args.log_every == 0:
            print(f"step {step} loss {total:.4f} lr {scheduler.get_last_lr()[0]:.2e}")
        if args.checkpoint and step == args.steps // 2:
            save(args.checkpoint, step)

    validation_loss = evaluate(model, valid, args.context, autocast)
    if args.save:
        save(args.save, args.steps)
    print(f"metric validation_loss {validation_loss!r}")


if __name__ == "__main__":
    main()
