# Pattern: sampling of tokens: temperature, top-p by sorted cumulative sums, multinomial
# Must hold under AMP: only tokens of the nucleus are drawn
import torch, torch.nn as nn
torch.manual_seed(0)
out = nn.Linear(4, 5000, bias=False); nn.init.zeros_(out.weight)
with torch.no_grad(): out.weight[:3, 0] = 11.0
logits = out(torch.ones(2, 4)) / 0.8
srt, idx = logits.sort(descending=True); cum = srt.softmax(-1).cumsum(-1)
cut = cum > 0.9; cut[:, 1:] = cut[:, :-1].clone(); cut[:, 0] = False
logits = logits.masked_fill(cut.scatter(1, idx, cut), -float("inf"))
p = logits.softmax(-1)
s = torch.multinomial(p, 200, replacement=True)
assert s.max() < 3 and abs(p.float().sum(-1) - 1).max() < 1e-2, s.max()
