"""Initialisation of parameters in place, as ``torch.nn.init``; distributions are torch's.

Every function fills and returns its tensor, without recording. A tensor on ``meta`` stays as it is.
"""

from __future__ import annotations

import math
import warnings

import numpy as np

from .._ops import inplace, random
from .._ops.creation import as_tensor
from .._ops.random import Generator
from .._tensor import Tensor
from ..autograd import no_grad

_GAIN_ONE = (
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "sigmoid",
)  # fmt: skip


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """The gain recommended for a nonlinearity (its name in ``nn.functional``).

    Args:
        param: the negative slope of ``"leaky_relu"`` (default 0.01).

    Raises:
        ValueError: an unknown nonlinearity, or a slope that is no number.
    """
    if nonlinearity in _GAIN_ONE:
        return 1
    if nonlinearity == "leaky_relu":
        if param is not None and (isinstance(param, bool) or not isinstance(param, (int, float))):
            raise ValueError(f"negative_slope {param} not a valid number")
        return math.sqrt(2.0 / (1 + (0.01 if param is None else param) ** 2))
    gains = {"tanh": 5.0 / 3, "relu": math.sqrt(2.0), "selu": 3.0 / 4}
    if nonlinearity not in gains:
        raise ValueError(f"Unsupported nonlinearity {nonlinearity}")
    return gains[nonlinearity]


def uniform_(
    tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Generator | None = None
) -> Tensor:
    """Uniform values of [a, b)."""
    with no_grad():
        return random.uniform_(tensor, a, b, generator=generator)


def normal_(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Generator | None = None
) -> Tensor:
    """Normal values."""
    with no_grad():
        return random.normal_(tensor, mean, std, generator=generator)


def trunc_normal_(
    tensor: Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: Generator | None = None,
) -> Tensor:
    """Normal values limited to [a, b]: what falls outside is drawn anew."""
    if mean < a - 2 * std or mean > b + 2 * std:
        warnings.warn(
            "mean is more than 2 std from [a, b] in nn.init.trunc_normal_. "
            "The distribution of values may be incorrect.",
            stacklevel=2,
        )
    if tensor.is_meta:
        return tensor
    with no_grad():
        random.truncated_normal_(tensor, (a - mean) / std, (b - mean) / std, generator)
        return tensor.mul_(std).add_(mean).clamp_(a, b)  # type: ignore[attr-defined, no-any-return]


def constant_(tensor: Tensor, val: float) -> Tensor:
    """``val`` everywhere."""
    with no_grad():
        return inplace.fill_(tensor, val)


def ones_(tensor: Tensor) -> Tensor:
    """One everywhere."""
    return constant_(tensor, 1.0)


def zeros_(tensor: Tensor) -> Tensor:
    """Zero everywhere."""
    return constant_(tensor, 0.0)


def eye_(tensor: Tensor) -> Tensor:
    """Ones on the diagonal of a matrix, zeros elsewhere.

    Raises:
        ValueError: the tensor does not have 2 dims.
    """
    _require_matrix(tensor)
    return _copied(tensor, np.eye(*tensor.shape))


def _require_matrix(tensor: Tensor) -> None:
    if tensor.dim() != 2:
        raise ValueError("Only tensors with 2 dimensions are supported")


def _copied(tensor: Tensor, values: np.ndarray) -> Tensor:
    with no_grad():
        return inplace.copy_(tensor, as_tensor(values))


def _calculate_fan_in_and_fan_out(tensor: Tensor) -> tuple[int, int]:
    """(inputs, outputs) of each unit; dims after the second are a receptive field."""
    if tensor.dim() < 2:
        raise ValueError(
            "Fan in and fan out can not be computed for tensor with fewer than 2 dimensions"
        )
    field = math.prod(tensor.shape[2:])
    return tensor.shape[1] * field, tensor.shape[0] * field


def _calculate_correct_fan(tensor: Tensor, mode: str) -> int:
    mode = mode.lower()
    valid_modes = ["fan_in", "fan_out"]
    if mode not in valid_modes:
        raise ValueError(f"Mode {mode} not supported, please use one of {valid_modes}")
    return _calculate_fan_in_and_fan_out(tensor)[valid_modes.index(mode)]


def xavier_uniform_(
    tensor: Tensor, gain: float = 1.0, generator: Generator | None = None
) -> Tensor:
    """Uniform, standard deviation gain * sqrt(2 / (fan_in + fan_out)) (Glorot and Bengio, 2010)."""
    bound = math.sqrt(3.0) * _xavier_std(tensor, gain)
    return uniform_(tensor, -bound, bound, generator)


def xavier_normal_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Normal, standard deviation gain * sqrt(2 / (fan_in + fan_out)) (Glorot and Bengio, 2010)."""
    return normal_(tensor, 0.0, _xavier_std(tensor, gain), generator)


def _xavier_std(tensor: Tensor, gain: float) -> float:
    return gain * math.sqrt(2.0 / sum(_calculate_fan_in_and_fan_out(tensor)))


def kaiming_uniform_(
    tensor: Tensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:
    """Uniform, standard deviation gain / sqrt(fan) (He et al., 2015).

    Args:
        a: the negative slope of ``"leaky_relu"``.
        mode: ``"fan_in"`` or ``"fan_out"``, which fan counts.
    """
    std = _kaiming_std(tensor, a, mode, nonlinearity)
    if std is None:
        return tensor
    bound = math.sqrt(3.0) * std
    return uniform_(tensor, -bound, bound, generator)


def kaiming_normal_(
    tensor: Tensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:
    """Normal, standard deviation gain / sqrt(fan) (He et al., 2015); arguments as above."""
    std = _kaiming_std(tensor, a, mode, nonlinearity)
    return tensor if std is None else normal_(tensor, 0.0, std, generator)


def _kaiming_std(tensor: Tensor, a: float, mode: str, nonlinearity: str) -> float | None:
    if 0 in tensor.shape:
        warnings.warn("Initializing zero-element tensors is a no-op", stacklevel=3)
        return None
    return calculate_gain(nonlinearity, a) / math.sqrt(_calculate_correct_fan(tensor, mode))


def orthogonal_(tensor: Tensor, gain: float = 1, generator: Generator | None = None) -> Tensor:
    """``gain`` times a (semi-)orthogonal matrix, later dims flattened (Saxe et al., 2013).

    Raises:
        ValueError: the tensor has fewer than 2 dims.
    """
    if tensor.dim() < 2:
        raise ValueError("Only tensors with 2 or more dimensions are supported")
    if tensor.numel() == 0 or tensor.is_meta:
        return tensor
    rows = tensor.shape[0]
    columns = tensor.numel() // rows
    tall = (max(rows, columns), min(rows, columns))
    q, r = np.linalg.qr(random.randn(tall, generator=generator).numpy().astype(np.float64))
    q = q * np.sign(np.diagonal(r))
    return _copied(tensor, gain * (q.T if rows < columns else q).reshape(tensor.shape))


def sparse_(
    tensor: Tensor, sparsity: float, std: float = 0.01, generator: Generator | None = None
) -> Tensor:
    """Normal values, of which a share ``sparsity`` of each column is zero (Martens, 2010).

    Raises:
        ValueError: the tensor does not have 2 dims.
    """
    _require_matrix(tensor)
    if tensor.is_meta:
        return tensor
    rows = tensor.shape[0]
    zeros = math.ceil(sparsity * rows)
    ranks = random.rand(tensor.shape, generator=generator).numpy().argsort(axis=0).argsort(axis=0)
    values = random.randn(tensor.shape, generator=generator).numpy() * std
    return _copied(tensor, np.where(ranks < zeros, 0, values))
