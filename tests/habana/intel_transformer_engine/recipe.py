"""Settings of delayed scaling."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class _Largest(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Largest numbers of the forward and the backward pass. Gaudi 2's e4m3 ends at 240, not at 448."""

    E5M2 = _Largest(57344.0, 57344.0)
    HYBRID = _Largest(240.0, 57344.0)


class _OverrideLinearPrecision(NamedTuple):
    fprop: bool = False
    dgrad: bool = False
    wgrad: bool = False


_NONE = _OverrideLinearPrecision()


@dataclass
class DelayedScaling:
    margin: int = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1
    amax_compute_algo: str = "most_recent"
    override_linear_precision: _OverrideLinearPrecision = _NONE
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        assert self.amax_compute_algo in ("max", "most_recent")
        assert self.override_linear_precision in ((False, False, False), (False, False, True))
