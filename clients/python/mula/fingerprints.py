"""Fingerprint logs of what a stream gave (docs/formats/fingerprints.md), and the comparison of a run's logs with its plan."""
from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from mula.errors import Error
from mula.server import program

# A run leaves one log for each rank and each start: its first position, batch size, rank and number of ranks.
NAME = re.compile(r"(\d+)-batch(\d+)-rank(\d+)of(\d+)\.jsonl")


class Log:
    """The log of one rank, from its start at a position on. A start takes back what the logs of the folder have from its position on: steps that were
    given after the checkpoint at which the run goes on."""

    def __init__(self, folder: str, plan: str, sequence_length: int, batch_size: int, rank: int, world: int, position: int):
        self._batch_size = batch_size
        self._begin_step()
        header: dict[str, object] = {"plan": plan, "sequence_length": sequence_length, "batch_size": batch_size}
        if world > 1:
            header |= {"rank": rank, "world": world}
        try:
            os.makedirs(folder, exist_ok=True)
            for first, size, other, ranks in logs(folder):
                if (first, size, ranks) == (position, batch_size, world):
                    continue  # of this start: each rank begins its own anew
                # Every rank does this, and they may do it at the same time: it comes to the same.
                path = os.path.join(folder, file_name(first, size, other, ranks))
                if first >= position:
                    Path(path).unlink(missing_ok=True)
                else:
                    cut(path, position)
            path = os.path.join(folder, file_name(position, batch_size, rank, world))
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
            self._line(header)
        except OSError as e:
            raise Error(f"the fingerprint log in {folder}: {e.strerror}") from None

    def _begin_step(self) -> None:
        self._order, self._set, self._samples = hashlib.sha256(), 0, 0

    def _line(self, members: dict[str, object]) -> None:
        os.write(self._file, (json.dumps(members, separators=(",", ":")) + "\n").encode())  # in one piece: a kill leaves whole lines

    def add(self, tokens: np.ndarray) -> None:
        """Adds samples of the step: [rows, L+1]."""
        ids = np.ascontiguousarray(tokens, "<u4")
        for row in ids:
            digest = hashlib.sha256(row).digest()[:16]
            self._order.update(digest)
            self._set += int.from_bytes(digest, "little")
        self._samples += len(ids)

    def end_step(self, first: int) -> None:
        """Writes the line of the step that begins at position `first`."""
        self._line({"step": first // self._batch_size, "first": first, "samples": self._samples, "order": self._order.hexdigest(),
                    "set": (self._set % 2**128).to_bytes(16, "little").hex()})
        self._begin_step()

    def close(self) -> None:
        """Ends the log."""
        os.close(self._file)


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
    """Takes the steps from a position on from a log, and a line that a kill has cut off."""
    try:
        size = max((end for first, end in steps(path) if first < position), default=0)
        if size < os.path.getsize(path):
            os.truncate(path, size)
    except FileNotFoundError:
        pass  # another rank has taken it away


def verify(plan: str | os.PathLike[str], folder: str | os.PathLike[str], *, position: int = 0, end: int | None = None,
           mula: str | os.PathLike[str] | None = None) -> int:
    """Proves that a run, over all its starts and whatever their numbers of ranks and batch sizes, was given each sample of the positions [position, end)
    of the plan once: none is missing, none came twice. Compares the logs of each start with `mula hash` by `mula verify`. Gives `end`; without it
    it is the end of the last step that all ranks of the last start were given. An Error names what is wrong.
    """
    name = program(mula)
    starts: dict[tuple[int, int, int], list[str]] = {}
    for first, size, rank, ranks in logs(folder):
        starts.setdefault((first, size, ranks), []).append(os.path.join(folder, file_name(first, size, rank, ranks)))
    at = position
    for first, size, ranks in sorted(starts):
        files = starts[first, size, ranks]
        if len(files) != ranks:
            raise Error(f"of the {ranks} ranks that started at position {first}, {len(files)} have a log in {os.fspath(folder)}: bring them all together")
        if first != at:
            raise Error(f"the logs in {os.fspath(folder)} reach position {at}, and the next start is at {first}")
        # A rank may be ahead of another by some steps when a run is killed; one may not have come to write its first line.
        last = min(max((step for step, _ in steps(file)), default=-1) for file in files)
        if last < 0:
            continue  # nothing was given
        with tempfile.TemporaryDirectory() as scratch:
            cuts = []
            for k, file in enumerate(files):
                whole = Path(file).read_bytes()[:max(stop for begin, stop in steps(file) if begin <= last)]
                cuts.append(os.path.join(scratch, f"{k}.jsonl"))
                Path(cuts[-1]).write_bytes(whole)
            expected = os.path.join(scratch, "expected.jsonl")
            run(name, "hash", "--plan", os.fspath(plan), "--batch-size", str(size), "--steps", f"{first // size}:{last // size + 1}", "--output", expected)
            verdict = json.loads(run(name, "verify", "--json", expected, ",".join(cuts)))
        if not verdict["same_batches"]:
            raise Error(f"step {verdict['step']} of the run that started at position {first} with batches of {size} differs from the plan: {verdict['difference']}")
        if verdict["equal_steps"] != last // size + 1 - first // size:
            raise Error(f"the logs of the start at position {first} have {verdict['equal_steps']} of the steps {first // size} to {last // size}")
        at = last + size
    if end is not None and at < end:
        raise Error(f"the logs in {os.fspath(folder)} reach position {at} of {end}")
    return at if end is None else end


def run(*command: str) -> str:
    """The output of mula, or its message as an Error; `mula verify` exits with 1 where logs differ."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 and not (done.returncode == 1 and command[1] == "verify" and done.stdout):
        raise Error(f"`{' '.join(command[:2])}` failed: {done.stderr.strip()}")
    return done.stdout
