"""The YAML file of a LoRA fine-tuning with DeepSpeed on Gaudi, as HL_* variables and flags of run_sft.sh.

Its keys are those of `finetune.py --config-name=finetune_lora.yaml`, with ds_config.json beside it; the table is in
docs/guides/optimum_habana.md. A key is translated, noted as needless, or refused by name.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.options.config import ConfigError
from megatron.options.deepspeed_file import read_settings
from megatron.options.presets import is_finetune_file, read_preset

DEEPSPEED_FILE = "ds_config.json"
NEEDLESS = {
    "model_family": "the tokenizer of the model brings its chat template; HL_CHAT_TEMPLATE gives another",
    "gaudi_config_name": "fused operators are chosen by the device",
}
WHOLE_FILE = ("full", "train")
DEFAULTS = (
    *("--lr-decay-style", "linear", "--lr-warmup-fraction", "none", "--lr-warmup-iters", "0"),
    *("--adam-beta2", "0.999"),
)
"""As transformers' TrainingArguments, of which the file's finetune.py changes nothing else; the recipes differ."""


@dataclass
class FinetuneFile:
    """The request in a file."""

    variables: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    """Flags of megatron.train, for what has no variable."""
    samples_per_rank: int | None = None
    """Samples in one optimizer step of each data-parallel rank."""
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Key:
    """A key with one number as its value."""

    fits: Callable[[float], bool]
    rule: str
    target: str = ""
    """The variable, or the flag, that it sets; empty for one that is part of another."""
    is_whole: bool = False


def _whole(at_least: int, target: str = "") -> Key:
    rule = f"must be a whole number, {at_least} or more"
    return Key(lambda x: x == int(x) and x >= at_least, rule, target, is_whole=True)


NUMBERS = {
    "batch_size": _whole(1),
    "gradient_accumulation_steps": _whole(1),
    "num_epochs": _whole(1, "HL_NUM_EPOCHS"),
    "seed": _whole(0, "--seed"),
    "lr": Key(lambda x: x > 0, "must be a number above 0", "HL_LR"),
    "weight_decay": Key(lambda x: x >= 0, "must be a number, 0 or more", "--weight-decay"),
    "LoRA.r": _whole(0, "HL_LORA_RANK"),
    "LoRA.alpha": Key(lambda x: x > 0, "must be a number above 0", "HL_LORA_ALPHA"),
    "LoRA.dropout": Key(lambda x: 0 <= x < 1, "must be a number from 0 to below 1", "HL_LORA_DROPOUT"),
}
FOLDERS = {"model_id": "HL_MODEL", "save_dir": "HL_RESULTS_DIR"}
KEYS = (*NUMBERS, *FOLDERS, "data_path", "split", "LoRA", *NEEDLESS)


def read_finetune_file(name: str) -> FinetuneFile | None:
    """Translate a file; return None for a preset, and for what cannot be read, which loading it as one reports."""
    try:
        tree = read_preset(name, translated=True)
    except ConfigError:
        return None
    if not is_finetune_file(tree):
        return None
    found = FinetuneFile(flags=[*DEFAULTS])
    values = _flat(tree, found)
    unknown = [key for key in values if key not in KEYS]
    for key in unknown:
        near = difflib.get_close_matches(key, KEYS, n=1)
        remedy = f"did you mean {near[0]}?" if near else "remove it, or give the flag of megatron.train that does it"
        found.faults.append(f"unknown key {key}; {remedy}")
    for key, number in NUMBERS.items():
        if key in values:
            _number(key, values[key], number, found)
    for key, variable in FOLDERS.items():
        if key in values:
            found.variables[variable] = str(values[key])
    _batch(values, found)
    _adapters(values, found)
    if "data_path" in values:
        _data(values["data_path"], values.get("split"), found)
    found.notes += [f"{key}={values[key]} has no effect: {why}" for key, why in NEEDLESS.items() if key in values]
    beside = Path(name).parent / DEEPSPEED_FILE
    found.flags += deepspeed_flags(beside) if beside.is_file() else []
    found.faults = [f"{name}: {fault}" for fault in found.faults]
    found.notes = [f"{name}: {note}" for note in found.notes]
    return found


def _flat(tree: Mapping[str, Any], found: FinetuneFile) -> dict[str, Any]:
    """Return the values that are set, with those of the group LoRA as LoRA.r."""
    flat = {key: value for key, value in tree.items() if key != "LoRA" and value is not None}
    lora = tree.get("LoRA")
    if isinstance(lora, dict):
        return flat | {f"LoRA.{key}": value for key, value in lora.items() if value is not None}
    if lora is not None:
        found.faults.append(f"LoRA={lora} must hold r, alpha and dropout, a line each")
    return flat


def _number(key: str, value: object, number: Key, found: FinetuneFile) -> None:
    text = str(value)  # YAML reads 1e-4 as a string
    try:
        fits = number.fits(float(text))
    except (ValueError, OverflowError):
        fits = False
    if fits and number.is_whole:
        text = str(int(float(text)))
    if not fits:
        found.faults.append(f"{key}={value!r} {number.rule}")
    elif number.target.startswith("HL_"):
        found.variables[number.target] = text
    elif number.target:
        found.flags += [number.target, text]


def _batch(values: Mapping[str, Any], found: FinetuneFile) -> None:
    keys = ("batch_size", "gradient_accumulation_steps")
    if any(fault.startswith(keys) for fault in found.faults) or not any(key in values for key in keys):
        return
    samples, steps = (int(float(values.get(key, 1))) for key in keys)
    found.samples_per_rank = samples * steps


def _adapters(values: Mapping[str, Any], found: FinetuneFile) -> None:
    """Remove the variables of adapters where the rank is 0, which means full fine-tuning."""
    if "LoRA.r" not in values:
        found.faults.append("LoRA.r, the rank of the adapters, is not given; give it, or 0 to train the whole model")
    elif found.variables.get("HL_LORA_RANK") == "0":
        for name in ("HL_LORA_RANK", "HL_LORA_ALPHA", "HL_LORA_DROPOUT"):
            found.variables.pop(name, None)


def _data(value: object, split: object, found: FinetuneFile) -> None:
    """Set the file of chats: `data_path` itself, or the one in this folder, by the name in `split`.

    A list holds several of them, with or without weights before them.
    """
    words = [str(word) for word in value] if isinstance(value, list) else [str(value)]
    files = [word if _is_number(word) and len(words) > 1 else _file(Path(word), split, found) for word in words]
    found.variables["HL_DATA"] = files[0] if len(files) == 1 else shlex.join(files)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _file(path: Path, split: object, found: FinetuneFile) -> str:
    if path.is_dir():
        files = list(path.glob("*.jsonl"))
        path = path / f"{split}.jsonl" if split is not None else files[0] if len(files) == 1 else path
    elif split not in (None, *WHOLE_FILE):
        found.faults.append(
            f"split={split} selects a file of a folder, but data_path={path} is a file, which is read whole; remove it"
        )
    return str(path)


def deepspeed_flags(path: Path) -> list[str]:
    """Return the flags of a DeepSpeed JSON: what options of ours set too, and the rest as it stands."""
    flags = ["--deepspeed-config", str(path)]
    try:
        zero = read_settings(str(path)).get("zero_optimization")
    except ConfigError:
        return flags  # checked with the other options, which reports it
    if not isinstance(zero, dict):
        return flags
    if isinstance(zero.get("stage"), int):
        flags += ["--zero-stage", str(zero["stage"])]
    for key in ("offload_optimizer", "offload_param"):
        device = zero[key].get("device") if isinstance(zero.get(key), dict) else None
        flags += [f"--{key.replace('_', '-')}"] if device == "cpu" else []
    return flags
