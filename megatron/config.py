"""Every option of a run: one tree of dataclasses, one loader, one check.

A value comes from three places, later ones winning: the field's default, the YAML preset
(`--config tiny_bloom` or `--config path.yaml`), the command line. Field names are unique over the
whole tree, so each is also a flat flag under the name Megatron users know:
`tensor_model_parallel_size` is `--tensor-model-parallel-size`.

This module imports neither torch nor deepspeed: a rejected config answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

PRESETS_DIR = Path(__file__).resolve().parent.parent / "configs"

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]

STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


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

    task: Literal["pretrain"] = "pretrain"
    """What is learned from what."""
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
    exit_interval: NonNegative = 0
    """Save and exit when the iteration is a multiple of this. 0: never."""
    kill_switch_path: str | None = None
    """When this file appears, all ranks save and exit together."""
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
    """Prefix of an indexed dataset (`PREFIX.bin`, `PREFIX.idx`), or a blend: WEIGHT PREFIX WEIGHT PREFIX ..."""
    split: str = "969,30,1"
    """Parts of the documents for training, validation and test, in proportion."""
    data_cache_path: str | None = None
    """Folder for the index arrays. Unset: `cache/` beside the dataset."""
    tokenizer_type: Literal["GPT2BPETokenizer", "HFTokenizer", "SentencePieceTokenizer", "NullTokenizer"] | None = None
    """Kind of tokenizer, where one is needed (eod_mask_loss, reset_*)."""
    tokenizer_model: str | None = None
    """The tokenizer's file: a tokenizer.json or its folder, or a SentencePiece model."""
    vocab_file: str | None = None
    """GPT2BPETokenizer: vocab.json."""
    merge_file: str | None = None
    """GPT2BPETokenizer: merges.txt."""
    eod_token_id: NonNegative | None = None
    """Id that ends a document. Unset: the tokenizer's."""
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


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """What is kept."""

    save: str | None = None
    """Folder to save checkpoints in. Unset: none are saved."""
    save_interval: Positive = 1000
    """Steps between two checkpoints."""
    load: str | None = None
    """Folder to resume from. A missing or empty folder starts a new run; anything else that holds no checkpoint is
    an error."""


@dataclass(frozen=True, config=STRICT)
class LoggingConfig:
    """What is told."""

    results_dir: str | None = None
    """Folder of the run's `metrics.jsonl` and `config.yaml`. Unset: neither is written."""
    tensorboard_dir: str | None = None
    """Folder of the TensorBoard events. Unset: `tensorboard/` in results_dir."""
    log_interval: Positive = 10
    """Steps between two log lines."""
    peak_tflops: PositiveFloat | None = None
    """Peak of one device in TFLOP/s, for the MFU. Unset: known devices only."""
    profile: bool = False
    """Write a torch.profiler trace of profile_steps to results_dir, from rank 0."""
    profile_steps: tuple[Positive, Positive] = (3, 4)
    """First and last iteration of the trace."""


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
# Loading


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


def from_dict(tree: dict[str, Any]) -> Config:
    """Build a config from nested plain values. Raises ConfigError with every wrong key, type and range."""
    faults = [
        f"unknown section {name!r}; the sections are {', '.join(sections())}" for name in tree if name not in sections()
    ]
    known: dict[str, Any] = {}
    for section, cls in sections().items():
        values = tree.get(section) or {}
        if not isinstance(values, dict):
            faults.append(f"section {section!r} holds {values!r}; it must be a mapping of options")
            continue
        names = {field.name for field in fields(cls)}
        for name in values:
            if name not in names:
                faults.append(_unknown(name, section))
        known[section] = {name: value for name, value in values.items() if name in names}
    try:
        config = TypeAdapter(Config).validate_python(known)
    except ValidationError as error:
        for fault in error.errors():
            where = [str(part) for part in fault["loc"] if not str(part).startswith(("function-", "tuple["))]
            faults.append(f"{'.'.join(where[:2])}={fault['input']!r}: {fault['msg'][:1].lower()}{fault['msg'][1:]}")
        raise ConfigError(list(dict.fromkeys(faults))) from None
    if faults:
        raise ConfigError(faults)
    return config


