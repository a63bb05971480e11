"""Checks before a launch: what a run starts from, and the files, folders, devices and programs that it needs.

They read little, names and JSON files where these suffice, create nothing, and import no torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.checkpoint.folders import (
    MANIFEST,
    CheckpointError,
    checkpoint_folders,
    holds_checkpoints,
    iteration_of,
)
from megatron.checkpoint.foreign import (
    foreign_format,
    megatron_core_folder,
    megatron_lm_folder,
    needless_step,
    not_deepspeed,
)
from megatron.checkpoint.model_options import check_model_options, saved_model_options
from megatron.generation.options import LoadOptions
from megatron.hub.names import snapshot_of
from megatron.launch.addresses import endpoint_fault, is_own, split_endpoint
from megatron.launch.host_environment import CoresError, deepspeed_env_lines, own_sockets, rank_cores
from megatron.launch.plan import FineTuning, LaunchRequest
from megatron.models.rules import upcycle_faults
from megatron.options.config import Config, ConfigError
from megatron.options.training import ParallelConfig
from megatron.parallel.layout import Layout
from megatron.parallel.shards import declared_shards
from megatron.plan.flops import declared_layers
from megatron.runtime.commands import command_name
from megatron.runtime.descriptors import limit_fault
from megatron.runtime.devices import find_device, planned_device
from megatron.runtime.messages import MissingSecretError, run_secret
from megatron.settings.validation import check
from megatron.tasks.registry import load_task
from megatron.training.deepspeed.config import check_deepspeed
from megatron.weights import folder_formats
from megatron.weights.folder_files import missing_base, own_file, read_json
from megatron.weights.folder_formats import DEEPSPEED, HUGGINGFACE, MEGATRON_CORE, MEGATRON_LM, META, NATIVE, PEFT
from megatron.weights.huggingface_config import config_of, other_model, read_config
from megatron.weights.model_folder import base_of_adapters, find_base, nothing_to_load

# the index of several files counts too: what it names is looked for by name
WEIGHTS = ("model*.safetensors*", "pytorch_model*.bin*")
CHECKED_SEQUENCES = 1 << 24
"""Sequences up to which the launch reads the whole index; the ranks do of larger ones."""


def missing_start(config: Config) -> Iterator[str]:
    """Yield a fault if the folder to load holds no weights, unless the run goes on in the folder that it saves to."""
    options, skip_train = config.checkpoint, config.training.skip_train
    load = options.load
    if skip_train:  # an evaluation without `load` measures what the run has saved
        load = load or options.save
    if load is None or not (skip_train or options.needs_start):
        return
    if is_empty(Path(load)) and (skip_train or not _holds_run(options.save)):
        yield nothing_to_load(load, skip_train=skip_train)
        return
    try:
        if HUGGINGFACE.holds(Path(load)) and not _goes_on(config):
            yield from _lacking_weights(Path(load))
    except CheckpointError as error:
        yield str(error)


def check_start(config: Config) -> Iterator[str]:
    """Yield the faults of a folder to load that holds something."""
    options = config.checkpoint
    # an empty folder is `missing_start`'s matter, for a run that needs something in it
    if options.load is None or is_empty(Path(options.load)):
        return
    if _goes_on(config):
        return
    try:
        yield from _faults_in(Path(options.load), config)
    except CheckpointError as error:
        yield str(error)
    except OSError as error:
        yield f"load={options.load} cannot be read: {error.strerror}; change its permissions, or give another"


def _faults_in(folder: Path, config: Config) -> Iterator[str]:
    options = config.checkpoint
    if not folder.is_dir():
        yield foreign_format(folder) or f"load={folder} is not a folder; give the folder of a run's checkpoints"
        return
    if options.universal_checkpoint:
        if not DEEPSPEED.holds(folder):
            yield not_deepspeed(folder)
        return
    known = folder_formats.recognise(folder)
    if known in (HUGGINGFACE, META):
        yield from _check_model(folder, config)
    elif known is PEFT:
        yield from _check_base(folder, config)
    elif known is MEGATRON_LM:
        megatron_lm_folder(folder, options.ckpt_step)
    elif known is MEGATRON_CORE:
        megatron_core_folder(folder, options.ckpt_step)
    # one checkpoint, where the folder of all of them is wanted
    elif (folder / MANIFEST).exists():
        yield f"load={folder} is a checkpoint; give the folder that contains it: {folder.parent}"
    elif not known.holds(folder):
        yield _strange(folder)
    else:
        _check_run(folder, config)
    if known not in (NATIVE, MEGATRON_CORE, MEGATRON_LM) and options.ckpt_step is not None:
        yield needless_step(str(folder), options.ckpt_step, known.title)


def _check_model(folder: Path, config: Config) -> Iterator[str]:
    """Yield the fault of a folder of transformers or Meta that is of another model."""
    content, path = read_config(folder)
    theirs = config_of(content, str(path), architecture=config.model.architecture)
    if config.checkpoint.upcycle:
        yield from (f"load={folder}: {fault}" for fault in upcycle_faults(config, theirs))
        return
    fault = other_model(folder, config, theirs)
    if fault is not None:
        yield fault


def _check_run(folder: Path, config: Config) -> None:
    """Raise CheckpointError for checkpoints of another model; ranks read them whole, and say what is damaged."""
    step = config.checkpoint.ckpt_step
    # newest first, as the ranks choose
    chosen = next((path for path in checkpoint_folders(folder) if step in (None, iteration_of(path.name))), None)
    if chosen is None:
        return
    saved = saved_model_options(chosen)
    # experts start from another model, which the ranks compare
    if saved is not None and not config.checkpoint.upcycle:
        check_model_options(chosen, *saved, config)


def _lacking_weights(folder: Path) -> Iterator[str]:
    """Yield which files of weights a folder of transformers lacks, by their names; the hub's are downloaded later."""
    if snapshot_of(folder) is not None:
        return
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        yield foreign_format(folder) or f"{folder} holds config.json, but no weights; copy the whole folder"
    for index in sorted(folder.glob("*.index.json")):
        files = read_json(index).get("weight_map")
        # the index has a row for each tensor, and few files hold them all
        names = sorted(set(map(str, files.values()))) if isinstance(files, dict) else []
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            yield f"{folder} lacks {missing[0]} ({len(missing)} of {len(names)} files that {index.name} names); copy it"


