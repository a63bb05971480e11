"""A third family, defined in this file alone: it is planned, trains, is checkpointed, resumed, exported and generates.

It is a Llama with a norm over each head of q and k, whose gradients each rank computes from its own heads, and a gate
that is a linear layer of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.plan_memory import LIMIT, compare
from megatron.checkpoint.reader import newest_checkpoint
from megatron.cli import convert_checkpoint
from megatron.generation.generator import generate
from megatron.generation.loading import load_model
from megatron.generation.model import InferenceModel, build_stage
from megatron.generation.options import GenerationOptions, LoadOptions
from megatron.generation.requests import Request
from megatron.models.attention.layer import SelfAttention, Shared
from megatron.models.decoder import DecoderBlock, column_shards, decoder_layers, row_shards
from megatron.models.family import ConfigFields, Family, HuggingFaceForm
from megatron.models.transformer import TransformerLayer, rms_norm
from megatron.options.config import Config, ConfigError, ModelConfig
from megatron.parallel.context import ParallelContext
from megatron.parallel.costs import Activation, MatrixProduct, Norm
from megatron.parallel.layout import LayoutError
from megatron.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.shards import LayerDeclaration, Shard, Shards, named_parameters
from megatron.plan.describe import describe
from megatron.plan.flops import count_parameters, flops_per_token
from megatron.settings.command_line import load_config
from megatron.settings.validation import check
from megatron.weights.huggingface import export_huggingface, parameters_of
from megatron.weights.huggingface_source import HuggingFaceSource
from megatron.weights.model import whole_model
from tests import runs
from tests.models import outputs
from tests.plan.test_sizes import assert_planned_is_allocated
from tests.ranks import RankPools

# ---------------------------------------------------------------------------------------------------------------------
# The family


class QKNormAttention(SelfAttention):
    def __init__(self, shards: Shards, shared: Shared) -> None:
        super().__init__(shards, shared)
        self.query_norm, self.key_norm = (rms_norm(shards.below(name), shared) for name in ("query_norm", "key_norm"))

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(hidden)
        return self.query_norm(q), self.key_norm(k), v


class SeparateGateMLP(nn.Module):
    def __init__(self, shards: Shards, shared: Shared) -> None:
        super().__init__()
        self.gate = ColumnParallelLinear(shards.below("gate"), shared.ctx)
        self.up = ColumnParallelLinear(shards.below("up"), shared.ctx)
        self.down = RowParallelLinear(shards.below("down"), shared.ctx)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return output


class ToyBlock(DecoderBlock):
    def attention_shards(self, model: ModelConfig, window: int | None) -> dict[str, Shard]:
        attention = super().attention_shards(model, window)
        for name, heads in (("query_norm", model.num_attention_heads), ("key_norm", model.num_kv_heads)):
            cost = Norm(heads * model.head_size, is_rms=True)
            attention[f"{name}.weight"] = Shard((model.head_size,), value=1.0, used_on="heads", cost=cost)
        return attention

    def mlp_shards(self, model: ModelConfig, ffn_size: int) -> dict[str, Shard]:
        mlp: dict[str, Shard] = {}
        for name in ("gate", "up"):
            mlp |= column_shards(name, model, (model.ffn_size,), bias=False, cost=MatrixProduct("mlp"))
        activation = Activation(is_gated=True, kept=model.ffn_size)  # silu(gate)
        return mlp | row_shards("down", model, model.ffn_size, bias=False, cost=MatrixProduct("mlp", activation))

    def build(self, shards: Shards, shared: Shared) -> TransformerLayer:
        return TransformerLayer(shards, shared, norm=rms_norm, mlp=SeparateGateMLP, attention=QKNormAttention)


def declare(config: Config) -> list[LayerDeclaration]:
    return decoder_layers(config, ToyBlock(norm="rms_norm", activation="silu", is_gated=True))


def rules(config: Config) -> Iterator[str]:
    if config.model.position_embedding_type != "rope":
        yield f"toy has position_embedding_type=rope only, not {config.model.position_embedding_type}; use rope"


def options(fields: ConfigFields) -> tuple[dict[str, Any], Any]:
    fields.demand("toy_version", 1)
    names = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
    return {**{name: fields.take(name) for name in names}, "position_embedding_type": "rope"}, fields.take("length")


def config_fields(config: Config) -> dict[str, Any]:
    names = ("num_layers", "hidden_size", "num_attention_heads")
    own = {name: getattr(config.model, name) for name in names}
    return {**own, "length": config.training.seq_length, "toy_version": 1}


TOY = HuggingFaceForm(
    model_type="toy",
    class_name="ToyForCausalLM",
    prefix="toy.",
    modules={
        "embedding.word": ("tokens",),
        "layers.*.attention_norm": ("block.*.norm_1",),
        "layers.*.attention.qkv": ("block.*.q", "block.*.k", "block.*.v"),
        "layers.*.attention.query_norm": ("block.*.norm_q",),
        "layers.*.attention.key_norm": ("block.*.norm_k",),
        "layers.*.attention.dense": ("block.*.o",),
        "layers.*.mlp_norm": ("block.*.norm_2",),
        "layers.*.mlp.gate": ("block.*.gate",),
        "layers.*.mlp.up": ("block.*.up",),
        "layers.*.mlp.down": ("block.*.down",),
        "final_norm": ("norm",),
    },
    options=options,
    config_fields=config_fields,
    unsupported=lambda model: [],
)
FAMILY = Family(declare=declare, huggingface={"": TOY}, rules=rules)

NAME = f"{__name__}:FAMILY"
FLAGS = f"--architecture {NAME} --position-embedding-type rope"

# ---------------------------------------------------------------------------------------------------------------------
# What the rest of the project does with it


@pytest.mark.parametrize("groups", [8, 2, 1])
@pytest.mark.parametrize("extra", ["", "--sequence-parallel", "--sequence-parallel --recompute-granularity full"])
def test_a_norm_over_heads_has_the_gradients_of_one_rank(ranks: RankPools, groups: int, extra: str) -> None:
    tokens = np.random.default_rng(0).integers(0, 123, (2, 25))
    inputs, labels = np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
    flags = f"{FLAGS} --num-query-groups {groups} --init-method-std 0.1"
    single = outputs.run(flags, None, inputs, labels)
    shards = parameters_of(outputs.config_of(flags))
    parallel = ranks(2)(outputs.run, f"{flags} --tensor-model-parallel-size 2 {extra}", None, inputs, labels)
    replicated = [name for name, shard in shards.items() if shard.dim is None]
    assert sum(name.endswith(("query_norm.weight", "key_norm.weight")) for name in replicated) == 4
    for part in parallel:
        assert part.loss == pytest.approx(single.loss, rel=1e-5)
        for name in replicated:
            expected = single.gradients[name]
            assert np.abs(expected).max() > 1e-5, name
            np.testing.assert_allclose(
                part.gradients[name], expected, rtol=0, atol=2e-5 * np.abs(expected).max(), err_msg=name
            )


def test_text_is_generated_with_the_norms_of_the_family() -> None:
    config, ctx = outputs.config_of(FLAGS), ParallelContext.single()
    layers, modules = build_stage(config, ctx, ctx.device)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in named_parameters(modules):
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.5, generator=generator)
    model = InferenceModel(config, ctx, layers, modules)
    (found,) = generate(model, [Request(0, (5, 6, 7))], GenerationOptions(max_new_tokens=8))
    text = torch.tensor([[5, 6, 7, *found.ids]])
    whole = model.logits(model.forward_stage(text))[2:-1, 0].argmax(-1)  # without a cache
    assert found.ids == tuple(whole.tolist())


def test_it_trains_resumes_on_another_layout_and_is_exported(ranks: RankPools, tmp_path: Path) -> None:
    data, saved = runs.write_dataset(tmp_path / "data"), tmp_path / "saved"
    common = f"{FLAGS} --hidden-dropout 0 --attention-dropout 0 --data-path {data} --train-iters 8 --eval-iters 0"
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
    assert set(ranks(4)(runs.train, f"{common} {layout} --results-dir {tmp_path / 'whole'}")) == {""}
    parts = f"--save {saved} --results-dir {tmp_path / 'parts'}"
    assert set(ranks(4)(runs.train, f"{common} {layout} {parts} --exit-interval 4")) == {""}
    assert set(ranks(2)(runs.train, f"{common} {parts} --zero-stage 2")) == {""}
    whole, resumed = (
        [row["lm_loss"] for row in runs.rows(tmp_path / folder, "train")] for folder in ("whole", "parts")
    )
    assert resumed[:4] == whole[:4]
    assert resumed == pytest.approx(whole, rel=1e-5)
    assert whole[-1] < whole[0]

    checkpoint = newest_checkpoint(saved)
    assert checkpoint is not None
    model = whole_model(checkpoint)
    folder = tmp_path / "hf"
    folder.mkdir()
    export_huggingface(folder, model.config, model.tensors())
    back = HuggingFaceSource(folder, architecture=NAME)
    assert back.config.model.architecture == NAME
    assert "toy.block.1.norm_k.weight" in back.stored
    for name in model.source.parameters:
        assert torch.equal(back.read_full(name), checkpoint.read_full(name))
    assert ranks(1)(runs.train, f"{common} --load {folder}") == [""]


def test_it_is_converted_both_ways_and_generated_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A family outside the package, named by --architecture where a folder of transformers does not name it."""
    config, generator = outputs.config_of(FLAGS), torch.Generator().manual_seed(3)
    drawn = {
        name: torch.empty(shard.shape).normal_(float(len(shard.shape) == 1), 0.2, generator=generator)
        for name, shard in parameters_of(config).items()
    }
    theirs, native, back = (tmp_path / name for name in ("theirs", "native", "back"))
    theirs.mkdir()
    export_huggingface(theirs, config, drawn.items())

    def convert(*words: str) -> str:
        assert convert_checkpoint.main(words) == 0
        return capsys.readouterr().out

    said = convert("--load", str(theirs), "--save", str(native), "--to", "native", "--architecture", NAME)
    assert f"verified: {len(drawn)} tensors equal; logits not compared: transformers has no ToyForCausalLM" in said
    convert("--load", str(native), "--save", str(back), "--to", "hf")
    assert (back / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    found = []
    for folder, architecture in ((native, None), (back, NAME)):
        options = LoadOptions(load=str(folder), architecture=architecture, precision="fp32", device="cpu")
        model = load_model(options, ParallelContext.single())
        (completion,) = generate(model, [Request(0, (5, 6, 7))], GenerationOptions(max_new_tokens=8))
        found.append(completion.ids)
        for name, parameter in named_parameters(model.module):
            assert torch.equal(parameter[: len(drawn[name])], drawn[name])
    assert found[0] == found[1]
    assert convert_checkpoint.main(["--load", str(back), "--save", str(tmp_path / "no"), "--to", "native"])
    assert "model_type='toy'; only " in capsys.readouterr().err


def test_it_is_planned_and_its_rules_are_checked() -> None:
    config = load_config([*runs.TINY.split(), *FLAGS.split(), "--train-iters", "1", "--data-path", "none"])
    assert_planned_is_allocated(config)
    text = describe(config, nodes=1, devices_per_node=1, title="a plan", check=check)
    assert f"{count_parameters(config):,} in all" in text
    with pytest.raises(ConfigError, match="toy has position_embedding_type=rope only, not alibi; use rope"):
        load_config(["--architecture", NAME, "--position-embedding-type", "alibi"])


SIZES = (
    "--hidden-size 256 --num-attention-heads 4 --vocab-size 2000 --seq-length 512 --num-layers 4 "
    "--micro-batch-size 2 --global-batch-size 4"
)


@pytest.mark.parametrize(
    "extra",
    [
        "--bf16",
        *(
            pytest.param(extra, marks=pytest.mark.slow)
            for extra in ("", "--lora-rank 8", "--kernels plain", "--kernels plain --bf16", "--num-query-groups 2")
        ),
    ],
)
def test_the_plan_of_its_memory_is_within_5_percent_of_a_run(ranks: RankPools, extra: str) -> None:
    (result,) = ranks(1)(compare, f"{FLAGS} {SIZES} {extra}", "cpu")
    assert result is not None
    assert abs(result.ratio - 1) < LIMIT, result


def test_its_flops_are_those_of_its_products() -> None:
    config = load_config([*runs.TINY.split(), *FLAGS.split(), "--train-iters", "1", "--data-path", "none"])
    model, heads = config.model, config.model.num_attention_heads * config.model.head_size
    products = [(model.hidden_size, 3 * heads), (heads, model.hidden_size), *[(model.hidden_size, model.ffn_size)] * 3]
    assert model.num_kv_heads == model.num_attention_heads
    layer = sum(2 * rows * columns for rows, columns in products) + 4 * config.training.seq_length * heads
    head = 2 * model.hidden_size * model.vocab_size
    assert flops_per_token(config) == 3 * (model.num_layers * layer + head)


def test_a_matrix_without_a_cost_is_refused() -> None:
    def declare_without(config: Config) -> list[LayerDeclaration]:
        layers = declare(config)
        shards = {name: dataclasses.replace(shard, cost=None) for name, shard in layers[2].shards.items()}
        return [*layers[:2], dataclasses.replace(layers[2], shards=shards), *layers[3:]]

    with pytest.raises(LayoutError, match=r"layers\.0\.attention\.qkv\.weight is a matrix without a cost"):
        Family(declare=declare_without).layers(outputs.config_of(FLAGS))
