"""Training with fully_shard next to the unsharded twin: the same weights, data and numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    Job,
    Lm,
    Mlp,
    MlpLoss,
    adamw,
    check_parity,
    close,
    compare,
    ids,
    lm_loss,
    local,
    mlp_loss,
    on_ranks,
    own_loss,
    own_slice,
    random,
    seeded,
    sgd,
    shard_nested,
    train_rank,
    train_twin,
    whole,
)

import tensorplay as tp
import tensorplay.nn as nn
import tensorplay.nn.functional as F
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# --- world sizes, shapes, optimizers --------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_nested_groups_over_world_sizes(world: int, optimizer: Any) -> None:
    check_parity(Job(Lm, lm_loss, shard_nested, optimizer), world)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_one_group_whose_dims_do_not_divide(world: int) -> None:
    check_parity(Job(Mlp, mlp_loss), world)


@pytest.mark.parametrize("world", [5, 8])
def test_larger_worlds(world: int) -> None:
    check_parity(Job(MlpLoss, own_loss), world)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_ranks_without_rows(optimizer: Any) -> None:
    """3 rows over 4 ranks: the last has none; 1 row: only the first has one."""

    def make() -> Any:
        return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))

    records = check_parity(Job(make, mlp_loss, optimizer=optimizer), 4)
    assert [r.params["0.weight"].shape for r in records] == [(1, 5)] * 3 + [(0, 5)]
    assert [r.params["2.bias"].shape for r in records] == [(1,)] + [(0,)] * 3
    assert records[3].grads[0]["2.weight"].shape == (0, 3)


def test_children_sharded_without_the_root_having_parameters() -> None:
    def make() -> Any:
        return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))

    def shard(model: Any) -> Any:
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    check_parity(Job(make, mlp_loss, shard), 2)


def test_three_levels_of_nesting() -> None:
    def shard(model: Any) -> Any:
        for block in model.blocks:
            fully_shard(block.up)
            fully_shard(block)
        return fully_shard(model)

    check_parity(Job(Lm, lm_loss, shard), 2)


def test_only_children_are_sharded_and_the_root_is_plain() -> None:
    """The plain root's own parameters get each rank's own gradient."""

    def shard(model: Any) -> Any:
        for block in model.blocks:
            fully_shard(block)

    plain = ("embed.weight", "head.weight", "head.bias")
    twin = train_twin(Job(Lm, lm_loss, steps=1), 2)
    records = on_ranks(2, train_rank, Job(Lm, lm_loss, shard, steps=1))
    for rank, record in enumerate(records):
        compare(record, twin, 2, rank, plain)
    mean = (records[0].grads[0]["head.weight"] + records[1].grads[0]["head.weight"]) / 2
    close(mean, twin.grads[0]["head.weight"])


def test_a_list_of_modules_is_one_group() -> None:
    def shard(model: Any) -> Any:
        fully_shard([model.embed, model.head])
        return fully_shard(model)

    check_parity(Job(Lm, lm_loss, shard), 3)


def test_shard_placement_fn_cuts_dim_1() -> None:
    def place(param: Any) -> Any:
        from tensorplay.distributed._placements import Shard

        return Shard(1) if param.dim() == 2 else None

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp), shard_placement_fn=place)
        mlp_loss(model, rank, 0).backward()
        return {n: (local(p), local(p.grad), whole(p)) for n, p in model.named_parameters()}

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    start = {n: local(p) for n, p in seeded(Mlp).named_parameters()}
    for rank, found in enumerate(on_ranks(2, run)):
        for name, (param, grad, full) in found.items():
            dim = 1 if name.endswith("weight") else 0
            close(param, own_slice(start[name], 2, rank, dim))
            close(grad, own_slice(twin.grads[0][name], 2, rank, dim))
            close(full, start[name])


@pytest.mark.parametrize("reshard", [True, False, None])
def test_reshard_after_forward(reshard: bool | None) -> None:
    def run(rank: int) -> Any:
        model = seeded(Lm)
        shard_nested(model, reshard_after_forward=reshard)
        loss = lm_loss(model, rank, 0)
        after_forward = (model.blocks[0].up.weight.shape[0], model.head.weight.shape[0])
        loss.backward()
        after_backward = (model.blocks[0].up.weight.shape[0], model.head.weight.shape[0])
        return after_forward, after_backward, local(model.blocks[0].up.weight.grad)

    twin = train_twin(Job(Lm, lm_loss, steps=1), 2)
    for rank, (after_forward, after_backward, grad) in enumerate(on_ranks(2, run)):
        rows = (6 - rank, 6 - rank)
        wanted = {True: rows, False: (11, 11), None: (rows[0], 11)}
        assert after_forward == wanted[reshard]
        assert after_backward == rows
        close(grad, own_slice(twin.grads[0]["blocks.0.up.weight"], 2, rank))


def test_set_reshard_after_forward_changes_what_stays() -> None:
    def shard(model: Any) -> Any:
        shard_nested(model)
        model.set_reshard_after_forward(True)
        model.blocks[0].set_reshard_after_forward(False)
        return model

    def run(rank: int) -> Any:
        model = shard(seeded(Lm))
        lm_loss(model, rank, 0)
        return [
            model.head.weight.shape[0],
            model.blocks[0].up.weight.shape[0],
            model.blocks[1].up.weight.shape[0],
        ]

    assert on_ranks(2, run) == [[6, 11, 6], [5, 11, 5]]
    check_parity(Job(Lm, lm_loss, shard, steps=2), 2)


def test_sharding_over_a_part_of_the_world() -> None:
    """Ranks 0 and 1 form one job, 2 and 3 another: gradients are averaged inside a pair."""

    def run(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "data"))["data"]
        model = fully_shard(seeded(Mlp), mesh=mesh)
        mlp_loss(model, rank, 0).backward()
        return whole(model.inner.weight.grad)

    found = on_ranks(4, run)
    grads = []
    for rank in range(4):
        model = seeded(Mlp)
        mlp_loss(model, rank, 0).backward()
        grads.append(local(model.inner.weight.grad))
    for rank in range(4):
        pair = rank // 2 * 2
        close(found[rank], (grads[pair] + grads[pair + 1]) / 2)


def test_replicate_and_shard_over_a_two_dim_mesh() -> None:
    def shard(model: Any) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return fully_shard(model, mesh=mesh)

    twin = train_twin(Job(Mlp, mlp_loss), 4)
    for rank, record in enumerate(on_ranks(4, train_rank, Job(Mlp, mlp_loss, shard))):
        close(record.losses, [each[rank] for each in twin.losses])
        for name, param in record.params.items():
            close(param, own_slice(twin.params[name], 2, rank % 2), name, atol=1e-5)


# --- PyTorch's own numbers ------------------------------------------------------------------------


def test_numbers_that_pytorch_computed_on_two_processes() -> None:
    """Recorded by record_torch.py: fully_shard over gloo, uneven rows, AdamW, clipping."""
    recorded = json.loads((Path(__file__).parent / "torch_values.json").read_text())

    def run(rank: int) -> Any:
        model = Mlp()
        model.load_state_dict({n: tp.tensor(v) for n, v in recorded["start"].items()})
        fully_shard(model.inner)
        fully_shard(model)
        optimizer = tp.optim.AdamW(model.parameters(), lr=0.05)
        steps = []
        for step in range(5):
            optimizer.zero_grad()
            loss = mlp_loss(model, rank, step)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            grads = {n: whole(p.grad) for n, p in model.named_parameters()}
            optimizer.step()
            steps.append((loss.item(), norm.full_tensor().item(), grads))
        return steps, {n: whole(p) for n, p in model.named_parameters()}

    for rank, (steps, params) in enumerate(on_ranks(2, run)):
        for (loss, norm, grads), wanted in zip(steps, recorded["steps"][rank], strict=True):
            close([loss, norm], [wanted["loss"], wanted["norm"]])
            for name, grad in grads.items():
                close(grad, wanted["grads"][name], name)
        for name, param in params.items():
            close(param, recorded["params"][name], name, atol=1e-5)


# --- parameters -----------------------------------------------------------------------------------


class Tied(nn.Module):
    """Embedding and output projection share their weight."""

    def __init__(self, vocab: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        return self.head(tp.tanh(self.middle(self.embed(tokens))))


def tied_loss(model: Any, rank: int, step: int) -> Any:
    tokens = ids(7, 6, seed=100 * step + rank)
    return F.cross_entropy(model(tokens), tokens)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_tied_weights_in_one_group(world: int, as_list: bool) -> None:
    def shard(model: Any) -> Any:
        fully_shard(model.middle)
        if as_list:
            fully_shard([model.embed, model.head])
        fully_shard(model)
        assert model.head.weight is model.embed.weight
        assert len(list(model.parameters())) == 3
        assert {"embed.weight", "head.weight"} <= set(model.state_dict())
        return model

    check_parity(Job(Tied, tied_loss, shard), world)


def test_tied_weights_stay_tied_after_training() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Tied))
        tied_loss(model, rank, 0).backward()
        sgd(model.parameters()).step()
        state = model.state_dict()
        return (
            model.head.weight is model.embed.weight,
            local(state["embed.weight"]),
            local(state["head.weight"]),
        )

    for same, embed, head in on_ranks(2, run):
        assert same
        close(embed, head, rtol=0, atol=0)


def test_frozen_parameters_keep_grad_none() -> None:
    def make() -> Any:
        model = Lm()
        model.embed.requires_grad_(False)
        model.blocks[0].up.weight.requires_grad_(False)
        return model

    def optimizer(params: Any) -> Any:
        return sgd([p for p in params if p.requires_grad])

    records = check_parity(Job(make, lm_loss, shard_nested, optimizer), 2)
    assert records[0].grads[0]["embed.weight"] is None
    assert records[0].grads[0]["blocks.0.up.weight"] is None
    assert records[0].grads[0]["blocks.0.up.bias"] is not None


def test_a_wholly_frozen_group_between_trained_ones() -> None:
    def make() -> Any:
        model = Lm()
        model.blocks[1].requires_grad_(False)
        return model

    check_parity(Job(make, lm_loss, shard_nested), 2)


class Unused(Mlp):
    """Has a layer that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)


