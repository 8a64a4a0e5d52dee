"""Cases: what else stands in a checkpoint beside tensors."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import io
import random

import numpy as np
import torch
from tests.cases.bank import EITHER, EXACT, REFUSED, VALUES, case

OBJECT = (EXACT, REFUSED)
Pair = collections.namedtuple("Pair", "a b")  # noqa: PYI024  the legacy kind is what people pickle


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class TrainerState:
    epoch: float
    best: object


class Holder:
    """An object of the user's, whose reduce makes the tensor that gets pickled."""

    def __init__(self) -> None:
        self.tensor = torch.arange(6.0)[1:4]

    def __getstate__(self) -> dict[str, object]:
        return {"tensor": self.tensor.clone()}


@case("adam_state_dict", "pytorch/pytorch#153842", verdicts=OBJECT, names=("'model'",))
def _() -> object:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}


@case("lightning_scheduler_counter", "pytorch/pytorch#153842", verdicts=OBJECT, names=("'sched'",))
def _() -> object:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return {"sched": torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 20, 25]).state_dict()}


@case("module_state_dict_metadata", "huggingface/accelerate#2875")
def _() -> object:
    return torch.nn.BatchNorm1d(4).state_dict()


@case("ordered_dict_with_a_tensor_attribute", verdicts=(EXACT, VALUES))
def _() -> object:
    ordered = collections.OrderedDict([("w", torch.ones(2))])
    ordered.extra = {"t": torch.zeros(3), "n": 1}  # type: ignore[attr-defined]
    return ordered


@case(
    "numpy_rng_state",
    "huggingface/transformers#40500",
    verdicts=OBJECT,
    names=("'python'",),
    weights_only=False,
)
def _() -> object:
    return {
        "python": random.Random(0).getstate(),
        "numpy": np.random.RandomState(0).get_state(),
        "cpu": torch.random.get_rng_state(),
        "cuda": [torch.zeros(16, dtype=torch.uint8)],
    }


@case(
    "argparse_namespace",
    "NVIDIA/Megatron-LM#1435",
    verdicts=OBJECT,
    names=("'args'",),
    weights_only=False,
)
def _() -> object:
    args = argparse.Namespace(lr=1e-4, dtype=torch.bfloat16, sizes=[1, 2], mask=torch.ones(2))
    return {"args": args, "iteration": 5, "w": torch.ones(2)}


@case(
    "defaultdict_counter_namedtuple",
    "pytorch/pytorch#153842",
    verdicts=OBJECT,
    names=("'dd'",),
    weights_only=False,
)
def _() -> object:
    nested: dict[str, dict[str, object]] = collections.defaultdict(dict)
    nested["a"]["x"] = torch.ones(1)
    return {"dd": nested, "c": collections.Counter({"a": 2}), "nt": Pair(torch.ones(1), 2)}


@case(
    "numpy_scalars_and_arrays",
    "nerfstudio-project/nerfstudio#3702",
    verdicts=OBJECT,
    names=("'best_metric'",),
    weights_only=False,
)
def _() -> object:
    return {
        "best_metric": np.float64(0.25),
        "hist": np.arange(5, dtype=np.int16),
        "w": torch.ones(1),
    }


@case("torch_values", "near pytorch/ao#630", verdicts=OBJECT, names=("'size'",))
def _() -> object:
    return {
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "w": torch.ones(1),
    }


@case("layouts_and_formats", verdicts=OBJECT, names=("'layout'",), weights_only=False)
def _() -> object:
    return {
        "layout": torch.strided,
        "format": torch.channels_last,
        "qscheme": torch.per_tensor_affine,
    }


@case("plain_values", verdicts=OBJECT, names=("'values'",))
def _() -> object:
    numbers = [0, -1, 2**31, -(2**31) - 1, 2**63, 0.0, -0.0, 1e308, float("inf"), float("nan")]
    return {
        "values": [*numbers, 10**400, True, None, "", "\u00e9\ud800", (), [], {}, b"raw", set()],
        "w": torch.ones(1),
    }


@case("enum_and_dataclass", verdicts=OBJECT, names=("'color'",), weights_only=False)
def _() -> object:
    return {"color": Color.RED, "state": TrainerState(1.5, torch.arange(3)), "w": torch.ones(1)}


