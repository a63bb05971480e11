"""The predicted time of a step follows from its formulas, by hand for simple cases, with rates that count."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.models.registry import FAMILIES
from megatron.options.config import Config, ConfigError
from megatron.parallel.costs import MatrixProduct
from megatron.parallel.layout import Layout
from megatron.plan.expert_memory import exchange_bytes
from megatron.plan.flops import declared_layers
from megatron.plan.microbatch import MicrobatchSizes
from megatron.plan.pipeline_schedules import PassKind, PipelineSchedule
from megatron.plan.rates.rates import Rates, Span, Starts
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.layers import layer_passes
from megatron.plan.timing.step import StepTime, step_time
from megatron.plan.timing.text import for_rates, time_lines
from megatron.plan.timing.timeline import simulate
from megatron.tasks.registry import TASKS
from tests.plan.configs import config

SMALL = {"architecture": "llama", "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}
SMALL |= {"position_embedding_type": "rope", "hidden_dropout": 0.0, "attention_dropout": 0.0}
SMALL |= {"ffn_hidden_size": 96, "make_vocab_size_divisible_by": 8, "untie_embeddings_and_output_weights": True}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CountingRates(Rates):
    """A second for each FLOP, byte or number of the kinds that a test asks for; nothing for the others."""

    is_measured = True

    of: dict[str, float]
    cores: int = 0

    def product(self, precision: str, role: str, tokens: float, outputs: float, inputs: float) -> float:
        return self.of.get(role, self.of.get("product", 0.0)) * 2 * tokens * outputs * inputs

    def attention(self, precision: str, direction: str, **sizes: Any) -> float:
        pairs = sizes["rows"] * sizes["heads"] * sizes["head_size"] * sizes["row_tokens"] ** 2 * sizes["seen_share"]
        return self.of.get("attention", 0.0) * pairs * (1 if direction == "forward" else 2)

    def pointwise(self, kind: str, direction: str, precision: str, numbers: float) -> float:
        return self.of.get(kind, self.of.get("pointwise", 0.0)) * numbers

    def collective(self, kind: str, size_bytes: float, span: Span) -> float:
        return self.of.get(kind, self.of.get("collective", 0.0)) * size_bytes

    def update(self, optimizer: str, precision: str, numbers: float) -> float:
        return self.of.get("update", 0.0) * numbers

    def copy(self, size_bytes: float) -> float:
        return self.of.get("copy", 0.0) * size_bytes

    def host_copy(self, size_bytes: float) -> float:
        return self.of.get("host_copy", 0.0) * size_bytes

    def slowdown(self, busy_ranks: int) -> float:
        return max(1.0, busy_ranks / self.cores) if self.cores else 1.0


def rates(device: str = "cuda", cores: int = 0, **of: float) -> CountingRates:
    start = of.pop("start", 0.0)
    return CountingRates(
        title="test", device=device, source="", origin="test", starts=Starts(*[start] * 5),
        peak_flops={"fp32": 1.0, "bf16": 1.0}, of=of, cores=cores,
    )  # fmt: skip


def run(model: dict[str, Any] | None = None, **sections: Any) -> Config:
    sections["parallel"] = {"device": "cuda", **sections.get("parallel", {})}
    sections["training"] = {"seq_length": 32, "global_batch_size": 8, "train_iters": 10, **sections.get("training", {})}
    return config({**SMALL, **(model or {})}, **sections)


def timed(given_run: Config, num_devices: int = 1, per_node: int = 8, **of: Any) -> StepTime:
    per_node = min(per_node, num_devices)
    return step_time(given_run, Cluster.of(num_devices // per_node, per_node), rates(given_run.parallel.device, **of))


def matrices(given_run: Config) -> int:
    """Numbers of the matrices that all tokens are multiplied with, written out for a Llama."""
    model = given_run.model
    h, f, layers = model.hidden_size, model.ffn_size, model.num_layers
    return layers * (4 * h * h + 3 * h * f) + h * model.vocab_size


def test_a_step_on_one_rank_takes_its_products() -> None:
    """Each matrix forward, for the gradient of its input, and for its own: 6 FLOPs a number and token."""
    tokens = 8 * 32
    assert timed(run(), product=1.0).seconds == pytest.approx(6 * tokens * matrices(run()))
    for role in ("forward", "input", "weight"):
        assert timed(run(), 1, 8, **{role: 1.0}).seconds == pytest.approx(2 * tokens * matrices(run()))
    causal = 3 * 4 * 8 * 64 * 32**2  # forward, and twice as much back, in 4 layers of 8 rows
    assert timed(run(), attention=1.0).seconds == pytest.approx(causal)
    assert timed(run(), product=1.0).parts.compute == pytest.approx(6 * tokens * matrices(run()))


def test_the_largest_logits_take_one_of_the_two_products_of_a_forward_pass_once() -> None:
    logged, clipped = {"logging": {"log_max_attention_logit": True}}, {"optimizer": {"qk_clip": True}}
    forward = 4 * 8 * 64 * 32**2
    for more in ({}, {"recompute_granularity": "full"}):
        plain = timed(run(training=more), attention=1.0).seconds
        for sections in (logged, clipped, logged | clipped):
            assert timed(run(training=more, **sections), attention=1.0).seconds - plain == pytest.approx(forward / 2)
    # a CPU needs them where a bound exceeds the threshold alone
    host = {"device": "cpu"}
    assert (
        timed(run(parallel=host, **clipped), attention=1.0).seconds == timed(run(parallel=host), attention=1.0).seconds
    )
    for exchange in ("ring", "all-to-all"):
        shared = {"context_parallel_size": 2, "context_parallel_exchange": exchange}
        of_ranks = [timed(run(parallel=shared, **more), 2, attention=1.0).seconds for more in ({}, clipped)]
        assert of_ranks[1] - of_ranks[0] == pytest.approx(forward / 2 / 2)
    gathered = [timed(run(parallel=shared, **sections), 2, all_gather=1.0).seconds for sections in ({}, clipped)]
    assert gathered[1] - gathered[0] == pytest.approx(4 * 8 * 64 * 32 * 4)  # keys of 4 layers and 8 rows, fp32


def test_full_recomputation_adds_a_forward_pass_but_for_the_last_product() -> None:
    """Torch's checkpoint ends at the input of the last product: its result is read by no gradient."""
    tokens, layers = 8 * 32, 4
    h, f = 64, 96
    plain, full = (timed(run(training={"recompute_granularity": g}), product=1.0) for g in ("none", "full"))
    assert full.seconds - plain.seconds == pytest.approx(2 * tokens * layers * (4 * h * h + 2 * h * f))
    assert full.parts.recompute == pytest.approx(full.seconds - plain.seconds)
    # a dropout behind it keeps its mask
    dropped = run({"hidden_dropout": 0.1}, training={"recompute_granularity": "full"})
    assert timed(dropped, product=1.0).parts.recompute == pytest.approx(2 * tokens * layers * (4 * h * h + 3 * h * f))
    core = timed(run(training={"recompute_granularity": "selective"}), attention=1.0)
    assert core.parts.recompute == pytest.approx(timed(run(), attention=1.0).seconds / 3)


