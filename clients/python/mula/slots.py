"""Shared memory of a server on the same machine.

The server writes records into slots. The client returns a slot when nothing refers to its record.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from mula.connection import Connection, Slabs
from mula.errors import Broken, Error

SLOTS = 256  # most slots of a stream: a slot number is one byte
SEALS = 2 | 4  # F_SEAL_SHRINK | F_SEAL_GROW: mapped memory keeps its size
GET_SEALS = 1034  # F_GET_SEALS
FRAMES = 1 << 16  # most bytes of frames in one receive call


class Slots:
    """The shared memory of one connection, and its frames.

    A frame has the slot of a record, and the offset and length of each buffer in the slot.
    """

    def __init__(self, connection: Connection, own: Slabs):
        """Maps the memory whose descriptor came with the answer's header.

        It raises a ValueError if the memory differs from the header or is not sealed.
        """
        self._connection, self._own = connection, own
        count, size = (int(connection.header.get(name, "0")) for name in ("mula-slots", "mula-slot-bytes"))
        if connection.descriptor is None or not 2 <= count <= SLOTS or not 0 < size <= sys.maxsize // count:
            raise ValueError(f"shared memory of {count} slots of {size} bytes")
        import fcntl  # systems without it have no shared memory either

        if (
            fcntl.fcntl(connection.descriptor, GET_SEALS) & SEALS != SEALS
            or os.fstat(connection.descriptor).st_size != count * size
        ):
            raise ValueError("its shared memory is not sealed, or its size differs from the header")
        whole = mmap.mmap(connection.descriptor, count * size)
        # No array is a view of another, so that each has its own reference count.
        self._slabs = [np.frombuffer(whole, np.uint8, size, i * size) for i in range(count)]
        self._addresses = [slab.ctypes.data for slab in self._slabs]
        self._idle = sys.getrefcount(self._slabs[0])  # references of an unused slot
        self._most = count - 2 if count > 2 else 0  # slots that batches may hold; the server needs the rest
        self._here: list[int] = []  # numbers of the slots that batches hold
        self._back = bytearray()  # numbers of the slots to return to the server
        self._frames = b""
        self._at = 0

    def begin(self, schema: pa.Schema) -> None:
        """Sets the schema of the records, which determines the size of a frame."""
        self._frame = struct.Struct(f"<{2 + 2 * sum(buffers(f.type) for f in schema)}Q")

    def take(self) -> tuple[np.ndarray, tuple[int, ...]]:
        """Returns the memory of the next record, and its frame.

        The frame has the number of rows, then the offset and length of each buffer.
        """
        if len(self._frames) - self._at < self._frame.size:
            self._receive()
        number, *frame = self._frame.unpack_from(self._frames, self._at)
        self._at += self._frame.size
        if number >= len(self._slabs) or number in self._here or number in self._back:
            raise ValueError(f"slot {number} of a record does not exist or is in use")
        if len(self._here) >= self._most:
            self._release()
            # The caller keeps many batches. A copy of this record leaves the slot to the server.
            if len(self._here) >= self._most:
                end = max((o + n for o, n in zip(frame[1::2], frame[2::2])), default=0)
                if end > len(self._slabs[number]):
                    raise ValueError(f"a record of {end} bytes is larger than slot {number}")
                slab = self._own.take(end)
                slab[:end] = self._slabs[number][:end]
                self._back.append(number)
                return slab, tuple(frame)
        self._here.append(number)
        return self._slabs[number], tuple(frame)

    def _release(self) -> None:
        """Collects the slots that nothing refers to, and returns them once they are half of all."""
        idle = [n for n in self._here if sys.getrefcount(self._slabs[n]) == self._idle]
        if idle:
            self._here = [n for n in self._here if n not in idle]
            self._back += bytes(idle)
        if 2 * len(self._back) >= len(self._slabs):
            self._send()

    def _send(self) -> None:
        if self._back:
            self._connection.send(self._back)
            self._back = bytearray()

    def _receive(self) -> None:
        """Receives more frames."""
        rest = self._frames[self._at :]
        rest += self._connection.received(FRAMES)
        # Slots are returned together, before this process waits: one message for each slot would
        # cost a context switch each.
        if len(rest) < self._frame.size:
            self._release()
            self._send()
        while len(rest) < self._frame.size:
            part = self._connection.receive(FRAMES)
            if not part:
                raise Broken(f"{self._connection.address.text}: the stream ended early")
            rest += part
        self._frames, self._at = rest, 0

    def keep(self) -> None:
        """Replaces slots that are still referred to by private copies, at the same addresses.

        The server clears the slots when the connection ends.
        """
        for n in self._here:
            if sys.getrefcount(self._slabs[n]) != self._idle:
                own(self._addresses[n], self._slabs[n].nbytes)
        self._here = []


def own(address: int, size: int) -> None:
    """Replaces memory pages by a private copy, atomically: concurrent readers are not affected."""
    libc, failed = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p(-1).value
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    copy = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if copy != failed:
        ctypes.memmove(copy, address, size)
        if libc.mremap(copy, size, size, 3, address) != failed:  # MREMAP_MAYMOVE | MREMAP_FIXED
            return
    raise MemoryError(f"{size} bytes: {os.strerror(ctypes.get_errno())}")


def buffers(kind: pa.DataType) -> int:
    """Returns the number of buffers of a column in a slot.

    Validity bitmaps and dictionaries are not in the slot.
    """
    if pa.types.is_fixed_size_list(kind):
        return buffers(kind.value_type)
    if pa.types.is_list(kind):
        return 1 + buffers(kind.value_type)
    return 1


def place(schema: pa.Schema, name: str) -> int:
    """Returns the index in a frame of the offset of a column's last buffer."""
    i = schema.get_field_index(name)
    return 2 * sum(buffers(f.type) for f in list(schema)[: i + 1]) - 1


def columns(empty: pa.RecordBatch, slab: np.ndarray, frame: tuple[int, ...]) -> pa.RecordBatch:
    """Returns the record of a frame, with the schema and the dictionary of an empty record."""
    parts = (pa.py_buffer(slab[o : o + n]) for o, n in zip(frame[1::2], frame[2::2]))
    try:
        out = pa.RecordBatch.from_arrays(
            [column(c.type, frame[0], parts, c) for c in empty.columns], schema=empty.schema
        )
        out.validate()
        return out
    except (pa.ArrowException, ValueError, OverflowError) as e:
        raise Error(f"the server sent an invalid record: {str(e).splitlines()[0]}") from None


def column(kind: pa.DataType, rows: int, parts: Iterator[pa.Buffer], like: pa.Array) -> pa.Array:
    """Returns a column of `rows` rows, made of the next buffers in `parts`."""
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(column(kind.index_type, rows, parts, like), like.dictionary)
    if pa.types.is_fixed_size_list(kind):
        return pa.Array.from_buffers(
            kind, rows, [None], children=[column(kind.value_type, rows * kind.list_size, parts, like)]
        )
    if pa.types.is_list(kind):
        offsets, values = next(parts), next(parts)
        return pa.Array.from_buffers(
            kind,
            rows,
            [None, offsets],
            children=[
                pa.Array.from_buffers(kind.value_type, values.size // kind.value_type.byte_width, [None, values])
            ],
        )
    return pa.Array.from_buffers(kind, rows, [None, next(parts)])
