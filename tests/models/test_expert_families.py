"""Families with experts: training as transformers', both forms of their files, generation and adapters on ranks."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpoint.folders import CheckpointError
from megatron.models.experts import TokenRouter
from megatron.models.rules import check_model
from megatron.models.sequential import SequentialModel, build_layers
from megatron.options.config import Config
from megatron.options.model import LoraConfig, ModelConfig
from megatron.parallel.context import ParallelContext
from megatron.parallel.shards import named_parameters, shard_of
from megatron.weights.huggingface_config import config_of
from megatron.weights.huggingface_source import HuggingFaceSource
from megatron.weights.peft.export import export_adapter
from megatron.weights.peft.source import PeftSource
from tests import runs
from tests.models import expert_runs
from tests.models.outputs import in_float64, logits_of
from tests.models.test_families import (
    EAGER,
    ROWS,
    WITH_EXPERTS,
    Fields,
    our_config,
    their_balance,
    their_model,
    to_ours,
)
from tests.ranks import RankPools
from tests.training import layouts

transformers = pytest.importorskip("transformers")
every_family = pytest.mark.parametrize("kind", WITH_EXPERTS)
STEPS = 20


def fields_of(kind: str, **changed: Any) -> Fields:
    """The second row of a family, of a size that ranks can cut."""
    fields = {**ROWS[kind][1], "hidden_size": 48, "vocab_size": 250, "router_aux_loss_coef": 0.05, **changed}
    name = "num_experts" if "num_experts" in fields else "num_local_experts"
    return {**fields, name: 4}


@every_family
def test_twenty_steps_equal_adamw_over_transformers_model(kind: str, ranks: RankPools, tmp_path: Path) -> None:
    theirs = their_model(kind, fields_of(kind))
    theirs.save_pretrained(tmp_path)
    config = our_config(theirs)
    (found,) = ranks(1)(expert_runs.train, str(tmp_path), "--micro-batch-size 4", STEPS)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.0)
    expected: dict[str, list[float]] = {"losses": [], "terms": [], "norms": []}
    for step in [*range(STEPS), 0]:
        tokens = torch.from_numpy(layouts.step_tokens(step, 4, 24))
        outputs = theirs(tokens[:, :-1], use_cache=False)
        loss = F.cross_entropy(outputs.logits.flatten(0, 1), tokens[:, 1:].flatten())
        terms = config.model.moe_aux_loss_coeff * their_balance(config, outputs)
        optimizer.zero_grad()
        (loss + terms).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        for name, value in (("losses", loss), ("terms", terms), ("norms", norm)):
            expected[name].append(float(value.detach()))
    # of the first batch again
    assert expected["losses"].pop() < 0.95 * expected["losses"][0]
    expected = {name: values[:STEPS] for name, values in expected.items()}
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["terms"] == pytest.approx(expected["terms"], rel=1e-6)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Both forms of files


def rewrite_in_memorys_names(theirs: Any, folder: Path, *, is_bin: bool) -> None:
    """Leave the weights under the names that transformers 5 has in memory, all experts in one tensor."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    weights = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    if is_bin:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("is_bin", [False, True])
@every_family
def test_fused_experts_are_read_as_those_of_files_are(kind: str, is_bin: bool, tmp_path: Path) -> None:
    theirs = their_model(kind, ROWS[kind][2] | {"tie_word_embeddings": False})
    for name in ("apart", "fused"):
        theirs.save_pretrained(tmp_path / name)
    rewrite_in_memorys_names(theirs, tmp_path / "fused", is_bin=is_bin)
    apart, fused = (HuggingFaceSource(tmp_path / name) for name in ("apart", "fused"))
    assert apart.parameters.keys() == fused.parameters.keys()
    for name in apart.parameters:
        assert torch.equal(apart.read_full(name), fused.read_full(name)), name


def test_a_fused_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    theirs = their_model("granitemoe", ROWS["granitemoe"][1])
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    save_file({**weights, name: weights[name][:3].contiguous()}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"input_linear.weight in model.safetensors is \[3, 112, 40\], config"):
        HuggingFaceSource(tmp_path)
    del weights[name]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"missing: {name}$"):
        HuggingFaceSource(tmp_path)


