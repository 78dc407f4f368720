"""Trains a byte-level GPT with fully_shard, by default on the sources of the standard library.

    python examples/train_gpt.py                         two processes, about three minutes
    python examples/train_gpt.py --data FILE --nproc 4   your text, four processes
    python examples/train_gpt.py --out DIR               run again, goes on from DIR's checkpoint
    python examples/train_gpt.py --ranks threads         ranks as threads of this process
    python examples/train_gpt.py --ranks controller      this thread drives all devices

The parent process starts one process per rank and ends them all if one fails. Each rank holds a
part of every parameter and trains on its own part of the batch. With one controller the model is
called with the whole batch, and the library splits it.
"""

import argparse
import math
import os
import random
import socket
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np

import tensorplay as tp
import tensorplay.distributed as dist
import tensorplay.nn as nn
import tensorplay.nn.functional as F
from tensorplay.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from tensorplay.distributed.device_mesh import init_device_mesh
from tensorplay.distributed.fsdp import fully_shard
from tensorplay.multiprocessing import spawn

# --- the model -----------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and an MLP, each behind a LayerNorm: (batch, length, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: tp.Tensor) -> tp.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.attention_norm(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Bytes (batch, length) to logits of each next byte (batch, length, 256)."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: tp.Tensor) -> tp.Tensor:
        x = self.token(tokens) + self.position(tp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# --- the data ------------------------------------------------------------------------------------


def read_text(path: Path | None) -> np.ndarray:
    """The bytes of ``path``, or of the standard library's modules in a fixed random order."""
    if path is not None:
        return np.frombuffer(path.read_bytes(), np.uint8)
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
    files = [f for f in library.rglob("*.py") if not left_out & set(f.relative_to(library).parts)]
    files.sort()
    random.Random(0).shuffle(files)
    return np.frombuffer(b"\n".join(f.read_bytes() for f in files), np.uint8)


def batch_at(text: np.ndarray, starts: np.ndarray, length: int) -> tuple[tp.Tensor, tp.Tensor]:
    """The ``length`` bytes from each of ``starts`` on, and for each byte the one that follows."""
    windows = text[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return tp.from_numpy(windows[:, :-1]), tp.from_numpy(windows[:, 1:])


# --- training ------------------------------------------------------------------------------------


def train(rank: int, port: int | None, args: argparse.Namespace) -> None:
    """What each rank runs, or one controller; processes meet at ``port``."""
    ranks, mesh = args.nproc, None
    if args.ranks == "controller":
        mesh = init_device_mesh("cpu", (ranks,))
    if port is not None:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    text = read_text(args.data)
    train_text, held_out_text = np.split(text, [len(text) - len(text) // 20])
    if len(held_out_text) <= args.length:
        raise SystemExit(f"{len(text)} bytes are too few for windows of {args.length} bytes")

    tp.manual_seed(args.seed)
    model = GPT(args.width, args.layers, args.heads, args.length)
    size = sum(p.numel() for p in model.parameters())
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = tp.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = tp.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, args.steps))

    first = load(args.out, model, optimizer, schedule) if args.out else 0
    if rank == 0:
        print(f"{ranks} ranks, {size:,} parameters, {len(text):,} bytes of text", flush=True)
        if first:
            print(f"going on after step {first}", flush=True)

    losses: list[tp.Tensor] = []
    clock = time.perf_counter()
    last = args.stop_at or args.steps
    for step in range(first + 1, last + 1):
        # The seed and the step alone say what a batch is, so a rerun goes on with the same data.
        chosen = np.random.default_rng([args.seed, step])
        starts = chosen.integers(len(train_text) - args.length, size=ranks * args.batch)
        inputs, targets = batch_at(train_text, own(starts, rank, args), args.length)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
        if step % args.log_every == 0 or step == last:
            mean = mean_over_ranks(losses)
            seconds = (time.perf_counter() - clock) / len(losses)
            speed = ranks * args.batch * args.length / seconds
            minutes, rest = divmod(round((args.steps - step) * seconds), 60)
            held_out = held_out_loss(model, held_out_text, rank, args, 4)
            if rank == 0:
                print(
                    f"step {step:>5}/{args.steps}  loss {mean:.4f}  held-out {held_out:.4f}  "
                    f"{speed:>7,.0f} tokens/s  {minutes}:{rest:02} left",
                    flush=True,
                )
            losses, clock = [], time.perf_counter()
        if args.out and (step % args.save_every == 0 or step == last):
            save(args.out, rank, step, model, optimizer, schedule)

    bits = held_out_loss(model, held_out_text, rank, args, args.eval_batches) / math.log(2)
    sample = generate(model, held_out_text[: args.length], args.sample)
    if rank == 0:
        print(f"held-out text: {bits:.3f} bits per byte")
        print(f"--- a sample ---\n{sample}", flush=True)
    if port is not None:
        dist.destroy_process_group()


def own(starts: np.ndarray, rank: int, args: argparse.Namespace) -> np.ndarray:
    """A rank's part of a batch; one controller has all of it."""
    return starts if args.ranks == "controller" else starts[rank :: args.nproc]


def lr_factor(step: int, steps: int) -> float:
    """Rises linearly to 1 in the first twentieth, then falls along a cosine to 0.1."""
    warmup = steps // 20
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))


