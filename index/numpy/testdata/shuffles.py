"""Writes shuffles.json: results of numpy's generators, for the tests of package numpy.

    python shuffles.py > shuffles.json
"""

import hashlib
import json

import numpy as np


def generator(kind, seed):
    return np.random.RandomState(seed) if kind == "RandomState" else np.random.Generator(np.random.PCG64(seed))


def masked(kind, seed):
    """Returns a generator whose randint for 64-bit types draws by mask and rejection.

    randint then uses numpy's bounded_masked_uint64, and below 2**32 buffered_bounded_masked_uint32,
    which return the same numbers as its random_interval.
    """
    return np.random.RandomState(seed) if kind == "RandomState" else np.random.RandomState(np.random.PCG64(seed))


def words(kind, state):
    """Returns the next raw 32-bit draws."""
    if kind == "RandomState":
        return [int(state.randint(0, 2**32, dtype=np.uint64)) for _ in range(3)]
    return [int(v) for v in state.integers(0, 2**32, size=3, dtype=np.uint32)]


shuffles = []
for kind in ("RandomState", "Generator"):
    for dtype in ("<u4", "<u8"):
        # One generator shuffles arrays of all sizes of a range in sequence. The hash covers all
        # results.
        for first in range(0, 3001, 200):
            last = min(first + 199, 3000)
            state, md5 = generator(kind, first + 1), hashlib.md5()
            for n in range(first, last + 1):
                a = np.arange(n, dtype=dtype)
                state.shuffle(a)
                md5.update(a.tobytes())
            shuffles.append(
                dict(
                    kind=kind,
                    dtype=dtype,
                    seed=first + 1,
                    first=first,
                    last=last,
                    md5=md5.hexdigest(),
                    then=words(kind, state),
                )
            )
        for n in (65535, 65536, 65537, 1_000_000, 20_000_000):
            if dtype == "<u8" and n > 1_000_000:
                continue
            state = generator(kind, n)
            a = np.arange(n, dtype=dtype)
            state.shuffle(a)
            shuffles.append(
                dict(
                    kind=kind,
                    dtype=dtype,
                    seed=n,
                    first=n,
                    last=n,
                    md5=hashlib.md5(a.tobytes()).hexdigest(),
                    then=words(kind, state),
                )
            )

intervals = []
for kind in ("RandomState", "Generator"):
    for seed in (0, 1234, 2**32 - 1):
        state = masked(kind, seed)
        maxima = [
            0,
            1,
            2,
            3,
            4,
            100,
            2**31 - 1,
            2**31,
            2**32 - 2,
            2**32 - 1,
            2**32,
            2**32 + 1,
            5,
            2**40,
            2**40 + 1,
            7,
            7,
            2**63,
            2**64 - 2,
            6,
            2**64 - 1,
            10,
        ]
        maxima += [(3**k + seed) % 2**64 for k in range(41)]
        intervals.append(
            dict(
                kind=kind,
                seed=seed,
                max=[str(m) for m in maxima],
                drawn=[str(int(state.randint(0, m + 1, dtype=np.uint64))) for m in maxima],
            )
        )

seeds = []
for entropy in (0, 1, 6198, 34522, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1):
    state = np.random.SeedSequence(entropy).generate_state(5, np.uint64)
    raw = np.random.PCG64(entropy).random_raw(3)
    seeds.append(dict(entropy=str(entropy), state=[str(int(v)) for v in state], raw=[str(int(v)) for v in raw]))

rows = lambda name, values: '"%s": [\n%s\n]' % (name, ",\n".join(json.dumps(v) for v in values))
print(
    "{\n%s,\n%s,\n%s,\n%s\n}"
    % ('"numpy": "%s"' % np.__version__, rows("seeds", seeds), rows("intervals", intervals), rows("shuffles", shuffles))
)
