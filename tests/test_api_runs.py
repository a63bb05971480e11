"""InstructLab's interface, run to the end on the CPU: the examples of its README, a stop and its resumption.

The README lies beside the folder of real text. Its examples are run as they stand, in a folder where `ibm-granite/
granite-7b-base` and `path/to/dataset.jsonl` are a tiny model and a few chats, but for this: the import, the number of
ranks (8 and 4 there), `os.getnev`, a slip of theirs, and what they leave out as `# ...`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from megatron.settings.command_line import load_config
from tests import runs
from tests.finetuning_files import write_chats, write_model
from tests.ranks import HANG_S, free_port

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTATION = ROOT / "docs" / "reference" / "instructlab.md"


def blocks(text: str) -> list[str]:
    return [
        block.replace("instructlab.training", "megatron.api") for block in re.findall(r"```py\w*\n(.*?)```", text, re.S)
    ]


@pytest.fixture
def examples(test_data: Path) -> list[str]:
    """The Python of InstructLab's README, with the import changed and the slip mended."""
    found = sorted((test_data.parent / "seeds").glob("003_*"))
    if not found:
        pytest.skip("needs InstructLab's README beside MEGATRON_TEST_DATA")
    return [block.replace("os.getnev", "os.getenv") for block in blocks(found[0].read_text(encoding="utf-8"))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the example's model and data are."""
    write_model(tmp_path / "ibm-granite" / "granite-7b-base")
    write_chats(tmp_path / "path" / "to" / "dataset.jsonl")
    return tmp_path


def block_with(examples: list[str], text: str) -> str:
    (block,) = [block for block in examples if text in block]
    return block


def start(folder: Path, code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str], timeout_s: float = HANG_S) -> str:
    """What it printed; it must end with status 0."""
    try:
        said, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    assert process.returncode == 0, said
    return said


def test_the_readmes_example_run_trains_and_exports(examples: list[str], folder: Path) -> None:
    imports = next(block for block in examples if block.startswith("from megatron.api import ("))
    arguments = next(block for block in examples if block.startswith("# define training-specific arguments"))
    torchrun = next(block for block in examples if "nproc_per_node = 8" in block)
    run = next(block for block in examples if block.startswith("run_training("))
    assert "training_args=TrainingArgs(" in run  # the first one of theirs is that of a single device
    run = next(block for block in examples if block.startswith("run_training(\n    torchrun_args=torchrun_args"))
    two = torchrun.replace("nproc_per_node = 8", "nproc_per_node = 2")
    said = end(start(folder, "\n".join([imports, arguments, two, run])))
    assert "distributed_backend fsdp with HYBRID_SHARD is DeepSpeed's ZeRO stage 3 over 2 ranks in fp32" in said
    assert "Training is complete, iteration=10, 400 samples" in said
    saved = folder / "data" / "saved_checkpoints"
    # a step an epoch, and an export after each; save_samples=250000 is never reached
    assert sorted(path.name for path in (saved / "hf_format").glob("samples_*")) == sorted(
        f"samples_{40 * epoch}" for epoch in range(1, 11)
    )
    losses = [row["lm_loss"] for row in runs.rows(saved)]
    assert len(losses) == 10
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(saved / "hf_format" / "samples_400")
    assert model.config.max_position_embeddings == 256
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved / "hf_format" / "samples_400")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "<user>hello"


@pytest.mark.slow
def test_the_readmes_separate_data_processing_works(examples: list[str], folder: Path) -> None:
    separate = block_with(examples, "dp.main(data_process_args)").replace("num_epochs = 10", "num_epochs = 1")
    said = end(start(folder, separate.replace("\n...\n", "\ntorchrun_args = TorchrunArgs()\n")))
    assert said.count("processed path/to/dataset.jsonl") == 1
    assert "data_output_dir data/outputs holds these samples already: 40 chats" in said
    assert "Training is complete, iteration=1, 40 samples" in said


@pytest.mark.slow  # tests/launch/test_agent.py has two nodes always
def test_the_readmes_two_machines_train_together(examples: list[str], folder: Path) -> None:
    arguments = next(block for block in examples if block.startswith("# define training-specific arguments"))
    machines = [next(block for block in examples if f"# on machine {number}" in block) for number in (1, 2)]
    port = str(free_port())
    everything = "import os\nfrom megatron.api import *\n" + arguments.replace("num_epochs = 10", "num_epochs = 2")
    processes = [
        start(
            folder,
            everything + machine.replace("nproc_per_node = 4", "nproc_per_node = 1"),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            MEGATRON_RUN_SECRET="known to both machines",
        )
        for machine in machines
    ]
    first, second = [end(process) for process in processes]
    assert "Training is complete, iteration=2, 80 samples" in first
    # whoever came second to the data took what the first had made
    assert (first + second).count("processed path/to/dataset.jsonl") == 1
    logs = folder / "data" / "saved_checkpoints"
    assert "iteration" in (logs / "full_logs_global0.log").read_text()
    assert (logs / "full_logs_global1.log").is_file()


