"""A dataset for torch's DataLoader, and a loader whose state counts only delivered batches.

docs/guides/python-trainers.md has recipes for the frameworks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch.utils.data

from mula.batch import Batch
from mula.errors import Error
from mula.fingerprints import Log, hashed
from mula.stream import Stream


class Dataset(torch.utils.data.IterableDataset[Any]):
    """The batches of a stream for a DataLoader with batch_size=None, or a StatefulDataLoader.

    The number of workers is free. Workers divide the batches so that the DataLoader returns them in
    the plan's order. `transform` converts each Batch to the item that the loader returns. The state
    belongs to the process that reads it: torchdata's StatefulDataLoader collects its workers'
    states.
    """

    def __init__(self, stream: Stream[Any], transform: Callable[[Batch[Any]], Any] | None = None):
        self.stream, self.transform = stream, transform

    def __iter__(self) -> Iterator[Any]:
        for batch in self.stream:
            yield batch if self.transform is None else self.transform(batch)

    def __len__(self) -> int:
        return len(self.stream)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the stream.

        A state within a step resumes at the next micro-batch. It needs the same ranks and
        micro-batches.
        """
        state, stream = self.stream.state_dict(), self.stream
        return state if stream._given == 0 else state | {"record": stream._given, "records": stream._records_of_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a state of a Dataset, a Stream or a Loader."""
        self.stream.load_state_dict(state)


class Feed(Dataset):
    """The dataset of a Loader: pairs of the samples' hashes, empty without a log, and the item."""

    logs = False

    def __iter__(self) -> Iterator[tuple[bytes, Any]]:
        while True:
            try:
                batch = next(self.stream)
            except StopIteration:
                return
            yield (
                hashed(batch._tokens) if self.logs else b"",
                batch if self.transform is None else self.transform(batch),
            )


def same(item: Any) -> Any:
    return item


class Loader:
    """The batches of a stream for a training loop.

    `num_workers` processes read the batches, or this process if `num_workers` is 0. `state_dict` is
    the state after the last batch that the loop received, however far the workers have read ahead.
    If a loop fetches the next batch before it has finished the current one, it must call `consumed`
    after each: the state then counts only consumed batches. A second loop continues where the first
    stopped. `len` is the number of batches of the entire stream, and does not change. Lightning,
    Accelerate and HF Trainer use a loader of this class unchanged.

    The loader owns the stream and writes its log, for the batches that the loop receives. The other
    arguments have the same names and meanings as in torch's DataLoader.
    """

    def __init__(
        self,
        stream: Stream[Any],
        num_workers: int = 0,
        *,
        transform: Callable[[Batch[Any]], Any] | None = None,
        prefetch_factor: int | None = None,
        multiprocessing_context: Any = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
    ):
        self.stream = stream
        self._feed = Feed(stream, transform)
        self._folder, stream._folder = stream._folder, None
        self._feed.logs = self._folder is not None
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "multiprocessing_context": multiprocessing_context,
            "pin_memory": pin_memory,
            "worker_init_fn": worker_init_fn,
        }
        self._log: Log | None = None
        self._loop: Generator[Any, None, None] | None = None
        self._move()

    def _move(self) -> None:
        """Moves to the stream's position."""
        self._end_loop()
        self._end_log()
        # records of the plan before the next one to return
        self._given = self._record(self.stream._position) + self.stream._given
        self._started = self._given
        self._consumed: int | None = None

    def _record(self, position: int) -> int:
        return -(-position // self.stream.batch_size) * self.stream._records_of_step

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[Any]:
        self._end_loop()
        if self._given >= self._record(self.stream.end):
            warnings.warn(
                f"the loader is at its end, position {self.stream.end}, and has no more batches; load an earlier state "
                "to read again",
                stacklevel=2,
            )
        self._loop = self._batches()
        return self._loop

    def _batches(self) -> Generator[Any, None, None]:
        stream, feed = self.stream, self._feed
        step, record = divmod(self._given, stream._records_of_step)
        stream._move(min(step * stream.batch_size, stream.end), record)
        # The workers' seeds come from a separate generator, so that reading does not change torch's
        # random numbers.
        loader = torch.utils.data.DataLoader(
            feed, batch_size=None, generator=torch.Generator(), collate_fn=same, **self._options
        )
        for hashes, item in loader:
            first = self._given // stream._records_of_step * stream.batch_size
            if self._folder is not None:
                self._write(hashes, first)
            self._given += 1
            yield item

    def _write(self, hashes: bytes, first: int) -> None:
        stream = self.stream
        assert self._folder is not None
        if self._log is None:
            self._log = Log(
                self._folder,
                stream.fingerprint,
                stream.sequence_length,
                stream.batch_size,
                stream.rank,
                stream.world,
                first,
            )
        self._log.add(hashes)
        if (self._given + 1) % stream._records_of_step == 0:
            self._log.end_step(first)

    def consumed(self, batches: int = 1) -> None:
        """Reports that the loop has finished `batches` more batches.

        From then on the state counts consumed batches instead of received batches.
        """
        self._consumed = (self._started if self._consumed is None else self._consumed) + batches
        if self._consumed > self._given:
            raise Error(f"{self._consumed - self._given} more batches were consumed than received")

    def state_dict(self) -> dict[str, Any]:
        """Returns the plan's fingerprint and the position after the last complete step.

        A step is complete when all its batches were received, or consumed if `consumed` is used.
        The state is the same on every rank.
        """
        step = (self._given if self._consumed is None else self._consumed) // self.stream._records_of_step
        return {"plan": self.stream.fingerprint, "position": min(step * self.stream.batch_size, self.stream.end)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a state of a loader, a stream or a batch.

        The numbers of ranks, workers and micro-batches may change.
        """
        self._end_loop()
        self.stream.load_state_dict(state)
        self._move()

    @property
    def dataset(self) -> Any:
        # Trainer's skip_first_batches would read the dataset from the start. Accelerate and
        # Lightning check whether the attribute exists.
        raise AttributeError(
            "a mula.torch.Loader has no dataset from which batches can be skipped; in HF Trainer set "
            "ignore_data_skip=True, and load the loader's state (docs/guides/python.md)"
        )

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_loop(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _end_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def close(self) -> None:
        """Stops the workers and closes the log and the stream."""
        self._end_loop()
        self._end_log()
        self.stream.close()
