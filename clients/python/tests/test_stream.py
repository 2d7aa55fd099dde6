"""Compares the batches of a stream with the shards and with `mula peek`."""

import gc
import os
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest

import mula
from mula.server import Server

pytestmark = pytest.mark.usefixtures("way")


@pytest.mark.parametrize("fixture", ["made", "wide"])
def test_batches_are_the_shards_tokens(fixture, request, program):
    made = request.getfixturevalue(fixture)
    with mula.Stream(made.path, 32, arrays="numpy") as data:
        assert (data.sequence_length, data.length) == (made.length, made.samples)
        seen = []
        for batch in data:
            assert batch.tokens.shape == (len(batch), made.length + 1) and batch.tokens.flags.writeable
            names = batch.source_names
            for row in range(len(batch)):
                name, shard, offset = names[batch.source[row]], int(batch.shard[row]), int(batch.offset[row])
                assert (batch.tokens[row] == made.tokens[name, shard][offset : offset + made.length + 1]).all()
            seen += batch.position.tolist()
            assert batch.first == batch.step * 32 and batch.last
        assert seen == [p for p in range(made.samples) if fixture == "made" or not 64 <= p < 100]
    said = made.peek(10, program)
    with mula.Stream(made.path, 1, position=10, end=11, arrays="numpy") as data:
        batch = next(data)
        assert (batch.source_names[batch.source[0]], batch.window[0], batch.epoch[0]) == (
            said["source"],
            said["window"],
            said["epoch"],
        )


def test_ranks_and_micro_batches_are_blocks_of_the_step(made):
    with mula.Stream(made.path, 24, end=240, arrays="numpy") as data:
        whole = [batch.tokens.copy() for batch in data]
    for rank in range(3):
        with mula.Stream(made.path, 24, rank, 3, micro_batch=2, end=240, arrays="numpy", columns=["source"]) as data:
            for step in range(10):
                for part in range(4):
                    batch = next(data)
                    assert (batch.tokens == whole[step][rank * 8 + part * 2 :][:2]).all() and batch.last == (part == 3)
                    assert data.state_dict()["position"] == 24 * (step + batch.last), (
                        "a step that is not whole is given again"
                    )
            with pytest.raises(StopIteration):
                next(data)
            with pytest.raises(mula.Error, match="no column epoch"):
                batch.epoch


def test_document_masks(made):
    """Complaint 8: boundaries of documents, against masks made token by token from the shards."""
    length = made.length
    with mula.Stream(made.path, 64, end=256, arrays="numpy") as data:
        for batch in data:
            ids, ends = [], [0]
            for row in range(len(batch)):
                name, shard, offset = (
                    batch.source_names[batch.source[row]],
                    int(batch.shard[row]),
                    int(batch.offset[row]),
                )
                starts = set(made.documents[name, shard][:-1])
                place = 0
                for i in range(length):
                    if i > 0 and offset + i in starts:
                        place = 0
                        ends.append(row * length + i)
                    ids.append(place)
                    place += 1
                ends.append((row + 1) * length)
                assert batch.document_starts[row].tolist() == sorted(
                    s - offset for s in starts if offset <= s <= offset + length
                )
            assert batch.position_ids().tolist() == np.array(ids).reshape(-1, length).tolist()
            assert batch.cu_seqlens().tolist() == ends and batch.cu_seqlens().dtype == np.int32
            same = (
                np.array(ids).reshape(-1, length)[:, 1:] != 0
            )  # a target is in its input's document unless it is the first token of a document
            assert not batch.packed and (batch.loss_mask()[:, :-1] == same).all()


def test_masks_of_packed_rows(packed):
    """Compares each row with docs/formats/packing.md, and each part of a row with its document."""
    length = packed.length
    text = {
        source: np.concatenate([packed.tokens[s, k] for s, k in packed.tokens if s == source]).tobytes()
        for source in ("web", "code")
    }
    padding = 0
    with mula.Stream(packed.path, 40, arrays="numpy") as data:
        for batch in data:
            assert batch.packed
            cu = [0]
            for row, (tokens, starts, n) in enumerate(
                zip(batch.tokens, batch.document_starts, batch.lengths.tolist(), strict=True)
            ):
                starts = starts.tolist()
                assert starts[0] == 0 and (tokens[n:] == 999).all()
                positions = [i - max(s for s in starts if s <= i) for i in range(n)] + list(range(length + 1 - n))
                targets = [i + 1 < n and i + 1 not in starts for i in range(length)]
                assert (
                    batch.position_ids()[row].tolist() == positions[:length]
                    and batch.loss_mask()[row].tolist() == targets
                )
                cu += [row * length + end for end in (*starts[1:], n) if end < length] + [(row + 1) * length]
                for a, b in zip(starts, [*starts[1:], n]):
                    assert tokens[a:b].tobytes() in text[batch.source_names[batch.source[row]]]
                padding += length + 1 - n
            assert batch.cu_seqlens().tolist() == cu
    assert padding > 0


def test_arrays_outlive_their_batch_and_memory_is_used_again(made, way):
    """Kept batches do not change.

    Released memory is reused: a stream needs memory for few records.
    """
    with mula.Stream(made.path, 500, arrays="numpy") as data:
        held = [batch.tokens for batch in data]
        assert len({t.__array_interface__["data"][0] for t in held}) == len(held)
    with mula.Stream(made.path, 500, arrays="numpy") as data:
        for batch, expected in zip(data, held, strict=True):
            assert (batch.tokens == expected).all()
    with mula.Stream(made.path, 10, arrays="numpy") as data:
        places = set()
        for batch in data:
            places.add(batch.tokens.__array_interface__["data"][0])
        assert data.transport == way and len(places) <= (64 if way == "shared memory" else 3)


