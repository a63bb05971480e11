"""A start extends a model's context: other rotary positions and nothing else, as transformers computes them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.folders import CheckpointError, Run
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.source import WeightSource
from megatron.options.config import Config, ConfigError
from megatron.options.extension import POSITIONS
from megatron.options.model import ModelConfig
from megatron.options.progress import Progress
from megatron.options.schedule import Schedule
from megatron.parallel.context import ParallelContext
from megatron.settings.command_line import load_config
from megatron.training.guard import checkpoint_before
from megatron.training.start import resumed_schedule
from megatron.weights.loader import find_checkpoint
from megatron.weights.model_folder import LoadedModel
from tests import runs
from tests.models.outputs import logits_of
from tests.models.test_families import our_model
from tests.ranks import RankPools
from tests.training.test_resume import COMPARED_AS, LEARNED, LONGROPE, OTHER, ROPE, WINDOWS, YARN, config_of, find, save

transformers = pytest.importorskip("transformers")

LENGTH = 48
SHAPE = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "rope_theta": 500.0, "tie_word_embeddings": False,
}  # fmt: skip
SHORT, LONG = [1.0, 1.5, 2.0, 3.0], [1.5, 3.0, 5.0, 9.0]
WORDS = {name: " ".join(map(str, values)) for name, values in (("short", SHORT), ("long", LONG))}
# the flags, and what they are in transformers' words
SCALINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("--rope-scaling-type linear --rope-scaling-factor 3", {"rope_type": "linear", "factor": 3.0}),
    "dynamic": (
        "--rope-scaling-type dynamic --rope-scaling-factor 3",
        {"rope_type": "dynamic", "factor": 3.0},
    ),
    "llama3": (
        "--rope-scaling-type llama3 --rope-scaling-factor 3 --rope-scaling-low-freq-factor 1 "
        "--rope-scaling-high-freq-factor 4",
        {
            "rope_type": "llama3", "factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "yarn": (
        "--rope-scaling-type yarn --rope-scaling-factor 3",
        {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16},
    ),
    "longrope": (
        f"--rope-scaling-type longrope --rope-scaling-factor 3 --rope-scaling-short-factors {WORDS['short']} "
        f"--rope-scaling-long-factors {WORDS['long']}",
        {
            "rope_type": "longrope", "factor": 3.0, "short_factor": SHORT, "long_factor": LONG,
            "original_max_position_embeddings": 16,
        },
    ),
    "base": ("--rotary-base 50000", {"rope_type": "default", "rope_theta": 50000.0}),
}  # fmt: skip


def their_model(**changed: Any) -> Any:
    """A random model, always of the same weights."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **changed}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model.eval()


def extended(name: str) -> Any:
    """The same weights at the positions of SCALINGS, in transformers."""
    rope = {"rope_theta": 500.0, **SCALINGS[name][1]}
    # of dynamic it is the original length, which transformers 5 reads nowhere else
    length = 16 if name == "dynamic" else LENGTH
    return their_model(rope_theta=rope["rope_theta"], rope_parameters=rope, max_position_embeddings=length)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    their_model().save_pretrained(folder)
    return folder


def options(words: str) -> Config:
    return load_config([*runs.SHORT.split(), *f"--data-path none --train-iters 1 {words}".split()])


def logits_at(config: Config, source: WeightSource, tokens: torch.Tensor) -> torch.Tensor:
    weights = {name: source.read_full(name) for name in source.parameters}
    with torch.no_grad():
        return logits_of(our_model(config, weights), tokens, ParallelContext.single()).transpose(0, 1)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found - expected).abs().max() / expected.abs().max()
    assert error.item() < 1e-5


TOKENS = torch.randint(0, 128, (2, LENGTH), generator=torch.Generator().manual_seed(3))


# ---------------------------------------------------------------------------------------------------------------------
# What may differ


