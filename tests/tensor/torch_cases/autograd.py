"""Recorded graphs, hooks, in-place rules and grad modes."""

from parity import refused


def _leaf(T, *values):
    return T.tensor([float(v) for v in values], requires_grad=True)


def accumulation_goes_into_one_tensor(T):
    x = _leaf(T, 1, 2)
    (x * x).sum().backward()
    first, version = x.grad, x.grad._version
    (x * 3).sum().backward()
    return first is x.grad, first, x.grad._version > version, x.grad.requires_grad


def grad_set_to_none_and_again(T):
    x = _leaf(T, 1, 2)
    (x * x).sum().backward()
    old = x.grad
    x.grad = None
    (x * 5).sum().backward()
    return old, x.grad


def grad_assignment_rules(T):
    x = _leaf(T, 1, 2)
    x.grad = T.ones(2)
    (x * 2).sum().backward()

    def assign(value):
        x.grad = value

    return (
        x.grad,
        refused(lambda: assign(T.ones(3)))["raises"],
        refused(lambda: assign(T.ones(2, dtype=T.float64)))["raises"],
        refused(lambda: assign(1.0))["raises"],
    )


def gradient_argument(T):
    x = _leaf(T, 1, 2, 3)
    (x * x).backward(T.tensor([1.0, 10.0, 100.0]))
    return (
        x.grad,
        refused(lambda: (x * x).backward()),
        refused(lambda: (x * x).backward(T.ones(2))),
        refused(lambda: T.ones(3).sum().backward()),
    )


