"""Commands of optimum-habana's gaudi_spawn.py: the same flags and scripts, run by this project.

    python -m megatron.gaudi_spawn --world_size 8 --use_deepspeed sft.py --model_name_or_path models/llama ...
    python -m megatron.gaudi_spawn merge_peft_adapter.py --base_model_name models/llama --adapter_model_name sft ...
    python -m megatron.gaudi_spawn --world_size 8 run_generation.py --model_name_or_path merged --prompt "..."
    python -m megatron.gaudi_spawn --world_size 7 --use_deepspeed finetune.py --config-name=finetune_lora.yaml

The scripts need not be there: their names choose what runs. One with code of its own is refused, but for a trainer's
loss, which `-- --trainer FILE.py:Class` trains.
docs/reference/gaudi_spawn_flags.md lists every flag.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.cli.command import command
from megatron.cli.generate import GENERATE
from megatron.cli.launch import run_request
from megatron.cli.merging import merge_peft_adapter
from megatron.launch.dialects import spawn_requests
from megatron.launch.dialects.hl_requests import inference_request, legend
from megatron.launch.dialects.published_scripts import check_script
from megatron.launch.dialects.script_code import read_code
from megatron.launch.dialects.spawn_flags import GENERATION, TABLES
from megatron.launch.dialects.spawn_generation import generation_request
from megatron.launch.inference import refused
from megatron.launch.plan import read_hostsfile
from megatron.options.dialect import flag_words, nearest, suggestion
from megatron.options.flags import flag
from megatron.runtime.commands import DONE, folded, for_stderr
from megatron.runtime.devices import detect_device, device_fault, find_device

GUIDE = "docs/guides/own_loss.md"
MARK_STEPS = "DEEPSPEED_HPU_ZERO3_SYNC_MARK_STEP_REQUIRED"
SCRIPTS = {
    "sft": "fine-tune on chats or questions and answers, with adapters (LoRA) unless --use_peft False",
    "dpo": "train adapters on pairs of answers (DPO)",
    "merge_peft_adapter": "merge an adapter into its base, in one process",
    "run_generation": "continue prompts; all ranks share each layer (tensor parallel)",
    "finetune": "fine-tune as a finetune_lora.yaml says",
}
FLAGS = TABLES | {"run_generation": GENERATION}
OTHERS = {
    "run_lora_clm": "sft.py, with its flags",
    "run_clm": "scripts/run_llama.sh, on an indexed dataset",
    "run_lm_eval": "scripts/evaluate.sh",
}
"""Further scripts of optimum-habana, and what is used instead."""
OWN = {
    "--world_size": ("N", "ranks, on all hosts together (default: 1, with a hostfile all of its slots)"),
    "--hostfile": ("F", "hosts, one `<host> slots=<n>` a line; needs --use_deepspeed"),
    "--use_deepspeed": ("", "accepted: DeepSpeed is always the engine"),
    "--use_mpi": ("", "start the ranks as HL_LAUNCHER_TYPE=mpirun does; not with --use_deepspeed"),
    "--master_port": ("P", "port of rank 0 (default: 29500 over several hosts, else a free one)"),
}


@dataclass
class SpawnLine:
    """A command line: the launcher's own flags, the script, and the script's words."""

    given: dict[str, str] = field(default_factory=dict)
    script: str | None = None
    words: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the script, without folder and ending."""
        return Path(self.script or "").name.removesuffix(".py")


def read_line(arguments: Sequence[str]) -> SpawnLine:
    """Read the launcher's own flags up to the script's name."""
    line, rest = SpawnLine(), list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        # the script ends the launcher's flags: what follows is its own
        if not word.startswith("-"):
            line.script, line.words = word, rest
            break
        # --world-size becomes --world_size; the two leading dashes have become underscores before
        name = name.replace("-", "_").replace("__", "--", 1)
        if name not in OWN:
            near = nearest(name, OWN)
            line.faults.append(f"unknown flag {word}; {suggestion(near, 'see --help')}")
        # a switch: it takes no value
        elif not OWN[name][0]:
            line.given[name] = "1"
        elif equals or rest:
            line.given[name] = value if equals else rest.pop(0)
        else:
            line.faults.append(f"{name} needs a value")
    if line.script is None:
        line.faults.append(f"no script is given; give {', '.join(f'{name}.py' for name in SCRIPTS)}")
    elif line.name not in SCRIPTS:
        line.faults.append(_unknown_script(line))
    else:
        # the name chooses what runs, so a file of that name must be the one that is replaced
        check = check_script(line.script, line.words)
        line.faults += check.faults
        line.notes += check.notes
        if check.trainer is not None:
            line.words += ["--"] * ("--" not in line.words) + ["--trainer", check.trainer]
    return line


