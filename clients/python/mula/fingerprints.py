"""Fingerprint logs of what a stream gave (docs/formats/fingerprints.md), and the comparison of a run's logs with its plan."""

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

# A run leaves one log for each rank and each start: its first position, batch size, rank and number of ranks.
NAME = re.compile(r"(\d+)-batch(\d+)-rank(\d+)of(\d+)\.jsonl")


class Log:
    """The log of one rank, from its start at a position on. A start takes back what the logs of the folder have from its position on: steps that were
    given after the checkpoint at which the run goes on.

    The file is locked until `close`, so that a second live process cannot write it. The lock ends with the process."""

    def __init__(
        self, folder: str, plan: str, sequence_length: int, batch_size: int, rank: int, world: int, position: int
    ):
        if "://" in folder:  # it would be taken for a folder in the working directory
            raise Error(
                f"log={folder!r} is a URL, and logs are written to local folders: mount the store, or copy the folder after the run"
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
                    continue  # of this start: each rank begins its own anew
                # Every rank does this, and they may do it at the same time: it comes to the same.
                cut(os.path.join(folder, file_name(first, size, other, ranks)), position)
            os.ftruncate(self._file, 0)
            self._size = 0
            self._line(header)
        except OSError as e:
            raise Error(f"the fingerprint log in {folder}: {e.strerror}") from None

    def _begin_step(self) -> None:
        self._order, self._set, self._samples = hashlib.sha256(), 0, 0

    def _line(self, members: dict[str, object]) -> None:
        line = (json.dumps(members, separators=(",", ":")) + "\n").encode()
        os.write(self._file, line)  # in one piece: a kill leaves whole lines
        self._size += len(line)
        # Locks do not work on every file system. What another process has written or taken away shows in the file's size and number of links.
        found = os.fstat(self._file)
        if found.st_size != self._size or found.st_nlink == 0:
            raise Error(f"{self._path}: {TWICE}")

    def add(self, hashes: bytes) -> None:
        """Adds samples of the step, by their hashes."""
        self._order.update(hashes)
        for at in range(0, len(hashes), SAMPLE):
            self._set += int.from_bytes(hashes[at : at + SAMPLE], "little")
        self._samples += len(hashes) // SAMPLE

    def end_step(self, first: int) -> None:
        """Writes the line of the step that begins at position `first`."""
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
        """Ends the log, and its lock."""
        self._close()


# Logs that this process writes. A forked process closes its copies of their files, which would keep the locks after the end of the process that writes.
OPEN: weakref.WeakSet[Log] = weakref.WeakSet()


def forked() -> None:
    """Closes the logs of the process that this one was forked from."""
    for log in list(OPEN):
        log.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forked)

TWICE = (
    "another process that is still running writes this log; two processes that read the same samples cannot share a folder of logs: give each its rank, "
    "or leave log= out of all but one"
)


def lock(file: int, path: str, shared: bool) -> None:
    """Locks a log until its file is closed: for a writer, or shared by those that take steps back. It is an Error if a live process holds the other lock."""
    try:
        import fcntl
    except ImportError:  # not on this system
        return
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Error(f"{path}: {TWICE}") from None
    except OSError as e:
        if e.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):  # this file system has no locks
            raise


SAMPLE = 16  # bytes of a sample's hash


def hashed(tokens: np.ndarray[Any, Any]) -> bytes:
    """Returns the hashes of samples, one behind the other: [rows, L+1]."""
    return b"".join(hashlib.sha256(row).digest()[:SAMPLE] for row in np.ascontiguousarray(tokens, "<u4"))


def file_name(first: int, batch_size: int, rank: int, world: int) -> str:
    """The name of a log in its folder."""
    return f"{first:016d}-batch{batch_size}-rank{rank}of{world}.jsonl"


def logs(folder: str | os.PathLike[str]) -> list[tuple[int, int, int, int]]:
    """First position, batch size, rank and number of ranks of the logs of a folder, in this order."""
    found = (NAME.fullmatch(entry) for entry in os.listdir(folder))
    return sorted((int(m[1]), int(m[2]), int(m[3]), int(m[4])) for m in found if m)


def steps(path: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """Position at which each whole line's step begins, and the byte at which the line ends; the first line's is -1."""
    at, out = 0, list[tuple[int, int]]()
    for line in Path(path).read_bytes().splitlines(keepends=True):
        at += len(line)
        if line.endswith(b"\n"):
            try:
                out.append((int(json.loads(line)["first"]) if out else -1, at))
            except (ValueError, KeyError, TypeError):
                raise Error(f"{path}: line {len(out) + 1} is none of a fingerprint log") from None
    return out


def cut(path: str, position: int) -> None:
    """Takes the steps from a position on from a log, and a line that a kill has cut off. A log without steps before the position is removed."""
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return  # another rank has taken it away
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
    """Proves that a run, over all its starts and whatever their numbers of ranks and batch sizes, was given each sample of the positions [position, end)
    of the plan once: none is missing, none came twice. Compares the logs of each start with `mula hash` by `mula verify`. Gives `end`; without it
    it is the end of the last step that all ranks of the last start were given. An Error names what is wrong. `shards` is a folder of shards, as in Stream.
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
                f"of the {ranks} ranks that started at position {first}, {len(files)} have a log in {os.fspath(folder)}: bring them all together"
            )
        if first != at:
            raise Error(f"the logs in {os.fspath(folder)} reach position {at}, and the next start is at {first}")
        # A rank may be ahead of another by some steps when a run is killed; one may not have come to write its first line.
        last = min(max((step for step, _ in steps(file)), default=-1) for file in files)
        if last < 0:
            continue  # nothing was given
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
                f"step {verdict['step']} of the run that started at position {first} with batches of {size} differs from the plan: {verdict['difference']}"
            )
        if verdict["equal_steps"] != last // size + 1 - first // size:
            raise Error(
                f"the logs of the start at position {first} have {verdict['equal_steps']} of the steps {first // size} to {last // size}"
            )
        at = last + size
    at = min(
        at, json.loads(run(name, "plan", "show", "--json", os.fspath(plan)))["summary"]["length"]
    )  # the last step may be a short one
    if end is not None and at < end:
        raise Error(f"the logs in {os.fspath(folder)} reach position {at} of {end}")
    return at if end is None else end


def run(*command: str) -> str:
    """The output of mula, or its message as an Error; `mula verify` exits with 1 where logs differ."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 and not (done.returncode == 1 and command[1] == "verify" and done.stdout):
        raise Error(f"`{' '.join(command[:2])}` failed: {done.stderr.strip()}")
    return done.stdout
