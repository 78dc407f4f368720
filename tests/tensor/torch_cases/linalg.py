"""``torch.linalg``: values, gradients and refusals."""

from parity import refused_with


def _square(T):
    return T.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, -0.25], [0.5, -0.25, 2.0]], dtype=T.float64)


def _with_gradient(T, fn, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    outs = list(out) if isinstance(out, tuple) else [out]
    total = sum(
        (o * T.arange(1.0, o.numel() + 1, dtype=o.dtype).reshape(o.shape).cos()).sum() for o in outs
    )
    total.backward()
    return outs, [x.grad for x in leaves]


def solvers(T):
    a, b = _square(T), T.tensor([[1.0, 2.0], [0.5, -1.0], [3.0, 0.0]], dtype=T.float64)
    L = T.linalg
    return [
        _with_gradient(T, L.inv, a), _with_gradient(T, L.det, a), _with_gradient(T, L.solve, a, b),
        _with_gradient(T, L.solve, a, b[:, 0]),
        _with_gradient(T, L.cholesky, a), L.cholesky(a, upper=True),
        _with_gradient(T, lambda x: L.slogdet(x).logabsdet, a), L.matrix_power(a, 2),
        L.pinv(a[:2]), L.matrix_rank(a), L.matrix_rank(T.ones(2, 2)), L.lstsq(a, b).solution,
        L.multi_dot([a, a, b]), L.vecdot(a, a), L.inv(T.stack([a, a * 2])),
        L.cross(b.t()[0], b.t()[1]), L.diagonal(a),
    ]  # fmt: skip


def decompositions(T):
    a = _square(T)
    L = T.linalg
    q, r = L.qr(a[:, :2])
    u, s, vh = L.svd(a[:2], full_matrices=False)
    values, vectors = L.eigh(a)
    return [q @ r, q.t() @ q, u @ T.diag(s) @ vh, s, values, vectors @ T.diag(values) @ vectors.t(),
        L.svdvals(a), L.eigvalsh(a), L.svd(a[:2]).Vh.shape, L.qr(a[:, :2], mode="complete").Q.shape,
            _with_gradient(T, L.eigvalsh, a)[1], _with_gradient(T, L.svdvals, a)[1]]  # fmt: skip


def norms(T):
    a = _square(T)
    L, inf = T.linalg, float("inf")
    return [
        L.norm(a), L.norm(a, dim=1), L.norm(a, 1, dim=0), L.norm(a, "fro"), L.norm(a, 2),
        L.norm(a, inf), L.norm(a, -inf), L.norm(a, 1), L.norm(a, "nuc"), L.norm(a[0], 3),
        L.norm(a, dim=(0, 1)),
        L.vector_norm(a), L.vector_norm(a, 1), L.vector_norm(a, inf, dim=1), L.vector_norm(a, 0),
        L.vector_norm(a, -inf), L.vector_norm(a, 2, dim=0, keepdim=True),
        L.vector_norm(a.float(), dtype=T.float64),
        L.matrix_norm(a), L.matrix_norm(a, 2), L.matrix_norm(T.stack([a, a]), 1),
        L.matrix_norm(a, keepdim=True), _with_gradient(T, L.vector_norm, a),
        _with_gradient(T, lambda x: L.norm(x, 2), a), a.norm(), T.norm(a, p=1, dim=0),
        T.norm(a, "fro"), T.norm(a.float(), dtype=T.float64),
    ]  # fmt: skip


def refusals(T):
    L = T.linalg
    return [
        refused_with(lambda: L.inv(T.zeros(2, 2))) in ("LinAlgError", "_LinAlgError"),
        refused_with(lambda: L.cholesky(-T.eye(2))) in ("LinAlgError", "_LinAlgError"),
        refused_with(lambda: L.inv(T.ones(2, 3))),
        refused_with(lambda: L.solve(T.zeros(2, 2), T.ones(2))) in ("LinAlgError", "_LinAlgError"),
        refused_with(lambda: L.det(T.ones(3))),
        refused_with(lambda: L.norm(T.ones(2, dtype=T.int64))),
        refused_with(lambda: L.norm(T.ones(2, 2, 2), 1)),
        issubclass(L.LinAlgError, RuntimeError),
    ]  # fmt: skip
