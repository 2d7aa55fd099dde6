"""Servers that stop, hang, are busy or send invalid data, and connections that break.

The stream resumes at its position, or ends with an error of one sentence.
"""

import gc
import itertools
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from conftest import CLIENT, MINUTE

import mula

pytestmark = pytest.mark.usefixtures("way")


def whole(made, **options) -> np.ndarray:
    with mula.Stream(made.path, 30, arrays="numpy", **options) as data:
        return np.concatenate([batch.tokens for batch in data])


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_is_started_again_is_gone_on_with(how, made, serve):
    expected = whole(made)
    server = serve(made.path)
    with mula.Stream(server.address, 30, micro_batch=5, arrays="numpy", patience=MINUTE) as data:
        got = []
        for batch in data:
            got.append(batch.tokens)
            if batch.step in (10, 50) and len(got) % 6 == 3:  # in the middle of a step
                server.stop(how)
                server.start()
        assert (np.concatenate(got) == expected).all()


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds the server by Linux's /proc")
def test_own_server_that_dies_is_started_again(made):
    expected = whole(made)
    with mula.Stream(made.path, 30, micro_batch=5, arrays="numpy", patience=MINUTE) as data:
        got = []
        for batch in data:
            got.append(batch.tokens)
            if len(got) == 40:
                keeper = data._server._process.pid
                (child,) = [
                    p
                    for p in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
                    if Path(f"/proc/{p}/comm").read_text() != "cat\n"
                ]
                os.kill(int(child), signal.SIGKILL)
        assert (np.concatenate(got) == expected).all()


def test_a_server_that_is_gone_is_one_sentence(made, serve):
    server = serve(made.path)
    with mula.Stream(server.address, 30, arrays="numpy", patience=0.2) as data:
        step = next(data).step
        server.stop()
        with pytest.raises(
            mula.Error, match=r"^unix:.*(No such file|Connection refused|ended early).* \(retried for 0.2 s\)$"
        ):
            for batch in data:
                step = batch.step  # the connection holds some
        server.start()
        assert [b.step for b in data] == list(range(step + 1, 100)), "after an error the stream resumes"


def test_another_plan_behind_the_address_is_refused_by_name(made, wide, serve):
    server = serve(made.path)
    with mula.Stream(server.address, 10, arrays="numpy") as data:
        fingerprint = data.fingerprint
        next(data)
        server.stop()
        server._command[3] = wide.path
        server.start()
        with pytest.raises(
            mula.Error,
            match=f"the server now has plan {server.said['plan']}, and this stream reads plan {fingerprint}",
        ):
            list(data)


def test_over_tcp_with_a_token(made, serve, tmp_path):
    (tmp_path / "token").write_text("a-long-secret-of-the-test\n")
    (tmp_path / "token").chmod(0o600)
    server = serve(made.path, "--token-file", str(tmp_path / "token"))
    with pytest.raises(mula.Error, match="http://.*: a token is required"):
        mula.Stream(server.said["http"], 10)
    assert (
        whole(made)
        == np.concatenate(
            [b.tokens for b in mula.Stream(server.said["http"], 30, arrays="numpy", token="a-long-secret-of-the-test")]
        )
    ).all()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_over_tls(made, serve, tmp_path):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            key,
            "-out",
            certificate,
            "-subj",
            "/CN=test",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ],
        check=True,
        capture_output=True,
    )
    server = serve(made.path, "--tls-cert", str(certificate), "--tls-key", str(key))
    with mula.Stream(server.said["http"], 30, arrays="numpy", certificates=str(certificate)) as data:
        assert (np.concatenate([b.tokens for b in data]) == whole(made)).all()
    with pytest.raises(mula.Error, match="certificate is not trusted"):
        mula.Stream(server.said["http"], 30)


