"""SGD: stochastic gradient descent, with momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

from .._tensor import Tensor
from ._arithmetic import check_implementation, check_not_negative
from ._optimizer import ParamGroup, ParamsT
from ._update import Arrays, RuleOptimizer


class _Options(NamedTuple):
    momentum: bool
    nesterov: bool
    weight_decay: bool
    maximize: bool


class _Hyper(NamedTuple):
    lr: float
    momentum: float
    undamped: float
    weight_decay: float


def sgd_rule(p: Any, g: Any, state: Arrays, hyper: _Hyper, options: _Options) -> tuple[Any, Arrays]:
    """One step of SGD; ``undamped`` is the share of the gradient that enters the buffer."""
    if options.maximize:
        g = -g
    if options.weight_decay:
        g = g + hyper.weight_decay * p
    if options.momentum:
        buffer = hyper.momentum * state["momentum_buffer"] + hyper.undamped * g
        state = {"momentum_buffer": buffer}
        g = g + hyper.momentum * buffer if options.nesterov else buffer
    return p - hyper.lr * g, state


class SGD(RuleOptimizer):
    """Stochastic gradient descent, as ``torch.optim.SGD``.

    Args:
        params: see ``Optimizer``.
        lr: learning rate; a number or a tensor of one element.
        momentum: factor of the buffer of past gradients.
        dampening: what the buffer leaves out of each gradient but the first.
        weight_decay: L2 penalty.
        nesterov: Nesterov momentum (Sutskever et al. 2013).
        maximize: ascend instead.
        foreach, fused: accepted; all parameters are always updated by one program.
        differentiable: not supported.

    Raises:
        ValueError: a negative value, or ``nesterov`` without momentum or with dampening.
    """

    rule = staticmethod(sgd_rule)
    counts_steps = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        check_not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        check_implementation(foreach, fused, differentiable)
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize, "foreach": foreach,
            "differentiable": differentiable, "fused": fused,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _options(self, group: ParamGroup) -> _Options:
        return _Options(
            momentum=group["momentum"] != 0,
            nesterov=group["nesterov"],
            weight_decay=bool(group["weight_decay"] != 0),
            maximize=group["maximize"],
        )

    def _hyper(self, group: ParamGroup, step: int) -> _Hyper:
        undamped = 1.0 if step == 1 else 1 - group["dampening"]
        return _Hyper(float(group["lr"]), group["momentum"], undamped, float(group["weight_decay"]))

    def _initial_state(self, group: ParamGroup) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if group["momentum"] != 0 else {}