def _check_base(folder: Path, config: Config) -> Iterator[str]:
    """Yield the faults of the base model of adapters in PEFT's format."""
    theirs = read_json(own_file(folder, "adapter_config.json"))
    base = find_base(folder, *base_of_adapters(theirs), config.lora.lora_base, download=True)
    if not base.is_dir():
        yield missing_base(folder, str(base))
    elif HUGGINGFACE.holds(base) or META.holds(base):
        yield from _check_model(base, config)


def _strange(folder: Path) -> str:
    """Return the fault of a folder in which no checkpoint is known."""
    inner = folder / "checkpoints"  # where the scripts save, in the folder of a run's results
    if (inner / "latest").is_file():
        return f"load={folder} holds no checkpoint itself; give {inner}"
    return foreign_format(folder) or f"load={folder} holds no checkpoint, yet is not empty; give another, or empty it"


def _goes_on(config: Config) -> bool:
    """Return True if the run has begun: it reads `load` no more."""
    return config.checkpoint.loads_elsewhere and _holds_run(config.checkpoint.save)


def _holds_run(folder: str | None) -> bool:
    return folder is not None and holds_checkpoints(Path(folder))


def is_empty(folder: Path) -> bool:
    """Return True if nothing is there; a run that was killed before its first checkpoint leaves its hidden lock."""
    if not os.path.lexists(folder):
        return True
    return folder.is_dir() and all(path.name.startswith(".") for path in folder.iterdir())


def warn_of_new_tokens(config: Config, vocab_size: int) -> Iterator[str]:
    """Yield that adapters leave the rows of added tokens as they start, all alike. `vocab_size`: with those tokens."""
    added = vocab_size - config.model.vocab_size
    if added <= 0 or config.lora.lora_rank is None:
        return
    shards = declared_shards(declared_layers(config))
    # tied embeddings have no output of their own
    modules = [name for name in ("embedding.word", "output") if f"{name}.weight" in shards]
    trained = {name.rpartition(".")[0] for name, shard in shards.items() if shard.trained}
    frozen = [name for name in modules if name not in trained]
    if frozen:
        yield (
            f"the chat template adds {added} tokens, whose rows of {' and '.join(frozen)} start alike and are frozen: "
            "the model cannot distinguish them; train these modules with --lora-modules-to-save "
            f"{' '.join(modules)}, or choose a template without new tokens"
        )