def test_what_the_server_refuses_is_its_sentence(made, serve):
    server = serve(made.path, "--memory", str(1 << 20))
    with pytest.raises(mula.Error, match='unknown column "positions"'):
        mula.Stream(server.address, 3000, arrays="numpy", columns=["positions"])
    for wrong in ("http://", "unix:relative", "ftp://x", "http://localhost:1/path", "http://host:port"):
        with pytest.raises(mula.Error, match="want "):
            mula.Stream(wrong, 10)


def test_too_many_streams_wait_for_their_turn(made, serve):
    server = serve(made.path, "--max-streams", "1")
    # Large enough that the connection cannot hold it all.
    one = mula.Stream(server.address, 3000, arrays="numpy", micro_batch=100)
    next(one)
    other = mula.Stream(server.address, 30, arrays="numpy", patience=MINUTE)
    threading.Timer(0.3, one.close).start()
    assert next(other).step == 0
    other.close()


def test_killed_client_leaves_nothing(made, tmp_path):
    """Complaint 5: no stale locks, sockets or servers after SIGKILL."""
    code = f"""
import mula, time
data = mula.Stream({str(made.path)!r}, 10, arrays="numpy")
next(data)
print(data._server.socket, flush=True)
time.sleep(3600)
"""
    client = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(CLIENT)}
    )
    path = client.stdout.readline().strip()
    assert os.path.exists(path)
    client.kill()
    client.wait(MINUTE)
    client.stdout.close()
    deadline = time.monotonic() + MINUTE
    while os.path.exists(os.path.dirname(path)):  # the keeper removes it after the server has ended
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- other servers than mula serve


class Fake:
    """Answers each connection with the bytes that a function writes."""

    def __init__(self, path, answer):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self.address, self.requests = f"unix:{path}", []
        self._answer = answer
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                request = b""
                while b"\r\n\r\n" not in request and (part := connection.recv(4096)):
                    request += part
                self.requests.append(request.split(b"\r\n")[0].decode())
                try:
                    self._answer(connection, self.requests[-1])
                except OSError:
                    pass  # the client has gone

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


PLAN = (
    b'{"fingerprint":"f00","order_version":"1","sequence_length":4,"positions":1000,"token_type":"uint16",'
    b'"sources":[{"name":"a","windows":1000}]}'
)
JSON = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(PLAN), PLAN)
HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: application/vnd.apache.arrow.stream\r\nMula-Plan: f00\r\n\r\n"


