"""Start of a run from checkpoints: whose model they are of, and what a resume takes from them. No ranks are started."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpoint.folders import UNRECORDED, Run
from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.model_options import check_known_options
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.writer import write_checkpoint
from megatron.options.config import Config
from megatron.options.model import NOT_COMPUTED, ModelConfig
from megatron.options.progress import Progress
from megatron.parallel.context import ParallelContext
from megatron.resilience.errors import exit_status
from megatron.runtime.commands import FAILED
from megatron.settings.command_line import parse_arguments
from megatron.training.guard import checkpoint_before
from megatron.training.resume import RestorePlan, Start, find_start, plan_restore, read_progress
from megatron.weights.loader import find_checkpoint
from megatron.weights.megatron_args import model_options, refusals
from tests.checkpoint.states import fragments_of, saver
from tests.training import layouts

ROPE = f"{layouts.COMMON} --architecture llama --position-embedding-type rope --rope-scaling-factor 8"
LEARNED = f"{layouts.COMMON} --architecture bloom --position-embedding-type learned"
WINDOWS = f"{layouts.COMMON} --architecture gemma3 --position-embedding-type rope --attention-window 8"
YARN = f"{ROPE} --rope-scaling-type yarn"
LONGROPE = f"{ROPE} --rope-scaling-type longrope --rope-scaling-short-factors 1 --rope-scaling-long-factors 2"
PARALLEL = f"{layouts.COMMON} --architecture gpt_neox --position-embedding-type rope"
EXPERTS = f"{ROPE} --num-experts 4 --moe-router-num-groups 2 --moe-router-group-topk 1"


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


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EIO])
def test_only_a_damaged_checkpoint_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    """A file system that does not answer for a moment must not cost the work since the checkpoint before."""
    for step in (3, 6):
        save(tmp_path, ROPE, step)
    verify = Checkpoint.verify

    def unreadable(checkpoint: Checkpoint, *arguments: Any, **options: Any) -> None:
        if checkpoint.folder.name == "global_step6":
            raise CheckpointError("cannot be read") from OSError(number, "disk")
        verify(checkpoint, *arguments, **options)

    monkeypatch.setattr(Checkpoint, "verify", unreadable)
    if number == errno.EIO:
        assert find(f"{ROPE} --load {tmp_path}").folder.name == "global_step3"
        return
    with pytest.raises(CheckpointError) as raised:
        find(f"{ROPE} --load {tmp_path}")
    assert exit_status(raised.value) == FAILED


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
    "rope_scaling_type": (ROPE, "linear"),
    "rope_scaling_attention_factor": (YARN, "1.5"),
    "rope_scaling_beta_fast": (YARN, "16"),
    "rope_scaling_beta_slow": (YARN, "2"),
    "rope_scaling_truncate": (YARN, "false"),
    "rope_scaling_short_factors": (LONGROPE, "3"),
    "rope_scaling_long_factors": (LONGROPE, "3"),
    "shared_norm": (PARALLEL, ""),
    "embed_layernorm": (LEARNED, ""),
    "untie_embeddings_and_output_weights": (ROPE, ""),
    "norm_epsilon": (ROPE, "1e-2"),
    "rotary_percent": (ROPE, "0.5"),
    "rotary_base_local": (WINDOWS, "500"),
    "attention_window": (WINDOWS, "9"),
    "attention_window_pattern": (WINDOWS, "1 0"),
    "attention_multiplier": (ROPE, "0.3"),
    "attention_softcap": (ROPE, "5"),
    "embedding_multiplier": (ROPE, "2"),
    "residual_multiplier": (ROPE, "0.5"),
    "logits_scaling": (ROPE, "2"),
    "logits_softcap": (ROPE, "5"),
    "mup_base_hidden_size": (ROPE, "16"),
    "mup_base_head_size": (ROPE, "4 --mup-base-hidden-size 64"),
    "num_experts": (EXPERTS, "8"),
    "moe_router_topk": (EXPERTS, "1"),
    "moe_ffn_hidden_size": (EXPERTS, "32"),
    "moe_shared_expert_intermediate_size": (EXPERTS, "16"),
    "moe_layer_freq": (EXPERTS, "1 0"),
    "moe_router_score_function": (EXPERTS, "sigmoid"),
    "moe_router_pre_softmax": (EXPERTS, ""),
    "moe_router_topk_scaling_factor": (EXPERTS, "2"),
    "moe_router_num_groups": (EXPERTS, "4"),
    "moe_router_group_topk": (EXPERTS, "2"),
    "moe_router_enable_expert_bias": (EXPERTS, ""),
}
COMPARED_AS = {"mup_base_hidden_size": "logits_scaling", "mup_base_head_size": "attention_multiplier"}
"""Options of which what follows is compared, as a model may have it by another option."""


def test_every_option_that_changes_what_is_computed_is_compared(tmp_path: Path) -> None:
    """A new option of the model is in NOT_COMPUTED, or has a row in OTHER."""
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields - NOT_COMPUTED == OTHER.keys()
    for number, words in enumerate((ROPE, LEARNED, WINDOWS, YARN, LONGROPE, PARALLEL, EXPERTS)):
        folder = tmp_path / str(number)
        save(folder, words)
        assert find(f"{words} --load {folder}") is not None
        for name, value in [(name, value) for name, (run, value) in OTHER.items() if run == words]:
            # a start with new data and optimizer is one with the same model
            start = "--finetune" if len(name) % 2 else ""
            said = COMPARED_AS.get(name, name)
            with pytest.raises(CheckpointError, match=rf"of another model.*\b{said}=[^;]+ here, \S+ there"):
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


def test_options_without_effect_at_the_position_encoding_may_change(tmp_path: Path) -> None:
    save(tmp_path, LEARNED)
    assert find(f"{LEARNED} --load {tmp_path} --rotary-base 5e5 --rope-scaling-factor 8") is not None
    alibi = config_of(f"{LEARNED} --position-embedding-type alibi")
    arguments = {"num_attention_heads": 4, "layernorm_epsilon": 1e-5, "position_embedding_type": "alibi"}
    assert check_known_options(Path("run"), model_options(arguments), alibi) == []


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
        "rope_scaling_factor", "rope_scaling_type", "rope_scaling_original_length", "rope_scaling_low_freq_factor",
        "rope_scaling_high_freq_factor",
    ]  # fmt: skip
    # what few models have is unsettled where the options here use it
    capped = config_of(f"{ROPE} --norm-epsilon 1e-6 --rotary-base 5e5 --attention-softcap 5")
    assert "attention_softcap" in check_known_options(Path("run"), model_options(theirs), capped)
    with pytest.raises(CheckpointError, match=r"rotary_percent=1\.0 here, 0\.25 there"):
        check_known_options(Path("run"), model_options(theirs | {"rotary_percent": 0.25}), same)
    # shapes settle the size of a head only where the number of heads is known
    headless = {name: value for name, value in theirs.items() if name != "num_attention_heads"}
    assert "kv_channels" in check_known_options(Path("run"), model_options(headless), same)
    said = r"num_query_groups=2 here, 4 there; rotary_base=10000\.0 here, 500000\.0 there; norm_epsilon=1e-05 here"
    with pytest.raises(CheckpointError, match=said):
        check_known_options(Path("run"), model_options(theirs), config_of(f"{ROPE} --num-query-groups 2"))
    modern = {"group_query_attention": True, "num_query_groups": 2, "norm_epsilon": 1e-5, "use_rope_scaling": True}
    scaled = {"rope_scaling_factor": 8.0, "rope_scaling_type": "llama3"}
    assert model_options(modern) == {"norm_epsilon": 1e-5, "num_query_groups": 2, **scaled}
    assert list(refusals({"mup_width_mult": 1.0, "use_mup": False})) == []
    assert len(list(refusals({"mup_width_mult": 1.0, "use_mup": True}))) == 1
    assert len(list(refusals({"mup_width_mult": 2.0}))) == 1
    divided = {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": 4}
    assert model_options(divided) == {"rope_scaling_factor": 4.0, "rope_scaling_type": "linear"}


# ---------------------------------------------------------------------------------------------------------------------
# What is restored


def plan(words: str) -> RestorePlan:
    config, checkpoint = config_of(words), find(words)
    return plan_restore(checkpoint, read_progress(checkpoint, config.checkpoint)[0], config, config.checkpoint)


NO_OPTIMIZER = "WARNING: the optimizer was not restored"
SEED = "WARNING: the random streams were not restored"


@pytest.mark.parametrize(
    ("flags", "metadata", "optimizer", "seed", "lines"),
    [
        ("", {}, True, 1234, []),
        ("--no-load-optim", {}, False, 1234, [f"{NO_OPTIMIZER} (no_load_optim); it starts from zero"]),
        ("--no-load-rng", {}, True, None, [f"{SEED} (no_load_rng); dropout uses seed=1234"]),
        (
            "",
            {"optimizer": None},
            False,
            1234,
            [f"{NO_OPTIMIZER}; FOLDER was saved without it, so it starts from zero"],
        ),
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
            "--loss tests.tasks.test_task_page:with_gamma --loss-options gamma=3 --preference-loss ipo",
            {},
            True,
            1234,
            [
                "changed since the checkpoint: loss=tests.tasks.test_task_page:with_gamma here, None there; "
                "loss_options=['gamma=3'] here, [] there; preference_loss=ipo here, sigmoid there"
            ],
        ),
        (
            "--lr 1e-2 --clip-grad 0.5 --use-checkpoint-opt-param-scheduler",
            {},
            True,
            1234,
            ["changed since the checkpoint: clip_grad=0.5 here, 1.0 there"],
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


def test_what_a_foreign_checkpoint_does_not_say_is_a_warning() -> None:
    """One of Megatron's, converted: without moments, seed and data, and with few of its arguments."""
    metadata = {"progress": asdict(Progress(5, 40)), "optimizer": {"step": 5}}
    foreign: Any = SimpleNamespace(
        folder="run",
        kinds=("weight",),
        metadata=metadata,
        uncompared=["rotary_base"],
        optimizer_fault=None,
        holds_run=True,
    )
    config = config_of(f"{ROPE} --load run --universal-checkpoint")
    assert plan_restore(foreign, Progress(5, 40), config, config.checkpoint).lines == [
        "resumed run: weights; iteration 5, 40 samples",
        f"{NO_OPTIMIZER}; run was saved without it, so it starts from zero",
        f"{SEED} (the checkpoint has no seed); dropout uses seed=1234",
        "WARNING: run does not state rotary_base: compare them with its run yourself",
        "WARNING: the data was not compared, which the checkpoint does not identify; it continues after 40 samples",
    ]


