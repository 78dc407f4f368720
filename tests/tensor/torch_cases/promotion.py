"""The dtype of a result: pairs of dtypes, dims against 0-d against numbers, and kinds of ops."""

from parity import refused, refused_with

_NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
          "float64", "complex64", "complex128")  # fmt: skip
_FEW = ("bool", "uint8", "int64", "bfloat16", "float32", "float64")


def _meta(T, name, shape=(2,)):
    return T.empty(shape, dtype=getattr(T, name), device="meta")


def promote_types(T):
    return [[T.promote_types(getattr(T, a), getattr(T, b)) for b in _NAMES] for a in _NAMES]


def result_type_of_tensors(T):
    return [
        [T.result_type(_meta(T, a, s), _meta(T, b, t)) for b in _NAMES if b != "float16"]
        for a in _NAMES
        if a != "float16"
        for s, t in (((2,), (2,)), ((2,), ()), ((), ()))
    ]


def result_type_with_numbers(T):
    return [
        [T.result_type(_meta(T, a, s), n) for n in (True, 2, 2.5, 1j)]
        for a in _NAMES
        if a != "float16"
        for s in ((2,), ())
    ]


def can_cast(T):
    return [[T.can_cast(getattr(T, a), getattr(T, b)) for b in _NAMES] for a in _NAMES]


def binary_ops(T):
    ops = (
        lambda a, b: a + b, lambda a, b: a * b, lambda a, b: a / b, lambda a, b: a // b,
        lambda a, b: a**b, lambda a, b: a == b, lambda a, b: a < b, T.maximum, T.atan2, T.fmod,
        lambda a, b: T.where(_meta(T, "bool"), a, b), T.logical_and, T.copysign,
    )  # fmt: skip
    pairs = [(a, b) for a in _FEW for b in _FEW if (a, b) != ("bool", "bool")]
    return [[op(_meta(T, a), _meta(T, b)).dtype for op in ops] for a, b in pairs]


