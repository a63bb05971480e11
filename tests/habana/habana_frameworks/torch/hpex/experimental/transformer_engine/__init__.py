"""The transformer engine by its name in Habana's own package."""

from __future__ import annotations

from intel_transformer_engine import Linear, fp8, fp8_autocast, recipe

__all__ = ["Linear", "fp8", "fp8_autocast", "recipe"]
