"""The stream of batches."""
from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, Literal
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa

from mula.batch import Batch, numbers, writable
from mula.connection import Address, Connection, Slabs
from mula.errors import Broken, Error
from mula.fingerprints import Log
from mula.server import Server
from mula.slots import Slots, columns, place

MESSAGE = 1 << 20  # bytes of a record beside its tokens and document starts: its header, alignment, the names of the sources


class Stream:
    """The samples of a plan, in its order, from `position` to `end`.

    plan         path of a plan, for which `mula serve` is started on a unix socket; or the address of one that runs: "unix:/PATH", "http://HOST:PORT", "https://…"
    batch_size   positions of a step, over all ranks
    rank, world  this rank takes the rank-th of `world` equal blocks of each step
    micro_batch  rows of a batch that is given, at most; without it a batch is this rank's whole share of the step
    position     first position; a step must begin there: a multiple of batch_size
    end          position after the last (default: the end of the plan)
    columns      names of the columns that are wanted beside position and tokens (default: all)
    arrays       "torch" (default where torch is installed) or "numpy"
    log          folder for the fingerprints of what was given, one file for each rank and start: see mula.verify
    token        bearer token of the server;  certificates: file of authorities (PEM) that sign its certificate
    patience     seconds for which a server that cannot be reached, is busy or gives nothing is tried again
    share        whether records lie in memory that the server shares, where it can: on a unix socket, with Linux. `transport` says whether they do
    mula         the program, if it is not on the PATH; the variable MULA names it, too

    Iterating gives a Batch for each record, and goes on where it was left. It can be left at any time; `state_dict` is the whole state.
    What is wrong is a mula.Error. A stream is used by one thread.
    """

    def __init__(self, plan: str | os.PathLike[str], batch_size: int, rank: int = 0, world: int = 1, *, micro_batch: int | None = None, position: int = 0,
                 end: int | None = None, columns: list[str] | None = None, arrays: Literal["torch", "numpy"] | None = None,
                 log: str | os.PathLike[str] | None = None, token: str | None = None, certificates: str | None = None, patience: float = 30,
                 share: bool = True, mula: str | os.PathLike[str] | None = None):
        if batch_size < 1 or world < 1 or not 0 <= rank < world or batch_size % world != 0:
            raise Error(f"rank {rank} of {world} and batch size {batch_size}: ranks count from 0, and the batch size is a multiple of their number")
        if micro_batch is not None and (micro_batch < 1 or batch_size // world % micro_batch != 0):
            raise Error(f"micro-batch {micro_batch} does not divide the {batch_size // world} samples of a rank: choose a divisor")
        if arrays not in (None, "torch", "numpy"):
            raise Error(f"arrays={arrays!r}: want torch or numpy")
        self.batch_size, self.rank, self.world, self.micro_batch = batch_size, rank, world, micro_batch
        self._rows = micro_batch or batch_size // world  # of a record
        self._arrays = arrays or ("torch" if importlib.util.find_spec("torch") else "numpy")
        self._columns, self._token, self._certificates, self._patience, self._program = columns, token, certificates, patience, mula
        self._share = share and sys.platform == "linux"
        self.transport: Literal["shared memory", "socket"] | None = None  #: how records come; None before the first
        self._source = os.fspath(plan)
        self._begin()
        self.plan: dict[str, Any] = self._ask("/v1/plan")  #: what /v1/plan says: fingerprint, sequence_length, positions, sources, stages, …
        try:
            self.fingerprint: str = self.plan["fingerprint"]
            self.sequence_length, self.length = int(self.plan["sequence_length"]), int(self.plan["positions"])
        except (KeyError, TypeError, ValueError):
            raise Error(f"{self._address.text}: what answers there is no mula serve") from None
        self.end = self.length if end is None else end
        self._folder = None if log is None else os.fspath(log)
        self._move(position)

    # ---- the server

    def _begin(self) -> None:
        """What a process has of its own; the copy of a stream in another process begins anew with it."""
        self._pid = os.getpid()
        self._server: Server | None = None
        self._reader: Generator[Batch, None, None] | None = None
        self._slabs = Slabs()
        self._log: Log | None = None
        if self._source.startswith(("unix:", "http://", "https://")):
            self._address = Address(self._source)
        elif "://" in self._source:
            raise Error(f"{self._source}: want the path of a plan, http://HOST:PORT, https://HOST:PORT or unix:/PATH")
        else:
            self._start()

    def _start(self) -> None:
        self._server = None
        self._server = Server(self._source, self._program)
        self._address = Address("unix:" + self._server.socket)

    def _ask(self, path: str) -> Any:
        patience = Patience(self._patience)
        while True:
            try:
                connection = Connection(self._address, path, self._token, self._patience, self._certificates)
                try:
                    return connection.json()
                finally:
                    connection.close()
            except Broken as e:
                patience.spend(e)
                self._revive()

    def _revive(self) -> None:
        """Starts the stream's own server again if it has ended."""
        if self._server is not None and self._server.ended():
            self._server.close()
            self._start()

    # ---- the state

    def _move(self, position: int) -> None:
        if not 0 <= position <= self.end <= self.length:
            raise Error(f"positions [{position}, {self.end}) are not all in the plan, which has {self.length}")
        if position % self.batch_size != 0 and position != self.end:
            before = position - position % self.batch_size
            raise Error(f"no step of {self.batch_size} positions begins at {position}: the nearest begin at {before} and {min(before + self.batch_size, self.end)}; "
                        "choose a batch size that divides the position")
        self._end_reading()
        self._position = position
        self._given = 0  # records of the step at the position that were given

    def state_dict(self) -> dict[str, Any]:
        """The fingerprint of the plan, and the position after the last step that was given whole: the same on every rank."""
        return {"plan": self.fingerprint, "position": self._position}

    def load_state_dict(self, state: dict[str, Any], *, plan_change: Literal["refuse", "accept"] = "refuse") -> None:
        """Goes on at a state, of any number of ranks and any batch size that a step of this one's begins at. The state of another plan is refused, unless this
        one is an amendment of it that has the same samples up to the position, or with plan_change="accept", which goes on at the same position of this one."""
        try:
            plan, position = str(state["plan"]), int(state["position"])
        except (KeyError, TypeError, ValueError):
            raise Error(f"not the state of a stream, which has plan and position: {state!r:.200}") from None
        parents = self.plan.get("parents", [])  # oldest first, each with the position from which its child differs
        shared = {self.fingerprint: self.length} | {p["fingerprint"]: min(q["at"] for q in parents[i:]) for i, p in enumerate(parents)}
        if plan_change != "accept" and position > shared.get(plan, -1):
            raise Error(f"the state is of plan {plan}, and this stream of plan {self.fingerprint}: open the plan of the state, "
                        "or go on at the same position of this one with plan_change=\"accept\"")
        self._move(position)

    # ---- the batches

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if os.getpid() != self._pid:  # forked: the connection and the server are the parent's
            self._begin()
        if self._reader is None:
            self._reader = self._read()
        try:
            return next(self._reader)
        except BaseException:
            self._reader = None
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_server", "_reader", "_slabs", "_log", "_address")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, the log, and the server if this stream started it."""
        self._end_reading()
        if self._server is not None:
            self._server.close()

    def _end_reading(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _read(self) -> Generator[Batch, None, None]:
        """Batches from the position on. A connection that breaks is made anew, at the first record that was not given."""
        torch = importlib.import_module("torch") if self._arrays == "torch" else None
        if self._folder is not None and self._log is None and self._position < self.end:
            self._log = Log(self._folder, self.fingerprint, self.sequence_length, self.batch_size, self.rank, self.world, self._position)
        patience = Patience(self._patience)
        while self._position < self.end:
            try:
                for tokens, record in self._records():
                    patience.renew()
                    yield self._give(tokens, record, torch)
                    del tokens, record  # so that the memory can be used again
            except Broken as e:
                patience.spend(e)
                self._revive()

    def _give(self, tokens: np.ndarray, record: Callable[[], pa.RecordBatch], torch: Any) -> Batch:
        """The batch of a record; from here on it counts as given."""
        step = self._position // self.batch_size
        last = (self._given + 1) * self._rows == self.batch_size // self.world
        batch = Batch(tokens, record, torch, self._position, step, last, self.sequence_length)
        if self._log is not None:
            self._log.add(batch._tokens)
            if last:
                self._log.end_step(self._position)
        self._given += 1
        if last:
            self._position, self._given = min(self._position + self.batch_size, self.end), 0
        return batch

    def _records(self) -> Iterator[tuple[np.ndarray, Callable[[], pa.RecordBatch]]]:
        """Tokens and columns of the records of one connection, from the first on that was not given; Broken if it breaks."""
        rows, share, skip = self._rows, self.batch_size // self.world, self._given
        asked: dict[str, Any] = {"batch_size": self.batch_size, "rank": self.rank, "world": self.world, "from": self._position, "to": self.end, "micro_batch": rows}
        if self._columns is not None:
            asked["columns"] = ",".join([c for c in ("position", "tokens") if c not in self._columns] + self._columns)
        connection = Connection(self._address, "/v1/stream?" + urlencode(asked), self._token, self._patience, self._certificates, self._slabs,
                                self._share and bool(self._address.path))
        slots = None
        try:
            # What was right to ask of one plan may be wrong to ask of another.
            plan = connection.header.get("mula-plan") if connection.status == 200 else self._ask("/v1/plan")["fingerprint"]
            if plan != self.fingerprint:
                raise Error(f"{self._address.text}: the server now has plan {plan}, and this stream is of {self.fingerprint}")
            if connection.status != 200:
                connection.json()
            connection.limit = rows * ((self.sequence_length + 1) * 8 + 64) + len(self.plan.get("sources", ())) * 300 + MESSAGE
            try:
                reader = pa.ipc.open_stream(connection)
                check_schema(reader.schema, self.sequence_length)
                if connection.header.get("mula-memory") == "shared":
                    slots = Slots(connection, self._slabs)
                    records = shared(connection, reader, slots, rows, self.sequence_length)
                    self.transport = "shared memory"
                else:
                    records = received(connection, reader, self.sequence_length)
                    self.transport = "socket"
                while self._position < self.end:
                    tokens, record, places = next(records)
                    if skip > 0:
                        skip -= 1
                        continue
                    first = self._position + self.rank * share + self._given * rows
                    check(places, first, min(first + rows, self.end))
                    yield tokens, record
                    del tokens, record, places
            except StopIteration:
                raise Broken(f"{self._address.text}: the stream broke off") from None
            except (pa.ArrowException, ValueError, TypeError, KeyError, OSError, MemoryError) as e:  # what pyarrow says of what is no stream
                raise Error(f"{self._address.text}: what came is no stream of mula serve: {str(e).splitlines()[0]}") from None
        finally:
            if slots is not None:
                slots.keep()
            connection.close()


Record = tuple[np.ndarray, Callable[[], pa.RecordBatch], np.ndarray]  # tokens, columns, positions


def received(connection: Connection, reader: pa.RecordBatchReader, sequence_length: int) -> Iterator[Record]:
    """Records that come over the socket."""
    while True:
        connection.slab = None
        try:
            record = reader.read_next_batch()
        except StopIteration:
            return
        record.validate()
        slab, connection.slab = connection.slab, None
        tokens = writable(record.column("tokens").values, slab).reshape(record.num_rows, sequence_length + 1)
        yield tokens, partial(same, record), numbers(record.column("position"))
        del record, slab, tokens


def same(record: pa.RecordBatch) -> pa.RecordBatch:
    return record


def shared(connection: Connection, reader: pa.RecordBatchReader, slots: Slots, rows: int, sequence_length: int) -> Iterator[Record]:
    """Records that lie in shared memory. The Arrow stream before them is one of no rows."""
    empty = reader.read_next_batch()
    if empty.num_rows or next(reader, None) is not None:
        raise ValueError("the Arrow stream before records in shared memory has rows")
    slots.begin(empty.schema)
    dtype = np.dtype(empty.schema.field("tokens").type.value_type.to_pandas_dtype())
    width, tokens, position = (sequence_length + 1) * dtype.itemsize, place(empty.schema, "tokens"), place(empty.schema, "position")
    shape = (-1, sequence_length + 1)
    while True:
        slab, frame = slots.take()
        n, at, where = frame[0], frame[tokens], frame[position]
        if n > rows or frame[tokens + 1] != n * width or frame[position + 1] != n * 8 or max(at + n * width, where + n * 8) > len(slab):
            raise ValueError(f"a record of {n} rows does not lie in its slot")
        yield slab[at:at + n * width].view(dtype).reshape(shape), partial(columns, empty, slab, frame), slab[where:where + n * 8].view(np.int64)
        del slab


def check_schema(schema: pa.Schema, sequence_length: int) -> None:
    """Compares the columns of a stream with what was asked for: a ValueError says what they are not."""
    for name in ("position", "tokens"):
        if schema.get_field_index(name) < 0:
            raise ValueError(f"it has no column {name}")
    tokens, position = schema.field("tokens").type, schema.field("position").type
    if not pa.types.is_fixed_size_list(tokens) or tokens.list_size != sequence_length + 1 or tokens.value_type not in (pa.uint16(), pa.int32()):
        raise ValueError(f"tokens are {tokens}")
    if position != pa.int64():
        raise ValueError(f"positions are {position}")


def check(places: np.ndarray, first: int, end: int) -> None:
    """Compares the positions of a record with those that were asked for: a ValueError says which there are."""
    if places.tolist() == list(range(first, end)):
        return  # none is skipped
    if len(places) and (places[0] < first or places[-1] >= end or (places[1:] <= places[:-1]).any()):
        raise ValueError(f"positions {places[0]} to {places[-1]} came where [{first}, {end}) were asked for")


class Patience:
    """How long what breaks is tried again."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Something came: the time begins anew."""
        self._since: float | None = None
        self._wait = 0.02

    def spend(self, why: Broken) -> None:
        """Waits for the next try, longer each time, or gives up with an Error."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now + self._wait - self._since > self._seconds:
            raise Error(f"{why} (tried again for {self._seconds:g} s)") from None
        time.sleep(self._wait)
        self._wait = min(2 * self._wait, 2)
