#!/usr/bin/env python3
"""Compares the speed of mula's encoder with Hugging Face tokenizers and tiktoken: the same documents, in turns, in one run. Prints Markdown tables.

    conformance/environments.sh DIR tokenizers-0.23.3
    DIR/tokenizers-0.23.3/bin/python benchmarks/encoding.py --tokenizers tokenizer.json... [--corpus FOLDER] [--rounds 3] [--megabytes 4] [--threads 1 2]

Texts: English (the corpus's wiki, pes2o and open-web-math; without a corpus the comments of Go's sources), the corpus whole, and a mix of 24 languages, code
and HTML, with its Japanese and Chinese, its Go sources and its HTML also alone. Each is cut to --megabytes, and encoded in documents of 4 kB and whole.

mula         benchmarks/encodeloop, one encoder a thread, ids of a document after the other into one slice
tokenizers   encode_batch_fast and encode_batch (which also makes offsets), RAYON_NUM_THREADS as many as threads
tiktoken     encode_ordinary_batch with its vocabulary taken from a tokenizer.json whose pattern is cl100k's

Every side starts with empty caches in a process of its own and is timed without loading and without reading; the second pass is "warm". MB are 10^6 bytes.

--pipeline FILE... instead compares whole commands, decompression and JSON included: `mula tokenize` (writes and hashes a shard) and `dolma tokens` and datatrove's DocumentTokenizer on the same files, --threads
processes each. --python names the interpreters of the environments that have them (conformance/environments.sh DIR layouts dolma-1.2.1).
"""
import argparse, json, os, pathlib, statistics, struct, subprocess, sys, tempfile, time

here = pathlib.Path(__file__).resolve().parent
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


# ---- the other sides, each in a process of its own: inside.py MODE TOKENIZER DOCUMENTS THREADS, prints the seconds of two passes and the ids

def read(path):
    raw, at, out = pathlib.Path(path).read_bytes(), 0, []
    while at < len(raw):
        n, = struct.unpack_from("<I", raw, at)
        out.append(raw[at + 4:at + 4 + n].decode())
        at += 4 + n
    return out


def inside(side, tokenizer, path, threads):
    documents = read(path)
    if side == "tiktoken":
        import tiktoken
        encoding = tiktoken_of(tokenizer)
        def encode():
            return sum(map(len, encoding.encode_ordinary_batch(documents, num_threads=threads)))
    else:
        import tokenizers
        encoder = tokenizers.Tokenizer.from_file(tokenizer)
        batch = getattr(encoder, side)
        def encode():
            count = 0
            for i in range(0, len(documents), 1000):
                count += sum(len(e) for e in batch(documents[i:i + 1000], add_special_tokens=False))
            return count
    for _ in range(2):
        began = time.perf_counter()
        ids = encode()
        print(f"{time.perf_counter() - began:.6f} {ids}")


def tiktoken_of(path):
    """The tiktoken encoding with the vocabulary of a byte-level tokenizer.json: its ids are ranks."""
    import tiktoken
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte = {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in shown)}
    file = json.loads(pathlib.Path(path).read_text())
    added = {a["content"] for a in file["added_tokens"]}
    ranks = {bytes(byte[c] for c in token): i for token, i in file["model"]["vocab"].items() if token not in added}
    return tiktoken.Encoding("shared", pat_str=CL100K, mergeable_ranks=ranks, special_tokens={})


def has_cl100k(path):
    return CL100K in json.dumps(json.loads(pathlib.Path(path).read_text())["pre_tokenizer"], ensure_ascii=False).replace("\\\\", "\\")


# ---- encoding

def measure(side, program, tokenizer, path, threads):
    """Seconds of the first and the second pass, and the ids."""
    env = {**os.environ, "RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true", "GOMAXPROCS": str(threads)}
    if side == "mula":
        line = [program, "-tokenizer", tokenizer, "-workers", str(threads), "-rounds", "2"]
    else:
        line = [sys.executable, str(pathlib.Path(__file__).resolve()), "--inside", side, tokenizer, path, str(threads)]
    with open(path, "rb") as documents:
        done = subprocess.run(line, stdin=documents, env=env, check=True, capture_output=True, text=True)
    first, second = (row.split() for row in done.stdout.splitlines())
    return float(first[0]), float(second[0]), int(second[1])


