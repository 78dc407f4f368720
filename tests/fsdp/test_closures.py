"""A compiled call is indistinguishable from running the Python; and it is not traced without need.

Most tests run the same steps with a sharded model and with the plain one, and compare all of it.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import datetime
import enum
import functools
import os
import random as python_random
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import (
    Lm,
    Mlp,
    close,
    counted_traces,
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
    whole,
)

import tensorplay as tp
import tensorplay.distributed as dist
import tensorplay.nn as nn
import tensorplay.nn.functional as F
from tensorplay.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from tensorplay.nn._module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

Drive = Callable[[Any, int], Any]


def same(got: Any, wanted: Any) -> None:
    """Asserts that two nested results are equal within rounding."""
    if isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted), (got, wanted)
        for a, b in zip(got, wanted, strict=True):
            same(a, b)
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        same(list(got.values()), list(wanted.values()))
    elif isinstance(wanted, np.ndarray):
        assert got.dtype == wanted.dtype
        close(got, wanted)
    elif isinstance(wanted, float):
        close(got, wanted)
    else:
        assert got == wanted


def same_as_plain(make: Callable[[], Any], drive: Drive, world: int = 1) -> None:
    """``drive(model, rank)`` returns the same with a sharded model as with a plain one."""
    wanted = [drive(seeded(make), rank) for rank in range(world)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = on_ranks(world, lambda rank: drive(fully_shard(seeded(make)), rank))
    for got, expected in zip(found, wanted, strict=True):
        same(got, expected)


def x23() -> Any:
    """An input of shape (2, 3)."""
    return random(2, 3, seed=3)


class Layer(nn.Module):
    """A linear layer of width 3 to build on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)


