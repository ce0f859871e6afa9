"""A tiny GGUF written by the gguf package itself, converted and read back."""

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.models.gguf_llama import convert, tensor_name, unpermute
from swarm.errors import ConfigError

np = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.numpy")

HIDDEN, HEADS, KV_HEADS, LAYERS, FFN = 16, 4, 2, 1, 32
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "1", "2", "a", "b", "ab", "Ġ", "12"]


def permute(weight: Any, heads: int) -> Any:
    """What llama.cpp's converter does to q and k."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def weights() -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }
    return {f"{name}.weight": random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, tensors: dict[str, Any], architecture: str = "llama", pre: str = "smollm") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def converted(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    original = weights()
    stored = dict(original)
    stored["blk.0.attn_q.weight"] = permute(original["blk.0.attn_q.weight"], HEADS)
    stored["blk.0.attn_k.weight"] = permute(original["blk.0.attn_k.weight"], KV_HEADS)
    folder = tmp_path / "model"
    folder.mkdir()
    convert(write_gguf(tmp_path / "model.gguf", stored), folder, lambda *_: None)
    return original, folder


def test_every_weight_comes_back_under_its_transformers_name(converted: tuple[dict[str, Any], Path]) -> None:
    original, folder = converted
    tensors = safetensors.load_file(folder / "model.safetensors")
    assert {tensor_name(name) for name in original} == set(tensors)
    for name, weight in original.items():
        assert np.array_equal(tensors[tensor_name(name)], weight), name


def test_the_configuration_says_what_the_file_said(converted: tuple[dict[str, Any], Path]) -> None:
    config = json.loads((converted[1] / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (HEADS, KV_HEADS, 4)


def test_the_end_of_a_turn_stops_generation_and_is_not_the_padding(converted: tuple[dict[str, Any], Path]) -> None:
    generation = json.loads((converted[1] / "generation_config.json").read_text())
    tokenizer = json.loads((converted[1] / "tokenizer_config.json").read_text())
    assert TOKENS[generation["eos_token_id"]] == tokenizer["eos_token"] == "<|im_end|>"
    assert generation["pad_token_id"] != generation["eos_token_id"]


def test_digits_are_cut_apart_whatever_the_merges_say(converted: tuple[dict[str, Any], Path]) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(converted[1] / "tokenizer.json"))
    assert tokenizer.encode("ab12<|im_end|>").tokens == ["ab", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("ab 12").ids) == "ab 12"


def test_unpermute_inverts_permute() -> None:
    weight = np.arange(64, dtype=np.float32).reshape(16, 4)
    assert np.array_equal(unpermute(permute(weight, 4), 4), weight)
    assert not np.array_equal(permute(weight, 4), weight)


@pytest.mark.parametrize(
    ("architecture", "pre", "message"), [("qwen2", "smollm", "qwen2"), ("llama", "llama-bpe", "tokenizer")]
)
def test_an_unknown_file_is_refused(tmp_path: Path, architecture: str, pre: str, message: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", weights(), architecture, pre)
    with pytest.raises(ConfigError, match=message):
        convert(path, tmp_path, lambda *_: None)


def test_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"blk\.0\.ssm"):
        tensor_name("blk.0.ssm.weight")


def test_without_the_engine_packages_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ConfigError, match="`make setup` in a clone, or: pip install gguf"):
        convert(tmp_path / "model.gguf", tmp_path, lambda *_: None)
