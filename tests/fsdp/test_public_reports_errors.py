"""Reports of users about what should be refused, and of JAX (shared/public-reports.md), row by row.

The other rows are in test_public_reports.py; A8 with an int in test_post_forward.py, A13 with
checkpointing in test_activation_checkpointing.py, J1 in test_processes.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import Job, Mlp, adamw, check_parity, close, local, mlp_loss, on_ranks, random, seeded
from test_programs import programs

import tensorplay as tp
import tensorplay.distributed as dist
import tensorplay.distributed.nn as dnn
import tensorplay.nn as nn
import tensorplay.nn.functional as F
from tensorplay.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import fully_shard, register_fsdp_forward_method
from tensorplay.testing import ranks
from tensorplay.utils.checkpoint import checkpoint


def test_a2_a_tie_across_two_groups_is_refused_at_the_first_forward() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Any) -> Any:
            return self.head(self.embed(tokens))

    def run(rank: int) -> None:
        model = Tied()
        fully_shard(model.embed)
        fully_shard(model.head)
        fully_shard(model)
        with pytest.raises(ValueError, match=r"weight.*fully_shard\(\[module_a, module_b\]\)"):
            model(tp.tensor([1, 2]))

    on_ranks(2, run)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.scale = nn.Parameter(tp.tensor(2.0))

    def forward(self, x: Any) -> Any:
        return self.inner(x) * self.scale


@ranks(2)
def test_a4_a_scalar_parameter_is_refused_unless_it_is_ignored(rank: int) -> None:
    model = Scaled()
    with pytest.raises(ValueError, match=r"'scale' has shape \(\).*shape \(1,\)"):
        fully_shard(model)
    assert type(model) is Scaled
    fully_shard(model, ignored_params={model.scale})
    model(random(2, 5)).sum().backward()
    assert model.scale.grad is not None and model.inner.weight.grad is not None


@ranks(2)
def test_a5_containers_need_a_forward_of_their_own(rank: int) -> None:
    class Both(nn.ModuleList):
        def forward(self, x: Any) -> Any:
            return self[1](self[0](x))

    layers = [nn.Linear(5, 5), nn.Linear(5, 3)]
    for container in (nn.ModuleList(layers), nn.ModuleDict({"a": layers[0]})):
        with pytest.raises(ValueError, match="containers that do not implement forward"):
            fully_shard(container)
    model = fully_shard(Both(layers))
    model(random(2, 5)).sum().backward()
    assert model[0].weight.grad is not None


@ranks(4)
def test_a10_mistakes_with_meshes(rank: int) -> None:
    with pytest.raises(ValueError, match="1D or 2D"):
        fully_shard(Mlp(), mesh=init_device_mesh("cpu", (2, 2, 1)))
    with pytest.raises(RuntimeError, match=r"world size 4.*8 ranks"):
        init_device_mesh("cpu", (8,))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))
    with pytest.raises(KeyError, match="ascending order"):
        _ = mesh["shard", "rep"]
    fully_shard(Mlp(), mesh=init_device_mesh("cpu", (2, 2)))  # names are not needed
    if rank < 2:
        mine = init_device_mesh("cpu", (2,))
        assert fully_shard(Mlp(), mesh=mine).inner.weight.shape[0] < 7
    else:
        with pytest.raises(RuntimeError, match=f"rank {rank} is not in"):
            fully_shard(Mlp(), mesh=init_device_mesh("cpu", (2,)))


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Record:
    value: Any
    note: str = ""


class Holder:
    """An object of no known kind."""

    def __init__(self, value: Any) -> None:
        self.value = value


OUTPUTS = {
    "dict": (lambda y: {"y": y, "none": None, "word": "a"}, lambda o: o["y"]),
    "tuple": (lambda y: (None, y, "a"), lambda o: o[1]),
    "list": (lambda y: [y, 3], lambda o: o[0]),
    "dataclass": (lambda y: Record(y, "b"), lambda o: o.value),
    "named tuple": (lambda y: Pair(1, y), lambda o: o.second),
    "object": (Holder, lambda o: o.value),
    "nested": (lambda y: {"a": [Holder(Record(y))]}, lambda o: o["a"][0].value.value),
}


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_a15_gradients_flow_through_any_output(name: str, eager: bool) -> None:
    pack, unpack = OUTPUTS[name]

    class Packs(Mlp):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            if eager:
                y.sum().item()
            return pack(y)

    def run(rank: int) -> None:
        model = seeded(Packs)
        fully_shard(model.inner)
        fully_shard(model)
        optimizer = adamw(model.parameters())
        before = [local(p) for p in model.parameters()]
        unpack(model(random(4, 5))).square().mean().backward()
        optimizer.step()
        for p, old in zip(model.parameters(), before, strict=True):
            assert p.grad is not None and not np.array_equal(local(p), old)

    on_ranks(2, run)


@ranks(2)
def test_a15_an_output_of_none_runs(rank: int) -> None:
    class Nothing(Mlp):
        def forward(self, x: Any) -> Any:
            super().forward(x)

    assert fully_shard(Nothing())(random(2, 5)) is None


class Generates(Mlp):
    def generate(self, x: Any) -> Any:
        return self.outer(tp.tanh(self.inner(x)))


@ranks(2)
def test_a20_methods_that_bypass_the_hooks(rank: int) -> None:
    model, x = fully_shard(seeded(Generates)), random(4, 5)
    for call in (model.generate, model.forward):
        with pytest.raises(RuntimeError, match="register_fsdp_forward_method"):
            call(x)
    register_fsdp_forward_method(model, "generate")
    out = model.generate(x)
    close(local(out), local(seeded(Generates)(x)))
    out.sum().backward()
    assert model.inner.weight.grad is not None
    with pytest.raises(ValueError, match="does not have a method"):
        register_fsdp_forward_method(model, "sample")
    register_fsdp_forward_method(seeded(Generates), "generate")  # not sharded: nothing happens


@pytest.mark.parametrize("where", ["inner", "outer"])
def test_a22_an_exception_inside_forward_reaches_the_user_and_loses_nothing(where: str) -> None:
    class Fragile(nn.Linear):
        fails = False

        def forward(self, x: Any) -> Any:
            if self.fails:
                raise KeyError("of the user")
            return super().forward(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = Fragile(5, 7), Fragile(7, 3)

        def forward(self, x: Any) -> Any:
            return self.outer(self.inner(x))

    def shard(model: Any) -> Any:
        fully_shard(model.inner)
        fully_shard(model)
        getattr(model, where).fails = True
        with pytest.raises(KeyError, match="of the user"):
            model(random(4, 5))
        assert {tuple(v.shape) for v in model.state_dict().values()} <= {
            (4, 5), (3, 5), (4,), (3,), (2, 7), (1, 7), (2,), (1,)
        }  # fmt: skip
        getattr(model, where).fails = False
        return model

    check_parity(Job(Net, mlp_loss, shard, steps=2), 2)


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "AdamW"])
def test_a27_an_optimizer_made_before_sharding_is_refused_at_its_step(optimizer: str) -> None:
    def run(rank: int) -> None:
        model = seeded(Mlp)
        early = getattr(tp.optim, optimizer)(model.parameters(), lr=0.1)
        fully_shard(model)
        mlp_loss(model, rank, 0).backward()
        with pytest.raises(RuntimeError, match="after fully_shard"):
            early.step()

    on_ranks(2, run)


@ranks(2)
def test_a39_dtypes_in_one_group(rank: int) -> None:
    def make() -> Any:
        model = seeded(Mlp)
        model.outer.to(tp.bfloat16)
        return model

    with pytest.raises(AssertionError, match=r"float32.*bfloat16|bfloat16.*float32"):
        fully_shard(make())
    frozen = make()
    frozen.outer.requires_grad_(False)
    fully_shard(frozen)
    assert frozen.outer.weight.dtype is tp.bfloat16
    counted = seeded(Mlp)
    counted.steps = nn.Parameter(tp.arange(4), requires_grad=False)
    fully_shard(counted)
    counted(random(2, 5)).sum().backward()
    assert counted.steps.dtype is tp.int64 and counted.steps.tolist() == [2 * rank, 2 * rank + 1]


@pytest.mark.parametrize("after_forward", [False, True])
def test_a41_assigned_shards_are_used_and_full_tensors_refused(after_forward: bool) -> None:
    def run(rank: int) -> None:
        model, other, x = fully_shard(seeded(Mlp)), fully_shard(Mlp()), random(2, 5)
        if after_forward:
            model(x)
        keys = list(model.state_dict())
        found = model.load_state_dict(other.state_dict(), assign=True)
        assert not found.missing_keys
        close(local(model(x)), local(other(x)))
        model.reshard()
        p = model.inner.weight
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        assert model.inner.weight is p
        full = {k: v.full_tensor() for k, v in other.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"inner\.weight.*set_model_state_dict"):
            model.load_state_dict(full)
        part = {k: v for k, v in other.state_dict().items() if k != keys[0]}
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(part)
        found = model.load_state_dict({**part, "more": tp.ones(1)}, strict=False)
        assert (found.missing_keys, found.unexpected_keys) == ([keys[0]], ["more"])

    on_ranks(2, run)


def test_a42_a_forward_on_meta_is_refused_and_can_be_repaired() -> None:
    class WithBuffer(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", tp.arange(3.0), persistent=False)

        def forward(self, x: Any) -> Any:
            return super().forward(x) + self.table

    def run(rank: int) -> Any:
        with tp.device("meta"):
            model = WithBuffer()
        fully_shard(model.inner)
        fully_shard(model)
        with pytest.raises(RuntimeError, match=r"meta device.*weight"):
            model(random(2, 5))
        model.to_empty(device="cpu")
        full = {k: v.detach() for k, v in seeded(WithBuffer).state_dict().items()}
        from_full(model, full)
        with tp.no_grad():
            model.table.copy_(tp.arange(3.0))
        out = model(random(2, 5))
        out.sum().backward()
        assert model.inner.weight.grad is not None
        return local(out)

    for out in on_ranks(2, run):
        close(out, local(seeded(WithBuffer)(random(2, 5))))


def from_full(model: Any, full: Any) -> None:
    """Loads a full state dict."""
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))


# --- JAX ------------------------------------------------------------------------------------------


@ranks(4)
def test_j3_the_gradient_of_a_summed_loss_is_that_of_the_sum_over_ranks(rank: int) -> None:
    """d/dw of the sum over ranks of r * w is 0 + 1 + 2 + 3."""
    w = tp.ones(1, requires_grad=True)
    dnn.all_reduce(w * float(rank)).sum().backward()
    total = w.grad / dist.get_world_size()  # each rank's loss is the whole sum
    dist.all_reduce(total)
    assert total.item() == 6


def test_j5_a_second_gather_is_one_of_its_own() -> None:
    """Forward and backward are two programs, so XLA cannot merge the second gather with the first;
    with activation checkpointing too there is one gather in each."""

    def make() -> Any:
        class Stack(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

            def forward(self, x: Any) -> Any:
                for layer in self.layers:
                    x = checkpoint(lambda v, own=layer: tp.tanh(own(v)), x)
                return x

        model = seeded(Stack)
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=True)
        return fully_shard(model)

    def step(rank: int) -> None:
        make()(random(2, 6).requires_grad_()).sum().backward()

    forward, backward = programs(step)
    assert (forward.counts["all_gather"], backward.counts["all_gather"]) == (3, 3)
    assert backward.text.count("stablehlo.all_gather") == 3


@ranks(2)
def test_j9_state_of_objects_advances_in_a_compiled_step(rank: int) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("calls", tp.zeros(1, dtype=tp.int64))

        def forward(self, x: Any) -> Any:
            self.calls += 1
            return F.dropout(self.norm(x), 0.5)

    model, x = fully_shard(Counts()), random(6, 3)
    masks = [local(model(x)) == 0 for _ in range(2)]
    assert model._fsdp_state.calls.traces == 1
    assert model.calls.item() == 2 and model.norm.num_batches_tracked.item() == 2
    mean = local(x).mean(0)
    close(local(model.norm.running_mean), 0.1 * mean + 0.9 * 0.1 * mean)
    assert not np.array_equal(*masks)
