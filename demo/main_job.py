"""The main job, end to end: train, save through the writer, crash the writer, resume exactly.

    python demo/main_job.py        (or: make demo)

1. starts `writer serve --node-local`;
2. trains a transformer on 2 ranks and saves model, optimizer and RNG every few steps;
3. kills the server with SIGSEGV in the middle of one save, and lets training go on;
4. checks that this very save was committed all the same (`writer verify`);
5. resumes from it in new processes and compares every loss with the first run, bit for bit.

Exits with 0 only if all of that held.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = 24
SAVE_EVERY = 6
KILLED_STEP = 12
RANKS = 2
DEADLINE_S = 150.0
HERE = Path(__file__).resolve().parent
console = Console(highlight=False)


@dataclass
class Run:
    """What one training run said. Losses are float.hex(), so that equal means bit for bit."""

    losses: dict[tuple[int, int], str] = field(default_factory=dict)
    step_s: dict[int, float] = field(default_factory=dict)
    saves: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Kill:
    """What happened when the server was killed."""

    pid: int = 0
    bytes_on_disk: int = 0
    new_pid: int = 0
    restart_s: float = 0.0


def main() -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardwright-demo-") as folder:
        root = Path(folder)
        with writer(root) as supervisor:
            killer = Killer(root, supervisor)
            killer.start()
            console.rule(f"training {STEPS} steps on {RANKS} ranks, a save every {SAVE_EVERY}")
            whole = train(root, supervisor, "first", [])
            killer.join(DEADLINE_S)
            console.rule(f"resuming from step {KILLED_STEP} in new processes")
            resumed = train(root, supervisor, "resumed", ["--resume", str(KILLED_STEP)])
            verified = [
                subprocess.run(
                    [sys.executable, "-m", "shardwright_writer.cli", "verify", str(checkpoint)],
                    stdout=subprocess.DEVNULL,
                ).returncode
                == 0
                for checkpoint in sorted((root / "checkpoints").iterdir())
            ]
        return report(whole, resumed, killer.kill, verified, time.monotonic() - started)


@contextlib.contextmanager
def writer(root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the node's writer while the block runs."""
    socket = root / "writer.sock"
    (root / "checkpoints").mkdir()
    log = (root / "writer.log").open("wb")
    command = [
        *(sys.executable, "-m", "shardwright_writer.cli", "serve", "--node-local"),
        *("--socket", str(socket), "--memory-budget", "256MiB", "--root", str(root)),
    ]
    console.print("$ writer", *command[3:], soft_wrap=True)
    process = subprocess.Popen(command, stdout=log, stderr=log)
    os.environ["SHARDWRIGHT_ENDPOINT"] = f"unix://{socket}"
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)
        log.close()


class Killer(threading.Thread):
    """Waits until the save of KILLED_STEP is half-way on disk, then sends SIGSEGV to the server."""

    def __init__(self, root: Path, supervisor: subprocess.Popen[bytes]) -> None:
        super().__init__(daemon=True)
        self.kill = Kill()
        self._folder = root / "checkpoints" / f"step-{KILLED_STEP:04d}"
        self._supervisor = supervisor

    def run(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline and not self._strike():
            time.sleep(0.001)  # a save lasts a tenth of a second: look often
        while time.monotonic() < deadline and not self.kill.new_pid:
            pid = server_pid(self._supervisor.pid)
            if pid and pid != self.kill.pid:
                self.kill.new_pid = pid
            time.sleep(0.005)

    def _strike(self) -> bool:
        for path in self._folder.glob(".*.0.swtmp") if self._folder.exists() else ():
            with contextlib.suppress(FileNotFoundError):
                size = path.stat().st_blocks * 512
                pid = server_pid(self._supervisor.pid)
                if size > 16 << 20 and pid:
                    os.kill(pid, signal.SIGSEGV)
                    self.kill.pid, self.kill.bytes_on_disk = pid, size
                    console.print(
                        f"[bold red]SIGSEGV to the server[/] (pid {pid}),"
                        f" {size >> 20} MiB of step {KILLED_STEP} on disk"
                    )
                    return True
        return False


def server_pid(supervisor_pid: int) -> int:
    """Return the pid of the supervisor's server, or 0 while there is none."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{supervisor_pid}/task/{supervisor_pid}/children").read_text()
        for pid in children.split():
            if b"server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    return 0


def train(root: Path, supervisor: subprocess.Popen[bytes], name: str, extra: list[str]) -> Run:
    """Run all ranks to their end, showing what they say."""
    command = [
        *(sys.executable, "-W", "ignore", str(HERE / "train.py")),
        *("--steps", str(STEPS), "--save-every", str(SAVE_EVERY)),
        *("--checkpoints", str(root / "checkpoints"), "--store", str(root / f"store-{name}")),
        *extra,
    ]
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    processes = []
    for rank in range(RANKS):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "OMP_NUM_THREADS": "1",
        }
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
        threading.Thread(target=pump, args=(processes[-1], lines), daemon=True).start()
    run, open_ranks = Run(), RANKS
    while open_ranks:
        line = lines.get(timeout=DEADLINE_S)
        if line is None:
            open_ranks -= 1
        else:
            show(run, json.loads(line))
    for process in processes:
        if process.wait(DEADLINE_S) != 0:
            raise SystemExit(f"a rank of the {name} run exited with {process.returncode}")
    return run


def pump(process: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def show(run: Run, said: dict[str, Any]) -> None:
    if said["event"] == "save":
        run.saves.append(said)
        return
    run.losses[said["rank"], said["step"]] = said["loss"]
    if said["rank"] == 0:
        run.step_s[said["step"]] = said["seconds"]
        loss = float.fromhex(said["loss"])
        console.print(f"step {said['step']:3d}  loss {loss:.6f}  {said['seconds']:.2f} s")


def report(whole: Run, resumed: Run, kill: Kill, verified: list[bool], seconds: float) -> int:
    """Print the table; return the exit status."""
    table = Table(title="saves of rank 0 (model + AdamW + RNG)")
    for column in ("step", "MiB", "road", "training waited", "outcome"):
        table.add_column(column, justify="right")
    for said in sorted(whole.saves, key=lambda said: said["step"]):
        if said["rank"] == 0:
            note = "  <- server killed in the middle" if said["step"] == KILLED_STEP else ""
            table.add_row(
                str(said["step"]),
                f"{said['bytes'] / 2**20:.0f}",
                str(said["transport"]),
                f"{said['stall_s']:.3f} s",
                (said["error"] or "committed") + note,
            )
    console.print(table)
    equal = [key for key, loss in resumed.losses.items() if whole.losses[key] == loss]
    checks = {
        f"server killed by SIGSEGV with {kill.bytes_on_disk >> 20} MiB of the save on disk"
        f" (pid {kill.pid} -> {kill.new_pid})": kill.pid > 0 and kill.new_pid > 0,
        "every save committed, that one too": not any(said["error"] for said in whole.saves)
        and len(whole.saves) == RANKS * STEPS // SAVE_EVERY,
        f"`writer verify` passes for {len(verified)} checkpoints": all(verified)
        and len(verified) == STEPS // SAVE_EVERY,
        f"{len(equal)} of {len(resumed.losses)} resumed losses equal bit for bit": len(equal)
        == len(resumed.losses)
        == RANKS * (STEPS - KILLED_STEP),
    }
    for text, holds in checks.items():
        console.print(
            f"[{'green' if holds else 'bold red'}]{'ok' if holds else 'FAILED'}[/]  {text}"
        )
    console.print(f"{seconds:.0f} s in all")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
