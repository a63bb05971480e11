"""What a user writes becomes a config, or one message that names every fault, its rule and its remedy."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import megatron.config.validation
from megatron.config.command_line import (
    build_parser,
    from_dict,
    load_config,
    parse_arguments,
    read_preset,
    to_yaml,
)
from megatron.config.data import parse_split
from megatron.config.options import (
    Config,
    ConfigError,
    ModelConfig,
    TrainingConfig,
    batch_sizes,
    option_doc,
    options,
    sections,
)
from megatron.config.validation import check, divisors

ROOT = Path(__file__).resolve().parents[2]
VALID = ["--data-path", "corpus", "--train-iters", "100"]


def faults_of(arguments: str | list[str], world_size: int = 1) -> list[str]:
    words = arguments.split() if isinstance(arguments, str) else arguments
    with pytest.raises(ConfigError) as caught:
        load_config(words, world_size)
    return caught.value.faults


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


@given(st.integers(1, 2000), st.integers(1, 64))
def test_divisors_divide(number: int, up_to: int) -> None:
    offered = [int(word) for word in re.findall(r"\d+", divisors(number, up_to))]
    assert offered == [d for d in range(1, up_to + 1) if number % d == 0 and d <= number]


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


QUIET_PROBE = """
import sys
from megatron.config.command_line import load_config
from megatron.config.options import ConfigError
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
    assert run.stdout == (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8"), (
        "run python tools/document_config.py > docs/configuration.md"
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
    assert len(faults) == 9


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
        ("--profile-steps 1 2 3", "logging.profile_steps=1 2 3: expected 2 values, not 3"),
        ("--num-layers 2.5", "model.num_layers='2.5': input should be a valid integer"),
        ("--device tpu", "parallel.device='tpu': input should be 'auto', 'hpu', 'cuda' or 'cpu'"),
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


# One case breaks exactly one rule: (flags, ranks, what is wrong with its value, the remedy)
BROKEN_RULES: dict[str, tuple[str, int, str, str]] = {
    "ranks": (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        6,
        "2 x pipeline_model",
        "multiple of 4",
    ),
    "flex dropout": (
        "--attention-backend flex --attention-dropout 0.1",
        1,
        "attention_backend=flex does not support dropout",
        "set it to 0, or use sdpa",
    ),
    "stages": ("--pipeline-model-parallel-size 4 --num-layers 3", 4, "larger than num_layers=3", "use at most 3"),
    "heads": (
        "--tensor-model-parallel-size 3 --num-query-groups 1 --kv-channels 48 --ffn-hidden-size 96",
        3,
        "tensor_model_parallel_size=3 does not divide num_attention_heads=4",
        "use 1, 2 or 4",
    ),
    "kv heads": (
        "--tensor-model-parallel-size 4 --num-attention-heads 12 --num-query-groups 6 --hidden-size 96",
        4,
        "neither divides num_query_groups=6",
        "use 1, 2, 3 or 6, or a multiple of 6",
    ),
    "kv channels": (
        "--tensor-model-parallel-size 4 --num-query-groups 2 --kv-channels 3",
        4,
        "does not divide num_query_groups x head size = 6",
        "use 1, 2, 3 or 6",
    ),
    "ffn": (
        "--tensor-model-parallel-size 4 --ffn-hidden-size 90",
        4,
        "does not divide ffn_hidden_size=90",
        "use 1, 2, 3, 5, 6, 9,",
    ),
    "sequence parallel": (
        "--tensor-model-parallel-size 4 --sequence-parallel --seq-length 126",
        4,
        "to divide seq_length=126",
        "or turn it off",
    ),
    "pipeline without engine": (
        "--pipeline-model-parallel-size 2 --no-pipeline-parallel",
        2,
        "no_pipeline_parallel runs without a pipeline, but pipeline_model_parallel_size=2",
        "set it to 1",
    ),
    "pipeline with zero 2": ("--pipeline-model-parallel-size 2 --zero-stage 2", 2, "zero_stage=2 runs", "set it to 1"),
    "pipeline with offload": (
        "--pipeline-model-parallel-size 2 --zero-stage 1 --offload-optimizer",
        2,
        "offload_optimizer runs",
        "set it to 1",
    ),
    "offload param": ("--offload-param --zero-stage 2", 1, "needs zero_stage=3, not 2", "turn it off"),
    "offload optimizer": ("--offload-optimizer", 1, "needs zero_stage 1, 2 or 3, not 0", "turn it off"),
    "offload sgd": ("--offload-optimizer --zero-stage 1 --optimizer sgd", 1, "optimizer=sgd", "use adamw or adam"),
    "head size": ("--hidden-size 66", 1, "num_attention_heads=4 does not divide hidden_size=66", "or set kv_channels"),
    "query groups": ("--num-query-groups 3", 1, "num_query_groups=3 does not divide", "use 1, 2 or 4"),
    "rope pairs": (
        "--position-embedding-type rope --kv-channels 15",
        1,
        "even head size, not 15",
        "change hidden_size or kv_channels",
    ),
    "rope scaling": ("--rope-scaling-factor 8", 1, "rope_scaling_factor=8.0 needs", "unset it"),
    "rope factors": (
        "--position-embedding-type rope --rope-scaling-factor 8 --rope-scaling-low-freq-factor 4",
        1,
        "rope_scaling_low_freq_factor=4.0 must be below",
        "lower it",
    ),
    "positions": (
        "--max-position-embeddings 64",
        1,
        "seq_length=128 is larger than max_position_embeddings=64",
        "enlarge",
    ),
    "precisions": ("--bf16 --fp16", 1, "bf16 and fp16 are both on", "turn one of them off"),
    "accumulation": ("--grad-accum-dtype bf16", 1, "the precision is fp32", "set fp32"),
    "loss scale": ("--fp16 --min-loss-scale 100000", 1, "min_loss_scale=100000.0 is above", "lower it"),
    "flex": (
        "--attention-backend flex --attention-dropout 0 --device cpu",
        1,
        "runs on cuda only, but device=cpu",
        "use auto or sdpa",
    ),
    "fused sdpa": ("--attention-backend fused_hpu --device cuda", 1, "runs on hpu only, but device=cuda", "use auto"),
    "fast softmax": ("--use-fast-softmax --device cpu", 1, "for hpu only, but device=cpu", "turn it off"),
    "global batch": ("--micro-batch-size 3", 2, "global_batch_size=8 is not a multiple of", "use a multiple of 6"),
    "ramp-up start": (
        "--train-iters none --train-samples 999 --rampup-batch-size 16 8 100",
        1,
        "16 8 100 starts above global_batch_size=8",
        "start lower",
    ),
    "ramp-up end": (
        "--train-iters none --train-samples 999 --rampup-batch-size 2 4 100",
        1,
        "never reaches global_batch_size=8: the difference 6",
        "change one of the three",
    ),
    "ramp-up steps": (
        "--train-iters none --train-samples 999 --rampup-batch-size 2 2 100",
        4,
        "passes through 2, which is not a multiple of micro_batch_size x data-parallel size = 1 x 4",
        "use multiples of 4 for start and increment, or a data-parallel size of 1 or 2",
    ),
    "ramp-up in steps": ("--rampup-batch-size 2 2 100", 1, "train_samples is not given", "instead of train_iters"),
    "length twice": ("--train-samples 900", 1, "train_samples=900 and train_iters=100 are both given", "keep one"),
    "no length": ("--train-iters none", 1, "neither train_samples nor train_iters is given", "give one"),
    "no length of sft": (
        "--task sft --train-iters none",
        1,
        "none of train_samples, train_iters, num_epochs is given",
        "give one",
    ),
    "length of sft thrice": (
        "--task sft --train-samples 9 --num-epochs 2",
        1,
        "train_samples=9 and train_iters=100 and num_epochs=2 are all given",
        "keep one",
    ),
    "few chats": (
        "--task sft --global-batch-size 2",
        4,
        "global_batch_size=2 is less than the data-parallel",
        "4 or more",
    ),
    "short rows": ("--task sft --max-batch-len 64", 1, "max_batch_len=64 is less than seq_length=128", "raise it"),
    "rows of a step": ("--task sft --micro-batch-size 2", 1, "packing=step makes each microbatch one row", "use 1"),
    "rows cut": (
        "--task sft --max-batch-len 129 --tensor-model-parallel-size 2 --sequence-parallel",
        2,
        "to divide max_batch_len=129",
        "use 1, 3 or 43",
    ),
    "ramp of chats": (
        "--task sft --rampup-batch-size 2 2 100 --train-samples 100 --train-iters none",
        1,
        "rampup_batch_size is for task=pretrain",
        "leave it out",
    ),
    "ends of chats": (
        "--task sft --reset-position-ids --eod-token-id 0",
        1,
        "reset_position_ids has no effect with task=sft",
        "leave it out",
    ),
    "weighted chats": ("--task sft --data-path 1 a 2 b", 1, "1 a 2 b' has weights", "give prefixes alone"),
    "short training": ("--train-iters none --train-samples 7", 1, "train_samples=7 is less than", "train longer"),
    "warm-up twice": ("--lr-warmup-samples 8 --lr-warmup-iters 1", 1, "lr_warmup_samples=8 and", "keep one"),
    "decay twice": ("--lr-decay-samples 80 --lr-decay-iters 10", 1, "lr_decay_samples=80 and", "keep one"),
    "wsd twice": (
        "--lr-decay-style WSD --lr-wsd-decay-samples 80 --lr-wsd-decay-iters 10",
        1,
        "lr_wsd_decay_samples=80 and lr_wsd_decay_iters=10",
        "keep one",
    ),
    "warm-up in steps": (
        "--train-iters none --train-samples 999 --rampup-batch-size 2 2 100 --lr-warmup-iters 2",
        1,
        "lr_warmup_iters=2 cannot be combined with rampup_batch_size",
        "use lr_warmup_samples",
    ),
    "min lr": ("--min-lr 1", 1, "min_lr=1.0 is above lr=0.0001", "lower it"),
    "long warm-up": (
        "--lr-warmup-iters 100",
        1,
        "warm-up of 800 samples must be shorter than the decay of 800",
        "shorten",
    ),
    "wsd part": ("--lr-decay-style WSD", 1, "lr_decay_style=WSD needs", "give one"),
    "long wsd part": (
        "--lr-decay-style WSD --lr-wsd-decay-iters 60 --lr-warmup-iters 50",
        1,
        "the warm-up of 400 samples and WSD's last part of 480 do not fit into 800",
        "shorten lr_wsd_decay_*",
    ),
    "split": ("--split 0,0", 1, "split='0,0'", "such as 949,50,1"),
    "split of four": ("--split 1,1,1,1", 1, "split='1,1,1,1'", "such as 949,50,1"),
    "split of nothing": ("--split nan", 1, "split='nan'", "such as 949,50,1"),
    "no data": ("--data-path", 1, "data_path is not given", "tools/preprocess_data.py"),
    "odd blend": ("--data-path 1 a 2", 1, "data_path='1 a 2'", "WEIGHT PREFIX pairs"),
    "weights for some": ("--data-path 1 a b c", 1, "data_path='1 a b c'", "weights above 0"),
    "a split's odd blend": ("--train-data-path 1 a 2", 1, "train_data_path='1 a 2'", "WEIGHT PREFIX"),
    "two kinds of paths": (
        "--data-path d --valid-data-path v",
        1,
        "data_path and valid_data_path are both given",
        "keep data_path and split",
    ),
    "no training data": ("--test-data-path t", 1, "is given without train_data_path", "give it"),
    "weight of nothing": ("--data-path 0 a 1 b", 1, "data_path='0 a 1 b'", "weights above 0"),
    "no end of document": ("--reset-attention-mask", 1, "reset_attention_mask needs", "give eod_token_id"),
    "gpt2 files": (
        "--tokenizer-type GPT2BPETokenizer --vocab-file v",
        1,
        "tokenizer_type=GPT2BPETokenizer needs vocab_file and merge_file",
        "give both",
    ),
    "hf file": ("--tokenizer-type HFTokenizer", 1, "tokenizer_type=HFTokenizer needs tokenizer_model", "give the file"),
    "tiktoken pattern": ("--tiktoken-pattern r50k", 1, "is for tokenizer_type=TikTokenizer", "leave it out"),
    "eod of nothing": ("--eod-token E", 1, "eod_token=E needs a tokenizer", "give tokenizer_type"),
    "eod twice": (
        "--tokenizer-type Llama2Tokenizer --tokenizer-model m --eod-token E --eod-token-id 2",
        1,
        "eod_token=E and eod_token_id=2",
        "give one of them",
    ),
    "eod": ("--eod-token-id 50257", 1, "eod_token_id=50257 is outside vocab_size=50257", "below 50257"),
    "profile": ("--profile", 1, "results_dir, which is not given", "turn profile off"),
    "universal step": (
        "--load runs --universal-checkpoint --ckpt-step 20",
        1,
        "ckpt_step=20 selects one of our own checkpoints",
        "set load to the folder of that iteration",
    ),
    "one export": (
        "--save runs --save-hf models --save-hf-last-only --save-hf-keep-last 2",
        1,
        "save_hf_keep_last=2 has no effect with save_hf_last_only",
        "leave one",
    ),
    "exports alone": (
        "--save-hf models",
        1,
        "save_hf=models is exported from the checkpoints in save",
        "give a folder",
    ),
    "exports among checkpoints": (
        "--save runs --save-hf ./runs/",
        1,
        "save_hf=./runs/ is the same folder as save",
        "use another",
    ),
    "save alone": ("--keep-last 3", 1, "keep_last=3 has no effect without save", "give the folder to save in"),
    "profile steps": (
        "--profile --results-dir out --profile-steps 4 3",
        1,
        "profile_steps=4 3 ends before it starts",
        "give FIRST LAST",
    ),
    "profile late": (
        "--profile --results-dir r --profile-steps 200 201",
        1,
        "profile_steps=200 201 begins after train_iters=100",
        "start earlier",
    ),
    "profile ranks": (
        "--profile --results-dir r --profile-ranks 0 2",
        2,
        "profile_ranks=0 2 must name ranks of this",
        "use 0 to 1",
    ),
    "ranks of no profile": ("--profile-ranks 1", 2, "has no effect without profile", "turn it on"),
    "stack of no profile": (
        "--pytorch-profiler-collect-callstack",
        1,
        "pytorch_profiler_collect_callstack=True has no effect without profile",
        "turn it on",
    ),
    "wandb": ("--wandb-exp-name n", 1, "wandb_exp_name=n has no effect without wandb_project", "give one"),
    "rollback unsaved": ("--spike-action rollback", 1, "but save is not given", "give a folder"),
    "rollback of weights": (
        "--spike-action rollback --save runs --no-save-optim",
        1,
        "needs the optimizer's state",
        "turn one of them off",
    ),
    "long watch": (
        "--watchdog-timeout-s 90 --distributed-timeout-minutes 1",
        1,
        "watchdog_timeout_s=90 is above distributed_timeout_minutes=1 (60 s)",
        "lower it, or raise",
    ),
    "short watch": ("--watchdog-timeout-s 0.5", 1, "watchdog_timeout_s=0.5 leaves no time", "use 1 or more"),
    "straggler of zero 3": ("--log-straggler --zero-stage 3", 1, "with zero_stage=3 every layer waits", "turn it off"),
    "compiled straggler": (
        "--log-straggler --torch-compile --tensor-model-parallel-size 2",
        2,
        "tensor_model_parallel_size=2 is above 1, which it cannot",
        "turn one of the two off",
    ),
}


def faults_of_case(name: str) -> list[str]:
    words, world_size, _, _ = BROKEN_RULES[name]
    if words == "--data-path":
        return check(from_dict({"training": {"train_iters": 100}}), world_size)
    given = VALID if "data-path" not in words else VALID[2:]
    return faults_of([*given, *words.split()], world_size)


@pytest.mark.parametrize("name", BROKEN_RULES)
def test_a_broken_rule_is_named_with_value_and_remedy(name: str) -> None:
    _, _, wrong, remedy = BROKEN_RULES[name]
    faults = faults_of_case(name)
    assert len(faults) == 1, faults
    assert wrong in faults[0]
    assert remedy in faults[0]


# flags that do nothing alone -> what they need, and the flags that give it
IDLE: dict[str, tuple[str, str]] = {
    "--save-interval-in-mins 5": ("save", "--save runs"),
    "--no-async-save": ("save", "--save runs"),
    "--keep-last 3": ("save", "--save runs"),
    "--save-samples 100": ("save", "--save runs"),
    "--save-at-epoch": ("save", "--save runs --task sft"),
    "--save runs --save-at-epoch": ("a task that counts epochs, such as task=sft", "--task sft"),
    "--save-hf-keep-last 2": ("save_hf", "--save runs --save-hf models"),
    "--save-hf-last-only": ("save_hf", "--save runs --save-hf models"),
    "--no-save-optim": ("save", "--save runs"),
    "--verify-checkpoint": ("save", "--save runs"),
    "--save-retain-interval 500": ("keep_last", "--save runs --keep-last 3"),
    "--ckpt-step 20": ("load", "--load runs"),
    "--ckpt-step 0": ("load", "--load runs"),
    "--no-load-fallback": ("load", "--load runs"),
    "--universal-checkpoint": ("load", "--load runs"),
    "--finetune": ("load", "--load runs"),
    "--no-load-optim": ("load", "--load runs"),
    "--no-load-rng": ("load", "--load runs"),
    "--allow-data-change": ("load", "--load runs"),
    "--initial-loss-scale 1024": ("fp16", "--fp16"),
    "--min-loss-scale 2": ("fp16", "--fp16"),
    "--loss-scale-window 100": ("fp16", "--fp16"),
    "--hysteresis 1": ("fp16", "--fp16"),
    "--lr-wsd-decay-samples 80": ("lr_decay_style=WSD", "--lr-decay-style WSD"),
    "--lr-wsd-decay-iters 10": ("lr_decay_style=WSD", "--lr-decay-style WSD"),
    "--lr-wsd-decay-style linear": ("lr_decay_style=WSD", "--lr-decay-style WSD --lr-wsd-decay-iters 10"),
    "--sgd-momentum 0.5": ("optimizer=sgd", "--optimizer sgd"),
    "--rotary-base 500000": ("position_embedding_type=rope", "--position-embedding-type rope"),
    "--rope-scaling-low-freq-factor 2": (
        "rope_scaling_factor",
        "--position-embedding-type rope --rope-scaling-factor 8",
    ),
    "--rope-scaling-high-freq-factor 8": (
        "rope_scaling_factor",
        "--position-embedding-type rope --rope-scaling-factor 8",
    ),
    "--rope-scaling-original-length 64": (
        "rope_scaling_factor",
        "--position-embedding-type rope --rope-scaling-factor 8",
    ),
    "--vocab-file v": ("tokenizer_type=GPT2BPETokenizer", "--tokenizer-type GPT2BPETokenizer --merge-file m"),
    "--merge-file m": ("tokenizer_type=GPT2BPETokenizer", "--tokenizer-type GPT2BPETokenizer --vocab-file v"),
    "--tokenizer-model m": ("tokenizer_type", "--tokenizer-type HFTokenizer"),
    "--num-epochs 2": ("a task that counts epochs, such as task=sft", "--task sft --train-iters none"),
    "--packing none": ("task=sft", "--task sft"),
    "--max-batch-len 256": ("task=sft", "--task sft"),
    "--task sft --packing none --max-batch-len 256": ("packing=step", "--packing step"),
    "--task sft --packing dataset --bucketing octave": ("packing=step or none", "--packing step"),
    "--task sft --bucketing off --buckets-per-octave 4": ("bucketing=octave", "--bucketing octave"),
    "--task sft --num-buckets 4": ("bucketing=optimal", "--bucketing optimal"),
    "--profile-steps 10 12": ("profile", "--profile --results-dir out"),
}


@pytest.mark.parametrize("flags", IDLE)
def test_an_option_that_would_do_nothing_is_refused(flags: str) -> None:
    needed, given = IDLE[flags]
    faults = faults_of([*VALID, *flags.split()])
    assert len(faults) == 1, faults
    assert f" has no effect without {needed}; " in faults[0]
    assert faults[0].endswith(", or leave it out")
    load_config([*VALID, *flags.split(), *given.split()], 1)


def test_every_rule_is_broken_by_a_case() -> None:
    rules = {
        node.lineno
        for function in ast.walk(ast.parse(Path(megatron.config.validation.__file__).read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef) and function.name.startswith("_check_")
        for node in ast.walk(function)
        if isinstance(node, ast.Yield)
    }
    reached: set[int] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != megatron.config.validation.__file__:
            return None
        reached.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for name in BROKEN_RULES:
            faults_of_case(name)
    finally:
        sys.settrace(before)
    assert len(rules) > 40
    assert sorted(rules - reached) == [], "lines of rules.py that no case of BROKEN_RULES reaches"


@given(
    st.fixed_dictionaries(
        {
            "num_layers": st.integers(1, 12),
            "num_attention_heads": st.integers(1, 16),
            "num_query_groups": st.none() | st.integers(1, 16),
            "ffn_hidden_size": st.none() | st.integers(1, 300),
        }
    ),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 64),
)
def test_check_accepts_exactly_the_layouts_that_divide(
    model: dict[str, Any], tp: int, pp: int, world_size: int
) -> None:
    config = from_dict(
        {
            "model": {"hidden_size": 16 * model["num_attention_heads"], **model},
            "parallel": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp},
            "training": {"global_batch_size": 64 * 63 * 61, "train_samples": 10**9},
            "data": {"data_path": ["corpus"]},
        }
    )
    heads, kv = config.model.num_attention_heads, config.model.num_kv_heads
    fits = world_size % (tp * pp) == 0 and pp <= config.model.num_layers
    fits &= heads % kv == 0 and heads % tp == 0 and config.model.ffn_size % tp == 0
    fits &= kv % tp == 0 or (tp % kv == 0 and kv * 16 % tp == 0)
    fits &= config.training.global_batch_size % max(1, world_size // (tp * pp)) == 0
    assert (check(config, world_size) == []) == fits
