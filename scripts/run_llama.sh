#!/usr/bin/env bash
# Train Llama 1, 2, 3.1 or 3.2 in tensor, pipeline and data parallel: on this machine, or on the hosts of HL_HOSTSFILE.
#
#   HL_HOSTSFILE=scripts/hostsfile HL_NUM_NODES=8 HL_LLAMA_VER=2 HL_LLAMA_MODEL_SIZE=70 HL_PP=4 HL_TP=8 HL_DP=2 \
#       scripts/run_llama.sh
#   HL_DRY_RUN=1 ...                  prints the plan and starts nothing
#
# Arguments are flags of megatron.train, and override the variables. All variables: docs/reference/variables.md.
# Wrong or unknown variables, layouts, hostsfiles and folders are reported together, before anything starts.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
select_preset "$@"

if [[ -z ${HL_CONFIG:-} ]]; then
    # without HL_LLAMA_VER 3.1, without HL_LLAMA_MODEL_SIZE 8: 1: 7 13 65 | 2: 7 13 34 70 | 3.1: 8 70 405 | 3.2: 1 3.
    # As Habana trains it. The model, HL_GBS, HL_SEQ_LEN, HL_NUM_LAYERS, HL_DROPOUT 0, HL_EVAL_ITERS 100,
    # HL_EVAL_INTERVAL 1000 and HL_SAVE_INTERVAL 2000 are in the preset, megatron/presets/llama*.yaml.
    export HL_DATA_DIR_ROOT="${HL_DATA_DIR_ROOT:-/data/datasets/red_pajama}"
    export HL_DATA_FILE_PREFIX="${HL_DATA_FILE_PREFIX:-redpajama}"
    export HL_SEQ_PARALLEL="${HL_SEQ_PARALLEL:-1}"
    export HL_OPTIMIZER="${HL_OPTIMIZER:-fusedadamw}"
fi

# Layout: HL_DP x HL_TP x HL_CP x HL_PP = HL_NUM_NODES x HL_DEVICES_PER_NODE (8; on the CPU of this machine what it needs)
case ${HL_CONFIG:-llama} in
    *tiny_*) layout=(1 1 1) ;;                        # tiny presets run on one device
    *)       layout=(2 2 2) ;;
esac
export HL_NUM_NODES="${HL_NUM_NODES:-1}"
export HL_DP="${HL_DP:-${layout[0]}}"
export HL_TP="${HL_TP:-${layout[1]}}"
export HL_PP="${HL_PP:-${layout[2]}}"

# Results: HL_RESULTS_DIR, or a new folder named after the run in HL_RESULTS_DIR_PREFIX/out
export HL_RESULTS_DIR_PREFIX="${HL_RESULTS_DIR_PREFIX:-.}"
export HL_SAVE="${HL_SAVE:-1}"

start launch --variables llama -- "$@"
