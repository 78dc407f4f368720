"""Every op of the table in float64: its value, and the gradients of all its inputs.

A row names the op, how it is called, and its inputs: a kind and a shape. Kinds are x (any sign, not
near 0), p (positive), u (in (0, 1)), g (above 1), n (near 0 too), i (int64) and b (bool).
"""

import math
import random

_RANGES = {"x": (0.2, 2.0), "p": (0.3, 3.0), "u": (0.1, 0.9), "g": (1.1, 3.0), "n": (0.0, 0.4)}


def _values(kind, count, rng):
    if kind == "i":
        return [rng.randrange(-4, 5) for _ in range(count)]
    if kind == "b":
        return [rng.random() < 0.5 for _ in range(count)]
    low, high = _RANGES[kind]
    signs = (-1, 1) if kind in "xn" else (1,)
    return [rng.choice(signs) * rng.uniform(low, high) for _ in range(count)]


def inputs(T, name, kinds):
    """The inputs of a row: the same numbers in either library."""
    rng = random.Random(name)
    made = []
    for kind in kinds:
        shape = [int(c) for c in kind[1:]]
        count = 1
        for size in shape:
            count *= size
        values = T.tensor(_values(kind[0], count, rng))
        if kind[0] not in "ib":
            values = values.to(T.float64)
        made.append(values.reshape(shape))
    return made


def _weights(T, out):
    """A gradient for ``out``: another number for each element."""
    values = [math.sin(i + 1) for i in range(out.numel())]
    for size in reversed(out.shape[1:]):
        values = [values[i : i + size] for i in range(0, len(values), size)]
    values = values if out.dim() else values[0]
    return T.tensor(values, dtype=out.dtype)


