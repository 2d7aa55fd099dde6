#!/usr/bin/env python3
"""Compares `mula index` with Megatron core: both build the same index files from the same tokens.

They run alternately, in one run, and the outputs are compared byte for byte.

    make bench-index                       # makes the environments of `make conformance`, then runs
    benchmarks/index.py --environments DIR [--scale 1] [--rounds 3] [--only file many blend]
        [--work DIR]

file    one file of 10M and of 100M documents, one epoch
many    100, 1,000 and 2,000 files of OLMoE-mix-0924's shape, 30M samples, weights by tokens
blend   the blend loop alone: 7, 100, 1,000, 2,000 datasets of lognormal weights, 100M samples, both
        arrays in memory, not written

Sequences have 4,096 tokens, and fixtures/mix makes the inputs. The original is megatron-core as
published, with its compiled helpers. Its time is the time of its builder or helper, without
Python's imports. mula's time is the time of the complete command. The original runs with 1 and 2
dataset builder threads, mula with 1 and 2 threads. If the original would need more than --patience
seconds for a blend, both are measured on the number of samples that it can process in this time,
and the table has this number. The table also has mula's time for all samples, without a ratio.

The floor of a figure is the number of bytes that have to be moved, divided by the bandwidth
measured here: lengths read and index files written, at the bandwidth of new files. For the blend
loop it is the time to fill the arrays with zeros.

--scale 0.01 makes everything a hundredth as large, to try the script.
"""

import argparse, hashlib, json, os, pathlib, random, resource, shutil, statistics, subprocess, sys, tempfile, time

here = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(here.parent / "conformance"))

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("--environments", type=pathlib.Path, help="folder that conformance/environments.sh made")
ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin" / "mula")
ap.add_argument("--version", default="0.16.1", help="of megatron-core")
ap.add_argument("--scale", type=float, default=1)
ap.add_argument("--rounds", type=int, default=3)
ap.add_argument("--threads", type=int, nargs="+", default=[1, 2])
ap.add_argument("--only", nargs="+", choices=["file", "many", "blend"], default=["file", "many", "blend"])
ap.add_argument("--files", type=int, nargs="+", default=[100, 1000, 2000], help="of many")
ap.add_argument(
    "--patience",
    type=float,
    default=60,
    help="limit of one run of the original's blend loop, in seconds, as predicted from a tenth of a second",
)
ap.add_argument(
    "--work", type=pathlib.Path, help="folder on the file system to measure on (default: the temporary folder)"
)
ap.add_argument("--bandwidth", nargs=2, metavar="DIR SIZE", help=argparse.SUPPRESS)
ap.add_argument("--inside", nargs=2, metavar="JOB RESULT", help=argparse.SUPPRESS)

LENGTH = 4096


