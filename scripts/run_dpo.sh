#!/usr/bin/env bash
# Train a Hugging Face model on preferences (DPO): tokenize pairs of answers, train adapters, and export them.
#
#   HL_MODEL=models/llama HL_DATA=pairs.jsonl scripts/run_dpo.sh
#   HL_MODEL=models/llama HL_DATA=pairs.jsonl HL_BETA=0.2 HL_TP=2 HL_PP=2 HL_DP=2 scripts/run_dpo.sh --lr 1e-5
#   HL_DRY_RUN=1 ...                  prints the plan and starts nothing
#
# Arguments are flags of megatron.train, and override the variables. All variables: docs/reference/variables.md; formats and
# objectives: docs/guides/preference.md.
# Wrong or unknown variables, layouts, hostsfiles and folders are reported together, before anything starts.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# The recipe is megatron/presets/dpo_llama.yaml: HL_NUM_EPOCHS 1, HL_GBS 64, HL_SEQ_LEN 1023 (longer answers are cut),
# HL_MAX_PROMPT_LEN half of HL_SEQ_LEN + 1, HL_MAX_BATCH_LEN 8192, HL_BETA 0.1, HL_LR 2e-5, HL_LORA_RANK 8. Without
# adapters take HL_LORA_RANK=none HL_LR=5e-7. The model's options come from HL_MODEL.

# Layout: HL_DP x HL_TP x HL_CP x HL_PP = HL_NUM_NODES x HL_DEVICES_PER_NODE (8; on the CPU of this machine what it needs)
export HL_NUM_NODES="${HL_NUM_NODES:-1}"
export HL_TP="${HL_TP:-1}"
export HL_PP="${HL_PP:-1}"

# Results: HL_RESULTS_DIR, or a new folder named after the run in HL_RESULTS_DIR_PREFIX/out. In it are data/ (the
# tokenized pairs), checkpoints/ and hf_format/ (the exports).
export HL_RESULTS_DIR_PREFIX="${HL_RESULTS_DIR_PREFIX:-.}"
export HL_SAVE="${HL_SAVE:-1}"

start launch --variables dpo -- "$@"
