"""Look-up tables and one-hot codes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._ops.inplace import assign
from ..._ops.primitive import primitive
from ..._state import state
from ..._tensor import Tensor
from ...autograd import no_grad
from .checks import scalar_type
from .numerics import saving_inputs, wide


@jax.custom_vjp
def _with_scaled_gradient(x: Any, scale: Any) -> Any:
    return x


_with_scaled_gradient.defvjp(lambda x, scale: (x, scale), lambda scale, g: (g * scale, None))


@primitive("embedding")
@saving_inputs
def _embedding(weight, index, *, padding_idx, by_frequency):
    rows = weight.at[index].get(mode="fill", wrap_negative_indices=False)
    if by_frequency:
        counts = jnp.zeros(weight.shape[0], weight.dtype).at[index.reshape(-1)].add(1)
        rows = _with_scaled_gradient(rows, (1 / counts[index])[..., None])
    if padding_idx is not None:
        rows = jnp.where((index == padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)
    return rows


@primitive("embedding_renorm", differentiable=False)
def _renormalized(weight, index, max_norm, *, p):
    norms = jnp.linalg.norm(wide(weight), ord=p, axis=1, keepdims=True)
    used = jnp.zeros((weight.shape[0], 1), bool).at[index.reshape(-1)].set(True)
    scale = jnp.where(used & (norms > max_norm), max_norm / (norms + 1e-7), 1)
    return weight * scale.astype(weight.dtype)


@primitive("one_hot", differentiable=False)
def _one_hot(index, *, classes):
    return (index[..., None] == jnp.arange(classes)).astype(np.int64)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows ``input`` of ``weight``, as ``torch.nn.functional.embedding``.

    Args:
        input: int64 or int32 of any shape; the result has one more dim.
        weight: (num_embeddings, embedding_dim).
        padding_idx: a row that gets no gradient.
        max_norm: rows that are used are first scaled down, in place, to this ``norm_type``-norm.
        scale_grad_by_freq: divide a row's gradient by how often the row is used.
        sparse: must be False: jax has no sparse gradients.

    Raises:
        IndexError: an index is out of range. Inside a compiled call, where values are not known,
            such rows are nan instead.
        ValueError: ``sparse`` is true.
    """
    if sparse:
        raise ValueError(
            "embedding(sparse=True): gradients are dense jax arrays, there are no sparse ones; "
            "leave sparse=False"
        )
    padding = _checked_padding(padding_idx, weight)
    if weight.dim() != 2:
        raise RuntimeError("'weight' must be 2-D")
    _check_index(input, weight.shape[0])
    if max_norm is not None:
        with no_grad():
            scaled = _renormalized(weight.detach(), input, max_norm, p=float(norm_type))
            assign(weight, scaled)
    return _embedding(weight, input, padding_idx=padding, by_frequency=bool(scale_grad_by_freq))


def _checked_padding(padding_idx: int | None, weight: Tensor) -> int | None:
    if padding_idx is None:
        return None
    rows = weight.shape[0]
    if not -rows <= padding_idx < rows:
        raise AssertionError("Padding_idx must be within num_embeddings")
    return padding_idx % rows


def _check_index(index: Tensor, rows: int) -> None:
    if index.dtype.name not in ("int64", "int32"):
        raise RuntimeError(
            "Expected tensor for argument #1 'indices' to have one of the following scalar types: "
            f"Long, Int; but got torch.{scalar_type(index.dtype)}Tensor instead (while checking "
            "arguments for embedding)"
        )
    if state.trace is not None or index.is_meta or index.numel() == 0:
        return
    values = index._host()
    if values.min() < 0 or values.max() >= rows:
        raise IndexError("index out of range in self")


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """int64 codes with one more dim, of ``num_classes`` (default: the largest value plus one).

    Raises:
        RuntimeError: the dtype is not int64, or a value is not in [0, num_classes).
    """
    if tensor.dtype.name != "int64":
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if tensor.numel() == 0 and num_classes <= 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    if num_classes != -1 and (state.trace is not None or tensor.numel() == 0):
        return _one_hot(tensor, classes=num_classes)
    values = tensor.detach()._host()
    if values.min() < 0:
        raise RuntimeError("Class values must be non-negative.")
    if num_classes != -1 and values.max() >= num_classes:
        raise RuntimeError("Class values must be smaller than num_classes.")
    return _one_hot(tensor, classes=int(values.max()) + 1 if num_classes == -1 else num_classes)
