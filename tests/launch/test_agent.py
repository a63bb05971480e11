"""Supervised launches: what is refused beforehand, what becomes of ranks that fail, nodes that are lost, schedulers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from benchmarks import chaos
from megatron.cli import launch
from megatron.exit_codes import ABORTED, FAILED, HUNG, REFUSED
from megatron.launch import agent as supervise
from megatron.launch import elastic, hosts, preflight
from megatron.launch.hl_requests import Request, from_environment
from tests import runs
from tests.ranks import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
SHELLCHECK = shutil.which("shellcheck") or shutil.which(str(Path(sys.executable).parent / "shellcheck"))


# ---------------------------------------------------------------------------------------------------------------------
# Beforehand


def tiny(*flags: str, **settings: Any) -> Request:
    common = ["--config", "tiny_bloom", "--data-path", "d", "--micro-batch-size", "1"]
    request = Request(device="cpu", dry_run=True, train_flags=[*common, *flags])
    for name, value in settings.items():
        setattr(request, name, value)
    return request


def faults(request: Request) -> list[str]:
    with pytest.raises(preflight.RefusedError) as refused:
        preflight.preflight(request)
    return refused.value.faults


MEETING: dict[str, Any] = {"rendezvous": "node0:29500", "devices_per_node": 2}


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (tiny(max_restarts=3), "a restart goes on from the newest checkpoint, but none are saved"),
        (tiny("--save", "s", max_restarts=1, nodes=2, min_nodes=3, **MEETING), "more than the 2 nodes"),
        (tiny("--save", "s", nodes=2, min_nodes=1, **MEETING), "going on with fewer nodes is a restart"),
        (tiny(rendezvous="node0"), "rendezvous=node0 is not HOST:PORT"),
        (tiny(results_parent="out", rendezvous="node0:1"), "would name the results folder after its own clock"),
        (
            # 16 samples on DP 4, 3 and 2: the batch does not divide by 3
            tiny(
                *("--save", "s", "--micro-batch-size", "1"),
                max_restarts=1,
                nodes=4,
                min_nodes=2,
                rendezvous="a:1",
                devices_per_node=1,
            ),
            "with 3 of 4 nodes the run could not go on",
        ),
        (
            tiny(
                *("--save", "s", "--tensor-model-parallel-size", "4"),
                **{"max_restarts": 1, "nodes": 2, "min_nodes": 1, **MEETING},
            ),
            "with 1 of 2 nodes the run could not go on",
        ),
    ],
)
def test_what_could_not_be_restarted_is_refused(request_: Request, said: str) -> None:
    (fault,) = faults(request_)
    assert said in fault


def test_every_number_of_nodes_that_fits_is_accepted() -> None:
    request = tiny("--save", "s", max_restarts=1, nodes=4, min_nodes=1, rendezvous="a:1")
    request.devices_per_node = 1
    request.train_flags += ["--global-batch-size", "24"]
    plan = preflight.preflight(request)
    assert (plan.nodes, plan.min_nodes, plan.is_supervised) == (4, 1, True)
    assert "restarts: 1 at most, from the newest checkpoint, with 1 of the 4 nodes if need be" in launch.plan_text(
        plan, ""
    )


def test_a_hostsfile_and_a_rendezvous_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("w0 slots=2\nw1 slots=2\n")
    request = tiny(nodes=2, hostsfile=str(tmp_path / "hosts"), **MEETING)
    assert any("exclude each other" in fault for fault in faults(request))


def test_the_variables_of_a_restart_are_read() -> None:
    variables = {"HL_MAX_RESTARTS": "7", "HL_MIN_NODES": "2", "HL_NUM_NODES": "4", "HL_RENDEZVOUS": "node0:29500"}
    request = from_environment(variables, "bloom13b", [])
    assert not request.faults
    assert (request.max_restarts, request.min_nodes, request.rendezvous) == (7, 2, "node0:29500")
    assert from_environment({"HL_MAX_RESTARTS": "0"}, "bloom13b", []).max_restarts == 0
    assert (
        "HL_MAX_RESTARTS='-1' must be a whole number, 0 or more"
        in from_environment({"HL_MAX_RESTARTS": "-1"}, "bloom13b", []).faults
    )


def test_each_host_gets_one_agent_that_sees_all_devices(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("me@10.0.0.1 slots=2\n10.0.0.2 slots=2\n")
    request = tiny("--save", "s", nodes=2, min_nodes=1, max_restarts=3, hostsfile=str(tmp_path / "hosts"))
    request.devices_per_node = 2
    plan = preflight.preflight(request)
    command = hosts.remote_command(plan)
    assert command[command.index("--num_gpus") + 1] == "1"
    env = command[command.index("/usr/bin/env") :]
    assert env[1:5] == ["-u", "CUDA_VISIBLE_DEVICES", "-u", "HABANA_VISIBLE_MODULES"]
    agent = env[env.index(sys.executable) :]
    assert agent[1] == "-X"  # by which the ranks of the run are found on their hosts
    supervision, flags = supervise.parse(agent[agent.index(str(ROOT / "tools" / "supervise.py")) + 1 :])
    assert flags == list(plan.train_flags)
    assert supervision == supervise.Supervision(
        ranks_per_node=2, nodes=2, min_nodes=1, rendezvous="10.0.0.1:29500", run_id=plan.run_id, max_restarts=3
    )


def test_what_a_killed_run_left_does_not_bar_the_next_try(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / ".global_step5.partial-abc").mkdir()
    preflight.preflight(tiny("--save", str(tmp_path), "--load", str(tmp_path), max_restarts=1, devices_per_node=2))


def test_all_nodes_of_a_rendezvous_give_the_run_one_name() -> None:
    def run_id(*flags: str) -> str:
        return preflight.preflight(tiny(*flags, nodes=2, **MEETING)).run_id

    assert run_id("--seed", "1") == run_id("--seed", "1") != run_id("--seed", "2")


# ---------------------------------------------------------------------------------------------------------------------
# One node. The ranks are forks of this process that do what they are told; tests/training/test_chaos.py has real ones


Rank = Callable[[Mapping[str, str], Any], None]


def supervised(monkeypatch: pytest.MonkeyPatch, rank: Rank, max_restarts: int = 0, ranks_per_node: int = 2) -> int:
    monkeypatch.setattr(elastic, "FAILED_GRACE_S", 0.5)
    monkeypatch.setattr(elastic, "run_rank", rank)
    return elastic.run_agent(supervise.Supervision(ranks_per_node, max_restarts=max_restarts), "fork", [])


def leaves_with(*statuses: int) -> Rank:
    """Ranks that end with these, try by try; the last again and again. Below 0: killed by that signal."""

    def rank(environment: Mapping[str, str], flags: Any) -> None:
        status = statuses[min(int(environment["TORCHELASTIC_RESTART_COUNT"]), len(statuses) - 1)]
        if environment["RANK"] == "0":
            time.sleep(600)  # as in a collective; only the other one ends by itself
        if status < 0:
            os.kill(os.getpid(), -status)
        os._exit(status)

    return rank


@pytest.mark.parametrize(
    ("statuses", "max_restarts", "status", "restarts"),
    [
        ([FAILED], 0, FAILED, 0),
        ([FAILED], 2, FAILED, 2),
        ([HUNG, FAILED], 1, FAILED, 1),
        ([-signal.SIGKILL], 1, 128 + signal.SIGKILL, 1),
        ([REFUSED], 3, REFUSED, 0),
        ([FAILED, ABORTED], 3, ABORTED, 1),
    ],
)
def test_only_what_may_go_better_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    statuses: list[int],
    max_restarts: int,
    status: int,
    restarts: int,
) -> None:
    assert supervised(monkeypatch, leaves_with(*statuses), max_restarts) == status
    shown = capfd.readouterr().err
    assert shown.count("; restart ") == restarts
    if restarts:
        assert f"restart 1 of {max_restarts}\n" in shown
        assert "rank 1 on " in shown
    if restarts == max_restarts > 0:
        assert f"all {max_restarts} restarts are used up" in shown
    assert "Traceback" not in shown


def test_ranks_that_are_done_end_the_run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert supervised(monkeypatch, lambda environment, flags: os._exit(0), max_restarts=1) == 0
    assert capfd.readouterr().err == ""


def test_ranks_know_their_place(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR".split()

    def rank(environment: Mapping[str, str], flags: Any) -> None:
        os.write(1, (" ".join(environment[name] for name in names) + "\n").encode())
        os._exit(0)

    assert supervised(monkeypatch, rank) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 0 2 2 127.0.0.1", "1 1 2 2 127.0.0.1"]


@pytest.mark.parametrize("heeds", [True, False])
def test_a_signal_is_the_ranks_to_heed_and_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, heeds: bool
) -> None:
    def rank(environment: Mapping[str, str], flags: Any) -> None:
        def stop(number: int, frame: object) -> None:
            time.sleep(0.5)  # as a checkpoint takes
            os._exit(0)

        signal.signal(signal.SIGTERM, stop if heeds else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, supervise.SIGNALS)
        (tmp_path / environment["RANK"]).touch()
        time.sleep(600)

    def ask() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    # a rank that the signal killed had nothing to save; it is not started again
    assert supervised(monkeypatch, rank, max_restarts=5) == (0 if heeds else 128 + signal.SIGTERM)
    asking.join()
    assert "restart" not in capfd.readouterr().err


def test_an_agent_that_waits_for_others_ends_at_a_signal() -> None:
    port = free_port()
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    alone = supervise.Supervision(1, nodes=2, min_nodes=2, rendezvous=f"127.0.0.1:{port}")
    assert elastic.run_agent(alone, "fork", []) == 128 + signal.SIGTERM
    timer.join()


# ---------------------------------------------------------------------------------------------------------------------
# Two nodes: two agents on this machine, with real ranks

NODE = """
import sys
from megatron.launch import agent as supervise
from megatron.launch import elastic
elastic.LAST_CALL_S, elastic.KEEP_ALIVE_S = 2, 2
sys.exit(supervise.main(sys.argv[1:]))
"""


def node(rendezvous: str, flags: list[str], output: Path) -> subprocess.Popen[bytes]:
    own = "--nodes 2 --min-nodes 1 --ranks-per-node 2 --max-restarts 3 --rendezvous".split()
    with open(output, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-u", "-c", NODE, *own, rendezvous, "--", *flags],
            cwd=ROOT,
            env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def wait_for(condition: Callable[[], bool], what: Callable[[], str], timeout_s: float = 200.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what()
        time.sleep(0.05)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ranks die with their agent on Linux")
def test_a_run_goes_on_with_the_nodes_that_are_left(tmp_path: Path) -> None:
    data, results = chaos.write_dataset(tmp_path / "data"), tmp_path / "results"
    flags = [*runs.TINY.split(), "--data-path", str(data), "--save", str(tmp_path / "saved"), "--save-interval", "5"]
    flags += ["--tensor-model-parallel-size", "2", "--train-iters", "100000", "--lr-decay-style", "constant"]
    flags += ["--results-dir", str(results), "--eval-iters", "0"]
    rendezvous = f"127.0.0.1:{free_port()}"
    outputs = [tmp_path / name for name in ("first.txt", "second.txt", "third.txt")]
    agents: list[subprocess.Popen[bytes]] = []

    def shown() -> str:
        return "\n".join(output.read_text() for output in outputs if output.exists())

    def start_node() -> None:
        agents.append(node(rendezvous, flags, outputs[len(agents)]))

    def wait_for_words(*words: str) -> None:
        """In this order, in what the first node shows from now on."""
        place = len(outputs[0].read_text())

        def are_there() -> bool:
            text, at = outputs[0].read_text(), place
            for word in words:
                at = text.find(word, at) + 1
                if at == 0:
                    return False
            return True

        wait_for(are_there, shown)

    try:
        start_node()
        wait_for(lambda: _listens(rendezvous), shown)
        start_node()
        wait_for(lambda: len(chaos.session_leaders(agents[1].pid)) == 2, shown)
        wait_for_words("saved", "saved")

        ranks = [psutil.Process(pid) for pid in chaos.session_leaders(agents[1].pid)]
        agents[1].kill()
        agents[1].wait()
        wait_for(lambda: not any(rank.is_running() and rank.status() != "zombie" for rank in ranks), shown)
        wait_for_words("2 ranks on 1 node from now on, instead of 4", "resumed", "saved")

        start_node()  # one comes back
        wait_for_words(
            "the nodes have changed; the ranks save and begin again", "4 ranks on 2 nodes", "resumed", "saved"
        )
        for agent in (agents[0], agents[2]):
            agent.send_signal(signal.SIGTERM)
        for agent in (agents[0], agents[2]):
            assert agent.wait(timeout=60) == 0, shown()
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert shown().count("; restart ") == 1, "a node that joins costs no restart"
    assert "Received SIGTERM" in shown()
    steps = chaos.steps_of(results)
    assert [row["iteration"] for row in steps] == list(range(1, len(steps) + 1))
    assert {row["global_batch_size"] for row in steps} == {8}
    assert [row["consumed_samples"] for row in steps] == [8 * row["iteration"] for row in steps]
    assert (tmp_path / "saved" / "latest").read_text().strip() == f"global_step{len(steps)}"


def _listens(endpoint: str) -> bool:
    port = endpoint.split(":")[1]
    return any(
        connection.laddr.port == int(port) and connection.status == psutil.CONN_LISTEN
        for connection in psutil.net_connections("tcp")
    )


# ---------------------------------------------------------------------------------------------------------------------
# Schedulers


def without_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("HL_", "SLURM_"))}


@pytest.mark.skipif(SHELLCHECK is None, reason="needs shellcheck")
def test_the_slurm_script_is_shellcheck_clean() -> None:
    checked = subprocess.run([str(SHELLCHECK), str(ROOT / "scripts" / "slurm.sbatch")], capture_output=True, text=True)
    assert (checked.stdout, checked.returncode) == ("", 0)


def slurm(folder: Path, srun: str) -> dict[str, str]:
    """An environment with stand-ins for Slurm's programs; `requeued` is written by scontrol."""
    programs = folder / "bin"
    programs.mkdir()
    scontrol = f'if [[ $1 == requeue ]]; then echo "$2" > {folder}/requeued; else printf "node3\\nnode4\\n"; fi'
    for name, code in {"srun": srun, "scontrol": scontrol}.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{code}\n")
        (programs / name).chmod(0o755)
    return without_variables() | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_JOB_ID": "4042",
        "SLURM_JOB_NAME": "mine",
        "SLURM_JOB_NUM_NODES": "2",
    }