def test_converted_weights_have_no_training_options_that_could_have_changed(tmp_path: Path) -> None:
    content = {"progress": asdict(Progress()), "config": config_of(ROPE).to_dict(), "source": None}
    converted = write_checkpoint(tmp_path, "global_step0", fragments_of(0, 1, 1), content)
    config = config_of(f"{ROPE} --load {converted.parent} --clip-grad 0.5")
    assert not [
        line
        for line in plan_restore(Checkpoint(converted), Progress(), config, config.checkpoint).lines
        if line.startswith("changed")
    ]


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    """It would be read into moments that nothing uses."""
    save(tmp_path, ROPE)
    with pytest.raises(CheckpointError, match=r"holds exp_avg, exp_avg_sq of another .*=sgd keeps momentum_buffer"):
        plan(f"{ROPE} --load {tmp_path} --optimizer sgd")
    assert plan(f"{ROPE} --load {tmp_path} --optimizer sgd --no-load-optim").optimizer is None
    with pytest.raises(CheckpointError, match=r"of another .*=muon keeps exp_avg.*momentum_buffer. Give .*--no-load-o"):
        plan(f"{ROPE} --load {tmp_path} --optimizer muon")


def test_a_start_with_weights_alone_says_so(tmp_path: Path) -> None:
    save(tmp_path, ROPE)
    said = f"started from {tmp_path}/global_step3: weights; iteration 0, 0 samples"
    assert plan(f"{ROPE} --load {tmp_path} --finetune --lr 1") == RestorePlan(None, None, [said])


