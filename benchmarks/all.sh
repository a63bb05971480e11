#!/usr/bin/env bash
# Run every benchmark and write one table, as Markdown.
#
#   benchmarks/all.sh [--only PATTERN] [OUTPUT_FOLDER]
#
# Each benchmark's full output is OUTPUT_FOLDER/NAME.log (default: out/benchmarks), and the table is
# OUTPUT_FOLDER/summary.md: ok (every bound it has is kept) or missed, minutes, and the lines of its output that state
# ratios. PATTERN, a regular expression, chooses benchmarks by name. On one machine without other work: hours in all.
#
# The peers are found through variables; a benchmark without its peer or data is listed as skipped, with the reason:
#   PYTHON                interpreter of this project; with transformers and litgpt for `step`, peft for `lora`,
#                         lm-eval for `evaluate` (default: .venv/bin/python)
#   PEER                  interpreter of an environment with megatron-core (docs/internals/benchmarks.md)
#   TUNING                interpreter of an environment with TRL and InstructLab (docs/internals/benchmarks.md)
#   PREFERENCE            interpreter of an environment with TRL and PEFT (docs/internals/benchmarks.md)
#   RATES                 file of rates of this machine, by megatron-plan --measure FILE --num-devices 4
#   CHATS                 folder of processed chats for sft_throughput, and CHATS_VOCAB their vocabulary size
#   MEGATRON_TEST_DATA    folder of the corpora and tokenizers of the tests
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

only=.
if [[ ${1:-} == --only ]]; then
    only=${2:?--only needs a pattern}
    shift 2
fi
if [[ ${1:-} == -* ]]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
output=${1:-out/benchmarks}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$output" || exit 1
table=$output/summary.md
{
    echo "Benchmarks of $(date -u +%Y-%m-%d), $(nproc) cores, $("$python" -c 'import torch; print("torch", torch.__version__)')"
    echo
    echo "| benchmark | result | minutes | figures |"
    echo "|---|---|---|---|"
} >"$table"

missed=0
row() { # NAME RESULT MINUTES FIGURES
    echo "| $1 | $2 | $3 | ${4//|/ } |" | tee -a "$table"
}

# NAME, the variables it needs ("-": none), its threads, then its arguments
run() {
    local name=$1 needs=$2 threads=$3 status began minutes variable
    shift 3
    [[ $name =~ $only ]] || return 0
    for variable in ${needs//,/ }; do
        if [[ $variable != - && -z ${!variable:-} ]]; then
            row "$name" "skipped: set $variable" "" ""
            return 0
        fi
    done
    began=$SECONDS
    OMP_NUM_THREADS=$threads "$python" "benchmarks/${name%%:*}.py" "$@" >"$output/$name.log" 2>&1
    status=$?
    minutes=$(((SECONDS - began + 30) / 60))
    case $status in
        0) result=ok ;;
        1) result=missed && missed=1 ;;
        *) result="failed with status $status" && missed=1 ;;
    esac
    if grep -q '^Traceback' "$output/$name.log"; then
        result="failed: $name.log" && missed=1
    fi
    row "$name" "$result" "$minutes" "$(grep -E 'ratio|ours / |times|[0-9] ?%|[0-9]x ' "$output/$name.log" | tail -n 8 | paste -sd ';' | tr -s ' ')"
}

run step - 2
run lora - 2
run cuda_step - 2
run generate - 2
run evaluate MEGATRON_TEST_DATA 2
run pipeline - 1
run framework_tax - 2
run framework_tax:tiny_llama - 2 --config tiny_llama
run reliability_overhead - 1
run guard_overhead - 1
run guard_overhead:two_ranks - 1 --ranks 2
run start - 1
run loss - 2
run kernels - 2
run muon MEGATRON_TEST_DATA 1 --data "${MEGATRON_TEST_DATA:-}"
run mup_coordinates - 1 "$output/mup_coordinates.png"
run families - 1
run experts - 1
run context_parallel - 1
run plan_memory - 1
run plan_time RATES 1 --rates "${RATES:-}"
run plan_search RATES 1 --rates "${RATES:-}"
run published_runs - 1
run preprocess PEER,MEGATRON_TEST_DATA 2 --peer-python "${PEER:-}" --peer-megabytes 100
run preprocess:bloom PEER,MEGATRON_TEST_DATA 2 --peer-python "${PEER:-}" --peer-megabytes 100 --tokenizer bloom
run preprocess:sentencepiece PEER,MEGATRON_TEST_DATA 2 --peer-python "${PEER:-}" --peer-megabytes 100 --tokenizer sentencepiece
run compare_megatron_core PEER 1 --peer-python "${PEER:-}"
run build_index PEER 2 --peer-python "${PEER:-}"
run open_dataset - 1
run read_samples PEER 1 --peer-python "${PEER:-}"
run checkpoint_save - 1
run adapter_save - 1
run checkpoint_relayout - 1
run convert_huggingface - 2 --rounds 1
run read_megatron_core - 1
run merge_adapter - 2 --rounds 3
run chaos - 1 --kills 2 --every-s 30
run chaos:copies - 1 --kills 2 --every-s 30 --copies 10
run peer_copies - 1
run sft_throughput CHATS,CHATS_VOCAB 2 --data-path "${CHATS:-}" --vocab-size "${CHATS_VOCAB:-}" --seq-length 512 --max-batch-len 4096
run tokenize_chats TUNING,MEGATRON_TEST_DATA 2 --peer-python "${TUNING:-}" --repeat 48 --rounds 2
run pack_dataset TUNING 1 --peer-python "${TUNING:-}"
run pack_steps TUNING 1 --peer-python "${TUNING:-}"
run bucketing - 1
run preference PREFERENCE,MEGATRON_TEST_DATA 2 --peer-python "${PREFERENCE:-}"

echo "table: $table"
exit $missed
