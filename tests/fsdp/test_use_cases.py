"""How training scripts use sharded models: several models, eager roots, averages of weights, ..."""

from __future__ import annotations

import cProfile
import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import (
    Block,
    Job,
    Lm,
    Mlp,
    adamw,
    check_parity,
    close,
    compare,
    ids,
    lm_loss,
    local,
    mlp_loss,
    no_warnings,
    on_ranks,
    own_slice,
    random,
    seeded,
    sgd,
    shard_nested,
    traces,
    train_rank,
    train_twin,
    whole,
)

import tensorplay as tp
import tensorplay.nn as nn
import tensorplay.nn.functional as F
from tensorplay.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# --- roots that run eagerly -----------------------------------------------------------------------


class EagerLm(Lm):
    """Reads a value, so that its own Python runs at every call; its blocks compile."""

    def forward(self, tokens: Any, with_loss: bool = False) -> Any:
        assert float(tokens.max()) < 11
        return super().forward(tokens, with_loss)


class EagerBlock(Block):
    def forward(self, x: Any) -> Any:
        assert math.isfinite(x.sum().item())
        return super().forward(x)


class EagerLmOfEagerBlocks(EagerLm):
    """No part of it compiles."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__ = EagerBlock


def quietly(fn: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn()


@pytest.mark.parametrize(
    ("make", "reshard"),
    [(EagerLm, None), (EagerLmOfEagerBlocks, True), (EagerLmOfEagerBlocks, False)],
)
def test_eager_roots_train_as_the_twin(make: Any, reshard: bool | None) -> None:
    def shard(model: Any) -> Any:
        return shard_nested(model, reshard_after_forward=reshard)

    quietly(lambda: check_parity(Job(make, lm_loss, shard, steps=2), 2))


def test_eager_roots_with_frozen_unused_and_tied_parameters() -> None:
    class Net(EagerLmOfEagerBlocks):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(3, 3)
            self.head.weight = self.embed.weight
            self.blocks[0].requires_grad_(False)
            self.blocks[1].up.bias.requires_grad_(False)

    quietly(lambda: check_parity(Job(Net, lm_loss, shard_nested, steps=2), 2))


@pytest.mark.parametrize("make", [EagerLm, EagerLmOfEagerBlocks])
def test_eager_roots_with_several_forwards_before_a_backward(make: Any) -> None:
    def loss(model: Any, rank: int, step: int) -> Any:
        return lm_loss(model, rank, 2 * step) * lm_loss(model, rank, 2 * step + 1)

    quietly(lambda: check_parity(Job(make, loss, shard_nested, steps=2), 2))


@pytest.mark.parametrize("make", [EagerLm, EagerLmOfEagerBlocks])
def test_eager_roots_accumulate_without_sync(make: Any) -> None:
    def run(rank: int) -> Any:
        model = shard_nested(seeded(make))
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            lm_loss(model, rank, micro).backward()
            if micro < 2:
                assert all(p.grad is None for p in model.parameters())
        return {n: local(p.grad) for n, p in model.named_parameters()}

    def loss(model: Any, rank: int, step: int) -> Any:
        return sum(lm_loss(model, rank, micro) for micro in range(3))

    twin = train_twin(Job(Lm, loss, steps=1), 2)
    for rank, grads in enumerate(quietly(lambda: on_ranks(2, run))):
        for name, grad in grads.items():
            close(grad, own_slice(twin.grads[0][name], 2, rank), name)


def test_an_eager_root_in_mixed_precision_equals_the_compiled_one() -> None:
    policy = MixedPrecisionPolicy(tp.bfloat16, tp.float32)

    def run(rank: int, make: Any) -> Any:
        model = shard_nested(seeded(make), mp_policy=policy)
        loss = lm_loss(model, rank, 0)
        loss.backward()
        return loss.item(), {n: local(p.grad) for n, p in model.named_parameters()}

    compiled = on_ranks(2, run, Lm)
    for make in (EagerLm, EagerLmOfEagerBlocks):
        eager = quietly(lambda make=make: on_ranks(2, run, make))
        for (a, grads_a), (b, grads_b) in zip(compiled, eager, strict=True):
            close(a, b, rtol=0.02)
            for name in grads_a:
                assert grads_a[name].dtype == grads_b[name].dtype == np.float32
                close(grads_a[name], grads_b[name], name, rtol=0.1, atol=0.01)


def test_dropout_in_an_eager_root_equals_the_plain_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Any) -> Any:
            assert float(x.sum()) > -1e9
            return self.drop(self.inner(self.drop(x)))

    def drive(model: Any) -> Any:
        tp.manual_seed(7)
        return [local(model(random(4, 3))) for _ in range(2)] + [local(tp.rand(2))]

    model = seeded(Net)
    fully_shard(model.inner)
    fully_shard(model)
    for got, wanted in zip(quietly(lambda: drive(model)), drive(seeded(Net)), strict=True):
        close(got, wanted)


# --- several models -------------------------------------------------------------------------------


def test_two_roots_in_a_row_as_in_adversarial_training() -> None:
    """Generator and discriminator: each frozen while the other trains."""

    def build(sharded: bool) -> Any:
        tp.manual_seed(0)
        models = nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        return [fully_shard(m) if sharded else m for m in models]

    def train(rank: int, sharded: bool, world: int = 1) -> Any:
        generator, critic = build(sharded)
        optimizers = sgd(generator.parameters()), sgd(critic.parameters())
        ranks = [rank] if sharded else range(world)
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            critic.requires_grad_(False)
            sum(
                critic(generator(random(3, 4, seed=10 * step + r))).mean() / len(ranks)
                for r in ranks
            ).backward()  # type: ignore[union-attr]
            assert all(p.grad is None for p in critic.parameters())
            optimizers[0].step()
            critic.requires_grad_(True)
            for r in ranks:
                fake = generator(random(3, 4, seed=10 * step + r)).detach()
                real = random(3, 5, seed=99 + r)
                ((critic(fake) - critic(real)).mean() / len(ranks)).backward()
            optimizers[1].step()
        return [whole(p) for m in (generator, critic) for p in m.parameters()]

    wanted = train(0, False, 2)
    for found in on_ranks(2, train, True):
        for got, value in zip(found, wanted, strict=True):
            close(got, value, atol=1e-5)


def test_a_teacher_outside_the_module_tree() -> None:
    class Student(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = [Mlp()]

        def forward(self, x: Any) -> Any:
            with tp.no_grad():
                target = self.teacher[0](x)
            return super().forward(x) - target

    def run(rank: int) -> Any:
        model = seeded(Student)
        fully_shard(model.teacher[0])
        fully_shard(model)
        out = []
        for step in range(2):
            loss = mlp_loss(model, rank, step)
            loss.backward()
            out.append(loss.item())
        return out, whole(model.inner.weight.grad), model.teacher[0].inner.weight.grad

    def twice(model: Any, rank: int, step: int) -> Any:
        return mlp_loss(model, rank, 0) + mlp_loss(model, rank, 1)

    twin = train_twin(Job(Student, twice, steps=1), 2)
    for _, grad, teacher in quietly(lambda: on_ranks(2, run)):
        close(grad, twin.grads[0]["inner.weight"])
        assert teacher is None


def test_a_module_held_under_two_names() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 5)
            self.b = self.a
            self.head = nn.Linear(5, 2)

        def forward(self, x: Any) -> Any:
            return self.head(self.b(tp.tanh(self.a(x))))

    def shard(model: Any) -> Any:
        fully_shard(model.a)
        return fully_shard(model)

    check_parity(Job(Shares, mlp_loss, shard, steps=2), 2)


def test_a_child_replaced_by_a_plain_module_after_a_step() -> None:
    def run(rank: int) -> Any:
        model = shard_nested(seeded(Lm))
        lm_loss(model, 0, 0).backward()
        model.blocks[1] = seeded(lambda: Block(5))
        model.zero_grad()
        loss = lm_loss(model, 0, 1)
        loss.backward()
        return loss.item(), local(model.blocks[1].up.weight.grad), whole(model.head.weight.grad)

    twin = seeded(Lm)
    twin.blocks[1] = seeded(lambda: Block(5))
    loss = lm_loss(twin, 0, 1)
    loss.backward()
    for value, plain, head in on_ranks(2, run):
        close(value, loss.item())
        close(plain, local(twin.blocks[1].up.weight.grad))
        close(head, local(twin.head.weight.grad))


def test_a_sharded_child_added_after_a_step() -> None:
    def run(rank: int) -> Any:
        model = shard_nested(seeded(Lm))
        lm_loss(model, 0, 0).backward()
        model.blocks.append(fully_shard(seeded(lambda: Block(5))))
        model.zero_grad()
        loss = lm_loss(model, 0, 1)
        loss.backward()
        return loss.item(), whole(model.blocks[2].up.weight.grad)

    twin = seeded(Lm)
    twin.blocks.append(seeded(lambda: Block(5)))
    loss = lm_loss(twin, 0, 1)
    loss.backward()
    for value, grad in on_ranks(2, run):
        close(value, loss.item())
        close(grad, local(twin.blocks[2].up.weight.grad))


def test_a_shorter_list_of_blocks() -> None:
    def run(rank: int) -> Any:
        model = shard_nested(seeded(Lm))
        lm_loss(model, 0, 0).backward()
        model.blocks = model.blocks[:1]
        model.zero_grad()
        loss = lm_loss(model, 0, 1)
        loss.backward()
        return loss.item(), whole(model.blocks[0].up.weight.grad)

    twin = seeded(Lm)
    twin.blocks = twin.blocks[:1]
    loss = lm_loss(twin, 0, 1)
    loss.backward()
    for value, grad in on_ranks(2, run):
        close(value, loss.item())
        close(grad, local(twin.blocks[0].up.weight.grad))


# --- parameters in lists, gradients by hand -------------------------------------------------------


def test_parameters_in_lists_and_dicts() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(tp.randn(5)) for _ in range(3)])
            self.named = nn.ParameterDict({"w": nn.Parameter(tp.randn(5, 4))})

        def forward(self, x: Any) -> Any:
            for scale in self.scales:
                x = tp.tanh(x * scale)
            return x @ self.named["w"]

    check_parity(Job(Net, mlp_loss, steps=3), 2)


def test_gradients_scaled_and_set_by_hand() -> None:
    def scale(model: Any) -> None:
        for p in model.parameters():
            p.grad.mul_(0.5)
        bias = model.outer.bias
        bias.grad = bias.grad * 3 + 0.25

    check_parity(Job(Mlp, mlp_loss, before_step=scale, steps=3), 3)


def test_zeroing_gradients_in_place() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        mlp_loss(model, rank, 1).backward()
        model.zero_grad(set_to_none=False)
        kept = model.inner.weight.grad
        zeros = local(kept)
        mlp_loss(model, rank, 0).backward()
        return zeros, local(model.inner.weight.grad), model.inner.weight.grad is kept

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    for rank, (zeros, grad, kept) in enumerate(on_ranks(2, run)):
        assert not zeros.any() and kept
        close(grad, own_slice(twin.grads[0]["inner.weight"], 2, rank))


def test_a_moving_average_of_the_weights() -> None:
    def average(model: Any) -> Any:
        ema = [p.detach().clone() for p in model.parameters()]
        optimizer = sgd(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            mlp_loss(model, 0, step).backward()
            optimizer.step()
            with tp.no_grad():
                for e, p in zip(ema, model.parameters(), strict=True):
                    e.mul_(0.9).add_(p, alpha=0.1)
        return [whole(e) for e in ema]

    wanted = average(seeded(Mlp))
    for found in on_ranks(3, lambda rank: average(fully_shard(seeded(Mlp)))):
        for got, value in zip(found, wanted, strict=True):
            close(got, value, atol=1e-5)


def test_backward_for_some_inputs_only() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        x = random(2, 5).requires_grad_()
        model(x).sum().backward(inputs=[x])
        untouched = all(p.grad is None for p in model.parameters())
        (again,) = tp.autograd.grad(model(x).sum(), [x])
        return untouched, local(x.grad), local(again)

    twin = seeded(Mlp)
    x = random(2, 5).requires_grad_()
    twin(x).sum().backward()
    for untouched, grad, again in on_ranks(2, run):
        assert untouched
        close(grad, local(x.grad))
        close(again, local(x.grad))


def test_integer_outputs_next_to_differentiable_ones() -> None:
    class Net(Mlp):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            return y, y.argmax(-1), y > 0, y.square().mean()

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Net))
        _, best, positive, loss = model(random(4, 5, seed=rank))
        loss.backward()
        return (
            local(best), best.dtype, local(positive), best.requires_grad, tuple(loss.shape),
            local(model.inner.weight.grad),
        )  # fmt: skip

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    for rank, found in enumerate(on_ranks(2, run)):
        best, dtype, positive, requires_grad, shape, grad = found
        wanted = local(seeded(Mlp)(random(4, 5, seed=rank)))
        np.testing.assert_array_equal(best, wanted.argmax(-1))
        np.testing.assert_array_equal(positive, wanted > 0)
        assert (dtype, requires_grad, shape) == (tp.int64, False, ())
        close(grad, own_slice(twin.grads[0]["inner.weight"], 2, rank))


def test_a_policy_of_its_own_for_one_child() -> None:
    """The middle computes in bfloat16 and returns float32; the rest is float32."""
    policy = MixedPrecisionPolicy(param_dtype=tp.bfloat16, output_dtype=tp.float32)

    def shard(model: Any) -> Any:
        fully_shard(model.inner, mp_policy=policy)
        return fully_shard(model)

    class Rounded(Mlp):
        def forward(self, x: Any) -> Any:
            low = tp.bfloat16
            y = F.linear(x.to(low), self.inner.weight.to(low), self.inner.bias.to(low)).float()
            return self.outer(tp.tanh(y))

    twin = train_twin(Job(Rounded, mlp_loss, steps=2), 2)
    records = on_ranks(2, train_rank, Job(Mlp, mlp_loss, shard, steps=2))
    for rank, record in enumerate(records):
        close(record.losses, [each[rank] for each in twin.losses], rtol=5e-3)
        for name, param in record.params.items():
            close(param, own_slice(twin.params[name], 2, rank), name, rtol=0.02, atol=0.002)


def test_loading_shards_into_a_plain_model_says_what_to_do() -> None:
    def run(rank: int) -> None:
        shards = fully_shard(seeded(Mlp)).state_dict()
        plain = Mlp()
        with pytest.raises(RuntimeError) as caught:
            plain.load_state_dict(shards)
        assert "inner.weight" in str(caught.value) and "full_tensor" in str(caught.value)
        plain.load_state_dict({n: v.full_tensor() for n, v in shards.items()})
        close(local(plain(random(2, 5))), local(seeded(Mlp)(random(2, 5))))

    on_ranks(2, run)


# --- ordinary forwards compile --------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention with a mask buffer, as tutorials write it."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = 1 / np.sqrt(width // heads)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        mask = tp.tril(tp.ones(length, length)).view(1, 1, length, length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.size()
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in (q, k, v)
        )
        scores = (q @ k.transpose(-2, -1)) * self.scale
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(batch, length, width)
        return self.out(y)


class Gpt(nn.Module):
    """A small GPT in the style of nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(13, 8),
                "wpe": nn.Embedding(6, 8),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList(
                    nn.ModuleDict(
                        {"ln": nn.LayerNorm(8), "attn": Attention(8, 2, 6), "mlp": nn.Linear(8, 8)}
                    )
                    for _ in range(1)
                ),
            }
        )
        self.lm_head = nn.Linear(8, 13, bias=False)

    def forward(self, tokens: Any, targets: Any = None) -> tuple[Any, Any]:
        _, length = tokens.size()
        assert length <= 6, f"cannot forward a sequence of length {length}"
        positions = tp.arange(0, length, dtype=tp.int64, device=tokens.device)
        parts = self.transformer
        x = parts["drop"](parts["wte"](tokens) + parts["wpe"](positions))
        for block in parts["h"]:
            x = x + block["attn"](block["ln"](x))
            x = x + F.gelu(block["mlp"](x))
        logits = self.lm_head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return logits, loss


