"""Escapes in the words of a command. It imports nothing, so that --help is quick."""

from __future__ import annotations


def unescaped(text: str) -> str:
    """Return a text with \\n, \\t, \\r and \\\\ replaced by the characters that they stand for."""
    for escape, character in (("\\\\", "\0"), ("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r"), ("\0", "\\")):
        text = text.replace(escape, character)
    return text
