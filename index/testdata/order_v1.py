"""Order version 1 of one source, written from docs/formats/plan.md, not from the Go code.

Prints the vectors of index/testdata/order_v1.json as JSON:

    python3 order_v1.py > order_v1.json
"""

import hashlib
import json
import sys

M64 = (1 << 64) - 1


def splitmix64(s):
    s = (s + 0x9E3779B97F4A7C15) & M64
    z = s
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return s, z ^ (z >> 31)


def permutation(n, key):
    """The function i -> image of i on [0, n)."""
    s = key ^ ((n * 0xD6E8FEB86659FD93) & M64)
    if n < 65536:
        p = list(range(n))
        for i in range(n - 1, 0, -1):
            mask = (1 << i.bit_length()) - 1
            while True:
                s, v = splitmix64(s)
                if v & mask <= i:
                    break
            j = v & mask
            p[i], p[j] = p[j], p[i]
        return p.__getitem__
    h = ((n - 1).bit_length() + 1) // 2
    keys = []
    for _ in range(6):
        s, k = splitmix64(s)
        keys.append(k)

    def f(r, k):
        t = ((r ^ k) * 0x9E3779B97F4A7C15) & M64
        t ^= t >> 32
        t = (t * 0xD6E8FEB86659FD93) & M64
        return t >> (64 - h)

    def at(i):
        while True:
            l, r = i >> h, i & ((1 << h) - 1)
            for k in keys:
                l, r = r, l ^ f(r, k)
            i = l << h | r
            if i < n:
                return i

    return at


def key(seed, name, epoch):
    name = name.encode()
    text = (
        b"mula order 1"
        + seed.to_bytes(8, "little")
        + len(name).to_bytes(8, "little")
        + name
        + epoch.to_bytes(8, "little")
    )
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


if __name__ == "__main__":
    out = {"python": sys.version.split()[0], "keys": [], "permutations": []}
    for seed, name, epoch in [
        (0, "a", 0),
        (6198, "dclm", 0),
        (6198, "dclm", 1),
        (6198, "wiki", 0),
        (2**64 - 1, "größer", 2**40),
    ]:
        out["keys"].append({"seed": seed, "name": name, "epoch": epoch, "key": key(seed, name, epoch)})
    for n, k in [
        (1, 0),
        (2, 1),
        (3, 7),
        (10, 0),
        (10, 1),
        (1000, 42),
        (65535, 6198),
        (65536, 6198),
        (65537, 0),
        (993200000, 6198),
        (2**40 + 3, 2**63 + 1),
    ]:
        at = permutation(n, k)
        out["permutations"].append({"n": n, "key": k, "first": [at(i) for i in range(min(n, 10))], "last": at(n - 1)})
    json.dump(out, sys.stdout, indent=1, ensure_ascii=False)
    print()
