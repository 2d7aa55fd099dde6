#!/usr/bin/env python3
"""Compares the speed of mula's encoder with other tokenizer libraries.

All encode the same documents, alternately, in one run. Prints Markdown tables.

    conformance/environments.sh DIR tokenizers-0.23.3 encoders
    DIR/encoders/bin/python benchmarks/encoding.py --tokenizers tokenizer.json...
        --python DIR/encoders/bin/python DIR/tokenizers-0.23.3/bin/python
        [--corpus FOLDER] [--rounds 3] [--megabytes 4] [--threads 1 2] [--texts NAME...]

Texts: English (the corpus's wiki, pes2o and open-web-math; without a corpus the comments of Go's
sources), the complete corpus, and a mix of 24 languages, code and HTML. The mix's Japanese and
Chinese, its Go sources and its HTML are also measured separately, and random texts with hardly a
word that occurs twice. Each text is cut to --megabytes,
and encoded both in documents of 4 kB and in complete documents.

The script measures all libraries that the interpreters of --python have installed, each with its
fastest function for bulk encoding:

mula        benchmarks/encodeloop, a Go program: one encoder a thread, one output slice per encoder
mula (Python)
            mula.Tokenizer of clients/python: encode_batch, all documents in one call; needs numpy
            and pyarrow, and the program of --mula
tokenizers  encode_batch_fast of 0.23.3, encode_batch of 1.0, 1,000 documents a call
fastokens   encode_batch_flat, all documents in one call
gigatoken   encode_batch, all documents in one call
tiktoken    encode_ordinary_batch, for a vocabulary whose pattern is cl100k's

Every side runs in a separate process with empty caches. The process is bound to as many cores as it
has threads. Loading and reading are not timed. A run has two passes over the documents: the first
starts with empty caches, the second is "warm". The ids of all sides are hashed and compared, except
tiktoken's, which does not match added tokens. MB are 10^6 bytes.

--pipeline FILE... compares complete commands instead, with decompression and JSON: `mula tokenize`
(writes and hashes a shard), `dolma tokens` and datatrove's DocumentTokenizer on the same files,
--threads processes each. --python then lists the interpreters of the environments `layouts` and
`dolma-1.2.1`. With --megatron FOLDER, a checkout of Megatron-LM's main branch, its
`preprocess_data.py` and `preprocess_data_fast.py`, both with gigatoken, get the same documents in
one uncompressed file, which is all they can read. --megatron-python is an interpreter with torch,
transformers and gigatoken.
"""

import argparse, hashlib, json, os, pathlib, statistics, struct, subprocess, sys, tempfile, time

here = pathlib.Path(__file__).resolve().parent
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


# ---- the other libraries, each in a separate process: --inside LIBRARY TOKENIZER DOCUMENTS THREADS


def read(path):
    raw, at, out = pathlib.Path(path).read_bytes(), 0, []
    while at < len(raw):
        (n,) = struct.unpack_from("<I", raw, at)
        out.append(raw[at + 4 : at + 4 + n].decode())
        at += 4 + n
    return out


def encoder(library, tokenizer, documents, threads):
    """Returns a function that encodes the documents, and a function that lists its ids as arrays.
    """
    import numpy

    if library == "mula":
        sys.path.insert(0, str(here.parent / "clients" / "python"))
        import mula

        t = mula.Tokenizer(tokenizer, threads=threads, specials="tokens")
        return lambda: t.encode_batch(documents), lambda result: [result.ids]
    if library == "tiktoken":
        encoding = tiktoken_of(tokenizer)
        return lambda: encoding.encode_ordinary_batch(documents, num_threads=threads), lambda ids: ids
    if library == "fastokens":
        import fastokens

        t = fastokens.Tokenizer.from_file(tokenizer)
        return lambda: t.encode_batch_flat(documents), lambda result: [numpy.frombuffer(result[0], numpy.uint32)]
    if library == "gigatoken":
        import awkward, gigatoken

        t = gigatoken.Tokenizer(tokenizer)
        return lambda: t.encode_batch(documents, parallel=threads > 1), lambda result: [
            awkward.to_numpy(awkward.flatten(result))
        ]
    import tokenizers

    t = tokenizers.Tokenizer.from_file(tokenizer)
    batch = getattr(t, "encode_batch_fast", t.encode_batch)

    def encode():  # some calls keep everything in memory until they return
        ids = []
        for i in range(0, len(documents), 1000):
            ids.extend(e.ids for e in batch(documents[i : i + 1000], add_special_tokens=False))
        return ids

    return encode, lambda ids: ids


