"""Making replicas equal, and seeing whether they are.

Ranks that were seeded differently, or that skipped different steps, hold replicas that drift apart
without any error. `broadcast_module_states` makes them equal; `check_replicas` is a cheap test.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._tensor import Tensor, to_host, wrap
from ...autograd import no_grad
from ...nn._module import Module
from .._collectives import broadcast
from .._collectives_gather import all_gather_into_tensor
from .._object_collectives import all_gather_object
from .._process_group import ProcessGroup, default_backend, is_initialized
from .._world import current_world
from ..device_mesh import DeviceMesh
from ._mesh import default_mesh
from ._state import states_below


def broadcast_module_states(
    module: Module, *, src: int = 0, mesh: DeviceMesh | None = None
) -> None:
    """Gives all ranks the parameters and buffers of rank ``src``; all of them must call it.

    Call it before ``fully_shard``, where ranks may have been initialised differently (or pass
    ``sync_module_states=True`` to ``fully_shard``). On a sharded module it makes the replicas of a
    hybrid mesh equal, with the shards of the replica that ``src`` belongs to; shards of one replica
    are different rows, which nothing can make consistent any more.

    Args:
        src: global rank.
        mesh: the ranks; default those of the sharded module, else all.
    """
    found = _mesh_of(module, mesh)
    if found.size() == 1 or not is_initialized():
        return
    for _, tensor in _states(module):
        if tensor.is_meta:
            continue
        for group, root in _ways(tensor, found, src):
            with no_grad():
                plain = tensor.detach()
                plain._layout = None
                broadcast(plain, group=group, group_src=root)


def check_replicas(module: Module, *, buffers: bool = False) -> None:
    """Raises unless all replicas of every parameter are equal, bit for bit; all ranks must call it.

    One 4-byte checksum per parameter is compared, so it is cheap enough for every few steps.

    Args:
        buffers: compare buffers too; those of a BatchNorm differ between ranks by design.

    Raises:
        RuntimeError: on every rank; names the parameters, and the ranks whose values differ from
            those of their first replica.
    """
    mesh = _mesh_of(module, None)
    if mesh.size() == 1 or not is_initialized():
        return
    by_group: dict[Any, list[tuple[str, Tensor]]] = {}
    for name, tensor in _states(module, buffers):
        if not tensor.is_meta:
            for group, _ in _ways(tensor, mesh, None):
                by_group.setdefault(group.ranks, []).append((name, tensor))
    faults = [
        fault for ranks, named in by_group.items() for fault in _differences(_group(ranks), named)
    ]
    _raise_together(mesh, faults)


def _mesh_of(module: Module, mesh: DeviceMesh | None) -> DeviceMesh:
    states = states_below(module)
    if mesh is not None:
        return mesh
    return states[0].mesh.mesh if states else default_mesh()


def _states(module: Module, buffers: bool = True) -> Iterator[tuple[str, Tensor]]:
    for state in states_below(module):
        if state.group is not None:
            state.group.to_sharded()
    yield from module.named_parameters()
    if buffers:
        yield from module.named_buffers()


def _ways(tensor: Tensor, mesh: DeviceMesh, src: int | None) -> Iterable[tuple[ProcessGroup, int]]:
    """The groups of ranks that hold replicas of a tensor, with the place of ``src`` in each."""
    layout = tensor._layout
    if layout is None:
        ranks = mesh.mesh.flatten().tolist()
        root = ranks.index(src) if src in ranks else 0
        return [(_group(tuple(ranks)), root)] if len(ranks) > 1 else []
    place = None if src is None else np.argwhere(layout.mesh.mesh == src)
    return [
        (layout.mesh.get_group(dim), 0 if place is None or not len(place) else int(place[0][dim]))
        for dim, placement in enumerate(layout.placements)
        if placement.is_replicate() and layout.mesh.shape[dim] > 1
    ]


def _group(ranks: Sequence[int]) -> ProcessGroup:
    world = current_world()
    name = f"replicas {list(ranks)}"
    return ProcessGroup(list(ranks), name, default_backend(world), world.timeout)


def _differences(group: ProcessGroup, named: list[tuple[str, Tensor]]) -> list[str]:
    with jax.enable_x64(True):
        own = wrap(_checksums([tensor._storage.array for _, tensor in named]))
    everyones = wrap(jnp.zeros((group.size(), len(named)), jnp.int32))
    all_gather_into_tensor(everyones, own, group)
    values = to_host(everyones._read())
    return [
        f"{name!r} on rank {group.ranks[rank]}"
        for column, (name, _) in enumerate(named)
        for rank in range(1, group.size())
        if values[rank, column] != values[0, column]
    ]


def _raise_together(mesh: DeviceMesh, faults: list[str]) -> None:
    """Raises on every rank if one of them has seen a fault."""
    group = _group(mesh.mesh.flatten().tolist())
    seen: list[Any] = [None] * group.size()
    all_gather_object(seen, faults, group)
    together = sorted({fault for each in seen for fault in each})
    if together:
        listed = ", ".join(together[:10]) + (", ..." if len(together) > 10 else "")
        raise RuntimeError(
            f"replicas differ: {listed}. Make them equal with broadcast_module_states(model), and "
            "look for ranks that were seeded or stepped differently"
        )


@jax.jit
def _checksums(arrays: list[Any]) -> Any:
    return jnp.stack([_checksum(a) for a in arrays])


def _checksum(array: Any) -> Any:
    """Depends on every bit and on its place."""
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag])
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    bits = lax.bitcast_convert_type(array, jnp.uint8).reshape(-1).astype(jnp.uint32)
    places = lax.iota(jnp.uint32, bits.size) * jnp.uint32(2654435761) + jnp.uint32(1)
    return lax.bitcast_convert_type(jnp.sum((bits + 1) * places, dtype=jnp.uint32), jnp.int32)
