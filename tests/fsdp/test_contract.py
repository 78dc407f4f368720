"""Every sentence of the seed page that promises something (shared/seed/fully_shard.md)."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from helpers import Lm, Mlp, close, local, mlp_loss, on_ranks, own_slice, random, seeded, sgd, whole

import tensorplay as tp
import tensorplay.distributed as dist
import tensorplay.nn as nn
from tensorplay.distributed.device_mesh import DeviceMesh, init_device_mesh
from tensorplay.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
)

# --- the user contract ----------------------------------------------------------------------------


def test_the_class_is_new_and_derives_from_both() -> None:
    model = nn.Linear(4, 4)
    same = fully_shard(model)
    assert same is model
    assert type(model).__name__ == "LinearFSDPModule"
    assert isinstance(model, nn.Linear) and isinstance(model, FSDPModule)
    assert issubclass(type(model), nn.Linear) and issubclass(type(model), FSDPModule)
    assert type(fully_shard(nn.Linear(2, 2))) is type(model)
    assert not isinstance(nn.Linear(2, 2), FSDPModule)


def test_every_method_of_the_original_is_kept() -> None:
    class Own(nn.Module):
        """Own docs."""

        constant = 3

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.linear(x)

        def helper(self) -> int:
            return self.constant + 1

        @property
        def width(self) -> int:
            return 2

        def __len__(self) -> int:
            return 7

    model = fully_shard(Own())
    assert (model.helper(), model.width, len(model), model.constant) == (4, 2, 7, 3)
    assert type(model).__module__ == Own.__module__
    assert "Own" in repr(model) and "Linear(in_features=2" in repr(model)
    for name in ("unshard", "reshard", "set_reshard_after_forward", "reset_iter_state"):
        assert callable(getattr(model, name))


def test_a_list_comes_back_as_it_was_given() -> None:
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert fully_shard(modules) is modules
    assert all(isinstance(m, FSDPModule) for m in modules)


def test_parameters_are_the_local_rows() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(lambda: nn.Linear(8, 8)))
        for p in model.parameters():
            assert isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        w = model.weight
        facts = (tuple(w.global_shape), isinstance(w.device_mesh, DeviceMesh), str(w.placements))
        return shapes, facts, local(w), local(w.to_local()), whole(w)

    start = local(seeded(lambda: nn.Linear(8, 8)).weight)
    for rank, (shapes, facts, rows, own, full) in enumerate(on_ranks(2, run)):
        assert shapes == {"weight": (4, 8), "bias": (4,)}
        assert facts == ((8, 8), True, "(Shard(dim=0),)")
        close(rows, start[4 * rank : 4 * rank + 4], rtol=0, atol=0)
        close(own, rows, rtol=0, atol=0)
        close(full, start, rtol=0, atol=0)


def test_uneven_rows_follow_torch_chunk() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(nn.Linear(4, 4))
        return tuple(model.weight.shape), tuple(model.weight.global_shape)

    assert [s for s, _ in on_ranks(3, run)] == [(2, 4), (2, 4), (0, 4)]
    assert {g for _, g in on_ranks(3, run)} == {(4, 4)}


def test_names_are_unchanged() -> None:
    plain, model = Lm(), Lm()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]


def test_the_optimizer_steps_on_the_sharded_parameters() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        optimizer = sgd(model.parameters())
        before = [id(p) for p in model.parameters()]
        mlp_loss(model, rank, 0).backward()
        p = model.inner.weight
        wanted = local(p) - 0.1 * local(p.grad)
        optimizer.step()
        assert [id(q) for q in model.parameters()] == before
        close(local(p), wanted)
        state = optimizer.state[p]["momentum_buffer"]
        return tuple(state.shape), tuple(p.shape)

    for state, shape in on_ranks(3, run):
        assert state == shape


def test_gradients_are_slices_of_the_full_batch_gradient() -> None:
    """A loss summed over the batch, each rank with its own part, times the number of ranks."""

    def run(rank: int) -> Any:
        model = fully_shard(seeded(lambda: nn.Linear(8, 8)))
        (model(x[2 * rank : 2 * rank + 2]).square().mean()).backward()
        return local(model.weight.grad), tuple(model.bias.grad.shape)

    x = random(4, 8)
    twin = seeded(lambda: nn.Linear(8, 8))
    twin(x).square().mean().backward()
    for rank, (grad, bias) in enumerate(on_ranks(2, run)):
        close(grad, own_slice(local(twin.weight.grad), 2, rank))
        assert bias == (4,)


def test_twice_raises() -> None:
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"^fully_shard has already been applied"):
        fully_shard(model)


def test_without_a_process_group_sharding_is_a_no_op() -> None:
    """The first script of the page."""
    assert not dist.is_initialized()
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    start = {n: local(p) for n, p in model.named_parameters()}
    model = fully_shard(model)
    assert type(model).__name__ == "SequentialFSDPModule"
    assert {n: local(p).shape for n, p in model.named_parameters()} == {
        n: v.shape for n, v in start.items()
    }
    assert model[0].weight.device_mesh.size() == 1
    out = model(tp.randn(2, 4))
    assert tuple(out.shape) == (2, 4)
    optimizer = tp.optim.SGD(model.parameters(), lr=0.1)
    out.sum().backward()
    optimizer.step()
    close(whole(model[2].bias), start["2.bias"] - 0.1 * 2)
    with pytest.raises(RuntimeError) as caught:
        fully_shard(model)
    assert str(caught.value) == "fully_shard has already been applied"


def test_a_sharded_step_verified() -> None:
    """The second script of the page, on simulated ranks, with its values."""

    def run(rank: int) -> Any:
        tp.manual_seed(42)
        model = nn.Linear(8, 8)
        x = tp.randn(4, 8)
        model = fully_shard(model)
        shards = {n: tuple(p.shape) for n, p in model.named_parameters()}
        model(x).sum().backward()
        grads = {n: tuple(p.grad.shape) for n, p in model.named_parameters()}
        values = {n: local(p.grad) for n, p in model.named_parameters()}
        tp.optim.SGD(model.parameters(), lr=0.1).step()
        assert model.unshard() is None
        return shards, grads, values, {n: local(p) for n, p in model.named_parameters()}

    tp.manual_seed(42)
    twin = nn.Linear(8, 8)
    twin(tp.randn(4, 8)).sum().backward()
    wanted = {n: local(p.grad) for n, p in twin.named_parameters()}
    tp.optim.SGD(twin.parameters(), lr=0.1).step()
    for rank, (shards, grads, values, params) in enumerate(on_ranks(2, run)):
        assert shards == grads == {"weight": (4, 8), "bias": (4,)}
        for name, p in twin.named_parameters():
            close(values[name], own_slice(wanted[name], 2, rank))
            close(params[name], local(p))


# --- calling forward directly ---------------------------------------------------------------------


def test_a_direct_forward_names_the_module_and_the_three_ways_out() -> None:
    model = fully_shard(nn.Linear(3, 3))
    with pytest.raises(RuntimeError) as caught:
        model.forward(tp.ones(1, 3))
    message = str(caught.value)
    assert "Linear" in message
    for way in ("model(input)", "register_fsdp_forward_method", "unshard()"):
        assert way in message


def test_registering_forward_makes_the_direct_call_work() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        register_fsdp_forward_method(model, "forward")()
        x = random(2, 5)
        direct, hooked = model.forward(x), model(x)
        direct.sum().backward()
        return local(direct), local(hooked), whole(model.outer.bias.grad)

    wanted = local(seeded(Mlp)(random(2, 5)))
    for direct, hooked, grad in on_ranks(2, run):
        close(direct, wanted)
        close(hooked, wanted)
        close(grad, np.full(3, 2.0))


def test_unshard_makes_the_direct_call_work_until_reshard() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        x = random(2, 5)
        model.unshard()
        out = model.forward(x)
        out.sum().backward()
        model.reshard()
        with pytest.raises(RuntimeError, match="directly"):
            model.forward(x)
        return local(out), whole(model.outer.bias.grad)

    wanted = local(seeded(Mlp)(random(2, 5)))
    for out, grad in on_ranks(2, run):
        close(out, wanted)
        close(grad, np.full(3, 2.0))


def test_unshard_returns_a_handle_only_when_asked() -> None:
    model = fully_shard(nn.Linear(3, 3))
    assert model.unshard() is None
    model.reshard()
    handle = model.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    assert handle.wait() is None


# --- communication grouping -----------------------------------------------------------------------


def groups_of(model: Any) -> list[list[str]]:
    return [sorted(g.names) for g in model._fsdp_state.groups()]


def test_each_call_takes_the_parameters_that_are_left() -> None:
    model = Lm()
    fully_shard(model.blocks[0].up)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    rest = ["down.bias", "down.weight", "norm.bias", "norm.weight"]
    assert groups_of(model) == [
        ["embed.weight", "head.bias", "head.weight"],
        rest,
        ["bias", "weight"],
        [*rest, "up.bias", "up.weight"],
    ]


def test_a_list_of_modules_forms_one_group() -> None:
    model = Lm()
    fully_shard([model.embed, model.head])
    fully_shard(model)
    assert model.embed._fsdp_state.group is model.head._fsdp_state.group
    assert len(model.embed._fsdp_state.group.params) == 3


def test_modules_inside_others_of_the_list_need_no_place_of_their_own() -> None:
    model = Lm()
    fully_shard([model, model.blocks[0]])
    assert len(groups_of(model)) == 1


def test_ignored_params_are_left_whole() -> None:
    def run(rank: int) -> Any:
        model = Mlp()
        kept = model.inner.weight
        fully_shard(model, ignored_params={kept})
        return model.inner.weight is kept, tuple(kept.shape), tuple(model.outer.weight.shape)

    assert on_ranks(2, run) == [(True, (7, 5), (2, 7)), (True, (7, 5), (1, 7))]


def test_a_mesh_over_a_part_of_the_ranks() -> None:
    def run(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        model = fully_shard(nn.Linear(4, 4), mesh=mesh["inner"])
        return tuple(model.weight.shape), model.weight.device_mesh.size()

    assert on_ranks(4, run) == [((2, 4), 2)] * 4


# --- policies -------------------------------------------------------------------------------------


def test_mixed_precision_policy_defaults() -> None:
    policy = MixedPrecisionPolicy()
    assert policy.param_dtype is None and policy.reduce_dtype is None
    assert policy.output_dtype is None and policy.cast_forward_inputs is True
    with pytest.raises(AttributeError):
        policy.param_dtype = tp.bfloat16  # type: ignore[misc]


def test_deepcopy_is_refused_with_a_pointer_to_state_dicts() -> None:
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(AssertionError, match=r"state.dict"):
        copy.deepcopy(model)
    outer = nn.Sequential(nn.Linear(2, 2), model)
    with pytest.raises(AssertionError, match=r"state.dict"):
        copy.deepcopy(outer)
    close(local(model(tp.ones(1, 2))), local(outer[1](tp.ones(1, 2))))


# --- state dicts ----------------------------------------------------------------------------------


def test_state_dict_values_are_shards_and_load_in_place() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        saved = {n: v.clone() for n, v in model.state_dict().items()}
        start = whole(model.inner.weight)
        mlp_loss(model, rank, 0).backward()
        sgd(model.parameters()).step()
        moved = whole(model.inner.weight)
        ids = [id(p) for p in model.parameters()]
        keys = model.load_state_dict(saved)
        assert (list(keys.missing_keys), list(keys.unexpected_keys)) == ([], [])
        assert [id(p) for p in model.parameters()] == ids
        out = local(model(random(2, 5)))
        return {n: tuple(v.shape) for n, v in saved.items()}, start, moved, out

    twin = seeded(Mlp)
    for rank, (shapes, start, moved, out) in enumerate(on_ranks(2, run)):
        assert shapes == {n: own_slice(local(p), 2, rank).shape for n, p in twin.named_parameters()}
        assert np.abs(moved - start).max() > 0
        close(out, local(twin(random(2, 5))))


def test_state_dict_is_sharded_after_any_forward() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(Mlp())
        shapes = []
        with tp.no_grad():
            model(random(2, 5))
        shapes.append(tuple(model.state_dict()["inner.weight"].shape))
        model(random(2, 5))
        shapes.append(tuple(model.state_dict()["inner.weight"].shape))
        model.unshard()
        shapes.append(tuple(model.state_dict()["inner.weight"].shape))
        return shapes

    assert on_ranks(2, run) == [[(4, 5)] * 3, [(3, 5)] * 3]


@pytest.mark.parametrize("when", ["before", "after_forward", "after_step"])
def test_assigning_a_state_dict_is_used_by_the_next_forward(when: str) -> None:
    def run(rank: int) -> Any:
        model = fully_shard(Mlp())
        source = fully_shard(seeded(Mlp))
        if when != "before":
            loss = mlp_loss(model, rank, 0)
            if when == "after_step":
                loss.backward()
                model.zero_grad()
        saved = source.state_dict()
        model.load_state_dict(saved, assign=True)
        out = model(random(2, 5))
        out.sum().backward()
        sgd(model.parameters()).step()
        return local(out), whole(model.outer.bias)

    twin = seeded(Mlp)
    for out, bias in on_ranks(2, run):
        close(out, local(twin(random(2, 5))))
        close(bias, local(twin.outer.bias) - 0.1 * 2)


@pytest.mark.parametrize("assign", [False, True])
def test_a_full_state_dict_is_refused_with_key_and_helper(assign: bool) -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        before = whole(model.inner.weight)
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(Mlp().state_dict(), assign=assign)
        for word in ("inner.weight", "outer.bias", "set_model_state_dict", "full_state_dict"):
            assert word in str(caught.value)
        np.testing.assert_array_equal(whole(model.inner.weight), before)

    on_ranks(2, run)


def test_strict_reports_missing_and_unexpected_keys() -> None:
    def run(rank: int) -> None:
        model = fully_shard(seeded(Mlp))
        saved = dict(model.state_dict())
        saved["extra"] = saved.pop("outer.bias")
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(saved)
        assert 'Missing key(s) in state_dict: "outer.bias"' in str(caught.value)
        assert 'Unexpected key(s) in state_dict: "extra"' in str(caught.value)
        keys = model.load_state_dict(saved, strict=False)
        assert (keys.missing_keys, keys.unexpected_keys) == (["outer.bias"], ["extra"])

    on_ranks(2, run)


def test_optimizer_state_round_trip() -> None:
    def run(rank: int) -> Any:
        found = []
        for interrupted in (False, True):
            model = fully_shard(seeded(Mlp))
            optimizer = tp.optim.AdamW(model.parameters(), lr=0.01)
            for step in range(4):
                if interrupted and step == 2:
                    model_state = {n: v.clone() for n, v in model.state_dict().items()}
                    saved = optimizer.state_dict()
                    model = fully_shard(Mlp())
                    optimizer = tp.optim.AdamW(model.parameters(), lr=0.5)
                    model.load_state_dict(model_state)
                    optimizer.load_state_dict(saved)
                optimizer.zero_grad()
                mlp_loss(model, rank, step).backward()
                optimizer.step()
            found.append(whole(model.inner.weight))
        return found

    for straight, interrupted in on_ranks(3, run):
        np.testing.assert_array_equal(straight, interrupted)
