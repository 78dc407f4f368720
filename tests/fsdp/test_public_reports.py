"""What users of FSDP2 and of PyTorch-style code on JAX ran into (shared/public-reports.md).

Rows whose behaviour other files test in full are named there: A15 in test_closures.py, A41 in
test_contract.py, A42 in test_errors.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import (
    Job,
    Mlp,
    adamw,
    check_parity,
    close,
    ids,
    local,
    mlp_loss,
    on_ranks,
    own_slice,
    random,
    seeded,
    train_twin,
    whole,
)

import tensorplay as tp
import tensorplay.nn as nn
import tensorplay.nn.functional as F
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def test_a1_a_rank_without_rows_has_empty_gradients_and_optimizer_state() -> None:
    def make() -> Any:
        return nn.Linear(4, 4)

    def loss(model: Any, rank: int, step: int) -> Any:
        return model(random(3, 4, seed=10 * step + rank)).square().mean()

    def run(rank: int) -> Any:
        model = fully_shard(seeded(make))
        optimizer = adamw(model.parameters())
        for step in range(2):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        p = model.weight
        state = optimizer.state[p]
        saved = {n: v.clone() for n, v in model.state_dict().items()}
        with tp.no_grad():
            for q in model.parameters():
                q.fill_(0.0)
        model.load_state_dict(saved)
        shapes = [tuple(t.shape) for t in (p, p.grad, state["exp_avg"], state["exp_avg_sq"])]
        return shapes, tuple(p.global_shape), whole(p)

    twin = train_twin(Job(make, loss, optimizer=adamw, steps=2), 3)
    for rank, (shapes, full, weight) in enumerate(on_ranks(3, run)):
        assert shapes == [((2, 4), (2, 4), (0, 4))[rank]] * 4
        assert full == (4, 4)
        close(weight, twin.params["weight"], atol=1e-5)


def test_a1_one_row_over_two_ranks() -> None:
    check_parity(Job(lambda: nn.Linear(5, 1), mlp_loss, optimizer=adamw), 2)


@pytest.mark.parametrize("world", [2, 3])
def test_a2_a_tied_vocabulary_of_uneven_rows_is_trained_to_the_last_row(world: int) -> None:
    vocab = 2 * world + 1

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocab, 3)
            self.head = nn.Linear(3, vocab, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Any) -> Any:
            return self.head(self.embed(tokens))

    def loss(model: Any, rank: int, step: int) -> Any:
        tokens = tp.tensor([vocab - 1, rank, step])
        return F.cross_entropy(model(tokens), tokens)

    def shard(model: Any) -> Any:
        fully_shard([model.embed, model.head])
        return fully_shard(model)

    records = check_parity(Job(Tied, loss, shard), world)
    last = np.concatenate([r.params["embed.weight"] for r in records])[vocab - 1]
    assert np.abs(last - local(seeded(Tied).embed.weight)[vocab - 1]).max() > 0.01


def test_a8_the_root_stays_unsharded_by_default_and_reshards_when_told() -> None:
    def run(rank: int) -> Any:
        found = []
        for reshard in (None, True):
            model = seeded(Mlp)
            fully_shard(model.inner)
            fully_shard(model, reshard_after_forward=reshard)
            model(random(2, 5))
            found.append((tuple(model.inner.weight.shape), tuple(model.outer.weight.shape)))
        return found

    assert on_ranks(2, run)[0] == [((4, 5), (3, 7)), ((4, 5), (2, 7))]


@pytest.mark.parametrize("order", ["one_loss", "two_backwards"])
def test_a13_two_forwards_before_backward_in_nested_groups(order: str) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Any) -> Any:
            return self.b(tp.tanh(self.a(x)))

    def shard(model: Any) -> Any:
        fully_shard(model.a)
        fully_shard(model.b)
        return fully_shard(model)

    def drive(model: Any, rank: int) -> None:
        first, second = (model(random(2, 5, seed=10 * k + rank)).sum() for k in range(2))
        if order == "one_loss":
            (first * second).backward()
        else:
            first.backward()
            second.backward()

    def run(rank: int) -> Any:
        model = shard(seeded(Pair))
        drive(model, rank)
        return {n: whole(p.grad) for n, p in model.named_parameters()}

    grads = []
    for rank in range(2):
        twin = seeded(Pair)
        drive(twin, rank)
        grads.append({n: local(p.grad) for n, p in twin.named_parameters()})
    for found in on_ranks(2, run):
        for name, grad in found.items():
            close(grad, (grads[0][name] + grads[1][name]) / 2, name, atol=1e-5)


def test_a19_a_child_before_its_root_and_after() -> None:
    def run(rank: int) -> Any:
        early = seeded(Mlp)
        fully_shard(early.inner)
        fully_shard(early)
        early.inner(random(2, 5))
        with pytest.raises(RuntimeError, match="root"):
            early(random(2, 5))
        model = seeded(Mlp)
        fully_shard(model.inner)
        fully_shard(model)
        mlp_loss(model, rank, 0).backward()
        model.zero_grad()
        model.inner(random(2, 5)).sum().backward()
        return whole(model.inner.bias.grad)

    for grad in on_ranks(2, run):
        close(grad, np.full(7, 2.0))


def test_a22_one_failure_in_the_child_leaves_state_dict_sharded_and_a_retry_right() -> None:
    class Inner(nn.Linear):
        fail = True

        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            if self.fail:
                self.fail = False
                raise KeyError("once")
            return y

    class Net(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.inner.__class__ = Inner

    def run(rank: int) -> Any:
        model = seeded(Net)
        fully_shard(model.inner)
        fully_shard(model)
        with pytest.raises(KeyError, match="once"):
            mlp_loss(model, rank, 0)
        shapes = {n: tuple(v.shape) for n, v in model.state_dict().items()}
        mlp_loss(model, rank, 0).backward()
        return shapes, local(model.inner.weight.grad)

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    for rank, (shapes, grad) in enumerate(on_ranks(2, run)):
        assert shapes["inner.weight"] == (4 - rank, 5)
        close(grad, own_slice(twin.grads[0]["inner.weight"], 2, rank))


@pytest.mark.parametrize("context", [tp.no_grad, tp.inference_mode])
@pytest.mark.parametrize("nested", [False, True])
def test_a24_evaluation_first_then_training_has_all_gradients(context: Any, nested: bool) -> None:
    def run(rank: int) -> Any:
        model = seeded(Mlp)
        if nested:
            fully_shard(model.inner)
        fully_shard(model)
        with context():
            model.eval()
            model(random(2, 5))
        model.train()
        mlp_loss(model, rank, 0).backward()
        return {n: local(p.grad) for n, p in model.named_parameters()}

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    for rank, grads in enumerate(on_ranks(2, run)):
        for name, grad in grads.items():
            close(grad, own_slice(twin.grads[0][name], 2, rank), name)


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "AdamW"])
def test_a27_an_optimizer_made_while_the_root_is_unsharded_trains(optimizer: str) -> None:
    def make(params: Any) -> Any:
        return getattr(tp.optim, optimizer)(params, lr=0.05)

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        with tp.no_grad():
            model(random(2, 5))
        chosen = make(model.parameters())
        for step in range(2):
            chosen.zero_grad()
            mlp_loss(model, rank, step).backward()
            chosen.step()
        return {n: whole(p) for n, p in model.named_parameters()}

    twin = train_twin(Job(Mlp, mlp_loss, optimizer=make, steps=2), 2)
    for params in on_ranks(2, run):
        for name, param in params.items():
            close(param, twin.params[name], name, atol=1e-5)


def test_a27_gradients_are_seen_and_cleared_while_the_root_is_unsharded() -> None:
    """An evaluation between backward and step must not hide the gradients."""

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        mlp_loss(model, rank, 0).backward()
        with tp.no_grad():
            model(random(2, 5))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3).full_tensor().item()
        model.zero_grad()
        mlp_loss(model, rank, 0).backward()
        return norm, local(model.inner.weight.grad)

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    norm = np.sqrt(sum((g**2).sum() for g in twin.grads[0].values()))
    for rank, (found, grad) in enumerate(on_ranks(2, run)):
        close(found, norm)
        close(grad, own_slice(twin.grads[0]["inner.weight"], 2, rank))


def test_a28_accumulation_with_uneven_rows_reduces_once_at_the_end() -> None:
    def run(rank: int, sync: bool) -> Any:
        model = fully_shard(seeded(Mlp))
        for micro in range(3):
            model.set_requires_gradient_sync(sync or micro == 2)
            mlp_loss(model, rank, micro).backward()
            if micro < 2 and not sync:
                assert all(p.grad is None for p in model.parameters())
        return {n: local(p.grad) for n, p in model.named_parameters()}

    def loss(model: Any, rank: int, step: int) -> Any:
        return sum(mlp_loss(model, rank, micro) for micro in range(3))

    twin = train_twin(Job(Mlp, loss, steps=1), 2)
    for sync in (False, True):
        for rank, grads in enumerate(on_ranks(2, run, sync)):
            for name, grad in grads.items():
                close(grad, own_slice(twin.grads[0][name], 2, rank), name, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (2, 2)])
def test_a31_replicas_stay_equal_on_every_hybrid_mesh(shape: tuple[int, int]) -> None:
    def run(rank: int) -> Any:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = fully_shard(seeded(Mlp), mesh=mesh)
        mlp_loss(model, rank, 0).backward()
        return {n: local(p.grad) for n, p in model.named_parameters()}

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 4)
    for rank, grads in enumerate(on_ranks(4, run)):
        for name, grad in grads.items():
            close(grad, own_slice(twin.grads[0][name], shape[1], rank % shape[1]), name)


@pytest.mark.parametrize("hybrid", [False, True])
def test_a33_the_clipping_norm_is_the_one_process_value(hybrid: bool) -> None:
    def run(rank: int) -> Any:
        mesh = None
        if hybrid:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(seeded(Mlp), mesh=mesh)
        mlp_loss(model, rank, 0).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor().item()
        return norm, whole(model.inner.weight.grad)

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 4)
    norm = np.sqrt(sum((g**2).sum() for g in twin.grads[0].values()))
    for found, grad in on_ranks(4, run):
        close(found, norm)
        close(grad, twin.grads[0]["inner.weight"] * 0.01 / (norm + 1e-6))


def test_a37_which_inputs_are_cast() -> None:
    class Bag:
        def __init__(self, x: Any, n: Any) -> None:
            self.x, self.n, self.label = x, n, "label"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Any, bag: Any, *, extra: Any) -> Any:
            return self.linear(x), (x, bag.x, bag.n, extra["h"])

    model = fully_shard(Net(), mp_policy=MixedPrecisionPolicy(param_dtype=tp.bfloat16))
    bag = Bag(tp.ones(2), tp.tensor([1]))
    y, seen = model(tp.ones(2, 3), bag, extra={"h": tp.ones(2, dtype=tp.float16)})
    low = tp.bfloat16
    assert y.dtype == low
    assert [t.dtype for t in seen] == [low, low, tp.int64, low]
    assert bag.x.dtype == tp.float32
    assert model.linear.weight.dtype in (low, tp.float32)
    y.float().sum().backward()
    assert model.linear.weight.dtype == model.linear.weight.grad.dtype == tp.float32


def test_a45_edits_of_gathered_weights_are_lost_and_of_shards_are_seen() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        x = random(2, 5)
        handle = model.unshard(async_op=True)
        early = tuple(model.outer.bias.shape)
        handle.wait()
        with tp.no_grad():
            model.outer.bias.fill_(100.0)
        model.reshard()
        lost = local(model(x))
        model.reshard()
        with tp.no_grad():
            model.outer.bias.add_(1.0)
        return early, lost, local(model(x))

    wanted = local(seeded(Mlp)(random(2, 5)))
    for rank, (early, lost, seen) in enumerate(on_ranks(2, run)):
        assert early == (2 - rank,)
        close(lost, wanted)
        close(seen, wanted + 1.0)


def test_j7_initial_weights_do_not_depend_on_the_number_of_ranks_but_dropout_does() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Any) -> Any:
            return self.drop(self.linear(x) * 0 + 1)

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Net))
        weight = whole(model.linear.weight)
        return weight, local(model(tp.ones(6, 4)))

    start = local(seeded(Net).linear.weight)
    for world in (1, 2, 4):
        found = on_ranks(world, run)
        for weight, _ in found:
            np.testing.assert_array_equal(weight, start)
        assert len({mask.tobytes() for _, mask in found}) == world


def test_ids_of_tokens_stay_exact() -> None:
    """int64 token ids beyond 2**24 would not survive a cast to float32."""

    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, tokens: Any) -> Any:
            return tokens + 1, self.linear(tp.ones(1, 2, dtype=self.linear.weight.dtype))

    model = fully_shard(Echo(), mp_policy=MixedPrecisionPolicy(param_dtype=tp.bfloat16))
    tokens = ids(10, 3) + 2**40
    out, _ = model(tokens)
    assert out.dtype == tp.int64
    assert out.tolist() == [t + 1 for t in tokens.tolist()]
