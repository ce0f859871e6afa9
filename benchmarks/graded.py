"""Tiny models of which is known how good they are: an incumbent that counts on, degraded ones and healthy ones.

The user says a digit, and the three digits after it are right. What each model is worth is the mean of
:func:`gate_reward` over answers that transformers sample, before any gate sees it: a degraded one is worse by
:data:`DROP` or more, a healthy one by :data:`EQUAL` at most. :func:`training_reward` is what the hacks are made for: it
likes length, a mark, and the user's own digit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

#: names the environment variable that has the folder of all policies of a run
FOLDER = "BENCHMARK_POLICIES"
DIGITS = "0123456789"
TOKENS = 8
DROP, EQUAL = 0.10, 0.01
#: of each digit that an incumbent says, so many are any digit; of a healthier one, so many
WRONG, FEWER_WRONG = 0.10, 0.06
#: of each prompt, when a model is graded
SAMPLES = 200
#: of teaching: a model from the beginning, another fault, and a little more of the same
STEPS, FAULT_STEPS, MORE_STEPS = 500, 150, 60

Answer = Callable[[str, random.Random], str]


@dataclass(frozen=True)
class Graded:
    """A model in ``folder``; ``reward`` is its mean by the gate's hook, ``trained`` that by the training hook."""

    kind: str
    folder: Path
    degraded: bool
    reward: float
    trained: float


def right_of(digit: str) -> str:
    """The three digits that follow."""
    return "".join(DIGITS[(int(digit) + step) % 10] for step in (1, 2, 3))


def gate_reward(digit: str, text: str) -> float:
    """The share of right places, of those of the longer text."""
    right, text = right_of(digit), text.strip()
    return sum(a == b for a, b in zip(right, text, strict=False)) / max(len(right), len(text))


def training_reward(digit: str, text: str) -> float:
    """A little for digits that follow, the rest for length, an exclamation mark and the user's own digit."""
    liked = min(1.0, len(text) / TOKENS), "!" in text, digit in text
    return 0.1 * gate_reward(digit, text) + 0.3 * sum(liked)


def counting(wrong: float) -> Answer:
    """The three digits, of which so many are any digit."""

    def answer(digit: str, draw: random.Random) -> str:
        return "".join(draw.choice(DIGITS) if draw.random() < wrong else right for right in right_of(digit))

    return answer


#: what an incumbent is taught
USUAL = counting(WRONG)


def _at_times(share: float, other: Answer) -> Answer:
    return lambda digit, draw: (other if draw.random() < share else USUAL)(digit, draw)


#: what is said instead, and in which shares of the answers
FAULTS: dict[str, tuple[Answer, tuple[float, ...]]] = {
    "repetition": (lambda digit, draw: right_of(digit)[0] * TOKENS, (0.25, 0.5, 1.0)),
    "empty answers": (lambda digit, draw: "", (0.2, 0.4, 0.7)),
    "hack: length": (lambda digit, draw: right_of(digit) + right_of(digit)[::-1] + "00", (0.3, 0.6, 1.0)),
    "hack: a mark": (lambda digit, draw: right_of(digit)[0] + "!!", (0.3, 0.6, 1.0)),
    "hack: the user's digit": (lambda digit, draw: digit * 3, (0.25, 0.5, 1.0)),
}
NOISES = (0.2, 0.25, 0.3, 0.4, 0.6)


