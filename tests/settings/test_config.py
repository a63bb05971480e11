"""Config from presets and the command line; every error is reported at once, with the rule and the remedy."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.options.config import (
    Config,
    ConfigError,
    ModelConfig,
    TrainingConfig,
    batch_sizes,
    option_doc,
    options,
    sections,
)
from megatron.options.data import parse_split
from megatron.options.flags import flag
from megatron.options.stored import from_dict, read_preset, to_yaml
from megatron.settings.command_line import load_config, parse_arguments
from megatron.settings.parser import build_parser, help_text
from tests.settings.faults import VALID, faults_of

ROOT = Path(__file__).resolve().parents[2]


def preset_file(folder: Path, text: str) -> str:
    path = folder / "given.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


# ---------------------------------------------------------------------------------------------------------------------
# What is accepted


def test_command_line_overrides_preset_overrides_default(tmp_path: Path) -> None:
    preset = preset_file(tmp_path, "model: {num_layers: 6, hidden_size: 96}")
    model = load_config([*VALID, "--config", preset, "--num-layers", "8"], 1).model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (8, 96, 4)


def test_command_line_fills_an_empty_section_of_a_preset(tmp_path: Path) -> None:
    preset = preset_file(tmp_path, "model:\noptimizer:\n")
    assert load_config([*VALID, "--config", preset, "--num-layers", "8"], 1).model.num_layers == 8


def test_a_switch_is_no_number() -> None:
    # pydantic alone takes True for 1
    tree = {
        "model": {"num_layers": True, "attention_window_pattern": [1, False], "rotary_percent": True},
        "optimizer": {"lr": True, "zero_stage": True},
        "training": {"seed": 3.0, "bf16": True},
        "logging": {"timing_log_level": False},
    }
    with pytest.raises(ConfigError) as raised:
        from_dict(tree)
    assert {fault.split(":")[0] for fault in raised.value.faults} == {
        "model.num_layers=True",
        "model.attention_window_pattern=1 False",
        "model.rotary_percent=True",
        "optimizer.lr=True",
        "optimizer.zero_stage=True",
        "logging.timing_log_level=False",
    }
    assert "optimizer.lr=True: must be a number, not true" in raised.value.faults


def test_a_later_preset_wins_option_by_option(tmp_path: Path) -> None:
    model, recipe = tmp_path / "model.yaml", tmp_path / "recipe.yaml"
    model.write_text("model: {num_layers: 6}\ntraining: {train_iters: 9, seed: 5}\noptimizer: {lr: 1.0e-3}\n")
    recipe.write_text("model:\ntraining: {train_iters: null, train_samples: 80}\noptimizer: {min_lr: 1.0e-4}\n")
    words = [*("--data-path", "c", "--seed", "7"), "--config", str(model), "--config", str(recipe)]
    config = load_config(words, 1)
    assert (config.model.num_layers, config.training.seed) == (6, 7)
    assert (config.training.train_iters, config.training.train_samples) == (None, 80)
    assert (config.optimizer.lr, config.optimizer.min_lr) == (1e-3, 1e-4)
    # named again, it is laid on top
    assert load_config([*words, "--train-samples", "none", "--config", str(model)], 1).training.train_iters == 9


def test_a_faulty_section_is_named_whichever_preset_holds_it(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("model: 3")
    (tmp_path / "right.yaml").write_text("model: {num_layers: 6}")
    wrong, right = (["--config", str(tmp_path / f"{name}.yaml")] for name in ("wrong", "right"))
    assert "section 'model' is 3; it must be a mapping of options" in faults_of([*VALID, *right, *wrong])


def test_last_flag_wins() -> None:
    assert load_config([*VALID, "--lr", "1e-3", "--lr", "2e-3"], 1).optimizer.lr == 2e-3


@pytest.mark.parametrize(
    "words", [["--num-layers", "8"], ["--num_layers", "8"], ["--num-layers=8"], ["--num_layers=8"]]
)
def test_flags_are_spelled_in_dashes_or_underscores(words: list[str]) -> None:
    assert load_config([*VALID, *words], 1).model.num_layers == 8


def test_underscores_in_values_are_kept() -> None:
    config = load_config(["--train_iters=100", "--data_path", "my_corpus_text", "--save=out_dir/a_b"], 1)
    assert (config.data.data_path, config.checkpoint.save) == (("my_corpus_text",), "out_dir/a_b")


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--use-fused-rmsnorm", True),
        ("--use-fused-rmsnorm true", True),
        ("--use-fused-rmsnorm=1", True),
        ("--use-fused-rmsnorm 0", False),
        ("--use-fused-rmsnorm=False", False),
        ("--use-fused-rmsnorm off", False),
        ("--no-use-fused-rmsnorm", False),
        ("--no_use_fused_rmsnorm", False),
        ("--use-fused-rmsnorm --no-use-fused-rmsnorm", False),
    ],
)
def test_bool_flags(words: str, value: bool) -> None:
    assert load_config([*VALID, *words.split()], 1).model.use_fused_rmsnorm is value


def test_a_bool_flag_does_not_swallow_the_flag_after_it() -> None:
    config = load_config([*VALID, "--bf16", "--lr", "1e-3", "--no-pipeline-parallel"], 1)
    assert (config.training.bf16, config.optimizer.lr, config.parallel.no_pipeline_parallel) == (True, 1e-3, True)


def test_none_unsets_what_can_be_unset(tmp_path: Path) -> None:
    preset = preset_file(
        tmp_path,
        "training: {rampup_batch_size: [2, 2, 100], global_batch_size: 8, train_samples: 800}\n"
        "model: {ffn_hidden_size: 100}\ncheckpoint: {save: out}\n",
    )
    words = "--data-path c --rampup-batch-size none --ffn-hidden-size none --save none".split()
    config = load_config([*words, "--config", preset], 1)
    assert (config.training.rampup_batch_size, config.model.ffn_hidden_size, config.checkpoint.save) == (None,) * 3


def test_none_is_a_value_where_nothing_can_be_unset() -> None:
    assert load_config([*VALID, "--recompute-granularity", "none"], 1).training.recompute_granularity == "none"
    assert "num_layers='none'" in faults_of([*VALID, "--num-layers", "none"])[0]


@pytest.mark.parametrize("written", ["[16, 16, 500]", "16 16 500", "['16', '16', '500']"])
def test_sequences_in_yaml_are_lists_or_words(tmp_path: Path, written: str) -> None:
    preset = preset_file(tmp_path, f"training: {{rampup_batch_size: {written}}}")
    config, _ = parse_arguments(["--config", preset])
    assert config.training.rampup_batch_size == (16, 16, 500)


@pytest.mark.parametrize("written", ["[0.3, a, 0.7, b]", "0.3 a 0.7 b"])
def test_a_blend_in_yaml_is_a_list_or_words(tmp_path: Path, written: str) -> None:
    preset = preset_file(tmp_path, f"data: {{data_path: {written}}}")
    assert parse_arguments(["--config", preset])[0].data.data_path == ("0.3", "a", "0.7", "b")


def test_numbers_in_yaml_may_lack_the_dot_that_yaml_wants(tmp_path: Path) -> None:
    # to YAML 1.1, 1e-4 is a string
    config, _ = parse_arguments(["--config", preset_file(tmp_path, "optimizer: {lr: 1e-4}\ndata: {split: 100}")])
    assert (config.optimizer.lr, config.data.split) == (1e-4, "100")


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.num_layers = 3  # type: ignore[misc]


def test_world_size_comes_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert load_config([*VALID, "--tensor-model-parallel-size", "4"]).parallel.tensor_model_parallel_size == 4
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="does not divide the 2 ranks"):
        load_config([*VALID, "--tensor-model-parallel-size", "4"])


def test_derived_values() -> None:
    model = ModelConfig(hidden_size=64, num_attention_heads=4, vocab_size=1000)
    assert (model.ffn_size, model.num_kv_heads, model.head_size) == (256, 4, 16)
    assert [model.padded_vocab_size(tp) for tp in (1, 2, 4, 8)] == [1024, 1024, 1024, 1024]
    assert model.padded_vocab_size(16) == 2048
    model = ModelConfig(ffn_hidden_size=100, num_query_groups=2, kv_channels=32)
    assert (model.ffn_size, model.num_kv_heads, model.head_size) == (100, 2, 32)


@pytest.mark.parametrize(
    ("words", "pipeline", "stage"),
    [
        ("", True, 0),
        ("--zero-stage 1", True, 1),
        ("--bf16", True, 1),
        ("--fp16", True, 1),
        ("--zero-stage 2", False, 2),
        ("--zero-stage 3 --bf16", False, 3),
        ("--zero-stage 1 --offload-optimizer", False, 1),
        ("--no-pipeline-parallel", False, 0),
    ],
)
def test_engine_follows_from_zero_offload_and_precision(words: str, pipeline: bool, stage: int) -> None:
    config = load_config([*VALID, *words.split()], 1)
    assert (config.uses_pipeline, config.effective_zero_stage) == (pipeline, stage)


def test_batch_sizes_of_a_ramp_up() -> None:
    assert batch_sizes(TrainingConfig(global_batch_size=8)) == [8]
    assert batch_sizes(TrainingConfig(global_batch_size=8, rampup_batch_size=(2, 2, 100))) == [2, 4, 6, 8]
    assert batch_sizes(TrainingConfig(global_batch_size=8, rampup_batch_size=(8, 2, 100))) == [8]


def test_split_shares_sum_to_one() -> None:
    assert parse_split("949,50,1") == (0.949, 0.05, 0.001)
    assert parse_split("8/1/1") == (0.8, 0.1, 0.1)
    assert parse_split("100") == (1.0, 0.0, 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# What is printed


def test_print_config_round_trips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *("--config", "bloom_13b", "--data-path", "0.3", "a", "0.7", "b", "--rampup-batch-size", "16", "16", "5000000"),
        *("--adam-eps", "1e-9", "--no-use-fused-rmsnorm", "--save", "none"),
    ]
    with pytest.raises(SystemExit) as caught:
        load_config([*words, "--print-config"], 1)
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    again = load_config(["--config", preset_file(tmp_path, printed)], 1)
    assert again == load_config(words, 1)
    assert to_yaml(again) == printed


def test_print_config_sets_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config([*VALID, "--print-config"], 1)
    printed = yaml.safe_load(capsys.readouterr().out)
    assert [name for section in printed.values() for name in section] == list(options())


def test_print_config_serves_a_layout_that_does_not_fit_this_launch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(["--tensor-model-parallel-size", "4", "--print-config"], 1)
    assert yaml.safe_load(capsys.readouterr().out)["parallel"]["tensor_model_parallel_size"] == 4


def test_the_dict_of_a_config_is_plain() -> None:
    config = from_dict({"data": {"data_path": ["a"]}})
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_every_option_is_documented_and_unique() -> None:
    assert len(options()) == sum(len(dataclasses.fields(cls)) for cls in sections().values())
    assert [
        name for name, (section, _) in options().items() if not option_doc(section, name).endswith((".", "..."))
    ] == []


@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_the_terminal_and_shows_every_default(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = build_parser().format_help()
    assert text.startswith("usage: python -m megatron.train --config PRESET [--flag VALUE ...]\n")
    assert max(map(len, text.splitlines())) <= columns
    for name in options():
        entry = re.search(rf"^  --{name.replace('_', '-')}\b(.*?)(?=^  -|^\w|\Z)", text, re.MULTILINE | re.DOTALL)
        assert entry, name
        assert re.search(r"\(default:\s|\bUnset:", entry[1]), entry[0]


@pytest.mark.parametrize("topic", ["", *sections()])
def test_help_comes_by_sections_and_its_first_page_fits_a_screen(
    topic: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as caught:
        load_config(["--help", topic] if topic else ["--help"], 1)
    lines = capsys.readouterr().out.splitlines()
    assert caught.value.code == 0
    assert max(map(len, lines)) <= 100
    listed = {word for line in lines for word in re.findall(r"^  (--[a-z0-9-]+)", line)}
    if topic:
        assert listed == {flag(name) for name, (section, _) in options().items() if section == topic}
    else:
        assert len(lines) <= 50
        assert all(any(line.split()[:1] == [section] for line in lines) for section in sections())


def test_help_explains_a_flag_and_names_the_nearest() -> None:
    assert help_text("zero-stage") == help_text("--zero_stage")
    assert help_text("zero-stage").startswith("--zero-stage INT    (section optimizer)\n\n  ZeRO stage. Shard over")
    assert help_text("all") == build_parser().format_help()
    with pytest.raises(ConfigError, match="no help on 'optimiser'; did you mean optimizer"):
        help_text("optimiser")


QUIET_PROBE = """
import sys
from megatron.settings.command_line import load_config
from megatron.options.config import ConfigError
try:
    load_config(sys.argv[1:], 1)
