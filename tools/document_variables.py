"""Print docs/reference/variables.md from the tables of the HL_* variables.

python tools/document_variables.py > docs/reference/variables.md

Names, meanings and flags are those of megatron/launch. Defaults stand here, since they are in scripts and presets;
tests/launch compares them with these.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.launch.dialects.hl_variables import REFUSED, VARIABLES
from megatron.options.dialect import Entry

HEADER = """# HL_* variables

<!-- Written by tools/document_variables.py from megatron/launch/: change the tables, not this page. -->

`scripts/run_*.sh`, `generate.sh` and `evaluate.sh` translate these into flags of `tools/launch.py` and
`megatron.train`. `--help variables` of a script lists its own, `--help HL_GBS` explains one.
Two that set one flag differently are an error.

- An empty variable counts as unset. An unknown variable is an error that names the most similar one.
- "preset" means that the preset (`megatron/presets/*.yaml`) holds the value and that the variable overrides it.
- Arguments of a script are flags of `megatron.train` ([configuration](configuration.md)) and override the variables.
- `HL_CONFIG`, or `--config`, selects another preset, or a YAML file. Then the script's defaults of the data, of
  `HL_RAMPUP_BS`, `HL_SEQ_PARALLEL` and `HL_OPTIMIZER` do not apply, and the variables of a version or size are refused.
  A preset `tiny_*` has a default layout of 1 x 1 x 1.
"""

NOTES = """
## Notes

- **Devices.** On a CPU the default of `HL_NGPU_PER_NODE` is what the layout needs: `HL_DEVICE=cpu HL_PP=2 HL_TP=2
  HL_DP=1` starts four ranks, each with its share of the cores (`OMP_NUM_THREADS`, unless you set it).
- **Tokenizer.** Pretraining needs one only for `--eod-mask-loss`, `--reset-position-ids` and
  `--reset-attention-mask`. If none is set, run_bloom13b.sh uses `gpt2-vocab.json` and `gpt2-merges.txt` in
  `HL_DATA_DIR_ROOT`, run_llama.sh `tokenizer.json`, if these exist. If only `HL_TOKENIZER_TYPE` is set, its file is
  looked for there: `tokenizer.json` for HFTokenizer and HuggingFaceTokenizer, `tokenizer.model` for the others.
  Llama3Tokenizer is `TikTokenizer` with `--tiktoken-pattern llama3`.
- **Lengths.** `HL_TRAIN_ITERS` replaces a preset's `train_samples`, `--train-samples` its `train_iters`, and a
  warm-up or decay given in one unit the preset's in the other; a note says so. Both on one command line are an error.
  `HL_SEQ_LEN` also sets the rows of BLOOM's position table. `HL_POSITION_EMBEDDING_TYPE=alibi` leaves out the preset's
  rotary options.
- **Ramp-up.** `HL_RAMPUP_BS=1` starts with a global batch of 16, micro batch x data-parallel size must divide it.
- **Results.** Without `HL_RESULTS_DIR` each run creates a new folder. To resume, set it, or `HL_CHECKPOINTS_DIR`.

## Other defaults than in Habana's scripts

A variable means here what it means in `pretrain_llama.sh` of HabanaAI/Megatron-LM 1.24. These defaults differ.
Presets of Llama 3.1 and 3.2 also scale the rotary positions, and that of 3.2 1B ties the embeddings, as the published
models do.

OTHER_DEFAULTS

## Unsupported variables

These of Habana's scripts are recognised. An accepted value requests nothing, or what this project does in its own way;
any other value is an error.

