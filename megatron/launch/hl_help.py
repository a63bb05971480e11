"""The --help of the scripts: their HL_* variables, and the flags of megatron.train."""

from __future__ import annotations

import textwrap

from megatron.config.options import ConfigError
from megatron.config.parser import help_text, sections_text
from megatron.launch.hl_refused import REFUSED, covers
from megatron.launch.hl_variables import VARIABLES, Script, Variable

PURPOSE: dict[Script, str] = {
    "bloom13b": "Train BLOOM-13B in tensor, pipeline and data parallel.",
    "llama": "Train Llama 1, 2, 3.1 or 3.2 in tensor, pipeline and data parallel.",
    "sft": "Fine-tune a Hugging Face model on chats: tokenize them, train, and export Hugging Face folders.",
    "dpo": "Train a Hugging Face model on preferences (DPO): tokenize pairs, train adapters, and export them.",
}
# the variables that most runs set
FIRST = (
    *(
        "HL_LLAMA_VER",
        "HL_LLAMA_MODEL_SIZE",
        "HL_MODEL",
        "HL_DATA",
        "HL_BETA",
        "HL_DATA_DIR_ROOT",
        "HL_DATA_FILE_PREFIX",
    ),
    *("HL_DEVICE", "HL_NUM_NODES", "HL_HOSTSFILE", "HL_DP", "HL_TP", "HL_PP", "HL_GBS", "HL_MICRO_BATCH"),
    *("HL_SEQ_LEN", "HL_TRAIN_ITERS", "HL_NUM_EPOCHS", "HL_RESULTS_DIR", "HL_SAVE_INTERVAL", "HL_DRY_RUN"),
)


def script_help(script: Script, topic: str) -> str:
    """Return the help of a script on a topic: `variables`, one of them, a topic of the flags, or "" for an overview.

    Raises ConfigError for any other.
    """
    taken = [variable for variable in VARIABLES if script in variable.scripts]
    if not topic:
        return _overview(script, taken)
    if topic == "variables":
        return f"Variables of run_{script}.sh (defaults: docs/guides/launching.md)\n" + _lines(taken)
    if topic.startswith("HL_"):
        found = [variable for variable in taken if variable.name == topic]
        refused = next((entry for entry in REFUSED if covers(entry, topic)), None)
        if refused is not None:
            accepted = f" Accepted: {', '.join(refused.off)}." if refused.off else ""
            return f"{topic}: {refused.reason}.{accepted}\n"
        if not found:
            raise ConfigError([f"run_{script}.sh has no variable {topic}; --help variables lists those it has"])
        flags = "".join(f"  flag: {flag}\n" for flag in found[0].flags)
        return _lines(found) + flags
    return help_text(topic)


def _overview(script: Script, taken: list[Variable]) -> str:
    first = [variable for name in FIRST for variable in taken if variable.name == name]
    return "\n".join(
        [
            f"usage: [HL_NAME=VALUE ...] scripts/run_{script}.sh [--flag VALUE ...]\n",
            PURPOSE[script],
            "Flags override variables. HL_DRY_RUN=1 prints the plan and the command that launches it.\n",
            "variables that most runs set:",
            _lines(first),
            f"  --help variables   all {len(taken)} variables of this script",
            "  --help HL_NAME     explain one variable",
            "  --help SECTION     list the flags of a section; --help FLAG explains one, --help all lists all\n",
            "sections of the flags:",
            *sections_text(),
            "",
        ]
    )


def _lines(variables: list[Variable]) -> str:
    width = max(len(variable.name) for variable in variables) + 4
    return "".join(
        textwrap.fill(f"  {variable.name}".ljust(width) + variable.meaning, 100, subsequent_indent=" " * width) + "\n"
        for variable in variables
    )
