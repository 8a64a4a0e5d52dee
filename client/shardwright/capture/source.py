"""Where a shard's bytes come from when they do not lie ready on the host.

A shard that is plain host memory travels by address alone. The others are asked, window by window,
to put a range of their bytes at a place in the arena: memory of a device, strided views that are
packed on the way, tensors whose values are lazily conjugated or negated. Made by the two
formats' captures, called by the stager's thread. Never holds a second copy of a host tensor; a
device tensor that must be re-laid out is copied to the host once, for as long as it is staged.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

unobserved: Final[Callable[[], contextlib.AbstractContextManager[Any]]] = (
    torch._C.DisableTorchFunction
)
"""Within it no torch function mode sees an access. torch.set_default_device installs such a mode,
which would make each access to each tensor a hundred times slower."""

_PIECE_ELEMENTS: Final = 1 << 18
"""How much is packed at once where source and destination do not line up."""

_RAW_DTYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Source(Protocol):
    """One shard's bytes, on demand."""

    @property
    def nbytes(self) -> int:
        """Length of the shard."""
        ...

    def copy_into(self, address: int, begin: int, count: int) -> None:
        """Put bytes [begin, begin + count) of the shard at host address.

        Called between capture and the shard's last acknowledged window, from any one thread at a
        time, in any order. On return the bytes are there: nothing is left in flight on a device.
        """
        ...


class DeviceSource:
    """A byte range of a storage that is not on the host."""

    __slots__ = ("_bytes", "_stream", "nbytes")

    def __init__(self, storage: torch.UntypedStorage, begin: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._bytes = storage_bytes(storage, begin, nbytes)
        self._stream = _stream_of(storage.device)

    def copy_into(self, address: int, begin: int, count: int) -> None:
        """See Source. The copy waits for what the trainer's stream held at capture."""
        if count:
            with torch.no_grad(), unobserved(), _on_stream(self._stream):
                host_bytes(address, count).copy_(self._bytes[begin : begin + count])


class RelayoutSource:
    """A strided tensor, row-major and without gaps; conj and neg bits are carried out."""

    __slots__ = ("_host", "_stream", "_tensor", "dtype", "nbytes")

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        lazy = tensor.is_conj() or tensor.is_neg()
        if not lazy and tensor.element_size() in _RAW_DTYPES:
            # Copied as integers: exact for every NaN, and shell dtypes have no copy of their own.
            tensor = tensor.view(_RAW_DTYPES[tensor.element_size()])
        self._tensor = tensor
        self._host: torch.Tensor | None = tensor if tensor.device.type == "cpu" else None
        self._stream = _stream_of(tensor.device)
        self.dtype = tensor.dtype
        self.nbytes = tensor.numel() * tensor.element_size()

    def copy_into(self, address: int, begin: int, count: int) -> None:
        """See Source."""
        if not count:
            return
        end = begin + count
        assert 0 <= begin < end <= self.nbytes
        with torch.no_grad(), unobserved():
            tensor = self._on_host()
            item = tensor.element_size()
            if begin % item or end % item or address % item:
                _copy_through_pieces(tensor, address, begin, end)
            else:
                out = host_bytes(address, count).view(tensor.dtype)
                _copy_elements(out, tensor, begin // item, end // item)
        if end == self.nbytes and self._host is not self._tensor:
            self._host = None

    def _on_host(self) -> torch.Tensor:
        if self._host is None:
            self._host = _raw_copy_on_host(self._tensor, self._stream)
        return self._host


def host_bytes(address: int, count: int) -> torch.Tensor:
    """Return a uint8 tensor over count (> 0) bytes of memory that somebody else keeps alive."""
    memory = (ctypes.c_char * count).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def storage_bytes(storage: torch.UntypedStorage, begin: int, nbytes: int) -> torch.Tensor:
    """Return a uint8 view of a part of a storage, on its device."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, begin, (nbytes,), (1,))


def storage_begin(tensor: torch.Tensor) -> int:
    """Return how many bytes of its storage lie before a tensor's first element."""
    return int(tensor.storage_offset()) * tensor.element_size()


def extent_elements(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return how many elements lie between a tensor's first and last, both counted."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _copy_elements(out: torch.Tensor, tensor: torch.Tensor, first: int, last: int) -> None:
    """Copy elements [first, last) of the row-major order of tensor into out (flat)."""
    while tensor.dim() > 1 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() == 0:
        out.copy_(tensor.reshape(1))
        return
    if tensor.dim() == 1:
        out.copy_(tensor[first:last])
        return
    row_elements = tensor[0].numel()
    row, skipped = divmod(first, row_elements)
    if skipped:
        taken = min(row_elements - skipped, last - first)
        _copy_elements(out[:taken], tensor[row], skipped, skipped + taken)
        out, first, row = out[taken:], first + taken, row + 1
    rows = (last - first) // row_elements
    if rows:
        whole = rows * row_elements
        out[:whole].view(rows, *tensor.shape[1:]).copy_(tensor[row : row + rows])
        out, first, row = out[whole:], first + whole, row + rows
    if first < last:
        _copy_elements(out, tensor[row], 0, last - first)


def _copy_through_pieces(tensor: torch.Tensor, address: int, begin: int, end: int) -> None:
    """Copy bytes [begin, end) where they do not fall on elements, through a small buffer."""
    item = tensor.element_size()
    while begin < end:
        first = begin // item
        last = min(first + _PIECE_ELEMENTS, -(-end // item))
        piece = torch.empty(last - first, dtype=tensor.dtype, device="cpu")
        _copy_elements(piece, tensor, first, last)
        stop = min(end, last * item)
        part = piece.view(torch.uint8)[begin - first * item : stop - first * item]
        host_bytes(address, stop - begin).copy_(part)
        address += stop - begin
        begin = stop


def _raw_copy_on_host(tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    """Bring the bytes behind a device tensor to the host as they lie: no work on the device."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    nbytes = extent_elements(shape, stride) * tensor.element_size()
    begin = storage_begin(tensor)
    raw = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    with _on_stream(stream):
        raw.copy_(storage_bytes(tensor.untyped_storage(), begin, nbytes))
    copy = raw.view(tensor.dtype).as_strided(shape, stride)
    if tensor.is_conj():
        copy = copy.conj()
    return torch._neg_view(copy) if tensor.is_neg() else copy


def _stream_of(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
