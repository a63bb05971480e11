"""Gaudi modules of a node, as a program in the place of hl-smi lists them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.cli.acceptance import report
from megatron.launch import checks, host_environment
from megatron.launch.host_environment import CoresError, own_sockets, ranges, rank_cores
from megatron.runtime import device_hpu, devices, hpu_driver
from megatron.runtime.device_hpu import HPU

TOTAL = 98304
PAIR = [[frozenset({core, core + 8}) for core in range(first, first + 4)] for first in (0, 4)]
"""Two sockets of four cores, of two hardware threads each."""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight modules: of 6, index 3, most of the memory is used, and process 42 holds 5, index 0."""
    rows = [(0, 5), (1, 4), (2, 7), (3, 6), (4, 2), (5, 3), (6, 0), (7, 1)]
    listed = "".join(f"{index}, {number}, {90000 if index == 3 else 768}, {TOTAL}\\n" for index, number in rows)
    program = tmp_path / "hl-smi"
    program.write_text(f'#!/bin/sh\nprintf "{listed}"\n')
    program.chmod(0o755)
    opened = tmp_path / "proc" / "42" / "fd"
    opened.mkdir(parents=True)
    (opened / "3").symlink_to("/dev/accel/accel0")
    (opened / "4").symlink_to("/dev/accel/accel_controlD1")
    monkeypatch.setattr(hpu_driver, "PROC", tmp_path / "proc")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name in (hpu_driver.VISIBLE, "HLS_MODULE_ID", "HABANA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("listed", "ranks", "said"),
    [
        (
            None,
            8,
            "HABANA_VISIBLE_MODULES is not set, so 8 ranks need the modules 0,1,2,3,4,5,6,7: 5 is in use (held "
            "by process 42); 6 is in use (92% of its memory is used). Free: 0,1,2,3,4,7; wait, or use fewer devices a "
            "node",
        ),
        (None, 4, ""),
        ("0,1", 2, ""),
        (
            "4,5,9",
            3,
            "HABANA_VISIBLE_MODULES=4,5,9, so 3 ranks need the modules 4,5,9: 9 is not on this machine; 5 is in use "
            "(held by process 42). Free: 0,1,2,3,4,7; set HABANA_VISIBLE_MODULES to 3 of them",
        ),
        ("4,5,9", 1, ""),
        ("0,0", 2, "HABANA_VISIBLE_MODULES=0,0 must be numbers of modules, each once"),
        ("all", 1, "HABANA_VISIBLE_MODULES=all must be numbers of modules"),
    ],
)
def test_modules_that_are_missing_or_in_use_are_named_in_one_message(
    listed: str | None, ranks: int, said: str, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if listed is not None:
        monkeypatch.setenv(hpu_driver.VISIBLE, listed)
    found = list(hpu_driver.check_modules(ranks))
    assert len(found) == bool(said)
    assert said in "".join(found)


def test_a_machine_without_the_plugin_or_without_cards_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_hpu, "has_gaudi_plugin", lambda: False)
    monkeypatch.setattr(device_hpu, "count_devices", lambda: 8)
    (fault,) = checks.check_plugin("hpu", None)
    assert fault.startswith(
        "device hpu is not there: habana_frameworks.torch is not installed; it comes with the image"
    )
    assert not list(checks.check_plugin("cuda", None)) + list(checks.check_plugin("hpu", "environment"))
    monkeypatch.setattr(device_hpu, "count_devices", lambda: 0)
    assert list(checks.check_plugin("hpu", None)) == []  # the cards are missing first
    monkeypatch.delenv(hpu_driver.VISIBLE, raising=False)
    (fault,) = checks.check_local_devices("hpu", 8)
    assert fault == (
        "8 hpu devices are needed, but this machine has 0; hl-smi lists those that its driver sees. Or set "
        "HL_DEVICE=cpu"
    )


