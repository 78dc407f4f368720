"""Comparing tensors in tests, as ``torch.testing``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .._ops.creation import as_tensor
from .._tensor import Tensor

_TOLERANCES = {
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float32": (1.3e-6, 1e-5),
    "float64": (1e-7, 1e-7),
    "complex64": (1.3e-6, 1e-5),
    "complex128": (1e-7, 1e-7),
}

Message = str | Callable[[str], str] | None


def assert_close(
    actual: Any,
    expected: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
    check_device: bool = True,
    check_dtype: bool = True,
    check_stride: bool = False,
    msg: Message = None,
) -> None:
    """Raises unless ``|actual - expected| <= atol + rtol * |expected|`` everywhere.

    Args:
        actual, expected: tensors, numpy arrays or numbers, or sequences or mappings of these.
        rtol, atol: relative and absolute tolerance, both or neither; by default those that PyTorch
            has for the dtype (float32: 1.3e-6 and 1e-5; float64: 1e-7 and 1e-7; integers: 0 and 0).
        equal_nan: nan equals nan.
        check_device, check_dtype, check_stride: compare these too.
        msg: the message instead of the generated one, or a function of it.

    Raises:
        AssertionError: the values, or shapes, dtypes, devices, lengths or keys differ.
        ValueError: only one of ``rtol`` and ``atol`` is given.
        TypeError: the inputs cannot be compared.
    """
    if (rtol is None) != (atol is None):
        raise ValueError(
            "Both 'rtol' and 'atol' must be either specified or omitted, but got no "
            f"{'rtol' if rtol is None else 'atol'}."
        )
    checks = _Checks(rtol, atol, equal_nan, check_device, check_dtype, check_stride)
    found = checks.compare(actual, expected, "")
    if found is not None:
        raise AssertionError(msg(found) if callable(msg) else msg or found)


class _Checks:
    """One call's options."""

    def __init__(
        self,
        rtol: float | None,
        atol: float | None,
        equal_nan: bool,
        check_device: bool,
        check_dtype: bool,
        check_stride: bool,
    ) -> None:
        self.rtol, self.atol, self.equal_nan = rtol, atol, equal_nan
        self.check_device, self.check_dtype = check_device, check_dtype
        self.check_stride = check_stride

    def compare(self, actual: Any, expected: Any, place: str) -> str | None:
        """What is wrong, or None."""
        found = self._compare(actual, expected, place)
        if found is None or "\n\nThe failure occurred for item " in found or not place:
            return found
        return f"{found}\n\nThe failure occurred for item {place}"

    def _compare(self, actual: Any, expected: Any, place: str) -> str | None:
        if isinstance(expected, Mapping) and isinstance(actual, Mapping):
            return self._mappings(actual, expected, place)
        if _is_sequence(expected) and _is_sequence(actual):
            return self._sequences(actual, expected, place)
        if _is_number(actual) and _is_number(expected):
            return self._numbers(actual, expected)
        if actual is None and expected is None:
            return None
        if not all(isinstance(x, (Tensor, np.ndarray, np.generic)) for x in (actual, expected)):
            raise TypeError(
                f"No comparison pair was able to handle inputs of type {type(actual)} and "
                f"{type(expected)}."
                + (f"\n\nThe failure occurred for item {place}" if place else "")
            )
        return self._tensors(as_tensor(actual), as_tensor(expected))

    def _mappings(self, actual: Any, expected: Any, place: str) -> str | None:
        missing, extra = expected.keys() - actual.keys(), actual.keys() - expected.keys()
        if missing or extra:
            return (
                "The keys of the mappings do not match:\n"
                f"Missing keys in the actual mapping: {sorted(missing, key=str)}\n"
                f"Additional keys in the actual mapping: {sorted(extra, key=str)}"
            )
        for key in expected:
            found = self.compare(actual[key], expected[key], f"{place}[{key!r}]")
            if found is not None:
                return found
        return None

    def _sequences(self, actual: Any, expected: Any, place: str) -> str | None:
        if len(actual) != len(expected):
            return f"The length of the sequences mismatch: {len(actual)} != {len(expected)}"
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            found = self.compare(a, e, f"{place}[{index}]")
            if found is not None:
                return found
        return None

    def _numbers(self, actual: Any, expected: Any) -> str | None:
        if self.check_dtype and type(actual) is not type(expected):
            return f"The (d)types do not match: {type(actual)} != {type(expected)}."
        rtol, atol = self._tolerances(_number_dtype(actual), _number_dtype(expected))
        both_nan = actual != actual and expected != expected
        if actual == expected or (both_nan and self.equal_nan):
            return None
        difference = abs(actual - expected)
        if math.isfinite(abs(expected)) and difference <= atol + rtol * abs(expected):
            return None
        if rtol == 0 and atol == 0:
            return (
                f"Scalars are not equal!\n\nExpected {expected} but got {actual}.\n"
                f"Absolute difference: {difference}\n"
                f"Relative difference: {_ratio(difference, expected)}"
            )
        return (
            f"Scalars are not close!\n\nExpected {expected} but got {actual}.\n"
            f"Absolute difference: {difference} (up to {atol} allowed)\n"
            f"Relative difference: {_ratio(difference, expected)} (up to {rtol} allowed)"
        )

    def _tensors(self, actual: Tensor, expected: Tensor) -> str | None:
        attributes: list[tuple[str, Any, Any, bool]] = [
            ("shape", actual.shape, expected.shape, True)
        ]
        attributes.append(("device", actual.device, expected.device, self.check_device))
        attributes.append(("dtype", actual.dtype, expected.dtype, self.check_dtype))
        attributes.append(("stride()", actual.stride(), expected.stride(), self.check_stride))
        for name, a, e, wanted in attributes:
            if wanted and a != e:
                return f"The values for attribute '{name}' do not match: {a} != {e}."
        rtol, atol = self._tolerances(actual.dtype.name, expected.dtype.name)
        return _values(_wide(actual), _wide(expected), rtol, atol, self.equal_nan)

    def _tolerances(self, actual: str, expected: str) -> tuple[float, float]:
        if self.rtol is not None and self.atol is not None:
            return self.rtol, self.atol
        found = [_TOLERANCES.get(name, (0.0, 0.0)) for name in (actual, expected)]
        return max(r for r, _ in found), max(a for _, a in found)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex)) and not isinstance(value, np.generic)


