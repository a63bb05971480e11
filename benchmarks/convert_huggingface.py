"""Speed of converting a model from Hugging Face to our format and back, against a plain copy of the files.

    python benchmarks/convert_huggingface.py [--gigabytes 2] [--files 2] [--dtype bfloat16] [--rounds 3] [--folder PATH]

The model is a Llama of random weights in safetensors, `--gigabytes` of them in `--files`. Each conversion is of one
process (`--workers 1`), and of as many as there are cores, in turn. Both directions are whole commands,
`tools/convert_checkpoint.py --no-verify`; our format keeps float32 and checksums, so that of a bfloat16 model is twice
as large. The plain copy is `cp -r` of the folder that the conversion wrote, as many bytes, and fsync of each file and
the folder. What is read lies in the page cache for both.

Prints seconds, bytes written a second, the ratios of one process and of the copy to all, and the most memory that a
process of the command had. Exit status 1 if a
conversion failed, or a weight that came back differs in one bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.alternating import alternate, positive, quotients, spread
from benchmarks.checkpointing import (
    add_folder_option,
    ffn_hidden_size,
    files_in,
    fsync,
    num_bytes,
    num_parameters,
    work_folder,
)

CONVERTER = Path(__file__).resolve().parent.parent / "tools" / "convert_checkpoint.py"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CORES = len(os.sched_getaffinity(0))
ROUTES = {"to ours": ("given", "native"), "back": ("native", "returned")}
"""Folders that each conversion reads and writes."""


def write_model(
    folder: Path, hidden_size: int, num_layers: int, vocab_size: int, dtype: torch.dtype, file_bytes: float = 10**9
) -> None:
    """A Llama of random weights as transformers saves it, in files of about `file_bytes` with their index."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": ffn_hidden_size(hidden_size),
        "num_hidden_layers": num_layers,
        "num_attention_heads": max(1, hidden_size // 64),
        "num_key_value_heads": max(1, hidden_size // 64),
        "vocab_size": vocab_size,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    files: list[dict[str, Tensor]] = [{}]
    free_bytes = file_bytes
    shapes = dict(weights(hidden_size, num_layers, vocab_size))
    for name, shape in shapes.items():
        tensor = torch.randn(shape).to(dtype)
        if tensor.nbytes > free_bytes and files[-1]:
            files.append({})
            free_bytes = file_bytes
        files[-1][name] = tensor
        free_bytes -= tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": num_bytes(folder)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def weights(hidden_size: int, num_layers: int, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama's tensors in transformers."""
    inner = ffn_hidden_size(hidden_size)
    yield "model.embed_tokens.weight", (vocab_size, hidden_size)
    for layer in range(num_layers):
        for name in ("q", "k", "v", "o"):
            yield f"model.layers.{layer}.self_attn.{name}_proj.weight", (hidden_size, hidden_size)
        for name in ("gate", "up"):
            yield f"model.layers.{layer}.mlp.{name}_proj.weight", (inner, hidden_size)
        yield f"model.layers.{layer}.mlp.down_proj.weight", (hidden_size, inner)
        for name in ("input", "post_attention"):
            yield f"model.layers.{layer}.{name}_layernorm.weight", (hidden_size,)
    yield "model.norm.weight", (hidden_size,)
    yield "lm_head.weight", (vocab_size, hidden_size)


def first_difference(one: Path, other: Path) -> str | None:
    """A tensor that is not bit for bit the same in both folders; None: there is none."""
    places = [
        {name: path for path in sorted(folder.glob("*.safetensors")) for name in names_in(path)}
        for folder in (one, other)
    ]
    if places[0].keys() != places[1].keys():
        return min(places[0].keys() ^ places[1].keys())
    for name in places[0]:
        pair = [read(place[name], name) for place in places]
        if pair[0].dtype != pair[1].dtype or not torch.equal(*(side.view(torch.uint8) for side in pair)):
            return name
    return None


def names_in(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor


def measure(
    folder: Path, name: str, dtype: str, rounds: int, file_bytes: float
) -> tuple[dict[str, list[float]], int, int]:
    """Seconds of a conversion by one process and by all cores, and of a copy of what it wrote; the bytes of that, and
    the most memory that a process had.
    """
    source, target = (folder / part for part in ROUTES[name])
    form = ["--to", "native"]
    if name == "back":
        form = ["--to", "hf", "--dtype", dtype, "--max-shard-size", f"{max(1, int(file_bytes / 1e6))}MB"]
    command = [sys.executable, str(CONVERTER), "--load", str(source), "--save", str(target), "--no-verify", *form]
    peaks_bytes: list[int] = []

    def converted(workers: int = CORES) -> float:
        shutil.rmtree(target, ignore_errors=True)
        os.sync()
        began_s = time.perf_counter()
        process = subprocess.Popen([*command, "--workers", str(workers)], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began_s
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"error: {' '.join(command)} ended with status {process.returncode}")
        peaks_bytes.append(used.ru_maxrss * 1024)
        return seconds

    def copied() -> float:
        os.sync()
        copy = folder / "copy"
        began_s = time.perf_counter()
        subprocess.run(["cp", "-r", str(target), str(copy)], check=True)
        for path in files_in(copy):
            fsync(path)
        fsync(copy)
        seconds = time.perf_counter() - began_s
        shutil.rmtree(copy)
        return seconds

    converted()  # warms up, and makes what is to be copied
    sides: dict[str, Callable[[], float]] = {"one": partial(converted, 1), name: converted, "copy": copied}
    times = alternate(sides, rounds, warm_up=False)
    return times, num_bytes(target), max(peaks_bytes)


def main() -> int:
    parser = argparse.ArgumentParser(description="Hugging Face to ours and back.", allow_abbrev=False)
    parser.add_argument("--gigabytes", type=float, default=2.0, metavar="G", help="of Hugging Face files (default: 2)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of these (default: bfloat16)")
    parser.add_argument("--files", type=positive, default=2, metavar="N", help="that hold them (default: 2)")
    parser.add_argument("--hidden-size", type=positive, default=2048, metavar="N", help="default: 2048")
    parser.add_argument("--vocab-size", type=positive, default=32000, metavar="N", help="default: 32000")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="alternations (default: 3)")
    add_folder_option(parser)
    options = parser.parse_args()

    dtype, hidden_size, vocab_size = DTYPES[options.dtype], options.hidden_size, options.vocab_size
    ends, one_more = (num_parameters(hidden_size, layers, vocab_size) for layers in (0, 1))
    num_layers = max(1, round((options.gigabytes * 1e9 / dtype.itemsize - ends) / (one_more - ends)))
    numel = num_parameters(hidden_size, num_layers, vocab_size)
    with work_folder(options.folder, numel * (3 * dtype.itemsize + 2 * 4)) as folder:
        file_bytes = options.gigabytes * 1e9 / options.files
        shape = folder / "given", hidden_size, num_layers, vocab_size, dtype, file_bytes
        # in a process of its own: Linux counts the most memory of a parent as its children's
        writer = multiprocessing.get_context("spawn").Process(target=write_model, args=shape)
        writer.start()
        writer.join()
        if writer.exitcode:
            raise SystemExit(f"error: writing the model ended with status {writer.exitcode}")
        measured = {name: measure(folder, name, options.dtype, options.rounds, file_bytes) for name in ROUTES}
        num_files = len(list((folder / "given").glob("*.safetensors")))
        different = first_difference(folder / "given", folder / "returned")

    print(
        f"{numel / 1e6:.0f} million parameters in {options.dtype}, {num_files} files, {CORES} cores, {options.rounds} "
        "rounds: median (from to)"
    )
    for name, (times, written_bytes, peak_bytes) in measured.items():
        ratios = quotients(times[name], times["copy"])
        speeds = [written_bytes / statistics.median(times[side]) / 1e9 for side in (name, "copy")]
        print(f"  {name:8s} {spread(times[name], 2)} s, {written_bytes / 1e9:.2f} GB written, {speeds[0]:.2f} GB/s")
        print(f"    of one process         {spread(times['one'], 2)} s")
        print(f"    one process to all     {spread(quotients(times['one'], times[name]), 2)}")
        print(f"    cp and fsync of these  {spread(times['copy'], 2)} s, {speeds[1]:.2f} GB/s")
        print(f"    ratio to the copy      {spread(ratios, 2)}")
        print(f"    most memory of one     {peak_bytes / 1e9:.2f} GB")
    largest = max(vocab_size, ffn_hidden_size(hidden_size)) * hidden_size
    print(f"  the largest tensor has {largest * 4 / 1e9:.2f} GB in float32")
    print(f"  weights that came back: {'equal bit for bit' if different is None else f'{different} is DIFFERENT'}")
    return 0 if different is None else 1


if __name__ == "__main__":
    sys.exit(main())
