"""Token ids of texts, from the tokenizer of mula in a process of its own.

The Go package tokenize/batches specifies the messages and files.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import json
import mmap
import os
import socket
import struct
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from mula.errors import Error, whole
from mula.server import program

REQUEST = struct.Struct("<IIQQQ")  # kind, slot, count, bytes, total
ANSWER = struct.Struct("<IIq")  # status, bytes of the payload, number
KIND_SLOTS, KIND_BATCH, KIND_PART, KIND_DECODE = range(4)
PROTOCOL = 1

SLOTS = 4  # parts of a batch that are in transit at once
LEAST_PART, MOST_PART = 1 << 20, 4 << 20  # characters or bytes of a part, unless one text is longer
PART_TEXTS = 1 << 16  # most texts of a part
KEPT_SLOT = 8 << 20  # bytes; a larger slot gives its memory back after the batch
SMALL = 1 << 20  # bytes; smaller results are copies in memory of their own
IDLE = 2  # most unused result files that are kept for reuse
HELD = 64  # most results that are views of files; each needs two file descriptors
MOST_DECODED = 1 << 26  # ids of a call of decode


@dataclass(frozen=True, eq=False)
class EncodedBatch:
    """The ids of a batch of texts.

    ids      uint32, of all texts, one after the other
    offsets  int64, one more than texts: the ids of text i are ids[offsets[i]:offsets[i + 1]]

    `len` is the number of texts, `batch[i]` has the ids of text i, and iterating returns the ids of
    each text. All arrays are views of the same memory, which stays valid as long as one of them
    exists.
    """

    ids: np.ndarray[Any, np.dtype[np.uint32]]
    offsets: np.ndarray[Any, np.dtype[np.int64]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, text: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        if not -len(self) <= text < len(self):
            raise IndexError(f"text {text} of a batch of {len(self)} texts")
        text %= len(self)
        return self.ids[self.offsets[text] : self.offsets[text + 1]]

    def __iter__(self) -> Iterator[np.ndarray[Any, np.dtype[np.uint32]]]:
        return (self[i] for i in range(len(self)))

    def to_arrow(self) -> pa.LargeListArray:
        """Returns the ids as an Arrow array of lists, without a copy."""
        values = pa.Array.from_buffers(pa.uint32(), len(self.ids), [None, pa.py_buffer(self.ids)])
        return pa.LargeListArray.from_buffers(
            pa.large_list(pa.uint32()), len(self), [None, pa.py_buffer(self.offsets)], children=[values]
        )


class Tokenizer:
    """A tokenizer.json, with the same ids as `mula tokenize` and Hugging Face tokenizers.

    path                path of the tokenizer.json
    threads             threads that encode a batch (default: all cores of this process)
    specials            how special tokens that occur in a text, such as <|endoftext|>, are encoded:
                        "text" (default) as plain text, "tokens" as special ids, which is the
                        default of Hugging Face
    add_special_tokens  whether to add the tokens of the tokenizer's post-processor to each text,
                        such as a begin token; the default of Hugging Face is True
    ignore_truncation_and_padding
                        whether to load a file that sets truncation or padding; texts are never cut
                        or padded
    mula                path of the program, if it is not on the PATH (default: the variable MULA)

    A process `mula tokenizer serve` encodes. It ends with `close`, with the last reference to this
    object, and with this process. If the process ended early, the call raises an error, and the
    next call starts a new process. After a fork and in a pickled copy, the first call starts a
    process, too.

    Threads may share a tokenizer. Their calls run one after the other, each with all threads of the
    tokenizer. Errors are mula.Error.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        specials: Literal["text", "tokens"] = "text",
        add_special_tokens: bool = False,
        ignore_truncation_and_padding: bool = False,
        mula: str | os.PathLike[str] | None = None,
    ):
        if specials not in ("text", "tokens"):
            raise Error(f'specials={specials!r:.200}: want "text" or "tokens"')
        if threads is not None and not 1 <= (threads := whole("threads", threads)) <= 4096:
            raise Error(f"threads={threads}: want 1 to 4096, or None for all cores")
        self._path = os.path.abspath(path)
        self._options = {
            "threads": threads,
            "specials": specials,
            "add_special_tokens": bool(add_special_tokens),
            "ignore_truncation_and_padding": bool(ignore_truncation_and_padding),
            "mula": mula,
        }
        self._command = [program(mula), "tokenizer", "serve", "--tokenizer", self._path, "--specials", specials]
        self._command += ["--workers", str(threads or 0)]
        self._command += ["--add-special-tokens"] if add_special_tokens else []
        self._command += ["--ignore-truncation-and-padding"] if ignore_truncation_and_padding else []
        self._sha256: str | None = None
        self._closed = False
        self._process: Process | None = None
        self._reset()
        self._running()
        ALL.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._idle: collections.deque[ResultFile] = collections.deque(maxlen=IDLE)
        self._held: set[ResultFile] = set()

    @property
    def path(self) -> str:
        """The absolute path of the tokenizer.json."""
        return self._path

    @property
    def vocab_size(self) -> int:
        """The highest id plus one."""
        return self._vocab_size

    def encode_batch(self, texts: Iterable[str] | pa.Array | pa.ChunkedArray) -> EncodedBatch:
        """Returns the ids of texts: strings, or an Arrow array of strings without nulls.

        If a text fails, the error has its index, and there is no result. An Arrow array saves the
        conversion of Python strings to UTF-8.
        """
        count, parts = arrow_parts(texts) if isinstance(texts, (pa.Array, pa.ChunkedArray)) else list_parts(texts)
        if count == 0:
            return EncodedBatch(np.empty(0, np.uint32), np.zeros(1, np.int64))
        with self._lock, self._guarded() as process:
            try:
                result = self._idle.pop()
            except IndexError:
                result = ResultFile()
            total = process.encode(count, parts, result)
            return self._batch(result, count, total)

    def _batch(self, result: ResultFile, count: int, total: int) -> EncodedBatch:
        """Returns the batch in a result file, as views if it is large."""
        ids_at = (8 * (count + 1) + 63) // 64 * 64
        size = ids_at + 4 * total
        if size < SMALL or len(self._held) >= HELD:
            offsets, ids = np.empty(count + 1, np.int64), np.empty(total, np.uint32)
            read_all(result.descriptor, offsets, 0)
            read_all(result.descriptor, ids, ids_at)
            self._idle.append(result)
            return EncodedBatch(ids, offsets)
        # All arrays refer to this object. When it ends, the file can be used again.
        owner = (ctypes.c_char * size).from_buffer(result.map(size))
        self._held.add(result)
        weakref.finalize(owner, released, result, self._held, self._idle).atexit = False
        memory = memoryview(owner)
        return EncodedBatch(np.frombuffer(memory, np.uint32, total, ids_at), np.frombuffer(memory, np.int64, count + 1))

    def encode(self, text: str) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Returns the ids of one text. Many texts are faster in one call of encode_batch."""
        if not isinstance(text, str):
            raise Error(f"a text is {type(text).__name__}: want str")
        return self.encode_batch([text]).ids

    def decode(self, ids: Sequence[int] | np.ndarray[Any, Any]) -> str:
        """Returns the text of ids.

        Special tokens are part of the text. Bytes that are not UTF-8, such as half a character, are
        replaced by U+FFFD, as by Hugging Face tokenizers.
        """
        array = np.asarray(ids)
        if array.ndim != 1 or array.size and array.dtype.kind not in "iu":
            raise Error(f"ids of type {array.dtype} with {array.ndim} dimensions: want a list of whole numbers")
        if array.size > MOST_DECODED:
            raise Error(f"{array.size} ids are too many for one call; decode at most {MOST_DECODED} at once")
        if array.size and not 0 <= array.min() <= array.max() < 1 << 32:
            raise Error(f"ids from {array.min()} to {array.max()}: want ids from 0 to {self.vocab_size - 1}")
        with self._lock, self._guarded() as process:
            return process.decode(array.astype("<u4"))

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[Process]:
        """Returns the running process, and ends it if messages may be left on the connection."""
        process = self._running()
        try:
            yield process
        except Refused as e:
            raise Error(e.message) from None
        except BaseException:
            self._process = None
            process.close()
            raise

    def _running(self) -> Process:
        """Returns the process. It starts one if there is none."""
        if self._closed:
            raise Error("the tokenizer is closed; make a new one")
        if self._process is None:
            process = Process(self._command)
            if self._sha256 not in (None, process.sha256):
                process.close()
                raise Error(f"{self._path} has changed since the tokenizer was made; make a new one")
            self._process, self._sha256, self._vocab_size = process, process.sha256, process.vocab_size
        return self._process

    def close(self) -> None:
        """Ends the process. Results stay valid."""
        with self._lock:
            self._closed = True
            if self._process:
                self._process.close()
                self._process = None
            self._idle.clear()

    def __enter__(self) -> Tokenizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(reopened, self._path, self._sha256, self._options), ()


def reopened(path: str, sha256: str | None, options: dict[str, Any]) -> Tokenizer:
    """Returns a copy of a pickled tokenizer."""
    copy = Tokenizer(path, **options)
    if copy._sha256 != sha256:
        copy.close()
        raise Error(f"{path} differs from the file of the pickled tokenizer; copy the same file to this machine")
    return copy


class Refused(Exception):
    """A text that failed, or -1. The process can answer the next request."""

    def __init__(self, text: int, message: str):
        self.text, self.message = text, message if text < 0 else f"text {text}: {message}"


class Part(NamedTuple):
    """Consecutive texts of a batch."""

    offsets: np.ndarray[Any, np.dtype[np.int64]]  # in bytes, from 0, one more than texts
    texts: memoryview


class Process:
    """A running `mula tokenizer serve`."""

    def __init__(self, command: list[str]):
        ours, theirs = socket.socketpair()
        errors = tempfile.TemporaryFile()
        slots = [anonymous_file() for _ in range(SLOTS)]
        try:
            # In a session of its own, Ctrl-C reaches only this process.
            process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
        except BaseException as e:
            ours.close()
            for slot in slots:
                os.close(slot)
            if isinstance(e, OSError):
                raise Error(f"{command[0]} did not start: {e.strerror or e}") from None
            raise
        finally:
            theirs.close()
        self._socket, self._process, self._errors, self._slots = ours, process, errors, slots
        self._command = command
        self._end = weakref.finalize(self, stop, process, ours, errors, slots, os.getpid())
        try:
            greeting = json.loads(self._request(REQUEST.pack(KIND_SLOTS, 0, 0, 0, 0), slots)[1])
        except BaseException:
            self.close()
            raise
        if greeting["protocol"] != PROTOCOL:
            self.close()
            raise Error(f"{command[0]} has another version than this client; install both from one wheel")
        self.vocab_size: int = greeting["vocab_size"]
        self.sha256: str = greeting["sha256"]

    def encode(self, count: int, parts: Iterator[Part], result: ResultFile) -> int:
        """Writes the ids of a batch to the result file, and returns their number."""
        sent = answered = total = 0
        failures: list[Refused] = []
        try:
            for part in parts:
                if sent - answered == SLOTS:
                    answered += 1
                    total, _ = self._answer()
                slot = self._slots[sent % SLOTS]
                write_all(slot, part.offsets, 0)
                write_all(slot, part.texts, part.offsets.nbytes)
                self._send(
                    REQUEST.pack(
                        KIND_PART if sent else KIND_BATCH,
                        sent % SLOTS,
                        len(part.offsets) - 1,
                        part.texts.nbytes,
                        count,
                    ),
                    [] if sent else [result.descriptor],
                )
                sent += 1
        except Refused as e:
            failures.append(e)
        while answered < sent:  # after a failure, too, so that the next request gets its own answer
            answered += 1
            try:
                total, _ = self._answer()
            except Refused as e:
                failures.append(e)
        for slot in self._slots:
            if os.fstat(slot).st_size > KEPT_SLOT:
                os.ftruncate(slot, 0)
        if failures:
            raise min(failures, key=lambda f: f.text)
        return total

    def decode(self, ids: np.ndarray[Any, Any]) -> str:
        """Returns the text of ids."""
        _, text = self._request(REQUEST.pack(KIND_DECODE, 0, len(ids), 0, 0) + ids.tobytes())
        return text.decode(errors="replace")

    def _request(self, message: bytes, files: list[int] | None = None) -> tuple[int, bytes]:
        self._send(message, files or [])
        return self._answer()

    def _send(self, message: bytes, files: list[int]) -> None:
        try:
            sent = socket.send_fds(self._socket, [message], files) if files else 0
            self._socket.sendall(message[sent:])
        except OSError:
            raise self._ended() from None

    def _answer(self) -> tuple[int, bytes]:
        """Returns the number and the payload of the next answer."""
        status, size, number = ANSWER.unpack(self._receive(ANSWER.size))
        payload = self._receive(size)
        if status == 0:
            return number, payload
        raise Refused(number, payload.decode(errors="replace"))

    def _receive(self, size: int) -> bytes:
        data = bytearray(size)
        view, have = memoryview(data), 0
        try:
            while have < size:
                n = self._socket.recv_into(view[have:], 0, socket.MSG_WAITALL)
                if n == 0:
                    raise self._ended()
                have += n
        except OSError:
            raise self._ended() from None
        return bytes(data)

    def _ended(self) -> Error:
        """Returns the error about a process that has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._errors.seek(0)
        said = self._errors.read(10_000).decode(errors="replace").strip().removeprefix("mula: ")
        code = self._process.returncode
        if not said and code is not None and code < 0:
            said = f"signal {-code} killed it, perhaps for lack of memory; try a smaller batch, or call again"
        return Error(f"`{' '.join(self._command[:3])}` ended: {said or f'exit code {code}'}")

    def close(self) -> None:
        """Ends the process."""
        self._end()


