"""A dataset for torch's DataLoader, and a loader that counts what the training was given. docs/guides/python-trainers.md has recipes for the frameworks."""

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
    """The batches of a stream for a DataLoader with batch_size=None, or for torchdata's StatefulDataLoader, with any number of workers.

    Workers share the batches out so that the DataLoader gives them in the order of the plan. `transform` converts each Batch to the item that is given.
    The state is that of the process in which it is asked for: StatefulDataLoader collects those of its workers.
    """

    def __init__(self, stream: Stream[Any], transform: Callable[[Batch[Any]], Any] | None = None):
        self.stream, self.transform = stream, transform

    def __iter__(self) -> Iterator[Any]:
        for batch in self.stream:
            yield batch if self.transform is None else self.transform(batch)

    def __len__(self) -> int:
        return len(self.stream)

    def state_dict(self) -> dict[str, Any]:
        """The state of the stream. Within a step it resumes at the next micro-batch, with the same ranks and micro-batches."""
        state, stream = self.stream.state_dict(), self.stream
        return state if stream._given == 0 else state | {"record": stream._given, "records": stream._records_of_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a state of this class, of a Stream or of a Loader."""
        self.stream.load_state_dict(state)


class Feed(Dataset):
    """What a Loader reads: the hashes of the batch's samples, if they are logged, and the item."""

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
    """The batches of a stream for a training loop, read by `num_workers` processes, or by this one if there are none.

    `state_dict` is the state after the last batch that was given, whatever the workers have read ahead. A loop that fetches the next batch before it has
    finished the current one calls `consumed` after each: from then on the state is that of the consumed batches. A second loop continues where the first stopped.
    `len` is the number of batches of the whole stream, and does not change. Lightning, Accelerate and HF Trainer leave a loader of this class as it is.

    The stream belongs to the loader: its log is written here, for the batches that are given. The other arguments are those of torch's DataLoader.
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
        """Begins where the stream is."""
        self._end_loop()
        self._end_log()
        self._given = (
            self._record(self.stream._position) + self.stream._given
        )  # records of the plan before the next one to be given
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
                f"the loader is at its end, position {self.stream.end}, and gives nothing more; load an earlier state to read again",
                stacklevel=2,
            )
        self._loop = self._batches()
        return self._loop

    def _batches(self) -> Generator[Any, None, None]:
        stream, feed = self.stream, self._feed
        step, record = divmod(self._given, stream._records_of_step)
        stream._move(min(step * stream.batch_size, stream.end), record)
        # Workers get their seeds from a generator of their own, so that reading does not change torch's random numbers.
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
        """Says that the loop has finished so many more batches: the state is then that of the consumed batches, and not of those that were given."""
        self._consumed = (self._started if self._consumed is None else self._consumed) + batches
        if self._consumed > self._given:
            raise Error(f"{self._consumed - self._given} batches more were consumed than given")

    def state_dict(self) -> dict[str, Any]:
        """The fingerprint of the plan, and the position after the last step of which all batches were given, or consumed: the same on every rank."""
        step = (self._given if self._consumed is None else self._consumed) // self.stream._records_of_step
        return {"plan": self.stream.fingerprint, "position": min(step * self.stream.batch_size, self.stream.end)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a state of a loader, a stream or a batch, of any number of ranks, workers and micro-batches."""
        self._end_loop()
        self.stream.load_state_dict(state)
        self._move()

    @property
    def dataset(self) -> Any:
        # Trainer's skip_first_batches would read the dataset from the start; Accelerate and Lightning ask whether there is one.
        raise AttributeError(
            "a mula.torch.Loader has no dataset to skip batches of: in HF Trainer set ignore_data_skip=True, and load the loader's state (docs/guides/python.md)"
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
        """Ends the workers, the log and the stream."""
        self._end_loop()
        self._end_log()
        self.stream.close()
