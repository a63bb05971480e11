"""The request of `ilab --config FILE model train FLAGS`, as arguments of run_training.

A flag counts before its key of the config, and the key before the default. Every key and flag is used, named in a note
where it has no effect, or refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron.launch.instructlab.arguments import TorchrunArgs, TrainingArgs
from megatron.launch.instructlab.ilab_options import (
    ADDITIONAL,
    COMMAND_ONLY,
    DIALECT,
    IlabOptions,
    default_config,
    flag_of,
)
from megatron.launch.instructlab.phases import LabPhase, LabPhases, phase_faults
from megatron.options.config import ConfigError
from megatron.options.dialect import nearest, suggestion
from megatron.options.stored import UniqueKeyLoader
from megatron.runtime.devices import device_fault

OTHER_SECTIONS = ("chat", "evaluate", "generate", "metadata", "rag", "serve", "version")
"""Sections of other commands, which are not read."""
GENERAL = ("student_model_id", "use_legacy_tmpl", "log_level")
"""Keys of `general` that a training reads."""
OTHER_GENERAL = ("debug_level", "log_format", "teacher_model_id")
SHARED = ("num_epochs", "effective_batch_size")
"""Keys that a phase without its own takes from the training."""
LEVELS = {"WARN": "WARNING", "FATAL": "CRITICAL", "NOTSET": "DEBUG"}
"""Levels of theirs by other names."""


@dataclass
class IlabTraining:
    """A training that ilab's config and flags request."""

    torch_args: TorchrunArgs
    train_args: TrainingArgs
    phases: LabPhases | None = None
    """Those of LAB. None: one training."""
    notes: list[str] = field(default_factory=list)


@dataclass
class IlabConfig:
    """The part of a config.yaml that a training reads."""

    train: dict[str, Any] = field(default_factory=dict)
    """Keys of `train`, and of its additional_args that are options of ilab's."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of TrainingArgs, from additional_args."""
    general: dict[str, Any] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    """Paths by id."""
    faults: list[str] = field(default_factory=list)


def read_ilab_config(name: str | None) -> IlabConfig:
    """Return what a config.yaml sets. None: ilab's own, if it is there; DEFAULT: the defaults. Raises ConfigError."""
    path = default_config() if name is None else Path(name)
    if name == "DEFAULT" or (name is None and not path.is_file()):
        return IlabConfig()
    try:
        tree = UniqueKeyLoader(path.read_text(encoding="utf-8")).get_single_data()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"config {path} is not valid YAML: {' '.join(str(error).split())}"]) from None
    except OSError as error:
        raise ConfigError([f"config {path} cannot be read: {error.strerror}; give --config"]) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"config {path} is a {type(tree).__name__}; it must be a mapping of sections"])
    config = IlabConfig()
    for section, values in _expanded(tree).items():
        if section == "models":
            _read_models(values, config)
        elif section in ("train", "general"):
            _read_section(section, values, config)
        elif section not in OTHER_SECTIONS:
            near = nearest(str(section), ("train", "general", "models", *OTHER_SECTIONS))
            config.faults.append(f"config {path} has an unknown section {section}; {suggestion(near, 'leave it out')}")
    if config.faults:
        raise ConfigError(config.faults)
    return config


def _expanded(value: Any) -> Any:
    """Return the value with ~ and $NAME in its texts replaced, as ilab does."""
    if isinstance(value, str):
        return os.path.expandvars(os.path.expanduser(value))
    if isinstance(value, dict):
        return {key: _expanded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_expanded(each) for each in value]
    return value


def _read_models(models: Any, config: IlabConfig) -> None:
    for model in models or ():
        if not isinstance(model, dict) or not {"id", "path"} <= model.keys():
            config.faults.append(f"models: {model!r} lacks id or path; give both")
            continue
        config.models[str(model["id"])] = str(model["path"])


def _read_section(section: str, values: Any, config: IlabConfig) -> None:
    if values is None:
        return
    if not isinstance(values, dict):
        config.faults.append(f"{section} is a {type(values).__name__}; it must be a mapping of keys")
        return
    for name, value in values.items():
        if section == "general":
            if name in GENERAL:
                config.general[name] = value
            elif name not in OTHER_GENERAL:
                config.faults.append(_unknown_key(f"general.{name}", name, (*GENERAL, *OTHER_GENERAL)))
        elif name == "additional_args":
            _read_additional(value, config)
        elif name in ADDITIONAL:
            config.faults.append(f"train.{name} belongs in train.additional_args; ilab ignores it here")
        elif name in IlabOptions.model_fields and name not in COMMAND_ONLY:
            config.train[name] = value
        else:
            keys = [key for key in IlabOptions.model_fields if key not in (*COMMAND_ONLY, *ADDITIONAL)]
            config.faults.append(_unknown_key(f"train.{name}", name, keys))


