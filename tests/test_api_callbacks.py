"""InstructLab's callbacks: each hook is called on every rank, in order, with the state of the training."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.api import TorchrunArgs, TrainerCallback, TrainingArgs, TrainingContext, run_training
from megatron.launch.instructlab.mapping import write_callbacks
from megatron.options.config import ConfigError
from megatron.training import callbacks
from megatron.training.callbacks import CallbackThread, load_callback
from tests import runs
from tests.finetuning_files import REQUIRED, write_chats, write_model
from tests.ranks import RankPools
from tests.test_api_runs import end, start

HOOKS = [name for name in vars(TrainerCallback) if name.startswith("on_")]
SCRIPT = """
from megatron.api import *

class Recorder(TrainerCallback):
    def record(self, context):
        import dataclasses, json, os
        with open(os.path.join(context.output_dir, "events_%s.jsonl" % os.environ["RANK"]), "a") as file:
            file.write(json.dumps(dataclasses.asdict(context)) + "\\n")

    {hooks}

    async def on_step_end(self, context: TrainingContext):
        self.record(context)
        raise RuntimeError("a fault of the callback")

run_training(
    TorchrunArgs(nproc_per_node={ranks}, nnodes=1, node_rank=0, rdzv_id=1),
    TrainingArgs(
        model_path="model", data_path="chats.jsonl", ckpt_output_dir="out", data_output_dir="data", max_seq_len=128,
        max_batch_len=512, effective_batch_size=16, learning_rate=1e-3, num_epochs=2, validation_split=0.2,
        validation_frequency=2, fsdp_options={{"sharding_strategy": "SHARD_GRAD_OP"}}, callbacks=[Recorder()],
    ),
)
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_hook_is_called_with_the_state_of_the_run(ranks: int, tmp_path: Path) -> None:
    """One rank has DeepSpeed's pipeline engine, two the plain one of ZeRO-2."""
    write_model(tmp_path / "model")
    write_chats(tmp_path / "chats.jsonl")
    hooks = "; ".join(f"{name} = record" for name in HOOKS if name != "on_step_end")
    (tmp_path / "script.py").write_text(SCRIPT.format(hooks=hooks, ranks=ranks))
    said = end(start(tmp_path, "import runpy; runpy.run_path('script.py', run_name='__main__')"))
    assert "Training is complete, iteration=4, 64 samples" in said
    assert said.count("RuntimeError: a fault of the callback") == 4 * ranks
    rows = runs.rows(tmp_path / "out")
    for rank in range(ranks):
        events = [json.loads(line) for line in (tmp_path / "out" / f"events_{rank}.jsonl").read_text().splitlines()]
        counts = Counter(event["hook_name"] for event in events)
        steps = [event for event in events if event["hook_name"] == "on_log"]
        minibatches = sum(event["batch_metrics"]["num_minibatches"] for event in steps)
        per_run = {"on_train_begin": 1, "on_train_end": 1, "on_epoch_begin": 2, "on_epoch_end": 2}
        per_run |= {"on_evaluate": 2, "on_save": 4, "on_before_forward": minibatches, "on_after_backward": minibatches}
        assert counts == dict.fromkeys(HOOKS, 4) | per_run
        assert [event["hook_name"] for event in events if event["step"] == 1] == [
            *("on_epoch_begin", "on_step_begin"),
            *(("on_before_forward", "on_after_backward") * steps[0]["batch_metrics"]["num_minibatches"]),
            *("on_pre_optimizer_step", "on_optimizer_step", "on_log", "on_step_end"),
        ]
        for event, row in zip(steps, rows, strict=True):
            assert event["loss"] == pytest.approx(row["lm_loss"])
            assert event["learning_rate"] == row["learning_rate"]
            assert event["grad_norm"] == pytest.approx(row["grad_norm"])
            assert (event["total_samples"], event["total_tokens"]) == (row["consumed_samples"], row["consumed_tokens"])
            assert event["batch_metrics"]["total_samples"] == 16
            assert 0 < event["batch_metrics"]["num_loss_counted_tokens"] < event["batch_metrics"]["total_length"]
        saves = [
            (event["checkpoint_format"], event["checkpoint_path"]) for event in events if "save" in event["hook_name"]
        ]
        assert saves == [
            ("native", "out/full_state/global_step2"),
            ("huggingface", "out/hf_format/samples_32"),
            ("native", "out/full_state/global_step4"),
            ("huggingface", "out/hf_format/samples_64"),
        ]
        assert {event["world_size"] for event in events} == {ranks}
        assert {event["is_world_process_zero"] for event in events} == {rank == 0}
        assert [event["epoch"] for event in steps] == [0, 0, 1, 1]
        assert all(event["val_metrics"]["val_loss"] > 0 for event in events if event["hook_name"] == "on_evaluate")


