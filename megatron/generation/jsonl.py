"""Prompts from files, and their results as JSON lines that an interrupted run continues."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from megatron.data.index.indexed import DataError
from megatron.generation.model import InferenceModel
from megatron.generation.options import GenerateCommand
from megatron.generation.prompts import PromptEncoder
from megatron.generation.requests import Completion, Request
from megatron.runtime.files import AppendFile, lock_file, parse_json, replacing

RESULT_KEYS = ("completion", "reason", "num_tokens", "score", "logprobs", "completions")
ID_KEYS = ("ids", "prompt_ids")
INPUT_OF_LAUNCHER = "MEGATRON_TERMINAL"
"""Variable with the path of the launcher's standard input: a rank that it starts has none of its own."""
SURROGATE = re.compile("[\ud800-\udfff]")
OF_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "device",
    "distributed_timeout_minutes",
    "load_fallback",
)
"""Options of the model that change none of its answers: a file may be continued with others."""
OF_PROMPTS = ("as_chat", "system", "chat_template", "keep_special_tokens", "token_ids")


class Prompt(NamedTuple):
    """A prompt that can be generated for."""

    request: Request
    row: dict[str, Any]
    """Content of its line, which the result repeats."""


class PromptSource:
    """Prompts of a command, in order. Lines that cannot be used raise DataError, or are left out and counted.

    `faults` describes what is wrong with a request; None of it: the model can take it.
    """

    def __init__(
        self, command: GenerateCommand, encoder: PromptEncoder, faults: Callable[[Request], Sequence[str]]
    ) -> None:
        self._options, self._encoder, self._faults = command.prompts, encoder, faults
        self._result_keys: tuple[str, ...] = RESULT_KEYS
        if command.prompts.token_ids:
            self._result_keys += ID_KEYS
        self.num_bad = 0
        """Lines that were left out."""

    def __iter__(self) -> Iterator[Prompt]:
        # a line left out keeps its number: what is drawn for the others does not depend on it
        for number, (where, read) in enumerate(self._rows()):
            try:
                row = read()
                # the result repeats the row's keys, and would replace one of its own names
                if taken := [key for key in self._result_keys if key in row]:
                    raise DataError(f"it has the key {taken[0]!r}, which the result needs; rename it")
                ids = ids_of(row, self._encoder, as_chat=self._options.as_chat)
                is_chat = self._options.as_chat or row.get("messages") is not None
                request = Request(number, ids, is_chat=is_chat)
                if faults := self._faults(request):
                    raise DataError(faults[0])
            except DataError as error:
                if self._options.on_bad_line == "fail":
                    raise DataError(f"{where}: {error}" if where else str(error)) from None
                self.num_bad += 1
                # stdout may be the results
                print(f"left out: {where}: {error}", file=sys.stderr)
                continue
            yield Prompt(request, row)

    def _rows(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Yield the place of each prompt, for messages, and a function that reads it."""
        path = self._options.input
        if path is None:
            for number, text in enumerate(self._options.prompt, start=1):
                yield f"prompt {number}" if len(self._options.prompt) > 1 else "", partial(dict, prompt=text)
            return
        yield from rows_of(path)


def rows_of(path: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the place of each prompt of a file, for messages, and a function that reads it, or raises DataError.

    A line of a .jsonl file, or of standard input (`-`), is an object; of another file, a text. Raises OSError.
    """
    is_json = path == "-" or path.endswith(".jsonl")
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                # a function, not the row: a generator that raises is over, and the lines behind a bad one would be
                # lost
                yield f"{path}, line {number}", partial(_json_row if is_json else _text_row, line)


def ids_of(row: dict[str, Any], encoder: PromptEncoder, *, as_chat: bool) -> tuple[int, ...]:
    """Return the ids of a row's prompt or messages. `as_chat`: a prompt is the message of a user. Raises DataError."""
    prompt, messages = row.get("prompt"), row.get("messages")
    if (prompt is None) == (messages is None):
        raise DataError("it needs a prompt, or messages, and not both")
    if messages is not None:
        return encoder.chat(messages)
    if not isinstance(prompt, str):
        raise DataError(f"prompt is {type(prompt).__name__}; it must be a string")
    if as_chat:
        return encoder.chat([{"role": "user", "content": prompt}])
    return encoder.text(prompt)


def _opened(path: str) -> IO[bytes]:
    if path != "-":
        return Path(path).open("rb")
    of_launcher = os.environ.get(INPUT_OF_LAUNCHER)
    if of_launcher is None:
        return sys.stdin.buffer
    return Path(of_launcher).open("rb")


def _text_row(line: bytes) -> dict[str, Any]:
    return {"prompt": _decoded(line).rstrip("\r\n")}


def _decoded(line: bytes) -> str:
    """Return a line's text, without the byte order mark that some editors write at the start of a file."""
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.start} is not UTF-8; convert the file") from None


def _json_row(line: bytes) -> dict[str, Any]:
    text = _decoded(line)
    try:
        row = parse_json(text)
    except ValueError as error:
        raise DataError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"a JSON {type(row).__name__}; it must be an object with prompt or messages")
    return row


