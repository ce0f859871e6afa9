"""The trainer's "dataset": as many empty prompts as the run has groups, because the real ones come over the link."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset


class SwarmPrompts(Dataset):
    """``total_training_steps * train_batch_size`` place-holders; verl gives each a uid, which names one group."""

    def __init__(self, data_files: Any, tokenizer: Any, processor: Any, config: Any, max_samples: int = -1) -> None:
        self._length = int(data_files[0])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        # verl's collate function needs one tensor to know the batch size
        return {"raw_prompt": [], "index": index, "dummy_tensor": torch.tensor([index])}
