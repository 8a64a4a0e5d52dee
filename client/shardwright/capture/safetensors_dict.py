"""The safetensors format's capture: a flat dict of tensors, and where their bytes are.

Stricter than torch's: names are strings, tensors are dense and share nothing. Everything that the
format cannot hold is refused by name before a byte is sent; the writer checks again. What does not
lie row-major is packed on the way. Called by `capture`; gives a Capture to the stager.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from shardwright.capture import plan, storages
from shardwright.capture.base import Capture
from shardwright.capture.cache import StructureCache
from shardwright.capture.columns import Columns, read_addresses
from shardwright.capture.names import Namer, fit, key_text
from shardwright.capture.source import DeviceSource, RelayoutSource, storage_begin, unobserved
from shardwright.capture.subjects import read_columns
from shardwright.errors import UnsupportedObjectError
from shardwright_proto.limits import DIMS_MAX, NAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwright.capture.source import Source

_DTYPE_NAMES: Final = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool uint64 uint32 uint16 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 "
    "complex64"
)
DTYPES: Final = frozenset(
    getattr(torch, name) for name in _DTYPE_NAMES.split() if hasattr(torch, name)
)
"""What the format has a code for."""

_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_RESERVED: Final = "__metadata__"
_UNITS: Final = {
    "": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Known:
    """What was derived from a dict of tensors."""

    columns: Columns
    plan: plan.Plan
    packed: list[int]


_known: Final[StructureCache[_Known]] = StructureCache()


def forget_structures() -> None:
    """Drop what is kept from earlier captures."""
    _known.clear()


def capture_safetensors(
    obj: object, metadata: Mapping[str, str] | None, max_shard_size: int | str | None
) -> Capture:
    """Capture a dict of tensors by name. Raises UnsupportedObjectError, naming the key."""
    if not isinstance(obj, dict):
        raise UnsupportedObjectError(
            f"safetensors holds a dict of tensors by name, not a {type(obj).__qualname__}",
            hint='Use format="torch" for other objects',
        )
    strings = _metadata(metadata)
    shard_bytes_max = shard_bytes(max_shard_size)
    keys, tensors = list(obj), list(obj.values())
    if set(map(type, keys)) <= {str} and set(map(type, tensors)) <= _PLAIN:
        key = (keys, strings, shard_bytes_max)
        known = _known.find(key)
        if known is not None and known.columns.same_as(tensors, attributes=True):
            columns = replace(known.columns, addresses=read_addresses(tensors))
            if storages.null_address(columns) is not None:
                columns = _read(obj, keys, tensors)
            if columns.addresses != known.columns.addresses:
                _refuse_shared(columns, tensors, keys)
            return _assemble(known.plan, columns, known.packed, tensors)
    _check_items(keys, tensors)
    columns = _read(obj, keys, tensors)
    packed = _packed(columns, tensors)
    nbytes = list(columns.extents)
    for index in packed:
        nbytes[index] = math.prod(columns.shapes[index]) * columns.dtypes[index].itemsize
    built = plan.build(
        "safetensors",
        keys,
        columns.dtypes,
        columns.shapes,
        nbytes,
        metadata=strings,
        shard_bytes_max=shard_bytes_max,
    )
    packed_order = sorted(packed)
    _known.keep((keys, strings, shard_bytes_max), _Known(columns, built, packed_order))
    return _assemble(built, columns, packed_order, tensors)


def shard_bytes(size: int | str | None) -> int:
    """Return max_shard_size in bytes, 0 for none; "5GB" is decimal and "5GiB" is binary."""
    if size is None:
        return 0
    text = str(size).upper() if type(size) in (int, str) else ""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B|)\s*", text)
    number, unit = (found[1], _UNITS[found[2]]) if found else ("0", 1)
    value = int(float(number) * unit) if "." in number else int(number) * unit
    if not value:
        raise UnsupportedObjectError(
            f"max_shard_size {size!r} is no size", hint='Give bytes, or "5GB", "500MB", "2GiB"'
        )
    return value


def _metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    strings = dict(metadata or {})
    for key, value in strings.items():
        if type(key) is not str or type(value) is not str or not _is_utf8(key + value):
            raise UnsupportedObjectError(
                f"metadata {fit(key_text(key))!r} is not a pair of strings",
                (fit(key_text(key)),),
                "safetensors metadata maps str to str",
            )
    return strings


def _is_utf8(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _check_items(keys: list[Any], values: list[Any]) -> None:
    for key, value in zip(keys, values, strict=True):
        with unobserved():
            reason = _key_refusal(key) or _value_refusal(value)
        if reason is not None:
            name = fit(key_text(key))
            raise UnsupportedObjectError(f"{name!r} {reason[0]}", (name,), reason[1])


def _key_refusal(key: Any) -> tuple[str, str] | None:
    if type(key) is not str:
        return f"is a {type(key).__qualname__}, and names are str in safetensors", "Convert the key"
    if not _is_utf8(key):
        return "is not valid Unicode (a lone surrogate)", "Rename the tensor"
    if key == _RESERVED:
        return "is the name of the format's own entry", "Rename the tensor; see metadata="
    if len(key) * 4 > NAME_BYTES_MAX and len(key.encode()) > NAME_BYTES_MAX:
        return f"is longer than {NAME_BYTES_MAX} bytes", "Shorten the name"
    return None


def _value_refusal(value: Any) -> tuple[str, str] | None:
    cls = type(value)
    other = 'Use format="torch"'
    if cls not in _PLAIN:
        if not isinstance(value, torch.Tensor):
            flat = "Flatten the dict, or use" if isinstance(value, dict) else "Leave it out, or use"
            return f"is a {cls.__qualname__}, no tensor", f'{flat} format="torch"'
        if hasattr(value, "full_tensor") or hasattr(value, "to_local"):
            return "is a DTensor", "Pass value.full_tensor() or value.to_local()"
        return (
            f"is a {cls.__qualname__}, a tensor subclass",
            f"Unwrap it, or {other[0].lower()}{other[1:]}",
        )
    if value.is_quantized:
        return "is quantised", other
    if value.layout is not torch.strided:
        return f"has layout {value.layout}", 'Pass to_dense(), or use format="torch"'
    if value.is_nested:
        return "is a nested tensor", other
    if value.dtype not in DTYPES:
        return f"has dtype {value.dtype}, for which safetensors has no code", other
    if value.dim() > DIMS_MAX:
        return f"has {value.dim()} dimensions, the limit is {DIMS_MAX}", "Reshape it"
    return None


def _read(obj: dict[Any, Any], keys: list[str], tensors: list[torch.Tensor]) -> Columns:
    """Read the columns, refusing what has no data; tensors without memory get some, in place."""
    with_memory, columns = read_columns(tensors, Namer(obj))
    if with_memory is not tensors:
        tensors[:] = with_memory
    _refuse_shared(columns, tensors, keys)
    return columns


def _refuse_shared(columns: Columns, tensors: list[torch.Tensor], keys: list[str]) -> None:
    """Refuse tensors that overlap; slices of one buffer that do not are fine."""
    for cluster in storages.overlaps(columns, tensors):
        first, second = sorted(cluster[:2])  # in address order: these two do overlap
        names = (keys[first], keys[second])
        raise UnsupportedObjectError(
            f"{names[0]!r} and {names[1]!r} share memory, which safetensors cannot express",
            names,
            'Save one of them and tie them after loading, clone one, or use format="torch"',
        )


def _packed(columns: Columns, tensors: list[torch.Tensor]) -> set[int]:
    """Return the tensors that are not row-major, or whose values are not what lies in memory."""
    packed = {index for index, _ in columns.flags}
    if not columns.contiguous:
        with unobserved():
            packed |= {i for i, tensor in enumerate(tensors) if not tensor.is_contiguous()}
    return packed


def _assemble(
    built: plan.Plan, columns: Columns, packed: list[int], tensors: list[torch.Tensor]
) -> Capture:
    sources: dict[int, Source] = {i: RelayoutSource(tensors[i]) for i in packed if built.nbytes[i]}
    for index, _ in columns.elsewhere:
        if index not in sources and built.nbytes[index]:
            tensor = tensors[index]
            storage, begin = tensor.untyped_storage(), storage_begin(tensor)
            sources[index] = DeviceSource(storage, begin, built.nbytes[index])
    addresses = columns.addresses
    if sources:
        addresses = [0 if index in sources else at for index, at in enumerate(addresses)]
    return Capture(
        plan=built.data,
        plan_digest=built.digest,
        skeleton=b"",
        addresses=addresses,
        nbytes=built.nbytes,
        sources=sources,
        names=built.names,
        keepalive=tensors,
        bytes_total=sum(built.nbytes),
    )