class Slow(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    async def on_log(self, context: TrainingContext) -> None:
        await asyncio.sleep(0.05)
        self.seen.append(f"log {context.step} {context.batch_metrics}")

    def on_step_end(self, context: TrainingContext) -> None:
        self.seen.append(f"end {context.step}")


def test_hooks_do_not_wait_for_async_ones_and_see_a_copy() -> None:
    callback, context = Slow(), TrainingContext(step=1, batch_metrics={"a": 1})
    thread = CallbackThread([callback])
    thread.call("on_log", context)
    context.batch_metrics["a"] = 2
    thread.call("on_step_end", context)
    thread.call("on_save", context)
    thread.close()
    assert callback.seen == ["end 1", "log 1 {'a': 1}"]


def test_a_hook_that_does_not_return_ends_neither_run_nor_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(callbacks, "LAST_WAIT_S", 0.0)
    thread = CallbackThread([Slow()])
    thread.call("on_log", TrainingContext(step=1))
    thread.close()  # on Python 3.10, a future that times out does not raise TimeoutError
    assert "callbacks have not returned after 0 s; the run does not wait for them" in caplog.text


class Exits(Slow):
    def on_step_end(self, context: TrainingContext) -> None:
        raise SystemExit(3)

    async def on_save(self, context: TrainingContext) -> None:
        raise KeyboardInterrupt


def test_a_hook_that_exits_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    callback = Exits()
    thread = CallbackThread([callback])
    for hook in ("on_step_end", "on_save", "on_log"):
        thread.call(hook, TrainingContext(step=1))
    thread.close()
    assert callback.seen == ["log 1 {}"]
    assert "Exits.on_step_end failed at step 1" in caplog.text
    assert "Exits.on_save failed at step 1" in caplog.text


class NeedsModule(TrainerCallback):
    def __init__(self, path: Path = Path()) -> None:
        self.path = path


def test_wrong_callbacks_are_named(tmp_path: Path) -> None:
    args = TrainingArgs(**(REQUIRED | {"callbacks": [Slow, 3], "model_path": str(write_model(tmp_path / "model"))}))
    with pytest.raises(ConfigError) as caught:
        run_training(TorchrunArgs(), args)
    assert "callbacks has the class Slow in it; give objects of subclasses of TrainerCallback" in str(caught.value)
    assert "callbacks has a int in it" in str(caught.value)
    with pytest.raises(ConfigError, match=r"NameError: name 'Path' is not defined.* import what it needs inside its"):
        write_callbacks([NeedsModule()], tmp_path)
    unwritten: Any = type("Unwritten", (TrainerCallback,), {"__module__": "nowhere"})
    with pytest.raises(ConfigError, match="the source of Unwritten is not in a file"):
        write_callbacks([unwritten()], tmp_path)
    for name in ("no_such_module:X", f"{tmp_path}/none.py:X", "json:dumps", "Slow", "collections:Counter"):
        with pytest.raises(ConfigError, match=f"callbacks={name} "):
            load_callback(name)


class FailsOnRankOne(TrainerCallback):
    """Raises in the hook that the variable names."""

    def _fail(self, context: TrainingContext) -> None:
        if os.environ["RANK"] == "1" and context.hook_name == os.environ["FAILS_AT"]:
            raise ValueError("no such file")

    on_train_begin = on_log = on_evaluate = on_save = on_train_end = _fail


def train_with_failing_callback(hook: str, flags: str) -> str:
    with patch.dict(os.environ, FAILS_AT=hook):
        return runs.train(f"--train-iters 4 --callbacks {__name__}:FailsOnRankOne {flags}")


@pytest.mark.parametrize(
    ("hook", "step", "more"),
    [
        ("on_train_begin", 0, ""),
        pytest.param("on_log", 1, "", marks=pytest.mark.slow),
        ("on_evaluate", 2, "--eval-interval 2"),
        ("on_save", 2, "--save-interval 2 --no-async-save"),
        pytest.param("on_train_end", 4, "", marks=pytest.mark.slow),
        ("on_train_end", 2, "--exit-interval 2"),
    ],
)
def test_a_hook_that_raises_on_one_rank_ends_the_run_on_all_with_its_name(
    ranks: RankPools, tmp_path: Path, hook: str, step: int, more: str
) -> None:
    data = runs.write_dataset(tmp_path / "text")
    flags = f"--data-path {data} --save {tmp_path / 'save'} --results-dir {tmp_path / 'out'} {more}"
    found = ranks(2)(train_with_failing_callback, hook, flags)
    expected = f"TrainingAborted: rank 1: FailsOnRankOne._fail failed at step {step}: ValueError: no such file"
    assert found == [expected] * 2
    assert hook == "on_train_begin" or (tmp_path / "save" / "latest").exists()
    ended = json.loads((tmp_path / "out" / "run.json").read_text())["starts"][-1]["ended"]
    assert f"FailsOnRankOne._fail failed at step {step}" in ended["reason"]
    if hook == "on_log":
        assert ranks(2)(train_with_failing_callback, hook, f"{flags} --callback-errors log") == ["", ""]
