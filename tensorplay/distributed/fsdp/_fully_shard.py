"""``fully_shard`` and the methods that it gives to a module. Source: torch.distributed.fsdp."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from ..._state import state as thread
from ..._tensor import state_changes
from ...nn._module import Module
from ...nn._parameter import Parameter
from ..device_mesh import DeviceMesh
from . import _init
from ._api import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from ._closure import CompiledCalls
from ._mesh import data_parallel_mesh
from ._module import FSDPModule
from ._param_group import FSDPParamGroup
from ._replicas import broadcast_module_states
from ._state import FSDPState

_FULL_PRECISION = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = _FULL_PRECISION,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: Iterable[Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    sync_module_states: bool = False,
) -> Any:
    """Shards the parameters of ``module`` over the data-parallel ranks, in place.

    The parameters below ``module`` that no earlier call took become one group: each is replaced by
    this rank's rows, they are gathered together before forward, and their gradients are reduced
    together after backward, averaged over the ranks. Apply it bottom-up. The module's class becomes
    one that also derives from `FSDPModule`.

    Args:
        module: a module, or a list of modules that form one group.
        mesh: 1-D: shard over it; 2-D: replicate over its first dim, shard over its second. Default:
            all ranks of the process group; one rank without a process group.
        reshard_after_forward: free the gathered parameters after forward and gather them again in
            backward. None: True except for the root. An int, which divides the shard axis: each
            rank keeps a piece of that many after forward, so that backward gathers among so many
            neighbours only.
        shard_placement_fn: from a parameter to the ``Shard(dim)`` to cut it by; None is dim 0.
        mp_policy: dtypes of compute, communication and outputs.
        offload_policy: where shards, gradients and optimizer state live between uses.
        ignored_params: parameters that stay whole, with their own gradients on each rank.
        dp_mesh_dims: which dims of ``mesh``, which then may have more, shard and which replicate.

        sync_module_states: all ranks of the mesh take the parameters and buffers of its first rank
            before they are cut. No argument of PyTorch's; see ``broadcast_module_states``.

    Returns:
        ``module``, the same object.

    Raises:
        TypeError: an argument of the wrong type.
        RuntimeError: applied twice to a module, or to a module above before.
        ValueError: a container without forward, a scalar parameter, a mesh of more than two dims,
            an int that does not divide the shard axis, names that the mesh does not have, an
            offload policy for devices that cannot address host memory.
        NotImplementedError: an int together with ``dp_mesh_dims``.
        AssertionError: trainable parameters of several dtypes in the group.
    """
    modules = _init.as_modules(module)
    _init.check_policy(mp_policy)
    dp_mesh = data_parallel_mesh(mesh, dp_mesh_dims)
    reshard = _init.checked_reshard(reshard_after_forward, dp_mesh.shard_size)
    if dp_mesh_dims is not None and isinstance(reshard, int) and not isinstance(reshard, bool):
        raise NotImplementedError(
            "reshard_after_forward as an int does not go together with dp_mesh_dims: pass the "
            "data-parallel slice of the mesh, mesh['dp'], as mesh"
        )
    memory = _init.offload_memory(offload_policy, dp_mesh)
    owned = _init.owners_of_parameters(modules, _init.ignored_ids(ignored_params))
    _init.refuse_unfit(owned)
    if sync_module_states:
        for m in modules:
            broadcast_module_states(m, src=int(dp_mesh.mesh.mesh.flat[0]), mesh=dp_mesh.mesh)
    params = _init.make_params(owned, dp_mesh, shard_placement_fn, memory)
    group = FSDPParamGroup(params, modules, dp_mesh, mp_policy) if params else None
    for m in modules:
        state = FSDPState(m, group, dp_mesh, mp_policy, reshard)
        state.calls = CompiledCalls(state)
        m.__dict__["_fsdp_state"] = state
        m.__class__ = _fsdp_class(type(m))  # type: ignore[assignment,arg-type]
    state_changes.bump()
    return module


@functools.cache
def _fsdp_class(cls: type[Module]) -> type[Module]:
    name = f"{cls.__name__}FSDPModule"
    own = {"__deepcopy__": _refuse_deepcopy, "__module__": cls.__module__}
    return type(name, (FSDPModule, cls), own)


def _refuse_deepcopy(self: Any, memo: Any) -> NoReturn:
    raise AssertionError(
        "FSDP does not support deepcopy. Please use state dict for serialization: "
        "other.load_state_dict(model.state_dict())"
    )


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Lets several roots use one set of communication resources.

    In PyTorch these are CUDA streams. XLA schedules the collectives of each program itself and has
    nothing to share, so this only checks its argument.

    Raises:
        ValueError: one of ``modules`` is not an FSDP module.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects list of FSDPModules but got {type(module).__name__}")


def register_fsdp_forward_method(module: Any, method_name: str) -> Callable[[], None]:
    """Lets ``module.<method_name>(...)`` gather and free parameters as calling the module does.

    On a module without FSDP it does nothing.

    Returns:
        A function without effect, so that ``register_fsdp_forward_method(model, "forward")()``
        works as well.

    Raises:
        ValueError: the module has no such method.
    """
    if isinstance(module, FSDPModule):
        _wrap_method(module, method_name)
    return lambda: None


def _wrap_method(module: Any, name: str) -> None:
    if not callable(getattr(type(module), name, None)):
        raise ValueError(f"{type(module).__name__} does not have a method {name!r}")
    state = module._fsdp_state
    function = getattr(type(module), name)
    method = function.__get__(module)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if state.in_forward:
            return method(*args, **kwargs)
        if thread.trace is not None:
            return state.run_traced(method, args, kwargs)
        state.lazy_init()
        return state.calls.run(method, args, kwargs, name)

    module.__dict__[name] = run
    state_changes.bump()
