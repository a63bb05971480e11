"""Validate a run, then launch it on this machine, or on the hosts of a hostsfile.

    python tools/launch.py [--nodes N] [--devices-per-node M] [--hostsfile F] [--dry-run] -- FLAGS OF megatron.train
    scripts/run_bloom13b.sh, run_llama.sh, run_sft.sh, run_dpo.sh: the same from HL_* variables

All that can be validated beforehand is, before anything starts or is written, without importing torch or deepspeed: one
message lists every fault, and the exit status is 2. Otherwise it is that of the first rank that failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
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
from megatron.launch.dialects.hl_variables import ALL, Script
from megatron.launch.plan import LAUNCHERS, TOO_LONG, TRAIN_ON, FineTuning, LaunchPlan, LaunchRequest, RefusedError
from megatron.launch.preflight import UNREADABLE, preflight
from megatron.options.config import ConfigError
from megatron.options.dialect import one_of
from megatron.options.flags import flag
from megatron.options.stored import to_yaml
from megatron.plan.describe import describe
from megatron.plan.fit import memory_warning
from megatron.runtime.commands import REFUSED, command_name
from megatron.runtime.devices import device_fault, device_names, rank_variables
from megatron.runtime.files import IMPORT_ROOT
from megatron.runtime.terminal import folded, for_stderr
from megatron.settings.command_line import presets_of, read_command_line
from megatron.settings.parser import build_parser, help_text, help_topic
from megatron.settings.validation import check
from megatron.tasks.registry import load_task

VARIABLES_OF = {
    "--nodes": "HL_NUM_NODES",
    "--devices-per-node": "HL_DEVICES_PER_NODE",
    "--data-parallel-size": "HL_DP",
    "--hostsfile": "HL_HOSTSFILE",
    "--launcher": "HL_LAUNCHER_TYPE",
    "--cores-per-rank": "HL_PE",
    "--ranks-per-socket": "HL_PPR",
    "--max-restarts": "HL_MAX_RESTARTS",
    "--min-nodes": "HL_MIN_NODES",
    "--spare-hosts": "HL_SPARE_HOSTS",
    "--rendezvous": "HL_RENDEZVOUS",
    "--activate": "HL_QNPU_DIR",
    "--env": "HL_ENV_FLAGS",
    "--chats": "HL_DATA",
    "--chat-template": "HL_CHAT_TEMPLATE",
    "--train-on": "HL_TRAIN_ON",
    "--too-long": "HL_TOO_LONG",
    "--ignore-columns": "HL_IGNORE_COLUMNS",
    "--dry-run": "HL_DRY_RUN=1",
}
"""Variable that stands for a flag of the launcher where a script is used."""
CHAT_OPTIONS = ("chat_template", "train_on", "too_long", "ignore_columns")
"""Options of the launcher that decide how the rows of --chats are read."""


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
    with_fewer = f", with {plan.min_nodes} of the {plan.nodes} nodes if need be" if plan.min_nodes < plan.nodes else ""
    return f"  restarts: {plan.max_restarts} at most, from the newest checkpoint{with_fewer}\n"


def _wrapped(text: str, label: str) -> str:
    width = min(shutil.get_terminal_size((80, 24)).columns, 100)
    return folded(label + text, width) + "\n"


def command_text(plan: LaunchPlan) -> str:
    """Return the command that launches the plan, a flag a line, ready to paste."""
    lines: list[str] = []
    line = ""
    for word in launch_command(plan):
        if word.startswith("--") and line:
            lines.append(line + " \\")
            line = " "
        line += (" " if line else "") + shlex.quote(word)
    return "\n".join([*lines, line])


def launch_command(plan: LaunchPlan) -> list[str]:
    """Return the words of this launcher that make the plan, without variables."""
    values = {
        "nodes": plan.nodes,
        "devices_per_node": plan.devices_per_node,
        "hostsfile": plan.hostsfile,
        "rendezvous": plan.rendezvous,
        "master_port": plan.master_port,
        "launcher": plan.launcher,
        "cores_per_rank": plan.cores_per_rank,
        "ranks_per_socket": plan.ranks_per_socket,
        "max_restarts": plan.max_restarts,
        "min_nodes": plan.min_nodes if plan.min_nodes < plan.nodes else None,
        "spare_hosts": plan.spare_hosts,
        "activate_dir": plan.activate_dir,
    }
    data = plan.fine_tuning
    if data is not None:
        values["chats"] = data.data or data.folder
        values |= {name: getattr(data, name) for name in CHAT_OPTIONS if name != "ignore_columns"}
    command, parser = _launcher_words(), build_launch_parser()
    for name, setting in values.items():
        if setting is not None and setting != parser.get_default(name):
            command += [_flag(name), str(setting)]
    if data is not None and data.ignore_columns:
        command += ["--ignore-columns", *data.ignore_columns]
    threads = threads_per_rank(plan.devices_per_node)
    derived = rank_variables(plan.config.parallel.device) | {"OMP_NUM_THREADS": threads}
    for name, value in sorted(plan.environment.items()):
        if derived.get(name) != value:
            command += ["--env", f"{name}={value}"]
    return [*command, "--", *plan.train_flags]


def _launcher_words() -> list[str]:
    """Return how to start this launcher: from the checkout, unless it was started as an installed command."""
    script = IMPORT_ROOT / "tools" / "launch.py"
    if Path(sys.argv[0]).name.startswith("megatron-") or not script.is_file():
        return [shutil.which("megatron-launch") or "megatron-launch"]
    return [sys.executable, str(script)]


def parse_command_line(arguments: Sequence[str]) -> tuple[LaunchRequest, Script | None]:
    """Return the request, and the script whose HL_* variables define it, if any do."""
    own, train_flags = list(arguments), []
    if "--" in own:
        place = own.index("--")
        own, train_flags = own[:place], own[place + 1 :]
    options, faults, unread = _read_options(own)
    script = options.pop("variables")
    train_flags, misplaced = _without_own(train_flags, options)
    for name in misplaced:
        remedy = _as_variable(name) if script else "write it before `--`"
        faults.append(f"{name} is a flag of the launcher, not of megatron.train; {remedy}")
        unread |= {name.removeprefix("--").replace("-", "_")} & UNREADABLE
    if script is None:
        return _flags_request(options, train_flags, faults, unread), None
    request = from_environment(os.environ, script, train_flags)
    default = vars(build_launch_parser().parse_args([]))
    request.faults += faults
    request.unread |= unread
    request.faults += [
        f"{_flag(name)} has no effect beside --variables {script}; {_as_variable(_flag(name))}"
        for name, value in options.items()
        if value != default[name]
    ]
    return request, script


def _flags_request(
    options: dict[str, Any], train_flags: list[str], faults: list[str], unread: set[str]
) -> LaunchRequest:
    """Return the request that the launcher's own options make."""
    chats = options.pop("chats")
    given = {name: options.pop(name) for name in CHAT_OPTIONS}
    request = LaunchRequest(**options | {"environment": dict(options["environment"])}, train_flags=train_flags)
    request.faults, request.unread = faults, unread
    if chats is not None:
        _add_chats(request, chats, given)
    if chats is None or Path(chats).is_dir():
        for flag_given in _flags_given(given):
            request.faults.append(f"{flag_given} needs --chats with a file, which is processed; leave it out")
    return request