class ResultFile:
    """JSON lines of results, on disk after each. An interrupted file is continued by the same command.

    While it is incomplete, a hidden file beside it holds the options and the checkpoint that it was begun with.
    Raises DataError if it exists and is complete, was begun with others, or another process writes to it.
    """

    def __init__(self, path: Path, command: GenerateCommand, model: InferenceModel):
        self._path = path
        # before the file is opened, which creates it. "ab": the lock must not change a file that another process is
        # writing
        is_new = not path.exists()
        self._lock = path.open("ab")
        if not lock_file(self._lock):
            raise DataError(f"another process is writing to --output {path}; wait until it ends, or choose another")
        self._state_path = path.with_name(f".{path.name}.options.json")
        options = {
            **{name: value for name, value in dataclasses.asdict(command.load).items() if name not in OF_LAYOUT},
            **{name: getattr(command.prompts, name) for name in OF_PROMPTS},
            **dataclasses.asdict(command.generation),
            # the newest checkpoint of a run that goes on is another one at the next start
            "ckpt_step": None if model.origin is None else model.origin.ckpt_step,
        }
        # by way of JSON, as the stored one: tuples are lists in both
        state = json.loads(json.dumps(options))
        try:
            if is_new or command.prompts.overwrite:
                os.truncate(path, 0)
                with replacing(self._state_path) as file:
                    file.write(json.dumps(state).encode())
            else:
                self._check(state)
        except BaseException:
            self._lock.close()
            raise
        self._file = AppendFile(path)
        self.num_present = 0
        """Results of an earlier start."""

    def _check(self, state: dict[str, Any]) -> None:
        remedy = "choose another --output, or replace it with --overwrite"
        try:
            begun = parse_json(self._state_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(f"--output {self._path} exists already; {remedy}") from None
        except ValueError:
            raise DataError(f"{self._state_path} is damaged; {remedy}") from None
        # one output must not hold texts of two models or two temperatures
        if changed := [name for name in state if state[name] != begun.get(name)]:
            name = changed[0]
            raise DataError(
                f"--output {self._path} was begun with {name}={begun.get(name)}, not {state[name]}; give the same "
                f"options to continue it, or {remedy}"
            )

    def missing(self, prompts: Iterator[Prompt]) -> Iterator[Prompt]:
        """Yield the prompts that the file has no result of. Raises DataError if it is of other prompts."""
        end = 0
        with self._path.open("rb") as file:
            for line in file:
                # the write of the last line was interrupted
                if not line.endswith(b"\n"):
                    os.truncate(self._path, end)
                    break
                end += len(line)
                prompt = next(prompts, None)
                # results are in the order of the prompts, so line n belongs to prompt n; another input would be
                # continued in silence
                if prompt is None or not _is_result(line, prompt.row):
                    raise DataError(
                        f"--output {self._path}, line {self.num_present + 1} is not the result of this input's prompt "
                        f"{self.num_present + 1}; choose another --output, or replace it with --overwrite"
                    )
                self.num_present += 1
        yield from prompts

    def write(self, result: dict[str, Any]) -> None:
        """Append a result. Raises OSError."""
        self._file.write(as_line(result).encode())

    def finish(self) -> None:
        """Mark the file as complete."""
        self._state_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let other processes write to it."""
        self._file.close()
        self._lock.close()


def _is_result(line: bytes, row: dict[str, Any]) -> bool:
    try:
        result = parse_json(line)
    except ValueError:
        return False
    # as text: in Python 1 equals True and 1.0, and NaN does not equal itself
    return isinstance(result, dict) and as_line({key: result.get(key) for key in row}) == as_line(row)


def as_line(result: dict[str, Any]) -> str:
    """Return a result as JSON; half a surrogate pair, which UTF-8 does not have, as the escape that the input had."""
    line = json.dumps(result, ensure_ascii=False)
    return SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", line) + "\n"


def as_result(
    prompt: Prompt,
    completions: Sequence[Completion],
    text_of: Callable[[Completion], str],
    token: Callable[[int], str],
    *,
    with_ids: bool,
) -> dict[str, Any]:
    """Return the result of a prompt: what its row says, and the texts. `token` decodes a single id."""
    texts = [_fields(each, text_of(each), token) for each in completions]
    result = dict(prompt.row)
    if with_ids:
        result["prompt_ids"] = list(prompt.request.prompt)
        texts = [{**fields, "ids": list(each.ids)} for fields, each in zip(texts, completions, strict=True)]
    if len(texts) == 1:
        return {**result, **texts[0]}
    return {**result, "completions": texts}


def _fields(completion: Completion, text: str, token: Callable[[int], str]) -> dict[str, Any]:
    fields = {"completion": text, "reason": completion.reason, "num_tokens": len(completion.ids)}
    # a key that the options do not request would be null in every line
    if completion.score is not None:
        fields["score"] = completion.score
    if completion.logprobs is not None:
        others = completion.alternatives or ((),) * len(completion.ids)
        fields["logprobs"] = [
            {
                "id": each,
                "token": token(each),
                "logprob": logprob,
                "top": [{"id": other, "token": token(other), "logprob": value} for other, value in alternatives],
            }
            for each, logprob, alternatives in zip(completion.ids, completion.logprobs, others, strict=True)
        ]
    return fields
