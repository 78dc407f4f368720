"""Aliases: what shares storage, strides, and what only a copy can be."""

from parity import refused


def _base(T):
    return T.arange(24.0).reshape(2, 3, 4)


def writes_are_seen_through_aliases(T):
    log = []
    for make in (
        lambda x: x.detach(), lambda x: x.data, lambda x: x.view(-1), lambda x: x.view(6, 4),
        lambda x: x[1], lambda x: x[:, 1:, ::2], lambda x: x[..., 2], lambda x: x[None],
        lambda x: x.transpose(0, 2), lambda x: x.permute(2, 0, 1), lambda x: x.split(2, 1)[0],
        lambda x: x.unbind(1)[1], lambda x: x.chunk(2, 2)[1], lambda x: x.narrow(2, 1, 2),
        lambda x: x.select(1, 2), lambda x: x.unsqueeze(1), lambda x: x.squeeze(),
        lambda x: x.flatten(), lambda x: x.flatten(1), lambda x: x.unflatten(2, (2, 2)),
        lambda x: x.diagonal(0, 1, 2), lambda x: x.movedim(0, 2), lambda x: x.reshape(4, 6),
        lambda x: x.reshape(24)[3:9].view(2, 3), lambda x: x[0].t(), lambda x: x[0].T,
        lambda x: x.mT, lambda x: x[1, 1:].view_as(T.zeros(8)), lambda x: x.swapaxes(0, 1),
        lambda x: x.tensor_split(2, 2)[0], lambda x: x.detach()[0][1][2:], lambda x: x[-1, -1],
        lambda x: T.atleast_2d(x[0, 0]), lambda x: x.adjoint(), lambda x: x.view(2, -1),
    ):  # fmt: skip
        x = _base(T)
        alias = make(x)
        alias.mul_(-1)
        x.add_(100)
        log.append([alias, x, list(alias.stride()), alias.is_contiguous()])
    return log


def copies_do_not_alias(T):
    log = []
    for make in (
        lambda x: x.clone(), lambda x: x.transpose(0, 2).reshape(-1), lambda x: x[[0, 1]],
        lambda x: x[x > -1], lambda x: x.transpose(0, 1).contiguous(), lambda x: x.to(T.float64),
        lambda x: x.repeat(1, 1, 1), lambda x: x + 0, lambda x: T.tensor(x), lambda x: x.flip(0),
        lambda x: x.to(T.float32, copy=True), lambda x: T.cat([x]),
        lambda x: x.expand(2, 2, 3, 4).flatten(),
    ):  # fmt: skip
        x = _base(T)
        copy = make(x)
        copy.zero_()
        log.append(x.sum())
    return log


def same_object_or_alias(T):
    x = _base(T)
    same = x.contiguous() is x, x.to(T.float32) is x, x.float() is x, T.as_tensor(x) is x
    return same, x.expand(2, 3, 4).is_contiguous(), x.cpu() is x


def strides(T):
    x = T.zeros(2, 3, 4)
    made = [
        x, x.t() if x.dim() < 3 else x.mT, x.permute(2, 0, 1), x[:, ::2], x[1, 1:, 1::2],
        x[:, None],
        x.expand(5, 2, 3, 4), x[:, :1].expand(2, 6, 4), x.diagonal(1, 1, 2), x.diagonal(0, 0, 2),
        x.unsqueeze(-1), x[:, :1].squeeze(1), x.permute(1, 2, 0).flatten(0, 1), x[0, 0, 0], x[0:0],
        x.view(2, 12)[:, 2:8].view(2, 2, 3), x.transpose(1, 2).unflatten(1, (2, 2)), x.select(2, 1),
        x[1:, 2:], x[::2].view(-1), T.zeros(0, 3), T.zeros(1, 1).t(),
    ]  # fmt: skip
    return [[list(m.shape), list(m.stride()), m.is_contiguous()] for m in made], x.stride(1)


def view_refusals(T):
    x = T.zeros(2, 3, 4)
    return [
        refused(lambda: x.transpose(0, 2).view(-1)), refused(lambda: x[:, 1:].view(16)),
        refused(lambda: x.view(5, 5)), refused(lambda: x.view(-1, -1)),
        refused(lambda: x.view(-1, 5)),
        refused(lambda: x.permute(0, 2)), refused(lambda: x.permute(0, 0, 1))["raises"],
        refused(lambda: x.expand(3, 3, 4)), refused(lambda: x.expand(3))["raises"],
        refused(lambda: x.t()), refused(lambda: x.transpose(0, 5)), refused(lambda: x.unsqueeze(5)),
        refused(lambda: x.squeeze(7)), refused(lambda: x.narrow(0, 1, 4)),
        refused(lambda: x.select(0, 2)),
        refused(lambda: x.split([1, 1], 1)), refused(lambda: x.split(0))["raises"],
        refused(lambda: x.chunk(0)), refused(lambda: x.flatten(2, 1)), refused(lambda: x.size(3)),
        refused(lambda: x.reshape(7)), refused(lambda: x.unflatten(2, (3, 2)))["raises"],
        refused(lambda: x.movedim((0, 1), (2,)))["raises"],
        refused(lambda: x[:, :1].expand(2, 5, 4).add_(1)),
        refused(lambda: x.diagonal(0, 1, 1))["raises"], refused(lambda: T.zeros(2).unbind(1)),
        refused(lambda: T.tensor(1.0).unbind())["raises"], refused(lambda: len(T.tensor(1.0))),
    ]  # fmt: skip


