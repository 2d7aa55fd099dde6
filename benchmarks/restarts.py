#!/usr/bin/env python3
"""Measures the cost of failures under `mula launch`.

A run whose ranks are killed every --kill-every seconds alternates with the same run without kills.

    make build
    python3 benchmarks/restarts.py [--rounds 2] [--steps 3000] [--kill-every 30] [--save-every 100]
        [--kill all|one] [--hot-spares N] [--snapshot-every N] [--kills N]
        [--back-off 5s] [--layout expert_dp=2,ep=2] [--preset mula-nano] [--work DIR]

With --kill one, one random rank is killed each time, also rank 0. With --hot-spares, the other
ranks keep their processes, and a hot spare takes over.

ezpz reports the same experiment (24 ranks, 3,000 steps, SIGKILL of all ranks every 90 s, a
checkpoint every 100 steps): 5.81 min become 8.04 (+38 %), a restart takes 10.4 to 11.1 s, 57 to 71
steps are lost each time.

overhead  wall time of the command with kills, divided by its time without, minus 1
restart   from the end of the killed ranks to the first step of the new ranks: the launcher's wait
          (--back-off) and the setup (starting, verifying and reading the checkpoint, measuring the
          machine's peak)
kill      from a kill to the start of the next step, and to the start of the step after it, by the
          heartbeat
lost      steps that were repeated
load      the machine's load average over a minute, at the kills
advice    the launcher's recommendation for checkpoint.every

At the end the weights of both runs are compared. They are bit-identical, or the script fails.
"""

import argparse, datetime, json, os, pathlib, random, shutil, signal, statistics, subprocess, sys, tempfile, time

here = pathlib.Path(__file__).resolve().parent


def prepare(a, work):
    """Writes documents, a tokenizer, a shard, a plan and a configuration to the folder."""
    rng, words = random.Random(1), []
    for n in range(3000):
        words.append("".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 9))))
    with open(work / "docs.jsonl", "w") as f:
        for n in range(a.documents):
            f.write(
                json.dumps(
                    {"id": str(n), "text": " ".join(words[int(len(words) * rng.random() ** 3)] for _ in range(200))}
                )
                + "\n"
            )
    (work / "blend.yaml").write_text("sequence_length: 128\nsources:\n  - {name: a, shards: [shards/a]}\n")
    layout = f"layout: {{{a.layout.replace('=', ': ').replace(',', ', ')}}}\n" if a.layout else ""
    (work / "train.yaml").write_text(
        f"output: run\nmodel: {{preset: {a.preset}}}\nbatch_size: {a.batch_size}\nsteps: {a.steps}\n"
        f"checkpoint: {{every: {a.save_every}, keep: 2, snapshot_every: {a.snapshot_every}, "
        f"snapshot_dir: {work / 'memory'}}}\nevaluate: {{every: 0}}\n{layout}"
    )
    for args in (
        ["tokenizer", "train", "--vocab-size", "1000", "docs.jsonl"],
        ["tokenize", "--tokenizer", "tokenizer.json", "--output", "shards/a", "docs.jsonl"],
        ["blend"],
    ):
        subprocess.run([a.mula, *args], cwd=work, check=True, capture_output=True)


