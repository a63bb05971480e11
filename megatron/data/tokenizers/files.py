"""Reader of tokenizer files, with hints about files given by mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megatron.data.indexed import DataError

# How files that are often confused begin, and what they are.
_KINDS: tuple[tuple[bytes, str], ...] = (
    (rb"version https://git-lfs", "a Git LFS pointer: the file itself was not downloaded (git lfs pull)"),
    (rb"\s*<(!doctype|html|\?xml)", "a web page, not the file that the link should give"),
    (rb"[A-Za-z0-9+/]+=* \d+\r?\n", "a tiktoken rank file (TikTokenizer)"),
    (rb"#version", "a merges.txt (GPT2BPETokenizer)"),
    (rb'\s*\{\s*"version"', "a tokenizer.json (HFTokenizer)"),
    (rb'\s*\{\s*"[^"]*":\s*\d+\s*,', "a vocab.json (GPT2BPETokenizer, with its merges.txt)"),
    (rb"\n.\n", "a SentencePiece model (SentencePieceTokenizer)"),
    (rb"PK\x03\x04|\x1f\x8b", "an archive; unpack it"),
)


def looks_like(content: bytes, wanted: str) -> str:
    """Return a sentence about what a file that is not `wanted` seems to be; empty if unknown."""
    known = (kind for start, kind in _KINDS if re.match(start, content[:1000], re.IGNORECASE | re.DOTALL))
    found = next((kind for kind in known if not kind.startswith(wanted)), None)
    return f". It looks like {found}" if found else ""


def read_bytes(path: Path, what: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give {what}") from error
    if not content:
        raise DataError(f"{path} is empty; give {what}")
    return content


def decode_utf8(path: Path, content: bytes, what: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = looks_like(content, what)
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); give {what}{hint}") from None


def parse_json(path: Path, content: bytes, what: str) -> Any:
    try:
        return json.loads(decode_utf8(path, content, what))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); give {what}{looks_like(content, what)}") from None
