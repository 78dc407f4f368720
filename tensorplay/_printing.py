"""How tensors print: the layout of ``torch``'s ``repr``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass
class PrintOptions:
    """What ``set_printoptions`` sets.

    Attributes:
        precision: digits after the point.
        threshold: tensors with more elements are summarised.
        edgeitems: entries shown at each end of a summarised dim.
        linewidth: characters in a line.
        sci_mode: scientific notation always (True), never (False), or where it helps (None).
    """

    precision: int = 4
    threshold: float = 1000
    edgeitems: int = 3
    linewidth: int = 80
    sci_mode: bool | None = None


options = PrintOptions()
_PROFILES: dict[str, dict[str, Any]] = {
    "default": {"precision": 4, "threshold": 1000, "edgeitems": 3, "linewidth": 80},
    "short": {"precision": 2, "threshold": 1000, "edgeitems": 2, "linewidth": 80},
    "full": {"precision": 4, "threshold": math.inf, "edgeitems": 3, "linewidth": 80},
}


def set_printoptions(
    precision: int | None = None,
    threshold: float | None = None,
    edgeitems: int | None = None,
    linewidth: int | None = None,
    profile: str | None = None,
    sci_mode: bool | None = None,
) -> None:
    """Sets how tensors print, for the whole process, as ``torch.set_printoptions``.

    Args:
        precision, threshold, edgeitems, linewidth, sci_mode: see ``PrintOptions``.
        profile: ``"default"``, ``"short"`` or ``"full"``; the other arguments override it.
    """
    changes = dict(_PROFILES[profile]) if profile is not None else {}
    given = {
        "precision": precision,
        "threshold": threshold,
        "edgeitems": edgeitems,
        "linewidth": linewidth,
    }
    changes.update({name: value for name, value in given.items() if value is not None})
    for name, value in changes.items():
        setattr(options, name, value)
    options.sci_mode = sci_mode


class _Formatter:
    """Formats single numbers in the notation that suits all of ``values``."""

    def __init__(self, values: np.ndarray) -> None:
        self.floating = values.dtype.kind == "f"
        self.whole, self.scientific, self.width = True, False, 1
        if self.floating:
            finite = values[np.isfinite(values) & (values != 0)].astype(np.float64)
            if finite.size:
                self._choose(finite)
        else:
            self.width = max((len(f"{v}") for v in values.tolist()), default=1)

    def _choose(self, finite: np.ndarray) -> None:
        magnitude = np.abs(finite)
        largest, smallest = float(magnitude.max()), float(magnitude.min())
        self.whole = bool(np.all(finite == np.ceil(finite)))
        self.scientific = (
            largest / smallest > 1000 or largest > 1e8 or (not self.whole and smallest < 1e-4)
        )
        if options.sci_mode is not None:
            self.scientific = options.sci_mode
        style = "e" if self.scientific else "f"
        digits = 0 if self.whole and not self.scientific else options.precision
        extra = 1 if self.whole and not self.scientific else 0
        self.width = max(len(f"{v:.{digits}{style}}") + extra for v in finite.tolist())

    def format(self, value: Any) -> str:
        if not self.floating:
            text = f"{value}"
        elif self.scientific:
            text = f"{value:{self.width}.{options.precision}e}"
        elif self.whole:
            text = f"{value:.0f}" + ("." if math.isfinite(value) else "")
        else:
            text = f"{value:.{options.precision}f}"
        return text.rjust(self.width)


class _ComplexFormatter:
    def __init__(self, values: np.ndarray) -> None:
        self.real, self.imag = _Formatter(values.real), _Formatter(values.imag)
        self.width = self.real.width + self.imag.width + 1

    def format(self, value: complex) -> str:
        imag = (self.imag.format(value.imag) + "j").lstrip()
        return self.real.format(value.real) + ("" if imag[0] in "+-" else "+") + imag


def _vector(values: np.ndarray, indent: int, summarize: bool, formatter: Any) -> str:
    per_line = max(1, (options.linewidth - indent) // (formatter.width + 2))
    edge = options.edgeitems
    if summarize and values.size > 2 * edge:
        ends = values[:edge].tolist(), values[values.size - edge :].tolist()
        texts = [*map(formatter.format, ends[0]), " ...", *map(formatter.format, ends[1])]
    else:
        texts = [formatter.format(v) for v in values.tolist()]
    lines = [", ".join(texts[i : i + per_line]) for i in range(0, len(texts), per_line)]
    return "[" + (",\n" + " " * (indent + 1)).join(lines) + "]"


def _nested(values: np.ndarray, indent: int, summarize: bool, formatter: Any) -> str:
    if values.ndim == 0:
        return str(formatter.format(values.item()))
    if values.ndim == 1:
        return _vector(values, indent, summarize, formatter)
    edge = options.edgeitems
    rows = list(values)
    if summarize and len(rows) > 2 * edge:
        parts = [_nested(r, indent + 1, summarize, formatter) for r in rows[:edge]]
        parts.append("...")
        parts += [_nested(r, indent + 1, summarize, formatter) for r in rows[len(rows) - edge :]]
    else:
        parts = [_nested(r, indent + 1, summarize, formatter) for r in rows]
    return "[" + ("," + "\n" * (values.ndim - 1) + " " * (indent + 1)).join(parts) + "]"


def _shown(values: np.ndarray) -> np.ndarray:
    """The elements that a summary shows."""
    edge = options.edgeitems
    for axis, size in enumerate(values.shape):
        if size > 2 * edge:
            ends = [*range(edge), *range(size - edge, size)]
            values = np.take(values, ends, axis=axis)
    return values


def values_text(values: np.ndarray, indent: int) -> str:
    """The elements as nested brackets; continuation lines start at column ``indent``."""
    if values.size == 0:
        return "[]"
    if values.dtype.kind == "V" or values.dtype == np.float16:
        values = values.astype(np.float32)
    summarize = values.size > options.threshold
    shown = (_shown(values) if summarize else values).reshape(-1)
    formatter: Any = _ComplexFormatter(shown) if shown.dtype.kind == "c" else _Formatter(shown)
    return _nested(values, indent, summarize, formatter)


def with_suffixes(text: str, suffixes: list[str], indent: int) -> str:
    """``text`` and its suffixes, on new lines where the line is full, and a bracket."""
    parts, used = [text], len(text) - text.rfind("\n") + 1
    for suffix in suffixes:
        if used + len(suffix) + 2 > options.linewidth:
            parts.append(",\n" + " " * indent + suffix)
            used = indent + len(suffix)
        else:
            parts.append(", " + suffix)
            used += len(suffix) + 2
    return "".join(parts) + ")"
