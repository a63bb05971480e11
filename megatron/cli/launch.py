"""Validate a run, then launch it on this machine, or on the hosts of a hostsfile.

    python tools/launch.py [--nodes N] [--devices-per-node M] [--hostsfile F] [--dry-run] -- FLAGS OF megatron.train
    scripts/run_bloom13b.sh, run_llama.sh, run_sft.sh, run_dpo.sh: the same from HL_* variables

All that can be validated beforehand is, before anything starts or is written, without importing torch or deepspeed: one
message lists every fault, and the exit status is 2. Otherwise it is that of the first rank that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.cli.command import command
from megatron.launch.agents.hosts import launch
from megatron.launch.checks import warn_of_new_tokens
from megatron.launch.child_processes import threads_per_rank
from megatron.launch.dialects.hl_help import script_help
from megatron.launch.dialects.hl_requests import from_environment, legend
from megatron.launch.dialects.hl_variables import ALL, VARIABLES, Script
from megatron.launch.options import ChatOptions, LaunchOptions, RowOptions
from megatron.launch.plan import FineTuning, LaunchPlan, LaunchRequest, RefusedError
from megatron.launch.preflight import UNREADABLE, preflight
from megatron.options.config import ConfigError
from megatron.options.dialect import flag_words, nearest, suggestion
from megatron.options.flags import cut, flag, grouped_parser, read_known_flags, shown
from megatron.options.stored import to_yaml
from megatron.plan.describe import describe
from megatron.plan.fit import memory_warning
from megatron.runtime.commands import REFUSED, command_name, folded, for_stderr
from megatron.runtime.devices import rank_variables
from megatron.runtime.files import IMPORT_ROOT
from megatron.settings.command_line import presets_of, read_command_line
from megatron.settings.parser import build_parser, help_text, help_topic
from megatron.settings.validation import check
from megatron.tasks.registry import load_task

IN_TRAIN_FLAGS = ("device", "data_parallel_size")
"""Options of a plan that its flags of training say too."""


def plan_text(plan: LaunchPlan, title: str) -> str:
    """Return the text of a dry run: layout, sizes, memory and the command."""
    config = plan.config
    hosts = [host.name for host in plan.hosts]
    used, spare = ", ".join(hosts[: plan.nodes]), ", ".join(hosts[plan.nodes :])
    parts = [describe(config, nodes=plan.nodes, devices_per_node=plan.devices_per_node, title=title, check=check), "\n"]
    parts += [_wrapped(names, f"  {label}: ") for label, names in (("hosts", used), ("spare hosts", spare)) if names]
    if config.logging.results_dir:
        parts.append(f"  results: {config.logging.results_dir}\n")
    if not config.checkpoint.save:
        parts.append("  checkpoints: none are saved\n")
    parts.append(_restarts(plan))
    parts += [_wrapped(note, "  note: ") for note in plan.notes]
    parts += [_wrapped(warning, "  warning: ") for warning in plan.warnings]
    return "".join([*parts, "\n", command_text(plan), "\n"])


def _restarts(plan: LaunchPlan) -> str:
    if not plan.max_restarts:
        return ""
    text = f"  restarts: {plan.max_restarts} at most, from the newest checkpoint"
    if plan.min_nodes < plan.nodes:
        text += f", with {plan.min_nodes} of the {plan.nodes} nodes if need be"
    return f"{text}\n"


def _wrapped(text: str, label: str) -> str:
    width = min(shutil.get_terminal_size((80, 24)).columns, 100)
    return folded(label + text, width) + "\n"


def command_text(plan: LaunchPlan) -> str:
    """Return the command that launches the plan, ready to paste."""
    return pasted(launch_command(plan))


def pasted(command: Sequence[str]) -> str:
    """Return a command as a shell reads it, a flag a line."""
    first, *words = command
    text = shlex.quote(first)
    for word in words:
        # a flag begins a line, its values follow it
        if word.startswith("--"):
            text += " \\\n "
        text += f" {shlex.quote(word)}"
    return text


def launch_command(plan: LaunchPlan) -> list[str]:
    """Return the command that launches the plan, without variables."""
    return [*launcher_words(), *launch_words(plan)]


def launch_words(plan: LaunchPlan) -> list[str]:
    """Return the arguments of this launcher that make the plan."""
    given = {name: value for name, value in plan.options().items() if name not in IN_TRAIN_FLAGS}
    # the plan has the default resolved; the command leaves it out
    if plan.min_nodes == plan.nodes:
        given["min_nodes"] = None
    words = changed_flags(LaunchOptions, given)
    data = plan.fine_tuning
    if data is not None:
        rows = {field.name: getattr(data, field.name) for field in dataclasses.fields(RowOptions)}
        words += changed_flags(ChatOptions, {"chats": data.data or data.folder, **rows})
    threads = threads_per_rank(plan.devices_per_node)
    # what the launcher derives again needs no --env
    derived = rank_variables(plan.config.parallel.device) | {"OMP_NUM_THREADS": threads}
    for name, value in sorted(plan.environment.items()):
        if derived.get(name) != value:
            words += ["--env", f"{name}={value}"]
    return [*words, "--", *plan.train_flags]


def changed_flags(cls: type, options: Mapping[str, Any]) -> list[str]:
    """Return the flags of the options that are not at their defaults, with their values."""
    return flag_words({flag(name): value for name, value in options.items() if value != getattr(cls, name)})


def launcher_words() -> list[str]:
    """Return how to start this launcher: from the checkout, unless it was started as an installed command."""
    script = IMPORT_ROOT / "tools" / "launch.py"
    if Path(sys.argv[0]).name.startswith("megatron-") or not script.is_file():
        return [shutil.which("megatron-launch") or "megatron-launch"]
    return [sys.executable, str(script)]


def parse_command_line(arguments: Sequence[str]) -> tuple[LaunchRequest, Script | None]:
    """Return the request, and the script whose HL_* variables define it, if any do."""
    own, train_flags = cut(arguments)
    namespace, rest = build_launch_parser().parse_known_args(own)
    script: Script | None = namespace.variables
    # else it would count below as a flag of the launcher that is given
    del namespace.variables
    faults: list[str] = []
    options, unread = read_known_flags(LaunchOptions, namespace, faults)
    chats, unread_rows = read_known_flags(ChatOptions, namespace, faults)
    environment = _environment(namespace.env or [], faults)
    unread |= unread_rows | _check_words(rest, {flag(name): name for name in vars(namespace)}, faults)
    # taken out, so that the parser of training does not refuse them a second time
    train_flags, misplaced = _without_own(train_flags, vars(namespace))
    for name in misplaced:
        remedy = _as_variable(name) if script else "write it before `--`"
        faults.append(f"{flag(name)} is a flag of the launcher, not of megatron.train; {remedy}")
    # other fields are checked without the value that was given
    unread = (unread | set(misplaced)) & (UNREADABLE | {"device", "config"})
    if script is None:
        request = LaunchRequest(**options.options(), environment=environment, train_flags=train_flags)
        request.faults, request.unread = faults, unread
        _add_chats(request, chats)
        return request, None
    request = from_environment(os.environ, script, train_flags)
    given = [name for name, value in vars(namespace).items() if value is not None]
    # the variables make the request alone: two sources would need a rule of precedence
    without_effect = [f"{flag(name)} has no effect beside --variables {script}; {_as_variable(name)}" for name in given]
    request.faults += [*faults, *without_effect]
    request.unread |= unread
    return request, script


def _environment(words: Sequence[str], faults: list[str]) -> dict[str, str]:
    """Return the variables of --env NAME=VALUE."""
    variables = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            variables[name] = value
        else:
            faults.append(f"--env={word!r} must be NAME=VALUE")
    return variables


def _add_chats(request: LaunchRequest, given: ChatOptions) -> None:
    """Set the data of a fine-tuning run."""
    chats = given.chats
    # a folder holds tokens, a file rows
    is_processed = chats is not None and Path(chats).is_dir()
    if chats is None or is_processed:
        for flag_given in _flags_given(given, ("train_on", "too_long", "ignore_columns")):
            request.faults.append(f"{flag_given} needs --chats with a file, which is processed; leave it out")
    if chats is None:
        return
    config = read_command_line(request.train_flags).config
    model = config.checkpoint.load
    if model is None:
        request.faults.append(f"--chats {chats} needs the model to fine-tune; give --load FOLDER after --")
    with contextlib.suppress(ConfigError):  # the rules of the config report a task that there is not
        if load_task(config).data.content == "pairs":
            for flag_given in _flags_given(given, ("train_on", "too_long")):
                request.faults.append(f"{flag_given} has no effect on pairs of answers; leave it out")
    rows = {field.name: getattr(given, field.name) for field in dataclasses.fields(RowOptions)}
    folder, file = (chats, None) if is_processed else (None, chats)
    request.fine_tuning = FineTuning(model=model or "", data=file, folder=folder, **rows)
    try:
        _ = request.fine_tuning.files
    except ValueError as why:
        request.faults.append(f"--chats {chats!r} {why}")
        request.fine_tuning = None


def _flags_given(options: ChatOptions, names: Sequence[str]) -> list[str]:
    """Return those of the flags, with values, that are not at their defaults."""
    values = {name: getattr(options, name) for name in names}
    return [f"{flag(name)} {shown(value)}" for name, value in values.items() if value != getattr(ChatOptions, name)]


def _check_words(rest: list[str], name_of: Mapping[str, str], faults: list[str]) -> set[str]:
    """Add the faults of words that are no flags of the launcher; return the options that they may stand for."""
    unread: set[str] = set()
    unknown = dict.fromkeys(word.split("=", 1)[0] for word in rest if word.startswith("-"))
    # the parser of training leaves a flag over that it does not know
    of_training = [word for word in unknown if not build_parser().parse_known_args([word])[1]]
    if of_training:
        faults.append(f"{of_training[0]} is a flag of megatron.train; write all of these after `--`")
        unread.add("config")
    for word in [word for word in unknown if word not in of_training]:
        near = nearest(word, name_of)
        faults.append(f"unknown flag {word}; {suggestion(near, 'see --help')}")
        if near is not None:
            unread.add(name_of[near])
    if rest and not unknown:
        faults.append(f"{rest[0]!r} does not follow a flag; flags of megatron.train stand after `--`")
    return unread


def _without_own(train_flags: list[str], options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the flags without those of the launcher alone and their values, and the options that these are of."""
    names = {flag(name): name for name in options}
    kept: list[str] = []
    misplaced: list[str] = []
    is_value = False
    for word in train_flags:
        if word.startswith("-"):
            name = names.get(word.split("=", 1)[0])
            # a flag of both parsers, such as --device, stays with training
            is_value = name is not None and bool(build_parser().parse_known_args([word])[1])
            if is_value:
                misplaced.append(str(name))
        if not is_value:
            kept.append(word)
    return kept, misplaced


