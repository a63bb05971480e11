"""Prompts from files to results: on any layout, interrupted, in a chat, and with lines that cannot be used."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.config.options import ConfigError
from megatron.data.indexed import DataError
from megatron.files import lock_file
from megatron.generate import run
from megatron.generation import jsonl
from megatron.generation.chat import TerminalChat
from megatron.generation.command import read_command
from megatron.generation.loading import load_model
from megatron.generation.model import InferenceModel
from megatron.generation.prompts import PromptEncoder
from megatron.generation.session import Session
from megatron.parallel.context import ParallelContext
from tests.generation.commands import generate, write_model
from tests.ranks import RankPools

pytest.importorskip("transformers")

ROWS: list[dict[str, Any]] = [
    {"prompt": "The quick", "id": "a", "rating": math.nan},
    {"messages": [{"role": "user", "content": "Hello"}], "id": "b"},
    {"prompt": "é 東京", "id": "c"},
    {"prompt": "x" * 40, "id": "d"},
]
SAMPLED = [
    "--max-new-tokens",
    "9",
    "--temperature",
    "0.8",
    "--seed",
    "4",
    "--stop",
    "q",
    "a",
    "-",
    "--num-samples",
    "2",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> InferenceModel:
    command, _ = read_command(["--load", str(folder), "--prompt", "a", "--device", "cpu"])
    return load_model(command.load, ParallelContext.single())


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def printed(model: InferenceModel, *arguments: str) -> tuple[str, str]:
    """What a command prints on stdout and stderr, with a model that is loaded already."""
    command, _ = read_command(["--load", str(model.origin.folder), *arguments])  # type: ignore[union-attr]
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        run(command, model)
    return out.getvalue(), errors.getvalue()


def test_results_are_the_same_on_every_layout(folder: Path, tmp_path: Path, ranks: RankPools) -> None:
    source = write_rows(tmp_path / "prompts.jsonl", ROWS)
    results = []
    for number, (size, flags) in enumerate(
        ((1, []), (2, ["--pipeline-model-parallel-size", "2"]), (2, ["--tensor-model-parallel-size", "2"]), (2, []))
    ):
        output = tmp_path / f"{number}.jsonl"
        line = ["--load", str(folder), "--input", str(source), "--output", str(output), *SAMPLED, *flags]
        ranks(size)(generate, line)
        results.append(output.read_text(encoding="utf-8"))
    rows = list(map(json.loads, results[0].splitlines()))
    assert [row["id"] for row in rows] == ["a", "b", "c", "d"]
    assert all(len(row["completions"]) == 2 for row in rows)
    texts = [text for row in rows for text in row["completions"]]
    assert len({text["completion"] for text in texts}) == len(texts)
    assert {text["reason"] for text in texts} == {"stop", "length"}
    assert not any(stop in text["completion"] for text in texts for stop in "qa-")
    assert results[1:] == results[:1] * 3


def test_an_interrupted_file_is_continued(model: InferenceModel, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "prompts.jsonl", [*ROWS, "not json", *ROWS])
    output = tmp_path / "out.jsonl"
    arguments = ["--input", str(source), "--output", str(output), "--max-new-tokens", "5", "--on-bad-line", "skip"]
    _, errors = printed(model, *arguments)
    assert "8 texts" in errors
    assert "1 bad lines left out" in errors
    assert f"left out: {source}, line 5: not JSON" in errors
    whole = output.read_bytes()
    with pytest.raises(DataError, match="exists already; choose another --output"):
        printed(model, *arguments)

    class Killed(Exception):
        pass

    def write(self: jsonl.ResultFile, result: dict[str, Any]) -> None:
        if written == 3:
            raise Killed
        counting(self, result)

    counting, written = jsonl.ResultFile.write, 0

    def counted(self: jsonl.ResultFile, result: dict[str, Any]) -> None:
        nonlocal written
        write(self, result)
        written += 1

    with patch.object(jsonl.ResultFile, "write", counted), pytest.raises(Killed):
        printed(model, *arguments, "--overwrite")
    with output.open("ab") as file:
        file.write(b'{"half a li')
    with pytest.raises(DataError, match="begun with max_new_tokens=5, not 6"):
        printed(model, *[word if word != "5" else "6" for word in arguments])
    newer = copy.copy(model)
    newer.origin = dataclasses.replace(model.origin, ckpt_step=9)  # type: ignore[type-var]
    with pytest.raises(DataError, match="begun with ckpt_step=None, not 9"):
        printed(newer, *arguments)
    with output.open("ab") as file:
        assert lock_file(file)
        with pytest.raises(DataError, match="another process is writing to --output"):
            printed(model, *arguments, "--overwrite")
    other = write_rows(tmp_path / "other.jsonl", ROWS[::-1])
    with pytest.raises(DataError, match="line 1 is not the result of this input's prompt 1"):
        printed(model, *[word if word != str(source) else str(other) for word in arguments])
    _, errors = printed(model, *arguments)
    assert "5 texts" in errors
    assert "beside 3 that were there" in errors
    assert output.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.jsonl", "out.jsonl", "prompts.jsonl"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("[1]", "a JSON list; it must be an object"),
        ({"text": "a"}, "it needs a prompt, or messages, and not both"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": 3}, "prompt is int; it must be a string"),
        ({"prompt": "a", "completion": "b"}, "it has the key 'completion', which the result needs"),
        ({"messages": []}, "messages must be a list of objects"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages end with the assistant's"),
    ],
)
def test_a_bad_line_is_named(model: InferenceModel, tmp_path: Path, row: Any, expected: str) -> None:
    source = write_rows(tmp_path / "prompts.jsonl", [ROWS[0], row])
    with pytest.raises(DataError, match=f"prompts.jsonl, line 2: {expected}"):
        printed(model, "--input", str(source))


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_byte_order_mark_is_no_part_of_a_prompt(model: InferenceModel, tmp_path: Path, suffix: str) -> None:
    source = tmp_path / f"prompts.{suffix}"
    source.write_text("The quick\n" if suffix == "txt" else '{"prompt": "The quick"}\n', encoding="utf-8-sig")
    shown, _ = printed(model, "--input", str(source), "--max-new-tokens", "1")
    assert json.loads(shown)["prompt"] == "The quick"
    source.write_bytes(b"\xff\xfea\n")
    with pytest.raises(DataError, match="line 1: byte 0 is not UTF-8"):
        printed(model, "--input", str(source))


def test_graphs_are_refused_before_a_text_is_begun(model: InferenceModel) -> None:
    out = io.StringIO()
    command, _ = read_command(["--load", ".", "--prompt", "The", "--use-graphs"])
    with contextlib.redirect_stdout(out), pytest.raises(ConfigError, match="use_graphs is for cuda"):
        run(command, model)
    assert out.getvalue() == ""


def test_text_is_printed_as_it_grows_or_by_prompt(model: InferenceModel) -> None:
    one, errors = printed(model, "--prompt", "The", "--max-new-tokens", "6")
    several, _ = printed(model, "--prompt", "The", "A", "--max-new-tokens", "6")
    assert one.startswith("The")
    assert several.startswith(f"--- prompt 1\n{one.strip()}")
    assert "\n--- prompt 2\nA" in several
    assert "prefill 3 tokens" in errors
    assert "memory of a rank: weights" in errors


def test_log_probabilities_and_beam_scores_are_in_the_results(model: InferenceModel, tmp_path: Path) -> None:
    source = str(write_rows(tmp_path / "prompts.jsonl", ROWS[:1]))
    out, _ = printed(model, "--input", source, "--max-new-tokens", "3", "--logprobs", "2")
    tokens = json.loads(out)["logprobs"]
    assert [len(token["top"]) for token in tokens] == [2, 2, 2]
    assert all(token["top"][0] == {name: token[name] for name in ("id", "token", "logprob")} for token in tokens)
    out, _ = printed(model, "--input", source, "--max-new-tokens", "3", "--num-beams", "3")
    assert json.loads(out)["score"] < 0


def test_half_a_surrogate_pair_in_a_row_is_repeated_and_its_file_continued(
    model: InferenceModel, tmp_path: Path
) -> None:
    rows: list[Any] = [r'{"prompt": "a", "note": "\ud83d", "\udc00": "é 🙂"}', {"prompt": "b"}]
    source, output = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "out.jsonl"
    line = ["--input", str(source), "--output", str(output), "--max-new-tokens", "3"]
    with patch.object(jsonl.ResultFile, "finish"):  # as if it had been interrupted here
        printed(model, *line)
    printed(model, *line)
    first, second = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    assert (first["note"], first["\udc00"], second["prompt"]) == ("\ud83d", "é 🙂", "b")


@pytest.mark.parametrize("flags", [[], ["--num-beams", "3", "--num-samples", "2"]])
def test_ids_are_in_the_results_on_request(model: InferenceModel, tmp_path: Path, flags: list[str]) -> None:
    source = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "ab", "id": 1}])
    out, _ = printed(model, "--input", str(source), "--max-new-tokens", "4", "--token-ids", "--ignore-eos", *flags)
    row = json.loads(out)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    assert (tokenizer.decode(row["prompt_ids"]), row["id"]) == ("ab", 1)
    texts = row["completions"] if flags else [row]
    assert len({tuple(text["ids"]) for text in texts}) == (2 if flags else 1)
    for text in texts:
        assert text["num_tokens"] == len(text["ids"]) == 4
        hidden = tokenizer.special_ids
        assert tokenizer.decode([each for each in text["ids"] if each not in hidden]) == text["completion"]
    with pytest.raises(ConfigError, match="--token-ids is for JSON lines"):
        read_command(["--load", str(source.parent), "--prompt", "a", "--token-ids"])


def test_ids_that_the_model_lacks_are_named(model: InferenceModel) -> None:
    with pytest.raises(ConfigError, match="stop_token_ids has the id 300, but the model's vocabulary has the ids 0"):
        printed(model, "--prompt", "a", "--stop-token-ids", "300")


def test_a_model_without_tokenizer_names_the_remedy(model: InferenceModel) -> None:
    with patch.object(model, "tokenizer", None), pytest.raises(DataError, match="name its file with --tokenizer-model"):
        printed(model, "--prompt", "a")


def test_the_end_of_a_turn_is_found_in_the_template(model: InferenceModel) -> None:
    encoder = PromptEncoder(model)
    end = encoder.tokenizer.token_id("<|end|>")  # type: ignore[attr-defined]
    assert encoder.final_ids(of_chats=True) == {256, end}
    assert encoder.final_ids(of_chats=False) == {256}
    asked = encoder.chat([{"role": "user", "content": "Hi"}])
    assert encoder.tokenizer.decode(asked) == "<|user|>Hi<|end|><|assistant|>"
    with pytest.raises(DataError, match="of which this tokenizer has no ids"):
        _ = PromptEncoder(model, "chatml").template


def chat_lines(*lines: str) -> Iterator[str]:
    yield from lines
    raise EOFError


def test_a_chat_keeps_its_messages(model: InferenceModel) -> None:
    command, _ = read_command(["--load", ".", "--chat", "--max-new-tokens", "4"])
    session = Session(model, command)
    chat = TerminalChat(session)
    lines = chat_lines("Hi", "/what", "/system", "", "again", "/system Be brief.", "new", "/clear")
    requests = []
    ask = session.generate

    def note(found: Any, *arguments: Any) -> Any:
        requests.append(session.encoder.tokenizer.decode(found[0].prompt))
        return ask(found, *arguments)

    out = io.StringIO()
    with (
        patch("builtins.input", lambda prompt: next(lines)),
        patch.object(session, "generate", note),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        chat.run()
    assert requests[0] == "<|user|>Hi<|end|><|assistant|>"
    assert requests[1].startswith(requests[0])
    assert requests[1].endswith("<|end|><|user|>again<|end|><|assistant|>")
    assert requests[2] == "<|system|>Be brief.<|end|><|user|>new<|end|><|assistant|>"
    assert 5 <= session.statistics.kept_tokens <= 5 + 3  # the first prompt, and what of the answer is text again
    assert "/what is not a command" in out.getvalue()
    assert "give the system message behind /system" in out.getvalue()


def test_an_interrupt_ends_the_answer_alone(model: InferenceModel) -> None:
    command, _ = read_command(["--load", ".", "--chat", "--max-new-tokens", "50"])
    session = Session(model, command)
    request = TerminalChat(session)._session.encoder.chat([{"role": "user", "content": "Hi"}])
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        session.is_interrupted = len(pieces) == 3

    (done,) = session.generate([jsonl.Request(0, request)], show)
    assert done.reason == "interrupted"
    assert 3 <= len(done.ids) <= 4