def test_unused_parameters_keep_grad_none() -> None:
    def shard(model: Any) -> Any:
        fully_shard(model.spare)
        return fully_shard(model)

    for apply in (fully_shard, shard):
        records = check_parity(Job(Unused, mlp_loss, apply, adamw), 2)
        assert records[0].grads[4]["spare.weight"] is None
        start = seeded(Unused).spare.weight
        close(records[1].params["spare.weight"], own_slice(start.detach().numpy(), 2, 1), rtol=0)


def test_ignored_parameters_stay_whole_with_their_own_gradients() -> None:
    def make() -> Any:
        model = Mlp()
        model.scale = nn.Parameter(tp.tensor(1.5))
        return model

    def loss(model: Any, rank: int, step: int) -> Any:
        return (model(random(4, 5, seed=rank)) * 1.0).square().mean() * model.scale

    class Scaled(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(tp.tensor(1.5))

        def forward(self, x: Any) -> Any:
            return super().forward(x) * self.scale

    def shard(model: Any) -> Any:
        return fully_shard(model, ignored_params={model.scale, model.outer.bias})

    job = Job(Scaled, mlp_loss, shard, steps=1)
    records = on_ranks(2, train_rank, job)
    alone = [train_twin(Job(Scaled, lambda m, r, s, k=k: mlp_loss(m, k, s), steps=1), 1)
             for k in range(2)]  # fmt: skip
    twin = train_twin(Job(Scaled, mlp_loss, steps=1), 2)
    for rank, record in enumerate(records):
        compare(record, twin, 2, rank, ("scale", "outer.bias"))
        close(record.grads[0]["scale"], alone[rank].grads[0]["scale"])
        close(record.grads[0]["outer.bias"], alone[rank].grads[0]["outer.bias"])


def test_weights_differ_between_ranks_only_by_their_rows() -> None:
    """Initial values do not depend on the number of ranks."""

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Lm))
        return {n: whole(p) for n, p in model.named_parameters()}

    start = {n: local(p) for n, p in seeded(Lm).named_parameters()}
    for world in (1, 2, 4):
        for found in on_ranks(world, run):
            for name, value in found.items():
                np.testing.assert_array_equal(value, start[name])


