"""Dtypes themselves, and 64-bit values."""


def attributes(T):
    names = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
        "float64", "complex64", "complex128")  # fmt: skip
    return [
        [getattr(T, n).itemsize, getattr(T, n).is_floating_point, getattr(T, n).is_complex,
            getattr(T, n).is_signed, str(getattr(T, n)), repr(getattr(T, n))]
        for n in names
    ], [T.float is T.float32, T.long is T.int64, T.double is T.float64, T.half is T.float16,
    T.int is T.int32, T.short is T.int16, T.cfloat is T.complex64]  # fmt: skip


def limits(T):
    floats = [T.finfo(d) for d in (T.float16, T.bfloat16, T.float32, T.float64)]
    ints = [T.iinfo(d) for d in (T.uint8, T.int8, T.int16, T.int32, T.int64)]
    return (
        [
            [f.bits, f.eps, f.max, f.min, f.tiny, f.smallest_normal, f.resolution, f.dtype]
            for f in floats
        ],
        [[i.bits, i.max, i.min, i.dtype] for i in ints],
        T.finfo().bits,
    )


def sixty_four_bits(T):
    big = T.tensor([2**53 + 1, -(2**62)])
    fine = T.tensor([1.0, 1e-12], dtype=T.float64)
    x = T.tensor([1e-9, 1.0], dtype=T.float64, requires_grad=True)
    (x * x + 1).log().sum().backward()
    view = big.view(2, 1)
    view[0] += 1
    return [
        big, big + 1, big * 2, big // 3, big.sum(), big.max(), fine.sum() - 1, fine + 1,
        fine.numpy().tolist(), x.grad, T.arange(2**40, 2**40 + 3), big[0:1], big[big > 0],
        T.cat([big, big]), big.double(), T.full((2,), 2**50), T.zeros(2, dtype=T.int64) - 2**40,
        fine.sqrt(), fine.mean(), T.randint(2**40, 2**40 + 1, (2,)), big.view(-1)[1],
        T.where(big > 0, big, 2**45), T.eye(2, dtype=T.float64) / 3,
        T.linspace(0, 1, 4, dtype=T.float64), big.bitwise_and(2**53), fine.cumsum(0),
        big.index_select(0, T.tensor([1])),
    ]  # fmt: skip


def pickled_dtypes(T):
    import copy
    import pickle

    return (
        pickle.loads(pickle.dumps(T.float32)) is T.float32,
        copy.deepcopy(T.int64) is T.int64,
        {T.bool: 1}[T.bool],
    )
