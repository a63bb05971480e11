"""A command of optimum-habana's sft.py or dpo.py as a launch request, by the tables of spawn_flags.py."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron.checkpoint.errors import CheckpointError
from megatron.data.index.indexed import DataError
from megatron.data.read.input_shards import of_split
from megatron.data.read.sources import find_sources
from megatron.launch.dialects.finetune_file import deepspeed_flags
from megatron.launch.dialects.hl_requests import from_environment
from megatron.launch.dialects.hl_variables import WrongValueError
from megatron.launch.dialects.spawn_flags import FALSE, TABLES, TRUE, SpawnFlag
from megatron.launch.plan import LaunchRequest
from megatron.options.config import ConfigError
from megatron.runtime.devices import detect_device
from megatron.weights.folder_files import own_file, read_json
from megatron.weights.huggingface_config import find_hub_folder, find_model

Kind = Literal["sft", "dpo"]
STACK_EXCHANGE = "lvwerra/stack-exchange-paired"
"""Dataset whose rows sft.py and dpo.py write as a question and an answer of plain text."""
PAIRS = "data/rl"
"""Folder of the pairs in it."""
WANDB_PROJECT = "huggingface"
"""Project that transformers reports to by default."""
EPOCHS = "3"
"""Epochs where neither they nor steps are given, as transformers has it."""
GAUDI_ADAM = ("--adam-beta2", "0.999", "--adam-eps", "1e-6")
"""Settings of GaudiTrainingArguments, which a finetune_lora.yaml has no keys for."""
PEFT_MODULES = {"llama": "q_proj v_proj", "bloom": "query_key_value", "gpt2": "c_attn"}
"""Modules that PEFT adapts by default, by the model_type of a config.json."""
CONFIG_FLAGS = {
    "-cn": "--config-name", "--config-name": "--config-name", "-cp": "--config-path", "--config-path": "--config-path",
    "-cd": "--config-dir", "--config-dir": "--config-dir",
}  # fmt: skip
"""Hydra's flags that name a file, under their long names."""


@dataclass
class Ranks:
    """Ranks of a command, as the launcher's own flags request them."""

    world_size: int = 1
    nodes: int = 1
    hostsfile: str | None = None
    master_port: int | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """HL_* variables that the flags stand for, unless they are set."""
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def apply(self, request: LaunchRequest) -> None:
        """Set the ranks of a request."""
        request.nodes, request.devices_per_node = self.nodes, self.world_size // self.nodes
        request.hostsfile = self.hostsfile or request.hostsfile
        request.master_port = self.master_port
        request.faults[:0] = self.faults
        request.notes[:0] = self.notes


@dataclass
class SpawnCommand:
    """Settings of a script's command line."""

    settings: dict[str, str] = field(default_factory=dict)
    """Value by name of a setting, those of defaults left out."""
    defaults: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """Flag of the script by name of the setting."""
    train_flags: list[str] = field(default_factory=list)
    """Flags of megatron.train behind `--`."""
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def get(self, name: str) -> str | None:
        """Return the value that is given, else the script's default."""
        return self.settings.get(name, self.defaults.get(name))


def script_request(
    kind: Kind, words: Sequence[str], environment: Mapping[str, str], ranks: Ranks
) -> tuple[LaunchRequest, dict[str, str]]:
    """Return the request of a command, with every fault in it, and the flags by the variables that they set."""
    command = read_words(kind, TABLES[kind], words)
    hl_variables = {name: value for name, value in environment.items() if name.startswith("HL_") and value}
    if "HL_DEVICE" in hl_variables:
        command.settings.pop("HL_DEVICE", None)
    _join_lengths(command, hl_variables)
    _name_modules(command, hl_variables)
    _without_adapters(command)
    _name_data(kind, command, hl_variables)
    _report(command)
    own = {name: value for name, value in command.defaults.items() if name.startswith("HL_")}
    given = {name: value for name, value in command.settings.items() if name.startswith("HL_")}
    flags = [
        word
        for group in (command.defaults, command.settings)
        for name, value in group.items()
        if name.startswith("--") and (group is command.settings or name not in command.settings)
        for word in (name, value)
    ]
    flags += _graph_flags(command, hl_variables)
    if (file := command.get("deepspeed")) is not None:
        flags += deepspeed_flags(Path(file))
    request = from_environment(own | ranks.variables | hl_variables | given, kind, [*flags, *command.train_flags])
    _set_batch(request, command, hl_variables)
    request.faults[:0] = [*_refused_model(command), *command.faults]
    request.faults = [named(fault, command.sources) for fault in request.faults]
    request.notes[:0] = command.notes
    ranks.apply(request)
    return request, command.sources


