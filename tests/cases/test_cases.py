"""Every case of the bank, by every road, in both formats: saved twice, loaded by stock readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from tests.cases import dtypes, keys, objects, views
from tests.cases.bank import CASES, EITHER, EXACT, REFUSED, SHARED
from tests.cases.oracle import differences, sharing
from tests.cases.reference import REFUSALS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cases.bank import Case
    from tests.cases.reference import Road

assert all((dtypes, keys, objects, views))  # importing them fills the bank

SUFFIX = {"torch": ".pt", "safetensors": ".safetensors"}


def parameters() -> list[Any]:
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.heavy] if case.heavy else [])
        for case in CASES.values()
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, about the odd tensors made here
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("format_name", ["torch", "safetensors"])
@pytest.mark.parametrize("case", parameters())
def test_a_case_gets_its_verdict(case: Case, format_name: str, road: Road, tmp_path: Path) -> None:
    obj = case.make()
    path = tmp_path / f"checkpoint{SUFFIX[format_name]}"
    verdict = case.verdict(format_name)
    try:
        road(obj, path, format_name)
    except REFUSALS as refusal:
        assert verdict in (REFUSED, EITHER), f"refused: {refusal}"
        assert all(name in str(refusal) for name in case.names), f"names no culprit: {refusal}"
        assert not list(tmp_path.iterdir()), "something was left behind"
        return
    assert verdict != REFUSED, "it was saved"
    road(obj, path, format_name)  # the second time its structure is known
    check(case, obj, path, format_name)


def check(case: Case, obj: object, path: Path, format_name: str) -> None:
    """Check a finished file against the object that it was made from."""
    exact = case.verdict(format_name) in (EXACT, SHARED)
    for got in load(case, path, format_name):
        found = differences(obj, got, exact=exact, ordered=format_name == "torch")
        assert not found, "\n".join(found[:20])
        if case.verdict(format_name) == SHARED:
            assert sharing(got) == sharing(obj)
    if case.file_bytes_max is not None:
        assert path.stat().st_size <= case.file_bytes_max


def load(case: Case, path: Path, format_name: str) -> list[Any]:
    """Load a file in every way that its stock reader has."""
    if format_name == "safetensors":
        return [safetensors.torch.load_file(path)]
    if case.large:
        return [torch.load(path, weights_only=False)]
    loaded = [
        torch.load(path, weights_only=False),
        torch.load(path, weights_only=False, mmap=True),
    ]
    if case.weights_only:
        loaded.append(torch.load(path, weights_only=True))
    return loaded
