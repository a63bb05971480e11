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
import torch

from megatron.data.chat.template_presets import PRESETS
from megatron.data.index.indexed import DataError
from megatron.generate import run
from megatron.generation import jsonl
from megatron.generation.chat import TerminalChat
from megatron.generation.chooser import BeamSearch
from megatron.generation.loading import load_model
from megatron.generation.model import InferenceModel
from megatron.generation.options import read_command
from megatron.generation.prompts import PromptEncoder
from megatron.generation.requests import Request
from megatron.generation.sampling import Choice
from megatron.generation.session import Session
from megatron.options.config import ConfigError
from megatron.parallel.context import ParallelContext
from megatron.runtime.files import lock_file
from tests.generation.commands import TEMPLATE, generate, write_model
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
    for option, value in (("weights", "ema"), ("eod_token", "a")):
        with pytest.raises(DataError, match=f"begun with {option}=.*, not {value}"):
            printed(model, *arguments, f"--{option}", value)
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
    assert encoder.ends(of_chats=True).ids == {256, end}
    assert encoder.ends(of_chats=False).ids == {256}
    asked = encoder.chat([{"role": "user", "content": "Hi"}])
    assert encoder.tokenizer.decode(asked) == "<|user|>Hi<|end|><|assistant|>"
    with pytest.raises(DataError, match=r"of which this tokenizer has no ids, and <\|im_end\|> ends its answers"):
        _ = PromptEncoder(model, "chatml").template


@pytest.mark.parametrize("is_own", [True, False], ids=["its own", "given"])
def test_a_template_whose_markers_are_plain_text_is_used(
    tmp_path: Path, is_own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As TinyLlama's: <|user|> and <|assistant|> are text, and </s> ends a turn."""
    from transformers import AutoTokenizer

    write_model(tmp_path, special=("</s>",))
    template = PRESETS["zephyr"].template
    (tmp_path / "chat_template.jinja").write_text(template if is_own else TEMPLATE)
    command, _ = read_command(["--load", str(tmp_path), "--prompt", "a", "--device", "cpu"])
    encoder = PromptEncoder(load_model(command.load, ParallelContext.single()), None if is_own else "zephyr")
    chat = [{"role": "user", "content": "Hi"}]
    expected: Any = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        chat, chat_template=template, add_generation_prompt=True, return_dict=True
    )
    assert list(encoder.chat(chat)) == expected["input_ids"]
    assert "<|user|>" in encoder.tokenizer.decode(encoder.chat(chat))
    assert encoder.ends(of_chats=True).ids == {256}
    assert encoder.ends(of_chats=True).strings == ()
    assert ("are read as plain text" in caplog.text) is not is_own


def test_a_marker_of_plain_text_ends_an_answer(tmp_path: Path) -> None:
    """A model whose own chatml is not in its tokenizer: an answer ends where the text of <|im_end|> begins."""
    write_model(tmp_path, special=("</s>",))
    (tmp_path / "chat_template.jinja").write_text(PRESETS["chatml"].template)
    command, _ = read_command(["--load", str(tmp_path), "--prompt", "Hi", "--as-chat", "--device", "cpu"])
    session = Session(load_model(command.load, ParallelContext.single()), command)
    tokenizer = session.encoder.tokenizer
    request = Request(0, session.encoder.chat([{"role": "user", "content": "Hi"}]), is_chat=True)
    answer = tokenizer.encode("ok<|im_end|>\n<|im_start|>user")
    bias = iter(answer)

    def choose(self: Any, logits_BV: Any, rows: Any) -> Choice:
        return Choice(torch.tensor([next(bias)] * len(rows)))

    with patch("megatron.generation.sampling.TokenSampler.choose", choose):
        (done,) = session.generate([request])
    assert (session.text_of(request, done), done.reason) == ("ok", "stop")
    assert len(done.ids) == len("ok<|im_end|>")


