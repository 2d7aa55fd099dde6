"""A record of a stream, with its columns as arrays."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from mula.errors import Error

Array = TypeVar("Array")  # numpy.ndarray or torch.Tensor, as the stream's `arrays` says


class Batch(Generic[Array]):
    """Samples of one step: this rank's share of it, or `micro_batch` rows of that.

    Arrays are torch tensors if the stream gives torch, else numpy arrays; they share the memory that was received, which is kept as long as one of them is.
    A batch can be pickled. The copy has memory of its own.
    """

    first: int  #: position at which the step begins
    step: int  #: number of the step: first // batch_size
    last: bool  #: whether the step is complete with this record
    sequence_length: int  #: L
    state: dict[str, Any]  #: the state of a stream that has given the batches up to this one: see Stream.state_dict
    tokens: Array  #: [rows, L+1], uint16 or int32: inputs are [:, :-1], targets [:, 1:]; `.long()` makes the ids that an embedding wants

    def __init__(
        self,
        tokens: np.ndarray[Any, Any],
        record: Callable[[], pa.RecordBatch],
        torch: Any,
        first: int,
        step: int,
        last: bool,
        sequence_length: int,
        state: dict[str, Any],
    ):
        self.first, self.step, self.last, self.sequence_length, self.state = first, step, last, sequence_length, state
        self._torch, self._tokens, self._record = torch, tokens, record
        self.tokens = self._give(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def __repr__(self) -> str:
        return f"mula.Batch(step={self.step}, first={self.first}, rows={len(self)}, last={self.last})"

    def __getstate__(self) -> dict[str, Any]:
        # Tensors are pickled as tensors, which torch's worker processes pass through shared memory. The tokens are not sent twice.
        names = [n for n in self.record.schema.names if n != "tokens"]
        schema = self.record.schema.serialize().to_pybytes()  # pickle would lose that list items are not null
        return {
            "members": (self.first, self.step, self.last, self.sequence_length, self.state),
            "tokens": self.tokens,
            "schema": schema,
            "columns": {n: self.record.column(n) for n in names},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.first, self.step, self.last, self.sequence_length, self.state = state["members"]
        tokens = state["tokens"]
        self.tokens = tokens
        self._torch = None if isinstance(tokens, np.ndarray) else importlib.import_module("torch")
        self._tokens = tokens if self._torch is None else tokens.numpy()
        self._record = partial(joined, state["schema"], state["columns"], self._tokens)

    @cached_property
    def record(self) -> pa.RecordBatch:
        """The columns as Arrow has them."""
        return self._record()

    def _give(self, array: np.ndarray[Any, Any]) -> Any:
        return array if self._torch is None else self._torch.from_numpy(array)

    def _column(self, name: str) -> pa.Array:
        i = self.record.schema.get_field_index(name)
        if i < 0:
            raise Error(f"the stream has no column {name}: name it in columns=")
        return self.record.column(i)

    @cached_property
    def position(self) -> Array:
        """[rows] int64: places in the order, ascending."""
        return self._give(numbers(self._column("position")).copy())

    @cached_property
    def source(self) -> Array:
        """[rows] int32: numbers of the sources; `source_names` has their names."""
        return self._give(numbers(self._column("source").indices).copy())

    @cached_property
    def source_names(self) -> list[str]:
        """Names of all sources of the plan, by number."""
        return self._column("source").dictionary.to_pylist()

    @cached_property
    def epoch(self) -> Array:
        """[rows] int32: epochs of the sources, from 0."""
        return self._give(numbers(self._column("epoch")).copy())

    @cached_property
    def window(self) -> Array:
        """[rows] int64: numbers among the windows of the source."""
        return self._give(numbers(self._column("window")).copy())

    @cached_property
    def shard(self) -> Array:
        """[rows] int32: numbers of the shards in their sources."""
        return self._give(numbers(self._column("shard")).copy())

    @cached_property
    def offset(self) -> Array:
        """[rows] int64: tokens of the shards at which the windows begin."""
        return self._give(numbers(self._column("offset")).copy())

    @cached_property
    def document_starts(self) -> list[np.ndarray]:
        """For each row, the places in its window at which documents begin: numpy arrays of int32."""
        column = self._column("document_starts")
        values, offsets = numbers(column.values), numbers(column.offsets)
        return [values[a:b] for a, b in zip(offsets[:-1], offsets[1:])]

    @property
    def packed(self) -> bool:
        """Whether rows are whole documents and padding (docs/formats/packing.md) instead of windows."""
        return self.record.schema.get_field_index("lengths") >= 0

    @cached_property
    def lengths(self) -> Array:
        """[rows] int32, of packed plans: tokens of the row before its padding."""
        return self._give(numbers(self._column("lengths")).copy())

    def _starts(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and place in it of all beginnings of documents: int64."""
        column = self._column("document_starts")
        offsets = numbers(column.offsets).astype(np.int64)
        places = numbers(column.values).astype(np.int64)[offsets[0] : offsets[-1]]
        return np.repeat(np.arange(len(self)), np.diff(offsets)), places

    def _bounds(self) -> np.ndarray:
        """Places in the inputs, laid end to end, at which a row, a document or padding begins, and their end: int64."""
        length = self.sequence_length
        rows, places = self._starts()
        inside = (places > 0) & (
            places < length
        )  # 0 is the row's own beginning, L a document of which only a target is seen
        bounds = [rows[inside] * length + places[inside], np.arange(len(self) + 1) * length]
        if self.packed:
            ends = numbers(self._column("lengths")).astype(np.int64)
            bounds.append(np.flatnonzero(ends < length) * length + ends[ends < length])
        return np.sort(np.concatenate(bounds))

    def cu_seqlens(self) -> Array:
        """int32: 0, and the ends of the stretches of one document in one row, over the inputs laid end to end ([rows · L]): what attention that must
        not cross documents takes (flash_attn_varlen_func, Transformer Engine). Padding is a stretch of its own."""
        return self._give(self._bounds().astype(np.int32))

    def position_ids(self) -> Array:
        """[rows, L] int64: places of the inputs in their stretch of one document in one row, from 0."""
        bounds = self._bounds()
        ids = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
        return self._give(ids.reshape(len(self), self.sequence_length))

    def loss_mask(self) -> Array:
        """[rows, L] bool: whether the target stands in the same document as its input, and is no padding."""
        mask = np.ones((len(self), self.sequence_length), bool)
        rows, places = self._starts()
        mask[rows[places > 0], places[places > 0] - 1] = False
        if self.packed:
            mask &= np.arange(1, self.sequence_length + 1) < numbers(self._column("lengths"))[:, None]
        return self._give(mask)


