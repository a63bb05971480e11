"""Translation of HL_* variables into a launch request, by the table of hl_variables.py; preflight.py validates it."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.folders import CheckpointError
from megatron.hub.names import is_dataset
from megatron.launch.dialects.finetune_file import read_finetune_file
from megatron.launch.dialects.hl_environment import add_fp8, given_text, rank_environment
from megatron.launch.dialects.hl_variables import (
    FINE_TUNING,
    LLAMA_PRESETS,
    MIXTRAL_PRESETS,
    PRETRAINING,
    REFUSED,
    VARIABLES,
    Script,
    variables_of,
    why_not,
)
from megatron.launch.options import LAUNCHERS, LaunchOptions
from megatron.launch.plan import FineTuning, LaunchRequest
from megatron.launch.preflight import UNREADABLE
from megatron.options.config import ConfigError
from megatron.options.dialect import Dialect, Translation, flag_words, one_of, suggestion
from megatron.options.flags import dashed, flag, option_of
from megatron.options.stored import ALTERNATIVES, UNSET, read_preset
from megatron.runtime.device_hpu import HPU
from megatron.settings.command_line import without_preset
from megatron.settings.parser import build_parser
from megatron.weights.huggingface_config import preset_of
from megatron.weights.model_folder import find_model

KNOWN = {variable.name: variable for variable in VARIABLES}
FIELDS = (
    *(field.name for field in dataclasses.fields(LaunchOptions) if field.name not in ("device", "launcher")),
    *("lazy", "checkpoints_dir"),
)
"""Fields of a launch request that variables set as they are."""


def from_environment(
    environment: Mapping[str, str], script: Script, passed_on: list[str], overrides: Sequence[str] = ()
) -> LaunchRequest:
    """Translate the HL_* variables for one of the scripts that train; its arguments, `passed_on`, override them.

    `overrides`: Hydra's, of a finetune_lora.yaml. Every value that cannot be used is in `faults`.
    """
    given = hl_variables(environment)
    passed_on = dashed(passed_on)
    arguments = vars(build_parser().parse_known_args(passed_on)[0])
    if passed := arguments["config"]:
        given["HL_CONFIG"] = passed[0]  # it names the run; the others override its values
    request = LaunchRequest()
    of_file: list[str] = []
    if script == "sft":
        given, passed_on, of_file = _with_file(given, passed_on, overrides, request)
    result = _translate(given, script, request, replaced=_replaced(arguments))
    settings = result.settings
    preset = _preset(result, script, request, adapts=_requests_adapters(settings, arguments))
    # a preset that the user names has a rate of its own
    if script == "dpo" and "config" not in settings:
        _check_rate(settings, arguments, request)

    # the flags are in the order of precedence, the weakest first: the last one of a name counts
    if preset is not None:
        request.train_flags += ["--config", preset]
    request.train_flags += of_file
    if script in FINE_TUNING:
        _fine_tuning(given, settings, script, request)
    else:
        _data(settings, script, preset, request)
    if "index_folder" in settings:
        request.train_flags += ["--data-cache-path", settings["index_folder"]]
    request.train_flags += flag_words(settings)
    if script == "mixtral" and preset is not None:
        request.train_flags += _expert_ranks(settings, arguments, preset)
    add_fp8(given, result, request)
    _launcher(settings, request)
    request.prefers_lazy = script in PRETRAINING  # as Habana trains
    if "--results-dir" not in settings:
        parent = Path(settings.get("results_prefix", "."), "out")
        request.results_parent = str(parent / _run_name(settings, script, preset))
    request.save, request.resume = settings.get("save", True), True
    # last, so that arguments override variables, which override the file and the preset
    request.train_flags += passed_on
    # an argument takes the place of a variable that cannot be read
    request.unread -= {name for name, value in arguments.items() if value is not None}
    return request


def inference_request(environment: Mapping[str, str], script: Script) -> LaunchRequest:
    """Translate the HL_* variables for a script that does not train: launch options, and flags of its command.

    Every value that cannot be used is in `faults`.
    """
    request = LaunchRequest()
    request.train_flags += flag_words(_translate(hl_variables(environment), script, request).settings)
    return request


def hl_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are set; an empty one is not."""
    return {name: value for name, value in environment.items() if name.startswith("HL_") and value}


