#!/usr/bin/env bash
# Train a Mixtral in expert, tensor, pipeline and data parallel: on this machine, or on the hosts of HL_HOSTSFILE.
#
#   HL_HOSTSFILE=scripts/hostsfile HL_NUM_NODES=8 HL_TP=8 HL_DP=8 HL_CKP_ACT=3 scripts/run_mixtral.sh
#   HL_DEVICE=cpu HL_CONFIG=tiny_mixtral HL_TP=2 HL_DP=2 HL_DATA_DIR_ROOT=data HL_DATA_FILE_PREFIX=corpus scripts/run_mixtral.sh
#   HL_DRY_RUN=1 ...                  prints the plan and starts nothing
#
# Arguments are flags of megatron.train, and override the variables. All variables: docs/reference/variables.md.
# Wrong or unknown variables, layouts, hostsfiles and folders are reported together, before anything starts.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
select_preset "$@"

if [[ -z ${HL_CONFIG:-} ]]; then
    # HL_MIXTRAL_MODEL: 8x7b, which counts where it is unset, 8x22b or small.
    # As Habana trains it: 4 Mi tokens in a batch. The model, HL_DROPOUT 0, HL_EVAL_ITERS 100, HL_EVAL_INTERVAL 1000 and
    # HL_SAVE_INTERVAL 2000 are in the preset, megatron/presets/mixtral_*.yaml.
    if [[ ${HL_MIXTRAL_MODEL:-} == small ]]; then
        export HL_NUM_LAYERS="${HL_NUM_LAYERS:-8}"
        export HL_HIDDEN_SIZE="${HL_HIDDEN_SIZE:-768}"
        export HL_FFN_HIDDEN_SIZE="${HL_FFN_HIDDEN_SIZE:-3072}"
        export HL_NUM_HEADS="${HL_NUM_HEADS:-16}"
        export HL_NUM_QUERY_GROUPS="${HL_NUM_QUERY_GROUPS:-8}"
        export HL_MOE_NUM_EXPERTS="${HL_MOE_NUM_EXPERTS:-4}"
        export HL_SEQ_LEN="${HL_SEQ_LEN:-256}"
    fi
    export HL_SEQ_LEN="${HL_SEQ_LEN:-32768}"
    if [[ $HL_SEQ_LEN =~ ^[1-9][0-9]*$ ]]; then
        export HL_GBS="${HL_GBS:-$((HL_SEQ_LEN < 4194304 ? 4194304 / HL_SEQ_LEN : 1))}"
    fi
    export HL_TRAIN_ITERS="${HL_TRAIN_ITERS:-250000}"
    export HL_MOE_AUX_LOSS_COEFF="${HL_MOE_AUX_LOSS_COEFF:-${HL_AUX_LOSS_COEFF:-2e-2}}"
    export HL_DATA_DIR_ROOT="${HL_DATA_DIR_ROOT:-/data/datasets/red_pajama}"
    export HL_DATA_FILE_PREFIX="${HL_DATA_FILE_PREFIX:-medium}"
    export HL_SEQ_PARALLEL="${HL_SEQ_PARALLEL:-1}"
    export HL_OPTIMIZER="${HL_OPTIMIZER:-fusedadamw}"
fi

# Layout: HL_DP x HL_TP x HL_CP x HL_PP = HL_NUM_NODES x HL_DEVICES_PER_NODE (8; on the CPU of this machine what it needs).
# HL_MOE_EP of these ranks hold different experts: unset, as many as fit HL_DP (with HL_ETP=1: HL_DP x HL_TP) ranks.
case ${HL_CONFIG:-mixtral} in
    *tiny_*) layout=(1 1 1) ;;                        # tiny presets run on one device
    *)       layout=(1 8 1) ;;
esac
export HL_NUM_NODES="${HL_NUM_NODES:-1}"
export HL_DP="${HL_DP:-${layout[0]}}"
export HL_TP="${HL_TP:-${layout[1]}}"
export HL_PP="${HL_PP:-${layout[2]}}"

# Results: HL_RESULTS_DIR, or a new folder named after the run in HL_RESULTS_DIR_PREFIX/out
export HL_RESULTS_DIR_PREFIX="${HL_RESULTS_DIR_PREFIX:-.}"
export HL_SAVE="${HL_SAVE:-1}"

start launch --variables mixtral -- "$@"
