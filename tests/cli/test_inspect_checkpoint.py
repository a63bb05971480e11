"""tools/inspect_checkpoint.py: norms against NumPy's, damage and differences."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpoint import inspection
from megatron.checkpoint.format import Fragment
from megatron.checkpoint.writer import write_checkpoint
from megatron.cli import inspect_checkpoint
from megatron.parallel.shards import Shard

SHARDS = {
    "0.norm.weight": Shard((6,)),
    "1.gate_up.weight": Shard((8, 6), dim=0, pieces=(4, 4)),
    "tied_modules.word_embedding.weight": Shard((5, 6), dim=0, pieces=(5,)),
}
METADATA = {
    "run": {
        "id": "5af0",
        "start": {"load": "base"},
        "ancestors": [
            {"run": "07d2", "folder": "first/global_step9", "token": "s", "iteration": 9, "is_continued": False},
            {"run": "1e3c", "folder": "base/global_step2", "token": "t", "iteration": 2, "is_continued": True},
        ],
    },
    "progress": {"iteration": 7, "consumed_samples": 56000},
    "layout": {"tensor_model_parallel_size": 2, "zero_stage": 1},
    "versions": {"torch": "2.13.0"},
    "data_fingerprint": "abc123",
    "config": {"model": {"num_layers": 2}},
}


@pytest.fixture(params=[False, True], ids=["whole", "small chunks"], autouse=True)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test twice: with the default chunks, and with chunks so small that a tensor has several."""
    if request.param:
        monkeypatch.setattr(inspection, "CHUNK_NUMEL", 7)


def values(seed: int) -> dict[tuple[str, str], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        (name, kind): torch.randn(shard.shape, generator=generator)
        for name, shard in SHARDS.items()
        for kind in ("weight", "exp_avg")
    }


def write(folder: Path, tensors: dict[tuple[str, str], torch.Tensor]) -> Path:
    """Write a checkpoint with a row of padding behind the vocabulary, which holds large numbers."""
    fragments = []
    for (name, kind), full in tensors.items():
        local, padding = full.flatten(), 0
        if name.startswith("tied"):
            local, padding = torch.cat([local, torch.full((6,), 1e9)]), 1
        fragments.append(Fragment(name, kind, replace(SHARDS[name], padding=padding), 0, 1, 0, local, "bfloat16"))
    return write_checkpoint(folder, "global_step7", fragments, METADATA)


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    capsys.readouterr()
    status = inspect_checkpoint.main([str(each) for each in arguments])
    said = capsys.readouterr()
    return status, said.out + said.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    status, said = run(capsys, *arguments, "--json")
    return status, json.loads(said, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_content_of_a_checkpoint_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, values(0))
    status, said = run(capsys, tmp_path)
    assert status == 0
    assert said == run(capsys, folder)[1]
    assert said.splitlines() == [
        str(folder),
        "  tag               global_step7",
        f"  size              {(folder / 'rank_00000.safetensors').stat().st_size / 1000:.2f} kB in 1 file",
        "  parameters        84 in 3 tensors",
        "  kinds             weight, exp_avg",
        "  run               5af0",
        "  began at          base/global_step2, of run 1e3c",
        "  began at          first/global_step9, of run 07d2, weights alone",
        "  progress          iteration 7, consumed_samples 56,000",
        "  layout            tensor_model_parallel_size 2, zero_stage 1",
        "  versions          torch 2.13.0",
        "  data fingerprint  abc123",
        "  also              config (--json prints all)",
        "",
        "  parameter                           shape  dtype     cut            kinds",
        "  0.norm.weight                       6      bfloat16  whole          weight, exp_avg",
        "  1.gate_up.weight                    8 x 6  bfloat16  dim 0 (4 + 4)  weight, exp_avg",
        "  tied_modules.word_embedding.weight  5 x 6  bfloat16  dim 0          weight, exp_avg",
    ]


def test_norms_equal_those_of_numpy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = values(0)
    tensors["0.norm.weight", "exp_avg"][3] = math.nan
    write(tmp_path, tensors)
    _, found = run_json(capsys, tmp_path, "--norms")
    for (name, kind), tensor in tensors.items():
        norm = found["parameters"][name]["norms"][kind]
        if (name, kind) == ("0.norm.weight", "exp_avg"):
            assert norm == {"l2": "nan", "max": "nan"}
            continue
        assert norm["l2"] == pytest.approx(np.linalg.norm(tensor.double().numpy()), rel=1e-12)
        assert norm["max"] == np.abs(tensor.numpy()).max()
    status, said = run(capsys, tmp_path, "--norms")
    assert status == 0
    assert "L2 norm" in said


