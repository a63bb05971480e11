"""Start of a run from checkpoints: whose model they are of, and what a resume takes from them. No ranks are started."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.model_options import check_known_options
from megatron.checkpoint.writer import write_checkpoint
from megatron.config.command_line import parse_arguments
from megatron.config.model import NOT_COMPUTED, ModelConfig
from megatron.config.options import Config
from megatron.interop.megatron_options import model_options
from megatron.parallel.context import ParallelContext
from megatron.planning.progress import Progress
from megatron.training.resume import find_checkpoint, read_progress
from megatron.training.resume_plan import RestorePlan, plan_restore
from tests.checkpoint.states import fragments_of
from tests.training import layouts

ROPE = f"{layouts.COMMON} --architecture llama --position-embedding-type rope --rope-scaling-factor 8"
LEARNED = f"{layouts.COMMON} --architecture bloom --position-embedding-type learned"


def config_of(words: str) -> Config:
    return parse_arguments(words.split())[0]


def save(folder: Path, words: str, step: int = 3, **metadata: Any) -> Path:
    """A checkpoint of a run with these options. Its tensors are a toy's, which nothing here restores."""
    content = {
        "progress": asdict(Progress(iteration=step, consumed_samples=8 * step)),
        "data_fingerprint": "data",
        "config": config_of(f"{words} --save {folder}").to_dict(),
        "optimizer": {"step": float(step), "loss_scaler": None},
        "rng": {"seed": 1234},
    }
    return write_checkpoint(folder, f"global_step{step}", fragments_of(0, 1, 1), content | metadata)


def find(words: str) -> Any:
    return find_checkpoint(config_of(words), ParallelContext.single())


# ---------------------------------------------------------------------------------------------------------------------
# Whose model

# another value of each option, and the run that it matters to
OTHER = {
    "architecture": (ROPE, "bloom"),
    "num_layers": (ROPE, "5"),
    "hidden_size": (ROPE, "128"),
    "ffn_hidden_size": (ROPE, "96"),
    "num_attention_heads": (ROPE, "2"),
    "num_query_groups": (ROPE, "2"),
    "kv_channels": (ROPE, "32"),
    "vocab_size": (ROPE, "249"),
    "max_position_embeddings": (LEARNED, "64"),
    "position_embedding_type": (ROPE, "learned"),
    "rotary_base": (ROPE, "500000"),
    "rope_scaling_factor": (ROPE, "4"),
    "rope_scaling_low_freq_factor": (ROPE, "2"),
    "rope_scaling_high_freq_factor": (ROPE, "8"),
    "rope_scaling_original_length": (ROPE, "4096"),
    "embed_layernorm": (LEARNED, ""),
    "untie_embeddings_and_output_weights": (ROPE, ""),
    "norm_epsilon": (ROPE, "1e-2"),
}


def test_every_option_that_changes_what_is_computed_is_compared(tmp_path: Path) -> None:
    """A new option of the model is in NOT_COMPUTED, or has a row in OTHER."""
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields - NOT_COMPUTED == OTHER.keys()
    for number, words in enumerate((ROPE, LEARNED)):
        folder = tmp_path / str(number)
        save(folder, words)
        assert find(f"{words} --load {folder}") is not None
        for name, value in [(name, value) for name, (run, value) in OTHER.items() if run == words]:
            # a start with new data and optimizer is one with the same model
            start = "--finetune" if len(name) % 2 else ""
            with pytest.raises(CheckpointError, match=rf"of another model.*\b{name}=\S+ here, \S+ there"):
                find(f"{words} --load {folder} {start} --{name.replace('_', '-')} {value}")


def test_all_differences_are_reported_at_once(tmp_path: Path) -> None:
    save(tmp_path, ROPE)
    with pytest.raises(CheckpointError) as raised:
        find(f"{ROPE} --load {tmp_path} --num-attention-heads 2 --norm-epsilon 1e-2 --rotary-base 5e5")
    said = "num_attention_heads=2 here, 4 there; num_query_groups=2 here, 4 there; kv_channels=32 here, 16 there; "
    assert said + "rotary_base=500000.0 here, 10000.0 there; norm_epsilon=0.01 here, 1e-05 there." in str(raised.value)


def test_what_leaves_the_function_as_it_is_may_change(tmp_path: Path) -> None:
    save(tmp_path, ROPE)
    same = (
        "--hidden-dropout 0.2 --attention-dropout 0.3 --init-method-std 0.5 --make-vocab-size-divisible-by 64 "
        "--attention-backend sdpa --freeze embedding.* --recompute-granularity full --seq-length 64 --kv-channels 16 "
        "--ffn-hidden-size 256 --num-query-groups 4 --max-position-embeddings 99 --bf16"
    )
    assert find(f"{ROPE} --load {tmp_path} {same}") is not None


def test_options_of_other_releases_are_compared(tmp_path: Path) -> None:
    config = config_of(ROPE).to_dict()
    older = {name: value for name, value in config["model"].items() if name != "norm_epsilon"}
    save(tmp_path / "older", ROPE, config=config | {"model": older})
    assert find(f"{ROPE} --load {tmp_path / 'older'}") is not None
    with pytest.raises(CheckpointError, match=r"norm_epsilon=0\.01 here, 1e-05 there"):
        find(f"{ROPE} --load {tmp_path / 'older'} --norm-epsilon 1e-2")
    save(tmp_path / "newer", ROPE, config=config | {"model": config["model"] | {"logit_cap": 30.0}})
    with pytest.raises(CheckpointError, match="logit_cap there, which this release does not have"):
        find(f"{ROPE} --load {tmp_path / 'newer'}")


