"""State dicts of modules: collecting and loading, with torch's messages."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .._tensor import Tensor, state_changes
from ..autograd import no_grad
from ._parameter import Parameter

if TYPE_CHECKING:
    from ._module import Module

EXTRA_STATE_KEY = "_extra_state"


class IncompatibleKeys(namedtuple("IncompatibleKeys", ["missing_keys", "unexpected_keys"])):
    """What ``load_state_dict`` found missing and unexpected."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self.missing_keys and not self.unexpected_keys:
            return "<All keys matched successfully>"
        return super().__repr__()


def collect(module: Module, destination: Any, prefix: str, keep_vars: bool) -> Any:
    """Fills ``destination`` with the state of ``module`` and its children."""
    metadata = {"version": getattr(module, "_version", 1)}
    if hasattr(destination, "_metadata"):
        destination._metadata[prefix[:-1]] = metadata
    for hook in module._state_dict_pre_hooks.values():
        hook(module, prefix, keep_vars)
    module._save_to_state_dict(destination, prefix, keep_vars)
    for name, child in module._modules.items():
        if child is not None:
            child.state_dict(
                destination=destination, prefix=prefix + name + ".", keep_vars=keep_vars
            )
    for hook in module._state_dict_hooks.values():
        hook(module, destination, prefix, metadata)
    return destination


def _overrides_extra_state(module: Module) -> bool:
    return "get_extra_state" in {
        name for cls in type(module).__mro__ if cls.__name__ != "Module" for name in vars(cls)
    }


def collect_own(module: Module, destination: Any, prefix: str, keep_vars: bool) -> None:
    """The module's own parameters and persistent buffers."""
    for name, value in own_state(module).items():
        destination[prefix + name] = value if keep_vars else value.detach()
    if _overrides_extra_state(module):
        destination[prefix + EXTRA_STATE_KEY] = module.get_extra_state()


def own_state(module: Module) -> dict[str, Tensor]:
    """Name to parameter or persistent buffer."""
    buffers = {
        n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set
    }
    found = {**module._parameters, **buffers}
    return {n: v for n, v in found.items() if v is not None}


def load(module: Module, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
    """Loads the whole tree; see ``Module.load_state_dict``."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    values = OrderedDict(state_dict)
    metadata = getattr(state_dict, "_metadata", None)

    def visit(current: Module, part: dict[str, Any], prefix: str) -> None:
        local = {} if metadata is None else metadata.get(prefix[:-1], {})
        if assign:
            local["assign_to_params_buffers"] = True
        for hook in current._load_state_dict_pre_hooks.values():
            hook(current, part, prefix, local, True, missing, unexpected, errors)
        current._load_from_state_dict(part, prefix, local, True, missing, unexpected, errors)
        for name, child in current._modules.items():
            if child is not None:
                below = prefix + name + "."
                visit(child, {k: v for k, v in part.items() if k.startswith(below)}, below)
        for hook in current._load_state_dict_post_hooks.values():
            hook(current, IncompatibleKeys(missing, unexpected))

    visit(module, values, "")
    if strict:
        _report_keys(missing, unexpected, errors)
    if errors:
        listed = "\n\t".join(errors)
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{listed}"
        )
    return IncompatibleKeys(missing, unexpected)


def _report_keys(missing: list[str], unexpected: list[str], errors: list[str]) -> None:
    for what, keys in (("Missing", missing), ("Unexpected", unexpected)):
        if keys:
            quoted = ", ".join(f'"{k}"' for k in keys)
            errors.insert(0, f"{what} key(s) in state_dict: {quoted}. ")


def load_own(
    module: Module,
    state_dict: Any,
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Loads the module's own parameters and persistent buffers."""
    assign = local_metadata.get("assign_to_params_buffers", False)
    state = own_state(module)
    for name, value in state.items():
        key = prefix + name
        if key not in state_dict:
            if strict:
                missing_keys.append(key)
            continue
        fault = _load_value(module, name, value, key, state_dict[key], assign)
        if fault:
            error_msgs.append(fault)
    extra_key = prefix + EXTRA_STATE_KEY
    if _overrides_extra_state(module):
        if extra_key in state_dict:
            module.set_extra_state(state_dict[extra_key])
        elif strict:
            missing_keys.append(extra_key)
    if strict:
        unexpected_keys.extend(
            key
            for key in state_dict
            if key.startswith(prefix) and _is_unexpected(module, key[len(prefix) :], state)
        )


def _is_unexpected(module: Module, rest: str, own: dict[str, Tensor]) -> bool:
    if rest == EXTRA_STATE_KEY:
        return not _overrides_extra_state(module)
    first, _, deeper = rest.partition(".")
    return first not in module._modules if deeper else first not in own


def _load_value(
    module: Module, name: str, value: Tensor, key: str, given: Any, assign: bool
) -> str | None:
    """Copies or assigns one entry; returns what is wrong with it, if anything."""
    if not isinstance(given, Tensor):
        return (
            f'While copying the parameter named "{key}", expected Tensor or Tensor-like object '
            f"from checkpoint but received {type(given)}"
        )
    if (value._layout is not None or given._layout is not None) and value._layout != given._layout:
        layout = value._layout if value._layout is not None else given._layout
        return layout.load_mismatch(key, value, given)  # type: ignore[no-any-return]
    if given.shape != value.shape:
        return (
            f"size mismatch for {key}: copying a param with shape {given.shape} from checkpoint, "
            f"the shape in current model is {value.shape}."
        )
    if value.is_meta and not given.is_meta and not assign:
        return (
            f"While copying the parameter named {key}: copying from a non-meta parameter in the "
            "checkpoint to a meta parameter in the current module, which is a no-op. (Did you mean "
            "to pass `assign=True` to assign items in the state dictionary to their corresponding "
            "key in the module instead of copying them in place?)"
        )
    try:
        with no_grad():
            if assign:
                _assign(module, name, value, given)
            else:
                value.copy_(given)  # type: ignore[attr-defined]
    except Exception as error:
        return (
            f'While copying the parameter named "{key}", whose dimensions in the model are '
            f"{value.shape} and whose dimensions in the checkpoint are {given.shape}, an exception "
            f"occurred : {error.args}."
        )
    return None


def _assign(module: Module, name: str, value: Tensor, given: Tensor) -> None:
    if isinstance(value, Parameter):
        if not isinstance(given, Parameter):
            given = Parameter(given, requires_grad=value.requires_grad)
        else:
            given.requires_grad_(value.requires_grad)
        module._parameters[name] = given
    else:
        module._buffers[name] = given
    state_changes.bump()