def joined(serialized: bytes, columns: dict[str, pa.Array], tokens: np.ndarray[Any, Any]) -> pa.RecordBatch:
    """Returns the record of a pickled batch: its other columns and its tokens."""
    schema = pa.ipc.read_schema(pa.py_buffer(serialized))
    kind = schema.field("tokens").type
    values = pa.array(np.ascontiguousarray(tokens).reshape(-1), kind.value_type)
    columns = columns | {"tokens": pa.Array.from_buffers(kind, len(tokens), [None], children=[values])}
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def numbers(array: pa.Array) -> np.ndarray:
    """The numbers of an Arrow array, of which none is null, in its memory. Arrow's own to_numpy imports pandas first, where that is installed, which takes a second."""
    dtype, buffer = np.dtype(array.type.to_pandas_dtype()), array.buffers()[1]
    if not len(array) or buffer is None:
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


def writable(values: pa.Array, slab: np.ndarray | None) -> np.ndarray:
    """The numbers of an Arrow array, as a part of the slab that they were received into: an array that torch takes without a word, which one of Arrow's,
    not being writable, is not."""
    dtype = np.dtype(values.type.to_pandas_dtype())
    if slab is not None and len(values):
        buffer = values.buffers()[1]
        start = buffer.address - slab.ctypes.data + values.offset * dtype.itemsize
        end = start + len(values) * dtype.itemsize
        if start >= 0 and end <= slab.nbytes:
            return slab[start:end].view(dtype)
    return numbers(values).copy()  # it came in a small message
