"""lm-eval's tasks give the metrics, and each request the log-likelihood, of lm-eval's own model of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import runs as training_runs
from tests.evaluation import runs
from tests.evaluation.local_tasks import SENTENCES, write_model, write_tasks
from tests.generation.test_every_cut import legal_cuts
from tests.ranks import RankFailure, RankPools

lm_eval = pytest.importorskip("lm_eval")

MODEL = (
    "--architecture llama --position-embedding-type rope --hidden-size 64 --ffn-hidden-size 96 --num-query-groups 2 "
    "--vocab-size 300 --make-vocab-size-divisible-by 2 --seq-length 64 --norm-epsilon 1e-6 "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def expected(model: Path, tasks: list[str]) -> dict[str, Any]:
    return results_of_hf(model, tasks)


def results_of_hf(model: Path, tasks: list[str], **options: Any) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(  # type: ignore[no-any-return]
        model="hf",
        model_args={"pretrained": str(model), "dtype": "float32"},
        tasks=tasks,
        task_manager=TaskManager(include_defaults=False),
        device="cpu",
        bootstrap_iters=1000,
        **options,
    )


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        pytest.param(1, "", marks=pytest.mark.slow),
        (2, "--tensor-model-parallel-size 2"),
        pytest.param(2, "--pipeline-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(2, "", marks=pytest.mark.slow),
    ],
)
def test_results_are_those_of_lm_evals_own_model(
    ranks: RankPools,
    model: Path,
    tasks: list[str],
    expected: dict[str, Any],
    tmp_path: Path,
    num_ranks: int,
    flags: str,
) -> None:
    output = tmp_path / "results.json"
    words = ["--load", str(model), "--tasks", *tasks, "--output", str(output), "--log-samples", *flags.split()]
    said = ranks(num_ranks)(runs.run, words)
    assert "local_choice" in said[0]
    assert_same(json.loads(output.read_text()), expected)


@pytest.mark.parametrize("num_stages", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_answers_on_every_cut_are_those_of_lm_evals_own_model(
    ranks: RankPools, tmp_path: Path, num_stages: int
) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    folder = str(write_model(tmp_path, num_layers=3))
    texts = [" ".join(SENTENCES[: count + 1]) for count in range(4)]  # the last ones are longer than the model reads
    kwargs = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    scored, open_ended = [(text, " and the sea.") for text in texts], [(text, kwargs) for text in texts]
    theirs = HFLM(pretrained=folder, dtype="float32", device="cpu", max_length=64)
    likelihoods = theirs.loglikelihood([Instance("loglikelihood", {}, each, 0) for each in scored])
    expected = theirs.generate_until([Instance("generate_until", {}, each, 0) for each in open_ended])
    assert len(set(expected)) == len(texts)
    cuts = legal_cuts(MODEL + " --num-layers 3 --num-attention-heads 4", num_stages)
    found = ranks(num_stages)(runs.answers, folder, num_stages, cuts, scored, open_ended)[0]
    for cut, (ours, answers) in zip(cuts, found, strict=True):
        assert answers == expected, cut
        for (value, is_greedy), (their_value, theirs_is) in zip(ours, likelihoods, strict=True):
            assert (value, is_greedy) == (pytest.approx(their_value, abs=1e-4), theirs_is), cut


@pytest.mark.slow
@pytest.mark.parametrize("multiturn", [True, False])
def test_chats_are_those_of_lm_evals_own_model(
    ranks: RankPools, model: Path, tasks: list[str], tmp_path: Path, multiturn: bool
) -> None:
    """Two ranks, an example in each prompt, as turns or as a text, and a system message."""
    chat = {
        "apply_chat_template": True, "fewshot_as_multiturn": multiturn, "num_fewshot": 1,
        "system_instruction": "Be short.",
    }  # fmt: skip
    output = tmp_path / "results.json"
    words = ["--load", str(model), "--tasks", *tasks, "--output", str(output), "--log-samples", "--apply-chat-template"]
    words += ["--num-fewshot", "1", "--system-instruction", "Be short.", "--tensor-model-parallel-size", "2"]
    ranks(2)(runs.run, [*words, *([] if multiturn else ["--no-fewshot-as-multiturn"])])
    assert_same(json.loads(output.read_text()), results_of_hf(model, tasks, **chat))


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Metrics, and the answer to each request."""
    for task in ("local_choice", "local_rolling", "local_answers"):
        for name, value in expected["results"][task].items():
            if isinstance(value, float):
                assert found["results"][task][name] == pytest.approx(value, rel=1e-4, abs=1e-6), (task, name)
        for ours, theirs in zip(found["samples"][task], expected["samples"][task], strict=True):
            for one, other in zip(ours["filtered_resps"], theirs["filtered_resps"], strict=True):
                if isinstance(other, str):
                    assert one == other
                    continue
                numbers, their_numbers = (each if isinstance(each, list | tuple) else [each] for each in (one, other))
                assert float(numbers[0]) == pytest.approx(float(their_numbers[0]), abs=1e-4)
                assert [str(each) for each in numbers[1:]] == [str(each) for each in their_numbers[1:]]


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [(1, ""), pytest.param(2, "--pipeline-model-parallel-size 2", marks=pytest.mark.slow)],
)
def test_results_in_a_run_are_those_of_lm_evals_own_model(
    ranks: RankPools,
    model: Path,
    tasks: list[str],
    expected: dict[str, Any],
    tmp_path: Path,
    num_ranks: int,
    flags: str,
) -> None:
    data = training_runs.write_dataset(tmp_path / "text", vocabulary=300)
    words = f"{MODEL} --load {model} --finetune --train-iters 1 --data-path {data} --results-dir {tmp_path / 'out'}"
    ended = ranks(num_ranks)(training_runs.train, f"{words} --lm-eval-tasks {' '.join(tasks)} {flags}")
    assert ended == [""] * num_ranks
    rows = training_runs.rows(tmp_path / "out", "lm_eval")
    assert [row["iteration"] for row in rows] == [0, 1]
    for task, found in rows[0]["results"].items():
        theirs = {name.removesuffix(",none"): value for name, value in expected["results"][task].items()}
        assert found == {name: pytest.approx(theirs[name], rel=1e-4, abs=1e-6) for name in found}
    assert set(rows[0]["results"]) == {"local_choice", "local_rolling", "local_answers"}
    assert {"acc", "acc_norm"} <= rows[0]["results"]["local_choice"].keys()
    unknown = ranks(num_ranks)(training_runs.train, f"{words} --lm-eval-tasks no_such_task --lm-eval-limit 2")
    assert all("lm-eval cannot run no_such_task" in each for each in unknown), unknown


