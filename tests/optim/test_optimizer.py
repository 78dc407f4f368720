"""Optimizer: groups, errors, hooks, state; and the update as one donated program."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

import tensorplay as tp
from tensorplay import optim
from tensorplay.optim._adam import adam_rule
from tensorplay.optim._sgd import sgd_rule


def leaf(*shape: int, **options: Any) -> Any:
    return tp.ones(*shape, **options).requires_grad_()


def with_grad(*shape: int, value: float = 1.0, **options: Any) -> Any:
    p = leaf(*shape, **options)
    p.grad = tp.full(shape, value, **options)
    return p


# --- groups and errors -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "kind", "message"),
    [
        (lambda: leaf(2), TypeError, "iterable of Tensors or dicts"),
        (list, ValueError, "optimizer got an empty parameter list"),
        (lambda: [{"params": {leaf(2)}}], TypeError, "ordered collections"),
        (lambda: [1.0], TypeError, "optimizer can only optimize Tensors"),
        (lambda: [leaf(2) * 2], ValueError, "can't optimize a non-leaf Tensor"),
        (lambda: [("a", leaf(2)), leaf(2)], ValueError, "Some param names are missing"),
    ],
)
def test_refused_parameters(params: Any, kind: type[Exception], message: str) -> None:
    given = params()
    with pytest.raises(kind, match=message):
        optim.SGD(given)


def test_a_parameter_in_two_groups_is_refused() -> None:
    p = leaf(2)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optim.SGD([{"params": [p]}, {"params": [p]}])


def test_a_parameter_twice_in_a_group_warns_and_steps_twice() -> None:
    p = with_grad(2)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        opt = optim.Adam([p, p], lr=0.5)
    opt.step()
    assert opt.state[p]["step"].item() == 2
    np.testing.assert_allclose(p.tolist(), [0.0, 0.0], atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.SGD(p, lr=-1), "Invalid learning rate: -1"),
        (lambda p: optim.SGD(p, momentum=-1), "Invalid momentum value: -1"),
        (lambda p: optim.SGD(p, nesterov=True), "Nesterov momentum requires"),
        (lambda p: optim.SGD(p, lr=tp.ones(2)), "Tensor lr must be 1-element"),
        (lambda p: optim.Adam(p, eps=-1), "Invalid epsilon value: -1"),
        (lambda p: optim.Adam(p, betas=(0.9, 1.0)), "Invalid beta parameter at index 1: 1.0"),
        (lambda p: optim.AdamW(p, weight_decay=-1), "Invalid weight_decay value: -1"),
        (lambda p: optim.Adagrad(p, lr_decay=-1), "Invalid lr_decay value: -1"),
        (lambda p: optim.RMSprop(p, alpha=-1), "Invalid alpha value: -1"),
    ],
)
def test_refused_values(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([leaf(2)])


def test_implementations_that_exclude_each_other() -> None:
    with pytest.raises(RuntimeError, match="cannot be `True` together"):
        optim.AdamW([leaf(2)], fused=True, foreach=True)
    with pytest.raises(NotImplementedError, match="differentiable"):
        optim.SGD([leaf(2)], differentiable=True)


def test_named_parameters_keep_their_names() -> None:
    opt = optim.SGD([("a", leaf(2)), ("b", leaf(2))], lr=0.1)
    assert opt.state_dict()["param_groups"][0]["param_names"] == ["a", "b"]
    with pytest.raises(ValueError, match="without names to the optimizer"):
        opt.add_param_group({"params": [leaf(2)]})


def test_a_group_added_later_is_stepped_on() -> None:
    p, q = with_grad(2), with_grad(3)
    opt = optim.SGD([p], lr=0.5)
    opt.add_param_group({"params": q, "lr": 0.25})
    opt.step()
    assert p.tolist() == [0.5] * 2 and q.tolist() == [0.75] * 3


def test_repr_shows_the_options() -> None:
    text = repr(optim.SGD([leaf(2)], lr=0.1, momentum=0.9))
    assert text.startswith("SGD (\nParameter Group 0\n") and "    momentum: 0.9\n" in text


def test_zero_grad() -> None:
    p = with_grad(2)
    opt = optim.SGD([p])
    opt.zero_grad(set_to_none=False)
    assert p.grad.tolist() == [0.0, 0.0]
    opt.zero_grad()
    assert p.grad is None


def test_parameters_without_a_gradient_are_left_alone() -> None:
    p, q = with_grad(2), leaf(2)
    opt = optim.AdamW([p, q], lr=0.1)
    opt.step()
    assert q.tolist() == [1.0, 1.0] and q not in opt.state
    assert q._version == 0 and p._version == 1


def test_sgd_without_momentum_has_no_state() -> None:
    opt = optim.SGD([with_grad(2)])
    opt.step()
    assert opt.state_dict()["state"] == {}


def test_closure() -> None:
    p = leaf(2)
    opt = optim.SGD([p], lr=0.5)

    def closure() -> Any:
        opt.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    with tp.no_grad():
        loss = opt.step(closure)
    assert loss.item() == 2.0 and p.tolist() == [0.0, 0.0]


def test_a_refused_parameter_changes_nothing() -> None:
    p, q = with_grad(2), with_grad(2)
    opt = optim.AdamW([p, q], lr=0.1)
    q._refusal = "it was sharded since"
    with pytest.raises(RuntimeError, match=r"optimizer.step\(\): it was sharded since"):
        opt.step()
    assert p.tolist() == [1.0, 1.0] and not opt.state


def test_state_dicts_that_do_not_fit() -> None:
    opt = optim.SGD([leaf(2), leaf(2)])
    state = opt.state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        opt.load_state_dict({**state, "param_groups": state["param_groups"] * 2})
    state["param_groups"][0]["params"] = [0]
    with pytest.raises(ValueError, match="doesn't match the size"):
        opt.load_state_dict(state)


def test_options_that_an_old_state_dict_lacks_are_filled_in() -> None:
    p = with_grad(2)
    opt = optim.AdamW([p], lr=0.1)
    group = {"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    opt.load_state_dict({"state": {}, "param_groups": [group]})
    opt.step()
    assert opt.param_groups[0]["decoupled_weight_decay"] is True
    np.testing.assert_allclose(p.tolist(), [0.5, 0.5], rtol=1e-6)


def test_pickle_and_deepcopy() -> None:
    p = with_grad(2)
    opt = optim.Adam([p], lr=0.1)
    opt.step()
    for other in (pickle.loads(pickle.dumps(opt)), copy.deepcopy(opt)):
        own = other.param_groups[0]["params"][0]
        assert other.state[own]["step"].item() == 1
        own.grad = tp.ones(2)
        other.step()
        assert own.tolist() != p.tolist()


# --- hooks -----------------------------------------------------------------------------------


def test_step_hooks() -> None:
    calls: list[Any] = []
    opt = optim.SGD([with_grad(2)])
    before = opt.register_step_pre_hook(lambda o, args, kwargs: calls.append(("pre", args)))
    opt.register_step_post_hook(lambda o, args, kwargs: calls.append(("post", o is opt)))
    opt.step()
    before.remove()
    opt.step(None)
    assert calls == [("pre", ()), ("post", True), ("post", True)]


def test_a_step_pre_hook_may_replace_the_arguments() -> None:
    opt = optim.SGD([with_grad(2)])
    opt.register_step_pre_hook(lambda o, args, kwargs: ((lambda: 7,), {}))
    assert opt.step() == 7
    opt.register_step_pre_hook(lambda o, args, kwargs: 3)
    with pytest.raises(RuntimeError, match="must return None or a tuple"):
        opt.step()


def test_state_dict_hooks() -> None:
    opt = optim.SGD([leaf(2)], lr=0.1)
    order: list[str] = []
    opt.register_state_dict_pre_hook(lambda o: order.append("second"))
    opt.register_state_dict_pre_hook(lambda o: order.append("first"), prepend=True)
    opt.register_state_dict_post_hook(lambda o, s: {**s, "extra": 1})
    opt.register_load_state_dict_pre_hook(lambda o, s: order.append(str(s["extra"])))
    opt.register_load_state_dict_post_hook(lambda o: order.append("loaded"))
    opt.load_state_dict(opt.state_dict())
    assert order == ["first", "second", "1", "loaded"]


class Halving(optim.Optimizer):
    """An optimizer in the style of torch's own: imperative, with state in ``self.state``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"share": 0.5})

    def step(self, closure: Any = None) -> None:
        with tp.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(group["share"])
                    self.state[p]["count"] = self.state[p].get("count", 0) + 1


