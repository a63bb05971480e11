"""Kernels of an attention whose rows lie on several context-parallel ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor

from megatron.models.attention.exchange_choice import exchange_of
from megatron.models.attention.head_exchange import HeadExchange
from megatron.models.attention.kernels import build_kernel
from megatron.models.attention.ring import RingAttention
from megatron.models.attention.scores import scores_of
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.runtime.devices import device_of


def build_context_kernel(
    config: Config, ctx: ParallelContext, *, packed: bool, window: int | None = None
) -> Callable[..., Tensor]:
    """Return the kernel that attends over the rows of all context ranks. Raises ConfigError.

    As build_kernel's, but q, k and v are of this rank's own rows, and a packing is of whole ones. Collective.
    """
    model, scores = config.model, scores_of(config.model, ctx, window)
    if exchange_of(config, device_of(ctx.device.type), window) == "ring":
        return RingAttention(scores, ctx, is_plain=model.kernels == "plain")
    if scores.slopes is not None:
        scores = dataclasses.replace(scores, slopes=scores.slopes.chunk(ctx.context_size)[ctx.context_rank])
    length = config.training.seq_length
    kernel = build_kernel(model, ctx, packed=packed, window=window, length=length, scores=scores)
    return HeadExchange(kernel, ctx)