def _graph_flags(command: SpawnCommand, hl_variables: Mapping[str, str]) -> list[str]:
    """Return the flags of validations by HPU graphs, with a note where they have no effect."""
    if command.settings.get("graphs") != "1":
        return []
    device = hl_variables.get("HL_DEVICE") or command.settings.get("HL_DEVICE") or detect_device()
    evaluates = hl_variables.get("HL_EVAL_ITERS", "0") != "0" or any(
        re.match(r"--eval[-_]iters", word) for word in command.train_flags
    )
    if device == "hpu" and evaluates:
        return ["--eval-graphs", "true"]
    why = "the run has no validation; set HL_EVAL_ITERS" if device == "hpu" else f"{device} has no HPU graphs"
    command.notes.append(f"{command.sources['graphs']} has no effect: {why}")
    return []


def read_words(script: str, flags: Sequence[SpawnFlag], words: Sequence[str]) -> SpawnCommand:
    """Read the flags of a script as transformers' parser does: --flag VALUE, --flag=VALUE, a switch alone or not."""
    table = {entry.name: entry for entry in flags}
    command = SpawnCommand()
    own, _, command.train_flags = _cut(list(words))
    rest = iter(_grouped(own, table, command))
    for name, values in rest:
        entry, values = _negated(name, values, table)
        if entry is None:
            # without the dashes, which would make any short name near to any other
            near = difflib.get_close_matches(name[2:], [known[2:] for known in table], n=1)
            hint = f"did you mean --{near[0]}?" if near else f"`{script}.py --help` lists the flags"
            command.faults.append(f"unknown flag {name} of {script}.py; {hint}")
        else:
            _read(entry, values, command)
    for entry in table.values():
        if entry.default is not None:
            command.defaults |= dict(entry.settings(entry.default))
            for target, _ in entry.settings(entry.default):
                command.sources.setdefault(target, entry.name)
    return command


def _cut(words: list[str]) -> tuple[list[str], str, list[str]]:
    place = words.index("--") if "--" in words else len(words)
    return words[:place], "--", words[place + 1 :]


def _grouped(
    words: list[str], table: Mapping[str, SpawnFlag], command: SpawnCommand
) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag, with underscores, and the words that follow it."""
    name, values = "", list[str]()
    for word in words:
        if not word.startswith("--"):
            entry = table.get(name)
            if not name or (entry is not None and entry.takes not in ("words", "texts") and values):
                command.faults.append(f"{word!r} does not follow a flag; write --FLAG {word}")
            else:
                values.append(word)
            continue
        if name:
            yield name, values
        name, equals, value = word.partition("=")
        name, values = "--" + name[2:].replace("-", "_"), [value] if equals else []
    if name:
        yield name, values


def _negated(name: str, values: list[str], table: Mapping[str, SpawnFlag]) -> tuple[SpawnFlag | None, list[str]]:
    """Return the entry of a flag; --no_X is X=False where X is a switch."""
    positive = table.get("--" + name.removeprefix("--no_"))
    if name.startswith("--no_") and name not in table and positive is not None and positive.takes == "switch":
        return positive, ["False"]
    return table.get(name), values


def _read(entry: SpawnFlag, values: list[str], command: SpawnCommand) -> None:
    """Add what one flag sets, or its fault or note."""
    text = shlex.join(values) if entry.takes == "texts" else " ".join(values)
    if not values and entry.takes == "switch":
        text = "True"
    if not text:
        command.faults.append(f"{entry.name} needs a value")
        return
    if entry.takes == "switch" and text.lower() not in (*TRUE, *FALSE):
        command.faults.append(f"{entry.name}={text!r} must be True or False")
        return
    if entry.outcome == "refused" and text.lower() not in entry.accepts:
        command.faults.append(f"{entry.name}={text} is not supported: {entry.text}".replace("`", ""))
    elif entry.outcome == "no effect" and text.lower() not in FALSE:
        command.notes.append(f"{entry.name} {text} has no effect: {entry.text}".replace("`", ""))
    try:
        settings = entry.settings(text)
    except WrongValueError as why:
        command.faults.append(f"{entry.name}={text!r} {why}")
        return
    for target, value in settings:
        command.settings[target] = value
        command.sources[target] = entry.name


def _join_lengths(command: SpawnCommand, hl_variables: Mapping[str, str]) -> None:
    """Let the flag or variable of the run's length that is given replace the default of the other."""
    steps, epochs = "HL_TRAIN_ITERS", "HL_NUM_EPOCHS"
    if "by_epochs" in command.settings:
        command.defaults.pop(steps, None)
        command.defaults.setdefault(epochs, EPOCHS)
    if steps in command.settings and epochs in command.settings:
        command.notes.append(f"--max_steps {command.settings[steps]} counts, --num_train_epochs does not")
        del command.settings[epochs]
    if {steps, epochs} & {*command.settings, *hl_variables}:
        for name in (steps, epochs):
            command.defaults.pop(name, None)
    elif steps in command.defaults:
        command.defaults.pop(epochs, None)


