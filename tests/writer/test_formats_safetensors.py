"""Safetensors files and indexes against stock readers, and what the format refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright_writer.formats import UnsupportedError, get_format
from shardwright_writer.formats.base import Plan
from shardwright_writer.formats.safetensors import DTYPES, build_header, index_json, split

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardwright_writer.formats.base import SavePlan

    Write = Callable[..., SavePlan]
    TensorsPlan = Callable[..., tuple[Plan, list[bytes]]]

FORM = get_format("safetensors")

deserialize: Callable[[bytes], list[tuple[str, Any]]] = safetensors.deserialize


def plan_with(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "format": "safetensors",
        "names": ["w"],
        "dtypes": ["float32"],
        "shapes": [(2,)],
        "nbytes": np.array([8], np.int64),
        "metadata": {},
        "shard_bytes_max": 0,
    }
    return Plan(**(fields | changes))


def every_dtype() -> dict[str, torch.Tensor]:
    raw = torch.arange(64, dtype=torch.uint8).view(4, 16)
    tensors = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        tensors[f"t.{name}"] = raw % 2 == 0 if name == "bool" else raw.clone().view(dtype)
    return tensors


def test_the_dtype_table_is_that_of_the_stock_writer() -> None:
    for name, tensor in every_dtype().items():
        stock = safetensors.torch.save({"x": tensor})
        header = json.loads(stock[8 : 8 + int.from_bytes(stock[:8], "little")])["x"]
        dtype = name.removeprefix("t.")
        plan = plan_with(
            names=["x"],
            dtypes=[dtype],
            shapes=[tuple(tensor.shape)],
            nbytes=np.array([tensor.nbytes], np.int64),
        )
        ours = build_header(plan, [0], [0])
        assert json.loads(ours[8:])["x"] == header


def test_stock_readers_take_every_dtype_back(
    tmp_path: Path, reference_write: Write, tensors_plan: TensorsPlan
) -> None:
    tensors = every_dtype() | {"empty": torch.empty(0, 3), "scalar": torch.tensor(1.5)}
    plan, blobs = tensors_plan("safetensors", tensors, {"format": "pt", "ключ": "знач\n"})
    reference_write(tmp_path, plan, blobs, file_name="m.safetensors", window_bytes=4096)
    path = tmp_path / "m.safetensors"
    with safetensors.safe_open(path, "pt") as stock:
        assert stock.metadata() == {"format": "pt", "ключ": "знач\n"}
        assert set(stock.keys()) == set(tensors)
        for name, wanted in tensors.items():
            found = stock.get_tensor(name)
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            assert bytes(found.untyped_storage()) == bytes(wanted.untyped_storage())
    assert set(safetensors.torch.load_file(path)) == set(tensors)
    # The stock torch reader of bytes has no F8_E8M0 and no F4; safe_open has.
    without = {name: t for name, t in tensors.items() if "e8m0" not in name and "x2" not in name}
    plan, blobs = tensors_plan("safetensors", without)
    reference_write(tmp_path, plan, blobs, file_name="m.safetensors")
    loaded = safetensors.torch.load(path.read_bytes())
    assert {name: t.dtype for name, t in loaded.items()} == {n: t.dtype for n, t in without.items()}


def test_an_empty_save_is_a_file_that_stock_readers_open(
    tmp_path: Path, reference_write: Write
) -> None:
    empty = plan_with(names=[], dtypes=[], shapes=[], nbytes=np.zeros(0, np.int64))
    reference_write(tmp_path, empty, [], file_name="m.safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == safetensors.torch.save({})
    assert safetensors.torch.load_file(tmp_path / "m.safetensors") == {}


def test_tensors_are_aligned_to_their_elements() -> None:
    names = ["a", "b", "c", "d"]
    plan = plan_with(
        names=names,
        dtypes=["uint8", "bfloat16", "float64", "float32"],
        shapes=[(3,), (5,), (2,), (1,)],
        nbytes=np.array([3, 10, 16, 4], np.int64),
    )
    layout = FORM.layout(plan)
    for offset, width in zip(layout.offset_of_shard.tolist(), (1, 2, 8, 4), strict=True):
        assert offset % width == 0
    assert np.argsort(layout.offset_of_shard).tolist() == [2, 3, 1, 0]


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)


@given(
    st.lists(st.tuples(NAMES, st.sampled_from(sorted(DTYPES)), st.integers(0, 9)), max_size=30),
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), NAMES),
    st.integers(0, 80),
)
@settings(max_examples=100, deadline=None)
def test_any_names_any_split_are_covered_and_read_back(
    rows: list[tuple[str, str, int]], metadata: dict[str, str], bytes_max: int
) -> None:
    rows = list({name: (name, dtype, length) for name, dtype, length in rows}.values())
    sizes = [length * max(DTYPES[dtype][1] // 8, 1) for _, dtype, length in rows]
    plan = Plan(
        "safetensors",
        [name for name, _, _ in rows],
        [dtype for _, dtype, _ in rows],
        [(length,) for _, _, length in rows],
        np.array(sizes, np.int64),
        metadata,
        bytes_max,
    )
    FORM.check(plan)
    layout = FORM.layout(plan)
    save = FORM.files(plan, layout, b"", "model.safetensors", "")
    seen: set[int] = set()
    for index, file in enumerate(save.files):
        seen |= set(file.shards.tolist())
        end = len(file.literal_blob)
        assert end % 8 == 0
        columns = (file.shards, file.shard_offset, file.shard_nbytes)
        for row, offset, nbytes in zip(*(c.tolist() for c in columns), strict=True):
            assert (layout.file_of_shard[row], layout.offset_of_shard[row]) == (index, offset)
            assert offset == end
            end += nbytes
        assert file.size == end
        raw = file.literal_blob + bytes(file.size - len(file.literal_blob))
        held = dict(deserialize(raw))
        assert set(held) == {plan.names[row] for row in file.shards.tolist()}
    assert seen == set(range(len(rows)))


def hub_split(sizes: list[int], limit: int) -> list[list[int]]:
    """huggingface_hub's split_state_dict_into_shards_factory, with rows for tensors."""
    shard_list: list[list[int]] = []
    current: list[int] = []
    current_size = 0
    for key, size in enumerate(sizes):
        if size > limit:
            shard_list.append([key])
            continue
        if current_size + size > limit:
            shard_list.append(current)
            current, current_size = [], 0
        current.append(key)
        current_size += size
    if len(current) > 0:
        shard_list.append(current)
    return shard_list


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(1, 60))
def test_files_are_split_as_huggingface_hub_splits_them(sizes: list[int], limit: int) -> None:
    assert split(sizes, limit) == hub_split(sizes, limit)


