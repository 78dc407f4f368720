"""Schedules: numbers equal to torch's, by steps and by closed form; state, warnings, errors."""

from __future__ import annotations

import json
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import optim_cases as cases
import pytest

import tensorplay as tp
from tensorplay import optim
from tensorplay.optim import lr_scheduler

RECORDED = json.loads(Path(__file__).with_name("torch_values.json").read_text())
EXACT = {"rtol": 1e-14, "atol": 0}


def fresh(lr: Any = 0.1) -> Any:
    params = [tp.zeros(1).requires_grad_(), tp.zeros(2).requires_grad_()]
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.3}]
    return optim.SGD(groups, lr=lr, momentum=0.9)


def settings(opt: Any) -> list[Any]:
    return [[g["lr"], g["momentum"]] for g in opt.param_groups]


def advance(name: str, opt: Any, schedule: Any, step: int) -> None:
    opt.step()
    schedule.step(*([cases.METRICS[step]] if name.startswith("ReduceLROnPlateau") else []))


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("name", cases.SCHEDULES)
def test_every_step(name: str) -> None:
    opt = fresh()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        schedule = cases.make_schedule(lr_scheduler, opt, name)
    found = [settings(opt)]
    for step in range(cases.SCHEDULE_STEPS):
        advance(name, opt, schedule, step)
        found.append(settings(opt))
        assert schedule.get_last_lr() == [lr for lr, _ in found[-1]]
    np.testing.assert_allclose(found, RECORDED["schedules"][name], **EXACT)


@pytest.mark.parametrize("name", cases.CLOSED_FORMS)
def test_closed_forms(name: str) -> None:
    opt = fresh()
    schedule = cases.make_schedule(lr_scheduler, opt, name)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for epoch in cases.EPOCHS:
            opt.step()
            schedule.step(epoch)
            found.append(settings(opt))
    np.testing.assert_allclose(found, RECORDED["closed_forms"][name], **EXACT)


@pytest.mark.parametrize("name", cases.SCHEDULES)
def test_a_state_dict_goes_on_alike(name: str) -> None:
    opt, other = fresh(), fresh()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        schedule = cases.make_schedule(lr_scheduler, opt, name)
        again = cases.make_schedule(lr_scheduler, other, name)
    for step in range(7):
        advance(name, opt, schedule, step)
    state = schedule.state_dict()
    keys = set(state)
    again.load_state_dict(deepcopy(state))
    assert set(state) == keys
    other.load_state_dict(opt.state_dict())
    for step in range(7, cases.SCHEDULE_STEPS):
        advance(name, other, again, step)
    expected = RECORDED["schedules"][name][-1]
    np.testing.assert_allclose(settings(other), expected, **EXACT)


def test_a_tensor_stays_the_same_tensor() -> None:
    rate = tp.tensor(0.5)
    opt = fresh(rate)
    schedule = lr_scheduler.ExponentialLR(opt, gamma=0.5)
    opt.step()
    schedule.step()
    assert opt.param_groups[0]["lr"] is rate and rate.item() == 0.25
    assert schedule.get_last_lr()[0] is not rate
    assert schedule.base_lrs[0].item() == 0.5


class Scale:
    """A callable whose attributes belong to the state."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, epoch: int) -> float:
        return self.factor**epoch


def test_callable_objects_are_saved_and_functions_are_not() -> None:
    def schedule_of(factor: float) -> Any:
        return lr_scheduler.LambdaLR(fresh(), [Scale(factor), lambda epoch: 1.0])

    state = schedule_of(0.5).state_dict()
    assert state["lr_lambdas"] == [{"factor": 0.5}, None] and "optimizer" not in state
    other = schedule_of(0.1)
    other.load_state_dict(state)
    assert other.lr_lambdas[0].factor == 0.5


def test_resuming_by_last_epoch() -> None:
    opt = fresh()
    with pytest.raises(KeyError, match="initial_lr"):
        lr_scheduler.CosineAnnealingLR(opt, T_max=5, last_epoch=3)
    for group in opt.param_groups:
        group["initial_lr"] = group["lr"]
    assert lr_scheduler.LambdaLR(opt, lambda e: 0.5**e, last_epoch=1).last_epoch == 2
    assert opt.param_groups[0]["lr"] == 0.025


def test_the_wrong_order_warns() -> None:
    schedule = lr_scheduler.StepLR(fresh(), step_size=1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()


def test_get_lr_outside_of_a_step_warns() -> None:
    schedule = lr_scheduler.StepLR(fresh(), step_size=1)
    with pytest.warns(UserWarning, match="get_last_lr"):
        schedule.get_lr()


def test_an_epoch_warns() -> None:
    opt = fresh()
    schedule = lr_scheduler.StepLR(opt, step_size=1)
    opt.step()
    with pytest.warns(UserWarning, match="epoch parameter"):
        schedule.step(3)


class Own(lr_scheduler.LRScheduler):
    """A schedule in the style of torch's own."""

    def get_lr(self) -> list[float]:
        return [base_lr + self.last_epoch for base_lr in self.base_lrs]


def test_a_schedule_of_ones_own() -> None:
    opt = fresh()
    schedule = Own(opt)
    opt.step()
    schedule.step()
    assert schedule.get_last_lr() == [1.1, 1.3]


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda o: lr_scheduler.StepLR(3, 1), TypeError, "int is not an Optimizer"),
        (lambda o: lr_scheduler.LambdaLR(o, [abs]), ValueError, "Expected 2 lr_lambdas, but got 1"),
        (lambda o: lr_scheduler.ConstantLR(o, factor=2.0), ValueError, "between 0 and 1"),
        (lambda o: lr_scheduler.LinearLR(o, start_factor=0.0), ValueError, "greater than 0"),
        (lambda o: lr_scheduler.LinearLR(o, end_factor=2.0), ValueError, "between 0 and 1"),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1), ValueError, "You must define either"),
        (lambda o: lr_scheduler.OneCycleLR(o, [0.1], 5), ValueError, "max_lr must have the same"),
        (
            lambda o: lr_scheduler.OneCycleLR(o, 0.1, 5, pct_start=2.0),
            ValueError,
            "between 0 and 1 pct_start",
        ),
        (lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=1.0), ValueError, "should be < 1.0"),
        (lambda o: lr_scheduler.ReduceLROnPlateau(o, mode="x"), ValueError, "mode x is unknown"),
        (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 0), ValueError, "integer T_0"),
        (lambda o: lr_scheduler.SequentialLR(o, [], []), ValueError, "at least one scheduler"),
        (lambda o: lr_scheduler.ChainedScheduler([]), ValueError, "at least one scheduler"),
        (
            lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ReduceLROnPlateau(o)]),
            ValueError,
            "does not support `ReduceLROnPlateau`",
        ),
        (
            lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.StepLR(fresh(), 1)], []),
            ValueError,
            "belong to the same optimizer",
        ),
        (
            lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.StepLR(o, 1)], [3]),
            ValueError,
            "number of milestones",
        ),
    ],
)
def test_refused_arguments(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make(fresh())


def test_too_many_steps_of_one_cycle() -> None:
    opt = fresh()
    schedule = lr_scheduler.OneCycleLR(opt, 0.1, total_steps=2)
    opt.step()
    schedule.step()
    schedule.step()
    with pytest.raises(ValueError, match="Tried to step 3 times"):
        schedule.step()
