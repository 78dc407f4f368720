"""Records what torch computes for the runs of ``optim_cases.py`` into ``torch_values.json``.

Run it with a Python that has torch: ``python tests/optim/record_torch.py``.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import optim_cases as cases
import torch

TARGET = Path(__file__).with_name("torch_values.json")


def as_lists(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    value = torch.view_as_real(value) if value.is_complex() else value
    return value.to(torch.float64).flatten().tolist()


def run(name: str, case: dict[str, Any]) -> dict[str, Any]:
    dtype = getattr(torch, case.get("dtype", "float32"))
    params = [
        torch.tensor(a).to(dtype).requires_grad_() for a in cases.parameters(dtype.is_complex)
    ]
    optimizer = cases.make_optimizer(torch.optim, params, case)
    trajectory = []
    for step, grads in enumerate(cases.gradients(dtype.is_complex)):
        for index, (p, g) in enumerate(zip(params, grads, strict=True)):
            p.grad = torch.tensor(g).to(dtype) if cases.has_gradient(name, step, index) else None
        optimizer.step()
        trajectory.append([as_lists(p) for p in params])
    state = {
        str(index): {key: as_lists(value) for key, value in entry.items()}
        for index, entry in optimizer.state_dict()["state"].items()
    }
    groups = [list(group) for group in optimizer.state_dict()["param_groups"]]
    return {"params": trajectory, "state": state, "group_keys": groups}


def settings(optimizer: Any) -> list[Any]:
    return [[g["lr"], g["momentum"]] for g in optimizer.param_groups]


def fresh() -> Any:
    params = [torch.zeros(1, requires_grad=True), torch.zeros(2, requires_grad=True)]
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.3}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def run_schedule(name: str) -> list[Any]:
    optimizer = fresh()
    schedule = cases.make_schedule(torch.optim.lr_scheduler, optimizer, name)
    found = [settings(optimizer)]
    for step in range(cases.SCHEDULE_STEPS):
        optimizer.step()
        plateau = name.startswith("ReduceLROnPlateau")
        schedule.step(*([cases.METRICS[step]] if plateau else []))
        found.append(settings(optimizer))
    return found


def run_closed_form(name: str) -> list[Any]:
    optimizer = fresh()
    schedule = cases.make_schedule(torch.optim.lr_scheduler, optimizer, name)
    found = []
    for epoch in cases.EPOCHS:
        optimizer.step()
        schedule.step(epoch)
        found.append(settings(optimizer))
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    runs = {**cases.CASES, **cases.GROUPS}
    found = {
        "torch": torch.__version__,
        "runs": {name: run(name, case) for name, case in runs.items()},
        "schedules": {name: run_schedule(name) for name in cases.SCHEDULES},
        "closed_forms": {name: run_closed_form(name) for name in cases.CLOSED_FORMS},
    }
    TARGET.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
