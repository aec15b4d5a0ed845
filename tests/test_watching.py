"""Tests of what a run reports while it runs and when it ends: step lines, progress, warnings, curves, trackers,
summary.

pytest tests/test_watching.py
"""

import io
import json
import math
import os
import re
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import wait_until
from matplotlib.figure import Figure
from PIL import Image
from test_faults import left as signals_left  # noqa: F401  a fixture
from test_train import ROOT, flags, rows, run, without_time, write_parquet

import report.log
import report.page.page
import report.page.trackers
import report.progress
import report.writer
import train
from engines.hf import HFEngine
from errors import UserError
from packing import DUMMY_MICRO_BATCH, FlopCosts
from parallel.checkpoint import resolve_model
from parallel.models import build_models
from prepare_data import Example
from report.gpus import peak_flops
from report.metrics import add_useful_tokens, add_value_metrics, update_flops
from report.page.plots import (
    LOGGED_PREFIXES,
    Line,
    axis_ticks,
    draw_lines,
    group_by_settings,
    mean_line,
    measured_panels,
    plot_runs,
    run_curves,
    smooth,
    thin_curve,
)
from report.page.trackers import TensorBoard, Trackers, WandB, check_trackers
from report.progress import Progress, iter_with_progress, sampling
from report.records import encode_image
from report.run_warnings import RunWarnings
from report.samples import format_sample_lines, most_varied_group, shorten
from report.summary import best_evaluation, run_summary
from report.terminal import format_fixed_width, header_line, step_line, throughput_metrics, visible_columns
from rollout import Prompt, Rollout, RolloutCounter
from tasks.shapes import encode_png, shapes_rows
from utils import DistContext, Meter


@pytest.fixture
def quick(toys, tmp_path, signals_left):  # noqa: F811
    """Return a function that runs train.main for two steps in this process, with further flags."""
    data = write_parquet(tmp_path / "train.parquet", shapes_rows(8, "train", 0))

    def train_two_steps(*extra_flags, out="out"):
        argv = flags(toys["qwen2_5_vl"], data, tmp_path / out, "--steps", 2, "--no-self-test", *extra_flags)
        try:
            train.main(train.parse_args(list(map(str, argv))))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return tmp_path / out

    return train_two_steps


def test_gradients_are_freed_before_the_engine_loads_weights(quick, monkeypatch):
    """Gradients kept until the next update would take memory that was free when the engine started."""
    models, remaining = [], []
    monkeypatch.setattr(train, "build_models", lambda *args: models.append(build_models(*args)) or models[-1])
    load_weights = HFEngine.load_weights

    def record_gradients(engine, named_tensors):
        remaining.append([p for p in models[-1].policy.parameters() if p.grad is not None])
        return load_weights(engine, named_tensors)

    monkeypatch.setattr(HFEngine, "load_weights", record_gradients)
    quick()
    assert len(remaining) > 1 and not any(remaining)


# --- a run with trackers and evaluations ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tracked(toys, tmp_path_factory):
    """Run two steps with both trackers, then resume for two more; return the folder and the output of each run."""
    folder = tmp_path_factory.mktemp("tracked")
    data = write_parquet(folder / "train.parquet", shapes_rows(8, "train", 0))
    test = write_parquet(folder / "test.parquet", shapes_rows(5, "test", 0))
    extra = ["--eval-data", test, "--eval-every", 2, "--save-every", 2, "--report-to", "tensorboard", "wandb"]
    env = os.environ | {"WANDB_MODE": "offline", "XDG_DATA_HOME": str(folder / "home"), "WANDB_PROJECT": "mine"}
    command = [sys.executable, "train.py", *flags(toys["qwen2_5_vl"], data, folder / "run", *extra, "--no-self-test")]
    first = run([*command, "--steps", 2], env=env)
    second = run([*command, "--steps", 4, "--resume", "auto"], env=env)
    return folder / "run", first.stdout, second.stdout


