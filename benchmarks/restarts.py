#!/usr/bin/env python3
"""Measures the cost of failures under `mula launch`.

A run whose ranks are all killed every --kill-every seconds alternates with the same run without
kills.

    make build
    python3 benchmarks/restarts.py [--rounds 2] [--steps 3000] [--kill-every 30] [--save-every 100]
        [--back-off 5s] [--layout expert_dp=2,ep=2] [--preset mula-nano] [--work DIR]

ezpz reports the same experiment (24 ranks, 3,000 steps, SIGKILL of all ranks every 90 s, a
checkpoint every 100 steps): 5.81 min become 8.04 (+38 %), a restart takes 10.4 to 11.1 s, 57 to 71
steps are lost each time.

overhead  wall time of the command with kills, divided by its time without, minus 1
restart   from the end of the killed ranks to the first step of the new ranks: the launcher's wait
          (--back-off) and the setup (starting, verifying and reading the checkpoint, measuring the
          machine's peak)
lost      steps that were repeated
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
        f"checkpoint: {{every: {a.save_every}, keep: 2}}\nevaluate: {{every: 0}}\n{layout}"
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


def run(a, work, kill_every):
    """Returns wall seconds, the result of the launcher, and the number of kills."""
    shutil.rmtree(work / "run", ignore_errors=True)
    began, kills = time.monotonic(), 0
    with open(work / "log", "w") as log:
        p = subprocess.Popen(
            [a.mula, "launch", "--json", "--back-off", a.back_off, "--", "train"],
            cwd=work,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        while True:
            try:
                out, _ = p.communicate(timeout=kill_every)
                break
            except subprocess.TimeoutExpired:
                if kill_every:
                    kills += 1
                    for pid in children(p.pid):
                        try:
                            os.kill(pid, signal.SIGKILL)
                        except ProcessLookupError:
                            pass
    seconds = time.monotonic() - began
    if p.returncode:
        sys.exit(f"mula launch: exit code {p.returncode}\n{(work / 'log').read_text()[-4000:]}")
    return seconds, json.loads(out[out.index('{\n  "outcome"') :]), kills


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
        whole, killed, restarts, setups, lost, advice = [], [], [], [], [], None
        for n in range(a.rounds):
            seconds, result, _ = run(a, work, None)
            whole.append(seconds)
            want = weights(a, work)
            seconds, result, kills = run(a, work, a.kill_every)
            killed.append(seconds)
            attempts = result["attempts"]
            for one, two in zip(attempts, attempts[1:]):
                end, start = (datetime.datetime.fromisoformat(t) for t in (one["end"], two["start"]))
                restarts.append((start - end).total_seconds() + two["setup_seconds"])
                setups.append(two["setup_seconds"])
                lost.append(one["step"] - two["from"])
            advice = result.get("checkpoint_advice")
            if weights(a, work) != want:
                sys.exit("the weights of the runs with and without kills differ")
            print(
                f"round {n + 1}: {whole[-1]:.1f} s without, {killed[-1]:.1f} s with {kills} kills ({len(attempts)} "
                "attempts); the same weights",
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
        if advice:
            print(
                f"advice    a save takes {advice['save_seconds']:.3f} s and a step {advice['step_seconds']:.4f} s: "
                f"checkpoint.every {advice['checkpoint_every']}"
            )


main()
