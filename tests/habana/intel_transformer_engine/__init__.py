"""A stand-in of Intel's transformer engine that quantises to torch's float8 types on the CPU.

Its source is not published. Names and arguments are those by which Habana's Megatron-LM 1.24 calls it; what it computes
follows tests/pytest_working/any_mode/test_hpu_fp8_te.py and lazy/test_hpu_graph_fp8_te.py of
HabanaAI/gaudi-pytorch-bridge. Where it rounds stochastically, this rounds to nearest.
"""

from __future__ import annotations

from . import fp8, recipe
from .fp8 import fp8_autocast
from .linear import Linear

__all__ = ["Linear", "fp8", "fp8_autocast", "recipe"]
