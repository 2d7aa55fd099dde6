"""Which samples a process reads, and which process may write its log."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import CLIENT, MINUTE

import mula
from mula.ranks import launched

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "PALS_RANKID",
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", None),
        ("RANK=3 WORLD_SIZE=8", ("torchrun", 3, 8)),
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", ("Open MPI", 1, 2)),
        ("PMI_RANK=0 PMI_SIZE=2 PALS_RANKID=0", ("MPICH", 0, 2)),
        ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4", ("Slurm", 1, 4)),
        ("SLURM_PROCID=0 SLURM_NTASKS=4", None),  # a batch script
        ("WORLD_SIZE=1", None),
        (
            "RANK=5 WORLD_SIZE=8 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2",
            ("torchrun", 5, 8),
        ),  # srun starts a torchrun on each of 2 nodes
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", ("Open MPI", 1, 4)),
        ("RANK=1 WORLD_SIZE=4 PMI_RANK=1 PMI_SIZE=4", ("torchrun", 1, 4)),
    ],
)
def test_ranks_of_launchers(variables, expected):
    assert launched(dict(v.split("=") for v in variables.split())) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("WORLD_SIZE=2", "WORLD_SIZE is 2, but RANK is not set"),
        ("RANK=1", "RANK is 1, but WORLD_SIZE is not set"),
        ("RANK=2 WORLD_SIZE=2", "ranks count from 0"),
        ("RANK=x WORLD_SIZE=2", "RANK is 'x', which is not a number"),
        ("RANK=-1 WORLD_SIZE=2", "RANK is '-1'"),
        (
            "RANK=0 WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
            "torchrun sets rank 0 of 1 and Open MPI sets rank 1 of 2",
        ),
        ("RANK=0 WORLD_SIZE=2 PMI_RANK=1 PMI_SIZE=2", "torchrun sets rank 0 of 2 and MPICH sets rank 1 of 2"),
        ("PALS_RANKID=3", "PALS started this process as rank 3, but no variable has the number of processes"),
    ],
)
def test_variables_that_do_not_say_the_rank_are_refused(variables, message):
    with pytest.raises(mula.Error, match=message):
        launched(dict(v.split("=") for v in variables.split()))


def test_a_stream_takes_the_ranks_of_its_process(made, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with mula.Stream(made.path, 32, arrays="numpy") as data:
        assert (data.rank, data.world) == (1, 2) and next(data).position.tolist() == list(range(16, 32))
    # The arguments win: with model parallelism, data-parallel ranks are fewer than processes.
    with mula.Stream(made.path, 32, 0, 4, arrays="numpy") as data:
        assert (data.rank, data.world) == (0, 4)
    for options, message in (
        ({"rank": 0, "world": 1}, "each of the 2 processes of torchrun reads all samples; .* replicate=True"),
        ({"rank": 1}, "only one of rank and world is set"),
        ({"world": 2}, "only one of rank and world is set"),
    ):
        with pytest.raises(mula.Error, match=message):
            mula.Stream(made.path, 32, arrays="numpy", **options)
    for options in ({"replicate": True}, {"rank": 0, "world": 1, "replicate": True}):
        with mula.Stream(made.path, 32, arrays="numpy", **options) as data:
            assert (data.rank, data.world, len(next(data))) == (0, 1, 32)
    monkeypatch.delenv("RANK")
    with pytest.raises(mula.Error, match="WORLD_SIZE is 2, but RANK is not set"):
        mula.Stream(made.path, 32)


READER = """
import sys, mula
data = mula.Stream(sys.argv[1], 32, log=sys.argv[2], arrays="numpy")
next(data)
print("reads", flush=True)
sys.stdin.read()
list(data)
"""


def reader(made, folder, **variables) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", READER, made.path, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(CLIENT), **variables},
    )


def test_two_live_processes_cannot_write_one_log(made, tmp_path):
    """Two processes without ranks, as from a launcher without variables: the second is refused.

    After the first is killed, the next may write the log.
    """
    first = reader(made, tmp_path)
    assert first.stdout.readline() == "reads\n"
    second = reader(made, tmp_path)
    _, errors = second.communicate(timeout=MINUTE)
    assert second.returncode == 1 and "another running process writes this log" in errors
    other = reader(made, tmp_path)  # of another start: it would cut the log that the first still writes
    _, errors = other.communicate(timeout=MINUTE)
    assert other.returncode == 1
    first.kill()
    first.communicate(timeout=MINUTE)
    third = reader(made, tmp_path)
    assert third.stdout.readline() == "reads\n"
    third.communicate("", timeout=MINUTE)
    assert third.returncode == 0 and mula.verify(made.path, tmp_path, end=made.samples) == made.samples


def test_a_start_cannot_take_back_the_log_of_a_live_process(made, tmp_path):
    with (
        mula.Stream(made.path, 32, log=tmp_path, arrays="numpy") as data,
        mula.Stream(made.path, 64, log=tmp_path, arrays="numpy") as other,
    ):
        next(data)
        with pytest.raises(mula.Error, match="another running process writes this log"):
            next(other)
        next(data)
        data.close()
        next(other)


def test_a_log_that_two_write_is_seen_without_locks(made, tmp_path, monkeypatch):
    """Without file locks, the second writer shows in the size of the file."""
    monkeypatch.setattr("mula.fingerprints.lock", lambda *_, **__: None)
    with (
        mula.Stream(made.path, 32, log=tmp_path, arrays="numpy") as data,
        mula.Stream(made.path, 32, log=tmp_path, arrays="numpy") as other,
    ):
        with pytest.raises(mula.Error, match="another running process"):
            for _ in range(2):
                next(data)
                next(other)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_does_not_keep_the_lock(made, tmp_path):
    with mula.Stream(made.path, 32, log=tmp_path, arrays="numpy") as data:
        next(data)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # until the parent ends
            os._exit(0)
        os.close(reading)
        data.close()
        try:
            with mula.Stream(made.path, 32, log=tmp_path, arrays="numpy") as again:
                next(again)
        finally:
            os.close(writing)
            os.waitpid(child, 0)


def test_torchrun_without_rank_and_world(made, tmp_path):
    """Each of two processes of torchrun reads its half, and mula.verify proves it."""
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, mula\n"
        "with open(sys.argv[3] + os.environ['RANK'], 'w') as read:\n"
        "    for batch in mula.Stream(sys.argv[1], 32, log=sys.argv[2]): print(batch.position.tolist(), file=read)\n"
    )
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            script,
            made.path,
            tmp_path / "log",
            tmp_path / "positions-",
        ],
        timeout=MINUTE,
        env={**os.environ, "PYTHONPATH": str(CLIENT), "OMP_NUM_THREADS": "1"},
        check=True,
    )
    batches = [(tmp_path / f"positions-{r}").read_text().splitlines() for r in range(2)]
    assert [len(b) for b in batches] == 2 * [-(-made.samples // 32)]
    assert mula.verify(made.path, tmp_path / "log", end=made.samples) == made.samples
    assert sorted(p for b in batches for line in b for p in json.loads(line)) == list(range(made.samples))


def test_ranks_that_torch_knows(made, tmp_path):
    """torch.distributed has precedence over environment variables.

    A stream from before init_process_group is refused if its ranks differ.
    """
    pytest.importorskip("torch")
    code = """
