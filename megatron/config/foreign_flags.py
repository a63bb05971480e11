"""Answers to flags of Megatron that are not ours, as docs/reference/megatron_flags.md gives them."""

from __future__ import annotations

import functools
from pathlib import Path

ANSWERS = Path(__file__).with_name("megatron_flags.tsv")
"""A line for each flag: the flag, ours in its place, and what to know. The page is its source (tests/config/
test_megatron_flags.py writes it). A flag that ends in * stands for all with that beginning."""


def answer_to(name: str) -> str | None:
    """Return what to do about a flag of Megatron, to stand after its name; None if it is another's."""
    name = name.replace("_", "-")
    for theirs, (ours, note) in _answers().items():
        if name != theirs and not (theirs.endswith("*") and name.startswith(theirs[:-1])):
            continue
        if ours:
            return f"is {ours} here" + (f": {note}" if note else "")
        return "is not an option here" + (f": {note}" if note else "; leave it out")
    return None


@functools.cache
def _answers() -> dict[str, tuple[str, str]]:
    lines = ANSWERS.read_text(encoding="utf-8").splitlines()
    return {theirs: (ours, note) for theirs, ours, note in (line.split("\t") for line in lines)}
