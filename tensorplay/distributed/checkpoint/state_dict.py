"""State dicts of sharded models and their optimizers, sharded or whole.

Source: torch.distributed.checkpoint.state_dict. Parameters are named by their full names in the
model, in optimizer state too. All functions are collective: every rank calls them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..._ops.creation import zeros
from ..._tensor import Tensor
from ...autograd import no_grad
from ...nn._module import Module
from ...nn._module_state import IncompatibleKeys
from ...optim._optimizer import Optimizer
from .._collectives import broadcast
from .._layout import Layout
from .._object_collectives import broadcast_object_list
from .._process_group import get_rank, is_initialized

Optimizers = Optimizer | Sequence[Optimizer]


@dataclasses.dataclass
class StateDictOptions:
    """What the functions of this module do.

    Attributes:
        full_state_dict: whole tensors in place of this rank's shards.
        cpu_offload: tensors in host memory; whole ones on rank 0 only, the other ranks get {}.
        ignore_frozen_params: leave parameters out that do not require grad.
        keep_submodule_prefixes: accepted as in PyTorch.
        strict: missing and unexpected keys raise when loading.
        broadcast_from_rank0: whole tensors to load are on rank 0; the other ranks may pass {}.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False


def get_model_state_dict(
    model: Module, *, submodules: Any = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """The model's parameters and persistent buffers by full name."""
    options = options or StateDictOptions()
    frozen = _frozen_names(model) if options.ignore_frozen_params else set()
    found = {k: v for k, v in model.state_dict().items() if k not in frozen}
    return _exported(found, options)


def set_model_state_dict(
    model: Module,
    model_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Loads a state dict as `get_model_state_dict` with the same options gives it.

    Raises:
        RuntimeError: sizes differ, or keys do under ``strict``; nothing is loaded then.
    """
    options = options or StateDictOptions()
    own = model.state_dict()
    given: Any = dict(model_state_dict)
    if options.broadcast_from_rank0:
        given = _from_rank0(given)
    if options.full_state_dict or options.broadcast_from_rank0:
        _refuse_sizes(model, own, given)
        given = {key: _cut_like(own.get(key), value) for key, value in given.items()}
    return model.load_state_dict(given, strict=options.strict)


def get_optimizer_state_dict(
    model: Module,
    optimizers: Optimizers,
    *,
    submodules: Any = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}``."""
    options = options or StateDictOptions()
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer, names in _with_names(model, optimizers):
        state_dict = optimizer.state_dict()
        for index, state in state_dict["state"].items():
            result["state"][names[index]] = state
        for group in state_dict["param_groups"]:
            params = [names[index] for index in group["params"]]
            result["param_groups"].append({**group, "params": params})
    return _exported(result, options)


def set_optimizer_state_dict(
    model: Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Loads what `get_optimizer_state_dict` with the same options gave.

    Raises:
        KeyError: a parameter that an optimizer holds is in no group of ``optim_state_dict``.
    """
    options = options or StateDictOptions()
    given: Any = dict(optim_state_dict)
    if options.broadcast_from_rank0:
        given = _from_rank0(given)
    groups = {name: group for group in given["param_groups"] for name in group["params"]}
    for optimizer, names in _with_names(model, optimizers):
        positions = {name: index for index, name in names.items()}
        params = dict(_parameters(optimizer))
        own_groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(
            {
                "state": {
                    positions[name]: {
                        key: _cut_like(params[positions[name]], value)
                        for key, value in state.items()
                    }
                    for name, state in given["state"].items()
                    if name in positions
                },
                "param_groups": [
                    {**groups[names[group["params"][0]]], "params": group["params"]}
                    for group in own_groups
                ],
            }
        )


def get_state_dict(
    model: Module,
    optimizers: Optimizers,
    *,
    submodules: Any = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(`get_model_state_dict`, `get_optimizer_state_dict`)."""
    return (
        get_model_state_dict(model, options=options),
        get_optimizer_state_dict(model, optimizers, options=options),
    )


def set_state_dict(
    model: Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """`set_model_state_dict` and `set_optimizer_state_dict`."""
    found = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return found


# --- names -------------------------------------------------------------------------------------


def _frozen_names(model: Module) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, param in named if not param.requires_grad}


def _parameters(optimizer: Optimizer) -> list[tuple[int, Tensor]]:
    """Position, as in the optimizer's state dict, and parameter."""
    return list(enumerate(p for group in optimizer.param_groups for p in group["params"]))


def _with_names(model: Module, optimizers: Optimizers) -> list[tuple[Optimizer, dict[int, str]]]:
    """Each optimizer with the full name of each of its parameters, by position."""
    names: dict[int, str] = {}
    for name, param in model.named_parameters():
        names[id(param)] = name
        if param._stands_for is not None:
            names[id(param._stands_for)] = name
    found = []
    for optimizer in [optimizers] if isinstance(optimizers, Optimizer) else optimizers:
        unknown = [i for i, p in _parameters(optimizer) if id(p) not in names]
        if unknown:
            raise KeyError(
                f"the optimizer's parameters {unknown} are not parameters of the model: make the "
                "optimizer from model.parameters() after fully_shard"
            )
        found.append((optimizer, {i: names[id(p)] for i, p in _parameters(optimizer)}))
    return found


# --- values ------------------------------------------------------------------------------------


def _map_tensors(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        return {k: _map_tensors(v, fn) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(v, fn) for v in value)
    return value


def _exported(values: Any, options: StateDictOptions) -> Any:
    if options.full_state_dict:
        values = _map_tensors(values, lambda t: t.full_tensor())
    if options.cpu_offload:
        values = _map_tensors(values, lambda t: t.cpu())
        if options.full_state_dict and is_initialized() and get_rank() != 0:
            return {}
    return values


def _cut_like(own: Any, value: Any) -> Any:
    """This rank's rows of a whole tensor, where ``own`` is sharded and ``value`` is that whole."""
    layout: Layout | None = own._layout if isinstance(own, Tensor) else None
    if layout is None or not isinstance(value, Tensor) or value._layout is not None:
        return value
    if tuple(value.shape) != layout.global_shape:
        return value
    return layout.tensor(layout.cut(value.detach()._read()))


def _refuse_sizes(model: Module, own: Mapping[str, Tensor], given: Mapping[str, Any]) -> None:
    faults = [
        f"size mismatch for {key}: copying a param with shape {tuple(value.shape)} from "
        f"checkpoint, the shape in current model is {tuple(own[key].global_shape)}."
        for key, value in given.items()
        if isinstance(value, Tensor)
        and key in own
        and tuple(value.global_shape) != tuple(own[key].global_shape)
    ]
    if faults:
        listed = "\n\t".join(faults)
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{listed}"
        )


@dataclasses.dataclass
class _Place:
    """A tensor that is still to come from rank 0."""

    shape: tuple[int, ...]
    dtype: Any


def _from_rank0(values: Any) -> Any:
    """Rank 0's values on every rank, tensor by tensor."""
    if not is_initialized():
        return values
    plan = [_map_tensors(values, lambda t: _Place(tuple(t.shape), t.dtype))]
    broadcast_object_list(plan, src=0)
    mine = iter(_tensors_of(values)) if get_rank() == 0 else None

    def receive(place: _Place) -> Tensor:
        whole = zeros(place.shape, dtype=place.dtype) if mine is None else next(mine).detach()
        with no_grad():
            whole = whole.clone()
            broadcast(whole, src=0)
        return whole

    return _fill(plan[0], receive)


def _tensors_of(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map_tensors(value, found.append)
    return found


def _fill(value: Any, receive: Callable[[_Place], Tensor]) -> Any:
    if isinstance(value, _Place):
        return receive(value)
    if isinstance(value, dict):
        return {k: _fill(v, receive) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_fill(v, receive) for v in value)
    return value
