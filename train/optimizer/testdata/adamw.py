"""Writes adamw.json: three small tensors after each of ten steps of torch.optim.AdamW.

Gradients have very different sizes, and the learning rate changes. Run: python adamw.py >
adamw.json
"""

import json
import sys

import torch

torch.manual_seed(1)
shapes = [(5, 3), (7,), (2, 4)]
config = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
params = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
optimizer = torch.optim.AdamW(params, **config)


def flat(tensors):
    return [t.detach().flatten().tolist() for t in tensors]


out = {
    "torch": torch.__version__,
    "python": sys.version.split()[0],
    "config": config,
    "initial": flat(params),
    "steps": [],
}
for step in range(10):
    lr = 1e-2 * (1 + step % 3)
    for group in optimizer.param_groups:
        group["lr"] = lr
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape) * 10.0 ** (step % 4 - 2 - i)
    grads = flat([p.grad for p in params])
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0).item()
    optimizer.step()
    out["steps"].append(
        {
            "lr": lr,
            "gradients": grads,
            "norm": norm,
            "weights": flat(params),
            "exp_avg": flat([optimizer.state[p]["exp_avg"] for p in params]),
            "exp_avg_sq": flat([optimizer.state[p]["exp_avg_sq"] for p in params]),
        }
    )
json.dump(out, sys.stdout)
