"""Users who send the prompts of ``train.jsonl`` to the gateway, with a progress bar and a report.

python mock_user_request.py --quick
python mock_user_request.py --steps 16 --report runs/report
"""

from __future__ import annotations

import sys
from pathlib import Path

from gateway.replay.senders import HttpSender

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from study.users import Address, main  # noqa: E402


def sender(to: Address) -> HttpSender:
    return HttpSender(to.base_url, "none", {"model": to.model})


if __name__ == "__main__":
    sys.exit(main(sender, HERE / "train.jsonl", "the gateway"))