def check_restarts(request: LaunchRequest, config: Config) -> Iterator[str]:
    """Yield what prevents a restart, and the rendezvous of nodes with which it begins."""
    if request.max_restarts and config.checkpoint.save is None:
        yield (
            f"max_restarts={request.max_restarts}: a restart resumes the newest checkpoint, but none are saved; "
            "give --save (HL_SAVE=1), or no HL_MAX_RESTARTS (--max-restarts)"
        )
    interval = config.checkpoint.peer_copy_interval
    if interval is not None and not request.max_restarts:
        yield f"peer_copy_interval={interval}: a restart alone reads copies; set HL_MAX_RESTARTS (--max-restarts) too"
    if config.checkpoint.keep_healthy_ranks and not request.max_restarts:
        yield "keep_healthy_ranks: ranks stay for a restart alone; set HL_MAX_RESTARTS (--max-restarts) too"
    yield from _check_spare_hosts(request)
    if request.rendezvous is not None:
        fault = endpoint_fault(request.rendezvous)
        if fault:
            yield f"rendezvous={request.rendezvous}: {fault}"
        if request.nodes > 1 and not request.dry_run:
            try:
                run_secret()
            except MissingSecretError as error:
                yield str(error)


def check_fewer_nodes(request: LaunchRequest, config: Config, devices_per_node: int) -> Iterator[str]:
    """Yield what prevents the run from continuing with every smaller number of nodes that it may be left with."""
    fewest = request.min_nodes or request.nodes
    if fewest > request.nodes:
        yield f"min_nodes={fewest} is more than the {request.nodes} nodes of the run; set HL_MIN_NODES lower"
    if fewest < request.nodes and not request.max_restarts:
        yield f"min_nodes={fewest}: continuing with fewer nodes is a restart; set HL_MAX_RESTARTS (--max-restarts) too"
    # what is wrong with all nodes is reported as such, and not once more for each smaller number
    known = set(check(config, request.nodes * devices_per_node))
    # from the most nodes down, so that a fault is reported with the largest number that has it
    for nodes in range(request.nodes - 1, fewest - 1, -1):
        world_size = nodes * devices_per_node
        for fault in [*check(config, world_size), *check_deepspeed(config, world_size)]:
            if fault not in known:
                known.add(fault)
                yield (
                    f"with {nodes} of {request.nodes} nodes the run could not continue: {fault}; or set HL_MIN_NODES "
                    f"(--min-nodes) to {nodes + 1} or more"
                )


def _check_spare_hosts(request: LaunchRequest) -> Iterator[str]:
    name = f"spare_hosts={request.spare_hosts}"
    if request.spare_hosts and not request.max_restarts:
        yield f"{name}: to take a host's place is a restart; set HL_MAX_RESTARTS (--max-restarts) too"
    if request.spare_hosts and request.hostsfile is None and "hostsfile" not in request.unread:
        yield f"{name} are the last hosts of a hostsfile, but there is none; give HL_HOSTSFILE (--hostsfile)"
    if request.spare_hosts and request.nodes == 1 and "nodes" not in request.unread:
        yield (
            f"{name}: the first host cannot be replaced, and the run has no other; set HL_NUM_NODES (--nodes) higher, "
            "or HL_SPARE_HOSTS (--spare-hosts) to 0"
        )


def warn_of_rendezvous(request: LaunchRequest) -> Iterator[str]:
    """Yield a warning if every node would take itself for the first one."""
    endpoint = request.rendezvous
    if request.nodes > 1 and endpoint and not endpoint_fault(endpoint) and is_own(split_endpoint(endpoint)[0]):
        yield (
            f"rendezvous={endpoint} is another machine on every node; the agents find each other only if all run "
            "on this one. Otherwise give the address of the first node that the others reach"
        )


def warn_of_spare_hosts(request: LaunchRequest) -> Iterator[str]:
    """Yield a warning if a run ends before a host can have failed twice."""
    if request.spare_hosts and request.max_restarts == 1:
        yield (
            f"spare_hosts={request.spare_hosts} with max_restarts=1: a spare host takes the place of one that is lost, "
            "but not of one that fails, which needs two restarts; set HL_MAX_RESTARTS (--max-restarts) to 2 or more"
        )


