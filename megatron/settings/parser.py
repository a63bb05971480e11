"""The flags of megatron.train, declared from the options, and their --help by sections."""

from __future__ import annotations

import argparse
import fnmatch
import functools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.options.config import ConfigError, options, sections
from megatron.options.dialect import nearest, suggestion
from megatron.options.flags import HelpFormatter, add_flags, flag, help_of_option, hints_of, metavar
from megatron.options.stored import PRESETS_DIR
from megatron.runtime.commands import folded, train_name

ABOUT = (
    "Train a model with tensor, pipeline and data parallelism. The command line overrides the presets, which override "
    "the defaults. A BOOL flag alone means true, --no-FLAG means false; `none` unsets an option."
)


def build_parser(*only: str) -> argparse.ArgumentParser:
    """Return a parser with one flag per option, grouped by section; of the sections `only`, if any are given.

    Values stay strings and a missing one is an empty string, so that all are validated together.
    """
    return _parser_of(train_name(), *only)


# 275 flags take most of the time of reading a command line, which a launcher and each of its checks do again and again
@functools.cache
def _parser_of(program: str, *only: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s --config PRESET [--flag VALUE ...]",
        description=None if only else ABOUT,
        # an abbreviation would be another option, or none, once an option with the same beginning is added
        # --help takes a topic, so argparse's own, which prints all and exits, is left out
        allow_abbrev=False,
        add_help=False,
        formatter_class=HelpFormatter,
    )
    if not only:
        parser.add_argument("--help", "-h", nargs="?", const="", metavar="TOPIC", help="a section, a flag, or all")
        parser.add_argument(
            "--config",
            action="append",
            nargs="?",
            const="",
            metavar="PRESET",
            help="preset name or YAML file; repeatable, later presets override earlier ones option by option",
        )
        parser.add_argument("--print-config", action="store_true", help="print the resolved config as YAML and exit")
    for section, cls in sections().items():
        if only and section not in only:
            continue
        # the docstring of a section's class is its help too, so that the two cannot differ
        add_flags(parser.add_argument_group(section, (cls.__doc__ or "").strip()), cls)
    return parser


def help_topic(arguments: Sequence[str]) -> str | None:
    """Return the word after --help, "" if there is none; None without --help."""
    # by hand, before the parser: the help of a section builds the parser of that section alone
    for position, word in enumerate(arguments, 1):
        if word in ("--help", "-h"):
            return "".join(arguments[position : position + 1])
        if word.startswith("--help="):
            return word.partition("=")[2]
    return None


def help_text(topic: str) -> str:
    """Return the help on a topic: a section, a flag with or without its dashes, `all`, or "" for an overview.

    Raises ConfigError for any other.
    """
    name = topic.removeprefix("--").replace("-", "_")
    if not topic:
        return overview()
    if name == "all":
        return build_parser().format_help()
    if name in sections():
        return build_parser(name).format_help()
    if name in options():
        section, field = options()[name]
        hint = hints_of(sections()[section])[name]
        text = f"{flag(name)} {metavar(hint)}    (section {section})"
        return text + "\n\n" + _wrapped(help_of_option(sections()[section], name, field.default, hint), "  ")
    hint = suggestion(nearest(name, [*sections(), *options()], least=0.5), "correct it.")
    raise ConfigError([f"no help on {topic!r}; {hint} Use a section ({', '.join(sections())}), a flag, or all"])


def overview() -> str:
    """Return the first page of the help: how to start, and the sections of the flags."""
    command = train_name()
    presets = ", ".join(sorted(path.stem for path in PRESETS_DIR.glob("*.yaml")))
    return "\n".join(
        [
            f"usage: {command} --config PRESET [--flag VALUE ...]\n",
            _wrapped(ABOUT),
            "  --config PRESET   preset or YAML file; repeatable, later ones override earlier ones",
            "  --print-config    print the resolved config as YAML and exit",
            "  --help SECTION    list the flags of a section",
            "  --help FLAG       explain one flag: --help zero-stage",
            "  --help all        list all flags\n",
            "sections:",
            *sections_text(),
            "",
            _wrapped(f"presets: {presets}"),
            "examples:",
            f"  {command} --config tiny_bloom --data-path corpus_text_document",
            f"  {command} --config llama32_1b --print-config\n",
        ]
    )


def sections_text() -> list[str]:
    """Return a line for each section: its name, its number of flags, its purpose."""
    return [
        f"  {section:<12}{len(hints_of(cls)):>3} flags  {(cls.__doc__ or '').split('.')[0].strip()}"
        for section, cls in sections().items()
    ]


def _wrapped(text: str, indent: str = "") -> str:
    width = min(shutil.get_terminal_size((80, 24)).columns, 100)
    return folded(text, width, indent, indent) + "\n"


ANSWERS = Path(__file__).with_name("megatron_flags.tsv")
"""Answers to flags of Megatron that are not ours, as docs/reference/megatron_flags.md gives them.

A line for each flag: the flag, ours in its place, what to know, and whether it is refused. The page is its source
(tests/settings/test_megatron_flags.py writes it). A flag that ends in * stands for all with that beginning.
"""


@dataclass(frozen=True)
class MegatronAnswer:
    """A flag of Megatron that is not ours, and its outcome."""

    name: str
    ours: str
    """Flags of ours in its place, with an example of a value; "": none."""
    note: str
    is_refused: bool
    """It requests what is not here. Otherwise a flag without one of ours is left out."""


def answer_to(name: str) -> str | None:
    """Return what to do about a flag of Megatron, to stand after its name; None if it is another's."""
    # Megatron's users write underscores too
    name = name.replace("_", "-")
    for row in megatron_answers():
        # a family of flags of one subject, such as --mtp-*, has one row on the page
        if not fnmatch.fnmatchcase(name, row.name):
            continue
        answer = f"is {row.ours} here" if row.ours else "is not an option here"
        if row.note:
            return f"{answer}: {row.note}"
        return answer if row.ours else f"{answer}; leave it out"
    return None


@functools.cache
def megatron_answers() -> tuple[MegatronAnswer, ...]:
    """Return the answer to each flag of Megatron that is not ours."""
    lines = [line.split("\t") for line in ANSWERS.read_text(encoding="utf-8").splitlines()]
    return tuple(MegatronAnswer(name, ours, note, outcome == "refused") for name, ours, note, outcome in lines)
