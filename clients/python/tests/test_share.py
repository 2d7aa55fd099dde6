"""Records in the server's shared memory.

They equal the records of the socket, kept batches do not change, and an invalid server causes an
error of one sentence.
"""

import array
import gc
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pyarrow as pa
import pytest
from conftest import CLIENT, MINUTE
from test_faults import JSON, Fake

import mula

fcntl = pytest.importorskip("fcntl")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memory that is sealed")


@pytest.mark.parametrize("fixture", ["made", "wide", "packed"])
@pytest.mark.parametrize("micro", [1, 8, None])
def test_both_ways_are_equal(fixture, micro, request):
    made = request.getfixturevalue(fixture)
    with (
        mula.Stream(made.path, 32, micro_batch=micro, arrays="numpy") as data,
        mula.Stream(made.path, 32, micro_batch=micro, arrays="numpy", share=False) as other,
    ):
        assert data.transport is None
        for batch, plain in itertools.islice(zip(data, other, strict=True), 300):
            assert batch.record.equals(plain.record) and batch.record.schema.equals(
                plain.record.schema, check_metadata=True
            )
            assert (
                batch.tokens.dtype == plain.tokens.dtype
                and batch.tokens.tobytes() == plain.tokens.tobytes()
                and batch.tokens.flags.writeable
            )
            assert (batch.first, batch.step, batch.last, len(batch)) == (
                plain.first,
                plain.step,
                plain.last,
                len(plain),
            )
        assert (data.transport, other.transport) == ("shared memory", "socket")


def test_what_is_held_stays_as_it_is(made, serve):
    """Keeping batches, or parts of them, does not block the stream, and they do not change.

    The end of the server or of the stream does not change them either.
    """
    server = serve(made.path)
    expected = np.concatenate([b.tokens for b in mula.Stream(server.address, 25, arrays="numpy", share=False)])
    data = mula.Stream(server.address, 25, arrays="numpy")
    keep = []
    for batch in data:
        keep.append([batch, batch.tokens, batch.record, batch.tokens[3:]][batch.step % 4])
    position = {id(k): i for i, k in enumerate(keep)}

    def check():
        for k in keep:
            i = position[id(k)]
            if isinstance(k, mula.Batch):
                k = k.tokens
            if isinstance(k, pa.RecordBatch):
                k = k.column("tokens").values.to_numpy(zero_copy_only=False).reshape(-1, made.length + 1)
            assert (k == expected[25 * i :][:25][-len(k) :]).all()

    assert data.transport == "shared memory" and len(keep) == made.samples // 25
    check()
    data.close()
    check()
    server.stop(signal.SIGKILL)
    for k in keep[::2]:  # releasing some batches does not affect the others
        del position[id(k)]
    keep = keep[1::2]
    gc.collect()
    check()


def test_a_server_that_is_killed_takes_nothing_away(made, serve):
    server = serve(made.path)
    with mula.Stream(server.address, 3, arrays="numpy", patience=0.1) as data:
        batch = next(data)
        before = batch.tokens.copy()
        server.stop(signal.SIGKILL)
        assert (batch.tokens == before).all() and (
            batch.record.column("tokens").values.to_numpy(zero_copy_only=False).reshape(before.shape) == before
        ).all()
        with pytest.raises(mula.Error, match="retried"):
            list(data)
        assert (batch.tokens == before).all()


def test_own_writes_are_seen_by_nobody_else(made, serve):
    server = serve(made.path)
    with (
        mula.Stream(server.address, 30, arrays="numpy") as data,
        mula.Stream(server.address, 30, arrays="numpy") as other,
    ):
        for batch, same in zip(data, other):
            first = same.tokens.copy()
            batch.tokens[:] = 999
            assert (same.tokens == first).all() and (first != 999).any()


def test_the_memory_is_given_back_whoever_dies(made, serve):
    """The server frees the memory of a client that ends, and of a client that is killed."""
    server = serve(made.path)
    code = f"""
import mula, time
data = mula.Stream({server.address!r}, 30, arrays="numpy")
held = [next(data) for _ in range(5)]
print(data.transport, flush=True)
time.sleep(3600)
"""
    client = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(CLIENT)}
    )
    assert client.stdout.readline() == "shared memory\n"
    assert reserved(server) > 0
    client.kill()
    client.wait(MINUTE)
    client.stdout.close()
    with mula.Stream(server.address, 30, arrays="numpy") as data:
        batch = next(data)
    deadline = time.monotonic() + MINUTE
    while reserved(server) > 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert batch.tokens.any()


def reserved(server) -> int:
    """Bytes of memory that the server counts for records in transit."""
    with urllib.request.urlopen(server.said["http"] + "/metrics") as answer:
        return next(
            int(line.split()[1])
            for line in answer.read().decode().splitlines()
            if line.startswith("mula_memory_sending_bytes ")
        )


def test_other_connections_are_sockets(made, serve):
    server = serve(made.path)
    with mula.Stream(server.said["http"], 30, arrays="numpy") as data:
        next(data)
        assert data.transport == "socket"
    tight = serve(made.path, "--memory", str(1 << 20))  # no room for slots
    with mula.Stream(tight.address, 600, arrays="numpy") as data:
        assert len(next(data)) == 600 and data.transport == "socket"


# ---- servers that send invalid frames

SIZE = 1 << 16


def memory(size: int = 4 * SIZE, seals: int = 0x1 | 0x2 | 0x4) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, 1033, seals)  # F_ADD_SEALS
    return descriptor


