"""Plays a suite: starts the processes, goes round the systems, collects a figure a save.

A round is one save of every system and one run of every probe; each round begins one place later
in the list, so that nobody always follows the same neighbour. The first round is cold: it warms
everything up, is checked against a stock loader, and is left out of the medians. What the figures
mean for the bars is decided in `bars`.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.meter import Meter
from harness.probes import PROBES
from harness.proc import MemoryReader, descendants, tree_cpu_s
from harness.processes import ChildError, TrainerProcess, WriterProcess
from harness.systems import SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.meter import Reading
    from harness.state import StateSpec

Figures = dict[str, Any]
MEASURED = (
    "stall_s", "return_s", "durable_s", "cpu_s", "trainer_cpu_s", "peak_extra_bytes",
)  # fmt: skip
STEP_S_MAX = 600.0
SETTLE_S_MAX = 10.0
SETTLED_DIRTY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Suite:
    """What to play: a state, who saves it, and which yardsticks are measured beside."""

    name: str
    spec: StateSpec
    systems: list[str]
    probes: list[str]
    rounds: int  # warm ones
    budgets: dict[str, int]  # bytes, of each writer


@dataclass(slots=True)
class Track:
    """One system's memory reference and its figures so far."""

    idle_anon_bytes: int = 0
    rounds: list[Figures] = field(default_factory=list)
    failure: str = ""


def settle(folder: str) -> None:
    """Write back what is dirty and wait until the machine has next to nothing of it."""
    os.sync()
    reader = MemoryReader([])
    deadline_s = time.monotonic() + SETTLE_S_MAX
    while reader.sample().dirty_bytes > SETTLED_DIRTY_BYTES and time.monotonic() < deadline_s:
        os.sync()
    reader.close()


class Conductor:
    """Holds the processes of one suite."""

    def __init__(self, suite: Suite, root: str, run: str, say: Callable[[str], None]) -> None:
        self.suite = suite
        self._root, self._run, self._say = root, run, say
        self._trainers: dict[str, TrainerProcess] = {}
        self._writers: dict[str, WriterProcess] = {}
        self._lost_writers: dict[str, str] = {}
        self.tracks = {name: Track() for name in suite.systems}
        self.probe_rounds: dict[str, list[float]] = {name: [] for name in suite.probes}
        self.probe_bytes: dict[str, int] = {}
        self.failures: dict[str, str] = {}
        self.about: Figures = {}
        self._meter = Meter()

    def play(self) -> None:
        """Run all rounds. A system that fails is left out from then on, with its reason."""
        self._start_trainers()
        turns = [name for name in self.suite.systems if not self.tracks[name].failure]
        # Probes are spread among the systems, so that each sees the disk at another time.
        for place, name in enumerate(self.suite.probes):
            turns.insert(min(len(turns), 2 * place), name)
        for number in range(self.suite.rounds + 1):
            start = number % max(1, len(turns))
            for name in [*turns[start:], *turns[:start]]:
                if name in self.failures:
                    continue
                try:
                    self._take_turn(name, number)
                except ChildError as error:
                    self._fail(name, str(error))

    def close(self) -> None:
        """End every process."""
        for trainer in self._trainers.values():
            trainer.close()
        for writer in self._writers.values():
            writer.close()
        self._meter.close()

    def _fail(self, name: str, reason: str) -> None:
        self.failures[name] = reason
        if name in self.tracks:
            self.tracks[name].failure = reason
        self._say(f"{name}: left out: {reason}")

    def _start_trainers(self) -> None:
        for name in self.suite.probes:
            self._start(name, PROBES[name].trainer)
        for name in self.suite.systems:
            self._start(name, SYSTEMS[name].trainer)
            if name not in self.failures:
                self._attach(name)

    def _start(self, name: str, key: str) -> None:
        """Start the trainer (and its writer) that a system or probe runs in, if it is not there."""
        if key in self._trainers:
            return
        entry = next((entry for entry in SYSTEMS.values() if entry.trainer == key), None)
        try:
            endpoint = self._writer(entry.writer).endpoint if entry and entry.writer else ""
            inline = entry is not None and entry.inline
            trainer = TrainerProcess(key, self.suite.spec, self._run, endpoint, inline)
            self._trainers[key] = trainer
            if not self.about and self.suite.spec.fd >= 0:
                trainer.ask("fill", STEP_S_MAX)
            self.about = trainer.ask("open", STEP_S_MAX)
        except ChildError as error:
            self._fail(name, str(error))

    def _writer(self, kind: str) -> WriterProcess:
        if kind in self._lost_writers:
            raise ChildError(self._lost_writers[kind])
        if kind not in self._writers:
            budget_bytes = self.suite.budgets[kind]
            label = f"{self.suite.name}-{kind}"
            try:
                writer = WriterProcess(label, budget_bytes, self._root, self._run, self._run)
            except ChildError as error:
                self._lost_writers[kind] = str(error)
                raise
            self._writers[kind] = writer
        return self._writers[kind]

    def _roots(self, name: str) -> list[int]:
        """Return the process trees that a system consists of."""
        entry = SYSTEMS[name]
        roots = [self._trainers[entry.trainer].process.pid]
        if entry.writer:
            roots.append(self._writers[entry.writer].process.pid)
        return roots

    def _attach(self, name: str) -> None:
        """Get a system ready, and note its idle memory: what a save adds is counted from there."""
        track, trainer = self.tracks[name], self._trainers[SYSTEMS[name].trainer]
        reader = MemoryReader(self._roots(name))
        before = reader.sample()
        try:
            reply = trainer.ask("attach", STEP_S_MAX, system=name)
        except ChildError as error:
            self._fail(name, str(error))
            return
        finally:
            reader.refresh()
            after = reader.sample()
            reader.close()
        track.idle_anon_bytes = before.anon_bytes
        if SYSTEMS[name].writer:
            for other in self._neighbours(name):
                other.idle_anon_bytes = after.anon_bytes
        self._say(f"{name}: ready in {reply['attach_s']:.2f} s")

    def _neighbours(self, name: str) -> list[Track]:
        """Return the tracks of all systems in the same trainer process, this one among them."""
        key = SYSTEMS[name].trainer
        return [track for other, track in self.tracks.items() if SYSTEMS[other].trainer == key]

    def _take_turn(self, name: str, number: int) -> None:
        cold = number == 0
        folder = os.path.join(self._root, f"{self.suite.name}-{number}-{name.replace(':', '-')}")
        os.mkdir(folder)
        settle(folder)
        try:
            if name in PROBES:
                trainer = self._trainers[PROBES[name].trainer]
                reply = trainer.ask("probe", STEP_S_MAX, name=name, folder=folder)
                self.probe_rounds[name].append(reply["seconds"])
                self.probe_bytes[name] = int(reply.get("bytes", self.suite.spec.bytes_total))
                self._say(f"round {number}  {name:34s} {reply['seconds']:8.3f} s")
                return
            figures = self._save(name, folder, flip=cold)
            # Reading back takes its time and memory after the clock and the meter have stopped.
            if SYSTEMS[name].loader and (cold or number == self.suite.rounds):
                trainer = self._trainers[SYSTEMS[name].trainer]
                figures |= trainer.ask("verify", STEP_S_MAX, system=name, folder=folder)
        finally:
            shutil.rmtree(folder)
        self.tracks[name].rounds.append(figures)
        self._say(
            f"round {number}  {name:34s} stall {figures['stall_s']:7.3f} s"
            f"  durable {figures['durable_s']:7.3f} s"
            f"  extra {figures['peak_extra_bytes'] / 2**20:7.0f} MiB"
            + (f"  WRONG: {figures['wrong']}" if figures.get("wrong") else "")
        )

    def _save(self, name: str, folder: str, flip: bool) -> Figures:
        track, roots = self.tracks[name], self._roots(name)
        trainer = self._trainers[SYSTEMS[name].trainer]
        known = {pid for root in roots for pid in descendants(root)}
        cpu_start_s = tree_cpu_s(roots)
        self._meter.start(roots)
        try:
            figures = trainer.ask("save", STEP_S_MAX, system=name, folder=folder, flip=flip)
        finally:
            reading = self._meter.stop()
        figures["cpu_s"] = tree_cpu_s(roots) - cpu_start_s
        figures["new_processes"] = len(
            {pid for root in roots for pid in descendants(root)} - known
        )  # fmt: skip
        figures.update(extra_memory(track, reading))
        return figures


