"""Every option of a run: one tree of dataclasses, the only declaration there is.

A value comes from three places, later ones winning: the field's default, the YAML preset
(`--config tiny_bloom` or `--config path.yaml`), the command line. Field names are unique over the
whole tree, so each is also a flat flag under the name Megatron users know:
`tensor_model_parallel_size` is `--tensor-model-parallel-size`.

`command_line.py` reads a config, `rules.py` judges what ties options together. None of the three imports torch or
deepspeed: a rejected config answers at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]

# numbers become strings where a string is wanted: `split: 100` and `data_path: [0.3, a, 0.7, b]` in a preset
STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, coerce_numbers_to_str=True)


LARGEST_BLEND = 2**15 - 1
"""Datasets in a blend: their number is stored in 16 bits."""


class ConfigError(ValueError):
    """The config breaks a rule. Carries every fault found, one a line."""

    def __init__(self, faults: Sequence[str]):
        self.faults = list(faults)
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        super().__init__(f"{count} in the configuration:\n" + "\n".join(f"  - {f}" for f in self.faults))


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """What is trained."""

    architecture: Literal["bloom", "llama"] = "bloom"
    """`bloom`: LayerNorm, GELU, biases. `llama`: RMSNorm, SwiGLU, no biases."""
    num_layers: Positive = 2
    """Transformer layers."""
    hidden_size: Positive = 64
    """Width of the residual stream."""
    ffn_hidden_size: Positive | None = None
    """Width inside the MLP (of the gate and of the up projection each, for llama). Unset: 4 x hidden_size."""
    num_attention_heads: Positive = 4
    """Query heads."""
    num_query_groups: Positive | None = None
    """Key and value heads (GQA). Unset: one for each query head (MHA)."""
    kv_channels: Positive | None = None
    """Size of one head. Unset: hidden_size / num_attention_heads."""
    vocab_size: Positive = 50257
    """True vocabulary of the tokenizer, before padding. Padded rows take no part in the softmax."""
    make_vocab_size_divisible_by: Positive = 128
    """The embedding is padded to a multiple of this times the tensor-parallel size."""
    max_position_embeddings: Positive | None = None
    """Rows of the learned position table. Unset: seq_length."""
    position_embedding_type: Literal["learned", "alibi", "rope"] = "learned"
    """How a token knows its place: a learned table, ALiBi's linear bias, or rotary embedding."""
    rotary_base: PositiveFloat = 10000.0
    """Base of the rotary frequencies (theta)."""
    rope_scaling_factor: PositiveFloat | None = None
    """Llama 3.1 frequency scaling by this factor. Unset: no scaling."""
    rope_scaling_low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original length / this are divided by rope_scaling_factor."""
    rope_scaling_high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original length / this are left alone."""
    rope_scaling_original_length: Positive = 8192
    """Context length the model was first trained on, for Llama 3.1 scaling."""
    embed_layernorm: bool = False
    """LayerNorm right after the word embedding, as in BLOOM-176B."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer a weight of its own instead of the word embedding's."""
    norm_epsilon: PositiveFloat = 1e-5
    """Added to the variance in every normalisation."""
    hidden_dropout: Probability = 0.1
    """Dropout after the embedding, the attention output and the MLP output."""
    attention_dropout: Probability = 0.1
    """Dropout of the attention probabilities."""
    init_method_std: PositiveFloat = 0.02
    """Standard deviation of the normal initialisation; residual projections get it / sqrt(2 num_layers)."""
    attention_backend: Literal["auto", "sdpa", "flex", "fused_hpu"] = "auto"
    """`sdpa`: torch's. `flex`: flex_attention, CUDA. `fused_hpu`: Habana's FusedSDPA.
    `auto`: fused_hpu on HPU, flex on CUDA for ALiBi or packed documents, else sdpa."""
    use_fast_softmax: bool = False
    """Habana FusedSDPA's fast softmax. HPU only."""
    use_fused_rmsnorm: bool = True
    """Habana's FusedRMSNorm where the device is HPU; no effect elsewhere."""

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def num_kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Rows of the embedding over all tensor-parallel ranks."""
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple


@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """How the model is spread over devices. The data-parallel size is what is left of the world."""

    tensor_model_parallel_size: Positive = 1
    """Ranks that share each layer."""
    pipeline_model_parallel_size: Positive = 1
    """Stages the list of layers is cut into."""
    sequence_parallel: bool = False
    """Between the tensor-parallel regions each rank keeps only its part of the sequence."""
    no_pipeline_parallel: bool = False
    """Use the sequential engine instead of DeepSpeed's pipeline. Implied by zero_stage 2, 3 and by offload."""
    pipeline_partition_method: Literal["parameters", "uniform", "type:TransformerLayer"] = "parameters"
    """How the layers are cut into stages: by balanced parameters, by number of layers, or by number of transformer
    layers."""
    device: Literal["auto", "hpu", "cuda", "cpu"] = "auto"
    """`auto`: the first of hpu, cuda, cpu that is there."""
    distributed_timeout_minutes: PositiveFloat = 30.0
    """A collective that waits longer fails the run."""


