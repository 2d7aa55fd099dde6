"""Writes graphemes.tsv: where Hugging Face tokenizers cuts text into grapheme clusters.

    pip install tokenizers==0.23.3
    python graphemes.py            # writes the table into this folder, in a minute
    python graphemes.py --check    # fails if the library's results differ from the table

Only the Precompiled normalizer uses grapheme clusters (the crate unicode-segmentation, for Unicode
Standard Annex 29). It looks up a cluster of less than 6 bytes as a unit. The result replaces the
complete cluster, even if only a prefix matches. Of a longer cluster it looks up each character. If
a map replaces all characters by "!", the number of "!" shows where clusters end.
"""

import array
import pathlib
import struct
import sys

import tokenizers
from tokenizers import normalizers

VERSION = "0.23.3"
HERE = pathlib.Path(__file__).parent
KA, VIRAMA, ACUTE, ZWJ = "\u0915", "\u094d", "\u0301", "\u200d"


def charsmap(mapping):
    """Returns SentencePiece's precompiled charsmap for a dict of texts.

    It is a double-array trie, then the replacements, each with a zero byte at its end.
    """
    trie, texts, places = {}, bytearray(), {}
    for key, value in mapping.items():
        if value not in places:
            places[value] = len(texts)
            texts += value.encode() + b"\0"
        node = trie
        for byte in key.encode():
            node = node.setdefault(byte, {})
        node[-1] = places[value]
    # The children of a node have their own block of 256 units. Nodes with only a value share a
    # block for each value.
    units, leaves = array.array("I", [0] * 256), {}
    todo = [(trie, 0, 0)]
    while todo:
        node, at, label = todo.pop()
        value = node.pop(-1, None)
        if not node and value in leaves:
            block = leaves[value]
        else:
            block = len(units)
            units.extend([0] * 256)
            if value is not None:
                units[block] = value | 1 << 31
            if not node:
                leaves[value] = block
        offset = at ^ block
        if offset >= 1 << 21:
            assert offset % 256 == 0
            offset = (offset >> 8) | 1 << 21  # bit 9 is the flag, the bits above are the offset
            units[at] = (offset & ~(1 << 21)) << 10 | 1 << 9
        else:
            units[at] = offset << 10
        units[at] |= (1 << 8 if value is not None else 0) | label
        for byte, child in node.items():
            todo.append((child, block ^ byte, byte))
    return struct.pack("<I", 4 * len(units)) + units.tobytes() + bytes(texts)


def lines(name, points):
    """Returns the code points as ranges, in lines of limited length."""
    runs = []
    for c in points:
        if runs and runs[-1][1] == c - 1:
            runs[-1][1] = c
        else:
            runs.append([c, c])
    out, line = [], name + "\t"
    for a, b in runs:
        item = "%X" % a if a == b else "%X-%X" % (a, b)
        if len(line) + len(item) > 120:
            out.append(line)
            line = name + "\t"
        line += item if line.endswith("\t") else " " + item
    return "".join(x + "\n" for x in out + [line])


def probe():
    found = {
        name: []
        for name in ("control", "extend", "spacing", "prepend", "pictographic", "consonant", "linker", "conjunct")
    }
    fixed = "b\u00a9\u2600" + KA + VIRAMA + ACUTE + ZWJ
    for first in range(0, 0x110000, 0x4000):
        points = [c for c in range(first, first + 0x4000) if not 0xD800 <= c < 0xE000 and c not in (0, ord("a"))]
        normalize = normalizers.Precompiled(charsmap({c: "!" for c in fixed + "".join(map(chr, points))})).normalize_str
        for point in points:
            c = chr(point)
            if normalize("b" + c) == "!":
                # Both kinds join the previous character. In emoji sequences only "extend" does.
                found[
                    "extend" if normalize("\u00a9" + c + ZWJ + "\u2600" + ACUTE).count("!") == 5 else "spacing"
                ].append(point)
            elif normalize(c + "a") == "!":
                found["prepend"].append(point)
            elif normalize(c + ACUTE + ACUTE) == "!!":
                found["control"].append(point)
            elif normalize("\u00a9" + ZWJ + c) == "!!!":
                found["pictographic"].append(point)
            elif normalize(c + VIRAMA + KA + ACUTE) == "!!!!":
                found["consonant"].append(point)
            if normalize(KA + c + KA + ACUTE) == "!!!!" and c != ZWJ:
                found["linker"].append(point)
            elif normalize(KA + VIRAMA + c + KA + ACUTE) == "!!!!!":
                found["conjunct"].append(point)
    head = "# Where tokenizers %s cuts text into grapheme clusters, written by graphemes.py\n" % VERSION
    return head + "".join(lines(name, points) for name, points in found.items())


def main():
    assert tokenizers.__version__ == VERSION, tokenizers.__version__
    table = probe()
    if "--check" in sys.argv:
        sys.exit(table != (HERE / "graphemes.tsv").read_text())
    (HERE / "graphemes.tsv").write_text(table)


if __name__ == "__main__":
    main()