def _translate(
    given: Mapping[str, str], script: Script, request: LaunchRequest, replaced: frozenset[str] = frozenset()
) -> Translation:
    """Return what the variables set, and set the fields of the request that they name.

    `replaced`: flags that arguments give in other words.
    """
    # refused alone: translated too, they would add faults of what this script does not have
    of_others = {name for name in given if name in KNOWN and script not in KNOWN[name].scripts}
    for name in sorted(of_others):
        why = why_not(KNOWN[name], script)
        request.faults.append(f"{name}={given[name]} does not apply to this script; {why}")
    rows = variables_of(script)
    order = {row.name: number for number, row in enumerate(rows)}  # a later variable overrides what an earlier implies
    own = sorted((order.get(name, -1), name) for name in given if name not in of_others)
    dialect = Dialect((*rows, *REFUSED), _unknown, prefix="HL_", has_one_source=True)
    result = dialect.translate((name, given[name]) for _, name in own)
    settings = {name: value for name, value in result.settings.items() if name not in replaced}
    request.faults += result.faults
    request.notes += result.notes
    request.unread |= {option_of(name) for name in result.unread - replaced if name.startswith("--")}
    request.unread |= result.unread & UNREADABLE
    for name in FIELDS:
        if name in settings:
            setattr(request, name, settings[name])
    request.device = _device(settings, result, request)
    request.environment = rank_environment(result, request)
    result.settings = settings
    return result


def _unknown(name: str, value: str, near: str | None) -> str:
    return f"unknown variable {name}={value}; {suggestion(near, 'docs/reference/variables.md lists the variables')}"


def _replaced(arguments: Mapping[str, object]) -> frozenset[str]:
    """Return the flags that arguments give in other words, as --train-samples gives --train-iters."""
    replaced = set()
    # options that say the same in other words: a variable's would contradict the argument's, which overrides it
    for group in ALTERNATIVES:
        for name in group:
            others = [arguments.get(other) for other in group if other != name]
            if any(value not in (None, "none") for value in others):
                replaced.add(flag(name))
    return frozenset(replaced)


def _with_file(
    given: dict[str, str], passed_on: list[str], overrides: Sequence[str], request: LaunchRequest
) -> tuple[dict[str, str], list[str], list[str]]:
    """Return variables and arguments with a finetune_lora.yaml replaced by what it sets, and its flags.

    Variables and arguments override the file.
    """
    arguments = vars(build_parser().parse_known_args(passed_on)[0])
    names = arguments["config"] or [given.get("HL_CONFIG", "")]
    for name in names:
        file = read_finetune_file(name, overrides)
        if file is not None:
            break
    else:
        if overrides:
            request.faults.append(f"{shlex.join(overrides)}: only a finetune_lora.yaml has keys to override")
        return given, passed_on, []
    # what the file sets takes its place
    given = {key: value for key, value in given.items() if key != "HL_CONFIG"}
    others = [other for other in names if other != name]
    if others:
        given["HL_CONFIG"] = others[0]
    request.faults += file.faults
    request.notes += file.notes
    # the file counts the samples of a rank, and a global batch that is given wins over what follows from them
    if "HL_GBS" not in given and arguments["global_batch_size"] is None:
        request.samples_per_rank = file.samples_per_rank
    return file.variables | given, without_preset(passed_on, name), file.flags


def _requests_adapters(settings: Mapping[str, Any], arguments: Mapping[str, object]) -> bool:
    # "none" as an argument takes the adapters of a variable away
    rank = arguments["lora_rank"]
    if rank is None:
        rank = settings.get("--lora-rank")
    return rank not in UNSET