# ---------------------------------------------------------------------------------------------------------------------
# Whose checkpoints


def start(words: str) -> Start:
    return find_start(config_of(words), ParallelContext.single())


def test_adapters_over_random_weights_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pretraining script without HL_LOAD_DIR trained them without a word."""
    said = "nothing was loaded: adapters train over random weights"
    assert start(ROPE).checkpoint is None
    assert said not in caplog.text
    start(f"{ROPE} --lora-rank 2 --load {tmp_path} --save {tmp_path}")
    assert said in caplog.text
    caplog.clear()
    save(tmp_path, ROPE)
    start(f"{ROPE} --lora-rank 2 --load {tmp_path}")
    assert said not in caplog.text


def save_of(run: Run, folder: Path, step: int, words: str = ROPE) -> Path:
    """A checkpoint of a run, which `latest` names then."""
    return save(folder, words, step, run=run.to_json())


def damage(checkpoint: Path) -> None:
    """One bit of a tensor, which its checksum shows."""
    path = checkpoint / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def step_of(found: Start) -> int | None:
    return None if found.checkpoint is None else found.progress.iteration


def test_a_run_keeps_its_identity_over_its_starts(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    first = start(f"{ROPE} --save {own}").run
    assert first.start["load"] is None
    assert first.id != start(f"{ROPE} --save {own}").run.id, "nothing is saved yet"
    save_of(first, own, 3)
    for again in (f"--save {own}", f"--save {own} --load {own}", f"--save {own} --load {own}/../own"):
        found = start(f"{ROPE} {again}")
        assert (found.run, step_of(found)) == (first, 3)
    branch = start(f"{ROPE} --load {own} --save {other}").run
    assert branch.id != first.id
    [parent] = branch.ancestors
    assert (parent.run, parent.folder, parent.iteration) == (first.id, f"{own}/global_step3", 3)
    save_of(branch, other, 4)
    found = start(f"{ROPE} --load {own} --save {other}")
    assert (found.run, step_of(found)) == (branch, 4), "the same command resumes"
    (tmp_path / "link").symlink_to(own)
    for spelled in (f"{own}/", os.path.relpath(own), tmp_path / "link"):
        assert start(f"{ROPE} --load {spelled} --save {other}").run == branch


def test_load_of_the_folder_saved_to_need_not_be_repeated(tmp_path: Path) -> None:
    """Megatron's scripts give both from the first start on, when the folder is empty."""
    first = start(f"{ROPE} --load {tmp_path} --save {tmp_path}").run
    save_of(first, tmp_path, 3)
    found = start(f"{ROPE} --save {tmp_path}")
    assert (found.run, step_of(found)) == (first, 3)


