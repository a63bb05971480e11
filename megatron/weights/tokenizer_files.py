"""Files of a tokenizer beside a model: which they are, whether they fit it, and the ids of the tokens they name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megatron.checkpoint.folders import CheckpointError
from megatron.weights.folder_files import own_file, read_json
from megatron.weights.huggingface_config import SPECIAL_TOKENS, shown

TOKENIZER_MODEL = "tokenizer.model"
"""SentencePiece's, or Llama 3's ranks of tiktoken."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TOKENIZER_MODEL,
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates"
"""Folder of the tokenizer's other templates by name, such as tool_use.jinja."""


def tokenizer_files(folder: Path) -> list[str]:
    """The names of the tokenizer's files in `folder`, those of its other templates with their folder's name."""
    others = sorted(f"{TEMPLATES}/{path.name}" for path in (folder / TEMPLATES).glob("*.jinja"))
    return [name for name in TOKENIZER_FILES if os.path.lexists(folder / name)] + others


def check_tokenizer(tokenizer: Path, vocab_size: int) -> list[str]:
    """Return the names of a tokenizer's files.

    Raises CheckpointError if one is not a file, or the tokenizer has ids beyond the model's.
    """
    names = tokenizer_files(tokenizer)
    # none is a link out of the folder: all of them are copied
    for path in (tokenizer / name for name in names):
        own_file(path.parent, path.name)
    if "tokenizer.json" in names:
        largest = max(_token_ids(tokenizer / "tokenizer.json").values(), default=0)
        if largest >= vocab_size:
            raise CheckpointError(
                f"{tokenizer / 'tokenizer.json'} has ids up to {largest}, but the model's vocab_size is {vocab_size}: "
                "the tokenizer of another model; give its own"
            )
    return names


def copy_tokenizer(tokenizer: Path, folder: Path, vocab_size: int) -> list[str]:
    """Copy a tokenizer's files, and return their names. Raises CheckpointError as `check_tokenizer` does."""
    names = check_tokenizer(tokenizer, vocab_size)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(tokenizer / name, folder / name)
    return names


def special_token_ids(tokenizer: Path) -> dict[str, int]:
    """Return the ids of the special tokens that tokenizer_config.json names, looked up in tokenizer.json."""
    if not {"tokenizer.json", "tokenizer_config.json"} <= set(tokenizer_files(tokenizer)):
        return {}
    names, ids = read_json(tokenizer / "tokenizer_config.json"), _token_ids(tokenizer / "tokenizer.json")
    special = {}
    for name in SPECIAL_TOKENS:
        token = names.get(name.removesuffix("_id"))
        if isinstance(token, dict):  # an AddedToken as transformers stores it
            token = token.get("content")
        # a name that tokenizer.json lacks gives no id, and nothing is exported for it
        if isinstance(token, str) and token in ids:
            special[name] = ids[token]
    return special


def _token_ids(path: Path) -> dict[str, int]:
    """Return every token's id in a tokenizer.json. Raises CheckpointError."""
    content = read_json(path)
    try:
        vocabulary = (content.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, list):  # Unigram: [token, score] in order
            vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
        added = {entry["content"]: entry["id"] for entry in content.get("added_tokens") or []}
        # added tokens last: where both have one, the library gives the added token's id
        ids: dict[str, int] = {**vocabulary, **added}
    except (AttributeError, IndexError, KeyError, TypeError):
        raise CheckpointError(f"{path} is not a tokenizer.json of transformers; copy it again") from None
    for token, number in ids.items():
        # not isinstance, for which True is an integer
        if not isinstance(token, str) or type(number) is not int or not 0 <= number < 2**31:
            raise CheckpointError(f"{path} gives the token {token!r} the id {shown(number)}; copy it again")
    return ids
