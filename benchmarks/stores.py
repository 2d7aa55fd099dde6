#!/usr/bin/env python3
"""Compares loaders that read training samples from an S3 server over a slow link.

They read the same tokens from the same bucket, alternately, in one run. Prints a Markdown table.

    conformance/environments.sh DIR layouts litdata && make build
    python3 benchmarks/stores.py --shards 'FOLDER/*' --server DIR/versitygw
        --python DIR/layouts/bin/python DIR/litdata/bin/python
        [--length 4096] [--batch-size 16] [--latency 50ms] [--rate 100e6] [--samples 16000]
        [--rounds 3] [--work DIR]

--shards is a pattern of shards with uint16 tokens that mula wrote. The server is versitygw
(github.com/versity/versitygw) on a folder of --work. benchmarks/slowlink is the link: each request
waits for --latency, and all responses together have --rate bytes/s.

mula             `mula stream` over mula's shards, all windows of an epoch shuffled
mula, shuffle    the same, with shuffle: {block: 128, group: 64} in blend.yaml
mosaicml         StreamingDataset over MDS with one sample a window, shuffled, under its loader
litdata          StreamingDataset over its chunks with one sample a window, shuffled, under its
                 loader
megatron         Megatron-Core's GPTDataset with an object storage cache over mula's shards, which
                 have its format, under a torch DataLoader. It keeps 256 MB of each file it reads

mosaicml, litdata and megatron run with each of --workers worker processes. Every run is a new
process with empty caches. "first batch" is the time from the start of the loader, after the imports
of Python's packages, to its first batch; for mula from the start of the program. "all" is the time
until --samples samples have arrived, with the first batch. "samples/s" are the samples by that
time. "bytes" are the bytes of all responses per byte of the samples' tokens. "link idle" is the
time between the first and the last byte in which the link had nothing to send. MB are 10^6 bytes.
"""

import argparse, glob, itertools, json, os, pathlib, shutil, statistics, subprocess, sys, tempfile, time

here = pathlib.Path(__file__).resolve().parent
sys.path.append(str(here.parent / "conformance"))
import objectserver

PORT = 7170  # of the server; the link has the next one


# ---- the loaders, also of orders.py. The first call imports the packages


def epochs(o, side, place, cache, workers, **options):
    """Returns a function that opens a loader of mosaicml or litdata and yields its epochs.

    place is a folder or URL. options are arguments of the data set.
    """
    if side == "mosaicml":
        import streaming
        from streaming import StreamingDataLoader, StreamingDataset

        streaming.base.util.clean_stale_shared_memory()  # of the previous process
        options |= {
            "remote": place,
            "local": cache,
            "shuffle_seed": 1,
            "batch_size": o.batch_size,
            "num_canonical_nodes": 1,
        }
    else:
        from litdata import StreamingDataLoader, StreamingDataset

        options |= {"input_dir": place, "cache_dir": cache, "seed": 1}

    def opened():
        data = StreamingDataset(shuffle=True, **options)
        loader = StreamingDataLoader(data, batch_size=o.batch_size, num_workers=workers)
        while True:
            yield (batch["tokens"] for batch in loader) if side == "mosaicml" else loader

    return opened


def megatron(o, prefixes, cache, **options):
    """Returns a function that opens Megatron's data set of a number of samples.

    options are arguments of its configuration.
    """
    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    class Tokenizer:
        eod, vocab_size, unique_identifiers = 50279, 50280, {"class": "none"}

    def opened(samples):
        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=o.length,
            blend=(sorted(prefixes), None),
            split="100,0,0",
            path_to_cache=cache + "/index",
            tokenizer=Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            **options,
        )
        return BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]

    return opened


def pythons(list_):
    """Returns the Python of each loader."""
    found = {}
    for side, package in (("mosaicml", "streaming"), ("litdata", "litdata"), ("megatron", "megatron.core")):
        for python in list_:
            if not subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode:
                found[side] = python
    return found


