"""The wire: requests to `mula serve` over TCP, TLS or a unix socket, and the bytes of a stream received into memory that is used again."""

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
ANSWER_LIMIT = 64 << 20  # bytes of an answer that is no stream
SMALL = 4096  # a read of less is not worth a slab
ALIGNMENT = 64  # of what is received, in memory
SLABS = 8  # slabs that are kept for use again


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
                raise Error(f"{text}: want unix: and an absolute path, as unix:/tmp/mula.sock")
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
        """A connection; Broken if there is none now."""
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
            # A timeout of Python's makes the socket a non-blocking one, which gives a record in many small parts; the kernel's does not.
            s.settimeout(None)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(timeout), int(timeout % 1 * 1e6)))
            return s
        except ssl.SSLCertVerificationError as e:
            raise Error(
                f"{self.text}: the server's certificate is not trusted ({e.verify_message}): name its authority by certificates="
            ) from None
        except OSError as e:
            raise Broken(f"{self.text}: {e.strerror or e}") from None


class Slabs:
    """Memory for records. A slab is used again when nothing refers to it any more: no array, no tensor, no Arrow buffer. New memory for each record
    would cost more than what is received into it, as the kernel has to clear every page."""

    def __init__(self) -> None:
        self._slabs: list[np.ndarray] = [np.empty(0, np.uint8)]
        self._idle = sys.getrefcount(self._slabs[0])  # of a slab to which only the list refers

    def take(self, size: int) -> np.ndarray:
        """A slab of `size` bytes or more."""
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
    """One request and its answer. Its `read` is what pyarrow reads a stream from: it gives all bytes that are asked for, none at the end, or Broken."""

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
        self._rest = b""  # that was received with the answer's head
        self.limit = ANSWER_LIMIT  # bytes of one read
        self.slab: np.ndarray | None = None  # that the last read of many bytes went to
        self.descriptor: int | None = None  # of memory that the server shares
        self._owner = os.getpid()
        try:
            host = (
                address.host
                if address.path
                else f"{f'[{address.host}]' if ':' in address.host else address.host}:{address.port}"
            )
            bearer = f"Authorization: Bearer {token}\r\n" if token else ""
            try:
                # HTTP/1.0, whose answers are not cut into chunks: what follows the header is the stream itself.
                # A server that shares no memory, or knows nothing of it, answers with a plain stream.
                memory = "Mula-Memory: shared\r\n" if share else ""
                self._socket.sendall(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n{bearer}{memory}\r\n".encode())
            except OSError as e:
                raise Broken(f"{address.text}: {e.strerror or e}") from None
            head = b""
            while b"\r\n\r\n" not in head:
                part = self.receive(4096, descriptor=share)
                head += part
                if not part:
                    raise Broken(f"{address.text}: the connection ended before there was an answer")
                if len(head) > HEADER_LIMIT or not head.startswith(b"HTTP/"[: len(head)]):
                    raise Error(f"{address.text}: what answers there is no mula serve")
            head, _, self._rest = head.partition(b"\r\n\r\n")
            first, *fields = head.decode("latin-1").split("\r\n")
            words = first.split(" ", 2)
            if len(words) < 2 or not words[1].isdigit():
                raise Error(f"{address.text}: what answers there is no mula serve")
            self.status = int(words[1])
            self.header = {name.strip().lower(): value.strip() for name, _, value in (f.partition(":") for f in fields)}
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Makes Broken of what the socket says."""
        try:
            yield
        except (BlockingIOError, TimeoutError):
            raise Broken(f"{self.address.text}: nothing came for {self._timeout:g} s") from None
        except OSError as e:
            raise Broken(f"{self.address.text}: {e.strerror or e}") from None

    def _receive(self, view: memoryview, flags: int) -> int:
        with self._told():
            return self._socket.recv_into(view, 0, flags)

    def receive(self, size: int, descriptor: bool = False) -> bytes:
        """Bytes that have come, `size` at most, or none at the end; with them a descriptor, if one may come."""
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
        """Bytes that have come already, `size` at most; none if there are none, or at the end."""
        if self._rest:
            return self.receive(size)
        with self._told():
            try:
                return self._socket.recv(size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return b""

    def send(self, data: bytes | bytearray) -> None:
        """Sends bytes."""
        with self._told():
            self._socket.sendall(data)

    def read(self, size: int = -1) -> bytes | memoryview:
        """`size` bytes, or none if the stream has ended there."""
        if size < 0 or size > self.limit:
            raise Error(
                f"{self.address.text}: a message of {size} bytes is announced, and what was asked for has {self.limit} at most: that is no mula serve"
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
                raise Broken(f"{self.address.text}: the stream broke off within a record")
            have += n
        return view

    def json(self) -> Any:
        """The answer as JSON, or its error as an Error; as Broken if the server says that it is busy."""
        size = int(self.header.get("content-length", "0"))
        text = bytes(self.read(size))
        try:
            answer = json.loads(text)
            if self.status == 200:
                return answer
            sentence = answer["error"]
        except (ValueError, KeyError, TypeError):
            raise Error(f"{self.address.text}: the answer with status {self.status} is none of mula serve") from None
        raise (Broken if self.status in (429, 503) else Error)(f"{self.address.text}: {sentence}")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        if os.getpid() == self._owner:  # a process that was forked from this one may still have the socket open
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
