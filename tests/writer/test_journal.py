"""A journal read back through another mapping of the same memory, as a new server does."""

from __future__ import annotations

import os

import numpy as np
import pytest

from shardwright_writer.journal import Journal, Phase, WindowState


def test_a_new_server_reads_what_the_old_one_wrote() -> None:
    journal = Journal.create({"save_id": "x", "file_count": 2}, b"plan" * 9, b"pickle", 5, 7)
    journal.states[3] = WindowState.DURABLE
    journal.slots[3] = 11
    journal.generations[3] = 1 << 40
    journal.piece_crcs[:] = np.arange(7)
    journal.inodes[:] = [5, 6]
    journal.phase = Phase.CAPTURED
    again = Journal(os.dup(journal.fd))
    assert bytes(again.plan) == b"plan" * 9 and bytes(again.skeleton) == b"pickle"
    assert again.meta == {"save_id": "x", "file_count": 2}
    assert again.states.tolist() == [0, 0, 0, 2, 0]
    assert int(again.slots[3]) == 11 and int(again.generations[3]) == 1 << 40
    assert again.piece_crcs.tolist() == list(range(7)) and again.inodes.tolist() == [5, 6]
    assert again.phase is Phase.CAPTURED
    assert [again.count_adoption(), again.count_adoption()] == [1, 2]


def test_an_empty_save_has_a_journal_too() -> None:
    assert len(Journal.create({"file_count": 1}, b"", b"", 0, 0).states) == 0


def test_other_memory_is_not_taken_for_a_journal() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="not a shardwright journal"):
        Journal(fd)
