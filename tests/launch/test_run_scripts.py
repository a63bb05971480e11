"""run_bloom13b.sh and run_llama.sh: Habana's variables and defaults, and nothing that starts by mistake."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.launch.dialects.hl_help import script_help
from megatron.launch.dialects.hl_requests import from_environment
from megatron.launch.dialects.hl_variables import ALL, LLAMA_PRESETS, REFUSED, VARIABLES, Script
from megatron.options.config import ConfigError
from tests.ranks import HANG_S

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = ["run_bloom13b.sh", "run_llama.sh", "run_mixtral.sh", "run_sft.sh", "run_dpo.sh"]
SHELLCHECK = shutil.which("shellcheck") or shutil.which(str(Path(sys.executable).parent / "shellcheck"))


def run(script: str, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HL_")}
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / script), *arguments],
        cwd=folder,
        env=environment | {"PYTHON": sys.executable} | variables,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def test_a_plan_for_a_named_device_needs_none_of_that_kind(tmp_path: Path) -> None:
    """The command of docs/guides/launching.md, on a machine that has a CPU alone: it was refused as of device=cpu."""
    plan = run("run_bloom13b.sh", tmp_path, "--device-memory", "gaudi2", HL_DRY_RUN="1", HL_TP="4", HL_DP="2")
    assert plan.returncode == 0, plan.stderr
    assert "1 node x 8 hpu devices = 8 ranks" in plan.stdout
    assert "of 94.6 GiB (Gaudi 2)" in plan.stdout
    on_cpu = {"HL_DEVICE": "cpu", "HL_DRY_RUN": "1"}
    refused = run("run_bloom13b.sh", tmp_path, "--device-memory", "gaudi2", **on_cpu)
    assert "device_memory=gaudi2 is that of a hpu device, but device=cpu" in refused.stderr


@pytest.mark.skipif(SHELLCHECK is None, reason="needs shellcheck")
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_shellcheck_clean(script: str) -> None:
    checked = subprocess.run([str(SHELLCHECK), "-x", str(ROOT / "scripts" / script)], capture_output=True, text=True)
    assert checked.stdout == ""
    assert checked.returncode == 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_can_be_called(script: str) -> None:
    path = ROOT / "scripts" / script
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")


def test_the_readme_command_prints_its_plan_and_writes_nothing(tmp_path: Path) -> None:
    hostsfile = str(ROOT / "scripts" / "hostsfile")
    layout = {"HL_NUM_NODES": "4", "HL_PP": "2", "HL_TP": "4", "HL_DP": "4", "HL_HOSTSFILE": hostsfile}
    plan = run("run_bloom13b.sh", tmp_path, HL_DRY_RUN="1", **layout)
    assert plan.returncode == 0, plan.stderr
    for said in (
        "4 nodes x 8 devices = 32 ranks",
        "PP 2 x TP 4 x DP 4",
        "1024 samples = DP 4 x micro 1 x 256 microbatches",
        "from 16 by 16 over 5,000,000 samples",
        "12,855,592,960 in all",
        "0.4% of a step",
        "memory per rank",
        "tools/launch.py \\\n  --nodes 4 \\\n  --devices-per-node 8 \\\n  --hostsfile ",
        "warning: dataset /data/bigscience/oscar-en/meg-gpt2_text_document lacks",
    ):
        assert said in plan.stdout
    assert list(tmp_path.iterdir()) == []
    eight_nodes = layout | {"HL_NUM_NODES": "8", "HL_DP": "8"}
    assert run("run_bloom13b.sh", tmp_path, HL_DRY_RUN="1", **eight_nodes).returncode == 0


def test_bloom_defaults_are_habanas(tmp_path: Path) -> None:
    plan = run("run_bloom13b.sh", tmp_path, HL_DRY_RUN="1", HL_DEVICE="hpu").stdout
    for said in (
        *("1 node x 8 hpu devices", "PP 1 x TP 4 x DP 2", "40 layers, hidden 5120, 32 heads", "sequence 2048"),
        *("1024 samples = DP 2 x micro 1", "300,000,000 samples", "learned positions", "bf16, recompute none"),
        *("--rampup-batch-size 16 16 5000000", "out/bloom13b/ds_z0_nl40_hs5120_gb1024_mb1_D2_T4_P1_devices8_"),
        *("--data-path /data/bigscience/oscar-en/meg-gpt2_text_document", "--save out/", "--load out/"),
    ):
        assert said in plan


@pytest.mark.parametrize(
    ("version", "size"),
    [
        # the first of each version; -m slow: the others, whose plans tests/launch/test_launch.py prints in one process
        pytest.param(version, size, marks=() if size == next(iter(sizes)) else pytest.mark.slow)
        for version, sizes in LLAMA_PRESETS.items()
        for size in sizes
    ],
)
def test_every_llama_prints_its_plan(version: str, size: str, tmp_path: Path) -> None:
    plan = run(
        "run_llama.sh", tmp_path, HL_DRY_RUN="1", HL_DEVICE="hpu", HL_LLAMA_VER=version, HL_LLAMA_MODEL_SIZE=size
    )
    assert plan.returncode == 0, plan.stderr
    assert f"--config {LLAMA_PRESETS[version][size]}" in plan.stdout
    assert "PP 2 x TP 2 x DP 2, sequence parallel" in plan.stdout
    assert f"out/llama{version}_{size}b/ds_" in plan.stdout


def test_another_preset_keeps_its_values(tmp_path: Path) -> None:
    plan = run("run_bloom13b.sh", tmp_path, HL_DRY_RUN="1", HL_CONFIG="tiny_bloom", HL_DEVICE="cpu")
    assert plan.returncode == 0, plan.stderr
    assert "PP 1 x TP 1 x DP 1" in plan.stdout
    assert "16 samples = DP 1 x micro 8" in plan.stdout
    assert "--rampup-batch-size" not in plan.stdout
    assert "warning: no dataset is given" in plan.stdout
    changed = run("run_bloom13b.sh", tmp_path, HL_DRY_RUN="1", HL_CONFIG="tiny_bloom", HL_GBS="8", HL_NUM_LAYERS="2")
    assert "8 samples = DP 1 x micro 8" in changed.stdout
    assert "2 layers" in changed.stdout


def test_all_faults_come_in_one_message_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node0 slots=8\nnode1\n")
    refused = run(
        "run_bloom13b.sh",
        tmp_path,
        "--global-batch-size=1023",
        HL_HOSTSFILE="hosts",
        HL_NUM_NODES="2",
        HL_TP="3",
        HL_PP="41",
        HL_GSB="8",
        HL_USE_FUSED_SDPA_FP8="1",
        HL_RESULTS_DIR="hosts/out",
        HL_DATA_DIR_ROOT=str(tmp_path),
    )
    assert refused.returncode == 2
    assert refused.stdout == ""
    for said in (
        "unknown variable HL_GSB=8; did you mean HL_GBS?",
        "HL_USE_FUSED_SDPA_FP8=1 is not supported",
        "2 x tensor-parallel 3 x pipeline-parallel 41 = 246 ranks, but nodes x devices = 2 x 8 = 16",
        "pipeline_model_parallel_size=41 is larger than num_layers=40",
        "tensor_model_parallel_size=3 does not divide num_attention_heads=32",
        "global_batch_size=1023 is not a multiple",
        "rampup_batch_size",
        f"dataset {tmp_path}/meg-gpt2_text_document lacks",
        "results_dir=hosts/out cannot be created",
        "hosts, line 2: 'node1' is not `<host> slots=<n>`",
        "HL_TP sets tensor_model_parallel_size",
    ):
        assert said in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]


def test_a_qnpu_folder_is_sourced_first(tmp_path: Path) -> None:
    (tmp_path / "activate").write_text('echo "sourced $UNSET_NAME"\n')
    plan = run("run_bloom13b.sh", tmp_path, HL_DRY_RUN="1", HL_DEVICE="hpu", HL_QNPU_DIR=str(tmp_path))
    assert plan.returncode == 0, plan.stderr
    assert plan.stdout.startswith("sourced")
    missing = run("run_bloom13b.sh", tmp_path, HL_DRY_RUN="1", HL_QNPU_DIR=str(tmp_path / "no"))
    assert "holds no file `activate`" in missing.stderr


@pytest.mark.parametrize("script", ["bloom13b", "llama", "mixtral", "sft", "dpo"])
def test_help_of_a_script_lists_its_own_variables(script: Script) -> None:
    first, every = (script_help(script, topic).splitlines() for topic in ("", "variables"))
    assert len(first) <= 50
    assert max(map(len, [*first, *every])) <= 100
    listed = set(re.findall(r"^  (HL_\w+)", "\n".join(every), re.MULTILINE))
    assert listed == {variable.name for variable in VARIABLES if script in variable.scripts}
    assert set(re.findall(r"^  (HL_\w+)", "\n".join(first), re.MULTILINE)) <= listed
    assert script_help(script, "data").startswith("usage: ")


def test_help_explains_a_variable(tmp_path: Path) -> None:
    shown = run("run_llama.sh", tmp_path, "--help", "HL_GBS")
    assert (shown.returncode, shown.stdout.split()[0], shown.stderr) == (0, "HL_GBS", "")
    assert "flag: --global-batch-size" in shown.stdout
    assert "there is no tensor logger" in script_help("llama", "HL_TENSOR_LOGGER")
    with pytest.raises(ConfigError, match="has no variable HL_MODEL"):
        script_help("llama", "HL_MODEL")


def test_a_dry_run_loads_neither_torch_nor_deepspeed(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['launch.py']; from megatron.cli import launch; "
        "status = launch.main(['--variables', 'bloom13b', '--']); "
        "print(status, sorted({'torch', 'deepspeed'} & set(sys.modules)))"
    )
    variables = {"HL_DRY_RUN": "1", "HL_CONFIG": "tiny_bloom", "PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HL_")}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment | variables, capture_output=True, text=True
    )
    assert ran.stdout.endswith("\n0 []\n"), ran.stderr


def test_the_documentation_lists_every_variable() -> None:
    page = (ROOT / "docs" / "reference" / "variables.md").read_text(encoding="utf-8")
    tool = [sys.executable, str(ROOT / "tools" / "document_variables.py")]
    printed = subprocess.run(tool, capture_output=True, text=True, check=True, timeout=HANG_S).stdout
    assert printed == page, "run `python tools/document_variables.py > docs/reference/variables.md`"
    documented = set(re.findall(r"HL_[A-Z0-9_]+\*?", page))
    known = {variable.name for variable in VARIABLES} | {refused.name for refused in REFUSED}
    assert known - documented == set()
    assert documented - known == set()


@pytest.mark.parametrize(
    ("script", "preset"),
    [("run_bloom13b.sh", "tiny_bloom"), ("run_llama.sh", "tiny_llama"), ("run_mixtral.sh", "tiny_mixtral")],
)
def test_a_preset_among_the_arguments_has_no_defaults_of_the_script(tmp_path: Path, script: str, preset: str) -> None:
    """As with HL_CONFIG; it was given the script's own layout, ramp-up, optimizer and data."""
    on_cpu = {"HL_DEVICE": "cpu", "HL_DRY_RUN": "1"}
    by_variable = run(script, tmp_path, HL_CONFIG=preset, **on_cpu)
    assert "1 node x 1 cpu device = 1 rank" in by_variable.stdout
    for words, others in ((["--config", preset], {}), ([f"--config={preset}"], {"HL_CONFIG": "none"})):
        plan = run(script, tmp_path, "--seed", "1", *words, **on_cpu | others)
        assert plan.returncode == 0, plan.stderr
        # down to the folder, which has the time in it
        assert plan.stdout.partition("results:")[0] == by_variable.stdout.partition("results:")[0]


