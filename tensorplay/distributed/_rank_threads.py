"""Ranks as threads of this process: simulation, unit tests, hosts with several accelerators."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import jax

from ._errors import DistBackendError
from ._process_group import is_initialized, make_rank_thread_group
from ._rendezvous import Rendezvous
from ._world import (
    World,
    backend_reset,
    backend_started,
    current_world,
    first_devices,
    in_rank_thread,
    rank_thread,
)

T = TypeVar("T")

_DEFAULT_TIMEOUT = 300.0
_SPARE_DEVICES = 8  # CPU devices asked for where fewer would do, so that later jobs find enough
_FLAG = "--xla_force_host_platform_device_count"
_END_DELAY = 10.0  # seconds for the other ranks to notice that the job has failed


class _Rank(threading.Thread):
    """One rank of a job: its thread, and its result or error afterwards."""

    def __init__(self, world: World, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        super().__init__(name=f"rank {world.rank}", daemon=True)
        self.world = world
        self.result: Any = None
        self.error: BaseException | None = None
        self.place = 0
        self._fn = fn
        self._args = args

    def run(self) -> None:
        """Be the rank, and tell the others how it ended."""
        rendezvous = self.world.rendezvous
        assert rendezvous is not None
        try:
            with rank_thread(self.world):
                make_rank_thread_group(self.world)
                self.result = self._fn(self.world.rank, *self._args)
        except BaseException as error:
            self.error = error
        self.place = rendezvous.finish(self.world.rank, self.error)


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    timeout: float | timedelta | None = None,
) -> list[T]:
    """Run ``fn(rank, *args)`` as ``world_size`` ranks on threads of this process.

    In a job of several processes (after ``init_process_group``) all of them call it, with the same
    ``world_size``; their threads are ranks of one job then: rank = process * world_size + thread.

    Each rank has a device of its own, its JAX default device inside. The default process group is
    there already. Devices are this process's accelerators if there are enough, else CPU devices,
    which are set up here unless ``XLA_FLAGS`` fixes their number.

    Args:
        timeout: seconds that a rank waits for the others in a collective; default 300.

    Returns:
        What the ranks returned, in rank order.

    Raises:
        ValueError: ``world_size`` is not positive.
        RuntimeError: too few devices; called inside a rank; or the processes of a job call it with
            different numbers.
        Exception: what the first failing rank raised, with a note that names the rank. A rank that
            waits for one that raised or returned, or that called another collective, gets a
            `DistBackendError` that says what each rank did.
    """
    if world_size < 1:
        raise ValueError(f"run_ranks needs world_size >= 1, got {world_size}")
    if in_rank_thread():
        raise RuntimeError(
            "run_ranks inside a rank: call fn on the ranks that are there, or call "
            "destroy_process_group() and leave run_ranks first"
        )
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    seconds = _DEFAULT_TIMEOUT if seconds is None else float(seconds)
    worlds = _worlds(world_size, seconds)
    rendezvous = worlds[0].rendezvous
    assert rendezvous is not None
    ranks = [_Rank(world, fn, args) for world in worlds]
    for rank in ranks:
        rank.start()
    _join(ranks, rendezvous)
    _raise_first(ranks, rendezvous)
    return [rank.result for rank in ranks]


def _worlds(threads: int, timeout: float) -> list[World]:
    """The world as each of this process's threads sees it."""
    process = current_world() if is_initialized() else None
    if process is None or process.link is None:
        own, devices = range(threads), local_devices(threads)
        process = None
    else:
        own = range(process.rank * threads, (process.rank + 1) * threads)
        devices = _devices_of_job(process, threads)
    size, rendezvous = len(devices), Rendezvous(own, timeout)
    return [
        World(rank, size, "threads", devices, timeout, rendezvous, process=process) for rank in own
    ]


def _devices_of_job(process: World, threads: int) -> tuple[jax.Device, ...]:
    """The first ``threads`` devices of every process, after all have agreed on the number."""
    assert process.link is not None
    have = len(jax.local_devices(backend=process.device.platform))
    everyone = tuple(range(process.world_size))
    number = process.ballots["run_ranks"] = process.ballots.get("run_ranks", 0) + 1
    brought = process.link.ballot(
        f"run_ranks, call {number}", everyone, f"{threads} of {have}", process.timeout
    )
    wanted = [tuple(map(int, each.split(" of "))) for each in brought]
    if any(asked != threads or asked > there for asked, there in wanted):
        listing = "; ".join(
            f"process {rank} asks for {asked} of its {there} devices"
            for rank, (asked, there) in enumerate(wanted)
        )
        raise RuntimeError(
            "all processes of a job must run the same number of rank threads, at most one for each "
            f"device: {listing}. CPU devices are set up by XLA_FLAGS={_FLAG}=N before JAX starts"
        )
    return first_devices(jax.devices(process.device.platform), process.world_size, threads)


def _join(ranks: list[_Rank], rendezvous: Rendezvous) -> None:
    """Wait for all ranks; after a failure only for so long, as a rank may never look up."""
    try:
        rendezvous.wait_until_over(_END_DELAY)
    except BaseException as error:
        rendezvous.abort(f"run_ranks was interrupted by {type(error).__name__}")
        raise
    for rank in ranks:
        rank.join(_END_DELAY if rendezvous.failure else None)


def _raise_first(ranks: list[_Rank], rendezvous: Rendezvous) -> None:
    """Raise the error of the first rank that failed by itself, else of the first that failed."""
    failed = [rank for rank in ranks if rank.error is not None]
    if not failed:
        if rendezvous.failure is not None:
            raise DistBackendError(rendezvous.failure)
        return
    first = min(failed, key=lambda rank: (isinstance(rank.error, DistBackendError), rank.place))
    assert first.error is not None
    first.error.add_note(f"raised by rank {first.world.rank} of {len(ranks)} in run_ranks")
    raise first.error


def local_devices(count: int) -> tuple[jax.Device, ...]:
    """``count`` devices of this process: its accelerators, else CPU devices.

    Where the JAX backend runs already with too few CPU devices it is restarted with more.

    Raises:
        RuntimeError: ``XLA_FLAGS`` asks for fewer CPU devices.
    """
    settable = _FLAG not in os.environ.get("XLA_FLAGS", "")
    if settable and not backend_started():
        _restart_with(max(count, _SPARE_DEVICES))
    devices = _most_local_devices(count)
    if settable and len(devices) < count:
        _restart_with(max(count, _SPARE_DEVICES))
        devices = _most_local_devices(count)
    if len(devices) < count:
        raise RuntimeError(
            f"{count} ranks need {count} devices, and this process has {len(devices)}: set "
            f"XLA_FLAGS={_FLAG}={count}, or leave that flag out"
        )
    return tuple(devices[:count])


def _most_local_devices(count: int) -> list[jax.Device]:
    default = jax.local_devices()
    return default if len(default) >= count else jax.local_devices(backend="cpu")


def _restart_with(count: int) -> None:
    with backend_reset():
        jax.config.update("jax_num_cpu_devices", count)
