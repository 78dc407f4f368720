"""Reading and writing through every kind of index."""

from parity import refused, refused_with


def _base(T):
    return T.arange(24.0).reshape(2, 3, 4)


def basic(T):
    x = _base(T)
    return [
        x[1], x[-1], x[0, 2], x[0, 2, 3], x[..., 1], x[:, 1:], x[:, ::2, 1:3], x[1:], x[2:],
        x[:, -2:],
        x[None].shape, x[:, None, 1].shape, x[..., None].shape, x[()].shape, x[...].shape,
        x[1, ..., None, 0],
        x[:, :10, 5:1].shape, x[T.tensor(1)], x[:, T.tensor(-1)], x[slice(1, None)], x[0][1][2],
        x[:, :, -3:-1],
    ]  # fmt: skip


def advanced(T):
    x, i, j = _base(T), T.tensor([0, 1, 1]), T.tensor([2, 0, 1])
    return [
        x[i], x[:, j], x[..., j], x[i, j], x[i, :, j], x[0, :, j], x[:, 0, j], x[i, 0], x[i, 1:, j],
        x[[0, 1]],
        x[[1], [2]], x[:, [0, -1]], x[i[:, None], j], x[T.tensor([[0, 1], [1, 0]])],
        x[None, i].shape, x[i, None, j].shape,
        x[i, ..., 0], x[i, j, i], x[[[0, 1], [1, 0]], 0].shape,
        x[T.tensor([], dtype=T.int64)].shape, x[:, []].shape,
        x[range(2)], x[T.tensor([0, 1], dtype=T.int32)], x[T.tensor([-1, -2])],
        x[1, T.tensor([[0], [2]]), T.tensor([1, 3])],
        x[:, None, j].shape, x[0, j, None].shape, x[i, :, None, j].shape,
    ]  # fmt: skip


def masks(T):
    x = _base(T)
    m = x % 3 == 0
    rows, cols = T.tensor([True, False]), T.tensor([False, True, True])
    return [
        x[m], x[rows], x[:, cols], x[rows, cols], x[rows, 1],
        x[..., T.tensor([True, False, False, True])],
        x[rows[:, None] & cols], x[x > 100].shape, x[True].shape, x[False].shape, x[[True, False]],
        x[0, m[0]],
        x[rows, T.tensor([0])], x[1, cols, T.tensor([1, 2])], x[T.tensor([1, 0], dtype=T.uint8)],
    ]  # fmt: skip


def setting_basic(T):
    log = []
    x = _base(T)
    x[0] = 1.0
    x[1, 1] = T.tensor([9.0, 8.0, 7.0, 6.0])
    x[..., 0] = -1
    log.append(x.clone())
    x[:, ::2] = T.arange(4.0)
    x[1, 2, 3] = T.tensor(50)
    x[0, 0:2, 1:3] = T.zeros(1, 2)
    log.append(x.clone())
    x[:] = T.ones(1, 1, 3, 4) * 3
    x[None, 0, 0, 0] = 7
    x[...] += 1
    x[0] += x[1]
    x[0, 1] *= 2
    log.append(x)
    i = T.arange(4)
    i[1] = 2.9
    i[2:] = True
    log.append(i)
    return log


def setting_advanced(T):
    log = []
    i, j = T.tensor([0, 1]), T.tensor([2, 0])
    x = _base(T)
    x[i, j] = -1.0
    x[:, :, j] = T.tensor([100.0, 200.0])
    log.append(x.clone())
    x[0, :, j] = T.arange(6.0).reshape(3, 2)
    x[i, 1, j] += 1000
    x[[1]] = 5.0
    log.append(x.clone())
    x[i, :, 0] = T.ones(3)
    x[T.tensor([-1]), T.tensor([-1])] = T.arange(4.0)
    log.append(x)
    return log


def setting_masks(T):
    log = []
    x = _base(T)
    x[x > 20] = 0
    x[x == 5] = T.tensor(55.0)
    x[x < 3] = T.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
    log.append(x.clone())
    x[T.tensor([True, False])] = 9.0
    x[:, T.tensor([False, True, False])] = T.arange(4.0)
    x[T.tensor([False, True]), 0] = 1.5
    x[x > 1000] = 1.0
    log.append(x.clone())
    x[x > 8] *= 2
    log.append(x)
    return log


