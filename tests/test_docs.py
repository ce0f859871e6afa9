"""The Markdown files without the site's generator: links lead to files and headings that are there, and each page is on
the site."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "tutorial/**/*.md", "tests/**/*.md", "benchmarks/**/*.md")
    for page in ROOT.glob(pattern)
    if not {"runs", "node_modules"} & {*page.parts}
)
_EXTERNAL = re.compile(r"[a-z]+:")


@cache
def _tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def _links(page: Path) -> list[str]:
    inline = [one for token in _tokens(page) for one in token.children or ()]
    return [str(one.attrs[key]) for one in inline for key in ("href", "src") if key in one.attrs]


@cache
def _anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and the site make them."""
    known: Counter[str] = Counter()
    anchors: set[str] = set()
    for opening, inline in pairwise(_tokens(page)):
        if opening.type == "heading_open":
            text = "".join(one.content for one in inline.children or ())
            slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            anchors.add(f"{slug}-{known[slug]}" if known[slug] else slug)
            known[slug] += 1
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    broken: list[str] = []
    for link in _links(page):
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if _EXTERNAL.match(link):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_on_the_site() -> None:
    index = ROOT / "docs" / "index.md"
    listed = [line for token in _tokens(index) if token.info == "{toctree}" for line in token.content.splitlines()]
    named = {(index.parent / f"{line}.md").resolve() for line in listed if line and not line.startswith(":")}
    pages = {page for page in PAGES if page.relative_to(ROOT).parts[0] in ("README.md", "docs", "tutorial")}
    assert named == pages - {index}
