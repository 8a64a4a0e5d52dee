"""Cases: shapes, sizes and keys."""

from __future__ import annotations

import functools

import torch
from tests.cases.bank import EXACT, GIB, MIB, REFUSED, case, random_bytes


@case("zero_dim_scalars", "pytorch/pytorch#153842")
def _() -> object:
    return {"step": torch.tensor(7.0), "flag": torch.tensor(True), "n": torch.tensor(2**62)}


@case("empty_shapes", "safetensors/safetensors#280")
def _() -> object:
    return {
        "a": torch.empty(0),
        "b": torch.empty(0, 5, dtype=torch.int16),
        "c": torch.empty(3, 0, 2, dtype=torch.bfloat16),
        "d": torch.empty(0),
    }


@case("empty_dict", "safetensors/safetensors#601")
def _() -> object:
    return {}


@case("many_dims")
def _() -> object:
    return {"t": torch.arange(4.0).view((1,) * 38 + (2, 2))}


@case("more_dims_than_the_wire_carries", verdicts=(EXACT, REFUSED), names=("'t'", "64"))
def _() -> object:
    return {"t": torch.arange(4.0).view((1,) * 70 + (2, 2))}


@case("over_2gib", "pytorch/pytorch#717", large=True, heavy=True)
def _() -> object:
    tensor = torch.empty(2 * GIB + 4097, dtype=torch.uint8)
    block = random_bytes(MIB + 7, 11)
    for begin in range(0, tensor.numel(), block.numel()):
        part = tensor[begin : begin + block.numel()]
        part.copy_(block[: part.numel()])
    tensor[-1] = 171
    return {"w": tensor}


@case("hundred_thousand_tensors", "safetensors/safetensors#668", large=True)
def _() -> object:
    base = torch.arange(100000, dtype=torch.int32)
    return {f"experts.{i // 100}.w{i % 100}": base[i].clone() for i in range(100000)}


@case("header_over_100mb", "safetensors/safetensors#668", verdicts=(EXACT, REFUSED), large=True)
def _() -> object:
    return {f"{i}." + "x" * 60000: torch.tensor([i]) for i in range(1800)}


@case("key_too_long", verdicts=(EXACT, REFUSED), names=("65536",))
def _() -> object:
    return {"x" * 70000: torch.ones(1)}


_KEYS: dict[str, tuple[str, list[str]]] = {
    "key_slashes": ("near Nerogar/OneTrainer#68", ["a/b", "a\\b", "/abs/path", "a//b", "a/"]),
    "key_unicode_nfc_nfd": (
        "near pytorch/pytorch#98918",
        ["\u00e9", "e\u0301", "\u5c42.\u6743\u91cd", "\U0001f600", "\u202eabc"],
    ),
    "key_empty_string": ("near pytorch/pytorch#137327", ["", " ", "."]),
    "key_control_chars": ("", ["a\nb", "a\tb", "a\x00b", 'q"uote', "\x7f", "{}[],:"]),
    "key_zip_record_names": (
        "",
        [
            *("data.pkl", "version", "byteorder", ".data/serialization_id", "data/0"),
            *("archive/data/0", ".metadata", "__0_0.distcp"),
        ],
    ),
    "key_case_twins": ("", ["Weight", "weight", "WEIGHT"]),
    "key_numbers": ("", ["0", "00", "1", "-1", "1e3"]),
}


def _numbered(keys: list[str]) -> object:
    return {key: torch.full((3,), float(index)) for index, key in enumerate(keys)}


for _name, (_report, _keys) in _KEYS.items():
    case(_name, _report)(functools.partial(_numbered, _keys))

case(
    "key_lone_surrogate",
    "near pytorch/pytorch#185098",
    verdicts=(EXACT, REFUSED),
    names=("\\ud800",),
)(functools.partial(_numbered, ["w\ud800"]))
case("key_reserved", verdicts=(EXACT, REFUSED), names=("__metadata__",))(
    functools.partial(_numbered, ["w", "__metadata__"])
)


@case(
    "key_dot_collision",
    "pytorch/pytorch#137327",
    verdicts=(EXACT, REFUSED),
    names=("'a'",),
)
def _() -> object:
    return {"a": {"b": torch.zeros(3)}, "a.b": torch.ones(3)}


@case("key_types", "pytorch/pytorch#153842", verdicts=(EXACT, REFUSED), names=("'s'",))
def _() -> object:
    keys = (7, None, (1, 2), 2.5, b"raw")
    return {"s": {key: torch.ones(index + 1) for index, key in enumerate(keys)}}


@case("key_types_that_are_equal", verdicts=(EXACT, REFUSED), names=("list",))
def _() -> object:
    return [{1: torch.ones(1)}, {True: torch.ones(1)}, {1.0: torch.ones(1)}, {-0.0: 1}, {0.0: 1}]


@case("key_integer_at_the_root", verdicts=(EXACT, REFUSED), names=("'7'",))
def _() -> object:
    return {7: torch.ones(1)}


@case("key_dtype", verdicts=(EXACT, REFUSED), names=("'d'",))
def _() -> object:
    return {"d": {torch.float32: torch.ones(1), torch.bfloat16: torch.zeros(1)}}


@case("cyclic_dict", verdicts=(EXACT, REFUSED), names=("'self'",))
def _() -> object:
    cyclic: dict[str, object] = {"w": torch.ones(1)}
    cyclic["self"] = cyclic
    return cyclic


@case("cyclic_tuple", verdicts=(EXACT, REFUSED), names=("dict",), weights_only=False)
def _() -> object:
    inner: list[object] = [torch.ones(2)]
    cyclic = (inner, torch.zeros(1))
    inner.append(cyclic)
    return cyclic


@case("one_container_in_two_places", verdicts=(EXACT, REFUSED), names=("'a'",))
def _() -> object:
    group = {"lr": 0.1, "w": torch.ones(2)}
    return {"a": group, "b": [group, group]}


@case("nested_to_a_depth", verdicts=(EXACT, REFUSED), names=("dict",))
def _() -> object:
    nested: object = torch.ones(1)
    for _ in range(100):
        nested = [nested]
    return nested


@case("nested_too_deeply", verdicts=(REFUSED, REFUSED), names=("nested",))
def _() -> object:
    nested: dict[str, object] = {"w": torch.ones(1)}
    for _ in range(5000):
        nested = {"nested": nested}
    return nested
