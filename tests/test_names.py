"""The vocabulary of the product: one word for one thing, and names that say what they hold."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("swarm", "reward_hooks", "adapters", "gateway")

#: Words that stand for a noun. A variable, parameter, attribute, function or class has the noun as its name.
PRONOUNS = {"one", "told", "said", "place", "places", "given", "known", "found"}
#: Classes of AgentJet's interface have AgentJet's names, beside ours.
SHARED_CLASSES = {"SwarmClient", "Task", "WorkflowOutput"}
#: File names that more than two folders have, and why.
SHARED_FILES = {
    "__init__.py": "Python's",
    "__main__.py": "Python's",
    "app.py": "the application of a server, a gateway and a monitor",
}


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Each use of a name: of variables, parameters, attributes, keywords, functions and classes; with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name, node.lineno
            case _:
                pass


def pronouns_in(tree: ast.AST) -> list[tuple[str, int]]:
    return [(name, line) for name, line in names_in(tree) if name.strip("_") in PRONOUNS]


@cache
def vocabulary() -> tuple[list[str], dict[str, list[str]]]:
    """The uses of pronouns as names, and the places of each public class. To read all sources takes a second."""
    uses: list[str] = []
    places: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        tree, file = ast.parse(path.read_text()), path.relative_to(ROOT)
        uses += [f"{file}:{line} {name}" for name, line in pronouns_in(tree)]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{file}:{node.lineno}")
    return uses, places


def test_what_counts_as_a_pronoun() -> None:
    source = "for one in servers:\n    one.known = tell(said=1)\ndef _place(given): ...\nfrom_one = 'one'\n"
    assert pronouns_in(ast.parse(source)) == [
        ("_place", 3),
        ("one", 1),
        ("known", 2),
        ("given", 3),
        ("one", 2),
        ("said", 2),
    ]


def test_names_are_nouns() -> None:
    uses, _ = vocabulary()
    assert not uses, f"{len(uses)} names are pronouns: name what each holds\n" + "\n".join(uses)


def test_a_public_class_has_a_name_of_its_own() -> None:
    _, places = vocabulary()
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in SHARED_CLASSES} == {}
    assert all(len(places[name]) == 2 for name in SHARED_CLASSES)


def test_a_file_name_is_in_two_folders_at_most() -> None:
    folders: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        folders[path.name].append(str(path.parent.relative_to(ROOT)))
    assert {name: where for name, where in folders.items() if len(where) > 2 and name not in SHARED_FILES} == {}
    assert all(len(folders[name]) > 2 for name in SHARED_FILES)
