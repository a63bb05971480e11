"""tools/merge_adapter.py: against whole matrices, against PEFT where it is installed, and what it refuses."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpoint.folders import CheckpointError
from megatron.cli.merging import merge_adapter, merge_peft_adapter
from megatron.runtime.files import IMPORT_ROOT, locked_output
from megatron.weights.folder_files import newest_export
from megatron.weights.peft import adapter_merge, merged_files
from tests.cli.test_convert_checkpoint import enrich, make, names, weights

transformers = pytest.importorskip("transformers")

CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 6, "lora_dropout": 0.05, "bias": "none", "fan_in_fan_out": False,
    "base_model_name_or_path": "org/model", "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM",
    "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "use_dora": False, "use_rslora": False,
    "layers_to_transform": None, "inference_mode": True, "init_lora_weights": True, "of_the_future": None,
}  # fmt: skip


def merge(base: Path, save: Path, *adapters: str | Path) -> int:
    places = ["--base", str(base), "--save", str(save), "--adapter", *map(str, adapters)]
    return merge_adapter.main([*places, "--verify"])


def write_adapter(
    folder: Path, base: Mapping[str, Tensor], config: dict[str, Any], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Write an adapter with random factors for each target of the config, and return its tensors."""
    generator = torch.Generator().manual_seed(len(str(folder)))
    config = CONFIG | config
    tensors = {}
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        last = module.split(".")[-1]
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
        if module.endswith(tuple(config["modules_to_save"] or ())):  # as PEFT matches them
            tensors[f"base_model.model.{name}"] = draw(*weight.shape)
        if last not in config["target_modules"] or weight.dim() != 2:
            continue
        rows, columns = weight.shape if last not in ("c_attn", "c_proj") else weight.shape[::-1]
        rank = config["rank_pattern"].get(last, config["r"])
        tensors[f"base_model.model.{module}.lora_A.weight"] = draw(rank, columns)
        tensors[f"base_model.model.{module}.lora_B.weight"] = draw(rows, rank)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


def products(tensors: Mapping[str, Tensor], transposed: bool = False) -> dict[str, Tensor]:
    """Return B @ A by the base's tensor, computed whole."""
    found = {}
    for name, a in tensors.items():
        if ".lora_A." in name:
            product = tensors[name.replace("lora_A", "lora_B")].float() @ a.float()
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            found[f"{module}.weight"] = product.T if transposed else product
    return found


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(found) == set(expected)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# ---------------------------------------------------------------------------------------------------------------------
# Against whole matrices


def test_merges_patterns_whole_tensors_and_shards_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(merged_files, "PIECE_BYTES", 1 << 11)
    base_folder, adapter_folder = tmp_path / "base", tmp_path / "adapter"
    make("llama_gqa", base_folder, "50KB")
    enrich(base_folder)
    (base_folder / "tokenizer.json").write_text("{}")
    (base_folder / "consolidated.pth").write_text("weights once more")
    (base_folder / "export.json").write_text("{}")  # of a run: true of its own weights alone
    base = weights(base_folder)
    config = {
        "use_rslora": True, "rank_pattern": {"down_proj": 9}, "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 3},
        "modules_to_save": ["lm_head"],
    }  # fmt: skip
    tensors = write_adapter(adapter_folder, base, config)
    expected = dict(base)
    for name, product in products(tensors).items():
        alpha = 3 if name == "model.layers.0.self_attn.q_proj.weight" else 6
        expected[name] = base[name] + product * (alpha / math.sqrt(9 if "down_proj" in name else 4))
    expected["lm_head.weight"] = tensors["base_model.model.lm_head.weight"]
    assert merge(base_folder, tmp_path / "merged", adapter_folder) == 0
    same(weights(tmp_path / "merged"), expected)
    printed = capsys.readouterr().out
    assert re.search(r"verified: 5 merged tensors .* largest error 0\.\d+ of what rounding allows; 16 others", printed)
    assert "left out: consolidated.pth, export.json" in printed
    said = f"the identity of its base org/model: whether {base_folder} is that was not verified"
    assert said in printed
    assert set(names(base_folder)) - set(names(tmp_path / "merged")) == {"consolidated.pth", "export.json"}
    for name in names(tmp_path / "merged"):
        if not name.endswith(".safetensors"):
            assert (tmp_path / "merged" / name).read_bytes() == (base_folder / name).read_bytes()
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert names(tmp_path) == ["adapter", "base", "merged"]


