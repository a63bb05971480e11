"""Rates of a machine: look-ups of both origins, and files with faults, each by name."""

from __future__ import annotations

import copy
import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.options.config import ConfigError
from megatron.parallel.layout import Layout
from megatron.plan.rates.files import load_rates, machine_names, rates_of
from megatron.plan.rates.rates import POINTWISE, Rates, Span
from megatron.plan.timing.cluster import Cluster
from megatron.plan.timing.operations import AxisExchange, Hidden, LinearProduct, Machine

TOKENS, OUTPUTS, INPUTS = (16, 64, 256), (32, 128), (32, 128, 512)
NODE = Span(4, 4)


def product_seconds(tokens: int, outputs: int, inputs: int) -> float:
    """Return a start of 2 us, and 10 GFLOP/s."""
    return float(f"{2e-6 + 2 * tokens * outputs * inputs / 1e10:.4g}")


def measured() -> dict[str, Any]:
    """Return the values of a measured file, as YAML gives them."""
    products = [product_seconds(*sizes) for sizes in itertools.product(TOKENS, OUTPUTS, INPUTS)]
    attention = [1e-6 * heads * rows**2 for heads, rows, _ in itertools.product((2, 8), (16, 64), (8, 32))]
    line = {"numbers": [100, 1000, 100_000], "forward": "1e-6 2e-6 1e-4", "backward": "2e-6 4e-6 2e-4"}
    names = ("forward", "input", "weight")
    own = {
        "products": {
            "fp32": {"tokens": TOKENS, "outputs": OUTPUTS, "inputs": INPUTS, **dict.fromkeys(names, products)}
        },
        "attention": {
            "causal": {
                "fp32": {
                    "heads": [2, 8],
                    "row_tokens": [16, 64],
                    "head_size": [8, 32],
                    "group": [1],
                    "forward": attention,
                    "backward": [2 * seconds for seconds in attention],
                }
            }
        },
        "pointwise": {"rmsnorm": {"fp32": line}},
        "update": {"adamw": {"fp32": {"numbers": [1000, 100_000], "seconds": [1e-5, 1e-3]}}},
        "copy": {"bytes": [1000, 1_000_000], "seconds": [1e-6, 1e-4]},
        "starts": {"step": 1e-3, "microbatch": 2e-4, "layer_forward": 5e-5, "layer_backward": 8e-5, "message": 3e-5},
    }
    group = {"size": 2, "per_node": 2, "bytes": [1000, 1_000_000], "seconds": [1e-4, 1e-3]}
    return {
        "version": 1,
        "origin": "measured",
        "title": "a host of 4 cores",
        "device": "cpu",
        "source": "measured on a day",
        "cores": 4,
        "slowdown": {2: 1.1, 4: 1.2, 8: 2.5},
        "tables": [{"threads": 1, **own}, {"threads": 4, **copy.deepcopy(own)}],
        "collectives": {"all_reduce": [group, {**group, "size": 4, "per_node": 2}]},
        "peak_flops": {"fp32": 1e10},
    }


def published() -> dict[str, Any]:
    links = {"bytes_per_s": 4e11, "share": 0.8, "start_s": 1e-5, "hop_s": 2e-6}
    return {
        "version": 1,
        "origin": "published",
        "title": "a device",
        "device": "cuda",
        "source": "its data sheet",
        "peak_flops": {"bf16": 1e15},
        "products": {"share": 0.7, "half_tokens": 100, "half_channels": 100},
        "attention": {"forward_share": 0.5, "backward_share": 0.4, "half_tokens": 500},
        "memory_bytes_per_s": 3e12,
        "memory_share": 0.8,
        "host_bytes_per_s": 5e10,
        "kernel_start_s": 3e-6,
        "node_devices": 8,
        "within_node": links,
        "across_nodes": {**links, "bytes_per_s": 5e10},
        "starts": {"step": 1e-3, "microbatch": 0, "layer_forward": 0, "layer_backward": 0, "message": 1e-5},
    }


BOTH = pytest.mark.parametrize(
    ("rates", "precision"), [(rates_of(measured(), "m"), "fp32"), (rates_of(published(), "p"), "bf16")]
)


# ---------------------------------------------------------------------------------------------------------------------
# Look-ups


def test_products_are_exact_at_the_points_of_the_grid() -> None:
    rates = rates_of(measured(), "m")
    for sizes in itertools.product(TOKENS, OUTPUTS, INPUTS):
        assert rates.product("fp32", "weight", *sizes) == pytest.approx(product_seconds(*sizes), rel=1e-9)


