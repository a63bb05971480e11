"""Folders of transformers and the logits that it computes of them: the reference of generation and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.test_hf_logits import CASES, VOCABULARY

transformers = pytest.importorskip("transformers")

__all__ = ["CASES", "LAYOUTS", "VOCABULARY", "their_logits", "write_folder"]

Array = np.ndarray[Any, Any]
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2 TP2": (4, {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
}


def their_logits(folder: Path | str, tokens_BS: Array) -> Array:
    """[S, B, V] float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens_BS), use_cache=False).logits.transpose(0, 1).numpy()  # type: ignore[no-any-return]


def write_folder(name: str, folder: Path) -> Path:
    """Write a model as transformers does, none of whose parameters is as it began."""
    torch.manual_seed(5)
    model = CASES[name]().theirs()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return folder