def test_a_gpt_as_tutorials_write_it_compiles_and_agrees() -> None:
    def loss(model: Any, rank: int, step: int) -> Any:
        tokens = ids(13, 2, 6, seed=10 * step + rank)
        return model(tokens[:, :-1], tokens[:, 1:])[1]

    def shard(model: Any) -> Any:
        for block in model.transformer["h"]:
            fully_shard(block["attn"])
        return fully_shard(model)

    twin = train_twin(Job(Gpt, loss, optimizer=adamw, steps=3), 2)
    with no_warnings():
        for rank, record in enumerate(
            on_ranks(2, train_rank, Job(Gpt, loss, shard, adamw, steps=3))
        ):
            compare(record, twin, 2, rank)


def test_generation_with_growing_lengths() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Gpt))
        model.eval()
        tokens = tp.tensor([[1]])
        with tp.no_grad():
            for _ in range(3):
                logits, _ = model(tokens)
                tokens = tp.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        return tokens.tolist()

    twin = seeded(Gpt).eval()
    tokens = tp.tensor([[1]])
    for _ in range(3):
        tokens = tp.cat([tokens, twin(tokens)[0][:, -1].argmax(-1, keepdim=True)], dim=1)
    assert on_ranks(2, run) == [tokens.tolist()] * 2


