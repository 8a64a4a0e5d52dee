"""Grouping of bytes into records, and packing of views with holes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.capture.columns import Columns
from shardwright.capture.source import extent_elements
from shardwright.capture.storages import group, overlaps, packed_strides


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_records_hold_every_referenced_byte_and_overlaps_once(data: st.DataObject) -> None:
    buffers = [torch.arange(64, dtype=torch.int32) for _ in range(2)]
    tensors = []
    for _ in range(data.draw(st.integers(1, 8))):
        begin = data.draw(st.integers(0, 63))
        end = data.draw(st.integers(begin, 64))
        step = data.draw(st.sampled_from([1, 1, 1, 2, 3]))
        tensors.append(data.draw(st.sampled_from(buffers))[begin:end:step])
    columns = Columns.read(tensors)
    records = group(columns, tensors)
    clusters = overlaps(columns, tensors)
    together = {index: number for number, cluster in enumerate(clusters) for index in cluster}
    for i, first in enumerate(tensors):
        for j, second in enumerate(tensors[:i]):
            same = records.record_of[i] == records.record_of[j]
            assert same == (i in together and together[i] == together.get(j))
            bytes_shared = spans_meet(first, second)
            assert not bytes_shared or same
    for index, tensor in enumerate(tensors):
        record = records.record_of[index]
        shape, stride = tuple(tensor.shape), records.strides[index]
        end = records.offsets[index] + extent_elements(shape, stride)
        assert tensor.numel() == 0 or end * 4 <= records.nbytes[record]
    assert len(set(records.record_of)) == len(records.nbytes)
    assert list(dict.fromkeys(records.record_of)) == list(range(len(records.nbytes)))


def spans_meet(first: torch.Tensor, second: torch.Tensor) -> bool:
    if not first.numel() or not second.numel():
        return False
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return False
    spans = []
    for tensor in (first, second):
        begin = tensor.storage_offset()
        spans.append((begin, begin + extent_elements(tuple(tensor.shape), tensor.stride())))
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
)
def test_packing_keeps_values_and_closes_all_holes(shape: list[int], steps: list[int]) -> None:
    stride = tuple(steps[: len(shape)])
    size = tuple(shape)
    packed = packed_strides(size, stride)
    extent = extent_elements(size, stride)
    if packed is None:
        return
    base = torch.arange(extent)
    view = base.as_strided(size, stride)
    dense = tuple(n if step else 1 for n, step in zip(size, stride, strict=True))
    elements = view.as_strided(dense, stride).contiguous().reshape(-1)
    assert elements.numel() < extent
    assert len(set(elements.tolist())) == elements.numel(), "an element was counted twice"
    assert torch.equal(elements.as_strided(size, packed), view)


def test_views_without_holes_are_left_as_they_lie() -> None:
    for tensor in (
        torch.ones(4, 5).t(),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(3, 1).expand(3, 7),
        torch.ones(20).unfold(0, 5, 1),
        torch.ones(1, 9)[:, :9],
        torch.tensor(1.0),
    ):
        assert packed_strides(tuple(tensor.shape), tensor.stride()) is None