def _check_rate(settings: Mapping[str, Any], arguments: Mapping[str, object], request: LaunchRequest) -> None:
    """Refuse the learning rate of the recipe's adapters, which would ruin a whole model."""
    states_rank = "--lora-rank" in settings or arguments["lora_rank"] is not None
    states_rate = "--lr" in settings or arguments["lr"] is not None
    if states_rank and not states_rate and not _requests_adapters(settings, arguments):
        request.faults.append(
            "without adapters the recipe's learning rate, 2e-5, is far too high for preferences; set HL_LR, such as "
            "HL_LR=5e-7"
        )


def _preset(result: Translation, script: Script, request: LaunchRequest, *, adapts: bool) -> str | None:
    """Return the preset; None if the variables name none. `adapts`: adapters are requested."""
    settings = result.settings
    if "config" in settings:
        preset = str(settings["config"])
        for name in ("llama_version", "llama_size", "mixtral_model"):
            if name in settings:
                given = given_text(result, name)
                request.faults.append(f"{given} has no effect beside HL_CONFIG={preset} (--config); leave one out")
        return preset
    if script == "llama":
        return _llama_preset(settings, request)
    if script == "mixtral":
        return MIXTRAL_PRESETS[settings.get("mixtral_model", "8x7b")]
    if script == "sft":  # the learning rate of a whole model is far too low for adapters
        return "lora_llama" if adapts else "sft_llama"
    return {"dpo": "dpo_llama", "bloom13b": "bloom_13b"}[script]


def _llama_preset(settings: Mapping[str, Any], request: LaunchRequest) -> str | None:
    version, size = settings.get("llama_version", "3.1"), settings.get("llama_size", "8")
    sizes = LLAMA_PRESETS.get(version)
    if sizes is not None and size in sizes:
        return sizes[size]
    # `config` stands for all options: checks of a model of the default size would add faults that are none
    request.unread.add("config")
    if sizes is not None:
        request.faults.append(f"HL_LLAMA_MODEL_SIZE={size} must be {one_of(sizes)} with HL_LLAMA_VER={version}")
        return None
    older = {"7": "1", "13": "1", "70": "2"}.get(version)  # run_llama13b.sh and run_llamav2.sh of 2023
    hint = f"; for the size, set HL_LLAMA_VER={older} and HL_LLAMA_MODEL_SIZE={version}" if older else ""
    request.faults.append(f"HL_LLAMA_VER={version} must be {one_of(LLAMA_PRESETS)}{hint}")
    return None


def _expert_ranks(settings: Mapping[str, Any], arguments: Mapping[str, object], preset: str) -> list[str]:
    """Return the flag of the ranks that hold different experts where none is given: as many as fit, as Habana's."""

    def size(option: str, otherwise: int) -> int:
        value = arguments.get(option)
        value = settings.get(flag(option)) if value is None else value
        return otherwise if value in UNSET else int(str(value))

    name = "expert_model_parallel_size"
    # higher stages of ZeRO shard over ranks that hold the same parameters
    if arguments.get(name) is not None or flag(name) in settings or size("zero_stage", 0) > 1:
        return []
    try:
        experts = size("num_experts", int((read_preset(preset).get("model") or {}).get("num_experts") or 1))
        tensor = size("tensor_model_parallel_size", 1)
        data = int(str(arguments.get("data_parallel_size") or settings.get("data_parallel_size", 1)))
        context = size("context_parallel_size", 1)
        ranks = data * context * tensor // size("expert_tensor_parallel_size", tensor)
    except (ConfigError, AttributeError, ValueError):
        # what cannot be read is reported elsewhere
        return []
    return [flag(name), str(math.gcd(experts, ranks))]


def preset_holds(preset: str | None, section: str, option: str) -> bool:
    """Return whether a preset gives an option a value."""
    try:
        return preset is not None and bool((read_preset(preset).get(section) or {}).get(option))
    except (ConfigError, AttributeError):
        return False  # loading the preset reports its fault


