"""``replicate``: a tensor that one controller gives whole to every rank."""

from __future__ import annotations

from .._tensor import Tensor


def replicate(tensor: Tensor) -> Tensor:
    """Marks an argument that every rank gets whole, though dim 0 may be of the batch's size.

    It matters where one controller drives a mesh and splits the batch over its ranks; elsewhere a
    rank's arguments are its own, and this returns the tensor as it is.
    """
    out: Tensor = tensor.view_as(tensor) if tensor.requires_grad else tensor.detach()
    out.__dict__["_replicated"] = True
    return out


def is_replicated(tensor: Tensor) -> bool:
    """Whether the tensor came from `replicate`."""
    return "_replicated" in tensor.__dict__