def test_the_readmes_shorter_examples_run_adapters_included(examples: list[str], folder: Path) -> None:
    arguments = next(block for block in examples if block.startswith("# define training-specific arguments"))
    lora = block_with(examples, "lora = LoraOptions(")
    alone = block_with(examples, "torchrun_args=TorchrunArgs(),")
    code = [
        "from megatron.launch.instructlab import run\nfrom megatron.api import *",
        "really = run.run_to_the_end",
        "run.run_to_the_end = lambda command, environment, log: print(*command)",
        arguments.replace("num_epochs = 10", "num_epochs = 2"),
        alone.replace("# ...", "**dict(training_args)"),
        "run.run_to_the_end = really",
        lora.replace("# ...", "**{name: value for name, value in training_args if name != 'lora'}"),
        "run_training(TorchrunArgs(), training_args)",
    ]
    said = end(start(folder, "\n".join(code)))
    assert "launch.agents.agent --node-rank 0 --run-id 0 -- --config data/saved_checkpoints/run_training.yaml" in said
    assert "adapters of rank 4 on all linear layers; exports are whole models, with the adapters merged" in said
    assert "Training is complete, iteration=2, 80 samples" in said
    exports = folder / "data" / "saved_checkpoints" / "hf_format"
    # as in their library: models with the adapters merged, in which all linear layers have changed and nothing else
    before = load_file(folder / "ibm-granite" / "granite-7b-base" / "model.safetensors")
    after = load_file(exports / "samples_80" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name, weight in before.items() if not after[name].equal(weight)}
    assert changed == {name for name in before if "_proj" in name}


def test_the_documentations_example_prepares_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "models" / "base")
    write_chats(tmp_path / "chats.jsonl")
    instead = "from megatron.launch.instructlab import run\n"
    instead += "run.run_to_the_end = lambda command, environment, log: print(*command)\n"
    said = end(start(tmp_path, instead + blocks(DOCUMENTATION.read_text(encoding="utf-8"))[0]))
    assert "-- --config out/run_training.yaml" in said
    monkeypatch.chdir(tmp_path)  # in which the example's folders are
    config = load_config(["--config", "out/run_training.yaml"], 1)
    assert (config.checkpoint.save_hf, config.checkpoint.save_hf_last_only) == ("out/hf_format", True)


INTERRUPTED = """
from megatron.api import DistributedBackend, TorchrunArgs, TrainingArgs, run_training
args = TrainingArgs(
    model_path="model", data_path="none", ckpt_output_dir="out", data_output_dir="data", mock_data=True,
    max_seq_len=64, max_batch_len=64, effective_batch_size=2, learning_rate=1e-4, num_epochs=EPOCHS,
    validation_split=0.25, validation_frequency=3, distributed_backend=DistributedBackend.DEEPSPEED,
    chat_tmpl_path=None, save_samples=10_000, checkpoint_at_epoch=False, disable_flash_attn=True,
)
run_training(torch_args=TorchrunArgs(nproc_per_node="gpu"), train_args=args)
"""


@pytest.mark.slow
def test_an_interrupted_run_saves_leaves_no_process_and_goes_on_when_called_again(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    process = start(tmp_path, INTERRUPTED.replace("EPOCHS", "20000"))
    log = tmp_path / "out" / "full_logs_global0.log"
    try:
        deadline_s = time.monotonic() + HANG_S
        while not log.is_file() or "iteration       10/" not in log.read_text():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in said
    assert "SIGINT: the ranks stop after this step and save" in said
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    iteration = int((tmp_path / "out" / "full_state" / "latest").read_text().split()[0].removeprefix("global_step"))
    assert iteration >= 10
    # an epoch has 6 samples, 3 steps; 2 are held out
    again = end(start(tmp_path, INTERRUPTED.replace("EPOCHS", str(iteration // 3 + 2))))
    assert f"weights, optimizer, random streams; iteration {iteration}, " in again
    assert "WARNING" not in again
    assert "Training is complete" in again
    assert "validation loss at iteration" in again
