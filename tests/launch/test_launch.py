"""The launcher refuses what cannot run, all faults at once and before anything starts; and it ends what it started."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.cli import launch
from megatron.launch import checks
from megatron.launch.agents import agent, hosts, node_ranks
from megatron.launch.dialects.hl_requests import from_environment
from megatron.launch.dialects.hl_variables import REFUSED, VARIABLES, Script
from megatron.launch.plan import FineTuning, Host, LaunchPlan, LaunchRequest, RefusedError, parse_hostsfile
from megatron.launch.preflight import preflight
from megatron.options.stored import PRESETS_DIR
from megatron.plan.flops import declared_layers
from megatron.runtime.files import IMPORT_ROOT
from tests.finetuning_files import write_config, write_tokens
from tests.launch.test_agent import wait_until_gone
from tests.ranks import free_port

PRESETS = sorted(path.stem for path in PRESETS_DIR.glob("*.yaml"))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go to a folder of the test; no HL_* variable of the tester is seen."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("HL_") or name.endswith("VISIBLE_DEVICES"):
            monkeypatch.delenv(name)


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    return write_tokens(tmp_path / "corpus")


def hosts_of(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "hosts"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def tiny(*flags: str, **request: Any) -> LaunchRequest:
    return LaunchRequest(device="cpu", train_flags=["--config", "tiny_bloom", *flags], **request)


# samples for every layout here
PROFILE_STEPS = ["--profile-step-start", "3", "--profile-step-end", "5"]
ENOUGH = ("--global-batch-size", "128")


def faults(request: LaunchRequest) -> list[str]:
    with pytest.raises(RefusedError) as refused:
        preflight(request)
    return refused.value.faults


def translated(variables: dict[str, str], script: Script = "bloom13b", *passed_on: str) -> LaunchRequest:
    return from_environment(variables, script, list(passed_on))


def flag_values(flags: tuple[str, ...] | list[str], flag: str) -> list[str]:
    """What follows each occurrence of a flag."""
    return [flags[place + 1] for place, word in enumerate(flags) if word == flag]


# ---------------------------------------------------------------------------------------------------------------------
# The hostsfile


def test_hostsfile_skips_comments_and_blank_lines() -> None:
    text = "# ours\n\n  worker-0 slots=8  # rack 1\n\tuser@10.0.0.2\tslots=4\n"
    hosts, wrong = parse_hostsfile(text, "hosts")
    assert not wrong
    assert [(host.name, host.address, host.slots, host.line) for host in hosts] == [
        ("worker-0", "worker-0", 8, 3),
        ("user@10.0.0.2", "10.0.0.2", 4, 4),
    ]


def test_a_byte_order_mark_is_named_once() -> None:
    hosts, wrong = parse_hostsfile("\ufeffworker-0 slots=8\nworker-1 slots=8\n", "hosts")
    assert [host.name for host in hosts] == ["worker-0", "worker-1"]
    assert wrong == ["hosts begins with a byte order mark; save it as UTF-8 without one"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("worker-1", "is not `<host> slots=<n>`"),
        ("worker-1 slots=8 slots=8", "is not `<host> slots=<n>`"),
        ("worker-1 8", "is not `<host> slots=<n>`"),
        ("worker-1 slots=", "slots must be a whole number above 0"),
        ("worker-1 slots=0", "slots must be a whole number above 0"),
        ("worker-1 slots=-1", "slots must be a whole number above 0"),
        ("worker-1 slots=eight", "slots must be a whole number above 0"),
        ("worker-0 slots=8", "repeats the host of line 1"),
        ("-oProxyCommand=x slots=8", "does not start with a host name"),
        ("a,b slots=8", "does not start with a host name"),
    ],
)
def test_a_wrong_hostsfile_line_is_named(line: str, said: str) -> None:
    hosts, wrong = parse_hostsfile(f"worker-0 slots=8\n# x\n{line}\n", "hosts")
    assert len(hosts) == 1
    assert len(wrong) == 1
    assert wrong[0].startswith("hosts, line 3: ")
    assert said in wrong[0]


def test_every_wrong_line_is_reported() -> None:
    assert len(parse_hostsfile("a\nb slots=0\nc slots=1\nc slots=1\n", "hosts")[1]) == 3


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["w0 slots=8"], "lists 1 hosts for 2 nodes"),
        (["w0 slots=8", "w1 slots=4"], "line 2: w1 has slots=4, fewer than the 8 devices"),
        (["localhost slots=8", "w1 slots=8"], "line 1: localhost means another machine on every node"),
        (["127.0.1.1 slots=8", "w1 slots=8"], "line 1: 127.0.1.1 means another machine on every node"),
        (["w0 slots=8", "me@LocalHost slots=8"], "line 2: me@LocalHost means another machine on every node"),
        (["::1 slots=8", "w1 slots=8"], "line 1: ::1 means another machine on every node"),
        (["ssh:2001:db8::1 slots=8", "w1 slots=8"], "ssh:2001:db8::1 are example addresses"),
        (["192.0.2.1 slots=8", "w1 slots=8"], "192.0.2.1 are example addresses"),
        (["# none"], "lists 0 hosts for 2 nodes"),
    ],
)
def test_hosts_that_cannot_run_are_refused(tmp_path: Path, dataset: str, lines: list[str], said: str) -> None:
    request = tiny("--data-path", dataset, nodes=2, devices_per_node=8, hostsfile=hosts_of(tmp_path, *lines))
    assert any(said in fault for fault in faults(request))


def test_nodes_without_hostsfile_are_refused(dataset: str) -> None:
    assert any("2 nodes need a hostsfile" in fault for fault in faults(tiny("--data-path", dataset, nodes=2)))


def test_missing_and_unreadable_hostsfiles_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, said in ((tmp_path / "no", "does not exist"), (binary, "cannot be read"), (tmp_path, "cannot be read")):
        assert any(said in fault for fault in faults(tiny(hostsfile=str(path))))


# ---------------------------------------------------------------------------------------------------------------------
# Preflight


def test_a_right_run_passes(dataset: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    plan = preflight(tiny("--data-path", dataset, "--pipeline-model-parallel-size", "2", data_parallel_size=2))
    assert (plan.nodes, plan.devices_per_node, plan.hosts) == (1, 4, ())
    assert plan.environment["DS_ACCELERATOR"] == plan.config.parallel.device == "cpu"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("request_values", "said"),
    [
        ({"data_parallel_size": 3, "devices_per_node": 4}, "= 3 ranks, but nodes x devices = 1 x 4 = 4"),
        ({"data_parallel_size": 2, "devices_per_node": 4}, "use a data-parallel size of 4, or 2 devices a node"),
        (
            {"data_parallel_size": 1, "devices_per_node": 4, "context_parallel_size": 2},
            "data-parallel 1 x tensor-parallel 1 x context-parallel 2 x pipeline-parallel 1 = 2 ranks, but nodes x "
            "devices = 1 x 4 = 4; use a data-parallel size of 2, or 2 devices a node",
        ),
    ],
)
def test_layout_must_fill_the_devices(dataset: str, request_values: dict[str, Any], said: str) -> None:
    flags = ["--context-parallel-size", str(request_values.pop("context_parallel_size", 1))]
    assert said in "".join(faults(tiny("--data-path", dataset, *flags, **request_values)))


def test_every_config_fault_comes_with_those_of_the_launch(tmp_path: Path) -> None:
    request = tiny(
        *("--lrr", "1", "--pipeline-model-parallel-size", "9", "--tensor-model-parallel-size", "3"),
        *("--global-batch-size", "7", "--data-path", str(tmp_path / "nothing")),
        nodes=2,
        data_parallel_size=1,
    )
    text = "\n".join(faults(request))
    for said in (
        "unknown flag --lrr",
        "pipeline_model_parallel_size=9 is larger than num_layers=4",
        "tensor_model_parallel_size=3 does not divide num_attention_heads=4",
        "global_batch_size=7",
        "2 nodes need a hostsfile",
        "27 ranks, but nodes x devices = 2 x 8 = 16",
    ):
        assert said in text


def test_missing_and_empty_data_are_refused(tmp_path: Path) -> None:
    missing, half, empty = (str(tmp_path / name) for name in ("missing", "half", "empty"))
    Path(half + ".bin").write_bytes(b"x")
    for ending in (".bin", ".idx"):
        Path(empty + ending).touch()
    text = "\n".join(faults(tiny("--data-path", "1", missing, "2", half, "3", empty)))
    assert f"dataset {missing} lacks {missing}.bin and {missing}.idx" in text
    assert f"dataset {half} lacks {half}.idx" in text
    assert f"dataset {empty}: {empty}.bin and {empty}.idx is empty" in text


def test_a_data_file_instead_of_its_prefix_is_explained(dataset: str) -> None:
    assert f"share, {dataset}" in "".join(faults(tiny("--data-path", dataset + ".bin")))


def test_a_missing_tokenizer_file_is_refused(dataset: str) -> None:
    flags = ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", "no.json"]
    assert "tokenizer_model=no.json does not exist" in "".join(faults(tiny("--data-path", dataset, *flags)))


@pytest.mark.parametrize("option", ["results-dir", "tensorboard-dir", "save", "data-cache-path"])
def test_a_folder_that_cannot_be_made_is_refused(option: str, dataset: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below" / "deep"
    (fault,) = faults(tiny("--data-path", dataset, f"--{option}", str(folder)))
    assert f"{tmp_path / 'file'} is not a folder" in fault
    assert option.replace("-", "_") in fault


@pytest.mark.parametrize("option", ["results-dir", "tensorboard-dir", "save", "data-cache-path", "wandb-save-dir"])
def test_a_folder_in_which_no_file_can_be_made_is_refused(option: str, dataset: str) -> None:
    """Also where permissions allow it, as in /proc, and for root everywhere."""
    (fault,) = faults(tiny("--data-path", dataset, f"--{option}", "/proc/runs/deep"))
    assert f"{option.replace('-', '_')}=/proc/runs/deep cannot be written: /proc: " in fault


def test_load_must_be_a_checkpoint_folder_or_the_empty_one_of_the_run(dataset: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    loads = ("--data-path", dataset, "--load", str(folder))
    own, other = tiny(*loads, "--save", str(folder)), tiny(*loads)
    nothing = "there are no weights to start from"
    for state in ("missing", "empty", "as a run leaves it that was killed before its first checkpoint"):
        preflight(own)
        assert nothing in faults(other)[0], state
        assert nothing in faults(tiny(*loads, "--save", str(folder), "--finetune"))[0], state
        assert nothing in preflight(dataclasses.replace(other, dry_run=True)).warnings[0], state
        folder.mkdir(exist_ok=True)
        if state == "empty":
            (folder / ".lock").touch()
    begun = tmp_path / "begun" / "global_step2"
    begun.mkdir(parents=True)
    (begun / "checkpoint.json").touch()
    preflight(tiny(*loads, "--save", str(begun.parent)))  # what it began with is needed no more
    (folder / "notes.txt").touch()
    assert "holds no checkpoint" in faults(own)[0]
    (folder / "latest").write_text("global_step1\n")
    assert "holds no checkpoint" in faults(own)[0]
    (folder / "global_step1").mkdir()
    (folder / "global_step1" / "checkpoint.json").touch()
    preflight(own)  # which the run itself validates
    assert "is not a folder" in faults(tiny("--data-path", dataset, "--load", dataset + ".bin"))[0]


def test_a_script_that_saves_nothing_loads_only_what_is_there(tmp_path: Path) -> None:
    """HL_SAVE=0: the folder of its checkpoints stays empty."""
    variables = {"HL_SAVE": "0", "HL_CONFIG": "tiny_bloom", "HL_DEVICE": "cpu", "HL_DRY_RUN": "1"}
    plan = preflight(translated(variables))
    assert plan.config.checkpoint.load is None
    assert not any("no weights to start from" in warning for warning in plan.warnings)
    saved = tmp_path / "results" / "checkpoints"
    (saved / "global_step2").mkdir(parents=True)
    (saved / "global_step2" / "checkpoint.json").touch()
    plan = preflight(translated(variables | {"HL_RESULTS_DIR": str(saved.parent)}))
    assert plan.config.checkpoint.load == str(saved)


def test_a_plan_needs_a_models_config_alone(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    described = shlex.split("--architecture llama --num-layers 2 --hidden-size 64 --ffn-hidden-size 128")
    described += shlex.split("--num-attention-heads 4 --num-query-groups 2 --vocab-size 278 --norm-epsilon 1e-6")
    described += shlex.split("--position-embedding-type rope --untie-embeddings-and-output-weights --train-iters 4")
    request = LaunchRequest(device="cpu", train_flags=[*described, "--load", str(folder)], dry_run=True)
    assert any("holds config.json, but no weights" in warning for warning in preflight(request).warnings)
    assert any("but no weights" in fault for fault in faults(dataclasses.replace(request, dry_run=False)))


def test_a_contradicting_deepspeed_json_is_refused(dataset: str, tmp_path: Path) -> None:
    (tmp_path / "extra.json").write_text('{"train_batch_size": 7}')
    request = tiny("--data-path", dataset, "--deepspeed-config", str(tmp_path / "extra.json"))
    assert "train_batch_size" in "".join(faults(request))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--attention-backend", "fused_hpu"], "attention_backend=fused_hpu runs on hpu only, but device=cpu"),
        (["--attention-backend", "flex", "--attention-dropout", "0"], "runs on cuda only, but device=cpu"),
        (["--fp16"], "fp16 is not supported on this CPU"),
    ],
)
def test_the_rules_of_the_device_that_is_found_are_applied_before_launch(
    flags: list[str], said: str, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.runtime.device_cpu.missing_products", lambda: {"fp16"})
    monkeypatch.setattr("megatron.launch.preflight.detect_device", lambda *, allow_hpu: "cpu")
    request = tiny("--data-path", dataset, *flags)
    request.device = "auto"
    (fault,) = faults(request)
    assert said in fault


def test_arguments_choose_the_device_over_variables() -> None:
    variables = {"HL_DEVICE": "cpu", "HL_DRY_RUN": "1", "HL_CONFIG": "tiny_bloom", "HL_NGPU_PER_NODE": "1"}
    plan = preflight(translated(variables, "bloom13b", "--device", "hpu"))
    assert plan.config.parallel.device == "hpu"


def test_too_few_accelerators_are_refused(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    request = tiny("--data-path", dataset, "--global-batch-size", "64", data_parallel_size=8)
    request.device = "cuda"
    assert "8 cuda devices are needed, but CUDA_VISIBLE_DEVICES=0,1 leaves 2 of this machine's" in "".join(
        faults(request)
    )


def test_other_machines_find_their_device_themselves(tmp_path: Path) -> None:
    hostsfile = hosts_of(tmp_path, "w0 slots=8", "w1 slots=8")
    request = tiny(*ENOUGH, nodes=2, hostsfile=hostsfile, dry_run=True, data_parallel_size=16)
    request.device = "auto"
    plan = preflight(request)
    assert plan.config.parallel.device == "auto"
    assert "DS_ACCELERATOR" not in plan.environment


def test_remote_runs_need_pdsh(tmp_path: Path, dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".deepspeed_env").write_text("A=1\n\n")
    hostsfile = hosts_of(tmp_path, "w0 slots=8", "w1 slots=8")
    text = "\n".join(faults(tiny("--data-path", dataset, "--save", "a%nb", nodes=2, hostsfile=hostsfile)))
    assert "pdsh is not installed" in text
    assert ".deepspeed_env, line 2: ''" in text
    assert "'a%nb' holds a %" in text


# ---------------------------------------------------------------------------------------------------------------------
# HL_* variables


@pytest.mark.parametrize(
    ("variable", "value", "flags"),
    [
        ("HL_NUM_LAYERS", "8", ["--num-layers", "8"]),
        ("HL_SEQ_LEN", "256", ["--seq-length", "256"]),
        ("HL_MICRO_BATCH", "2", ["--micro-batch-size", "2"]),
        ("HL_GBS", "64", ["--global-batch-size", "64"]),
        ("HL_TP", "4", ["--tensor-model-parallel-size", "4"]),
        ("HL_PP", "2", ["--pipeline-model-parallel-size", "2"]),
        ("HL_ZERO_STAGE", "0", ["--zero-stage", "0"]),
        ("HL_EXIT_INTERVAL", "0", ["--exit-interval", "0"]),
        ("HL_SAVE_INTERVAL", "5", ["--save-interval", "5"]),
        ("HL_LOG_INTERVAL", "1", ["--log-interval", "1"]),
        ("HL_EVAL_ITERS", "0", ["--eval-iters", "0"]),
        ("HL_EVAL_INTERVAL", "7", ["--eval-interval", "7"]),
        ("HL_TRAIN_ITERS", "9", ["--train-iters", "9"]),
        ("HL_KILL_SWITCH", "/k", ["--kill-switch-path", "/k"]),
        ("HL_TENSORBOARD_DIR", "tb", ["--tensorboard-dir", "tb"]),
        ("HL_CKP_ACT", "0", ["--recompute-granularity", "none"]),
        ("HL_CKP_ACT", "1", ["--recompute-granularity", "full"]),
        ("HL_CKP_ACT", "2", ["--recompute-granularity", "selective"]),
        ("HL_RAMPUP_BS", "1", ["--rampup-batch-size", "16", "16", "5000000"]),
        ("HL_RAMPUP_BS", "0", ["--rampup-batch-size", "none"]),
        ("HL_SEQ_PARALLEL", "1", ["--sequence-parallel", "true"]),
        ("HL_SEQ_PARALLEL", "0", ["--sequence-parallel", "false"]),
        ("HL_NO_PIPELINE_PARALLEL", "1", ["--no-pipeline-parallel", "true"]),
        ("HL_OPTIMIZER", "fusedadamw", ["--optimizer", "fusedadamw"]),
        ("HL_GRAD_ACCUM_DTYPE", "bf16", ["--grad-accum-dtype", "bf16"]),
        ("HL_DROPOUT", "0.2", ["--hidden-dropout", "0.2", "--attention-dropout", "0.2"]),
        ("HL_POSITION_EMBEDDING_TYPE", "rotary", ["--position-embedding-type", "rope"]),
        ("HL_POSITION_EMBEDDING_TYPE", "alibi", ["--position-embedding-type", "alibi"]),
        ("HL_USE_FUSED_SDPA", "0", ["--attention-backend", "sdpa"]),
        ("HL_USE_FUSED_RMSNORM", "0", ["--use-fused-rmsnorm", "false"]),
        ("HL_USE_FAST_SOFTMAX", "1", ["--use-fast-softmax", "true"]),
        ("HL_USE_TORCH_COMPILE", "true", ["--torch-compile", "true"]),
        ("HL_PROFILE", "pt", ["--profile", "true", *PROFILE_STEPS]),
        (
            "HL_PROFILE",
            "pt-full",
            [
                *("--profile", "true", *PROFILE_STEPS),
                *("--pytorch-profiler-collect-shapes", "true", "--pytorch-profiler-collect-callstack", "true"),
            ],
        ),
        ("HL_PROFILE_STEPS", "3,4", PROFILE_STEPS),
        ("HL_RESULTS_DIR", "r", ["--results-dir", "r"]),
        ("HL_DATA_FILE_PREFIX", "/d/p", ["--data-path", "/d/p"]),
        ("HL_DATA_IDX_DIR", "/c", ["--data-cache-path", "/c"]),
        ("HL_DATA_CACHE_DIR", "/c", ["--data-cache-path", "/c"]),
        ("HL_TOKENIZER_TYPE", "HuggingFaceTokenizer", ["--tokenizer-type", "HuggingFaceTokenizer"]),
        ("HL_TOKENIZER_TYPE", "Llama3Tokenizer", ["--tokenizer-type", "TikTokenizer", "--tiktoken-pattern", "llama3"]),
        ("HL_HIDDEN_SIZE", "64", ["--hidden-size", "64"]),
        ("HL_NUM_HEADS", "4", ["--num-attention-heads", "4"]),
        ("HL_NUM_QUERY_GROUPS", "2", ["--num-query-groups", "2"]),
        ("HL_FFN_HIDDEN_SIZE", "96", ["--ffn-hidden-size", "96"]),
        ("HL_KILL_SWITCH_FILE", "/k", ["--kill-switch-path", "/k"]),
        ("HL_LOAD_DIR", "/l", ["--load", "/l"]),
        ("HL_NO_LOAD_OPTIM", "1", ["--no-load-optim", "true"]),
        ("HL_SKIP_TRAIN", "1", ["--skip-train", "true"]),
        ("HL_BF16", "0", ["--bf16", "false"]),
        ("HL_NUM_WORKERS", "0", ["--num-workers", "0"]),
        ("HL_TORCH_COMPILE_DISABLE", "1", ["--torch-compile", "false"]),
        ("HL_TORCH_COMPILE_DISABLE", "0", []),
        ("HL_USE_FUSED_SDPA_WITH_RECOMPUTE", "0", ["--fused-sdpa-recompute", "false"]),
        ("HL_USE_DISTRIBUTED_OPTIMIZER", "1", ["--zero-stage", "1"]),
        ("HL_PROFILE_RANKS", "0 4", ["--profile-ranks", "0", "4"]),
        (
            "HL_PROFILE_TYPE",
            "pt",
            ["--profile", "true", "--profile-step-start", "3", "--profile-step-end", "4"],
        ),
        ("HL_TOKENIZER_MODEL", "t.json", ["--tokenizer-model", "t.json"]),
    ],
)
def test_a_variable_becomes_its_flags(variable: str, value: str, flags: list[str]) -> None:
    unset, request = translated({}), translated({variable: value})
    assert not request.faults
    assert not request.environment
    added = list(request.train_flags)
    for flag in unset.train_flags:
        added.remove(flag)
    assert added == flags


@pytest.mark.parametrize(
    ("variables", "attribute", "value"),
    [
        ({"HL_NUM_NODES": "4"}, "nodes", 4),
        ({"HL_DP": "4"}, "data_parallel_size", 4),
        ({"HL_NGPU_PER_NODE": "4"}, "devices_per_node", 4),
        ({"HL_DEVICES_PER_NODE": "2"}, "devices_per_node", 2),
        ({"HL_HOSTSFILE": "h"}, "hostsfile", "h"),
        ({"HL_DRY_RUN": "1"}, "dry_run", True),
        ({"HL_DRY_RUN": "0"}, "dry_run", False),
        ({"HL_SAVE": "0"}, "save", False),
        ({}, "save", True),
        ({"HL_CHECKPOINTS_DIR": "c"}, "checkpoints_dir", "c"),
        ({"HL_QNPU_DIR": "q"}, "activate", "q"),
        ({"HL_DEVICE": "cpu"}, "device", "cpu"),
        ({"HL_USE_HPU": "1"}, "device", "hpu"),
        ({"HL_USE_HPU": "0"}, "device", "no-hpu"),
        ({}, "device", "auto"),
        ({"HL_USE_LAZY_MODE": "0"}, "lazy", False),
        ({"HL_USE_LAZY_MODE": "1"}, "lazy", True),
        ({"HL_ENV_FLAGS": "A=1, B_2=x=y"}, "environment", {"A": "1", "B_2": "x=y"}),
        (
            {"HL_HNIC": "1", "HL_NUM_NODES": "2", "HL_FI_PROVIDER": "tcp"},
            "environment",
            {"HCCL_OVER_OFI": "1", "HCCL_GAUDI_DIRECT": "1", "FI_PROVIDER": "tcp"},
        ),
        # what is given beats a default
        (
            {"HL_HNIC": "1", "HL_NUM_NODES": "2", "HL_ENV_FLAGS": "HCCL_GAUDI_DIRECT=0,FI_PROVIDER=tcp"},
            "environment",
            {"HCCL_OVER_OFI": "1", "HCCL_GAUDI_DIRECT": "0", "FI_PROVIDER": "tcp"},
        ),
        ({"HL_RESULTS_DIR_PREFIX": "/r"}, "results_parent", "/r/out/bloom13b"),
        ({"HL_CONFIG": "tiny_bloom"}, "results_parent", "out/tiny_bloom"),
        ({"HL_CONFIG": "my/run.yaml"}, "results_parent", "out/run"),
    ],
)
def test_a_variable_says_where_to_launch(variables: dict[str, str], attribute: str, value: object) -> None:
    request = translated(variables)
    assert not request.faults
    assert getattr(request, attribute) == value


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"HL_GBS": "many"}, "HL_GBS='many' must be a whole number, 1 or more"),
        ({"HL_TP": "0"}, "HL_TP='0' must be a whole number, 1 or more"),
        ({"HL_DP": "2.5"}, "HL_DP='2.5' must be"),
        ({"HL_SAVE": "yes"}, "HL_SAVE='yes' must be 0 or 1"),
        ({"HL_RAMPUP_BS": "2"}, "HL_RAMPUP_BS='2' must be 0 or 1"),
        ({"HL_CKP_ACT": "4"}, "HL_CKP_ACT='4' must be 0, 1, 2 or 3 (4 is 1 by another engine)"),
        ({"HL_MOE_EP": "2"}, "it belongs to scripts/run_mixtral.sh and scripts/run_sft.sh and scripts/run_dpo.sh"),
        ({"HL_PROFILE": "hltv"}, "HL_PROFILE='hltv' needs Habana's trace viewer"),
        ({"HL_PROFILE_STEPS": "3"}, "HL_PROFILE_STEPS='3' must be two iterations"),
        ({"HL_OPTIMIZER": "lamb"}, "must be adamw, adam, sgd, fusedadamw, paged_adamw_32bit or muon"),
        ({"HL_DEVICE": "gpu"}, "HL_DEVICE='gpu' must be auto, hpu, cuda, cpu, or your own"),
        ({"HL_DEVICE": "cuda", "HL_USE_HPU": "1"}, "HL_USE_HPU=1 contradicts HL_DEVICE=cuda"),
        ({"HL_DEVICE": "hpu", "HL_USE_HPU": "0"}, "HL_USE_HPU=0 contradicts HL_DEVICE=hpu"),
        ({"HL_NGPU_PER_NODE": "8", "HL_DEVICES_PER_NODE": "4"}, "mean the same thing"),
        ({"HL_DATA_IDX_DIR": "a", "HL_DATA_CACHE_DIR": "b"}, "mean the same thing"),
        ({"HL_KILL_SWITCH": "/a", "HL_KILL_SWITCH_FILE": "/b"}, "set --kill-switch-path differently"),
        ({"HL_ZERO_STAGE": "2", "HL_USE_DISTRIBUTED_OPTIMIZER": "1"}, "set --zero-stage differently"),
        ({"HL_USE_TORCH_COMPILE": "1", "HL_TORCH_COMPILE_DISABLE": "1"}, "set --torch-compile differently"),
        ({"HL_PROFILE_STEPS": "3,4", "HL_PROFILE_STEP_END": "9"}, "set --profile-step-end differently"),
        ({"HL_ENV_FLAGS": "A=1,B"}, "'B' is not NAME=VALUE"),
        ({"HL_ENV_FLAGS": "A=1 B=2"}, "'A=1 B=2' is not NAME=VALUE"),
        ({"HL_ENV_FLAGS": "A=1,B=3,A=2"}, "A has two values"),
        (
            {"HL_ENV_FLAGS": "PT_HPU_LAZY_MODE=1", "HL_USE_LAZY_MODE": "0"},
            "HL_USE_LAZY_MODE=0 and PT_HPU_LAZY_MODE=1 in HL_ENV_FLAGS contradict each other",
        ),
        (
            {"HL_ENV_FLAGS": "PT_TE_LIMIT_GRAPH_SIZE=1", "HL_TE_LIMIT_GRAPH_SIZE": "0", "HL_FP8": "1"},
            "HL_TE_LIMIT_GRAPH_SIZE=0 and PT_TE_LIMIT_GRAPH_SIZE=1 in HL_ENV_FLAGS contradict each other",
        ),
        ({"HL_TRANSFORMER_IMPL": "lokal"}, "HL_TRANSFORMER_IMPL='lokal' must be transformer_engine or local"),
        ({"HL_HNIC": "1"}, "HL_HNIC=1 connects several nodes, but HL_NUM_NODES is 1"),
        ({"HL_FI_PROVIDER": "verbs"}, "HL_FI_PROVIDER=verbs needs HL_HNIC=1"),
        (
            {"HL_HNIC": "1", "HL_NUM_NODES": "2", "HL_FI_PROVIDER": "verbs", "HL_ENV_FLAGS": "FI_PROVIDER=tcp"},
            "HL_FI_PROVIDER=verbs and FI_PROVIDER=tcp in HL_ENV_FLAGS contradict each other",
        ),
        ({"HL_FI_PROVIDER": "verbs", "HL_HNIC": "false"}, "HL_FI_PROVIDER=verbs needs HL_HNIC=1"),
        ({"HL_DATA_DIR_ROOT": "/d"}, "needs HL_DATA_FILE_PREFIX"),
        ({"HL_TOKENIZER_TYPE": "Llama4"}, "HL_TOKENIZER_TYPE='Llama4' must be GPT2BPETokenizer, HFTokenizer"),
        ({"HL_QUIET": "2"}, "unknown variable HL_QUIET=2; docs/reference/variables.md lists the variables"),
        ({"HL_GSB": "8"}, "unknown variable HL_GSB=8; did you mean HL_GBS?"),
        ({"HL_LLAMA_VER": "2"}, "it belongs to scripts/run_llama.sh"),
    ],
)
def test_a_wrong_variable_is_one_fault(variables: dict[str, str], said: str) -> None:
    (fault,) = translated(variables).faults
    assert said in fault


def test_a_variable_of_fp8_alone_is_noted() -> None:
    given = {"HL_FP8_FORMAT": "e5m2", "HL_TE_LIMIT_GRAPH_SIZE": "1"}
    said = [
        f"{name}={value} has no effect without HL_FP8=1; set that, or leave it out" for name, value in given.items()
    ]
    assert translated(given).notes == said
    assert not translated(given | {"HL_FP8": "1"}).notes
    # spelled out defaults, and that there is none
    usual = {"HL_FP8_FORMAT": "hybrid", "HL_FP8_ENFORCE_BF16_AMAX_REDUCTION": "1", "HL_TRANSFORMER_IMPL": "local"}
    assert not translated(usual).notes


@pytest.mark.parametrize(
    ("script", "variables"),
    [("llama", "HL_LLAMA_VER=3.1"), ("llama", "HL_LLAMA_MODEL_SIZE=70"), ("mixtral", "HL_MIXTRAL_MODEL=8x22b")],
)
def test_a_size_beside_a_preset_is_refused(script: Script, variables: str) -> None:
    """It had no effect, in silence: the preset has a size of its own."""
    given = dict([variables.split("=")])
    (fault,) = translated(given | {"HL_CONFIG": "tiny_llama"}, script).faults
    assert fault == f"{variables} has no effect beside HL_CONFIG=tiny_llama (--config); leave one out"
    assert translated(given, script, "--config", "tiny_llama").faults == [fault]
    assert not translated({"HL_CONFIG": "tiny_llama"}, script).faults


@pytest.mark.parametrize("name", sorted(refused.name for refused in REFUSED))
def test_an_unsupported_variable_is_refused_by_name_unless_off(name: str) -> None:
    entry = next(refused for refused in REFUSED if refused.name == name)
    spelled = name.replace("*", "NOVELTY")
    (fault,) = translated({spelled: "7"}).faults
    assert fault == f"{spelled}=7 is not supported: {entry.text}"
    for off in (*entry.accepts, ""):
        assert not translated({spelled: off}).faults


@pytest.mark.parametrize("name", ["HL_LM_EVAL", "HL_RUN_EVAL_HARNESS", "HL_EVAL_TASKS"])
def test_a_variable_of_lm_eval_is_refused_with_those_that_do_it(name: str) -> None:
    (fault,) = translated({name: "hellaswag"}).faults
    assert {"HL_LM_EVAL_TASKS", "HL_TASKS"} <= set(re.findall(r"HL_\w+", fault)) & {known.name for known in VARIABLES}


def test_the_size_of_older_scripts_is_explained() -> None:
    (fault,) = translated({"HL_LLAMA_VER": "13"}, "llama").faults
    assert fault.endswith("for the size, set HL_LLAMA_VER=1 and HL_LLAMA_MODEL_SIZE=13")


@pytest.mark.parametrize(
    ("variables", "flags", "mode", "compiled"),
    [
        ({}, [], "1", False),
        ({"HL_USE_LAZY_MODE": "0"}, [], "0", True),
        ({"HL_USE_LAZY_MODE": "0", "HL_TORCH_COMPILE_DISABLE": "1"}, [], "0", False),
        ({"HL_USE_TORCH_COMPILE": "1"}, [], "0", True),
        ({}, ["--torch-compile"], "0", True),
        ({"HL_ENV_FLAGS": "PT_HPU_LAZY_MODE=0"}, [], "0", True),
    ],
)
def test_the_mode_of_an_hpu(variables: dict[str, str], flags: list[str], mode: str, compiled: bool) -> None:
    plan = preflight(translated({"HL_DEVICE": "hpu", "HL_DRY_RUN": "1", "HL_TP": "8"} | variables, "llama", *flags))
    assert plan.environment["PT_HPU_LAZY_MODE"] == mode
    assert plan.config.training.torch_compile is compiled
    assert (flag_values(plan.train_flags, "--torch-compile")[-1:] == ["true"]) is (compiled and not flags)
    assert ("lazy mode" in plan.notes[-1], "layers are compiled" in plan.notes[-1]) == (mode == "1", compiled)


def test_lazy_mode_and_compilation_exclude_each_other() -> None:
    both = {"HL_USE_LAZY_MODE": "1", "HL_USE_TORCH_COMPILE": "1", "HL_DEVICE": "hpu", "HL_DRY_RUN": "1", "HL_TP": "8"}
    (fault,) = faults(translated(both, "llama"))
    assert "exclude each other" in fault


@pytest.mark.parametrize(
    ("version", "size", "preset"),
    [("1", "65", "llama1_65b"), ("2", "34", "llama2_34b"), ("3.1", "405", "llama31_405b"), ("3.2", "1", "llama32_1b")],
)
def test_llama_version_and_size_pick_the_preset(version: str, size: str, preset: str) -> None:
    request = translated({"HL_LLAMA_VER": version, "HL_LLAMA_MODEL_SIZE": size}, "llama")
    assert flag_values(request.train_flags, "--config") == [preset]
    assert request.results_parent == f"out/llama{version}_{size}b"


@pytest.mark.parametrize(("version", "size"), [("4", "8"), ("3.1", "7"), ("2", "65"), ("3.2", "8")])
def test_a_llama_that_does_not_exist_is_refused(version: str, size: str) -> None:
    (fault,) = translated({"HL_LLAMA_VER": version, "HL_LLAMA_MODEL_SIZE": size}, "llama").faults
    assert "must be" in fault


@pytest.mark.parametrize(
    ("variables", "arguments", "option", "value"),
    [
        ({"HL_TRAIN_ITERS": "9"}, ["--train-samples", "4096"], ("train_samples", "train_iters"), (4096, None)),
        ({"HL_TRAIN_ITERS": "9"}, [], ("train_samples", "train_iters"), (None, 9)),
        (
            {"HL_RAMPUP_BS": "1", "HL_TRAIN_ITERS": "9"},
            [],
            ("train_iters", "rampup_batch_size"),
            (9, (16, 16, 5000000)),
        ),
    ],
)
def test_lengths_in_other_words_replace_each_other(
    variables: dict[str, str], arguments: list[str], option: tuple[str, str], value: tuple[object, object]
) -> None:
    base = {"HL_DRY_RUN": "1", "HL_DEVICE": "hpu", "HL_TP": "8"}
    training = preflight(translated(base | variables, "bloom13b", *arguments)).config.training
    assert tuple(getattr(training, name) for name in option) == value


@pytest.mark.parametrize("length", ["1024", "4096"])
def test_a_sequence_length_sets_the_rows_of_blooms_position_table(length: str) -> None:
    variables = {"HL_SEQ_LEN": length, "HL_DRY_RUN": "1", "HL_DEVICE": "hpu", "HL_TP": "8"}
    config = preflight(translated(variables)).config
    (shape,) = (
        layer.shards["position.weight"].shape for layer in declared_layers(config) if "position.weight" in layer.shards
    )
    assert shape[0] == int(length)


def test_arguments_win_over_variables() -> None:
    plan = preflight(
        translated(
            {"HL_GBS": "32", "HL_DRY_RUN": "1", "HL_CONFIG": "tiny_bloom", "HL_DEVICE": "cpu"},
            "bloom13b",
            "--global-batch-size",
            "64",
        )
    )
    assert plan.config.training.global_batch_size == 64


def test_gpt2_files_beside_the_data_are_its_tokenizer(tmp_path: Path) -> None:
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        (tmp_path / name).touch()
    flags = translated({"HL_DATA_DIR_ROOT": str(tmp_path), "HL_DATA_FILE_PREFIX": "p"}).train_flags
    assert flag_values(flags, "--tokenizer-type") == ["GPT2BPETokenizer"]
    assert flag_values(flags, "--vocab-file") == [str(tmp_path / "gpt2-vocab.json")]


@pytest.mark.parametrize("script", ["bloom13b", "llama"])
def test_no_files_stand_for_a_tokenizer_type_that_cannot_be_read(tmp_path: Path, script: Any) -> None:
    for name in ("gpt2-vocab.json", "gpt2-merges.txt", "tokenizer.json"):
        (tmp_path / name).touch()
    variables = {"HL_DATA_DIR_ROOT": str(tmp_path), "HL_DATA_FILE_PREFIX": "p", "HL_TOKENIZER_TYPE": "Bert"}
    request = translated(variables, script)
    assert len(request.faults) == 1
    assert not {"--tokenizer-type", "--tokenizer-model", "--vocab-file"}.intersection(request.train_flags)


def test_every_variable_is_known_once() -> None:
    names = [variable.name for variable in VARIABLES] + [refused.name for refused in REFUSED]
    assert len(names) == len(set(names))


def test_the_results_folder_is_named_after_the_run(dataset: str) -> None:
    root, prefix = os.path.split(dataset)
    variables = {
        "HL_DATA_DIR_ROOT": root,
        "HL_DATA_FILE_PREFIX": prefix,
        "HL_DEVICE": "cpu",
        "HL_DP": "2",
        "HL_TP": "4",
    }
    plan = preflight(translated(variables))
    (results,) = flag_values(plan.train_flags, "--results-dir")
    assert results.startswith("out/bloom13b/ds_z0_nl40_hs5120_gb1024_mb1_D2_T4_P1_devices8_")
    assert (
        flag_values(plan.train_flags, "--save") == flag_values(plan.train_flags, "--load") == [f"{results}/checkpoints"]
    )


def test_faults_are_explained_in_terms_of_the_variables(
    capsys: pytest.CaptureFixture[str], dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HL_CONFIG": "tiny_bloom", "HL_TP": "3", "HL_DP": "1", "HL_DEVICE": "cpu"}.items():
        monkeypatch.setenv(name, value)
    assert launch.main(["--variables", "bloom13b", "--", "--data-path", dataset]) == 2
    assert "HL_TP sets tensor_model_parallel_size" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Dry run


@pytest.mark.parametrize("preset", PRESETS)
def test_a_dry_run_prints_the_plan_of_every_preset(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dry-run", "--device", "hpu", "--devices-per-node", "4", "--", "--config", preset]
    tensor, copies = (1, 2) if preset == "falcon_7b" else (2, 1)  # 71 heads
    flags += ["--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", "2"]
    assert launch.main(flags) == 0
    shown = capsys.readouterr().out
    for said in (f"PP 2 x TP {tensor} x DP {copies}", "parameters", "bubble", "memory per rank", "tools/launch.py"):
        assert said in shown
    assert "warning: no dataset is given" in shown
    assert not list(tmp_path.iterdir())


ODD = "a b'c\"d$HOME`id`;&|*\\e"


@pytest.mark.parametrize(
    "request_values",
    [
        {},
        {"nodes": 2, "hostsfile": ODD, "master_port": 12345, "environment": {"A_B": ODD, "PT_HPU_LAZY_MODE": "0"}},
        {"max_restarts": 3, "min_nodes": 1, "nodes": 2, "rendezvous": "node0:29500", "devices_per_node": 2},
        {"fine_tuning": FineTuning(model="base", data=ODD, folder=None, chat_template="chatml")},
        {"fine_tuning": FineTuning(model="base", data=None, folder="chats")},
    ],
)
def test_a_shown_command_can_be_pasted(
    request_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ODD).write_text("10.0.0.1 slots=8\n10.0.0.2 slots=8\n")
    (tmp_path / "chats").mkdir()
    monkeypatch.setenv("MEGATRON_RUN_SECRET", "x" * 32)
    flags = ["--tensorboard-dir", ODD + "t", "--save", "s", "--load", "base", "--results-dir", "r", *ENOUGH]
    flags += ["--task", "sft", "--micro-batch-size", "1"] if "fine_tuning" in request_values else ["--data-path", "d"]
    plan = preflight(tiny(*flags, dry_run=True, **request_values))
    echo = "import json, sys; print(json.dumps(sys.argv[1:]))"
    pasted = launch.command_text(plan).replace(str(IMPORT_ROOT / "tools" / "launch.py"), f"-c {shlex.quote(echo)}")
    words = json.loads(subprocess.run(["bash", "-c", pasted], capture_output=True, text=True, check=True).stdout)
    own = words[: words.index("--")]
    again, script = launch.parse_command_line([*own, "--dry-run", *words[len(own) :]])
    assert script is None
    assert dataclasses.replace(preflight(again), run_id="", notes=()) == dataclasses.replace(plan, run_id="", notes=())


def test_threads_given_for_the_ranks_are_kept() -> None:
    plan = preflight(tiny(dry_run=True, environment={"OMP_NUM_THREADS": "7"}))
    assert plan.environment["OMP_NUM_THREADS"] == "7"
    assert "--env OMP_NUM_THREADS=7" in launch.command_text(plan)


LIBRARIES = """
import sys
import megatron.settings.command_line

