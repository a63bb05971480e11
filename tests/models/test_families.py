"""Every family computes what transformers' class of it computes, reads its folders and writes them.

A row is a config.json in transformers' words: models are made by transformers and read through it, as a user's are.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.folders import CheckpointError
from megatron.generation.generator import generate
from megatron.generation.loading import load_model
from megatron.generation.options import GenerationOptions, LoadOptions
from megatron.generation.requests import Request
from megatron.models.decoder import router_terms
from megatron.models.registry import FAMILIES
from megatron.models.sequential import SequentialModel, build_layers
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import named_parameters, shard_of
from megatron.weights.huggingface import export_huggingface, name_map
from megatron.weights.huggingface_config import config_of, restored_config
from megatron.weights.huggingface_source import HuggingFaceSource
from tests.models.noise import our_noise
from tests.models.outputs import in_float64, logits_of, mean_loss

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 61, 23
FIELDS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "families.md"
Fields = dict[str, Any]

LLAMA_SHAPE: Fields = {
    "vocab_size": VOCABULARY, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
NEOX_SHAPE: Fields = {
    "vocab_size": VOCABULARY, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3,
    "num_attention_heads": 5, "max_position_embeddings": 512, "rotary_pct": 0.5,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
MOE_SHAPE: Fields = {**LLAMA_SHAPE, "output_router_logits": True, "router_aux_loss_coef": 0.7}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
FALCON_SHAPE: Fields = {
    "vocab_size": VOCABULARY, "hidden_size": 40, "ffn_hidden_size": 56, "num_hidden_layers": 3,
    "num_attention_heads": 4, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"

ROWS: dict[str, tuple[Fields, ...]] = {
    "mistral": (
        {**LLAMA_SHAPE, "sliding_window": None, "rope_theta": 1e6},
        {**LLAMA_SHAPE, "sliding_window": 7},
        {**LLAMA_SHAPE, "sliding_window": 9, "head_dim": 14, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "qwen2": (
        {**LLAMA_SHAPE, "rope_theta": 1e6},
        {**LLAMA_SHAPE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        {
            **LLAMA_SHAPE, "use_sliding_window": True, "sliding_window": 6, "tie_word_embeddings": True,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
    ),
    "qwen3": (
        {**LLAMA_SHAPE, "head_dim": 18, "rope_theta": 1e6},
        {**LLAMA_SHAPE, "head_dim": 10, "num_key_value_heads": 4, "tie_word_embeddings": True},
        {**LLAMA_SHAPE, "head_dim": 6, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "granite": (
        {
            **LLAMA_SHAPE, "embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22,
            "logits_scaling": 0.5, "tie_word_embeddings": True,
        },
        {**LLAMA_SHAPE, "attention_multiplier": 0.35, "logits_scaling": 1.7},
        {**LLAMA_SHAPE, "num_attention_heads": 10, "num_key_value_heads": 5, "embedding_multiplier": 2.5},
    ),
    "olmo2": (
        LLAMA_SHAPE,
        {**LLAMA_SHAPE, "num_key_value_heads": 4, "rope_theta": 5e5},
        {**LLAMA_SHAPE, "num_attention_heads": 5, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "phi3": (
        {**LLAMA_SHAPE, "sliding_window": 6},
        {**LLAMA_SHAPE, "partial_rotary_factor": 0.4, "rope_theta": 250000.0},
        {**LLAMA_SHAPE, "num_key_value_heads": 4, "sliding_window": None, "tie_word_embeddings": True},
    ),
    "gpt_neox": (
        {**NEOX_SHAPE, "rotary_pct": 0.25, "num_attention_heads": 2},
        NEOX_SHAPE,
        {**NEOX_SHAPE, "rotary_pct": 1.0, "rotary_emb_base": 500, "tie_word_embeddings": True},
    ),
    "falcon": (
        {**FALCON_SHAPE, "ffn_hidden_size": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {**FALCON_SHAPE, "new_decoder_architecture": True, "num_kv_heads": 1},
        {
            **FALCON_SHAPE, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
        {**FALCON_SHAPE, "multi_query": False, "num_attention_heads": 2},
    ),
    "starcoder2": (
        {**LLAMA_SHAPE, "sliding_window": 8, "tie_word_embeddings": False, "rope_theta": 99999.4420358813},
        {**LLAMA_SHAPE, "num_key_value_heads": 1, "norm_epsilon": 1e-4},
        {**LLAMA_SHAPE, "num_key_value_heads": 4, "intermediate_size": 77, "sliding_window": 5},
    ),
    "gemma2": (
        {**LLAMA_SHAPE, "head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 20},
        {
            **LLAMA_SHAPE, "head_dim": 10, "sliding_window": 5, "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5,
        },
        {
            **LLAMA_SHAPE, "head_dim": 6, "sliding_window": 9, "num_key_value_heads": 1, "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": None, "final_logit_softcapping": 3.0, "tie_word_embeddings": False,
        },
    ),
    "gemma3_text": (
        {**LLAMA_SHAPE, "head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2},
        {
            **LLAMA_SHAPE, "head_dim": 10, "sliding_window": 5, "query_pre_attn_scalar": 10, "rope_theta": 5e5,
            "rope_local_base_freq": 300.0, "layer_types": [SLIDING, SLIDING, FULL],
        },
        {**LLAMA_SHAPE, "head_dim": 6, "sliding_window": 9, "num_key_value_heads": 1, "query_pre_attn_scalar": 7},
    ),
    "mixtral": (
        {**MOE_SHAPE, "num_local_experts": 4},
        {**MOE_SHAPE, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 7, "rope_theta": 1e4},
        {**MOE_SHAPE, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 6, "tie_word_embeddings": True},
    ),
    "qwen3_moe": (
        {**MOE_SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 18},
        {
            **MOE_SHAPE, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
            "norm_topk_prob": True, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 6,
        },
        {
            **MOE_SHAPE, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "head_dim": 6,
            "mlp_only_layers": [0], "tie_word_embeddings": True,
        },
    ),
    "granitemoe": (
        {
            **MOE_SHAPE, "num_local_experts": 4, "embedding_multiplier": 12.0, "attention_multiplier": 0.2,
            "residual_multiplier": 0.22, "logits_scaling": 0.5, "tie_word_embeddings": True,
        },
        {**MOE_SHAPE, "num_local_experts": 6, "num_experts_per_tok": 4, "attention_multiplier": 0.35},
        {**MOE_SHAPE, "num_local_experts": 3, "num_key_value_heads": 4, "attention_multiplier": 0.25},
    ),
    "olmoe": (
        {**MOE_SHAPE, "num_experts": 4, "num_experts_per_tok": 2},
        {**MOE_SHAPE, "num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 4, "norm_topk_prob": True},
        {**MOE_SHAPE, "num_experts": 5, "num_experts_per_tok": 2, "rope_theta": 5e5, "tie_word_embeddings": True},
    ),
}  # fmt: skip
WITH_EXPERTS = [kind for kind, rows in ROWS.items() if "router_aux_loss_coef" in rows[0]]

CASES = [(kind, index) for kind, rows in ROWS.items() for index in range(len(rows))]
every_row = pytest.mark.parametrize(("kind", "index"), CASES, ids=[f"{kind}-{index}" for kind, index in CASES])
first_rows = pytest.mark.parametrize(
    ("kind", "index"),
    [pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=pytest.mark.slow if case[1] > 1 else ()) for case in CASES],
)
"""The first two of each family; -m slow: all."""
every_dense_family = pytest.mark.parametrize("kind", [kind for kind in ROWS if kind not in WITH_EXPERTS])
every_family = pytest.mark.parametrize("kind", ROWS)


def test_every_family_has_rows() -> None:
    """Those of BLOOM, GPT-2 and Llama are in test_hf_logits.py."""
    assert {form.model_type for family in FAMILIES.values() for form in family.huggingface.values()} == {
        *ROWS, "bloom", "gpt2", "llama",
    }  # fmt: skip


def their_model(kind: str, fields: Fields) -> Any:
    config = transformers.AutoConfig.for_model(kind, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # norms and biases too: a one or a zero hides a forgotten weight
            is_norm_weight = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(1.0 if is_norm_weight else 0.0, 0.2, generator=generator)
    return model.eval()


def our_config(theirs: Any) -> Config:
    return config_of(json.loads(theirs.config.to_json_string()), "config.json")


def to_ours(theirs: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    """By our names, each of theirs used once."""
    mapped = name_map(config)
    form = mapped.form
    # transformers renames GPT-NeoX's where it writes and reads files
    theirs = {form.output if name == "lm_head.weight" else form.full_name(name): t for name, t in theirs.items()}
    lengths = {part.name: part.length for parts in mapped.parts.values() for part in parts}
    for name, (fused, _, expert, first) in mapped.stretches.items():
        theirs[name] = theirs[fused][expert, first : first + lengths[name]]
    for fused in {stretch.name for stretch in mapped.stretches.values()}:
        del theirs[fused]
    assert sorted(part.name for parts in mapped.parts.values() for part in parts) == sorted(theirs)
    return {name: _assembled(mapped, name, theirs) for name in mapped.parts}


def _assembled(mapped: Any, name: str, theirs: dict[str, Tensor]) -> Tensor:
    full = torch.empty(mapped.shards[name].shape)
    for part in mapped.parts[name]:
        for begin, end, view in part.chunks(full):
            view.copy_(theirs[part.name][begin:end])
    return full


def our_parameters(config: Config) -> dict[str, Tensor]:
    return dict(named_parameters(SequentialModel(build_layers(config, ParallelContext.single()))))


def our_model(config: Config, weights: dict[str, Tensor], ctx: ParallelContext | None = None) -> SequentialModel:
    model = SequentialModel(build_layers(config, ctx or ParallelContext.single()))
    parameters = dict(named_parameters(model))
    assert parameters.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shard_of(parameter).take(weights[name], 0, 1))
    return model


def their_balance(config: Config, outputs: Any) -> Any:
    """transformers' own loss a layer at a time, and over the experts of a token, as ours is."""
    if config.model.num_experts is None:
        return 0.0
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    topk = config.model.moe_router_topk
    logits = outputs.router_logits
    assert len(logits) == sum(map(config.model.has_experts, range(config.model.num_layers)))
    return sum(load_balancing_loss_func((layer,), config.model.num_experts, topk) / topk for layer in logits)


