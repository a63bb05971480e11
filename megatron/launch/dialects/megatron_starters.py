"""A command that starts Megatron's pretrain_gpt.py on ranks: the script's own words, and the ranks that it requests.

deepspeed, torchrun, python -m torch.distributed.run, mpirun, srun and python itself are read; nothing is run.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.launch.host_environment import sent_variables
from megatron.launch.shell.script import ShellCommand, ShellScript, read_script
from megatron.launch.shell.values import ShellValues

SCRIPTS = ("pretrain_gpt.py", "pretrain_llama.py", "pretrain_mamba.py", "pretrain_bert.py", "pretrain_t5.py")
READ = ("pretrain_gpt.py", "pretrain_llama.py")
"""Scripts of Megatron that train decoders of text."""
PYTHON = re.compile(r"python[\d.]*")
VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


@dataclass
class Started:
    """A training command of Megatron's."""

    script: str = ""
    words: list[str] = field(default_factory=list)
    """Behind the script's name."""
    line: int = 1
    nodes: int | None = None
    devices_per_node: int | None = None
    ranks: int | None = None
    """All of them, where the nodes are not known."""
    hostsfile: str | None = None
    master: str | None = None
    master_port: int | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """Variables that stand in front of a command."""
    idle: list[tuple[str, str]] = field(default_factory=list)
    """Words of the starter without effect here, and why."""
    faults: list[tuple[str, str]] = field(default_factory=list)
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that the script would write, by path."""
    notes: list[str] = field(default_factory=list)


class StartError(ValueError):
    """There is no training command, or several."""


def read_started(words: Sequence[str], environment: Mapping[str, str]) -> Started:
    """Return the training command in the words of one, or in the shell script that they name.

    Raises ShellError or StartError.
    """
    first = words[0]
    # by its name, or by its first line
    if first.endswith((".sh", ".slurm", ".sbatch", ".bash")) or _is_shell_script(first):
        try:
            text = Path(first).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not a text"
            raise StartError(f"{first} cannot be read: {reason}") from None
        script = read_script(text, words[1:], environment, first)
    else:
        # the shell of the user has expanded them already
        script = read_script(shlex.join(words), [], environment, first)
    return _training_command(script, first)


def _is_shell_script(name: str) -> bool:
    path = Path(name)
    if not path.is_file() or name.endswith(".py"):
        return False
    with path.open("rb") as file:
        return re.match(rb"#!.*\b(ba|z|da)?sh\b", file.readline(200)) is not None


def _training_command(script: ShellScript, source: str) -> Started:
    values = script.values
    found = [started for started in map(_peeled, script.commands) if started is not None]
    if not found:
        run = ", ".join(dict.fromkeys(values.readable(each.words[0]) for each in script.commands)) or "none"
        raise StartError(
            f"{source} starts none of {', '.join(READ)}; its commands are: {run}. Give the script that calls it, or "
            "the command itself"
        )
    # a sweep: which one is meant is not to be guessed
    if len(found) > 1:
        lines = ", ".join(str(each.line) for each in found)
        raise StartError(f"{source} starts a training in lines {lines}; give one of these commands")
    started = found[0]
    started.files = script.files
    _take_exported(started, script)
    if Path(started.script).name not in READ:
        raise StartError(f"{started.script} does not train a decoder of text; translated are {', '.join(READ)}")
    for name, texts in (("is not set, and counts as empty", sorted(values.unset)), ("is not read", script.not_read)):
        started.notes += [f"{values.readable(text)} {name}" for text in texts]
    _name_unknown(started, values)
    return started


def _take_exported(started: Started, script: ShellScript) -> None:
    """Keep the variables of devices and libraries that the script exports; name the others."""
    values = script.values
    exported = {name: values.variables.get(name, "") for name in sorted(script.exported)}
    texts = {name: value for name, value in exported.items() if isinstance(value, str) and values.is_known(value)}
    sent = sent_variables(texts)
    # those in front of the command count
    started.variables = sent | started.variables
    left = [name for name in exported if name not in sent]
    if left:
        started.notes.append(f"{', '.join(left)}: exported by the script; ranks get what --env gives")


def _name_unknown(started: Started, values: ShellValues) -> None:
    """Write unknown values as in the script; one that a flag needs is a fault."""
    flag_of = started.script
    for number, word in enumerate(started.words):
        if word.startswith("--"):
            flag_of = word.partition("=")[0]
        if not values.is_known(word):
            started.words[number] = values.readable(word)
            started.faults.append((flag_of, f"{values.readable(word)} is known only when it runs; write the value"))
    for name in ("master", "hostsfile"):
        text = getattr(started, name)
        if text is not None and not values.is_known(text):
            setattr(started, name, None)
            # the hostsfile's first line says the same
            if name != "master" or started.hostsfile is None:
                started.faults.append((name, f"{values.readable(text)} is known only when it runs; write the value"))


def _peeled(command: ShellCommand) -> Started | None:
    """Return the training command in a command, without what starts it; None for any other."""
    started, rest = Started(line=command.line), list(command.words)
    while rest:
        word = rest.pop(0)
        match = VARIABLE.fullmatch(word)
        name = os.path.basename(word)
        if match:
            started.variables[match[1]] = match[2]
        elif name in SCRIPTS:
            started.script, started.words = word, rest
            return started
        elif name == "deepspeed":
            _read(rest, DEEPSPEED, started, name)
        elif name in TORCHRUN:
            _read(rest, TORCH, started, name)
        elif PYTHON.fullmatch(name):
            _skip_python(rest)
        elif name in ("mpirun", "mpiexec", "srun"):
            _read(rest, MPI if name != "srun" else SRUN, started, name)
        elif name in PREFIXES:
            _skip_prefix(rest, PREFIXES[name])
        # another program, which may have words that look alike
        elif name.endswith(".py") or not _starts_something(rest):
            return None
    return None


PREFIXES = {"nohup": 0, "exec": 0, "time": 0, "env": 0, "numactl": 0, "nice": 0, "timeout": 1}
"""Commands that start another one, and the words without a dash before it."""


def _starts_something(rest: Sequence[str]) -> bool:
    return any(os.path.basename(word) in SCRIPTS for word in rest)


def _skip_prefix(rest: list[str], count: int) -> None:
    while rest and rest[0].startswith("-"):
        rest.pop(0)
    del rest[:count]


def _skip_python(rest: list[str]) -> None:
    """Remove python's own flags; a module that starts ranks stays."""
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        # the module is the next word
        if word == "-m":
            return
        if word in ("-W", "-X"):
            del rest[:1]


