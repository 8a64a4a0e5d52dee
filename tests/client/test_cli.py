from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import WriterProcess


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardwright.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_info_finds_the_writer_that_a_trainer_would(writer: WriterProcess) -> None:
    result = run("info", "--json", SHARDWRIGHT_ENDPOINT=writer.endpoint)
    assert result.returncode == 0, result.stderr
    facts: dict[str, Any] = json.loads(result.stdout)
    assert facts["writer"] is True and facts["endpoint"] == writer.endpoint
    assert "a writer answers" in run("info", "--endpoint", writer.endpoint).stdout


def test_info_without_a_writer_exits_with_one_and_says_why(short_path: Path) -> None:
    result = run("info", "--endpoint", f"unix://{short_path}/none.sock")
    assert result.returncode == 1
    assert "no writer" in result.stdout


@pytest.mark.parametrize("arguments", [["info", "--endpoint", "tcp://host:1"], ["surprise"], []])
def test_wrong_usage_exits_with_two(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_help_names_the_exit_statuses() -> None:
    assert "EXIT STATUS" in run("info", "--help").stdout
