"""One trainer process: holds the state, saves it when told to, and times itself.

Started by the conductor, which talks to it over a pair of pipes, one JSON object a line. The
timing of every system happens in `timed_save`, alike for all. It does not measure memory: a
process that samples itself stops sampling just when it matters.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness import probes
from harness.state import StateSpec, difference, fill_memory, invert, open_state
from harness.systems import SYSTEMS, Entry, System

if TYPE_CHECKING:
    from harness.state import State

Message = dict[str, Any]


def sync_tree(path: str) -> None:
    """Make a folder durable with all that is in it: files first, then folders."""
    for folder, _, files in os.walk(path, topdown=False):
        for name in [*files, "."]:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def tree_bytes(path: str) -> int:
    """Bytes of all files below a folder."""
    return sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, files in os.walk(path)
        for name in files
    )


def load(loader: str, path: str) -> State:
    """Read a checkpoint back with the format's stock loader, mapped rather than copied."""
    import torch

    if loader == "torch":
        state: State = torch.load(path, mmap=True, weights_only=True)
        return state
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def timed_save(entry: Entry, system: System, state: State, folder: str, flip: bool) -> Message:
    """Save once and say how long each part took.

    With flip, every bit of the state is flipped as soon as the system says that the tensors may
    change, and flipped back at the end: a file that still equals the state proves the stall.
    """
    path = os.path.join(folder, entry.file_name)
    cpu_start_s, start_s = time.process_time(), time.perf_counter()
    running = system.begin(state, path)
    returned_s = time.perf_counter()
    running.captured()
    captured_s = time.perf_counter()
    if flip:
        invert(state)
    try:
        running.durable()
        if not entry.syncs:
            sync_tree(folder)
        durable_s = time.perf_counter()
        cpu_s = time.process_time() - cpu_start_s
    finally:
        if flip:
            invert(state)
    return {
        "return_s": returned_s - start_s,
        "stall_s": captured_s - start_s,
        "durable_s": durable_s - start_s,
        "trainer_cpu_s": cpu_s,
        "file_bytes": tree_bytes(folder),
        "transport": running.transport(),
    }


@dataclass(slots=True)
class Trainer:
    """The process's state: the tensors, and the systems that were attached."""

    spec: StateSpec
    state: State = field(default_factory=dict)
    systems: dict[str, System] = field(default_factory=dict)

    def open(self) -> Message:
        """Build or map the state."""
        import torch

        self.state = open_state(self.spec)
        return {"threads": torch.get_num_threads(), "torch": torch.__version__}

    def fill(self) -> Message:
        """Give the shared state its bytes."""
        fill_memory(self.spec)
        return {}

    def attach(self, system: str) -> Message:
        """Build a system and let it get ready."""
        start_s = time.perf_counter()
        self.systems[system] = SYSTEMS[system].build()
        self.systems[system].attach(self.state)
        gc.collect()
        return {"attach_s": time.perf_counter() - start_s}

    def save(self, system: str, folder: str, flip: bool) -> Message:
        """Save once."""
        reply = timed_save(SYSTEMS[system], self.systems[system], self.state, folder, flip)
        gc.collect()
        return reply

    def verify(self, system: str, folder: str) -> Message:
        """Read the checkpoint back and compare; "wrong" is empty when it is right."""
        entry = SYSTEMS[system]
        loaded = load(entry.loader, os.path.join(folder, entry.file_name))
        return {"wrong": difference(self.state, loaded)}

    def probe(self, name: str, folder: str) -> Message:
        """Measure one yardstick."""
        if name == probes.MEMCPY.name:
            return {"seconds": probes.memcpy_seconds(self.spec, self.state)}
        if name == probes.GRPC_STREAM.name:
            from harness import bare_stream

            return bare_stream.measure(self.spec, folder)
        path = os.path.join(folder, "plain.bin")
        return {"seconds": probes.o_direct_seconds(self.spec, name, path)}

    def close(self) -> Message:
        """End all systems."""
        for system in self.systems.values():
            system.close()
        return {}


def main() -> None:
    """Answer commands until the pipe closes. What fails goes back as text; the process goes on."""
    arguments = json.loads(sys.argv[1])
    trainer = Trainer(StateSpec(**arguments["state"]))
    with open(arguments["commands"]) as commands, open(arguments["replies"], "w") as replies:
        for line in commands:
            message = json.loads(line)
            try:
                reply = getattr(trainer, message.pop("op"))(**message)
            except Exception as error:  # noqa: BLE001 - any peer may raise anything: it is reported
                traceback.print_exc()
                lines = str(error).strip().splitlines() or [""]  # the log has all of them
                reply = {"error": f"{type(error).__name__}: {lines[-1]}"}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


if __name__ == "__main__":
    main()
