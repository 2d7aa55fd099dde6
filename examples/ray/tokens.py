#!/usr/bin/env python3
r"""Tokenizes on the nodes of a Ray cluster. Any number of tasks writes the same shards.

    ray job submit --no-wait --working-dir . -- python tokens.py --tasks 8 --cpus 16 \
        --directory /data --tokenizer tokenizer.json --output shards/web corpus/web

`mula tokenize` gets all other arguments. Ray starts a task again if its node is lost.
"""

import argparse
import subprocess
import sys

import ray


@ray.remote(max_retries=-1, scheduling_strategy="SPREAD")
def tokenize(directory: str, arguments: list[str]) -> int:
    return subprocess.run(["mula", "tokenize", *arguments], cwd=directory, stdin=subprocess.DEVNULL).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1, help="tasks, on any nodes")
    parser.add_argument("--cpus", type=int, default=1, help="cores to reserve for each task")
    parser.add_argument("--directory", required=True, help="folder that all nodes see; mula runs there")
    o, arguments = parser.parse_known_args()
    ray.init(address="auto", logging_level="ERROR")
    task = tokenize.options(num_cpus=o.cpus)
    return int(any(ray.get([task.remote(o.directory, arguments) for _ in range(o.tasks)])))


if __name__ == "__main__":
    sys.exit(main())