@dataclass(frozen=True, config=STRICT)
class TrainingConfig:
    """How much is trained, in which precision."""

    task: Literal["pretrain", "sft"] = "pretrain"
    """What is learned from what. `pretrain`: the next token of documents. `sft`: the answers in chats, as
    tools/preprocess_chat.py writes them."""
    micro_batch_size: Positive = 1
    """Samples in one forward pass of one data-parallel rank."""
    global_batch_size: Positive = 8
    """Samples in one optimizer step, over all data-parallel ranks and microbatches."""
    rampup_batch_size: tuple[Positive, Positive, Positive] | None = None
    """START INCREMENT SAMPLES: grow the global batch from START by INCREMENT, evenly over SAMPLES samples."""
    seq_length: Positive = 128
    """Tokens in a sample."""
    train_samples: Positive | None = None
    """Samples to train on. Give this or train_iters."""
    train_iters: Positive | None = None
    """Steps to train for. Give this or train_samples."""
    num_epochs: Positive | None = None
    """sft: times to go through the training data, in place of train_samples and train_iters. Each epoch has an order of
    its own, and no global batch crosses from one into the next."""
    exit_interval: NonNegative = 0
    """Save and exit when the iteration is a multiple of this. 0: never."""
    kill_switch_path: str | None = None
    """When this file appears, to one rank a node, all ranks save and exit together. While it is there, none starts."""
    seed: NonNegative = 1234
    """Of the initial weights, the dropout and the order of the data."""
    bf16: bool = False
    """Train in bfloat16 with float32 master weights and gradient accumulation."""
    fp16: bool = False
    """Train in float16 with dynamic loss scaling. Neither bf16 nor fp16: float32."""
    grad_accum_dtype: Literal["fp32", "bf16"] = "fp32"
    """In which the gradients of the microbatches are added up."""
    initial_loss_scale: PositiveFloat = 65536.0
    """fp16: the loss scale to start from."""
    min_loss_scale: PositiveFloat = 1.0
    """fp16: the loss scale never falls below this."""
    loss_scale_window: Positive = 1000
    """fp16: steps without overflow after which the loss scale doubles."""
    hysteresis: Positive = 2
    """fp16: overflows before the loss scale is halved."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass: none, the attention core, or whole transformer layers."""
    torch_compile: bool = False
    """Compile each layer with torch.compile."""
    deterministic: bool = False
    """Ask torch, and the HPU, for deterministic algorithms."""
    deepspeed_config: str | None = None
    """A JSON file merged into the DeepSpeed configuration. A key that contradicts this config is an error."""
    exit_duration_in_mins: PositiveFloat | None = None
    """Save and exit at the end of the first step that ends these minutes or more after the start of the process, by
    rank 0's clock. Leave a scheduler's limit room for one more step and a save."""

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """How the weights are updated."""

    optimizer: Literal["adamw", "adam", "sgd", "fusedadamw"] = "adamw"
    """`adam` adds the weight decay to the gradient, `adamw` decouples it. Adam runs fused where the device can;
    `fusedadamw` is Habana's name for that."""
    lr: PositiveFloat = 1e-4
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = "cosine"
    """Shape after the warm-up. `WSD` stays at the peak, then decays over its last part."""
    lr_decay_samples: Positive | None = None
    """Samples until min_lr is reached, warm-up included. Unset: all of the training."""
    lr_decay_iters: Positive | None = None
    """The same in steps."""
    lr_warmup_samples: NonNegative = 0
    """Samples over which the learning rate rises linearly from 0."""
    lr_warmup_iters: NonNegative = 0
    """The same in steps."""
    lr_wsd_decay_samples: Positive | None = None
    """Samples of WSD's last, decaying part."""
    lr_wsd_decay_iters: Positive | None = None
    """The same in steps."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential"] = "exponential"
    """Shape of WSD's last part."""
    weight_decay: NonNegativeFloat = 0.01
    """On matrices; biases and normalisation weights are never decayed."""
    adam_beta1: Probability = 0.9
    """Decay of the first moment."""
    adam_beta2: Probability = 0.999
    """Decay of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""
    sgd_momentum: Probability = 0.9
    """SGD's momentum."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest norm of the whole model's gradient. 0: no clipping."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    """Shard over data-parallel ranks: 1 optimizer states, 2 + gradients, 3 + parameters. In bf16 and fp16 the optimizer
    states are always sharded. 2 and 3 run without a pipeline."""
    offload_optimizer: bool = False
    """Keep the optimizer states, and update them, in host memory."""
    offload_param: bool = False
    """Keep the parameters in host memory. Needs zero_stage 3."""


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """What is trained on."""

    data_path: tuple[str, ...] = ()
    """Prefix of an indexed dataset (`PREFIX.bin`, `PREFIX.idx`), or a blend: WEIGHT PREFIX WEIGHT PREFIX ..., or
    prefixes alone, which are mixed by size and read once, without a second epoch."""
    split: str = "969,30,1"
    """Parts of the documents of data_path for training, validation and test, in proportion. Paths of their own
    (train_data_path) are taken whole."""
    train_data_path: tuple[str, ...] = ()
    """Training data of its own, written as data_path is, which it replaces."""
    valid_data_path: tuple[str, ...] = ()
    """Validation data, beside train_data_path. Unset: none."""
    test_data_path: tuple[str, ...] = ()
    """Test data, beside train_data_path. Unset: none."""
    data_cache_path: str | None = None
    """Folder for the index arrays. Unset: `cache/` beside the dataset."""
    tokenizer_type: (
        Literal[
            "GPT2BPETokenizer",
            "HFTokenizer",
            "HuggingFaceTokenizer",
            "SentencePieceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "NullTokenizer",
        ]
        | None
    ) = None
    """Kind of tokenizer, where one is needed (eod_mask_loss, reset_*)."""
    tokenizer_model: str | None = None
    """The tokenizer's file: a tokenizer.json or its folder, a SentencePiece model, or a tiktoken rank file."""
    vocab_file: str | None = None
    """GPT2BPETokenizer: vocab.json."""
    merge_file: str | None = None
    """GPT2BPETokenizer: merges.txt."""
    tiktoken_pattern: Literal["r50k", "cl100k", "o200k", "llama3"] | None = None
    """TikTokenizer: pattern and special tokens of the rank file. Unset: told by its number of ranks."""
    eod_token: str | None = None
    """Token that ends a document, such as `<|endoftext|>`. Unset: the tokenizer's."""
    eod_token_id: NonNegative | None = None
    """Id that ends a document. Unset: eod_token, or the tokenizer's."""
    reset_position_ids: bool = False
    """Count positions anew after each end of document."""
    reset_attention_mask: bool = False
    """A token sees only its own document."""
    eod_mask_loss: bool = False
    """The end-of-document token itself is no loss token where it is the input."""
    num_workers: NonNegative = 1
    """Threads that read ahead. 0: read in the training thread."""
    eval_interval: Positive = 1000
    """Steps between two validations."""
    eval_iters: NonNegative = 10
    """Global batches in one validation. 0: none."""

    @property
    def per_split(self) -> bool:
        """Whether training, validation and test have paths of their own."""
        return bool(self.train_data_path or self.valid_data_path or self.test_data_path)

    @property
    def paths(self) -> list[tuple[str, tuple[str, ...]]]:
        """For training, validation and test, the option that names the data, and its words."""
        if not self.per_split:
            return [("data_path", self.data_path)] * 3
        return [
            ("train_data_path", self.train_data_path),
            ("valid_data_path", self.valid_data_path),
            ("test_data_path", self.test_data_path),
        ]

    @property
    def prefixes(self) -> list[str]:
        """Every dataset that the paths name, once. Raises ValueError where they are no such list."""
        return list(dict.fromkeys(prefix for _, words in self.paths if words for prefix in parse_data_path(words)[0]))


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """What is kept."""

    save: str | None = None
    """Folder to save checkpoints in. Unset: none are saved. The same command, started again, goes on from the newest
    there."""
    save_interval: Positive = 1000
    """Steps between two checkpoints."""
    save_interval_in_mins: PositiveFloat | None = None
    """Minutes between two checkpoints, beside save_interval."""
    async_save: bool = True
    """Write in the background: training waits only until its state is copied, which takes as much host memory."""
    save_samples: Positive | None = None
    """Save with the first step that reaches or passes each multiple of so many samples, beside save_interval; and
    export, where save_hf is given."""
    save_at_epoch: bool = False
    """sft: save at the end of each epoch; and export, where save_hf is given."""
    save_hf: str | None = None
    """Folder of Hugging Face models, made of the checkpoints of save_samples, of save_at_epoch and of the end of the
    run: `samples_<consumed samples>`, with the files of tokenizer_model, or of the Hugging Face model in load. Unset:
    none are made."""
    save_hf_last_only: bool = False
    """Export to one folder, `last_epoch`, which replaces the one before."""
    save_hf_keep_last: Positive | None = None
    """Remove all but so many newest exports. Unset: keep all."""
    keep_last: Positive | None = None
    """Remove all but so many newest checkpoints. Unset: keep all."""
    save_retain_interval: Positive | None = None
    """Iterations whose multiples keep_last never removes."""
    no_save_optim: bool = False
    """Save the weights alone."""
    verify_checkpoint: bool = False
    """Before saving, compare bit by bit what several ranks hold copies of."""
    load: str | None = None
    """Folder to start from, until the run has saved itself: of a run's checkpoints, or of a Hugging Face model, whose
    weights alone are taken. A missing or empty folder starts a new run; anything else that holds no checkpoint is an
    error."""
    ckpt_step: NonNegative | None = None
    """Iteration of the checkpoint to load. Unset: the newest."""
    load_fallback: bool = True
    """Pass over a damaged checkpoint for the newest that is whole."""
    universal_checkpoint: bool = False
    """`load` is, or its `latest_universal` or `latest` names, a folder of DeepSpeed's universal format, or one of
    DeepSpeed's or Megatron-DeepSpeed's checkpoints."""
    finetune: bool = False
    """Load the weights alone and begin at iteration 0."""
    no_load_optim: bool = False
    """Begin with a fresh optimizer."""
    no_load_rng: bool = False
    """Draw dropout by this run's seed, not by that of the checkpoint."""
    allow_data_change: bool = False
    """Resume although the data, or the order of its samples, is not what the checkpoint was saved with."""