# --- attributes -----------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Config:
    scale: float


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Scaling:
    """A callable object."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, x: Any) -> Any:
        return x * self.scale


def times(factor: float) -> Any:
    return lambda x: x * factor


def in_place(change: Callable[[Any], Any]) -> Any:
    return lambda m: change(m.value)


def rebind(make: Callable[[], Any]) -> Any:
    return lambda m: setattr(m, "value", make())


# name: (initial value, change, change back, use)
ATTRIBUTES: dict[str, tuple[Any, Any, Any, Any]] = {
    "number": (lambda: 2.0, rebind(lambda: 4.0), rebind(lambda: 2.0), lambda x, v: x * v),
    "bool": (lambda: True, rebind(lambda: False), rebind(lambda: True),
             lambda x, v: -x if v else x),
    "int_like_bool": (lambda: 1, rebind(lambda: True), rebind(lambda: 1),
                      lambda x, v: x if v is True else -x),
    "minus_zero": (lambda: 0.0, rebind(lambda: -0.0), rebind(lambda: 0.0),
                   lambda x, v: x * float(np.copysign(1.0, v))),
    "string": (lambda: "a", rebind(lambda: "b"), rebind(lambda: "a"),
               lambda x, v: x if v == "a" else -x),
    "none": (lambda: None, rebind(lambda: 3.0), rebind(lambda: None),
             lambda x, v: x if v is None else x * v),
    "enum": (lambda: Color.RED, rebind(lambda: Color.BLUE), rebind(lambda: Color.RED),
             lambda x, v: x * v.value),
    "dtype": (lambda: tp.float32, rebind(lambda: tp.float64), rebind(lambda: tp.float32),
              lambda x, v: x.to(v)),
    "list_in_place": (lambda: [2.0], in_place(lambda v: v.__setitem__(0, 4.0)),
                      in_place(lambda v: v.__setitem__(0, 2.0)), lambda x, v: x * v[0]),
    "list_longer": (lambda: [2.0], in_place(lambda v: v.append(4.0)),
                    in_place(lambda v: v.pop()), lambda x, v: x * sum(v)),
    "nested_list": (lambda: [[2.0]], in_place(lambda v: v[0].append(4.0)),
                    in_place(lambda v: v[0].pop()), lambda x, v: x * sum(v[0])),
    "dict_config": (lambda: {"scale": 2.0}, in_place(lambda v: v.update(scale=4.0)),
                    in_place(lambda v: v.update(scale=2.0)), lambda x, v: x * v["scale"]),
    "set": (lambda: {1}, in_place(lambda v: v.add(2)), in_place(lambda v: v.discard(2)),
            lambda x, v: x * len(v)),
    "tuple": (lambda: (2.0,), rebind(lambda: (4.0,)), rebind(lambda: (2.0,)),
              lambda x, v: x * v[0]),
    "deque": (lambda: collections.deque([2.0]), in_place(lambda v: v.append(4.0)),
              in_place(lambda v: v.pop()), lambda x, v: x * sum(v)),
    "dataclass": (lambda: Config(2.0), in_place(lambda v: setattr(v, "scale", 4.0)),
                  in_place(lambda v: setattr(v, "scale", 2.0)), lambda x, v: x * v.scale),
    "namespace": (lambda: types.SimpleNamespace(scale=2.0),
                  in_place(lambda v: setattr(v, "scale", 4.0)),
                  in_place(lambda v: setattr(v, "scale", 2.0)), lambda x, v: x * v.scale),
    "slots": (lambda: Slotted(2.0), in_place(lambda v: setattr(v, "scale", 4.0)),
              in_place(lambda v: setattr(v, "scale", 2.0)), lambda x, v: x * v.scale),
    "callable_object": (lambda: Scaling(2.0), in_place(lambda v: setattr(v, "scale", 4.0)),
                        in_place(lambda v: setattr(v, "scale", 2.0)), lambda x, v: v(x)),
    "numpy_in_place": (lambda: np.array([2.0]), in_place(lambda v: v.__setitem__(0, 4.0)),
                       in_place(lambda v: v.__setitem__(0, 2.0)), lambda x, v: x * float(v[0])),
    "numpy_scalar": (lambda: np.float64(2.0), rebind(lambda: np.float64(4.0)),
                     rebind(lambda: np.float64(2.0)), lambda x, v: x * v),
    "function": (lambda: F.relu, rebind(lambda: F.silu), rebind(lambda: F.relu),
                 lambda x, v: v(x)),
    "lambda_with_cell": (lambda: times(2.0), rebind(lambda: times(4.0)),
                         rebind(lambda: times(2.0)), lambda x, v: v(x)),
    "partial": (lambda: functools.partial(F.leaky_relu, negative_slope=0.1),
                rebind(lambda: functools.partial(F.leaky_relu, negative_slope=0.5)),
                rebind(lambda: functools.partial(F.leaky_relu, negative_slope=0.1)),
                lambda x, v: v(x)),
    "tensor_rebound": (lambda: tp.ones(3) * 2, rebind(lambda: tp.ones(3) * 4),
                       rebind(lambda: tp.ones(3) * 2), lambda x, v: x * v),
    "tensor_in_place": (lambda: tp.ones(3) * 2, in_place(lambda v: v.mul_(2)),
                        in_place(lambda v: v.div_(2)), lambda x, v: x * v),
    "tensor_in_list": (lambda: [tp.ones(3) * 2],
                       in_place(lambda v: v.__setitem__(0, tp.ones(3) * 4)),
                       in_place(lambda v: v[0].div_(2)), lambda x, v: x * v[0]),
    "submodule": (lambda: nn.ReLU(), rebind(lambda: nn.Tanh()), rebind(lambda: nn.ReLU()),
                  lambda x, v: v(x)),
}  # fmt: skip


class Uses(Layer):
    """Applies ``use`` to the result and ``value``."""

    def __init__(self, value: Any, use: Any) -> None:
        super().__init__()
        self.value = value
        self.use = use

    def forward(self, x: Any) -> Any:
        return self.use(self.linear(x), self.value)


@pytest.mark.parametrize("name", list(ATTRIBUTES))
def test_a_changed_attribute_is_seen(name: str) -> None:
    value, change, change_back, use = ATTRIBUTES[name]

    def drive(model: Any, rank: int) -> Any:
        out = [local(model(x23()))]
        for edit in (change, change_back, change):
            edit(model)
            out.append(local(model(x23())))
        return out

    same_as_plain(lambda: Uses(value(), use), drive, 2)


@pytest.mark.parametrize(
    "name", ["number", "bool", "dict_config", "dataclass", "list_in_place", "partial", "enum"]
)
def test_a_changed_attribute_changed_back_finds_the_earlier_trace(name: str) -> None:
    value, change, change_back, use = ATTRIBUTES[name]
    model = fully_shard(Uses(value(), use))
    with no_warnings():
        for _ in range(3):
            model(x23())
            change(model)
            model(x23())
            change_back(model)
    assert traces(model) == 2


def test_an_attribute_of_a_submodule_and_of_a_nested_fsdp_module() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = Uses(2.0, lambda x, v: x * v)
            self.nested = Uses(2.0, lambda x, v: x * v)

        def forward(self, x: Any) -> Any:
            return self.nested(self.plain(x))

    def make() -> Any:
        return Outer()

    def drive(model: Any, rank: int) -> Any:
        out = [local(model(x23()))]
        model.plain.value = 3.0
        out.append(local(model(x23())))
        model.nested.value = 5.0
        out.append(local(model(x23())))
        return out

    def run(rank: int) -> Any:
        model = seeded(make)
        fully_shard(model.nested)
        return drive(fully_shard(model), rank)

    wanted = drive(seeded(make), 0)
    for got in on_ranks(2, run):
        same(got, wanted)


def test_a_deleted_attribute_is_seen() -> None:
    class Optional_(Layer):
        def forward(self, x: Any) -> Any:
            return self.linear(x) * getattr(self, "scale", 1.0)

    def drive(model: Any, rank: int) -> Any:
        out = [local(model(x23()))]
        model.scale = 2.0
        out.append(local(model(x23())))
        del model.scale
        return [*out, local(model(x23()))]

    same_as_plain(Optional_, drive)


def test_a_class_attribute_is_seen() -> None:
    class Scaled(Layer):
        scale = 2.0

        def forward(self, x: Any) -> Any:
            return self.linear(x) * self.scale

    def drive(model: Any, rank: int) -> Any:
        out = [local(model(x23()))]
        Scaled.scale = 4.0
        out.append(local(model(x23())))
        Scaled.scale = 2.0
        return out

    same_as_plain(Scaled, drive)


def test_a_method_replaced_on_the_class_is_seen() -> None:
    class Patched(Layer):
        def scale(self, x: Any) -> Any:
            return x * 2

        def forward(self, x: Any) -> Any:
            return self.scale(self.linear(x))

    original = Patched.scale

    def drive(model: Any, rank: int) -> Any:
        out = [local(model(x23()))]
        Patched.scale = lambda self, x: x * 3  # type: ignore[method-assign]
        out.append(local(model(x23())))
        Patched.scale = original  # type: ignore[method-assign]
        return out

    same_as_plain(Patched, drive)


def test_a_bound_method_as_an_attribute() -> None:
    class Bound(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.run = self.double

        def double(self, x: Any) -> Any:
            return x * 2

        def forward(self, x: Any) -> Any:
            return self.run(self.linear(x))

    def drive(model: Any, rank: int) -> Any:
        return [local(model(x23())) for _ in range(2)]

    same_as_plain(Bound, drive, 2)


class Dropping(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.drop(self.linear(x)) if self.training else -self.linear(x)


def test_changed_training_is_seen_and_finds_the_earlier_trace() -> None:
    model = fully_shard(seeded(Dropping))
    twin = seeded(Dropping)
    for _ in range(3):
        for mode in (True, False):
            for m in (model, twin):
                m.train(mode)
                tp.manual_seed(1)
                out = m(x23())
            close(local(model.eval()(x23())), local(twin.eval()(x23())))
    assert out is not None
    assert traces(model) == 2


def test_an_attribute_set_inside_forward() -> None:
    class Counts(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.last: Any = None

        def forward(self, x: Any) -> Any:
            self.calls += 1
            self.last = self.linear(x)
            return self.last * self.calls

    def drive(model: Any, rank: int) -> Any:
        out = []
        for _ in range(3):
            y = model(x23() * (rank + 1))
            out += [local(y), model.calls, local(model.last)]
        return out

    same_as_plain(Counts, drive, 2)


def test_an_attribute_of_another_object_set_inside_forward() -> None:
    class Notes(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.note = types.SimpleNamespace(calls=0)

        def forward(self, x: Any) -> Any:
            self.note.calls += 1
            return self.linear(x) * self.note.calls

    def drive(model: Any, rank: int) -> Any:
        return [(local(model(x23())), model.note.calls) for _ in range(3)]

    same_as_plain(Notes, drive, 2)


def test_own_dict_written_inside_forward() -> None:
    class Sneaky(Layer):
        def forward(self, x: Any) -> Any:
            self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
            return self.linear(x)

    def drive(model: Any, rank: int) -> Any:
        return [(local(model(x23())), model.calls) for _ in range(3)]

    same_as_plain(Sneaky, drive)


def test_a_module_registered_inside_forward() -> None:
    class Lazy(Layer):
        def forward(self, x: Any) -> Any:
            if not hasattr(self, "shift"):
                self.register_buffer("shift", tp.ones(3) * 2)
                self.add_module("act", nn.Tanh())
            return self.act(self.linear(x)) + self.shift

    def drive(model: Any, rank: int) -> Any:
        out = [local(model(x23())) for _ in range(3)]
        return [*out, list(dict(model.named_buffers())), len(list(model.children()))]

    same_as_plain(Lazy, drive)


# --- tensor values that Python reads --------------------------------------------------------------

READS: dict[str, Callable[[Any], float]] = {
    "branch": lambda x: 2.0 if x.sum() > 0 else -1.0,
    "item": lambda x: x[0, 0].item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.abs().sum() * 10),
    "tolist": lambda x: x.tolist()[0][1],
    "numpy": lambda x: float(x.detach().numpy()[1, 1]),
    "any": lambda x: 1.0 if bool((x > 0.5).any()) else 3.0,
    "equal": lambda x: 2.0 if tp.equal(x, x.abs()) else 1.0,
    "loop": lambda x: float(sum(v.item() for v in x[0])),
    "format": lambda x: float(f"{x[0, 0].item():.1f}"),
    "nonzero": lambda x: float(tp.nonzero(x > 0).shape[0]),
    "isnan": lambda x: 1.0 if tp.isnan(x).any() else 2.0,
}


@pytest.mark.parametrize("read", list(READS))
def test_a_tensor_value_read_in_forward(read: str) -> None:
    class Reads(Layer):
        def forward(self, x: Any) -> Any:
            return self.linear(x) * READS[read](x)

    def drive(model: Any, rank: int) -> Any:
        return [local(model(random(2, 3, seed=seed))) for seed in (1, 2, 3, 1)]

    same_as_plain(Reads, drive, 2)


def test_a_branch_on_an_intermediate_value_trains_as_the_plain_module() -> None:
    class Branches(Layer):
        def forward(self, x: Any) -> Any:
            y = self.linear(x)
            return y * 2 if y.sum() > 0 else y - 1

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Branches))
        model(random(2, 3, seed=4)).square().sum().backward()
        model(random(2, 3, seed=5)).square().sum().backward()
        return whole(model.linear.weight.grad)

    twin = seeded(Branches)
    for seed in (4, 5):
        twin(random(2, 3, seed=seed)).square().sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for grad in on_ranks(2, run):
            close(grad, local(twin.linear.weight.grad))


# --- effects --------------------------------------------------------------------------------------


def test_print_prints_at_every_call(capsys: Any) -> None:
    class Prints(Layer):
        def forward(self, x: Any) -> Any:
            print("shape", tuple(x.shape))
            return self.linear(x)

    with pytest.warns(UserWarning, match="runs eagerly.*print"):
        model = fully_shard(seeded(Prints))
        for _ in range(3):
            model(x23())
    assert capsys.readouterr().out == "shape (2, 3)\n" * 3


def test_print_through_map_prints_at_every_call(capsys: Any) -> None:
    class Prints(Layer):
        def forward(self, x: Any) -> Any:
            list(map(print, ["hello"]))
            return self.linear(x)

    same_as_plain(Prints, lambda model, rank: [local(model(x23())) for _ in range(3)])
    assert capsys.readouterr().out == "hello\n" * 6


def test_print_on_one_rank_only(capsys: Any) -> None:
    class Prints(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.rank = dist.get_rank() if dist.is_initialized() else 0

        def forward(self, x: Any) -> Any:
            if self.rank == 0:
                print("rank", self.rank)
            return self.linear(x)

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Prints))
        for _ in range(2):
            model(x23()).sum().backward()
        return whole(model.linear.bias.grad)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for grad in on_ranks(2, run):
            close(grad, np.full(3, 4.0))
    assert capsys.readouterr().out == "rank 0\n" * 2


def test_printing_that_starts_on_one_rank_after_both_know_the_call(capsys: Any) -> None:
    class Logs(Mlp):
        log = False

        def forward(self, x: Any) -> Any:
            if self.log:
                print("logged")
            return super().forward(x)

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Logs))
        for step in range(3):
            model.log = rank == 0 and step == 1
            mlp_loss(model, rank, 0).backward()
        return local(model.inner.weight.grad)

    grads = []
    for rank in range(2):
        twin = seeded(Mlp)
        mlp_loss(twin, rank, 0).backward()
        grads.append(local(twin.inner.weight.grad))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rank, grad in enumerate(on_ranks(2, run)):
            close(grad, 3 * own_slice((grads[0] + grads[1]) / 2, 2, rank))
    assert capsys.readouterr().out == "logged\n"


def test_a_file_written_in_forward(tmp_path: Any) -> None:
    log = tmp_path / "log"

    class Writes(Layer):
        def forward(self, x: Any) -> Any:
            with open(log, "a") as file:
                file.write("x")
            return self.linear(x)

    same_as_plain(Writes, lambda model, rank: [local(model(x23())) for _ in range(3)])
    assert log.read_text() == "x" * 6


def test_a_warning_in_forward_is_shown() -> None:
    class Warns(Layer):
        def forward(self, x: Any) -> Any:
            warnings.warn("from forward", stacklevel=1)
            return self.linear(x)

    model = fully_shard(seeded(Warns))
    for _ in range(2):
        with pytest.warns(UserWarning, match="from forward"):
            model(x23())


LIST: list[Any] = []
DEQUE: collections.deque[Any] = collections.deque()
DICT: dict[str, Any] = {}


@pytest.mark.parametrize("where", ["attribute", "global", "closure", "deque", "dict", "default"])
def test_an_append_inside_forward_happens_once_per_call(where: str) -> None:
    for found in (LIST, DEQUE, DICT):
        found.clear()
    cell: list[Any] = []

    class Appends(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def forward(self, x: Any, default: Any = []) -> Any:  # noqa: B006
            y = self.linear(x)
            if where == "attribute":
                self.seen.append(y)
            elif where == "global":
                LIST.append(y)
            elif where == "closure":
                cell.append(y)
            elif where == "deque":
                DEQUE.append(y)
            elif where == "dict":
                DICT[str(len(DICT))] = y
            else:
                default.append(y)
            return y

    model = fully_shard(seeded(Appends))
    with pytest.warns(UserWarning, match="runs eagerly"):
        out = [model(x23()) for _ in range(3)]
    seen = {
        "attribute": model.seen,
        "global": LIST,
        "closure": cell,
        "deque": list(DEQUE),
        "dict": list(DICT.values()),
        "default": Appends.forward.__defaults__[0],  # type: ignore[index]
    }[where]
    assert len(seen) == 3
    for kept, y in zip(seen, out, strict=True):
        np.testing.assert_array_equal(local(kept), local(y))


COUNT = 0


def test_a_global_written_inside_forward() -> None:
    class Counts(Layer):
        def forward(self, x: Any) -> Any:
            global COUNT
            COUNT += 1
            return self.linear(x) * COUNT

    def drive(model: Any, rank: int) -> Any:
        global COUNT
        COUNT = 0
        return [(local(model(x23())), COUNT) for _ in range(3)]

    same_as_plain(Counts, drive)


def test_a_global_made_inside_forward() -> None:
    class Makes(Layer):
        def forward(self, x: Any) -> Any:
            global MADE
            MADE = globals().get("MADE", 0) + 1
            return self.linear(x)

    def drive(model: Any, rank: int) -> Any:
        globals().pop("MADE", None)
        return [(local(model(x23())), globals().get("MADE")) for _ in range(3)]

    same_as_plain(Makes, drive)


def test_a_closure_variable_written_inside_forward() -> None:
    def make_counted() -> Any:
        count = 0

        class Counts(Layer):
            def forward(self, x: Any) -> Any:
                nonlocal count
                count += 1
                return self.linear(x) * count

        return Counts()

    same_as_plain(make_counted, lambda model, rank: [local(model(x23())) for _ in range(3)])


# --- results from outside -------------------------------------------------------------------------

CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
IMPURE: dict[str, Callable[[], float]] = {
    "random": python_random.random,
    "randint": lambda: float(python_random.randint(0, 10**9)),
    "numpy": lambda: float(np.random.rand()),
    "generator": lambda: float(np.random.default_rng().random()),
    "time": lambda: time.time() % 1.0,
    "perf_counter": lambda: time.perf_counter() % 1.0,
    "datetime": lambda: datetime.datetime.now().microsecond / 1e6,
    "urandom": lambda: float(os.urandom(1)[0]),
    "uuid": lambda: float(__import__("uuid").uuid4().int % 1000),
}


@pytest.mark.parametrize("name", list(IMPURE))
def test_python_randomness_and_time_differ_from_call_to_call(name: str) -> None:
    class Draws(Layer):
        def forward(self, x: Any) -> Any:
            return self.linear(x) * 0 + IMPURE[name]()

    model = fully_shard(seeded(Draws))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {model(x23())[0, 0].item() for _ in range(6)}
    assert len(found) > 1


def test_the_environment_and_context_variables_are_read_at_every_call() -> None:
    class Reads(Layer):
        def forward(self, x: Any) -> Any:
            return self.linear(x) * float(os.environ.get("TP_SCALE", "1")) * CONTEXT.get()

    def drive(model: Any, rank: int) -> Any:
        out = [local(model(x23()))]
        os.environ["TP_SCALE"] = "3"
        out.append(local(model(x23())))
        token = CONTEXT.set(5.0)
        out.append(local(model(x23())))
        CONTEXT.reset(token)
        del os.environ["TP_SCALE"]
        return out

    same_as_plain(Reads, drive)


def test_the_rank_read_in_forward_is_each_ranks_own() -> None:
    class Ranked(Layer):
        def forward(self, x: Any) -> Any:
            return self.linear(x) * 0 + dist.get_rank()

    def run(rank: int) -> Any:
        return fully_shard(seeded(Ranked))(x23())[0, 0].item()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert on_ranks(2, run) == [0.0, 1.0]


def test_a_rank_kept_as_an_attribute() -> None:
    class Ranked(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.rank = dist.get_rank()

        def forward(self, x: Any) -> Any:
            return self.linear(x) * (1 + self.rank)

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Ranked))
        out = model(x23())
        out.sum().backward()
        return local(out), whole(model.linear.bias.grad)

    plain = seeded(Layer).linear(x23())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rank, (out, grad) in enumerate(on_ranks(2, run)):
            close(out, local(plain) * (1 + rank))
            close(grad, np.full(3, 3.0))


def test_ranks_whose_batches_have_different_sizes() -> None:
    """The last batch of an epoch; texts of different lengths."""

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        for step in range(2):
            model(random(2 + rank + step, 5, seed=rank)).sum().backward()
        return whole(model.outer.bias.grad)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for grad in on_ranks(2, run):
            close(grad, np.full(3, (2 + 3 + 3 + 4) / 2))


def test_a_smaller_last_batch_on_one_rank() -> None:
    """One rank repeats a call that it knows while the other meets a new shape."""

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        for step in range(4):
            rows = 3 if rank == 1 and step == 2 else 4
            model(random(rows, 5, seed=rank)).sum().backward()
        return whole(model.outer.bias.grad)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for grad in on_ranks(2, run):
            close(grad, np.full(3, (16 + 15) / 2))


# --- globals and closure variables ----------------------------------------------------------------

SCALE = 2.0
SCALES = [2.0]
SETTINGS = {"scale": 2.0}
OBJECT = types.SimpleNamespace(scale=2.0)
NAMESPACE = types.ModuleType("settings")
NAMESPACE.scale = 2.0  # type: ignore[attr-defined]
DROP = nn.Dropout(0.5)
TENSOR = tp.ones(3) * 2


class Static:
    scale = 2.0


def helper(x: Any) -> Any:
    return x * SCALE


def other_helper(x: Any) -> Any:
    return x * 7


class ReadsGlobals(Layer):
    def forward(self, x: Any) -> Any:
        y = helper(self.linear(x)) * SCALES[0] * SETTINGS["scale"] * OBJECT.scale
        return DROP(y * NAMESPACE.scale * Static.scale * TENSOR)  # type: ignore[attr-defined]


GLOBALS: dict[str, tuple[Any, Any]] = {
    "number": (lambda g: g.update(SCALE=4.0), lambda g: g.update(SCALE=2.0)),
    "list_in_place": (lambda g: SCALES.__setitem__(0, 4.0), lambda g: SCALES.__setitem__(0, 2.0)),
    "list_rebound": (lambda g: g.update(SCALES=[4.0]), lambda g: g.update(SCALES=[2.0])),
    "dict": (lambda g: SETTINGS.update(scale=4.0), lambda g: SETTINGS.update(scale=2.0)),
    "object": (lambda g: setattr(OBJECT, "scale", 4.0), lambda g: setattr(OBJECT, "scale", 2.0)),
    "class": (lambda g: setattr(Static, "scale", 4.0), lambda g: setattr(Static, "scale", 2.0)),
    "module": (lambda g: setattr(NAMESPACE, "scale", 4.0),
               lambda g: setattr(NAMESPACE, "scale", 2.0)),
    "function": (lambda g: g.update(helper=other_helper), lambda g: g.update(helper=HELPER)),
    "tensor_in_place": (lambda g: TENSOR.mul_(2), lambda g: TENSOR.div_(2)),
    "tensor_rebound": (lambda g: g.update(TENSOR=tp.ones(3) * 4),
                       lambda g: g.update(TENSOR=tp.ones(3) * 2)),
}  # fmt: skip
HELPER = helper


@pytest.mark.parametrize("name", list(GLOBALS))
def test_a_changed_global_is_seen(name: str) -> None:
    DROP.eval()
    change, change_back = GLOBALS[name]

    def drive(model: Any, rank: int) -> Any:
        out = [local(model(x23()))]
        for edit in (change, change_back, change, change_back):
            edit(globals())
            out.append(local(model(x23())))
        return out

    same_as_plain(ReadsGlobals, drive)


def test_a_global_changed_back_finds_the_earlier_trace() -> None:
    DROP.eval()
    model = fully_shard(seeded(ReadsGlobals))
    for _ in range(3):
        for name in ("number", "dict", "object"):
            model(x23())
            GLOBALS[name][0](globals())
            model(x23())
            GLOBALS[name][1](globals())
    assert traces(model) == 4


def test_a_global_module_that_changes_its_mode() -> None:
    model = fully_shard(seeded(ReadsGlobals))
    DROP.eval()
    first = local(model(x23()))
    DROP.train()
    dropped = [local(model(x23())) for _ in range(4)]
    DROP.eval()
    assert any((d == 0).any() for d in dropped)
    assert len({d.tobytes() for d in dropped}) > 1
    np.testing.assert_array_equal(local(model(x23())), first)


def make_with_cell(scale: Any) -> tuple[Any, Any]:
    class Reads(Layer):
        def forward(self, x: Any) -> Any:
            return self.linear(x) * (scale[0] if isinstance(scale, list) else scale)

    def change(value: Any) -> None:
        nonlocal scale
        scale = value

    return Reads, change


@pytest.mark.parametrize("kind", ["number", "list", "tensor"])
def test_a_changed_closure_variable_is_seen(kind: str) -> None:
    def value(number: float) -> Any:
        return {"number": number, "list": [number], "tensor": tp.ones(3) * number}[kind]

    def run(sharded: bool) -> Any:
        cls, change = make_with_cell(value(2.0))
        model = fully_shard(seeded(cls)) if sharded else seeded(cls)
        out = [local(model(x23()))]
        for number in (4.0, 2.0, 3.0):
            change(value(number))
            out.append(local(model(x23())))
        return out

    same(run(True), run(False))


def test_a_closure_variable_of_a_helper_that_forward_calls() -> None:
    def make_helper() -> Any:
        factor = 2.0

        def run(x: Any) -> Any:
            return x * factor

        def change(value: float) -> None:
            nonlocal factor
            factor = value

        return run, change

    class Helped(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table = {"run": make_helper()}

        def forward(self, x: Any) -> Any:
            return self.table["run"][0](self.linear(x))

    def drive(model: Any, rank: int) -> Any:
        out = [local(model(x23()))]
        model.table["run"][1](5.0)
        return [*out, local(model(x23()))]

    same_as_plain(Helped, drive)


def test_tensors_of_each_ranks_own_closure() -> None:
    def run(rank: int) -> Any:
        own = tp.ones(3) * (rank + 1)

        class Adds(Layer):
            def forward(self, x: Any) -> Any:
                return self.linear(x) * 0 + own

        model = fully_shard(seeded(Adds))
        return [local(model(x23()))[0, 0] for _ in range(2)]

    assert on_ranks(2, run) == [[1.0, 1.0], [2.0, 2.0]]


def test_gradients_reach_tensors_from_outside() -> None:
    def run(sharded: bool) -> Any:
        outside = random(3, seed=8).requires_grad_()
        derived = outside * 2

        class Adds(Layer):
            def __init__(self) -> None:
                super().__init__()
                self.kept = [random(3, seed=9).requires_grad_()]

            def forward(self, x: Any) -> Any:
                return self.linear(x) * derived + self.kept[0]

        model = fully_shard(seeded(Adds)) if sharded else seeded(Adds)
        model(x23()).square().sum().backward()
        return local(outside.grad), local(model.kept[0].grad)

    same(run(True), run(False))


@functools.cache
def cached_table(length: int) -> Any:
    return tp.arange(length).float() * 2


class ReadsCached(Layer):
    def forward(self, x: Any) -> Any:
        return self.linear(x) + cached_table(3)


def test_a_table_cached_by_lru_cache_stays_usable() -> None:
    def drive(model: Any, rank: int) -> Any:
        cached_table.cache_clear()
        return [local(model(random(n, 3))) for n in (2, 4, 2)] + [local(cached_table(3))]

    same_as_plain(ReadsCached, drive)


class MemoTable(Layer):
    """Keeps tables that it made in a dict, and one as a cached property."""

    def __init__(self) -> None:
        super().__init__()
        self.memo: dict[int, Any] = {}

    @functools.cached_property
    def shift(self) -> Any:
        return tp.arange(3).float()

    def forward(self, x: Any) -> Any:
        rows = x.shape[0]
        if rows not in self.memo:
            self.memo[rows] = tp.arange(rows).float().unsqueeze(1)
        return self.linear(x) + self.memo[rows] + self.shift


def test_tables_that_forward_keeps_for_itself() -> None:
    def drive(model: Any, rank: int) -> Any:
        out = [local(model(random(n, 3))) for n in (2, 3, 2, 3)]
        return [*out, local(model.memo[3]), local(model.shift)]

    same_as_plain(MemoTable, drive, 2)


def namespace_with(value: float) -> Any:
    module = types.ModuleType("settings")
    vars(module).update(tp=tp, TABLE=tp.ones(3) * value)
    exec("def apply(x):\n    return x * TABLE", vars(module))
    return module


def test_globals_of_the_same_name_in_two_modules() -> None:
    first, second = namespace_with(1.0), namespace_with(2.0)

    class Both(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.functions = [first.apply, second.apply]

        def forward(self, x: Any) -> Any:
            y = self.linear(x)
            return self.functions[1](y) + 100 * self.functions[0](y)

    def drive(model: Any, rank: int) -> Any:
        first.TABLE, second.TABLE = tp.ones(3), tp.ones(3) * 2
        out = [local(model(x23()))]
        first.TABLE = tp.ones(3) * 5
        out.append(local(model(x23())))
        second.TABLE = tp.ones(3) * 7
        return [*out, local(model(x23()))]

    same_as_plain(Both, drive)


def test_a_replaced_library_function_is_seen(monkeypatch: Any) -> None:
    class Activates(Layer):
        def forward(self, x: Any) -> Any:
            return F.relu(self.linear(x))

    def drive(model: Any, rank: int) -> Any:
        out = [local(model(x23()))]
        with monkeypatch.context() as patch:
            patch.setattr(F, "relu", lambda x: x * 3)
            out.append(local(model(x23())))
        return [*out, local(model(x23()))]

    same_as_plain(Activates, drive)


# --- hooks ----------------------------------------------------------------------------------------


def test_hooks_of_all_modules_added_after_a_trace() -> None:
    class Calls(Layer):
        def forward(self, x: Any) -> Any:
            return self.linear(x)

    def double(module: Any, args: Any, out: Any) -> Any:
        return out * 2 if isinstance(module, nn.Linear) else None

    def halve(module: Any, args: Any) -> Any:
        return (args[0] / 2,) if isinstance(module, nn.Linear) else None

    def drive(model: Any, rank: int) -> Any:
        out = [local(model(x23()))]
        for register, hook in (
            (register_module_forward_hook, double),
            (register_module_forward_pre_hook, halve),
        ):
            handle = register(hook)
            out.append(local(model(x23())))
            handle.remove()
            out.append(local(model(x23())))
        return out

    same_as_plain(Calls, drive)


def test_module_forward_hooks_run_at_every_call_and_can_be_removed() -> None:
    def drive(model: Any, rank: int) -> Any:
        seen: list[Any] = []
        out = [local(model(x23()))]
        pre = model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        post = model.register_forward_hook(lambda m, args, y: y + 1)
        out.append(local(model(x23())))
        pre.remove()
        out.append(local(model(x23())))
        post.remove()
        inner = model.inner.register_forward_hook(lambda m, args, y: seen.append(local(y)))
        out += [local(model(x23())), local(model(x23()))]
        inner.remove()
        return [*out, local(model(x23())), seen]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 4)
            self.outer = nn.Linear(4, 3)

        def forward(self, x: Any) -> Any:
            return self.outer(self.inner(x))

    same_as_plain(Two, drive, 2)


def test_hooks_of_a_nested_fsdp_module() -> None:
    def run(rank: int, sharded: bool) -> Any:
        model = seeded(Lm)
        if sharded:
            shard_nested(model)
        model.blocks[0].register_forward_hook(lambda m, args, y: y * 2)
        model.blocks[1].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        return lm_loss(model, 0, 0).item()

    wanted = run(0, False)
    for loss in on_ranks(2, run, True):
        close(loss, wanted)


def test_hooks_with_kwargs_and_always_called_ones() -> None:
    class Takes(Layer):
        def forward(self, x: Any, *, scale: Any, fail: bool = False) -> Any:
            if fail:
                raise ValueError("asked to")
            return self.linear(x) * scale

    def drive(model: Any, rank: int) -> Any:
        seen: list[Any] = []
        model.register_forward_pre_hook(
            lambda m, args, kwargs: (args, {**kwargs, "scale": kwargs["scale"] * 2}),
            with_kwargs=True,
        )
        model.register_forward_hook(
            lambda m, args, kwargs, y: seen.append((sorted(kwargs), y is None)),
            with_kwargs=True,
            always_call=True,
        )
        out = [local(model(x23(), scale=tp.ones(3)))]
        with pytest.raises(ValueError, match="asked to"):
            model(x23(), scale=tp.ones(3), fail=True)
        return [*out, local(model(x23(), scale=tp.ones(3))), seen]

    same_as_plain(Takes, drive)


def test_module_backward_hooks() -> None:
    def drive(model: Any, rank: int) -> Any:
        seen: list[Any] = []
        model.register_full_backward_hook(
            lambda m, gin, gout: seen.append((local(gin[0]), local(gout[0])))
        )
        x = x23().requires_grad_()
        model(x).square().sum().backward()
        return seen, local(x.grad)

    same_as_plain(lambda: nn.Linear(3, 3), drive, 2)


def test_tensor_hooks_on_inputs_and_outputs() -> None:
    def drive(model: Any, rank: int) -> Any:
        seen: list[Any] = []
        x = x23().requires_grad_()
        x.register_hook(lambda g: seen.append(local(g)))
        y = model(x)
        y.register_hook(lambda g: g * 3)
        y.sum().backward()
        return seen, local(x.grad)

    same_as_plain(lambda: nn.Linear(3, 3), drive, 2)


def test_tensor_hooks_set_inside_forward() -> None:
    class Hooked(Layer):
        def forward(self, x: Any) -> Any:
            y = tp.tanh(self.linear(x))
            if y.requires_grad:
                y.register_hook(lambda g: g * 3)
            return y.square()

    def drive(model: Any, rank: int) -> Any:
        x = x23().requires_grad_()
        model(x).sum().backward()
        return local(x.grad)

    same_as_plain(Hooked, drive, 2)


def test_parameter_hooks_see_the_sharded_gradient_once() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        seen: list[Any] = []
        p = model.inner.weight
        p.register_hook(lambda g: g * 2)
        p.register_post_accumulate_grad_hook(lambda q: seen.append((q is p, local(q.grad))))
        mlp_loss(model, rank, 0).backward()
        return seen, local(p.grad)

    grads = []
    for rank in range(2):
        twin = seeded(Mlp)
        mlp_loss(twin, rank, 0).backward()
        grads.append(local(twin.inner.weight.grad))
    for rank, (seen, grad) in enumerate(on_ranks(2, run)):
        assert len(seen) == 1 and seen[0][0]
        close(grad, own_slice(grads[0] + grads[1], 2, rank))
        np.testing.assert_array_equal(seen[0][1], grad)


# --- exceptions -----------------------------------------------------------------------------------


class Trouble(Exception):
    pass


class Fails(Layer):
    """Raises while ``fail`` is set."""

    fail = False

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        if self.fail:
            raise Trouble("as asked", y.shape)
        return y


def test_an_exception_reaches_the_user_as_it_is_and_a_retry_works() -> None:
    def drive(model: Any, rank: int) -> Any:
        out = [local(model(x23()))]
        model.fail = True
        for _ in range(2):
            with pytest.raises(Trouble) as caught:
                model(x23())
            assert caught.value.args[0] == "as asked"
        model.fail = False
        x = x23().requires_grad_()
        y = model(x)
        y.sum().backward()
        return [*out, local(y), local(x.grad)]

    same_as_plain(Fails, drive, 2)


def test_an_exception_that_forward_itself_handles() -> None:
    class Handles(Layer):
        def forward(self, x: Any) -> Any:
            try:
                y = self.linear(tp.cat([x, x], dim=1))
            except (RuntimeError, ValueError, TypeError):
                y = self.linear(x) * 2
            return y

    same_as_plain(Handles, lambda model, rank: [local(model(x23())) for _ in range(2)], 2)


def test_effects_before_an_exception_happen_once() -> None:
    seen: list[int] = []

    class Notes(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.own: list[int] = []

        def forward(self, x: Any) -> Any:
            seen.append(1)
            self.own.append(1)
            raise Trouble

    model = fully_shard(seeded(Notes))
    for count in (1, 2):
        with pytest.raises(Trouble):
            model(x23())
        assert len(seen) == count
        assert len(model.own) == count


def test_a_wrong_shape_raises_what_the_plain_module_raises() -> None:
    def error(model: Any) -> tuple[str, str]:
        with pytest.raises(Exception) as caught, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(tp.ones(2, 4))
        return type(caught.value).__name__, str(caught.value)

    plain = error(seeded(Mlp))
    sharded = fully_shard(seeded(Mlp))
    assert error(sharded) == plain
    close(local(sharded(random(2, 5))), local(seeded(Mlp)(random(2, 5))))


# --- shapes, modes and flags of the inputs --------------------------------------------------------


def test_new_input_shapes_and_dtypes() -> None:
    def drive(model: Any, rank: int) -> Any:
        shapes = [(2, 3), (5, 3), (1, 3), (0, 3), (3,), (2, 2, 3), (2, 3)]
        return [local(model(random(*shape, seed=1))) for shape in shapes]

    same_as_plain(lambda: nn.Linear(3, 3), drive, 2)


def test_the_number_of_traces_grows_with_new_shapes_only() -> None:
    model = fully_shard(seeded(Mlp))
    for rows in (2, 3, 2, 3, 4, 2):
        model(random(rows, 5))
    assert traces(model) == 3


class Flags(Layer):
    """Shows forward's view of its input."""

    def forward(self, x: Any) -> Any:
        scale = 1.0 + 2 * x.requires_grad + 4 * x.is_leaf + 8 * tp.is_grad_enabled()
        return self.linear(x) * scale