def test_an_optimizer_of_ones_own() -> None:
    p = with_grad(2)
    opt = Halving([p])
    calls: list[int] = []
    opt.register_step_post_hook(lambda *_: calls.append(1))
    opt.step()
    opt.step()
    assert p.tolist() == [0.25, 0.25] and calls == [1, 1]
    opt.load_state_dict(opt.state_dict())
    assert opt.state[p]["count"] == 2


# --- one program -----------------------------------------------------------------------------


def counting(base: type, rule: Any) -> tuple[type, list[int]]:
    """A subclass of an optimizer whose rule counts its calls: one per parameter and trace."""
    calls: list[int] = []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return rule(*args)

    return type("Counting", (base,), {"rule": staticmethod(counted)}), calls


def test_new_values_never_retrace() -> None:
    kind, calls = counting(optim.AdamW, adam_rule)
    params = [with_grad(2), with_grad(3, 2)]
    opt = kind([{"params": params[:1]}, {"params": params[1:], "lr": 0.2}])
    schedule = optim.lr_scheduler.ExponentialLR(opt, gamma=0.9)
    for step in range(6):
        opt.step()
        schedule.step()
        opt.param_groups[0].update(weight_decay=0.1 + step, betas=(0.5, 0.6 + step / 100), eps=0.1)
    assert len(calls) == len(params)
    assert schedule.get_last_lr()[1] == pytest.approx(0.2 * 0.9**6)


