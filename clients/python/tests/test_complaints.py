"""Tests of frequent complaints about data systems that no other file tests.

docs/reference/comparison.md lists the complaints and their tests.
"""

import itertools
import os
import re
import shutil
import subprocess
import threading

import numpy as np
import pytest
from conftest import CLIENT, Made

import mula


def rows(stream: mula.Stream) -> list[tuple[int, int, int]]:
    """Position, source and window of each row of a stream."""
    out = []
    with stream as data:
        for batch in data:
            out += zip(batch.position.tolist(), batch.source.tolist(), batch.window.tolist())
    return out


def test_mixture_changes_mid_run_without_loss_or_repeat(program, tmp_path):
    """Complaint 2: after 1,000 of 3,000 samples, a plan is amended from weights 3:1 to 1:1.

    The first samples do not change, and no sample is repeated before its source's epoch ends.
    """
    made = Made(tmp_path, program)
    (tmp_path / "amend.yaml").write_text("weights: {web: 1, code: 1}\n")
    subprocess.run(
        [
            program,
            "blend",
            "--amend",
            made.path,
            "--at",
            "1000",
            "--config",
            tmp_path / "amend.yaml",
            "--output",
            tmp_path / "new.json",
        ],
        check=True,
        capture_output=True,
    )
    before = rows(mula.Stream(made.path, 100, end=1000, arrays="numpy"))
    with mula.Stream(made.path, 100, end=1000, arrays="numpy") as data:
        list(data)
        state = data.state_dict()
    new = mula.Stream(tmp_path / "new.json", 100, arrays="numpy")
    new.load_state_dict(state, plan_change="accept")
    after = rows(new)
    assert rows(mula.Stream(tmp_path / "new.json", 100, end=1000, arrays="numpy")) == before
    assert [p for p, _, _ in before + after] == list(range(made.samples))
    for source in (0, 1):
        seen = [w for _, s, w in before + after if s == source]
        assert len(set(seen)) == len(seen), "no epoch is over"
        # Shares are exact to within 3.36 samples.
        assert abs(sum(s == source for _, s, _ in before) - 1000 * (0.75, 0.25)[source]) < 3.36
        assert abs(sum(s == source for _, s, _ in after) - 2000 * 0.5) < 2 * 3.36


def test_start_needs_no_index_and_leaves_no_file(made):
    """Complaint 3: no index to build and no shared cache.

    Eight ranks start at once on new shards, and leave no file.
    """
    there = sorted(os.listdir(made.folder))
    first = [None] * 8

    def start(rank):
        with mula.Stream(made.path, 64, rank, 8, arrays="numpy") as data:
            first[rank] = next(data).position.tolist()

    threads = [threading.Thread(target=start, args=[r]) for r in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert first == [list(range(8 * r, 8 * r + 8)) for r in range(8)]
    assert sorted(os.listdir(made.folder)) == there


def test_what_was_in_that_batch(made, program):
    """Complaint 4: a batch has the origin of each row, and `mula peek` prints the same origin."""
    with mula.Stream(made.path, 16, position=1600, arrays="numpy") as data:
        batch = next(data)
        for row in range(0, 16, 5):
            said = made.peek(int(batch.position[row]), program)
            name, shard = batch.source_names[batch.source[row]], int(batch.shard[row])
            assert (said["source"], said["token"], said["epoch"]) == (name, batch.offset[row], batch.epoch[row])
            assert said["shard"].endswith(f"{name}{shard}")
            assert [d["from"] for d in said["documents"]][1:] == [
                s for s in batch.document_starts[row].tolist() if s > 0
            ]


def test_spikes_are_skipped_by_position(wide):
    """Complaint 4: skipping positions works on any number of ranks and does not move other samples.
    """
    seen = sorted(p for rank in range(4) for p, _, _ in rows(mula.Stream(wide.path, 20, rank, 4, arrays="numpy")))
    assert seen == [p for p in range(200) if not 64 <= p < 100]


@pytest.mark.parametrize("damage", ["changed", "truncated", "gone"])
def test_damaged_shard_is_named(damage, program, tmp_path):
    """Complaint 6: one bit of a shard, a shard that is cut off, a shard that is missing."""
    made = Made(tmp_path, program)
    for shard in ("web0", "web1", "code0"):
        subprocess.run(
            [
                program,
                "convert",
                "--to",
                "megatron",
                "--output",
                tmp_path / "sealed" / shard,
                "--vocab-size",
                "1000",
                tmp_path / shard,
            ],
            check=True,
            capture_output=True,
        )
    shutil.copy(tmp_path / "blend.yaml", tmp_path / "sealed")
    plan = tmp_path / "sealed" / "plan.json"
    subprocess.run(
        [program, "blend", "--config", plan.with_name("blend.yaml"), "--output", plan], check=True, capture_output=True
    )
    whole = rows(mula.Stream(plan, 100, arrays="numpy"))
    assert len(whole) == made.samples
    file = tmp_path / "sealed" / "web1.bin"
    data = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data if damage == "changed" else data[:-1000])
    with pytest.raises(mula.Error, match="web1"):
        rows(mula.Stream(plan, 100, arrays="numpy", patience=1))


