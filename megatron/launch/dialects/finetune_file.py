"""The YAML file of a LoRA fine-tuning with DeepSpeed on Gaudi, as HL_* variables and flags of run_sft.sh.

Its keys are those of `finetune.py --config-name=finetune_lora.yaml`, with ds_config.json beside it; the table is in
docs/guides/optimum_habana.md. A key is translated, noted as needless, or refused by name.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.launch.dialects.hydra_overrides import overridden, resolved
from megatron.options.config import ConfigError
from megatron.options.deepspeed_file import read_settings
from megatron.options.dialect import (
    Dialect,
    Entry,
    Translation,
    WrongValueError,
    flag_words,
    no_effect,
    number,
    refused,
    sets,
    suggestion,
)
from megatron.options.flags import flag
from megatron.options.stored import is_finetune_file, read_preset

DEEPSPEED_FILE = "ds_config.json"
WHOLE_FILE = ("full", "train")
DEFAULTS = {
    "--lr-decay-style": "linear",
    "--lr-warmup-fraction": "none",
    "--lr-warmup-iters": "0",
    "--adam-beta2": "0.999",
}
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


def _whole(name: str, at_least: int, target: str) -> Entry:
    # YAML may hold 8, 8.0 or "8"
    check = number(lambda x: x == int(x) and x >= at_least, f"must be a whole number, {at_least} or more")
    return sets(name, target, read=lambda value: str(int(float(check(value)))))


def _adapters(value: object) -> list[tuple[str, str]]:
    raise WrongValueError("must hold r, alpha and dropout, a line each")


KEYS: tuple[Entry, ...] = (
    sets("model_id", "HL_MODEL", read=str),
    sets("save_dir", "HL_RESULTS_DIR", read=str),
    sets("data_path", "data"),
    sets("split", "split"),
    _whole("batch_size", 1, "batch"),
    _whole("gradient_accumulation_steps", 1, "accumulation"),
    _whole("num_epochs", 1, "HL_NUM_EPOCHS"),
    _whole("seed", 0, "--seed"),
    sets("lr", "HL_LR", read=number(lambda x: x > 0, "must be a number above 0")),
    sets("weight_decay", "--weight-decay", read=number(lambda x: x >= 0, "must be a number, 0 or more")),
    # reached only by a single value: `_flat` replaces a group by its keys
    Entry("LoRA", "sets", convert=_adapters),
    _whole("LoRA.r", 0, "HL_LORA_RANK"),
    sets("LoRA.alpha", "HL_LORA_ALPHA", read=number(lambda x: x > 0, "must be a number above 0")),
    sets("LoRA.dropout", "HL_LORA_DROPOUT", read=number(lambda x: 0 <= x < 1, "must be a number from 0 to below 1")),
    no_effect("model_family", "the tokenizer of the model brings its chat template; HL_CHAT_TEMPLATE gives another"),
    no_effect("gaudi_config_name", "fused operators are chosen by the device"),
    no_effect("hydra*", "Hydra is not run; results are in save_dir"),
    refused("defaults*", "write the keys of the files that it lists into this one", accepts="['_self_']"),
)


def _unknown(key: str, value: object, near: str | None) -> str:
    return f"unknown key {key}; {suggestion(near, 'remove it, or give the flag of megatron.train that does it')}"


DIALECT = Dialect(KEYS, _unknown)


def read_finetune_file(name: str, overrides: Sequence[str] = ()) -> FinetuneFile | None:
    """Translate a file; return None for a preset, and for what cannot be read, which loading it as one reports.

    `overrides`: Hydra's, of a command line.
    """
    try:
        tree, of_words = overridden(read_preset(name, translated=True), overrides)
    except ConfigError:
        return None
    if not is_finetune_file(tree):
        return None
    tree, of_references = resolved(tree)
    result = DIALECT.translate(_flat(tree))
    settings, faults = result.settings, result.faults
    faults[:0] = [*of_words, *of_references]
    # the variables go the way of the user's own, which then override the file; the rest becomes flags
    variables = {target: value for target, value in settings.items() if target.startswith("HL_")}
    # without it the choice between adapters and the whole model would be a guess
    if "HL_LORA_RANK" not in variables and "HL_LORA_RANK" not in result.unread:
        faults.append("LoRA.r, the rank of the adapters, is not given; give it, or 0 to train the whole model")
    elif variables.get("HL_LORA_RANK") == "0":  # the whole model is trained
        variables = {target: value for target, value in variables.items() if not target.startswith("HL_LORA_")}
    if "data" in settings:
        variables["HL_DATA"] = _data(settings["data"], settings.get("split"), faults)
    # of the settings only the flags: `flag_words` passes over other names
    flags = flag_words(DEFAULTS | settings)
    # no key of the YAML names it
    beside = Path(name).parent / DEEPSPEED_FILE
    if beside.is_file():
        flags += deepspeed_flags(beside)
    return FinetuneFile(
        variables,
        flags,
        _samples(result),
        notes=[f"{name}: {note}" for note in result.notes],
        faults=[f"{name}: {fault}" for fault in faults],
    )


def _flat(tree: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values that are set, with those of a group such as LoRA as LoRA.r."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{group}{key}.")
        elif value is not None:
            yield f"{group}{key}", value


def _samples(result: Translation) -> int | None:
    """Return the samples in a step of a data-parallel rank; None if the file does not say."""
    names = {"batch", "accumulation"}
    if names & result.unread or not names & result.settings.keys():
        return None
    return int(result.settings.get("batch", 1)) * int(result.settings.get("accumulation", 1))


def _data(value: object, split: object, faults: list[str]) -> str:
    """Return the file of chats: `data_path` itself, or the one in this folder, by the name in `split`.

    A list holds several of them, with or without weights before them.
    """
    if not isinstance(value, list):
        return _file(Path(str(value)), split, faults)
    # YAML reads a weight as a number
    words = list(map(str, value))
    if len(words) == 1:
        return _file(Path(words[0]), split, faults)
    return shlex.join(word if _is_number(word) else _file(Path(word), split, faults) for word in words)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _file(path: Path, split: object, faults: list[str]) -> str:
    if not path.is_dir():
        if split not in (None, *WHOLE_FILE):
            faults.append(
                f"split={split} selects a file of a folder, but data_path={path} is a file, which is read whole; "
                "remove it"
            )
        return str(path)
    if split is not None:
        return str(path / f"{split}.jsonl")
    files = list(path.glob("*.jsonl"))
    # of several files none is the obvious one: the folder is then refused as no file
    return str(files[0] if len(files) == 1 else path)


def deepspeed_flags(path: Path) -> list[str]:
    """Return the flags of a DeepSpeed JSON: what options of ours set too, and the rest as it stands."""
    # a file that contradicts an option is refused, so the options follow the file
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
        section = zero.get(key)
        if isinstance(section, dict) and section.get("device") == "cpu":
            flags.append(flag(key))
    return flags