def _as_variable(option: str) -> str:
    """Return the remedy for a flag of the launcher where a script is used."""
    # names of the request's fields
    target = {"chats": "data", "env": "environment"}.get(option, option)
    variables = [row.name for row in VARIABLES if target in row.targets]
    if not variables:
        return "leave it out"
    if option == "dry_run":
        return f"set {variables[-1]}=1"
    return f"set {variables[-1]}"


def build_launch_parser() -> argparse.ArgumentParser:
    """Return the parser of the launcher's own flags; values stay strings."""
    parser = grouped_parser(
        (("launch", LaunchOptions), ("chats", ChatOptions)),
        prog=command_name("launch"),
        usage="%(prog)s [--flag VALUE ...] -- FLAGS OF megatron.train",
        description="Validate a run of megatron.train, then launch it on this machine or on the hosts of a hostsfile.",
        epilog="After --, the flags of megatron.train; `-- --help` shows them. See docs/guides/launching.md.",
    )
    parser.add_argument(
        "--variables", choices=ALL, metavar=f"{{{','.join(ALL)}}}", help="read HL_* variables, as this script does"
    )
    # not by a dataclass, whose flags replace what was given before
    parser.add_argument(
        "--env", action="append", metavar="NAME=VALUE", help="variable for the ranks on every host; repeatable"
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    own, train_flags = cut(arguments)
    # before anything is validated: help must come for a wrong command too
    topic = help_topic(train_flags)
    if topic is not None:
        scripts = [script for script in ALL if own[:2] == ["--variables", script]]
        try:
            sys.stdout.write(script_help(scripts[0], topic) if scripts else help_text(topic))
        except ConfigError as error:
            print(error, file=sys.stderr)
            return REFUSED
        return 0
    request, script = parse_command_line(arguments)
    return run_request(request, lambda faults: "" if script is None else legend(faults, script))


def run_request(request: LaunchRequest, names_in: Callable[[list[str]], str]) -> int:
    """Validate a request and launch it, or print its plan; return the exit status.

    `names_in` returns which of the user's own names set the options that faults name, or "".
    """
    # a flag of training's command line, which the launcher answers without ranks
    print_config = "--print-config" in request.train_flags
    request.train_flags = [word for word in request.train_flags if word != "--print-config"]
    try:
        plan = preflight(request)
    except RefusedError as refused:
        print(for_stderr(refused.text(names_in(refused.faults))), file=sys.stderr)
        return REFUSED
    if print_config:
        sys.stdout.write(to_yaml(plan.config))
        return 0
    if request.dry_run:
        names = " + ".join(presets_of(build_parser().parse_known_args(plan.train_flags)[0]))
        sys.stdout.write(plan_text(plan, f"Plan of {names or 'the run'}; nothing was started or written"))
        return 0
    _print_notes(plan)
    if plan.doctor and not _is_healthy(plan):
        return REFUSED
    if plan.fine_tuning is not None:
        try:
            plan = with_processed_data(plan, plan.fine_tuning)
        except ValueError as error:  # DataError, whose message is complete
            names = names_in([str(error)])
            text = f"{error} ({names})" if names else str(error)
            print(for_stderr(text), file=sys.stderr)
            return REFUSED
    return launch(plan)


def _is_healthy(plan: LaunchPlan) -> bool:
    """Examine the hosts of a plan, and return whether none stands out."""
    if plan.nodes > 1 and not plan.hosts:
        remedy = "examine them by a hostsfile, or set HL_DOCTOR=0 (leave --doctor out)"
        said = f"HL_DOCTOR=1 (--doctor) knows one of the {plan.nodes} nodes of a rendezvous; {remedy}"
        print(for_stderr(f"nothing was started: {said}"), file=sys.stderr)
        return False
    # late: most runs need none of it
    from megatron.launch.doctor.examination import examine_plan
    from megatron.launch.doctor.report import text

    findings = examine_plan(plan)
    print(text(findings), file=sys.stderr)
    if not findings.suspicions:
        return True
    remedy = "replace these hosts, or set HL_DOCTOR=0 (leave --doctor out)"
    if plan.hostsfile is not None:
        remedy = f"{command_name('doctor')} --hostsfile {plan.hostsfile} --write-hostsfile FILE leaves them out"
    print(for_stderr(f"nothing was started: hosts stand out; {remedy}"), file=sys.stderr)
    return False


def _print_notes(plan: LaunchPlan) -> None:
    too_large = memory_warning(plan.config, plan.nodes * plan.devices_per_node, plan.devices_per_node)
    warnings = [warning for warning in (*plan.warnings, too_large) if warning is not None]
    for line in [f"note: {note}" for note in plan.notes] + [f"warning: {warning}" for warning in warnings]:
        print(for_stderr(line), file=sys.stderr)
    sys.stdout.flush()


def with_processed_data(plan: LaunchPlan, given: FineTuning) -> LaunchPlan:
    """Process the data of a plan into its dataset; return the plan with the tokens that a template added.

    Raises DataError.
    """
    from megatron.launch.instructlab.data_process import process_files  # it imports torch

    # one folder for each file, in the order of the data path
    folders = [Path(prefix).parent for prefix in plan.config.data.prefixes]
    has_pairs = load_task(plan.config).data.content == "pairs"
    found = []
    for samples in process_files(given, folders, plan.config.training.seq_length, has_pairs=has_pairs):
        print(samples.describe())
        found.append(samples)
    # None: a dataset made by other means, whose vocabulary is not known
    added, vocab_size = [], max(samples.vocab_size or 0 for samples in found)
    if tokenizers := [samples.tokenizer for samples in found if samples.tokenizer is not None]:
        added += ["--tokenizer-model", tokenizers[0]]
    for warning in warn_of_new_tokens(plan.config, vocab_size):
        print(for_stderr(f"warning: {warning}"), file=sys.stderr)
    if vocab_size > plan.config.model.vocab_size:
        added += ["--vocab-size", str(vocab_size)]
    return dataclasses.replace(plan, train_flags=(*plan.train_flags, *added))


if __name__ == "__main__":
    sys.exit(main())