def test_a_folder_of_another_run_is_refused_unless_requested(tmp_path: Path) -> None:
    used, base = tmp_path / "used", tmp_path / "base"
    save_of(Run.new({"load": None}), base, 2)
    theirs = Run.new({"load": "model"})
    save_of(theirs, used, 5)
    said = (
        f"save={used} holds checkpoints of another run (newest global_step5, started with load=model; this one starts"
    )
    starts = {
        f"--save {used}": "with no load)",
        f"--save {used} --ckpt-step 5": "with no load, ckpt_step=5)",
        f"--save {used} --load {base}": f"with load={base})",
        f"--save {used} --load {used} --finetune": f"with load={used}, finetune=True)",
    }
    for words, ours in starts.items():
        with pytest.raises(CheckpointError, match=re.escape(f"{said} {ours}")):
            start(f"{ROPE} {words}")
    # going back in the folder itself is a branch of that run
    assert start(f"{ROPE} --save {used} --load {used} --ckpt-step 5").run.ancestors[0].run == theirs.id
    beside = start(f"{ROPE} --save {used} --allow-used-save")
    assert beside.checkpoint is None
    save_of(beside.run, used, 3)
    # each command goes on with its own run, whichever saved last
    assert step_of(start(f"{ROPE} --save {used}")) == 3
    assert step_of(start(f"{ROPE} --save {used} --load model")) == 5
    assert start(f"{ROPE} --save {used} --load model").run.id == theirs.id
    # `latest` says whose the folder is to others
    assert step_of(start(f"{ROPE} --load {used}")) == 3


