"""``torch.testing.assert_close``: what passes, and the messages where it does not."""

from parity import refused, refused_with


def passes(T):
    close = T.testing.assert_close
    x = T.tensor([1.0, 2.0])
    return [
        refused_with(lambda: close(*pair, **options))
        for pair, options in (
            ((x, x), {}), ((x, x + 1e-6), {}), ((x, x + 1e-3), {}),
            ((x, x + 1e-3), {"rtol": 0, "atol": 1e-2}), ((x, x.double()), {}),
            ((x, x.double()), {"check_dtype": False}), ((x, x[:1]), {}),
            ((T.tensor([1, 2]), T.tensor([1, 3])), {}), ((T.tensor([float("nan")]),) * 2, {}),
            ((T.tensor([float("nan")]),) * 2, {"equal_nan": True}), ((1.0, 1.0 + 1e-9), {}),
            ((1, 2), {}), ((1, 1.0), {}),
            (([x, {"a": x}], [x, {"a": x}]), {}), (([x], [x, x]), {}), (({"a": x}, {"b": x}), {}),
            ((x, 1.0), {}), ((x, x), {"rtol": 1}), ((x.half(), (x + 5e-4).half()), {}),
            ((x.bfloat16(), (x + 0.01).bfloat16()), {}),
            ((None, None), {}), ((T.zeros(0), T.zeros(0)), {}),
            ((T.tensor([float("inf")]), T.tensor([float("inf")])), {}),
            ((x.numpy(), x.numpy()), {}), ((True, False), {}), (("a", "a"), {}),
            ((x.t(), x), {"check_stride": True}),
        )
    ]  # fmt: skip


def messages(T):
    close = T.testing.assert_close
    x = T.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=T.float64)
    y = x.clone()
    y[1, 0] = 5.0
    y[0, 1] = 2.5
    return [
        refused(lambda: close(x, y)), refused(lambda: close(x, y, rtol=0, atol=0)),
        refused(lambda: close(x, y, rtol=0.1, atol=0.5)), refused(lambda: close(x, x[0])),
        refused(lambda: close(x, x.float())),
        refused(lambda: close([x, y], [x, x])),
        refused(lambda: close({"a": [x, y]}, {"a": [x, x]})), refused(lambda: close([x], [x, x])),
        refused(lambda: close({"a": x}, {"b": x})), refused(lambda: close(1.0, 2.0)),
        refused(lambda: close(1, 2)), refused(lambda: close(T.tensor([1, 2, 3]),
            T.tensor([1, 2, 4]))), refused(lambda: close(x, y, msg="mine")),
            refused(lambda: close(x, y, msg=lambda m: "mine: " + m[:10])),
        refused(lambda: close(T.tensor(1.0), T.tensor(2.0), rtol=0, atol=0.25)),
        refused(lambda: close(x, x, rtol=1.0)), refused(lambda: close([1.0], [[1.0]]))["raises"],
    ]  # fmt: skip