def test_requires_grad_and_leafness_of_inputs() -> None:
    def drive(model: Any, rank: int) -> Any:
        leaf = x23().requires_grad_()
        out = [model(x23()), model(leaf), model(leaf * 1), model(leaf.detach())]
        with tp.no_grad():
            out += [model(x23()), model(leaf), model(leaf * 1)]
        return [(local(y), y.requires_grad, y.is_leaf) for y in out]

    same_as_plain(Flags, drive, 2)


def test_grad_modes_inside_forward() -> None:
    class Modes(Layer):
        def forward(self, x: Any) -> Any:
            with tp.no_grad():
                constant = self.linear(x)
            kept = self.linear(x)
            with tp.set_grad_enabled(False):
                also = kept * 2
            return kept * constant + kept.detach(), constant, also, kept.detach()

    def drive(model: Any, rank: int) -> Any:
        x = x23().requires_grad_()
        out = model(x)
        out[0].sum().backward()
        return [(local(y), y.requires_grad) for y in out], local(x.grad)

    same_as_plain(Modes, drive, 2)


def test_a_wholly_no_grad_forward_returns_outputs_without_graph() -> None:
    class Frozen(Layer):
        @tp.no_grad()
        def forward(self, x: Any) -> Any:
            return self.linear(x)

    def drive(model: Any, rank: int) -> Any:
        y = model(x23())
        return local(y), y.requires_grad, y.grad_fn is None

    same_as_plain(Frozen, drive, 2)


