#!/usr/bin/env python3
"""Compares loaders of training samples: mula's client and the frameworks' own, on the same tokens, in turns, in one run, on one core. Prints Markdown tables.

    conformance/environments.sh DIR loaders
    DIR/loaders/bin/python benchmarks/loaders.py [--megabytes 300] [--length 4096] [--batch-size 64] [--rounds 3] [--seconds 5] [--only mula mosaicml …] [--work DIR]

The tokens are random documents of uint16 ids with lognormal lengths (about 1,300 on average), so many megabytes of them; every side reads them in the layout that
its own tools write, made anew in --work if they are not there.

pipe        `mula stream` into a pipe whose bytes are read and not looked at: what mula costs without a client
mula        clients/python over a unix socket, with `mula serve` that it starts itself, all columns
mula-lean   the same with positions and tokens alone, which is what the others give
mosaicml    StreamingDataset of fixed-length samples in MDS (uint16) under its StreamingDataLoader, shuffled
grain       a MapDataset over a memory-mapped array of the windows, shuffled, batched, as an iterator with its read threads and without
megatron    Megatron-Core's GPTDataset (built by its own builder) under a torch DataLoader with a sampler that goes on at consumed samples, as Megatron-LM's does
datatrove   DatatroveFolderDataset, which nanotron trains on, under a torch DataLoader with a shuffled sampler
olmo        OLMo-core's NumpyFSLDataset under its NumpyDataLoader, shuffled

Each measurement is of a fresh process, which is held to --core with all that it starts, with one thread of torch. Figures:

samples/s   of wall time on the core, and of processor time of all processes (which a busy machine changes less), over --seconds or an epoch. "delivered": batches as the
            loader gives them, in torch; "int64": with .long() where the loader does not give int64, which is what an embedding takes
first       seconds from the end of Python's imports to the first batch; cold: no index files, and the tokens not in the page cache; warm: both are there
resume      the same, warm, going on at the middle of the epoch from the loader's saved state
memory      anonymous and shared memory of all processes at the end, beyond what there was after the imports
cursor      bytes of the state, as JSON

Of samples/s the best of the rounds is given and the median; of the rest the median. --workers tries numbers of worker processes (mosaicml, megatron, datatrove, olmo; where it
has any, the fastest is kept).
"""
import argparse, contextlib, json, os, pathlib, shutil, statistics, struct, subprocess, sys, time

here = pathlib.Path(__file__).resolve().parent
SIDES = ["pipe", "mula", "mula-lean", "mosaicml", "grain", "megatron", "datatrove", "olmo"]
VOCABULARY = 50280
EOD = VOCABULARY - 1


# ---- the tokens, in every layout

