"""Fine-tuning on two ranks that share rows of tokens, by InstructLab's arguments and the scripts, equals one rank's."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron import api
from megatron.cli.launch import with_processed_data
from megatron.launch.dialects.hl_requests import from_environment
from megatron.launch.instructlab import run
from megatron.launch.preflight import preflight
from tests import runs
from tests.finetuning_files import REQUIRED, write_chats, write_model
from tests.ranks import RankPools

TRAIN = functools.partial(runs.train, below="")
SCRIPT = {"HL_DEVICE": "cpu", "HL_SEQ_LEN": "128", "HL_MAX_BATCH_LEN": "512", "HL_GBS": "16", "HL_SAVE": "0"}
SCRIPT |= {"HL_CHAT_TEMPLATE": "chatml", "HL_BF16": "0", "HL_NUM_EPOCHS": "1", "HL_LOG_INTERVAL": "1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "base")
    write_chats(tmp_path / "chats.jsonl")
    pairs = [{"prompt": f"say {n} ", "chosen": f"yes, {n}", "rejected": f"no {n} {n}"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return tmp_path


def assert_equal_steps(alone: Path, shared: Path) -> None:
    """Every loss, norm and metric of the objective."""
    expected, found = runs.rows(alone), runs.rows(shared)
    assert [row["context_parallel_size"] for row in map(config_of, (alone, shared))] == [1, 2]
    assert len(found) == len(expected) > 2
    for one, two in zip(expected, found, strict=True):
        names = ["lm_loss", "grad_norm"]
        np.testing.assert_allclose([two[name] for name in names], [one[name] for name in names], rtol=1e-6)
        assert two.get("metrics", {}) == pytest.approx(one.get("metrics", {}), rel=1e-6, abs=1e-6)


def config_of(results: Path) -> Any:
    import yaml

    return yaml.safe_load((results / "config.yaml").read_text())["parallel"]


def test_instructlabs_run(ranks: RankPools, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank shards nothing; two do as HYBRID_SHARD, the default, says: ZeRO-3."""
    monkeypatch.setattr(run, "run_to_the_end", lambda command, environment, log: None)
    paths = {"model_path": str(folder / "base"), "data_path": str(folder / "chats.jsonl")}
    paths["data_output_dir"] = str(folder / "data")
    for size in (1, 2):
        results = folder / f"of_{size}"
        given = REQUIRED | paths | {"ckpt_output_dir": str(results), "checkpoint_at_epoch": False}
        options = {"context_parallel_size": size}
        api.run_training(api.TorchrunArgs(nproc_per_node=size), api.TrainingArgs(**given, engine_options=options))
        assert ranks(size)(TRAIN, f"--config {results / 'run_training.yaml'}") == [""] * size
    assert_equal_steps(folder / "of_1", folder / "of_2")


@pytest.mark.parametrize(
    ("script", "data", "flags"),
    [("sft", "chats.jsonl", ["--lr", "1e-3"]), ("dpo", "pairs.jsonl", ["--lr", "1e-2", "--lora-dropout", "0"])],
)
def test_a_scripts_run(ranks: RankPools, folder: Path, script: Any, data: str, flags: list[str]) -> None:
    given = SCRIPT | {"HL_MODEL": str(folder / "base"), "HL_DATA": str(folder / data)}
    for size in (1, 2):
        variables = {"HL_CP": str(size), "HL_RESULTS_DIR": str(folder / f"of_{size}")}
        plan = preflight(from_environment(given | variables, script, flags))
        assert plan.fine_tuning is not None
        plan = with_processed_data(plan, plan.fine_tuning)
        assert ranks(size)(TRAIN, " ".join(plan.train_flags)) == [""] * size
    assert_equal_steps(folder / "of_1", folder / "of_2")
