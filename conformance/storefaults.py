#!/usr/bin/env python3
"""Runs mula on a bucket while requests fail and processes die, and compares the results.

    python3 conformance/storefaults.py --server DIR/versitygw --tokenizer tokenizer.json
        --texts FILE... [--faults 1000] [--rate 0.02] [--seed 1] [--mula bin/mula] [--work DIR]

The job is: `mula tokenize` in two processes of the texts in a bucket to shards in the bucket, `mula
blend` of the shards to a plan in the bucket, and `mula train` of a small model on that plan, with
checkpoints copied to the bucket. First it runs without faults. Then it runs again and again, until
there were --faults faults: a share --rate of all requests fails (benchmarks/slowlink -faults), each
process is killed at random times and started again, the folder of the run is removed after half of
the kills, and files of the cache are removed, cut or overwritten between the starts. Every run must
give the same shards, plan, fingerprints and weights, byte for byte. Prints a line for each run, and
exits with 1 at the first difference.
"""

import argparse, concurrent.futures, hashlib, json, os, pathlib, random, shutil, signal, subprocess, sys, tempfile, time

import objectserver

here = pathlib.Path(__file__).resolve().parent
PORT = 7180  # of the server; the link has the next one
TRAIN = """plan: s3://data/{run}/plan.json
output: run
model: {{preset: mula-nano, vocab_size: 50304, num_hidden_layers: 1, hidden_size: 16, intermediate_size: 8}}
batch_size: 4
steps: 30
threads: 1
schedule: {{learning_rate: 1e-3, warmup_steps: 2}}
checkpoint: {{every: 5, keep: 2, copies: "s3://data/{run}/checkpoints"}}
"""


def digest(paths):
    h = hashlib.sha256()
    for p in sorted(paths):
        h.update(p.name.encode() + b"\0" + p.read_bytes())
    return h.hexdigest()[:16]


class Job:
    def __init__(self, o, run, env, chaos):
        self.o, self.run, self.env, self.chaos = o, run, env, chaos
        self.folder = o.work / run
        self.folder.mkdir()
        self.cache = self.folder / "cache"
        self.env = {**env, "MULA_CACHE": str(self.cache), "XDG_CACHE_HOME": str(self.folder / "user")}
        self.kills = self.damaged = 0

    def command(self, *args, lose=None):
        """Runs a command until it has succeeded. After some kills it removes the folder lose."""
        for attempt in range(200):
            p = subprocess.Popen(
                [self.o.mula, *args],
                cwd=self.folder,
                env=self.env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            try:
                wait = self.chaos.uniform(0.05, 1.5 + attempt) if self.chaos and attempt < 6 else 600
                out, _ = p.communicate(timeout=wait)
                if p.returncode == 0:
                    return
                sys.exit(f"{self.run}: mula {' '.join(args)} failed ({p.returncode}):\n{out[-3000:]}")
            except subprocess.TimeoutExpired:
                p.send_signal(signal.SIGKILL)
                p.communicate()
                self.kills += 1
                if lose and self.chaos.random() < 0.5:
                    shutil.rmtree(self.folder / lose, ignore_errors=True)
                self.damage()
        sys.exit(f"{self.run}: mula {' '.join(args)} does not come to its end")

    def damage(self):
        """Removes, cuts or overwrites some files of the cache."""
        for f in list(self.cache.glob("*")):
            if f.is_file() and self.chaos.random() < 0.3:
                self.damaged += 1
                match self.chaos.randrange(3):
                    case 0:
                        f.unlink()
                    case 1:
                        os.truncate(f, f.stat().st_size // 2)
                    case 2:
                        with f.open("r+b") as out:
                            out.seek(self.chaos.randrange(max(1, f.stat().st_size)))
                            out.write(os.urandom(4000))

    def all(self):
        o, run = self.o, self.run
        texts = sorted(f"s3://data/texts/{f.parent.name}-{f.name}" for f in o.texts)
        tokenize = ["tokenize", "--tokenizer", str(o.tokenizer), "--output", f"s3://data/{run}/shards/x"]
        tokenize += ["--shard-tokens", "300k", "--piece-size", "500k", *texts]
        works = ["work0", "work1"]  # of processes that share only the store
        with concurrent.futures.ThreadPoolExecutor(len(works)) as pool:
            list(pool.map(lambda work: self.command(*tokenize, "--work", work, lose=work), works))
        (self.folder / "blend.yaml").write_text(
            "sequence_length: 256\nseed: 3\nshuffle: {block: 16, group: 8}\n"
            f'sources: [{{name: x, shards: ["s3://data/{run}/shards/*"]}}]\n'
        )
        self.command("blend", "--config", "blend.yaml", "--output", f"s3://data/{run}/plan.json")
        (self.folder / "train.yaml").write_text(TRAIN.format(run=run))
        self.command("train", "--config", "train.yaml", lose="run")
        bucket = o.work / "store/data" / run
        last = self.folder / "run/checkpoints/step-00000030"
        copied = bucket / "checkpoints/step-00000030"
        plan = json.loads((bucket / "plan.json").read_text())["fingerprint"][:16]
        names = [f.name for f in last.iterdir()]
        if any((copied / n).read_bytes() != (last / n).read_bytes() for n in names):
            sys.exit(f"{run}: the copy of the last checkpoint differs from the checkpoint")
        return {
            "shards": digest(f for f in (bucket / "shards").iterdir() if f.is_file()),
            "plan": plan,
            "fingerprints": digest([self.folder / "run/fingerprints.jsonl"]),
            "weights": digest([last / "model.safetensors", last / "optimizer.safetensors"]),
        }


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--server", type=pathlib.Path, required=True)
    ap.add_argument("--tokenizer", type=pathlib.Path, required=True)
    ap.add_argument("--texts", nargs="+", type=pathlib.Path, required=True)
    ap.add_argument("--faults", type=int, default=1000)
    ap.add_argument("--rate", type=float, default=0.02)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin/mula")
    ap.add_argument("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir(), "mula-storefaults"))
    o = ap.parse_args()
    o.mula, o.tokenizer = o.mula.resolve(), o.tokenizer.resolve()
    shutil.rmtree(o.work, ignore_errors=True)
    texts = o.work / "store/data/texts"
    texts.mkdir(parents=True)
    for f in o.texts:
        shutil.copy(f, texts / f"{f.parent.name}-{f.name}")
    env = {**os.environ, **objectserver.KEYS}
    flags = ["-latency", "1ms", "-faults", str(o.rate), "-seed", str(o.seed)]
    with objectserver.running(o.server, o.work, PORT, *flags) as (server, link):
        want = Job(o, "calm", {**env, "AWS_ENDPOINT_URL": server}, None).all()
        print(f"without faults: {want}", flush=True)
        chaos, faults, run = random.Random(o.seed), 0, 0
        while faults < o.faults:
            run += 1
            began = time.perf_counter()
            job = Job(o, f"run{run}", {**env, "AWS_ENDPOINT_URL": link}, chaos)
            found = job.all()
            counted = objectserver.stats(link)["faults"]
            faults += counted + job.kills + job.damaged
            print(
                f"run {run}: {counted} failed requests, {job.kills} kills, {job.damaged} damaged files of the cache; "
                f"{faults} faults so far; {time.perf_counter() - began:.0f} s: "
                f"{'equal' if found == want else f'DIFFERENT: {found}'}",
                flush=True,
            )
            if found != want:
                sys.exit(1)
            shutil.rmtree(job.folder)
            shutil.rmtree(o.work / "store/data" / job.run)


if __name__ == "__main__":
    main()
