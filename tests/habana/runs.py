"""Whole runs inside the ranks of tests/ranks.py, on the CPU with Habana's packages importable."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron import accelerator
from megatron.config.options import Config, ModelConfig
from megatron.models.attention import FusedHPUAttention, own_slopes
from megatron.parallel.context import ParallelContext
from megatron.parallel.kernels import habana
from tests.runs import train


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Packages that are found, but not loaded."""
    sys.path.insert(0, str(Path(__file__).parent))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.pop(0)
        for name in loaded():
            del sys.modules[name]
        importlib.invalidate_caches()


def loaded() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "habana_frameworks"]


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
        return train(arguments), Counter(name for name, _ in stand_in.calls)
