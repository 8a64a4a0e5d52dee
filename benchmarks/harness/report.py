"""Shows a result: tables for a person, Markdown for the README, a plot.

Everything is made from the JSON result, so a figure is never typed by hand. Nothing is computed
here but units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

Figures = dict[str, Any]
SUITES = (("large", "One state, every system"), ("many", "Many tiny tensors"))
HEADINGS = (
    "system", "stall", "return", "durable", "spread", "CPU", "trainer CPU", "extra memory",
)  # fmt: skip
SECONDS_SMALL = 0.1


def seconds(value: float) -> str:
    """Time for a table."""
    return f"{value * 1000:.1f} ms" if value < SECONDS_SMALL else f"{value:.2f} s"


def mebibytes(value: float) -> str:
    """Memory for a table."""
    return f"{value / 2**20:.0f} MiB"


def amount(name: str, value: float | None) -> str:
    """Write a bar's value or limit in the unit that its name ends with."""
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return mebibytes(value)
    if name.endswith("import_s"):
        return seconds(value)
    return f"{value:.2f}" if value % 1 else f"{value:.0f}"


def system_rows(suite: Figures) -> list[tuple[str, ...]]:
    """One row a system, then one row a probe."""
    rows: list[tuple[str, ...]] = []
    for name, row in suite.get("systems", {}).items():
        low, high = row["spread"]["durable_s"]
        rows.append(
            (
                name, seconds(row["stall_s"]), seconds(row["return_s"]), seconds(row["durable_s"]),
                f"{seconds(low)} .. {seconds(high)}", seconds(row["cpu_s"]),
                seconds(row["trainer_cpu_s"]), mebibytes(row["peak_extra_bytes"]),
            )
        )  # fmt: skip
    for name, row in suite.get("probes", {}).items():
        low, high = row["spread"]
        spread = f"{seconds(low)} .. {seconds(high)}"
        rows.append((f"({name})", "", "", seconds(row["seconds"]), spread, "", "", ""))
    return rows


def bar_rows(bars: Figures) -> list[tuple[str, ...]]:
    """One row a bar."""
    verdicts = {True: "holds", False: "MISSED", None: "not measured"}
    return [
        (
            name, bar["text"], amount(name, bar["value"]),
            f"{bar['relation']} {amount(name, bar['limit'])}", verdicts[bar["holds"]],
        )
        for name, bar in bars.items()
    ]  # fmt: skip


def settings_line(result: Figures) -> str:
    """Say in one line what was run."""
    settings, machine = result["settings"], result["machine"]
    quick = ", quick: figures are no evidence" if settings["quick"] else ""
    return (
        f"{settings['bytes_total'] / 2**30:g} GiB in {settings['tensors']} tensors, "
        f"{settings['rounds']} warm rounds, medians; small budget "
        f"{mebibytes(settings['budget_bytes'])}; {machine['cpus']} CPUs, {machine['file_system']}, "
        f"Linux {machine['kernel']}, Python {machine['python']}, torch {result['torch']} with "
        f"{result['torch_threads']} threads{quick}"
    )


def print_tables(result: Figures, console: Console) -> None:
    """Print all tables."""
    from rich.table import Table

    console.print(settings_line(result))
    for key, title in SUITES:
        rows = system_rows(result.get(key, {}))
        if rows:
            table = Table(*HEADINGS, title=title)
            for row in rows:
                table.add_row(*row)
            console.print(table)
    table = Table("bar", "what", "value", "limit", "", title="Bars")
    styles = {"holds": "green", "MISSED": "bold red", "not measured": "dim"}
    for row in bar_rows(result["bars"]):
        table.add_row(*row, style=styles[row[-1]] if row[-1] != "holds" else None)
    console.print(table)
    for name, reason in result["left_out"].items():
        console.print(f"left out: {name}: {reason}", markup=False)


def markdown_table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Make a Markdown table."""
    names = list(headings)
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def markdown(result: Figures) -> str:
    """Make the result a section of the README."""
    lines = [settings_line(result) + ".", "", f"Command: `{result['settings']['command']}`", ""]
    for key, title in SUITES:
        rows = system_rows(result.get(key, {}))
        if rows:
            lines += [f"**{title}**", "", *markdown_table(HEADINGS, rows), ""]
    headings = ("bar", "what", "value", "limit", "")
    lines += ["**Bars**", "", *markdown_table(headings, bar_rows(result["bars"])), ""]
    lines += [f"Left out: {name}: {reason}" for name, reason in result["left_out"].items()]
    return "\n".join(lines).rstrip() + "\n"


def plot(result: Figures, path: str) -> None:
    """Draw stall and time until durable of every system, and the memory beside."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    systems = result.get("large", {}).get("systems", {})
    names = list(systems)[::-1]
    places = range(len(names))
    figure, (times, memory) = plt.subplots(
        1, 2, sharey=True, figsize=(12, 1.5 + 0.45 * len(names)), width_ratios=(3, 1)
    )
    durable = [systems[name]["durable_s"] for name in names]
    spread = [
        [max(0.0, systems[n]["durable_s"] - systems[n]["spread"]["durable_s"][0]) for n in names],
        [max(0.0, systems[n]["spread"]["durable_s"][1] - systems[n]["durable_s"]) for n in names],
    ]
    stall = [systems[name]["stall_s"] for name in names]
    times.barh(places, durable, color="#9db8d2", label="until durable", xerr=spread, capsize=2)
    times.barh(places, stall, color="#c8553d", height=0.45, label="stall: tensors may not change")
    plain_s = min(
        (p["seconds"] for n, p in result["large"]["probes"].items() if n.startswith("o_direct:")),
        default=None,
    ) if "large" in result else None  # fmt: skip
    if plain_s is not None:
        times.axvline(plain_s, color="black", lw=1, ls="--", label="plain O_DIRECT write")
    times.set_yticks(list(places), names)
    times.set_xlabel("seconds")
    times.legend(loc="lower right", frameon=False)
    extra = [systems[name]["peak_extra_bytes"] / 2**20 for name in names]
    memory.barh(places, extra, color="#7a9e7e")
    memory.set_xlabel("extra memory at the peak, MiB")
    for axes in (times, memory):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(settings_line(result), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
