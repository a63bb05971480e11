"""tools/convert_checkpoint.py: Hugging Face to ours and back, against transformers; what it refuses and leaves."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpoint.reader import Checkpoint, newest_checkpoint
from megatron.checkpoint.source import Slice
from megatron.cli import convert_checkpoint
from megatron.models.families import bloom
from megatron.options.progress import Progress
from megatron.options.stored import from_dict
from megatron.weights import huggingface_config, huggingface_files
from megatron.weights.deepspeed import deepspeed_checkpoint
from tests.models.test_hf_logits import CASES, VOCABULARY, Case, llama

transformers = pytest.importorskip("transformers")

MODELS: dict[str, Callable[[], Case]] = CASES | {
    "llama_3.2_tied": lambda: llama(groups=2, tied=True, scaled=True),
}


def convert(*arguments: str | Path) -> int:
    return convert_checkpoint.main([str(argument) for argument in arguments])


def convert_to(to: str, load: Path, save: Path, *more: str | Path) -> Path:
    assert convert("--load", load, "--save", save, "--to", to, *more) == 0
    return save


def make(name: str, folder: Path, max_shard_size: str = "5GB", dtype: torch.dtype = torch.float32) -> Any:
    """A model of transformers with random weights, norms and biases too, saved in `folder`."""
    model = MODELS[name]().theirs()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def enrich(folder: Path) -> None:
    """Add what the files of published models have and our options do not."""
    for file, more in {
        "config.json": {
            "_name_or_path": "org/model", "bos_token_id": 0, "eos_token_id": [2, 7], "pad_token_id": 3,
            "pretraining_tp": 4, "use_cache": False, "transformers_version": "4.30.1", "initializer_range": 0.013,
            "task_specific_params": {"text-generation": {"max_length": 50}}, "license": "of_its_own",
        },
        "generation_config.json": {"eos_token_id": [2, 7, 9], "temperature": 0.6, "top_p": 0.9, "do_sample": True},
    }.items():  # fmt: skip
        content = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps(content | more))


def jsons(folder: Path) -> dict[str, Any]:
    """Return the content of config.json and generation_config.json."""
    return {name: json.loads((folder / name).read_text()) for name in ("config.json", "generation_config.json")}


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def logits(model: Any) -> Tensor:
    tokens = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found: Tensor = model.eval().float()(tokens, use_cache=False).logits
    return found


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def said_difference(text: str) -> float:
    found = re.search(r"largest logit difference (\S+),", text)
    assert found, text
    return float(found[1])


# ---------------------------------------------------------------------------------------------------------------------
# Round trips


@pytest.mark.parametrize("max_shard_size", ["5GB", "50KB"])
@pytest.mark.parametrize("name", MODELS)
def test_hf_to_native_and_back_is_bitwise(
    name: str, max_shard_size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make(name, tmp_path / "hf", max_shard_size)
    enrich(tmp_path / "hf")
    convert_to("native", tmp_path / "hf", tmp_path / "native")
    assert said_difference(capsys.readouterr().out) < 1e-5  # transformers' logits against ours
    back = convert_to("hf", tmp_path / "native", tmp_path / "back", "--max-shard-size", max_shard_size)
    assert said_difference(capsys.readouterr().out) < 1e-5
    assert len(list(back.glob("*.safetensors"))) == len(list((tmp_path / "hf").glob("*.safetensors"))) or (
        max_shard_size != "5GB"
    )
    found, expected = weights(back), weights(tmp_path / "hf")
    assert set(found) == set(expected)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    again = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert type(again) is type(model)
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=1e-5)
    assert jsons(back) == jsons(tmp_path / "hf")


def test_a_native_checkpoint_starts_a_run(tmp_path: Path) -> None:
    make("llama_3.1", tmp_path / "hf", dtype=torch.bfloat16)
    checkpoint = newest_checkpoint(convert_to("native", tmp_path / "hf", tmp_path / "native"))
    assert checkpoint is not None
    checkpoint.verify()
    assert checkpoint.kinds == ("weight",)
    assert set(checkpoint.dtypes.values()) == {"bfloat16"}
    config = from_dict(checkpoint.metadata["config"])
    assert config.training.bf16
    assert config.model.rope_scaling_factor == 8.0
    assert Progress.from_saved(checkpoint.metadata["progress"]) == Progress()
    # fused and cut over two ranks: the parts of q, k and v of the second
    name = "layers.0.attention.qkv.weight"
    shard = checkpoint.parameters[name]
    source = weights(tmp_path / "hf")
    parts = [source[f"model.layers.0.self_attn.{part}_proj.weight"].float().chunk(2)[1] for part in "qkv"]
    expected = torch.cat(parts).flatten()
    assert torch.equal(checkpoint.read(Slice(name, shard, 0, expected.numel(), 1, 2)), expected)


def test_16_bit_weights_come_back_in_16_bit(tmp_path: Path) -> None:
    make("llama_gqa", tmp_path / "hf", dtype=torch.bfloat16)
    convert_to("native", tmp_path / "hf", tmp_path / "native")
    found = weights(convert_to("hf", tmp_path / "native", tmp_path / "back"))
    expected = weights(tmp_path / "hf")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_dtype_rounds_as_torch_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("llama_gqa", tmp_path / "hf")
    found = weights(convert_to("hf", tmp_path / "hf", tmp_path / "back", "--dtype", "bfloat16"))
    assert "equal" in capsys.readouterr().out  # with what rounding makes of the source
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in weights(tmp_path / "hf").items())


@pytest.mark.parametrize("name", ["gpt2", "bloom_12_heads", "llama_gqa"])
def test_through_universal_and_back_is_bitwise(name: str, tmp_path: Path) -> None:
    make(name, tmp_path / "hf")
    enrich(tmp_path / "hf")
    convert_to("universal", tmp_path / "hf", tmp_path / "universal")
    assert deepspeed_checkpoint.read(tmp_path / "universal").layout == "universal"
    convert_to("native", tmp_path / "universal", tmp_path / "native")
    for source in ("universal", "native"):
        back = convert_to("hf", tmp_path / source, tmp_path / f"from_{source}", "--no-verify")
        found = weights(back)
        assert all(torch.equal(found[key], tensor) for key, tensor in weights(tmp_path / "hf").items())
        assert jsons(back) == jsons(tmp_path / "hf")
    assert names(tmp_path) == ["from_native", "from_universal", "hf", "native", "universal"]


def test_the_tokenizer_of_the_source_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.weights.test_huggingface import save_tokenizer

    make("llama_mha", tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    convert_to("hf", tmp_path / "hf", tmp_path / "copy")
    convert_to("native", tmp_path / "hf", tmp_path / "native")
    capsys.readouterr()
    convert_to("hf", tmp_path / "native", tmp_path / "without")
    assert "--tokenizer DIR" in capsys.readouterr().out
    convert_to("hf", tmp_path / "native", tmp_path / "with", "--tokenizer", tmp_path / "hf")
    assert "with tokenizer.json" in capsys.readouterr().out
    for folder in ("copy", "with"):
        assert transformers.AutoTokenizer.from_pretrained(tmp_path / folder)("w3").input_ids == [5]


# ---------------------------------------------------------------------------------------------------------------------
# Verification


def test_a_wrong_map_is_found_by_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make("bloom_12_heads", tmp_path / "hf")
    monkeypatch.setitem(bloom.FAMILY.huggingface, "alibi", replace(bloom.BLOOM, qkv_by_head=False))
    assert convert("--load", tmp_path / "hf", "--save", tmp_path / "native", "--to", "native") == 1
    assert "above the tolerance" in capsys.readouterr().err
    assert names(tmp_path) == ["hf"]


def from_config(folder: Path) -> Any:
    content = json.loads((folder / "config.json").read_text())
    return huggingface_config.config_of(content, folder).model


def test_a_wrong_tensor_is_found_above_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make("llama_gqa", tmp_path / "hf")
    write = huggingface_files.WeightsWriter.write

    def flawed(self: Any, name: str, parts: Any, first: int) -> None:
        write(self, name, (part + 1e-3 if "layers.1.mlp.up" in name else part for part in parts), first)

    arguments = ("--load", tmp_path / "hf", "--save", tmp_path / "back", "--to", "hf", "--verify-limit", "1000")
    assert convert(*arguments) == 0
    assert "more than --verify-limit 1,000 parameters" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "back")
    monkeypatch.setattr(huggingface_files.WeightsWriter, "write", flawed)
    assert convert(*arguments) == 1
    assert "layers.1.mlp.gate_up.weight has other values" in capsys.readouterr().err
    assert names(tmp_path) == ["hf"]


def test_tensors_are_compared_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make("llama_gqa", tmp_path / "hf")
    find = importlib.util.find_spec

    def found(name: str) -> Any:
        return None if name == "transformers" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    convert_to("native", tmp_path / "hf", tmp_path / "native")
    assert re.search(r"verified: \d+ tensors equal; logits not compared: transformers is not", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        convert("--load", tmp_path / "hf", "--save", tmp_path / "other", "--to", "native", "--verify")
    assert "--verify needs transformers" in capsys.readouterr().err


def test_no_verify_reads_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make("llama_gqa", tmp_path / "hf")
    monkeypatch.setattr(convert_checkpoint, "verify", None)
    convert_to("native", tmp_path / "hf", tmp_path / "native", "--no-verify")
    assert "verified" not in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# Refused


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Return the message of a conversion that must fail."""
    capsys.readouterr()
    assert convert(*arguments) == 1
    return capsys.readouterr().err