def test_more_experts_than_the_files_can_hold_are_refused_at_once(tmp_path: Path) -> None:
    their_model("mixtral", ROWS["mistral"][0] | {"num_local_experts": 2}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 10**12}))
    with pytest.raises(CheckpointError, match="has 1000000000000 experts"):
        HuggingFaceSource(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}),
        ("mixtral", {"hidden_act": "gelu"}),
        ("olmoe", {"clip_qkv": 8.0}),
        ("qwen3_moe", {"decoder_sparse_step": 0}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2], "decoder_sparse_step": 1}),
        ("granitemoe", {"shared_intermediate_size": 64}),
    ],
)
def test_fields_of_another_model_are_refused(kind: str, changed: Fields) -> None:
    theirs = their_model(kind, ROWS[kind][0]).config.to_dict()
    with pytest.raises(CheckpointError, match=next(iter(changed))):
        config_of({**theirs, **changed}, "config.json")


def test_a_coefficient_counts_where_transformers_trains_with_it() -> None:
    theirs = their_model("mixtral", ROWS["mixtral"][1]).config.to_dict()
    # of three layers' choices together, three for each token: the same strength in each layer
    assert config_of(theirs, "config.json").model.moe_aux_loss_coeff == pytest.approx(0.7)
    assert config_of({**theirs, "output_router_logits": False}, "config.json").model.moe_aux_loss_coeff == 0


# ---------------------------------------------------------------------------------------------------------------------
# Generation

EXPERTS_ON_TP = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (2, {"tensor_model_parallel_size": 2}),
    (2, EXPERTS_ON_TP),
    (4, {**EXPERTS_ON_TP, "pipeline_model_parallel_size": 2}),
    (4, EXPERTS_ON_TP),
]
"""The last is two copies of the model."""
PROMPTS = [(5, 6, 7), tuple(range(20, 40)), (9,), (17, 3), (2,) * 11]


@pytest.fixture(scope="module")
def trained(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral that has trained on two expert ranks, as it is exported."""
    folder = tmp_path_factory.mktemp("mixtral")
    their_model("mixtral", fields_of("mixtral", vocab_size=61)).save_pretrained(folder / "theirs")
    data = runs.write_dataset(folder / "text", vocabulary=61)
    flags = (
        f"--load {folder / 'theirs'} --finetune --data-path {data} --train-iters 10 --eval-iters 0 --lr 3e-3 "
        f"--seq-length 24 --micro-batch-size 2 --global-batch-size 4 --device cpu --results-dir {folder / 'run'} "
        f"--expert-model-parallel-size 2 --save {folder / 'saved'} --save-hf {folder / 'exports'}"
    )
    assert set(ranks(2)(runs.train_loaded, flags)) == {""}
    return folder / "exports" / "samples_40"


def test_an_export_of_a_trained_mixtral_generates_as_transformers_does(
    trained: Path, ranks: RankPools, tmp_path: Path
) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained, **EAGER)
    started = HuggingFaceSource(trained.parents[1] / "theirs").read_full("layers.1.mlp.experts.3.down.weight")
    assert not torch.equal(HuggingFaceSource(trained).read_full("layers.1.mlp.experts.3.down.weight"), started)
    expected = []
    for prompt in PROMPTS:
        ids = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        expected.append(ids[0, len(prompt) :].tolist())
    load = {"load": str(trained), "precision": "fp32"}
    assert len({tuple(text) for text in expected}) == len(PROMPTS)
    assert ranks(1)(expert_runs.texts, load, PROMPTS, 60)[0] == expected
    for world_size, layout in LAYOUTS:
        assert ranks(world_size)(expert_runs.texts, {**load, **layout}, PROMPTS, 16)[0] == [
            text[:16] for text in expected
        ]


def test_experts_over_copies_of_the_model_cannot_generate(trained: Path, ranks: RankPools) -> None:
    options = {"load": str(trained), "expert_model_parallel_size": 2}
    with pytest.raises(AssertionError, match="several copies share experts"):
        ranks(2)(expert_runs.texts, options, PROMPTS, 1)


# ---------------------------------------------------------------------------------------------------------------------
# Adapters of PEFT


def with_adapters(kind: str, row: int, **options: Any) -> tuple[Any, Config, SequentialModel]:
    """transformers' model; ours with its weights and adapters of random numbers."""
    theirs = their_model(kind, ROWS[kind][row])
    plain = our_config(theirs)
    lora = LoraConfig(lora_rank=2, lora_alpha=3.0, **options)
    config = dataclasses.replace(plain, lora=lora)
    base = to_ours({name: p.detach() for name, p in theirs.named_parameters()}, plain)
    model = SequentialModel(build_layers(config, ParallelContext.single()))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            if name in base:
                parameter.copy_(shard_of(parameter).take(base[name], 0, 1))
            else:
                parameter.normal_(0.0, 0.3)
    return theirs, config, model


def adapters_of(model: SequentialModel) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in named_parameters(model) if "lora_" in name}