@dataclass(frozen=True, config=STRICT)
class LoggingConfig:
    """What is told."""

    results_dir: str | None = None
    """Folder of the run: `metrics.jsonl`, `config.yaml`, `run.json`, `summary.txt`. Unset: none is written."""
    tensorboard_dir: str | None = None
    """Folder of the TensorBoard events. Unset: `tensorboard/` in results_dir."""
    log_interval: Positive = 10
    """Steps between two log lines."""
    peak_tflops: PositiveFloat | None = None
    """Peak of one device in TFLOP/s, for the MFU. Unset: known devices only."""
    profile: bool = False
    """Write a torch.profiler trace of profile_steps to results_dir, from each of profile_ranks."""
    profile_steps: tuple[Positive, Positive] = (3, 4)
    """First and last iteration of the trace."""
    profile_ranks: tuple[NonNegative, ...] = (0,)
    """Ranks that write a trace."""
    pytorch_profiler_collect_shapes: bool = False
    """Keep the shapes of every operator's inputs in the trace."""
    pytorch_profiler_collect_callstack: bool = False
    """Keep the Python stack of every operator, and what it allocates, in the trace."""
    log_memory_interval: NonNegative = 100
    """Steps between two records of every rank's memory, beside those while the run starts and after its first step. 0:
    none of them."""
    timing_log_level: Annotated[int, Field(ge=0, le=2)] = 0
    """Time what a step is made of: 1 data, forward, backward, communication, optimizer, and saves and evaluations; 2
    tells the kinds of communication apart. 0: nothing is timed."""
    wandb_project: str | None = None
    """Log to this project of Weights & Biases too, as rank 0. Unset: no wandb."""
    wandb_entity: str | None = None
    """wandb: whose project it is. Unset: the account's own."""
    wandb_exp_name: str | None = None
    """wandb: name of the run. Unset: the name of the results folder."""
    wandb_save_dir: str | None = None
    """wandb: folder of its own files. Unset: results_dir."""
    log_straggler: bool = False
    """Measure what each rank does without waiting for another, and tell the spread and the slowest rank with each log
    line."""