def inside(library, tokenizer, path, threads):
    """Prints the seconds of each pass, the number of ids, and their SHA-256 as little-endian
    uint32.
    """
    import numpy

    documents = read(path)
    encode, arrays = encoder(library, tokenizer, documents, threads)
    for _ in range(2):
        result = None
        began = time.perf_counter()
        result = encode()
        print(f"{time.perf_counter() - began:.6f}")
    count, digest = 0, hashlib.sha256()
    for ids in arrays(result):
        count += len(ids)
        digest.update(numpy.asarray(ids, "<u4").tobytes())
    print(count, digest.hexdigest())


def tiktoken_of(path):
    """The tiktoken encoding of a byte-level tokenizer.json, whose ids are ranks."""
    import tiktoken

    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte = {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in shown)}
    file = json.loads(pathlib.Path(path).read_text())
    added = {a["content"] for a in file["added_tokens"]}
    ranks = {bytes(byte[c] for c in token): i for token, i in file["model"]["vocab"].items() if token not in added}
    return tiktoken.Encoding("shared", pat_str=CL100K, mergeable_ranks=ranks, special_tokens={})


def has_cl100k(path):
    return CL100K in json.dumps(
        json.loads(pathlib.Path(path).read_text())["pre_tokenizer"], ensure_ascii=False
    ).replace("\\\\", "\\")


# ---- encoding

LIBRARIES = ("tokenizers", "fastokens", "gigatoken", "tiktoken")


def installed(pythons):
    """The libraries of the interpreters: {"tokenizers 0.23.3": interpreter, …}.

    Of equal versions, the first is used. "mula (Python)" has the first interpreter with numpy and
    pyarrow.
    """
    find = f"""
import importlib.metadata as m
for p in {LIBRARIES}:
    try: print(p, m.version(p))
    except m.PackageNotFoundError: pass
"""
    found = {}
    for python in pythons:
        for line in subprocess.run(
            [python, "-c", find], check=True, capture_output=True, text=True
        ).stdout.splitlines():
            if not (line.startswith("tiktoken") and any(f.startswith("tiktoken") for f in found)):
                found.setdefault(line, str(python))
    python = having(pythons, "numpy, pyarrow")
    client = {"mula (Python)": python} if python else {}
    return client | dict(sorted(found.items(), key=lambda f: LIBRARIES.index(f[0].split()[0])))


def having(pythons, packages):
    """Returns the first interpreter with these packages, or None."""
    for python in pythons:
        if subprocess.run([python, "-c", f"import {packages}"], capture_output=True).returncode == 0:
            return str(python)
    return None


def measure(line, path, threads):
    """Returns the seconds of the first and the second pass, the number of ids, and their hash."""
    env = {
        **os.environ,
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true",
        "GOMAXPROCS": str(threads),
    }
    cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else None
    bind = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    with open(path, "rb") as documents:
        done = subprocess.run(line, stdin=documents, env=env, preexec_fn=bind, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(line)} failed:\n{done.stderr[-3000:]}")
    first, second, ids = (row.split() for row in done.stdout.splitlines())
    return float(first[0]), float(second[0]), int(ids[0]), ids[1]