def _number_dtype(value: Any) -> str:
    return {bool: "bool", int: "int64", float: "float64", complex: "complex128"}[type(value)]


def _ratio(difference: float, expected: Any) -> float:
    return difference / abs(expected) if expected else float("inf")


def _wide(tensor: Tensor) -> np.ndarray:
    """The values in a numpy dtype in which they can be subtracted."""
    value = tensor.detach()._host()
    if value.dtype.kind == "c":
        return value.astype(np.complex128)
    return value.astype(np.int64 if value.dtype.kind in "biu" else np.float64)


def _values(
    actual: np.ndarray, expected: np.ndarray, rtol: float, atol: float, equal_nan: bool
) -> str | None:
    if "c" in (actual.dtype.kind, expected.dtype.kind) or actual.dtype != expected.dtype:
        kind = np.result_type(actual, expected)
        actual, expected = actual.astype(kind), expected.astype(kind)
    close = np.isclose(actual, expected, rtol, atol, equal_nan)
    if close.all():
        return None
    exact = rtol == 0 and atol == 0
    title = "Tensor-likes are not equal!" if exact else "Tensor-likes are not close!"
    if actual.ndim == 0:
        title = title.replace("Tensor-likes", "Scalars")
        return f"{title}\n\n" + _scalar_mismatch(actual, expected, rtol, atol, exact)
    count = int((~close).sum())
    with np.errstate(all="ignore"):
        absolute = np.abs(actual - expected)
        relative = np.where(expected == 0, np.inf, absolute / np.abs(expected))
    absolute[close], relative[close] = 0, 0
    return (
        f"{title}\n\nMismatched elements: {count} / {close.size} ({count / close.size:.1%})\n"
        f"Greatest absolute difference: {_greatest(absolute, atol, exact)}\n"
        f"Greatest relative difference: {_greatest(relative, rtol, exact)}"
    )


def _scalar_mismatch(a: np.ndarray, e: np.ndarray, rtol: float, atol: float, exact: bool) -> str:
    actual, expected = a.item(), e.item()
    difference = abs(actual - expected)
    allowed = ("", "") if exact else (f" (up to {atol} allowed)", f" (up to {rtol} allowed)")
    return (
        f"Expected {expected} but got {actual}.\nAbsolute difference: {difference}{allowed[0]}\n"
        f"Relative difference: {_ratio(difference, expected)}{allowed[1]}"
    )


def _greatest(differences: np.ndarray, allowed: float, exact: bool) -> str:
    index = np.unravel_index(
        int(np.nanargmax(np.nan_to_num(differences, nan=np.inf))), differences.shape
    )
    place = tuple(int(i) for i in index)
    text = f"{differences[place].item()} at index {place}"
    return text if exact else f"{text} (up to {allowed} allowed)"


def assert_allclose(
    actual: Any,
    expected: Any,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = True,
    msg: str = "",
) -> None:
    """``assert_close`` without checks of devices and dtypes (kept for older code)."""
    if not isinstance(actual, Tensor):
        actual = as_tensor(actual)
    if not isinstance(expected, Tensor):
        expected = as_tensor(expected, dtype=actual.dtype)
    assert_close(
        actual, expected, rtol=rtol, atol=atol, equal_nan=equal_nan, check_device=False,
        check_dtype=False, msg=msg or None,
    )  # fmt: skip
