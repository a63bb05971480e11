"""A command of Megatron's pretrain_gpt.py as a request of this project, by the table of megatron_flags.py.

Every flag is translated, has no effect here, or is refused; each of the last two with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.launch.dialects.megatron_deepspeed import join_deepspeed
from megatron.launch.dialects.megatron_flags import Value, dialect
from megatron.launch.dialects.megatron_joins import (
    FlagRow,
    Reading,
    add_defaults,
    join_experts,
    join_fp8,
    join_lengths,
    join_model,
    join_muon,
    join_pipeline,
    join_positions,
    join_vocabulary,
    option_words,
)
from megatron.launch.dialects.megatron_starters import Started
from megatron.launch.plan import LaunchRequest
from megatron.options.dialect import flag_words
from megatron.options.flags import dashed, flag
from megatron.settings.command_line import CommandLine, read_command_line


@dataclass
class TranslatedCommand:
    """A command in our words."""

    flags: list[str] = field(default_factory=list)
    """Flags of megatron.train, without the device."""
    rows: list[FlagRow] = field(default_factory=list)
    started: Started = field(default_factory=Started)
    device: str | None = None
    samples_per_rank: int | None = None
    """Samples in a step of a data-parallel rank, where the command leaves the global batch out."""
    command: CommandLine | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def refused(self) -> list[FlagRow]:
        return [row for row in self.rows if row.outcome == "refused"]

    @property
    def idle(self) -> list[FlagRow]:
        return [row for row in self.rows if row.outcome == "no effect"]

    def preset(self) -> dict[str, dict[str, Any]]:
        """Return the options that the command gives, by section."""
        assert self.command is not None
        tree, given = self.command.config.to_dict(), set(self.command.given)
        chosen = {section: {name: value for name, value in tree[section].items() if name in given} for section in tree}
        return {section: values for section, values in chosen.items() if values}

    def request(self, train_flags: Sequence[str]) -> LaunchRequest:
        """Return the request to launch these flags of training as the command does."""
        started = self.started
        request = LaunchRequest(train_flags=list(train_flags), samples_per_rank=self.samples_per_rank)
        request.nodes, request.devices_per_node = started.nodes or 1, started.devices_per_node
        request.hostsfile, request.master_port = started.hostsfile, started.master_port
        # mpirun and srun give the ranks of all nodes together
        if started.ranks is not None:
            request.devices_per_node = started.ranks // request.nodes
        request.environment = dict(started.variables)
        if request.nodes > 1 and started.hostsfile is None and started.master is not None:
            # torchrun runs on each node, and so does this launcher
            request.rendezvous, request.master_port = f"{started.master}:{started.master_port or 29500}", None
        if self.device is not None:
            request.device = self.device
        return request


def translate(started: Started, further: Sequence[str] = ()) -> TranslatedCommand:
    """Return a training command of Megatron's in our words; what cannot be is in its rows.

    `further`: flags of megatron.train, which override those of the command.
    """
    reading = Reading(behind={word.partition("=")[0] for word in dashed(further) if word.startswith("--")})
    reading.rows += [FlagRow(given, "no effect", reason) for given, reason in started.idle]
    reading.rows += [FlagRow(given, "refused", reason) for given, reason in started.faults]
    is_deepspeed = _read_flags(started.words, reading)
    device = reading.take("device")
    join_model(reading)
    join_positions(reading)
    join_experts(reading, is_deepspeed=is_deepspeed)
    join_vocabulary(reading)
    join_pipeline(reading)
    join_fp8(reading)
    join_muon(reading)
    join_deepspeed(reading, started.files)
    samples = join_lengths(reading)
    add_defaults(reading)
    flags = flag_words({name: option_words(name, value) for name, value in reading.settings.items()})
    # behind the others: of a flag that is given twice the last one counts
    flags += further
    command = read_command_line(flags)
    result = TranslatedCommand(flags, reading.rows, started, device, samples, command, reading.notes)
    for fault in command.faults:
        reading.refuse(_culprit(fault, reading), fault)
    return result


def _culprit(fault: str, reading: Reading) -> str:
    """Return the flag of theirs that a fault of our parser is about."""
    named = re.match(r"(?:\w+\.)?(\w+)=|(--[\w-]+)", fault)
    target = named and (named[2] or flag(named[1]))
    return reading.given(target or "") or "the command"


# ---------------------------------------------------------------------------------------------------------------------
# Flag by flag.


def grouped(words: Sequence[str]) -> Iterator[tuple[str, Value]]:
    """Yield each flag with its words: one text, or a list of several; "true" where there is none."""
    position = 0
    while position < len(words):
        name, equals, joined = words[position].partition("=")
        position += 1
        # --flag=value, and what follows it
        values = [joined] if equals else []
        # a negative number is a value
        while position < len(words) and not re.match(r"--?[A-Za-z]", words[position]):
            values.append(words[position])
            position += 1
        if not name.startswith("-"):
            values = [name, *values]
            name = ""
        yield name, values[0] if len(values) == 1 else values or "true"


def _read_flags(words: Sequence[str], reading: Reading) -> bool:
    """Read each flag by its row; return whether the command is one of Megatron-DeepSpeed's."""
    names = set()
    for theirs, value in grouped(words):
        text = " ".join(filter(None, (theirs, *_shown(value))))
        if not theirs:
            reading.refuse(text, "it does not follow a flag")
            continue
        # Megatron has both spellings
        name = "--" + theirs.lstrip("-").replace("_", "-")
        names.add(name)
        # a value that is missing: only a switch stands alone
        if value == "true" and theirs == text and _needs_value(name):
            reading.refuse(text, "it needs a value")
            continue
        # one by one, so that each has a row of its own
        found = dialect().translate([(name, value)])
        reading.settings |= found.settings
        reading.sources |= dict.fromkeys(found.settings, text)
        if found.faults:
            reading.refuse(text, found.faults[0].removeprefix(f"{name}={value!r} "))
        elif found.notes:
            reading.leave(text, found.notes[0])
        elif found.settings:
            ours = " ".join(flag_words({key: option_words(key, each) for key, each in found.settings.items()}))
            reading.rows.append(FlagRow(text, "translated", ours or "with others"))
        else:
            reading.leave(text, _reason(name))
    return "--deepspeed" in names


def _shown(value: Value) -> list[str]:
    if value == "true":
        return []
    return [value] if isinstance(value, str) else value


def _needs_value(name: str) -> bool:
    row = dialect().row(name)
    if row is None or row.outcome != "sets" or row.takes == "switch":
        return False
    return name not in SWITCHES_OR_VALUES


SWITCHES_OR_VALUES = ("--profile", "--use-fused-sdpa", "--use-fused-sdpa-with-recompute")
"""Switches of Megatron-LM, or of one of the forks, that have a value in another."""


def _reason(name: str) -> str:
    row = dialect().row(name)
    return (row.reason if row else "") or "it requests nothing"
