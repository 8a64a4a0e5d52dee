from __future__ import annotations

import itertools
import logging
import threading
import time

import pytest

from shardwright import lifecycle
from shardwright.errors import SaveCancelledError, SaveFailedError, SaveTimeoutError
from shardwright.handle import TRANSITIONS, Event, PendingSave, State


def new_save(on_error: str = "skip") -> PendingSave:
    save = PendingSave("/somewhere/model.pt", "0123456789abcdef" * 2, on_error, rank=3)
    save.count(total=1000)
    return save


def failure() -> SaveFailedError:
    return SaveFailedError("NO_SPACE", "the disk is full", "free some")


ENDS = {State.COMMITTED, State.FAILED, State.CANCELLED}


def test_nothing_leads_out_of_an_end_but_writing_it_here() -> None:
    assert TRANSITIONS.keys() == set(State)
    assert not TRANSITIONS[State.COMMITTED] and not TRANSITIONS[State.CANCELLED]
    assert set(TRANSITIONS[State.FAILED]) == {Event.WRITTEN_HERE}
    for state in set(State) - ENDS:
        assert {Event.FAILED, Event.CANCELLED} <= set(TRANSITIONS[state])


@pytest.mark.parametrize("events", list(itertools.permutations(Event, 3)))
def test_only_the_first_end_counts(events: tuple[Event, ...]) -> None:
    save = new_save()
    for event in events:
        was, was_done = save._state, save.done()
        counted = save.apply(event, failure() if event is Event.FAILED else None)
        assert counted == (event in TRANSITIONS[was])
        if was_done and event is not Event.WRITTEN_HERE:
            assert save._state is was and not counted


def test_a_save_goes_through_its_states() -> None:
    save = new_save()
    assert save.progress.stage == "staging" and not save.done()
    save.apply(Event.STAGED)
    assert save.progress.stage == "sending"
    assert save.captured(timeout_s=0) is False
    save.apply(Event.CAPTURED)
    assert save.captured(timeout_s=0) is True and save.committed(timeout_s=0) is False
    assert not save.done()
    save.apply(Event.COMMITTED)
    assert save.captured() and save.committed() and save.done()
    assert save.error is None and save.progress.eta == 0


def test_waiters_in_other_threads_are_woken() -> None:
    save = new_save()
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda wait=wait: results.append(wait(10)))
        for wait in (save.captured, save.committed)
    ]
    for thread in threads:
        thread.start()
    for event in (Event.STAGED, Event.CAPTURED, Event.COMMITTED):
        save.apply(event)
    for thread in threads:
        thread.join(10)
    assert results == [True, True]


def test_with_skip_a_failure_is_on_the_handle_and_in_the_log_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    save = new_save("skip")
    with caplog.at_level(logging.DEBUG, "shardwright"):
        save.apply(Event.FAILED, failure())
        save.apply(Event.FAILED, failure())
        assert save.captured() is False
        assert save.committed() is False
    (record,) = caplog.records
    assert record.name == "shardwright"
    for part in ("model.pt", "rank 3", "disk is full", "free some", "NO_SPACE"):
        assert part in record.getMessage()
    assert isinstance(save.error, SaveFailedError) and save.done()


def test_with_raise_a_failure_is_raised_by_every_wait_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    save = new_save("raise")
    save.apply(Event.FAILED, failure())
    for wait in (save.captured, save.committed, save.captured):
        with pytest.raises(SaveFailedError, match="disk is full"):
            wait()
    assert not caplog.records


def test_with_raise_the_end_of_patience_says_what_was_waited_for_and_on_whom() -> None:
    save = new_save("raise")
    save.apply(Event.STAGED)
    save.count(stage="waiting for an earlier save of this path")
    with pytest.raises(SaveTimeoutError) as caught:
        save.committed(timeout_s=0.05)
    for part in ("committed", "waiting for an earlier save", "rank 3", "model.pt", "last heard"):
        assert part in str(caught.value)
    assert not save.done(), "the save itself goes on"


def test_a_wait_lasts_as_long_as_was_said() -> None:
    save = new_save()
    started = time.monotonic()
    assert save.committed(timeout_s=0.2) is False
    assert 0.2 <= time.monotonic() - started < 2


def test_a_cancelled_save_is_neither_captured_nor_committed() -> None:
    save = new_save("raise")
    save.apply(Event.CANCELLED, SaveCancelledError("cancelled"))
    with pytest.raises(SaveCancelledError):
        save.captured()
    assert save.cancel() is False


def test_cancel_asks_and_does_not_wait() -> None:
    asked: list[int] = []
    save = new_save()
    save.on_cancel(lambda: asked.append(1))
    assert save.cancel() is True
    assert asked == [1] and not save.done()
    save.apply(Event.CANCELLED)
    assert save.cancel() is False


def test_progress_is_a_value_that_only_grows() -> None:
    save = new_save()
    save.count(staged=400)
    save.count(staged=600, received=500)
    save.count(received=300, durable=250)
    progress = save.progress
    assert (progress.bytes_total, progress.bytes_staged) == (1000, 1000)
    assert (progress.bytes_received, progress.bytes_durable) == (500, 250)
    assert progress.rate > 0 and progress.eta is not None
    assert progress.eta == pytest.approx(750 / progress.rate, rel=0.5)
    with pytest.raises(AttributeError):
        progress.stage = "other"  # type: ignore[misc]


def test_only_saves_that_have_not_ended_are_pending() -> None:
    save = new_save()
    lifecycle.add(save)
    assert save in lifecycle.pending()
    save.apply(Event.STAGED)
    assert save in lifecycle.pending()
    save.apply(Event.COMMITTED)
    assert save not in lifecycle.pending()
