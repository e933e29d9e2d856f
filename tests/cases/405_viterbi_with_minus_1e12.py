# Pattern: Viterbi decoding, start scores of -1e12, long chain of added scores
# Must hold under AMP: the best path is that of float32
import torch, torch.nn as nn
torch.manual_seed(0)
emit = nn.Linear(4, 3); nn.init.zeros_(emit.bias)
with torch.no_grad(): emit.weight.copy_(torch.eye(3, 4) * 8)
states = torch.randint(0, 3, (400,)); states[0] = 0
x = torch.zeros(400, 4); x[torch.arange(400), states] = 1
e = emit(x)
score = e.new_full((3,), -1e12); score[0] = 0.0
back = []
for t in range(1, 400):
    best, idx = (score[:, None] + e[t][None, :]).max(0)
    score = best; back.append(idx)
path = [int(score.argmax())]
for idx in reversed(back): path.append(int(idx[path[-1]]))
assert torch.isfinite(score.max()) and path[::-1][1:] == states[1:].tolist()
assert abs(score.max().item() - 399 * 8) < 30, score
