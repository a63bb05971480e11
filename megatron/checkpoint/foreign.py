"""Formats of checkpoints that others write, known by the names of their files.

Imports no torch, so that a launcher can name what a folder holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from megatron.checkpoint.folders import MANIFEST, CheckpointError
from megatron.runtime.commands import command_name

MODEL_OPTIM_RNG = "model_optim_rng.pt"
"""File of each model-parallel rank in Megatron-LM's legacy format, in a folder of its own."""
TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron-LM's record of its newest checkpoint, in the folder that it saves to."""
_ITERATION = re.compile(r"iter_\d{7,}|release")
SEARCHED_FOLDERS = 1000
"""Folders below the given one that are looked into."""


@dataclass(frozen=True)
class ForeignFormat:
    """A format that is not loaded as it is."""

    name: str
    signs: tuple[tuple[str, ...], ...]
    """Patterns of file names, all of one tuple in one folder."""
    remedy: str


_TO_TRANSFORMERS = "export it to a folder of transformers"

DEEPSPEED = ForeignFormat(
    "a checkpoint in DeepSpeed's format",
    # a universal folder; a model with one file for each model-parallel rank; a pipeline, with one for each layer
    (("zero/*/fp32.pt",), ("*mp_rank_*_model_states.pt",), ("layer_*-model_*-model_states.pt",)),
    "train from it with --universal-checkpoint (HL_UNIV_CP=1), or convert it with "
    f"{command_name('convert_checkpoint')}",
)
# a format whose files are also those of another comes before it
FORMATS = (
    DEEPSPEED,
    ForeignFormat(
        "a distributed checkpoint of megatron-core in the format zarr, or not whole",
        (("common.pt", "metadata.json"), ("common.pt", ".metadata"), ("common.pt", "*.distcp")),
        "copy the whole folder, or save it with --ckpt-format torch_dist",
    ),
    ForeignFormat(
        "a checkpoint of Megatron-LM in the legacy format of 2023, with the optimizer apart",
        (("mp_rank_*/model_rng.pt",),),
        "load it with its Megatron-LM, and save it with --ckpt-format torch or torch_dist",
    ),
    ForeignFormat(
        "a checkpoint of NeMo",
        (("weights", "context"), ("*.nemo",), ("model_config.yaml", "model_weights*")),
        f"{_TO_TRANSFORMERS} with NeMo (nemo llm export, target=hf), and give that",
    ),
    ForeignFormat(
        "a checkpoint of torch.distributed.checkpoint",
        ((".metadata", "*.distcp"), ("*.distcp",)),
        f"{_TO_TRANSFORMERS} with the program that wrote it, and give that",
    ),
    ForeignFormat(
        "weights of Meta's Llama without their params.json",
        (("consolidated.*.pth",),),
        "copy the model's own params.json there",
    ),
    ForeignFormat(
        "weights as Mistral publishes them",
        (("params.json", "consolidated*"),),
        "download the model in transformers' format, and give that folder",
    ),
    ForeignFormat(
        "weights in GGUF",
        (("*.gguf",),),
        "download the model in transformers' format, or write it so: "
        "AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE).save_pretrained(NEW)",
    ),
    ForeignFormat(
        "a checkpoint of litgpt",
        (("lit_model.pth",),),
        f"{_TO_TRANSFORMERS} with `litgpt convert_from_litgpt`, and give that",
    ),
    ForeignFormat(
        "weights of TensorFlow or Flax",
        (("tf_model*.h5",), ("flax_model*.msgpack",)),
        "write them with transformers' from_pretrained(FOLDER, from_tf=True or from_flax=True).save_pretrained(NEW)",
    ),
    ForeignFormat("a checkpoint of PyTorch Lightning", (("*.ckpt",),), f"{_TO_TRANSFORMERS}, and give that"),
    ForeignFormat(
        "weights of transformers without their config.json",
        (("model*.safetensors",), ("pytorch_model*.bin",)),
        "copy the model's own config.json there",
    ),
    ForeignFormat(
        "adapters in PEFT's format without their adapter_config.json",
        (("adapter_model*.safetensors",), ("adapter_model*.bin",)),
        "copy their own adapter_config.json there",
    ),
)
GGUF_MAGIC = b"GGUF"
MODEL_FILES = ("config.json", "adapter_config.json")


def foreign_format(path: Path) -> str | None:
    """Return what a file or folder holds that is not loaded as it is, and the remedy; None: it is not recognised.

    The files of a folder, and of those in it, are compared by name.
    """
    if path.is_file():
        return _of_file(path)
    if not path.is_dir():
        return None
    known = _format_of(path)
    if known is not None:
        return f"{path} holds {known.name}, which cannot be loaded as it is: {known.remedy}"
    # `snapshots`: where huggingface_hub's cache has them
    inner = [*_folders_in(path), *_folders_in(path / "snapshots")]
    models = [folder for folder in inner if is_model(folder)]
    if models:
        return f"{path} is not a model itself, but holds folders of models; give one of them, such as {models[-1]}"
    for folder in inner:
        known = _format_of(folder)
        if known is not None:
            where = folder.relative_to(path)
            return f"{path} holds {known.name} in {where}, which cannot be loaded as it is: {known.remedy}"
    return None