def _read_additional(values: Any, config: IlabConfig) -> None:
    if values is not None and not isinstance(values, dict):
        config.faults.append(f"train.additional_args is a {type(values).__name__}; it must be a mapping of keys")
        return
    own = [name for name in TrainingArgs.model_fields if name not in IlabOptions.model_fields]
    for name, value in (values or {}).items():
        if name in ADDITIONAL:
            config.train[name] = value
        elif name in own:
            config.more[name] = value
        elif name in IlabOptions.model_fields:
            config.faults.append(f"train.additional_args.{name} belongs in train; ilab ignores it here")
        else:
            config.faults.append(_unknown_key(f"train.additional_args.{name}", name, [*ADDITIONAL, *own]))


def _unknown_key(shown: str, name: object, known: Any) -> str:
    near = nearest(str(name), known)
    return f"{shown} is unknown; {suggestion(near, 'leave it out')}"


def read_training(config: IlabConfig, flags: Mapping[str, Any]) -> IlabTraining:
    """Return the training of a config and of flags, by the names of the keys. Raises ConfigError with every fault."""
    given = config.train | dict(flags)
    # a config of ilab's always names one, which only the phases have
    is_read = {name for name in given if name != "phased_mt_bench_judge" or "strategy" in given}
    read = DIALECT.translate((name, given[name]) for name in given if name in is_read and given[name] is not None)
    faults, notes = list(read.faults), list(read.notes)
    values = {name: value for name, value in given.items() if name in IlabOptions.model_fields}
    try:
        options = IlabOptions(**values)
    except ValidationError as error:
        raise ConfigError([*faults, *_wrong_values(error, values, flags)]) from None
    faults += _faults(options)
    notes += _notes(options)
    arguments = _training_arguments(options, config, faults)
    try:
        torch_args = TorchrunArgs(
            nproc_per_node=options.nproc_per_node,
            nnodes=options.nnodes,
            node_rank=options.node_rank,
            rdzv_id=options.rdzv_id,
            # a single node needs none, and two runs of it no common port
            rdzv_endpoint=options.rdzv_endpoint if options.nnodes > 1 else None,
        )
        training = IlabTraining(torch_args, TrainingArgs(**arguments), notes=notes)
    except ValidationError as error:
        raise ConfigError([*faults, *_wrong_values(error, arguments, {})]) from None
    if options.strategy is not None:
        training.phases = _phases(options)
        faults += phase_faults(training.phases, training.train_args)
    elif not Path(options.data_path).is_file() and not training.train_args.mock_data:
        faults.append(f"data_path={options.data_path} is not a file; give the .jsonl file of chats, --data-path")
    if faults:
        raise ConfigError(faults)
    return training


