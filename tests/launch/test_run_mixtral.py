"""run_mixtral.sh: the variables of Habana's two scripts for Mixtral, their defaults, and what is refused."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.launch.dialects.hl_requests import from_environment
from megatron.launch.dialects.hl_variables import MIXTRAL_PRESETS, REFUSED, variables_of
from tests.ranks import HANG_S

ROOT = Path(__file__).resolve().parents[2]
# Commands of the guides of HabanaAI/Megatron-LM 1.24 and Megatron-DeepSpeed 1.19, and what the plan shows, or the
# variable that is refused.
HOSTS = f"HL_HOSTSFILE={ROOT / 'scripts' / 'hostsfile'} HL_NUM_NODES=4 HL_TP=8 HL_SEQ_PARALLEL=1 "
CORE = (
    "HL_CKP_ACT=3 HL_USE_FUSED_SDPA_WITH_RECOMPUTE=1 HL_MOE_DYNAMIC=1 HL_DIST_OPTIMIZER=1 HL_USE_LAZY_MODE=0 "
    "HL_USE_TORCH_COMPILE=1 HL_USE_TORCH_COMPILED_AUTOGRAD=0"
)
DEEPSPEED = "HL_DP=4 HL_MOE_EP=1 HL_MOE_ENABLE_EXPERT_TP=1 HL_ZERO_STAGE=1"
COMMANDS = [
    (f"{HOSTS} HL_DP=4 {CORE}", "PP 1 x TP 8 x DP 4"),
    (f"{HOSTS} HL_DP=2 HL_CP=2 {CORE}".replace("HL_CKP_ACT=3", "HL_CKP_ACT=0"), "PP 1 x TP 8 x CP 2 x DP 2"),
    (f"{HOSTS} {DEEPSPEED}", "PP 1 x TP 8 x DP 4"),
    (f"{HOSTS} {DEEPSPEED} HL_MOE_NUM_CAPACITY_BINS=10", "HL_MOE_NUM_CAPACITY_BINS=10"),
    (
        "HL_MIXTRAL_MODEL=small HL_TP=2 HL_DP=4",
        "8 layers, hidden 768, 16 heads|16384 samples = DP 4|out/mixtral_small/ds_",
    ),
    ("HL_MIXTRAL_MODEL=8x22b HL_ETP=1 HL_MOE_ZLOSS_COEFF=1e-3", "56 layers, hidden 6144, 48 heads"),
]
# All variables of experts and of Mixtral in these scripts, without HL_.
OWN = """
AUX_LOSS_COEFF CACHE_PATH CAPACITY_BINS_EXP_BASE DIST_OPTIMIZER EP ETP FP8_FORCE_SEQ_MOE LR_WARMUP_ITERS MIXTRAL_MODEL
MOE_AUX_LOSS_COEFF MOE_CAPACITY_BINS MOE_CAPACITY_BINS_ALIGNMENT MOE_CAPACITY_BINS_EXP_BASE
MOE_CAPACITY_BINS_MAX_OVERHEAD_FACTOR MOE_CAPACITY_BINS_OPTIMIZE_INTERVAL MOE_CAPACITY_BINS_OPTIMIZE_MAX_GROUP
MOE_DYNAMIC MOE_ENABLE_EXPERT_TP MOE_EP MOE_EXPERT_CAPACITY_FACTOR MOE_FUSED_WEIGHTS MOE_GROUPED_GEMM
MOE_LOAD_BALANCING_TYPE MOE_MIN_CAP MOE_NUM_CAPACITY_BINS MOE_NUM_EXPERTS MOE_PAD_EXPERT_INPUT_TO_CAPACITY
MOE_PERMUTED_WEIGHTS MOE_ROUTER_FP32 MOE_ROUTER_PRE_SOFTMAX MOE_TOKEN_DISTRIBUTION_LOGGING
MOE_TOKEN_DISTRIBUTION_LOGGING_INTERVAL MOE_TOKEN_DROP_POLICY MOE_TOPK MOE_USE_DATA_BEFORE_EXPERT_PARALLEL
MOE_ZLOSS_COEFF PARTITIONED_MODE TOKEN_DISPATCHER_TYPE TOKEN_DROP USE_FLASH_ATTN
"""


def planned(folder: Path, variables: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The plan of the script for HPU, in an empty folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HL_")}
    given = {"HL_DRY_RUN": "1", "HL_DEVICE": "hpu"} | dict(word.split("=", 1) for word in shlex.split(variables))
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "run_mixtral.sh"), *arguments],
        cwd=folder,
        env=environment | {"PYTHON": sys.executable} | given,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


@pytest.mark.parametrize(("variables", "said"), COMMANDS)
def test_a_published_command_prints_its_plan_or_names_the_variable(tmp_path: Path, variables: str, said: str) -> None:
    plan = planned(tmp_path, variables)
    if said.startswith("HL_"):
        assert plan.returncode == 2
        assert f"\n  - {said} is not supported" in plan.stderr
    else:
        assert plan.returncode == 0, plan.stderr
        assert [part for part in said.split("|") if part not in plan.stdout] == []
    assert list(tmp_path.iterdir()) == []


def test_every_variable_of_habanas_scripts_has_a_row_of_its_own() -> None:
    known = {row.name for row in (*variables_of("mixtral"), *REFUSED)}
    assert [name for name in OWN.split() if f"HL_{name}" not in known] == []


def test_defaults_are_habanas(tmp_path: Path) -> None:
    plan = planned(tmp_path, "").stdout
    for said in (
        *("1 node x 8 hpu devices", "PP 1 x TP 8 x DP 1, sequence parallel", "32 layers, hidden 4096, 32 heads"),
        *("sequence 32768", "128 samples = DP 1 x micro 1", "250,000 steps", "out/mixtral_8x7b/ds_"),
        *("--data-path /data/datasets/red_pajama/medium", "--moe-aux-loss-coeff 2e-2", "--optimizer fusedadamw"),
    ):
        assert said in plan


def flags_of(variables: str, *arguments: str) -> dict[str, str]:
    """The flags that variables set, by name."""
    request = from_environment(dict(word.split("=", 1) for word in variables.split()), "mixtral", list(arguments))
    assert request.faults == []
    found: dict[str, str] = {}
    for flag, values in re.findall(r"(--\S+)((?: (?!--)\S+)*)", " ".join(request.train_flags)):
        found[flag] = values.strip()
    return found


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ("HL_CP=2 HL_CP_COMM_TYPE=p2p", {"--context-parallel-size": "2", "--context-parallel-exchange": "ring"}),
        ("HL_CP=2 HL_CP_COMM_TYPE=a2a", {"--context-parallel-exchange": "all-to-all"}),
        ("HL_CKP_ACT=3", {"--recompute-granularity": "selective", "--recompute-modules": "mlp"}),
        ("HL_MOE_EP=4", {"--expert-model-parallel-size": "4"}),
        ("HL_EP=4", {"--expert-model-parallel-size": "4"}),
        ("HL_ETP=1", {"--expert-tensor-parallel-size": "1"}),
        ("HL_MOE_ENABLE_EXPERT_TP=0", {"--expert-tensor-parallel-size": "1"}),
        ("HL_ETP=0 HL_MOE_ENABLE_EXPERT_TP=1", {"--expert-tensor-parallel-size": "none"}),
        ("HL_MOE_TOPK=1 HL_MOE_NUM_EXPERTS=4", {"--moe-router-topk": "1", "--num-experts": "4"}),
        ("HL_MOE_ROUTER_PRE_SOFTMAX=1", {"--moe-router-pre-softmax": "true"}),
        ("HL_AUX_LOSS_COEFF=1e-2", {"--moe-aux-loss-coeff": "1e-2"}),
        ("HL_MOE_ZLOSS_COEFF=1e-3", {"--moe-z-loss-coeff": "1e-3"}),
        ("HL_MOE_EXPERT_CAPACITY_FACTOR=1.5", {"--moe-expert-capacity-factor": "1.5"}),
        ("HL_MOE_EXPERT_CAPACITY_FACTOR=1.5 HL_MOE_DYNAMIC=0", {"--moe-expert-capacity-factor": "1.5"}),
        ("HL_DIST_OPTIMIZER=1", {"--zero-stage": "1"}),
        ("HL_CACHE_PATH=/c", {"--data-cache-path": "/c"}),
        ("HL_LR_WARMUP_ITERS=9", {"--lr-warmup-iters": "9"}),
    ],
)
def test_a_variable_sets_its_flag(variables: str, flags: dict[str, str]) -> None:
    found = flags_of(variables)
    assert {name: found.get(name) for name in flags} == flags


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ("HL_TP=8 HL_DP=1", "1"),
        ("HL_TP=8 HL_DP=1 HL_ETP=1", "8"),
        ("HL_TP=2 HL_DP=4", "4"),
        ("HL_TP=2 HL_CP=2 HL_DP=2", "4"),
        ("HL_TP=1 HL_DP=16", "8"),
        ("HL_TP=1 HL_DP=6", "2"),
        ("HL_TP=2 HL_DP=4 HL_MOE_NUM_EXPERTS=6", "2"),
        ("HL_TP=1 HL_DP=8 HL_MOE_EP=2", "2"),
        ("HL_DP=8 HL_ZERO_STAGE=3", None),
        ("HL_CONFIG=tiny_llama HL_DP=8", "1"),
    ],
)
def test_experts_lie_over_as_many_ranks_as_fit(variables: str, ranks: str | None) -> None:
    assert flags_of(variables).get("--expert-model-parallel-size") == ranks


def test_arguments_count_for_the_ranks_of_experts() -> None:
    found = flags_of("HL_TP=2 HL_DP=4 HL_ETP=1", "--tensor-model-parallel-size", "1")
    assert found["--expert-model-parallel-size"] == "4"
    assert flags_of("HL_DP=4", "--expert-model-parallel-size", "2")["--expert-model-parallel-size"] == "2"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ("HL_MIXTRAL_MODEL=9b", "HL_MIXTRAL_MODEL='9b' must be 8x7b, 8x22b or small"),
        ("HL_CP_COMM_TYPE=a2a+p2p", "HL_CP_COMM_TYPE='a2a+p2p' must be p2p or a2a; all layers exchange alike"),
        ("HL_CP_COMM_TYPE=all_gather", "and no rank gathers whole rows"),
        ("HL_MOE_EP=2 HL_EP=4", "set --expert-model-parallel-size differently"),
        ("HL_ETP=1 HL_MOE_ENABLE_EXPERT_TP=1", "set --expert-tensor-parallel-size differently"),
        ("HL_MOE_DYNAMIC=1 HL_MOE_EXPERT_CAPACITY_FACTOR=1", "set --moe-expert-capacity-factor differently"),
        ("HL_MOE_TOKEN_DROP_POLICY=position", "HL_MOE_TOKEN_DROP_POLICY=position is not supported: the choices with"),
        ("HL_MOE_LOAD_BALANCING_TYPE=sinkhorn", "HL_MOE_AUX_LOSS_COEFF=0 for none. Set aux_loss"),
        ("HL_MOE_NOVELTY=1", "docs/guides/experts.md has those there are. Unset it"),
    ],
)
def test_a_wrong_variable_is_one_fault(variables: str, said: str) -> None:
    (fault,) = from_environment(dict(word.split("=") for word in variables.split()), "mixtral", []).faults
    assert said in fault


def test_each_size_has_a_preset() -> None:
    assert all((ROOT / "megatron" / "presets" / f"{preset}.yaml").is_file() for preset in MIXTRAL_PRESETS.values())