def out_of_range(T):
    x = T.zeros(2, 3)
    return [
        refused(lambda: x[2]), refused(lambda: x[0, 3]), refused(lambda: x[-3]),
        refused(lambda: x[0, 0, 0]),
        refused(lambda: x[T.tensor([0, 2])]), refused_with(lambda: x[:, T.tensor([-4])]),
        refused(lambda: x[::-1]),
        refused_with(lambda: x[T.tensor([0.5])]), refused_with(lambda: x[1.5]),
        refused_with(lambda: x["a"]),
        refused_with(lambda: x[T.tensor([True, False, True])]),
        refused(lambda: x[T.tensor([0, 1]), T.tensor([0, 1, 2])]),
        refused_with(lambda: x.__setitem__(2, 1)),
        refused_with(lambda: x.__setitem__(0, T.ones(4))),
        refused_with(lambda: x.__setitem__(T.tensor([5]), 1)),
        refused_with(lambda: x.__setitem__((T.tensor([0, 1]), 0), T.ones(3))),
        refused_with(lambda: x.gather(1, T.tensor([[3]]))),
        refused_with(lambda: x.index_select(0, T.tensor([2]))),
        refused_with(lambda: x.scatter(1, T.tensor([[-4]]), 1.0)),
        refused_with(lambda: x[0].gather(0, T.tensor([[0]]))),
        refused_with(lambda: T.tensor(1.0)[0]),
        refused_with(lambda: x.index_select(0, T.tensor([[0]]))),
    ]  # fmt: skip


def gradients_through_indices(T):
    x = _base(T).requires_grad_()
    i = T.tensor([0, 1, 1])
    m = x.detach() % 2 == 0
    weights = T.arange(1.0, 7.0)
    total = (x[i, 0].sum() + (x[m][:6] * weights).sum() + (x[:, i, 1] ** 2).sum() + x[0, :,
        i].prod(0).sum()
             + x[1, 2, 3] * 2 + x[..., ::3].sum())  # fmt: skip
    total.backward()
    return x.grad


def gradients_through_writes(T):
    x, v = _base(T).requires_grad_(), T.tensor([2.0, 3.0], requires_grad=True)
    y = x * 1
    y[T.tensor([0, 1]), 1, T.tensor([2, 3])] = v
    y[y < 3] = 0.5
    y[0, :, T.tensor([3, 0])] *= 2
    y[1][T.tensor([True, False, False])] = v[0]
    (y * y).sum().backward()
    return y, x.grad, v.grad


def accumulating_writes(T):
    x = T.zeros(3, 2)
    x.index_put_((T.tensor([0, 0, 2]),), T.ones(3, 2), accumulate=True)
    x.index_add_(0, T.tensor([1, 1]), T.ones(2, 2), alpha=2)
    x.scatter_add_(1, T.tensor([[0, 0], [1, 1]]), T.ones(2, 2))
    x.scatter_(0, T.tensor([[2, 2]]), 9.0)
    x.scatter_(1, T.tensor([[0], [0], [0]]), 3.0, reduce="add")
    y = T.arange(6).reshape(2, 3)
    y.masked_fill_(y > 3, 0)
    y.index_fill_(1, T.tensor([0]), -1)
    y.index_copy_(0, T.tensor([1]), T.tensor([[7, 8, 9]]))
    y.masked_scatter_(y > 7, T.tensor([70, 80, 90]))
    return (
        x,
        y,
        x.nonzero(),
        T.nonzero(y > 5, as_tuple=True),
        T.argwhere(y == 70),
        T.nonzero(T.tensor(3)),
    )


def counting(T):
    x = T.tensor([3, 1, 2, 3, 1, 1])
    u, inverse, counts = T.unique(x, return_inverse=True, return_counts=True)
    rows = T.tensor([[1, 2], [0, 1], [1, 2]])
    edges = T.tensor([1.0, 2.0, 4.0])
    return [
        u, inverse, counts, x.unique(), T.unique(rows, dim=0), rows.unique(return_counts=True),
        *T.unique_consecutive(T.tensor([1, 1, 2, 1]), return_inverse=True, return_counts=True),
        x.bincount(), T.bincount(x, minlength=6), T.bincount(x, weights=T.arange(6.0)),
        refused(lambda: T.bincount(T.tensor([-1]))),
        T.searchsorted(edges, T.tensor([0.5, 1.0, 3.0, 9.0])),
        T.searchsorted(edges, T.tensor([1.0, 4.0]), right=True),
        T.bucketize(T.tensor([[0.0, 2.0], [3.0, 5.0]]), edges),
        T.searchsorted(T.tensor([[1, 3], [2, 6]]), T.tensor([[2, 9], [0, 6]])),
        T.isin(x, T.tensor([1, 2])), T.isin(x, 3),
    ]  # fmt: skip
