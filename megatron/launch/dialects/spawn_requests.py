"""A command of optimum-habana's sft.py or dpo.py as a launch request, by the tables of spawn_flags.py."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron.checkpoint.folders import CheckpointError
from megatron.data.index.indexed import DataError
from megatron.data.read.hub_dataset import urls_of
from megatron.data.read.input_shards import of_split
from megatron.data.read.search import find_sources
from megatron.hub.download import downloaded_dataset
from megatron.hub.names import DATASETS, name_of
from megatron.launch.dialects.finetune_file import deepspeed_flags
from megatron.launch.dialects.hl_requests import from_environment, hl_variables, legend
from megatron.launch.dialects.spawn_flags import FINETUNE, TABLES
from megatron.launch.plan import LaunchRequest
from megatron.options.config import ConfigError
from megatron.options.dialect import Dialect, Entry, Translation, flag_words, nearest, suggestion
from megatron.options.flags import cut, dashed, flag
from megatron.options.outputs import NEVER
from megatron.runtime.devices import detect_device, device_fault, find_device, is_device
from megatron.weights.folder_files import own_file, read_json
from megatron.weights.model_folder import find_model

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
PEFT_MODULES = {"llama": "q_proj v_proj", "mixtral": "q_proj v_proj", "bloom": "query_key_value", "gpt2": "c_attn"}
"""Modules that PEFT adapts by default, by the model_type of a config.json."""
SHORT = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir", "-m": "--multirun", "-c": "--cfg"}
"""Hydra's short flags."""
OVERRIDE = "key=value"
"""Name of the row of Hydra's overrides."""


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
class SpawnCommand(Translation):
    """Settings of a script's command line, and below them the script's own defaults."""

    defaults: dict[str, Any] = field(default_factory=dict)
    train_flags: list[str] = field(default_factory=list)
    """Flags of megatron.train behind `--`."""

    def get(self, name: str) -> Any:
        """Return the value that is given, else the script's default."""
        return self.settings.get(name, self.defaults.get(name))

    def has_train_flag(self, option: str) -> bool:
        """Return whether a flag behind `--` gives an option."""
        return any(word.partition("=")[0] == flag(option) for word in dashed(self.train_flags))


def script_request(
    kind: Kind, words: Sequence[str], environment: Mapping[str, str], ranks: Ranks
) -> tuple[LaunchRequest, dict[str, str]]:
    """Return the request of a command, with every fault in it, and the flags by the variables that they set."""
    command = read_words(kind, TABLES[kind], words)
    variables = hl_variables(environment)
    # optimum-habana's commands have --use_habana, and HL_DEVICE=cpu in front is to run them elsewhere
    if "HL_DEVICE" in variables:
        command.settings.pop("HL_DEVICE", None)
    _join_lengths(command, variables)
    _join_warmups(command)
    _join_saves(command)
    _name_modules(command, variables)
    _without_adapters(command)
    _name_batch(kind, command)
    _name_rows(kind, command, variables)
    _name_data(kind, command, variables)
    _report(command)
    flags = flag_words(command.defaults | command.settings) + _graph_flags(command, variables)
    file = command.get("deepspeed")
    if file is not None:
        flags += deepspeed_flags(Path(file))
    # the script's defaults give way to the user's variables, and these to the flags of the command
    given = hl_variables(command.defaults) | ranks.variables | variables | hl_variables(command.settings)
    request = from_environment(given, kind, [*flags, *command.train_flags])
    _set_batch(request, command, variables)
    request.faults[:0] = command.faults
    # faults name HL_* variables, which the user of a script did not write
    request.faults = [named(fault, command.sources) for fault in request.faults]
    request.notes[:0] = command.notes
    ranks.apply(request)
    return request, command.sources


