"""The safetensors capture itself: sizes, metadata, packing and reuse. Values: tests/cases."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import safetensors
import safetensors.torch
import torch
from tests.cases.reference import write_by_formats

from shardwright.capture import capture, plan, safetensors_dict
from shardwright.capture.safetensors_dict import shard_bytes
from shardwright.errors import UnsupportedObjectError
from shardwright_proto.v1 import writer_pb2

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def fresh_cache() -> None:
    safetensors_dict.forget_structures()


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (None, 0),
        (12345, 12345),
        ("12345", 12345),
        ("5GB", 5 * 10**9),
        ("5gb", 5 * 10**9),
        (" 500 MB ", 500 * 10**6),
        ("1.5GB", 1_500_000_000),
        ("2GiB", 2 << 30),
        ("10KB", 10_000),
        ("1TIB", 1 << 40),
    ],
)
def test_shard_sizes_read_as_on_the_hub(given: Any, want: int) -> None:
    assert shard_bytes(given) == want


@pytest.mark.parametrize("given", ["", "GB", "-5GB", "5XB", "5 G B", 0, -1, True, 1.5e9, "1e9", []])
def test_what_is_no_size_is_refused(given: Any) -> None:
    with pytest.raises(UnsupportedObjectError, match="is no size"):
        shard_bytes(given)


def test_the_plan_carries_metadata_and_shard_size() -> None:
    found = capture(
        {"w": torch.ones(2)}, "safetensors", metadata={"format": "pt"}, max_shard_size="1MB"
    )
    plan = writer_pb2.SavePlan.FromString(found.plan)
    assert dict(plan.metadata) == {"format": "pt"}
    assert plan.shard_bytes_max == 10**6
    assert found.skeleton == b""


@pytest.mark.parametrize(
    "metadata", [{"a": 1}, {1: "a"}, {"a": "\ud800"}, {"\ud800": "a"}, {"a": None}]
)
def test_metadata_that_is_not_text_is_refused(metadata: Any) -> None:
    with pytest.raises(UnsupportedObjectError, match="metadata"):
        capture({"w": torch.ones(2)}, "safetensors", metadata=metadata)


def test_metadata_order_does_not_change_the_plan() -> None:
    first = capture({}, "safetensors", metadata={"a": "1", "b": "2"})
    safetensors_dict.forget_structures()
    second = capture({}, "safetensors", metadata={"b": "2", "a": "1"})
    assert first.plan_digest == second.plan_digest


def test_contiguous_tensors_travel_by_address_and_others_are_packed() -> None:
    obj = {
        "plain": torch.arange(6.0),
        "t": torch.arange(6.0).view(2, 3).t(),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 3).t(),
        "expanded": torch.ones(1).expand(5),
    }
    found = capture(obj, "safetensors")
    assert set(found.sources) == {1, 2, 4}
    assert found.addresses[0] == obj["plain"].data_ptr()
    assert found.nbytes == [24, 24, 16, 0, 20]


def test_the_second_capture_reuses_the_plan_and_sees_new_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = capture({"w": torch.ones(2), "t": torch.ones(2, 3).t()}, "safetensors")
    monkeypatch.setattr(plan, "build", None)
    again = {"w": torch.ones(2), "t": torch.ones(2, 3).t()}
    second = capture(again, "safetensors")
    assert second.plan is first.plan
    assert second.addresses == [again["w"].data_ptr(), 0]
    assert set(second.sources) == {1}


def test_other_metadata_is_another_plan() -> None:
    obj = {"w": torch.ones(2)}
    digests = {
        capture(obj, "safetensors", metadata=metadata, max_shard_size=size).plan_digest
        for metadata, size in ((None, None), ({"a": "b"}, None), (None, 100))
    }
    assert len(digests) == 3


def test_tensors_that_begin_to_share_memory_are_refused_in_a_known_structure() -> None:
    capture({"a": torch.ones(4), "b": torch.ones(4)}, "safetensors")
    shared = torch.ones(4)
    with pytest.raises(UnsupportedObjectError, match="'a' and 'b' share memory") as caught:
        capture({"a": shared, "b": shared}, "safetensors")
    assert caught.value.names == ("a", "b")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (5, "int"),
        ([torch.ones(1)], "list"),
        ({"b": torch.ones(1)}, "Flatten"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter"),
    ],
)
def test_what_is_no_dense_tensor_is_refused_by_name(value: object, words: str) -> None:
    with pytest.raises(UnsupportedObjectError, match=r"'layers\.0'.*" + words):
        capture({"ok": torch.ones(1), "layers.0": value}, "safetensors")


def test_sharded_files_follow_the_hubs_names_and_are_read_by_stock(tmp_path: Path) -> None:
    obj = {f"w{i}": torch.full((1000,), float(i)) for i in range(10)}
    write_by_formats(obj, tmp_path / "model.safetensors", "safetensors", max_shard_size=10_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    merged = {}
    for name in set(index["weight_map"].values()):
        merged.update(safetensors.torch.load_file(tmp_path / name))
    assert len(set(index["weight_map"].values())) == 5
    assert merged.keys() == obj.keys()
    assert all(torch.equal(merged[key], obj[key]) for key in obj)


def test_metadata_is_read_back_by_stock(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    metadata = {"format": "pt", "note": "caf\u00e9"}
    write_by_formats({"w": torch.ones(1)}, path, "safetensors", metadata=metadata)
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == metadata
