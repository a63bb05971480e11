"""What every test shares: one thread a process, and the folder of real data."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.habana import install as install_hpu
from tests.habana import skip_with_cuda
from tests.ranks import RankPools
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401 - hooks

# imports and tests make a million objects, and a third of the time to collect the tests would be spent on garbage
gc.disable()
# before torch is imported: ranks of one machine share its cores
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub; tests/hub_server.py is a stand-in for it
if shutil.which("nvidia-smi"):  # the tests mean the CPU; before deepspeed is imported
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

# a background job ignores SIGINT, one under nohup SIGHUP, and both hand that on; the processes of the tests must start
# as in a terminal
for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)

# a busy machine is no failure: no deadline an example, no complaint about slow data
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


LONG_FIRST = (
    "launch/test_multinode training/test_layouts launch/test_agent training/test_process_faults test_readme "
    "data/tokenizers/test_acceleration launch/test_stops_over_hosts models/test_families_training test_api_runs "
    "models/test_families training/test_guard training/test_adapter_state training/test_context launch/test_launch "
    "training/test_experts training/test_checkpoints test_train cli/test_gaudi_acceptance models/test_expert_families "
    "test_wheel test_site runtime/test_devices training/test_fp8_runs resilience/test_shutdown "
    "checkpoint/test_saver "
    "training/test_chaos evaluation/test_harness cli/test_resume_rows cli/test_preprocess_faults test_house "
    "tasks/test_objective_faults launch/test_run_sft launch/test_endings training/test_quantized "
    "training/test_frozen data/tokenizers/test_tokenizers launch/test_wrong_launches tasks/test_sft "
    "models/test_attention training/test_layer_terms weights/test_deepspeed_checkpoint training/test_huggingface_start "
    "test_extending launch/test_mpirun plan/test_memory training/test_exports tasks/test_objective "
    "launch/test_rendezvous launch/test_run_dpo data/chat/test_conversation tasks/test_preference "
    "models/test_transformer training/test_answers test_finetuning training/test_gradient_sums test_dpo "
    "models/test_new_family plan/test_families test_language test_api_callbacks training/test_schedules"
).split()
"""Files of more than a quarter of a minute, the longest first: if one came last, the other processes would idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / f"{name}.py": place for place, name in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()  # no later collection looks through them


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real text and tokenizers that MEGATRON_TEST_DATA names; the test is skipped without."""
    folder = os.environ.get("MEGATRON_TEST_DATA")
    if not folder:
        pytest.skip("needs MEGATRON_TEST_DATA, the folder of real text and tokenizers")
    path = Path(folder)
    assert path.is_dir(), f"MEGATRON_TEST_DATA={folder} is no folder"
    return path


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """Pools of gloo ranks: `ranks(4)(function, *arguments)`. See tests/ranks.py."""
    pools = RankPools()
    yield pools
    pools.stop()


@pytest.fixture(scope="session")
def hpu_ranks() -> Iterator[RankPools]:
    """Pools like `ranks`, whose processes have the device `hpu` of the stand-in, which they cannot give back."""
    skip_with_cuda()
    pools = RankPools(install_hpu)
    yield pools
    pools.stop()
