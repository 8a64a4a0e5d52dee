"""What a pickle's placeholders stand for: tensors and storages, each counted once, and checked.

Between `torch_pickle`, which lists subjects in stream order, and `storages` and `opcodes`, which
work with numbers. Refuses by name what has no bytes to save. Called by `torch_format`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from shardwright.capture.columns import UNREADABLE, Columns, any_attributes
from shardwright.capture.source import unobserved
from shardwright.capture.storages import STORAGE_CLASSES, WholeStorage, beyond_storage, null_address
from shardwright.capture.torch_pickle import NO_STORAGE_DEVICES
from shardwright.errors import UnsupportedObjectError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwright.capture.names import Namer
    from shardwright.capture.torch_pickle import Pickled

_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})
QUANTISED: Final = frozenset(
    {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
)
FREED_HINT: Final = "Gather the parameters before saving (FSDP: state_dict())"
META_HINT: Final = "Materialise it (to_empty, then load or initialise), or leave it out"


@dataclass(frozen=True, slots=True)
class Subjects:
    """Stream order as numbers, and what they stand for.

    sequence: tensor numbers in order of first appearance, or -1 - a for appearance a of a storage.
    tensors: as read; originals: as they stand in the object. appearances: (storage, class name).
    """

    sequence: Sequence[int]
    originals: list[torch.Tensor]
    tensors: list[torch.Tensor]
    columns: Columns
    appearances: list[tuple[int, str]]
    storages: list[WholeStorage]
    untyped: list[torch.UntypedStorage]
    owners: list[Any]  # by storage: the object that stands in the stream


def number(objects: list[Any]) -> tuple[Sequence[int], list[Any]]:
    """Return numbers in order of first appearance, and each object once."""
    ids = list(map(id, objects))
    if len(set(ids)) == len(ids):
        return range(len(ids)), objects
    first = dict(zip(ids, objects, strict=True))
    number_of = {key: index for index, key in enumerate(first)}
    return [number_of[key] for key in ids], list(first.values())


@dataclass(frozen=True, slots=True)
class Ahead:
    """Tensors that a walk found before the pickler ran: all of them plain, columns and all."""

    sequence: Sequence[int]
    tensors: list[torch.Tensor]
    columns: Columns


def read_ahead(found: list[torch.Tensor]) -> Ahead | None:
    """Read the columns of what a walk found. None: the pickler is to look at each by itself."""
    sequence, tensors = number(found)
    try:
        columns = Columns.read(tensors)
    except UNREADABLE:
        return None
    if null_address(columns) is not None:
        return None
    with unobserved():
        hooked = any(columns.requires_grad) and any(t._backward_hooks for t in tensors)
    if (
        hooked
        or any_attributes(tensors)
        or any(dtype in QUANTISED for dtype in set(columns.dtypes))
        or any(device.type in NO_STORAGE_DEVICES for _, device in columns.elsewhere)
    ):
        return None
    return Ahead(sequence, tensors, columns)


def divide(pickled: Pickled, namer: Namer, ahead: Ahead | None = None) -> Subjects:
    """Sort out a pickle's subjects. Raises UnsupportedObjectError for what has no bytes.

    ahead: given when the pickler met exactly what the walk had found.
    """
    subjects = pickled.subjects
    if ahead is not None:
        _check(ahead.columns, ahead.tensors, namer)
        return Subjects(ahead.sequence, ahead.tensors, ahead.tensors, ahead.columns, [], [], [], [])
    if set(map(type, subjects)) <= _TENSORS:
        sequence, originals = number(subjects)
        tensors, columns = read_columns(originals, namer)
        return Subjects(sequence, originals, tensors, columns, [], [], [], [])
    is_tensor = [isinstance(subject, torch.Tensor) for subject in subjects]
    numbers, originals = number(
        [subject for subject, yes in zip(subjects, is_tensor, strict=True) if yes]
    )
    tensors, columns = read_columns(originals, namer)
    stream: list[int] = []
    it = Subjects(stream, originals, tensors, columns, [], [], [], [])
    remaining = iter(numbers)
    number_of: dict[int, int] = {}
    for subject, yes in zip(subjects, is_tensor, strict=True):
        stream.append(next(remaining) if yes else _add_storage(it, number_of, subject, namer))
    return it


def read_columns(originals: list[torch.Tensor], namer: Namer) -> tuple[list[torch.Tensor], Columns]:
    """Return tensors with memory in the originals' places, and their columns."""
    try:
        columns = Columns.read(originals)
        _check(columns, originals, namer)
        if null_address(columns) is None:
            return originals, columns
    except UNREADABLE:
        pass  # one of them: which, is found out below
    tensors = [_with_memory(tensor, namer) for tensor in originals]
    columns = Columns.read(tensors)
    _check(columns, originals, namer)
    return tensors, columns


