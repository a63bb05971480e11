"""muP: starts, learning rates and multipliers by width, on every layout, and what other programs are given of them."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from benchmarks import mup_coordinates as coordinates
from megatron.checkpoint.folders import CheckpointError
from megatron.generation.options import LoadOptions
from megatron.generation.saved_model import inference_config
from megatron.models.sequential import SequentialModel, build_layers
from megatron.options.config import Config
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import declared_shards, initialise, named_parameters
from megatron.plan.flops import declared_layers
from megatron.training.optimizers.build import build_optimizer
from megatron.weights.huggingface import export_huggingface
from megatron.weights.huggingface_config import config_of, differences, form_of, read_config
from megatron.weights.megatron_args import arguments_of
from megatron.weights.megatron_core import export
from tests.house import ROOT
from tests.models import outputs
from tests.ranks import RankPools
from tests.training import layouts, moves

MUP = "--mup-base-hidden-size 16 --mup-base-head-size 4"
"""Of a model with hidden_size 64 and heads of 16: 4 times as wide."""
GRANITE = "--architecture granite --position-embedding-type rope --num-attention-heads 4"
HIDDEN = re.compile(r"attention\.(qkv|dense)|mlp\.(gate_up|up|down|router|experts\.\d+\.\w+)")


def is_hidden(name: str) -> bool:
    return HIDDEN.search(name) is not None and name.endswith("weight")


@pytest.mark.parametrize("architecture", ["granite", "mixtral", "bloom"])
def test_matrices_between_widths_alone_start_smaller(architecture: str) -> None:
    flags = f"--architecture {architecture} --num-attention-heads 4"
    if architecture != "bloom":
        flags += " --position-embedding-type rope --untie-embeddings-and-output-weights"
    if architecture == "mixtral":
        flags += " --num-experts 4"
    plain, scaled = (declared_shards(declared_layers(outputs.config_of(words))) for words in (flags, f"{flags} {MUP}"))
    assert sum(is_hidden(name) for name in plain) >= 8
    for name, shard in plain.items():
        if shard.std is None:
            assert scaled[name] == shard
        else:
            assert scaled[name].std == pytest.approx(shard.std / (2 if is_hidden(name) else 1), rel=1e-12), name


def test_the_weights_that_are_drawn_are_the_narrower_ones() -> None:
    model = outputs.build_model(outputs.config_of(f"{GRANITE} {MUP}"), ParallelContext.single())
    found = {name: float(p.detach().std()) for name, p in named_parameters(model)}
    assert found["layers.0.attention.qkv.weight"] == pytest.approx(0.01, rel=0.05)
    assert found["layers.1.mlp.down.weight"] == pytest.approx(0.01 / 2, rel=0.05)  # of 2 layers: divided by sqrt(4)
    assert found["embedding.word.weight"] == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2 --zero-stage 1", "--zero-stage 3"])
def test_matrices_between_widths_alone_learn_slower(ranks: RankPools, flags: str) -> None:
    words = f"{layouts.MODELS['llama_gqa']} --mup-base-hidden-size 16 {flags}"
    found: dict[str, float] = {}
    for of_rank in ranks(2 if flags else 1)(moves.rates_in_effect, words, 0):
        found |= {name: max(move, found.get(name, 0.0)) for name, move in of_rank.items()}
    assert sum(map(is_hidden, found)) == 16
    for name, move in found.items():
        assert move == pytest.approx(1e-3 / (4 if is_hidden(name) else 1), rel=1e-3), name


def test_the_decay_of_a_step_stays_and_epsilon_follows_the_gradients() -> None:
    config = outputs.config_of(f"{GRANITE} {MUP} --lr 1e-3 --weight-decay 0.1 --adam-eps 1e-6")
    ctx = ParallelContext.single()
    optimizer = build_optimizer(SequentialModel(build_layers(config, ctx)), config, ctx)
    decayed = {
        parameter.full_name: (group["lr"], group["lr"] * group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.dim() > 1
    }
    for name, (lr, product) in decayed.items():
        assert lr == pytest.approx(1e-3 / (4 if is_hidden(name) else 1)), name
        assert product == pytest.approx(1e-4), name
    assert {group["eps"] for group in optimizer.param_groups} == {1e-6 / 4}


def test_the_base_model_trains_bit_for_bit_as_without(ranks: RankPools) -> None:
    words = layouts.MODELS["llama_gqa_tied"]
    at_base = f"{words} --mup-base-hidden-size 64 --mup-base-head-size 16"
    assert ranks(1)(layouts.train, at_base, 3) == ranks(1)(layouts.train, words, 3)


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
        pytest.param("--zero-stage 1", marks=pytest.mark.slow),
    ],
)
def test_layouts_learn_alike(ranks: RankPools, flags: str) -> None:
    words = f"{layouts.MODELS['llama_gqa_tied']} {MUP}"
    expected = ranks(1)(layouts.train, words, 3)[0]
    found = ranks(2)(layouts.train, f"{words} {flags}", 3)[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-6)


WIDTHS, STEPS = (64, 128, 256), 3


def slopes(flags: str, base: int | None) -> dict[str, float]:
    found = [coordinates.mean_moves(width, base, STEPS, (0, 1), flags)[-1] for width in WIDTHS]
    return {place: coordinates.slope(WIDTHS, [each[place] for each in found]) for place in coordinates.PLACES}


@pytest.mark.parametrize("flags", ["", "--no-untie-embeddings-and-output-weights"])
def test_a_step_moves_activations_of_all_widths_alike(flags: str) -> None:
    """The coordinate test; benchmarks/mup_coordinates.py draws it over more widths."""
    # not 0: at such widths what is random in the start still counts
    assert max(map(abs, slopes(flags, WIDTHS[0]).values())) < 0.45
    assert min(slopes(flags, None).values()) > 0.9


def test_a_model_is_compared_by_the_multipliers_that_follow() -> None:
    flags = f"{GRANITE} --embedding-multiplier 3 --logits-scaling 0.5"
    scaled, plain = outputs.config_of(f"{flags} {MUP}"), outputs.config_of(flags)
    written = outputs.config_of(f"{GRANITE} --embedding-multiplier 3 --logits-scaling 2 --attention-multiplier 0.125")
    assert differences(scaled, written) == []
    assert len(differences(scaled, plain)) == 2


def test_the_size_of_heads_alone_scales_nothing() -> None:
    assert outputs.config_of(f"{GRANITE} --mup-base-head-size 4").model.score_factor is None
    given = outputs.config_of(f"{GRANITE} --mup-base-head-size 4 --attention-multiplier 0.125")
    assert given.model.score_factor == 0.125


def test_generation_keeps_the_multipliers_of_the_run() -> None:
    model = inference_config(LoadOptions(load="x"), outputs.config_of(f"{GRANITE} {MUP}"), "cpu", lazy=False).model
    assert (model.logits_divisor, model.score_factor) == (4.0, 0.125)


def test_an_export_computes_the_same_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = outputs.config_of(f"{GRANITE} --embedding-multiplier 3 --logits-scaling 0.5 --init-method-std 0.3 {MUP}")
    model, ctx = logits_model(config)
    export_huggingface(tmp_path, config, ((name, p.detach()) for name, p in full_parameters(model, config)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert (theirs.config.logits_scaling, theirs.config.attention_multiplier) == (2.0, math.sqrt(4) / 16)
    tokens = torch.randint(123, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = theirs(tokens).logits.transpose(0, 1)
    found = outputs.logits_of(model, tokens, ctx)
    assert expected.std() > 0.1
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
    assert differences(config, config_of(*read_config(tmp_path))) == []


def logits_model(config: Config) -> tuple[SequentialModel, ParallelContext]:
    ctx = ParallelContext.single()
    model = SequentialModel(build_layers(config, ctx))
    initialise(named_parameters(model), 5, ctx)
    return model, ctx


def full_parameters(model: SequentialModel, config: Config) -> list[tuple[str, torch.Tensor]]:
    """Without the padding of the vocabulary."""
    return [(name, p[: config.model.vocab_size] if "word" in name else p) for name, p in named_parameters(model)]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_a_form_without_multipliers_refuses_by_name(architecture: str) -> None:
    flags = f"--architecture {architecture} --position-embedding-type rope --num-attention-heads 4"
    if architecture == "gemma2":
        flags += " --embedding-multiplier 8"
    form_of(outputs.config_of(f"{flags} --mup-base-hidden-size 64").model)
    with pytest.raises(CheckpointError, match=re.escape("logits_scaling=4.0")):
        form_of(outputs.config_of(f"{flags} --mup-base-hidden-size 16").model)


def test_megatron_cores_arguments_do_not_state_it() -> None:
    for base, is_refused in ((64, False), (16, True)):
        words = (
            f"--architecture llama --position-embedding-type rope --num-attention-heads 4 --mup-base-hidden-size {base}"
        )
        config = outputs.config_of(words)
        with pytest.raises(CheckpointError, match=re.escape("logits_scaling=4.0")) if is_refused else nullcontext():
            export._check_arguments(config, arguments_of(config), Path("x"))


def test_nothing_reads_the_multipliers_without_mups_part() -> None:
    options = ROOT / "megatron" / "options" / "model.py"
    reading = re.compile(r"\.(logits_scaling|attention_multiplier)\b")
    files = [path for path in (ROOT / "megatron").rglob("*.py") if reading.search(path.read_text(encoding="utf-8"))]
    assert options in files
    # the rule that refuses both
    assert {path.name for path in files if path != options} == {"rules.py"}
