"""Process groups, as in torch.distributed: joining a job, and the subsets of its ranks."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, Self
from urllib.parse import parse_qsl, urlsplit

import jax
import numpy as np
from jax._src.clusters import ClusterEnv
from jax.sharding import Mesh

from ._processes import Address, ProcessJob
from ._work import Work
from ._world import (
    DEFAULT_TIMEOUT,
    World,
    current_world,
    in_rank_thread,
    peek_world,
    rank_asked,
    set_process_world,
)

default_pg_timeout = timedelta(seconds=DEFAULT_TIMEOUT)

_NOT_INITIALIZED = (
    "Default process group has not been initialized, please make sure to call init_process_group."
)
_job: ProcessJob | None = None


class Backend(str):
    """Names of backends. ``Backend("GLOO")`` is ``"gloo"``. Source: torch.distributed.Backend.

    "gloo" drives CPU devices; "nccl" and "xla" drive the process's default JAX devices.

    Raises:
        ValueError: the name is none of these.
    """

    GLOO = "gloo"
    NCCL = "nccl"
    XLA = "xla"

    def __new__(cls, name: str) -> Self:
        if not isinstance(name, str):
            raise ValueError("Backend constructor parameter must be string-ish")
        if name.lower() not in _BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}; got {name!r}")
        return super().__new__(cls, name.lower())


_BACKENDS = (Backend.GLOO, Backend.NCCL, Backend.XLA)


class ProcessGroup:
    """Ranks that act together. Source: torch.distributed.ProcessGroup.

    Attributes:
        ranks: the global ranks of the members; a member's place among them is its group rank.
        group_name: equal on all members.
        backend: one of `Backend`.
        timeout: seconds that a member waits for the others.
    """

    def __init__(
        self, ranks: Sequence[int], group_name: str, backend: Backend, timeout: float
    ) -> None:
        self.ranks = tuple(ranks)
        self.group_name = group_name
        self.backend = backend
        self.timeout = timeout
        self._barriers = 0
        self._jax_mesh: tuple[World, Mesh] | None = None  # for the world it was made in

    def rank(self) -> int:
        """This rank's place in the group, -1 if it is not a member."""
        rank = current_world().rank
        return self.ranks.index(rank) if rank in self.ranks else -1

    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def name(self) -> str:
        """The backend's name."""
        return self.backend

    def __repr__(self) -> str:
        return f"ProcessGroup({self.group_name!r}, ranks={list(self.ranks)}, {self.backend!r})"

    @property
    def jax_mesh(self) -> Mesh:
        """The members' devices in group order, along the axis "ranks"."""
        world = current_world()
        if self._jax_mesh is None or self._jax_mesh[0] is not world:
            devices = world.devices_of("cpu" if self.backend == Backend.GLOO else "xla")
            mine = np.array([devices[rank] for rank in self.ranks], dtype=object)
            self._jax_mesh = (world, Mesh(mine, ("ranks",)))
        return self._jax_mesh[1]

    def next_barrier(self) -> str:
        """A name for the next barrier, equal on all members."""
        self._barriers += 1
        return f"barrier {self._barriers} of group {self.group_name!r}"


