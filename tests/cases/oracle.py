"""Is what came back what was saved? Differences in words, none when equal.

Two measures. Exact: bytes, dtypes, shapes, strides, requires_grad, Python attributes, types, key
types and order, container attributes. By value: the same without strides, flags and types of what
holds the tensors. `sharing` says which tensors share memory. Every difference begins with a class
word: VALUE, DTYPE, SHAPE, STRIDE, KEY, TYPE, ATTRIBUTE, FLAG.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import io
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

PLAIN = (torch.Tensor, torch.nn.Parameter)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)


def differences(want: object, got: object, *, exact: bool, ordered: bool = True) -> list[str]:
    """Return how got differs from want. ordered: the order of a dict's keys counts."""
    comparison = _Comparison(exact, ordered)
    comparison.compare(want, got, "<root>")
    return comparison.found


def sharing(obj: object) -> list[list[str]]:
    """Return the groups of tensors over the same bytes, by their places.

    Slices of one buffer that do not overlap are no group: nothing written to one shows in another.
    """
    spans: list[tuple[int, int, int, str]] = []
    for place, tensor in tensors(obj):
        plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_meta
        if plain and not tensor.is_nested and not tensor.is_quantized and tensor.numel():
            storage = tensor.untyped_storage().data_ptr()
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            length = 1 + sum((size - 1) * int(step) for size, step in steps)
            begin = int(tensor.storage_offset()) * tensor.element_size()
            spans.append((storage, begin, begin + length * tensor.element_size(), place))
    groups: list[list[str]] = []
    reached = (0, 0)
    for storage, begin, end, place in sorted(spans):
        if (storage, begin) >= reached or storage != reached[0]:
            groups.append([])
            reached = (storage, end)
        groups[-1].append(place)
        reached = max(reached, (storage, end))
    return sorted(sorted(group) for group in groups if len(group) > 1)


def tensors(obj: object) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in builtin containers, with their places."""
    found: list[tuple[str, torch.Tensor]] = []
    seen: set[int] = set()

    def visit(value: object, place: str) -> None:
        if isinstance(value, torch.Tensor):
            found.append((place, value))
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, child in items:
                visit(child, f"{place}/{key!r}")

    visit(obj, "")
    return found


def logical_bytes(tensor: torch.Tensor) -> bytes:
    """Return a strided tensor's values, row-major: NaN payloads and signs of zeros count."""
    if tensor._is_zerotensor():
        return bytes(tensor.numel() * tensor.element_size())
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return b""
    if tensor.element_size() in _INTEGERS:
        tensor = tensor.view(_INTEGERS[tensor.element_size()]).contiguous()
    else:
        tensor = torch.view_as_real(tensor.contiguous())
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclass
class _Comparison:
    exact: bool
    ordered: bool
    found: list[str] = field(default_factory=list)
    seen: set[tuple[int, int]] = field(default_factory=set)

    def add(self, kind: str, place: str, text: str) -> None:
        self.found.append(f"{kind} {place}: {text}")

    def compare(self, want: Any, got: Any, place: str) -> None:
        if (id(want), id(got)) in self.seen:
            return
        self.seen.add((id(want), id(got)))
        if isinstance(want, torch.Tensor):
            self._tensor(want, got, place)
        elif isinstance(want, Mapping):
            self._mapping(want, got, place)
        elif isinstance(want, list | tuple):
            self._sequence(want, got, place)
        elif isinstance(want, torch.nn.Module):
            self._type(want, got, place)
            self.compare(want.state_dict(), got.state_dict(), place)
        elif isinstance(want, torch.TypedStorage | torch.UntypedStorage):
            self._storage(want, got, place)
        else:
            self._type(want, got, place)
            if not _equal(want, got):
                self.add("VALUE", place, f"{_short(want)} -> {_short(got)}")

    def _type(self, want: Any, got: Any, place: str) -> None:
        if type(want) is not type(got):
            self.add("TYPE", place, f"{type(want).__name__} -> {type(got).__name__}")

    # --- containers ------------------------------------------------------------------------------

    def _mapping(self, want: Any, got: Any, place: str) -> None:
        if not isinstance(got, Mapping):
            self.add("TYPE", place, f"{type(want).__name__} -> {type(got).__name__}")
            return
        if self.exact:
            self._type(want, got, place)
            attributes = getattr(want, "__dict__", {}), getattr(got, "__dict__", {})
            self.compare(*attributes, f"{place}.__dict__") if any(attributes) else None
        typed = {(type(key), _token(key)): key for key in got}
        for key, value in want.items():
            found = typed.pop((type(key), _token(key)), _MISSING)
            if found is _MISSING:
                self.add("KEY", place, f"{_short(key)} is lost, or changed its type")
            else:
                self.compare(value, got[found], f"{place}/{_short(key)}")
        for key in typed.values():
            self.add("KEY", place, f"{_short(key)} appeared")
        order = [[_token(key) for key in mapping] for mapping in (want, got)]
        if self.ordered and not typed and order[0] != order[1]:
            self.add("KEY", place, "order changed")

    def _sequence(self, want: Any, got: Any, place: str) -> None:
        self._type(want, got, place)
        if not isinstance(got, list | tuple) or len(want) != len(got):
            self.add("VALUE", place, "length differs")
            return
        if set(map(type, want)) == set(map(type, got)) == {int} and want == got:
            return
        for index, pair in enumerate(zip(want, got, strict=True)):
            self.compare(*pair, f"{place}/{index}")

    def _storage(self, want: Any, got: Any, place: str) -> None:
        # torch.load gives typed storages for untyped ones; their bytes are what counts.
        raw = [getattr(storage, "_untyped_storage", storage) for storage in (want, got)]
        if raw[0].tolist() != raw[1].tolist():
            self.add("VALUE", place, "storage bytes differ")
        if isinstance(want, torch.TypedStorage) and want.dtype != got.dtype:
            self.add("DTYPE", place, f"{want.dtype} -> {got.dtype}")

    # --- tensors ---------------------------------------------------------------------------------

    def _tensor(self, want: torch.Tensor, got: Any, place: str) -> None:
        if not isinstance(got, torch.Tensor):
            self.add("TYPE", place, f"tensor -> {type(got).__name__}")
            return
        if self.exact:
            self._type(want, got, place)
        if torch.nn.parameter.is_lazy(want) or not self._kind(want, got, place):
            return
        if self.exact:
            self._flags(want, got, place)
        if want.is_nested:
            for index, pair in enumerate(zip(want.unbind(), got.unbind(), strict=True)):
                self._tensor(*pair, f"{place}<{index}>")
        elif want.shape != got.shape:
            self.add("SHAPE", place, f"{tuple(want.shape)} -> {tuple(got.shape)}")
        elif (parts := _parts(want)) is not None:
            for name in parts:
                self.compare(_part(want, name), _part(got, name), f"{place}.{name}")
        else:
            self._dense(want, got, place)

    def _kind(self, want: torch.Tensor, got: torch.Tensor, place: str) -> bool:
        for kind, name in (("TYPE", "layout"), ("TYPE", "is_nested"), ("DTYPE", "dtype")):
            before, after = getattr(want, name), getattr(got, name)
            if before != after:
                self.add(kind, place, f"{name} {before} -> {after}")
                return False
        return True

    def _flags(self, want: torch.Tensor, got: torch.Tensor, place: str) -> None:
        if want.requires_grad != got.requires_grad:
            self.add("FLAG", place, f"requires_grad {want.requires_grad} -> {got.requires_grad}")
        if type(want) in PLAIN:
            self.compare(vars(want), vars(got), f"{place}.__dict__")

    def _dense(self, want: torch.Tensor, got: torch.Tensor, place: str) -> None:
        if self.exact and want.numel() and want.stride() != got.stride():
            self.add("STRIDE", place, f"{want.stride()} -> {got.stride()}")
        before, after = logical_bytes(want), logical_bytes(got)
        if before != after:
            self.add("VALUE", place, f"bytes differ, {len(before)} before and {len(after)} after")