def view_allowed_where_strides_allow(T):
    x = T.arange(24).reshape(2, 3, 4)
    return (
        x.transpose(0, 1).view(3, 2, 2, 2), x[:, :, :2].view(2, 3, 2, 1), x[:, :1].view(2, 4),
        x.permute(1, 2, 0).view(12, 2), x[0:1].transpose(0, 1).view(12),
        T.zeros(0, 4).view(2, 0).shape,
        T.tensor(5.0).view(1, 1), x[0, 0, :1].view(()), x.expand(3, 2, 3, 4).view(3, 6, 4)[2, 5],
    )  # fmt: skip


def shapes_of_views(T):
    x = T.zeros(2, 1, 3, 1)
    return [
        list(v.shape)
        for v in (
            x.squeeze(), x.squeeze(1), x.squeeze(0), x.squeeze((1, 3)), x.squeeze(-1),
            x.unsqueeze(0),
            x.unsqueeze(-1), x.flatten(), x.flatten(1, 2), x.reshape(-1), x.reshape(3, 2),
            x.unflatten(0, (1, 2)), x.unflatten(2, (-1, 1)), x.movedim(0, -1),
            x.movedim((0, 2), (2, 0)),
            x.T if x.dim() < 3 else x.mT, x.expand(-1, 4, -1, 2), x.expand(5, -1, -1, -1, -1),
            x.permute(3, 2, 1, 0), x.permute((0, 1, 3, 2)), x.view(6), x.view((3, 2)),
            x.view(T.Size([2, 3])),
            x.split(2, 2)[1], x.chunk(2, 2)[0], x.narrow(2, -2, 1), T.tensor(1.0).flatten(),
            T.tensor(1.0).unsqueeze(0), T.tensor(1.0).squeeze(), x.diagonal(),
            x.expand_as(T.zeros(2, 5, 3, 1)),
            x.reshape_as(T.zeros(3, 2)), T.zeros(2, 3).ravel(), T.zeros(3).t(), x.moveaxis(0, 1),
            T.broadcast_to(x, (2, 2, 3, 4)), x.swapdims(0, 2),
        )
    ], [[list(p.shape) for p in T.zeros(5, 2).split(2)],
    [list(p.shape) for p in T.zeros(5, 2).chunk(4)],
        [list(p.shape) for p in T.zeros(5).split([2, 0, 3])],
        [list(p.shape) for p in T.zeros(0, 2).chunk(3)],
        [list(p.shape) for p in T.zeros(0, 2).split(2)],
        [list(p.shape) for p in T.tensor_split(T.zeros(7), 3)],
        [list(p.shape) for p in T.tensor_split(T.zeros(7, 2), (1, 5))],
        [list(p.shape) for p in T.zeros(2, 3).unbind(1)],
        [list(p.shape) for p in T.hsplit(T.zeros(2, 4), 2)]]  # fmt: skip


def versions(T):
    x = T.zeros(3)
    v = x.view(3, 1)
    start = x._version
    x.add_(1)
    v.mul_(2)
    x.detach().add_(1)
    before_data = x._version - start
    x.data.add_(1)
    x[0] = 1.0
    return before_data, x._version - start, v._version - start


def overlapping_write(T):
    x = T.arange(4.0)
    x[1:].copy_(x[:-1].clone())
    y = T.arange(4.0)
    y[:] = y.flip(0)
    return x, y


def size_objects(T):
    s = T.zeros(2, 3).size()
    return (
        repr(s), s.numel(), s == (2, 3), s[1], list(s), isinstance(s, tuple), repr(s[:1]), len(s),
        repr(s + (4,)), T.zeros(2, 3).size(-1), T.zeros(2, 3).shape == T.zeros(2, 3).size(),
        repr(T.Size([])),
    )  # fmt: skip


def iteration_and_length(T):
    x = _base(T)
    rows = list(x)
    rows[0].zero_()
    return (
        len(x), len(rows), x[0], refused(lambda: iter(T.tensor(1.0)))["raises"], 5.0 in x,
        3.0 in x[0],
        [int(v) for v in T.arange(3)], x.numel(), x.nelement(), x.ndim, x.dim(), x.ndimension(),
    )  # fmt: skip


def unfold(T):
    x = T.arange(10.0)
    return x.unfold(0, 4, 3), T.arange(12.0).reshape(3, 4).unfold(1, 2, 1)


def storage_identity(T):
    x = _base(T)
    return x.data_ptr() == x.view(-1).data_ptr(), x.data_ptr() == x.clone().data_ptr()
