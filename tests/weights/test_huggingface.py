"""weights/huggingface*.py: names and shapes against transformers' own models, and what is refused.

Whole conversions, with logits, are in tests/cli/test_convert_checkpoint.py.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.options.config import Config
from megatron.options.stored import PRESETS_DIR, from_dict, read_preset
from megatron.weights import huggingface
from megatron.weights.huggingface import export_huggingface, name_map
from megatron.weights.huggingface_config import config_of, restored_config, their_config
from megatron.weights.huggingface_source import HuggingFaceSource
from tests.models.test_hf_logits import CASES, VOCABULARY

transformers = pytest.importorskip("transformers")

State = dict[str, Tensor]

MODELS = {path.stem: read_preset(path.stem).get("model") for path in sorted(PRESETS_DIR.glob("*.yaml"))}
NEWER = [name for name, model in MODELS.items() if model and model["architecture"] not in ("bloom", "llama")]


def save(name: str, folder: Path, max_shard_size: str = "5GB") -> State:
    """A random model of transformers in `folder`; returns its weights."""
    model = CASES[name]().theirs()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return {key: parameter.detach() for key, parameter in model.named_parameters()}


def weights(folder: Path) -> State:
    """Of every safetensors file in `folder`, read by the library."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_same(found: State, expected: State) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def config_json(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def change_config(folder: Path, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config_json(folder) | values))


def export(folder: Path, **options: Any) -> Callable[[Path], Path]:
    """Import `folder`, and export it to where the result is called with."""

    def to(place: Path) -> Path:
        model = HuggingFaceSource(folder)
        place.mkdir()
        export_huggingface(
            place, options.pop("config", model.config), model.tensors(), source=model.metadata["source"], **options
        )
        return place

    return to


# ---------------------------------------------------------------------------------------------------------------------
# Both directions


@pytest.mark.parametrize("chunk_bytes", [1, 4000])
@pytest.mark.parametrize("name", ["gpt2", "bloom_12_heads", "llama_gqa"])
def test_a_round_trip_in_small_chunks_is_bitwise(
    name: str, chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = save(name, tmp_path / "theirs")
    monkeypatch.setattr(huggingface, "CHUNK_BYTES", chunk_bytes)
    assert_same(weights(export(tmp_path / "theirs")(tmp_path / "back")), expected)


@pytest.mark.parametrize(
    "preset",
    [
        *("bloom_13b", "bloom_560m", "bloom_176b", "llama1_7b", "llama2_70b", "llama31_8b", "llama32_1b"),
        *NEWER,
    ],
)
def test_presets_have_transformers_names_shapes_and_config(preset: str) -> None:
    config = from_dict(read_preset(preset))
    mapped = name_map(config)
    theirs = their_config(config, "bf16", {})
    theirs_config = transformers.AutoConfig.for_model(**theirs)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs_config)
    # which transformers may rename in files
    renamed = {"lm_head.weight": mapped.form.output}
    expected = {
        renamed.get(name) or mapped.form.full_name(name): tuple(parameter.shape)
        for name, parameter in model.named_parameters()
    }
    held: dict[str, tuple[int, ...]] = {}
    for part in itertools.chain.from_iterable(mapped.parts.values()):
        # experts lie in one tensor in memory
        stretch = mapped.stretches.get(part.name)
        held |= {part.name: part.shape} if stretch is None else {stretch.name: stretch.shape}
    assert held == expected
    assert type(model).__name__ == mapped.form.class_name
    # and back, from what transformers itself writes
    back = config_of(json.loads(theirs_config.to_json_string()), "config.json").model
    model_config, own = config.model, {"make_vocab_size_divisible_by", "attention_backend", "hidden_dropout"}
    own.add("moe_z_loss_coeff")
    for field in (field for field in model_config.__dict__ if field not in own | {"max_position_embeddings"}):
        ours, found = getattr(model_config, field), getattr(back, field)
        if field == "ffn_hidden_size":
            ours, found = model_config.ffn_size, back.ffn_size
        if field.startswith("rope_scaling") and model_config.rope_scaling_factor is None:
            continue
        assert found == ours, field