# --- how often and in what order things are called ------------------------------------------------


def test_several_forwards_before_one_backward() -> None:
    def loss(model: Any, rank: int, step: int) -> Any:
        first, second = (lm_loss(model, rank, 10 * step + k) for k in range(2))
        return first * second

    check_parity(Job(Lm, loss, shard_nested, steps=3), 2)


def test_several_forwards_then_their_backwards_accumulate() -> None:
    def run(rank: int) -> Any:
        model = shard_nested(seeded(Lm))
        losses = [lm_loss(model, rank, step) for step in range(2)]
        losses[1].backward()
        losses[0].backward()
        return {n: local(p.grad) for n, p in model.named_parameters()}

    def loss(model: Any, rank: int, step: int) -> Any:
        return lm_loss(model, rank, 0) + lm_loss(model, rank, 1)

    twin = train_twin(Job(Lm, loss, steps=1), 2)
    for rank, grads in enumerate(on_ranks(2, run)):
        for name, grad in grads.items():
            close(grad, own_slice(twin.grads[0][name], 2, rank), name)


class Twice(nn.Module):
    """Calls the same submodule twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Any) -> Any:
        return self.layer(tp.tanh(self.layer(x)))


@pytest.mark.parametrize("own_group", [False, True])
def test_a_shared_module_called_twice(own_group: bool) -> None:
    def shard(model: Any) -> Any:
        if own_group:
            fully_shard(model.layer)
        return fully_shard(model)

    check_parity(Job(Twice, mlp_loss, shard, steps=3), 2)


@pytest.mark.parametrize("context", [tp.no_grad, tp.inference_mode])
def test_evaluation_then_training(context: Any) -> None:
    def loss(model: Any, rank: int, step: int) -> Any:
        model.eval()
        with context():
            out = model(ids(11, 2, 4, seed=77))
        assert not out.requires_grad
        model.train()
        return lm_loss(model, rank, step)

    check_parity(Job(Lm, loss, shard_nested, steps=3), 2)


def test_accumulation_without_sync() -> None:
    """Three micro-batches; only the last one's backward reduces."""

    def run(rank: int) -> Any:
        model = shard_nested(seeded(Lm))
        optimizer = sgd(model.parameters())
        early = []
        for step in range(2):
            optimizer.zero_grad()
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                lm_loss(model, rank, 10 * step + micro).backward()
                if micro < 2:
                    early += [p.grad for p in model.parameters()]
            optimizer.step()
        grads = {n: local(p.grad) for n, p in model.named_parameters()}
        return early, grads, {n: local(p) for n, p in model.named_parameters()}

    def loss(model: Any, rank: int, step: int) -> Any:
        return sum(lm_loss(model, rank, 10 * step + micro) for micro in range(3))

    twin = train_twin(Job(Lm, loss, steps=2), 3)
    for rank, (early, grads, params) in enumerate(on_ranks(3, run)):
        assert all(grad is None for grad in early)
        for name in grads:
            close(grads[name], own_slice(twin.grads[1][name], 3, rank), name)
            close(params[name], own_slice(twin.params[name], 3, rank), name, atol=1e-5)


