"""Releases of DeepSpeed: the fork of Gaudi's software, a checkout in MEGATRON_DEEPSPEED_FORK, trains as upstream."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest

from megatron.options.config import ConfigError
from megatron.training.deepspeed.releases import MEMBERS, NEVER, adapted, check_members, prints_steps
from tests.ranks import RankPools
from tests.runs import rows, train, write_dataset

FORK = os.environ.get("MEGATRON_DEEPSPEED_FORK")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("release", "given", "expected", "prints"),
    [
        ("0.19.8", {}, None, False),
        ("0.16.1+hpu.synapse.v1.21.0", {}, NEVER, False),
        ("0.16.1", {"steps_per_print": 5}, 5, True),
        ("0.19.8", {"steps_per_print": 5}, 5, True),
    ],
)
def test_steps_are_printed_where_the_user_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, release: str, given: dict[str, int], expected: int | None, prints: bool
) -> None:
    monkeypatch.setattr(deepspeed, "__version__", release)
    found = adapted(dict(given)).get("steps_per_print")
    assert found == expected
    assert prints_steps(SimpleNamespace(steps_per_print=lambda: found)) is prints


def test_a_release_without_a_member_that_is_replaced_is_refused() -> None:
    """It would reduce by itself, beside our reduction, if `allreduce_gradients` had another name."""
    members = dict.fromkeys(MEMBERS["DeepSpeedEngine"])
    check_members(type("DeepSpeedEngine", (), members)())
    del members["allreduce_gradients"]
    derived = type("OwnEngine", (type("DeepSpeedEngine", (), members),), {})
    with pytest.raises(ConfigError, match=r"has no allreduce_gradients in its OwnEngine.*install deepspeed 0\.19\.8"):
        check_members(derived())


def test_each_member_is_one_that_training_names() -> None:
    sources = [path for path in (ROOT / "megatron" / "training").rglob("*.py") if path.name != "releases.py"]
    text = "\n".join(path.read_text() for path in sources)
    unnamed = {name for names in MEMBERS.values() for name in names if not re.search(rf"\b{name}\b", text)}
    assert not unnamed


@pytest.mark.skipif(FORK is None, reason="MEGATRON_DEEPSPEED_FORK names no checkout")
@pytest.mark.parametrize(
    "layout", ["", "--bf16", "--bf16 --no-pipeline-parallel", "--no-pipeline-parallel --zero-stage 3"]
)
def test_the_fork_trains_as_upstream_does(ranks: RankPools, tmp_path: Path, layout: str) -> None:
    flags = f"--data-path {write_dataset(tmp_path / 'data')} --train-iters 3 --split 1,0,0 {layout}"
    assert ranks(1)(train, f"{flags} --results-dir {tmp_path / 'upstream'}") == [""]
    command = "import sys; from tests.runs import train; import deepspeed; sys.exit(train(sys.argv[1]) or None)"
    variables = os.environ | {
        "PYTHONPATH": f"{FORK}{os.pathsep}{ROOT}",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        [sys.executable, "-c", command, f"{flags} --results-dir {tmp_path / 'fork'}"],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    losses = [[row["lm_loss"] for row in rows(tmp_path / name)] for name in ("upstream", "fork")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
