"""One rank of the demo's training run: a character transformer, DDP on CPU, saves by shardwright.

Started by main_job.py with RANK, WORLD_SIZE and LOCAL_WORLD_SIZE set, as torchrun would. Prints
one line of JSON per step and per save; main_job.py shows them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import shardwright

CONTEXT = 64
BATCH = 4
WIDTH = 448
LAYERS = 6


class Text(Dataset[torch.Tensor]):
    """Windows of CONTEXT + 1 characters of Python's own source; item i is the same in every run."""

    def __init__(self, rank: int) -> None:
        folder = Path(os.__file__).parent
        names = ("argparse.py", "asyncio/tasks.py", "dataclasses.py", "typing.py")
        text = "".join((folder / name).read_text() for name in names)
        self.data = torch.tensor([min(ord(character), 127) for character in text])
        self.rank = rank

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        start = random.Random(f"{self.rank}/{index}").randrange(len(self.data) - CONTEXT - 1)
        return self.data[start : start + CONTEXT + 1]


class Transformer(nn.Module):
    """A small decoder with dropout, so that the RNG state matters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.place = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 8, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embed(tokens) + self.place, mask=self.mask, is_causal=True)
        return self.head(hidden)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--store", required=True, help="file for the process group's rendezvous")
    parser.add_argument(
        "--resume", type=int, default=0, help="step of the checkpoint to go on from"
    )
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{options.store}", rank=rank, world_size=world_size
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    torch.manual_seed(1000 + rank)
    if options.resume:
        load(options.checkpoints, options.resume, rank, model, optimizer)
    train(options, rank, model, optimizer)
    dist.destroy_process_group()


def train(
    options: argparse.Namespace,
    rank: int,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
) -> None:
    first = options.resume * BATCH
    loader = iter(
        DataLoader(
            Text(rank),
            batch_size=BATCH,
            sampler=range(first, options.steps * BATCH),
            num_workers=1,
            generator=torch.Generator(),  # else starting the workers draws from the model's RNG
            multiprocessing_context="fork",
        )
    )
    prepared = False
    pending: list[tuple[int, shardwright.PendingSave, float]] = []
    for step in range(options.resume + 1, options.steps + 1):
        started = time.perf_counter()
        tokens = next(loader)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(rank, "step", step=step, loss=loss.item().hex(), seconds=time.perf_counter() - started)
        if step % options.save_every == 0 and not options.resume:
            if not prepared:
                shardwright.prepare(state_of(rank, step, model, optimizer), format="torch")
                prepared = True
            pending.append(save(options.checkpoints, step, rank, model, optimizer))
    for step, handle, stall_s in pending:
        handle.committed(timeout_s=60)
        say(
            rank,
            "save",
            step=step,
            stall_s=stall_s,
            bytes=handle.progress.bytes_total,
            transport=handle.transport,
            error=str(handle.error) if handle.error else None,
        )


def state_of(
    rank: int, step: int, model: DistributedDataParallel, optimizer: torch.optim.Optimizer
) -> dict[str, object]:
    """Rank 0 holds model and optimizer (they are equal on all ranks); every rank its RNG."""
    state: dict[str, object] = {"step": step, "rng": torch.get_rng_state()}
    if rank == 0:
        state |= {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    return state


def save(
    folder: Path,
    step: int,
    rank: int,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
) -> tuple[int, shardwright.PendingSave, float]:
    started = time.perf_counter()
    path = folder / f"step-{step:04d}" / f"rank-{rank}.pt"
    handle = shardwright.async_save(state_of(rank, step, model, optimizer), path, step=step)
    return step, handle, time.perf_counter() - started


def load(
    folder: Path,
    step: int,
    rank: int,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Stock torch.load, nothing of ours."""
    files = [folder / f"step-{step:04d}" / f"rank-{number}.pt" for number in (0, rank)]
    shared, own = (torch.load(file, weights_only=True) for file in files)
    model.module.load_state_dict(shared["model"])
    optimizer.load_state_dict(shared["optimizer"])
    torch.set_rng_state(own["rng"])


def say(rank: int, event: str, **facts: object) -> None:
    print(json.dumps({"event": event, "rank": rank, **facts}), flush=True)


if __name__ == "__main__":
    main()
