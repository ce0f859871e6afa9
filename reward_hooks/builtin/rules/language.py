"""``language``: answers are in the wanted language, by script and by function words.

The reward is ``script * words``. ``script`` is the share of the letters that belong to the language's script. ``words``
is, for languages in Latin script, the number of function words of the language, divided by that of the known language
with the most (Grefenstette 1995, "Comparing Two Language Identification Schemes"). An answer without letters ("42")
earns 1; an empty one earns 0.

Fails when: a text is short (its words may be function words of several languages, or of none, which is no fault), or
quotes another language on purpose. Languages of one script without listed function words (Russian and Ukrainian,
Chinese and classical Japanese) count as the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from reward_hooks.contract import Candidate, Reward, Rule
from swarm.errors import ConfigError
from swarm.types import Task

_FUNCTION_WORDS: dict[str, frozenset[str]] = {
    language: frozenset(words.split())
    for language, words in {
        "en": "the of and to in is that it for was on are with as be this have from or by not but what which you at "
        "an they he she his her we can will would there their been has had if when who because",
        "de": "der die das und ist nicht ein eine einen zu mit auf für von den dem des im es sich auch als an werden "
        "wird aus bei nach sie er wir ich oder aber wenn weil dass hat sind war wie über nur noch",
        "fr": "le la les des est une un et dans que qui pour pas sur plus par avec ce cette au aux du il elle nous "
        "vous ils sont être ou mais comme sa ses ont été leur parce quand je ne se",
        "es": "el la los las de que y en un una es por con para no se su al del lo como más pero sus le ya o porque "
        "cuando muy sin sobre también me hasta hay donde quien desde está son fue",
        "it": "il lo la gli le di che e un una è per con non si del della nel sono come più ma anche al dei alla da "
        "ha questo quando perché essere suo sua delle loro molto ci se io",
        "pt": "o a os as de que e em um uma é por com para não se do da no na dos das mais mas como ao sua seu ou "
        "quando muito já também são foi pelo pela isso ele ela você porque",
        "nl": "de het een en van is dat niet op te in met voor zijn aan er om ook als maar bij of uit dan naar heeft "
        "wordt door over nog hij zij wij ik je deze dit werd omdat wanneer",
    }.items()
}
_CJK = r"\u4e00-\u9fff\u3400-\u4dbf"
_LATIN = r"A-Za-z\u00c0-\u024f"
_SCRIPTS = {
    **dict.fromkeys(_FUNCTION_WORDS, _LATIN),
    "zh": _CJK,
    "ja": r"\u3040-\u30ff" + _CJK,
    "ko": r"\uac00-\ud7af\u1100-\u11ff",
    "ru": r"\u0400-\u04ff",
    "uk": r"\u0400-\u04ff",
    "el": r"\u0370-\u03ff",
    "he": r"\u0590-\u05ff",
    "ar": r"\u0600-\u06ff",
    "hi": r"\u0900-\u097f",
    "th": r"\u0e00-\u0e7f",
}
_LETTER = re.compile(r"[^\W\d_]")
_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True)
class Language(Rule):
    """The rule with its language, an ISO 639-1 code."""

    language: str

    def __post_init__(self) -> None:
        if self.language not in _SCRIPTS:
            raise ConfigError(f"Language knows no {self.language!r}; it knows {', '.join(sorted(_SCRIPTS))}")

    def judge(self, task: Task, candidate: Candidate) -> Reward:
        text = candidate.text
        if not text.strip():
            return Reward(value=0.0, reason="empty")
        letters = _LETTER.findall(text)
        ours = re.findall(f"[{_SCRIPTS[self.language]}]", "".join(letters))
        script = len(ours) / len(letters) if letters else 1.0
        words = self._word_share(text)
        value = script * words
        reason = "" if value == 1.0 else f"{script:.2f} in the script of {self.language}, {words:.2f} of its words"
        return Reward(value=value, components={"script": script, "words": words}, reason=reason)

    def _word_share(self, text: str) -> float:
        function_words = _FUNCTION_WORDS.get(self.language)
        if function_words is None:
            return 1.0
        words = [word.lower() for word in _WORD.findall(text)]
        most = max(sum(word in listed for word in words) for listed in _FUNCTION_WORDS.values())
        return sum(word in function_words for word in words) / most if most else 1.0
