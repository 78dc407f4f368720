"""Bad input raises at the call, on every rank, says what to do, and leaves the model as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import (
    Block,
    Job,
    Lm,
    Mlp,
    close,
    lm_loss,
    local,
    mlp_loss,
    on_ranks,
    own_slice,
    random,
    seeded,
    sgd,
    shard_nested,
    train_twin,
    whole,
)

import tensorplay as tp
import tensorplay.nn as nn
from tensorplay.distributed import DistBackendError
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

WORLD = 2


def refused(
    make: Callable[[], Any],
    call: Callable[[Any], Any],
    error: type[BaseException],
    *words: str,
    x: Any = None,
) -> None:
    """``call(model)`` raises ``error`` with ``words`` on every rank; the model still works."""

    def run(rank: int) -> None:
        model = make()
        before = dict(model.named_parameters())
        kinds = [type(m) for m in model.modules()]
        with pytest.raises(error) as caught:
            call(model)
        for word in words:
            assert word in str(caught.value), (word, str(caught.value))
        assert [type(m) for m in model.modules()] == kinds
        after = dict(model.named_parameters())
        assert list(after) == list(before)
        assert all(after[name] is before[name] for name in before)
        if x is not None:
            twin = model
            out = twin(x)
            out.sum().backward()
            sgd(model.parameters()).step()

    on_ranks(WORLD, run)


def test_twice_on_one_module() -> None:
    refused(
        lambda: fully_shard(Mlp()),
        fully_shard,
        RuntimeError,
        "fully_shard has already been applied",
        x=random(2, 5),
    )


def test_twice_inside_a_list() -> None:
    def call(model: Any) -> None:
        fully_shard([model.outer, model.inner])

    def make() -> Any:
        model = Mlp()
        fully_shard(model.inner)
        return model

    refused(make, call, RuntimeError, "already been applied", x=random(2, 5))


def test_the_same_module_twice_in_a_list() -> None:
    refused(Mlp, lambda m: fully_shard([m.inner, m.inner]), ValueError, "twice", x=random(2, 5))


def test_a_parent_before_its_child() -> None:
    refused(
        lambda: fully_shard(Mlp()),
        lambda model: fully_shard(model.inner),
        RuntimeError,
        "inner",
        x=random(2, 5),
    )


def test_an_empty_list_and_things_that_are_no_modules() -> None:
    refused(Mlp, lambda m: fully_shard([]), ValueError, "at least one module")
    refused(Mlp, lambda m: fully_shard(3), TypeError, "int")
    refused(Mlp, lambda m: fully_shard([m.inner, "outer"]), TypeError, "str", x=random(2, 5))


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_a_container_without_forward(kind: str) -> None:
    def make() -> Any:
        layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
        return nn.ModuleList(layers) if kind == "list" else nn.ModuleDict({"a": layers[0]})

    refused(make, fully_shard, ValueError, "containers that do not implement forward")


def test_a_container_with_forward_works() -> None:
    class Chain(nn.ModuleList):
        def forward(self, x: Any) -> Any:
            for layer in self:
                x = layer(x)
            return x

    def run(rank: int) -> Any:
        model = fully_shard(seeded(lambda: Chain([nn.Linear(3, 4), nn.Linear(4, 2)])))
        model(random(2, 3)).sum().backward()
        return type(model).__name__, whole(model[0].weight.grad)

    twin = seeded(lambda: Chain([nn.Linear(3, 4), nn.Linear(4, 2)]))
    twin(random(2, 3)).sum().backward()
    for name, grad in on_ranks(2, run):
        assert name == "ChainFSDPModule"
        close(grad, local(twin[0].weight.grad))


class Scalar(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(tp.tensor(2.0))

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.scale


def test_a_zero_dim_parameter() -> None:
    refused(Scalar, fully_shard, ValueError, "'scale'", "(1,)", "ignored_params", x=random(2, 5))


def test_a_zero_dim_parameter_that_is_ignored_works() -> None:
    def run(rank: int) -> Any:
        model = seeded(Scalar)
        fully_shard(model, ignored_params={model.scale})
        model(random(2, 5)).sum().backward()
        return model.scale.grad.item(), whole(model.outer.weight.grad)

    twin = seeded(Scalar)
    twin(random(2, 5)).sum().backward()
    for scale, weight in on_ranks(2, run):
        close(scale, twin.scale.grad.item())
        close(weight, local(twin.outer.weight.grad))


def test_a_mesh_larger_than_the_world() -> None:
    def call(model: Any) -> None:
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))

    refused(Mlp, call, RuntimeError, "4", "2", x=random(2, 5))


def test_a_mesh_of_three_dims() -> None:
    def call(model: Any) -> None:
        mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
        fully_shard(model, mesh=mesh)

    refused(Mlp, call, ValueError, "1D or 2D", x=random(2, 5))


def test_mesh_names_out_of_order() -> None:
    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("rep", "shard"))
        with pytest.raises(KeyError):
            mesh["shard", "rep"]

    on_ranks(2, run)


def test_a_two_dim_mesh_without_names_works() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp), mesh=init_device_mesh("cpu", (1, 2)))
        mlp_loss(model, rank, 0).backward()
        return local(model.inner.weight.grad)

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    for rank, grad in enumerate(on_ranks(2, run)):
        close(grad, own_slice(twin.grads[0]["inner.weight"], 2, rank))


def test_something_that_is_no_mesh() -> None:
    refused(Mlp, lambda m: fully_shard(m, mesh=(2,)), TypeError, "mesh", x=random(2, 5))


def test_trainable_parameters_of_two_dtypes_in_one_group() -> None:
    def make() -> Any:
        model = Mlp()
        model.outer.to(tp.bfloat16)
        return model

    refused(make, fully_shard, AssertionError, "float32", "bfloat16", "inner.weight")


def test_a_frozen_parameter_of_another_dtype_is_fine() -> None:
    class Mixed(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Parameter(tp.ones(3, dtype=tp.bfloat16) * 1.5, requires_grad=False)

        def forward(self, x: Any) -> Any:
            return super().forward(x) * self.low.float()

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mixed))
        mlp_loss(model, rank, 0).backward()
        return model.low.dtype, whole(model.inner.weight.grad), model.low.grad

    twin = train_twin(Job(Mixed, mlp_loss, steps=1), 2)
    for dtype, grad, half in on_ranks(2, run):
        assert dtype == tp.bfloat16 and half is None
        close(grad, twin.grads[0]["inner.weight"])


@pytest.mark.parametrize("value", ["yes", 0, 3, 1.0, [True]])
def test_reshard_after_forward_of_a_wrong_type(value: Any) -> None:
    refused(
        Mlp,
        lambda model: fully_shard(model, reshard_after_forward=value),
        ValueError,
        "reshard_after_forward",
        repr(value),
        x=random(2, 5),
    )


def test_set_reshard_after_forward_of_a_wrong_type() -> None:
    refused(
        lambda: fully_shard(Mlp()),
        lambda model: model.set_reshard_after_forward("yes"),
        ValueError,
        "reshard_after_forward",
        x=random(2, 5),
    )


def test_policies_of_a_wrong_type() -> None:
    refused(
        Mlp, lambda m: fully_shard(m, offload_policy="cpu"), TypeError, "offload_policy",
        x=random(2, 5),
    )  # fmt: skip
    refused(
        Mlp, lambda m: fully_shard(m, mp_policy=tp.bfloat16), TypeError, "mp_policy",
        x=random(2, 5),
    )  # fmt: skip
    refused(
        Mlp, lambda m: fully_shard(m, mp_policy=MixedPrecisionPolicy(param_dtype="bfloat16")),  # type: ignore[arg-type]
        TypeError, "param_dtype", x=random(2, 5),
    )  # fmt: skip


def test_cpu_offload_on_a_cpu_mesh_trains() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp), offload_policy=CPUOffloadPolicy())
        mlp_loss(model, rank, 0).backward()
        return local(model.inner.weight.grad)

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    for rank, grad in enumerate(on_ranks(2, run)):
        close(grad, own_slice(twin.grads[0]["inner.weight"], 2, rank))


def test_ignored_params_that_are_no_parameters() -> None:
    refused(
        Mlp, lambda m: fully_shard(m, ignored_params={"inner.weight"}), TypeError,
        "ignored_params", x=random(2, 5),
    )  # fmt: skip


def test_shard_placement_fn_mistakes() -> None:
    from tensorplay.distributed._placements import Shard

    for value, words in ((Shard(2), "inner.weight"), (1, "Shard"), ("rows", "Shard")):
        refused(
            Mlp, lambda m, v=value: fully_shard(m, shard_placement_fn=lambda p: v), ValueError,
            words, x=random(2, 5),
        )  # fmt: skip

    def late(param: Any) -> Any:
        return Shard(1) if tuple(param.shape) == (3,) else None

    refused(
        Mlp, lambda m: fully_shard(m, shard_placement_fn=late), ValueError, "outer.bias",
        x=random(2, 5),
    )  # fmt: skip


# --- optimizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
def test_an_optimizer_made_before_sharding_raises_at_step(kind: str) -> None:
    def run(rank: int) -> Any:
        model = seeded(Mlp)
        optimizer = getattr(tp.optim, kind)(model.parameters(), lr=0.1)
        fully_shard(model)
        mlp_loss(model, rank, 0).backward()
        before = whole(model.inner.weight)
        with pytest.raises(RuntimeError, match=r"inner\.weight.*after fully_shard"):
            optimizer.step()
        np.testing.assert_array_equal(whole(model.inner.weight), before)
        getattr(tp.optim, kind)(model.parameters(), lr=0.1).step()
        return np.abs(whole(model.inner.weight) - before).max()

    assert all(change > 0 for change in on_ranks(2, run))


def test_a_group_added_to_an_optimizer_before_sharding_raises_at_step() -> None:
    def run(rank: int) -> None:
        model = seeded(Mlp)
        outer = list(model.outer.parameters())
        fully_shard(model.inner)
        optimizer = sgd(model.inner.parameters())
        optimizer.add_param_group({"params": outer})
        fully_shard(model)
        mlp_loss(model, rank, 0).backward()
        with pytest.raises(RuntimeError, match=r"outer\.weight"):
            optimizer.step()

    on_ranks(2, run)


# --- calls past the hooks -------------------------------------------------------------------------


def ways_out(message: str) -> bool:
    """Whether the message names the three ways out."""
    return all(w in message for w in ("model(", "register_fsdp_forward_method", "unshard()"))


def test_a_forward_called_directly() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        x = random(2, 5)
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                model.forward(x)
            assert "Mlp" in str(caught.value) and "inner.weight" in str(caught.value)
            assert ways_out(str(caught.value))
            model(x).sum().backward()
        with pytest.raises(RuntimeError):
            model.forward(x)
        return local(model(x))

    for out in on_ranks(2, run):
        close(out, local(seeded(Mlp)(random(2, 5))))


def test_a_forward_called_directly_while_the_eval_root_is_unsharded() -> None:
    """After an evaluation forward the wholes are there, so the result is right."""

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        x = random(2, 5)
        with tp.no_grad():
            model(x)
            return local(model.forward(x))

    for out in on_ranks(2, run):
        close(out, local(seeded(Mlp)(random(2, 5))))


def test_a_forward_of_a_sharded_child_called_directly_inside_forward() -> None:
    class Bypasses(Mlp):
        def forward(self, x: Any) -> Any:
            return self.outer(tp.tanh(self.inner.forward(x)))

    def run(rank: int) -> None:
        model = seeded(Bypasses)
        fully_shard(model.inner)
        fully_shard(model)
        with pytest.raises(RuntimeError) as caught, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(random(2, 5))
        assert "Linear" in str(caught.value)
        assert ways_out(str(caught.value))

    on_ranks(2, run)


class Generates(Mlp):
    def generate(self, x: Any) -> Any:
        return self.outer(self.inner(x))

    def embed_only(self, x: Any) -> Any:
        return nn.functional.linear(x, self.inner.weight)


@pytest.mark.parametrize("name", ["generate", "embed_only"])
def test_an_unregistered_method_names_the_registration(name: str) -> None:
    def run(rank: int) -> None:
        model = fully_shard(seeded(Generates))
        with pytest.raises(RuntimeError) as caught:
            getattr(model, name)(random(2, 5))
        assert "register_fsdp_forward_method" in str(caught.value)
        assert "inner.weight" in str(caught.value)

    on_ranks(2, run)


def test_registering_a_method_that_is_not_there() -> None:
    refused(
        lambda: fully_shard(Mlp()),
        lambda model: register_fsdp_forward_method(model, "generate"),
        ValueError,
        "'generate'",
        "Mlp",
        x=random(2, 5),
    )


def test_registering_on_a_plain_module_does_nothing() -> None:
    model = seeded(Generates)
    register_fsdp_forward_method(model, "generate")
    register_fsdp_forward_method(model, "no_such_method")
    assert "generate" not in vars(model)
    close(local(model.generate(random(2, 5))), local(seeded(Generates).generate(random(2, 5))))


# --- the order of forwards, ties ------------------------------------------------------------------


def test_a_child_called_before_its_root() -> None:
    def run(rank: int) -> Any:
        model = shard_nested(seeded(Lm))
        x = random(2, 4, 5)
        alone = local(model.blocks[0](x))
        with pytest.raises(RuntimeError, match="root"):
            lm_loss(model, rank, 0)
        with pytest.raises(RuntimeError, match=r"Block.*Lm"):
            lm_loss(model, rank, 0)
        return alone, local(model.blocks[0](x))

    wanted = local(seeded(Lm).blocks[0](random(2, 4, 5)))
    for alone, again in on_ranks(2, run):
        close(alone, wanted)
        close(again, wanted)


def test_a_child_alone_after_a_step_of_the_root() -> None:
    def run(rank: int) -> Any:
        model = shard_nested(seeded(Lm))
        lm_loss(model, rank, 0).backward()
        model.zero_grad()
        x = random(2, 5).requires_grad_()
        model.blocks[1](x).square().sum().backward()
        return whole(model.blocks[1].up.weight.grad), local(x.grad), model.head.weight.grad

    twin = seeded(Lm)
    x = random(2, 5).requires_grad_()
    twin.blocks[1](x).square().sum().backward()
    for weight, grad, head in on_ranks(2, run):
        close(weight, local(twin.blocks[1].up.weight.grad))
        close(grad, local(x.grad))
        assert head is None


def tied() -> Any:
    model = Lm()
    model.head.weight = model.embed.weight
    return model


def test_a_tie_across_two_groups() -> None:
    def run(rank: int) -> None:
        model = seeded(tied)
        fully_shard(model.embed)
        fully_shard(model)
        for _ in range(2):
            with pytest.raises(ValueError) as caught:
                lm_loss(model, rank, 0)
            message = str(caught.value)
            assert "head.weight" in message and "weight" in message
            assert "fully_shard([" in message

    on_ranks(2, run)


def test_a_tie_between_a_group_and_a_plain_module() -> None:
    """The plain module would keep the parameter of before."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Lm()
            self.extra = nn.Linear(5, 11, bias=False)
            self.extra.weight = self.model.embed.weight

        def forward(self, tokens: Any, with_loss: bool) -> Any:
            return (self.model(tokens) + self.extra(self.model.embed(tokens))).square().mean()

    def run(rank: int) -> None:
        root = seeded(Root)
        fully_shard(root.model)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            out = lm_loss(root, rank, 0)
            out.backward()
            sgd(root.parameters()).step()
        assert "embed.weight" in str(caught.value)

    on_ranks(2, run)