def stop(
    process: subprocess.Popen[bytes], connection: socket.socket, errors: IO[bytes], slots: list[int], owner: int
) -> None:
    """Ends the process, unless it belongs to the process from which this one was forked."""
    connection.close()
    errors.close()
    for slot in slots:
        os.close(slot)
    if os.getpid() != owner:
        process.returncode = 0  # otherwise Popen warns that the process is still running
        return
    process.kill()
    process.wait()


class ResultFile:
    """A file for the result of a batch, and its mapping."""

    def __init__(self) -> None:
        self.descriptor = anonymous_file()
        self._memory: mmap.mmap | None = None
        self.inherited = False  # a forked process has views of it, so it must not be used again

    def map(self, size: int) -> mmap.mmap:
        """Returns the memory of the first `size` bytes at least, and frees most of the others."""
        have = os.fstat(self.descriptor).st_size
        if not size <= have <= 4 * size:
            os.ftruncate(self.descriptor, size)
            have = size
        if self._memory is None or len(self._memory) < size:
            self._memory = mmap.mmap(self.descriptor, have)
        return self._memory

    def __del__(self) -> None:
        os.close(self.descriptor)


def released(result: ResultFile, held: set[ResultFile], idle: collections.deque[ResultFile]) -> None:
    """Keeps a result file, to which no array refers any more, for the next batch.

    Any thread may run this at any time, so it takes no lock.
    """
    held.discard(result)
    if not result.inherited:
        idle.append(result)


