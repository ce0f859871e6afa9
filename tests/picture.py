"""Core and packs as one picture in ``docs/architecture.md``, drawn from the imports by ``python -m tests.picture``.

Each line is a layer, or a pack, and what it imports of the others; the base (``swarm/*.py``) is everybody's.
"""

from __future__ import annotations

from textwrap import wrap

from tests.packs import PACKS, ROOT, pack_of
from tests.test_layering import BASE, PACK_ROOTS, file_graph, layer_of, modules

PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "```text\ncore\n", "```\n"
_ROOTS = ("gateway.launch", "gateway.cli")
_WIDTH, _INDENT = 120, 24


def picture() -> str:
    """The lines of the picture, from the sources."""
    edges: dict[str, set[str]] = {}
    for module, imported in file_graph(modules()).items():
        if module not in PACK_ROOTS:
            node = _node(module)
            edges.setdefault(node, set()).update(_node(name) for name in imported if _node(name) not in {node, *BASE})
    core = sorted(node for node in edges if node not in {"adapters", *PACKS, *_ROOTS, *BASE})
    parts = {"core": core, "roots": list(_ROOTS), "packs": sorted(PACKS)}
    blocks = ([title, *(_line(node, edges[node]) for node in nodes)] for title, nodes in parts.items())
    return "\n\n".join("\n".join(block) for block in blocks)


def _node(module: str) -> str:
    return pack_of(module) or layer_of(module)


def _line(node: str, uses: set[str]) -> str:
    text = f"  {node:<{_INDENT - 6}} -> {', '.join(sorted(uses)) or 'the base alone'}"
    return "\n".join(wrap(text, _WIDTH, subsequent_indent=" " * _INDENT, break_on_hyphens=False))


def drawn(page: str) -> str:
    """``page`` with the picture as the sources have it."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}```text\n{picture()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
