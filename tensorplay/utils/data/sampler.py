"""Samplers: in which order a dataset's samples are taken, as ``torch.utils.data.sampler``.

Orders are drawn in host memory: a generator's next draw seeds numpy's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Generic, TypeVar

import numpy as np

from ..._dtypes import float64
from ..._ops.creation import as_tensor
from ..._ops.random import Generator, default_generator

T_co = TypeVar("T_co", covariant=True)


class Sampler(Generic[T_co]):
    """An order of indices (or of lists of indices): a subclass implements ``__iter__``."""

    def __iter__(self) -> Iterator[T_co]:
        raise NotImplementedError


class SequentialSampler(Sampler[int]):
    """0, 1, 2, ..."""

    def __init__(self, data_source: Sized) -> None:
        self.data_source = data_source

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source)))

    def __len__(self) -> int:
        return len(self.data_source)


class RandomSampler(Sampler[int]):
    """A random order.

    Args:
        data_source: what has the length.
        replacement: draw each index anew, so that some come twice.
        num_samples: how many indices (default: the length); more than the length goes round again.
        generator: default: one that is seeded from this thread's at each iteration.

    Raises:
        TypeError: ``replacement`` is not a bool.
        ValueError: ``num_samples`` (or the length) is not positive.
    """

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: Generator | None = None,
    ) -> None:
        self.data_source, self.replacement = data_source, replacement
        self._num_samples, self.generator = num_samples, generator
        if not isinstance(replacement, bool):
            raise TypeError(
                f"replacement should be a boolean value, but got replacement={replacement}"
            )
        _check_positive("num_samples", self.num_samples)

    @property
    def num_samples(self) -> int:
        """How many indices an iteration gives."""
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __iter__(self) -> Iterator[int]:
        n = len(self.data_source)
        generator = self.generator
        if generator is None:
            generator = Generator().manual_seed(drawn_seed(None))
        if self.replacement:
            yield from drawn(generator).integers(n, size=self.num_samples).tolist()
            return
        for start in range(0, self.num_samples, n):
            yield from shuffled(n, generator)[: self.num_samples - start]

    def __len__(self) -> int:
        return self.num_samples


def drawn(generator: Generator | None) -> np.random.Generator:
    """numpy's generator, seeded by the next draw from ``generator`` (this thread's if None)."""
    words, offset, stream = (generator or default_generator()).draw()
    return np.random.default_rng([*words.tolist(), int(offset), int(stream)])


def drawn_seed(generator: Generator | None) -> int:
    """A seed drawn from ``generator`` (this thread's if None)."""
    return int(drawn(generator).integers(2**62))


def shuffled(n: int, generator: Generator | None) -> list[int]:
    """0 .. n - 1 in a random order."""
    return drawn(generator).permutation(n).tolist()  # type: ignore[no-any-return]


class SubsetRandomSampler(Sampler[int]):
    """The given indices in a random order."""

    def __init__(self, indices: Sequence[int], generator: Generator | None = None) -> None:
        self.indices, self.generator = indices, generator

    def __iter__(self) -> Iterator[int]:
        for i in shuffled(len(self.indices), self.generator):
            yield self.indices[i]

    def __len__(self) -> int:
        return len(self.indices)


class WeightedRandomSampler(Sampler[int]):
    """Indices drawn with the probabilities that ``weights`` (of any sum) give.

    Raises:
        ValueError: ``num_samples`` is not a positive integer, ``replacement`` not a bool, or
            ``weights`` not 1-D.
    """

    def __init__(
        self,
        weights: Sequence[float],
        num_samples: int,
        replacement: bool = True,
        generator: Generator | None = None,
    ) -> None:
        _check_positive("num_samples", num_samples)
        _check_bool("replacement", replacement)
        self.weights = as_tensor(weights, dtype=float64)
        if self.weights.dim() != 1:
            raise ValueError(
                f"weights should be a 1d sequence but given weights have shape "
                f"{tuple(self.weights.shape)}"
            )
        self.num_samples, self.replacement = num_samples, replacement
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        weights = self.weights.numpy()
        indices = drawn(self.generator).choice(
            len(weights), self.num_samples, self.replacement, weights / weights.sum()
        )
        return iter(indices.tolist())

    def __len__(self) -> int:
        return self.num_samples


class BatchSampler(Sampler[list[int]]):
    """Lists of ``batch_size`` indices of another sampler.

    Args:
        drop_last: leave out a last list that is shorter.

    Raises:
        ValueError: ``batch_size`` is not a positive integer, or ``drop_last`` not a bool.
    """

    def __init__(self, sampler: Iterable[int], batch_size: int, drop_last: bool) -> None:
        _check_positive("batch_size", batch_size)
        _check_bool("drop_last", drop_last)
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        while batch := list(itertools.islice(indices, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def __len__(self) -> int:
        return number_of_batches(len(self.sampler), self.batch_size, self.drop_last)  # type: ignore[arg-type]


def number_of_batches(samples: int, batch_size: int, drop_last: bool) -> int:
    """How many batches that many samples make."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} should be a positive integer value, but got {name}={value}")


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} should be a boolean value, but got {name}={value}")
