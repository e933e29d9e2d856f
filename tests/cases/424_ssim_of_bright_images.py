# Pattern: SSIM with C1 = 1e-4, C2 = 9e-4; variances as E[x^2] - E[x]^2 by a window convolution
# Must hold under AMP: SSIM of an image with itself is 1, with a noisy copy as in float32
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
net = nn.Conv2d(1, 1, 1); nn.init.ones_(net.weight); nn.init.zeros_(net.bias)
img = (0.8 + 0.02 * torch.randn(1, 1, 24, 24)).clamp(0, 1)
g = torch.exp(-(torch.arange(11.0) - 5) ** 2 / 4.5); g = g / g.sum(); win = (g[:, None] * g[None, :])[None, None]
def ssim(a, b):
    ma, mb = F.conv2d(a, win), F.conv2d(b, win)
    va, vb, c = F.conv2d(a * a, win) - ma ** 2, F.conv2d(b * b, win) - mb ** 2, F.conv2d(a * b, win) - ma * mb
    return (((2 * ma * mb + 1e-4) * (2 * c + 9e-4)) / ((ma ** 2 + mb ** 2 + 1e-4) * (va + vb + 9e-4))).mean()
y = net(img); noisy = img + 0.02 * torch.randn_like(img)
same, other = ssim(y, img).item(), ssim(y, noisy).item()
ia, na = img.double(), noisy.double(); win = win.double(); ref = ssim(ia, na).item()
assert abs(same - 1) < 1e-2 and abs(other - ref) < 2e-2, (same, other, ref)
