"""The `safetensors` format: one file, or shards with an index in the Hugging Face naming.

A file is 8 bytes of header length, a JSON header padded with spaces to 8 bytes, and the tensors
without gaps, wider dtypes first so that every one is aligned. Headers depend on the plan alone
and are kept with the layout. Called through `formats`; `verify` uses DTYPES. Reads no file and
writes no CRC into one: the container has no place for it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from json.encoder import encode_basestring, encode_basestring_ascii
from math import prod
from typing import TYPE_CHECKING, Final, NoReturn

import numpy as np

from shardwright_writer.formats.base import FilePlan, SavePlan, ShardLayout, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shardwright_writer.formats.base import Int64s, Plan

HEADER_BYTES_MAX: Final = 100_000_000
"""Stock readers refuse a longer header."""

FILES_MAX: Final = 99_999
"""What the five digits of `model-00001-of-99999` can count."""

METADATA_KEY: Final = "__metadata__"
INDEX_SUFFIX: Final = ".index.json"

# torch name: (code, bits of one element of the stored shape)
DTYPES: Final[dict[str, tuple[str, int]]] = {
    "bool": ("BOOL", 8),
    "uint8": ("U8", 8),
    "int8": ("I8", 8),
    "uint16": ("U16", 16),
    "int16": ("I16", 16),
    "uint32": ("U32", 32),
    "int32": ("I32", 32),
    "uint64": ("U64", 64),
    "int64": ("I64", 64),
    "float16": ("F16", 16),
    "bfloat16": ("BF16", 16),
    "float32": ("F32", 32),
    "float64": ("F64", 64),
    "complex64": ("C64", 64),
    "float8_e4m3fn": ("F8_E4M3", 8),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 8),
    "float8_e5m2": ("F8_E5M2", 8),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 8),
    "float8_e8m0fnu": ("F8_E8M0", 8),
    # torch counts packed pairs, the file counts elements: its last dimension is twice as long
    "float4_e2m1fn_x2": ("F4", 4),
}


class Safetensors:
    """See the module's docstring."""

    name = "safetensors"

    def check(self, plan: Plan) -> None:
        """Refuse names, dtypes and headers that stock readers could not take back."""
        _check_names(plan)
        _check_tensors(plan)
        _check_metadata(plan.metadata)
        _check_file_count(plan)
        texts = (*plan.names, *plan.metadata, *plan.metadata.values())
        if 6 * sum(map(len, texts)) + 256 * len(texts) > HEADER_BYTES_MAX // 2:
            self.layout(plan)  # near the limit: only building the headers tells

    def layout(self, plan: Plan) -> ShardLayout:
        """Split as huggingface_hub does, then order each file by element size."""
        groups = split(plan.nbytes.tolist(), plan.shard_bytes_max)
        widths = np.array([_stored(dtype)[1] for dtype in plan.dtypes], np.int64)
        file_of_shard = np.zeros(len(plan.names), np.int64)
        offset_of_shard = np.zeros(len(plan.names), np.int64)
        files: list[tuple[Int64s, bytes]] = []
        for index, group in enumerate(groups):
            rows = np.array(group, np.int64)
            rows = rows[np.argsort(-widths[rows], kind="stable")]
            begins = np.cumsum(plan.nbytes[rows]) - plan.nbytes[rows]
            header = build_header(plan, rows.tolist(), begins.tolist())
            file_of_shard[rows] = index
            offset_of_shard[rows] = begins + len(header)
            files.append((rows, header))
        return ShardLayout(len(files), file_of_shard, offset_of_shard, files)

    def files(
        self, plan: Plan, layout: ShardLayout, skeleton: bytes, file_name: str, shard_tag: str
    ) -> SavePlan:
        """Return the files and, when there are several, the index that makes them one."""
        if skeleton:
            raise UnsupportedError(
                f"a safetensors file has no place for {len(skeleton)} bytes of Python objects;"
                ' save them with format="torch"'
            )
        layout_files: list[tuple[Int64s, bytes]] = layout.private
        names = self.shard_names(file_name, layout.file_count, shard_tag)
        files = [
            _file_plan(name, plan, layout, rows, header)
            for name, (rows, header) in zip(names, layout_files, strict=True)
        ]
        if len(files) == 1:
            return SavePlan(files, None)
        weight_map = {
            plan.names[row]: name
            for name, (rows, _) in zip(names, layout_files, strict=True)
            for row in np.sort(rows).tolist()
        }
        index = index_json(int(plan.nbytes.sum()), weight_map)
        return SavePlan(files, (file_name + INDEX_SUFFIX, index))

    def shard_names(self, file_name: str, count: int, tag: str) -> list[str]:
        """Return `model-00001-of-00003.safetensors` and so on; one file keeps its name."""
        if count == 1:
            return [file_name]
        stem, suffix = _split_name(file_name)
        stem += f"-{tag}" if tag else ""
        return [f"{stem}-{part:05d}-of-{count:05d}{suffix}" for part in range(1, count + 1)]

    def superseded(
        self,
        names: Sequence[str],
        file_name: str,
        kept: Collection[str],
        recorded: Collection[str] = (),
    ) -> list[str]:
        """Return the older save's root of the other kind and its shards.

        Tagged shard names are only ever ours; a plain one goes only when a replaced index or
        manifest named it, since another program may own it.
        """
        stem, suffix = _split_name(file_name)
        shard = re.compile(
            re.escape(stem) + r"(?P<tag>-[0-9a-f]{8})?-\d{5}-of-\d{5}" + re.escape(suffix), re.ASCII
        )
        kept, recorded = set(kept), set(recorded)
        roots = {file_name, file_name + INDEX_SUFFIX}

        def is_old(name: str) -> bool:
            found = shard.fullmatch(name)
            return name in roots or (
                found is not None and (found["tag"] is not None or name in recorded)
            )

        return [name for name in names if name not in kept and is_old(name)]


