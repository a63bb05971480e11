"""Checkpoints of torchtitan: their weights, moments and step, from any cut, on any layout; what is damaged is named."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.checkpoint.format import CheckpointError
from megatron.cli import convert_checkpoint
from megatron.settings.command_line import parse_arguments
from megatron.weights import conversion
from megatron.weights.folder_formats import recognise
from megatron.weights.meta.torchtitan import TitanSource
from megatron.weights.model import whole_model
from tests.generation.stages import loaded_logits
from tests.ranks import RankPools
from tests.training import layouts
from tests.training.test_layouts import arguments
from tests.weights.meta import RELEASES, State, draw, logits
from tests.weights.titan_peer import FLAGS, train_save_resume

RELEASE = RELEASES["Llama 3.1"]
TOKENS = torch.from_numpy(np.random.default_rng(3).integers(0, 96, (2, 24)))
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
"""config.json of RELEASE in transformers' format."""
FUSED = "layers.1.attention.qkv_linear"


def save(folder: Path, weights: State, moments: dict[str, State] | None = None, **beside: Any) -> Path:
    """Write a step as torchtitan does; `beside`: other states of the run."""
    state: dict[str, Any] = {**weights, **beside}
    if moments is not None:
        steps = {f"state.{name}.step": torch.tensor(5.0) for name in next(iter(moments.values()))}
        state["optimizer"] = steps | {
            f"state.{name}.{kind}": tensor for kind, tensors in moments.items() for name, tensor in tensors.items()
        }
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def described(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def in_03(state: State) -> State:
    """Under the names of torchtitan 0.3, q, k and v of the second layer in one, as its optimizer has them."""
    renamed = {}
    for name, tensor in state.items():
        name = re.sub(r"attention\.(w[qkv])", r"attention.qkv_linear.\1", name)
        renamed[name.replace("output.", "lm_head.")] = tensor
    # [key/value head][its 2 queries, key, value][8 rows]
    q, k, v = (renamed.pop(f"{FUSED}.w{kind}.weight") for kind in "qkv")
    groups = [torch.cat([q[16 * at : 16 * at + 16], k[8 * at : 8 * at + 8], v[8 * at : 8 * at + 8]]) for at in range(4)]
    return renamed | {f"{FUSED}.wqkv.weight": torch.cat(groups)}


@pytest.fixture(scope="module")
def peer(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run of torchtitan on two ranks with FSDP2, and its ten losses after it has resumed."""
    folder = tmp_path_factory.mktemp("peer")
    losses, _ = ranks(2)(train_save_resume, str(folder), 3, 10)[0]
    return folder, losses


def resume(arguments: str, load: str, steps: int) -> tuple[int, list[float]]:
    """The step to go on with, and the losses of so many more. Runs inside the ranks."""
    engine, task = layouts.build(f"{arguments} --load {load} --save {load}-saved")
    step = layouts.resume(engine)
    return step, [layouts.loss_of_step(engine, task, step + number) for number in range(steps)]


@pytest.mark.parametrize(
    ("layout", "zero"),
    [
        ("121", 0),
        pytest.param("111", 0, marks=pytest.mark.slow),
        pytest.param("221", 1, marks=pytest.mark.slow),
        pytest.param("112", 3, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_as_torchtitan_does(
    ranks: RankPools, peer: tuple[Path, list[float]], layout: str, zero: int
) -> None:
    world_size, flags = arguments(layout, zero=zero)
    step, losses = ranks(world_size)(resume, f"{FLAGS} {flags}", str(peer[0]), 10)[0]
    assert step == 3
    np.testing.assert_allclose(losses, peer[1], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_from_tensor_parallel_ranks_under_the_older_names(ranks: RankPools, tmp_path: Path) -> None:
    expected, _ = ranks(4)(train_save_resume, str(tmp_path), 3, 10, tensor_size=2, prefix="model.")[0]
    step, losses = ranks(2)(resume, f"{FLAGS} {arguments('112', zero=3)[1]}", str(tmp_path), 10)[0]
    assert step == 3
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("names", ["0.1", "0.1 in model.", "0.3"])
def test_its_logits_are_those_of_the_published_forward_pass(names: str, tmp_path: Path) -> None:
    state = draw(RELEASE)
    written = {f"model.{name}": tensor for name, tensor in state.items()} if "model." in names else state
    folder = described(save(tmp_path / "step-7", in_03(state) if names == "0.3" else written))
    model = whole_model(TitanSource(folder))
    assert not model.source.holds_run
    found, expected = conversion.our_logits(model, TOKENS, "fp32"), logits(RELEASE, state, TOKENS)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_moments_are_those_of_their_weights_under_any_names(tmp_path: Path) -> None:
    """q, k and v in one, as torchtitan 0.3 has them in its optimizer alone."""
    weights, moments = draw(RELEASE), {"exp_avg": draw(RELEASE, 7), "exp_avg_sq": draw(RELEASE, 8)}
    plain = TitanSource(described(save(tmp_path / "0.1", weights, moments, train_state={"step": 5})))
    renamed = {kind: in_03(tensors) for kind, tensors in moments.items()}
    folder = save(tmp_path / "0.3", in_03(weights), renamed, train_state={"step": torch.tensor(5)})
    fused = TitanSource(described(folder))
    assert plain.kinds == fused.kinds == ("weight", "exp_avg", "exp_avg_sq")
    assert plain.metadata["progress"]["iteration"] == fused.metadata["progress"]["iteration"] == 5
    assert plain.metadata["optimizer"] == fused.metadata["optimizer"] == {"step": 5}
    for seed, kind in ((5, "weight"), (7, "exp_avg"), (8, "exp_avg_sq")):
        # the weights that are drawn with the seed of the moments are in the same places
        alone = TitanSource(described(save(tmp_path / f"alone-{kind}", draw(RELEASE, seed))))
        for name in plain.parameters:
            assert torch.equal(plain.read_full(name, kind), alone.read_full(name)), (kind, name)
            assert torch.equal(fused.read_full(name, kind), alone.read_full(name)), (kind, name)


def test_generation_reads_it_with_the_config_of_its_model(ranks: RankPools, tmp_path: Path) -> None:
    state = draw(RELEASE)
    folder = described(save(tmp_path / "step-7", state))
    found = ranks(2)(loaded_logits, {"load": str(folder), "tensor_model_parallel_size": 2}, TOKENS.numpy())[-1]
    expected = logits(RELEASE, state, TOKENS)
    assert (torch.from_numpy(found.transpose(1, 0, 2)) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_it_is_converted_by_its_config_or_a_preset(tmp_path: Path) -> None:
    state = draw(RELEASE)
    folder = save(tmp_path / "run" / "step-7", state).parent
    (tmp_path / "model.yaml").write_text(
        "model: {architecture: llama, position_embedding_type: rope, num_layers: 2, hidden_size: 64, vocab_size: 128,\n"
        "  num_attention_heads: 8, num_query_groups: 4, ffn_hidden_size: 224, rotary_base: 500000,\n"
        "  untie_embeddings_and_output_weights: true, norm_epsilon: 1.0e-5, rope_scaling_type: llama3,\n"
        "  rope_scaling_factor: 8, rope_scaling_low_freq_factor: 1, rope_scaling_high_freq_factor: 4,\n"
        "  rope_scaling_original_length: 8192}\n"
    )
    preset = ["--config", str(tmp_path / "model.yaml")]
    assert _convert(folder, tmp_path / "native", "native", *preset) == 0
    described(folder / "step-7")
    assert _convert(folder, tmp_path / "hf", "hf", "--no-verify") == 0
    native, exported = (
        conversion.open_model(conversion.Opening(tmp_path / "native")),
        conversion.open_model(conversion.Opening(tmp_path / "hf")),
    )
    for name in native.source.parameters:
        assert torch.equal(native.source.read_full(name), exported.source.read_full(name)), name


def _convert(load: Path, save: Path, to: str, *more: str) -> int:
    return convert_checkpoint.main(["--load", str(load), "--save", str(save), "--to", to, *more])


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def test_the_newest_whole_step_is_taken(tmp_path: Path) -> None:
    for step in (9, 10):
        save(tmp_path / f"step-{step}", {"tok_embeddings.weight": torch.ones(2)})
    save(tmp_path / "step-100", {"tok_embeddings.weight": torch.ones(2)})
    (tmp_path / "step-100" / ".metadata").unlink()  # it comes last: the save was killed
    assert recognise(tmp_path).name == "torchtitan"
    with pytest.raises(CheckpointError, match=r"step-10 does not say which model it holds; copy"):
        TitanSource(tmp_path)


def test_a_model_that_is_not_the_options_is_named(tmp_path: Path) -> None:
    state = draw(RELEASE)
    folder = save(tmp_path / "step-1", state)
    config, _ = parse_arguments([*layouts.COMMON.split(), *FLAGS.split()])
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is \[128, 64\] of .*, not \[250, 64\]"):
        TitanSource(folder, config)
    described(folder)
    with pytest.raises(CheckpointError, match=r"another model than the options describe: ffn_hidden_size=256"):
        TitanSource(folder, config)
    del state["layers.1.ffn_norm.weight"]
    state["layers.1.attention.q_norm.weight"] = torch.ones(8)
    with pytest.raises(CheckpointError, match=r"missing: .*1\.post_attention_layer.*unknown .*q_norm"):
        TitanSource(described(save(tmp_path / "other", state)))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("steps", r"parameters that trained for other numbers of steps"),
        ("moment", r"does not hold exp_avg_sq of the Llama .*missing: .*norm"),
        ("optimizer", r"holds optimizer\.state\.norm\.weight\.momentum_buffer: it was not trained with AdamW"),
        ("step", r"has train_state\.step=-3, not a number of steps"),
    ],
)
def test_an_optimizer_that_cannot_go_on_is_named(change: str, fault: str, tmp_path: Path) -> None:
    weights: State = draw(RELEASE)
    moments = {"exp_avg": draw(RELEASE, 7), "exp_avg_sq": draw(RELEASE, 8)}
    beside: dict[str, Any] = {"train_state": {"step": -3 if change == "step" else 5}}
    if change == "steps":
        beside["optimizer.state.output.weight.step"] = torch.tensor(4.0)
        for kind, state in moments.items():
            beside[f"optimizer.state.output.weight.{kind}"] = state.pop("output.weight")
    elif change == "moment":
        del moments["exp_avg_sq"]["norm.weight"]
    elif change == "optimizer":
        beside["optimizer.state.norm.weight.momentum_buffer"] = weights["norm.weight"]
    with pytest.raises(CheckpointError, match=fault):
        TitanSource(described(save(tmp_path / "step-5", weights, moments, **beside)))


class Planted:
    """Runs a command when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("place", ["metadata", "step"])
def test_a_hostile_file_is_refused_and_nothing_runs(place: str, tmp_path: Path) -> None:
    target = tmp_path / "ran"
    step = Planted(target) if place == "step" else 5
    folder = described(save(tmp_path / "step-5", draw(RELEASE), train_state={"step": step}))
    if place == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(["tok_embeddings.weight", Planted(target)]))
    with pytest.raises(CheckpointError, match=r"(metadata|train_state\.step) is refused: it names \w+\.system"):
        TitanSource(folder)
    assert not target.exists()


@pytest.mark.parametrize("damage", ["bit", "truncated", "lacking", "other"])
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    folder = described(save(tmp_path / "step-5", draw(RELEASE)))
    (file,) = folder.glob("*.distcp")
    content = bytearray(file.read_bytes())
    if damage == "bit":
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    elif damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "lacking":
        file.rename(file.with_name("__7_0.distcp"))
    else:
        other = save(tmp_path / "other", draw(RELEASES["Llama 2"]))
        shutil.copy(other / file.name, file)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        TitanSource(folder).verify()
