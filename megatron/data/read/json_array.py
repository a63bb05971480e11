"""JSON arrays of objects, as Alpaca's and ShareGPT's files are, read as lines.

The content keeps its length: line ends become spaces, and the commas between objects line ends. So readers of lines
read arrays too, in bounded memory, and row n is line n.
"""

from __future__ import annotations

import codecs
import contextlib
import re
from collections.abc import Iterator

from megatron.data.read.contents import Damage, open_source
from megatron.data.read.sources import SourceFile

_LOOKED_AT_BYTES = 1 << 10
_VISIBLE = re.compile(rb"[^ \t\r\n]")
_TOKEN = re.compile(rb'"[^"\\\n]*(?:\\.[^"\\\n]*)*"|["\[\]{}]')
"""A text, a quote that begins one without an end, or a bracket."""
_BEGIN, _FIRST, _NEXT, _AFTER, _END = "[", "an object", "an object after the comma", "a comma or ]", "nothing"
"""Marks that may come next outside of the objects."""


def begins_array(content: bytes) -> bool:
    """Return true if content begins as a JSON array does."""
    return content.removeprefix(codecs.BOM_UTF8).lstrip(b" \t\r\n").startswith(b"[")


def holds_array(source: SourceFile) -> bool:
    """Return true if a plain file holds a JSON array. Raises DataError if it cannot be opened."""
    with contextlib.closing(open_source(source)) as file:
        return begins_array(file.read(_LOOKED_AT_BYTES))


def lines_of_array(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the content of an array with every object on a line of its own. Raises Damage where it is not one."""
    array = _Array()
    for number, chunk in enumerate(chunks):
        mark = codecs.BOM_UTF8 if number == 0 and chunk.startswith(codecs.BOM_UTF8) else b""
        if mark:
            yield mark
        yield from array.lines(chunk[len(mark) :])
    array.finish()


class _Array:
    """The place in an array between two pieces of it."""

    def __init__(self) -> None:
        self._held = b""  # begins with a text whose end is not known
        self._depth = 0  # brackets that are open in an object
        self._expected = _BEGIN
        self._num_rows = 0

    def lines(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the next piece. Raises Damage, after what is before it."""
        text = bytearray(self._held + chunk)
        commas: list[int] = []
        blanks: list[int] = []
        at, damage = 0, None
        while damage is None and at < len(text):
            if self._depth:
                end = self._through_object(text, at)
                if end == at:
                    break
                at = end
                continue
            found = _VISIBLE.search(text, at)
            at = len(text) if found is None else found.end()
            if found is not None:
                damage = self._step(found[0])
                if damage is None and found[0] != b"{":
                    (commas if found[0] == b"," else blanks).append(found.start())
                elif damage is not None:
                    at = found.start()
        if damage is None and b"\n" in text[at:]:
            damage = self._damage(f"a text {self._place} goes on after the end of its line")
        self._held = bytes(text[at:])
        done = text[:at].replace(b"\n", b" ")
        for places, mark in ((blanks, b" "), (commas, b"\n")):
            for place in places:
                done[place : place + 1] = mark
        yield bytes(done)
        if damage is not None:
            raise damage

    def _through_object(self, text: bytearray, at: int) -> int:
        """Return the end of the object that `at` is in, or of what is known of it."""
        for token in _TOKEN.finditer(text, at):
            mark = token[0]
            if mark in (b"{", b"["):
                self._depth += 1
            elif mark in (b"}", b"]"):
                self._depth -= 1
                if not self._depth:
                    return token.end()
            elif mark == b'"':
                return token.start()
        return len(text)

    def _step(self, mark: bytes) -> Damage | None:
        """Note a mark outside of the objects."""
        expected = self._expected
        if mark == b"[" and expected == _BEGIN:
            self._expected = _FIRST
        elif mark == b"{" and expected in (_FIRST, _NEXT):
            self._expected, self._depth = _AFTER, 1
            self._num_rows += 1
        elif mark == b"," and expected == _AFTER:
            self._expected = _NEXT
        elif mark == b"]" and expected in (_FIRST, _AFTER):
            self._expected = _END
        else:
            shown = mark.decode("ascii", "backslashreplace")
            return self._damage(f"{expected} must come {self._place}, not {shown}")
        return None

    def finish(self) -> None:
        """Raise Damage unless the array has ended."""
        if self._expected != _END or self._depth or self._held:
            raise self._damage(f"the content ends {self._place} without a ]: the file is cut off")

    @property
    def _place(self) -> str:
        if not self._num_rows:
            return "at the beginning"
        return f"in row {self._num_rows}" if self._depth else f"after row {self._num_rows}"

    def _damage(self, what: str) -> Damage:
        return Damage(f"{what}; make the file one JSON array of objects")