def deepspeed_folder(path: Path) -> Path | None:
    """Return the folder of one step of DeepSpeed: `path`, or the one that a pointer in it names, if any."""
    if not path.is_dir():
        return None
    if _has_signs(path, DEEPSPEED):
        return path
    # ds_to_universal.py writes its pointer beside the `latest` of the checkpoint that it converted
    for pointer in ("latest_universal", "latest"):
        if not (path / pointer).is_file():
            continue
        # the first line; our own `latest` has another
        tag = (path / pointer).read_text(encoding="utf-8", errors="replace").strip().partition("\n")[0].strip()
        # others have written it: a path in it would lead out of the folder
        if not tag or tag in (".", "..") or Path(tag).name != tag:
            raise CheckpointError(f"{path / pointer} holds {tag!r}; it must be the name of a folder beside it")
        if (path / tag).is_dir() and _has_signs(path / tag, DEEPSPEED):
            return path / tag
    return None


def megatron_lm_folder(path: Path, step: int | None = None) -> Path | None:
    """Return the folder of one iteration in Megatron-LM's legacy format: `path`, or the one in it that is newest.

    `step`: the iteration wanted. Returns None where it holds no such checkpoint. Raises CheckpointError for a record of
    the newest that names no iteration, or one that is not there.
    """
    return _iteration(path, step, _is_megatron_lm, f"mp_rank_*/{MODEL_OPTIM_RNG}")


def megatron_core_folder(path: Path, step: int | None = None) -> Path | None:
    """Return the folder of one iteration in megatron-core's format torch_dist; as `megatron_lm_folder` otherwise."""
    return _iteration(path, step, _is_megatron_core, "common.pt, .metadata and .distcp files")


def _iteration(path: Path, step: int | None, is_one: Callable[[Path], bool], files: str) -> Path | None:
    if not path.is_dir():
        return None
    if is_one(path):
        if step is None or path.name == _iteration_folder(step):
            return path
        raise CheckpointError(f"load={path} is one checkpoint; leave ckpt_step out, or give {path.parent}")
    # others keep such a folder beside their own files: NeMo's `weights`
    if not any(is_one(folder) for folder in _folders_in(path) if _ITERATION.fullmatch(folder.name)):
        return None
    name = _newest_iteration(path / TRACKER) if step is None else _iteration_folder(step)
    if not is_one(path / name):
        raise CheckpointError(f"{path / name} is not there, or holds no {files}; copy it, or give another")
    return path / name


def _is_megatron_core(folder: Path) -> bool:
    # .metadata comes last: a save that was killed has none
    return (folder / "common.pt").is_file() and (folder / ".metadata").is_file()


def _is_megatron_lm(folder: Path) -> bool:
    return any(folder.glob(f"mp_rank_*/{MODEL_OPTIM_RNG}"))


def _iteration_folder(step: int) -> str:
    return f"iter_{step:07d}"


def _newest_iteration(tracker: Path) -> str:
    """Return the name of the newest checkpoint's folder. Raises CheckpointError."""
    if not tracker.is_file():
        raise CheckpointError(f"{tracker} is not there, which names the newest; give the folder of an iteration")
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text == "release":
        return text
    if not text.isascii() or not text.isdigit():
        raise CheckpointError(f"{tracker} holds {text[:40]!r}; it must be a number of steps, or release")
    return _iteration_folder(int(text))


def not_deepspeed(path: Path) -> str:
    """Return the fault of a folder that universal_checkpoint names, and in which `deepspeed_folder` finds nothing."""
    if any((folder / MANIFEST).is_file() for folder in [path, *_folders_in(path)]):
        return (
            f"load={path} holds checkpoints of a run, which are resumed on any layout as they are: leave "
            "universal_checkpoint (HL_UNIV_CP) out, which is for DeepSpeed's"
        )
    if is_model(path):
        return f"load={path} holds a model of transformers; leave universal_checkpoint (HL_UNIV_CP) out"
    other = foreign_format(path)
    # a folder within this one may hold DeepSpeed's files; the message below has the remedy for that
    if other is not None and DEEPSPEED.name not in other:
        return other
    return (
        f"{path} holds no DeepSpeed checkpoint: neither zero/<parameter>/fp32.pt nor *_model_states.pt; give the "
        "folder of one step, or one whose `latest_universal` or `latest` names it"
    )


def needless_step(load: str, step: int, what: str) -> str:
    """Return the fault of a step for weights that have none. `what`: the kind of the folder."""
    return (
        f"load={load} is {what}, not the steps of a run of ours: ckpt_step={step} would do nothing; leave it out, or "
        "give the folder of one step"
    )


def _of_file(path: Path) -> str | None:
    with path.open("rb") as file:
        start = file.read(len(GGUF_MAGIC))
    name = "model.gguf" if start == GGUF_MAGIC else path.name  # by its first bytes, whatever its name
    for known in FORMATS:
        if any(len(sign) == 1 and Path(name).match(sign[0]) for sign in known.signs):
            return f"{path} is a file of {known.name}, which cannot be loaded as it is: {known.remedy}"
    return None


def _format_of(folder: Path) -> ForeignFormat | None:
    return next((known for known in FORMATS if _has_signs(folder, known)), None)


def _has_signs(folder: Path, known: ForeignFormat) -> bool:
    def has_all(sign: tuple[str, ...]) -> bool:
        return all(any(folder.glob(pattern)) for pattern in sign)

    return any(map(has_all, known.signs))


def is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MODEL_FILES)


def _folders_in(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    found = (each for each in path.iterdir() if each.is_dir())
    return sorted(islice(found, SEARCHED_FOLDERS))