def _graph_flags(command: SpawnCommand, variables: Mapping[str, str]) -> list[str]:
    """Return the flags of validations by HPU graphs, with a note where they have no effect."""
    # both flags of graphs set it; training has no graphs that are kept, so validations are all that they can mean
    if command.settings.get("graphs") != "1":
        return []
    device = variables.get("HL_DEVICE") or command.settings.get("HL_DEVICE") or detect_device()
    # a device that cannot be read is a fault of its own
    is_known = is_device(device) and device_fault(device) is None
    if not is_known or not find_device(device).replays_evaluations:
        why = f"{device} has no HPU graphs"
    elif variables.get("HL_EVAL_ITERS", "0") == "0" and not command.has_train_flag("eval_iters"):
        why = "the run has no validation; set HL_EVAL_ITERS"
    else:
        return ["--eval-graphs", "true"]
    command.notes.append(f"{command.sources['graphs']} has no effect: {why}")
    return []


def read_words(script: str, rows: tuple[Entry, ...], words: Sequence[str]) -> SpawnCommand:
    """Read the flags of a script as transformers' parser does: --flag VALUE, --flag=VALUE, a switch alone or not."""

    def unknown(name: str, value: str, near: str | None) -> str:
        return f"unknown flag {name} of {script}.py; {suggestion(near, f'`{script}.py --help` lists the flags')}"

    own, train_flags = cut(words)
    faults: list[str] = []
    dialect = Dialect(rows, unknown, prefix="--", no_effect="{name} {value} has no effect: {reason}")
    values = dict[str, str]()
    for name, value in _values(own, {row.name: row for row in rows}, faults):
        # of a flag that is given twice the last value counts, in its place, and nothing that the first would set
        values.pop(name, None)
        values[name] = value
    result = dialect.translate(values.items())
    command = SpawnCommand(**vars(result), train_flags=train_flags)
    command.faults[:0] = faults
    for row, (target, value) in dialect.defaults():
        command.defaults[target] = value
        command.sources.setdefault(target, row.name)
    return command


