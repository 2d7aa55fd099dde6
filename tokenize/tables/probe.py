"""Writes classes.tsv and nfc.tsv, the Unicode tables of package tokenize, by asking Hugging Face tokenizers.

    pip install tokenizers==0.23.3
    python probe.py            # writes the two tables beside this script
    python probe.py --check    # fails when the library answers otherwise than the tables say

The library does not publish the tables it was built with, so each fact is drawn from its behaviour:

classes.tsv  The GPT-2 pre-tokenizer leaves "a"+c in one piece when c is a letter (\\p{L}), "1"+c when it is a number
             (\\p{N}) and "."+c when it is neither and not white space; what it cuts off in all three is white space (\\s).

nfc.tsv      The decomposition of c is the answer of the NFD normalizer. c has a non-zero combining class exactly when it
             changes places with a mark of class 1 before it is compared with one of class 240; its number is Python's,
             and is compared with every other class by whether marks change places. A pair composes when the NFC normalizer
             joins it; candidates are the characters that NFC leaves alone and NFD takes apart. Hangul is arithmetic and
             left out. Every code point is then tried before every second half of a pair, and a sample of first halves
             before every code point, to see that no pair is missing.
"""

import argparse
import pathlib
import sys
import unicodedata

import tokenizers
from tokenizers import normalizers, pre_tokenizers

VERSION = "0.23.3"
HERE = pathlib.Path(__file__).parent
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
HANGUL = range(0xAC00, 0xAC00 + 11172)


def classes():
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    found = []
    for c in CODE_POINTS:
        s = chr(c)
        if len(pieces("a" + s)) == 1:
            k = 1
        elif len(pieces("1" + s)) == 1:
            k = 2
        elif len(pieces("." + s)) == 1:
            continue
        else:
            k = 3
        if found and found[-1][1] == c - 1 and found[-1][2] == k:
            found[-1][1] = c
        else:
            found.append([c, c, k])
    out = [
        "# Character classes of tokenizers %s, written by probe.py: first and last code point of a range, and its class:\n"
        "# 1 letter, 2 number, 3 white space. Code points in no range are other.\n" % VERSION
    ]
    out += ["%04X\t%04X\t%d\n" % tuple(r) for r in found]
    return "".join(out)


def nfc_tables():
    nfd, nfc = normalizers.NFD().normalize_str, normalizers.NFC().normalize_str

    # Combining classes. U+0334 has class 1 and U+0345 has class 240, the lowest and the highest.
    low, high = "\u0334", "\u0345"
    ccc = {}
    for c in CODE_POINTS:
        s = chr(c)
        if nfd(s) != s:
            continue
        if nfd("a" + s + low) == "a" + low + s or nfd("a" + high + s) == "a" + s + high or s in (low, high):
            ccc[c] = unicodedata.combining(s)
            assert ccc[c] > 0, hex(c)
    representatives = {}
    for c, k in sorted(ccc.items()):
        representatives.setdefault(k, c)
    for c, k in ccc.items():
        for other, r in representatives.items():
            pair = chr(r) + chr(c)
            want = pair if other <= k else pair[::-1]
            assert nfd("a" + pair)[1:] == want, (hex(c), hex(r))

    decompositions, pairs = {}, {}
    for c in CODE_POINTS:
        s = chr(c)
        d = nfd(s)
        if c in HANGUL or d == s:
            continue
        decompositions[c] = d
        if nfc(s) == s:
            head = nfc(d[:-1])
            assert len(head) == 1 and nfc(head + d[-1]) == s, hex(c)
            pairs[head + d[-1]] = s
    complete(nfc, decompositions, pairs)

    out = [
        "# Data of canonical composition (NFC) as in tokenizers %s, which is that of Unicode 9, written by probe.py. Hangul is left out.\n"
        "# class: first and last code point of a range, combining class\n"
        "# decomposition: code point, full canonical decomposition\n"
        "# pair: first half, second half, composite\n" % VERSION
    ]
    ranges = []
    for c, k in sorted(ccc.items()):
        if ranges and ranges[-1][1] == c - 1 and ranges[-1][2] == k:
            ranges[-1][1] = c
        else:
            ranges.append([c, c, k])
    out += ["class\t%04X\t%04X\t%d\n" % tuple(r) for r in ranges]
    out += ["decomposition\t%04X\t%s\n" % (c, " ".join("%04X" % ord(x) for x in d)) for c, d in sorted(decompositions.items())]
    out += ["pair\t%04X\t%04X\t%04X\n" % (ord(p[0]), ord(p[1]), ord(s)) for p, s in sorted(pairs.items())]
    return "".join(out)


def complete(nfc, decompositions, pairs):
    """Fails when the normalizer joins a pair that is not in pairs and not Hangul's."""

    def expected(a, b):
        if a + b in pairs:
            return pairs[a + b]
        if 0x1100 <= ord(a) < 0x1113 and 0x1161 <= ord(b) < 0x1176:
            return chr(0xAC00 + (ord(a) - 0x1100) * 588 + (ord(b) - 0x1161) * 28)
        if ord(a) in HANGUL and (ord(a) - 0xAC00) % 28 == 0 and 0x11A7 < ord(b) < 0x11C3:
            return chr(ord(a) + ord(b) - 0x11A7)
        return a + b

    def compare(candidates):
        # One call for many pairs: a line break neither composes nor reorders.
        candidates = [(a, b) for a, b in candidates if ord(a) not in decompositions and ord(b) not in decompositions]
        got = nfc("\n".join(a + b for a, b in candidates)).split("\n")
        for (a, b), g in zip(candidates, got, strict=True):
            want = expected(a, b)
            if g != want and g != b + a:  # b + a: two marks that changed places
                sys.exit("U+%04X U+%04X: %r, not %r" % (ord(a), ord(b), g, want))

    everything = [chr(c) for c in CODE_POINTS if c != 10]
    for b in sorted({p[1] for p in pairs} | {"\u1161", "\u1175", "\u11a8", "\u11c2"}):
        compare([(a, b) for a in everything])
    for a in ["A", "e", "\u03b1", "\u0915", "\u09c7", "\u0b47", "\u0cc6", "\u3046", "\u1100", "\uac00", "\U00011131", "\U000115b8"]:
        compare([(a, b) for b in everything])


def main():
    parser = argparse.ArgumentParser(description="Probe the Unicode tables of Hugging Face tokenizers.")
    parser.add_argument("--check", action="store_true", help="compare with the tables instead of writing them")
    args = parser.parse_args()
    if not args.check and tokenizers.__version__ != VERSION:
        sys.exit("this script writes the tables of tokenizers %s; installed is %s" % (VERSION, tokenizers.__version__))
    for name, probe in (("classes.tsv", classes), ("nfc.tsv", nfc_tables)):
        path, text = HERE / name, probe()
        if not args.check:
            path.write_text(text, encoding="ascii")
        elif path.read_text(encoding="ascii") != text:
            sys.exit("%s: tokenizers %s answers otherwise" % (name, tokenizers.__version__))
        print(name, "tokenizers", tokenizers.__version__, "python", sys.version.split()[0], "unicodedata", unicodedata.unidata_version)


if __name__ == "__main__":
    main()
