"""Objects that broke checkpoint writers in public bug reports, and what must become of them.

Each case is written from scratch after its report. `CASES` is filled by the modules `views`,
`dtypes`, `keys` and `objects`, one a kind; `test_cases` sends every case down every road. Verdicts,
by format:

    EXACT    comes back bit for bit: types, strides, flags, key types and order too
    SHARED   exact, and tensors that shared a storage share one again
    VALUES   bytes, dtypes, shapes and keys come back; strides and wrappers may be normalised
    REFUSED  refused before anything appears at the path; the message names the culprits
    EITHER   values or a refusal; never a wrong value, never a crash
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
EXACT, SHARED, VALUES, REFUSED, EITHER = "exact", "shared", "values", "refused", "either"


@dataclass(frozen=True, slots=True)
class Case:
    """One object. report: where it comes from, or "" for one of our own.

    names: what a refusal's message must contain. file_bytes_max: of the finished file.
    weights_only: torch.load(weights_only=True) reads the torch file. large: stock readers take
    seconds, so only one of them is asked.
    """

    name: str
    make: Callable[[], object]
    report: str = ""
    torch: str = EXACT
    safetensors: str = VALUES
    names: tuple[str, ...] = ()
    file_bytes_max: int | None = None
    weights_only: bool = True
    large: bool = False
    heavy: bool = False

    def verdict(self, format_name: str) -> str:
        return self.torch if format_name == "torch" else self.safetensors


CASES: Final[dict[str, Case]] = {}


def case(
    name: str,
    report: str = "",
    *,
    verdicts: tuple[str, str] = (EXACT, VALUES),
    names: tuple[str, ...] = (),
    file_bytes_max: int | None = None,
    weights_only: bool = True,
    large: bool = False,
    heavy: bool = False,
) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Register the decorated maker. verdicts: for torch and for safetensors."""

    def register(make: Callable[[], object]) -> Callable[[], object]:
        assert name not in CASES
        CASES[name] = Case(
            name,
            make,
            report,
            *verdicts,
            names=names,
            file_bytes_max=file_bytes_max,
            weights_only=weights_only,
            large=large,
            heavy=heavy,
        )
        return make

    return register


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator(seed))


def bytes_as(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """Return count elements of any dtype, shell dtypes included, with random bits."""
    raw = random_bytes(count * dtype.itemsize, seed)
    if dtype is torch.bool:
        return raw.bool()
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (count,), (1,))
