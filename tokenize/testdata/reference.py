"""Tokenizes many documents with Hugging Face tokenizers, for TestReference to compare with.

    pip install tokenizers==0.23.3
    python reference.py --output DIR --documents 20000 --texts FILE... --tokenizers tokenizer.json...
    TOKENIZE_REFERENCE=DIR go test -run TestReference -v ./tokenize

The texts (plain, or .jsonl, .json.gz, .jsonl.zst with a "text" field) are compared whole; as many documents again as asked for are put together at
random from cuts of the texts, special tokens, contractions, white space, marks and stray code points. DIR gets documents.bin and, for each
tokenizer and treatment of special tokens, its tokenizer.json and the ids: a little-endian uint32 count before each document's bytes or ids.
"""

import argparse
import gzip
import json
import pathlib
import random
import shutil
import struct
import subprocess

import tokenizers

PIECES = [
    " ", "  ", "   ", " " * 7, " " * 24, " " * 25, " " * 60, "\t", "\n", "\r", "\r\n", "\n\n", "\n \n", " \n", "\n ", "\u00a0", "\u3000", "\u2003",
    "\u200b", "\v", "\f", "\u0085", "\u2028", "\u1680", "\ufeff", "\x00", "\x1f", "\x1c", "\u180e", "don't", "I'LL", "we've", "'s", "'S", "\u2019s",
    "x'd", "'", "''", "''t", "'re", "'RE", "'Ve", "'\u017f", "'\u212a", "'\u017fs", "\u017f", "\u0130", "\u212a", "\u212b", "\ufb01", "\ufb05",
    "123", "1234567", "0", "\u0661\u0662", "\u00bd", "\u2167", "\u0e51\u0e52\u0e53\u0e54", "foo_bar", "XXIII", "000", "!!!", "-----", "-->", "=" * 70, "...",
    "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\u4f60\u597d", "\u3053\u3093\u306b\u3061\u306f", "\ud55c\uad6d\uc5b4",
    "e\u0301", "\u00e9", "a\u0323\u0307", "a\u0307\u0323", "\u0915\u094d\u0937", "\u0b47\u0b3e", "\u1100\u1161\u11a8", "\uac00\u11a8", "\u0344",
    "\u0f71\u0f72", "\u1e9b\u0323", "\u0958", "\u2126", "\U0001d15e", "\u0f73", "\u05e9\u05c1\u05bc",
    "<|endoftext|>", "<|padding|>", "|||EMAIL_ADDRESS|||", "|||IP_ADDRESS|||", "<|endof", "text|>", "<|end<|endoftext|>", "||||||EMAIL_ADDRESS|||", "<|extra_id_0|>",
    "<|im_start|>", "<|fim_prefix|>", "\u01c5", "\u02b0", "a" * 63, "ab" * 40, "\u00df\u1e9e", "\ufffd", "\U0010ffff", "\ue000",
]
MARKS = [chr(c) for c in list(range(0x300, 0x370)) + list(range(0x591, 0x5C8)) + [0x93C, 0x94D, 0x3099, 0x309A, 0x1AB0, 0x20D0, 0x1D165, 0x0F71, 0x0F72, 0x0F74, 0x0345]]


def texts(path):
    raw = pathlib.Path(path).read_bytes()
    if path.endswith(".gz"):
        raw = gzip.decompress(raw)
    elif path.endswith(".zst"):
        raw = subprocess.run(["zstd", "-dc", path], capture_output=True, check=True).stdout
    if ".json" in path:
        return [json.loads(line)["text"] for line in raw.splitlines()]
    return [raw.decode("utf-8", "replace")]


def nasty(r, corpus):
    parts = []
    for _ in range(r.randint(1, 6)):
        k = r.random()
        if k < 0.4:
            t = r.choice(corpus)
            at = r.randrange(len(t))
            parts.append(t[at : at + r.randint(1, 120)])
        elif k < 0.8:
            parts.extend(r.choice(PIECES) for _ in range(r.randint(1, 6)))
        elif k < 0.87:
            parts.append("".join(r.choice("aeiouXS\u0391 ") + "".join(r.choices(MARKS, k=r.randint(0, 40 if r.random() < 0.1 else 4))) for _ in range(r.randint(1, 5))))
        elif k < 0.92:
            parts.append("".join(chr(c) for c in (r.randrange(0x110000) for _ in range(r.randint(1, 20))) if not 0xD800 <= c < 0xE000))
        elif k < 0.96:
            parts.append("".join(chr(r.randrange(0x20, 0x3100)) for _ in range(r.randint(1, 20))))
        else:
            parts.append("".join(r.choice("abeinorst-=01 ") for _ in range(r.randint(1, 300))))
    return "".join(parts)


def write(path, items):
    with open(path, "wb") as f:
        for item in items:
            f.write(struct.pack("<I", len(item)))
            f.write(item if isinstance(item, bytes) else struct.pack("<%dI" % len(item), *item))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--output", type=pathlib.Path, required=True)
    p.add_argument("--documents", type=int, default=20000)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--texts", nargs="+", required=True)
    p.add_argument("--tokenizers", nargs="+", required=True)
    args = p.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    r = random.Random(args.seed)
    corpus = [t for path in args.texts for t in texts(path) if t]
    documents = corpus + [nasty(r, corpus) for _ in range(args.documents)]
    write(args.output / "documents.bin", [d.encode() for d in documents])
    print("tokenizers", tokenizers.__version__, len(documents), "documents", sum(len(d.encode()) for d in documents), "bytes")
    for path in map(pathlib.Path, args.tokenizers):
        shutil.copy(path, args.output / path.name)
        for specials in ("text", "tokens"):
            t = tokenizers.Tokenizer.from_file(str(path))
            t.encode_special_tokens = specials == "text"
            ids = []
            for at in range(0, len(documents), 1000):
                ids += [e.ids for e in t.encode_batch_fast(documents[at : at + 1000], add_special_tokens=True)]
            write(args.output / ("%s.%s.ids" % (path.stem, specials)), ids)
            print(path.name, specials, sum(map(len, ids)), "ids")


if __name__ == "__main__":
    main()
