"""The one place where per-rank values become global arrays and back, and programs are launched.

A *local value* is one rank's array on its own device, with ndim >= 1. The *global array* of the
same value is one ``jax.Array`` over a mesh, sharded on dim 0 by all mesh axes together: its dim 0
is the ranks' local dims 0, one after the other.

A mesh of devices that no rank drives is *controlled*: the one thread of this process holds every
rank's piece. To whoever looks at a single piece it is the first rank of the mesh; a local array
that it brings is every rank's piece; and what it computes with (`Spread.held`) is the global array.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Self, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _failures
from ._errors import DistBackendError
from ._world import World, current_world, on_backend_reset

T = TypeVar("T")
Program = Callable[..., Sequence[jax.Array]]


def ranks_of(mesh: Mesh) -> tuple[int, ...]:
    """The global ranks of the mesh's devices, in mesh order."""
    return _plan(mesh).ranks


def own_ranks_of(mesh: Mesh) -> tuple[int, ...]:
    """Those of `ranks_of` that are in this process."""
    return _plan(mesh).own_ranks


class _Plan:
    """What launching over one mesh needs, worked out once.

    Attributes:
        sharding: of every global array over the mesh.
        ranks: the global ranks of the mesh's devices, in mesh order.
        devices: the mesh's devices, in mesh order.
        size: number of devices.
        own: places in the mesh of the devices of this process.
        controlled: no rank drives the devices; this thread drives all of them.
    """

    __slots__ = ("controlled", "devices", "own", "ranks", "sharding", "size")

    def __init__(self, mesh: Mesh, world: World) -> None:
        self.sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self.ranks = _ranks_of(mesh, world)
        self.devices = tuple(mesh.devices.flat)
        self.size = mesh.size
        process = jax.process_index()
        self.own = [i for i, d in enumerate(self.devices) if d.process_index == process]
        self.controlled = not self.ranks

    @property
    def own_ranks(self) -> tuple[int, ...]:
        """The mesh's ranks that are in this process."""
        return tuple(self.ranks[i] for i in self.own)

    def from_own(self, local: jax.Array) -> jax.Array:
        """The global array of one rank's local value; with one controller all ranks have it."""
        if self.controlled:
            return self.assemble([jax.device_put(local, device) for device in self.devices])
        return self.assemble([local])

    def assemble(self, locals_: list[jax.Array]) -> jax.Array:
        """One global array from the local values that this process has, in mesh order."""
        first = locals_[0]
        shape = (first.shape[0] * self.size, *first.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.sharding, locals_)


_plans: dict[tuple[Mesh, str], _Plan] = {}  # by mesh and the kind of ranks that there are


def controlled(mesh: Mesh) -> bool:
    """Whether this thread drives all of the mesh's devices, since no ranks do."""
    return _plan(mesh).controlled


def sharding_of(mesh: Mesh) -> NamedSharding:
    """The sharding of every global array over the mesh."""
    return _plan(mesh).sharding


def _plan(mesh: Mesh) -> _Plan:
    world = current_world()
    plan = _plans.get((mesh, world.kind))
    if plan is None:
        plan = _plans[mesh, world.kind] = _Plan(mesh, world)
    return plan


def _ranks_of(mesh: Mesh, world: World) -> tuple[int, ...]:
    """The mesh's ranks; for a mesh of devices that no rank drives (one controller) none."""
    numbers = {
        (device.platform, device.id): rank
        for platform in ("xla", "cpu")
        for rank, device in enumerate(world.devices_of(platform))
    }
    found = [numbers.get((device.platform, device.id)) for device in mesh.devices.flat]
    return () if None in found else tuple(found)  # type: ignore[arg-type]


