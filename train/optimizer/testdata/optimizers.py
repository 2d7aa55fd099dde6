"""Writes optimizers.json: six small tensors after 20 steps of each reference implementation.

Gradients have very different sizes. Some weights and gradients are zero. The learning rate and the
weight decay change.

torch.optim.Muon orthogonalizes in bfloat16. Here it uses float32, because torch.bfloat16 is set to
torch.float32 while it runs.

With the argument groups it writes groups.json: the same in four parameter groups, each with its own
weight decay and learning rate.

Needs torch 2.15.0, timm 1.0.31, sophia-opt 0.2.2, torch-adopt 0.1.0, lion-pytorch 0.2.5,
schedulefree 1.4.1. Run: python optimizers.py > optimizers.json; python optimizers.py groups >
groups.json
"""

import importlib.metadata
import json
import sys

import numpy
import torch
from adopt import ADOPT
from lion_pytorch import Lion
from schedulefree import AdamWScheduleFree
from sophia_opt import SophiaG
from timm.optim.lamb import Lamb

STEPS = 20
SHAPES = {
    "model.embed_tokens.weight": (2, 3),
    "model.layers.0.self_attn.q_proj.weight": (3, 5),
    "model.layers.0.mlp.gate.weight": (2, 3),
    "model.layers.0.mlp.experts.0.down_proj.weight": (4, 2),
    "model.layers.0.mlp.experts.1.down_proj.weight": (
        4,
        2,
    ),  # initially zero, without a gradient in the first five steps
    "model.norm.weight": (3,),  # without a gradient in all steps
}
torch.manual_seed(1)
initial = [torch.zeros(s) if "experts.1" in n else torch.randn(s) for n, s in SHAPES.items()]


def gradients(step):
    out = []
    for i, (name, shape) in enumerate(SHAPES.items()):
        g = torch.randn(shape) * 10.0 ** ((step + i) % 4 - 2)
        if "experts.1" in name and step < 5 or "norm" in name:
            g.zero_()
        out.append(g)
    return out


trained = [gradients(step) for step in range(STEPS)]
sampled = {step: gradients(step) for step in range(STEPS) if (step + 1) % 5 == 0}
rates = [1e-2 * (1 + step % 3) for step in range(STEPS)]


def flat(tensors):
    """Returns the numbers of tensors, with few digits that parse to the same float32."""
    return [[float(str(numpy.float32(x))) for x in t.detach().flatten().tolist()] for t in tensors]


# As in train.yaml: a parameter belongs to the first group that matches.
GROUPS = (
    [
        {"match": ["norms", "embedding"], "weight_decay": 0},
        {"match": ["model.layers.*.experts.1.*"], "weight_decay": 0.3, "learning_rate_scale": 2},
        {"match": ["router", "attention"], "learning_rate_scale": 0.25},
    ]
    if sys.argv[1:] == ["groups"]
    else []
)
MEMBERS = [
    ["model.norm.weight", "model.embed_tokens.weight"],
    ["model.layers.0.mlp.experts.1.down_proj.weight"],
    ["model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.q_proj.weight"],
]


def grouped(params, names):
    """Returns PyTorch's parameter groups, starting with the parameters that match no group."""
    if not GROUPS:
        return params
    named = dict(zip(names, params))
    groups = [{"params": [p for n, p in named.items() if not any(n in m for m in MEMBERS)]}]
    for group, members in zip(GROUPS, MEMBERS):
        inside = [p for n, p in named.items() if n in members]
        if inside:
            groups.append({"params": inside, "scale": group.get("learning_rate_scale", 1)})
            if "weight_decay" in group:
                groups[-1]["weight_decay"] = group["weight_decay"]
    return groups if groups[0]["params"] else groups[1:]


def run(name, config, make, step=lambda o, n: o.step(), keys=(), constant_rate=None):
    """Runs one optimizer, or several that share the parameters."""
    params = [torch.nn.Parameter(t.clone()) for t in initial]
    optimizers = make(grouped(params, SHAPES) if name != "muon" else params)
    if GROUPS:
        config = {**config, "groups": GROUPS}
    case = {"name": name, "config": config, "rates": [], "weights": [], "state": {}}
    for n in range(STEPS):
        for p, g in zip(params, trained[n]):
            p.grad = g.clone()
        for o in optimizers:
            for group in o.param_groups:
                group["lr"] = (constant_rate or rates[n]) * group.get("scale", 1)
            step(o, n)
        case["rates"].append(optimizers[0].param_groups[0]["scheduled_lr"] if constant_rate else rates[n])
        case["weights"].append(flat(params))
        if name == "sophiag" and n in sampled:
            for p, g in zip(params, sampled[n]):
                p.grad = g.clone()
            optimizers[0].update_hessian()
    for key in keys:
        states = [next((o.state[p] for o in optimizers if p in o.state), {}) for p in params]
        case["state"][key] = flat([s[key] if key in s else torch.zeros(0) for s in states])
    cases.append(case)
    return params, optimizers, case


