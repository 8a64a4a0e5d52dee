"""What the client must know of many tensors at once, one list per fact.

Lists filled by `map` over C accessors: about a microsecond a tensor, which a loop that looks at
tensors one by one does not reach. `torch_format` and `safetensors_dict` read columns at the
first capture of a structure and compare them (`same_as`) at every later one. Knows no format, and
refers to no tensor once it is read.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from shardwright.capture.source import extent_elements, unobserved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_storage_of = torch.Tensor.untyped_storage
_storage_bytes: Callable[[Any], int] = torch._C.StorageBase.nbytes  # type: ignore[attr-defined]
_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")
_requires_grad_of = attrgetter("requires_grad")
_is_cpu = attrgetter("is_cpu")
_attributes_of = attrgetter("__dict__")
_storage_offset: Callable[[torch.Tensor], int] = torch.Tensor.storage_offset  # type: ignore[assignment]

UNREADABLE = (RuntimeError, NotImplementedError)
"""What torch raises for tensors that have no strided memory (sparse, vmap's, functional, ...)."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Facts of plain strided tensors, in the order of the list that they were read from.

    addresses: of the first element. extents: bytes from the first to the last element.
    contiguous: all tensors are.
    flags: (index, "conj" | "neg") where such a bit is set.
    elsewhere: (index, device) of tensors that are not on the CPU.
    """

    addresses: list[int]
    shapes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    requires_grad: list[bool]
    storage_offsets: list[int]
    storage_nbytes: list[int]
    extents: list[int]
    contiguous: bool
    flags: list[tuple[int, str]]
    elsewhere: list[tuple[int, torch.device]]

    @classmethod
    def read(cls, tensors: list[torch.Tensor]) -> Columns:
        """Read all facts. Raises one of UNREADABLE when a tensor has no strided memory."""
        with unobserved():
            return cls._read(tensors)

    @classmethod
    def _read(cls, tensors: list[torch.Tensor]) -> Columns:
        dtypes: list[torch.dtype] = list(map(_dtype_of, tensors))
        shapes = _interned(map(_shape_of, tensors))
        strides = _interned(map(torch.Tensor.stride, tensors))
        contiguous = list(map(torch.Tensor.is_contiguous, tensors))
        return cls(
            addresses=list(map(torch.Tensor.data_ptr, tensors)),
            shapes=shapes,
            strides=strides,
            dtypes=dtypes,
            requires_grad=list(map(_requires_grad_of, tensors)),
            storage_offsets=list(map(_storage_offset, tensors)),
            storage_nbytes=list(map(_storage_bytes, map(_storage_of, tensors))),
            extents=_extents(tensors, shapes, strides, contiguous),
            contiguous=all(contiguous),
            flags=_flags(tensors, dtypes),
            elsewhere=_elsewhere(tensors),
        )

    def same_as(self, tensors: list[torch.Tensor], *, attributes: bool = False) -> bool:
        """Say whether other tensors have the same facts, addresses apart.

        They are known to be torch.Tensor or Parameter themselves. attributes: Python attributes
        on them do not matter.
        """
        if len(tensors) != len(self.dtypes):
            return False
        try:
            with unobserved():
                return self._same_as(tensors, attributes)
        except UNREADABLE:
            return False

    def _same_as(self, tensors: list[torch.Tensor], attributes: bool) -> bool:
        return (
            (attributes or not any_attributes(tensors))
            and _all_equal(map(_shape_of, tensors), self.shapes)
            and _all_equal(map(torch.Tensor.stride, tensors), self.strides)
            and list(map(_dtype_of, tensors)) == self.dtypes
            and list(map(_requires_grad_of, tensors)) == self.requires_grad
            and list(map(_storage_offset, tensors)) == self.storage_offsets
            and list(map(_storage_bytes, map(_storage_of, tensors))) == self.storage_nbytes
            and _flags(tensors, self.dtypes) == self.flags
            and _elsewhere(tensors) == self.elsewhere
        )


def read_addresses(tensors: list[torch.Tensor]) -> list[int]:
    """Return where each tensor's first element lies."""
    with unobserved():
        return list(map(torch.Tensor.data_ptr, tensors))


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the Python attributes that somebody gave to a tensor."""
    attributes: dict[str, Any] = _attributes_of(tensor)
    return attributes


def _interned(sizes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return sizes with equal ones being one object: 100,000 new tuples would wake the GC."""
    once: dict[tuple[int, ...], tuple[int, ...]] = {}
    return [once.setdefault(size, size) for size in sizes]


def any_attributes(tensors: Iterable[torch.Tensor]) -> bool:
    """Say whether somebody gave a Python attribute to one of them."""
    with unobserved():
        return any(map(_attributes_of, tensors))


def _all_equal(left: Iterable[Any], right: list[Any]) -> bool:
    return all(map(operator.eq, left, right))


def _extents(
    tensors: list[torch.Tensor],
    shapes: list[tuple[int, ...]],
    strides: list[tuple[int, ...]],
    contiguous: list[bool],
) -> list[int]:
    extents: list[int] = list(map(attrgetter("nbytes"), tensors))
    if not all(contiguous):
        for index, (tensor, dense) in enumerate(zip(tensors, contiguous, strict=True)):
            if not dense:
                elements = extent_elements(shapes[index], strides[index])
                extents[index] = elements * tensor.element_size()
    return extents


def _flags(tensors: list[torch.Tensor], dtypes: list[torch.dtype]) -> list[tuple[int, str]]:
    negated = list(map(torch.Tensor.is_neg, tensors))
    flags = [(i, "neg") for i, is_set in enumerate(negated) if is_set] if any(negated) else []
    complex_dtypes = {dtype for dtype in set(dtypes) if dtype.is_complex}
    if complex_dtypes:
        flags += [
            (i, "conj")
            for i, dtype in enumerate(dtypes)
            if dtype in complex_dtypes and tensors[i].is_conj()
        ]
    return flags


def _elsewhere(tensors: list[torch.Tensor]) -> list[tuple[int, torch.device]]:
    on_cpu = list(map(_is_cpu, tensors))
    if all(on_cpu):
        return []
    return [(i, tensors[i].device) for i, here in enumerate(on_cpu) if not here]


def storage_keys(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return a number per tensor that two tensors share when they share a storage."""
    with unobserved():
        return list(map(getattr, map(_storage_of, tensors), repeat("_cdata")))
