"""Turns what a case returns into JSON, and compares it with what PyTorch returned."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import pathlib
import re
import warnings
from collections.abc import Callable
from typing import Any

FOLDER = pathlib.Path(__file__).parent
RECORDED = FOLDER / "recorded"
SUBJECTS = sorted(p.stem for p in (FOLDER / "torch_cases").glob("[a-z]*.py"))


def cases(subject: str) -> dict[str, Callable[[Any], Any]]:
    """The cases of a subject by name."""
    module = importlib.import_module(f"torch_cases.{subject}")
    return {
        name: fn
        for name, fn in vars(module).items()
        if inspect.isfunction(fn)
        and fn.__module__ == module.__name__
        and name[0] != "_"
        and list(inspect.signature(fn).parameters) == ["T"]
    }


def answer(case: Callable[[Any], Any], library: Any) -> Any:
    """What ``case`` returns with ``library``, as JSON data; an exception is an answer too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return encode(case(library))
        except Exception as error:
            return {"raises": type(error).__name__, "message": neutral(str(error))}


def neutral(text: str) -> str:
    """A message or repr without what differs by name only."""
    text = text.replace("tensorplay", "torch").replace("torch.", "")
    return re.sub(r"\s+", " ", re.sub(r"0x[0-9a-f]+", "0x", text)).strip()


def encode(value: Any) -> Any:
    """JSON data for numbers, strings, containers, tensors, dtypes and devices."""
    if isinstance(value, str):
        return value.replace("tensorplay.", "torch.")
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    if isinstance(value, dict):
        return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
    if type(value).__name__ == "dtype":
        return {"dtype": str(value).rpartition(".")[2]}
    if hasattr(value, "requires_grad"):
        return {
            "tensor": str(value.dtype).rpartition(".")[2],
            "shape": list(value.shape),
            "values": encode(value.detach().tolist()),
        }
    return neutral(str(value))


def difference(got: Any, want: Any, tolerance: float, place: str = "result") -> str | None:
    """Where and how ``got`` differs from ``want``, or None."""
    if isinstance(want, dict) and "tensor" in want and isinstance(got, dict):
        if (got.get("tensor"), got.get("shape")) != (want["tensor"], want["shape"]):
            return f"{place}: got {_brief(got)}, torch has {_brief(want)}"
        floating = want["tensor"].startswith(("float", "bfloat", "complex"))
        near = _looser(want, tolerance) if floating else 0
        return difference(got["values"], want["values"], near, place + ".values")
    if isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        for position, (g, w) in enumerate(zip(got, want, strict=True)):
            found = difference(g, w, tolerance, f"{place}[{position}]")
            if found:
                return found
        return None
    if isinstance(want, dict) and isinstance(got, dict) and want.keys() == got.keys():
        for key in want:
            found = difference(got[key], want[key], tolerance, f"{place}.{key}")
            if found:
                return found
        return None
    if type(want) is float and type(got) is float:
        close = abs(got - want) <= tolerance * max(1.0, abs(want))
        return None if close else f"{place}: got {got}, torch has {want}"
    same = got == want and type(got) is type(want)
    return None if same else f"{place}: got {_brief(got)}, torch has {_brief(want)}"


def _looser(want: dict[str, Any], tolerance: float) -> float:
    return {"float16": 2e-3, "bfloat16": 1.6e-2}.get(want["tensor"], tolerance)


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 400 else text[:400] + "..."


def recorded(subject: str) -> dict[str, Any]:
    """What PyTorch answered to the cases of a subject."""
    return json.loads((RECORDED / f"{subject}.json").read_text())


def check(subject: str, name: str, tolerance: float = 1e-5) -> None:
    """Asserts that tensorplay answers one case as PyTorch did."""
    import tensorplay

    got = answer(cases(subject)[name], tensorplay)
    found = difference(got, recorded(subject)[name], tolerance)
    assert found is None, f"{subject}.{name}: {found}"


def refused(fn: Callable[[], Any]) -> dict[str, str]:
    """The type and message of what ``fn()`` raises."""
    try:
        fn()
    except Exception as error:
        return {"raises": type(error).__name__, "message": neutral(str(error))}
    return {"raises": "nothing", "message": ""}


def refused_with(fn: Callable[[], Any]) -> str:
    """The type of what ``fn()`` raises, where the message is not torch's to decide."""
    return refused(fn)["raises"]
