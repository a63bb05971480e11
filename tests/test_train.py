"""megatron.train from data on disk to metrics and checkpoints, and back."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import chaos
from tests import runs
from tests.ranks import RankPools

EXACT = ("iteration", "consumed_samples", "lm_loss", "learning_rate", "grad_norm", "global_batch_size")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return runs.write_dataset(tmp_path / "data")


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
        (2, "--zero-stage 2 --bf16"),
        (1, "--architecture llama --position-embedding-type rope"),
    ],
)
def test_stopped_and_resumed_run_equals_the_uninterrupted_one(
    ranks: RankPools, tmp_path: Path, data: Path, world_size: int, layout: str
) -> None:
    common = f"--data-path {data} --train-samples 96 --rampup-batch-size 4 4 24 --lr-warmup-samples 16 {layout}"
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
    flags += " --tensor-model-parallel-size 2 --hidden-dropout 0 --attention-dropout 0 --profile --profile-steps 2 3"
    flags += " --profile-ranks 1"
    assert ranks(2)(runs.train, flags) == ["", ""]
    valid = runs.rows(results, "valid")
    assert valid[-1]["lm_loss"] < 0.6 * valid[0]["lm_loss"]
    assert valid[-1]["perplexity"] == pytest.approx(2.718281828 ** valid[-1]["lm_loss"], rel=1e-6)
    row = runs.rows(results)[-1]
    assert row["consumed_samples"] == 320
    assert row["tokens_per_second"] > 0
    assert (results / "config.yaml").is_file()
    assert list((results / "tensorboard").iterdir())
    assert b"traceEvents" in gzip.decompress((results / "profile_rank1.json.gz").read_bytes())
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
    (tmp_path / "ours.json").write_text('{"optimizer": {"type": "Adam"}}')
    results = tmp_path / "results"
    flags = flags.format(tmp=tmp_path, data=data) + f" --results-dir {results} --save {tmp_path / 'saved'}"
    if "--train-samples" not in flags:
        flags += " --train-iters 4"
    told = ranks(2)(runs.train, flags)
    assert all(message in fault for fault in told), told
    assert not results.exists()
    assert not (tmp_path / "saved").exists()


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


@pytest.mark.parametrize("start", ["--finetune", "--no-load-optim", "--ckpt-step 2"])
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
    # told to start in another way, a run does, in a folder of its own unless another one is requested
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
        timeout=120,
    )


def test_command_says_what_is_wrong_and_exits_with_2(tmp_path: Path) -> None:
    wrong = command("--num-layer", "3")
    assert wrong.returncode == 2
    assert "did you mean --num-layers" in wrong.stderr
    absent = command(*runs.TINY.split(), "--data-path", str(tmp_path / "absent"), "--train-iters", "2")
    assert absent.returncode == 2
    assert "absent" in absent.stderr
    assert "Traceback" not in absent.stderr
