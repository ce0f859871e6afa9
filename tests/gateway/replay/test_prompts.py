from itertools import islice
from pathlib import Path

import pytest

from gateway.replay.prompts import ordered, read_prompts
from swarm.errors import ConfigError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(f'{{"question": "q{n}?"}}\n' for n in range(20)))
    return path


def test_a_question_becomes_a_user_message(data: Path) -> None:
    first = read_prompts(data)[0]
    assert (first.text, first.messages) == ("q0?", [{"role": "user", "content": "q0?"}])


def test_messages_are_sent_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n')
    [prompt] = read_prompts(path)
    assert prompt.text == "u"
    assert [message["role"] for message in prompt.messages] == ["system", "user"]


def test_no_prompts_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(tmp_path / "q.jsonl")


def test_each_epoch_has_every_prompt_in_an_order_of_its_own(data: Path) -> None:
    prompts = read_prompts(data)
    texts = [prompt.text for prompt in ordered(prompts, seed=1, epochs=2)]
    assert sorted(texts[:20]) == sorted(texts[20:]) == sorted(prompt.text for prompt in prompts)
    assert texts[:20] != texts[20:]


def test_the_seed_fixes_the_order(data: Path) -> None:
    prompts = read_prompts(data)
    endless = [list(islice(ordered(prompts, seed, None), 50)) for seed in (1, 1, 2)]
    assert endless[0] == endless[1] != endless[2]
