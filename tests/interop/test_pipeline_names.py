"""Our names and DeepSpeed's, both ways, are those of the modules that DeepSpeed saves."""

from __future__ import annotations

import pytest

from megatron.config.command_line import from_dict
from megatron.interop.pipeline_names import our_names, pipeline_names
from megatron.models.sequential import SequentialModel, build_layers
from megatron.parallel.context import ParallelContext


@pytest.mark.parametrize("num_layers", [1, 2, 11])
@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["bloom", "llama"])
def test_names_are_those_of_the_modules(family: str, untied: bool, num_layers: int) -> None:
    options = {"architecture": family, "num_layers": num_layers, "untie_embeddings_and_output_weights": untied}
    config = from_dict({"model": {**options, "embed_layernorm": family == "bloom", "hidden_size": 16}})
    model = SequentialModel(build_layers(config, ParallelContext.single()))
    expected = {parameter.full_name: name for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
    assert pipeline_names(expected) == expected
    assert our_names(expected.values()) == {theirs: ours for ours, theirs in expected.items()}
