"""A job of one process per rank: joining it, leaving it, and what happens at exit."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import gc
import multiprocessing
import multiprocessing.util
import sys
from collections.abc import Iterator
from functools import partial

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _failures
from ._control import HeldPort, Hub, Link, is_loopback
from ._errors import DistBackendError, one_line
from ._failures import ExceptHook
from ._quiet import quiet_libraries
from ._relay import Relay
from ._world import World, backend_reset, first_devices, set_process_world

_SHUTDOWN_LIMIT = 10.0  # seconds for the last handshakes, once every rank has left or is lost
_NO_HEARTBEATS = 30 * 24 * 3600  # the control channel notices sooner, and says more


@dataclasses.dataclass(frozen=True)
class Address:
    """What `ProcessJob.start` needs: where the ranks meet and which one this is.

    ``local_device_ids`` restricts this process to some of its host's accelerators (None: all).
    """

    host: str
    port: int
    rank: int
    world_size: int
    local_device_ids: list[int] | None = None


class ProcessJob:
    """This process's part in a job of several processes; ``world`` is set by `start`.

    Args:
        address: where the ranks meet.
        timeout: seconds that a rank waits for the others, here and in barriers.
        platform: "cpu" to drive CPU devices, None for JAX's default ones.
    """

    def __init__(self, address: Address, timeout: float, platform: str | None) -> None:
        self.address = address
        self.timeout = timeout
        self._platform = platform
        self._hub: Hub | None = None
        self._relay: Relay | None = None
        self._held_port: HeldPort | None = None
        self._finalizer: multiprocessing.util.Finalize | None = None
        self._over = False
        self.link = Link(address.rank, address.world_size, _failures.on_change)
        self._hook = ExceptHook(self.link)

    def start(self) -> World:
        """Meet the other processes, start JAX over all of them and install the new world.

        Raises:
            DistNetworkError: the address cannot be used, or not all ranks came in time.
            DistBackendError: a rank died meanwhile.
        """
        with self._or_abandon():
            service_port = self._join()
        _failures.watch(self.link)
        with backend_reset(), self._or_abandon():
            self._start_jax(service_port)
            world = self._make_world()
            set_process_world(world)
        self._hook.install()
        atexit.register(self._at_exit)
        if multiprocessing.parent_process() is not None:  # where atexit may not run
            self._finalizer = multiprocessing.util.Finalize(None, self._at_exit, exitpriority=100)
        return world

    def stop(self) -> None:
        """Leave in order, together with the other ranks; JAX is a single process's afterwards.

        Raises:
            DistBackendError: a rank was gone; this process has left all the same.
        """
        error = sys.exception()
        why = "it called destroy_process_group"
        if error is not None:
            why += f" while handling {one_line(error)}"
        wrong = self._leave(why)
        self._forget()
        with backend_reset():
            self._disconnect(in_order=wrong is None)
            set_process_world(None)
        gc.collect()  # reference cycles in JAX keep the old client, and its sockets, alive
        if wrong is not None and not isinstance(error, DistBackendError):
            raise DistBackendError(wrong)

    def meet(self, name: str, ranks: tuple[int, ...], timeout: float) -> None:
        """Block until all ``ranks`` have come to the meeting ``name``.

        Raises:
            DistBackendError: one of them is gone or has left, or ``timeout`` seconds are over.
        """
        try:
            self.link.meet(name, ranks, timeout)
        except DistBackendError as error:
            raise _failures.peer_lost(str(error)) from None

    def _join(self) -> int:
        """Meet over the control channel; returns the port of rank 0's coordination service."""
        host, rank = self.address.host, self.address.rank
        if rank == 0:
            self._held_port = HeldPort(host)
            start = {"start": self._held_port.number}
            self._hub = Hub(host, self.address.port, self.address.world_size, start)
        port: int = self.link.join(host, self.address.port, self.timeout)["start"]
        return port

    def _start_jax(self, service_port: int) -> None:
        host, rank = self.address.host, self.address.rank
        if rank == 0:
            coordinator = f"{host}:{service_port}"
        else:
            self._relay = Relay(host, service_port)
            coordinator = self._relay.address
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        with _jax_options(), quiet_libraries():
            jax.distributed.initialize(
                coordinator,
                self.address.world_size,
                rank,
                local_device_ids=self.address.local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=max(1, int(self.timeout)),
                heartbeat_timeout_seconds=_NO_HEARTBEATS,
                shutdown_timeout_seconds=int(_SHUTDOWN_LIMIT),
                coordinator_bind_address=coordinator if is_loopback(host) else None,
            )
        if self._held_port is not None:
            self._held_port.release()

    def _make_world(self) -> World:
        size = self.address.world_size
        devices = first_devices(jax.devices(self._platform), size)
        with quiet_libraries():
            _connect_devices(devices, self.address.rank)
        return World(self.address.rank, size, "processes", devices, self.timeout, link=self.link)

    def _leave(self, why: str) -> str | None:
        counts = {_failures.launch_key(r): n for r, n in _failures.launches.items()}
        return self.link.leave(why, counts, self.timeout)

    def _forget(self) -> None:
        """Nothing that happens to the other ranks concerns this process any more."""
        self._over = True
        _failures.unwatch()
        self._hook.uninstall()
        atexit.unregister(self._at_exit)
        if self._finalizer is not None:
            self._finalizer.cancel()

    def _disconnect(self, in_order: bool) -> None:
        """Close every connection; the process that hosts the service does so last."""
        if not in_order:
            _abandon_jax()
            self.link.bye()
            self._close()
            return
        if self._hub is not None:
            self._hub.wait_until_alone(_SHUTDOWN_LIMIT)
        jax.distributed.shutdown()
        self.link.bye()
        if self._hub is None:
            self.link.wait_for_end(_SHUTDOWN_LIMIT)
        if self._relay is not None:
            self._relay.close()
        self._close()

    def _close(self) -> None:
        self.link.close()
        if self._held_port is not None:
            self._held_port.release()
        if self._hub is not None:
            self._hub.close()

    @contextlib.contextmanager
    def _or_abandon(self) -> Iterator[None]:
        """Give up the job, and close everything, if the block raises."""
        try:
            yield
        except BaseException as error:
            _failures.tell(self.link, error)
            self._forget()
            _abandon_jax()
            self._close()
            raise

    def _at_exit(self) -> None:
        """The script has ended without ``destroy_process_group``: leave, or say why it cannot."""
        if self._over:
            return
        self._over = True
        error = self._hook.error or sys.exception()
        if isinstance(error, SystemExit) and error.__cause__ is not None:
            error = error.__cause__
        if error is not None and not isinstance(error, SystemExit):
            _failures.tell(self.link, error)
            _abandon_jax()
            return
        wrong = self._leave("its script ended")
        if self.link.lost and not _failures.has_raised():
            _failures.end_process(self.link)
        if wrong is not None:
            _failures.print_line(wrong)
        self._forget()
        self._disconnect(in_order=wrong is None)


