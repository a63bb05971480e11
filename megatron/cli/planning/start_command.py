"""Commands that start a layout that a search found: HL_* variables for a script of scripts/, and megatron-launch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.launch.dialects.hl_variables import LLAMA_PRESETS, MIXTRAL_PRESETS, Script, variables_of
from megatron.options.dialect import WrongValueError, flag_words
from megatron.options.flags import flag
from megatron.plan.search.found import Found
from megatron.settings.command_line import without_preset

SCRIPTS: Mapping[str, Script] = {
    "bloom_13b": "bloom13b",
    **{preset: "llama" for presets in LLAMA_PRESETS.values() for preset in presets.values()},
    **dict.fromkeys(MIXTRAL_PRESETS.values(), "mixtral"),
}
"""The script that trains a preset."""
TEXTS = ("0", "1", "2", "p2p", "a2a")
"""Values that variables have for what flags name otherwise."""


@dataclass(frozen=True)
class StartCommand:
    """A layout, and the flags of the run that was to be planned."""

    found: Found
    flags: Sequence[str]
    """Flags of megatron.train, the presets among them."""
    presets: Sequence[str]
    hostsfile: str | None = None

    @property
    def changed_flags(self) -> dict[str, Any]:
        """Flags of the options that differ from those of the run, with their values."""
        return {flag(name): "none" if value is None else value for name, value in self.found.changes}

    @property
    def sizes(self) -> tuple[int, int]:
        """Nodes, and devices of each."""
        cluster = self.found.cluster
        return len(cluster.node_sizes), cluster.node_sizes[0]

    def launch_words(self) -> list[str]:
        """Return the words of megatron-launch."""
        nodes, per_node = self.sizes
        words = ["megatron-launch", "--nodes", str(nodes), "--devices-per-node", str(per_node)]
        # the file's name is the user's to give
        if nodes > 1:
            words += ["--hostsfile", self.hostsfile or "HOSTSFILE"]
        return [*words, "--", *self.flags, *flag_words(_by_words(self.changed_flags))]

    def script_words(self) -> tuple[dict[str, str], list[str]] | None:
        """Return the HL_* variables and the words of the script that trains the preset; None: there is none."""
        script = SCRIPTS.get(self.presets[0]) if self.presets else None
        if script is None:
            return None
        nodes, per_node = self.sizes
        layout = self.found.layout
        # without the script's own defaults, which are Habana's: all that is not said is the preset's
        variables = {"HL_CONFIG": self.presets[0], "HL_NUM_NODES": str(nodes), "HL_DEVICES_PER_NODE": str(per_node)}
        if nodes > 1:
            variables["HL_HOSTSFILE"] = self.hostsfile or "HOSTSFILE"
        variables["HL_DP"] = str(layout.num_batch_ranks)
        # the scripts set these wherever they are not given
        settings = {flag(name): getattr(self.found.config.parallel, name) for name in IN_SCRIPTS}
        settings |= self.changed_flags
        words = []
        for name, value in settings.items():
            variable = _variable(script, name, value)
            if variable is None:
                words += flag_words(_by_words({name: value}))
            else:
                variables |= variable
        rest = without_preset(self.flags, self.presets[0])
        return variables, [f"scripts/run_{script}.sh", *rest, *words]


IN_SCRIPTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def _by_words(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as flags take them: an empty list of words is unset."""
    return {name: "none" if value == () else value for name, value in settings.items()}


def _variable(script: Script, name: str, value: Any) -> dict[str, str] | None:
    """Return the variable that sets this flag alone to this value; None: there is none."""
    wanted = _text(value)
    for row in variables_of(script):
        if name not in row.targets or row.outcome != "sets":
            continue
        # by the table's own conversion, tried on the few values that it can have
        for text in (wanted, *TEXTS):
            try:
                settings = dict(row.convert(text))
            except (WrongValueError, ValueError):
                continue
            # a variable that sets more than this flag would change what is not meant
            if {flag: _text(each) for flag, each in settings.items()} == {name: wanted}:
                return {row.name: text}
    return None


def _text(value: Any) -> str:
    return " ".join(flag_words({"--": value})[1:])


def command_lines(words: Sequence[str], variables: Mapping[str, str] | None = None) -> list[str]:
    """Return a command ready to paste: lines of at most 96 columns, continued by backslashes."""
    assigned = [f"{name}={shlex.quote(value)}" for name, value in (variables or {}).items()]
    pieces: list[str] = assigned
    for word in words:
        # a flag stays beside its values
        if pieces and not word.startswith("--") and pieces[-1].startswith("--") and pieces[-1] != "--":
            pieces[-1] += f" {shlex.quote(word)}"
        else:
            pieces.append(shlex.quote(word))
    lines = [""]
    for piece in pieces:
        if lines[-1] and len(lines[-1]) + 1 + len(piece) > WIDTH:
            lines.append("    ")
        lines[-1] = f"{lines[-1]} {piece}" if lines[-1].strip() else lines[-1] + piece
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


WIDTH = 94
"""Columns of a line, without its backslash and its indent."""