def ops_with_numbers(T):
    found = []
    for name in _FEW:
        x = _meta(T, name)
        found.append([(x + n).dtype for n in (True, 2, 2.5)])
        found.append([(x * n).dtype for n in (True, 2, 2.5)])
        found.append([(n / x).dtype for n in (True, 2, 2.5)])
        found.append(
            [
                (x // 2).dtype,
                (x % 2).dtype,
                (x > 1.5).dtype,
                T.clamp(x, 0, 1.5).dtype if name != "bool" else None,
            ]
        )
        if name != "bool":
            found.append([(n - x).dtype for n in (2, 2.5)])
            found.append([(x**n).dtype for n in (2, 2.5)] + [(n**x).dtype for n in (2, 2.5)])
    return found


def unary_ops(T):
    ops = (
        T.exp,
        T.sqrt,
        T.sin,
        T.sigmoid,
        T.log,
        T.reciprocal,
        T.rsqrt,
        T.tanh,
        T.erf,
        T.isnan,
        T.logical_not,
        T.isfinite,
        T.square,
        T.atan,
    )
    signed = (T.abs, T.sign, T.neg)
    found = [[op(_meta(T, name)).dtype for op in ops] for name in _FEW]
    return found + [[op(_meta(T, name)).dtype for op in signed] for name in _FEW[1:]]


def rounding_ops(T):
    ops = (T.ceil, T.floor, T.round, T.trunc)
    return [[op(_meta(T, name)).dtype for op in ops] for name in _FEW[1:]]


def reductions(T):
    ops = (
        T.sum, T.prod, lambda x: x.cumsum(0), lambda x: x.amax(), lambda x: x.max(0).values,
        lambda x: x.argmax(), lambda x: x.all(), lambda x: x.any(0), T.count_nonzero,
        lambda x: x.sum(dtype=T.float64), lambda x: x.sort().indices, lambda x: x.cumprod(0),
    )  # fmt: skip
    floats = (T.mean, T.var, T.std, lambda x: x.norm(), lambda x: x.logsumexp(0))
    found = [
        [op(_meta(T, name)).dtype for op in ops if name != "bool" or op is not ops[5]]
        for name in _FEW
    ]
    found += [[op(_meta(T, name)).dtype for op in floats] for name in _FEW[3:]]
    return found, [
        refused(lambda: T.mean(T.ones(2, dtype=T.int64))),
        T.mean(T.ones(2, dtype=T.int64), dtype=T.float32),
    ]


def joins(T):
    return [
        [T.cat([_meta(T, a), _meta(T, b)]).dtype, T.stack([_meta(T, a), _meta(T, b)]).dtype]
        for a in _FEW
        for b in _FEW
    ]


def values_after_promotion(T):
    i, u = T.tensor([1, 2, 3]), T.tensor([200, 100], dtype=T.uint8)
    h = T.tensor([1.0, 2.0], dtype=T.bfloat16)
    return (
        i / 2, i // 2, -i // 2, i % -2, i + 0.5, i * True, u + u, u + 100, u.sum(), i.float() / 3,
        h * 1.5, h + T.tensor(1.001), h + T.ones(2),
        T.tensor([True, False]) + T.tensor([True, True]),
        T.tensor([True, False]).sum(), i.prod(), (i > 1) * 2, (i > 1) & (i < 3), ~(i > 1), i << 2,
        i >> 1,
        i & 1, i | 4, i ^ 1, T.tensor(2**40) + 1, T.tensor([2**31]) * 2,
        T.tensor(1.0, dtype=T.float64) / 3,
        T.tensor(7) // 2, T.tensor(-7) % 3, T.fmod(T.tensor(-7), 3), T.tensor(-7.5) // 2,
        T.bitwise_not(u),
        T.where(T.tensor([True, False]), 1, 2.5), T.where(T.tensor([True, False]), T.tensor(1), 2),
    )  # fmt: skip


def in_place_rules(T):
    i, f = T.ones(2, dtype=T.int64), T.ones(2)
    return (
        refused(lambda: i.add_(0.5)), refused(lambda: i.div_(2)),
        refused(lambda: T.ones(1, dtype=T.bool).add_(1)),
        f.add_(T.ones(2, dtype=T.float64)), f.mul_(i), i.mul_(True),
        refused(lambda: f.add_(T.ones(3))),
        refused(lambda: f.add_(T.ones(3, 2))), refused(lambda: i.add_(1j)),
        T.ones(2, dtype=T.float16).add_(0.1),
        i.floor_divide_(2), refused(lambda: i.pow_(0.5)), i.eq_(0), i.copy_(T.tensor([1.9, -1.9])),
        f.copy_(T.tensor(3)),
        T.zeros(2, dtype=T.bool).copy_(T.tensor([0.5, 0.0])), f.fill_(True), i.fill_(2.7),
    )  # fmt: skip


def default_dtype(T):
    try:
        T.set_default_dtype(T.float64)
        found = [T.zeros(1).dtype, T.tensor(1.5).dtype, (T.tensor([1]) / 2).dtype,
            (T.tensor([1]) * 1.5).dtype,
                 T.tensor(1j).dtype, T.get_default_dtype(), T.arange(3.0).dtype,
                 T.exp(T.tensor([1])).dtype,
                 (T.ones(1, dtype=T.float32) * 1.5).dtype, T.rand(1).dtype,
                 T.linspace(0, 1, 2).dtype]  # fmt: skip
    finally:
        T.set_default_dtype(T.float32)
    return found, T.zeros(1).dtype, refused_with(lambda: T.set_default_dtype(T.int64))


def shape_mismatches(T):
    a, b = T.ones(3), T.ones(4)
    return [
        refused(lambda: a + b), refused(lambda: T.ones(2, 3) * T.ones(2, 4)),
        refused(lambda: T.ones(2, 3) - T.ones(3, 3)),
        refused(lambda: T.ones(2, 3, 4) / T.ones(2, 1)), refused(lambda: a == b),
        refused(lambda: T.maximum(a, b)),
        refused(lambda: T.ones(2, 3) @ T.ones(4, 5)), refused(lambda: T.ones(2, 3) @ T.ones(4)),
        refused(lambda: a @ b),
        refused(lambda: T.ones(3) @ T.ones(4, 2)), refused(lambda: T.ones(2, 2, 3) @ T.ones(4, 5)),
        refused(lambda: T.bmm(T.ones(2, 2, 3), T.ones(2, 4, 5))),
        refused(lambda: T.bmm(T.ones(2, 2, 3), T.ones(3, 3, 5))),
        refused(lambda: T.mm(T.ones(2), T.ones(2, 2))), refused(lambda: T.tensor(1.0) @ a),
        refused(lambda: T.ones(2, 2) @ T.ones(2, 2, dtype=T.float64)),
        refused(lambda: T.addmm(T.ones(2), T.ones(2, 3), T.ones(4, 2))),
        refused(lambda: T.cat([T.ones(2, 2), T.ones(2, 3)])), refused(lambda: T.stack([a, b])),
        refused(lambda: T.cat([T.ones(2), T.ones(2, 2)])),
        refused_with(lambda: _meta(T, "float32", (2, 3)) + _meta(T, "float32", (4,))),
        refused(lambda: T.dot(T.ones(2, 2), a)),
        refused(lambda: T.ones(2, dtype=T.bool) - T.ones(2, dtype=T.bool)),
        refused(lambda: T.tensor([2]) ** -1),
        refused_with(lambda: a + "x"), refused_with(lambda: a + None),
        refused_with(lambda: [1] * a), a == None, a != None, a == "x",  # noqa: E711
    ]  # fmt: skip
