"""Order, completeness and state under torch's DataLoader and similar loaders."""

import itertools
import pickle

import numpy as np
import pytest

import mula

torch = pytest.importorskip("torch")
import mula.torch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital' is deprecated")


class Batches(torch.utils.data.IterableDataset):
    """A dataset around a stream, as users write it."""

    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        return iter(self.stream)


def places(batches) -> list[int]:
    return [p for batch in batches for p in batch.position.tolist()]


def check(batches, made, micro=None) -> None:
    """Checks that the batches are the plan's from its start, in order, with their tokens and
    states.
    """
    assert places(batches) == list(range(len(places(batches))))
    with mula.Stream(made.path, 120, micro_batch=micro) as data:
        for batch, expected in zip(batches, data):
            assert (
                torch.equal(batch.tokens.long(), expected.tokens.long())
                and batch.state == expected.state
                and batch.last == expected.last
            )
            assert torch.equal(batch.cu_seqlens(), expected.cu_seqlens())


@pytest.mark.parametrize(
    ("workers", "context", "micro"),
    [(0, None, None), (1, "fork", None), (2, "fork", None), (3, "fork", 40), (2, "fork", 60), (2, "spawn", 40)],
)
def test_workers_share_the_batches_out(workers, context, micro, made):
    """Each batch is returned once, in the plan's order. 25 does not divide by the workers."""
    with mula.Stream(made.path, 120, micro_batch=micro) as data:
        loader = torch.utils.data.DataLoader(
            Batches(data), batch_size=None, num_workers=workers, multiprocessing_context=context
        )
        got = list(loader)
        assert len(places(got)) == made.samples and len(got) == len(data)
        check(got, made, micro)
        if workers == 0:
            assert data.state_dict() == got[-1].state
        else:
            with pytest.raises(mula.Error, match="worker processes read copies of this stream"):
                data.state_dict()
        data.load_state_dict(got[6].state)
        assert data.state_dict() == got[6].state
        again = next(iter(loader))
        assert again.position[0] == got[6].state["position"]


def test_workers_that_begin_anywhere(made):
    with mula.Stream(made.path, 120, position=840, end=1800, micro_batch=60, rank=1, world=2) as data:
        expected = [b.position.tolist() for b in data]
        data.load_state_dict({"plan": data.fingerprint, "position": 840})
        got = list(torch.utils.data.DataLoader(mula.torch.Dataset(data), batch_size=None, num_workers=3))
        assert [b.position.tolist() for b in got] == expected and expected[0][0] == 900


def test_workers_can_be_left_alone(made):
    """With by_worker=False a stream in a worker returns all batches. The user divides them."""
    with mula.Stream(made.path, 120, by_worker=False, end=240) as data:
        got = list(torch.utils.data.DataLoader(Batches(data), batch_size=None, num_workers=2))
        assert [b.first for b in got] == [0, 0, 120, 120]


