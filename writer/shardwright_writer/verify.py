"""`writer verify`: find out whether a checkpoint still holds the bytes that were written.

Takes a file, an index or a folder; finds the manifest and the entry in it that describes what is
there; checks sizes, every tensor's CRC-32, and every byte between tensors, which the formats can
make again. Without a manifest it checks what the container itself vouches for, and says so.
Called by the CLI only. Trusts no file, repairs nothing.
"""

from __future__ import annotations

import stat
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from shardwright_proto.limits import MANIFEST_SUFFIX
from shardwright_writer import manifest
from shardwright_writer.formats.safetensors import INDEX_SUFFIX, index_json
from shardwright_writer.inspection import safetensors_container, zip_container, zip_reading
from shardwright_writer.inspection.expected import Expected, differences
from shardwright_writer.inspection.safetensors_container import StructureError
from shardwright_writer.inspection.source import Problem, Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from shardwright_writer.manifest import Document, Entry, FileRecord

__all__ = ["Problem", "Report", "verify_path"]

_MANIFEST_BYTES_MAX: Final = 1 << 30
_ZIP_MAGIC: Final = b"PK\3\4"


@dataclass(frozen=True, slots=True)
class Report:
    """What was checked and what is wrong. notes: what could not be checked, and why."""

    files: tuple[str, ...] = ()
    tensors: int = 0
    bytes_checked: int = 0
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __add__(self, other: Report) -> Report:
        return Report(
            self.files + other.files,
            self.tensors + other.tensors,
            self.bytes_checked + other.bytes_checked,
            self.problems + other.problems,
            self.notes + other.notes,
        )


def verify_path(path: Path) -> Report:
    """Check a .pt or .safetensors file, an index, or every checkpoint of a folder.

    Raises FileNotFoundError for a path that is not there; everything else is in the report.
    """
    facts = path.stat()
    if stat.S_ISDIR(facts.st_mode):
        return _verify_folder(path)
    if path.name.endswith(MANIFEST_SUFFIX):
        return _verify_manifest(path)
    for manifest_path in _manifests_for(path):
        document, report = _read_manifest(manifest_path)
        if document is None:
            return report + _verify_alone(path)
        if any(file.name == path.name for head in document.heads for file in head.files):
            return _verify_described(path.parent, document, only=path.name)
    return _verify_alone(path)


def _verify_folder(folder: Path) -> Report:
    names = sorted(entry.name for entry in folder.iterdir())
    found = [name for name in names if name.endswith(MANIFEST_SUFFIX)]
    if found:
        return sum((_verify_manifest(folder / name) for name in found), Report())
    found = [name for name in names if name.endswith(INDEX_SUFFIX)]
    found += [name for name in names if name.endswith((".pt", ".pth", ".bin", ".safetensors"))]
    if not found:
        what = "no manifest and no checkpoint in this folder"
        return Report(problems=(Problem(folder.name, "folder", 0, 0, what),))
    return sum((_verify_alone(folder / name) for name in found), Report())


def _verify_manifest(path: Path) -> Report:
    document, report = _read_manifest(path)
    if document is not None:
        return _verify_described(path.parent, document)
    root = path.with_name(path.name.removesuffix(MANIFEST_SUFFIX))
    for candidate in (root, root.with_name(root.name + INDEX_SUFFIX)):
        if candidate.exists():
            report += _verify_alone(candidate)
    return report


def _manifests_for(path: Path) -> Iterator[Path]:
    """Yield the manifests that may list a file: its own first, then (for shards) the others."""
    first = path.with_name(path.name.removesuffix(INDEX_SUFFIX) + MANIFEST_SUFFIX)
    if first.exists():
        yield first
    for other in sorted(path.parent.glob(f"*{MANIFEST_SUFFIX}")):
        if other != first and path.name.endswith(".safetensors"):
            yield other


def _read_manifest(path: Path) -> tuple[Document | None, Report]:
    try:
        with closing(Source(path)) as source:
            # One byte more than a manifest may have: a longer one is cut, and found to be so.
            return manifest.parse(source.read(0, _MANIFEST_BYTES_MAX + 1)), Report()
    except (manifest.ManifestError, OSError) as error:
        problem = Problem(path.name, "manifest", 0, 0, f"unusable, so not relied on: {error}")
        return None, Report(problems=(problem,))


