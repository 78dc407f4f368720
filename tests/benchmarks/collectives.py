"""Ways to write each collective in jax.lax, timed against one another on each backend.

    python tests/benchmarks/collectives.py [--mib 16] [--ranks 2] [--only reduce_scatter]

prints, for ranks that are processes (gloo) and for rank threads, the median time of each
formulation and its ratio to the fastest. `tensorplay/distributed/_lax_collectives.py` uses the
winners.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import operator
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import tensorplay.distributed as dist
from tensorplay.distributed import _lax_collectives as ours
from tensorplay.distributed._control import free_port
from tensorplay.distributed._spmd import launch, per_rank_jit, shared_program
from tensorplay.distributed._world import current_world

Formulation = Callable[[Any, str, int], Any]


def ring_all_reduce(x: Any, axis: str, ranks: int) -> Any:
    row = ours.ring_reduce_scatter(x.reshape(ranks, -1), axis, ranks, operator.add)
    return lax.all_gather(row, axis)


def gather_and_add(x: Any, axis: str, ranks: int) -> Any:
    return lax.all_gather(x, axis).sum(0)


def scatter_by_exchange(x: Any, axis: str, ranks: int) -> Any:
    return lax.all_to_all(x.reshape(ranks, -1), axis, 0, 0).sum(0)


def exchange_and_gather(x: Any, axis: str, ranks: int) -> Any:
    return lax.all_gather(scatter_by_exchange(x, axis, ranks), axis)


def exchange_by_permutes(x: Any, axis: str, ranks: int) -> Any:
    rows = x.reshape(ranks, -1)
    own, result = lax.axis_index(axis), rows
    for step in range(1, ranks):
        pairs = [(r, (r + step) % ranks) for r in range(ranks)]
        received = lax.ppermute(jnp.take(rows, (own + step) % ranks, axis=0), axis, pairs)
        result = result.at[(own - step) % ranks].set(received)
    return result


def gather_by_ring(x: Any, axis: str, ranks: int) -> Any:
    own = lax.axis_index(axis)
    rows = jnp.zeros((ranks, *x.shape), x.dtype).at[own].set(x)
    to_next = [(r, (r + 1) % ranks) for r in range(ranks)]
    for step in range(1, ranks):
        x = lax.ppermute(x, axis, to_next)
        rows = rows.at[(own - step) % ranks].set(x)
    return rows


FORMULATIONS: dict[str, dict[str, Formulation]] = {
    "all_reduce": {
        "psum": lambda x, axis, ranks: lax.psum(x, axis),
        "ring, all_gather": ring_all_reduce,
        "all_to_all, add, all_gather": exchange_and_gather,
        "all_gather, add": gather_and_add,
    },
    "reduce_scatter": {
        "psum_scatter": lambda x, axis, ranks: lax.psum_scatter(
            x.reshape(ranks, -1), axis, scatter_dimension=0, tiled=False
        ),
        "ring": lambda x, axis, ranks: ours.ring_reduce_scatter(
            x.reshape(ranks, -1), axis, ranks, operator.add
        ),
        "all_to_all, add": scatter_by_exchange,
    },
    "all_gather": {
        "all_gather": lambda x, axis, ranks: lax.all_gather(x, axis),
        "ring": gather_by_ring,
    },
    "broadcast": {
        "masked psum": lambda x, axis, ranks: lax.psum(
            jnp.where(lax.axis_index(axis) == 0, x, 0), axis
        ),
        "all_gather, index": lambda x, axis, ranks: lax.all_gather(x, axis)[0],
        "tree of permutes": lambda x, axis, ranks: ours.broadcast(x, axis, ranks, 0),
    },
    "all_to_all": {
        "all_to_all": lambda x, axis, ranks: lax.all_to_all(x.reshape(ranks, -1), axis, 0, 0),
        "permutes": exchange_by_permutes,
    },
    "gather": {
        "all_gather": lambda x, axis, ranks: lax.all_gather(x, axis),
        "permutes": lambda x, axis, ranks: ours.gather(x, axis, ranks, 0, gloo=True),
    },
    "scatter": {
        "all_to_all, index": lambda x, axis, ranks: lax.all_to_all(
            x.reshape(ranks, -1), axis, 0, 0
        )[0],
        "permutes": lambda x, axis, ranks: ours.scatter(list(x.reshape(ranks, -1)), axis, ranks, 0),
    },
}


def median_seconds(name: str, label: str, mib: float, repeats: int = 9) -> float:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),)).jax_mesh
    fn = FORMULATIONS[name][label]

    def build() -> Any:
        body = functools.partial(fn, axis=mesh.axis_names[0], ranks=mesh.size)
        return per_rank_jit(lambda x: [body(x)], mesh)

    program = shared_program((name, label, mesh), build)
    size = int(mib * 2**20) // 4 // mesh.size * mesh.size
    x = jax.device_put(np.ones(size, np.float32), current_world().device)
    times = []
    for _ in range(repeats + 2):
        dist.barrier()
        start = time.perf_counter()
        jax.block_until_ready(launch(mesh, program, [x])[0].local)
        times.append(time.perf_counter() - start)
    return float(np.median(times[2:]))


def measure(rank: int, mib: float, names: list[str]) -> dict[str, dict[str, float]]:
    return {
        name: {label: median_seconds(name, label, mib) for label in FORMULATIONS[name]}
        for name in names
    }


def measure_process(
    rank: int, ranks: int, port: int, mib: float, names: list[str], queue: Any
) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    found = measure(rank, mib, names)
    if rank == 0:
        queue.put(found)
    dist.destroy_process_group()


def measure_processes(ranks: int, mib: float, names: list[str]) -> dict[str, dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    port = free_port("127.0.0.1")
    processes = [
        context.Process(target=measure_process, args=(rank, ranks, port, mib, names, queue))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = queue.get(timeout=600)
    for process in processes:
        process.join()
    return found


def show(title: str, found: dict[str, dict[str, float]]) -> None:
    print(title)
    for name, times in found.items():
        best = min(times.values())
        listing = ", ".join(f"{k} {v * 1e3:.1f} ms ({v / best:.1f}x)" for k, v in times.items())
        print(f"  {name}: {listing}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=16.0, help="size of each rank's input")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(FORMULATIONS), help="collectives")
    options = parser.parse_args()
    title = f"{options.ranks} ranks, {options.mib:g} MiB of float32 each"
    processes = measure_processes(options.ranks, options.mib, options.only)
    show(f"{title}, processes (gloo)", processes)
    threads = dist.run_ranks(measure, options.ranks, args=(options.mib, options.only))[0]
    show(f"{title}, threads", threads)


if __name__ == "__main__":
    main()
