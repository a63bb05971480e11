"""Llama 1, 2 and 3: RMSNorm, SwiGLU, no biases, rotary positions, MHA or GQA.

Source: Touvron et al. 2023 (arXiv:2302.13971, arXiv:2307.09288); Grattafiori et al. 2024 (arXiv:2407.21783).
"""

from __future__ import annotations

from deepspeed.pipe import LayerSpec

from megatron.config.options import Config
from megatron.models.transformer import SwigluMLP, transformer
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import RMSNorm


def layers(config: Config, ctx: ParallelContext) -> list[LayerSpec]:
    return transformer(config, ctx, norm=RMSNorm, mlp=SwigluMLP, bias=False)
