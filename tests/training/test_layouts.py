"""One model, one seed: every layout starts alike and learns alike, in float32.

The reference is one process without any parallelism, itself checked against transformers in
tests/models/test_hf_logits.py. `-m slow` runs the whole product of layouts, recomputation and ZeRO stages.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from typing import Any

import pytest

from tests.ranks import RankPools
from tests.training import layouts

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
STEPS = 2
"""Each compares the gradients and the update, the last of which the validation sees; most of their time is that of
collectives."""
LEARNED = 8
LAYOUTS = ["111", "211", "121", "112", "221", "212", "122", "411", "141"]
"""Pipeline, tensor and data-parallel sizes; with an `s`, sequence parallelism too."""
WITH_SEQUENCE = ["121s", "221s", "122s", "141s"]
RECOMPUTE = ["none", "selective --recompute-modules core_attn layernorm mlp_act", "full"]


def arguments(layout: str, recompute: str = "none", zero: int = 0) -> tuple[int, str]:
    """World size and flags of a layout."""
    pp, tp, dp = map(int, layout[:3])
    flags = f"--pipeline-model-parallel-size {pp} --tensor-model-parallel-size {tp} --zero-stage {zero}"
    flags += f" --recompute-granularity {recompute}" + (" --sequence-parallel" if layout.endswith("s") else "")
    if tp > 1 and dp == 1:
        # two microbatches instead of four change no result, and halve the collectives, which cost most on few cores
        flags += " --micro-batch-size 4"
    return pp * tp * dp, flags


def whole_product() -> list[tuple[str, str, int]]:
    """Every layout with every recomputation and every ZeRO stage that it allows."""
    cases = itertools.product(LAYOUTS + WITH_SEQUENCE, RECOMPUTE, range(4))
    return [(layout, recompute, zero) for layout, recompute, zero in cases if zero < 2 or layout[0] == "1"]


def each_once(model_index: int) -> list[tuple[str, str, int]]:
    """Every layout once, recomputation and ZeRO stage taken in turn, shifted from model to model."""
    cases = []
    for index, layout in enumerate(LAYOUTS + WITH_SEQUENCE):
        turn = index + model_index
        zero = turn % 4 if layout[0] == "1" else turn % 2
        cases.append((layout, RECOMPUTE[turn % 3], zero))
    return cases


@pytest.fixture(scope="module")
def reference(ranks: RankPools) -> Any:
    """What one process without parallelism gives, computed once a model."""
    return functools.cache(lambda model: reference_of(ranks, layouts.MODELS[model], STEPS, LEARNED))


def reference_of(ranks: RankPools, flags: str, steps: int, until_learned: int) -> dict[str, Any]:
    """The results of so many steps of one process, whose model learns in more of them."""
    result, longer = (ranks(1)(layouts.train, flags, count)[0] for count in (steps, until_learned))
    assert longer["losses"][:steps] == result["losses"]
    assert min(longer["losses"]) < 0.985 * longer["losses"][0], "a model that learns nothing proves nothing"
    return result


def assert_equals_reference(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-6)
    assert result["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-6)
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert result["validation"] == pytest.approx(expected["validation"], rel=1e-4)


@pytest.mark.parametrize(
    ("model", "layout", "recompute", "zero"),
    [
        # every fourth layout of each model, each layout with a model or two; -m slow: the others
        pytest.param(model, *case, marks=pytest.mark.slow if (index + place) % 4 else ())
        for index, model in enumerate(layouts.MODELS)
        for place, case in enumerate(each_once(index))
    ],
)
def test_every_layout_learns_like_one_process(
    ranks: RankPools, reference: Any, model: str, layout: str, recompute: str, zero: int
) -> None:
    world_size, flags = arguments(layout, recompute, zero)
    results = ranks(world_size)(layouts.train, f"{layouts.MODELS[model]} {flags}", STEPS)
    assert all(result == results[0] for result in results), "ranks disagree"
    assert_equals_reference(results[0], reference(model))


@pytest.mark.slow
@pytest.mark.parametrize("model", layouts.MODELS)
@pytest.mark.parametrize(("layout", "recompute", "zero"), whole_product())
def test_whole_product_learns_like_one_process(
    ranks: RankPools, reference: Any, model: str, layout: str, recompute: str, zero: int
) -> None:
    world_size, flags = arguments(layout, recompute, zero)
    result = ranks(world_size)(layouts.train, f"{layouts.MODELS[model]} {flags}", STEPS)[0]
    assert_equals_reference(result, reference(model))


def with_compiled_operators() -> list[Any]:
    """Every layout of the models that have these operators; always one of them, without the seconds of a C++ compiler.

    That backend traces, differentiates and cuts into forward and backward what the real one compiles.
    """
    partitioned = "aot_eager_decomp_partition"
    found = [
        pytest.param("llama_gqa", "121s", RECOMPUTE[1], 1, partitioned),
        pytest.param("llama_gqa", "211", RECOMPUTE[0], 0, partitioned, marks=pytest.mark.slow),
    ]
    for index, model in enumerate(("llama_mha", "llama_gqa", "llama_gqa_tied")):
        marks = pytest.mark.slow, needs_compiler
        found += [pytest.param(model, *case, "inductor", marks=marks) for case in each_once(index)]
    return found


@pytest.mark.parametrize(("model", "layout", "recompute", "zero", "backend"), with_compiled_operators())
def test_compiled_operators_learn_like_one_process(
    ranks: RankPools, reference: Any, model: str, layout: str, recompute: str, zero: int, backend: str
) -> None:
    world_size, flags = arguments(layout, recompute, zero)
    results = ranks(world_size)(
        layouts.train_compiled, f"{layouts.MODELS[model]} {flags}", STEPS, backend, timeout_s=600
    )
    assert results[0]["graphs"] >= 3, "rotation, SwiGLU and RMSNorm are compiled"
    assert_equals_reference(results[0], reference(model))


@pytest.mark.parametrize(
    "layout", ["122s", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("112", "212"))]
)
def test_packed_documents_with_masked_loss_are_layout_independent(ranks: RankPools, layout: str) -> None:
    """Data-parallel ranks then hold different numbers of loss tokens."""
    packed = "--eod-token-id 7 --reset-position-ids --reset-attention-mask --eod-mask-loss"
    flags = f"{layouts.MODELS['bloom_alibi']} {packed}"
    expected = ranks(1)(layouts.train, flags, STEPS)[0]
    world_size, layout_flags = arguments(layout)
    assert_equals_reference(ranks(world_size)(layouts.train, f"{flags} {layout_flags}", STEPS)[0], expected)


@pytest.mark.parametrize(
    "flags",
    [
        "--zero-stage 2 --offload-optimizer",
        "--zero-stage 3 --offload-optimizer --offload-param",
        "--no-pipeline-parallel",
        "--optimizer adam",
        pytest.param("--no-decoupled-weight-decay --zero-stage 1", marks=pytest.mark.slow),
        "--train-iters 2 --weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 50 --zero-stage 1",
        "--train-iters 2 --weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 50 --zero-stage 3",
        "--pipeline-partition-method uniform --pipeline-model-parallel-size 2",
        pytest.param(
            "--pipeline-partition-method type:TransformerLayer --pipeline-model-parallel-size 2", marks=pytest.mark.slow
        ),
    ],
)
def test_engines_and_offload_agree(ranks: RankPools, reference: Any, flags: str) -> None:
    """Also `adam` and `adamw`, which are one."""
    model = layouts.MODELS["llama_gqa_tied"]
    optimizer = "" if "-weight-decay" not in flags else flags.partition(" --zero-stage")[0]
    own = ranks(1)(layouts.train, f"{model} {optimizer}", STEPS)[0] if optimizer else None
    expected = own or reference("llama_gqa_tied")
    assert_equals_reference(ranks(2)(layouts.train, f"{model} {flags}", STEPS)[0], expected)


def test_sgd_agrees_over_layouts(ranks: RankPools) -> None:
    flags = f"{layouts.MODELS['bloom_learned']} --optimizer sgd --lr 0.5 --clip-grad 0.3"
    expected = ranks(1)(layouts.train, flags, STEPS)[0]
    result = ranks(4)(layouts.train, f"{flags} {arguments('221s')[1]}", STEPS)[0]
    assert_equals_reference(result, expected)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, marks=() if layout in often else pytest.mark.slow)
        for model, often in (("bloom_learned", ("211", "221s")), ("llama_gqa", ("112",)))
        for layout in ("111", "211", "112", "221s")
    ],
)
def test_bf16_stays_near_float32(ranks: RankPools, reference: Any, model: str, layout: str) -> None:
    """A tied or untied output weight whose gradient were lost on some stage would move the norm by percents."""
    expected = reference(model)
    world_size, flags = arguments(layout)
    result = ranks(world_size)(layouts.train, f"{layouts.MODELS[model]} {flags} --bf16", STEPS)[0]
    assert result["losses"][0] == pytest.approx(expected["losses"][0], rel=2e-4)
    assert result["norms"][0] == pytest.approx(expected["norms"][0], rel=2e-3)
    assert result["losses"] == pytest.approx(expected["losses"], rel=5e-3)
    assert result["validation"] == pytest.approx(expected["validation"], rel=5e-3)


@pytest.mark.parametrize(
    ("model", "layout", "tokens"),
    [
        pytest.param("bloom_learned", "111", 16, marks=pytest.mark.slow),
        ("bloom_learned", "211", 64),  # the only use of the tied weight on its stage
        pytest.param("bloom_learned", "121s", 16, marks=pytest.mark.slow),
        ("llama_gqa", "112", 16),
    ],
)
def test_a_loss_that_adds_to_the_optimizers_gradients_stays_near_float32(
    ranks: RankPools, reference: Any, model: str, layout: str, tokens: int
) -> None:
    """In chunks of so many of a microbatch's tokens, 64 or 128."""
    expected = reference(model)
    world_size, flags = arguments(layout)
    num_microbatches = 2 if "--micro-batch-size 4" in flags else 4 // int(layout[2])
    results = ranks(world_size)(layouts.train_in_chunks, f"{layouts.MODELS[model]} {flags} --bf16", STEPS, tokens)
    result, num_sums = results[-1]
    assert num_sums == STEPS * num_microbatches
    assert result["losses"][0] == pytest.approx(expected["losses"][0], rel=2e-4)
    assert result["norms"][0] == pytest.approx(expected["norms"][0], rel=2e-3)
    assert result["losses"] == pytest.approx(expected["losses"], rel=5e-3)
    assert result["validation"] == pytest.approx(expected["validation"], rel=5e-3)


