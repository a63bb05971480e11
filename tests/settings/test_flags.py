"""Flags of any dataclass of options: their values, and every fault of them."""

from __future__ import annotations

import argparse

import pytest

from megatron.generation.options import GenerationOptions
from megatron.options.flags import add_flags, dashed, flag, read_flags, unknown_flags


def read(line: str) -> tuple[GenerationOptions | None, list[str]]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, GenerationOptions)
    namespace, rest = parser.parse_known_args(dashed(line.split()))
    faults = unknown_flags(rest, map(flag, vars(namespace)), {})
    return read_flags(GenerationOptions, namespace, faults), faults


def test_values_are_read_by_their_types() -> None:
    options, faults = read(
        "--max_new_tokens 7 --temperature=0.5 --stop a b --ignore-eos --logit-bias 3=-2 4=1.5 --logprobs none"
    )
    assert faults == []
    assert options == GenerationOptions(
        max_new_tokens=7, temperature=0.5, stop=("a", "b"), ignore_eos=True, logit_bias=((3, -2.0), (4, 1.5))
    )
    assert read("--no-ignore-eos")[0] == GenerationOptions()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--top-p 0 --min-p 2",
            ["--top-p 0: input should be greater than 0", "--min-p 2: input should be less than 1"],
        ),
        ("--seed", ["--seed needs a value"]),
        ("--top_q 3", ["unknown flag --top-q; did you mean --top-p?"]),
        ("stray --top-k 3", ["'stray' does not follow a flag; see --help"]),
        ("--logit-bias 3", ["--logit-bias 3: write KEY=VALUE"]),
    ],
)
def test_every_fault_is_named(line: str, expected: list[str]) -> None:
    found = read(line)[1]
    assert all(fault.startswith(begin) for fault, begin in zip(found, expected, strict=True)), found
