"""Sharded parameters: padding stays zero through every rule, and own rows are as unsharded ones.

The layout here stands for that of the distributed package: storage of a whole padded piece, of
which the tensor shows its own rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tensorplay as tp
from tensorplay import optim
from tensorplay._tensor import Storage, Tensor
from tensorplay._views import slice_step

PADDED = (4, 3)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Own rows first, then padding."""

    rows: int
    memory = None

    def readable(self, tensor: Any) -> Any:
        return tensor._storage.array

    def tensor(self, rows: np.ndarray) -> Any:
        out = Tensor.__new__(Tensor)
        piece = np.zeros(PADDED, np.float32)
        piece[: len(rows)] = rows
        out._storage = Storage(jnp.array(piece))
        if rows.shape != PADDED:
            out._chain = (slice_step(tuple((0, size, 1) for size in rows.shape)),)
        out._layout = self
        return out

    def full(self, value: float, dtype: Any, on_meta: bool) -> Any:
        return self.tensor(np.full((self.rows, PADDED[1]), value, dtype))


def sharded(rows: int, seed: int) -> tuple[Any, Any]:
    """A sharded parameter with that many own rows, and a plain twin."""
    rng = np.random.RandomState(seed)
    values = rng.randn(rows, PADDED[1]).astype(np.float32)
    layout = Layout(rows)
    own, twin = layout.tensor(values).requires_grad_(), tp.tensor(values).requires_grad_()
    grad = rng.randn(*values.shape).astype(np.float32)
    own._grad, twin.grad = layout.tensor(grad), tp.tensor(grad)
    return own, twin


ADAM = [
    {"amsgrad": a, "maximize": m, "weight_decay": w, "decoupled_weight_decay": d, "eps": e}
    for a, m, w, d, e in itertools.product(
        (False, True), (False, True), (0.0, 0.3), (False, True), (1e-8, 0.0, 1e-46)
    )
]
SETTINGS: list[tuple[type, dict[str, Any]]] = [
    *((optim.Adam, options) for options in ADAM),
    (optim.AdamW, {"betas": (0.0, 0.0)}),
    *(
        (optim.SGD, {"momentum": b, "nesterov": n, "weight_decay": w, "maximize": m})
        for b, n, w, m in itertools.product((0.0, 0.9), (False, True), (0.0, 0.2), (False, True))
        if b or not n
    ),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.4}),
    *(
        (optim.Adagrad, {"weight_decay": w, "initial_accumulator_value": i, "eps": e,
                         "lr_decay": 0.1, "maximize": m})
        for w, i, e, m in itertools.product((0.0, 0.2), (0.0, 0.5), (1e-10, 0.0), (False, True))
    ),
    *(
        (optim.RMSprop, {"weight_decay": w, "centered": c, "momentum": b, "eps": e,
                         "maximize": m})
        for w, c, b, e, m in itertools.product(
            (0.0, 0.2), (False, True), (0.0, 0.9), (1e-8, 0.0), (False, True)
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.Adagrad, optim.RMSprop])
def test_every_rule_returns_zero_for_padding(kind: type) -> None:
    """The rules themselves, on nothing but padding, with every setting."""
    for own_kind, options in SETTINGS:
        if own_kind is not kind:
            continue
        own, _ = sharded(0, 0)
        opt = kind([own], **{"lr": 0.1, **options})
        group = opt.param_groups[0]
        nothing = jnp.zeros(PADDED, jnp.float32)
        state = dict.fromkeys(opt._initial_state(group), nothing)
        p = nothing
        for step in (1, 2, 3):
            hyper = type(opt._hyper(group, step))(*map(jnp.float32, opt._hyper(group, step)))
            p, state = opt.rule(p, nothing, state, hyper, opt._options(group))
            for array in (p, *state.values()):
                np.testing.assert_array_equal(np.asarray(array), 0.0, str(options))


@pytest.mark.parametrize("rows", [0, 3, 4])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        (optim.AdamW, {"lr": 0.1, "amsgrad": True}),
        (optim.Adam, {"lr": 0.1, "eps": 0.0, "weight_decay": 0.1}),
        (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
        (optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.9}),
    ],
)
def test_own_rows_are_as_unsharded_ones(kind: type, options: Any, rows: int) -> None:
    (a, a_twin), (b, b_twin) = sharded(rows, 1), sharded(rows, 2)
    opt, twin_opt = kind([a, b], **options), kind([a_twin, b_twin], **options)
    for _ in range(4):
        opt.step()
        twin_opt.step()
    for own, twin in ((a, a_twin), (b, b_twin)):
        assert own.shape == (rows, PADDED[1]) and own._version == 4
        pairs = [(own, twin)]
        pairs += [(opt.state[own][k], v) for k, v in twin_opt.state[twin].items() if k != "step"]
        for t, expected in pairs:
            assert t.shape == (rows, PADDED[1]) and t._layout is own._layout
            piece = np.asarray(t._storage.array)
            np.testing.assert_allclose(piece[:rows], np.asarray(expected._read()), rtol=2e-6)
            np.testing.assert_array_equal(piece[rows:], 0.0)


@pytest.mark.parametrize("rows", [0, 3, 4])
def test_state_of_sharded_parameters_is_loaded(rows: int) -> None:
    own, _ = sharded(rows, 1)
    opt = optim.AdamW([own], lr=0.1)
    opt.step()
    state = opt.state_dict()
    plain = {k: v if k == "step" else tp.tensor(v._read()) for k, v in state["state"][0].items()}
    for entry in (state["state"][0], plain):
        other, _ = sharded(rows, 1)
        again = optim.AdamW([other])
        again.load_state_dict({**state, "state": {0: entry}})
        loaded = again.state[other]["exp_avg"]
        assert loaded._layout is not None and loaded.shape == own.shape
        again.step()
        np.testing.assert_array_equal(
            np.asarray(opt.state[own]["exp_avg"]._storage.array),
            np.asarray(state["state"][0]["exp_avg"]._storage.array),
        )


def test_state_of_whole_parameters_is_refused() -> None:
    own, _ = sharded(3, 1)
    opt = optim.AdamW([own])
    group = opt.state_dict()["param_groups"][0]
    whole = {"step": tp.tensor(1.0), "exp_avg": tp.zeros(8, 3), "exp_avg_sq": tp.zeros(8, 3)}
    with pytest.raises(ValueError, match=r"'exp_avg' of shape \(8, 3\) does not fit"):
        opt.load_state_dict({"state": {0: whole}, "param_groups": [group]})


def test_pieces_are_updated_in_place_though_they_were_read() -> None:
    own, _ = sharded(3, 1)
    opt = optim.AdamW([own], lr=0.1)
    opt.step()
    before = own._storage.array.unsafe_buffer_pointer()
    own._read()
    opt.step()
    assert own._storage.array.unsafe_buffer_pointer() == before