| Variable | Accepted | Why other values are an error |
|---|---|---|
"""

DEFAULTS: dict[str, dict[str, str | tuple[str, str]]] = {
    "Model and batch": {
        "HL_CONFIG": ("bloom_13b", "by version and size"),
        "HL_LLAMA_VER": ("—", "3.1"),
        "HL_LLAMA_MODEL_SIZE": ("—", "8"),
        "HL_NUM_LAYERS": ("preset: 40", "preset"),
        "HL_HIDDEN_SIZE": ("preset: 5120", "preset"),
        "HL_FFN_HIDDEN_SIZE": ("preset: 20480", "preset"),
        "HL_NUM_HEADS": ("preset: 32", "preset"),
        "HL_NUM_QUERY_GROUPS": ("as HL_NUM_HEADS", "preset"),
        "HL_SEQ_LEN": ("preset: 2048", "preset: 2048, 4096, 8192"),
        "HL_POSITION_EMBEDDING_TYPE": ("preset: learned", "preset: rotary"),
        "HL_DROPOUT": ("preset: 0.1", "preset: 0"),
        "HL_MICRO_BATCH": "preset: 1",
        "HL_GBS": ("preset: 1024", "preset: 2048, Llama 2 and 3.2 1B: 1024"),
        "HL_RAMPUP_BS": ("1", "0"),
        "HL_TRAIN_ITERS": ("preset: 300,000,000 samples", "preset"),
        "HL_LR_WARMUP_ITERS": ("preset: 216,320 samples", "preset"),
        "HL_EXIT_INTERVAL": "0",
        "HL_KILL_SWITCH": "",
        "HL_KILL_SWITCH_FILE": "",
    },
    "Layout, restarts and devices": {
        "HL_NUM_NODES": "1",
        "HL_NGPU_PER_NODE": "8; on a CPU what the layout needs",
        "HL_DEVICES_PER_NODE": "8; on a CPU what the layout needs",
        "HL_DP": "2",
        "HL_TP": ("4", "2"),
        "HL_CP": "1",
        "HL_CP_COMM_TYPE": "what sends less",
        "HL_PP": ("1", "2"),
        "HL_SEQ_PARALLEL": ("0", "1"),
        "HL_ZERO_STAGE": "0",
        "HL_NO_PIPELINE_PARALLEL": "0",
        "HL_HOSTSFILE": "",
        "HL_RENDEZVOUS": "",
        "HL_LAUNCHER_TYPE": "pdsh",
        "HL_PE": "0",
        "HL_PPR": "0",
        "HL_MAX_RESTARTS": "0",
        "HL_MIN_NODES": "all nodes",
        "HL_SPARE_HOSTS": "0",
        "HL_DOCTOR": "0",
        "HL_DEVICE": "first available",
        "HL_USE_HPU": "first available",
        "HL_QNPU_DIR": "",
        "HL_ENV_FLAGS": "",
        "HL_HNIC": "0",
        "HL_HCCL_OVER_OFI": "1",
        "HL_HCCL_GAUDI_DIRECT": "1",
        "HL_FI_PROVIDER": "verbs",
    },
    "Optimizer, memory, speed": {
        "HL_OPTIMIZER": ("preset: adamw", "fusedadamw"),
        "HL_GRAD_ACCUM_DTYPE": "fp32",
        "HL_CKP_ACT": "0",
        "HL_USE_FUSED_SDPA": "1",
        "HL_USE_FUSED_SDPA_WITH_RECOMPUTE": "1",
        "HL_USE_FAST_SOFTMAX": "0",
        "HL_USE_FUSED_RMSNORM": "1",
        "HL_USE_TORCH_COMPILE": "see modes",
        "HL_TORCH_COMPILE_DISABLE": "0",
        "HL_USE_LAZY_MODE": "1 on HPU",
        "HL_BF16": "preset: 1",
        "HL_FP8": "0",
        "HL_USE_TRANSFORMER_ENGINE": "0",
        "HL_TRANSFORMER_IMPL": "transformer_engine",
        "HL_FP8_FORMAT": "hybrid",
        "HL_FP8_MARGIN": "0",
        "HL_FP8_MEASURE_INTERVAL": "those of a global batch",
        "HL_FP8_AMAX_HISTORY_LEN": "a sixteenth of them",
        "HL_FP8_AMAX_COMPUTE_ALGO": "max",
        "HL_FP8_AMAX_RECOMPUTE_ALGO": "max",
        "HL_FP8_AMAX_REDUCE": "1",
        "HL_FP8_COVERAGE": "mlp_row_parallel=True",
        "HL_FP8_SMOOTH_SWIGLU": "1",
        "HL_CACHE_FP8_WEIGHT": "1",
        "HL_USE_CACHE_FP8_WEIGHT": "1",
        "HL_CACHE_FP8_WEIGHT_FWD": "1",
        "HL_USE_CACHE_FP8_WEIGHT_FWD": "1",
        "HL_FP8_ENFORCE_BF16_AMAX_REDUCTION": "1",
        "HL_TE_LIMIT_GRAPH_SIZE": "0",
        "HL_DETERMINISTIC_MODE": "0",
        "HL_USE_DISTRIBUTED_OPTIMIZER": "0",
        "HL_DIST_OPTIMIZER": "0",
    },
    "Data, logs and results": {
        "HL_DATA_DIR_ROOT": ("/data/bigscience/oscar-en", "/data/datasets/red_pajama"),
        "HL_DATA_FILE_PREFIX": ("meg-gpt2_text_document", "redpajama"),
        "HL_DATA_IDX_DIR": "cache/ beside the data",
        "HL_DATA_CACHE_DIR": "cache/ beside the data",
        "HL_CACHE_PATH": "cache/ beside the data",
        "HL_TOKENIZER_TYPE": "see Tokenizer",
        "HL_TOKENIZER_MODEL": "see Tokenizer",
        "HL_NUM_WORKERS": "1",
        "HL_EARLY_STOPPING_PATIENCE": "",
        "HL_GENERATE_PROMPTS": "",
        "HL_GENERATE_INTERVAL": "each validation",
        "HL_LM_EVAL_TASKS": "",
        "HL_LM_EVAL_INTERVAL": "each validation",
        "HL_KEEP_BEST": "0",
        "HL_EVAL_ITERS": ("preset: 5", "preset: 100"),
        "HL_EVAL_INTERVAL": ("preset: 100", "preset: 1000"),
        "HL_RESULTS_DIR": "",
        "HL_RESULTS_DIR_PREFIX": ".",
        "HL_CHECKPOINTS_DIR": "",
        "HL_TENSORBOARD_DIR": "",
        "HL_SAVE": "1",
        "HL_SAVE_INTERVAL": "preset: 2000",
        "HL_UNIV_CP": "0",
        "HL_CHECKPOINT_LOAD_TAG": "the newest",
        "HL_LOAD_DIR": "HL_CHECKPOINTS_DIR",
        "HL_NO_LOAD_OPTIM": "0",
        "HL_NO_LOAD_RNG": "0",
        "HL_OVERRIDE_OPT_PARAM_SCHEDULER": "0",
        "HL_USE_CKPT_OPT_PARAM_SCHEDULER": "0",
        "HL_SKIP_TRAIN": "0",
        "HL_VERIFY_CP": "0",
        "HL_VERIFY_CKPT": "0",
        "HL_LOG_INTERVAL": "10",
        "HL_PROFILE": "",
        "HL_PROFILE_TYPE": "",
        "HL_PROFILE_STEPS": "3,4",
        "HL_PROFILE_STEP_START": "3",
        "HL_PROFILE_STEP_END": "4",
        "HL_PROFILE_RANKS": "0",
        "HL_DRY_RUN": "0",
    },
    "Experts": {
        "HL_MIXTRAL_MODEL": "8x7b",
        "HL_MOE_NUM_EXPERTS": "preset: 8",
        "HL_MOE_TOPK": "preset: 2",
        "HL_MOE_ROUTER_PRE_SOFTMAX": "preset: 0",
        "HL_MOE_EP": "as many as fit",
        "HL_EP": "as many as fit",
        "HL_ETP": "0",
        "HL_MOE_ENABLE_EXPERT_TP": "1",
        "HL_MOE_AUX_LOSS_COEFF": "2e-2",
        "HL_AUX_LOSS_COEFF": "2e-2",
        "HL_MOE_ZLOSS_COEFF": "",
        "HL_MOE_EXPERT_CAPACITY_FACTOR": "",
        "HL_MOE_DYNAMIC": "0",
    },
    "Fine-tuning, adapters and preferences": {
        "HL_MODEL": "",
        "HL_DATA": "",
        "HL_DATA_OUTPUT_DIR": "data/ in the results folder",
        "HL_CHAT_TEMPLATE": "the tokenizer's own",
        "HL_TRAIN_ON": "assistant",
        "HL_TOO_LONG": "drop",
        "HL_IGNORE_COLUMNS": "",
        "HL_NUM_EPOCHS": "preset: 3",
        "HL_MAX_BATCH_LEN": "preset: 16384",
        "HL_LR": "preset: 2e-5",
        "HL_NEFTUNE_NOISE_ALPHA": "",
        "HL_BUCKETING": "preset: auto",
        "HL_SAVE_HF": "hf_format/ in the results folder",
        "HL_SAVE_SAMPLES": "",
        "HL_LORA_RANK": "",
        "HL_LORA_ALPHA": "preset: 32",
        "HL_LORA_DROPOUT": "preset: 0.05",
        "HL_LORA_TARGET_MODULES": "preset: all-linear",
        "HL_LORA_MODULES_TO_SAVE": "",
        "HL_QUANTIZE_BASE": "none",
        "HL_PREFERENCE_LOSS": "preset: sigmoid",
        "HL_BETA": "preset: 0.1",
        "HL_REFERENCE": "auto",
        "HL_MAX_PROMPT_LEN": "preset: half",
    },
    "Generation and evaluation": {
        "HL_PROMPTS": "",
        "HL_OUTPUT": "",
        "HL_BATCH_SIZE": "",
        "HL_MAX_NEW_TOKENS": "",
        "HL_TASKS": "",
        "HL_TASK_PATH": "",
        "HL_DATASETS": "",
        "HL_NUM_FEWSHOT": "",
    },
}
"""Default of each variable by section: of run_bloom13b.sh and run_llama.sh, or of all that take it."""

HABANAS = {
    "HL_LAUNCHER_TYPE": ("mpirun", "one node needs no Open MPI"),
    "HL_CP_COMM_TYPE": ("p2p", "all-to-all may send less"),
    "HL_USE_FUSED_SDPA_WITH_RECOMPUTE": ("0", "the default of FusedSDPA, which keeps no probabilities"),
    "HL_USE_FAST_SOFTMAX": ("1", "the exact softmax"),
    "HL_DETERMINISTIC_MODE": ("1", "its operators are slower"),
    "HL_VERIFY_CKPT": ("1", "it compares all copies before each save"),
    "HL_NUM_WORKERS": ("2", "threads, not processes"),
    "HL_USE_DISTRIBUTED_OPTIMIZER": ("1", "bf16 always shards the optimizer's state"),
    "HL_CACHE_FP8_WEIGHT": ("1, Llama 3.1 8B: 0", "one default for all"),
    "HL_CACHE_FP8_WEIGHT_FWD": ("1, Llama 3.1 8B: 0", "one default for all"),
    "HL_TE_LIMIT_GRAPH_SIZE": ("0, Llama 3.1 8B on DP 8: 1", "one default for all"),
    "HL_FP8_COVERAGE": ("mlp_row_parallel=True attention=1", "attention stays in bf16"),
    "HL_TOKENIZER_TYPE": ("GPTSentencePieceTokenizer, Llama 3: HuggingFaceTokenizer", "found there"),
    "HL_TOKENIZER_MODEL": ("tokenizer.model in the folder of the data", "found in the folder of the data"),
}
"""Defaults of pretrain_llama.sh that differ from those of run_llama.sh, and why."""

TEXTS = {
    "Experts": """\
