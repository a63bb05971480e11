"""A message that lacks numbers is refused by its sender, and by its receiver: nothing unfilled is computed with."""

from __future__ import annotations

import re

import pytest
import torch

from megatron.parallel.context import ParallelContext
from megatron.parallel.messages import MessageError, StageMessages
from tests.parallel import on_ranks
from tests.ranks import RankPools
from tests.training.layouts import MODELS

LACKS = r"a message for \(3, 2, 5\) torch.{} was shorter; nothing of it is used"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int64"])
def test_a_receiver_takes_whole_messages_alone(ranks: RankPools, dtype: str) -> None:
    none, (whole, of_nan, short) = ranks(2)(on_ranks.whole_and_short_messages, dtype)
    assert none == []
    assert (whole, of_nan) == ("equal", "equal")
    assert re.fullmatch(LACKS.format(dtype), short)


@pytest.mark.parametrize("wrong", [torch.zeros(2, 4), torch.zeros(1, 2, 4), torch.zeros(3, 2, 4).half()])
def test_a_stage_sends_what_the_next_one_expects_alone(wrong: torch.Tensor) -> None:
    ctx = ParallelContext.single()
    with pytest.raises(MessageError, match=r"is to be sent where \(3, 2, 4\) torch.float32 is expected"):
        StageMessages(ctx, 4, torch.float32).send(wrong, 3, 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_stages_of_a_training_notice_a_row_too_few(ranks: RankPools, schedule: str) -> None:
    arguments = f"{MODELS['llama_mha']} --num-layers 2 --pipeline-model-parallel-size 2 --pipeline-schedule {schedule}"
    sender, receiver = ranks(2)(on_ranks.truncated_step, arguments)
    assert re.fullmatch(r"a message of \(31, 2, 64\) .* is to be sent where \(32, 2, 64\) .* is expected", sender)
    assert re.match(r"a message for \(32, 2, 64\) torch.float32 was shorter", receiver)
