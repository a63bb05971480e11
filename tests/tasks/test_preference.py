"""Preference training: packed pairs have the losses, rewards and gradients of answers alone, on every layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from megatron.settings.command_line import parse_arguments
from megatron.tasks.preference import PreferenceTask
from tests import runs
from tests.ranks import RankPools
from tests.tasks import pairs
from tests.tasks.test_sft import LAYOUTS
from tests.training.layouts import MODELS
from tests.training.test_layouts import LAYOUTS as NINE_LAYOUTS

LORA = "--lora-rank 4 --lora-alpha 8 --global-batch-size 5 --beta 0.5"
STEPS = 3
LR = {"llama_gqa": 3.0, "bloom_alibi": 300.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pairs.write_pairs(tmp_path_factory.mktemp("pairs") / "pairs", pairs.some_pairs(15, 33))


@pytest.mark.parametrize(
    ("model", "layout", "packing"),
    [
        pytest.param("llama_gqa", "", "--max-batch-len 96", marks=pytest.mark.slow),
        ("bloom_alibi", "tp2 sp", "--max-batch-len 96 --bucketing octave --buckets-per-octave 2"),
        (
            "llama_gqa",
            "pp2",
            "--packing none --micro-batch-size 2 --lora-target-modules all-linear embed_tokens --ld-alpha 0.3",
        ),
        ("bloom_alibi", "zero3", "--packing dataset --global-batch-size 2 --reference stored --ld-alpha 0.3"),
        *(
            pytest.param(model, layout, "--max-batch-len 96", marks=pytest.mark.slow)
            for model in ("bloom_alibi", "llama_gqa")
            for layout in LAYOUTS
            if layout != "offload"  # has no SGD, and another optimizer would hide the gradients' scale
        ),
    ],
)
def test_packed_pairs_are_trained_as_answers_alone(
    ranks: RankPools, data: Path, model: str, layout: str, packing: str
) -> None:
    """The reference is the base without its adapters, which the first step moves away from it."""
    world_size, flags = LAYOUTS[layout] if layout else (1, "")
    common = f"{MODELS[model]} --data-path {data} {LORA} {packing} --lr {LR[model]}"
    (expected,) = ranks(1)(pairs.dense, common, STEPS)
    expected[0].pop("rewards/accuracies", None)  # of margins of 0, which a processor may round up
    for found in ranks(world_size)(pairs.train, f"{common} {flags}", STEPS):
        found[0].pop("rewards/accuracies", None)
        for step, there in zip(found, expected, strict=True):
            assert step == pytest.approx(there, rel=1e-6, abs=5e-6)
    assert expected[0]["rewards/margins"] == 0
    assert abs(expected[-1]["rewards/margins"]) > 0.01


@pytest.mark.parametrize(("bucketing", "is_whole"), [("off", False), ("octave", True)])
def test_only_the_tokens_of_answers_are_projected_unless_shapes_are_few(
    ranks: RankPools, data: Path, bucketing: str, is_whole: bool
) -> None:
    flags = f"{MODELS['llama_gqa']} {LORA} --data-path {data} --max-batch-len 96 --bucketing {bucketing}"
    ((num_labels, num_places, num_answers),) = ranks(1)(pairs.labels_of_a_step, flags)
    assert num_labels == (num_places if is_whole else num_answers)
    assert num_answers < 0.8 * num_places


KTO = "--preference-loss kto --beta 0.5 --global-batch-size 9 --desirable-weight 4"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs, each of which gives two samples, and rows with one answer."""
    rows: list[Any] = pairs.some_pairs(15, 33)
    rows = [(p, c if n % 4 != 1 else [], r if n % 4 != 2 else []) for n, (p, c, r) in enumerate(rows)]
    return pairs.write_pairs(tmp_path_factory.mktemp("answers") / "answers", rows)