def test_tensors_made_inside_forward_do_not_keep_it_from_compiling() -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.frequencies = np.arange(1, 5, dtype=np.float32)

        def forward(self, x: Any) -> Any:
            y = self.linear(x) + tp.zeros(4) + tp.ones_like(x) + tp.full((4,), 2.0)
            y = y + tp.tensor([1.0, 2.0, 3.0, 4.0]) * tp.arange(4) + tp.eye(4)[0]
            y = y + tp.from_numpy(np.sin(self.frequencies * 3))
            return y + tp.linspace(0, 1, 4) + x.new_zeros(4) + len(self._modules)

    model = fully_shard(seeded(Makes))
    with no_warnings():
        for _ in range(2):
            close(local(model(random(2, 4))), local(seeded(Makes)(random(2, 4))))
        model.frequencies = np.arange(2, 6, dtype=np.float32)
        twin = seeded(Makes)
        twin.frequencies = model.frequencies
        close(local(model(random(2, 4))), local(twin(random(2, 4))))
    assert traces(model) == 2


def test_ordinary_python_inside_forward_compiles() -> None:
    class Ordinary(nn.Module):
        """Loops, comprehensions, sorting, string formatting, math, isinstance, zip, lambdas."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
            self.names = {"b": 2, "a": 1}

        def forward(self, x: Any, mask: Any = None) -> Any:
            pieces = []
            for i, layer in enumerate(self.layers):
                x = layer(x) if i % 2 else tp.tanh(layer(x))
                pieces.append(x * math.sqrt(i + 1))
            key = max(sorted(self.names), key=lambda name: self.names[name])
            scale = {f"{k}-{v}": v for k, v in self.names.items()}[f"{key}-2"]
            if mask is not None and isinstance(mask, tp.Tensor):
                pieces = [p * mask for p in pieces]
            total = tp.stack(pieces).sum(0)
            return {"out": total * scale, "sum": sum(pieces), "shape": [*total.shape]}

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Ordinary))
        out = model(random(2, 4), mask=random(2, 4, seed=5))
        return local(out["out"]), local(out["sum"]), out["shape"]

    wanted = seeded(Ordinary)(random(2, 4), mask=random(2, 4, seed=5))
    with no_warnings():
        for out, total, shape in on_ranks(2, run):
            close(out, local(wanted["out"]))
            close(total, local(wanted["sum"]))
            assert shape == [2, 4]


def test_a_profiler_does_not_change_how_a_call_runs() -> None:
    model = fully_shard(seeded(Mlp))
    profile = cProfile.Profile()
    with no_warnings():
        profile.enable()
        try:
            mlp_loss(model, 0, 0).backward()
            mlp_loss(model, 0, 1).backward()
        finally:
            profile.disable()
    assert traces(model) == 1
    names = {entry.code.co_name for entry in profile.getstats() if hasattr(entry.code, "co_name")}
    assert "mlp_loss" in names and "backward" in names


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Lm, EagerLm])
def test_a_model_that_is_dropped_is_freed(make: Any) -> None:
    model = shard_nested(seeded(make))
    optimizer = sgd(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = lm_loss(model, 0, 0)
    loss.backward()
    optimizer.step()
    found = [weakref.ref(m) for m in model.modules()]
    found += [weakref.ref(p) for p in model.parameters()]
    del model, optimizer, loss
    gc.collect()
    assert [ref() for ref in found if ref() is not None] == []


def test_a_graph_that_is_dropped_frees_its_residuals() -> None:
    model = fully_shard(seeded(Mlp))
    loss = mlp_loss(model, 0, 0)
    node = weakref.ref(loss.grad_fn)
    loss.backward()
    del loss
    gc.collect()
    assert node() is None