class _WorldMember(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, None before ``init_process_group``."""
        return _default_group_or_none()


class group(metaclass=_WorldMember):
    """``group.WORLD`` is the default group. Source: torch.distributed.group."""


class GroupMember(metaclass=_WorldMember):
    """``GroupMember.WORLD`` is the default group; a rank outside a new group gets NON_GROUP_MEMBER.

    Source: torch.distributed.GroupMember.
    """

    NON_GROUP_MEMBER: Literal[-100] = -100


Group = ProcessGroup | Literal[-100] | None


def is_available() -> bool:
    """Whether the distributed package can be used: always. Source: torch.distributed."""
    return True


def is_initialized() -> bool:
    """Whether the default process group exists. Source: torch.distributed.is_initialized."""
    return _default_group_or_none() is not None


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any | None = None,
    group_name: str = "",
    pg_options: Any | None = None,
    device_id: Any | None = None,
) -> None:
    """Join the job and make its default process group. Source: torch.distributed.

    Every rank must call it; it returns when all have. JAX arrays made before are moved to the host
    and back where tensors hold them; a bare ``jax.Array`` stays readable but belongs to no device.
    Inside ``run_ranks`` the job is there already, and arguments that match it are accepted.

    Args:
        backend: "gloo" for CPU devices, "nccl" or "xla" or None for JAX's default devices.
        init_method: "tcp://host:port" of rank 0, or "env://" (RANK, WORLD_SIZE, MASTER_ADDR,
            MASTER_PORT). None: these variables if set, else the cluster that JAX detects (Slurm,
            TPU pods, Kubernetes, Open MPI).
        timeout: how long a rank waits for the others, here and later; default 30 minutes.
        world_size: number of ranks, if ``init_method`` does not say.
        rank: this process's rank, if ``init_method`` does not say.
        store: not supported: must be None.
        group_name, pg_options, device_id: accepted for compatibility, without effect.

    Raises:
        ValueError: called twice, or the arguments do not say where to meet.
        TypeError: ``timeout`` is not a timedelta.
        DistNetworkError: the ranks did not find one another within ``timeout``.
    """
    if is_initialized():
        raise ValueError("trying to initialize the default process group twice!")
    if store is not None:
        raise ValueError(
            "init_process_group takes no store here: pass init_method='tcp://host:port' instead"
        )
    seconds = _seconds(timeout)
    if in_rank_thread():
        _accept_rank_thread(world_size, rank, backend)
        return
    chosen = None if backend is None else _backend_of(backend)
    address = _resolve_address(init_method, rank, world_size, chosen, seconds)
    world = _start(address, chosen, seconds)
    world.groups[""] = ProcessGroup(
        range(world.world_size), "0", chosen or default_backend(world), seconds
    )


def destroy_process_group(group: Group = None) -> None:
    """Forget ``group``; with None or the default group, leave the job. Source: torch.distributed.

    Leaving waits for the other ranks to leave too, at most the group's timeout; a new group can be
    made afterwards.

    Raises:
        AssertionError: there is no default group.
        ValueError: ``group`` has been destroyed already.
        DistBackendError: another rank is gone; this one has left all the same.
    """
    if group == GroupMember.NON_GROUP_MEMBER:
        return
    world, default = peek_world(), _default_group_or_none()
    if world is None or default is None:
        raise AssertionError("Process group cannot be None")
    if group is None or group is default:
        _leave(world)
    elif world.groups.pop(group.group_name, None) is None:  # type: ignore[union-attr]
        raise ValueError("Invalid process group specified")


def get_rank(group: Group = None) -> int:
    """This rank's number in ``group`` (default: in the job), -1 if it is not a member.

    Raises:
        ValueError: before ``init_process_group``. Source: torch.distributed.get_rank.
    """
    if group == GroupMember.NON_GROUP_MEMBER:
        return -1
    rank_asked()
    return group_or_default(group).rank()


def get_world_size(group: Group = None) -> int:
    """Number of ranks of ``group`` (default: of the job), -1 if this rank is not a member.

    Raises:
        ValueError: before ``init_process_group``. Source: torch.distributed.get_world_size.
    """
    if group == GroupMember.NON_GROUP_MEMBER:
        return -1
    return group_or_default(group).size()


def get_backend(group: Group = None) -> str:
    """The backend of ``group``: "gloo", "nccl" or "xla". Source: torch.distributed.get_backend.

    Raises:
        ValueError: before ``init_process_group``, or this rank is not a member.
    """
    if group == GroupMember.NON_GROUP_MEMBER:
        raise ValueError("Invalid process group specified")
    return group_or_default(group).backend


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """The global ranks of ``group``'s members in group order. Source: torch.distributed."""
    return list(group_or_default(group).ranks)


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """The place of ``global_rank`` in ``group``. Source: torch.distributed.

    Raises:
        ValueError: it is not a member.
    """
    if global_rank not in group.ranks:
        raise ValueError(f"Global rank {global_rank} is not part of group {group}")
    return group.ranks.index(global_rank)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """The global rank of the member ``group_rank`` of ``group``. Source: torch.distributed.

    Raises:
        ValueError: the group has no such member.
    """
    if not 0 <= group_rank < len(group.ranks):
        raise ValueError(f"Group rank {group_rank} is not part of group {group}")
    return group.ranks[group_rank]


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any | None = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any | None = None,
) -> ProcessGroup | Literal[-100]:
    """Make a group of some ranks. Every rank of the job must call it, in the same order.

    Source: torch.distributed.new_group. Nothing is communicated here.

    Args:
        ranks: global ranks, default all; sorted.
        timeout, backend: default to the job's.
        pg_options, group_desc, device_id: accepted for compatibility, without effect.
        use_local_synchronization: only the members call; the group is named by its ranks.

    Returns:
        The group, or ``GroupMember.NON_GROUP_MEMBER`` on ranks outside it.

    Raises:
        ValueError: a rank is given twice or does not exist.
    """
    default, world = group_or_default(None), current_world()
    members = _checked_members(ranks, world.world_size)
    name = f"ranks {members}" if use_local_synchronization else _next_name(world)
    chosen = default.backend if backend is None else _backend_of(backend)
    seconds = default.timeout if timeout is None else _seconds(timeout)
    made = ProcessGroup(members, name, chosen, seconds)
    world.groups[name] = made
    return made if world.rank in members else GroupMember.NON_GROUP_MEMBER


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | None = None,
) -> Work | None:
    """Wait until every member of ``group`` (default: every rank) is here.

    Source: torch.distributed.barrier. It orders the ranks' Python; work that the devices
    still do is not waited for.

    Args:
        async_op: return a `Work` at once.
        device_ids: accepted for compatibility, without effect.
        timeout: default the group's.

    Raises:
        DistBackendError: a member is gone, has left, called something else, or time is over.
    """
    if group == GroupMember.NON_GROUP_MEMBER:
        warnings.warn("barrier called by a rank outside the group: nothing to do", stacklevel=2)
        return None
    chosen, world = group_or_default(group), current_world()
    seconds = chosen.timeout if timeout is None else _seconds(timeout)
    name = chosen.next_barrier()
    if not async_op:
        _meet(world, chosen, name, seconds)
        return None
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    threading.Thread(
        target=_fulfil, args=(future, world, chosen, name, seconds), daemon=True
    ).start()
    return Work(future.result, future.done)


