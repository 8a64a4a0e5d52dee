"""A reference writer for format tests: the engine's windows in twenty lines, without the engine."""

from __future__ import annotations

import io
import itertools
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from shardwright_writer import manifest
from shardwright_writer.crc import fold_crcs, piece_crcs
from shardwright_writer.formats import get_format
from shardwright_writer.formats.base import Plan
from shardwright_writer.formats.image import FileImage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from shardwright_writer.formats.base import FilePlan, SavePlan

_inodes = itertools.count(1)


def assemble(
    file: FilePlan, blobs: Sequence[bytes], crcs: Any, window_bytes: int = 1 << 20
) -> bytes:
    """Write a file window by window, as the pipeline does; crcs are filled on the way."""
    image = FileImage(file)
    content = bytearray()
    with_shards = set(image.shard_windows(window_bytes).tolist())
    for window in range(image.window_count(window_bytes)):
        start = window * window_bytes
        buffer = memoryview(bytearray(b"\xee" * window_bytes))
        pieces = image.pieces(start, start + window_bytes)
        assert (len(pieces) > 0) == (window in with_shards)
        for row in range(len(pieces)):
            begin, nbytes = int(pieces.begin[row]), int(pieces.nbytes[row])
            at = int(pieces.first_in_shard[row])
            blob = blobs[int(pieces.shard[row])]
            buffer[begin : begin + nbytes] = blob[at : at + nbytes]
        fold_crcs(crcs, pieces, piece_crcs(buffer, pieces))
        image.fill(buffer, start, crcs)
        content += buffer
    assert not any(content[file.size :])
    return bytes(content[: file.size])


def write_save(
    folder: Path,
    plan: Plan,
    blobs: Sequence[bytes],
    *,
    skeleton: bytes = b"",
    file_name: str = "model.pt",
    tag: str = "",
    window_bytes: int = 1 << 20,
    with_manifest: bool = False,
) -> SavePlan:
    """Write all files of a save into folder."""
    kind = get_format(plan.format)
    kind.check(plan)
    layout = kind.layout(plan)
    save_plan = kind.files(plan, layout, skeleton, file_name, tag)
    crcs = np.zeros(len(blobs), np.uint32)
    inodes = []
    for file in save_plan.files:
        path = folder / file.name
        path.write_bytes(assemble(file, blobs, crcs, window_bytes))
        inodes.append(path.stat().st_ino)
    if save_plan.index is not None:
        path = folder / save_plan.index[0]
        path.write_bytes(save_plan.index[1])
        inodes.append(path.stat().st_ino)
    if with_manifest:
        entry = manifest.build_entry(
            save_id=f"{next(_inodes):032x}",
            step=1,
            world_size=1,
            plan=plan,
            layout=layout,
            save_plan=save_plan,
            inodes=inodes,
            shard_crcs=crcs,
            literal_crcs=[FileImage(file).literal_crc(crcs) for file in save_plan.files],
        )
        path = folder / f"{file_name}.shardwright.json"
        old = path.read_bytes() if path.exists() else None
        path.write_bytes(manifest.merge(entry, old))
    return save_plan


def plan_of(
    format_name: str,
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str] | None = None,
    shard_bytes_max: int = 0,
) -> tuple[Plan, list[bytes]]:
    """Return the plan of contiguous tensors, and their bytes."""
    blobs = [
        tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for tensor in tensors.values()
    ]
    plan = Plan(
        format=format_name,
        names=list(tensors),
        dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        shapes=[tuple(tensor.shape) for tensor in tensors.values()],
        nbytes=np.array([len(blob) for blob in blobs], np.int64),
        metadata=metadata or {},
        shard_bytes_max=shard_bytes_max,
    )
    return plan, blobs


def plan_of_object(value: object) -> tuple[Plan, list[bytes], bytes]:
    """Return plan, storages and skeleton as stock torch.save numbers and pickles them."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as stock:
        root = stock.namelist()[0].split("/")[0]
        count = sum(name.startswith(f"{root}/data/") for name in stock.namelist())
        blobs = [stock.read(f"{root}/data/{index}") for index in range(count)]
        skeleton = stock.read(f"{root}/data.pkl")
    plan = Plan(
        format="torch",
        names=[f"storage.{index}" for index in range(count)],
        dtypes=["uint8"] * count,
        shapes=[(len(blob),) for blob in blobs],
        nbytes=np.array([len(blob) for blob in blobs], np.int64),
        metadata={},
        shard_bytes_max=0,
    )
    return plan, blobs, skeleton


@pytest.fixture(scope="session")
def reference_write() -> Callable[..., SavePlan]:
    return write_save


@pytest.fixture(scope="session")
def reference_assemble() -> Callable[..., bytes]:
    return assemble


@pytest.fixture(scope="session")
def tensors_plan() -> Callable[..., tuple[Plan, list[bytes]]]:
    return plan_of


@pytest.fixture(scope="session")
def object_plan() -> Callable[[object], tuple[Plan, list[bytes], bytes]]:
    return plan_of_object