@pytest.mark.parametrize(
    ("there", "elsewhere"), [("choice.jsonl", "lost.jsonl"), ("dataset_path: json", "dataset_path: nobody/nothing")]
)
def test_a_task_whose_data_is_missing_is_named(
    ranks: RankPools, model: Path, tasks: list[str], tmp_path: Path, there: str, elsewhere: str
) -> None:
    task = tmp_path / "lost.yaml"
    task.write_text(Path(tasks[0]).read_text().replace(there, elsewhere))
    with pytest.raises(RankFailure, match=r"lm-eval cannot run .*lost.yaml.*HF_DATASETS_OFFLINE=0"):
        ranks(2)(runs.run, ["--load", str(model), "--tasks", str(task)])


def test_what_is_wrong_in_a_task_is_named_without_advice_about_downloads(
    ranks: RankPools, model: Path, tasks: list[str], tmp_path: Path
) -> None:
    task = tmp_path / "wrong.yaml"
    task.write_text(Path(tasks[0]).read_text().replace("output_type: multiple_choice", "output_type: no_such_type"))
    with pytest.raises(RankFailure, match=r"lm-eval cannot run .*wrong.yaml: ValueError: .*no_such_type") as failure:
        ranks(1)(runs.run, ["--load", str(model), "--tasks", str(task)])
    assert "OFFLINE" not in str(failure.value)
