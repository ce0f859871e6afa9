"""An adapter (LoRA) against all weights, and its versions side by side in one engine, with the real verl and vLLM.

``python -m benchmarks lora``: two arms in turn, one engine at a time, each with ``--swaps`` training steps on what its
vLLM sampled. Measured are, of each arm, the seconds for which vLLM holds its requests at a sync, the bytes that it gets
and the memory of all processes of the engine (PSS); and of the adapter's

* **log-probabilities over HTTP**: after each swap, ``--prompts`` prompts, longer than a block of vLLM's cache, are
  asked at once of three sides: the newest version, the first one, which is kept, and the model below. What each of
  them sampled is compared with transformers and PEFT on the exported adapters: a mismatch is an answer with a token
  whose log-probability is off by more than 1e-3;
* **decoding**: 16 answers of 64 tokens at once, of the model below, of the newest version, and half of each version, in
  turn: the ratios to the model below of the same round, by their median.

The default model is random, with SmolLM2-135M's proportions and ``--layers`` of its 30 layers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import psutil

from benchmarks.training import LAYERS, write_model
from swarm.job import TrainJob
from swarm.kept_adapters import BASE, adapter_folder, kept_model
from swarm.link.messages import RolloutReady
from swarm.tokens import ModelCall, TrainBatch, TrainGroup, Trajectory

if TYPE_CHECKING:
    from tests.engine.engine_process import EngineProcess

ARMS = ("lora", "full")
#: A version's name beside :data:`BASE`; the newest has none.
KEPT = 1
SIDES: tuple[int | None, ...] = (None, KEPT, BASE)
ALLOWED = 1e-3
PROMPT_TOKENS, ANSWER_TOKENS = 160, 16
DECODED, DECODED_TOKENS = 16, 64
BOOT_SECONDS, STEP_SECONDS = 900.0, 900.0


@dataclass
class Arm:
    """What was measured of one way to train."""

    sync_s: list[float] = field(default_factory=list[float])
    sync_bytes: list[int] = field(default_factory=list[int])
    memory_mib: list[float] = field(default_factory=list[float])
    answers: int = 0
    mismatches: int = 0
    farthest: float = 0.0
    decoded: list[dict[str, float]] = field(default_factory=list[dict[str, float]])


class Reference:
    """transformers and PEFT: the log-probabilities of what each side sampled.

    Args:
        model: folder of the model below.
    """

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = str(model)
        self._network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def take(self, side: int | None, checkpoint: Path, folder: Path) -> None:
        """Export the side's adapter to ``folder``, and have it as it is there."""
        from peft import PeftModel

        from adapters.verl.export import exported

        with exported(checkpoint, folder, self._model):
            pass

        if not isinstance(self._network, PeftModel):
            self._network = PeftModel.from_pretrained(self._network, folder, adapter_name=str(side))
            return
        if str(side) in self._network.peft_config:
            self._network.delete_adapter(str(side))
        self._network.load_adapter(folder, str(side))
        self._network.eval()

    def log_probs(self, side: int | None, rows: list[list[int]]) -> Any:
        """Of the last :data:`ANSWER_TOKENS` of each row, [rows, tokens]; all rows have one length."""
        import torch

        ids = torch.tensor(rows)
        if side != BASE:
            self._network.set_adapter(str(side))
        with torch.no_grad(), self._network.disable_adapter() if side == BASE else contextlib.nullcontext():
            logits = self._network(ids, logits_to_keep=ANSWER_TOKENS + 1).logits[:, :-1].log_softmax(-1)
        return logits.gather(-1, ids[:, -ANSWER_TOKENS:, None])[..., 0]


