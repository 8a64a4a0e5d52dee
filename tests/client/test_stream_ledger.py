from __future__ import annotations

from array import array

import pytest

from shardwright import ledger as ledger_module
from shardwright.arena import Arena, Slot, private_arena
from shardwright.ledger import Ledger
from shardwright.outbox import Outbox
from shardwright.stage import Window

WINDOW = 4096


class Wire(Outbox):
    """An outbox that can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str | int] = []

    def put(self, item: object) -> None:
        kind = getattr(item, "WhichOneof")("kind")  # noqa: B009
        self.said.append(item.window_ready.window if kind == "window_ready" else kind)  # type: ignore[attr-defined]


def window(number: int) -> Window:
    empty = array("I")
    return Window(0, number, 0, 10, 10, empty, empty, empty, ())


def stage_windows(ledger: Ledger, numbers: range) -> None:
    for number in numbers:
        slot = ledger.acquire(0)
        assert slot is not None
        assert ledger.put(window(number), slot)


@pytest.fixture
def arena() -> Arena:
    return private_arena(WINDOW, 100)


@pytest.fixture
def ledger(arena: Arena) -> Ledger:
    return Ledger(arena, inline=False)


def keys(*numbers: int) -> set[tuple[int, int]]:
    return {(0, number) for number in numbers}


def test_what_is_staged_before_the_stream_is_open_goes_out_when_it_is(ledger: Ledger) -> None:
    stage_windows(ledger, range(3))
    ledger.finish()
    wire = Wire()
    ledger.open(wire, set(), set(), captured=False)
    assert wire.said == [0, 1, 2, "finish"]


def test_while_staging_goes_on_only_a_head_start_is_sent(ledger: Ledger) -> None:
    wire = Wire()
    ledger.open(wire, set(), set(), captured=False)
    stage_windows(ledger, range(64))
    assert wire.said == list(range(ledger_module._HEAD_START + 2))
    ledger.finish()
    assert wire.said == [*range(64), "finish"]


def test_whoever_waits_for_a_slot_sends_everything_first(ledger: Ledger) -> None:
    wire = Wire()
    ledger.open(wire, set(), set(), captured=False)
    stage_windows(ledger, range(100))
    assert len(wire.said) < 100
    assert ledger.acquire(0.01) is None
    assert wire.said == list(range(100))


def test_a_stream_that_opens_while_staging_starves_gets_everything(ledger: Ledger) -> None:
    stage_windows(ledger, range(100))
    assert ledger.acquire(0.01) is None
    wire = Wire()
    ledger.open(wire, set(), set(), captured=False)
    assert wire.said == list(range(100))


def test_after_a_break_durable_windows_are_freed_and_received_ones_are_not_sent_again(
    ledger: Ledger, arena: Arena
) -> None:
    first = Wire()
    ledger.open(first, set(), set(), captured=False)
    stage_windows(ledger, range(6))
    ledger.acknowledge([((0, 0), 7)])
    ledger.shut()
    stage_windows(ledger, range(6, 8))
    ledger.finish()
    assert first.said == [0, 1, 2, 3, 4, 5]
    second = Wire()
    assert ledger.lost(keys(0, 1)) == 0
    ledger.open(second, keys(0, 1), keys(2, 3), captured=False)
    assert second.said == [4, 5, 6, 7, "finish"]
    assert ledger.durable == {(0, 0): 7, (0, 1): 0} and ledger.bytes_durable == 20
    ledger.acknowledge([((0, number), 0) for number in range(8)])
    assert not ledger.holds_slots and len(arena._free) == 100


def test_windows_that_were_released_and_are_not_there_any_more_are_counted(ledger: Ledger) -> None:
    stage_windows(ledger, range(4))
    ledger.acknowledge([((0, 0), 1), ((0, 1), 1)])
    assert ledger.lost(keys(0)) == 1
    assert ledger.lost(keys(0, 1, 2)) == 0


def test_a_captured_save_is_not_finished_twice(ledger: Ledger) -> None:
    stage_windows(ledger, range(2))
    ledger.finish()
    wire = Wire()
    ledger.open(wire, set(), keys(0, 1), captured=True)
    assert wire.said == []


def test_a_stopped_save_takes_no_window_and_its_slot_is_free_again(
    ledger: Ledger, arena: Arena
) -> None:
    stage_windows(ledger, range(2))
    slot = ledger.acquire(0)
    assert isinstance(slot, Slot)
    ledger.stop()
    assert ledger.put(window(2), slot) is False
    assert ledger.acquire(0) is None
    assert len(arena._free) == 98
    ledger.release_all()
    assert len(arena._free) == 100
