"""Trains a byte-level GPT with fully_shard, by default on the sources of the standard library.

    python examples/train_gpt.py                         two processes, about three minutes
    python examples/train_gpt.py --data FILE --nproc 4   your text, four processes
    python examples/train_gpt.py --out DIR               the same again goes on from DIR's checkpoint

The parent process starts one process per rank and ends them all if one fails. Each rank holds a
part of every parameter and trains on its own part of the batch.
"""

import argparse
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import socket
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np

import tensorplay as tp
import tensorplay.distributed as dist
import tensorplay.nn as nn
import tensorplay.nn.functional as F
from tensorplay.distributed.fsdp import fully_shard

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
    files = sorted(
        f for f in library.rglob("*.py") if not left_out & set(f.relative_to(library).parts)
    )
    random.Random(0).shuffle(files)
    return np.frombuffer(b"\n".join(f.read_bytes() for f in files), np.uint8)


class Windows:
    """Windows of ``length + 1`` bytes, in a new random order each time all were used.

    ``position`` counts the windows handed out, over all ranks: all there is to save.
    """

    def __init__(self, text: np.ndarray, length: int, seed: int) -> None:
        count = (len(text) - 1) // length
        if count < 1:
            raise SystemExit(f"the text is too short: {len(text)} bytes, length {length}")
        self.text, self.length, self.seed, self.count = text, length, seed, count
        self.position = 0
        self._order: tuple[int, np.ndarray] | None = None

    def next_batch(self, rank: int, ranks: int, size: int) -> tuple[tp.Tensor, tp.Tensor]:
        """This rank's ``size`` windows of the next batch, as (inputs, targets)."""
        first = self.position + rank * size
        self.position += ranks * size
        return self.batch([self._window(i) for i in range(first, first + size)])

    def batch(self, windows: list[int]) -> tuple[tp.Tensor, tp.Tensor]:
        starts = np.array(windows)[:, None] * self.length
        tokens = self.text[starts + np.arange(self.length + 1)].astype(np.int64)
        return tp.from_numpy(tokens[:, :-1]), tp.from_numpy(tokens[:, 1:])

    def _window(self, index: int) -> int:
        epoch, place = divmod(index, self.count)
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.count)
            self._order = (epoch, order)
        return int(self._order[1][place])


# --- training ------------------------------------------------------------------------------------


def loss_of(model: nn.Module, inputs: tp.Tensor, targets: tp.Tensor) -> tp.Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def held_out_loss(model: nn.Module, windows: Windows, size: int, batches: int) -> float:
    """Mean loss over windows spread evenly over the text; every rank takes the same ones."""
    model.eval()
    chosen = np.linspace(0, windows.count - 1, size * batches).astype(int).tolist()
    with tp.no_grad():
        losses = [
            loss_of(model, *windows.batch(chosen[i * size : (i + 1) * size]))
            for i in range(batches)
        ]
    model.train()
    return sum(loss.item() for loss in losses) / batches


