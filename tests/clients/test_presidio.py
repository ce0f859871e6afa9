"""``finders: [presidio]`` with the real module, and a model that knows a single name: PyPI has none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.processes import ROOT
from tests.clients.environments import PRESIDIO
from tests.clients.running import needs

pytestmark = pytest.mark.clients

#: The package of the model that Presidio asks for.
MODEL = """
import spacy

__version__ = "3.8.0"


def load(**_):
    model = spacy.blank("en")
    model.add_pipe("entity_ruler").add_patterns([{"label": "PERSON", "pattern": "Anna Schmidt"}])
    return model
"""
ASK = """
import logging

logging.basicConfig(level=logging.DEBUG)
from gateway.redaction.masking import Masking, unmasked
from gateway.redaction.rules import Rules, finder

masking = Masking(Rules((finder("presidio"),)))
text = "Anna Schmidt, SSN 536-90-4399, DE89370400440532013000, a@b.org: order 12345678"
print(said := masking.masked(text))
assert unmasked(said, masking.values) == text
"""


def test_what_presidio_finds_is_masked_and_never_logged(tmp_path: Path) -> None:
    needs(PRESIDIO)
    package, facts = tmp_path / "en_core_web_lg", tmp_path / "en_core_web_lg-3.8.0.dist-info"
    for folder in (package, facts):
        folder.mkdir()
    (package / "__init__.py").write_text(MODEL)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: en-core-web-lg\nVersion: 3.8.0\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    ran = subprocess.run(
        [PRESIDIO.python, "-c", ASK],
        env={**os.environ, "PYTHONPATH": paths, "TLDEXTRACT_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[PERSON_1], SSN [US_SSN_1], [IBAN_1], [EMAIL_1]: order 12345678\n"
    assert not any(word in ran.stderr for word in ("Anna", "536", "DE89", "a@b"))
