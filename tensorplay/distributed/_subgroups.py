"""Groups that divide the ranks, and which backends there are. Source: torch.distributed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from .._device import device as device_type
from ._process_group import (
    Backend,
    Group,
    ProcessGroup,
    get_process_group_ranks,
    get_rank,
    new_group,
)


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any | None = None,
    group_desc: str | None = None,
) -> tuple[Group, list[Group]]:
    """Cut the ranks of ``group`` into groups of equal size. Every rank of the job must call it.

    Args:
        group_size: ranks per group; it must divide the number of ranks.
        group: default all ranks.
        timeout, backend, pg_options, group_desc: as in ``new_group``.

    Returns:
        The group of this rank, and all the groups.

    Raises:
        ValueError: ``group_size`` is missing, not positive, too large, or does not divide.
    """
    if group_size is None:
        raise ValueError("please pass in 'group_size': how many ranks share a host is not known")
    if group_size <= 0:
        raise ValueError(f"The arg 'group_size' ({group_size}) must be positive")
    ranks = get_process_group_ranks(group)
    if len(ranks) < group_size:
        raise ValueError(
            f"The arg 'group_size' ({group_size}) must not exceed the world size ({len(ranks)})"
        )
    if len(ranks) % group_size != 0:
        raise ValueError(f"The world size ({len(ranks)}) must be divisible by '{group_size=}'")
    lists = [ranks[start : start + group_size] for start in range(0, len(ranks), group_size)]
    return new_subgroups_by_enumeration(lists, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any | None = None,
    group_desc: str | None = None,
) -> tuple[Group, list[Group]]:
    """Make one group per list of global ranks. Every rank of the job must call it.

    Args:
        ranks_per_subgroup_list: lists without common ranks; some ranks may be in none.
        timeout, backend, pg_options, group_desc: as in ``new_group``.

    Returns:
        The group of this rank (None if it is in none), and all the groups.

    Raises:
        ValueError: no list, or a rank is in two.
    """
    if not ranks_per_subgroup_list:
        raise ValueError("The arg 'ranks_per_subgroup_list' cannot be empty")
    _check_disjoint(ranks_per_subgroup_list)
    own, rank = None, get_rank()
    groups: list[Group] = []
    for ranks in ranks_per_subgroup_list:
        made = new_group(ranks, timeout, backend, pg_options, group_desc=group_desc)
        groups.append(made)
        if rank in ranks:
            own = made
    return own, groups


def _check_disjoint(lists: Sequence[Sequence[int]]) -> None:
    seen: dict[int, Sequence[int]] = {}
    for ranks in lists:
        for rank in ranks:
            if rank in seen:
                raise ValueError(
                    f"Rank {rank} has appeared in both subgroup {seen[rank]} and {ranks}"
                )
            seen[rank] = ranks


def get_default_backend_for_device(device: Any) -> str:
    """The backend for tensors on ``device``: "gloo" for CPUs, "nccl" for GPUs, "xla" for TPUs.

    Raises:
        ValueError: for "meta", whose tensors have no values.
    """
    kind = device_type(device).type
    if kind == "meta":
        raise ValueError(f"Default backend not registered for device : {device}")
    return {"cpu": Backend.GLOO, "cuda": Backend.NCCL}.get(kind, Backend.XLA)


def is_gloo_available() -> bool:
    """Whether the backend "gloo" can be used: always."""
    return True


def is_nccl_available() -> bool:
    """Whether jaxlib has a CUDA plugin, and with it NCCL. No GPU need be there."""
    plugins = (f"jax_cuda{version}_plugin" for version in (12, 13))
    return any(importlib.util.find_spec(plugin) is not None for plugin in plugins)


def is_mpi_available() -> bool:
    """Whether the backend "mpi" can be used: never."""
    return False


def is_backend_available(backend: str) -> bool:
    """Whether a backend can be used."""
    available = {"gloo": is_gloo_available, "nccl": is_nccl_available, "xla": lambda: True}
    return available.get(backend.lower(), is_mpi_available)()