def make(o):
    """Writes what is missing of the layouts; the last file says that all is there."""
    import numpy as np
    done = o.work / "made.json"
    wanted = {"megabytes": o.megabytes, "length": o.length, "format": 1}
    if done.exists() and json.loads(done.read_text()) == wanted:
        return
    shutil.rmtree(o.work, ignore_errors=True)
    o.work.mkdir(parents=True)
    draw = np.random.default_rng(1)
    total, lengths = o.megabytes * 500_000, []
    while total > 0:
        n = min(int(draw.lognormal(6.6, 1.1)) + 1, 200_000)
        lengths.append(n)
        total -= n
    lengths = np.array(lengths, np.int32)
    ends = np.cumsum(lengths, dtype=np.int64)
    tokens = np.empty(ends[-1], np.uint16)
    for at in range(0, len(tokens), 1 << 24):
        part = tokens[at:at + (1 << 24)]
        part[:] = draw.integers(0, EOD, len(part), np.uint16)
    tokens[ends - 1] = EOD
    tokens.tofile(o.work / "tokens.bin")
    with open(o.work / "tokens.idx", "wb") as f:
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1))
        for array in (lengths, (ends - lengths) * 2, np.arange(len(lengths) + 1, dtype=np.int64)):
            f.write(array.tobytes())
    # mula and Megatron read the same files; windows of mula share their last token with the next, those of the other layouts do not.
    windows = (len(tokens) - 1) // o.length
    (o.work / "blend.yaml").write_text(f"sequence_length: {o.length}\nseed: 1\nsamples: {windows * 100}\nsources:\n- {{name: tokens, shards: [tokens.idx]}}\n")
    for command in (["blend", "--config", "blend.yaml", "--output", "plan.json"],
                    ["convert", "--to", "dolma", "--output", "dolma/tokens", "--eod", str(EOD), "--vocab-size", str(VOCABULARY), "tokens.idx"],
                    ["convert", "--to", "datatrove", "--output", "datatrove/tokens", "--eod", str(EOD), "--vocab-size", str(VOCABULARY), "--tokenizer-name", "none", "tokens.idx"]):
        subprocess.run([o.mula, *command], cwd=o.work, check=True, stdout=subprocess.DEVNULL)
    if "mosaicml" in o.only:
        from streaming import MDSWriter
        with MDSWriter(columns={"tokens": f"ndarray:uint16:{o.length + 1}"}, out=str(o.work / "mds")) as out:
            for i in range(len(tokens) // (o.length + 1)):
                out.write({"tokens": tokens[i * (o.length + 1):][:o.length + 1]})
    done.write_text(json.dumps(wanted))


def forget(o):
    """Takes index files away, and the tokens out of the page cache."""
    for folder in ("megatron-cache", "olmo-work"):
        shutil.rmtree(o.work / folder, ignore_errors=True)
    for file in o.work.rglob("*"):
        if file.is_file():
            with open(file, "rb") as f:
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(o, side):
    """Reads what the side reads, so that it is in the page cache."""
    folder = {"mosaicml": "mds", "datatrove": "datatrove", "olmo": "dolma"}.get(side)
    for file in (o.work / folder).rglob("*") if folder else o.work.glob("tokens.*"):
        with open(file, "rb", buffering=0) as f:
            while f.read(1 << 22):
                pass


# ---- the sides, each in a process of its own: a function that imports what it needs and gives open(state), which gives an iterator of (tensor, rows), and cursor(), the
# state after the last batch given; or, for what is not given, the state at the middle.

def side_pipe(o):
    import numpy as np
    plan = o.work / "plan.json"

    def open_(state):
        p = subprocess.Popen([o.mula, "stream", "--plan", plan, "--batch-size", str(o.batch_size), "--from", str(state["position"] if state else 0)], stdout=subprocess.PIPE, bufsize=0)
        with contextlib.suppress(OSError):
            import fcntl
            fcntl.fcntl(p.stdout, fcntl.F_SETPIPE_SZ, 1 << 20)
        buffer = np.empty(o.batch_size * (o.length + 1) * 2, np.uint8)
        have = 0
        try:
            while n := p.stdout.readinto(memoryview(buffer)[have:]):
                have += n
                if have == len(buffer):
                    have = 0
                    yield None, o.batch_size
        finally:
            p.kill()
            p.wait()
            p.stdout.close()
    return open_, lambda middle: {"position": middle}


def side_mula(o, columns=None):
    sys.path.insert(0, str(here.parent / "clients" / "python"))
    import mula
    import torch  # noqa: F401
    made = []

    def open_(state):
        data = mula.Stream(o.work / "plan.json", o.batch_size, columns=columns, mula=o.mula)
        made.append(data)
        if state:
            data.load_state_dict(state)
        for batch in data:
            yield batch.tokens, len(batch)
    return open_, lambda middle: {**made[0].state_dict(), "position": middle}


def side_mosaicml(o):
    import streaming
    from streaming import StreamingDataLoader, StreamingDataset
    made = []

    def open_(state):
        streaming.base.util.clean_stale_shared_memory()
        data = StreamingDataset(local=str(o.work / "mds"), shuffle=True, shuffle_seed=1, batch_size=o.batch_size, num_canonical_nodes=1)
        loader = StreamingDataLoader(data, batch_size=o.batch_size, num_workers=o.workers)
        made.append(loader)
        if state:
            loader.load_state_dict(state)
        for batch in loader:
            yield batch["tokens"], len(batch["tokens"])
    return open_, lambda middle: {**made[0].state_dict(), "sample_in_epoch": middle}


def side_grain(o):
    import grain
    import numpy as np
    import torch
    made = []

    class Windows:
        def __init__(self):
            tokens = np.memmap(o.work / "tokens.bin", np.uint16, "r")
            self.count, self.windows = len(tokens) // (o.length + 1), tokens[:len(tokens) // (o.length + 1) * (o.length + 1)].reshape(-1, o.length + 1)

        def __len__(self):
            return self.count

        def __getitem__(self, i):
            return np.asarray(self.windows[i])

    def open_(state):
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0) if o.workers == 0 else grain.ReadOptions(num_threads=16 * o.workers, prefetch_buffer_size=500)
        data = iter(grain.MapDataset.source(Windows()).shuffle(seed=1).repeat(None).to_iter_dataset(options).batch(o.batch_size))
        made.append(data)
        if state:
            data.set_state(state)
        for batch in data:
            yield torch.from_numpy(batch), len(batch)

    def cursor(middle):  # there is no state of a position that was not read
        probe = iter(grain.MapDataset.source(Windows()).shuffle(seed=1).repeat(None).to_iter_dataset().batch(o.batch_size))
        next(probe)
        state = json.loads(json.dumps(probe.get_state()))

        def put(s):
            return {k: put(v) if isinstance(v, dict) else middle if k == "next_index" else v for k, v in s.items()}
        return put(state)
    return open_, cursor