@contextmanager
def recorded_terms(totals: dict[str, float], config: Config, ctx: ParallelContext, *, tokens: int) -> Iterator[None]:
    def record(sums: Any) -> None:
        for name, (total, _) in sums.items():
            totals[name] += float(total) / tokens

    gradient = torch.tensor(1.0 / tokens)
    with ctx.state.terms.recorded(record, router_terms(config.model), gradient):
        yield


def compare(kind: str, fields: Fields, *, exact: bool) -> None:
    """Logits, loss and gradients; in float64 if `exact`."""
    with in_float64() if exact else nullcontext():
        theirs = their_model(kind, fields)
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        config, ctx = our_config(theirs), ParallelContext.single()
        outputs = theirs(inputs, use_cache=False)
        logits = outputs.logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        balance = their_balance(config, outputs)
        (loss + config.model.moe_aux_loss_coeff * balance).backward()
        balance = float(balance.detach() if isinstance(balance, Tensor) else balance)
        model = our_model(config, to_ours({name: p.detach() for name, p in theirs.named_parameters()}, config), ctx)
        found = logits_of(model, inputs, ctx)
        assert logits.std() > 0.3  # logits that hardly differ would agree by accident
        # relative to the largest, as for gradients: float32 rounds every number in proportion to it
        error = float((found - logits.transpose(0, 1)).abs().max() / logits.abs().max())
        assert error < (1e-9 if exact else 1e-5), f"logits: relative error {error:.1e}"
        recorded: dict[str, float] = dict.fromkeys(router_terms(config.model), 0.0)
        with recorded_terms(recorded, config, ctx, tokens=inputs.numel()):
            model(inputs, project=mean_loss(labels, ctx)).backward()
        assert recorded.get("load_balancing_loss", 0.0) == pytest.approx(balance, rel=1e-9 if exact else 1e-5)
        expected = to_ours({name: p.grad for name, p in theirs.named_parameters()}, config)
        for name, parameter in named_parameters(model):
            assert parameter.grad is not None, name
            gradient, largest = parameter.grad[: len(expected[name])], float(expected[name].abs().max())
            assert largest > 1e-7, f"{name} has no gradient worth comparing"
            error = float((gradient - expected[name]).abs().max()) / largest
            assert error < (1e-9 if exact else 1e-5), f"{name}: relative error {error:.1e}"


