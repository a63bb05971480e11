#!/usr/bin/env bash
# Measure a checkpoint, a Hugging Face model or adapters by lm-eval's tasks and by datasets, on any layout.
#
#   HL_MODEL=checkpoints/run HL_DATASETS=data/held_out_text_document scripts/evaluate.sh
#   HL_MODEL=models/llama HL_TP=2 HL_DP=4 HL_TASKS=tasks/quiz.yaml HL_OUTPUT=results.json scripts/evaluate.sh
#
# Arguments are flags of tools/evaluate.py, and override the variables; --help lists both. docs/guides/evaluation.md has more.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

start evaluate --variables evaluate "$@"