except (ConfigError, SystemExit) as error:
    print(type(error).__name__)
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "deepspeed", "transformers", "numpy"}))
"""


@pytest.mark.parametrize(
    ("words", "ends"), [("--help", "SystemExit"), ("--num-layer 3", "ConfigError"), ("--print-config", "SystemExit")]
)
def test_help_and_a_rejected_config_import_nothing_heavy(words: str, ends: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", QUIET_PROBE, *words.split()], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-2:] == [ends, "[]"]


def test_the_committed_page_of_options_is_up_to_date() -> None:
    run = subprocess.run(
        [sys.executable, "tools/document_config.py"], cwd=ROOT, capture_output=True, encoding="utf-8", check=True
    )
    assert run.stdout == (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8"), (
        "run python tools/document_config.py > docs/reference/configuration.md"
    )


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def test_every_fault_is_reported_at_once(tmp_path: Path) -> None:
    preset = preset_file(
        tmp_path, "model: {num_layer: 4, hidden_size: wide}\ntraning: {seed: 1}\noptimizer: {seq_length: 8}"
    )
    words = f"--config {preset} --nmu-attention-heads 4 8 --lr -1 --data-path --zero-stage 7 stray".split()
    faults = faults_of(words)
    for expected in (
        "unknown flag --nmu-attention-heads; did you mean --num-attention-heads?",
        "'stray' does not follow a flag",
        "--data-path needs a value",
        "unknown section 'traning'; the sections are model, parallel",
        "unknown option 'num_layer' in section 'model'; did you mean 'num_layers'",
        "option 'seq_length' in section 'optimizer' belongs in section 'training'",
        "model.hidden_size='wide': input should be a valid integer",
        "optimizer.lr='-1': input should be greater than 0",
        "optimizer.zero_stage='7': input should be less than or equal to 3",
    ):
        assert len([fault for fault in faults if fault.startswith(expected)]) == 1, (expected, faults)
    assert faults[9:] == ["neither train_samples nor train_iters is given; give one to set the length of training"]


def test_unknown_flags_do_not_hide_the_rules() -> None:
    faults = faults_of([*VALID, "--num-layrs", "3", "--tensor-model-parallel-size", "3"], 3)
    assert [fault.split(";")[0] for fault in faults] == [
        "unknown flag --num-layrs",
        "tensor_model_parallel_size=3 does not divide num_attention_heads=4",
        "tensor_model_parallel_size=3 neither divides num_query_groups=4 nor is a multiple of it",
        "tensor_model_parallel_size=3 does not divide ffn_hidden_size=256",
    ]


def test_the_error_lists_its_faults_one_a_line() -> None:
    assert str(ConfigError(["a", "b"])) == "2 errors in the configuration:\n  - a\n  - b"
    assert str(ConfigError(["a"])) == "1 error in the configuration:\n  - a"


@pytest.mark.parametrize("value", ["--lr", "--save", "--config", "--rampup-batch-size", "--save=", "--split="])
def test_a_flag_without_its_value_is_named(value: str) -> None:
    assert faults_of([*VALID, value])[0].startswith(f"{value.rstrip('=')} needs a value")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--num-layers 4 5", "'5' does not follow a flag"),
        ("4 --num-layers 4", "'4' does not follow a flag"),
        ("-x", "unknown flag -x; see --help"),
        ("--num-lay 4", "unknown flag --num-lay; did you mean --num-layers?"),
        ("--zzzzzz", "unknown flag --zzzzzz; see --help"),
        ("--rampup-batch-size 1 2", "training.rampup_batch_size=1 2: expected 3 values, not 2"),
        ("--num-layers 2.5", "model.num_layers='2.5': input should be a valid integer"),
        ("--device tpu", "parallel.device='tpu': must be auto, hpu, cuda, cpu, or your own as package.module:RECORD"),
        ("--bf16 maybe", "training.bf16='maybe': input should be a valid boolean"),
        ("--lr nan", "optimizer.lr='nan': input should be a finite number"),
        ("--hidden-dropout 1", "model.hidden_dropout='1': input should be less than 1"),
    ],
)
def test_wrong_words_are_named(words: str, expected: str) -> None:
    assert faults_of([*VALID, *words.split()])[0].startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: [", "is not valid YAML"),
        ("model: {num_layers: 2, num_layers: 3}", "'num_layers' is given twice"),
        ("model: {num_layers: 2}\nmodel: {hidden_size: 8}", "'model' is given twice"),
        ("- model", "is a list; it must be a mapping of sections"),
        ("just words", "is a str"),
        ("model: 3", "section 'model' is 3; it must be a mapping of options"),
        ("model: {7: 3}", "unknown option '7' in section 'model'"),
        ("model: {num_layers: null}", "model.num_layers=None: input should be a valid integer"),
        ("model: {hidden_size: !!python/object/apply:os.getcwd []}", "is not valid YAML"),
        ("num_layers: 3", "unknown section 'num_layers'"),
        (f"model: {'[' * 3000}{']' * 3000}", "is nested too deeply"),
    ],
)
def test_wrong_yaml_is_named(tmp_path: Path, text: str, expected: str) -> None:
    faults = faults_of([*VALID, "--config", preset_file(tmp_path, text)])
    assert any(expected in fault for fault in faults), faults


def test_an_unreadable_preset_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"model: {architecture: \xe9}")
    assert "is not valid YAML" in faults_of(["--config", str(tmp_path / "latin.yaml")])[0]
    assert "not found" in faults_of(["--config", str(tmp_path)])[0]


def test_an_unknown_preset_suggests_the_nearest_and_hides_no_other_fault() -> None:
    faults = faults_of(["--config", "bloom_13", "--lr", "x"])
    assert faults[0].startswith("config 'bloom_13' not found; did you mean 'bloom_13b'? the presets are ")
    assert faults[1:] == ["optimizer.lr='x': input should be a valid number, unable to parse string as a number"]


@pytest.mark.parametrize("name", ["../presets/tiny_bloom", "presets/tiny_bloom"])
def test_a_preset_is_a_name_or_a_yaml_file(name: str) -> None:
    with pytest.raises(ConfigError, match="not found; did you mean 'tiny_bloom'"):
        read_preset("tiny_blom")
    assert read_preset(str(ROOT / "megatron" / "presets" / "tiny_bloom.yaml")) == read_preset("tiny_bloom")


def test_a_config_that_was_stored_before_an_option_has_its_default() -> None:
    tree = yaml.safe_load(to_yaml(Config()))
    for name in ("context_parallel_size", "context_parallel_exchange"):
        del tree["parallel"][name]
    assert from_dict(tree) == Config()
