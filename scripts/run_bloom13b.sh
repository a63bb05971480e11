#!/usr/bin/env bash
# Train BLOOM-13B in tensor, pipeline and data parallel: on this machine, or on the hosts of HL_HOSTSFILE.
#
#   HL_HOSTSFILE=scripts/hostsfile HL_NUM_NODES=4 HL_PP=2 HL_TP=4 HL_DP=4 scripts/run_bloom13b.sh
#   HL_CONFIG=tiny_bloom HL_PP=2 HL_DATA_DIR_ROOT=data HL_DATA_FILE_PREFIX=corpus scripts/run_bloom13b.sh --lr 1e-3
#   HL_DRY_RUN=1 ...                  prints the plan and starts nothing
#
# Arguments are flags of megatron.train, and override the variables. All variables: docs/reference/variables.md.
# Wrong or unknown variables, layouts, hostsfiles and folders are reported together, before anything starts.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
select_preset "$@"

if [[ -z ${HL_CONFIG:-} ]]; then
    # As Habana trains it. The model, its batch (HL_GBS 1024, HL_MICRO_BATCH 1), HL_SEQ_LEN 2048, HL_NUM_LAYERS 40,
    # HL_OPTIMIZER adamw and the intervals (HL_SAVE_INTERVAL 2000, HL_LOG_INTERVAL 10) are in megatron/presets/bloom_13b.yaml;
    # HL_ZERO_STAGE, HL_CKP_ACT, HL_SEQ_PARALLEL and HL_EXIT_INTERVAL are 0.
    export HL_DATA_DIR_ROOT="${HL_DATA_DIR_ROOT:-/data/bigscience/oscar-en}"
    export HL_DATA_FILE_PREFIX="${HL_DATA_FILE_PREFIX:-meg-gpt2_text_document}"
    export HL_RAMPUP_BS="${HL_RAMPUP_BS:-1}"          # global batch 16, 32, ... over the first 5,000,000 samples
fi

# Layout: HL_DP x HL_TP x HL_CP x HL_PP = HL_NUM_NODES x HL_NGPU_PER_NODE (8; on the CPU of this machine what the layout needs)
case ${HL_CONFIG:-bloom_13b} in
    *tiny_*) layout=(1 1 1) ;;                        # tiny presets run on one device
    *)       layout=(2 4 1) ;;
esac
export HL_NUM_NODES="${HL_NUM_NODES:-1}"
export HL_DP="${HL_DP:-${layout[0]}}"
export HL_TP="${HL_TP:-${layout[1]}}"
export HL_PP="${HL_PP:-${layout[2]}}"

# Results: HL_RESULTS_DIR, or a new folder named after the run in HL_RESULTS_DIR_PREFIX/out
export HL_RESULTS_DIR_PREFIX="${HL_RESULTS_DIR_PREFIX:-.}"
export HL_SAVE="${HL_SAVE:-1}"

start launch --variables bloom13b -- "$@"