def default_backend(world: World) -> Backend:
    """The backend that drives the devices of ``world``."""
    platform = world.device.platform
    return Backend({"cpu": Backend.GLOO, "gpu": Backend.NCCL}.get(platform, Backend.XLA))


def _fulfil(
    future: concurrent.futures.Future[None],
    world: World,
    chosen: ProcessGroup,
    name: str,
    seconds: float,
) -> None:
    try:
        _meet(world, chosen, name, seconds)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)


def _meet(world: World, chosen: ProcessGroup, name: str, seconds: float) -> None:
    if len(chosen.ranks) == 1:
        return
    if world.rendezvous is None:
        if _job is not None:
            _job.meet(name, chosen.ranks, seconds)
        return
    processes = world.processes_of(chosen.ranks)

    def across(_: Any) -> None:
        if len(processes) > 1 and _job is not None:
            _job.meet(name, processes, seconds)

    own = tuple(r for r in chosen.ranks if r // world.threads == world.rank // world.threads)
    world.rendezvous.meet(world.rank, own, "barrier()", ("barrier", name), None, across)


def _default_group_or_none() -> ProcessGroup | None:
    world = peek_world()
    return None if world is None else world.groups.get("")


def group_or_default(group: Group) -> ProcessGroup:
    """``group`` itself, the default one for None.

    Raises:
        ValueError: before ``init_process_group``.
    """
    default = _default_group_or_none()
    if default is None:
        raise ValueError(_NOT_INITIALIZED)
    return default if group is None else group  # type: ignore[return-value]


def _seconds(timeout: timedelta | None) -> float:
    if timeout is None:
        return DEFAULT_TIMEOUT
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"Expected timeout argument to be of type datetime.timedelta, got {timeout}"
        )
    return timeout.total_seconds()


def _backend_of(name: str) -> Backend:
    """Parses also torch's "cpu:gloo,cuda:nccl", where the accelerator's name counts."""
    if isinstance(name, str) and ":" in name:
        name = name.split(",")[-1].split(":")[1]
    return Backend(name)


def _checked_members(ranks: Sequence[int] | None, world_size: int) -> tuple[int, ...]:
    if ranks is None:
        return tuple(range(world_size))
    members = tuple(sorted(int(rank) for rank in ranks))
    if len(set(members)) != len(members):
        raise ValueError(f"ranks list must not contain duplicate entries, got {list(ranks)}")
    for rank in members:
        if not 0 <= rank < world_size:
            raise ValueError(
                f"Rank {rank} is out of range. Valid ranks are 0 to {world_size - 1} "
                f"(world_size={world_size})"
            )
    return members


