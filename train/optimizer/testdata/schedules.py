"""Writes schedules.json: learning rates of transformers' schedules, and equal train.Schedule
fields.

The rates are for each step from 0 to the end of the decay. Needs torch 2.15.0, transformers 5.23.0.
Run: python schedules.py > schedules.json
"""

import importlib.metadata
import json
import sys

import torch
from transformers import get_scheduler

PEAK, STEPS = 3e-4, 40
cases = []


def case(name, fields, warmup, **kwargs):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=STEPS, scheduler_specific_kwargs=kwargs
    )
    rates = []
    for _ in range(STEPS + 1):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    cases.append(
        {
            "transformers": name,
            "kwargs": kwargs,
            "schedule": {"Peak": PEAK, "Warmup": warmup, "Decay": STEPS, **fields},
            "rates": rates,
        }
    )


for warmup in 0, 7:
    case("constant_with_warmup", {"Name": "constant", "Decay": 0}, warmup)
    case("cosine", {"Name": "cosine"}, warmup)
    case("cosine_with_min_lr", {"Name": "cosine", "Min": 3e-5}, warmup, min_lr=3e-5)
    case("linear", {"Name": "linear"}, warmup)
    case("polynomial", {"Name": "linear", "Min": 3e-5}, warmup, lr_end=3e-5, power=1.0)
    for form in "linear", "1-sqrt":
        case(
            "warmup_stable_decay",
            {"Name": "wsd", "Cooldown": 9, "CooldownForm": form},
            warmup,
            num_decay_steps=9,
            decay_type=form,
        )
    case(
        "warmup_stable_decay",
        {"Name": "wsd", "Cooldown": 9, "CooldownForm": "1-sqrt", "Min": 3e-5, "Start": 3e-5},
        warmup,
        num_decay_steps=9,
        decay_type="1-sqrt",
        min_lr_ratio=0.1,
    )

json.dump(
    {
        "versions": {
            "python": sys.version.split()[0],
            **{n: importlib.metadata.version(n) for n in ["torch", "transformers"]},
        },
        "cases": cases,
    },
    sys.stdout,
    separators=(",", ":"),
)
print()
