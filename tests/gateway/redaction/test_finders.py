"""Rules of one's own: patterns, functions, Presidio."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.config.route import DataConfig
from gateway.redaction.masking import Masking, unmasked
from swarm.errors import ConfigError

GROUP: dict[str, Any] = {"redact": "group"}


def names(text: str) -> Iterator[tuple[str, int, int]]:
    if "fail" in text:
        raise ValueError(text)
    if "leave" in text:
        sys.exit(text)
    at = text.find("Anna")
    if at >= 0:
        yield "PERSON", at, at + 4


def data(**more: Any) -> DataConfig:
    return DataConfig.model_validate(GROUP | more)


def test_patterns_and_functions_find_what_no_built_in_rule_knows() -> None:
    rules = data(patterns={"employee": r"E-[0-9]{6}|"}, finders=[f"{__name__}:names"]).rules
    assert rules is not None
    text = "Anna is E-123456, a@b.org"
    masking = Masking(rules)
    assert masking.masked(text) == "[PERSON_1] is [EMPLOYEE_1], [EMAIL_1]"
    assert unmasked("[PERSON_1]!", masking.values) == "Anna!" and not rules.private(masking.masked(text))
    assert rules.private("E-123456") and not rules.private("E-12345")


def whole_words(text: str) -> Iterator[tuple[str, int, int]]:
    return (("PERSON", *match.span()) for match in re.finditer(r"\bAnna\b", text))


def test_they_find_it_behind_an_escape_of_json_too() -> None:
    rules = data(patterns={"employee": r"\bE-[0-9]{6}\b"}, finders=[f"{__name__}:whole_words"]).rules
    assert rules is not None
    arguments = json.dumps({"said": "Yours,\nAnna\tE-123456"})
    assert Masking(rules).masked(arguments) == r'{"said": "Yours,\n[PERSON_1]\t[EMPLOYEE_1]"}'


@pytest.mark.parametrize("does", ["fail", "leave"])
def test_a_text_at_which_a_finder_fails_is_private(caplog: pytest.LogCaptureFixture, does: str) -> None:
    rules = data(finders=[f"{__name__}:names"]).rules
    assert rules is not None and rules.private(f"this may {does} secretly")
    assert Masking(rules).masked([f"this may {does}"]) == ["[PRIVATE_1]"]
    assert "secretly" not in caplog.text


def test_a_text_on_which_a_pattern_takes_too_long_is_private(caplog: pytest.LogCaptureFixture) -> None:
    rules = data(patterns={"code": r"(a|aa)+$"}).rules
    assert rules is not None
    assert Masking(rules).masked(["aa", "a" * 60 + "b"]) == ["[CODE_1]", "[PRIVATE_1]"]
    assert "the pattern code takes more than 1 s" in caplog.text and "aaa" not in caplog.text


def test_a_pattern_for_ascii_is_read_as_python_reads_it() -> None:
    rules = data(patterns={"code": r"(?a)[([]\d+"}).rules
    assert rules is not None and Masking(rules).masked("[12 and (\N{ARABIC-INDIC DIGIT TWO}") == (
        "[CODE_1] and (\N{ARABIC-INDIC DIGIT TWO}"
    )


def test_a_pattern_that_fits_placeholders_does_not_mask_them_again() -> None:
    rules = data(patterns={"word": r"\S+"}).rules
    assert rules is not None and Masking(rules).masked("a bc") == "[WORD_1] [WORD_2]"


def test_presidio_is_asked_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    class AnalyzerEngine:
        def __init__(self, default_score_threshold: float) -> None:
            assert default_score_threshold == 0.4

        def analyze(self, text: str, language: str) -> list[Any]:
            return [SimpleNamespace(entity_type="US_SSN", start=0, end=3)]

    presidio: Any = ModuleType("presidio_analyzer")
    presidio.AnalyzerEngine = AnalyzerEngine
    monkeypatch.setitem(sys.modules, "presidio_analyzer", presidio)
    rules = data(finders=["presidio"]).rules
    assert rules is not None and Masking(rules).masked("123 is it") == "[US_SSN_1] is it"


def test_a_presidio_without_its_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    presidio: Any = ModuleType("presidio_analyzer")
    # as spaCy, where it cannot download one
    presidio.AnalyzerEngine = lambda **_: sys.exit(1)
    monkeypatch.setitem(sys.modules, "presidio_analyzer", presidio)
    with pytest.raises(ConfigError, match="spacy download"):
        data(finders=["presidio"])


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="presidio"):
        data(finders=["presidio"])
    with pytest.raises(ConfigError, match="import"):
        data(finders=["nowhere:find"])
    with pytest.raises(ValidationError, match="redact"):
        DataConfig.model_validate({"patterns": {"employee": "E"}})


def test_two_readings_of_a_file_are_equal() -> None:
    first, second = (data(patterns={"employee": "E"}) for _ in range(2))
    assert first.rules is not None and first == second and first != data()
