"""A Llama as Meta publishes it computes what its published forward pass does, from any files and on any layout."""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.reader import newest_checkpoint
from megatron.checkpoint.source import Slice
from megatron.cli import convert_checkpoint, model_config
from megatron.data.tokenizers.build import meta_tokenizer
from megatron.generation.options import LoadOptions
from megatron.generation.saved_model import layout_faults
from megatron.parallel.shards import Shard
from megatron.weights import conversion
from megatron.weights.huggingface_config import preset_of
from megatron.weights.meta.params import Params
from megatron.weights.meta.source import MetaSource
from megatron.weights.model import whole_model
from tests.generation.stages import loaded_logits
from tests.ranks import RankPools
from tests.training import layouts
from tests.training.test_layouts import arguments
from tests.weights.meta import LLAMA_3, RELEASES, Release, draw, logits, write

TOKENS = torch.from_numpy(np.random.default_rng(3).integers(0, 96, (2, 24)))


def assert_near(found: Any, expected: torch.Tensor) -> None:
    """`found`: [B, S, V]."""
    difference = (torch.as_tensor(found).double() - expected).abs().max() / expected.abs().max()
    assert difference <= 1e-5


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", RELEASES)
def test_its_logits_are_those_of_the_published_forward_pass(name: str, size: int, tmp_path: Path) -> None:
    release = RELEASES[name]
    state = draw(release)
    model = whole_model(MetaSource(write(tmp_path / "meta", release, state, size)))
    assert_near(conversion.our_logits(model, TOKENS, "fp32"), logits(release, state, TOKENS))


@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_generation_reads_it_on_any_layout(ranks: RankPools, layout: str, tmp_path: Path) -> None:
    release = RELEASES["Llama 3.1"]
    state = draw(release)
    folder = write(tmp_path / "meta", release, state, 2)
    size = {f"{'tensor' if layout == 'TP2' else 'pipeline'}_model_parallel_size": 2}
    found = ranks(2)(loaded_logits, {"load": str(folder), **size}, TOKENS.numpy())[-1]
    assert_near(found.transpose(1, 0, 2), logits(release, state, TOKENS))