def test_positions_beyond_32_bits(program, tmp_path):
    """Complaint 7: a plan of 10^12 samples, at its end."""
    made = Made(tmp_path, program)
    config = tmp_path / "blend.yaml"
    config.write_text(config.read_text().replace("samples: 3000\n", "samples: 1000000000000\n"))
    subprocess.run([program, "blend", "--config", config, "--output", made.path], check=True, capture_output=True)
    with mula.Stream(made.path, 100, position=10**12 - 200, arrays="numpy") as data:
        assert [p for batch in data for p in batch.position.tolist()] == list(range(10**12 - 200, 10**12))
        assert data.state_dict()["position"] == 10**12


def test_order_depends_on_nothing_but_the_plan(made, serve, monkeypatch):
    """Complaint 9: workers, ranks, micro-batches, columns and transports do not change the order.
    """

    def by_position(*streams: mula.Stream) -> np.ndarray:
        out = {}
        for stream in streams:
            with stream as data:
                for batch in data:
                    out |= zip(batch.position.tolist(), batch.tokens.tolist())
        return np.array([out[p] for p in range(made.samples)])

    expected = by_position(mula.Stream(made.path, 500, arrays="numpy"))
    monkeypatch.setenv("GOMAXPROCS", "1")
    server = serve(made.path)
    for world, batch, micro, columns in ((1, 1000, 10, None), (5, 60, 4, ["window"]), (3, 3, None, ["shard"])):
        ranks = [
            mula.Stream(
                (made.path, server.said["http"], server.address)[r % 3],
                batch,
                r,
                world,
                micro_batch=micro,
                columns=columns,
                arrays="numpy",
            )
            for r in range(world)
        ]
        assert (by_position(*ranks) == expected).all()


def test_validation_windows_are_never_given(program, tmp_path):
    """Complaint 10: with a tenth of each source held out, its last tenth of windows is never
    returned.

    The plan has ten times as many samples as windows.
    """
    made = Made(tmp_path, program, samples=300, more="validation: 0.1\n")
    config = tmp_path / "blend.yaml"
    config.write_text(config.read_text().replace("samples: 300\n", "samples: 3000\n"))
    subprocess.run([program, "blend", "--config", config, "--output", made.path], check=True, capture_output=True)
    with mula.Stream(made.path, 1000, arrays="numpy") as data:
        windows = {s["name"]: s["windows"] for s in data.plan["sources"]}
        seen = {name: set() for name in windows}
        for batch in data:
            for source, window in zip(batch.source.tolist(), batch.window.tolist()):
                seen[batch.source_names[source]].add(window)
    for name, count in windows.items():
        training = count - -(-count // 10)
        assert seen[name] == set(range(training)) and training < count


def test_a_loader_stops_where_it_is_told(made):
    """Complaint 9: no row is repeated to fill a batch or dropped: the last step has fewer samples.
    """
    sizes = [len(b) for b in mula.Stream(made.path, 1024, arrays="numpy")]
    assert sizes == [1024, 1024, 952]
    per_rank = [[len(b) for b in mula.Stream(made.path, 1024, r, 4, arrays="numpy")] for r in range(4)]
    assert [sum(step) for step in zip(*per_rank)] == sizes and {len(r) for r in per_rank} == {3}
    assert list(itertools.chain(*per_rank)).count(0) == 0


def test_each_complaint_has_a_test():
    """docs/reference/comparison.md names existing tests for each of the ten complaints."""
    text = (CLIENT.parent.parent / "docs" / "reference" / "comparison.md").read_text()
    lines = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    there = "".join(file.read_text() for file in (CLIENT / "tests").glob("test_*.py"))
    assert [int(line.split("|")[1]) for line in lines] == list(range(1, 11))
    for line in lines:
        names = re.findall(r"`(test_\w+)`", line)
        assert names and all(f"def {name}(" in there for name in names), line
