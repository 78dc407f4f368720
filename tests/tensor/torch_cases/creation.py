"""Making tensors from data and from sizes, and what tensors tell about themselves."""

import math

from parity import refused, refused_with


def from_data(T):
    import numpy as np

    made = [
        T.tensor(1), T.tensor(1.5), T.tensor(True), T.tensor([1, 2]), T.tensor([1, 2.5]),
        T.tensor([[1.0], [2]]),
        T.tensor([]), T.tensor([[]]), T.tensor([True, False]), T.tensor(1 + 2j), T.tensor((1, 2)),
        T.tensor(range(3)),
        T.tensor([1, 2], dtype=T.float32), T.tensor([1.9], dtype=T.int64), T.tensor(np.float32(2)),
        T.tensor(np.arange(3)),
        T.tensor(np.array([1.0])), T.tensor(np.array([1, 2], dtype=np.int32)),
        T.tensor([T.tensor(1), T.tensor(2)]),
        T.tensor([np.float64(1.5)]), T.tensor(T.tensor([1.0])), T.tensor(2**40),
        T.tensor([0, 255], dtype=T.uint8),
        T.tensor(np.array(True)), T.tensor([1, True]), T.tensor([0.5], dtype=T.bool),
        T.tensor(1e10), T.tensor([-1], dtype=T.bfloat16),
        T.as_tensor([1, 2]), T.as_tensor(np.ones(2)), T.as_tensor(3.0),
        T.as_tensor(T.ones(1), dtype=T.int64), T.asarray([1.0]),
        T.from_numpy(np.arange(4, dtype=np.int16)), T.from_numpy(np.zeros((2, 0))),
        T.from_numpy(np.array([1.5, 2])),
        T.Tensor([1, 2]), T.Tensor([[1], [2]]), T.Tensor(), T.Tensor(2, 0), T.LongTensor([1, 2]),
        T.FloatTensor([[1]]),
        T.FloatTensor(2, 3).zero_(), T.ByteTensor([1]), T.BoolTensor([1, 0]), T.DoubleTensor([1]),
        T.IntTensor([3]), T.HalfTensor([1]),
    ]  # fmt: skip
    return made


def refused_data(T):
    return [
        refused_with(lambda: T.tensor([[1, 2], [3]])), refused_with(lambda: T.tensor("a")),
        refused_with(lambda: T.tensor(None)),
        refused_with(lambda: T.from_numpy([1])), refused_with(lambda: T.zeros(-1)),
        refused_with(lambda: T.zeros(2, dtype=T.int64, requires_grad=True)),
        refused_with(lambda: T.device("nothing")),
        refused_with(lambda: T.zeros(2, device="nothing")), refused(lambda: T.arange(0, 5, 0)),
        refused(lambda: T.arange(0, 5, -1)), refused_with(lambda: T.tensor(object())),
        refused_with(lambda: T.empty(2, device="meta").item()),
        refused_with(lambda: T.ones(2).item()), refused(lambda: T.ones(2).__bool__()),
        refused(lambda: bool(T.ones(0))),
        refused_with(lambda: T.ones(2, requires_grad=True).numpy()),
        refused_with(lambda: T.ones(1).__index__()), refused_with(lambda: [0, 1][T.tensor([0, 1])]),
    ]  # fmt: skip


def by_size(T):
    x = T.ones(2, 3, dtype=T.float64)
    return [
        T.zeros(2, 3), T.zeros((2, 3)), T.zeros([2]), T.zeros(()), T.zeros(0),
        T.zeros(T.Size([1, 2])), T.ones(2, dtype=T.int64), T.ones(3, dtype=T.bool),
        T.full((2, 2), 7), T.full((2,), 1.5), T.full((1,), True), T.full((2,), 3, dtype=T.float32),
        T.full((), 2), T.eye(2), T.eye(2, 3), T.empty(2, 3).shape,
        T.zeros_like(x), T.ones_like(x), T.full_like(x, 5), T.zeros_like(x, dtype=T.int64),
        T.empty_like(x).shape, x.new_zeros(2), x.new_ones((2, 1)),
        x.new_full((2,), 3), x.new_tensor([1, 2]), x.new_empty(3).dtype,
        x.new_zeros(1, dtype=T.int64), T.arange(5), T.arange(1, 4), T.arange(0, 1, 0.25),
        T.arange(5.0), T.arange(5, 0, -2), T.arange(3, dtype=T.float32), T.arange(T.tensor(3)),
        T.linspace(0, 1, 5), T.linspace(-1, 2, 4, dtype=T.float64),
        T.logspace(0, 2, 3), T.tril_indices(3, 3), T.triu_indices(2, 3, 1),
        T.ones(2, requires_grad=True).requires_grad,
        T.zeros_like(x, memory_format=T.preserve_format),
        T.empty(2, device="meta").shape, T.zeros(2, 3, device="cpu").device.type,
        T.zeros(2, device=T.device("cpu")).device == T.device("cpu"), T.arange(0, 10, 3),
        T.arange(0.5, 3),
        T.ones(2, 3, requires_grad=True).new_zeros(2).requires_grad, T.arange(2, 2),
        T.linspace(3, 4, 1), T.randint(5, (2, 3)).shape, T.zeros((2,)),
    ]  # fmt: skip


