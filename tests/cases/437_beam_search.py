# Pattern: beam search: first beam 0 and the others -1e9, flat top-k, index // vocabulary
# Must hold under AMP: the sequences found are those of float32
import torch, torch.nn as nn
torch.manual_seed(0)
V, B = 3000, 3
table = torch.randn(V, 8); out = nn.Linear(8, V, bias=False)
with torch.no_grad(): out.weight.copy_(torch.roll(table, -7, 0))
def search(lp_of):
    score = torch.zeros(B); score[1:] = -1e9; seq = torch.zeros(B, 1).long()
    for _ in range(6):
        total = score[:, None] + lp_of(table[seq[:, -1]])
        top, flat = total.view(-1).topk(B)
        seq = torch.cat([seq[flat // V], (flat % V)[:, None]], 1); score = top
    return seq, score
seq, score = search(lambda h: out(h).log_softmax(-1))
ref, rscore = search(lambda h: torch.nn.functional.linear(h.double(), out.weight.detach().double()).log_softmax(-1).float())
assert torch.isfinite(score).all() and abs(score[0].item() - rscore[0].item()) < 0.2, (score, rscore)
assert torch.equal(seq[0], ref[0]), (seq, ref)
