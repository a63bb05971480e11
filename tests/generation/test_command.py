"""The command line of megatron.generate: other programs' flags, contradictions, and what starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.generation.options import OTHER_NAMES, REFUSED, WITHOUT_EFFECT, build_generate_parser, read_command
from megatron.options.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def test_the_seeds_command_is_understood(folder: str) -> None:
    line = (
        "--use_hpu_graphs --use_kv_cache --batch_size 1 --bf16 --max_new_tokens 100 --do_sample --reuse_cache --prompt"
    )
    command, notes = read_command(["--model_name_or_path", folder, *line.split(), "Here is my prompt"])
    assert command.load.load == folder
    assert command.load.precision == "bf16"
    assert command.prompts.prompt == ("Here is my prompt",)
    assert (command.prompts.batch_size, command.prompts.use_graphs) == (1, True)
    assert (command.generation.max_new_tokens, command.generation.temperature) == (100, 1.0)
    assert [note.split()[0] for note in notes] == ["--use-kv-cache", "--reuse-cache"]


def test_a_peft_model_is_loaded_on_its_base(folder: str) -> None:
    command, _ = read_command(["--model_name_or_path", "base", "--peft_model", folder, "--prompt", "a"])
    assert (command.load.load, command.load.lora_base) == (folder, "base")


def test_stop_strings_may_be_escaped(folder: str) -> None:
    command, _ = read_command(["--load", folder, "--prompt", "a", "--stop", r"\n\n", "END"])
    assert command.generation.stop == ("\n\n", "END")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--prompt a", "--load is missing"),
        ("--load none --prompt a", "--load none does not exist"),
        ("--load . ", "nothing to continue is given"),
        ("--load . --prompt a --chat", "--prompt and --chat exclude each other"),
        ("--load . --input none.jsonl", "--input none.jsonl is not a file"),
        ("--load . --prompt a --output none/out.jsonl", "the folder does not exist"),
        ("--load . --chat --output out.jsonl", "--output out.jsonl is for --prompt and --input"),
        ("--load . --prompt a --logprobs 2", "--logprobs 2 is for JSON lines; give --output FILE or --input FILE"),
        ("--load . --chat --logprobs 2", "--logprobs 2 is for JSON lines"),
        ("--load . --prompt a --overwrite", "--overwrite has no effect without --output"),
        ("--load . --prompt a --system be", "add --as-chat"),
        ("--load . --chat --num-beams 2", "--num-beams is not for --chat"),
        ("--load . --prompt a --dataset_name x", "--dataset-name is not supported: only files are read"),
        ("--load . --prompt a --top-p 2", "--top-p 2: input should be less than or equal to 1"),
        ("--load . --prompt a --context_parallel_size 2", "is not supported: copies of the model share the texts"),
        ("--load . --prompt a --batch-sise 2", "did you mean --batch-size?"),
    ],
)
def test_wrong_commands_are_named(line: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_command(line.split())
    assert any(expected in fault for fault in raised.value.faults), raised.value.faults


def test_an_empty_prompt_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="--prompt has an empty text"):
        read_command(["--load", folder, "--prompt", ""])


def test_the_page_lists_every_flag_of_other_programs() -> None:
    page = (ROOT / "docs" / "guides" / "generation.md").read_text(encoding="utf-8")
    for name in (*OTHER_NAMES, *WITHOUT_EFFECT, *REFUSED):
        assert f"`{name.replace('-', '_').replace('__', '--')}`" in page, name


def test_help_has_a_line_for_every_flag_and_fits() -> None:
    text = build_generate_parser().format_help()
    assert max(map(len, text.splitlines())) <= 100
    assert "--top-p" in text
