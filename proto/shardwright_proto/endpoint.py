"""Where the handshake socket is: one rule for the trainer, the daemon and the command line.

First in every client's flow, and read by `writer serve` to choose its default. Standard library
only. It names paths and checks who owns their folders; it opens no socket and makes nothing.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

ENDPOINT_VARIABLE: Final = "SHARDWRIGHT_ENDPOINT"
SYSTEM_SOCKET: Final = "/run/shardwright/writer.sock"
SOCKET_PATH_BYTES_MAX: Final = 107
"""The kernel's limit for a unix socket's path (sun_path less its final zero byte)."""

_SCHEME: Final = "unix://"


class EndpointError(ValueError):
    """The endpoint is not one that a client can connect to; the message says what is wrong."""


def parse_endpoint(endpoint: str) -> str:
    """Return the path in `unix://PATH`. A bare absolute path is taken as it is."""
    path = endpoint.removeprefix(_SCHEME)
    if not path.startswith("/"):
        raise EndpointError(
            f"endpoint {endpoint!r} is not unix://PATH with an absolute PATH"
            " (example: unix:///run/shardwright/writer.sock)"
        )
    if "\0" in path or len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise EndpointError(
            f"endpoint {endpoint!r}: a socket's path has at most {SOCKET_PATH_BYTES_MAX} bytes"
        )
    return path


def socket_candidates(environment: Mapping[str, str]) -> list[str]:
    """Return the default sockets, best first: the node's, the login session's, the user's."""
    candidates = [SYSTEM_SOCKET]
    runtime_folder = environment.get("XDG_RUNTIME_DIR", "")
    if runtime_folder.startswith("/"):
        candidates.append(f"{runtime_folder}/shardwright/writer.sock")
    candidates.append(f"/tmp/shardwright-{os.geteuid()}/writer.sock")  # noqa: S108 - owner is checked
    return candidates


def client_socket_path(environment: Mapping[str, str]) -> str:
    """Return the socket to connect to: the one named by the environment, or a default.

    Of the defaults the first that exists is taken, in a folder that nobody else could have made;
    with none there it is the first, so that the error names the usual place.
    """
    endpoint = environment.get(ENDPOINT_VARIABLE, "")
    if endpoint:
        return parse_endpoint(endpoint)
    candidates = socket_candidates(environment)
    for path in candidates:
        if os.path.exists(path) and folder_is_ours(os.path.dirname(path)):
            return path
    return candidates[0]


def server_socket_path(environment: Mapping[str, str]) -> str:
    """Return the first default socket whose folder this user can have, made or not yet."""
    candidates = socket_candidates(environment)
    for path in candidates:
        folder = os.path.dirname(path)
        if os.path.lexists(folder):
            if folder_is_ours(folder) and os.access(folder, os.W_OK | os.X_OK):
                return path
        elif os.access(os.path.dirname(folder), os.W_OK | os.X_OK):
            return path
    raise EndpointError(
        f"none of the default sockets can be made here ({', '.join(candidates)}): name one"
    )


def folder_is_ours(folder: str) -> bool:
    """Tell whether only we or root can put sockets there: /tmp is open to everybody's names."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    others_may_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid in {0, os.geteuid()} and not others_may_write
    )
