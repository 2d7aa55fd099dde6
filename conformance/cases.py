"""The configurations on which originals and mula are compared, and the formulas of their inputs.

A case is a dictionary that JSON can represent:

    name         name in the table
    files        {prefix: shape}; lengths(shape) returns the tokens of each document
    data_path    words of --data-path, or None; else per_split: three lists of words or None
    split        --split, None with per_split
    sizes        requested samples in train, valid and test, None for one epoch
    sequence_length, seed, extra_token, keep_partial, surplus, renormalize
    tokenizer    value of "tokenizer" in the descriptions
    choice       why mula refuses a case that the original builds, if it does
    seconds      processor time limit of the original, if it is above the default

A shape has documents, number (of the file, used in the formula), modulus, divisor, zero ([every,
at] or None), type (code of the element type), sequences (sequences a document, 1 if absent) and
lengths (an explicit list instead of the formula).
"""

import os, platform, random, struct

ITEM = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}  # bytes of an element by type code

# The releases of megatron-core whose environments are made by default, and mula's profile of each.
# "-fma": its helpers are compiled with fused multiply-add, which rounds once instead of twice.
PROFILES = {
    "0.4.0": "core-0.4",
    "0.5.0": "core-0.5",
    "0.6.0": "core-0.6",
    "0.7.0": "core-0.7",
    "0.8.0": "core-0.8",
    "0.9.0": "core-0.9",
    "0.10.0": "core-0.10",
    "0.11.0": "core-0.11",
    "0.12.3": "core-0.12",
    "0.13.1": "core-0.13",
    "0.16.1": "core-0.16",
    "0.17.1": "core-0.17",
    "0.18.2": "core-0.18",
    "0.19.2": "core-0.19",
    "0.16.1-fma": "core-0.16",
}


def release(version):
    return tuple(int(part) for part in version.split(".")[:2])


def arithmetic(version):
    return "fused" if version.endswith("-fma") or platform.machine() in ("aarch64", "arm64") else "separate"


def lengths(shape):
    if "lengths" in shape:
        return list(shape["lengths"])
    zero = shape.get("zero")
    out = []
    for d in range(shape["documents"]):
        n = ((7919 * (d + 1) * (shape["number"] + 3)) % shape["modulus"]) // shape["divisor"]
        out.append(0 if zero and d % zero[0] == zero[1] else n)
    return out


def write_idx(prefix, shape):
    """Writes prefix.idx in Megatron-LM's layout (MMIDIDX version 1).

    Returns the number of bytes that prefix.bin must have.
    """
    sizes = lengths(shape)
    item = ITEM[shape.get("type", 8)]
    at, offsets = 0, []
    for n in sizes:
        offsets.append(at)
        at += n * item
    step = shape.get("sequences", 1)
    documents = list(range(0, len(sizes), step)) + [len(sizes)]
    os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
    with open(prefix + ".idx", "wb") as f:
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, shape.get("type", 8), len(sizes), len(documents)))
        f.write(struct.pack(f"<{len(sizes)}i", *sizes))
        f.write(struct.pack(f"<{len(offsets)}q", *offsets))
        f.write(struct.pack(f"<{len(documents)}q", *documents))
    return at


