"""A checkpoint saved on any layout resumes on any other: the same state bit by bit, and the same next loss."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.reader import Checkpoint, newest_checkpoint
from megatron.cli import convert_checkpoint
from megatron.weights.deepspeed import universal
from tests.ranks import RankFailure, RankPools
from tests.training import layouts
from tests.training.test_layouts import LAYOUTS, arguments

SOURCES = {
    "PP2 TP2": ("221", 0, ""),
    "TP2 DP2 ZeRO-2": ("122", 2, ""),
    "PP4": ("411", 0, ""),
    "DP4 ZeRO-3": ("114", 3, ""),
    "PP2 DP2 ZeRO-1": ("212", 1, ""),
    "DP2 offload": ("112", 2, " --offload-optimizer"),
}
# bf16's float32 masters, too, resume anywhere; there the next loss differs by rounding
MODEL = "llama_gqa_tied"


@pytest.fixture(scope="module")
def saved(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For each source layout, the folder of a checkpoint and the loss of the step behind it; made once."""
    made: dict[str, tuple[Path, float]] = {}

    def get(source: str, model: str = MODEL) -> tuple[Path, float]:
        key = f"{source} {model}"
        if key not in made:
            layout, zero, more = SOURCES[source]
            world_size, flags = arguments(layout, zero=zero)
            folder = tmp_path_factory.mktemp("saved")
            loss = ranks(world_size)(layouts.train_then_save, f"{layouts.MODELS[model]} {flags}{more}", 3, str(folder))
            made[key] = folder, loss[0]
        return made[key]

    return get


def assert_same_state(one: Checkpoint, other: Checkpoint) -> None:
    assert one.parameters == other.parameters
    assert one.kinds == other.kinds == ("weight", "exp_avg", "exp_avg_sq")
    for name, kind in itertools.product(one.parameters, one.kinds):
        assert torch.equal(one.read_full(name, kind), other.read_full(name, kind)), f"{kind} of {name}"
    assert one.metadata["optimizer"] == other.metadata["optimizer"]


def newest(folder: Path) -> Checkpoint:
    found = newest_checkpoint(folder)
    assert found is not None
    found.verify()
    return found


def targets() -> list[Any]:
    """Each source with each layout, the ZeRO stage taken in turn as far as the layout allows it. Without -m slow each
    source once, each with another layout; tests/checkpoint reads any stretch of any layout from any other.
    """
    cases = []
    for row, source in enumerate(SOURCES):
        for column, layout in enumerate(LAYOUTS):
            turn = row + column
            zero = turn % 4 if layout[0] == "1" else turn % 2
            marks = () if column == row else pytest.mark.slow
            cases.append(pytest.param(source, layout, zero, marks=marks))
    return cases


@pytest.mark.parametrize(("source", "layout", "zero"), targets())
def test_any_layout_resumes_on_any_other(
    ranks: RankPools, saved: Any, tmp_path: Path, source: str, layout: str, zero: int
) -> None:
    folder, expected = saved(source)
    world_size, flags = arguments(layout, zero=zero)
    flags = f"{layouts.MODELS[MODEL]} {flags}"
    losses = ranks(world_size)(layouts.resume_then_save, flags, str(folder), str(tmp_path))
    assert losses[0] == pytest.approx(expected, rel=1e-6)
    assert_same_state(newest(folder), newest(tmp_path))


@pytest.mark.parametrize(
    "model",
    [
        # one of each family; -m slow: the others
        pytest.param(model, marks=() if model in ("bloom_alibi", "llama_gqa") else pytest.mark.slow)
        for model in layouts.MODELS
        if model != MODEL
    ],
)
def test_every_model_resumes_elsewhere(ranks: RankPools, saved: Any, tmp_path: Path, model: str) -> None:
    folder, expected = saved("PP2 TP2", model)
    flags = f"{layouts.MODELS[model]} {arguments('122', zero=1)[1]}"
    losses = ranks(4)(layouts.resume_then_save, flags, str(folder), str(tmp_path))
    assert losses[0] == pytest.approx(expected, rel=1e-6)
    assert_same_state(newest(folder), newest(tmp_path))


def test_any_cut_into_stages_resumes_on_any_other(ranks: RankPools, tmp_path: Path) -> None:
    """Two stages: 3 and 1 of 4 layers, then none beside the embedding, none beside the head, and the default's cut."""
    flags = f"{layouts.MODELS[MODEL]} {arguments('211')[1]} --pipeline-partition-method"
    expected = ranks(2)(layouts.train_then_save, f"{flags} 3,1", 3, str(tmp_path / "0"))
    for number, method in enumerate(("0,4", "4,0", "cost"), 1):
        before, after = tmp_path / str(number - 1), tmp_path / str(number)
        losses = ranks(2)(layouts.resume_then_save, f"{flags} {method}", str(before), str(after))
        assert losses[0] == pytest.approx(expected[0], rel=1e-6)
        assert_same_state(newest(before), newest(after))


