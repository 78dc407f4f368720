import multiprocessing as mp

import tensorplay as tp
import tensorplay.distributed as dist
import tensorplay.nn as nn
from tensorplay.distributed.fsdp import fully_shard


def worker(rank, world_size):
    dist.init_process_group(
        "gloo", init_method="tcp://127.0.0.1:29571",
        rank=rank, world_size=world_size,
    )
    tp.manual_seed(42)                    # identical init and data per rank
    model = nn.Linear(8, 8)
    x = tp.randn(4, 8)

    model = fully_shard(model)
    shards = {n: tuple(p.shape) for n, p in model.named_parameters()}
    print(rank, shards)                   # {'weight': (4, 8), 'bias': (4,)}

    out = model(x)                        # all-gather inside the forward
    out.sum().backward()                  # reduce-scatter after backward
    grads = {n: tuple(p.grad.shape) for n, p in model.named_parameters()}
    print(rank, grads)                    # shard shapes again

    tp.optim.SGD(model.parameters(), lr=0.1).step()
    model.unshard()                       # gather to check the result
    print(rank, tuple(next(model.parameters()).shape))   # (8, 8)
    dist.destroy_process_group()


if __name__ == "__main__":
    ctx = mp.get_context("spawn")
    procs = [ctx.Process(target=worker, args=(r, 2)) for r in range(2)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()
