"""Options of the layout, the training run, the guard and fp8."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron.options import types
from megatron.options.types import STRICT, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Probability, Whole


@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """Layout over devices. The data-parallel size is the number of ranks / (tensor x context x pipeline)."""

    tensor_model_parallel_size: Positive = 1
    """Number of ranks that share each layer."""
    context_parallel_size: Positive = 1
    """Number of ranks that share each row of tokens, for long sequences: each computes two stretches of it, one from
    the beginning and one from the end, so that all have as much causal attention to compute."""
    context_parallel_exchange: Literal["auto", "ring", "all-to-all"] = "auto"
    """Exchange between the ranks that share a row. `ring`: keys and values travel from rank to rank. `all-to-all`: each
    rank attends with a share of the heads over the whole row. `auto`: the one that sends less, of those that the heads,
    the dropout and the device allow."""
    pipeline_model_parallel_size: Positive = 1
    """Number of pipeline stages."""
    expert_model_parallel_size: Positive = 1
    """Number of ranks of a stage that hold different experts of each layer. They are ranks of the tensor and the data
    axes, whose product it divides; tokens travel to them."""
    expert_tensor_parallel_size: Positive | None = None
    """Number of ranks that share each expert: tensor_model_parallel_size, or 1. Unset: tensor_model_parallel_size."""
    num_replicas: Positive = 1
    """Number of groups of data-parallel ranks, neighbours such as those of a node: ZeRO shards within each group, and
    what travels between them is one rank's share of the gradients. 1: ZeRO shards over all data-parallel ranks."""
    sequence_parallel: bool = False
    """Shard activations along the sequence between the tensor-parallel regions."""
    no_pipeline_parallel: bool = False
    """Use the sequential engine instead of DeepSpeed's pipeline. Implied by zero_stage 2, 3 and by offload."""
    pipeline_partition_method: str = "cost"
    """Cut of the layers into pipeline stages. `cost`: the slowest stage is as fast as possible, by counted FLOPs with
    output projection, loss and recomputation. `parameters`, `uniform`, `type:TransformerLayer`: the largest stage has
    as few trained parameters, layers, or transformer layers as possible. `3,1`: transformer layers of each stage; the
    first also holds the embedding, the last the final norm and the output projection."""
    pipeline_schedule: Literal["1f1b", "interleaved", "zero-bubble"] | None = None
    """Order of the microbatches' passes on each stage. `interleaved`: several chunks of the model a stage, so that
    stages wait less and send more. `zero-bubble`: ZB-H1, which computes the gradients of weights while a stage would
    wait. Unset: `interleaved` with num_virtual_stages_per_pipeline_rank above 1, otherwise `1f1b`."""
    num_virtual_stages_per_pipeline_rank: Positive = 1
    """Chunks of the model on each pipeline stage, of the interleaved schedule."""
    device: types.DeviceName = "auto"
    """Device: hpu, cuda, cpu, or your own as package.module:RECORD. `auto`: the first available of hpu, cuda, cpu."""
    device_memory: str | None = None
    """Memory of one device, for the plan: gaudi2, gaudi3, a100, h100, h200, or a number of GiB. Unset: that of this
    machine's devices."""
    distributed_timeout_minutes: PositiveFloat = 30.0
    """Timeout of collectives; one that waits longer fails the run."""

    @property
    def listed_layers(self) -> tuple[int, ...] | None:
        """Transformer layers of each range, where `pipeline_partition_method` lists them."""
        if re.fullmatch("[0-9]+(,[0-9]+)*", self.pipeline_partition_method) is None:
            return None
        return tuple(map(int, self.pipeline_partition_method.split(",")))

    @property
    def schedule(self) -> str:
        """Name of the pipeline schedule."""
        if self.pipeline_schedule is not None:
            return self.pipeline_schedule
        # Megatron interleaves wherever it has virtual stages
        return "interleaved" if self.num_virtual_stages_per_pipeline_rank > 1 else "1f1b"

    @property
    def num_pipeline_ranges(self) -> int:
        """Number of ranges of layers that the pipeline cuts the model into."""
        return self.pipeline_model_parallel_size * self.num_virtual_stages_per_pipeline_rank


