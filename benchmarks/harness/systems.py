"""The systems under test, each behind the same four calls, and the table of all of them.

The conductor reads the table (`SYSTEMS`) without importing torch; a trainer process builds one
system by name and drives it. A system decides how it is called, as its own documentation says;
it takes no time and no memory figures: `trainer` does that, alike for all.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.state import State

WAIT_S_MAX = 600.0


def nothing() -> None:
    """Stand for what a synchronous system has left to wait for."""


@dataclass(frozen=True, slots=True)
class Running:
    """A save that was begun. captured() returns when tensors may change, durable() at its end."""

    captured: Callable[[], object] = nothing
    durable: Callable[[], object] = nothing
    transport: Callable[[], str] = str


class System(Protocol):
    """One way to save a state dict."""

    def attach(self, state: State) -> None:
        """Get ready, once, before the first save: what its documentation has users do."""

    def begin(self, state: State, path: str) -> Running:
        """Start a save; returns when the trainer would go on. path is new, its folder exists."""

    def close(self) -> None:
        """End, once, after the last save."""


class Base:
    """A system with nothing to do at start and end."""

    def attach(self, state: State) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Nothing to end."""


class TorchSave(Base):
    """`torch.save`, with its default CRC."""

    def begin(self, state: State, path: str) -> Running:
        """Save; the harness fsyncs afterwards."""
        import torch

        torch.save(state, path)
        return Running()


class SafetensorsSave(Base):
    """`safetensors.torch.save_file`."""

    def begin(self, state: State, path: str) -> Running:
        """Save; the harness fsyncs afterwards."""
        from safetensors.torch import save_file

        save_file(state, path)
        return Running()


class DcpSave(Base):
    """`torch.distributed.checkpoint.save` on one rank."""

    def begin(self, state: State, path: str) -> Running:
        """Save; it fsyncs its files itself."""
        import torch.distributed.checkpoint as dcp

        dcp.save(state, checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]
        return Running()


def start_gloo() -> None:
    """Make the one-rank process group that the asynchronous peers ask for."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1",
        LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
    )  # fmt: skip
    dist.init_process_group("gloo")


class DcpAsyncSave:
    """`torch.distributed.checkpoint.async_save` with its default stager."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def attach(self, state: State) -> None:
        """Start the process group. The writing process starts with the first save."""
        start_gloo()

    def begin(self, state: State, path: str) -> Running:
        """Return once the state is copied."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kind = AsyncCheckpointerType[self._kind.upper()]
        save: Any = dcp.async_save  # type: ignore[attr-defined]
        response = save(state, checkpoint_id=path, async_checkpointer_type=kind)
        future = getattr(response, "upload_completion", response)
        return Running(durable=lambda: future.result(WAIT_S_MAX))

    def close(self) -> None:
        """End the process group."""
        import torch.distributed as dist

        dist.destroy_process_group()


class TorchCheckpointing:
    """torch_checkpointing's asynchronous manager, set up for CPU tensors as its docs say."""

    def __init__(self) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        start_gloo()
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        # Its default, O_DIRECT, passes unaligned buffers: every save fails with EINVAL on ext4.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager: Any = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging), storage_config=storage
            )
        )

    def attach(self, state: State) -> None:
        """Allocate its staging buffers."""
        self._manager.prewarm_staging({"state": state})

    def begin(self, state: State, path: str) -> Running:
        """Return early; its lock guards the tensors until they are staged."""
        future = self._manager.save(path, {"state": state})

        def captured() -> None:
            with self._manager.lock():
                pass

        return Running(captured=captured, durable=lambda: future.result(WAIT_S_MAX))

    def close(self) -> None:
        """End its process."""
        self._manager.close()


class TorchSnapshot(Base):
    """`torchsnapshot.Snapshot.async_take`."""

    def __init__(self) -> None:
        from torchsnapshot import Snapshot, StateDict

        self._snapshot, self._state_dict = Snapshot, StateDict

    def begin(self, state: State, path: str) -> Running:
        """Return once the state is copied."""
        pending = self._snapshot.async_take(path, {"app": self._state_dict(**state)})
        return Running(durable=pending.wait)


class Shardwright(Base):
    """`shardwright.async_save` through the node's writer (SHARDWRIGHT_ENDPOINT)."""

    def __init__(self, format_name: str) -> None:
        import shardwright

        self._module: Any = shardwright
        self._format = format_name

    def attach(self, state: State) -> None:
        """Attach, have the arena populated, send the plan."""
        self._module.prepare(state, format=self._format)

    def begin(self, state: State, path: str) -> Running:
        """For CPU tensors it returns once they are copied; `trainer` proves that they were."""
        pending = self._module.async_save(state, path, format=self._format, on_error="raise")
        return Running(
            durable=lambda: pending.committed(WAIT_S_MAX),
            transport=lambda: str(pending.transport),
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the table: a system, where it runs and what comes out.

    trainer: systems with the same value share a trainer process (and a writer). file_name: what
    to save as; "" for a folder. loader: the stock loader that reads it back, "" for none.
    syncs: its end means that file and folder are fsynced; the others are fsynced by the harness,
    inside the measured time.
    """

    name: str
    build: Callable[[], System]
    trainer: str
    file_name: str = "checkpoint"
    loader: str = ""
    syncs: bool = False
    writer: str = ""  # the writer it talks to: "", "arena", "small", "inline"
    inline: bool = False


def _ours(name: str, format_name: str, trainer: str, writer: str, inline: bool = False) -> Entry:
    suffix = "pt" if format_name == "torch" else "safetensors"
    return Entry(
        name, lambda: Shardwright(format_name), trainer, f"state.{suffix}", format_name,
        syncs=True, writer=writer, inline=inline,
    )  # fmt: skip


SYSTEMS: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("torch.save", TorchSave, "torch", "state.pt", "torch"),
        _ours("shardwright:torch", "torch", "ours", "arena"),
        Entry(
            "safetensors.save_file", SafetensorsSave, "safetensors", "state.safetensors",
            "safetensors",
        ),
        _ours("shardwright:safetensors", "safetensors", "ours", "arena"),
        Entry("dcp.save", DcpSave, "dcp"),
        _ours("shardwright:torch:small-budget", "torch", "ours-small", "small"),
        Entry("dcp.async_save:thread", lambda: DcpAsyncSave("thread"), "dcp-thread"),
        _ours("shardwright:safetensors:small-budget", "safetensors", "ours-small", "small"),
        Entry("dcp.async_save:process", lambda: DcpAsyncSave("process"), "dcp-process"),
        _ours("shardwright:torch:inline", "torch", "ours-inline", "inline", inline=True),
        Entry("torch_checkpointing", TorchCheckpointing, "torch_checkpointing"),
        Entry("torchsnapshot", TorchSnapshot, "torchsnapshot"),
    )
}  # fmt: skip
"""In the order of a round; ours and the peers alternate."""

MANY_TENSORS = (
    "torch.save",
    "shardwright:torch",
    "safetensors.save_file",
    "shardwright:safetensors",
)
"""The systems that the state of many tiny tensors is saved with."""
