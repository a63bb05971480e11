"""Operations on the scores of an attention before its softmax."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron.models.positions import own_slopes
from megatron.options.config import ModelConfig
from megatron.parallel.context import ParallelContext


@dataclass(frozen=True, eq=False)
class Scores:
    """Operations on the scores of an attention before its softmax, beside the causal mask."""

    slopes: Tensor | None = None
    """ALiBi's slope of each of this rank's heads, [n] float32."""
    window: int | None = None
    """Latest keys that a query sees, its own token's included; None: all."""
    scale: float | None = None
    """Factor of q k; None: d ** -0.5."""
    cap: float | None = None
    """Scores s become cap * tanh(s / cap), so that none is larger."""

    def is_cut(self, num_keys: int) -> bool:
        """Return True if the window hides any of so many keys."""
        return self.window is not None and self.window < num_keys


PLAIN = Scores()


def scores_of(model: ModelConfig, ctx: ParallelContext, window: int | None = None) -> Scores:
    """Return the operations on the scores of this rank's heads in layers with this window."""
    return Scores(own_slopes(model, ctx), window, model.score_factor, model.attention_softcap)
