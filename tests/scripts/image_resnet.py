"""Train a residual network to tell crops of two photographs apart: a temple and a flower."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import nn


class BasicBlock(nn.Module):
    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self, width, blocks=(2, 2, 2, 2)):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        stages, channels_in = [], width
        for stage, depth in enumerate(blocks):
            channels = width * 2**stage
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(BasicBlock(channels_in, channels, stride))
                channels_in = channels
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(channels_in, 1)

    def forward(self, x):
        x = self.stages(self.stem(x))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.fc(x).squeeze(1)


def load_data():
    """Returns the left three quarters of both photographs for training, the rest for testing."""
    images = np.stack(load_sample_images().images).astype(np.float32) / 255
    images = torch.from_numpy(images).permute(0, 3, 1, 2)
    border = images.size(3) * 3 // 4
    return images[..., :border], images[..., border:]


def random_crops(images, batch_size, size):
    """Grey crops, so that colour does not give the answer away, each normalized by itself."""
    labels = torch.randint(2, (batch_size,))
    tops = torch.randint(images.size(2) - size, (batch_size,))
    lefts = torch.randint(images.size(3) - size, (batch_size,))
    crops = torch.stack(
        [
            images[label, :, top : top + size, left : left + size]
            for label, top, left in zip(labels, tops, lefts)
        ]
    )
    crops = crops.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    mean = crops.mean(dim=(1, 2, 3), keepdim=True)
    std = crops.std(dim=(1, 2, 3), keepdim=True)
    return (crops - mean) / (std + 0.05), labels.float()


def evaluate(model, images, batch_size, size, batches=60):
    model.eval()
    correct = 0
    with torch.no_grad():
        for _ in range(batches):
            crops, labels = random_crops(images, batch_size, size)
            predictions = (model(crops) > 0).float()
            correct += (predictions == labels).sum().item()
    model.train()
    return correct / (batches * batch_size)


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=32, help="height and width of a crop")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="PATH")
    return parser


def main():
    args = make_parser().parse_args()
    torch.manual_seed(args.seed)

    train, test = load_data()
    model = ResNet(args.width)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    for step in range(1, args.steps + 1):
        crops, labels = random_crops(train, args.batch, args.size)
        loss = criterion(model(crops), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % args.log_every == 0:
            print(f"step {step} loss {loss.item():.4f}")

    accuracy = evaluate(model, test, args.batch, args.size)
    if args.save:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": args.steps,
        }
        torch.save(state, args.save)
    print(f"metric accuracy {accuracy!r}")


if __name__ == "__main__":
    main()
