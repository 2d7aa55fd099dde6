"""The stream of batches."""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import multiprocessing.context
import os
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, overload
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa

from mula import ranks
from mula.batch import Array, Batch, numbers, writable
from mula.connection import Address, Connection, Slabs
from mula.errors import Broken, Error, whole
from mula.fingerprints import Log, hashed
from mula.server import Server
from mula.slots import Slots, columns, place

if TYPE_CHECKING:
    import torch

# Most bytes of a record without its tokens, document starts and source names: header and alignment.
MESSAGE = 1 << 20


class Stream(Generic[Array]):
    """The samples of a plan, in its order, from `position` to `end`.

    plan          path of a plan, for which the stream starts `mula serve` on a unix socket; or the
                  address of a running server: "unix:/PATH", "http://HOST:PORT", "https://…"
    batch_size    positions of a step, over all ranks
    rank, world   this rank reads block number `rank` of `world` equal blocks of each step (default:
                  from torch.distributed or the launcher of this process)
    micro_batch   most rows of a batch (default: all samples of this rank in the step)
    position      first position: a multiple of batch_size, or the end of the plan
    end           position after the last: a multiple of batch_size, or the plan's end (default)
    columns       names of the columns in addition to position and tokens (default: all)
    arrays        "torch" (default if torch is installed) or "numpy"
    log           folder for fingerprint logs, one file for each rank and start: see mula.verify
    shards        folder for the plan's relative shard paths, if the plan was moved (default: the
                  plan's folder)
    replicate     allow rank 0 of 1 in several processes: each reads all samples
    by_worker     whether a DataLoader's worker process reads only its part of the batches
    token         bearer token of the server
    certificates  file of authorities (PEM) that sign the server's certificate
    patience      seconds for which requests to an unreachable, busy or silent server are retried
    share         whether to use the server's shared memory where possible: on Linux, with a unix
                  socket. `transport` shows whether it is used
    mula          path of the program, if it is not on the PATH (default: the variable MULA)

    Iterating returns a Batch for each record. A loop may stop at any time, and the next loop
    continues there. `state_dict` is the complete state. `len` is the number of batches from the
    `position` passed here to `end`, and does not change. Errors are mula.Error. Only one thread may
    use a stream.
    """

    @overload
    def __init__(
        self: Stream[torch.Tensor],
        plan: str | os.PathLike[str],
        batch_size: int,
        rank: int | None = None,
        world: int | None = None,
        *,
        micro_batch: int | None = None,
        position: int = 0,
        end: int | None = None,
        columns: list[str] | None = None,
        arrays: Literal["torch"] | None = None,
        log: str | os.PathLike[str] | None = None,
        shards: str | os.PathLike[str] | None = None,
        replicate: bool = False,
        by_worker: bool = True,
        token: str | None = None,
        certificates: str | None = None,
        patience: float = 30,
        share: bool = True,
        mula: str | os.PathLike[str] | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self: Stream[np.ndarray[Any, Any]],
        plan: str | os.PathLike[str],
        batch_size: int,
        rank: int | None = None,
        world: int | None = None,
        *,
        micro_batch: int | None = None,
        position: int = 0,
        end: int | None = None,
        columns: list[str] | None = None,
        arrays: Literal["numpy"],
        log: str | os.PathLike[str] | None = None,
        shards: str | os.PathLike[str] | None = None,
        replicate: bool = False,
        by_worker: bool = True,
        token: str | None = None,
        certificates: str | None = None,
        patience: float = 30,
        share: bool = True,
        mula: str | os.PathLike[str] | None = None,
    ) -> None: ...

    def __init__(
        self,
        plan: str | os.PathLike[str],
        batch_size: int,
        rank: int | None = None,
        world: int | None = None,
        *,
        micro_batch: int | None = None,
        position: int = 0,
        end: int | None = None,
        columns: list[str] | None = None,
        arrays: Literal["torch", "numpy"] | None = None,
        log: str | os.PathLike[str] | None = None,
        shards: str | os.PathLike[str] | None = None,
        replicate: bool = False,
        by_worker: bool = True,
        token: str | None = None,
        certificates: str | None = None,
        patience: float = 30,
        share: bool = True,
        mula: str | os.PathLike[str] | None = None,
    ):
        batch_size, position = whole("batch_size", batch_size), whole("position", position)
        micro_batch, end = (
            micro_batch if micro_batch is None else whole("micro_batch", micro_batch),
            end if end is None else whole("end", end),
        )
        self._ranks_found = rank is None and world is None and not replicate
        rank, world = ranks.choose(
            rank if rank is None else whole("rank", rank), world if world is None else whole("world", world), replicate
        )
        if batch_size < 1 or world < 1 or not 0 <= rank < world or batch_size % world != 0:
            raise Error(
                f"rank {rank} of {world} and batch size {batch_size}: want ranks from 0, and a batch size that is a "
                "multiple of the number of ranks"
            )
        if micro_batch is not None and (micro_batch < 1 or batch_size // world % micro_batch != 0):
            raise Error(
                f"micro-batch {micro_batch} does not divide the {batch_size // world} samples of a rank; choose a "
                "divisor"
            )
        if arrays not in (None, "torch", "numpy"):
            raise Error(f"arrays={arrays!r}: want torch or numpy")
        if isinstance(columns, str):
            raise Error(f"columns={columns!r}: want a list of names")
        self.batch_size, self.rank, self.world, self.micro_batch = batch_size, rank, world, micro_batch
        self._rows = micro_batch or batch_size // world  # most rows of a record
        self._records_of_step = batch_size // world // self._rows
        self._arrays = arrays or ("torch" if importlib.util.find_spec("torch") else "numpy")
        self._columns, self._token, self._certificates, self._patience, self._program = (
            columns,
            token,
            certificates,
            patience,
            mula,
        )
        self._share = share and sys.platform == "linux"
        self._by_worker = by_worker
        #: how records are transferred; None before the first
        self.transport: Literal["shared memory", "socket"] | None = None
        self._source = os.fspath(plan)
        self._shards = None if shards is None else os.path.abspath(shards)
        self._begin()
        self._copies = copies()
        #: the answer of /v1/plan: fingerprint, sequence_length, positions, sources, stages, …
        self.plan: dict[str, Any] = self._ask("/v1/plan")
        try:
            self.fingerprint: str = self.plan["fingerprint"]
            self.sequence_length, self.length = int(self.plan["sequence_length"]), int(self.plan["positions"])
        except (KeyError, TypeError, ValueError):
            raise Error(f"{self._address.text}: the server is not mula serve") from None
        self.end = self.length if end is None else end
        self._folder = None if log is None else os.fspath(log)
        if self.end % batch_size != 0 and self.end != self.length:
            raise Error(
                f"end={self.end}: no step of {batch_size} positions ends there; want a multiple of {batch_size}, or "
                f"the end of the plan, which is {self.length}"
            )
        self._move(position)
        self._start_position = position
        if columns and position < self.end:  # the server checks the names of the columns
            self._ask(
                "/v1/stream?"
                + urlencode({"batch_size": 1, "from": position, "to": position + 1, "columns": self._wanted()})
            )

    def __len__(self) -> int:
        return -(-(self.end - self._start_position) // self.batch_size) * self._records_of_step

    def __repr__(self) -> str:
        micro = "" if self.micro_batch is None else f", micro_batch={self.micro_batch}"
        return (
            f"mula.Stream({self._source!r}, batch_size={self.batch_size}, rank={self.rank}, world={self.world}{micro}, "
            f"position={self._position}, end={self.end})"
        )

    # ---- the server

    def _begin(self) -> None:
        """Sets up the resources of this process.

        A copy of the stream in another process has its own.
        """
        self._pid = os.getpid()
        self._server: Server | None = None
        self._reader: Generator[Batch[Array], None, None] | None = None
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
        self._server = Server(self._source, self._program, self._shards)
        self._address = Address("unix:" + self._server.socket)

    def _ask(self, path: str) -> Any:
        patience = Patience(self._patience)
        while True:
            try:
                connection = Connection(self._address, path, self._token, self._patience, self._certificates)
                try:
                    if connection.header.get("mula-plan") and connection.status == 200:
                        return None  # a stream, for which the header is enough
                    return connection.json()
                finally:
                    connection.close()
            except Broken as e:
                patience.spend(e)
                self._revive()

    def _revive(self) -> None:
        """Restarts the stream's own server if it has ended."""
        if self._server is not None and self._server.ended():
            self._server.close()
            self._start()

    # ---- the state

    def _move(self, position: int, record: int = 0) -> None:
        """Moves to a record of the step whose first position is `position`.

        The positions at which a stream may start are as in blend.Grid: docs/formats/serve.md.
        """
        if not 0 <= position <= self.end <= self.length:
            raise Error(
                f"positions [{position}, {self.end}) are not in the plan, which has {self.length}; choose positions "
                "from 0 to its end"
            )
        if position % self.batch_size != 0 and position != self.length:
            before = position - position % self.batch_size
            after = min(before + self.batch_size, self.length)
            raise Error(
                f"no step of {self.batch_size} positions starts at {position}, the nearest start at {before} and "
                f"{after}; choose a batch size that divides the position"
            )
        self._end_reading()
        self._position = position
        self._given = record  # returned records of the step at the position
        # The distance between returned records: more than 1 in a DataLoader's worker, and None
        # before the first.
        self._stride: int | None = None
        if worker() is None:
            self._copies[0] = 0

    def _advance(self, records: int) -> None:
        """Moves forward by a number of records."""
        step, self._given = divmod(
            self._position // self.batch_size * self._records_of_step + self._given + records, self._records_of_step
        )
        self._position = step * self.batch_size
        if self._position >= self.end:
            self._position, self._given = self.end, 0

    def _choose_stride(self) -> None:
        """Sets the distance between records: worker i of n of a DataLoader reads i, i+n, i+2n and
        so on.

        The DataLoader requests batches from its workers in rotation.
        """
        if self._stride is None:
            i, self._stride = self._by_worker and worker() or (0, 1)
            if self._position < self.end:
                self._advance(i)

    def state_dict(self) -> dict[str, Any]:
        """Returns the plan's fingerprint and the position after the last complete step.

        The state is the same on every rank. In a DataLoader's worker, it is the worker's own state,
        with the record in the step, the worker's number and the number of workers.
        """
        here = worker() if self._by_worker else None
        if here is not None:
            self._renew()
            self._choose_stride()
            return {
                "plan": self.fingerprint,
                "position": self._position,
                "record": self._given,
                "records": self._records_of_step,
                "worker": here[0],
                "workers": here[1],
            }
        if self._copies[0]:
            raise Error(
                "worker processes read copies of this stream, so its own state does not advance; use the state_dict "
                "of a mula.torch.Loader, or the state of the last batch, batch.state"
            )
        return {"plan": self.fingerprint, "position": self._position}

    def load_state_dict(self, state: dict[str, Any], *, plan_change: Literal["refuse", "accept"] = "refuse") -> None:
        """Resumes from a state.

        The number of ranks and the batch size may change, but the position must be a multiple of
        the batch size. The state of another plan raises an Error, with two exceptions. The stream's
        plan may be an amendment of the state's plan with the same samples up to the position. And
        plan_change="accept" resumes at the same position of the stream's plan.
        """
        try:
            plan, position, record = (
                str(state["plan"]),
                whole("position", state["position"]),
                whole("record", state.get("record", 0)),
            )
        except (KeyError, TypeError, AttributeError, Error):
            raise Error(f"not the state of a stream: {state!r:.200}; want a dict with plan and position") from None
        parents = self.plan.get("parents", [])  # oldest first, each with the position from which its child differs
        shared = {self.fingerprint: self.length} | {
            p["fingerprint"]: min(q["at"] for q in parents[i:]) for i, p in enumerate(parents)
        }
        if plan_change != "accept" and position > shared.get(plan, -1):
            raise Error(
                f"the state belongs to plan {plan}, and this stream reads plan {self.fingerprint}; open the state's "
                'plan, or pass plan_change="accept" to resume at the same position of this plan'
            )
        if "records" in state and (
            state["records"] != self._records_of_step or not 0 <= record < self._records_of_step
        ):
            raise Error(
                f"the state is at batch {record} of {state['records']} of a step, and a step of this stream has "
                f"{self._records_of_step} batches; use the same batch size, world and micro-batch"
            )
        if "workers" in state and (state.get("worker"), state["workers"]) != worker():
            raise Error(
                f"the state belongs to worker {state.get('worker')} of {state['workers']} of a DataLoader; load it "
                "with the same number of workers"
            )
        self._renew()
        self._move(position, record)
        if "workers" in state:
            self._stride = int(state["workers"])

    # ---- the batches

    def __iter__(self) -> Iterator[Batch[Array]]:
        if self._position == self.end and self._stride in (None, 1):
            warnings.warn(
                f"the stream is at its end, position {self.end}, and has no more batches; load an earlier state to "
                "read again",
                stacklevel=2,
            )
        return self

    def __next__(self) -> Batch[Array]:
        self._renew()
        if self._reader is None:
            self._reader = self._read()
        try:
            return next(self._reader)
        except BaseException:
            self._reader = None
            raise

    def _renew(self) -> None:
        """Replaces the connection, the log and the server in a forked process: they are the
        parent's.
        """
        if os.getpid() != self._pid:
            if worker() is not None:
                self._copies[0] = 1  # the parent sees it
            self._begin()

    def __getstate__(self) -> dict[str, Any]:
        if multiprocessing.context.get_spawning_popen() is not None:
            refuse_dispatch(self.world)
            self._copies[0] = 1
        return {
            k: v
            for k, v in self.__dict__.items()
            if k not in ("_server", "_reader", "_slabs", "_log", "_address", "_copies")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._copies = copies()
        self._begin()

    def __enter__(self) -> Stream[Array]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and the log, and stops the server if this stream started it."""
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

    def _read(self) -> Generator[Batch[Array], None, None]:
        """Returns the batches from the position to the end.

        A broken connection is replaced by a new one, which starts at the first record that was not
        returned yet.
        """
        if self._ranks_found and worker() is None:
            ranks.recheck(self.rank, self.world)
        refuse_dispatch(self.world)
        self._choose_stride()
        if self._folder is not None and worker() is not None:
            raise Error(
                "log= cannot be written in a DataLoader's workers, which read ahead of the training; use "
                "mula.torch.Loader, which logs only the batches that the training receives"
            )
        torch = importlib.import_module("torch") if self._arrays == "torch" else None
        if self._folder is not None and self._log is None and self._position < self.end:
            self._log = Log(
                self._folder,
                self.fingerprint,
                self.sequence_length,
                self.batch_size,
                self.rank,
                self.world,
                self._position,
            )
        patience = Patience(self._patience)
        while self._position < self.end:
            try:
                for tokens, record in self._records():
                    patience.renew()
                    yield self._give(tokens, record, torch)
                    del tokens, record  # so that the memory can be reused
            except Broken as e:
                patience.spend(e)
                self._revive()

    def _give(self, tokens: np.ndarray[Any, Any], record: Callable[[], pa.RecordBatch], torch: Any) -> Batch[Array]:
        """Returns the batch of a record, logs it, and advances the state."""
        first, last = self._position, self._given + 1 == self._records_of_step
        state = {"plan": self.fingerprint, "position": min(first + self.batch_size, self.end) if last else first}
        batch: Batch[Array] = Batch(
            tokens, record, torch, first, first // self.batch_size, last, self.sequence_length, state
        )
        if self._log is not None:
            self._log.add(hashed(tokens))
            if last:
                self._log.end_step(first)
        assert self._stride is not None
        self._advance(self._stride)
        return batch

    def _wanted(self) -> str:
        """Returns the names of the requested columns, with position and tokens."""
        assert self._columns is not None
        return ",".join([c for c in ("position", "tokens") if c not in self._columns] + self._columns)

    def _records(self) -> Iterator[tuple[np.ndarray[Any, Any], Callable[[], pa.RecordBatch]]]:
        """Returns the tokens and columns of the records of one connection.

        It starts at the first record that was not returned yet, and raises Broken if the connection
        fails.
        """
        rows, share, skip = self._rows, self.batch_size // self.world, self._given
        asked: dict[str, Any] = {
            "batch_size": self.batch_size,
            "rank": self.rank,
            "world": self.world,
            "from": self._position,
            "to": self.end,
            "micro_batch": rows,
        }
        if self._columns is not None:
            asked["columns"] = self._wanted()
        connection = Connection(
            self._address,
            "/v1/stream?" + urlencode(asked),
            self._token,
            self._patience,
            self._certificates,
            self._slabs,
            self._share and bool(self._address.path),
        )
        slots = None
        try:
            # An error in the request may only mean that the server has another plan now.
            plan = (
                connection.header.get("mula-plan") if connection.status == 200 else self._ask("/v1/plan")["fingerprint"]
            )
            if plan != self.fingerprint:
                raise Error(
                    f"{self._address.text}: the server now has plan {plan}, and this stream reads plan "
                    f"{self.fingerprint}; open a new stream"
                )
            if connection.status != 200:
                connection.json()
            connection.limit = (
                rows * ((self.sequence_length + 1) * 8 + 64) + len(self.plan.get("sources", ())) * 300 + MESSAGE
            )
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
                    skip = (self._stride or 1) - 1  # records of other workers
            except StopIteration:
                raise Broken(f"{self._address.text}: the stream ended early") from None
            # pyarrow raises all of these for an invalid stream.
            except (pa.ArrowException, ValueError, TypeError, KeyError, OSError, MemoryError) as e:
                problem = str(e).splitlines()[0]
                raise Error(f"{self._address.text}: the server sent an invalid stream: {problem}") from None
        finally:
            if slots is not None:
                slots.keep()
            connection.close()


def copies() -> mmap.mmap:
    """Returns a byte shared with forked processes: whether DataLoader workers read copies of a
    stream.
    """
    return mmap.mmap(-1, 1)


def worker() -> tuple[int, int] | None:
    """Returns this process's number among the workers of torch's DataLoader, and their number.

    It returns None in other processes, and imports nothing.
    """
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    return None if info is None else (info.id, info.num_workers)


def refuse_dispatch(world: int) -> None:
    """Raises an Error if the caller is Accelerate's DataLoaderDispatcher or IterableDatasetShard.

    They distribute the batches of one process to all, so the batches of the other ranks would be
    lost. Only the call stack shows the caller.
    """
    if world == 1 or "accelerate.data_loader" not in sys.modules:
        return
    frame = sys._getframe()
    while frame is not None:
        reader = type(frame.f_locals.get("self")).__name__
        if frame.f_globals.get("__name__") == "accelerate.data_loader" and reader in (
            "DataLoaderDispatcher",
            "IterableDatasetShard",
        ):
            raise Error(
                f"accelerator.prepare made this DataLoader read for all {world} processes, but each process reads only "
                "its own part of every step, so samples would be lost; do not prepare it, or use mula.torch.Loader, "
                "which prepare does not change"
            )
        frame = frame.f_back  # type: ignore[assignment]


Record = tuple[np.ndarray, Callable[[], pa.RecordBatch], np.ndarray]  # tokens, columns, positions


def received(connection: Connection, reader: pa.RecordBatchReader, sequence_length: int) -> Iterator[Record]:
    """Returns the records that arrive over the socket."""
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


def shared(
    connection: Connection, reader: pa.RecordBatchReader, slots: Slots, rows: int, sequence_length: int
) -> Iterator[Record]:
    """Returns the records in shared memory. An Arrow stream without rows precedes them."""
    empty = reader.read_next_batch()
    if empty.num_rows or next(reader, None) is not None:
        raise ValueError("the Arrow stream before records in shared memory has rows")
    slots.begin(empty.schema)
    dtype = np.dtype(empty.schema.field("tokens").type.value_type.to_pandas_dtype())
    width, tokens, position = (
        (sequence_length + 1) * dtype.itemsize,
        place(empty.schema, "tokens"),
        place(empty.schema, "position"),
    )
    shape = (-1, sequence_length + 1)
    while True:
        slab, frame = slots.take()
        n, at, where = frame[0], frame[tokens], frame[position]
        if (
            n > rows
            or frame[tokens + 1] != n * width
            or frame[position + 1] != n * 8
            or max(at + n * width, where + n * 8) > len(slab)
        ):
            raise ValueError(f"a record of {n} rows exceeds its slot")
        yield (
            slab[at : at + n * width].view(dtype).reshape(shape),
            partial(columns, empty, slab, frame),
            slab[where : where + n * 8].view(np.int64),
        )
        del slab


def check_schema(schema: pa.Schema, sequence_length: int) -> None:
    """Raises a ValueError if the columns of a stream differ from the request."""
    for name in ("position", "tokens"):
        if schema.get_field_index(name) < 0:
            raise ValueError(f"the stream has no column {name}")
    tokens, position = schema.field("tokens").type, schema.field("position").type
    if (
        not pa.types.is_fixed_size_list(tokens)
        or tokens.list_size != sequence_length + 1
        or tokens.value_type not in (pa.uint16(), pa.int32())
    ):
        raise ValueError(f"tokens are {tokens}")
    if position != pa.int64():
        raise ValueError(f"positions are {position}")


def check(places: np.ndarray, first: int, end: int) -> None:
    """Raises a ValueError if a record has other positions than requested.

    Skipped ones may be missing.
    """
    if places.tolist() == list(range(first, end)):
        return
    if len(places) and (places[0] < first or places[-1] >= end or (places[1:] <= places[:-1]).any()):
        raise ValueError(f"the record has positions {places[0]} to {places[-1]}, but [{first}, {end}) were requested")


class Patience:
    """Limits how long a broken connection is retried."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Restarts the time limit, after data has arrived."""
        self._since: float | None = None
        self._wait = 0.02

    def spend(self, why: Broken) -> None:
        """Waits before the next attempt, longer each time, or raises an Error at the time limit."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now + self._wait - self._since > self._seconds:
            raise Error(f"{why} (retried for {self._seconds:g} s)") from None
        time.sleep(self._wait)
        self._wait = min(2 * self._wait, 2)
