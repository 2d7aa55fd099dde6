"""Requests to `mula serve` over TCP, TLS or a unix socket."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import struct
import sys
import urllib.parse
from collections.abc import Iterator
from typing import Any

import numpy as np

from mula.errors import Broken, Error

HEADER_LIMIT = 64 << 10  # bytes of an answer's header
ANSWER_LIMIT = 64 << 20  # bytes of an answer other than a stream
SMALL = 4096  # bytes; smaller reads do not use a slab
ALIGNMENT = 64  # bytes, of received data in memory
SLABS = 8  # most slabs that are kept


class Address:
    """Where a server listens: "http://HOST:PORT", "https://HOST:PORT" or "unix:/PATH"."""

    def __init__(self, text: str):
        self.text = text
        self.path, self.host, self.port, self.tls = "", "localhost", 0, False
        if text.startswith("unix:"):
            self.path = text.removeprefix("unix:")
            if self.path.startswith("//"):
                self.path = self.path[2:]
            if not self.path.startswith("/"):
                raise Error(f"{text}: want unix: and an absolute path, for example unix:/tmp/mula.sock")
            return
        try:
            url = urllib.parse.urlsplit(text)
            self.host, self.tls = url.hostname or "", url.scheme == "https"
            self.port = url.port or (443 if self.tls else 80)
        except ValueError:
            self.host = ""
        if (
            not self.host
            or url.scheme not in ("http", "https")
            or url.path not in ("", "/")
            or url.query
            or url.username
        ):
            raise Error(f"{text}: want http://HOST:PORT, https://HOST:PORT or unix:/PATH")

    def connect(self, timeout: float, certificates: str | None) -> socket.socket:
        """Returns a connection. It raises Broken if the server cannot be reached."""
        try:
            if self.path:
                s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                s.settimeout(timeout)
                try:
                    s.connect(self.path)
                except BaseException:
                    s.close()
                    raise
            else:
                s = socket.create_connection((self.host, self.port), timeout)
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls:
                return ssl.create_default_context(cafile=certificates).wrap_socket(s, server_hostname=self.host)
            # A timeout of Python's makes the socket non-blocking, and a record then arrives in many
            # small reads. A timeout of the kernel leaves the socket blocking.
            s.settimeout(None)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(timeout), int(timeout % 1 * 1e6)))
            return s
        except ssl.SSLCertVerificationError as e:
            raise Error(
                f"{self.text}: the server's certificate is not trusted: {e.verify_message}; "
                "pass the file of its authority as certificates="
            ) from None
        except OSError as e:
            raise Broken(f"{self.text}: {e.strerror or e}") from None


class Slabs:
    """Memory for records.

    A slab is reused when no array, tensor or Arrow buffer refers to it. New memory for each record
    would cost more than receiving the record, because the kernel clears every page.
    """

    def __init__(self) -> None:
        self._slabs: list[np.ndarray] = [np.empty(0, np.uint8)]
        self._idle = sys.getrefcount(self._slabs[0])  # references of an unused slab

    def take(self, size: int) -> np.ndarray:
        """Returns a slab of at least `size` bytes."""
        for i in range(len(self._slabs)):
            if sys.getrefcount(self._slabs[i]) == self._idle:
                if self._slabs[i].nbytes >= size:
                    return self._slabs[i]
                del self._slabs[i]
                break
        slab = np.empty(size + size // 8, np.uint8)
        self._slabs.append(slab)
        del self._slabs[:-SLABS]
        return slab


class Connection:
    """One request and its answer.

    pyarrow reads the stream through `read`, which returns all requested bytes, or none at the end
    of the stream, or raises Broken.
    """

    def __init__(
        self,
        address: Address,
        path: str,
        token: str | None,
        timeout: float,
        certificates: str | None,
        slabs: Slabs | None = None,
        share: bool = False,
    ):
        self.address, self._timeout, self._slabs = address, timeout, slabs
        self._flags = 0 if address.tls else socket.MSG_WAITALL
        self._socket = address.connect(timeout, certificates)
        self.closed = False
        self._rest = b""  # bytes that were received with the header
        self.limit = ANSWER_LIMIT  # most bytes of one read
        self.slab: np.ndarray | None = None  # slab of the last large read
        self.descriptor: int | None = None  # of the server's shared memory
        self._owner = os.getpid()
        try:
            host = (
                address.host
                if address.path
                else f"{f'[{address.host}]' if ':' in address.host else address.host}:{address.port}"
            )
            bearer = f"Authorization: Bearer {token}\r\n" if token else ""
            try:
                # HTTP/1.0 has no chunked answers: the stream follows the header directly. A server
                # without shared memory ignores Mula-Memory and sends the records in the stream.
                memory = "Mula-Memory: shared\r\n" if share else ""
                self._socket.sendall(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n{bearer}{memory}\r\n".encode())
            except OSError as e:
                raise Broken(f"{address.text}: {e.strerror or e}") from None
            head = b""
            while b"\r\n\r\n" not in head:
                part = self.receive(4096, descriptor=share)
                head += part
                if not part:
                    raise Broken(f"{address.text}: the connection ended before the server answered")
                if len(head) > HEADER_LIMIT or not head.startswith(b"HTTP/"[: len(head)]):
                    raise Error(f"{address.text}: the server is not mula serve")
            head, _, self._rest = head.partition(b"\r\n\r\n")
            first, *fields = head.decode("latin-1").split("\r\n")
            words = first.split(" ", 2)
            if len(words) < 2 or not words[1].isdigit():
                raise Error(f"{address.text}: the server is not mula serve")
            self.status = int(words[1])
            self.header = {name.strip().lower(): value.strip() for name, _, value in (f.partition(":") for f in fields)}
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Converts errors of the socket to Broken."""
        try:
            yield
        except (BlockingIOError, TimeoutError):
            raise Broken(f"{self.address.text}: the server sent nothing for {self._timeout:g} s") from None
        except OSError as e:
            raise Broken(f"{self.address.text}: {e.strerror or e}") from None

    def _receive(self, view: memoryview, flags: int) -> int:
        with self._told():
            return self._socket.recv_into(view, 0, flags)

    def receive(self, size: int, descriptor: bool = False) -> bytes:
        """Waits for bytes and returns at most `size` of them, or none at the end of the stream.

        If `descriptor` is true, a file descriptor that arrives with them is stored.
        """
        if self._rest:
            part, self._rest = self._rest[:size], self._rest[size:]
            return part
        with self._told():
            if not descriptor:
                return self._socket.recv(size)
            part, descriptors, _, _ = socket.recv_fds(self._socket, size, 1, socket.MSG_CMSG_CLOEXEC)
        for one in descriptors:
            if self.descriptor is not None:
                os.close(self.descriptor)
            self.descriptor = one
        return part

    def received(self, size: int) -> bytes:
        """Returns at most `size` bytes that have arrived already, without waiting."""
        if self._rest:
            return self.receive(size)
        with self._told():
            try:
                return self._socket.recv(size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return b""

    def send(self, data: bytes | bytearray) -> None:
        """Sends all bytes."""
        with self._told():
            self._socket.sendall(data)

    def read(self, size: int = -1) -> bytes | memoryview:
        """Returns `size` bytes, or none at the end of the stream."""
        if size < 0 or size > self.limit:
            raise Error(
                f"{self.address.text}: the server announces a message of {size} bytes, and the limit is "
                f"{self.limit}; the server is not mula serve"
            )
        if size < SMALL or self._slabs is None:
            view = memoryview(bytearray(size))
        else:
            self.slab = self._slabs.take(size + ALIGNMENT)
            start = -self.slab.ctypes.data % ALIGNMENT
            view = memoryview(self.slab.data)[start : start + size]
        have = min(size, len(self._rest))
        view[:have], self._rest = self._rest[:have], self._rest[have:]
        while have < size:
            n = self._receive(view[have:], self._flags)
            if n == 0:
                if have == 0:
                    return b""
                raise Broken(f"{self.address.text}: the stream ended within a record")
            have += n
        return view

    def json(self) -> Any:
        """Returns the answer as JSON.

        It raises Broken if the server is busy, and Error if the server reports another problem.
        """
        size = int(self.header.get("content-length", "0"))
        text = bytes(self.read(size))
        try:
            answer = json.loads(text)
            if self.status == 200:
                return answer
            sentence = answer["error"]
        except (ValueError, KeyError, TypeError):
            raise Error(
                f"{self.address.text}: the answer with status {self.status} has no error message; "
                "the server is not mula serve"
            ) from None
        raise (Broken if self.status in (429, 503) else Error)(f"{self.address.text}: {sentence}")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        if os.getpid() == self._owner:  # a forked process must not shut down its parent's connection
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
