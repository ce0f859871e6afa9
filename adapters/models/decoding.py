"""A model's tokenizer as the way back from token ids to text. Invariant: what the model sampled is read with its own
tokenizer, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adapters.models.resolve import resolve_model
from swarm.errors import ConfigError


def decoder(model: str) -> Callable[..., str]:
    """``decode(ids, special=...)`` of the model's tokenizer; ``special`` tokens are kept or left out.

    Args:
        model: as in a job, see :func:`adapters.models.resolve_model`.

    Raises:
        ConfigError: there is no such model, it has no tokenizer, or transformers is not installed.
    """
    place = resolve_model(model)
    try:
        from transformers import AutoTokenizer
    except ImportError as exc:
        raise ConfigError(
            "reading tokens needs transformers: run this where the engine is installed, or pip install transformers"
        ) from exc
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError, ImportError) as exc:
        # of an ImportError too: some tokenizers need a package of their own, which it names
        said = str(exc).strip().splitlines() or [type(exc).__name__]
        raise ConfigError(f"model {place} gives no tokenizer: {said[0]}; name another with --tokenizer") from exc

    def decode(ids: list[int], *, special: bool) -> str:
        return tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)

    return decode
