"""Megatron-DeepSpeed checkpoints: transformers' weights, cut up by Megatron's rules, give transformers' logits."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from megatron.checkpoint.format import CheckpointError
from megatron.cli import ds_to_universal
from megatron.parallel.context import ParallelContext
from megatron.weights.deepspeed.deepspeed_checkpoint import read
from tests.models import outputs

HEADS, HIDDEN, LAYERS, VOCABULARY = 8, 64, 2, 123
BLOCK_NAMES = {
    "input_layernorm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.query_key_value",
    "self_attention.dense": "self_attention.dense",
    "self_attn.o_proj": "self_attention.dense",
    "post_attention_layernorm": "post_attention_layernorm",
    "mlp.dense_h_to_4h": "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h": "mlp.dense_4h_to_h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
BLOOM = f"--architecture bloom --position-embedding-type alibi --embed-layernorm --hidden-size {HIDDEN}"
LLAMA = (
    "--architecture llama --position-embedding-type rope --norm-epsilon 1e-6 --ffn-hidden-size 96 "
    "--untie-embeddings-and-output-weights"
)


def their_model(kind: str, kv_heads: int = HEADS) -> Any:
    """A random model of transformers, every norm and bias away from one and zero."""
    transformers = pytest.importorskip("transformers")
    if kind == "bloom":
        config = transformers.BloomConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS, hidden_dropout=0.0,
            attention_dropout=0.0, layer_norm_epsilon=1e-5,
        )  # fmt: skip
        model = transformers.BloomForCausalLM(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=kv_heads, rms_norm_eps=1e-6, tie_word_embeddings=False,
            max_position_embeddings=64,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.1, generator=generator)
    return model.eval()


def megatron_layers(model: Any, kind: str, kv_heads: int, tp: int) -> list[list[dict[str, Tensor]]]:
    """By layer that holds weights (embedding, blocks, final norm, head), by rank: Megatron's names and tensors."""
    weights = {name.split(".", 1)[1]: tensor for name, tensor in model.state_dict().items() if "." in name}
    rows = -(-VOCABULARY // (4 * tp)) * 4 * tp

    def vocabulary(tensor: Tensor) -> list[Tensor]:
        return list(torch.cat([tensor, torch.randn(rows - VOCABULARY, HIDDEN)]).chunk(tp))

    bloom = kind == "bloom"
    embedding = weights["word_embeddings.weight" if bloom else "embed_tokens.weight"]
    layers = [[{"word_embeddings.weight": part} for part in vocabulary(embedding)]]
    if bloom:
        for state in layers[0]:
            for part in ("weight", "bias"):
                state[f"word_embeddings.norm.{part}"] = weights[f"word_embeddings_layernorm.{part}"]
    for layer in range(LAYERS):
        prefix = f"{'h' if bloom else 'layers'}.{layer}."
        block = {name[len(prefix) :]: tensor for name, tensor in weights.items() if name.startswith(prefix)}
        ranks: list[dict[str, Tensor]] = [{} for _ in range(tp)]
        for name, tensor in block.items():
            module, _, part = name.rpartition(".")
            if module not in BLOCK_NAMES:
                continue
            theirs = f"{BLOCK_NAMES[module]}.{part}"
            if theirs in ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight"):
                cut = list(tensor.chunk(tp, dim=1))
            elif "query_key_value" in theirs or "h_to_4h" in theirs:
                cut = list(tensor.chunk(tp))
            else:
                cut = [tensor] * tp
            for rank, local in enumerate(cut):
                ranks[rank][theirs] = local
        if not bloom:
            d, group = HIDDEN // HEADS, HEADS // kv_heads
            q, k, v = (block[f"self_attn.{x}_proj.weight"] for x in "qkv")
            grouped = torch.cat(
                [
                    part
                    for head in range(kv_heads)
                    for part in (
                        q[head * group * d : (head + 1) * group * d],
                        k[head * d : (head + 1) * d],
                        v[head * d : (head + 1) * d],
                    )
                ]
            )
            gate, up = block["mlp.gate_proj.weight"].chunk(tp), block["mlp.up_proj.weight"].chunk(tp)
            for rank, local in enumerate(grouped.chunk(tp)):
                ranks[rank]["self_attention.query_key_value.weight"] = local
                ranks[rank]["mlp.dense_h_to_4h.weight"] = torch.cat([gate[rank], up[rank]])
                ranks[rank]["self_attention.rotary_emb.inv_freq"] = torch.ones(3)
        layers.append(ranks)
    if bloom:
        layers.append([{"weight": weights["ln_f.weight"], "bias": weights["ln_f.bias"]}] * tp)
        # the last layer's copy of the tied embedding
        layers.append([{"word_embeddings.weight": state["word_embeddings.weight"]} for state in layers[0]])
    else:
        layers.append([{"weight": weights["norm.weight"]}] * tp)
        layers.append([{"lm_head.weight": part} for part in vocabulary(model.lm_head.weight.detach())])
    return layers


def write_megatron(
    folder: Path, layers: list[list[dict[str, Tensor]]], offset: int, arguments: Mapping[str, Any]
) -> None:
    """Files of layers: the embedding is 1, the blocks begin at `offset`."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [1, *range(offset, offset + LAYERS), *range(offset + LAYERS + 1, offset + LAYERS + 3)]
    for number, ranks in zip(numbers, layers, strict=False):
        for rank, tensors in enumerate(ranks):
            cloned = {name: tensor.clone() for name, tensor in tensors.items()}
            torch.save(cloned, folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    state = {
        "module": None,
        "iteration": 5,
        "checkpoint_version": 3.0,
        "args": argparse.Namespace(**arguments),
        # as Megatron saves it; a NumPy array in it
        "np_rng_state": ("MT19937", np.arange(4, dtype=np.uint32), 0, 0, 0.0),
    }
    torch.save(state, folder / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize(
    ("kind", "kv_heads", "tp", "offset"),
    [
        ("bloom", 8, 1, 3),
        ("bloom", 8, 2, 3),
        ("bloom", 8, 4, 2),
        ("llama", 8, 2, 2),
        ("llama", 2, 2, 3),
        ("llama", 4, 4, 2),
    ],
)
def test_a_megatron_deepspeed_checkpoint_gives_the_same_logits(
    tmp_path: Path, kind: str, kv_heads: int, tp: int, offset: int
) -> None:
    model = their_model(kind, kv_heads)
    arguments = {"num_attention_heads": HEADS, "consumed_train_samples": 640, "params_dtype": torch.bfloat16}
    write_megatron(tmp_path, megatron_layers(model, kind, kv_heads, tp), offset, arguments)
    flags = BLOOM if kind == "bloom" else f"{LLAMA} --num-query-groups {kv_heads}"
    config = outputs.config_of(flags)
    foreign = read(tmp_path, config)
    assert foreign.layout == "megatron-deepspeed"
    assert foreign.facts["consumed_samples"] == 640
    assert foreign.kinds == ("weight",)
    weights = {name: foreign.read_full(name).numpy() for name in foreign.parameters}
    ctx = ParallelContext.single()
    tokens = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    ours = outputs.logits_of(outputs.build_model(config, ctx, weights), tokens, ctx)
    with torch.no_grad():
        theirs = model(tokens, use_cache=False).logits.transpose(0, 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    # without a config, the heads come from its args, and the padding stays in the vocabulary
    alone = read(tmp_path)
    assert torch.equal(
        alone.read_full("embedding.word.weight")[:VOCABULARY], foreign.read_full("embedding.word.weight")
    )
    assert torch.equal(
        alone.read_full("layers.0.attention.qkv.weight"), foreign.read_full("layers.0.attention.qkv.weight")
    )


def test_megatrons_shards_of_more_than_ten_data_ranks_give_its_float32_state(tmp_path: Path) -> None:
    """ZeRO's flat groups of two tensor-parallel ranks, cut at places that no parameter ends at."""
    tp, dp = 2, 12
    layers = megatron_layers(their_model("llama", 2), "llama", 2, tp)
    for rank in range(tp):
        named = [
            (f"{number}.{name}", tensor)
            for number, ranks in zip([1, 3, 4, 6, 7], layers, strict=True)
            for name, tensor in ranks[rank].items()
        ]
        flat = torch.cat([tensor.flatten() for _, tensor in named])
        part = -(-flat.numel() // dp)
        for data in range(dp):
            places, begin = {}, 0
            for name, tensor in named:
                start, stop = max(begin, data * part), min(begin + tensor.numel(), (data + 1) * part)
                if start < stop:
                    places[name] = fragment_address(numel=stop - start, start=start - data * part)
                begin += tensor.numel()
            own = flat[data * part : (data + 1) * part].clone()
            state = {
                "single_partition_of_fp32_groups": [own],
                "base_optimizer_state": {"state": {0: {"step": 4, "exp_avg": own * 2.0, "exp_avg_sq": own * 3.0}}},
                "param_slice_mappings": [places],
            }
            path = tmp_path / f"bf16_zero_pp_rank_{data}_mp_rank_{rank:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": state}, path)
        model_state = {"module": None, "param_shapes": [{name: tensor.shape for name, tensor in named}]}
        torch.save(model_state, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    foreign = read(tmp_path, outputs.config_of(f"{LLAMA} --num-query-groups 2"))
    write_megatron(tmp_path / "layers", layers, 3, {"num_attention_heads": HEADS})
    weights = read(tmp_path / "layers", outputs.config_of(f"{LLAMA} --num-query-groups 2"))
    assert foreign.facts["step"] == 4
    assert foreign.parameters == weights.parameters
    for name in weights.parameters:
        assert torch.equal(foreign.read_full(name), weights.read_full(name))
        assert torch.equal(foreign.read_full(name, "exp_avg_sq"), weights.read_full(name) * 3.0)
    (tmp_path / "bf16_zero_pp_rank_11_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks zero_pp_rank_11_mp_rank_00_optim_states\.pt"):
        read(tmp_path)


def test_a_megatron_universal_folder_keeps_moments_in_step_with_weights(tmp_path: Path) -> None:
    """Rows of exp_avg must be sorted as those of the weight are: here each is a multiple of it."""
    layers = megatron_layers(their_model("llama", 2), "llama", 2, 1)
    numbers = [1, 3, 4, 6, 7]
    for number, (state,) in zip(numbers, layers, strict=True):
        for name, tensor in state.items():
            folder = tmp_path / "zero" / f"{number}.{name}"
            folder.mkdir(parents=True)
            for factor, file in ((1.0, "fp32"), (2.0, "exp_avg"), (3.0, "exp_avg_sq")):
                torch.save({"param": (tensor * factor).detach().clone(), "cat_dim": 0}, folder / f"{file}.pt")
    foreign = read(tmp_path, outputs.config_of(f"{LLAMA} --num-query-groups 2"))
    assert foreign.kinds == ("weight", "exp_avg", "exp_avg_sq")
    for name in foreign.parameters:
        weight = foreign.read_full(name)
        torch.testing.assert_close(foreign.read_full(name, "exp_avg"), weight * 2.0, rtol=0, atol=0)
        torch.testing.assert_close(foreign.read_full(name, "exp_avg_sq"), weight * 3.0, rtol=0, atol=0)
    head = foreign.read_full("output.weight")
    assert head.shape == (VOCABULARY, HIDDEN)


def drifted(folder: Path, name: str, change: float) -> dict[str, Tensor]:
    """Write a BLOOM of two ranks, the second of which holds another first norm. Returns the first rank's block."""
    layers = megatron_layers(their_model("bloom"), "bloom", 8, 2)
    layers[1][1] = dict(layers[1][1])
    layers[1][1][name] = layers[1][1][name].clone()
    layers[1][1][name][3] += change
    write_megatron(folder, layers, 3, {"num_attention_heads": HEADS})
    return layers[1][0]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("input_layernorm.weight", "attention_norm.weight"), ("mlp.dense_4h_to_h.bias", "mlp.down.bias")],
)
def test_megatrons_copies_that_drifted_a_little_are_averaged_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, theirs: str, ours: str
) -> None:
    block = drifted(tmp_path, theirs, 0.004)
    found = read(tmp_path).read_full(f"layers.0.{ours}")
    expected = block[theirs].clone()
    expected[3] += 0.002
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
    said = rf"layers\.0\.{ours} differs between tensor-parallel ranks by 0\.00\d+ of its largest value; taking"
    assert re.search(said, caplog.text)


