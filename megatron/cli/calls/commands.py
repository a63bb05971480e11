"""Commands as calls of Python: each runs in a process of its own, whose output is shown as it comes.

So a notebook keeps its memory, its device and its signal handlers, whatever a command does with those.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.launch.attached import run_attached
from megatron.launch.child_processes import python_path
from megatron.launch.instructlab.launch import meaning
from megatron.options.config import ConfigError
from megatron.options.flags import flag
from megatron.runtime.commands import DONE, REFUSED

Paths = str | Path | Sequence[str | Path]


class CommandError(RuntimeError):
    """A command or a training has failed. `status` is its exit status, `output` the end of its output."""

    def __init__(self, name: str, status: int, output: str) -> None:
        # a command's own message is its last line
        last = output.strip().rpartition("\n")[2].strip()
        why = last if status <= REFUSED else meaning(status)
        super().__init__(f"{name} ended with status {status}: {why or meaning(status)}")
        self.status, self.output = status, output


def command_words(options: Mapping[str, Any]) -> list[str]:
    """Return the flags of options that are given: True is a flag by itself, False its --no-form, None leaves it out."""
    words: list[str] = []
    for name, value in options.items():
        # what a caller passes on without a value of its own
        if value is None:
            continue
        if value is False:
            words.append(flag(f"no_{name}"))
            continue
        words.append(flag(name))
        if value is not True:
            words += listed(value)
    return words


def listed(value: Any) -> list[str]:
    """Return the words of a value, or of several."""
    values = [value] if isinstance(value, (str, Path)) or not isinstance(value, Sequence) else value
    return [str(each) for each in values]


def refuse_own(options: Mapping[str, Any], instead: Mapping[str, str]) -> None:
    """Raise ConfigError for options that a call sets itself; `instead`: the argument that stands for each."""
    faults = [f"{name} is set by {instead[name]}; use that" for name in options if name in instead]
    if faults:
        raise ConfigError(faults)


def call_command(name: str, words: Sequence[str]) -> None:
    """Run a command to its end. Raises CommandError."""
    # unbuffered, since its lines are copied as they come
    command = [sys.executable, "-u", "-m", "megatron.cli.entry", name, *words]
    ended = run_attached(command, os.environ | {"PYTHONPATH": python_path()})
    if ended.status != DONE:
        raise CommandError(name, ended.status, "\n".join(ended.last_lines))


def train_tokenizer(files: Paths, folder: str | Path, *, vocab_size: int, **options: Any) -> Path:
    """Train a byte-level BPE tokenizer on text, and return its folder.

    `files` are files or folders of text, JSON lines, Parquet or Arrow; `options` are the flags of
    megatron-train-tokenizer. Raises CommandError.
    """
    refuse_own(options, {"input": "files", "output_dir": "folder"})
    own = {"input": listed(files), "vocab_size": vocab_size, "output_dir": folder}
    call_command("train_tokenizer", command_words({**own, **options}))
    return Path(folder)


def prepare(files: Paths, prefix: str | Path, *, tokenizer: str | Path, key: str = "text", **options: Any) -> str:
    """Tokenize text into a dataset, and return the prefix that `data_path` of a training takes.

    `tokenizer` is a folder with a tokenizer.json, `key` the column of the text; `options` are the flags of
    megatron-preprocess, such as text_files, append_eod and overwrite. Raises CommandError.
    """
    refuse_own(
        options, {"input": "files", "output_prefix": "prefix", "json_keys": "key", "tokenizer_model": "tokenizer"}
    )
    own = {"input": listed(files), "output_prefix": prefix, "json_keys": key, "tokenizer_model": tokenizer}
    call_command("preprocess_data", command_words({"tokenizer_type": "HFTokenizer", **own, **options}))
    return f"{prefix}_{key}_document"


def convert(source: str | Path, folder: str | Path, *, to: str, **options: Any) -> Path:
    """Convert the weights of a checkpoint, compare the result with the source, and return its folder.

    `to` is a format of megatron-convert, such as hf or peft; `options` are its flags. Raises CommandError.
    """
    refuse_own(options, {"load": "source", "save": "folder"})
    # its own arguments first: an option of the same flag would be the later one, and is refused above
    own = {"load": source, "save": folder, "to": to}
    call_command("convert_checkpoint", command_words({**own, **options}))
    return Path(folder)
