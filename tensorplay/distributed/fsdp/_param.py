"""FSDPParam: one parameter of a group, as a shard and as a whole.

Words: the *sharded parameter* is the ``Parameter`` that optimizers see, with this rank's rows; the
*unsharded parameter* is the ``Parameter`` that the module's forward sees, the gathered whole. Its
*owners* are the modules that hold it under some name; a tied parameter has several.
"""

from __future__ import annotations

from typing import Any

from ..._graph import Edge
from ..._tensor import _OWN_STATE, Storage, Tensor
from ...nn._module import Module
from ...nn._parameter import Parameter
from .._layout import Layout
from ._api import MixedPrecisionPolicy
from ._collectives import ParamSpec

Owner = tuple[Module, str]

_STALE = (
    "the parameter {name!r} was replaced by its shard when fully_shard was applied, so a step on "
    "it would change nothing. Make the optimizer after fully_shard, from model.parameters()"
)


class FSDPParam:
    """See the module's docstring.

    Attributes:
        name: the full name, from the module that fully_shard was applied to.
        sharded: the sharded parameter.
        unsharded: the unsharded parameter while there is one.
        post_forward: the parameter over the pieces that stay after forward, while there is one.
        tied_to: the name under which an earlier call sharded the very same parameter, or None.
    """

    def __init__(self, name: str, owners: list[Owner], param: Parameter, layout: Layout) -> None:
        self.name, self.owners, self.layout = name, owners, layout
        self.sharded = _sharded_parameter(name, param, layout)
        self.unsharded: Parameter | None = None
        self.post_forward: Parameter | None = None
        self.tied_to: str | None = param.__dict__.get("_fsdp_sharded_as")
        param._fsdp_sharded_as = name  # type: ignore[attr-defined]
        param._refusal = _STALE.format(name=name)

    @property
    def trainable(self) -> bool:
        return self.sharded._requires_grad

    def version(self) -> tuple[int, int]:
        """Changes with every in-place write to the sharded parameter."""
        storage = self.sharded._storage
        return id(storage), storage.version

    def spec(self, policy: MixedPrecisionPolicy) -> ParamSpec:
        """What the collectives need to know."""
        own = self.sharded.dtype
        casts = policy.param_dtype is not None and own.is_floating_point
        compute = policy.param_dtype if casts else own
        assert compute is not None
        return ParamSpec(self.layout.global_shape, self.layout.dim, own.name, compute.name)

    def show(self, param: Parameter) -> None:
        """Puts ``param`` in the place of the parameter in its owners."""
        for module, name in self.owners:
            module._parameters[name] = param

    def adopt_replacement(self) -> None:
        """Takes up a parameter that the user put in the place of the sharded one.

        Raises:
            RuntimeError: the new one is not a shard of the same layout.
        """
        module, attribute = self.owners[0]
        now = module._parameters.get(attribute)
        if now is self.sharded or now is self.unsharded or now is self.post_forward:
            return
        if now is None or now._layout != self.layout:
            found = "None" if now is None else f"a plain parameter of shape {tuple(now.shape)}"
            raise RuntimeError(
                f"the sharded parameter {self.name!r} ({self.layout}) was replaced by {found}. "
                "Copy values into it under no_grad, load a state dict, or assign a parameter with "
                "the same sharding, such as nn.Parameter(old.detach().clone())"
            )
        now.__dict__.setdefault("_fsdp_name", self.name)
        self.sharded = now
        self.show(now)

    def make_unsharded(self, whole: Any, edge: Edge | None) -> Parameter:
        """A parameter over the gathered whole, whose gradient flows to ``edge``.

        An optimizer that is made from it updates the sharded parameter.
        """
        out = Parameter.__new__(Parameter)
        out._storage = Storage(whole)
        out._requires_grad = self.trainable
        out._stands_for = self.sharded
        if edge is not None:
            out._gradient_edge = edge
        _copy_user_attributes(self.sharded, out)
        return out

    def make_post_forward(self, layout: Layout, piece: Any) -> Parameter:
        """A parameter over the pieces that stay after forward; an optimizer made from it updates
        the sharded parameter."""
        out = Parameter.__new__(Parameter)
        layout.fill(out, piece)
        out._requires_grad = self.trainable
        out._stands_for = self.sharded
        _copy_user_attributes(self.sharded, out)
        out.__dict__["_fsdp_name"] = self.name
        return out


def _sharded_parameter(name: str, param: Parameter, layout: Layout) -> Parameter:
    out = type(param).__new__(type(param))
    whole = param._storage.array if param.is_meta else param._read()
    layout.fill(out, layout.cut(whole))
    out._requires_grad = param._requires_grad
    _copy_user_attributes(param, out)
    out._fsdp_name = name  # type: ignore[attr-defined]
    return out


def _copy_user_attributes(source: Tensor, target: Tensor) -> None:
    for name, value in source.__dict__.items():
        if name not in _OWN_STATE and not name.startswith("_fsdp"):
            target.__dict__[name] = value
