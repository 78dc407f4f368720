"""What the rules share: pieces of arithmetic, and the checks of their options."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from .._tensor import Tensor
from ._optimizer import ParamGroup


def ratio(numerator: Any, denominator: Any, guarded: bool) -> Any:
    """``numerator / denominator``; where ``guarded``, 0 / 0 is 0, which keeps padding zero."""
    if not guarded:
        return numerator / denominator
    empty = (numerator == 0) & (denominator == 0)
    return numerator / jnp.where(empty, 1, denominator)


def needs_guard(group: ParamGroup) -> bool:
    """Whether ``eps`` is no help against 0 / 0 in the padding of a sharded parameter."""
    vanishes = bool(float(group["eps"]) < np.finfo(np.float32).tiny)
    return vanishes and any(p._layout is not None for p in group["params"])


def check_not_negative(**values: Any) -> None:
    """Raises ValueError where a value is negative; ``lr`` may be a tensor of one element."""
    names = {"lr": "learning rate", "eps": "epsilon value"}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element")
        if not value >= 0.0:
            raise ValueError(f"Invalid {names.get(name, name + ' value')}: {value}")


def check_implementation(
    foreach: bool | None = None, fused: bool | None = None, differentiable: bool = False
) -> None:
    """torch's choices of implementation: all parameters are always updated by one program.

    Raises:
        RuntimeError: choices that exclude each other.
        NotImplementedError: ``differentiable``.
    """
    if fused and differentiable:
        raise RuntimeError("`fused` does not support `differentiable`")
    if fused and foreach:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    if differentiable:
        raise NotImplementedError(
            "differentiable=True: gradients do not flow through optimizer.step(); write the "
            "update with tensor ops to differentiate it"
        )