@pytest.mark.parametrize(("kind", "row"), [("mixtral", 1), ("qwen3_moe", 0), ("olmoe", 1)])
def test_adapters_of_experts_go_to_peft_and_back(kind: str, row: int, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    theirs, config, model = with_adapters(kind, row)
    weights = adapters_of(model)
    assert any(".experts.3." in name for name in weights)
    export_adapter(tmp_path, config, weights.items(), base_name=None)
    read = PeftSource(tmp_path, config)
    assert read.parameters.keys() == weights.keys()
    assert all(torch.equal(read.read_full(name), weights[name]) for name in weights)
    tokens = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(3))
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path).eval()
    expected, found = adapted(tokens, use_cache=False).logits, logits_of(model, tokens, ParallelContext.single())
    assert float((found.transpose(0, 1) - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("kind", "row", "options", "fault"),
    [
        ("granitemoe", 1, {}, "no names of single experts"),
        ("qwen3_moe", 1, {}, "layers without experts have an MLP of the same names"),
        ("mixtral", 0, {"lora_target_modules": ("w1", "w2")}, "some projections of some experts have none"),
        ("mixtral", 0, {"lora_rank_pattern": ("w2=4",)}, "they differ in rank or alpha"),
        ("olmoe", 0, {"use_dora": True}, "DoRA's magnitudes"),
    ],
)
def test_adapters_of_experts_that_peft_could_not_load_are_refused(
    kind: str, row: int, options: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    _, config, model = with_adapters(kind, row, **options)
    with pytest.raises(CheckpointError, match=fault):
        export_adapter(tmp_path, config, adapters_of(model).items(), base_name=None)


def test_pefts_adapters_of_fused_experts_are_refused_by_name(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    theirs = their_model("mixtral", ROWS["mistral"][0] | {"num_local_experts": 2})
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    options = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters)
    peft.get_peft_model(theirs, options).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"target_parameters.*not read here"):
        PeftSource(tmp_path, our_config(theirs))


# ---------------------------------------------------------------------------------------------------------------------
# Experts from a dense model

UPCYCLED = "--num-experts 4 --moe-router-topk 2 --micro-batch-size 2 --upcycle"
ON_RANKS = {
    1: "",
    2: "--expert-model-parallel-size 2",
    4: "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
}


def dense(kind: str, folder: Path) -> str:
    """Options of a dense model of transformers, written into a folder."""
    their_model(kind, {**ROWS[kind][1], "hidden_size": 48, "vocab_size": 250}).save_pretrained(folder)
    return expert_runs.flags_of(str(folder))


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("mistral", "mixtral"),
        pytest.param("qwen3", "qwen3_moe", marks=pytest.mark.slow),
        pytest.param("granite", "granitemoe", marks=pytest.mark.slow),
    ],
)
def test_an_upcycled_model_starts_as_the_dense_one(
    kind: str, architecture: str, ranks: RankPools, tmp_path: Path
) -> None:
    flags = dense(kind, tmp_path)
    tokens = np.random.default_rng(1).integers(0, 250, (2, 17))
    ((weights, expected),) = ranks(1)(expert_runs.started, f"{flags} --load {tmp_path} --micro-batch-size 2", tokens)
    flags = f"{flags} --load {tmp_path} {UPCYCLED} --architecture {architecture}"
    for world_size, layout in ON_RANKS.items():
        for found, logits in ranks(world_size)(expert_runs.started, f"{flags} {layout}", tokens):
            assert logits == pytest.approx(expected, rel=1e-5, abs=1e-5)
            experts = {name: value for name, value in found.items() if ".mlp.experts." in name}
            assert len(experts) == 3 * 2 * 4 // (world_size if world_size > 1 else 1)
            for name, value in experts.items():
                dense_name = re.sub(r"experts\.\d\.", "", name)
                assert np.array_equal(value, weights[dense_name]), name
            assert np.std(found["layers.1.mlp.router.weight"]) == pytest.approx(0.02, rel=0.2)


