"""What every collective on tensors does: who takes part, what goes in, what comes out.

A collective reads this rank's arrays, runs one program over the devices of the group's members, and
writes the results into the tensors it was given. It records no gradients. Results are there when
the program has run: as with all ops, the call itself does not wait for that.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._dtypes import from_numpy_dtype
from .._state import state
from .._tensor import Tensor
from . import _failures
from ._errors import DistBackendError
from ._process_group import (
    Group,
    GroupMember,
    ProcessGroup,
    get_global_rank,
    get_group_rank,
    group_or_default,
)
from ._spmd import launch, per_rank_jit, shared_program
from ._work import Work
from ._world import current_world

AXIS = "ranks"
Build = Callable[[str, int, bool], Callable[..., Sequence[Any]]]


def group_of(name: str, group: Group) -> ProcessGroup | None:
    """The group that ``name(..., group=group)`` acts on; None, with a warning, for outsiders.

    Ends a trace: collectives run eagerly.

    Raises:
        ValueError: before ``init_process_group``.
    """
    if state.trace is not None:
        state.trace.abort(f"calls dist.{name}()")
    chosen = GroupMember.NON_GROUP_MEMBER if group == -100 else group_or_default(group)
    if isinstance(chosen, ProcessGroup) and chosen.rank() >= 0:
        return chosen
    warnings.warn(
        f"Running {name} on global rank {current_world().rank} which does not belong to the given "
        "group.",
        stacklevel=3,
    )
    return None


def root_of(
    group: ProcessGroup, rank: int | None, group_rank: int | None, default: int | None = None
) -> int:
    """The place in ``group`` of the rank given globally or by its place.

    Args:
        default: the global rank, where neither is given.

    Raises:
        ValueError: both are given, or neither, or the rank is not a member.
    """
    if rank is None and group_rank is None:
        rank = default
    if group_rank is not None:
        if rank is not None:
            raise ValueError("Can't specify both group_rank and global_rank")
        get_global_rank(group, group_rank)
        return group_rank
    if rank is None:
        raise ValueError("Must specify global_rank or group_rank")
    return get_group_rank(group, rank)


def check_tensor(value: Any, name: str) -> None:
    """Raises TypeError unless ``value`` is a tensor, RuntimeError where it has no values."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type tensorplay.Tensor "
            f"but got {type(value)} instead."
        )
    if value.is_meta:
        raise RuntimeError(f"No backend type associated with device type meta (`{name}`)")


def check_tensors(values: Any, name: str) -> None:
    """Raises TypeError unless ``values`` is a list of tensors."""
    if not isinstance(values, list):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type "
            f"List[tensorplay.Tensor] but got {type(values)} instead."
        )
    if not all(isinstance(value, Tensor) for value in values):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type "
            f"List[tensorplay.Tensor] but got {type(values)} with elements of type "
            f"{[type(value) for value in values]}."
        )
    for value in values:
        check_tensor(value, name)


def check_length(values: Sequence[Any], name: str, group: ProcessGroup) -> None:
    """Raises ValueError unless ``values`` has one element per member."""
    if len(values) != group.size():
        raise ValueError(
            f"`{name}` must have one tensor per rank of the group: expected {group.size()}, got "
            f"{len(values)}"
        )


def check_same_dtype(*tensors: Tensor) -> None:
    """Raises ValueError unless all tensors have one dtype."""
    for tensor in tensors:
        if tensor.dtype is not tensors[0].dtype:
            raise ValueError(
                "Invalid usage of tensors with different dtypes: Found "
                f"{tensors[0].dtype} and {tensor.dtype}"
            )


def check_size(collective: str, name: str, tensor: Tensor, needed: int, why: str) -> None:
    """Raises ValueError unless ``tensor`` has ``needed`` elements."""
    if tensor.numel() != needed:
        raise ValueError(
            f"{collective}: {why}; expected {needed} elements in `{name}`, got "
            f"{describe([tensor._read()])}"
        )


def check_pair(output: Any, input: Any, names: tuple[str, str]) -> None:
    """Raises TypeError unless both are tensors of one dtype."""
    check_tensor(input, names[1])
    check_tensor(output, names[0])
    if output.dtype is not input.dtype:
        raise TypeError(
            f"output tensor must have the same type as input tensor: got {output.dtype} and "
            f"{input.dtype}"
        )