def test_the_axes_of_a_grid_are_not_mixed_up() -> None:
    """Seconds that differ along each axis alone, looked up between its points."""
    tree = measured()
    table = tree["tables"][1]["products"]["fp32"]
    table["forward"] = [1e-6 * t * o**2 * i**3 for t, o, i in itertools.product(TOKENS, OUTPUTS, INPUTS)]
    found = rates_of(tree, "m").product("fp32", "forward", 32, 60, 200)
    assert found == pytest.approx(1e-6 * 32 * 60**2 * 200**3, rel=1e-9)  # a power is linear in the logarithms


def test_the_rate_of_the_largest_product_holds_beyond_it() -> None:
    rates = rates_of(measured(), "m")
    largest = rates.product("fp32", "forward", 256, 128, 512)
    assert rates.product("fp32", "forward", 2 * 256, 3 * 128, 5 * 512) == pytest.approx(30 * largest)


def test_attention_grows_with_the_square_of_a_row_beyond_the_grid() -> None:
    rates = rates_of(measured(), "m")
    sizes: dict[str, Any] = {"rows": 2, "heads": 4, "kv_heads": 4, "head_size": 8}
    assert rates.attention("fp32", "forward", row_tokens=64, **sizes) == pytest.approx(1e-6 * 8 * 64**2)
    assert rates.attention("fp32", "forward", row_tokens=640, **sizes) == pytest.approx(1e-6 * 8 * 640**2)
    half = rates.attention("fp32", "backward", row_tokens=64, seen_share=0.5, **sizes)
    assert half == pytest.approx(1e-6 * 8 * 64**2)


def test_seconds_of_numbers_are_exact_at_points_and_on_lines_between() -> None:
    rates = rates_of(measured(), "m")
    points = {10: 1e-6, 100: 1e-6, 550: 1.5e-6, 1000: 2e-6, 100_000: 1e-4, 1_000_000: 1e-3}
    for numbers, seconds in points.items():
        assert rates.pointwise("rmsnorm", "forward", "fp32", numbers) == pytest.approx(seconds)
        assert rates.pointwise("rmsnorm", "backward", "fp32", numbers) == pytest.approx(2 * seconds)


@BOTH
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_seconds_rise_with_each_size(rates: Rates, precision: str, data: Any) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5000), min_size=3, max_size=3))
    axis, times = data.draw(st.integers(0, 2)), data.draw(st.integers(2, 10))
    larger = [size * times if place == axis else size for place, size in enumerate(sizes)]
    kind = "rmsnorm" if rates.is_measured else data.draw(st.sampled_from(POINTWISE))

    def attention(heads: int, row_tokens: int, head_size: int) -> float:
        return rates.attention(
            precision, "backward", rows=1, heads=heads, kv_heads=heads, head_size=head_size, row_tokens=row_tokens
        )

    looks: list[Callable[..., float]] = [
        lambda *sizes: rates.product(precision, "forward", *sizes),
        attention,
        lambda *sizes: rates.pointwise(kind, "forward", precision, math.prod(sizes)),
        lambda *sizes: rates.update("adamw", precision, math.prod(sizes)),
        lambda *sizes: rates.copy(math.prod(sizes)),
        lambda *sizes: rates.host_copy(math.prod(sizes)),
        lambda *sizes: rates.collective("all_reduce", math.prod(sizes), NODE),
    ]
    for look in looks:
        assert 0 < look(*sizes) <= look(*larger) * (1 + 1e-9)


@BOTH
def test_exchanges_grow_with_the_group_and_with_those_that_share_its_links(rates: Rates, precision: str) -> None:
    seconds = [rates.collective("all_reduce", 1e8, Span(size, size)) for size in (1, 2, 4, 8)]
    assert seconds[0] == 0
    assert seconds == sorted(set(seconds))
    across = [rates.collective("all_reduce", 1e8, Span(16, 1, sharing)) for sharing in (1, 8, 16)]
    assert across[0] <= across[1] < across[2]


def test_a_collective_is_exact_in_a_measured_group() -> None:
    rates = rates_of(measured(), "m")
    for span in (Span(2, 2), Span(4, 2)):
        assert rates.collective("all_reduce", 1_000_000, span) == pytest.approx(1e-3)
        assert rates.collective("all_reduce", 1_000, span) == pytest.approx(1e-4)


def test_published_products_and_messages_follow_from_the_figures() -> None:
    rates = rates_of(published(), "p")
    large = rates.product("bf16", "forward", 10**6, 10**6, 10**6)
    assert large == pytest.approx(2e18 / 7e14, rel=1e-3)
    assert rates.product("bf16", "forward", 1000, 10**6, 10**6) == pytest.approx(1.1 * 2e15 / 7e14, rel=1e-3)
    # few tokens: the weight's bytes
    assert rates.product("bf16", "forward", 1, 10**4, 10**4) == pytest.approx(2e8 / 2.4e12, rel=0.2)
    # a ring within a node, and one of which each node's part has one device's network
    assert rates.collective("all_gather", 8e9, Span(8, 8)) == pytest.approx(7e9 / 3.2e11, rel=1e-2)
    assert rates.collective("all_gather", 8e9, Span(8, 1)) == pytest.approx(7e9 / 4e10, rel=1e-2)
    assert rates.collective("all_gather", 8e9, Span(8, 1, sharing=16)) == pytest.approx(7e9 / 2e10, rel=1e-2)


