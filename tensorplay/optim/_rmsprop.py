"""RMSprop."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from .._tensor import Tensor
from ._arithmetic import check_implementation, check_not_negative, needs_guard, ratio
from ._optimizer import ParamGroup, ParamsT
from ._update import Arrays, RuleOptimizer


class _Options(NamedTuple):
    momentum: bool
    centered: bool
    weight_decay: bool
    maximize: bool
    guarded: bool


class _Hyper(NamedTuple):
    lr: float
    alpha: float
    rest: float
    momentum: float
    weight_decay: float
    eps: float


def rmsprop_rule(
    p: Any, g: Any, state: Arrays, hyper: _Hyper, options: _Options
) -> tuple[Any, Arrays]:
    """One step of RMSprop; ``rest`` is 1 - alpha."""
    if options.maximize:
        g = -g
    if options.weight_decay:
        g = g + hyper.weight_decay * p
    square = hyper.alpha * state["square_avg"] + hyper.rest * g * g
    new, variance = {"square_avg": square}, square
    if options.centered:
        new["grad_avg"] = mean = hyper.alpha * state["grad_avg"] + hyper.rest * g
        variance = square - mean * mean
    change = ratio(g, jnp.sqrt(variance) + hyper.eps, options.guarded)
    if options.momentum:
        new["momentum_buffer"] = change = hyper.momentum * state["momentum_buffer"] + change
    return p - hyper.lr * change, new


class RMSprop(RuleOptimizer):
    """RMSprop (Hinton's lecture notes; centered: Graves 2013), as ``torch.optim.RMSprop``.

    Args:
        params: see ``Optimizer``.
        lr: learning rate; a number or a tensor of one element.
        alpha: decay rate of the running mean of squares.
        eps: added to the denominator.
        weight_decay: L2 penalty.
        momentum: factor of the buffer of past changes.
        centered: divide by the standard deviation instead of the root mean square.
        capturable, foreach: accepted; all parameters are always updated by one program.
        maximize: ascend instead.
        differentiable: not supported.

    State: ``step``, ``square_avg``, and ``momentum_buffer``, ``grad_avg`` where asked for.

    Raises:
        ValueError: a negative value.
    """

    rule = staticmethod(rmsprop_rule)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
    ) -> None:
        check_not_negative(
            lr=lr, eps=eps, momentum=momentum, weight_decay=weight_decay, alpha=alpha
        )
        check_implementation(foreach, differentiable=differentiable)
        defaults = {
            "lr": lr, "momentum": momentum, "alpha": alpha, "eps": eps, "centered": centered,
            "weight_decay": weight_decay, "capturable": capturable, "foreach": foreach,
            "maximize": maximize, "differentiable": differentiable,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _options(self, group: ParamGroup) -> _Options:
        return _Options(
            momentum=group["momentum"] > 0,
            centered=group["centered"],
            weight_decay=bool(group["weight_decay"] != 0),
            maximize=group["maximize"],
            guarded=needs_guard(group),
        )

    def _hyper(self, group: ParamGroup, step: int) -> _Hyper:
        return _Hyper(
            lr=float(group["lr"]),
            alpha=group["alpha"],
            rest=1 - group["alpha"],
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )

    def _initial_state(self, group: ParamGroup) -> dict[str, float]:
        wanted = {
            "square_avg": True,
            "momentum_buffer": group["momentum"] > 0,
            "grad_avg": group["centered"],
        }
        return {name: 0.0 for name, is_wanted in wanted.items() if is_wanted}