def test_rotary_positions_may_differ_and_nothing_else(tmp_path: Path) -> None:
    for number, words in enumerate((ROPE, WINDOWS, YARN, LONGROPE)):
        folder = tmp_path / str(number)
        save(folder, words)
        for name, value in [(name, value) for name, (run, value) in OTHER.items() if run == words]:
            start = f"{words} --load {folder} --{name.replace('_', '-')} {value}"
            if name in POSITIONS:
                assert find(f"{start} --extend-context") is not None
                with pytest.raises(CheckpointError, match=rf"of another model.*\b{name}=.*, or --extend-context to go"):
                    find(start)
                continue
            said = COMPARED_AS.get(name, name)
            with pytest.raises(CheckpointError, match=rf"of another model.*\b{said}=[^;]+ here, \S+ there") as refused:
                find(f"{start} --extend-context --rotary-base 5e5")
            if name != "architecture":
                assert "rotary_base=" not in str(refused.value)
            with pytest.raises(CheckpointError) as refused:
                find(f"{start} --rotary-base 5e5")
            assert "--extend-context" not in str(refused.value), "it would not be a remedy"


def test_other_positions_than_rotary_ones_are_refused(tmp_path: Path) -> None:
    save(tmp_path, LEARNED)
    with pytest.raises(CheckpointError, match="position_embedding_type=rope here, learned there"):
        find(f"{LEARNED} --position-embedding-type rope --load {tmp_path} --extend-context")
    for encoding in ("learned", "alibi"):
        words = f"{runs.TINY} --position-embedding-type {encoding} --load {tmp_path} --extend-context"
        with pytest.raises(ConfigError, match=f"rotary positions, but position_embedding_type={encoding}"):
            load_config([*words.split(), "--data-path", "none", "--train-iters", "1"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rotary-base 5e4", "rotary_base=50000.0 here, 500.0 there. .*or --extend-context"),
        ("--extend-context --rotary-base 5e4 --kv-channels 16", "kv_channels=16 here, 8 there"),
        ("--extend-context --rope-scaling-factor 2 --norm-epsilon 1e-2", "norm_epsilon=0.01 here, 1e-06 there"),
        ("--extend-context --vocab-size 120", "vocab_size=120 here, 128 there"),
    ],
)
def test_a_folder_of_transformers_is_compared_alike(theirs: Path, words: str, said: str) -> None:
    config = options(f"--load {theirs} {words}")
    with pytest.raises(CheckpointError, match=said) as refused:
        find_checkpoint(config, ParallelContext.single())
    assert ("rotary_base=" in str(refused.value)) == ("--extend-context" not in words)


def test_it_needs_a_model_to_start_from(tmp_path: Path) -> None:
    words = f"{ROPE} --save {tmp_path} --extend-context"
    with pytest.raises(ConfigError, match="extend_context=True is about the weights in load, which is not given"):
        load_config(words.split())


# ---------------------------------------------------------------------------------------------------------------------
# Lengths that are not given