# --- with a manifest --------------------------------------------------------------------------


def _verify_described(folder: Path, document: Document, only: str | None = None) -> Report:
    """Check the files of the entry that describes what is in the folder."""
    names = {file.name for head in document.heads for file in head.files}
    in_place = {name: facts for name in names if (facts := _facts(folder / name)) is not None}
    matching = manifest.best_matches(document.heads, in_place)
    candidates = matching or list(range(len(document.heads)))
    best: tuple[Report, int] | None = None
    for index in candidates:
        try:
            found = _verify_entry(folder, document.entry(index), only)
        except manifest.ManifestError as error:
            head = document.heads[index]
            problem = Problem(head.root + MANIFEST_SUFFIX, "manifest", 0, 0, str(error))
            found = Report(problems=(problem,)), 0
        if best is None or found[1] > best[1] or (found[0].ok and not best[0].ok):
            best = found
    if best is None:
        what = "the manifest describes no save"
        return Report(problems=(Problem(folder.name, "manifest", 0, 0, what),))
    report, right = best
    resized = any(problem.name == "file" for problem in report.problems)
    if resized and not right and len(in_place) == 1:
        return _verify_rewritten(folder / next(iter(in_place)), report)
    return report


def _verify_rewritten(path: Path, report: Report) -> Report:
    """Check a file that is nothing the manifest knows, in size and in every tensor."""
    with closing(Source(path)) as source:
        if source.read(0, 4) != _ZIP_MAGIC:
            return report
    alone = _verify_alone(path)
    if not alone.ok:
        return report
    note = f"{path.name}: its manifest is of another file; another program has rewritten it"
    return alone + Report(notes=(note,))