def test_megatrons_copies_that_trained_apart_are_refused_unless_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block, name = drifted(tmp_path / "theirs", "input_layernorm.weight", 0.5), "layers.0.attention_norm.weight"
    with pytest.raises(CheckpointError, match=rf"layer_03-model_00.*{name} differs .* above the limit of 0\.016"):
        read(tmp_path / "theirs").read_full(name)
    tool = ["--input_folder", str(tmp_path / "theirs"), "--output_folder", str(tmp_path / "universal")]
    assert ds_to_universal.main(tool) == 1
    assert "--max-drift" in capsys.readouterr().err
    for fault in ("nan", "-1", "inf"):
        with pytest.raises(SystemExit):
            ds_to_universal.main([*tool, "--max-drift", fault])
        assert f"--max-drift: invalid fraction value: '{fault}'" in capsys.readouterr().err
    assert ds_to_universal.main([*tool, "--max-drift", "0.5"]) == 0
    mean = read(tmp_path / "universal").read_full(name)
    assert float(mean[3]) == pytest.approx(float(block["input_layernorm.weight"][3]) + 0.25)


def test_the_drift_is_a_fraction_of_the_copies_where_their_mean_is_zero(tmp_path: Path) -> None:
    layers = megatron_layers(their_model("bloom"), "bloom", 8, 2)
    first = layers[1][0]["mlp.dense_4h_to_h.bias"]
    layers[1][1]["mlp.dense_4h_to_h.bias"] = -first
    write_megatron(tmp_path, layers, 3, {"num_attention_heads": HEADS})
    with pytest.raises(CheckpointError, match="by 1 of its largest value, above the limit"):
        read(tmp_path).read_full("layers.0.mlp.down.bias")
    assert not read(tmp_path, max_drift=1.0).read_full("layers.0.mlp.down.bias").any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_copies_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    drifted(tmp_path, "input_layernorm.weight", value)
    with pytest.raises(CheckpointError, match="is not finite on tensor-parallel rank 1"):
        read(tmp_path, max_drift=torch.inf).read_full("layers.0.attention_norm.weight")