def list_parts(texts: Iterable[str]) -> tuple[int, Iterator[Part]]:
    """Returns the number of texts and their parts."""
    if isinstance(texts, (str, bytes)):
        raise Error(f"texts is one {type(texts).__name__}: want a list of str; `encode` has the ids of one text")
    items = texts if isinstance(texts, (list, tuple)) else list(texts)
    return len(items), converted(items)


def part_size(batch: int) -> int:
    """Returns the size of the parts of a batch.

    Large parts save switches between the processes. With several parts, one process converts while
    the other encodes.
    """
    return min(max(batch // (2 * SLOTS), LEAST_PART), MOST_PART)


def converted(texts: Sequence[str]) -> Iterator[Part]:
    """Returns texts in UTF-8, in parts."""
    try:
        ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    except TypeError:  # an object without a length
        raise not_str(texts, 0) from None
    size = part_size(int(ends[-1]) if texts else 0)
    start = 0
    while start < len(texts):
        before = ends[start - 1] if start else 0
        stop = min(max(start + 1, int(np.searchsorted(ends, before + size, "right"))), start + PART_TEXTS)
        items = texts[start:stop]
        if not all(issubclass(kind, str) for kind in set(map(type, items))):
            raise not_str(items, start)
        try:
            array = pa.array(items, pa.large_string())
        except UnicodeEncodeError:
            for i in range(start, stop):
                try:
                    texts[i].encode()
                except UnicodeEncodeError as e:
                    raise Refused(
                        i,
                        f"character {e.start} is half a surrogate pair, which UTF-8 cannot express; replace it, for "
                        "example by text.encode(errors='replace').decode()",
                    ) from None
            raise
        yield from slices(array, size)
        start = stop


def not_str(texts: Sequence[Any], start: int) -> Refused:
    """Returns the error about the first text that is not a str. texts[0] has the index start."""
    text = next(i for i, item in enumerate(texts) if not isinstance(item, str))
    return Refused(start + text, f"want str, not {type(texts[text]).__name__}")


def arrow_parts(texts: pa.Array | pa.ChunkedArray) -> tuple[int, Iterator[Part]]:
    """Returns the number of texts of an Arrow array and their parts."""
    kind = texts.type.value_type if pa.types.is_dictionary(texts.type) else texts.type
    if kind not in (pa.string(), pa.large_string()) and str(kind) != "string_view":
        raise Error(f"texts is an Arrow array of {texts.type}: want strings")
    if texts.null_count:
        text = texts.is_null().to_pylist().index(True)
        raise Error(f"text {text} is null; remove nulls, or replace them by texts.fill_null('')")
    chunks = texts.chunks if isinstance(texts, pa.ChunkedArray) else [texts]
    size = part_size(texts.nbytes)
    return len(texts), (part for chunk in chunks for part in slices(chunk, size))


def slices(array: pa.Array, size: int) -> Iterator[Part]:
    """Returns the texts of an Arrow array in parts, without a copy of texts."""
    if array.type != pa.string():
        array = array.cast(pa.large_string())  # without a copy, unless it is a dictionary or has views
    if len(array) == 0:
        return
    _, offsets, data = array.buffers()
    width = np.int32 if array.type == pa.string() else np.int64
    bounds = np.frombuffer(offsets, width)[array.offset : array.offset + len(array) + 1]
    memory = memoryview(data or b"").cast("B")
    start = 0
    while start < len(array):
        fit = int(np.searchsorted(bounds, int(bounds[start]) + size, "right")) - 1
        stop = min(max(start + 1, fit), start + PART_TEXTS, len(array))
        yield Part(
            np.subtract(bounds[start : stop + 1], bounds[start], dtype=np.int64), memory[bounds[start] : bounds[stop]]
        )
        start = stop


def anonymous_file() -> int:
    """Returns the descriptor of a file without a name: memory on Linux, else a temporary file."""
    try:
        if hasattr(os, "memfd_create"):
            return os.memfd_create("mula")
        descriptor, path = tempfile.mkstemp(prefix="mula-")
        os.unlink(path)
        return descriptor
    except OSError as e:
        raise Error(f"a file to share with the program: {e.strerror}; release results, or raise `ulimit -n`") from None


def write_all(descriptor: int, data: Any, at: int) -> None:
    """Writes the bytes of an array to a file."""
    view = memoryview(data)
    view = view.cast("B") if view.nbytes else view
    try:
        while view.nbytes:
            n = os.pwrite(descriptor, view, at)
            view, at = view[n:], at + n
    except OSError as e:
        raise Error(f"memory to share with the program: {e.strerror}; try a smaller batch") from None


def read_all(descriptor: int, array: Any, at: int) -> None:
    """Fills an array with the bytes of a file."""
    view = memoryview(array)
    view = view.cast("B") if view.nbytes else view
    while view.nbytes:
        data = os.pread(descriptor, view.nbytes, at)
        if not data:
            raise Error("the result of the program is too short; install the program and the client from one wheel")
        view[: len(data)] = data
        view, at = view[len(data) :], at + len(data)


ALL: weakref.WeakSet[Tokenizer] = weakref.WeakSet()


def before_fork() -> None:
    """Keeps results that the forked process inherits from being overwritten by later batches."""
    for tokenizer in list(ALL):
        for result in list(tokenizer._held):
            result.inherited = True


def forked() -> None:
    """Makes the tokenizers of a forked process start processes of their own."""
    for tokenizer in list(ALL):
        tokenizer._reset()
        if tokenizer._process:
            tokenizer._process.close()
            tokenizer._process = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=before_fork, after_in_child=forked)
