#!/usr/bin/env python3
"""Trains the same models by mula and by PyTorch + transformers.

Both start from the same weights and use the same batches, alternately, in one run.

    conformance/environments.sh DIR transformers-5.23.0 && make build
    DIR/transformers-5.23.0/bin/python benchmarks/training.py [--quick] [--models tiny]
        [--precisions fp32] [--threads 2] [--rounds 3] [--work DIR] [--gpu]

tiny    mula-tiny, 8 x 256 tokens a step
mid     an OLMoE of 59M active parameters of 153M: vocabulary 16,384, width 512, 8 heads, 10 layers,
        8 of 32 experts of width 256; 2 x 1,024 tokens a step
cut     mula-7b-a1b with 2 of its 16 layers: 1.05 billion parameters, 0.34 billion active; 4 x 1,024
        tokens a step

A step is the forward and backward pass with the load-balancing loss of transformers, clipping and
AdamW. mula is the command `mula train`, timed by the seconds in its metrics.jsonl. PyTorch uses
transformers' OlmoeForCausalLM with attention sdpa and torch's fused AdamW. A first round finds the
fastest variant for the model, the precision and the number of threads: transformers' CPU
implementations of experts (eager, grouped_mm), with or without torch.compile, and for bf16
torch.autocast or bfloat16 weights with a float32 master copy. Every run is a separate process,
bound to as many cores as it has threads. The first --warm steps of a run are not counted. Ids are
drawn by frequency from an artificial distribution. They affect the speed of both sides only through
the balance of the routing.

A figure of a round is the median of its steps. Columns are the median and the best of the rounds.
CPU seconds are for the counted steps, per 1,000 tokens. Memory is the peak resident memory in the
steps. FLOPs are computed by moe.Config.FLOPsPerToken: matrix products alone, attention not halved.
They are compared with the fastest product of 2048 x 2048 matrices found here, by numpy's OpenBLAS
or torch's MKL or oneDNN. No training reaches this peak. The losses of both sides follow each table.
In fp32 they agree, see conformance/training.py. Rounds of bf16 also train with mula's bf16_mixed.

With --gpu both use the GPU: mula its OpenCL device, PyTorch CUDA, both with all cores and 4 times
the rows. PyTorch's memory is then what it allocated there; mula's is not known.
"""

import argparse, itertools, json, os, pathlib, statistics, subprocess, sys, tempfile, time

here = pathlib.Path(__file__).resolve().parent
TINY = dict(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_experts=16,
    num_experts_per_tok=4,
)
MID = dict(
    vocab_size=16384,
    hidden_size=512,
    intermediate_size=256,
    num_hidden_layers=10,
    num_attention_heads=8,
    num_key_value_heads=8,
    num_experts=32,
    num_experts_per_tok=8,
)
CUT = dict(
    vocab_size=50304,
    hidden_size=2048,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=16,
    num_experts=64,
    num_experts_per_tok=8,
)
# fields of the model, rows and tokens of a step, counted steps of a round
MODELS = {"tiny": (TINY, 8, 256, 12), "mid": (MID, 2, 1024, 3), "cut": (CUT, 4, 1024, 3)}
VARIANTS = {
    "fp32": [dict(experts="eager"), dict(experts="grouped_mm"), dict(experts="grouped_mm", compile=True)],
    "bf16": [
        dict(experts=e, compile=c, weights=w)
        for w in ("autocast", "bf16")
        for e, c in (("eager", False), ("grouped_mm", False), ("grouped_mm", True))
    ],
}


def parameters(m, experts):
    h = m["hidden_size"]
    layer = 2 * h * h + 2 * h * m["num_key_value_heads"] * h // m["num_attention_heads"] + 4 * h + m["num_experts"] * h
    return m["num_hidden_layers"] * (layer + experts * 3 * h * m["intermediate_size"]) + 2 * m["vocab_size"] * h + h


def flops(m, length):
    """FLOPs of a token, forward and backward, as in moe.Config.FLOPsPerToken."""
    h = m["hidden_size"]
    layer = 24 * h * h + 12 * length * h + 18 * m["num_experts_per_tok"] * h * m["intermediate_size"]
    return m["num_hidden_layers"] * layer + 6 * m["vocab_size"] * h


def resident(pid="self"):
    """Returns the peak memory of a process, in GB."""
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) * 1024 / 1e9


# The next functions run in a separate process.


