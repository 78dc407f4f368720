"""Float32 products ask for float32 on every device, unless told otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

import tensorplay as tp
import tensorplay.nn.functional as F
from tensorplay._ops.linalg import _addmm, _einsum, _matmul, _tensordot
from tensorplay.distributed.fsdp import fully_shard
from tensorplay.nn._functional.linear import _linear


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    tp.set_float32_matmul_precision("highest")


def precisions(fn: Any, *shapes: tuple[int, ...], dtype: Any = np.float32) -> set[Any]:
    """Of all products in a function and in its gradient."""

    def total(*arrays: Any) -> Any:
        return fn(*arrays).sum()

    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    text = jax.make_jaxpr(jax.grad(total, argnums=tuple(range(len(shapes)))))(*avals)
    found: set[Any] = set()

    def visit(program: Any) -> None:
        for eqn in program.eqns:
            if eqn.primitive.name == "dot_general":
                found.add(eqn.params["precision"])
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(text.jaxpr)
    return found


PRODUCTS = {
    "matmul": (_matmul.fn, (3, 4), (4, 5)),
    "linear": (lambda x, w: _linear.fn(x, w, None), (3, 4), (5, 4)),
    "addmm": (lambda b, x, y: _addmm.fn(b, x, y, 1, 1), (5,), (3, 4), (4, 5)),
    "einsum": (lambda a, b: _einsum.fn(a, b, equation="ij,jk->ik"), (3, 4), (4, 5)),
    "tensordot": (lambda a, b: _tensordot.fn(a, b, dims=1), (3, 4), (4, 5)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_their_gradients(name: str) -> None:
    fn, *shapes = PRODUCTS[name]
    high = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    assert precisions(fn, *shapes) == {high}
    assert precisions(fn, *shapes, dtype=jax.numpy.bfloat16) == {None}
    tp.set_float32_matmul_precision("medium")
    assert high not in precisions(fn, *shapes)


def test_results_do_not_change_on_cpu_and_programs_follow() -> None:
    x, w = tp.randn(4, 8), tp.randn(5, 8)
    model = fully_shard(tp.nn.Linear(8, 5))
    wanted, through = F.linear(x, w), model(x)
    assert tp.get_float32_matmul_precision() == "highest"
    for level in ("high", "medium", "highest"):
        tp.set_float32_matmul_precision(level)
        tp.testing.assert_close(F.linear(x, w), wanted)
        tp.testing.assert_close(model(x), through)
    assert model._fsdp_state.calls.traces == 3
    with pytest.raises(ValueError, match="'highest', 'high', 'medium'"):
        tp.set_float32_matmul_precision("low")
