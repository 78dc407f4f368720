"""DistributedSampler, as ``torch.utils.data.distributed``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sized

from ..._ops.random import Generator
from .sampler import Sampler, shuffled

_provider: Callable[[], tuple[int, int]] | None = None


def set_rank_provider(provider: Callable[[], tuple[int, int]] | None) -> None:
    """Tells samplers how to learn (number of ranks, this rank); the distributed package does so."""
    global _provider
    _provider = provider


class DistributedSampler(Sampler[int]):
    """This rank's share of a dataset's indices: every ``num_replicas``-th, from ``rank`` on.

    All ranks get equally many: some indices are given twice, or with ``drop_last`` the tail is
    left out. Call ``set_epoch`` before each epoch, or every epoch has the same order.

    Args:
        dataset: what has the length; the same on every rank.
        num_replicas, rank: default: those of the process group.
        shuffle: a random order, the same on every rank.
        seed: the same on every rank.

    Raises:
        RuntimeError: ``num_replicas`` or ``rank`` is left out and there is no process group.
        ValueError: ``rank`` is not in [0, num_replicas).
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if num_replicas is None or rank is None:
            known = _ranks()
            num_replicas = known[0] if num_replicas is None else num_replicas
            rank = known[1] if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ValueError(
                f"Invalid rank {rank}, rank should be in the interval [0, {num_replicas - 1}]"
            )
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.epoch, self.drop_last, self.shuffle, self.seed = 0, drop_last, shuffle, seed
        samples = len(dataset)
        self.num_samples = samples // num_replicas if drop_last else -(-samples // num_replicas)
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[int]:
        indices = self._order()
        if indices and len(indices) < self.total_size:
            indices *= math.ceil(self.total_size / len(indices))
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def _order(self) -> list[int]:
        samples = len(self.dataset)
        if not self.shuffle:
            return list(range(samples))
        return shuffled(samples, Generator().manual_seed(self.seed + self.epoch))

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Gives the next iterations the order of ``epoch``."""
        self.epoch = epoch


def _ranks() -> tuple[int, int]:
    if _provider is None:
        raise RuntimeError(
            "DistributedSampler: there is no process group to take num_replicas and rank from; "
            "call tensorplay.distributed.init_process_group first, or give both"
        )
    return _provider()