@dataclass(frozen=True, config=STRICT)
class GuardConfig:
    """What becomes of bad steps, and of ranks that hang. A loss or gradient that is not finite is never applied."""

    spike_action: Literal["off", "log", "skip", "rollback"] = "log"
    """What is done about a loss or gradient norm far above its running estimate. `log`: name the batch. `skip`: and
    do not apply it. `rollback`: go back to a checkpoint from before it, and leave out the samples around it."""
    spike_threshold: PositiveFloat = 6.0
    """Standard deviations above the running mean from which a loss, or the logarithm of a gradient norm, is a spike."""
    spike_window: Annotated[int, Field(ge=2)] = 128
    """Steps that the running mean and deviation look back, exponentially. Nothing is judged before so many."""
    max_skipped_in_a_row: Positive = 10
    """Give up, with exit status 3, when so many steps in a row were skipped. An fp16 overflow counts only once the loss
    scale can fall no further."""
    rollback_skip_steps: Positive = 10
    """Steps whose samples a rollback leaves out: the spike, and those right before it, for the update that does the
    damage comes before the loss that shows it."""
    max_rollbacks: Positive = 3
    """Give up when so many rollbacks have brought the run past no new checkpoint."""
    check_replicas_interval: NonNegative = 0
    """Steps between two checks that all ranks' copies of a parameter are equal bit by bit, before each save too.
    0: never."""
    watchdog_timeout_s: NonNegativeFloat | None = None
    """Seconds without progress after which the run is ended, with the stacks of every rank. Until the first step is
    done, distributed_timeout_minutes count instead. 0: never. Unset: 600, or distributed_timeout_minutes if that is
    less."""


