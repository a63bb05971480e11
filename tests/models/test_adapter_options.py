"""Options of adapters that do not fit the model: a fault where nothing is left to do, else a warning."""

from __future__ import annotations

import re

import pytest

from megatron.settings.command_line import load_config
from megatron.settings.validation import idle
from tests.settings.faults import VALID, faults_of

LLAMA = [*VALID, *"--architecture llama --position-embedding-type rope --num-layers 2 --hidden-size 64".split()]
NAMES = "embed_tokens, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head"


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        ("--lora-rank 0", [r"lora_rank='0': input should be greater than 0"]),
        ("--lora-rank 4 --lora-dropout 1", [r"lora_dropout='1': input should be less than 1"]),
        (
            "--lora-rank 4 --lora-target-modules foo norm",
            [rf"lora_target_modules=foo norm matches no linear layer or embedding of the model; .* among {NAMES}$"],
        ),
        (
            "--lora-rank 4 --lora-target-modules q_proj --lora-modules-to-save lm_head",
            [r"lora_modules_to_save=lm_head matches no module of the model; use names among embed_tokens, .*, norm$"],
        ),
        (
            "--lora-rank 4 --lora-target-modules q_proj lm_head --lora-modules-to-save embed_tokens",
            [r"lm_head is both in lora_target_modules and in lora_modules_to_save"],
        ),
        (
            "--lora-rank 65 --lora-target-modules q_proj",
            [r"rank 65 of the adapter of q_proj, which is \[64, 64\], is above 64.*lower lora_rank"],
        ),
        (
            "--lora-rank 4 --lora-target-modules q_proj down_proj --lora-rank-pattern down_proj=65",
            [r"rank 65 of the adapter of down_proj"],
        ),
        (
            "--lora-rank 100 --num-query-groups 2 --num-attention-heads 4",
            [
                r"rank 100 of the adapter of k_proj, which is \[32, 64\], is above 32, where it saves nothing "
                r"\(the smallest of 7 such modules: q_proj, .*, down_proj\); lower lora_rank"
            ],
        ),
        (
            "--lora-rank 4 --lora-init gaussian",
            [r"lora_init=gaussian is not a start.*use default, pissa, or pissa_nit"],
        ),
        (
            "--lora-rank 4 --lora-init pissa_niter_2 --quantize-base nf4",
            [r"lora_init=pissa_niter_2 takes the adapters from .* quantize_base=nf4 holds them in 4; leave one"],
        ),
        ("--lora-rank 4 --freeze layers.*", [r"freeze=layers.* is given with lora_rank=4.*leave freeze out"]),
        (
            "--lora-rank 4 --lora-target-modules q_proj k_proj --lora-modules-to-save q_proj v_proj",
            [
                r"lora_modules_to_save=q_proj, v_proj leaves out k_proj, fused with it in one weight.*name them too",
                r"q_proj is both in lora_target_modules and in lora_modules_to_save.*keep it in one",
            ],
        ),
        (
            "--lora-rank 4 --lora-modules-to-save foo --lora-rank-pattern q_proj k_proj=4.5 v_proj=0 "
            "--lora-alpha-pattern x=nan =3",
            [
                *(rf"lora_rank_pattern='{wrong}' is not NAME=NUMBER" for wrong in ("q_proj", "k_proj=4.5", "v_proj=0")),
                *(rf"lora_alpha_pattern='{wrong}' is not NAME=NUMBER" for wrong in ("x=nan", "=3")),
                r"lora_modules_to_save=foo matches no module.*embed_tokens",
            ],
        ),
    ],
)
def test_all_that_is_wrong_is_named_at_once(options: str, faults: list[str]) -> None:
    found = [fault for fault in faults_of([*LLAMA, *options.split()]) if "tokenizer" not in fault]
    assert len(found) == len(faults), found
    for text, expected in zip(found, faults, strict=True):
        assert re.search(expected, text), text