def libraries():
    return {{module.split(".")[0] for module in sys.modules}} - set(sys.stdlib_module_names) - {{"__mp_main__"}}

before = libraries()
{program}
print(status, sorted(libraries() - before))
"""


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("from megatron import train\nsys.argv = ['train', '--lrr', '1']\nstatus = train.start(train.Signals())", 2),
        ("from megatron.cli import launch\nstatus = launch.main(['--', '--lrr', '1'])", 2),
        (
            "from megatron.cli import launch\n"
            "status = launch.main(['--dry-run', '--device', 'cpu', '--', '--config', 'tiny_bloom'])",
            0,
        ),
    ],
)
def test_a_refused_run_and_a_dry_run_load_no_library_but_those_of_the_options(program: str, status: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(IMPORT_ROOT)}
    command = [sys.executable, "-c", LIBRARIES.format(program=program)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1:] == [f"{status} []"], ran.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Launch


def test_the_remote_command_names_the_first_host_and_carries_the_environment(tmp_path: Path) -> None:
    hostsfile = hosts_of(tmp_path, "# node slots=8", "", "me@10.0.0.1 slots=8", "10.0.0.2 slots=8", "10.0.0.3 slots=8")
    request = tiny(*ENOUGH, nodes=2, hostsfile=hostsfile, dry_run=True, environment={"PT_HPU_LAZY_MODE": "0"})
    command = hosts.remote_command(preflight(request))
    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    assert flag_values(command, "--hostfile") == [hostsfile]
    assert flag_values(command, "--master_addr") == ["10.0.0.1"]
    assert flag_values(command, "--num_nodes") == ["2"]
    assert flag_values(command, "--num_gpus") == ["1"]  # one agent a host
    assert flag_values(command, "--ranks-per-node") == ["8"]
    assert flag_values(command, "--rendezvous") == ["10.0.0.1:29500"]
    assert "--force_multi" not in command
    env = command[command.index("/usr/bin/env") :]
    assert "DS_ACCELERATOR=cpu" in env
    assert "PT_HPU_LAZY_MODE=0" in env
    python, option, run, *module = env[env.index(sys.executable) :][:6]
    assert (python, option, module) == (sys.executable, "-X", ["-u", "-m", "megatron.launch.agents.agent"])
    assert run.startswith("run=")


def test_one_remote_host_is_not_run_here(tmp_path: Path) -> None:
    remote = tiny(*ENOUGH, hostsfile=hosts_of(tmp_path, "10.0.0.1 slots=8"), dry_run=True)
    assert "--force_multi" in hosts.remote_command(preflight(remote))
    local = tiny(*ENOUGH, hostsfile=hosts_of(tmp_path, "localhost slots=8"), dry_run=True)
    assert preflight(local).hosts == ()


@pytest.mark.parametrize(
    "word", ["plain", "a b", "it's", 'say "x y"', "$HOME", "$HOME `id` \\ x", "a;b|c&d*", "tab\there"]
)
def test_words_reach_the_remote_shell_unchanged(word: str) -> None:
    # what DeepSpeed's PDSHRunner.parse_user_args does to each word
    sent = hosts.for_pdsh(word)
    if " " in sent:
        sent = '"{}"'.format(sent.replace('"', '\\"'))
    shown = subprocess.run(["/bin/sh", "-c", f"printf %s {sent}"], capture_output=True, text=True, check=True)
    assert shown.stdout == word


@pytest.mark.parametrize("is_given", [False, True])
def test_local_ranks_know_their_place_and_find_the_package(
    dataset: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_given: bool
) -> None:
    port = free_port() if is_given else None

    def train(flags: Sequence[str]) -> None:
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR DS_ACCELERATOR".split()
        shown = [os.environ[name] for name in names]
        found = [sys.executable, "-c", "import megatron.options.config; print(megatron.options.config.__name__)"]
        shown.append(subprocess.run(found, cwd="/", capture_output=True, text=True).stdout.strip())
        os.write(1, (" ".join(shown) + "\n").encode())
        os._exit(os.environ["MASTER_PORT"] != str(port or os.environ["MASTER_PORT"]))

    monkeypatch.setattr(node_ranks, "run_main", lambda main, flags: train(flags))
    monkeypatch.setattr(hosts, "run_agent", lambda options, flags: agent.run_agent(options, flags, "fork"))
    for name in ("PYTHONPATH", "PYTHONUNBUFFERED", "DS_ACCELERATOR", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # a launch sets it in this process; restored after the test
    plan = preflight(tiny("--data-path", dataset, data_parallel_size=2, master_port=port))
    assert hosts.run_plan(plan) == 0
    place = "2 2 127.0.0.1 cpu megatron.options.config"
    assert sorted(capfd.readouterr().out.splitlines()) == [f"0 0 {place}", f"1 1 {place}"]


# ---------------------------------------------------------------------------------------------------------------------
# Several hosts, in place of which a fake pdsh runs its command here


def over_two_hosts(tmp_path: Path) -> LaunchPlan:
    hostsfile = hosts_of(tmp_path, "10.0.0.1 slots=8", "10.0.0.2 slots=8")
    return preflight(tiny(*ENOUGH, nodes=2, hostsfile=hostsfile, dry_run=True))


@pytest.fixture
def _fake_pdsh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "pdsh").write_text('#!/bin/sh\nshift 4\nexec sh -c "$*"\n')
    (folder / "pdsh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_agents_of_a_run_are_known_by_their_command_line(tmp_path: Path) -> None:
    plan, other = over_two_hosts(tmp_path), over_two_hosts(tmp_path)
    pattern = hosts.agent_pattern(plan)
    assert re.search(pattern, " ".join(hosts.agent_command(plan)))
    assert not re.search(pattern, " ".join(hosts.agent_command(other)))
    assert not re.search(pattern, " ".join(hosts.remote_command(plan)))
    assert shlex.split(pattern) == [pattern]


@pytest.mark.parametrize(("of_host", "status"), [(2, 2), (250, 128 + 6), (255, 255)])
def test_the_first_host_that_fails_is_noted(of_host: int, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    shown = (
        b"10.0.0.2: about to fail\n"
        b"pdsh@here: 10.0.0.2: ssh exited with exit code %d\n"
        b"pdsh@here: me@10.0.0.1: ssh exited with exit code 7\n" % of_host
    )
    output = hosts.PdshOutput(io.BytesIO(shown))
    output.run()
    assert output.failed == ("10.0.0.2", status)
    assert capsys.readouterr().err == shown.decode()


# stands for DeepSpeed's launcher: starts an agent as `-X run=ID`, and ends when that has ended
RUNNER = """
import subprocess, sys
agent = subprocess.Popen([sys.executable, "-X", "run=" + sys.argv[1], "-u", "-c", sys.argv[2]])
sys.stderr.write(sys.argv[3])
sys.stderr.flush()
sys.stderr.write(f"10.0.0.1: \x1eagent node ended {abs(agent.wait())}\\n" * 2)
"""


@pytest.mark.skipif(shutil.which("pkill") is None, reason="needs pkill")
@pytest.mark.usefixtures("_fake_pdsh")
def test_agents_on_other_hosts_are_ended_once_one_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hosts, "FAILED_GRACE_S", 0.5)
    plan = over_two_hosts(tmp_path)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    failed = "pdsh@here: 10.0.0.2: ssh exited with exit code 3\n"
    command = [sys.executable, "-c", RUNNER, plan.run_id, code, failed]
    assert hosts.run_on_hosts(command, os.environ, plan) == 3
    assert "host 10.0.0.2 ended with status 3; ending the ranks that still run" in capfd.readouterr().err
    assert not hosts.signal_agents(plan, signal.SIGKILL)


@pytest.mark.usefixtures("_fake_pdsh")
def test_a_run_that_can_go_on_without_a_host_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "FAILED_GRACE_S", 0.1)
    plan = dataclasses.replace(over_two_hosts(tmp_path), min_nodes=1)
    failed = "pdsh@here: 10.0.0.2: ssh exited with exit code 255\n"
    command = [sys.executable, "-c", RUNNER, plan.run_id, "import time; time.sleep(1)", failed]
    assert hosts.run_on_hosts(command, os.environ, plan) == 0


@pytest.mark.parametrize(("lost", "status"), [("10.0.0.2", 0), ("10.0.0.1", 255)])
def test_a_spare_host_makes_up_for_any_host_but_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, status: int
) -> None:
    monkeypatch.setattr(hosts, "FAILED_GRACE_S", 0.1)
    two = over_two_hosts(tmp_path)
    plan = dataclasses.replace(two, hosts=(*two.hosts, Host("10.0.0.3", 2, 3)), spare_hosts=1)
    said = f"import sys; sys.stderr.write('pdsh@here: {lost}: ssh exited with exit code 255\\n')"
    assert hosts.run_on_hosts([sys.executable, "-c", said], os.environ, plan) == status


def test_the_status_of_a_launcher_that_reaches_no_host_is_its_own(tmp_path: Path) -> None:
    plan = dataclasses.replace(over_two_hosts(tmp_path), min_nodes=1)
    assert hosts.run_on_hosts([sys.executable, "-c", "raise SystemExit(9)"], os.environ, plan) == 9


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        # DeepSpeed's launcher ends with 0 where a signal has killed pdsh
        ("raise SystemExit(0)", 255, "pdsh on this machine was ended when the agents of 0 of 2 hosts had ended"),
        (
            "import sys; sys.stderr.write('10.0.0.1: \\x1eagent a ended 0\\n')",
            255,
            "pdsh on this machine was ended when the agents of 1 of 2 hosts had ended",
        ),
        ("import os; os.kill(os.getpid(), 9)", 137, "DeepSpeed's launcher on this machine was killed by SIGKILL"),
        ("import sys; sys.stderr.write('10.0.0.1: \\x1eagent a ended 0\\n10.0.0.2: \\x1eagent b ended 0\\n')", 0, ""),
    ],
)
def test_a_run_is_done_where_its_agents_say_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: str, status: int, said: str
) -> None:
    assert hosts.run_on_hosts([sys.executable, "-c", code], os.environ, over_two_hosts(tmp_path)) == status
    shown = capfd.readouterr().err
    assert shown.startswith(said)
    assert bool(shown) is bool(said), shown


@pytest.mark.skipif(shutil.which("pkill") is None, reason="needs pkill")
@pytest.mark.usefixtures("_fake_pdsh")
def test_the_ssh_of_a_host_that_is_gone_does_not_outlive_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for grace in ("FAILED_GRACE_S", "UNREACHABLE_GRACE_S"):
        monkeypatch.setattr(hosts, grace, 0.2)
    noted = tmp_path / "pid"
    # as pdsh starts them: in a session of its own
    ssh = f"import os, time; open({str(noted)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    runner = f"""
