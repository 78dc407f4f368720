"""Records what PyTorch's fully_shard computes on two gloo processes: torch_values.json.

Run with a Python that has torch; the tests themselves do not need it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


class Mlp(nn.Module):
    """As in helpers.py."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.outer = nn.Linear(7, 3)

    def forward(self, x: Any) -> Any:
        return self.outer(torch.tanh(self.inner(x)))


def values(tensor: Any) -> Any:
    """The whole tensor as nested lists."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().tolist()


def worker(rank: int, queue: Any) -> None:
    """One rank: five steps of AdamW with clipping, on data of its own."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29871")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Mlp()
    start = {n: values(p) for n, p in model.named_parameters()}
    fully_shard(model.inner)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    steps = []
    for step in range(5):
        optimizer.zero_grad()
        x = np.random.RandomState(100 * step + rank).randn(4, 5).astype(np.float32)
        loss = model(torch.from_numpy(x)).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        grads = {n: values(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        steps.append({"loss": loss.item(), "norm": values(norm), "grads": grads})
    queue.put((rank, start, steps, {n: values(p) for n, p in model.named_parameters()}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Starts both ranks and writes the file."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=worker, args=(rank, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    found = sorted([queue.get(), queue.get()], key=lambda item: item[0])
    for process in processes:
        process.join()
    record = {"start": found[0][1], "steps": [f[2] for f in found], "params": found[0][3]}
    Path(__file__).with_name("torch_values.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
