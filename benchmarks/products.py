#!/usr/bin/env python3
"""Compares matrix products of mula's CPU device with OpenBLAS (numpy) and torch.mm.

All compute the same shapes, alternately, in one run. Prints Markdown tables.

    python benchmarks/products.py [--precision fp32 bf16] [--threads 1 2] [--forms NN NT TN]
        [--shapes a c ...] [--rounds 5] [--seconds 0.1] [--without torch onednn]

The interpreter needs numpy with OpenBLAS, torch and oneDNN, except for --without. Every library and
number of threads has a separate process, which waits while another is measured. A measurement
repeats a product for --seconds. A figure is GFLOP per second of processor time, times threads: the
median of the rounds. The number in brackets is the fastest product by wall time. A ratio is the
median of the rounds' ratios.

mula      benchmarks/productloop
onednn    the same with mula's device onednn; MULA_ONEDNN_LIB sets the path of its library
openblas  numpy.matmul, without bf16. Groups are a loop over products
torch     torch.mm into an output (MKL or oneDNN). For bf16, operands and results are bf16; mula's
          are fp32 in memory

Shapes, rows × N × K: NN is C[rows, N] = A[rows, K] B[K, N]; NT has B[N, K]; TN is C[K, N] = A[rows,
K]' B[rows, N].
"""

import argparse, json, os, pathlib, statistics, subprocess, sys, tempfile, time

here = pathlib.Path(__file__).resolve().parent

SHAPES = {  # rows (of each group), N, K
    "a": ([64], 1024, 512),
    "b": ([256], 1024, 512),
    "c": ([1024], 1024, 512),
    "d": ([2048], 1024, 512),
    "e": ([2048], 512, 1024),
    "g": ([200, 90, 31, 257, 128, 64, 150, 104], 1024, 512),
    "tiny attention": ([2048], 256, 256),
    "tiny logits": ([2048], 4096, 256),
    "tiny up": ([512 + (e * 37 % 16 - 7) * 30 - 15 for e in range(16)], 128, 256),
    "tiny down": ([512 + (e * 37 % 16 - 7) * 30 - 15 for e in range(16)], 256, 128),
    "middle attention": ([2048], 768, 768),
    "middle up": ([2000 + (e * 5 % 8 - 3) * 200 for e in range(8)], 512, 768),
    "middle down": ([2000 + (e * 5 % 8 - 3) * 200 for e in range(8)], 768, 512),
}


# ---- the other libraries, each in a separate process: answers requests like productloop


def serve(library):
    if library == "openblas":
        import numpy

        random = lambda rows, columns, precision: (
            numpy.random.rand(rows, columns).astype(numpy.float32) - numpy.float32(0.5)
        )
        empty = lambda rows, columns, precision: numpy.empty((rows, columns), numpy.float32)
        multiply = lambda a, b, c: numpy.matmul(a, b, out=c)
    else:
        import torch

        types = {"fp32": torch.float32, "bf16": torch.bfloat16}
        random = lambda rows, columns, precision: (torch.rand(rows, columns) - 0.5).to(types[precision])
        empty = lambda rows, columns, precision: torch.empty(rows, columns, dtype=types[precision])
        multiply = lambda a, b, c: torch.mm(a, b, out=c)
    for line in sys.stdin:
        precision, threads, form, groups, n, k, seconds = line.split()
        threads, n, k, seconds, counts = (
            int(threads),
            int(n),
            int(k),
            float(seconds),
            [int(c) for c in groups.split(",")],
        )
        if library == "torch":
            torch.set_num_threads(threads)
        products = []
        for rows in counts:
            a = random(rows, k, precision)
            if form == "TN":
                products.append((a.T, random(rows, n, precision), empty(k, n, precision)))
            else:
                b = random(n, k, precision).T if form == "NT" else random(k, n, precision)
                products.append((a, b, empty(rows, n, precision)))
        best, count = 1e9, 0
        for p in products:
            multiply(*p)
        used, began = time.process_time(), time.perf_counter()
        while count == 0 or time.perf_counter() - began < seconds:
            start = time.perf_counter()
            for p in products:
                multiply(*p)
            best = min(best, time.perf_counter() - start)
            count += 1
        used = (time.process_time() - used) / count / threads
        flops = 2 * sum(counts) * n * k
        print(f"{flops / best / 1e9:.3f} {flops / used / 1e9:.3f} {count}", flush=True)


# ---- measurements


class Side:
    def __init__(self, command, threads):
        env = {
            **os.environ,
            **{v: str(threads) for v in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")},
        }
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, *request):
        time.sleep(0.03)  # until the previous side's threads no longer poll for work
        print(*request, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline().split()
        if not answer:
            sys.exit(f"{self.process.args} ended")
        return float(answer[0]), float(answer[1])

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def compare(args, program):
    for precision in args.precision:
        peers = [
            s
            for s in ("openblas", "torch", "onednn")
            if s not in args.without and (precision, s) != ("bf16", "openblas")
        ]
        print(f"\n{precision}: GFLOP per second of processor time, times threads (by the clock)\n")
        print("| shape | form | threads | mula |" + "".join(f" {p} | mula / {p} |" for p in peers))
        print("|---|---|---|---|" + "---|---|" * len(peers), flush=True)
        for threads in args.threads:
            sides = {"mula": Side([program], threads)} | {
                p: Side([program, p] if p == "onednn" else [sys.executable, __file__, "--serve", p], threads)
                for p in peers
            }
            for shape in args.shapes:
                rows, n, k = SHAPES[shape]
                for form in args.forms:
                    found = {s: [] for s in sides}
                    for r in range(args.rounds):
                        for s in sorted(sides, reverse=r % 2 == 1):
                            found[s].append(
                                sides[s].ask(precision, threads, form, ",".join(map(str, rows)), n, k, args.seconds)
                            )
                    cell = lambda s: (
                        f"{statistics.median(f[1] for f in found[s]):.0f} ({max(f[0] for f in found[s]):.0f})"
                    )
                    ratio = lambda p: statistics.median(m[1] / o[1] for m, o in zip(found["mula"], found[p]))
                    clock = lambda p: max(f[0] for f in found["mula"]) / max(f[0] for f in found[p])
                    print(
                        f"| {shape} | {form} | {threads} | {cell('mula')} |"
                        + "".join(f" {cell(p)} | {ratio(p):.2f} ({clock(p):.2f}) |" for p in peers),
                        flush=True,
                    )
            for s in sides.values():
                s.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--forms", nargs="+", default=["NN", "NT", "TN"], choices=["NN", "NT", "TN"])
    parser.add_argument(
        "--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES)
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--without", nargs="+", default=[], choices=["openblas", "torch", "onednn"])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    with tempfile.TemporaryDirectory() as tmp:
        program = f"{tmp}/productloop"
        subprocess.run(
            ["go", "build", "-o", program, "./benchmarks/productloop"],
            cwd=here.parent,
            check=True,
            env={**os.environ, "CGO_ENABLED": "0"},
        )
        compare(args, program)


if __name__ == "__main__":
    main()