def test_a_default_of_the_page_may_be_spelled_out() -> None:
    """Habana's commands spell out what is the default anyway; 0 of HL_PE, half of a prompt's length were refused."""
    defaults = runpy.run_path(str(ROOT / "tools" / "document_variables.py"))["DEFAULTS"]
    # what one of these needs beside it
    beside = {"HL_HNIC": "1", "HL_NUM_NODES": "2", "HL_DATA_FILE_PREFIX": "x"}
    spelled = 0
    for name, given in ((name, given) for section in defaults.values() for name, given in section.items()):
        (row,) = (row for row in VARIABLES if row.name == name)
        script: Script = next((script for script in ALL if script in row.scripts), "generate")
        values = {given} if isinstance(given, str) else set(given)
        for value in (value.removeprefix("preset: ") for value in values):
            # a phrase describes what counts, and is not a value
            if value in ("", "—", "preset") or " " in value:
                continue
            faults = from_environment(beside | {name: value}, script, []).faults
            assert not [fault for fault in faults if fault.startswith(f"{name}=")], (name, value)
            spelled += 1
    assert spelled > 100


def test_the_example_hostsfile_has_a_line_for_each_node_of_the_readme() -> None:
    from megatron.launch.plan import parse_hostsfile

    hosts, wrong = parse_hostsfile((ROOT / "scripts" / "hostsfile").read_text(), "hostsfile")
    assert not wrong
    assert [host.slots for host in hosts] == [8] * 8
