"""scripts/char_lstm.py with mixed precision written by hand."""

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from char_lstm import CharLSTM, detach, get_window, load_data, make_parser


class Float32RecurrenceLSTM(CharLSTM):
    """CharLSTM whose recurrence stays in float32.

    torch 2.13 has no float16 LSTM for training on the CPU: under autocast nn.LSTM raises "could not
    create a primitive descriptor for the LSTM forward propagation primitive" when its inputs or
    weights require a gradient. It runs under no_grad, in float16, but a model is better evaluated
    as it was trained. bfloat16 needs none of this where the CPU has bfloat16 arithmetic.
    """

    def forward(self, characters, state=None):
        embedded = self.embedding(characters)
        with torch.autocast("cpu", enabled=False):
            output, state = self.lstm(embedded.float(), state)
        return self.decoder(self.dropout(output)), state


def to_float32(state):
    return tuple(tensor.float() for tensor in state)


def evaluate(model, text, length, autocast, windows=20):
    model.eval()
    total, state = 0.0, None
    with torch.no_grad():
        for i in range(windows):
            inputs, targets = get_window(text, i * length, length)
            with torch.autocast(**autocast):
                logits, state = model(inputs, state)
            logits, state = logits.float(), to_float32(state)
            total += F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    model.train()
    return total / windows


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

    train, valid, alphabet = load_data(args.batch_size)
    if args.dtype == "float16":
        print("no float16 LSTM for training on the CPU: it runs in float32", file=sys.stderr)
        model = Float32RecurrenceLSTM(len(alphabet))
    else:
        model = CharLSTM(len(alphabet))
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

    position, state = 0, None
    for step in range(1, args.steps + 1):
        if position + args.length >= train.size(1):
            position, state = 0, None
        inputs, targets = get_window(train, position, args.length)
        position += args.length

        optimizer.zero_grad()
        with torch.autocast(**autocast):
            logits, state = model(inputs, state)
        logits, state = logits.float(), to_float32(state)
        state = detach(state)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(optimizer)
        scaler.update()

        if step % args.log_every == 0:
            print(f"step {step} loss {loss.item():.4f} perplexity {math.exp(loss.item()):.2f}")

    perplexity = math.exp(evaluate(model, valid, args.length, autocast))
    if args.save:
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "step": args.steps,
        }
        torch.save(checkpoint, args.save)
    print(f"metric perplexity {perplexity!r}")


if __name__ == "__main__":
    main()
