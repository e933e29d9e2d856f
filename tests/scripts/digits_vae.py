"""Train a variational autoencoder on the handwritten digits that ship with scikit-learn."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class VAE(nn.Module):
    def __init__(self, hidden=128, latent=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 64), nn.Sigmoid()
        )

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = self.reparameterize(mu, logvar)
        return self.decoder(z), mu, logvar


def load_data(batch_size):
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    train, test = images[:-400], images[-400:]
    loader = DataLoader(TensorDataset(train), batch_size, shuffle=True, drop_last=True)
    return loader, test


def loss_function(reconstruction, x, mu, logvar):
    """Reconstruction and KL divergence from the unit Gaussian, summed over a mean digit."""
    bce = F.binary_cross_entropy(reconstruction, x, reduction="sum")
    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return (bce + kl) / len(x)


def evaluate(model, images):
    """Root mean squared error of the reconstructions, in grey levels of the original images."""
    model.eval()
    with torch.no_grad():
        reconstruction, _, _ = model(images)
    model.train()
    error = 16 * (reconstruction.numpy() - images.numpy())
    return float(np.sqrt(np.mean(error**2)))


def show(model, latent=8):
    """Prints one digit drawn from the prior."""
    with torch.no_grad():
        digit = model.decoder(torch.randn(1, latent)).view(8, 8).numpy()
    for row in np.rint(digit * 4).astype(int):
        print("".join(" .:o#"[level] for level in row))


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="PATH")
    return parser


def main():
    args = make_parser().parse_args()
    torch.manual_seed(args.seed)

    loader, test = load_data(args.batch_size)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    step = 0
    while step < args.steps:
        for (images,) in loader:
            reconstruction, mu, logvar = model(images)
            loss = loss_function(reconstruction, images, mu, logvar)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            step += 1
            if step % args.log_every == 0:
                print(f"step {step} loss {loss.item():.4f}")
            if step == args.steps:
                break

    error = evaluate(model, test)
    show(model)
    if args.save:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
        }
        torch.save(state, args.save)
    print(f"metric error {error!r}")


if __name__ == "__main__":
    main()
