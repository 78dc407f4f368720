"""Who am I: the ranks of the running job, as seen from the current thread."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.extend.backend
from jax._src import xla_bridge

from .._state import state
from ._control import Link
from ._rendezvous import Rendezvous

Kind = Literal["processes", "threads", "single"]

DEFAULT_TIMEOUT = 30 * 60.0  # seconds; torch's default for every backend but nccl


@dataclasses.dataclass(eq=False)
class World:
    """The ranks of one job and this rank's place among them.

    Attributes:
        rank: this rank, 0 <= rank < world_size.
        world_size: number of ranks.
        kind: "processes" (one process per rank), "threads" (``run_ranks``), "single" (one rank).
        devices: the device of rank i at index i.
        timeout: seconds that a rank waits for the others.
        rendezvous: where the rank threads meet; None unless kind is "threads".
        link: the control channel to the other processes; None unless kind is "processes".
        ballots: how many calls over a mesh this rank has voted on.
        process: of a rank thread in a job over several processes: the world of its process.
        groups: the process groups made in this world, by name; the default one under "".
    """

    rank: int
    world_size: int
    kind: Kind
    devices: tuple[jax.Device, ...]
    timeout: float = DEFAULT_TIMEOUT
    rendezvous: Rendezvous | None = None
    link: Link | None = None
    process: World | None = None
    groups: dict[str, Any] = dataclasses.field(default_factory=dict)
    ballots: dict[Any, int] = dataclasses.field(default_factory=dict)

    @property
    def device(self) -> jax.Device:
        """This rank's own device."""
        return self.devices[self.rank]

    def devices_of(self, device_type: str) -> tuple[jax.Device, ...]:
        """The ranks' devices of one type: "cpu", "cuda", "tpu"; "xla" means whichever they drive.

        Raises:
            RuntimeError: the ranks have no such devices.
        """
        if device_type == "xla" or _PLATFORMS.get(device_type, device_type) == self._platform:
            return self.devices
        if device_type != "cpu":
            raise RuntimeError(
                f"the ranks of this job drive {self._platform!r} devices, but a mesh of "
                f"{device_type!r} was asked for: pass {self._platform!r} or 'xla' as device_type"
            )
        if self.kind != "processes" and self.process is None:
            return tuple(jax.local_devices(backend="cpu")[: self.world_size])
        return first_devices(jax.devices("cpu"), self.processes, self.threads)

    @property
    def processes(self) -> int:
        """Number of processes in the job."""
        if self.process is not None:
            return self.process.world_size
        return self.world_size if self.kind == "processes" else 1

    @property
    def threads(self) -> int:
        """Ranks in each process."""
        return self.world_size // self.processes

    @property
    def spans_processes(self) -> bool:
        """Whether there are ranks in other processes."""
        return self.processes > 1

    def processes_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The processes that ``ranks`` are in."""
        return tuple(sorted({rank // self.threads for rank in ranks}))

    @property
    def _platform(self) -> str:
        return self.devices[0].platform


_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


def first_devices(
    devices: list[jax.Device], processes: int, each: int = 1
) -> tuple[jax.Device, ...]:
    """The first devices of each process, in process order.

    Raises:
        RuntimeError: a process has fewer than ``each``.
    """
    found: list[jax.Device] = []
    for process in range(processes):
        own = [device for device in devices if device.process_index == process]
        if len(own) < each:
            raise RuntimeError(f"process {process} has {len(own)} devices, but {each} are needed")
        found += own[:each]
    return tuple(found)


class _PerThread(threading.local):
    world: World | None = None


_per_thread = _PerThread()
_process_world: World | None = None
_single_world: World | None = None
_single_lock = threading.Lock()


def current_world() -> World:
    """The world of the current rank.

    In a rank thread its own; else the one ``init_process_group`` made for the process; else a world
    of one rank on the first local device (which starts the JAX backend).
    """
    return peek_world() or _single()


def peek_world() -> World | None:
    """As `current_world`, but None where that would have to make the world of one rank."""
    return _per_thread.world or _process_world or _single_world


def set_process_world(world: World | None) -> None:
    """Make ``world`` the one of every thread that is not a rank thread."""
    global _process_world
    _process_world = world


@contextlib.contextmanager
def rank_thread(world: World) -> Iterator[None]:
    """Make the current thread the rank of ``world``, on its device, inside the block."""
    _per_thread.world = world
    try:
        with jax.default_device(world.device):
            yield
    finally:
        _per_thread.world = None


def in_rank_thread() -> bool:
    """Whether the current thread is one of ``run_ranks``."""
    return _per_thread.world is not None


def rank_asked() -> None:
    """Ends a trace in a rank thread: its program is for all ranks, so the rank is no constant."""
    if state.trace is not None and in_rank_thread():
        state.trace.abort("asks for its rank")


def _single() -> World:
    global _single_world
    with _single_lock:
        if _single_world is None:
            _single_world = World(0, 1, "single", (jax.local_devices()[0],))
        return _single_world


def backend_started() -> bool:
    """Whether JAX has devices already, so that their number is settled."""
    return xla_bridge.backends_are_initialized()


_resets: list[tuple[Callable[[], None], Callable[[], None]]] = []


def on_backend_reset(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Register what must happen around a restart of the JAX backend.

    Args:
        before: called while the old devices still exist; pulls to the host what must survive.
        after: called when the new devices exist (also where the restart failed); puts it back.
            ``current_world()`` is the new world by then.

    Both run in the thread that restarts and must not raise: before in reverse order of
    registration, after in order.
    """
    _resets.append((before, after))


@contextlib.contextmanager
def backend_reset() -> Iterator[None]:
    """Drop the JAX backends around a block that changes what the next ones will be."""
    global _single_world
    for before, _ in reversed(_resets):
        before()
    jax.extend.backend.clear_backends()
    _single_world = None
    try:
        yield
    finally:
        for _, after in _resets:
            after()
