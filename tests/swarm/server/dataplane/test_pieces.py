"""Text lengths of tokens: they spell the content, or there are none."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.server.dataplane.answers import pieces_of
from tests.standins.vllm import plain
from tests.swarm.server.conftest import Rig

pytestmark = pytest.mark.anyio


def pieces(content: str | None, tokens: list[bytes]) -> list[int] | None:
    return pieces_of(content, [list(token) for token in tokens])


def test_what_ends_a_text_is_no_part_of_it() -> None:
    assert pieces("one two", [b"one", b" two", b"</s>"]) == [3, 4]
    # a stop string that began within a token
    assert pieces("one", [b"on", b"e STOP"]) == [2, 1]


def test_a_character_counts_for_the_token_that_completes_it() -> None:
    first, second = "é".encode()[:1], "é".encode()[1:]
    assert pieces("aéb", [b"a", first, second, b"b"]) == [1, 0, 1, 1]


@pytest.mark.parametrize("content", [None, "", "another text", "one two three"])
def test_tokens_that_do_not_spell_the_text_tell_nothing(content: str | None) -> None:
    assert pieces(content, [b"one", b" two"]) is None


def test_without_tokens_there_is_nothing_to_tell() -> None:
    assert pieces_of("a", []) is None


def test_a_token_whose_bytes_are_not_known_counts_by_its_text() -> None:
    assert pieces_of("aéb", ["a", list("é".encode()), "b"]) == [1, 1, 1]


@given(st.text(), st.lists(st.integers(min_value=0)), st.binary(max_size=8))
def test_the_lengths_add_up(text: str, cuts: list[int], tail: bytes) -> None:
    raw = text.encode(errors="replace")
    ends = sorted({cut % (len(raw) + 1) for cut in cuts} | {0, len(raw)})
    tokens = [raw[a:b] for a, b in itertools.pairwise(ends)] + [tail]
    content = raw.decode()
    lengths = pieces(content, tokens)
    if content:
        assert lengths is not None and sum(lengths) == len(content)


async def test_a_plain_answer_tells_them_to_who_asks(rig: Rig) -> None:
    spelt = {"content": [{"token": f"t{t}", "logprob": -0.1, "bytes": list(f"t{t} ".encode())} for t in (1, 2)]}
    rig.vllm.default = plain([1, 2], logprobs=spelt)
    episode = await rig.claim()
    request = episode.request()
    assert "pieces" not in (await rig.client.send(request)).json()["choices"][0]
    request = episode.request()
    request.headers["x-swarm-pieces"] = "1"
    [answer] = (await rig.client.send(request)).json()["choices"]
    assert (answer["pieces"], answer["message"]["content"], answer["logprobs"]) == ([3, 2], "t1 t2", None)
