#!/usr/bin/env python3
"""Compares the orders in which loaders draw the samples of the same windows of tokens.

It runs the loaders on local files, records which window each sample of the first epoch is, and
prints the statistics that `mula simulate` has for a plan (docs/reference/simulate.md).

    python3 benchmarks/stores.py … --work DIR     # writes the data of all loaders to DIR
    python3 benchmarks/orders.py --work DIR --python DIR/layouts/bin/python DIR/litdata/bin/python
        [--length 4096] [--batch-size 16] [--workers 0 2]

mosaicml         StreamingDataset over MDS with shuffle=True, under its loader
mosaicml, block  the same with shuffle_block_size=8192, the size of a group of `mula, shuffle`
litdata          StreamingDataset over chunks of 64 MiB with shuffle=True, under its loader
megatron         Megatron-Core's GPTDataset. Its samples do not start at the start of a window: the
                 window of the first token counts
mula             all windows of an epoch shuffled
mula, shuffle    shuffle: {block: 128, group: 64} in blend.yaml

mosaicml and litdata run with each of --workers worker processes, which read alternately. The
windows of their samples are found by the hash of the tokens.
"""

import argparse, hashlib, os, pathlib, shutil, subprocess, sys, tempfile

import stores

here = pathlib.Path(__file__).resolve().parent
COLUMNS = (
    "order",
    "samples",
    "distance (z)",
    "parity (z)",
    "adjacent",
    "same shard",
    "same document",
    "same document in a step",
    "unevenness",
)


def tokens_of(o):
    """The tokens of each shard of mula."""
    import numpy as np

    for file in sorted((o.work / "store/data/mula").glob("*.bin")):
        yield np.memmap(file, np.uint16, "r")


def record(o, side, workers, out):
    """Writes the windows of a loader's samples to a file. Runs in that loader's environment."""
    import numpy as np

    cache = tempfile.mkdtemp(dir=o.work)
    if side == "megatron":
        numbers = megatron(o, cache)
    else:
        known = {}
        for tokens in tokens_of(o):
            for w in range((len(tokens) - 1) // o.length):
                window = tokens[w * o.length : w * o.length + o.length + 1]
                known[hashlib.sha256(window.tobytes()).digest()] = len(known)
        if side == "litdata":
            opened = stores.epochs(o, side, str(o.work / "store/data/lit"), cache, workers)
        else:
            block = {"shuffle_block_size": 8192} if side == "mosaicml-block" else {}
            opened = stores.epochs(o, "mosaicml", str(o.work / "store/data/mds"), cache, workers, **block)
        numbers = [
            known[hashlib.sha256(np.asarray(sample).astype(np.uint16).tobytes()).digest()]
            for batch in next(opened())
            for sample in batch
        ]
    np.array(numbers, "<i8").tofile(out)
    shutil.rmtree(cache, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)  # without waiting for workers


def megatron(o, cache):
    """Returns the windows of the first tokens of Megatron's samples."""
    prefixes = [str(f.with_suffix("")) for f in (o.work / "store/data/mula").glob("*.idx")]
    before, firsts = 0, []  # windows of the shards before
    for tokens in tokens_of(o):
        firsts.append(before)
        before += (len(tokens) - 1) // o.length
    size = before - before % o.batch_size
    data = stores.megatron(o, prefixes, cache)(size)
    numbers = []
    for i in range(size):
        k = int(data.dataset_index[i])
        part = data.datasets[k]
        document, offset = part.sample_index[part.shuffle_index[int(data.dataset_sample_index[i])]]
        start = part.dataset.index.sequence_pointers[part.document_index[document]] // 2 + offset
        last = (firsts + [before])[k + 1] - 1  # a sample may start in the tokens after the last window
        numbers.append(min(firsts[k] + int(start) // o.length, last))
    return numbers


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--work", type=pathlib.Path, required=True)
    ap.add_argument("--python", nargs="+", type=pathlib.Path, required=True)
    ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin/mula")
    ap.add_argument("--length", type=int, default=4096)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    ap.add_argument("--record", nargs=3, help=argparse.SUPPRESS)
    o = ap.parse_args()
    if o.record:
        return record(o, o.record[0], int(o.record[1]), o.record[2])
    orders = o.work / "orders"
    orders.mkdir(exist_ok=True)
    program = orders / "program"
    subprocess.run(["go", "build", "-o", program, "./benchmarks/orders"], cwd=here.parent, check=True)
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    for name, shuffle in (("mula", ""), ("mula-shuffle", "shuffle: {block: 128, group: 64}\n")):
        config, plan = orders / f"{name}.yaml", orders / f"{name}.json"
        shards = (o.work / "store/data/mula").resolve()
        config.write_text(
            f'sequence_length: {o.length}\nseed: 1\nsources: [{{name: x, shards: ["{shards}/*"]}}]\n{shuffle}'
        )
        subprocess.run([o.mula, "blend", "--config", config, "-o", plan], check=True, capture_output=True)
        subprocess.run([program, plan], check=True)
    pythons = stores.pythons(o.python)
    runs = [(s, w) for s in ("mosaicml", "mosaicml-block", "litdata") for w in o.workers] + [("megatron", 0)]
    for side, workers in runs:
        file = orders / f"{side}-{workers}"
        line = [pythons[side.partition("-")[0]], __file__, *sys.argv[1:], "--record", side, str(workers), file]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode or not file.exists():
            print(f"{side}, {workers} workers: {done.stderr[-1500:]}", file=sys.stderr)
            continue
        name = side if side == "megatron" else f"{side}, {workers} workers"
        subprocess.run([program, orders / "mula.json", f"{name}={file}"], check=True)


if __name__ == "__main__":
    main()
