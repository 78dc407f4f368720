"""Records what torch computes, raises and prints for ``cases``: run with torch's Python.

python tests/nn/record_torch.py
"""

import json
import pathlib

import cases
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def _numbers(tensor):
    values = tensor.detach() + torch.zeros(tensor.shape, dtype=torch.float64)
    return [float(f"{v:.12g}") for v in values.flatten().tolist()]


def _of_case(case):
    arrays = [torch.from_numpy(a) for a in case.arrays()]
    leaves = [a.requires_grad_() for a in arrays if a.is_floating_point()]
    with sdpa_kernel(SDPBackend.MATH):
        out = case.call(torch.nn.functional, *arrays)
    total = (out * torch.from_numpy(cases.weights(tuple(out.shape)))).sum()
    grads = torch.autograd.grad(total, leaves, create_graph=case.second, allow_unused=True)
    record = {"shape": list(out.shape), "out": _numbers(out)}
    record["grads"] = [None if g is None else _numbers(g) for g in grads]
    if case.second:
        mixed = [
            (g * torch.from_numpy(cases.weights(tuple(g.shape), 1))).sum()
            for g in grads
            if g is not None and g.requires_grad
        ]
        second = [None] * len(leaves)
        if mixed:
            second = torch.autograd.grad(sum(mixed), leaves, allow_unused=True)
        record["second"] = [None if g is None else _numbers(g) for g in second]
    return record


def _error(call):
    try:
        call(torch.nn, torch.nn.functional, torch.tensor)
    except Exception as error:
        return [type(error).__name__, str(error).splitlines()[0]]
    return None


def main():
    record = {
        "torch": torch.__version__,
        "cases": {case.name: _of_case(case) for case in cases.CASES},
        "reprs": {name: repr(make(torch.nn)) for name, make in cases.MODULES.items()},
        "errors": {name: _error(call) for name, call in cases.ERRORS.items()},
    }
    path = pathlib.Path(__file__).with_name("torch_values.json")
    path.write_text(json.dumps(record, indent=0, separators=(",", ":")) + "\n")


main()
