"""The torch format's skeleton: one run of the C pickler, with placeholders for tensor data.

`pickle_object` runs the pickler over the object. Where a plain tensor, Parameter or storage stands
it leaves a placeholder and notes the object; `splice` puts the opcodes from `opcodes` in their
place. Everything else goes through its own reduce, exactly as under torch.save. Called by
`torch_format`; it does not know addresses or records, and never unpickles.
"""

from __future__ import annotations

import copyreg
import pickle
import secrets
import sys
import types
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch.utils.hooks import warn_if_has_hooks

from shardwright.capture.columns import UNREADABLE, attributes_of
from shardwright.capture.source import extent_elements

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

_PROTOCOL: Final = 2
_NONCE_BYTES: Final = 24
_MEMO_ROUNDING: Final = 1024

_ATOMS: Final = frozenset({str, int, float, bool, type(None), bytes, dict, list, tuple})
_NAMELESS: Final = frozenset(
    {
        types.FunctionType,
        types.BuiltinFunctionType,
        OrderedDict,
        torch.Size,
        torch.dtype,
        torch.device,
        torch.layout,
    }
)
NO_STORAGE_DEVICES: Final = frozenset({"xla", "maia", "mtia"})
_STORAGES: Final = (torch.TypedStorage, torch.UntypedStorage)
_PLAIN_ON_CPU: Final = (torch.strided, False, False, True)


class RefusedError(Exception):
    """An object in the tree cannot be saved. torch_format finds out under which key it is."""

    def __init__(self, subject: object, message: str, hint: str = "") -> None:
        super().__init__(subject, message, hint)
        self.subject = subject
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Pickled:
    """A pickle in pieces, cut where objects with data stand, and those objects.

    pieces: one more than subjects. owners: the last object with a reduce of its own that was met
    before each subject: it names those that exist only while their owner is pickled.
    memo_base: memo slots from here on are free.
    """

    pieces: list[bytes]
    subjects: list[Any]
    owners: list[Any]
    memo_base: int