def test_a_damaged_native_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("llama_gqa", tmp_path / "hf")
    native = convert_to("native", tmp_path / "hf", tmp_path / "native")
    path = next(native.glob("*/*.safetensors"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    said = refused(capsys, "--load", native, "--save", tmp_path / "back", "--to", "hf", "--no-verify")
    assert path.name in said
    assert names(tmp_path) == ["hf", "native"]


def test_the_native_checkpoint_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("llama_gqa", tmp_path / "hf")
    native = convert_to("native", tmp_path / "hf", tmp_path / "native")
    checkpoint = newest_checkpoint(native)
    assert checkpoint is not None
    rewrite_metadata(checkpoint, tmp_path / "other", vocab_size=VOCABULARY - 1)
    said = refused(capsys, "--load", tmp_path / "other", "--save", tmp_path / "back", "--to", "hf")
    assert "does not hold the model that its config describes: embedding.word.weight is (123, 64)" in said


def rewrite_metadata(checkpoint: Checkpoint, folder: Path, **model: Any) -> None:
    from megatron.checkpoint.format import Fragment
    from megatron.checkpoint.writer import write_checkpoint

    metadata = json.loads(json.dumps(checkpoint.metadata))
    metadata["config"]["model"] |= model
    fragments = (
        Fragment(name, "weight", shard, 0, 1, 0, checkpoint.read_full(name).flatten())
        for name, shard in checkpoint.parameters.items()
    )
    write_checkpoint(folder, "global_step0", fragments, metadata)


def test_bad_sources_and_targets_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, native = tmp_path / "hf", tmp_path / "native"
    make("llama_gqa", hf)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    full = ("--save", hf, "--to", "native")
    assert "is there already; give a new or empty folder" in refused(capsys, "--load", hf, *full)
    new = ("--save", native, "--to", "native")
    assert "holds no checkpoint" in refused(capsys, "--load", tmp_path / "empty", *new)
    assert "is a file" in refused(capsys, "--load", tmp_path / "file", *new)
    assert "is not there" in refused(capsys, "--load", tmp_path / "nowhere", *new)
    assert "contains its model's config" in refused(capsys, "--load", hf, *new, "--config", "tiny_llama")
    said = refused(capsys, "--load", hf, "--save", native, "--to", "hf", "--tokenizer", tmp_path / "empty")
    assert "holds no tokenizer.json" in said
    (hf / "checkpoint.json").write_text("{}")
    assert "config.json beside a native checkpoint" in refused(capsys, "--load", hf, *new)
    assert names(tmp_path) == ["empty", "file", "hf"]


def test_an_empty_folder_may_be_given(tmp_path: Path) -> None:
    make("llama_gqa", tmp_path / "hf")
    (tmp_path / "native").mkdir()
    convert_to("native", tmp_path / "hf", tmp_path / "native")


def test_a_full_disk_is_reported_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make("llama_gqa", tmp_path / "hf")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    said = refused(capsys, "--load", tmp_path / "hf", "--save", tmp_path / "native", "--to", "native")
    assert "0.0 MB free" in said
    assert names(tmp_path) == ["hf"]


def test_a_failing_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make("llama_gqa", tmp_path / "hf")
    written = 0

    def failing(file: int, data: Any, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 100_000:
            raise OSError(28, "No space left on device")
        return os.write(file, data)

    monkeypatch.setattr(huggingface_files.os, "pwrite", failing)
    said = refused(capsys, "--load", tmp_path / "hf", "--save", tmp_path / "back", "--to", "hf")
    assert "No space left on device" in said
    assert names(tmp_path) == ["hf"]


def test_a_source_whose_tensors_do_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("llama_gqa", tmp_path / "hf")
    tensors = weights(tmp_path / "hf")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "hf/model.safetensors")
    said = refused(capsys, "--load", tmp_path / "hf", "--save", tmp_path / "native", "--to", "native")
    assert "missing: model.norm.weight" in said
    assert names(tmp_path) == ["hf"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--to", "native", "--dtype", "float32"],
        ["--to", "universal", "--tokenizer", "x"],
        ["--to", "hf", "--max-shard-size", "much"],
        ["--to", "hf", "--max-shard-size", "0"],
        ["--to", "native", "--max-shard-size", "1GB"],
        ["--to", "onnx"],
    ],
)
def test_wrong_flags_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convert("--load", "a", "--save", "b", *arguments)
    assert "error:" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Several processes


def test_two_processes_write_the_files_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("llama_gqa", tmp_path / "theirs", max_shard_size="30KB")
    for count in ("1", "2"):
        convert_to("hf", tmp_path / "theirs", tmp_path / count, "--workers", count, "--max-shard-size", "20KB")
    files = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert len(files) > 10
    assert files == sorted(path.name for path in (tmp_path / "2").iterdir())
    for name in files:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name
    assert "tensors equal" in capsys.readouterr().out


@pytest.mark.parametrize("holds_run", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_write_the_universal_folder_of_one(tmp_path: Path, holds_run: bool) -> None:
    """Of a model of transformers, of which a native copy is made first, and of a run's checkpoint."""
    source = tmp_path / "theirs"
    make("llama_gqa", source)
    if holds_run:
        source = tmp_path / "native"
        convert_to("native", tmp_path / "theirs", source)
    for count in ("1", "2"):
        convert_to("universal", source, tmp_path / count, "--workers", count)
    one, two = (
        {str(path.relative_to(tmp_path / count)): path.read_bytes() for path in (tmp_path / count).rglob("*.pt")}
        for count in ("1", "2")
    )
    assert len(one) > 10
    assert one.keys() == two.keys()
    for name in one:
        # the identity of a run is drawn
        if not name.endswith("model_states.pt"):
            assert one[name] == two[name], name
    # nothing of the native copy is left
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == sorted(
        {"1", "2", "theirs", source.name}
    )


@pytest.mark.slow
def test_two_processes_write_a_checkpoint_and_name_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make("llama_gqa", tmp_path / "theirs")
    convert_to("native", tmp_path / "theirs", tmp_path / "native", "--workers", "2")
    one = Checkpoint(next((tmp_path / "native").glob("global_step*")))
    convert_to("native", tmp_path / "theirs", tmp_path / "single", "--workers", "1")
    other = Checkpoint(next((tmp_path / "single").glob("global_step*")))
    assert list(one.parameters) == list(other.parameters)
    assert all(torch.equal(one.read_full(name), other.read_full(name)) for name in other.parameters)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = 1e30
    model.save_pretrained(tmp_path / "large")
    capsys.readouterr()
    to_half = ("--to", "hf", "--dtype", "float16", "--workers", "2")
    assert convert("--load", tmp_path / "large", "--save", tmp_path / "half", *to_half) == 1
    assert "down_proj.weight has values beyond torch.float16's range" in capsys.readouterr().err
    assert not (tmp_path / "half").exists()


@pytest.mark.parametrize(
    ("more", "fault"),
    [(["--workers", "0"], "must be 1 or more"), (["--workers", "2", "--to", "megatron-core"], "is for")],
)
def test_workers_that_would_do_nothing_are_refused(
    more: list[str], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        convert("--load", tmp_path, "--save", tmp_path / "new", "--to", "hf", *more)
    assert fault in capsys.readouterr().err
