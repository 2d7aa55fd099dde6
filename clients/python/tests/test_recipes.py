"""Runs the recipes of docs/guides/python-trainers.md in two processes.

Each run is killed with SIGKILL at step 12 and restarted. Each sample is returned once.
"""

import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
from conftest import CLIENT, MINUTE

import mula

RECIPES = {
    name: text
    for text, name in re.findall(
        r"```python\n(# recipe: (\w+)\n.*?)```",
        (CLIENT.parent.parent / "docs" / "guides" / "python-trainers.md").read_text(),
        re.DOTALL,
    )
}
PACKAGES = {
    "dataloader": ["torch"],
    "stateful": ["torch", "torchdata"],
    "lightning": ["lightning"],
    "accelerate": ["accelerate"],
    "trainer": ["transformers", "accelerate"],
    "jax": ["jax"],
}
BATCH, SAVED, KILLED = 120, 10, 12  # steps


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def start(folder, recipe: str, killed: int) -> list[str]:
    """Runs a recipe in two processes and returns their output.

    With `killed`, each process is killed after this number of steps.
    """
    script = folder / f"recipe_{recipe}.py"
    script.write_text(RECIPES[recipe])
    command = [CLIENT / "tests" / "recipe.py", script, str(killed)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(CLIENT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
    }
    port = str(free_port())
    if recipe == "jax":
        ranks = [{"PROCESS": str(r), "PROCESSES": "2", "COORDINATOR": f"127.0.0.1:{port}"} for r in range(2)]
        processes = [
            subprocess.Popen(
                [sys.executable, *command], cwd=folder, env=environment | r, stdout=subprocess.PIPE, text=True
            )
            for r in ranks
        ]
    else:
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nproc-per-node",
                    "2",
                    "--master-port",
                    port,
                    *command,
                ],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
        ]
    said = [p.communicate(timeout=MINUTE)[0] for p in processes]
    assert all((p.returncode == 0) == (killed == 0) for p in processes)
    return [line for text in said for line in text.splitlines() if line.startswith("rank ")]


@pytest.mark.parametrize("recipe", sorted(PACKAGES))
def test_recipe(recipe, made, tmp_path):
    """Both processes read the plan's steps in order, and resume from the checkpoint after the kill.

    The logs prove that no sample is missing or repeated.
    """
    for package in PACKAGES[recipe]:
        pytest.importorskip(package)
    folder = tmp_path / "run"
    shutil.copytree(made.folder, folder)
    first, second = start(folder, recipe, KILLED), start(folder, recipe, 0)
    assert set(first + second) and len(first) <= 2 * KILLED
    for rank in range(2):
        before, after = (
            [int(line.split()[3]) for line in run if line.startswith(f"rank {rank} ")] for run in (first, second)
        )
        assert before == [BATCH * step for step in range(len(before))] and SAVED <= len(before) <= KILLED
        assert after == list(range(BATCH * SAVED, made.samples, BATCH))
    if "log=" in RECIPES[recipe]:
        assert mula.verify(folder / "plan.json", folder / "fingerprints", end=made.samples) == made.samples


# A sitecustomize.py, which Python runs in each worker of Ray. It writes printed lines to a file,
# and kills the first process that has printed a number of lines.
COUNT = """
import builtins, os, signal
folder, printed = os.environ["RECIPE_FOLDER"], 0
def count(*words, **options):
    global printed
    if words and str(words[0]).startswith("rank "):
        printed += 1
        with open(folder + "/printed", "a") as f:
            f.write(words[0] + "\\n")
        if printed == %d:
            try:
                os.close(os.open(folder + "/killed", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)
builtins.print = count
"""


def test_ray(made, tmp_path):
    """One of two workers is killed, Ray starts both again, and they resume from the checkpoint."""
    for package in "ray.train", "torch":
        pytest.importorskip(package)
    folder = tmp_path / "run"
    shutil.copytree(made.folder, folder)
    (folder / "recipe_ray.py").write_text(RECIPES["ray"])
    saved = BATCH * 5  # samples between two checkpoints
    (folder / "sitecustomize.py").write_text(COUNT % 18)  # long after the first checkpoint
    environment = {
        **os.environ,
        "PYTHONPATH": f"{CLIENT}:{folder}",
        "RECIPE_FOLDER": str(folder),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    subprocess.run([sys.executable, "recipe_ray.py"], cwd=folder, env=environment, timeout=MINUTE, check=True)
    assert (folder / "killed").exists()
    lines = [line.split() for line in (folder / "printed").read_text().splitlines()]
    for rank in range(2):
        positions = [int(position) for _, r, _, position in lines if r == str(rank)]
        again = next(i for i in range(1, len(positions)) if positions[i] <= positions[i - 1])
        assert positions[:again] == [BATCH * step for step in range(again)] and again <= 18
        # Ray may not know the newest checkpoint yet.
        assert positions[again] in (saved, 2 * saved, 3 * saved)
        assert positions[again:] == list(range(positions[again], made.samples, BATCH))
    assert mula.verify(folder / "plan.json", folder / "fingerprints", end=made.samples) == made.samples


def test_each_recipe_is_run():
    assert set(RECIPES) == set(PACKAGES) | {"ray"}
