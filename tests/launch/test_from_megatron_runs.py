"""Published commands of Megatron, run on CPU ranks: sizes and lengths are smaller, all other flags as they stand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.index.indexed_builder import IndexedDatasetBuilder
from megatron.data.tokenizers.acceleration import byte_symbols
from tests import runs
from tests.launch.test_from_megatron import BLOOM13B, DS_CONFIG
from tests.ranks import HANG_S

ROOT = Path(__file__).resolve().parents[2]
SMALLER = {
    "--tensor-model-parallel-size 4": "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size 2": "--pipeline-model-parallel-size 1",
    "--num-layers 40": "--num-layers 2",
    "--hidden-size 5120": "--hidden-size 64",
    "--ffn-hidden-size 20480": "--ffn-hidden-size 256",
    "--num-attention-heads 32": "--num-attention-heads 4",
    "--seq-length 2048": "--seq-length 64",
    "--max-position-embeddings 2048": "--max-position-embeddings 64",
    "--global-batch-size 1024": "--global-batch-size 8",
    "--train-samples 300_000_000": "--train-samples 2_4",
    "--lr-decay-samples 126_953_125": "--lr-decay-samples 320",
    "--lr-warmup-samples 216_320": "--lr-warmup-samples 16",
    "--log-interval 10": "--log-interval 1",
    "--eval-iters 5": "--eval-iters 1",
    "--rampup-batch-size 16 16 5_000_000": "--rampup-batch-size 4 4 8",
}
"""What the hardware makes smaller: the model, the batch and the length of the run."""
SCRIPT = """set -ex
DATA_DIR=${HL_DATA_DIR_ROOT:-/data/bigscience/oscar-en}
RUNTIME=`date +"%Y%m%d_%H%M"`
DS_CONFIG=out/ds_config.json
mkdir -p out
cat << EOT > $DS_CONFIG
DS_SETTINGS
EOT
CMD="cd ${MODEL:-.} && \\
    ENABLE_EXPERIMENTAL_FLAGS=1 python -u ./pretrain_gpt.py \\
    PUBLISHED"
if [ ${HL_USE_HPU:-1} -eq 1 ]
then
    CMD="${CMD} --no-bias-gelu-fusion"
fi
deepspeed --num_nodes ${HL_NUM_NODES:-1} --num_gpus 2 --no_local_rank --no_python \\
    /usr/bin/bash -c "$CMD" #2>&1 | tee out/output.log
"""


def smaller(words: str) -> str:
    words = " ".join(words.split())
    for theirs, ours in SMALLER.items():
        assert f"{theirs} " in f"{words} ", theirs
        words = words.replace(theirs, ours)
    return words


def write_data(folder: Path) -> None:
    """The dataset under the name of the published command, and GPT-2's two files."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    with IndexedDatasetBuilder(folder / "meg-gpt2_text_document", np.uint16) as builder:
        for _ in range(400):
            builder.add_document(generator.integers(0, 50257, 80).astype(np.uint16))
        builder.finalize()
    tokens = [*byte_symbols(), *(f"t{number}" for number in range(256, 50257))]
    (folder / "gpt2-vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "gpt2-merges.txt").write_text("#version: 0.2\n")


def run(folder: Path, *words: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HL_")}
    environment |= {"HL_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout


def test_ranks_of_torchrun_train_by_the_published_flags(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ds_config.json").write_text(DS_CONFIG.replace("1024", "8"))
    words = smaller(BLOOM13B).split()
    launcher = "-m torch.distributed.run --standalone --nproc_per_node 2 -m megatron.pretrain_gpt".split()
    run(tmp_path, *launcher, *words, "--results-dir", "results")
    rows = runs.rows(tmp_path / "results")
    # 2 steps of 4 samples, then of 8
    assert [row["consumed_samples"] for row in rows] == [4, 8, 16, 24]
    assert all(np.isfinite(row["lm_loss"]) for row in rows)
    assert (tmp_path / "out" / "checkpoints" / "global_step4").is_dir()


@pytest.mark.slow
def test_a_script_of_the_published_form_runs_as_its_flags_do(tmp_path: Path) -> None:
    """The command stands in a variable that bash reads, the JSON in a here-document."""
    write_data(tmp_path / "data")
    published = re.sub(r"\bdata/", "${DATA_DIR}/", smaller(BLOOM13B))
    text = SCRIPT.replace("PUBLISHED", published).replace("DS_SETTINGS", DS_CONFIG.replace("1024", "8"))
    (tmp_path / "run_bloom13b.sh").write_text(text)
    command = str(ROOT / "tools" / "from_megatron.py"), "--run", "run_bloom13b.sh"
    shown = run(tmp_path, *command, "--", "--results-dir", "results", HL_DATA_DIR_ROOT="data")
    assert "--no-bias-gelu-fusion: no such kernels" in shown
    assert [row["consumed_samples"] for row in runs.rows(tmp_path / "results")] == [4, 8, 16, 24]
