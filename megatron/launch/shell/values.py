"""The values of words in a launch script: variables, arrays and arithmetic as bash computes them.

What only a command could give, such as $(hostname), stays unknown: it is named where a flag needs it.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.launch.shell.syntax import Assignment, ShellError, Word, WordPart, plain_word, quoted_word

MARK = re.compile("\ue000(\\d+)\ue001")
"""An unknown value within a text, by its number."""
PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*#?$!])(\[[^]]*\])?(.*)", re.DOTALL)


@dataclass
class ShellValues:
    """Variables of a script, and what words become by them."""

    variables: dict[str, str | list[str]]
    arguments: list[str]
    name: str
    output: Callable[[str, int], str | None]
    """Returns what a command in a line prints; None if only running it would show that."""
    unset: set[str] = field(default_factory=set)
    """Variables that are used without a value."""
    unknown: list[str] = field(default_factory=list)
    """Texts of what only a command could give."""

    def readable(self, text: str) -> str:
        """Return a text with what is unknown written as in the script."""
        return MARK.sub(lambda found: self.unknown[int(found[1])], text)

    def is_known(self, text: str) -> bool:
        return MARK.search(text) is None

    def known(self, text: str, line: int) -> str:
        """Return a text. Raises ShellError where it is unknown."""
        if not self.is_known(text):
            given = self.readable(text)
            raise ShellError(line, f"{given} is known only when it runs, which it does not here; write it")
        return text

    def assign(self, assignment: Assignment, line: int) -> None:
        old = self.variables.get(assignment.name, "")
        if assignment.elements is not None:
            values = self.all_fields(assignment.elements, line)
            # a variable that is none yet becomes an empty array
            earlier = [old] if isinstance(old, str) and old else list(old)
            self.variables[assignment.name] = [*earlier, *values] if assignment.adds else values
            return
        text = self.text(assignment.value, line)
        if not assignment.adds:
            self.variables[assignment.name] = text
        elif isinstance(old, list):
            # of an array the first element
            self.variables[assignment.name] = ["".join(old[:1]) + text, *old[1:]]
        else:
            self.variables[assignment.name] = old + text

    def text(self, word: Word, line: int) -> str:
        """Return a word as one text, as in an assignment."""
        text = "".join(" ".join(self._values(part, line)) for part in word)
        is_plain = bool(word) and word[0].kind == "text" and not word[0].is_quoted
        if is_plain and re.match(r"~(/|$)", text):
            text = str(self.variables.get("HOME", "~")) + text[1:]
        return text

    def all_fields(self, words: tuple[Word, ...] | list[Word], line: int) -> list[str]:
        return [text for word in words for text in self.fields(word, line)]

    def fields(self, word: Word, line: int) -> list[str]:
        """Return the words that a word becomes on a command line: values outside quotation marks are split."""
        # nothing to split, and by far the most words
        if len(word) == 1 and word[0].kind == "text":
            return [self.text(word, line)]
        fields = _Fields()
        for part in word:
            values = self._values(part, line)
            if part.is_quoted or part.kind == "text":
                fields.add(values)
            else:
                fields.split(" ".join(values))
        return fields.ended()

    def _values(self, part: WordPart, line: int) -> list[str]:
        """Return the values of a part: several for the elements of an array, none for an empty one."""
        if part.kind == "text":
            return [part.text]
        if part.kind == "arithmetic":
            return [str(self.arithmetic(part.text, line))]
        if part.kind == "command":
            # a mark takes the place of what is not known
            output = self.output(part.text, line)
            return [self._unknown(f"$({part.text})") if output is None else output]
        return self._parameter(part, line)

    def _parameter(self, part: WordPart, line: int) -> list[str]:
        match = PARAMETER.fullmatch(part.text)
        if match is None:
            raise ShellError(line, f"${{{part.text}}} is not read here")
        length, name, index, change = match.groups()
        values = self._value(name, index, line)
        is_list = name == "@" or index == "[@]"
        if length:
            return [_length(values or [], is_list=is_list or index == "[*]")]
        # one word of all elements
        if name == "*" or index == "[*]":
            values = [" ".join(values)] if values else values
        if change:
            return self._changed(name, values, change, line, is_quoted=part.is_quoted)
        if values is None:
            self.unset.add(name)
        # an empty value is a word between quotation marks, an empty list never
        return values or ([] if is_list else [""])

    def _value(self, name: str, index: str | None, line: int) -> list[str] | None:
        """Return the values of a parameter, None if it is not set."""
        if name in ("@", "*"):
            return list(self.arguments)
        if name == "#":
            return [str(len(self.arguments))]
        # of processes, which there are none of
        if name in ("?", "$", "!"):
            return [self._unknown(f"${name}")]
        if name.isdigit():
            values = [self.name, *self.arguments]
            return values[int(name) : int(name) + 1] or None
        value = self.variables.get(name)
        if value is None:
            return None
        # a plain variable is an array of one
        if isinstance(value, str):
            return [value] if index in (None, "[@]", "[*]", "[0]") else None
        if index in ("[@]", "[*]"):
            return list(value)
        # $NAME of an array is its first element
        number = self.arithmetic(index[1:-1], line) if index else 0
        return [value[number]] if -len(value) <= number < len(value) else None

    def _changed(self, name: str, values: list[str] | None, change: str, line: int, *, is_quoted: bool) -> list[str]:
        """Return the values of ${NAME CHANGE}."""
        match = re.match(r":?([-=+?])", change)
        if match:
            # with a colon an empty value counts as none
            is_set = bool("".join(values or [])) if change[0] == ":" else values is not None
            rest = change[match.end() :]
            word = quoted_word(rest, line) if is_quoted else plain_word(rest, line)
            return self._alternative(name, values if is_set else None, match[1], word, line)
        text = "".join(values or [])
        # ${NAME%PATTERN} and the like
        for mark, cut in CUTS.items():
            if change.startswith(mark):
                return [cut(text, self.text(plain_word(change[len(mark) :], line), line))]
        # ${NAME/OLD/NEW}, or // for every OLD
        if change.startswith("/"):
            old, _, new = change.lstrip("/").partition("/")
            most = -1 if change.startswith("//") else 1
            return [text.replace(old, self.text(plain_word(new, line), line), most)]
        if change in CASES:
            return [CASES[change](text)]
        raise ShellError(line, f"${{{name}{change}}} is not read here")

    def _alternative(self, name: str, values: list[str] | None, kind: str, word: Word, line: int) -> list[str]:
        """Return the values of ${NAME-WORD}, ${NAME=WORD}, ${NAME+WORD} or ${NAME?WORD}."""
        if kind == "+":
            return [""] if values is None else [self.text(word, line)]
        if values is not None:
            return values or [""]
        text = self.text(word, line)
        if kind == "?":
            raise ShellError(line, f"{name} is not set: {text or 'the script needs it'}")
        # the only expansion that sets its variable
        if kind == "=":
            self.variables[name] = text
        return [text]

    def _unknown(self, text: str) -> str:
        self.unknown.append(text)
        return f"\ue000{len(self.unknown) - 1}\ue001"

    def arithmetic(self, text: str, line: int) -> int:
        """Return the value of an arithmetic expression. Raises ShellError."""
        expression = self.known(self.text(quoted_word(text, line), line), line)
        # a name needs no dollar sign in arithmetic
        named = re.sub(r"[A-Za-z_]\w*", lambda found: self._number(found[0], line), expression)
        named = re.sub(r"!(?!=)", " not ", named.replace("&&", " and ").replace("||", " or "))
        try:
            return int(_evaluated(ast.parse(named.strip() or "0", mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            raise ShellError(line, f"$(({text})) cannot be computed") from None

    def _number(self, name: str, line: int) -> str:
        value = self.known("".join(self._value(name, None, line) or ["0"]), line)
        if not re.fullmatch(r"\s*-?\d+\s*|", value):
            raise ShellError(line, f"{name}={value!r} is not a whole number, but is computed with")
        return f"({value or 0})"


def _length(values: list[str], *, is_list: bool) -> str:
    """Return ${#NAME}: of an array its elements, of a value its letters."""
    return str(len(values)) if is_list else str(len("".join(values)))


class _Fields:
    """Words of a command line as the parts of a word are added to them."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.current: str | None = None

    def add(self, values: list[str]) -> None:
        """Add values that are not split: the first to the word that is open, each further one is another word."""
        for number, value in enumerate(values):
            if number:
                self.end()
            self.current = (self.current or "") + value

    def split(self, text: str) -> None:
        """Add a value outside quotation marks."""
        if text[:1].isspace():
            self.end()
        self.add(text.split())
        if text[-1:].isspace():
            self.end()

    def end(self) -> None:
        if self.current is not None:
            self.done.append(self.current)
        self.current = None

    def ended(self) -> list[str]:
        self.end()
        return self.done


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic, and changes of a value by a pattern.


def _power(base: int, exponent: int) -> int:
    # a number that is larger than any size would only take time
    if not 0 <= exponent < MOST_BITS:
        raise ValueError(f"exponent {exponent}")
    return int(base**exponent)


OPERATORS: dict[type[ast.AST] | None, Callable[..., int | bool]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: _power,
    # bash cuts towards zero
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: a - b * (abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)),
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
MOST_BITS = 64


def _evaluated(node: ast.AST) -> int | bool:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    # all operands, as none has an effect
    if isinstance(node, ast.BoolOp):
        values = [bool(_evaluated(each)) for each in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    name, operands = _operation(node)
    if name not in OPERATORS:
        raise ValueError(ast.dump(node))
    return OPERATORS[name](*map(_evaluated, operands))


def _operation(node: ast.AST) -> tuple[type[ast.AST] | None, list[ast.expr]]:
    """Return the operator of an expression, and what it is applied to."""
    if isinstance(node, ast.BinOp):
        return type(node.op), [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return type(node.op), [node.operand]
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return type(node.ops[0]), [node.left, *node.comparators]
    return None, []


def _without_suffix(text: str, pattern: str, *, longest: bool) -> str:
    # the first end that fits is the shortest or the longest cut
    ends = range(len(text) + 1) if longest else range(len(text), -1, -1)
    return next((text[:at] for at in ends if fnmatch.fnmatchcase(text[at:], pattern)), text)


def _without_prefix(text: str, pattern: str, *, longest: bool) -> str:
    begins = range(len(text), -1, -1) if longest else range(len(text) + 1)
    return next((text[at:] for at in begins if fnmatch.fnmatchcase(text[:at], pattern)), text)


CUTS: dict[str, Callable[[str, str], str]] = {
    "%%": lambda text, pattern: _without_suffix(text, pattern, longest=True),
    "%": lambda text, pattern: _without_suffix(text, pattern, longest=False),
    "##": lambda text, pattern: _without_prefix(text, pattern, longest=True),
    "#": lambda text, pattern: _without_prefix(text, pattern, longest=False),
}
"""Changes of a value by a pattern, ${NAME%PATTERN}, the longer marks first."""
CASES: dict[str, Callable[[str], str]] = {"^^": str.upper, ",,": str.lower}