def _run_name(settings: Mapping[str, Any], script: Script, preset: str | None) -> str:
    """Return the folder below `out`: bloom13b, llama3.1_8b, mixtral_8x7b, sft_ or dpo_ and the model, or the preset."""
    if script in FINE_TUNING:
        return f"{script}_{Path(settings.get('model', '.')).absolute().name}"
    if script == "bloom13b" and preset == "bloom_13b":
        return script
    if script == "mixtral" and "config" not in settings:
        return f"mixtral_{settings.get('mixtral_model', '8x7b')}"
    if preset is None or "config" not in settings:
        return f"llama{settings.get('llama_version', '3.1')}_{settings.get('llama_size', '8')}b"
    return Path(preset).stem if preset.endswith((".yaml", ".yml")) else preset


def _device(settings: Mapping[str, Any], result: Translation, request: LaunchRequest) -> str:
    """Return the name of a device, auto, or `no-hpu`: the first of cuda and cpu that is there."""
    # HL_USE_HPU is Habana's; HL_DEVICE, which names other devices too, is ours
    device, use_hpu = settings.get("device"), settings.get("use_hpu")
    if result.unread & {"device", "use_hpu"}:
        request.unread.add("device")
    if "device" in result.unread:
        return "auto"
    if device is not None and use_hpu is not None and use_hpu != (device == HPU.name):
        request.faults.append(f"{given_text(result, 'use_hpu')} contradicts HL_DEVICE={device}; set one of them")
        request.unread.add("device")
    if device is not None:
        return str(device)
    return {None: "auto", True: HPU.name, False: "no-hpu"}[use_hpu]


def _launcher(settings: Mapping[str, Any], request: LaunchRequest) -> None:
    """Set what starts the agents."""
    kind = settings.get("launcher", LAUNCHERS[0])
    if kind in LAUNCHERS:
        request.launcher = kind
        return
    fault = f"HL_LAUNCHER_TYPE={kind} must be {one_of(LAUNCHERS)}"
    if kind == "torchrun":
        fault += "; for torchrun's way set HL_RENDEZVOUS=HOST:PORT and start this script on each node"
    request.faults.append(fault)


def _fine_tuning(given: Mapping[str, str], settings: Mapping[str, Any], script: Script, request: LaunchRequest) -> None:
    """Add the training data, and the model's flags, from its folder."""
    # data first, the model last: without a model nothing more can be said, but of the data it can
    model, data, folder = settings.get("model"), settings.get("data"), settings.get("folder")
    rows = "pairs of answers" if script == "dpo" else "chats"
    names = ("chat_template", "train_on", "too_long", "ignore_columns")
    of_rows = {name: settings[name] for name in names if name in settings}
    request.fine_tuning = FineTuning(model=model or "", data=data, folder=folder, **of_rows)
    _check_processed(given, request)
    if data is not None:
        _check_files(request.fine_tuning, rows, request)
    elif folder is None and not request.dry_run:
        request.faults.append(
            f"HL_DATA is not set; set it to a JSONL file of {rows}, or HL_DATA_OUTPUT_DIR to the folder of processed "
            "ones"
        )
    if model is None:
        request.faults.append(
            "HL_MODEL is not set; set it to the folder or the name on the hub of a model that transformers wrote"
        )
        request.unread |= {"config", "model"}
        return
    try:
        model = str(find_model(model, "HL_MODEL"))
        options = preset_of(Path(model))["model"]
    except (ConfigError, CheckpointError) as error:
        wrong = error.faults[0] if isinstance(error, ConfigError) else f"HL_MODEL={model} cannot be fine-tuned: {error}"
        request.faults.append(wrong)
        request.unread |= {"config", "model"}
        return
    request.fine_tuning = dataclasses.replace(request.fine_tuning, model=model)
    # the model's sizes come from its config.json; the preset has the recipe alone
    request.train_flags += flag_words({flag(name): value for name, value in options.items()})
    request.train_flags += ["--load", model, "--tokenizer-type", "HFTokenizer", "--tokenizer-model", model]


