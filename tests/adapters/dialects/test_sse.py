"""Server-sent events: wherever the bytes are cut and however lines end, the same events come out."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.dialects.sse import SseDecoder, whole_events
from swarm.errors import UpstreamError

EVENTS = ["one", '{"text": "\u2028 is no end of a line"}', "two\nlines", "last"]


def stream(end: str) -> bytes:
    events = [end.join(f"data: {line}" for line in event.split("\n")) for event in EVENTS]
    return (f": a comment{end}{end}" + "".join(f"event: name{end}{event}{end}{end}" for event in events)).encode()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@given(data=st.data())
def test_cuts_change_nothing(end: str, data: st.DataObject) -> None:
    whole = stream(end)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=12)))
    decoder = SseDecoder()
    # after a CR the decoder must see whether LF follows
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)] + [b":"]
    assert [event for part in parts for event in decoder.feed(part)] == EVENTS


@given(ends=st.lists(st.sampled_from(["\n", "\r\n"]), min_size=6, max_size=6), cut=st.integers(0, 60))
def test_ends_of_lines_may_be_mixed(ends: list[str], cut: int) -> None:
    lines = ["data: a", "", "data: b", "data: c", "", ":"]
    raw = "".join(line + end for line, end in zip(lines, ends, strict=True)).encode()
    decoder = SseDecoder()
    assert [*decoder.feed(raw[:cut]), *decoder.feed(raw[cut:])] == ["a", "b\nc"]


@pytest.mark.anyio
async def test_what_is_no_stream_of_events_is_not_gathered_without_end() -> None:
    taken = 0

    async def upstream() -> AsyncIterator[bytes]:
        nonlocal taken
        yield b"data: 1\n\n"
        for _ in range(80):
            taken += 1
            yield bytes(2**20)

    events = whole_events(upstream())
    assert await anext(events) == b"data: 1\n\n"
    with pytest.raises(UpstreamError, match="none within 64 MiB"):
        await anext(events)
    assert taken == 65


@pytest.mark.parametrize(
    "part",
    [bytes(2**20), b"data: " + bytes(2**20) + b"\n", b"data:\n" * (2**20 // 6 + 1)],
    ids=["one line", "many lines", "many lines without text"],
)
def test_an_event_without_an_end_is_not_gathered_without_end(part: bytes) -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: 1\n\n") == ["1"]
    for _ in range(63):
        assert decoder.feed(part) == []
    with pytest.raises(UpstreamError, match="none within 64 MiB"):
        for _ in range(2):
            decoder.feed(part)
