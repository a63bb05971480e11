"""The syntax of launch scripts: a subset of bash, read into nodes. Nothing is run.

Long: one grammar, whose rules call each other.

Read are commands with their assignments, arrays, redirections and here-documents, pipelines, && and ||, if, for, case,
groups and functions. What is not is named with its line. values.py has the values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

BLANK, ENDS_WORD = " \t", " \t\n;&|()<>"
NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)")
PARAMETER = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!]")
# the longer operators first; a file descriptor may stand before
REDIRECTION = re.compile(r"\d*(<<-|<<<|<<|>>|>\||>&|<&|<|>)|&>>?")
DECLARING = ("export", "declare", "local", "readonly", "typeset")
OPENING = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac", "{": "}"}


class ShellError(ValueError):
    """A script says what is not read here; the message names the line."""

    def __init__(self, line: int, rule: str):
        super().__init__(f"line {line}: {rule}")


@dataclass(frozen=True)
class WordPart:
    """A part of a word."""

    kind: Literal["text", "parameter", "command", "arithmetic"]
    text: str
    """Its letters; for a parameter, a command or arithmetic what stands within the brackets."""
    is_quoted: bool = False


Word: TypeAlias = tuple[WordPart, ...]


@dataclass(frozen=True)
class Assignment:
    """NAME=VALUE, NAME+=VALUE or NAME=(VALUES)."""

    name: str
    adds: bool
    value: Word = ()
    elements: tuple[Word, ...] | None = None
    """Values of an array."""


@dataclass
class Simple:
    """A command with the assignments before it."""

    line: int
    assignments: list[Assignment] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    written_to: Word | None = None
    """File that its output goes to."""
    document: Word | None = None
    """Here-document that it reads."""


@dataclass
class Compound:
    """Commands that others control: `first` is the condition of an if or a loop, or words of a for or a case."""

    kind: Literal["if", "for", "loop", "case", "group", "function", "and", "or", "not", "pipe"]
    line: int
    first: list[Node] = field(default_factory=list)
    then: list[Node] = field(default_factory=list)
    otherwise: list[Node] = field(default_factory=list)
    name: str = ""
    words: list[Word] = field(default_factory=list)
    cases: list[tuple[list[Word], list[Node]]] = field(default_factory=list)


Node: TypeAlias = Simple | Compound


def parse(text: str, first_line: int = 1) -> list[Node]:
    """Return the commands of a script. Raises ShellError."""
    reader = _Reader(text.replace("\r\n", "\n"), first_line)
    nodes = list(reader.commands())
    if reader.at < len(reader.text):
        raise reader.error(f"{reader.text[reader.at]!r} is not expected here")
    return nodes


class _Reader:
    def __init__(self, text: str, first_line: int) -> None:
        self.text, self.at, self.first_line = text, 0, first_line
        self.waiting: list[tuple[Simple, str, bool, bool]] = []
        """Here-documents that begin at the next line: command, end, whether indented, whether expanded."""

    def error(self, rule: str) -> ShellError:
        return ShellError(self.line, rule)

    @property
    def line(self) -> int:
        return self.first_line + self.text.count("\n", 0, self.at)

    def looking_at(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def skip(self, *, lines: bool = False) -> None:
        """Skip blanks, continued lines and comments; with `lines` also ends of commands."""
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in BLANK:
                self.at += 1
            elif self.looking_at("\\\n"):
                self.at += 2
            elif character == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif lines and character == "\n":
                self.at += 1
                self._read_documents()
            elif lines and character == ";" and not self.looking_at(";;"):
                self.at += 1
            else:
                return

    def keyword(self) -> str:
        """Return the plain word that follows, without reading it."""
        match = re.compile(r"[^\s;&|()<>'\"$`\\]+").match(self.text, self.at)
        return match[0] if match else ""

    def expect(self, *words: str) -> str:
        self.skip(lines=True)
        found = self.keyword()
        if found not in words:
            raise self.error(f"{' or '.join(words)} is missing")
        self.at += len(found)
        return found

    def commands(self, *ends: str) -> Iterator[Node]:
        """Yield commands up to one of the words, which is not read."""
        while True:
            self.skip(lines=True)
            at_end = self.at >= len(self.text) or self.looking_at(")") or self.looking_at(";;")
            if at_end or self.keyword() in ends:
                return
            yield self.and_or()
            self.skip()
            # in the background, which makes no difference to what it would run
            if self.looking_at("&") and not self.looking_at("&&"):
                self.at += 1

    def and_or(self) -> Node:
        node = self.pipeline()
        while True:
            self.skip()
            kind: Literal["and", "or"] = "and" if self.looking_at("&&") else "or"
            if not (self.looking_at("&&") or self.looking_at("||")):
                return node
            self.at += 2
            self.skip(lines=True)
            node = Compound(kind, self.line, first=[node], then=[self.pipeline()])

    def pipeline(self) -> Node:
        self.skip()
        line = self.line
        if self.keyword() == "!":
            self.at += 1
            return Compound("not", line, first=[self.pipeline()])
        # `a | b`: the words of both are read, whatever flows between them
        nodes = [self.command()]
        self.skip()
        while self.looking_at("|") and not self.looking_at("||"):
            self.at += 2 if self.looking_at("|&") else 1
            self.skip(lines=True)
            nodes.append(self.command())
            self.skip()
        return nodes[0] if len(nodes) == 1 else Compound("pipe", line, first=nodes)

    def command(self) -> Node:
        """Read a command, or one that others control; redirections of these are passed over."""
        word, line = self.keyword(), self.line
        if self.looking_at("(("):
            return self.arithmetic()
        if word == "[[":
            return self.condition()
        if self.looking_at("("):
            self.at += 1
            node: Node = Compound("group", line, then=list(self.commands()))
            self.close(")")
        # `if`, `for` and the like are words, so a command of that name cannot be meant
        elif word in OPENING:
            self.at += len(word)
            node = self.compound(word, line)
        else:
            return self.simple()
        # `done > log`: the output of all of them
        ignored = Simple(line)
        self.skip()
        while REDIRECTION.match(self.text, self.at):
            self.redirection(ignored)
            self.skip()
        return node

    def arithmetic(self) -> Node:
        """Read ((EXPRESSION)), as the words `((` and the expression."""
        line, end = self.line, self.text.find("))", self.at)
        if end < 0:
            raise self.error("(( has no ))")
        expression = self.text[self.at + 2 : end]
        self.at = end + 2
        return Simple(line, words=[(WordPart("text", "(("),), (WordPart("text", expression, True),)])

    def condition(self) -> Node:
        """Read [[ ... ]], in which values are not split, and && and brackets join conditions."""
        node = Simple(self.line)
        while not node.words or _text(node.words[-1]) != "]]":
            self.skip(lines=True)
            if self.at >= len(self.text):
                raise ShellError(node.line, "[[ has no ]]")
            joint = re.compile(r"&&|\|\||[()<>]").match(self.text, self.at)
            if joint is not None:
                self.at = joint.end()
                node.words.append((WordPart("text", joint[0], True),))
                continue
            parts = self.word()
            node.words.append(tuple(WordPart(part.kind, part.text, True) for part in parts))
        return node

    def close(self, text: str) -> None:
        self.skip(lines=True)
        if not self.looking_at(text):
            raise self.error(f"{text} is missing")
        self.at += len(text)

    def compound(self, word: str, line: int) -> Compound:
        # a brace is a word too, unlike a bracket
        if word == "{":
            node = Compound("group", line, then=list(self.commands("}")))
            self.expect("}")
            return node
        if word == "if":
            return self.if_(line)
        if word == "case":
            return self.case(line)
        node = Compound("for" if word == "for" else "loop", line)
        if word == "for":
            self.skip()
            node.name = self.keyword()
            self.at += len(node.name)
            self.expect("in")
            node.words = self.words()
        else:
            node.first = list(self.commands("do"))
        self.expect("do")
        node.then = list(self.commands("done"))
        self.expect("done")
        return node

    def if_(self, line: int) -> Compound:
        node = Compound("if", line, first=list(self.commands("then")))
        self.expect("then")
        node.then = list(self.commands("elif", "else", "fi"))
        line, end = self.line, self.expect("elif", "else", "fi")
        if end == "elif":
            node.otherwise = [self.if_(line)]
        elif end == "else":
            node.otherwise = list(self.commands("fi"))
            self.expect("fi")
        return node

    def case(self, line: int) -> Compound:
        node = Compound("case", line)
        self.skip()
        node.words = [self.word()]
        self.expect("in")
        self.skip(lines=True)
        while self.keyword() != "esac":
            if self.looking_at("("):
                self.at += 1
            # one of several, between bars
            patterns = self.words()
            while self.looking_at("|"):
                self.at += 1
                patterns += self.words()
            self.close(")")
            node.cases.append((patterns, list(self.commands("esac"))))
            if self.looking_at(";;"):
                self.at += 2
            self.skip(lines=True)
        self.expect("esac")
        return node

    def simple(self) -> Node:
        node = Simple(self.line)
        while True:
            self.skip()
            if REDIRECTION.match(self.text, self.at):
                self.redirection(node)
                continue
            if self.at >= len(self.text) or self.text[self.at] in ENDS_WORD:
                break
            # export A=1: an assignment, though behind a word
            declares = bool(node.words) and _text(node.words[0]) in DECLARING
            if (not node.words or declares) and ASSIGNMENT.match(self.text, self.at):
                node.assignments.append(self.assignment())
            else:
                node.words.append(self.word())
        # NAME() COMMAND
        if self.looking_at("(") and len(node.words) == 1 and re.match(r"\(\s*\)", self.text[self.at :]):
            self.at = self.text.index(")", self.at) + 1
            self.skip(lines=True)
            return Compound("function", node.line, name=_text(node.words[0]), then=[self.command()])
        if not node.words and not node.assignments and node.written_to is None:
            raise self.error(f"{self.text[self.at : self.at + 1]!r} is not expected here")
        return node

    def assignment(self) -> Assignment:
        match = ASSIGNMENT.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        # an array stands in brackets, over any number of lines
        if not self.looking_at("("):
            return Assignment(match[1], match[2] == "+=", self.word())
        self.at += 1
        words: list[Word] = []
        self.skip(lines=True)
        while self.at < len(self.text) and not self.looking_at(")"):
            words.append(self.word())
            self.skip(lines=True)
        self.close(")")
        return Assignment(match[1], match[2] == "+=", elements=tuple(words))

    def redirection(self, node: Simple) -> None:
        match = REDIRECTION.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        self.skip()
        word, kind = self.word(), match[1]
        if kind in ("<<", "<<-"):
            # quotation marks around the end keep $ as it is
            self.waiting.append((node, _text(word), kind == "<<-", not any(part.is_quoted for part in word)))
        elif kind in (">", ">>", ">|") and match[0][:1] in (">", "1"):
            node.written_to = word

    def _read_documents(self) -> None:
        for node, end, is_indented, is_expanded in self.waiting:
            lines = []
            while True:
                if self.at >= len(self.text):
                    raise ShellError(node.line, f"the here-document has no line {end}")
                line, _, _ = self.text[self.at :].partition("\n")
                self.at += len(line) + 1
                line = line.lstrip("\t") if is_indented else line
                if line == end:
                    break
                lines.append(line + "\n")
            node.document = (
                _document("".join(lines), node.line) if is_expanded else (WordPart("text", "".join(lines), True),)
            )
        self.waiting = []

    def words(self) -> list[Word]:
        """Read words up to the end of the command."""
        found = []
        self.skip()
        while self.at < len(self.text) and self.text[self.at] not in ENDS_WORD:
            found.append(self.word())
            self.skip()
        return found

    def word(self) -> Word:
        parts: list[WordPart] = []
        while self.at < len(self.text) and self.text[self.at] not in ENDS_WORD:
            character = self.text[self.at]
            if character == '"':
                self.at += 1
                # "" is a word, though without a letter
                parts += self.quoted() or [WordPart("text", "", True)]
            elif character == "'":
                end = self.text.find("'", self.at + 1)
                if end < 0:
                    raise self.error("a ' has no end")
                parts.append(WordPart("text", self.text[self.at + 1 : end], True))
                self.at = end + 1
            elif self.looking_at("\\\n"):
                self.at += 2
            elif character == "\\":
                parts.append(WordPart("text", self.text[self.at + 1 : self.at + 2], True))
                self.at += 2
            # its value is split into words; that of a quoted one is not
            elif character in "$`":
                parts.append(self.expansion(is_quoted=False))
            else:
                parts.append(WordPart("text", character))
                self.at += 1
        return tuple(_joined(parts))

    def quoted(self, end: str = '"') -> list[WordPart]:
        """Read up to the closing quotation mark; `end` "": to the end of the text, as in a here-document."""
        parts: list[WordPart] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if end and character == end:
                self.at += 1
                return _joined(parts)
            if self.looking_at("\\\n"):
                self.at += 2
            elif character == "\\" and self.text[self.at + 1 : self.at + 2] in tuple(f"$`\\{end}"):
                parts.append(WordPart("text", self.text[self.at + 1 : self.at + 2], True))
                self.at += 2
            elif character in "$`":
                parts.append(self.expansion(is_quoted=True))
            else:
                parts.append(WordPart("text", character, True))
                self.at += 1
        if end:
            raise self.error(f"a {end} has no end")
        return _joined(parts)

    def expansion(self, *, is_quoted: bool) -> WordPart:
        if self.looking_at("`"):
            end = self.text.find("`", self.at + 1)
            if end < 0:
                raise self.error("a ` has no end")
            inner = self.text[self.at + 1 : end]
            self.at = end + 1
            return WordPart("command", inner, is_quoted)
        if self.looking_at("$(("):
            return WordPart("arithmetic", self.bracketed("$((", "))"), is_quoted)
        if self.looking_at("$("):
            return WordPart("command", self.bracketed("$(", ")"), is_quoted)
        if self.looking_at("${"):
            return WordPart("parameter", self.bracketed("${", "}"), is_quoted)
        # $NAME, or a dollar sign that is one
        match = PARAMETER.match(self.text, self.at + 1)
        if match is None:
            self.at += 1
            return WordPart("text", "$", is_quoted)
        self.at = match.end()
        return WordPart("parameter", match[0], is_quoted)

    def bracketed(self, begin: str, end: str) -> str:
        """Return what stands between brackets, which may be nested or quoted."""
        opening, closing = begin[-1], end[0]
        start = self.at + len(begin)
        # $(( has two brackets to close
        depth, at, quote = len(end), start, ""
        while at < len(self.text):
            character = self.text[at]
            if character == "\\":
                at += 1
            # brackets between quotation marks are text
            elif quote:
                quote = "" if character == quote else quote
            elif character in "'\"" and begin != "$((":
                quote = character
            elif character == opening:
                depth += 1
            elif character == closing:
                depth -= 1
                if depth == 0:
                    self.at = at + 1
                    return self.text[start : at + 1 - len(end)]
            at += 1
        raise self.error(f"{begin} has no {end}")


def _document(text: str, line: int) -> Word:
    return tuple(_Reader(text, line).quoted(""))


def quoted_word(text: str, line: int) -> Word:
    """Return a text as the word that it is between quotation marks, of a default value for instance."""
    return _document(text, line)


def plain_word(text: str, line: int) -> Word:
    """Return a text as the word that it is by itself. Raises ShellError."""
    reader = _Reader(text, line)
    parts: list[WordPart] = []
    # blanks belong to it, as in ${NAME:-two words}
    while reader.at < len(text):
        parts += reader.word()
        if reader.at < len(text):
            parts.append(WordPart("text", text[reader.at]))
            reader.at += 1
    return tuple(parts)


def _joined(parts: list[WordPart]) -> list[WordPart]:
    """Return the parts with texts of one kind joined."""
    joined: list[WordPart] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and part.kind == last.kind == "text" and part.is_quoted == last.is_quoted:
            joined[-1] = WordPart("text", last.text + part.text, part.is_quoted)
        else:
            joined.append(part)
    return joined


def _text(word: Word) -> str:
    """Return a word without expansions; "" for any other."""
    if any(part.kind != "text" for part in word):
        return ""
    return "".join(part.text for part in word)


def assigns_or_names(nodes: list[Node], text: str) -> bool:
    """Return whether the commands set a variable, or one of their words has a text."""
    for node in nodes:
        if isinstance(node, Simple):
            if node.assignments or any(text in part.text for word in node.words for part in word):
                return True
            continue
        bodies = [node.first, node.then, node.otherwise, *(body for _, body in node.cases)]
        if any(assigns_or_names(body, text) for body in bodies):
            return True
    return False