def test_accumulation_with_sync_adds_up() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        for _ in range(2):
            mlp_loss(model, rank, 0).backward()
        return local(model.inner.weight.grad)

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    for rank, grad in enumerate(on_ranks(2, run)):
        close(grad, 2 * own_slice(twin.grads[0]["inner.weight"], 2, rank))


def test_gradient_divide_factor_replaces_the_number_of_ranks() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        model.set_gradient_divide_factor(1.0)
        mlp_loss(model, rank, 0).backward()
        return local(model.inner.weight.grad)

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    for rank, grad in enumerate(on_ranks(2, run)):
        close(grad, 2 * own_slice(twin.grads[0]["inner.weight"], 2, rank))


@pytest.mark.parametrize("kind", [2.0, 1.0, float("inf")])
def test_clip_grad_norm(kind: float) -> None:
    norms: list[Any] = []

    def clip(model: Any) -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=kind)
        norms.append(round(float(norm.full_tensor().item()), 6))

    check_parity(Job(Lm, lm_loss, shard_nested, steps=2, before_step=clip), 3)
    first = norms[0], norms[1]  # the twin's
    assert len(norms) == 2 * 4
    for step in range(2):
        ranks = sorted(norms[2:])
        assert any(abs(n - first[step]) < 1e-5 * max(1, first[step]) for n in ranks)
    assert len(set(norms)) <= 4