@every_row
def test_logits_and_gradients_equal_transformers_in_float64(kind: str, index: int) -> None:
    compare(kind, ROWS[kind][index], exact=True)


@every_row
def test_logits_and_gradients_equal_transformers_in_float32(kind: str, index: int) -> None:
    compare(kind, ROWS[kind][index], exact=False)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "granite", "mistral"])
def test_noise_on_embeddings_is_as_large_as_transformers(kind: str) -> None:
    """Gemma multiplies the embedding before the noise is added, Granite after."""
    integration: Any = pytest.importorskip("transformers.integrations.neftune")
    theirs = their_model(kind, ROWS[kind][0])
    config = our_config(theirs)
    theirs.train()
    integration.activate_neftune(theirs, 5.0)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), patch.object(Tensor, "uniform_", our_noise(tokens)):
        expected = theirs(tokens, use_cache=False).logits
        without = theirs.eval()(tokens, use_cache=False).logits
    weights = to_ours({name: p.detach() for name, p in theirs.named_parameters()}, config)
    training = dataclasses.replace(config.training, neftune_noise_alpha=5.0)
    model = our_model(dataclasses.replace(config, training=training), weights)
    error = (logits_of(model, tokens, ParallelContext.single()).transpose(0, 1) - expected).abs().max()
    assert error < 1e-4 < 1e-2 < (expected - without).abs().max()


