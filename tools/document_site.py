"""Hooks of mkdocs.yml: the pages of the repository that lie outside docs/, and links that lead out of it.

mkdocs build --strict     writes out/site

README.md is the first page. Pages link as they do in the repository; what they link to there, such as a preset, is
copied into the site, so that a link that works in the one works in the other.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/"
NOTEBOOKS = "examples/notebooks"
OTHER_PAGES = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
DEFINITION = re.compile(r"^(?P<text>\[[^\]]+\]: )(?P<target>[^#\s]*)(?P<anchor>#\S*)?$", re.MULTILINE)
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def slug(text: str, separator: str) -> str:
    """Return the anchor of a heading, as the repository's viewer names it (tests/test_docs.py)."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def other_pages() -> dict[str, str]:
    """Return the pages outside docs/: path in the repository -> path in the site."""
    examples = {str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("README.md")}
    return OTHER_PAGES | {name: name for name in sorted(examples)}


def site_path(name: str) -> str | None:
    """Return the path in the site of a file or folder of the repository; None for a folder without a page."""
    if name in other_pages():
        return other_pages()[name]
    if name.startswith(DOCS):
        return name.removeprefix(DOCS)
    if (ROOT / name).is_dir():
        page = f"{name}/README.md"
        return page if page in other_pages() else None
    if name.endswith(".ipynb"):
        return f"{name}.md"
    return name


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    pages = {to: (ROOT / name).read_text(encoding="utf-8") for name, to in other_pages().items()}
    for notebook in sorted((ROOT / NOTEBOOKS).glob("*.ipynb")):
        pages[f"{NOTEBOOKS}/{notebook.name}.md"] = notebook_page(notebook)
    sources = {to: name for name, to in other_pages().items()}
    linked = set()
    for file in files.documentation_pages():
        linked |= linked_files(f"{DOCS}{file.src_uri}", file.content_string)
    for to, text in pages.items():
        linked |= linked_files(sources.get(to, to), text)
        files.append(File.generated(config, to, content=text))
    for name in sorted(linked):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def linked_files(name: str, text: str) -> set[str]:
    """Return the files that a page links to which are no pages: presets, scripts, pictures, the license."""
    found = set()
    for match in [*LINK.finditer(FENCE.sub("", text)), *DEFINITION.finditer(text)]:
        target = resolved(name, match["target"])
        is_page = target.endswith((".md", ".ipynb")) or target.startswith(DOCS)
        if "://" not in match["target"] and (ROOT / target).is_file() and not is_page:
            found.add(target)
    return found


def resolved(name: str, target: str) -> str:
    """Return the path in the repository that a link of a page names."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), target)) if target else name


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    own = page.file.src_uri
    sources = {to: name for name, to in other_pages().items()}
    is_in_docs = (ROOT / DOCS / own).is_file()
    name = f"{DOCS}{own}" if is_in_docs else sources.get(own, own)

    def rewritten(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        to = own if not target else site_path(resolved(name, target))
        # a folder: the site has no page for it
        if to is None:
            return match["text"].strip("[]")
        link = posixpath.relpath(to, posixpath.dirname(own) or ".") if target else ""
        is_definition = match["text"].endswith(": ")
        return f"{match['text']}{link}{anchor}" if is_definition else f"{match['text']}({link}{anchor})"

    parts = FENCE.split(markdown)
    for number, part in enumerate(parts):
        if not FENCE.match(part):
            parts[number] = DEFINITION.sub(rewritten, LINK.sub(rewritten, within_items(part)))
    return "".join(parts)


def within_items(text: str) -> str:
    """Return a text whose paragraphs and blocks within items of a list are indented by 4, as Python-Markdown has it.

    The repository's viewer takes 2 below `- ` and 3 below `1. `.
    """
    lines, added = [], ""
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip(" "))
        is_fence = line.lstrip(" ").startswith("```")
        if is_fence and not added and indent in (2, 3):
            added = " " * (4 - indent)
            lines.append(added + line)
        elif added:
            lines.append(added + line)
            # the end of the block
            added = "" if is_fence else added
        else:
            lines.append(f"    {line.lstrip(' ')}" if indent in (2, 3) else line)
    return "\n".join(lines)


def notebook_page(file: Path) -> str:
    """Return a notebook as a page: its texts, and its code as blocks."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"
