"""Writes fingerprint logs of the batches that a stream returned, and compares them with the plan.

docs/formats/fingerprints.md describes the logs.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from mula.errors import Error
from mula.server import program

# A run has one log for each start and each rank. The file name has the first position, the batch
# size, the rank and the number of ranks.
NAME = re.compile(r"(\d+)-batch(\d+)-rank(\d+)of(\d+)\.jsonl")


class Log:
    """The log of one rank, from one start at a position.

    Starting at position P deletes the entries at or after P from all logs of the folder: these
    steps followed the checkpoint from which the run resumes.

    The file is locked until `close`, so that a second live process cannot write to it. The lock
    ends with the process.
    """

    def __init__(
        self, folder: str, plan: str, sequence_length: int, batch_size: int, rank: int, world: int, position: int
    ):
        if "://" in folder:  # os.path would treat the URL as a folder of the working directory
            raise Error(
                f"log={folder!r} is a URL, and logs are written to local folders; mount the store, or copy the "
                "folder after the run"
            )
        self._batch_size = batch_size
        self._begin_step()
        header: dict[str, object] = {"plan": plan, "sequence_length": sequence_length, "batch_size": batch_size}
        if world > 1:
            header |= {"rank": rank, "world": world}
        self._path = os.path.join(folder, file_name(position, batch_size, rank, world))
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            self._close = weakref.finalize(self, os.close, self._file)
            OPEN.add(self)
            lock(self._file, self._path, shared=False)
            for first, size, other, ranks in logs(folder):
                if (first, size, ranks) == (position, batch_size, world):
                    continue  # of this start: each rank overwrites its own log
                # Every rank does this, perhaps at the same time. The result is the same.
                cut(os.path.join(folder, file_name(first, size, other, ranks)), position)
            os.ftruncate(self._file, 0)
            self._size = 0
            self._line(header)
        except OSError as e:
            raise Error(f"{folder}: cannot write the fingerprint log: {e.strerror}") from None

    def _begin_step(self) -> None:
        self._order, self._set, self._samples = hashlib.sha256(), 0, 0

    def _line(self, members: dict[str, object]) -> None:
        line = (json.dumps(members, separators=(",", ":")) + "\n").encode()
        os.write(self._file, line)  # one write: if the process is killed, lines are complete
        self._size += len(line)
        # Not every file system has locks. A changed size or a link count of 0 shows that another
        # process has written, cut or removed the file.
        found = os.fstat(self._file)
        if found.st_size != self._size or found.st_nlink == 0:
            raise Error(f"{self._path}: {TWICE}")

    def add(self, hashes: bytes) -> None:
        """Adds the hashes of samples to the step."""
        self._order.update(hashes)
        for at in range(0, len(hashes), SAMPLE):
            self._set += int.from_bytes(hashes[at : at + SAMPLE], "little")
        self._samples += len(hashes) // SAMPLE

    def end_step(self, first: int) -> None:
        """Writes the line of the step whose first position is `first`."""
        self._line(
            {
                "step": first // self._batch_size,
                "first": first,
                "samples": self._samples,
                "order": self._order.hexdigest(),
                "set": (self._set % 2**128).to_bytes(16, "little").hex(),
            }
        )
        self._begin_step()

    def close(self) -> None:
        """Closes the log and releases its lock."""
        self._close()


# Open logs of this process. A forked process closes its copies of the files: otherwise they would
# hold the locks after the writer has ended.
OPEN: weakref.WeakSet[Log] = weakref.WeakSet()


def forked() -> None:
    """Closes this process's copies of its parent's logs."""
    for log in list(OPEN):
        log.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forked)

TWICE = (
    "another running process writes this log, and two processes that read the same samples cannot share a folder "
    "of logs; pass each its rank, or pass log= to only one of them"
)


def lock(file: int, path: str, shared: bool) -> None:
    """Locks a log until its file is closed.

    Writers lock it exclusively. Processes that delete its last steps share a lock. It raises an
    Error if a live process holds a conflicting lock.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Error(f"{path}: {TWICE}") from None
    except OSError as e:
        if e.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):  # a file system without locks
            raise


SAMPLE = 16  # bytes of a sample's hash


def hashed(tokens: np.ndarray[Any, Any]) -> bytes:
    """Returns the concatenated hashes of samples [rows, L+1]."""
    return b"".join(hashlib.sha256(row).digest()[:SAMPLE] for row in np.ascontiguousarray(tokens, "<u4"))


def file_name(first: int, batch_size: int, rank: int, world: int) -> str:
    """Returns the name of a log in its folder."""
    return f"{first:016d}-batch{batch_size}-rank{rank}of{world}.jsonl"


