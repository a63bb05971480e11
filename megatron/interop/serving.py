"""Rules by which vLLM serves adapters in PEFT's format: those of its vllm/lora/peft_helper.py and lora_model.py.

vllm-gaudi is a plug-in of vLLM with the same loaders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.command_names import command_name

WITH_ADAPTERS = ("llama",)
"""Our families whose class in vLLM has the interface SupportsLoRA; those of Bloom and GPT-2 do not."""
MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank."""


def not_served(content: Mapping[str, Any], architecture: str) -> list[str]:
    """Return what vLLM does not take of adapters; none: it serves them.

    Args:
        content: adapter_config.json.
        architecture: our family of the base.
    """
    found = []
    if architecture not in WITH_ADAPTERS:
        found.append(f"adapters of architecture={architecture}")
    if content.get("use_dora"):
        found.append("DoRA")
    if content.get("modules_to_save"):
        found.append(f"modules_to_save ({', '.join(content['modules_to_save'])})")
    if content.get("bias", "none") != "none":
        found.append(f"trained biases (bias={content['bias']})")
    patterns = [name for name in ("rank_pattern", "alpha_pattern") if content.get(name)]
    if patterns:  # read by no line of vLLM's: it would scale each module alike, and say nothing
        found.append(f"ranks or scales of single modules ({', '.join(patterns)})")
    if content["r"] > MAX_RANKS[-1]:
        found.append(f"ranks above {MAX_RANKS[-1]} (r={content['r']})")
    return found


def served(content: Mapping[str, Any], architecture: str) -> str:
    """Return a line that says how vLLM serves adapters, or what to do where it does not. Arguments of `not_served`."""
    if refused := not_served(content, architecture):
        return f"vLLM does not serve {', '.join(refused)}: for it, merge them with {command_name('merge_adapter')}"
    rank = next(limit for limit in MAX_RANKS if limit >= content["r"])
    return f"vLLM serves these adapters with --enable-lora --max-lora-rank {rank}"
