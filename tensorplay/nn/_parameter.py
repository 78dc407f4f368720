"""Parameter and Buffer: tensors that a Module registers by itself."""

from __future__ import annotations

from .._ops.creation import empty
from .._tensor import Tensor


class Parameter(Tensor):
    """A tensor that a Module registers as a parameter when it is assigned as an attribute.

    Args:
        data: the values; the parameter shares their storage.
        requires_grad: whether gradients are accumulated in ``grad``.
    """

    _guarded = True

    def __new__(cls, data: Tensor | None = None, requires_grad: bool = True) -> Parameter:
        return super().__new__(cls)

    def __init__(self, data: Tensor | None = None, requires_grad: bool = True) -> None:
        source = empty(0) if data is None else data
        self._storage, self._chain, self._layout = source._storage, source._chain, source._layout
        if requires_grad:
            self.requires_grad = True

    def __repr__(self) -> str:
        return "Parameter containing:\n" + super().__repr__()


class Buffer(Tensor):
    """A tensor that a Module registers as a buffer when it is assigned as an attribute."""

    persistent: bool

    def __new__(cls, data: Tensor | None = None, *, persistent: bool = True) -> Buffer:
        return super().__new__(cls)

    def __init__(self, data: Tensor | None = None, *, persistent: bool = True) -> None:
        source = empty(0) if data is None else data
        self._storage, self._chain = source._storage, source._chain
        self.persistent = persistent