def test_a_checkpoint_of_a_run_is_upcycled_too(ranks: RankPools, tmp_path: Path) -> None:
    flags = dense("mistral", tmp_path / "theirs")
    assert set(ranks(2)(expert_runs.save, f"{flags} --micro-batch-size 2", str(tmp_path / "run"))) == {None}
    tokens = np.random.default_rng(1).integers(0, 250, (2, 17))
    flags += f" --load {tmp_path / 'run'} --micro-batch-size 2"
    ((_, expected),) = ranks(1)(expert_runs.started, flags, tokens)
    for _, logits in ranks(2)(expert_runs.started, f"{flags} {UPCYCLED} {ON_RANKS[2]}", tokens):
        assert logits == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ("--moe-ffn-hidden-size 28", "copies MLPs of width 56"),
        ("--moe-router-pre-softmax True", "add up to 1"),
        ("--moe-shared-expert-intermediate-size 8", "nothing to start shared experts from"),
        ("--architecture qwen3_moe", "layers of one structure"),
        ("--rotary-base 500", "differ in rotary_base=500.0 here, 10000.0 there"),
    ],
)
def test_a_model_that_would_not_start_as_the_dense_one_is_refused(
    changed: str, fault: str, ranks: RankPools, tmp_path: Path
) -> None:
    flags = f"{dense('mistral', tmp_path)} --load {tmp_path} {UPCYCLED} --architecture mixtral {changed}"
    with pytest.raises(AssertionError, match=fault):
        ranks(1)(expert_runs.started, flags, np.zeros((1, 2), np.int64))


# ---------------------------------------------------------------------------------------------------------------------
# DeepSeek-V3's routing


@pytest.mark.parametrize(("groups", "chosen", "topk", "scaling"), [(4, 2, 3, 2.5), (2, 1, 2, 1.0), (1, 1, 4, 1.5)])
def test_choices_within_groups_are_those_of_deepseek_v3(groups: int, chosen: int, topk: int, scaling: float) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = transformers.DeepseekV3Config(
        hidden_size=40, n_routed_experts=8, num_local_experts=8, num_experts_per_tok=topk, n_group=groups,
        topk_group=chosen, routed_scaling_factor=scaling, norm_topk_prob=True,
    )  # fmt: skip
    options = Config(
        model=ModelConfig(
            architecture="llama", position_embedding_type="rope", hidden_size=40, num_layers=1, num_experts=8,
            moe_router_topk=topk, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
            moe_router_num_groups=groups, moe_router_group_topk=chosen, moe_router_topk_scaling_factor=scaling,
        )
    )  # fmt: skip
    assert not list(check_model(options))
    with in_float64():
        theirs = DeepseekV3TopkRouter(config)
        model = SequentialModel(build_layers(options, ParallelContext.single()))
        (ours,) = (module for module in model.modules() if isinstance(module, TokenRouter))
        torch.manual_seed(2)
        with torch.no_grad():
            ours.weight.copy_(theirs.weight.normal_())
            assert ours.bias is not None
            ours.bias.copy_(theirs.e_score_correction_bias.normal_(0.0, 0.2))
        tokens = torch.randn(50, 40)
        logits, weights, experts = theirs(tokens)
        found = ours(tokens[:, None], in_training=False)
        order, expected = found.experts_SBK[:, 0].sort(-1), experts.sort(-1)
        assert torch.equal(order.values, expected.values)
        assert torch.equal(found.logits_SBE[:, 0], logits)
        gaps = found.weights_SBK[:, 0].gather(-1, order.indices) - weights.gather(-1, expected.indices)
        assert float(gaps.detach().abs().max()) < 1e-12
