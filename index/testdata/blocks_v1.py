"""The order "blocks 1" of one source, written from docs/formats/plan.md, not from the Go code.

Prints the vectors of index/testdata/blocks_v1.json as JSON:

    python3 blocks_v1.py > blocks_v1.json
"""

import hashlib
import json
import sys

from order_v1 import permutation


def key(label, seed, name, *numbers):
    name = name.encode()
    text = label + seed.to_bytes(8, "little") + len(name).to_bytes(8, "little") + name
    for n in numbers:
        text += n.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def epoch_of(seed, name, epoch, n, block, group):
    """The windows of an epoch, as a list."""
    blocks = [list(range(first, min(first + block, n))) for first in range(0, n, block)]
    at = permutation(len(blocks), key(b"mula blocks 1", seed, name, epoch))
    blocks = [blocks[at(i)] for i in range(len(blocks))]
    order = []
    for g, first in enumerate(range(0, len(blocks), group)):
        windows = [w for b in blocks[first : first + group] for w in b]
        at = permutation(len(windows), key(b"mula group 1", seed, name, epoch, g))
        order += [windows[at(i)] for i in range(len(windows))]
    return order


if __name__ == "__main__":
    out = {"python": sys.version.split()[0], "epochs": []}
    for seed, name, epoch, n, block, group in [
        (0, "a", 0, 1, 1, 1),
        (1, "a", 0, 10, 3, 2),
        (1, "a", 1, 10, 3, 2),
        (6198, "dclm", 0, 100, 7, 4),
        (6198, "dclm", 3, 100, 200, 1),
        (2**64 - 1, "größer", 2**40, 64, 8, 3),
        (5, "wiki", 0, 200_003, 16, 64),
        (5, "wiki", 0, 300_001, 2, 40_000),
    ]:
        order = epoch_of(seed, name, epoch, n, block, group)
        assert sorted(order) == list(range(n))
        digest = hashlib.sha256(b"".join(w.to_bytes(8, "little") for w in order)).hexdigest()
        out["epochs"].append(
            {"seed": seed, "name": name, "epoch": epoch, "windows": n, "block": block, "group": group}
            | {"first": order[:10], "last": order[-1], "sha256": digest}
        )
    json.dump(out, sys.stdout, indent=1, ensure_ascii=False)
    print()
