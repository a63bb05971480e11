"""A run by InstructLab's arguments: validated, its data processed, and its ranks started on this node."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from megatron.data.index.indexed import DataError
from megatron.launch.checks import warn_of_new_tokens
from megatron.launch.instructlab import data_process, legacy_template
from megatron.launch.instructlab.arguments import TorchrunArgs, TrainingArgs
from megatron.launch.instructlab.data_process import Samples
from megatron.launch.instructlab.launch import agent_command, environment_of_ranks, run_to_the_end
from megatron.launch.instructlab.mapping import RunInputs, build_config, refusals, remarks, write_callbacks
from megatron.launch.plan import FineTuning
from megatron.observability.trackers.tracker_log import tracker_faults
from megatron.options.config import Config, ConfigError
from megatron.options.stored import to_yaml
from megatron.runtime.devices import detect_device, find_device
from megatron.runtime.files import replacing
from megatron.weights.huggingface_config import preset_of
from megatron.weights.model_folder import find_model

logger = logging.getLogger("megatron.api")
Given = TypeVar("Given")


def run_training(
    torch_args: TorchrunArgs | None = None,
    train_args: TrainingArgs | None = None,
    *,
    torchrun_args: TorchrunArgs | None = None,
    training_args: TrainingArgs | None = None,
) -> None:
    """Process the data, and train to the end with the ranks of this node.

    On several nodes, call it on each with its own node_rank. Called again with the same folders it resumes from the
    newest checkpoint, whole unless accelerate_full_state_at_epoch is off. `torchrun_args` and `training_args` are
    other names of the two, as InstructLab's README has them.

    Raises ConfigError (a ValueError) with every fault of the arguments, DataError for the data,
    CheckpointError for the model, RuntimeError with the exit status of a failed training.
    """
    torch_args = _one_of("torch_args", torch_args, "torchrun_args", torchrun_args)
    train_args = _one_of("train_args", train_args, "training_args", training_args)
    data_process.set_up_logging(train_args.log_level)
    device = str(train_args.engine_options.get("device") or detect_device())
    ranks_per_node = ranks_per_node_of(torch_args, device)
    config = prepare(torch_args, train_args, device, ranks_per_node)
    folder = Path(train_args.ckpt_output_dir)
    config_file = folder / "run_training.yaml"
    with replacing(config_file) as file:
        file.write(to_yaml(config).encode())
    command = agent_command(torch_args, ranks_per_node, ["--config", str(config_file)])
    logger.info("starting %s", " ".join(command))
    log = folder / f"full_logs_global{torch_args.node_rank}.log"
    run_to_the_end(command, environment_of_ranks(device, ranks_per_node), log)


def _one_of(name: str, value: Given | None, other_name: str, other: Given | None) -> Given:
    if (value is None) == (other is None):
        raise TypeError(f"run_training takes {name} or, by its other name, {other_name}; give one of them")
    return value if value is not None else other  # type: ignore[return-value]


def ranks_per_node_of(torch_args: TorchrunArgs, device: str) -> int:
    if torch_args.nproc_per_node != "gpu":
        return torch_args.nproc_per_node
    count = find_device(device).count
    return 1 if count is None else count()


def prepare(torch_args: TorchrunArgs, args: TrainingArgs, device: str, ranks_per_node: int) -> Config:
    """Validate the arguments, process the data, and return the config of the run."""
    faults = list(refusals(torch_args, args))
    model_folder = find_model(args.model_path, "model_path")
    inputs = RunInputs(
        device=device,
        num_ranks=torch_args.nnodes * ranks_per_node,
        num_nodes=torch_args.nnodes,
        model=preset_of(model_folder)["model"],
        model_folder=str(model_folder),
        data_path=("DATASET",),
        num_samples=None,
        tokenizer=None,
    )
    folders: list[tuple[str, str]] = []
    try:
        folders = data_process.output_folders(args.data_path, args.data_output_dir)
    except DataError as error:
        faults.append(str(error))
    try:
        faults += tracker_faults(build_config(args, inputs))
    except ConfigError as error:
        faults += error.faults
    if faults:
        raise ConfigError(faults)
    _make_folder(Path(args.ckpt_output_dir))
    callbacks = write_callbacks(args.callbacks or (), Path(args.ckpt_output_dir))
    samples = _process(args, folders, model_folder, inputs.model["vocab_size"])
    vocab_size = max(inputs.model["vocab_size"], *(each.vocab_size or 0 for each in samples))
    for warning in warn_of_new_tokens(build_config(args, inputs), vocab_size):
        logger.warning("%s", warning)
    inputs = dataclasses.replace(
        inputs,
        model=preset_of(model_folder, vocab_size)["model"],
        data_path=tuple(FineTuning.of("", args.data_path, "").data_path(Path(args.data_output_dir))),
        num_samples=sum(each.num_samples for each in samples),
        tokenizer=next((each.tokenizer for each in samples if each.tokenizer is not None), None),
        callbacks=callbacks,
    )
    config = build_config(args, inputs)
    for remark in remarks(args, inputs, config):
        logger.info("%s", remark)
    return config


def count_samples(args: TrainingArgs) -> int:
    """Process the data of a run, as run_training does once, and return the number of its samples."""
    model_folder = find_model(args.model_path, "model_path")
    folders = data_process.output_folders(args.data_path, args.data_output_dir)
    vocab_size = preset_of(model_folder)["model"]["vocab_size"]
    return sum(each.num_samples for each in _process(args, folders, model_folder, vocab_size))


def _process(
    args: TrainingArgs, folders: Sequence[tuple[str, str]], model_folder: Path, vocab_size: int
) -> list[Samples]:
    return [_samples(args, file, folder, model_folder, vocab_size) for file, folder in folders]


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"ckpt_output_dir={folder} cannot be created: {error.strerror}; choose another"]) from None


def _samples(args: TrainingArgs, file: str, output: str, model_folder: Path, vocab_size: int) -> Samples:
    """Return the dataset of a file, which is made first unless process_data is off."""
    folder = Path(output)
    if args.mock_data:
        num_samples = data_process.MOCK_STEPS * args.effective_batch_size
        longest = args.mock_data_len or args.max_seq_len
        return data_process.make_mock_data(folder, num_samples, longest, vocab_size, args.random_seed)
    if not args.process_data:
        samples = data_process.open_samples(folder)
        longest = args.pretraining_config.block_size if args.pretraining_config else args.max_seq_len
        if samples.longest > longest:
            raise DataError(
                f"{samples.prefix} holds a sample of {samples.longest} tokens, above max_seq_len={longest}; raise it, "
                "or process the data again"
            )
        return samples
    if args.pretraining_config is not None:
        block_size, column = args.pretraining_config.block_size, args.pretraining_config.document_column_name
        return data_process.process_documents(file, str(folder), str(model_folder), block_size, column)
    legacy = legacy_template.__file__ if args.use_legacy_tmpl else None
    return data_process.process_data(
        data_path=file,
        data_output_path=str(folder),
        max_seq_len=args.max_seq_len,
        model_path=str(model_folder),
        num_cpu_procs=args.data_process_num_cpu_procs,
        chat_tmpl_path=args.chat_tmpl_path or legacy,
    )
