"""Gradient clipping.

The norm is one compiled program for each set of ranks (or devices) that gradients lie on, and so
is the scaling. A sharded gradient counts with its own piece; the sums are then added up over the
ranks.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._ops.creation import tensor
from ..._tensor import Tensor, wrap
from ...autograd import no_grad
from .._functional.numerics import wide
from ._held import beside, by_devices, held, replace

Tensors = Tensor | Iterable[Tensor]


def _listed(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _gradients(parameters: Tensors) -> list[Tensor]:
    return [p.grad for p in _listed(parameters) if p.grad is not None]


@functools.partial(jax.jit, static_argnums=1)
def _partial_norm(arrays: list[Any], p: float) -> Any:
    """The sum of |g|**p, or the largest |g| for p = inf."""
    arrays = [wide(a) for a in arrays]
    if p == float("inf"):
        tops = [jnp.max(jnp.abs(a), initial=0) for a in arrays]
        return functools.reduce(jnp.maximum, tops)
    powers = [a * a if p == 2 else jnp.abs(a) ** p for a in arrays]
    return functools.reduce(jnp.add, [jnp.sum(power) for power in powers])


@functools.partial(jax.jit, static_argnums=(1, 2))
def _total(partials: list[Any], p: float, dtype: Any) -> Any:
    if p == float("inf"):
        return functools.reduce(jnp.maximum, partials).astype(dtype)
    return (functools.reduce(jnp.add, partials) ** (1 / p)).astype(dtype)


@jax.jit
def _scaled(arrays: list[Any], total_norm: Any, max_norm: Any) -> list[Any]:
    factor = jnp.minimum(max_norm / (wide(total_norm) + 1e-6), 1)
    return [(wide(a) * factor).astype(a.dtype) for a in arrays]


@jax.jit
def _limited(arrays: list[Any], limit: Any) -> list[Any]:
    return [jnp.clip(a, -limit.astype(a.dtype), limit.astype(a.dtype)) for a in arrays]


@no_grad()
def get_total_norm(
    tensors: Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The ``norm_type``-norm of all tensors as if they were one vector; 0-d.

    Args:
        tensors: sharded ones count as a whole; every rank gets the same norm.
        norm_type: positive, or inf.
        foreach: accepted for torch's sake; there is one way to run.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is true.
        ValueError: ``norm_type`` is not positive.
    """
    found, p = _listed(tensors), float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type must be positive or inf, but got {norm_type}")
    if not found:
        return tensor(0.0)
    groups: dict[Any, list[Tensor]] = {}
    for x in found:
        groups.setdefault(None if x._layout is None else x._layout.group_key, []).append(x)
    with jax.enable_x64(True):
        partials = [
            _over_ranks(_partial_norm([held(x) for x in group], p), group[0]._layout, p)
            for group in groups.values()
        ]
        dtype = functools.reduce(jnp.promote_types, [x.dtype.numpy for x in found])
        total = wrap(_total(partials, p, np.dtype(dtype)))
    if error_if_nonfinite and not total.isfinite().item():  # type: ignore[attr-defined]
        raise RuntimeError(
            f"The total norm of order {p} for gradients from `parameters` is non-finite, so it "
            "cannot be clipped. To disable this error and scale the gradients by the non-finite "
            "norm anyway, set `error_if_nonfinite=False`"
        )
    return total


def _over_ranks(partial: Any, layout: Any, p: float) -> Any:
    if layout is None:
        return partial
    return layout.max_over_ranks(partial) if p == float("inf") else layout.sum_over_ranks(partial)


@no_grad()
def clip_grads_with_norm_(
    parameters: Tensors, max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Multiplies all gradients by ``min(max_norm / (total_norm + 1e-6), 1)``, in place."""
    grads = _gradients(parameters)
    with jax.enable_x64(True):
        for together in by_devices(grads):
            arrays = [held(g) for g in together]
            total = beside(total_norm._read(), arrays[0])
            replace(together, _scaled(arrays, total, float(max_norm)))


def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales all gradients down, in place, so that their total norm is at most ``max_norm``.

    Returns the total norm from before, 0-d. Arguments and errors as for ``get_total_norm``.
    """
    found = _listed(parameters)
    if isinstance(parameters, types.GeneratorType) and not found:
        warnings.warn(
            "`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=2
        )
    total = get_total_norm(_gradients(found), norm_type, error_if_nonfinite, foreach)
    clip_grads_with_norm_(found, max_norm, total, foreach)
    return total


@no_grad()
def clip_grad_value_(parameters: Tensors, clip_value: float, foreach: bool | None = None) -> None:
    """Limits the elements of all gradients to [-clip_value, clip_value], in place."""
    with jax.enable_x64(True):
        for together in by_devices(_gradients(parameters)):
            replace(together, _limited([held(g) for g in together], float(clip_value)))