def wandb_records(file):
    """Yield the records of a .wandb file: LevelDB's documented log format, after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, payload = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        if (room_left := 32768 - position % 32768) < 7:
            position += room_left
            continue
        size, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        payload += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(payload)
            payload = b""
            yield record


def wandb_rows(file):
    """Return the logged rows, as metric names with their values."""
    history = [record.history.item for record in wandb_records(file) if record.HasField("history")]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items} for items in history]


def test_wandb_has_the_numbers_of_metrics_jsonl_in_one_run(tracked):
    out, _, _ = tracked
    files = sorted(out.glob("wandb/offline-run-*/*.wandb"))
    logged = [row for file in files for row in wandb_rows(file)]
    assert len(files) == 2 and {file.stem for file in files} == {f"run-{(out / 'wandb_id').read_text().strip()}"}
    numbers = [{k: v for k, v in row.items() if k[0] != "_"} for row in logged if "samples/nrows" not in row]
    assert numbers == rows(out)  # to the last digit
    assert [row["step"] for row in logged if "samples/nrows" in row] == [1, 2, 3, 4]
    wandb_run = next(record.run for record in wandb_records(files[0]) if record.HasField("run"))
    config = {item.key: json.loads(item.value_json) for item in wandb_run.config.update}
    assert wandb_run.project == "mine" and wandb_run.display_name == "run"
    args = json.loads((out / "run.json").read_text())["args"]
    assert {k for k in args if config[k] != args[k]} == {"steps", "resume"} and config["versions"] and config["git"]


def test_wandbs_tables_of_samples_have_images(tracked):
    out, _, _ = tracked
    file = min(out.glob("wandb/offline-run-*/*.wandb"))
    tables = [record.artifact for record in wandb_records(file) if record.HasField("artifact")]
    paths = [content.path for table in tables for content in table.manifest.contents]
    assert len(tables) == 2 and sum(path.endswith(".table.json") for path in paths) == 2
    assert sum(path.endswith(".png") for path in paths) == 8  # four prompts in each of two steps
    table = json.loads(min(file.parent.glob("files/media/table/*.json")).read_text())
    assert len(table["data"]) == 4 * 3 and {"response", "reward", "advantage", "image 1"} <= set(table["columns"])


def test_trackers_log_the_images_of_episodes(tmp_path):
    """The prompt has one image; the first of its two episodes adds two more."""
    colours = {"red": (255, 0, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
    red, blue, white = (Image.new("RGB", (56, 56), colour) for colour in colours)
    example = SimpleNamespace(images=[encode_png(red)], videos=[], messages=[{"role": "user", "content": "<image>?"}])
    sample = {"text": "x", "finish_reason": "stop", "rewards": {"reward": 1.0}, "advantage": 0.5}
    episodes = [sample | {"images": [encode_image(blue), encode_image(white)]}, sample | {"images": []}]
    arguments = (1, [{"uid": "u", "ground_truth": "1", "samples": episodes}], {"u": example})
    shown, logged = [], []

    def add_image(name, image, step, dataformats):
        shown.append((name, tuple(image[0, 0].tolist())))

    board = SimpleNamespace(add_text=lambda *_: None, add_image=add_image)
    TensorBoard.samples(SimpleNamespace(board=board), *arguments)
    assert shown == [(f"samples/0/{i}", pixel) for i, pixel in enumerate(colours.values())]
    fake = SimpleNamespace(
        Image=lambda image: image.getpixel((0, 0)),
        Table=lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data],
    )
    WandB.samples(SimpleNamespace(wandb=fake, run=SimpleNamespace(log=logged.append)), *arguments)
    images = [[row[f"image {i}"] for i in (1, 2, 3)] for row in logged[0]["samples"]]
    assert images == [list(colours.values()), [colours["red"], None, None]]


def test_tensorboard_has_the_numbers_of_metrics_jsonl_once(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, _, _ = tracked
    events = EventAccumulator(str(out / "tensorboard"), {"scalars": 0, "tensors": 0, "images": 0}).Reload()
    scalars = {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}
    expected = {}
    for row in rows(out):
        for name, value in row.items() - {("step", row["step"])}:
            expected.setdefault(name, {})[row["step"]] = struct.unpack("f", struct.pack("f", value))[0]
    assert scalars == expected and len(scalars) > 30
    assert {event.step for event in events.Images("samples/0/0")} == {1, 2, 3, 4}
    assert b'"lr": 0.001' in events.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0]


def test_wandb_stages_images_in_the_run(tracked):
    out, _, _ = tracked
    assert not (out.parent / "home").exists()
    assert [path for path in (out / "wandb" / "artifacts" / "staging").rglob("*") if path.is_file()]


def test_a_run_writes_a_page_curves_and_predictions(tracked):
    out, _, _ = tracked
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 6 and "test" in page and not re.search(r"(?:src|href)=['\"]?https?:", page)
    assert min(Image.open(out / "curves.png").size) > 600
    predictions = [json.loads(line) for line in (out / "eval" / "step_000004.jsonl").read_text().splitlines()]
    right = [s["rewards"]["reward"] for record in predictions for s in record["samples"]]
    assert len(predictions) == 5 and sum(right) / 5 == pytest.approx(rows(out)[-1]["eval/reward"])
    assert sorted(p.name for p in (out / "eval").iterdir())[-1] == "step_000004.jsonl"


def test_the_interval_of_an_evaluation_is_in_its_row(tracked):
    for row in rows(tracked[0])[::2]:
        n, p, z = row["eval/n"], row["eval/reward"], 1.959964
        for end in ("low", "high"):  # the bounds solve (p - x)^2 = z^2 x (1 - x) / n
            x = row[f"eval/reward_{end}"]
            assert (p - x) ** 2 == pytest.approx(z * z * x * (1 - x) / n, abs=1e-9)
        assert n == 5 and row["eval/reward_low"] <= p <= row["eval/reward_high"]


def test_the_summary_covers_the_whole_run(tracked):
    out, _, _ = tracked
    summary, logged = json.loads((out / "summary.json").read_text()), rows(out)
    assert summary["total_steps"] == 4 and summary["total_episodes"] == 4 * 4 * 3
    assert summary["metrics"] == str(out / "metrics.jsonl") and summary["final_evaluation"]["step"] == 4
    assert summary["final_evaluation"]["reward"] == logged[-1]["eval/reward"]
    assert summary["tokens"] == sum(row["response/tokens"] * 12 for row in logged[1:])
    assert summary["final_reward"] == pytest.approx(sum(row["reward/mean"] for row in logged[1:]) / 4)
    assert summary["seconds"] == pytest.approx(logged[0]["time/eval"] + sum(row["time/step"] for row in logged[1:]))
    best = max([row["eval/reward"], -row["step"]] for row in logged if "eval/reward" in row)
    assert [summary["best"]["reward"], -summary["best"]["step"]] == best


def test_step_lines_form_a_table(tracked):
    _, first, second = tracked
    lines = [line for line in (first + second).splitlines() if re.match("step +[0-9]", line)]
    headers = [line for line in (first + second).splitlines() if line.startswith("step ") and line not in lines]
    assert len(lines) == 4 and len(headers) == 2 and max(map(len, lines + headers)) <= 100
    assert all(word in headers[0].split() for word in ("reward", "rew", "tok/s", "eta"))
    assert len(headers[0]) == len(lines[0]) and len(headers[0].split()) + 1 == len(lines[0].split())


def test_metrics_without_a_value_are_left_out(tracked):
    for row in rows(tracked[0])[1:]:
        assert "time/logprobs" not in row and "value/mean" not in row and row["perf/tokens_per_second"] > 0
        assert row["update/skipped"] == 0 and row["reward/errors"] == 0  # a count of 0 is a value


# --- trackers that fail -----------------------------------------------------------------------------------------------


class FakeTracker:
    def __init__(self, broken=()):
        self.broken = broken
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            if name in self.broken:
                raise ConnectionError(f"no {name}")
            self.calls.append((name, *arguments[:1]))

        return call


def call_all_methods(tracker):
    tracker.log(1, {"a": 1.0, "b": None, "c": math.nan})
    tracker.samples(1, [], {})
    tracker.log(2, {"a": 2.0})
    tracker.close()


@pytest.mark.parametrize("broken", [["log"], ["samples"], ["close"], ["log", "samples", "close"]])
def test_a_failing_tracker_is_reported_once_and_does_not_stop_the_other(broken, tmp_path, monkeypatch, capsys):
    fakes = {"tensorboard": FakeTracker(broken), "wandb": FakeTracker()}
    makers = {name: lambda *_, fake=fake: fake for name, fake in fakes.items()}
    monkeypatch.setattr(report.page.trackers, "TRACKERS", makers)
    trackers = Trackers(["tensorboard", "wandb"], tmp_path, {"args": {}}, 0)
    call_all_methods(trackers)
    output = capsys.readouterr().out
    assert output.count("warning: --report-to tensorboard failed (ConnectionError: no ") == output.count("warning") == 1
    assert [name for name, *_ in fakes["wandb"].calls] == ["log", "samples", "log", "close"]


def test_a_tracker_that_cannot_start_does_not_stop_the_other(tmp_path, monkeypatch, capsys):
    other = FakeTracker()

    def fail(*_):
        raise TimeoutError("nobody answers")

    monkeypatch.setattr(report.page.trackers, "TRACKERS", {"wandb": fail, "tensorboard": lambda *_: other})
    trackers = Trackers(["wandb", "tensorboard"], tmp_path, {"args": {}}, 0)
    call_all_methods(trackers)
    assert capsys.readouterr().out.count("--report-to wandb failed (TimeoutError: nobody answers)") == 1
    assert len(other.calls) == 4


def test_unknown_and_missing_trackers_are_refused(monkeypatch):
    with pytest.raises(UserError, match="--report-to comet: must be one of tensorboard, wandb"):
        check_trackers(["tensorboard", "comet"])
    monkeypatch.setattr(report.page.trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--report-to wandb: wandb is not installed; pip install wandb, or leave"):
        check_trackers(["wandb"])
    cfg = train.parse_args("--model m --data d --out o --steps 1 --report-to wandb".split())
    assert cfg.run.report_to == ("wandb",) and callable(WandB) and callable(TensorBoard)


def test_wandb_gives_up_on_a_server_that_never_answers(tmp_path):
    code = (
        "import socket, sys, os\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "os.environ |= {'WANDB_MODE': 'online', 'WANDB_API_KEY': 'a' * 40, 'NO_PROXY': '*', 'no_proxy': '*'}\n"
        "os.environ['WANDB_BASE_URL'] = f'http://127.0.0.1:{server.getsockname()[1]}'\n"
        "from pathlib import Path\n"
        "from report.page import trackers\n"
        "trackers.INIT_SECONDS = 2.0\n"
        "made = trackers.Trackers(['wandb'], Path(sys.argv[1]), {'args': {}}, 0)\n"
        "print('gave up', list(made.active), flush=True)\n"
        "os._exit(0)\n"
    )
    env = os.environ | {"PYTHONPATH": ".", "WANDB_DATA_DIR": str(tmp_path)}
    assert "gave up []" in run([sys.executable, "-c", code, tmp_path], env=env).stdout


# --- the line of a step -----------------------------------------------------------------------------------------------

WIDE = {
    "reward/mean": -12345.678, "reward/zero_std_frac": 1.0, "episode/turns": 12.345, "episode/ended_by/error": 0.5,
    "response/tokens": 32768.4, "policy/grad_norm": 1234567.8, "policy/entropy": 12.3456, "perf/mfu": 0.4321,
    "perf/tokens_per_second": 1234567.0, "time/step": 12345.6, "time/rollout": 9876.5, "time/reward": 12345.6,
    "time/update": 1234.5,
}  # fmt: skip


def test_a_step_line_has_at_most_100_columns():
    wide = visible_columns(WIDE)
    assert len(header_line(99999, wide)) == len(step_line(12345, 99999, wide, WIDE, 1e7)) == 100
    lean = {"reward/zero_std_frac": 1.0, "time/step": 0.1}
    columns = visible_columns(lean)
    assert len(header_line(60, columns)) == len(step_line(1, 60, columns, lean, 5.0)) <= 100
    assert step_line(1, 60, columns, lean, 5.0).split() == "step 1/60 - 1.00 - - - - 0.1 - - - 00:05".split()
    assert [format_fixed_width(x, 6, 3).strip() for x in (0.5, -3.14159, 999.96, 123456.7, 1e12, math.nan)] == [
        "0.500", "-3.142", "999.96", "123457", "1e+12", "nan"]  # fmt: skip


def test_rows_keep_the_columns_of_their_header(quick, monkeypatch, capsys):
    """A step without an update has no MFU."""
    values = iter([{}, {"perf/mfu": 0.5}, {}])
    monkeypatch.setattr(report.log, "throughput_metrics", lambda *_: next(values))
    quick("--steps", 3)
    table = [line.split() for line in capsys.readouterr().out.splitlines() if re.match("step +([0-9]|reward)", line)]
    at = table[2].index("mfu")
    assert [line[0:2] for line in table] == [
        ["step", "reward"], ["step", "1/3"], ["step", "reward"], ["step", "2/3"], ["step", "3/3"]]  # fmt: skip
    assert "mfu" not in table[0] and len(table[1]) == len(table[0]) + 1
    assert [line[at + 1] for line in table[3:]] == ["0.50", "-"]


def test_throughput_metrics():
    metrics = {"rollout/tokens": 600.0, "time/rollout": 3.0, "time/update": 2.0, "update/flops": 8 * 989e12}
    peak = peak_flops("NVIDIA H100 80GB HBM3")
    assert throughput_metrics(metrics, 8, peak) == {"perf/tokens_per_second": 200.0, "perf/mfu": 0.5}
    assert throughput_metrics(metrics, 8, peak_flops("NVIDIA H100 PCIe"))["perf/mfu"] == pytest.approx(0.5 * 989 / 756)
    assert "perf/mfu" not in throughput_metrics(metrics, 8, peak_flops("Some GPU 3000"))
    assert throughput_metrics({"time/rollout": 0.0, "rollout/tokens": 0.0}, 1, None) == {}
    metrics |= {"rollout/prompt_tokens": 1000.0, "time/step": 7.0, "time/eval": 2.0}
    assert throughput_metrics(metrics, 8, None)["perf/tokens_per_second_per_gpu"] == 1600 / 5 / 8
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    names = {"NVIDIA L40S": 362, "NVIDIA L40": 181, "NVIDIA L20": 119.5, "NVIDIA GeForce RTX 4090": 165,
             "NVIDIA H20": 148, "NVIDIA GH200 480GB": 989, "NVIDIA H200": 989}  # fmt: skip
    assert {name: peak_flops(name) / 1e12 for name in names} == names
    assert 1e9 < peak_flops(None) == peak_flops(None) < 1e14  # this CPU, measured once


@pytest.mark.parametrize("attention, share", [("sdpa", 300 / 301), ("flex", 300 / (384 + 256))])
def test_useful_tokens_leave_out_padding_and_dummies(attention, share):
    index = torch.zeros(1, dtype=torch.long)
    micro = replace(DUMMY_MICRO_BATCH, ids_T=torch.zeros(300, dtype=torch.long), target_K=index)
    meter = Meter()
    add_useful_tokens([micro, DUMMY_MICRO_BATCH], attention, meter)
    assert meter.totals["update/useful_tokens"] / meter.counts["update/useful_tokens"] == share


def test_flops_of_an_update_count_each_prompt_once():
    """Worked by hand: a prompt of 3 tokens and responses of 2 and 4 tokens, whose last token is not an input."""
    example = Example("a", "shapes", [], [], "1", {})
    prompt = Prompt("a", [1, 2, 3], [], example, [1, 2, 3])
    rollouts = [Rollout(prompt, i, [5] * n, [True] * n, [0.0] * n) for i, n in enumerate((2, 4))]
    costs = FlopCosts(token=100.0, pair=1.0, trained_token=10.0, patch=0.0, image_pair=0.0, window_pair=0.0, window=1)
    tokens, trained = 3 + 1 + 3, 2 + 4
    pairs = (1 + 2 + 3) + 4 + (4 + 5 + 6)
    assert update_flops(rollouts, costs, frozen=False) == pytest.approx(3 * (100 * tokens + 10 * trained + pairs))
    assert update_flops(rollouts, costs, frozen=True) == pytest.approx(2 * (100 * tokens + 10 * trained) + 3 * pairs)
    assert update_flops([], costs, frozen=False) == 0


def test_value_metrics_that_are_undefined_are_left_out():
    ctx, meter = DistContext(0, 1, torch.device("cpu")), Meter()
    empty = SimpleNamespace(returns=torch.zeros(0), values=torch.zeros(0))
    add_value_metrics(empty, ctx, meter)
    assert meter.reduce(ctx) == {}
    constant = SimpleNamespace(returns=torch.ones(3), values=torch.tensor([1.0, 2.0, 3.0]))
    add_value_metrics(constant, ctx, meter)
    assert meter.reduce(ctx) == {"value/mean": 2.0}  # returns without variance have no explained variance


# --- progress ---------------------------------------------------------------------------------------------------------


def test_without_a_terminal_progress_prints_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(report.progress, "LINE_EVERY_SECONDS", 0.1)
    finished = RolloutCounter()
    lines, began = [], time.monotonic()
    with sampling(lambda: finished, 80):
        for n in (3, 4):
            finished.add(SimpleNamespace(response_mask=[True] * n + [False]))
        wait_until(lambda: lines.extend(capsys.readouterr().out.splitlines()) or any("2 of 80" in x for x in lines))
    lines += capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"  responses: 2 of 80 after \d\d:\d\d, 7 tokens", lines[-1])
    assert len(lines) <= (time.monotonic() - began) / 0.1  # at most one line every 0.1 s
    with Progress("short", 1):
        pass
    assert capsys.readouterr().out == ""


def progress_is_shown():
    return any(thread.name == "progress" for thread in threading.enumerate())


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_the_progress_bar_is_erased_at_the_end(monkeypatch):
    monkeypatch.setattr(report.progress, "REFRESH_SECONDS", 0.02)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    done = []
    for item in iter_with_progress(range(4), "loading", lambda: "loss 0.5"):
        done.append(item)
        wait_until(lambda: f"loading {item}/4" in terminal.getvalue())  # noqa: B023  it is called in this iteration
    shown = terminal.getvalue()
    assert done == [0, 1, 2, 3] and not progress_is_shown() and ", loss 0.5" in shown
    assert "loading 0/4" in shown and "loading 3/4" in shown and not shown.rsplit("\r", 1)[-1].strip()


def test_progress_ends_when_its_block_raises():
    with pytest.raises(ZeroDivisionError), Progress("x", 3):
        assert progress_is_shown()
        raise ZeroDivisionError
    assert not progress_is_shown()


# --- samples ----------------------------------------------------------------------------------------------------------


def record(uid, *samples):
    sample_records = [{"text": text, "finish_reason": "stop", "tokens": len(text), "rewards": {} if reward is None else
             {"reward": reward}, "advantage": 0.0} for text, reward in samples]  # fmt: skip
    return {"uid": uid, "ground_truth": "1", "samples": sample_records}


def test_printed_samples_are_the_best_and_worst_of_the_most_varied_group():
    flat, uneven = record("flat", ("x", 1.0), ("y", 1.0)), record("uneven", ("m", 0.5), ("b", 0.9), ("w", 0.1))
    failed = record("failed", ("f", None), ("g", None))
    assert most_varied_group([flat, uneven, failed]) is uneven
    assert most_varied_group([flat]) is flat and most_varied_group([failed]) is failed
    single, partly = record("one", ("f", None)), record("partly", ("f", None), ("b", 0.9), ("w", 0.1))
    for shown, texts in ((uneven, "bw"), (flat, "xy"), (failed, "fg"), (single, "f"), (partly, "bw")):
        prompt = Example(shown["uid"], "t", [], [], "1", {})
        lines = format_sample_lines([shown], {shown["uid"]: prompt})[1:]
        assert [line.split()[0] for line in lines] == ["best", "worst"][: len(texts)]
        assert [line.split()[-1] for line in lines] == [repr(text) for text in texts]
        assert "inf" not in "".join(lines)


def test_long_texts_show_both_ends_and_no_control_characters():
    text = "\x1b[31mbegin" + "x" * 500 + "end\u202e\x07"
    example = Example("u\x1b", "shapes", [{"role": "user", "content": "a\rb\x1b]0;t\x07"}], [], "\x1b1", {})
    lines = format_sample_lines([record("u\x1b", (text, 1.0), (text[::-1], 0.0))], {"u\x1b": example})
    assert "begin" in lines[1] and "end" in lines[1] and len(lines) == 3
    assert not re.search(r"[\x00-\x1f\x7f\u202e]", "".join(lines))
    assert shorten("short") == "'short'" and len(shorten("y" * 10_000)) < 220


# --- warnings ---------------------------------------------------------------------------------------------------------

HEALTHY = {
    "reward/zero_std_frac": 0.3, "reward/mean": 0.5, "reward/accuracy": 0.5, "policy/entropy": 0.4,
    "response/tokens": 100.0, "response/truncated": 0.02, "mismatch/kl": 1e-3, "update/steps": 1.0,
}  # fmt: skip


def collect_warnings(*parts):
    """Return the warnings of a run: each part is a number of steps and their changes to HEALTHY."""
    warnings = RunWarnings(Path("o"))
    return [line for n, change in parts for _ in range(n) for line in warnings.update(HEALTHY | change)]


@pytest.mark.parametrize("change, match", [
    ({"reward/zero_std_frac": 1.0}, "all samples of a prompt got the same reward .mean 0.5.*--temperature"),
    ({"policy/entropy": 0.03}, "policy/entropy collapsed to 0.03, from 0.4 .*accuracy of 0.50.*--clip-high"),
    ({"response/tokens": 20.0}, "mean response length fell to 20 tokens, from 100.*--kl-coef"),
    ({"response/truncated": 0.5}, "response/truncated rose to .*, from 0.02.*--max-new-tokens"),
    ({"mismatch/kl": 0.02}, "mismatch/kl grew to .*, from 0.001.*--algo-args tis_cap"),
])
def test_a_warning_is_given_once_until_its_condition_ends(change, match):
    once = collect_warnings((10, {}), (20, change))
    assert len(once) == 1 and re.search(match, once[0]) and once[0].startswith("warning: ")
    assert len(collect_warnings((10, {}), (20, change), (20, {}), (20, change))) == 2
    assert not collect_warnings((10, {}), (2, change), (30, {}))  # a few steps are not a trend


@pytest.mark.parametrize("change", [
    {},
    {"policy/entropy": 0.01, "reward/accuracy": 0.97, "reward/zero_std_frac": 0.95},  # the task is learnt
    {"response/tokens": 60.0}, {"response/truncated": 0.1}, {"mismatch/kl": 3e-3}, {"mismatch/kl": None},
])
def test_healthy_runs_get_no_warnings(change):
    assert not collect_warnings((10, {}), (60, change))


def test_warnings_survive_missing_metrics_and_are_not_repeated_after_a_resume():
    warnings = RunWarnings(Path("o"))
    assert not [line for _ in range(9) for line in warnings.update({"step": 0, "eval/accuracy": 0.1})]
    assert not [line for _ in range(9) for line in warnings.update({"reward/zero_std_frac": 0.1})]
    history = [HEALTHY] * 10 + [HEALTHY | {"policy/entropy": 0.01}] * 10
    for row in history:  # a resumed run reads its earlier rows like this
        warnings.update(row)
    assert not warnings.update(history[-1])  # already printed


# --- curves -----------------------------------------------------------------------------------------------------------


def run_rows(n, **extra):
    logged = []
    for step in range(n + 1):
        row = {"step": step, "reward/mean": step / n, "reward/accuracy": 0.5, "policy/entropy": 1.0,
               "mismatch/kl": 1e-3, "response/tokens": 20.0, "response/truncated": 0.1, "policy/grad_norm": 0.5,
               "time/step": 2.0, "time/rollout": 1.0, "time/update": 0.5}  # fmt: skip
        logged.append({"step": 0} if step == 0 else row | extra)
        if step % 10 == 0:
            logged[-1] |= {"eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6}
    return logged


ASYNC = {"async/staleness": 0.8, "async/staleness_max": 2.0, "async/trainer_idle": 0.3, "async/servers_idle": 0.1}


@pytest.mark.parametrize("extra", [{}, ASYNC])
def test_panels_are_self_contained_svgs(extra):
    curves = run_curves(run_rows(40, **extra))
    titles = ["Reward", "Evaluation", "Entropy", "KL", "Response length", "Truncated", "Gradient norm", "Time"]
    titles[7:7] = ["Staleness", "Idle"] if extra else []
    assert [curve.panel.title for curve in curves] == titles and all(len(curve.panel.note) > 40 for curve in curves)
    for label, newest, steps, means, measured, smoothed, band in chain.from_iterable(curve.lines for curve in curves):
        assert label and newest == means[-1] and steps[-1] == 40
        assert len(band) == (2 if len(steps) == 5 else 0)  # evaluations have an interval
        for line in (measured, smoothed, *band):
            xy = [tuple(map(float, point.split(","))) for point in line.split()]
            assert len(xy) == len(steps) and all(0 <= x <= 1 and 0 <= y <= 1 for x, y in xy) and xy[-1][0] == 1
    reward = curves[0]
    assert [x for tick in reward.ticks for x in tick] == pytest.approx(
        [1, 0, 0.8, 0.2, 0.6, 0.4, 0.4, 0.6, 0.2, 0.8, 0, 1])
    assert reward.lines[0][4].startswith("0.0250,0.9750 0.0500,0.9500 ")  # reward/mean is step / 40


def test_unmeasured_metrics_have_no_panel():
    def titles(rows):
        return [curve.panel.title for curve in run_curves(rows)]

    assert titles([]) == [] and titles([{"step": 0}]) == []
    assert titles([{"step": 1, "reward/mean": 0.1, "policy/entropy": None}]) == ["Reward"]
    measured = [{"step": 1, "lr": 1e-6, "perf/tokens_per_second": 9.0, "perf/mfu": 0.4}]
    assert titles(measured) == ["Learning rate", "Throughput", "MFU"]


def test_failed_rewards_have_a_panel_only_if_there_are_any():
    def labels(errors):
        rows = [{"step": n, "reward/mean": 0.5, "reward/errors": n * errors, "reward/timeouts": 0} for n in (1, 2)]
        return [[line[0] for line in curve.lines] for curve in run_curves(rows)]

    assert labels(12) == [["mean"], ["errors"]] and labels(0) == [["mean"]]


def test_seconds_are_shown_in_milliseconds_at_most():
    (curve,) = run_curves([{"step": 1, "time/step": 2.5, "time/report": 4.1e-6}])
    assert [line[:2] for line in curve.lines] == [("step", 2.5), ("report", 0.0)]


def test_a_constant_0_is_drawn_from_0_to_1():
    axes = Figure().add_subplot()
    draw_lines(axes, [Line("truncated", [1, 2], [0.0, 0.0])])
    assert axes.get_ylim() == pytest.approx((-0.03, 1.03))


def test_a_logarithmic_axis_shows_zero_at_its_lower_end():
    (curve,) = run_curves([{"step": n, "mismatch/kl": x} for n, x in enumerate((0.0, 1e-4, 1.0), 1)])
    assert curve.lines[0][4] == "0.3333,1.0000 0.6667,1.0000 1.0000,0.0000"
    assert [value for _, value in curve.ticks] == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1.0])


@pytest.mark.parametrize("low, high, whole, expected", [
    (0, 1, False, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0, 1, True, [0, 1]), (0, 60, True, [0, 20, 40, 60]),
    (-0.25, 0.2, False, [-0.2, -0.1, 0, 0.1, 0.2]), (0, 1e-6, False, [0, 2e-7, 4e-7, 6e-7, 8e-7, 1e-6]),
    (0, 1234, True, [0, 500, 1000]), (-5.2, -1.7, True, [-5, -4, -3, -2]),
])  # fmt: skip
def test_ticks_are_round_numbers(low, high, whole, expected):
    assert axis_ticks(low, high, whole) == pytest.approx(expected)


def test_metrics_with_equal_values_are_one_line():
    rows = [{"step": n, "reward/mean": n / 2, "reward/accuracy": n / 2, "reward/format": 1.0} for n in (1, 2)]
    ((_, lines),) = measured_panels(rows)
    assert [line.label for line in lines] == ["mean = accuracy", "format"]


def test_a_metric_of_your_own_gets_a_panel(quick, monkeypatch, tmp_path, capsys):
    """The line of docs/metrics.md is added to train.py."""
    line = re.search(r"```python\n( +row\[.*)\n```", (ROOT / "docs" / "metrics.md").read_text())[1]
    source, above = (ROOT / "train.py").read_text(), '        row |= {"lr": lr, '
    assert line.startswith(" " * 8 + "row[") and source.count(above) == 1
    code = compile(source.replace(above, f"{line}\n{above}"), "train.py", "exec")
    edited = ModuleType("edited_train")
    monkeypatch.setitem(sys.modules, "edited_train", edited)
    exec(code, vars(edited))
    monkeypatch.setattr(train, "main", edited.main)
    out = quick()
    (name,) = [name for name in rows(out)[-1] if name.startswith("my/")]
    panel, lines = measured_panels(rows(out))[-1]
    assert panel.title == "my" and lines[0].label == name and len(lines[0].values) == 2
    assert f"{name} <b>" in (out / "report.html").read_text()
    plot_runs([out], tmp_path / "several")
    assert "warning: report" not in capsys.readouterr().out


def test_every_documented_metric_has_a_known_prefix():
    table = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    names = {name for cell in table for name in re.findall(r"`([\w/<>*=]+)`", cell)}
    assert {name.partition("/")[0] for name in names} <= set(LOGGED_PREFIXES) and len(names) > 80


def test_curves_are_thinned_smoothed_and_averaged():
    assert thin_curve(([1, 2, 3, 4, 5], [1.0, 3.0, 5.0, 7.0, 9.0]), 3) == [[1.5, 3.5, 5], [2.0, 6.0, 9.0]]
    line = [float(i) for i in range(100)]
    assert smooth(line) == pytest.approx(line)  # a running mean of a straight line is that line
    jump = smooth([0.0] * 50 + [1.0] * 50)
    assert jump[0] == 0 and jump[-1] == 1 and 0 < jump[50] < 1
    runs = [[{"step": s, "m": m} for s, m in run] for run in (((1, 1.0), (2, 4.0), (3, 9.0)), ((1, 3.0), (2, 0.0)))]
    assert mean_line("x", "m", runs) == Line("x", [1, 2], [2.0, 2.0], [1.0, 0.0], [3.0, 4.0])
    assert mean_line("x", "m", runs[:1]) == Line("x", [1, 2, 3], [1.0, 4.0, 9.0])


def write_run(folder, **args):
    folder.mkdir(parents=True)
    settings = {"lr": 1e-3, "seed": 0, "out": str(folder), "data": "train.parquet"} | args
    (folder / "run.json").write_text(json.dumps({"args": settings}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run_rows(20)))
    return folder


def test_plotted_runs_are_grouped_by_their_settings(tmp_path, capsys):
    folders = [write_run(tmp_path / f"a{i}" / "run", seed=i) for i in range(3)]
    folders.append(write_run(tmp_path / "b" / "run", lr=1e-4))
    plot_runs(folders, tmp_path / "out")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("--lr 0.001 (3 runs): ") and lines[1].startswith("--lr 0.0001: ") and len(lines) == 3
    assert "a band from the lowest to the highest" in lines[2]
    assert min(Image.open(tmp_path / "out" / "curves.png").size) > 800
    different = {Path(end): {"data": end * 50 + "x" * 100} for end in "abc"} | {Path("d"): {}}
    groups = group_by_settings(different)
    assert [len(runs) for *_, runs in groups] == [1] * 4  # also if their shortened names are equal
    assert groups[0][:2] == (f"a: --data {'a' * 50}{'x' * 20}…", f"--data {'a' * 50}{'x' * 100}")
    assert groups[3][0] == "--data -"
    long = {Path(f"{i}/run"): {"data": f"/home/someone/{'x' * 80}/{i}.parquet", "lr": "0.1"} for i in range(2)}
    assert [label for label, *_ in group_by_settings(long)] == ["--data 0.parquet", "--data 1.parquet"]
    moved = {Path(f"{i}/run"): {"data": f"/{i}/train.parquet"} for i in range(2)}
    assert [label for label, *_ in group_by_settings(moved)] == [f"{i}/run: --data train.parquet" for i in range(2)]
    plot_runs([folders[0], folders[0].parent / "." / ".." / "a0" / "run"], tmp_path / "once")
    output = capsys.readouterr().out
    assert "(2 runs)" not in output and "band" not in output
    with pytest.raises(UserError, match="--plot-runs .*/none has no run.json"):
        plot_runs([folders[0], tmp_path / "none"], tmp_path / "out")
    (folders[0] / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n')
    with pytest.raises(UserError, match="--plot-runs .*/a0/run: the run has not finished a step yet"):
        plot_runs(folders, tmp_path / "out")


# --- the best evaluation ----------------------------------------------------------------------------------------------


def test_the_earlier_of_equal_evaluations_is_the_best(tmp_path):
    logged = [{"step": s, "eval/accuracy": a} for s, a in ((0, 0.1), (2, 0.7), (4, None), (6, 0.7), (8, 0.2))]
    assert best_evaluation([*logged, {"step": 9}]) == {"accuracy": 0.7, "step": 2}
    assert best_evaluation([]) == {}
    assert run_summary(tmp_path, [])["total_steps"] == 0 and "best" not in run_summary(tmp_path, [])
    summary = run_summary(tmp_path, logged)
    assert summary["best"] == {"accuracy": 0.7, "step": 2, "checkpoint": None}
    saved = tmp_path / "checkpoints" / "step_000006"
    saved.mkdir(parents=True)
    (saved / "trainer.json").touch()
    assert run_summary(tmp_path, logged)["best"] == {"accuracy": 0.7, "step": 6, "checkpoint": str(saved)}
    assert summary["final_evaluation"] == {"accuracy": 0.2, "step": 8} and "final_reward" not in summary
    rewards = [{"step": s, "eval/reward": r} for s, r in ((0, -2.0), (2, 30.0))]  # a task without an accuracy
    assert best_evaluation(rewards) == {"reward": 30.0, "step": 2}


def test_the_final_reward_is_the_mean_of_the_last_hundred_episodes(tmp_path):
    """The mean is over the last hundred episodes, not steps; a step partly among them counts with its mean."""
    steps = ((1, 9.0, 48), (2, 1.0, 64), (3, 0.5, 48))
    logged = [{"step": s, "reward/mean": r, "rollout/responses": n} for s, r, n in steps]
    assert run_summary(tmp_path, [*logged, {"step": 4}])["final_reward"] == pytest.approx((48 * 0.5 + 52 * 1.0) / 100)
    assert run_summary(tmp_path, logged[:1])["final_reward"] == 9.0


REWARD = """
import os


