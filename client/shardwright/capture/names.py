"""Where things sit in an object, in words: "optimizer.state.0.exp_avg".

Shards are named after the first place where their tensor is found, and errors name what they are
about. `find` is called when a structure is seen for the first time; `find_unpicklable` only after
pickling has failed. Names are for people: nobody parses them, and they need not be unique.
"""

from __future__ import annotations

import types
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import torch

from shardwright_proto.limits import NAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT: Final = "<root>"
UNKNOWN: Final = "<unnamed>"
_ATOMS: Final = (str, bytes, int, float, complex, bool, type(None))
_PLAIN: Final = {torch.Tensor}
_FUNCTIONS: Final = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


class Namer:
    """Names for what stands in an object, looked up when somebody asks.

    owners: of subjects that exist only while their owner is pickled; they go by its name.
    """

    def __init__(
        self, obj: object, subjects: Sequence[object] = (), owners: Sequence[object] = ()
    ) -> None:
        self._obj = obj
        self._subjects = subjects
        self._owners = owners
        self._names: dict[int, str] | None = None
        self._deep = False

    def name(self, subject: object) -> str:
        """Return one subject's name."""
        return self.all([subject])[0]

    def all(self, subjects: list[Any]) -> list[str]:
        """Return the names of subjects as the wire carries them."""
        if self._names is None:
            self._names = find(self._obj)
        found = list(map(self._names.get, map(id, subjects)))
        if None in found and not self._deep:
            self._deep = True
            self._names = find(self._obj, deep=True) | self._names
            found = list(map(self._names.get, map(id, subjects)))
        if None in found:
            owner_of = dict(zip(map(id, self._subjects), self._owners, strict=True))
            found = [
                self._names.get(id(owner_of.get(id(subject))), UNKNOWN) if name is None else name
                for subject, name in zip(subjects, found, strict=True)
            ]
        return [UNKNOWN if name is None else fit(name) for name in found]


def find(obj: object, *, deep: bool = False) -> dict[int, str]:
    """Return id -> name of the first place, for what containers and modules hold.

    deep: also look into the attributes of other objects. Breadth first, so that a name is the
    shortest one. Runs no code of the user's. Ids are those of living objects: they mean something
    only while obj is unchanged.
    """
    names: dict[int, str] = {id(obj): ROOT}
    queue: deque[tuple[Any, str]] = deque([(obj, "")])
    while queue:
        parent, prefix = queue.popleft()
        if type(parent) is dict and set(map(type, parent.values())) == _PLAIN:
            for key, address in zip(parent, map(id, parent.values()), strict=True):
                names.setdefault(address, prefix + (key if type(key) is str else key_text(key)))
            continue
        for key, child in children(parent, deep=deep):
            cls = type(child)
            if cls in _ATOMS or id(child) in names:
                continue
            names[id(child)] = name = prefix + (key if type(key) is str else key_text(key))
            if cls is not torch.Tensor:
                queue.append((child, name + "."))
    return names


def children(obj: object, *, deep: bool = True) -> Iterator[tuple[Any, Any]]:
    """Yield (key, child) of a container or module; deep: and of an object's attributes."""
    cls = type(obj)  # not isinstance: a proxy's __class__ may run anything
    if issubclass(cls, dict):
        yield from dict.items(obj)  # type: ignore[arg-type]
    elif issubclass(cls, list | tuple | set | frozenset):
        yield from enumerate(obj)  # type: ignore[arg-type]
    elif issubclass(cls, torch.nn.Module):
        for held in ("_parameters", "_buffers", "_modules"):
            yield from vars(obj).get(held, {}).items()
    if deep and not issubclass(cls, _FUNCTIONS):
        try:
            attributes = object.__getattribute__(obj, "__dict__")
        except AttributeError:
            return
        yield from attributes.items()


def key_text(key: object) -> str:
    """Return a key as part of a name; whatever its class does, this does not raise."""
    if isinstance(key, str):
        return key
    try:
        return repr(key)[:200]
    except Exception:  # noqa: BLE001  a repr of the user's: the name is not worth the save
        return f"<{type(key).__name__}>"


def fit(name: str) -> str:
    """Return a name as the wire carries it: UTF-8, within its limit."""
    if name.isascii() and len(name) <= NAME_BYTES_MAX:
        return name
    raw = name.encode("utf-8", "backslashreplace")
    if len(raw) > NAME_BYTES_MAX:
        raw = raw[: NAME_BYTES_MAX - 3] + b"..."
    return raw.decode("utf-8", "ignore")


def find_unpicklable(obj: object, try_pickle: Callable[[object], bool]) -> tuple[str, object]:
    """Return the name and the value of the deepest thing in obj that does not pickle.

    try_pickle says whether an object pickles by itself. Every level costs at most one attempt
    per child, each of which leaves tensor data out.
    """
    prefix, culprit = "", obj
    seen: set[int] = set()
    while id(culprit) not in seen:
        seen.add(id(culprit))
        for key, child in children(culprit):
            if type(child) in _ATOMS or try_pickle(child):
                continue
            prefix, culprit = f"{prefix}{key_text(key)}.", child
            break
    return prefix[:-1] or ROOT, culprit
