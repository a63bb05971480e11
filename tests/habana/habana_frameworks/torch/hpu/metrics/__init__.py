"""Metrics of a process: lists of (name, number or table)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from habana_frameworks.torch import stand_in


class Metric:
    def __init__(self, name: str, read: Callable[[], Sequence[tuple[str, Any]]]) -> None:
        self._name, self._read = name, read

    def name(self) -> str:
        return self._name

    def stats(self) -> Sequence[tuple[str, Any]]:
        return self._read()


def _graphs() -> list[tuple[str, Any]]:
    count = stand_in.compiled
    return [("TotalNumber", count), ("TotalTime", 1000 * count), ("AvgTime", 1000.0 if count else 0)]


def _fallbacks() -> list[tuple[str, Any]]:
    return [("TotalNumber", sum(stand_in.fallbacks.values())), ("FallbackOps", dict(stand_in.fallbacks))]


def _defragmentations() -> list[tuple[str, Any]]:
    tried, successful = stand_in.defragmentations
    return [("TotalNumber", tried), ("TotalSuccessful", successful), ("AvgTime", 0), ("MaxTime", 0)]


def _cache() -> list[tuple[str, Any]]:
    hits, misses = stand_in.recipe_cache
    return [("TotalHit", hits), ("RecipeHit", {}), ("TotalMiss", misses), ("RecipeMiss", {})]


METRICS = {"graph_compilation": _graphs, "cpu_fallback": _fallbacks, "memory_defragmentation": _defragmentations}


def metric_global(name: str) -> Metric | None:
    """None for a name that is not registered, such as recipe_cache without PT_HPU_ENABLE_CACHE_METRICS."""
    if name == "recipe_cache" and os.environ.get("PT_HPU_ENABLE_CACHE_METRICS") == "1":
        return Metric(name, _cache)
    return Metric(name, METRICS[name]) if name in METRICS else None