def check_layout(
    request: LaunchRequest, parallel: ParallelConfig | LoadOptions, devices_per_node: int
) -> Iterator[str]:
    """Yield a fault unless the parallel sizes fill the devices."""
    layout = Layout.of(parallel)
    data, devices = request.data_parallel_size or 1, request.nodes * devices_per_node
    model, ranks = layout.model_size, data * layout.model_size
    if ranks == devices:
        return
    remedy = "change the layout"
    if devices % model == 0:
        remedy = f"use a data-parallel size of {devices // model}"
    if ranks % request.nodes == 0:
        remedy += f", or {ranks // request.nodes} devices a node (HL_NGPU_PER_NODE, --devices-per-node)"
    sizes = {"data": data, "tensor": layout.tensor_size, "context": layout.context_size, "pipeline": layout.num_stages}
    if layout.context_size == 1:
        del sizes["context"]
    product = " x ".join(f"{axis}-parallel {size}" for axis, size in sizes.items())
    yield (
        f"{product} = {ranks} ranks, but nodes x devices = {request.nodes} x {devices_per_node} = {devices}; {remedy}"
    )


def check_data_files(config: Config) -> Iterator[str]:
    """Yield missing and unreadable files of the dataset and the tokenizer."""
    data = config.data
    tool = "preprocess_data"
    with contextlib.suppress(ConfigError):  # the rules of the config report a task that there is not
        tool = load_task(config).data.preprocessor
    with contextlib.suppress(ValueError):  # and paths
        for prefix in data.prefixes:
            missing = list(_check_dataset(prefix, command_name(tool)))
            yield from missing or _check_content(prefix, config.model.vocab_size)
    for option in ("vocab_file", "merge_file", "tokenizer_model"):
        path = getattr(data, option)
        if path is not None and not Path(path).exists():
            yield f"{option}={path} does not exist; correct the path"


def _check_dataset(prefix: str, tool: str) -> Iterator[str]:
    if prefix.endswith((".bin", ".idx")) and not Path(prefix + ".idx").exists():
        yield f"data_path={prefix} is a file; give the prefix that .bin and .idx share, {prefix[:-4]}"
        return
    # a missing, an empty and an unreadable file have a remedy each
    files = [Path(prefix + ending) for ending in (".bin", ".idx")]
    missing = [str(path) for path in files if not path.is_file()]
    empty = [str(path) for path in files if path.is_file() and path.stat().st_size == 0]
    unreadable = [str(path) for path in files if path.is_file() and not os.access(path, os.R_OK)]
    if missing:
        yield (
            f"dataset {prefix} lacks {' and '.join(missing)}; make it with {tool}, or "
            "correct HL_DATA_DIR_ROOT and HL_DATA_FILE_PREFIX (--data-path)"
        )
    if empty:
        yield f"dataset {prefix}: {' and '.join(empty)} is empty; preprocess it again"
    if unreadable:
        yield f"dataset {prefix}: {' and '.join(unreadable)} may not be read; change its permissions"


def _check_content(prefix: str, vocab_size: int) -> Iterator[str]:
    """Yield damage of a dataset's index, and ids outside the vocabulary in parts of it, as each rank would."""
    # late: numpy is not needed else
    from megatron.data.index.indexed import DataError, IndexedDataset, check_vocabulary
    from megatron.data.index.verification import Findings, verify_index

    try:
        data = IndexedDataset(prefix)
        findings = Findings()
        if len(data) <= CHECKED_SEQUENCES:
            verify_index(data, findings)
        for messages in findings.shown.values():
            yield f"{prefix}.idx is damaged: {messages[0]}; copy it again"
        check_vocabulary(data, vocab_size)
    except DataError as error:
        yield str(error)


def check_template(given: FineTuning) -> Iterator[str]:
    """Yield why a chat template that was named cannot be read."""
    if given.data is None or given.chat_template is None:
        return
    from megatron.data.chat.template import find_template  # late: it needs numpy
    from megatron.data.index.indexed import DataError

    try:
        find_template(given.chat_template, Path(given.model))
    except DataError as error:
        yield str(error)


def check_outputs(config: Config) -> Iterator[str]:
    """Yield the folders that the run could not create or write to."""
    folders = {
        "results_dir": config.logging.results_dir,
        "tensorboard_dir": config.logging.tensorboard_dir,
        "wandb_save_dir": config.logging.wandb_save_dir,
        "save": config.checkpoint.save,
        "save_hf": config.checkpoint.save_hf,
    }
    cache = config.data.data_cache_path
    if cache is not None and not Path(cache).is_dir():  # an existing one may hold all that is needed
        folders["data_cache_path"] = cache
    # several options may lead to one folder, whose fault is one
    checked: set[Path] = set()
    for option, folder in folders.items():
        if folder is None:
            continue
        # a folder that is not there is made by the run, so the nearest one that exists must take it
        existing = Path(folder).absolute()
        while not os.path.lexists(existing) and existing != existing.parent:
            existing = existing.parent
        if existing in checked:
            continue
        checked.add(existing)
        if not existing.is_dir():
            yield f"{option}={folder} cannot be created: {existing} is not a folder; choose another, or remove it"
            continue
        why = _refuses_files(existing)
        if why:
            yield f"{option}={folder} cannot be written: {existing}: {why}; choose another, or change that"


