"""Train a character-level LSTM on the text of Python's own help pages."""

import argparse
import math
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn


class CharLSTM(nn.Module):
    def __init__(self, vocabulary, embedding=32, hidden=96):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.decoder = nn.Linear(hidden, vocabulary)

    def forward(self, characters, state=None):
        output, state = self.lstm(self.embedding(characters), state)
        return self.decoder(self.dropout(output)), state


def load_data(streams):
    """Returns the training and validation text, each cut into parallel streams, and the alphabet."""
    text = "".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(text))
    index = {character: i for i, character in enumerate(alphabet)}
    encoded = torch.tensor([index[character] for character in text])
    length = len(encoded) // 20 * 19
    train, valid = encoded[:length], encoded[length:]
    return cut(train, streams), cut(valid, streams), alphabet


def cut(text, streams):
    length = len(text) // streams
    return text[: length * streams].view(streams, length)


def get_window(text, i, length):
    return text[:, i : i + length], text[:, i + 1 : i + 1 + length]


def detach(state):
    return tuple(tensor.detach() for tensor in state)


def evaluate(model, text, length, windows=20):
    model.eval()
    total, state = 0.0, None
    with torch.no_grad():
        for i in range(windows):
            inputs, targets = get_window(text, i * length, length)
            logits, state = model(inputs, state)
            total += F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    model.train()
    return total / windows


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=32, help="characters per training window")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="PATH")
    return parser


def main():
    args = make_parser().parse_args()
    torch.manual_seed(args.seed)

    train, valid, alphabet = load_data(args.batch_size)
    model = CharLSTM(len(alphabet))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    position, state = 0, None
    for step in range(1, args.steps + 1):
        if position + args.length >= train.size(1):
            position, state = 0, None
        inputs, targets = get_window(train, position, args.length)
        position += args.length

        optimizer.zero_grad()
        logits, state = model(inputs, state)
        state = detach(state)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()

        if step % args.log_every == 0:
            print(f"step {step} loss {loss.item():.4f} perplexity {math.exp(loss.item()):.2f}")

    perplexity = math.exp(evaluate(model, valid, args.length))
    if args.save:
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": args.steps,
        }
        torch.save(checkpoint, args.save)
    print(f"metric perplexity {perplexity!r}")


if __name__ == "__main__":
    main()