@pytest.mark.parametrize(
    ("words", "length", "original", "positions"),
    [
        ("--rope-scaling-factor 4 --rope-scaling-type yarn", 4096, None, (4096, 16384)),
        ("--rope-scaling-factor 4 --rope-scaling-type yarn", 32768, 8192, (8192, 32768)),
        ("--rope-scaling-factor 4 --rope-scaling-original-length 1024", 4096, None, (1024, 16384)),
        ("--rope-scaling-factor 4 --max-position-embeddings 99", 4096, None, (4096, 99)),
        ("--rope-scaling-factor 4 --rope-scaling-type linear", 4096, None, (8192, 16384)),
        ("--rotary-base 5e5", 4096, None, (8192, 16384)),
        ("--rotary-base 5e5", 32768, None, (8192, 32768)),
    ],
)
def test_they_follow_from_the_model(
    words: str, length: int, original: int | None, positions: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    described = {} if original is None else {"rope_scaling_original_length": original}
    monkeypatch.setattr(
        "megatron.settings.command_line.model_options", lambda *_: LoadedModel("model", described, length)
    )
    rope = "--architecture llama --position-embedding-type rope --seq-length 16384"
    model = config_of(f"{rope} --load model --extend-context {words}").model
    assert (model.rope_scaling_original_length, model.max_position_embeddings) == positions


def test_a_model_without_a_length_needs_one(tmp_path: Path) -> None:
    rope = "--architecture llama --position-embedding-type rope"
    with pytest.raises(ConfigError, match="rope_scaling_type=llama3 needs rope_scaling_original_length"):
        config_of(f"{rope} --load {tmp_path} --extend-context --rope-scaling-factor 4")


def test_a_new_form_of_scaling_replaces_the_old_ones_options(tmp_path: Path) -> None:
    changed = f"{ROPE} --rope-scaling-low-freq-factor 2 --rope-scaling-original-length 12"
    save(tmp_path, changed)
    start = f"--load {tmp_path} --extend-context"
    model = config_of(f"{start} --rope-scaling-type yarn --rope-scaling-factor 16").model
    assert (model.rope_scaling_low_freq_factor, model.rope_scaling_original_length) == (1.0, 12)
    model = config_of(f"{start} --rope-scaling-factor 16").model
    assert (model.rope_scaling_low_freq_factor, model.rope_scaling_original_length) == (2.0, 12)
    model = config_of(f"{start} --rope-scaling-factor none --rotary-base 5e6").model
    defaults = ModelConfig()
    assert model.rope_scaling_original_length == defaults.rope_scaling_original_length


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


@pytest.mark.parametrize("name", SCALINGS)
def test_logits_after_the_extension_are_transformers(theirs: Path, name: str) -> None:
    config = options(f"--load {theirs} --extend-context --seq-length {LENGTH} {SCALINGS[name][0]}")
    source = find_checkpoint(config, ParallelContext.single())
    assert source is not None
    expected, plain = extended(name)(TOKENS).logits, their_model()(TOKENS).logits
    assert_close(logits_at(config, source, TOKENS), expected)
    assert (expected - plain).abs().max() > 0.1, "other positions compute something else"


@pytest.mark.parametrize(
    "name", ["yarn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dynamic", "base"))]
)
def test_a_run_extends_goes_on_and_exports_what_it_has(
    ranks: RankPools, theirs: Path, tmp_path: Path, name: str
) -> None:
    data = runs.write_dataset(tmp_path / "data", documents=100)
    saved, models = tmp_path / "saved", tmp_path / "models"
    common = f"--data-path {data} --save {saved} --save-hf {models} --seq-length {LENGTH} --lr-warmup-iters 0 "
    common += "--lr-decay-iters 6 --eval-iters 0 --split 1"
    first = f"{common} --load {theirs} --extend-context {SCALINGS[name][0]} --train-iters 2"
    assert ranks(1)(runs.train_loaded, first) == [""]
    # the same command with more steps, then one without the switch in another folder
    assert ranks(1)(runs.train_loaded, f"{first} --train-iters 3") == [""]
    on = f"{common} --load {saved} --save {tmp_path / 'on'} --train-iters 4 --allow-used-save"
    assert ranks(1)(runs.train_loaded, on) == [""]
    assert "--extend-context" in ranks(1)(runs.train_loaded, f"{on} --rotary-base 7")[0]
    last = Checkpoint(tmp_path / "on" / "global_step4")
    config = dataclasses.replace(options(f"--load {tmp_path / 'on'}"), checkpoint=options("").checkpoint)
    written = json.loads((models / "samples_32" / "config.json").read_text())
    assert written["max_position_embeddings"] == (16 if name == "dynamic" else LENGTH)
    exported = transformers.AutoModelForCausalLM.from_pretrained(models / "samples_32", dtype=torch.float32)
    # transformers' own config, of the weights that were trained
    oracle = extended(name)
    oracle.load_state_dict(exported.state_dict())
    expected = oracle(TOKENS).logits
    assert_close(exported(TOKENS).logits, expected)
    assert_close(logits_at(config, last, TOKENS), expected)
    assert (expected - extended(name)(TOKENS).logits).abs().max() > 1e-3, "it was trained"


def test_adapters_go_on_over_an_extended_base(ranks: RankPools, theirs: Path, tmp_path: Path) -> None:
    """Their base keeps its files; what is merged has the new positions, and PEFT's format could not say them."""
    data, saved = runs.write_dataset(tmp_path / "data", documents=100), tmp_path / "saved"
    common = f"--data-path {data} --save {saved} --seq-length {LENGTH} --lr-warmup-iters 0 --lr-decay-iters 6 "
    common += "--lora-rank 2 --eval-iters 0 --split 1"
    first = f"{common} --load {theirs} --extend-context {SCALINGS['yarn'][0]} --train-iters 1"
    assert "save_hf" in ranks(1)(runs.train_loaded, f"{first} --save-hf {tmp_path / 'peft'}")[0]
    assert ranks(1)(runs.train_loaded, first) == [""]
    on = f"{common} --load {saved} --train-iters 2"
    assert "Pass --save-hf-merged" in ranks(1)(runs.train_loaded, f"{on} --save-hf {tmp_path / 'peft'}")[0]
    assert ranks(1)(runs.train_loaded, f"{on} --save-hf {tmp_path / 'models'} --save-hf-merged") == [""]
    assert Checkpoint(saved / "global_step2").metadata["base"]["extended"] is True
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "samples_16", dtype=torch.float32)
    oracle = extended("yarn")
    oracle.load_state_dict(merged.state_dict())
    assert_close(merged(TOKENS).logits, oracle(TOKENS).logits)


