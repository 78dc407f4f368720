"""The base class under which type checkers see what ``_ops.methods`` attaches to ``Tensor``."""


class Attached:
    """Empty at run time; ``_attached.pyi`` lists the operators."""

    __slots__ = ()
