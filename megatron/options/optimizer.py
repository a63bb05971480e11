"""Options of the optimizer, and a table of the optimizers: all that is known of one before torch is imported.

Another optimizer is a name and a row here, and a function that builds it in training/optimizers/build.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron.options.types import (
    STRICT,
    NonNegative,
    NonNegativeFloat,
    Number,
    Positive,
    PositiveFloat,
    Probability,
    Whole,
)

OptimizerName = Literal["adamw", "adam", "sgd", "fusedadamw", "paged_adamw_32bit", "muon"]


@dataclasses.dataclass(frozen=True)
class OptimizerKind:
    """An optimizer, as the plan, the rules between options, and checkpoints see it."""

    states: tuple[str, ...]
    """Kinds of states, by torch's names: of each a float32 number for each of the parameter's."""
    deepspeed_types: tuple[str, ...]
    """Values of `optimizer.type` in a DeepSpeed JSON that mean it."""
    options: tuple[str, ...] = ()
    """Options that not every optimizer reads, but this one."""
    keeps_none_without: str = ""
    """Option without which, at 0, it keeps no states."""
    counts_steps: bool = True
    """It keeps the number of its steps, for the correction of its moments' bias."""
    has_l2_decay: bool = True
    """The weight decay can be added to the gradient."""
    copies_gradient: bool = False
    """To add the weight decay it copies the gradient."""
    can_offload: bool = True
    scales_with_width: bool = False
    """muP's learning rates are known for it."""
    matrix_states: tuple[str, ...] | None = None
    """Kinds of states of linear layers' weights (`Shard.is_linear_weight`), if others; None: `states`."""
    needs_whole_matrices: bool = False
    """It computes with matrices as wholes: neither ZeRO-3's stretches nor an adapter's factors are any."""


MUON = (
    *("muon_lr", "muon_momentum", "muon_nesterov", "muon_scale_mode", "muon_extra_scale_factor"),
    *("muon_num_ns_steps", "muon_coefficient_type", "muon_ns_dtype"),
)
"""Options of Muon alone."""
NS_COEFFICIENTS: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""Coefficients a, b, c of a step of Newton-Schulz, X <- a X + (b A + c A^2) X with A = X X^T, taken in turn.

