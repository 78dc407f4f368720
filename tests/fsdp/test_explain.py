"""What explain reports: against theory, against the programs that run, and in the docs.

python tests/fsdp/test_explain.py      prints the table of docs/communication.md
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import Lm, Mlp, ids, lm_loss, on_ranks, random, seeded, shard_nested
from test_programs import programs

import tensorplay as tp
import tensorplay.nn as nn
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import MixedPrecisionPolicy, explain, fully_shard

DOCS = Path(__file__).parents[2] / "docs" / "communication.md"
WIDTH, BLOCKS = 64, 4


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + tp.tanh(self.inner(x))


class Net(nn.Module):
    """Four blocks of 64 x 64 and a head; every dim divides by the numbers of ranks used here."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


ELEMENTS = WIDTH * WIDTH + WIDTH  # of each group


def shard(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def frozen_but_for_the_head(model: Any) -> Any:
    for block in model.blocks:
        block.requires_grad_(False)
    return shard(model)


def without_sync(model: Any) -> Any:
    shard(model)
    model.set_requires_gradient_sync(False)
    return model


@dataclasses.dataclass
class Setting:
    """One row of the table.

    Attributes:
        name: in the table.
        shard: applies fully_shard.
        world_size: as for explain.
        forward, backward, reductions: how often groups are gathered and reduced.
        gather_size, reduce_size: bytes per element in the collectives.
        input_requires_grad: the input needs a gradient, so backward needs every weight.
    """

    name: str
    shard: Callable[[Any], Any]
    forward: int = BLOCKS + 1
    backward: int = BLOCKS
    reductions: int = BLOCKS + 1
    gather_size: int = 4
    reduce_size: int = 4
    world_size: Any = 8
    input_requires_grad: bool = True


BF16 = MixedPrecisionPolicy(param_dtype=tp.bfloat16)
BF16_F32 = MixedPrecisionPolicy(param_dtype=tp.bfloat16, reduce_dtype=tp.float32)
SETTINGS = [
    Setting("default: the root stays unsharded until backward", shard),
    Setting(
        "`reshard_after_forward=True`",
        lambda m: shard(m, reshard_after_forward=True),
        backward=BLOCKS + 1,
    ),
    Setting(
        "`reshard_after_forward=False`",
        lambda m: shard(m, reshard_after_forward=False),
        backward=0,
    ),
    Setting("`param_dtype=bfloat16`", lambda m: shard(m, mp_policy=BF16), gather_size=2,
            reduce_size=2),
    Setting("`param_dtype=bfloat16`, `reduce_dtype=float32`",
            lambda m: shard(m, mp_policy=BF16_F32), gather_size=2),
    Setting("2 replicas of 4 ranks", shard, world_size=(2, 4)),
    Setting("frozen, but for the root's own", frozen_but_for_the_head, backward=0, reductions=1,
            input_requires_grad=False),
    Setting("`set_requires_gradient_sync(False)`", without_sync, reductions=0),
    Setting("64 ranks", shard, world_size=64),
]  # fmt: skip


def report_of(setting: Setting) -> Any:
    model = setting.shard(seeded(Net))
    x = random(2, WIDTH).requires_grad_(setting.input_requires_grad)
    return explain(model, x, world_size=setting.world_size)


def table() -> str:
    """The table of the docs."""
    lines = [
        "| Setting | forward gathers | backward gathers | reductions | bytes gathered in forward | "
        "in backward | bytes reduced |",
        "|---|---|---|---|---|---|---|",
    ]
    for setting in SETTINGS:
        report = report_of(setting)
        f, b = report.forward, report.backward
        row = [
            setting.name, f.gathers, b.gathers, b.reductions,
            *(f"{n:,}" for n in (f.gathered_bytes, b.gathered_bytes, b.reduced_bytes)),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_counts_and_bytes_are_those_of_theory(setting: Setting) -> None:
    report = report_of(setting)
    ranks = setting.world_size if isinstance(setting.world_size, int) else setting.world_size[1]
    share = ELEMENTS * (ranks - 1) // ranks
    forward, backward = report.forward, report.backward
    assert (forward.gathers, forward.reductions) == (setting.forward, 0)
    assert forward.gathered_bytes == setting.forward * share * setting.gather_size
    assert (backward.gathers, backward.reductions) == (setting.backward, setting.reductions)
    assert backward.gathered_bytes == setting.backward * share * setting.gather_size
    assert backward.reduced_bytes == setting.reductions * share * setting.reduce_size
    assert report.shard_bytes == (BLOCKS + 1) * ELEMENTS * 4 // ranks
    two_groups = 2 * ELEMENTS * setting.gather_size
    assert forward.peak_unsharded_bytes <= (
        forward.gathers * two_groups // 2 if setting.backward == 0 else 3 * two_groups // 2
    )
    assert backward.peak_unsharded_bytes <= two_groups


def test_the_table_of_the_docs_is_up_to_date() -> None:
    assert table() in DOCS.read_text()


@pytest.mark.parametrize("reshard", [None, True, False, 2])
def test_the_figures_are_those_of_the_programs_that_run(reshard: Any) -> None:
    def step(rank: int) -> None:
        lm_loss(shard_nested(seeded(Lm), reshard_after_forward=reshard), rank, 0).backward()

    def explained(rank: int) -> Any:
        model = shard_nested(seeded(Lm), reshard_after_forward=reshard)
        return explain(model, ids(11, 2, 4), with_loss=True) if rank == 0 else None

    forward, backward = programs(step, 4)
    report = on_ranks(4, explained)[0]  # one rank alone may ask
    for program, reported in ((forward, report.forward), (backward, report.backward)):
        assert reported.gathers == program.counts["all_gather"]
        assert reported.reductions == program.counts["reduce_scatter"]
        assert reported.text.count("stablehlo.all_gather") == reported.gathers
    sizes = {"float32": 4}
    gathered = sum(n * sizes[dtype] * (1 if reshard == 2 else 3) for n, dtype in backward.gathers)
    assert report.backward.gathered_bytes == gathered


def test_the_text_names_groups_parameters_and_dtypes() -> None:
    model = shard_nested(seeded(Lm), mp_policy=BF16_F32)
    model.embed.weight.requires_grad_(False)
    text = str(explain(model, ids(11, 2, 4), with_loss=True, world_size=256))
    for words in (
        "3 groups over 256 ranks",
        "group 1: BlockFSDPModule",
        "up.weight: (11, 5) -> (1, 5) to (0, 5); float32, computes in bfloat16, reduced in float32",
        "embed.weight: (11, 5) -> (1, 5) to (0, 5); float32, computes in bfloat16, frozen",
        "gathered 1x in forward, 1x in backward, reduced 1x",
        "3 all-gathers receive",
        "unsharded at once",
    ):
        assert words in text


def test_a_model_on_meta_needs_no_memory() -> None:
    with tp.device("meta"):
        model = nn.Sequential(*(nn.Linear(40_000, 40_000, bias=False) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=True)
    report = explain(model, tp.empty(1, 40_000, device="meta"), world_size=256)
    assert report.shard_bytes == 4 * 40_000 * 157 * 4  # ceil(40,000 / 256) rows
    assert report.forward.gathers == 4


def test_nothing_is_trained() -> None:
    with tp.no_grad():
        report = explain(shard(seeded(Net)), random(2, WIDTH), world_size=4)
    assert report.backward is None and report.forward.gathers == BLOCKS + 1
    assert "backward:" not in str(report)


def test_hybrid_sharding_on_its_own_mesh() -> None:
    def run(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2))
        return explain(shard(seeded(Net), mesh=mesh), random(2, WIDTH))

    for report in on_ranks(4, run):
        assert (report.replicate_ranks, report.shard_ranks) == (2, 2)
        assert report.backward.all_reduces == BLOCKS + 1
        assert report.backward.all_reduced_bytes == (BLOCKS + 1) * ELEMENTS * 4 // 2


def test_what_cannot_be_explained() -> None:
    with pytest.raises(TypeError, match="fully_shard was applied to"):
        explain(seeded(Mlp), random(2, 5))

    class Branch(Mlp):
        def forward(self, x: Any) -> Any:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(RuntimeError, match="runs eagerly, as its forward reads the value"):
        explain(fully_shard(Branch()), random(2, 5))


if __name__ == "__main__":
    print(table())
