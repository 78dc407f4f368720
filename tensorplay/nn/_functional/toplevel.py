"""Functions of this package in the form that torch gives them as ``torch.*`` and as methods."""

from __future__ import annotations

from ..._dtypes import dtype as Dtype
from ..._tensor import Tensor
from . import activation
from . import dropout as _dropout
from . import softmax as _softmax


def softmax(input: Tensor, dim: int, dtype: Dtype | None = None) -> Tensor:
    """exp(x) / sum(exp(x)) along ``dim``; ``dtype`` casts first."""
    return _softmax.softmax(input, dim, dtype=dtype)


def log_softmax(input: Tensor, dim: int, dtype: Dtype | None = None) -> Tensor:
    """log(softmax(x)) along ``dim``; ``dtype`` casts first."""
    return _softmax.log_softmax(input, dim, dtype=dtype)


def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """``nn.functional.dropout`` with every argument given."""
    return _dropout.dropout(input, p, train)


def attach_methods() -> None:
    """Gives ``Tensor`` the methods that belong to this package."""
    for fn in (softmax, log_softmax, activation.prelu):
        setattr(Tensor, fn.__name__, fn)