[Experts](../guides/experts.md). The first four are run_mixtral.sh's; run_sft.sh and run_dpo.sh take the others,
generate.sh and evaluate.sh those of the ranks. Further defaults of run_mixtral.sh: `HL_TP` 8, `HL_DP` and `HL_PP` 1,
`HL_SEQ_LEN` 32768 (small: 256), `HL_GBS` 4,194,304 tokens, `HL_TRAIN_ITERS` 250000, `HL_DATA_DIR_ROOT`
/data/datasets/red_pajama, `HL_DATA_FILE_PREFIX` medium, and otherwise those of run_llama.sh. They are those of
`pretrain_mixtral.sh` of HabanaAI/Megatron-LM 1.24 but for `HL_MOE_ROUTER_PRE_SOFTMAX`, there 1, which is not the
published model's router, `HL_MOE_NUM_CAPACITY_BINS`, there 10, and `HL_MOE_EP`, there as many ranks as experts.""",
    "Fine-tuning, adapters and preferences": """\
run_sft.sh and run_dpo.sh take these and those above, except the ones for Llama's version and size, a dataset, a
tokenizer, a ramp-up or the model's shape. All training scripts take those of adapters (`HL_LORA_RANK`
to `HL_QUANTIZE_BASE`); pretraining needs the base in `HL_LOAD_DIR`. The default layout is data parallel over
all devices.

| script | preset | batch | sample | other defaults |
|---|---|---|---|---|
| run_sft.sh | [sft_llama](../../megatron/presets/sft_llama.yaml) | 128 | 4096 | as below |
| with `HL_LORA_RANK` | [lora_llama](../../megatron/presets/lora_llama.yaml) | 32 | 4096 | `HL_LR` 2e-4 |
| run_dpo.sh | [dpo_llama](../../megatron/presets/dpo_llama.yaml), rank 8 | 64 | 1023 | one epoch, rows of 8192 |

For the whole model, run_dpo.sh takes `HL_LORA_RANK=none` and a rate such as `HL_LR=5e-7`.""",
    "Generation and evaluation": """\
generate.sh and evaluate.sh take these, those of the layout and the device, `HL_MODEL` (which may be a run's
checkpoints), `HL_CHAT_TEMPLATE`, `HL_CHECKPOINT_LOAD_TAG`, `HL_QUANTIZE_BASE`, `HL_BF16`, `HL_TOKENIZER_TYPE`,
`HL_TOKENIZER_MODEL` and `HL_DRY_RUN`. The default layout is one rank. `HL_PROMPTS` and `HL_MAX_NEW_TOKENS` are
generate.sh's, `HL_TASKS` to `HL_NUM_FEWSHOT` evaluate.sh's.""",
}

