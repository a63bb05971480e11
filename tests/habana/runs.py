"""Whole runs inside the ranks of tests/ranks.py, on the CPU with Habana's packages importable."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from megatron import accelerator
from megatron.config.options import Config, ModelConfig
from megatron.models.attention import FusedHPUAttention, own_slopes
from megatron.parallel.context import ParallelContext
from megatron.parallel.kernels import habana
from tests.habana import importable, loaded
from tests.runs import train


def train_on_cpu(arguments: str) -> tuple[str, list[str]]:
    """The fault of a run, and the modules of Habana's that it loaded."""
    with importable():
        return train(arguments), loaded()


def attention(model: ModelConfig, ctx: ParallelContext, *, packed: bool) -> Any:
    return FusedHPUAttention(own_slopes(model, ctx), recompute=model.fused_sdpa_recompute)


def optimizer(config: Config, ctx: ParallelContext) -> Any:
    options = config.optimizer
    fused = importlib.import_module("habana_frameworks.torch.hpex.optimizers").FusedAdamW
    return fused, {"betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_eps}


def train_with_habanas_kernels(arguments: str) -> tuple[str, Counter[str]]:
    """The fault of a run in lazy mode with Habana's kernels and optimizer on CPU tensors, and its calls of them."""
    with (
        importable(),
        patch.object(accelerator, "is_lazy", lambda device: True),
        patch("megatron.models.attention.build_kernel", attention),
        patch("megatron.models.attention.choose_kernels", lambda *_, **__: habana(fused_norm=True)),
        patch("megatron.training.optimizer._choose", optimizer),
    ):
        stand_in = importlib.import_module("habana_frameworks.torch.stand_in")
        fault, calls = train(arguments), Counter(name for name, _ in stand_in.calls)
        calls["shapes of FusedSDPA"] = len({call["shape"] for call in stand_in.called("FusedSDPA")})
        return fault, calls


@dataclass(frozen=True)
class Fp8Run:
    """What a rank saw of a run in fp8."""

    fault: str
    calls: Counter[str]
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
    """A run on CPU tensors with the stand-in of the transformer engine, on this rank."""
    with importable(), patch("megatron.config.validation.check_fp8_device", lambda config: []):
        stand_in = importlib.import_module("habana_frameworks.torch.stand_in")
        linear = importlib.import_module("intel_transformer_engine.linear")
        fault = train(f"--bf16 {arguments}")
        layers = [layer for layer in linear.built if layer.fp8_meta]
        return Fp8Run(
            fault,
            Counter(name for name, _ in stand_in.calls),
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