def _values(words: Sequence[str], table: Mapping[str, Entry], faults: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each flag, and its value as one text; --no_X is X=False where X is a switch."""
    for name, values in _grouped(words, table, faults):
        # transformers' parser has --no_X for each switch that is on by default
        positive = "--" + name.removeprefix("--no_")
        if name not in table and positive in table and table[positive].takes == "switch":
            yield positive, "False"
            continue
        text = " ".join(values)
        if name not in table:  # a fault of the dialect, with what was given
            yield name, text
            continue
        if table[name].takes == "texts":
            text = shlex.join(values)
        elif table[name].takes == "switch" and not values:
            text = "True"
        # published commands have `--subset ''`
        if not text and values and name == "--subset":
            text = "None"
        if text:
            yield name, text
        else:
            faults.append(f"{name} needs a value")


def _grouped(words: Sequence[str], table: Mapping[str, Entry], faults: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag, with underscores, and the words that follow it."""
    name, values = "", list[str]()
    for word in words:
        if word.startswith("--"):
            if name:
                yield name, values
            name, equals, value = word.partition("=")
            name, values = "--" + name[2:].replace("-", "_"), [value] if equals else []
            continue
        # words behind an unknown flag are its own, so that it is the only fault
        takes_one = name in table and table[name].takes in ("value", "switch")
        if not name or (takes_one and values):
            faults.append(f"{word!r} does not follow a flag; write --FLAG {word}")
        else:
            values.append(word)
    if name:
        yield name, values


def _join_lengths(command: SpawnCommand, variables: Mapping[str, str]) -> None:
    """Let the flag or variable of the run's length that is given replace the default of the other."""
    steps, epochs = "HL_TRAIN_ITERS", "HL_NUM_EPOCHS"
    # dpo.py has a default of steps and none of epochs, sft.py the other way round
    if "by_epochs" in command.settings:
        command.defaults.pop(steps, None)
        command.defaults.setdefault(epochs, EPOCHS)
    if steps in command.settings and epochs in command.settings:
        command.notes.append(f"--max_steps {command.settings[steps]} counts, --num_train_epochs does not")
        del command.settings[epochs]
    if {steps, epochs} & {*command.settings, *variables}:
        for name in (steps, epochs):
            command.defaults.pop(name, None)
    elif steps in command.defaults:
        command.defaults.pop(epochs, None)


def _join_warmups(command: SpawnCommand) -> None:
    """Set the warm-up: steps count before a ratio, and under a constant rate neither does, as transformers has it."""
    steps, ratio = command.get("warmup_steps"), command.settings.get("warmup_ratio")
    ignored, reason = list[str](), ""
    if "no_warmup" in command.settings:
        ignored, reason = ["warmup_steps", "warmup_ratio"], "--lr_scheduler_type constant; use constant_with_warmup"
        steps, ratio = 0, None
    elif ratio is not None and steps > 0:
        ignored, reason = ["warmup_ratio"], f"--warmup_steps {steps}"
        ratio = None
    for name in ignored:
        if float(command.settings.get(name, 0)) != 0:
            command.notes.append(f"--{name} {command.settings[name]} has no effect beside {reason}")
    # both, since a preset may have either
    command.settings |= {"--lr-warmup-fraction": ratio or "none", "--lr-warmup-iters": str(steps)}
    command.sources |= {"--lr-warmup-fraction": "--warmup_ratio", "--lr-warmup-iters": "--warmup_steps"}


def _join_saves(command: SpawnCommand) -> None:
    """Set when to save: by steps or at each epoch, as transformers does, where run_sft.sh does both."""
    at_epoch = command.settings.get("saves") == "epoch"
    command.defaults["--save-at-epoch"] = "true" if at_epoch else "false"
    if not at_epoch:
        return
    steps = command.settings.pop("HL_SAVE_INTERVAL", None)
    if steps is not None:
        command.notes.append(f"--save_steps {steps} has no effect beside --save_strategy epoch")
    command.defaults["HL_SAVE_INTERVAL"] = str(NEVER)


def _name_modules(command: SpawnCommand, variables: Mapping[str, str]) -> None:
    """Set the modules with adapters where none are named, as PEFT does by the kind of the model."""
    # in the order in which `script_request` lets them override each other
    model = {**command.defaults, **variables, **command.settings}.get("HL_MODEL", "")
    with contextlib.suppress(CheckpointError, ConfigError):  # preflight names the fault of a model that cannot be read
        config = read_json(own_file(find_model(model, "HL_MODEL"), "config.json"))
        modules = PEFT_MODULES.get(str(config.get("model_type")))
        if modules is not None:
            command.defaults["HL_LORA_TARGET_MODULES"] = modules
            command.sources.setdefault("HL_LORA_TARGET_MODULES", "--lora_target_modules")


def _without_adapters(command: SpawnCommand) -> None:
    if command.settings.get("use_peft") != "False":
        return
    command.defaults = {name: value for name, value in command.defaults.items() if not name.startswith("HL_LORA_")}
    # defaults go in silence; what the user wrote does not
    given = [name for name in command.settings if name.startswith("HL_LORA_")]
    if given:
        command.faults.append(f"--use_peft False trains no adapters; leave {command.sources[given[0]]} out")


def _set_batch(request: LaunchRequest, command: SpawnCommand, variables: Mapping[str, str]) -> None:
    """Set the samples in a step of a data-parallel rank, unless HL_GBS or a flag behind `--` gives the global batch."""
    if "HL_GBS" in variables or command.has_train_flag("global_batch_size"):
        if {"batch", "accumulation"} & command.settings.keys():  # their defaults give way
            request.faults.append(
                "--per_device_train_batch_size and HL_GBS (--global-batch-size) both set the samples of a step; leave "
                "one out"
            )
        return
    batch, accumulation = command.get("batch"), command.get("accumulation")
    if batch is None or accumulation is None:
        return
    request.samples_per_rank = batch * accumulation
    if command.get("packing") == "1":
        command.notes.append(
            f"a step has {request.samples_per_rank} samples for each data-parallel rank; sft.py --packing, its "
            f"default, fills as many rows of {command.get('HL_SEQ_LEN')} tokens with several samples: for steps of "
            "as many tokens raise --per_device_train_batch_size or --gradient_accumulation_steps"
        )


def _name_batch(kind: Kind, command: SpawnCommand) -> None:
    """Set the longest microbatch: as many tokens as the samples of a device may have."""
    batch, length = command.get("batch"), command.get("HL_SEQ_LEN")
    if batch is not None and length is not None and length.isdecimal():
        # a pair is two sequences, its prompt with either answer
        answers = 2 if kind == "dpo" else 1
        command.defaults["HL_MAX_BATCH_LEN"] = str(batch * int(length) * answers)


def _name_rows(kind: Kind, command: SpawnCommand, variables: Mapping[str, str]) -> None:
    """Set what sft.py does with rows, unless they were processed before."""
    is_processed = "HL_DATA_OUTPUT_DIR" in variables and "HL_DATA" not in variables
    if kind == "sft" and not is_processed:
        # sft.py has its loss on every token, by plain language modelling
        command.defaults["HL_TRAIN_ON"] = "all"
        command.defaults["HL_TOO_LONG"] = "split" if command.get("packing") == "1" else "truncate"


def _name_data(kind: Kind, command: SpawnCommand, variables: Mapping[str, str]) -> None:
    """Set the files of the dataset, and the chat template that goes with them."""
    # a variable in front replaces the script's dataset, also its default
    if "HL_DATA" in variables or "HL_DATA_OUTPUT_DIR" in variables:
        if "dataset" in command.settings:
            command.faults.append(f"{command.sources['dataset']} and HL_DATA both name the data; give one of them")
        return
    name = command.get("dataset")
    if name is None:
        command.faults.append("--dataset_name is not given; give a file of chats, or the folder of a dataset")
        return
    # dpo.py has no --subset: it reads the folder of pairs
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
    """Return the files of a split of a dataset: of a file, a folder, or a dataset on the hub.

    `subset` is a configuration or a folder in it, or None's name; if it is not given, it may be missing. Raises
    ConfigError.
    """
    path = Path(name)
    if path.is_file():
        return [name]
    wanted = None if subset in ("", "None") else subset.strip("/")
    on_hub = name_of(name, "dataset")
    folder = path if path.is_dir() or on_hub is None else downloaded_dataset(on_hub)
    if folder is None:
        return _hub_files(f"{DATASETS}{on_hub}", wanted, is_given=is_given, split=split)
    if not folder.is_dir():
        raise ConfigError([f"{name} is neither a file nor a folder, nor the name of a dataset on the hub; correct it"])
    return _folder_files(folder, name, wanted, is_given=is_given, split=split)


def _folder_files(folder: Path, name: str, subset: str | None, *, is_given: bool, split: str) -> list[str]:
    """Return the files of a split in the folder of a dataset. Raises ConfigError."""
    if subset is not None and (folder / subset).is_dir():
        folder = folder / subset
    elif is_given and subset is not None:
        raise ConfigError([f"{name} has no folder {subset}; give one of its folders as --subset, or None"])
    try:
        listing = find_sources([str(folder)])
        # a single file is the data, whatever split its name says
        if len(listing.sources) > 1:
            listing = of_split(listing, split, [str(folder)])
    except DataError as error:
        # the reader's messages name the flag of the commands for data
        raise ConfigError([f"{name}: {error}".replace("--input", str(folder))]) from None
    return [source.name for source in listing.sources]


def _hub_files(url: str, subset: str | None, *, is_given: bool, split: str) -> list[str]:
    """Return the URLs of a split of a dataset on the hub, which the preprocessing streams. Raises ConfigError."""
    try:
        if subset is not None:
            try:
                return urls_of(f"{url}?config={subset}&split={split}")
            except DataError:
                # the scripts' default is of one dataset, and others have no such folder
                if is_given:
                    raise
        return urls_of(f"{url}?split={split}")
    except DataError as error:
        raise ConfigError([str(error)]) from None


def _report(command: SpawnCommand) -> None:
    trackers = (command.get("report_to") or "").split()
    # the variables are transformers' too
    for tracker, project, variable, default, run_name in (
        ("wandb", "--wandb-project", "WANDB_PROJECT", WANDB_PROJECT, "--wandb-exp-name"),
        ("mlflow", "--mlflow-experiment", "MLFLOW_EXPERIMENT_NAME", "Default", "--mlflow-run-name"),
    ):
        if tracker not in trackers:
            continue
        command.settings[project] = os.environ.get(variable, default)
        if "run_name" in command.settings:
            command.settings[run_name] = command.settings["run_name"]


def named(text: str, sources: Mapping[str, str]) -> str:
    """Return a text with the flags that set HL_* variables in place of these."""
    return re.sub(r"\bHL_[A-Z_]+\b", lambda match: sources.get(match[0], match[0]), text)


def names_in(faults: list[str], kind: Kind, sources: Mapping[str, str]) -> str:
    """Return `--warmup_steps sets lr_warmup_iters` for the options that faults name and a script's flags set."""
    names = [named(legend(faults, kind), sources)]
    words = set(re.findall(r"\w+(?==)", " ".join(faults)))
    for target, name in sources.items():
        option = target.removeprefix("--").replace("-", "_")
        if target.startswith("--") and option in words and name != f"--{option}":
            names.append(f"{name} sets {option}")
    return "; ".join(filter(None, names))


def finetune_request(script: str, words: Sequence[str], environment: Mapping[str, str], ranks: Ranks) -> LaunchRequest:
    """Return the request of `finetune.py --config-name=FILE`, whose file is found as Hydra does."""
    own, train_flags = cut(words)
    hydra = list(_hydra_words(own))
    overrides = [word for name, word in hydra if name == OVERRIDE]
    given = [(name, value) for name, value in hydra if name != OVERRIDE]
    result = Dialect(FINETUNE, _unknown_word, prefix="--").translate(given)
    faults, folders = result.faults, _config_folders(Path(script).parent, result.settings)
    name = result.settings.get("name")
    file = None
    if name is None:
        faults.append("--config-name is not given; give the YAML file, such as --config-name=finetune_lora.yaml")
    else:
        # Hydra takes the name with or without its ending
        ending = "" if name.endswith((".yaml", ".yml")) else ".yaml"
        candidates = [folder / f"{name}{ending}" for folder in folders]
        file = next((path for path in candidates if path.is_file()), None)
        if file is None:
            faults.append(
                f"--config-name={name}: there is no file {' or '.join(map(str, candidates))}; give its name in the "
                "folder config beside the script, or --config-dir"
            )
    config = [] if file is None else ["--config", str(file)]
    # as arguments, which override the recipe's; the user's own come last
    passed_on = [*config, *GAUDI_ADAM, *train_flags]
    request = from_environment(
        {**ranks.variables, **environment}, "sft", passed_on, overrides if file is not None else ()
    )
    if file is None:  # the rest would follow from the missing file
        request.faults, request.unread = [], request.unread | {"config"}
    request.faults[:0] = faults
    ranks.apply(request)
    return request


def _config_folders(folder: Path, settings: Mapping[str, str]) -> list[Path]:
    if "dir" in settings:
        return [Path(settings["dir"])]
    if "path" in settings:
        return [folder / settings["path"]]
    return [folder / "config", folder]


def _hydra_words(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield Hydra's flags, by their long names, with their values, its overrides, and all other words with none."""
    # one iterator: `next` takes the word behind a flag, its value, from the loop
    rest = iter(words)
    rows = {row.name: row for row in FINETUNE}
    for word in rest:
        name, equals, value = word.partition("=")
        name = SHORT.get(name, name)
        if name in rows and name != OVERRIDE:
            is_switch = rows[name].takes == "switch"
            if not equals:
                value = "True" if is_switch else next(rest, "")
            yield name, value
        elif not word.startswith("-") and ("=" in word or word.startswith("~")):
            yield OVERRIDE, word
        else:
            yield word, ""


def _unknown_word(word: str, value: str, near: str | None) -> str:
    name = word.partition("=")[0]
    near = nearest(name, (row.name for row in FINETUNE if row.outcome == "sets"))
    hint = suggestion(near, "finetune.py has --config-name, --config-path and --config-dir")
    return f"unknown flag {name} of finetune.py; {hint}"