def test_a_custom_autograd_function_inside_forward() -> None:
    class Triple(tp.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return grad * x * 3

    class Custom(Layer):
        def forward(self, x: Any) -> Any:
            return Triple.apply(self.linear(x))

    def drive(model: Any, rank: int) -> Any:
        x = x23().requires_grad_()
        y = model(x)
        y.sum().backward()
        return local(y), local(x.grad)

    same_as_plain(Custom, drive, 2)


def test_inner_gradients_computed_inside_forward() -> None:
    class Penalised(Layer):
        def forward(self, x: Any) -> Any:
            with tp.enable_grad():
                probe = x.detach().requires_grad_()
                (slope,) = tp.autograd.grad(self.linear(probe).square().sum(), probe)
            return self.linear(x) + slope

    def drive(model: Any, rank: int) -> Any:
        x = x23().requires_grad_()
        y = model(x)
        y.sum().backward()
        return local(y), local(x.grad)

    same_as_plain(Penalised, drive)


def test_create_graph_says_what_it_does_not_reach() -> None:
    model = fully_shard(seeded(Mlp))
    x = random(4, 5).requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph"):
        tp.autograd.grad(model(x).square().sum(), x, create_graph=True)


# --- aliases --------------------------------------------------------------------------------------


class InPlace(Layer):
    def forward(self, x: Any) -> Any:
        x.add_(1.0)
        return self.linear(x)


def test_in_place_writes_to_inputs_reach_the_caller() -> None:
    def drive(model: Any, rank: int) -> Any:
        out = []
        base = random(4, 3, seed=2)
        for x in (x23(), base[1:3], base[:2]):
            y = model(x)
            out += [local(y), local(x)]
        return [*out, local(base)]

    same_as_plain(InPlace, drive, 2)


def test_in_place_writes_to_intermediates() -> None:
    class Works(Layer):
        def forward(self, x: Any) -> Any:
            y = self.linear(x)
            y[:, 0] = 5.0
            y.mul_(2)
            z = y.view(-1)
            z[1] += 10
            return y

    def drive(model: Any, rank: int) -> Any:
        x = x23().requires_grad_()
        y = model(x)
        y.sum().backward()
        return local(y), local(x.grad)

    same_as_plain(Works, drive, 2)


class Aliases(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", tp.zeros(3))

    def forward(self, x: Any) -> Any:
        y = self.linear(x).detach()
        return {
            "input": x,
            "view_of_input": x[0],
            "buffer": self.table,
            "view_of_buffer": self.table[:2],
            "y": y,
            "same_y": y,
            "row_of_y": y[0],
        }


def test_outputs_that_alias_inputs_buffers_and_each_other() -> None:
    def drive(model: Any, rank: int) -> Any:
        x = x23()
        out = model(x)
        facts = [out["input"] is x, out["buffer"] is model.table, out["same_y"] is out["y"]]
        out["view_of_input"].fill_(7.0)
        out["view_of_buffer"].fill_(8.0)
        out["row_of_y"].fill_(9.0)
        again = model(x)
        return facts, local(x), local(model.table), local(out["y"]), local(again["buffer"])

    same_as_plain(Aliases, drive, 2)


@pytest.mark.parametrize("key", ["input", "y", "same_y", "row_of_y", "buffer"])
def test_each_kind_of_alias_alone(key: str) -> None:
    class One(Aliases):
        def forward(self, x: Any) -> Any:
            out = super().forward(x)
            return out[key], out["y"], x

    def drive(model: Any, rank: int) -> Any:
        x = x23()
        out = model(x)
        with tp.no_grad():
            out[0].add_(1.0)
        return [local(t) for t in out], local(x), local(model.table), out[2] is x

    same_as_plain(One, drive, 2)


def test_differentiable_outputs_that_share_a_storage() -> None:
    class Views(Layer):
        def forward(self, x: Any) -> Any:
            y = self.linear(x)
            return y, y[0], y.T

    def drive(model: Any, rank: int) -> Any:
        x = x23().requires_grad_()
        y, row, transposed = model(x)
        (y.sum() + 2 * row.sum() + 3 * transposed[0].sum()).backward()
        return local(x.grad), local(row), local(transposed)

    same_as_plain(Views, drive, 2)


def test_an_output_changed_in_place_before_backward() -> None:
    def drive(model: Any, rank: int) -> Any:
        x = x23().requires_grad_()
        y = model(x)
        y.retain_grad()
        z = y * 1
        z.mul_(2.0)
        y.mul_(3.0)
        (z.sum() + y.sum()).backward(tp.tensor(0.5))
        return local(x.grad), local(y)

    same_as_plain(lambda: nn.Linear(3, 3), drive, 2)


# --- buffers --------------------------------------------------------------------------------------


class Buffered(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", tp.zeros(3))
        self.register_buffer("steps", tp.tensor(0))

    def forward(self, x: Any) -> Any:
        self.steps += 1
        self.total.add_(x.detach().sum(0))
        self.total[0] = self.steps.float()
        return self.linear(x) + self.total / self.steps


def test_buffers_updated_in_forward() -> None:
    def drive(model: Any, rank: int) -> Any:
        kept = model.total
        out = [local(model(random(2, 3, seed=seed + rank))) for seed in range(3)]
        return [*out, local(model.total), model.steps.item(), model.total is kept]

    same_as_plain(Buffered, drive, 2)


def test_updates_of_buffers_do_not_trace_again() -> None:
    """`self.steps += 1` writes in place and then sets the attribute to the same tensor."""
    model = fully_shard(seeded(Buffered))
    with no_warnings():
        for seed in range(12):
            model(random(2, 3, seed=seed)).sum().backward()
    assert traces(model) <= 2
    assert model.steps.item() == 12


def test_a_buffer_rebound_in_forward() -> None:
    class Rebinds(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", tp.zeros(3))

        def forward(self, x: Any) -> Any:
            self.mean = 0.9 * self.mean + x.detach().mean(0)
            return self.linear(x) - self.mean

    def drive(model: Any, rank: int) -> Any:
        out = [local(model(random(2, 3, seed=seed))) for seed in range(3)]
        return [*out, local(model.mean)]

    same_as_plain(Rebinds, drive, 2)


def test_a_buffer_changed_between_calls() -> None:
    def drive(model: Any, rank: int) -> Any:
        out = [local(model(x23()))]
        model.total.fill_(3.0)
        out.append(local(model(x23())))
        model.total = tp.ones(3) * 5
        model.steps = tp.tensor(10)
        return [*out, local(model(x23())), local(model.total)]

    same_as_plain(Buffered, drive, 2)


def test_a_buffer_that_is_also_an_argument() -> None:
    class Takes(Buffered):
        def forward(self, x: Any) -> Any:
            self.total.add_(1.0)
            return self.linear(x.unsqueeze(0)) + self.total

    def drive(model: Any, rank: int) -> Any:
        return [local(model(model.total)) for _ in range(3)]

    same_as_plain(Takes, drive)


def test_counters_and_statistics_advance_under_training() -> None:
    """A counter buffer, batch-norm statistics and the random state (flax#3997)."""

    class Stats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)
            self.norm = nn.BatchNorm1d(4)
            self.drop = nn.Dropout(0.5)
            self.register_buffer("count", tp.tensor(0))

        def forward(self, x: Any) -> Any:
            self.count.add_(1)
            return self.drop(self.norm(self.linear(x)))

    def drive(model: Any, rank: int) -> Any:
        tp.manual_seed(3)
        out = []
        for seed in range(2):
            y = model(random(4, 3, seed=seed))
            y.sum().backward()
            out.append(local(y))
        return [
            *out,
            model.count.item(),
            model.norm.num_batches_tracked.item(),
            local(model.norm.running_mean),
            local(tp.rand(3)),
        ]

    same_as_plain(Stats, drive)


# --- randomness -----------------------------------------------------------------------------------


def test_random_draws_equal_those_of_the_plain_module() -> None:
    class Noisy(Layer):
        def forward(self, x: Any) -> Any:
            y = F.dropout(self.linear(x), 0.5, self.training)
            return y + tp.randn(3) + tp.rand_like(y) + tp.randint(0, 5, (3,))

    def drive(model: Any, rank: int) -> Any:
        out = []
        for _ in range(2):
            tp.manual_seed(11)
            out += [local(model(x23())), local(model(x23())), local(tp.rand(2))]
        return out

    same_as_plain(Noisy, drive)


def test_a_generator_of_ones_own() -> None:
    class Draws(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.generator = tp.Generator().manual_seed(4)

        def forward(self, x: Any) -> Any:
            return self.linear(x) + tp.rand(3, generator=self.generator)

    same_as_plain(Draws, lambda model, rank: [local(model(x23())) for _ in range(3)], 2)


def test_seeding_inside_forward() -> None:
    class Seeds(Layer):
        def forward(self, x: Any) -> Any:
            tp.manual_seed(9)
            return self.linear(x) + tp.rand(3)

    def drive(model: Any, rank: int) -> Any:
        return [local(model(x23())) for _ in range(2)], local(tp.rand(2))

    same_as_plain(Seeds, drive)


# --- parameters between calls ---------------------------------------------------------------------


def test_refreezing_between_calls() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        found = []
        for frozen in (False, True, False, True):
            model.inner.weight.requires_grad_(not frozen)
            model.zero_grad()
            mlp_loss(model, rank, 0).backward()
            found.append((local(model.inner.weight.grad), local(model.outer.weight.grad)))
        return found, traces(model)

    for found, count in on_ranks(2, run):
        assert [inner is None for inner, _ in found] == [False, True, False, True]
        for inner, outer in found:
            close(outer, found[0][1])
            assert inner is None or np.array_equal(inner, found[0][0])
        assert count == 2


def test_freezing_everything_gives_an_output_without_graph() -> None:
    def drive(model: Any, rank: int) -> Any:
        before = model(random(2, 5)).requires_grad
        model.requires_grad_(False)
        return before, model(random(2, 5)).requires_grad

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp), reshard_after_forward=True)
        return drive(model, rank)

    assert on_ranks(2, run) == [(True, False)] * 2


def test_a_parameter_replaced_between_calls() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp), reshard_after_forward=True)
        model(random(2, 5))
        with tp.no_grad():
            model.outer.bias = nn.Parameter(model.outer.bias.detach().clone() * 0 + 3.0)
        out = model(random(2, 5))
        out.sum().backward()
        new = model.outer.bias
        sgd(model.parameters()).step()
        return local(out), whole(new.grad), whole(model.outer.bias), model.outer.bias is new

    twin = seeded(Mlp)
    with tp.no_grad():
        twin.outer.bias.fill_(3.0)
    wanted = local(twin(random(2, 5)))
    for out, grad, bias, kept in on_ranks(2, run):
        close(out, wanted)
        close(grad, np.full(3, 2.0))
        close(bias, np.full(3, 3.0 - 0.1 * 2.0))
        assert kept


