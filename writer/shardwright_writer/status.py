"""What `writer status` shows: one snapshot, as values, as JSON, and as tables.

The server makes it (`render_json`), the command line reads it (`WriterStatus.from_json`) and
shows it (`print_status`). Sizes in bytes, times in seconds. It changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from shardwright_writer.clients import Client, Clients
    from shardwright_writer.config import Config
    from shardwright_writer.save import Save
    from shardwright_writer.saves import Saves

_STARTED_S = time.monotonic()


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """One trainer process that is attached, or whose save still lives."""

    client_id: str
    job: str
    local_rank: int
    pid: int
    uid: int
    transport: str  # "shared" or "inline"
    connected: bool
    lease_bytes: int
    window_bytes: int
    slots_total: int
    slots_used: int  # held until their bytes are durable


@dataclass(frozen=True, slots=True)
class SaveStatus:
    """One save under way."""

    save_id: str
    job: str
    rank: int
    world_size: int
    step: int  # 0: not given
    path: str
    state: str  # OPENED, RECEIVING, CAPTURED, COMMITTING, COMMITTED, FAILED
    stage: str
    bytes_received: int
    bytes_durable: int
    bytes_total: int
    age_s: float
    silent_s: float  # since something moved


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """The writer of this node. `schema` grows by one when a field changes its meaning."""

    schema: int
    socket: str
    roots: list[str]
    server_pid: int
    generation: int
    crashes: int
    uptime_s: float  # of this server generation
    draining: bool
    memory_budget_bytes: int
    arena_bytes_max: int
    arena_bytes_leased: int
    saves_committed: int
    saves_failed: int
    bytes_committed: int
    clients: list[ClientStatus]
    saves: list[SaveStatus]

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WriterStatus:
        """Return the snapshot that a writer sent. Fields of a newer writer are left out."""
        values = _known(cls, json.loads(text))
        values["clients"] = [ClientStatus(**_known(ClientStatus, c)) for c in values["clients"]]
        values["saves"] = [SaveStatus(**_known(SaveStatus, save)) for save in values["saves"]]
        return cls(**values)


def _known(cls: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    return {option.name: values[option.name] for option in dataclasses.fields(cls)}


# --- the server's side --------------------------------------------------------------------------


def render_json(
    config: Config, clients: Clients, saves: Saves, generation: int, crashes: int
) -> str:
    """Return the snapshot of a running server. Call it on the event loop."""
    return WriterStatus(
        schema=1,
        socket=config.socket,
        roots=list(config.roots),
        server_pid=os.getpid(),
        generation=generation,
        crashes=crashes,
        uptime_s=round(time.monotonic() - _STARTED_S, 3),
        draining=saves.draining,
        memory_budget_bytes=config.memory_budget,
        arena_bytes_max=clients.budget.bytes_max,
        arena_bytes_leased=clients.budget.bytes_leased,
        saves_committed=saves.committed_count,
        saves_failed=saves.failed_count,
        bytes_committed=saves.bytes_committed,
        clients=[_client_status(client) for client in clients.by_id.values()],
        saves=[_save_status(save) for save in saves.live.values()],
    ).to_json()


def _client_status(client: Client) -> ClientStatus:
    return ClientStatus(
        client_id=client.client_id,
        job=client.job,
        local_rank=client.local_rank,
        pid=client.owner.pid,
        uid=client.uid,
        transport="inline" if client.inline else "shared",
        connected=client.connected,
        lease_bytes=client.lease.lease_bytes,
        window_bytes=client.lease.window_bytes,
        slots_total=client.lease.slot_count,
        slots_used=len(client.lease.users),
    )


def _save_status(save: Save) -> SaveStatus:
    now_s = time.monotonic()
    return SaveStatus(
        save_id=save.spec.save_id,
        job=save.spec.job_id,
        rank=save.spec.rank,
        world_size=save.spec.world_size,
        step=save.spec.step,
        path=f"{save.folder.path}/{save.spec.file_name}",
        state=save.state.name,
        stage=save.stage,
        bytes_received=save.bytes_received,
        bytes_durable=save.pipeline.bytes_durable if save.pipeline is not None else 0,
        bytes_total=save.bytes_total,
        age_s=round(now_s - save.opened_s, 3),
        silent_s=round(now_s - save.moved_s, 3),
    )


# --- the command line's side --------------------------------------------------------------------


def print_status(status: WriterStatus, console: Console) -> None:
    """Show the snapshot to a person."""
    from rich.table import Table
    from rich.text import Text

    crashes = f", {status.crashes} crashes" if status.crashes else ""
    state = "draining" if status.draining else "serving"
    console.print(
        Text(f"writer at {status.socket}: {state} for {_span(status.uptime_s)}"),
        Text(f"  server pid {status.server_pid}, generation {status.generation}{crashes}"),
        Text(
            f"  memory budget {_size(status.memory_budget_bytes)}, arena"
            f" {_size(status.arena_bytes_leased)} leased of {_size(status.arena_bytes_max)}"
        ),
        Text(
            f"  saves: {status.saves_committed} committed ({_size(status.bytes_committed)}),"
            f" {status.saves_failed} failed, {len(status.saves)} under way"
        ),
        sep="\n",
    )
    if status.clients:
        table = Table("rank", "pid", "uid", "job", "transport", "lease", "slots in use")
        for client in status.clients:
            road = client.transport if client.connected else f"{client.transport} (away)"
            table.add_row(
                *(str(client.local_rank), str(client.pid), str(client.uid), Text(client.job)),
                *(road, _size(client.lease_bytes), f"{client.slots_used} of {client.slots_total}"),
            )
        console.print(table)
    if status.saves:
        table = Table(
            "save", "rank", "step", "stage", "received", "durable", "total", "age", "path"
        )
        for save in status.saves:
            table.add_row(
                *(save.save_id[:8], f"{save.rank} of {save.world_size}", str(save.step or "")),
                *(save.stage, _size(save.bytes_received), _size(save.bytes_durable)),
                *(_size(save.bytes_total), _span(save.age_s), Text(save.path)),
            )
        console.print(table)


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
