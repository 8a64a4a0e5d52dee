"""The torch capture itself: what is where, what it keeps, how it refuses. Values: tests/cases."""

from __future__ import annotations

import gc
import io
import pickletools
import weakref
import zipfile
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from tests.cases.oracle import differences, sharing
from tests.cases.reference import write_by_formats
from torch.overrides import TorchFunctionMode

from shardwright.capture import capture
from shardwright.capture.torch_format import forget_structures
from shardwright.errors import UnsupportedObjectError
from shardwright_proto.v1 import writer_pb2

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def fresh_cache() -> None:
    forget_structures()


def plan_of(data: bytes) -> writer_pb2.SavePlan:
    return writer_pb2.SavePlan.FromString(data)


def opcodes(skeleton: bytes) -> list[tuple[str, Any]]:
    return [(code.name, argument) for code, argument, _ in pickletools.genops(skeleton)]


def stock_skeleton(obj: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    with zipfile.ZipFile(buffer) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return archive.read(name)


def test_host_tensors_travel_by_address_and_nothing_is_copied() -> None:
    obj = {"a": torch.arange(10.0), "b": torch.arange(6, dtype=torch.int16).view(2, 3)}
    found = capture(obj, "torch")
    assert found.addresses == [obj["a"].data_ptr(), obj["b"].data_ptr()]
    assert found.nbytes == [40, 12]
    assert found.bytes_total == 52
    assert found.sources == {}


def test_a_view_is_captured_at_its_own_bytes() -> None:
    base = torch.arange(1000.0)
    found = capture({"w": base[100:110]}, "torch")
    assert found.addresses == [base.data_ptr() + 400]
    assert found.nbytes == [40]


def test_overlapping_views_are_one_shard_from_the_first_to_the_last_byte() -> None:
    base = torch.arange(1000.0)
    found = capture(
        {"late": base[150:300], "early": base[100:200], "apart": base[500:510]}, "torch"
    )
    assert found.addresses == [base.data_ptr() + 400, base.data_ptr() + 2000]
    assert found.nbytes == [800, 40]
    assert found.names == ["late", "apart"]


def test_expanded_tensors_take_the_bytes_they_have() -> None:
    found = capture({"w": torch.tensor(3.0).expand(10**6)}, "torch")
    assert found.nbytes == [4]


def test_a_view_with_holes_is_packed_by_a_source() -> None:
    base = torch.arange(10**6)
    found = capture({"w": base[::1000]}, "torch")
    assert (found.addresses, found.nbytes) == ([0], [8000])
    assert found.sources[0].nbytes == 8000


def test_names_say_where_a_tensor_sits() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    obj = {
        "optimizer": {"state": {0: {"exp_avg": torch.ones(1)}}},
        "module": module,
        ("a", 1): [torch.ones(1)],
        "caf\u00e9\ud800": torch.ones(1),
    }
    assert capture(obj, "torch").names == [
        "optimizer.state.0.exp_avg",
        "module.0.weight",
        "module.0.bias",
        "('a', 1).0",
        "caf\u00e9\\ud800",
    ]


def test_the_plan_holds_the_structure_in_columns() -> None:
    obj = {
        "a": torch.ones(2, 3),
        "b": torch.ones(4, dtype=torch.float8_e4m3fn),
        "c": torch.ones(()),
    }
    found = capture(obj, "torch")
    plan = plan_of(found.plan)
    assert plan.format == "torch"
    assert list(plan.names) == ["a", "b", "c"]
    assert [plan.dtype_table[i] for i in plan.dtypes] == ["float32", "float8_e4m3fn", "float32"]
    assert list(plan.nbytes) == [24, 4, 4]
    assert (list(plan.ndims), list(plan.dims)) == ([2, 1, 0], [2, 3, 4])


def test_equal_structures_have_equal_plans_whatever_their_values() -> None:
    first = capture({"w": torch.ones(3), "step": 1}, "torch")
    forget_structures()
    second = capture({"w": torch.zeros(3), "step": 2}, "torch")
    assert first.plan == second.plan
    assert first.plan_digest == second.plan_digest
    assert first.skeleton != second.skeleton


@pytest.mark.parametrize(
    "obj",
    [
        {"w": torch.ones(2, 3), "step": 3},
        {"p": torch.nn.Parameter(torch.ones(2))},
        {"f8": torch.ones(4, dtype=torch.float8_e5m2)},
        {"c": torch.ones(3, dtype=torch.complex64).conj()},
        [torch.ones(1, requires_grad=True)],
    ],
    ids=["tensor", "parameter", "float8", "conj", "leaf"],
)
def test_the_pickle_calls_what_stock_torch_calls(obj: object) -> None:
    def calls(skeleton: bytes) -> list[object]:
        return [argument for name, argument in opcodes(skeleton) if name == "GLOBAL"]

    assert calls(capture(obj, "torch").skeleton) == calls(stock_skeleton(obj))


def test_the_pickle_stays_within_what_weights_only_understands() -> None:
    shared = torch.ones(3)
    obj = OrderedDict(
        (f"k{i}", [torch.ones(i % 5 + 1, 2), shared, i * 10**9, i / 7]) for i in range(400)
    )
    used = {name for name, _ in opcodes(capture(obj, "torch").skeleton)}
    assert not used & {"POP", "POP_MARK", "DUP", "LONG4", "STACK_GLOBAL", "MEMOIZE", "INST", "OBJ"}


def test_memo_slots_are_dense_enough_for_the_unpicklers_array() -> None:
    shared = torch.ones(3)
    skeleton = capture([shared] * 3 + ["x"] * 3, "torch").skeleton
    puts = [argument for name, argument in opcodes(skeleton) if name.endswith("BINPUT")]
    assert len(puts) == len(set(puts))
    assert max(puts) < 1100


def test_every_tensor_gets_hooks_of_its_own() -> None:
    obj = [torch.ones(1, requires_grad=True) for _ in range(3)]
    reduces = opcodes(capture(obj, "torch").skeleton)
    assert sum(name == "REDUCE" for name, _ in reduces) == 2 * len(obj)


def test_backward_hooks_are_warned_of_as_stock_torch_does() -> None:
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(lambda grad: grad)  # type: ignore[no-untyped-call]
    with pytest.warns(UserWarning, match="backward hook"):
        capture({"w": tensor}, "torch")


def test_a_capture_keeps_its_tensors_and_the_cache_keeps_none() -> None:
    obj: Any = {"w": torch.ones(1000), "n": [torch.ones(3)], "t": torch.ones(6)[::2]}
    watched = [weakref.ref(obj["w"]), weakref.ref(obj["n"][0]), weakref.ref(obj["t"])]
    found: Any = capture(obj, "torch")
    found = capture(obj, "torch")
    del obj
    gc.collect()
    assert all(ref() is not None for ref in watched)
    del found
    gc.collect()
    assert all(ref() is None for ref in watched)


def test_a_nonce_cannot_be_forged_by_the_objects_bytes() -> None:
    # Whatever looks like a placeholder belongs to an earlier run: the next one has another nonce.
    number = int.from_bytes(b"\x55" * 23 + b"\x01", "little")
    obj = {"n": [number, -number, b"\x8a\x18" + b"\x55" * 24 + b"Q"], "w": torch.ones(1)}
    assert len(capture(obj, "torch").nbytes) == 1


def test_what_does_not_pickle_is_named_down_to_its_key() -> None:
    obj = {"w": torch.ones(1), "sched": [{"lr": 1}, {"fn": lambda: None}]}
    with pytest.raises(UnsupportedObjectError, match=r"'sched\.1\.fn' \(function\)") as caught:
        capture(obj, "torch")
    assert caught.value.names == ("sched.1.fn",)
    assert "Nothing was written" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_errors_of_a_reduce_of_the_users_keep_their_cause() -> None:
    class Broken:
        def __reduce__(self) -> str:
            raise ZeroDivisionError("mine")

    with pytest.raises(UnsupportedObjectError, match=r"'deep\.broken'.*ZeroDivisionError: mine"):
        capture({"deep": {"broken": Broken()}}, "torch")


def test_running_out_of_memory_is_not_called_unsupported() -> None:
    class Huge:
        def __reduce__(self) -> str:
            raise MemoryError

    with pytest.raises(MemoryError):
        capture({"huge": Huge()}, "torch")


def test_naming_runs_no_code_of_the_users() -> None:
    class Proxy:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("unbound proxy")

        def __reduce__(self) -> Any:
            return (dict, ((("t", torch.ones(1)),),))

    assert capture({"proxy": Proxy()}, "torch").names == ["proxy"]


def test_tensors_that_exist_only_while_pickling_go_by_their_owners_name() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.sharded = True  # type: ignore[attr-defined]
    sparse = torch.eye(3).to_sparse()
    names = capture({"p": parameter, "adj": sparse}, "torch").names
    assert names == ["p", "adj", "adj"]


@pytest.mark.parametrize("argument", ["metadata", "max_shard_size"])
def test_arguments_of_the_other_format_are_refused(argument: str) -> None:
    given: Any = {argument: {"a": "b"} if argument == "metadata" else "5GB"}
    with pytest.raises(UnsupportedObjectError, match=argument):
        capture({}, "torch", **given)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UnsupportedObjectError, match="'onnx'"):
        capture({}, "onnx")


