"""Resuming: the first complaint about data systems, and the proof of the samples a run consumed."""

import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import CLIENT, MINUTE, Made

import mula
from mula.fingerprints import logs


def wait_for(what, processes: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + MINUTE
    while not what():
        assert time.monotonic() < deadline
        assert all(p.poll() in (None, 0) for p in processes)
        time.sleep(0.01)


def test_exact_resume_on_another_number_of_ranks(made, tmp_path):
    """Complaint 1: killed with SIGKILL twice, on 4 ranks of 32, then 2 of 64, then 1 of 8.

    Each sample of the plan is returned once.
    """
    with mula.Stream(made.path, 32, arrays="numpy") as data:
        state = data.state_dict()
    for world, batch, stop in ((4, 32, 512), (2, 64, 1536), (1, 8, None)):
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    CLIENT / "tests" / "rank.py",
                    made.path,
                    tmp_path,
                    json.dumps(state),
                    str(batch),
                    str(r),
                    str(world),
                    "0" if stop is None else "0.005",
                ],
                env={**os.environ, "PYTHONPATH": str(CLIENT)},
            )
            for r in range(world)
        ]
        if stop is None:
            assert [p.wait(MINUTE) for p in ranks] == [0]
            break

        def states(world: int) -> list[dict]:
            return [json.loads(file.read_text()) for file in tmp_path.glob(f"state*of{world}")]

        wait_for(
            lambda world=world, stop=stop: (
                len(states(world)) == world and min(s["position"] for s in states(world)) >= stop
            ),
            ranks,
        )
        for p in ranks:
            p.kill()
            p.wait(MINUTE)
        state = min(states(world), key=lambda s: s["position"])  # the state in a checkpoint
    assert mula.verify(made.path, tmp_path / "log", end=made.samples) == made.samples
    starts = {(b, w): first for first, b, _, w in logs(tmp_path / "log")}
    assert set(starts) == {(32, 4), (64, 2), (8, 1)} and starts[64, 2] >= 512 and starts[8, 1] >= 1536


def test_toy_trains_is_killed_and_resumes_on_half_the_ranks_with_twice_the_batch(made, tmp_path):
    """The example of the documentation, on four torch ranks, and then on two."""
    pytest.importorskip("torch")
    checkpoint, printed = tmp_path / "toy.pt", tmp_path / "out"
    losses = {}
    for world, batch in ((4, 16), (2, 32)):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with open(printed, "wb") as out:
            ranks = [
                subprocess.Popen(
                    [
                        sys.executable,
                        CLIENT / "examples" / "toy.py",
                        made.path,
                        "--batch-size",
                        str(batch),
                        "--checkpoint",
                        checkpoint,
                        "--every",
                        "4",
                        "--log",
                        tmp_path / "log",
                        "--vocabulary",
                        "1000",
                    ],
                    stdout=out,
                    env={
                        **os.environ,
                        "PYTHONPATH": str(CLIENT),
                        "RANK": str(r),
                        "WORLD_SIZE": str(world),
                        "OMP_NUM_THREADS": "1",
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                        "GLOO_SOCKET_IFNAME": "lo",
                    },
                )
                for r in range(world)
            ]
            if world == 4:
                wait_for(lambda: printed.read_text().count("\n") > 30, ranks)
                for p in ranks:
                    p.kill()
            done = [p.wait(MINUTE) for p in ranks]
        if world == 2:
            assert done == [0, 0]
        for line in printed.read_text().splitlines():
            m = re.fullmatch(r"step \d+ position (\d+) loss ([\d.]+)", line)
            losses[int(m[1])] = float(m[2])
    assert mula.verify(made.path, tmp_path / "log", end=made.samples) == made.samples
    assert sorted(w for _, _, _, w in logs(tmp_path / "log")) == [2, 2, 4, 4, 4, 4]
    last = [losses[p] for p in sorted(losses)][-10:]
    assert losses[0] > 6 and np.mean(last) < 3, "the tokens follow a rule that the toy learns"


def test_state_is_one_position_and_a_fingerprint(made):
    """Complaint 1: "state too big". The state is one integer, and the plan has everything else."""
    with mula.Stream(made.path, 30, arrays="numpy") as data:
        sizes = set()
        for batch in data:
            state = data.state_dict()
            assert state == {"plan": data.fingerprint, "position": min(30 * (batch.step + 1), made.samples)}
            sizes.add(len(json.dumps(state)))
        assert max(sizes) <= 110