def test_a_fallback_stays_in_the_lineage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs, parent = Run.new({"load": "model"}), Run.new({"load": None})
    save_of(parent, tmp_path, 2)
    save_of(parent, tmp_path, 8)
    save_of(theirs, tmp_path, 6)
    ours = start(f"{ROPE} --load {tmp_path} --save {tmp_path} --ckpt-step 2").run
    first, newest = save_of(ours, tmp_path, 4), save_of(ours, tmp_path, 5)
    damage(newest)
    assert step_of(start(f"{ROPE} --load {tmp_path}")) == 4
    damage(first)
    assert step_of(start(f"{ROPE} --load {tmp_path}")) == 2, "the parent's, from before the branch"
    (newest / "checkpoint.json").unlink()
    assert step_of(start(f"{ROPE} --load {tmp_path}")) == 2, "`latest` still says whose checkpoints count"
    with pytest.raises(CheckpointError, match=f"no complete checkpoint of run {ours.id}"):
        start(f"{ROPE} --load {tmp_path} --save {tmp_path} --ckpt-step 2")
    (tmp_path / "latest").write_text("")
    with pytest.raises(CheckpointError, match=rf"of several runs.*global_step8 of run {parent.id}.*Write the name"):
        start(f"{ROPE} --load {tmp_path}")
    (tmp_path / "latest").write_text("global_step6")  # as its message recommends
    assert step_of(start(f"{ROPE} --load {tmp_path}")) == 6


def test_a_rollback_stays_in_the_lineage(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    parent, theirs = Run.new({"load": None}), Run.new({"load": "model"})
    save_of(parent, other, 2)
    ours = start(f"{ROPE} --load {other} --save {own}").run
    save_of(parent, other, 4)  # after the branch
    save_of(theirs, own, 3)
    config = config_of(f"{ROPE} --load {other} --save {own}")
    found = checkpoint_before(1000, config, ParallelContext.single(), ours)
    assert found is not None
    assert found.folder == other / "global_step2"


def test_retention_counts_the_checkpoints_of_its_run(tmp_path: Path) -> None:
    theirs, ours = Run.new({"load": "model"}), Run.new({"load": None})
    for step in (7, 8, 9):
        save_of(theirs, tmp_path, step)
    one = saver(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        one.save(f"global_step{step}", f"t{step}", fragments_of(0, 1, 1), {"run": ours.to_json()})
    one.wait()
    one.close()
    assert sorted(path.name for path in tmp_path.glob("global_step*")) == [f"global_step{n}" for n in (2, 3, 7, 8, 9)]


def test_checkpoints_without_an_identity_are_one_run(tmp_path: Path) -> None:
    folder = save(tmp_path / "own", ROPE, 3).parent
    (folder / "latest").write_text("global_step3\n")
    for words in (f"--save {folder}", f"--save {folder} --load {folder}"):
        assert start(f"{ROPE} {words}").run.id == UNRECORDED
        assert step_of(start(f"{ROPE} {words}")) == 3
    damage(save(folder, ROPE, 4))
    assert step_of(start(f"{ROPE} --load {folder}")) == 3


def test_a_damaged_identity_is_reported(tmp_path: Path) -> None:
    save(tmp_path, ROPE, 3, run={"id": 1})
    with pytest.raises(CheckpointError, match=r"its run is .* which is damaged"):
        start(f"{ROPE} --load {tmp_path} --save {tmp_path}")