def _add_chats(request: LaunchRequest, chats: str, given: Mapping[str, Any]) -> None:
    """Set the data of a fine-tuning run. `given`: the options of CHAT_OPTIONS."""
    config = read_command_line(request.train_flags).config
    model = config.checkpoint.load
    if model is None:
        request.faults.append(f"--chats {chats} needs the model to fine-tune; give --load FOLDER after --")
    if config.training.task == "preference":
        for flag_given in _flags_given({name: given[name] for name in ("train_on", "too_long")}):
            request.faults.append(f"{flag_given} has no effect on pairs of answers; leave it out")
    folder, file = (chats, None) if Path(chats).is_dir() else (None, chats)
    rows = {**given, "ignore_columns": tuple(given["ignore_columns"])}
    request.fine_tuning = FineTuning(model or "", data=file, folder=folder, **rows)
    try:
        _ = request.fine_tuning.files
    except ValueError as why:
        request.faults.append(f"--chats {chats!r} {why}")
        request.fine_tuning = None


def _flags_given(options: Mapping[str, Any]) -> list[str]:
    """Return the flags of rows, with values, that are not at their defaults."""
    parser = build_launch_parser()
    changed = {name: value for name, value in options.items() if value != parser.get_default(name)}
    changed.pop("chat_template", None)
    return [f"{_flag(name)} {value if isinstance(value, str) else ' '.join(value)}" for name, value in changed.items()]


def _read_options(arguments: list[str]) -> tuple[dict[str, Any], list[str], set[str]]:
    """Return the launcher's own options, their faults, and the options without a value that checks could use."""
    parser = build_launch_parser()
    namespace, rest = parser.parse_known_args(arguments)
    options, faults, unread = vars(namespace), list[str](), set[str]()
    for name, given in options.items():
        values = given if isinstance(given, list) else [given]
        wrong = [value for value in values if isinstance(value, _Wrong)]
        if wrong:
            faults += [f"{_flag(name)}={value.text!r} {value.rule}" for value in wrong]
            kept = [value for value in values if value not in wrong]
            options[name] = kept if isinstance(given, list) else parser.get_default(name)
            unread.add(name)
    unread |= _check_words(rest, {_flag(name): name for name in options}, faults)
    return options, faults, unread & (UNREADABLE | {"device", "config"})


