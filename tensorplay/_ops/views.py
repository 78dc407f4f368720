"""View ops: tensors that share another's storage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _views
from .._dtypes import dtype as Dtype
from .._state import state
from .._tensor import Size, Tensor, wrap_dim
from .._views import Chain
from .math import conj
from .primitive import broadcast_mismatch, primitive


@primitive("view")
def _read_form(x, *starts, form):
    return _views.read(x, _views.join_starts(form, starts))


def _read_view(x: Tensor, chain: Chain) -> Tensor:
    form, starts = _views.split_starts(chain)
    return _read_form(x, *starts, form=form)


def view_through(x: Tensor, chain: Chain) -> Tensor:
    """The view of ``x`` that ``chain`` describes; recorded where ``x`` requires grad."""
    if x._layout is not None:
        x._layout.refuse_view(x)
    out = Tensor.__new__(Tensor)
    out._storage = x._storage
    out._chain = (x._chain or ()) + chain
    out._untracked, out._inference, out._refusal = x._untracked, x._inference, x._refusal
    out._base = x if x._base is None else x._base
    out._base_chain = chain if x._base is None else x._base_chain + chain
    out._base_epoch = out._base._epoch
    out._view_kind = x._view_kind
    if not state.grad_enabled:
        out._detached, out._view_kind = True, "no_grad"
        return out
    out._detached = x._detached
    if x.requires_grad:
        value = _read_view(x, chain=chain)
        out._requires_grad = True
        out._grad_fn, out._output_nr = value._grad_fn, value._output_nr
        if state.trace is None:
            out._cached = (x._storage.array, value._storage.array)
    return out


def _resolve_shape(x: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(int(s) for s in shape)
    known = math.prod(s for s in sizes if s != -1)
    if sizes.count(-1) > 1:
        raise RuntimeError("only one dimension can be inferred")
    if -1 in sizes:
        if known == 0 or x.numel() % known:
            raise RuntimeError(f"shape '{list(sizes)}' is invalid for input of size {x.numel()}")
        return tuple(x.numel() // known if s == -1 else s for s in sizes)
    if known != x.numel():
        raise RuntimeError(f"shape '{list(sizes)}' is invalid for input of size {x.numel()}")
    return sizes


def as_sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes given either one by one or as one sequence."""
    if len(shape) == 1 and not isinstance(shape[0], (int, Tensor)):
        return tuple(int(s) for s in shape[0])
    return tuple(int(s) for s in shape)


def view(x: Tensor, *shape: Any) -> Tensor:
    """The same elements in another shape, sharing storage.

    Raises:
        RuntimeError: the shape does not fit, or only a copy could have it (use ``reshape``).
    """
    if len(shape) == 1 and isinstance(shape[0], Dtype):
        raise RuntimeError("view(dtype) is not available: jax arrays have no byte view; use .to()")
    sizes = _resolve_shape(x, as_sizes(shape))
    if _views.strides_of_view(x._array_shape(), x._strides(), sizes) is None:
        raise RuntimeError(
            "view size is not compatible with input tensor's size and stride (at least one "
            "dimension spans across two contiguous subspaces). Use .reshape(...) instead."
        )
    return view_through(x, (_views.reshape_step(sizes),))


def reshape(x: Tensor, *shape: Any) -> Tensor:
    """The same elements in another shape: a view where possible, else a copy."""
    sizes = _resolve_shape(x, as_sizes(shape))
    if _views.strides_of_view(x._array_shape(), x._strides(), sizes) is None:
        return _read_view(x, chain=(_views.reshape_step(sizes),))
    return view_through(x, (_views.reshape_step(sizes),))


def permute(x: Tensor, *dims: Any) -> Tensor:
    """Dims in another order."""
    order = tuple(wrap_dim(d, x.dim()) for d in as_sizes(dims))
    if sorted(order) != list(range(x.dim())):
        raise RuntimeError(
            "permute(sparse_coo): number of dimensions in the tensor input does not match the "
            f"length of the desired ordering of dimensions i.e. input.dim() = {x.dim()} is not "
            f"equal to len(dims) = {len(order)}"
        )
    return view_through(x, (_views.permute_step(order),))


