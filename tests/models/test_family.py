"""Families by name, and `freeze` over the names of their parameters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.models import families
from megatron.models.registry import FAMILIES, family_of
from megatron.options.config import Config, ConfigError
from megatron.options.stored import from_dict
from megatron.parallel.shards import declared_shards
from megatron.settings.validation import check

ROOT = Path(__file__).resolve().parents[2]


def config(*freeze: str, architecture: str = "bloom") -> Config:
    model = {"architecture": architecture, "num_layers": 12, "freeze": freeze}
    return from_dict({"model": model, "training": {"train_iters": 1}, "data": {"data_path": ["none"]}})


def trained(run: Config) -> set[str]:
    return {name for name, shard in declared_shards(family_of(run).layers(run)).items() if shard.trained}


def test_the_families_are_the_files_of_their_folder() -> None:
    folder = Path(families.__path__[0])
    assert list(FAMILIES) == sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def test_an_unknown_family_is_one_fault_that_lists_the_known_ones() -> None:
    (fault,) = check(config(architecture="gpt"), 1)
    names = ", ".join(FAMILIES)
    assert fault == f"architecture='gpt' is unknown; use {names}, or your own as package.module:ATTRIBUTE"


def test_what_is_not_a_family_is_refused() -> None:
    (fault,) = check(config(architecture="json:loads"), 1)
    assert "is a function without `layers`" in fault


def test_freeze_takes_names_and_patterns() -> None:
    every = trained(config())
    assert every - trained(config("final_norm.bias")) == {"final_norm.bias"}
    frozen = every - trained(config("embedding.*", "layers.[0-7].*"))
    assert {name.split(".")[0] for name in frozen} == {"embedding", "layers"}
    assert {name.split(".")[1] for name in frozen if name.startswith("layers")} == set("01234567")
    assert not {name for name in trained(config("*.bias")) if name.endswith("bias")}


def test_a_pattern_that_matches_nothing_is_refused_with_some_names() -> None:
    (fault,) = check(config("layers.0.*", "h.0.*"), 1)
    assert fault.startswith("freeze='h.0.*' matches no parameter; use names or shell patterns of them, such as ")
    assert "embedding.word.weight" in fault
    with pytest.raises(ConfigError, match=r"freeze='h\.0\.\*' matches no parameter"):
        family_of(config()).layers(config("h.0.*"))


def test_freezing_everything_is_refused() -> None:
    (fault,) = check(config("*"), 1)
    assert fault == "freeze=* matches every parameter; leave some to train"


def test_families_import_no_torch() -> None:
    names = ", ".join(f"megatron.models.families.{name}" for name in FAMILIES)
    code = f"import sys, {names}; print(sorted({{'torch', 'deepspeed'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_the_committed_page_of_families_is_up_to_date() -> None:
    tool = [sys.executable, "tools/document_families.py"]
    printed = subprocess.run(tool, cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout
    page = (ROOT / "docs" / "reference" / "families.md").read_text(encoding="utf-8")
    assert printed == page, "run `python tools/document_families.py > docs/reference/families.md`"