def arrow(
    records: int, first: int = 0, rows: int = 10, length: int = 4, tokens=pa.uint16(), names=("position", "tokens")
) -> bytes:
    """A stream of batch size 10, without its end."""
    schema = pa.schema(
        [
            pa.field(names[0], pa.int64(), False),
            pa.field(names[1], pa.list_(pa.field("item", tokens, False), length + 1), False),
        ]
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for r in range(records):
            values = pa.array(np.arange(rows * (length + 1)) % 100, tokens)
            writer.write_batch(
                pa.record_batch(
                    [
                        pa.array(np.arange(rows) + first + 10 * r),
                        pa.FixedSizeListArray.from_arrays(values, type=schema.field(1).type),
                    ],
                    schema=schema,
                )
            )
    return sink.getvalue().to_pybytes()[:-8]


def body_size(stream: bytes) -> int:
    """Bytes of the body of the last record, from its message header."""
    return max(m.body.size for m in pa.ipc.MessageReader.open_stream(stream) if m.body is not None)


LIES = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "endless header": b"HTTP/1.0 200 OK\r\nX: " + b"x" * 100_000,
    "no status": b"HTTP/1.0\r\n\r\n",
    "error without JSON": b"HTTP/1.0 400 Bad\r\nContent-Length: 5\r\n\r\nhello",
    "error without size": b"HTTP/1.0 500 Bad\r\n\r\n",
    "garbage": HEAD + bytes(range(256)) * 20,
    "huge metadata": HEAD + struct.pack("<II", 0xFFFFFFFF, 0x7FFFFFF0),
    "negative metadata": HEAD + struct.pack("<Ii", 0xFFFFFFFF, -2),
    "huge body": HEAD + arrow(1).replace(struct.pack("<q", body_size(arrow(1))), struct.pack("<q", 1 << 40)),
    "other length": HEAD + arrow(1, length=5),
    "other tokens": HEAD + arrow(1, tokens=pa.float32()),
    "other columns": HEAD + arrow(1, names=("place", "tokens")),
    "other positions": HEAD + arrow(1, first=10),
    "too many rows": HEAD + arrow(1, rows=11),
    "another plan": HEAD.replace(b"f00", b"f01") + arrow(1),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_is_one_sentence(lie, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake = Fake("s", lambda c, request: c.sendall(JSON if "/v1/plan" in request else LIES[lie]))
    try:
        with mula.Stream(
            f"unix:{tmp_path / 's'}" if len(str(tmp_path)) < 90 else "unix:" + os.path.realpath("s"),
            10,
            arrays="numpy",
            patience=0.1,
        ) as data:
            with pytest.raises(mula.Error) as e:
                next(data)
            assert "\n" not in str(e.value) and str(e.value).startswith("unix:")
    finally:
        fake.close()


def test_random_damage_never_gives_other_rows(tmp_path):
    """Bytes of a stream are changed at random.

    Returned batches have the requested shape and positions. All other results are an Error.
    """
    true = bytearray(arrow(3))
    draw = np.random.default_rng(1)
    damaged = [b""]
    path = tmp_path / "s"
    fake = Fake(path, lambda c, request: c.sendall(JSON if "/v1/plan" in request else HEAD + damaged[0]))
    try:
        with mula.Stream(fake.address, 10, arrays="numpy", patience=0.02, end=30) as data:
            errors = 0
            for _ in range(300):
                change = bytearray(true)
                for _ in range(draw.integers(1, 4)):
                    change[draw.integers(len(change))] = draw.integers(256)
                damaged[0] = bytes(change)
                data.load_state_dict({"plan": "f00", "position": 0})
                try:
                    for step, batch in enumerate(data):
                        assert batch.tokens.shape == (len(batch), 5) and batch.step == step
                        assert all(10 * step <= p < 10 * step + 10 for p in batch.position)
                except mula.Error:
                    errors += 1
            assert errors > 100
    finally:
        fake.close()


def test_a_connection_cut_at_any_byte_is_gone_on_with(tmp_path):
    """Each connection breaks some bytes later than the previous. Each batch is returned once."""
    cuts = itertools.count(0, 197)

    def answer(connection, request):
        if "/v1/plan" in request:
            connection.sendall(JSON)
            return
        first = int(request.split("from=")[1].split("&")[0])
        connection.sendall((HEAD + arrow((100 - first) // 10, first))[: next(cuts)])

    fake = Fake(tmp_path / "s", answer)
    try:
        with mula.Stream(fake.address, 10, end=100, arrays="numpy", patience=MINUTE) as data:
            assert [batch.position.tolist() for batch in data] == [list(range(s, s + 10)) for s in range(0, 100, 10)]
        assert len(fake.requests) > 10
    finally:
        fake.close()


def test_a_server_that_stands_still_is_given_up(tmp_path):
    stop = threading.Event()

    def answer(connection, request):
        if "/v1/plan" in request:
            connection.sendall(JSON)
        else:
            connection.sendall(HEAD + arrow(1)[:-50])
            stop.wait(MINUTE)

    fake = Fake(tmp_path / "s", answer)
    try:
        with mula.Stream(fake.address, 10, arrays="numpy", patience=0.2) as data:
            with pytest.raises(mula.Error, match=r"the server sent nothing for 0.2 s \(retried for 0.2 s\)"):
                next(data)
    finally:
        stop.set()
        fake.close()


def test_a_slow_reader_needs_no_more_memory(made):
    """The server waits for a slow reader. Read-ahead is bounded by the connection or the slots."""
    with mula.Stream(made.path, 300, arrays="numpy") as data:
        for batch in data:
            time.sleep(0.01)
            gc.collect()
            assert sum(s.nbytes for s in data._slabs._slabs) < 4 * (batch.tokens.nbytes + (1 << 16))