def muon(params, **options):
    inside = {n: p for p, n in zip(params, SHAPES) if "self_attn" in n or "experts" in n}
    rest = {n: p for p, n in zip(params, SHAPES) if n not in inside}
    return [
        torch.optim.Muon(grouped(list(inside.values()), inside), weight_decay=0.1, **options),
        torch.optim.AdamW(grouped(list(rest.values()), rest), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    ]


def in_float32(o, n):
    kept, torch.bfloat16 = torch.bfloat16, torch.float32
    try:
        o.step()
    finally:
        torch.bfloat16 = kept


cases = []
run(
    "sophiag",
    {"weight_decay": 0.1, "betas": [0.965, 0.99], "rho": 0.04, "hessian_every": 5},
    lambda p: [SophiaG(p, betas=(0.965, 0.99), rho=0.04, weight_decay=0.1)],
    lambda o, n: o.step(bs=200),
    ["exp_avg", "hessian"],
)
run(
    "muon",
    {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"},
    lambda p: muon(p, adjust_lr_fn="match_rms_adamw"),
    in_float32,
    ["momentum_buffer", "exp_avg", "exp_avg_sq"],
)
run(
    "muon",
    {"weight_decay": 0.1, "adjust_lr_fn": "original", "momentum": 0.9, "nesterov": False, "ns_steps": 4},
    lambda p: muon(p, adjust_lr_fn="original", momentum=0.9, nesterov=False, ns_steps=4),
    in_float32,
    ["momentum_buffer", "exp_avg", "exp_avg_sq"],
)
run(
    "lamb",
    {"weight_decay": 0.1, "betas": [0.9, 0.999], "eps": 1e-6},
    lambda p: [Lamb(p, weight_decay=0.1, max_grad_norm=None, always_adapt=True)],
    keys=["exp_avg", "exp_avg_sq"],
)
if GROUPS:
    run(
        "adamw",
        {"weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8},
        lambda p: [torch.optim.AdamW(p, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)],
        keys=["exp_avg", "exp_avg_sq"],
    )
else:
    run(
        "lamb",
        {"weight_decay": 0},
        lambda p: [Lamb(p, weight_decay=0, max_grad_norm=None, always_adapt=True)],
        keys=["exp_avg", "exp_avg_sq"],
    )
run(
    "adopt",
    {"weight_decay": 0.1, "betas": [0.9, 0.9999], "eps": 1e-6},
    lambda p: [ADOPT(p, weight_decay=0.1, decouple=True)],
    keys=["exp_avg", "exp_avg_sq"],
)
run("lion", {"weight_decay": 0.1, "betas": [0.9, 0.99]}, lambda p: [Lion(p, weight_decay=0.1)], keys=["exp_avg"])


def schedule_free(p):
    o = AdamWScheduleFree(p, lr=1e-2, weight_decay=0.1, warmup_steps=4, r=0.5)
    o.train()
    return [o]


params, optimizers, case = run(
    "schedule_free_adamw",
    {"weight_decay": 0.1, "betas": [0.9, 0.999], "eps": 1e-8, "r": 0.5, "weight_lr_power": 2},
    schedule_free,
    keys=["z", "exp_avg_sq"],
    constant_rate=1e-2,
)
case["lr_max"], case["weight_sum"] = (
    optimizers[0].param_groups[0]["lr_max"],
    optimizers[0].param_groups[0]["weight_sum"],
)
optimizers[0].eval()
case["average"] = flat(params)

json.dump(
    {
        "versions": {
            "python": sys.version.split()[0],
            **{
                n: importlib.metadata.version(n)
                for n in ["torch", "timm", "sophia-opt", "torch-adopt", "lion-pytorch", "schedulefree"]
            },
        },
        "targets": 200,
        "names": list(SHAPES),
        "shapes": list(SHAPES.values()),
        "initial": flat(initial),
        "gradients": [flat(g) for g in trained],
        "sampled": {n: flat(g) for n, g in sampled.items()},
        "cases": cases,
    },
    sys.stdout,
    separators=(",", ":"),
)
print()
