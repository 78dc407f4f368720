"""The repr of tensors, and its options."""


def _shown(T, values):
    return [repr(v) for v in values]


def kinds(T):
    return _shown(T, [
        T.tensor(1), T.tensor(1.5), T.tensor(True), T.tensor([1, 2, 30]), T.tensor([1.0, 2.0]),
        T.tensor([1.5, -2.25]), T.tensor([]), T.zeros(2, 0), T.tensor([True, False]),
        T.tensor([1e-5, 1.0]), T.tensor([1e10, 1.0]), T.tensor([0.0, float("nan"), float("inf")]),
        T.tensor([1.5, float("-inf")]), T.tensor([1e-8]), T.tensor([123456.0, 1.0]),
        T.tensor([100000.5]),
        T.tensor([1.0], dtype=T.float64), T.tensor([1], dtype=T.int32),
        T.tensor([1.5], dtype=T.bfloat16), T.tensor([1.5], dtype=T.float16),
        T.tensor([1], dtype=T.uint8), T.tensor([1 + 2j, 1.5 - 1j]),
        T.ones(2, requires_grad=True), T.zeros(3), T.zeros(2, dtype=T.int64),
        T.tensor(float("nan")), T.tensor([[1.0, -20.5], [3.25, 4.0]]), T.empty(2, 3, device="meta"),
        T.tensor([], dtype=T.int64), T.tensor([1.0, 1e8]), T.tensor([99999.0, 0.5]),
        T.tensor([0.00012, 0.5]), T.tensor(-0.0), T.tensor([1e5, 2e5]),
        T.empty(2, device="meta", dtype=T.float64),
    ])  # fmt: skip


def shapes(T):
    return _shown(
        T,
        [
            T.arange(24.0).reshape(2, 3, 4),
            T.arange(30),
            T.zeros(2, 2, 2, 2),
            T.arange(40.0) / 3,
            T.ones(1, 1, 1),
            T.arange(12).reshape(3, 4) * 1000,
            T.eye(3),
            T.zeros(3, 1),
        ],
    )


def summaries(T):
    return _shown(
        T,
        [
            T.arange(2000),
            T.arange(2000.0).reshape(40, 50),
            T.arange(1001.0) / 7,
            T.zeros(11, 10, 10),
            T.arange(1000).reshape(10, 100),
        ],
    )


def histories(T):
    x = T.ones(2, requires_grad=True)
    return _shown(T, [x + 1, (x * 2).sum(), x.detach(), x.exp().double()])


def options(T):
    log = []
    x = T.arange(2000.0) / 7
    small = T.tensor([1.123456789, 2.0])
    try:
        T.set_printoptions(precision=2)
        log.append(repr(small))
        T.set_printoptions(sci_mode=True)
        log.append(repr(small))
        T.set_printoptions(sci_mode=False, precision=6)
        log.append(repr(T.tensor([1e-9, 1.0])))
        T.set_printoptions(edgeitems=1, threshold=10, linewidth=40)
        log.append(repr(x))
        T.set_printoptions(profile="short")
        log.append(repr(x))
    finally:
        T.set_printoptions(profile="default")
    log.append(repr(x))
    return log


def formats(T):
    x = T.tensor([1.5, 2.0])
    return [
        str(x),
        f"{x}",
        f"{T.tensor(2.5)}",
        f"{T.tensor(2.5):.3f}",
        f"{T.tensor(7):d}",
        f"{x.sum().item():.1f}",
        "%s" % T.tensor(3),
        str(x.dtype),
        str(x.shape),
        str(x.device),
    ]