def _refuses_files(folder: Path) -> str | None:
    """Return why no file can be made in a folder; None: one can. Permissions are no proof in /proc, nor for root."""
    try:
        with tempfile.TemporaryFile(dir=folder):  # without a name where the file system can
            return None
    except OSError as error:
        return os.strerror(error.errno or 0)


def check_local_devices(device: str, devices_per_node: int) -> Iterator[str]:
    """Yield a fault if this machine has fewer accelerators than its ranks need."""
    if device == "auto":
        return
    record = find_device(device)
    if record.count is None:
        return
    available = record.count()
    needed = f"{devices_per_node} {device} devices are needed, but"
    visible, layout = record.visible_variable, "HL_NGPU_PER_NODE (--devices-per-node)"
    # the variable first: the machine may have enough devices, which it hides
    if available < devices_per_node and os.environ.get(visible):
        yield (
            f"{needed} {visible}={os.environ[visible]} leaves {available} of this machine's; list more, or set "
            f"{layout} lower, and the layout"
        )
    elif available == 0:
        seen = f"{record.driver_tool} lists those that its driver sees"
        yield f"{needed} this machine has 0; {seen}. Or set HL_DEVICE=cpu"
    elif available < devices_per_node:
        yield (
            f"{needed} this machine has {available}; set {layout} and the layout to {available} at most, or "
            "HL_DEVICE=cpu"
        )
    else:
        yield from record.check_ranks(devices_per_node)


def check_plugin(device: str, activate: str | None) -> Iterator[str]:
    """Yield a fault if this machine has devices without their software, unless an environment is activated first."""
    # the environment that is activated may bring what this one lacks
    if device == "auto" or activate:
        return
    missing = find_device(device).missing_software()
    if missing:
        yield f"device {device} is not there: {missing}; or use HL_DEVICE=cpu (--device cpu)"


def check_cores(ranks: int, cores_per_rank: int, ranks_per_socket: int) -> Iterator[str]:
    """Yield a fault if this machine has too few cores to bind its ranks to."""
    if cores_per_rank:
        try:
            rank_cores(ranks, cores_per_rank, ranks_per_socket, own_sockets())
        except CoresError as error:
            yield str(error)


def check_precision(device: str, precision: str) -> Iterator[str]:
    """Yield a fault if the CPU of this machine cannot train in fp16; accelerators say so themselves."""
    if device != "auto" and precision == "fp16" and "fp16" in find_device(device).widened():
        yield "fp16 is not supported on this CPU; train in bf16 or float32, or on another device"


def check_descriptors(config: Config, device: str, world_size: int) -> Iterator[str]:
    """Yield a fault if the ranks of this machine may not open all their files and sockets."""
    with contextlib.suppress(ValueError):  # the rules of the config report it
        fault = limit_fault(planned_device(device), world_size, len(config.data.prefixes))
        if fault:
            yield fault


def check_remote(words: Sequence[str], request: LaunchRequest) -> Iterator[str]:
    """Yield what keeps the launcher from reaching other machines."""
    programs, name = ["ssh"], "mpirun"
    if request.launcher == "pdsh":
        programs, name = ["pdsh", "ssh"], "DeepSpeed's launcher"
    for program in programs:
        if shutil.which(program) is None:
            yield f"{program} is not installed; {name} needs it for the hosts of {request.hostsfile}"
    for word in words:
        # pdsh puts its own values in place of %h, %n and %u
        if request.launcher == "pdsh" and ("%" in word or "\n" in word):
            yield f"{word!r} holds a % or a line end, which pdsh would change on its way to the hosts; write it without"
    # DeepSpeed's launcher splits each line at its =, an empty one too, and ends by a ValueError without one
    for path, number, line in deepspeed_env_lines():
        if "=" not in line:
            yield f"{path}, line {number}: {line!r} is not NAME=VALUE, which DeepSpeed's launcher needs; remove it"
