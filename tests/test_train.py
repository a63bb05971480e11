"""megatron.train from data on disk to metrics and checkpoints, and back."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import chaos
from megatron.options.config import ConfigError
from megatron.resilience.shutdown import Signals
from megatron.train import main
from tests import runs
from tests.ranks import HANG_S, RankPools

EXACT = ("iteration", "consumed_samples", "lm_loss", "learning_rate", "grad_norm", "global_batch_size")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return runs.write_dataset(tmp_path / "data")


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        pytest.param(
            4,
            "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
            marks=pytest.mark.slow,
        ),
        (2, "--zero-stage 2 --bf16"),
        pytest.param(1, "--architecture llama --position-embedding-type rope", marks=pytest.mark.slow),
    ],
)
def test_stopped_and_resumed_run_equals_the_uninterrupted_one(
    ranks: RankPools, tmp_path: Path, data: Path, world_size: int, layout: str
) -> None:
    common = f"--data-path {data} --train-samples 64 --rampup-batch-size 4 4 24 --lr-warmup-samples 16 {layout}"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert set(ranks(world_size)(runs.train, f"{common} --results-dir {whole}")) == {""}
    saved = f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'} --results-dir {parts}"
    assert set(ranks(world_size)(runs.train, f"{common} {saved} --exit-interval 5")) == {""}
    assert len(runs.rows(parts)) == 5
    assert set(ranks(world_size)(runs.train, f"{common} {saved}")) == {""}
    for kind in ("train", "valid", "test"):
        expected = [[row.get(key) for key in EXACT] for row in runs.rows(whole, kind)]
        assert [[row.get(key) for key in EXACT] for row in runs.rows(parts, kind)] == expected
        assert expected
    assert [row["global_batch_size"] for row in runs.rows(whole)][:7] == [4] * 6 + [8]


def test_loss_falls_and_perplexity_is_its_exponential(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    results = tmp_path / "results"
    flags = f"--data-path {data} --train-iters 40 --lr-warmup-iters 4 --results-dir {results}"
    flags += " --tensor-model-parallel-size 2 --hidden-dropout 0 --attention-dropout 0 --profile --profile-step-start 2"
    flags += " --profile-step-end 4 --profile-ranks 1"
    assert ranks(2)(runs.train, flags) == ["", ""]
    valid = runs.rows(results, "valid")
    assert valid[-1]["lm_loss"] < 0.6 * valid[0]["lm_loss"]
    assert valid[-1]["perplexity"] == pytest.approx(2.718281828 ** valid[-1]["lm_loss"], rel=1e-6)
    row = runs.rows(results)[-1]
    assert row["consumed_samples"] == 320
    assert row["tokens_per_second"] > 0
    assert (results / "config.yaml").is_file()
    assert list((results / "tensorboard").iterdir())
    trace = json.loads(gzip.decompress((results / "profile_rank1.json.gz").read_bytes()))["traceEvents"]
    marks = Counter(event["name"] for event in trace if event.get("cat") == "user_annotation")
    assert {name for name in marks if name.startswith("ProfilerStep")} == {"ProfilerStep#2", "ProfilerStep#3"}
    assert marks["optimizer"] == 2
    assert marks["forward-compute"] == marks["backward-compute"] == 2 * 4  # 4 microbatches
    assert not (results / "profile_rank0.json.gz").exists()


def test_kill_switch_saves_and_stops_all_ranks_and_blocks_the_next_start(
    ranks: RankPools, tmp_path: Path, data: Path
) -> None:
    switch, saved = tmp_path / "stop", tmp_path / "saved"
    flags = f"--data-path {data} --train-iters 6 --kill-switch-path {switch} --save {saved} --load {saved}"
    switch.touch()
    assert ranks(2)(runs.train, flags) == ["", ""]
    assert not saved.exists(), "nothing is built while the kill switch is there"
    switch.unlink()
    assert ranks(2)(runs.train, flags) == ["", ""]
    assert (saved / "latest").read_text().split()[0] == "global_step6"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data-path {tmp}/absent", "absent"),
        ("--data-path {tmp}/empty", "empty"),
        ("--data-path {data} --vocab-size 32", "32"),
        ("--data-path {data} --load {tmp}/stray", "no checkpoint"),
        ("--data-path {data} --load {data}.bin", "is a file"),
        ("--data-path {data} --deepspeed-config {tmp}/clash.json", "contradicts"),
        ("--data-path {data} --deepspeed-config {tmp}/ours.json", "optimizer"),
        ("--data-path {data} --seq-length 100000", "100001"),
        ("--data-path {data} --train-samples 4 --train-iters 4", "both given"),
    ],
)
def test_bad_input_is_refused_on_every_rank_and_writes_nothing(
    ranks: RankPools, tmp_path: Path, data: Path, flags: str, message: str
) -> None:
    (tmp_path / "empty.bin").touch()
    (tmp_path / "empty.idx").touch()
    (tmp_path / "stray").mkdir()
    (tmp_path / "stray" / "notes.txt").write_text("no checkpoint here")
    (tmp_path / "clash.json").write_text('{"zero_optimization": {"stage": 2}}')
    (tmp_path / "ours.json").write_text('{"optimizer": {"type": "Lamb"}, "zero_optimisation": {}}')
    results = tmp_path / "results"
    flags = flags.format(tmp=tmp_path, data=data) + f" --results-dir {results} --save {tmp_path / 'saved'}"
    if "--train-samples" not in flags:
        flags += " --train-iters 4"
    told = ranks(2)(runs.train, flags)
    assert all(message in fault for fault in told), told
    assert not results.exists()
    assert not (tmp_path / "saved").exists()


def test_faults_of_a_deepspeed_json_stand_beside_those_of_the_options(tmp_path: Path) -> None:
    path = tmp_path / "extra.json"
    path.write_text('{"zero_optimisation": {}}')
    with Signals() as signals, pytest.raises(ConfigError) as raised:
        main(f"--config tiny_bloom --data-path x --lr fast --deepspeed-config {path}".split(), signals)
    assert ["lr=" in fault or "zero_optimisation" in fault for fault in raised.value.faults] == [True, True]


def test_fault_of_one_rank_ends_the_run_on_all(ranks: RankPools, tmp_path: Path) -> None:
    """Data that one host lacks: its rank says what is missing, the other which rank failed."""
    told = ranks(2)(runs.fail_on_rank_one)
    assert "DataError: gone" in told[1]
    assert "OtherRankFailed: rank 1 on" in told[0]
    assert "gone" in told[0]


def test_a_run_resumes_on_another_layout(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    saved = tmp_path / "saved"
    flags = f"--data-path {data} --train-iters 4 --save {saved} --load {saved}"
    assert ranks(2)(runs.train, f"{flags} --tensor-model-parallel-size 2 --exit-interval 2") == ["", ""]
    assert (saved / "latest").read_text().split()[0] == "global_step2"
    assert ranks(2)(runs.train, f"{flags} --pipeline-model-parallel-size 2") == ["", ""]
    assert (saved / "latest").read_text().split()[0] == "global_step4"


def test_every_step_has_the_rates_of_the_schedule(ranks: RankPools, data: Path) -> None:
    flags = f"--data-path {data} --train-iters 4 --eval-iters 0 --lr-decay-style inverse-square-root"
    flags += " --lr-warmup-iters 1 --lr-warmup-init 4e-3 --weight-decay-incr-style linear"
    flags += " --start-weight-decay 0.1 --end-weight-decay 0.3"
    (rates,) = ranks(1)(runs.rates_of_steps, flags)
    expected = [(0, 4e-3, 0.1), (8, 1e-2, 0.15), (16, 1e-2 / 2**0.5, 0.2), (24, 1e-2 / 3**0.5, 0.25)]
    assert rates == [pytest.approx(step) for step in expected]


EVALUATIONS = [
    (1, ""),
    (1, "--no-pipeline-parallel --train-iters none"),
    (1, "--zero-stage 1 --offload-optimizer"),
    (2, "--zero-stage 2"),
    (2, "--zero-stage 3 --offload-optimizer --offload-param"),
    (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    (2, "--pipeline-model-parallel-size 2 --zero-stage 1"),
]


@pytest.mark.parametrize("precision", ["", pytest.param("--bf16", marks=pytest.mark.slow)])
def test_skip_train_logs_the_losses_of_the_checkpoint_without_an_optimizer(
    ranks: RankPools, tmp_path: Path, data: Path, precision: str
) -> None:
    saved, results = tmp_path / "saved", tmp_path / "results"
    flags = f"--data-path {data} --train-iters 4 {precision}"
    assert ranks(1)(runs.train, f"{flags} --save {saved} --results-dir {results}") == [""]
    before, rows = sorted(saved.rglob("*")), len((results / "metrics.jsonl").read_bytes().splitlines())
    expected = {kind: runs.rows(results, kind)[-1] for kind in ("valid", "test")}
    for size, layout in EVALUATIONS[:: 3 if precision else 1]:
        here = results if layout == "" else tmp_path / "evaluation"
        assert set(ranks(size)(runs.evaluate_only, f"{flags} --load {saved} --results-dir {here} {layout}")) == {""}
        for kind, row in expected.items():
            found = runs.rows(here, kind)[-1]
            assert (found["iteration"], found["num_tokens"]) == (4, row["num_tokens"])
            exact = layout == ""
            assert found["lm_loss"] == pytest.approx(row["lm_loss"], rel=0 if exact else 1e-2 if precision else 1e-6)
        assert runs.rows(here) == (runs.rows(results) if here == results else [])
    alone = f"--valid-data-path {data} --load {saved} --results-dir {tmp_path / 'alone'} {precision}"
    assert ranks(1)(runs.evaluate_only, alone) == [""]
    assert len(runs.rows(tmp_path / "alone", "valid")) == 1
    assert runs.rows(tmp_path / "alone", "test") == []
    # beside the training's rows, none of which is moved out
    assert len((results / "metrics.jsonl").read_bytes().splitlines()) == rows + 2
    assert sorted(saved.rglob("*")) == before


def test_a_folder_to_load_that_holds_nothing_is_a_fault(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    """But for the folder that the run saves to, which is empty at every first start: weights at random, unasked."""
    folder, empty = tmp_path / "misspelt", tmp_path / "empty"
    empty.mkdir()
    (empty / ".lock").touch()
    flags = f"--data-path {data} --train-iters 1"
    for start in ("", "--finetune", "--no-load-optim", f"--finetune --save {tmp_path / 'saved'}", "--ckpt-step 0"):
        (fault,) = ranks(1)(runs.train, f"{flags} --load {folder} {start}")
        assert f"load={folder} does not exist: there are no weights to start from" in fault, start
        (fault,) = ranks(1)(runs.train, f"{flags} --load {empty} {start}")
        assert f"load={empty} is empty" in fault, start
    # of the run's own folder only what names weights in it
    for start in ("--finetune", "--ckpt-step 2"):
        (fault,) = ranks(1)(runs.train, f"{flags} --load {folder} --save {folder} {start}")
        assert "does not exist" in fault, start
    assert not folder.exists()
    assert not (tmp_path / "saved").exists()
    assert ranks(1)(runs.train, f"{flags} --load {folder} --save {folder} --no-load-optim") == [""]


def test_a_run_goes_on_without_the_folder_that_it_began_with(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    """A requeued job, whose base has been removed since."""
    first = tmp_path / "first"
    assert ranks(1)(runs.train, f"--data-path {data} --train-iters 1 --save {first}") == [""]
    flags = f"--data-path {data} --train-iters 4 --load {first} --finetune --save {tmp_path / 'second'}"
    assert ranks(1)(runs.train, f"{flags} --exit-interval 2") == [""]
    first.rename(tmp_path / "elsewhere")
    assert ranks(1)(runs.train, flags) == [""]
    assert (tmp_path / "second" / "latest").read_text().split()[0] == "global_step4"


def test_skip_train_names_what_it_lacks(ranks: RankPools, tmp_path: Path, data: Path) -> None:
    (fault,) = ranks(1)(runs.train, f"--data-path {data} --skip-train --load {tmp_path / 'none'}")
    assert f"skip_train evaluates a checkpoint, and {tmp_path / 'none'} holds none" in fault
    (fault,) = ranks(1)(runs.train, f"--data-path {data} --skip-train --eval-iters 0")
    assert "skip_train evaluates, but eval_iters=0" in fault
    assert "skip_train evaluates a checkpoint, but load is not given" in fault


@pytest.mark.parametrize(
    "start", ["--finetune", pytest.param("--no-load-optim", marks=pytest.mark.slow), "--ckpt-step 2"]
)
def test_the_same_command_goes_on_from_what_it_saved_whole(
    ranks: RankPools, tmp_path: Path, data: Path, start: str
) -> None:
    """`--load` and what belongs to it are about the first start; a restart, or a requeued job, is another."""
    common = f"--data-path {data} --train-iters 6 --lr-decay-style constant --save-interval 2"
    assert ranks(1)(runs.train, f"{common} --save {tmp_path / 'first'} --exit-interval 4") == [""]
    common += f" --load {tmp_path / 'first'} {start}"
    whole, parts = f"{common} --save {tmp_path / 'whole'}", f"{common} --save {tmp_path / 'parts'}"
    assert ranks(1)(runs.train, whole) == [""]
    assert ranks(1)(runs.train, f"{parts} --exit-interval 5") == [""]
    assert (tmp_path / "parts" / "latest").read_text().split()[0] == "global_step5"
    assert ranks(1)(runs.train, f"{parts} --results-dir {tmp_path / 'results'}") == [""]
    assert [row["iteration"] for row in runs.rows(tmp_path / "results")] == [6]
    assert chaos.differing(tmp_path / "whole", tmp_path / "parts") == []
    # with other options of its start it is another run, which needs another folder unless this one is requested
    assert "holds checkpoints of another run (newest global_step6" in ranks(1)(runs.train, f"{parts} --no-load-rng")[0]
    again = f"{parts} --no-load-rng --allow-used-save --results-dir {tmp_path / 'again'}"
    assert ranks(1)(runs.train, again) == [""]
    assert runs.rows(tmp_path / "again")[0]["iteration"] == {"--finetune": 1, "--no-load-optim": 5}.get(start, 3)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    return subprocess.run(
        [sys.executable, "-m", "megatron.train", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=HANG_S,
    )


def test_command_says_what_is_wrong_and_exits_with_2(tmp_path: Path) -> None:
    wrong = command("--num-layer", "3")
    assert wrong.returncode == 2
    assert "did you mean --num-layers" in wrong.stderr
    absent = command(*runs.TINY.split(), "--data-path", str(tmp_path / "absent"), "--train-iters", "2")
    assert absent.returncode == 2
    assert "absent" in absent.stderr
    assert "Traceback" not in absent.stderr
