"""ShardedGradScaler. Source: torch.distributed.fsdp.sharded_grad_scaler."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..._tensor import wrap
from ...amp.grad_scaler import GradScaler
from .._collectives import all_reduce
from .._process_group import Group, is_initialized
from .._reduce_op import ReduceOp


class ShardedGradScaler(GradScaler):
    """A `GradScaler` whose ranks also agree on gradients that are not sharded.

    Parameters that FSDP ignores have gradients of their own on each rank: an infinite one on one
    rank makes all ranks of ``process_group`` skip the step.

    Args:
        process_group: the ranks; default all.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Group = None,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self.process_group = process_group

    def _over_ranks(self, found: list[Any]) -> list[Any]:
        if not is_initialized():
            return found
        with jax.enable_x64(True):
            worst = [jnp.asarray(bad).reshape(1) for bad in found] or [jnp.zeros(1, jnp.float32)]
            total = wrap(jnp.max(jnp.concatenate(worst), keepdims=True))
        all_reduce(total, ReduceOp.MAX, self.process_group)
        return [total._read().reshape(())] if found else []
