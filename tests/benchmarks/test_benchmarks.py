"""The benchmarks run end to end, at a size that measures nothing, and say what they promise to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import boot, credit, lifecycle, loop, overhead, turns
from benchmarks.processes import ROOT
from tests.standins.vllm import ScriptedVllm, listening

pytestmark = pytest.mark.slow


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_lifecycle(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run("lifecycle", "--clients", "8", "--lifecycles", "160", "--json", str(report))
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())
    assert json.loads(done.stdout) == rows
    for name in ("claim_end", "claim_end_eval", "groups", "with_call"):
        assert rows[name]["per_second"] > 0
        assert rows[name]["end_p99_ms"] >= rows[name]["end_p50_ms"]
        assert rows[name]["ratio_to_plain_dict"] > 0
        assert rows[name]["server_cpu_us"] > 0 and rows[name]["load_cpu_us"] > 0
    assert "chat_p50_ms" in rows["with_call"] and "chat_p50_ms" not in rows["claim_end"]


def test_boots_are_compared_round_by_round() -> None:
    def one(seconds: float, **stages: float) -> dict[str, Any]:
        return {"seconds": seconds, "cpu_seconds": 2 * seconds, "stages": stages, "load": 1.0}

    boots = {"mine": [one(10.0, ray=4.0), one(30.0, ray=6.0)], "other": [one(20.0, ray=4.0, vllm=9.0), one(40.0)]}
    report = boot.report_of(boots)
    assert report["seconds_ratio"] == report["cpu_seconds_ratio"] == {"median": 0.625, "each": [0.5, 0.75]}
    assert report["medians"]["mine"] == {"seconds": 20.0, "cpu_seconds": 40.0, "stages": {"ray": 5.0}}
    assert report["medians"]["other"]["stages"] == {"ray": 2.0, "vllm": 4.5}


def test_a_percentile_of_few_requests_is_no_longer_than_the_longest() -> None:
    seconds = [0.01] * 19 + [0.05]
    assert 10 < overhead.percentiles(seconds)["p99_ms"] <= 50
    assert 10 < lifecycle.percentiles("end", seconds)["end_p99_ms"] <= 50


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([0.5], {"mean": 0.5}),
        ([0.4, 0.6, 0.5], {"mean": 0.5, "low": 0.252, "high": 0.748}),
        ([0.4, 0.6] * 4, {"mean": 0.5, "low": 0.411, "high": 0.589}),
    ],
    ids=["1", "3", "8"],
)
def test_any_number_of_seeds_has_a_mean_and_two_have_an_interval(values: list[float], found: dict[str, float]) -> None:
    assert credit.interval(values) == found


def test_soak(tmp_path: Path) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "plot.png"
    sizes = ("--clients", "12", "--servers", "2", "--seconds", "4", "--warmup", "1", "--pause", "0.1")
    done = run("soak", *sizes, "--json", str(report), "--plot", str(picture))
    # so short a run is not flat yet: the memory of a server that has just started grows
    result = json.loads(report.read_text())
    assert done.returncode == (0 if result["flat"] else 1), done.stderr
    assert result["errors"] == 0, result["errors_quoted"]
    assert result["lifecycles"] > 12
    assert len(result["samples"]) == 2 and all(len(one["rss"]) >= 3 for one in result["samples"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_redaction(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run("redaction", "--json", str(report))
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())
    assert json.loads(done.stdout) == rows
    assert rows["texts"] == 2000 and rows["recall"] >= 0.98 and rows["precision"] >= 0.95
    assert set(rows["kinds"]) == {"card", "email", "iban", "ip", "phone", "secret"}
    assert all(milliseconds > 0 for milliseconds in rows["ms_per_1000_tokens"].values())


def test_overhead(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ("--only", "ours_n8", "ours_first", "--callers", "1", "--no-peers", "--seconds", "0.3")
    done = run("overhead", *sizes, "--json", str(report))
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())
    assert json.loads(done.stdout) == rows
    direct, sampling, best, first = (rows[name] for name in ("direct", "direct_n8", "ours_n8", "ours_first"))
    for row in (direct, sampling, best, first):
        assert row["callers"]["1"]["p99_ms"] >= row["callers"]["1"]["p50_ms"] > 0
        assert row["first_token"]["p50_ms"] > 0
    asked = best["callers"]["1"]["p50_ms"]
    assert best["added"]["1"]["p50_ms"] == pytest.approx(asked - direct["callers"]["1"]["p50_ms"], abs=0.02)
    beyond = asked - sampling["callers"]["1"]["p50_ms"] - best["hook_ms"]
    assert best["added_beyond_sample_and_hook_ms"]["1"]["p50_ms"] == pytest.approx(beyond, abs=0.02)
    token = first["first_token"]["p50_ms"] - sampling["first_token"]["p50_ms"]
    assert first["added_first_token_beyond_sample_ms"] == pytest.approx(token, abs=0.02)


@pytest.mark.anyio
async def test_however_slow_the_answers_are_two_are_measured() -> None:
    async with listening(ScriptedVllm().app) as url:
        row = await overhead.closed_loop(overhead.Subject(url, []), 1, 0.0)
    assert row["p99_ms"] >= row["p50_ms"] > 0


def test_overhead_compares_with_the_bare_proxy() -> None:
    first = {"p50_ms": 3.0, "p99_ms": 4.0}

    def row(rps: float, cpu: float) -> dict[str, Any]:
        return {"callers": {"1": {**first, "rps": rps, "cpu_ms": cpu, "cpu_behind_ms": 0.45}}, "first_token": first}

    rows = {"direct": row(800, 0.0), "direct_n8": row(200, 0.0), "proxy": row(400, 0.9), "ours_n1": row(300, 0.3)}
    overhead.compare(rows, 0.0)
    assert (rows["ours_n1"]["rps_ratio_to_proxy"], rows["ours_n1"]["cpu_ms_ratio_to_proxy"]) == (
        {"1": 0.75},
        {"1": 0.33},
    )
    assert rows["ours_n1"]["cpu_behind_ms_ratio_to_proxy"] == {"1": 0.5}
    # a clock that saw nothing of the proxy is no divisor
    rows["proxy"]["callers"]["1"]["cpu_ms"] = 0.0
    overhead.compare(rows, 0.0)
    assert rows["ours_n1"]["cpu_ms_ratio_to_proxy"] == {}


def test_training(tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="needs the cpu extra")
    report, picture = tmp_path / "report.json", tmp_path / "plot.png"
    names = ("prompt128_answers64", "trace_tools", "trace_thinking")
    sizes = ("--layers", "1", "--repetitions", "2", "--calls", "3", "--only", *names)
    done = run("training", *sizes, "--json", str(report), "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    group, tools, thinking = (json.loads(report.read_text())["shapes"][name] for name in names)
    assert (group["rows"], group["tokens"], group["unique_tokens"]) == (8, 8 * 192, 128 + 8 * 64)
    assert group["cpu_ratio"] > 0 and group["tries_peak_mib"] > 0 < group["rows_peak_mib"]
    assert (tools["calls"], tools["timelines"]) == (3, 1)
    assert tools["merged_tokens"] < tools["unmerged_tokens"]
    assert thinking["calls"] == thinking["timelines"] and thinking["merged_tokens"] == thinking["unmerged_tokens"]
    for shape in (group, tools, thinking):
        # the same tokens after the same prompts, in other rows
        assert shape["log_probs_difference"] <= 1e-4 and shape["gradient_difference"] <= 1e-5
        assert shape["gradient_cosine"] >= 0.999999
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_does_not_exist_is_said() -> None:
    done = run("nothing")
    assert done.returncode == 2
    assert "lifecycle" in done.stderr


def test_code() -> None:
    done = run("code", "--files", "120")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for name in ("sync", "again", "line", "restart", "rollback"):
        assert report[name]["seconds"] > 0 and report[name]["command_cpu"] > 0, name
    assert report["restart"]["beside_boot"] == pytest.approx(report["restart"]["seconds"] - report["boot"], abs=0.002)


def test_credit_tells_what_each_arm_has_learned() -> None:
    arms = [
        credit.Arm("session", seed, right=[0.4] * 4 + [last] * 2, credited=12)
        for seed, last in enumerate((0.8, 0.9, 0.7))
    ]
    told = credit.summary(arms)
    assert told["first"] == {"mean": 0.4, "low": 0.4, "high": 0.4}
    # Student's t of two degrees of freedom: 4.303 * 0.1 / sqrt(3)
    assert told["last"] == {"mean": 0.8, "low": 0.552, "high": 1.048}
    assert (told["seeds"], told["credited"]) == (3, 36)


def test_loop_report() -> None:
    def steps(seconds: float, cpu: float, **metrics: float) -> list[loop.Step]:
        return [
            loop.Step(seconds * number, cpu * number, {"timing_s/gen": seconds / 2} | metrics) for number in range(4)
        ]

    report = loop.report_of({"ours": [steps(2.0, 3.0)], "trl": [steps(5.0, 9.0)], "verl": []})
    assert report["arms"]["ours"]["steps"] == 3 and report["arms"]["ours"]["seconds_each"] == [2.0, 2.0, 2.0]
    assert report["arms"]["ours"]["steps_per_hour"] == 1800
    assert report["arms"]["ours"]["outside_sampling_and_update"] == 0.5
    assert report["ratios"] == {"ours / trl": {"steps_per_hour": 2.5, "cpu": 3.0}}


def test_turns_report() -> None:
    def steps(seconds: float) -> list[loop.Step]:
        return [loop.Step(seconds * number, 2 * seconds * number, {}) for number in range(3)]

    report = turns.report_of({"ours": [steps(2.0), steps(4.0)], "timelines": [], "rows": [steps(6.0), steps(16.0)]})
    ratio = {"steps_per_hour": 11 / 3, "cpu": 11 / 3, "steps_per_hour_each": [3.0, 4.0]}
    assert report["ratios"] == {"ours / rows": ratio}
    assert turns.report_of({"ours": [], "rows": [steps(6.0)]})["ratios"] == {}


def test_gate(tmp_path: Path) -> None:
    report, picture, table = tmp_path / "report.json", tmp_path / "plot.png", tmp_path / "table.md"
    sizes = ("--comparisons", "10", "--requests", "100", "--runs", "5")
    done = run("gate", *sizes, "--json", str(report), "--plot", str(picture), "--table", str(table))
    assert done.returncode == 0, done.stderr
    figures = json.loads(report.read_text())
    assert set(figures["false_alarms"]) == {"gate", "e_process", "z_test"}
    assert figures["drops"]["0.2"]["shadow"]["found"] == 1.0
    assert figures["drops"]["0.2"]["shadow"]["median"] < figures["drops"]["0.2"]["canary"]["median"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "| better by 0.1 |" in table.read_text()
