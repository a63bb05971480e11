"""tools/model_config.py and preset_of: a folder of transformers as the preset of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from megatron.checkpoint.format import CheckpointError
from megatron.cli import model_config
from megatron.options.config import Config
from megatron.options.model import NOT_COMPUTED
from megatron.options.stored import from_dict
from megatron.settings.command_line import load_config
from megatron.weights.huggingface_config import config_of, differences, preset_of
from tests.models.test_hf_logits import CASES


def write(name: str, folder: Path, **changed: object) -> Path:
    """config.json of a model of transformers. It alone."""
    folder.mkdir(exist_ok=True)
    content = json.loads(CASES[name]().theirs().config.to_json_string()) | changed
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def theirs(folder: Path) -> Config:
    return config_of(json.loads((folder / "config.json").read_text()), folder)


@pytest.mark.parametrize("name", list(CASES))
def test_the_preset_is_the_model_of_the_folder(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(name, tmp_path / "hf")
    assert model_config.main(["--load", str(folder)]) == 0
    text = capsys.readouterr().out
    (tmp_path / "model.yaml").write_text(text)
    config = load_config(f"--config {tmp_path / 'model.yaml'} --seq-length 24 --data-path x --train-iters 1".split(), 1)
    assert config.model == theirs(folder).model
    assert differences(config, theirs(folder)) == []
    assert yaml.safe_load(text) == preset_of(folder)
    assert not config.training.bf16
    above = [line for line in text.splitlines() if not line.startswith("  # ")]
    assert len(above) == 3 + sum(map(len, preset_of(folder).values()))
    assert "  # Width of the residual stream.\n  hidden_size:" in text


@pytest.mark.parametrize(("stored", "bf16"), [("float32", False), ("bfloat16", True), ("float16", True), (None, False)])
def test_16_bit_weights_are_trained_in_bf16(stored: str | None, bf16: bool, tmp_path: Path) -> None:
    for field in ("dtype", "torch_dtype"):
        folder = write("llama_gqa", tmp_path / field)
        content = json.loads((folder / "config.json").read_text())
        content.pop("dtype", None)
        (folder / "config.json").write_text(json.dumps(content | {field: stored}))
        config = from_dict(preset_of(folder))
        assert (config.training.bf16, config.training.fp16) == (bf16, False)


def test_tokens_may_be_added_but_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write("llama_gqa", tmp_path / "hf")
    assert from_dict(preset_of(folder, 130)).model.vocab_size == 130
    assert model_config.main(["--load", str(folder), "--vocab-size", "100"]) == 1
    assert "vocab_size=100 is below the 123" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="give 123 or more"):
        preset_of(folder, 122)


def test_other_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert model_config.main(["--load", str(tmp_path)]) == 1
    assert "config.json is missing" in capsys.readouterr().err
    write("llama_gqa", tmp_path, model_type="mamba")
    assert model_config.main(["--load", str(tmp_path)]) == 1
    assert "model_type='mamba'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--num-layers 3 --norm-epsilon 1e-5", ["num_layers=3 here, 2 there", "norm_epsilon=1e-05 here, 1e-06 there"]),
        ("--hidden-size 128", ["hidden_size=128 here, 64 there", "kv_channels=16 here, 8 there"]),
        ("--vocab-size 122", ["vocab_size=122 here, 123 there"]),
        ("--vocab-size 124", []),
        ("--rotary-base 5e5", ["rotary_base=500000.0 here, 10000.0 there"]),
        ("--rope-scaling-factor 8", ["rope_scaling_factor=8.0 here, None there"]),
        ("--num-query-groups 4", ["num_query_groups=4 here, 2 there"]),
        ("--ffn-hidden-size none", ["ffn_hidden_size=256 here, 96 there"]),
        ("--kv-channels 16", ["kv_channels=16 here, 8 there"]),
        ("--no-untie-embeddings-and-output-weights", ["untie_embeddings_and_output_weights=False here, True there"]),
        ("--hidden-dropout 0.1 --init-method-std 0.1 --make-vocab-size-divisible-by 1 --attention-backend sdpa", []),
        ("--max-position-embeddings 24", []),
    ],
)
def test_every_difference_that_changes_the_model_is_named(flags: str, expected: list[str], tmp_path: Path) -> None:
    folder = write("llama_gqa", tmp_path / "hf")
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(preset_of(folder)))
    words = f"--config {tmp_path / 'model.yaml'} --data-path x --train-iters 1 {flags}".split()
    assert differences(load_config(words, 1), theirs(folder)) == expected


def test_a_position_table_must_have_as_many_rows(tmp_path: Path) -> None:
    folder = write("gpt2", tmp_path / "hf")
    preset = preset_of(folder)
    preset["training"]["seq_length"] = 24
    assert differences(from_dict(preset), theirs(folder)) == []
    del preset["model"]["max_position_embeddings"]  # then it has seq_length rows
    assert differences(from_dict(preset), theirs(folder)) == ["max_position_embeddings=24 here, 40 there"]


def test_no_option_of_the_model_is_forgotten() -> None:
    """A new one either changes what is computed, and is compared and printed, or is the run's own."""
    from megatron.weights import huggingface_config as module

    own = {*module._OF_THE_RUN, "hidden_dropout", "attention_dropout", "init_method_std", "moe_aux_loss_coeff"}
    assert own == NOT_COMPUTED