def test_the_documented_example_of_the_hub_splits_as_documented() -> None:
    assert split([6, 6, 2, 6, 2, 2], 10) == [[0], [1, 2], [3, 4, 5]]
    assert split([4, 11, 4], 10) == [[1], [0, 2]]
    assert split([4, 11, 4], 0) == [[0, 1, 2]]


def test_a_sharded_save_has_hub_names_and_an_index_that_leads_to_every_tensor(
    tmp_path: Path, reference_write: Write, tensors_plan: TensorsPlan
) -> None:
    tensors = {f"layer.{i}.é": torch.arange(50 + i, dtype=torch.int32) for i in range(9)}
    plan, blobs = tensors_plan("safetensors", tensors, {"format": "pt"}, shard_bytes_max=700)
    save = reference_write(tmp_path, plan, blobs, file_name="model.safetensors")
    count = len(save.files)
    assert count == 3
    names = [f"model-{part:05d}-of-{count:05d}.safetensors" for part in range(1, count + 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *names,
        "model.safetensors.index.json",
    ]
    text = (tmp_path / "model.safetensors.index.json").read_text()
    index = json.loads(text)
    assert text == json.dumps(index, indent=2)
    assert index["metadata"] == {"total_size": sum(map(len, blobs))}
    assert list(index["weight_map"]) == list(tensors)
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / file, "pt") as stock:
            assert stock.metadata() == {"format": "pt"}
            assert torch.equal(stock.get_tensor(name), tensors[name])


