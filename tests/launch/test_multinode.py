"""run_bloom13b.sh over hosts with their own addresses, processes and disks: what a cluster does, on one machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.runtime.commands import HUNG
from tests import runs
from tests.host_runs import ITERATIONS, ROOT, Run, losses, python_processes, runs_ranks, wait_until
from tests.hosts import SYSTEM_PATH, Host, Hosts, send_signal, why_not
from tests.ranks import RankPools


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(4, tmp_path / "hosts") as four:
        yield four


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    runs.write_dataset(tmp_path / "data" / "text")
    return tmp_path / "data"


def addresses_listened_on(host: Host) -> set[str]:
    """All but that of its sshd."""
    shown = host.run("ss", "-Hltun").stdout.splitlines()
    places = [line.split()[4].rpartition(":") for line in shown]
    return {address for address, _, port in places if port != "22"}


def secret_files(run: Run) -> list[Path]:
    """Those of a run in the home folder, which its hosts share."""
    run_id = re.search(r" -X run=(\S+)", run.said)
    assert run_id is not None, run.said
    return list(Path("~").expanduser().glob(f".megatron-{run_id[1]}*"))


def command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


@pytest.mark.parametrize(
    ("nodes", "layout_after"), [(2, {"HL_PP": "1"}), pytest.param(4, {"HL_PP": "2"}, marks=pytest.mark.slow)]
)
def test_two_hosts_train_and_stop_at_the_kill_switch_and_resume_on_another_layout(
    hosts: Hosts, data: Path, tmp_path: Path, ranks: RankPools, nodes: int, layout_after: dict[str, str]
) -> None:
    results, switches = tmp_path / "run", tmp_path / "switches"
    switches.mkdir()
    # data, index cache and kill switch lie on the second host's own disk
    own_data, own_switches, kill_switch = hosts[1].own_disk(data), hosts[1].own_disk(switches), switches / "kill"
    layout = {"HL_DP": "1", "HL_TP": "1", "HL_PP": "2", "HL_KILL_SWITCH": str(kill_switch)}
    secret = "a secret that this test knows"
    first = Run(hosts, hosts.login, data, results, nodes=2, **layout, MEGATRON_RUN_SECRET=secret, FI_PROVIDER="verbs")
    first.wait_for_iteration(3)
    for host in hosts[0], hosts[1]:
        assert host.run("sh", "-c", "grep -lz ^FI_PROVIDER=verbs /proc/[0-9]*/environ").stdout
        assert addresses_listened_on(host) == {host.address}
    assert not any(secret.encode() in line for line in command_lines())
    assert not secret_files(first), "the agents have removed them"
    (own_switches / "kill").touch()
    assert first.status() == 0, first.said
    assert f"10.77.0.1: Detected kill switch at {kill_switch}, iteration=" in first.said
    assert not any(runs_ranks(host) for host in hosts)
    caches = [sorted(path.name for path in (disk / "cache").glob("*.npy")) for disk in (data, own_data)]
    assert caches[0] == caches[1] != []

    (own_switches / "kill").unlink()
    stopped_at = max(losses(results))
    layout |= {"HL_TP": "2", "HL_EXIT_INTERVAL": "5", **layout_after}
    second = Run(hosts, hosts.login, data, results, nodes=nodes, **layout)
    assert second.status() == 0, second.said
    assert f"resumed {results}/checkpoints/global_step{stopped_at}: " in second.said
    ended_at = max(losses(results))
    assert stopped_at < ended_at
    assert f"Reached exit_interval=5, iteration={ended_at}" in second.said

    alone = tmp_path / "alone"
    flags = f"--config tiny_bloom --train-samples {8 * ITERATIONS} --exit-interval {ended_at} --results-dir {alone}"
    assert ranks(1)(runs.train, f"{flags} --data-path {data}/text") == [""]
    expected, found = losses(alone), losses(results)
    assert list(found) == list(expected) == list(range(1, ended_at + 1))
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-3)


@pytest.mark.slow
def test_a_host_cut_off_amid_a_run_is_named_and_the_run_ends(data: Path, tmp_path: Path) -> None:
    """On a network of IPv6 alone, whose addresses pdsh takes with their module."""
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(2, tmp_path / "hosts", network="fd77:1::") as hosts:
        check_that_a_host_cut_off_is_named(hosts, data, tmp_path)


def check_that_a_host_cut_off_is_named(hosts: Hosts, data: Path, tmp_path: Path) -> None:
    layout = {"HL_DP": "1", "HL_TP": "1", "HL_PP": "2", "HL_SAVE": "0"}
    # from one of its own hosts
    run = Run(hosts, hosts[0], data, tmp_path / "run", "--watchdog-timeout-s", "10", nodes=2, **layout)
    run.wait_for_iteration(3)
    hosts[1].cut_off()
    assert run.status() == HUNG, run.said
    assert "fd77:1::1: watchdog: no progress for 10 s; the run ends" in run.said
    said = (
        rf"host {hosts[1].name} is not reached from {hosts[0].name}: it is down, or its link is; rank 1 on it is silent"
    )
    assert re.search(said, run.said), run.said
    assert "some hosts do not answer; ranks may still run there" in run.said
    assert not runs_ranks(hosts[0])
    # which nobody can tell to end
    wait_until(lambda: not runs_ranks(hosts[1]), run, while_it_runs=False)


@pytest.mark.slow
def test_a_link_that_loses_all_in_one_direction_is_named_and_no_rank(data: Path, tmp_path: Path) -> None:
    """Half open: neither end learns of it. A link that loses much, but not all, is not noticed."""
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(3, tmp_path / "hosts") as hosts:
        layout = {"HL_DP": "3", "HL_TP": "1", "HL_PP": "1", "HL_SAVE": "0"}
        flags = ["--watchdog-timeout-s", "6", "--global-batch-size", "6"]
        run = Run(hosts, hosts.login, data, tmp_path / "run", *flags, nodes=3, **layout)
        run.wait_for_iteration(3)
        for _ in range(4):  # a third of the time
            hosts[1].cut_off()
            time.sleep(0.3)
            hosts[1].reconnect()
            time.sleep(0.6)
        done = max(losses(tmp_path / "run"))
        run.wait_for_iteration(done + 20)
        assert "watchdog: " not in run.said
        hosts[1].lose_link_to(hosts[2])
        assert run.status() == HUNG, run.said
        assert "the link between node2 and node3 is broken: both run, and do not reach each other" in run.said
        assert not re.search(r"rank \d on \S+ \(process \d+\) (does not|is elsewhere|failed)", run.said), run.said


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nft", path=f"{os.environ['PATH']}:{SYSTEM_PATH}") is None, reason="needs nftables")
def test_a_link_that_loses_three_packets_of_ten_delays_the_run_and_raises_no_alarm(data: Path, tmp_path: Path) -> None:
    """Of what ranks, watchdogs and agents of the other host send; TCP sends it again after 0.2 s, 0.4 s, and so on."""
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(2, tmp_path / "hosts") as hosts:
        layout = {"HL_DP": "2", "HL_TP": "1", "HL_PP": "1", "HL_SAVE_INTERVAL": "5", "HL_MAX_RESTARTS": "1"}
        run = Run(hosts, hosts.login, data, tmp_path / "run", "--watchdog-timeout-s", "120", nodes=2, **layout)
        run.wait_for_iteration(3)
        hosts[1].lose_packets(30)
        done, began_s = max(losses(tmp_path / "run")), time.monotonic()
        run.wait_for_iteration(done + 20)
        print(f"{(time.monotonic() - began_s) / 20:.1f} s a step")
        send_signal(run.process, signal.SIGTERM)
        assert run.status() == 0, run.said
        assert not re.search("watchdog: |lost|does not|not reached|broken|nodes have changed|restart 1", run.said), (
            run.said
        )
        assert not any(python_processes(host) for host in hosts)


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["one host at its start", "the launcher"])
def test_a_failure_leaves_no_process_on_any_host(data: Path, tmp_path: Path, fails: str) -> None:
    """Also where the agent of another host has not started yet, and would wait for the others.

    tests/launch/test_launch.py ends the agents of other hosts once one failed, always.
    """
    if reason := why_not():
        pytest.skip(reason)
    layout = {"HL_DP": "1", "HL_TP": "1", "HL_PP": "2", "HL_SAVE": "0"}
    moment = "multiprocessing.forkserver|multiprocessing.spawn"
    if fails == "one host at its start":
        (tmp_path / "activate").write_text("case $(hostname) in node1) sleep 8;; node2) exit 3;; esac\n")
        layout["HL_QNPU_DIR"], moment = str(tmp_path), "sleep 8"
    with Hosts(2, tmp_path / "hosts") as hosts:
        run = Run(hosts, hosts.login, data, tmp_path / "run", nodes=2, **layout)
        wait_until(lambda: hosts[0].run("pgrep", "-f", f"^sleep 8|{moment}").returncode == 0, run)
        if fails == "the launcher":
            send_signal(run.process, signal.SIGKILL)
        else:
            assert run.status() == 3, run.said
        wait_until(lambda: not any(python_processes(host) for host in hosts), run, while_it_runs=False)
        wait_until(lambda: not secret_files(run), run, while_it_runs=False)


@pytest.mark.slow
def test_ssh_notices_a_host_that_is_gone_where_nobody_watches(hosts: Hosts, data: Path, tmp_path: Path) -> None:
    layout = {"HL_DP": "1", "HL_TP": "1", "HL_PP": "2", "HL_SAVE": "0"}
    layout["PDSH_SSH_ARGS_APPEND"] = "-oServerAliveInterval=1 -oServerAliveCountMax=10"
    run = Run(hosts, hosts.login, data, tmp_path / "run", "--watchdog-timeout-s", "0", nodes=2, **layout)
    run.wait_for_iteration(3)
    hosts[1].cut_off()
    assert run.status() == 255, run.said
    assert f"host {hosts[1].address} ended with status 255; ending the ranks that still run" in run.said
    assert not runs_ranks(hosts[0])


@pytest.mark.slow
def test_a_host_with_other_code_is_refused_by_name(data: Path, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(2, tmp_path / "hosts") as hosts:
        own = hosts[1].own_disk(ROOT / "megatron")
        with (own / "data" / "indexed.py").open("a") as file:
            file.write("# of another commit\n")
        run = Run(hosts, hosts.login, data, tmp_path / "run", nodes=2, HL_DP="2", HL_TP="1", HL_PP="1")
        assert run.status() == 2, run.said
        said = "megatron's code on node2 differs from that on the first host; use the same on every host"
        assert f"10.77.0.1: {said}" in run.said
        assert f"10.77.0.2: {said}" in run.said
        assert not any(python_processes(host) for host in hosts)
        assert not list((tmp_path / "run").rglob("*")), "no rank has started"


@pytest.mark.slow
def test_a_results_folder_that_is_not_shared_is_refused(hosts: Hosts, data: Path, tmp_path: Path) -> None:
    results = tmp_path / "run"
    results.mkdir()
    own = hosts[1].own_disk(results)
    run = Run(hosts, hosts.login, data, results, nodes=2, HL_DP="2", HL_TP="1", HL_PP="1")
    assert run.status() == 2, run.said
    said = (
        f"save={results}/checkpoints is not one folder: what node1 (rank 0) writes there is not seen on node2 (rank 1)"
    )
    assert f"10.77.0.1: rank 0: {said}" in run.said
    assert f"10.77.0.2: rank 1: {said}" in run.said
    assert os.listdir(own) == []
