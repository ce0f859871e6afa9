from pathlib import Path

import pytest

from adapters.models import decoder
from swarm.errors import ConfigError

pytest.importorskip("transformers", reason="needs the cpu extra")


def test_text_comes_back_with_and_without_special_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<end>": 0, "so": 1, "it": 2}
    raw = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    decode = decoder(str(tmp_path))
    assert decode([1, 2, 0], special=False) == "so it"
    assert decode([1, 2, 0], special=True) == "so it <end>"


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="gives no tokenizer"):
        decoder(str(tmp_path))