def learning_rate_factor(step: int, warmup: int, steps: int) -> float:
    """Rises linearly to 1, then falls along a cosine to 0.1."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def train(rank: int, ranks: int, args: argparse.Namespace) -> None:
    """What each rank runs."""
    text = read_text(args.data)
    cut = len(text) - len(text) // 20
    windows = Windows(text[:cut], args.length, args.seed)
    held_out = Windows(text[cut:], args.length, args.seed)

    tp.manual_seed(args.seed)
    model = GPT(args.width, args.layers, args.heads, args.length)
    size = sum(p.numel() for p in model.parameters())
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    optimizer = tp.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = tp.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, args.steps // 20, args.steps)
    )
    run = Run(rank, ranks, model, optimizer, schedule, windows)
    first = run.load(args.out) if args.out else 0
    if rank == 0:
        print(f"{ranks} ranks, {size:,} parameters, {len(text):,} bytes of text", flush=True)
        if first:
            print(f"going on from step {first}", flush=True)

    losses: list[tp.Tensor] = []
    clock = time.perf_counter()
    last = args.stop_at or args.steps
    for step in range(first + 1, last + 1):
        inputs, targets = windows.next_batch(rank, ranks, args.batch)
        loss = loss_of(model, inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
        if step % args.log_every == 0 or step == last:
            mean = sum(x.item() for x in losses) / len(losses)
            seconds = (time.perf_counter() - clock) / len(losses)
            other = held_out_loss(model, held_out, args.batch, 2)
            if rank == 0:
                print(progress(step, args, mean, other, ranks, seconds), flush=True)
            losses, clock = [], time.perf_counter()
        if args.out and (step % args.save_every == 0 or step == last):
            run.save(args.out, step)

    bits = held_out_loss(model, held_out, args.batch, args.eval_batches) / math.log(2)
    sample = generate(model, held_out.batch([0])[0], args.sample)
    if rank == 0:
        print(f"held-out text: {bits:.3f} bits per byte")
        print(f"--- a sample ---\n{sample}", flush=True)


def progress(
    step: int, args: argparse.Namespace, loss: float, held_out: float, ranks: int, seconds: float
) -> str:
    speed = ranks * args.batch * args.length / seconds
    minutes, rest = divmod(round((args.steps - step) * seconds), 60)
    return (
        f"step {step:>5}/{args.steps}  loss {loss:.4f}  held-out {held_out:.4f}  "
        f"{speed:>7,.0f} tokens/s  {minutes}:{rest:02} left"
    )


def generate(model: nn.Module, prompt: tp.Tensor, count: int) -> str:
    """Draws ``count`` bytes after ``prompt``, (1, length); every rank must call it."""
    model.eval()
    text = prompt
    with tp.no_grad():
        for _ in range(count):
            logits = model(text[:, -prompt.shape[1] :])[:, -1]
            drawn = tp.multinomial(F.softmax(logits / 0.8, dim=-1), 1)
            text = tp.cat([text, drawn], dim=1)
    return bytes(text[0, prompt.shape[1] :].tolist()).decode(errors="replace")


# --- checkpoints ---------------------------------------------------------------------------------


class Run:
    """What a checkpoint holds, and how it is saved and loaded."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        model: nn.Module,
        optimizer: tp.optim.Optimizer,
        schedule: tp.optim.lr_scheduler.LRScheduler,
        windows: Windows,
    ) -> None:
        self.rank, self.ranks, self.model, self.optimizer = rank, ranks, model, optimizer
        self.schedule, self.windows = schedule, windows

    def save(self, folder: Path, step: int) -> None:
        """Every rank gathers the whole tensors; rank 0 writes them, replacing the file at once."""
        arrays = {f"model.{n}": p.full_tensor() for n, p in self.model.state_dict().items()}
        optimizer = self.optimizer.state_dict()
        for index, state in optimizer["state"].items():
            arrays |= {f"optimizer.{index}.{k}": v.full_tensor() for k, v in state.items()}
        arrays["rng"] = tp.get_rng_state()
        rest = {
            "step": step,
            "position": self.windows.position,
            "schedule": self.schedule.state_dict(),
            "param_groups": optimizer["param_groups"],
        }
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "checkpoint.tmp", "wb") as file:
                values = {name: t.detach().numpy() for name, t in arrays.items()}
                np.savez(file, json=json.dumps(rest), **values)
            os.replace(folder / "checkpoint.tmp", folder / "checkpoint.npz")

    def load(self, folder: Path) -> int:
        """Each rank takes its rows of the saved tensors. Returns the step; 0 without checkpoint."""
        if not (folder / "checkpoint.npz").exists():
            return 0
        with np.load(folder / "checkpoint.npz") as file:
            saved = dict(file)
        rest = json.loads(str(saved.pop("json")))
        with tp.no_grad():
            for name, p in self.model.state_dict().items():
                p.to_local().copy_(tp.from_numpy(self._rows(saved[f"model.{name}"])))
        state: dict[int, dict[str, np.ndarray]] = {}
        for name, array in saved.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".")
                state.setdefault(int(index), {})[key] = self._rows(array)
        self.optimizer.load_state_dict({"state": state, "param_groups": rest["param_groups"]})
        self.schedule.load_state_dict(rest["schedule"])
        self.windows.position = rest["position"]
        tp.set_rng_state(tp.from_numpy(saved["rng"]))
        return int(rest["step"])

    def _rows(self, whole: np.ndarray) -> np.ndarray:
        """This rank's rows: the same number on each rank, fewer or none on the last ones."""
        if whole.ndim == 0:
            return whole
        rows = -(-len(whole) // self.ranks)
        return whole[self.rank * rows : (self.rank + 1) * rows]


# --- processes -----------------------------------------------------------------------------------


def rank_main(rank: int, port: int, args: argparse.Namespace) -> None:
    """One process: joins the others, trains, leaves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.nproc
    )
    train(rank, args.nproc, args)
    dist.destroy_process_group()


def launch(args: argparse.Namespace) -> int:
    """Runs ``args.nproc`` ranks and ends them all when one fails. Returns the exit status."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(r, port, args)) for r in range(args.nproc)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for process in ranks:
            process.start()
        running = ranks
        while running and not any(p.exitcode for p in ranks):
            multiprocessing.connection.wait([p.sentinel for p in running])
            running = [p for p in running if p.is_alive()]
        return int(any(p.exitcode for p in ranks))
    except KeyboardInterrupt:
        return 130
    finally:
        for process in ranks:
            if process.is_alive():
                process.terminate()
                process.join()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="text to train on; its last twentieth is held out")
    add("--out", type=Path, help="folder of the checkpoint, from which a rerun goes on")
    add("--nproc", type=int, default=2, help="number of processes (default: 2)")
    add("--steps", type=int, default=600)
    add("--stop-at", type=int, help="end after this step; a rerun goes on from there")
    add("--batch", type=int, default=16, help="windows per rank and step")
    add("--length", type=int, default=128, help="bytes per window")
    add("--width", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    add("--log-every", type=int, default=25)
    add("--save-every", type=int, default=100)
    add("--eval-batches", type=int, default=32, help="batches for the final held-out figure")
    add("--sample", type=int, default=400, help="bytes of text to draw at the end")
    args = parser.parse_args()
    if args.nproc > 1:
        return launch(args)
    train(0, 1, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
