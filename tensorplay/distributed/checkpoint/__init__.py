"""State of sharded models in and out, as torch.distributed.checkpoint."""

from . import state_dict as state_dict