class CountingMode(TorchFunctionMode):
    """Counts what it is asked, as torch.set_default_device's mode is."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_no_torch_function_mode_is_asked_about_every_tensor(tmp_path: Path) -> None:
    obj: dict[str, Any] = {f"w{i}": torch.arange(float(i)) for i in range(100)}
    with CountingMode() as mode:
        capture(obj, "torch")
        capture(obj | {"step": 1}, "torch")
        capture(obj, "torch")
        capture(obj, "safetensors")
        capture(obj, "safetensors")
    assert mode.calls == 0


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    obj = {"t": torch.arange(6.0).view(2, 3).t(), "holes": torch.arange(9.0)[::3]}
    path = tmp_path / "w.pt"
    torch.set_default_device("meta")
    try:
        write_by_formats(obj, path, "torch")
    finally:
        torch.set_default_device(None)
    assert differences(obj, torch.load(path), exact=False) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_tensors_come_back_where_they_were(tmp_path: Path) -> None:
    base = torch.arange(4000.0, device="cuda")
    spectrum = torch.randn(50, dtype=torch.complex64, device="cuda")
    obj = {
        "w": base[10:90],
        "overlap": [base[100:200], base[150:300]],
        "t": torch.arange(600.0, device="cuda").view(20, 30).t(),
        "p": torch.nn.Parameter(torch.ones(3, device="cuda")),
        "conj": spectrum.conj(),
        "empty": torch.empty(0, device="cuda"),
        "storage": torch.arange(5, device="cuda")._typed_storage(),  # type: ignore[no-untyped-call]
        "host": torch.ones(2),
    }
    path = tmp_path / "device.pt"
    for _ in range(2):
        write_by_formats(obj, path, "torch")
        got = torch.load(path, weights_only=True)
        assert differences(obj, got, exact=True) == []
        assert got["t"].device == obj["t"].device
        assert sharing(got) == sharing(obj)
    write_by_formats({"holes": base[::7], "step": 1}, path, "torch")
    assert torch.equal(torch.load(path)["holes"], base[::7])
    flat = {"t": obj["t"], "conj": obj["conj"], "w": obj["w"], "holes": base[2000::7]}
    write_by_formats(flat, tmp_path / "flat.safetensors", "safetensors")
    got = safetensors.torch.load_file(tmp_path / "flat.safetensors")
    assert differences(flat, got, exact=False, ordered=False) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_capture_of_device_tensors_allocates_nothing_on_the_device(tmp_path: Path) -> None:
    obj = {"w": torch.ones(1 << 20, device="cuda"), "t": torch.ones(512, 1024, device="cuda").t()}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    write_by_formats(obj, tmp_path / "device.safetensors", "safetensors")
    assert torch.cuda.max_memory_allocated() == before
