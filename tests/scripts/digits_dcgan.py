"""Train a DCGAN on the handwritten digits that ship with scikit-learn."""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

REAL_LABEL = 1.0
FAKE_LABEL = 0.0
NOISE = 32


class Generator(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 2 * width, 2, 1, 0, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * width, 1, 2, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, images):
        return self.main(images).view(-1)


def weights_init(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def load_data(batch_size):
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return DataLoader(TensorDataset(images), batch_size, shuffle=True, drop_last=True), images


def frechet_distance(real, fake):
    """Distance of two sets of images as Gaussians over their pixels; 0 when they agree."""
    real, fake = real.flatten(1).numpy(), fake.flatten(1).numpy()
    real_cov, fake_cov = np.cov(real, rowvar=False), np.cov(fake, rowvar=False)
    roots = np.sqrt(np.linalg.eigvals(real_cov @ fake_cov).real.clip(0))
    shift = ((real.mean(0) - fake.mean(0)) ** 2).sum()
    return float(shift + np.trace(real_cov) + np.trace(fake_cov) - 2 * roots.sum())


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="PATH")
    return parser


def main():
    args = make_parser().parse_args()
    torch.manual_seed(args.seed)

    loader, images = load_data(args.batch_size)
    generator, discriminator = Generator(), Discriminator()
    generator.apply(weights_init)
    discriminator.apply(weights_init)
    criterion = nn.BCELoss()
    fixed_noise = torch.randn(512, NOISE, 1, 1)
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))

    step = 0
    while step < args.steps:
        for (real,) in loader:
            # Update the discriminator: maximize log(D(x)) + log(1 - D(G(z))).
            discriminator.zero_grad()
            label = torch.full((args.batch_size,), REAL_LABEL)
            output = discriminator(real)
            loss_real = criterion(output, label)
            loss_real.backward()
            d_x = output.mean().item()

            noise = torch.randn(args.batch_size, NOISE, 1, 1)
            fake = generator(noise)
            label.fill_(FAKE_LABEL)
            output = discriminator(fake.detach())
            loss_fake = criterion(output, label)
            loss_fake.backward()
            loss_d = loss_real + loss_fake
            optimizer_d.step()

            # Update the generator: maximize log(D(G(z))).
            generator.zero_grad()
            label.fill_(REAL_LABEL)
            output = discriminator(fake)
            loss_g = criterion(output, label)
            loss_g.backward()
            d_g_z = output.mean().item()
            optimizer_g.step()

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
        samples = generator(fixed_noise)
    distance = frechet_distance(images, samples)
    if args.save:
        state = {
            "generator": generator.state_dict(),
            "discriminator": discriminator.state_dict(),
            "optimizer_g": optimizer_g.state_dict(),
            "optimizer_d": optimizer_d.state_dict(),
            "step": step,
        }
        torch.save(state, args.save)
    print(f"metric distance {distance!r}")


if __name__ == "__main__":
    main()
