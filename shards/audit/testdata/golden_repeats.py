"""Writes repeats.json: token sequences with the repetitions found by OLMo-core's instance filter.

Made with ai2-olmo-core 3.0.0, numpy 2.4 and torch (which that module imports):
    pip install ai2-olmo-core==3.0.0 torch
    python golden_repeats.py > repeats.json

A document matches if find_periodic_sequences, with periods 1 to 13, finds a sequence 32 times or
more. olmo_core.data.numpy_dataset.NumpyFSLDatasetBase._validate_instance has the same condition.
Sequences are written as runs: [times, [tokens]].
"""

import json
import random

import numpy as np
from olmo_core.data.utils import find_periodic_sequences

random.seed(1309)


def expand(runs):
    return [t for times, tokens in runs for _ in range(times) for t in tokens]


def noise(n, ids):
    return [1, [random.randrange(ids) for _ in range(n)]]


cases = []
for period in range(1, 15):
    for times in (30, 31, 32, 33):
        for extra in (-1, 0, 1):  # tokens beyond whole repetitions
            unit = list(range(100, 100 + period))
            runs = [noise(random.randrange(0, 20), 50), [times, unit]]
            if extra > 0:
                runs.append([1, unit[:extra]])
            if extra < 0:
                runs[-1] = [times - 1, unit]
                runs.append([1, unit[:-1]])
            runs.append([1, [7777]])
            runs.append(noise(random.randrange(0, 20), 50))
            cases.append(runs)
for _ in range(70):  # few ids, so that random sequences also repeat
    runs = []
    for _ in range(random.randrange(1, 6)):
        if random.random() < 0.5:
            runs.append(noise(random.randrange(0, 90), random.choice((1, 2, 3, 1000))))
        else:
            runs.append(
                [
                    random.randrange(1, 60),
                    [random.randrange(random.choice((1, 2, 5))) for _ in range(random.randrange(1, 16))],
                ]
            )
    cases.append(runs)

out = []
for runs in cases:
    tokens = np.array(expand(runs), dtype=np.int64)
    found = []
    if len(tokens) > 0:
        found = [
            [int(r.start), int(r.end), int(r.period)]
            for r in find_periodic_sequences(tokens, max_period=13, min_period=1)
            if r.times >= 32
        ]
    runs = [r for r in runs if r[1]]
    out.append({"runs": runs, "found": sorted(found)})
print('{"made_with": "ai2-olmo-core 3.0.0",\n"cases": [')
print(",\n".join(json.dumps(c, separators=(",", ":")) for c in out))
print("]}")
