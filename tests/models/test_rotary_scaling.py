"""Rotary positions that are scaled for longer texts compute what transformers computes, within and beyond the original.

A row is a config.json in transformers' words, as in test_families.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.folders import CheckpointError
from megatron.evaluation.scoring import Continuation, score
from megatron.generation.generator import BatchSettings, generate
from megatron.generation.loading import load_model
from megatron.generation.model import InferenceModel
from megatron.generation.options import GenerationOptions, LoadOptions
from megatron.generation.passes import KeptText
from megatron.generation.requests import Request
from megatron.models.positions import Packing, rotary_embedding, rotary_frequencies
from megatron.options.stored import from_dict, read_preset
from megatron.parallel.context import ParallelContext
from megatron.weights.huggingface import export_huggingface
from megatron.weights.huggingface_config import config_of
from megatron.weights.huggingface_source import HuggingFaceSource
from tests import runs
from tests.generation.outputs import LAYOUT, completions
from tests.generation.test_generator import full_shapes
from tests.models.test_families import (
    FULL,
    LENGTH,
    LLAMA_SHAPE,
    NEOX_SHAPE,
    SLIDING,
    VOCABULARY,
    Fields,
    compare,
    our_config,
    their_model,
)
from tests.ranks import RankPools

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
SHORT, LONG = [1.0, 1.3, 1.7, 2.1, 3.0], [1.1, 2.0, 4.0, 9.0, 30.0]
PHI = {**LLAMA_SHAPE, "max_position_embeddings": 64}
GEMMA = {**LLAMA_SHAPE, "head_dim": 10, "sliding_window": 7, "sliding_window_pattern": 2}


def scaled(shape: Fields, kind: str, **values: Any) -> Fields:
    return {**shape, "rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **values}}


def by_layer(kind: str, **values: Any) -> Fields:
    """Gemma 3's: the layers without a window are scaled, those with one have a base of their own."""
    whole = {"rope_type": kind, "rope_theta": 500.0, **values}
    return {**GEMMA, "rope_parameters": {FULL: whole, SLIDING: {"rope_type": "default", "rope_theta": 100.0}}}


LONGROPE = {"short_factor": SHORT, "long_factor": LONG}
ROWS: dict[str, tuple[str, Fields]] = {
    "linear": ("llama", scaled(LLAMA_SHAPE, "linear", factor=3.5)),
    "dynamic": ("llama", scaled({**LLAMA_SHAPE, "max_position_embeddings": 16}, "dynamic", factor=3.0)),
    "yarn": ("qwen2", scaled(LLAMA_SHAPE, "yarn", factor=4.0, original_max_position_embeddings=128)),
    "yarn-mscale": (
        "llama",
        scaled(
            {**LLAMA_SHAPE, "max_position_embeddings": 64, "rope_theta": 50.0}, "yarn", factor=8.0, mscale=0.7,
            mscale_all_dim=1.9, beta_fast=6, beta_slow=0.5, truncate=False, original_max_position_embeddings=8,
        ),
    ),
    "yarn-factors": (
        "mistral",
        scaled(
            {**LLAMA_SHAPE, "sliding_window": 7, "max_position_embeddings": 48}, "yarn", factor=None,
            attention_factor=1.37, beta_fast=16.5, original_max_position_embeddings=12,
        ),
    ),
    "longrope": (
        "qwen3",
        scaled({**LLAMA_SHAPE, "head_dim": 10}, "longrope", original_max_position_embeddings=16, **LONGROPE),
    ),
    "longrope-within": (
        "llama",
        scaled(LLAMA_SHAPE, "longrope", original_max_position_embeddings=100, factor=2.5, **LONGROPE),
    ),
    "longrope-phi": (
        "phi3",
        {**PHI, "rope_parameters": {"rope_type": "longrope", **LONGROPE}, "original_max_position_embeddings": 16},
    ),
    "longrope-phi-part": (
        "phi3",
        {
            **PHI, "partial_rotary_factor": 0.4, "original_max_position_embeddings": 12,
            "rope_parameters": {
                "rope_type": "longrope", "short_factor": [1.1, 1.7], "long_factor": [2.5, 8.0], "attention_factor": 1.6,
            },
        },
    ),
    "neox-linear": (
        "gpt_neox", {**NEOX_SHAPE, "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0}},
    ),
    "neox-dynamic": (
        "gpt_neox",
        {
            **NEOX_SHAPE, "max_position_embeddings": 9, "rotary_pct": 1.0,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 2.0},
        },
    ),
    "gemma-linear": ("gemma3_text", by_layer("linear", factor=8.0)),
    "gemma-yarn": ("gemma3_text", by_layer("yarn", factor=2.0, original_max_position_embeddings=16)),
    "gemma-longrope": ("gemma3_text", by_layer("longrope", original_max_position_embeddings=16, **LONGROPE)),
}  # fmt: skip
every_row = pytest.mark.parametrize("name", ROWS)
DEPENDENT = ["dynamic", "longrope", "longrope-phi", "longrope-phi-part", "neox-dynamic", "gemma-longrope"]