def test_the_newest_export_of_a_run_is_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("llama_gqa", tmp_path / "base", "50KB")
    exports = [tmp_path / "run" / "hf_format" / f"samples_{samples}" for samples in (90, 471)]
    for folder in exports:
        write_adapter(folder, weights(tmp_path / "base"), {})
    folders = {"newest": exports[0].parent, "of_run": tmp_path / "run", "named": exports[1]}
    for name, given in folders.items():
        assert merge(tmp_path / "base", tmp_path / name, given) == 0
    for name in ("newest", "of_run"):
        same(weights(tmp_path / name), weights(tmp_path / "named"))
    printed = capsys.readouterr().out
    assert printed.count(f"adapter: {exports[1]}, the newest export") == 2
    assert "warning" not in printed
    assert merge(tmp_path / "base", tmp_path / "both", *exports) == 0
    assert f"warning: 2 adapters are exports of one run, {exports[0].parent}" in capsys.readouterr().out
    assert merge(tmp_path / "base", tmp_path / "mean", *(f"{folder}=0.5" for folder in exports)) == 0
    assert "warning" not in capsys.readouterr().out


def test_the_newest_export_is_that_after_most_samples_by_name_or_record(tmp_path: Path) -> None:
    last = tmp_path / "run" / "hf_format" / "last_epoch"
    for folder in (last, last.parent / "samples_90", last.parent / "samples_471", last.parent / "best"):
        folder.mkdir(parents=True)
    # of a library that keeps no record, and names so the one at the end
    assert newest_export(tmp_path / "run") == newest_export(last.parent) == last
    for samples, newest in ((500, last), (400, last.parent / "samples_471")):
        (last / "export.json").write_text(json.dumps({"consumed_samples": samples}))
        assert newest_export(tmp_path / "run") == newest


