"""The runs whose values ``record_torch.py`` records from torch and the tests compare with.

Both sides take parameters and gradients from here, as numpy arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

STEPS = 10
SHAPES = ((3, 2), (4,), (0, 2))

CASES: dict[str, dict[str, Any]] = {
    "sgd": {"kind": "SGD", "lr": 0.1},
    "sgd_momentum": {"kind": "SGD", "lr": 0.1, "momentum": 0.9},
    "sgd_dampening": {
        "kind": "SGD", "lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.05,
    },
    "sgd_nesterov": {
        "kind": "SGD", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1,
    },
    "sgd_maximize": {
        "kind": "SGD", "lr": 0.1, "momentum": 0.5, "maximize": True, "weight_decay": 0.1,
    },
    "sgd_float64": {"kind": "SGD", "lr": 0.1, "momentum": 0.9, "dtype": "float64"},
    "sgd_bfloat16": {
        "kind": "SGD", "lr": 0.1, "momentum": 0.9, "dtype": "bfloat16", "fused": True,
    },
    "adam": {"kind": "Adam", "lr": 0.01},
    "adam_weight_decay": {"kind": "Adam", "lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1},
    "adam_amsgrad": {"kind": "Adam", "lr": 0.05, "amsgrad": True, "eps": 1e-3},
    "adam_no_mean": {"kind": "Adam", "lr": 0.05, "betas": (0.0, 0.9)},
    "adam_maximize": {"kind": "Adam", "lr": 0.01, "maximize": True, "weight_decay": 0.2},
    "adam_decoupled": {
        "kind": "Adam", "lr": 0.01, "weight_decay": 0.2, "decoupled_weight_decay": True,
    },
    "adam_float64": {"kind": "Adam", "lr": 0.01, "weight_decay": 0.1, "dtype": "float64"},
    "adamw": {"kind": "AdamW"},
    "adamw_all": {
        "kind": "AdamW", "lr": 0.03, "weight_decay": 0.3, "amsgrad": True, "maximize": True,
    },
    "adamw_bfloat16": {"kind": "AdamW", "lr": 0.05, "dtype": "bfloat16", "fused": True},
    "adamw_complex64": {"kind": "AdamW", "lr": 0.05, "amsgrad": True, "dtype": "complex64"},
    "adagrad": {"kind": "Adagrad"},
    "adagrad_all": {
        "kind": "Adagrad", "lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.1,
        "initial_accumulator_value": 0.3, "eps": 1e-5,
    },
    "adagrad_complex64": {
        "kind": "Adagrad", "lr": 0.1, "initial_accumulator_value": 0.3, "dtype": "complex64",
    },
    "adagrad_maximize": {"kind": "Adagrad", "lr": 0.1, "maximize": True},
    "rmsprop": {"kind": "RMSprop"},
    "rmsprop_centered": {"kind": "RMSprop", "lr": 0.02, "centered": True, "alpha": 0.9},
    "rmsprop_momentum": {"kind": "RMSprop", "momentum": 0.9, "weight_decay": 0.1},
    "rmsprop_all": {
        "kind": "RMSprop", "lr": 0.02, "momentum": 0.5, "centered": True, "maximize": True,
        "weight_decay": 0.1, "eps": 1e-4,
    },
}  # fmt: skip

GROUPS: dict[str, dict[str, Any]] = {
    "sgd_groups": {
        "kind": "SGD", "momentum": 0.9, "lr": 0.1,
        "groups": [{"lr": 0.01, "momentum": 0.0}, {"weight_decay": 0.1}, {"nesterov": True}],
    },
    "adamw_groups": {
        "kind": "AdamW",
        "groups": [{"lr": 0.05}, {"lr": 0.01, "weight_decay": 0.0, "amsgrad": True}, {}],
    },
}  # fmt: skip

SCHEDULES: dict[str, dict[str, Any]] = {
    "LambdaLR": {},
    "MultiplicativeLR": {},
    "StepLR": {"step_size": 3, "gamma": 0.3},
    "MultiStepLR": {"milestones": [2, 5, 5, 9], "gamma": 0.5},
    "ConstantLR": {"factor": 0.25, "total_iters": 4},
    "LinearLR": {"start_factor": 0.2, "end_factor": 0.9, "total_iters": 6},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"total_iters": 8, "power": 1.7},
    "CosineAnnealingLR": {"T_max": 5, "eta_min": 0.01},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2, "eta_min": 0.005},
    "OneCycleLR": {"max_lr": [0.5, 0.8], "total_steps": 20},
    "OneCycleLR_three_phase": {
        "max_lr": 0.5, "epochs": 4, "steps_per_epoch": 5, "anneal_strategy": "linear",
        "three_phase": True, "pct_start": 0.4, "div_factor": 10.0,
    },
    "OneCycleLR_still": {"max_lr": 0.5, "total_steps": 20, "cycle_momentum": False},
    "SequentialLR": {},
    "ChainedScheduler": {},
    "ReduceLROnPlateau": {"factor": 0.5, "patience": 1, "cooldown": 1, "min_lr": [0.02, 0.0]},
    "ReduceLROnPlateau_max": {
        "mode": "max", "threshold_mode": "abs", "threshold": 0.2, "patience": 0, "factor": 0.3,
    },
}  # fmt: skip
SCHEDULE_STEPS = 20
CLOSED_FORMS = (
    "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR",
    "CosineAnnealingLR", "CosineAnnealingWarmRestarts",
)  # fmt: skip
EPOCHS = (0, 1, 4, 7, 2, 13)
METRICS = [1.0, 0.9, 0.95, 0.91, 0.92, 0.5, 0.5, 0.5, 0.5, 0.5, 0.49999, 0.6, 0.7, 0.1, 0.2] + [
    0.3
] * 5


def parameters(complex_: bool = False) -> list[np.ndarray]:
    """The parameters to start from, float64 or complex128."""
    return _drawn(np.random.RandomState(0), complex_)


def gradients(complex_: bool = False) -> list[list[np.ndarray]]:
    """The gradients of each step."""
    rng = np.random.RandomState(1)
    return [_drawn(rng, complex_) for _ in range(STEPS)]


def _drawn(rng: np.random.RandomState, complex_: bool) -> list[np.ndarray]:
    drawn = [rng.randn(*shape) for shape in SHAPES]
    return [a + 1j * rng.randn(*a.shape) for a in drawn] if complex_ else drawn


def has_gradient(case: str, step: int, index: int) -> bool:
    """In the runs with groups, the second parameter has a gradient at every third step only."""
    return case not in GROUPS or index != 1 or step % 3 == 0


def make_optimizer(optim: Any, params: list[Any], case: dict[str, Any]) -> Any:
    """The case's optimizer, of ``torch.optim`` or ``tensorplay.optim``."""
    options = {k: v for k, v in case.items() if k not in ("kind", "dtype", "groups")}
    if "groups" in case:
        params = [{"params": [p], **g} for p, g in zip(params, case["groups"], strict=True)]
    return getattr(optim, case["kind"])(params, **options)


def make_schedule(schedulers: Any, optimizer: Any, case: str) -> Any:
    """The case's schedule, of ``torch.optim.lr_scheduler`` or ``tensorplay``'s."""
    name, options = case.partition("_")[0], dict(SCHEDULES[case])
    if name == "LambdaLR":
        options["lr_lambda"] = [lambda e: 1 / (1 + e), lambda e: 0.9**e]
    elif name == "MultiplicativeLR":
        options["lr_lambda"] = lambda e: 1 - e / 40
    elif name in ("SequentialLR", "ChainedScheduler"):
        parts = [
            schedulers.LinearLR(optimizer, total_iters=4),
            schedulers.ExponentialLR(optimizer, gamma=0.9),
        ]
        if name == "ChainedScheduler":
            return schedulers.ChainedScheduler(parts)
        parts.append(schedulers.CosineAnnealingLR(optimizer, T_max=6))
        return schedulers.SequentialLR(optimizer, parts, milestones=[4, 9])
    return getattr(schedulers, name)(optimizer, **options)