def test_each_tensor_of_ours_is_filled_by_theirs_exactly_once() -> None:
    for case in CASES.values():
        config = config_of(json.loads(case().theirs().config.to_json_string()), "config.json")
        mapped = name_map(config)
        for name, parts in mapped.parts.items():
            hits = torch.zeros(mapped.shards[name].shape)
            for part in parts:
                views = [view for _, _, view in part.chunks(hits)]
                assert sum(view.numel() for view in views) == torch.Size(part.shape).numel()
                for view in views:
                    view.add_(1)
            assert torch.equal(hits, torch.ones_like(hits)), name


def test_what_changed_since_the_import_is_written_beside_what_did_not(tmp_path: Path) -> None:
    """transformers 5 nests the rope's options, of which the last form of ours has one more spelling."""
    save("llama_3.1", tmp_path / "theirs")
    change_config(tmp_path / "theirs", _name_or_path="org/model", license="own", dtype="float32")
    theirs, config = config_json(tmp_path / "theirs"), HuggingFaceSource(tmp_path / "theirs").config
    assert "rope_parameters" in theirs
    longer = replace(config, model=replace(config.model, max_position_embeddings=4096))
    assert restored_config(theirs, longer, "bf16", ({}, {})) == theirs | {
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
    }
    faster = replace(config, model=replace(config.model, rotary_base=7.0))
    found = restored_config(theirs, faster, "fp32", ({}, {}))
    assert config_of(found, "config.json").model == faster.model
    assert (found["license"], found["_name_or_path"], found["dtype"]) == ("own", "org/model", "float32")


def test_vocabulary_padding_is_not_exported(tmp_path: Path) -> None:
    save("llama_mha", tmp_path / "theirs")
    model = HuggingFaceSource(tmp_path / "theirs")
    assert model.config.model.padded_vocab_size(1) > VOCABULARY
    back = weights(export(tmp_path / "theirs")(tmp_path / "back"))
    assert back["model.embed_tokens.weight"].shape[0] == back["lm_head.weight"].shape[0] == VOCABULARY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_precision_of_the_weights_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = save("llama_gqa", tmp_path / "theirs")
    expected = {name: tensor.to(dtype) for name, tensor in expected.items()}
    save_file(expected, tmp_path / "theirs" / "model.safetensors")
    back = export(tmp_path / "theirs")(tmp_path / "back")
    assert_same(weights(back), expected)
    assert config_json(back)["dtype"] == str(dtype).removeprefix("torch.")
    # a single float32 tensor among them needs float32
    save_file(expected | {"lm_head.weight": expected["lm_head.weight"].float()}, tmp_path / "theirs/model.safetensors")
    assert HuggingFaceSource(tmp_path / "theirs").config.training.precision == "fp32"


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    tensors = save("llama_gqa", tmp_path / "theirs")
    tensors["lm_head.weight"][3, 4] = 1e6
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has values beyond torch\.float16's range"):
        export(tmp_path / "theirs", precision="fp16")(tmp_path / "back")


def test_shards_hold_at_most_what_was_asked(tmp_path: Path) -> None:
    expected = save("llama_gqa", tmp_path / "theirs")
    back = export(tmp_path / "theirs", max_shard_bytes=40_000)(tmp_path / "back")
    index = json.loads((back / "model.safetensors.index.json").read_text())
    files = sorted(back.glob("*.safetensors"))
    assert index["metadata"]["total_size"] == 4 * sum(tensor.numel() for tensor in expected.values())
    assert {name: back / file for name, file in index["weight_map"].items()} == {
        name: file for file in files for name in load_file(file)
    }
    assert len(files) > 3
    for file in files:
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= 40_000 or len(load_file(file)) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Old and odd folders that are whole


def as_bin(folder: Path, tensors: Any) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")


def test_a_bin_with_bare_names_masks_and_a_copied_head_is_read(tmp_path: Path) -> None:
    expected = save("gpt2", tmp_path / "theirs")
    old: State = {name.removeprefix("transformer."): tensor for name, tensor in expected.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 40, 40, dtype=torch.uint8), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    as_bin(tmp_path / "theirs", old | {"lm_head.weight": old["wte.weight"]})
    assert_same(weights(export(tmp_path / "theirs")(tmp_path / "back")), expected)


def test_rotary_frequencies_of_old_files_are_passed_over(tmp_path: Path) -> None:
    expected = save("llama_mha", tmp_path / "theirs")
    old = expected | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(old, tmp_path / "theirs" / "model.safetensors")
    assert_same(weights(export(tmp_path / "theirs")(tmp_path / "back")), expected)


