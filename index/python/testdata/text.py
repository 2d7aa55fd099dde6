"""Prints text.json, results of Python: repr, float, json.dumps(indent=4), json.loads.

    python3 text.py > text.json

Rules that the Go test repeats make the numbers and strings from splitmix64. Their results are
stored as hashes.
"""

import hashlib
import json
import math
import struct
import sys

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


def from_bits(b):
    return struct.unpack("<d", struct.pack("<Q", b))[0]


def bits(v):
    return struct.unpack("<Q", struct.pack("<d", v))[0]


def number(i):
    """Returns doubles of all magnitudes.

    They include powers of two and of ten and their neighbours, short decimals and whole numbers.
    """
    d = Draws(i)
    u = d.u64()
    kind = i % 6
    if kind == 0:
        return from_bits(u)
    if kind == 1:
        return from_bits(u % 2047 << 52)  # powers of two, and 0
    if kind == 2:
        return from_bits(u % (1 << 52))  # subnormal
    if kind == 3:
        return from_bits(bits(float(f"1e{u % 632 - 323}")) + d.u64() % 3 - 1)
    if kind == 4:
        return float(u % 1000000) / float(f"1e{d.u64() % 23}")
    return float(u >> (d.u64() % 64))


ALPHABET = [
    "0",
    "1",
    "2",
    "5",
    "9",
    "0",
    "7",
    ".",
    "_",
    "e",
    "E",
    "+",
    "-",
    " ",
    "inf",
    "nan",
    "Infinity",
    "\t",
    "\u0663",
    "\uff11",
    "x",
    "\u00a0",
    "\x1c",
    "e-3",
    "1",
    "3",
]


def string(i):
    d = Draws(1 << 40 | i)
    return "".join(ALPHABET[d.u64() % len(ALPHABET)] for _ in range(1 + d.u64() % 7))


def said(s):
    try:
        v = float(s)
    except ValueError:
        return "-"
    return "nan" if math.isnan(v) else f"{bits(v):016x}"


def blocks(words, size=100):
    words = list(words)
    return [hashlib.md5("\n".join(words[i : i + size]).encode()).hexdigest()[:8] for i in range(0, len(words), size)]


