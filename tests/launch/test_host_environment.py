"""What is set where a run is launched reaches its hosts, or is refused; the secrets of its user do not leave."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megatron.launch.agents import hosts
from megatron.launch.plan import LaunchPlan, LaunchRequest, RefusedError
from megatron.launch.preflight import preflight
from tests.finetuning_files import write_tokens

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in list(os.environ):
        if re.match("HL_|HCCL_|PT_|FI_|NCCL_|HABANA_|CUDA_|LD_LIBRARY_PATH|TORCH", name):
            monkeypatch.delenv(name)
    monkeypatch.setattr("shutil.which", lambda program: program)


def planned(tmp_path: Path, device: str = "hpu") -> LaunchPlan:
    write_tokens(tmp_path / "text")
    (tmp_path / "hosts").write_text("10.0.0.1 slots=8\n10.0.0.2 slots=8\n")
    flags = ["--config", "tiny_bloom", "--global-batch-size", "64", "--data-path", str(tmp_path / "text")]
    layout = LaunchRequest(
        nodes=2, devices_per_node=4, hostsfile=str(tmp_path / "hosts"), device=device, train_flags=flags
    )
    return preflight(layout)


def test_settings_of_devices_and_networks_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {
        "HCCL_OVER_OFI": "1",
        "HCCL_SOCKET_IFNAME": "eth0",
        "PT_HPU_RECIPE_CACHE_CONFIG": "/tmp/cache,false,1024,false",
        "FI_PROVIDER": "verbs",
        "NCCL_DEBUG": "INFO",
        "HABANA_VISIBLE_MODULES": "4,5,6,7",
        "LD_LIBRARY_PATH": "/opt/habanalabs/libfabric/lib:/usr/lib",
    }
    kept = {"WANDB_API_KEY": "x", "MEGATRON_RUN_SECRET": "y" * 32, "HF_TOKEN": "z", "HLS_MODULE_ID": "3"}
    for name, value in {**sent, **kept}.items():
        monkeypatch.setenv(name, value)
    command = hosts.remote_command(planned(tmp_path))
    words = dict(word.split("=", 1) for word in command[command.index("/usr/bin/env") :] if "=" in word)
    assert sent.items() <= words.items()
    assert not kept.keys() & words.keys()
    assert words["DS_ACCELERATOR"] == "hpu"


@pytest.mark.parametrize("name", [None, "cluster_env"])
def test_the_users_own_file_takes_precedence(name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_PROVIDER", "verbs")
    if name:
        monkeypatch.setenv("DS_ENV_FILE", name)
    (tmp_path / (name or ".deepspeed_env")).write_text("FI_PROVIDER=tcp\n")
    assert "FI_PROVIDER" not in planned(tmp_path).environment


def test_what_cannot_be_sent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HABANA_LOGS", "/tmp/logs/%h")
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "0,1,1")
    with pytest.raises(RefusedError) as refused:
        planned(tmp_path)
    assert [fault.partition(" ")[0] for fault in refused.value.faults] == [
        "HABANA_LOGS='/tmp/logs/%h'",
        "HABANA_VISIBLE_MODULES=0,1,1",
    ]
    assert "leaves 2 of the 4 devices that each needs" in refused.value.faults[1]
    monkeypatch.delenv("HABANA_LOGS")
    assert planned(tmp_path, "cpu").environment["HABANA_VISIBLE_MODULES"] == "0,1,1"


@pytest.mark.parametrize(("endpoint", "is_warned_of"), [("127.0.1.1:29500", True), ("node0:29500", False)])
def test_a_rendezvous_on_every_machine_itself_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str, is_warned_of: bool
) -> None:
    flags = ["--config", "tiny_bloom", "--global-batch-size", "64", "--results-dir", str(tmp_path)]
    plan = preflight(
        LaunchRequest(nodes=2, devices_per_node=4, device="cpu", rendezvous=endpoint, dry_run=True, train_flags=flags)
    )
    assert any(f"rendezvous={endpoint} is another machine on every node" in w for w in plan.warnings) is is_warned_of


def test_no_requirement_names_what_only_the_vendor_ships() -> None:
    """The public index has no such package, so anyone may take its name."""
    for path in (*ROOT.glob("requirements*.txt"), ROOT / "constraints.txt", ROOT / "pyproject.toml"):
        lines = [line.partition("#")[0] for line in path.read_text().splitlines()]
        named = [line for line in lines if re.search(r"^habana|[\"\'\[, ]habana-", line)]
        assert named == [], path.name
