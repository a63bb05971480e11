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
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
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

# numbers become strings where a string is wanted: `split: 100` and `data_path: [0.3, a, 0.7, b]` in a preset
STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, coerce_numbers_to_str=True)


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


def flag(name: str) -> str:
    """`num_layers` -> `--num-layers`."""
    return "--" + name.replace("_", "-")


def from_dict(tree: dict[str, Any]) -> Config:
    """Build a config from nested plain values. Raises ConfigError with every wrong key, type and range."""
    config, faults = _build(tree)
    if config is None or faults:
        raise ConfigError(faults)
    return config


def _build(tree: dict[str, Any]) -> tuple[Config | None, list[str]]:
    """The config of what is known and well-typed in `tree` (None if a value is not), and every fault."""
    known: dict[str, dict[str, Any]] = {}
    faults = [
        f"unknown section {name!r}; the sections are {', '.join(sections())}" for name in tree if name not in sections()
    ]
    for section, cls in sections().items():
        values = tree.get(section) or {}
        if not isinstance(values, dict):
            faults.append(f"section {section!r} holds {values!r}; it must be a mapping of options")
            continue
        hints = get_type_hints(cls)
        faults += [_unknown_option(str(name), section) for name in values if name not in hints]
        known[section] = {
            # a sequence may be written as one string: `rampup_batch_size: 16 16 5000000`
            name: value.split() if isinstance(value, str) and _sequence(hints[name]) else value
            for name, value in values.items()
            if name in hints
        }
    try:
        return TypeAdapter(Config).validate_python(known), faults
    except ValidationError as error:
        wrong = [_wrong_value(known, fault["loc"], fault["type"], fault["msg"]) for fault in error.errors()]
        return None, faults + list(dict.fromkeys(wrong))


def _wrong_value(known: dict[str, dict[str, Any]], where: tuple[int | str, ...], kind: str, rule: str) -> str:
    """What is said of a value with a wrong type or range."""
    section, name = str(where[0]), str(where[1])
    value = known[section][name]
    wanted = get_args(_sequence(get_type_hints(sections()[section])[name]))
    if kind in ("missing", "too_short", "too_long") and wanted:
        rule = f"takes {len(wanted)} values, not {len(value)}"
    shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else repr(value)
    return f"{section}.{name}={shown}: {rule[:1].lower()}{rule[1:]}"


def _unknown_option(name: str, section: str) -> str:
    """What is said of an option that does not exist there: where it belongs, or the nearest one that does."""
    if name in options():
        return f"option {name!r} in section {section!r} belongs in section {options()[name][0]!r}"
    near = difflib.get_close_matches(name, options(), n=1)
    hint = f"; did you mean {near[0]!r} in section {options()[near[0]][0]!r}?" if near else "; see --help"
    return f"unknown option {name!r} in section {section!r}{hint}"


class _PresetLoader(yaml.SafeLoader):
    """YAML's safe loader, refusing a key written twice: YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is given twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_preset(name: str) -> dict[str, Any]:
    """The nested values of a preset, by path or by the name of a file in configs/."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else PRESETS_DIR / f"{name}.yaml"
    if not path.is_file():
        known = sorted(preset.stem for preset in PRESETS_DIR.glob("*.yaml"))
        near = difflib.get_close_matches(Path(name).stem, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError([f"config {name!r} not found; {hint}the presets are {', '.join(known)}"])
    try:
        tree = _PresetLoader(path.read_text(encoding="utf-8")).get_single_data() or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"config {path} is no valid YAML: {' '.join(str(error).split())}"]) from None
    except OSError as error:
        raise ConfigError([f"config {path} cannot be read: {error.strerror}"]) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"config {path} holds a {type(tree).__name__}; it must be a mapping of sections"])
    return tree


# ---------------------------------------------------------------------------------------------------------------------
# The command line


