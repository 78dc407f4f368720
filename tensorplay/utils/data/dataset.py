"""Datasets, as ``torch.utils.data.dataset``."""

from __future__ import annotations

import bisect
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from ..._ops.creation import tensor
from ..._ops.random import Generator
from ..._tensor import Tensor
from .sampler import shuffled

T_co = TypeVar("T_co", covariant=True)


class Dataset(Generic[T_co]):
    """Samples by index: a subclass implements ``__getitem__`` and, usually, ``__len__``.

    ``__getitems__(indices)``, where there is one, gives a list of samples at once.
    """

    def __getitem__(self, index: Any) -> T_co:
        raise NotImplementedError("Subclasses of Dataset should implement __getitem__.")

    def __add__(self, other: Dataset[Any]) -> ConcatDataset:
        return ConcatDataset([self, other])


class IterableDataset(Dataset[T_co]):
    """Samples in the order in which ``__iter__`` gives them."""

    def __iter__(self) -> Iterator[T_co]:
        raise NotImplementedError("Subclasses of IterableDataset should implement __iter__.")

    def __add__(self, other: Dataset[Any]) -> Any:
        return ChainDataset([self, other])


class TensorDataset(Dataset[tuple[Tensor, ...]]):
    """Sample i is the tuple of each tensor's row i; all tensors have equally many rows."""

    def __init__(self, *tensors: Tensor) -> None:
        if any(len(t) != len(tensors[0]) for t in tensors):
            raise AssertionError("Size mismatch between tensors")
        self.tensors: tuple[Any, ...] = tensors

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        return tuple(t[index] for t in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def collated(self, indices: Sequence[int]) -> list[Tensor] | None:
        """What ``default_collate`` makes of these samples, in one op for each tensor.

        None where a subclass has samples of its own.
        """
        if type(self).__getitem__ is not TensorDataset.__getitem__:
            return None
        index = tensor(list(indices))
        return [t[index] for t in self.tensors]


class ConcatDataset(Dataset[T_co]):
    """The samples of several datasets, one dataset after the other."""

    def __init__(self, datasets: Iterable[Dataset[Any]]) -> None:
        self.datasets = list(datasets)
        if not self.datasets:
            raise AssertionError("datasets should not be an empty iterable")
        if any(isinstance(d, IterableDataset) for d in self.datasets):
            raise AssertionError("ConcatDataset does not support IterableDataset")
        self.cumulative_sizes = list(itertools.accumulate(map(_length, self.datasets)))

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, index: int) -> T_co:
        if index < 0:
            if -index > len(self):
                raise ValueError("absolute value of index should not exceed dataset length")
            index += len(self)
        which = bisect.bisect_right(self.cumulative_sizes, index)
        before = self.cumulative_sizes[which - 1] if which else 0
        return self.datasets[which][index - before]


class ChainDataset(IterableDataset[T_co]):
    """The samples of several iterable datasets, one dataset after the other."""

    def __init__(self, datasets: Iterable[Dataset[Any]]) -> None:
        self.datasets = list(datasets)
        if not all(isinstance(d, IterableDataset) for d in self.datasets):
            raise AssertionError("ChainDataset only supports IterableDataset")

    def __iter__(self) -> Iterator[T_co]:
        return itertools.chain.from_iterable(self.datasets)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return sum(map(_length, self.datasets))


class Subset(Dataset[T_co]):
    """The samples of ``dataset`` at ``indices``."""

    def __init__(self, dataset: Dataset[T_co], indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __getitem__(self, index: int) -> T_co:
        return self.dataset[self.indices[index]]

    def __getitems__(self, indices: list[int]) -> list[T_co]:
        if type(self).__getitem__ is not Subset.__getitem__:
            return [self[i] for i in indices]
        return fetch_samples(self.dataset, [self.indices[i] for i in indices])

    def __len__(self) -> int:
        return len(self.indices)

    def collated(self, indices: Sequence[int]) -> Any:
        """See ``TensorDataset.collated``; None where the dataset has no such method."""
        inner = getattr(self.dataset, "collated", None)
        if inner is None or type(self).__getitem__ is not Subset.__getitem__:
            return None
        return inner([self.indices[i] for i in indices])


def fetch_samples(dataset: Any, indices: list[Any]) -> list[Any]:
    """The samples at ``indices``, at once where the dataset can."""
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(indices)  # type: ignore[no-any-return]
    return [dataset[i] for i in indices]


def random_split(
    dataset: Dataset[T_co],
    lengths: Sequence[int | float],
    generator: Generator | None = None,
) -> list[Subset[T_co]]:
    """Splits a dataset at random.

    Args:
        lengths: numbers of samples, or fractions that sum to 1 (what rounding down leaves over
            goes to the first subsets, one each).
        generator: default: this thread's.

    Raises:
        ValueError: the lengths do not sum to the dataset's, or a fraction is not in [0, 1].
    """
    sizes = list(lengths)
    if math.isclose(sum(sizes), 1) and sum(sizes) <= 1:
        sizes = _sizes_of_fractions(sizes, _length(dataset))
    if sum(sizes) != _length(dataset):
        raise ValueError("Sum of input lengths does not equal the length of the input dataset!")
    counts = [int(size) for size in sizes]
    order = shuffled(sum(counts), generator)
    ends = itertools.accumulate(counts)
    return [Subset(dataset, order[end - n : end]) for end, n in zip(ends, counts, strict=True)]


def _sizes_of_fractions(fractions: Sequence[float], total: int) -> list[float]:
    for index, fraction in enumerate(fractions):
        if not 0 <= fraction <= 1:
            raise ValueError(f"Fraction at index {index} is not between 0 and 1")
    sizes: list[float] = [math.floor(total * fraction) for fraction in fractions]
    for index in range(int(total - sum(sizes))):
        sizes[index % len(sizes)] += 1
    for index, size in enumerate(sizes):
        if size == 0:
            warnings.warn(
                f"Length of split at index {index} is 0. This might result in an empty dataset.",
                stacklevel=3,
            )
    return sizes


def _length(dataset: Any) -> int:
    return len(dataset)