@pytest.mark.parametrize(
    ("model", "layout", "flags"),
    [
        pytest.param(
            "llama_gqa", "pp2", "--lora-rank 4 --packing none --micro-batch-size 2 --lr 5", marks=pytest.mark.slow
        ),
        ("bloom_alibi", "dp2", "--max-batch-len 64 --lr 0.3"),
        ("llama_gqa", "tp2 sp", "--lora-rank 4 --reference stored --max-batch-len 64 --lr 5"),
    ],
)
def test_answers_of_kto_are_trained_as_alone(
    ranks: RankPools, answers: Path, model: str, layout: str, flags: str
) -> None:
    """The KL term is the mean over the mismatched answers of all microbatches and ranks."""
    world_size, layout_flags = LAYOUTS[layout]
    common = f"{MODELS[model]} --data-path {answers} {KTO} {flags}"
    (expected,) = ranks(1)(pairs.dense, common, STEPS)
    for found in ranks(world_size)(pairs.train, f"{common} {layout_flags}", STEPS):
        for step, there in zip(found, expected, strict=True):
            assert step == pytest.approx(there, rel=1e-6, abs=5e-6)
    assert max(step["kl"] for step in expected) > 0.01


def trainings(folder: Path, model: str, objectives: Sequence[str]) -> list[str]:
    """Arguments of runs over the data in a folder: each objective with adapters and without, by each reference."""
    common = f"{MODELS[model]} --global-batch-size 6 --beta 0.5 --max-batch-len 64"
    scale = LR[model] / LR["llama_gqa"]
    kinds = {"": f"--lr {0.03 * scale}", "lora": f"--lora-rank 4 --lr {scale}"}
    kinds["stored"] = f"{kinds['lora']} --reference stored"
    return [
        f"{common} --data-path {folder / ('answers' if 'kto' in loss or 'unpaired' in loss else 'pairs')} {flags} "
        f"--preference-loss {loss}"
        for loss in objectives
        for kind, flags in kinds.items()
        if kind != "stored" or loss.split()[0] not in ("orpo", "simpo", "cpo")  # which have no reference
    ]


OTHERS = (
    *("hinge", "ipo", "robust --label-smoothing 0.2 --sft-weight 0.7", "orpo", "simpo"),
    *("exo_pair --label-smoothing 0.001", "discopop --ld-alpha 0.3 --sft-weight 0.7", "cpo", "apo_down"),
    *("sigmoid --label-smoothing 0.1 --f-divergence js_divergence", "sppo_hard"),
)
ALL = ("sigmoid", *OTHERS, "kto --desirable-weight 4", "apo_zero_unpaired")


@pytest.mark.parametrize(
    ("model", "layout", "objectives"),
    [
        ("llama_gqa", "121", ("ipo", "orpo")),
        *(
            pytest.param(model, layout, ALL, marks=pytest.mark.slow)
            for model in ("llama_gqa", "bloom_alibi")
            for layout in NINE_LAYOUTS[1:]
        ),
    ],
)
def test_every_objective_is_that_of_one_rank(
    ranks: RankPools, tmp_path: Path, model: str, layout: str, objectives: Sequence[str]
) -> None:
    """Each rank's numbers of two steps. The stored references are computed on each layout by itself."""
    tp, pp, dp = map(int, layout)
    folders = [tmp_path / name for name in ("alone", "ranks")]
    for folder in folders:
        folder.mkdir()
        rows: list[Any] = pairs.some_pairs(12, 33)
        pairs.write_pairs(folder / "pairs", rows)
        pairs.write_pairs(folder / "answers", [(p, c, r if n % 3 else []) for n, (p, c, r) in enumerate(rows)])
    flags = f" --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    alone, cut = (trainings(folder, model, objectives) for folder in folders)
    # one task each: the ranks let go of a run's process groups, which have polling threads, at the end of a task
    for of_one_rank, arguments in zip(alone, cut, strict=True):
        (expected,) = ranks(1)(pairs.train, of_one_rank, 2)
        expected[0].pop("rewards/accuracies", None)  # of margins of 0, which a layout may round up
        for found in ranks(tp * pp * dp)(pairs.train, arguments + flags, 2):
            found[0].pop("rewards/accuracies", None)
            for step, there in zip(found, expected, strict=True):
                # a loss is of sums of some 100 in float32, whose order differs
                assert step == pytest.approx(there, rel=1e-6, abs=1e-5), arguments


