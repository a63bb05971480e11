#!/usr/bin/env bash
# Fine-tune a Hugging Face model on chats: tokenize them, train, and export Hugging Face folders.
#
#   HL_MODEL=models/llama HL_DATA=chats.jsonl scripts/run_sft.sh
#   HL_MODEL=models/llama HL_DATA=chats.jsonl HL_NUM_EPOCHS=1 HL_TP=2 HL_PP=2 HL_DP=2 scripts/run_sft.sh --lr 1e-5
#   HL_DRY_RUN=1 ...                  prints the plan and starts nothing
#
# Arguments are flags of megatron.train, and override the variables. All variables: docs/reference/variables.md.
# Wrong or unknown variables, layouts, hostsfiles and folders are reported together, before anything starts.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# The recipe is megatron/presets/sft_llama.yaml: HL_NUM_EPOCHS 3, HL_GBS 128, HL_SEQ_LEN 4096 (longer chats are dropped and
# counted; HL_TOO_LONG=split or truncate keeps them), HL_MAX_BATCH_LEN 16384, HL_LR 2e-5. The model's options come from
# HL_MODEL.

# Layout: HL_DP x HL_TP x HL_CP x HL_PP = HL_NUM_NODES x HL_DEVICES_PER_NODE (8; on the CPU of this machine what it needs)
export HL_NUM_NODES="${HL_NUM_NODES:-1}"
export HL_TP="${HL_TP:-1}"
export HL_PP="${HL_PP:-1}"

# Results: HL_RESULTS_DIR, or a new folder named after the run in HL_RESULTS_DIR_PREFIX/out. In it are data/ (the
# tokenized chats), checkpoints/ and hf_format/ (the exports).
export HL_RESULTS_DIR_PREFIX="${HL_RESULTS_DIR_PREFIX:-.}"
export HL_SAVE="${HL_SAVE:-1}"

start launch --variables sft -- "$@"
