"""A command of optimum-habana's run_generation.py as flags of megatron.generate.

Where the script leaves a choice to the model's generation_config.json, that counts here too.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.checkpoint.folders import CheckpointError
from megatron.options.config import ConfigError
from megatron.weights.folder_files import own_file, read_json
from megatron.weights.model_folder import find_model

OF_MODEL = ("temperature", "top_p", "repetition_penalty")
"""Keys of generation_config.json that the script leaves as they are."""


@dataclass
class GenerationRequest:
    """Words of megatron.generate, with notes and faults."""

    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def generation_request(
    given: Mapping[str, str],
    defaults: Mapping[str, str],
    *,
    from_variables: Sequence[str],
    ranks: int,
    environment: Mapping[str, str],
) -> GenerationRequest:
    """Return the flags for the settings of a command.

    `given`, `defaults`: values by name of a setting; `from_variables`: flags that HL_* variables set, which defaults
    leave alone.
    """
    request = GenerationRequest()
    values = {**defaults, **given}
    # by this variable optimum-habana's script runs a model in fp8
    if environment.get("QUANT_CONFIG"):
        request.faults.append(
            f"QUANT_CONFIG={environment['QUANT_CONFIG']} is not supported: text is generated in 16 bits; unset it, "
            "or use --quantize_with_bnb"
        )
    # generation_config.json is the base's: a folder of adapters has none
    base = values.pop("--lora-base", values.get("--load"))
    if "adapter" in values:
        values |= {"--load": values.pop("adapter"), "--lora-base": base or ""}
    samples = values.pop("sample") == "true"
    _choose_tokens(values, given, _configured(base), request, samples=samples)
    in_bf16 = values.pop("bf16") == "true" or ranks > 1  # on several ranks the script does so in any case
    values["--precision"] = "bf16" if in_bf16 else "fp32"
    if values.pop("nf4", "false") == "true":
        values["--quantize-base"] = "nf4"
    prompts = shlex.split(values.pop("prompts", ""))
    for name, value in values.items():
        # an HL_* variable is the user's word, which a default of the script must not override
        is_given = name in given or name == "--lora-base"
        if is_given or name not in from_variables:
            request.flags += [name, value]
    if not prompts:
        request.faults.append("--prompt is not given; give at least a text in quotes, which is not the script's own")
        return request
    request.flags += ["--prompt", *prompts]
    # else both do the same
    if str(len(prompts)) != values["--batch-size"]:
        request.notes.append(
            f"all {len(prompts)} prompts are continued, where run_generation.py cuts or repeats them to --batch_size "
            f"{values['--batch-size']}"
        )
    return request


def _choose_tokens(
    values: dict[str, str],
    given: Mapping[str, str],
    configured: Mapping[str, object],
    request: GenerationRequest,
    *,
    samples: bool,
) -> None:
    """Set how a token is chosen: drawn with --do_sample alone, and by what the model's own configuration says."""
    # 1 leaves the probabilities as they are, with each of the three
    used = {key: configured[key] for key in OF_MODEL if configured.get(key) not in (None, 1, 1.0)}
    if "repetition_penalty" in used:
        values["--repetition-penalty"] = str(used["repetition_penalty"])
    if samples:
        values.setdefault("--temperature", str(configured.get("temperature") or 1.0))
        values.setdefault("--top-p", str(configured.get("top_p") or 1.0))
        # here 0 is the most probable token; transformers refuses to draw at it
        if values["--temperature"] in ("0", "0.0"):
            request.faults.append("--temperature=0 must be above 0 with --do_sample; leave --do_sample out")
    else:
        # the penalty changes the most probable token too
        used = {key: value for key, value in used.items() if key == "repetition_penalty"}
        for name in ("--temperature", "--top-p", "--top-k"):
            if values.pop(name, None) is not None:
                request.notes.append(
                    f"--{name[2:].replace('-', '_')} {given[name]} has no effect without --do_sample: the most "
                    "probable token is taken"
                )
    if used:
        texts = " and ".join(f"{key} {value}" for key, value in used.items())
        request.notes.append(f"{texts}: from the model's generation_config.json, unless a flag says otherwise")


def _configured(model: str | None) -> Mapping[str, object]:
    """Return the model's generation_config.json; {} without one, or where it cannot be read, which loading reports."""
    with contextlib.suppress(CheckpointError, ConfigError, OSError):
        content = read_json(own_file(find_model(model or "", "--model_name_or_path"), "generation_config.json"))
        return content if isinstance(content, dict) else {}
    return {}
