"""Flags of optimum-habana's run_generation.py, and what becomes of each here: flags of megatron.generate.

The table has the published script's flags and no others, with its defaults. Where the script leaves a choice to the
model's generation_config.json, that counts here too.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.checkpoint.errors import CheckpointError
from megatron.launch.dialects.spawn_flags import FALSE, SpawnFlag, is_true
from megatron.options.config import ConfigError
from megatron.weights.folder_files import own_file, read_json
from megatron.weights.huggingface_config import find_model

QUANTISED = "weights that other tools have quantised are not read; use --quantize_with_bnb"
DATASETS = "only files are read; write the prompts to a .jsonl file, and use `tools/generate.py --input`"
PROFILER = "text is generated without a profiler; leave it out"
COMPILED = "text is generated without torch.compile"
OF_MODEL = ("temperature", "top_p", "repetition_penalty")
"""Keys of generation_config.json that the script leaves as they are."""


def _sets(name: str, target: str, more: str = "", default: str | None = None) -> SpawnFlag:
    return SpawnFlag(name, "sets", f"`{target}`{more}", settings=lambda value: [(target, value)], default=default)


def _switch(name: str, setting: str, text: str, default: str | None = None) -> SpawnFlag:
    def settings(value: str) -> list[tuple[str, str]]:
        return [(setting, str(is_true(value)).lower())]

    return SpawnFlag(name, "sets", text, "switch", settings, default)


def _honoured(text: str, *names: str) -> tuple[SpawnFlag, ...]:
    return tuple(SpawnFlag(name, "honoured", text, "switch") for name in names)


def _idle(text: str, *names: str) -> tuple[SpawnFlag, ...]:
    """Switches without effect."""
    return tuple(SpawnFlag(name, "no effect", text, "switch") for name in names)


def _idle_value(name: str, text: str) -> SpawnFlag:
    return SpawnFlag(name, "no effect", text)


def _refused(name: str, text: str, *accepts: str) -> SpawnFlag:
    return SpawnFlag(name, "refused", text, accepts=accepts)


def _refused_words(name: str, text: str) -> SpawnFlag:
    return SpawnFlag(name, "refused", text, "words")


def _refused_switches(text: str, *names: str) -> tuple[SpawnFlag, ...]:
    return tuple(SpawnFlag(name, "refused", text, "switch", accepts=FALSE) for name in names)


GENERATION: tuple[SpawnFlag, ...] = (
    _sets("--model_name_or_path", "--load", ": a folder, or the hub name of a downloaded model"),
    SpawnFlag(
        "--peft_model",
        "sets",
        "`--load`, with the model as `--lora-base`",
        settings=lambda value: [("adapter", value)],
    ),
    _sets("--device", "--device"),
    _switch(
        "--bf16", "bf16", "`--precision bf16`; left out: float32 on one rank, bfloat16 on several, as there", "False"
    ),
    SpawnFlag(
        "--prompt",
        "sets",
        "`--prompt`; the script's own sentences are not there",
        "texts",
        lambda text: [("prompts", text)],
    ),
    _sets("--max_new_tokens", "--max-new-tokens", default="100"),
    _sets("--batch_size", "--batch-size", "; the script cuts or repeats the prompts to as many, here all count", "1"),
    _switch("--do_sample", "sample", "draws; without it the most probable token or the beams are taken", "False"),
    _sets("--temperature", "--temperature", ", with `--do_sample`; left out, the model's, else 1"),
    _sets("--top_p", "--top-p", ", with `--do_sample`; left out, the model's, else 1"),
    _sets("--top_k", "--top-k", ", with `--do_sample`; left out: all tokens"),
    _sets("--num_beams", "--num-beams", default="1"),
    _sets("--num_return_sequences", "--num-samples", default="1"),
    _sets("--seed", "--seed", "; what is drawn differs", "27"),
    _switch("--ignore_eos", "--ignore-eos", "`--ignore-eos`; `--no-ignore_eos` stops at the end of a text", "True"),
    _switch("--use_hpu_graphs", "--use-graphs", "`--use-graphs`, on HPU; else no effect"),
    _switch("--use_chat_template", "--as-chat", "`--as-chat`: each prompt is a chat of its own, which is answered"),
    _switch("--quantize_with_bnb", "nf4", "`--quantize-base nf4`"),
    *_honoured("keys and values are always kept", "--use_kv_cache"),
    *_honoured("the cache is always allocated once and written in place", "--reuse_cache"),
    *_honoured("the logits of the last token alone are always computed", "--trim_logits"),
    *_honoured("lengths of the cache are always rounded up within a batch", "--bucket_internal"),
    *_honoured("attention never holds a matrix of all positions", "--use_flash_attention"),
    *_honoured("nothing is kept for a backward pass", "--flash_attention_recompute"),
    *_honoured("attention is always causal", "--flash_attention_causal_mask"),
    *_honoured("only the pass of a token is captured", "--limit_hpu_graphs"),
    *_honoured("the graphs are freed with the process", "--clear_hpu_graphs_cache"),
    *_honoured("shapes are always fixed within a batch", "--reduce_recompile"),
    SpawnFlag("--local_rank", "honoured", "the launcher numbers the ranks"),
    _idle_value("--warmup", "each text is generated once; `tools/generate.py --benchmark` measures"),
    _idle_value("--n_iterations", "each text is generated once; `tools/generate.py --benchmark` measures"),
    _idle_value("--bucket_size", "lengths are rounded up by a rule of this project"),
    _idle_value("--attn_implementation", "the device chooses the kernel of attention"),
    _idle_value("--attn_batch_split", "layers are not split by samples"),
    _idle_value("--decode_attn_batch_split", "layers are not split by samples"),
    _idle_value("--cache_size_limit", COMPILED),
    _idle_value("--const_serialization_path", "weights are read into the device"),
    *_idle("the device chooses the kernel of attention", "--use_flex_attention"),
    *_idle(
        "the softmax is computed in float32", "--attn_softmax_bf16", "--sdp_on_bf16", "--flash_attention_fast_softmax"
    ),
    *_idle("rank 0 prints, and errors name their rank", "--verbose_workers"),
    *_idle("the last line has the number of graphs", "--show_graphs_count"),
    *_idle("embeddings are part of the passes", "--input_embeds"),
    *_idle(COMPILED, "--torch_compile", "--regional_compile", "--force_static_compile"),
    *_idle(COMPILED, "--dynamo_specialize_float", "--dynamo_allow_unspec_int_on_nn_module"),
    _refused("--dataset_name", DATASETS),
    _refused("--mlcommons_dataset", DATASETS),
    _refused("--column_name", DATASETS),
    _refused("--dataset_max_samples", DATASETS, "-1"),
    *_refused_switches(DATASETS, "--run_partial_dataset"),
    *_refused_switches("nothing is downloaded; give the text as --prompt", "--book_source"),
    _refused("--output_dir", "use `-- --output FILE.jsonl` at the end of the command"),
    _refused("--penalty_alpha", "contrastive search is not part of this project"),
    _refused("--assistant_model", "speculative decoding is not part of this project"),
    _refused_words("--bad_words", "tokens cannot be forbidden; leave it out"),
    _refused_words("--force_words", "tokens cannot be required; leave it out"),
    _refused_words("--simulate_dyn_prompt", "prompts keep their lengths; leave it out"),
    _refused("--max_input_tokens", "prompts are read whole; shorten them", "0", "-1"),
    _refused("--parallel_strategy", "ranks share each layer; leave it out", "none", "tp"),
    _refused("--token", "nothing is downloaded; use `hf download`"),
    _refused("--model_revision", "nothing is downloaded; use `hf download --revision`", "main"),
    *_refused_switches(
        "code that comes with a model is never run; leave it out",
        "--trust_remote_code",
        "--trust_remote_code_tokenizer",
    ),
    _refused("--profiling_steps", PROFILER, "0"),
    _refused("--profiling_warmup_steps", PROFILER, "0"),
    *_refused_switches(PROFILER, "--profiling_record_shapes", "--profile_whole_sequences"),
    *_refused_switches("weights are kept in the device's memory; use more ranks", "--disk_offload"),
    *_refused_switches(QUANTISED, "--load_quantized_model_with_autogptq", "--load_quantized_model_with_autoawq"),
    *_refused_switches(QUANTISED, "--load_quantized_model_with_inc", "--save_quantized_model_with_inc", "--pt2e_save"),
    _refused("--local_quantized_inc_model_path", QUANTISED),
    _refused("--saved_model_path", QUANTISED, "inc_quantized_model"),
    _refused("--pt2e_path", QUANTISED),
    _refused("--pt2e_quant_dtype", QUANTISED, "fp8_143"),
)


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
    if environment.get("QUANT_CONFIG"):
        request.faults.append(
            f"QUANT_CONFIG={environment['QUANT_CONFIG']} is not supported: text is generated in 16 bits; unset it, "
            "or use --quantize_with_bnb"
        )
    base = values.pop("--lora-base", values.get("--load"))
    if "adapter" in values:
        values |= {"--load": values.pop("adapter"), "--lora-base": base or ""}
    samples = values.pop("sample") == "true"
    _choose_tokens(values, given, _configured(base), request, samples=samples)
    if values.pop("bf16") == "true" or ranks > 1:
        values["--precision"] = "bf16"
    else:
        values["--precision"] = "fp32"
    if values.pop("nf4", "false") == "true":
        values["--quantize-base"] = "nf4"
    prompts = shlex.split(values.pop("prompts", ""))
    if not prompts:
        request.faults.append("--prompt is not given; give at least a text in quotes, which is not the script's own")
    elif len(prompts) != int_of(values["--batch-size"]):
        request.notes.append(
            f"all {len(prompts)} prompts are continued, where run_generation.py cuts or repeats them to --batch_size "
            f"{values['--batch-size']}"
        )
    for name, value in values.items():
        is_default = name not in given and name != "--lora-base"
        if not (is_default and name in from_variables):
            request.flags += [name, value]
    request.flags += ["--prompt", *prompts] if prompts else []
    return request


def int_of(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _choose_tokens(
    values: dict[str, str],
    given: Mapping[str, str],
    configured: Mapping[str, object],
    request: GenerationRequest,
    *,
    samples: bool,
) -> None:
    """Set how a token is chosen: drawn with --do_sample alone, and by what the model's own configuration says."""
    if samples:
        values.setdefault("--temperature", str(configured.get("temperature") or 1.0))
        values.setdefault("--top-p", str(configured.get("top_p") or 1.0))
    for name in ("--temperature", "--top-p", "--top-k"):
        if samples and name == "--temperature" and values[name] in ("0", "0.0"):
            request.faults.append("--temperature=0 must be above 0 with --do_sample; leave --do_sample out")
        if not samples and values.pop(name, None) is not None:
            request.notes.append(
                f"--{name[2:].replace('-', '_')} {given[name]} has no effect without --do_sample: the most probable "
                "token is taken"
            )
    if configured.get("repetition_penalty") not in (None, 1, 1.0):
        values["--repetition-penalty"] = str(configured["repetition_penalty"])
    taken = [f"{key} {configured[key]}" for key in OF_MODEL if configured.get(key) not in (None, 1, 1.0)]
    used = [text for text in taken if samples or text.startswith("repetition")]
    if used:
        request.notes.append(
            f"{' and '.join(used)}: from the model's generation_config.json, unless a flag says otherwise"
        )


def _configured(model: str | None) -> Mapping[str, object]:
    """Return the model's generation_config.json; {} without one, or where it cannot be read, which loading reports."""
    with contextlib.suppress(CheckpointError, ConfigError, OSError):
        content = read_json(own_file(find_model(model or "", "--model_name_or_path"), "generation_config.json"))
        return content if isinstance(content, dict) else {}
    return {}