# ---------------------------------------------------------------------------------------------------------------------
# Another length of the samples


def test_consumed_samples_are_counted_in_the_new_length() -> None:
    progress = Progress(iteration=4, consumed_samples=32, left_out=[(40, 48)])
    counted = progress.counted_in(16, 64)
    assert (counted.iteration, counted.consumed_samples, counted.consumed_tokens) == (4, 8, 512)
    assert counted.left_out == []
    with pytest.raises(ValueError, match="are 512 tokens, not a multiple of seq_length=24"):
        progress.counted_in(16, 24)


@pytest.mark.parametrize("style", ["--lr-decay-style cosine", "--lr-decay-style WSD --lr-wsd-decay-iters 4"])
def test_the_schedule_goes_on_over_the_same_tokens(style: str) -> None:
    """Steps of as many tokens have the learning rates that they would have had."""
    common = f"{ROPE} {style} --train-iters 20 --lr-warmup-iters 3 --lr-decay-iters 20 --weight-decay-incr-style linear"
    common += " --start-weight-decay 0.1 --end-weight-decay 0.3"
    before, after = (
        Schedule(config.training, config.optimizer)
        for config in map(config_of, (common, f"{common} --seq-length 128 --global-batch-size 2"))
    )
    for step in range(20):
        assert before.learning_rate(8 * step) == pytest.approx(after.learning_rate(2 * step))
        assert before.weight_decay(8 * step) == pytest.approx(after.weight_decay(2 * step))
    saved = before.params.to_dict()
    assert resumed_schedule(after, saved, "run", after.optimizer, 32) == (after, "")
    with pytest.raises(CheckpointError, match="another schedule"):
        resumed_schedule(after, saved, "run", after.optimizer)


def test_a_longer_run_continues_in_tokens(ranks: RankPools, tmp_path: Path) -> None:
    """Five steps of 8 samples of 16 tokens, then as many tokens a step in samples of 64, over other data."""
    model = "--architecture llama --position-embedding-type rope --lr-warmup-iters 0 --eval-iters 0 --split 1"
    short, long = (runs.write_dataset(tmp_path / name, documents=200, seed=len(name)) for name in ("a", "bb"))
    saved, results = tmp_path / "saved", tmp_path / "results"
    common = f"{model} --lr-decay-iters 12"
    first = f"{common} --data-path {short} --save {saved} --train-iters 4"
    assert ranks(1)(runs.train, first) == [""]
    on = f"{common} --data-path {long} --load {saved} --save {tmp_path / 'on'} --train-iters 6 --seq-length 64 "
    on += f"--global-batch-size 2 --results-dir {results}"
    refused = ranks(1)(runs.train, f"{on} --extend-context")[0]
    assert "seq_length=64 here, 16 there" in refused
    assert "--finetune" in refused
    assert "after as many tokens as" in refused
    (said,) = ranks(1)(runs.announced, f"{on} --extend-context --allow-data-change --rope-scaling-factor 4")
    assert any("rope_scaling_original_length=16" in line for line in said)
    rows = runs.rows(results)
    assert [row["iteration"] for row in rows] == [5, 6]
    assert [row["consumed_samples"] for row in rows] == [10, 12]
    assert [row["consumed_tokens"] for row in rows] == [5 * 128, 6 * 128]
    other = f"{on} --extend-context --allow-data-change --seq-length 48 --save {tmp_path / 'other'}"
    assert "are 512 tokens, not a multiple of seq_length=48" in ranks(1)(runs.train, other)[0]
    # a rollback passes over what was counted otherwise
    run = Run.of(Checkpoint(tmp_path / "on" / "global_step6").metadata)
    for words, found in (("--seq-length 64", None), ("--seq-length 16", saved / "global_step4")):
        config = load_config([*runs.TINY.split(), *f"{on} --save {tmp_path / 'none'} {words}".split()])
        before = checkpoint_before(100, config, ParallelContext.single(), run)
        assert (before and before.folder) == found
