#!/usr/bin/env bash
# From nothing to a trained model on a CPU in a few minutes. Sets up .venv, trains a tokenizer on the source text of
# Python's standard library, builds the indexed dataset, trains a tiny BLOOM on 2 pipeline stages x 2 tensor-parallel
# ranks, stops half-way, resumes on 2 tensor-parallel x 2 data-parallel ranks, exports to Hugging Face's format, where
# transformers must give the same logits, draws the loss curve, and lets the model complete a line of Python.
#
#   bash scripts/quickstart.sh [FOLDER]        all output is in FOLDER (default: quickstart/)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="${1:-quickstart}"
vocabulary=512

step() { printf '\n== %s\n' "$*"; }

step "1/8 Set up .venv"
bash scripts/setup.sh convert
python=.venv/bin/python
began=$SECONDS

library=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
mkdir -p "$folder"

step "2/8 Train a tokenizer on the standard library ($library)"
"$python" tools/train_tokenizer.py --input "$library"/*.py --text-files '*.py' \
    --vocab-size "$vocabulary" --output-dir "$folder/tokenizer" --overwrite

step "3/8 Build the indexed dataset"
"$python" tools/preprocess_data.py --input "$library"/*.py --text-files '*.py' --append-eod \
    --tokenizer-type HFTokenizer --tokenizer-model "$folder/tokenizer" --output-prefix "$folder/stdlib" --workers 2 --overwrite

export HL_CONFIG=tiny_bloom HL_DEVICE=cpu HL_PP=2 HL_TP=2 HL_DP=1
export HL_DATA_DIR_ROOT="$folder" HL_DATA_FILE_PREFIX=stdlib_text_document HL_RESULTS_DIR="$folder/run"
rm -rf "$HL_RESULTS_DIR" # of an earlier quickstart

step "4/8 Train a tiny BLOOM, pipeline x tensor parallel, and stop half-way"
HL_EXIT_INTERVAL=150 bash scripts/run_bloom13b.sh

step "5/8 Resume it on another layout, tensor x data parallel"
HL_PP=1 HL_TP=2 HL_DP=2 bash scripts/run_bloom13b.sh

step "6/8 Export it to Hugging Face's format, and compare the logits"
rm -rf "$folder/huggingface"
"$python" tools/convert_checkpoint.py --load "$HL_RESULTS_DIR/checkpoints" --save "$folder/huggingface" --to hf \
    --tokenizer "$folder/tokenizer"

step "7/8 Draw the loss curve"
"$python" tools/plot_run.py "$HL_RESULTS_DIR" --loss-only --output "$folder/loss.png"

"$python" - "$folder" "$vocabulary" <<'END'
import json
import math
import sys
from pathlib import Path

folder = Path(sys.argv[1])
rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open(encoding="utf-8")]
valid = [row for row in rows if row["kind"] == "valid"]
first, last = valid[0], valid[-1]
guess = math.log(int(sys.argv[2]))  # of every token alike
print(f"""
validation loss {first["lm_loss"]:.2f} at iteration {first["iteration"]}, {last["lm_loss"]:.2f} at iteration \
{last["iteration"]}: {last["lm_loss"] / guess:.0%} of {guess:.2f} = ln {sys.argv[2]}, a uniform guess
tokenizer       {folder}/tokenizer
dataset         {folder}/stdlib_text_document.bin, .idx
checkpoints     {folder}/run/checkpoints
for transformers {folder}/huggingface
metrics         {folder}/run/metrics.jsonl, {folder}/run/tensorboard
loss curve      {folder}/loss.png
resolved config {folder}/run/config.yaml""")
sys.exit(0 if last["lm_loss"] < 0.6 * guess else "the loss did not fall below 60 % of a uniform guess")
END
step "8/8 Complete a line of Python"
"$python" tools/generate.py --load "$HL_RESULTS_DIR/checkpoints" --tokenizer-model "$folder/tokenizer" --device cpu \
    --prompt "    def __init__(self" --max-new-tokens 60

printf '\nDone in %d s after set-up.\n' "$((SECONDS - began))"