def score(response, example, step):
    if str(step) == os.environ.get("FAILS_AT"):
        raise ZeroDivisionError
    in_evaluation = [0.0, 0.2, 0.6, 0.4, 0.6, 0.3, 0.5][step] if example.uid.startswith("shapes-test") else None
    return in_evaluation if in_evaluation is not None else len(response) % 3 / 2
"""


def test_the_best_checkpoint_is_kept_even_if_a_run_is_interrupted(quick, tmp_path, monkeypatch):
    test = write_parquet(tmp_path / "test.parquet", shapes_rows(3, "test", 0))
    (tmp_path / "mine.py").write_text(REWARD)
    monkeypatch.setattr(report.log.RunLog, "_write_report", lambda *_: None)
    evaluate = train.Evaluation.run_during_training

    def evaluate_at_step(evaluation, log, stage, step):  # the reward of an evaluation gets the run's last step
        evaluation.step = step
        return evaluate(evaluation, log, stage, step)

    monkeypatch.setattr(train.Evaluation, "run_during_training", evaluate_at_step)

    def start(out):
        extra = ["--eval-data", test, "--eval-every", 1, "--steps", 6, "--save-every", 3, "--keep", 1, "--keep-best",
                "--reward", f"{tmp_path}/mine.py:score", "--reward-errors", "stop", "--reward-workers", 0,
                "--resume", "auto"]  # fmt: skip
        quick(*extra, out=out)

    def saved(out):
        return sorted(p.name for p in (tmp_path / out / "checkpoints").iterdir())

    start("whole")
    assert saved("whole") == ["step_000002", "step_000006"]  # the earlier of two equal evaluations is the best
    monkeypatch.setenv("FAILS_AT", "4")
    with pytest.raises(ZeroDivisionError):
        start("cut")
    assert saved("cut") == ["step_000002", "step_000003"]
    monkeypatch.delenv("FAILS_AT")
    start("cut")
    assert saved("cut") == saved("whole") and without_time(tmp_path / "cut") == without_time(tmp_path / "whole")
    summaries = [json.loads((tmp_path / out / "summary.json").read_text()) for out in ("whole", "cut")]
    for summary in summaries:
        del summary["seconds"], summary["metrics"]
        assert summary["best"].pop("checkpoint").endswith("checkpoints/step_000002")
    assert summaries[0] == summaries[1] and summaries[0]["best"] == {"reward": pytest.approx(0.6), "step": 2}
    assert resolve_model(str(tmp_path / "cut" / "checkpoints" / "step_000002"))[2]["keep_best"]  # as eval.py finds it


def test_run_json_lists_the_settings_that_are_not_the_default(quick):
    out = quick("--algo", "dapo", "--clip-low", 0.1, "--gradient-checkpointing")
    changed = json.loads((out / "run.json").read_text())["changed_settings"]
    assert {"--clip-low 0.1", "--no-self-test", "--algo dapo", "--gradient-checkpointing"} <= set(changed)
    assert "--clip-high 0.28" in changed  # as the preset sets it
    assert not re.search("--(kl-coef|model|steps|attn|kernel|schedule) ", " ".join(changed))


@pytest.mark.parametrize("with_evaluation", [False, True])
def test_the_page_is_written_after_the_first_step(quick, tmp_path, monkeypatch, with_evaluation):
    """With an evaluation set, the page shows the evaluation before the first step, and the curves of that step."""
    pages, page = [], tmp_path / "out" / "report.html"
    finished = report.log.RunLog.report
    monkeypatch.setattr(report.log.RunLog, "report", lambda *args: finished(*args) or pages.append(page.read_text()))
    test = write_parquet(tmp_path / "test.parquet", shapes_rows(3, "test", 0))
    quick(*(("--eval-data", test) if with_evaluation else ()))
    title = "evaluation at step 0" if with_evaluation else "rollouts of step 1"
    assert f"<h1>{tmp_path.name}/out: {title}</h1>" in pages[0]
    assert "<h3>Response length " in pages[0] and "data-rows='[[" in pages[0]


def test_keeping_the_best_needs_evaluations(quick):
    with pytest.raises(UserError, match="--keep-best needs --eval-data"):
        quick("--keep-best")


# --- reports without matplotlib, and reports and trackers that fail ---------------------------------------------------


def test_a_run_without_matplotlib_says_so_once(quick, monkeypatch, capsys):
    find = report.log.importlib.util.find_spec
    monkeypatch.setattr(report.log.importlib.util, "find_spec", lambda name: name != "matplotlib" and find(name))
    out = quick()
    assert capsys.readouterr().out.count("matplotlib is not installed") == 1
    assert not (out / "curves.png").exists() and "<svg" in (out / "report.html").read_text()


PARTS = r"""
NAMES = ["saved $5_$", r"$\frac{$", r"\$", "_x", "\ud800", "a\x1b[2J\n"]


