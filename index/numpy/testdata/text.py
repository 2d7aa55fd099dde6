"""Prints text.json, results of numpy: sums, the text of arrays, .npy headers.

    python3 text.py > text.json

Rules that the Go test repeats make the vectors from splitmix64. Their results are stored as
checksums.
"""

import io
import json
import math
import struct
import sys
import zlib

import numpy as np

M64 = (1 << 64) - 1


class Draws:
    def __init__(self, seed):
        self.s = seed

    def u64(self):
        self.s = (self.s + 0x9E3779B97F4A7C15) & M64
        z = self.s
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
        return z ^ (z >> 31)

    def below(self, n):
        return self.u64() % n

    def unit(self):
        return (self.u64() >> 11) / 9007199254740992.0


def from_bits(b):
    return struct.unpack("<d", struct.pack("<Q", b))[0]


def bits(v):
    return struct.unpack("<Q", struct.pack("<d", v))[0]


POWERS = [float(f"1e{k}") for k in range(-12, 13)]
ODD = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, 123.456, 5e-324, 1.7976931348623157e308]


def vector(i):
    d = Draws(i)
    kind = i % 9
    n = 1 + d.below(40)
    if d.below(50) == 0:
        n = 990 + d.below(20)
    out = []
    for _ in range(n):
        if kind == 0:
            v = d.unit()
        elif kind == 1:
            v = float(1 + d.below(1000))
        elif kind == 2:
            v = d.unit() * POWERS[d.below(25)]
        elif kind == 3:
            v = from_bits(d.u64())
            if not math.isfinite(v):
                v = 0.5
        elif kind == 4:
            v = float(d.below(1 << (1 + d.below(40))))
        elif kind == 5:
            v = (d.unit() - 0.5) * float(d.below(3))
        elif kind == 6:
            v = float(d.below(100000)) / POWERS[12 + d.below(10)]
        elif kind == 7:
            v = ODD[d.below(9)]
        else:
            v = from_bits((1 + d.below(2046)) << 52)
        out.append(v)
    if kind == 1:
        total = 0.0
        for v in out:
            total += v
        out = [v / total for v in out]
    return out


def header(descr, shape):
    f = io.BytesIO()
    if math.prod(shape) < 100:
        np.save(f, np.zeros(shape, dtype=descr))
        return f.getvalue()[: 10 + struct.unpack("<H", f.getvalue()[8:10])[0]]
    np.lib.format.write_array_header_1_0(f, {"descr": descr, "fortran_order": False, "shape": shape})
    return f.getvalue()


def runs(values):
    """Run lengths: [[bits, count], …]."""
    out = []
    for v in values:
        b = f"{bits(v):016x}"
        if out and out[-1][0] == b:
            out[-1][1] += 1
        else:
            out.append([b, 1])
    return out


clear = [
    [],
    [1.0],
    [0.0],
    [-0.0],
    [0.0, -0.0, 0.0],
    [0.25, 0.75],
    [1 / 3, 2 / 3],
    [0.6, 0.15, 0.1, 0.06, 0.05, 0.03, 0.01],
    [5.0, 1e-05],
    [0.999, 0.00099, 1e-05],
    [0.05] * 20,
    [1e8],
    [99999999.0],
    [99999999.99999999],
    [1e-4],
    [9.999e-5],
    [1.0, 1000.0],
    [1.0, 1000.0000000000001],
    [1e-100, 1e-5],
    [1e100],
    [1e-300, 1e300],
    [5e-324, 1.23456789e-300],
    [5e-324],
    [0.000123456785, 0.1],
    [0.123456785, 0.5],
    [0.00390625 + 2**-30],
    [0.0009765625] * 3,
    [1.5, 22.25, 333.125],
    [math.nan],
    [math.inf, 1.0],
    [-math.inf, 1.0],
    [math.nan, math.inf, -math.inf],
    [1e-20, math.nan],
    [0.1] * 1000,
    [0.1] * 1001,
    [1.0, 2.0, 3.0] + [0.5] * 994 + [4.0, 5.0, 60.0],
    [1e-9] + [0.5] * 2000 + [1.0],
    [1.0] * 4 + [1e-9] + [0.5] * 1000,
    [0.1234567891] * 7,
    [-1.0, 0.5],
    [12345.678] * 12,
    [1e16],
    [2.0**53, 1.0],
    [0.1 + 0.2],
    [0.84520124123, 0.15479875877],
]

sums = []
for n in list(range(0, 300)) + [511, 512, 513, 1000, 1023, 1024, 1025, 4095, 4096, 8191, 8192, 8193, 10000, 20011]:
    d = Draws(1000003 * n + 7)
    a = np.array([d.unit() - 0.5 for _ in range(n)], dtype=np.float64)
    sums.append(f"{bits(float(np.sum(a))):016x}")

json.dump(
    {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "sums": sums,
        "texts": [f"{zlib.crc32(str(np.array(vector(i), dtype=np.float64)).encode()):08x}" for i in range(4500)],
        "clear": [{"runs": runs(c), "text": str(np.array(c, dtype=np.float64))} for c in clear],
        "headers": [
            {"descr": d, "shape": list(s), "text": header(d, s).decode("latin1")}
            for d in ["<i2", "<i4", "<i8", "<u4"]
            for s in [
                (0,),
                (1,),
                (99,),
                (4294967296,),
                (1000000001,),
                (9223372036854775807,),
                (1, 2),
                (0, 2),
                (17, 2),
                (994000001, 2),
                (4611686018427387903, 2),
            ]
        ],
    },
    sys.stdout,
    separators=(",", ":"),
)
print()
