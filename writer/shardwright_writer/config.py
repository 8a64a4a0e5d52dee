"""Every option of the writer, once: its default, its environment variable, its bounds.

First in the daemon's flow: the command line loads a `Config`, and supervisor and server get it
as JSON. Standard library alone, because both keep it resident; a validation framework would cost
more memory than the supervisor itself. Nothing else in the writer reads the environment.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shardwright_proto.endpoint import EndpointError, client_socket_path, server_socket_path
from shardwright_proto.limits import REATTACH_DEADLINE_S
from shardwright_writer.memory import BUDGET_BYTES_MIN, derive_memory_budget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ENVIRONMENT_PREFIX: Final = "SHARDWRIGHT_WRITER_"
SOCKET_BYTES_MAX: Final = 88
"""The server's own sockets lie beside PATH, as PATH.d/grpc.<generation>.sock, within 107 bytes."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_EXPONENT = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class ConfigError(ValueError):
    """An option is wrong; the message names it, its value and what it should be."""


def parse_size(text: str) -> int:
    """Return the bytes in "4GiB", "256 MiB", "1G" (2**30, as everywhere here) or "1048576"."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size (examples: 4GiB, 256MiB, 1G, 1048576)")
    return int(float(match[1]) * 1024 ** _EXPONENT[match[2].upper()])


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.replace(",", " ").split())


def _paths(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(os.pathsep) if word)


def _truth(text: str) -> bool:
    if text.lower() not in {"0", "1", "false", "true", "no", "yes", "off", "on"}:
        raise ConfigError(f"{text!r} is neither true nor false")
    return text.lower() in {"1", "true", "yes", "on"}


def _option(parse: Callable[[str], Any], **arguments: Any) -> Any:
    """Return a dataclass field that knows how its environment variable reads."""
    return field(metadata={"parse": parse}, **arguments)


def _io_threads_default() -> int:
    return min(8, max(2, 2 * len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The daemon's options, checked. Sizes in bytes, times in seconds, paths absolute."""

    socket: str = _option(str)
    memory_budget: int = _option(parse_size)
    roots: tuple[str, ...] = _option(_paths)
    node_local: bool = _option(_truth, default=False)
    allow_uids: tuple[int, ...] = _option(_integers, default=())
    allow_gids: tuple[int, ...] = _option(_integers, default=())
    drain_timeout_s: float = _option(float, default=300.0)
    reattach_timeout_s: float = _option(float, default=REATTACH_DEADLINE_S)
    io_timeout_s: float = _option(float, default=300.0)  # storage that answers no write
    lock_timeout_s: float = _option(float, default=30.0)
    log_format: str = _option(str, default="text")
    io_threads: int = _option(int, default_factory=_io_threads_default)

    def __post_init__(self) -> None:
        _check_socket(self.socket)
        if not self.node_local:
            raise ConfigError(
                "say --node-local: this release serves the ranks of its own node only"
            )
        if not self.roots:
            raise ConfigError("no --root: name at least one folder that saves may go to")
        self._check_numbers()
        if self.log_format not in {"text", "json"}:
            raise ConfigError(f'log_format {self.log_format!r} is neither "text" nor "json"')

    def _check_numbers(self) -> None:
        bounds: dict[str, tuple[float, float]] = {
            "memory_budget": (BUDGET_BYTES_MIN, 1 << 50),
            "drain_timeout_s": (0, 7 * 86400),
            "reattach_timeout_s": (0, 86400),
            "io_timeout_s": (1, 7 * 86400),
            "lock_timeout_s": (0, 86400),
            "io_threads": (1, 256),
        }
        for name, (least, most) in bounds.items():
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}, not in {least}..{most}")
        for name in ("allow_uids", "allow_gids"):
            if not all(0 <= number < 1 << 32 for number in getattr(self, name)):
                raise ConfigError(f"{name} holds a number that is no id: {getattr(self, name)}")

    @property
    def open_to_others(self) -> bool:
        """Whether users other than the writer's own and root may connect."""
        return bool(self.allow_uids or self.allow_gids)

    @property
    def runtime_folder(self) -> str:
        """The folder of the server's own sockets."""
        return f"{self.socket}.d"

    @property
    def lock_path(self) -> str:
        """The file whose flock says that a writer owns this socket."""
        return f"{self.socket}.lock"

    def to_json(self) -> str:
        """Return what `from_json` reads: how a Config travels to supervisor and server."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Return the Config that `to_json` wrote. Raises ConfigError."""
        values = json.loads(text)
        for name in ("roots", "allow_uids", "allow_gids"):
            values[name] = tuple(values[name])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A Config, and in words where its memory budget came from."""

    config: Config
    budget_source: str


def load_config(options: Mapping[str, Any], environment: Mapping[str, str]) -> LoadedConfig:
    """Merge what was said on the command line, the environment, and the defaults, in that order.

    options: by field name; None and empty lists mean "not said". Raises ConfigError.
    """
    values = {name: value for name, value in options.items() if value not in (None, [], ())}
    for option in dataclasses.fields(Config):
        variable = ENVIRONMENT_PREFIX + option.name.upper()
        if option.name not in values and environment.get(variable):
            try:
                values[option.name] = option.metadata["parse"](environment[variable])
            except ValueError as error:
                raise ConfigError(f"{variable}: {error}") from None
    budget_source = "as given"
    if "memory_budget" not in values:
        values["memory_budget"], budget_source = derive_memory_budget()
    try:
        values["socket"] = os.path.abspath(values.get("socket") or server_socket_path(environment))
    except EndpointError as error:
        raise ConfigError(f"{error} with --socket") from None
    values["roots"] = _resolve_roots(values.get("roots", ()))
    for name in ("allow_uids", "allow_gids"):
        values[name] = tuple(values.get(name, ()))
    return LoadedConfig(config=Config(**values), budget_source=budget_source)


def find_socket(given: str | None, environment: Mapping[str, str]) -> str:
    """Return the handshake socket that a command should ask: given, or as a client finds it."""
    path = given or environment.get(f"{ENVIRONMENT_PREFIX}SOCKET")
    try:
        return os.path.abspath(path) if path else client_socket_path(environment)
    except EndpointError as error:
        raise ConfigError(str(error)) from None


def _resolve_roots(roots: Sequence[str]) -> tuple[str, ...]:
    """Follow every symbolic link now, so that none made later can lead a save elsewhere."""
    resolved = tuple(dict.fromkeys(os.path.realpath(root) for root in roots))
    for root in resolved:
        if not os.path.isdir(root):
            raise ConfigError(f"--root {root} is not an existing folder")
    return resolved


def _check_socket(path: str) -> None:
    length = len(os.fsencode(path))
    if not os.path.isabs(path):
        raise ConfigError(f"--socket {path} is not an absolute path")
    if length > SOCKET_BYTES_MAX:
        raise ConfigError(
            f"--socket {path} has {length} bytes, at most {SOCKET_BYTES_MAX} are possible: unix"
            " sockets' paths end at 107, and the server's own lie in a folder beside it"
        )