class Users:
    """Ask vLLM over HTTP, with random prompts."""

    def __init__(self, http: httpx.AsyncClient, vocabulary: int, seed: int) -> None:
        self._http = http
        self._vocabulary = vocabulary
        self._draw = random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        return [self._draw.randrange(2, self._vocabulary) for _ in range(tokens)]

    async def ask(self, ready: RolloutReady, side: int | None, prompt: list[int], tokens: int) -> ModelCall:
        model = ready.model if side is None else kept_model(ready.model, side)
        fixed = {"temperature": 1.0, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, **fixed}
        answer = (await self._http.post(f"http://{ready.addresses[0]}/v1/completions", json=body)).raise_for_status()
        [choice] = answer.json()["choices"]
        return ModelCall(
            call_id=uuid.uuid4().hex,
            prompt_ids=prompt,
            response_ids=choice["token_ids"],
            logprobs=choice["logprobs"]["token_logprobs"],
            min_policy_version=ready.policy_version,
            max_policy_version=ready.policy_version,
            finish_reason=choice["finish_reason"],
        )

    async def batch(self, ready: RolloutReady, groups: int = 2, size: int = 4) -> TrainBatch:
        """Answers of the newest version, with rewards by chance."""
        from tests.engine.engine_process import timeline

        async def trajectory(prompt: list[int]) -> Trajectory:
            lines, reward = [timeline(await self.ask(ready, None, prompt, ANSWER_TOKENS))], self._draw.random()
            return Trajectory(episode_uuid=uuid.uuid4().hex, task_id="", reward=reward, timelines=lines, num_calls=1)

        made: list[TrainGroup] = []
        for number in range(groups):
            prompt = self.prompt(32)
            trajectories = await asyncio.gather(*(trajectory(prompt) for _ in range(size)))
            made.append(TrainGroup(task_id=f"task-{number}", trajectories=trajectories))
        return TrainBatch(batch_id=uuid.uuid4().hex, groups=made)

    async def compare(self, ready: RolloutReady, reference: Reference, prompts: int, arm: Arm) -> None:
        """All sides at once."""
        asked = [(side, prompt) for prompt in (self.prompt(PROMPT_TOKENS) for _ in range(prompts)) for side in SIDES]
        calls = await asyncio.gather(*(self.ask(ready, side, prompt, ANSWER_TOKENS) for side, prompt in asked))
        for side in SIDES:
            found = [call for (of, _), call in zip(asked, calls, strict=True) if of == side]
            for some in (found[begin : begin + 10] for begin in range(0, len(found), 10)):
                rows = [[*call.prompt_ids.tolist(), *call.response_ids.tolist()] for call in some]
                log_probs = await asyncio.to_thread(reference.log_probs, side, rows)
                for computed, call in zip(log_probs, some, strict=True):
                    far = float(np.abs(computed.numpy() - call.logprobs).max())
                    arm.answers, arm.farthest = arm.answers + 1, max(arm.farthest, far)
                    arm.mismatches += far > ALLOWED

    async def decode(self, ready: RolloutReady) -> dict[str, float]:
        """Tokens a second by who answers."""
        rates: dict[str, float] = {}
        for name, sides in (("base", (BASE,)), ("one", (None,)), ("two", (None, KEPT))):
            whose = (sides[number % len(sides)] for number in range(DECODED))
            began = time.perf_counter()
            await asyncio.gather(*(self.ask(ready, side, self.prompt(8), DECODED_TOKENS) for side in whose))
            rates[name] = DECODED * DECODED_TOKENS / (time.perf_counter() - began)
        return rates


def _memory_mib(engine: EngineProcess) -> float:
    total = 0
    for process in engine.processes():
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 2**20