def test_a_marker_of_plain_text_ends_beams(tmp_path: Path) -> None:
    """Each beam's own text is read, whichever beam it continues; the best one says more than the marker at once."""
    write_model(tmp_path, special=("</s>",))
    (tmp_path / "chat_template.jinja").write_text(PRESETS["chatml"].template)
    words = ["--load", str(tmp_path), "--prompt", "Hi", "--as-chat", "--device", "cpu", "--num-beams", "3"]
    command, _ = read_command([*words, "--num-samples", "3", "--max-new-tokens", "20"])
    session = Session(load_model(command.load, ParallelContext.single()), command)
    encode, decode = session.encoder.tokenizer.encode, session.encoder.tokenizer.decode
    request = Request(0, session.encoder.chat([{"role": "user", "content": "Hi"}]), is_chat=True)
    answers = [encode(f"{answer}<|im_end|>\n<|im_start|>user") for answer in ("ok", "or")]
    search = BeamSearch.choose

    def choose(self: BeamSearch, logits_BV: Any, rows: Any) -> Any:
        """One of the answers goes on from each text that is its beginning."""
        logits = torch.full_like(logits_BV, -10.0)
        (sequence,) = self._sequences.values()
        for row, text in enumerate(sequence.texts):
            for rank, answer in enumerate(answers):
                if tuple(answer[: len(text)]) == text and len(text) < len(answer):
                    logits[row, answer[len(text)]] = 10.0 - rank
        return search(self, logits, rows)

    with patch.object(BeamSearch, "choose", choose):
        done = list(session.generate([request]))
    assert [(session.text_of(request, each), each.reason) for each in done[:2]] == [("ok", "stop"), ("or", "stop")]
    assert [decode(list(each.ids)) for each in done[:2]] == ["ok<|im_end|>", "or<|im_end|>"]


def test_an_answer_to_messages_ends_with_its_turn_whatever_is_beside_it(model: InferenceModel, tmp_path: Path) -> None:
    """Rows of messages without --as-chat, alone and among texts, which go on there."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
    end = PromptEncoder(model).tokenizer.token_id("<|end|>")  # type: ignore[attr-defined]
    for rows in ([chat], [chat, {"prompt": "a"}, chat]):
        source = write_rows(tmp_path / "prompts.jsonl", rows)
        out, _ = printed(model, "--input", str(source), "--max-new-tokens", "4", "--logit-bias", f"{end}=1000")
        found = [json.loads(line) for line in out.splitlines()]
        assert [(each["reason"], each["num_tokens"]) for each in found] == [
            ("stop", 1) if "messages" in row else ("length", 4) for row in rows
        ]


def test_texts_that_end_at_the_last_learned_position_are_counted(tmp_path: Path) -> None:
    write_model(tmp_path, "gpt2")
    command, _ = read_command(["--load", str(tmp_path), "--prompt", "a", "--device", "cpu"])
    gpt2 = load_model(command.load, ParallelContext.single())
    words = ("--prompt", "x" * 30, "abc", "--max-new-tokens", "6", "--ignore-eos")
    assert "1 text ended before max_new_tokens=6: the model has 32 learned positions" in printed(gpt2, *words)[1]
    assert "learned positions" not in printed(gpt2, *words[:1], "abc", *words[3:])[1]
    figures = ("--benchmark", "--benchmark-batch-sizes", "1", "--benchmark-prompt-lengths", "30", "--max-new-tokens")
    assert "  30  " in printed(gpt2, *figures, "3")[0]
    with pytest.raises(ConfigError, match="prompts of 30 tokens with max_new_tokens=4 need 33 positions"):
        printed(gpt2, *figures, "4")
    chat, _ = read_command(["--load", str(tmp_path), "--chat", "--ignore-eos"])
    lines = chat_lines("Hi there")
    out = io.StringIO()
    with (
        patch("builtins.input", lambda prompt: next(lines)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        TerminalChat(Session(gpt2, chat)).run()
    assert "[the model's 32 positions are full; /clear starts a new chat]" in out.getvalue()


def chat_lines(*lines: str) -> Iterator[str]:
    yield from lines
    raise EOFError


def test_a_chat_keeps_its_messages(model: InferenceModel) -> None:
    command, _ = read_command(["--load", ".", "--chat", "--max-new-tokens", "4"])
    session = Session(model, command)
    chat = TerminalChat(session)
    lines = chat_lines("Hi", "/what", "/system", "", "again", "/system Be brief.", "new", "/clear")
    requests = []
    ask = session.show

    def note(request: Request, *arguments: Any) -> Any:
        requests.append(session.encoder.tokenizer.decode(request.prompt))
        return ask(request, *arguments)

    out = io.StringIO()
    with (
        patch("builtins.input", lambda prompt: next(lines)),
        patch.object(session, "show", note),
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


@pytest.mark.parametrize("minimum", ["0", "40"])
def test_an_interrupt_ends_the_answer_alone(model: InferenceModel, minimum: str) -> None:
    command, _ = read_command(["--load", ".", "--chat", "--max-new-tokens", "50", "--min-new-tokens", minimum])
    session = Session(model, command)
    request = TerminalChat(session)._session.encoder.chat([{"role": "user", "content": "Hi"}])
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        session.is_interrupted = len(pieces) == 3

    (done,) = session.show(Request(0, request), show)
    assert done.reason == "interrupted"
    assert 3 <= len(done.ids) <= 4