def description(T):
    x = T.zeros(2, 3, dtype=T.bfloat16)
    return [
        x.shape == (2, 3), x.ndim, x.dim(), x.numel(), x.size(), x.size(0), x.element_size(),
        x.itemsize, x.nbytes, x.dtype, x.is_floating_point(), x.is_complex(),
        x.requires_grad, x.is_leaf, x.grad, x.grad_fn, x.is_meta, x.is_cuda, x.is_cpu, x.type(),
        x.is_contiguous(), x.stride(),
        x.storage_offset(), x[1:].storage_offset(), T.is_tensor(x), T.is_tensor(1), T.numel(x),
        T.is_floating_point(x), len(x), x.get_device(), x.is_signed(), x.is_sparse,
        x.nelement(), hash(x) == hash(x), T.zeros(1, dtype=T.uint8).is_signed(), x.output_nr,
        x.T.shape, x.mT.shape, str(x.layout) in ("torch.strided", "strided"),
    ]  # fmt: skip


def numbers_from_tensors(T):
    x = T.tensor([[1, 2], [3, 4]])
    return [
        x.tolist(), x[0, 1].item(), T.tensor(2.5).item(), T.tensor(True).item(),
        T.tensor([7]).item(), float(T.tensor(2)), int(T.tensor(2.9)), bool(T.tensor(0)),
        complex(T.tensor(1j)), T.tensor(1.5, dtype=T.bfloat16).item(), T.tensor(2**62).item(),
        [10, 20, 30][T.tensor(1)], f"{T.tensor(3.14159):.2f}", round(float(T.tensor(2.567)), 1),
        T.tensor(3.0).tolist(), x.numpy().tolist(), str(x.numpy().dtype),
        T.ones(2, requires_grad=True).detach().numpy().tolist(), T.zeros(0).tolist(),
        x.float().numpy().sum().item(),
        T.tensor([1.5]).half().tolist(), math.sqrt(T.tensor(4.0)), "%d" % T.tensor(3),
        range(T.tensor(3)) == range(3), list(map(int, x[0])), sum(x[0]).item(),
        T.tensor(1.0, dtype=T.float64).item() / 3, T.tensor(0.1).item(),
        max(T.tensor([1, 3])).item(), T.tensor(True) and 5,
    ]  # fmt: skip


def numpy_crossing(T):
    import numpy as np

    x = T.tensor([[1.0, 2.0]])
    n = np.array([[3.0], [4.0]], dtype=np.float32)
    return [
        np.asarray(x).tolist(), np.sum(x.numpy()).item(), np.array(x, dtype=np.int64).tolist(),
        (x @ T.from_numpy(n)), x * np.float32(2), x + np.int64(1),
        np.float64(2) * x, isinstance(x.numpy(), np.ndarray), T.tensor(n).dtype,
        np.stack([T.ones(2).numpy(), np.zeros(2)]).tolist(),
        str(T.zeros(1, dtype=T.int64).numpy().dtype),
        T.from_numpy(n).tolist(), T.tensor([np.int64(3)]).dtype, x.new_tensor(n).dtype, x + n,
        x == n, x @ n, np.float64(2) * x, x - n.astype(np.float64), refused_with(lambda: n * x),
        refused_with(lambda: x + [1]), np.exp(x * 0),
    ]  # fmt: skip


def conversions(T):
    x = T.tensor([0.0, 1.7, -2.3, 300.0])
    return [
        x.int(), x.long(), x.bool(), x.half(), x.double(), x.bfloat16(), x.to(T.int16),
        x[:2].byte(), x[:3].char(), x.short(), x.to("cpu").dtype, x.to(T.float64, copy=True),
        x.type(T.int64),
        x.to(T.zeros(1, dtype=T.int32)), x.to(device="cpu", dtype=T.float16),
        x.type_as(T.zeros(1, dtype=T.float64)), x.float() is x, x.to(x) is x,
        x.to("cpu", T.float64).dtype, x.cpu() is x,
        T.tensor([True]).int(), T.tensor([2]).bool(),
        x.to(dtype=T.float64, non_blocking=True).dtype, x.cfloat().dtype,
    ]  # fmt: skip