import sys, mula, torch.distributed as dist
early = mula.Stream(sys.argv[1], 32)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[3]), world_size=2)
late = mula.Stream(sys.argv[1], 32)
print(late.rank, late.world, next(late).position.tolist())
try: next(early)
except mula.Error as e: print(e)
dist.destroy_process_group()
"""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, made.path, tmp_path / "meet", str(r)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(CLIENT), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for r in range(2)
    ]
    for r, p in enumerate(ranks):
        said = p.communicate(timeout=MINUTE)[0].splitlines()
        assert said[0] == f"{r} 2 {list(range(16 * r, 16 * r + 16))}"
        assert said[1].startswith(
            f"this stream reads as rank 0 of 1, and torch.distributed has rank {r} of 2; "
            "create the stream after init_process_group"
        )


def test_a_moved_plan(made, tmp_path):
    """shards= is the folder of the shards of a moved plan."""
    plan = tmp_path / "elsewhere" / "plan.json"
    plan.parent.mkdir()
    shutil.copy(made.path, plan)
    with pytest.raises(mula.Error, match="did not start"):
        mula.Stream(plan, 500)
    with (
        mula.Stream(plan, 500, shards=made.folder, log=tmp_path / "log", arrays="numpy") as data,
        mula.Stream(made.path, 500, arrays="numpy") as same,
    ):
        for a, b in zip(data, same, strict=True):
            assert (a.tokens == b.tokens).all()
    assert mula.verify(plan, tmp_path / "log", shards=made.folder) == made.samples
