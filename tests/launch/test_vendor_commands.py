"""Habana's published commands, each dry-run for HPUs as it stands, or refused by the variable that it cannot have.

Sources: READMEs of HabanaAI/Model-References 1.8 to 1.14 (BLOOM-13B, Llama), HabanaAI/Megatron-DeepSpeed 1.19 (Llama 2
and 3.1) and HabanaAI/Megatron-LM 1.24 (Llama 3.1). Scripts for one size each (run_llama13b.sh, run_llamav2.sh) are
run_llama.sh with HL_LLAMA_VER and HL_LLAMA_MODEL_SIZE here; the last one is scripts/run_llama.sh for pretrain_llama.sh.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from megatron.cli import launch
from megatron.launch.dialects.hl_variables import LLAMA_PRESETS, REFUSED, VARIABLES
from megatron.settings.command_line import read_command_line

HOSTS = "HL_HOSTSFILE=hostsfile "
FP8_2024 = "HL_USE_CACHE_FP8_WEIGHT_FWD=1 HL_USE_CACHE_FP8_WEIGHT=1 HL_USE_TRANSFORMER_ENGINE=1 "
LLAMA_31 = "HL_TOKENIZER_TYPE=Llama3Tokenizer HL_ZERO_STAGE=1 HL_CKP_ACT=2 HL_LLAMA_VER=3.1 "
LLAMA_2 = "HL_TOKENIZER_TYPE=GPTSentencePieceTokenizer HL_LLAMA_VER=2 "
LLAMA_2026 = "HL_USE_LAZY_MODE=1 HL_TOKENIZER_TYPE=HuggingFaceTokenizer HL_LLAMA_VER=3.1 "
FP8_2026 = "HL_FP8=1 HL_TRANSFORMER_IMPL=transformer_engine HL_SEQ_PARALLEL=0 "
FP8 = "--fp8-format hybrid"
LONG = "HL_NUM_WORKERS=0 HL_SEQ_LEN=32768 "
ONE, TWO = "HL_LLAMA_VER=1 HL_LLAMA_MODEL_SIZE=13 ", "HL_LLAMA_VER=2 HL_LLAMA_MODEL_SIZE=70 "

# script, variables, what the plan shows, or the variables that are refused
COMMANDS = [
    # Model-References
    ("bloom13b", HOSTS + "HL_NUM_NODES=4 HL_PP=8 HL_TP=1 HL_DP=4", "PP 8 x TP 1 x DP 4"),
    ("bloom13b", HOSTS + "HL_NUM_NODES=8 HL_PP=8 HL_TP=1 HL_DP=8", "PP 8 x TP 1 x DP 8"),
    ("bloom13b", HOSTS + "HL_NUM_NODES=4 HL_PP=2 HL_TP=4 HL_DP=4", "PP 2 x TP 4 x DP 4"),
    ("bloom13b", HOSTS + "HL_NUM_NODES=8 HL_PP=2 HL_TP=4 HL_DP=8", "PP 2 x TP 4 x DP 8"),
    ("bloom13b", HOSTS + "HL_NUM_NODES=8 HL_PP=2 HL_TP=2 HL_DP=16", "PP 2 x TP 2 x DP 16"),
    ("bloom13b", "HL_NUM_NODES=1 HL_PP=1 HL_TP=4 HL_DP=2", "PP 1 x TP 4 x DP 2"),
    ("bloom13b", HOSTS + "HL_NUM_NODES=1 HL_PP=2 HL_TP=4 HL_DP=1", "PP 2 x TP 4 x DP 1"),
    ("llama", ONE + HOSTS + "HL_NUM_NODES=8 HL_PP=2 HL_TP=4 HL_DP=8", "PP 2 x TP 4 x DP 8"),
    ("llama", ONE + "HL_NUM_NODES=1 HL_PP=2 HL_TP=4 HL_DP=1", "PP 2 x TP 4 x DP 1"),
    ("llama", ONE + HOSTS + "HL_NUM_NODES=8 HL_PP=2 HL_TP=2 HL_DP=16", "PP 2 x TP 2 x DP 16"),
    ("llama", ONE + "HL_NUM_NODES=1 HL_PP=2 HL_TP=2 HL_DP=2 HL_SEQ_PARALLEL=1", "PP 2 x TP 2 x DP 2"),
    ("llama", TWO + HOSTS + "HL_CKP_ACT=2 HL_MICRO_BATCH=1 HL_NUM_NODES=32 HL_PP=8 HL_TP=8 HL_DP=4", "recompute sel"),
    ("llama", TWO + HOSTS + "HL_SEQ_PARALLEL=1 HL_NUM_NODES=16 HL_PP=8 HL_TP=8 HL_DP=2", "PP 8 x TP 8 x DP 2"),
    # Megatron-DeepSpeed
    ("llama", LLAMA_31 + "HL_DP=2 HL_TP=4 HL_PP=1 HL_LLAMA_MODEL_SIZE=8", "ZeRO       stage 1\n"),
    ("llama", LLAMA_31 + FP8_2024 + "HL_DP=2 HL_TP=4 HL_PP=1 HL_LLAMA_MODEL_SIZE=8", FP8),
    ("llama", HOSTS + LLAMA_31 + "HL_NUM_NODES=8 HL_DP=8 HL_TP=8 HL_PP=1 HL_LLAMA_MODEL_SIZE=70", "PP 1 x TP 8 x DP 8"),
    ("llama", HOSTS + LLAMA_31 + FP8_2024 + "HL_NUM_NODES=8 HL_DP=8 HL_TP=8 HL_PP=1", FP8),
    ("llama", LLAMA_2 + "HL_LLAMA_MODEL_SIZE=13 HL_NUM_NODES=1 HL_PP=2 HL_TP=2 HL_DP=2", "40 layers, hidden 5120"),
    ("llama", HOSTS + LLAMA_2 + "HL_LLAMA_MODEL_SIZE=13 HL_NUM_NODES=8 HL_PP=2 HL_TP=2 HL_DP=16", "DP 16"),
    ("llama", HOSTS + LLAMA_2 + "HL_LLAMA_MODEL_SIZE=70 HL_NUM_NODES=4 HL_PP=4 HL_TP=8 HL_DP=1", "80 layers"),
    (
        "llama",
        HOSTS + LLAMA_2 + "HL_LLAMA_MODEL_SIZE=70 HL_NUM_NODES=4 HL_PP=4 HL_TP=8 HL_DP=1 HL_CKP_ACT=0 HL_SEQ_LEN=4096 "
        "HL_MICRO_BATCH=1 HL_USE_TRANSFORMER_ENGINE=1 HL_USE_CACHE_FP8_WEIGHT_FWD=1",
        FP8,
    ),
    (
        "llama",
        HOSTS + LLAMA_2 + FP8_2024 + "HL_NUM_NODES=2 HL_LLAMA_MODEL_SIZE=13 HL_PP=2 HL_TP=2 HL_DP=4 HL_CKP_ACT=2 "
        "HL_SEQ_LEN=4096 HL_ZERO_STAGE=1 HL_USE_FAST_SOFTMAX=1 HL_MICRO_BATCH=2 HL_GRAD_ACCUM_DTYPE=bf16",
        FP8,
    ),
    (
        "llama",
        LLAMA_2 + "HL_LLAMA_MODEL_SIZE=7 HL_PP=1 HL_TP=1 HL_DP=8 HL_CKP_ACT=2 HL_SEQ_LEN=4096 HL_ZERO_STAGE=1 "
        "HL_USE_FAST_SOFTMAX=1 HL_MICRO_BATCH=1 HL_GRAD_ACCUM_DTYPE=bf16",  # without its FP8 variables
        "PP 1 x TP 1 x DP 8",
    ),
    # Megatron-LM
    ("llama", LLAMA_2026 + FP8_2026 + "HL_CKP_ACT=2 HL_DP=4 HL_TP=2 HL_PP=1 HL_LLAMA_MODEL_SIZE=8", FP8),
    ("llama", LLAMA_2026 + "HL_CKP_ACT=2 HL_DP=4 HL_TP=2 HL_PP=1 HL_LLAMA_MODEL_SIZE=8", "HPU in lazy mode"),
    ("llama", HOSTS + LLAMA_2026 + FP8_2026 + "HL_CKP_ACT=2 HL_NUM_NODES=8 HL_DP=8 HL_TP=8 HL_PP=1", FP8),
    # its script makes a hostsfile of /etc/mpi/hostfile
    (
        "llama",
        LLAMA_2026 + "HL_CKP_ACT=2 HL_NUM_NODES=8 HL_DP=8 HL_TP=8 HL_PP=1 HL_LLAMA_MODEL_SIZE=70",
        "HL_HOSTSFILE",
    ),
    (
        "llama",
        HOSTS + LLAMA_2026 + "HL_CKP_ACT=2 HL_NUM_NODES=8 HL_DP=8 HL_TP=8 HL_PP=1 HL_LLAMA_MODEL_SIZE=70",
        "PP 1 x TP 8 x DP 8",
    ),
    ("llama", LLAMA_2026 + LONG + "HL_CKP_ACT=2 HL_LLAMA_MODEL_SIZE=8 HL_DP=2 HL_TP=4 HL_PP=1", "sequence 32768"),
    (
        "llama",
        LLAMA_2026 + LONG + "HL_USE_FAST_SOFTMAX=0 HL_CKP_ACT=0 HL_LLAMA_MODEL_SIZE=8 HL_DP=1 HL_CP=8 HL_PP=1",
        "context-parallel HL_NGPU_PER_NODE",  # as its own script: HL_TP is 2 there too
    ),
    (
        "llama",
        LLAMA_2026 + LONG + "HL_USE_FAST_SOFTMAX=0 HL_CKP_ACT=0 HL_LLAMA_MODEL_SIZE=8 HL_DP=1 HL_TP=1 HL_CP=8 HL_PP=1",
        "PP 1 x TP 1 x CP 8 x DP 1",
    ),
    (
        "llama",
        HOSTS + LLAMA_2026 + LONG + "HL_USE_FAST_SOFTMAX=0 HL_CKP_ACT=0 HL_NUM_NODES=4 HL_LLAMA_MODEL_SIZE=70 HL_DP=2 "
        "HL_CP=2 HL_TP=8 HL_PP=1",
        "PP 1 x TP 8 x CP 2 x DP 2",
    ),
    (
        "llama",
        HOSTS + LLAMA_2026 + LONG + "HL_CKP_ACT=1 HL_NUM_NODES=4 HL_LLAMA_MODEL_SIZE=70 HL_DP=4 HL_TP=8 HL_PP=1",
        "recompute full",
    ),
    # the modes of its page
    ("llama", "HL_USE_LAZY_MODE=0 HL_TORCH_COMPILE_DISABLE=1", "nothing is compiled"),
    ("llama", "HL_USE_LAZY_MODE=0 HL_USE_TORCH_COMPILE=1 HL_USE_TORCH_COMPILED_AUTOGRAD=0", "layers are compiled"),
    ("llama", HOSTS + "HL_HNIC=1 HL_NUM_NODES=2 HL_DP=4", "HCCL_OVER_OFI=1"),
    ("llama", "HL_PE=13 HL_PPR=4", "--cores-per-rank 13"),
    ("llama", "HL_LAUNCHER_TYPE=mpirun", "--launcher mpirun"),
    ("llama", "HL_LAUNCHER_TYPE=torchrun", "HL_LAUNCHER_TYPE=torchrun"),
]

# The 107 variables of pretrain_llama.sh, HabanaAI/Megatron-LM 1.24.0, without HL_.
PRETRAIN_LLAMA = """
ALLOW_UNSPEC_INT_ON_NN_MODULE BF16 CACHE_FP8_WEIGHT CACHE_FP8_WEIGHT_FWD CACHE_SIZE_LIMIT CHECKPOINTS_DIR
CKPT_CONVERT_FORMAT CKPT_CONVERT_SAVE CKPT_FORMAT CKPT_FULLY_PARALLEL_LOAD CKP_ACT CP CP_COMM_TYPE DATA_CACHE_DIR
DATA_DIR_ROOT DATA_FILE_PREFIX DETERMINISTIC_MODE DEVICES_PER_NODE DP DROPOUT ENV_FLAGS EVAL_INTERVAL EVAL_ITERS
EXIT_INTERVAL FFN_HIDDEN_SIZE FI_PROVIDER FP8 FP8_AMAX_COMPUTE_ALGO FP8_AMAX_HISTORY_LEN FP8_AMAX_REDUCE FP8_COVERAGE
FP8_ENFORCE_BF16_AMAX_REDUCTION FP8_FORMAT FP8_MARGIN FP8_MEASURE_INTERVAL FP8_SMOOTH_SWIGLU GBS HCCL_GAUDI_DIRECT
HCCL_OVER_OFI HIDDEN_SIZE HNIC HOSTSFILE KILL_SWITCH_FILE LAUNCHER_TYPE LLAMA_MODEL_SIZE LLAMA_VER LM_EVAL LOAD_DIR
LOAD_DISTRIB_OPTIMIZER_METHOD LOG_INTERVAL MICRO_BATCH MICRO_BATCH_SYNC_INTERVAL NO_LOAD_OPTIM NO_LOAD_RNG
NO_LOAD_STRICT NUM_HEADS NUM_LAYERS NUM_NODES NUM_QUERY_GROUPS NUM_WORKERS OPTIMIZER OVERLAP_GRAD_REDUCE
OVERRIDE_OPT_PARAM_SCHEDULER PE PP PPR PROFILE_RANKS PROFILE_STEP_END PROFILE_STEP_START PROFILE_TYPE
RECOMPUTE_NUM_LAYERS REDIRECT_LOGS RESULTS_DIR RESULTS_DIR_PREFIX SAVE SAVE_DISTRIB_OPTIMIZER_METHOD SAVE_INTERVAL
SEQ_LEN SEQ_PARALLEL SKIP_TRAIN SSH_PORT TENSORBOARD_DIR TE_DISABLE_TCOMPILE_ON_FUSED_ATTN TE_LIMIT_GRAPH_SIZE
TOKENIZER_MODEL TOKENIZER_TYPE TORCHRUN_MASTER_ADDR TORCHRUN_MULTINODE TORCHRUN_NODE_RANK TORCH_COMPILE_DISABLE TP
TRAIN_ITERS TRANSFORMER_IMPL USE_CKPT_OPT_PARAM_SCHEDULER USE_CPU_INIT USE_DISTRIBUTED_OPTIMIZER USE_FAST_SOFTMAX
USE_FUSED_RMSNORM USE_FUSED_SDPA USE_FUSED_SDPA_FP8 USE_FUSED_SDPA_WITH_RECOMPUTE USE_LAZY_MODE
USE_REGIONAL_COMPILATION USE_TE_CUSTOM_OP USE_TORCH_COMPILE USE_TORCH_COMPILED_AUTOGRAD VERIFY_CKPT
"""


# Defaults of these variables there, without what differs by model; '' where there is none.
DEFAULTS = {
    "LAUNCHER_TYPE": "mpirun", "DATA_DIR_ROOT": "/data/datasets/red_pajama", "DATA_FILE_PREFIX": "redpajama",
    "TRANSFORMER_IMPL": "transformer_engine", "NUM_NODES": "1", "DP": "2", "TP": "2", "CP": "1", "PP": "2",
    "CP_COMM_TYPE": "p2p", "MICRO_BATCH": "1", "EXIT_INTERVAL": "0", "RESULTS_DIR": "", "RESULTS_DIR_PREFIX": ".",
    "SAVE": "1", "SAVE_INTERVAL": "2000",
    "USE_DISTRIBUTED_OPTIMIZER": "1", "CHECKPOINTS_DIR": "", "VERIFY_CKPT": "1", "TENSORBOARD_DIR": "",
    "KILL_SWITCH_FILE": "", "HOSTSFILE": "", "CKP_ACT": "0", "LOG_INTERVAL": "10", "LLAMA_VER": "3.1",
    "LLAMA_MODEL_SIZE": "8", "SEQ_PARALLEL": "1", "OPTIMIZER": "fusedadamw", "DROPOUT": "0", "EVAL_ITERS": "100",
    "EVAL_INTERVAL": "1000", "USE_FUSED_SDPA": "1", "USE_FUSED_SDPA_WITH_RECOMPUTE": "0", "USE_FAST_SOFTMAX": "1",
    "USE_FUSED_RMSNORM": "1", "PROFILE_TYPE": "", "PROFILE_STEP_START": "3", "PROFILE_STEP_END": "4",
    "PROFILE_RANKS": "0", "DETERMINISTIC_MODE": "1", "FP8": "0", "FP8_FORMAT": "hybrid", "FP8_MARGIN": "0",
    "FP8_AMAX_COMPUTE_ALGO": "max", "FP8_SMOOTH_SWIGLU": "1", "TORCH_COMPILE_DISABLE": "0", "SKIP_TRAIN": "0",
    "NUM_WORKERS": "2", "FP8_COVERAGE": "mlp_row_parallel=True attention=1", "ENV_FLAGS": "", "NO_LOAD_OPTIM": "0",
    "NO_LOAD_RNG": "0", "FP8_ENFORCE_BF16_AMAX_REDUCTION": "1", "OVERRIDE_OPT_PARAM_SCHEDULER": "0",
    "USE_CKPT_OPT_PARAM_SCHEDULER": "0", "BF16": "1", "HNIC": "0", "HCCL_OVER_OFI": "1", "HCCL_GAUDI_DIRECT": "1",
    "FI_PROVIDER": "verbs", "FP8_AMAX_REDUCE": "1", "CACHE_FP8_WEIGHT": "1, Llama 3.1 8B: 0",
    "CACHE_FP8_WEIGHT_FWD": "1, Llama 3.1 8B: 0", "TE_LIMIT_GRAPH_SIZE": "0, Llama 3.1 8B on DP 8: 1",
    "TOKENIZER_TYPE": "GPTSentencePieceTokenizer, Llama 3: HuggingFaceTokenizer",
    "TOKENIZER_MODEL": "tokenizer.model in the folder of the data",
}  # fmt: skip
COMPUTED = (
    *("DATA_CACHE_DIR", "LOAD_DIR", "DEVICES_PER_NODE", "PE", "PPR", "USE_LAZY_MODE", "USE_TORCH_COMPILE", "GBS"),
    *("SEQ_LEN", "TRAIN_ITERS", "HIDDEN_SIZE", "NUM_HEADS", "NUM_QUERY_GROUPS", "NUM_LAYERS", "FFN_HIDDEN_SIZE"),
    *("FP8_MEASURE_INTERVAL", "FP8_AMAX_HISTORY_LEN"),
)
"""Variables whose default follows from others, or from the model: `MODELS`, and the tests of layouts, modes and fp8."""

# by version: batch, length, steps, epsilon, warm-up, base of the positions; by size: width, query and key/value heads,
# layers, width of the MLP, learning rate and its end
VERSIONS = {
    "1": (2048, 2048, 250000, 1e-8, 2000, 1e4),
    "2": (1024, 4096, 500000, 1e-8, 2000, 1e4),
    "3.1": (2048, 8192, 937500, 1e-5, 8000, 5e5),
    "3.2": (1024, 8192, 937500, 1e-5, 8000, 5e5),
}
MODELS = {
    ("1", "7"): (4096, 32, 32, 32, 11008, 3e-4, 3e-5),
    ("1", "13"): (5120, 40, 40, 40, 13824, 3e-4, 3e-5),
    ("1", "65"): (8192, 64, 64, 80, 22016, 1.5e-4, 1.5e-5),
    ("2", "7"): (4096, 32, 32, 32, 11008, 3e-4, 3e-5),
    ("2", "13"): (5120, 40, 40, 40, 13824, 3e-4, 3e-5),
    ("2", "34"): (8192, 64, 8, 48, 22016, 1.5e-4, 1.5e-5),
    ("2", "70"): (8192, 64, 8, 80, 28672, 1.5e-4, 1.5e-5),
    ("3.1", "8"): (4096, 32, 8, 32, 14336, 3e-4, 3e-6),
    ("3.1", "70"): (8192, 64, 8, 80, 28672, 1.5e-4, 1.5e-6),
    ("3.1", "405"): (16384, 128, 8, 126, 53248, 8e-5, 8e-7),
    ("3.2", "1"): (2048, 32, 8, 16, 8192, 4e-4, 4e-6),
}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hostsfile").write_text("".join(f"10.0.0.{number} slots=8\n" for number in range(1, 33)))
    for name in [name for name in os.environ if name.startswith(("HL_", "PT_HPU"))]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("script", "variables", "said"), COMMANDS, ids=range(len(COMMANDS)))
def test_a_published_command_prints_its_plan_or_names_the_variable(
    script: str, variables: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = {"bloom13b": ("/data/bigscience/oscar-en", "1"), "llama": ("/data/datasets/red_pajama", "0")}[script]
    given = dict(word.split("=", 1) for word in shlex.split(variables))
    # as the script sets them
    base = {"HL_DATA_DIR_ROOT": defaults[0], "HL_DATA_FILE_PREFIX": "text", "HL_RAMPUP_BS": defaults[1]}
    base |= {"HL_DP": "2", "HL_TP": "4" if script == "bloom13b" else "2", "HL_PP": "1" if script == "bloom13b" else "2"}
    base |= {"HL_SEQ_PARALLEL": "1", "HL_OPTIMIZER": "fusedadamw"} if script == "llama" else {}
    base.pop("HL_RAMPUP_BS") if script == "llama" else None
    for name, value in (base | {"HL_DEVICE": "hpu", "HL_DRY_RUN": "1"} | given).items():
        monkeypatch.setenv(name, value)
    status = launch.main(["--variables", script, "--"])
    shown = capsys.readouterr()
    if "HL_" in said:
        assert status == 2
        for refused in said.split():
            assert re.search(rf"  - .*{re.escape(refused)}", shown.err)
    else:
        assert status == 0, shown.err
        assert said in shown.out
    assert "Traceback" not in shown.err


def test_every_variable_of_the_newest_script_is_known() -> None:
    known = {variable.name for variable in VARIABLES} | {refused.name for refused in REFUSED}
    names = PRETRAIN_LLAMA.split()
    assert len(names) == 107
    assert [name for name in names if f"HL_{name}" not in known] == []


def test_every_default_is_that_of_the_newest_script_or_is_named_on_the_page() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "variables.md").read_text(encoding="utf-8")
    others = page.partition("## Other defaults")[2].partition("\n## ")[0]
    named = {row["Variable"]: (row["pretrain_llama.sh"], row["run_llama.sh"]) for row in table_rows(others)}
    ours = {
        name: row.get("run_llama.sh", row.get("Default", ""))
        for row in table_rows(page.replace(others, ""))
        for name in row["Variable"].replace("`", "").split(", ")
    }
    supported = {variable.name.removeprefix("HL_") for variable in VARIABLES if "llama" in variable.scripts}
    known = supported & set(PRETRAIN_LLAMA.split())
    assert known == {*DEFAULTS, *COMPUTED}
    differing = {
        f"HL_{name}": (default, ours[f"HL_{name}"])
        for name, default in DEFAULTS.items()
        if re.sub(r"^preset: |\.0$", "", ours[f"HL_{name}"]) != default
    }
    assert named == differing


def table_rows(text: str) -> list[dict[str, str]]:
    """The rows of the tables of variables in a text, by the heads of their columns."""
    rows: list[dict[str, str]] = []
    head: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if line.startswith("| Variable "):
            head = cells
        elif line.startswith("| `HL_"):
            rows.append(dict(zip(head, cells, strict=True)))
    return rows


@pytest.mark.parametrize(("version", "size"), MODELS)
def test_a_preset_is_the_model_and_the_schedule_of_the_newest_script(version: str, size: str) -> None:
    config = read_command_line(["--config", LLAMA_PRESETS[version][size]], frozenset()).config
    model, training, optimizer = config.model, config.training, config.optimizer
    heads = model.num_attention_heads
    assert (
        *(model.hidden_size, heads, model.num_query_groups or heads, model.num_layers, model.ffn_hidden_size),
        *(optimizer.lr, optimizer.min_lr),
    ) == MODELS[version, size]
    assert (
        *(training.global_batch_size, training.seq_length, training.train_iters),
        *(optimizer.adam_eps, optimizer.lr_warmup_iters, model.rotary_base),
    ) == VERSIONS[version]
    adam = (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.weight_decay, optimizer.clip_grad)
    assert (adam, optimizer.lr_decay_style) == ((0.9, 0.95, 0.1, 1.0), "cosine")
