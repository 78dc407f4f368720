"""Embedding."""

from __future__ import annotations

from .._dtypes import dtype as Dtype
from .._ops.creation import DeviceLike, empty
from .._tensor import Tensor
from ..autograd import no_grad
from . import functional as F
from . import init
from ._module import Module
from ._parameter import Parameter


class Embedding(Module):
    """A table of ``num_embeddings`` rows looked up by index: (*) to (*, embedding_dim).

    Rows start as standard normal values, row ``padding_idx`` as zeros.

    Args:
        padding_idx: a row that gets no gradient.
        max_norm, norm_type: rows that are used are first scaled down to this norm, in place.
        scale_grad_by_freq: divide a row's gradient by how often the batch uses the row.
        sparse: must be False (see ``functional.embedding``).

    Raises:
        AssertionError: ``padding_idx`` is out of range, or ``_weight`` has another shape.
        ValueError: ``sparse`` is true.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: DeviceLike = None,
        dtype: Dtype | None = None,
    ) -> None:
        super().__init__()
        _refuse_sparse(sparse)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = _row(padding_idx, num_embeddings)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        if _weight is None:
            weight = empty(num_embeddings, embedding_dim, device=device, dtype=dtype)
            self.weight = Parameter(weight, requires_grad=not _freeze)
            self.reset_parameters()
            return
        if tuple(_weight.shape) != (num_embeddings, embedding_dim):
            raise AssertionError("Shape of weight does not match num_embeddings and embedding_dim")
        self.weight = Parameter(_weight, requires_grad=not _freeze)

    def reset_parameters(self) -> None:
        """Draws the initial table anew."""
        init.normal_(self.weight)
        if self.padding_idx is not None and not self.weight.is_meta:
            with no_grad():
                self.weight[self.padding_idx].fill_(0)  # type: ignore[index]

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )

    def extra_repr(self) -> str:
        parts = [f"{self.num_embeddings}, {self.embedding_dim}"]
        for name, default in _SHOWN:
            if getattr(self, name) != default:
                parts.append(f"{name}={getattr(self, name)}")
        return ", ".join(parts)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Embedding:
        """A table of given rows, by default without gradients.

        Raises:
            AssertionError: ``embeddings`` does not have 2 dims.
        """
        if embeddings.dim() != 2:
            raise AssertionError("Embeddings parameter is expected to be 2-dimensional")
        rows, width = embeddings.shape
        return cls(
            rows,
            width,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight=embeddings,
            _freeze=freeze,
        )


_SHOWN = (
    ("padding_idx", None), ("max_norm", None), ("norm_type", 2.0), ("scale_grad_by_freq", False),
)  # fmt: skip


def _refuse_sparse(sparse: bool) -> None:
    if sparse:
        raise ValueError(
            "Embedding(sparse=True): gradients are dense jax arrays, there are no sparse ones; "
            "leave sparse=False"
        )


def _row(padding_idx: int | None, rows: int) -> int | None:
    if padding_idx is None:
        return None
    if not -rows <= padding_idx < rows:
        raise AssertionError("Padding_idx must be within num_embeddings")
    return padding_idx % rows
