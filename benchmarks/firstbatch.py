#!/usr/bin/env python3
"""Measures the first batch of a plan over thousands of shards in a bucket, with an empty cache.

    make build
    python3 benchmarks/firstbatch.py --server DIR/versitygw [--shards 2000] [--latency 50ms]
        [--rounds 3] [--mula bin/mula] [--work DIR]

Each shard has 2.035 billion uint16 tokens, all zero: a sparse file of 4 GB, an .idx of one document
and a manifest without sums. The hashes in the manifests are made up, because reading does not
compare them. The server is versitygw behind benchmarks/slowlink. Prints the seconds of `mula blend`
to a plan in the bucket, and of `mula stream` from its start to its end for 16 and for 256 samples,
with the requests.
"""

import argparse, hashlib, json, os, pathlib, shutil, statistics, struct, subprocess, sys, tempfile, time

here = pathlib.Path(__file__).resolve().parent
sys.path.append(str(here.parent / "conformance"))
import objectserver

TOKENS = 2_035_000_000
PORT = 7190  # of the server; the link has the next one


def write(folder, shards):
    folder.mkdir(parents=True)
    idx = b"MMIDIDX\0\0" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, TOKENS, 0, 0, 1)
    sha256 = lambda data: hashlib.sha256(data).hexdigest()
    for i in range(shards):
        prefix = folder / f"s-{i:05}"
        with prefix.with_suffix(".bin").open("wb") as f:
            f.truncate(2 * TOKENS)
        prefix.with_suffix(".idx").write_bytes(idx)
        text = json.dumps(
            {
                "format": 2,
                "dtype": "uint16",
                "tokens": TOKENS,
                "documents": 1,
                "tokenizer": {"sha256": "", "vocab_size": 0, "eod": -1, "class_table": "", "specials": ""},
                "files": {
                    "bin": {"bytes": 2 * TOKENS, "sha256": sha256(str(i).encode())},
                    "idx": {"bytes": len(idx), "sha256": sha256(idx)},
                    "docs": {"bytes": 0, "sha256": sha256(b"")},
                },
                "checksum": "0" * 64,
            }
        )
        prefix.with_suffix(".json").write_text(text.replace('m": "' + "0" * 64, 'm": "' + sha256(text.encode())))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--server", type=pathlib.Path, required=True)
    ap.add_argument("--shards", type=int, default=2000)
    ap.add_argument("--latency", default="50ms")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--mula", type=pathlib.Path, default=here.parent / "bin/mula")
    ap.add_argument("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir(), "mula-firstbatch"))
    o = ap.parse_args()
    shutil.rmtree(o.work, ignore_errors=True)
    write(o.work / "store/data", o.shards)
    config = o.work / "blend.yaml"
    config.write_text('sequence_length: 4096\nseed: 1\nsources: [{name: all, shards: ["s3://data/*"]}]\n')
    plan, cache = "s3://data/plan.json", o.work / "cache"
    with objectserver.running(o.server, o.work, PORT, "-latency", o.latency) as (_, link):
        env = {**os.environ, **objectserver.KEYS, "AWS_ENDPOINT_URL": link, "MULA_CACHE": str(cache)}
        stream = ["stream", "--plan", plan]
        print("| command | seconds | requests |\n|---|---|---|")
        for name, line in {
            "mula blend": ["blend", "--config", config, "--output", plan],
            "mula stream, 16 samples": [*stream, "--batch-size", "16", "--to", "16"],
            "mula stream, 256 samples": [*stream, "--batch-size", "256", "--to", "256"],
        }.items():
            seconds, requests = [], []
            for _ in range(o.rounds):
                shutil.rmtree(cache, ignore_errors=True)
                objectserver.stats(link)
                began = time.perf_counter()
                subprocess.run([o.mula, *line], env=env, check=True, stdout=subprocess.DEVNULL)
                seconds.append(time.perf_counter() - began)
                requests.append(objectserver.stats(link)["requests"])
            print(f"| {name} | {statistics.median(seconds):.2f} | {statistics.median(requests):,.0f} |", flush=True)
    shutil.rmtree(o.work)


if __name__ == "__main__":
    main()