def extra_memory(track: Track, reading: Reading) -> Figures:
    """Work out what a save used over the trainer and an idle attached writer, at its worst.

    Shared memory counts in full, also what the system keeps between saves (an arena, a staging
    buffer): it was not there before the system was. Dirty pages count from what was dirty before.
    """
    peak, start = reading.peak, reading.start
    anon_bytes = peak.anon_bytes - track.idle_anon_bytes
    shared_bytes = peak.shared_bytes
    dirty_bytes = peak.dirty_bytes - start.dirty_bytes
    return {
        "peak_extra_bytes": anon_bytes + shared_bytes + dirty_bytes,
        "peak_anon_bytes": anon_bytes,
        "peak_shared_bytes": shared_bytes,
        "peak_dirty_bytes": dirty_bytes,
        "machine_shared_bytes": peak.machine_shared_bytes - start.machine_shared_bytes,
        "samples": reading.samples,
        "sample_gap_s_max": reading.gap_s_max,
        "meter_cpu_s": reading.cpu_s,
    }


def summarise(track: Track) -> Figures:
    """Medians over the warm rounds, the spread, and the rounds themselves (the cold one first).

    One round's peak may be a neighbour's: dirty pages are counted by machine. The largest of all
    rounds, the cold one too, is beside the median.
    """
    warm = track.rounds[1:]
    summary: Figures = {name: statistics.median(row[name] for row in warm) for name in MEASURED}
    summary["peak_extra_bytes_max"] = max(row["peak_extra_bytes"] for row in track.rounds)
    summary["spread"] = {
        name: [min(row[name] for row in warm), max(row[name] for row in warm)] for name in MEASURED
    }
    summary["file_bytes"] = warm[-1]["file_bytes"]
    summary["transport"] = warm[-1]["transport"]
    summary["wrong"] = [row["wrong"] for row in track.rounds if row.get("wrong")]
    summary["checked"] = sum("wrong" in row for row in track.rounds)
    summary["rounds"] = track.rounds
    return summary


def play(suite: Suite, root: str, run: str, say: Callable[[str], None]) -> Figures:
    """Play a suite and return its figures."""
    conductor = Conductor(suite, root, run, say)
    try:
        conductor.play()
    finally:
        conductor.close()
    return {
        "systems": {
            name: summarise(track)
            for name, track in conductor.tracks.items()
            if not track.failure and len(track.rounds) > 1
        },
        "probes": {
            name: {
                "seconds": statistics.median(seconds[1:]),
                "spread": [min(seconds[1:]), max(seconds[1:])],
                "bytes": conductor.probe_bytes[name],
                "rounds": seconds,
            }
            for name, seconds in conductor.probe_rounds.items()
            if len(seconds) > 1
        },
        "left_out": conductor.failures,
        "torch": conductor.about.get("torch", ""),
        "torch_threads": conductor.about.get("threads", 0),
    }
