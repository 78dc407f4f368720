"""Tensors over the ranks of a mesh, as torch.distributed.tensor."""

from .._placements import Partial as Partial
from .._placements import Placement as Placement
from .._placements import Replicate as Replicate
from .._placements import Shard as Shard
from ..device_mesh import DeviceMesh as DeviceMesh
from ..device_mesh import init_device_mesh as init_device_mesh
from ._dtensor import DTensor as DTensor
from ._dtensor import distribute_tensor as distribute_tensor
from ._dtensor import full as full
from ._dtensor import ones as ones
from ._dtensor import zeros as zeros
