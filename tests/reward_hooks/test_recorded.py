"""Recorded groups: the shorthands of people, what a program writes, and what is wrong with a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reward_hooks.recorded import RecordedGroup, read_groups
from swarm.errors import ConfigError


def read(folder: Path, *lines: str) -> list[RecordedGroup]:
    file = folder / "groups.jsonl"
    file.write_text("\n".join(lines))
    return list(read_groups(file))


def test_shorthands_become_whole_groups(tmp_path: Path) -> None:
    line = {"prompt": "2+2?", "candidates": ["4", {"text": "five", "finish_reason": "length"}], "rank": [1, 2]}
    [group] = read(tmp_path, json.dumps(line), "", "  ")
    assert group.task.main_query == "2+2?"
    assert group.task.init_messages == [{"role": "user", "content": "2+2?"}]
    assert [one.index for one in group.candidates] == [0, 1]
    assert group.candidates[1].message == {"role": "assistant", "content": "five"}
    assert group.candidates[1].finish_reason == "length"
    assert group.rank == [1, 2]


def test_a_candidate_may_be_the_message_of_an_answer(tmp_path: Path) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    message = {"role": "assistant", "content": [{"type": "text", "text": "4"}], "tool_calls": calls}
    [group] = read(
        tmp_path, json.dumps({"prompt": "2+2?", "candidates": [{"message": message}, {"tool_calls": calls}]})
    )
    of_message, of_calls = group.candidates
    assert (of_message.text, of_message.tool_calls, of_message.message) == ("4", calls, message)
    assert of_calls.message == {"role": "assistant", "content": "", "tool_calls": calls}


def test_written_groups_are_read_again(tmp_path: Path) -> None:
    [group] = read(tmp_path, '{"prompt": "q", "candidates": ["a", "b"]}')
    assert read(tmp_path, group.model_dump_json()) == [group]
    assert group.rank is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: no JSON"),
        ("[]", "must be a JSON object"),
        ('{"candidates": ["a"]}', "add a prompt"),
        ('{"prompt": "q"}', "has no candidates; a hook ranks recorded answers"),
        ('{"messages": [{"role": "user", "content": "q"}]}', "has no candidates"),
        ('{"prompt": "q", "candidates": []}', "candidates"),
        ('{"prompt": "q", "candidates": [1]}', "candidates"),
        (
            '{"prompt": "q", "candidates": ["a", "b"], "rank": [1]}',
            "line 2: rank has 1 numbers for 2 candidates",
        ),
        ('{"prompt": "q", "candidates": ["a"], "rnak": [1]}', "rnak"),
    ],
)
def test_a_wrong_line_is_named(line: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2") as caught:
        read(tmp_path, '{"prompt": "q", "candidates": ["a"]}', line)
    assert words in caught.value.message


def test_a_file_of_windows_is_read(tmp_path: Path) -> None:
    file = tmp_path / "groups.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "q", "candidates": ["a"]}\r\n{"prompt": "r", "candidates": ["a"]}\r\n')
    assert [group.task.main_query for group in read_groups(file)] == ["q", "r"]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        list(read_groups(tmp_path / "none.jsonl"))