def test_frozen_weights_need_no_gradient_of_their_own() -> None:
    lora = run(lora={"lora_rank": 4, "lora_target_modules": ("q_proj", "v_proj")})
    assert timed(lora, weight=1.0).seconds < 0.05 * timed(run(), weight=1.0).seconds
    assert timed(lora, weight=1.0).seconds > 0


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero-bubble"])
def test_equal_stages_wait_as_the_schedule_says(name: str) -> None:
    """Layers alone cost time, so the stages are alike."""
    chunks = 2 if name == "interleaved" else 1
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_schedule": name, "pipeline_partition_method": "2,2"}
    if chunks == 2:
        parallel |= {"num_virtual_stages_per_pipeline_rank": 2, "pipeline_partition_method": "1,1,1,1"}
    time = timed(run(parallel=parallel), 2, swiglu=1.0)
    schedule = PipelineSchedule(name, 2, 8, chunks)
    busy = time.seconds - time.parts.wait
    if name == "zero-bubble":  # of an operation without weights: no part of the gradients is deferred
        assert time.parts.wait > 0
    else:
        # forward and backward cost alike here, in which the formula has the same share
        assert time.parts.wait / time.seconds == pytest.approx(schedule.bubble())
    assert busy == pytest.approx(timed(run(), 1, swiglu=1.0).seconds / 2)


def test_unequal_stages_wait_for_the_slowest() -> None:
    """In the middle of a step each microbatch takes the time of the slowest stage."""
    costs = {0: 1.0, 1: 3.0, 2: 2.0}
    schedule = PipelineSchedule("1f1b", 3, 80)
    simulated = simulate(schedule, lambda stage, chunk, kind: costs[stage], 0.0)
    assert simulated.seconds == pytest.approx(max(schedule.ends(lambda stage, *_: costs[stage])))
    assert simulated.schedule.num_microbatches < 80  # not all of them were simulated
    assert simulated.seconds == pytest.approx(80 * 2 * 3.0, rel=0.1)