def test_a_group_has_only_the_links_between_its_own_devices() -> None:
    """Of Gaudi 2's 21 ports within a node three lead to each of the other cards; NVLink's lead to a switch."""
    ports = load_rates("gaudi2")
    moved = 1e12
    for size in (2, 4, 8):
        seconds = ports.collective("all_gather", moved, Span(size, size))
        assert seconds == pytest.approx(moved / size / (0.98 * 3 * 12.5e9), rel=1e-3)
    assert ports.collective("send", moved, Span(2, 2)) == pytest.approx(moved / (0.98 * 37.5e9), rel=1e-3)
    switched = load_rates("a100").collective("send", moved, Span(2, 2))
    assert switched == pytest.approx(moved / (0.78 * 300e9), rel=1e-3)


def test_an_exchange_takes_some_of_a_devices_cores_while_it_is_hidden() -> None:
    """NCCL's kernels run on the SMs; Gaudi's ports beside its engines."""
    spans = (Span(8, 8), Span(8, 1))
    assert [load_rates("h100").share_of_exchanges(span) for span in spans] == [0.15, 0.02]
    assert [load_rates("gaudi2").share_of_exchanges(span) for span in spans] == [0, 0]
    assert rates_of(measured(), "m").share_of_exchanges(NODE) == 0
    layout = Layout(tensor_size=8)
    machine = Machine(load_rates("h100"), Cluster.of(1, 8), layout, is_host=False)
    exchange, product = AxisExchange("all_gather", 2**28, "tensor"), LinearProduct("bf16", "input", 8192, 13312, 16384)
    taken, computed = machine.seconds(exchange), machine.seconds(product)
    assert taken < computed
    assert machine.seconds(Hidden((exchange,), (product,))) == pytest.approx(0.15 * taken)
    # behind a short product it shows
    short = LinearProduct("bf16", "input", 64, 128, 128)
    shown = taken - machine.seconds(short)
    assert machine.seconds(Hidden((exchange,), (short,))) == pytest.approx(shown)


def test_ranks_of_a_host_have_the_rates_of_their_threads() -> None:
    tree = measured()
    tree["tables"][0]["starts"]["step"] = 0.5
    rates = rates_of(tree, "here.yaml")
    assert [rates.for_ranks(ranks).starts.step for ranks in (1, 4, 8)] == [1e-3, 0.5, 0.5]
    assert rates.starts.step == 1e-3
    with pytest.raises(ConfigError, match=r"2 ranks on 4 cores have 2 threads each, but here.yaml has rates of 1, 4"):
        rates.for_ranks(2)
    assert [rates.slowdown(busy) for busy in (1, 2, 3, 16)] == pytest.approx([1, 1.1, 1.15, 5])
    accelerator = rates_of(published(), "p")
    assert accelerator.for_ranks(8) is accelerator
    assert accelerator.slowdown(8) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Faults