def _check_processed(given: Mapping[str, str], request: LaunchRequest) -> None:
    """Add a fault for each variable of rows beside data whose rows were read before."""
    if "HL_DATA_OUTPUT_DIR" not in given or "HL_DATA" in given:
        return
    for name in ("HL_TRAIN_ON", "HL_TOO_LONG", "HL_IGNORE_COLUMNS"):
        if name in given:
            request.faults.append(
                f"{name}={given[name]} has no effect on the data in HL_DATA_OUTPUT_DIR, which was processed before; "
                "leave it out, or set HL_DATA"
            )


def _check_files(given: FineTuning, rows: str, request: LaunchRequest) -> None:
    try:
        files = given.files
    except ValueError as why:
        request.faults.append(f"HL_DATA={given.data} {why}; put a name with spaces in quotes")
        request.fine_tuning = dataclasses.replace(given, data=None)
        request.unread.add("data_path")
        return
    for file in files:
        if not is_dataset(file) and not Path(file).is_file():
            which = "" if len(files) == 1 else f": {file}"
            request.faults.append(f"HL_DATA={given.data}{which} is not a file; set it to a JSONL file of {rows}")


def _data(settings: Mapping[str, Any], script: Script, preset: str | None, request: LaunchRequest) -> None:
    """Add the flags of the dataset and, where only its folder is given, of the tokenizer."""
    root, prefix = settings.get("data_root"), settings.get("data_prefix")
    if prefix is not None:
        request.train_flags += ["--data-path", str(Path(root or ".", prefix))]
    elif root is not None:
        request.faults.append(
            f"HL_DATA_DIR_ROOT={root} needs HL_DATA_FILE_PREFIX, the dataset's name in it without .bin; set it"
        )
        request.unread.add("data_path")
    if "tokenizer_type" not in request.unread:  # else the kind of the files would be a guess
        request.train_flags += flag_words(_tokenizer(settings, script, preset))


def _tokenizer(settings: Mapping[str, Any], script: Script, preset: str | None) -> dict[str, str]:
    """Return the flags of the tokenizer's files, where Habana's scripts look for them: in the folder of the data."""
    kind, folder = settings.get("--tokenizer-type"), Path(settings.get("data_root", "."))
    # the names are those of run_bloom13b.sh
    of_gpt2 = {"--vocab-file": str(folder / "gpt2-vocab.json"), "--merge-file": str(folder / "gpt2-merges.txt")}
    if kind == "GPT2BPETokenizer":
        return of_gpt2
    is_given = "--tokenizer-model" in settings or preset_holds(preset, "data", "tokenizer_model")
    if "data_root" not in settings or is_given or kind == "NullTokenizer":
        return {}
    of_huggingface = {"--tokenizer-model": str(folder / "tokenizer.json")}
    if kind in ("HFTokenizer", "HuggingFaceTokenizer"):
        return of_huggingface
    if kind is not None:
        return {"--tokenizer-model": str(folder / "tokenizer.model")}
    # no type is given: a file of the usual name shows it, else none is set, since few options of a training need one
    if script == "bloom13b" and all(Path(file).is_file() for file in of_gpt2.values()):
        return {"--tokenizer-type": "GPT2BPETokenizer", **of_gpt2}
    if script in ("llama", "mixtral") and (folder / "tokenizer.json").is_file():
        return {"--tokenizer-type": "HFTokenizer", **of_huggingface}
    return {}


def legend(faults: list[str], script: Script) -> str:
    """Return 'HL_TP sets tensor_model_parallel_size' for the options that faults name and a script has as variables."""
    # the message of a row names the flag, by which no user of a script would find the variable
    if any("--ignore-columns" in fault for fault in faults):
        return "HL_IGNORE_COLUMNS sets --ignore-columns"
    # a single word may be plain English, or the name of a section
    words = set(re.findall(r"\w+(?==)|\w+_\w+", " ".join(faults)))
    # the first of two variables of an option names it: reversed, it comes last
    variables = {option_of(row.flags[0]): row.name for row in reversed(variables_of(script)) if row.flags}
    named = []
    for option, variable in variables.items():
        if option in words and variable not in words:
            named.append(f"{variable} sets {option}")
    return "; ".join(named)
