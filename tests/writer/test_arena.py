"""Leases within one budget, and segments that cannot shrink under the writer."""

from __future__ import annotations

import fcntl
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright_proto.limits import WINDOW_BYTES_MAX, WINDOW_BYTES_MIN
from shardwright_writer.arena import (
    ArenaBudget,
    Lease,
    adopt_segment,
    create_segment,
    window_bytes_for,
)
from shardwright_writer.refusal import Refusal

MIB = 1 << 20


@given(st.lists(st.tuples(st.integers(0, 1 << 34), st.integers(1, 16)), max_size=20))
def test_leases_never_exceed_the_budget(wishes: list[tuple[int, int]]) -> None:
    budget = ArenaBudget(1 << 30)
    leased = []
    for want_bytes, ranks in wishes:
        try:
            lease_bytes, window_bytes = budget.grant(want_bytes, ranks)
        except Refusal:
            continue
        assert lease_bytes % window_bytes == 0 and lease_bytes > 0
        leased.append(lease_bytes)
        assert sum(leased) == budget.bytes_leased <= budget.bytes_max
    for lease_bytes in leased:
        budget.give_back(lease_bytes)
    assert budget.bytes_leased == 0


def test_every_rank_of_a_node_gets_an_equal_share() -> None:
    budget = ArenaBudget(1 << 30)
    shares = [budget.grant(1 << 40, 4)[0] for _ in range(4)]
    assert len(set(shares)) == 1
    assert 0.9 * 2**28 < shares[0] <= 2**28


def test_a_lease_is_not_larger_than_what_is_wanted() -> None:
    lease_bytes, window_bytes = ArenaBudget(1 << 30).grant(100 * MIB, 1)
    assert 100 * MIB <= lease_bytes < 100 * MIB + window_bytes


def test_a_latecomer_finds_a_few_windows_after_a_lease_of_everything() -> None:
    budget = ArenaBudget(256 * MIB)
    first, _ = budget.grant(0, 1)
    assert first >= 0.8 * budget.bytes_max
    late, window_bytes = budget.grant(1 << 40, 1)
    assert late == 4 * window_bytes


def test_a_lease_is_extended_only_within_its_share() -> None:
    budget = ArenaBudget(256 * MIB)
    lease_bytes, window_bytes = budget.grant(16 * MIB, 2)
    more = budget.extend(lease_bytes, 1 << 40, 2, window_bytes)
    assert more % window_bytes == 0 and lease_bytes + more <= 128 * MIB
    assert budget.extend(lease_bytes + more, 1 << 40, 2, window_bytes) == 0


def test_an_exhausted_budget_is_refused_with_a_hint() -> None:
    budget = ArenaBudget(64 * MIB)
    budget.grant(0, 1)
    for _ in range(2):
        budget.grant(0, 1)
    with pytest.raises(Refusal, match="no arena memory left") as refused:
        budget.grant(0, 1)
    assert "--memory-budget" in refused.value.hint


@given(st.integers(0, 1 << 45))
def test_windows_are_powers_of_two_within_the_limits(lease_bytes: int) -> None:
    window_bytes = window_bytes_for(lease_bytes)
    assert WINDOW_BYTES_MIN <= window_bytes <= WINDOW_BYTES_MAX
    assert window_bytes & (window_bytes - 1) == 0


def test_segments_cover_the_lease_without_overlap() -> None:
    lease = Lease(600 * MIB, 16 * MIB)
    planned = lease.plan_segments()
    assert [first for _, first, _ in planned] == [0, 16, 32]
    assert sum(size for _, _, size in planned) == lease.slot_count * 16 * MIB


def test_slots_are_views_of_their_segment_and_others_are_refused() -> None:
    lease = Lease(4 * MIB, MIB)
    for segment_id, first_slot, size in lease.plan_segments():
        lease.segments.append(create_segment(segment_id, first_slot, size))
    lease.slot(2)[0] = 7
    assert lease.segments[0].memory[2 * MIB] == 7
    with pytest.raises(Refusal, match="slot 4 is not"):
        lease.slot(4)


def test_a_created_segment_is_sealed_against_shrinking() -> None:
    segment = create_segment(0, 0, MIB)
    assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with pytest.raises(OSError):
        os.ftruncate(segment.fd, 4096)


def test_an_unsealed_or_lying_memfd_is_not_mapped() -> None:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    with pytest.raises(Refusal, match="not a sealed memfd"):
        adopt_segment(0, 0, MIB, fd)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(Refusal, match="not a sealed memfd"):
        adopt_segment(0, 0, 2 * MIB, fd)
    adopt_segment(0, 0, MIB, fd).memory[0] = 1
