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
_FOLDERS = ("adapters", "benchmarks", "docs", "gateway", "requirements", "reward_hooks", "swarm", "tests", "tutorial")
#: A path in one of the repository's folders; a star stands for any name, as in a shell.
_PATH = re.compile(r"(?<![\w./<>-])(?:" + "|".join(_FOLDERS) + r")/[\w./*-]*[\w*/]")
#: A module named without its folder.
_BARE = re.compile(r"[a-z_]+\.py")
#: Names of metrics begin with the name of a folder.
_METRIC = re.compile(r"swarm/\w+")
#: In paths of what the reader makes.
MADE = ("NAME", "polite_agent", "shop_agent", "on_compute_relative_reward.py")
_EXTERNAL = re.compile(r"[a-z]+:")


@cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def _links(page: Path) -> list[str]:
    inline = [one for token in tokens(page) for one in token.children or ()]
    return [str(one.attrs[key]) for one in inline for key in ("href", "src") if key in one.attrs]


@cache
def _anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and the site make them."""
    known: Counter[str] = Counter()
    anchors: set[str] = set()
    for opening, inline in pairwise(tokens(page)):
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_of_the_repository_that_a_page_names_is_there(page: Path) -> None:
    code = [
        *(one.content for token in tokens(page) for one in token.children or () if one.type == "code_inline"),
        *(token.content for token in tokens(page) if token.type == "fence"),
    ]
    named = {path.rstrip("/") for text in code for path in _PATH.findall(text) if not _METRIC.fullmatch(path)}
    made = {path for path in named if any(one in path for one in MADE)}
    assert [path for path in sorted(named - made) if not any(ROOT.glob(path))] == []


def _misplaced(inline: Token) -> list[str]:
    """Modules that a paragraph names without a folder and that are in none of the folders that it names."""
    code = [child.content for child in inline.children or () if child.type == "code_inline"]
    paths = [ROOT / path for text in code for path in _PATH.findall(text)]
    folders = [path if path.is_dir() else path.parent for path in paths]
    bare = [text for text in code if _BARE.fullmatch(text) and text not in MADE]
    return [name for name in bare if folders and not any((folder / name).exists() for folder in folders)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_module_named_without_its_folder_is_in_a_folder_of_the_paragraph(page: Path) -> None:
    assert [name for token in tokens(page) if token.type == "inline" for name in _misplaced(token)] == []


def test_a_path_that_is_not_there_is_found() -> None:
    text = (
        "`reward_hooks/judges/places.py` and `pytest tests/x.py::test_a`, not `my/gateway/x.py` or swarm/agentjet/*.py"
    )
    assert _PATH.findall(text) == ["reward_hooks/judges/places.py", "tests/x.py", "swarm/agentjet/*.py"]


def test_every_page_is_on_the_site() -> None:
    index = ROOT / "docs" / "index.md"
    listed = [line for token in tokens(index) if token.info == "{toctree}" for line in token.content.splitlines()]
    paths = [re.sub(r".* <(.*)>", r"\1", line) for line in listed if line and not line.startswith(":")]
    named = {(index.parent / f"{path}.md").resolve() for path in paths}
    pages = {page for page in PAGES if page.relative_to(ROOT).parts[0] in ("README.md", "docs", "tutorial")}
    assert named == pages - {index}
