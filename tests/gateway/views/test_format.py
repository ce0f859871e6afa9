"""Numbers, names and tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gateway.views import format

SIZES = st.floats(min_value=0, max_value=1e12)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (-1.0, "0.0 s"),
        (0.42, "0.4 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1m 00s"),
        (192.0, "3m 12s"),
        (7500.0, "2h 05m"),
        (273600.0, "3d 04h"),
    ],
)
def test_seconds(value: float, written: str) -> None:
    assert format.seconds(value) == written


@pytest.mark.parametrize(
    ("value", "written"), [(0, "0"), (999, "999"), (9999, "9999"), (12345, "12.3k"), (4.5e6, "4.5M"), (2.1e9, "2.1G")]
)
def test_number(value: float, written: str) -> None:
    assert format.number(value) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.0, "0"), (0.41234, "0.412"), (43.14, "43.1"), (-2.5, "-2.5"), (5678.9, "5679"), (1.24e-6, "1.24e-06")],
)
def test_measure(value: float, written: str) -> None:
    assert format.measure(value) == written


def test_blanks_of_any_language_are_blanks() -> None:
    assert format.printable("très\u00a0: 1\u202f000\u3000円\u202e\x1b") == "très : 1 000 円\ufffd\ufffd"


@given(
    st.lists(st.text(alphabet="aé界\U0001f600\u0301", max_size=6), min_size=1, max_size=4), st.sampled_from(["", ">"])
)
def test_the_columns_of_a_table_stand_below_each_other(names: list[str], side: str) -> None:
    table = format.table_of({f"{side}name": lambda name: name + "|", "end": lambda _: "|"}, names)
    lines = format.text_lines(table, len(names))
    assert len({cell_len(line) for line in lines[1:]}) == 1


def test_percent_and_curve() -> None:
    assert (format.curve([0, 0, 7, 7], 2), format.curve([5], 9), format.curve([1, 2, 1], 9)) == ("▁█", "▁", "▁█▁")
    assert (format.percent(1, 3), format.percent(0, 0)) == ("33%", format.UNKNOWN)
    assert (format.percent(799, 800), format.percent(1, 800)) == (">99%", "<1%")


@given(SIZES, SIZES, st.integers(2, 60))
def test_a_bar_has_its_width_and_is_full_only_of_a_whole(done: float, total: float, width: int) -> None:
    bar = format.bar(done, total, width)
    assert cell_len(bar) == width
    if total > 0:
        assert ("░" not in bar) == (done >= total)
        assert ("█" in bar) == (done / total > 0)


@given(st.text(), st.integers(0, 40))
def test_short_is_no_wider_and_commands_nothing(text: str, width: int) -> None:
    shortened = format.short(text, width)
    assert cell_len(shortened) <= width
    assert shortened.isprintable()


def test_short_keeps_what_fits_and_marks_what_is_cut() -> None:
    assert format.short("abcdef", 6) == "abcdef"
    assert format.short("abcdefg", 6) == "abcde…"
    assert format.short("日本語の名前", 5) == "日本…"


def test_a_table_as_text_aligns_its_columns() -> None:
    rows = [format.Row(("7", "a")), format.Row(("12", "bcd")), format.Row(("1", "e"))]
    text = format.text_lines(format.Table((">count", "name"), rows), 2)
    assert text == ["count  name", "    7  a", "   12  bcd", "... and 1 more"]