import subprocess, sys, os, time
subprocess.Popen([sys.executable, "-c", {ssh!r}], start_new_session=True)
while not os.path.exists({str(noted)!r}) or not open({str(noted)!r}).read():
    time.sleep(0.05)
sys.stderr.write("pdsh@here: 10.0.0.2: ssh exited with exit code 4\\n")
sys.stderr.flush()
time.sleep(600)
"""
    assert hosts.run_on_hosts([sys.executable, "-c", runner], os.environ, over_two_hosts(tmp_path)) == 4
    wait_until_gone([int(noted.read_text())])


@pytest.mark.skipif(shutil.which("pkill") is None, reason="needs pkill")
@pytest.mark.usefixtures("_fake_pdsh")
def test_a_signal_reaches_agents_on_other_hosts_that_start_later(tmp_path: Path) -> None:
    plan = over_two_hosts(tmp_path)
    # the signal comes before there is an agent to receive it
    runner = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGTERM); time.sleep(1.5)\n{RUNNER}"
    command = [sys.executable, "-c", runner, plan.run_id, "import time; time.sleep(600)", ""]
    assert hosts.run_on_hosts(command, os.environ, plan) == 0
    assert not hosts.signal_agents(plan, signal.SIGKILL)


@pytest.mark.parametrize(("own", "interval"), [(None, "30"), ("-oServerAliveInterval=5", "5")])
def test_ssh_gives_up_a_host_that_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, interval: str
) -> None:
    given: list[Mapping[str, str]] = []

    def keep(command: Sequence[str], environment: Mapping[str, str], plan: LaunchPlan) -> int:
        given.append(environment)
        return 0

    monkeypatch.delenv("PDSH_SSH_ARGS_APPEND", raising=False)
    if own is not None:
        monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", own)
    monkeypatch.setattr(hosts, "run_on_hosts", keep)
    monkeypatch.setattr(hosts, "send_secret", lambda plan, environment: None)
    hosts.run_plan(over_two_hosts(tmp_path))
    options = given[0]["PDSH_SSH_ARGS_APPEND"].split()
    # ssh keeps the first it is given
    assert next(word for word in options if "ServerAliveInterval" in word) == f"-oServerAliveInterval={interval}"
    assert options[-1] == "-oServerAliveCountMax=20"


def test_the_network_interface_travels_to_other_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert "GLOO_SOCKET_IFNAME=ib0" in hosts.remote_command(over_two_hosts(tmp_path))
