"""Prompts begin with what was sampled exactly where they read as they did."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from adapters.verl import token_in
from adapters.verl.token_in import OUTCOMES, TokenIn
from swarm.tokens import EARLIER_IDS

BEGIN, END = "<|im_start|>", "<|im_end|>"


class Words:
    """A byte-level BPE with transformers' two methods."""

    def __init__(self) -> None:
        self.raw = Tokenizer(models.BPE())
        self.raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.raw.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=320, special_tokens=[BEGIN, END], initial_alphabet=alphabet, show_progress=False
        )
        self.raw.train_from_iterator(["assistant user done done the tool says one two three", "aaab abab"] * 9, trainer)
        self.size = self.raw.get_vocab_size()
        self.end = self.raw.token_to_id(END)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return self.raw.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int], **how: bool) -> str:
        assert how == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return self.raw.decode(ids, skip_special_tokens=False)


WORDS = Words()


def spliced(text: str, earlier: list[int], words: Words) -> list[int] | None:
    return token_in.spliced(text, words.encode(text, False), earlier, words)


def told(role: str, content: str) -> str:
    return f"{BEGIN}{role}\n{content}{END}\n"


def spell(ids: list[int]) -> str:
    return WORDS.raw.decode(ids, skip_special_tokens=False)


#: any tokens of text: rarely as the tokenizer would have cut it, often no whole characters
answers = st.lists(st.integers(2, WORDS.size - 1), min_size=1, max_size=12)
texts = st.text(st.sampled_from('ab dotne:\n"é{}'), max_size=12)