@BOTH
@pytest.mark.parametrize(
    ("look", "fault"),
    [
        (lambda rates, precision: rates.product("fp8", "forward", 8, 8, 8), "no fp8 products in"),
        (lambda rates, precision: rates.pointwise("tanh", "forward", precision, 8), "no operation 'tanh' in"),
        (lambda rates, precision: rates.pointwise("rmsnorm", "forward", "int4", 8), "no int4 rmsnorm in"),
        (lambda rates, precision: rates.update("lion", precision, 8), "no optimizer 'lion' in"),
    ],
)
def test_what_is_not_there_is_an_error_by_name(rates: Rates, precision: str, look: Any, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        look(rates, precision)


def test_what_was_not_measured_says_how_to_measure_it() -> None:
    rates = rates_of(measured(), "here.yaml")
    sizes: dict[str, Any] = {"rows": 1, "row_tokens": 8, "heads": 1, "kv_heads": 1, "head_size": 8}
    with pytest.raises(ConfigError, match=r"no attention 'alibi' in here.yaml, which has causal; measure"):
        rates.attention("fp32", "forward", kind="alibi", **sizes)
    tree = measured()
    tree["collectives"]["all_reduce"] = tree["collectives"]["all_reduce"][:1]
    with pytest.raises(ConfigError, match=r"no all_reduce across nodes in here.yaml.*--hostsfile"):
        rates_of(tree, "here.yaml").collective("all_reduce", 8, Span(4, 2))
    with pytest.raises(ConfigError, match=r"no collective 'all_to_all' in here.yaml, which has all_reduce"):
        rates.collective("all_to_all", 8, NODE)


def test_rates_of_another_device_are_refused() -> None:
    rates = rates_of(measured(), "here.yaml")
    rates.check_device("cpu")
    with pytest.raises(ConfigError, match=r"the rates of here.yaml are those of cpu, but the run is for hpu"):
        rates.check_device("hpu")


@pytest.mark.parametrize(
    ("tree", "path", "value", "fault"),
    [
        (published, "memory_bytes_per_s", -1, "memory_bytes_per_s=-1: Input should be greater than 0"),
        (published, "across_nodes.bytes_per_s", -5e10, r"across_nodes.bytes_per_s=-50000000000.0: .*greater than 0"),
        (published, "within_node.share", 1.5, r"within_node.share=1.5: .*less than or equal to 1"),
        (published, "peak_flops.bf16", math.inf, r"peak_flops.bf16=inf: .*finite"),
        (published, "peak_flops", {}, "peak_flops is empty"),
        (published, "peak_flops.int4", 1e15, r"peak_flops.int4.*: Input should be 'fp32', 'bf16'"),
        (published, "title", None, "title"),
        (published, "watts", 700, "watts is not a key of this file; remove it"),
        (published, "device", "tpu", "device='tpu': must be auto, hpu, cuda, cpu"),
        (published, "version", 2, "have version 2; this release reads 1"),
        (published, "origin", "guessed", "have origin 'guessed'; it is `measured` or `published`"),
        (measured, "disk_bytes_per_s", 0, "disk_bytes_per_s=0: Input should be greater than 0"),
        (measured, "disk_bytes_per_s", True, "must be a number, not true"),
        (measured, "slowdown", {2: math.nan}, r"slowdown.2=nan: .*finite"),
        (measured, "tables", [], "tables is empty"),
        (measured, "tables.0.copy.seconds", [1e-6], r"copy: seconds has 1 values; its axes have 2 points"),
        (measured, "tables.0.copy.bytes", [100, 100], r"copy: bytes must rise"),
        (measured, "tables.0.products.fp32.inputs", [32], r"fp32 products: forward has 18 values; .* 6 points"),
        (measured, "tables.0.products.fp32.tokens", "1 2 x", r"tables.0.products.fp32.tokens.2='x'"),
        (measured, "tables.0.pointwise.tanh", {}, r"tables.0.pointwise.tanh"),
        (measured, "tables.0.pointwise.rmsnorm.fp32.forward", "1e-6 -1 1", r"forward.1='-1': .*greater than 0"),
        (measured, "collectives.gossip", [], "collectives.gossip"),
        (measured, "collectives.all_reduce.0.size", 1, "all_reduce: a group of 1 with 2 on a node is none"),
    ],
)
def test_a_fault_of_a_file_is_named(tree: Any, path: str, value: Any, fault: str) -> None:
    values = tree()
    *way, last = path.split(".")
    place = values
    for key in way:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[last] = value
    with pytest.raises(ConfigError, match=fault) as error:
        rates_of(values, "here.yaml")
    assert all(text.startswith("rates here.yaml") for text in error.value.faults)


def test_a_lacking_key_is_named_with_all_others() -> None:
    values = published()
    del values["title"], values["across_nodes"]["start_s"]
    with pytest.raises(ConfigError) as error:
        rates_of(values, "x.yaml")
    assert error.value.faults == [
        "rates x.yaml: title is missing; add it",
        "rates x.yaml: across_nodes.start_s is missing; add it",
    ]


def test_files_are_read_by_their_ending_and_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "rates.yaml"
    file.write_text(yaml.safe_dump(measured()), encoding="utf-8")
    rates = load_rates(str(file))
    assert (rates.title, rates.origin, rates.is_measured) == ("a host of 4 cores", str(file), True)
    assert rates.pointwise("rmsnorm", "forward", "fp32", 1000) == 2e-6
    for content, fault in [
        ("version: 1\nversion: 1\n", "'version' is given twice"),
        ("- 1", "hold a list; they must be a mapping"),
        ("", "hold a NoneType"),
        ("a: [", "are not valid YAML"),
        ("[" * 5000, "nested too deeply|not valid YAML"),
    ]:
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=fault):
            load_rates(str(file))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_rates(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="rates 'h1000' not found"):
        load_rates("h1000")


@pytest.mark.parametrize("name", machine_names())
def test_the_machines_of_the_package_are_read(name: str) -> None:
    assert not load_rates(name).is_measured


def test_rates_need_neither_torch_nor_deepspeed() -> None:
    code = "import sys, megatron.plan.rates.files; print({'torch', 'deepspeed'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
