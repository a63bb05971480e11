"""Conditions of a launch script, `[ ... ]` and `[[ ... ]]`, as bash computes them."""

from __future__ import annotations

import fnmatch
import operator
import os
from collections.abc import Callable, Collection, Sequence

from megatron.launch.shell.syntax import ShellError
from megatron.launch.shell.values import MARK, ShellValues

NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
FILES: dict[str, Callable[[str], bool]] = {
    "-e": os.path.exists,
    "-f": os.path.isfile,
    "-d": os.path.isdir,
    "-s": lambda path: os.path.isfile(path) and os.path.getsize(path) > 0,
    "-r": lambda path: os.access(path, os.R_OK),
    "-x": lambda path: os.access(path, os.X_OK),
    "-w": lambda path: os.access(path, os.W_OK),
}


JOINTS: tuple[tuple[str, Callable[[Sequence[bool]], bool]], ...] = (("||", any), ("-o", any), ("&&", all), ("-a", all))
"""Words that join conditions, the weakest first."""


def condition(values: ShellValues, files: Collection[str], words: list[str], line: int, *, matches: bool) -> bool:
    """Return the result of a condition.

    `files`: those that the script has written; `matches`: == compares with a pattern, as in [[ ]]. Raises ShellError.
    """

    def inner(part: list[str]) -> bool:
        return condition(values, files, part, line, matches=matches)

    for joint, combine in JOINTS:
        at = _at_top(words, joint)
        # of three words or fewer the one in the middle compares
        if at is not None and len(words) > 3:
            return combine([inner(words[:at]), inner(words[at + 1 :])])
    if words[:1] == ["!"] and len(words) > 1:
        return not inner(words[1:])
    if words[:1] == ["("] and words[-1:] == [")"]:
        return inner(words[1:-1])
    # [ WORD ]: whether it is empty
    if len(words) <= 1:
        return bool("".join(words))
    if len(words) == 2:
        return _unary(values, files, (words[0], words[1]), line)
    if len(words) == 3:
        left, name, right = (values.known(word, line) for word in words)
        return _compared(values, (left, name, right), line, matches=matches)
    raise _not_read(values, words, line)


def _not_read(values: ShellValues, words: Sequence[str], line: int) -> ShellError:
    return ShellError(line, f"the condition {' '.join(map(values.readable, words))} is not read here")


def _at_top(words: Sequence[str], joint: str) -> int | None:
    """Return where a word stands outside brackets."""
    depth = 0
    for at, word in enumerate(words):
        depth += (word == "(") - (word == ")")
        if word == joint and depth == 0:
            return at
    return None


def _compared(values: ShellValues, words: tuple[str, str, str], line: int, *, matches: bool) -> bool:
    left, name, right = words
    if name in ("=", "==", "!="):
        is_equal = fnmatch.fnmatchcase(left, right) if matches else left == right
        return is_equal == (name != "!=")
    if name not in NUMBERS:
        raise _not_read(values, words, line)
    # [[ ]] computes with names, [ ] compares numbers
    if matches:
        return NUMBERS[name](values.arithmetic(left, line), values.arithmetic(right, line))
    try:
        return NUMBERS[name](int(left), int(right))
    except ValueError:
        # as in a shell: a message, and the condition does not hold
        return False


def _unary(values: ShellValues, files: Collection[str], words: tuple[str, str], line: int) -> bool:
    name, text = words
    if name in ("-z", "-n"):
        # a text is not empty if it has a part that is known
        if not MARK.sub("", text):
            values.known(text, line)
        return bool(text) == (name == "-n")
    if name == "-v":
        return text in values.variables
    if name not in FILES:
        raise _not_read(values, words, line)
    # reading the file system changes nothing
    path = values.known(text, line)
    return path in files or FILES[name](path)