def test_the_slurm_script_starts_an_agent_on_each_node(tmp_path: Path) -> None:
    srun = 'while [[ $1 == --* ]]; do shift; done\nexec "$@"'
    variables = {"HL_DRY_RUN": "1", "HL_DEVICE": "hpu", "HL_MIN_NODES": "1", "HL_DP": "4", "HL_MAX_RESTARTS": "5"}
    ran = subprocess.run(
        ["bash", str(ROOT / "scripts" / "slurm.sbatch"), "scripts/run_bloom13b.sh", "--lr", "2e-4"],
        env=slurm(tmp_path, srun) | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    for said in (
        *("2 nodes x 8 hpu devices = 16 ranks", "--nodes 2", "--min-nodes 1", "--max-restarts 5", "--lr 2e-4"),
        *("--rendezvous node3:29542", "--results-dir out/mine", "--save out/mine/checkpoints"),
    ):
        assert said in ran.stdout
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("status", [0, 3])
def test_the_slurm_script_requeues_what_was_stopped_by_the_time_limit(tmp_path: Path, status: int) -> None:
    srun = f"trap 'sleep 0.3; exit {status}' TERM\ntouch {tmp_path}/started\nwhile :; do sleep 0.05; done"
    job = subprocess.Popen(["bash", str(ROOT / "scripts" / "slurm.sbatch")], env=slurm(tmp_path, srun))
    try:
        wait_for((tmp_path / "started").exists, lambda: "no srun", 30)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=30) == status
    finally:
        job.kill()
        job.wait()
    assert (tmp_path / "requeued").exists() == (status == 0)


def test_the_pods_of_the_kubernetes_job_are_nodes_of_one_run(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all((ROOT / "scripts" / "kubernetes.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    name = job["metadata"]["name"]
    # what gives the first pod its name, and the name its address
    assert variables["HL_RENDEZVOUS"].startswith(f"{name}-0.{service['metadata']['name']}:")
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(variables["HL_NUM_NODES"])
    assert job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [REFUSED, ABORTED]
    (command,) = container["command"]
    ran = subprocess.run(
        [str(ROOT / command)],
        env=without_variables() | variables | {"PYTHON": sys.executable, "HL_DRY_RUN": "1", "HL_DEVICE": "hpu"},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    assert f"--rendezvous {variables['HL_RENDEZVOUS']}" in ran.stdout
    assert "with 2 of the 4 nodes if need be" in ran.stdout
