"""Options of `ilab model train` and the `train` section of its config.yaml: names, types, defaults, and what each does.

Source: instructlab/instructlab at v0.26.1, configuration.py, defaults.py and cli/model/train.py. Their defaults hold.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from megatron.launch.instructlab.arguments import Arguments, Beta, NonNegative, Positive, Share
from megatron.options.dialect import Dialect, Entry, honoured, no_effect, refused, sets

Rate = Annotated[float, Field(gt=0)]


def _home(variable: str, default: str, *parts: str) -> str:
    """Return a folder of ilab's, by the XDG variables."""
    return str(Path(os.environ.get(variable) or Path.home() / default, "instructlab", *parts))


def data_home(*parts: str) -> str:
    return _home("XDG_DATA_HOME", ".local/share", *parts)


def default_config() -> Path:
    """Return the config.yaml that `ilab config init` writes."""
    return Path(_home("XDG_CONFIG_HOME", ".config", "config.yaml"))


class IlabOptions(Arguments):
    """Values of a training, by the names of the config's keys, with their types and defaults."""

    # keys of `train`
    pipeline: Literal["simple", "full", "accelerated"] = "full"
    model_path: str = "instructlab/granite-7b-lab"
    device: Literal["cpu", "mps", "cuda", "hpu"] = "cpu"
    data_path: str = Field(default_factory=lambda: data_home("datasets"))
    ckpt_output_dir: str = Field(default_factory=lambda: data_home("checkpoints"))
    data_output_dir: str = Field(default_factory=lambda: data_home("internal"))
    max_seq_len: Positive = 4096
    max_batch_len: Positive = 5000
    num_epochs: Positive = 10
    effective_batch_size: Positive = 64
    save_samples: int = 250_000
    checkpoint_at_epoch: bool = True
    deepspeed_cpu_offload_optimizer: bool = False
    fsdp_cpu_offload_optimizer: bool = False
    distributed_backend: Literal["fsdp", "deepspeed"] = "fsdp"
    lora_rank: NonNegative | None = 0
    lora_quantize_dtype: Literal["nf4"] | None = "nf4"
    is_padding_free: bool = False
    nproc_per_node: Positive = 1
    disable_flash_attn: bool | None = False
    phased_phase1_num_epochs: Positive | None = 7
    phased_phase1_samples_per_save: NonNegative = 0
    phased_phase1_learning_rate: Rate = 2e-5
    phased_phase1_effective_batch_size: Positive | None = 128
    phased_phase2_num_epochs: Positive | None = 10
    phased_phase2_samples_per_save: NonNegative = 0
    phased_phase2_learning_rate: Rate = 6e-6
    phased_phase2_effective_batch_size: Positive | None = 3840
    phased_mt_bench_judge: str | None = None
    phased_base_dir: str = Field(default_factory=lambda: data_home("phased"))
    training_journal: str | None = None

    # keys of `train.additional_args`
    learning_rate: Rate = 2e-5
    warmup_steps: NonNegative = 25
    random_seed: NonNegative = 42
    node_rank: NonNegative = 0
    nnodes: Positive = 1
    rdzv_id: str | int = 123
    rdzv_endpoint: str | None = None
    deepspeed_cpu_offload_optimizer_ratio: Share = 1
    deepspeed_cpu_offload_optimizer_pin_memory: bool = False
    lora_alpha: Positive = 32
    lora_dropout: Beta = 0.1
    lora_target_modules: list[str] | None = Field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])

    # of the command alone
    model_id: str | None = None
    strategy: Literal["lab-multiphase", "lab-skills-only"] | None = None
    phased_phase1_data: str | None = None
    phased_phase2_data: str | None = None
    force_clear_phased_cache: bool = False
    disable_accelerate_full_state_at_epoch: bool = False

    # ours, as keys or flags
    phased_checkpoint: Literal["last", "best"] = "last"
    """Checkpoint of phase 1 that phase 2 starts from, and of phase 2 that is named at the end. `best`: the one with the
    lowest validation loss; needs validation_split in additional_args."""
    phased_phase2_replay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the samples of phase 2 that are of phase 1's data."""

    @field_validator("lora_quantize_dtype", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        # their help names 'None' as a value
        return None if value == "None" else value


ADDITIONAL = (
    "learning_rate warmup_steps random_seed node_rank nnodes rdzv_id rdzv_endpoint "
    "deepspeed_cpu_offload_optimizer_ratio deepspeed_cpu_offload_optimizer_pin_memory lora_alpha lora_dropout "
    "lora_target_modules"
).split()
"""Keys of `train.additional_args`, where every field of TrainingArgs may stand besides."""
COMMAND_ONLY = (
    "model_id strategy phased_phase1_data phased_phase2_data force_clear_phased_cache "
    "disable_accelerate_full_state_at_epoch"
).split()
FLAGS = {"nproc_per_node": "--gpus"}
"""Flags that are not called as their key."""
SWITCHES = (
    "checkpoint_at_epoch disable_flash_attn force_clear_phased_cache disable_accelerate_full_state_at_epoch "
    "skip_preprocessing local skip_quantize four_bit_quant skip_user_confirm enable_serving_output optimize_memory"
).split()
"""Flags without a value."""
SHORT = {"skip_quantize": "-sq", "skip_user_confirm": "-y"}

_AS_THEY_ARE = (
    "model_path data_path ckpt_output_dir data_output_dir max_seq_len max_batch_len num_epochs effective_batch_size "
    "save_samples checkpoint_at_epoch disable_flash_attn distributed_backend learning_rate warmup_steps random_seed"
)
_READ_TOGETHER = (
    "pipeline device lora_* deepspeed_* fsdp_* model_id strategy phased_* training_journal "
    "force_clear_phased_cache disable_accelerate_full_state_at_epoch nproc_per_node node_rank nnodes rdzv_id "
    "rdzv_endpoint is_padding_free"
)
_SIMPLE = "it belongs to the pipeline simple, which trains on a folder in llama.cpp's and MLX's formats; leave it out"
ROWS: tuple[Entry, ...] = (
    *(sets(name, name) for name in _AS_THEY_ARE.split()),
    no_effect(
        "phased_mt_bench_judge", "MT-Bench is not run; measure the exported checkpoints with megatron-evaluate instead"
    ),
    no_effect("skip_user_confirm", "there are no questions; --force-clear-phased-cache starts from the beginning"),
    no_effect("enable_serving_output", "no server is started"),
    no_effect("optimize_memory", "weights are trained in float32 on the CPU, in bfloat16 on an accelerator"),
    *(refused(name, _SIMPLE) for name in ("input_dir", "gguf_model_path", "skip_preprocessing", "tokenizer_dir")),
    *(refused(name, _SIMPLE) for name in ("iters", "local", "skip_quantize")),
    refused("four_bit_quant", "use lora_rank with lora_quantize_dtype=nf4"),
    *(honoured(name, "", takes="value") for name in _READ_TOGETHER.split()),
)
"""Outcome of each key and flag; the first row that covers a name counts."""


def _unknown(name: str, value: object, near: str | None) -> str:
    # an error of this file: names that ilab does not have were refused before
    raise LookupError(f"{name} has no row in ROWS")


DIALECT = Dialect(ROWS, _unknown)


def flag_of(name: str) -> str:
    """Return the flag of a key: --phased-phase1-num-epochs."""
    if name == "four_bit_quant":
        return "--4-bit-quant"
    return FLAGS.get(name, "--" + name.replace("_", "-"))


def flag_texts() -> dict[str, str]:
    """Return the names of everything that has a flag, with what becomes of it."""
    texts = {}
    for name, default in IlabOptions().model_dump().items():
        key = f"train.{'additional_args.' if name in ADDITIONAL else ''}{name}"
        if name in COMMAND_ONLY:
            texts[name] = f"default: {default}"
        # ilab has no flag of it either
        elif name != "random_seed":
            texts[name] = f"config: {key}, default: {default}"
    for row in DIALECT.rows:
        if row.outcome in ("refused", "no effect"):
            texts[row.name] = f"{row.outcome}: {row.reason}"
    for name in ("phased_checkpoint", "phased_phase2_replay"):
        texts[name] = f"{' '.join(str(IlabOptions.model_fields[name].description).split())} {texts[name]}"
    return texts
