"""The structure of an object without its tensors' data: what must be equal for a plan to be reused.

`read` walks builtin containers in the pickler's order and lists keys, types, sharing of containers,
and the values of immutable leaves, each in a form in which == means "pickles the same": types are
compared beside values (1, True and 1.0 differ), floats by their bits. Used by `cache`. Does not
look into anything else: such objects make the structure `opaque`, and it is pickled every time.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

import torch

LEAF_BYTES_MAX: Final = 1 << 20
LEAVES_MAX: Final = 1 << 16
"""Longer strings, or more leaves in one container, are not worth keeping for a comparison."""

_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_EXACT: Final = frozenset({int, bool, type(None), torch.dtype, torch.device})
_SIZED: Final = frozenset({str, bytes})
_CONTAINERS: Final = frozenset({dict, OrderedDict, list, tuple})
_SIMPLE_KEYS: Final = _EXACT | _SIZED
_STR: Final = frozenset({str})
_PLAIN_TENSORS: Final = frozenset({torch.Tensor})


@dataclass(slots=True)
class Structure:
    """The result of a walk. Only `tensors` refers to tensors; it is not for keeping.

    shape: containers in walk order: type, keys and types of values. leaves: values of leaves.
    opaque: something is in there that only the pickler understands.
    """

    shape: list[Any] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    opaque: bool = False
    seen: dict[int, int] = field(default_factory=dict)


def read(obj: object) -> Structure | None:
    """Walk an object. None: not worth it (nested too deeply), or not safe to compare."""
    structure = Structure([type(obj)])
    try:
        _visit(structure, (obj,), (type(obj),))
    except (RecursionError, _IncomparableError):
        return None
    return structure


class _IncomparableError(Exception):
    """A dict key whose == may mean anything."""


def _visit(structure: Structure, values: Any, types: Any) -> None:
    for value, cls in zip(values, types, strict=True):
        if cls in _TENSORS:
            structure.tensors.append(value)
        elif cls in _EXACT:
            structure.leaves.append(value)
        elif cls is float:
            structure.leaves.append(struct.pack("<d", value))
        elif cls in _SIZED and len(value) <= LEAF_BYTES_MAX:
            structure.leaves.append(value)
        elif cls in _CONTAINERS:
            _container(structure, value, cls)
        elif cls is torch.Size:
            structure.leaves.append((tuple(map(type, value)), tuple(value)))
        else:
            structure.opaque = True


def _container(structure: Structure, value: Any, cls: type) -> None:
    number = structure.seen.get(id(value))
    if number is not None:
        structure.shape.append(("again", number))
        return
    structure.seen[id(value)] = len(structure.seen)
    keyed = cls is dict or cls is OrderedDict
    values = list(value.values()) if keyed else value
    distinct = frozenset(map(type, values))
    kinds: Any
    if distinct == _PLAIN_TENSORS:
        kinds = len(values)
    elif len(values) > LEAVES_MAX and not distinct & (_TENSORS | _CONTAINERS):
        kinds = structure.opaque = True
    else:
        kinds = tuple(map(type, values))
    structure.shape.append((cls, _key_tokens(list(value)) if keyed else None, kinds))
    if distinct and distinct <= _TENSORS:
        structure.tensors.extend(values)
    elif kinds is not True:
        _visit(structure, values, kinds)
    if cls is OrderedDict and vars(value):
        _container(structure, vars(value), dict)


def _key_tokens(keys: list[Any]) -> Any:
    """Return what stands for a dict's keys: themselves, and their types unless all are str."""
    types = tuple(map(type, keys))
    distinct = frozenset(types)
    if distinct <= _STR:
        return keys
    if distinct <= _SIMPLE_KEYS:
        return types, keys
    return types, tuple(map(_key_token, keys))


def _key_token(key: Any) -> Any:
    cls = type(key)
    if cls in _SIMPLE_KEYS:
        return cls, key
    if cls is float:
        return cls, struct.pack("<d", key)
    if cls is tuple:
        return cls, tuple(map(_key_token, key))
    raise _IncomparableError
