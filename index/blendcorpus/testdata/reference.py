"""The rules of BlendCorpus and Megatron-DeepSpeed in numpy and Python, written without the Go code.

Prints random configurations, each with the manifest of its cache (md5sum * | md5sum):

    python3 reference.py > reference.json
"""

import hashlib
import io
import json
import math
import random
import sys

import numpy as np


def md5(data):
    return hashlib.md5(data if isinstance(data, bytes) else data.encode()).hexdigest()


def npy(a):
    f = io.BytesIO()
    np.save(f, a)
    return f.getvalue()


def tokens(f, documents):
    return [0 if d % 7 == 3 else 7919 * (d + 1) * (f + 3) % 997 // 4 for d in range(documents)]


def split_bounds(text, n):
    if "," in text:
        v = [float(s) for s in text.split(",")]
    elif "/" in text:
        v = [float(s) for s in text.split("/")]
    else:
        v = [float(text)]
    v = (v + [0.0, 0.0])[:3]
    total = 0.0
    for s in v:
        total += s
    edges = [0]
    for s in v:
        edges.append(edges[-1] + int(round(s / total * float(n))))
    over = edges[-1] - n
    return [edges[0]] + [e - over for e in edges[1:]]


class Cache:
    def __init__(self):
        self.files = {}

    def add(self, text, parts):
        h = md5(text)
        if h + ".dsc" in self.files:
            return
        self.files[h + ".dsc"] = text.encode()
        for end, array in parts().items():
            self.files[h + end] = npy(array)

    def manifest(self):
        return md5("".join(f"{md5(self.files[n])}  {n}\n" for n in sorted(self.files)))


def file_text(c, prefix, name, n, epochs):
    return (
        f"GPT Dataset\n\nData prefix {prefix}\nDataset name {name}\nNumber of samples {n}\nNumber of epochs {epochs}\n"
        f"Sequence length {c['seq']}\nRandom seed {c['seed']}\nSplit {c['split']}\n"
    )


def add_file(cache, c, prefix, name, lengths, first, end, n):
    """Builds one split of one token file. Returns its description and its number of samples."""
    S, T = c["seq"], sum(lengths[first:end])
    if T == 0:
        raise Refused  # the original never ends
    epochs = 1
    while (epochs * T - 1) // S < n:
        epochs += 1
    if name == "train" and c["epochs"]:
        epochs = c["epochs"]
    text = file_text(c, prefix, name, n, epochs)
    samples = (epochs * T - 1) // S

    def parts():
        rng = np.random.RandomState(c["seed"])
        separate = False
        if epochs > 1:
            before = ((epochs - 1) * T - 1) // S
            if not 0 <= n - before <= (T - 1) // S + 1:
                raise Refused
            separate = n - before < int(0.80 * ((T - 1) // S))
        docs = np.arange(first, end, dtype=np.int32)
        if separate:
            a, b = np.tile(docs, epochs - 1), docs.copy()
            rng.shuffle(a)
            rng.shuffle(b)
            doc = np.concatenate((a, b))
        else:
            doc = np.tile(docs, epochs)
            rng.shuffle(doc)
        rows, at, offset = [(0, 0)], 0, 0
        for _ in range(samples):
            left = S + 1
            while left:
                have = lengths[doc[at]] - offset
                left -= have
                if left <= 0:
                    offset += left + have - 1
                    left = 0
                else:
                    at, offset = at + 1, 0
            rows.append((at, offset))
        cut = before if separate else samples
        a = np.arange(cut, dtype=np.uint32)
        rng.shuffle(a)
        b = np.arange(cut, samples, dtype=np.uint32)
        if len(b):
            rng.shuffle(b)
        return {
            "_doc_idx.npy": doc,
            "_sample_idx.npy": np.array(rows, dtype=np.int64),
            "_shuffle_idx.npy": np.concatenate((a, b)),
        }

    cache.add(text, parts)
    return text, samples


def loop(weights, size):
    index, number, count = np.zeros(size, np.int64), np.zeros(size, np.int64), [0] * len(weights)
    weights = [float(w) for w in weights]
    for t in range(size):
        x = max(float(t), 1.0)
        errors = [w * x - float(k) for w, k in zip(weights, count)]
        i = errors.index(max(errors))
        index[t], number[t] = i, count[i]
        count[i] += 1
    return index, number, count


def blend_parts(weights, size):
    index, number, _ = loop(weights, size)
    return {"_index.npy": index, "_sample_index.npy": number}


class Refused(Exception):
    """The original, or training with its cache, stops or hangs."""


def manifest(c, lenient=False):
    cache = Cache()
    names = ["train", "valid", "test"]
    total = 0.0
    for f in c["files"]:
        total += f["weight"]
    weights = [f["weight"] / total for f in c["files"]]
    asked = [[int(math.ceil(n * w * 1.005)) for n in c["samples"]] for w in weights]
    flat = c["files"][0]["corpus"] == ""
    for k, name in enumerate(names):
        size = sum(a[k] for a in asked)
        if not flat and (int(c["split"].split(",")[k]) <= 0 or size == 0):
            continue
        texts, have = [], []
        for f, a in zip(c["files"], asked):
            lengths = tokens(f["number"], f["documents"])
            edges = split_bounds(c["split"], len(lengths))
            if edges[k + 1] <= edges[k]:
                if not (flat or lenient):
                    raise Refused
                texts.append(None)
                have.append(0)
                continue
            text, samples = add_file(cache, c, f["prefix"], name, lengths, edges[k], edges[k + 1], a[k])
            texts.append(text)
            have.append(samples)
        if flat:
            if not any(texts):
                continue
            if not all(texts) or size == 0:
                raise Refused
            w = np.array(weights, dtype=np.float64)
            entries = texts
            limits = have
        else:
            entries, limits, w = [], [], []
            for corpus in sorted(set(f["corpus"] for f in c["files"])):
                members = [i for i, f in enumerate(c["files"]) if f["corpus"] == corpus]
                counts = np.array([asked[i][k] for i in members])
                K = int(counts.sum())
                text = f"{corpus}\n {K}"
                if c["profile"] == "blendcorpus":
                    text += f" + blend_sample_in_corpus: {c['blend']}+ shuffle_sample_in_corpus: {c['shuffle']}"
                if c["blend"]:
                    drawn = loop(counts / K, K)[2] if K else [0] * len(members)
                    cache.add(text, lambda: blend_parts(counts / K if K else counts, K))
                else:
                    drawn = counts
                    cache.add(
                        text,
                        lambda: {
                            "_index.npy": np.repeat(np.arange(len(members), dtype=np.int64), counts),
                            "_sample_index.npy": np.concatenate([np.arange(n, dtype=np.int64) for n in counts]),
                        },
                    )
                if not lenient and any(d > have[i] for d, i in zip(drawn, members)):
                    raise Refused
                entries.append(
                    "CorpusDataset:"
                    + "".join(c["files"][i]["prefix"] + "," for i in members)
                    + f"-{K}-{c['seq']}{c['seed']}"
                )
                limits.append(K)
                w.append(float(K) / (size if c["profile"] == "blendcorpus" else sum(a[0] for a in asked)))
            w = np.array(w, dtype=np.float64)
        w /= np.sum(w)
        text = (
            "Blendable dataset\n\nDatasets:\n" + "".join(e + "\n\n" for e in entries) + f"Weights: {w}\nSize: {size}\n"
        )
        if not lenient and any(d > limit for d, limit in zip(loop(w, size)[2], limits)):
            raise Refused
        cache.add(text, lambda: blend_parts(w, size))
    return cache.manifest(), len(cache.files)


def configuration(rng):
    files = []
    flat = rng.random() < 0.25
    for i in range(rng.choice([1, 2, 3, 5, 9, 25])):
        files.append(
            {
                "weight": rng.choice([1.0, 2.0, 0.1, 3.5, rng.random(), rng.random() * 1e-3, rng.randrange(1, 1000)]),
                "prefix": f"d{i % 3}/f{i}",
                "corpus": "" if flat else rng.choice(["web", "wiki", "Code", "\u00e9t\u00e9", "a", "books"]),
                "number": i,
                "documents": rng.randrange(12, 80),
            }
        )
    return {
        "profile": rng.choice(["blendcorpus", "megatron-deepspeed"]),
        "files": files,
        "split": rng.choice(
            ["70, 20, 10", "969, 30, 1", "50,50,0", "100,0,0", "34, 33, 33"]
            + (["0.8,.15,.05", "7/2/1", "1", "2/1"] if flat else [])
        ),
        "samples": [rng.randrange(1, 700), rng.choice([0, 16, 33, 100]), rng.choice([16, 33, 5])],
        "seq": rng.choice([16, 64, 100]),
        "seed": rng.choice([0, 1234, 123, 4294967295, 7]),
        "blend": rng.random() < 0.75,
        "shuffle": rng.random() < 0.3,
        "epochs": 0,
    }


if __name__ == "__main__":
    rng, out = random.Random(20260823), []
    h = {
        "profile": "blendcorpus",
        "split": "70, 20, 10",
        "samples": [320, 16, 16],
        "seq": 64,
        "seed": 1234,
        "blend": True,
        "shuffle": False,
        "epochs": 0,
        "files": [
            {"weight": w, "prefix": f"f{i}", "corpus": c, "number": i, "documents": n}
            for i, (w, c, n) in enumerate([(2.0, "web", 40), (1.0, "wiki", 25), (3.5, "web", 60)])
        ],
    }
    assert manifest(h) == ("e9d689bdcab49866a956b79285286dee", 54)  # vector H, which the original code wrote
    configurations = [configuration(rng) for _ in range(32)] + [dict(h, epochs=1), dict(h, epochs=3)]
    for c in configurations:
        for c["lenient"] in (False, True):
            try:
                c["manifest"], c["count"] = manifest(c, c["lenient"])
            except Refused:
                c["manifest"], c["count"] = "", 0
            out.append(dict(c))
            if c["manifest"]:
                break
    json.dump(
        {"python": sys.version.split()[0], "numpy": np.__version__, "configurations": out},
        sys.stdout,
        separators=(",", ":"),
    )
    print()
