"""Layers that normalise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _dtypes
from .._dtypes import dtype as Dtype
from .._ops.creation import DeviceLike, empty, ones, zeros
from .._tensor import Tensor
from . import functional as F
from . import init
from ._module import Module
from ._parameter import Parameter


def _as_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


class _Affine(Module):
    """A layer whose weight starts at one and whose bias starts at zero; either may be None."""

    weight: Parameter | None
    bias: Parameter | None

    def _make(
        self, shape: Any, names: tuple[str, ...], device: DeviceLike, dtype: Dtype | None
    ) -> None:
        for name in ("weight", "bias"):
            made = Parameter(empty(shape, device=device, dtype=dtype)) if name in names else None
            self.register_parameter(name, made)

    def reset_parameters(self) -> None:
        """Sets the weight to one and the bias to zero."""
        if self.weight is not None:
            init.ones_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)


def _names(affine: bool, bias: bool) -> tuple[str, ...]:
    return () if not affine else ("weight", "bias") if bias else ("weight",)


class LayerNorm(_Affine):
    """Normalises over the last dims ``normalized_shape`` (Ba et al., 2016); shapes stay.

    Args:
        elementwise_affine: multiply by a weight, and add a bias where ``bias`` is true.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: DeviceLike = None,
        dtype: Dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = _as_shape(normalized_shape)
        self.eps, self.elementwise_affine = eps, elementwise_affine
        self._make(self.normalized_shape, _names(elementwise_affine, bias), device, dtype)
        self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, "
            f"elementwise_affine={self.elementwise_affine}, bias={self.bias is not None}"
        )


class RMSNorm(Module):
    """Divides by the root mean square over ``normalized_shape`` (Zhang and Sennrich, 2019)."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: DeviceLike = None,
        dtype: Dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = _as_shape(normalized_shape)
        self.eps, self.elementwise_affine = eps, elementwise_affine
        if elementwise_affine:
            self.weight = Parameter(empty(self.normalized_shape, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to one."""
        if self.elementwise_affine:
            init.ones_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        return F.rms_norm(input, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        )


class GroupNorm(_Affine):
    """Normalises each of ``num_groups`` groups of channels of a sample (Wu and He, 2018).

    Raises:
        ValueError: ``num_channels`` is no multiple of ``num_groups``.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: DeviceLike = None,
        dtype: Dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise ValueError(
                f"num_channels ({num_channels}) must be divisible by num_groups ({num_groups})"
            )
        self.num_groups, self.num_channels = num_groups, num_channels
        self.eps, self.affine = eps, affine
        self._make(num_channels, _names(affine, bias), device, dtype)
        self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return (
            f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}, "
            f"bias={self.bias is not None}"
        )


class _BatchNorm(_Affine):
    """Normalises each channel over the batch and the positions (Ioffe and Szegedy, 2015).

    Args:
        num_features: channels, dim 1 of the input.
        momentum: share of the new batch in the running statistics; None: their plain average.
        track_running_stats: keep running statistics, which normalise in evaluation.

    Raises:
        ValueError: a wrong number of dims, or training with one value a channel.
    """

    _version = 2
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: DeviceLike = None,
        dtype: Dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        self._make(num_features, _names(affine, bias), device, dtype)
        self._make_statistics(device, dtype)
        self.reset_parameters()

    def _make_statistics(self, device: DeviceLike, dtype: Dtype | None) -> None:
        made: tuple[Tensor | None, ...] = (None, None, None)
        if self.track_running_stats:
            made = (
                zeros(self.num_features, device=device, dtype=dtype),
                ones(self.num_features, device=device, dtype=dtype),
                zeros((), device=device, dtype=_dtypes.int64),
            )
        for name, value in zip(_STATISTICS, made, strict=True):
            self.register_buffer(name, value)

    def reset_running_stats(self) -> None:
        """Sets the running mean to zero, the running variance to one and the count to zero."""
        if self.track_running_stats:
            for name, value in zip(_STATISTICS, (0.0, 1.0, 0), strict=True):
                init.constant_(getattr(self, name), value)

    def reset_parameters(self) -> None:
        """Resets the running statistics, the weight and the bias."""
        self.reset_running_stats()
        super().reset_parameters()

    def _check_input_dim(self, input: Tensor) -> None:
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)  # type: ignore[attr-defined]
        used = not self.training or self.track_running_stats
        return F.batch_norm(
            input,
            self.running_mean if used else None,
            self.running_var if used else None,
            self.weight,
            self.bias,
            self.training or (self.running_mean is None and self.running_var is None),
            self._momentum(),
            self.eps,
        )

    def _momentum(self) -> float | Tensor:
        if self.momentum is not None:
            return self.momentum
        return 0.0 if self.num_batches_tracked is None else 1.0 / self.num_batches_tracked  # type: ignore[operator, no-any-return]

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"bias={self.bias is not None}, track_running_stats={self.track_running_stats}"
        )


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class BatchNorm1d(_BatchNorm):
    __doc__ = (_BatchNorm.__doc__ or "") + "\n    Input (N, C) or (N, C, L).\n    "

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in (2, 3):
            raise ValueError(f"expected 2D or 3D input (got {input.dim()}D input)")


class BatchNorm2d(_BatchNorm):
    __doc__ = (_BatchNorm.__doc__ or "") + "\n    Input (N, C, H, W).\n    "

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() != 4:
            raise ValueError(f"expected 4D input (got {input.dim()}D input)")
