"""Numbers equal to torch's, over ten steps of every rule and through state dicts."""

from __future__ import annotations

import json
import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import optim_cases as cases
import pytest

import tensorplay as tp
from tensorplay import optim

RECORDED = json.loads(Path(__file__).with_name("torch_values.json").read_text())
RUNS = {**cases.CASES, **cases.GROUPS}
TOLERANCE = {
    "float64": {"rtol": 1e-13, "atol": 1e-15},
    "bfloat16": {"rtol": 1e-2, "atol": 1e-2},
}
FLOAT32 = {"rtol": 2e-6, "atol": 5e-7}


class Run:
    """A case's parameters, optimizer and gradients."""

    def __init__(self, name: str) -> None:
        self.name, self.case = name, RUNS[name]
        self.dtype = getattr(tp, self.case.get("dtype", "float32"))
        self.params = [self.tensor(a).requires_grad_() for a in self.arrays()]
        self.optimizer = cases.make_optimizer(optim, self.params, self.case)
        self.grads = cases.gradients(self.dtype.is_complex)

    def arrays(self) -> list[np.ndarray]:
        return cases.parameters(self.dtype.is_complex)

    def tensor(self, array: np.ndarray) -> Any:
        return tp.tensor(array, dtype=self.dtype)

    def step(self, number: int) -> None:
        for index, (p, g) in enumerate(zip(self.params, self.grads[number], strict=True)):
            p.grad = self.tensor(g) if cases.has_gradient(self.name, number, index) else None
        self.optimizer.step()

    def check(self, got: Any, expected: list[float]) -> None:
        tolerance = TOLERANCE.get(self.case.get("dtype", "float32"), FLOAT32)
        np.testing.assert_allclose(flat(got), expected, **tolerance)


def flat(t: Any) -> np.ndarray:
    array = np.asarray(t.detach()._read())
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag], axis=-1)
    return array.astype(np.float64).reshape(-1)


@pytest.mark.parametrize("name", RUNS)
def test_ten_steps(name: str) -> None:
    run, recorded = Run(name), RECORDED["runs"][name]
    for step, expected in enumerate(recorded["params"]):
        run.step(step)
        for p, values in zip(run.params, expected, strict=True):
            run.check(p, values)
    state = run.optimizer.state_dict()["state"]
    assert {str(index) for index in state} == set(recorded["state"])
    for index, entry in recorded["state"].items():
        assert list(state[int(index)]) == list(entry)
        for key, values in entry.items():
            got = state[int(index)][key]
            assert got.dtype is (tp.float32 if key == "step" else run.dtype)
            run.check(got, values)


@pytest.mark.parametrize("name", RUNS)
def test_state_dict_has_the_keys_of_torch(name: str) -> None:
    groups = Run(name).optimizer.state_dict()["param_groups"]
    assert [set(group) for group in groups] == [
        set(keys) for keys in RECORDED["runs"][name]["group_keys"]
    ]


def by_deepcopy(run: Run, state: Any) -> Any:
    return deepcopy(state)


def by_pickle(run: Run, state: Any) -> Any:
    return pickle.loads(pickle.dumps(state))


def as_numpy(run: Run, state: Any) -> Any:
    return {
        "state": {
            index: {key: np.asarray(value) for key, value in entry.items()}
            for index, entry in state["state"].items()
        },
        "param_groups": state["param_groups"],
    }


def itself(run: Run, state: Any) -> Any:
    return state


@pytest.mark.parametrize("carry", [by_deepcopy, by_pickle, as_numpy, itself])
@pytest.mark.parametrize(
    "name", ["sgd_dampening", "adam_amsgrad", "adam_float64", "adamw_groups", "rmsprop_all"]
)
def test_a_loaded_state_dict_goes_on_alike(name: str, carry: Any) -> None:
    first, second = Run(name), Run(name)
    for step in range(5):
        first.step(step)
    state = carry(first, first.optimizer.state_dict())
    second.optimizer.load_state_dict(state)
    for own, other in zip(second.params, first.params, strict=True):
        own.data = other.detach().clone()
    for run in (first, second):
        for step in range(5, 10):
            run.step(step)
        for p, values in zip(run.params, RECORDED["runs"][name]["params"][-1], strict=True):
            run.check(p, values)


def test_a_state_dict_of_torch_is_taken_over() -> None:
    name = "adam_amsgrad"
    run, recorded = Run(name), RECORDED["runs"][name]
    state = {
        int(index): {
            key: np.array(value, np.float32).reshape(() if key == "step" else p.shape)
            for key, value in recorded["state"][index].items()
        }
        for index, p in zip(recorded["state"], run.params, strict=True)
    }
    group = {**run.optimizer.state_dict()["param_groups"][0], "lr": 0.5}
    run.optimizer.load_state_dict({"state": state, "param_groups": [group]})
    assert run.optimizer.param_groups[0]["lr"] == 0.5
    for p, values in zip(run.params, recorded["state"].values(), strict=True):
        assert run.optimizer.state[p]["step"].item() == cases.STEPS
        run.check(run.optimizer.state[p]["exp_avg"], values["exp_avg"])


def test_loading_casts_to_the_dtype_of_the_parameter() -> None:
    first, second = Run("adam_float64"), Run("adam")
    first.step(0)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    entry = second.optimizer.state[second.params[0]]
    assert entry["exp_avg"].dtype is tp.float32 and entry["step"].dtype is tp.float32


def test_a_tensor_as_learning_rate() -> None:
    run = Run("adamw_all")
    run.optimizer.param_groups[0]["lr"] = tp.tensor(0.03)
    for step in range(cases.STEPS):
        run.step(step)
    for p, values in zip(run.params, RECORDED["runs"]["adamw_all"]["params"][-1], strict=True):
        run.check(p, values)
