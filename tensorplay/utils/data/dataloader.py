"""DataLoader, as ``torch.utils.data.dataloader``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from ..._ops.random import Generator
from ._collate import default_collate, default_convert
from ._workers import END, Worker, WorkerInfo, batches_of
from .dataset import Dataset, IterableDataset, fetch_samples
from .sampler import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    drawn_seed,
    number_of_batches,
)

T_co = TypeVar("T_co", covariant=True)


class DataLoader(Generic[T_co]):
    """Batches of a dataset.

    Args:
        dataset: samples by index, or an ``IterableDataset``.
        batch_size: samples in a batch; None gives single samples.
        shuffle: a new random order at each iteration.
        sampler: the order of indices, instead of ``shuffle``.
        batch_sampler: lists of indices, instead of batch_size, shuffle, sampler and drop_last.
        num_workers: threads (torch: processes) that load ahead; 0 loads when asked.
        collate_fn: from a list of samples to a batch; default: ``default_collate``.
        drop_last: leave out a last batch that is smaller.
        timeout: seconds to wait for a worker's batch; 0 waits for ever.
        worker_init_fn: called in each worker with its number.
        generator: draws the order and the workers' seeds; default: this thread's.
        prefetch_factor: batches that each worker is ahead (default: 2).
        pin_memory, pin_memory_device, multiprocessing_context, persistent_workers, in_order:
            accepted; they change nothing.

    Raises:
        ValueError: arguments out of range, or that exclude each other.
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
    ) -> None:
        _check_workers(num_workers, timeout, prefetch_factor, persistent_workers)
        iterable = isinstance(dataset, IterableDataset)
        if iterable:
            _check_iterable(shuffle, sampler, batch_sampler)
        _check_batching(batch_size, shuffle, sampler, batch_sampler, drop_last)
        if sampler is None:
            sampler = _default_sampler(dataset, bool(shuffle), generator)
        if batch_sampler is not None:
            batch_size = None
        elif batch_size is not None:
            batch_sampler = BatchSampler(sampler, batch_size, drop_last)
        default: Any = default_convert if batch_sampler is None else default_collate
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.sampler, self.batch_sampler, self.generator = sampler, batch_sampler, generator
        self.num_workers, self.timeout = num_workers, timeout
        self.collate_fn = default if collate_fn is None else collate_fn
        self.worker_init_fn, self.prefetch_factor = worker_init_fn, prefetch_factor
        self.pin_memory, self.pin_memory_device = pin_memory, pin_memory_device
        self.persistent_workers, self.in_order = persistent_workers, in_order
        self.multiprocessing_context = multiprocessing_context

    def __iter__(self) -> Iterator[Any]:
        indices = self.sampler if self.batch_sampler is None else self.batch_sampler
        if self.num_workers == 0:
            fetch = self._fetcher()
            return itertools.takewhile(lambda batch: batch is not END, map(fetch, indices))
        seed = drawn_seed(self.generator)
        workers = [
            Worker(
                WorkerInfo(number, self.num_workers, seed + number, self.dataset),
                self._fetcher,
                self.worker_init_fn,
            )
            for number in range(self.num_workers)
        ]
        return batches_of(workers, indices, self.prefetch_factor or 2, self.timeout)

    def _fetcher(self) -> Callable[[Any], Any]:
        """What turns an entry of the (batch) sampler into a batch, or into ``END``."""
        if isinstance(self.dataset, IterableDataset):
            samples = iter(self.dataset)
            return lambda index: self._next(samples, index)
        return self._batch

    def _batch(self, index: Any) -> Any:
        if self.batch_sampler is None:
            return self.collate_fn(self.dataset[index])
        if self.collate_fn is default_collate and hasattr(self.dataset, "collated"):
            batch = self.dataset.collated(index)
            if batch is not None:
                return batch
        return self.collate_fn(fetch_samples(self.dataset, index))

    def _next(self, samples: Iterator[Any], index: Any) -> Any:
        if self.batch_sampler is None:
            sample = next(samples, END)
            return END if sample is END else self.collate_fn(sample)
        batch = list(itertools.islice(samples, len(index)))
        if not batch or (self.drop_last and len(batch) < len(index)):
            return END
        return self.collate_fn(batch)

    def __len__(self) -> int:
        """How many batches an iteration gives; TypeError where the dataset has no length."""
        if not isinstance(self.dataset, IterableDataset):
            return len(self.sampler if self.batch_sampler is None else self.batch_sampler)  # type: ignore[arg-type]
        samples = len(self.dataset)  # type: ignore[arg-type]
        if self.batch_size is None:
            return samples
        return number_of_batches(samples, self.batch_size, self.drop_last)


def _default_sampler(dataset: Any, shuffle: bool, generator: Generator | None) -> Iterable[Any]:
    if isinstance(dataset, IterableDataset):
        return itertools.repeat(None)
    if shuffle:
        return RandomSampler(dataset, generator=generator)
    return SequentialSampler(dataset)


def _check_workers(
    num_workers: int, timeout: float, prefetch_factor: int | None, persistent_workers: bool
) -> None:
    if num_workers < 0:
        raise ValueError(
            "num_workers option should be non-negative; use num_workers=0 to load without workers."
        )
    if timeout < 0:
        raise ValueError("timeout option should be non-negative")
    if num_workers == 0 and prefetch_factor is not None:
        raise ValueError(
            "prefetch_factor option could only be specified with workers: let num_workers > 0, "
            "otherwise set prefetch_factor to None."
        )
    if prefetch_factor is not None and prefetch_factor < 0:
        raise ValueError("prefetch_factor option should be non-negative")
    if persistent_workers and num_workers == 0:
        raise ValueError("persistent_workers option needs num_workers > 0")


def _check_iterable(shuffle: bool | None, sampler: Any, batch_sampler: Any) -> None:
    given = {"shuffle": shuffle or None, "sampler": sampler, "batch_sampler": batch_sampler}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"DataLoader with IterableDataset: expected unspecified {name} option, but got "
                f"{name}={value}"
            )


def _check_batching(
    batch_size: int | None, shuffle: bool | None, sampler: Any, batch_sampler: Any, drop_last: bool
) -> None:
    if sampler is not None and shuffle:
        raise ValueError("sampler option is mutually exclusive with shuffle")
    if batch_sampler is not None:
        if batch_size != 1 or shuffle or sampler is not None or drop_last:
            raise ValueError(
                "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and "
                "drop_last"
            )
    elif batch_size is None and drop_last:
        raise ValueError(
            "batch_size=None option disables auto-batching and is mutually exclusive with drop_last"
        )