@pytest.mark.parametrize(
    "layout", ["211", "112", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("111", "121s"))]
)
def test_fp16_stays_near_float32(ranks: RankPools, reference: Any, layout: str) -> None:
    """Tied weights on two stages too, whose gradients are summed in another place than the others'."""
    expected = reference("bloom_learned")
    world_size, flags = arguments(layout)
    flags = f"{layouts.MODELS['bloom_learned']} {flags} --initial-loss-scale 1024"
    result = ranks(world_size)(layouts.train_fp16, flags, STEPS)[0]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-3)
    assert result["validation"] == pytest.approx(expected["validation"], rel=1e-3)
    assert result["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-3)
    assert result["skipped"] == 0


@pytest.mark.parametrize("stage", [1, 3])
def test_fp16_updates_do_not_depend_on_when_the_loss_scale_grows(ranks: RankPools, stage: int) -> None:
    flags = f"{layouts.MODELS['llama_gqa_tied']} --zero-stage {stage} --initial-loss-scale 256 --loss-scale-window"
    flags = f"--optimizer sgd --sgd-momentum 0 --lr 0.1 --clip-grad 0.8 {flags}"  # Adam would hide a halved gradient
    constant, growing = (ranks(1)(layouts.train_fp16, f"{flags} {window}", 6)[0] for window in (1000, 2))
    assert (constant["scales"][-1], growing["scales"][-1]) == (256, 1024)
    assert growing["norms"] == pytest.approx(constant["norms"], rel=1e-3)
    assert growing["losses"] == pytest.approx(constant["losses"], rel=1e-4)


def test_fp16_skips_the_steps_that_overflow_and_lowers_the_scale(ranks: RankPools) -> None:
    flags = f"{layouts.MODELS['bloom_learned']} {arguments('211')[1]} --initial-loss-scale 33554432 --hysteresis 1"
    results = ranks(2)(layouts.train_fp16, flags, 12)
    assert results[0]["skipped"] == results[1]["skipped"] > 0
    scales = results[0]["scales"]
    assert scales == sorted(scales, reverse=True)
    assert scales[-1] < 33554432
    assert results[0]["losses"][-1] < results[0]["losses"][0]


@pytest.mark.parametrize(
    ("layout", "extra"),
    [
        pytest.param("111", "", marks=pytest.mark.slow),
        pytest.param("221", "", marks=pytest.mark.slow),
        ("122s", "--zero-stage 1"),
        ("212", "--bf16"),
        pytest.param("122", "--zero-stage 2 --bf16", marks=pytest.mark.slow),
        ("112", "--zero-stage 3"),
        pytest.param("221s", "--recompute-granularity full", marks=pytest.mark.slow),
        pytest.param("121", "--recompute-granularity selective", marks=pytest.mark.slow),
    ],
)
def test_resumed_run_repeats_the_losses_bit_for_bit(ranks: RankPools, tmp_path: Any, layout: str, extra: str) -> None:
    """With dropout on, so that the random streams must continue too."""
    world_size, flags = arguments(layout)
    if "--zero-stage" in extra or "--recompute" in extra:
        flags = flags.replace("--zero-stage 0", "") if "--zero-stage" in extra else flags
        flags = flags.replace("--recompute-granularity none", "") if "--recompute" in extra else flags
    flags = f"{layouts.MODELS['bloom_learned']} {flags} {extra} --hidden-dropout 0.1 --attention-dropout 0.1"
    whole, resumed = ranks(world_size)(layouts.train_interrupted, flags, 2, 5, str(tmp_path))[0]
    assert whole[2:] == resumed
    assert len(set(whole)) == 5


def test_dropout_draws_apart_where_it_must(ranks: RankPools) -> None:
    """With dropout, data-parallel ranks that drew alike would repeat one mask: the same loss as fewer samples give."""
    flags = f"{layouts.MODELS['bloom_learned']} --hidden-dropout 0.5 --attention-dropout 0.5"
    plain = ranks(1)(layouts.train, flags, 2)[0]
    again = ranks(1)(layouts.train, flags, 2)[0]
    parallel = ranks(2)(layouts.train, f"{flags} {arguments('121')[1]}", 2)[0]
    assert plain == again
    assert plain["losses"][0] != parallel["losses"][0]
    assert plain["losses"][0] == pytest.approx(parallel["losses"][0], rel=0.05)


def test_batch_ramp_up_changes_the_number_of_microbatches(ranks: RankPools) -> None:
    """A step of 4 samples, then one of 8: equal on a pipeline, data-parallel and without either."""
    flags = layouts.MODELS["llama_mha"]
    expected = ranks(1)(layouts.train_sizes, flags, [4, 8, 8, 4])[0]
    for layout, zero in [("211", 0), ("112", 2), ("112", 1), ("122s", 3)]:
        world_size, more = arguments(layout, zero=zero)
        assert ranks(world_size)(layouts.train_sizes, f"{flags} {more}", [4, 8, 8, 4])[0] == pytest.approx(
            expected, rel=1e-5
        )


@pytest.mark.parametrize(("flags", "forward"), [("", "_exec_forward_pass"), ("--no-pipeline-parallel", "_loss")])
def test_hpus_lazy_mode_launches_each_microbatch(ranks: RankPools, flags: str, forward: str) -> None:
    (calls,) = ranks(1)(layouts.calls_marked, f"{layouts.MODELS['llama_gqa']} --num-layers 1 {flags}", 2)
    # forward and backward of four microbatches, two steps
    assert [name == forward for name in calls] == [True, False] * 4 * 2
