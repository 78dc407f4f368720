"""Adam and AdamW."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from .._tensor import Tensor
from ._arithmetic import check_implementation, check_not_negative, needs_guard, ratio
from ._optimizer import ParamGroup, ParamsT
from ._update import Arrays, RuleOptimizer


class _Options(NamedTuple):
    amsgrad: bool
    weight_decay: bool
    decoupled: bool
    maximize: bool
    guarded: bool


class _Hyper(NamedTuple):
    decay: float
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    step_size: float
    scale2: float
    eps: float


def adam_rule(
    p: Any, g: Any, state: Arrays, hyper: _Hyper, options: _Options
) -> tuple[Any, Arrays]:
    """One step of Adam.

    ``decay`` multiplies the parameter where the weight decay is decoupled, else it is the L2
    penalty; ``rest`` is 1 - beta; ``step_size`` is lr / (1 - beta1**step), and ``scale2``
    1 / sqrt(1 - beta2**step).
    """
    if options.maximize:
        g = -g
    if options.weight_decay and options.decoupled:
        p = p * hyper.decay
    elif options.weight_decay:
        g = g + hyper.decay * p
    mean = hyper.beta1 * state["exp_avg"] + hyper.rest1 * g
    square = hyper.beta2 * state["exp_avg_sq"] + hyper.rest2 * g * g
    new, peak = {"exp_avg": mean, "exp_avg_sq": square}, square
    if options.amsgrad:
        new["max_exp_avg_sq"] = peak = jnp.maximum(state["max_exp_avg_sq"], square)
    denominator = jnp.sqrt(peak) * hyper.scale2 + hyper.eps
    return p - hyper.step_size * ratio(mean, denominator, options.guarded), new


class Adam(RuleOptimizer):
    """Adam (Kingma & Ba 2014), as ``torch.optim.Adam``.

    Args:
        params: see ``Optimizer``.
        lr: learning rate; a number or a tensor of one element.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: L2 penalty, or with ``decoupled_weight_decay`` as in ``AdamW``.
        amsgrad: divide by the largest mean square so far (Reddi et al. 2018).
        maximize: ascend instead.
        foreach, capturable, fused: accepted; all parameters are always updated by one program.
        differentiable: not supported.

    State: ``step``, ``exp_avg``, ``exp_avg_sq`` and, with ``amsgrad``, ``max_exp_avg_sq``.

    Raises:
        ValueError: a negative value, or a beta outside [0, 1).
    """

    rule = staticmethod(adam_rule)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        for index, beta in enumerate(betas):
            if not 0.0 <= float(beta) < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        check_implementation(foreach, fused, differentiable)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize, "foreach": foreach, "capturable": capturable,
            "differentiable": differentiable, "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _options(self, group: ParamGroup) -> _Options:
        return _Options(
            amsgrad=group["amsgrad"],
            weight_decay=bool(group["weight_decay"] != 0),
            decoupled=group["decoupled_weight_decay"],
            maximize=group["maximize"],
            guarded=needs_guard(group),
        )

    def _hyper(self, group: ParamGroup, step: int) -> _Hyper:
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return _Hyper(
            decay=1 - lr * weight_decay if group["decoupled_weight_decay"] else weight_decay,
            beta1=beta1,
            rest1=1 - beta1,
            beta2=beta2,
            rest2=1 - beta2,
            step_size=lr / (1 - beta1**step),
            scale2=(1 - beta2**step) ** -0.5,
            eps=group["eps"],
        )

    def _initial_state(self, group: ParamGroup) -> dict[str, float]:
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
        return dict.fromkeys(names, 0.0)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2017), as ``torch.optim.AdamW``.

    Args:
        weight_decay: each step multiplies the parameters by ``1 - lr * weight_decay``.

    The others are those of ``Adam``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, foreach=foreach, maximize=maximize,
            capturable=capturable, differentiable=differentiable, fused=fused,
            decoupled_weight_decay=True,
        )  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
