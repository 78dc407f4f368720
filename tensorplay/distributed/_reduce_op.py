"""ReduceOp: how a collective combines the ranks' elements."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from .._dtypes import dtype, scalar_name


class ReduceOp:
    """An elementwise reduction. Source: torch.distributed.ReduceOp.

    SUM, PRODUCT, MIN and MAX take every real dtype; on bool they mean "or", "and", "and" and "or".
    AVG takes floating and complex dtypes, SUM complex ones too, BAND, BOR and BXOR integers and
    bool. PREMUL_SUM multiplies each rank's tensor by that rank's own factor first and takes
    floating and complex dtypes; `_make_nccl_premul_sum` makes one.

    Attributes:
        name: "SUM", ...
        factor: of PREMUL_SUM: a number or a tensor of one element.
    """

    SUM: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    PREMUL_SUM: ClassVar[ReduceOp]
    RedOpType: ClassVar[type[ReduceOp]]

    name: str
    factor: Any

    def __new__(cls, op: ReduceOp | str, factor: Any = None) -> Self:
        made = super().__new__(cls)
        made.name, made.factor = (op.name, op.factor) if isinstance(op, ReduceOp) else (op, factor)
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReduceOp) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return f"RedOpType.{self.name}"

    def __repr__(self) -> str:
        return f"<{self}>"

    def __reduce__(self) -> tuple[Any, tuple[str, Any]]:
        return (ReduceOp, (self.name, self.factor))

    def check(self, collective: str, of: dtype) -> None:
        """Raises where the reduction is not defined on a dtype, as torch.distributed does.

        Raises:
            ValueError: a complex dtype, except for sums and averages.
            RuntimeError: another dtype that the reduction does not take, or PREMUL_SUM without
                a factor.
        """
        if of.is_complex and self.name not in _ON_COMPLEX:
            raise ValueError(f"{collective} does not support {self} on complex tensors")
        if self.name in _BITWISE and of.is_floating_point:
            raise RuntimeError(f"Cannot use ReduceOp.{self.name} with non-integral dtype")
        integral = not (of.is_floating_point or of.is_complex)
        if self.name == "AVG" and integral:
            raise RuntimeError(
                "result type Float can't be cast to the desired output type " + scalar_name(of)
            )
        if self.name == "PREMUL_SUM":
            if integral:
                raise RuntimeError(f"Cannot use ReduceOp.PREMUL_SUM with integral dtype {of}")
            if self.factor is None:
                raise RuntimeError(
                    "ReduceOp.PREMUL_SUM needs a factor: pass _make_nccl_premul_sum(factor)"
                )


_BITWISE = ("BAND", "BOR", "BXOR")
_ON_COMPLEX = ("SUM", "AVG", "PREMUL_SUM")
ReduceOp.RedOpType = ReduceOp
for _name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", *_BITWISE, "PREMUL_SUM"):
    setattr(ReduceOp, _name, ReduceOp(_name))


def _make_nccl_premul_sum(factor: Any) -> ReduceOp:
    """A PREMUL_SUM: the sum of the ranks' tensors, each times its own rank's ``factor``.

    Source: torch.distributed._make_nccl_premul_sum.

    Args:
        factor: a number or a tensor of one element.
    """
    return ReduceOp("PREMUL_SUM", factor)


def checked_op(op: Any) -> ReduceOp:
    """``op`` itself.

    Raises:
        TypeError: it is no `ReduceOp`.
    """
    if not isinstance(op, ReduceOp):
        raise TypeError(f"op must be a ReduceOp, such as ReduceOp.SUM, but got {op!r}")
    return op
