"""tools/merge_checkpoints.py: means of a run's checkpoints, against those by hand, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import Checkpoint
from megatron.cli.merging import merge_checkpoints
from megatron.weights.merging import checkpoints
from megatron.weights.merging.checkpoints import moving_shares
from tests import runs
from tests.ranks import RankPools

FLAGS = f"--architecture llama --position-embedding-type rope {runs.TINY} --train-iters 8 --save-interval 2"


@pytest.fixture(scope="module")
def saved(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the steps 2, 4, 6 and 8, on two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("merged")
    data = runs.write_dataset(folder / "data")
    flags = f"{FLAGS} --data-path {data} --save {folder / 'saved'} --tensor-model-parallel-size 2 --ema-decay 0.5"
    assert ranks(2)(runs.train, flags) == [""] * 2
    return folder / "saved"


def merge(*arguments: Any) -> int:
    return merge_checkpoints.main([str(argument) for argument in arguments])


def tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {name: tensor.numpy().copy() for name, tensor in Checkpoint(folder).tensors()}


def by_hand(saved: Path, shares: dict[int, float]) -> dict[str, np.ndarray[Any, Any]]:
    models = {step: tensors(saved / f"global_step{step}") for step in shares}
    return {
        name: np.sum([share * models[step][name].astype(np.float64) for step, share in shares.items()], 0).astype("f4")
        for name in models[8]
    }


@pytest.mark.parametrize(
    ("arguments", "shares"),
    [
        (["{}", "--last", "3"], {4: 1 / 3, 6: 1 / 3, 8: 1 / 3}),
        # m = 4; m = 0.75 m + 0.25 x 6; m = 0.75 m + 0.25 x 8
        (["{}", "--last", "3", "--ema", "0.75"], {4: 0.5625, 6: 0.1875, 8: 0.25}),
        # left of the decay: 1 - 1 / 2 after two of four intervals
        (
            ["{}", "--last", "4", "--anneal", "minus_sqrt"],
            {2: 0.5, 4: 0.5**0.5 - 0.5, 6: 0.75**0.5 - 0.5**0.5, 8: 1 - 0.75**0.5},
        ),
        (["{}/global_step2=1", "{}/global_step8=3"], {2: 0.25, 8: 0.75}),
        (["{}/global_step2=-1", "{}/global_step8=2"], {2: -1, 8: 2}),
    ],
)
def test_the_mean_is_that_by_hand(saved: Path, tmp_path: Path, arguments: list[str], shares: dict[int, float]) -> None:
    given = [argument.format(saved) for argument in arguments]
    assert merge("--load", *given, "--save", tmp_path / "mean", "--to", "native") == 0
    found = tensors(tmp_path / "mean" / "global_step0")
    expected = by_hand(saved, shares)
    assert found.keys() == expected.keys()
    for name in expected:
        # a product and a sum may be rounded together
        np.testing.assert_array_max_ulp(found[name], expected[name], maxulp=1)


def test_a_moving_average_is_its_recurrence() -> None:
    values, decay = np.random.default_rng(0).normal(size=9), 0.9
    average = values[0]
    for value in values[1:]:
        average = decay * average + (1 - decay) * value
    assert np.dot(moving_shares(9, decay), values) == pytest.approx(average, rel=1e-14)


@pytest.mark.parametrize("shape", ["linear", "cosine", "minus_sqrt", "exponential"])
def test_annealed_shares_give_what_the_steps_of_a_decay_would(shape: str) -> None:
    """Of SGD whose gradients stay as they are: the steps from one checkpoint to the next, each times what is left."""
    steps, left = np.random.default_rng(0).normal(size=6), []
    for progress in np.arange(1, 7) / 7:
        left.append(
            {
                "linear": 1 - progress,
                "cosine": np.cos(np.pi * progress / 2) ** 2,
                "minus_sqrt": 1 - progress**0.5,
                "exponential": np.exp2(1 - progress) - 1,
            }[shape]
        )
    constant = 3.0 - np.concatenate([[0.0], np.cumsum(steps)])  # seven checkpoints
    shares = checkpoints.annealed_shares(7, shape)
    assert np.dot(shares, constant) == pytest.approx(3.0 - np.dot(left, steps), rel=1e-13)
    assert sum(shares) == pytest.approx(1)
    if shape == "linear":
        assert shares == pytest.approx([1 / 7] * 7)


def test_transformers_and_a_run_go_on_from_it(saved: Path, tmp_path: Path, ranks: RankPools) -> None:
    transformers = pytest.importorskip("transformers")
    assert merge("--load", saved, "--last", 2, "--save", tmp_path / "hf", "--to", "hf") == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    expected = by_hand(saved, {6: 0.5, 8: 0.5})["embedding.word.weight"]
    np.testing.assert_array_equal(theirs.get_input_embeddings().weight.detach().numpy(), expected)
    assert merge("--load", saved, "--last", 2, "--save", tmp_path / "native", "--to", "native") == 0
    flags = f"{FLAGS} --data-path {saved.parent / 'data'} --load {tmp_path / 'native'} --finetune"
    assert ranks(1)(runs.train, f"{flags} --train-iters 1") == [""]


def test_averages_that_are_merged_are_verified(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = shutil.copytree(saved, tmp_path / "copied")
    folder = copied / "global_step8"
    at = next(at for at in Checkpoint(folder).fragments if at.kind == "ema")
    content = bytearray((folder / at.file).read_bytes())
    content[at.offset + 1] ^= 1
    (folder / at.file).write_bytes(content)
    given = ("--load", copied, "--last", 2, "--to", "native")
    assert merge(*given, "--weights", "ema", "--save", tmp_path / "averages") == 1
    assert f"ema of {at.name}" in capsys.readouterr().err
    # what is not read does no harm
    assert merge(*given, "--save", tmp_path / "trained") == 0


def test_checkpoints_of_an_unknown_run_are_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be of several runs, whose mean would be a model of none."""
    monkeypatch.setattr(checkpoints, "read_latest", lambda save: ("global_step8", None))
    with pytest.raises(CheckpointError, match="does not say which run saved there last"):
        checkpoints.newest_of_run(saved, 2)