def peak(job):
    """GFLOP/s of the fastest large matrix product."""
    import numpy, torch

    torch.set_num_threads(job["threads"])
    n, best = 8192 if job["gpu"] else 2048, {}
    dtype, device = torch.bfloat16 if job["precision"] == "bf16" else torch.float32, "cuda" if job["gpu"] else "cpu"
    sides = {"torch": torch.randn(n, n, dtype=dtype, device=device)}
    if job["precision"] == "fp32" and not job["gpu"]:
        sides["numpy"] = numpy.random.default_rng(0).standard_normal((n, n), dtype=numpy.float32)
    for _ in range(job["times"]):
        for name, a in sides.items():
            began = time.perf_counter()
            a @ a
            if job["gpu"]:
                torch.cuda.synchronize()
            best[name] = max(best.get(name, 0), 2 * n**3 / (time.perf_counter() - began) / 1e9)
    return best


def torch_steps(job):
    """Training steps by PyTorch."""
    import numpy, torch, transformers

    torch.set_num_threads(job["threads"])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = "cuda" if job["gpu"] else "cpu"
    batches = torch.from_numpy(numpy.load(job["batches"])).to(device)
    model = transformers.OlmoeForCausalLM.from_pretrained(
        job["checkpoint"], dtype=torch.float32, attn_implementation="sdpa", experts_implementation=job["experts"]
    ).to(device)
    model.config.output_router_logits, model.config.use_cache = True, False
    model.train()
    masters = list(model.parameters())
    if job.get("weights") == "bf16":
        masters = [p.detach().clone() for p in masters]
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, lr=job["learning_rate"], betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = torch.compile(model) if job.get("compile") else model

    def step(batch):
        with torch.autocast(device, torch.bfloat16, enabled=job.get("weights") == "autocast"):
            out = forward(input_ids=batch[:, :-1], labels=batch[:, 1:], shift_labels=batch[:, 1:].contiguous())
        out.loss.backward()
        if job.get("weights") == "bf16":
            for master, p in zip(masters, model.parameters()):
                master.grad = p.grad.float()
                p.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if job.get("weights") == "bf16":
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), masters)
        return (out.loss - model.router_aux_loss_coef * out.aux_loss).item()

    seconds, losses = [], []
    for i, batch in enumerate(batches):
        if i == job["warm"]:
            cpu = time.process_time()
            if not job["gpu"]:
                pathlib.Path("/proc/self/clear_refs").write_text("5")  # memory from here on
        began = time.perf_counter()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - began)
    answer = {
        "seconds": seconds[job["warm"] :],
        "losses": losses,
        "cpu": time.process_time() - cpu,
        "memory": torch.cuda.max_memory_allocated() / 1e9 if job["gpu"] else resident(),
        "versions": f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}",
    }
    if job.get("profile"):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
            step(batches[-1])
        print(
            p.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60),
            file=sys.stderr,
        )
    return answer


def save_batches(job):
    """Writes the output of mula stream as one array [step][row][token]."""
    import numpy, pyarrow

    stream = pyarrow.ipc.open_stream(sys.stdin.buffer)
    numpy.save(
        job["batches"],
        numpy.stack([b.column("tokens").flatten().to_numpy().reshape(b.num_rows, -1).astype("int64") for b in stream]),
    )


def make_shard(job):
    """Writes ids by frequency as Megatron-LM's .bin and .idx."""
    import numpy

    documents, length, vocabulary = job["documents"], job["length"], job["vocabulary"]
    ids = (vocabulary * numpy.random.default_rng(1).random(documents * length) ** 3).astype(numpy.uint16)
    ids.tofile(job["prefix"] + ".bin")
    with open(job["prefix"] + ".idx", "wb") as f:
        f.write(
            b"MMIDIDX\x00\x00"
            + (1).to_bytes(8, "little")
            + bytes([8])
            + documents.to_bytes(8, "little")
            + (documents + 1).to_bytes(8, "little")
        )
        numpy.full(documents, length, numpy.int32).tofile(f)
        (numpy.arange(documents, dtype=numpy.int64) * (2 * length)).tofile(f)
        numpy.arange(documents + 1, dtype=numpy.int64).tofile(f)


JOBS = {"peak": peak, "torch": torch_steps, "batches": save_batches, "shard": make_shard}


# The next functions run in the main process, which imports nothing large.


def bound(threads):
    """Binds the process that is about to start to a number of cores."""
    return lambda: os.sched_setaffinity(0, CORES[:threads])


def inside(kind, threads=1, stdin=None, **job):
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.NamedTemporaryFile("w+") as answer:
        subprocess.run(
            [
                sys.executable,
                __file__,
                "--inside",
                kind,
                json.dumps({"gpu": False, **job, "threads": threads}),
                answer.name,
            ],
            stdin=stdin,
            env=environment,
            check=True,
            preexec_fn=bound(threads),
        )
        return json.load(answer)