class _HelpFormatter(argparse.HelpFormatter):
    """Each metavar as it was written: argparse would bracket every value that it must not demand itself."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar or default_metavar)


def build_parser(prog: str = "python -m megatron.train") -> argparse.ArgumentParser:
    """One flag an option, grouped by section.

    Values stay strings, and a missing one is an empty string, so that all are judged at once, not one by one.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} --config PRESET [--flag VALUE ...]",
        description="Train a model in tensor, pipeline and data parallel. A value comes from the option's default, "
        "then from the preset, then from the command line. A BOOL flag alone means true, --no-FLAG means false; "
        "`none` unsets an option.",
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument(
        "--config", nargs="?", const="", metavar="PRESET", help="name of a preset in configs/, or a YAML file"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved config as YAML and exit")
    for section, cls in sections().items():
        group = parser.add_argument_group(section, (cls.__doc__ or "").strip())
        for name, hint in get_type_hints(cls).items():
            text = _help_text(section, name, getattr(cls, name), hint).replace("%", "%%")
            if hint is bool:
                group.add_argument(flag(name), dest=name, nargs="?", const="true", help=text, metavar=_metavar(hint))
                if not name.startswith("no_"):
                    negative = flag("no_" + name)
                    group.add_argument(negative, dest=name, action="store_const", const="false", help=argparse.SUPPRESS)
            elif _sequence(hint):
                group.add_argument(flag(name), dest=name, nargs="*", help=text, metavar=_metavar(hint))
            else:
                group.add_argument(flag(name), dest=name, nargs="?", const="", help=text, metavar=_metavar(hint))
    return parser


def _help_text(section: str, name: str, default: Any, hint: Any) -> str:
    text = option_doc(section, name)
    if _metavar(hint) == "NAME":
        text += f" One of {', '.join(_choices(hint))}."
    says_unset = shown(default) == "unset" and "Unset:" in text
    return text if says_unset else f"{text} (default: {shown(default)})"


def shown(default: Any) -> str:
    """A default as a user would write it."""
    if default is None or default == ():
        return "unset"
    if isinstance(default, bool):
        return str(default).lower()
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _sequence(hint: Any) -> Any:
    """The tuple type in `tuple[...]` or `tuple[...] | None`; None for a single value."""
    return next((part for part in (hint, *get_args(hint)) if get_origin(part) is tuple), None)


def _choices(hint: Any) -> list[str]:
    """The values of `Literal[...]` or `Literal[...] | None`; none for other types."""
    return [str(c) for part in (hint, *get_args(hint)) if get_origin(part) is Literal for c in get_args(part)]


def _metavar(hint: Any) -> str:
    """What stands for the value in --help: {a,b}, INT, INT INT INT, STR ..."""
    if hint is bool:
        return "[BOOL]"
    if choices := _choices(hint):
        braced = "{" + ",".join(choices) + "}"
        return braced if len(braced) <= 48 else "NAME"
    if sequence := _sequence(hint):
        return " ".join("..." if part is Ellipsis else part.__name__.upper() for part in get_args(sequence))
    return next(part.__name__.upper() for part in (hint, *get_args(hint)) if part in (int, float, str))


def parse_arguments(arguments: Sequence[str]) -> tuple[Config, argparse.Namespace]:
    """The config that the command line describes, and the namespace it was read from.

    Raises ConfigError with every unknown flag and wrong value.
    """
    config, namespace, faults = _parse(arguments)
    if config is None or faults:
        raise ConfigError(faults)
    return config, namespace


def _parse(arguments: Sequence[str]) -> tuple[Config | None, argparse.Namespace, list[str]]:
    """As parse_arguments, with the faults told: the config is None where they leave nothing to check."""
    words = _dashed(arguments)
    namespace, rest = build_parser().parse_known_args(words)
    faults = _stray_words(words, rest)
    tree: dict[str, Any] = {}
    unread = False
    if namespace.config == "":
        faults.append("--config needs a value, the name of a preset or a YAML file")
    elif namespace.config is not None:
        try:
            tree = read_preset(namespace.config)
        except ConfigError as error:
            faults += error.faults
            unread = True
    for section, cls in sections().items():
        given = {name: getattr(namespace, name) for name in get_type_hints(cls)}
        given = {name: value for name, value in given.items() if value is not None}
        faults += [f"{flag(name)} needs a value" for name, value in given.items() if value in ("", [])]
        if tree.get(section) is None:
            tree[section] = {}
        if isinstance(tree[section], dict):
            tree[section] |= {name: _unset(cls, name, value) for name, value in given.items() if value not in ("", [])}
    config, wrong = _build(tree)
    return None if unread else config, namespace, faults + wrong


def _dashed(arguments: Sequence[str]) -> list[str]:
    """The arguments with each flag spelled in dashes; Megatron's users also write underscores."""
    words = []
    for word in arguments:
        name, equals, value = word.partition("=")
        words.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
    return words


def _unset(cls: type, name: str, value: Any) -> Any:
    """`none` on the command line unsets an option that can be unset, and is a value like others elsewhere."""
    is_none = value in ("none", "None", "null", ["none"], ["None"], ["null"])
    return None if is_none and type(None) in get_args(get_type_hints(cls)[name]) else value


def _stray_words(arguments: Sequence[str], rest: Sequence[str]) -> list[str]:
    """Faults for `rest`, what argparse did not recognise in `arguments`: unknown flags, values that follow no flag."""
    unknown = [word for word in rest if word.startswith("-")]
    values_of_unknown: list[str] = []
    follows_unknown = False
    for word in arguments:
        if word.startswith("-"):
            follows_unknown = word in unknown
        elif follows_unknown:
            values_of_unknown.append(word)
    faults = [_unknown_flag(word) for word in unknown]
    for word in rest:
        if word in values_of_unknown:
            values_of_unknown.remove(word)
        elif word not in unknown:
            faults.append(f"{word!r} follows no flag; write --FLAG {word}, and one value for a flag that takes one")
    return faults


def _unknown_flag(word: str) -> str:
    name = word.split("=", 1)[0]
    near = difflib.get_close_matches(name, [flag(option) for option in options()], n=1)
    return f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else "; see --help")


