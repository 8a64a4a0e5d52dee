"""A structure that was seen before is recognised, and nothing else is taken for it."""

from __future__ import annotations

import argparse
import copy
import ctypes
import io
import struct
import zipfile
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases.oracle import differences, sharing
from tests.cases.reference import write_by_formats

from shardwright.capture import capture, plan, structure, torch_format
from shardwright.capture.cache import StructureCache
from shardwright.errors import UnsupportedObjectError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def fresh_cache() -> None:
    torch_format.forget_structures()


@pytest.fixture
def pickles(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The objects that were pickled."""
    seen: list[object] = []
    real = torch_format._pickle

    def counted(obj: object, plain: Any) -> Any:
        seen.append(obj)
        return real(obj, plain)

    monkeypatch.setattr(torch_format, "_pickle", counted)
    return seen


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The plans that were built."""
    built: list[object] = []
    real = plan.build

    def counted(*args: Any, **kwargs: Any) -> Any:
        built.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(plan, "build", counted)
    return built


def state() -> dict[str, Any]:
    model = OrderedDict((f"layer.{i}", torch.full((3, 2), float(i))) for i in range(5))
    model._metadata = OrderedDict(version=1)  # type: ignore[attr-defined]
    buffer = torch.arange(20.0)
    return {
        "model": model,
        "optim": {"state": {0: {"step": torch.tensor(1.0), "avg": torch.ones(4)}}, "lr": 0.1},
        "views": [buffer[:8], buffer[4:12], buffer[15:]],
        "p": torch.nn.Parameter(torch.ones(2)),
        "c": torch.ones(2, dtype=torch.complex64),
        "twice": [1, (True, None)],
        "step": 1,
    }


def test_the_second_capture_neither_pickles_nor_plans(
    pickles: list[object], plans: list[object]
) -> None:
    first = capture(state(), "torch")
    again = state()
    second = capture(again, "torch")
    assert (len(pickles), len(plans)) == (1, 1)
    assert second.skeleton == first.skeleton
    assert second.plan_digest == first.plan_digest
    assert second.addresses[0] == again["model"]["layer.0"].data_ptr()


def test_changed_leaves_are_pickled_and_the_plan_stays(
    pickles: list[object], plans: list[object]
) -> None:
    capture(state(), "torch")
    for step in (2, 300, 2**40):
        changed = state() | {"step": step}
        found = capture(changed, "torch")
        capture(changed, "torch")
        assert differences(changed, loaded(found), exact=False) == []
    assert (len(pickles), len(plans)) == (4, 1)


def test_objects_that_only_pickle_understands_are_pickled_every_time(
    pickles: list[object], plans: list[object]
) -> None:
    args = argparse.Namespace(step=1)
    obj = state() | {"args": args}
    first = capture(obj, "torch")
    args.step = 2
    second = capture(obj, "torch")
    assert (len(pickles), len(plans)) == (2, 1)
    assert first.skeleton != second.skeleton


def loaded(found: Any) -> Any:
    """Load a capture's skeleton with zeros for data."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", found.skeleton)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        for record, nbytes in enumerate(found.nbytes):
            address = found.addresses[record]
            data = ctypes.string_at(address, nbytes) if address and nbytes else bytes(nbytes)
            archive.writestr(f"archive/data/{record}", data)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def retie(obj: dict[str, Any]) -> None:
    obj["model"]["layer.1"] = obj["model"]["layer.0"]


def share_storage(obj: dict[str, Any]) -> None:
    obj["model"]["layer.1"] = obj["model"]["layer.0"].view(3, 2)


def overlap_differently(obj: dict[str, Any]) -> None:
    buffer = torch.arange(20.0)
    obj["views"] = [buffer[:8], buffer[6:14], buffer[15:]]


def untie_views(obj: dict[str, Any]) -> None:
    obj["views"] = [tensor.clone() for tensor in obj["views"]]


def resize_in_place(obj: dict[str, Any]) -> None:
    obj["model"]["layer.2"].resize_(2, 2)


def reorder(obj: dict[str, Any]) -> None:
    obj["model"]["layer.0"] = obj["model"].pop("layer.0")


def plain_dict(obj: dict[str, Any]) -> None:
    obj["model"] = dict(obj["model"])


def share_a_container(obj: dict[str, Any]) -> None:
    obj["twice"] = [obj["optim"], obj["optim"]]


def set_metadata(obj: dict[str, Any]) -> None:
    obj["model"]._metadata = OrderedDict(version=2)


def drop_metadata(obj: dict[str, Any]) -> None:
    del obj["model"]._metadata


def set_tensor_attribute(obj: dict[str, Any]) -> None:
    obj["model"]["layer.3"].tag = "x"


def make_key(new: object, old: object = 0) -> Callable[[dict[str, Any]], None]:
    def change(obj: dict[str, Any]) -> None:
        obj["optim"]["state"][new] = obj["optim"]["state"].pop(old)

    return change


def put(place: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(obj: dict[str, Any]) -> None:
        obj[place] = value() if callable(value) else value

    return change


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "same tensor twice": retie,
    "same storage twice": share_storage,
    "another overlap": overlap_differently,
    "no overlap": untie_views,
    "shape changed in place": resize_in_place,
    "key order": reorder,
    "dict for OrderedDict": plain_dict,
    "shared container": share_a_container,
    "OrderedDict attribute changed": set_metadata,
    "OrderedDict attribute gone": drop_metadata,
    "attribute on a tensor": set_tensor_attribute,
    "key True for 0": make_key(True),
    "key False for 0": make_key(False),
    "key 0.0 for 0": make_key(0.0),
    "key '0' for 0": make_key("0"),
    "key -0.0 for 0": make_key(-0.0),
    "key (0,) for 0": make_key((0,)),
    "True for 1": put("step", True),
    "1.0 for 1": put("step", 1.0),
    "tuple for list": put("twice", (1, (True, None))),
    "inner 1 for True": put("twice", [1, (1, None)]),
    "tensor for number": put("step", torch.tensor(1)),
    "number for tensor": put("c", 1),
    "tensor for Parameter": put("p", torch.ones(2)),
    "frozen Parameter": put("p", torch.nn.Parameter(torch.ones(2), requires_grad=False)),
    "requires_grad": put("c", torch.ones(2, dtype=torch.complex64, requires_grad=True)),
    "conj bit": put("c", torch.ones(2, dtype=torch.complex64).conj()),
    "dtype": put("c", torch.ones(2, dtype=torch.complex128)),
    "dtype of equal size": put("c", torch.ones(2, dtype=torch.float64)),
    "shape": put("c", torch.ones(1, 2, dtype=torch.complex64)),
    "strides": put("c", torch.ones(2, 2, dtype=torch.complex64)[:, 0]),
    "sparse": put("c", lambda: torch.eye(2).to_sparse()),
    "quantised": put("c", lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)),
    "nested": put("c", lambda: torch.nested.nested_tensor([torch.ones(2)])),
    "zeros that nobody allocated": put(
        "c", torch._efficientzerotensor((2,), dtype=torch.complex64)
    ),
    "view into a larger storage": put("c", torch.ones(9, dtype=torch.complex64)[2:4]),
    "empty": put("c", torch.ones(0, dtype=torch.complex64)),
    "expanded": put("c", torch.ones(1, dtype=torch.complex64).expand(2)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, about the odd tensors made here
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_structure_is_not_taken_for_the_old_one(name: str, tmp_path: Path) -> None:
    capture(state(), "torch")
    changed = state()
    CHANGES[name](changed)
    path = tmp_path / "changed.pt"
    for _ in range(2):
        write_by_formats(changed, path, "torch")
        got = torch.load(path, weights_only=False)
        exact = name not in ("strides", "sparse", "nested", "zeros that nobody allocated")
        assert differences(changed, got, exact=exact) == []
        if exact and name != "quantised":
            assert sharing(got) == sharing(changed)
    write_by_formats(state(), path, "torch")
    assert differences(state(), torch.load(path, weights_only=False), exact=True) == []


LEAVES = st.one_of(
    st.sampled_from([0, 1, True, False, None, 0.0, -0.0, 1.0, float("nan"), "", "1", b"", b"1"]),
    st.integers(),
    st.floats(),
    st.sampled_from([torch.float32, torch.int8, torch.device("cpu"), torch.Size([1, 1])]),
    st.builds(lambda n: torch.arange(float(n)), st.integers(0, 3)),
    st.builds(lambda n: torch.arange(n, dtype=torch.int16), st.integers(0, 3)),
)
KEYS = st.one_of(st.sampled_from([0, 1, True, None, 0.0, -0.0, "", "0", (0,), (True,), (0.0,)]))
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.tuples(inner, inner),
        inner.map(lambda value: [value, value]),
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(st.lists(OBJECTS, min_size=2, max_size=6))
def test_what_was_captured_before_never_shows_in_a_capture(objects: list[Any]) -> None:
    torch_format.forget_structures()
    for obj in [*objects, *objects]:
        found = capture(obj, "torch")
        got = loaded(found)
        assert differences(obj, got, exact=True) == []
        assert sharing(got) == sharing(obj)


def test_structures_tell_values_apart_that_python_calls_equal() -> None:
    values: list[Any] = [1, True, 1.0, 0, False, 0.0, -0.0, None, "1", b"1", (1,), [1], (True,)]
    seen = []
    for value in values:
        read = structure.read({"value": value})
        assert read is not None
        seen.append((read.shape, read.leaves))
    assert all(first != second for i, first in enumerate(seen) for second in seen[:i])


def test_a_freed_storage_is_refused_in_a_known_structure() -> None:
    obj = {"w": torch.ones(8)}
    capture(obj, "torch")
    obj["w"].untyped_storage().resize_(0)
    with pytest.raises(UnsupportedObjectError, match="'w'"):
        capture(obj, "torch")


def test_a_known_structure_on_meta_is_refused() -> None:
    capture({"w": torch.ones(8)}, "torch")
    with pytest.raises(UnsupportedObjectError, match="'w'"):
        capture({"w": torch.ones(8, device="meta")}, "torch")


def test_a_lambda_in_a_known_structure_is_refused_by_name() -> None:
    capture({"w": torch.ones(8), "x": {"f": len}}, "torch")
    with pytest.raises(UnsupportedObjectError, match=r"x\.f"):
        capture({"w": torch.ones(8), "x": {"f": lambda: None}}, "torch")


def test_cycles_are_structures_too(pickles: list[object]) -> None:
    for _ in range(2):
        cyclic: dict[str, Any] = {"w": torch.ones(1)}
        cyclic["self"] = [cyclic]
        capture(cyclic, "torch")
    assert len(pickles) == 1


def test_the_cache_keeps_the_most_recent_structures_and_no_more() -> None:
    cache: StructureCache[int] = StructureCache(entries_max=3)
    for key in range(5):
        cache.keep([key], key)
        assert cache.find([key]) == key
    assert [cache.find([key]) for key in range(5)] == [None, None, 2, 3, 4]
    cache.find([2])
    cache.keep([9], 9)
    assert [cache.find([key]) for key in (2, 3, 4, 9)] == [2, None, 4, 9]


def test_a_copy_of_the_object_is_the_same_structure(pickles: list[object]) -> None:
    obj = state()
    capture(obj, "torch")
    capture(copy.deepcopy(obj), "torch")
    assert len(pickles) == 1


def test_floats_are_compared_by_their_bits() -> None:
    payload = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
    first = structure.read([float("nan")])
    second = structure.read([payload])
    again = structure.read([float("nan")])
    assert first is not None and second is not None and again is not None
    assert first.leaves != second.leaves
    assert first.leaves == again.leaves