def children(pid):
    """Processes that a process has started."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def heartbeat(work):
    """The newest heartbeat of the run, with its attempt; {} while it is being written."""
    try:
        path = max((work / "run" / "launch").glob("attempt-*/heartbeat"))
        return {"attempt": path.parent.name} | json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def moment(beat):
    return datetime.datetime.fromisoformat(beat["time"]).timestamp()


def kill(a, launcher, work):
    """Kills ranks, and waits for the next step. Returns the times of the kill and of the next two
    steps, the steps done at the kill and after it, and the load; or None if the run has ended."""
    pids = sorted(children(launcher.pid))
    pids = pids[: len(pids) - a.hot_spares]  # the youngest processes are spares
    beat = heartbeat(work)
    if not pids or beat.get("section") != "step":
        return None
    began, load = time.time(), os.getloadavg()[0]
    for pid in pids if a.kill == "all" else [random.choice(pids)]:
        os.kill(pid, signal.SIGKILL)
    first = None
    while launcher.poll() is None:
        now = heartbeat(work)
        group = [(b.get("attempt"), b.get("generation")) for b in (beat, now)]
        if group[0] != group[1] and now.get("section") == "step":
            first = first or now
            if now["step"] > now["from"]:
                start = moment(first) if first["step"] == first["from"] else None
                return {"start": start and start - began, "next": moment(now) - began, "load": load,
                        "lost": beat["step"] - now["from"]}
        time.sleep(0.002)
    return None


def run(a, work, kill_every):
    """Returns wall seconds, the result of the launcher, and the kills."""
    shutil.rmtree(work / "run", ignore_errors=True)
    shutil.rmtree(work / "memory", ignore_errors=True)
    (work / "memory").mkdir()
    began, kills = time.monotonic(), []
    command = [a.mula, "launch", "--json", "--back-off", a.back_off]
    if a.hot_spares:
        command += ["--hot-spares", str(a.hot_spares)]
    with open(work / "log", "w") as log, open(work / "out", "w") as out:
        p = subprocess.Popen([*command, "--", "train"], cwd=work, stdout=out, stderr=log)
        next_kill = began + kill_every if kill_every else None
        while True:
            try:
                p.wait(timeout=next_kill and max(0, next_kill - time.monotonic()))
                break
            except subprocess.TimeoutExpired:
                kills.append(kill(a, p, work))
                next_kill += kill_every
                if len(kills) == a.kills:
                    next_kill = None
    seconds, text = time.monotonic() - began, (work / "out").read_text()
    if p.returncode:
        sys.exit(f"mula launch: exit code {p.returncode}\n{(work / 'log').read_text()[-4000:]}")
    return seconds, json.loads(text[text.index('{\n  "outcome"') :]), [k for k in kills if k]


def weights(a, work):
    state = json.loads((work / "run" / "checkpoints" / f"step-{a.steps:08d}" / "state.json").read_text())
    return state["weights"]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--mula", default=str(here.parent / "bin" / "mula"))
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--steps", type=int, default=3000)
    p.add_argument("--kill-every", type=float, default=30, help="seconds from kill to kill")
    p.add_argument("--save-every", type=int, default=100)
    p.add_argument("--kill", choices=["all", "one"], default="all", help="kill all ranks, or a random one")
    p.add_argument("--kills", type=int, help="kill at most this often in a run")
    p.add_argument("--hot-spares", type=int, default=0)
    p.add_argument("--snapshot-every", type=int, default=0)
    p.add_argument("--back-off", default="5s")
    p.add_argument("--layout", default="", help="for example expert_dp=2,ep=2; each rank is a process")
    p.add_argument("--preset", default="mula-nano")
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--documents", type=int, default=4000)
    p.add_argument("--work", help="an empty folder; default: a temporary one")
    a = p.parse_args()
    a.mula = os.path.abspath(a.mula)
    with tempfile.TemporaryDirectory(dir=a.work) as folder:
        work = pathlib.Path(folder)
        prepare(a, work)
        whole, killed, restarts, setups, lost, all_kills, advice = [], [], [], [], [], [], None
        for n in range(a.rounds):
            seconds, result, _ = run(a, work, None)
            whole.append(seconds)
            want = weights(a, work)
            seconds, result, kills = run(a, work, a.kill_every)
            killed.append(seconds)
            all_kills += kills
            attempts = result["attempts"]
            replaced = sum(len(t.get("replaced", [])) for t in attempts)
            for one, two in zip(attempts, attempts[1:]):
                end, start = (datetime.datetime.fromisoformat(t) for t in (one["end"], two["start"]))
                restarts.append((start - end).total_seconds() + two["setup_seconds"])
                setups.append(two["setup_seconds"])
                lost.append(one["step"] - two["from"])
            advice = result.get("checkpoint_advice")
            if weights(a, work) != want:
                sys.exit("the weights of the runs with and without kills differ")
            print(
                f"round {n + 1}: {whole[-1]:.1f} s without, {killed[-1]:.1f} s with {len(kills)} kills "
                f"({len(attempts)} attempts, {replaced} replacements by hot spares); the same weights",
                flush=True,
            )
        base, broken = statistics.median(whole), statistics.median(killed)
        print(f"overhead  {100 * (broken / base - 1):.0f} % ({base:.1f} s -> {broken:.1f} s, medians of {a.rounds})")
        if restarts:
            print(
                f"restart   {min(restarts):.1f} to {max(restarts):.1f} s, median {statistics.median(restarts):.1f}, of "
                f"which setup {statistics.median(setups):.2f}"
            )
            print(f"lost      {min(lost)} to {max(lost)} steps each time, median {statistics.median(lost):.0f}")
        if all_kills:
            starts = sorted(k["start"] for k in all_kills if k["start"] is not None)
            nexts, loads = sorted(k["next"] for k in all_kills), [k["load"] for k in all_kills]
            print(
                f"kill      to the next step: median {statistics.median(starts):.2f} s, {starts[0]:.2f} to "
                f"{starts[-1]:.2f} ({len(starts)} kills); to the step after it: median {statistics.median(nexts):.2f} "
                f"s, {nexts[0]:.2f} to {nexts[-1]:.2f}"
            )
            print(f"lost      median {statistics.median(k['lost'] for k in all_kills):.0f} steps a kill")
            print(f"load      {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores")
        if advice:
            print(
                f"advice    a save takes {advice['save_seconds']:.3f} s and a step {advice['step_seconds']:.4f} s: "
                f"checkpoint.every {advice['checkpoint_every']}"
            )


main()
