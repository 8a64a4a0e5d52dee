"""Sources put any range of their bytes anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases.oracle import logical_bytes

from shardwright.capture.source import DeviceSource, RelayoutSource, extent_elements

if TYPE_CHECKING:
    from collections.abc import Callable

GUARD = 0xEE


def copied(source: RelayoutSource | DeviceSource, begin: int, count: int, shift: int = 0) -> bytes:
    """Ask for a range at a place with guards around it; return it, guards checked."""
    buffer = torch.full((count + 48,), GUARD, dtype=torch.uint8)
    begin_of_buffer = buffer.data_ptr() + 16 + shift
    source.copy_into(begin_of_buffer, begin, count)
    raw = buffer.numpy().tobytes()
    start = 16 + shift
    assert set(raw[:start] + raw[start + count :]) == {GUARD}
    return raw[start : start + count]


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.randn(7, 5).t(),
    "holes": lambda: torch.randn(9, 8)[::2, 1::3],
    "permuted": lambda: torch.randn(3, 4, 5, 2).permute(2, 0, 3, 1),
    "expanded": lambda: torch.randn(4, 1).expand(4, 6),
    "int16": lambda: torch.arange(60, dtype=torch.int16).view(6, 10).t(),
    "bool": lambda: torch.rand(6, 7).gt(0.5).t(),
    "complex128": lambda: torch.randn(5, 3, dtype=torch.complex128).t(),
    "conj": lambda: torch.randn(5, 3, dtype=torch.complex64).conj().t(),
    "conj half": lambda: torch.randn(5, 3).to(torch.complex32).conj(),
    "neg": lambda: torch.randn(5, 3, dtype=torch.complex64).conj().imag,
    "scalar": lambda: torch.randn(5)[3],
    "neg scalar": lambda: torch._neg_view(torch.tensor(2.5)),
    "many dims": lambda: torch.randn(2, 3).view(1, 2, 1, 1, 3, 1).transpose(1, 4),
    "float8": lambda: torch.randn(6, 4).to(torch.float8_e4m3fn).t(),
    "bits16": lambda: torch.arange(24, dtype=torch.int16).view(torch.bits16).view(4, 6).t(),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("name", TENSORS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_range_of_a_relayout_is_that_range_of_the_row_major_bytes(
    name: str, data: st.DataObject
) -> None:
    tensor = TENSORS[name]()
    want = logical_bytes(tensor)
    source = RelayoutSource(tensor)
    assert source.nbytes == len(want)
    begin = data.draw(st.integers(0, len(want)))
    count = data.draw(st.integers(0, len(want) - begin))
    shift = data.draw(st.integers(0, 15))
    assert copied(source, begin, count, shift) == want[begin : begin + count]


def test_long_ranges_that_do_not_line_up_are_copied_in_pieces() -> None:
    tensor = torch.arange(1_000_003 * 2, dtype=torch.int32).view(-1, 2)[:, 0]
    want = logical_bytes(tensor)
    assert copied(RelayoutSource(tensor), 3, len(want) - 5, shift=1) == want[3:-2]


def test_tensors_that_require_grad_are_sources_too() -> None:
    tensor = torch.randn(4, 3, requires_grad=True)
    assert copied(RelayoutSource(tensor.t()), 0, 48) == logical_bytes(tensor.t())


def test_a_storage_is_copied_as_it_lies() -> None:
    tensor = torch.arange(100, dtype=torch.int16)
    source = DeviceSource(tensor.untyped_storage(), 10, 150)
    assert copied(source, 7, 100, shift=3) == tensor.numpy().tobytes()[17:117]


def test_values_are_those_at_the_time_of_the_copy() -> None:
    tensor = torch.zeros(3, 2).t()
    source = RelayoutSource(tensor)
    tensor.fill_(1.0)
    assert copied(source, 0, 24) == logical_bytes(tensor)


def test_extents_count_the_elements_between_first_and_last() -> None:
    assert extent_elements((), ()) == 1
    assert extent_elements((3, 0), (5, 1)) == 0
    assert extent_elements((2, 3), (10, 2)) == 15
    assert extent_elements((1000,), (0,)) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [name for name in TENSORS if not name.startswith("bits")])
def test_device_tensors_are_re_laid_out_on_the_host(name: str) -> None:
    host = TENSORS[name]()
    device = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device="cuda")
    if 0 not in host.stride():
        device.copy_(host)
        source = RelayoutSource(device)
        assert copied(source, 3, source.nbytes - 3) == logical_bytes(device)[3:]
