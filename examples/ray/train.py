#!/usr/bin/env python3
r"""Trains a model on the nodes of a Ray cluster.

    ray job submit --no-wait --working-dir . -- python train.py --hosts 4 --spares 1 --cpus 16 \
        --directory /data/run

It reserves nodes, writes their addresses to a file, and runs `mula launch` with shell.py as its
remote shell. `mula train` gets all other arguments. `mula launch` restarts the run and replaces
nodes. The exit code is the exit code of `mula launch`.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import ray
from ray.util.placement_group import placement_group, placement_group_table

here = pathlib.Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1, help="nodes that train")
    parser.add_argument("--spares", type=int, default=0, help="nodes that replace failed nodes")
    parser.add_argument("--cpus", type=int, default=1, help="cores to reserve on each node")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs to reserve on each node")
    parser.add_argument("--directory", required=True, help="folder that all nodes see; mula runs there")
    o, arguments = parser.parse_known_args()
    ray.init(address="auto", logging_level="ERROR")
    # Of `ray job stop`, which mula launch gets, too. ray.init sets a handler that ends the process.
    signal.signal(signal.SIGTERM, lambda *_: None)
    node = {"CPU": o.cpus} | ({"GPU": o.gpus} if o.gpus else {})
    group = placement_group([node] * (o.hosts + o.spares), strategy="STRICT_SPREAD")
    print(f"train.py: waits for {o.hosts + o.spares} nodes with {node}", flush=True)
    ray.get(group.ready())
    addresses = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
    hosts = [addresses[n] for n in placement_group_table(group)["bundles_to_node_id"].values()]
    with tempfile.NamedTemporaryFile("w", prefix="hosts-") as file:
        file.write("".join(host + "\n" for host in hosts))
        file.flush()
        shell = f"{sys.executable} {here / 'shell.py'}"
        command = ["mula", "launch", "--hosts", file.name, "--spares", str(o.spares), "--remote-shell", shell]
        return subprocess.run([*command, "--", "train", *arguments], cwd=o.directory).returncode


if __name__ == "__main__":
    sys.exit(main())