def test_a_second_loop_goes_on(made):
    with mula.Stream(made.path, 100, arrays="numpy") as data:
        for batch in data:
            if batch.step == 4:
                break
        assert [batch.step for batch in data] == list(range(5, 30))
        with pytest.warns(UserWarning, match="the stream is at its end, position 3000, and has no more batches"):
            assert list(data) == []


def test_what_a_stream_says_of_itself(made):
    assert re.fullmatch(r"\d+\.\d+\.\d+", mula.__version__)
    with mula.Stream(made.path, 32, 1, 2, micro_batch=4, position=64, arrays="numpy") as data:
        assert (
            repr(data)
            == f"mula.Stream({str(made.path)!r}, batch_size=32, rank=1, world=2, micro_batch=4, position=64, end=3000)"
        )
        assert len(data) == 4 * -(-(3000 - 64) // 32)
        batch = next(data)
        assert repr(batch) == "mula.Batch(step=2, first=64, rows=4, last=False)" and len(list(data)) == len(data) - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": "4"}, "batch_size='4': want a whole number"),
        ({"batch_size": 4.0}, "batch_size=4.0: want a whole number"),
        ({"batch_size": True}, "batch_size=True: want a whole number"),
        ({"position": "0"}, "position='0': want a whole number"),
        ({"end": 8.5}, "end=8.5: want a whole number"),
        ({"micro_batch": "2"}, "micro_batch='2': want a whole number"),
        ({"rank": "0", "world": 1}, "rank='0': want a whole number"),
        ({"columns": ["x"]}, 'unknown column "x"'),
        ({"columns": "window"}, "columns='window': want a list of names"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(options, message, made):
    with pytest.raises(mula.Error, match=message):
        mula.Stream(made.path, **{"batch_size": 8, "arrays": "numpy", **options})


@pytest.mark.parametrize("fixture", ["made", "wide", "packed"])
def test_batches_can_be_pickled(fixture, request):
    made = request.getfixturevalue(fixture)
    with mula.Stream(made.path, np.int64(40), arrays="numpy") as data:
        for batch in data:
            copy = pickle.loads(pickle.dumps(batch))
            assert (copy.first, copy.step, copy.last, copy.state) == (batch.first, batch.step, batch.last, batch.state)
            assert copy.record.equals(batch.record) and copy.record.schema.equals(
                batch.record.schema, check_metadata=True
            )
            assert copy.tokens.tobytes() == batch.tokens.tobytes() and copy.tokens.dtype == batch.tokens.dtype
            assert (copy.cu_seqlens() == batch.cu_seqlens()).all() and (copy.loss_mask() == batch.loss_mask()).all()
            assert batch.state == data.state_dict()


def test_an_empty_step_is_a_batch_too(wide):
    with mula.Stream(wide.path, 16, arrays="numpy") as data:
        assert [len(batch) for batch in data] == [16, 16, 16, 16, 0, 0, 12] + [16] * 5 + [8]


def test_a_copy_in_another_process_reads_for_itself(made):
    with mula.Stream(made.path, 50, arrays="numpy") as data:
        first = [next(data).tokens.copy() for _ in range(3)]
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.write(writer, next(data).tokens.tobytes())
                data.close()
                code = 0
            finally:
                os._exit(code)
        fourth = next(data).tokens
        os.close(writer)
        with os.fdopen(reader, "rb") as f:
            assert f.read() == fourth.tobytes()
        assert os.waitpid(child, 0)[1] == 0
        assert (next(data).tokens != fourth).any() and len(first) == 3
        copy = pickle.loads(pickle.dumps(data))
        assert (next(copy).tokens == next(data).tokens).all()
        copy.close()


def test_torch_shares_the_memory(made):
    torch = pytest.importorskip("torch")
    with mula.Stream(made.path, 64) as data, mula.Stream(made.path, 64, arrays="numpy") as other:
        for batch, plain in zip(data, other, strict=True):
            assert batch.tokens.dtype == torch.uint16 and batch.tokens.data_ptr() == batch._tokens.ctypes.data
            assert (batch.tokens.long().numpy() == plain.tokens).all()
            assert (
                batch.cu_seqlens().dtype == torch.int32 and (batch.position_ids().numpy() == plain.position_ids()).all()
            )


def test_under_a_dataloader(made):
    """Runs the code of docs/guides/python.md."""
    torch = pytest.importorskip("torch")

    class Batches(torch.utils.data.IterableDataset):
        def __init__(self, stream):
            self.stream = stream

        def __iter__(self):
            return iter(self.stream)

    with mula.Stream(made.path, 100) as data:
        loader = torch.utils.data.DataLoader(Batches(data), batch_size=None)
        for step, batch in enumerate(loader):
            assert batch.step == step and data.state_dict()["position"] == 100 * (step + 1)
        assert step == 29


def test_a_server_ends_with_its_stream(made):
    data = mula.Stream(made.path, 10, arrays="numpy")
    next(data)
    socket = data._server.socket
    assert os.path.exists(socket)
    del data
    gc.collect()
    assert not os.path.exists(os.path.dirname(socket))


def test_a_server_that_cannot_start_says_why(made, tmp_path, monkeypatch):
    with pytest.raises(mula.Error, match="did not start: .*nowhere.json"):
        mula.Stream(tmp_path / "nowhere.json", 10)
    monkeypatch.setenv("MULA", str(tmp_path / "no-such-program"))
    with pytest.raises(mula.Error, match="there is no program .*no-such-program; build it"):
        Server(made.path)


def test_importing_needs_no_torch(program):
    code = "import sys, mula; assert 'torch' not in sys.modules"
    folder = os.path.dirname(os.path.dirname(os.path.abspath(mula.__file__)))
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": folder})
