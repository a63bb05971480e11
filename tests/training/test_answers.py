"""Answers and results of tasks in a run: those of its weights, on every layout, and nothing of the training changes."""

from __future__ import annotations

import gc
import json
import math
import random
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron import evaluation
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.source import Slice
from megatron.generation.sampling import Choice, TokenSampler
from megatron.models.attention.kv_cache import KVCache
from megatron.training.interludes.answers import kept_random_state
from tests import runs
from tests.finetuning_files import write_tokenizer
from tests.ranks import RankPools
from tests.tasks import chats
from tests.training import lm_eval_stand_in as stand_in

PROMPTS = ["5 6 7 8", "100 101", "3"]
COUNT = 12
MODEL = "--architecture llama --position-embedding-type rope --hidden-dropout 0.1"
RUN = f"{MODEL} --train-iters 6 --eval-interval 4 --tokenizer-type NullTokenizer --generate-max-new-tokens {COUNT}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_dataset(tmp_path_factory.mktemp("answers") / "text")


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def train_twice(flags: str, folder: str, prompts: str) -> tuple[list[str], int]:
    """A run without and one with generation and tasks; the faults that ended them, and caches that are left."""
    plain = f"{flags} --save {folder}/plain --results-dir {folder}/plain_out"
    ended = [runs.train(plain)]
    more = f"--generate-prompts {prompts} --lm-eval-tasks {stand_in.TASK} --lm-eval-interval 3"
    with stand_in.in_place_of_lm_eval():
        ended.append(runs.train(f"{flags} --save {folder}/saved --results-dir {folder}/out {more}"))
    gc.collect()
    return ended, sum(isinstance(each, KVCache) for each in gc.get_objects())


def state(folder: Path) -> dict[tuple[str, str], bytes]:
    """Weights and moments after the last step."""
    found = Checkpoint(folder / "global_step6")
    return {
        (name, kind): found.read(Slice(name, shard, 0, math.prod(shard.shape)), kind).numpy().tobytes()
        for name, shard in found.parameters.items()
        for kind in found.kinds
        if any((each.name, each.kind) == (name, kind) for each in found.fragments)
    }