@every_dense_family
def test_all_linear_adapters_are_those_of_peft(kind: str) -> None:
    """A norm over all heads is cut over ranks as a linear layer is, and has no adapter."""
    peft = pytest.importorskip("peft")
    theirs = their_model(kind, ROWS[kind][0])
    config = our_config(theirs)
    lora = dataclasses.replace(config.lora, lora_rank=2, lora_target_modules=("all-linear",))
    ours = our_parameters(dataclasses.replace(config, lora=lora))
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(r=2, target_modules="all-linear"))
    expected = sorted(p.numel() for name, p in adapted.named_parameters() if ".lora_" in name)
    assert sorted(p.numel() for name, p in ours.items() if "lora_" in name) == expected


def test_published_code_of_a_class_is_passed_over_and_other_code_refused() -> None:
    theirs = their_model("phi3", ROWS["phi3"][0]).config.to_dict()
    code = dict(FAMILIES["phi3"].huggingface[""].published_code or {})
    assert config_of({**theirs, "auto_map": dict(list(code.items())[:2])}, "config.json")
    config = config_of({**theirs, "auto_map": code}, "config.json")
    assert config == config_of(theirs, "config.json")
    written = restored_config({**theirs, "auto_map": code}, config, "fp32", ({}, {}))
    assert "auto_map" not in written, "an export has no such files"
    with pytest.raises(CheckpointError, match="auto_map="):
        config_of({**theirs, "auto_map": {"AutoModelForCausalLM": "mine.Phi3ForCausalLM"}}, "config.json")
    with pytest.raises(CheckpointError, match="auto_map="):
        config_of({**their_model("mistral", ROWS["mistral"][0]).config.to_dict(), "auto_map": code}, "config.json")


@every_family
def test_fields_with_one_value_on_the_page_are_refused_with_another(kind: str) -> None:
    theirs = their_model(kind, ROWS[kind][0]).config.to_dict()
    fields_table = FIELDS_PAGE.read_text(encoding="utf-8").rpartition("| model_type |")[2]
    (row,) = re.findall(rf"^\| `{kind}` \| (.*) \|$", fields_table, re.MULTILINE)
    fixed = re.findall(r"`(\w+)` [^`]", row.split(" | ")[1])
    assert len(fixed) >= 2
    for name in fixed:
        with pytest.raises(CheckpointError, match=f"{name}='other'"):
            config_of({**theirs, name: "other"}, "config.json")