@dataclass(frozen=True, config=STRICT)
class SFTConfig:
    """How chats become the rows of microbatches."""

    packing: Literal["step", "dataset", "none"] = "step"
    """`step`: each global batch, of exactly global_batch_size chats, is packed into microbatches of one row of at most
    max_batch_len tokens. `dataset`: all chats are packed into rows of seq_length tokens, and each row is a sample.
    `none`: micro_batch_size chats a microbatch, padded to the longest."""
    max_batch_len: Positive | None = None
    """packing=step: most tokens in a microbatch, seq_length or more. Unset: seq_length."""
    bucketing: Literal["auto", "off", "octave", "optimal"] = "auto"
    """To which lengths rows are padded, that a device which compiles for each shape sees few of them. `octave`:
    buckets_per_octave lengths between powers of two. `optimal`: the num_buckets lengths with the least padding. `off`:
    none. `auto`: octave on HPU, else off."""
    buckets_per_octave: Positive = 16
    """bucketing=octave: at most 1 / this of a row is padding."""
    num_buckets: Positive = 16
    """bucketing=optimal: lengths to choose."""


@dataclass(frozen=True, config=STRICT)
class Config:
    """The whole run."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    sft: SFTConfig = Field(default_factory=SFTConfig)

    @property
    def packs_documents(self) -> bool:
        """Whether a row may hold several documents that do not see each other, or that count positions anew."""
        return self.training.task == "sft" or self.data.reset_position_ids or self.data.reset_attention_mask

    @property
    def row_length(self) -> int:
        """Tokens in the longest row of a microbatch."""
        packs_steps = self.training.task == "sft" and self.sft.packing == "step"
        return (self.sft.max_batch_len if packs_steps else None) or self.training.seq_length

    @property
    def varies_shapes(self) -> bool:
        """Whether microbatches are of different lengths."""
        return self.training.task == "sft" and self.sft.packing != "dataset"

    @property
    def effective_watchdog_timeout_s(self) -> float:
        """0: there is no watchdog."""
        given = self.guard.watchdog_timeout_s
        return min(600.0, self.parallel.distributed_timeout_minutes * 60) if given is None else given

    @property
    def uses_pipeline(self) -> bool:
        """Whether DeepSpeed's PipelineModule runs this; the sequential engine does otherwise."""
        optimizer = self.optimizer
        return not (self.parallel.no_pipeline_parallel or optimizer.zero_stage >= 2 or optimizer.offload_optimizer)

    @property
    def effective_zero_stage(self) -> int:
        """The stage DeepSpeed runs: its 16-bit optimizers always shard their states."""
        return max(self.optimizer.zero_stage, 0 if self.training.precision == "fp32" else 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict, as a preset holds it."""
        return TypeAdapter(Config).dump_python(self, mode="json")


# ---------------------------------------------------------------------------------------------------------------------
# The declaration, looked up


def sections() -> dict[str, type]:
    """The dataclass of each section, in order."""
    hints = get_type_hints(Config, include_extras=False)
    return {field.name: hints[field.name] for field in fields(Config)}


def options() -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """Each option's section and field, by its (unique) name."""
    found: dict[str, tuple[str, dataclasses.Field[Any]]] = {}
    for section, cls in sections().items():
        for field in fields(cls):
            assert field.name not in found, f"{field.name} stands in {section} and in {found[field.name][0]}"
            found[field.name] = (section, field)
    return found


def option_doc(section: str, name: str) -> str:
    """The text beneath a field, on one line."""
    info = sections()[section].__pydantic_fields__[name]  # type: ignore[attr-defined]
    return " ".join((info.description or "").split())


def flag(name: str) -> str:
    """`num_layers` -> `--num-layers`."""
    return "--" + name.replace("_", "-")


def batch_sizes(training: TrainingConfig) -> list[int]:
    """Every global batch size the run passes through, in order."""
    if training.rampup_batch_size is None:
        return [training.global_batch_size]
    start, increment, _ = training.rampup_batch_size
    return [*range(start, training.global_batch_size, increment), training.global_batch_size]


def parse_data_path(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Prefixes and their weights; None for a single prefix, or prefixes alone. Raises ValueError, saying the rule."""
    numbers = [_number(word) for word in words]
    if words and (len(words) == 1 or all(number is None for number in numbers)):
        prefixes, weights = list(words), None
    else:
        prefixes, weights = list(words[1::2]), [0.0 if number is None else number for number in numbers[::2]]
        if not words or len(words) % 2 or not all(0 < weight < math.inf for weight in weights):
            raise ValueError("must be one prefix, prefixes alone, or WEIGHT PREFIX pairs with weights above 0")
    if len(prefixes) > LARGEST_BLEND:
        raise ValueError(f"names {len(prefixes)} datasets; blend at most {LARGEST_BLEND}, merge some of them")
    return prefixes, weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def parse_split(text: str) -> tuple[float, float, float]:
    """'949,50,1' -> the three shares, summing to 1. Raises ValueError."""
    parts = [float(part) for part in text.replace("/", ",").split(",")]
    if not 1 <= len(parts) <= 3 or not all(0 <= part < math.inf for part in parts) or sum(parts) == 0:
        raise ValueError(text)
    train, valid, test = [*parts, 0.0, 0.0][:3]
    total = train + valid + test
    return train / total, valid / total, test / total
