"""After a crash: rebuild clients and saves from the fds that the supervisor kept.

Runs once, before the new server serves. The old server was reaped, so nothing else touches the
journals, arenas and temporary files taken over here. Decides nothing about a save's outcome: it
puts each where it was, and `save` goes on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from typing import TYPE_CHECKING

import numpy as np

from shardwright_writer import formats
from shardwright_writer.crc import fold_crcs
from shardwright_writer.journal import Journal, Phase, WindowState
from shardwright_writer.names import Owner
from shardwright_writer.opening import lay_out, open_files
from shardwright_writer.plan_codec import parse_plan
from shardwright_writer.refusal import Reason, Refusal, bug
from shardwright_writer.save import Save
from shardwright_writer.session import State
from shardwright_writer.spec import SaveSpec
from shardwright_writer.storage.posix import PosixFolder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardwright_writer.clients import Client, Clients
    from shardwright_writer.fdstore import FdStore
    from shardwright_writer.opening import Opening
    from shardwright_writer.saves import Saves

_log = logging.getLogger(__name__)

_ADOPTIONS_MAX = 5
"""A save that was there each time the server died that often is given up: it may be the reason."""

_STATE_OF_PHASE = {
    Phase.RECEIVING: State.RECEIVING,
    Phase.CAPTURED: State.CAPTURED,
    Phase.PUBLISHING: State.COMMITTING,
    Phase.COMMITTED: State.COMMITTED,
}


def recover(restored: dict[str, int], clients: Clients, saves: Saves, fds: FdStore) -> None:
    """Take over every client and save; close and drop what belongs to none."""
    known: dict[str, Client] = {}
    for key in [key for key in restored if key.startswith("client/")]:
        client_id = key.partition("/")[2]
        fd = restored.pop(key)
        meta = json.loads(os.pread(fd, 1 << 16, 0))
        os.close(fd)
        segments = _segments_of(client_id, restored)
        known[client_id] = clients.adopt(meta, segments)
    for key in [key for key in restored if key.startswith("journal/")]:
        save_id = key.partition("/")[2]
        folder_fd = restored.pop(f"target/{save_id}", -1)
        _take_over(save_id, restored.pop(key), folder_fd, known, saves, fds)
    for key, fd in restored.items():
        _log.info("nothing needs %s any more", key)
        os.close(fd)
        fds.drop(key)


def _segments_of(client_id: str, restored: dict[str, int]) -> list[tuple[int, int, int, int]]:
    found = []
    for key in [key for key in restored if key.startswith(f"segment/{client_id}/")]:
        segment_id, first_slot, size = map(int, key.split("/")[2:])
        found.append((segment_id, first_slot, size, restored.pop(key)))
    return sorted(found)


def _take_over(
    save_id: str, fd: int, folder_fd: int, known: dict[str, Client], saves: Saves, fds: FdStore
) -> None:
    try:
        journal = Journal(fd)
        client = known[journal.meta["client_id"]]
        save = _rebuild(journal, client, folder_fd, saves)
    except Exception:  # noqa: BLE001 -- whatever it is, the other saves must go on
        _log.exception("%s cannot be taken over, its temporary files stay", save_id)
        for key, orphan in ((f"journal/{save_id}", fd), (f"target/{save_id}", folder_fd)):
            fds.drop(key)
            with contextlib.suppress(OSError):
                os.close(orphan)
        return
    saves.log(save, "taken over", state=save.state.name)
    try:
        adoptions = journal.count_adoption()
        if adoptions > _ADOPTIONS_MAX and save.state is not State.COMMITTED:
            raise Refusal(
                Reason.INTERNAL,
                f"the server has died {adoptions} times with this save under way",
                "please report it; the previous checkpoint is untouched",
            )
        _go_on(save, journal)
    except Refusal as refusal:
        save.fail(refusal)
    except Exception as error:  # noqa: BLE001 -- as above: never a server that cannot start
        save.fail(bug(error))
    else:
        saves.detached(save)


def _rebuild(journal: Journal, client: Client, folder_fd: int, saves: Saves) -> Save:
    meta = journal.meta
    spec = SaveSpec(
        save_id=meta["save_id"],
        file_name=meta["file_name"],
        mode=meta["mode"],
        rank=meta["rank"],
        world_size=meta["world_size"],
        step=meta["step"],
        job_id=meta["job_id"],
        owner=Owner(meta["owner_pid"], meta["owner_start_time"]),
    )
    plan = parse_plan(journal.plan)
    layout = formats.get_format(plan.format).layout(plan)
    folder = PosixFolder(folder_fd, meta["folder_path"], client.uid, client.gid)
    save = Save(spec, client, folder, plan, layout, saves)
    save.journal = journal
    saves.add(save, folder.key())
    save.state = _STATE_OF_PHASE[journal.phase]
    return save


def _go_on(save: Save, journal: Journal) -> None:
    """Reopen the files and give the pipeline what the dead server had left."""
    skeleton, tag = bytes(journal.skeleton), journal.meta["tag"]
    opening = lay_out(save.spec, save.plan, save.layout, skeleton, save.window_bytes, tag)
    if save.state in (State.COMMITTING, State.COMMITTED):
        # All data is durable; renames may have been done, so there may be nothing to reopen.
        save.resume_commit(opening, _shard_crcs(save, opening, journal))
        return
    save.go(open_files(save.folder, save.spec, opening, reopen=True), journal)
    assert save.pipeline is not None
    save.pipeline.start()
    for row, state in enumerate(journal.states.tolist()):
        if state == WindowState.DURABLE:
            save.restore(row)
        elif state == WindowState.RECEIVED:
            file, window = opening.table.place(row)
            slot = int(journal.slots[row])
            save.bytes_received += opening.table.shard_bytes(row)
            save.client.lease.users[slot] = (save.spec.save_id, file, window)
            save.pipeline.submit(file, window, save.client.lease.slot(slot))


def _shard_crcs(save: Save, opening: Opening, journal: Journal) -> NDArray[np.uint32]:
    crcs = np.zeros(len(save.plan.names), np.uint32)
    for row in range(len(opening.table)):
        file, window = opening.table.place(row)
        start = window * save.window_bytes
        pieces = opening.images[file].pieces(start, start + save.window_bytes)
        fold_crcs(crcs, pieces, journal.piece_crcs[opening.table.pieces(row)])
    return crcs