def expected_ids(ranks: RankPools, saved: Path, flags: str, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations by the last checkpoint's weights, without a cache, on one rank."""
    (found,) = ranks(1)(chats.greedy, f"{MODEL} --train-iters 6 --load {saved} --data-path x {flags}", prompts, COUNT)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(1, "", marks=pytest.mark.slow),
        (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"),
        pytest.param(2, "--tensor-model-parallel-size 2 --sequence-parallel --bf16", marks=pytest.mark.slow),
        pytest.param(2, "--zero-stage 3 --untie-embeddings-and-output-weights", marks=pytest.mark.slow),
        (2, "--lora-rank 2 --finetune"),
        pytest.param(2, "--context-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", marks=pytest.mark.slow),
    ],
)
def test_answers_and_results_are_those_of_the_weights_and_change_no_number(
    ranks: RankPools, data: Path, tmp_path: Path, size: int, layout: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n\n".join(PROMPTS))
    flags = f"{RUN} --data-path {data} {layout}"
    if "--lora" in layout:
        assert ranks(1)(runs.train, f"{RUN} --data-path {data} --save {tmp_path / 'base'}") == [""]
        flags += f" --load {tmp_path / 'base'}"
    found = ranks(size)(train_twice, flags, str(tmp_path), str(prompts))
    assert found == [(["", ""], 0)] * size
    assert state(tmp_path / "plain") == state(tmp_path / "saved")
    plain, with_answers = (
        [(row["lm_loss"], row["grad_norm"]) for row in runs.rows(tmp_path / name)] for name in ("plain_out", "out")
    )
    assert plain == with_answers
    rows = answers(tmp_path / "out")
    assert [(row["iteration"], row["prompt"]) for row in rows] == [
        (step, each) for step in (0, 4, 6) for each in PROMPTS
    ]
    if "--bf16" not in layout and "--lora" not in layout:
        ids = [[int(word) for word in prompt.split()] for prompt in PROMPTS]
        untied = "--untie-embeddings-and-output-weights" if "untie" in layout else ""
        expected = expected_ids(ranks, tmp_path / "saved", untied, ids)
        assert [row["text"].split() for row in rows[-3:]] == [list(map(str, each)) for each in expected]
    log = (tmp_path / "out" / "train.log").read_text()
    assert f' answer at iteration 6 | "100 101" | {json.dumps(rows[-2]["text"])}' in log
    events = b"".join(path.read_bytes() for path in (tmp_path / "out" / "tensorboard").glob("events*"))
    assert events.count(b"answers/1/text_summary") == 3
    assert f"    100 101\n\n    {rows[-2]['text']}".encode() in events
    results = runs.rows(tmp_path / "out", "lm_eval")
    assert [row["iteration"] for row in results] == [0, 3, 6]
    found = results[-1]["results"][stand_in.TASK]
    assert f" lm-eval at iteration 6 | {stand_in.TASK} | loglikelihood: {found['loglikelihood']:.4f} | " in log
    assert events.count(f"lm-eval/{stand_in.TASK}/loglikelihood vs samples".encode()) == 3
    (expected,) = ranks(1)(stand_in.measure_checkpoint, str(tmp_path / "saved"), 6)
    tolerance = 1e-2 if "--bf16" in layout else 1e-5
    assert found == {
        "loglikelihood": pytest.approx(expected["loglikelihood,none"], rel=tolerance),
        "length,strict": expected["length,strict"],
    }


def test_a_resumed_run_writes_each_answer_once(ranks: RankPools, data: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "5 6"}\n')
    flags = f"{RUN} --data-path {data} --results-dir {tmp_path / 'out'} --save {tmp_path / 'saved'} --save-interval 3"
    flags += f" --generate-prompts {prompts} --generate-interval 2"
    assert ranks(1)(runs.train, f"{flags} --exit-interval 5 --save-retain-interval 3") == [""]
    (tmp_path / "saved" / "latest").unlink()
    shutil.rmtree(tmp_path / "saved" / "global_step5")
    assert ranks(1)(runs.train, flags) == [""]
    assert [row["iteration"] for row in answers(tmp_path / "out")] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("name", "text", "flags", "fault"),
    [
        ("none.txt", None, "", "cannot be read: No such file or directory"),
        ("empty.txt", "\n", "", "has no prompts; write one a line"),
        ("bad.jsonl", '{"prompt": "1"}\n{"prompt": 3}', "", "line 2: prompt is int; it must be a string"),
        ("words.txt", "1\nhello", "", "line 2: NullTokenizer reads ids"),
        ("ids.txt", "1\n5000", "", "line 2: id 5000"),
        ("some.txt", "1", "--tokenizer-type none", "generate_prompts needs a tokenizer"),
        (
            "long.txt",
            "1 " * 40,
            "--position-embedding-type learned --architecture bloom",
            "prompt 0 needs 40 positions",
        ),
    ],
)
def test_wrong_prompts_are_named_on_all_ranks(
    ranks: RankPools, data: Path, tmp_path: Path, name: str, text: str | None, flags: str, fault: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    found = ranks(2)(runs.train, f"{RUN} --data-path {data} --generate-prompts {tmp_path / name} {flags}")
    assert len(found) == 2
    assert all(fault in each for each in found), found


def train_with_tasks(flags: str) -> str:
    with stand_in.in_place_of_lm_eval():
        return runs.train(flags)


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("--lm-eval-tasks lost.yaml", "lm-eval cannot run lost.yaml: there is no such task"),
        (f"--lm-eval-tasks {stand_in.TASK} --tokenizer-type none", "lm_eval_tasks needs a tokenizer"),
        (f"--lm-eval-tasks {stand_in.TASK} --skip-train", "is for a training, but skip_train evaluates alone"),
    ],
)
def test_wrong_tasks_are_named_on_all_ranks(ranks: RankPools, data: Path, flags: str, fault: str) -> None:
    found = ranks(2)(train_with_tasks, f"{RUN} --data-path {data} {flags}")
    assert len(found) == 2
    assert all(fault in each for each in found), found


def test_the_seeds_of_lm_eval_do_not_reach_the_training() -> None:
    def draws() -> tuple[float, ...]:
        return random.random(), np.random.random(), torch.rand(()).item()  # noqa: NPY002

    stand_in.seed()
    first, second = draws(), draws()
    stand_in.seed()
    assert draws() == first
    with kept_random_state():
        stand_in.seed()
    assert draws() == second