@dataclass(frozen=True, config=STRICT)
class TrainingConfig:
    """Task, batch sizes, length and precision of training."""

    task: str = "pretrain"
    """Data and loss. `pretrain`: next-token prediction on documents. `sft`: supervised fine-tuning on the answers in
    chats, as written by tools/preprocess_chat.py. `preference`: DPO, KTO and related objectives on preferred answers,
    as written by tools/preprocess_preferences.py. `package.module:Class`: a task of your own."""
    task_options: tuple[str, ...] = ()
    """NAME=VALUE ... for a task of your own that declares options."""
    loss: str | None = None
    """package.module:FUNCTION or FILE.py:FUNCTION: a loss of your own over log-probabilities or hidden states, in place
    of the cross-entropy of pretrain or sft."""
    loss_options: tuple[str, ...] = ()
    """NAME=VALUE ... for a loss of your own: its keyword-only arguments."""
    trainer: str | None = None
    """FILE.py:CLASS or package.module:CLASS: your own subclass of transformers' Trainer. Its compute_loss is trained in
    place of the cross-entropy of pretrain or sft, where it uses the model, its inputs and the loss alone."""
    label_smoothing_factor: Probability = 0.0
    """pretrain, sft: share of each label's probability that is spread evenly over the vocabulary in the loss that is
    trained. Validations measure the plain loss."""
    teacher: tuple[str, ...] = ()
    """Files of a teacher's likeliest tokens, as a run with teacher_top_k writes them, for a loss that takes a teacher.
    """
    teacher_top_k: Positive | None = None
    """With skip_train: write log-probabilities of this many likeliest tokens at each label, into files beside the data.
    The data is that of the run which is to learn from them."""
    micro_batch_size: Positive = 1
    """Samples per forward pass of one data-parallel rank."""
    global_batch_size: Positive = 8
    """Samples per optimizer step, over all data-parallel ranks and microbatches."""
    rampup_batch_size: tuple[Positive, Positive, Positive] | None = None
    """START INCREMENT SAMPLES: grow the global batch from START in steps of INCREMENT, evenly over SAMPLES samples."""
    seq_length: Positive = 128
    """Sequence length in tokens."""
    seq_length_stages: tuple[Positive, ...] | None = None
    """LENGTH ITERATIONS ...: pretrain in shorter rows first, so many iterations with rows of LENGTH tokens, stage by
    stage, and then with rows of seq_length. The samples of a step are the same, cut into seq_length / LENGTH rows each:
    a step has as many tokens in every stage. Validations have rows of seq_length. Unset: no shorter rows."""
    train_samples: Positive | None = None
    """Number of training samples. Give this or train_iters."""
    train_iters: Positive | None = None
    """Number of optimizer steps. Give this or train_samples."""
    num_epochs: Positive | None = None
    """sft, preference: number of epochs, instead of train_samples and train_iters. Each epoch is shuffled separately,
    and no global batch spans two epochs."""
    skip_train: bool = False
    """Evaluate the checkpoint in load, or else in save, on validation and test data, and exit. Allocates no optimizer,
    writes no checkpoint; needs neither training data nor a length of training."""
    exit_interval: NonNegative = 0
    """Save and exit when the iteration is a multiple of this. 0: never."""
    kill_switch_path: str | None = None
    """Save and exit when this file exists; one rank per node checks. A run does not start while the file exists."""
    seed: NonNegative = 1234
    """Random seed of the initial weights, the dropout and the data order."""
    bf16: bool = False
    """Train in bfloat16 with float32 master weights, gradient accumulation and reduction."""
    fp16: bool = False
    """Train in float16 with dynamic loss scaling. Without bf16 and fp16: float32."""
    grad_accum_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of gradient accumulation over microbatches."""
    grad_reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Precision in which gradients are summed over data-parallel ranks. Unset: that of grad_accum_dtype."""
    initial_loss_scale: PositiveFloat = 65536.0
    """fp16: initial loss scale."""
    min_loss_scale: PositiveFloat = 1.0
    """fp16: smallest loss scale."""
    loss_scale_window: Positive = 1000
    """fp16: steps without overflow before the loss scale doubles."""
    hysteresis: Positive = 2
    """fp16: overflows before the loss scale is halved."""
    neftune_noise_alpha: PositiveFloat | None = None
    """NEFTune: add uniform noise of ±alpha / sqrt(L x hidden_size) to the word embeddings of each training sequence of
    L tokens; 5 is usual. Unset: none."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in the backward pass: none, those of `recompute_modules`, or whole transformer
    layers."""
    recompute_modules: tuple[str, ...] = ()
    """Parts of a transformer layer to recompute with `recompute_granularity=selective`, by Megatron's names.
    `core_attn`: rotary embedding and attention without its projections. `mlp`: the MLP or the experts. `layernorm` (or
    `norm`): the outputs of both norms. `mlp_act`: the output of the MLP's activation. Separated by commas or spaces.
    Unset: core_attn."""
    offload_activations: bool = False
    """Move the activations that transformer layers keep for their backward pass to host memory and back, behind what
    the device computes. With `recompute_granularity=full` those are the inputs of the layers. On CUDA and HPU."""
    torch_compile: bool | None = None
    """Compile each transformer layer with torch.compile, by the device's own backend. Unset: on HPU, unless in lazy
    mode."""
    cuda_graph_impl: Literal["none", "local"] = "none"
    """`local`: replay the passes of each transformer layer in training as CUDA graphs, of which the host starts one in
    place of each kernel. It is faster where the GPU waits for the host, as in fp8 and with small models."""
    deterministic: bool = False
    """Use deterministic algorithms of torch and of the HPU."""
    early_stopping_patience: Positive | None = None
    """End the training after this many validations in a row without an improvement of best_metric. Unset: never."""
    early_stopping_min_delta: NonNegativeFloat = 0.0
    """early_stopping_patience: smallest change that counts as an improvement, since the last one that did."""
    best_metric: str = "loss"
    """Value that early_stopping_patience and keep_best compare: the validation loss, a metric of the task,
    such as rewards/accuracies, or lm_loss/NAME of one of multiple_validation_sets."""
    best_metric_mode: Literal["min", "max"] | None = None
    """Better direction of best_metric. Unset: min for a loss; a metric needs it."""
    deepspeed_config: str | None = None
    """JSON file to merge into the DeepSpeed configuration. A key that DeepSpeed does not read, or that contradicts this
    config, is an error; "auto" leaves a value to this config."""
    exit_duration_in_mins: PositiveFloat | None = None
    """Save and exit after the first step that ends this many minutes or more after the job started, restarts included,
    by the clock of rank 0's host. Leave time for one more step and a save before a scheduler's limit."""

    @property
    def recomputed_modules(self) -> frozenset[str]:
        """Names of the parts of a layer that are recomputed; empty if none or the whole layer is."""
        if self.recompute_granularity != "selective":
            return frozenset()
        # a YAML list, words on a command line, and Habana's list with commas
        words = " ".join(self.recompute_modules or ("core_attn",)).replace(",", " ").split()
        return frozenset("layernorm" if name == "norm" else name for name in words)

    @property
    def own_loss(self) -> str | None:
        """The option that replaces the cross-entropy, as messages name it."""
        if self.loss is not None:
            return f"loss={self.loss}"
        return None if self.trainer is None else f"trainer={self.trainer}"

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        # a rule refuses both; until it has been reported, bf16 counts
        if self.bf16:
            return "bf16"
        return "fp16" if self.fp16 else "fp32"