def test_gradients_flow_to_inputs() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        leaf = random(4, 5, seed=rank).requires_grad_()
        mask = random(4, 5, seed=9)
        model(leaf * mask).square().sum().backward()
        return local(leaf.grad)

    for rank, grad in enumerate(on_ranks(2, run)):
        leaf = random(4, 5, seed=rank).requires_grad_()
        seeded(Mlp)(leaf * random(4, 5, seed=9)).square().sum().backward()
        close(grad, local(leaf.grad))


def test_backward_twice_with_retain_graph() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        loss = mlp_loss(model, rank, 0)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return local(model.inner.weight.grad)

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    for rank, grad in enumerate(on_ranks(2, run)):
        close(grad, 2 * own_slice(twin.grads[0]["inner.weight"], 2, rank))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 4)
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        h = tp.tanh(self.trunk(x))
        return self.left(h), self.right(h)


def test_an_output_that_the_loss_does_not_use() -> None:
    def loss(model: Any, rank: int, step: int) -> Any:
        return model(random(4, 5, seed=100 * step + rank))[step % 2].square().mean()

    records = check_parity(Job(TwoHeads, loss, steps=3), 2)
    assert records[0].grads[0]["right.weight"] is None
    assert records[0].grads[1]["left.weight"] is None


# --- buffers and randomness -----------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Any) -> Any:
        return self.norm(self.linear(x))


def test_batch_norm_buffers_follow_each_ranks_own_data() -> None:
    def train(model: Any, rank: int) -> dict[str, Any]:
        for step in range(3):
            model(random(6, 5, seed=10 * step + rank)).square().mean().backward()
        return {n: np.array(b.numpy()) for n, b in model.named_buffers()}

    for rank, found in enumerate(on_ranks(2, lambda r: train(fully_shard(seeded(Normed)), r))):
        wanted = train(seeded(Normed), rank)
        assert found["norm.num_batches_tracked"] == 3
        for name in wanted:
            close(found[name], wanted[name], name)


def test_batch_norm_in_evaluation_uses_its_buffers() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Normed))
        model(random(6, 5, seed=1))
        model.eval()
        before = {n: np.array(b.numpy()) for n, b in model.named_buffers()}
        out = local(model(random(2, 5, seed=2)))
        after = {n: np.array(b.numpy()) for n, b in model.named_buffers()}
        return out, before, after

    twin = seeded(Normed)
    twin(random(6, 5, seed=1))
    wanted = twin.eval()(random(2, 5, seed=2))
    for out, before, after in on_ranks(2, run):
        close(out, local(wanted))
        for name in before:
            np.testing.assert_array_equal(before[name], after[name])


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.drop(self.linear(x) * 0 + 1)


def test_dropout_masks_change_from_call_to_call_and_between_ranks() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Dropped))
        x = tp.ones(20, 5)
        out = [local(model(x)) for _ in range(3)]
        model.eval()
        return [*out, local(model(x))]

    found = on_ranks(2, run)
    masks = [mask.tobytes() for masks in found for mask in masks[:3]]
    assert len(set(masks)) == 6
    for outputs in found:
        for mask in outputs[:3]:
            assert set(np.unique(mask)) == {0.0, 2.0}
            assert 0.3 < (mask == 0).mean() < 0.7
        close(outputs[3], np.ones((20, 5)))


