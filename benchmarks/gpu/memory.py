"""GPU memory that a job takes, part by part, computed: ``python -m benchmarks.gpu.memory FILE``

FILE is a configuration of ``up`` whose job names one of :data:`MODELS`; its first line says the size of a GPU. Bytes
per GPU, for P weights of the model, A of a LoRA adapter, n GPUs, and T tokens in a micro-batch:

=================  =====================================================================================================
weights            4 P / n: verl trains in fp32; with LoRA 4 (P + A) / n
gradients          4 P / n, in fp32; with LoRA 4 A / n
Adam               8 P / n: two moments in fp32; with LoRA 8 A / n
working copies     (2 + 2 + 4) (P_root + 2 P_layer): the weights in bf16 of what FSDP has whole at one time (the
                   embeddings, one layer, and the next), their gradients in bf16 and, to be summed, in fp32; with LoRA
                   2 (P_root + 2 P_layer)
activations        2 T h L + 2 T (12 h + 3 k + 4 m): the input of each of L layers, and all of the one that is computed
                   again (h wide, k wide for keys, m wide inside), in bf16; and 5 T T + 4 T h for the mask that keeps
                   rows apart, as truth values and twice in bf16, with which torch's attention repeats keys and values
                   for each head (nothing of that with flash attention)
logits             6 T V: logits, log-probabilities and gradient over a vocabulary of V, in bf16
vLLM               gpu_memory_utilization of the GPU: weights 2 P / t with t GPUs per replica, 2 GB for its own
                   activations and CUDA graphs, and the KV cache
KV cache           4 L k / t per token: keys and values in bf16
=================  =====================================================================================================

verl's defaults hold: gradients are freed after a step, layers are checkpointed, nothing is offloaded. While vLLM
serves, weights and Adam stay; while the trainer computes, vLLM sleeps and has given its memory back. 1 GB is CUDA's.
Sources: verl 0.9.1 (``workers/engine/fsdp``, ``trainer/config/engine/fsdp.yaml``), and for activations Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models" (2022), with a gated MLP counted by hand.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from swarm.job import TrainJob

#: Bytes for vLLM's activations and CUDA graphs, and for CUDA's own in both processes; guesses.
VLLM_OWN, CUDA_OWN = 2e9, 1e9
#: Tokens of a micro-batch on a GPU, at least, as ``adapters/verl/config.py`` sets them.
MICRO_BATCH_TOKENS = 16384
_TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
_GPU = re.compile(r"# .* GPUs? of (\d+) GB")


@dataclass(frozen=True)
class Shape:
    """A decoder as its config.json describes it (Qwen2: biases at queries, keys and values); widths in elements."""

    hidden: int
    layers: int
    keys: int
    inner: int
    vocabulary: int
    tied: bool

    @property
    def layer(self) -> int:
        """Weights of one layer."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.keys + self.hidden + 2 * self.keys
        return attention + 3 * self.hidden * self.inner + 2 * self.hidden

    @property
    def root(self) -> int:
        """Weights outside of the layers: embeddings, output, the last norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def weights(self) -> int:
        return self.root + self.layers * self.layer

    def adapter(self, rank: int) -> int:
        """Weights of a LoRA adapter at all linear layers but the output."""
        h, k, m = self.hidden, self.keys, self.inner
        return rank * self.layers * (2 * (h + h) + 2 * (h + k) + 3 * (h + m))


MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": Shape(896, 24, 128, 4864, 151936, tied=True),
    "Qwen/Qwen2.5-1.5B-Instruct": Shape(1536, 28, 256, 8960, 151936, tied=True),
    "Qwen/Qwen2.5-7B-Instruct": Shape(3584, 28, 512, 18944, 152064, tied=False),
}


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    gpu: float
    weights: float
    gradients: float
    adam: float
    working: float
    activations: float
    logits: float
    vllm: float
    vllm_weights: float
    kv_cache: float
    kv_tokens: int

    @property
    def serving(self) -> float:
        """While vLLM serves."""
        return self.weights + self.adam + self.vllm + CUDA_OWN

    @property
    def training(self) -> float:
        """While the trainer computes, and vLLM sleeps."""
        computing = self.working + self.activations + self.logits
        return self.weights + self.gradients + self.adam + computing + CUDA_OWN

    @property
    def fits(self) -> bool:
        return max(self.serving, self.training) <= self.gpu and self.kv_cache > 0

    @property
    def serves_always(self) -> bool:
        """Whether both fit at once, so that vLLM need not sleep."""
        return self.training + self.vllm <= self.gpu

    def lines(self) -> list[str]:
        """For people, in GB."""

        def gb(name: str, value: float) -> str:
            return f"{name} {value / 1e9:.1f}"

        trainer = [gb("weights", self.weights), gb("gradients", self.gradients), gb("Adam", self.adam)]
        computing = [gb("working copies", self.working), gb("activations", self.activations), gb("logits", self.logits)]
        return [
            f"while it trains {self.training / 1e9:.1f}: {', '.join([*trainer, *computing])}",
            f"while it serves {self.serving / 1e9:.1f}: {trainer[0]}, {trainer[2]}, {gb('vLLM', self.vllm)} "
            f"({gb('weights', self.vllm_weights)}, {gb('KV cache', self.kv_cache)} for {self.kv_tokens:,} tokens)",
            "both at once, which serving: always needs: "
            f"{(self.training + self.vllm) / 1e9:.1f}{'' if self.serves_always else ', which does not fit'}",
        ]


def memory(job: TrainJob, shape: Shape, gpu: float) -> Memory:
    """What ``job`` takes of a GPU of ``gpu`` bytes, see the top of this file."""
    ranks, per_replica = job.n_gpu * job.nnodes, job.tensor_parallel_size
    adapter = shape.adapter(job.lora.rank) if job.lora else 0
    trained = adapter or shape.weights
    longest = job.max_prompt_length + job.max_response_length
    tokens = max(longest, int(job.flat_overrides.get(_TOKENS, MICRO_BATCH_TOKENS)))
    h, k, m = shape.hidden, shape.keys, shape.inner
    vllm, own = job.gpu_memory_utilization * gpu, 2 * shape.weights / per_replica
    kv_cache, per_token = vllm - own - VLLM_OWN, 4 * shape.layers * k / per_replica
    return Memory(
        gpu=gpu,
        weights=4 * (shape.weights + adapter) / ranks,
        gradients=4 * trained / ranks,
        adam=8 * trained / ranks,
        working=(2 if adapter else 8) * (shape.root + 2 * shape.layer),
        activations=2 * tokens * h * shape.layers + 2 * tokens * (14 * h + 3 * k + 4 * m) + 5 * tokens**2,
        logits=6 * tokens * shape.vocabulary,
        vllm=vllm,
        vllm_weights=own,
        kv_cache=kv_cache,
        kv_tokens=int(kv_cache / per_token),
    )


def of_file(path: Path) -> Memory:
    """What the job in a configuration of ``up`` takes of each GPU of the size in its first line."""
    text = path.read_text()
    found = _GPU.match(text)
    assert found is not None, f"{path}: the first line is: # MODEL on N GPUs of M GB"
    job = TrainJob.model_validate(yaml.safe_load(text)["job"])
    return memory(job, MODELS[job.model], float(found[1]) * 1e9)


def main() -> None:
    for name in sys.argv[1:]:
        print(name, *(f"  {line}" for line in of_file(Path(name)).lines()), sep="\n")


if __name__ == "__main__":
    main()
