#!/usr/bin/env bash
# Generate text with a checkpoint, a Hugging Face model or adapters, on any layout.
#
#   HL_MODEL=checkpoints/run scripts/generate.sh --prompt "Once upon a time"
#   HL_MODEL=models/llama HL_TP=8 scripts/generate.sh --chat
#   HL_MODEL=models/llama HL_DP=8 HL_PROMPTS=prompts.jsonl HL_OUTPUT=answers.jsonl scripts/generate.sh
#
# Arguments are flags of tools/generate.py, and override the variables; --help lists both. docs/guides/generation.md has more.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

start generate --variables generate "$@"
