"""The cocktail as it ships: two agents in processes of their own, one of which is killed and comes back."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path


def check_readme(folder: Path, said: str) -> None:
    """What the commands of its readme leave; see ``test_readmes.py``."""
    tasks: dict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in (folder / "runs" / "episodes.jsonl").read_text().splitlines():
        row = json.loads(line)
        tasks[row["step"]][row["client_uuid"]].add(row["task_id"])
    batches = [{client: len(ids) for client, ids in sorted(tasks[step].items())} for step in sorted(tasks)]
    assert len(batches) >= 6
    assert {"sums": 2, "translation": 3} in batches
    # without the killed one, batches were whole all the same
    assert {"translation": 5} in batches
    assert all(sum(batch.values()) == 5 for batch in batches)
    # it came back
    alone = batches.index({"translation": 5})
    assert any("sums" in batch for batch in batches[alone + 1 :])
    assert said.index("killed sums") < said.index("sums is back")