class Spread:
    """A value that each rank of a mesh has its own piece of.

    Attributes:
        mesh: the ``jax.sharding.Mesh`` of the ranks.

    Make one with `of_local`, `of_global` or `of_held`. Whichever form is missing is made at the
    first use and kept.
    """

    __slots__ = ("_global", "_local", "mesh")

    def __init__(
        self, mesh: Mesh, local: jax.Array | None = None, global_array: jax.Array | None = None
    ) -> None:
        self.mesh = mesh
        self._local = local
        self._global = global_array

    @classmethod
    def of_local(cls, mesh: Mesh, local: jax.Array) -> Self:
        """From this rank's piece: an array on its device, ndim >= 1, same shape on all ranks."""
        return cls(mesh, local)

    @classmethod
    def of_held(cls, mesh: Mesh, held: jax.Array) -> Self:
        """From what `held` gives."""
        return cls(mesh, None, held) if controlled(mesh) else cls(mesh, held)

    @classmethod
    def of_global(cls, mesh: Mesh, global_array: jax.Array) -> Self:
        """From the global array, sharded on dim 0 by all of the mesh's axes."""
        return cls(mesh, None, global_array)

    @property
    def local(self) -> jax.Array:
        """This rank's piece, on its own device."""
        if self._local is None:
            assert self._global is not None
            self._local = self._global.addressable_data(_own_index(self.mesh))
        return self._local

    @property
    def held(self) -> jax.Array:
        """What this thread computes with: its rank's piece; those of all ranks if it drives all."""
        return self.global_array if controlled(self.mesh) else self.local

    @property
    def global_array(self) -> jax.Array:
        """The global array.

        Raises:
            RuntimeError: rank threads have to meet to make it; `launch` does that.
        """
        if self._global is None:
            assert self._local is not None
            if _meets(self.mesh, current_world()):
                raise RuntimeError(
                    "one rank thread alone cannot assemble a global array: pass the value to a "
                    "program with launch()"
                )
            self._global = _plan(self.mesh).from_own(self._local)
        return self._global

    def __repr__(self) -> str:
        known = self._local if self._global is None else self._global
        assert known is not None
        form = "local" if self._global is None else "global"
        return f"Spread({form} {known.dtype}{list(known.shape)} over {dict(self.mesh.shape)})"


def _meets(mesh: Mesh, world: World) -> bool:
    """Whether using ``mesh`` means that rank threads have to meet."""
    return world.rendezvous is not None and mesh.size > 1


def _own_index(mesh: Mesh) -> int:
    """Where this rank's device is among those of ``mesh`` that this process can address."""
    world = current_world()
    return _plan(mesh).own_ranks.index(world.rank) if _meets(mesh, world) else 0


