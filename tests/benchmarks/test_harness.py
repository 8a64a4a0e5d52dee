"""The harness's parts: the state's layout, the honesty check of stalls, the meter, the bars."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from harness import bars, report
from harness.conductor import Track, extra_memory
from harness.meter import Meter, Reading
from harness.proc import Memory, MemoryReader
from harness.state import StateSpec, create_memory, difference, invert, open_state, tensor_layout
from harness.systems import SYSTEMS, Base, Running, TorchSave
from harness.trainer import load, timed_save

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from harness.state import State

MIB = 1 << 20


@pytest.fixture
def state() -> Iterator[State]:
    """A small state in a memfd, as trainers have it."""
    spec = StateSpec(tensors=7, bytes_total=2 * MIB, seed=1)
    fd = create_memory(spec)
    state = open_state(replace(spec, fd=fd))
    os.close(fd)
    for number, tensor in enumerate(state.values()):
        tensor.fill_(number)
    yield state
    state.clear()


@pytest.mark.parametrize("tensors", [1, 2, 7, 256])
def test_the_layout_adds_up_and_nothing_overlaps(tensors: int) -> None:
    layout = tensor_layout(StateSpec(tensors, 2 * MIB, seed=0))
    assert sum(tensor.nbytes for tensor in layout) == 2 * MIB
    assert len({tensor.name for tensor in layout}) == tensors
    end = 0
    for tensor in layout:
        assert tensor.offset >= end and tensor.nbytes > 0
        end = tensor.offset + tensor.nbytes


def test_flipping_twice_restores_and_a_difference_names_the_tensor(state: State) -> None:
    before = {name: tensor.clone() for name, tensor in state.items()}
    invert(state)
    assert difference(state, before) == f"{next(iter(state))} has other bytes"
    invert(state)
    assert difference(state, before) == ""
    last = list(state)[-1]
    state[last].view(torch.uint8).view(-1)[-1] ^= 1
    assert difference(state, before) == f"{last} has other bytes"
    assert "names differ" in difference(state, {})


class Liar(Base):
    """Says at once that the tensors may change, and reads them when waited for."""

    def begin(self, state: State, path: str) -> Running:
        return Running(durable=lambda: torch.save(state, path))


@pytest.mark.parametrize(("system", "honest"), [(TorchSave(), True), (Liar(), False)])
def test_a_stall_that_is_claimed_too_short_shows_in_the_file(
    state: State, tmp_path: Path, system: Any, honest: bool
) -> None:
    entry = SYSTEMS["torch.save"]
    figures = timed_save(entry, system, state, str(tmp_path), flip=True)
    loaded = load("torch", str(tmp_path / entry.file_name))
    assert (difference(state, loaded) == "") is honest
    assert figures["return_s"] <= figures["stall_s"] <= figures["durable_s"]


ALLOCATES = """
import os, sys
sys.stdin.readline()
private = bytearray(os.urandom(1)) * (64 << 20)
shared = os.memfd_create("shared")
os.posix_fallocate(shared, 0, 32 << 20)
print("ready", flush=True)
sys.stdin.readline()
del private
os.close(shared)
print("gone", flush=True)
sys.stdin.readline()
"""


def test_the_meter_sees_private_and_shared_memory_that_is_gone_again() -> None:
    meter = Meter()
    child = subprocess.Popen(
        [sys.executable, "-c", ALLOCATES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        meter.start([child.pid])
        for answer in ("ready\n", "gone\n"):
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == answer
            if answer == "ready\n":
                reading = meter.stop()
                start = meter.start([child.pid])
        after = meter.stop()
    finally:
        child.kill()
        child.communicate()
        meter.close()
    assert reading.peak.anon_bytes - reading.start.anon_bytes >= 63 * MIB
    assert start.anon_bytes - after.end.anon_bytes >= 63 * MIB
    assert start.shared_bytes == 32 * MIB, "what is held before a save is held in it"
    assert after.end.shared_bytes == 0
    assert reading.samples >= 2


def test_shared_memory_kept_between_saves_counts_in_full() -> None:
    start = Memory(anon_bytes=110, shared_bytes=200, dirty_bytes=5)
    peak = Memory(anon_bytes=130, shared_bytes=210, dirty_bytes=25)
    extra = extra_memory(Track(idle_anon_bytes=100), Reading(start, peak, start, 2, 0.0, 0.0))
    assert extra["peak_extra_bytes"] == (130 - 100) + 210 + (25 - 5)


def test_the_shared_state_itself_is_nobodys_extra_memory() -> None:
    fd = create_memory(StateSpec(tensors=1, bytes_total=MIB, seed=0))
    other = os.memfd_create("arena")
    try:
        os.posix_fallocate(other, 0, 3 * MIB)
        reader = MemoryReader([os.getpid()])
        before = reader.sample().shared_bytes
        os.close(other)
        reader.refresh()
        assert before - reader.sample().shared_bytes == 3 * MIB
        reader.close()
    finally:
        os.close(fd)


def figures_with(durable_s: float, peak_bytes: int) -> dict[str, Any]:
    def system(seconds: float) -> dict[str, Any]:
        return {
            "stall_s": 0.3, "durable_s": seconds, "trainer_cpu_s": 0.5, "checked": 2, "wrong": [],
            "peak_extra_bytes": peak_bytes, "rounds": [],
        }  # fmt: skip

    return {
        "settings": {"bytes_total": 2 << 30, "budget_bytes": 256 * MIB},
        "large": {
            "systems": {
                "torch.save": system(6.0),
                "shardwright:torch": system(durable_s),
                "shardwright:torch:small-budget": system(2.0),
            },
            "probes": {
                "memcpy": {"seconds": 0.25},
                "o_direct:1x4MiB": {"seconds": 1.2},
                "o_direct:4x16MiB": {"seconds": 1.0},
            },
        },
    }


def test_bars_hold_up_to_their_limit_and_not_beyond() -> None:
    good = bars.judge(figures_with(durable_s=1.25, peak_bytes=320 * MIB))
    assert good["durable_torch_over_o_direct"]["value"] == 1.25, "the best variant counts"
    at_their_limit = ("durable_torch_over_o_direct", "peak_extra_torch_bytes")
    better = ("stall_torch_over_memcpy", "trainer_cpu_torch_s_per_gib", "wrong_files")
    for name in (*at_their_limit, *better, "durable_torch_speedup"):
        assert good[name]["holds"] is True, name
    bad = bars.judge(figures_with(durable_s=2.1, peak_bytes=320 * MIB + 1))
    for name in (*at_their_limit, "durable_torch_speedup"):
        assert bad[name]["holds"] is False, name
    assert bad["durable_safetensors_speedup"]["value"] is None


def test_a_wrong_file_breaks_its_bar() -> None:
    figures = figures_with(1.0, 0)
    figures["large"]["systems"]["shardwright:torch"]["wrong"] = ["model.0 has other bytes"]
    assert bars.judge(figures)["wrong_files"]["holds"] is False


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("peak_extra_bytes", 320 * MIB, "320 MiB"), ("import_s", 0.05, "50.0 ms"),
     ("inline_over_bare_grpc", 0.6, "0.60"), ("wrong_files", 0, "0"), ("import_s", None, "-")],
)  # fmt: skip
def test_amounts_are_written_in_the_unit_of_their_bar(
    name: str, value: float | None, text: str
) -> None:
    assert report.amount(name, value) == text
