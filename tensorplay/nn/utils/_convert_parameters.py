"""Parameters as one vector and back."""

from __future__ import annotations

from collections.abc import Iterable

from ..._ops import views
from ..._ops.join import cat
from ..._tensor import Tensor
from ...autograd import no_grad


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """The elements of all parameters, flattened and joined in order; gradients flow back."""
    return cat([views.reshape(p, -1) for p in parameters])


def vector_to_parameters(vec: Tensor, parameters: Iterable[Tensor]) -> None:
    """Gives the parameters, in order, the elements of ``vec``.

    Raises:
        TypeError: ``vec`` is no tensor.
    """
    if not isinstance(vec, Tensor):
        raise TypeError(f"expected tensorplay.Tensor, but got: {type(vec).__name__}")
    start = 0
    for p in parameters:
        piece = views.narrow(vec.detach(), 0, start, p.numel())
        with no_grad():
            p.data = views.reshape(piece, p.shape).clone()  # type: ignore[attr-defined]
        start += p.numel()
