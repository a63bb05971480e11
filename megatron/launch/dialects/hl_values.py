"""Values of HL_* variables."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TypeVar

Choice = TypeVar("Choice", bound=str)


class WrongValueError(ValueError):
    """A variable's value cannot be used; the message says which can."""


def whole_number(text: str, at_least: int = 0) -> int:
    """Convert a variable's text. Raises WrongValueError."""
    try:
        number = int(text)
    except ValueError:
        number = at_least - 1
    if number < at_least:
        raise WrongValueError(f"must be a whole number, {at_least} or more")
    return number


def is_on(text: str) -> bool:
    """Convert a switch. Raises WrongValueError."""
    if text.lower() not in ("0", "1", "false", "true"):
        raise WrongValueError("must be 0 or 1")
    return text.lower() in ("1", "true")


def chosen(text: str, choices: tuple[Choice, ...]) -> Choice:
    """Return the choice that a text is. Raises WrongValueError."""
    for choice in choices:
        if text == choice:
            return choice
    raise WrongValueError(f"must be {one_of(choices)}")


def words(text: str) -> tuple[str, ...]:
    """Return names between spaces or commas, those with spaces in quotes. Raises WrongValueError."""
    try:
        return tuple(shlex.split(text.replace(",", " ")))
    except ValueError as error:
        raise WrongValueError(f"cannot be read ({error}); put a name with spaces in quotes") from None


def one_of(values: Mapping[str, object] | tuple[str, ...]) -> str:
    *most, last = values
    return f"{', '.join(most)} or {last}" if most else last


# ---------------------------------------------------------------------------------------------------------------------
# fp8 by the HL_* variables of Habana's scripts: which of them turn it on, and what the ranks are given.
#
# Source: examples/llama/pretrain_llama.sh of HabanaAI/Megatron-LM 1.24; run_llama.sh of HabanaAI/Megatron-DeepSpeed
# for the earlier names.

SWITCHES = ("HL_FP8", "HL_USE_TRANSFORMER_ENGINE")
FORMATS = ("hybrid", "e5m2")
ENVIRONMENT = {
    "HL_FP8_ENFORCE_BF16_AMAX_REDUCTION": ("PT_TE_ENFORCE_BF16_AMAX_REDUCTION", "1"),
    "HL_TE_LIMIT_GRAPH_SIZE": ("PT_TE_LIMIT_GRAPH_SIZE", "0"),
}
"""The transformer engine's own variables, and their values where ours are unset."""


def coverage(text: str) -> list[str]:
    """Translate HL_FP8_COVERAGE, `mlp_row_parallel=True attention=False`. Raises WrongValueError."""
    parts = dict(word.partition("=")[::2] for word in text.split())
    if not parts or set(parts) - {"mlp_row_parallel", "attention"}:
        raise WrongValueError('must be such as "mlp_row_parallel=True attention=False"')
    if is_on(parts.get("attention", "0")):
        raise WrongValueError("is not supported: the attention itself stays in bf16; set attention=False")
    return ["--fp8-mlp-row-parallel", str(is_on(parts.get("mlp_row_parallel", "1"))).lower()]


def fp8_request(given: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the flags that turn fp8 on, and the ranks' variables; none of either without HL_FP8=1.

    Raises WrongValueError: the message names the variable.
    """
    switches = {name: _switch(given, name, "0") for name in SWITCHES if name in given}
    if len(set(switches.values())) > 1:
        raise WrongValueError(f"{' and '.join(f'{name}={given[name]}' for name in switches)} contradict; set one")
    if not any(switches.values()):
        return [], {}
    if given.get("HL_TRANSFORMER_IMPL") == "local":
        raise WrongValueError("HL_TRANSFORMER_IMPL=local has no fp8; use transformer_engine, or unset HL_FP8")
    chosen = given.get("HL_FP8_FORMAT", FORMATS[0])
    if chosen not in FORMATS:
        raise WrongValueError(f"HL_FP8_FORMAT={chosen!r} must be {one_of(FORMATS)}")
    environment = {theirs: str(int(_switch(given, name, default))) for name, (theirs, default) in ENVIRONMENT.items()}
    return ["--fp8-format", chosen], environment


def _switch(given: Mapping[str, str], name: str, default: str) -> bool:
    try:
        return is_on(given.get(name, default))
    except WrongValueError as why:
        raise WrongValueError(f"{name}={given[name]!r} {why}") from None
