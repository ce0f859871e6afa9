"""``models export``: which checkpoint it takes, what it refuses, and the model that it writes."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli import main
from swarm.job import TrainJob, dump_job
from swarm.server.journal.journal import Journal
from swarm.server.journal.lineage import keep_comparison
from swarm.server.journal.rows import JournalRow, RunRow, StepRow
from swarm.types import StepResult

Usage = namedtuple("Usage", "total used free")


def steps(run_id: str, *numbers: int) -> list[JournalRow]:
    metrics = {"swarm/reward_mean": 0.5, "swarm/episodes": 8.0, "swarm/tasks": 2.0, "swarm/tasks_with_signal": 1.0}
    return [StepRow(run_id, StepResult(step=n, batch_id=f"{run_id}{n}", metrics=metrics, seconds=1.0)) for n in numbers]


def journal(run_dir: Path, job: TrainJob, *rows: JournalRow) -> None:
    async def fill() -> None:
        opened = Journal.open(run_dir / "journal.db")
        opened.append(RunRow("r", dump_job(job)), *rows)
        await opened.close()

    run_dir.mkdir(exist_ok=True)
    asyncio.run(fill())


def saved(run_dir: Path, **rewards: float) -> None:
    """Checkpoints without weights: ``_3=0.5`` is that of step 3."""
    for name, reward in rewards.items():
        actor = run_dir / "checkpoints" / f"global_step{name}" / "actor"
        actor.mkdir(parents=True)
        (actor / "fsdp_config.json").write_text('{"world_size": 1}')
        (actor.parent / "score.json").write_text(json.dumps({"reward_mean": reward}))


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["swarm-gateway", "models", "export", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    output = capsys.readouterr()
    return int(left.value.code or 0), output.out, output.err


def test_what_cannot_be_exported_is_refused_with_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    told = ("--run-dir", str(tmp_path / "run"), "--out", str(out))

    def refused(*arguments: str) -> str:
        code, _, error = run(monkeypatch, capsys, *told, *arguments)
        assert code == 2
        assert not out.exists() and list(tmp_path.glob(".out*")) == []
        return error

    monkeypatch.chdir(tmp_path)
    code, _, error = run(monkeypatch, capsys, "--out", str(out))
    assert code == 2 and "there is no journal runs/default/journal.db: give the run folder" in error
    assert "there is no journal" in refused()
    journal(tmp_path / "run", TrainJob(model="tiny", save_freq=-1), *steps("r", 1, 2, 3, 4, 5, 6, 7))
    assert "no step was saved" in (error := refused()) and "save_freq is -1 (-1: never)" in error
    assert "the run has done 7 steps" in error
    for number, (field, override) in enumerate([(20, -1), (-1, 20)]):
        job = TrainJob(model="tiny", save_freq=field, overrides={"trainer.save_freq": override})
        journal(tmp_path / f"run{number}", job, *steps("r", 1))
        assert f"save_freq is {override} (-1: never)" in refused("--run-dir", str(tmp_path / f"run{number}"))
    saved(tmp_path / "run", _2=0.9, _6=0.1)
    assert "step 3 is not kept" in (error := refused("--step", "3")) and "kept are 2, 6" in error
    assert "give one of them" in refused("--step", "2", "--best")
    # several nodes: each has the shards of its own ranks
    error = refused()
    assert "lacks model_world_size_1_rank_0.pt" in error and "global_step_6" in error
    assert "global_step_2" in refused("--best")
    weights = tmp_path / "run" / "checkpoints" / "global_step_6" / "actor" / "model_world_size_1_rank_0.pt"
    weights.write_bytes(b"x" * 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 1000))
    assert "0.0 GB are free" in refused()
    out.mkdir()
    code, _, error = run(monkeypatch, capsys, *told)
    assert code == 2 and f"{out} exists" in error


def test_a_checkpoint_that_the_run_removes_meanwhile_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal(tmp_path / "run", TrainJob(model="tiny"), *steps("r", 1, 2))
    saved(tmp_path / "run", _1=0.1, _2=0.2)
    folder = tmp_path / "run" / "checkpoints" / "global_step_1"

    def removed(path: Any) -> Usage:
        shutil.rmtree(folder)
        return Usage(10**12, 0, 10**12)

    (folder / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b"x")
    monkeypatch.setattr(shutil, "disk_usage", removed)
    told = ("--run-dir", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--step", "1")
    code, _, error = run(monkeypatch, capsys, *told)
    assert code == 2 and "the run removed the checkpoint global_step_1" in error and "the steps 2" in error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_half_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    journal(tmp_path / "run", TrainJob(model="tiny"), *steps("r", 1))
    saved(tmp_path / "run", _1=0.1)
    actor = tmp_path / "run" / "checkpoints" / "global_step_1" / "actor"
    (actor / "model_world_size_1_rank_0.pt").write_bytes(b"x")
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "tokenizer.json").write_bytes(b"{}")
    read, seen = Path.read_bytes, list[list[Path]]()

    def ends(path: Path) -> bytes:
        if path.name == "tokenizer.json":
            seen.append(list(tmp_path.glob(".out.*")))
            signal.raise_signal(number)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", ends)
    before = signal.signal(number, lambda *_: None)
    try:
        told = ("--run-dir", str(tmp_path / "run"), "--out", str(tmp_path / "out"))
        code, _, _ = run(monkeypatch, capsys, *told)
    finally:
        signal.signal(number, before)
    assert code == 128 + number and len(seen) == len(seen[0]) == 1
    assert not list(tmp_path.glob("*out*"))


# the weights are torch's and transformers', which take seconds to import
@pytest.mark.slow
def test_the_model_is_whole_and_unrounded_with_a_card_of_what_trained_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="needs the cpu extra")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.adapters.verl import saved_checkpoint

    model = saved_checkpoint.build(tmp_path / "tiny")
    job = TrainJob(model=str(tmp_path / "tiny"), overrides={"actor_rollout_ref.actor.clip_ratio": 0.3})
    journal(tmp_path / "run", job, *steps("r", 1, 2, 3))
    keep_comparison(
        tmp_path / "run", 1, earlier="the model before", data="held.jsonl", hook="mine", verdict="better by 0.1"
    )
    with (tmp_path / "run" / "held_out.jsonl").open("a") as file:
        file.write('{"step": 3, "against"')  # of a disk that was full
    checkpoints = tmp_path / "run" / "checkpoints"
    for ranks, dtype in ((1, "float32"), (3, "bfloat16")):
        folder = checkpoints / f"global_step_{ranks}"
        saved_checkpoint.write(folder, model, tmp_path / "tiny", ranks=ranks, dtype=dtype)
        out = tmp_path / f"out-{ranks}"
        arguments = ("--run-dir", str(tmp_path / "run"), "--out", str(out), "--step", str(ranks), "--json")
        code, printed, error = run(monkeypatch, capsys, *arguments)
        assert code == 0, error
        report = json.loads(printed)
        assert (report["step"], report["kind"], report["dtype"]) == (ranks, "model", dtype)
        assert report["bytes"] == sum(path.stat().st_size for path in out.iterdir())
        loaded: Any = AutoModelForCausalLM.from_pretrained(out)
        assert loaded.dtype == getattr(torch, dtype) and loaded.config.dtype == loaded.dtype
        for name, weight in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], weight.to(loaded.dtype)), name
        # a weight that two layers share is there once
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        tokenizer: Any = AutoTokenizer.from_pretrained(out)
        text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
        assert text.startswith("<|im_start|>user\nhello")
    card = (tmp_path / "out-3" / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    assert "base_model" not in yaml.safe_load(front), "a folder of this machine is no name on a hub"
    assert "# tiny, step 3" in text and "bfloat16" in text and "| verl | 0.9.1 |" in text
    assert "Steps 1 to 3 trained on 24 answers to 6 tasks; the rewards of 3 tasks differed." in text
    assert "| `actor_rollout_ref.actor.clip_ratio` | 0.3 |" in text
    assert "no evaluation" in text and str(tmp_path) not in text
    card = (tmp_path / "out-1" / "README.md").read_text()
    assert "- against the model before on held.jsonl, judged by mine, " in card and ": better by 0.1\n" in card
    assert "no evaluation" not in card


@pytest.mark.slow
@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["layers.1.self_attn.q_proj"]])
def test_a_lora_run_gives_its_adapter_or_the_model_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], targets: list[str]
) -> None:
    pytest.importorskip("peft", reason="needs the cpu extra")
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tests.adapters.verl import saved_checkpoint

    model = saved_checkpoint.build(tmp_path / "tiny", lora=targets)
    journal(tmp_path / "run", TrainJob(model=str(tmp_path / "tiny")), *steps("r", 1))
    folder = tmp_path / "run" / "checkpoints" / "global_step_1"
    saved_checkpoint.write(folder, model, tmp_path / "tiny", ranks=2)
    told = ("--run-dir", str(tmp_path / "run"), "--json")
    for name, more, kind in (("adapter", (), "LoRA adapter"), ("merged", ("--merged",), "model")):
        code, printed, error = run(monkeypatch, capsys, *told, "--out", str(tmp_path / name), *more)
        assert code == 0 and json.loads(printed)["kind"] == kind, error
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        untrained = base(ids).logits
        adapted: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
        merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        expected = model.eval()(ids).logits
        assert (expected - untrained).abs().max() > 1e-3
        for loaded in (adapted, merged):
            assert (loaded.eval()(ids).logits - expected).abs().max() < 1e-5
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(tmp_path / "tiny")
    assert (described["r"], described["lora_alpha"]) == (4, 8)
    assert "A LoRA adapter for tiny" in (tmp_path / "adapter" / "README.md").read_text()
    assert "its adapter is merged" in (tmp_path / "merged" / "README.md").read_text()
