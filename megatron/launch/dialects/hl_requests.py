"""Translation of HL_* variables into a launch request, by the table of hl_variables.py; preflight.py validates it."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.checkpoint.errors import CheckpointError
from megatron.launch.dialects.finetune_file import read_finetune_file
from megatron.launch.dialects.hl_help import REFUSED, covers
from megatron.launch.dialects.hl_values import (
    Choice,
    WrongValueError,
    chosen,
    fp8_request,
    is_on,
    one_of,
    whole_number,
    words,
)
from megatron.launch.dialects.hl_variables import (
    FINE_TUNING,
    LLAMA_PRESETS,
    PRETRAINING,
    VARIABLES,
    Script,
    Variable,
    path_of,
)
from megatron.launch.plan import LAUNCHERS, TOO_LONG, TRAIN_ON, FineTuning, LaunchRequest
from megatron.options.config import ConfigError
from megatron.options.flags import dashed, flag
from megatron.options.presets import ALTERNATIVES, UNSET, read_preset
from megatron.settings.parser import build_parser
from megatron.weights.huggingface_config import find_model, preset_of

KNOWN = {variable.name: variable for variable in VARIABLES}


def from_environment(environment: Mapping[str, str], script: Script, passed_on: list[str]) -> LaunchRequest:
    """Translate the HL_* variables for one of the scripts; its arguments, `passed_on`, override them.

    Every value that cannot be used is in `faults`.
    """
    given = {name: value for name, value in environment.items() if name.startswith("HL_") and value != ""}
    passed_on = dashed(passed_on)
    arguments = vars(build_parser().parse_known_args(passed_on)[0])
    if passed := arguments["config"]:
        given["HL_CONFIG"] = passed[0]  # it names the run; the others override its values
    request = LaunchRequest()
    of_file: list[str] = []
    if script == "sft":
        given, passed_on, of_file = _with_file(given, passed_on, arguments, request)
    reader = _VariableReader(given, request)
    _unknown_or_refused(given, script, reader)

    preset = _preset(given, script, reader, adapts=_requests_adapters(given, arguments))
    if script == "dpo" and "HL_CONFIG" not in given:
        _check_rate(given, arguments, reader)
    request.train_flags += ["--config", preset] if preset is not None else []
    request.train_flags += of_file
    if script in FINE_TUNING:
        _fine_tuning(given, script, reader)
    else:
        _data(given, script, preset, reader)
    reader.translate(arguments)

    _launch_options(given, reader)
    try:
        flags, environment = fp8_request(given)
        request.train_flags += flags
        request.environment = environment | request.environment
    except WrongValueError as why:
        reader.fault(str(why))
    _launcher(given, reader)
    request.max_restarts = reader.number("HL_MAX_RESTARTS", at_least=0) or 0
    request.min_nodes = reader.number("HL_MIN_NODES")
    request.spare_hosts = reader.number("HL_SPARE_HOSTS", at_least=0) or 0
    request.lazy = reader.switch("HL_USE_LAZY_MODE")
    request.prefers_lazy = script in PRETRAINING  # as Habana trains

    if "HL_RESULTS_DIR" in given:
        request.train_flags += ["--results-dir", given["HL_RESULTS_DIR"]]
    else:
        parent = Path(given.get("HL_RESULTS_DIR_PREFIX", "."), "out")
        request.results_parent = str(parent / _run_name(given, script, preset))
    request.checkpoints_dir = given.get("HL_CHECKPOINTS_DIR")
    save = reader.switch("HL_SAVE")
    request.save, request.resume = save is None or save, True
    request.train_flags += passed_on
    request.unread -= {name for name, value in arguments.items() if value is not None}
    return request


def inference_request(environment: Mapping[str, str], script: Script) -> LaunchRequest:
    """Translate the HL_* variables for a script that does not train: launch options, and flags of its command.

    Every value that cannot be used is in `faults`.
    """
    given = {name: value for name, value in environment.items() if name.startswith("HL_") and value != ""}
    request = LaunchRequest()
    reader = _VariableReader(given, request)
    _unknown_or_refused(given, script, reader)
    given = {name: value for name, value in given.items() if name in KNOWN and script in KNOWN[name].scripts}
    for name, its_flag in (("HL_MODEL", "--load"), ("HL_CHAT_TEMPLATE", "--chat-template")):
        if name in given:
            request.train_flags += [its_flag, given[name]]
    bf16 = reader.switch("HL_BF16")
    if bf16 is not None:
        request.train_flags += ["--precision", "bf16" if bf16 else "fp32"]
    reader.given = {name: value for name, value in given.items() if name != "HL_BF16"}
    reader.translate({})
    reader.given = given
    _launch_options(given, reader)
    return request


def _launch_options(given: Mapping[str, str], reader: _VariableReader) -> None:
    """Set the options of nodes, devices and environment."""
    request = reader.request
    request.nodes = reader.number("HL_NUM_NODES") or 1
    request.devices_per_node = reader.number("HL_NGPU_PER_NODE") or reader.number("HL_DEVICES_PER_NODE")
    reader.same("HL_NGPU_PER_NODE", "HL_DEVICES_PER_NODE")
    request.data_parallel_size = reader.number("HL_DP")
    request.hostsfile = given.get("HL_HOSTSFILE")
    request.rendezvous = given.get("HL_RENDEZVOUS")
    request.dry_run = reader.switch("HL_DRY_RUN") or False
    request.activate_dir = given.get("HL_QNPU_DIR")
    request.device = _device(given, reader)
    request.environment = _environment(given, reader)


def _with_file(
    given: dict[str, str], passed_on: list[str], arguments: dict[str, Any], request: LaunchRequest
) -> tuple[dict[str, str], list[str], list[str]]:
    """Return variables and arguments with a finetune_lora.yaml replaced by what it sets, and its flags.

    Variables and arguments override the file.
    """
    names = arguments["config"] or [given.get("HL_CONFIG", "")]
    file, name = next(((file, name) for name in names if (file := read_finetune_file(name))), (None, ""))
    if file is None:
        return given, passed_on, []
    given = {key: value for key, value in given.items() if key != "HL_CONFIG"}
    if others := [other for other in names if other != name]:
        given["HL_CONFIG"] = others[0]
    request.faults += file.faults
    request.notes += file.notes
    if "HL_GBS" not in given and arguments["global_batch_size"] is None:
        request.samples_per_rank = file.samples_per_rank
    return file.variables | given, _without_config(passed_on, name), file.flags


def _without_config(arguments: list[str], name: str) -> list[str]:
    rest, words = list[str](), iter(arguments)
    for word in words:
        if word == "--config" and (value := next(words, "")) != name:
            rest += [word, value]
        elif word not in ("--config", f"--config={name}"):
            rest.append(word)
    return rest


class _VariableReader:
    """Converts variables to numbers, switches and flags; a wrong value becomes a fault, reported once."""

    def __init__(self, given: Mapping[str, str], request: LaunchRequest):
        self.given, self.request = given, request

    @contextmanager
    def faults_of(self, name: str, *, is_overridden: bool = False) -> Iterator[None]:
        try:
            yield
        except WrongValueError as why:
            self.fault(f"{name}={self.given[name]!r} {why}", *(() if is_overridden else (name,)))

    def fault(self, text: str, *names: str) -> None:
        """Report a fault; what the variables `names` set is not known."""
        if text not in self.request.faults:
            self.request.faults.append(text)
        for name in names:
            self.request.unread |= {*map(_option, KNOWN[name].flags), *KNOWN[name].unread}

    def number(self, name: str, at_least: int = 1) -> int | None:
        """Return None if it is unset or wrong."""
        if name in self.given:
            with self.faults_of(name):
                return whole_number(self.given[name], at_least)
        return None

    def switch(self, name: str) -> bool | None:
        """Return None if it is unset or wrong."""
        if name in self.given:
            with self.faults_of(name):
                return is_on(self.given[name])
        return None

    def chosen(self, name: str, choices: tuple[Choice, ...]) -> Choice:
        """Return the first choice if it is unset or wrong."""
        with self.faults_of(name):
            return chosen(self.given.get(name, choices[0]), choices)
        return choices[0]

    def words(self, name: str) -> tuple[str, ...]:
        """Return none if it is unset or wrong."""
        with self.faults_of(name):
            return words(self.given.get(name, ""))
        return ()

    def same(self, name: str, other: str) -> None:
        if name in self.given and other in self.given and self.given[name] != self.given[other]:
            self.fault(
                f"{name}={self.given[name]} and {other}={self.given[other]} mean the same thing; set one of them",
                *(name, other),
            )

    def translate(self, arguments: Mapping[str, object]) -> None:
        """Add the flags of all variables, but for those that the script's arguments give in other words."""
        replaced = {
            flag(name)
            for group in ALTERNATIVES
            for name in group
            if any(arguments.get(other) not in (None, "none") for other in group if other != name)
        }
        translated: list[tuple[Variable, list[str]]] = []
        for variable in VARIABLES:
            if variable.name not in self.given:
                continue
            is_overridden = not replaced.isdisjoint(variable.flags)
            with self.faults_of(variable.name, is_overridden=is_overridden):
                flags = variable.translate(self.given[variable.name])
                if is_overridden:
                    continue
                for other, others in translated:
                    if contradictory := _contradictory(variable, flags, other, others):
                        first, second = (f"{name}={self.given[name]}" for name in (other.name, variable.name))
                        self.fault(
                            f"{first} and {second} set {contradictory} differently; set one of them",
                            *(other.name, variable.name),
                        )
                translated.append((variable, flags))
                self.request.train_flags += flags