def _unknown(name: str, section: str | None = None) -> str:
    """What is said of an option that does not exist: the nearest one that does."""
    near = difflib.get_close_matches(name, options(), n=1)
    where = f"in section {section!r} " if section else ""
    if name in options():
        return f"option {name!r} {where}belongs in section {options()[name][0]!r}"
    return f"unknown option {name!r} {where}" + (f"- did you mean {near[0]!r}?" if near else "(see --help)")


def read_preset(name: str) -> dict[str, Any]:
    """The nested values of a preset, by path or by the name of a file in configs/."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else PRESETS_DIR / f"{name}.yaml"
    if not path.is_file():
        known = sorted(preset.stem for preset in PRESETS_DIR.glob("*.yaml"))
        near = difflib.get_close_matches(Path(name).stem, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError([f"config {name!r} not found; {hint}the presets are {', '.join(known)}"])
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"config {path} is no YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"config {path} holds {type(tree).__name__}; it must be a mapping of sections"])
    return tree


def _is_multiple(hint: Any) -> bool:
    return any(get_origin(part) is tuple for part in (hint, *get_args(hint)))


def build_parser(prog: str = "python -m megatron.train") -> argparse.ArgumentParser:
    """One flag an option, grouped by section; values stay strings, so that pydantic judges them all at once."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Train a model in tensor, pipeline and data parallel.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="PRESET", help="name of a preset in configs/, or a YAML file")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config as YAML and exit")
    for section, cls in sections().items():
        group = parser.add_argument_group(section, (cls.__doc__ or "").strip())
        hints = get_type_hints(cls)
        for field in fields(cls):
            flag = "--" + field.name.replace("_", "-")
            default = getattr(cls, field.name, None)
            text = f"{option_doc(section, field.name)} [{_shown(default)}]".replace("%", "%%")
            if hints[field.name] is bool:
                group.add_argument(
                    flag, dest=field.name, nargs="?", const="true", default=None, help=text, metavar="BOOL"
                )
                group.add_argument(
                    "--no-" + field.name.replace("_", "-").removeprefix("no-"),
                    dest=field.name,
                    action="store_const",
                    const="false",
                    default=None,
                    help=argparse.SUPPRESS,
                ) if not field.name.startswith("no_") else None
            elif _is_multiple(hints[field.name]):
                group.add_argument(flag, dest=field.name, nargs="+", default=None, help=text, metavar="VALUE")
            else:
                group.add_argument(flag, dest=field.name, default=None, help=text, metavar=_metavar(hints[field.name]))
    return parser


def _shown(default: Any) -> str:
    if default is None or default == ():
        return "unset"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _metavar(hint: Any) -> str:
    choices = [c for part in (hint, *get_args(hint)) if get_origin(part) is Literal for c in get_args(part)]
    if choices:
        return "{" + ",".join(map(str, choices)) + "}"
    kinds = [part.__name__.upper() for part in (hint, *get_args(hint)) if part in (int, float, str)]
    return kinds[0] if kinds else "VALUE"


def parse_arguments(arguments: Sequence[str]) -> tuple[Config, argparse.Namespace]:
    """The config that the command line describes, and the namespace it was read from.

    Raises ConfigError with every unknown flag and wrong value.
    """
    # Megatron's flags are also written with underscores
    spelled = [a.split("=", 1)[0].replace("_", "-") + a[len(a.split("=", 1)[0]) :] if a[:2] == "--" else a for a in arguments]
    namespace, rest = build_parser().parse_known_args(spelled)
    faults = [_unknown_flag(word) for word in rest if word.startswith("--")]
    if rest and not faults:
        faults = [f"{word!r} stands alone; every value follows a --flag" for word in rest]
    tree: dict[str, Any] = {}
    try:
        tree = read_preset(namespace.config) if namespace.config else {}
    except ConfigError as error:
        faults += error.faults
    for name, (section, _) in options().items():
        value = getattr(namespace, name)
        if value is not None:
            here = tree.setdefault(section, {})
            if isinstance(here, dict):
                here[name] = None if value in ("none", "None", "null") and name != "recompute_granularity" else value
    try:
        config = from_dict(tree)
    except ConfigError as error:
        raise ConfigError(faults + error.faults) from None
    if faults:
        raise ConfigError(faults)
    return config, namespace


