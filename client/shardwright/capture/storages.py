"""Which bytes become a shard: the records of a torch zip, from where tensors lie in memory.

torch.save writes the whole storage behind every view. Here a record holds what is referenced:
tensors whose bytes overlap share one (and share memory again after loading), all others get their
own, and a strided view with holes is packed. A storage that is itself in the object is kept whole.
`torch_format` calls `group` with columns; the result refers to no tensor and is cached by `cache`.
Reads no tensor data.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

import torch

from shardwright.capture.columns import storage_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardwright.capture.columns import Columns

STORAGE_CLASSES: Final[dict[torch.dtype, str]] = torch.storage._dtype_to_storage_type_map()
"""dtype -> name of the legacy storage class in the pickle; other dtypes travel as raw bytes."""


class SharedBytesError(Exception):
    """Two things of different dtype lie over the same bytes. Holds tensor or storage numbers."""

    def __init__(self, tensors: tuple[int, ...], storages: tuple[int, ...] = ()) -> None:
        super().__init__(tensors, storages)
        self.tensors = tensors
        self.storages = storages


@dataclass(frozen=True, slots=True)
class WholeStorage:
    """A storage that is in the object itself. address is 0 where it is not on the host."""

    key: int
    nbytes: int
    dtype: torch.dtype  # as pickled: uint8 for an untyped one
    address: int


@dataclass(frozen=True, slots=True)
class Records:
    """The shards of one object, and where each tensor finds itself in them.

    By tensor: record_of, offsets (elements into the record), strides (as pickled).
    By record: nbytes, dtypes, shapes; tensor_of is a tensor inside it and deltas the bytes from
    the record's first byte to that tensor's; tensor_of is -1 - s for storage s kept whole.
    packed: records that need a re-layout of tensor_of. storage_records: by storage.
    """

    record_of: list[int]
    offsets: list[int]
    strides: list[tuple[int, ...]]
    nbytes: list[int] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    tensor_of: list[int] = field(default_factory=list)
    deltas: list[int] = field(default_factory=list)
    packed: list[int] = field(default_factory=list)
    storage_records: list[int] = field(default_factory=list)

    def add(
        self, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...], source: tuple[int, int]
    ) -> int:
        """Append a record whose (tensor_of, delta) are source; return its number."""
        self.nbytes.append(nbytes)
        self.dtypes.append(dtype)
        self.shapes.append(shape)
        self.tensor_of.append(source[0])
        self.deltas.append(source[1])
        return len(self.nbytes) - 1


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that torch gives the storage of such a tensor in a pickle."""
    return dtype if dtype in STORAGE_CLASSES else torch.uint8


def beyond_storage(columns: Columns) -> int | None:
    """Return the first tensor whose storage does not reach its last element, if there is one."""
    items = [dtype.itemsize for dtype in columns.dtypes]
    starts = map(operator.mul, columns.storage_offsets, items)
    ends = list(map(operator.add, starts, columns.extents))
    if not any(map(operator.gt, ends, columns.storage_nbytes)):
        return None
    return next(
        i
        for i, (end, nbytes) in enumerate(zip(ends, columns.storage_nbytes, strict=True))
        if end > nbytes and columns.extents[i]
    )


def null_address(columns: Columns) -> int | None:
    """Return the first tensor with elements and no memory behind them, if there is one."""
    if 0 not in columns.addresses and not any(columns.storage_offsets):
        return None
    facts = zip(
        columns.addresses, columns.storage_offsets, columns.dtypes, columns.extents, strict=True
    )
    for index, (address, offset, dtype, extent) in enumerate(facts):
        if extent and address == offset * dtype.itemsize:
            return index
    return None