def check_list_of_root(
    group: ProcessGroup, root: int, tensors: Sequence[Tensor], name: str, role: str
) -> None:
    """Raises ValueError unless the root, and no other rank, has one tensor per rank."""
    if group.rank() != root:
        if tensors:
            raise ValueError(f"Argument ``{name}`` must NOT be specified on non-{role} ranks.")
        return
    if not tensors:
        raise ValueError(f"Argument ``{name}`` must be specified on {role} rank.")
    check_length(tensors, name, group)


def describe(arrays: Sequence[Any]) -> str:
    """Dtypes and shapes for messages: ``float32[2, 3], float32[]``."""
    return (
        ", ".join(f"{from_numpy_dtype(a.dtype).name}{list(a.shape)}" for a in arrays) or "nothing"
    )


def read(tensor: Tensor) -> jax.Array:
    """The tensor's value."""
    value: jax.Array = tensor._read()
    return value


def write(tensor: Tensor, value: Any) -> None:
    """Puts ``value`` (as many elements, same dtype) into ``tensor``, on the tensor's device."""
    shape = tuple(tensor.shape)
    with jax.enable_x64(True):
        if value.shape != shape:
            value = _reshaped(value, shape)
        devices = tensor._storage.array.devices()
        if value.devices() != devices:
            value = jax.device_put(value, next(iter(devices)))
    tensor._write(value)


@functools.partial(jax.jit, static_argnums=1)
def _reshaped(value: Any, shape: tuple[int, ...]) -> Any:
    return value.reshape(shape)


class _Program:
    """A compiled collective with a name that says its options, for messages."""

    __slots__ = ("__name__", "_run")

    def __init__(self, name: str, run: Callable[..., Sequence[jax.Array]]) -> None:
        self.__name__, self._run = name, run

    def __call__(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        return self._run(*arrays)


def run(group: ProcessGroup, name: str, build: Build, arrays: Sequence[Any]) -> list[jax.Array]:
    """Run a collective of ``group``; every member must call this with arrays of the same shapes.

    Args:
        name: the call with its options, "broadcast(src=0)"; equal on all members, and different for
            different programs.
        build: takes the name of the mesh axis, its size, and whether the ranks are processes that
            drive CPU devices; returns what one rank computes, a function of ``arrays`` (each with
            at least one dim) to a list.
        arrays: this rank's.

    Raises:
        DistBackendError: a member is gone, or the members came with different names, shapes or
            dtypes; then the message lists what each passed.
    """
    mesh, world = group.jax_mesh, current_world()
    device = mesh.devices[group.rank()]
    if world.link is not None and _debug():
        _compare(group, f"{name} of {describe(arrays)}")

    def compiled() -> _Program:
        gloo = world.spans_processes and device.platform == "cpu"
        return _Program(name, per_rank_jit(build(AXIS, group.size(), gloo), mesh))

    program = shared_program(("collective", name, mesh), compiled)
    with jax.enable_x64(True):
        placed = [_placed(a, device) for a in arrays]
    return [output.local for output in launch(mesh, program, placed)]


def _placed(array: Any, device: jax.Device) -> Any:
    """``array`` on ``device``, with at least one dim."""
    if array.ndim == 0:
        array = array.reshape(1)
    return array if array.devices() == {device} else jax.device_put(array, device)


def finish(arrays: Sequence[jax.Array], async_op: bool) -> Work | None:
    """What a collective returns."""
    return Work.of_arrays(arrays) if async_op else None


def _debug() -> bool:
    return "DETAIL" in (
        os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper(),
        os.environ.get("TENSORPLAY_DISTRIBUTED_DEBUG", "").upper(),
    )


def _compare(group: ProcessGroup, call: str) -> None:
    """Raises on every process where the members of ``group`` make different calls."""
    world = current_world()
    assert world.link is not None
    key = ("collectives", group.group_name)
    number = world.ballots[key] = world.ballots.get(key, 0) + 1
    what = f"collective {number} of group {group.group_name!r}"
    try:
        calls = world.link.ballot(what, group.ranks, call, group.timeout)
    except DistBackendError as error:
        raise _failures.peer_lost(str(error)) from None
    if any(other != call for other in calls):
        listing = "; ".join(
            f"rank {rank} called {other}" for rank, other in zip(group.ranks, calls, strict=True)
        )
        raise DistBackendError(
            "the ranks must call the same collective, with the same shapes and dtypes: " + listing
        )