@given(
    st.sampled_from(["1f1b", "zero-bubble"]),
    st.integers(2, 5),
    st.integers(1, 120),
    st.lists(st.floats(0.5, 2), min_size=5, max_size=5),
    st.floats(0, 1),
)
@settings(max_examples=40, deadline=None)
def test_the_middle_of_a_step_may_be_left_out(name: str, p: int, m: int, costs: list[float], message: float) -> None:
    schedule = PipelineSchedule(name, p, m)

    def cost(stage: int, chunk: int, kind: PassKind) -> float:
        return costs[stage] * (2 if kind is PassKind.BACKWARD else 1)

    whole = max(schedule.ends(cost, message))
    assert simulate(schedule, cost, message).seconds == pytest.approx(whole, rel=0.02)
    # ranks with a core each are devices of their own
    hosts = [{0: 1}] * p
    assert simulate(schedule, cost, message, hosts, lambda busy: 1.0).seconds == pytest.approx(whole, rel=0.02)


def test_ranks_that_share_a_core_take_the_sum_of_their_work() -> None:
    """Two lockstep ranks on one core take twice as long; a pipeline on one core takes what all its stages compute."""
    host = {"device": "cpu"}
    alone = timed(run(parallel=host), 1, cores=1, product=1.0)
    both = timed(run(parallel=host), 2, cores=1, product=1.0)
    # half as many microbatches each, at half the speed
    assert both.seconds == pytest.approx(alone.seconds)
    assert both.parts.sharing == pytest.approx(both.parts.compute)
    stages = {**host, "pipeline_model_parallel_size": 2, "pipeline_partition_method": "2,2"}
    assert timed(run(parallel=stages), 2, cores=1, product=1.0).seconds == pytest.approx(alone.seconds)
    assert timed(run(parallel=stages), 2, cores=2, product=1.0).seconds < 0.8 * alone.seconds


def test_tensor_parallel_ranks_exchange_the_stream_twice_a_layer_and_pass() -> None:
    """And once for the embedding, once for the gradient of the loss."""
    stream = 32 * 64 * 4  # bytes of a microbatch
    parallel = {"tensor_model_parallel_size": 2}
    time = timed(run(parallel=parallel), 2, all_reduce=1.0)
    sums = 8 * (4 * 4 + 2)
    assert time.parts.tensor == pytest.approx(sums * stream)
    # a ring sends 2 (t - 1) / t of it
    loss = 8 * 3 * 32 * 4 * 2 / 2
    assert time.sent_bytes.tensor == pytest.approx(sums * stream + loss)
    # sequence parallelism has a gathering and a scattering in place of each sum, and gathers inputs again for the
    # gradients of both column-parallel products
    rows = timed(run(parallel={**parallel, "sequence_parallel": True}), 2, all_gather=1.0)
    again = 8 * 4 * 2
    assert rows.parts.tensor == pytest.approx((sums + again) * stream + 8 * 2 * 3 * 32 * 4 - 0 * stream, rel=0.05)
    # behind products of the same time it is hidden
    hidden = timed(run(parallel=parallel), 2, all_reduce=1.0, weight=1e3)
    assert hidden.parts.tensor == pytest.approx((8 * (4 * 2 + 2)) * stream)


def test_zero_3_gathers_weights_and_reduces_each_microbatch() -> None:
    wide = {"hidden_size": 512, "ffn_hidden_size": 512, "num_layers": 2}
    zero = {"optimizer": {"zero_stage": 3}}
    time = timed(run(wide, **zero), 2, all_gather=1.0)
    # norms are never cut; what was gathered forward is still there backward
    cut = 4 * (2 * (4 * 512 * 512 + 3 * 512 * 512) + 2 * 1000 * 512)
    assert time.parts.gather == pytest.approx(4 * cut)
    assert time.sent_bytes.weights == pytest.approx(4 * cut / 2)
    reduced = timed(run(wide, **zero), 2, reduce_scatter=1.0)
    assert reduced.parts.reduction == pytest.approx(4 * (cut + 4 * 5 * 512), rel=1e-6)


def test_sums_of_gradients_hide_behind_the_last_backward_pass() -> None:
    """All but the last bucket, where a bucket takes less time than the pass that fills it."""
    wide = {"hidden_size": 512, "ffn_hidden_size": 2048, "num_layers": 8, "vocab_size": 64}
    quick = timed(run(wide), 2, product=1.0, all_reduce=1.0)
    slow = timed(run(wide), 2, product=1.0, all_reduce=1e6)
    total = slow.seconds - timed(run(wide), 2, product=1.0).seconds
    assert 0 < quick.parts.reduction < 0.2 * total / 1e6
    assert slow.parts.reduction == pytest.approx(total)


