"""The --help of the scripts: their HL_* variables, and the flags of megatron.train."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.launch.dialects.hl_variables import REFUSED, VARIABLES, Script, variables_of
from megatron.options.config import ConfigError
from megatron.options.dialect import Entry
from megatron.runtime.commands import folded
from megatron.settings.parser import help_text, sections_text

PURPOSE: dict[Script, str] = {
    "bloom13b": "Train BLOOM-13B in tensor, pipeline and data parallel.",
    "llama": "Train Llama 1, 2, 3.1 or 3.2 in tensor, pipeline and data parallel.",
    "mixtral": "Train a Mixtral in expert, tensor, pipeline and data parallel.",
    "sft": "Fine-tune a Hugging Face model on chats: tokenize them, train, and export Hugging Face folders.",
    "dpo": "Train a Hugging Face model on preferences (DPO): tokenize pairs, train adapters, and export them.",
}
# the variables that most runs set
FIRST = (
    "HL_LLAMA_VER HL_LLAMA_MODEL_SIZE HL_MIXTRAL_MODEL HL_MODEL HL_DATA HL_BETA HL_DATA_DIR_ROOT HL_DATA_FILE_PREFIX "
    "HL_DEVICE HL_NUM_NODES HL_HOSTSFILE HL_DP HL_TP HL_CP HL_PP HL_MOE_EP HL_GBS HL_MICRO_BATCH HL_SEQ_LEN "
    "HL_TRAIN_ITERS HL_NUM_EPOCHS HL_RESULTS_DIR HL_SAVE_INTERVAL HL_DRY_RUN"
).split()


def script_help(script: Script, topic: str) -> str:
    """Return the help of a script on a topic: `variables`, one of them, a topic of the flags, or "" for an overview.

    Raises ConfigError for any other.
    """
    taken = variables_of(script)
    if not topic:
        return _overview(script, taken)
    if topic == "variables":
        return f"Variables of run_{script}.sh (defaults: docs/reference/variables.md)\n" + variable_lines(taken)
    if not topic.startswith("HL_"):
        return help_text(topic)
    named = [row for row in taken if row.name == topic]
    refused = next((row for row in REFUSED if row.covers(topic)), None)
    # HL_MOE_* covers variables of other scripts too
    if not named and refused is not None and topic not in {row.name for row in VARIABLES}:
        accepted = f" Accepted: {', '.join(refused.accepts)}." if refused.accepts else ""
        return f"{topic}: {refused.text}.{accepted}\n"
    if not named:
        raise ConfigError([f"run_{script}.sh has no variable {topic}; --help variables lists those it has"])
    return variable_lines(named) + "".join(f"  flag: {flag}\n" for flag in named[0].flags)


def _overview(script: Script, taken: Sequence[Entry]) -> str:
    # in the order of FIRST, not that of the table
    rows = {row.name: row for row in taken}
    first = [rows[name] for name in FIRST if name in rows]
    return "\n".join(
        [
            f"usage: [HL_NAME=VALUE ...] scripts/run_{script}.sh [--flag VALUE ...]\n",
            PURPOSE[script],
            "Flags override variables. HL_DRY_RUN=1 prints the plan and the command that launches it.\n",
            "variables that most runs set:",
            variable_lines(first),
            f"  --help variables   all {len(taken)} variables of this script",
            "  --help HL_NAME     explain one variable",
            "  --help SECTION     list the flags of a section; --help FLAG explains one, --help all lists all\n",
            "sections of the flags:",
            *sections_text(),
            "",
        ]
    )


def variable_lines(variables: Sequence[Entry]) -> str:
    """Return a line for each variable, or more in 100 columns."""
    width = max(len(variable.name) for variable in variables) + 4
    return "".join(
        folded(f"  {variable.name}".ljust(width) + variable.text, 100, further=" " * width) + "\n"
        for variable in variables
    )