def _check_words(rest: list[str], name_of: Mapping[str, str], faults: list[str]) -> set[str]:
    """Add the faults of words that are no flags of the launcher; return the options that they may stand for."""
    unread: set[str] = set()
    unknown = dict.fromkeys(word.split("=", 1)[0] for word in rest if word.startswith("-"))
    of_training = [word for word in unknown if not build_parser().parse_known_args([word])[1]]
    if of_training:
        faults.append(f"{of_training[0]} is a flag of megatron.train; write all of these after `--`")
        unread.add("config")
    for word in [word for word in unknown if word not in of_training]:
        near = difflib.get_close_matches(word, name_of, n=1)
        remedy = f"did you mean {near[0]}?" if near else "see --help"
        faults.append(f"unknown flag {word}; {remedy}")
        unread |= {name_of[similar] for similar in near}
    if rest and not unknown:
        faults.append(f"{rest[0]!r} does not follow a flag; flags of megatron.train stand after `--`")
    return unread


def _without_own(train_flags: list[str], options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the flags without those of the launcher alone and their values, and the names of these."""
    own = {_flag(name) for name in options}
    kept: list[str] = []
    names: list[str] = []
    is_value = False
    for word in train_flags:
        name = word.split("=", 1)[0]
        if word.startswith("-"):
            is_value = name in own and bool(build_parser().parse_known_args([word])[1])
            names += [name] if is_value else []
        kept += [] if is_value else [word]
    return kept, names


def _as_variable(name: str) -> str:
    return f"set {VARIABLES_OF[name]}" if name in VARIABLES_OF else "leave it out"


def _flag(name: str) -> str:
    return {"environment": "--env", "activate_dir": "--activate"}.get(name, flag(name))


def build_launch_parser() -> argparse.ArgumentParser:
    """Return the parser of the launcher's own flags."""
    parser = argparse.ArgumentParser(
        prog=command_name("launch"),
        description="Validate a run of megatron.train, then launch it on this machine or on the hosts of a hostsfile.",
        epilog="After --, the flags of megatron.train; `-- --help` shows them. See docs/guides/launching.md.",
        allow_abbrev=False,
    )
    parser.add_argument("--variables", choices=ALL, help="read HL_* variables, as this script does")
    parser.add_argument("--nodes", type=_whole(1), default=1, help="nodes (default: 1)")
    parser.add_argument("--devices-per-node", type=_whole(1), help="default: 8; on the CPU, what the layout needs")
    parser.add_argument("--data-parallel-size", type=_whole(1), help="default: what the layout leaves of the devices")
    parser.add_argument("--hostsfile", help="one `<host> slots=<n>` a line")
    parser.add_argument("--device", **_choice(tuple(device_names()), device_fault))
    parser.add_argument(
        "--master-port", type=_whole(1, 65535), help="default: 29500 over several nodes, else a free one"
    )
    _add_launcher_flags(parser)
    parser.add_argument(
        "--max-restarts",
        type=_whole(0),
        default=0,
        help="restarts from the newest checkpoint after ranks have failed (default: 0)",
    )
    parser.add_argument("--min-nodes", type=_whole(1), help="nodes that suffice when others are lost (default: all)")
    parser.add_argument(
        "--spare-hosts",
        type=_whole(0),
        default=0,
        metavar="N",
        help="hosts of the hostsfile after those of the run, which replace hosts that are lost or fail twice "
        "(default: 0)",
    )
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="address of the first node, if a scheduler starts this launcher on each node; instead of a hostsfile",
    )
    parser.add_argument(
        "--activate", dest="activate_dir", metavar="DIR", help="folder whose `activate` every other host sources first"
    )
    parser.add_argument(
        "--env",
        dest="environment",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable for the ranks on every host; repeatable",
    )
    _add_chat_flags(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    return parser


def _add_chat_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chats",
        metavar="PATH",
        help="fine-tuning: JSONL file of chats to tokenize first (of pairs with --task preference), or folder of "
        "tokenized ones",
    )
    parser.add_argument("--chat-template", metavar="NAME", help="with --chats: a preset, or a .jinja or .py file")
    parser.add_argument(
        "--train-on",
        **_choice(TRAIN_ON),
        help=f"with --chats: the tokens to train (default: {TRAIN_ON[0]})",
    )
    parser.add_argument(
        "--too-long",
        **_choice(TOO_LONG),
        help=f"with --chats: what becomes of chats of more than seq_length tokens (default: {TOO_LONG[0]})",
    )
    parser.add_argument(
        "--ignore-columns",
        nargs="+",
        default=[],
        metavar="COLUMN",
        help="with --chats: leave these columns of the rows out",
    )


