"""Train a causal character-level transformer on the text of Python's own help pages."""

import argparse
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn


class CharTransformer(nn.Module):
    def __init__(self, vocabulary, context, width=64, heads=4, layers=2):
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, dim_feedforward=2 * width, dropout=0.1, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, vocabulary)
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        x = self.characters(x) + self.positions
        x = self.encoder(x, mask=self.mask, is_causal=True)
        return self.head(x)


def load_data():
    text = "".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(text))
    index = {character: i for i, character in enumerate(alphabet)}
    encoded = torch.tensor([index[character] for character in text])
    length = len(encoded) // 20 * 19
    return encoded[:length], encoded[length:], alphabet


def random_batch(text, batch_size, context):
    starts = torch.randint(len(text) - context, (batch_size, 1))
    windows = text[starts + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


def warm_up(steps):
    """Linear warm-up, then decay with the inverse square root of the step."""
    return lambda step: min((step + 1) / steps, (steps / (step + 1)) ** 0.5)


def evaluate(model, text, context, batches=10, batch_size=32):
    model.eval()
    total = 0.0
    windows = text[: batches * batch_size * context + 1]
    inputs = windows[:-1].view(batches, batch_size, context)
    targets = windows[1:].view(batches, batch_size, context)
    with torch.no_grad():
        for x, y in zip(inputs, targets):
            total += F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    model.train()
    return total / batches


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="total, resumed steps included")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per optimizer step")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warm-up", type=int, default=50)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="PATH", help="written at the end")
    parser.add_argument("--checkpoint", metavar="PATH", help="written in the middle of the run")
    parser.add_argument("--resume", metavar="PATH", help="continue from a saved file")
    return parser


def main():
    args = make_parser().parse_args()
    torch.manual_seed(args.seed)

    train, valid, alphabet = load_data()
    model = CharTransformer(len(alphabet), args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up(args.warm_up))
    first = 0

    def save(path, step):
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "step": step,
        }
        torch.save(checkpoint, path)

    if args.resume:
        checkpoint = torch.load(args.resume)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        torch.set_rng_state(checkpoint["random"])
        first = checkpoint["step"]

    for step in range(first + 1, args.steps + 1):
        total = 0.0
        for _ in range(args.accumulate):
            inputs, targets = random_batch(train, args.batch_size, args.context)
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / args.accumulate
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        if step % args.log_every == 0:
            print(f"step {step} loss {total:.4f} lr {scheduler.get_last_lr()[0]:.2e}")
        if args.checkpoint and step == args.steps // 2:
            save(args.checkpoint, step)

    validation_loss = evaluate(model, valid, args.context)
    if args.save:
        save(args.save, args.steps)
    print(f"metric validation_loss {validation_loss!r}")


if __name__ == "__main__":
    main()
