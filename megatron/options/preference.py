"""Options of preference training."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron.options.types import STRICT, NonNegativeFloat, Number, Positive, PositiveFloat

Objective = Literal[
    "sigmoid",
    "sigmoid_norm",
    "robust",
    "hinge",
    "ipo",
    "exo_pair",
    "discopop",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "orpo",
    "simpo",
    "cpo",
    "kto",
    "apo_zero_unpaired",
]


class ObjectiveNeeds(NamedTuple):
    """Inputs of an objective beside the log-probabilities of answers."""

    options: tuple[str, ...] = ()
    """Names of the options that it reads, beside beta and those that all objectives read."""
    reference: bool = True
    takes_means: bool = False
    """Its log-probabilities are means over the tokens of an answer rather than sums."""
    is_unpaired: bool = False
    """It takes answers one by one."""
    sft_weight: Number = 0.0
    """Default of that option."""


_OF_RATIOS = ("ld_alpha",)
# a divergence is defined up to a term of the prompt alone, which a difference between its two answers cancels
_OF_MARGINS = ("ld_alpha", "f_divergence", "f_alpha")
# the weights of both kinds balance data that has more of one
_UNPAIRED = ObjectiveNeeds(("desirable_weight", "undesirable_weight"), is_unpaired=True)

OBJECTIVES: dict[Objective, ObjectiveNeeds] = {
    "sigmoid": ObjectiveNeeds(("label_smoothing", *_OF_MARGINS)),
    "sigmoid_norm": ObjectiveNeeds(_OF_MARGINS),
    "robust": ObjectiveNeeds(("label_smoothing", *_OF_MARGINS)),
    "hinge": ObjectiveNeeds(_OF_MARGINS),
    "ipo": ObjectiveNeeds(_OF_MARGINS),
    "exo_pair": ObjectiveNeeds(("label_smoothing", *_OF_MARGINS)),
    "discopop": ObjectiveNeeds(("discopop_tau", *_OF_MARGINS)),
    "nca_pair": ObjectiveNeeds(_OF_RATIOS),
    "bco_pair": ObjectiveNeeds(_OF_RATIOS),
    "sppo_hard": ObjectiveNeeds(_OF_RATIOS),
    "apo_zero": ObjectiveNeeds(_OF_RATIOS),
    "apo_down": ObjectiveNeeds(_OF_RATIOS),
    # ORPO (arXiv:2403.07691) and CPO (arXiv:2401.08417) include the loss of the chosen answer, SimPO
    # (arXiv:2405.14734) does not
    "orpo": ObjectiveNeeds(reference=False, takes_means=True, sft_weight=1.0),
    "simpo": ObjectiveNeeds(("label_smoothing", "simpo_gamma"), reference=False, takes_means=True),
    "cpo": ObjectiveNeeds(("label_smoothing",), reference=False, sft_weight=1.0),
    "kto": _UNPAIRED,
    "apo_zero_unpaired": _UNPAIRED,
}
"""`tasks/preference_losses.py` has the function of each."""


@dataclass(frozen=True, config=STRICT)
class PreferenceConfig:
    """Preference training: the objective, its reference, and the lengths of pairs."""

    preference_loss: Objective = "sigmoid"
    """Objective, by TRL's name. `sigmoid`: DPO, with label_smoothing cDPO. `sigmoid_norm`: DPO over mean
    log-probabilities of a token. `robust`: DPO, unbiased where a share of the pairs, label_smoothing, is the wrong way
    round. `hinge`: SLiC on DPO's margins. `ipo`: IPO, over mean log-probabilities of a token. `exo_pair`: EXO.
    `discopop`: DiscoPOP. `nca_pair`: NCA. `bco_pair`: BCO, without a shift of rewards. `sppo_hard`: SPPO. `apo_zero`,
    `apo_down`: APO. `orpo` (odds ratio) and `simpo` compare mean log-probabilities of a token, `cpo` their sums, all
    without a reference. `kto` and `apo_zero_unpaired` take each answer by itself, desirable or not; kto measures it
    against an estimate of the KL divergence from the reference."""
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
    # below 0.5: robust divides by 1 - 2 label_smoothing
    label_smoothing: Annotated[Number, Field(ge=0, lt=0.5)] = 0.0
    """sigmoid, robust, simpo, cpo: share of the pairs whose answers are taken to be the wrong way round. exo_pair:
    probability of the rejected answer, above 0; 1e-3 is usual."""
    discopop_tau: PositiveFloat = 0.05
    """discopop: temperature of the blend of its two losses."""
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """Divergence from the reference (f-DPO), for objectives over the difference between two answers. `reverse_kl`: that
    of DPO."""
    f_alpha: Number = 0.5
    """f_divergence=alpha_divergence: its alpha. 1 is reverse_kl."""
    ld_alpha: Annotated[Number, Field(ge=0, le=1)] | None = None
    """LD-DPO: weight of those tokens of the longer answer that are beyond the length of the shorter one, in the model's
    and the reference's log-probabilities. Unset: 1."""
    sft_weight: NonNegativeFloat | None = None
    """Weight of a second term: the mean loss of the tokens of the preferred answers, as in supervised fine-tuning.
    Unset: 1 with orpo and cpo, else 0."""
    max_prompt_length: Positive | Literal["half"] | None = None
    """Tokens of a prompt, of which the last are kept. `half`: half of the seq_length + 1 tokens of a prompt with its
    answer. Unset: no limit of its own."""
    truncation: Literal["keep_start", "keep_end"] = "keep_start"
    """Side that is kept of a prompt with its answer that is longer than seq_length + 1 tokens."""
    unusable_pairs: Literal["skip", "error"] = "skip"
    """Pairs of which, when they are cut, no answer or no difference is left. `skip`: leave them out, with a warning
    that counts them. `error`: refuse the data."""

    def prompt_limit(self, seq_length: int) -> int | None:
        """Return the number of tokens of a prompt that are kept; None: all."""
        # seq_length counts labels: a prompt with its answer has a token more
        return (seq_length + 1) // 2 if self.max_prompt_length == "half" else self.max_prompt_length

    @property
    def needs(self) -> ObjectiveNeeds:
        return OBJECTIVES[self.preference_loss]

    @property
    def needs_reference(self) -> bool:
        return self.needs.reference

    @property
    def is_unpaired(self) -> bool:
        """The objective takes answers one by one."""
        return self.needs.is_unpaired

    @property
    def needs_kl(self) -> bool:
        # KTO (arXiv:2402.01306) measures answers against a KL divergence, estimated from mismatched ones
        return self.preference_loss == "kto"

    @property
    def effective_sft_weight(self) -> float:
        return self.needs.sft_weight if self.sft_weight is None else self.sft_weight