floats = [
    0.0,
    -0.0,
    1.0,
    0.1,
    0.0001,
    0.00001,
    0.00009999999999999999,
    1e15,
    1e16,
    9999999999999998.0,
    123456789012345680.0,
    1e22,
    1e23,
    5e-324,
    2.2250738585072014e-308,
    1.7976931348623157e308,
    0.9500000000000001,
    1.5e-07,
    2**-44,
    9007199254740993.0,
    1 / 3,
    math.pi,
    1e100,
    math.inf,
    -math.inf,
    math.nan,
    -1.5,
    0.1 + 0.2,
]
strings = [
    "",
    "0",
    "1_0",
    "1__0",
    "_1",
    "1_",
    "1_.0",
    "1._0",
    "1_0.0_1e1_0",
    "1e_5",
    "1e5_",
    "inf",
    "-inf",
    "+INF",
    "iNfInItY",
    "infinit",
    "nan",
    "-nan",
    "NaN",
    "nan(1)",
    " 1 ",
    "\t1\n",
    "1 2",
    "1.",
    ".5",
    ".",
    "+.5",
    "-",
    "+-1",
    "1e",
    "1e+",
    "1e400",
    "-1e400",
    "1e-400",
    "0x10",
    "0x1p3",
    "1d5",
    "1,5",
    "\u0661\u0662",
    "\uff11.\uff15",
    "\U0001d7d9\U0001d7e2",
    "\u00b2",
    "1\u2003",
    "\u20031",
    "1\x00",
    "\x1f1",
    "1\u200b",
    "9007199254740993",
    "0.1000000000000000055511151231257827021181583404541015625",
    "2.2250738585072011e-308",
    "4.9e-324",
    "2e-324",
    "1" * 400,
    "1e1000000000000",
    "--1",
    "i",
    "in_f",
    "\u0967e\u0967",
    "1\u06f5",
]
values = [
    None,
    True,
    False,
    0,
    -1,
    0.0,
    -0.0,
    1e400,
    -1e400,
    9223372036854775807,
    -9223372036854775808,
    "",
    [],
    {},
    [[]],
    [{}],
    {"": None},
    [1, 1.0, "1", [1, [2, [3, {"a": [4]}]]]],
    {
        "class": "GPTDataset",
        "num_samples": None,
        "split_matrix": [[0, 0.969], [0.969, 0.999], None],
        "tokenizer": {"class": "_NullTokenizer", "tokenizer_path": [None], "vocab_size": "50304"},
    },
    {"z": 1, "a": 2, "m": {"z": 1, "a": 2}},
    "\"\\/\b\f\n\r\t",
    "".join(map(chr, range(0x00, 0x100))),
    "\u2028\u2029\ufeff\ufffe\uffff\U00010000\U0010ffff\U0001f600",
    "\ud800",
    "\udfff",
    "\udc00\ud800",
    "\ud83d",
    "a\udcffb",
    "\ud83d\ud83d\ude00",
    {"gr\u00f6\u00dfe\x7f": "\x00"},
    [0.1, 1e16, 1e-5, 123456789.0],
    ["\ud7ff\ue000"],
]
texts = [
    "",
    " ",
    "nul",
    "null null",
    "[1,]",
    "[,1]",
    "{\"a\":1,}",
    "{a:1}",
    "{'a':1}",
    "[1 2]",
    "01",
    "-01",
    "-",
    "+1",
    "1.",
    ".5",
    "1e",
    "1e+",
    "0.5",
    "-0",
    "-0.0",
    "1E5",
    "1e-5",
    "1E+400",
    "NaN",
    "-NaN",
    "Infinity",
    "-Infinity",
    "nan",
    "\"\x01\"",
    "\"\\x41\"",
    "\"\\u12\"",
    "\"\\u12g4\"",
    "\"\\u00E9\"",
    "\"\\/\"",
    "\"abc",
    "\"\\",
    "\"\\ud83d\\ude00\"",
    "\"\\ud83d\"",
    "\"\\ude00\\ud83d\"",
    "\"\\ud83dx\\ude00\"",
    "\"\\ud83d\\n\\ude00\"",
    "\t[ 1 ,\r\n2 ] ",
    "\x0b1",
    "{\"a\":1,\"b\":2,\"a\":3}",
    "[true,false,null]",
    "tru",
    "\"\x7f\"",
    "\"gr\u00f6\u00dfe\"",
    "{\"a\" : {\"b\" : [ ] } }",
    "[1]x",
    "{\"a\" 1}",
    "{\"a\":}",
    "[",
    "{",
    "{\"a\"",
    "\ufeff1",
    "1\x00",
    "[\"a\",]",
    "\"\\u+123\"",
    "\"\\u 123\"",
    "--1",
    "1.0e5",
    "1_0",
    "-Infinityx",
    "{\"a\":1 \"b\":2}",
    "\"\\ud83d\\u0041\"",
    "\"\\ud83d\\ud83d\\ude00\"",
]


def loads(t):
    try:
        return json.dumps(json.loads(t), indent=4)
    except (ValueError, RecursionError):
        return None


json.dump(
    {
        "python": sys.version.split()[0],
        "numbers": blocks(repr(number(i)) for i in range(60000)),
        "strings": blocks(said(string(i)) for i in range(40000)),
        "floats": [[f"{bits(v):016x}", repr(v)] for v in floats],
        "read": [[s, said(s)] for s in strings],
        "rounded": [
            [f"{bits(v):016x}", round(v)]
            for v in [
                0.0,
                0.5,
                1.5,
                2.5,
                -0.5,
                -1.5,
                -2.5,
                0.49999999999999994,
                4503599627370497.5,
                1e15 + 0.5,
                96.9,
                99.99999999999999,
            ]
        ],
        "values": [[json.dumps(v), json.dumps(v, indent=4)] for v in values],
        "texts": [[t, loads(t)] for t in texts],
    },
    sys.stdout,
    indent=0,
)
print()
