#!/usr/bin/env bash
# Generate text with a checkpoint, a Hugging Face model or adapters, on any layout.
#
#   HL_MODEL=checkpoints/run scripts/generate.sh --prompt "Once upon a time"
#   HL_MODEL=models/llama HL_TP=8 scripts/generate.sh --chat
#   HL_MODEL=models/llama HL_DP=8 HL_PROMPTS=prompts.jsonl HL_OUTPUT=answers.jsonl scripts/generate.sh
#
# Arguments are flags of tools/generate.py, and override the variables; --help lists both. docs/generation.md has more.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [[ -n ${HL_QNPU_DIR:-} && -r $HL_QNPU_DIR/activate ]]; then
    set +u # not our code
    # shellcheck source=/dev/null
    source "$HL_QNPU_DIR/activate"
    set -u
fi

python=${PYTHON:-$repository/.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
exec "$python" "$repository/tools/generate.py" --variables generate "$@"
