"""Options of preference training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron.config.types import STRICT, NonNegativeFloat, Positive, PositiveFloat

Objective = Literal["sigmoid", "hinge", "ipo", "robust"]


@dataclass(frozen=True, config=STRICT)
class PreferenceConfig:
    """Preference training: the objective, its reference, and the lengths of pairs."""

    preference_loss: Objective = "sigmoid"
    """Objective. `sigmoid`: DPO. `hinge`: SLiC on DPO's margins. `ipo`: IPO, over the mean log-probability of a token.
    `robust`: DPO for pairs of which a share, label_smoothing, is the wrong way round."""
    beta: PositiveFloat = 0.1
    """Weight of the distance from the reference. ipo: tau."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """robust: share of the pairs whose answers are taken to be the wrong way round."""
    sft_weight: NonNegativeFloat = 0.0
    """Weight of a second term: the mean loss of the tokens of the preferred answers, as in supervised fine-tuning."""
    max_prompt_length: Positive | None = None
    """Tokens of a prompt, of which the last are kept. Unset: no limit of its own."""
    truncation: Literal["keep_start", "keep_end"] = "keep_start"
    """Side that is kept of a prompt with its answer that is longer than seq_length + 1 tokens."""
