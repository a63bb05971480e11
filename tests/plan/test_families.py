"""Memory and FLOPs of a plan are those of a run and of transformers' class, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.plan_memory import LIMIT, compare
from megatron.plan.flops import flops_per_token
from megatron.weights.huggingface_config import described
from tests.models.test_families import LENGTH, ROWS, VOCABULARY, every_dense_family, our_config, their_model
from tests.plan.configs import config
from tests.ranks import RankPools


@pytest.mark.parametrize("index", range(3))
@every_dense_family
def test_flops_are_those_of_transformers_products(kind: str, index: int) -> None:
    """Counted in transformers' plain attention, which computes the whole square; of it a window has its share."""
    theirs = their_model(kind, ROWS[kind][index])
    tokens = torch.arange(LENGTH)[None] % VOCABULARY
    with FlopCounterMode(display=False) as counter:
        theirs(tokens, use_cache=False).logits.sum().backward()
    counts = counter.get_flop_counts()
    # the angles of the rotary positions are products there
    angles = sum(sum(flops.values()) for module, flops in counts.items() if module.endswith("rotary_emb"))
    model = our_config(theirs).model
    outside = sum(LENGTH**2 - square_of(model.window_of(layer)) for layer in range(model.num_layers))
    # q k and probabilities v, forward and twice as much backward
    unseen = 3 * 4 * model.num_attention_heads * model.head_size * outside
    planned = flops_per_token(config(described(model), training={"seq_length": LENGTH})) * LENGTH
    assert planned == counter.get_total_flops() - angles - unseen
    assert (unseen > 0) == (model.attention_window is not None)


def square_of(window: int | None) -> int:
    """The square of the sequence, times the share of the triangle below its diagonal that a window sees."""
    seen = torch.ones(LENGTH, LENGTH).tril()
    inside = seen if window is None else seen.triu(1 - window)
    return LENGTH * round(float(inside.sum() / seen.sum() * LENGTH))


SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 352, "ffn_hidden_size": 352, "num_attention_heads": 4, "vocab_size": 1000,
    "max_position_embeddings": 512,
}  # fmt: skip
RUN = "--seq-length 256 --micro-batch-size 2 --global-batch-size 8"
WINDOW = 64


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (1, ""),
        pytest.param(1, "--bf16", marks=pytest.mark.slow),
        pytest.param(1, "--bf16 --recompute-granularity full", marks=pytest.mark.slow),
        pytest.param(1, "--kernels plain", marks=pytest.mark.slow),
        pytest.param(2, "--bf16 --tensor-model-parallel-size 2 --sequence-parallel", marks=pytest.mark.slow),
        pytest.param(2, "--pipeline-model-parallel-size 2", marks=pytest.mark.slow),
    ],
    ids=lambda part: str(part).replace("--", "") or "fp32",
)
@every_dense_family
def test_the_plan_is_within_5_percent_of_a_run(
    ranks: RankPools, kind: str, size: int, flags: str, tmp_path: Path
) -> None:
    sizes = SIZES | {"head_dim": 32, "sliding_window": WINDOW}
    row = ROWS[kind][1]
    fields = row | {name: size for name, size in sizes.items() if row.get(name) is not None}
    preset = tmp_path / "model.yaml"
    preset.write_text(yaml.safe_dump({"model": _plain(described(our_config(their_model(kind, fields)).model))}))
    results = [each for each in ranks(size)(compare, f"--config {preset} {RUN} {flags}", "cpu") if each is not None]
    assert [result for result in results if abs(result.ratio - 1) > LIMIT] == []


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Lists instead of tuples, which YAML has not."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