`simple` is of Keller Jordan (kellerjordan.github.io/posts/muon), `quintic` of You Jiacheng (modded-nanogpt).
"""

_ADAM = OptimizerKind(
    states=("exp_avg", "exp_avg_sq"),
    deepspeed_types=("Adam", "AdamW", "FusedAdam", "adam", "adamw"),
    options=("decoupled_weight_decay",),
    scales_with_width=True,
)
OPTIMIZERS: Mapping[OptimizerName, OptimizerKind] = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "sgd": OptimizerKind(
        states=("momentum_buffer",),
        deepspeed_types=("SGD", "sgd"),
        options=("sgd_momentum",),
        keeps_none_without="sgd_momentum",
        counts_steps=False,
        copies_gradient=True,
        can_offload=False,
    ),
    "fusedadamw": _ADAM,
    # its states have memory of their own, from which they move to the host by themselves
    "paged_adamw_32bit": dataclasses.replace(_ADAM, has_l2_decay=False, can_offload=False),
    "muon": dataclasses.replace(
        _ADAM,
        matrix_states=("momentum_buffer",),
        deepspeed_types=("Muon", "muon"),
        options=(*_ADAM.options, *MUON),
        has_l2_decay=False,
        can_offload=False,
        scales_with_width=False,
        needs_whole_matrices=True,
    ),
}
# dict.fromkeys: each once, in one order for all checkpoints
STATES = tuple(
    dict.fromkeys(state for kind in OPTIMIZERS.values() for state in (*kind.states, *(kind.matrix_states or ())))
)
"""All kinds of states."""
READERS = {
    "sgd_momentum": ("optimizer=sgd", "choose that"),
    "decoupled_weight_decay": ("an Adam", "choose one"),
    **dict.fromkeys(MUON, ("optimizer=muon", "choose that")),
}
"""The optimizer that reads an option which not every one reads, and what to do to have it read."""


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """Optimizer, learning rate schedule and ZeRO."""

    optimizer: OptimizerName = "adamw"
    """Optimizer. `adam`, as in Megatron, and `adamw` are one: Adam with decoupled weight decay. It runs fused where the
    device supports it; `fusedadamw` is Habana's name for that. `paged_adamw_32bit`: bitsandbytes' AdamW on CUDA, whose
    states move to host memory where the device's is short; on other devices adamw, which is logged. `muon`: hidden
    matrices step along their orthogonalised momentum, q, k, v, gate and up each by itself; all else, with routers and
    tables of positions, by adamw."""
    decoupled_weight_decay: bool = True
    """Adam: subtract the weight decay from the weights (AdamW). Off: add it to the gradient (L2 regularisation)."""
    lr: PositiveFloat = 1e-4
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    decoupled_lr: PositiveFloat | None = None
    """Peak learning rate of the word embedding and the output layer, which follow the same schedule. Unset: lr."""
    decoupled_min_lr: NonNegativeFloat | None = None
    """Their learning rate at the end of the decay. Unset: min_lr."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """Shape of the decay after the warm-up. `WSD` stays at the peak, then decays over its last part.
    `inverse-square-root` falls with the root of all samples, warm-up included, not below min_lr."""
    lr_decay_samples: Positive | None = None
    """Samples until min_lr is reached, warm-up included. Unset: the whole training."""
    lr_decay_iters: Positive | None = None
    """lr_decay_samples, in steps, whatever their batch size."""
    lr_warmup_samples: NonNegative = 0
    """Samples over which the learning rate rises linearly from lr_warmup_init to lr."""
    lr_warmup_iters: NonNegative = 0
    """Steps over which it does, whatever their batch size."""
    lr_warmup_fraction: Probability | None = None
    """Share of the decay (lr_decay_samples, or the whole training) over which it does. Unset: none."""
    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_samples: Positive | None = None
    """Samples of WSD's last, decaying part."""
    lr_wsd_decay_iters: Positive | None = None
    """lr_wsd_decay_samples, in steps: the last ones of the decay."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """Shape of WSD's last part."""
    override_opt_param_scheduler: bool = False
    """Resume with this command's schedule of learning rate and weight decay, where it differs from the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = False
    """Resume with the checkpoint's schedule, where it differs. Without either switch, a difference is an error."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of matrices; biases and normalisation weights never decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Growth of the weight decay over the whole training. `constant`: it is weight_decay. `linear`, `cosine`: from
    start_weight_decay to end_weight_decay, which replace weight_decay."""
    start_weight_decay: NonNegativeFloat | None = None
    """Weight decay at the start of the training."""
    end_weight_decay: NonNegativeFloat | None = None
    """Weight decay at the end of the training, no less than start_weight_decay."""
    adam_beta1: Probability = 0.9
    """Decay of the first moment."""
    adam_beta2: Probability = 0.999
    """Decay of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Value added to the square root of the second moment."""
    sgd_momentum: Probability = 0.9
    """Momentum of SGD."""
    ema_decay: Annotated[Number, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average of the trained weights in float32, which with each update takes 1 - ema_decay
    of them. Checkpoints hold it: `--weights ema` of generate, evaluate, convert_checkpoint and
    merge_checkpoints. Unset: none."""
    ema_interval: Positive = 1
    """Applied steps from one update of that average to the next."""
    offload_ema: bool = False
    """Keep the average in host memory, to which each update copies the weights."""
    muon_lr: PositiveFloat | None = None
    """Peak learning rate of Muon's matrices; it follows the schedule of lr, which is that of all else. Unset: lr."""
    muon_momentum: Probability = 0.95
    """Momentum of Muon."""
    muon_nesterov: bool = True
    """Muon's Nesterov momentum: orthogonalise what the momentum is about to become with the same gradient again."""
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = "spectral"
    """Scale of an orthogonalised matrix of r rows (outputs) and c columns (inputs). `spectral`: sqrt(max(r, c)), whose
    numbers are of one size for any shape, as in Moonlight. `shape_scaling`: sqrt(max(1, r / c)), Keller Jordan's, with
    a muon_lr near 0.02. `unit_rms_norm`: sqrt(r / c)."""
    muon_extra_scale_factor: PositiveFloat | None = None
    """Factor of that scale. Unset: 0.2 with `spectral`, as large as AdamW's steps, so that one lr serves both; else
    1."""
    muon_num_ns_steps: Positive = 5
    """Steps of the Newton-Schulz iteration that orthogonalises."""
    muon_coefficient_type: Literal["simple", "quintic"] = "simple"
    """Coefficients of its polynomials. `simple`: Keller Jordan's three, of every step; `quintic`: five triples in turn,
    as Megatron has by default."""
    muon_ns_dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of that iteration, and of what ranks exchange for it. `auto`: bf16 in runs of 16 bits on a device whose
    products are as fast as they should be in it, else fp32."""
    qk_clip: bool = False
    """QK-clip, with any optimizer: after each step scale the projections to queries and keys of the heads whose largest
    attention logit of the step is above qk_clip_threshold, so that it would have been that. Heads that share a key head
    are scaled alike, by the largest of them, as in Megatron. A step takes half a forward pass of the attention more; on
    a CPU only where the lengths of queries and keys allow a logit above the threshold."""
    qk_clip_alpha: Annotated[Number, Field(gt=0, lt=1)] = 0.5
    """qk_clip: of the factor threshold / logit queries take the power qk_clip_alpha, keys the rest."""
    qk_clip_threshold: PositiveFloat = 100.0
    """qk_clip: largest logit, scaled as the softmax has it, that is left alone."""
    clip_grad: NonNegativeFloat = 1.0
    """Maximum norm of the whole model's gradient. 0: no clipping."""
    zero_stage: Annotated[Whole, Field(ge=0, le=3)] = 0
    """ZeRO stage. Shard over data-parallel ranks: 1 optimizer states, 2 + gradients, 3 + parameters. In bf16 and fp16
    the optimizer states are always sharded. 2 and 3 run without a pipeline."""
    offload_optimizer: bool = False
    """Keep and update the optimizer states in host memory."""
    offload_param: bool = False
    """Keep the parameters in host memory. Requires zero_stage 3."""

    @property
    def given_warmup(self) -> str:
        """Return the option that sets the length of the warm-up, with its value."""
        # a rule lets only one of them be set
        for name in ("lr_warmup_samples", "lr_warmup_iters", "lr_warmup_fraction"):
            if getattr(self, name):
                return f"{name}={getattr(self, name)}"
        return "lr_warmup_samples"

    @property
    def decoupled_end(self) -> float | None:
        """Return the learning rate of word embedding and output layer at the end of the decay; None: that of all."""
        if self.decoupled_lr is None:
            return None
        # Megatron's default
        return self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr

    @property
    def muon_peak(self) -> float | None:
        """Return the peak learning rate of Muon's matrices, where it is another than that of all."""
        return self.muon_lr if self.optimizer == "muon" and self.muon_lr != self.lr else None

    @property
    def kind(self) -> OptimizerKind:
        return OPTIMIZERS[self.optimizer]

    @property
    def states(self) -> tuple[str, ...]:
        """Return the kinds of states that the optimizer keeps of parameters other than linear layers' weights."""
        # SGD without momentum has nothing to store
        needed = self.kind.keeps_none_without
        if needed and not getattr(self, needed):
            return ()
        return self.kind.states

    @property
    def matrix_states(self) -> tuple[str, ...]:
        """Return the kinds of states that it keeps of linear layers' weights."""
        if self.kind.matrix_states is None:
            return self.states
        return self.kind.matrix_states

    @property
    def muon_scale_factor(self) -> float:
        """Return the factor of the scale of Muon's updates."""
        if self.muon_extra_scale_factor is not None:
            return self.muon_extra_scale_factor
        # Liu et al. 2025 (arXiv:2502.16982), section 2.2: AdamW's updates have a root mean square of 0.2 to 0.4
        return 0.2 if self.muon_scale_mode == "spectral" else 1.0

    def states_of(self, *, is_linear_weight: bool) -> tuple[str, ...]:
        return self.matrix_states if is_linear_weight else self.states

    def optimizer_faults(self) -> Iterator[str]:
        """Yield what the optimizer refuses."""
        if not self.decoupled_weight_decay and not self.kind.has_l2_decay:
            yield (
                f"optimizer={self.optimizer} has decoupled weight decay only; turn decoupled_weight_decay on, or use "
                "adam"
            )
        if self.offload_optimizer and not self.kind.can_offload:
            yield f"offload_optimizer does not support optimizer={self.optimizer}; use adamw or adam, or turn it off"
        if self.zero_stage == 3 and self.kind.needs_whole_matrices:
            yield (
                f"optimizer={self.optimizer} needs whole matrices, which zero_stage=3 cuts up with their gradients; "
                "use zero_stage 0, 1 or 2, or adamw"
            )