def side_megatron(o):
    import torch
    sys.path.insert(0, str(here.parent / "conformance"))
    import original
    from megatron.core.datasets import gpt_dataset  # noqa: F401

    class Sampler:
        """Of Megatron-LM: sequential, from the samples consumed on."""
        def __init__(self, total, consumed):
            self.total, self.consumed = total, consumed

        def __len__(self):
            return (self.total - self.consumed) // o.batch_size

        def __iter__(self):
            for at in range(self.consumed, self.total - o.batch_size + 1, o.batch_size):
                yield list(range(at, at + o.batch_size))

    def open_(state):
        windows = (os.path.getsize(o.work / "tokens.bin") // 2 - 1) // o.length
        case = {"seed": 1, "sequence_length": o.length, "data_path": [str(o.work / "tokens")], "per_split": None, "split": "1", "tokenizer": {"class": "none"}, "keep_partial": False,
                "extra_token": True, "surplus": 0.005, "renormalize": False, "sizes": [windows, 0, 0]}
        data = original.builder(case, str(o.work / "megatron-cache")).build()[0]
        loader = torch.utils.data.DataLoader(data, batch_sampler=Sampler(len(data), state["consumed_train_samples"] if state else 0), num_workers=o.workers)
        for batch in loader:
            yield batch["tokens"], len(batch["tokens"])
    return open_, lambda middle: {"consumed_train_samples": middle}


def side_datatrove(o):
    import torch
    from datatrove.utils.dataset import DatatroveFolderDataset

    class Sampler:
        """A permutation of torch's by a seed, from the samples consumed on, as nanotron's."""
        def __init__(self, total, consumed):
            self.total, self.consumed = total, consumed

        def __len__(self):
            return (self.total - self.consumed) // o.batch_size

        def __iter__(self):
            order = torch.randperm(self.total, generator=torch.Generator().manual_seed(1))
            for at in range(self.consumed, self.total - o.batch_size + 1, o.batch_size):
                yield order[at:at + o.batch_size].tolist()

    def open_(state):
        data = DatatroveFolderDataset(str(o.work / "datatrove"), o.length, token_size=2)
        loader = torch.utils.data.DataLoader(data, batch_sampler=Sampler(len(data), state["consumed_train_samples"] if state else 0), num_workers=o.workers)
        for batch in loader:
            yield batch["input_ids"], len(batch["input_ids"])
    return open_, lambda middle: {"consumed_train_samples": middle}


def side_olmo(o):
    import numpy as np
    from olmo_core.data import DataCollator, NumpyDataLoaderBase, NumpyFSLDataset
    made = []

    def open_(state):
        work = o.work / "olmo-work"
        data = NumpyFSLDataset(str(o.work / "dolma" / "tokens.npy"), sequence_length=o.length, pad_token_id=0, eos_token_id=EOD, vocab_size=VOCABULARY, dtype=np.uint16)
        data.work_dir = work
        data.prepare()
        loader = NumpyDataLoaderBase.wrap_numpy_dataset(data, global_batch_size=o.batch_size * o.length, collator=DataCollator(pad_token_id=0), work_dir=work, seed=1,
                                                        num_workers=o.workers, num_threads=0)
        made.append(loader)
        if state:
            loader.load_state_dict(state)
        loader.reshuffle(epoch=1)
        for batch in loader:
            yield batch["input_ids"], len(batch["input_ids"])
    return open_, lambda middle: {**made[0].state_dict(), "batches_processed": middle // o.batch_size, "tokens_processed": middle * o.length}


# ---- one measurement, inside its process

def tree():
    """This process and all that descend from it."""
    out, todo = [], [os.getpid()]
    while todo:
        pid = todo.pop()
        out.append(pid)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                todo += map(int, pathlib.Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return out


def processor():
    """Seconds of processor time of all of them."""
    ticks = 0
    for pid in tree():
        with contextlib.suppress(OSError):
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory():
    """Bytes of anonymous and shared memory of all of them; what is shared is counted in each."""
    total = 0
    for pid in tree():
        with contextlib.suppress(OSError):
            for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(("RssAnon", "RssShmem")):
                    total += int(line.split()[1]) * 1024
    return total


def inside(o):
    import logging, warnings
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with contextlib.suppress(ImportError):
        from loguru import logger
        logger.remove()
    name, _, rest = o.inside.partition("-")
    sides = {k.removeprefix("side_"): v for k, v in globals().items() if k.startswith("side_")}
    open_, cursor = sides[name](o, *([[]] if rest else []))
    if name != "pipe":
        import torch
        torch.set_num_threads(1)
    out = {}
    before = memory()
    state = json.loads(o.state) if o.state else None
    began = time.perf_counter()
    batches = open_(state)
    first, rows = next(batches)
    out["first"] = time.perf_counter() - began
    out["dtype"] = str(getattr(first, "dtype", "bytes"))
    if o.measure:
        for kind in ("delivered", "int64"):
            if kind == "int64" and (first is None or out["dtype"] == "torch.int64"):
                out[kind] = out["delivered"] if first is not None else None
                continue
            samples, cpu, began, total = 0, processor(), time.perf_counter(), 0
            for batch, rows in batches:
                if kind == "int64":
                    batch = batch.long()
                if batch is not None:
                    total += int(batch[0, 0])
                samples += rows
                if time.perf_counter() - began > o.seconds:
                    break
            wall, cpu = time.perf_counter() - began, processor() - cpu
            out[kind] = {"samples": samples, "wall": samples / wall, "cpu": samples / max(cpu, 0.01)}
            if kind == "delivered" and out["dtype"] != "torch.int64" and name == "mosaicml":
                batches = open_(None)  # its epoch may have ended
                next(batches)
        out["memory"] = memory() - before
        out["state"] = cursor(o.middle)
    print("RESULT " + json.dumps(out), flush=True)
    os._exit(0)  # threads of loaders that do not end


# ---- the rounds

def measure(o, side, workers, *more):
    command = [sys.executable, __file__, *sys.argv[1:], "--work", o.work, "--inside", side, "--workers", workers, "--middle", o.middle, *more]
    p = subprocess.run(list(map(str, command)), capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, {o.core}),
                       env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"})
    for line in p.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise SystemExit(f"{side} failed:\n{p.stdout[-2000:]}\n{p.stderr[-4000:]}")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--mula", type=os.path.abspath, default=here.parent / "bin" / "mula")
    ap.add_argument("--megabytes", type=int, default=300, help="of tokens")
    ap.add_argument("--length", type=int, default=4096, help="of a sample")
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--seconds", type=float, default=5)
    ap.add_argument("--core", type=int, default=0)
    ap.add_argument("--workers", type=int, nargs="+", default=[0])
    ap.add_argument("--only", nargs="+", choices=SIDES, default=SIDES)
    ap.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/mula-loaders"), help="folder on the file system to measure on")
    ap.add_argument("--inside", help=argparse.SUPPRESS)
    ap.add_argument("--state", help=argparse.SUPPRESS)
    ap.add_argument("--middle", type=int, help=argparse.SUPPRESS)
    ap.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    o = ap.parse_args()
    o.work = o.work.resolve()
    if o.inside:
        o.workers = o.workers[0]
        inside(o)
    make(o)
    windows = (o.work / "tokens.bin").stat().st_size // 2 // (o.length + 1)
    o.middle = windows // 2 // o.batch_size * o.batch_size
    results = {side: [] for side in o.only}
    chosen = {}
    for round_ in range(o.rounds):
        for side in o.only:
            forget(o)
            tried = o.workers if side not in chosen and side not in ("pipe", "mula", "mula-lean") else [chosen.get(side, 0)]
            cold = measure(o, side, tried[0])
            warm(o, side)
            runs = {w: measure(o, side, w, "--measure") for w in tried}
            chosen[side] = max(runs, key=lambda w: (runs[w]["int64"] or runs[w]["delivered"])["wall"])
            run = runs[chosen[side]]
            resumed = measure(o, side, chosen[side], "--state", json.dumps(run["state"]))
            results[side].append(run | {"cold": cold["first"], "resumed": resumed["first"], "cursor": len(json.dumps(run["state"]))})
            print(f"round {round_ + 1}: {side}: {json.dumps(results[side][-1])[:400]}", file=sys.stderr, flush=True)

    def rate(side, kind, of):
        values = [r[kind][of] for r in results[side] if r[kind]]
        return f"{max(values):,.0f} ({statistics.median(values):,.0f})" if values else ""

    def middle(side, key):
        return statistics.median(r[key] for r in results[side])
    with open("/proc/loadavg") as f:
        print(f"{o.megabytes} MB of tokens, {windows:,} windows of {o.length + 1}, batches of {o.batch_size}; load {f.read().split()[0]}\n")
    print("| loader | workers | gives | samples/s delivered | of processor time | samples/s int64 | of processor time | first, cold | first, warm | resume | memory | cursor |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for side in o.only:
        print(f"| {side} | {chosen[side]} | {results[side][0]['dtype']} | {rate(side, 'delivered', 'wall')} | {rate(side, 'delivered', 'cpu')} | {rate(side, 'int64', 'wall')} | "
              f"{rate(side, 'int64', 'cpu')} | {middle(side, 'cold') * 1e3:,.0f} ms | {middle(side, 'first') * 1e3:,.0f} ms | {middle(side, 'resumed') * 1e3:,.0f} ms | "
              f"{middle(side, 'memory') / 1e6:,.0f} MB | {middle(side, 'cursor'):,.0f} B |")
    peers = [s for s in o.only if s not in ("pipe", "mula", "mula-lean")]
    for ours in ("mula", "mula-lean"):
        if ours in o.only and peers:
            print()
            for kind in ("delivered", "int64"):
                best = max(peers, key=lambda s: max(r[kind]["wall"] for r in results[s]))
                for of in ("wall", "cpu"):
                    ratio = statistics.median(r[kind][of] for r in results[ours]) / statistics.median(r[kind][of] for r in results[best])
                    print(f"{ours} / {best}, {kind}, by {of} time: {ratio:.1f}")


if __name__ == "__main__":
    main()