def _parts(tensor: torch.Tensor) -> tuple[str, ...] | None:
    """Return what a tensor that is not plain memory consists of, by the names of its accessors."""
    if tensor.is_quantized:
        scale = ("q_scale", "q_zero_point")
        if tensor.qscheme() not in _PER_TENSOR:
            scale = ("q_per_channel_scales", "q_per_channel_zero_points")
        return ("int_repr", "qscheme", *scale)
    if tensor.layout is torch.sparse_coo:
        return ("_indices", "_values", "is_coalesced")
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return ("crow_indices", "col_indices", "values")
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return ("ccol_indices", "row_indices", "values")
    if hasattr(tensor, "to_local"):
        return ("placements", "to_local")
    if hasattr(tensor, "__tensor_flatten__"):
        names: tuple[str, ...] = tuple(tensor.__tensor_flatten__()[0])
        return names
    return None


def _part(tensor: torch.Tensor, name: str) -> Any:
    part = getattr(tensor.detach() if tensor.layout is not torch.strided else tensor, name)
    return part() if callable(part) and not isinstance(part, torch.Tensor) else part


_MISSING = object()


def _token(key: object) -> object:
    return struct.pack("<d", key) if isinstance(key, float) else key


def _equal(want: Any, got: Any) -> bool:
    if isinstance(want, np.ndarray):
        same = isinstance(got, np.ndarray) and (want.dtype, want.shape) == (got.dtype, got.shape)
        return same and (want.dtype == object or want.tobytes() == got.tobytes())
    if isinstance(want, io.BytesIO):
        return isinstance(got, io.BytesIO) and want.getvalue() == got.getvalue()
    if isinstance(want, torch.Generator):
        return isinstance(got, torch.Generator) and torch.equal(want.get_state(), got.get_state())
    if type(want) is float and type(got) is float:
        return struct.pack("<d", want) == struct.pack("<d", got) or (
            math.isnan(want) and math.isnan(got)
        )
    plain_object = vars(type(want)).get("__eq__") is None and hasattr(want, "__dict__")
    if isinstance(want, argparse.Namespace) or dataclasses.is_dataclass(want) or plain_object:
        if isinstance(want, enum.Enum | type) or type(want) is not type(got):
            return want is got
        return not differences(vars(want), vars(got), exact=True)
    return bool(want == got)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:40]}...({len(text)})"