def _number(name: str) -> Callable[[Started, str], None]:
    def read(started: Started, text: str) -> None:
        if re.fullmatch(r"\d+", text) and int(text):
            setattr(started, name, int(text))
        else:
            started.faults.append((name, f"{text} must be a whole number, 1 or more"))

    return read


def _text(name: str) -> Callable[[Started, str], None]:
    return lambda started, text: setattr(started, name, text)


def _nodes(started: Started, text: str) -> None:
    # torchrun's elastic MIN:MAX
    # the launcher begins with all nodes
    least, colon, most = text.partition(":")
    _number("nodes")(started, most if colon else least)
    if colon and least != most:
        started.idle.append((f"--nnodes {text}", "--min-nodes of megatron-launch lets a run go on with fewer nodes"))


def _endpoint(started: Started, text: str) -> None:
    # HOST:PORT
    host, _, port = text.rpartition(":")
    started.master = host or text
    if port.isdecimal():
        started.master_port = int(port)


def _refused(reason: str) -> Callable[[Started, str], None]:
    return lambda started, text: started.faults.append((text, reason))


@dataclass(frozen=True)
class _Starter:
    """Flags of a program that starts ranks."""

    values: Mapping[str, Callable[[Started, str], None] | str]
    """Flags with a value: what reads it, or why it has no effect."""
    switches: Mapping[str, str]
    """Flags without a value, and why they have no effect."""