def listed(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _unary(names, kind="x23"):
    return {n: ((lambda T, x, n=n: getattr(T, n)(x)), [kind]) for n in names.split()}


def _binary(names, kinds):
    return {n: ((lambda T, a, b, n=n: getattr(T, n)(a, b)), kinds) for n in names.split()}


ROWS = {
    **_unary(
        "abs neg sign square exp exp2 expm1 sin cos tan sinh cosh tanh asinh atan sigmoid erf "
        "erfc relu ceil floor trunc frac round sinc positive deg2rad rad2deg digamma lgamma"
    ),
    **_unary("sqrt rsqrt log log2 log10 log1p reciprocal", "p23"),
    **_unary("asin acos atanh erfinv logit", "u23"),
    **_unary("acosh", "g23"),
    **_binary("add sub mul div maximum minimum fmax fmin hypot copysign logaddexp atan2",
        ["x23", "x3"]),
    **_binary("remainder fmod", ["x23", "p13"]),
    "floor_divide": (lambda T, a, b: T.floor_divide(a, b).detach(), ["x23", "p3"]),
    **_binary("xlogy", ["x23", "p23"]),
    **_binary("pow", ["p23", "x3"]),
    **_binary("float_power", ["p2", "x2"]),
    **_unary("sum mean prod std var amax amin max min median logsumexp_all norm all_sum", "x23"),
    "sgn": (lambda T, a: T.sgn(a).detach(), ["x23"]),
    "add_alpha": (lambda T, a, b: T.add(a, b, alpha=0.5), ["x23", "x3"]),
    "sub_alpha": (lambda T, a, b: T.sub(a, b, alpha=3), ["x23", "x3"]),
    "rsub": (lambda T, a: [2 - a, 2 / a, 2**a, -a, +a, abs(a)], ["p23"]),
    "scalars": (lambda T, a: [a + 1, a - 1.5, a * 2, a / 4, a % 0.7, (a // 0.7).detach()], ["x23"]),
    "pow_scalar": (lambda T, a: [a**2, a**3, a**0.5, a**-1, a**1.5, a**4, a**1, a**-2.5], ["p23"]),
    "pow_at_zero": (lambda T, a: [(a * 0) ** 2, (a * 0) ** 3, (a * 0) ** 1, (a * 0) ** 0], ["x2"]),
    "pow_base": (lambda T, a: [T.pow(2, a), 0.5**a], ["x23"]),
    "lerp": (lambda T, a, b, w: T.lerp(a, b, w), ["x23", "x23", "u23"]),
    "lerp_scalar": (lambda T, a, b: [T.lerp(a, b, 0.3), T.lerp(a, b, 0.8)], ["x23", "x23"]),
    "addcmul": (lambda T, a, b, c: T.addcmul(a, b, c, value=0.5), ["x23", "x3", "x23"]),
    "addcdiv": (lambda T, a, b, c: T.addcdiv(a, b, c, value=0.5), ["x23", "x3", "p23"]),
    "where": (lambda T, m, a, b: [T.where(m, a, b), T.where(m, a, 0.5), a.where(m, b)],
        ["b23", "x23", "x3"]),
    "masked_fill": (lambda T, a, m: a.masked_fill(m, -1.5), ["x23", "b23"]),
    "masked_fill_tensor": (lambda T, a, m, v: a.masked_fill(m, v), ["x23", "b3", "x"]),
    "clamp": (lambda T, a: [a.clamp(-1, 1), a.clamp(min=0.5), a.clamp(max=0.5), T.clip(a, -1, 0)],
        ["x23"]),
    "clamp_tensor": (lambda T, a, b: [a.clamp(b), T.clamp(a, max=b)], ["x23", "x3"]),
    "clamp_min": (lambda T, a: [a.clamp_min(0.5), T.clamp_max(a, 0.5)], ["x23"]),
    "nan_to_num": (lambda T, a: T.nan_to_num(T.log(a)), ["x23"]),
    "maximum_ties": (lambda T, a: [T.maximum(a, a), T.minimum(a, a), T.amax(a * 0, 1)], ["x23"]),
    "round_decimals": (lambda T, a: T.round(a, decimals=1).detach() + a, ["x23"]),
    "div_modes": (lambda T, a, b: [T.div(a, b, rounding_mode="floor") + a,
        T.div(a, b, rounding_mode="trunc") + b], ["x23", "x3"]),
    "polar": (lambda T, a, b: T.polar(a, b), ["p23", "x23"]),
    "complex": (lambda T, a, b: [T.complex(a, b).abs(), T.complex(a, b).real, T.complex(a, b).imag,
        T.complex(a, b).angle(), T.complex(a, b) * T.complex(b, a), T.complex(a, b).conj() * 1],
        ["x2", "x2"]),
    "view_as": (lambda T, a: T.view_as_real(T.view_as_complex(a) ** 2), ["x32"]),
    "sum_dims": (lambda T, a: [a.sum(1), a.sum((0, 2)), a.sum(-1, keepdim=True), a.sum(axis=0),
        a.sum(dim=[])], ["x232"]),
    "mean_dims": (lambda T, a: [a.mean(1), a.mean((0, 2)), a.mean(-1, keepdim=True)], ["x232"]),
    "prod_dims": (lambda T, a: [a.prod(1), a.prod(0, keepdim=True)], ["x23"]),
    "var_dims": (lambda T, a: [a.var(1), a.var(0, unbiased=False), a.var((0, 2), correction=0),
        a.var(False)], ["x232"]),
    "std_dims": (lambda T, a: [a.std(1), a.std(1, keepdim=True, unbiased=False), *T.std_mean(a, 0),
        *T.var_mean(a, 1)], ["x33"]),
    "amax_dims": (lambda T, a: [a.amax(1), a.amin((0, 1)), *a.aminmax(dim=1)], ["x232"]),
    "max_dim": (lambda T, a: [*a.max(1), *a.min(0, keepdim=True), *T.max(a, dim=-1)], ["x23"]),
    "arg_dims": (lambda T, a: [a.argmax(), a.argmax(1), a.argmin(0, keepdim=True), a.sum()],
        ["x23"]),
    "max_two": (lambda T, a, b: [T.max(a, b), T.min(a, b)], ["x23", "x23"]),
    "all_any": (lambda T, b, a: [b.all(), b.any(1), T.all(b, 0), b.any(0, keepdim=True), a.sum()],
        ["b23", "x2"]),
    "cumulative": (lambda T, a: [a.cumsum(1), a.cumprod(0), a.logcumsumexp(1), *a.cummax(1),
        *a.cummin(0)], ["x33"]),
    "logsumexp": (lambda T, a: [a.logsumexp(1), T.logsumexp(a, (0, 1)),
        a.logsumexp(0, keepdim=True)], ["x23"]),
    "norms": (lambda T, a: [a.norm(), a.norm(1), a.norm(3, dim=1), a.norm(float("inf")),
        a.norm(2, 0, True), T.dist(a, a * 2)], ["x23"]),
    "norm_of_zero": (lambda T, a: [(a * 0).norm(), (a * 0).norm(dim=1)], ["x23"]),
    "nan_reductions": (lambda T, a: [T.nansum(a.log()), T.nansum(a.log(), 1)], ["p23"]),
    "count": (lambda T, i, a: [i.count_nonzero(), i.count_nonzero(1), a.sum()], ["i23", "x2"]),
    "sorts": (lambda T, a: [*a.sort(), *a.sort(0, descending=True), a.argsort(1), a.msort()],
        ["x33"]),
    "topk": (lambda T, a: [*a.topk(2), *a.topk(1, 0, largest=False)], ["x33"]),
    "kthvalue": (lambda T, a: [*a.kthvalue(2), *a.median(1), *a.median(0, keepdim=True),
        a.median()], ["x34"]),
    "quantile": (lambda T, a: [a.quantile(0.3), a.quantile(0.75, dim=1),
        T.quantile(a, T.tensor([0.1, 0.5], dtype=T.float64), dim=0)], ["x34"]),
    "diff": (lambda T, a: [a.diff(), T.diff(a, n=2, dim=0)], ["x34"]),
    "matmul": (lambda T, a, b: [a @ b, T.mm(a, b), a.matmul(b)], ["x23", "x32"]),
    "matmul_batched": (lambda T, a, b, c: [a @ b, T.matmul(a, c), T.matmul(c, c)],
        ["x223", "x32", "x3"]),
    "matmul_broadcast": (lambda T, a, b: T.matmul(a, b), ["x2123", "x332"]),
    "bmm": (lambda T, a, b: [T.bmm(a, b), T.baddbmm(T.bmm(a, b), a, b, beta=0.5, alpha=2)],
        ["x223", "x232"]),
    "vectors": (lambda T, m, a, b: [T.dot(a, b), T.vdot(a, b), T.mv(m, a), T.outer(a, b),
        T.inner(a, b), T.addmv(b[:2], m, a)], ["x23", "x3", "x3"]),
    "addmm": (lambda T, c, a, b: T.addmm(c, a, b, beta=0.5, alpha=2), ["x2", "x23", "x32"]),
    "einsum": (lambda T, a, b: [T.einsum("ij,jk->ik", a, b), T.einsum("ij,jk", a, b),
        T.einsum("ij->j", a), T.einsum("ij,ij->", a, a)], ["x23", "x32"]),
    "tensordot": (lambda T, a, b: [T.tensordot(a, b, 1), T.tensordot(a, b, ([0, 1], [1, 0]))],
        ["x23", "x32"]),
    "kron": (lambda T, a, b: T.kron(a, b), ["x22", "x12"]),
    "cross": (lambda T, a, b: [T.cross(a, b, dim=1), a.cross(b, dim=-1)], ["x23", "x23"]),
    "trace": (lambda T, a: [T.trace(a), T.matrix_power(a, 3)], ["x33"]),
    "cat": (lambda T, a, b: [T.cat([a, b]), T.concat((a, a), 1), T.cat([a, b[:0]], 0),
        T.cat([T.zeros(0), a])], ["x23", "x13"]),
    "stack": (lambda T, a, b: [T.stack([a, b]), T.stack((a, b), -1), T.hstack([a, b]),
        T.vstack([a, b]), T.dstack([a, b]), T.column_stack([a, b])], ["x3", "x3"]),
    "tile": (lambda T, a: [a.repeat(2, 1), a.repeat(2, 1, 1), a.tile(2), T.tile(a, (2, 2)),
        a.repeat_interleave(2, 0), a.repeat_interleave(2)], ["x23"]),
    "repeat_counts": (lambda T, a: T.repeat_interleave(a, T.tensor([1, 0, 2]), dim=1), ["x23"]),
    "flip": (lambda T, a: [a.flip(0), T.flip(a, (0, -1)), a.fliplr(), a.flipud(), a.roll(1),
        a.roll((1, 2), (0, 1)), T.rot90(a)], ["x23"]),
    "triangles": (lambda T, a: [a.tril(), a.triu(1), a.tril(-1), T.triu(a, -1)], ["x33"]),
    "diag": (lambda T, a, v: [a.diag(), T.diag(v), T.diag(v, 1), a.diagonal(1), T.diag_embed(v),
        T.diagflat(v, -1), T.block_diag(a, v)], ["x33", "x2"]),
    "shapes": (lambda T, a: [a.view(3, 2), a.t(), a.unsqueeze(0), a.expand(2, 2, 3),
        a.permute(1, 0), a.flatten(), a.narrow(1, 1, 2), a[None, 1], a.movedim(0, 1),
        a.unfold(1, 2, 1), a.select(1, 0), a.swapaxes(0, 1)], ["x23"]),
    "splits": (lambda T, a: [*a.split(2, 1), *a.chunk(2), *a.unbind(1), *T.tensor_split(a, 2, 1),
        *T.hsplit(a, [1])], ["x23"]),
    "meshgrid": (lambda T, a, b: [*T.meshgrid(a, b, indexing="ij"),
        *T.meshgrid(a, b, indexing="xy"), T.cartesian_prod(a, b), T.combinations(a)], ["x2", "x3"]),
    "broadcast_tensors": (lambda T, a, b: list(T.broadcast_tensors(a, b)), ["x21", "x3"]),
    "gather": (lambda T, a: [a.gather(1, T.tensor([[0, 2], [1, 1]])),
        T.take_along_dim(a, T.tensor([[1], [0]]), 1), a.take(T.tensor([0, 5, 0]))], ["x23"]),
    "index_select": (lambda T, a: [a.index_select(0, T.tensor([1, 0, 1])),
        T.index_select(a, 1, T.tensor([2]))], ["x23"]),
    "index_ops": (lambda T, a, b: [a.index_add(0, T.tensor([1, 1]), b),
        a.index_copy(1, T.tensor([2, 0]), b[:, :2]), a.index_fill(1, T.tensor([0]), 2.5),
        T.index_add(a, 0, T.tensor([0, 1]), b, alpha=2)], ["x23", "x23"]),
    "scatter": (lambda T, a, b: [a.scatter(1, T.tensor([[0, 2], [1, 0]]), b),
        a.scatter_add(1, T.tensor([[0, 0], [1, 1]]), b), a.scatter(0, T.tensor([[1, 0, 0]]), 0.5),
        a.scatter(1, T.tensor([[0], [1]]), 3.0)], ["x23", "x22"]),
    "scatter_reduce": (lambda T, a, b: [a.scatter_reduce(1, T.tensor([[0, 0], [1, 1]]), b, r,
        include_self=s) for r in ("sum", "mean", "amax", "amin") for s in (True, False)],
        ["x23", "x22"]),
    "masked": (lambda T, a, b: [a.masked_select(a > 0), a[a < 0], T.masked_select(a, (a > 0)[0])],
        ["x23", "x23"]),
    "masked_scatter": (lambda T, a, b: a.masked_scatter(a > 0, b), ["x23", "x23"]),
    "index_put": (lambda T, a, v: [a.index_put((T.tensor([0, 0]), T.tensor([1, 1])), v,
        accumulate=True), T.index_put(a, (T.tensor([1, 0]),), v[0])], ["x23", "x2"]),
    "scatter_views": (lambda T, a, b: [a.select_scatter(b[0], 0, 1),
        a.slice_scatter(b[:, :1], 1, 0, 1)], ["x23", "x23"]),
    "casts": (lambda T, a: [a.float(), a.to(T.float32).double() * a, a.type_as(T.zeros(1)),
        a.half()], ["x23"]),
    "clone": (lambda T, a: [a.clone(), T.clone(a), a.contiguous(), a.t().contiguous(),
        a.to(T.float64, copy=True)], ["x23"]),
}  # fmt: skip
del ROWS["all_sum"], ROWS["logsumexp_all"]


def _case(name, fn, kinds):
    def case(T):
        made = inputs(T, name, kinds)
        leaves = [x.requires_grad_() if x.dtype.is_floating_point else x for x in made]
        outputs = listed(fn(T, *leaves))
        ends = [out for out in outputs if out.requires_grad]
        if ends:
            T.autograd.backward(ends, [_weights(T, out) for out in ends])
        return [outputs, [x.grad for x in leaves if x.dtype.is_floating_point]]

    return case


for _name, (_fn, _kinds) in ROWS.items():
    globals()["op_" + _name] = _case(_name, _fn, _kinds)
