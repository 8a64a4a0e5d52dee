"""Kill the server, the trainer, or everything at seeded moments: the save commits, bit-exact."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import safetensors.torch
import torch
from tests.system.trainer import state_of

import shardwright

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import WriterProcess

MIB = 128
TRAINER_KILLS = 10
SERVER_KILLS = 20
WAIT_S = 60.0
STALL_MAX_S = 2.0
"""What a killed server may cost the training loop."""

ROOT = Path(__file__).resolve().parents[2]


def load(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return loaded


def same(state: dict[str, torch.Tensor], path: Path) -> bool:
    return equal(state, load(path))


def equal(state: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> bool:
    return set(got) == set(state) and all(
        torch.equal(got[name], tensor) for name, tensor in state.items()
    )


@pytest.fixture
def endpoint(writer: WriterProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("SHARDWRIGHT_ENDPOINT", writer.endpoint)
    yield writer.endpoint


def test_thirty_moments_less_ten_with_the_trainer_alive(
    writer: WriterProcess, endpoint: str, tmp_path: Path
) -> None:
    """SIGKILL and SIGSEGV in turn, both formats, both roads, first and overwriting saves."""
    state = state_of(1, MIB)
    shardwright.prepare(state, format="torch", endpoint=writer.endpoint)
    took_s = {
        transport: max(timed(state, tmp_path / "warm.pt", transport, writer) for _ in range(3))
        for transport in ("shared", "inline")
    }
    rng = random.Random(7)
    kinds = itertools.cycle(itertools.product((".pt", ".safetensors"), ("shared", "inline")))
    for number in range(SERVER_KILLS):
        suffix, transport = next(kinds)
        path = tmp_path / f"save-{number % 8}{suffix}"
        delay_s = rng.uniform(0, took_s[transport])
        number_of_signal = (signal.SIGKILL, signal.SIGSEGV)[number % 2]
        killer = threading.Timer(delay_s, writer.kill_server, (number_of_signal,))
        killer.start()
        started = time.monotonic()
        handle = shardwright.async_save(
            state,
            path,
            transport=transport,  # type: ignore[arg-type]
            endpoint=writer.endpoint,
            on_error="raise",
        )
        waited_s = time.monotonic() - started
        handle.committed(timeout_s=WAIT_S)
        killer.join()
        assert same(state, path), f"kill {number} after {delay_s:.3f} s: {path.name} differs"
        assert handle.progress.bytes_staged == handle.progress.bytes_total, "nothing copied twice"
        # On the inline road a save that is larger than the buffer waits for the writer as it is.
        usual_s = took_s[transport]
        assert waited_s < usual_s + STALL_MAX_S, f"kill {number}: training waited {waited_s:.2f} s"
        writer.wait_ready()


def timed(
    state: dict[str, torch.Tensor], path: Path, transport: str, writer: WriterProcess
) -> float:
    started = time.monotonic()
    shardwright.save(
        state,
        path,
        transport=transport,  # type: ignore[arg-type]
        endpoint=writer.endpoint,
        on_error="raise",
    )
    return time.monotonic() - started


@pytest.mark.parametrize("seed", range(TRAINER_KILLS))
def test_after_captured_the_writer_commits_though_trainer_and_server_are_killed(
    writer: WriterProcess, endpoint: str, tmp_path: Path, seed: int
) -> None:
    path = tmp_path / ("out.pt" if seed % 2 else "out.safetensors")
    form = "torch" if seed % 2 else "safetensors"
    transport = "inline" if seed % 4 >= 2 else "shared"
    with trainer(path, form, transport, seed) as process:
        say(process, "go")
        hear(process, "captured")
        process.kill()
        process.wait()
        threading.Event().wait(random.Random(seed).uniform(0, 0.05))
        writer.kill_server((signal.SIGKILL, signal.SIGSEGV)[seed % 2])
    wait_for(path.exists, f"{path.name} is committed")
    assert same(state_of(seed, MIB), path)


def test_a_trainer_that_dies_before_captured_leaves_nothing(
    writer: WriterProcess, endpoint: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.pt"
    with trainer(path, "torch", "inline", 3) as process:
        say(process, "go")
        wait_for(lambda: any(tmp_path.glob(".*.swtmp")), "the save has begun")
        process.kill()
        process.wait()
    wait_for(lambda: not any(tmp_path.glob(".*.swtmp")), "the partial is removed")
    wait_for(lambda: not writer.status()["clients"], "its memory is freed")
    assert not path.exists() or same(state_of(3, MIB), path)


def test_supervisor_and_server_killed_together_and_the_save_completes(
    writer_factory: Callable[..., WriterProcess], tmp_path: Path
) -> None:
    """The state is larger than the arena, so that windows are durable already, and gone from it."""
    first = writer_factory(memory_budget="64MiB")
    state = state_of(2, 512)
    result: list[shardwright.PendingSave] = []

    def run() -> None:
        path, endpoint = tmp_path / "out.pt", first.endpoint
        result.append(shardwright.async_save(state, path, endpoint=endpoint, on_error="raise"))

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: written(tmp_path) > 64 << 20, "a part is durable")
    first.expected_exit_status = -signal.SIGKILL
    pids = (first.process.pid, first.server_pid())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    first.process.wait()
    writer_factory(memory_budget="64MiB")
    thread.join(WAIT_S)
    result[0].committed(timeout_s=WAIT_S)
    assert same(state, tmp_path / "out.pt")


def written(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob(".*.swtmp"))


# --- the trainer process ----------------------------------------------------------------------


def trainer(path: Path, form: str, transport: str, seed: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.system.trainer"),
            *(str(path), form, transport, str(MIB), str(seed)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    hear(process, "prepared")
    return process


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str], expected: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line == expected


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}"
        time.sleep(0.005)