def _check(columns: Columns, originals: list[torch.Tensor], namer: Namer) -> None:
    """Refuse what has a shape and no data."""
    for index, device in columns.elsewhere:
        if device.type == "meta":
            raise without_data(namer.name(originals[index]))
    freed = beyond_storage(columns)
    if freed is not None:
        name = namer.name(originals[freed])
        raise UnsupportedObjectError(
            f"{name!r} reaches beyond its storage of {columns.storage_nbytes[freed]} bytes: "
            "it was freed or shrunk",
            (name,),
            FREED_HINT,
        )


def without_data(name: str) -> UnsupportedObjectError:
    """Return the refusal of a meta tensor."""
    return UnsupportedObjectError(
        f"{name!r} is on the meta device: it has a shape and no data", (name,), META_HINT
    )


def shared_bytes(names: list[str]) -> UnsupportedObjectError:
    """Return the refusal of things that view the same bytes as different dtypes."""
    return UnsupportedObjectError(
        f"{' and '.join(map(repr, names))} view the same bytes as different types",
        tuple(names),
        "Clone one of them, or save only one and view it after loading",
    )


def _with_memory(tensor: torch.Tensor, namer: Namer) -> torch.Tensor:
    """Return a tensor itself, or zeros for a ZeroTensor; refuse what has no strided memory."""
    if tensor._is_zerotensor():
        return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)
    try:
        columns = Columns.read([tensor])
    except UNREADABLE as error:
        raise _without_memory(tensor, namer) from error
    if null_address(columns) is not None and beyond_storage(columns) is None:
        raise _without_memory(tensor, namer)
    return tensor


def _without_memory(tensor: torch.Tensor, namer: Namer) -> UnsupportedObjectError:
    name = namer.name(tensor)
    return UnsupportedObjectError(
        f"{name!r} ({tensor.layout}) has no memory that could be saved as it is",
        (name,),
        "Convert it to a dense tensor (to_dense), and save outside of torch.func transforms",
    )


def _add_storage(it: Subjects, number_of: dict[int, int], subject: Any, namer: Namer) -> int:
    """Note one appearance of a storage; return what stands for it in the sequence."""
    storage: torch.UntypedStorage
    if isinstance(subject, torch.TypedStorage):
        storage, dtype = subject._untyped_storage, subject.dtype
        class_name = STORAGE_CLASSES.get(dtype, "")
    else:
        storage, dtype, class_name = subject, torch.uint8, "UntypedStorage"
    if storage.device.type == "meta":
        raise without_data(namer.name(subject))
    if not class_name:
        name = namer.name(subject)
        raise UnsupportedObjectError(
            f"{name!r} is a TypedStorage of {dtype}, which torch cannot pickle",
            (name,),
            "Save a tensor over it, or its untyped storage",
        )
    key = storage._cdata
    index = number_of.setdefault(key, len(it.storages))
    if index == len(it.storages):
        address = storage.data_ptr() if storage.device.type == "cpu" else 0
        it.storages.append(WholeStorage(key, storage.nbytes(), dtype, address))
        it.untyped.append(storage)
        it.owners.append(subject)
    elif it.storages[index].dtype != dtype and it.storages[index].nbytes:
        raise shared_bytes([namer.name(it.owners[index]), namer.name(subject)])
    it.appearances.append((index, class_name))
    return -len(it.appearances)
