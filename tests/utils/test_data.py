"""Datasets, samplers and the loader."""

from __future__ import annotations

import itertools
import threading
import time
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

import tensorplay as tp
from tensorplay.utils import data
from tensorplay.utils.data import DataLoader, TensorDataset


class Squares(data.Dataset):
    """Sample i is (i, i * i)."""

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


class Stream(data.IterableDataset):
    """0 .. length - 1; each worker gives its share."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        info = data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.length, step))


def firsts(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


# --- datasets --------------------------------------------------------------------------------


def test_tensor_dataset() -> None:
    x, y = tp.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]), tp.tensor([7, 8, 9])
    dataset = TensorDataset(x, y)
    row, label = dataset[1]
    assert (len(dataset), row.tolist(), label.item()) == (3, [2.0, 3.0], 8)
    with pytest.raises(AssertionError, match="Size mismatch"):
        TensorDataset(x, tp.zeros(2))


def test_concat_and_chain() -> None:
    both = Squares(3) + Squares(2)
    assert [both[i][0] for i in range(-5, 5)] == [0, 1, 2, 0, 1] * 2 and len(both) == 5
    with pytest.raises(ValueError, match="should not exceed dataset length"):
        both[-6]
    chained = Stream(2) + Stream(1)
    assert list(chained) == [0, 1, 0] and len(chained) == 3
    with pytest.raises(AssertionError, match="empty iterable"):
        data.ConcatDataset([])


def test_random_split() -> None:
    parts = data.random_split(Squares(), [3, 7], generator=tp.Generator().manual_seed(1))
    again = data.random_split(Squares(), [3, 7], generator=tp.Generator().manual_seed(1))
    assert [len(part) for part in parts] == [3, 7]
    assert sorted(part[i][0] for part in parts for i in range(len(part))) == list(range(10))
    assert [part.indices for part in parts] == [part.indices for part in again]
    fractions = data.random_split(Squares(), [0.25, 0.25, 0.5])
    assert [len(part) for part in fractions] == [3, 2, 5]
    with pytest.raises(ValueError, match="Sum of input lengths"):
        data.random_split(Squares(), [1, 2])
    with pytest.warns(UserWarning, match="Length of split at index 2 is 0"):
        data.random_split(Squares(2), [0.5, 0.5, 0.0])


# --- samplers --------------------------------------------------------------------------------


def test_random_sampler() -> None:
    sampler = data.RandomSampler(range(8), generator=tp.Generator().manual_seed(3))
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(8)) and first != second
    assert len(list(data.RandomSampler(range(4), num_samples=10))) == 10
    drawn = list(data.RandomSampler(range(4), replacement=True, num_samples=50))
    assert len(drawn) == 50 and set(drawn) == {0, 1, 2, 3}
    tp.manual_seed(5)
    order = list(data.RandomSampler(range(8)))
    tp.manual_seed(5)
    assert list(data.RandomSampler(range(8))) == order
    with pytest.raises(ValueError, match="num_samples=0"):
        data.RandomSampler([])


def test_batch_sampler() -> None:
    batches = data.BatchSampler(data.SequentialSampler(range(7)), 3, False)
    assert list(batches) == [[0, 1, 2], [3, 4, 5], [6]] and len(batches) == 3
    whole = data.BatchSampler(range(7), 3, True)
    assert list(whole) == [[0, 1, 2], [3, 4, 5]] and len(whole) == 2
    with pytest.raises(ValueError, match="batch_size=0"):
        data.BatchSampler(range(7), 0, False)


def test_samplers_of_subsets_and_weights() -> None:
    assert sorted(data.SubsetRandomSampler([5, 7, 9])) == [5, 7, 9]
    weighted = data.WeightedRandomSampler([0.0, 1.0, 0.0], 4)
    assert list(weighted) == [1] * 4 and len(weighted) == 4


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("length", "ranks"), [(10, 3), (9, 3), (2, 5), (0, 2)])
def test_distributed_sampler(length: int, ranks: int, drop_last: bool) -> None:
    shares = []
    for rank in range(ranks):
        sampler = data.DistributedSampler(range(length), ranks, rank, drop_last=drop_last)
        sampler.set_epoch(4)
        shares.append(list(sampler))
        assert len(shares[-1]) == len(sampler)
    expected = length // ranks if drop_last else -(-length // ranks)
    assert {len(share) for share in shares} == {expected}
    drawn = [i for share in shares for i in share]
    if drop_last:
        assert len(set(drawn)) == len(drawn)
    else:
        assert set(drawn) == set(range(length))


def test_distributed_sampler_without_shuffle_is_as_in_torch() -> None:
    shares = [list(data.DistributedSampler(range(10), 4, r, shuffle=False)) for r in range(4)]
    assert shares == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]


def test_distributed_sampler_epochs() -> None:
    sampler = data.DistributedSampler(range(20), 2, 0, seed=1)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_ranks_come_from_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.distributed, "_provider", None)
    with pytest.raises(RuntimeError, match="init_process_group"):
        data.DistributedSampler(range(4))
    data.distributed.set_rank_provider(lambda: (4, 3))
    sampler = data.DistributedSampler(range(4), shuffle=False)
    assert (sampler.num_replicas, sampler.rank, list(sampler)) == (4, 3, [3])
    with pytest.raises(ValueError, match="Invalid rank 3"):
        data.DistributedSampler(range(4), num_replicas=2)


# --- collating -------------------------------------------------------------------------------


Pair = namedtuple("Pair", "a b")


def test_default_collate() -> None:
    found = data.default_collate(
        [
            {"t": tp.ones(2), "n": np.zeros(3, np.float32), "i": 1, "f": 0.5, "s": "a", "b": True},
            {"t": tp.ones(2), "n": np.ones(3, np.float32), "i": 2, "f": 1.5, "s": "b", "b": False},
        ]
    )
    assert found["t"].shape == (2, 2) and found["n"].tolist() == [[0.0] * 3, [1.0] * 3]
    assert (found["i"].dtype, found["f"].dtype) == (tp.int64, tp.float64)
    assert found["s"] == ["a", "b"] and found["b"].tolist() == [True, False]


def test_collating_sequences() -> None:
    assert [t.tolist() for t in data.default_collate([(1, 2), (3, 4)])] == [[1, 3], [2, 4]]
    pair = data.default_collate([Pair(1, 2.0), Pair(3, 4.0)])
    assert isinstance(pair, Pair) and pair.b.tolist() == [2.0, 4.0]
    assert data.default_collate([np.float64(1), np.float64(2)]).dtype is tp.float64
    with pytest.raises(RuntimeError, match="equal size"):
        data.default_collate([[1], [1, 2]])
    with pytest.raises(TypeError, match="must contain tensors"):
        data.default_collate([object()])


# --- the loader ------------------------------------------------------------------------------


def test_batches_in_order() -> None:
    loader = DataLoader(Squares(5), batch_size=2)
    assert firsts(loader) == [[0, 1], [2, 3], [4]] and len(loader) == 3
    assert firsts(DataLoader(Squares(5), batch_size=2, drop_last=True)) == [[0, 1], [2, 3]]
    assert [b[1].tolist() for b in loader] == [[0, 1], [4, 9], [16]]


def test_shuffle() -> None:
    loader = DataLoader(
        Squares(), batch_size=4, shuffle=True, generator=tp.Generator().manual_seed(2)
    )
    first, second = (list(itertools.chain(*firsts(loader))) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second


def test_samplers_of_the_user() -> None:
    assert firsts(DataLoader(Squares(), batch_size=2, sampler=[3, 1, 2])) == [[3, 1], [2]]
    assert firsts(DataLoader(Squares(), batch_sampler=[[3], [1, 2]])) == [[3], [1, 2]]
    sampler = data.DistributedSampler(Squares(), 2, 1, shuffle=False)
    assert firsts(DataLoader(Squares(), batch_size=3, sampler=sampler)) == [[1, 3, 5], [7, 9]]


def test_single_samples() -> None:
    assert list(DataLoader(Squares(2), batch_size=None)) == [[0, 0], [1, 1]]
    assert [t.tolist() for t in DataLoader([np.ones(2)], batch_size=None)] == [[1.0, 1.0]]


def test_a_collate_function_gets_the_samples() -> None:
    loader = DataLoader(TensorDataset(tp.arange(5)), batch_size=2, collate_fn=len)
    assert list(loader) == [2, 2, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_tensor_datasets_are_gathered_at_once(workers: int) -> None:
    x, y = tp.arange(12).reshape(6, 2), tp.arange(6)
    subset = data.Subset(TensorDataset(x, y), [5, 3, 1, 0])
    loader = DataLoader(subset, batch_size=3, num_workers=workers)
    found = [[t.tolist() for t in batch] for batch in loader]
    assert found == [[[[10, 11], [6, 7], [2, 3]], [5, 3, 1]], [[[0, 1]], [0]]]


class Doubled(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(t[index] * 2 for t in self.tensors)


def test_a_subclass_keeps_its_samples() -> None:
    assert firsts(DataLoader(Doubled(tp.arange(3)), batch_size=3)) == [[0, 2, 4]]


class Batched(Squares):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(-i, i) for i in indices]


def test_samples_are_taken_at_once_where_the_dataset_can() -> None:
    assert firsts(DataLoader(Batched(3), batch_size=3)) == [[0, -1, -2]]
    assert firsts(DataLoader(data.Subset(Batched(3), [2]), batch_size=3)) == [[-2]]


def test_iterable_datasets() -> None:
    loader = DataLoader(Stream(5), batch_size=2)
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3], [4]] and len(loader) == 3
    assert [b.tolist() for b in DataLoader(Stream(5), batch_size=2, drop_last=True)] == [
        [0, 1],
        [2, 3],
    ]
    assert list(DataLoader(Stream(3), batch_size=None)) == [0, 1, 2]


# --- workers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_keep_the_order(workers: int) -> None:
    loader = DataLoader(Squares(11), batch_size=2, num_workers=workers)
    assert firsts(loader) == firsts(DataLoader(Squares(11), batch_size=2))


def test_iterable_datasets_with_workers() -> None:
    loader = DataLoader(Stream(7), batch_size=2, num_workers=2)
    assert [b.tolist() for b in loader] == [[0, 2], [1, 3], [4, 6], [5]]


def test_worker_init_fn_and_info() -> None:
    seen: list[Any] = []

    def init(number: int) -> None:
        info = data.get_worker_info()
        assert info is not None
        seen.append((number, info.id, info.num_workers, threading.current_thread().name))

    list(DataLoader(Squares(8), num_workers=2, worker_init_fn=init))
    assert sorted(seen) == [(0, 0, 2, "DataLoader-0_0"), (1, 1, 2, "DataLoader-1_0")]
    assert data.get_worker_info() is None


class Failing(Squares):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise KeyError("sample 3 is broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_reaches_the_user(workers: int) -> None:
    loader = iter(DataLoader(Failing(), batch_size=2, num_workers=workers))
    assert next(loader)[0].tolist() == [0, 1]
    with pytest.raises(KeyError, match="sample 3 is broken"):
        next(loader)


class Slow(Squares):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.3)
        return super().__getitem__(index)


def test_timeout() -> None:
    with pytest.raises(RuntimeError, match=r"timed out after 0\.05 seconds"):
        next(iter(DataLoader(Slow(2), num_workers=1, timeout=0.05)))


def test_workers_draw_different_numbers() -> None:
    class Noise(Squares):
        def __getitem__(self, index: int) -> Any:
            return tp.rand(3)

    first, second = (b.tolist() for b in DataLoader(Noise(2), num_workers=2))
    assert first != second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "num_workers option should be non-negative"),
        ({"timeout": -1}, "timeout option should be non-negative"),
        ({"prefetch_factor": 2}, "prefetch_factor option could only"),
        ({"num_workers": 1, "prefetch_factor": -1}, "prefetch_factor option should be"),
        ({"persistent_workers": True}, "persistent_workers option needs"),
        ({"sampler": [0], "shuffle": True}, "sampler option is mutually exclusive"),
        ({"batch_sampler": [[0]], "batch_size": 2}, "batch_sampler option is mutually"),
        ({"batch_size": None, "drop_last": True}, "disables auto-batching"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataLoader(Squares(), **options)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": [0]}, {"batch_sampler": [[0]]}])
def test_options_that_iterable_datasets_refuse(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="DataLoader with IterableDataset"):
        DataLoader(Stream(3), **options)