def _wrong_values(error: ValidationError, values: Mapping[str, Any], flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key or flag whose value has the wrong type or is out of range."""
    rules: dict[str, list[str]] = {}
    for fault in error.errors():
        # an error of the whole model has no place
        name = str(fault["loc"][0]) if fault["loc"] else ""
        rules.setdefault(name, []).append(fault["msg"])
    for name, messages in rules.items():
        shown = flag_of(name) if name in flags else name
        rule = " or ".join(dict.fromkeys(messages))
        yield f"{shown}={values.get(name)!r}: {rule[:1].lower()}{rule[1:]}" if name else rule


def _faults(options: IlabOptions) -> Iterator[str]:
    if options.pipeline == "simple":
        yield (
            "pipeline=simple trains in llama.cpp's and MLX's formats, which are not read here; use full or accelerated"
        )
    if options.device == "mps":
        yield "device=mps is not supported; use cpu, cuda or hpu"
    elif fault := device_fault(options.device):
        yield f"device={options.device}: {fault}"
    if options.nnodes > 1 and options.rdzv_endpoint is None:
        yield f"nnodes={options.nnodes} need a rendezvous; give rdzv_endpoint, HOST:PORT of the first node"
    if options.strategy is None:
        for name in ("phased_phase1_data", "phased_phase2_data"):
            if getattr(options, name) is not None:
                yield f"{flag_of(name)} has no effect without --strategy; give lab-multiphase or lab-skills-only"


def _notes(options: IlabOptions) -> Iterator[str]:
    """Yield what has no effect beside the other values. Defaults that a config writes out are no news."""
    if options.pipeline == "full":
        yield "pipeline=full is the training of pipeline=accelerated, without flash attention"
    is_fsdp = options.distributed_backend == "fsdp"
    if is_fsdp and options.deepspeed_cpu_offload_optimizer:
        yield "deepspeed_cpu_offload_optimizer has no effect with distributed_backend=fsdp"
    if not is_fsdp and options.fsdp_cpu_offload_optimizer:
        yield "fsdp_cpu_offload_optimizer has no effect with distributed_backend=deepspeed"
    if options.nnodes == 1 and options.rdzv_endpoint is not None:
        yield "rdzv_endpoint has no effect with nnodes=1"
    if options.strategy is not None:
        yield from _notes_of_phases(options)


def _notes_of_phases(options: IlabOptions) -> Iterator[str]:
    """Yield what has no effect beside LAB's phases."""
    skips_first, defaults = options.strategy == "lab-skills-only", IlabOptions().model_dump()
    phases = (2,) if skips_first else (1, 2)
    for name in ("num_epochs", "save_samples", "effective_batch_size", "learning_rate", "data_path"):
        # a phase whose own is null takes that of the training, as ilab's
        is_read = name in SHARED and any(getattr(options, f"phased_phase{number}_{name}") is None for number in phases)
        if not is_read and getattr(options, name) != defaults[name]:
            yield f"{name} has no effect with --strategy {options.strategy}, whose phases have their own"
    if skips_first and options.phased_phase1_data is not None and options.phased_phase2_replay == 0:
        yield "--phased-phase1-data has no effect with --strategy lab-skills-only and without phased_phase2_replay"


def _training_arguments(options: IlabOptions, config: IlabConfig, faults: list[str]) -> dict[str, Any]:
    """Return the fields of TrainingArgs."""
    values = {row.name: getattr(options, row.name) for row in DIALECT.rows if row.outcome == "sets"}
    model_id = options.model_id or config.general.get("student_model_id")
    if model_id is not None:
        if model_id not in config.models:
            known = ", ".join(config.models) or "it has none"
            faults.append(f"model_id={model_id} is not among the models of the config; {known}")
        values["model_path"] = config.models.get(model_id, options.model_path)
    values["is_padding_free"] = options.is_padding_free
    values["accelerate_full_state_at_epoch"] = not options.disable_accelerate_full_state_at_epoch
    values["use_legacy_tmpl"] = bool(config.general.get("use_legacy_tmpl"))
    level = str(config.general.get("log_level") or "INFO").upper()
    values["log_level"] = LEVELS.get(level, level)
    if options.pipeline == "full":
        values["disable_flash_attn"] = True
    if options.distributed_backend == "fsdp":
        values["fsdp_options"] = {"cpu_offload_params": options.fsdp_cpu_offload_optimizer}
    else:
        values["deepspeed_options"] = {
            "cpu_offload_optimizer": options.deepspeed_cpu_offload_optimizer,
            "cpu_offload_optimizer_ratio": options.deepspeed_cpu_offload_optimizer_ratio,
            "cpu_offload_optimizer_pin_memory": options.deepspeed_cpu_offload_optimizer_pin_memory,
        }
    if options.lora_rank:
        values["lora"] = {
            "rank": options.lora_rank,
            "alpha": options.lora_alpha,
            "dropout": options.lora_dropout,
            "target_modules": options.lora_target_modules or None,
            "quantize_data_type": options.lora_quantize_dtype,
        }
    own = config.more.get("engine_options") or {}
    return values | config.more | {"engine_options": {"device": options.device} | own}


def _phases(options: IlabOptions) -> LabPhases:
    assert options.strategy is not None
    base = Path(options.phased_base_dir)

    def phase(number: int) -> LabPhase:
        def of(name: str) -> Any:
            return getattr(options, f"phased_phase{number}_{name}")

        return LabPhase(
            number=number,
            data=of("data"),
            folder=base / f"phase{number}",
            changes={
                "num_epochs": of("num_epochs") or options.num_epochs,
                "save_samples": of("samples_per_save"),
                "learning_rate": of("learning_rate"),
                "effective_batch_size": of("effective_batch_size") or options.effective_batch_size,
            },
        )

    return LabPhases(
        first=phase(1),
        second=phase(2),
        skips_first=options.strategy == "lab-skills-only",
        replay=options.phased_phase2_replay,
        checkpoint=options.phased_checkpoint,
        journal=Path(options.training_journal or base / "journalfile.yaml"),
        clears=options.force_clear_phased_cache,
    )