_RANKS = "this project's agents start the ranks"
_NODE = "the launcher knows the node it runs on"
DEEPSPEED = _Starter(
    {
        "--num_nodes": _number("nodes"),
        "--num_gpus": _number("devices_per_node"),
        "--num_accelerators": _number("devices_per_node"),
        "--hostfile": _text("hostsfile"),
        "-H": _text("hostsfile"),
        "--master_addr": _text("master"),
        "--master_port": _number("master_port"),
        "--node_rank": _NODE,
        "--launcher": "--launcher of megatron-launch is pdsh or mpirun",
        "--launcher_args": _RANKS,
        "--include": _refused("write a hostsfile with these hosts, or set HABANA_VISIBLE_MODULES"),
        "-i": _refused("write a hostsfile with these hosts, or set HABANA_VISIBLE_MODULES"),
        "--exclude": _refused("write a hostsfile without these hosts"),
        "-e": _refused("write a hostsfile without these hosts"),
        "--bind_core_list": "--cores-per-rank of megatron-launch binds ranks",
    },
    {
        "--no_local_rank": _RANKS,
        "--no_python": _RANKS,
        "--module": _RANKS,
        "--force_multi": _RANKS,
        "--no_ssh": _RANKS,
        "--bind_cores_to_rank": "--cores-per-rank of megatron-launch binds ranks",
    },
)
TORCH = _Starter(
    {
        "--nproc_per_node": _number("devices_per_node"),
        "--nnodes": _nodes,
        "--master_addr": _text("master"),
        "--master_port": _number("master_port"),
        "--rdzv_endpoint": _endpoint,
        "--node_rank": _NODE,
        "--rdzv_id": _RANKS,
        "--rdzv_backend": _RANKS,
        "--rdzv_conf": _RANKS,
        "--max_restarts": "--max-restarts of megatron-launch restarts from the newest checkpoint",
        "--log_dir": "every rank writes to the folder of results",
        "--tee": _RANKS,
        "--redirects": _RANKS,
        "--start_method": _RANKS,
        "--monitor_interval": _RANKS,
        "--role": _RANKS,
    },
    {"--standalone": _RANKS, "--use_env": _RANKS, "--no_python": _RANKS, "--module": _RANKS, "-m": _RANKS},
)
MPI = _Starter(
    {
        "-n": _number("ranks"),
        "-np": _number("ranks"),
        "--hostfile": _text("hostsfile"),
        "--bind-to": "--cores-per-rank of megatron-launch binds ranks",
        "--map-by": _RANKS,
        "--rank-by": _RANKS,
        "--report-bindings": _RANKS,
        "-x": "variables of devices and libraries go to every host; others stand in .deepspeed_env",
        "--mca": _RANKS,
    },
    {"--allow-run-as-root": _RANKS, "--tag-output": _RANKS, "--oversubscribe": _RANKS, "--use-hwthread-cpus": _RANKS},
)
SRUN = _Starter(
    {
        "-n": _number("ranks"),
        "--ntasks": _number("ranks"),
        "-N": _number("nodes"),
        "--nodes": _number("nodes"),
        "--ntasks-per-node": _number("devices_per_node"),
        "--jobid": _RANKS,
        "--container-image": _RANKS,
        "--container-mounts": _RANKS,
        "-l": _RANKS,
        "-o": _RANKS,
        "--output": _RANKS,
        "--kill-on-bad-exit": _RANKS,
    },
    {"--verbose": _RANKS, "-v": _RANKS, "--label": _RANKS},
)
TWO_VALUES = ("--mca",)


def _read(rest: list[str], starter: _Starter, started: Started, program: str) -> None:
    """Read and remove the flags of a program that starts ranks."""
    # torchrun takes both spellings
    known = {spelled: name for name in (*starter.values, *starter.switches) for spelled in _spellings(name)}
    while rest and rest[0].startswith("-"):
        word, equals, joined = rest.pop(0).partition("=")
        name = known.get(word)
        if name is None:
            started.faults.append((word, f"no flag of {program} that is known here; remove it"))
        elif name in starter.switches:
            started.idle.append((f"{program} {word}", starter.switches[name]))
        else:
            count = 0 if equals else 2 if name in TWO_VALUES else 1
            text = joined if equals else " ".join(rest[:count])
            del rest[:count]
            _take(starter.values[name], f"{program} {word} {text}", text, started)


def _spellings(name: str) -> tuple[str, str, str]:
    # one dash or two
    bare = name.lstrip("-")
    dashes = name.removesuffix(bare)
    return name, dashes + bare.replace("_", "-"), dashes + bare.replace("-", "_")


def _take(action: Callable[[Started, str], None] | str, given: str, text: str, started: Started) -> None:
    if isinstance(action, str):
        started.idle.append((given, action))
    else:
        action(started, text)
