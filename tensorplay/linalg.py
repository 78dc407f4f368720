"""Linear algebra, as ``torch.linalg``."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._dtypes import dtype as Dtype
from ._ops.linalg import cross as cross
from ._ops.linalg import matrix_power as matrix_power
from ._ops.math import to_dtype
from ._ops.primitive import primitive
from ._ops.reduce import norm as _vector_norm
from ._state import state
from ._tensor import Tensor, wrap_dim

QR = namedtuple("QR", ["Q", "R"])
SVD = namedtuple("SVD", ["U", "S", "Vh"])
Eigh = namedtuple("Eigh", ["eigenvalues", "eigenvectors"])
SlogDet = namedtuple("SlogDet", ["sign", "logabsdet"])


class LinAlgError(RuntimeError):
    """The matrix does not have what was asked for."""


@primitive("linalg_inv")
def _inv(a):
    return jnp.linalg.inv(a)


@primitive("linalg_solve")
def _solve(a, b):
    return jnp.linalg.solve(a, b[..., None])[..., 0] if b.ndim == 1 else jnp.linalg.solve(a, b)


@primitive("linalg_det")
def _det(a):
    return jnp.linalg.det(a)


@primitive("linalg_slogdet")
def _slogdet(a):
    return tuple(jnp.linalg.slogdet(a))


@primitive("linalg_cholesky")
def _cholesky(a):
    return jnp.linalg.cholesky(a)


@primitive("linalg_qr")
def _qr(a, *, mode):
    return tuple(jnp.linalg.qr(a, mode))


@primitive("linalg_svd")
def _svd(a, *, full_matrices):
    return tuple(jnp.linalg.svd(a, full_matrices=full_matrices))


@primitive("linalg_svdvals")
def _svdvals(a):
    return jnp.linalg.svd(a, compute_uv=False)


@primitive("linalg_eigh")
def _eigh(a, *, lower):
    return tuple(jnp.linalg.eigh(a, UPLO="L" if lower else "U"))


@primitive("linalg_pinv")
def _pinv(a, *, rtol):
    return jnp.linalg.pinv(a, rtol=rtol)


@primitive("linalg_matrix_rank", differentiable=False)
def _matrix_rank(a, *, rtol):
    return jnp.linalg.matrix_rank(a, rtol=rtol).astype(np.int64)


@primitive("linalg_lstsq")
def _lstsq(a, b):
    return jnp.linalg.pinv(a) @ b


@primitive("linalg_matrix_norm")
def _matrix_norm(a, *, order, dims, keepdim):
    return jnp.linalg.norm(a, order, dims, keepdim)


def _square(a: Tensor, name: str) -> None:
    if a.dim() < 2:
        raise RuntimeError(f"linalg.{name}: The input tensor A must have at least 2 dimensions.")
    if a.shape[-1] != a.shape[-2]:
        raise RuntimeError(
            f"linalg.{name}: A must be batches of square matrices, but they are {a.shape[-2]} by "
            f"{a.shape[-1]} matrices"
        )


def _defined(result: Tensor, inputs: tuple[Tensor, ...], message: str) -> Tensor:
    """``result``; LinAlgError where it is not finite although the inputs are."""
    if state.trace is None and not result.is_meta:
        finite = all(np.isfinite(x.detach()._host()).all() for x in inputs)
        if finite and not np.isfinite(result.detach()._host()).all():
            raise LinAlgError(message)
    return result


def inv(A: Tensor) -> Tensor:
    """The inverse of a matrix (of each of a batch).

    Raises:
        LinAlgError: the matrix is singular.
    """
    _square(A, "inv")
    singular = (
        "linalg.inv: The inversion could not be completed because the input matrix is singular."
    )
    return _defined(_inv(A), (A,), singular)


def solve(A: Tensor, B: Tensor) -> Tensor:
    """X with ``A @ X = B``; ``B`` is a vector or a matrix.

    Raises:
        LinAlgError: ``A`` is singular.
    """
    _square(A, "solve")
    singular = "linalg.solve: The solver failed because the input matrix is singular."
    return _defined(_solve(A, B), (A, B), singular)


def det(A: Tensor) -> Tensor:
    """The determinant."""
    _square(A, "det")
    return _det(A)


def slogdet(A: Tensor) -> SlogDet:
    """(sign, logabsdet) of the determinant."""
    _square(A, "slogdet")
    return SlogDet(*_slogdet(A))


def cholesky(A: Tensor, *, upper: bool = False) -> Tensor:
    """The lower (or upper) triangular L with ``A = L @ L.mH``.

    Raises:
        LinAlgError: ``A`` is not positive-definite.
    """
    _square(A, "cholesky")
    message = (
        "linalg.cholesky: The factorization could not be completed because the input is not "
        "positive-definite."
    )
    factor = _defined(_cholesky(A), (A,), message)
    return factor.mH if upper else factor


def qr(A: Tensor, mode: str = "reduced") -> QR:
    """(Q, R) with ``A = Q @ R``; ``mode`` is ``"reduced"`` or ``"complete"``."""
    return QR(*_qr(A, mode=mode))


def svd(A: Tensor, full_matrices: bool = True) -> SVD:
    """(U, S, Vh) with ``A = U @ diag(S) @ Vh``."""
    return SVD(*_svd(A, full_matrices=full_matrices))


def svdvals(A: Tensor) -> Tensor:
    """The singular values, largest first."""
    return _svdvals(A)


def eigh(A: Tensor, UPLO: str = "L") -> Eigh:
    """(eigenvalues in order, eigenvectors as columns) of a Hermitian matrix."""
    _square(A, "eigh")
    return Eigh(*_eigh(A, lower=UPLO.upper() == "L"))


def eigvalsh(A: Tensor, UPLO: str = "L") -> Tensor:
    """The eigenvalues of a Hermitian matrix, in order."""
    return eigh(A, UPLO).eigenvalues


def pinv(A: Tensor, *, rtol: float | None = None) -> Tensor:
    """The pseudoinverse."""
    return _pinv(A, rtol=rtol)


def matrix_rank(A: Tensor, *, rtol: float | None = None) -> Tensor:
    """The rank, int64."""
    return _matrix_rank(A, rtol=rtol)


def lstsq(A: Tensor, B: Tensor) -> Any:
    """``.solution``: the X that makes ``A @ X - B`` smallest."""
    return namedtuple("LeastSquares", ["solution"])(_lstsq(A, B))


def vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Dtype | None = None
) -> Tensor:
    """The p-norm over ``dim`` (all elements if None)."""
    return _vector_norm(x, float(ord), dim, keepdim, dtype=dtype)


def matrix_norm(
    A: Tensor,
    ord: Any = "fro",
    dim: Sequence[int] = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: Dtype | None = None,
) -> Tensor:
    """A norm of matrices: ``"fro"``, ``"nuc"``, inf, -inf, 1, -1, 2 or -2."""
    if dtype is not None:
        A = to_dtype(A, dtype)
    dims = tuple(wrap_dim(d, A.dim()) for d in dim)
    if ord == "fro":
        return _vector_norm(A, 2.0, dims, keepdim)
    return _matrix_norm(A, order=ord, dims=dims, keepdim=keepdim)


def norm(
    A: Tensor,
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Dtype | None = None,
) -> Tensor:
    """``vector_norm`` or ``matrix_norm``, as ``ord`` and ``dim`` ask for.

    Without ``ord`` it is the 2-norm of the flattened tensor (over ``dim``, if given).
    """
    pair = isinstance(dim, (tuple, list)) and len(dim) == 2
    if ord is None:
        return vector_norm(A, 2, dim, keepdim, dtype=dtype)
    if isinstance(ord, str) or pair or (dim is None and A.dim() == 2):
        return matrix_norm(A, ord, dim if pair else (-2, -1), keepdim, dtype=dtype)
    if dim is None and A.dim() != 1:
        raise RuntimeError(
            "linalg.norm: If dim is not specified but ord is, the input must be 1D or 2D. Got "
            f"{A.dim()}D."
        )
    return vector_norm(A, ord, dim, keepdim, dtype=dtype)


def vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    """Sums of products along ``dim``, the first conjugated."""
    return ((x.conj() if x.is_complex() else x) * y).sum(dim)


def multi_dot(tensors: Sequence[Tensor]) -> Tensor:
    """The product of several matrices."""
    out = tensors[0]
    for tensor in tensors[1:]:
        out = out @ tensor
    return out


def diagonal(A: Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """The diagonal over the last two dims."""
    return A.diagonal(offset, dim1, dim2)
