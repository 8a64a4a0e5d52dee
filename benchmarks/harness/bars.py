"""The bars: each line of what the benchmark must show, as a function of the figures.

Pure: figures in, `{name: {value, limit, holds, ...}}` out; a line whose figures were not measured
has value and holds null. It sets limits, it measures nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Figures = dict[str, Any]
GIB = 1 << 30
MIB = 1 << 20
FORMATS = ("torch", "safetensors")
PEER = {"torch": "torch.save", "safetensors": "safetensors.save_file"}


@dataclass(frozen=True, slots=True)
class Bar:
    """One line: holds when value <= limit (or >= limit, when more is better)."""

    name: str
    text: str
    limit: float
    value: Callable[[Figures], float | None]
    more_is_better: bool = False


def _system(figures: Figures, name: str, suite: str = "large") -> Figures | None:
    found: Figures | None = figures.get(suite, {}).get("systems", {}).get(name)
    return found


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _field(figures: Figures, name: str, field: str, suite: str = "large") -> float | None:
    system = _system(figures, name, suite)
    return None if system is None else float(system[field])


def _probe(figures: Figures, name: str) -> Figures | None:
    found: Figures | None = figures.get("large", {}).get("probes", {}).get(name)
    return found


def best_o_direct_s(figures: Figures) -> float | None:
    """Return the fastest variant's median."""
    probes = figures.get("large", {}).get("probes", {})
    return min((p["seconds"] for n, p in probes.items() if n.startswith("o_direct:")), default=None)


def _inline_ratio(figures: Figures) -> float | None:
    bare, inline = _probe(figures, "grpc_stream"), _system(figures, "shardwright:torch:inline")
    if bare is None or inline is None:
        return None
    ours_rate: float = figures["settings"]["bytes_total"] / inline["durable_s"]
    return _ratio(ours_rate, bare["bytes"] / bare["seconds"])


def _wrong_files(figures: Figures) -> float | None:
    checked, wrong = 0, 0
    for suite in ("large", "many"):
        for name, system in figures.get(suite, {}).get("systems", {}).items():
            if name.startswith("shardwright:"):
                checked += system["checked"]
                wrong += len(system["wrong"])
    return float(wrong) if checked else None


def _format_bars(form: str, budget_bytes: int) -> list[Bar]:
    ours, small = f"shardwright:{form}", f"shardwright:{form}:small-budget"

    def cpu_per_gib(figures: Figures) -> float | None:
        cpu_s = _field(figures, ours, "trainer_cpu_s")
        return _ratio(cpu_s, figures["settings"]["bytes_total"] / GIB)

    def stall_over_memcpy(figures: Figures) -> float | None:
        memcpy = _probe(figures, "memcpy") or {}
        return _ratio(_field(figures, ours, "stall_s"), memcpy.get("seconds"))

    return [
        Bar(f"durable_{form}_over_o_direct", f"{form}: durable / best plain O_DIRECT write", 1.25,
            lambda f: _ratio(_field(f, ours, "durable_s"), best_o_direct_s(f))),
        Bar(f"durable_{form}_speedup", f"{form}: torch.save + fsync / durable", 3.0,
            lambda f: _ratio(_field(f, "torch.save", "durable_s"), _field(f, ours, "durable_s")),
            more_is_better=True),
        Bar(f"stall_{form}_over_memcpy", f"{form}: stall / one memcpy into a warm mapping", 1.3,
            stall_over_memcpy),
        Bar(f"trainer_cpu_{form}_s_per_gib", f"{form}: trainer's CPU seconds per GiB", 0.35,
            cpu_per_gib),
        Bar(f"peak_extra_{form}_bytes", f"{form}: extra memory with the small budget",
            budget_bytes + 64 * MIB, lambda f: _field(f, small, "peak_extra_bytes")),
    ]  # fmt: skip


def _many_bars(form: str) -> list[Bar]:
    ours, peer = f"shardwright:{form}", PEER[form]

    def cold(figures: Figures) -> float | None:
        a, b = _system(figures, ours, "many"), _system(figures, peer, "many")
        if a is None or b is None:
            return None
        return _ratio(a["rounds"][0]["durable_s"], b["rounds"][0]["durable_s"])

    def warm(field: str) -> Callable[[Figures], float | None]:
        return lambda f: _ratio(
            _field(f, ours, field, "many"), _field(f, peer, "durable_s", "many")
        )  # fmt: skip

    return [
        Bar(f"many_{form}_first_durable", f"{form}: many tensors, first save / {peer}'s first",
            0.5, cold),
        Bar(f"many_{form}_durable", f"{form}: many tensors, later saves / {peer}", 0.5,
            warm("durable_s")),
        Bar(f"many_{form}_stall", f"{form}: many tensors, later stall / {peer}", 0.1,
            warm("stall_s")),
    ]  # fmt: skip


def all_bars(budget_bytes: int) -> list[Bar]:
    """Every line, in the order of the issue."""

    def once(figures: Figures, name: str) -> Figures:
        found: Figures = figures.get("once", {}).get(name) or {}
        return found

    def torch_mappings(figures: Figures) -> float | None:
        found = once(figures, "idle_writer").get("torch_mappings")
        return None if found is None else float(len(found))

    return [
        *(bar for form in FORMATS for bar in _format_bars(form, budget_bytes)),
        Bar("wrong_files", "files that a stock loader did not read back bit for bit", 0,
            _wrong_files),
        Bar("inline_over_bare_grpc", "inline road to durable / bare gRPC stream, rates", 0.6,
            _inline_ratio, more_is_better=True),
        *(bar for form in FORMATS for bar in _many_bars(form)),
        Bar("import_s", "import shardwright beyond import torch, seconds", 0.150,
            lambda f: once(f, "import").get("seconds")),
        Bar("idle_writer_rss_bytes", "idle writer without arena, resident", 120 * MIB,
            lambda f: once(f, "idle_writer").get("rss_bytes")),
        Bar("idle_writer_torch_mappings", "torch's files mapped by the writer", 0, torch_mappings),
    ]  # fmt: skip


def judge(figures: Figures) -> dict[str, Figures]:
    """All bars with their values."""
    judged: dict[str, Figures] = {}
    for bar in all_bars(figures["settings"]["budget_bytes"]):
        value = bar.value(figures)
        holds = None
        if value is not None:
            holds = value >= bar.limit if bar.more_is_better else value <= bar.limit
        judged[bar.name] = {
            "value": value,
            "limit": bar.limit,
            "holds": holds,
            "relation": ">=" if bar.more_is_better else "<=",
            "text": bar.text,
        }
    return judged