def test_verification_names_the_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, values(0))
    status, said = run(capsys, tmp_path, "--verify")
    assert (status, said.splitlines()[-1]) == (0, "verified: the checksums of all 6 fragments are right")
    path = folder / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    status, said = run(capsys, tmp_path, "--verify")
    assert status == 1
    assert f"DAMAGED\n{path}: exp_avg of tied_modules.word_embedding.weight (bytes" in said
    status, found = run_json(capsys, tmp_path, "--verify")
    assert status == 1
    assert "exp_avg of tied" in found["verified"]["damage"]


def test_equal_checkpoints_do_not_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = values(0)
    tensors["0.norm.weight", "exp_avg"][:2] = torch.tensor([math.nan, math.inf])
    write(tmp_path / "a", tensors)
    write(tmp_path / "b", tensors)
    status, said = run(capsys, "--diff", tmp_path / "a", tmp_path / "b")
    assert status == 0
    assert said.endswith("equal in every tensor\n")


def test_differences_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = values(0), values(0)
    second["1.gate_up.weight", "weight"][7, 5] += 0.5
    second["1.gate_up.weight", "weight"][0, 0] -= 0.25
    second["0.norm.weight", "exp_avg"][0] = math.nan
    write(tmp_path / "a", first)
    write(tmp_path / "b", second)
    status, found = run_json(capsys, "--diff", tmp_path / "a", tmp_path / "b")
    assert status == 1
    weights = [np.concatenate([t.numpy().ravel() for (_, k), t in s.items() if k == "weight"]) for s in (first, second)]
    a, b = (each.astype(np.float64) for each in weights)
    assert found["kinds"]["weight"] == {
        "largest": pytest.approx(np.abs(a - b).max(), rel=1e-12),
        "relative_norm": pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-12),
        "worst": "1.gate_up.weight",
    }
    assert found["kinds"]["exp_avg"]["largest"] == "inf"
    assert sorted(found["tensors"]) == ["exp_avg of 0.norm.weight", "weight of 1.gate_up.weight"]
    status, said = run(capsys, "--diff", tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert "2 tensors differ, by relative norm:" in said


def test_missing_tensors_and_other_shapes_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = values(0), values(0)
    del second["0.norm.weight", "exp_avg"]
    second["2.new", "weight"] = torch.zeros(3)
    write(tmp_path / "a", first)
    fragments = [
        Fragment(name, kind, Shard(tuple(full.shape)), 0, 1, 0, full.flatten())
        for (name, kind), full in second.items()
        if not name.startswith("1.")
    ]
    for kind in ("weight", "exp_avg"):
        fragments.append(Fragment("1.gate_up.weight", kind, Shard((6, 8)), 0, 1, 0, torch.zeros(48)))
    write_checkpoint(tmp_path / "b", "global_step7", fragments, {})
    status, said = run(capsys, "--diff", tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert "only in A: 1\n  exp_avg of 0.norm.weight" in said
    assert "only in B: 1\n  weight of 2.new" in said
    assert "another shape: 1\n  1.gate_up.weight: [8, 6] in A, [6, 8] in B" in said


def test_what_cannot_be_read_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, tmp_path) == (
        1,
        f"error: {tmp_path} holds no checkpoint; give a checkpoint's folder, or a run's --save folder\n",
    )
    (tmp_path / "notes").touch()
    status, said = run(capsys, tmp_path)
    assert status == 1
    assert said.startswith(f"error: {tmp_path} holds files but no checkpoint")
    for wrong in (["--verify"], [str(tmp_path), "--diff", "a", "b"], ["--diff", "a", "b", "--norms"]):
        with pytest.raises(SystemExit, match="2"):
            inspect_checkpoint.main(wrong)


def test_a_model_of_transformers_is_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    assert inspect_checkpoint.main([str(tmp_path)])
    assert "holds a model of transformers, or adapters, not checkpoints of a run" in capsys.readouterr().err
