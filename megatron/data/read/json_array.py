"""JSON arrays of objects, as Alpaca's and ShareGPT's files are, read as lines.

The content keeps its length: line ends become spaces, and the commas between objects line ends. So readers of lines
read arrays too, in bounded memory, and row n is line n. pyarrow's reader of JSON takes lines only, orjson a whole file.
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
_AFTER_MARK = {
    (_BEGIN, b"["): _FIRST,
    (_FIRST, b"{"): _AFTER,
    (_FIRST, b"]"): _END,
    (_NEXT, b"{"): _AFTER,
    (_AFTER, b","): _NEXT,
    (_AFTER, b"]"): _END,
}
"""Expectation, and the mark that came -> the next expectation."""
_REPLACED = {b"[": b" ", b"]": b" ", b",": b"\n"}
"""Marks outside of the objects, and what stands for them."""


def begins_array(content: bytes) -> bool:
    """Return true if content begins as a JSON array does."""
    return content.removeprefix(codecs.BOM_UTF8).lstrip(b" \t\r\n").startswith(b"[")


def holds_array(source: SourceFile) -> bool:
    """Return true if a plain file holds a JSON array. Raises DataError if it cannot be opened."""
    with contextlib.closing(open_source(source)) as file:
        return begins_array(file.read(_LOOKED_AT_BYTES))


def lines_of_array(chunks: Iterator[bytes], num_rows: int = 0) -> Iterator[bytes]:
    """Yield the content of an array with every object on a line of its own. Raises Damage where it is not one.

    With `num_rows` the content begins after the comma that follows so many rows.
    """
    array = _Array(num_rows)
    if not num_rows:
        first = next(chunks, b"")
        if first.startswith(codecs.BOM_UTF8):
            yield codecs.BOM_UTF8
        yield from array.lines(first.removeprefix(codecs.BOM_UTF8))
    for chunk in chunks:
        yield from array.lines(chunk)
    array.finish()


class _Array:
    """The place in an array between two pieces of it."""

    def __init__(self, num_rows: int) -> None:
        self._held = b""  # begins with a text whose end is not known
        self._depth = 0  # brackets that are open in an object
        self._expected = _NEXT if num_rows else _BEGIN
        self._num_rows = num_rows

    def lines(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the next piece. Raises Damage, after what is before it."""
        # a text that the last piece cut in two is whole here
        text = bytearray(self._held + chunk)
        marks: dict[int, bytes] = {}
        end, damage = self._through(text, marks)
        # a text held to its end might be the rest of the file
        if damage is None and b"\n" in text[end:]:
            damage = self._damage(f"a text {self._place} goes on after the end of its line")
        self._held = bytes(text[end:])
        # one byte for one, so that offsets and checksums are those of the file
        done = text[:end].replace(b"\n", b" ")
        for offset, mark in marks.items():
            done[offset : offset + 1] = _REPLACED[mark]
        yield bytes(done)
        if damage is not None:
            raise damage

    def _through(self, text: bytearray, marks: dict[int, bytes]) -> tuple[int, Damage | None]:
        """Return the end of what is known of the content, and the damage there. Adds the marks before it by offset."""
        at = 0
        while at < len(text):
            if self._depth:
                end = self._through_object(text, at)
                # its quote may be in the next piece
                if end == at:  # a text whose end is not in this piece
                    break
                at = end
                continue
            match = _VISIBLE.search(text, at)
            if match is None:
                return len(text), None
            damage = self._step(match[0])
            if damage is not None:
                return match.start(), damage
            at = match.end()
            if match[0] in _REPLACED:
                marks[match.start()] = match[0]
        return at, None

    def _through_object(self, text: bytearray, at: int) -> int:
        """Return the end of the object that `at` is in, or of what is known of it."""
        # brackets within texts do not count, and a whole text is one match: searched in C, not byte by byte
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
        expected = _AFTER_MARK.get((self._expected, mark))
        if expected is None:
            shown = mark.decode("ascii", "backslashreplace")
            return self._damage(f"{self._expected} must come {self._place}, not {shown}")
        self._expected = expected
        if mark == b"{":
            self._depth = 1
            self._num_rows += 1
        return None

    def finish(self) -> None:
        """Raise Damage unless the array has ended."""
        # a download that broke off ends like this, between two rows too
        if self._expected != _END or self._depth or self._held:
            raise self._damage(f"the content ends {self._place} without a ]: the file is cut off")

    @property
    def _place(self) -> str:
        if not self._num_rows:
            return "at the beginning"
        if self._depth:
            return f"in row {self._num_rows}"
        return f"after row {self._num_rows}"

    def _damage(self, what: str) -> Damage:
        return Damage(f"{what}; make the file one JSON array of objects")