# ---- one measurement, in its own process: --inside SIDE WORKERS


def measure(batches, samples):
    began, seen, first = time.perf_counter(), 0, None
    for batch in batches():
        seen += len(batch)
        first = first or time.perf_counter() - began
        if seen >= samples:
            break
    print(json.dumps({"first": first, "all": time.perf_counter() - began, "samples": seen}), flush=True)
    os._exit(0)  # without waiting for workers


def inside(o, side, workers):
    cache = tempfile.mkdtemp(dir=o.work)
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    if side == "megatron":
        import torch

        torch.set_num_threads(1)
        prefixes = [f"s3://data/mula/{f.stem}" for f in (o.work / "store/data/mula").glob("*.idx")]
        opened = megatron(o, prefixes, cache, object_storage_cache_path=cache + "/idx", mmap_bin_files=False)

        def batches():
            loader = torch.utils.data.DataLoader(opened(o.samples), batch_size=o.batch_size, num_workers=workers)
            for batch in loader:
                yield batch["tokens"]

    else:
        if side == "mosaicml":
            os.environ["S3_ENDPOINT_URL"] = endpoint
            opened = epochs(o, side, "s3://data/mds", cache, workers)
        else:
            storage = {
                "endpoint_url": endpoint,
                "aws_access_key_id": objectserver.KEYS["AWS_ACCESS_KEY_ID"],
                "aws_secret_access_key": objectserver.KEYS["AWS_SECRET_ACCESS_KEY"],
            }
            opened = epochs(o, side, "s3://data/lit", cache, workers, storage_options=storage)
        batches = lambda: itertools.chain.from_iterable(opened())

    measure(batches, o.samples)


# ---- data


