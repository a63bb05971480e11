"""Every option of a run: one tree of dataclasses, declared once.

A value comes from three sources, later ones override earlier ones: the field's default, the YAML presets
(`--config tiny_bloom` or `--config path.yaml`), the command line. Field names are unique over the whole tree, so each
is also a flat flag under the name Megatron users know: `tensor_model_parallel_size` is `--tensor-model-parallel-size`.

settings/command_line.py reads a config, settings/validation.py checks the rules between options. The files of this
folder import neither torch nor deepspeed, so an invalid config is reported at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_type_hints

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from megatron.options.data import DataConfig
from megatron.options.flags import doc_of_option
from megatron.options.model import LoraConfig, ModelConfig
from megatron.options.optimizer import OptimizerConfig
from megatron.options.outputs import CheckpointConfig, LoggingConfig
from megatron.options.preference import PreferenceConfig
from megatron.options.training import Fp8Config, GuardConfig, ParallelConfig, TrainingConfig
from megatron.options.types import STRICT, Positive
from megatron.runtime.commands import UserError, counted
from megatron.runtime.devices import find_device, planned_device


class ConfigError(UserError, ValueError):
    """Invalid configuration: every fault found, one per line."""

    def __init__(self, faults: Sequence[str]):
        self.faults = list(faults)
        super().__init__(
            f"{counted(len(self.faults), 'error')} in the configuration:\n" + "\n".join(f"  - {f}" for f in self.faults)
        )


def broken(*rules: tuple[object, str]) -> list[str]:
    """Return the messages of the rules that are broken; a rule is (whether it is broken, message)."""
    return [message for is_broken, message in rules if is_broken]


@dataclass(frozen=True, config=STRICT)
class SFTConfig:
    """Packing of chats, or of pairs of answers, into microbatches."""

    packing: Literal["step", "dataset", "none"] = "step"
    """`step`: pack each global batch, of exactly global_batch_size chats, into microbatches of one row of at most
    max_batch_len tokens. `dataset`: pack all chats into rows of seq_length tokens; each row is a sample. `none`:
    micro_batch_size chats per microbatch, padded to the longest. Pairs take the place of chats, and 2 x seq_length that
    of seq_length, with task=preference."""
    max_batch_len: Positive | None = None
    """packing=step: maximum number of tokens in a microbatch, at least seq_length (pairs of answers: 2 x
    seq_length), which it is if unset."""
    bucketing: Literal["auto", "off", "octave", "optimal"] = "auto"
    """Round row lengths up to a few lengths, for devices that compile once per shape. `octave`: buckets_per_octave
    lengths between powers of two. `optimal`: the num_buckets lengths with the least padding. `off`: no rounding.
    `auto`: octave on HPU, otherwise off."""
    buckets_per_octave: Positive = 16
    """bucketing=octave: lengths per octave; at most 1 / this number of a row is padding."""
    num_buckets: Positive = 16
    """bucketing=optimal: number of lengths."""
    compile_ahead: bool | None = None
    """Run the passes of each row length of the run once before the first step, without an update, so that the device
    compiles nothing later. Unset: on HPU with bucketing, but not in fp8."""


@dataclass(frozen=True, config=STRICT)
class Config:
    """Options of a whole run."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    sft: SFTConfig = Field(default_factory=SFTConfig)
    preference: PreferenceConfig = Field(default_factory=PreferenceConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    fp8: Fp8Config = Field(default_factory=Fp8Config)

    @property
    def compares_validations(self) -> bool:
        """True if the run looks for its best validation."""
        return self.checkpoint.keep_best or self.training.early_stopping_patience is not None

    @property
    def effective_watchdog_timeout_s(self) -> float:
        """Timeout of the watchdog in seconds. 0: no watchdog."""
        if self.guard.watchdog_timeout_s is not None:
            return self.guard.watchdog_timeout_s
        # not above the timeout of collectives, by which ranks would end before the watchdog has written their stacks
        return min(600.0, self.parallel.distributed_timeout_minutes * 60)

    @property
    def uses_pipeline(self) -> bool:
        """True for DeepSpeed's pipeline engine, False for the sequential engine."""
        optimizer = self.optimizer
        # DeepSpeed's pipeline engine refuses ZeRO 2 and 3
        return not (self.parallel.no_pipeline_parallel or optimizer.zero_stage >= 2 or optimizer.offload_optimizer)

    @property
    def uses_own_schedule(self) -> bool:
        """True for a pipeline schedule that DeepSpeed does not run."""
        return self.uses_pipeline and self.parallel.schedule != "1f1b"

    @property
    def effective_zero_stage(self) -> int:
        """ZeRO stage that DeepSpeed runs: its 16-bit optimizers always shard their states."""
        if self.training.precision == "fp32":
            return self.optimizer.zero_stage
        return max(1, self.optimizer.zero_stage)

    @property
    def records_logits_above(self) -> float | None:
        """Return the size from which on the largest attention logits of a step are recorded; None: none are."""
        if self.logging.log_max_attention_logit:
            return -math.inf
        return self.optimizer.qk_clip_threshold if self.optimizer.qk_clip else None

    @property
    def fp8_recipe(self) -> str:
        """Scales of fp8's operands: those of the option, or the device's own."""
        if self.fp8.fp8_recipe is not None:
            return self.fp8.fp8_recipe
        recipes = planned_device(self.parallel.device).fp8_recipes
        return recipes[0] if recipes else "tensorwise"

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values, as in a preset."""
        # mode="json": tuples become lists, as YAML and JSON give them back
        return TypeAdapter(Config).dump_python(self, mode="json")


def on_device(config: Config, device: str, *, lazy: bool) -> Config:
    """Return the config of a run on a device, by its name, with the options resolved that depend on it.

    `lazy`: the HPU records operators and launches them at step marks, as it does under PT_HPU_LAZY_MODE=1.
    """
    parallel, training = config.parallel, config.training
    compiled = training.torch_compile
    if compiled is None:
        # waits within a layer are not seen in its graph, and Habana trains in fp8 in lazy mode
        waits_inside = parallel.tensor_model_parallel_size > 1 or parallel.expert_model_parallel_size > 1
        times_parts = config.logging.log_straggler and waits_inside
        compiles = find_device(device).compiles_layers
        compiled = compiles and not lazy and not times_parts and not config.fp8.uses_fp8
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(parallel, device=device),
        training=dataclasses.replace(training, torch_compile=compiled),
    )


@cache
def sections() -> dict[str, type]:
    """Return the dataclass of each section, in order."""
    # the annotations are strings here; fields() alone has them as such
    hints = get_type_hints(Config, include_extras=False)
    return {field.name: hints[field.name] for field in fields(Config)}


@cache
def options() -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """Return the section and field of each option, by its (unique) name."""
    by_name: dict[str, tuple[str, dataclasses.Field[Any]]] = {}
    for section, cls in sections().items():
        for field in fields(cls):
            # a flat flag has room for one
            assert field.name not in by_name, f"{field.name} is in {section} and in {by_name[field.name][0]}"
            by_name[field.name] = (section, field)
    return by_name


def option_doc(section: str, name: str) -> str:
    """Return the documentation of an option, on one line."""
    return doc_of_option(sections()[section], name)


def batch_sizes(training: TrainingConfig) -> list[int]:
    """Return every global batch size of the run, in order."""
    if training.rampup_batch_size is None:
        return [training.global_batch_size]
    # all but the last are below the full size
    start, increment, _ = training.rampup_batch_size
    return [*range(start, training.global_batch_size, increment), training.global_batch_size]


def num_microbatches(training: TrainingConfig, num_batch_ranks: int) -> int:
    """Return the microbatches of each data-parallel rank in a step, once any ramp-up is over."""
    # 1 for a global batch that does not divide, which a rule refuses with all other faults
    return max(1, training.global_batch_size // (training.micro_batch_size * num_batch_ranks))


def batch_levels(training: TrainingConfig) -> list[tuple[int, int | None]]:
    """Return each global batch size with the first consumed_samples beyond it (None: the last)."""
    if training.rampup_batch_size is None:
        return [(training.global_batch_size, None)]
    start, increment, ramp_samples = training.rampup_batch_size
    # level n ends at ceil((n + 1) * samples / number): in whole numbers, as no boundary may be missed by rounding
    number = (training.global_batch_size - start) // increment
    levels = [(start + n * increment, -(-(n + 1) * ramp_samples // number)) for n in range(number)]
    return [*levels, (training.global_batch_size, None)]


def samples_after(training: TrainingConfig, iterations: int) -> int:
    """Return the samples in the first `iterations` steps of a stream of samples, ramp-up included."""
    samples = 0
    for batch_size, level_end in batch_levels(training):
        steps = iterations
        # a level ends with the first step that reaches its end, so the next one begins a little late
        if level_end is not None:
            steps = min(iterations, steps_beyond(level_end, samples, batch_size))
        samples += steps * batch_size
        iterations -= steps
    return samples


def length_stages(training: TrainingConfig) -> list[tuple[int, int | None]]:
    """Return the length of rows in each stage with the first consumed_samples beyond it (None: the last)."""
    given, iterations = training.seq_length_stages or (), 0
    stages: list[tuple[int, int | None]] = []
    # a rule refuses a last length without its iterations
    for length, steps in zip(given[::2], given[1::2], strict=False):
        iterations += steps
        stages.append((length, samples_after(training, iterations)))
    return [*stages, (training.seq_length, None)]


def steps_beyond(level_end: int, samples: int, batch_size: int) -> int:
    """Return the steps of a batch size by which the samples consumed reach or pass the end of its level."""
    # 0: a step of the level before has passed this level as a whole
    return max(0, -(-(level_end - samples) // batch_size))