def _contradictory(variable: Variable, flags: list[str], other: Variable, others: list[str]) -> str | None:
    """Return the first flag that two variables set, if they do not set it alike."""
    shared = [flag for flag in variable.flags if flag in flags and flag in others and flag in other.flags]
    if variable.flags == other.flags:  # names of one variable: it may set more, which others override
        return shared[0] if shared and flags != others else None
    return next((flag for flag in shared if flags[flags.index(flag) + 1] != others[others.index(flag) + 1]), None)


def _option(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _unknown_or_refused(given: Mapping[str, str], script: Script, reader: _VariableReader) -> None:
    for name, value in sorted(given.items()):
        variable = KNOWN.get(name)
        if variable is not None:
            if script not in variable.scripts:
                homes = " and ".join(path_of(home) for home in variable.scripts)
                reader.fault(f"{name}={value} does not apply to this script; it belongs to {homes}")
            continue
        refused = next((entry for entry in REFUSED if covers(entry, name)), None)
        if refused is None:
            names = [known.removeprefix("HL_") for known in KNOWN if script in KNOWN[known].scripts]
            # without what all names share, in which a short name would be near to any other
            near = ["HL_" + found for found in difflib.get_close_matches(name.removeprefix("HL_"), names, n=1)]
            hint = f"did you mean {near[0]}?" if near else "docs/reference/variables.md lists the variables"
            reader.fault(f"unknown variable {name}={value}; {hint}", *near)
        elif value.lower() not in refused.off:
            reader.fault(f"{name}={value} is not supported: {refused.reason}")
        elif refused.is_noted:
            reader.request.notes.append(f"{name}={value} has no effect: {refused.reason}")


def _requests_adapters(given: Mapping[str, str], arguments: Mapping[str, object]) -> bool:
    rank = arguments["lora_rank"] if arguments["lora_rank"] is not None else given.get("HL_LORA_RANK")
    return rank not in UNSET


def _check_rate(given: Mapping[str, str], arguments: Mapping[str, object], reader: _VariableReader) -> None:
    """Refuse the learning rate of the recipe's adapters, which would ruin a whole model."""
    is_stated = "HL_LORA_RANK" in given or arguments["lora_rank"] is not None
    if is_stated and not _requests_adapters(given, arguments) and "HL_LR" not in given and arguments["lr"] is None:
        reader.fault(
            "without adapters the recipe's learning rate, 2e-5, is far too high for preferences; set HL_LR, such as "
            "HL_LR=5e-7"
        )


def _preset(given: Mapping[str, str], script: Script, reader: _VariableReader, *, adapts: bool) -> str | None:
    """Return the preset; None if the variables name none. `adapts`: adapters are requested."""
    if "HL_CONFIG" in given:
        return given["HL_CONFIG"]
    if script == "sft":
        return "lora_llama" if adapts else "sft_llama"  # whose learning rate is far too low for adapters
    if script == "dpo":
        return "dpo_llama"
    if script == "bloom13b":
        return "bloom_13b"
    version, size = given.get("HL_LLAMA_VER", "3.1"), given.get("HL_LLAMA_MODEL_SIZE", "8")
    sizes = LLAMA_PRESETS.get(version)
    if sizes is not None and size in sizes:
        return sizes[size]
    if sizes is None:
        older = {"7": "1", "13": "1", "70": "2"}.get(version)  # run_llama13b.sh and run_llamav2.sh of 2023
        hint = f"; for the size, set HL_LLAMA_VER={older} and HL_LLAMA_MODEL_SIZE={version}" if older else ""
        reader.fault(f"HL_LLAMA_VER={version} must be {one_of(LLAMA_PRESETS)}{hint}")
    else:
        reader.fault(f"HL_LLAMA_MODEL_SIZE={size} must be {one_of(sizes)} with HL_LLAMA_VER={version}")
    reader.request.unread.add("config")
    return None


def preset_holds(preset: str | None, section: str, option: str) -> bool:
    """Return whether a preset gives an option a value."""
    try:
        return preset is not None and bool((read_preset(preset).get(section) or {}).get(option))
    except (ConfigError, AttributeError):
        return False  # loading the preset reports its fault


def _run_name(given: Mapping[str, str], script: Script, preset: str | None) -> str:
    """Return the folder below `out`: bloom13b, llama3.1_8b, sft_ or dpo_ and the model's name, or the preset's name."""
    if script in FINE_TUNING:
        return f"{script}_{Path(given.get('HL_MODEL', '.')).absolute().name}"
    if script == "bloom13b" and preset == "bloom_13b":
        return script
    if preset is None or "HL_CONFIG" not in given:
        return f"llama{given.get('HL_LLAMA_VER', '3.1')}_{given.get('HL_LLAMA_MODEL_SIZE', '8')}b"
    return Path(preset).stem if preset.endswith((".yaml", ".yml")) else preset


def _device(given: Mapping[str, str], reader: _VariableReader) -> str:
    """Return hpu, cuda, cpu, auto, or `no-hpu`: the first of cuda and cpu that is there."""
    device, use_hpu = given.get("HL_DEVICE"), reader.switch("HL_USE_HPU")
    if device is not None and device not in ("hpu", "cuda", "cpu"):
        reader.fault(
            f"HL_DEVICE={device!r} must be hpu, cuda or cpu; unset it for the first of them that is there", "HL_DEVICE"
        )
        return "auto"
    if device is not None and use_hpu is not None and use_hpu != (device == "hpu"):
        reader.fault(f"HL_USE_HPU={given['HL_USE_HPU']} contradicts HL_DEVICE={device}; set one of them", "HL_DEVICE")
    if device is not None:
        return device
    return "auto" if use_hpu is None else "hpu" if use_hpu else "no-hpu"


def _launcher(given: Mapping[str, str], reader: _VariableReader) -> None:
    """Set what starts the agents, and the cores of their ranks."""
    request, kind = reader.request, given.get("HL_LAUNCHER_TYPE", LAUNCHERS[0])
    if kind in LAUNCHERS:
        request.launcher = kind
    else:
        own = "; for torchrun's way set HL_RENDEZVOUS=HOST:PORT and start this script on each node"
        reader.fault(f"HL_LAUNCHER_TYPE={kind} must be {one_of(LAUNCHERS)}{own if kind == 'torchrun' else ''}")
    request.cores_per_rank = reader.number("HL_PE") or 0
    request.ranks_per_socket = reader.number("HL_PPR") or 0


def _environment(given: Mapping[str, str], reader: _VariableReader) -> dict[str, str]:
    """Return the variables for the ranks: those of HL_ENV_FLAGS, and of Gaudi's communication through host cards."""
    variables = {}
    for word in given.get("HL_ENV_FLAGS", "").split(","):
        name, equals, value = word.strip().partition("=")
        if equals and name.isidentifier():
            variables[name] = value
        elif word:
            reader.fault(
                f"HL_ENV_FLAGS={given['HL_ENV_FLAGS']}: {word!r} is not NAME=VALUE; write NAME=VALUE,NAME=VALUE"
            )
    defaults = {"HCCL_OVER_OFI": "1", "HCCL_GAUDI_DIRECT": "1", "FI_PROVIDER": "verbs"}
    if reader.switch("HL_HNIC"):
        if reader.request.nodes == 1 and "nodes" not in reader.request.unread:
            reader.fault("HL_HNIC=1 connects several nodes, but HL_NUM_NODES is 1; unset one of them")
        variables |= {name: given.get(f"HL_{name}", value) for name, value in defaults.items()}
    elif "HL_HNIC" not in given or reader.switch("HL_HNIC") is False:
        for name in defaults:
            if f"HL_{name}" in given:
                reader.fault(f"HL_{name}={given[f'HL_{name}']} needs HL_HNIC=1; set that, or leave it out")
    return variables


def _fine_tuning(given: Mapping[str, str], script: Script, reader: _VariableReader) -> None:
    """Add the model's flags, from its folder, and its training data."""
    request = reader.request
    model, data, folder = given.get("HL_MODEL"), given.get("HL_DATA"), given.get("HL_DATA_OUTPUT_DIR")
    rows = "pairs of answers" if script == "dpo" else "chats"
    request.fine_tuning = FineTuning(
        model or "",
        data,
        given.get("HL_CHAT_TEMPLATE"),
        folder,
        reader.chosen("HL_TRAIN_ON", TRAIN_ON),
        reader.chosen("HL_TOO_LONG", TOO_LONG),
        reader.words("HL_IGNORE_COLUMNS"),
    )
    _check_processed(given, reader)
    if data is None and folder is None and not reader.switch("HL_DRY_RUN"):
        reader.fault(
            f"HL_DATA is not set; set it to a JSONL file of {rows}, or HL_DATA_OUTPUT_DIR to the folder of processed "
            "ones"
        )
    elif data is not None:
        _check_files(request.fine_tuning, rows, reader)
    if model is None:
        reader.fault("HL_MODEL is not set; set it to the folder of a model that transformers wrote")
        request.unread |= {"config", "model"}
        return
    try:
        model = str(find_model(model, "HL_MODEL"))
        options = preset_of(Path(model))["model"]
    except (CheckpointError, ConfigError) as error:
        reader.fault(
            error.faults[0] if isinstance(error, ConfigError) else f"HL_MODEL={model} cannot be fine-tuned: {error}"
        )
        request.unread |= {"config", "model"}
        return
    request.fine_tuning = dataclasses.replace(request.fine_tuning, model=model)
    for name, value in options.items():
        request.train_flags += [flag(name), str(value).lower() if isinstance(value, bool) else str(value)]
    request.train_flags += ["--load", model, "--tokenizer-type", "HFTokenizer", "--tokenizer-model", model]


def _check_processed(given: Mapping[str, str], reader: _VariableReader) -> None:
    """Add a fault for each variable of rows beside data whose rows were read before."""
    if "HL_DATA_OUTPUT_DIR" not in given or "HL_DATA" in given:
        return
    for name in ("HL_TRAIN_ON", "HL_TOO_LONG", "HL_IGNORE_COLUMNS"):
        if name in given:
            reader.fault(
                f"{name}={given[name]} has no effect on the data in HL_DATA_OUTPUT_DIR, which was processed before; "
                "leave it out, or set HL_DATA"
            )


def _check_files(given: FineTuning, rows: str, reader: _VariableReader) -> None:
    try:
        files = given.files
    except ValueError as why:
        reader.fault(f"HL_DATA={given.data} {why}; put a name with spaces in quotes")
        reader.request.fine_tuning = dataclasses.replace(given, data=None)
        reader.request.unread.add("data_path")
        return
    for file in files:
        if not Path(file).is_file():
            named = f"HL_DATA={given.data}" if len(files) == 1 else f"HL_DATA={given.data}: {file}"
            reader.fault(f"{named} is not a file; set it to a JSONL file of {rows}")


def _data(given: Mapping[str, str], script: Script, preset: str | None, reader: _VariableReader) -> None:
    """Add the flags of dataset, index folder and, where only its folder is given, of the tokenizer."""
    flags = reader.request.train_flags
    root, prefix = given.get("HL_DATA_DIR_ROOT"), given.get("HL_DATA_FILE_PREFIX")
    if prefix is not None:
        flags += ["--data-path", str(Path(root or ".", prefix))]
    elif root is not None:
        reader.fault(
            f"HL_DATA_DIR_ROOT={root} needs HL_DATA_FILE_PREFIX, the dataset's name in it without .bin; set it"
        )
        reader.request.unread.add("data_path")
    reader.same("HL_DATA_IDX_DIR", "HL_DATA_CACHE_DIR")
    cache = given.get("HL_DATA_CACHE_DIR") or given.get("HL_DATA_IDX_DIR")
    if cache is not None:
        flags += ["--data-cache-path", cache]

    kind, folder = given.get("HL_TOKENIZER_TYPE"), Path(root or ".")
    of_gpt2 = ["--vocab-file", str(folder / "gpt2-vocab.json"), "--merge-file", str(folder / "gpt2-merges.txt")]
    if kind == "GPT2BPETokenizer":
        flags += of_gpt2
    elif root is None or "HL_TOKENIZER_MODEL" in given or preset_holds(preset, "data", "tokenizer_model"):
        return
    elif kind in ("HFTokenizer", "HuggingFaceTokenizer"):
        flags += ["--tokenizer-model", str(folder / "tokenizer.json")]
    elif kind not in (None, "NullTokenizer"):
        flags += ["--tokenizer-model", str(folder / "tokenizer.model")]  # where Habana's scripts look for it
    elif kind is None and script == "bloom13b" and all(Path(path).is_file() for path in of_gpt2[1::2]):
        flags += ["--tokenizer-type", "GPT2BPETokenizer", *of_gpt2]
    elif kind is None and script == "llama" and (folder / "tokenizer.json").is_file():
        flags += ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", str(folder / "tokenizer.json")]


def legend(faults: list[str], script: Script) -> str:
    """Return 'HL_TP sets tensor_model_parallel_size' for the options that faults name and a script has as variables."""
    # a single word may be plain English, or the name of a section
    words = set(re.findall(r"\w+(?==)|\w+_\w+", " ".join(faults)))
    taken = [variable for variable in reversed(VARIABLES) if variable.flags and script in variable.scripts]
    named = {_option(variable.flags[0]): variable.name for variable in taken}
    if any("--ignore-columns" in fault for fault in faults):
        return "HL_IGNORE_COLUMNS sets --ignore-columns"
    return "; ".join(
        f"{variable} sets {option}" for option, variable in named.items() if option in words and variable not in words
    )
