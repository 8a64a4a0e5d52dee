"""The pickle opcodes of plain tensors and storages, as torch.save's pickler would have left them.

`torch_pickle` runs a real pickler that puts a placeholder where such an object stands; what is
built here takes the placeholder's place. Knows the few opcodes that it needs, all of protocol 2
and all understood by `torch.load(weights_only=True)`, and never reads a pickle.
"""

from __future__ import annotations

import struct
from collections import Counter
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from shardwright.capture.storages import STORAGE_CLASSES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from shardwright.capture.columns import Columns
    from shardwright.capture.storages import Records

_MARK, _TUPLE, _REDUCE, _PERSISTENT_ID = b"(", b"t", b"R", b"Q"
_EMPTY_TUPLE, _EMPTY_DICT, _SET_ITEM = b")", b"}", b"s"
_BOOLEANS: Final = {True: b"\x88", False: b"\x89"}

_REBUILD_V2: Final = b"ctorch._utils\n_rebuild_tensor_v2\n"
_REBUILD_V3: Final = b"ctorch._utils\n_rebuild_tensor_v3\n"
_REBUILD_PARAMETER: Final = b"ctorch._utils\n_rebuild_parameter\n"
_UNTYPED: Final = "UntypedStorage"
_ORDERED_DICT: Final = b"ccollections\nOrderedDict\n"


def integer(value: int) -> bytes:
    """Return the opcode that pushes an integer."""
    if 0 <= value < 1 << 8:
        return b"K" + value.to_bytes(1, "little")
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + len(raw).to_bytes(1, "little") + raw


