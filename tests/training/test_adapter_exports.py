"""The exports of runs with adapters: folders of PEFT, and merged models."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron.checkpoint.reader import newest_checkpoint
from megatron.cli import convert_checkpoint
from megatron.cli.merging import merge_adapter
from megatron.launch.checks import check_start
from megatron.settings.command_line import load_config, parse_arguments
from megatron.weights.peft.export import AdaptedModel, compare_export, export_adapter, native_adapter
from tests import runs
from tests.ranks import RankPools
from tests.training import layouts
from tests.training.test_adapter_state import PP2, SMALL, failure_of_start, make_base, start
from tests.training.test_exports import LLAMA, made_of, names

transformers = pytest.importorskip("transformers")

MODEL = f"{LLAMA} --hidden-size 64 --ffn-hidden-size 128"
SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 250 --make-vocab-size-divisible-by 16"
LORA = "--lora-rank 4 --lora-alpha 8 --lora-target-modules q_proj v_proj down_proj --no-save-optim --lr 1e-1"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_dataset(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def base(ranks: RankPools, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    saved = f"--save {folder / 'saved'} --save-hf {folder / 'hf'} --no-save-optim"
    assert ranks(1)(runs.train, f"{MODEL} --data-path {data} --train-samples 8 {saved}") == [""]
    export = folder / "hf/samples_8"
    Tokenizer(WordLevel({f"t{i}": i for i in range(128)}, unk_token="t0")).save(str(export / "tokenizer.json"))
    (export / "export.json").unlink()
    return export


def command(data: Path, base: Path, folder: Path, more: str) -> str:
    saved = f"--save {folder / 'saved'} --save-hf {folder / 'hf'} --load {base}"
    return f"{MODEL} --data-path {data} --train-samples 16 {LORA} {saved} {more}"


def test_adapters_are_exported_from_a_layout(ranks: RankPools, data: Path, base: Path, tmp_path: Path) -> None:
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --save-samples 8"
    assert ranks(4)(runs.train, command(data, base, tmp_path, layout)) == [""] * 4
    assert names(tmp_path / "hf") == ["samples_16", "samples_8"]
    export, checkpoint = tmp_path / "hf/samples_16", newest_checkpoint(tmp_path / "saved")
    assert checkpoint is not None
    files = ["adapter_config.json", "adapter_model.safetensors", "base_model.json", "export.json", "tokenizer.json"]
    assert names(export) == files
    assert made_of(export)["token"] == checkpoint.token
    assert compare_export(export, native_adapter(checkpoint), "fp32") == 2 * 2 * 3
    assert json.loads((export / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert load_file(export / "adapter_model.safetensors")[
        "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    ].any()


def test_a_run_resumes_without_the_folder_of_peft_that_it_began_with(
    ranks: RankPools, data: Path, base: Path, peft: tuple[Path, Path], tmp_path: Path
) -> None:
    """By the same command: its checkpoints know the options."""
    folder = shutil.copytree(peft[1], tmp_path / "peft")
    words = f"{layouts.MODELS['llama_gqa']} {SIZES} --data-path {data} --train-samples 12 --eval-iters 0"
    words += f" --load {folder} --lora-base {peft[0]} --save {tmp_path / 'saved'}"
    config = load_config([*runs.TINY.split(), *words.split()])
    assert list(check_start(config)) == []
    assert ranks(1)(runs.train, f"{words} --exit-interval 1") == [""]
    shutil.rmtree(folder)
    assert load_config([*runs.TINY.split(), *words.split()]) == config
    (said,) = ranks(1)(runs.announced, words)
    assert any(re.match("resumed .*/saved/.*: weights, optimizer, random streams; iteration 1,", line) for line in said)
    (fault,) = ranks(1)(runs.train, f"{words} --lora-alpha 3")
    assert "holds adapters with other options: lora_alpha=3.0" in fault


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, "--zero-stage 3 --micro-batch-size 1 --lora-init pissa"), (1, "--quantize-base nf4 --bf16")],
)
def test_a_merged_export_is_what_merge_adapter_makes(
    ranks: RankPools,
    data: Path,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    world_size: int,
    layout: str,
) -> None:
    """Bit by bit, of the adapters that convert_checkpoint writes, also where the run held the base in 4 bits."""
    words = command(data, base, tmp_path, f"{layout} --save-hf-merged")
    assert ranks(world_size)(runs.train, words) == [""] * world_size
    export, adapter, merged = tmp_path / "hf/samples_16", tmp_path / "adapter", tmp_path / "merged"
    assert convert_checkpoint.main(["--load", f"{tmp_path}/saved", "--save", str(adapter), "--to", "peft"]) == 0
    said = capsys.readouterr().out
    assert "vLLM serves these adapters with --enable-lora --max-lora-rank 8" in said
    assert ("what was trained where they are held in 16 bits" in said) == ("pissa" in layout)
    assert merge_adapter.main(["--base", str(base), "--adapter", str(adapter), "--save", str(merged)]) == 0
    expected, found = (load_file(folder / "model.safetensors") for folder in (merged, export))
    assert set(expected) == set(found)
    dtype = torch.bfloat16 if "bf16" in layout else torch.float32
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].to(dtype)), name
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not loaded["missing_keys"]
    assert model.dtype == dtype
    assert (export / "tokenizer.json").is_file()


def test_adapters_are_merged_into_the_model_that_they_were_trained_on(
    ranks: RankPools, data: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after supervised fine-tuning: adapters, merged; adapters of the result, merged into it, not into the first."""
    peft = pytest.importorskip("peft")
    sft, dpo, tuned = tmp_path / "sft", tmp_path / "dpo", tmp_path / "tuned"
    assert ranks(1)(runs.train, command(data, base, sft, "")) == [""]
    first, second = sft / "hf/samples_16", dpo / "hf/samples_16"
    assert merge_adapter.main(["--base", str(base), "--adapter", str(first), "--save", str(tuned)]) == 0
    layout = "--tensor-model-parallel-size 2 --zero-stage 1"
    assert ranks(2)(runs.train, command(data, tuned, dpo, layout)) == [""] * 2
    capsys.readouterr()

    def merged(into: Path, *flags: str) -> tuple[int, str]:
        words = ["--base", str(into), "--adapter", str(second), "--save", str(tmp_path / f"merged_{into.name}"), *flags]
        status = merge_adapter.main(words)
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    status, said = merged(shutil.copytree(tuned, tmp_path / "elsewhere"))  # another path says nothing
    assert status == 0
    assert "identity" not in said
    assert "WARNING" not in said
    status, said = merged(base)
    assert status == 1
    assert re.search(
        r"another base model, \w{12}, than .*, \w{12}: 6 of 20 tensors differ: model.layers.0.mlp.down", said
    )
    assert not (tmp_path / f"merged_{base.name}").exists()
    status, said = merged(base, "--allow-other-base")
    assert status == 0
    assert "WARNING" in said
    plain = transformers.AutoModelForCausalLM.from_pretrained(tuned)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(plain, second)
    assert [str(each.message) for each in warned if "peft" in each.filename] == []
    assert torch.isfinite(model(torch.arange(6)[None]).logits).all()


