"""SmolLM2's GGUF file to a Hugging Face folder: fp32 safetensors, configuration, tokenizer with chat template."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from adapters.models.cache import OnProgress
from swarm.errors import ConfigError


def convert_smollm2(gguf_file: Path, folder: Path, progress: OnProgress) -> None:
    """Write the model in ``gguf_file`` to ``folder``. transformers converts; what it gets wrong is put right here:

    - The pre-tokenizer cuts every digit off by itself, as the model was trained; transformers cuts like GPT-2.
    - A byte that the vocabulary lacks is left out; transformers would put ``<|endoftext|>`` there.
    - ``<|im_end|>`` ends an answer; transformers takes ``<|im_start|>`` for the end.
    - Padding is ``<|endoftext|>``. The file names ``<|im_end|>``, whose embedding would then get no gradient, since
      torch freezes the padding row.

    Raises:
        ConfigError: a package that converts is not installed.
    """
    progress("converting", 0, None, "tensors")
    os.environ.setdefault("TQDM_DISABLE", "1")  # stderr is the caller's
    try:
        from tokenizers import pre_tokenizers
        from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

        source: dict[str, Any] = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
        config: Any = AutoConfig.from_pretrained(**source)
        config.pad_token_id = config.unk_token_id
        model: Any = AutoModelForCausalLM.from_pretrained(**source, config=config, dtype="float32")
        raw: Any = PreTrainedTokenizerFast.from_pretrained(**source)
    except ImportError as exc:
        raise ConfigError(
            "converting a model needs transformers, torch, accelerate and gguf; run `make setup` in a clone, or: "
            f"pip install transformers torch accelerate gguf ({exc})"
        ) from exc
    backend: Any = raw.backend_tokenizer
    backend.model.unk_token = None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    start, end, unknown = raw.convert_ids_to_tokens([config.bos_token_id, config.eos_token_id, config.unk_token_id])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=start,
        eos_token=end,
        pad_token=unknown,
        unk_token=unknown,
        chat_template=raw.chat_template,
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    progress("writing", 0, None, "B")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
