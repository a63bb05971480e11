"""The commands that a launch script would run, by its variables and conditions. No command is run."""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.launch.shell.conditions import condition
from megatron.launch.shell.syntax import (
    DECLARING,
    Compound,
    Node,
    ShellError,
    Simple,
    assigns_or_names,
    parse,
)
from megatron.launch.shell.values import ShellValues

MOST_STEPS = 100_000
SHELLS = ("bash", "sh")
Status = bool | None
"""Success of a command; None if only running it would show that."""


@dataclass(frozen=True)
class ShellCommand:
    """A command that the script would run."""

    words: tuple[str, ...]
    line: int


class _Exit(Exception):
    """The script ends."""


@dataclass
class ShellScript:
    """State of a script that is gone through, and the commands in it."""

    values: ShellValues
    commands: list[ShellCommand] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """Here-documents by the file that they are written to."""
    not_read: list[str] = field(default_factory=list)
    """Files that the script sources."""
    exported: set[str] = field(default_factory=set)
    functions: dict[str, list[Node]] = field(default_factory=dict)
    steps: int = 0

    def run(self, nodes: Iterable[Node]) -> Status:
        """Go through commands; return the status of the last one."""
        status: Status = True
        for node in nodes:
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise ShellError(node.line, "the script does not come to an end")
            # a loop over calls of functions may grow without bound
            status = self._simple(node) if isinstance(node, Simple) else COMPOUNDS[node.kind](self, node)
        return status

    def define(self, node: Compound) -> Status:
        self.functions[node.name] = node.then
        return True

    def group(self, node: Compound) -> Status:
        return self.run(node.then)

    def pipe(self, node: Compound) -> Status:
        self.run(node.first)
        return None

    def negated(self, node: Compound) -> Status:
        status = self.run(node.first)
        return None if status is None else not status

    def joined(self, node: Compound) -> Status:
        # a command is taken to succeed: `cd DIR && python TRAIN`, `mkdir DIR || exit 1`
        status = self.run(node.first)
        succeeds = status is not False
        if succeeds == (node.kind == "and"):
            return self.run(node.then)
        return status

    def for_each(self, node: Compound) -> Status:
        for value in self.values.all_fields(node.words, node.line):
            self.values.variables[node.name] = value
            self.run(node.then)
        return True

    def case(self, node: Compound) -> Status:
        values, line = self.values, node.line
        text = values.known(values.text(node.words[0], line), line)
        for patterns, body in node.cases:
            if any(fnmatch.fnmatchcase(text, values.text(pattern, line)) for pattern in patterns):
                return self.run(body)
        return True

    def if_(self, node: Compound) -> Status:
        status = self.run(node.first)
        if status is None:
            return self.undecided(node)
        return self.run(node.then if status else node.otherwise)

    def undecided(self, node: Compound) -> Status:
        """Pass over what depends on a command's result, if it does not matter. Raises ShellError."""
        if assigns_or_names([*node.then, *node.otherwise], ".py"):
            raise ShellError(
                node.line, "what follows depends on the result of a command, which is not run; give the values instead"
            )
        return None

    def _simple(self, node: Simple) -> Status:
        values, line = self.values, node.line
        words = values.all_fields(node.words, line)
        # a JSON for DeepSpeed, most often
        if node.document is not None and node.written_to is not None:
            self.files[values.text(node.written_to, line)] = values.text(node.document, line)
        if words and words[0] not in DECLARING:
            return self._command(node, words)
        for assignment in node.assignments:
            values.assign(assignment, line)
        if words[:1] == ["export"]:
            self.exported |= {*words[1:], *(assignment.name for assignment in node.assignments)}
        return True

    def _command(self, node: Simple, words: list[str]) -> Status:
        name, arguments = words[0], words[1:]
        # a function hides a command of its name
        if name in self.functions:
            return self._call(name, arguments)
        if name in BUILTINS:
            return BUILTINS[name](self, arguments, node.line)
        inner = _shell_text(words)
        if inner is not None:
            return self._run_inner(words, inner, node.line)
        # NAME=VALUE COMMAND: of this command alone
        given = [each for each in node.assignments if each.elements is None]
        variables = [f"{each.name}={self.values.text(each.value, node.line)}" for each in given]
        self.commands.append(ShellCommand((*variables, *words), node.line))
        return None

    def _run_inner(self, words: list[str], inner: int, line: int) -> Status:
        """Go through the text that a shell reads. What starts that shell stays in front of each command in it."""
        before = len(self.commands)
        # unknown values keep their marks: their words become parts of the commands
        status = self.run(parse(words[inner], line))
        # it may say the number of ranks
        starter = tuple(words[: inner - 2])
        self.commands[before:] = [ShellCommand((*starter, *each.words), line) for each in self.commands[before:]]
        return None if starter else status

    def _call(self, name: str, arguments: list[str]) -> Status:
        before, self.values.arguments = self.values.arguments, arguments
        try:
            return self.run(self.functions[name])
        finally:
            self.values.arguments = before

    def output(self, text: str, line: int) -> str | None:
        """Return the output of a command of OUTPUTS; None for any other."""
        inner = ShellScript(
            ShellValues(dict(self.values.variables), self.values.arguments, self.values.name, _no_output)
        )
        try:
            inner.run(parse(text, line))
        except (ShellError, _Exit):
            return None
        # only what depends on nothing but its words
        *before, last = inner.commands or [ShellCommand(("",), line)]
        changes = [each.words for each in before]
        # cd DIR && pwd
        folders = [words[1] for words in changes if words[0] == "cd" and len(words) == 2]
        is_harmless = last.words[0] in OUTPUTS and len(folders) == len(changes) <= 1 and "|" not in text
        if not is_harmless or not all(map(inner.values.is_known, [*last.words, *folders])):
            return None
        return OUTPUTS[last.words[0]](list(last.words[1:]), folders[0] if folders else ".")


