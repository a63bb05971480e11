"""What the Gaudi software finds when a rank loads it: it reads the rank's place and its own variables once.

The stand-in of tests/habana is installed as a distribution, which `import torch` loads in eager mode, as the vendor's.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.runtime.messages import SECRET
from tests import runs
from tests.habana import write_distribution
from tests.launch.test_mpirun import FAKE, ROOT, put_first
from tests.ranks import free_port
from tests.runs import TINY

TIMEOUT_S = 240.0
# imports torch while the options are read, in the launcher and in each rank
OF_A_USER = "import torch\n\n\ndef loss(log_probs, batch):\n    return torch.zeros(())\n"


class Cluster:
    """Runs of the launcher with the software installed, whose ranks end when they have loaded it."""

    def __init__(self, folder: Path, *, lazy: bool | None, statuses: str):
        self._folder, self._imports = folder, folder / "imports"
        self._imports.mkdir()
        runs.write_dataset(folder / "text")
        (folder / "of_a_user.py").write_text(OF_A_USER)
        found = write_distribution(folder / "packages")
        self.variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([found, str(folder)]),
            "HABANA_STAND_IN_IMPORTS": str(self._imports),
            "HABANA_STAND_IN_ENDS": statuses,
            "HABANA_VISIBLE_MODULES": "5,3",
            SECRET: "a secret of this test",
        }
        if lazy is not None:
            self.variables["PT_HPU_LAZY_MODE"] = str(int(lazy))

    def start(self, *flags: str) -> subprocess.Popen[str]:
        words = [*flags, "--", *TINY.replace("--device cpu", "").split(), "--train-samples", "160"]
        words += ["--data-path", str(self._folder / "text"), "--results-dir", str(self._folder / "results")]
        words += ["--save", str(self._folder / "saved"), "--loss", "of_a_user:loss"]
        return subprocess.Popen(
            [sys.executable, str(ROOT / "tools" / "launch.py"), "--device", "hpu", *words],
            cwd=self._folder,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def records(self) -> list[dict[str, str]]:
        """The environments of all processes that have loaded the software, in the order of attempts and ranks."""
        found = [json.loads(path.read_text()) for path in self._imports.glob("*.json")]
        return sorted(found, key=lambda one: (one.get("TORCHELASTIC_RESTART_COUNT", ""), one.get("RANK", "")))


@pytest.mark.parametrize(
    ("launcher", "lazy"),
    [
        pytest.param(launcher, lazy, marks=() if (launcher, lazy) == ("several nodes", False) else pytest.mark.slow)
        for launcher in ("several nodes", "one node", "mpirun")
        for lazy in (False, True)
    ],
)
def test_each_rank_loads_the_software_with_its_place_and_variables(
    launcher: str, lazy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_first(tmp_path, FAKE.format(python=sys.executable), monkeypatch)
    cluster = Cluster(tmp_path, lazy=lazy, statuses="1,0")
    flags = {
        "one node": ["--devices-per-node", "2"],
        "several nodes": ["--devices-per-node", "1", "--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}"],
        "mpirun": ["--devices-per-node", "2", "--launcher", "mpirun"],
    }[launcher]
    nodes = 2 if launcher == "several nodes" else 1
    started = [cluster.start("--max-restarts", "1", *flags) for _ in range(nodes)]
    for one in started:
        said, _ = one.communicate(timeout=TIMEOUT_S)
        assert one.returncode == 0, said
    records: list[dict[str, Any]] = cluster.records()
    assert [(r["TORCHELASTIC_RESTART_COUNT"], r.get("RANK"), r.get("WORLD_SIZE")) for r in records] == [
        (attempt, rank, "2") for attempt in "01" for rank in "01"
    ]
    for record in records:
        assert record.get("HLS_MODULE_ID") == "5,3".split(",")[int(record["LOCAL_RANK"])]
        assert record["PT_HPU_LAZY_MODE"] == str(int(lazy))
        recipes = tmp_path.resolve() / "results" / "hpu_recipes" / socket.gethostname()
        assert record.get("PT_HPU_RECIPE_CACHE_CONFIG") == f"{recipes},false,16384"
        assert record.get("PT_HPU_ENABLE_CACHE_METRICS") == "1"
