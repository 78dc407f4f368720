"""What the lowered programs hold: how many collectives, and how large the residuals are."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from helpers import Lm, ids, lm_loss, on_ranks, random, seeded, shard_nested

import tensorplay as tp
import tensorplay.nn as nn
import tensorplay.nn.functional as F
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import MixedPrecisionPolicy, _call, fully_shard

COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "psum", "ppermute", "all_to_all"})


class Program:
    """One launched program, as its jaxpr for one rank.

    Attributes:
        counts: how often each collective occurs.
        outputs: (elements, dtype) of each output on one rank.
        gathers, reductions: elements and dtype of the operand of each all-gather and reduction.
    """

    def __init__(self, program: Any, arrays: list[Any], ranks: int) -> None:
        avals = [jax.ShapeDtypeStruct((a.shape[0] * ranks, *a.shape[1:]), a.dtype) for a in arrays]
        with jax.enable_x64(True):
            self.text = program.lower(*avals).as_text()
            closed = jax.make_jaxpr(program)(*avals)
        found = [e for e in equations(closed.jaxpr) if e.primitive.name in COLLECTIVES]
        self.counts = Counter(e.primitive.name for e in found)
        self.gathers = [operand(e) for e in found if e.primitive.name == "all_gather"]
        self.reductions = [operand(e) for e in found if e.primitive.name == "reduce_scatter"]
        self.outputs = [(math.prod(v.aval.shape) // ranks, v.aval.dtype.name)
                        for v in closed.jaxpr.outvars]  # fmt: skip

    def largest_output(self) -> int:
        return max(size for size, _ in self.outputs)


def operand(equation: Any) -> tuple[int, str]:
    aval = equation.invars[0].aval
    return math.prod(aval.shape), aval.dtype.name


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


@contextlib.contextmanager
def captured() -> Iterator[list[Any]]:
    """Collects (program, local arguments) of every launch of a compiled call."""
    found: list[Any] = []
    launch = _call.launch

    def noting(mesh: Any, program: Any, arguments: Any) -> Any:
        found.append((program, [getattr(a, "local", a) for a in arguments]))
        return launch(mesh, program, arguments)

    _call.launch = noting  # type: ignore[assignment]
    try:
        yield found
    finally:
        _call.launch = launch


def programs(step: Callable[[int], Any], ranks: int = 2) -> list[Program]:
    """The programs that ``step(rank)`` launches through compiled calls, each once, in order."""
    with captured() as found:
        on_ranks(ranks, step)
    distinct = {id(program): (program, arrays) for program, arrays in found}
    launches = Counter(id(program) for program, _ in found)
    assert all(count % ranks == 0 for count in launches.values())
    return [Program(program, arrays, ranks) for program, arrays in distinct.values()]


def lm_step(**options: Any) -> Callable[[int], Any]:
    def step(rank: int) -> None:
        lm_loss(shard_nested(seeded(Lm), **options), rank, 0).backward()

    return step


# --- how many collectives -------------------------------------------------------------------------


@pytest.mark.parametrize(("reshard", "gathered_again"), [(True, 3), (False, 0), (None, 2)], ids=str)
def test_one_gather_per_group_and_a_second_one_where_it_resharded(
    reshard: bool | None, gathered_again: int
) -> None:
    forward, backward = programs(lm_step(reshard_after_forward=reshard))
    assert forward.counts == {"all_gather": 3}
    wanted = Counter({"all_gather": gathered_again, "reduce_scatter": 3})
    assert backward.counts == +wanted
    assert forward.text.count("stablehlo.all_gather") == 3
    assert backward.text.count("stablehlo.all_gather") == gathered_again
    assert backward.text.count("stablehlo.reduce_scatter") == 3


def test_a_group_of_one_rank_has_no_collective() -> None:
    forward, backward = programs(lm_step(reshard_after_forward=False), ranks=1)
    assert not backward.counts["reduce_scatter"] and not backward.counts["psum"]
    assert forward.largest_output() > 0


def test_given_whole_parameters_are_not_gathered() -> None:
    def step(rank: int) -> None:
        model = shard_nested(seeded(Lm), reshard_after_forward=False)
        loss = lm_loss(model, rank, 0) + lm_loss(model, rank, 1)
        loss.backward()

    first, second, *backwards = programs(step)
    assert first.counts == {"all_gather": 3}
    assert not second.counts
    assert all(b.counts == {"reduce_scatter": 3} for b in backwards)


def test_a_gather_holds_every_parameter_of_its_group_once() -> None:
    forward, backward = programs(lm_step(reshard_after_forward=True))
    block = (3 + 3) + (6 * 5 + 6) + (3 * 11 + 3)  # norm, up, down: rows of rank 0
    root = 6 * 5 + 6 * 5 + 6
    sizes = sorted(size for size, _ in forward.gathers)
    assert sizes == sorted([root, block, block])
    assert sorted(size for size, _ in backward.gathers) == sizes
    assert sorted(size for size, _ in backward.reductions) == sorted(2 * s for s in sizes)


def test_a_list_of_modules_is_one_collective() -> None:
    def step(rank: int) -> None:
        model = seeded(Lm)
        fully_shard([*model.blocks, model.embed, model.head])
        fully_shard(model)
        lm_loss(model, rank, 0).backward()

    forward, backward = programs(step)
    assert forward.counts == {"all_gather": 1}
    assert backward.counts == {"all_gather": 1, "reduce_scatter": 1}


def test_tied_parameters_travel_once() -> None:
    def step(rank: int) -> None:
        model = seeded(Lm)
        model.head.weight = model.embed.weight
        fully_shard([model.embed, model.head])
        lm_loss(fully_shard(model), rank, 0).backward()

    forward, _ = programs(step)
    assert (6 * 5 + 6) in [size for size, _ in forward.gathers]


def test_frozen_groups_have_no_gradient_collective() -> None:
    def step(rank: int) -> None:
        model = seeded(Lm)
        model.blocks[0].requires_grad_(False)
        lm_loss(shard_nested(model, reshard_after_forward=True), rank, 0).backward()

    forward, backward = programs(step)
    assert forward.counts == {"all_gather": 3}
    assert backward.counts["reduce_scatter"] == 2


def test_a_frozen_parameter_inside_a_group_is_not_reduced() -> None:
    def step(rank: int) -> None:
        model = seeded(Lm)
        model.embed.requires_grad_(False)
        lm_loss(fully_shard(model), rank, 0).backward()

    _, backward = programs(step)
    (_, whole) = programs(lambda rank: lm_loss(fully_shard(seeded(Lm)), rank, 0).backward())
    (with_embed,), (without,) = whole.reductions, backward.reductions
    assert with_embed[0] - without[0] == 2 * 6 * 5


def test_a_forward_without_gradients_has_only_gathers_and_no_residuals() -> None:
    def step(rank: int) -> None:
        model = shard_nested(seeded(Lm), reshard_after_forward=True)
        with tp.no_grad():
            model(ids(11, 2, 4))

    (forward,) = programs(step)
    assert forward.counts == {"all_gather": 3}
    assert forward.outputs == [(2 * 4 * 11, "float32")]


def test_without_gradient_sync_there_is_no_reduction() -> None:
    def step(rank: int) -> None:
        model = shard_nested(seeded(Lm))
        model.set_requires_gradient_sync(False)
        lm_loss(model, rank, 0).backward()
        model.set_requires_gradient_sync(True)
        lm_loss(model, rank, 1).backward()

    _, early, late = programs(step)
    assert early.counts["reduce_scatter"] == 0
    assert late.counts["reduce_scatter"] == 3


def test_an_unused_module_is_not_gathered_and_not_reduced() -> None:
    class Spare(Lm):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(5, 5)

    def step(rank: int) -> None:
        model = seeded(Spare)
        fully_shard(model.spare)
        lm_loss(shard_nested(model), rank, 0).backward()

    forward, backward = programs(step)
    assert forward.counts == {"all_gather": 3}
    assert backward.counts == {"all_gather": 2, "reduce_scatter": 3}


def test_a_module_called_twice_is_gathered_once_per_program() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x: Any) -> Any:
            return self.layer(tp.tanh(self.layer(x)))

    def step(rank: int) -> None:
        model = seeded(Twice)
        fully_shard(model.layer)
        fully_shard(model)(random(2, 5)).sum().backward()

    forward, backward = programs(step)
    assert forward.counts["all_gather"] <= 2
    assert backward.counts["reduce_scatter"] == 1


def test_a_hybrid_mesh_reduces_over_shards_then_over_replicas() -> None:
    def step(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        lm_loss(shard_nested(seeded(Lm), mesh=mesh), rank, 0).backward()

    forward, backward = programs(step, ranks=4)
    assert forward.counts == {"all_gather": 3}
    assert backward.counts == {"all_gather": 2, "reduce_scatter": 3, "psum": 3}


def test_collectives_travel_in_the_policys_dtypes() -> None:
    policy = MixedPrecisionPolicy(param_dtype=tp.bfloat16, reduce_dtype=tp.float32)
    forward, backward = programs(lm_step(mp_policy=policy, reshard_after_forward=True))
    assert {dtype for _, dtype in forward.gathers} == {"bfloat16"}
    assert {dtype for _, dtype in backward.gathers} == {"bfloat16"}
    assert {dtype for _, dtype in backward.reductions} == {"float32"}


# --- the residuals --------------------------------------------------------------------------------

WIDTH = 48


class Wide(nn.Module):
    """Uses a (48, 48) weight in the way that ``use`` says; activations have 2 x 48 elements."""

    def __init__(self, use: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(tp.randn(WIDTH, WIDTH) / 7)
        self.use = use

    def forward(self, x: Any) -> Any:
        return tp.tanh(self.use(tp.tanh(self.first(x)), self.weight)).square()


USES: dict[str, Callable[[Any, Any], Any]] = {
    "plain": lambda x, w: x @ w,
    "scaled": lambda x, w: x @ (w * 0.5),
    "transposed": lambda x, w: x @ w.T,
    "cast": lambda x, w: (x.double() @ w.double()).float(),
    "shifted": lambda x, w: x @ (w + 1.0),
    "squared": lambda x, w: x @ (w * w),
    "exponential": lambda x, w: x @ tp.exp(-w.abs()),
    "softmax": lambda x, w: x @ F.softmax(w, dim=0),
    "weight_norm": lambda x, w: x @ (w / w.norm(dim=0, keepdim=True)),
    "linear": lambda x, w: F.linear(x, w * 2),
    "sliced": lambda x, w: x[:, :40] @ w[:40] + x @ w,
    "concatenated": lambda x, w: tp.cat([x, x], 1) @ tp.cat([w, w]),
    "low_rank": lambda x, w: x @ (w @ w),
    "masked": lambda x, w: x @ tp.tril(w),
    "where": lambda x, w: x @ tp.where(w > 0, w, tp.zeros(())),
    "in_place": lambda x, w: x @ w.clone().mul_(3.0),
    "dropped": lambda x, w: F.dropout(x, 0.5) @ (w * 2),
}


@pytest.mark.parametrize("name", list(USES))
def test_residuals_hold_nothing_as_large_as_a_whole_parameter(name: str) -> None:
    def step(rank: int) -> None:
        model = fully_shard(seeded(lambda: Wide(USES[name])), reshard_after_forward=True)
        model(random(2, WIDTH, seed=rank)).sum().backward()

    forward, backward = programs(step)
    assert forward.largest_output() < WIDTH * WIDTH // 2
    assert forward.counts == {"all_gather": 1}
    assert backward.counts == {"all_gather": 1, "reduce_scatter": 1}


def test_residuals_of_a_nested_model_hold_nothing_large_but_the_kept_root() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
            self.out = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = F.gelu(layer(x))
            return self.out(x)

    def step(rank: int) -> None:
        model = seeded(Deep)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)(random(2, WIDTH).requires_grad_()).sum().backward()

    forward, backward = programs(step)
    large = [size for size, _ in forward.outputs if size >= WIDTH * WIDTH // 2]
    assert large == [2 * WIDTH * WIDTH]
    assert backward.counts == {"all_gather": 3, "reduce_scatter": 4}


def test_frozen_weights_are_not_kept_either() -> None:
    def step(rank: int) -> None:
        model = seeded(lambda: Wide(USES["scaled"]))
        model.weight.requires_grad_(False)
        fully_shard(model, reshard_after_forward=True)
        model(random(2, WIDTH, seed=rank)).sum().backward()

    forward, _ = programs(step)
    assert forward.largest_output() < WIDTH * WIDTH // 2


def test_inputs_are_not_kept_twice() -> None:
    """The input is large here; backward reads it where it is."""

    def step(rank: int) -> None:
        model = fully_shard(seeded(lambda: nn.Linear(4, 3)))
        model(random(500, 4)).sum().backward()

    forward, _ = programs(step)
    assert forward.largest_output() == 500 * 3