def test_the_arguments_of_a_megatron_run_are_compared() -> None:
    theirs = {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "layernorm_epsilon": 1e-6, "rope_theta": 5e5,
        "group_query_attention": False, "num_query_groups": 1, "use_rotary_position_embeddings": True, "lr": 1.0,
    }  # fmt: skip
    same = config_of(f"{ROPE} --norm-epsilon 1e-6 --rotary-base 5e5")
    assert check_known_options(Path("run"), model_options(theirs), same) == [
        "kv_channels", "rope_scaling_factor", "rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor",
        "rope_scaling_original_length",
    ]  # fmt: skip
    said = r"num_query_groups=2 here, 4 there; rotary_base=10000\.0 here, 500000\.0 there; norm_epsilon=1e-05 here"
    with pytest.raises(CheckpointError, match=said):
        check_known_options(Path("run"), model_options(theirs), config_of(f"{ROPE} --num-query-groups 2"))
    modern = {"group_query_attention": True, "num_query_groups": 2, "norm_epsilon": 1e-5, "use_rope_scaling": True}
    assert model_options(modern) == {"norm_epsilon": 1e-5, "num_query_groups": 2, "rope_scaling_factor": 8.0}


# ---------------------------------------------------------------------------------------------------------------------
# What is restored


def plan(words: str) -> RestorePlan:
    config, checkpoint = config_of(words), find(words)
    return plan_restore(checkpoint, read_progress(checkpoint, config.checkpoint)[0], config, config.checkpoint)


ANEW = "WARNING: the optimizer was not restored"
SEED = "WARNING: the random streams were not restored"


@pytest.mark.parametrize(
    ("flags", "metadata", "optimizer", "seed", "lines"),
    [
        ("", {}, True, 1234, []),
        ("--no-load-optim", {}, False, 1234, [f"{ANEW} (no_load_optim); it starts from zero"]),
        ("--no-load-rng", {}, True, None, [f"{SEED} (no_load_rng); dropout uses seed=1234"]),
        ("", {"optimizer": None}, False, 1234, [f"{ANEW}; FOLDER was saved without it, so it starts from zero"]),
        ("", {"rng": {}}, True, None, [f"{SEED} (the checkpoint has no seed); dropout uses seed=1234"]),
        (
            "--seed 5",
            {},
            True,
            1234,
            [
                "WARNING: seed=5 is not applied to dropout, which continues with the checkpoint's 1234; pass "
                "--no-load-rng to apply it",
                "changed since the checkpoint: seed=5 here, 1234 there",
            ],
        ),
        (
            "--fp16",
            {},
            True,
            1234,
            [
                "WARNING: the loss scale was not restored; the checkpoint has none, so it starts at 65536",
                "changed since the checkpoint: fp16=True here, False there",
            ],
        ),
        (
            "--lr 1e-2 --global-batch-size 16 --split 1,1,1 --hidden-dropout 0.1 --exit-interval 3",
            {},
            True,
            1234,
            [
                "changed since the checkpoint: hidden_dropout=0.1 here, 0.0 there; global_batch_size=16 here, 8 there; "
                "lr=0.01 here, 0.001 there; split=1,1,1 here, 969,30,1 there"
            ],
        ),
        (
            "",
            {"progress": asdict(Progress(iteration=3))},
            True,
            1234,
            ["WARNING: the data position was not restored (no consumed samples): data starts from the beginning"],
        ),
    ],
)
def test_what_a_resume_does_not_restore_is_a_warning(
    tmp_path: Path, flags: str, metadata: dict[str, Any], optimizer: bool, seed: int | None, lines: list[str]
) -> None:
    save(tmp_path, ROPE, **metadata)
    found = plan(f"{ROPE} --load {tmp_path} {flags}")
    assert (found.optimizer is not None, found.seed) == (optimizer, seed)
    restored = ["weights", *(["optimizer"] if optimizer else []), *(["random streams"] if seed else [])]
    assert found.lines[0].startswith(f"resumed {tmp_path}/global_step3: {', '.join(restored)}; iteration 3, ")
    assert found.lines[1:] == [line.replace("FOLDER", f"{tmp_path}/global_step3") for line in lines]


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    """It would be read into moments that nothing uses."""
    save(tmp_path, ROPE)
    with pytest.raises(CheckpointError, match=r"holds exp_avg, exp_avg_sq of another .*=sgd keeps momentum_buffer"):
        plan(f"{ROPE} --load {tmp_path} --optimizer sgd")
    assert plan(f"{ROPE} --load {tmp_path} --optimizer sgd --no-load-optim").optimizer is None


def test_a_start_with_weights_alone_says_so(tmp_path: Path) -> None:
    save(tmp_path, ROPE)
    said = f"started from {tmp_path}/global_step3: weights; iteration 0, 0 samples"
    assert plan(f"{ROPE} --load {tmp_path} --finetune --lr 1") == RestorePlan(None, None, [said])