def _abandon_jax() -> None:
    """Leave JAX's connections as they are, for ever.

    When a rank is gone, closing them in order would wait for it, and closing rank 0's service would
    make JAX abort the processes that are still there.
    """
    state = distributed.global_state
    for part in (state.client, state.service, state.preemption_sync_manager):
        if part is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
    state.client = state.service = state.preemption_sync_manager = None


@contextlib.contextmanager
def _jax_options() -> Iterator[None]:
    """What ``jax.distributed.initialize`` reads from JAX's configuration, restored afterwards.

    Recoverable: a process that dies does not make JAX abort the others; `_failures` ends them.
    No preemption service: it would catch SIGTERM, and a process could not be stopped by it.
    """
    wanted = {"jax_enable_recoverability": True, "jax_enable_preemption_service": False}
    before = {name: getattr(jax.config, name) for name in wanted}
    try:
        for name, value in wanted.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def _connect_devices(devices: tuple[jax.Device, ...], rank: int) -> None:
    """Run one all-reduce, so that the devices are connected, or fail to, before the first use."""
    mesh = Mesh(np.array(devices), ("ranks",))
    spec = PartitionSpec("ranks")
    add = jax.shard_map(
        partial(jax.lax.psum, axis_name="ranks"), mesh=mesh, in_specs=spec, out_specs=spec
    )
    own = jax.device_put(np.ones(1, np.int32), devices[rank])
    ones = jax.make_array_from_single_device_arrays(
        (len(devices),), NamedSharding(mesh, spec), [own]
    )
    jax.block_until_ready(jax.jit(add)(ones))
