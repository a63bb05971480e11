"""Options of preference training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron.config.types import STRICT, NonNegativeFloat, Positive, PositiveFloat

Objective = Literal["sigmoid", "hinge", "ipo", "robust", "orpo", "simpo", "kto", "apo_zero_unpaired"]


@dataclass(frozen=True, config=STRICT)
class PreferenceConfig:
    """Preference training: the objective, its reference, and the lengths of pairs."""

    preference_loss: Objective = "sigmoid"
    """Objective. `sigmoid`: DPO. `hinge`: SLiC on DPO's margins. `ipo`: IPO, over the mean log-probability of a token.
    `robust`: DPO for pairs of which a share, label_smoothing, is the wrong way round. `orpo` (odds ratio) and `simpo`
    compare mean log-probabilities of a token, without a reference. `kto` and `apo_zero_unpaired` take each answer by
    itself, desirable or not; kto measures it against an estimate of the KL divergence from the reference."""
    beta: PositiveFloat = 0.1
    """Factor of the log-probability, beyond the reference's, in rewards and objective. ipo: tau. orpo: weight of the
    odds ratio."""
    simpo_gamma: NonNegativeFloat = 0.5
    """simpo: target of the difference between the rewards of chosen and rejected answer."""
    desirable_weight: NonNegativeFloat = 1.0
    """kto, apo_zero_unpaired: weight of the losses of desirable answers."""
    undesirable_weight: NonNegativeFloat = 1.0
    """kto, apo_zero_unpaired: weight of the losses of undesirable answers."""
    reference: Literal["auto", "adapters_off", "stored"] = "auto"
    """Origin of the reference's log-probabilities. `adapters_off`: the base of the adapters, in a forward pass before
    each step. `stored`: the model at the start of the run, once before training, in files beside the data. `auto`:
    adapters_off with adapters, else stored."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """robust: share of the pairs whose answers are taken to be the wrong way round."""
    sft_weight: NonNegativeFloat | None = None
    """Weight of a second term: the mean loss of the tokens of the preferred answers, as in supervised fine-tuning.
    Unset: 1 with orpo, else 0."""
    max_prompt_length: Positive | None = None
    """Tokens of a prompt, of which the last are kept. Unset: no limit of its own."""
    truncation: Literal["keep_start", "keep_end"] = "keep_start"
    """Side that is kept of a prompt with its answer that is longer than seq_length + 1 tokens."""
    unusable_pairs: Literal["skip", "error"] = "skip"
    """Pairs of which, when they are cut, no answer or no difference is left. `skip`: leave them out, with a warning
    that counts them. `error`: refuse the data."""

    @property
    def needs_reference(self) -> bool:
        return self.preference_loss not in ("orpo", "simpo")

    @property
    def is_unpaired(self) -> bool:
        """The objective takes answers one by one."""
        return self.preference_loss in ("kto", "apo_zero_unpaired")

    @property
    def needs_kl(self) -> bool:
        return self.preference_loss == "kto"

    @property
    def effective_sft_weight(self) -> float:
        if self.sft_weight is None:
            return 1.0 if self.preference_loss == "orpo" else 0.0
        return self.sft_weight
