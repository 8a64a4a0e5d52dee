"""Errors read well and survive a trip between processes."""

from __future__ import annotations

import pickle

import pytest

from shardwright import errors

EVERY = [
    errors.ShardwrightError("m", "w", "l", "h"),
    errors.UnsupportedObjectError("m", ("a", "b"), "h"),
    errors.WriterUnavailableError("m", hint="h"),
    errors.SaveFailedError("NO_SPACE", "m", "h", "w", "l"),
    errors.SaveTimeoutError("m", lost="l"),
    errors.SaveCancelledError("m"),
]


def test_the_message_says_where_what_was_lost_and_what_to_do() -> None:
    error = errors.SaveFailedError(
        "NO_SPACE", "disk full.", "Free some", "rank 3, save 12", "The checkpoint is lost"
    )
    assert str(error) == (
        "rank 3, save 12: disk full. The checkpoint is lost. Free some [NO_SPACE]"
    )


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: errors.ShardwrightError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_every_error_is_in_the_tree_at_the_top_of_the_module(error: Exception) -> None:
    assert isinstance(error, errors.ShardwrightError)
    assert type(error).__name__ in (errors.__doc__ or "")