def write_inputs(case, root, tokens=False):
    """Writes the case's files below root.

    The .bin files have the right size. Their ids are only written if tokens is true.
    """
    for prefix, shape in case["files"].items():
        path = os.path.join(root, prefix)
        size = write_idx(path, shape)
        with open(path + ".bin", "wb") as f:
            if tokens:
                import numpy

                assert shape.get("type", 8) == 8
                k = numpy.arange(size // 2, dtype=numpy.uint64)
                f.write((((k * 2654435761 + shape["number"] * 40503) >> 13) % 50257).astype("<u2").tobytes())
            f.truncate(max(size, 1))  # the original cannot map an empty file


# Tokenizer objects: old and new classes, and texts whose JSON needs escapes.
TOKENIZERS = [
    {"class": "_NullTokenizer", "tokenizer_path": [None], "vocab_size": "50304"},
    {"class": "_HuggingFaceTokenizer", "tokenizer_path": ["/models/olmo"]},
    {"class": "_GPT2BPETokenizer", "tokenizer_path": ["vocab.json", "merges.txt"]},
    {
        "class": "_SentencePieceTokenizer",
        "tokenizer_path": ["a \"quoted\" \\ path\n\t\u007f/é😀.model"],
        "vocab_extra_ids": "0",
    },
    {
        "class": "megatron.core.tokenizers.text.text_tokenizer.MegatronTokenizerText",
        "tokenizer_path": "/tok/olmo",
        "vocab_file": "None",
        "merges_file": "None",
        "additional_special_tokens": "[]",
        "use_fast": "True",
        "trust_remote_code": "False",
        "include_special_tokens": "True",
    },
]
SPLITS = [
    "969, 30, 1",
    "969,30,1",
    "99,1,0",
    "98,1,1",
    "70,20,10",
    "0.8,.15,.05",
    "1,0,0",
    "100",
    "0,1,0",
    "7,2,1",
    "90-5-5",
    "1/1/1",
    "80,20",
    "0.9 0.05 0.05",
    "33.3,33.3,33.4",
    "1,1",
    "5,0,5",
    "949,50,1",
]


def tokens_of_splits(case):
    """Returns the tokens of each split of each file, None if the split is not built.

    With them, most random cases avoid upstream's endless loop.
    """
    import re

    values = [float(v) for v in re.findall(r"[.0-9]+", case["split"])]
    values = [v / sum(values) for v in values + [0.0] * (3 - len(values))]
    edges = [0.0, values[0], values[0] + values[1], values[0] + values[1] + values[2]]
    out = []
    for shape in case["files"].values():
        n = lengths(shape)
        out.append([sum(n[round(a * len(n)) : round(b * len(n))]) if b > a else None for a, b in zip(edges, edges[1:])])
    return out


def base(**more):
    case = dict(
        files={},
        data_path=None,
        per_split=None,
        split=None,
        sizes=[300, 40, 10],
        sequence_length=64,
        seed=1234,
        extra_token=True,
        keep_partial=False,
        surplus=0.005,
        renormalize=False,
        tokenizer=TOKENIZERS[0],
    )
    case.update(more)
    return case


def shape(number, documents, modulus=997, divisor=4, zero=(7, 3), type=8, **more):
    return dict(
        number=number,
        documents=documents,
        modulus=modulus,
        divisor=divisor,
        zero=list(zero) if zero else None,
        type=type,
        **more,
    )


def weight(r):
    kind = r.randrange(8)
    if kind == 0:
        return str(r.randrange(1, 100))
    if kind == 1:
        return f"{r.random():.3f}"
    if kind == 2:
        return repr(r.random())
    if kind == 3:
        return f"{r.uniform(0.1, 10):.2e}"
    if kind == 4:
        return "0.1"
    if kind == 5:
        return f".{r.randrange(1, 9)}"
    if kind == 6:
        return repr(r.lognormvariate(0, 2))
    return "1" + "_0" * r.randrange(3)


def blend_words(r, prefixes, weighted):
    if not weighted:
        return list(prefixes)
    equal = weight(r) if r.random() < 0.2 else None
    out = []
    for p in prefixes:
        out += [equal or weight(r), p]
    return out


def random_case(number, version):
    """Returns a random configuration with the settings that this release of Megatron core has."""
    at = release(version)
    # Every case has its own generator, so that a setting missing in a release does not change the
    # other cases.
    r = random.Random(f"mula conformance {number}")
    while True:
        count = r.choice([1, 1, 2, 3, 3, 4, 5, 7, 8, 12, 20, 40]) if number % 40 else 150
        names = [
            r.choice(["", "sub/", "a/b/"]) + r.choice(["f", "web-", "tök_", "p.q_"]) + str(i) for i in range(count)
        ]
        files = {}
        for i, name in enumerate(names):
            documents = r.choice([60, 100, 250, 1000, 3000]) + r.randrange(50)
            if count > 20:
                documents = 60 + r.randrange(50)
            every = r.choice([0, 0, 2, 3, 7, 10])
            files[name] = shape(
                (i + r.randrange(100)) % 30,
                documents,
                r.choice([37, 251, 997, 7907, 65521]),
                r.choice([1, 2, 4, 7, 30]),
                (every, r.randrange(every)) if every else None,
                r.choice([8, 8, 8, 4, 1, 2, 3, 5, 6, 7]),
                sequences=r.choice([1, 1, 1, 2, 5]),
            )
        weighted = r.random() < (0.7 if count > 1 else 0.3)
        total = max(1, sum(sum(lengths(s)) for s in files.values()))
        length = r.choice([1, 2, 3, 4, 7, 16, 64, 100, 128, 512, 1000, 2048, 4096])
        while total / length > 100_000:
            length *= 4
        case = base(
            name=f"random {number}",
            files=files,
            sequence_length=length,
            seed=r.choice([0, 1, 42, 1234, 4294967295, r.randrange(2**32), r.randrange(2**32)]),
            extra_token=r.random() < 0.8,
            keep_partial=r.random() < 0.2,
            surplus=r.choice([0.005, 0.005, 0.005, 0.02, 0.0, 0.3]),
            renormalize=r.random() < 0.4,
            tokenizer=r.choice(TOKENIZERS),
        )
        if r.random() < 0.2:
            case["per_split"] = [
                blend_words(r, r.sample(names, r.randrange(1, min(count, 6) + 1)), weighted)
                if r.random() < 0.8
                else None
                for _ in range(3)
            ]
            if not any(case["per_split"]):
                continue
        else:
            case["data_path"] = blend_words(r, names, weighted)
            case["split"] = (
                r.choice(SPLITS)
                if r.random() < 0.8
                else f"{r.randrange(1, 1000)},{r.randrange(1, 300)},{r.randrange(1, 100)}"
            )
        epochs = r.choice([0.02, 0.3, 0.9, 1, 1.05, 1.5, 1.9, 2.3, 3.85, 6])
        samples = total / length
        sizes = [int(samples * epochs * f * r.uniform(0.9, 1.1)) for f in (0.9, 0.08, 0.02)]
        if r.random() < 0.1:
            sizes[r.randrange(3)] = 0
        nothing = [r.random() < 0.4 for _ in range(3)]
        break_rules = r.random() < 0.01
        if at >= (0, 7) and not weighted:
            sizes = [None if none else n for none, n in zip(nothing, sizes)]
        if sum((n or 0) for n in sizes) > 150_000:
            continue
        case["sizes"] = sizes
        if case["split"] and not break_rules:
            for tokens in tokens_of_splits(case):
                if any(t == 0 for t in tokens):
                    break
            else:
                tokens = None
            if tokens is not None:
                continue
        return restrict(case, version)


def restrict(case, version):
    """Returns the case without the settings that a release does not have."""
    at = release(version)
    case = dict(case)
    if at < (0, 7):
        # These releases read the last sample of a blend after building it, with an attention mask
        # of sequence_length² numbers.
        case.update(extra_token=True, keep_partial=False, sequence_length=min(case["sequence_length"], 1024))
        if case["name"].startswith("random"):  # they need a size, and it must not be 0
            case["sizes"] = [n or 20 for n in case["sizes"]]
        pairs = lambda words: (
            words
            if words is None or len(words) == 1 or is_weighted(words)
            else [w for i, p in enumerate(words) for w in (str(i + 1), p)]
        )
        case["data_path"] = pairs(case["data_path"])
        if case["per_split"]:
            case["per_split"] = [pairs(words) for words in case["per_split"]]
    if at not in ((0, 9), (0, 10)):
        case["renormalize"] = False
    if at < (0, 13):
        case["surplus"] = 0.005
    return case


def is_weighted(words):
    try:
        return len(words) % 2 == 0 and all(isinstance(float(w), float) for w in words[::2])
    except ValueError:
        return False


def standard():
    """Returns the inputs in docs/formats: three files of 40, 25 and 60 documents."""
    return {"f0": shape(0, 40), "f1": shape(1, 25), "f2": shape(2, 60)}


def edge_cases():
    """Returns edge cases, including cases in which originals crash or never end."""
    three = ["0.5", "f0", "0.2", "f1", "0.3", "f2"]
    out = []

    def add(name, **settings):
        out.append(
            base(
                name=name,
                **{"files": standard(), "split": None if settings.get("per_split") else "70,20,10", **settings},
            )
        )

    add("A: three weighted files", data_path=three)
    add("B: exhaustive", data_path=["f0", "f1", "f2"], sizes=[None] * 3)
    add("C: no weights, sizes given", data_path=["f0", "f1", "f2"], sizes=[60, 10, 5])
    add("D: no extra token", data_path=three, extra_token=False)
    add("E: partial validation, last document empty", data_path=three, keep_partial=True)
    add("E1: partial validation, seed 7", data_path=three, keep_partial=True, seed=7)
    add("E2: partial validation, seed 42", data_path=three, keep_partial=True, seed=42)
    add("E3: seed 42", data_path=three, seed=42)
    add("F: one file", data_path=["f0"])
    add("G: per-split blends", per_split=[three, ["f1"], ["f0", "f2", "f1"]])
    add("partial validation without extra token", data_path=three, keep_partial=True, extra_token=False)
    add("partial validation, exhaustive", data_path=["f0", "f1", "f2"], sizes=[None] * 3, keep_partial=True, seed=7)
    add(
        "per-split blends, exhaustive and partial",
        per_split=[["f0", "f1"], ["f0", "f2"], None],
        sizes=[None] * 3,
        keep_partial=True,
        seed=5,
    )
    add("per-split: one weighted prefix is a plain dataset", per_split=[["3", "f0"], ["0.5", "f1"], None])
    add("per-split: train alone", per_split=[["f0", "f1"], None, None], sizes=[50, 0, 0])
    add("one prefix with a weight", data_path=["3", "f0"])
    add("the same prefix twice", data_path=["0.5", "f0", "0.5", "f0"])
    add("one file, one epoch", data_path=["f0"], sizes=[None] * 3)
    add("sizes 0", data_path=three, sizes=[300, 0, 0])
    add("sizes 0, one file", data_path=["f0"], sizes=[0, 0, 0])
    add("size 1", data_path=three, sizes=[1, 1, 1])
    add("no sample fits", data_path=["f0"], files={"f0": shape(0, 40, 31, 7)}, sequence_length=4096, sizes=[None] * 3)
    add(
        "a file without samples in a blend of given size",
        data_path=["f0", "t"],
        files={"f0": shape(0, 40), "t": shape(5, 40, 31, 7)},
        sizes=[60, 10, 5],
        sequence_length=128,
    )
    add(
        "a file without samples in an exhaustive blend",
        data_path=["f0", "t"],
        files={"f0": shape(0, 40), "t": shape(5, 40, 31, 7)},
        sizes=[None] * 3,
        sequence_length=128,
    )
    add(
        "a file without samples, weighted",
        data_path=["1", "f0", "1", "t"],
        files={"f0": shape(0, 40), "t": shape(5, 40, 31, 7)},
        sizes=[60, 10, 5],
        sequence_length=128,
    )
    add("empty test split", data_path=["f0"], files={"f0": shape(0, 100)}, split="969,30,1")
    add(
        "no documents in the test split, one epoch",
        data_path=["f0"],
        files={"f0": shape(0, 100)},
        split="969,30,1",
        sizes=[None] * 3,
    )
    add(
        "no documents in the validation split, one epoch, partial",
        data_path=["f0"],
        files={"f0": shape(0, 100)},
        split="990,1,9",
        sizes=[None] * 3,
        keep_partial=True,
    )
    add(
        "no documents in the test split, no samples, no extra token",
        data_path=["f0"],
        files={"f0": shape(0, 100)},
        split="969,30,1",
        sizes=[10, 5, 0],
        extra_token=False,
    )
    add(
        "no documents in a split of a blend of no samples",
        data_path=["1", "f0", "1", "f1"],
        files={"f0": shape(0, 100), "f1": shape(1, 100)},
        split="969,30,1",
        sizes=[10, 5, 0],
        extra_token=False,
    )
    add(
        "no documents in the test split, one epoch, sequences of one token",
        data_path=["f0"],
        files={"f0": shape(0, 100)},
        split="969,30,1",
        sizes=[None] * 3,
        sequence_length=1,
    )
    add(
        "documents without tokens, one epoch",
        data_path=["f0"],
        files={"f0": {"number": 0, "documents": 10, "lengths": [5, 9, 80, 70, 60, 50, 40, 0, 0, 0], "type": 8}},
        sizes=[None] * 3,
    )
    add(
        "a split of empty documents",
        data_path=["f0"],
        files={"f0": {"number": 0, "documents": 10, "lengths": [5, 9, 80, 70, 60, 50, 40, 0, 0, 0], "type": 8}},
    )
    add(
        "an empty split in the second file",
        data_path=["1", "f0", "1", "f1"],
        files={"f0": shape(0, 400), "f1": shape(1, 20)},
        split="969,30,1",
    )
    add("no documents", data_path=["f0"], files={"f0": {"number": 0, "documents": 0, "lengths": [], "type": 8}})
    add(
        "one document",
        data_path=["f0"],
        files={"f0": {"number": 0, "documents": 1, "lengths": [1000], "type": 8}},
        split="1,0,0",
        sizes=[40, 0, 0],
    )
    add(
        "one token a document",
        data_path=["f0"],
        files={"f0": {"number": 0, "documents": 300, "lengths": [1] * 300, "type": 8}},
        sequence_length=1,
        sizes=[700, 60, 30],
    )
    add(
        "sequence length 1 without extra token",
        data_path=["f0"],
        files={"f0": shape(0, 60, 31, 7)},
        sequence_length=1,
        extra_token=False,
        sizes=[500, 60, 30],
    )
    add(
        "first and last documents empty",
        data_path=["f0"],
        files={"f0": {"number": 0, "documents": 12, "lengths": [0, 0, 4, 4, 3, 0, 9, 1, 0, 7, 5, 0], "type": 8}},
        sequence_length=4,
        split="1,0,0",
        sizes=[None, 0, 0],
    )
    add(
        "exactly N*S+1 tokens",
        data_path=["f0"],
        files={"f0": {"number": 0, "documents": 4, "lengths": [10, 20, 30, 5], "type": 8}},
        sequence_length=16,
        split="1,0,0",
        sizes=[4, 0, 0],
    )
    add(
        "exactly N*S tokens, extra token",
        data_path=["f0"],
        files={"f0": {"number": 0, "documents": 4, "lengths": [10, 20, 30, 4], "type": 8}},
        sequence_length=16,
        split="1,0,0",
        sizes=[4, 0, 0],
    )
    add(
        "exactly N*S tokens, no extra token",
        data_path=["f0"],
        files={"f0": {"number": 0, "documents": 4, "lengths": [10, 20, 30, 4], "type": 8}},
        sequence_length=16,
        split="1,0,0",
        sizes=[4, 0, 0],
        extra_token=False,
    )
    for n in (145, 155, 160, 172, 173, 174, 200, 230):
        add(f"last epoch apart or not: {n} samples", data_path=["f0"], split="1,0,0", sizes=[n, 0, 0])
    add("many epochs", data_path=["f1"], sizes=[20000, 900, 100])
    for text in (
        "0,1,0",
        "0,0,1",
        "1,0,1",
        "100",
        "1,1",
        "0.5,0.25,0.25",
        "1e1,1,1",
        "969, 30, 1",
        "98-1-1",
        " 7 , 2 , 1 ",
        "0.1,0.2,0.7",
        "1,1e-9,0",
    ):
        add(f"split {text!r}", data_path=["f0"], files={"f0": shape(0, 1200)}, split=text, sizes=[900, 90, 9])
    for text in ("0,0,0", "a", "", "1,2,3,4", "1.2.3,1,1", "."):
        add(f"split {text!r}", data_path=["f0"], split=text)
    add("weight 0 first", data_path=["0", "f0", "1", "f1", "2", "f2"])
    add("weight 0 last", data_path=["1", "f0", "2", "f1", "0", "f2"])
    add("all weights 0", data_path=["0", "f0", "0", "f1"])
    add(
        "a negative weight",
        data_path=["-1", "f0", "3", "f1"],
        choice="releases up to 0.6 draw nothing from that file, and give the others more than asked for",
    )
    add("weight inf", data_path=["inf", "f0", "3", "f1"])
    add("weight nan", data_path=["nan", "f0", "3", "f1"])
    add("weights with underscores, exponents and signs", data_path=["1_0", "f0", "+2.5E0", "f1", "3e-1", "f2"])
    add("very unequal weights", data_path=["1e-12", "f0", "1", "f1", "1e-6", "f2"])
    add("very unequal weights, no surplus", data_path=["1e-12", "f0", "1", "f1", "1e-6", "f2"], surplus=0.0)
    add("weights .1 .2 .7", data_path=[".1", "f0", ".2", "f1", ".7", "f2"], sizes=[1000, 100, 24])
    add("weights without sizes", data_path=three, sizes=[None] * 3)
    add("weights, one size missing", data_path=three, sizes=[300, None, 10])
    names = {name: shape(i, 60 + i) for i, name in enumerate(["1", "2", "a", "b", "c", "x"])}
    add(
        "all prefixes, although the first weights are numbers",
        data_path=["1", "a", "2", "b", "x", "c"],
        files=names,
        choice="the weights would silently become names of files",
    )
    add("a weight after a prefix", data_path=["x", "a", "2", "b"], files=names)
    add("an odd number of words", data_path=["1", "a", "2"], files=names)
    add("no words", data_path=[], files=names)
    add("a missing file", data_path=["1", "f0", "1", "nowhere"])
    add("seed 2^32-1", data_path=three, seed=2**32 - 1)
    add("seed 2^32", data_path=three, seed=2**32)
    add("seed -1", data_path=three, seed=-1)
    add("sequence length 0", data_path=three, sequence_length=0)
    add("several sequences a document", data_path=["f0"], files={"f0": shape(0, 90, sequences=7)})
    for code in ITEM:
        add(f"element type {code}", data_path=["f0"], files={"f0": shape(0, 60, type=code)})
    add(
        "200 equal weights",
        files={f"e{i}": shape(i, 30) for i in range(200)},
        data_path=[w for i in range(200) for w in ("1", f"e{i}")],
        sizes=[5000, 800, 300],
    )
    add(
        "200 files, no weights",
        files={f"e{i}": shape(i, 60) for i in range(200)},
        data_path=[f"e{i}" for i in range(200)],
        sizes=[3000, None, None],
        sequence_length=32,
    )
    add("renormalized weights", data_path=three, renormalize=True)
    add("surplus 0", data_path=three, surplus=0.0)
    add("surplus 1", data_path=three, surplus=1.0)
    # Single precision in the number of samples of a kept partial validation sequence: a multiple of
    # 4 away from 2^25, rounded to even.
    for name, more in (("too few", 3), ("too many", 7)):
        add(
            f"single precision counts {name} samples",
            data_path=["f0"],
            split="0,1,0",
            sequence_length=2,
            sizes=[0, None, 0],
            keep_partial=True,
            files={"f0": {"number": 0, "documents": 3, "lengths": [2**24, 2**24, more], "type": 8}},
        )
    # The same, with an empty document at the end for one of the seeds: up to 0.9, two rows have the
    # offset -1.
    for seed in range(3):
        add(
            f"single precision counts too many, an empty document, seed {seed}",
            data_path=["f0"],
            split="0,1,0",
            sequence_length=8947862,
            sizes=[0, None, 0],
            keep_partial=True,
            seed=seed,
            files={"f0": {"number": 0, "documents": 2, "lengths": [134217930, 0], "type": 8}},
        )
    return out


def large_cases():
    """Returns cases of millions of documents and samples, larger than caches and chunks."""
    big = lambda number, documents: shape(number, documents, 251, 4, (10, 3))
    one, more = {"f0": big(0, 3_000_000)}, {"f0": big(0, 1_500_000), "f1": big(1, 400_000), "f2": big(2, 900_000)}
    weighted = ["0.5", "f0", "0.2", "f1", "0.3", "f2"]
    return [
        base(
            name="large: one epoch",
            files=one,
            data_path=["f0"],
            split="98,1,1",
            sequence_length=16,
            sizes=[None] * 3,
            seconds=120,
        ),
        base(
            name="large: three epochs, no extra token",
            files=one,
            data_path=["f0"],
            split="90,9,1",
            sequence_length=16,
            sizes=[13_000_000, 1_500_000, 99],
            extra_token=False,
            seconds=120,
        ),
        base(
            name="large: last epoch apart",
            files=one,
            data_path=["f0"],
            split="1,0,0",
            sequence_length=32,
            sizes=[3_400_000, 0, 0],
            seed=99,
            seconds=120,
        ),
        base(
            name="large: three weighted files",
            files=more,
            data_path=weighted,
            split="98,1,1",
            sequence_length=32,
            sizes=[5_000_000, 10_000, 100],
            seconds=120,
        ),
        base(
            name="large: exhaustive, partial",
            files=more,
            data_path=["f0", "f1", "f2"],
            split="70,29,1",
            sequence_length=32,
            sizes=[None] * 3,
            keep_partial=True,
            seed=7,
            seconds=120,
        ),
    ]


def cases(version, count=200, large=False):
    """Returns all cases for a release of Megatron core, random cases first."""
    return [random_case(i, version) for i in range(count)] + [
        restrict(c, version) for c in edge_cases() + (large_cases() if large else [])
    ]
