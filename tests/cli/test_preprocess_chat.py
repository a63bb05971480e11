"""tools/preprocess_chat.py end to end: summary, printed samples, and messages about wrong flags."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.data import preprocess_chat
from megatron.data.index.indexed import IndexedDataset
from tests.data.chat.test_conversation import bytes_json, turn

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(bytes_json(("</s>", "<|im_start|>", "<|im_end|>")))
    return path


def chats(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def preprocess(*arguments: str | Path) -> int:
    return preprocess_chat.main([str(argument) for argument in arguments])


def test_the_summary_counts_everything(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": turn("a", "b")},
        {"messages": turn("a", "b" * 500)},
        {"messages": []},
        {"messages": turn("a")},
    ]
    source = chats(tmp_path / "in.jsonl", *rows)
    flags = ("--chat-template", "vicuna", "--max-length", "100", "--skip-bad-rows", "--workers", "2")
    prefix = tmp_path / "new" / "chats"
    assert preprocess("--input", source, "--tokenizer-model", tokenizer, "--output-prefix", prefix, *flags) == 0
    said = capsys.readouterr()
    table = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in said.out.splitlines() if "  " in line)
    num_tokens = IndexedDataset(prefix).num_tokens
    assert table["rows read"] == "4"
    assert table["samples"] == "1"
    assert table["tokens"] == str(num_tokens)
    assert table["trained tokens"] == f"3 ({300 / num_tokens:.1f} %)"
    assert table["dropped, longer than 100 tokens"] == "1"
    assert table["bad, no messages"] == "1"
    assert table["bad, nothing trained"] == "1"
    assert table["lengths"].endswith(f"100 %: {num_tokens}")
    assert f"skipped {source}:3: 'messages' is empty" in said.err
    assert said.out.splitlines()[-1].endswith(f"{prefix}.bin, {prefix}_loss_mask.bin")


def test_samples_are_shown_with_brackets_where_there_is_no_terminal(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [{"messages": []}, {"messages": turn("one?", "1")}, {"messages": turn("two?", "2")}]
    source = chats(tmp_path / "in.jsonl", *rows)
    flags = ("--chat-template", "chatml", "--show", "1")
    assert preprocess("--input", source, "--tokenizer-model", tokenizer, *flags) == 0
    said = capsys.readouterr().out
    assert "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n\u27e61<|im_end|>\u27e7\n" in said
    assert "two?" not in said
    chats(source, rows[0])
    assert preprocess("--input", source, "--tokenizer-model", tokenizer, *flags) == 1
    assert f"error: {source}:1: 'messages' is empty" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "tokenizer.json"]


def test_markers_that_are_not_tokens_are_named(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(tokenizer.read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<|im_end|>"]
    content["model"]["vocab"].pop("<|im_end|>", None)
    tokenizer.write_text(json.dumps(content))
    source = chats(tmp_path / "in.jsonl", {"messages": turn("a", "b")})
    flags = ("--input", source, "--tokenizer-model", tokenizer, "--chat-template", "chatml", "--show", "1")
    prefix = ("--output-prefix", tmp_path / "chats")
    assert preprocess(*flags, *prefix) == 0
    said = capsys.readouterr().out
    assert "markers of the template that are not tokens: <|im_end|>; --add-special-tokens" in said
    assert re.search(r"marker written as text, <\|im_end\|> +1\n", said)
    added = ("--add-special-tokens", "--tokenizer-output", tmp_path / "added", "--overwrite")
    assert preprocess(*flags, *prefix, *added) == 0
    said = capsys.readouterr().out
    assert "markers of" not in said
    assert "marker written" not in said


def test_samples_are_coloured_on_a_terminal(tmp_path: Path, tokenizer: Path) -> None:
    source = chats(tmp_path / "in.jsonl", {"messages": turn("one?", "1\n2")})
    command = [sys.executable, str(REPOSITORY / "tools" / "preprocess_chat.py"), "--input", str(source)]
    command += ["--tokenizer-model", str(tokenizer), "--chat-template", "chatml", "--show", "1"]
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        content = b""
        while True:
            try:
                piece = os.read(ours, 1 << 12)
            except OSError:  # Linux's end of a terminal
                break
            if not piece:
                break
            content += piece
    os.close(ours)
    assert process.returncode == 0
    shown = content.decode().replace("\r\n", "\n")
    # each line ends its own colour
    assert "\033[1;32m1\033[0m\n\033[1;32m2<|im_end|>\033[0m" in shown
    assert "\033[2mone?<|im_end|>\033[0m" in shown


def test_a_long_sample_is_shown_in_part(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = chats(tmp_path / "in.jsonl", {"messages": turn("one?", "\n".join(map(str, range(500))))})
    assert (
        preprocess("--input", source, "--tokenizer-model", tokenizer, "--chat-template", "chatml", "--show", "1") == 0
    )
    assert re.search(r"\n\.\.\. 4\d\d lines \.\.\.\n", capsys.readouterr().out)


def test_an_error_is_one_line_and_status_1(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = chats(tmp_path / "in.jsonl", {"messages": turn("a")})
    flags = ("--chat-template", "chatml", "--output-prefix", tmp_path / "out")
    assert preprocess("--input", source, "--tokenizer-model", tokenizer, *flags) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {source}:1: no token of the conversation is trained")
    assert len(said.splitlines()) == 1
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "tokenizer.json"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--output-prefix is missing"),
        (("--show", "-1"), "--show must not be negative"),
        (("--output-prefix", "x", "--max-length", "0"), "--max-length must be at least 1"),
    ],
)
def test_wrong_flags_are_reported(flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        preprocess("--input", "x.jsonl", "--tokenizer-model", "x", *flags)
    assert said in capsys.readouterr().err


def test_a_preparation_loads_nothing_of_trainings(tmp_path: Path, tokenizer: Path) -> None:
    # pydantic and the records of devices were a tenth of the start
    code = (
        "import sys\nfrom megatron.cli.data import preprocess_chat\nassert preprocess_chat.main(sys.argv[1:]) == 0\n"
        "print({'torch', 'pydantic', 'megatron.runtime.devices'} & set(sys.modules))"
    )
    source = chats(tmp_path / "in.jsonl", {"messages": turn("a", "b")})
    flags: list[str | Path] = ["--input", source, "--output-prefix", tmp_path / "out", "--tokenizer-model", tokenizer]
    command = [sys.executable, "-c", code, *flags, "--chat-template", "vicuna"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert run.stdout.endswith("set()\n")


def test_help_answers_without_loading_anything_heavy() -> None:
    code = (
        "import sys\nfrom megatron.cli.data import preprocess_chat\ntry:\n    preprocess_chat.main(['--help'])\n"
        "except SystemExit:\n    print({'numpy', 'torch', 'tokenizers', 'jinja2'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert run.stdout.endswith("set()\n")