def test_a_parameter_replaced_while_the_root_is_unsharded() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        sharded = model.outer.bias
        with tp.no_grad():
            model(random(2, 5))
            model.outer.bias = nn.Parameter(sharded.detach().clone() * 0 + 3.0)
        return local(model(random(2, 5)))

    twin = seeded(Mlp)
    with tp.no_grad():
        twin.outer.bias.fill_(3.0)
    for out in on_ranks(2, run):
        close(out, local(twin(random(2, 5))))


def test_a_parameter_set_through_data() -> None:
    def run(rank: int) -> Any:
        model = fully_shard(seeded(Mlp))
        model(random(2, 5)).sum().backward()
        model.outer.bias.data = model.outer.bias.data * 0 + 3.0
        return local(model(random(2, 5)))

    twin = seeded(Mlp)
    twin.outer.bias.data = tp.ones(3) * 3.0
    for out in on_ranks(2, run):
        close(out, local(twin(random(2, 5))))


def test_forward_sees_whole_parameters() -> None:
    class Regularised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 7)

        def forward(self, x: Any) -> Any:
            w = self.inner.weight
            assert tuple(w.shape) == (7, 5) and isinstance(w, nn.Parameter)
            extra = sum(p.square().sum() for p in self.parameters())
            return F.linear(x, w * 2, self.inner.bias.detach()) + extra + w.data.sum()

    def drive(model: Any, rank: int) -> Any:
        x = random(2, 5).requires_grad_()
        y = model(x)
        y.sum().backward()
        return local(y), local(x.grad)

    same_as_plain(Regularised, drive, 2)