def other_values(value: Any) -> list[Any]:
    """Values of the kind of a field's own; of one that is off, some that would turn it on."""
    match value:
        case None:
            return [1, 2, True, 0.5, "x"]
        case bool():
            return [not value]
        case int():
            return [value + 1, 2 * value, max(value // 2, 1)]
        case float():
            return [2 * value + 0.25, value / 2 + 0.01]
        case str():
            return ["x", "relu", "silu", "gelu"]
        case list():
            return [value[::-1], None]
    return []


def their_logits(kind: str, fields: Fields, tokens: Tensor) -> tuple[Any, Tensor] | None:
    """A model and its logits; None where transformers itself cannot build or run it."""
    try:
        theirs = their_model(kind, fields)
        theirs.config.use_cache = False
        with torch.no_grad():
            return theirs, theirs(tokens).logits
    except Exception:  # whatever a value that makes no sense leads to
        return None


@pytest.mark.slow
@every_family
def test_another_value_of_any_field_is_honoured_or_refused(kind: str) -> None:
    """The page's promise of every field of config.json, with transformers' model of that value as the oracle."""
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(3))
    fields, ctx = ROWS[kind][0], ParallelContext.single()
    about = {"vocab_size", "model_type", "dtype", "architectures", "transformers_version", "_name_or_path"}
    refusals: dict[str, str] = {}
    num_changed = 0
    with in_float64():
        usual = their_logits(kind, fields, tokens)
        assert usual is not None
        given = transformers.AutoConfig.for_model(kind, **fields).to_dict()
        cases = [(name, other) for name, value in given.items() if name not in about for other in other_values(value)]
        for name, other in cases:
            found = their_logits(kind, {**fields, name: other}, tokens)
            if found is None:
                continue
            theirs, logits = found
            try:
                config = our_config(theirs)
                weights = to_ours({each: p.detach() for each, p in theirs.named_parameters()}, config)
            except CheckpointError as refused:
                refusals[name] = str(refused)
                continue
            ours = our_model(config, weights, ctx).eval()
            error = float((logits_of(ours, tokens, ctx) - logits.transpose(0, 1)).abs().max() / logits.abs().max())
            assert error < 1e-9, (name, other)
            num_changed += logits.shape != usual[1].shape or not torch.equal(logits, usual[1])
    # by its own name, or by that of the field that it contradicts; rotary positions have a rule of ours
    names = [*given, "kv_channels"]
    nameless = [text for text in refusals.values() if not any(re.search(rf"\b{name}\b", text) for name in names)]
    assert nameless == []
    # both happen: values that are taken do change the model
    assert len(refusals) > 1
    assert num_changed > 10


def width_name(fields: Fields) -> str:
    return "ffn_hidden_size" if "ffn_hidden_size" in fields else "intermediate_size"


@st.composite
def drawn(draw: Any, kind: str) -> Fields:
    """A row of the family with other sizes."""
    fields = dict(draw(st.sampled_from(ROWS[kind])))
    groups = draw(st.sampled_from([1, 2, 3]))
    heads = groups * draw(st.sampled_from([1, 2]))
    fields |= {"num_attention_heads": heads, "hidden_size": heads * 8}
    fields |= {name: groups for name in ("num_key_value_heads", "num_kv_heads") if name in fields}
    fields[width_name(fields)] = draw(st.integers(3, 40))
    if "head_dim" in fields:
        fields["head_dim"] = 2 * draw(st.integers(2, 6))
    return fields


@every_family
@settings(max_examples=1, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_other_sizes_equal_transformers(kind: str, data: Any) -> None:
    compare(kind, data.draw(drawn(kind)), exact=True)


# ---------------------------------------------------------------------------------------------------------------------
# Folders


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def described(folder: Path) -> Fields:
    """The config as transformers reads it, without what says who wrote it."""
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    return {name: value for name, value in config.items() if name not in ("transformers_version", "_name_or_path")}


@first_rows
def test_a_round_trip_keeps_every_bit(kind: str, index: int, tmp_path: Path) -> None:
    theirs, back, alone = (tmp_path / name for name in ("theirs", "back", "alone"))
    their_model(kind, ROWS[kind][index]).save_pretrained(theirs, max_shard_size="20KB")
    assert len([*theirs.glob("*.safetensors")]) > 1
    model = HuggingFaceSource(theirs)
    for folder, source in ((back, model.metadata["source"]), (alone, None)):
        folder.mkdir()
        export_huggingface(folder, model.config, model.tensors(), source=source)
    expected = weights(theirs)
    for folder in (back, alone):
        found = weights(folder)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert described(back) == described(theirs)
    # written without the source, it describes the same model
    again = config_of(json.loads((alone / "config.json").read_text()), "config.json")
    assert again.model == model.config.model
    ours = transformers.AutoModelForCausalLM.from_pretrained(alone, **EAGER)
    written = their_model(kind, ROWS[kind][index])
    tokens = torch.arange(30)[None] % VOCABULARY
    assert torch.equal(ours(tokens).logits, written(tokens).logits)


@first_rows
def test_greedy_tokens_equal_transformers_beyond_the_window(kind: str, index: int, tmp_path: Path) -> None:
    theirs = their_model(kind, ROWS[kind][index])
    theirs.save_pretrained(tmp_path / "theirs")
    options = LoadOptions(load=str(tmp_path / "theirs"), precision="fp32", device="cpu")
    model = load_model(options, ParallelContext.single())
    prompts = [(5, 6, 7), tuple(range(20, 40)), (9,)]
    requests = [Request(number, prompt) for number, prompt in enumerate(prompts)]
    count = 200 if index == 0 else 50  # the windows are of 5 to 9 tokens
    found = {done.request: done.ids for done in generate(model, requests, GenerationOptions(max_new_tokens=count))}
    for number, prompt in enumerate(prompts):
        text = torch.tensor([[*prompt, *found[number]]])
        with torch.no_grad():
            best = theirs(text, use_cache=False).logits[0, len(prompt) - 1 : -1]
        gaps = best.max(-1).values - best.gather(1, text[0, len(prompt) :, None])[:, 0]
        assert len(found[number]) == count
        assert float(gaps.max()) < 1e-4, f"another token than transformers', {float(gaps.max()):.1e} below its best"
