# Pattern: soft IoU and Tversky index from sums over a segmentation map
# Must hold under AMP: the index of a perfect map is 1, of a shifted one as in float32
import torch, torch.nn as nn
conv = nn.Conv2d(1, 1, 1); nn.init.constant_(conv.weight, 24.0); nn.init.constant_(conv.bias, -12.0)
m = torch.zeros(1, 1, 320, 320); m[..., :300, :] = 1
p = conv(m).sigmoid().flatten(); t = m.flatten()
inter = (p * t).sum(); total = (p + t).sum(); union = total - inter
iou = (inter + 1e-6) / (union + 1e-6)
assert abs(iou.item() - 1) < 2e-2, iou
t2 = torch.roll(m, 10, 2).flatten()
tp, fp, fn = (p * t2).sum(), (p * (1 - t2)).sum(), ((1 - p) * t2).sum()
tversky = tp / (tp + 0.3 * fp + 0.7 * fn)
assert abs(tversky.item() - 290 / 300) < 1e-2, tversky