def _unknown_flag(word: str) -> str:
    name = word.split("=", 1)[0]
    near = difflib.get_close_matches(name, ["--" + option.replace("_", "-") for option in options()], n=1)
    return f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else "; see --help")


def load_config(arguments: Sequence[str], world_size: int | None = None) -> Config:
    """Read the command line and check it against `world_size` (default: the launcher's WORLD_SIZE, else 1).

    Raises ConfigError naming every fault at once. `--print-config` prints and exits 0.
    """
    config, namespace = parse_arguments(arguments)
    if namespace.print_config:
        sys.stdout.write(to_yaml(config))
        raise SystemExit(0)
    faults = check(config, world_size or int(os.environ.get("WORLD_SIZE", "1")))
    if faults:
        raise ConfigError(faults)
    return config


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(config.to_dict(), sort_keys=False, width=120)


# ---------------------------------------------------------------------------------------------------------------------
# Rules that tie several options together


def divisors(number: int, up_to: int) -> str:
    """The divisors of `number` that a message can offer: '1, 2, 4 or 8'."""
    found = [str(d) for d in range(1, min(number, up_to) + 1) if number % d == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def check(config: Config, world_size: int) -> list[str]:
    """Every rule that ties options to each other or to the number of ranks: a message for each one broken."""
    faults = _check_layout(config, world_size)
    faults += _check_model(config)
    faults += _check_batches(config, world_size)
    faults += _check_schedule(config)
    faults += _check_data(config)
    return faults


def _check_layout(config: Config, world_size: int) -> Iterable[str]:
    model, parallel, optimizer = config.model, config.parallel, config.optimizer
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    faults = []
    if world_size % (tp * pp):
        faults.append(
            f"tensor_model_parallel_size={tp} x pipeline_model_parallel_size={pp} = {tp * pp} does not divide "
            f"the {world_size} ranks of this launch; start a multiple of {tp * pp} ranks, or change the layout"
        )
    if pp > model.num_layers:
        faults.append(
            f"pipeline_model_parallel_size={pp} is larger than num_layers={model.num_layers}; "
            f"use at most {model.num_layers} stages"
        )
    if model.num_attention_heads % tp:
        faults.append(
            f"tensor_model_parallel_size={tp} does not divide num_attention_heads={model.num_attention_heads}; "
            f"use {divisors(model.num_attention_heads, 64)}"
        )
    kv = model.num_kv_heads
    if kv % tp and tp % kv:
        faults.append(
            f"tensor_model_parallel_size={tp} neither divides num_query_groups={kv} nor is a multiple of it; "
            f"use {divisors(kv, 64)}, or a multiple of {kv}"
        )
    elif tp > kv and (kv * model.head_size) % tp:
        faults.append(
            f"tensor_model_parallel_size={tp} does not divide num_query_groups x head size = {kv * model.head_size}; "
            f"use {divisors(kv * model.head_size, 64)}"
        )
    if model.ffn_size % tp:
        faults.append(
            f"tensor_model_parallel_size={tp} does not divide ffn_hidden_size={model.ffn_size}; "
            f"use {divisors(model.ffn_size, 64)}"
        )
    if parallel.sequence_parallel and config.training.seq_length % tp:
        faults.append(
            f"sequence_parallel needs tensor_model_parallel_size={tp} to divide seq_length="
            f"{config.training.seq_length}; use {divisors(config.training.seq_length, 64)}, or turn it off"
        )
    if not config.uses_pipeline and pp > 1:
        reason = (
            "no_pipeline_parallel"
            if parallel.no_pipeline_parallel
            else f"zero_stage={optimizer.zero_stage}"
            if optimizer.zero_stage >= 2
            else "offload_optimizer"
        )
        faults.append(
            f"{reason} runs without a pipeline, but pipeline_model_parallel_size={pp}; set it to 1, or use zero_stage "
            "0 or 1 without offload"
        )
    if optimizer.offload_param and optimizer.zero_stage != 3:
        faults.append(f"offload_param needs zero_stage=3, not {optimizer.zero_stage}; set zero_stage or turn it off")
    if optimizer.offload_optimizer and optimizer.zero_stage == 0:
        faults.append("offload_optimizer needs zero_stage 1, 2 or 3, not 0; set zero_stage or turn it off")
    if optimizer.offload_optimizer and optimizer.optimizer == "sgd":
        faults.append("offload_optimizer has no SGD on the host; use adamw or adam")
    return faults


def _check_model(config: Config) -> Iterable[str]:
    model, training = config.model, config.training
    faults = []
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        faults.append(
            f"num_attention_heads={model.num_attention_heads} does not divide hidden_size={model.hidden_size}; "
            f"use {divisors(model.hidden_size, 128)}, or set kv_channels"
        )
    if model.num_attention_heads % model.num_kv_heads:
        faults.append(
            f"num_query_groups={model.num_kv_heads} does not divide num_attention_heads={model.num_attention_heads}; "
            f"use {divisors(model.num_attention_heads, 128)}"
        )
    if model.position_embedding_type == "rope" and model.head_size % 2:
        faults.append(f"rope turns pairs of channels, but the head size is {model.head_size}; make it even")
    if model.rope_scaling_factor and model.position_embedding_type != "rope":
        faults.append(
            f"rope_scaling_factor={model.rope_scaling_factor} needs position_embedding_type=rope, not "
            f"{model.position_embedding_type}; unset it"
        )
    positions = model.max_position_embeddings
    if model.position_embedding_type == "learned" and positions and positions < training.seq_length:
        faults.append(
            f"seq_length={training.seq_length} is larger than max_position_embeddings={positions}; "
            "shorten it, or enlarge the position table"
        )
    if training.bf16 and training.fp16:
        faults.append("bf16 and fp16 are both on; turn one off")
    if training.grad_accum_dtype == "bf16" and not training.bf16:
        faults.append("grad_accum_dtype=bf16 needs bf16; set fp32, or turn bf16 on")
    return faults


def batch_sizes(training: TrainingConfig) -> list[int]:
    """Every global batch size the run passes through, in order."""
    if training.rampup_batch_size is None:
        return [training.global_batch_size]
    start, increment, _ = training.rampup_batch_size
    return [*range(start, training.global_batch_size, increment), training.global_batch_size]


def _check_batches(config: Config, world_size: int) -> Iterable[str]:
    training, parallel = config.training, config.parallel
    faults = []
    model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    dp = max(1, world_size // model_ranks)
    per_step = training.micro_batch_size * dp
    if training.global_batch_size % per_step:
        faults.append(
            f"global_batch_size={training.global_batch_size} is no multiple of micro_batch_size x data-parallel size = "
            f"{training.micro_batch_size} x {dp} = {per_step}; use a multiple of {per_step}"
        )
    if training.rampup_batch_size is not None:
        start, increment, _ = training.rampup_batch_size
        if start > training.global_batch_size:
            faults.append(
                f"rampup_batch_size starts at {start}, above global_batch_size={training.global_batch_size}; "
                "start lower"
            )
        elif (training.global_batch_size - start) % increment:
            faults.append(
                f"rampup_batch_size: from {start} by {increment} never reaches global_batch_size="
                f"{training.global_batch_size}; the difference must be a multiple of the increment"
            )
        wrong = [size for size in batch_sizes(training) if size % per_step]
        if wrong:
            faults.append(
                f"rampup_batch_size={start} {increment} passes through {wrong[0]}, no multiple of micro_batch_size x "
                f"data-parallel size = {per_step}; use multiples of {per_step} for start and increment, or at most "
                f"{max(1, start // training.micro_batch_size)} data-parallel ranks"
            )
        if training.train_samples is None:
            faults.append("rampup_batch_size counts samples; give train_samples instead of train_iters")
    return faults


def _check_schedule(config: Config) -> Iterable[str]:
    training, optimizer = config.training, config.optimizer
    faults = []
    if (training.train_samples is None) == (training.train_iters is None):
        given = "both are" if training.train_samples else "neither is"
        faults.append(f"give train_samples or train_iters, one of the two; {given} given")
    if training.train_samples and training.train_samples < training.global_batch_size:
        faults.append(
            f"train_samples={training.train_samples} is less than one global batch of {training.global_batch_size}"
        )
    pairs = (
        ("lr_decay", optimizer.lr_decay_samples, optimizer.lr_decay_iters),
        ("lr_warmup", optimizer.lr_warmup_samples, optimizer.lr_warmup_iters),
        ("lr_wsd_decay", optimizer.lr_wsd_decay_samples, optimizer.lr_wsd_decay_iters),
    )
    for name, in_samples, in_iters in pairs:
        if in_samples and in_iters:
            faults.append(f"{name}_samples and {name}_iters are both given; keep one")
        if in_iters and training.rampup_batch_size is not None:
            faults.append(f"{name}_iters cannot be counted under rampup_batch_size; use {name}_samples")
    if optimizer.min_lr > optimizer.lr:
        faults.append(f"min_lr={optimizer.min_lr} is above lr={optimizer.lr}; lower it")
    if optimizer.lr_decay_style == "WSD" and not (optimizer.lr_wsd_decay_samples or optimizer.lr_wsd_decay_iters):
        faults.append("lr_decay_style=WSD needs lr_wsd_decay_samples or lr_wsd_decay_iters; give one")
    size = training.global_batch_size
    decay = optimizer.lr_decay_samples or (optimizer.lr_decay_iters or 0) * size
    decay = decay or training.train_samples or (training.train_iters or 0) * size
    warmup = optimizer.lr_warmup_samples or optimizer.lr_warmup_iters * size
    if decay and warmup >= decay and optimizer.lr_decay_style != "constant":
        faults.append(f"the warm-up of {warmup} samples leaves nothing of the decay's {decay}; shorten it")
    return faults


def parse_split(text: str) -> tuple[float, float, float]:
    """'949,50,1' -> the three shares, summing to 1. Raises ValueError."""
    parts = [float(part) for part in text.replace("/", ",").split(",")]
    if not 1 <= len(parts) <= 3 or min(parts) < 0 or sum(parts) == 0:
        raise ValueError(text)
    train, valid, test = [*parts, 0.0, 0.0][:3]
    total = train + valid + test
    return train / total, valid / total, test / total


def _check_data(config: Config) -> Iterable[str]:
    data = config.data
    faults = []
    try:
        parse_split(data.split)
    except ValueError:
        faults.append(f"split={data.split!r} must be one to three shares, not all zero, such as 949,50,1")
    if not data.data_path:
        faults.append("data_path is not given; pass the prefix that tools/preprocess_data.py wrote (--data-path)")
    elif len(data.data_path) > 1:
        weights = data.data_path[::2]
        if len(data.data_path) % 2 or not all(_is_weight(weight) for weight in weights):
            faults.append(
                f"data_path={' '.join(data.data_path)!r} must be one prefix, or WEIGHT PREFIX pairs with weights above 0"
            )
    needs_eod = [name for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(data, name)]
    if needs_eod and data.eod_token_id is None and data.tokenizer_type is None:
        faults.append(f"{needs_eod[0]} must know the end-of-document id; give eod_token_id, or a tokenizer_type")
    needs: dict[str, Callable[[], bool]] = {
        "GPT2BPETokenizer": lambda: bool(data.vocab_file and data.merge_file),
        "HFTokenizer": lambda: bool(data.tokenizer_model),
        "SentencePieceTokenizer": lambda: bool(data.tokenizer_model),
    }
    if data.tokenizer_type in needs and not needs[data.tokenizer_type]():
        files = "vocab_file and merge_file" if data.tokenizer_type == "GPT2BPETokenizer" else "tokenizer_model"
        faults.append(f"tokenizer_type={data.tokenizer_type} needs {files}")
    if data.eod_token_id is not None and data.eod_token_id >= config.model.vocab_size:
        faults.append(f"eod_token_id={data.eod_token_id} is outside vocab_size={config.model.vocab_size}")
    return faults


def _is_weight(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False
