"""Activation checkpointing in eager code: the same numbers, from activations made twice."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import tensorplay as tp
import tensorplay.nn as nn
from tensorplay.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from tensorplay.utils.checkpoint import CheckpointError, checkpoint, checkpoint_sequential


def make() -> Any:
    tp.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 3), nn.Tanh()
    )


def data() -> Any:
    return tp.tensor(np.random.RandomState(0).randn(5, 4).astype(np.float32), requires_grad=True)


def gradients(run: Any) -> list[np.ndarray]:
    """The output of ``run(model, x)`` and all gradients of its mean square."""
    model, x = make(), data()
    tp.manual_seed(1)
    y = run(model, x)
    y.square().mean().backward()
    drawn = tp.rand(1)  # the generator goes on from where it was
    return [a.detach().numpy() for a in (y, x.grad, *(p.grad for p in model.parameters()), drawn)]


RUNS = {
    "whole": lambda m, x: checkpoint(m, x, use_reentrant=False),
    "reentrant": lambda m, x: checkpoint(m, x, use_reentrant=True),
    "keyword": lambda m, x: checkpoint(lambda *, value: m(value), value=x),
    "parts": lambda m, x: checkpoint(m[3:], checkpoint(m[:3], x)),
    "nested": lambda m, x: checkpoint(lambda v: checkpoint(m[3:], checkpoint(m[:3], v)) * 1, x),
    "deeper": lambda m, x: checkpoint(lambda v: checkpoint(lambda w: checkpoint(m, w), v), x),
    "sequential": lambda m, x: checkpoint_sequential(m, 3, x, use_reentrant=False),
    "a list": lambda m, x: checkpoint_sequential(list(m), 2, x),
    "wrapper": lambda m, x: checkpoint_wrapper(m)(x),
    "captured": lambda m, x: checkpoint(lambda: m(x)),
    "containers": lambda m, x: checkpoint(lambda d: {"y": m(d["x"]), "n": 1}, {"x": x})["y"],
}


@pytest.mark.parametrize("name", RUNS)
def test_outputs_and_gradients_are_those_without(name: str) -> None:
    for got, wanted in zip(gradients(RUNS[name]), gradients(lambda m, x: m(x)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)


def test_the_function_runs_once_more_in_backward_and_not_without_gradients() -> None:
    calls = []

    def run(x: Any) -> Any:
        calls.append(tp.is_grad_enabled())
        return (x * 2).exp()

    y = checkpoint(run, data())
    assert calls == [True]
    y.sum().backward()
    assert calls == [True, True]
    with tp.no_grad():
        checkpoint(run, data())
    assert calls == [True, True, False]


def test_activations_are_dropped() -> None:
    kept = []

    def run(x: Any) -> Any:
        hidden = x.exp()
        kept.append(weakref.ref(hidden._storage))
        return hidden.tanh().sin()

    y = checkpoint(run, data())
    gc.collect()
    assert kept[0]() is None
    leaves = [y.grad_fn.leaves, y.grad_fn.next_edges[0][0].leaves]
    assert leaves == [None, None]
    y.sum().backward()


def test_autograd_grad_and_a_kept_graph() -> None:
    model, x = make().eval(), data()
    wanted = tp.autograd.grad(model(x).sum(), [x, *model.parameters()])
    y = checkpoint(model, x).sum()
    for _ in range(2):
        found = tp.autograd.grad(y, [x, *model.parameters()], retain_graph=True)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6)
    y.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()


def test_without_preserving_the_random_state_masks_differ() -> None:
    x = tp.ones(200, requires_grad=True)
    drop = nn.Dropout(0.5)
    tp.manual_seed(0)
    y = checkpoint(drop, x, preserve_rng_state=False)
    y.sum().backward()
    assert not np.array_equal(x.grad.numpy() != 0, y.detach().numpy() != 0)
    x.grad = None
    y = checkpoint(drop, x)
    y.sum().backward()
    assert np.array_equal(x.grad.numpy(), y.detach().numpy())


def test_a_function_that_does_something_else_is_refused() -> None:
    calls = []

    def run(x: Any) -> Any:
        calls.append(1)
        return x.exp() if len(calls) == 1 else x.sin().cos()

    y = checkpoint(run, data())
    with pytest.raises(CheckpointError, match=r"First: 1 operations \(Exp.*Then: 2 operations"):
        y.sum().backward()
    with pytest.raises(ValueError, match="determinism_check"):
        checkpoint(run, data(), determinism_check="sometimes")


def test_contexts_are_entered_first_and_again() -> None:
    entered = []

    class Context:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *exc: object) -> None:
            pass

    y = checkpoint(lambda x: x.exp(), data(), context_fn=lambda: (Context("a"), Context("b")))
    assert entered == ["a"]
    y.sum().backward()
    assert entered == ["a", "b"]


def test_hooks_and_custom_functions_inside() -> None:
    class Square(tp.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    x, seen = data(), []

    def run(v: Any) -> Any:
        y = Square.apply(v * 3)
        y.register_hook(lambda g: seen.append(g.sum().item()))
        return y

    checkpoint(run, x).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 18 * x.detach().numpy(), rtol=1e-6)
    assert seen == [20.0]


def test_wrapped_modules_keep_their_names() -> None:
    plain, model = make(), make()
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Linear))
    assert isinstance(model[0], CheckpointWrapper) and model[0].in_features == 4
    assert list(model.state_dict()) == list(plain.state_dict())
    with tp.no_grad():
        for p in plain.parameters():
            p.add_(1)
    model.load_state_dict(plain.state_dict())
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert tp.equal(p, q)
    assert [name for name, _ in model[0].named_parameters()] == ["weight", "bias"]