def encoding(args, tmp):
    sys.path.append(str(here.parent / "conformance"))
    import texts

    program = f"{tmp}/encodeloop"
    subprocess.run(
        ["go", "build", "-o", program, "./benchmarks/encodeloop"],
        cwd=here.parent,
        check=True,
        env={**os.environ, "CGO_ENABLED": "0"},
    )
    libraries = installed(args.python)
    os.environ["MULA"] = str(args.mula.resolve())
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
    found["adversarial"] = texts.adversarial(size)
    if unknown := [t for t in args.texts or () if t not in found]:
        sys.exit(f"--texts: unknown text: {', '.join(unknown)}; choose from {', '.join(found)}")
    print(
        f"MB/s of the first pass; of the second in brackets. Medians of {args.rounds} alternating rounds; the range of "
        "the first pass after it.\n"
    )
    print(
        f"| tokenizer | texts | MB | documents | threads | mula | {' | '.join(libraries)} | mula / fastest, first | "
        "second |"
    )
    print("|---|---|---|---|---|---|" + "---|" * (len(libraries) + 2), flush=True)
    for tokenizer in args.tokenizers:
        others = [side for side in libraries if not side.startswith("tiktoken") or has_cl100k(tokenizer)]
        for name in args.texts or found:
            whole = texts.spread(found[name], size)
            for form, documents in (("4 kB", texts.pieces(whole)), ("whole", whole)):
                if form not in args.documents:
                    continue
                path = f"{tmp}/documents"
                texts.write(path, documents)
                megabytes = sum(len(d.encode()) for d in documents) / 1e6
                for threads in args.threads:
                    lines = {
                        "mula": [
                            program,
                            "-tokenizer",
                            str(tokenizer),
                            "-workers",
                            str(threads),
                            "-rounds",
                            "2",
                            "-hash",
                        ]
                    }
                    for side in others:
                        lines[side] = [
                            libraries[side],
                            str(here / "encoding.py"),
                            "--inside",
                            side.split()[0],
                            str(tokenizer),
                            path,
                            str(threads),
                        ]
                    runs, ids = {side: [] for side in lines}, {}
                    for _ in range(args.rounds):
                        for side, line in lines.items():
                            first, second, *ids[side] = measure(line, path, threads)
                            runs[side].append((megabytes / first, megabytes / second))
                    different = [
                        f"{side} ({ids[side][0]:,} ids)"
                        for side in others
                        if ids[side] != ids["mula"] and not side.startswith("tiktoken")
                    ]
                    if different:
                        print(
                            f"{tokenizer}, {name}: other ids than mula's {ids['mula'][0]:,}: {', '.join(different)}",
                            file=sys.stderr,
                        )
                    median = {side: [statistics.median(r[i] for r in runs[side]) for i in (0, 1)] for side in lines}

                    def cell(side):
                        if side not in median:
                            return ""
                        firsts = [r[0] for r in runs[side]]
                        mark = " **other ids**" if any(d.startswith(side) for d in different) else ""
                        first, second = median[side]
                        return f"{first:.1f} ({second:.1f}), {min(firsts):.1f} to {max(firsts):.1f}{mark}"

                    rivals = [o for o in others if o != "mula (Python)"]
                    ratio = lambda i: f"{median['mula'][i] / max(median[o][i] for o in rivals):.2f}" if rivals else ""
                    print(
                        f"| {pathlib.Path(tokenizer).stem} | {name} | {megabytes:.1f} | {form} | {threads} | "
                        f"{cell('mula')} | "
                        f"{' | '.join(cell(side) for side in libraries)} | {ratio(0)} | {ratio(1)} |",
                        flush=True,
                    )
    print(f"\nPython {sys.version.split()[0]}")


# ---- whole commands

DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
if __name__ == "__main__":
    folder, out, tokenizer, workers = sys.argv[1:]
    write = DocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token="<|endoftext|>", shuffle_documents=False)
    LocalPipelineExecutor([JsonlReader(folder), write], tasks=int(workers), workers=int(workers),
                          logging_dir=out + "/logs").run()
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
    dtype = (
        "uint16" if len(file["model"]["vocab"]) < 1 << 16 else "uint32"
    )  # the choice of all three; dolma needs it as a flag
    have = lambda packages: having(args.python, packages)
    print(
        f"Files to shards, {len(inputs)} files, {bytes_of_text / 1e6:.1f} MB of text; seconds, medians of "
        f"{args.rounds} alternating rounds.\n"
    )
    if args.megatron:
        plain, folder_of_tokenizer = pathlib.Path(tmp, "all.jsonl"), pathlib.Path(tmp, "tokenizer")
        with plain.open("w", encoding="utf-8") as out:
            for f in args.pipeline:
                for t in texts.corpus(f.parent, (f.name,)):
                    out.write(json.dumps({"text": t}, ensure_ascii=False) + "\n")
        folder_of_tokenizer.mkdir()
        (folder_of_tokenizer / "tokenizer.json").write_bytes(args.tokenizers[0].read_bytes())
        (folder_of_tokenizer / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
        )
    print("| threads | command | seconds | MB/s of text | its time / mula's |\n|---|---|---|---|---|", flush=True)
    for threads in args.threads:
        lines = {
            "mula tokenize": lambda out: [
                str(args.mula),
                "tokenize",
                "--tokenizer",
                tokenizer,
                "--workers",
                str(threads),
                "--output",
                f"{out}/x",
                *inputs,
            ]
        }
        if dolma := have("dolma"):
            lines["dolma tokens"] = lambda out: [
                str(pathlib.Path(dolma).parent / "dolma"),
                "tokens",
                "--documents",
                *inputs,
                "--destination",
                out,
                "--tokenizer.name_or_path",
                tokenizer,
                "--tokenizer.eos_token_id",
                str(eos),
                "--processes",
                str(threads),
                "--dtype",
                dtype,
                "--seed",
                "1",
            ]
        if datatrove := have("datatrove, orjson, tokenizers"):
            script = pathlib.Path(tmp, "datatrove_run.py")
            script.write_text(DATATROVE)
            lines["datatrove"] = lambda out: [datatrove, str(script), str(folder), out, tokenizer, str(threads)]
        if args.megatron:
            megatron = lambda tool, out: [
                str(args.megatron_python),
                str(args.megatron / "tools" / tool),
                "--input",
                str(plain),
                "--output-prefix",
                f"{out}/x",
                "--tokenizer-type",
                "HuggingFaceTokenizer",
                "--tokenizer-model",
                str(folder_of_tokenizer),
                "--use-gigatoken",
                "--append-eod",
            ]
            lines["Megatron-LM, preprocess_data_fast.py"] = lambda out: megatron("preprocess_data_fast.py", out)
            lines["Megatron-LM, preprocess_data.py"] = lambda out: [
                *megatron("preprocess_data.py", out),
                "--workers",
                str(threads),
            ]
        runs = {name: [] for name in lines}
        cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else None
        bind = (lambda: os.sched_setaffinity(0, cores)) if cores else None
        for _ in range(args.rounds):
            for name, line in lines.items():
                with tempfile.TemporaryDirectory(dir=tmp) as out:
                    began = time.perf_counter()
                    done = subprocess.run(
                        line(out),
                        capture_output=True,
                        text=True,
                        preexec_fn=bind,
                        env={
                            **os.environ,
                            "GOMAXPROCS": str(threads),
                            # one library has threads, the others have processes
                            "RAYON_NUM_THREADS": str(threads) if name.endswith("fast.py") else "1",
                            "TOKENIZERS_PARALLELISM": "false",
                        },
                    )
                    if done.returncode:
                        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
                    runs[name].append(time.perf_counter() - began)
        median = {name: statistics.median(r) for name, r in runs.items()}
        for name, seconds in median.items():
            print(
                f"| {threads} | {name} | {seconds:.2f}, {min(runs[name]):.2f} to {max(runs[name]):.2f} | "
                f"{bytes_of_text / 1e6 / seconds:.1f} | {seconds / median['mula tokenize']:.1f} |",
                flush=True,
            )


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--tokenizers", nargs="+", type=pathlib.Path, required=True)
    ap.add_argument("--corpus", type=pathlib.Path)
    ap.add_argument("--megabytes", type=float, default=4)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    ap.add_argument("--documents", nargs="+", choices=["4 kB", "whole"], default=["4 kB", "whole"])
    ap.add_argument("--texts", nargs="+", help="only these texts, by their names in the table")
    ap.add_argument("--pipeline", nargs="+", type=pathlib.Path)
    ap.add_argument("--megatron", type=pathlib.Path)
    ap.add_argument("--megatron-python", type=pathlib.Path)
    ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin" / "mula")
    ap.add_argument(
        "--python",
        nargs="+",
        type=pathlib.Path,
        default=[pathlib.Path(sys.executable)],
        help="interpreters whose libraries are measured",
    )
    args = ap.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        pipeline(args, tmp) if args.pipeline else encoding(args, tmp)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        main()
