"""Cases: views, shared memory, and tensors that are not row-major memory of their own."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from tests.cases.bank import (
    EITHER,
    EXACT,
    KIB,
    MIB,
    REFUSED,
    SHARED,
    VALUES,
    case,
    generator,
    random_bytes,
)


@case("view_of_big_storage", "pytorch/pytorch#1995", file_bytes_max=64 * KIB)
def _() -> object:
    return {"w": torch.arange(16 * MIB // 4, dtype=torch.int32)[1000:1100]}


@case(
    "zero_flat_partition",
    "deepspeedai/DeepSpeed#3303",
    file_bytes_max=int(1.2 * 2 * MIB) + 64 * KIB,
)
def _() -> object:
    flat = torch.randn(4 * MIB, generator=generator()).to(torch.bfloat16)
    part = flat.numel() // 64
    return {f"layer.{i}.weight": flat[i * part : (i + 1) * part].view(16, -1) for i in range(16)}


@case(
    "all_slices_of_one_flat_buffer",
    "safetensors/safetensors#304",
    file_bytes_max=int(1.3 * 4 * MIB),
)
def _() -> object:
    flat = torch.randn(MIB, generator=generator())
    return {f"p{i}": flat[i * (MIB // 8) : (i + 1) * (MIB // 8)] for i in range(8)}


@case(
    "tied_weights_two_names",
    "safetensors/safetensors#98",
    verdicts=(SHARED, REFUSED),
    names=("embed.weight", "lm_head.weight"),
    file_bytes_max=8 * MIB + 64 * KIB,
)
def _() -> object:
    weight = torch.nn.Parameter(torch.randn(1024, 1024, generator=generator()))
    return OrderedDict([("embed.weight", weight), ("lm_head.weight", weight)])


@case(
    "tied_with_different_shape",
    "huggingface/accelerate#2807",
    verdicts=(SHARED, REFUSED),
    names=("'a'", "'b'"),
)
def _() -> object:
    weight = torch.randn(64, 64, generator=generator())
    return {"a": weight, "b": weight.view(-1)}


@case("parameter_and_its_data", verdicts=(SHARED, REFUSED), names=("'p'", "'data'"))
def _() -> object:
    parameter = torch.nn.Parameter(torch.randn(8, 8, generator=generator()))
    return {"p": parameter, "data": parameter.data, "part": parameter.detach()[2:4]}


@case("overlapping_windows", verdicts=(SHARED, REFUSED), names=("'a'", "'b'"))
def _() -> object:
    base = torch.arange(2000.0)
    return {"a": base[100:300], "b": base[200:400], "apart": torch.ones(3)}


@case("chain_of_overlaps", verdicts=(SHARED, REFUSED), names=("'a'", "'b'"))
def _() -> object:
    base = torch.arange(100.0)
    return {"c": base[60:90], "a": base[10:50], "b": base[40:70]}


@case("interleaved_columns", verdicts=(SHARED, EITHER), names=("'even'", "'odd'"))
def _() -> object:
    base = torch.arange(40.0).view(4, 10)
    return {"even": base[:, ::2], "odd": base[:, 1::2]}


@case("sliding_windows", verdicts=(EXACT, EITHER))
def _() -> object:
    return {"w": torch.arange(50.0).unfold(0, 8, 1)}


@case("expanded", verdicts=(EXACT, EITHER))
def _() -> object:
    return {"row": torch.arange(4.0).expand(1000, 4), "scalar": torch.tensor(3).expand(10**4)}


@case("expanded_with_holes", verdicts=(VALUES, EITHER))
def _() -> object:
    return {"w": torch.arange(40.0).view(4, 10)[:, ::3].unsqueeze(1).expand(4, 5, 4)}


@case("same_holes_twice", verdicts=(VALUES, REFUSED), names=("'a'", "'b'"), file_bytes_max=8 * KIB)
def _() -> object:
    base = torch.arange(1e6).view(1000, 1000)
    return {"a": base[:, 0], "b": base[:, 0]}


@case(
    "same_bytes_two_dtypes",
    "pytorch/pytorch#91325",
    verdicts=(EITHER, EITHER),
    names=("'w'", "'w_raw'"),
)
def _() -> object:
    weight = torch.randn(32, 32, generator=generator()).to(torch.bfloat16)
    return {"w": weight, "w_raw": weight.view(torch.uint8)}


@case("float8_and_its_bytes", verdicts=(SHARED, REFUSED), names=("'w'", "'raw'"))
def _() -> object:
    raw = random_bytes(64, 3)
    return {"raw": raw[1:], "w": raw.view(torch.float8_e4m3fn), "wide": raw.view(torch.uint16)[1:]}


@case("two_dtypes_side_by_side_in_one_buffer")
def _() -> object:
    raw = random_bytes(4096, 5)
    return {"a": raw[:1024].view(torch.int32), "b": raw[1024:2048].view(torch.int16)}


@case("many_empty_tensors_mixed_dtypes", "pytorch/pytorch#68787")
def _() -> object:
    dtypes = (torch.float32, torch.int64, torch.bfloat16, torch.bool)
    return {f"e{i}": torch.empty(0, 3, dtype=dtype) for i, dtype in enumerate(dtypes)}


@case("empty_slices_of_one_buffer")
def _() -> object:
    base = torch.arange(10.0)
    return {"a": base[3:3], "b": base[3:3], "all": base}


@case(
    "storage_freed_by_fsdp",
    "pytorch/pytorch#195862",
    verdicts=(REFUSED, REFUSED),
    names=("freed.weight",),
)
def _() -> object:
    tensor = torch.randn(1024, generator=generator())
    tensor.untyped_storage().resize_(0)
    return {"ok": torch.ones(3), "freed.weight": tensor}


@case("storage_shrunk", verdicts=(REFUSED, REFUSED), names=("shrunk",))
def _() -> object:
    tensor = torch.ones(1024)[8:]
    tensor.untyped_storage().resize_(100)
    return {"shrunk": tensor}


@case("freed_flat_parameter", verdicts=(REFUSED, REFUSED), names=("flat",))
def _() -> object:
    parameter = torch.nn.Parameter(torch.ones(1024))
    parameter.is_flat = True  # type: ignore[attr-defined]
    parameter.untyped_storage().resize_(0)
    return {"flat": parameter}


@case("transposed", "safetensors/safetensors#17", verdicts=(EXACT, VALUES))
def _() -> object:
    return {"w": torch.randn(300, 500, generator=generator()).t()}


@case("channels_last", "Comfy-Org/ComfyUI#3923")
def _() -> object:
    weight = torch.randn(16, 8, 3, 3, generator=generator())
    return {"conv.weight": weight.to(memory_format=torch.channels_last)}


@case("permuted_larger_than_a_window")
def _() -> object:
    return {
        "w": torch.randn(700, 33, 31, generator=generator()).permute(2, 0, 1),
        "b": torch.ones(1),
    }


@case("as_strided_with_holes", "safetensors/safetensors#530", verdicts=(VALUES, VALUES))
def _() -> object:
    base = torch.arange(10000.0)
    return {
        "diag": base.as_strided((100,), (101,)),
        "cols": torch.arange(10000.0).view(100, 100)[:, ::7],
    }


@case("strides_of_single_dimensions")
def _() -> object:
    return {"w": torch.arange(12.0).view(3, 4)[:1], "v": torch.ones(5).as_strided((1, 5), (77, 1))}


@case("last_element_of_storage", "pytorch/pytorch#44872", file_bytes_max=64 * KIB)
def _() -> object:
    return {"last": torch.arange(4 * MIB, dtype=torch.uint8)[-1:]}


@case("lazy_conj_bit", "safetensors/safetensors#831", verdicts=(EXACT, VALUES))
def _() -> object:
    return {"h": torch.randn(128, dtype=torch.complex64, generator=generator()).conj()}


@case("conj_beside_its_base", verdicts=(SHARED, REFUSED), names=("'h'", "'conj'"))
def _() -> object:
    h = torch.randn(128, dtype=torch.complex64, generator=generator())
    return {"h": h, "conj": h.conj()}


@case("lazy_neg_bit", verdicts=(VALUES, VALUES))
def _() -> object:
    h = torch.randn(64, dtype=torch.complex64, generator=generator())
    return {"imag": h.conj().imag, "neg": torch._neg_view(torch.arange(5.0))}


@case("conj_with_holes", verdicts=(VALUES, VALUES))
def _() -> object:
    h = torch.randn(64, dtype=torch.complex64, generator=generator())
    return {"h": h[::3].conj(), "t": torch.randn(5, 7, dtype=torch.complex64).conj().t()}


@case("zero_tensor", verdicts=(EITHER, EITHER), names=("'z'",))
def _() -> object:
    zero = torch._efficientzerotensor((5, 3), dtype=torch.float32)
    return {"z": zero, "part": zero[2:]}


@case("readonly_numpy_backed")
def _() -> object:
    array = np.arange(5000, dtype=np.float32)
    tensor = torch.as_tensor(array)
    array.flags.writeable = False
    return {"w": tensor}


@case("numpy_backed_twice", verdicts=(EXACT, EITHER), names=("'a'", "'b'"))
def _() -> object:
    array = np.arange(50, dtype=np.float32)
    return {"a": torch.from_numpy(array), "b": torch.from_numpy(array)}


@case("from_dlpack")
def _() -> object:
    return {"w": torch.utils.dlpack.from_dlpack(np.arange(10, dtype=np.int64))}


@case("shared_memory_tensor", "pytorch/torchtitan#3476")
def _() -> object:
    return {"w": torch.randn(1000, generator=generator()).share_memory_()}  # type: ignore[no-untyped-call]


@case("nonleaf_requires_grad", "near pytorch/pytorch#144657", verdicts=(VALUES, VALUES))
def _() -> object:
    return {"ema": torch.ones(10, requires_grad=True) * 2.5}


@case("leaves_that_require_grad")
def _() -> object:
    return {"w": torch.ones(3, requires_grad=True), "p": torch.nn.Parameter(torch.ones(3))}


@case("inference_mode_tensor")
def _() -> object:
    with torch.inference_mode():
        tensor = torch.randn(100, generator=generator())
    return {"w": tensor}