def _no_output(text: str, line: int) -> str | None:
    return None


def read_script(text: str, arguments: Sequence[str], environment: Mapping[str, str], name: str) -> ShellScript:
    """Return the commands of a script, and the values in it. Raises ShellError."""
    script = ShellScript(ShellValues(dict(environment), list(arguments), name, _no_output))
    # the two need each other
    script.values.output = script.output
    try:
        script.run(parse(text))
    except _Exit:
        pass
    except RecursionError:
        raise ShellError(1, "the script is nested too deeply, or does not come to an end") from None
    return script


def _shell_text(words: Sequence[str]) -> int | None:
    """Return the number of the word that a shell reads: bash -c TEXT, also behind deepspeed or srun."""
    for number in range(len(words) - 2):
        if os.path.basename(words[number]) in SHELLS and words[number + 1] == "-c":
            return number + 2
    return None


COMPOUNDS: dict[str, Callable[[ShellScript, Compound], Status]] = {
    "function": ShellScript.define,
    "group": ShellScript.group,
    "pipe": ShellScript.pipe,
    "for": ShellScript.for_each,
    "case": ShellScript.case,
    "loop": ShellScript.undecided,
    "not": ShellScript.negated,
    "and": ShellScript.joined,
    "or": ShellScript.joined,
    "if": ShellScript.if_,
}

# ---------------------------------------------------------------------------------------------------------------------
# Commands of the shell itself, which only change its state, and outputs of harmless ones.


def _exit(script: ShellScript, words: list[str], line: int) -> Status:
    raise _Exit


def _shift(script: ShellScript, words: list[str], line: int) -> Status:
    count = int(words[0]) if words and words[0].isdecimal() else 1
    del script.values.arguments[:count]
    return True


def _eval(script: ShellScript, words: list[str], line: int) -> Status:
    # unknown values keep their marks: their words become parts of the command
    return script.run(parse(" ".join(words), line))


def _exec(script: ShellScript, words: list[str], line: int) -> Status:
    script.commands.append(ShellCommand(tuple(words), line))
    # `exec > log` alone goes on
    if words:
        raise _Exit
    return True


def _source(script: ShellScript, words: list[str], line: int) -> Status:
    script.not_read += words[:1]
    return None


def _unset(script: ShellScript, words: list[str], line: int) -> Status:
    for name in words:
        script.values.variables.pop(name, None)
    return True


def _bracket(script: ShellScript, words: list[str], line: int) -> Status:
    # without the closing bracket a shell prints a message, and the condition does not hold
    return words[-1:] == ["]"] and condition(script.values, script.files, words[:-1], line, matches=False)


def _double_bracket(script: ShellScript, words: list[str], line: int) -> Status:
    return condition(script.values, script.files, words[:-1], line, matches=True)


BUILTINS: dict[str, Callable[[ShellScript, list[str], int], Status]] = {
    "[": _bracket,
    "[[": _double_bracket,
    "test": lambda script, words, line: condition(script.values, script.files, words, line, matches=False),
    "((": lambda script, words, line: script.values.arithmetic(" ".join(words), line) != 0,
    "true": lambda script, words, line: True,
    ":": lambda script, words, line: True,
    "false": lambda script, words, line: False,
    "exit": _exit,
    "return": _exit,
    "exec": _exec,
    "eval": _eval,
    "shift": _shift,
    "source": _source,
    ".": _source,
    "unset": _unset,
}


def _date(words: list[str], folder: str) -> str:
    form = next((word[1:] for word in words if word.startswith("+")), "%c")
    return time.strftime(form)


OUTPUTS: dict[str, Callable[[list[str], str], str]] = {
    "date": _date,
    "pwd": lambda words, folder: os.path.abspath(folder),
    "dirname": lambda words, folder: os.path.dirname(words[-1]) or ".",
    "basename": lambda words, folder: os.path.basename(words[0]).removesuffix(words[1] if words[1:] else ""),
    "echo": lambda words, folder: " ".join(words),
    "realpath": lambda words, folder: os.path.realpath(words[-1]),
}