@every_row
@pytest.mark.parametrize("exact", [True, False], ids=["float64", "float32"])
def test_logits_and_gradients_equal_transformers(name: str, exact: bool) -> None:
    compare(*ROWS[name], exact=exact)


@every_row
def test_every_row_scales(name: str) -> None:
    """Each computes otherwise than without a scaling, and those that depend on the length beyond it alone."""
    model = our_config(their_model(*ROWS[name])).model
    plain = rotary_frequencies(dataclasses.replace(model, rope_scaling_factor=None))
    angles = rotary_embedding(model).angles(LENGTH, CPU, None, ParallelContext.single())
    phases = torch.outer(torch.arange(LENGTH), plain)
    assert (angles[0][:, 0, 0] - phases.cos()).abs().max() > 0.05
    assert (model.rotary_border is not None) == ("longrope" in name or "dynamic" in name)
    assert (name in DEPENDENT) == (model.rotary_border is not None and model.rotary_border < LENGTH)


@every_row
def test_a_round_trip_describes_the_same_model(name: str, tmp_path: Path) -> None:
    kind, fields = ROWS[name]
    their_model(kind, fields).save_pretrained(tmp_path / "theirs")
    model = HuggingFaceSource(tmp_path / "theirs")
    tokens = torch.arange(30)[None] % VOCABULARY
    expected = their_model(kind, fields)(tokens).logits
    for number, source in enumerate((None, model.metadata["source"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        export_huggingface(folder, model.config, model.tensors(), source=source)
        assert config_of(json.loads((folder / "config.json").read_text()), "config.json").model == model.config.model
        again = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        assert torch.equal(again(tokens).logits, expected)


# the factors of longrope come from the preset
PUBLISHED: dict[str, Fields] = {
    "phi4_mini": {
        "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0, "full_attn_mod": 1,
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
            "AutoTokenizer": "Xenova/gpt-4o",
        },
        "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1,
        "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 24,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
    },
    "phi3_mini_128k": {
        "model_type": "phi3", "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": False, "vocab_size": 32064,
    },
    "falcon_7b": {
        "model_type": "falcon", "alibi": False, "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0, "bias": False, "hidden_dropout": 0.0, "hidden_size": 4544,
        "layer_norm_epsilon": 1e-5, "multi_query": True, "new_decoder_architecture": False,
        "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True, "vocab_size": 65024,
    },
    "falcon_40b": {
        "model_type": "falcon", "alibi": False, "bias": False, "hidden_size": 8192, "layer_norm_epsilon": 1e-5,
        "new_decoder_architecture": True, "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
        "parallel_attn": True, "vocab_size": 65024,
    },
    "falcon2_11b": {
        "model_type": "falcon", "activation": "gelu", "alibi": False, "bias": False, "ff_factor": 4,
        "ffn_hidden_size": 16384, "hidden_size": 4096, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 8192,
        "multi_query": True, "new_decoder_architecture": True, "num_attention_heads": 32, "num_hidden_layers": 60,
        "num_kv_heads": 8, "num_ln_in_parallel_attn": 1, "parallel_attn": True, "rope_scaling": None,
        "rope_theta": 500042.0, "tie_word_embeddings": False, "vocab_size": 65024,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_configs(name: str) -> None:
    preset, fields = from_dict(read_preset(name)), dict(PUBLISHED[name])
    if preset.model.scales_rotary:
        sides = {
            f"{side}_factor": list(getattr(preset.model, f"rope_scaling_{side}_factors")) for side in ("short", "long")
        }
        fields["rope_scaling"] = {"type": "longrope", **sides}
    described = config_of(fields, "config.json")
    assert described.model.computed(0) == preset.model.computed(0)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("llama", {"rope_type": "axial"}, "rope_type='axial'"),
        ("llama", {"rope_type": "linear", "factor": 2.0, "truncate": 3}, "truncate=3 is not known"),
        ("llama", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": LONG}, "short_factors has 1 numbers"),
        ("llama", {"rope_type": "longrope", "short_factor": 3, "long_factor": LONG}, "short_factor=3 must be a list"),
        ("llama", {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}, "beta_slow=2.0 must be below"),
        (
            "llama",
            {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 7},
            "original_max_position_embeddings=7",
        ),
        ("phi3", {"rope_type": "linear", "factor": 2.0}, "rope_type='linear'"),
        ("gemma3_text", {"rope_type": "yarn", "factor": 2.0, "truncate": False}, "truncate=False"),
    ],
)
def test_what_is_not_computed_is_refused(kind: str, change: Fields, said: str) -> None:
    fields = {**LLAMA_SHAPE, "model_type": kind, "rope_scaling": change}
    with pytest.raises(CheckpointError, match=said.replace("(", r"\(")):
        config_of(fields, "config.json")


# ---------------------------------------------------------------------------------------------------------------------
# Packed rows


def packing_of(lengths: tuple[int, ...]) -> Packing:
    positions = torch.cat([torch.arange(length) for length in lengths])
    starts = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])
    return Packing(positions[None], starts[None])


@pytest.mark.parametrize("name", DEPENDENT)
def test_packed_documents_are_encoded_as_each_alone(name: str) -> None:
    """Some within the original length, some beyond it."""
    rotary = rotary_embedding(our_config(their_model(*ROWS[name])).model)
    lengths = (5, 21, 1, 1, 40, 16, 2)
    packed = rotary.angles(sum(lengths), CPU, packing_of(lengths), ParallelContext.single())
    alone = [rotary.angles(length, CPU, None, ParallelContext.single()) for length in lengths]
    for part, parts in zip(packed, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(part[:, 0, 0], torch.cat([each[:, 0, 0] for each in parts]), rtol=0, atol=2e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Texts that grow over the original length


def loaded(name: str, tmp_path: Path) -> tuple[Any, InferenceModel]:
    theirs = their_model(*ROWS[name])
    theirs.generation_config = transformers.GenerationConfig(pad_token_id=0)
    theirs.save_pretrained(tmp_path / "theirs")
    options = LoadOptions(load=str(tmp_path / "theirs"), precision="fp32", device="cpu")
    return theirs, load_model(options, ParallelContext.single())


PROMPTS = [(5, 6, 7), tuple(range(20, 35)), tuple(range(3, 43)), (9,)]


def requests_of(prompts: list[tuple[int, ...]]) -> list[Request]:
    return [Request(number, prompt) for number, prompt in enumerate(prompts)]


def greedy_gaps(theirs: Any, prompt: tuple[int, ...], ids: tuple[int, ...]) -> float:
    """How far below the best token ours are, each after a pass over its whole text, as there is no cache to outdate."""
    worst = 0.0
    for end in range(len(ids)):
        with torch.no_grad():
            logits = theirs(torch.tensor([[*prompt, *ids[:end]]]), use_cache=False).logits[0, -1]
        worst = max(worst, float(logits.max() - logits[ids[end]]))
    return worst


@pytest.mark.parametrize("name", ["longrope", "longrope-phi", "gemma-longrope", "yarn-mscale", "linear"])
def test_greedy_tokens_equal_whole_passes_of_transformers(name: str, tmp_path: Path) -> None:
    theirs, model = loaded(name, tmp_path)
    done = generate(model, requests_of(PROMPTS), GenerationOptions(max_new_tokens=24))
    for completion, prompt in zip(done, PROMPTS, strict=True):
        assert len(completion.ids) == 24
        assert greedy_gaps(theirs, prompt, completion.ids) < 1e-4


@pytest.mark.parametrize("name", ["longrope-phi", "longrope-phi-part", "dynamic", "neox-dynamic"])
def test_greedy_tokens_equal_those_of_transformers_cache(name: str, tmp_path: Path) -> None:
    """Phi-3's class reads a text again where it crosses; with dynamic NTK, keys stay as they were turned."""
    theirs, model = loaded(name, tmp_path)
    done = generate(model, requests_of(PROMPTS), GenerationOptions(max_new_tokens=24))
    for completion, prompt in zip(done, PROMPTS, strict=True):
        # transformers keeps the frequencies of the longest text that a model has seen
        fresh = their_model(*ROWS[name])
        fresh.generation_config = theirs.generation_config
        ids = fresh.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        assert list(completion.ids) == ids[0, len(prompt) :].tolist()


def test_beams_cross_the_original_length_as_transformers_do(tmp_path: Path) -> None:
    theirs, model = loaded("longrope-phi", tmp_path)
    options = GenerationOptions(max_new_tokens=20, num_beams=3)
    done = generate(model, requests_of(PROMPTS), options, settings=BatchSettings(batch_size=6))
    for completion, prompt in zip(done, PROMPTS, strict=True):
        ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, num_beams=3, do_sample=False)
        assert list(completion.ids) == ids[0, len(prompt) :].tolist()


LONG_LLAMA = (
    "--architecture llama --position-embedding-type rope --num-query-groups 2 --rope-scaling-factor 4 "
    "--rope-scaling-type longrope --rope-scaling-original-length 16 --rope-scaling-short-factors 1 1.3 1.7 2.1 "
    "--rope-scaling-long-factors 1.1 2 4 9"
)


@pytest.mark.parametrize("options", [{"num_samples": 2, "temperature": 0.9}, {"num_beams": 2}], ids=["drawn", "beams"])
def test_ranks_read_texts_again_that_cross(options: dict[str, Any], ranks: RankPools) -> None:
    """Rows of a batch cross at different turns, in groups that the stages take in turn."""
    generator = torch.Generator().manual_seed(9)
    weights = {
        name: torch.empty(shape).normal_(1.0 if len(shape) == 1 else 0.0, 0.3, generator=generator).numpy()
        for name, shape in full_shapes(LONG_LLAMA)
    }
    options = {"max_new_tokens": 20, **options}
    alone = completions(LONG_LLAMA, weights, PROMPTS, options, 4, is_alone=True)
    results = ranks(4)(completions, f"{LONG_LLAMA} {LAYOUT.format(2, 2)}", weights, PROMPTS, options, 4)
    assert [each.ids for each in results[0]] == [each.ids for each in alone]


@pytest.mark.parametrize("name", ["longrope-phi", "dynamic"])
def test_kept_text_changes_no_token(name: str, tmp_path: Path) -> None:
    """Turns within the original length, over it, beyond it, and back below it."""
    _, model = loaded(name, tmp_path)
    kept, options = KeptText(), GenerationOptions(max_new_tokens=6, logprobs=1)
    text: tuple[int, ...] = (5, 6, 7)
    for turn in range(6):
        request = [Request(0, text)]
        (with_kept,) = generate(model, request, options, kept=kept)
        (without,) = generate(model, request, options)
        assert with_kept.ids == without.ids
        assert with_kept.logprobs == pytest.approx(without.logprobs, abs=1e-4)
        text = (5, 6, 7, 8) if turn == 4 else (*text, *with_kept.ids, turn)


@pytest.mark.parametrize("name", ["longrope", "dynamic", "yarn"])
def test_scores_of_continuations_equal_transformers(name: str, tmp_path: Path) -> None:
    """Continuations of one context, on both sides of the original length."""
    _, model = loaded(name, tmp_path)
    context = tuple(range(10, 22))
    endings = [(4,), (5, 6), tuple(range(30, 43)), (7, 8, 9)]
    scores = score(model, [Continuation(context, ids) for ids in endings])
    for found, ids in zip(scores, endings, strict=True):
        theirs = their_model(*ROWS[name])
        with torch.no_grad():
            log_probs = theirs(torch.tensor([[*context, *ids][:-1]])).logits[0].log_softmax(-1)
        expected = log_probs[len(context) - 1 :].gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(found.logprobs).float(), expected, rtol=0, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Layouts


def losses(ranks: RankPools, size: int, arguments: str, results: Path) -> tuple[list[float], list[float]]:
    assert set(ranks(size)(runs.train_loaded, f"{arguments} --results-dir {results}")) == {""}
    rows = [*runs.rows(results, "train")]
    return [row["lm_loss"] for row in rows], [row["grad_norm"] for row in rows]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_dataset(tmp_path_factory.mktemp("data") / "text", vocabulary=VOCABULARY)


@pytest.mark.parametrize(
    "name", ["longrope-phi", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dynamic", "yarn-mscale"))]
)
def test_layouts_train_as_one_process_does(name: str, dataset: Path, ranks: RankPools, tmp_path: Path) -> None:
    their_model(*ROWS[name]).save_pretrained(tmp_path / "theirs")
    common = (
        f"--load {tmp_path / 'theirs'} --finetune --data-path {dataset} --train-iters 5 --eval-iters 0 --lr 3e-4 "
        "--seq-length 24 --micro-batch-size 2 --global-batch-size 4 --device cpu --log-interval 1"
    )
    single = losses(ranks, 1, common, tmp_path / "one")
    packed = losses(ranks, 1, f"{common} --reset-position-ids --eod-token-id 3", tmp_path / "packed")
    assert packed[0] != single[0]
    layouts = [
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1", single),
        (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --recompute-granularity full", single),
        (2, "--pipeline-model-parallel-size 2 --reset-position-ids --eod-token-id 3", packed),
    ]
    for size, layout, expected in layouts:
        found = losses(ranks, size, f"{common} {layout}", tmp_path / str(len(list(tmp_path.iterdir()))))
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert found[1] == pytest.approx(expected[1], rel=1e-5)
