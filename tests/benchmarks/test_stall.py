"""The benchmark itself, at a size that takes seconds: its output's form, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STALL = Path(__file__).parents[2] / "benchmarks" / "stall.py"
SMALL = ("--quick", "--size", "16MiB", "--tensors", "8", "--rounds", "1")
FIELDS = {"stall_s", "return_s", "durable_s", "cpu_s", "trainer_cpu_s", "peak_extra_bytes"}
RUN_S_MAX = 300
MIB = 1 << 20


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(STALL), *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
        env={**os.environ, **environment},
    )


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.slow
def test_json_holds_the_figures_of_each_system_and_a_verdict_for_each_bar(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    root = tmp_path / "root"
    root.mkdir()
    saved, picture = tmp_path / "result.json", tmp_path / "result.png"
    only = "torch.save,safetensors.save_file,dcp.save,o_direct:1x4MiB,grpc_stream"
    files = ("--save", str(saved), "--plot", str(picture))
    done = run(*SMALL, "--many", "100", "--only", only, "--root", str(root), "--json", *files)
    result = result_of(done)

    systems = result["large"]["systems"]
    assert set(systems) == {"torch.save", "safetensors.save_file", "dcp.save"}
    for name, figures in systems.items():
        assert figures.keys() >= FIELDS, name
        assert 0 < figures["stall_s"] <= figures["durable_s"], name
        assert figures["return_s"] <= figures["stall_s"], name
        assert 16 * MIB <= figures["file_bytes"] < 17 * MIB, name
        assert len(figures["rounds"]) == 2, "one cold and one warm round"
    assert systems["torch.save"]["checked"] == 2 and systems["torch.save"]["wrong"] == []
    assert set(result["large"]["probes"]) == {"o_direct:1x4MiB", "grpc_stream"}
    assert set(result["many"]["systems"]) == {"torch.save", "safetensors.save_file"}

    bars = result["bars"]
    assert all(bar.keys() >= {"value", "limit", "holds"} for bar in bars.values())
    assert bars["durable_torch_speedup"]["holds"] is None, "ours was not measured"
    assert json.loads(saved.read_text()) == result
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(root.iterdir()) == [], "nothing is left behind"

    text = run("--markdown", str(saved)).stdout
    assert "| torch.save |" in text and "not measured" in text


@pytest.mark.slow
def test_our_systems_save_files_that_stock_loaders_read_back(tmp_path: Path) -> None:
    arguments = ("--many", "100", "--budget", "64MiB", "--root", str(tmp_path), "--json")
    result = result_of(run(*SMALL, *arguments, "--only", "shardwright*,memcpy,idle_writer"))
    assert result["left_out"] == {}
    systems = result["large"]["systems"]
    assert len(systems) == 5 and len(result["many"]["systems"]) == 2
    for name, figures in {**systems, **result["many"]["systems"]}.items():
        assert figures["checked"] == 2 and figures["wrong"] == [], name
    assert systems["shardwright:torch:inline"]["transport"] == "inline"
    assert systems["shardwright:torch"]["transport"] == "shared"
    assert result["bars"]["wrong_files"]["holds"] is True
    assert result["once"]["idle_writer"]["torch_mappings"] == []


def test_a_peer_that_cannot_be_imported_is_left_out_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "torchsnapshot.py").write_text("raise ImportError('not for this Python')\n")
    done = run(
        *SMALL, "--many", "0", "--only", "torch*", "--root", str(tmp_path), "--json",
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    result = result_of(done)
    assert result["left_out"]["large/torchsnapshot"] == "ImportError: not for this Python"
    assert "torch.save" in result["large"]["systems"]
    assert "torchsnapshot: left out: ImportError" in done.stderr


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no /dev/shm")
def test_a_folder_in_memory_is_refused() -> None:
    done = run("--root", "/dev/shm")
    assert done.returncode == 2
    assert "/dev/shm is on tmpfs" in done.stderr


def test_check_fails_when_a_bar_is_not_measured(tmp_path: Path) -> None:
    arguments = ("--many", "0", "--only", "memcpy-of-nobody", "--root", str(tmp_path))
    assert run(*SMALL, *arguments).returncode == 0
    assert run(*SMALL, *arguments, "--check").returncode == 1