def _unknown_script(line: SpawnLine) -> str:
    code = read_code(Path(line.script or "").with_suffix(".py"))
    if code.remedy:
        return (
            f"{line.script} is not run here. It has {code.text}, which sft.py, or finetune.py with a YAML file, can "
            f"train: give one of them with {code.remedy}"
        )
    if code.text:
        return f"{line.script} is not run here. It has {code.text}; write a loss function ({GUIDE}), or use torchrun"
    if line.name in OTHERS:
        return f"{line.script} is not run here; use {OTHERS[line.name]}"
    near = nearest(line.name, SCRIPTS)
    hint = suggestion(near and f"{near}.py", "use one of them;")
    names = ", ".join(f"{name}.py" for name in SCRIPTS)
    return f"{line.script} is not one of the scripts; {hint} they are {names}. For code of your own use torchrun"


def ranks_of(line: SpawnLine) -> spawn_requests.Ranks:
    """Return the ranks that the launcher's own flags request, with every fault."""
    given, ranks = line.given, spawn_requests.Ranks(faults=list(line.faults), notes=list(line.notes))
    numbers = {name: _whole(name, given[name], ranks) for name in ("--world_size", "--master_port") if name in given}
    ranks.world_size, ranks.master_port = numbers.get("--world_size") or 1, numbers.get("--master_port")
    # the same rules as in optimum-habana's launcher
    if "--use_mpi" in given and "--use_deepspeed" in given:
        ranks.faults.append("--use_mpi and --use_deepspeed exclude each other; give one of them")
    elif "--use_mpi" in given:
        ranks.variables["HL_LAUNCHER_TYPE"] = "mpirun"
    if (hostfile := given.get("--hostfile")) is not None:
        ranks.hostsfile = hostfile
        if "--use_deepspeed" not in given:
            ranks.faults.append(f"--hostfile {hostfile} needs --use_deepspeed; add it")
        _count_slots(ranks, hostfile, is_given="--world_size" in given)
    if value := os.environ.get(MARK_STEPS):
        ranks.notes.append(
            f"{MARK_STEPS}={value} goes to every rank: only Habana's DeepSpeed reads it, on HPUs with ZeRO stage 3"
        )
    return ranks


def _whole(name: str, text: str, ranks: spawn_requests.Ranks) -> int | None:
    if re.fullmatch(r"\d+", text) and int(text) > 0:
        return int(text)
    ranks.faults.append(f"{name}={text!r} must be a whole number, 1 or more")
    return None


def _count_slots(ranks: spawn_requests.Ranks, hostfile: str, *, is_given: bool) -> None:
    """Set the ranks to all slots of the hosts, which must have equally many; a file that is wrong is refused later."""
    hosts, faults = read_hostsfile(hostfile)
    # find_hosts reads the file again, and says what is wrong
    if faults or not hosts:
        return
    slots = {host.slots for host in hosts}
    # ranks are the same number on each node
    if len(slots) > 1:
        ranks.faults.append(
            f"--hostfile {hostfile}: the hosts have {' and '.join(map(str, sorted(slots)))} slots; give each the same "
            "number"
        )
        return
    total = len(hosts) * slots.pop()
    if is_given and ranks.world_size != total:
        ranks.notes.append(f"--world_size {ranks.world_size}: the {total} slots of {hostfile} count")
    ranks.nodes, ranks.world_size = len(hosts), total


def help_text(name: str | None) -> str:
    """Return the help of the launcher, or of a script's flags, in at most 100 columns."""
    if name in FLAGS:
        lines = [f"flags of {name}.py, and what becomes of each (docs/reference/gaudi_spawn_flags.md)", ""]
        for entry in FLAGS[name or ""]:
            # the texts are Markdown, for the page of flags
            text = re.sub(r"\]\([^)]*\)", "", entry.text).replace("`", "").replace("[", "")
            if entry.default is not None:
                text += f" (default: {entry.default})"
            lines.append(_entry(entry.name, f"{entry.outcome}: {text}", 36))
        return "\n".join(lines) + "\n"
    lines = [
        "usage: python -m megatron.gaudi_spawn [--world_size N] [--use_deepspeed | --use_mpi] [--hostfile F]",
        "           [--master_port P] SCRIPT [FLAGS OF THE SCRIPT] [-- FLAGS OF megatron.train]",
        "",
        "Run a command of optimum-habana's gaudi_spawn.py. HL_* variables of scripts/run_sft.sh, run_dpo.sh",
        "and generate.sh count where the command says nothing: HL_TP=2 shares each layer over two ranks,",
        "HL_DRY_RUN=1 prints the plan.",
        "",
        "options:",
        *(_entry(f"{name} {value}".rstrip(), text, 22) for name, (value, text) in OWN.items()),
        "",
        "scripts, which need not be there (only finetune.py's folder counts, where its file is looked for):",
        *(_entry(f"{name}.py", text, 26) for name, text in SCRIPTS.items()),
        "",
        "SCRIPT --help lists the flags of a script. docs/guides/optimum_habana.md has examples.",
    ]
    return "\n".join(lines) + "\n"


