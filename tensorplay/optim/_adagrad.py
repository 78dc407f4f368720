"""Adagrad."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from .._tensor import Tensor
from ._arithmetic import check_implementation, check_not_negative, needs_guard, ratio
from ._optimizer import ParamGroup, ParamsT
from ._step_counts import StepCounts
from ._update import Arrays, RuleOptimizer


class _Options(NamedTuple):
    weight_decay: bool
    maximize: bool
    guarded: bool


class _Hyper(NamedTuple):
    lr: float
    weight_decay: float
    eps: float


def adagrad_rule(
    p: Any, g: Any, state: Arrays, hyper: _Hyper, options: _Options
) -> tuple[Any, Arrays]:
    """One step of Adagrad; ``lr`` has decayed already."""
    if options.maximize:
        g = -g
    if options.weight_decay:
        g = g + hyper.weight_decay * p
    total = state["sum"] + g * g
    denominator = jnp.sqrt(total) + hyper.eps
    return p - hyper.lr * ratio(g, denominator, options.guarded), {"sum": total}


class Adagrad(RuleOptimizer):
    """Adagrad (Duchi et al. 2011), as ``torch.optim.Adagrad``.

    Args:
        params: see ``Optimizer``.
        lr: learning rate; a number or a tensor of one element.
        lr_decay: step number t uses ``lr / (1 + (t - 1) * lr_decay)``.
        weight_decay: L2 penalty.
        initial_accumulator_value: what the sums of squares start from.
        eps: added to the denominator.
        foreach, fused: accepted; all parameters are always updated by one program.
        maximize: ascend instead.
        differentiable: not supported.

    State, made by the constructor: ``step`` and ``sum``.

    Raises:
        ValueError: a negative value.
    """

    rule = staticmethod(adagrad_rule)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        check_not_negative(
            lr=lr, lr_decay=lr_decay, weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value, eps=eps,
        )  # fmt: skip
        check_implementation(foreach, fused, differentiable)
        defaults = {
            "lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "foreach": foreach,
            "maximize": maximize, "differentiable": differentiable, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults)
        for group in self.param_groups:
            for p in group["params"]:
                self._prepare(p, self._initial_state(group), StepCounts())

    def _options(self, group: ParamGroup) -> _Options:
        return _Options(bool(group["weight_decay"] != 0), group["maximize"], needs_guard(group))

    def _hyper(self, group: ParamGroup, step: int) -> _Hyper:
        lr = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        return _Hyper(lr, group["weight_decay"], group["eps"])

    def _initial_state(self, group: ParamGroup) -> dict[str, float]:
        return {"sum": self.defaults["initial_accumulator_value"]}
