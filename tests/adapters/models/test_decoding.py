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
    with pytest.raises(ConfigError, match="has no usable tokenizer"):
        decoder(str(tmp_path))


@pytest.mark.parametrize(
    ("error", "said"),
    [(ImportError("\nit needs sentencepiece\nand more"), "it needs sentencepiece;"), (OSError(), "OSError;")],
    ids=["a package is missing", "without a word"],
)
def test_a_tokenizer_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    import transformers

    def fail(place: object, **_: object) -> None:
        raise error

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(ConfigError, match=f"has no usable tokenizer: {said} name another"):
        decoder(str(tmp_path))