@case("bytes_io", verdicts=OBJECT, names=("'blob'",), weights_only=False)
def _() -> object:
    return {"blob": io.BytesIO(b"dataloader state"), "w": torch.ones(1)}


@case("rng_generator", verdicts=OBJECT, names=("'rng'",), weights_only=False)
def _() -> object:
    return {"rng": torch.Generator().manual_seed(7), "w": torch.ones(1)}


@case("object_with_getstate", verdicts=(VALUES, REFUSED), names=("'holder'",), weights_only=False)
def _() -> object:
    return {"holder": Holder(), "w": torch.ones(1)}


@case("tensor_with_attributes", verdicts=(EXACT, VALUES))
def _() -> object:
    tensor = torch.arange(10.0)[2:6]
    tensor.tag = {"kind": "ema", "decay": 0.9}  # type: ignore[attr-defined]
    return {"w": tensor, "plain": torch.ones(1)}


@case("parameter_with_attributes", verdicts=(EXACT, VALUES))
def _() -> object:
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    return {"w": parameter, "plain": torch.nn.Parameter(torch.ones(1), requires_grad=False)}


@case("buffer", verdicts=(EXACT, VALUES))
def _() -> object:
    return {"running_mean": torch.nn.Buffer(torch.ones(3))}


@case("uninitialized_parameter", verdicts=OBJECT, names=("'w'",), weights_only=False)
def _() -> object:
    return {"w": torch.nn.UninitializedParameter()}


@case("storages_as_values", verdicts=OBJECT, names=("'typed'",))
def _() -> object:
    base = torch.arange(8.0)
    raw = torch.arange(9, dtype=torch.uint8)
    return {
        "typed": base._typed_storage(),  # type: ignore[no-untyped-call]
        "view": base[3:5],
        "raw": raw.untyped_storage(),
        "bytes": raw[2:],
        "again": base._typed_storage(),  # type: ignore[no-untyped-call]
    }


@case("storage_of_another_dtype", verdicts=(REFUSED, REFUSED), names=("raw", "w"))
def _() -> object:
    weight = torch.arange(8.0)
    return {"raw": weight.untyped_storage(), "w": weight}


@case(
    "unpicklable_lambda",
    "huggingface/transformers#21482",
    verdicts=(REFUSED, REFUSED),
    names=("sched",),
)
def _() -> object:
    return {"w": torch.ones(4), "sched": {"fn": lambda step: step * 2}}


@case("defaultdict_with_a_lambda", verdicts=(REFUSED, REFUSED), names=("counts",))
def _() -> object:
    return {"w": torch.ones(4), "counts": collections.defaultdict(lambda: 0)}


@case("unpicklable_attribute", verdicts=(REFUSED, REFUSED), names=("args",))
def _() -> object:
    return {"args": argparse.Namespace(lr=1, hook=lambda: None), "w": torch.ones(1)}


@case("open_file", verdicts=(REFUSED, REFUSED), names=("log",))
def _() -> object:
    return {"w": torch.ones(1), "log": [1, (i for i in range(3))]}


@case("large_python_payload", "pytorch/pytorch#63720", verdicts=OBJECT, names=("'data_state'",))
def _() -> object:
    return {"data_state": list(range(1_000_000)), "txt": "abc" * 7_000_000, "w": torch.ones(1)}


@case("module_object", verdicts=(EITHER, REFUSED), names=("'m'",), weights_only=False)
def _() -> object:
    torch.manual_seed(0)
    return {"m": torch.nn.Linear(2, 2)}


@case("non_dict_root", "pytorch/pytorch#1995", verdicts=OBJECT, names=("list",))
def _() -> object:
    return [torch.ones(2), {"a": torch.zeros(1)}]


@case("tensor_root", verdicts=OBJECT, names=("Tensor",))
def _() -> object:
    return torch.arange(12.0).view(3, 4).t()


@case("no_tensor_at_all", verdicts=OBJECT, names=("int",))
def _() -> object:
    return 5


@case("list_of_one_tensor_thrice", verdicts=OBJECT, names=("list",))
def _() -> object:
    tensor = torch.ones(3, requires_grad=True)
    return [tensor, tensor, {"x": tensor}]
