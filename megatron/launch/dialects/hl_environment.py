"""Variables of the ranks that HL_* variables set: HL_ENV_FLAGS, and those of Gaudi's network, fp8 and lazy mode."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron.launch.dialects.hl_variables import FP8_FORMATS
from megatron.launch.plan import LaunchRequest
from megatron.options.dialect import Translation
from megatron.runtime.device_hpu import LAZY_MODE

NETWORK = {"HCCL_OVER_OFI": "1", "HCCL_GAUDI_DIRECT": "1", "FI_PROVIDER": "verbs"}
"""Variables of the ranks with HL_HNIC=1, and their values where HL_* does not set them."""
TRANSFORMER_ENGINE = {"PT_TE_ENFORCE_BF16_AMAX_REDUCTION": True, "PT_TE_LIMIT_GRAPH_SIZE": False}
"""The same with HL_FP8=1. Source: pretrain_llama.sh of HabanaAI/Megatron-LM 1.24."""
WITH_FP8 = {"fp8_format": FP8_FORMATS[0], **TRANSFORMER_ENGINE}
"""Settings that are read with HL_FP8=1 alone, and the values that count where HL_* does not set them."""
OWN = {"lazy": LAZY_MODE} | {name: name for name in (*NETWORK, *TRANSFORMER_ENGINE)}
"""Variables of the ranks that HL_* variables of their own set, by the names of these settings."""


def given_text(result: Translation, target: str) -> str:
    """Return the variable that sets a name, as it was given."""
    return next(given.text for given in result.given if target in given.settings)


def rank_environment(result: Translation, request: LaunchRequest) -> dict[str, str]:
    """Return the variables for the ranks: those of HL_ENV_FLAGS, and of Gaudi's communication through host cards."""
    settings = result.settings
    variables = _env_flags(settings.get("environment", ""), request)
    _check_contradictions(variables, result, request)
    if settings.get("hnic"):
        if request.nodes == 1 and "nodes" not in request.unread:
            request.faults.append("HL_HNIC=1 connects several nodes, but HL_NUM_NODES is 1; unset one of them")
        for name, default in NETWORK.items():
            variables.setdefault(name, settings.get(name, default))
    # a value of HL_HNIC that cannot be read may have been meant as 1
    elif "hnic" not in result.unread:
        for name in NETWORK:
            if name in settings:
                request.faults.append(f"HL_{name}={settings[name]} needs HL_HNIC=1; set that, or leave it out")
    return variables


def _env_flags(text: str, request: LaunchRequest) -> dict[str, str]:
    """Return the variables of HL_ENV_FLAGS."""
    variables = dict[str, str]()
    for word in text.split(","):
        name, equals, value = word.strip().partition("=")
        # between blanks, as other variables take their words, the second would be a part of the first one's value
        if equals and name.isidentifier() and not re.search(r"\s[A-Za-z_]\w*=", value):
            if variables.setdefault(name, value) != value:
                request.faults.append(f"HL_ENV_FLAGS={text}: {name} has two values; leave one out")
        elif word:
            request.faults.append(f"HL_ENV_FLAGS={text}: {word!r} is not NAME=VALUE; write NAME=VALUE,NAME=VALUE")
    return variables


def _check_contradictions(variables: Mapping[str, str], result: Translation, request: LaunchRequest) -> None:
    """Add a fault for each of HL_ENV_FLAGS' variables that a variable of its own sets differently."""
    for target, name in OWN.items():
        if target not in result.settings or name not in variables:
            continue
        if variables[name] != _as_text(result.settings[target]):
            request.faults.append(
                f"{given_text(result, target)} and {name}={variables[name]} in HL_ENV_FLAGS contradict each other; "
                "leave one out"
            )


def _as_text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def add_fp8(given: Mapping[str, str], result: Translation, request: LaunchRequest) -> None:
    """Add the flags that turn fp8 on, and the ranks' variables; none of either without HL_FP8=1."""
    if result.unread & {"fp8", "transformer_engine", "transformer_impl", *WITH_FP8}:
        return  # a default instead would bring faults of the device and the precision with it
    settings = result.settings
    # two names of one switch, of two releases of Habana's scripts
    switches = [settings[name] for name in ("fp8", "transformer_engine") if name in settings]
    if len(set(switches)) > 1:
        both = " and ".join(f"{name}={given[name]}" for name in ("HL_FP8", "HL_USE_TRANSFORMER_ENGINE"))
        request.faults.append(f"{both} contradict; set one")
        return
    if not any(switches):
        _note_without_fp8(result, request)
        return
    if settings.get("transformer_impl") == "local":
        request.faults.append("HL_TRANSFORMER_IMPL=local has no fp8; use transformer_engine, or unset HL_FP8")
        return
    request.train_flags += ["--fp8-format", settings.get("fp8_format", FP8_FORMATS[0])]
    variables = {name: _as_text(settings.get(name, default)) for name, default in TRANSFORMER_ENGINE.items()}
    # HL_ENV_FLAGS comes last: it names the ranks' variables themselves
    request.environment = variables | request.environment


def _note_without_fp8(result: Translation, request: LaunchRequest) -> None:
    """Note the variables of fp8 that no option stands for; a value that counts anyway may be spelled out."""
    for name, default in WITH_FP8.items():
        if result.settings.get(name, default) != default:
            request.notes.append(
                f"{given_text(result, name)} has no effect without HL_FP8=1; set that, or leave it out"
            )