def test_the_index_of_nothing_is_still_json() -> None:
    assert json.loads(index_json(0, {})) == {"metadata": {"total_size": 0}, "weight_map": {}}


def test_shard_names_carry_the_tag_when_there_is_one() -> None:
    assert FORM.shard_names("model.safetensors", 1, "") == ["model.safetensors"]
    assert FORM.shard_names("model.safetensors", 2, "0123abcd") == [
        "model-0123abcd-00001-of-00002.safetensors",
        "model-0123abcd-00002-of-00002.safetensors",
    ]
    assert FORM.shard_names("weights", 2, "")[0] == "weights-00001-of-00002"


def test_superseded_names_are_the_old_roots_our_tagged_shards_and_recorded_ones() -> None:
    names = [
        "model.safetensors",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model-0123abcd-00001-of-00001.safetensors",
        "model-fedcba98-00001-of-00002.safetensors",
        "model-00001-of-00009.safetensors",
        "model-00001-of-00002.safetensors.bak",
        "modelx-00001-of-00002.safetensors",
        "optimizer.pt",
    ]
    kept = ["model-fedcba98-00001-of-00002.safetensors", "model.safetensors.index.json"]
    recorded = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "optimizer.pt",
        "../model-00001-of-00002.safetensors",
    ]
    assert FORM.superseded(names, "model.safetensors", kept, recorded) == [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model-0123abcd-00001-of-00001.safetensors",
    ]
    assert FORM.superseded(names, "optimizer.safetensors", [], recorded) == []
    assert get_format("torch").superseded(names, "optimizer.pt", ["optimizer.pt"]) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"names": ["__metadata__"]}, "__metadata__"),
        ({"names": ["w\ud800"]}, r"w\\ud800.*UTF-8"),
        ({"metadata": {"k": "\ud800"}}, "metadata 'k'.*UTF-8"),
        ({"dtypes": ["complex128"], "shapes": [()]}, "'w'.*complex128"),
        ({"dtypes": ["float4_e2m1fn_x2"], "shapes": [()]}, "'w'.*without dimensions"),
        ({"shapes": [(3,)]}, r"'w'.*8 bytes are not float32 of shape \[3\]"),
        (
            {
                "names": ["a", "w", "w"],
                "dtypes": ["int8"] * 3,
                "shapes": [(1,)] * 3,
                "nbytes": np.ones(3, np.int64),
            },
            "'w'.*2 tensors",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        FORM.check(plan_with(**changes))


def many(count: int, name_bytes: int, bytes_max: int = 0) -> Plan:
    return plan_with(
        names=[f"{index:0{name_bytes}d}" for index in range(count)],
        dtypes=["int8"] * count,
        shapes=[(1,)] * count,
        nbytes=np.ones(count, np.int64),
        shard_bytes_max=bytes_max,
    )


def test_a_header_over_the_readers_limit_is_refused_with_both_sizes() -> None:
    with pytest.raises(UnsupportedError, match=r"1\d{8} bytes.*more than 100000000.*max_shard"):
        FORM.check(many(2000, 50_000))
    FORM.check(many(2000, 50_000, bytes_max=1000))  # two headers of half the size


def test_more_files_than_the_naming_counts_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="max_shard_size=1 makes 100000 files"):
        FORM.check(many(100_000, 6, bytes_max=1))


def test_python_objects_are_refused() -> None:
    plan = plan_with()
    with pytest.raises(UnsupportedError, match="no place for 3 bytes"):
        FORM.files(plan, FORM.layout(plan), b"pkl", "m.safetensors", "")


def test_an_unknown_format_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnsupportedError, match=r"'onnx'.*safetensors, torch"):
        get_format("onnx")