def encoding(args, tmp):
    sys.path.append(str(here.parent / "conformance"))
    import texts
    program = f"{tmp}/encodeloop"
    subprocess.run(["go", "build", "-o", program, "./benchmarks/encodeloop"], cwd=here.parent, check=True, env={**os.environ, "CGO_ENABLED": "0"})
    size = int(args.megabytes * 1e6)
    go = texts.go({".go"})
    found = {}
    if args.corpus:
        found["English"] = texts.corpus(args.corpus, ("wiki", "pes2o", "open-web-math"))
        found["the corpus"] = texts.corpus(args.corpus)
    else:
        found["English"] = texts.comments(go)
    found["mix of languages, code, HTML"] = texts.mix()
    found["Japanese, Chinese"] = texts.catalogues("ja") + texts.catalogues("zh_CN")
    found["Go sources"] = go
    found["HTML"] = texts.html(size * 2)
    print(f"MB/s, first pass (warm pass), medians of {args.rounds} rounds in turns. tokenizers and tiktoken: versions below.\n")
    print("| tokenizer | texts | MB | documents | threads | mula | encode_batch_fast | encode_batch | tiktoken | mula / fastest tokenizers | mula / tiktoken |")
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for tokenizer in args.tokenizers:
        sides = ["mula", "encode_batch_fast", "encode_batch"] + (["tiktoken"] if has_cl100k(tokenizer) else [])
        for name, whole in found.items():
            whole = texts.spread(whole, size)
            for form, documents in (("4 kB", texts.pieces(whole)), ("whole", whole)):
                if form not in args.documents:
                    continue
                path = f"{tmp}/documents"
                texts.write(path, documents)
                megabytes = sum(len(d.encode()) for d in documents) / 1e6
                for threads in args.threads:
                    runs, ids = {side: [] for side in sides}, {}
                    for _ in range(args.rounds):
                        for side in sides:
                            first, second, ids[side] = measure(side, program, str(tokenizer), path, threads)
                            runs[side].append((megabytes / first, megabytes / second))
                    median = {side: [statistics.median(r[i] for r in runs[side]) for i in (0, 1)] for side in sides}
                    if len({ids[s] for s in sides if s != "tiktoken"}) != 1:  # tiktoken matches no added tokens
                        sys.exit(f"{tokenizer}, {name}: the numbers of ids differ: {ids}")
                    cell = lambda side: f"{median[side][0]:.1f} ({median[side][1]:.1f})" if side in median else ""
                    ratio = lambda *others: f"{median['mula'][0] / max(median[o][0] for o in others):.1f}" if others[0] in median else ""
                    print(f"| {pathlib.Path(tokenizer).stem} | {name} | {megabytes:.1f} | {form} | {threads} | **{cell('mula')}** | {cell('encode_batch_fast')} | {cell('encode_batch')} "
                          f"| {cell('tiktoken')} | {ratio('encode_batch_fast', 'encode_batch')} | {ratio('tiktoken')} |", flush=True)
    import importlib.metadata
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("tokenizers", "tiktoken"))
    print(f"\n{versions}, Python {sys.version.split()[0]}")


# ---- whole commands

DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
if __name__ == "__main__":
    folder, out, tokenizer, workers = sys.argv[1:]
    LocalPipelineExecutor([JsonlReader(folder), DocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token="<|endoftext|>", shuffle_documents=False)],
                          tasks=int(workers), workers=int(workers), logging_dir=out + "/logs").run()
"""


def pipeline(args, tmp):
    tokenizer = str(args.tokenizers[0].resolve())
    folder = pathlib.Path(tmp, "inputs")
    folder.mkdir()
    for i, f in enumerate(args.pipeline):
        (folder / f"{i:03}-{f.name}").symlink_to(f.resolve())
    inputs = sorted(str(p) for p in folder.iterdir())
    bytes_of_text = 0
    sys.path.append(str(here.parent / "conformance"))
    import texts
    for f in args.pipeline:
        bytes_of_text += sum(len(t.encode()) for t in texts.corpus(f.parent, (f.name,)))
    file = json.loads(args.tokenizers[0].read_text())
    eos = next(a["id"] for a in file["added_tokens"] if a["content"] == "<|endoftext|>")
    dtype = "uint16" if len(file["model"]["vocab"]) < 1 << 16 else "uint32"  # as all three choose it; dolma wants to be told
    have = lambda packages: next((str(p) for p in args.python if subprocess.run([p, "-c", f"import {packages}"], capture_output=True).returncode == 0), None)
    print(f"Files to shards, {len(inputs)} files, {bytes_of_text / 1e6:.1f} MB of text; seconds, medians of {args.rounds} rounds in turns.\n")
    print("| threads | mula tokenize | dolma tokens | datatrove | mula / best |\n|---|---|---|---|---|", flush=True)
    for threads in args.threads:
        lines = {"mula": lambda out: [str(args.mula), "tokenize", "--tokenizer", tokenizer, "--workers", str(threads), "--output", f"{out}/x", *inputs]}
        if dolma := have("dolma"):
            lines["dolma"] = lambda out: [str(pathlib.Path(dolma).parent / "dolma"), "tokens", "--documents", *inputs, "--destination", out, "--tokenizer.name_or_path", tokenizer,
                                          "--tokenizer.eos_token_id", str(eos), "--processes", str(threads), "--dtype", dtype, "--seed", "1"]
        if datatrove := have("datatrove, orjson, tokenizers"):
            script = pathlib.Path(tmp, "datatrove_run.py")
            script.write_text(DATATROVE)
            lines["datatrove"] = lambda out: [datatrove, str(script), str(folder), out, tokenizer, str(threads)]
        runs = {name: [] for name in lines}
        for _ in range(args.rounds):
            for name, line in lines.items():
                with tempfile.TemporaryDirectory(dir=tmp) as out:
                    began = time.perf_counter()
                    done = subprocess.run(line(out), capture_output=True, text=True, env={**os.environ, "GOMAXPROCS": str(threads), "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
                    if done.returncode:
                        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
                    runs[name].append(time.perf_counter() - began)
        median = {name: statistics.median(r) for name, r in runs.items()}
        others = [m for name, m in median.items() if name != "mula"]
        ratio = f"{min(others) / median['mula']:.1f}" if others else ""
        cell = lambda name: f"{median[name]:.2f} ({bytes_of_text / 1e6 / median[name]:.1f} MB/s)" if name in median else "not installed"
        print(f"| {threads} | **{cell('mula')}** | {cell('dolma')} | {cell('datatrove')} | {ratio} |", flush=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--tokenizers", nargs="+", type=pathlib.Path, required=True)
    ap.add_argument("--corpus", type=pathlib.Path)
    ap.add_argument("--megabytes", type=float, default=4)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    ap.add_argument("--documents", nargs="+", choices=["4 kB", "whole"], default=["4 kB", "whole"])
    ap.add_argument("--pipeline", nargs="+", type=pathlib.Path)
    ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin" / "mula")
    ap.add_argument("--python", nargs="+", type=pathlib.Path, default=[pathlib.Path(sys.executable)], help="of the environments with dolma and datatrove")
    args = ap.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        pipeline(args, tmp) if args.pipeline else encoding(args, tmp)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        main()