def command(*arguments, **keywords):
    done = subprocess.run([str(a) for a in arguments], capture_output=True, **keywords)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments))}\n{done.stderr.decode()}")


def ticks(pid):
    """CPU seconds of a process."""
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def mula_steps(mula, work, config, threads, warm):
    """Training steps by mula train.

    CPU seconds and memory are read when the line of the last warm-up step appears, and when the
    line of the last step appears.
    """
    (work / "train.yaml").write_text(json.dumps({**config, "output": "run", "threads": threads}))
    log, steps, lines, cpu, memory = work / "run" / "metrics.jsonl", config["steps"], 0, {}, 0
    with tempfile.TemporaryFile("w+") as errors:
        p = subprocess.Popen(
            [mula, "train", "--config", work / "train.yaml"],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "GOMAXPROCS": str(threads)},
            preexec_fn=bound(threads),
        )
        while p.poll() is None:
            if lines < steps and log.exists():
                lines = log.read_text().count('"learning_rate"')
                if lines and lines not in cpu:
                    cpu[lines], memory = ticks(p.pid), resident(p.pid)
            time.sleep(0.005)
        if p.returncode:
            errors.seek(0)
            sys.exit(f"mula train: {errors.read()}")
    done = [line for line in map(json.loads, log.read_text().splitlines()) if "loss" in line]
    return {
        "seconds": [line["seconds"] for line in done[warm:]],
        "losses": [line["loss"] for line in done],
        "cpu": cpu[steps] - cpu[warm],
        "memory": memory,
    }


def title(variant):
    return ", ".join(
        [variant["experts"]]
        + (["compiled"] if variant.get("compile") else [])
        + {"autocast": ["autocast"], "bf16": ["bf16 weights"]}.get(variant.get("weights"), [])
    )


