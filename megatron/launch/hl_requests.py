"""Translation of HL_* variables into a launch request, by the table of hl_variables.py; preflight.py validates it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron.config.command_line import build_parser, presets_of, read_preset
from megatron.config.options import ConfigError, flag
from megatron.launch.hl_variables import (
    LAYOUT,
    LLAMA_PRESETS,
    REFUSED,
    TOKENIZERS,
    VARIABLES,
    Refused,
    Script,
    WrongValueError,
    is_on,
    one_of,
    whole_number,
)
from megatron.launch.plan import FineTuning, Request


def from_environment(environment: Mapping[str, str], script: Script, passed_on: list[str]) -> Request:
    """Translate the HL_* variables for one of the scripts; its arguments, `passed_on`, override them.

    Every value that cannot be used is in `faults`.
    """
    given = {name: value for name, value in environment.items() if name.startswith("HL_") and value != ""}
    if passed := presets_of(build_parser().parse_known_args(passed_on)[0]):
        given["HL_CONFIG"] = passed[0]  # it names the run; the others override its values
    request = Request(faults=_unknown_or_refused(given, script))
    reader = _VariableReader(given, request)

    preset = _preset(given, script, request)
    request.train_flags += ["--config", preset]
    if script == "sft":
        _fine_tuning(given, reader)
    for variable in VARIABLES:
        if variable.name in given:
            with reader.faults_of(variable.name):
                request.train_flags += variable.translate(given[variable.name])

    request.nodes = reader.number("HL_NUM_NODES") or 1
    request.devices_per_node = reader.number("HL_NGPU_PER_NODE") or reader.number("HL_DEVICES_PER_NODE")
    reader.same("HL_NGPU_PER_NODE", "HL_DEVICES_PER_NODE")
    request.data_parallel_size = reader.number("HL_DP")
    request.layout_known = not any(fault.startswith(LAYOUT) for fault in request.faults)
    request.hostsfile = given.get("HL_HOSTSFILE")
    request.rendezvous = given.get("HL_RENDEZVOUS")
    request.max_restarts = reader.number("HL_MAX_RESTARTS", at_least=0) or 0
    request.min_nodes = reader.number("HL_MIN_NODES")
    request.dry_run = reader.switch("HL_DRY_RUN") or False
    request.activate_dir = given.get("HL_QNPU_DIR")
    request.device = _device(given, reader)
    _lazy_mode(reader)
    if script == "sft" and "HL_TRAIN_ITERS" in given:
        request.train_flags += ["--num-epochs", "none"]
    if script != "sft":
        _data(given, script, preset, reader)

    if "HL_RESULTS_DIR" in given:
        request.train_flags += ["--results-dir", given["HL_RESULTS_DIR"]]
    else:
        parent = Path(given.get("HL_RESULTS_DIR_PREFIX", "."), "out")
        request.results_parent = str(parent / _run_name(given, script, preset))
    request.checkpoints_dir = given.get("HL_CHECKPOINTS_DIR")
    save = reader.switch("HL_SAVE")
    request.save, request.resume = save is None or save, True
    request.train_flags += passed_on
    return request


class _VariableReader:
    """Converts variables to numbers and switches; a wrong value becomes a fault, reported once."""

    def __init__(self, given: Mapping[str, str], request: Request):
        self.given, self.request = given, request

    @contextmanager
    def faults_of(self, name: str) -> Iterator[None]:
        try:
            yield
        except WrongValueError as why:
            self.fault(f"{name}={self.given[name]!r} {why}")

    def fault(self, text: str) -> None:
        if text not in self.request.faults:
            self.request.faults.append(text)

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

    def same(self, name: str, other: str) -> None:
        if name in self.given and other in self.given and self.given[name] != self.given[other]:
            self.fault(
                f"{name}={self.given[name]} and {other}={self.given[other]} mean the same thing; set one of them"
            )


def _unknown_or_refused(given: Mapping[str, str], script: Script) -> list[str]:
    known = {variable.name: variable for variable in VARIABLES}
    faults = []
    for name, value in sorted(given.items()):
        variable = known.get(name)
        if variable is not None:
            if script not in variable.scripts:
                homes = " and ".join(f"scripts/run_{home}.sh" for home in variable.scripts)
                faults.append(f"{name}={value} does not apply to this script; it belongs to {homes}")
            continue
        refused = next((entry for entry in REFUSED if _covers(entry, name)), None)
        if refused is None:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "docs/launching.md lists the variables"
            faults.append(f"unknown variable {name}={value}; {hint}")
        elif value.lower() not in refused.off:
            faults.append(f"{name}={value} is not supported: {refused.reason}")
    return faults


def _covers(refused: Refused, name: str) -> bool:
    return any(name == known or (known.endswith("*") and name.startswith(known[:-1])) for known in refused.names)


def _preset(given: Mapping[str, str], script: Script, request: Request) -> str:
    if "HL_CONFIG" in given:
        return given["HL_CONFIG"]
    if script != "llama":
        return "bloom_13b" if script == "bloom13b" else "sft_llama"
    version, size = given.get("HL_LLAMA_VER", "3.1"), given.get("HL_LLAMA_MODEL_SIZE", "8")
    sizes = LLAMA_PRESETS.get(version)
    if sizes is None:
        request.faults.append(f"HL_LLAMA_VER={version} must be {one_of(LLAMA_PRESETS)}")
    elif size not in sizes:
        request.faults.append(f"HL_LLAMA_MODEL_SIZE={size} must be {one_of(sizes)} with HL_LLAMA_VER={version}")
    else:
        return sizes[size]
    # any preset will do: the request is refused, and the rest can still be checked
    return LLAMA_PRESETS["3.1"]["8"]


def preset_holds(preset: str, section: str, option: str) -> bool:
    """Return whether a preset gives an option a value."""
    try:
        return bool((read_preset(preset).get(section) or {}).get(option))
    except (ConfigError, AttributeError):
        return False  # loading the preset reports its fault


def _run_name(given: Mapping[str, str], script: Script, preset: str) -> str:
    """Return the folder below `out`: bloom13b, llama3.1_8b, sft_ and the model's name, or the preset's name."""
    if script == "sft":
        return f"sft_{Path(given.get('HL_MODEL', '.')).absolute().name}"
    if "HL_CONFIG" not in given or preset == "bloom_13b":
        if script == "bloom13b":
            return script
        if "HL_CONFIG" not in given:
            return f"llama{given.get('HL_LLAMA_VER', '3.1')}_{given.get('HL_LLAMA_MODEL_SIZE', '8')}b"
    return Path(preset).stem if preset.endswith((".yaml", ".yml")) else preset


def _device(given: Mapping[str, str], reader: _VariableReader) -> str:
    """Return hpu, cuda, cpu, auto, or `no-hpu`: the first of cuda and cpu that is there."""
    device, use_hpu = given.get("HL_DEVICE"), reader.switch("HL_USE_HPU")
    if device is not None and device not in ("hpu", "cuda", "cpu"):
        reader.fault(f"HL_DEVICE={device!r} must be hpu, cuda or cpu; unset it for the first of them that is there")
        return "auto"
    if device is not None and use_hpu is not None and use_hpu != (device == "hpu"):
        reader.fault(f"HL_USE_HPU={given['HL_USE_HPU']} contradicts HL_DEVICE={device}; set one of them")
    if device is not None:
        return device
    return "auto" if use_hpu is None else "hpu" if use_hpu else "no-hpu"


def _lazy_mode(reader: _VariableReader) -> None:
    lazy, compiled = reader.switch("HL_USE_LAZY_MODE"), reader.switch("HL_USE_TORCH_COMPILE")
    if lazy and compiled:
        reader.fault("HL_USE_LAZY_MODE=1 and HL_USE_TORCH_COMPILE=1 exclude each other; set one of them to 0")
    if lazy is not None or compiled:
        reader.request.environment["PT_HPU_LAZY_MODE"] = "1" if lazy else "0"


def _fine_tuning(given: Mapping[str, str], reader: _VariableReader) -> None:
    """Add the model's flags, from its folder, and its training data."""
    request = reader.request
    model, chats, folder = given.get("HL_MODEL"), given.get("HL_DATA"), given.get("HL_DATA_OUTPUT_DIR")
    request.fine_tuning = FineTuning(model or "", chats, given.get("HL_CHAT_TEMPLATE"), folder)
    if chats is None and folder is None and not reader.switch("HL_DRY_RUN"):
        request.faults.append(
            "HL_DATA is not set; set it to a JSONL file of chats, or HL_DATA_OUTPUT_DIR to the folder of processed ones"
        )
    elif chats is not None and not Path(chats).is_file():
        request.faults.append(f"HL_DATA={chats} is not a file; set it to a JSONL file of chats")
    if model is None:
        request.faults.append("HL_MODEL is not set; set it to the folder of a model that transformers wrote")
        return
    from megatron.checkpoint.format import CheckpointError
    from megatron.interop.huggingface_config import preset_of  # it imports torch

    try:
        options = preset_of(Path(model))["model"]
    except CheckpointError as error:
        request.faults.append(f"HL_MODEL={model} cannot be fine-tuned: {error}")
        return
    for name, value in options.items():
        request.train_flags += [flag(name), str(value).lower() if isinstance(value, bool) else str(value)]
    request.train_flags += ["--load", model, "--tokenizer-type", "HFTokenizer", "--tokenizer-model", model]