def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """``dim0`` and ``dim1`` swapped."""
    order = list(range(x.dim()))
    if order:
        a, b = wrap_dim(dim0, x.dim()), wrap_dim(dim1, x.dim())
        order[a], order[b] = order[b], order[a]
    return view_through(x, (_views.permute_step(tuple(order)),))


def t(x: Tensor) -> Tensor:
    """The transpose of a tensor of at most 2 dims."""
    if x.dim() > 2:
        raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {x.dim()}D")
    return transpose(x, 0, 1) if x.dim() == 2 else view_through(x, ())


def movedim(x: Tensor, source: Any, destination: Any) -> Tensor:
    """Dims moved to new places, the others in order."""
    sources = [source] if isinstance(source, int) else list(source)
    targets = [destination] if isinstance(destination, int) else list(destination)
    sources = [wrap_dim(d, x.dim()) for d in sources]
    targets = [wrap_dim(d, x.dim()) for d in targets]
    if len(sources) != len(targets):
        raise RuntimeError(
            f"movedim: Invalid source or destination dims: source ({sources} dims) should contain "
            f"the same number of dims as destination ({targets} dims)"
        )
    order = [d for d in range(x.dim()) if d not in sources]
    for target, src in sorted(zip(targets, sources, strict=True)):
        order.insert(target, src)
    return permute(x, order)


moveaxis = movedim


def swapaxes(x: Tensor, axis0: int, axis1: int) -> Tensor:
    """As ``transpose``."""
    return transpose(x, axis0, axis1)


swapdims = swapaxes


def adjoint(x: Tensor) -> Tensor:
    """The last two dims swapped; the conjugate of that where ``x`` is complex."""
    swapped = transpose(x, -2, -1)
    return conj(swapped) if x.is_complex() else swapped


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """A dim of size 1 at ``dim``."""
    sizes = list(x._array_shape())
    sizes.insert(wrap_dim(dim, x.dim() + 1), 1)
    return reshape(x, tuple(sizes))