def empty(rows: int = 0) -> bytes:
    schema = pa.schema(
        [
            pa.field("position", pa.int64(), False),
            pa.field("tokens", pa.list_(pa.field("item", pa.uint16(), False), 5), False),
        ]
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(
            pa.record_batch(
                [
                    pa.array(np.arange(rows)),
                    pa.FixedSizeListArray.from_arrays(
                        pa.array(np.zeros(5 * rows), pa.uint16()), type=schema.field(1).type
                    ),
                ],
                schema=schema,
            )
        )
    return sink.getvalue().to_pybytes()


HEAD = b"HTTP/1.0 200 OK\r\nMula-Plan: f00\r\nMula-Memory: shared\r\nMula-Slots: %d\r\nMula-Slot-Bytes: %d\r\n\r\n"


def frame(slot=0, rows=10, positions=(0, 80), tokens=(128, 100)) -> bytes:
    return struct.pack("<6Q", slot, rows, *positions, *tokens)


TRUE = (memory, HEAD % (4, SIZE) + empty() + frame())
SHARED_LIES = {
    "no descriptor": (None, TRUE[1]),
    "a pipe": (lambda: os.pipe()[0], TRUE[1]),
    "a file that can be cut": (lambda: memory(seals=0), TRUE[1]),
    "memory of another size": (lambda: memory(SIZE), TRUE[1]),
    "too many slots": (memory, HEAD % (1 << 40, SIZE) + empty() + frame()),
    "slots of no size": (memory, HEAD % (4, 0) + empty() + frame()),
    "a size that is no number": (
        memory,
        (HEAD % (4, SIZE)).replace(b"Mula-Slots: 4", b"Mula-Slots: x") + empty() + frame(),
    ),
    "rows before the frames": (memory, HEAD % (4, SIZE) + empty(10) + frame()),
    "no Arrow": (memory, HEAD % (4, SIZE) + frame() * 10),
    "another slot": (memory, HEAD % (4, SIZE) + empty() + frame(4)),
    "a huge slot": (memory, HEAD % (4, SIZE) + empty() + frame(2**64 - 1)),
    "too many rows": (memory, HEAD % (4, SIZE) + empty() + frame(rows=11, positions=(0, 88), tokens=(128, 110))),
    "tokens beyond the slot": (memory, HEAD % (4, SIZE) + empty() + frame(tokens=(SIZE - 10, 100))),
    "tokens far beyond": (memory, HEAD % (4, SIZE) + empty() + frame(tokens=(2**63, 100))),
    "too few tokens": (memory, HEAD % (4, SIZE) + empty() + frame(tokens=(128, 50))),
    "positions beyond the slot": (memory, HEAD % (4, SIZE) + empty() + frame(positions=(SIZE - 8, 80))),
    "other positions": (memory, HEAD % (4, SIZE) + empty() + frame(positions=(1024, 80))),
}


def answer(descriptor, data):
    def give(connection, request):
        if "/v1/plan" in request:
            connection.sendall(JSON)
            return
        if descriptor is None:
            connection.sendall(data)
            return
        d = descriptor()
        try:
            os.pwrite(d, np.arange(10).tobytes(), 0) if descriptor is memory else None
            connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [d]))])
        finally:
            os.close(d)

    return give


def test_the_fake_tells_the_truth_first(tmp_path):
    fake = Fake(tmp_path / "s", answer(*TRUE))
    try:
        with mula.Stream(fake.address, 10, end=10, arrays="numpy", patience=0.1) as data:
            assert next(data).position.tolist() == list(range(10)) and data.transport == "shared memory"
    finally:
        fake.close()


@pytest.mark.parametrize("lie", SHARED_LIES)
def test_a_server_that_lies_of_memory_is_one_sentence(lie, tmp_path):
    fake = Fake(tmp_path / "s", answer(*SHARED_LIES[lie]))
    before = len(os.listdir("/proc/self/fd"))
    try:
        with mula.Stream(fake.address, 10, arrays="numpy", patience=0.1) as data:
            with pytest.raises(mula.Error) as e:
                next(data)
            assert "\n" not in str(e.value) and str(e.value).startswith("unix:")
        del e  # which also releases the variables of its traceback
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= before + 2, (
            "descriptors are closed"
        )  # but for the test's own: the other end of the pipe, a connection
    finally:
        fake.close()


def test_columns_that_lie_are_errors(tmp_path):
    """Frames with random offsets: tokens and positions are checked at once, other columns on use.
    """
    draw = np.random.default_rng(2)
    schema = pa.schema(
        [
            pa.field("position", pa.int64(), False),
            pa.field("tokens", pa.list_(pa.field("item", pa.uint16(), False), 5), False),
            pa.field("document_starts", pa.list_(pa.field("item", pa.int32(), False)), False),
        ]
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([], schema=schema))
    prefix = HEAD % (4, SIZE) + sink.getvalue().to_pybytes()
    frames = [b""]
    fake = Fake(tmp_path / "s", lambda c, r: answer(memory, prefix + frames[0])(c, r))
    errors = 0
    try:
        with mula.Stream(fake.address, 10, end=10, arrays="numpy", patience=0.02) as data:
            for _ in range(100):
                places = [0, 10, 0, 80, 128, 100, 256, 44, 320, 0]
                places[draw.integers(6, 10)] = int(draw.choice([0, 1, 4, 40, 48, SIZE - 4, SIZE + 4, 2**31, 2**62]))
                frames[0] = struct.pack("<10Q", *places)
                data.load_state_dict({"plan": "f00", "position": 0})
                batch = next(data)
                try:
                    starts = batch.document_starts
                    assert len(starts) == 10
                except mula.Error as e:
                    assert "\n" not in str(e)
                    errors += 1
        assert errors > 20
    finally:
        fake.close()
