"""Long texts of every model, with and without adapters, are those of transformers on every layout.

Log-probabilities stand for the logits: equal ones are equal logits, but for a number added to all of a token's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.generation.stages import Forms, texts_by_form
from tests.generation.test_generator import LENGTHS, OPTIONS, POSITIONS, greedy, their_model
from tests.generation.test_loading import write_adapter
from tests.models.test_hf_logits import VOCABULARY
from tests.ranks import RankPools

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

NUM_NEW = 200
NAMES = ["gpt2", "bloom_12_heads", "llama_mha", "llama_gqa", "llama_3.1"]
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "TP4": (4, {"tensor_model_parallel_size": 4}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2 TP2": (4, {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
    "DP2": (2, {}),
}
BASE_FORMS, ADAPTED_FORMS = ("whole", "off"), ("beside", "merged")


@dataclass(frozen=True)
class Reference:
    """A model and adapters on all its linear layers, and transformers' greedy texts without and with them."""

    base: Path
    adapter: Path
    prompts: list[list[int]]
    options: dict[str, Any]
    base_texts: list[list[int]]
    adapted_texts: list[list[int]]


def add_adapters(model: Any, folder: Path) -> None:
    """Add scale * B A to the weights of a model of transformers."""
    found = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, down in found.items():
            if ".lora_A." in name:
                place = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                update = 2.0 * found[name.replace("lora_A", "lora_B")] @ down
                module = model.get_submodule(place)
                module.weight.add_(update.t() if type(module).__name__ == "Conv1D" else update)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def get(name: str) -> Reference:
        folder = tmp_path_factory.mktemp(name.replace(".", "_"))
        model, generator = their_model(name), torch.Generator().manual_seed(8)
        model.save_pretrained(folder / "base")
        (folder / "adapter").mkdir()
        adapter = write_adapter(folder / "base", folder / "adapter", ("all-linear",))
        prompts = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
        base_texts = [greedy(model, prompt, NUM_NEW) for prompt in prompts]
        adapted = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
        adapted.generation_config = model.generation_config
        add_adapters(adapted, adapter)
        adapted_texts = [greedy(adapted, prompt, NUM_NEW) for prompt in prompts]
        options = {"max_new_tokens": NUM_NEW, **OPTIONS.get(model.config.model_type, {})}
        return Reference(folder / "base", adapter, prompts, options, base_texts, adapted_texts)

    return get


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_long_texts_are_those_of_transformers(references: Any, ranks: RankPools, name: str, layout: str) -> None:
    """A batch of three rows for five prompts: rows are used again, beside longer texts."""
    theirs: Reference = references(name)
    assert max(LENGTHS) + NUM_NEW < POSITIONS
    world_size, options = LAYOUTS[layout]
    results: list[Forms] = ranks(world_size)(
        texts_by_form, str(theirs.base), str(theirs.adapter), options, theirs.prompts, theirs.options
    )
    texts = [*theirs.base_texts, *theirs.adapted_texts]
    assert len({tuple(text) for text in texts}) == len(texts)
    for form in (*BASE_FORMS, *ADAPTED_FORMS):
        expected = theirs.base_texts if form in BASE_FORMS else theirs.adapted_texts
        ids, cached, _ = results[0][form]
        assert ids == expected, form
        for _, _, uncached in (each[form] for each in results[-options.get("tensor_model_parallel_size", 1) :]):
            for one, other in zip(cached, uncached, strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max(), err_msg=form)


@pytest.mark.parametrize("name", NAMES)
def test_the_references_are_pefts(references: Any, name: str) -> None:
    peft: Any = pytest.importorskip("peft")
    theirs: Reference = references(name)
    base = transformers.AutoModelForCausalLM.from_pretrained(theirs.base, dtype=torch.float32).eval()
    model = peft.PeftModel.from_pretrained(base, theirs.adapter).eval()
    model.generation_config = base.generation_config = their_model(name).generation_config
    assert [greedy(model, prompt, NUM_NEW) for prompt in theirs.prompts] == theirs.adapted_texts
    with model.disable_adapter():
        assert [greedy(model, prompt, NUM_NEW) for prompt in theirs.prompts] == theirs.base_texts
