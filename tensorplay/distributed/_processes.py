"""A job of one process per rank: joining it, leaving it, and what happens at exit."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import multiprocessing
import multiprocessing.util
import sys
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _failures
from ._control import Hub, Link, free_port, is_loopback
from ._failures import ExceptHook
from ._quiet import quiet_libraries
from ._relay import Relay
from ._world import World, backend_reset, first_devices, set_process_world

_SHUTDOWN_LIMIT = 10.0  # seconds for the last handshakes, once every rank has left or is lost


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
        self._over = False
        self.link = Link(address.rank, address.world_size, _failures.on_change)
        self._hook = ExceptHook(self.link)

    def start(self) -> World:
        """Meet the other processes, start JAX over all of them and install the new world.

        Raises:
            DistNetworkError: the address cannot be used, or not all ranks came in time.
            DistBackendError: a rank died meanwhile.
        """
        try:
            service_port = self._join()
            _failures.watch(self.link)
            with backend_reset():
                self._start_jax(service_port)
                world = self._make_world()
                set_process_world(world)
        except BaseException as error:
            self._abandon(error)
            raise
        self._hook.install()
        atexit.register(self._at_exit)
        if multiprocessing.parent_process() is not None:  # where atexit may not run
            multiprocessing.util.Finalize(self, self._at_exit, exitpriority=100)
        return world

    def stop(self) -> None:
        """Leave in order, together with the other ranks; JAX is a single process's afterwards.

        Raises:
            DistBackendError: a rank was gone; this process has left all the same.
        """
        error = sys.exception()
        why = "it called destroy_process_group"
        if error is not None:
            why += f" while handling {_failures.one_line(error)}"
        in_order = self._leave(why)
        lost = self.link.describe_lost()
        self._forget()
        with backend_reset():
            self._disconnect()
            set_process_world(None)
        if not in_order and not isinstance(error, _failures.DistBackendError):
            raise _failures.DistBackendError(lost or self._stayed())

    def meet(self, name: str, ranks: tuple[int, ...], timeout: float) -> None:
        """Block until all ``ranks`` have come to the meeting ``name``.

        Raises:
            DistBackendError: one of them is gone or has left, or ``timeout`` seconds are over.
        """
        try:
            self.link.meet(name, ranks, timeout)
        except _failures.DistBackendError as error:
            raise _failures.peer_lost(str(error)) from None

    def _join(self) -> int:
        """Meet over the control channel; returns the port of rank 0's coordination service."""
        host, rank = self.address.host, self.address.rank
        if rank == 0:
            start = {"start": free_port(host)}
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
        with _recoverable(), quiet_libraries():
            jax.distributed.initialize(
                coordinator,
                self.address.world_size,
                rank,
                local_device_ids=self.address.local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=max(1, int(self.timeout)),
                shutdown_timeout_seconds=int(_SHUTDOWN_LIMIT),
                coordinator_bind_address=coordinator if is_loopback(host) else None,
            )

    def _make_world(self) -> World:
        size = self.address.world_size
        devices = first_devices(jax.devices(self._platform), size)
        with quiet_libraries():
            _connect_devices(devices, self.address.rank)
        return World(self.address.rank, size, "processes", devices, self.timeout)

    def _leave(self, why: str) -> bool:
        counts = {_failures.launch_key(r): n for r, n in _failures.launches.items()}
        return self.link.leave(why, counts, self.timeout)

    def _stayed(self) -> str:
        return f"rank {self.address.rank} left, but others did not within {self.timeout:g} s"

    def _forget(self) -> None:
        """Nothing that happens to the other ranks concerns this process any more."""
        self._over = True
        _failures.unwatch()
        self._hook.uninstall()
        atexit.unregister(self._at_exit)

    def _disconnect(self) -> None:
        """Close every connection; the process that hosts the service does so last."""
        if self._hub is not None:
            self._hub.wait_until_alone(_SHUTDOWN_LIMIT)
        jax.distributed.shutdown()
        self.link.bye()
        if self._hub is not None:
            self._hub.close()
        else:
            self.link.wait_for_end(_SHUTDOWN_LIMIT)
        if self._relay is not None:
            self._relay.close()
        self.link.close()

    def _abandon(self, error: BaseException) -> None:
        """Give up a `start` that failed."""
        _failures.tell(self.link, error)
        self._forget()
        jax.distributed.shutdown()
        self.link.close()
        for end in (self._relay, self._hub):
            if end is not None:
                end.close()

    def _at_exit(self) -> None:
        """The script has ended without ``destroy_process_group``: leave, or say why it cannot."""
        if self._over:
            return
        self._over = True
        error = self._hook.error or sys.exception()
        if error is not None and not isinstance(error, SystemExit):
            _failures.tell(self.link, error)
            return
        in_order = self._leave("its script ended")
        if not in_order and self.link.lost and not _failures.has_raised():
            _failures.end_process(self.link)
        self._forget()
        self._disconnect()


@contextlib.contextmanager
def _recoverable() -> Iterator[None]:
    """Keep JAX from aborting the other processes when one is gone: `_failures` ends them."""
    before = jax.config.jax_enable_recoverability
    jax.config.update("jax_enable_recoverability", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_recoverability", before)


def _connect_devices(devices: tuple[jax.Device, ...], rank: int) -> None:
    """Run one all-reduce, so that the devices are connected, or fail to, before the first use."""
    mesh = Mesh(np.array(devices), ("ranks",))
    spec = PartitionSpec("ranks")
    add = jax.shard_map(lambda x: jax.lax.psum(x, "ranks"), mesh=mesh, in_specs=spec, out_specs=spec)
    own = jax.device_put(np.ones(1, np.int32), devices[rank])
    ones = jax.make_array_from_single_device_arrays(
        (len(devices),), NamedSharding(mesh, spec), [own]
    )
    jax.block_until_ready(jax.jit(add)(ones))
