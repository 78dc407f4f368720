"""Modules whose activations are computed again in backward.

Source: torch.distributed.algorithms._checkpoint.checkpoint_wrapper.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any

from ....nn._module import Module
from ....nn._parameter import Parameter
from ....utils.checkpoint import checkpoint

_INNER = "_checkpoint_wrapped_module"
_PREFIX = _INNER + "."


class CheckpointImpl(enum.Enum):
    """PyTorch's two implementations; here there is one, which does what both do."""

    REENTRANT = enum.auto()
    NO_REENTRANT = enum.auto()


class CheckpointWrapper(Module):
    """A module that checkpoints the one it wraps.

    Names in ``named_parameters`` and state dicts are those of the module without the wrapper.

    Args:
        checkpoint_fn: calls its first argument with the others; default
            ``tensorplay.utils.checkpoint.checkpoint``. ``checkpoint_fn_kwargs`` are passed to it.
    """

    def __init__(
        self,
        mod: Module,
        checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
        checkpoint_fn: Callable[..., Any] | None = None,
        **checkpoint_fn_kwargs: Any,
    ) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = mod
        self.checkpoint_impl = checkpoint_impl
        self.checkpoint_fn = checkpoint if checkpoint_fn is None else checkpoint_fn
        self.checkpoint_fn_kwargs = checkpoint_fn_kwargs
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint_fn(
            self._checkpoint_wrapped_module, *args, **self.checkpoint_fn_kwargs, **kwargs
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules[_INNER], name)

    def __getitem__(self, key: Any) -> Any:
        return self._checkpoint_wrapped_module[key]  # type: ignore[index]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        for name, param in super().named_parameters(*args, **kwargs):
            yield name.replace(_PREFIX, ""), param


def _without_prefix(module: Module, state_dict: Any, prefix: str, *args: Any) -> None:
    for key in [k for k in state_dict if k.startswith(prefix + _PREFIX)]:
        state_dict[prefix + key.removeprefix(prefix + _PREFIX)] = state_dict.pop(key)


def _with_prefix(module: Module, state_dict: Any, prefix: str, *args: Any) -> None:
    for key in [k for k in state_dict if k.startswith(prefix)]:
        if not key.startswith(prefix + _PREFIX):
            state_dict[prefix + _PREFIX + key.removeprefix(prefix)] = state_dict.pop(key)


def checkpoint_wrapper(
    module: Module,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> Module:
    """The module in a `CheckpointWrapper`."""
    return CheckpointWrapper(module, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs)


def apply_activation_checkpointing(
    model: Module,
    checkpoint_wrapper_fn: Callable[[Module], Module] = checkpoint_wrapper,
    check_fn: Callable[[Module], bool] = lambda _: True,
) -> None:
    """Wraps, in place, each module below ``model`` for which ``check_fn`` holds."""
    for child_name, child in list(model.named_children()):
        apply_activation_checkpointing(child, checkpoint_wrapper_fn, check_fn)
        if check_fn(child):
            setattr(model, child_name, checkpoint_wrapper_fn(child))