def score(response, example):
    return {"reward": len(response) % 3 / 2} | dict.fromkeys(NAMES, 0.5)
"""


def test_parts_of_a_reward_may_have_any_name(quick, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(PARTS, encoding="utf-8")
    out = quick("--reward", f"{tmp_path}/mine.py:score", "--report-to", "tensorboard")
    output = capsys.readouterr().out
    assert "warning: report" not in output and "--report-to tensorboard failed" not in output
    names = ["saved $5_$", r"$\frac{$", r"\$", "_x", r"\ud800", r"a\x1b[2J\n"]
    assert all(rows(out)[-1][f"reward/{name}"] == 0.5 for name in names)
    html = (out / "report.html").read_text(encoding="utf-8")
    assert " = ".join(sorted(names)) in html  # one line, because their values are equal


def test_a_reward_part_named_like_the_end_of_a_band_is_a_curve():
    rows = [{"step": i, "reward/x": 0.5} | ({"reward/x_low": 0.2} if i % 2 else {}) for i in range(1, 40)]
    lines = {line.label: line for _, lines in measured_panels(rows) for line in lines}
    assert not lines["x"].low and len(lines["x_low"].steps) == 20


def test_a_failing_report_is_a_warning_after_the_checkpoint_is_saved(quick, tmp_path, monkeypatch, capsys):
    test, saved = write_parquet(tmp_path / "test.parquet", shapes_rows(3, "test", 0)), []

    def fail(*_, **__):
        saved.append(sorted(p.name for p in tmp_path.glob("*/checkpoints/step_*")))
        raise RuntimeError("no glyph")

    monkeypatch.setattr(report.page.page, "draw_grid", fail)
    monkeypatch.setattr(report.log, "format_sample_lines", fail)
    quick("--eval-data", test, "--eval-every", 1, "--save-every", 1, "--keep", 9)
    output = capsys.readouterr().out
    assert saved[0] == [] and saved[1:3] == [["step_000001"]] * 2 and saved[3:5] == [["step_000001", "step_000002"]] * 2
    assert output.count("Traceback") == 1 and "report failure 1 of this run: RuntimeError: no glyph" in output
    assert output.count("report failure") == len(saved) and "done: 2 steps" in output


def test_a_large_page_is_written_by_a_separate_process(quick, tmp_path, monkeypatch, capsys):
    """The process writes the same files, and its failure gives the same warning."""
    test = write_parquet(tmp_path / "test.parquet", shapes_rows(3, "test", 0))
    here = quick("--eval-data", test, "--eval-every", 1, out="here")
    monkeypatch.setattr(report.writer, "LARGE_PAGE_CHARS", -1)
    for name in ("write_pages", "write_run_page", "draw_grid"):  # not in this process
        monkeypatch.setattr(getattr(report.page.page, name), "__code__", (lambda *_: None).__code__)
    there = quick("--eval-data", test, "--eval-every", 1, out="there")
    assert "report failure" not in capsys.readouterr().out
    for name in ("report.html", "rollouts/step_000001.html", "rollouts/step_000002.html"):
        assert (there / name).stat().st_size == pytest.approx((here / name).stat().st_size, rel=0.05)
    assert (there / "curves.png").stat().st_size > 5_000
    (tmp_path / "broken" / "curves.png").mkdir(parents=True)
    quick("--eval-data", test, out="broken")
    output = capsys.readouterr().out
    assert "Traceback" in output and "warning: report failure 1 of this run: " in output and "done: 2 steps" in output


def test_a_page_that_cannot_be_handed_to_a_process_is_a_warning(tmp_path, monkeypatch, capsys):
    """A full disk for temporary files, or a process that cannot start, does not end a run."""
    monkeypatch.setattr(report.writer, "LARGE_PAGE_CHARS", -1)
    writer, page = report.writer.Writer(), report.writer.ReportPage("a page")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    for name in ("tempfile.TemporaryFile", "pickle.dump", "subprocess.Popen"):
        with monkeypatch.context() as patch:
            patch.setattr(f"report.writer.{name}", full)
            writer.write(report.page.page.write_pages, tmp_path / "page.html", page)
    assert writer.failed == 3 and capsys.readouterr().out.count("warning: report failure") == 3


def test_a_page_waits_only_for_an_earlier_write_of_the_same_file(tmp_path, monkeypatch):
    """The writing process ends with the run; otherwise it would overwrite the next run's pages."""
    monkeypatch.setattr(report.writer, "LARGE_PAGE_CHARS", -1)
    writer, page = report.writer.Writer(), report.writer.ReportPage("a page")
    (tmp_path / "slow.py").write_text(
        "import os, time\nfrom pathlib import Path\n\n\ndef write(path, shown):\n"
        "    while not os.path.exists(os.environ['GO']): time.sleep(0.05)\n    path.write_text('written')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    monkeypatch.syspath_prepend(tmp_path)
    import slow

    for name in ("one", "two"):
        writer.write(slow.write, tmp_path / name, page)
    assert len(writer.running) == 2 and not (tmp_path / "one").exists()  # neither write has ended
    threading.Timer(0.5, (tmp_path / "go").touch).start()
    writer.write(slow.write, tmp_path / "one", page)
    assert (tmp_path / "one").exists()  # it waited for the first
    writer.finish([*writer.running])
    assert not writer.running and writer.failed == 0 and (tmp_path / "two").read_text() == "written"
    monkeypatch.setenv("GO", str(tmp_path / "never"))
    code = "import sys, time; sys.path[:0] = sys.argv[1:3]; import slow, report.writer as w; w.LARGE_PAGE_CHARS = -1\n"
    code += "writer = w.Writer(); writer.write(slow.write, w.Path(sys.argv[3]), w.ReportPage('a')); time.sleep(1)\n"
    code += "print(*[process.pid for process, _ in writer.running.values()])"
    command = [sys.executable, "-c", code, str(ROOT), str(tmp_path), str(tmp_path / "orphan")]
    pid = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert not (tmp_path / "orphan").exists()


def test_a_failing_tracker_does_not_stop_a_run(quick, monkeypatch, capsys):
    fake = FakeTracker(["log", "samples", "close"])
    monkeypatch.setattr(report.page.trackers, "TRACKERS", dict.fromkeys(report.page.trackers.TRACKERS, lambda *_: fake))
    out = quick("--report-to", "wandb")
    output = capsys.readouterr().out
    assert output.count("--report-to wandb failed (ConnectionError: no log)") == 1 and len(rows(out)) == 2
    assert "done: 2 steps" in output
    assert "<svg" in (out / "report.html").read_text()  # drawn from the last samples, because there is no --eval-data


def test_only_numbers_are_logged_and_others_are_named(capsys):
    metrics = {"a": 1, "b": torch.tensor(1.5), "c": None, "d": "text", "e": [1, 2], "f": torch.zeros(2), "g": math.nan}
    numbers = report.log.numbers_only(metrics)
    assert list(numbers) == ["a", "b", "c", "g"] and numbers["a"] == 1 and numbers["b"] == 1.5
    out = capsys.readouterr().out
    assert [f"warning: metric {name} is left out" in out for name in "abcdefg"] == [name in "def" for name in "abcdefg"]


def test_secrets_on_the_command_line_are_not_on_the_page():
    text = "train.py --env-settings api_key=sk-1 size=3 --judge model=m HF_TOKEN=abc --out a"
    assert report.log.hide_secrets(text) == (
        "train.py --env-settings api_key=... size=3 --judge model=m HF_TOKEN=... --out a"
    )


def test_the_page_is_written_although_curves_png_cannot_be(quick, tmp_path, capsys):
    (tmp_path / "out" / "curves.png").mkdir(parents=True)
    assert (quick() / "report.html").stat().st_size > 1000
    assert "report failure 1 of this run" in capsys.readouterr().out
