"""scripts/digits_cnn.py with mixed precision written by hand."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from digits_cnn import Net, load_data, make_parser


def evaluate(model, loader, autocast):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in loader:
            with torch.autocast(**autocast):
                output = model(images)
            output = output.float()
            correct += output.argmax(dim=1).eq(labels).sum().item()
    model.train()
    return correct / len(loader.dataset)


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

    train_loader, test_loader = load_data(args.batch_size)
    model = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=args.steps
    )
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
        for images, labels in train_loader:
            optimizer.zero_grad()
            with torch.autocast(**autocast):
                output = model(images)
            loss = criterion(output.float(), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()

            step += 1
            if step % args.log_every == 0:
                print(f"step {step} loss {loss.item():.4f}")
            if step == args.steps:
                break

    accuracy = evaluate(model, test_loader, autocast)
    if args.save:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "step": step,
        }
        torch.save(state, args.save)
    print(f"metric accuracy {accuracy!r}")


if __name__ == "__main__":
    main()
