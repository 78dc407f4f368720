"""``scaled_dot_product_attention``."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._ops.precision import dot_precision
from ..._ops.primitive import primitive
from ..._ops.random import dropout_mask
from ..._tensor import Tensor
from .checks import broadcast_shape, c_type

_CUDNN_MAX_HEAD = 128


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    scale: float, causal: bool, q: Any, k: Any, v: Any, bias: Any, mask: Any, kept: Any
) -> Any:
    """Attention of ``q`` (*, L, E), ``k`` (*, S, E) and ``v`` (*, S, V) with the same dims *.

    ``bias`` is added to the scores and ``mask`` says which of them count; ``kept`` is None, or the
    probabilities that dropout keeps and what they are multiplied by; all (*, L, S) or None.
    It runs with the dims * merged, and saves the exponentials of the scores less their maximum, and
    one over the sum of each row.
    """
    return _forward(scale, causal, q, k, v, bias, mask, kept)[0]


def _merged(a: Any) -> Any:
    return None if a is None else a.reshape((math.prod(a.shape[:-2]),) + a.shape[-2:])


def _product(a: Any, b: Any, over: tuple[int, int], dtype: Any = None) -> Any:
    return lax.dot_general(
        a,
        b,
        (((over[0],), (over[1],)), ((0,), (0,))),
        precision=dot_precision(a, b),
        preferred_element_type=dtype,
    )


def _dropped(e: Any, kept: Any) -> Any:
    return e if kept is None else jnp.where(_merged(kept[0]), e * kept[1].astype(e.dtype), 0)


def _forward(
    scale: float, causal: bool, q: Any, k: Any, v: Any, bias: Any, mask: Any, kept: Any
) -> Any:
    scores = _product(_merged(q), _merged(k), (2, 2), jnp.promote_types(q.dtype, np.float32))
    scores = scores * scale
    if bias is not None:
        scores = scores + _merged(bias)
    if causal:
        rows, columns = (lax.broadcasted_iota(np.int32, scores.shape[1:], d) for d in (0, 1))
        scores = jnp.where((columns <= rows)[None], scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(_merged(mask), scores, -jnp.inf)
    top = lax.stop_gradient(jnp.max(scores, axis=2, keepdims=True, initial=-jnp.inf))
    e = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0, top))
    total = jnp.sum(e, axis=2, keepdims=True)
    inverse = jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))
    e = e.astype(v.dtype)
    out = _product(_dropped(e, kept), _merged(v), (2, 1), inverse.dtype) * inverse
    out = out.astype(v.dtype).reshape(q.shape[:-1] + v.shape[-1:])
    bias_dtype = None if bias is None else jnp.zeros((), bias.dtype)
    return out, (q, k, v, bias_dtype, kept, e, inverse, out)


def _backward(scale: float, causal: bool, saved: Any, gradient: Any) -> Any:
    q, k, v, bias_dtype, kept, e, inverse, out = saved
    flat = _merged(gradient)
    d_v = _product(_dropped(e, kept), (flat * inverse).astype(v.dtype), (1, 1))
    d_p = _product(flat, _merged(v), (2, 2), inverse.dtype)
    row = jnp.sum((flat * _merged(out)).astype(inverse.dtype), axis=2, keepdims=True)
    d_scores = e * inverse * (_dropped(d_p, kept) - row)
    d_bias = None
    if bias_dtype is not None:
        d_bias = d_scores.astype(bias_dtype.dtype).reshape(q.shape[:-1] + k.shape[-2:-1])
    d_scores = (d_scores * scale).astype(q.dtype)
    d_q, d_k = _product(d_scores, _merged(k), (2, 1)), _product(d_scores, _merged(q), (1, 1))
    return d_q.reshape(q.shape), d_k.reshape(k.shape), d_v.reshape(v.shape), d_bias, None, None


_attention.defvjp(_forward, _backward)


@primitive("scaled_dot_product_attention")
def _attend(q, k, v, mask, drop, factor, *, scale, causal):
    lead = jnp.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (jnp.broadcast_to(a, lead + a.shape[-2:]) for a in (q, k, v))
    bias = None
    if mask is not None:
        mask = jnp.broadcast_to(mask, lead + (q.shape[-2], k.shape[-2]))
        if mask.dtype != np.bool_:
            bias, mask = mask, None
    kept = None if drop is None else (drop, factor)
    return _attention(scale, causal, q, k, v, bias, mask, kept)


@primitive("scaled_dot_product_flash_attention")
def _cudnn(q, k, v, *, scale, causal):
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
    out = jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=causal, implementation="cudnn"
    )
    return jnp.swapaxes(out, 1, 2)


@primitive("repeat_heads")
def _repeat_heads(x, *, times):
    return jnp.repeat(x, times, axis=-3)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(query @ key.mT * scale + mask) @ value, as in torch.

    Args:
        query: (N, ..., Hq, L, E).
        key: (N, ..., H, S, E).
        value: (N, ..., H, S, Ev).
        attn_mask: broadcasts to (N, ..., Hq, L, S); bool (True takes part) or floating (added to
            the scores). A row where nothing takes part gives zeros.
        dropout_p: applied always; pass 0 in evaluation.
        is_causal: position i attends to positions 0 .. i.
        scale: default 1 / sqrt(E).
        enable_gqa: Hq may be a multiple of H; heads of key and value are then repeated.

    On CUDA, float16 and bfloat16 without mask and dropout run as cuDNN flash attention, which has
    no second derivative (nor has torch's).

    Raises:
        RuntimeError: shapes or dtypes do not fit.
    """
    _check(query, key, value, attn_mask)
    if not 0 <= dropout_p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p:g}")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if _cudnn_runs(query, key, value, attn_mask, dropout_p, enable_gqa):
        return _cudnn(query, key, value, scale=scale, causal=bool(is_causal))
    if enable_gqa:
        key, value = _with_all_heads(query, key), _with_all_heads(query, value)
    lead = broadcast_shape(broadcast_shape(query.shape[:-2], key.shape[:-2]), value.shape[:-2])
    sizes = lead + (query.shape[-2], key.shape[-2])
    if attn_mask is not None and broadcast_shape(sizes, attn_mask.shape) != sizes:
        raise RuntimeError(
            f"attn_mask of shape {list(attn_mask.shape)} does not broadcast to {list(sizes)}"
        )
    drop, factor = None, None
    if dropout_p > 0:
        drop = dropout_mask(sizes, 1 - dropout_p, np.dtype(bool))
        factor = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0
    return _attend(query, key, value, attn_mask, drop, factor, scale=scale, causal=bool(is_causal))


