"""The documentation as a site: built strictly without a network, with whole links and a search that works offline."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.plan.pages import chromium
from tests.ranks import HANG_S
from tools import document_site

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# an address that no one listens at: a build that needs a network fails
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | NO_NETWORK | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(site: Path) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_page_of_the_repository_is_a_page_of_the_site(site: Path) -> None:
    names = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    names += [path.relative_to(ROOT) for path in (ROOT / "examples").rglob("README.md")]
    expected = {site / (name.parent if name.name == "README.md" else name.with_suffix("")) for name in names}
    expected |= {site, site / "CHANGELOG", site / "CONTRIBUTING"}
    notebooks = (ROOT / "examples" / "notebooks").glob("*.ipynb")
    expected |= {site / "examples" / "notebooks" / path.name for path in notebooks}
    assert {path.parent for path in pages(site)} == expected
    assert "Choose this to train" in (site / "index.html").read_text(encoding="utf-8")


def test_every_link_and_anchor_of_the_site_leads_somewhere(site: Path) -> None:
    texts = pages(site)
    ids = {path: set(re.findall(r'\bid="?([^"\s>]+)', text)) for path, text in texts.items()}
    broken, number = [], 0
    for path, text in texts.items():
        for link in re.findall(r'\b(?:href|src)="?([^"\s>]+)', text):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            number += 1
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file() or (parts.fragment and there in ids and unquote(parts.fragment) not in ids[there]):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []
    assert number > 1000


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    for path, text in pages(site).items():
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\bsrc=\"?([^\"\s>]+)", text)
        loaded += re.findall(r"<link[^>]*\brel=\"?(?:stylesheet|icon|preconnect)[^>]*\bhref=\"?([^\"\s>]+)", text)
        assert loaded
        assert [link for link in loaded if urlsplit(link).netloc] == [], path


def test_markdown_is_read_as_in_the_repository(site: Path) -> None:
    """A list that follows a text directly, or a block within a list, is text here and none there."""
    for path, text in pages(site).items():
        prose = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert "```" not in prose, path
        assert not re.search(r"<p>[^<]*\n([-*]|\d+\.) ", prose), path
        assert not re.search(r"^\|.*\|$", prose, re.MULTILINE), path


def test_the_search_knows_every_flag_and_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    text = " ".join(f"{entry['title']} {entry['text']}" for entry in index["docs"])
    for word in ("--tensor-model-parallel-size", "HL_RAMPUP_BS", "zero-bubble", "train_tokenizer", "NOTEBOOK_MODEL"):
        assert word in text, word
    located = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert located == {f"{path.parent.relative_to(site)}/".removeprefix("./") for path in pages(site)}


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_a_browser_shows_and_searches_it_without_a_network(served: str, tmp_path: Path) -> None:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no Chromium is installed")
    with chromium(program, tmp_path / "profile") as browser:
        for width, scheme in ((400, "light"), (1400, "dark")):
            browser.open(f"{served}reference/python/", width, scheme)
            assert browser.value("document.documentElement.scrollWidth") <= width
            shown = browser.value("getComputedStyle(document.body).backgroundColor")
            assert (shown == "rgb(255, 255, 255)") == (scheme == "light")
        browser.value("document.getElementById('__search').click()")
        browser.value("document.querySelector('.md-search__input').focus()")
        browser.call("Input.insertText", text="zero-bubble")
        deadline_s = time.monotonic() + HANG_S
        while not (found := browser.value("document.querySelector('.md-search-result__item h1')?.innerText")):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        assert found == "Launch a run"
        urls = [sent["request"]["url"] for sent in browser.named("Network.requestWillBeSent")]
        assert [url for url in urls if not url.startswith((served, "data:"))] == []
        assert browser.named("Log.entryAdded") == browser.named("Runtime.exceptionThrown") == []


def test_blocks_within_items_are_indented_as_the_builder_reads_them() -> None:
    text = "1. a\n   b\n\n   c\n\n   ```bash\n   d\n     e\n   ```\n\n- f\n  - g\n      h\n"
    shifted = "1. a\n    b\n\n    c\n\n    ```bash\n    d\n      e\n    ```\n\n- f\n    - g\n      h\n"
    assert document_site.within_items(text) == shifted