def _name_modules(command: SpawnCommand, hl_variables: Mapping[str, str]) -> None:
    """Set the modules with adapters where none are named, as PEFT does by the kind of the model."""
    model = {**command.defaults, **hl_variables, **command.settings}.get("HL_MODEL", "")
    with contextlib.suppress(CheckpointError, ConfigError):  # preflight names the fault of a model that cannot be read
        config = read_json(own_file(find_model(model, "HL_MODEL"), "config.json"))
        if (modules := PEFT_MODULES.get(str(config.get("model_type")))) is not None:
            command.defaults["HL_LORA_TARGET_MODULES"] = modules
            command.sources.setdefault("HL_LORA_TARGET_MODULES", "--lora_target_modules")


def _without_adapters(command: SpawnCommand) -> None:
    if command.settings.get("use_peft") == "False":
        for name in [name for name in command.defaults if name.startswith("HL_LORA_")]:
            del command.defaults[name]
        if given := [name for name in command.settings if name.startswith("HL_LORA_")]:
            command.faults.append(f"--use_peft False trains no adapters; leave {command.sources[given[0]]} out")


def _set_batch(request: LaunchRequest, command: SpawnCommand, hl_variables: Mapping[str, str]) -> None:
    """Set the samples in a step of a data-parallel rank, unless HL_GBS or a flag behind `--` gives the global batch."""
    is_given = {"batch", "accumulation"} & set(command.settings)
    given_otherwise = "HL_GBS" in hl_variables or any(
        re.match(r"--global[-_]batch[-_]size", word) for word in command.train_flags
    )
    if given_otherwise and not is_given:
        return
    batch, accumulation = command.get("batch"), command.get("accumulation")
    if given_otherwise:
        request.faults.append(
            "--per_device_train_batch_size and HL_GBS (--global-batch-size) both set the samples of a step; leave one "
            "out"
        )
    elif batch is not None and accumulation is not None:
        request.samples_per_rank = int(batch) * int(accumulation)
        if command.get("packing") == "1":
            command.notes.append(
                f"a step has {request.samples_per_rank} samples for each data-parallel rank; sft.py --packing, its "
                f"default, fills as many rows of {command.get('HL_SEQ_LEN')} tokens with several samples: for steps of "
                "as many tokens raise --per_device_train_batch_size or --gradient_accumulation_steps"
            )


def _name_data(kind: Kind, command: SpawnCommand, hl_variables: Mapping[str, str]) -> None:
    """Set the files of the dataset, the chat template that goes with them, and the longest microbatch."""
    batch, length = command.get("batch"), command.get("HL_SEQ_LEN")
    if batch is not None and length is not None and length.isdecimal():
        answers = 2 if kind == "dpo" else 1
        command.defaults["HL_MAX_BATCH_LEN"] = str(int(batch) * int(length) * answers)
    if kind == "sft" and ("HL_DATA" in hl_variables or "HL_DATA_OUTPUT_DIR" not in hl_variables):
        command.defaults["HL_TRAIN_ON"] = "all"
        command.defaults["HL_TOO_LONG"] = "split" if command.get("packing") == "1" else "truncate"
    if "HL_DATA" in hl_variables or "HL_DATA_OUTPUT_DIR" in hl_variables:
        if "dataset" in command.settings:
            command.faults.append(f"{command.sources['dataset']} and HL_DATA both name the data; give one of them")
        return
    name = command.get("dataset")
    if name is None:
        command.faults.append("--dataset_name is not given; give a file of chats, or the folder of a dataset")
        return
    subset = command.settings.get("subset") or (PAIRS if kind == "dpo" else command.defaults.get("subset", ""))
    try:
        files = dataset_files(
            name, subset, is_given="subset" in command.settings, split=command.get("split") or "train"
        )
    except ConfigError as error:
        source = command.sources.get("dataset", "--dataset_name")
        command.faults += [f"{source}={fault}" for fault in error.faults]
        return
    command.settings["HL_DATA"] = files[0] if len(files) == 1 else shlex.join(files)
    command.sources["HL_DATA"] = command.sources["dataset"]
    if kind == "sft" and name.rstrip("/").endswith(STACK_EXCHANGE):
        command.defaults["HL_CHAT_TEMPLATE"] = "question_answer"