# --- exceptions inside forward --------------------------------------------------------------------


class Custom(Exception):
    pass


class Fragile(Block):
    fail = False

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        if self.fail:
            raise Custom("in the child")
        return y


class FragileLm(Lm):
    fail = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Fragile(5), Fragile(5)])

    def forward(self, tokens: Any, with_loss: bool = False) -> Any:
        out = super().forward(tokens, with_loss)
        if self.fail:
            raise Custom("in the parent")
        return out


@pytest.mark.parametrize("where", ["parent", "child"])
@pytest.mark.parametrize("eager", [False, True])
def test_an_exception_inside_forward_loses_nothing(where: str, eager: bool) -> None:
    def run(rank: int) -> Any:
        model = seeded(FragileLm)
        if eager:  # a module with backward hooks runs as plain Python
            model.register_full_backward_hook(lambda m, gin, gout: None)
        shard_nested(model)
        broken = model if where == "parent" else model.blocks[1]
        broken.fail = True
        for _ in range(2):
            with pytest.raises(Custom, match=where):
                lm_loss(model, rank, 0)
        shapes = {n: tuple(v.shape) for n, v in model.state_dict().items()}
        shown = {n: tuple(p.shape) for n, p in model.named_parameters()}
        broken.fail = False
        lm_loss(model, rank, 0).backward()
        return shapes, shown, {n: local(p.grad) for n, p in model.named_parameters()}

    twin = train_twin(Job(FragileLm, lm_loss, steps=1), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = on_ranks(2, run)
    for rank, (shapes, shown, grads) in enumerate(found):
        wanted = {n: own_slice(g, 2, rank) for n, g in twin.grads[0].items()}
        assert shapes == {n: g.shape for n, g in wanted.items()}
        assert shown == shapes
        for name, grad in grads.items():
            close(grad, wanted[name], name)


@pytest.mark.parametrize("known", [False, True])
def test_an_exception_on_one_rank_ends_the_others_and_is_the_one_reported(known: bool) -> None:
    class Sometimes(Mlp):
        fail = False

        def forward(self, x: Any) -> Any:
            if self.fail:
                raise Custom("on this rank only")
            return super().forward(x)

    others: list[str] = []

    def run(rank: int) -> None:
        model = fully_shard(seeded(Sometimes))
        if known:
            mlp_loss(model, rank, 0).backward()
        model.fail = rank == 1
        try:
            mlp_loss(model, rank, 0).backward()
        except DistBackendError as error:
            others.append(str(error))
            raise

    with pytest.raises(Custom, match="on this rank only") as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_ranks(2, run)
    assert "rank 1" in " ".join(caught.value.__notes__)
    assert len(others) == 1 and "rank 1 raised Custom" in others[0]


def test_an_exception_in_a_tensor_hook_during_backward() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))

        def fail(grad: Any) -> None:
            raise Custom("in the hook")

        out = model(random(4, 5, seed=rank))
        handle = out.register_hook(fail)
        with pytest.raises(Custom):
            out.square().mean().backward()
        handle.remove()
        model.reset_iter_state()
        shapes = [tuple(p.shape) for p in model.parameters()]
        model.zero_grad()
        mlp_loss(model, rank, 0).backward()
        return shapes, local(model.inner.weight.grad)

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    for rank, (shapes, grad) in enumerate(on_ranks(2, run)):
        wanted = own_slice(twin.grads[0]["inner.weight"], 2, rank)
        assert shapes[0] == wanted.shape
        close(grad, wanted)


