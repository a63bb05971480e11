"""Translate a command of Megatron's pretrain_gpt.py, that of Megatron-LM, Megatron-DeepSpeed or Habana.

    megatron-from-megatron pretrain_gpt.py ARGS
    megatron-from-megatron train_llama3.sh ARGS OF THE SCRIPT
    megatron-from-megatron --output llama3.yaml torchrun --nproc_per_node 8 pretrain_gpt.py ARGS

Printed are our command, the options as a preset, and what has no counterpart, with the reason of each. A script is
read, not run: docs/reference/megatron_flags.md has the flags, docs/guides/launching.md what is read of a script.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron.cli.command import command, command_parser
from megatron.cli.launch import changed_flags, launcher_words, pasted, run_request
from megatron.launch.dialects.megatron_requests import FlagRow, TranslatedCommand, translate
from megatron.launch.dialects.megatron_starters import Started, StartError, read_started
from megatron.launch.options import LaunchOptions
from megatron.launch.shell.syntax import ShellError
from megatron.options.flags import cut
from megatron.parallel.layout import Layout
from megatron.runtime.commands import DONE, REFUSED, counted, folded, for_stderr
from megatron.runtime.files import replacing
from megatron.runtime.network import is_first_rank


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "from_megatron",
        (__doc__ or "").split("\n")[0],
        usage="%(prog)s [--output FILE] [--run | --dry-run] COMMAND [-- FLAGS]",
        epilog="COMMAND: pretrain_gpt.py ARGS, also behind deepspeed, torchrun, mpirun or srun; or a shell script that "
        "starts it, and that script's arguments. FLAGS of megatron.train override the "
        "translated ones. Variables come from the script and from the environment. Exit status: "
        "2 if a flag is refused.",
    )
    parser.add_argument("--output", metavar="FILE", help="write the options to this preset (YAML), for --config")
    parser.add_argument("--run", action="store_true", help="launch the translated command, unless a flag is refused")
    parser.add_argument("--dry-run", action="store_true", help="print its plan, and start nothing")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="see below")
    return parser


def shown(result: TranslatedCommand, train_flags: Sequence[str], preset: str | None) -> str:
    """Return the text of a translation: the command, the options, and a table of the rest."""
    parts = ["# the command\n", command_text(result, train_flags), "\n"]
    # with --output the file has them
    if preset is None:
        parts += ["# the options as a preset (--output FILE writes it)\n", preset_text(result), "\n"]
    parts += [f"# note: {note}\n" for note in [*result.started.notes, *result.notes]]
    parts.append(f"# translated: {counted(len(result.rows) - len(result.idle) - len(result.refused), 'flag')}\n")
    parts += [_table("without effect here", result.idle), _table("refused", result.refused)]
    return "".join(parts)


def command_text(result: TranslatedCommand, train_flags: Sequence[str]) -> str:
    """Return the command that launches the translation, a flag a line, ready to paste."""
    request = result.request(train_flags)
    words = [*launcher_words(), *changed_flags(LaunchOptions, request.options())]
    # variables that stood in front of the command
    for name, value in sorted(request.environment.items()):
        words += ["--env", f"{name}={value}"]
    return pasted([*words, "--", *train_flags]) + "\n"


def preset_text(result: TranslatedCommand) -> str:
    text: str = yaml.safe_dump(result.preset(), sort_keys=False, width=120)
    return text


def _table(title: str, rows: Sequence[FlagRow]) -> str:
    if not rows:
        return ""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    lines = [f"# {title}: {counted(len(rows), 'flag')}\n"]
    lines += [folded(f"#   {row.given}: {row.text}", width, further="#       ") + "\n" for row in rows]
    return "".join(lines)


@command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    words, further = cut(arguments)
    given = build_parser().parse_args(words)
    # argparse takes no remainder for an error of its own
    if not given.command:
        build_parser().error("no command is given; give pretrain_gpt.py and its arguments, or a script that starts it")
    try:
        started = read_started(given.command, os.environ)
    except (ShellError, StartError) as error:
        print(for_stderr(f"refused: {error}"), file=sys.stderr)
        return REFUSED
    result = translate(started, further)
    train_flags = _train_flags(result, given.output)
    sys.stdout.write(shown(result, train_flags, given.output))
    # after the table, which says why
    if result.refused:
        return REFUSED
    if given.run or given.dry_run:
        sys.stdout.flush()
        return launch(result, train_flags, is_dry=given.dry_run)
    return DONE


def _train_flags(result: TranslatedCommand, output: str | None) -> list[str]:
    """Return the flags of training: those of the translation, or the preset that holds them."""
    if output is None or result.refused:
        return result.flags
    header = f"# Written by megatron-from-megatron, of {result.started.script}\n"
    with replacing(Path(output)) as file:
        file.write((header + preset_text(result)).encode())
    return ["--config", output]


def launch(result: TranslatedCommand, train_flags: Sequence[str], *, is_dry: bool = False) -> int:
    """Launch a translation; the variable HL_DEVICE in front replaces the command's device."""
    request: Any = result.request(train_flags)
    request.device = os.environ.get("HL_DEVICE") or request.device
    request.dry_run = is_dry
    return run_request(request, lambda faults: "")


def rank_arguments(words: Sequence[str]) -> list[str]:
    """Return the flags of megatron.train for a rank that is given Megatron's: python -m megatron.pretrain_gpt.

    Exits with status 2 if a flag is refused.
    """
    result = translate(Started("pretrain_gpt.py", list(words)))
    if result.refused:
        # equal on every rank
        if is_first_rank():
            print(for_stderr(_table("refused", result.refused)), file=sys.stderr)
        sys.exit(REFUSED)
    return [*result.flags, *_rank_flags(result)]


def _rank_flags(result: TranslatedCommand) -> list[str]:
    """Return the flags that follow from the ranks: the device, and the batch where the command leaves it out."""
    device = os.environ.get("HL_DEVICE") or result.device
    flags = ["--device", device] if device else []
    assert result.command is not None
    if result.samples_per_rank is not None:
        world_size = os.environ.get("WORLD_SIZE", "1")
        # any other text is refused with the other options
        ranks = int(world_size) if world_size.isdecimal() else 1
        layout = Layout.of(result.command.config.parallel, ranks)
        flags += ["--global-batch-size", str(result.samples_per_rank * layout.num_batch_ranks)]
    return flags


if __name__ == "__main__":
    sys.exit(main())