def per_rank_jit(fn: Callable[..., Any], mesh: Mesh) -> Any:
    """``fn``, of one rank's arrays (ndim >= 1), compiled for all ranks of ``mesh``."""
    spec = PartitionSpec(mesh.axis_names)

    def traced(*args: Any) -> Any:
        with jax.enable_x64(True):
            return fn(*args)

    traced.__name__ = getattr(fn, "__name__", "per_rank")
    return jax.jit(jax.shard_map(traced, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def launch(mesh: Mesh, program: Program, args: Sequence[Spread | jax.Array]) -> list[Spread]:
    """Run ``program`` over the ranks of ``mesh``; every one of them must call this.

    Args:
        mesh: the mesh, of which this rank is a member.
        program: takes global arrays and returns a flat sequence of them, all sharded on dim 0 by
            all mesh axes: normally a jitted ``shard_map`` over ``mesh``. It must be the same
            object (or equal) for all rank threads; see `shared_program`.
        args: spread values, or this rank's local arrays.

    Raises:
        DistBackendError: a rank is gone, or rank threads came with different programs, shapes or
            dtypes; then the message lists what each passed.
    """
    world = current_world()
    if world.rendezvous is not None and mesh.size > 1:
        return _launch_together(mesh, program, args, world)
    plan = _plan(mesh)
    with _seen_by_others(world, plan):
        arrays = [a.global_array if isinstance(a, Spread) else plan.from_own(a) for a in args]
        with jax.enable_x64(True):
            outputs = program(*arrays)
    return [Spread(mesh, None, output) for output in outputs]


@contextlib.contextmanager
def _seen_by_others(world: World, plan: _Plan) -> Iterator[None]:
    """Around a launch: processes that are gone are named, and others will know of this launch."""
    if world.spans_processes and plan.size > 1:
        processes = world.processes_of(plan.ranks)
        if _failures.trouble:
            _failures.check(processes)
        _failures.launched(processes)
    try:
        yield
    except Exception as error:
        _raise_translated(error)


def _raise_translated(error: Exception) -> None:
    """Re-raise ``error``, as the error that names the missing rank where that is the cause."""
    translated = _failures.translate(error)
    if translated is None:
        raise error
    raise translated from error


def _launch_together(
    mesh: Mesh, program: Program, args: Sequence[Spread | jax.Array], world: World
) -> list[Spread]:
    """`launch` for rank threads: the last to arrive launches for all."""
    assert world.rendezvous is not None
    plan = _plan(mesh)
    if world.rank not in plan.ranks:
        raise RuntimeError(
            f"rank {world.rank} launches a program over ranks {list(plan.ranks)}: only they may"
        )
    spread = [a if isinstance(a, Spread) else Spread(mesh, a) for a in args]

    def run(everyones: Sequence[list[Spread]]) -> Sequence[jax.Array]:
        _check_same_args(plan, everyones)
        together = zip(*everyones, strict=True)
        first = plan.devices[plan.own[0]]
        # the default device is part of jit's cache key: equal on all ranks
        with _seen_by_others(world, plan), jax.default_device(first), jax.enable_x64(True):
            outputs = program(*[_assemble_together(plan, values) for values in together])
        for output in outputs:
            output.addressable_data(0)  # takes the array apart, which threads must not do at once
        return outputs

    name = getattr(program, "__name__", "a program")
    outputs = world.rendezvous.meet(
        world.rank, plan.own_ranks, f"{name} over ranks {list(plan.ranks)}", program, spread, run
    )
    return [Spread(mesh, None, output) for output in outputs]


def _assemble_together(plan: _Plan, values: tuple[Spread, ...]) -> jax.Array:
    """The global array of the pieces that the rank threads brought; each keeps it."""
    known = values[0]._global
    if known is None or any(value._global is not known for value in values):
        pieces = [_piece(value, i) for i, value in enumerate(values)]
        devices = [plan.devices[i] for i in plan.own]
        known = plan.assemble([on_device(p, d) for p, d in zip(pieces, devices, strict=True)])
        for value in values:
            value._global = known
    return known


def _piece(value: Spread, index: int) -> jax.Array:
    """The local piece of another rank's value."""
    if value._local is not None:
        return value._local
    assert value._global is not None
    return value._global.addressable_data(index)


def on_device(piece: jax.Array, device: jax.Device) -> jax.Array:
    """``piece`` on its rank's device: data made outside of the rank's thread is elsewhere."""
    return piece if device in piece.devices() else jax.device_put(piece, device)


def _check_same_args(plan: _Plan, everyones: Sequence[list[Spread]]) -> None:
    signatures = [[_signature(value) for value in values] for values in everyones]
    if any(signature != signatures[0] for signature in signatures[1:]):
        listing = "; ".join(
            f"rank {rank} passed {', '.join(signature) or 'nothing'}"
            for rank, signature in zip(plan.own_ranks, signatures, strict=True)
        )
        raise DistBackendError(
            f"all ranks must pass the same shapes and dtypes to a collective: {listing}"
        )


def _signature(value: Spread) -> str:
    """Dtype and shape of the local piece, as in messages: ``float32[4, 8]``."""
    if value._local is not None:
        return f"{value._local.dtype}{list(value._local.shape)}"
    assert value._global is not None
    rows = value._global.shape[0] // value.mesh.size
    return f"{value._global.dtype}{[rows, *value._global.shape[1:]]}"


_programs: dict[Hashable, Any] = {}
_building = threading.RLock()


def shared_program(key: Hashable, build: Callable[[], T]) -> T:
    """The program of ``key``, built once in this process for all of its ranks.

    Args:
        key: says everything that ``build`` reads.
        build: makes the program; it must not meet other ranks. Called under a lock.
    """
    try:
        found: T = _programs[key]
    except KeyError:
        with _building:
            if key not in _programs:
                _programs[key] = build()
            found = _programs[key]
    return found


def _forget_devices() -> None:
    _plans.clear()
    _programs.clear()


on_backend_reset(_forget_devices, _forget_devices)