# --- arguments and results ------------------------------------------------------------------------


class Pair(nn.Module):
    """Returns its keyword arguments nested in what ``kind`` asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, batch: Any, *extra: Any, scale: float = 1.0, **more: Any) -> Any:
        y = self.linear(batch["x"]) * scale
        for value in (*extra, *more.values()):
            if value is not None and not isinstance(value, str):
                y = y + value
        return y


def test_nested_and_keyword_arguments() -> None:
    def drive(model: Any, rank: int) -> Any:
        x = x23()
        calls = [
            (({"x": x},), {}),
            (({"x": x},), {"scale": 2.0}),
            (({"x": x}, 1.0), {"scale": 2.0}),
            (({"x": x}, 2.0), {"scale": 2.0}),
            (({"x": x}, tp.ones(3), None, "text"), {"bias": tp.ones(3) * 2}),
            (({"x": x, "unused": [x, (x, None)]},), {"other": 5}),
            (({"x": x},), {"scale": 2.0}),
        ]
        return [local(model(*args, **kwargs)) for args, kwargs in calls]

    same_as_plain(Pair, drive, 2)


def test_the_same_tensor_given_twice() -> None:
    class Adds(Layer):
        def forward(self, a: Any, b: Any) -> Any:
            return self.linear(a) + (10.0 if a is b else 0.0) + b

    def drive(model: Any, rank: int) -> Any:
        x = x23().requires_grad_()
        first, second = model(x, x), model(x, x.detach())
        (first.sum() + second.sum()).backward()
        return local(first), local(second), local(x.grad)

    same_as_plain(Adds, drive, 2)


class Point(collections.namedtuple("Point", ["a", "b"])):
    __slots__ = ()


@dataclasses.dataclass
class Output:
    logits: Any
    name: str = "n"
    extra: Any = None


class Bag:
    """An arbitrary object that holds a tensor."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.label = "bag"


CONTAINERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda y: (y, None, "s"), lambda out: out[0]),
    "list": (lambda y: [y, 1], lambda out: out[0]),
    "dict": (lambda y: {"y": y, "none": None, "text": "s"}, lambda out: out["y"]),
    "ordered_dict": (lambda y: collections.OrderedDict(y=y), lambda out: out["y"]),
    "nested": (lambda y: {"a": [(y,), {"b": 2}]}, lambda out: out["a"][0][0]),
    "namedtuple": (lambda y: Point(y, 2), lambda out: out.a),
    "dataclass": (lambda y: Output(y, extra={"k": 1}), lambda out: out.logits),
    "object": (Bag, lambda out: out.tensor),
    "object_in_list": (lambda y: [Bag(y)], lambda out: out[0].tensor),
}


@pytest.mark.parametrize("kind", list(CONTAINERS))
def test_outputs_in_containers_have_gradients(kind: str) -> None:
    wrap, get = CONTAINERS[kind]

    class Wraps(Layer):
        def forward(self, x: Any) -> Any:
            return wrap(self.linear(x))

    def run(rank: int) -> Any:
        model = fully_shard(seeded(Wraps))
        optimizer = sgd(model.parameters())
        types_ = []
        for _ in range(2):
            out = model(x23())
            types_.append(type(out).__name__)
            optimizer.zero_grad()
            get(out).sum().backward()
            optimizer.step()
        return types_, local(get(out)), whole(model.linear.weight)

    twin = seeded(Wraps)
    optimizer = sgd(twin.parameters())
    for _ in range(2):
        out = twin(x23())
        optimizer.zero_grad()
        get(out).sum().backward()
        optimizer.step()
    with no_warnings():
        for names, y, weight in on_ranks(2, run):
            assert names == [type(out).__name__] * 2
            close(y, local(get(out)))
            close(weight, local(twin.linear.weight))


@pytest.mark.parametrize("kind", list(CONTAINERS))
def test_inputs_in_containers(kind: str) -> None:
    wrap, get = CONTAINERS[kind]

    class Opens(Layer):
        def forward(self, batch: Any) -> Any:
            return self.linear(get(batch))

    def drive(model: Any, rank: int) -> Any:
        x = x23().requires_grad_()
        y = model(wrap(x))
        y.sum().backward()
        return local(y), local(x.grad)

    same_as_plain(Opens, drive, 2)


def test_a_changed_field_of_an_argument_object_is_seen() -> None:
    class Opens(Layer):
        def forward(self, batch: Any) -> Any:
            return self.linear(batch.logits) * len(batch.name) + (batch.extra or 0.0)

    def drive(model: Any, rank: int) -> Any:
        batch = Output(x23())
        out = [local(model(batch))]
        batch.name = "longer"
        out.append(local(model(batch)))
        batch.extra = 3.0
        return [*out, local(model(batch))]

    same_as_plain(Opens, drive, 2)


