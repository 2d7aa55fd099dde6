#!/usr/bin/env python3
"""Measures the overhead of the Python client's mula.Tokenizer over the encoder.

Prints a Markdown table with the processor time of one thread, of both processes together, for:

encoder     benchmarks/encodeloop, a Go program that keeps no ids
list        encode_batch of a list of str, all documents in one call
Arrow       encode_batch of an Arrow array

    python benchmarks/pythontokenizer.py --tokenizer tokenizer.json --corpus FOLDER

Each side runs with no pass over the documents, with one pass, and with --passes, alternately,
--rounds times. The times of the first pass and of a later pass are differences of the least times.
So they do not include starting and loading. The interpreter needs numpy, pyarrow and zstandard.
Bind the script to one core (taskset). MB are 10^6 bytes.
"""

import argparse, os, pathlib, resource, subprocess, sys, tempfile

here = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(here.parent / "clients" / "python"), str(here.parent / "conformance")]


def inside(side, tokenizer, path, passes):
    """Encodes the documents of a file."""
    import mula, pyarrow
    from encoding import read

    documents = read(path)
    if side == "Arrow":
        documents = pyarrow.array(documents, pyarrow.large_string())
    with mula.Tokenizer(tokenizer, threads=1, specials="tokens") as t:
        for _ in range(passes):
            t.encode_batch(documents)


def processor_time(line, path):
    """Returns the processor seconds of a command and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(path, "rb") as documents:
        subprocess.run(line, stdin=documents, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--corpus", type=pathlib.Path, required=True)
    ap.add_argument("--rounds", type=int, default=8)
    ap.add_argument("--passes", type=int, default=5)
    ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin" / "mula")
    args = ap.parse_args()
    os.environ["MULA"] = str(args.mula.resolve())
    import texts

    with tempfile.TemporaryDirectory() as tmp:
        path, program = f"{tmp}/documents", f"{tmp}/encodeloop"
        documents = texts.corpus(args.corpus)
        texts.write(path, documents)
        megabytes = sum(len(d.encode()) for d in documents) / 1e6
        subprocess.run(
            ["go", "build", "-o", program, "./benchmarks/encodeloop"],
            cwd=here.parent,
            check=True,
            env={**os.environ, "CGO_ENABLED": "0"},
        )
        script = [sys.executable, __file__, "--inside"]
        lines = {
            "encoder": lambda passes: [program, "-tokenizer", args.tokenizer, "-rounds", str(passes)],
            "list": lambda passes: [*script, "list", args.tokenizer, path, str(passes)],
            "Arrow": lambda passes: [*script, "Arrow", args.tokenizer, path, str(passes)],
        }
        times = {(side, passes): [] for side in lines for passes in (0, 1, args.passes)}
        for _ in range(args.rounds):
            for side, passes in times:
                times[side, passes].append(processor_time(lines[side](passes), path))
        least = {run: min(seconds) for run, seconds in times.items()}
        first = {side: least[side, 1] - least[side, 0] for side in lines}
        later = {side: (least[side, args.passes] - least[side, 1]) / (args.passes - 1) for side in lines}
        print(f"{len(documents):,} documents, {megabytes:.1f} MB; least of {args.rounds} rounds\n")
        print("| side | first pass | overhead | later pass | overhead |\n|---|---|---|---|---|")
        for side in lines:
            row = side
            for times in (first, later):
                overhead = (times[side] / times["encoder"] - 1) * 100
                row += f" | {times[side] * 1e3:.0f} ms, {megabytes / times[side]:.0f} MB/s | {overhead:.0f} %"
            print(f"| {row} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(*sys.argv[2:5], int(sys.argv[5]))
    else:
        main()
