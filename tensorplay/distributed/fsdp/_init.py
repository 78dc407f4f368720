"""What ``fully_shard`` works out before it changes anything, and what it refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from ..._dtypes import dtype
from ..._tensor import Tensor
from ...nn._containers import ModuleDict, ModuleList
from ...nn._module import Module
from ...nn._parameter import Parameter
from .._layout import Layout
from .._placements import Shard
from ._api import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ._mesh import DataParallelMesh
from ._param import FSDPParam, Owner
from ._state import state_of

PlacementFn = Callable[[Parameter], Any] | None


def as_modules(module: Module | Sequence[Module]) -> list[Module]:
    """The modules of one call.

    Raises:
        ValueError: no modules, the same one twice, or a container without a forward of its own.
        RuntimeError: ``fully_shard`` was applied to one of them before, or to a module above it.
    """
    if not isinstance(module, Module) and not isinstance(module, Iterable):
        raise TypeError(
            f"fully_shard expects a module or a list of modules, got {type(module).__name__}"
        )
    modules = [module] if isinstance(module, Module) else list(module)
    if not modules:
        raise ValueError("fully_shard expects at least one module, got an empty list")
    for m in modules:
        if not isinstance(m, Module):
            raise TypeError(f"fully_shard expects modules, got {type(m).__name__} in the list")
    if len({id(m) for m in modules}) != len(modules):
        raise ValueError("fully_shard got the same module twice in one list")
    for m in modules:
        _refuse_container(m)
        if state_of(m) is not None:
            raise RuntimeError("fully_shard has already been applied")
    return _without_nested(modules)


def _refuse_container(module: Module) -> None:
    if isinstance(module, (ModuleList, ModuleDict)) and type(module).forward is Module.forward:
        raise ValueError(
            f"fully_shard does not support containers that do not implement forward: {module}. "
            "Apply it to each module inside, or pass them as a list"
        )


def _without_nested(modules: list[Module]) -> list[Module]:
    """Modules that lie inside others of the list need no place of their own."""
    inside = {id(c) for m in modules for c in m.modules() if c is not m}
    return [m for m in modules if id(m) not in inside]


def managed_modules(modules: list[Module]) -> list[tuple[str, Module]]:
    """Name and module for all below ``modules`` that no earlier call took."""
    found: list[tuple[str, Module]] = []
    seen: set[int] = set()

    def visit(module: Module, name: str) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        found.append((name, module))
        for child_name, child in module._modules.items():
            if child is not None and state_of(child) is None:
                visit(child, f"{name}.{child_name}" if name else child_name)

    for m in modules:
        visit(m, "")
    return found


def owners_of_parameters(
    modules: list[Module], ignored: set[int]
) -> list[tuple[str, Parameter, list[Owner]]]:
    """Each parameter that is left for this call, once, with all places that hold it.

    Raises:
        RuntimeError: an earlier call on a module above took one of them.
    """
    found: dict[int, tuple[str, Parameter, list[Owner]]] = {}
    for prefix, module in managed_modules(modules):
        for name, param in module._parameters.items():
            if param is None or id(param) in ignored:
                continue
            full = f"{prefix}.{name}" if prefix else name
            shard = param if param._stands_for is None else param._stands_for
            if shard._layout is not None and "_fsdp_name" not in shard.__dict__:
                _refuse_cut(full, shard)
            elif shard._layout is not None:
                owned = shard.__dict__.get("_fsdp_name", full)
                raise RuntimeError(
                    f"the parameter {owned!r} belongs to the group of a fully_shard call on a "
                    "module above. Apply fully_shard bottom-up: children first, then the modules "
                    "that contain them"
                )
            found.setdefault(id(param), (full, param, []))[2].append((module, name))
    return list(found.values())


def _refuse_cut(name: str, param: Tensor) -> None:
    """Raises ValueError for a DTensor of which this rank does not hold the whole."""
    if param._layout.cuts or param._layout.partial:
        raise ValueError(
            f"the parameter {name!r} is placed as {list(param._layout.placements)}, but "
            "fully_shard shards parameters that are whole on every data-parallel rank: "
            "redistribute it to Replicate() first"
        )


def refuse_unfit(owned: list[tuple[str, Parameter, list[Owner]]]) -> None:
    """Refuses parameters that cannot travel in one group.

    Raises:
        ValueError: a 0-d parameter.
        AssertionError: trainable parameters of several dtypes.
    """
    for name, param, _ in owned:
        if param.dim() == 0:
            raise ValueError(
                f"fully_shard doesn't support scalar parameters: {name!r} has shape (). Change it "
                "to a 1D tensor with numel equal to 1, shape (1,), or pass it in ignored_params"
            )
    dtypes: dict[Any, str] = {}
    for name, param, _ in owned:
        if param.requires_grad:
            dtypes.setdefault(param.dtype, name)
    if len(dtypes) > 1:
        listed = ", ".join(f"{dtype} ({name!r}, ...)" for dtype, name in dtypes.items())
        raise AssertionError(
            f"fully_shard expects uniform original parameter dtype in a group but got {listed}. "
            "Cast them to one dtype, or give the modules groups of their own by calling "
            "fully_shard on each"
        )


def ignored_ids(ignored_params: Iterable[Parameter] | None) -> set[int]:
    """Identities of the parameters to leave alone.

    Raises:
        TypeError: something else than parameters was given.
    """
    ignored = list(ignored_params or ())
    for p in ignored:
        if not isinstance(p, Parameter):
            raise TypeError(
                "ignored_params should hold the parameters themselves, such as "
                f"{{model.weight}}, got {p!r}"
            )
    return {id(p) for p in ignored}


def check_policy(policy: Any) -> None:
    """Raises TypeError unless ``policy`` is a MixedPrecisionPolicy of dtypes."""
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy should be a MixedPrecisionPolicy, got {policy!r}")
    for field in ("param_dtype", "reduce_dtype", "output_dtype"):
        value = getattr(policy, field)
        if value is not None and not isinstance(value, dtype):
            raise TypeError(
                f"MixedPrecisionPolicy.{field} should be a dtype such as tensorplay.bfloat16, or "
                f"None, got {value!r}"
            )


def shard_dim(name: str, param: Parameter, placement_fn: PlacementFn) -> int:
    """The dim to cut.

    Raises:
        ValueError: ``placement_fn`` returned something else than None or a Shard of that tensor.
    """
    placement = None if placement_fn is None else placement_fn(param)
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ValueError(
            f"shard_placement_fn should return a Shard or None, got {placement!r} for {name!r}"
        )
    dim = placement.dim + param.dim() if placement.dim < 0 else placement.dim
    if not 0 <= dim < param.dim():
        raise ValueError(
            f"shard_placement_fn returned {placement!r} for {name!r} of shape {tuple(param.shape)}"
        )
    return dim


def checked_reshard(value: Any, ranks: int) -> bool | int | None:
    """``reshard_after_forward`` for a shard axis of so many ranks.

    Raises:
        ValueError: it is no bool, None or int, or an int that does not divide ``ranks``.
    """
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {value!r}"
        )
    if value < 1 or ranks % value:
        raise ValueError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{ranks}, not {value}"
        )
    if value == 1:
        warnings.warn(
            "reshard_after_forward=1 (int) means resharding parameters to world size 1, instead of "
            "reshard_after_forward=True (bool)",
            stacklevel=3,
        )
        return False
    return True if value == ranks else value


def offload_memory(policy: OffloadPolicy, mesh: DataParallelMesh) -> str | None:
    """The kind of memory that shards are kept in; None for the device's own.

    Raises:
        TypeError: not an OffloadPolicy.
        ValueError: the devices cannot address host memory.
    """
    if not isinstance(policy, OffloadPolicy):
        raise TypeError(f"offload_policy should be an OffloadPolicy, got {policy!r}")
    device = mesh.jax_mesh.devices.flat[0]
    if not isinstance(policy, CPUOffloadPolicy) or _is_in_host_memory(device):
        return None
    wanted = "pinned_host" if policy.pin_memory else "unpinned_host"
    kinds = {memory.kind for memory in device.addressable_memories()}
    found = [kind for kind in (wanted, "pinned_host", "unpinned_host") if kind in kinds]
    if not found:
        raise ValueError(
            f"CPUOffloadPolicy needs devices that address host memory, but {device} has "
            f"{sorted(kinds)} only: leave offload_policy out"
        )
    return found[0]


def _is_in_host_memory(device: jax.Device) -> bool:
    return device.platform == "cpu"


def make_params(
    owned: list[tuple[str, Parameter, list[Owner]]],
    mesh: DataParallelMesh,
    fn: PlacementFn,
    memory: str | None,
) -> list[FSDPParam]:
    """Cuts every parameter and shows the shards in their owners."""
    dims = [shard_dim(name, param, fn) for name, param, _ in owned]
    params = []
    for (name, param, owners), dim in zip(owned, dims, strict=True):
        layout = Layout.over_axis(mesh.mesh, mesh.shard_axis, tuple(param.shape), dim, memory)
        params.append(FSDPParam(name, owners, param, layout))
    for p in params:
        p.show(p.sharded)
    return params
