"""Whole saves through the real daemon: what is visible when, order, space, names, modes, drain."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
import safetensors
import safetensors.torch
import torch
from tests.system.test_kills import equal, load, same, wait_for
from tests.system.trainer import state_of

import shardwright
from shardwright_writer.verify import verify_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import WriterProcess

WAIT_S = 60.0
MIB = 48


def save(writer: WriterProcess, state: object, path: Path, **options: object) -> None:
    shardwright.save(state, path, endpoint=writer.endpoint, on_error="raise", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_an_overwritten_checkpoint_is_one_of_the_two_at_every_moment(
    writer: WriterProcess, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"out{suffix}"
    # Of equal shapes: safetensors opens a file twice, and may meet the old header and new data.
    states = [state_of(1, 4)]
    states.append({name: tensor + 1 for name, tensor in states[0].items()})
    save(writer, states[0], path)
    stop, seen = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            got = load(path)
            seen.append(any(equal(state, got) for state in states))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(20):
        save(writer, states[number % 2], path)
    stop.set()
    reader.join()
    assert seen and all(seen)
    assert verify_path(path).ok


def test_two_saves_of_one_path_end_in_the_order_they_were_made(
    writer: WriterProcess, tmp_path: Path
) -> None:
    path = tmp_path / "out.pt"
    states = [state_of(seed, MIB) for seed in range(4)]
    handles = [
        shardwright.async_save(state, path, endpoint=writer.endpoint, on_error="raise")
        for state in states
    ]
    for handle in handles:
        handle.committed(timeout_s=WAIT_S)
    assert same(states[-1], path)


def test_what_is_saved_is_the_value_at_the_call(writer: WriterProcess, tmp_path: Path) -> None:
    state = state_of(1, MIB)
    copy = {name: tensor.clone() for name, tensor in state.items()}
    handle = shardwright.async_save(
        state, tmp_path / "out.pt", endpoint=writer.endpoint, on_error="raise"
    )
    for tensor in state.values():
        tensor.add_(1)
    handle.committed(timeout_s=WAIT_S)
    assert same(copy, tmp_path / "out.pt")


def test_sharded_safetensors_have_hugging_faces_names_and_replace_older_shards(
    writer: WriterProcess, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    for seed, max_shard_size in ((1, "16MB"), (2, "12MB"), (3, "16MB")):
        state = state_of(seed, MIB)
        save(writer, state, path, max_shard_size=max_shard_size, metadata={"format": "pt"})
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        names = set(index["weight_map"].values())
        on_disk = {found.name for found in tmp_path.glob("model-*.safetensors")}
        assert names == on_disk, "only the shards that the index names are left"
        for name in names:
            with safetensors.safe_open(tmp_path / name, "pt") as shard:
                assert shard.metadata() == {"format": "pt"}
                held = [key for key, found in index["weight_map"].items() if found == name]
                assert sorted(held) == sorted(shard.keys())
                assert all(torch.equal(shard.get_tensor(key), state[key]) for key in held)
        assert set(index["weight_map"]) == set(state)
        assert verify_path(tmp_path / "model.safetensors.index.json").ok
    save(writer, {"one": torch.ones(3)}, path)
    assert {found.name for found in tmp_path.iterdir()} == {
        "model.safetensors",
        "model.safetensors.shardwright.json",
    }


def test_two_sharded_saves_of_one_path_at_once_do_not_mix(
    writer: WriterProcess, tmp_path: Path
) -> None:
    states = [state_of(seed, MIB) for seed in (1, 2)]
    handles = [
        shardwright.async_save(
            state,
            tmp_path / "model.safetensors",
            endpoint=writer.endpoint,
            max_shard_size="16MB",
            on_error="raise",
        )
        for state in states
    ]
    for handle in handles:
        handle.committed(timeout_s=WAIT_S)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    for key, name in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / name, "pt") as shard:
            assert torch.equal(shard.get_tensor(key), states[1][key])


@pytest.mark.root
def test_a_full_disk_fails_the_save_by_name_and_keeps_the_old_checkpoint(
    writer_factory: Callable[..., WriterProcess], tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", small], check=True)
    try:
        writer = writer_factory()
        old = state_of(1, MIB)
        save(writer, old, small / "out.pt")
        with pytest.raises(shardwright.SaveFailedError, match="ENOSPC") as failed:
            save(writer, state_of(2, MIB), small / "out.pt")
        assert failed.value.reason == "NO_SPACE" and str(small) in str(failed.value)
        assert same(old, small / "out.pt")
        assert not list(small.glob(".*.swtmp"))
        os.unlink(small / "out.pt")
        save(writer, state_of(2, MIB), small / "out.pt")
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_files_get_the_trainers_umask(writer: WriterProcess, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        for suffix in (".pt", ".safetensors"):
            save(writer, {"a": torch.ones(2)}, tmp_path / f"out{suffix}")
            assert (tmp_path / f"out{suffix}").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(old)


def test_sigterm_finishes_the_saves_under_way(
    writer_factory: Callable[..., WriterProcess], tmp_path: Path
) -> None:
    writer = writer_factory()
    state = state_of(1, 192)
    handle = shardwright.async_save(
        state, tmp_path / "out.pt", endpoint=writer.endpoint, on_error="raise"
    )
    writer.process.send_signal(signal.SIGTERM)
    handle.committed(timeout_s=WAIT_S)
    assert same(state, tmp_path / "out.pt")
    assert writer.process.wait(WAIT_S) == 0


def test_what_a_dead_save_left_is_swept_by_the_next_save_into_the_folder(
    writer_factory: Callable[..., WriterProcess], tmp_path: Path
) -> None:
    """Everything dies at once: trainer, server, supervisor. Nobody is left to tidy up."""
    first = writer_factory()
    first.expected_exit_status = -signal.SIGKILL
    script = (
        "import sys, torch, shardwright\n"
        "from tests.system.trainer import state_of\n"
        "shardwright.async_save(state_of(1, 256), sys.argv[1], endpoint=sys.argv[2])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "out.pt"), first.endpoint],
        stderr=subprocess.DEVNULL,
    ) as trainer:
        wait_for(lambda: any(tmp_path.glob(".*.swtmp")), "the save has begun")
        for pid in (trainer.pid, first.process.pid, first.server_pid()):
            os.kill(pid, signal.SIGKILL)
    first.process.wait()
    assert list(tmp_path.glob(".*.swtmp"))
    second = writer_factory(name="second")
    save(second, {"a": torch.ones(2)}, tmp_path / "next.pt")
    assert not list(tmp_path.glob(".*.swtmp"))


def test_a_second_trainer_saves_though_the_first_has_all_of_the_arena(
    writer: WriterProcess, tmp_path: Path
) -> None:
    shardwright.prepare(state_of(1, 300), endpoint=writer.endpoint)
    for transport in ("shared", "inline"):
        script = (
            "import sys, shardwright\n"
            "from tests.system.trainer import state_of\n"
            "shardwright.save(state_of(2, 24), sys.argv[1], endpoint=sys.argv[2],"
            " transport=sys.argv[3], on_error='raise')\n"
        )
        path = tmp_path / f"{transport}.pt"
        subprocess.run(
            [sys.executable, "-c", script, str(path), writer.endpoint, transport], check=True
        )
        assert same(state_of(2, 24), path)


def test_the_server_never_maps_torch_and_its_idle_memory_is_small(writer: WriterProcess) -> None:
    rss_kib = 0
    for pid in (writer.process.pid, writer.server_pid()):
        with open(f"/proc/{pid}/maps") as maps:
            assert "torch" not in maps.read()
        with open(f"/proc/{pid}/status") as status:
            rss_kib += next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    assert rss_kib <= 120 << 10