def group(
    columns: Columns, tensors: list[torch.Tensor], storages: Sequence[WholeStorage] = ()
) -> Records:
    """Divide the bytes of tensors (each listed once) and storages into records.

    Records follow the tensors' order. Raises SharedBytesError.
    """
    count = len(tensors)
    kept = _tensors_of_kept(columns, tensors, storages)
    clusters = overlaps(columns, tensors, kept)
    if not clusters and not storages and columns.contiguous:
        return _one_each(columns)
    records = Records([-1] * count, [0] * count, list(columns.strides))
    cluster_of = {index: cluster for cluster in clusters for index in cluster}
    records.storage_records.extend([-1] * len(storages))
    for index in range(count):
        if records.record_of[index] >= 0:
            continue
        if index in kept:
            _add_to_kept(records, columns, index, kept[index], storages)
        elif index in cluster_of and not _packable_together(columns, cluster_of[index]):
            _add_cluster(records, columns, cluster_of[index])
        else:
            _add_lone(records, columns, cluster_of.get(index, [index]))
    for number, record in enumerate(records.storage_records):
        if record < 0:
            _add_storage(records, number, storages[number])
    return records


def overlaps(
    columns: Columns, tensors: list[torch.Tensor], kept: dict[int, int] | None = None
) -> list[list[int]]:
    """Return the sets of two and more tensors whose bytes overlap inside one storage."""
    kept = kept or {}
    present = [i for i, extent in enumerate(columns.extents) if extent and i not in kept]
    clusters = _sweep(columns, present)
    found: list[list[int]] = []
    for cluster in clusters:
        by_storage: dict[int, list[int]] = {}
        for index, key in zip(cluster, storage_keys(tensors[i] for i in cluster), strict=True):
            by_storage.setdefault(key, []).append(index)
        if len(by_storage) == 1:
            found.append(cluster)
        else:  # two storages over the same memory: torch keeps them apart, and so do we
            for members in by_storage.values():
                found += _sweep(columns, members)
    return found


def _sweep(columns: Columns, indices: list[int]) -> list[list[int]]:
    """Return the runs of two and more byte ranges that overlap, each in address order."""
    addresses, extents = columns.addresses, columns.extents
    order = sorted(indices, key=addresses.__getitem__)
    starts = [addresses[i] for i in order]
    ends = list(map(operator.add, starts, (extents[i] for i in order)))
    if all(map(operator.le, ends, islice(starts, 1, None))):
        return []
    clusters: list[list[int]] = []
    current: list[int] = []
    reached = 0
    for index, start, end in zip(order, starts, ends, strict=True):
        if start >= reached:
            if len(current) > 1:
                clusters.append(current)
            current = []
        current.append(index)
        reached = max(reached, end)
    return [*clusters, current] if len(current) > 1 else clusters


def _one_each(columns: Columns) -> Records:
    """Return the records of contiguous tensors that share nothing: the usual case, at once."""
    count = len(columns.addresses)
    return Records(
        record_of=list(range(count)),
        offsets=[0] * count,
        strides=columns.strides,
        nbytes=columns.extents,
        dtypes=columns.dtypes,
        shapes=columns.shapes,
        tensor_of=list(range(count)),
        deltas=[0] * count,
    )


def _tensors_of_kept(
    columns: Columns, tensors: list[torch.Tensor], storages: Sequence[WholeStorage]
) -> dict[int, int]:
    """Return tensor -> storage for tensors whose storage is in the object itself."""
    if not storages:
        return {}
    numbers = {storage.key: number for number, storage in enumerate(storages)}
    kept = {
        index: numbers[key] for index, key in enumerate(storage_keys(tensors)) if key in numbers
    }
    for index, number in kept.items():
        family = storage_dtype(columns.dtypes[index])
        if family != storages[number].dtype and storages[number].nbytes:
            raise SharedBytesError((index,), (number,))
    return kept


def _add_to_kept(
    records: Records,
    columns: Columns,
    index: int,
    number: int,
    storages: Sequence[WholeStorage],
) -> None:
    if records.storage_records[number] < 0:
        _add_storage(records, number, storages[number])
    records.record_of[index] = records.storage_records[number]
    records.offsets[index] = columns.storage_offsets[index]


