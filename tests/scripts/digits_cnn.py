"""Classify the handwritten digits that ship with scikit-learn with a small convolutional network."""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(64, 10),
        )

    def forward(self, x):
        x = self.features(x)
        return self.classifier(x.flatten(1))


def load_data(batch_size):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(
        range(len(labels)), test_size=400, random_state=0, stratify=labels
    )
    train_loader = DataLoader(
        TensorDataset(images[train], labels[train]), batch_size, shuffle=True, drop_last=True
    )
    test_loader = DataLoader(TensorDataset(images[test], labels[test]), batch_size=100)
    return train_loader, test_loader


def evaluate(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in loader:
            output = model(images)
            correct += output.argmax(dim=1).eq(labels).sum().item()
    model.train()
    return correct / len(loader.dataset)


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="PATH")
    return parser


def main():
    args = make_parser().parse_args()
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

    step = 0
    while step < args.steps:
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()

            step += 1
            if step % args.log_every == 0:
                print(f"step {step} loss {loss.item():.4f}")
            if step == args.steps:
                break

    accuracy = evaluate(model, test_loader)
    if args.save:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
        }
        torch.save(state, args.save)
    print(f"metric accuracy {accuracy!r}")


if __name__ == "__main__":
    main()