@dataclass(frozen=True, config=STRICT)
class GuardConfig:
    """Handling of bad steps and of hanging ranks. A loss or gradient that is not finite is never applied."""

    spike_action: Literal["off", "log", "skip", "rollback"] = "log"
    """Action on a loss or gradient norm far above its running estimate. `log`: log the batch. `skip`: also skip the
    update. `rollback`: return to a checkpoint from before the spike and leave out the samples around it."""
    spike_threshold: PositiveFloat = 6.0
    """Standard deviations above the running mean at which a loss, or the logarithm of a gradient norm, is a spike."""
    # one step has no deviation
    spike_window: Annotated[Whole, Field(ge=2)] = 128
    """Time constant, in steps, of the exponential running mean and deviation. No spike is detected before this many
    steps."""
    max_skipped_in_a_row: Positive = 10
    """Abort with exit status 3 after this many skipped steps in a row. An fp16 overflow counts only when the loss scale
    is already at its minimum."""
    max_skipped_in_window: Positive = 30
    """Abort with exit status 3 after this many skipped steps among the last skipped_window, counted in the same way.
    More than skipped_window: no such limit."""
    skipped_window: Annotated[Whole, Field(ge=2)] = 100
    """Steps over which max_skipped_in_window counts."""
    rollback_skip_steps: Positive = 10
    """Steps whose samples a rollback leaves out: the spike and the steps before it, because the damaging update comes
    before the loss that shows it."""
    max_rollbacks: Positive = 3
    """Abort after this many rollbacks without a new checkpoint between them."""
    check_replicas_interval: NonNegative = 0
    """Steps between two checks that all copies of a parameter are bitwise equal; also before each save. 0: never."""
    recheck_interval: NonNegative = 0
    """Steps between two checks that all data-parallel ranks compute the same of one microbatch, bit for bit. 0: never.
    It costs one further forward and backward pass of a microbatch each time."""
    recheck_action: Literal["abort", "log"] = "abort"
    """Action on a rank that computed something else. `abort`: the run ends with exit status 3. `log`: it goes on."""
    watchdog_timeout_s: NonNegativeFloat | None = None
    """Seconds without progress after which the run is aborted with the stacks of all ranks. Until the first step is
    done, distributed_timeout_minutes applies instead. 0: no watchdog. Unset: 600, or distributed_timeout_minutes if
    that is shorter."""


