"""When gathers are issued: as plain data, and in the schedule of the compiled program."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from helpers import on_ranks

import tensorplay as tp
import tensorplay.nn as nn
from tensorplay.distributed._spmd import Spread
from tensorplay.distributed.fsdp import _call, fully_shard
from tensorplay.distributed.fsdp._schedule import gathers_at_entry

LAYERS = 12


def test_by_default_the_next_group_is_gathered_ahead() -> None:
    assert gathers_at_entry([2, 0, 1], {}) == {2: (2, 0), 0: (0, 1), 1: (1,)}


def test_explicit_lists_replace_the_default() -> None:
    order = gathers_at_entry([0, 1, 2, 3], {0: (1, 2), 1: ()})
    assert order == {0: (0, 1, 2), 1: (1,), 2: (2, 3), 3: (3,)}


def test_a_group_does_not_gather_itself_twice() -> None:
    assert gathers_at_entry([0, 1], {0: (0, 1)}) == {0: (0, 1), 1: (1,)}


def stacked() -> Any:
    tp.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(LAYERS)])
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def compiled_forward(prefetch: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """The scheduled forward program of a 12-layer model on two ranks, and its output."""
    programs: list[str] = []
    launch = _call.launch

    def noting(mesh: Any, program: Any, args: Any) -> Any:
        outputs = launch(mesh, program, args)
        if not programs and hasattr(program, "lower"):
            avals = [_global_aval(a) for a in args]
            programs.append(program.lower(*avals).compile().as_text())
        return outputs

    monkeypatch.setattr(_call, "launch", noting)

    def run(rank: int) -> Any:
        model = stacked()
        for position, layer in enumerate(model):
            if prefetch is not None:
                ahead = list(model)[position + 1 : position + 1 + prefetch]
                layer.set_modules_to_forward_prefetch(ahead)
        x = tp.tensor(np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16))
        return model(x).detach().numpy()

    output = on_ranks(2, run)[0]
    return programs[0], output


def _global_aval(value: Any) -> Any:
    if isinstance(value, Spread):
        return jax.ShapeDtypeStruct(value._global.shape, value._global.dtype)
    return jax.ShapeDtypeStruct((2 * value.shape[0], *value.shape[1:]), value.dtype)


def most_ahead(program: str) -> int:
    """The largest number of gathers that the schedule puts before layers that still have to run."""
    entry = program[program.index("\nENTRY") :]
    gathers = computed = most = 0
    for line in entry.splitlines():
        if " all-gather(" in line or " all-gather-start(" in line:
            gathers += 1
        elif "tanh" in line.partition(" = ")[0]:
            computed += 1
        most = max(most, gathers - computed)
    assert gathers == computed == LAYERS
    return most


@pytest.mark.parametrize(("prefetch", "unsharded"), [(None, 2), (0, 1), (2, 3)])
def test_at_most_the_listed_number_of_groups_is_unsharded(
    prefetch: Any, unsharded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, _ = compiled_forward(prefetch, monkeypatch)
    assert most_ahead(program) <= unsharded


def test_prefetching_does_not_change_values(monkeypatch: pytest.MonkeyPatch) -> None:
    _, default = compiled_forward(None, monkeypatch)
    _, none = compiled_forward(0, monkeypatch)
    np.testing.assert_array_equal(default, none)


def test_prefetch_lists_hold_fsdp_modules_only() -> None:
    model = stacked()
    with pytest.raises(ValueError, match="Linear"):
        model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])