async def measure(name: str, arm: Arm, options: argparse.Namespace, run_dir: Path) -> None:
    """One engine from its boot to its last swap."""
    from tests.engine.engine_process import EngineProcess

    fields: dict[str, Any] = {
        "model": str(options.model),
        "device": "cpu",
        "batch_size": 2,
        "num_repeat": 4,
        "max_prompt_length": 256,
        "max_response_length": DECODED_TOKENS,
        "lr": 1e-3 if name == "lora" else 1e-5,
        "total_training_steps": options.swaps + 1,
        "serving": "always",
        "overrides": {
            "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls": "tests.engine.counted_sync.CountedSync"
        },
    }
    if name == "lora":
        fields |= {"lora": {"rank": options.rank}, "save_freq": 1}
    synced, limits = run_dir / "synced.txt", httpx.Limits(max_connections=64)
    async with (
        EngineProcess(TrainJob.model_validate(fields), run_dir) as engine,
        httpx.AsyncClient(timeout=600, limits=limits) as http,
    ):
        users, ready = Users(http, options.vocabulary, options.seed), await engine.expect(RolloutReady, BOOT_SECONDS)
        reference = await asyncio.to_thread(Reference, options.model) if name == "lora" else None
        for step in range(1, options.swaps + 1):
            before = len(synced.read_text().split())
            result, following = await engine.train(await users.batch(ready), STEP_SECONDS)
            assert following is not None
            ready = following
            arm.sync_s.append(result.metrics["timing_s/update_weights"] + result.metrics["timing_s/pause"])
            arm.sync_bytes.append(sum(map(int, synced.read_text().split()[before:])))
            arm.memory_mib.append(_memory_mib(engine))
            print(f"{name}: swap {step} of {options.swaps}", file=sys.stderr, flush=True)
            if reference is None:
                continue
            folders = {None: run_dir / f"newest-{step}"} | (
                {KEPT: adapter_folder(run_dir, KEPT)} if step == KEPT else {}
            )
            for side, folder in folders.items():
                # the engine takes a server that is silent for gone
                await asyncio.to_thread(reference.take, side, run_dir / "checkpoints" / f"global_step_{step}", folder)
            await users.compare(ready, reference, options.prompts, arm)
        if reference is not None:
            arm.decoded += [await users.decode(ready) for _ in range(options.decodings)]


def summary(arm: Arm) -> dict[str, float]:
    return {
        "sync_s": round(statistics.median(arm.sync_s), 4),
        "sync_mb": round(statistics.median(arm.sync_bytes) / 1e6, 4),
        "memory_mib": round(max(arm.memory_mib), 1),
    }


def report(arms: Mapping[str, Arm]) -> dict[str, Any]:
    """The figures of each arm, those of the adapter beside all weights, and of its versions side by side."""
    arm, sides = arms["lora"], {name: summary(arm) for name, arm in arms.items()}
    decoded = {name: statistics.median(rates[name] for rates in arm.decoded) for name in arm.decoded[0]}
    return sides | {
        "ratios": {name: round(sides["lora"][name] / sides["full"][name], 4) for name in sides["lora"]},
        "answers": arm.answers,
        "mismatches": arm.mismatches,
        "largest_difference": arm.farthest,
        "decode_tokens_s": {name: round(rate, 1) for name, rate in decoded.items()},
        "decode_ratios": {
            name: round(statistics.median(rates[name] / rates["base"] for rates in arm.decoded), 3)
            for name in ("one", "two")
        },
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="folder of a model; default: random")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the default model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--swaps", type=int, default=20, help="of each engine")
    parser.add_argument("--prompts", type=int, default=50, help="after each swap of the adapter, each for three sides")
    parser.add_argument("--decodings", type=int, default=5, help="rounds of them, in turn")
    parser.add_argument("--rounds", type=int, default=1, help="engines of each arm, in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the report, with all samples, there")


def run(options: argparse.Namespace) -> None:
    arms = {name: Arm() for name in ARMS}
    with tempfile.TemporaryDirectory() as place:
        if options.model is None:
            options.model = write_model(Path(place) / "model", options.layers)
            _write_tokenizer(options.model)
        config = json.loads((options.model / "config.json").read_text())
        options.vocabulary = config["vocab_size"]
        for number in range(options.rounds):
            for name, arm in arms.items():
                asyncio.run(measure(name, arm, options, Path(place) / f"{number}-{name}"))
        about = {
            "model": options.model.name,
            "layers": config["num_hidden_layers"],
            "rank": options.rank,
            "load": os.getloadavg()[0],
        }
    found = about | report(arms)
    print(json.dumps(found, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(found | {"runs": {name: asdict(arm) for name, arm in arms.items()}}) + "\n")


def _write_tokenizer(model: Path) -> None:
    """With a word for each token of the vocabulary: verl lets vLLM sample no others."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    size = json.loads((model / "config.json").read_text())["vocab_size"]
    words = {"<eos>": 0, "<pad>": 1} | {f"w{number}": number for number in range(2, size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(model)