def retain_graph(T):
    x = _leaf(T, 1, 2)
    loss = (x * x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return x.grad, refused(lambda: loss.backward())


def second_backward_of_linear_graph(T):
    x, y = _leaf(T, 1, 2), _leaf(T, 3, 4)
    loss = (x + y).sum()
    loss.backward()
    loss.backward()
    return x.grad, y.grad


def backward_inputs(T):
    x, y = _leaf(T, 1, 2), _leaf(T, 3, 4)
    z = x * y
    loss = (z * z).sum()
    loss.backward(inputs=[x], retain_graph=True)
    first = x.grad.clone(), y.grad
    loss.backward(inputs=z, retain_graph=True)
    return (
        *first, y.grad, z.grad, z.retains_grad,
        refused(lambda: loss.backward(inputs=[])),
        refused(lambda: loss.backward(inputs=[T.ones(2)]))["raises"],
    )  # fmt: skip


def diamond_and_reuse(T):
    x = _leaf(T, 0.5, 2)
    a = x * 2
    b = a.sin() + a * a + x
    (b * b).sum().backward()
    return x.grad


def broadcast_gradients(T):
    x, y = T.ones(2, 1, 3, requires_grad=True), T.ones(4, 1, requires_grad=True)
    (x * y * 3).sum().backward()
    return x.grad, y.grad


def several_outputs(T):
    x = T.arange(6.0).reshape(2, 3).requires_grad_()
    values, indices = x.max(dim=1)
    a, b, c = x.unbind(1)
    ((values * values).sum() + (a * c).sum()).backward()
    return x.grad, indices.requires_grad, values.requires_grad, b.requires_grad


def grad_function(T):
    x, y = _leaf(T, 1, 2), _leaf(T, 3, 4)
    z = (x * y).sum()
    gx, gy = T.autograd.grad(z, [x, y], retain_graph=True)
    unused = _leaf(T, 1)
    return (
        gx, gy, x.grad,
        refused(lambda: T.autograd.grad(z, unused, retain_graph=True)),
        T.autograd.grad(z, [x, unused], retain_graph=True, allow_unused=True),
        T.autograd.grad(z, [unused], retain_graph=True, materialize_grads=True),
        T.autograd.grad([z, x.sum()], [x], [T.tensor(2.0), T.tensor(5.0)], retain_graph=True),
        T.autograd.grad(x * y, x, grad_outputs=T.tensor([1.0, 3.0])),
        refused(lambda: T.autograd.grad(z, T.ones(2)))["raises"],
    )  # fmt: skip


def autograd_backward_function(T):
    x, y = _leaf(T, 1, 2), _leaf(T, 3, 4)
    T.autograd.backward([(x * 2).sum(), y * 3], [None, T.tensor([1.0, 2.0])])
    return x.grad, y.grad


def double_backward(T):
    x = _leaf(T, 0.5, 2)
    (g,) = T.autograd.grad((x**3).sum(), x, create_graph=True)
    (h,) = T.autograd.grad((g * g).sum(), x, create_graph=True)
    (third,) = T.autograd.grad(h.sum(), x)
    return g, h, third, g.requires_grad


def double_backward_through_many_ops(T):
    x = T.tensor([[0.3, -0.7], [1.1, 0.2]], requires_grad=True)
    w = T.tensor([[0.5, 1.5], [-0.4, 0.9]], requires_grad=True)
    y = ((x @ w).tanh() * x.exp() + x.sigmoid() / (w * w + 1)).sum()
    gx, gw = T.autograd.grad(y, [x, w], create_graph=True)
    penalty = gx.pow(2).sum() + (gw * gw).mean()
    penalty.backward()
    return gx, gw, x.grad, w.grad


def double_backward_accumulates_with_graph(T):
    x = _leaf(T, 1, 2)
    (x**3).sum().backward(create_graph=True)
    first = x.grad
    first.sum().backward()
    return first.requires_grad, x.grad


def order_of_hooks(T):
    log = []
    x = _leaf(T, 1, 2)
    y = x * 2
    y.register_hook(lambda g: log.append("first"))
    y.retain_grad()
    y.register_hook(lambda g: (log.append("second"), g * 10)[1])
    y.grad_fn.register_prehook(lambda g: log.append(["node before", g]))
    y.grad_fn.register_hook(lambda gi, go: log.append(["node after", gi[0], go]))
    x.register_hook(lambda g: log.append("leaf"))
    accumulate = x.expand_as(x).grad_fn.next_functions[0][0]
    accumulate.register_prehook(lambda g: log.append("accumulate before"))
    accumulate.register_hook(lambda gi, go: log.append(["accumulate after", gi, go]))
    x.register_post_accumulate_grad_hook(lambda t: log.append(["accumulated", t is x, t.grad]))
    y.sum().backward()
    return log, y.grad, x.grad


def hooks_replace_gradients(T):
    x = _leaf(T, 1, 2)
    y = x * 2
    y.register_hook(lambda g: g * 10)
    y.register_hook(lambda g: g + 1)
    x.register_hook(lambda g: g * 100)
    y.grad_fn.register_prehook(lambda g: (g[0] + 0.5,))
    y.grad_fn.register_hook(lambda gi, go: (gi[0] * 2, *gi[1:]))
    y.sum().backward()
    return x.grad


def hooks_removed(T):
    log = []
    x = _leaf(T, 1, 2)
    handle = x.register_hook(lambda g: log.append("leaf"))
    after = x.register_post_accumulate_grad_hook(lambda t: log.append("after"))
    (x * 2).sum().backward()
    handle.remove()
    handle.remove()
    after.remove()
    (x * 2).sum().backward()
    return log


def hooks_and_captured_gradients(T):
    x = _leaf(T, 1, 1)
    x.register_hook(lambda g: g * 10)
    leaf = T.autograd.grad((x * 2).sum(), [x])
    y = x * 2
    y.register_hook(lambda g: g * 10)
    end = T.autograd.grad((y * 3).sum(), [y], retain_graph=True)
    inner = T.autograd.grad((y * 3).sum(), [x, y])
    return leaf, end, inner


def hooks_see_and_change_modes(T):
    log = []
    x = _leaf(T, 1, 2)
    x.register_hook(lambda g: log.append([T.is_grad_enabled(), g.requires_grad]))
    (x * x).sum().backward()
    (x * x).sum().backward(create_graph=True)
    return log, T.is_grad_enabled()


def hook_refusals(T):
    x, plain = _leaf(T, 1, 2), T.ones(2)
    return (
        refused(lambda: plain.register_hook(print)),
        refused(lambda: plain.retain_grad()),
        refused(lambda: plain.register_post_accumulate_grad_hook(print)),
        refused(lambda: (x * 2).register_post_accumulate_grad_hook(print)),
    )


def post_accumulate_hook_may_clear(T):
    x = _leaf(T, 1, 2)
    seen = []

    def hook(t):
        seen.append(t.grad.clone())
        t.grad = None

    x.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        (x * 2).sum().backward()
    return seen, x.grad


def leaf_used_twice_accumulates_once(T):
    log = []
    x = _leaf(T, 1, 2)
    x.register_hook(lambda g: log.append(g.clone()))
    x.register_post_accumulate_grad_hook(lambda t: log.append("after"))
    (x * 2 + x * x).sum().backward()
    return log


def retained_gradients(T):
    x = _leaf(T, 1, 2)
    y = x * 2
    y.retain_grad()
    z = (y * y).sum()
    z.retain_grad()
    z.backward(retain_graph=True)
    z.backward()
    return y.grad, z.grad, y.retains_grad, x.retains_grad, y.is_leaf


def retain_grad_follows_inplace(T):
    x = _leaf(T, 1, 2)
    y = x * 2
    y.retain_grad()
    y.mul_(3)
    y.register_hook(lambda g: g * 10)
    y.sum().backward()
    return y.grad, x.grad


def hook_before_inplace_sees_the_older_value(T):
    log = []
    x = _leaf(T, 1, 2)
    y = x * 2
    y.register_hook(lambda g: log.append(["old", g]))
    y.mul_(3)
    y.register_hook(lambda g: log.append(["new", g]))
    (y * 5).sum().backward()
    return log


def callbacks_run_at_the_end(T):
    log = []
    queue = T.autograd.Variable._execution_engine.queue_callback
    x, y = _leaf(T, 1, 2), _leaf(T, 3)

    def hook(g):
        queue(lambda: (log.append("end"), queue(lambda: log.append("later"))))
        log.append("hook")

    x.register_hook(hook)
    y.register_hook(lambda g: log.append("other"))
    y2 = y * 1
    ((x * 2).sum() + y2.sum()).backward()
    (x * 2).sum().backward()
    return sorted(log[:2]), log[2:], refused(lambda: queue(print))


def backward_inside_backward(T):
    log = []
    x, y = _leaf(T, 1, 2), _leaf(T, 3)
    queue = T.autograd.Variable._execution_engine.queue_callback

    def hook(g):
        queue(lambda: log.append("outer end"))
        with T.enable_grad():
            inner = (y * y).sum()
        y.register_hook(lambda g: queue(lambda: log.append("inner end")))
        inner.backward()
        log.append("hook done")

    z = x * 2
    z.register_hook(hook)
    z.sum().backward()
    return log, x.grad, y.grad


def error_in_hook_leaves_modes(T):
    x = _leaf(T, 1, 2)

    def hook(g):
        raise ValueError("from the hook")

    handle = x.register_hook(hook)
    found = refused(lambda: (x * 2).sum().backward())
    handle.remove()
    (x * 2).sum().backward()
    return found, T.is_grad_enabled(), x.grad


def grad_modes(T):
    x = _leaf(T, 1, 2)
    log = []
    with T.no_grad():
        log.append((x * 2).requires_grad)
        with T.enable_grad():
            log.append((x * 2).requires_grad)
        log.append(T.is_grad_enabled())
        made = T.ones(2, requires_grad=True)
    log += [made.requires_grad, T.is_grad_enabled()]

    @T.no_grad()
    def decorated():
        return (x * 2).requires_grad, T.is_grad_enabled()

    @T.no_grad
    def bare():
        return T.is_grad_enabled()

    @T.no_grad()
    def generator():
        received = yield T.is_grad_enabled()
        yield received, T.is_grad_enabled()

    g = generator()
    log += [decorated(), bare(), next(g), T.is_grad_enabled(), g.send(5), T.is_grad_enabled()]
    with T.set_grad_enabled(False):
        log.append(T.is_grad_enabled())
    log.append(T.is_grad_enabled())
    T.set_grad_enabled(False)
    log.append(T.is_grad_enabled())
    T.set_grad_enabled(True)
    log.append(T.is_grad_enabled())
    try:
        with T.no_grad():
            raise KeyError
    except KeyError:
        log.append(T.is_grad_enabled())
    return log


def inference_mode(T):
    x = _leaf(T, 1, 2)
    with T.inference_mode():
        y = x * 2
        y.add_(1)
        flags = [y.requires_grad, y.is_inference(), T.is_inference_mode_enabled()]
        with T.inference_mode(False):
            flags.append(T.is_inference_mode_enabled())
    clone = y.clone()
    clone.add_(1)
    return (
        flags, T.is_inference_mode_enabled(), clone.is_inference(),
        refused(lambda: y.add_(1))["raises"], refused(lambda: y.requires_grad_())["raises"],
        refused(lambda: x * y),
    )  # fmt: skip


def refused_inplace_on_leaf(T):
    x = _leaf(T, 1, 2)
    found = [refused(lambda: x.add_(1)), refused(lambda: x[0].add_(1)), refused(lambda: x.zero_())]

    def assign():
        x[0] = 3.0

    found.append(refused(assign))
    found.append(refused(lambda: x.view(2, 1).mul_(2)))
    with T.no_grad():
        x.add_(1)
        x[0] = 9.0
        x.view(-1)[1] = 7.0
    x.data.mul_(2)
    return found, x, x.requires_grad, x.is_leaf


def saved_value_modified(T):
    found = []
    x = _leaf(T, 1, 2)
    y = x * 1
    z = y * y
    y.add_(1)
    found.append(refused(lambda: z.sum().backward())["raises"])
    y = x * 1
    z = y.exp()
    z.add_(1)
    found.append(refused(lambda: z.sum().backward())["raises"])
    y = x * 1
    z = y.sin()
    y[0] = 5.0
    found.append(refused(lambda: z.sum().backward())["raises"])
    y = x * 1
    z = y + 1
    y.add_(1)
    found.append(refused(lambda: z.sum().backward())["raises"])
    y = x * 1
    z = y * y
    y.detach().add_(1)
    found.append(refused(lambda: z.sum().backward())["raises"])
    y = x * 1
    z = y * y
    y.data.add_(1)
    found.append(refused(lambda: z.sum().backward())["raises"])
    y = x * 1
    z = y * y
    with T.no_grad():
        y.add_(1)
    found.append(refused(lambda: z.sum().backward())["raises"])
    y = x * 1
    z = y.sigmoid()
    z.mul_(2)
    found.append(refused(lambda: z.sum().backward())["raises"])
    y = x * 1
    z = y.relu()
    y.mul_(2)
    found.append(refused(lambda: z.sum().backward())["raises"])
    base = x * 1
    v = base.view(2, 1)
    z = v * v
    base.mul_(2)
    found.append(refused(lambda: z.sum().backward())["raises"])
    w = _leaf(T, 3, 4)
    y = x.detach() * 1
    z = y * w
    y.add_(1)
    found.append(refused(lambda: z.sum().backward())["raises"])
    return found


def inplace_chain(T):
    x = _leaf(T, 0.5, 2)
    y = x * 1
    y -= x * x
    y /= 2
    y.mul_(3).add_(1).exp_()
    y.sum().backward()
    return y, x.grad, y.is_leaf


def inplace_uses_another(T):
    x, w = _leaf(T, 1, 2), _leaf(T, 3, 4)
    y = T.zeros(2)
    y.add_(x * w)
    y.mul_(w)
    y.sum().backward()
    return y, x.grad, w.grad, y.requires_grad


def inplace_fill_cuts(T):
    x = _leaf(T, 1, 2)
    y = x * 2
    y.zero_()
    (y + x).sum().backward()
    return x.grad


def copy_into_slices(T):
    x, w = _leaf(T, 1, 2, 3), _leaf(T, 5, 6)
    y = x * 2
    y[1:] = w * 3
    (y * y).sum().backward()
    return y, x.grad, w.grad


def slices_into_plain_base(T):
    w = _leaf(T, 5, 6)
    out = T.zeros(2, 3)
    for i in range(2):
        out[i, 1:] = w * (i + 1)
    (out * out).sum().backward()
    return out, w.grad, out.requires_grad, out.is_leaf


def inplace_on_view_reaches_base(T):
    x = _leaf(T, 1, 2, 3, 4)
    base = x * 1
    view = base.view(2, 2)
    row = view[0]
    row.mul_(10)
    flags = base.requires_grad, view.requires_grad
    (base * base).sum().backward()
    return base, view, row, x.grad, flags


def inplace_on_base_reaches_view(T):
    x = _leaf(T, 1, 2, 3, 4)
    base = x * 1
    view = base[1:3]
    base.mul_(10)
    (view * view).sum().backward()
    return view, x.grad


def inplace_on_view_of_plain_base(T):
    w = _leaf(T, 2, 3)
    base = T.zeros(2, 2)
    other = base.t()
    base[:, 0].add_(w)
    flags = base.requires_grad, other.requires_grad, base.is_leaf
    (other * other).sum().backward()
    return other, w.grad, flags


def inplace_on_detached_view(T):
    x, w = _leaf(T, 1, 2), _leaf(T, 2, 3)
    d = x.detach()
    v = d.view(2, 1)
    v.mul_(w.view(2, 1))
    flags = d.requires_grad, v.requires_grad, x.requires_grad, x.grad_fn is None
    v.sum().backward()
    return d, x, w.grad, flags


def two_views_written(T):
    x = _leaf(T, 1, 2, 3, 4)
    base = x * 1
    a, b = base[:3], base[1:]
    a.mul_(2)
    b.mul_(3)
    a.add_(1)
    (base * T.tensor([1.0, 10.0, 100.0, 1000.0])).sum().backward()
    return base, x.grad


def transposed_view_written(T):
    x = T.arange(6.0).reshape(2, 3).requires_grad_()
    y = x * 1
    y.t()[1].mul_(T.tensor([2.0, 5.0]))
    y.transpose(0, 1).diagonal().add_(1)
    (y * y).sum().backward()
    return y, x.grad


def views_of_several_outputs_refuse(T):
    x = _leaf(T, 1, 2, 3, 4)
    y = x * 1
    found = [refused(lambda: p[0].add_(1))["raises"] for p in (y.split(2), y.unbind(), y.chunk(2))]
    plain = T.zeros(4)
    a, b = plain.split(2)
    a.add_(1)
    found.append(plain)
    found.append(refused(lambda: b.add_(x[:2]))["raises"])
    return found


def view_made_without_grad_refuses(T):
    x = _leaf(T, 1, 2)
    y = x * 1
    with T.no_grad():
        v = y.view(2, 1)
    found = refused(lambda: v.mul_(2))["raises"], refused(lambda: v.mul_(x.view(2, 1)))
    with T.no_grad():
        v.mul_(2)
    return found, y


def detach_rules(T):
    x = _leaf(T, 1, 2)
    y = x * 2
    d = y.detach()
    y.detach_()
    flags = d.requires_grad, d.is_leaf, y.requires_grad, y.is_leaf
    z = (x * 2)[0:1]
    return flags, refused(lambda: z.detach_())["raises"], (x * y).sum().item()


def requires_grad_rules(T):
    x = _leaf(T, 1, 2)

    def off(t):
        t.requires_grad = False

    y = x * 2
    d = y.detach().requires_grad_()
    (d * d).sum().backward()
    return (
        refused(lambda: off(y)), refused(lambda: T.ones(2, dtype=T.int64).requires_grad_()),
        refused(lambda: T.tensor([1], requires_grad=True))["raises"], y.requires_grad_() is y,
        d.grad, x.grad,
        x.requires_grad_(False).requires_grad, T.ones(1).requires_grad, y.requires_grad,
    )  # fmt: skip


def frozen_leaf_after_use(T):
    x = _leaf(T, 1, 2)
    y = (x * x).sum()
    x.requires_grad_(False)
    x.requires_grad_(True)
    y.backward()
    return x.grad


def data_swap(T):
    x = _leaf(T, 1, 2)
    x.data = T.tensor([5.0, 6.0])
    (x * x).sum().backward()
    other = T.zeros(3)
    x2 = T.zeros(3, requires_grad=True)
    x2.data = other
    other.add_(1)
    return x, x.grad, x2, x2.is_leaf


def data_of_graph_value(T):
    x = _leaf(T, 1, 2)
    y = x * 2
    y.data.fill_(100)
    y.sum().backward()
    return y, x.grad


def clone_and_contiguous_keep_history(T):
    x = T.arange(6.0).reshape(2, 3).requires_grad_()
    y = x.t().contiguous().clone()
    y[0, 0] = 100.0
    (y * y).sum().backward()
    return x.grad, x


def expand_and_sum(T):
    x = _leaf(T, 1, 2)
    (x.expand(3, 2) * T.arange(6.0).reshape(3, 2)).sum().backward()
    return x.grad


def to_dtype_in_graph(T):
    x = _leaf(T, 1, 2)
    y = x.double() * 2
    (y.float() * y.half().float()).sum().backward()
    return x.grad, y.dtype


def integer_outputs_carry_no_grad(T):
    x = _leaf(T, 1, 2)
    return (x.argmax().requires_grad, (x > 1).requires_grad, x.long().requires_grad,
            x.int().grad_fn is None, T.isnan(x).requires_grad, x.round().requires_grad)  # fmt: skip


def names_of_nodes(T):
    x = _leaf(T, 1, 2)
    made = [x + 1, x - 1, x * 2, x / 2, x.exp(), x.sum(), x.mean(), x @ x, x.view(2, 1), x.t()]
    return [m.grad_fn.name() for m in made[:7]], type(x.grad_fn).__name__


def graph_can_be_walked(T):
    x = _leaf(T, 1, 2)
    node = (x * 2).sum().grad_fn
    names = []
    while node is not None:
        names.append(node.name().partition("torch::autograd::")[2] or node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return names


def deepcopy_and_pickle(T):
    import copy
    import pickle

    x = _leaf(T, 1, 2)
    (x * 2).sum().backward()
    c = copy.deepcopy(x)
    c.data.add_(1)
    p = pickle.loads(pickle.dumps(x))
    pair = [x.detach(), None]
    pair[1] = pair[0].view(2, 1)
    a, b = copy.deepcopy(pair)
    a.add_(1)
    return (
        c, c.grad, c.requires_grad, x, p, p.requires_grad, a, b,
        refused(lambda: copy.deepcopy(x * 2))["raises"],
    )  # fmt: skip


def custom_function(T):
    class Cube(T.autograd.Function):
        @staticmethod
        def forward(ctx, x, power):
            ctx.save_for_backward(x)
            ctx.power = power
            return x**power

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * ctx.power * x ** (ctx.power - 1), None

    x = _leaf(T, 1, 2)
    y = Cube.apply(x, 3)
    flags = y.requires_grad, y.is_leaf, y.grad_fn.name()
    y.sum().backward()
    first = x.grad.clone()
    (g,) = T.autograd.grad(Cube.apply(x, 3).sum(), x, create_graph=True)
    (h,) = T.autograd.grad(g.sum(), x)
    with T.no_grad():
        quiet = Cube.apply(x, 3).requires_grad
    again = refused(lambda: y.sum().backward())["raises"]
    return flags, first, g, h, quiet, Cube.apply(x.detach(), 2).requires_grad, again


def custom_function_with_several_outputs(T):
    seen = []

    class Both(T.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            seen.append(ctx.needs_input_grad)
            seen.append(T.is_grad_enabled())
            index = (x > y).long()
            ctx.mark_non_differentiable(index)
            ctx.save_for_backward(x, y)
            return x * y, index, x + y

        @staticmethod
        def backward(ctx, product, index, total):
            x, y = ctx.saved_tensors
            seen.append([product, index is None, total])
            return product * y + total, product * x + total

    x, y = _leaf(T, 1, 5), T.tensor([3.0, 4.0])
    product, index, total = Both.apply(x, y)
    flags = [t.requires_grad for t in (product, index, total)]
    product.sum().backward()
    return seen, flags, x.grad, index


def custom_function_new_style(T):
    class Scale(T.autograd.Function):
        @staticmethod
        def forward(x, factor):
            return x * factor

        @staticmethod
        def setup_context(ctx, inputs, output):
            x, factor = inputs
            ctx.save_for_backward(x, output)
            ctx.factor = factor
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx, grad):
            _, output = ctx.saved_tensors
            return grad * ctx.factor + 0 * output, None

    x = _leaf(T, 1, 2)
    Scale.apply(x, 4.0).sum().backward()
    return x.grad


def custom_function_once_differentiable(T):
    class Once(T.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @T.autograd.function.once_differentiable
        def backward(ctx, grad):
            return grad * 2

    x = _leaf(T, 1, 2)
    (g,) = T.autograd.grad((Once.apply(x) ** 2).sum(), x, create_graph=True)
    return g, refused(lambda: T.autograd.grad(g.sum(), x))["raises"]


def custom_function_in_place(T):
    class Double(T.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x.mul_(2)
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = _leaf(T, 1, 2)
    y = x * 3
    z = Double.apply(y)
    z.sum().backward()
    return z is y, y, x.grad


def custom_function_refusals(T):
    class Wrong(T.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x * y

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Saves(T.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2 * len(ctx.saved_tensors)

    x, y = _leaf(T, 1, 2), _leaf(T, 3, 4)
    base = x * 1
    z = Saves.apply(base)
    base.add_(1)
    return (
        refused(lambda: Wrong.apply(x, y).sum().backward())["raises"],
        refused(lambda: z.sum().backward())["raises"],
    )


def gradcheck(T):
    x = T.tensor([0.3, 0.8], dtype=T.float64, requires_grad=True)

    class Wrong(T.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    check = T.autograd.gradcheck
    return (
        check(lambda a: (a * a).sin(), (x,)), check(lambda a: (a.exp(), a.sum()), [x]),
        check(Wrong.apply, (x,), raise_exception=False),
        refused(lambda: check(Wrong.apply, (x,)))["raises"],
    )  # fmt: skip