def test_a_launch_and_an_agent_refuse_them_on_hpu_alone(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hpu_driver.VISIBLE, "4,5")
    (fault,) = checks.check_local_devices("hpu", 2)
    assert "5 is in use (held by process 42)" in fault
    (fault,) = checks.check_local_devices("hpu", 8)
    assert fault.startswith("8 hpu devices are needed, but HABANA_VISIBLE_MODULES=4,5 leaves 2 of this machine's; list")
    monkeypatch.setenv("DS_ACCELERATOR", "hpu")
    with pytest.raises(host_environment.ModulesError, match="5 is in use"):
        host_environment.require_devices(2)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    host_environment.require_devices(2)


def test_one_module_for_all_ranks_is_refused(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HLS_MODULE_ID", "5")
    (fault,) = hpu_driver.check_modules(8)
    assert fault.startswith("HLS_MODULE_ID=5 gives all 8 ranks of a node one module; unset it")
    (fault,) = hpu_driver.check_modules(1)
    assert "5 is in use" in fault


def test_parts_of_a_node_that_habana_does_not_support_are_warned_of(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for listed, ranks, warned in [("4,5,6,7", 4, 0), ("2,3", 2, 0), ("1,2", 2, 1), ("0,1,2", 3, 1), ("2,3,4,5", 4, 1)]:
        monkeypatch.setenv(hpu_driver.VISIBLE, listed)
        assert len(list(hpu_driver.warn_of_modules(ranks))) == warned, listed
    monkeypatch.delenv(hpu_driver.VISIBLE)
    assert list(hpu_driver.warn_of_modules(8)) == []
    monkeypatch.setenv("HABANA_VISIBLE_DEVICES", "0,1")
    (warning,) = hpu_driver.warn_of_modules(2)
    assert "restricts no process; set HABANA_VISIBLE_MODULES" in warning


def test_without_hl_smi_the_ranks_find_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(hpu_driver.check_modules(8)) == []
    (tmp_path / "hl-smi").write_text("#!/bin/sh\necho no driver\n")
    (tmp_path / "hl-smi").chmod(0o755)
    assert list(hpu_driver.check_modules(8)) == []


def test_neighbouring_ranks_share_a_socket_and_no_two_a_core() -> None:
    assert [ranges(cores) for cores in rank_cores(4, 2, 0, PAIR)] == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]
    assert [ranges(cores) for cores in rank_cores(3, 1, 2, PAIR)] == ["0,8", "1,9", "4,12"]
    with pytest.raises(CoresError, match=r"2 ranks on each socket needs 6 cores, but a socket has 4 .* set it to 2"):
        rank_cores(4, 3, 0, PAIR)
    with pytest.raises(CoresError, match=r"HL_PPR=1 .* leaves places for 2 of the 4 ranks .* set it to 2 or more"):
        rank_cores(4, 1, 1, PAIR)


def test_the_cores_of_this_process_are_those_that_it_may_use() -> None:
    threads = {thread for cores in own_sockets() for core in cores for thread in core}
    assert threads == os.sched_getaffinity(0)


def test_every_query_has_the_form_that_hl_smi_documents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = {
        "memory.total": f"{TOTAL}\\n{TOTAL - 1}\\n",
        "name,driver_version,memory.total": f"HL-225, 1.24.1, {TOTAL}\\n",
        "index,module_id,memory.used,memory.total": f"0, 5, 768, {TOTAL}\\n",
    }
    cases = "".join(f'"-Q {asked} -f csv,noheader,nounits") printf "{answer}";;\n' for asked, answer in answers.items())
    program = tmp_path / "hl-smi"
    program.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}*) exit 1;;\nesac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert devices.device_memory_bytes(HPU) == (TOTAL - 1) * 2**20
    assert report.cards() == [("HL-225", "1.24.1", str(TOTAL))]
    assert [module.number for module in hpu_driver.modules()] == [5]
    assert HPU.query("unknown") == []