def measure(args, work, name):
    fields, rows, length, steps = MODELS[name]
    warm, rate = args.warm, 4e-4
    if args.gpu:
        rows, steps = 4 * rows, 4 * steps
    if args.quick:
        steps, warm = 2, 1
    steps += warm
    tokens = rows * length
    print(
        f"\n## {name}: {parameters(fields, fields['num_experts']):,} parameters, "
        f"{parameters(fields, fields['num_experts_per_tok']):,} active; {rows} x {length} tokens a step, "
        f"{flops(fields, length) / 1e6:.1f} MFLOP a token; {steps - warm} steps a round after {warm}",
        flush=True,
    )
    work.mkdir()
    inside(
        "shard", prefix=str(work / "words"), documents=steps * rows + 1, length=length, vocabulary=fields["vocab_size"]
    )
    (work / "blend.yaml").write_text(
        f"sequence_length: {length}\nsources: [{{name: words, shards: [words.idx]}}]\nsamples: {steps * rows}\n"
    )
    command(args.mula, "blend", "--config", work / "blend.yaml", "--output", work / "plan.json")
    stream = subprocess.Popen(
        [args.mula, "stream", "--plan", work / "plan.json", "--batch-size", str(rows)], stdout=subprocess.PIPE
    )
    inside("batches", stdin=stream.stdout, batches=str(work / "batches.npy"))
    config = {
        "plan": "plan.json",
        "model": {"preset": "mula-tiny", **fields},
        "batch_size": rows,
        "micro_batch_size": rows,
        "steps": steps,
        "schedule": {"learning_rate": rate, "min_learning_rate": rate, "warmup_steps": 0},
        "checkpoint": {"every": 0},
    }
    if args.gpu:
        config["device"] = "opencl"
    # A step with such a learning rate does not change the initial weights.
    (work / "start.yaml").write_text(
        json.dumps(
            {
                **config,
                "output": "start",
                "steps": 1,
                "schedule": {"learning_rate": 1e-30, "min_learning_rate": 1e-30, "warmup_steps": 0},
            }
        )
    )
    command(args.mula, "train", "--config", work / "start.yaml")
    common = dict(
        checkpoint=str(work / "start" / "checkpoints" / "step-00000001"),
        batches=str(work / "batches.npy"),
        learning_rate=rate,
        warm=warm,
        gpu=args.gpu,
    )

    def round_of_mula(precision, threads):
        out = mula_steps(args.mula, work, {**config, "precision": precision}, threads, warm)
        command("rm", "-r", work / "run")
        return out

    for precision in args.precisions:
        for threads in args.threads:
            best = inside("peak", threads, precision=precision, times=5 if args.quick else 20, gpu=args.gpu)
            top = max(best.values())
            print(
                f"\n{name}, {precision}, {threads} thread{'s' * (threads > 1)}; peak {top:.0f} GFLOP/s "
                f"({', '.join(f'{k} {v:.0f}' for k, v in best.items())})"
            )
            found = []
            for variant in VARIANTS[precision]:
                # On a GPU the experts one by one take ten times as long.
                if variant.get("compile") and args.no_compile or args.gpu and variant["experts"] == "eager":
                    continue
                out = inside("torch", threads, **common, **variant)
                found.append((statistics.median(out["seconds"]), variant))
                print(
                    f"  first round: {title(variant):34} {tokens / found[-1][0]:9,.0f} tokens/s, losses "
                    f"{out['losses'][0]:.5f} … {out['losses'][-1]:.5f}",
                    flush=True,
                )
            variant = min(found, key=lambda f: f[0])[1]
            seconds = args.rounds * steps * 1.6 * min(found, key=lambda f: f[0])[0]  # mula's share is guessed
            print(
                f"  {args.rounds} rounds of all sides: about {seconds / 60:.1f} minutes, plus starting "
                "and stopping the processes"
            )
            sides = {"mula": lambda: round_of_mula(precision, threads)}
            if precision == "bf16":
                sides["mula, bf16_mixed"] = lambda: round_of_mula("bf16_mixed", threads)
            sides["torch"] = lambda: inside("torch", threads, **common, **variant)
            runs = {side: [] for side in sides}
            for _ in range(args.rounds):
                for side, run in sides.items():
                    runs[side].append(run())
            speed = {side: [tokens / statistics.median(r["seconds"]) for r in rs] for side, rs in runs.items()}
            print(f"  {'':66} {'median':>9} {'best':>9} {'CPU s/1000':>11} {'GB':>6} {'GFLOP/s':>8} {'of peak':>8}")
            for side, rs in runs.items():
                label = f"{rs[0]['versions']}: {title(variant)}" if side == "torch" else side
                median, cpu = (
                    statistics.median(speed[side]),
                    statistics.median(r["cpu"] for r in rs) / (tokens * (steps - warm)) * 1000,
                )
                print(
                    f"  {label:66} {median:9,.0f} {max(speed[side]):9,.0f} {cpu:11.3f} "
                    f"{max(r['memory'] for r in rs):6.2f} "
                    f"{median * flops(fields, length) / 1e9:8.1f} {median * flops(fields, length) / 1e9 / top:8.0%}"
                )
            for side, other in itertools.combinations(sides, 2):
                ratio = f"ratio of {side} and {other}"
                print(
                    f"  {ratio:66} {statistics.median(speed[side]) / statistics.median(speed[other]):9.2f} "
                    f"{max(speed[side]) / max(speed[other]):9.2f}"
                )
            for side, rs in runs.items():
                print(
                    f"  losses, {side:58} {' '.join(f'{loss:.5f}' for loss in rs[0]['losses'][:2])} … "
                    f"{rs[0]['losses'][-1]:.5f}",
                    flush=True,
                )
            if args.profile:
                inside("torch", threads, **common, **variant, profile=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin" / "mula")
    ap.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    ap.add_argument("--precisions", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    ap.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--warm", type=int, default=2, help="steps of a run that are not counted")
    ap.add_argument("--quick", action="store_true", help="one round of few steps, to try the script")
    ap.add_argument("--gpu", action="store_true", help="measure on the GPU")
    ap.add_argument("--no-compile", action="store_true", help="skip the variants with torch.compile")
    ap.add_argument("--profile", action="store_true", help="also print where PyTorch's time goes, by its profiler")
    ap.add_argument("--work", type=pathlib.Path, help="folder for a few GB (default: the temporary folder)")
    ap.add_argument("--inside", nargs=3, metavar=("KIND", "JOB", "ANSWER"), help=argparse.SUPPRESS)
    args = ap.parse_args()
    if args.inside:
        kind, job, answer = args.inside
        pathlib.Path(answer).write_text(json.dumps(JOBS[kind](json.loads(job))))
        return
    if args.quick:
        args.rounds = 1
    if args.gpu:
        args.threads = [len(CORES)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=args.work) as tmp:
        for name in args.models:
            measure(args, pathlib.Path(tmp) / name, name)
    print(f"\n{(time.monotonic() - began) / 60:.0f} minutes")


CORES = sorted(os.sched_getaffinity(0))
if __name__ == "__main__":
    main()
