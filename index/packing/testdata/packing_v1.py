"""The packing of docs/formats/packing.md, written from that page, not from the Go code.

    python3 packing_v1.py > vectors.json
"""

import hashlib
import json
import struct
import sys

OPEN, PIECES = 1024, 262144


def pieces_of(start, n, c):
    while n > c:
        yield start, c
        start, n = start + c, n - c
    if n:
        yield start, n


def pack(documents, c):
    """Returns samples, each a list of (token, tokens); documents are (token, tokens)."""
    done, opened, held = [], [], 0  # opened: [room, pieces] in the order of their opening; held: pieces in them
    for start, length in documents:
        for token, n in pieces_of(start, length, c):
            if n == c:
                done.append([(token, n)])
                continue
            best = min((s for s in opened if s[0] >= n), key=lambda s: s[0], default=None)  # the first of the least
            if best is None:
                best = [c, []]
                opened.append(best)
            best[0] -= n
            best[1].append((token, n))
            held += 1
            least = min(opened, key=lambda s: s[0])
            if least[0] == 0 or len(opened) > OPEN or held > PIECES:
                done.append(least[1])
                held -= len(least[1])
                opened = [s for s in opened if s is not least]
    return done + [s[1] for s in opened]


TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    TABLE.append(byte)


def crc32c(data):
    crc = 0xFFFFFFFF
    for b in data:
        crc = crc >> 8 ^ TABLE[(crc ^ b) & 255]
    return crc ^ 0xFFFFFFFF


def index_file(shards, length, held_token):
    """Returns the name and bytes of the file; shards are (hash, [tokens of documents])."""
    c, documents, at = length + 1, [], 0
    for _, lengths in shards:
        for n in lengths:
            if n:
                documents.append((at, n))
            at += n
    if held_token < at:
        held_token = max(start for start, _ in documents if start <= held_token)
    training = pack([d for d in documents if d[0] < held_token], c)
    held = pack([d for d in documents if d[0] >= held_token], c)
    samples = training + held
    rows = [[struct.pack("<QI", *piece) for piece in s] for s in samples]
    table, first = [], 0
    for number, pieces in enumerate(rows):
        entry = struct.pack("<QI", first, len(pieces))
        table.append(entry + struct.pack("<I", crc32c(struct.pack("<Q", number) + entry + b"".join(pieces))))
        first += len(pieces)
    key = b"mula packing 1" + struct.pack("<QQQ", length, held_token, len(shards))
    for digest, lengths in shards:
        key += struct.pack("<Q", sum(lengths)) + digest.encode()
    key = hashlib.sha256(key).digest()
    end = (
        struct.pack("<7Q", length, len(samples), len(held), len(documents), sum(n > c for _, n in documents), first, at)
        + key
    )
    end += struct.pack("<I", crc32c(end))
    data = b"mula packing 1\n\0" + b"".join(row for r in rows for row in r) + b"".join(table) + end
    return key[:16].hex() + ".packing", data, samples


def lengths(count, seed, most, shape):
    """A generator of 31-bit numbers, which the Go test repeats."""
    out, state = [], seed
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        n = state >> 8
        out.append(
            {
                "uniform": n % (most + 1),
                "small": n % (1 + n // 64 % (most + 1)),
                "large": most - n % max(1, most // 2),
                "ones": 1,
            }[shape]
        )
    return out


def main():
    cases = []
    for length, held, sources in [
        (7, 1.0, [(40, 1, 12, "uniform")]),
        (16, 0.75, [(60, 2, 20, "uniform"), (1, 3, 3, "uniform"), (50, 4, 90, "small")]),
        (63, 1.0, [(0, 1, 1, "uniform"), (300, 5, 200, "small"), (200, 6, 64, "uniform")]),
        (1, 0.5, [(30, 7, 5, "uniform")]),
        (4095, 0.99, [(1500, 8, 4095, "large"), (800, 9, 2500, "uniform")]),  # more than 1,024 are open at a time
        (
            2**20,
            1.0,
            [(5, 10, 2**20, "large"), (270000, 11, 1, "ones"), (20, 12, 2**19, "uniform")],
        ),  # more than 262,144 pieces
    ]:
        shards = [("%064x" % i, lengths(*s)) for i, s in enumerate(sources)]
        total = sum(sum(s[1]) for s in shards)
        name, data, samples = index_file(shards, length, int(held * total))
        cases.append(
            {
                "sequence_length": length,
                "held_token": int(held * total),
                "sources": sources,
                "name": name,
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "samples": len(samples),
                "first": [s[:8] for s in samples[:12]],
                "last": [s[:8] for s in samples[-3:]],
            }
        )
    json.dump({"python": sys.version.split()[0], "cases": cases}, sys.stdout, separators=(",", ":"))
    print()


if __name__ == "__main__":
    main()
