"""State dicts of sharded models and optimizers, whole and sharded, across world sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorplay as tp
import tensorplay.nn as nn
from tensorplay.distributed import run_ranks
from tensorplay.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from tensorplay.distributed.fsdp import fully_shard

FULL = StateDictOptions(full_state_dict=True)


def make(seed: int) -> Any:
    tp.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, bias=False))
    fully_shard(model[0])
    fully_shard(model)
    return model, tp.optim.AdamW(model.parameters(), lr=0.1)


def step(model: Any, optimizer: Any) -> None:
    x = tp.tensor(np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3))
    model(x).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(rank: int, options: StateDictOptions) -> Any:
    model, optimizer = make(0)
    step(model, optimizer)
    return get_state_dict(model, optimizer, options=options)


def as_numpy(value: Any) -> Any:
    if isinstance(value, tp.Tensor):
        return value.detach().numpy()
    if isinstance(value, dict):
        return {k: as_numpy(v) for k, v in value.items()}
    if isinstance(value, list):
        return [as_numpy(v) for v in value]
    return value


def assert_same(a: Any, b: Any) -> None:
    assert a.keys() == b.keys()
    for key in a:
        if isinstance(a[key], dict):
            assert_same(a[key], b[key])
        else:
            np.testing.assert_array_equal(a[key], b[key], err_msg=str(key))


@pytest.mark.parametrize(("saved", "loaded"), [(2, 3), (3, 1), (1, 4)])
def test_whole_state_moves_between_world_sizes(saved: int, loaded: int) -> None:
    model_state, optimizer_state = run_ranks(trained, saved, args=(FULL,))[0]

    def resume(rank: int) -> Any:
        model, optimizer = make(1)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
            options=FULL,
        )
        state = as_numpy(list(get_state_dict(model, optimizer, options=FULL)))
        step(model, optimizer)
        return state, get_state_dict(model, optimizer, options=FULL)

    def go_on(rank: int) -> Any:
        model, optimizer = make(0)
        step(model, optimizer)
        step(model, optimizer)
        return get_state_dict(model, optimizer, options=FULL)

    wanted = run_ranks(go_on, saved)[0]
    for (model_now, optimizer_now), after in run_ranks(resume, loaded):
        assert_same(model_now, as_numpy(model_state))
        assert_same(optimizer_now["state"], as_numpy(optimizer_state["state"]))
        for key, value in as_numpy(after[0]).items():
            np.testing.assert_allclose(value, as_numpy(wanted[0])[key], rtol=1e-5, atol=1e-6)


def test_whole_shapes_and_names() -> None:
    model_state, optimizer_state = run_ranks(trained, 2, args=(FULL,))[1]
    assert tuple(model_state["0.weight"].shape) == (5, 3)
    assert tuple(optimizer_state["state"]["0.weight"]["exp_avg"].shape) == (5, 3)
    assert optimizer_state["param_groups"][0]["params"][0] == "0.weight"


def test_offloaded_whole_state_is_on_rank_0_only() -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    first, second = run_ranks(trained, 2, args=(options,))
    assert "0.weight" in first[0] and second == ({}, {})


def test_broadcast_from_rank_0() -> None:
    model_state, _ = run_ranks(trained, 2, args=(FULL,))[0]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def load(rank: int) -> Any:
        model, _ = make(1)
        set_model_state_dict(model, model_state if rank == 0 else {}, options=options)
        return {n: as_numpy(p.full_tensor()) for n, p in model.named_parameters()}

    for found in run_ranks(load, 2):
        for name, value in found.items():
            np.testing.assert_array_equal(value, as_numpy(model_state[name]))


def test_wrong_sizes_name_the_key_and_load_nothing() -> None:
    def load(rank: int) -> None:
        model, _ = make(1)
        before = model[0].weight.detach().full_tensor().numpy()
        state = {**get_state_dict(model, [], options=FULL)[0], "0.weight": tp.zeros(4, 3)}
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight.*\(4, 3\).*\(5, 3\)"):
            set_model_state_dict(model, state, options=FULL)
        np.testing.assert_array_equal(model[0].weight.detach().full_tensor().numpy(), before)

    run_ranks(load, 2)