def load_config(arguments: Sequence[str], world_size: int | None = None) -> Config:
    """Read the command line and check it against `world_size` (default: the launcher's WORLD_SIZE, else 1).

    Raises ConfigError naming every fault at once. `--print-config` prints and exits 0.
    """
    config, namespace, faults = _parse(arguments)
    if config is not None and not (namespace.print_config and not faults):
        faults += check(config, world_size or int(os.environ.get("WORLD_SIZE", "1")))
    if config is None or faults:
        raise ConfigError(faults)
    if namespace.print_config:
        sys.stdout.write(to_yaml(config))
        raise SystemExit(0)
    return config


def to_yaml(config: Config) -> str:
    """The config as a preset that sets every option."""
    text: str = yaml.safe_dump(config.to_dict(), sort_keys=False, width=120)
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Rules that tie several options together


def divisors(number: int, up_to: int) -> str:
    """The divisors of `number` that a message can offer: '1, 2, 4 or 8'."""
    found = [str(d) for d in range(1, min(number, up_to) + 1) if number % d == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def check(config: Config, world_size: int) -> list[str]:
    """Every rule that ties options to each other or to the number of ranks: a message for each one broken."""
    return [
        *_check_ranks(config, world_size),
        *_check_tensor_parallel(config),
        *_check_engine(config),
        *_check_model(config),
        *_check_precision_and_device(config),
        *_check_batch(config, world_size),
        *_check_rampup(config, world_size),
        *_check_length(config),
        *_check_schedule(config),
        *_check_data(config),
        *_check_tokenizer(config),
        *_check_logging(config),
    ]


def _check_ranks(config: Config, world_size: int) -> Iterator[str]:
    parallel, num_layers = config.parallel, config.model.num_layers
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if world_size % (tp * pp):
        yield (
            f"tensor_model_parallel_size={tp} x pipeline_model_parallel_size={pp} = {tp * pp} does not divide "
            f"the {world_size} ranks of this launch; start a multiple of {tp * pp} ranks, or change the layout"
        )
    if pp > num_layers:
        yield (
            f"pipeline_model_parallel_size={pp} is larger than num_layers={num_layers}; use at most {num_layers} stages"
        )


def _check_tensor_parallel(config: Config) -> Iterator[str]:
    model, seq_length = config.model, config.training.seq_length
    tp, kv = config.parallel.tensor_model_parallel_size, config.model.num_kv_heads
    if model.num_attention_heads % tp:
        yield (
            f"tensor_model_parallel_size={tp} does not divide num_attention_heads={model.num_attention_heads}; "
            f"use {divisors(model.num_attention_heads, 64)}"
        )
    if kv % tp and tp % kv:
        yield (
            f"tensor_model_parallel_size={tp} neither divides num_query_groups={kv} nor is a multiple of it; "
            f"use {divisors(kv, 64)}, or a multiple of {kv}"
        )
    elif tp > kv and (kv * model.head_size) % tp:
        yield (
            f"tensor_model_parallel_size={tp} does not divide num_query_groups x head size = {kv * model.head_size}; "
            f"use {divisors(kv * model.head_size, 64)}"
        )
    if model.ffn_size % tp:
        yield (
            f"tensor_model_parallel_size={tp} does not divide ffn_hidden_size={model.ffn_size}; "
            f"use {divisors(model.ffn_size, 64)}"
        )
    if config.parallel.sequence_parallel and seq_length % tp:
        yield (
            f"sequence_parallel needs tensor_model_parallel_size={tp} to divide seq_length={seq_length}; "
            f"use {divisors(seq_length, 64)}, or turn it off"
        )


def _check_engine(config: Config) -> Iterator[str]:
    optimizer, pp = config.optimizer, config.parallel.pipeline_model_parallel_size
    if not config.uses_pipeline and pp > 1:
        reason = "offload_optimizer" if optimizer.offload_optimizer else f"zero_stage={optimizer.zero_stage}"
        reason = "no_pipeline_parallel" if config.parallel.no_pipeline_parallel else reason
        yield (
            f"{reason} runs without a pipeline, but pipeline_model_parallel_size={pp}; set it to 1, or use zero_stage "
            "0 or 1 without offload and without no_pipeline_parallel"
        )
    if optimizer.offload_param and optimizer.zero_stage != 3:
        yield f"offload_param needs zero_stage=3, not {optimizer.zero_stage}; set zero_stage or turn it off"
    if optimizer.offload_optimizer and optimizer.zero_stage == 0:
        yield "offload_optimizer needs zero_stage 1, 2 or 3, not 0; set zero_stage or turn it off"
    if optimizer.offload_optimizer and optimizer.optimizer == "sgd":
        yield "offload_optimizer has no optimizer=sgd on the host; use adamw or adam, or turn it off"


def _check_model(config: Config) -> Iterator[str]:
    model, seq_length = config.model, config.training.seq_length
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        yield (
            f"num_attention_heads={model.num_attention_heads} does not divide hidden_size={model.hidden_size}; "
            f"use {divisors(model.hidden_size, 128)}, or set kv_channels"
        )
    if model.num_attention_heads % model.num_kv_heads:
        yield (
            f"num_query_groups={model.num_kv_heads} does not divide num_attention_heads={model.num_attention_heads}; "
            f"use {divisors(model.num_attention_heads, 128)}"
        )
    if model.position_embedding_type == "rope" and model.head_size % 2:
        yield f"rope turns pairs of channels, but the head size is {model.head_size}; make it even"
    if model.rope_scaling_factor and model.position_embedding_type != "rope":
        yield (
            f"rope_scaling_factor={model.rope_scaling_factor} needs position_embedding_type=rope, not "
            f"{model.position_embedding_type}; unset it"
        )
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    if model.rope_scaling_factor and low >= high:
        yield f"rope_scaling_low_freq_factor={low} must be below rope_scaling_high_freq_factor={high}; lower it"
    positions = model.max_position_embeddings
    if model.position_embedding_type == "learned" and positions and positions < seq_length:
        yield (
            f"seq_length={seq_length} is larger than max_position_embeddings={positions}; "
            "shorten it, or enlarge the position table"
        )


def _check_precision_and_device(config: Config) -> Iterator[str]:
    model, training, device = config.model, config.training, config.parallel.device
    if training.bf16 and training.fp16:
        yield "bf16 and fp16 are both on; turn one off"
    if training.grad_accum_dtype == "bf16" and not training.bf16:
        yield f"grad_accum_dtype=bf16 needs bf16, but the precision is {training.precision}; set fp32, or turn bf16 on"
    if training.fp16 and training.min_loss_scale > training.initial_loss_scale:
        yield (
            f"min_loss_scale={training.min_loss_scale} is above initial_loss_scale={training.initial_loss_scale}; "
            "lower it"
        )
    needs = {"flex": "cuda", "fused_hpu": "hpu"}.get(model.attention_backend, device)
    if device not in ("auto", needs):
        yield f"attention_backend={model.attention_backend} runs on {needs} only, but device={device}; use auto or sdpa"
    if model.use_fast_softmax and device in ("cuda", "cpu"):
        yield f"use_fast_softmax is for hpu only, but device={device}; turn it off"


def batch_sizes(training: TrainingConfig) -> list[int]:
    """Every global batch size the run passes through, in order."""
    if training.rampup_batch_size is None:
        return [training.global_batch_size]
    start, increment, _ = training.rampup_batch_size
    return [*range(start, training.global_batch_size, increment), training.global_batch_size]


def _data_parallel_size(config: Config, world_size: int) -> int:
    parallel = config.parallel
    model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    return max(1, world_size // model_ranks)


def _check_batch(config: Config, world_size: int) -> Iterator[str]:
    training, dp = config.training, _data_parallel_size(config, world_size)
    per_pass = training.micro_batch_size * dp
    if training.global_batch_size % per_pass:
        yield (
            f"global_batch_size={training.global_batch_size} is no multiple of micro_batch_size x data-parallel size = "
            f"{training.micro_batch_size} x {dp} = {per_pass}; use a multiple of {per_pass}"
        )


def _check_rampup(config: Config, world_size: int) -> Iterator[str]:
    training, dp = config.training, _data_parallel_size(config, world_size)
    if training.rampup_batch_size is None:
        return
    start, increment, samples = training.rampup_batch_size
    per_pass = training.micro_batch_size * dp
    given = f"rampup_batch_size={start} {increment} {samples}"
    if start > training.global_batch_size:
        yield f"{given} starts above global_batch_size={training.global_batch_size}; start lower"
    elif (training.global_batch_size - start) % increment:
        yield (
            f"{given} never reaches global_batch_size={training.global_batch_size}: the difference "
            f"{training.global_batch_size - start} is no multiple of the increment; change one of the three"
        )
    wrong = [size for size in batch_sizes(training)[:-1] if size % per_pass]
    if wrong:
        # every size is a multiple of what start and increment have in common
        shared, left_over = divmod(math.gcd(start, increment), training.micro_batch_size)
        yield (
            f"{given} passes through {wrong[0]}, no multiple of micro_batch_size x data-parallel size = "
            f"{training.micro_batch_size} x {dp} = {per_pass}; use multiples of {per_pass} for start and increment"
            + ("" if left_over else f", or a data-parallel size of {divisors(shared, shared)}")
        )
    if training.train_samples is None:
        yield f"{given} counts samples, but train_samples is not given; give it instead of train_iters"


def _check_length(config: Config) -> Iterator[str]:
    samples, iters = config.training.train_samples, config.training.train_iters
    if samples and iters:
        yield f"train_samples={samples} and train_iters={iters} are both given; keep one"
    if not samples and not iters:
        yield "neither train_samples nor train_iters is given; give one, to say how long to train"
    size = config.training.global_batch_size
    if samples and samples < size:
        yield f"train_samples={samples} is less than one global_batch_size={size}; train longer, or in smaller batches"


def _check_schedule(config: Config) -> Iterator[str]:
    training, optimizer = config.training, config.optimizer
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        samples, iters = getattr(optimizer, f"{name}_samples"), getattr(optimizer, f"{name}_iters")
        if samples and iters:
            yield f"{name}_samples={samples} and {name}_iters={iters} are both given; keep one"
        if iters and training.rampup_batch_size is not None:
            yield f"{name}_iters={iters} cannot be counted under rampup_batch_size; use {name}_samples"
    if optimizer.min_lr > optimizer.lr:
        yield f"min_lr={optimizer.min_lr} is above lr={optimizer.lr}; lower it"
    size = training.global_batch_size
    warmup = optimizer.lr_warmup_samples or optimizer.lr_warmup_iters * size
    decay = optimizer.lr_decay_samples or (optimizer.lr_decay_iters or 0) * size
    decay = decay or training.train_samples or (training.train_iters or 0) * size
    if decay and warmup >= decay and optimizer.lr_decay_style != "constant":
        yield f"the warm-up of {warmup} samples leaves nothing of the decay's {decay}; shorten lr_warmup_*"
    if optimizer.lr_decay_style == "WSD":
        last = optimizer.lr_wsd_decay_samples or (optimizer.lr_wsd_decay_iters or 0) * size
        if not last:
            yield "lr_decay_style=WSD needs lr_wsd_decay_samples or lr_wsd_decay_iters; give one"
        elif warmup < decay < warmup + last:
            yield (
                f"the warm-up of {warmup} samples and WSD's last part of {last} do not fit into {decay}; "
                "shorten lr_wsd_decay_*"
            )


def parse_split(text: str) -> tuple[float, float, float]:
    """'949,50,1' -> the three shares, summing to 1. Raises ValueError."""
    parts = [float(part) for part in text.replace("/", ",").split(",")]
    if not 1 <= len(parts) <= 3 or not all(0 <= part < math.inf for part in parts) or sum(parts) == 0:
        raise ValueError(text)
    train, valid, test = [*parts, 0.0, 0.0][:3]
    total = train + valid + test
    return train / total, valid / total, test / total


def _check_data(config: Config) -> Iterator[str]:
    data = config.data
    try:
        parse_split(data.split)
    except ValueError:
        yield f"split={data.split!r} must be one to three shares, not all zero, such as 949,50,1"
    if not data.data_path:
        yield "data_path is not given; pass the prefix that tools/preprocess_data.py wrote (--data-path)"
    elif len(data.data_path) > 1 and (len(data.data_path) % 2 or not all(map(_is_weight, data.data_path[::2]))):
        yield (
            f"data_path={' '.join(data.data_path)!r} must be one prefix, or WEIGHT PREFIX pairs with weights above 0"
        )


def _is_weight(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _check_tokenizer(config: Config) -> Iterator[str]:
    data, vocab_size = config.data, config.model.vocab_size
    needs_eod = [
        name for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(data, name)
    ]
    if needs_eod and data.eod_token_id is None and data.tokenizer_type is None:
        yield f"{needs_eod[0]} must know the end-of-document id; give eod_token_id, or a tokenizer_type"
    if data.tokenizer_type == "GPT2BPETokenizer" and not (data.vocab_file and data.merge_file):
        yield "tokenizer_type=GPT2BPETokenizer needs vocab_file and merge_file; give both"
    if data.tokenizer_type in ("HFTokenizer", "SentencePieceTokenizer") and not data.tokenizer_model:
        yield f"tokenizer_type={data.tokenizer_type} needs tokenizer_model; give the file"
    if data.eod_token_id is not None and data.eod_token_id >= vocab_size:
        yield f"eod_token_id={data.eod_token_id} is outside vocab_size={vocab_size}; use an id below {vocab_size}"


def _check_logging(config: Config) -> Iterator[str]:
    first, last = config.logging.profile_steps
    if config.logging.profile and config.logging.results_dir is None:
        yield "profile writes its trace to results_dir, which is not given; give one, or turn it off"
    if first > last:
        yield f"profile_steps={first} {last} ends before it starts; give FIRST LAST"
