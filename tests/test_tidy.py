"""Properties of the source tree itself, each with the reason it is worth a red build."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("client", "writer", "proto")
CODE_ROOTS = (*SOURCE_ROOTS, "benchmarks", "demo")
FUNCTION_LINES_MAX = 60
MODULE_LINES_MAX = 400


def python_files(*roots: str) -> list[Path]:
    return sorted(
        path
        for root in roots
        for path in (ROOT / root).rglob("*.py")
        if "_pb2" not in path.name and ".protoc" not in path.parts
    )


MODULES = python_files(*SOURCE_ROOTS)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def calls_in(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_source_roots_are_not_packages(root: str) -> None:
    # An __init__.py here would make `import proto` mean this folder, not proto-plus.
    assert not (ROOT / root / "__init__.py").exists()


@pytest.mark.parametrize("path", python_files(*CODE_ROOTS, "tests"), ids=name_of)
def test_functions_fit_on_a_screen(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{path}:{node.lineno} {node.name}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_can_be_read_in_one_go(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MODULE_LINES_MAX


@pytest.mark.parametrize("path", python_files(*CODE_ROOTS), ids=name_of)
def test_modules_say_their_place(path: Path) -> None:
    docstring = ast.get_docstring(tree_of(path))
    assert docstring and docstring.splitlines()[0].endswith((".", ":"))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_waits_by_sleeping(path: Path) -> None:
    # A sleep is a guess at how long something takes; conditions with deadlines are not.
    sleeps = [line for line, name in calls_in(path) if name in {"time.sleep", "sleep"}]
    assert not sleeps, f"{path}: lines {sleeps}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_libraries_do_not_print(path: Path) -> None:
    # Standard output belongs to the trainer; only commands for people print.
    if path.name not in {"cli.py", "generate.py"}:
        prints = [line for line, name in calls_in(path) if name == "print"]
        assert not prints, f"{path}: lines {prints}"


@pytest.mark.parametrize("path", python_files("client", "writer"), ids=name_of)
def test_the_environment_is_read_in_one_place_per_side(path: Path) -> None:
    # os.environ may be passed on whole (to config, to a child); a lookup is an option in hiding.
    if path.name == "config.py":
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Subscript | ast.Attribute):
            read = ast.unparse(node.value) == "os.environ"
            assert not read, f"{path}:{node.lineno} reads the environment"
    assert not [line for line, name in calls_in(path) if name == "os.getenv"]


@pytest.mark.parametrize("path", python_files("writer"), ids=name_of)
def test_the_writer_neither_imports_torch_nor_unpickles(path: Path) -> None:
    # import-linter checks this, too, but not for imports by name.
    for node in ast.walk(tree_of(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not {"torch", "pickle"} & {name.split(".")[0] for name in names}, node


def test_the_repository_stands_alone() -> None:
    # A clone must hold everything that it speaks of.
    pattern = re.compile(r"\.\./" + "shared")
    for path in tracked_files():
        if path.suffix in {".py", ".md", ".toml", ".proto", ".yml", ".yaml", ".sh", ""}:
            assert not pattern.search(path.read_text(errors="replace")), path


def test_what_a_person_looks_for_first_exists() -> None:
    names = ("README.md", "CHANGELOG.md", "LICENSE", "docs/ARCHITECTURE.md", ".ci/run")
    for name in names:
        assert (ROOT / name).read_text().strip(), name
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_links_between_our_pages_lead_somewhere() -> None:
    for path in tracked_files():
        if path.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{name_of(path)} links to {target}"


def test_no_file_is_too_large_to_review() -> None:
    for path in tracked_files():
        assert path.stat().st_size < 1 << 20, name_of(path)


@cache
def tracked_files() -> list[Path]:
    """Return what git would commit: tracked and new files, ignored ones left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.splitlines() if (ROOT / name).is_file()]