def _check(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> None:
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(
            "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: "
            f"{query.dim()} key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    if not query.dtype is key.dtype is value.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{c_type(query.dtype)} key.dtype: {c_type(key.dtype)} and value.dtype: "
            f"{c_type(value.dtype)} instead."
        )
    if not query.is_floating_point():
        raise RuntimeError(f"expected a floating dtype but found {c_type(query.dtype)}")
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            "query and key must have the same last size, and key and value the same number of "
            f"positions (dim -2), but got query {list(query.shape)}, key {list(key.shape)} and "
            f"value {list(value.shape)}"
        )
    if attn_mask is None or attn_mask.dtype.name in ("bool", "float32", query.dtype.name):
        return
    raise RuntimeError(
        "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
        f"attn_mask.dtype: {c_type(attn_mask.dtype)} and  query.dtype: {c_type(query.dtype)} "
        "instead."
    )


def _with_all_heads(query: Tensor, x: Tensor) -> Tensor:
    heads, own = query.shape[-3], x.shape[-3]
    if heads % own:
        raise RuntimeError(
            "Number of heads in key and value must divide the number of heads in query, but got "
            f"{own} and {heads}"
        )
    return x if heads == own else _repeat_heads(x, times=heads // own)


def _cudnn_runs(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, gqa: bool
) -> bool:
    """Whether cuDNN's kernel takes these tensors; it repeats heads by itself."""
    if mask is not None or p > 0 or query.dtype.itemsize != 2 or query.dim() != 4:
        return False
    if query.device.type != "cuda":
        return False
    head, heads, own = query.shape[-1], query.shape[1], key.shape[1]
    same = query.shape[0] == key.shape[0] == value.shape[0] and own == value.shape[1]
    fits = head == value.shape[-1] and head % 8 == 0 and head <= _CUDNN_MAX_HEAD
    return same and fits and (heads == own or (gqa and heads % own == 0))