def _add_launcher_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher",
        **_choice(LAUNCHERS),
        help="what starts an agent on each host; mpirun also on this machine alone (default: pdsh)",
    )
    parser.add_argument("--cores-per-rank", type=_whole(1), default=0, help="bind each rank to so many cores")
    parser.add_argument(
        "--ranks-per-socket", type=_whole(1), default=0, help="bound ranks on each socket (default: as many on each)"
    )


@dataclasses.dataclass(frozen=True)
class _Wrong:
    """A value that cannot be read; reported beside all other faults."""

    text: str
    rule: str


def _variable(text: str) -> tuple[str, str] | _Wrong:
    name, equals, value = text.partition("=")
    return (name, value) if equals and name.isidentifier() else _Wrong(text, "must be NAME=VALUE")


def _choice(known: tuple[str, ...], fault_of: Callable[[str], str | None] | None = None) -> dict[str, Any]:
    """Return how a flag is declared whose value is one of these, the first by default, or one without a fault."""
    broken = fault_of or (lambda text: None if text in known else f"must be {one_of(known)}")
    return {
        "type": lambda text: text if broken(text) is None else _Wrong(text, str(broken(text))),
        "default": known[0],
        "metavar": f"{{{','.join(known)}}}",
    }


def _whole(lowest: int, highest: int | None = None) -> Callable[[str], int | _Wrong]:
    """Return the reader of a whole number within these limits."""
    limits = f"of {lowest} or more" if highest is None else f"from {lowest} to {highest}"

    def read(text: str) -> int | _Wrong:
        if text.isdecimal() and lowest <= int(text) and (highest is None or int(text) <= highest):
            return int(text)
        return _Wrong(text, f"must be a whole number {limits}")

    return read


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    of_training = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    if (topic := help_topic(of_training)) is not None:
        script = next((known for known in ALL if list(arguments[:2]) == ["--variables", known]), None)
        try:
            sys.stdout.write(help_text(topic) if script is None else script_help(script, topic))
        except ConfigError as error:
            print(error, file=sys.stderr)
            return REFUSED
        return 0
    request, script = parse_command_line(arguments)
    return run_request(request, (lambda faults: legend(faults, script)) if script is not None else (lambda faults: ""))


def run_request(request: LaunchRequest, names_in: Callable[[list[str]], str]) -> int:
    """Validate a request and launch it, or print its plan; return the exit status.

    `names_in` returns which of the user's own names set the options that faults name, or "".
    """
    print_config = "--print-config" in request.train_flags
    request.train_flags = [word for word in request.train_flags if word != "--print-config"]
    try:
        plan = preflight(request)
    except RefusedError as refused:
        _print_refusal(refused, names_in(refused.faults))
        return REFUSED
    if print_config:
        sys.stdout.write(to_yaml(plan.config))
        return 0
    if request.dry_run:
        names = " + ".join(presets_of(build_parser().parse_known_args(plan.train_flags)[0]))
        sys.stdout.write(plan_text(plan, f"Plan of {names or 'the run'}; nothing was started or written"))
        return 0
    _print_notes(plan)
    if plan.fine_tuning is not None:
        try:
            plan = with_processed_data(plan, plan.fine_tuning)
        except ValueError as error:  # DataError, whose message is complete
            names = names_in([str(error)])
            print(for_stderr(f"{error} ({names})" if names else str(error)), file=sys.stderr)
            return REFUSED
    return launch(plan)


def _print_refusal(refused: RefusedError, names: str) -> None:
    count = "1 fault" if len(refused.faults) == 1 else f"{len(refused.faults)} faults"
    lines = [f"refused, {count}; nothing was started or written:", *(f"  - {fault}" for fault in refused.faults)]
    lines += [f"  - warning: {warning}" for warning in refused.warnings]
    if names:
        lines.append(f"  ({names})")
    print(for_stderr("\n".join(lines)), file=sys.stderr)


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

    folders = [Path(prefix).parent for prefix in plan.config.data.prefixes]
    has_pairs = load_task(plan.config).data.preprocessor == "preprocess_preferences"
    found = []
    for samples in process_files(given, folders, plan.config.training.seq_length, has_pairs=has_pairs):
        print(samples.describe())
        found.append(samples)
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