def test_any_stretch_of_any_cut_is_read(tmp_path: Path) -> None:
    release = RELEASES["Llama 3"]
    source = MetaSource(write(tmp_path / "meta", release, draw(release), 4))
    for name, shard in source.parameters.items():
        full = source.read_full(name)
        padded = Shard(shard.shape, shard.dim, shard.pieces, 6 if shard.shape[0] == release.vocab_size else 0)
        for rank in range(2):
            local = padded.take(full, rank, 2).flatten()
            for begin, end in ((0, len(local)), (len(local) // 3, len(local) // 2 + 5)):
                end = min(end, len(local))
                found = source.read(Slice(name, padded, begin, end - begin, rank, 2))
                assert torch.equal(found, local[begin:end]), (name, rank, begin)


def test_a_run_starts_from_it_with_the_loss_of_the_published_forward_pass(ranks: RankPools, tmp_path: Path) -> None:
    release = Release(LLAMA_3 | {"vocab_size": 250, "multiple_of": 64}, 250, 256, 0)
    state = draw(release)
    folder = write(tmp_path / "meta", release, state, 2)
    tokens = torch.from_numpy(layouts.step_tokens(0, 8, 32))
    expected = torch.nn.functional.cross_entropy(
        logits(release, state, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    )
    model = "--architecture llama --position-embedding-type rope --num-query-groups 4 --num-attention-heads 8 "
    model += "--untie-embeddings-and-output-weights --num-layers 2 --ffn-hidden-size 256 --rotary-base 500000"
    for layout, zero in (("221", 0), ("112", 3)):
        world_size, flags = arguments(layout, zero=zero)
        saved = tmp_path / layout
        losses = ranks(world_size)(layouts.resume_then_save, f"{model} {flags}", str(folder), str(saved))
        assert losses[0] == pytest.approx(float(expected), abs=1e-5)
        checkpoint, source = newest_checkpoint(saved), MetaSource(folder)
        assert checkpoint is not None
        assert all(torch.equal(checkpoint.read_full(name), source.read_full(name)) for name in source.parameters)


def test_it_is_converted_to_transformers_and_to_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release = RELEASES["Llama 3.1"]
    state = draw(release, dtype=torch.bfloat16)
    folder = write(tmp_path / "meta", release, state, 2)
    for to in ("hf", "native"):
        assert convert_checkpoint.main(["--load", str(folder), "--save", str(tmp_path / to), "--to", to]) == 0
    assert "largest logit difference" in capsys.readouterr().out
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        assert_near(theirs(TOKENS).logits, logits(release, state, TOKENS))
    native = conversion.open_model(conversion.Opening(tmp_path / "native"))
    assert_near(conversion.our_logits(native, TOKENS, "fp32"), logits(release, state, TOKENS))


# ---------------------------------------------------------------------------------------------------------------------
# params.json


def described(folder: Path, **params: Any) -> dict[str, Any]:
    # Llama 1 and 2 state none: that of their tokenizer
    (folder / "params.json").write_text(json.dumps({"vocab_size": 32000} | params))
    return Params(folder).config_json()


@pytest.mark.parametrize(
    ("params", "ffn_size", "length", "factor"),
    [
        # sizes and lengths of the published models
        ({"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-6}, 11008, 2048, None),
        ({"dim": 8192, "multiple_of": 256, "n_heads": 64, "n_layers": 80, "norm_eps": 1e-5}, 22016, 2048, None),
        ({"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-5}, 11008, 4096, None),
        (
            {"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_heads": 64, "n_kv_heads": 8}
            | {"n_layers": 80, "norm_eps": 1e-5},
            28672, 4096, None,
        ),
        (
            {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "multiple_of": 1024}
            | {"ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 500000.0},
            14336, 8192, None,
        ),
        (
            {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "multiple_of": 1024}
            | {"ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True},
            14336, 131072, 8.0,
        ),
        (
            {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "multiple_of": 256}
            | {"ffn_dim_multiplier": 1.5, "norm_eps": 1e-5, "rope_theta": 500000.0, "use_scaled_rope": True},
            8192, 131072, 32.0,
        ),
    ],
    ids=["Llama 1 7B", "Llama 1 65B", "Llama 2 7B", "Llama 2 70B", "Llama 3 8B", "Llama 3.1 8B", "Llama 3.2 1B"],
)  # fmt: skip
def test_published_params_are_those_of_transformers(
    params: dict[str, Any], ffn_size: int, length: int, factor: float | None, tmp_path: Path
) -> None:
    config = described(tmp_path, **params)
    assert config["intermediate_size"] == ffn_size
    assert config["max_position_embeddings"] == length
    assert config.get("rope_scaling", {}).get("factor") == factor
    assert config["tie_word_embeddings"] == (factor == 32.0)
    assert config["eos_token_id"] == (2 if "vocab_size" not in params else 128001)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"dim": 0}, r"dim=0 must be a positive integer"),
        ({"n_layers": True}, r"n_layers=True must be a positive integer"),
        ({"n_layers": 10**9}, r"1000000000 layers, but .* lacks most of them"),
        ({"n_heads": "8"}, r"n_heads='8' must be a positive integer"),
        ({"norm_eps": "small"}, r"norm_eps='small' must be a positive number"),
        ({"use_scaled_rope": 2}, r"use_scaled_rope=2 must be true or false"),
        ({"ffn_dim_multiplier": 1e300}, r"ffn_dim_multiplier gives an MLP of"),
        ({"n_kv_heads": 3}, r"num_key_value_heads=3 does not divide|n_kv_heads=3 does not divide"),
        ({"moe": {"num_experts": 8}}, r"has moe=.*, which no Llama of text in full precision has"),
        ({"quantization_args": {"scheme": "int4"}}, r"has quantization_args=.*full precision"),
        ({"dim": 128}, r"does not hold the model of params\.json: .*tok_embeddings\.weight \[128, 64\] in 1 files"),
        ({"vocab_size": 130}, r"tok_embeddings\.weight \[128, 64\] in 1 files, not \[130, 64\] in all"),
        ({"n_layers": 1}, r"unknown to a model of this size: model\.layers\.1\."),
        ({"n_layers": 3}, r"missing: model\.layers\.2\."),
    ],
)  # fmt: skip
def test_what_params_json_may_not_say_is_named(change: dict[str, Any], fault: str, tmp_path: Path) -> None:
    release = RELEASES["Llama 3"]
    folder = write(tmp_path / "meta", release, draw(release))
    (folder / "params.json").write_text(json.dumps(release.params | change))
    with pytest.raises(CheckpointError, match=fault):
        MetaSource(folder)


def test_its_options_are_those_of_a_run_that_gives_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release = RELEASES["Llama 2"]
    folder = write(tmp_path / "meta", release, draw(release), 2)
    model = preset_of(folder)["model"]
    assert (model["vocab_size"], model["ffn_hidden_size"], model["hidden_size"]) == (96, 176, 64)
    assert model_config.main(["--load", str(folder)]) == 0
    assert "by its params.json" in capsys.readouterr().out
    # 8 heads are not cut by 3
    faults = layout_faults(LoadOptions(load=str(folder), tensor_model_parallel_size=3), 3, "cpu")
    assert faults


# ---------------------------------------------------------------------------------------------------------------------
# Files


class Planted:
    """Runs a command when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


def test_a_hostile_file_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    release = RELEASES["Llama 2"]
    target = tmp_path / "ran"
    for file in ("consolidated.00.pth", "consolidated.01.pth"):
        folder = write(tmp_path / "meta", release, draw(release), 2)
        content = torch.load(folder / file) | {"planted": Planted(target)}
        torch.save(content, folder / file)
        with pytest.raises(CheckpointError, match=rf"{file} is refused: it names (posix|os)\.system"):
            MetaSource(folder)
    # a launch reads the vocabulary alone
    torch.save({"planted": Planted(target)}, folder / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match=r"consolidated\.00\.pth is refused: it names (posix|os)\.system"):
        preset_of(folder)
    assert not target.exists()


@pytest.mark.parametrize("place", ["start", "middle", "end"])
def test_a_damaged_file_is_named(place: str, tmp_path: Path) -> None:
    release = RELEASES["Llama 3"]
    folder = write(tmp_path / "meta", release, draw(release), 2)
    file = folder / "consolidated.01.pth"
    content = bytearray(file.read_bytes())
    content[{"start": 1, "middle": len(content) // 2, "end": -1}[place]] ^= 4
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"consolidated\.01\.pth is damaged"):
        MetaSource(folder).verify()


def test_files_that_do_not_make_one_model_are_named(tmp_path: Path) -> None:
    release = RELEASES["Llama 3"]
    state = draw(release)

    def changed(name: str) -> Path:
        return write(tmp_path / name, release, state, 2)

    os.remove(changed("lacking") / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match=r"lacks consolidated\.00\.pth"):
        MetaSource(tmp_path / "lacking")
    (changed("stray") / "consolidated.00-1.pth").touch()
    with pytest.raises(CheckpointError, match=r"consolidated\.00-1\.pth does not name a rank"):
        MetaSource(tmp_path / "stray")
    shutil.copy(write(tmp_path / "other", release, draw(release, 6), 2) / "consolidated.01.pth", changed("mixed"))
    with pytest.raises(CheckpointError, match=r"norm\.weight in .*01\.pth is not that of consolidated\.00"):
        MetaSource(tmp_path / "mixed").read_full("final_norm.weight")
    second = torch.load(changed("fewer") / "consolidated.01.pth")
    del second["norm.weight"]
    torch.save(second, tmp_path / "fewer" / "consolidated.01.pth")
    with pytest.raises(CheckpointError, match=r"do not hold the same tensors \(norm\.weight\)"):
        MetaSource(tmp_path / "fewer")
    shutil.copy(write(tmp_path / "whole", release, state, 1) / "consolidated.00.pth", changed("twice"))
    with pytest.raises(CheckpointError, match=r"\[64, 64\] and \[32, 64\]|\[32, 64\] and \[64, 64\]"):
        MetaSource(tmp_path / "twice")


def test_embeddings_that_llama_32_ties_must_be_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = RELEASES["Llama 3.1"]
    monkeypatch.setattr("megatron.weights.meta.params.SMALL_LLAMA_32", {(64, 2)})
    state = draw(release)
    with pytest.raises(CheckpointError, match=r"another output\.weight than tok_embeddings\.weight"):
        MetaSource(write(tmp_path / "untied", release, state))
    state["output.weight"] = state["tok_embeddings.weight"]
    source = MetaSource(write(tmp_path / "tied", release, state, 2))
    assert not source.config.model.untie_embeddings_and_output_weights
    assert "output.weight" not in source.parameters


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer beside


def test_llama_3s_tokenizer_is_found_by_its_content(tmp_path: Path) -> None:
    lines = [base64.b64encode(bytes([byte])) + f" {byte}\n".encode() for byte in range(256)]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    tokenizer = meta_tokenizer(tmp_path / "tokenizer.model", None)
    ids = tokenizer.encode("ab")
    assert list(ids) == [256, 97, 98]
    assert tokenizer.decode([97, 98]) == "ab"
    assert tokenizer.eod == 257