def test_reset_iter_state_forgets_unreduced_gradients() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        model.set_requires_gradient_sync(False)
        mlp_loss(model, rank, 7).backward()
        model.reset_iter_state()
        model.set_requires_gradient_sync(True)
        mlp_loss(model, rank, 0).backward()
        return local(model.inner.weight.grad)

    twin = train_twin(Job(Mlp, mlp_loss, steps=1), 2)
    for rank, grad in enumerate(on_ranks(2, run)):
        close(grad, own_slice(twin.grads[0]["inner.weight"], 2, rank))


def test_shards_changed_between_forward_and_backward_are_refused() -> None:
    """As PyTorch refuses a backward through a tensor that was written in place."""

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp), reshard_after_forward=True)
        loss = mlp_loss(model, rank, 0)
        with tp.no_grad():
            model.outer.weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        mlp_loss(model, rank, 0).backward()
        return local(model.outer.weight.grad) is not None

    assert on_ranks(2, run) == [True, True]


# --- meta parameters ------------------------------------------------------------------------------


class WithTable(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", tp.arange(3).float(), persistent=False)

    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.table


def test_a_forward_on_meta_parameters_then_to_empty_works() -> None:
    def run(rank: int) -> Any:
        with tp.device("meta"):
            model = WithTable()
        for layer in (model.inner, model):
            fully_shard(layer)
        assert all(p.is_meta for p in model.parameters())
        shapes = [tuple(p.shape) for p in model.parameters()]
        with pytest.raises(RuntimeError) as caught:
            model(random(2, 5))
        for word in ("meta", "weight", "bias", "to_empty"):
            assert word in str(caught.value)
        model.to_empty(device="cpu")
        assert not any(p.is_meta for p in model.parameters())
        assert [tuple(p.shape) for p in model.parameters()] == shapes
        with tp.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
            model.table = tp.arange(3).float()
        out = model(tp.ones(2, 5))
        out.sum().backward()
        return local(out), isinstance(model.inner, FSDPModule), whole(model.outer.bias.grad)

    h = np.tanh(5 * 0.5 + 0.5)
    for out, is_fsdp, grad in on_ranks(2, run):
        close(out, np.tile(7 * h * 0.5 + 0.5 + np.arange(3), (2, 1)))
        assert is_fsdp
        close(grad, np.full(3, 2.0))


def test_a_meta_model_takes_a_sharded_state_dict_by_assignment() -> None:
    def run(rank: int) -> Any:
        source = fully_shard(seeded(Mlp))
        with tp.device("meta"):
            model = Mlp()
        fully_shard(model)
        with pytest.raises(RuntimeError, match="assign=True"):
            model.load_state_dict(source.state_dict())
        model.load_state_dict(source.state_dict(), assign=True)
        return local(model(random(2, 5)))

    for out in on_ranks(2, run):
        close(out, local(seeded(Mlp)(random(2, 5))))


# --- sharded tensors outside their module ---------------------------------------------------------


def test_math_that_mixes_a_shard_with_a_plain_tensor_says_how_to_get_either() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        with pytest.raises(RuntimeError) as caught, tp.no_grad():
            model.inner.weight + tp.ones(7, 5)
        for word in ("inner.weight", "to_local", "full_tensor"):
            assert word in str(caught.value)
        with tp.no_grad():
            doubled = model.inner.weight * 2 + model.inner.weight
        return local(doubled)

    start = local(seeded(Mlp).inner.weight)
    for rank, found in enumerate(on_ranks(2, run)):
        close(found, 3 * own_slice(start, 2, rank))