def test_a_stored_reference_is_that_of_the_start(ranks: RankPools, tmp_path: Path) -> None:
    """Of the whole model, computed on one layout, gone on with on another after a stop, and the same numbers there."""
    data = pairs.write_pairs(tmp_path / "pairs", pairs.some_pairs(15, 33))
    common = f"{MODELS['llama_gqa']} --data-path {data} --global-batch-size 5 --beta 0.5 --max-batch-len 96 --lr 0.3"
    (expected,) = ranks(1)(pairs.dense, common, 2)
    (path,) = data.parent.glob("pairs.reference-*")
    values = safetensors.numpy.load_file(path)["log_probs"]
    assert np.isfinite(values).all()
    header = path.read_bytes()[: -values.nbytes]
    path.write_bytes(header + np.where(np.arange(15)[:, None] % 3 == 0, np.nan, values).astype("<f4").tobytes())
    for found in ranks(2)(pairs.train, f"{common} {LAYOUTS['tp2 sp'][1]}", 2):
        for step, there in zip(found, expected, strict=True):
            if there["rewards/margins"] == 0:  # which layout rounds up decides
                step["rewards/accuracies"] = there["rewards/accuracies"]
            assert step == pytest.approx(there, rel=1e-6, abs=5e-6)
    assert np.allclose(safetensors.numpy.load_file(path)["log_probs"], values, rtol=1e-6, atol=0)
    adapters = f"{common} --lora-rank 4 --reference stored"
    others = ["--seed 5", "--rotary-base 500"]  # another model at the start is another reference, of equal weights too
    for count, flags in enumerate([*(f"{common} {each}" for each in others), adapters, f"{adapters} {others[1]}"], 2):
        assert ranks(1)(pairs.reference_files, flags, str(data)) == [count], flags


def test_a_resumed_run_needs_the_reference_of_its_start(ranks: RankPools, tmp_path: Path) -> None:
    first = pairs.write_pairs(tmp_path / "pairs", pairs.some_pairs(15, 33))
    data = f"{first} {pairs.write_pairs(tmp_path / 'more', pairs.some_pairs(6, 33, seed=1))}"
    flags = "--task preference --split 1,0,0 --num-epochs 1 --micro-batch-size 1 --vocab-size 250 --seq-length 32"
    flags += f" --global-batch-size 5 --hidden-dropout 0 --attention-dropout 0 --architecture llama --data-path {data}"
    flags += f" --position-embedding-type rope --save {tmp_path / 'saved'}"
    kept = f"{flags} --results-dir {tmp_path / 'parts'}"
    assert ranks(1)(runs.train, f"{kept} --exit-interval 1") == [""]
    assert ranks(1)(runs.train, f"{flags.replace('saved', 'whole')} --results-dir {tmp_path / 'whole'}") == [""]
    (file,) = tmp_path.glob("pairs.reference-*")
    hidden = file.rename(tmp_path / "hidden")
    (refused,) = ranks(1)(runs.train, kept)
    assert "the reference of 30 of 42 answers is missing" in refused
    hidden.replace(file)
    assert ranks(1)(runs.train, kept) == [""]
    parts, whole = ({row["iteration"]: row for row in runs.rows(tmp_path / name)} for name in ("parts", "whole"))
    assert list(parts) == list(whole) == [1, 2, 3, 4, 5]
    for iteration, row in whole.items():
        assert parts[iteration]["lm_loss"] == row["lm_loss"]
        assert parts[iteration]["metrics"] == row["metrics"]


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("hinge --label-smoothing 0.1", "label_smoothing=0.1 has no effect without preference_loss=sigmoid, robust"),
        ("kto --ld-alpha 0.5", "ld_alpha=0.5 has no effect without"),
        ("apo_zero --f-divergence forward_kl", "f_divergence=forward_kl has no effect without"),
        ("orpo --f-divergence forward_kl", "f_divergence=forward_kl has no effect without"),
        ("sigmoid --discopop-tau 1", "discopop_tau=1.0 has no effect without preference_loss=discopop, unlike sigmoid"),
        ("sigmoid --undesirable-weight 2", "undesirable_weight=2.0 has no effect without preference_loss=kto, apo_"),
        ("exo_pair", "label_smoothing=0.0 makes the loss of preference_loss=exo_pair infinite; give one"),
    ],
)
def test_an_option_that_an_objective_does_not_read_is_refused(flags: str, refused: str) -> None:
    words = f"--task preference --num-epochs 1 --data-path none --global-batch-size 2 --preference-loss {flags}"
    (fault,) = PreferenceTask(parse_arguments(words.split())[0]).faults(1)
    assert refused in fault


def test_f_alpha_without_its_divergence_is_named_in_a_warning() -> None:
    words = "--task preference --num-epochs 1 --f-divergence js_divergence --f-alpha 2"
    (line,) = PreferenceTask(parse_arguments(words.split())[0]).idle()
    assert line.startswith("f_alpha=2.0 has no effect without f_divergence=alpha_divergence")