@pytest.mark.parametrize("layout", [pytest.param("111", marks=pytest.mark.slow), "122"])
def test_bf16_masters_resume_elsewhere(ranks: RankPools, tmp_path: Path, layout: str) -> None:
    flags = f"{layouts.MODELS[MODEL]} {arguments('221')[1]} --bf16"
    expected = ranks(4)(layouts.train_then_save, flags, 3, str(tmp_path / "a"))[0]
    world_size, there = arguments(layout, zero=1)
    flags = f"{layouts.MODELS[MODEL]} {there} --bf16"
    loss = ranks(world_size)(layouts.resume_then_save, flags, str(tmp_path / "a"), str(tmp_path / "b"))[0]
    assert loss == pytest.approx(expected, rel=5e-3)
    assert set(newest(tmp_path / "a").dtypes.values()) == {"bfloat16"}
    assert_same_state(newest(tmp_path / "a"), newest(tmp_path / "b"))


def test_the_precision_may_change_on_resume(ranks: RankPools, saved: Any, tmp_path: Path) -> None:
    """float32 -> bfloat16 on another layout -> float32 again: the masters stay what they were, bit for bit."""
    folder, expected = saved("PP2 TP2")
    world_size, there = arguments("112", zero=1)
    lower = f"{layouts.MODELS[MODEL]} {there} --bf16"
    loss = ranks(world_size)(layouts.resume_then_save, lower, str(folder), str(tmp_path / "bf16"))[0]
    assert loss == pytest.approx(expected, rel=5e-3)
    world_size, back = arguments("121")
    higher = f"{layouts.MODELS[MODEL]} {back}"
    loss = ranks(world_size)(layouts.resume_then_save, higher, str(tmp_path / "bf16"), str(tmp_path / "fp32"))[0]
    assert loss == pytest.approx(expected, rel=1e-6)
    for place, dtype in ((folder, "float32"), (tmp_path / "bf16", "bfloat16"), (tmp_path / "fp32", "float32")):
        assert set(newest(place).dtypes.values()) == {dtype}
        assert_same_state(newest(folder), newest(place))


def test_sgd_resumes_elsewhere(ranks: RankPools, tmp_path: Path) -> None:
    common = f"{layouts.MODELS[MODEL]} --optimizer sgd --sgd-momentum 0.9"
    expected = ranks(4)(layouts.train_then_save, f"{common} {arguments('221')[1]}", 3, str(tmp_path / "a"))[0]
    there = f"{common} {arguments('112', zero=1)[1]}"
    loss = ranks(2)(layouts.resume_then_save, there, str(tmp_path / "a"), str(tmp_path / "b"))[0]
    assert loss == pytest.approx(expected, rel=1e-6)
    assert newest(tmp_path / "b").kinds == ("weight", "momentum_buffer")


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [("--no-load-optim", ("weight",)), ("--finetune", ("weight",)), ("", ("weight", "exp_avg", "exp_avg_sq"))],
)
def test_the_optimizer_can_be_left_behind(
    ranks: RankPools, saved: Any, tmp_path: Path, flags: str, kinds: tuple[str, ...]
) -> None:
    folder, _ = saved("PP2 TP2")
    ranks(1)(layouts.resume_then_save, f"{layouts.MODELS[MODEL]} {flags}", str(folder), str(tmp_path))
    found = newest(tmp_path)
    # a fresh optimizer has no moments before its first step
    assert found.kinds == kinds
    assert found.metadata["progress"]["iteration"] == (0 if flags == "--finetune" else 3)


def test_weights_alone_are_saved_when_asked(ranks: RankPools, tmp_path: Path) -> None:
    flags = f"{layouts.MODELS[MODEL]} --no-save-optim"
    ranks(1)(layouts.train_then_save, flags, 2, str(tmp_path))
    assert newest(tmp_path).kinds == ("weight",)
    assert newest(tmp_path).metadata["optimizer"] is None


def test_a_checkpoint_of_another_model_is_refused(ranks: RankPools, saved: Any, tmp_path: Path) -> None:
    folder, _ = saved("PP2 TP2")
    flags = f"{layouts.MODELS[MODEL]} --num-layers 6"
    with pytest.raises(RankFailure, match=r"is of another model: .* is not in it"):
        ranks(1)(layouts.check_against, flags, str(folder))
    with pytest.raises(RankFailure, match=r"of another model than the options describe: num_layers=6 here, 4 there"):
        ranks(1)(layouts.resume_then_save, flags, str(folder), str(tmp_path))
    flags = layouts.MODELS["llama_gqa"].replace("--num-query-groups 2", "--num-query-groups 4")
    with pytest.raises(RankFailure, match=r"num_query_groups=4 here, 2 there; untie_\w+=True here, False there"):
        ranks(1)(layouts.resume_then_save, flags, str(folder), str(tmp_path))