def text(value: str) -> bytes:
    """Return the opcode that pushes a str."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def integers(values: Sequence[int]) -> bytes:
    """Return the opcodes that push a tuple of integers."""
    if not values:
        return _EMPTY_TUPLE
    if len(values) <= 3:
        return b"".join(map(integer, values)) + (b"\x85", b"\x86", b"\x87")[len(values) - 1]
    return _MARK + b"".join(map(integer, values)) + _TUPLE


def memo_put(index: int) -> bytes:
    """Return the opcode that remembers the top of the stack."""
    return b"q" + bytes((index,)) if index < 256 else b"r" + struct.pack("<I", index)


def memo_get(index: int) -> bytes:
    """Return the opcode that pushes what was remembered."""
    return b"h" + bytes((index,)) if index < 256 else b"j" + struct.pack("<I", index)


class OpcodeWriter:
    """Builds the opcodes of a pickle's tensors and storages.

    Uses memo slots from memo_base upwards, which the pickler must have left free. is_parameter:
    by tensor. locations: by record, as torch.serialization.location_tag says. appearances: of
    storages kept whole, in stream order: storage number, and the class that the pickle names.
    """

    def __init__(
        self,
        memo_base: int,
        columns: Columns,
        records: Records,
        is_parameter: Sequence[bool],
        locations: Sequence[str],
        appearances: Sequence[tuple[int, str]] = (),
    ) -> None:
        self._memo_used = memo_base
        self._columns = columns
        self._records = records
        self._is_parameter = is_parameter
        self._locations = locations
        self._appearances = appearances
        self._atoms: dict[bytes, int] = {}
        self._templates: dict[object, tuple[bytes, bytes, bytes]] = {}

    def write(self, sequence: Sequence[int]) -> list[bytes]:
        """Return the opcodes for what stands in the stream, one after the other.

        sequence: tensor numbers, counted in order of first appearance; one that comes again is
        the same object again. -1 - a stands for appearance a of a storage. Called once.
        """
        record_of, offsets = self._records.record_of, self._records.offsets
        repeated = _repeated(sequence)
        slots: dict[int, int] = {}
        facts = self._facts()
        templates = self._templates
        parts: list[bytes] = []
        for number in sequence:
            if number < 0:
                parts.append(self._whole(-1 - number))
                continue
            if number in slots:
                parts.append(memo_get(slots[number]))
                continue
            fact = next(facts)
            pieces = templates.get(fact)
            if pieces is None:
                pieces = self._tensor(*fact)
                templates[fact] = self._tensor(*fact)
            key = b"%d" % record_of[number]
            offset = integer(offsets[number]) if offsets[number] else b"K\0"
            part = b"%bX%c\0\0\0%b%b%b%b" % (
                pieces[0], len(key), key, pieces[1], offset, pieces[2]
            )  # fmt: skip
            if number in repeated:
                slots[number] = self._memo_used
                part += memo_put(self._memo_used)
                self._memo_used += 1
            parts.append(part)
        return parts

    def _facts(self) -> Iterator[tuple[Any, ...]]:
        """Yield, by tensor, all that its opcodes depend on but its record's key and offset."""
        columns, records = self._columns, self._records
        count = len(records.record_of)
        flagged = [{i for i, flag in columns.flags if flag == which} for which in ("conj", "neg")]
        return zip(
            columns.dtypes,
            columns.shapes,
            records.strides,
            columns.requires_grad,
            self._is_parameter,
            map(records.nbytes.__getitem__, records.record_of),
            map(self._locations.__getitem__, records.record_of),
            *(
                map(which.__contains__, range(count)) if which else repeat(False)
                for which in flagged
            ),
            strict=False,  # repeat() never ends
        )

    def _whole(self, appearance: int) -> bytes:
        number, class_name = self._appearances[appearance]
        record = self._records.storage_records[number]
        elements = self._records.nbytes[record] // self._records.dtypes[record].itemsize
        before, behind = self._storage(class_name, elements, self._locations[record])
        return before + text(str(record)) + behind

    def _atom(self, opcodes: bytes) -> bytes:
        """Return opcodes the first time, with a memo slot; afterwards what fetches it."""
        slot = self._atoms.get(opcodes)
        if slot is not None:
            return memo_get(slot)
        self._atoms[opcodes] = self._memo_used
        self._memo_used += 1
        return opcodes + memo_put(self._memo_used - 1)

    def _storage(self, class_name: str, elements: int, location: str) -> tuple[bytes, bytes]:
        """Return what comes before and behind the key in a storage's persistent id."""
        module = b"torch.storage" if class_name == _UNTYPED else b"torch"
        which = b"c%b\n%b\n" % (module, class_name.encode())
        before = _MARK + self._atom(text("storage")) + self._atom(which)
        place = self._atom(text(location))
        return before, place + integer(elements) + _TUPLE + _PERSISTENT_ID

    def _tensor(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        requires_grad: bool,
        is_parameter: bool,
        record_nbytes: int,
        location: str,
        conj: bool,
        neg: bool,
    ) -> tuple[bytes, bytes, bytes]:
        """Return the opcodes before the record's key, up to the offset, and behind it."""
        class_name = STORAGE_CLASSES.get(dtype)
        item = dtype.itemsize if class_name else 1
        head = self._atom(_REBUILD_PARAMETER) + _MARK if is_parameter else b""
        head += self._atom(_REBUILD_V2 if class_name else _REBUILD_V3) + _MARK
        before, behind = self._storage(class_name or _UNTYPED, record_nbytes // item, location)
        tail = integers(shape) + integers(stride)
        tail += _BOOLEANS[requires_grad and not is_parameter] + self._no_hooks()
        if not class_name:
            tail += self._atom(b"ctorch\n%b\n" % _dtype_name(dtype).encode())
        if conj or neg:
            tail += _EMPTY_DICT
            for flag, is_set in (("conj", conj), ("neg", neg)):
                tail += text(flag) + _BOOLEANS[True] + _SET_ITEM if is_set else b""
        tail += _TUPLE + _REDUCE
        if is_parameter:
            tail += _BOOLEANS[requires_grad] + self._no_hooks() + _TUPLE + _REDUCE
        return head + before, behind, tail

    def _no_hooks(self) -> bytes:
        """Return an empty OrderedDict of its own: registering a hook writes into it."""
        return self._atom(_ORDERED_DICT) + _EMPTY_TUPLE + _REDUCE


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _repeated(numbers: Sequence[int]) -> set[int]:
    if len(set(numbers)) == len(numbers):
        return set()
    counts = Counter(numbers)
    return {number for number in numbers if counts[number] > 1}
