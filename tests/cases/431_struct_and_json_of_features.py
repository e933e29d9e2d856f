# Pattern: features written by struct, array and JSON inside an indexing module
# Must hold under AMP: what is read back equals the features
import array, json, struct, torch, torch.nn as nn
torch.manual_seed(0)
class Index(nn.Module):
    def __init__(self): super().__init__(); self.e = nn.Linear(4, 3); self.rows = []
    def forward(self, x):
        f = self.e(x)
        for row in f: self.rows.append((struct.pack("3f", *row.tolist()), array.array("f", row.detach().numpy().tobytes()), json.dumps(row.tolist())))
        return f
net = Index(); f = net(torch.randn(2, 4)).detach()
for (packed, raw, text), row in zip(net.rows, f):
    assert len(raw) == 3, len(raw)
    for got in (struct.unpack("3f", packed), list(raw), json.loads(text)):
        assert max(abs(a - b) for a, b in zip(got, row.tolist())) < 1e-3