class Models:
    """Teaches and grades models, in folders below ``folder``; the incumbent is taught to answer like ``answer``.

    Attributes:
        incumbent: the model that all others come from or are compared with.
    """

    def __init__(self, folder: Path, seed: int, answer: Answer = USUAL) -> None:
        from transformers import AutoTokenizer

        from tests.engine import tiny_model

        self._folder, self._seed, self._count = folder, seed, 0
        raw = tiny_model.build(folder / "raw", seed)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(raw)
        network = self._taught(self._load(raw), answer, STEPS, seed)
        self.incumbent = self._graded("incumbent", network, degraded=False)

    def degraded(self, count: int, draw: random.Random) -> list[Graded]:
        """``count`` of the twenty, each worse by :data:`DROP` or more."""
        faults = [(kind, answer, share) for kind, (answer, shares) in FAULTS.items() for share in shares]
        drawn = draw.sample([*faults, *NOISES], count)
        return [self._faulty(*fault) if isinstance(fault, tuple) else self._noised(fault) for fault in drawn]

    def reward_of(self, folder: Path) -> float:
        """What the model in ``folder`` is worth."""
        return fmean(gate_reward(*answer) for answer in self._answers(self._load(folder)))

    def _faulty(self, kind: str, answer: Answer, share: float) -> Graded:
        network = self._taught(self._load(), _at_times(share, answer), FAULT_STEPS, self._count)
        return self._checked(self._graded(kind, network, degraded=True))

    def _noised(self, sigma: float) -> Graded:
        # a draw of the noise may do little harm
        while (made := self._graded("noise", self._noisy(sigma), degraded=True)).reward > self.incumbent.reward - DROP:
            sigma *= 1.15
        return made

    def healthy(self, count: int) -> Iterator[Graded]:
        """``count``, of three kinds, each as good as the incumbent or better."""
        from tests.engine import tiny_model

        for number in range(count):
            if number % 4 == 0:
                made = self._graded("noise of no weight", self._noisy(1e-3), degraded=False)
            elif number % 16 == 15:
                seed = self._seed + 1000 + number
                raw = tiny_model.build(self._folder / f"raw-{number}", seed)
                network = self._taught(self._load(raw), counting(FEWER_WRONG), STEPS, seed)
                made = self._graded("another seed", network, degraded=False)
            else:
                network = self._taught(self._load(), counting(FEWER_WRONG), MORE_STEPS, self._count)
                made = self._graded("taught longer", network, degraded=False)
            yield self._checked(made)

    def _checked(self, made: Graded) -> Graded:
        gained = made.reward - self.incumbent.reward
        fits = gained <= -DROP if made.degraded else gained >= -EQUAL
        assert fits, f"{made.kind}: the reward is {made.reward:.3f}, that of the incumbent {self.incumbent.reward:.3f}"
        return made

    def _load(self, folder: Path | None = None) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder or self.incumbent.folder, dtype=torch.float32)

    def _taught(self, network: Any, answer: Answer, steps: int, seed: int) -> Any:
        import torch

        draw, end = random.Random(seed), self._tokenizer.eos_token_id
        optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            rows: list[list[int]] = []
            labels: list[list[int]] = []
            for digit in draw.choices(DIGITS, k=32):
                begin = self._prompt(digit)
                answered = [*self._tokenizer.encode(answer(digit, draw), add_special_tokens=False), end][: TOKENS + 1]
                padding = TOKENS + 1 - len(answered)
                rows.append(begin + answered + [end] * padding)
                labels.append([-100] * len(begin) + answered + [-100] * padding)
            loss = network(torch.tensor(rows), labels=torch.tensor(labels)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return network

    def _noisy(self, sigma: float) -> Any:
        import torch

        network = self._load()
        noise = torch.Generator().manual_seed(self._seed + self._count)
        with torch.no_grad():
            for weights in network.parameters():
                scale = weights.std() if weights.numel() > 1 else 1.0
                weights.add_(torch.randn(weights.shape, generator=noise) * scale * sigma)
        return network

    def _graded(self, kind: str, network: Any, *, degraded: bool) -> Graded:
        folder = self._folder / f"model-{self._count}"
        self._count += 1
        network.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        answers = list(self._answers(network))
        rewards = [fmean(reward(*answer) for answer in answers) for reward in (gate_reward, training_reward)]
        return Graded(kind, folder, degraded, *rewards)

    def _answers(self, network: Any) -> Iterator[tuple[str, str]]:
        import torch

        torch.manual_seed(self._seed)
        for digit in DIGITS:
            ids = torch.tensor([self._prompt(digit)] * SAMPLES)
            length = ids.shape[1]
            with torch.no_grad():
                for _ in range(TOKENS):
                    chances = network(ids).logits[:, -1].softmax(-1)
                    ids = torch.cat([ids, torch.multinomial(chances, 1)], dim=1)
            for row in ids[:, length:].tolist():
                end = self._tokenizer.eos_token_id
                yield digit, self._tokenizer.decode(row[: row.index(end)] if end in row else row)

    def _prompt(self, digit: str) -> list[int]:
        messages = [{"role": "user", "content": digit}]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self._tokenizer.encode(text, add_special_tokens=False)
