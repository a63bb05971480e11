"""Plain English: banned phrases and docstring openings in code, messages and documentation.

`python tests/test_language.py` prints the number of places by room, with the name of a room the places.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# phrase -> what to write instead. Each has a plainer word that an engineer of the field expects.
BANNED = {
    r"told|tells?|telling": "report, print, say",
    r"anew": "again",
    r"lone": "single",
    r"(hand|hands|handed|handing) (it |them |this )?over": "pass, return",
    r"(there )?is no(?! longer| more)": "is not a, has no; `there is no` is right",
    r"mends?|mended|mending": "repair, fix",
    r"judges?|judged|judging|judg(e)?ment": "check, validate, evaluate",
    r"owes?|owed": "must, has to",
    r"meets?|meeting": "join, reach, satisfy",
    r"speaks? for|spoke for": "represent",
    r"(take|takes|taking|took|taken) part": "participate, contribute",
    r"asks?|asked|asking": "query, request, call",
    r"what [\w ]{1,30} is at": "position, iteration",
    r"nobody": "no one, or name what does not",
    r"reckon(s|ed|ing)?": "estimate, compute",
    r"of its own accord": "by itself",
}

# place -> phrases that are right there, and why
EXCEPTIONS: dict[str, tuple[str, str]] = {}

FRAGMENT = re.compile(
    r"(What|Of|How|Whether|Where|Whence|Which|Who|Whose|Whom|Why"
    r"|(To|In|At|By|From|On|For|Over|With) (which|what|whom|whose))\b"
)
PHRASE = re.compile(rf"\b({'|'.join(BANNED)})\b".replace(" ", r"\s+"), re.IGNORECASE)

Text = tuple[int, str]  # line, text
Place = tuple[Path, int, str]


def comments(source: str) -> Iterator[Text]:
    """Comments of Python source, those on consecutive lines joined."""
    block: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != last + 1:
            yield begin, " ".join(block)
            block = []
        begin = begin if block else token.start[0]
        last = token.start[0]
        block.append(token.string.lstrip("# "))
    if block:
        yield begin, " ".join(block)


@functools.lru_cache(maxsize=1)  # the parse of a file serves its strings and its docstrings
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def strings(source: str) -> Iterator[Text]:
    """String literals of Python source; the parts of an f-string are joined by `{}`."""
    nodes = nodes_of(source)
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, "".join(str(part) for part in parts)


def docstrings(source: str) -> Iterator[Text]:
    """String statements: docstrings of modules, classes and functions, and the texts below fields."""
    for node in nodes_of(source):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def texts(path: Path) -> Iterator[Text]:
    """Prose of a file: comments and strings of Python, every line of other files."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from comments(source)
        yield from strings(source)
        return
    line = 1
    for block in re.split(r"(\n\s*\n)", source):
        yield line, re.sub(r"\n\s*(#|//)?\s*", "\n", block)
        line += block.count("\n")


def phrases(path: Path) -> Iterator[Place]:
    """Banned phrases in a file, also where a line ends within one."""
    for line, text in texts(path):
        for found in PHRASE.finditer(text):
            if not found[0].lower().startswith("there"):
                yield path, line + text[: found.start()].count("\n"), " ".join(found[0].split())


def fragments(path: Path) -> Iterator[Place]:
    """Docstrings that begin with a fragment rather than a verb or a noun."""
    for line, text in docstrings(path.read_text(encoding="utf-8")) if path.suffix == ".py" else ():
        if found := FRAGMENT.match(text.strip()):
            yield path, line, f'"""{found[0]} ...'


def files() -> list[Path]:
    """Files that a user or an engineer reads: code, scripts, presets, documentation."""
    found = [
        path for name in ("megatron", "tools", "benchmarks", "examples", "scripts") for path in (ROOT / name).rglob("*")
    ]
    found += [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "setup.py"]
    kinds = (".py", ".sh", ".sbatch", ".md", ".yaml", ".cpp", ".h", ".hpp")
    return sorted(path for path in found if path.is_file() and path.suffix in kinds)


def places() -> list[Place]:
    """Every banned phrase and fragment that is not an exception."""
    found = [place for path in files() for place in [*phrases(path), *fragments(path)]]
    return [
        (path, line, phrase)
        for path, line, phrase in found
        if phrase not in EXCEPTIONS.get(str(path.relative_to(ROOT)), ("",))[0].split(", ")
    ]


def room(path: Path) -> str:
    """megatron/data/gpt.py -> data; docs/internals/design.md -> docs; README.md -> README."""
    parts = path.relative_to(ROOT).parts
    return (parts[1] if parts[0] == "megatron" and len(parts) > 1 else parts[0]).removesuffix(".py").removesuffix(".md")


def test_code_and_documentation_are_in_plain_english() -> None:
    assert [f"{path.relative_to(ROOT)}:{line}: {phrase}" for path, line, phrase in places()] == []


@pytest.mark.parametrize(
    "text",
    ["it was told so", "x is\nno number", "starts anew", "a lone rank", "takes part", "is handed over", "judged"],
)
def test_a_banned_phrase_is_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"# Title\n\n{text}\n", encoding="utf-8")
    (tmp_path / "code.py").write_text(f'def f():\n    """Return.\n\n    {text}\n    """\n', encoding="utf-8")
    assert [line for _, line, _ in phrases(tmp_path / "page.md")] == [3]
    assert len(list(phrases(tmp_path / "code.py"))) == 1


def test_a_phrase_in_a_comment_or_a_message_is_found(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text('# it is\n# no use\nraise ValueError(f"{x} is " "no number")\n', encoding="utf-8")
    assert [line for _, line, _ in phrases(tmp_path / "code.py")] == [1, 3]


@pytest.mark.parametrize("text", ["there is no such file", "is no longer there", "abandoned", "a stand-alone tool"])
def test_plain_words_are_left_alone(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    assert list(phrases(tmp_path / "page.md")) == []


@pytest.mark.parametrize(
    ("text", "expected"), [("What is read.", 1), ("Of the seed.", 1), ("Return it.", 0), ("To which.", 1)]
)
def test_a_docstring_that_begins_with_a_fragment_is_found(text: str, expected: int, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(f'class A:\n    x = 1\n    """{text}"""\n', encoding="utf-8")
    assert len(list(fragments(tmp_path / "code.py"))) == expected


if __name__ == "__main__":
    all_places = places()
    if sys.argv[1:]:
        for path, line, phrase in all_places:
            if room(path) in sys.argv[1:]:
                print(f"{path.relative_to(ROOT)}:{line}: {phrase}")
    else:
        for name, count in Counter(room(path) for path, _, _ in all_places).most_common():
            print(f"{count:5} {name}")
        print(f"{len(all_places):5} in all")