def test_state_goes_on_with_any_batch_size_that_begins_there(made):
    """Complaint 1: "cursor restored, permutation not".

    Random changes of ranks, batch size and micro-batch do not change the order.
    """
    with mula.Stream(made.path, 600, arrays="numpy") as data:
        whole = np.concatenate([batch.tokens for batch in data])
    draw = random.Random(3)
    state, seen = None, 0
    while seen < made.samples:
        world = draw.choice([1, 2, 3])
        fitting = [b for b in (6, 12, 24, 60, 120) if seen % b == 0 and b % world == 0]
        batch = draw.choice(fitting)
        micro = draw.choice([m for m in (1, 2, 3, batch // world) if batch // world % m == 0])
        ranks = [
            mula.Stream(made.path, batch, r, world, micro_batch=micro, arrays="numpy", columns=[]) for r in range(world)
        ]
        for r in ranks:
            if state is not None:
                r.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(draw.randrange(1, 1 + max(1, 600 // batch))):
            if seen >= made.samples:
                break
            rows = [list(itertools.islice(r, batch // world // micro)) for r in ranks]
            got = np.concatenate([b.tokens for part in rows for b in part])
            assert (got == whole[seen : seen + batch]).all()
            seen += batch
        states = [r.state_dict() for r in ranks]
        assert all(s == states[0] for s in states) and states[0]["position"] == min(seen, made.samples)
        state = states[0]
        for r in ranks:
            r.close()
    assert seen == made.samples


def test_a_change_that_breaks_a_step_is_refused_before_the_first_batch(made):
    with mula.Stream(made.path, 24, arrays="numpy") as data:
        next(data)
        state = data.state_dict()
    with mula.Stream(made.path, 32, arrays="numpy") as data:
        with pytest.raises(mula.Error, match="no step of 32 positions starts at 24, the nearest start at 0 and 32"):
            data.load_state_dict(state)
    with pytest.raises(mula.Error, match="no step of 7 positions starts at 24"):
        mula.Stream(made.path, 7, position=24)
    for wrong in (
        {"rank": 2, "world": 2},
        {"rank": 0, "world": 7},
        {"rank": -1, "world": 1},
        {"micro_batch": 5},
        {"position": made.samples + 8},
        {"end": made.samples + 1},
        {"arrays": "jax"},
    ):
        with pytest.raises(mula.Error):
            mula.Stream(made.path, 8, **wrong)


def test_starts_and_ends_are_those_of_the_program(program, tmp_path):
    """The tests of the readers in Go use the same table."""
    plan = Made(tmp_path, program, samples=600).path
    table = json.loads((CLIENT.parent.parent / "blend" / "testdata" / "grid.json").read_text())
    assert table
    for row in table:
        try:
            mula.Stream(plan, row["batch_size"], position=row["from"], end=row["to"]).close()
            valid = True
        except mula.Error:
            valid = False
        assert valid == row["valid"], row


def test_starts_and_ends_begin_a_step(made):
    """Starts and ends are multiples of the batch size or the plan's end, as in `mula serve`."""
    assert made.samples % 32 != 0 and made.samples % 24 == 0
    with pytest.raises(mula.Error, match="no step of 32 positions starts at 2990, the nearest start at 2976 and 3000"):
        mula.Stream(made.path, 32, position=2990)
    with pytest.raises(
        mula.Error,
        match="end=100: no step of 32 positions ends there; want a multiple of 32, or the end of the plan, which "
        "is 3000",
    ):
        mula.Stream(made.path, 32, end=100)
    for batch in (24, 32):
        with (
            mula.Stream(made.path, batch, position=made.samples, arrays="numpy") as data,
            pytest.warns(UserWarning, match="at its end, position 3000"),
        ):
            assert list(data) == [] and len(data) == 0
    for end in (None, made.samples):
        with mula.Stream(made.path, 32, position=2976, end=end, arrays="numpy") as data:
            assert [len(b) for b in data] == [24]
            state = data.state_dict()
        assert state["position"] == made.samples
    with mula.Stream(made.path, 32, arrays="numpy") as data:
        data.load_state_dict(state)
        with pytest.warns(UserWarning, match="at its end"):
            assert list(data) == [] and data.state_dict() == state
        with pytest.raises(mula.Error, match="no step of 32 positions starts at 2999"):
            data.load_state_dict(state | {"position": 2999})
    with (
        mula.Stream(made.path, 32, end=64, arrays="numpy") as data,
        pytest.raises(mula.Error, match="not in the plan"),
    ):
        data.load_state_dict(state)


def test_a_state_of_another_plan_is_refused_by_name(made, wide):
    with mula.Stream(made.path, 8, arrays="numpy") as data, mula.Stream(wide.path, 8, arrays="numpy") as other:
        next(data)
        with pytest.raises(
            mula.Error, match=f"to plan {data.fingerprint}, and this stream reads plan {other.fingerprint}"
        ):
            other.load_state_dict(data.state_dict())
        other.load_state_dict(data.state_dict(), plan_change="accept")
        assert next(other).first == 8
        for state in (
            {},
            {"plan": data.fingerprint},
            {"plan": data.fingerprint, "position": "x"},
            {"plan": data.fingerprint, "position": 8.5},
            None,
        ):
            with pytest.raises(mula.Error, match="not the state of a stream"):
                data.load_state_dict(state)


def test_an_amendment_takes_the_state_of_its_parent_up_to_where_it_changes_it(made):
    """/v1/plan lists the parents, oldest first, each with the first position that its child
    changes.
    """
    with mula.Stream(made.path, 10, arrays="numpy") as data:
        data.plan["parents"] = [
            {"fingerprint": "oldest", "at": 200, "reason": ""},
            {"fingerprint": "older", "at": 100, "reason": ""},
            {"fingerprint": "old", "at": 300, "reason": ""},
        ]
        for plan, shared in (("oldest", 100), ("older", 100), ("old", 300)):
            data.load_state_dict({"plan": plan, "position": shared})
            assert next(data).first == shared
            with pytest.raises(mula.Error, match=f"the state belongs to plan {plan}"):
                data.load_state_dict({"plan": plan, "position": shared + 10})


# ---- the proof


def give(made, folder, batch, world, position, steps):
    for rank in range(world):
        with mula.Stream(made.path, batch, rank, world, position=position, log=folder, arrays="numpy") as data:
            assert len(list(itertools.islice(data, steps))) == steps


def test_a_log_is_that_of_mula_hash(made, program, tmp_path):
    give(made, tmp_path, 100, 1, 0, 30)
    assert logs(tmp_path) == [(0, 100, 0, 1)]
    log = next(tmp_path.glob("*.jsonl")).read_text()
    expected = subprocess.run(
        [program, "hash", "--plan", made.path, "--batch-size", "100"], check=True, capture_output=True, text=True
    ).stdout
    assert log == expected
    with mula.Stream(made.path, 100, micro_batch=20, log=tmp_path, arrays="numpy") as data:
        list(data)
    assert next(tmp_path.glob("*.jsonl")).read_text() == expected


def test_verify_sees_what_is_missing_or_other(made, wide, tmp_path):
    give(made, tmp_path / "a", 20, 2, 0, 10)
    give(made, tmp_path / "a", 40, 1, 200, 5)
    assert mula.verify(made.path, tmp_path / "a") == 400
    with pytest.raises(mula.Error, match="reach position 400 of 3000"):
        mula.verify(made.path, tmp_path / "a", end=made.samples)
    shutil.copytree(tmp_path / "a", tmp_path / "gap")
    give(made, tmp_path / "gap", 40, 1, 440, 1)
    with pytest.raises(mula.Error, match="reach position 400, and the next start is at 440"):
        mula.verify(made.path, tmp_path / "gap")
    shutil.copytree(tmp_path / "a", tmp_path / "rank")
    next((tmp_path / "rank").glob("*rank1of2*")).unlink()
    with pytest.raises(mula.Error, match="of the 2 ranks that started at position 0, 1 have a log"):
        mula.verify(made.path, tmp_path / "rank")
    for pattern, match in ((r'"set":"0', '"set":"1'), (r'"set":"1', '"set":"2')):  # one digit of a sum
        changed = tmp_path / f"changed{match[-1]}"
        shutil.copytree(tmp_path / "a", changed)
        file = next(changed.glob("*batch40*"))
        text = file.read_text()
        if pattern in text:
            file.write_text(text.replace(pattern, match, 1))
            with pytest.raises(mula.Error, match="differs from the plan"):
                mula.verify(made.path, changed)
    shutil.copytree(tmp_path / "a", tmp_path / "step")
    file = next((tmp_path / "step").glob("*batch40*"))
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:2] + lines[3:]))
    with pytest.raises(mula.Error):
        mula.verify(made.path, tmp_path / "step")
    with pytest.raises(mula.Error):
        mula.verify(wide.path, tmp_path / "a")


def test_verify_ends_with_the_plan(made, tmp_path):
    """The last step has fewer samples."""
    give(made, tmp_path, 64, 1, 2944, 1)
    assert mula.verify(made.path, tmp_path, position=2944) == made.samples
    with pytest.raises(mula.Error, match="reach position 3000 of 3008"):
        mula.verify(made.path, tmp_path, position=2944, end=3008)


def test_a_start_that_was_killed_at_once_proves_nothing_and_hides_nothing(made, tmp_path):
    give(made, tmp_path, 20, 1, 0, 5)
    (tmp_path / "0000000000000100-batch40-rank0of1.jsonl").write_text("")
    assert mula.verify(made.path, tmp_path) == 100
    give(made, tmp_path, 20, 1, 100, 5)
    assert mula.verify(made.path, tmp_path) == 200


def test_a_start_takes_back_what_came_after_its_checkpoint(made, tmp_path):
    give(made, tmp_path, 20, 2, 0, 10)
    for file in tmp_path.glob("*.jsonl"):  # killed in the middle of a line
        with open(file, "a") as f:
            f.write('{"step":10,"fi')
    give(made, tmp_path, 40, 1, 80, 3)  # resumes from a checkpoint
    assert mula.verify(made.path, tmp_path) == 200
    give(made, tmp_path, 20, 1, 40, 8)  # and again at an earlier one
    assert mula.verify(made.path, tmp_path) == 200 and [first for first, *_ in logs(tmp_path)] == [0, 0, 40]