def test_old_names_of_rope_fields_are_read(tmp_path: Path) -> None:
    save("llama_3.1", tmp_path / "theirs")
    new = HuggingFaceSource(tmp_path / "theirs").config
    content = config_json(tmp_path / "theirs")
    rope = content.pop("rope_parameters")
    both = {"rope_parameters": dict(rope), "rope_scaling": {key: rope[key] for key in rope if key != "rope_theta"}}
    content |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": rope.pop("rope_type")}}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(content))
    assert HuggingFaceSource(tmp_path / "theirs").config == new
    change_config(tmp_path / "theirs", **both)
    assert HuggingFaceSource(tmp_path / "theirs").config == new


def test_a_snapshot_of_the_hubs_cache_is_read_through_its_links(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "model/snapshots/0a1b", tmp_path / "model/blobs"
    expected = save("llama_mha", snapshot)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    model = HuggingFaceSource(snapshot)
    assert torch.equal(model.read_full("embedding.word.weight"), expected["model.embed_tokens.weight"])


# ---------------------------------------------------------------------------------------------------------------------
# Refused


def index_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    return content


def map_to(folder: Path, tensor: str, file: str) -> None:
    index = index_of(folder)
    index["weight_map"][tensor] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def shard_of(folder: Path, tensor: str) -> Path:
    file: str = index_of(folder)["weight_map"][tensor]
    return folder / file


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


def _rewrite(folder: Path, tensor: str, change: Callable[[State], State]) -> None:
    path = shard_of(folder, tensor)
    save_file(change(load_file(path)), path)


def escape(folder: Path) -> None:
    shard_of(folder, UP).rename(folder.parent / "outside.safetensors")
    map_to(folder, UP, "../outside.safetensors")


def absolute(folder: Path) -> None:
    map_to(folder, UP, str(folder / "model-00001-of-00002.safetensors"))


def link(folder: Path) -> None:
    path = shard_of(folder, UP)
    path.rename(folder.parent / "outside.safetensors")
    path.symlink_to(folder.parent / "outside.safetensors")


def linked_config(folder: Path) -> None:
    (folder / "config.json").rename(folder.parent / "config.json")
    (folder / "config.json").symlink_to(folder.parent / "config.json")


def lost_shard(folder: Path) -> None:
    shard_of(folder, UP).unlink()


def truncated(folder: Path) -> None:
    path = shard_of(folder, UP)
    os.truncate(path, path.stat().st_size - 1)


def damaged_header(folder: Path) -> None:
    path = shard_of(folder, UP)
    content = bytearray(path.read_bytes())
    content[12] ^= 0x40
    path.write_bytes(content)


def lost_tensor(folder: Path) -> None:
    _rewrite(folder, UP, lambda tensors: {name: t for name, t in tensors.items() if name != UP})


def lost_everywhere(folder: Path) -> None:
    lost_tensor(folder)
    index = index_of(folder)
    del index["weight_map"][UP]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def duplicate(folder: Path) -> None:
    other = next(path for path in sorted(folder.glob("*.safetensors")) if path != shard_of(folder, UP))
    save_file(load_file(other) | {UP: load_file(shard_of(folder, UP))[UP]}, other)


def twice_by_name(folder: Path) -> None:
    bare = UP.removeprefix("model.")
    _rewrite(folder, UP, lambda tensors: tensors | {bare: tensors[UP].clone()})
    map_to(folder, bare, shard_of(folder, UP).name)


def unknown(folder: Path) -> None:
    _rewrite(folder, UP, lambda tensors: tensors | {"model.layers.1.extra.weight": torch.ones(3)})
    map_to(folder, "model.layers.1.extra.weight", shard_of(folder, UP).name)


def wrong_shape(folder: Path) -> None:
    _rewrite(folder, UP, lambda tensors: tensors | {UP: tensors[UP][:-1].clone()})


def wrong_dtype(folder: Path) -> None:
    _rewrite(folder, UP, lambda tensors: tensors | {UP: tensors[UP].to(torch.int8)})


def other_vocabulary(folder: Path) -> None:
    change_config(folder, vocab_size=VOCABULARY + 5)


def other_depth(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3)


def two_models(folder: Path) -> None:
    shutil.copy(shard_of(folder, UP), folder / "model-00009-of-00009.safetensors")


def both_forms(folder: Path) -> None:
    save_file(weights(folder), folder / "model.safetensors")


def no_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def index_twice(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"weight_map": {', f'"weight_map": {{"{UP}": "x.safetensors",'))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def nothing(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


def huge(folder: Path) -> None:
    change_config(folder, num_hidden_layers=10**9)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (escape, "names '../outside.safetensors' as a file of its own"),
        (absolute, "as a file of its own; only plain file names"),
        (link, "is a link; links are not followed"),
        (linked_config, "config.json is a link"),
        (lost_shard, r"model-0000\d-of-\d+.safetensors is missing"),
        (truncated, r"model-0000\d-of-\d+.safetensors is damaged"),
        (damaged_header, r"model-0000\d-of-\d+.safetensors is damaged"),
        (lost_tensor, f"lacks {UP}, named in model.safetensors.index.json"),
        (lost_everywhere, f"not a whole LlamaForCausalLM: missing: {UP}"),
        (duplicate, f"{UP} is both in|holds {UP}, which"),
        (twice_by_name, f"{UP} is there twice"),
        (unknown, "unknown to a LlamaForCausalLM of this size: model.layers.1.extra.weight"),
        (wrong_shape, rf"{UP} in model-.* is \[95, 64\] .*config.json makes it \[96, 64\]"),
        (wrong_dtype, f"holds {UP} as I8"),
        (other_vocabulary, r"embed_tokens.weight in .* is \[123, 64\] .* makes it \[128, 64\]"),
        (other_depth, "missing: model.layers.2"),
        (two_models, "model-00009-of-00009.safetensors is not named in"),
        (both_forms, "holds model.safetensors and model.safetensors.index.json"),
        (no_index, "but no model.safetensors.index.json"),
        (index_twice, f"{UP}' is there twice"),
        (no_config, "config.json is missing"),
        (nothing, "holds no weights"),
        (huge, "has 1000000000 layers"),
    ],
)
def test_bad_folders_are_refused(damage: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    save("llama_gqa", tmp_path / "theirs", max_shard_size="60KB")
    HuggingFaceSource(tmp_path / "theirs")  # whole before
    damage(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=said):
        HuggingFaceSource(tmp_path / "theirs")


def test_a_header_with_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    save("llama_gqa", tmp_path / "theirs")
    path = tmp_path / "theirs/model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip()
    header = header[:-1] + b"," + header[1:]  # every entry again
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        HuggingFaceSource(tmp_path / "theirs")


class Payload:
    """Unpickled, it would create a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return open, (str(self.place), "w")


def test_a_malicious_bin_is_refused_and_not_executed(tmp_path: Path) -> None:
    tensors = save("gpt2", tmp_path / "theirs")
    as_bin(tmp_path / "theirs", tensors | {"transformer.extra": Payload(tmp_path / "executed")})
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is refused: it names .*open"):
        HuggingFaceSource(tmp_path / "theirs")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [b"", b"garbage", [torch.ones(2)], {"transformer.wte.weight": "text"}])
def test_a_bin_of_anything_but_tensors_is_refused(content: Any, tmp_path: Path) -> None:
    save("gpt2", tmp_path / "theirs")
    as_bin(tmp_path / "theirs", content)
    if isinstance(content, bytes):
        (tmp_path / "theirs/pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin"):
        HuggingFaceSource(tmp_path / "theirs")


def test_a_head_that_is_not_the_tied_embedding_is_refused(tmp_path: Path) -> None:
    tensors = save("bloom_8_heads", tmp_path / "theirs")
    head = tensors["transformer.word_embeddings.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "theirs/model.safetensors")
    HuggingFaceSource(tmp_path / "theirs")
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "theirs/model.safetensors")
    with pytest.raises(CheckpointError, match=r"is not the word embedding, but config\.json ties"):
        HuggingFaceSource(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("llama_mha", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama_mha", {"attention_bias": True}, "attention_bias=True"),
        ("llama_mha", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama_mha", {"rope_parameters": {"rope_type": "proportional", "factor": 4.0}}, "rope_type='proportional'"),
        ("llama_mha", {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "lacks low_freq_factor"),
        ("llama_mha", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        (
            "llama_mha",
            {"rope_parameters": {"rope_theta": "1e4"}},
            r"config\.json: rope_parameters: rope_theta='1e4' must",
        ),
        ("llama_mha", {"rope_scaling": {"rope_type": "llama3"}}, "rope_parameters and rope_scaling differ"),
        ("llama_mha", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama_mha", {"auto_map": {"AutoModel": "mine.Model"}}, "auto_map"),
        ("llama_mha", {"model_type": "mamba"}, "model_type='mamba'; only bloom, gpt2, falcon"),
        ("llama_mha", {"num_key_value_heads": 3}, "does not divide num_attention_heads=8"),
        ("llama_mha", {"hidden_size": -64}, "hidden_size=-64"),
        ("llama_mha", {"rms_norm_eps": "small"}, "rms_norm_eps='small' must be a number"),
        ("llama_mha", {"num_attention_heads": None}, "lacks num_attention_heads"),
        (
            "bloom_8_heads",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm",
        ),
        ("gpt2", {"activation_function": "relu"}, "activation_function='relu'"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ],
)
def test_fields_that_change_what_is_computed_are_refused(
    name: str, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save(name, tmp_path)
    change_config(tmp_path, **values)
    with pytest.raises(CheckpointError, match=said):
        HuggingFaceSource(tmp_path)


DERIVATIVES = (
    *("Cohere", "DeepseekV3", "Gemma2", "GPTNeoX", "Granite", "MiniCPM3", "Mistral", "Mixtral", "Nemotron"),
    *("Seed_Oss", "SmolLM3", "StableLm", "Starcoder2", "Llama4Text"),
)


def test_keys_that_change_what_a_derivative_computes_are_refused_by_name(tmp_path: Path) -> None:
    save("llama_mha", tmp_path)
    path = tmp_path / "config.json"
    own = json.loads(path.read_text())
    own.pop("rope_parameters", None)
    keys = {
        "sliding_window": 128, "use_qk_norm": True, "logit_scale": 0.0625, "attn_logit_softcapping": 30.0,
        "residual_multiplier": 0.2, "clip_qkv": 8.0, "num_local_experts": 4, "layer_types": ["sliding_attention"] * 4,
        "no_rope_layers": [1, 0], "my_own": "x", "use_bias": True,
        "use_rope": False, "is_causal": False,
    }  # fmt: skip
    for name, value in keys.items():
        with pytest.raises(CheckpointError, match=f"{name}=.* not known here; if the model computes the same without"):
            config_of(own | {name: value}, path)
    with pytest.raises(CheckpointError) as several:
        config_of(own | keys | {"rope_scaling": {"rope_type": "proportional"}, "hidden_act": "gelu"}, path)
    assert all(name in str(several.value) for name in [*keys, "proportional", "hidden_act"]), "all in one message"
    for name in DERIVATIVES:
        theirs = getattr(transformers, f"{name.replace('_', '')}Config")().to_dict()
        with pytest.raises(CheckpointError):
            config_of(own | {key: value for key, value in theirs.items() if key not in own}, path)


def test_keys_that_change_nothing_are_kept(tmp_path: Path) -> None:
    save("llama_mha", tmp_path)
    idle = {
        "sliding_window": None, "use_qk_norm": False, "logit_scale": 1.0, "num_local_experts": 0, "clip_qkv": None,
        "layer_types": ["full_attention"] * 4, "temperature": 0.6, "unsloth_version": "2026.1", "_num_labels": 1,
    }  # fmt: skip
    change_config(tmp_path, **idle)
    assert HuggingFaceSource(tmp_path).config
    change_config(tmp_path, sliding_window=4096, use_sliding_window=False, max_window_layers=28)
    assert HuggingFaceSource(tmp_path).metadata["source"]["config"]["sliding_window"] == 4096
    for name, described in (("Llama", "llama"), ("GPT2", "gpt2"), ("Bloom", "bloom")):
        theirs = getattr(transformers, f"{name}Config")().to_dict()
        assert config_of(theirs, tmp_path).model, described


@pytest.mark.parametrize(
    ("preset", "options", "said"),
    [
        ("bloom_560m", {"embed_layernorm": False}, "BloomForCausalLM.* has no embed_layernorm=False"),
        ("bloom_560m", {"ffn_hidden_size": 1000}, "ffn_hidden_size=1000"),
        ("bloom_13b", {"embed_layernorm": True}, "GPT2LMHeadModel.* has no embed_layernorm=True"),
        ("bloom_13b", {"num_query_groups": 8}, "num_query_groups=8"),
        ("bloom_13b", {"position_embedding_type": "rope"}, "position_embedding_type=rope"),
        ("llama2_7b", {"position_embedding_type": "alibi"}, "position_embedding_type=alibi"),
    ],
)
def test_models_that_transformers_does_not_have_are_not_exported(
    preset: str, options: dict[str, Any], said: str
) -> None:
    config = from_dict(read_preset(preset))
    with pytest.raises(CheckpointError, match=said):
        name_map(replace(config, model=replace(config.model, **options)))


def test_an_incomplete_model_is_not_exported(tmp_path: Path) -> None:
    save("llama_mha", tmp_path / "theirs")
    model = HuggingFaceSource(tmp_path / "theirs")
    tensors = list(model.map.shards)

    for number, (names, said) in enumerate(
        [
            (tensors[1:], "lacks embedding.word.weight"),
            ([*tensors, tensors[0]], "comes twice"),
            (["9.weight"], "not a parameter"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        stand_in = ((name, model.read_full(name) if name in tensors else torch.ones(1)) for name in names)
        with pytest.raises(CheckpointError, match=said):
            export_huggingface(folder, model.config, stand_in)


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers


def save_tokenizer(folder: Path, num_tokens: int = VOCABULARY) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<s>", "</s>", *(f"w{number}" for number in range(num_tokens - 2))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def test_a_tokenizer_is_copied_along_and_loads(tmp_path: Path) -> None:
    save("bloom_8_heads", tmp_path / "theirs")
    save_tokenizer(tmp_path / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.chat_template = {"default": "w1", "tool_use": "w7", "rag": "w8"}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert (tmp_path / "tokenizer" / "additional_chat_templates" / "rag.jinja").is_file()
    back = export(tmp_path / "theirs", tokenizer=tmp_path / "tokenizer")(tmp_path / "back")
    loaded = transformers.AutoTokenizer.from_pretrained(back)
    assert loaded("w0 w7").input_ids == [2, 9]
    assert loaded.chat_template == tokenizer.chat_template


def test_special_tokens_are_the_tokenizers_where_nothing_else_tells(tmp_path: Path) -> None:
    save("llama_mha", tmp_path / "theirs")
    save_tokenizer(tmp_path / "tokenizer")
    model = HuggingFaceSource(tmp_path / "theirs")
    (tmp_path / "back").mkdir()
    export_huggingface(tmp_path / "back", model.config, model.tensors(), tokenizer=tmp_path / "tokenizer")
    for file in ("config.json", "generation_config.json"):
        content = json.loads((tmp_path / "back" / file).read_text())
        assert [content[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")] == [0, 1, None]


def test_the_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    save("llama_mha", tmp_path / "theirs")
    save_tokenizer(tmp_path / "tokenizer", VOCABULARY + 1)
    with pytest.raises(CheckpointError, match=f"ids up to {VOCABULARY}, but the model's vocab_size is {VOCABULARY}"):
        export(tmp_path / "theirs", tokenizer=tmp_path / "tokenizer")(tmp_path / "back")


def test_the_imported_config_is_a_config_of_ours(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    config = HuggingFaceSource(tmp_path).config
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert isinstance(config, Config)
    assert config.training.seq_length == config.model.max_position_embeddings == 40


@pytest.mark.parametrize(("known", "expected"), [(None, 1), (1, 1), (7, [7, 1]), ([7, 8], [7, 8, 1]), ([7, 1], [7, 1])])
def test_generation_stops_at_the_end_of_a_tokenizer_of_another_folder(
    known: Any, expected: Any, tmp_path: Path
) -> None:
    """Of a chat's, say, which was made for the model later."""
    save("llama_gqa", tmp_path / "theirs")
    (tmp_path / "theirs/generation_config.json").write_text(json.dumps({"eos_token_id": known, "top_k": 3}))
    save_tokenizer(tmp_path / "chat")
    found = export(tmp_path / "theirs", tokenizer=tmp_path / "chat")(tmp_path / "back")
    content = json.loads((found / "generation_config.json").read_text())
    assert content == {"eos_token_id": expected, "top_k": 3}
    own = config_json(tmp_path / "theirs")["eos_token_id"]
    assert config_json(found)["eos_token_id"] == (own if expected == known else expected)
