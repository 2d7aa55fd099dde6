"""A record of a stream, with its columns as arrays."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from mula.errors import Error

Array = TypeVar("Array")  # numpy.ndarray or torch.Tensor, set by the stream's `arrays`


class Batch(Generic[Array]):
    """Samples of one step: all samples of this rank, or `micro_batch` of them.

    Arrays are torch tensors or numpy arrays, as the stream's `arrays` selects. They alias the
    received memory, which lives as long as any of them. A batch can be pickled. The copy has its
    own memory.
    """

    first: int  #: first position of the step, over all ranks
    step: int  #: number of the step: first // batch_size
    last: bool  #: whether this is the rank's last batch of the step
    sequence_length: int  #: L
    state: dict[str, Any]  #: the stream's state after this batch: see Stream.state_dict
    #: [rows, L+1], uint16 or int32: inputs are [:, :-1], targets [:, 1:]. An embedding needs
    #: `tokens.long()`.
    tokens: Array

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
        # Tensors are pickled as tensors, which torch's worker processes pass through shared memory.
        # The tokens are not sent twice.
        names = [n for n in self.record.schema.names if n != "tokens"]
        schema = self.record.schema.serialize().to_pybytes()  # pickle loses that items are not null
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
        """The columns as an Arrow record batch."""
        return self._record()

    def _give(self, array: np.ndarray[Any, Any]) -> Any:
        return array if self._torch is None else self._torch.from_numpy(array)

    def _column(self, name: str) -> pa.Array:
        i = self.record.schema.get_field_index(name)
        if i < 0:
            raise Error(f"the stream has no column {name}; add it to columns=")
        return self.record.column(i)

    @cached_property
    def position(self) -> Array:
        """[rows] int64: positions in the plan, ascending."""
        return self._give(numbers(self._column("position")).copy())

    @cached_property
    def source(self) -> Array:
        """[rows] int32: source numbers, which index `source_names`."""
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
        """[rows] int64: window numbers within the source."""
        return self._give(numbers(self._column("window")).copy())

    @cached_property
    def shard(self) -> Array:
        """[rows] int32: shard numbers within the source."""
        return self._give(numbers(self._column("shard")).copy())

    @cached_property
    def offset(self) -> Array:
        """[rows] int64: first token of each window, as an index into its shard."""
        return self._give(numbers(self._column("offset")).copy())

    @cached_property
    def document_starts(self) -> list[np.ndarray]:
        """For each row, a numpy array of int32: indices in its window at which documents start."""
        column = self._column("document_starts")
        values, offsets = numbers(column.values), numbers(column.offsets)
        return [values[a:b] for a, b in zip(offsets[:-1], offsets[1:])]

    @property
    def packed(self) -> bool:
        """Whether rows are complete documents and padding instead of windows.

        docs/formats/packing.md describes packed rows.
        """
        return self.record.schema.get_field_index("lengths") >= 0

    @cached_property
    def lengths(self) -> Array:
        """[rows] int32, only in packed plans: tokens of the row before its padding."""
        return self._give(numbers(self._column("lengths")).copy())

    def _starts(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and index in the row of each document start: int64."""
        column = self._column("document_starts")
        offsets = numbers(column.offsets).astype(np.int64)
        places = numbers(column.values).astype(np.int64)[offsets[0] : offsets[-1]]
        return np.repeat(np.arange(len(self)), np.diff(offsets)), places

    def _bounds(self) -> np.ndarray:
        """Starts of rows, documents and padding in the concatenated inputs, and their end: int64.
        """
        length = self.sequence_length
        rows, places = self._starts()
        # 0 is the start of the row. At L the document's first token is only a target.
        inside = (places > 0) & (places < length)
        bounds = [rows[inside] * length + places[inside], np.arange(len(self) + 1) * length]
        if self.packed:
            ends = numbers(self._column("lengths")).astype(np.int64)
            bounds.append(np.flatnonzero(ends < length) * length + ends[ends < length])
        return np.sort(np.concatenate(bounds))

    def cu_seqlens(self) -> Array:
        """Cumulative sequence lengths: int32, from 0 to rows · L, over the concatenated inputs.

        A sequence is the part of one document in one row. Padding is a separate sequence.
        flash_attn_varlen_func and Transformer Engine use them to keep attention within documents.
        """
        return self._give(self._bounds().astype(np.int32))

    def position_ids(self) -> Array:
        """[rows, L] int64: index of each input in its sequence (see cu_seqlens), from 0."""
        bounds = self._bounds()
        ids = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
        return self._give(ids.reshape(len(self), self.sequence_length))

    def loss_mask(self) -> Array:
        """[rows, L] bool: whether the target is in the document of its input and is not padding."""
        mask = np.ones((len(self), self.sequence_length), bool)
        rows, places = self._starts()
        mask[rows[places > 0], places[places > 0] - 1] = False
        if self.packed:
            mask &= np.arange(1, self.sequence_length + 1) < numbers(self._column("lengths"))[:, None]
        return self._give(mask)


def joined(serialized: bytes, columns: dict[str, pa.Array], tokens: np.ndarray[Any, Any]) -> pa.RecordBatch:
    """Returns the record of a pickled batch, from its tokens and its other columns."""
    schema = pa.ipc.read_schema(pa.py_buffer(serialized))
    kind = schema.field("tokens").type
    values = pa.array(np.ascontiguousarray(tokens).reshape(-1), kind.value_type)
    columns = columns | {"tokens": pa.Array.from_buffers(kind, len(tokens), [None], children=[values])}
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def numbers(array: pa.Array) -> np.ndarray:
    """Returns the values of an Arrow array without nulls as a view of its memory.

    Arrow's to_numpy imports pandas if it is installed, which takes a second.
    """
    dtype, buffer = np.dtype(array.type.to_pandas_dtype()), array.buffers()[1]
    if not len(array) or buffer is None:
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


def writable(values: pa.Array, slab: np.ndarray | None) -> np.ndarray:
    """Returns the values of an Arrow array as a view of the slab that received them.

    Arrow's own arrays are read-only, and torch warns about read-only arrays.
    """
    dtype = np.dtype(values.type.to_pandas_dtype())
    if slab is not None and len(values):
        buffer = values.buffers()[1]
        start = buffer.address - slab.ctypes.data + values.offset * dtype.itemsize
        end = start + len(values) * dtype.itemsize
        if start >= 0 and end <= slab.nbytes:
            return slab[start:end].view(dtype)
    return numbers(values).copy()  # a small message, which is received without a slab