def _add_storage(records: Records, number: int, storage: WholeStorage) -> None:
    elements = storage.nbytes // storage.dtype.itemsize
    nbytes = elements * storage.dtype.itemsize
    record = records.add(nbytes, storage.dtype, (elements,), (-1 - number, 0))
    records.storage_records[number] = record


def _add_lone(records: Records, columns: Columns, members: list[int]) -> None:
    """Add a record for a tensor alone, or for several that look at the same elements."""
    index = members[0]
    dtype, shape, extent = columns.dtypes[index], columns.shapes[index], columns.extents[index]
    packing = packed_strides(shape, columns.strides[index]) if extent else None
    if packing is None:
        elements = extent // dtype.itemsize
        flat = (elements,) if elements != _product(shape) else shape
        record = records.add(extent, dtype, flat, (index, 0))
    else:
        dense = tuple(
            size if step else 1 for size, step in zip(shape, columns.strides[index], strict=True)
        )
        record = records.add(_product(dense) * dtype.itemsize, dtype, dense, (index, 0))
        records.packed.append(record)
    for member in members:
        records.record_of[member] = record
        if packing is not None:
            records.strides[member] = packing


def _add_cluster(records: Records, columns: Columns, cluster: list[int]) -> None:
    """Add one record for tensors that overlap: raw bytes from the first to the last of them."""
    first = cluster[0]
    family = storage_dtype(columns.dtypes[first])
    for other in cluster:
        if storage_dtype(columns.dtypes[other]) != family:
            raise SharedBytesError(_conflict(columns, cluster, other))
    widest = max(columns.dtypes[i].itemsize for i in cluster)
    begin = columns.addresses[first]
    storage_begin = begin - columns.storage_offsets[first] * columns.dtypes[first].itemsize
    begin -= (begin - storage_begin) % widest
    end = max(columns.addresses[i] + columns.extents[i] for i in cluster)
    nbytes = end - begin
    named = min(cluster)
    source = (named, columns.addresses[named] - begin)
    record = records.add(nbytes, family, (nbytes // family.itemsize,), source)
    for index in cluster:
        records.record_of[index] = record
        item = columns.dtypes[index].itemsize
        records.offsets[index] = (columns.addresses[index] - begin) // item


def _conflict(columns: Columns, cluster: list[int], other: int) -> tuple[int, int]:
    """Return other and a tensor of another dtype over the same bytes, if need be indirectly."""
    begin, family = columns.addresses[other], storage_dtype(columns.dtypes[other])
    rivals = [i for i in cluster if storage_dtype(columns.dtypes[i]) != family]
    direct = [
        i
        for i in rivals
        if columns.addresses[i] < begin + columns.extents[other]
        and begin < columns.addresses[i] + columns.extents[i]
    ]
    rival = (direct or rivals)[0]
    return min(rival, other), max(rival, other)


def _packable_together(columns: Columns, cluster: list[int]) -> bool:
    """Say whether all tensors of a cluster look at the same elements, with holes between them."""
    first, *others = cluster
    facts = (columns.addresses, columns.shapes, columns.strides, columns.dtypes)
    same = all(fact[first] == fact[other] for other in others for fact in facts)
    return same and packed_strides(columns.shapes[first], columns.strides[first]) is not None


def packed_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return row-major strides for a view with holes; None when its raw bytes are to be kept.

    Kept are: views without holes (transposed, channels_last), and views whose elements overlap
    in a way that packing would lose (sliding windows). Expanded dimensions stay expanded.
    """
    steps = sorted(
        (step, size) for size, step in zip(shape, stride, strict=True) if size > 1 and step
    )
    reached = elements = 1
    for step, size in steps:
        if step < reached:
            return None
        reached += (size - 1) * step
        elements *= size
    if elements == reached:
        return None
    packed: list[int] = []
    running = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        packed.append(running if step else 0)
        running *= size if step else 1
    return tuple(reversed(packed))


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
