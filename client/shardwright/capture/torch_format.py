"""The torch format's capture: any picklable object becomes data.pkl and its records' addresses.

The first capture of a structure pickles, groups and plans; later ones compare columns and reuse
what did not change. Called by `capture`; gives a Capture to the stager. Reads no tensor data.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from shardwright.capture import plan, storages, structure, torch_pickle
from shardwright.capture.base import Capture
from shardwright.capture.cache import StructureCache
from shardwright.capture.columns import Columns, read_addresses
from shardwright.capture.names import Namer, find_unpicklable
from shardwright.capture.opcodes import OpcodeWriter
from shardwright.capture.source import DeviceSource, RelayoutSource, storage_begin, unobserved
from shardwright.capture.storages import Records, SharedBytesError
from shardwright.capture.subjects import Subjects, divide, number, read_ahead, shared_bytes
from shardwright.capture.torch_pickle import Pickled, RefusedError
from shardwright.errors import UnsupportedObjectError
from shardwright_proto.limits import DIMS_MAX, SKELETON_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from shardwright.capture.source import Source
    from shardwright.capture.structure import Structure

KEPT_SKELETON_BYTES_MAX: Final = 64 << 20
"""Entries with a longer pickle are not worth their memory in the cache."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What was derived from a structure whose tensors are all plain and all found by the walk."""

    sequence: Sequence[int]
    columns: Columns
    records: Records
    plan: plan.Plan
    parts: list[bytes]
    memo_base: int
    leaves: list[Any]
    skeleton: bytes


_known: Final[StructureCache[_Known]] = StructureCache()


def capture_torch(obj: object) -> Capture:
    """Capture any object that torch.save takes. Raises UnsupportedObjectError."""
    seen = structure.read(obj)
    if seen is not None:
        known = _known.find(seen.shape)
        again = None if known is None else _capture_known(obj, seen, known)
        if again is not None:
            return again
    return _capture_new(obj, seen)


def forget_structures() -> None:
    """Drop what is kept from earlier captures."""
    _known.clear()


def _capture_known(obj: object, seen: Structure, known: _Known) -> Capture | None:
    """Return the capture of an object whose structure is known, or None if something differs."""
    sequence, tensors = number(seen.tensors)
    if sequence != known.sequence or not known.columns.same_as(tensors):
        return None
    columns = replace(known.columns, addresses=read_addresses(tensors))
    if storages.null_address(columns) is not None or not _same_sharing(known, columns, tensors):
        return None
    skeleton = known.skeleton
    if seen.opaque or seen.leaves != known.leaves or not skeleton:
        pickled = _pickle(obj, set(map(id, tensors)))
        if not _walk_found_all(pickled, seen) or pickled.memo_base > known.memo_base:
            return None
        skeleton = _skeleton(pickled, known.parts)
        if not seen.opaque and len(skeleton) <= KEPT_SKELETON_BYTES_MAX:
            _known.keep(seen.shape, replace(known, leaves=seen.leaves, skeleton=skeleton))
    return _assemble(known.plan, skeleton, columns, known.records, tensors)


def _same_sharing(known: _Known, columns: Columns, tensors: list[torch.Tensor]) -> bool:
    """Say whether tensors with known facts share memory as the known ones do."""
    if len(known.records.nbytes) < len(tensors):
        try:
            return storages.group(columns, tensors) == known.records
        except SharedBytesError:
            return False
    # A record each, so nothing overlapped: without overlaps the records come out the same.
    moved = columns.addresses != known.columns.addresses
    return not moved or not storages.overlaps(columns, tensors)


def _capture_new(obj: object, seen: Structure | None) -> Capture:
    ahead = read_ahead(seen.tensors) if seen is not None else None
    pickled = _pickle(obj, set(map(id, ahead.tensors)) if ahead is not None else ())
    namer = Namer(obj, pickled.subjects, pickled.owners)
    found_all = seen is not None and _walk_found_all(pickled, seen)
    it = divide(pickled, namer, ahead if found_all else None)
    try:
        records = storages.group(it.columns, it.tensors, it.storages)
    except SharedBytesError as error:
        found = [it.originals[i] for i in error.tensors] + [it.owners[i] for i in error.storages]
        raise shared_bytes(namer.all(found)) from None
    parts = OpcodeWriter(
        pickled.memo_base,
        it.columns,
        records,
        [type(tensor) is torch.nn.Parameter for tensor in it.originals],
        _locations(it, records),
        it.appearances,
    ).write(it.sequence)
    skeleton = _skeleton(pickled, parts)
    shard_names = namer.all(
        [it.originals[i] if i >= 0 else it.owners[-1 - i] for i in records.tensor_of]
    )
    built = plan.build("torch", shard_names, records.dtypes, _shapes(records), records.nbytes)
    worth_it = len(skeleton) <= KEPT_SKELETON_BYTES_MAX
    if seen is not None and worth_it and found_all:
        known = _Known(
            sequence=it.sequence,
            columns=it.columns,
            records=records,
            plan=built,
            parts=parts,
            memo_base=pickled.memo_base,
            leaves=seen.leaves,
            skeleton=b"" if seen.opaque else skeleton,  # an opaque one is never used again
        )
        _known.keep(seen.shape, known)
    return _assemble(built, skeleton, it.columns, records, it.tensors, it)