def split(sizes: Sequence[int], bytes_max: int) -> list[list[int]]:
    """Group rows into files exactly as huggingface_hub does (greedy, in order).

    One that is larger than the maximum gets a file of its own, ahead of the file being filled.
    """
    if bytes_max <= 0:
        return [list(range(len(sizes)))]
    groups: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for row, size in enumerate(sizes):
        if size > bytes_max:
            groups.append([row])
            continue
        if filled + size > bytes_max:
            groups.append(current)
            current, filled = [], 0
        current.append(row)
        filled += size
    if current or not groups:
        groups.append(current)
    return groups


def build_header(plan: Plan, rows: list[int], begins: list[int]) -> bytes:
    """Return length and header. Raises UnsupportedError when stock readers would refuse it."""
    entries = [*_metadata_entry(plan.metadata), *header_entries(plan, rows, begins)]
    header = ("{" + ",".join(entries) + "}").encode()
    padded = -(-len(header) // 8) * 8
    if padded > HEADER_BYTES_MAX:
        longest = max((plan.names[row] for row in rows), key=len, default="")
        raise UnsupportedError(
            f"the header would take {padded} bytes and safetensors readers refuse more than"
            f" {HEADER_BYTES_MAX}; use max_shard_size, shorter names (the longest begins"
            f' {longest[:60]!r}), less metadata, or format="torch"'
        )
    return padded.to_bytes(8, "little") + header.ljust(padded)


def header_entries(plan: Plan, rows: list[int], begins: list[int]) -> list[str]:
    """Return the tensors' entries in the header, in order."""
    shape_text: dict[tuple[tuple[int, ...], str], str] = {}
    entries: list[str] = []
    sizes = plan.nbytes[rows].tolist()
    for row, begin, size in zip(rows, begins, sizes, strict=True):
        shape, dtype = plan.shapes[row], plan.dtypes[row]
        fixed = shape_text.get((shape, dtype))
        if fixed is None:
            dims = ",".join(map(str, stored_shape(shape, dtype)))
            fixed = f'"dtype":"{_stored(dtype)[0]}","shape":[{dims}]'
            shape_text[shape, dtype] = fixed
        name = encode_basestring(plan.names[row])
        entries.append(f'{name}:{{{fixed},"data_offsets":[{begin},{begin + size}]}}')
    return entries


def index_json(total_size: int, weight_map: dict[str, str]) -> bytes:
    """Return the index, byte for byte as `json.dumps(index, indent=2)` of huggingface_hub."""
    encode = encode_basestring_ascii
    lines = ",\n".join(f"    {encode(name)}: {encode(file)}" for name, file in weight_map.items())
    return (
        f'{{\n  "metadata": {{\n    "total_size": {total_size}\n  }},\n'
        f'  "weight_map": {{\n{lines}\n  }}\n}}'
    ).encode()


def stored_shape(shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
    """Return the shape as the header has it."""
    return (*shape[:-1], shape[-1] * 2) if _stored(dtype)[1] < 8 else shape


def _metadata_entry(metadata: dict[str, str]) -> list[str]:
    if not metadata:
        return []
    # Sorted, because the wire's map has no order and equal plans must have equal bytes.
    ordered = dict(sorted(metadata.items()))
    text = json.dumps(ordered, ensure_ascii=False, separators=(",", ":"))
    return [f'"{METADATA_KEY}":{text}']


def _file_plan(name: str, plan: Plan, layout: ShardLayout, rows: Int64s, header: bytes) -> FilePlan:
    none = np.zeros(0, np.int64)
    return FilePlan(
        name=name,
        size=len(header) + int(plan.nbytes[rows].sum()),
        shards=rows,
        shard_offset=layout.offset_of_shard[rows],
        shard_nbytes=plan.nbytes[rows],
        literal_blob=header,
        literal_offset=np.zeros(1, np.int64),
        literal_start=np.array([0, len(header)], np.int64),
        hole_offset=none,
        hole_shard=none,
    )


def _stored(dtype: str) -> tuple[str, int]:
    try:
        return DTYPES[dtype]
    except KeyError:
        raise UnsupportedError(f"safetensors has no code for dtype {dtype}") from None


def _split_name(file_name: str) -> tuple[str, str]:
    stem, dot, suffix = file_name.rpartition(".")
    return (stem, dot + suffix) if stem else (file_name, "")


def _check_names(plan: Plan) -> None:
    try:
        "".join(plan.names).encode()
    except UnicodeEncodeError:
        for name in plan.names:
            _check_text(name, f"tensor {name!r}: its name")
    if METADATA_KEY in plan.names:
        _refuse(METADATA_KEY, "safetensors keeps this name for itself; rename the tensor")
    if len(set(plan.names)) < len(plan.names):
        name, count = Counter(plan.names).most_common(1)[0]
        _refuse(name, f'{count} tensors have this name; rename them, or use format="torch"')


def _check_tensors(plan: Plan) -> None:
    unknown = set(plan.dtypes) - DTYPES.keys()
    for name, dtype in zip(plan.names, plan.dtypes, strict=True) if unknown else ():
        if dtype in unknown:
            _refuse(name, f'safetensors has no code for dtype {dtype}; use format="torch"')
    columns = zip(plan.names, plan.dtypes, plan.shapes, plan.nbytes.tolist(), strict=True)
    for name, dtype, shape, nbytes in columns:
        bits = DTYPES[dtype][1]
        if bits < 8 and not shape:
            _refuse(name, f"a {dtype} without dimensions cannot be stored; give it one")
        if prod(shape) * max(bits, 8) != nbytes * 8:
            _refuse(
                name,
                f"{nbytes} bytes are not {dtype} of shape {list(shape)}: the client's plan is"
                " wrong, please report it",
            )


def _check_file_count(plan: Plan) -> None:
    count = len(split(plan.nbytes.tolist(), plan.shard_bytes_max))
    if count > FILES_MAX:
        raise UnsupportedError(
            f"max_shard_size={plan.shard_bytes_max} makes {count} files and their naming"
            f" counts to {FILES_MAX}; choose a larger max_shard_size"
        )


def _check_metadata(metadata: dict[str, str]) -> None:
    for key, value in metadata.items():
        _check_text(key, f"metadata key {key!r}")
        _check_text(value, f"metadata {key!r}")


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError(
            f"{what} is not valid UTF-8 ({error.reason}); safetensors needs that: rename it"
        ) from None


def _refuse(name: str, why: str) -> NoReturn:
    raise UnsupportedError(f"tensor {name!r}: {why}")