def comparisons(T):
    a, b = T.tensor([1.0, 2.0, float("nan")]), T.tensor([1.0, 2.1, float("nan")])
    c = T.tensor([1.0, 2.0 + 1e-6])
    return [
        T.isclose(a, b), T.isclose(a, b, equal_nan=True), T.isclose(a, b, atol=0.2),
        T.allclose(c, T.tensor([1.0, 2.0])), T.allclose(a, a), T.allclose(a, a, equal_nan=True),
        T.equal(c, c),
        T.equal(a, a), T.equal(c, T.ones(3)), a == 1, a != b, a < 2, a > 1.5, a >= b,
        (a == a).all().item(), T.eq(a, b), T.ge(a, 1), T.isnan(a),
        T.isinf(T.tensor([1.0, float("inf")])), a.isfinite(),
        T.isclose(T.tensor([1, 2]), T.tensor([1, 3])),
        refused_with(lambda: T.isclose(a, a.double())), T.is_nonzero(T.tensor(1)), c.equal(c),
        c.allclose(c), T.isposinf(T.tensor([float("inf")])),
        T.signbit(T.tensor([-1.0, 0.0])), T.logical_not(T.tensor([0, 2])),
        T.tensor([1, 2]) == T.tensor([1, 3]), T.less(c, c), T.greater_equal(c, 1),
    ]  # fmt: skip


def default_devices(T):
    log = [str(T.get_default_device())]
    with T.device("meta"):
        log.append(T.zeros(2).is_meta)
        log.append(T.tensor([1.0]).is_meta)
        log.append(T.zeros(2, device="cpu").is_meta)
        log.append(T.randn(2).is_meta)
        log.append(str(T.get_default_device()))
    log.append(T.zeros(2).is_meta)
    T.set_default_device("meta")
    log.append(T.ones(1).is_meta)
    T.set_default_device(None)
    log.append(T.ones(1).is_meta)
    d = T.device("cuda:1")
    log += [
        d.type,
        d.index,
        str(d),
        repr(d),
        T.device("cuda", 1) == d,
        T.device("cpu").index,
        {d: 1}[T.device("cuda:1")],
        T.device(T.device("cpu")).type,
    ]
    return log


def meta_tensors(T):
    x = T.empty(2, 3, device="meta", requires_grad=True)
    y = (x @ x.t()).relu().sum(1)
    z = x[0, 1:].view(2, 1)
    return [y.shape, y.is_meta, y.requires_grad, z.shape, T.cat([x, x]).shape,
        x.to(T.float16).dtype, T.zeros_like(x).is_meta, refused_with(lambda: x.tolist()),
        refused_with(lambda: x.to("cpu")),
            refused_with(lambda: x.numpy(force=True)), x.detach().add_(1).is_meta,
            x.to("meta") is x, x.shape, x.detach().zero_().shape,
            x[None].expand(2, 2, 3).shape]  # fmt: skip


def clones(T):
    z = T.tensor([-0.0, 1.0])
    c = z.clone()
    return [
        T.signbit(c),
        c,
        T.clone(z, memory_format=T.preserve_format),
        z.contiguous(memory_format=T.contiguous_format) is z,
        T.detach(z).requires_grad,
    ]


def in_place_shape_ops(T):
    x = T.arange(6.0).reshape(2, 3)
    alias = x.view(-1)
    x.t_()
    y = x.unsqueeze_(0)
    alias[1] = 50
    shape = list(x.shape)
    x.squeeze_(0).transpose_(0, 1)
    w = T.ones(3, requires_grad=True)
    z = w * 2
    z.unsqueeze_(1)
    z.sum().backward()
    return (
        x,
        y is x,
        shape,
        z.shape,
        w.grad,
        refused(lambda: w.unsqueeze_(0)),
        T.zeros(3, 3).fill_diagonal_(2),
    )


def in_place_math(T):
    x = T.tensor([0.5, 1.5])
    log = []
    for name in (
        "exp_",
        "log_",
        "sqrt_",
        "neg_",
        "abs_",
        "sin_",
        "sigmoid_",
        "tanh_",
        "reciprocal_",
        "floor_",
        "relu_",
        "square_",
        "rsqrt_",
        "round_",
    ):
        log.append(getattr(x.clone(), name)())
    log += [x.clone().add_(1, alpha=2), x.clone().sub_(0.5), x.clone().mul_(x), x.clone().div_(2),
        x.clone().pow_(2), x.clone().clamp_(0.6, 1), x.clone().lerp_(T.zeros(2), 0.5),
            x.clone().addcmul_(x, x, value=2), x.clone().addcdiv_(x, x, value=-1),
            x.clone().masked_fill_(x > 1, 0), x.clone().fill_(3), x.clone().zero_(),
            x.clone().copy_(T.tensor(9.0)),
            x.clone().maximum(T.ones(2)), x.clone().clamp_min_(1), x.clone().nan_to_num_(),
            x.clone().remainder_(0.4), x.clone().cumsum_(0), T.ones(2, 2).tril_(),
            T.ones(2, 2).triu_(1)]  # fmt: skip
    y = x.clone()
    y += 1
    y *= 2
    y -= x
    y /= 3
    y **= 2
    y //= 1
    y %= 5
    m = T.tensor([True, False])
    m &= T.tensor([True, True])
    m |= T.tensor([False, True])
    m ^= True
    log += [y, m]
    return log
