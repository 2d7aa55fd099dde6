"""The sample of a shard (docs/formats/plan.md). Prints the vectors of sample_test.go."""

import hashlib
import struct

BLOCK, MOST = 16384, 16
MASK = (1 << 64) - 1


def blocks(size):
    n = (size + BLOCK - 1) // BLOCK
    if n <= MOST:
        return list(range(n))
    state = int.from_bytes(hashlib.sha256(b"mula sample 1" + struct.pack("<Q", size)).digest()[:8], "little")
    chosen = {0, n - 1}
    while len(chosen) < MOST:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
        chosen.add(1 + z % (n - 2))
    return sorted(chosen)


def sample(bin, idx):
    h = hashlib.sha256(b"mula sample 1" + struct.pack("<QQ", len(bin), len(idx)))
    for data in (bin, idx):
        for b in blocks(len(data)):
            h.update(hashlib.sha256(data[b * BLOCK : (b + 1) * BLOCK]).digest())
    return h.hexdigest()


def content(size):
    """Bytes that differ from block to block."""
    return (b"".join(struct.pack("<I", i) for i in range(size // 4 + 1)))[:size]


for sizes in ((0, 42), (100000, 16384), (262144, 262145), (5000001, 1234567)):
    print(sizes, sample(content(sizes[0]), content(sizes[1])))
for size in (262144, 262145, 5000001, 8 << 40):
    print(size, blocks(size))