def _facts(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_size


def _verify_entry(folder: Path, entry: Entry, only: str | None) -> tuple[Report, int]:
    """Check an entry's files; return the report and how many tensors are right."""
    report, right = Report(), 0
    for index, record in enumerate(entry.head.files):
        if only not in (None, record.name, entry.head.root):
            continue
        try:
            with closing(Source(folder / record.name)) as source:
                part, matched = _verify_file(source, entry, index, record)
        except FileNotFoundError:
            problem = Problem(record.name, "file", 0, record.nbytes, "the file is missing")
            part, matched = Report(files=(record.name,), problems=(problem,)), 0
        except OSError as error:
            problem = Problem(record.name, "file", 0, record.nbytes, f"cannot be read: {error}")
            part, matched = Report(files=(record.name,), problems=(problem,)), 0
        report, right = report + part, right + matched
    return report, right


def _verify_file(
    source: Source, entry: Entry, index: int, record: FileRecord
) -> tuple[Report, int]:
    problems: list[Problem] = []
    if source.size != record.nbytes:
        start, stop = sorted((source.size, record.nbytes))
        what = f"the file has {source.size} bytes and was written with {record.nbytes}"
        problems.append(Problem(source.name, "file", start, stop, what))
    if record.crc32 is not None:
        problems += _index_problems(source, entry, record.crc32)
        return Report((source.name,), 0, source.size, tuple(problems)), not problems
    in_file = np.flatnonzero(entry.file_of_shard == index)
    real = in_file[entry.nbytes[in_file] > 0]
    rows = real[np.argsort(entry.offset[real])]
    begins, ends = entry.offset[rows], entry.offset[rows] + entry.nbytes[rows]
    found, literal_crc = source.crcs(begins, ends)
    wrong = rows[found != entry.crc32[rows]]
    for row in wrong.tolist():
        start = int(entry.offset[row])
        end = start + int(entry.nbytes[row])
        cut = end > source.size
        what = "it is cut off" if cut else "its bytes do not match their CRC-32 in the manifest"
        problems.append(Problem(source.name, entry.names[row], start, end, what))
    if source.size == record.nbytes:
        expected, more = _expect(source, entry, in_file.tolist())
        if expected is not None:
            more += differences(source, expected)
        if not more and literal_crc != record.literal_crc32:
            what = "the bytes around the tensors do not match their CRC-32 in the manifest"
            more = [Problem(source.name, "header", 0, source.size, what)]
        problems += more
    report = Report((source.name,), len(in_file), source.size, tuple(problems))
    return report, len(rows) - len(wrong)


def _expect(source: Source, entry: Entry, rows: list[int]) -> tuple[Expected | None, list[Problem]]:
    if entry.head.format == "safetensors":
        return safetensors_container.expect(source, entry, rows), []
    if entry.head.format == "torch":
        names = [entry.names[row] for row in rows]
        return zip_container.expect(source, names, entry.nbytes[rows], entry.crc32[rows])
    return None, []


def _index_problems(source: Source, entry: Entry, crc32: int) -> list[Problem]:
    if source.range_crc(0, source.size) == crc32:
        return []
    names = [file.name for file in entry.head.files]
    order = np.lexsort((np.arange(len(entry.names)), entry.file_of_shard)).tolist()
    files = entry.file_of_shard.tolist()
    weight_map = {entry.names[row]: names[files[row]] for row in order}
    wanted = index_json(int(entry.nbytes.sum()), weight_map)
    at = 0
    for at, piece in source.pieces(0, source.size):
        part = wanted[at : at + len(piece)]
        if piece[: len(part)] != part:
            found = np.frombuffer(piece[: len(part)], np.uint8) != np.frombuffer(part, np.uint8)
            at += int(found.argmax())
            break
    start = wanted.rfind(b"\n", 0, at + 1) + 1
    stop = wanted.find(b"\n", at) % (len(wanted) + 1)
    line = wanted[start:stop].decode().strip()
    what = f"does not match its CRC-32 in the manifest; first at byte {at}, in {line[:200]}"
    return [Problem(source.name, "index", start, stop, what)]


# --- without one ------------------------------------------------------------------------------


def _verify_alone(path: Path) -> Report:
    """Check what the container itself vouches for."""
    try:
        with closing(Source(path)) as source:
            if path.name.endswith(INDEX_SUFFIX):
                return _verify_index_alone(path, source)
            if source.read(0, 4) == _ZIP_MAGIC or not path.name.endswith(".safetensors"):
                count, problems = zip_reading.inspect(source)
                note = "no manifest: checked against the zip's own CRC-32s"
            else:
                count, problems = safetensors_container.inspect(source)
                note = "no manifest: only the structure was checked, safetensors has no checksums"
            return Report(
                (source.name,), count, source.size, tuple(problems), (f"{source.name}: {note}",)
            )
    except OSError as error:
        problem = Problem(path.name, "file", 0, 0, f"cannot be read: {error}")
        return Report(files=(path.name,), problems=(problem,))


def _verify_index_alone(path: Path, source: Source) -> Report:
    note = f"{source.name}: no manifest: only the structure was checked, an index has no checksum"
    report = Report((source.name,), 0, source.size, (), (note,))
    try:
        total, weight_map = safetensors_container.read_index(source)
    except StructureError as error:
        problem = Problem(source.name, "index", 0, source.size, str(error))
        return report + Report(problems=(problem,))
    held: dict[str, str] = {}
    size = 0
    for name in sorted(set(weight_map.values())):
        part = _verify_alone(path.with_name(name))
        report += part
        if part.ok:
            with closing(Source(path.with_name(name))) as shard:
                for tensor, (start, stop) in safetensors_container.read_header(shard).items():
                    held[tensor] = name
                    size += stop - start
    if report.ok:
        wrong = _index_contradictions(weight_map, held)
        if total is not None and total != size:
            wrong.append(f"total_size is {total} and the tensors have {size} bytes")
        problems = (Problem(source.name, "index", 0, source.size, what) for what in wrong)
        report += Report(problems=tuple(problems))
    return report


def _index_contradictions(weight_map: dict[str, str], held: dict[str, str]) -> list[str]:
    wrong: Iterable[str] = sorted(
        name for name in weight_map.keys() | held.keys() if weight_map.get(name) != held.get(name)
    )
    return [
        f"tensor {name!r} is in {held.get(name, 'no file')} and the index says"
        f" {weight_map.get(name, 'nothing')}"
        for name in wrong
    ]
