"""What the fully_shard tests share: small models, simulated ranks, and the unsharded twin."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import tensorplay as tp
import tensorplay.nn as nn
import tensorplay.nn.functional as F
from tensorplay.distributed import run_ranks
from tensorplay.distributed.fsdp import _request, fully_shard

Arrays = dict[str, Any]


def on_ranks(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """``fn(rank, *args)`` on ``world`` simulated ranks; what they returned, in rank order."""
    return run_ranks(fn, world, args=args, timeout=60)


def own_slice(array: Any, world: int, rank: int, dim: int = 0) -> np.ndarray:
    """The part of ``array`` that ``torch.chunk`` gives to ``rank``."""
    size = array.shape[dim]
    rows = -(-size // world)
    start, stop = min(rank * rows, size), min((rank + 1) * rows, size)
    return np.asarray(array)[(slice(None),) * dim + (slice(start, stop),)]


def local(tensor: Any) -> np.ndarray | None:
    """A copy of this rank's values."""
    return None if tensor is None else np.array(tensor.detach().numpy())


def whole(tensor: Any) -> np.ndarray:
    """A copy of the whole tensor's values; every rank must call it."""
    return np.array(tensor.full_tensor().detach().numpy())


def close(got: Any, wanted: Any, what: str = "", rtol: float = 1e-4, atol: float = 2e-6) -> None:
    """Asserts equality within float32 rounding."""
    np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol, err_msg=what)


def random(*shape: int, seed: int = 0) -> Any:
    """A tensor of normal values that depends on ``seed`` alone."""
    return tp.tensor(np.random.RandomState(seed).randn(*shape).astype(np.float32))


def ids(high: int, *shape: int, seed: int = 0) -> Any:
    """An int64 tensor of values below ``high`` that depends on ``seed`` alone."""
    return tp.tensor(np.random.RandomState(seed).randint(0, high, shape))


def seeded(make: Callable[[], Any]) -> Any:
    """``make()`` with the same initial weights at every call."""
    tp.manual_seed(0)
    return make()


def sgd(params: Any) -> Any:
    """SGD with momentum."""
    return tp.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> Any:
    """AdamW with a large step."""
    return tp.optim.AdamW(params, lr=1e-2, eps=1e-4)


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Any warning inside is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --- the unsharded twin --------------------------------------------------------------------------


@dataclasses.dataclass
class Job:
    """A training run, to be done on ranks and by the unsharded twin.

    Attributes:
        make: the model.
        loss: of (model, rank, step).
        shard: applies fully_shard.
        optimizer: of the parameters.
    """

    make: Callable[[], Any]
    loss: Callable[[Any, int, int], Any]
    shard: Callable[[Any], Any] = fully_shard
    optimizer: Callable[[Any], Any] = sgd
    steps: int = 5
    before_step: Callable[[Any], Any] = lambda model: None


@dataclasses.dataclass
class Record:
    """What a run produced: losses and gradients of each step, parameters at its end."""

    losses: list[Any]
    grads: list[Arrays]
    params: Arrays


def train_twin(job: Job, world: int) -> Record:
    """The run without sharding: the mean of the ranks' losses in one process."""
    model = seeded(job.make)
    optimizer = job.optimizer(model.parameters())
    losses, grads = [], []
    for step in range(job.steps):
        optimizer.zero_grad()
        each = [job.loss(model, rank, step) for rank in range(world)]
        (sum(each) / world).backward()  # type: ignore[attr-defined]
        job.before_step(model)
        grads.append({n: local(p.grad) for n, p in model.named_parameters()})
        optimizer.step()
        losses.append([loss.item() for loss in each])
    return Record(losses, grads, {n: local(p) for n, p in model.named_parameters()})


def train_rank(rank: int, job: Job) -> Record:
    """The run of one rank."""
    model = seeded(job.make)
    job.shard(model)
    optimizer = job.optimizer(model.parameters())
    losses, grads = [], []
    for step in range(job.steps):
        optimizer.zero_grad()
        loss = job.loss(model, rank, step)
        loss.backward()
        job.before_step(model)
        grads.append({n: local(p.grad) for n, p in model.named_parameters()})
        optimizer.step()
        losses.append(loss.item())
    return Record(losses, grads, {n: local(p) for n, p in model.named_parameters()})


def check_parity(job: Job, world: int, unsharded: tuple[str, ...] = ()) -> list[Record]:
    """Runs the job both ways and compares losses, gradient slices and parameters.

    Parameters in ``unsharded`` are whole on every rank; their gradients are that rank's own.
    """
    twin = train_twin(job, world)
    records = on_ranks(world, train_rank, job)
    for rank, record in enumerate(records):
        compare(record, twin, world, rank, unsharded)
    return records


def compare(
    record: Record, twin: Record, world: int, rank: int, unsharded: tuple[str, ...] = ()
) -> None:
    """Asserts that one rank's record holds its part of the twin's."""
    close(record.losses, [each[rank] for each in twin.losses], "losses")
    for step, (got, wanted) in enumerate(zip(record.grads, twin.grads, strict=True)):
        assert list(got) == list(wanted)
        for name, grad in wanted.items():
            if name in unsharded:
                continue
            where = f"grad of {name} at step {step} on rank {rank}"
            if grad is None:
                assert got[name] is None, where
            else:
                assert got[name] is not None, where
                close(got[name], own_slice(grad, world, rank), where)
    for name, param in record.params.items():
        if name not in unsharded:
            close(param, own_slice(twin.params[name], world, rank), f"{name} on rank {rank}",
                  atol=1e-5)  # fmt: skip


# --- traces --------------------------------------------------------------------------------------


def traces(model: Any) -> int:
    """How often the model's Python was traced."""
    return int(model._fsdp_state.calls.traces)


@contextlib.contextmanager
def counted_traces() -> Iterator[list[str]]:
    """Collects the class names of modules whose Python runs under a trace, in all threads."""
    found: list[str] = []
    stage = _request.Request.stage

    def counting(self: Any) -> Any:
        found.append(type(self.state.module).__name__)
        return stage(self)

    _request.Request.stage = counting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        _request.Request.stage = stage  # type: ignore[method-assign]


# --- models --------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Rows of 7 and 3: no world size from 2 to 5 divides both."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.outer = nn.Linear(7, 3)

    def forward(self, x: Any) -> Any:
        return self.outer(tp.tanh(self.inner(x)))


class MlpLoss(Mlp):
    """Returns its loss, so that little is compiled for each rank's own device."""

    def forward(self, x: Any) -> Any:
        return super().forward(x).square().mean()


def mlp_loss(model: Any, rank: int, step: int) -> Any:
    """Of an `Mlp`, with data of its own for every rank and step."""
    return model(random(4, 5, seed=100 * step + rank)).square().mean()


def own_loss(model: Any, rank: int, step: int) -> Any:
    """Of an `MlpLoss`."""
    return model(random(4, 5, seed=100 * step + rank))


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Lm(nn.Module):
    """A language model without attention: 11 tokens, width 5, two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([Block(5), Block(5)])
        self.head = nn.Linear(5, 11)

    def forward(self, tokens: Any, with_loss: bool = False) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if with_loss:
            return F.cross_entropy(logits.view(-1, 11), tokens.view(-1))
        return logits


def lm_loss(model: Any, rank: int, step: int) -> Any:
    """Of an `Lm`, with data of its own for every rank and step."""
    return model(ids(11, 2, 4, seed=100 * step + rank), with_loss=True)


def shard_nested(model: Any, **options: Any) -> Any:
    """Each block of an `Lm` in a group of its own, then the rest."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)
