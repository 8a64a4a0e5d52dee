"""Cases: dtypes, and layouts that are not strided memory."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tests.cases.bank import EITHER, EXACT, REFUSED, VALUES, bytes_as, case, generator, random_bytes

from shardwright.capture.safetensors_dict import DTYPES

_REPORTS = {
    "bfloat16": "ModelCloud/GPTQModel#2863",
    "float8_e4m3fn": "pytorch/pytorch#114634",
    "float8_e4m3fnuz": "huggingface/huggingface_hub#4901",
    "float4_e2m1fn_x2": "safetensors/safetensors#839",
    "uint16": "huggingface/huggingface_hub#4901",
    "complex64": "safetensors/safetensors#489",
    "complex128": "safetensors/safetensors#450",
}
ALL_DTYPES = sorted(
    {
        str(value).removeprefix("torch.")
        for value in vars(torch).values()
        if type(value) is torch.dtype
    }
)
for _name in ALL_DTYPES:
    _dtype = getattr(torch, _name)
    if _name.startswith(("qint", "quint")):
        continue  # tensors of these are quantised: below
    case(
        f"dtype_{_name}",
        _REPORTS.get(_name, ""),
        verdicts=(EXACT, VALUES if _dtype in DTYPES else REFUSED),
        names=("'w'",),
    )(lambda dtype=_dtype: {"w": bytes_as(dtype, 96, 1).view(3, 32)})  # type: ignore[misc]


@case("float8_with_scale", "pytorch/pytorch#114634")
def _() -> object:
    return {"w": bytes_as(torch.float8_e4m3fn, 768, 1).view(3, 256), "s": torch.tensor(0.5)}


@case("float8_transposed", verdicts=(EXACT, VALUES))
def _() -> object:
    return {"w": bytes_as(torch.float8_e5m2, 600, 2).view(20, 30).t()}


@case("odd_bool_bytes", verdicts=(EXACT, VALUES))
def _() -> object:
    return {"mask": torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)}


@case("nan_payloads_and_signed_zero", "near bghira/SimpleTuner#2714")
def _() -> object:
    wide = (2143289345, 2139095041, -2147483648, 1, 2139095040, -4194305)
    narrow = (32257, 31745, -32768, 1)
    return {
        "w": torch.tensor(wide, dtype=torch.int64).to(torch.int32).view(torch.float32),
        "h": torch.tensor(narrow, dtype=torch.int32).to(torch.int16).view(torch.float16),
        "holes": torch.tensor(wide, dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)[::2]
        .clone(),
    }


@case("nan_payloads_with_holes", verdicts=(VALUES, VALUES))
def _() -> object:
    bits = torch.tensor([2139095041, 7, -4194305, 7], dtype=torch.int64).to(torch.int32)
    return {"w": bits.view(torch.float32)[::2]}


@case("quantized_per_tensor", "pytorch/pytorch#36585", verdicts=(EXACT, REFUSED), names=("'w'",))
def _() -> object:
    weight = torch.randn(10, 10, generator=generator())
    return {"w": torch.quantize_per_tensor(weight, 0.1, 3, torch.quint8)}


@case("quantized_per_channel", verdicts=(EXACT, REFUSED), names=("'w'",))
def _() -> object:
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2])
    weight = torch.randn(3, 4, generator=generator())
    return {"w": torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)}


@case("sparse_coo", "pytorch/pytorch#16667", verdicts=(VALUES, REFUSED), names=("'adj'",))
def _() -> object:
    indices, values = torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.tensor([3.0, 4.0, 5.0])
    return {"adj": torch.sparse_coo_tensor(indices, values, (2, 3)).coalesce()}


@case("sparse_coo_uncoalesced", verdicts=(VALUES, REFUSED), names=("'adj'",))
def _() -> object:
    indices, values = torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0])
    return {"adj": torch.sparse_coo_tensor(indices, values, (2, 2))}


def _compressed(layout: torch.layout) -> object:
    blocks: Any = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return {"w": torch.eye(4).to_sparse(layout=layout, **blocks)}


for _layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
    case(
        str(_layout).removeprefix("torch."),
        "near pytorch/pytorch#16667",
        verdicts=(VALUES, REFUSED),
        names=("'w'",),
    )(functools.partial(_compressed, _layout))


@case("nested_strided", verdicts=(EITHER, REFUSED), names=("'n'",))
def _() -> object:
    return {"n": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])}


@case("nested_jagged", "near pytorch/pytorch#16667", verdicts=(EITHER, REFUSED), names=("'n'",))
def _() -> object:
    parts = [torch.ones(2, 3), torch.zeros(4, 3)]
    return {"n": torch.nested.nested_tensor(parts, layout=torch.jagged)}


@case("mkldnn", verdicts=(REFUSED, REFUSED), names=("layer.w",))
def _() -> object:
    return {"layer.w": torch.ones(3).to_mkldnn()}


@case(
    "meta_tensor_left_in_dict",
    "safetensors/safetensors#280",
    verdicts=(REFUSED, REFUSED),
    names=("lazy.weight",),
)
def _() -> object:
    return {"a": torch.ones(2), "lazy.weight": torch.empty(1024, 1024, device="meta")}


@case("meta_parameter", verdicts=(REFUSED, REFUSED), names=("lazy.weight",))
def _() -> object:
    return {"lazy.weight": torch.nn.Parameter(torch.empty(4, device="meta"))}


@case("fake_tensor", verdicts=(REFUSED, REFUSED), names=("'w'",))
def _() -> object:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return {"w": torch.empty(3)}


@case("functional_tensor", verdicts=(REFUSED, REFUSED), names=("'w'",))
def _() -> object:
    return {"w": torch._to_functional_tensor(torch.ones(3))}


class ScaledTensor(torch.Tensor):
    """A minimal quantised wrapper: inner int8 and scale, no memory of its own."""

    q: torch.Tensor
    s: torch.Tensor

    @staticmethod
    def __new__(cls: type[Any], q: torch.Tensor, s: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, q.shape, dtype=torch.float32, device=q.device
        )

    def __init__(self, q: torch.Tensor, s: torch.Tensor) -> None:
        self.q, self.s = q, s

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["q", "s"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: object, size: object, stride: object
    ) -> ScaledTensor:
        return ScaledTensor(inner["q"], inner["s"])

    def __repr__(self) -> str:  # type: ignore[override]
        return "ScaledTensor()"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return ScaledTensor(args[0].q, args[0].s)
        raise NotImplementedError(f"ScaledTensor has no {func}")


_HIDDEN: dict[int, torch.Tensor] = {}


class HiddenTensor(ScaledTensor):
    """A wrapper that keeps its data where no pickler finds it."""

    def __init__(self, q: torch.Tensor, s: torch.Tensor) -> None:
        _HIDDEN[id(self)] = q

    @property
    def q(self) -> torch.Tensor:  # type: ignore[override]
        return _HIDDEN[id(self)]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["q"], None


class PlainSubclass(torch.Tensor):
    """A subclass that adds nothing but its name."""


@case(
    "wrapper_subclass",
    "pytorch/ao#630",
    verdicts=(EITHER, REFUSED),
    names=("'w'",),
    weights_only=False,
)
def _() -> object:
    inner = random_bytes(64, 1).view(8, 8).view(torch.int8)
    return {"w": ScaledTensor(inner, torch.tensor([0.25]))}


@case("wrapper_that_hides_its_data", verdicts=(REFUSED, REFUSED), names=("'w'",))
def _() -> object:
    return {"w": HiddenTensor(torch.ones(4, dtype=torch.int8), torch.tensor([0.25]))}


@case("plain_subclass", verdicts=(EXACT, REFUSED), names=("'w'",), weights_only=False)
def _() -> object:
    return {"w": torch.arange(10.0)[2:5].as_subclass(PlainSubclass)}


@case("freed_subclass", verdicts=(REFUSED, REFUSED), names=("'w'",))
def _() -> object:
    tensor = torch.ones(8).as_subclass(PlainSubclass)
    tensor.untyped_storage().resize_(0)
    return {"w": tensor}


@case(
    "dtensor_sharded",
    "pytorch/pytorch#120356",
    verdicts=(EITHER, REFUSED),
    names=("'w'",),
    weights_only=False,
)
def _() -> object:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    if not torch.distributed.is_initialized():
        store = torch._C._distributed_c10d.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    return {"w": distribute_tensor(torch.arange(32.0).view(8, 4), mesh, [Shard(0)])}
