"""The documentation: its size, its links, and the pages that code and scripts name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.test_house import FLOORS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
LARGEST = {
    "docs/internals/design.md": 250,
    "docs/internals/benchmarks.md": 200,
    "CHANGELOG.md": 80,
}
GENERATED = {"configuration.md", "families.md", "gaudi_spawn_flags.md", "python.md", "variables.md"}
"""Pages that a tool writes: they grow by a line with each flag, and are looked up, not read."""
MOST_LINES = 4_325
"""Of all other pages together: what is longer is not read. Shorten a page where another one grows."""

MENTION = re.compile(r"(?<![\w./-])(docs/[\w./-]+\.md)(#[\w-]+)?")


def num_lines(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").splitlines())


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Markdown viewers name them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def links(page: Path) -> list[tuple[str, str]]:
    """Return target and anchor of each link of a page, those of its reference definitions too."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"\]\(([^)#\s]*)#?([^)]*)\)", text)
    return found + re.findall(r"^\[[^]]+\]: ([^#\s]*)#?(\S*)$", text, re.MULTILINE)


def mentions(text: str) -> list[tuple[str, str]]:
    """Return the pages that a file of code names, each with its anchor."""
    return [(page, anchor.removeprefix("#")) for page, anchor in MENTION.findall(text)]


def tracked() -> list[Path]:
    """Return the files of the checkout that a reader may open, pages excepted."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    folders = ("megatron/", "tools/", "scripts/", "tests/", "examples/", "benchmarks/", "Dockerfile", "pyproject.toml")
    kinds = (".py", ".sh", ".sbatch", ".yaml", ".md", ".toml", ".tsv", ".cpp", "Dockerfile")
    return [ROOT / name for name in listed if name.startswith(folders) and name.endswith(kinds)]


def test_all_pages_together_can_be_read() -> None:
    assert sum(num_lines(page) for page in PAGES if page.name not in GENERATED) <= MOST_LINES


@pytest.mark.parametrize(("page", "most"), LARGEST.items())
def test_a_page_keeps_to_its_length(page: str, most: int) -> None:
    assert num_lines(ROOT / page) <= most


def test_every_relative_link_leads_somewhere() -> None:
    broken = []
    for page in [*PAGES, *(ROOT / "examples").rglob("*.md")]:
        for target, anchor in links(page):
            there = page.parent / target if target else page
            if "://" in target:
                continue
            if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        found = ((page.parent / target).resolve() for target, _ in links(page) if target.endswith(".md"))
        waiting += [target for target in found if target.exists()]
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in reached] == []


def test_every_page_that_code_names_exists() -> None:
    files = tracked()
    if not files:
        pytest.skip("needs a checkout of git")
    broken = []
    for path in files:
        for page, anchor in mentions(path.read_text(encoding="utf-8")):
            there = ROOT / page
            if not there.is_file() or (anchor and anchor not in anchors(there)):
                broken.append(f"{path.relative_to(ROOT)}: {page}#{anchor}")
    assert broken == []
    assert sum(bool(mentions(path.read_text(encoding="utf-8"))) for path in files) > 30


def test_the_design_has_the_rooms_and_floors_of_the_code() -> None:
    page = (ROOT / "docs" / "internals" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^  ((?:\w+(?:/|\.py),? ?)+) *\[(\d+)\]", page, re.MULTILINE)
    listed = {
        name.strip().rstrip("/").removesuffix(".py"): int(floor) for names, floor in rows for name in names.split(", ")
    }
    assert listed == FLOORS


def test_tables_have_a_cell_for_each_head_and_stand_by_themselves() -> None:
    broken = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for before, table, after in re.findall(r"(.*)\n((?:^\|.*\n)+)(.*)", text, re.MULTILINE):
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            if len(widths) > 1 or before.strip() or after.strip():
                broken.append(f"{page.relative_to(ROOT)}: {table.splitlines()[0]}")
    assert broken == []


def test_a_page_that_is_not_there_is_found(tmp_path: Path) -> None:
    name = "docs" + "/guides/gone.md"
    assert mentions(f'raise ValueError("see {name}#why, or out/{name}")') == [(name, "why")]
    page = tmp_path / "page.md"
    page.write_text("# A\n\n[a](#a), [b](gone.md#c) and [d]\n\n```\n[e](not_a_link.md)\n```\n\n[d]: other.md#f\n")
    assert links(page) == [("", "a"), ("gone.md", "c"), ("other.md", "f")]
    assert anchors(page) == {"a"}
