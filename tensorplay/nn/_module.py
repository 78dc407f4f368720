"""Module: the base class of all models, as ``torch.nn.Module``."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from .. import _dtypes
from .._device import device as Device
from .._dtypes import dtype as Dtype
from .._graph import RemovableHandle, add_hook
from .._ops.creation import empty_like
from .._state import state
from .._tensor import Tensor, state_changes
from . import _module_state
from ._backward_hooks import BackwardHooks
from ._module_state import IncompatibleKeys
from ._parameter import Buffer, Parameter

M = TypeVar("M", bound="Module")
Hooks = dict[int, Any]

_global_forward_pre_hooks: Hooks = {}
_global_forward_hooks: Hooks = {}
_global_backward_hooks: Hooks = {}


def _changed() -> None:
    state_changes.bump()


def _register(hooks: Hooks, hook: Any, prepend: bool = False) -> RemovableHandle:
    handle = add_hook(hooks, hook, _changed)
    if prepend:
        first = hooks.pop(handle.id)
        rest = dict(hooks)
        hooks.clear()
        hooks[handle.id] = first
        hooks.update(rest)
    _changed()
    return handle


def global_call_hooks() -> tuple[Any, ...]:
    """The hooks that run around the call of every module."""
    registries = (_global_forward_pre_hooks, _global_forward_hooks, _global_backward_hooks)
    return tuple(tuple(hooks.values()) for hooks in registries)


def register_module_forward_pre_hook(hook: Callable[..., Any]) -> RemovableHandle:
    """``hook(module, args)`` runs before the forward of every module."""
    return _register(_global_forward_pre_hooks, (hook, False))


def register_module_forward_hook(
    hook: Callable[..., Any], *, with_kwargs: bool = False, always_call: bool = False
) -> RemovableHandle:
    """``hook(module, args, output)`` runs after the forward of every module."""
    return _register(_global_forward_hooks, (hook, with_kwargs, always_call))


def register_module_full_backward_hook(hook: Callable[..., Any]) -> RemovableHandle:
    """``hook(module, grad_input, grad_output)`` runs in the backward of every module."""
    return _register(_global_backward_hooks, hook)


class Module:
    """Base class of all models: holds parameters, buffers and submodules by name.

    Assigning a ``Parameter``, a ``Buffer`` or a ``Module`` as an attribute registers it. Subclasses
    define ``forward``; calling the module runs it with the module's hooks.
    """

    training: bool
    _parameters: dict[str, Parameter | None]
    _buffers: dict[str, Tensor | None]
    _modules: dict[str, Module | None]
    call_super_init = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        set_ = super().__setattr__
        set_("training", True)
        for name in _OWN_DICTS:
            set_(name, {})
        set_("_non_persistent_buffers_set", set())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f'Module [{type(self).__name__}] is missing the required "forward" function'
        )

    # --- attributes --------------------------------------------------------------------------

    def _note_change(self, name: str) -> None:
        if state.trace is not None:
            state.trace.on_setattr(self, name)
        _changed()

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if _holds(own, name, value):
            return
        self._note_change(name)
        parameters = own.get("_parameters")
        if isinstance(value, Parameter):
            _require_init(parameters, "parameters")
            self._forget(name)
            self.register_parameter(name, value)
        elif isinstance(value, Module):
            _require_init(own.get("_modules"), "module")
            self._forget(name, keep="_modules")
            own["_modules"][name] = value
        elif isinstance(value, Buffer):
            _require_init(own.get("_buffers"), "buffers")
            self._forget(name, keep="_buffers")
            self.register_buffer(name, value, value.persistent)
        else:
            self._set_other(name, value)

    def _set_other(self, name: str, value: Any) -> None:
        own = self.__dict__
        for kind, wanted in (("_parameters", "Parameter"), ("_modules", "Module")):
            if name in own.get(kind, ()):
                if value is not None:
                    raise TypeError(
                        f"cannot assign '{_type_name(value)}' as "
                        f"{kind[1:-1].replace('module', 'child module')} '{name}' "
                        f"(tensorplay.nn.{wanted} or None expected)"
                    )
                own[kind][name] = None
                return
        if name in own.get("_buffers", ()):
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(
                    f"cannot assign '{_type_name(value)}' as buffer '{name}' "
                    "(tensorplay.Tensor or None expected)"
                )
            own["_buffers"][name] = value
            return
        super().__setattr__(name, value)

    def _forget(self, name: str, keep: str | None = None) -> None:
        self.__dict__.pop(name, None)
        for kind in ("_parameters", "_buffers", "_modules"):
            if kind != keep:
                self.__dict__.get(kind, {}).pop(name, None)
        self.__dict__.get("_non_persistent_buffers_set", set()).discard(name)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        for kind in ("_parameters", "_buffers", "_modules"):
            if kind in own and name in own[kind]:
                return own[kind][name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __delattr__(self, name: str) -> None:
        self._note_change(name)
        for kind in ("_parameters", "_buffers", "_modules"):
            if name in self.__dict__.get(kind, ()):
                del self.__dict__[kind][name]
                self._non_persistent_buffers_set.discard(name)
                return
        super().__delattr__(name)

    def __dir__(self) -> list[str]:
        names = set(dir(type(self))) | set(self.__dict__)
        names.update(self._parameters, self._buffers, self._modules)
        return sorted(n for n in names if not n[0].isdigit())

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__dict__.update(saved)

    # --- registration ------------------------------------------------------------------------

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Adds a parameter (or None) under ``name``."""
        _require_init(self.__dict__.get("_parameters"), "parameter")
        self._note_change(name)
        _check_name(self, name, "parameter", "_parameters")
        if param is not None and not isinstance(param, Parameter):
            raise TypeError(
                f"cannot assign '{_type_name(param)}' object to parameter '{name}' "
                "(tensorplay.nn.Parameter or None required)"
            )
        if param is not None and param.grad_fn is not None:
            raise ValueError(
                f"Cannot assign non-leaf Tensor to parameter '{name}'. Model parameters must be "
                f"created explicitly. To express '{name}' as a function of another Tensor, compute "
                "the value in the forward() method."
            )
        self._parameters[name] = param

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Adds a tensor that is no parameter; part of the state dict if ``persistent``."""
        _require_init(self.__dict__.get("_buffers"), "buffer")
        self._note_change(name)
        _check_name(self, name, "buffer", "_buffers")
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(
                f"cannot assign '{_type_name(tensor)}' object to buffer '{name}' "
                "(tensorplay Tensor or None required)"
            )
        self._buffers[name] = tensor
        (
            self._non_persistent_buffers_set.discard
            if persistent
            else self._non_persistent_buffers_set.add
        )(name)

    def register_module(self, name: str, module: Module | None) -> None:
        """Adds a child module (or None) under ``name``."""
        self._note_change(name)
        _check_name(self, name, "module", "_modules")
        if module is not None and not isinstance(module, Module):
            raise TypeError(f"{_type_name(module)} is not a Module subclass")
        self._modules[name] = module

    add_module = register_module

    # --- calling -----------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (
            self._forward_pre_hooks
            or self._forward_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
            or _global_forward_pre_hooks
            or _global_forward_hooks
            or _global_backward_hooks
        ):
            return self.forward(*args, **kwargs)
        return self._call_with_hooks(args, kwargs)

    def _call_with_hooks(self, args: Any, kwargs: Any) -> Any:
        called: set[int] = set()
        try:
            return self._forward_and_hooks(args, kwargs, called)
        except Exception:
            self._run_always_called(args, kwargs, called)
            raise

    def _forward_and_hooks(self, args: Any, kwargs: Any, called: set[int]) -> Any:
        pre_hooks = [*_global_forward_pre_hooks.values(), *self._forward_pre_hooks.values()]
        for hook, with_kwargs in pre_hooks:
            args, kwargs = _run_pre_hook(self, hook, with_kwargs, args, kwargs)
        backward = self._backward_hooks_of_call()
        if backward is not None:
            args = backward.watch_inputs(args)
        result = self.forward(*args, **kwargs)
        for key, (hook, with_kwargs, _) in [
            *_global_forward_hooks.items(),
            *self._forward_hooks.items(),
        ]:
            called.add(key)
            replaced = hook(self, args, kwargs, result) if with_kwargs else hook(self, args, result)
            if replaced is not None:
                result = replaced
        return result if backward is None else backward.watch_outputs(result)

    def _run_always_called(self, args: Any, kwargs: Any, called: set[int]) -> None:
        for key, (hook, with_kwargs, always) in [
            *_global_forward_hooks.items(),
            *self._forward_hooks.items(),
        ]:
            if always and key not in called:
                hook(self, args, kwargs, None) if with_kwargs else hook(self, args, None)

    def _backward_hooks_of_call(self) -> BackwardHooks | None:
        hooks = [*_global_backward_hooks.values(), *self._backward_hooks.values()]
        pre_hooks = list(self._backward_pre_hooks.values())
        if not (hooks or pre_hooks):
            return None
        if state.trace is not None:
            state.trace.abort("has backward hooks")
        return BackwardHooks(self, hooks, pre_hooks)

    def register_forward_pre_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """``hook(module, args[, kwargs])`` runs before forward; may return new arguments."""
        return _register(self._forward_pre_hooks, (hook, with_kwargs), prepend)

    def register_forward_hook(
        self,
        hook: Callable[..., Any],
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> RemovableHandle:
        """``hook(module, args[, kwargs], output)`` runs after forward; may return a new output."""
        return _register(self._forward_hooks, (hook, with_kwargs, always_call), prepend)

    def register_full_backward_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemovableHandle:
        """``hook(module, grad_input, grad_output)``; may return a new ``grad_input``."""
        return _register(self._backward_hooks, hook, prepend)

    register_backward_hook = register_full_backward_hook

    def register_full_backward_pre_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemovableHandle:
        """``hook(module, grad_output)``; may return a new ``grad_output``."""
        return _register(self._backward_pre_hooks, hook, prepend)

    def register_state_dict_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """``hook(module, prefix, keep_vars)`` runs before the module's state is collected."""
        return _register(self._state_dict_pre_hooks, hook)

    def register_state_dict_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """``hook(module, state_dict, prefix, local_metadata)`` runs after; edits in place."""
        return _register(self._state_dict_hooks, hook)

    _register_state_dict_hook = register_state_dict_post_hook

    def register_load_state_dict_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """``hook(module, state_dict, prefix, ...)`` runs before the module loads."""
        return _register(self._load_state_dict_pre_hooks, hook)

    def register_load_state_dict_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """``hook(module, incompatible_keys)`` runs after the module and its children loaded."""
        return _register(self._load_state_dict_post_hooks, hook)

    # --- traversal ---------------------------------------------------------------------------

    def named_modules(
        self, memo: set[Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Module]]:
        """Every module of the tree with its full name, this one first."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, child in self._modules.items():
            if child is not None:
                below = prefix + ("." if prefix else "") + name
                yield from child.named_modules(memo, below, remove_duplicate)

    def modules(self) -> Iterator[Module]:
        """Every module of the tree, once."""
        for _, module in self.named_modules():
            yield module

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The direct children with their names, each once."""
        seen = set()
        for name, child in self._modules.items():
            if child is not None and child not in seen:
                seen.add(child)
                yield name, child

    def children(self) -> Iterator[Module]:
        """The direct children."""
        for _, child in self.named_children():
            yield child

    def _named_members(self, kind: str, prefix: str, recurse: bool, unique: bool) -> Iterator[Any]:
        modules = (
            self.named_modules(prefix=prefix, remove_duplicate=unique)
            if recurse
            else [(prefix, self)]
        )
        seen: set[int] = set()
        for module_prefix, module in modules:
            for name, member in getattr(module, kind).items():
                if member is None or id(member) in seen:
                    continue
                if unique:
                    seen.add(id(member))
                yield module_prefix + ("." if module_prefix else "") + name, member

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Parameters with their full names; a tied one once, under its first name."""
        return self._named_members("_parameters", prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """The parameters, each once."""
        for _, parameter in self.named_parameters(recurse=recurse):
            yield parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers with their full names."""
        return self._named_members("_buffers", prefix, recurse, remove_duplicate)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """The buffers, each once."""
        for _, buffer in self.named_buffers(recurse=recurse):
            yield buffer

    def get_submodule(self, target: str) -> Module:
        """The module of that full name; AttributeError if there is none."""
        module: Any = self
        for part in target.split(".") if target else ():
            if not hasattr(module, part):
                raise AttributeError(f"{type(module).__name__} has no attribute `{part}`")
            module = getattr(module, part)
            if not isinstance(module, Module):
                raise AttributeError(f"`{part}` is not an nn.Module")
        return module  # type: ignore[no-any-return]

    def get_parameter(self, target: str) -> Parameter:
        """The parameter of that full name; AttributeError if there is none."""
        path, _, name = target.rpartition(".")
        found = getattr(self.get_submodule(path), name)
        if not isinstance(found, Parameter):
            raise AttributeError(f"`{name}` is not an nn.Parameter")
        return found

    def get_buffer(self, target: str) -> Tensor:
        """The buffer of that full name; AttributeError if there is none."""
        path, _, name = target.rpartition(".")
        module = self.get_submodule(path)
        if name not in module._buffers:
            raise AttributeError(f"`{name}` is not a buffer")
        return module._buffers[name]  # type: ignore[return-value]

    # --- changing all of it ------------------------------------------------------------------

    def apply(self: M, fn: Callable[[Module], None]) -> M:
        """Calls ``fn`` on every module of the tree, children first."""
        for child in self.children():
            child.apply(fn)
        fn(self)
        return self

    def _apply(self: M, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> M:
        if recurse:
            for child in self.children():
                child._apply(fn)
        for param in self._parameters.values():
            if param is None:
                continue
            param.data = fn(param.data)
            if param._grad is not None:
                param._grad.data = fn(param._grad.data)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        _changed()
        return self

    def to(self: M, *args: Any, **kwargs: Any) -> M:
        """Casts floating parameters and buffers, or moves all, in place; as ``Module.to``."""
        dtype, device = _parse_to(args, kwargs)
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            raise TypeError(
                "nn.Module.to only accepts floating point or complex dtypes, but got desired "
                f"dtype={dtype}"
            )

        def convert(t: Tensor) -> Tensor:
            casts = dtype is not None and (t.is_floating_point() or t.is_complex())
            return t.to(device=device, dtype=dtype if casts else None)  # type: ignore[attr-defined]

        return self._apply(convert)

    def _cast(self: M, dtype: Dtype) -> M:
        return self._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)  # type: ignore[attr-defined]

    def float(self: M) -> M:
        """Floating parameters and buffers to float32."""
        return self._cast(_dtypes.float32)

    def double(self: M) -> M:
        """Floating parameters and buffers to float64."""
        return self._cast(_dtypes.float64)

    def half(self: M) -> M:
        """Floating parameters and buffers to float16."""
        return self._cast(_dtypes.float16)

    def bfloat16(self: M) -> M:
        """Floating parameters and buffers to bfloat16."""
        return self._cast(_dtypes.bfloat16)

    def cpu(self: M) -> M:
        """Parameters and buffers to host memory."""
        return self.to("cpu")

    def cuda(self: M, device: Any = None) -> M:
        """Parameters and buffers to a CUDA GPU."""
        return self.to("cuda" if device is None else device)

    def to_empty(self: M, *, device: Any, recurse: bool = True) -> M:
        """Parameters and buffers on ``device`` with values that are not to be relied on."""
        return self._apply(lambda t: empty_like(t, device=device), recurse=recurse)

    def train(self: M, mode: bool = True) -> M:
        """Sets ``training`` in the whole tree."""
        if not isinstance(mode, bool):
            raise ValueError("training mode is expected to be boolean")
        self.training = mode
        for child in self.children():
            child.train(mode)
        return self

    def eval(self: M) -> M:
        """``train(False)``."""
        return self.train(False)

    def requires_grad_(self: M, requires_grad: bool = True) -> M:
        """Sets ``requires_grad`` of every parameter."""
        for param in self.parameters():
            param.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of every parameter."""
        for param in self.parameters():
            if param.grad is not None:
                if set_to_none:
                    param.grad = None
                else:
                    param.grad.detach_().zero_()  # type: ignore[attr-defined]

    def share_memory(self: M) -> M:
        """Returns the module: jax arrays are immutable, so processes cannot share them."""
        return self

    # --- state dicts -------------------------------------------------------------------------

    def state_dict(
        self,
        *args: Any,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> Any:
        """An OrderedDict of every parameter and persistent buffer by full name."""
        given = [*args, *(destination, prefix, keep_vars)[len(args) :]]
        destination, prefix, keep_vars = given
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()
        return _module_state.collect(self, destination, prefix, keep_vars)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        _module_state.collect_own(self, destination, prefix, keep_vars)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Copies values from ``state_dict`` into this tree.

        Args:
            strict: raise where keys are missing or unexpected.
            assign: take the given tensors themselves in place of copying their values.

        Returns:
            (missing_keys, unexpected_keys)

        Raises:
            RuntimeError: sizes differ, or keys do under ``strict``; all faults in one message.
        """
        return _module_state.load(self, state_dict, strict, assign)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        _module_state.load_own(
            self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys,
            error_msgs,
        )  # fmt: skip

    def get_extra_state(self) -> Any:
        raise RuntimeError(
            "Reached a code path in Module.get_extra_state() that should never be called."
        )

    def set_extra_state(self, state: Any) -> None:
        raise RuntimeError(
            "Reached a code path in Module.set_extra_state() that should never be called."
        )

    # --- printing ----------------------------------------------------------------------------

    def extra_repr(self) -> str:
        """What to print of the module's own settings."""
        return ""

    def _get_name(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        extra = self.extra_repr()
        lines = extra.split("\n") if extra else []
        children = [f"({n}): " + _indent(repr(c)) for n, c in self._modules.items()]
        if not children and len(lines) <= 1:
            return f"{self._get_name()}({extra})"
        return f"{self._get_name()}(\n  " + "\n  ".join(lines + children) + "\n)"


_OWN_DICTS = (
    "_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks",
    "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def _holds(own: dict[str, Any], name: str, value: Any) -> bool:
    """Whether the attribute is that very object already, as after ``self.buffer += 1``."""
    if name in own:
        return own[name] is value
    return any(
        name in own.get(kind, ()) and own[kind][name] is value
        for kind in ("_buffers", "_parameters", "_modules")
    )


def _run_pre_hook(module: Module, hook: Any, with_kwargs: bool, args: Any, kwargs: Any) -> Any:
    replaced = hook(module, args, kwargs) if with_kwargs else hook(module, args)
    if replaced is None:
        return args, kwargs
    if not with_kwargs:
        return (replaced if isinstance(replaced, tuple) else (replaced,)), kwargs
    if isinstance(replaced, tuple) and len(replaced) == 2:
        return replaced
    raise RuntimeError(
        "forward pre-hook must return None or a tuple of (new_args, new_kwargs), "
        f"but got {replaced}."
    )


def _require_init(registry: Any, what: str) -> None:
    if registry is None:
        raise AttributeError(f"cannot assign {what} before Module.__init__() call")


def _check_name(module: Module, name: str, what: str, kind: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{what} name should be a string. Got {_type_name(name)}")
    if "." in name:
        raise KeyError(f'{what} name can\'t contain "."')
    if name == "":
        raise KeyError(f'{what} name can\'t be empty string ""')
    if hasattr(module, name) and name not in getattr(module, kind):
        raise KeyError(f"attribute '{name}' already exists")


def _type_name(value: Any) -> str:
    return type(value).__name__


def _parse_to(args: Any, kwargs: Any) -> tuple[Any, Any]:
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    for arg in args:
        if isinstance(arg, Dtype):
            dtype = arg
        elif isinstance(arg, Tensor):
            dtype, device = arg.dtype, arg.device
        elif isinstance(arg, (str, Device)):
            device = arg
    return dtype, None if device is None else Device(device)


def _indent(text: str) -> str:
    first, *rest = text.split("\n")
    return "\n".join(itertools.chain([first], ("  " + line for line in rest)))