def test_messages_take_time_between_stages() -> None:
    """Of one microbatch: there and back, while all stages but one wait."""
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_partition_method": "2,2"}
    one = run(parallel=parallel, training={"global_batch_size": 1})
    time = timed(one, 2, product=1.0, send=1e3)
    message = 32 * 64 * 4 * 1e3
    without = timed(one, 2, product=1.0)
    assert time.seconds - without.seconds == pytest.approx(2 * message)
    assert time.parts.messages == pytest.approx(2 * message)
    assert time.sent_bytes.pipeline == 32 * 64 * 4


def test_experts_exchange_their_choices() -> None:
    """There and back, forward and backward; a router decides for all of them alike."""
    moe = {"num_experts": 4, "moe_router_topk": 2, "architecture": "mixtral"}
    parallel = {"expert_model_parallel_size": 2}
    given_run = run(moe, parallel=parallel)
    time = timed(given_run, 2, all_to_all=1.0)
    choices, layers, microbatches = 2 * 32, 4, 4
    counts = 4 * 8
    assert time.parts.expert == pytest.approx(microbatches * layers * (4 * choices * 64 * 4 + counts))
    # as the plan says of it
    sizes = MicrobatchSizes(given_run)
    assert time.sent_bytes.expert == microbatches * exchange_bytes(declared_layers(given_run), sizes)
    # each token passes through two of four experts, and each rank has half of them
    active = 2 * 3 * 64 * 96 * layers
    whole = timed(run(moe), 1, forward=1.0).seconds / (2 * 8 * 32)
    assert whole == pytest.approx(layers * 4 * 64 * 64 + active + 64 * 1000 + layers * 4 * 64)


def test_a_ring_is_hidden_behind_its_attention_and_heads_are_not() -> None:
    for exchange, is_hidden in (("ring", True), ("all-to-all", False)):
        parallel = {"context_parallel_size": 2, "context_parallel_exchange": exchange}
        time = timed(run(parallel=parallel), 2, attention=1e3, send=1.0, all_to_all=1.0)
        assert (time.parts.context == 0) == is_hidden
        # both have half of the pairs of a row each
        assert time.parts.compute == pytest.approx(timed(run(), 1, attention=1e3).seconds / 2)
        sent = timed(run(parallel=parallel), 2, send=1.0, all_to_all=1.0)
        assert sent.parts.context > 0


def test_replicas_sum_a_shard_each() -> None:
    zero = {"optimizer": {"zero_stage": 1}, "parallel": {"num_replicas": 2}}
    wide = {"hidden_size": 512, "ffn_hidden_size": 512, "num_layers": 2}
    time = timed(run(wide, **zero), 4)
    trained = 2 * (7 * 512 * 512 + 2 * 512) + 2 * 1000 * 512 + 512
    # two ranks a replica: half of the gradients to the owner, all weights from it; then 2 (r - 1) / r of a half
    assert time.sent_bytes.replicas == pytest.approx(4 * trained / 2, rel=1e-3)
    assert time.sent_bytes.gradients == pytest.approx(2 * 4 * trained / 2, rel=1e-3)


def test_a_window_and_a_cap_change_what_attention_costs() -> None:
    window = run({"attention_window": 8})
    seen = (8 * 9 / 2 + (32 - 8) * 8) / (32 * 33 / 2)
    assert timed(window, 1, attention=1.0).seconds == pytest.approx(seen * timed(run(), 1, attention=1.0).seconds)


LAYOUTS = st.sampled_from(
    [
        {},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero-bubble"},
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
        {"context_parallel_size": 2},
        {"context_parallel_size": 2, "context_parallel_exchange": "all-to-all"},
    ]
)


