# Pattern: Kalman filter in a module: covariances multiplied and inverted at each step
# Must hold under AMP: gain and covariance settle where they do in float32
import torch, torch.nn as nn
class Kalman(nn.Module):
    def __init__(self):
        super().__init__(); self.logr = nn.Parameter(torch.tensor(-7.0)); self.h = nn.Parameter(torch.tensor([[1.0, 0.0]]))
    def forward(self, z):
        F = torch.tensor([[1.0, 0.01], [0.0, 1.0]]); Q = torch.eye(2) * 1e-6
        m, P = torch.zeros(2, 1), torch.eye(2); R = self.logr.exp().reshape(1, 1)
        for v in z:
            m, P = F @ m, F @ P @ F.t() + Q
            S = self.h @ P @ self.h.t() + R
            K = P @ self.h.t() @ torch.inverse(S)
            m = m + K @ (v.reshape(1, 1) - self.h @ m); P = (torch.eye(2) - K @ self.h) @ P
        return m, P
net = Kalman(); z = 0.5 * 0.01 * torch.arange(300.0)
m, P = net(z); ref = Kalman().double()
torch.set_default_dtype(torch.float64); rm, rP = ref(z.double()); torch.set_default_dtype(torch.float32)
assert (m.double() - rm).abs().max() < 2e-2, (m, rm)
assert (P.double() - rP).abs().max() < 0.1 * rP.abs().max(), (P, rP)
