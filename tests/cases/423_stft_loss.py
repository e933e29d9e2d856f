# Pattern: multi-resolution STFT loss: magnitude with clamp(1e-7), spectral convergence, log magnitude
# Must hold under AMP: no crash, loss is that of float32
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
net = nn.Conv1d(1, 1, 1); nn.init.constant_(net.weight, 0.9); nn.init.zeros_(net.bias)
y = torch.randn(1, 1, 2000); y[..., 1000:] = 0; wav = net(y).squeeze(1)
def loss_of(a, b):
    out = 0
    for n in (150, 256):
        win = torch.hann_window(n)
        sa, sb = (torch.stft(s, n, n // 4, window=win, return_complex=True) for s in (a, b))
        ma, mb = (torch.sqrt(torch.clamp(s.real ** 2 + s.imag ** 2, min=1e-7)) for s in (sa, sb))
        out = out + torch.norm(mb - ma, p="fro") / torch.norm(mb, p="fro") + F.l1_loss(mb.log(), ma.log())
    return out
loss = loss_of(wav, y.squeeze(1)); loss.backward()
ref = loss_of(0.9 * y.squeeze(1), y.squeeze(1))
assert abs(loss.item() - ref.item()) < 3e-2, (loss.item(), ref.item())
assert torch.isfinite(net.weight.grad).all()