def _data(given: Mapping[str, str], script: Script, preset: str, reader: _VariableReader) -> None:
    """Add the flags of dataset, index folder and tokenizer."""
    flags = reader.request.train_flags
    root, prefix = given.get("HL_DATA_DIR_ROOT"), given.get("HL_DATA_FILE_PREFIX")
    if prefix is not None:
        flags += ["--data-path", str(Path(root or ".", prefix))]
    elif root is not None:
        reader.fault(
            f"HL_DATA_DIR_ROOT={root} needs HL_DATA_FILE_PREFIX, the dataset's name in it without .bin; set it"
        )
    reader.same("HL_DATA_IDX_DIR", "HL_DATA_CACHE_DIR")
    cache = given.get("HL_DATA_CACHE_DIR") or given.get("HL_DATA_IDX_DIR")
    if cache is not None:
        flags += ["--data-cache-path", cache]

    kind, model = given.get("HL_TOKENIZER_TYPE"), given.get("HL_TOKENIZER_MODEL")
    if kind is not None and kind not in TOKENIZERS:
        more = (
            "; for Llama 3 use HFTokenizer with its tokenizer.json, or TikTokenizer with its tokenizer.model"
            if kind == "Llama3Tokenizer"
            else ""
        )
        reader.fault(f"HL_TOKENIZER_TYPE={kind} must be {one_of(TOKENIZERS)}{more}")
        return
    gpt2 = [Path(root or ".", name) for name in ("gpt2-vocab.json", "gpt2-merges.txt")]
    if kind is None and model is None and root is not None:
        # what Habana's layout of the folder implies; a preset that names a tokenizer keeps it
        if preset_holds(preset, "data", "tokenizer_model"):
            return
        if script == "bloom13b" and all(path.is_file() for path in gpt2):
            kind = "GPT2BPETokenizer"
        elif script == "llama" and Path(root, "tokenizer.json").is_file():
            kind, model = "HFTokenizer", str(Path(root, "tokenizer.json"))
    if kind is not None:
        flags += ["--tokenizer-type", TOKENIZERS[kind]]
    if kind == "GPT2BPETokenizer":
        flags += ["--vocab-file", str(gpt2[0]), "--merge-file", str(gpt2[1])]
    if model is not None:
        flags += ["--tokenizer-model", model]


def legend(faults: list[str]) -> str:
    """Return 'HL_TP sets tensor_model_parallel_size' for the options that faults name and users know as variables."""
    text = " ".join(faults)
    names = {
        variable.flag.removeprefix("--").replace("-", "_"): variable.name for variable in VARIABLES if variable.flag
    }
    pairs = [
        f"{variable} sets {option}" for option, variable in names.items() if option in text and variable not in text
    ]
    return "; ".join(pairs)