def test_a_damaged_checkpoint_is_passed_over_on_all_ranks(ranks: RankPools, tmp_path: Path) -> None:
    flags = f"{layouts.MODELS[MODEL]} {arguments('121')[1]}"
    good = ranks(2)(layouts.train_then_save, flags, 2, str(tmp_path / "a"))[0]
    ranks(2)(layouts.train_then_save, flags, 3, str(tmp_path / "a"))
    newest_file = tmp_path / "a" / "global_step3" / "rank_00001.safetensors"
    content = bytearray(newest_file.read_bytes())
    content[-100] ^= 1
    newest_file.write_bytes(content)
    loss = ranks(2)(layouts.resume_then_save, flags, str(tmp_path / "a"), str(tmp_path / "b"))[0]
    assert loss == good
    with pytest.raises(RankFailure, match=r"rank_00001\.safetensors"):
        ranks(2)(layouts.resume_then_save, f"{flags} --no-load-fallback", str(tmp_path / "a"), str(tmp_path / "c"))


@pytest.mark.parametrize(
    ("layout", "name"), [("121", "layers.0.attention_norm.weight"), ("112", "layers.0.attention.qkv.weight")]
)
def test_copies_that_drifted_apart_are_named_before_they_are_saved(
    ranks: RankPools, tmp_path: Path, layout: str, name: str
) -> None:
    flags = f"{layouts.MODELS['llama_mha']} {arguments(layout)[1]}"
    with pytest.raises(RankFailure, match=r"on rank 1 \(.*\) differs from its copy on rank 0"):
        ranks(2)(layouts.drift_then_save, flags, str(tmp_path), 1, name)
    assert not (tmp_path / "latest").exists()


@pytest.mark.parametrize("mode", ["--async-save", "--no-async-save"])
def test_a_run_whose_last_save_failed_ends_with_its_error(ranks: RankPools, tmp_path: Path, mode: str) -> None:
    flags = f"{layouts.MODELS[MODEL]} {arguments('112')[1]} {mode}"
    told = ranks(2)(layouts.save_onto_a_full_disk, flags, str(tmp_path / "better"))
    for failed, saved in told:
        assert "global_step1 was not saved, older checkpoints are as they were" in failed
        assert "No space left" in failed
        assert "saved" in saved
    assert newest(tmp_path / "better").metadata["progress"]["iteration"] == 2
    with pytest.raises(RankFailure, match="No space left"):
        ranks(2)(layouts.save_onto_a_full_disk, flags, str(tmp_path / "end"), False)


@pytest.mark.parametrize(
    ("layout", "zero"),
    [("122", 1), ("114", 3), *(pytest.param(layout, 0, marks=pytest.mark.slow) for layout in ("111", "212"))],
)
def test_a_universal_folder_resumes_on_any_layout(
    ranks: RankPools, saved: Any, tmp_path: Path, layout: str, zero: int
) -> None:
    folder, expected = saved("PP2 TP2")
    universal.write(newest(folder), tmp_path / "universal" / "global_step3_universal")
    universal.point_latest(tmp_path / "universal" / "global_step3_universal")
    world_size, flags = arguments(layout, zero=zero)
    flags = f"{layouts.MODELS[MODEL]} {flags} --universal-checkpoint"
    losses = ranks(world_size)(layouts.resume_then_save, flags, str(tmp_path / "universal"), str(tmp_path / "again"))
    assert losses[0] == pytest.approx(expected, rel=1e-6)
    assert_same_state(newest(folder), newest(tmp_path / "again"))


@pytest.mark.parametrize("model", list(layouts.MODELS))
def test_a_model_from_hugging_face_has_its_loss_on_every_layout(
    ranks: RankPools, saved: Any, tmp_path: Path, model: str
) -> None:
    """Ours on PP2 TP2 -> Hugging Face -> ours again: the loss that transformers computes. On TP 1, 2, 4 and PP 1, 2 for
    one Llama; the others differ in what conversion does, not in how it is cut.
    """
    transformers = pytest.importorskip("transformers")
    folder, _ = saved("PP2 TP2", model)
    theirs, native = tmp_path / "theirs", tmp_path / "native"
    convert = ["--no-verify", "--to"]
    assert convert_checkpoint.main(["--load", str(folder), "--save", str(theirs), *convert, "hf"]) == 0
    assert convert_checkpoint.main(["--load", str(theirs), "--save", str(native), *convert, "native"]) == 0
    tokens = torch.from_numpy(layouts.step_tokens(layouts.HELD_OUT, 8, 32))
    reference = transformers.AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(tokens[:, :-1]).logits
    expected = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
    for layout in ("111", "141", "221") if model == "llama_gqa" else ("121",):
        world_size, flags = arguments(layout)
        loss = ranks(world_size)(layouts.evaluate_loaded, f"{layouts.MODELS[model]} {flags}", str(native))
        assert loss[0] == pytest.approx(expected, rel=1e-5), layout
