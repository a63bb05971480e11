"""BLOOM: LayerNorm, GELU, biases, learned or ALiBi positions, tied embeddings.

BLOOM-13B (tr1-13B) has learned positions and no embedding LayerNorm; BLOOM-176B and its family ALiBi and one.
Source: Le Scao et al. 2022 (arXiv:2211.05100).
"""

from __future__ import annotations

from deepspeed.pipe import LayerSpec

from megatron.config.options import Config
from megatron.models.transformer import GeluMLP, transformer
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import LayerNorm


def layers(config: Config, ctx: ParallelContext) -> list[LayerSpec]:
    return transformer(config, ctx, norm=LayerNorm, mlp=GeluMLP, bias=True)
