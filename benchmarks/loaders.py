#!/usr/bin/env python3
"""Compares loaders of training samples: mula's client and the frameworks' own.

They read the same tokens, alternately, in one run, on one core. Prints Markdown tables.

    conformance/environments.sh DIR loaders && make build
    DIR/loaders/bin/python benchmarks/loaders.py [--megabytes 300] [--length 4096]
        [--batch-size 64] [--rounds 3] [--seconds 5] [--minutes 18] [--only mula grain …]
        [--work DIR]

The tokens are --megabytes of random documents of uint16 ids with lognormal lengths (about 1,300 on
average). Every side reads them in the layout of its own tools. The script writes missing layouts to
--work: twice the megabytes, on the measured file system. A sample is a window of L or L + 1 tokens,
in a shuffled order over all windows. A batch is one torch tensor of --batch-size samples.

pipe         `mula stream` into a pipe whose bytes are read and discarded: mula without a client
mula         clients/python over a unix socket, with the `mula serve` that it starts, and all
             columns: document starts, offsets and sources of the samples in addition to tokens
mula-lean    the same with only positions and tokens, which the other loaders return
mosaicml     StreamingDataset of fixed-length samples in MDS (uint16) under its StreamingDataLoader
grain        a MapDataset over a memory-mapped array of the windows, which it stacks to batches
grain-gather a MapDataset of window numbers, shuffled and batched; numpy gathers the rows of the
             mapped array: Grain's order, numpy's loader
megatron     Megatron-Core's GPTDataset (built by its own builder, mapped files, no attention mask)
             under a torch DataLoader with a sampler that resumes at consumed samples, as in
             Megatron-LM; it also returns labels, loss mask and position ids
datatrove    nanotron's DatatroveFolderDataset under a torch DataLoader with a shuffled sampler
olmo         OLMo-core's NumpyFSLDataset under its NumpyDataLoader

Each measurement uses a new process with one torch thread. The process and its children are bound
to --core. Timing starts after the imports of Python's packages, with programs and libraries in the
page cache. Figures:

delivered    samples/s of batches as the loader returns them, in torch, over --seconds, from the
             second batch on: by wall time on the core, and by processor time of all processes,
             which a busy machine affects less
int64        the same after .long() where the loader does not return int64, which an embedding
             needs: every side has then read and written all tokens
cold         milliseconds to the first batch without index files, and with no tokens in the page
             cache. mula has its plan, which is made once; the time that `mula blend` needs to make
             it, reading and hashing all tokens, is below the tables
warm         the same with index files and page cache
resume       the same, warm, resuming at the middle of the epoch from the loader's saved state
memory       anonymous and shared memory of all processes at the end, minus the memory after the
             imports; pages of several processes count once (proportional set size)
mapped       the same for mapped files, which are page cache that the kernel can reclaim
resident     all resident memory, with Python, torch, the loader's other imports, and mapped files
cursor       bytes of the state, as JSON

samples/s have the best of the rounds and the median, the other figures only the median. The first
round tries the numbers of worker processes in --workers (mosaicml, megatron, datatrove, olmo; for
Grain 16 read threads each). The fastest is used. A new round starts only if it will end within
--minutes of the start.
"""

import argparse, contextlib, importlib.metadata, json, os, pathlib, platform, shutil, signal, statistics, struct
import subprocess, sys, time

here = pathlib.Path(__file__).resolve().parent
SIDES = ["pipe", "mula", "mula-lean", "mosaicml", "grain", "grain-gather", "megatron", "datatrove", "olmo"]
OURS = SIDES[:3]
VOCABULARY = 50280
EOD = VOCABULARY - 1
EPOCHS = 1000  # of mula's plan: more than any side reads
STARTING = 5  # seconds for a process to start and import, for the estimate


# ---- the tokens, in every layout


