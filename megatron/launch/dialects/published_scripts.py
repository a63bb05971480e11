"""Check that a script beside the command is the published one, which this project replaces, without code of its own.

The scripts named on a command line are not run: what they do is done here. So a file of that name whose code differs
from every published one is refused, rather than passed over.

Sources: the releases of huggingface/optimum-habana and its state of January 2026, and of finetune.py
NAVER-INTEL-Co-Lab/gaudi-finetune-lora-deepspeed.
"""

from __future__ import annotations

import hashlib
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

# NL ends an empty line, or one within a statement; the end of a statement is a NEWLINE
LEFT_OUT = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
# the text of an indent does not count: tabs, or another width, make no other code
LAYOUT = {tokenize.NEWLINE: "\n", tokenize.INDENT: ">", tokenize.DEDENT: "<"}
# digests of the published files, by name
PUBLISHED: dict[str, tuple[str, ...]] = {
    "sft": (
        "bd904620c215af92",
        "a4d6e969ab66ed3e",
        "bbb36bd2144a0c6d",
        "a80c8cd1e4239591",
        "a4e787b2f6a0c42c",
        "e0c96653612ac192",
        "e7bd8f4bfb8a3684",
    ),
    "dpo": (
        "b776476715f20066",
        "98b69570cb28a965",
        "5def527a9d6e8676",
        "9ae71e10a0fbac5f",
    ),
    "merge_peft_adapter": ("f9de5f1602664ea1",),
    "run_generation": (
        "7a713c422dd4b9b2",
        "d896bc57d87b6d21",
        "2930d63de8d443e5",
        "8a7e5417d65600ee",
        "4903287f76444eea",
        "f05ee10b5ff36ef5",
        "3669e84a177688eb",
        "f49b670c7fd27fa6",
        "bba0027536d92c30",
        "373a80778759192e",
        "f9c4a5cf97c622bf",
        "acdba4c1e323bf87",
        "9689e766fc695c8a",
        "5fafdb2d57bcef83",
        "6bcbba073d0a01dc",
        "a01cfa3e7742667f",
        "ba994a8043ba9e20",
        "5577e8a60d7ef984",
        "54fd8bb09c395699",
        "27ac646bb311c785",
        "4cbe12c5d627790e",
    ),
    "finetune": (
        "afd87bd27df1c4ad",
        "67f4726e7d68225b",
        "76a802e0262ba25b",
    ),
    "dataloader": ("89e5a768e5ded81d",),
    "data_module": ("51ff4bf1561c7004",),
    "utils": ("35a8a0f17944ca66",),
}
BESIDE = {"finetune": ("dataloader", "data_module", "utils")}
"""Modules beside a script that it takes its code from."""


def digest(text: str) -> str:
    """Return a digest of Python code that comments, docstrings and blank lines do not change.

    Raises tokenize.TokenError or SyntaxError for text that is not Python.
    """
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in LEFT_OUT]
    words: list[str] = []
    begins_statement = True
    for index, token in enumerate(tokens):
        ends = index + 1 == len(tokens) or tokens[index + 1].type == tokenize.NEWLINE
        if token.type == tokenize.STRING and begins_statement and ends:
            continue  # with its NEWLINE, since the next token still begins a statement
        if not (token.type == tokenize.NEWLINE and begins_statement):
            words.append(LAYOUT.get(token.type, token.string))
        begins_statement = token.type in LAYOUT
    return hashlib.sha256("".join(words).encode()).hexdigest()[:16]


def check_script(script: str) -> Iterator[str]:
    """Yield a fault for each file with code of its own: the script, and the modules beside it. None need be there."""
    path = Path(script)
    # the modules too: a loss of the user's own stands in dataloader.py
    name = path.name.removesuffix(".py")
    for module in (name, *BESIDE.get(name, ())):
        file = path.with_name(f"{module}.py")
        if file.is_file() and not _is_published(file, module):
            yield (
                f"{file} has code of its own, which is not run here: this command does what the published {module}.py "
                "does. Write a changed loss as --loss FILE.py:FUNCTION (docs/guides/own_loss.md) and remove the file, "
                "or run it with torchrun"
            )


def _is_published(file: Path, module: str) -> bool:
    try:
        return digest(file.read_text(encoding="utf-8")) in PUBLISHED[module]
    except (UnicodeDecodeError, SyntaxError, tokenize.TokenError):
        return False