def test_forward_that_changes_its_argument_container() -> None:
    class Fills(Layer):
        def forward(self, batch: Any) -> Any:
            batch["y"] = self.linear(batch["x"])
            return batch

    def drive(model: Any, rank: int) -> Any:
        batch = {"x": x23()}
        out = model(batch)
        return list(batch), local(out["y"]), out is batch

    same_as_plain(Fills, drive, 2)


def test_an_iterator_as_an_argument() -> None:
    class Consumes(Layer):
        def forward(self, x: Any, numbers: Any) -> Any:
            return self.linear(x) * next(numbers)

    def drive(model: Any, rank: int) -> Any:
        numbers = iter([1.0, 2.0, 3.0])
        return [local(model(x23(), numbers)) for _ in range(3)]

    same_as_plain(Consumes, drive, 2)


@pytest.mark.parametrize("kind", ["generator", "map", "inside_a_dict"])
def test_an_output_that_is_an_iterator(kind: str) -> None:
    class Yields(Layer):
        def forward(self, x: Any) -> Any:
            if kind == "map":
                return map(self.linear(x).mul, (1, 2))
            numbers = (self.linear(x) * k for k in (1, 2))
            return numbers if kind == "generator" else {"all": numbers}

    def drive(model: Any, rank: int) -> Any:
        out = model(x23())
        return [local(y) for y in (out["all"] if kind == "inside_a_dict" else out)]

    same_as_plain(Yields, drive)


def test_an_output_of_none_and_of_plain_numbers() -> None:
    class Returns(Layer):
        def forward(self, x: Any, kind: str) -> Any:
            y = self.linear(x)
            return {"none": None, "number": 3, "shape": tuple(y.shape)}[kind]

    def drive(model: Any, rank: int) -> Any:
        return [model(x23(), kind) for kind in ("none", "number", "shape", "none")]

    same_as_plain(Returns, drive, 2)


def test_a_module_without_parameters() -> None:
    def drive(model: Any, rank: int) -> Any:
        x = x23().requires_grad_()
        y = model(x)
        y.sum().backward()
        return local(y), local(x.grad)

    same_as_plain(nn.ReLU, drive, 2)


# --- registered methods ---------------------------------------------------------------------------


class Coder(Layer):
    def encode(self, x: Any, scale: float = 1.0) -> Any:
        return tp.tanh(self.linear(x)) * scale

    def forward(self, x: Any) -> Any:
        return self.encode(x) + 1


def test_registered_methods_compile_gather_and_give_gradients() -> None:
    def drive(model: Any, rank: int) -> Any:
        register_fsdp_forward_method(model, "encode")
        x = x23().requires_grad_()
        first, second, third = model.encode(x), model(x), model.encode(x, scale=2.0)
        (first.sum() + 2 * second.sum() + third.sum()).backward()
        again = model.encode(x)
        return [local(t) for t in (first, second, third, again, x.grad)]

    same_as_plain(Coder, drive, 2)


def test_a_registered_method_is_not_traced_again() -> None:
    model = fully_shard(seeded(Coder))
    register_fsdp_forward_method(model, "encode")
    for _ in range(3):
        model.encode(x23())
        model(x23())
    assert traces(model) == 2


# --- no trace without need ------------------------------------------------------------------------


def test_ordinary_training_traces_once() -> None:
    model = shard_nested(seeded(Lm))
    optimizer = tp.optim.AdamW(model.parameters(), lr=0.1)
    schedule = tp.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with no_warnings():
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            lm_loss(model, 0, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    assert traces(model) == 1


def test_train_and_eval_alternate_between_two_traces() -> None:
    model = shard_nested(seeded(Lm))
    for step in range(3):
        model.train()
        lm_loss(model, 0, step).backward()
        model.eval()
        with tp.no_grad():
            lm_loss(model, 0, step)
    assert traces(model) == 2


def test_a_loaded_state_dict_does_not_trace_again() -> None:
    model = fully_shard(seeded(Mlp))
    saved = {n: v.clone() for n, v in model.state_dict().items()}
    for assign in (False, True):
        mlp_loss(model, 0, 0).backward()
        model.load_state_dict(saved, assign=assign)
    mlp_loss(model, 0, 0).backward()
    assert traces(model) == 1


def test_communication_knobs_do_not_trace_again() -> None:
    model = shard_nested(seeded(Lm))
    for value in (True, False, True, False):
        model.set_reshard_after_forward(value)
        model.set_requires_gradient_sync(not value)
        lm_loss(model, 0, 0).backward()
        model.unshard()
        lm_loss(model, 0, 0).backward()
    assert traces(model) == 1


def test_several_forwards_before_a_backward_trace_once_in_mixed_precision_too() -> None:
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=tp.bfloat16)):
        model = fully_shard(seeded(Mlp), mp_policy=policy)
        for _ in range(2):
            losses = [mlp_loss(model, 0, step) for step in range(2)]
            (losses[0] + losses[1]).backward()
        assert traces(model) == 1


def test_rank_threads_share_one_trace() -> None:
    class OnlyHere(Mlp):
        pass

    def run(rank: int) -> None:
        model = fully_shard(seeded(OnlyHere))
        for step in range(2):
            mlp_loss(model, rank, step).backward()

    with counted_traces() as found:
        on_ranks(4, run)
    assert found == ["OnlyHereFSDPModule"]


def test_a_module_that_keeps_tracing_warns_once_and_names_what_changed() -> None:
    class Steps(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.global_step = 0

        def forward(self, x: Any) -> Any:
            return self.linear(x) * self.global_step

    model = fully_shard(seeded(Steps))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(20):
            model.global_step = step
            model(x23())
    messages = [str(w.message) for w in caught]
    assert len(messages) == 1
    assert "Steps" in messages[0] and "traced" in messages[0]
    assert "global_step" in messages[0]


def test_new_shapes_at_every_call_warn_and_name_the_shapes() -> None:
    model = fully_shard(nn.Linear(3, 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in range(1, 14):
            model(tp.ones(rows, 3))
    messages = [str(w.message) for w in caught]
    assert len(messages) == 1
    assert "Linear" in messages[0]
    assert "shape" in messages[0] or "argument" in messages[0]


def test_an_eager_forward_warns_once_with_the_reason_and_its_children_compile() -> None:
    class Inner(Layer):
        def forward(self, x: Any) -> Any:
            return tp.tanh(self.linear(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Inner()
            self.second = nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            y = self.second(self.first(x))
            return y if y.sum() > 0 else -y

    def build(sharded: bool) -> Any:
        model = seeded(Outer)
        if sharded:
            fully_shard(model.first)
            fully_shard(model)
        return model

    model, twin = build(True), build(False)
    with warnings.catch_warnings(record=True) as caught, counted_traces() as found:
        warnings.simplefilter("always")
        for _ in range(4):
            model.zero_grad()
            model(x23()).square().sum().backward()
    twin(x23()).square().sum().backward()
    messages = [str(w.message) for w in caught]
    assert len(messages) == 1
    assert "Outer" in messages[0] and "runs eagerly" in messages[0]
    assert found.count("InnerFSDPModule") == 1
    assert traces(model.first) == 1
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        close(local(p.grad), local(q.grad), name)


def test_an_eager_decision_is_not_traced_again() -> None:
    class Prints(Layer):
        def forward(self, x: Any) -> Any:
            return self.linear(x) * float(x.sum())

    model = fully_shard(seeded(Prints))
    with warnings.catch_warnings(), counted_traces() as found:
        warnings.simplefilter("ignore")
        for seed in range(5):
            model(random(2, 3, seed=seed)).sum().backward()
    assert len(found) == 1


def test_data_does_not_matter_to_the_trace() -> None:
    model = fully_shard(seeded(Mlp))
    for seed in range(5):
        model(random(4, 5, seed=seed))
    model(random(8, 5)[::2])
    model(random(5, 4).T)
    assert traces(model) == 1


def test_two_models_of_the_same_code_do_not_mix_their_weights() -> None:
    first, second = fully_shard(seeded(Mlp)), fully_shard(seeded(Mlp))
    with tp.no_grad():
        second.outer.bias.add_(1.0)
    x = random(2, 5)
    close(local(second(x)), local(first(x)) + 1.0)
    second(x).sum().backward()
    assert first.outer.bias.grad is None
    close(local(second.outer.bias.grad), np.full(3, 2.0))
