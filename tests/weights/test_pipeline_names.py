"""Our names and DeepSpeed's, both ways, are those of the modules that DeepSpeed saves."""

from __future__ import annotations

import pytest

from megatron.models.sequential import SequentialModel, build_layers
from megatron.options.stored import from_dict
from megatron.parallel.context import ParallelContext
from megatron.weights.deepspeed.origins import PipelineNames, current


@pytest.mark.parametrize("num_layers", [1, 2, 11])
@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["bloom", "llama"])
def test_names_are_those_of_the_modules(family: str, untied: bool, num_layers: int) -> None:
    options = {"architecture": family, "num_layers": num_layers, "untie_embeddings_and_output_weights": untied}
    config = from_dict({"model": {**options, "embed_layernorm": family == "bloom", "hidden_size": 16}})
    model = SequentialModel(build_layers(config, ParallelContext.single()))
    expected = {parameter.full_name: name for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
    several = [
        PipelineNames.of_config(config),
        PipelineNames.of_ours(expected),
        PipelineNames.of_theirs(expected.values()),
    ]
    for names in several:
        assert {ours: names.theirs(ours) for ours in expected} == expected
        assert {names.ours(theirs): theirs for theirs in expected.values()} == expected


def test_a_family_with_other_layers_is_numbered_by_its_declaration() -> None:
    names = PipelineNames(["stem", "stem.extra", "layers.0", "head"])
    assert [names.theirs(name) for name in ("stem.weight", "stem.extra.bias", "layers.0.up.weight", "head.weight")] == [
        "0.weight",
        "1.bias",
        "2.up.weight",
        "3.weight",
    ]
    assert names.ours("1.bias") == "stem.extra.bias"
    assert names.ours("7.weight") == "7.weight"


def test_names_of_the_first_release_are_recognised() -> None:
    first = ["tied_modules.word_embedding.weight", "1.positions", "1.norm.bias", "2.mlp_norm.bias", "14.norm.weight"]
    assert [current(name) for name in first] == [
        "tied_modules.embedding_word.weight",
        "1.position.weight",
        "1.norm.bias",
        "2.mlp_norm.bias",
        "14.weight",
    ]