def test_what_is_refused(saved: Path, tmp_path: Path, ranks: RankPools, capsys: pytest.CaptureFixture[str]) -> None:
    other = (
        f"{FLAGS} --data-path {saved.parent / 'data'} --save {tmp_path / 'other'} --norm-epsilon 1e-4 --train-iters 2"
    )
    assert ranks(1)(runs.train, other) == [""]
    for load, message in (
        (["{}", "--last", "5"], "holds 4 checkpoints of its run, but --last is 5; use 4"),
        (["{}/global_step2=1", "{}/global_step4=-1"], "the weights add up to 0, but a mean needs a positive sum"),
        (["{}/global_step2", f"{tmp_path}/other"], "is of norm_epsilon=1e-05"),
        (["{}/nothing", "{}/global_step4"], "is not there"),
        # the newest by its folder's name, and by that of the saves
        (["{}/global_step8=0.7", "{}=0.3"], "is named twice; name it once, with a weight"),
        (["{}/global_step8", "{}/global_step4", "--ema", "0.9"], "global_step4 is of step 4, "),
        (["{}/global_step6", "{}/global_step4", "--anneal", "cosine"], "name the oldest first"),
    ):
        given = [argument.format(saved) for argument in load]
        assert merge("--load", *given, "--save", tmp_path / "mean", "--to", "native") != 0
        assert message in capsys.readouterr().err
        assert not (tmp_path / "mean").exists()
    for load in (
        ["{}"],
        ["{}", "{}", "--last", "2"],
        ["{}=2", "--last", "2"],
        ["{}", "--last", "2", "--ema", "1"],
        ["{}", "--last", "2", "--ema", "0.5", "--anneal", "linear"],
        ["{}=2", "{}", "--anneal", "linear"],
    ):
        with pytest.raises(SystemExit):
            merge("--load", *[argument.format(saved) for argument in load], "--save", tmp_path / "x", "--to", "native")
        capsys.readouterr()
