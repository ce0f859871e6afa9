"""Sphinx's settings for ``make docs``: the Markdown files where they lie, and the reference from docstrings.

The source folder is the repository, so that links between its Markdown files are the same here and on a code host.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from sphinx.application import Sphinx

# before autodoc, which replaces annotations of pydantic's BaseModel: models with extra fields cannot be made after that
import swarm.agentjet.workflow  # noqa: F401

project = "swarm-gateway"
copyright = "Apache-2.0"
root_doc = "docs/index"
include_patterns = ["README.md", "docs/**.md", "tutorial/**.md"]
# folders are not even walked through
exclude_patterns = [".*", "build", "tests", "benchmarks", "runs", "**/runs", "gateway", "swarm", "adapters"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "alabaster"
html_theme_options = {
    "description": "It is served like by vLLM, and it learns.",
    "page_width": "1180px",
    "sidebar_width": "220px",
    "fixed_sidebar": False,
}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = project
# a fence without a language is a drawing or what a terminal shows
highlight_language = "text"
html_copy_source = False
# the levels whose headings can be linked to; a link to a page or heading that is not there is a warning, which fails
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _with_fields)
    app.connect("build-finished", _index_at_the_root)


def _index_at_the_root(app: Sphinx, failed: Exception | None) -> None:
    """Write the index page again at the root of the site, where a web host looks for it."""
    page = Path(app.outdir) / f"{root_doc}.html"
    if failed or app.builder.name != "html":
        return
    folder = page.parent.name

    def moved(match: re.Match[str]) -> str:
        attribute, link = match.groups()
        if re.match(r"[a-z]+:|#", link):
            return match[0]
        return f'{attribute}="{link.removeprefix("../") if link.startswith("../") else f"{folder}/{link}"}"'

    text = page.read_text(encoding="utf-8").replace('data-content_root="../"', 'data-content_root="./"')
    text = re.sub(r'\b(href|src|action)="([^"]*)"', moved, text)
    (Path(app.outdir) / "index.html").write_text(text, encoding="utf-8")


def _with_fields(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Append the fields of a pydantic model, whose descriptions are no docstrings."""
    if what != "class" or not issubclass(thing, BaseModel):
        return
    for field, info in thing.model_fields.items():
        default = "" if info.default is PydanticUndefined else f", default ``{info.default!r}``"
        kind = getattr(info.annotation, "__name__", None) if isinstance(info.annotation, type) else info.annotation
        text = f": {info.description.replace('`', '``')}" if info.description else ""
        lines += [f"* ``{field}`` (``{str(kind).replace('typing.', '')}``{default}){text}"]
    lines.append("")