def test_the_set_of_gradients_selects_the_program() -> None:
    kind, calls = counting(optim.SGD, sgd_rule)
    p, q = with_grad(2), with_grad(2)
    opt = kind([p, q], lr=0.1, momentum=0.9)
    opt.step()
    assert len(calls) == 2
    q.grad = None
    opt.step()
    assert len(calls) == 3
    q.grad = tp.ones(2)
    opt.step()
    assert len(calls) == 3


def test_equal_optimizers_share_a_program() -> None:
    kind, calls = counting(optim.SGD, sgd_rule)
    for _ in range(3):
        kind([with_grad(5)], lr=0.1).step()
    assert len(calls) == 1


@pytest.mark.parametrize("number", range(4))
def test_only_the_first_step_compiles(number: int) -> None:
    committed = [(), ("p",), ("grad",), ("p", "grad")][number]
    p, compiled = with_grad(number + 2, 7), []
    for t, name in ((p, "p"), (p.grad, "grad")):
        if name in committed:
            t._storage.array = jax.device_put(t._storage.array, jax.devices()[0])
    opt = optim.AdamW([p], lr=0.1)
    opt.step()

    def listen(event: str, *_: Any, **__: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        opt.step()
        assert not compiled
        optim.AdamW([with_grad(number + 2, 8)], lr=0.1).step()
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_parameters_at_different_steps() -> None:
    kind, calls = counting(optim.Adam, adam_rule)
    params = [with_grad(3) for _ in range(3)]
    opt = kind(params, lr=0.5)
    opt.step()
    params[1].grad = None
    opt.step()
    params[1].grad = tp.ones(3)
    traced = len(calls)
    for _ in range(3):
        opt.step()
    assert [opt.state[p]["step"].item() for p in params] == [5.0, 4.0, 5.0]
    assert len(calls) == traced + len(params)
    np.testing.assert_allclose(params[1].tolist(), [-1.0] * 3, rtol=1e-5)
    np.testing.assert_allclose(params[2].tolist(), [-1.5] * 3, rtol=1e-5)


def arrays_of(opt: Any, p: Any) -> list[Any]:
    return [p._storage.array, *(opt.state[p][k]._storage.array for k in ("exp_avg", "exp_avg_sq"))]


def test_the_update_happens_in_place() -> None:
    p = with_grad(64, 64)
    opt = optim.AdamW([p], lr=0.1)
    opt.step()
    before = [a.unsafe_buffer_pointer() for a in arrays_of(opt, p)]
    grad = p.grad._storage.array
    opt.step()
    assert [a.unsafe_buffer_pointer() for a in arrays_of(opt, p)] == before
    assert not grad.is_deleted()


def test_the_old_arrays_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorplay.optim import _update

    given: list[Any] = []
    original = _update._update

    def spy(plan: Any, owned: Any, grads: Any, rows: Any) -> Any:
        given.extend(owned[0][0])
        return original(plan, owned, grads, rows)

    monkeypatch.setattr(_update, "_update", spy)
    p = with_grad(8, 8)
    optim.AdamW([p], lr=0.1).step()
    assert len(given) == 3 and all(array.is_deleted() for array in given)


def test_an_array_that_something_else_holds_is_not_donated() -> None:
    p = with_grad(8)
    opt = optim.AdamW([p], lr=0.1)
    opt.step()
    held = arrays_of(opt, p)
    values = [np.array(a) for a in held]
    twin, state = copy.deepcopy(p), copy.deepcopy(opt.state_dict())
    opt.step()
    for array, value in zip(held, values, strict=True):
        np.testing.assert_array_equal(np.array(array), value)
    np.testing.assert_array_equal(twin.detach().numpy(), values[0])
    np.testing.assert_array_equal(state["state"][0]["exp_avg"].numpy(), values[1])


def test_parameters_over_one_array_are_stepped_on_alone() -> None:
    p = leaf(4)
    q = tp._tensor.wrap(p._storage.array).requires_grad_()
    p.grad, q.grad = tp.ones(4), tp.full((4,), 2.0)
    optim.SGD([p, q], lr=0.5).step()
    assert p.tolist() == [0.5] * 4 and q.tolist() == [0.0] * 4


def test_parameters_over_one_storage_are_stepped_on_in_turn() -> None:
    p = leaf(4)
    q = p.detach().requires_grad_()
    p.grad, q.grad = tp.ones(4), tp.full((4,), 2.0)
    optim.SGD([p, q], lr=0.25).step()
    assert p.tolist() == q.tolist() == [0.25] * 4


def test_a_view_as_parameter() -> None:
    base = tp.ones(3, 2)
    p = base[1].requires_grad_()
    p.grad = tp.ones(2)
    opt = optim.Adam([p], lr=0.5)
    opt.step()
    np.testing.assert_allclose(base.tolist(), [[1, 1], [0.5, 0.5], [1, 1]], rtol=1e-6)
    assert opt.state[p]["exp_avg"].shape == (2,)


def test_detached_aliases_and_saved_state_follow() -> None:
    p = with_grad(2)
    opt = optim.Adam([p], lr=0.5)
    alias, view = p.detach(), p[:1]
    opt.step()
    saved = opt.state_dict()["state"][0]
    opt.step()
    assert alias.tolist() == p.tolist() and view.tolist() == p.tolist()[:1]
    assert saved["step"].item() == 2


def test_backward_through_a_stepped_parameter_is_refused() -> None:
    p = leaf(2)
    loss = (p * p).sum()
    p.grad = tp.ones(2)
    optim.SGD([p], lr=0.5).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_float64_and_float32_parameters_together() -> None:
    p, q = with_grad(2), with_grad(2, dtype=tp.float64)
    opt = optim.AdamW([p, q], lr=0.1)
    opt.step()
    assert q.dtype is tp.float64 and opt.state[q]["exp_avg"].dtype is tp.float64
    expected = 1 - 0.1 * 0.01 - 0.1 / (1 + 1e-8)
    np.testing.assert_allclose(q.tolist(), [expected] * 2, rtol=1e-15)
    assert not jax.config.jax_enable_x64


_ON_TWO_DEVICES = """
import jax, numpy as np
import tensorplay as tp
from tensorplay import optim

def placed(where):
    def tensor():
        return tp._tensor.wrap(jax.device_put(np.ones((4, 3), np.float32), where))
    p = tensor().requires_grad_()
    p._grad = tensor()
    return p

first, second = jax.devices()
mesh = jax.make_mesh((2,), ("ranks",))
places = [first, second, jax.NamedSharding(mesh, jax.P("ranks")), jax.NamedSharding(mesh, jax.P())]
params = [placed(where) for where in places]
opt = optim.AdamW(params, lr=0.5, weight_decay=0.0)
before = [p._storage.array.sharding for p in params]
for _ in range(2):
    opt.step()
for p, sharding in zip(params, before, strict=True):
    for t in (p, opt.state[p]["exp_avg"]):
        assert t._storage.array.sharding.is_equivalent_to(sharding, 2), t._storage.array.sharding
    np.testing.assert_allclose(p.tolist(), np.zeros((4, 3)), atol=1e-5)
"""


def test_parameters_stay_on_their_devices() -> None:
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", _ON_TWO_DEVICES]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


def test_a_step_inside_a_traced_call_ends_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trace:
        def abort(self, what: str) -> None:
            raise RuntimeError(f"this call {what}")

    opt = optim.SGD([with_grad(2)])
    monkeypatch.setattr(tp._state.state, "trace", Trace())
    with pytest.raises(RuntimeError, match="this call steps an optimizer"):
        opt.step()


def test_the_step_count_is_a_tensor_of_each_parameter() -> None:
    p, q = with_grad(2), with_grad(2)
    opt = optim.Adam([p, q])
    opt.step()
    counts = [opt.state[t]["step"] for t in (p, q)]
    assert [(c.dtype, c.shape, c.device.type) for c in counts] == [(tp.float32, (), "cpu")] * 2
    counts[0].fill_(10.0)
    opt.step()
    assert [c.item() for c in counts] == [11.0, 2.0]
    opt.state[q]["step"] = 5
    opt.step()
    assert opt.state[q]["step"].item() == 6.0