@given(
    LAYOUTS,
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from(["none", "full", "selective"]),
    st.sampled_from(["cuda", "cpu"]),
    st.booleans(),
    st.sampled_from([4, 8]),
)
@settings(max_examples=60, deadline=None)
def test_parts_add_up_to_the_step(
    parallel: dict[str, Any], zero: int, recompute: str, device: str, bf16: bool, num_devices: int
) -> None:
    if parallel.get("pipeline_model_parallel_size", 1) > 1:
        zero = min(zero, 1)
    given_run = run(
        parallel={**parallel, "device": device},
        training={"recompute_granularity": recompute, "bf16": bf16, "global_batch_size": 16},
        optimizer={"zero_stage": zero},
    )
    every = {"product": 1.0, "attention": 2.0, "pointwise": 3.0, "collective": 5.0, "update": 7.0, "copy": 1.0}
    time = timed(given_run, num_devices, 4, start=11.0, cores=2 if device == "cpu" else 0, **every)
    assert time.parts.total == pytest.approx(time.seconds)
    for name, seconds in dataclasses.asdict(time.parts).items():
        assert seconds >= -1e-6 * time.seconds, name
    ends = [each.end for each in time.timeline]
    assert 0 < max(ends) <= time.seconds
    assert Counter(each.action.kind for each in time.timeline)[PassKind.FORWARD] % time.timed_microbatches == 0


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_a_time(family: str) -> None:
    preset = {"architecture": family, "num_layers": 2, "num_experts": 4} if "moe" in family or "mix" in family else {}
    given_run = config({"architecture": family, **preset}, parallel={"device": "cuda"}, training={"seq_length": 64})
    time = timed(given_run, 1, product=1.0, pointwise=1.0, attention=1.0)
    assert 0 < time.seconds < float("inf")
    assert time.parts.total == pytest.approx(time.seconds)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_task_has_a_time(task: str) -> None:
    """Of packed rows the data decides how many there are: what is assumed of it is said."""
    time = timed(run(training={"task": task}), 1, product=1.0)
    assert 0 < time.seconds < float("inf")
    assert (time.assumption == "") == (task == "pretrain")


def test_passes_of_a_reference_come_before_the_step() -> None:
    lora = {"lora_rank": 4, "lora_target_modules": ("q_proj",)}
    preference = {"reference": "adapters_off"}
    time = timed(run(training={"task": "preference"}, lora=lora, preference=preference), 1, forward=1.0)
    assert time.parts.before == pytest.approx(time.parts.compute, rel=0.05)
    assert timed(run(training={"task": "preference"}), 1, forward=1.0).parts.before == 0


def test_a_cost_without_a_time_is_an_error_by_name() -> None:
    """So no operation that a family declares is left out in silence."""

    @dataclasses.dataclass(frozen=True)
    class Convolution:
        pass

    given_run = run()
    layer = declared_layers(given_run)[2]
    name = next(name for name, shard in layer.shards.items() if isinstance(shard.cost, MatrixProduct))
    unknown: Any = Convolution()
    shards = {**layer.shards, name: dataclasses.replace(layer.shards[name], cost=unknown)}
    with pytest.raises(TypeError, match=rf"layers.0.{name}: no time is known of Convolution"):
        layer_passes(
            dataclasses.replace(layer, shards=shards), MicrobatchSizes(given_run), Layout(), propagates=True,
            objective=None,
        )  # fmt: skip


def test_spans_follow_from_the_order_of_the_ranks() -> None:
    layout = Layout(tensor_size=4, context_size=2, num_batch_ranks=4, num_stages=2)
    cluster = Cluster.of(8, 8)
    assert cluster.span_of(layout, "tensor") == Span(4, 4, 2)
    assert cluster.span_of(layout, "context") == Span(2, 2, 4)
    # ranks r, r + 4, ...: two of each group on a node, and four groups
    assert cluster.span_of(layout, "grad") == Span(8, 2, 4)
    assert cluster.span_of(layout, "pipeline") == Span(2, 1, 8)
    assert cluster.ranks_by_node(4, 20) == {0: 4, 1: 8, 2: 4}


def test_a_plan_shows_the_time_and_its_largest_parts() -> None:
    given_run = run(parallel={"tensor_model_parallel_size": 2})
    found = rates(product=1e-9, all_reduce=1e-6)
    time = step_time(given_run, Cluster.of(1, 2), found)
    first, second, *rest = time_lines(given_run, Cluster.of(1, 2), found)
    assert f"{time.seconds:.3g} s a step, {256 / time.seconds:,.0f} tokens/s" in first
    assert second == f"tensor {time.parts.tensor / time.seconds:.0%}, compute {time.parts.compute / time.seconds:.0%}"
    assert rest == ["by the rates of test, measured"]
    with pytest.raises(ConfigError, match="but the run is for cuda"):
        for_rates(given_run, rates("cpu"))
    auto = dataclasses.replace(given_run, parallel=dataclasses.replace(given_run.parallel, device="auto"))
    assert for_rates(auto, rates("cpu")).parallel.device == "cpu"