@pytest.mark.parametrize(
    ("options", "warnings"),
    [
        (
            "--lora-rank 4 --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
            ["but all of these are frozen, so stages wait as long as with 1f1b"],
        ),
        ("--lora-alpha 3", ["lora_alpha=3.0 has no effect without lora_rank"]),
        (
            "--lora-rank 4 --lora-target-modules q_proj foo",
            [f"foo matches no linear layer or embedding; the model has {NAMES}"],
        ),
        ("--lora-rank 4 --lora-target-modules all-linear foo", ["lora_target_modules=foo matches no linear layer"]),
        ("--lora-rank 4 --lora-target-modules q_proj lm_head", ["lm_head: embedding and output share a weight"]),
        (
            "--lora-rank 4 --lora-target-modules q_proj lm_head embed_tokens --untie-embeddings-and-output-weights",
            [],
        ),
        (
            "--lora-rank 4 --lora-target-modules q_proj --lora-rank-pattern k_proj=8 --lora-alpha-pattern q_proj=3",
            ["lora_rank_pattern=k_proj=8 matches no adapted module; they are q_proj"],
        ),
        (
            "--lora-rank 4 --lora-rank-pattern q_proj=2 layers.0.self_attn.q_proj=8 "
            "--lora-alpha-pattern *_proj=2 q_proj=3",
            [
                "lora_rank_pattern=layers.0.self_attn.q_proj=8 has no effect behind",
                "lora_alpha_pattern=q_proj=3 has no effect behind",
            ],
        ),
        ("--lora-rank 4 --lora-rank-pattern layers.0.self_attn.q_proj=8 q_proj=2", []),
        ("--lora-rank 4 --lora-bias all", ["lora_bias=all has no effect, as the model has no biases"]),
        ("--lora-rank 4 --lora-bias lora_only", ["lora_bias=lora_only has no effect, as the adapted modules have no"]),
        (
            "--lora-rank 4 --loraplus-lr-ratio 4 --loraplus-lr-embedding 1e-5",
            ["loraplus_lr_embedding=1e-05 has no effect, as the embedding has no adapter"],
        ),
        (
            "--lora-rank 4 --lora-target-modules q_proj embed_tokens --untie-embeddings-and-output-weights "
            "--loraplus-lr-ratio 4 --loraplus-lr-embedding 1e-5 --lora-dropout 0.1 --lora-init pissa",
            [],
        ),
        (
            "--lora-rank 4 --lora-target-modules embed_tokens --untie-embeddings-and-output-weights --lora-dropout 0.1 "
            "--lora-init pissa",
            ["lora_dropout=0.1 has no effect on the adapter of an embedding", "lora_init=pissa has no effect on the"],
        ),
        ("--lora-rank 4 --lora-target-modules *.layers.[0-1].* layers.1.attention.qkv lora_x", ["lora_x matches no"]),
    ],
)
def test_what_selects_or_changes_nothing_is_a_warning(options: str, warnings: list[str]) -> None:
    config = load_config([*LLAMA, *options.split()], 2)
    found = [text for text in idle(config) if "lora" in text or "zero-bubble" in text]
    assert len(found) == len(warnings), found
    for text, expected in zip(found, warnings, strict=True):
        assert expected in text


def test_biases_of_other_modules_are_not_those_of_the_adapted() -> None:
    # GPT-2 has biases everywhere, Qwen 2 those of q, k and v alone
    config = load_config([*VALID, *"--num-layers 2 --hidden-size 64 --lora-rank 4 --lora-bias lora_only".split()], 2)
    assert not any("lora_bias" in text for text in idle(config))
    qwen = "--architecture qwen2 --position-embedding-type rope --num-layers 2 --hidden-size 64 --lora-rank 4"
    for options, is_idle in (
        ("--lora-bias lora_only --lora-target-modules up_proj", True),
        ("--lora-bias lora_only --lora-target-modules up_proj q_proj", False),
        ("--lora-bias all --lora-target-modules up_proj", False),
    ):
        config = load_config([*VALID, *qwen.split(), *options.split()], 2)
        assert any("lora_bias" in text for text in idle(config)) == is_idle, options