@pytest.mark.parametrize("by_kernel", [True, False])
def test_writes_every_byte_once(by_kernel: bool, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    copy, write = os.copy_file_range, merged_files.write_at

    def copied(*arguments: int) -> int:
        if not by_kernel:
            raise OSError
        written.append(copy(*arguments))
        return written[-1]

    def wrote(file: int, offset: int, data: memoryview) -> None:
        written.append(len(data))
        write(file, offset, data)

    monkeypatch.setattr(os, "copy_file_range", copied)
    monkeypatch.setattr(merged_files, "write_at", wrote)
    assert merge(sound / "base", tmp_path / "merged", sound / "adapter") == 0
    assert sum(written) == sum(path.stat().st_size for path in (sound / "base").glob("*.safetensors"))
    base, found = weights(sound / "base"), weights(tmp_path / "merged")
    changed = {name for name in base if not torch.equal(base[name], found[name])}
    assert changed == {name for name in base if "q_proj" in name or "down_proj" in name}


def test_weighs_several_adapters_in_16_bit(tmp_path: Path) -> None:
    make("llama_gqa", tmp_path / "base", dtype=torch.bfloat16)
    base = weights(tmp_path / "base")
    one = write_adapter(tmp_path / "one", base, {"modules_to_save": ["norm"]})
    two = write_adapter(tmp_path / "other", base, {"target_modules": ["q_proj"]}, torch.bfloat16)
    assert merge(tmp_path / "base", tmp_path / "merged", f"{tmp_path / 'one'}=0.7", f"{tmp_path / 'other'}=-2") == 0
    expected = dict(base)
    for tensors, weight in ((one, 0.7), (two, -2.0)):
        for name, product in products(tensors).items():
            expected[name] = (expected[name].float() + product * (weight * 6 / 4)).bfloat16()
    for name in base:
        if name.endswith("norm.weight"):
            norm = base[name].float()
            expected[name] = (norm + 0.7 * (one[f"base_model.model.{name}"] - norm)).bfloat16()
    same(weights(tmp_path / "merged"), expected)


@pytest.mark.parametrize(
    ("part", "message"),
    [("layers.0.self_attn.q_proj", "times what rounding allows"), ("layers.0.self_attn.k_proj", "not the base's")],
)
def test_verify_finds_one_wrong_number_and_keeps_nothing(
    part: str, message: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    copy = merged_files.copy_changed

    def spoil(source: Path, target: Path, *rest: Any) -> None:
        copy(source, target, *rest)
        tensors = load_file(target / "model.safetensors")
        tensors[f"model.{part}.weight"][3, 5] *= 1.01
        save_file(tensors, target / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(adapter_merge, "copy_changed", spoil)
    assert merge(sound / "base", tmp_path / "merged", sound / "adapter") == 1
    error = capsys.readouterr().err
    assert f"the merged model.{part}.weight is " in error
    assert message in error
    assert names(tmp_path) == []


@pytest.mark.parametrize("family", ["llama_gqa", "gpt2"])
def test_dora_and_pissa_by_their_formulas(family: str, tmp_path: Path) -> None:
    """DoRA scales each output's weights to its magnitude; PiSSA replaces what it took out of the base."""
    make(family, tmp_path / "base")
    base, transposed = weights(tmp_path / "base"), family == "gpt2"
    targets = {"target_modules": ["c_attn", "c_proj"] if transposed else ["q_proj", "down_proj"], "lora_alpha": 8}
    dora = write_adapter(tmp_path / "dora", base, targets | {"use_dora": True})
    for key, b in list(dora.items()):
        if key.endswith("lora_B.weight"):
            dora[key.replace("lora_B.weight", "lora_magnitude_vector")] = torch.rand(len(b)) + 0.5
    save_file(dora, tmp_path / "dora/adapter_model.safetensors")
    pissa = write_adapter(tmp_path / "pissa", base, targets | {"init_lora_weights": "pissa"})
    places = f"{tmp_path / 'pissa'}=0.5", tmp_path / "dora"
    assert merge(tmp_path / "base", tmp_path / "merged", *places) == 0
    found = weights(tmp_path / "merged")
    for name, product in products(pissa).items():
        weight = (base[name].T if transposed else base[name]).double()
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        taken = left[:, :4] * values[:4] @ right[:4]
        before = weight + 0.5 * (2 * product.double() - taken)
        magnitude = dora[f"base_model.model.{name.removesuffix('.weight')}.lora_magnitude_vector"].double()
        change = 2 * products(dora)[name].double()
        expected = (magnitude / (weight + change).norm(dim=1))[:, None] * (before + change)
        torch.testing.assert_close(found[name].double(), expected.T if transposed else expected, atol=2e-5, rtol=1e-5)


def test_gpt2_under_trls_flags_with_short_names_and_a_pickled_adapter(tmp_path: Path) -> None:
    make("gpt2", tmp_path / "base")
    full = weights(tmp_path / "base")
    short = {name.removeprefix("transformer."): tensor.contiguous() for name, tensor in full.items()}
    save_file(short, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    config = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    tensors = write_adapter(tmp_path / "adapter", full, config)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    torch.save(tensors, tmp_path / "adapter" / "adapter_model.bin")
    flags = {"base_model_name": "base", "adapter_model_name": "adapter", "output_name": "merged"}
    assert merge_peft_adapter.main([f"--{flag}={tmp_path / name}" for flag, name in flags.items()]) == 0
    expected = dict(short)
    for name, product in products(tensors, transposed=True).items():
        expected[name.removeprefix("transformer.")] = full[name] + product * (6 / 4)
    same(weights(tmp_path / "merged"), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Against PEFT

PEFT_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama_gqa",
        {"target_modules": "all-linear", "rank_pattern": {"up_proj": 3}, "alpha_pattern": {"v_proj": 7}},
    ),
    "rslora": ("llama_mha", {"target_modules": r".*\.1\..*_proj", "use_rslora": True, "r": 7, "lora_alpha": 5}),
    "embedding": ("llama_mha", {"target_modules": ["embed_tokens", "lm_head"], "r": 3}),
    "saved": (
        "llama_mha",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "mlp", "norm"]},
    ),
    "tied": (
        "llama_3.2_tied",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "layers": (
        "llama_mha",
        {"target_modules": ["k_proj"], "layers_to_transform": [1], "init_lora_weights": "gaussian"},
    ),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2_bias": ("gpt2", {"target_modules": ["c_attn"], "bias": "all", "lora_bias": True}),
    "dora": ("llama_gqa", {"target_modules": "all-linear", "use_dora": True, "rank_pattern": {"up_proj": 3}}),
    "dora_embedding": ("llama_mha", {"target_modules": ["embed_tokens", "lm_head", "v_proj"], "use_dora": True}),
    "dora_conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "pissa": ("llama_gqa", {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": "pissa", "r": 5}),
    "pissa_dora": ("gpt2", {"target_modules": ["c_fc"], "init_lora_weights": "pissa", "use_dora": True}),
    "bloom": ("bloom_12_heads", {"target_modules": ["query_key_value", "dense"], "bias": "lora_only"}),
}