OTHER_NAMES = ("the same, by its later name", "the same, by its earlier name")


def table(section: str, defaults: dict[str, str | tuple[str, str]]) -> list[str]:
    """Return the lines of a section's table; a variable with two names has one row."""
    variables = {variable.name: variable for variable in VARIABLES}
    rows: list[tuple[list[str], Entry]] = []
    for name in defaults:
        if variables[name].text in OTHER_NAMES:
            rows[-1][0].append(name)
        else:
            rows.append(([name], variables[name]))
    is_pretraining = any(isinstance(default, tuple) for default in defaults.values())
    head = ["Variable", *(["run_bloom13b.sh", "run_llama.sh"] if is_pretraining else ["Default"]), "Meaning", "Flag"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for names, variable in rows:
        default = defaults[names[0]]
        both = default if isinstance(default, tuple) else (default, default)
        cells = [", ".join(f"`{name}`" for name in names), *(both if is_pretraining else both[:1])]
        meaning = variable.text.replace("|", "&#124;")
        lines.append(f"| {' | '.join([*cells, meaning, ' '.join(f'`{flag}`' for flag in variable.flags)])} |")
    return lines


def other_defaults() -> list[str]:
    """Return the lines of the table of defaults that differ from Habana's."""
    ours = {name: default for defaults in DEFAULTS.values() for name, default in defaults.items()}
    lines = ["| Variable | pretrain_llama.sh | run_llama.sh | why |", "|---|---|---|---|"]
    for name, (theirs, why) in HABANAS.items():
        default = ours[name]
        lines.append(f"| `{name}` | {theirs} | {default if isinstance(default, str) else default[1]} | {why} |")
    return lines


def document() -> str:
    """Return the whole page."""
    parts = [HEADER]
    for section, defaults in DEFAULTS.items():
        text = [TEXTS[section], ""] if section in TEXTS else []
        parts += [f"## {section}", "", *text, *table(section, defaults), ""]
    answers: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for entry in REFUSED:
        answers.setdefault((entry.accepts, entry.text), []).append(f"`{entry.name}`")
    refused = [
        f"| {', '.join(names)} | {' '.join(f'`{value}`' for value in accepted) or 'unset'} | {reason} |"
        for (accepted, reason), names in answers.items()
    ]
    notes = NOTES.replace("OTHER_DEFAULTS", "\n".join(other_defaults()))
    return "\n".join(parts).rstrip("\n") + "\n" + notes + "\n".join(refused) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