def dataset_files(name: str, subset: str, *, is_given: bool, split: str) -> list[str]:
    """Return the files of a split of a dataset: of a file, a folder, or a dataset in huggingface_hub's cache.

    `subset` is a folder in it, or None's name; if it is not given, it may be missing. Raises ConfigError.
    """
    path = Path(name)
    if path.is_file():
        return [name]
    folder = path if path.is_dir() else find_hub_folder(name, "dataset")
    if folder is None:
        raise ConfigError(
            [
                f"{name} is neither a file nor a folder, and no dataset of this name has been downloaded; nothing is "
                f"downloaded here: give a file, or run `hf download {name} --repo-type dataset` first"
            ]
        )
    if subset and subset != "None" and (folder / subset).is_dir():
        folder = folder / subset
    elif is_given and subset != "None":
        raise ConfigError([f"{name} has no folder {subset}; give one of its folders as --subset, or None"])
    try:
        listing = find_sources([str(folder)])
        sources = listing.sources if len(listing.sources) == 1 else of_split(listing, split, [str(folder)]).sources
    except DataError as error:
        raise ConfigError([f"{name}: {error}".replace("--input", str(folder))]) from None
    return [source.name for source in sources]


def _report(command: SpawnCommand) -> None:
    wanted = (command.get("report_to") or "").split()
    name = command.settings.get("run_name")
    if "wandb" in wanted:
        command.settings["--wandb-project"] = os.environ.get("WANDB_PROJECT", WANDB_PROJECT)
        if name is not None:
            command.settings["--wandb-exp-name"] = name


def _refused_model(command: SpawnCommand) -> Iterator[str]:
    """Yield a fault for Mixtral, whether or not it is on this machine."""
    model = command.get("HL_MODEL") or ""
    if "mixtral" in Path(model).name.lower():
        yield (
            f"--model_name_or_path={model} is not supported: Mixtral is a mixture of experts, which no model family "
            "here is; give a Llama"
        )


def named(text: str, sources: Mapping[str, str]) -> str:
    """Return a text with the flags that set HL_* variables in place of these."""
    return re.sub(r"\bHL_[A-Z_]+\b", lambda found: sources.get(found[0], found[0]), text)


def finetune_request(script: str, words: Sequence[str], environment: Mapping[str, str], ranks: Ranks) -> LaunchRequest:
    """Return the request of `finetune.py --config-name=FILE`, whose file is found as Hydra does."""
    own, _, train_flags = _cut(list(words))
    given, faults = _hydra_words(own)
    folder = Path(script).parent
    places = [folder / "config", folder]
    if "--config-dir" in given:
        places = [Path(given["--config-dir"])]
    elif "--config-path" in given:
        places = [folder / given["--config-path"]]
    name = given.get("--config-name", "")
    if not name.endswith((".yaml", ".yml")):
        name += ".yaml"
    candidates = [place / name for place in places]
    found = next((path for path in candidates if path.is_file()), None)
    if "--config-name" not in given:
        faults.append("--config-name is not given; give the YAML file, such as --config-name=finetune_lora.yaml")
    elif found is None:
        faults.append(
            f"--config-name={given['--config-name']}: there is no file {' or '.join(map(str, candidates))}; give its "
            "name in the folder config beside the script, or --config-dir"
        )
    config = [] if found is None else ["--config", str(found)]
    request = from_environment({**ranks.variables, **environment}, "sft", [*config, *GAUDI_ADAM, *train_flags])
    if found is None:  # the rest would follow from the missing file
        request.faults, request.unread = [], request.unread | {"config"}
    request.faults[:0] = faults
    ranks.apply(request)
    return request


def _hydra_words(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of Hydra's flags that name a file, and the faults of all other words."""
    given, faults, rest = dict[str, str](), list[str](), iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in CONFIG_FLAGS:
            given[CONFIG_FLAGS[name]] = value if equals else next(rest, "")
        elif equals and not name.startswith("-"):
            faults.append(
                f"{word!r}: values of the file are not overridden on the command line; write it into the file"
            )
        else:
            near = difflib.get_close_matches(name, CONFIG_FLAGS, n=1)
            hint = (
                f"did you mean {near[0]}?" if near else "finetune.py has --config-name, --config-path and --config-dir"
            )
            faults.append(f"unknown flag {name} of finetune.py; {hint}")
    return given, faults