def test_workers_write_no_log(made, tmp_path):
    with mula.Stream(made.path, 120, log=tmp_path) as data:
        with pytest.raises(mula.Error, match="use mula.torch.Loader"):
            next(iter(torch.utils.data.DataLoader(Batches(data), batch_size=None, num_workers=2)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_counts_what_was_given(workers, made, tmp_path):
    """The state and the log do not count read-ahead.

    A second loop continues, and the state loads with other numbers of workers and micro-batches.
    """
    loader = mula.torch.Loader(mula.Stream(made.path, 120, micro_batch=40, log=tmp_path), num_workers=workers)
    assert len(loader) == 75 and loader.state_dict()["position"] == 0
    got = []
    for stop in (10, 3, 8):  # 21 batches of 40: 7 steps
        for batch in itertools.islice(loader, stop):
            got.append(batch)
            assert loader.state_dict() == batch.state
    check(got, made, 40)
    assert places(got) == list(range(840)) and loader.state_dict()["position"] == 840
    loader.close()
    assert mula.verify(made.path, tmp_path) == 840
    with mula.torch.Loader(mula.Stream(made.path, 60, log=tmp_path), num_workers=2 - workers) as other:
        other.load_state_dict(loader.state_dict())
        got += list(other)
        assert places(got) == list(range(made.samples)) and len(other) == 50
        with pytest.warns(UserWarning, match="the loader is at its end, position 3000"):
            assert list(other) == []
        other.load_state_dict(loader.state_dict())
        assert next(iter(other)).first == 840
    assert mula.verify(made.path, tmp_path) == 900


def test_a_loop_that_looks_ahead_says_what_it_consumed(made):
    """Some frameworks fetch a batch before they train on the previous one, to detect the last."""
    with mula.torch.Loader(mula.Stream(made.path, 120), num_workers=2) as loader:
        batches = iter(loader)
        ahead = next(batches)
        for _ in range(5):
            batch, ahead = ahead, next(batches)
            loader.consumed()
            assert loader.state_dict() == batch.state != ahead.state
        with pytest.raises(mula.Error, match="3 more batches were consumed than received"):
            loader.consumed(4)
        loader.load_state_dict(batch.state)
        assert next(iter(loader)).first == ahead.first and loader.state_dict() == ahead.state


def shift(batch):
    return {"inputs": batch.tokens[:, :-1], "first": np.int64(batch.first)}


def test_a_transform_runs_in_the_workers(made, tmp_path):
    with mula.torch.Loader(mula.Stream(made.path, 600, log=tmp_path), num_workers=2, transform=shift) as loader:
        got = list(loader)
    assert (
        [g["first"] for g in got] == [0, 600, 1200, 1800, 2400]
        and got[0]["inputs"].shape == (600, made.length)
        and isinstance(got[0]["first"], np.int64)
    )
    assert mula.verify(made.path, tmp_path) == made.samples


def test_a_loader_leaves_random_numbers_alone(made):
    with mula.torch.Loader(mula.Stream(made.path, 600), num_workers=1) as loader:
        before = torch.get_rng_state()
        next(iter(loader))
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_dataloader_goes_on_after_any_batch(workers, made):
    """The state also works in the middle of a step: a step has 3 micro-batches."""
    data = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        return data.StatefulDataLoader(
            mula.torch.Dataset(mula.Stream(made.path, 120, micro_batch=40, end=960)),
            batch_size=None,
            num_workers=workers,
        )

    first = loader()
    states, got = [], []
    for batch in first:
        got.append(batch)
        states.append(pickle.dumps(first.state_dict()))
    check(got, made, 40)
    assert len(got) == 24
    for k in (0, 1, 4, 11):
        second = loader()
        second.load_state_dict(pickle.loads(states[k]))
        assert places(second) == list(range(40 * (k + 1), 960))


def test_a_state_of_workers_wants_as_many(made):
    with mula.Stream(made.path, 120, micro_batch=40) as data:
        state = {"plan": data.fingerprint, "position": 120}
        with pytest.raises(mula.Error, match="worker 0 of 2 of a DataLoader; load it with the same"):
            data.load_state_dict(state | {"record": 1, "records": 3, "worker": 0, "workers": 2})
        with pytest.raises(mula.Error, match="batch 1 of 2 of a step, and a step of this stream has 3"):
            data.load_state_dict(state | {"record": 1, "records": 2})
        data.load_state_dict(state | {"record": 1, "records": 3})
        assert next(data).position[0] == 160


def test_accelerate_cannot_deal_one_ranks_part_out_to_all(made):
    """Accelerate's dispatcher would read only rank 0's part. prepare keeps a mula.torch.Loader."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    with mula.Stream(made.path, 120, 0, 2) as data:
        loader = mula.torch.Loader(data)
        assert accelerator.prepare(loader) is loader
        for workers, context in ((0, None), (1, "fork"), (1, "spawn")):
            prepared = accelerator.prepare(
                torch.utils.data.DataLoader(
                    mula.torch.Dataset(data, shift),
                    batch_size=None,
                    num_workers=workers,
                    multiprocessing_context=context,
                )
            )
            with pytest.raises(mula.Error, match="accelerator.prepare made this DataLoader read for all 2 processes"):
                next(iter(prepared))
        assert len(next(iter(loader))) == 60


def test_trainer_that_would_skip_batches_is_told_how_to_resume(made):
    with mula.torch.Loader(mula.Stream(made.path, 120)) as loader:
        assert not hasattr(loader, "dataset")
        with pytest.raises(AttributeError, match="set ignore_data_skip=True"):
            loader.dataset