def make(o):
    """Writes the missing layouts. made.json is written last and marks them as complete."""
    import numpy as np

    done = o.work / "made.json"
    wanted = {"megabytes": o.megabytes, "length": o.length, "mds": "mosaicml" in o.only, "format": 2}
    if done.exists() and json.loads(done.read_text()) in (wanted, wanted | {"mds": True}):
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
    count = int(ends[-1])
    with open(o.work / "tokens.bin", "wb") as f:
        for at in range(0, count, 1 << 24):
            part = draw.integers(0, EOD, min(1 << 24, count - at), np.uint16)
            first, last = np.searchsorted(ends, [at + 1, at + len(part) + 1])
            part[ends[first:last] - 1 - at] = EOD
            f.write(part)
    with open(o.work / "tokens.idx", "wb") as f:
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1))
        for array in (lengths, (ends - lengths) * 2, np.arange(len(lengths) + 1, dtype=np.int64)):
            f.write(array.tobytes())
    # mula and Megatron read these two files. Windows of mula share their last token with the next,
    # windows of the other layouts do not. OLMo-core and datatrove read the same bytes under another
    # name.
    for name in ("dolma/tokens.npy", "datatrove/tokens.ds"):
        (o.work / name).parent.mkdir()
        os.link(o.work / "tokens.bin", o.work / name)
    (o.work / "blend.yaml").write_text(
        f"sequence_length: {o.length}\nseed: 1\nsamples: {(count - 1) // o.length * EPOCHS}\nsources:\n"
        "- {name: tokens, shards: [tokens.idx]}\n"
    )
    if "mosaicml" in o.only:
        from streaming import MDSWriter

        tokens = np.memmap(o.work / "tokens.bin", np.uint16, "r")
        with MDSWriter(columns={"tokens": f"ndarray:uint16:{o.length + 1}"}, out=str(o.work / "mds")) as out:
            for i in range(len(tokens) // (o.length + 1)):
                out.write({"tokens": np.asarray(tokens[i * (o.length + 1) :][: o.length + 1])})
    done.write_text(json.dumps(wanted))


def seal(o):
    """Makes mula's plan, and returns the seconds."""
    began = time.perf_counter()
    subprocess.run(
        [o.mula, "blend", "--config", "blend.yaml", "--output", "plan.json"],
        cwd=o.work,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - began


def forget(o):
    """Removes index files, and drops the tokens from the page cache."""
    for name in ("megatron-cache", "olmo-work"):
        shutil.rmtree(o.work / name, ignore_errors=True)
    for file in o.work.rglob("*"):
        if file.is_file():
            with open(file, "rb") as f:
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(o, side):
    """Reads the side's files into the page cache."""
    for file in (o.work / "mds").rglob("*") if side == "mosaicml" else o.work.glob("tokens.*"):
        if file.is_file():
            with open(file, "rb", buffering=0) as f:
                while f.read(1 << 22):
                    pass


# ---- the sides, each in a separate process. Each function imports its packages and returns
# open(state), which returns an endless iterator of (tensor, rows), and cursor(), which returns the
# state at the middle of the epoch.


def side_pipe(o):
    import fcntl
    import numpy as np

    def open_(state):
        command = [
            o.mula,
            "stream",
            "--plan",
            o.work / "plan.json",
            "--batch-size",
            str(o.batch_size),
            "--from",
            str(state["position"] if state else 0),
        ]
        p = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
        with contextlib.suppress(OSError):
            fcntl.fcntl(p.stdout, fcntl.F_SETPIPE_SZ, 1 << 20)
        buffer = np.empty(o.batch_size * (o.length + 1) * 2, np.uint8)
        have = 0
        while n := p.stdout.readinto(memoryview(buffer)[have:]):
            have += n
            if have == len(buffer):
                have = 0
                yield None, o.batch_size

    return open_, lambda middle: {"position": middle}


def side_mula(o, columns=None):
    sys.path.insert(0, str(here.parent / "clients" / "python"))
    import mula
    import torch  # noqa: F401

    made = []

    def open_(state):
        with mula.Stream(o.work / "plan.json", o.batch_size, columns=columns, mula=o.mula) as data:
            made.append(data)
            if state:
                data.load_state_dict(state)
            for batch in data:
                yield batch.tokens, len(batch)

    open_.transport = lambda: made[0].transport
    return open_, lambda middle: {**made[0].state_dict(), "position": middle}


def side_mosaicml(o):
    import streaming
    from streaming import StreamingDataLoader, StreamingDataset

    streaming.base.util.clean_stale_shared_memory()  # of the previous process, which was killed
    made = []

    def open_(state):
        data = StreamingDataset(
            local=str(o.work / "mds"), shuffle=True, shuffle_seed=1, batch_size=o.batch_size, num_canonical_nodes=1
        )
        loader = StreamingDataLoader(
            data, batch_size=o.batch_size, num_workers=o.workers, drop_last=True, persistent_workers=o.workers > 0
        )
        made.append(loader)
        if state:
            loader.load_state_dict(state)
        while True:
            for batch in loader:
                yield batch["tokens"], len(batch["tokens"])

    return open_, lambda middle: {**made[0].state_dict(), "sample_in_epoch": middle}


def side_grain(o, gather=False):
    import grain
    import numpy as np
    import torch

    class Windows:
        def __init__(self):
            tokens = np.memmap(o.work / "tokens.bin", np.uint16, "r")
            self.count = len(tokens) // (o.length + 1)
            self.windows = np.asarray(tokens[: self.count * (o.length + 1)]).reshape(-1, o.length + 1)

        def __len__(self):
            return self.count

        def __getitem__(self, i):
            return self.windows[i]

    def data():
        source = Windows()
        if gather:
            samples = (
                grain.MapDataset.range(len(source))
                .shuffle(seed=1)
                .repeat(None)
                .batch(o.batch_size)
                .map(source.windows.__getitem__)
            )
        else:
            samples = grain.MapDataset.source(source).shuffle(seed=1).repeat(None).batch(o.batch_size)
        return iter(
            samples.to_iter_dataset(grain.ReadOptions(num_threads=16 * o.workers, prefetch_buffer_size=16 * o.workers))
        )

    def open_(state):
        batches = data()
        if state:
            batches.set_state(state)
        for batch in batches:
            yield torch.from_numpy(batch), len(batch)

    def cursor(middle):  # a state exists only for a position that was read
        probe = data()
        next(probe)

        def put(s):
            return {
                k: put(v) if isinstance(v, dict) else middle // o.batch_size if k == "next_index" else v
                for k, v in s.items()
            }

        return put(probe.get_state())

    return open_, cursor


class Sequential:
    """Returns the batches of a torch DataLoader after the consumed samples.

    They follow an order over all samples, or the dataset's own order.
    """

    def __init__(self, o, total, state, order=None):
        self.size, self.total, self.consumed, self.order = (
            o.batch_size,
            total,
            state["consumed_train_samples"] if state else 0,
            order,
        )

    def __len__(self):
        return (self.total - self.consumed) // self.size

    def __iter__(self):
        order = self.order() if self.order else None
        for at in range(self.consumed, self.total - self.size + 1, self.size):
            yield list(range(at, at + self.size)) if order is None else order[at : at + self.size].tolist()


def side_megatron(o):
    import torch

    sys.path.insert(0, str(here.parent / "conformance"))
    import original
    from megatron.core.datasets import gpt_dataset  # noqa: F401

    def open_(state):
        windows = (os.path.getsize(o.work / "tokens.bin") // 2 - 1) // o.length
        case = {
            "seed": 1,
            "sequence_length": o.length,
            "data_path": [str(o.work / "tokens")],
            "per_split": None,
            "split": "1",
            "tokenizer": {"class": "none"},
            "keep_partial": False,
            "extra_token": True,
            "surplus": 0.005,
            "renormalize": False,
            "sizes": [windows, 0, 0],
        }
        data = original.builder(case, str(o.work / "megatron-cache")).build()[0]
        loader = torch.utils.data.DataLoader(
            data, batch_sampler=Sequential(o, len(data), state), num_workers=o.workers, persistent_workers=o.workers > 0
        )
        while True:
            for batch in loader:
                yield batch["tokens"], len(batch["tokens"])

    return open_, lambda middle: {"consumed_train_samples": middle}


def side_datatrove(o):
    import torch
    from datatrove.utils.dataset import DatatroveFolderDataset

    def open_(state):
        data = DatatroveFolderDataset(str(o.work / "datatrove"), o.length, token_size=2)
        order = lambda: torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
        loader = torch.utils.data.DataLoader(
            data,
            batch_sampler=Sequential(o, len(data), state, order),
            num_workers=o.workers,
            persistent_workers=o.workers > 0,
        )
        while True:
            for batch in loader:
                yield batch["input_ids"], len(batch["input_ids"])

    return open_, lambda middle: {"consumed_train_samples": middle}


def side_olmo(o):
    import numpy as np
    from olmo_core.data import DataCollator, NumpyDataLoaderBase, NumpyFSLDataset

    made = []

    def open_(state):
        work = o.work / "olmo-work"
        data = NumpyFSLDataset(
            str(o.work / "dolma" / "tokens.npy"),
            sequence_length=o.length,
            pad_token_id=0,
            eos_token_id=EOD,
            vocab_size=VOCABULARY,
            dtype=np.uint16,
            include_instance_metadata=False,
        )
        data.work_dir = work
        data.prepare()
        loader = NumpyDataLoaderBase.wrap_numpy_dataset(
            data,
            global_batch_size=o.batch_size * o.length,
            collator=DataCollator(pad_token_id=0),
            work_dir=work,
            seed=1,
            num_workers=o.workers,
            num_threads=0,
        )
        made.append(loader)
        if state:
            loader.load_state_dict(state)
        loader.reshuffle(epoch=1)
        while True:
            for batch in loader:
                yield batch["input_ids"], len(batch["input_ids"])
            loader.reset()
            loader.reshuffle()

    return open_, lambda middle: {
        **made[0].state_dict(),
        "batches_processed": middle // o.batch_size,
        "tokens_processed": middle * o.length,
    }


# ---- one measurement, inside its process


def tree():
    """Returns this process and all its descendants."""
    out, todo = [], [os.getpid()]
    while todo:
        pid = todo.pop()
        out.append(pid)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                todo += map(int, pathlib.Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return out


def processor():
    """Returns the seconds of processor time of the process tree."""
    ticks = 0
    for pid in tree():
        with contextlib.suppress(OSError):
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory():
    """Returns the bytes of anonymous and shared memory and of mapped files of the process tree.

    A page of n processes counts 1/n in each.
    """
    bytes_ = {"Pss_Anon:": 0, "Pss_Shmem:": 0, "Pss_File:": 0}
    for pid in tree():
        with contextlib.suppress(OSError):
            for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                key, *rest = line.split()
                if key in bytes_:
                    bytes_[key] += int(rest[0]) * 1024
    return bytes_["Pss_Anon:"] + bytes_["Pss_Shmem:"], bytes_["Pss_File:"]


def inside(o):
    import logging, warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with contextlib.suppress(ImportError):
        from loguru import logger

        logger.remove()
    side = {
        "pipe": side_pipe,
        "mula": side_mula,
        "mula-lean": lambda o: side_mula(o, []),
        "mosaicml": side_mosaicml,
        "grain": side_grain,
        "grain-gather": lambda o: side_grain(o, True),
        "megatron": side_megatron,
        "datatrove": side_datatrove,
        "olmo": side_olmo,
    }[o.inside]
    open_, cursor = side(o)
    if o.inside != "pipe":
        import torch

        torch.set_num_threads(1)
    out = {}
    before = memory()
    state = json.loads(o.state) if o.state else None
    began = time.perf_counter()
    batches = open_(state)
    first, rows = next(batches)
    out["first"] = time.perf_counter() - began
    out["gives"] = (
        "bytes" if first is None else f"{str(first.dtype).removeprefix('torch.')} [{', '.join(map(str, first.shape))}]"
    )
    if first is not None and (first.shape[0] != o.batch_size or first.shape[1] not in (o.length, o.length + 1)):
        raise SystemExit(f"{o.inside} returns {out['gives']}, want {o.batch_size} windows of {o.length} tokens")
    if o.measure:
        for kind in ("delivered", "int64"):
            if kind == "int64" and (first is None or out["gives"].startswith("int64")):
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
            out[kind] = {"wall": samples / wall, "cpu": samples / max(cpu, 0.01)}
        after = memory()
        out["memory"], out["mapped"] = (max(a - b, 0) for a, b in zip(after, before))
        out["resident"] = sum(after)
        if hasattr(open_, "transport"):
            out["gives"] += f" by {open_.transport()}"
        out["state"] = cursor(o.middle)
    print("RESULT " + json.dumps(out), flush=True)
    if o.inside.startswith("mula"):
        batches.close()  # removes the server's files
    for pid in tree()[1:]:  # processes of loaders that do not end
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


# ---- the rounds


class Failed(Exception):
    pass


def measure(o, side, workers, *more):
    command = [
        sys.executable,
        __file__,
        *sys.argv[1:],
        "--work",
        o.work,
        "--inside",
        side,
        "--workers",
        workers,
        "--middle",
        o.middle,
        *more,
    ]
    p = subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {o.core}),
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "TOKENIZERS_PARALLELISM": "false",
        },
    )
    try:
        stdout, stderr = p.communicate(timeout=120 + 4 * o.seconds)
    except subprocess.TimeoutExpired as e:
        os.killpg(p.pid, signal.SIGKILL)
        p.communicate()
        raise Failed(f"still running after {e.timeout:.0f} s") from None
    except BaseException:
        os.killpg(p.pid, signal.SIGKILL)
        raise
    for line in stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise Failed(f"{stdout[-1000:]}\n{stderr[-4000:]}")


def turn(o, side, tried):
    """Measures one side: tries the numbers of workers, and returns all figures of the fastest."""
    forget(o)
    cold = measure(o, side, tried[0])
    warm(o, side)
    runs = {w: measure(o, side, w, "--measure") for w in tried}
    workers = max(runs, key=lambda w: (runs[w]["int64"] or runs[w]["delivered"])["wall"])
    run = runs[workers]
    resumed = measure(o, side, workers, "--state", json.dumps(run["state"]))
    return workers, run | {"cold": cold["first"], "resumed": resumed["first"], "cursor": len(json.dumps(run["state"]))}


def load():
    return pathlib.Path("/proc/loadavg").read_text().split()[0]


def machine(o):
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    versions = [f"mula {subprocess.run([o.mula, '--version'], capture_output=True, text=True).stdout.split()[2]}"]
    for package in (
        "torch",
        "numpy",
        "pyarrow",
        "mosaicml-streaming",
        "grain",
        "megatron-core",
        "datatrove",
        "ai2-olmo-core",
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    gigabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    return (
        f"{os.cpu_count()} cores of {cpu}, {gigabytes:.0f} GB, Linux {platform.release()}, "
        f"Python {platform.python_version()}; {', '.join(versions)}"
    )


SPEEDS = [("delivered", "wall"), ("delivered", "cpu"), ("int64", "wall"), ("int64", "cpu")]
COSTS = [
    ("cold", 1e3),
    ("first", 1e3),
    ("resumed", 1e3),
    ("memory", 1e-6),
    ("mapped", 1e-6),
    ("resident", 1e-6),
    ("cursor", 1),
]


def tables(o, results, chosen):
    """Prints both tables, with mula's ratio to the best of the others in every column."""

    def speed(side, kind, of):
        return [r[kind][of] for r in results[side] if r[kind]]

    def cost(side, key):
        return statistics.median(r[key] for r in results[side])

    sides = [s for s in o.only if results[s]]
    peers = [s for s in sides if s not in OURS]
    ours = [s for s in ("mula", "mula-lean") if s in sides] if peers else []
    print(
        "| loader | workers | a batch | samples/s, delivered | for a second of CPU | samples/s, int64 | for a second "
        "of CPU |\n|---|---|---|---|---|---|---|"
    )
    for side in sides:
        cells = [
            f"{max(v):,.0f} ({statistics.median(v):,.0f})" if (v := speed(side, *column)) else "" for column in SPEEDS
        ]
        print(f"| {side} | {chosen[side]} | {results[side][0]['gives']} | {' | '.join(cells)} |")
    for side in ours:
        best = [max((statistics.median(speed(p, *column)), p) for p in peers) for column in SPEEDS]
        cells = [f"**{statistics.median(speed(side, *column)) / b:.2f}** ({p})" for column, (b, p) in zip(SPEEDS, best)]
        print(f"| **{side} / best peer** | | | {' | '.join(cells)} |")
    print(
        "\n| loader | first batch, cold, ms | warm, ms | resume, ms | memory, MB | mapped, MB | resident, MB | cursor, "
        "bytes |\n|---|---|---|---|---|---|---|---|"
    )
    for side in sides:
        print(f"| {side} | {' | '.join(f'{cost(side, key) * scale:,.0f}' for key, scale in COSTS)} |")
    for side in ours:
        best = [min((cost(p, key), p) for p in peers) for key, _ in COSTS]
        cells = [f"**{cost(side, key) / b:.2f}** ({p})" if b else "" for (key, _), (b, p) in zip(COSTS, best)]
        print(f"| **{side} / best peer** | {' | '.join(cells)} |")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--mula", type=os.path.abspath, default=here.parent / "bin" / "mula")
    ap.add_argument("--megabytes", type=int, default=300, help="of tokens")
    ap.add_argument("--length", type=int, default=4096, help="of a sample")
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--seconds", type=float, default=5)
    ap.add_argument("--minutes", type=float, default=18, help="for the rounds")
    ap.add_argument("--core", type=int, default=0)
    ap.add_argument("--workers", type=int, nargs="+", default=[0, 1])
    ap.add_argument("--only", nargs="+", choices=SIDES, default=SIDES)
    ap.add_argument(
        "--work",
        type=pathlib.Path,
        default=pathlib.Path("/tmp/mula-loaders"),
        help="folder on the file system to measure on",
    )
    ap.add_argument("--inside", help=argparse.SUPPRESS)
    ap.add_argument("--state", help=argparse.SUPPRESS)
    ap.add_argument("--middle", type=int, help=argparse.SUPPRESS)
    ap.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    o = ap.parse_args()
    o.work = o.work.resolve()
    if o.inside:
        o.workers = o.workers[0]
        inside(o)
    if o.megabytes * 500_000 < 4 * o.batch_size * (o.length + 1):
        ap.error(f"{o.megabytes} MB are less than four batches; choose more --megabytes")
    tried = {side: [0] if side in OURS else o.workers for side in o.only}
    one = sum(
        3 * STARTING + (2 if side in ("mosaicml", "grain", "grain-gather", *OURS) else 1) * o.seconds for side in o.only
    )
    more = sum((len(t) - 1) * (STARTING + 2 * o.seconds) for t in tried.values())
    print(
        f"about {(o.megabytes / 20 + more + o.rounds * one) / 60:.0f} minutes on a quiet machine",
        file=sys.stderr,
        flush=True,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the measured process ends with this process
    began, loads = time.monotonic(), [load()]
    make(o)
    forget(o)
    sealed = seal(o)
    windows = (o.work / "tokens.bin").stat().st_size // 2 // (o.length + 1)
    o.middle = windows // 2 // o.batch_size * o.batch_size
    results, chosen, failures = {side: [] for side in o.only}, {}, {}
    log = open(o.work / "results.jsonl", "w")
    for round_ in range(o.rounds):
        started = time.monotonic()
        for side in o.only:
            if side in failures:
                continue
            try:
                workers, result = turn(o, side, [chosen[side]] if side in chosen else tried[side])
            except Failed as e:
                failures[side] = str(e)
                print(f"{side} failed: {e}", file=sys.stderr, flush=True)
                continue
            chosen.setdefault(side, workers)
            results[side].append(result)
            line = json.dumps({"round": round_ + 1, "side": side, "workers": workers, **result})
            print(line, file=log, flush=True)
            print(line[:300], file=sys.stderr, flush=True)
        now = time.monotonic()
        if now + now - started > began + o.minutes * 60 and round_ + 1 < o.rounds:
            print(f"stopping after round {round_ + 1}: another would exceed {o.minutes:g} minutes", file=sys.stderr)
            break
    loads.append(load())
    print(
        f"{o.megabytes} MB of tokens, {windows:,} windows of {o.length + 1}, batches of {o.batch_size}, "
        f"{max(map(len, results.values()))} rounds of {o.seconds:g} s; "
        f"{machine(o)}; {time.strftime('%Y-%m-%d')}, load {loads[0]} at the start, {loads[1]} at the end, one of it "
        "this run's.\n"
    )
    tables(o, results, chosen)
    print(
        f"\n`mula blend`, once for a plan, reading and hashing all tokens from disk: {sealed:.2f} s. samples/s: the "
        "best round, in brackets the median."
    )
    for side, message in failures.items():
        print(f"\n{side} failed: {message.strip().splitlines()[-1] if message.strip() else 'no message'}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