def inside(job, result):
    """Runs Megatron core on one job, in its environment's Python."""
    import numpy
    import original
    from megatron.core.datasets import helpers

    if job["kind"] == "blend":
        weights = numpy.array(job["weights"])
        datasets, samples = (
            numpy.zeros(job["samples"], dtype=numpy.int16),
            numpy.zeros(job["samples"], dtype=numpy.int64),
        )
        began = time.perf_counter()
        helpers.build_blending_indices(datasets, samples, weights, len(weights), job["samples"], False)
        out = {
            "seconds": time.perf_counter() - began,
            "hash": hashlib.sha256(datasets.tobytes() + samples.tobytes()).hexdigest(),
        }
    else:
        os.chdir(job["root"])
        builder = original.builder(job["case"], job["cache"], num_dataset_builder_threads=job["threads"])
        began = time.perf_counter()
        builder.build()
        out = {"seconds": time.perf_counter() - began}
    out["megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    pathlib.Path(result).write_text(json.dumps(out))


def bandwidth(directory, size):
    """Measures bytes a second written to a new file: the best of three, cached or direct."""
    import mmap

    piece = 8 << 20
    block = mmap.mmap(-1, piece)  # aligned, as direct output needs
    block.write(os.urandom(1 << 20) * 8)
    best = 0
    for flags in (0, getattr(os, "O_DIRECT", 0)) * 3:
        path = f"{directory}/bandwidth"
        try:
            f = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | flags)
        except OSError:
            continue  # a file system without direct output
        began = time.perf_counter()
        for _ in range(size // piece):
            os.write(f, block)
        best = max(best, size / (time.perf_counter() - began))
        os.close(f)
        os.remove(path)
    return best


class Bench:
    def __init__(self, args, tmp):
        import cases, compare

        self.args, self.tmp, self.cases, self.compare = args, tmp, cases, compare
        self.caches = self.roots = 0
        self.mula = args.mula.resolve()
        self.blendloop = f"{tmp}/blendloop"
        root = here.parent
        subprocess.run(["go", "build", "-o", f"{tmp}/mix", "./fixtures/mix"], cwd=root, check=True)
        subprocess.run(["go", "build", "-o", self.blendloop, "./benchmarks/blendloop"], cwd=root, check=True)
        # In a separate process: a process inherits the peak memory of its parent.
        line = [sys.executable, __file__, "--bandwidth", tmp, str(int(max(64, 2048 * min(1, args.scale * 4))) << 20)]
        self.written = float(subprocess.run(line, check=True, stdout=subprocess.PIPE).stdout)
        print(f"bandwidth: {self.written / 1e9:.2f} GB/s written to new files in {tmp}\n")

    def original(self, job):
        pathlib.Path(f"{self.tmp}/job").write_text(json.dumps(job))
        python = self.args.environments / f"megatron-{self.args.version}" / "bin" / "python"
        subprocess.run(
            [python, __file__, "--inside", f"{self.tmp}/job", f"{self.tmp}/result"],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        return json.loads(pathlib.Path(f"{self.tmp}/result").read_text())

    def command(self, line):
        """Runs a command and returns wall seconds, processor seconds, peak memory in MB, and
        output.
        """
        began = time.perf_counter()
        process = subprocess.Popen([str(word) for word in line], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, line)
        return {
            "seconds": seconds,
            "megabytes": used.ru_maxrss / 1024,
            "processor": used.ru_utime + used.ru_stime,
            "output": output.decode(),
        }

    def row(self, label, runs, base, floor):
        best = min(r["seconds"] for r in runs)
        ratio = "" if base is None else f"{base / best:8.1f}x"
        print(
            f"    {label:44} {best:9.3f} {statistics.median(r['seconds'] for r in runs):9.3f} s "
            f"{max(r['megabytes'] for r in runs):8.0f} MB {ratio:>9}  {100 * floor / best:5.1f} %"
        )
        return best

    def head(self, title, bytes, floor, how):
        print(f"{title}\n    floor: {bytes / 1e9:.3f} GB over {how} = {floor:.3f} s")
        print(f"    {'':44} {'best':>9} {'median':>9}   {'peak':>8}    {'ratio':>9}  floor")

    def build(self, title, mix, words, samples):
        """Measures one build by both.

        mix has the arguments that make the inputs, words(root) returns the blend, and
        samples(sizes) the number of samples.
        """
        self.roots += 1
        root = f"{self.tmp}/data-{self.roots}"
        subprocess.run([f"{self.tmp}/mix", "-bin", "-output", root, *mix], check=True, stdout=subprocess.DEVNULL)
        sizes = json.loads(pathlib.Path(root, "sizes.json").read_text())
        case = self.cases.base(
            data_path=words(root), split="1,0,0", sizes=[samples(sizes), 0, 0], sequence_length=LENGTH, extra_token=True
        )
        runs, caches = {}, {}
        for _ in range(self.args.rounds):
            for who in ("megatron-core", "mula"):
                for threads in self.args.threads:
                    # Caches are deleted only at the end: ext4 does not reuse recently freed inodes,
                    # and skipping thousands of them would cost the next run time.
                    self.caches += 1
                    cache = caches[who] = f"{self.tmp}/cache-{self.caches}"
                    os.sync()
                    if who == "mula":
                        run = self.command(
                            self.compare.command(self.mula, case, self.args.version, root, cache, threads)
                        )
                    else:
                        run = self.original(
                            {"kind": "files", "case": case, "root": root, "cache": cache, "threads": threads}
                        )
                    runs.setdefault((who, threads), []).append(run)
        found = self.compare.differences(caches["megatron-core"], caches["mula"])
        if found:
            sys.exit(f"{title}: {found}")
        names = self.compare.data(caches["mula"])
        moved = 4 * sizes["documents"] + sum(os.path.getsize(f"{caches['mula']}/{name}") for name in names)
        floor = moved / self.written
        self.head(
            f"{title}: {sizes['documents']:,} documents, {sizes['tokens'] / 1e9:.1f}G tokens, {case['sizes'][0]:,} "
            f"samples, {len(names)} files, equal bytes",
            moved,
            floor,
            f"{self.written / 1e9:.2f} GB/s",
        )
        self.rows(runs, f"megatron-core {self.args.version}", floor)

    def rows(self, runs, peer, floor):
        base = None
        for (who, threads), measured in runs.items():
            label = f"{peer if who != 'mula' else 'mula'}, {threads} thread{'s' if threads > 1 else ''}"
            if who != "mula":
                best = self.row(label, measured, None, floor)
                base = best if base is None else min(base, best)
            else:
                self.row(label, measured, base, floor)
        print()

    def blend(self, datasets, samples):
        generator = random.Random(f"mula bench-index {datasets}")
        weights = [generator.lognormvariate(0, 1) for _ in range(datasets)]
        total = sum(weights)
        weights = [w / total for w in weights]
        text = "\n".join(map(repr, weights))
        few = min(samples, max(10_000, 60_000_000 // datasets))
        took = self.original({"kind": "blend", "weights": weights, "samples": few})["seconds"]
        cut = min(samples, int(few * self.args.patience / took))
        runs = {}
        hashes = set()

        def mine(n, threads):
            path = f"{self.tmp}/weights"
            pathlib.Path(path).write_text(text)
            with open(path) as f:
                began = subprocess.Popen(
                    [self.blendloop, "-samples", str(n), "-threads", str(threads)], stdin=f, stdout=subprocess.PIPE
                )
                output = began.stdout.read().split()
                _, status, used = os.wait4(began.pid, 0)
            began.returncode = os.waitstatus_to_exitcode(status)
            assert began.returncode == 0
            return {
                "seconds": float(output[0]),
                "floor": float(output[1]),
                "megabytes": used.ru_maxrss / 1024,
                "hash": output[2].decode(),
            }

        whole = {}
        for _ in range(self.args.rounds):
            run = self.original({"kind": "blend", "weights": weights, "samples": cut})
            runs.setdefault(("megatron-core", 1), []).append(run)
            hashes.add(run["hash"])
            for threads in self.args.threads:
                run = mine(cut, threads)
                hashes.add(run["hash"])
                runs.setdefault(("mula", threads), []).append(run)
                if cut < samples:
                    whole.setdefault(("mula", threads), []).append(mine(samples, threads))
        if len(hashes) != 1:
            sys.exit(f"blend of {datasets}: other arrays")
        floor = min(r["floor"] for r in runs["mula", self.args.threads[0]])
        self.head(
            f"blend of {datasets:,} datasets, {cut:,} samples"
            f"{f', of {samples:,} for which the original would take longer than --patience' if cut < samples else ''}"
            "; equal arrays",
            10 * cut,
            floor,
            f"{10 * cut / floor / 1e9:.1f} GB/s of memory",
        )
        self.rows(runs, f"megatron-core {self.args.version}, build_blending_indices", floor)
        if whole:
            print(f"    mula alone, all {samples:,} samples:")
            self.rows(whole, "", min(r["floor"] for r in whole["mula", self.args.threads[0]]))


def main():
    args = ap.parse_args()
    if args.inside:
        return inside(json.loads(pathlib.Path(args.inside[0]).read_text()), args.inside[1])
    if args.bandwidth:
        return print(bandwidth(args.bandwidth[0], int(args.bandwidth[1])))
    if args.environments is None:
        ap.error("--environments is needed")
    with tempfile.TemporaryDirectory(dir=args.work, prefix="mula-bench-") as tmp:
        bench = Bench(args, tmp)
        if "file" in args.only:
            for millions in (10, 100):
                documents = int(millions * 1e6 * args.scale)
                bench.build(
                    "one file",
                    ["-documents", str(documents)],
                    lambda root: ["plain/plain-0000"],
                    lambda sizes: (sizes["tokens"] - 1) // LENGTH,
                )
        if "many" in args.only:
            samples = int(30e6 * args.scale)
            fraction = (
                samples * LENGTH / 4.0682e12 * 1.02
            )  # fewer than one epoch has, so that surplus and rounding do not start a second
            for files in args.files:
                bench.build(
                    f"{files:,} files",
                    ["-fraction", repr(fraction), "-files", str(files)],
                    lambda root: pathlib.Path(root, "blend.txt").read_text().split(),
                    lambda sizes: samples,
                )
        if "blend" in args.only:
            for datasets in (7, 100, 1000, 2000):
                bench.blend(datasets, int(100e6 * args.scale))


if __name__ == "__main__":
    main()