@dataclass(frozen=True, config=STRICT)
class Fp8Config:
    """Matrix products of the transformer layers in fp8, on Gaudi and CUDA."""

    fp8_format: Literal["none", "hybrid", "e4m3", "e5m2"] = "none"
    """Format of the operands in training. `hybrid`: e4m3 in the forward and e5m2 in the backward pass. `e4m3`, `e5m2`:
    in both. Weights, optimizer, evaluation and generation stay as they are without it."""
    fp8_recipe: Literal["delayed", "tensorwise", "rowwise"] | None = None
    """Scales of the operands. `delayed`, on HPU: from earlier microbatches, formats hybrid and e5m2. On CUDA, from the
    operands themselves: `tensorwise`, one for each, formats hybrid and e4m3; `rowwise`, a power of two for each row,
    format e4m3. Unset: delayed on HPU, tensorwise elsewhere."""
    fp8_emulate: bool = False
    """Round the operands to fp8 and multiply them in float32, for devices without fp8: slower than without fp8."""
    fp8_first_last_layers_bf16: NonNegative = 0
    """Layers at the beginning, and as many at the end, whose products stay in 16 bits. Output projection and routers
    always do."""
    fp8_margin: NonNegative = 0
    """Scales are smaller by 2 to this power than the largest that fits."""
    fp8_interval: Positive | None = None
    """Microbatches between two updates of the scales. Unset: those of a global batch, if their number is fixed."""
    fp8_amax_history_len: Positive | None = None
    """Last microbatches of an interval whose largest absolute values are kept. Unset: a sixteenth of
    the interval."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Value of the history that the scale follows."""
    fp8_amax_reduce: bool = True
    """Take the largest absolute value of a tensor over the tensor-parallel ranks that it is cut over, so that they
    scale as one rank does; with fp8_recipe=delayed over data-parallel ranks too. The powers of two of rowwise need
    none."""
    fp8_wgrad: bool = True
    """Compute the gradients of weights in fp8 too."""
    fp8_mlp_row_parallel: bool = True
    """Compute the MLP's second product in fp8 too."""
    fp8_smooth_swiglu: bool = True
    """Scale the second product of a SwiGLU MLP by channels (Smooth-SwiGLU, arXiv:2409.12517)."""
    cache_fp8_weight: bool = True
    """Keep the fp8 weights of the forward pass for the backward pass, a byte a number. On CUDA those that
    cache_fp8_weight_fwd keeps."""
    cache_fp8_weight_fwd: bool = True
    """Convert weights once a global batch instead of once a microbatch."""

    @property
    def uses_fp8(self) -> bool:
        return self.fp8_format != "none"
