"""Joining tensors, and ops that rearrange elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .._tensor import Tensor, wrap_dim
from .primitive import primitive
from .promotion import promoted
from .views import as_sizes


@primitive("cat")
def _cat(*tensors, dim):  # type: ignore[no-untyped-def]
    return jnp.concatenate(promoted(*tensors), axis=dim)


@primitive("stack")
def _stack(*tensors, dim):  # type: ignore[no-untyped-def]
    return jnp.stack(promoted(*tensors), axis=dim)


@primitive("repeat")
def _repeat(x, *, sizes):  # type: ignore[no-untyped-def]
    return jnp.tile(x, sizes)


@primitive("repeat_interleave")
def _repeat_interleave(x, *, repeats, dim):  # type: ignore[no-untyped-def]
    return jnp.repeat(x, repeats, axis=dim)


@primitive("flip")
def _flip(x, *, dims):  # type: ignore[no-untyped-def]
    return jnp.flip(x, dims)


@primitive("roll")
def _roll(x, *, shifts, dims):  # type: ignore[no-untyped-def]
    return jnp.roll(x, shifts, dims)


@primitive("tril")
def _tril(x, *, diagonal):  # type: ignore[no-untyped-def]
    return jnp.tril(x, diagonal)


@primitive("triu")
def _triu(x, *, diagonal):  # type: ignore[no-untyped-def]
    return jnp.triu(x, diagonal)


@primitive("diag")
def _diag(x, *, diagonal):  # type: ignore[no-untyped-def]
    return jnp.diag(x, diagonal)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors one after another along ``dim``."""
    if not tensors:
        raise RuntimeError("torch.cat(): expected a non-empty list of Tensors")
    kept = [t for t in tensors if t._array_shape() != (0,)] or [tensors[0]]
    return _cat(*kept, dim=wrap_dim(dim, kept[0].dim()))


concat = cat


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one shape along a new dim ``dim``."""
    if not tensors:
        raise RuntimeError("stack expects a non-empty TensorList")
    first = tensors[0].shape
    for position, other in enumerate(tensors):
        if other.shape != first:
            raise RuntimeError(
                f"stack expects each tensor to be equal size, but got {list(first)} at entry 0 and "
                f"{list(other.shape)} at entry {position}"
            )
    return _stack(*tensors, dim=wrap_dim(dim, len(first) + 1))


def repeat(x: Tensor, *sizes: Any) -> Tensor:
    """``x`` copied ``sizes[d]`` times along each dim ``d``."""
    return _repeat(x, sizes=as_sizes(sizes))


def repeat_interleave(x: Tensor, repeats: int, dim: int | None = None) -> Tensor:
    """Each entry ``repeats`` times in a row."""
    return _repeat_interleave(x, repeats=int(repeats), dim=dim)


def flip(x: Tensor, *dims: Any) -> Tensor:
    """The order of entries reversed along ``dims``."""
    return _flip(x, dims=as_sizes(dims))


def roll(x: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    """Entries moved around cyclically."""
    return _roll(
        x,
        shifts=shifts if isinstance(shifts, int) else tuple(shifts),
        dims=dims if dims is None or isinstance(dims, int) else tuple(dims),
    )


def tril(input: Tensor, diagonal: int = 0) -> Tensor:  # noqa: A002
    """The lower triangle; zero above ``diagonal``."""
    return _tril(input, diagonal=diagonal)


def triu(input: Tensor, diagonal: int = 0) -> Tensor:  # noqa: A002
    """The upper triangle; zero below ``diagonal``."""
    return _triu(input, diagonal=diagonal)


def diag(input: Tensor, diagonal: int = 0) -> Tensor:  # noqa: A002
    """A matrix from its diagonal (1-D input), or the diagonal of a matrix."""
    return _diag(input, diagonal=diagonal)