def test_dropout_repeats_after_the_same_seed_and_backward_uses_its_mask() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Dropped))
        found = []
        for _ in range(2):
            tp.manual_seed(5)
            x = tp.ones(8, 5).requires_grad_()
            model.linear.weight.grad = None
            out = model.drop(model(x))
            found.append(local(out))
        return found

    for first, second in on_ranks(2, run):
        np.testing.assert_array_equal(first, second)


def test_dropout_gradients_match_the_mask_of_the_forward() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 6)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Any) -> Any:
            return self.drop(self.linear(x))

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Net))
        x = random(4, 3, seed=rank)
        out = model(x)
        out.sum().backward()
        mask = (local(out) != 0) * 2.0
        return mask.T @ local(x), whole(model.linear.weight.grad)

    found = on_ranks(2, run)
    wanted = (found[0][0] + found[1][0]) / 2
    for _, grad in found:
        close(grad, wanted)


# --- unshard, reshard, edits ----------------------------------------------------------------------


def test_explicit_unshard_and_reshard() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        sharded = model.inner.weight
        assert model.unshard() is None
        assert model.inner.weight is not sharded
        full = local(model.inner.weight)
        model.reshard()
        assert model.inner.weight is sharded
        model.unshard()
        mlp_loss(model, rank, 0).backward()
        return full, local(model.inner.weight.grad), model.inner.weight is sharded

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    start = local(seeded(Mlp).inner.weight)
    for rank, (full, grad, back) in enumerate(on_ranks(2, run)):
        close(full, start, rtol=0, atol=0)
        close(grad, own_slice(twin.grads[0]["inner.weight"], 2, rank))
        assert back


def test_unshard_handle_shows_the_whole_at_wait() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        handle = model.unshard(async_op=True)
        before = tuple(model.inner.weight.shape)
        handle.wait()
        after = tuple(model.inner.weight.shape)
        handle.wait()
        model.reshard()
        return before, after, tuple(model.inner.weight.shape)

    assert on_ranks(2, run) == [((4, 5), (7, 5), (4, 5)), ((3, 5), (7, 5), (3, 5))]


def test_an_edit_of_the_sharded_weight_is_seen_by_the_next_forward() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        x = random(2, 5)
        model(x)
        with tp.no_grad():
            model.outer.weight.mul_(2.0)
            model.outer.bias.zero_()
        return local(model(x))

    twin = seeded(Mlp)
    with tp.no_grad():
        twin.outer.weight.mul_(2.0)
        twin.outer.bias.zero_()
    for out in on_ranks(2, run):
        close(out, local(twin(random(2, 5))))


def test_an_edit_of_the_unsharded_weight_is_lost_at_reshard() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        x = random(2, 5)
        model.unshard()
        with tp.no_grad():
            model.outer.weight.zero_()
            model.outer.bias.fill_(3.0)
        edited = local(model(x))
        model.reshard()
        return edited, local(model(x))

    wanted = local(seeded(Mlp)(random(2, 5)))
    for edited, after in on_ranks(2, run):
        close(edited, np.full((2, 3), 3.0))
        close(after, wanted)


def test_a_step_after_an_evaluation_that_left_the_root_unsharded() -> None:
    """The optimizer's step changes shards while the root shows its wholes."""

    def loss(model: Any, rank: int, step: int) -> Any:
        return mlp_loss(model, rank, step)

    def evaluate(model: Any) -> None:
        with tp.no_grad():
            model(random(1, 5))

    check_parity(Job(Mlp, loss, before_step=evaluate, steps=3), 2)


def test_parameters_collected_while_unsharded_are_trained() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        with tp.no_grad():
            model(random(1, 5))
        optimizer = sgd(model.parameters())
        mlp_loss(model, rank, 0).backward()
        optimizer.step()
        return whole(model.inner.weight)

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    for found in on_ranks(2, run):
        close(found, twin.params["inner.weight"])


