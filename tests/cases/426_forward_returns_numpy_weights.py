# Pattern: a layer that returns attention weights as weights.data.numpy() for plots
# Must hold under AMP: float32 arrays that NumPy, JSON and a second layer can use
import json, numpy as np, torch, torch.nn as nn
torch.manual_seed(0)
class Attend(nn.Module):
    def __init__(self): super().__init__(); self.q = nn.Linear(4, 4)
    def forward(self, x):
        w = (self.q(x) @ x.transpose(1, 2)).softmax(-1)
        return w @ x, w.data.numpy()
class Net(nn.Module):
    def __init__(self): super().__init__(); self.a, self.b = Attend(), Attend()
    def forward(self, x):
        x, one = self.a(x); x, two = self.b(x)
        return x, np.stack([one, two])
y, w = Net()(torch.randn(2, 3, 4))
assert w.dtype == np.float32 and w.shape == (2, 2, 3, 3), w.dtype
assert np.abs(w.sum(-1) - 1).max() < 1e-2 and np.isfinite(np.linalg.det(w)).all()
assert len(json.dumps(w.tolist())) > 0