def test_a_refusal_under_trls_flags_names_these(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = []

    def other_base(*_: Any, option: str, **__: Any) -> list[str]:
        named.append(option)
        raise CheckpointError("another base")

    monkeypatch.setattr(adapter_merge, "check_identity", other_base)
    flags = ["--adapter_model_name", str(sound / "adapter"), "--output_name", str(tmp_path / "merged")]
    assert merge_peft_adapter.main(["--base_model_name", str(sound / "base"), *flags]) == 1
    assert named == ["--base_model_name"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert merge_peft_adapter.main(["--base_model_name", "org/none", *flags]) == 1
    assert "--base_model_name=org/none" in capsys.readouterr().err


def randomize(model: Any, seed: int) -> None:
    """Draw everything that is trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.2, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", PEFT_CASES)
def test_equals_merge_and_unload(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    family, options = PEFT_CASES[case]
    model = make(family, tmp_path / "base", dtype=dtype)
    base = weights(tmp_path / "base")
    # PEFT merges these of one adapter alone, or rounds once more for each further one
    weighted = not options.keys() & {"modules_to_save", "bias", "use_dora", "init_lora_weights"}
    factors = {"one": 0.6, "two": -1.5} if weighted else {"one": 1.0}
    for name in factors:
        adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM", **options))
        randomize(adapted, len(name) + ord(name[0]))
        adapted.save_pretrained(tmp_path / name)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "one", adapter_name="one")
    if weighted:
        loaded.load_adapter(tmp_path / "two", "two")
    for module in loaded.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for name, factor in factors.items():
                module.set_scale(name, factor)
    expected = loaded.merge_and_unload(adapter_names=list(factors)).state_dict()
    assert merge(tmp_path / "base", tmp_path / "merged", *(f"{tmp_path / n}={f}" for n, f in factors.items())) == 0
    found = weights(tmp_path / "merged")
    if case == "embedding":  # PEFT saves the base's embeddings beside the factors
        assert any(name.endswith("base_layer.weight") for name in load_file(tmp_path / "one/adapter_model.safetensors"))
    same(found, {name: expected[name] for name in base})
    assert any(not torch.equal(found[name], base[name]) for name in base)


# ---------------------------------------------------------------------------------------------------------------------
# Refused


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    make("llama_gqa", folder / "base")
    write_adapter(folder / "adapter", weights(folder / "base"), {})
    return folder


def set_config(name: str, value: object, file: str = "adapter/adapter_config.json") -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | {name: value}))

    return change


def set_tensor(name: str, value: Tensor | None) -> Callable[[Path], None]:
    """Replace or drop a tensor of the adapter."""

    def change(folder: Path) -> None:
        path = folder / "adapter" / "adapter_model.safetensors"
        tensors = load_file(path)
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
        save_file(tensors, path)

    return change


def truncate(folder: Path) -> None:
    path = folder / "adapter" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def pickle_code(folder: Path) -> None:
    (folder / "adapter" / "adapter_model.safetensors").unlink()
    torch.save({"weight": Path("/")}, folder / "adapter" / "adapter_model.bin")


def put_checkpoint(folder: Path) -> None:
    shutil.rmtree(folder / "adapter")
    (folder / "adapter/samples_8").mkdir(parents=True)
    (folder / "adapter/samples_8/checkpoint.json").write_text("{}")


Q = "base_model.model.model.layers.1.self_attn.q_proj"
REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "dora": (set_config("use_dora", True), "holds A, B of model.layers.0.mlp.down_proj; it must be A, B, magnitude"),
    "magnitude": (set_tensor(f"{Q}.lora_magnitude_vector", torch.ones(64)), "it must be A, B"),
    "replication": (set_config("layer_replication", [[0, 1], [0, 2]]), "layer_replication"),
    "parameters": (set_config("target_parameters", ["experts"]), "target_parameters"),
    "unknown": (set_config("of_the_future", 3), "of_the_future: 3"),
    "pissa": (set_config("init_lora_weights", "pissa_niter_4"), "'pissa_niter_4', which changes the base's weights"),
    "ia3": (set_config("peft_type", "IA3"), "'IA3'; only LORA"),
    "type": (set_config("r", "4"), "r: '4', of another type"),
    "rank_0": (set_config("r", 0), "r must be at least 1"),
    "rank": (set_config("r", 5), "gives it rank 5"),
    "alpha": (set_config("lora_alpha", 0), "lora_alpha: 0; r must be at least 1, lora_alpha finite and above 0"),
    "dropout": (set_config("lora_dropout", 1.5), "lora_dropout: 1.5; it must be at least 0 and below 1"),
    "layers": (set_config("layers_to_transform", [0]), "holds model.layers.1.mlp.down_proj, model.layers.1.self_attn"),
    "float64": (
        set_tensor(f"{Q}.lora_B.weight", torch.ones(64, 4, dtype=torch.float64)),
        "lora_B.weight as F64, which is not read; save it again as float32",
    ),
    "int8": (set_tensor(f"{Q}.lora_B.weight", torch.ones(64, 4, dtype=torch.int8)), "give an unquantized model"),
    "pattern": (set_config("rank_pattern", {"(": 3}), "not a regular expression"),
    "conv1d": (set_config("fan_in_fan_out", True), "which is for gpt2"),
    "lora_bias": (set_config("lora_bias", True), "must be A, B, bias"),
    "target": (
        set_config("target_modules", ["q_proj", "down_proj", "k_proj"]),
        "lacks model.layers.0.self_attn.k_proj",
    ),
    "saved": (set_config("modules_to_save", ["lm_head"]), "lacks lm_head.weight"),
    "surplus": (
        set_config("target_modules", ["q_proj"]),
        "layers.1.mlp.down_proj, which its adapter_config.json does not",
    ),
    "half": (set_tensor(f"{Q}.lora_B.weight", None), "it must be A, B"),
    "shape": (set_tensor(f"{Q}.lora_B.weight", torch.ones(3, 4)), "is for another base"),
    "stranger": (set_tensor("lora_A.weight", torch.ones(3, 4)), "not tensors of a LoRA adapter"),
    "bias": (set_tensor("base_model.model.model.norm.weight", torch.ones(3)), "model.norm.weight, which its"),
    "other": (set_tensor("base_model.model.model.layers.9.mlp.q_proj.lora_A.weight", torch.ones(4, 4)), "must be A, B"),
    "not_finite": (set_tensor(f"{Q}.lora_B.weight", torch.full((64, 4), math.inf)), "not finite after merging"),
    "pattern_of_layers": (set_config("layers_pattern", "("), "not a regular expression"),
    "truncated": (truncate, "adapter_model.safetensors is damaged"),
    "pickle": (pickle_code, "opening a pickle that names code may run it"),
    "no_config": (lambda folder: (folder / "adapter" / "adapter_config.json").unlink(), "is missing"),
    "checkpoint": (put_checkpoint, "convert it first: python tools/convert_checkpoint.py --load "),
    "no_base": (lambda folder: shutil.rmtree(folder / "base"), "is not a folder; give a Hugging Face model"),
    "quantized": (set_config("quantization_config", {"bits": 4}, "base/config.json"), "the model's unquantized folder"),
    "save": (lambda folder: (folder / "merged" / "here").mkdir(parents=True), "give a new or empty folder"),
}


def test_what_a_killed_merge_has_left_is_removed_by_the_next(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "merged [1]"
    words = [f"--base={sound / 'base'}", f"--adapter={sound / 'adapter'}", f"--save={save}"]
    program = (
        "import os, signal, sys\n"
        "from megatron.cli.merging import merge_adapter\n"
        "from megatron.weights.peft import adapter_merge\n"
        "adapter_merge.copy_changed = lambda *given: os.kill(os.getpid(), signal.SIGKILL)\n"
        "merge_adapter.main(sys.argv[1:])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(IMPORT_ROOT)}
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", program, *words], env=environment, capture_output=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert [path.name for path in tmp_path.glob(".*.partial-*")] != []
    with locked_output(save):
        assert merge(sound / "base", save, sound / "adapter") == 1
    assert f"error: another process is writing {save}; wait for it" in capsys.readouterr().err
    assert merge(sound / "base", save, sound / "adapter") == 0
    assert [path.name for path in tmp_path.iterdir()] == [save.name]


@pytest.mark.parametrize("fault", REFUSED)
def test_refuses_by_name_and_leaves_nothing(
    fault: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "case"
    shutil.copytree(sound, folder)
    change, message = REFUSED[fault]
    change(folder)
    before = names(folder)
    assert merge(folder / "base", folder / "merged", folder / "adapter") == 1
    error = capsys.readouterr().err
    assert re.search(re.escape(message), error), error
    assert error.count("\n") == 1
    assert names(folder) == before


def test_merges_a_tied_embedding_trained_for_both_of_its_uses_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("llama_3.2_tied", tmp_path / "base")
    base = weights(tmp_path / "base")
    adapter, embedding = tmp_path / "adapter", "model.embed_tokens.weight"
    tensors = write_adapter(adapter, base, {"target_modules": [], "modules_to_save": ["embed_tokens"]})
    assert merge(tmp_path / "base", tmp_path / "merged", adapter) == 1
    assert "shares between embedding and output" in capsys.readouterr().err
    trained = tensors[f"base_model.model.{embedding}"]
    copies = tensors | {"base_model.model.lm_head.weight": trained.clone()}
    save_file(copies, adapter / "adapter_model.safetensors")
    assert merge(tmp_path / "base", tmp_path / "merged", adapter) == 0
    same(weights(tmp_path / "merged"), base | {embedding: trained})
    copies["base_model.model.lm_head.weight"][3, 5] += 1
    save_file(copies, adapter / "adapter_model.safetensors")
    assert merge(tmp_path / "base", tmp_path / "other", adapter) == 1
    assert "is for lm_head.weight, which" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("adapter=nan", "'adapter=nan': the weight 'nan' is not a finite number; write FOLDER=WEIGHT such as adapter="),
        ("adapter=-inf", "'adapter=-inf': the weight '-inf' is not a finite number"),
        ("adapter=abc", "'adapter=abc': the weight 'abc' is not a finite number"),
        ("r=8/adapter", "'r=8/adapter': the weight '8/adapter' is not a finite number; write FOLDER=WEIGHT such as r="),
        ("=0.5", "'=0.5' names no folder; write FOLDER, or FOLDER=WEIGHT"),
        ("", "'' names no folder"),
    ],
)
def test_a_weight_that_is_not_finite_and_an_empty_name_are_refused(
    given: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        merge(tmp_path / "base", tmp_path / "merged", given)
    assert f"argument --adapter: {said}" in capsys.readouterr().err