def held_out_loss(
    model: nn.Module, text: np.ndarray, rank: int, args: argparse.Namespace, batches: int
) -> float:
    """Mean loss over ``batches`` on each rank, from places spread evenly over the text."""
    size = args.nproc * batches * args.batch
    starts = np.linspace(0, len(text) - args.length - 1, size).astype(int)
    losses = []
    model.eval()
    with tp.no_grad():
        for part in np.split(own(starts, rank, args), batches):
            inputs, targets = batch_at(text, part, args.length)
            losses.append(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
    model.train()
    return mean_over_ranks(losses)


def mean_over_ranks(values: list[tp.Tensor]) -> float:
    """The mean of the values of all ranks, equally many on each."""
    mean = tp.stack(values).mean()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean.item()


def generate(model: nn.Module, prompt: np.ndarray, count: int) -> str:
    """Draws ``count`` bytes that follow ``prompt``; every rank must call it."""
    window = tp.from_numpy(prompt.astype(np.int64)).unsqueeze(0)
    drawn = []
    model.eval()
    with tp.no_grad():
        for _ in range(count):
            # One controller gives each rank the whole window and joins their equal answers.
            logits = model(dist.replicate(window))[:1, -1]
            odds = F.softmax(logits / 0.8, dim=-1)
            byte = tp.multinomial(odds, 1)
            window = tp.cat([window[:, 1:], byte], dim=1)
            drawn.append(byte.item())
    return bytes(drawn).decode(errors="replace")


# --- checkpoints ---------------------------------------------------------------------------------

WHOLE = StateDictOptions(full_state_dict=True)


def save(
    folder: Path, rank: int, step: int, model: nn.Module, optimizer: Any, schedule: Any
) -> None:
    """Every rank takes part in gathering; rank 0 replaces the file in one go."""
    weights, optimizer_state = get_state_dict(model, optimizer, options=WHOLE)
    checkpoint = {
        "step": step,
        "model": weights,
        "optimizer": optimizer_state,
        "schedule": schedule.state_dict(),
        "random": tp.get_rng_state(),
    }
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        tp.save(checkpoint, folder / "checkpoint.tp")


def load(folder: Path, model: nn.Module, optimizer: Any, schedule: Any) -> int:
    """Returns the step after which the checkpoint was saved, 0 if there is none."""
    if not (folder / "checkpoint.tp").exists():
        return 0
    saved = tp.load(folder / "checkpoint.tp")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=WHOLE,
    )
    schedule.load_state_dict(saved["schedule"])
    tp.set_rng_state(saved["random"])
    return int(saved["step"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="text to train on; its last twentieth is held out")
    add("--out", type=Path, help="folder of the checkpoint, from which a rerun goes on")
    add("--nproc", type=int, default=2, help="number of ranks (default: 2)")
    add("--ranks", choices=("processes", "threads", "controller"), default="processes")
    add("--steps", type=int, default=1300, help="length of the learning rate's course")
    add("--stop-at", type=int, help="end after this step; a rerun goes on from there")
    add("--batch", type=int, default=8, help="windows per rank and step")
    add("--length", type=int, default=128, help="bytes per window")
    add("--width", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    add("--log-every", type=int, default=50)
    add("--save-every", type=int, default=250)
    add("--eval-batches", type=int, default=32, help="per rank, for the final held-out figure")
    add("--sample", type=int, default=400, help="bytes of text to draw at the end")
    args = parser.parse_args()
    if args.ranks == "threads":
        dist.run_ranks(train, args.nproc, args=(None, args))
        return
    if args.ranks == "controller":
        devices = f"--xla_force_host_platform_device_count={args.nproc}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    if args.nproc == 1 or args.ranks == "controller":
        return train(0, None, args)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    try:
        spawn(train, args=(port, args), nprocs=args.nproc)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
