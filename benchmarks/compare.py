#!/usr/bin/env python3
"""Compares mula with its peers on this machine: the same work, alternately, in one run.

Prints the best and the median of each and their ratio.

    make build && make quickstart            # makes the corpus and the tokenizer
    pip install tokenizers zstandard
    python benchmarks/compare.py quickstart [--rounds 5]

tokenize   the quickstart's documents -> ids, with decompression and JSON, one thread each
           mula tokenize --workers 1                     (also writes the shard and its hashes)
           Hugging Face tokenizers, encode_batch_fast    (ids stay in memory)

Training is compared by training.py.
"""

import argparse, gzip, io, json, os, pathlib, statistics, subprocess, sys, tempfile, time

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("quickstart", type=pathlib.Path)
ap.add_argument("--rounds", type=int, default=5)
args = ap.parse_args()
mula = str(pathlib.Path(__file__).parent.parent / "bin" / "mula")
corpus = sorted(p for p in (args.quickstart / "corpus").rglob("*") if p.is_file() and not p.name.startswith("."))


def documents():
    import zstandard

    for path in corpus:
        with open(path, "rb") as f:
            raw = gzip.open(f) if path.suffix == ".gz" else zstandard.ZstdDecompressor().stream_reader(f)
            for line in io.TextIOWrapper(raw, encoding="utf-8"):
                yield json.loads(line)["text"]


def report(name, unit, mine, theirs, peer):
    """Prints mine and theirs: units per second, one number a round. Higher is better."""
    print(f"{name:10} {'best':>10} {'median':>10}")
    for label, runs in (("mula", mine), (peer, theirs)):
        print(f"  {label:40} {max(runs):10.2f} {statistics.median(runs):10.2f} {unit}")
    print(
        f"  {'ratio':40} {max(mine) / max(theirs):10.2f} {statistics.median(mine) / statistics.median(theirs):10.2f}\n"
    )


def tokenize():
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    import tokenizers

    tok = tokenizers.Tokenizer.from_file(str(args.quickstart / "tokenizer.json"))
    megabytes = sum(len(t.encode()) for t in documents()) / 1e6
    mine, theirs, ids = [], [], {}
    with tempfile.TemporaryDirectory() as tmp:
        for _ in range(args.rounds):
            t = time.perf_counter()
            out = subprocess.run(
                [
                    mula,
                    "tokenize",
                    "--tokenizer",
                    args.quickstart / "tokenizer.json",
                    "--workers",
                    "1",
                    "--specials",
                    "tokens",
                    "--no-eod",
                    "--output",
                    f"{tmp}/x",
                    "--json",
                    *corpus,
                ],
                check=True,
                capture_output=True,
                env={**os.environ, "GOMAXPROCS": "1"},
            )
            mine.append(megabytes / (time.perf_counter() - t))
            ids["mula"] = json.loads(out.stdout)["tokens"]
            t = time.perf_counter()
            n, batch = 0, []

            def flush():
                return sum(len(e.ids) for e in tok.encode_batch_fast(batch, add_special_tokens=False))

            for text in documents():
                batch.append(text)
                if len(batch) == 256:
                    n += flush()
                    batch.clear()
            n += flush()
            theirs.append(megabytes / (time.perf_counter() - t))
            ids["peer"] = n
    assert ids["mula"] == ids["peer"], ids
    print(f"{megabytes:.1f} MB of text, {ids['mula']:,} ids on both sides")
    report("tokenize", "MB/s", mine, theirs, f"tokenizers {tokenizers.__version__}, one thread")


tokenize()
