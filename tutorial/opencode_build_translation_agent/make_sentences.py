"""Writes ``sentences.jsonl``: English sentences about computers, with the French words that their terms must become.

The same seed writes the same bytes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SEED, COUNT = 0, 96
GLOSSARY = {
    "server": "serveur",
    "router": "routeur",
    "keyboard": "clavier",
    "screen": "écran",
    "file": "fichier",
    "network": "réseau",
    "cable": "câble",
    "printer": "imprimante",
    "browser": "navigateur",
    "folder": "dossier",
    "password": "mot de passe",
    "mouse": "souris",
}
FORMS = (
    "The {a} is next to the {b}.",
    "The {a} does not find the {b}.",
    "Check the {a} and the {b} {n} times.",
    "It took {n} days to repair the {a} and the {b}.",
    "The {a} needs {n} minutes, the {b} needs an hour.",
)


def rows() -> list[dict[str, Any]]:
    """The lines of the file: the sentence, and its terms in French."""
    draw = random.Random(SEED)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < COUNT:
        a, b = draw.sample(list(GLOSSARY), 2)
        sentence = draw.choice(FORMS).format(a=a, b=b, n=draw.randint(2, 40))
        found[sentence] = {"question": sentence, "terms": {a: GLOSSARY[a], b: GLOSSARY[b]}}
    return list(found.values())


def main() -> None:
    lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows())
    (HERE / "sentences.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
