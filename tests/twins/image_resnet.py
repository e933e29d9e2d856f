"""scripts/image_resnet.py with mixed precision written by hand."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from image_resnet import ResNet, load_data, make_parser, random_crops


def evaluate(model, images, batch_size, size, autocast, batches=60):
    model.eval()
    correct = 0
    with torch.no_grad():
        for _ in range(batches):
            crops, labels = random_crops(images, batch_size, size)
            with torch.autocast(**autocast):
                output = model(crops)
            predictions = (output.float() > 0).float()
            correct += (predictions == labels).sum().item()
    model.train()
    return correct / (batches * batch_size)


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

    train, test = load_data()
    model = ResNet(args.width)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
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

    for step in range(1, args.steps + 1):
        crops, labels = random_crops(train, args.batch, args.size)
        with torch.autocast(**autocast):
            output = model(crops)
        loss = criterion(output.float(), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if step % args.log_every == 0:
            print(f"step {step} loss {loss.item():.4f}")

    accuracy = evaluate(model, test, args.batch, args.size, autocast)
    if args.save:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "step": args.steps,
        }
        torch.save(state, args.save)
    print(f"metric accuracy {accuracy!r}")


if __name__ == "__main__":
    main()