def logs(folder: str | os.PathLike[str]) -> list[tuple[int, int, int, int]]:
    """Returns the first position, batch size, rank and number of ranks of each log, sorted."""
    found = (NAME.fullmatch(entry) for entry in os.listdir(folder))
    return sorted((int(m[1]), int(m[2]), int(m[3]), int(m[4])) for m in found if m)


def steps(path: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """Returns each complete line's first position, and the byte offset of the line's end.

    The position of the first line, which is a header, is -1.
    """
    at, out = 0, list[tuple[int, int]]()
    for line in Path(path).read_bytes().splitlines(keepends=True):
        at += len(line)
        if line.endswith(b"\n"):
            try:
                out.append((int(json.loads(line)["first"]) if out else -1, at))
            except (ValueError, KeyError, TypeError):
                raise Error(f"{path}:{len(out) + 1}: not a line of a fingerprint log") from None
    return out


def cut(path: str, position: int) -> None:
    """Deletes the steps at or after a position from a log, and an incomplete last line.

    A log without steps before the position is removed.
    """
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return  # another rank has removed it
    try:
        lock(file, path, shared=True)
        first = int(os.path.basename(path).split("-")[0])
        if first >= position:
            os.unlink(path)
            return
        size = max((end for at, end in steps(path) if at < position), default=0)
        if size < os.fstat(file).st_size:
            os.ftruncate(file, size)
    except FileNotFoundError:
        pass
    finally:
        os.close(file)


def verify(
    plan: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    position: int = 0,
    end: int | None = None,
    shards: str | os.PathLike[str] | None = None,
    mula: str | os.PathLike[str] | None = None,
) -> int:
    """Proves that a run consumed each sample of the positions [position, end) exactly once.

    It runs `mula hash` on the plan and compares the logs of each start with the result by
    `mula verify`. The starts may have different numbers of ranks and batch sizes. It returns `end`;
    the default is the end of the last step that all ranks of the last start have logged. A missing,
    repeated or changed sample raises an Error. `shards` is a folder of shards, as in Stream.
    """
    name = program(mula)
    starts: dict[tuple[int, int, int], list[str]] = {}
    for first, size, rank, ranks in logs(folder):
        starts.setdefault((first, size, ranks), []).append(os.path.join(folder, file_name(first, size, rank, ranks)))
    at = position
    for first, size, ranks in sorted(starts):
        files = starts[first, size, ranks]
        if len(files) != ranks:
            raise Error(
                f"{os.fspath(folder)}: of the {ranks} ranks that started at position {first}, {len(files)} have a "
                "log here; copy the logs of all ranks into one folder"
            )
        if first != at:
            raise Error(f"{os.fspath(folder)}: the logs reach position {at}, and the next start is at {first}")
        # When a run is killed, a rank may be some steps ahead of another, and a log may be empty.
        last = min(max((step for step, _ in steps(file)), default=-1) for file in files)
        if last < 0:
            continue  # no step is complete
        with tempfile.TemporaryDirectory() as scratch:
            cuts = []
            for k, file in enumerate(files):
                whole = Path(file).read_bytes()[: max(stop for begin, stop in steps(file) if begin <= last)]
                cuts.append(os.path.join(scratch, f"{k}.jsonl"))
                Path(cuts[-1]).write_bytes(whole)
            expected = os.path.join(scratch, "expected.jsonl")
            run(
                name,
                "hash",
                "--plan",
                os.fspath(plan),
                "--batch-size",
                str(size),
                "--steps",
                f"{first // size}:{last // size + 1}",
                "--output",
                expected,
                *(() if shards is None else ("--shards", os.fspath(shards))),
            )
            verdict = json.loads(run(name, "verify", "--json", expected, ",".join(cuts)))
        if not verdict["same_batches"]:
            raise Error(
                f"{os.fspath(folder)}: step {verdict['step']} of the start at position {first} with batch size "
                f"{size} differs from the plan: {verdict['difference']}"
            )
        if verdict["equal_steps"] != last // size + 1 - first // size:
            raise Error(
                f"{os.fspath(folder)}: the logs of the start at position {first} have {verdict['equal_steps']} of "
                f"the steps {first // size} to {last // size}"
            )
        at = last + size
    # The last step of a plan may have fewer samples.
    at = min(at, json.loads(run(name, "plan", "show", "--json", os.fspath(plan)))["summary"]["length"])
    if end is not None and at < end:
        raise Error(f"{os.fspath(folder)}: the logs reach position {at} of {end}")
    return at if end is None else end


def run(*command: str) -> str:
    """Returns the output of mula, or raises its message as an Error.

    `mula verify` exits with 1 if logs differ, which is not an error here.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 and not (done.returncode == 1 and command[1] == "verify" and done.stdout):
        raise Error(f"`{' '.join(command[:2])}` failed: {done.stderr.strip()}")
    return done.stdout