def write(o, side):
    """Writes the windows in the layout of another loader. Runs in that loader's environment."""
    import numpy as np

    files = sorted(glob.glob(o.shards + ("" if o.shards.endswith(".bin") else ".bin")))

    def windows():
        for file in files:
            tokens = np.memmap(file, np.uint16, "r")
            for w in range((len(tokens) - 1) // o.length):
                yield np.array(tokens[w * o.length : w * o.length + o.length + 1])

    if side == "mosaicml":
        from streaming import MDSWriter

        with MDSWriter(columns={"tokens": f"ndarray:uint16:{o.length + 1}"}, out=str(o.work / "store/data/mds")) as out:
            for w in windows():
                out.write({"tokens": w})
    else:
        from litdata.streaming.writer import BinaryWriter

        out = BinaryWriter(str(o.work / "store/data/lit"), chunk_bytes=1 << 26)
        for i, w in enumerate(windows()):
            out[i] = w
        out.done()
        out.merge()


def prepare(o):
    done = o.work / "done.json"
    wanted = {"shards": o.shards, "length": o.length}
    if done.exists() and json.loads(done.read_text()) == wanted:
        return
    bucket = o.work / "store/data"
    shutil.rmtree(o.work, ignore_errors=True)
    (bucket / "mula").mkdir(parents=True)
    prefixes = sorted({f.removesuffix(".bin") for f in glob.glob(o.shards + "*") if f.endswith(".bin")})
    for prefix in prefixes:
        for file in glob.glob(prefix + ".*"):
            shutil.copy(file, bucket / "mula")
    for side in ("mosaicml", "litdata"):
        python = o.pythons[side]
        subprocess.run([python, __file__, *sys.argv[1:], "--write", side], check=True, stdout=subprocess.DEVNULL)
    done.write_text(json.dumps(wanted))


# ---- the comparison


def run_mula(o, plan, env):
    began = time.perf_counter()
    p = subprocess.Popen(
        [o.mula, "stream", "--plan", plan, "--batch-size", str(o.batch_size), "--to", str(o.samples)],
        stdout=subprocess.PIPE,
        bufsize=0,  # a buffer would wait for more than the first batch
        env=env,
    )
    whole, first = 0, None
    read = o.batch_size * (o.length + 1) * 2
    while chunk := p.stdout.read(1 << 20):
        whole += len(chunk)
        if first is None and whole >= read:
            first = time.perf_counter() - began
    if p.wait():
        sys.exit("mula stream failed")
    return {"first": first, "all": time.perf_counter() - began, "samples": o.samples}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--shards", required=True)
    ap.add_argument("--server", type=pathlib.Path, required=True)
    ap.add_argument("--python", nargs="+", type=pathlib.Path, required=True)
    ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin/mula")
    ap.add_argument("--length", type=int, default=4096)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--latency", default="50ms")
    ap.add_argument("--rate", type=float, default=100e6)
    ap.add_argument("--samples", type=int, default=16000)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    ap.add_argument("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir(), "mula-stores"))
    ap.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    ap.add_argument("--write", help=argparse.SUPPRESS)
    o = ap.parse_args()
    if o.write:
        return write(o, o.write)
    if o.inside:
        return inside(o, o.inside[0], int(o.inside[1]))
    o.pythons = pythons(o.python)
    o.samples -= o.samples % o.batch_size
    prepare(o)

    link_flags = ["-latency", o.latency, "-rate", str(o.rate)]
    with objectserver.running(o.server, o.work, PORT, *link_flags) as (_, link):
        env = {**os.environ, **objectserver.KEYS, "AWS_ENDPOINT_URL": link, "PYTHONWARNINGS": "ignore"}
        plans = {}
        for name, shuffle in (("mula", ""), ("mula, shuffle", "shuffle: {block: 128, group: 64}\n")):
            config = o.work / "blend.yaml"
            config.write_text(
                f"sequence_length: {o.length}\nseed: 1\n"
                f'sources: [{{name: x, shards: ["s3://data/mula/*"]}}]\n{shuffle}'
            )
            plans[name] = o.work / f"plan{len(plans)}.json"
            line = [o.mula, "blend", "--config", config, "-o", plans[name]]
            subprocess.run(line, check=True, env=env, capture_output=True)
        runs = {name: [] for name in plans} | {
            f"{side}, {w} workers": [] for side in o.pythons for w in o.workers
        }
        for _ in range(o.rounds):
            for name, list_ in runs.items():
                objectserver.stats(link)
                if name in plans:
                    cache = tempfile.mkdtemp(dir=o.work)
                    found = run_mula(o, plans[name], {**env, "MULA_CACHE": cache})
                else:
                    side, _, workers = name.partition(", ")
                    done = subprocess.run(
                        [o.pythons[side], __file__, *sys.argv[1:], "--inside", side, workers.split()[0]],
                        env=env,
                        capture_output=True,
                        text=True,
                        timeout=1800,
                    )
                    lines = [l for l in done.stdout.splitlines() if l.startswith('{"first"')]
                    if not lines:
                        print(f"{name}: {done.stderr[-1500:]}", file=sys.stderr)
                        continue
                    found = json.loads(lines[-1])
                    subprocess.run(["pkill", "-f", "--", f"--inside {side}"])  # workers
                found |= objectserver.stats(link)
                list_.append(found)
                for left in o.work.glob("tmp*"):
                    shutil.rmtree(left, ignore_errors=True)
        print(
            f"{o.samples} samples of {o.length + 1} tokens, {o.latency} a request, {o.rate / 1e6:.0f} MB/s; medians "
            f"of {o.rounds} alternating rounds.\n\n| loader | first batch, s | all, s "
            "| samples/s | requests | bytes per byte used | link idle, s |\n|---|---|---|---|---|---|---|"
        )
        for name, list_ in runs.items():
            if list_:
                m = lambda key: statistics.median(r[key] for r in list_)
                used = m("samples") * (o.length + 1) * 2
                print(
                    f"| {name} | {m('first'):.2f} | {m('all'):.2f} | {m('samples') / m('all'):,.0f} | "
                    f"{m('requests'):,.0f} | {m('bytes') / used:.2f} | {m('idle'):.2f} |"
                )


if __name__ == "__main__":
    main()
