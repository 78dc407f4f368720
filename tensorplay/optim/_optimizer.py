"""Optimizer: parameter groups, state, hooks and state dicts, as ``torch.optim.Optimizer``."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._dtypes import float32
from .._graph import RemovableHandle, add_hook
from .._ops.creation import full_like, tensor
from .._state import state as thread_state
from .._tensor import Tensor

ParamGroup = dict[str, Any]
ParamsT = Iterable[Tensor] | Iterable[ParamGroup] | Iterable[tuple[str, Tensor]]
StateDict = dict[str, Any]
_HOOK_KINDS = (
    "step_pre", "step_post", "state_dict_pre", "state_dict_post",
    "load_state_dict_pre", "load_state_dict_post",
)  # fmt: skip


class Optimizer:
    """Base class of all optimizers; a subclass implements ``step``.

    Args:
        params: tensors, ``(name, tensor)`` pairs, or dicts, each a group with options of its own
            and its tensors under ``"params"``.
        defaults: the options of groups that do not give them.

    ``param_groups`` is the list of groups; ``state`` maps each parameter to its dict of state.

    Raises:
        TypeError: ``params`` is a single tensor, a set, or holds something else than tensors.
        ValueError: no parameters, a tensor that is not a leaf, or a parameter in two groups.
    """

    _opt_called = False
    _stepping = False

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        if isinstance(params, Tensor):
            raise TypeError(
                "params argument given to the optimizer should be an iterable of Tensors or "
                f"dicts, but got {type(params).__name__}"
            )
        self.defaults = defaults
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        self.param_groups: list[ParamGroup] = []
        self._hooks = _no_hooks()
        groups = list(params)
        if not groups:
            raise ValueError("optimizer got an empty parameter list")
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        for group in groups:
            self.add_param_group(group)  # type: ignore[arg-type]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "step" in cls.__dict__:
            cls.step = _hooked(cls.step)  # type: ignore[method-assign]

    def __getstate__(self) -> dict[str, Any]:
        return {
            "defaults": self.defaults, "state": self.state, "param_groups": self.param_groups
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__dict__.setdefault("_hooks", _no_hooks())
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for index, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {index}")
            lines += [f"    {key}: {group[key]}" for key in sorted(group) if key != "params"]
        return "\n".join(lines) + "\n)"

    # --- parameters --------------------------------------------------------------------------

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds a group; options that it lacks are taken from the defaults.

        Raises:
            TypeError, ValueError: as the constructor.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        _resolve_params(param_group)
        for param in param_group["params"]:
            if not isinstance(param, Tensor):
                raise TypeError(
                    "optimizer can only optimize Tensors, but one of the params is "
                    f"{type(param).__name__}"
                )
            if not (param.is_leaf or param.retains_grad):
                raise ValueError("can't optimize a non-leaf Tensor")
        param_group["params"] = [
            p if p._stands_for is None else p._stands_for for p in param_group["params"]
        ]
        for name, default in self.defaults.items():
            param_group.setdefault(name, default)
        if len(param_group["params"]) != len(set(param_group["params"])):
            warnings.warn(
                "optimizer contains a parameter group with duplicate parameters; in future, this "
                "will cause an error",
                stacklevel=3,
            )
        self._check_against_groups(param_group)
        self.param_groups.append(param_group)

    def _check_against_groups(self, new: ParamGroup) -> None:
        named = "param_names" in new
        for group in self.param_groups:
            if named != ("param_names" in group):
                raise ValueError(
                    "all optimizer param groups should be with/without names. cannot add param "
                    f"group {'with' if named else 'without'} names to the optimizer"
                )
            if not set(group["params"]).isdisjoint(new["params"]):
                raise ValueError("some parameters appear in more than one parameter group")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Takes away the gradients of all parameters, or sets them to zero."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if set_to_none:
                    p.grad = None
                    continue
                if p.grad.grad_fn is not None:
                    p.grad.detach_()
                else:
                    p.grad.requires_grad_(False)
                p.grad.zero_()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters once.

        Args:
            closure: computes the loss and its gradients anew; what it returns is returned.
        """
        raise NotImplementedError

    # --- state dicts -------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """``{"state": {index: {...}}, "param_groups": [...]}``, as torch lays it out.

        Parameters are numbered in the order of the groups. The tensors are the optimizer's own,
        not copies.
        """
        for pre_hook in self._hooks["state_dict_pre"].values():
            pre_hook(self)
        numbers: dict[Any, int] = {}
        groups, start = [], 0
        for group in self.param_groups:
            for index, p in enumerate(group["params"], start):
                numbers.setdefault(p, index)
            start += len(group["params"])
            packed = {key: value for key, value in group.items() if key != "params"}
            packed["params"] = [numbers[p] for p in group["params"]]
            groups.append(packed)
        packed_state = {
            numbers[key] if isinstance(key, Tensor) else key: value
            for key, value in self.state.items()
        }
        found: StateDict = {"state": packed_state, "param_groups": groups}
        for post_hook in self._hooks["state_dict_post"].values():
            found = _or(post_hook(self, found), found)
        return found

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Takes over the state and the options of a ``state_dict()``.

        Values may be tensors or numpy arrays; they are copied, in the dtype and layout of their
        parameter (``step`` stays float32).

        Raises:
            ValueError: other numbers of groups, or of parameters in a group; or state that does
                not fit a sharded parameter.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._hooks["load_state_dict_pre"].values():
            state_dict = _or(pre_hook(self, state_dict), state_dict)
        saved = copy.deepcopy(state_dict["param_groups"])
        _check_sizes(self.param_groups, saved)
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        numbers = itertools.chain.from_iterable(group["params"] for group in saved)
        by_number = dict(zip(numbers, params, strict=True))
        state: defaultdict[Any, Any] = defaultdict(dict)
        for key, value in state_dict["state"].items():
            if key in by_number:
                state[by_number[key]] = _loaded(by_number[key], value, None)
            else:
                state[key] = value
        for group, new in zip(self.param_groups, saved, strict=True):
            new["params"] = group["params"]
            if "param_names" in group:
                new.setdefault("param_names", group["param_names"])
        self.__setstate__({"state": state, "param_groups": saved})
        for post_hook in self._hooks["load_state_dict_post"].values():
            post_hook(self)

    # --- hooks -------------------------------------------------------------------------------

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """``hook(optimizer, args, kwargs)`` runs before ``step``; may return new ones of both."""
        return self._register("step_pre", hook, False)

    def register_step_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """``hook(optimizer, args, kwargs)`` runs after ``step``."""
        return self._register("step_post", hook, False)

    def register_state_dict_pre_hook(
        self, hook: Callable[..., None], prepend: bool = False
    ) -> RemovableHandle:
        """``hook(optimizer)`` runs before ``state_dict``."""
        return self._register("state_dict_pre", hook, prepend)

    def register_state_dict_post_hook(
        self, hook: Callable[..., StateDict | None], prepend: bool = False
    ) -> RemovableHandle:
        """``hook(optimizer, state_dict)`` runs after ``state_dict``; may return a new one."""
        return self._register("state_dict_post", hook, prepend)

    def register_load_state_dict_pre_hook(
        self, hook: Callable[..., StateDict | None], prepend: bool = False
    ) -> RemovableHandle:
        """``hook(optimizer, state_dict)`` before ``load_state_dict``; may return a new one."""
        return self._register("load_state_dict_pre", hook, prepend)

    def register_load_state_dict_post_hook(
        self, hook: Callable[..., None], prepend: bool = False
    ) -> RemovableHandle:
        """``hook(optimizer)`` runs after ``load_state_dict``."""
        return self._register("load_state_dict_post", hook, prepend)

    def _register(self, kind: str, hook: Callable[..., Any], prepend: bool) -> RemovableHandle:
        hooks = self._hooks[kind]
        handle = add_hook(hooks, hook)
        if prepend:
            hooks.move_to_end(handle.id, last=False)
        return handle


def state_like(param: Any, value: complex, dtype: Any = None) -> Tensor:
    """A tensor full of ``value`` in the shape, dtype and place of ``param``."""
    out = full_like(param, value, dtype=dtype)
    if param._layout is None and not param.is_meta:
        place = param._storage.array.sharding
        if out._storage.array.sharding != place:
            out._storage.array = jax.device_put(out._storage.array, place)
    return out


def _no_hooks() -> dict[str, OrderedDict[int, Callable[..., Any]]]:
    return {kind: OrderedDict() for kind in _HOOK_KINDS}


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` with the step hooks around it; a ``step`` that calls its parent's runs them once."""

    @functools.wraps(step)
    def run(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self._stepping:
            return step(self, *args, **kwargs)
        if thread_state.trace is not None:
            thread_state.trace.abort("steps an optimizer")
        self._stepping = self._opt_called = True
        try:
            for hook in list(self._hooks["step_pre"].values()):
                args, kwargs = _checked_arguments(hook(self, args, kwargs), args, kwargs)
            out = step(self, *args, **kwargs)
        finally:
            self._stepping = False
        for hook in list(self._hooks["step_post"].values()):
            hook(self, args, kwargs)
        return out

    return run


def _checked_arguments(result: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if result is None:
        return args, kwargs
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise RuntimeError(
        f"a step pre-hook must return None or a tuple of (new_args, new_kwargs), but got {result}."
    )


def _or(result: Any, otherwise: Any) -> Any:
    return otherwise if result is None else result


def _resolve_params(group: ParamGroup) -> None:
    """Makes ``group["params"]`` a list of tensors, with names (if any) in ``param_names``."""
    params = group["params"]
    if isinstance(params, set):
        raise TypeError(
            "optimizer parameters need to be organized in ordered collections, but the ordering "
            "of tensors in sets will change between runs. Please use a list instead."
        )
    params = [params] if isinstance(params, Tensor) else list(params)
    names = [p[0] for p in params if isinstance(p, tuple)]
    if names:
        if len(names) != len(params):
            raise ValueError(
                "all optimizer params should be with/without names. Some param names are missing"
            )
        group["param_names"] = names
        params = [p[1] for p in params]
    group["params"] = params


def _check_sizes(groups: list[ParamGroup], saved: list[ParamGroup]) -> None:
    if len(groups) != len(saved):
        raise ValueError("loaded state dict has a different number of parameter groups")
    if any(len(g["params"]) != len(s["params"]) for g, s in zip(groups, saved, strict=True)):
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of "
            "optimizer's group"
        )


def _loaded(param: Any, value: Any, key: Any) -> Any:
    """A copy of ``value``, each tensor in the place that a state tensor of ``param`` has."""
    if isinstance(value, dict):
        return {k: _loaded(param, v, k) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_loaded(param, v, key) for v in value)
    if not hasattr(value, "__array__"):
        return value
    if key == "step":
        return tensor(np.asarray(value), dtype=float32)
    dtype = param.dtype if param.is_floating_point() or param.is_complex() else None
    value = value if isinstance(value, Tensor) else tensor(np.asarray(value))
    if value.shape == param.shape and value._layout in (None, param._layout):
        return _placed(param, value, dtype)
    if value.dim() and (value._layout is not None or param._layout is not None):
        raise ValueError(
            f"loaded optimizer state {key!r} of shape {tuple(value.shape)} does not fit a "
            f"parameter of which this rank holds rows of shape {tuple(param.shape)}; state of "
            "whole parameters is loaded with tensorplay.distributed.checkpoint.state_dict."
            "set_optimizer_state_dict"
        )
    return value.detach().clone()


def _placed(param: Tensor, value: Any, dtype: Any) -> Tensor:
    value = value.detach() if dtype is None else value.detach().to(dtype)
    out = state_like(param, 0, value.dtype)
    with jax.enable_x64(True):
        if value._layout is not None:
            out._write_pieces(jnp.copy(value._storage.held))
        else:
            out._write(jax.device_put(value._read(), out._read().sharding, may_alias=False))
    return out