def start_and_save(arguments: str) -> None:
    """Start a run, and save before its first step."""
    engine, _, first = start(arguments)
    assert first == 0
    layouts.save(engine, 0)


@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size 2", f"{PP2} --zero-stage 1", "--zero-stage 3"])
def test_an_export_starts_a_run_on_any_layout(
    ranks: RankPools, peft: tuple[Path, Path], tmp_path: Path, layout: str
) -> None:
    """What the checkpoint then holds is the folder, bit by bit, with DoRA's magnitudes."""
    base, export = peft
    words = f"{layouts.MODELS['llama_gqa']} --load {export} --lora-base {base} --save {tmp_path / 'saved'} {layout}"
    ranks(2)(start_and_save, words)
    checkpoint = newest_checkpoint(tmp_path / "saved")
    assert checkpoint is not None
    assert compare_export(export, native_adapter(checkpoint), "fp32") == 3 * (4 * 3 + 2)
    (said,) = ranks(1)(failure_of_start, words.replace(f"--lora-base {base}", "").replace(layout, ""))
    assert "holds adapters of the base model org/base, which is not a folder on this machine" in said


@pytest.fixture(scope="module")
def peft(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base of a run, and a folder of PEFT for it with random numbers."""
    folder = tmp_path_factory.mktemp("peft")
    ranks(1)(make_base, str(folder / "base"))
    config, _ = parse_arguments(f"{layouts.COMMON} {SMALL}".split())
    generator = torch.Generator().manual_seed(4)
    shards = AdaptedModel(config).shards
    tensors = ((name, torch.rand(shard.shape, generator=generator)) for name, shard in shards.items())
    (folder / "export").mkdir()
    export_adapter(folder / "export", config, tensors, base_name="org/base")
    return folder / "base", folder / "export"