def _entry(name: str, text: str, width: int) -> str:
    # a long name takes more than its column
    first = f"  {name} ".ljust(width)
    return folded(first + text, 100, further=" " * width)


def _generate(line: SpawnLine, ranks: spawn_requests.Ranks) -> int:
    """Generate on all ranks, which share each layer unless HL_TP, HL_PP or HL_DP divides them."""
    command = spawn_requests.read_words("run_generation", GENERATION, line.words)
    _choose_device(command, ranks)
    # the variables' flags are read only to know which the script's defaults leave alone: GENERATE reads them again
    request = generation_request(
        command.settings,
        command.defaults,
        from_variables=inference_request(os.environ, "generate").train_flags,
        ranks=ranks.world_size,
        environment=os.environ,
    )
    faults = [*command.faults, *request.faults]
    if faults:
        return refused(faults)
    for note in (*ranks.notes, *command.notes, *request.notes):
        print(for_stderr(f"note: {note}"), file=sys.stderr)
    return GENERATE.run(["--variables", "generate", *_layout_flags(ranks), *request.flags, *command.train_flags])


def _choose_device(command: spawn_requests.SpawnCommand, ranks: spawn_requests.Ranks) -> None:
    """Leave out what the device of the variables replaces, or what the CPU lacks, with a note."""
    if ranks.variables:
        ranks.notes.append("--use_mpi has no effect on run_generation.py: an agent of this project's starts the ranks")
    device = os.environ.get("HL_DEVICE") or detect_device()
    on_cpu = ranks.hostsfile is None and device_fault(device) is None and find_device(device).is_host
    # published commands have the flag, and run on a CPU with HL_DEVICE=cpu in front
    if on_cpu and command.settings.pop("--use-graphs", None) == "true":
        ranks.notes.append("--use_hpu_graphs has no effect on the CPU, which has no graphs")
    if os.environ.get("HL_DEVICE"):
        command.settings.pop("--device", None)


def _layout_flags(ranks: spawn_requests.Ranks) -> list[str]:
    options: dict[str, Any] = {"hostsfile": ranks.hostsfile, "master_port": ranks.master_port}
    # without a layout of the user's all ranks share each layer, as in the script
    is_divided = any(os.environ.get(name) for name in ("HL_TP", "HL_PP", "HL_DP"))
    if ranks.nodes > 1 or is_divided:
        options |= {"nodes": ranks.nodes, "devices_per_node": ranks.world_size // ranks.nodes}
    if not is_divided:
        options["tensor_model_parallel_size"] = ranks.world_size
    return flag_words({flag(name): value for name, value in options.items() if value is not None})


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    # help counts before and behind the script's name
    line = read_line([word for word in arguments if word not in ("--help", "-h")])
    asks_for_help = {"--help", "-h"} & set(arguments)
    if asks_for_help and (line.name in FLAGS or line.name not in SCRIPTS):
        sys.stdout.write(help_text(line.name))
        return DONE
    # the merge reads its flags itself, and so prints its own help
    if asks_for_help:
        line.words.append("--help")
    ranks = ranks_of(line)
    if line.name == "finetune":
        request = spawn_requests.finetune_request(line.script or "", line.words, os.environ, ranks)
        return run_request(request, lambda faults: legend(faults, "sft"))
    if line.name in TABLES:
        kind: spawn_requests.Kind = "sft" if line.name == "sft" else "dpo"
        request, sources = spawn_requests.script_request(kind, line.words, os.environ, ranks)
        return run_request(request, lambda faults: spawn_requests.names_in(faults, kind, sources))
    if ranks.faults:
        return refused(ranks.faults)
    if line.name == "run_generation":
        return _generate(line, ranks)
    return merge_peft_adapter.main(line.words)