def squeeze(x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """Without dims of size 1: all of them, or those named."""
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    drop = {wrap_dim(d, x.dim()) for d in dims}
    sizes = tuple(s for d, s in enumerate(x._array_shape()) if d not in drop or s != 1)
    return reshape(x, sizes)


def flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Dims ``start_dim`` to ``end_dim`` as one."""
    sizes = x._array_shape()
    start, end = wrap_dim(start_dim, len(sizes)), wrap_dim(end_dim, len(sizes))
    if not sizes:
        return reshape(x, 1)
    if start > end:
        raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
    merged = math.prod(sizes[start : end + 1])
    return reshape(x, sizes[:start] + (merged,) + sizes[end + 1 :])


def ravel(x: Tensor) -> Tensor:
    """All elements in one dim."""
    return reshape(x, -1)


def unflatten(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Dim ``dim`` split into ``sizes``."""
    shape, d = x._array_shape(), wrap_dim(dim, x.dim())
    known = math.prod(s for s in sizes if s != -1)
    split = tuple(shape[d] // max(known, 1) if s == -1 else s for s in sizes)
    if math.prod(split) != shape[d]:
        raise RuntimeError(
            f"unflatten: Provided sizes {list(sizes)} don't multiply up to the size of dim {d} "
            f"({shape[d]}) in the input tensor"
        )
    return view(x, shape[:d] + split + shape[d + 1 :])


def expand(x: Tensor, *sizes: Any) -> Tensor:
    """Dims of size 1 repeated without a copy; -1 keeps a dim."""
    wanted, shape = as_sizes(sizes), x._array_shape()
    lead = len(wanted) - len(shape)
    if lead < 0:
        raise RuntimeError(
            f"expand: the number of sizes provided ({len(wanted)}) must be greater or equal to the "
            f"number of dimensions in the tensor ({len(shape)})"
        )
    full = []
    for d, size in enumerate(wanted):
        own = 1 if d < lead else shape[d - lead]
        if size == -1 and d >= lead:
            size = own
        if own not in (1, size):
            raise RuntimeError(
                f"The expanded size of the tensor ({size}) must match the existing size ({own}) at "
                f"non-singleton dimension {d}.  Target sizes: {list(wanted)}.  Tensor sizes: "
                f"{list(shape)}"
            )
        full.append(size)
    return view_through(x, (_views.expand_step(tuple(full)),))


def broadcast_to(x: Tensor, size: Sequence[int]) -> Tensor:
    """As ``expand``."""
    return expand(x, size)


def broadcast_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All tensors expanded to their common shape."""
    shape = broadcast_shapes(*(t.shape for t in tensors))
    return tuple(expand(t, shape) for t in tensors)


def broadcast_shapes(*shapes: Sequence[int]) -> Size:
    """The shape that tensors of ``shapes`` broadcast to.

    Raises:
        RuntimeError: they do not broadcast.
    """
    found = [as_sizes((s,)) for s in shapes]
    message = broadcast_mismatch(found)
    if message is not None:
        raise RuntimeError(message)
    return Size(np.broadcast_shapes(*found))


def expand_as(x: Tensor, other: Tensor) -> Tensor:
    """``x`` expanded to the shape of ``other``."""
    return expand(x, other.shape)


def view_as(x: Tensor, other: Tensor) -> Tensor:
    """``x`` viewed in the shape of ``other``."""
    return view(x, other.shape)


def reshape_as(x: Tensor, other: Tensor) -> Tensor:
    """``x`` reshaped to the shape of ``other``."""
    return reshape(x, other.shape)


def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The diagonal over two dims, as the last dim."""
    first, second = wrap_dim(dim1, x.dim()), wrap_dim(dim2, x.dim())
    if first == second:
        raise RuntimeError(f"diagonal dimensions cannot be identical {dim1}, {dim2}")
    step = _views.diagonal_step(offset, first, second)
    return view_through(x, (step,))


def narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """``length`` entries of ``dim`` from ``start``."""
    d = wrap_dim(dim, x.dim())
    size = x._array_shape()[d]
    start = int(start) + size if start < 0 else int(start)
    if length < 0 or start + length > size or start > size:
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({size}).")
    return slice_dim(x, d, start, start + length, 1)


def slice_dim(x: Tensor, d: int, start: int, stop: int, step: int) -> Tensor:
    """``x[start:stop:step]`` along dim ``d``; bounds within the dim."""
    shape = x._array_shape()
    bounds = tuple((start, stop, step) if i == d else (0, n, 1) for i, n in enumerate(shape))
    return view_through(x, (_views.slice_step(bounds),))


def select(x: Tensor, dim: int, index: int) -> Tensor:
    """Entry ``index`` of ``dim``, which goes away."""
    d = wrap_dim(dim, x.dim())
    shape = x._array_shape()
    if not -shape[d] <= index < shape[d]:
        raise IndexError(
            f"select(): index {index} out of range for tensor of size {list(shape)} at dimension "
            f"{d}"
        )
    index %= shape[d]
    one = slice_dim(x, d, index, index + 1, 1)
    return view_through_reshape(one, shape[:d] + shape[d + 1 :])


def view_through_reshape(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """``x`` in a shape that differs from its own by dims of size 1 only."""
    return view_through(x, (_views.reshape_step(sizes),))


def split(
    x: Tensor, split_size_or_sections: int | Sequence[int], dim: int = 0
) -> tuple[Tensor, ...]:
    """Consecutive pieces of ``dim``: of one size (the last may be smaller), or of given sizes."""
    d = wrap_dim(dim, x.dim())
    size = x._array_shape()[d]
    if isinstance(split_size_or_sections, int):
        width = split_size_or_sections
        if width <= 0:
            raise RuntimeError(f"split expects split_size be non-negative, but got {width}")
        sections = [min(width, size - i) for i in range(0, size, width)] or [0]
    else:
        sections = [int(s) for s in split_size_or_sections]
        if sum(sections) != size:
            raise RuntimeError(
                f"split_with_sizes expects split_sizes to sum exactly to {size} (input tensor's "
                f"size at dimension {d}), but got split_sizes={sections}"
            )
    pieces, start = [], 0
    for section in sections:
        pieces.append(slice_dim(x, d, start, start + section, 1))
        start += section
    return _several(pieces)


def _several(pieces: list[Tensor]) -> tuple[Tensor, ...]:
    """Marks views that one op returned together: autograd refuses in-place ops on them."""
    for piece in pieces:
        piece._view_kind = piece._view_kind or "several"
    return tuple(pieces)


def chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """At most ``chunks`` pieces of equal size (the last may be smaller)."""
    if chunks < 1:
        raise RuntimeError(f"chunk expects `chunks` to be greater than 0, got: {chunks}")
    size = x._array_shape()[wrap_dim(dim, x.dim())]
    if size == 0:
        return split(x, [0] * chunks, dim)
    return split(x, -(-size // chunks), dim)


def tensor_split(x: Tensor, indices_or_sections: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """Pieces of ``dim``: that many, as equal as can be, or cut at the given indices."""
    d = wrap_dim(dim, x.dim())
    size = x._array_shape()[d]
    if isinstance(indices_or_sections, int):
        n = indices_or_sections
        if n <= 0:
            raise RuntimeError(f"number of sections must be larger than 0, got {n}")
        return split(x, [size // n + (i < size % n) for i in range(n)], dim)
    starts = [0, *(int(i) for i in indices_or_sections)]
    pieces = []
    for start, stop in zip(starts, [*starts[1:], size], strict=True):
        first, last, _ = slice(start, stop).indices(size)
        pieces.append(slice_dim(x, d, first, max(first, last), 1))
    return _several(pieces)


def hsplit(x: Tensor, indices_or_sections: Any) -> tuple[Tensor, ...]:
    """``tensor_split`` along dim 1 (dim 0 of a 1-D tensor)."""
    return tensor_split(x, indices_or_sections, 1 if x.dim() > 1 else 0)


def vsplit(x: Tensor, indices_or_sections: Any) -> tuple[Tensor, ...]:
    """``tensor_split`` along dim 0."""
    return tensor_split(x, indices_or_sections, 0)


def split_with_sizes(x: Tensor, split_sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Consecutive pieces of ``dim`` of the given sizes."""
    return split(x, split_sizes, dim)


def unbind(x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """The entries of ``dim`` one by one."""
    if x.dim() == 0:
        raise IndexError("Dimension specified as 0 but tensor has no dimensions")
    size = x._array_shape()[wrap_dim(dim, x.dim())]
    return _several([select(x, dim, i) for i in range(size)])


def _atleast(dims: int, name: str) -> Any:
    def op(*tensors: Any) -> Any:
        if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
            tensors = tuple(tensors[0])
        found = [t if t.dim() >= dims else _with_dims(t, dims) for t in tensors]
        return found[0] if len(found) == 1 else tuple(found)

    op.__name__ = name
    op.__doc__ = f"Tensors with dims of size 1 added until they have {dims}."
    return op


def _with_dims(x: Tensor, dims: int) -> Tensor:
    if x.dim() == 2:
        return unsqueeze(x, -1)
    lead = 1 if dims > 1 and x.dim() <= 1 else 0
    sizes = (1,) * lead + (x._array_shape() or (1,))
    return reshape(x, sizes + (1,) * (dims - len(sizes)))


atleast_1d = _atleast(1, "atleast_1d")
atleast_2d = _atleast(2, "atleast_2d")
atleast_3d = _atleast(3, "atleast_3d")


def contiguous(x: Tensor, memory_format: Any = None) -> Tensor:
    """``x`` itself where its elements lie in row-major order, else a copy."""
    return x if x.is_contiguous() else _read_view(x, chain=())
