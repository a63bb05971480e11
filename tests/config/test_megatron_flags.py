"""docs/megatron_flags.md: flags it lists as ours exist, flags it lists as missing do not, every option is listed.

The left columns of the page hold Megatron's flags, the other columns ours. A flag that ends in `*` stands for all flags
with that prefix.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from megatron.config.command_line import build_parser, parse_arguments, shown
from megatron.config.options import Config, flag, options, sections

PAGE = Path(__file__).resolve().parents[2] / "docs" / "megatron_flags.md"

Row = list[str]

OUR_OPTIONS = {flag(name) for name in options()}
PARSER = build_parser()

PLACEHOLDERS = {"N": "1", "PATH": "some/path", "PREFIX": "some/prefix"}

SAME, OTHER_DEFAULT, RENAMED = ("section", "flags"), ("flag", "Megatron", "here"), ("Megatron", "here", "what to know")
MISSING = ("Megatron", "why, or what instead")
TABLES = {
    "Same name, same meaning": {SAME, OTHER_DEFAULT},
    "Renamed, or other values": {RENAMED},
    "Not supported": {MISSING},
    "Only in this project": {SAME},
}


def flags_in(text: str) -> list[str]:
    """Return the flags in a text, in dashes."""
    return [found.replace("_", "-") for found in re.findall(r"--\w[\w-]*\*?", text)]


def sections_of(page: str) -> dict[str, str]:
    heads_and_bodies = re.split(r"^## (.+)$", page, flags=re.MULTILINE)[1:]
    return dict(zip(heads_and_bodies[::2], heads_and_bodies[1::2], strict=True))


def tables_of(body: str) -> list[tuple[tuple[str, ...], list[Row]]]:
    """Return head and rows of each table. Every row has as many cells as its head."""
    tables = []
    for block in re.findall(r"(?:^\|.*\|\n)+", body, flags=re.MULTILINE):
        head, rule, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()]
        assert set("".join(rule)) == {"-"}, block
        assert all(len(row) == len(head) for row in rows), block
        tables.append((tuple(head), rows))
    return tables


def rows(section: str, head: tuple[str, ...]) -> list[Row]:
    return [
        row for found, body in tables_of(sections_of(PAGE.read_text("utf-8"))[section]) if found == head for row in body
    ]


def accepted(name: str) -> bool:
    """Return True if the command line accepts this flag, or any flag of `--moe-*`."""
    if name.endswith("*"):
        return any(ours.startswith(name[:-1]) for ours in OUR_OPTIONS)
    return PARSER.parse_known_args([name])[1] == []


def theirs(table: list[Row]) -> list[str]:
    return [name for row in table for name in flags_in(row[0])]


def parsed(command: str) -> Config:
    """Return the config of a command as written on the page, such as `--vocab-size N`."""
    return parse_arguments([PLACEHOLDERS.get(word, word) for word in command.split()])[0]


same = rows("Same name, same meaning", SAME)
other_defaults = rows("Same name, same meaning", OTHER_DEFAULT)
renamed = rows("Renamed, or other values", RENAMED)
missing = rows("Not supported", MISSING)
only_here = rows("Only in this project", SAME)


def test_page_has_four_sections_and_each_table_a_known_head() -> None:
    found = sections_of(PAGE.read_text("utf-8"))
    assert {section: {head for head, _ in tables_of(body)} for section, body in found.items()} == TABLES
    assert min(map(len, (same, other_defaults, renamed, missing, only_here))) > 5


def test_every_flag_called_ours_exists() -> None:
    page = PAGE.read_text("utf-8")
    for row in renamed + missing:
        page = page.replace(f"\n| {row[0]} |", "\n|")
    assert [name for name in sorted(set(flags_in(page))) if not accepted(name)] == []


@pytest.mark.parametrize("table", [same, only_here], ids=["same", "only_here"])
def test_flags_listed_by_section_stand_in_that_section_of_the_config(table: list[Row]) -> None:
    section_of = {flag(name): section for name, (section, _) in options().items()}
    assert [(name, row[0]) for row in table for name in flags_in(row[1]) if section_of.get(name) != row[0]] == []


def test_every_option_of_ours_is_listed_once() -> None:
    # an option that takes Megatron's name is either the same, or explained; any other is called ours alone
    explained = [name for name in dict.fromkeys(theirs(renamed)) if name in OUR_OPTIONS]
    counts = Counter([name for row in same + only_here for name in flags_in(row[1])] + explained)
    assert {name: counts[name] for name in OUR_OPTIONS if counts[name] != 1} == {}


def test_no_flag_of_megatron_is_listed_twice() -> None:
    answered = [name for row in renamed + missing for name in set(flags_in(row[0]))]
    answered += [name for row in same for name in flags_in(row[1])]
    assert [name for name, count in Counter(answered).items() if count > 1] == []


def test_a_renamed_flag_is_not_ours_under_its_old_name() -> None:
    kept = [(name, row[1]) for row in renamed for name in flags_in(row[0]) if accepted(name)]
    assert [name for name, here in kept if name not in flags_in(here)] == []


def test_what_a_renamed_flag_becomes_is_accepted_as_written() -> None:
    for _, here, _ in renamed:
        if here != "—":
            command = re.fullmatch(r"`([^`]+)`", here)
            assert command is not None, here
            assert parsed(command[1])


def test_a_missing_flag_is_rejected() -> None:
    assert [name for name in theirs(missing) if accepted(name)] == []


def test_values_named_beside_a_renamed_flag_are_values_of_it() -> None:
    named = [(here, value) for _, here, remark in renamed for value in re.findall(r"`([^`-][^`]*)`", remark)]
    assert ("`--attention-backend auto`", "sdpa") in named
    for here, value in named:
        if here != "—":
            assert parsed(f"{flags_in(here)[0]} {value}")


def test_defaults_given_as_ours_are_ours() -> None:
    ours = {flag(name): shown(getattr(sections()[section], name)) for name, (section, _) in options().items()}
    given = {flags_in(row[0])[0]: row[2] for row in other_defaults}
    assert given == {name: ours[name] for name in given}
