"""Every setting and every deadline of the client, read from the environment once.

Used by all client modules; imports none of them. The only place that reads the environment. It
does not decide anything: an argument of `save` or `prepare` always goes before a setting here.

    SHARDWRIGHT_ENDPOINT             unix://PATH of the writer's handshake socket
    SHARDWRIGHT_TRANSPORT            shared (default) or inline
    SHARDWRIGHT_ON_ERROR             skip (default), raise or local
    SHARDWRIGHT_ARENA_BYTES          shared memory to ask for; 0 (default): as large as the object
    SHARDWRIGHT_INLINE_BUFFER_BYTES  private memory of the inline road (default 64 MiB)
    SHARDWRIGHT_SIGTERM              1 (default): on SIGTERM wait for pending saves first; 0: do not
    SHARDWRIGHT_EXIT_WAIT_S          how long exit and SIGTERM wait at most (default 120)
    SHARDWRIGHT_<any deadline below> in upper case, seconds: SHARDWRIGHT_STALL_TIMEOUT_S=60
    SHARDWRIGHT_JOB                  name of the job for logs (default: Slurm's or torchrun's id)

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE   as torchrun sets them
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from shardwright_proto.endpoint import client_socket_path, parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TRANSPORTS: Final = ("shared", "inline")
ON_ERRORS: Final = ("skip", "raise", "local")


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. Every wait in the client is bounded by one of the `_s` fields."""

    transport: str = "shared"
    on_error: str = "skip"
    arena_bytes: int = 0
    inline_buffer_bytes: int = 64 << 20
    sigterm: bool = True
    job: str = ""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    connect_timeout_s: float = 5.0
    """First attach: until the supervisor has accepted and a server has answered."""
    request_timeout_s: float = 10.0
    """One handshake request (target, offer, grow) on a live connection."""
    prepare_timeout_s: float = 120.0
    """prepare(): until all arena segments are there and populated."""
    stall_timeout_s: float = 30.0
    """A save fails when its writer says nothing for so long, re-attaching included."""
    progress_timeout_s: float = 900.0
    """A save fails when its writer speaks, but nothing of it has moved for so long."""
    slot_timeout_s: float = 120.0
    """Staging waits at most so long for the writer to give back one slot."""
    retry_min_s: float = 0.05
    retry_max_s: float = 0.2
    """Pause between two attempts to reach the writer again."""
    reclaim_pause_s: float = 5.0
    reclaim_timeout_s: float = 600.0
    """After a failed save: how long to ask the writer for its slots back before they are lost."""
    exit_wait_s: float = 120.0
    """Exit and SIGTERM: the most that pending saves are waited for."""
    exit_stall_s: float = 10.0
    """Exit and SIGTERM: the most that is waited while no byte moves."""


_RENAMED: Final[dict[str, tuple[str, ...]]] = {
    "job": ("SHARDWRIGHT_JOB", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"),
    "rank": ("RANK",),
    "world_size": ("WORLD_SIZE",),
    "local_rank": ("LOCAL_RANK",),
    "local_world_size": ("LOCAL_WORLD_SIZE",),
}
_CHOICES: Final[dict[str, tuple[str, ...]]] = {"transport": TRANSPORTS, "on_error": ON_ERRORS}


def load(environment: Mapping[str, str]) -> Config:
    """Return the settings of an environment. Raises ValueError, naming the variable at fault."""
    values: dict[str, str | int | float | bool] = {}
    for field in fields(Config):
        for variable in _RENAMED.get(field.name, (f"SHARDWRIGHT_{field.name.upper()}",)):
            text = environment.get(variable, "").strip()
            if text:
                values[field.name] = _parse(field.name, str(field.type), variable, text)
                break
    return Config(**values)  # type: ignore[arg-type]  # the types are those that _parse chose


def _parse(name: str, kind: str, variable: str, text: str) -> str | int | float | bool:
    value: str | int | float | bool
    try:
        value = _PARSERS[kind](text)
    except ValueError:
        raise ValueError(f"{variable}={text!r} is not a valid {kind}") from None
    choices = _CHOICES.get(name)
    if choices is not None and value not in choices:
        raise ValueError(f"{variable}={text!r} is not one of {', '.join(choices)}")
    if not isinstance(value, str) and not (0 <= value < float("inf")):
        raise ValueError(f"{variable}={text!r} must be a finite number that is not negative")
    return value


def _parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


_PARSERS: Final[dict[str, Callable[[str], str | int | float | bool]]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": _parse_bool,
}


def socket_path(endpoint: str | None) -> str:
    """Return the handshake socket's path: the argument's, the environment's, or a default.

    The one setting that is read at every call: a process may move on to another writer. Raises
    shardwright_proto.endpoint.EndpointError (a ValueError) for an endpoint that cannot be.
    """
    return parse_endpoint(endpoint) if endpoint else client_socket_path(os.environ)


def rank_and_world(settings: Config) -> tuple[int, int]:
    """Return this process's rank and the world size: torch.distributed's, or the environment's."""
    # Only if it is there already: no import, and no collective.
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return settings.rank, settings.world_size


_loaded: Config | None = None


def get() -> Config:
    """Return this process's settings, read from its environment at the first call."""
    global _loaded
    if _loaded is None:
        _loaded = load(os.environ)
    return _loaded


def forget() -> None:
    """Read the environment anew at the next `get`: in a forked child, and in tests."""
    global _loaded
    _loaded = None
