"""docs/reference/megatron_flags.md: flags listed as ours exist, as missing do not; all options are listed.

The left columns of the page hold Megatron's flags, the other columns ours. A flag that ends in `*` stands for all flags
with that prefix. megatron_flag_names.txt holds the names that Megatron-LM (August 2026), Megatron-DeepSpeed (July 2025)
and DeepSpeed give to their options, and names of Habana's and BigScience's forks.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from megatron.options.config import Config, ConfigError, options, sections
from megatron.options.flags import flag, shown
from megatron.settings.command_line import parse_arguments
from megatron.settings.parser import ANSWERS, build_parser

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "megatron_flags.md"

Row = list[str]

OUR_OPTIONS = {flag(name) for name in options()}
PARSER = build_parser()

PLACEHOLDERS = {"N": "1", "PATH": "/some/path", "PREFIX": "some/prefix"}

SAME = ("section", "flag", "Megatron's default", "here", "what to know")
EQUAL = ("section", "flags, each with its default")
RENAMED, MISSING, ONLY_HERE = (
    ("Megatron", "here", "what to know"),
    ("Megatron", "why, or what instead"),
    ("section", "flags"),
)
TABLES = {
    "Same name": {EQUAL, SAME},
    "Renamed": {RENAMED},
    "Not supported": {MISSING},
    "Only in this project": {ONLY_HERE},
}

TESTS = PAGE.parents[2] / "tests"
MEGATRONS = set((TESTS / "settings" / "megatron_flag_names.txt").read_text(encoding="utf-8").split())


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


def rows(section: str) -> list[Row]:
    return [row for _, body in tables_of(sections_of(PAGE.read_text("utf-8"))[section]) for row in body]


def same_rows() -> list[Row]:
    """Section, flag, Megatron's default, ours and what to know of each flag of the same name."""
    found = []
    for row in rows("Same name"):
        if len(row) == len(SAME):
            found += [[row[0], name, *row[2:]] for name in row[1].split(" ")]
            continue
        section, listed = row
        for entry in listed.split(", "):
            name, default = entry.split(" ")
            found.append([section, name, default, default, ""])
    return found


def answers() -> str:
    """The lines of megatron/settings/megatron_flags.tsv, from the page."""
    lines = []
    for theirs_, *ours, note in rows("Renamed") + rows("Not supported"):
        here = "".join(ours).strip("`—")
        outcome = "answered" if ours else "refused"
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", note).replace("`", "")
        lines += [f"{name}\t{here}\t{plain}\t{outcome}\n" for name in flags_in(theirs_)]
    return "".join(lines)


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


same = same_rows()
renamed = rows("Renamed")
missing = rows("Not supported")
only_here = rows("Only in this project")
same_flags = [flags_in(row[1])[0] for row in same]
SHOWN_BY = [line.split("\t") for line in (TESTS / "settings" / "megatron_flags_shown_by.tsv").read_text().splitlines()]
"""Each flag of the same name, and the test that shows what it does."""


def test_page_has_four_sections_and_each_table_a_known_head() -> None:
    found = sections_of(PAGE.read_text("utf-8"))
    heads = {section: {head for head, _ in tables_of(body)} for section, body in found.items()}
    assert heads == TABLES
    assert min(map(len, (same, renamed, missing, only_here))) > 5


def test_every_flag_called_ours_exists() -> None:
    page = PAGE.read_text("utf-8")
    for row in renamed + missing:
        page = page.replace(f"\n| {row[0]} |", "\n|")
    assert [name for name in sorted(set(flags_in(page))) if not accepted(name)] == []


def test_flags_listed_by_section_stand_in_that_section_of_the_config() -> None:
    section_of = {flag(name): section for name, (section, _) in options().items()}
    listed = [(name, row[0]) for name, row in zip(same_flags, same, strict=True)]
    listed += [(name, row[0]) for row in only_here for name in flags_in(row[1])]
    assert [(name, section) for name, section in listed if section_of.get(name) != section] == []


def test_a_row_of_the_same_name_holds_one_flag_and_our_default() -> None:
    ours = {flag(name): shown(getattr(sections()[section], name)) for name, (section, _) in options().items()}
    assert [row[1] for row in same] == [f"`{name}`" for name in same_flags]
    assert {name: row[3] for name, row in zip(same_flags, same, strict=True)} == {
        name: ours[name] for name in same_flags
    }
    assert [row[1] for row in same if not row[2]] == [], "a row lacks Megatron's default"


def test_a_name_of_megatrons_has_a_row_and_no_other_has() -> None:
    assert sorted(OUR_OPTIONS & MEGATRONS) == sorted(same_flags)
    assert [name for row in only_here for name in flags_in(row[1]) if name in MEGATRONS] == []


def test_each_flag_of_the_same_name_is_shown_by_a_test_that_exists() -> None:
    functions = {
        f"{path.relative_to(TESTS)}::{node.name}"
        for path in {TESTS / test.partition("::")[0] for _, test in SHOWN_BY}
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert sorted(name for name, _ in SHOWN_BY) == sorted(same_flags)
    assert [(name, test) for name, test in SHOWN_BY if test not in functions] == []


def test_every_option_of_ours_is_listed_once() -> None:
    counts = Counter(same_flags + [name for row in only_here for name in flags_in(row[1])])
    assert {name: counts[name] for name in OUR_OPTIONS if counts[name] != 1} == {}


def test_no_flag_of_megatron_is_listed_twice() -> None:
    answered = [name for row in renamed + missing for name in set(flags_in(row[0]))]
    answered += same_flags
    assert [name for name, count in Counter(answered).items() if count > 1] == []


def test_a_renamed_flag_is_not_ours_under_its_old_name() -> None:
    assert [name for name in theirs(renamed) if accepted(name)] == []


def test_what_a_renamed_flag_becomes_is_accepted_as_written() -> None:
    for _, here, _ in renamed:
        if here != "—":
            command = re.fullmatch(r"`([^`]+)`", here)
            assert command is not None, here
            assert parsed(command[1])


def test_a_missing_flag_is_rejected() -> None:
    assert [name for name in theirs(missing) if accepted(name)] == []


def test_values_named_in_a_row_are_values_of_its_flag() -> None:
    named = [(row[1].strip("`"), value) for row in same for value in re.findall(r"`([^`-][^`]*)`", row[4])]
    named += [
        (flags_in(here)[0], value)
        for _, here, remark in renamed
        for value in re.findall(r"`([^`-][^`]*)`", remark)
        if here != "—"
    ]
    assert ("--attention-backend", "sdpa") in named
    for name, value in named:
        assert parsed(f"{name} {value}")


def test_the_command_line_gives_the_answers_of_the_page() -> None:
    assert ANSWERS.read_text("utf-8") == answers(), f"run: python -m tests.settings.test_megatron_flags > {ANSWERS}"
    for name in theirs(renamed) + theirs(missing):
        with pytest.raises(ConfigError) as refused:
            parse_arguments([name.replace("*", "any")])
        (fault,) = [fault for fault in refused.value.faults if "of Megatron" in fault]
        assert name.rstrip("*") in fault


if __name__ == "__main__":
    print(answers(), end="")