def _next_name(world: World) -> str:
    return str(sum(name != "" for name in world.groups) + 1)


def _accept_rank_thread(world_size: int, rank: int, backend: str | None) -> None:
    """``init_process_group`` inside ``run_ranks``: only checks that it means the same job."""
    world = current_world()
    for word, asked, have in (
        ("rank", rank, world.rank),
        ("world_size", world_size, world.world_size),
    ):
        if asked not in (-1, have):
            raise ValueError(
                f"init_process_group({word}={asked}) inside run_ranks, where {word} is {have}: "
                f"leave {word} out, or pass {have}"
            )
    make_rank_thread_group(world, None if backend is None else _backend_of(backend))


def make_rank_thread_group(world: World, backend: Backend | None = None) -> None:
    """Make the default group of a rank thread."""
    world.groups[""] = ProcessGroup(
        range(world.world_size), "0", backend or default_backend(world), world.timeout
    )


def _leave(world: World) -> None:
    global _job
    job, _job = _job, None
    if in_rank_thread():
        world.groups.clear()
    elif job is None:
        set_process_world(None)
    else:
        try:
            job.stop()
        finally:
            set_process_world(None)


def _start(address: Address, backend: Backend | None, timeout: float) -> World:
    global _job
    platform = "cpu" if backend == Backend.GLOO else None
    if address.world_size == 1:
        world = World(0, 1, "single", (jax.local_devices(backend=platform)[0],), timeout)
        set_process_world(world)
        return world
    job = ProcessJob(address, timeout, platform)
    world = job.start()
    _job = job
    return world


def _resolve_address(
    init_method: str | None, rank: int, world_size: int, backend: Backend | None, timeout: float
) -> Address:
    """Where to meet, from the arguments, the environment, or the cluster JAX detects."""
    if init_method is None:
        if "MASTER_ADDR" not in os.environ and (found := _detect_cluster(timeout)) is not None:
            return found
        init_method = "env://"
    parts = urlsplit(init_method)
    query = dict(parse_qsl(parts.query))
    rank = rank if rank != -1 else int(query.get("rank", -1))
    world_size = world_size if world_size != -1 else int(query.get("world_size", -1))
    if parts.scheme == "env":
        rank = rank if rank != -1 else int(_environment("RANK"))
        world_size = world_size if world_size != -1 else int(_environment("WORLD_SIZE"))
        host, port = _environment("MASTER_ADDR"), int(_environment("MASTER_PORT"))
    elif parts.scheme == "tcp":
        host, port = parts.hostname or "", _tcp_port(parts.port)
        _require_tcp(rank, "rank")
        _require_tcp(world_size, "world size")
    else:
        raise RuntimeError(
            f"No rendezvous handler for {parts.scheme}://: use tcp://host:port or env://"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, world_size): got {rank=} and {world_size=}")
    return Address(host, port, rank, world_size, _own_accelerators(backend, world_size))


def _environment(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ValueError(
            "Error initializing tensorplay.distributed using env:// rendezvous: environment "
            f"variable {name} expected, but not set"
        )
    return value


def _tcp_port(port: int | None) -> int:
    if port is None:
        raise _tcp_error("port number missing")
    return port


def _require_tcp(value: int, word: str) -> None:
    if value == -1:
        raise _tcp_error(f"{word} parameter missing")


def _tcp_error(what: str) -> ValueError:
    return ValueError(f"Error initializing tensorplay.distributed using tcp:// rendezvous: {what}")


def _own_accelerators(backend: Backend | None, world_size: int) -> list[int] | None:
    """The accelerator that a launcher gave to this process by LOCAL_RANK."""
    local_rank = os.environ.get("LOCAL_RANK")
    if backend == Backend.GLOO or world_size == 1 or local_rank is None:
        return None
    return [int(local_rank)]


def _detect_cluster(timeout: float) -> Address | None:
    """The job that JAX's own detection finds in the environment, or None."""
    address, size, rank, local_ids = ClusterEnv.auto_detect_unset_distributed_params(
        os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, int(timeout)
    )
    if address is None or size is None or rank is None:
        return None
    host, _, port = address.rpartition(":")
    return Address(host, int(port), rank, size, None if local_ids is None else list(local_ids))