# --- mixed precision ------------------------------------------------------------------------------


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32_shards() -> None:
    policy = MixedPrecisionPolicy(param_dtype=tp.bfloat16, reduce_dtype=tp.float32)

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp), mp_policy=policy)
        out = model(random(4, 5, seed=rank))
        (out.float() ** 2).mean().backward()
        p = model.inner.weight
        return out.dtype, p.dtype, p.grad.dtype, local(p.grad)

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    for rank, (out, param, grad_dtype, grad) in enumerate(on_ranks(2, run)):
        assert (out, param, grad_dtype) == (tp.bfloat16, tp.float32, tp.float32)
        wanted = own_slice(twin.grads[0]["inner.weight"], 2, rank)
        close(grad, wanted, rtol=0.05, atol=0.02)
        assert np.abs(grad - wanted).max() > 0


def test_mixed_precision_casts_inputs_and_outputs() -> None:
    class Reports(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("shift", tp.zeros(3))

        def forward(self, x: Any, *, scale: Any, index: Any, name: Any, nothing: Any) -> Any:
            assert (name, nothing) == ("name", None)
            seen.append((x.dtype, scale.dtype, index.dtype, self.shift.dtype))
            return self.linear(x) * scale

    seen: list[Any] = []

    def run(rank: int, policy: Any) -> Any:
        model = fully_shard(seeded(Reports), mp_policy=policy)
        return model(
            tp.ones(2, 3), scale=tp.ones(3), index=tp.tensor([1]), name="name", nothing=None
        ).dtype

    low, full = tp.bfloat16, tp.float32
    assert run(0, MixedPrecisionPolicy(param_dtype=low)) == low
    assert run(0, MixedPrecisionPolicy(param_dtype=low, output_dtype=full)) == full
    assert seen and set(seen) == {(low, low, tp.int64, full)}
    del seen[:]
    policy = MixedPrecisionPolicy(param_dtype=low, cast_forward_inputs=False)
    with pytest.raises(RuntimeError, match="dtype"):
        run(0, policy)
    assert seen[0] == (full, full, tp.int64, full)


def test_reduce_dtype_is_the_dtype_of_the_reduction() -> None:
    """1 + 2**-9 is no bfloat16 number: a bfloat16 reduction rounds it away."""

    def run(rank: int, dtype: Any) -> Any:
        model = nn.Linear(1, 2, bias=False)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        model(tp.tensor([[1 + 2.0**-9]])).sum().backward()
        return whole(model.weight.grad)

    assert set(on_ranks(2, run, None)[0].flat) == {1 + 2.0**-9}
    assert set(on_ranks(2, run, tp.bfloat16)[0].flat) == {1.0}


# --- dtypes ---------------------------------------------------------------------------------------


def test_float64_model() -> None:
    def loss(model: Any, rank: int, step: int) -> Any:
        return model(random(4, 5, seed=100 * step + rank).double()).square().mean()

    records = check_parity(Job(lambda: Mlp().double(), loss, steps=3), 3)
    assert records[0].params["inner.weight"].dtype == np.float64


def test_casting_a_sharded_model() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        model(random(4, 5))
        model.double()
        out = model(random(4, 5).double())
        out.square().mean().backward()
        return out.dtype, local(model.inner.weight.grad)

    twin = seeded(Mlp).double()
    twin(random(4, 5).double()).square().mean().backward()
    for rank, (dtype, grad) in enumerate(on_ranks(2, run)):
        assert dtype == tp.float64 and grad.dtype == np.float64
        close(grad, own_slice(local(twin.inner.weight.grad), 2, rank))


def test_a_frozen_integer_parameter_keeps_its_dtype() -> None:
    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 4)
            self.order = nn.Parameter(tp.tensor([2, 0, 3]), requires_grad=False)

        def forward(self, x: Any) -> Any:
            return self.linear(x)[:, self.order]

    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=tp.bfloat16)):

        def run(rank: int, policy: Any = policy) -> Any:
            model = fully_shard(seeded(Indexed), mp_policy=policy)
            out = model(random(2, 5)).float()
            out.sum().backward()
            return local(out), model.order.dtype, whole(model.order)

        wanted = local(seeded(Indexed)(random(2, 5)))
        for out, dtype, order in on_ranks(2, run):
            assert dtype == tp.int64 and order.tolist() == [2, 0, 3]
            close(out, wanted, rtol=0.02, atol=0.02)
