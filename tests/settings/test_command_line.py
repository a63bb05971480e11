"""A command line in parts: values that cannot be read, options in other words, what follows from the device."""

from __future__ import annotations

import pytest

from megatron.options.config import ConfigError, on_device, options
from megatron.options.schedule import Schedule
from megatron.options.stored import from_dict
from megatron.settings.command_line import load_command_line, load_config
from megatron.settings.stand_ins import stand_ins
from megatron.settings.validation import check, idle
from tests.settings.faults import VALID, faults_of

# ---------------------------------------------------------------------------------------------------------------------
# Values that cannot be read

# a broken rule, and what it needs: (flags, the fault, the options it reads)
BROKEN = {
    "--tensor-model-parallel-size 3": ("3 does not divide num_attention_heads=4", ("num_attention_heads",)),
    "--pipeline-model-parallel-size 9": ("is larger than num_layers=2", ("num_layers",)),
    "--split nothing": ("split='nothing' must be", ()),
    "--seq-length 64 --max-position-embeddings 32": ("seq_length=64 is larger", ("seq_length",)),
    "--lr 1e-3 --min-lr 1": ("min_lr=1.0 is above lr=0.001", ("lr", "min_lr")),
    "--fp16 --min-loss-scale 9e9": ("is above initial_loss_scale=65536.0", ("fp16", "initial_loss_scale")),
    "--offload-param": ("needs zero_stage=3, not 0", ("zero_stage",)),
    "--profile --results-dir out --profile-ranks 99": ("profile_ranks=99 must name ranks", ("profile_ranks",)),
}


@pytest.mark.parametrize(
    "wrong", ["seq_length", "num_attention_heads", "num_layers", "lr", "fp16", "zero_stage", "profile_ranks", "save"]
)
def test_a_value_that_cannot_be_read_removes_only_the_rules_that_need_it(wrong: str) -> None:
    words = [*VALID, *" ".join(BROKEN).split(), "--" + wrong.replace("_", "-")]
    faults = faults_of([*words] if wrong == "save" else [*words, "maybe"], world_size=27)
    assert sum("maybe" in fault or "needs a value" in fault for fault in faults) == 1, faults
    for fault, needed in BROKEN.values():
        assert any(fault in found for found in faults) == (wrong not in needed), (fault, faults)


def test_a_misspelled_flag_removes_the_rules_of_the_one_that_was_meant() -> None:
    (fault,) = faults_of("--data-path corpus --train-itres 100")
    assert fault == "unknown flag --train-itres; did you mean --train-iters?"


def test_a_preset_that_cannot_be_read_leaves_the_rules_between_flags() -> None:
    faults = faults_of(
        "--config nothing --tensor-model-parallel-size 3 --num-attention-heads 4 --split x", world_size=3
    )
    assert len(faults) == 3
    assert "config 'nothing' not found" in faults[0]
    assert faults[1].startswith("tensor_model_parallel_size=3 does not divide num_attention_heads=4")
    assert faults[2].startswith("split='x'")


@pytest.mark.parametrize("name", sorted(options()))
def test_every_option_has_stand_ins(name: str) -> None:
    values = stand_ins(name)
    assert len(values) >= 2
    for value in values:
        assert value is not None
        from_dict({options()[name][0]: {name: value}})


# ---------------------------------------------------------------------------------------------------------------------
# Options that say the same in other words


@pytest.mark.parametrize(
    ("preset", "words", "note", "values"),
    [
        (
            "bloom_13b",
            "--train-iters 9",
            "train_iters=9 replaces the preset's train_samples=300000000",
            {"train_iters": 9, "train_samples": None},
        ),
        (
            "llama2_7b",
            "--train-samples 4096000",
            "train_samples=4096000 replaces the preset's train_iters=500000",
            {"train_iters": None, "train_samples": 4096000},
        ),
        ("bloom_13b", "--fp16", "fp16=true replaces the preset's bf16=True", {"fp16": True, "bf16": False}),
        ("bloom_13b", "--fp16 false", None, {"fp16": False, "bf16": True}),
        (
            "bloom_13b",
            "--lr-warmup-iters 5",
            "lr_warmup_iters=5 replaces the preset's lr_warmup_samples=216320",
            {"lr_warmup_samples": 0, "lr_warmup_iters": 5},
        ),
        (
            "bloom_13b",
            "--lr-warmup-iters 0",
            "lr_warmup_iters=0 replaces the preset's lr_warmup_samples=216320",
            {"lr_warmup_samples": 0, "lr_warmup_iters": 0},
        ),
        (
            "llama31_8b",
            "--position-embedding-type alibi",
            "position_embedding_type=alibi replaces the preset's rotary_base=500000.0, rope_scaling_factor=8.0, "
            "rope_scaling_low_freq_factor=1.0, rope_scaling_high_freq_factor=4.0, rope_scaling_original_length=8192",
            {"rotary_base": 10000.0, "rope_scaling_factor": None},
        ),
        (
            "dpo_llama",
            "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 64 --lora-rank none",
            "lora_rank=none replaces the preset's lora_alpha=16, lora_dropout=0.05, lora_target_modules=['all-linear']",
            {"lora_rank": None, "lora_alpha": None},
        ),
    ],
)
def test_a_flag_replaces_what_a_preset_says_in_other_words(
    preset: str, words: str, note: str | None, values: dict[str, object]
) -> None:
    command = load_command_line(["--config", preset, "--data-path", "corpus", *words.split()], 1)
    assert command.notes == ([] if note is None else [note])
    for name, value in values.items():
        assert getattr(getattr(command.config, options()[name][0]), name) == value
    assert idle(command.config) == []


def test_both_on_the_command_line_are_still_a_fault() -> None:
    assert "are both given" in faults_of("--config bloom_13b --data-path x --train-iters 9 --train-samples 9000")[0]


def test_a_rampup_may_be_given_with_iterations() -> None:
    words = "--data-path x --global-batch-size 8 --rampup-batch-size 2 2 12 --train-iters 10"
    config = load_config(words.split(), 1)
    # 2, 2 | 4 | 6 | 8 ...: levels end at 4, 8 and 12 samples
    schedule = Schedule(config.training, config.optimizer)
    assert (schedule.total_iterations, schedule.total_samples) == (10, 2 + 2 + 4 + 6 + 6 * 8)
    assert schedule.params.lr_decay_samples == schedule.total_samples


# ---------------------------------------------------------------------------------------------------------------------
# The device


@pytest.mark.parametrize(
    ("words", "device", "lazy", "compiled"),
    [
        ("", "hpu", False, True),
        ("", "hpu", True, False),
        ("", "cpu", False, False),
        ("", "cuda", False, False),
        ("--no-torch-compile", "hpu", False, False),
        ("--torch-compile", "cpu", False, True),
        ("--log-straggler --tensor-model-parallel-size 2", "hpu", False, False),
    ],
)
def test_layers_are_compiled_by_default_on_hpu_in_eager_mode(
    words: str, device: str, lazy: bool, compiled: bool
) -> None:
    config = on_device(load_config([*VALID, *words.split()], 2), device, lazy=lazy)
    assert (config.parallel.device, config.training.torch_compile) == (device, compiled)
    assert check(config, 2) == []


def test_ranks_that_cannot_be_read_are_a_fault_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError) as raised:
        load_config("--config tiny_bloom --data-path x --lr fast --tensor-model-parallel-size 3".split())
    said = "\n".join(raised.value.faults)
    assert all(part in said for part in ("WORLD_SIZE='two'", "lr='fast'", "num_attention_heads=4"))
