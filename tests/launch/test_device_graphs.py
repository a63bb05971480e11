"""What HPU graphs need is set for the ranks before they start, and a variable against it is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.generation.options import read_command
from megatron.launch.dialects.hl_requests import from_environment
from megatron.launch.inference import plan_ranks
from megatron.launch.plan import LaunchPlan, LaunchRequest, RefusedError
from megatron.launch.preflight import preflight
from megatron.runtime import device_hpu
from megatron.runtime.device_hpu import LAZY_COLLECTIVES, LAZY_MODE
from megatron.runtime.devices import graph_faults, set_graph_variables

LAZY = {"HL_DEVICE": "hpu", "HL_DRY_RUN": "1", "HL_TP": "2", "HL_DP": "4", "HL_PP": "1"}
EXCLUDED = f"{LAZY_COLLECTIVES}=false keeps collectives out of HPU graphs"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (LAZY_MODE, LAZY_COLLECTIVES):
        monkeypatch.delenv(name, raising=False)


def trained(variables: dict[str, str], *flags: str) -> LaunchPlan:
    return preflight(from_environment(LAZY | variables, "llama", list(flags)))


def generated(*flags: str, tensor_size: int = 2) -> tuple[LaunchRequest, LaunchPlan]:
    words = ["--load", str(Path(__file__).parent), "--prompt", "a", "--device", "hpu", *flags]
    words += ["--tensor-model-parallel-size", str(tensor_size)]
    request = LaunchRequest(dry_run=True)
    return request, plan_ranks("megatron.generate", request, words, read_command(words)[0], is_chat=False)


def test_validations_by_graphs_have_lazy_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trained({}, "--eval-graphs").environment[LAZY_COLLECTIVES] == "true"
    assert LAZY_COLLECTIVES not in trained({}).environment
    assert LAZY_COLLECTIVES not in trained({"HL_TP": "1", "HL_DP": "8"}, "--eval-graphs").environment
    monkeypatch.setenv(LAZY_COLLECTIVES, "false")
    with pytest.raises(RefusedError) as refused:
        trained({}, "--eval-graphs")
    (fault,) = refused.value.faults
    assert fault.startswith(EXCLUDED)
    assert "eval_graphs with tensor_model_parallel_size=2 has some in them; unset it, or leave eval_graphs out" in fault


def test_validations_by_graphs_in_eager_mode_are_refused_before_ranks_start() -> None:
    with pytest.raises(RefusedError) as refused:
        trained({"HL_USE_LAZY_MODE": "0"}, "--eval-graphs")
    assert refused.value.faults == [
        "eval_graphs on HPU needs lazy mode; set PT_HPU_LAZY_MODE=1 (HL_USE_LAZY_MODE=1), or leave eval_graphs out"
    ]


def test_tokens_by_graphs_have_lazy_mode_and_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    def faults(*flags: str) -> list[str]:
        return [fault for fault in generated(*flags)[0].faults if LAZY_COLLECTIVES in fault or "lazy mode" in fault]

    environment = generated("--use-graphs")[1].environment
    assert (environment[LAZY_MODE], environment[LAZY_COLLECTIVES]) == ("1", "true")
    assert LAZY_COLLECTIVES not in generated("--use-graphs", tensor_size=1)[1].environment
    assert not {LAZY_MODE, LAZY_COLLECTIVES} & set(generated()[1].environment)
    assert faults("--use-graphs") == []
    monkeypatch.setenv(LAZY_COLLECTIVES, "false")
    (fault,) = faults("--use-graphs")
    assert fault.startswith(EXCLUDED)
    assert faults() == []
    monkeypatch.setenv(LAZY_MODE, "0")
    assert faults("--use-graphs") == [
        "use_graphs on HPU needs lazy mode; set PT_HPU_LAZY_MODE=1 (HL_USE_LAZY_MODE=1), or leave use_graphs out"
    ]


def test_a_rank_sets_them_unless_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": ""})
    set_graph_variables("hpu", 2, lazy=True)  # no Gaudi software is there
    assert os.environ == {"PATH": ""}
    monkeypatch.setattr(device_hpu, "has_gaudi_plugin", lambda: True)
    set_graph_variables("cuda", 2, lazy=True)
    set_graph_variables("hpu", 1)
    assert os.environ == {"PATH": ""}
    set_graph_variables("auto", 2)
    assert os.environ == {"PATH": "", LAZY_COLLECTIVES: "true"}
    monkeypatch.setattr(os, "environ", {LAZY_COLLECTIVES: "0"})
    set_graph_variables("hpu", 2, lazy=True)
    assert os.environ == {LAZY_COLLECTIVES: "0", LAZY_MODE: "1"}


@pytest.mark.parametrize(
    ("value", "is_on"), [("1", True), ("TRUE", True), ("true", True), ("0", False), ("yes", False)]
)
def test_values_are_read_as_the_bridge_reads_them(value: str, is_on: bool) -> None:
    faults = graph_faults("use_graphs", "hpu", lazy=True, tensor_size=8, environment={LAZY_COLLECTIVES: value})
    assert (list(faults) == []) is is_on