@given(texts, st.lists(st.tuples(answers, texts), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_a_conversation_of_any_tokens_keeps_them_all(question: str, turns: list[tuple[list[int], str]]) -> None:
    text = told("user", question)
    ids = WORDS.encode(text + f"{BEGIN}assistant\n", False)
    for answer, result in turns:
        said = spell(answer)
        text += told("assistant", said) + told("tool", result)
        prompt = text + f"{BEGIN}assistant\n"
        earlier = [*ids, *answer, WORDS.end]
        found = spliced(prompt, earlier, WORDS)
        assert found is not None and found[: len(earlier)] == earlier
        assert spell(found) == prompt
        ids = found


@given(texts, answers, texts, st.data())
@settings(max_examples=300, deadline=None)
def test_another_text_is_never_replaced(question: str, answer: list[int], result: str, data: st.DataObject) -> None:
    begun = told("user", question) + f"{BEGIN}assistant\n"
    earlier = [*WORDS.encode(begun, False), *answer, WORDS.end]
    same = begun + spell(answer) + END + "\n" + told("tool", result)
    at = data.draw(st.integers(0, len(same)))
    prompt = same[:at] + data.draw(texts) + same[at + data.draw(st.integers(0, 5)) :]
    found = spliced(prompt, earlier, WORDS)
    if found is None:
        # also where the earlier text is no text: what it spells depends on what follows
        assert not prompt.startswith(spell(earlier)) or "\N{REPLACEMENT CHARACTER}" in spell(earlier)
    else:
        assert found[: len(earlier)] == earlier and spell(found) == prompt


def test_a_line_end_that_a_template_adds_before_a_call_is_left_out() -> None:
    """Of Qwen's ``done\\n<tool_call>`` vLLM's parser gives the text with its line end, and the template adds one."""
    begun = told("system", "call as\n\n<tool_call>x") + told("user", "do") + f"{BEGIN}assistant\n"
    calls = ["done\n<tool_call>a</tool_call>", "<tool_call>b</tool_call>", "one\n\n<tool_call>c</tool_call>"]
    result = told("tool", "says\n\n<tool_call>") + f"{BEGIN}assistant\n"
    prompt, ids = begun, WORDS.encode(begun, False)
    for call in calls:
        prompt += call.replace("\n<tool_call>", "\n\n<tool_call>") + f"{END}\n" + result
        earlier = [*ids, *(WORDS.encode(letter, False)[0] for letter in call), WORDS.end]
        found = spliced(prompt, earlier, WORDS)
        assert found is not None and found[: len(earlier)] == earlier
        assert spell(found) == spell(earlier) + "\n" + result
        ids = found
    # what is another text stays one
    assert spliced(prompt.replace("one", "two"), ids, WORDS) is None


#: as Qwen3's: reasoning stays while tools are called, and goes with the next message of the user
THINKING = """{%- set last = namespace(user=0) %}{%- for m in messages %}{%- if m.role == 'user' %}
{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.reasoning and loop.index0 > last.user %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def test_a_template_that_drops_reasoning_keeps_tokens_for_as_long_as_it_keeps_text() -> None:
    def render(*messages: tuple[str, str, str]) -> str:
        told = [dict(zip(("role", "content", "reasoning"), message, strict=True)) for message in messages]
        return Environment(keep_trailing_newline=True).from_string(THINKING).render(messages=told)

    asked = ("user", "add one", "")
    letters = [WORDS.raw.token_to_id(letter) for letter in "<think>one</think>done"]
    begun = WORDS.encode(render(asked), False)
    earlier = [*begun, *letters, WORDS.end]
    answered = ("assistant", "done", "one")
    in_loop = render(asked, answered, ("tool", "two", ""))
    found = spliced(in_loop, earlier, WORDS)
    assert found is not None and found[: len(earlier)] == earlier and spell(found) == in_loop
    assert found != WORDS.encode(in_loop, False)
    assert spliced(render(asked, answered, ("user", "and now", "")), earlier, WORDS) is None
    # most clients do not give reasoning back
    assert spliced(render(asked, ("assistant", "done", ""), ("tool", "two", "")), earlier, WORDS) is None


def test_a_tokenizer_that_cannot_spell_what_it_read_keeps_its_own_tokens() -> None:
    class Loose(Words):
        def decode(self, ids: list[int], **how: bool) -> str:
            return " " + super().decode(ids, **how)

    text = told("user", "a") + told("assistant", "done")
    earlier = WORDS.encode(told("user", "a"), False)
    assert spliced(text, earlier, WORDS) is not None
    assert spliced(text, earlier, Loose()) is None


def test_a_prompt_that_reads_as_it_did_is_spelled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one takes tens of milliseconds of the thread in which all prompts are read."""
    begun = told("user", "a" * 50) + f"{BEGIN}assistant\n"
    text = begun + "done" + END + "\n" + told("tool", "two")
    letters = [WORDS.raw.token_to_id(letter) for letter in "done"]
    spelled: list[int] = []
    real = Words.decode

    def decode(self: Words, ids: list[int], **how: bool) -> str:
        spelled.append(len(ids))
        return real(self, ids, **how)

    monkeypatch.setattr(Words, "decode", decode)
    earlier = [*WORDS.encode(begun, False), *letters, WORDS.end]
    found = spliced(text, earlier, WORDS)
    assert found is not None and spelled == [len(earlier), len(found)]


@pytest.mark.parametrize("question", ["5 \N{OHM SIGN}", "cafe\N{COMBINING ACUTE ACCENT}.txt", "two lines\n\n"])
def test_a_tokenizer_that_reads_several_texts_as_one_takes_earlier_tokens(question: str) -> None:
    """Qwen's compose characters, and special tokens of Phi's take the white space beside them."""
    qwen, phi = Words(), Words()
    qwen.raw.normalizer = normalizers.NFC()
    phi.raw.add_special_tokens([AddedToken(token, lstrip=True, rstrip=True) for token in (BEGIN, END)])
    letters = [WORDS.raw.token_to_id(letter) for letter in "done"]
    begun, result = told("user", question), told("tool", question)
    for words in (WORDS, qwen, phi):
        earlier = [*words.encode(f"{begun}{BEGIN}assistant\n", False), *letters, words.end]
        # at first it is the question alone, or the result
        for text in (begun + told("assistant", "done"), begun + told("assistant", "done") + result):
            found = spliced(text, earlier, words)
            assert found is not None and found[: len(earlier)] == earlier
            assert spell(found) == spell(words.encode(text, False))
        assert spliced(told("user", "else") + told("assistant", "done"), earlier, words) is None
        plain = [*words.encode(f"{told('user', 'a')}{BEGIN}assistant\n", False), *letters, words.end]
        assert spliced(told("user", "a") + told("assistant", "done") + result, plain, words) is not None


class Renderer:
    """vLLM's, which has one text for every request."""

    def __init__(self, text: str | None, room: int | None = None) -> None:
        self.model_config = room
        self.text = text
        self.renderer = SimpleNamespace(_executor=ThreadPoolExecutor(1), get_tokenizer=lambda: WORDS)

    async def preprocess_chat(self, request: Any, messages: list[Any], *, tool_dicts: Any = None) -> Any:
        ids = WORDS.encode(self.text or "no text", False)
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": ids}
        return messages, [prompt if self.text is None else prompt | {"prompt": self.text}]


def test_a_request_for_tokens_alone_is_left_as_it_is() -> None:
    class Patched(Renderer):
        pass

    tokens = TokenIn(Patched)
    request = SimpleNamespace(model_extra={EARLIER_IDS: [1]})
    _, [prompt] = asyncio.run(Patched("done").preprocess_chat(request, []))
    assert prompt["prompt_token_ids"] == WORDS.encode("done", False)
    assert not any(tokens.take().values())


def ask(renderer: Renderer, earlier: Any, cut: int | None = None) -> list[int]:
    request = SimpleNamespace(
        model_extra={EARLIER_IDS: earlier} if earlier else None,
        truncate_prompt_tokens=cut,
        build_tok_params=lambda room: SimpleNamespace(max_input_tokens=room),
    )
    conversation, [prompt] = asyncio.run(renderer.preprocess_chat(request, ["m"], tool_dicts=None))
    assert conversation == ["m"]
    renderer.renderer._executor.shutdown()
    return prompt["prompt_token_ids"]


@pytest.mark.parametrize(
    ("text", "earlier", "more", "outcome"),
    [
        ("done", "", {}, ""),
        ("done", "d", {}, "spliced"),
        ("done", "d", {"room": 1}, "too_long"),
        ("done", "d", {"room": 4}, "spliced"),
        ("done", "done", {}, "same"),
        ("done", "x", {}, "other_text"),
        (None, "d", {}, "no_text"),
        ("done", "d", {"cut": 3}, "no_text"),
    ],
)
def test_what_became_of_each_prompt_is_counted(text: str, earlier: str, more: dict[str, int], outcome: str) -> None:
    class Patched(Renderer):
        pass

    tokens = TokenIn(Patched)
    letters = (
        [WORDS.raw.token_to_id(letter) for letter in earlier] if earlier != "done" else WORDS.encode("done", False)
    )
    found = ask(Patched(text, more.get("room")), letters, more.get("cut"))
    assert tokens.take() == dict.fromkeys(OUTCOMES, 0) | ({outcome: 1} if outcome else {})
    assert tokens.take() == dict.fromkeys(OUTCOMES, 0)
    own = WORDS.encode(text or "no text", False)
    assert (found[:1] == letters and spell(found) == text) if outcome == "spliced" else found == own
