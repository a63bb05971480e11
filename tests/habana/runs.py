"""Whole runs inside the ranks of tests/ranks.py with Habana's packages importable: on the CPU, and in fp8 on hpu."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.habana import importable, loaded
from tests.habana.devices import on_hpu
from tests.runs import train


def train_on_cpu(arguments: str) -> tuple[str, list[str]]:
    """The fault of a run, and the modules of Habana's that it loaded."""
    with importable():
        return train(arguments), loaded()


@dataclass(frozen=True)
class Fp8Run:
    """What a rank saw of a run in fp8."""

    fault: str
    calls: Counter[str]
    readers: set[str]
    """Files whose lines wait for the device."""
    recipes: list[dict[str, Any]]
    scales: list[list[float]]
    """Of each layer of the engine: those of inputs, weights and outputs' gradients."""
    histories: list[list[list[float]]]
    """Largest absolute values of inputs and weights, newest first."""
    casts: list[int]
    """How often each weight was quantised."""
    cached: int
    smooth: int


def plain(recipe: Any) -> dict[str, Any]:
    """Values of types that are not loaded where a test reads them."""
    return {
        "fp8_format": recipe.fp8_format.name,
        "override_linear_precision": tuple(recipe.override_linear_precision),
    }


def train_in_fp8(arguments: str) -> Fp8Run:
    """A run on hpu with the stand-in of the transformer engine, on this rank."""
    with on_hpu():
        stand_in = importlib.import_module("habana_frameworks.torch.stand_in")
        linear = importlib.import_module("intel_transformer_engine.linear")
        fault = train(f"--bf16 --device hpu {arguments}", "hpu")
        layers = [layer for layer in linear.built if layer.fp8_meta]
        return Fp8Run(
            fault,
            Counter(name for name, _ in stand_in.calls),
            {Path(call["where"].rsplit(":", 1)[0]).name for call in stand_in.called("host_read")},
            [vars(call["recipe"]) | plain(call["recipe"]) for call in stand_in.called("fp8_autocast")[:1]],
            [
                [float(scale) for name in ("fwd", "bwd") for scale in layer.fp8_meta[f"scaling_{name}"].scale]
                for layer in layers
            ],
            [layer.fp8_meta["scaling_fwd"].amax_history.tolist() for layer in layers],
            [layer.casts for layer in layers],
            sum(not layer.minimize_memory for layer in layers),
            sum(layer.use_fp8_smooth_swiglu for layer in layers),
        )