def train_without_lm_eval(arguments: str) -> str:
    """Train as where lm-eval is not installed; return the fault."""
    # an earlier test of this process may have imported it, which its package then has as an attribute too
    with patch.dict(sys.modules), patch.dict(vars(evaluation)):
        for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
            del sys.modules[name]
        sys.modules.pop("megatron.evaluation.harness", None)
        vars(evaluation).pop("harness", None)
        modules: dict[str, Any] = vars(sys)["modules"]
        modules["lm_eval"] = None  # which an import takes for a package that is not there
        return runs.train(arguments)


def test_without_lm_eval_a_run_does_not_start(ranks: RankPools, data: Path) -> None:
    (found,) = ranks(1)(train_without_lm_eval, f"{RUN} --data-path {data} --lm-eval-tasks quiz")
    assert "tasks need lm-eval, which cannot be imported" in found


def test_a_line_is_a_message_to_a_chat_model(ranks: RankPools, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocab_size = write_tokenizer(tmp_path / "model")
    data = chats.write_chats(tmp_path / "chats", [12] * 40)
    (tmp_path / "prompts.txt").write_text("hello\n")
    model = f"--vocab-size {vocab_size} --hidden-dropout 0"
    flags = (
        f"{MODEL} {model} --task sft --train-iters 6 --data-path {data} --tokenizer-type HFTokenizer "
        "--micro-batch-size 1 "
        f"--tokenizer-model {tmp_path / 'model'} --save {tmp_path / 'saved'} --results-dir {tmp_path / 'out'} "
        f"--generate-prompts {tmp_path / 'prompts.txt'} --generate-max-new-tokens {COUNT}"
    )
    assert ranks(1)(runs.train, flags) == [""]
    row = answers(tmp_path / "out")[-1]
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    prompt = tokenizer.encode("<user>hello", add_special_tokens=False).ids
    (expected,) = expected_ids(ranks, tmp_path / "saved", model, [prompt])
    assert row["prompt"] == "hello"
    assert row["text"] == tokenizer.decode(expected[: row["num_tokens"]])
    assert row["num_tokens"] == COUNT or row["reason"] == "stop"


def train_with_tokens(flags: str, token_ids: list[int]) -> str:
    """A run in which each text is these tokens, again and again."""

    right = TokenSampler.choose

    def choose(sampler: TokenSampler, logits_BV: torch.Tensor, rows: list[int]) -> Choice:
        logits_BV = torch.zeros_like(logits_BV)
        for logits, row in zip(logits_BV, rows, strict=True):
            logits[token_ids[sampler._penalties.lengths[row] % len(token_ids)]] = 1.0
        return right(sampler, logits_BV, rows)

    with patch.object(TokenSampler, "choose", choose):
        return runs.train(flags)


@pytest.mark.parametrize(("marker", "is_token"), [("<|pad|>", True), ("<|im_end|>", False)])
def test_answers_end_with_their_turn_and_texts_beside_them_do_not(
    ranks: RankPools, tmp_path: Path, marker: str, is_token: bool
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocab_size = write_tokenizer(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"chat_template": config["chat_template"].replace("eos_token", f"'{marker}'")}))
    ids = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")).encode(f"so{marker}").ids
    assert (ids[-1] == 1) == is_token
    rows = [{"prompt": "say"}, {"messages": [{"role": "user", "content": "hello"}]}, {"prompt": "and"}]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    flags = (
        f"{MODEL} --vocab-size {vocab_size} --task sft --train-iters 1 --tokenizer-type HFTokenizer "
        f"--data-path {chats.write_chats(tmp_path / 'chats', [12] * 40)} --micro-batch-size 1 "
        f"--tokenizer-model {tmp_path / 'model'} --results-dir {tmp_path / 'out'} "
        f"--generate-prompts {tmp_path / 'prompts.jsonl'} --generate-max-new-tokens {2 * len(ids)}"
    )
    assert ranks(2)(train_with_tokens, f"{flags} --pipeline-model-parallel-size 2", ids) == ["", ""]
    found = [(row["prompt"], row["text"], row["num_tokens"], row["reason"]) for row in answers(tmp_path / "out")[:3]]
    text = "soso" if is_token else 2 * f"so{marker}"  # special tokens are not part of a text
    assert found == [
        ("say", text, 2 * len(ids), "length"),
        ("hello", "so", len(ids), "stop"),
        ("and", text, 2 * len(ids), "length"),
    ]