def _walk_found_all(pickled: Pickled, seen: Structure) -> bool:
    """Say whether the pickler met the tensors that the walk found, in that order, and no other."""
    return len(pickled.subjects) == len(seen.tensors) and all(
        map(operator.is_, pickled.subjects, seen.tensors)
    )


def _pickle(obj: object, plain: Container[int]) -> Pickled:
    """Run the pickler; what cannot be pickled is refused by name."""
    try:
        return torch_pickle.pickle_object(obj, plain)
    except RefusedError as error:
        name = Namer(obj).name(error.subject)
        raise UnsupportedObjectError(f"{name!r} {error.message}", (name,), error.hint) from None
    except MemoryError:
        raise
    except RecursionError as error:
        raise UnsupportedObjectError(
            "the object is nested more deeply than Python's recursion limit lets pickle go",
            hint="Flatten it, or raise sys.setrecursionlimit as torch.save would need",
        ) from error
    except Exception as error:
        name, culprit = find_unpicklable(obj, _pickles)
        opaque = isinstance(culprit, torch.Tensor)
        raise UnsupportedObjectError(
            f"{name!r} ({type(culprit).__qualname__}) cannot be pickled: "
            f"{type(error).__name__}: {error}",
            (name,),
            "Convert it to a dense tensor (to_dense)"
            if opaque
            else "Leave it out, or replace it by something that torch.save takes",
        ) from error


def _pickles(obj: object) -> bool:
    try:
        torch_pickle.pickle_object(obj)
    except Exception:  # noqa: BLE001  whatever it is: the error that gets reported came before
        return False
    return True


def _skeleton(pickled: Pickled, parts: list[bytes]) -> bytes:
    skeleton = torch_pickle.splice(pickled, parts)
    if len(skeleton) > SKELETON_BYTES_MAX:
        raise UnsupportedObjectError(
            f"what is not tensor data pickles to {len(skeleton)} bytes, "
            f"the limit is {SKELETON_BYTES_MAX}",
            hint="Turn large Python payloads into tensors",
        )
    return skeleton


def _shapes(records: Records) -> list[tuple[int, ...]]:
    """Return the records' shapes; flat where the wire has too few dimensions."""
    if all(len(shape) <= DIMS_MAX for shape in set(records.shapes)):
        return records.shapes
    return [
        shape if len(shape) <= DIMS_MAX else (nbytes // dtype.itemsize,)
        for shape, nbytes, dtype in zip(records.shapes, records.nbytes, records.dtypes, strict=True)
    ]


def _locations(it: Subjects, records: Records) -> list[str]:
    """Return torch's name for each record's device."""
    tag = torch.serialization.location_tag
    locations = ["cpu"] * len(records.nbytes)
    elsewhere = {index for index, _ in it.columns.elsewhere}
    if elsewhere or it.untyped:
        for record, index in enumerate(records.tensor_of):
            if index < 0:
                locations[record] = tag(it.untyped[-1 - index])
            elif index in elsewhere:
                locations[record] = tag(it.tensors[index].untyped_storage())
    return locations


def _assemble(
    built: plan.Plan,
    skeleton: bytes,
    columns: Columns,
    records: Records,
    tensors: list[torch.Tensor],
    it: Subjects | None = None,
) -> Capture:
    """Put together the plan and where the bytes are now. it: where whole storages may be."""
    addresses = columns.addresses
    if len(records.nbytes) != len(tensors) or records.storage_records:
        whole = [storage.address for storage in it.storages] if it else []
        addresses = [
            addresses[index] if index >= 0 else whole[-1 - index] for index in records.tensor_of
        ]
    if any(records.deltas):
        addresses = list(map(operator.sub, addresses, records.deltas))
    untyped = it.untyped if it else []
    sources = _sources(columns, records, tensors, untyped)
    if sources:
        addresses = [0 if record in sources else at for record, at in enumerate(addresses)]
    return Capture(
        plan=built.data,
        plan_digest=built.digest,
        skeleton=skeleton,
        addresses=addresses,
        nbytes=built.nbytes,
        sources=sources,
        names=built.names,
        keepalive=(tensors, untyped),
        bytes_total=sum(built.nbytes),
    )


def _sources(
    columns: Columns,
    records: Records,
    tensors: list[torch.Tensor],
    untyped: list[torch.UntypedStorage],
) -> dict[int, Source]:
    """Return the sources of records that are not host memory as it lies."""
    sources: dict[int, Source] = {}
    for record in records.packed:
        tensor = tensors[records.tensor_of[record]]
        with unobserved():
            sources[record] = RelayoutSource(_elements(tensor, records.shapes[record]))
    elsewhere = {index for index, _ in columns.elsewhere}
    if not elsewhere and not untyped:
        return sources
    for record, index in enumerate(records.tensor_of):
        nbytes = records.nbytes[record]
        if record in sources or not nbytes:
            continue
        if index < 0:
            storage = untyped[-1 - index]
            if storage.device.type != "cpu":
                sources[record] = DeviceSource(storage, 0, nbytes)
        elif index in elsewhere:
            tensor = tensors[index]
            begin = storage_begin(tensor) - records.deltas[record]
            sources[record] = DeviceSource(tensor.untyped_storage(), begin, nbytes)
    return sources


def _elements(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a view of each element once, as in memory: conj and neg stand in the pickle."""
    raw = tensor.detach()
    if raw.is_conj():
        raw = raw.conj()
    if raw.is_neg():
        raw = torch._neg_view(raw)
    return raw.as_strided(shape, tensor.stride(), tensor.storage_offset())