def test_tied_copies_that_differ_are_refused(tmp_path: Path) -> None:
    layers = megatron_layers(their_model("bloom"), "bloom", 8, 2)
    layers[-1][1] = {"word_embeddings.weight": layers[-1][1]["word_embeddings.weight"] + 1e-3}
    write_megatron(tmp_path, layers, 3, {"num_attention_heads": HEADS})
    with pytest.raises(CheckpointError, match=r"layer_07-model_00.* differs from 1\.word_embeddings\.weight"):
        read(tmp_path).read_full("embedding.word.weight")


def test_a_megatron_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    layers = megatron_layers(their_model("bloom"), "bloom", 8, 2)
    write_megatron(tmp_path, layers, 3, {"num_attention_heads": HEADS})
    with pytest.raises(CheckpointError, match="num_attention_heads=4 here, 8 there"):
        read(tmp_path, outputs.config_of(f"{BLOOM} --num-attention-heads 4"))
    with pytest.raises(CheckpointError, match=r"layer_01.*fewer than vocab_size=1000"):
        read(tmp_path, outputs.config_of(f"{BLOOM} --vocab-size 1000"))
    with pytest.raises(CheckpointError, match=r"layers\.2\.attention\.dense\.bias is not there"):
        read(tmp_path, outputs.config_of(f"{BLOOM} --num-layers 3"))
    write_megatron(tmp_path, layers, 3, {})
    with pytest.raises(CheckpointError, match="does not say how many attention heads"):
        read(tmp_path)
    (tmp_path / "layer_04-model_01-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"layer_04-model_00.*rank 1 of 2 has no file"):
        read(tmp_path)