def pickle_object(obj: object, plain: Container[int] = frozenset()) -> Pickled:
    """Run the pickler over obj. Raises RefusedError, and whatever an object's reduce raises.

    plain: ids of tensors that are known to be strided memory and nothing else.
    """
    chunks = _Chunks()
    pickler = _TorchPickler(chunks, plain)
    pickler.dump(obj)
    data = b"".join(chunks) if len(chunks) > 1 else chunks[0]
    chunks.clear()
    pickler.dump([])  # takes one more memo slot, whose number tells how many there are
    memo_size = _memo_slot(b"".join(chunks)) + 1
    pieces = data.split(pickler.placeholder)
    assert len(pieces) == len(pickler.subjects) + 1, "a placeholder was lost, or is there by chance"
    base = -(-memo_size // _MEMO_ROUNDING) * _MEMO_ROUNDING
    return Pickled(pieces, pickler.subjects, pickler.owners, base)


def splice(pickled: Pickled, parts: Sequence[bytes]) -> bytes:
    """Return the pickle with parts in the placeholders' places."""
    assert len(parts) == len(pickled.subjects)
    pieces: list[bytes] = [b""] * (2 * len(parts) + 1)
    pieces[::2] = pickled.pieces
    pieces[1::2] = parts
    return b"".join(pieces)


class _Chunks(list[bytes]):
    """What the pickler writes, without a copy."""

    def write(self, data: bytes) -> None:
        self.append(data)


class _TorchPickler(pickle.Pickler):
    """Puts the same placeholder wherever data stands; the order tells which is which."""

    def __init__(self, file: _Chunks, plain: Container[int]) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.dispatch_table = {**copyreg.dispatch_table, torch.memory_format: _memory_format}
        nonce = secrets.token_bytes(_NONCE_BYTES - 1) + b"\x01"  # positive, and exactly as long
        self.placeholder = b"\x8a" + bytes((_NONCE_BYTES,)) + nonce + b"Q"
        self.subjects: list[Any] = []
        self.owners: list[Any] = []
        self._number = int.from_bytes(nonce, "little")
        self._plain = plain
        self._owner: Any = None

    def persistent_id(self, obj: Any) -> int | None:
        """Return what stands for obj. Called for every object: half of a first capture's time."""
        cls = type(obj)
        if cls is str or cls in _ATOMS:
            return None
        if cls is torch.Tensor or cls is torch.nn.Parameter:
            if id(obj) in self._plain or _is_plain(obj):
                self.subjects.append(obj)
                self.owners.append(self._owner)
                return self._number
        elif isinstance(obj, _STORAGES):
            self.subjects.append(obj)
            self.owners.append(self._owner)
            return self._number
        elif isinstance(obj, torch.Tensor):
            _check_subclass(obj)
        if cls not in _NAMELESS and not isinstance(obj, type):
            self._owner = obj
        return None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a torch.Tensor or Parameter is strided memory and nothing else.

    What lies on a device without storages goes through torch's own reduce, by way of the CPU.
    """
    if attributes_of(tensor):
        return False
    facts = (tensor.layout, tensor.is_quantized, tensor.is_nested, tensor.is_cpu)
    if facts != _PLAIN_ON_CPU and (
        facts[:3] != _PLAIN_ON_CPU[:3] or tensor.device.type in NO_STORAGE_DEVICES
    ):
        return False
    if tensor.requires_grad and tensor._backward_hooks:
        warn_if_has_hooks(tensor)
    return True


def _memory_format(value: torch.memory_format) -> str:
    """Reduce a memory format to its name in torch; its own reduce makes pickle fail."""
    return str(value).removeprefix("torch.")


def _memo_slot(data: bytes) -> int:
    """Read the memo slot out of the pickle of an empty list."""
    body = data[3:]  # PROTO 2 EMPTY_LIST
    if body[:1] == b"q":
        return body[1]
    assert body[:1] == b"r", f"unexpected pickle of an empty list: {data!r}"
    return int.from_bytes(body[1:5], "little")


def _check_subclass(tensor: torch.Tensor) -> None:
    """Refuse tensor subclasses of which torch's own reduce would keep the outer shell only."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(tensor, fake.FakeTensor):
        raise RefusedError(tensor, "is a FakeTensor, which holds no data")
    if type(tensor).__reduce_ex__ is not torch.Tensor.__reduce_ex__:
        if not isinstance(tensor, torch.nn.Parameter):
            return
    elif _is_shell(tensor):
        if not _holds_its_data(tensor):
            raise RefusedError(
                tensor,
                f"is a {type(tensor).__qualname__}, whose data torch.save would leave out",
                "Give the class a __reduce_ex__, or save its inner tensors",
            )
        return
    if tensor.layout is torch.strided and not torch.nn.parameter.is_lazy(tensor):
        _check_reaches(tensor)


def _check_reaches(tensor: torch.Tensor) -> None:
    """Refuse a tensor whose storage was freed or shrunk under it."""
    try:
        nbytes = tensor.untyped_storage().nbytes()
    except UNREADABLE:
        return
    elements = extent_elements(tuple(tensor.shape), tensor.stride())
    needed = (tensor.storage_offset() + elements) * tensor.element_size() if elements else 0
    if needed > nbytes:
        raise RefusedError(
            tensor,
            f"needs {needed} bytes of its storage, which holds {nbytes}: it was freed",
            "Gather the full parameters before saving (FSDP: state_dict())",
        )


def _is_shell(tensor: torch.Tensor) -> bool:
    dispatch = type(tensor).__torch_dispatch__
    if dispatch is torch.Tensor.__torch_dispatch__:
        return False
    functional = sys.modules.get("torch._subclasses.functional_tensor")
    if functional is not None and isinstance(tensor, functional.FunctionalTensor):
        return True
    return tensor.data_ptr() == 0 and tensor.numel() > 0


def _holds_its_data(tensor: torch.Tensor) -> bool:
    """Say whether a wrapper's inner tensors are in its Python state, which gets pickled."""
    state = _state_of(tensor)
    if not hasattr(tensor, "__tensor_flatten__"):
        return any(isinstance(value, torch.Tensor) for value in state.values())
    held = set(map(id, state.values()))
    inner = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    return all(
        name in state or id(value) in held
        for name, value in inner.items()
        if isinstance(value, torch.Tensor)
    )


def _state_of(tensor: torch.Tensor) -> dict[str, Any]:
    state = torch._utils._get_obj_state(tensor)  # type: ignore[no-untyped-call]
    if isinstance(state, tuple):
        merged: dict[str, Any] = {}
        for part in state:
            merged.update(part or {})
        return merged
    return cast("dict[str, Any]", state or {})
