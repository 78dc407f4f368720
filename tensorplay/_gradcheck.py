"""Checks gradients against finite differences, as ``torch.autograd.gradcheck``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._ops.creation import from_numpy
from ._tensor import Tensor, gradients_of


class GradcheckError(RuntimeError):
    """A gradient differs from the finite difference."""


def gradcheck(
    func: Callable[..., Any],
    inputs: Tensor | Sequence[Any],
    *,
    eps: float = 1e-6,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    raise_exception: bool = True,
) -> bool:
    """Whether the gradients of ``func`` agree with central differences.

    Args:
        func: takes ``inputs``, returns a tensor or a tuple of them.
        inputs: those that require grad are checked; float64 is needed for the default tolerances.
        eps: the step of the differences.

    Raises:
        GradcheckError: they differ (unless ``raise_exception`` is false).
        ValueError: no input requires grad.
    """
    args = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    checked = [(i, a) for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]
    if not checked:
        raise ValueError(
            "gradcheck expects at least one input tensor to require gradient, but none of them "
            "have requires_grad=True."
        )
    for position, x in checked:
        numerical = _numerical(func, args, x, eps)
        analytical = _analytical(func, args, x)
        for number, (n, a) in enumerate(zip(numerical, analytical, strict=True)):
            if np.allclose(n, a, rtol, atol):
                continue
            if raise_exception:
                raise GradcheckError(
                    f"Jacobian mismatch for output {number} with respect to input {position},\n"
                    f"numerical:{n}\nanalytical:{a}\n"
                )
            return False
    return True


def _outputs(func: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    found = func(*args)
    every = [found] if isinstance(found, Tensor) else list(found)
    return [o for o in every if o.is_floating_point()]


def _numerical(
    func: Callable[..., Any], args: Sequence[Any], x: Tensor, eps: float
) -> list[np.ndarray]:
    """For each output, the (elements of x, elements of the output) matrix of differences."""
    start = x.numpy(force=True)
    rows = []
    try:
        for i in range(start.size):
            ends = []
            for step in (eps, -eps):
                moved = start.copy()
                moved.flat[i] += step
                x.data.copy_(from_numpy(moved))
                ends.append([o.numpy(force=True).ravel() for o in _outputs(func, args)])
            rows.append([(up - down) / (2 * eps) for up, down in zip(*ends, strict=True)])
    finally:
        x.data.copy_(from_numpy(start))
    return [np.stack(column) for column in zip(*rows, strict=True)]


def _analytical(func: Callable[..., Any], args: Sequence[Any], x: Tensor) -> list[np.ndarray]:
    outputs = _outputs(func, args)
    matrices = []
    for output in outputs:
        columns = []
        for i in range(output.numel()):
            seed = np.zeros(tuple(output.shape), output.dtype.numpy)
            seed.flat[i] = 1
            grad = None
            if output.requires_grad:
                (grad,) = gradients_of([output], [x], [from_numpy(seed)], True, False)
            columns.append(np.zeros(x.numel()) if grad is None else grad.numpy().ravel())
        matrices.append(np.stack(columns, axis=1))
    return matrices
