"""What a run shows of itself while it goes on and at its end: lines, progress, warnings, curves, trackers, summary.

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
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
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
from packing import FlopCosts
from parallel.checkpoint import resolve_model
from parallel.models import build_models
from prepare_data import Example
from report.metrics import add_value_metrics, update_flops
from report.page.plots import (
    Line,
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
from report.terminal import format_fixed_width, header_line, peak_flops, step_line, throughput_metrics
from rollout import Prompt, Rollout, RolloutCounter
from tasks.shapes import encode_png, shapes_rows
from utils import DistContext, Meter


@pytest.fixture
def quick(toys, tmp_path, signals_left):  # noqa: F811
    """quick(flags) runs train.main for two steps, in this process."""
    data = write_parquet(tmp_path / "train.parquet", shapes_rows(8, "train", 0))

    def go(*more, out="out"):
        given = flags(toys["qwen2_5_vl"], data, tmp_path / out, "--steps", 2, "--no-self-test", *more)
        try:
            train.main(train.parse_args(list(map(str, given))))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return tmp_path / out

    return go


def test_an_engine_wakes_when_gradients_are_freed(quick, monkeypatch):
    """Gradients kept until the next update would take memory that was free when the engine started."""
    models, left = [], []
    monkeypatch.setattr(train, "build_models", lambda *args: models.append(build_models(*args)) or models[-1])
    load_weights = HFEngine.load_weights

    def counted(engine, named):
        left.append([p for p in models[-1].policy.parameters() if p.grad is not None])
        return load_weights(engine, named)

    monkeypatch.setattr(HFEngine, "load_weights", counted)
    quick()
    assert len(left) > 1 and not any(left)


# --- a run with everything --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tracked(toys, tmp_path_factory):
    """A run with both trackers that ends after two steps and goes on for two more; what it said each time."""
    folder = tmp_path_factory.mktemp("tracked")
    data = write_parquet(folder / "train.parquet", shapes_rows(8, "train", 0))
    test = write_parquet(folder / "test.parquet", shapes_rows(5, "test", 0))
    more = ["--eval-data", test, "--eval-every", 2, "--save-every", 2, "--report-to", "tensorboard", "wandb"]
    env = os.environ | {"WANDB_MODE": "offline", "XDG_DATA_HOME": str(folder / "home"), "WANDB_PROJECT": "mine"}
    command = [sys.executable, "train.py", *flags(toys["qwen2_5_vl"], data, folder / "run", *more, "--no-self-test")]
    first = run([*command, "--steps", 2], env=env)
    second = run([*command, "--steps", 4, "--resume", "auto"], env=env)
    return folder / "run", first.stdout, second.stdout


def wandb_records(file):
    """Of a .wandb file: LevelDB's log format, as its documentation has it, after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            record = Record()
            record.ParseFromString(part)
            part = b""
            yield record


def wandb_rows(file):
    """What was logged: names with their values."""
    history = [record.history.item for record in wandb_records(file) if record.HasField("history")]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in of} for of in history]


def test_wandb_has_the_numbers_of_metrics_jsonl_in_one_run(tracked):
    out, _, _ = tracked
    files = sorted(out.glob("wandb/offline-run-*/*.wandb"))
    found = [row for file in files for row in wandb_rows(file)]
    assert len(files) == 2 and {file.stem for file in files} == {f"run-{(out / 'wandb_id').read_text().strip()}"}
    numbers = [{k: v for k, v in row.items() if k[0] != "_"} for row in found if "samples/nrows" not in row]
    assert numbers == rows(out)  # to the last digit
    assert [row["step"] for row in found if "samples/nrows" in row] == [1, 2, 3, 4]
    described = next(record.run for record in wandb_records(files[0]) if record.HasField("run"))
    config = {item.key: json.loads(item.value_json) for item in described.config.update}
    assert described.project == "mine" and described.display_name == "run"
    args = json.loads((out / "run.json").read_text())["args"]
    assert {k for k in args if config[k] != args[k]} == {"steps", "resume"} and config["versions"] and config["git"]


def test_wandbs_tables_of_samples_have_images(tracked):
    out, _, _ = tracked
    file = min(out.glob("wandb/offline-run-*/*.wandb"))
    tables = [record.artifact for record in wandb_records(file) if record.HasField("artifact")]
    paths = [content.path for table in tables for content in table.manifest.contents]
    assert len(tables) == 2 and sum(path.endswith(".table.json") for path in paths) == 2
    assert sum(path.endswith(".png") for path in paths) == 8  # four prompts of two steps
    table = json.loads(min(file.parent.glob("files/media/table/*.json")).read_text())
    assert len(table["data"]) == 4 * 3 and {"response", "reward", "advantage", "image 1"} <= set(table["columns"])


def test_trackers_get_the_images_that_came_in_episodes(tmp_path):
    """A prompt's image, then two in the first of two episodes."""
    colours = {"red": (255, 0, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
    red, blue, white = (Image.new("RGB", (56, 56), colour) for colour in colours)
    example = SimpleNamespace(images=[encode_png(red)], messages=[{"role": "user", "content": "<image>?"}])
    of = {"text": "x", "finish_reason": "stop", "rewards": {"reward": 1.0}, "advantage": 0.5}
    episodes = [of | {"images": [encode_image(blue), encode_image(white)]}, of | {"images": []}]
    asked = (1, [{"uid": "u", "ground_truth": "1", "samples": episodes}], {"u": example})
    shown, logged = [], []

    def add_image(name, image, step, dataformats):
        shown.append((name, tuple(image[0, 0].tolist())))

    board = SimpleNamespace(add_text=lambda *_: None, add_image=add_image)
    TensorBoard.samples(SimpleNamespace(board=board), *asked)
    assert shown == [(f"samples/0/{i}", pixel) for i, pixel in enumerate(colours.values())]
    fake = SimpleNamespace(
        Image=lambda image: image.getpixel((0, 0)),
        Table=lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data],
    )
    WandB.samples(SimpleNamespace(wandb=fake, run=SimpleNamespace(log=logged.append)), *asked)
    images = [[row[f"image {i}"] for i in (1, 2, 3)] for row in logged[0]["samples"]]
    assert images == [list(colours.values()), [colours["red"], None, None]]


def test_tensorboard_has_the_numbers_of_metrics_jsonl_once(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, _, _ = tracked
    events = EventAccumulator(str(out / "tensorboard"), {"scalars": 0, "tensors": 0, "images": 0}).Reload()
    found = {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}
    expected = {}
    for row in rows(out):
        for name, value in row.items() - {("step", row["step"])}:
            expected.setdefault(name, {})[row["step"]] = struct.unpack("f", struct.pack("f", value))[0]
    assert found == expected and len(found) > 30
    assert {event.step for event in events.Images("samples/0/0")} == {1, 2, 3, 4}
    assert b'"lr": 0.001' in events.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0]


def test_wandb_stages_images_in_the_run(tracked):
    out, _, _ = tracked
    assert not (out.parent / "home").exists()
    assert [path for path in (out / "wandb" / "artifacts" / "staging").rglob("*") if path.is_file()]


def test_a_run_keeps_a_page_curves_and_predictions(tracked):
    out, _, _ = tracked
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 6 and "test" in page and not re.search(r"(?:src|href)=['\"]?https?:", page)
    assert min(Image.open(out / "curves.png").size) > 600
    kept = [json.loads(line) for line in (out / "eval" / "step_000004.jsonl").read_text().splitlines()]
    right = [s["rewards"]["reward"] for record in kept for s in record["samples"]]
    assert len(kept) == 5 and sum(right) / 5 == pytest.approx(rows(out)[-1]["eval/reward"])
    assert sorted(p.name for p in (out / "eval").iterdir())[-1] == "step_000004.jsonl"


def test_the_interval_of_an_evaluation_is_in_its_row(tracked):
    for row in rows(tracked[0])[::2]:
        n, p, z = row["eval/n"], row["eval/reward"], 1.959964
        for end in ("low", "high"):  # the bounds solve (p - x)^2 = z^2 x (1 - x) / n
            x = row[f"eval/reward_{end}"]
            assert (p - x) ** 2 == pytest.approx(z * z * x * (1 - x) / n, abs=1e-9)
        assert n == 5 and row["eval/reward_low"] <= p <= row["eval/reward_high"]


def test_summary_is_of_the_whole_run(tracked):
    out, _, _ = tracked
    told, logged = json.loads((out / "summary.json").read_text()), rows(out)
    assert told["total_steps"] == 4 and told["total_episodes"] == 4 * 4 * 3
    assert told["metrics"] == str(out / "metrics.jsonl") and told["final_evaluation"]["step"] == 4
    assert told["final_evaluation"]["reward"] == logged[-1]["eval/reward"]
    assert told["tokens"] == sum(row["response/tokens"] * 12 for row in logged[1:])
    assert told["final_reward"] == pytest.approx(sum(row["reward/mean"] for row in logged[1:]) / 4)
    assert told["seconds"] == pytest.approx(logged[0]["time/eval"] + sum(row["time/step"] for row in logged[1:]))
    best = max([row["eval/reward"], -row["step"]] for row in logged if "eval/reward" in row)
    assert [told["best"]["reward"], -told["best"]["step"]] == best


def test_lines_of_steps_are_a_table(tracked):
    _, first, second = tracked
    lines = [line for line in (first + second).splitlines() if re.match("step +[0-9]", line)]
    heads = [line for line in (first + second).splitlines() if line.startswith("step ") and line not in lines]
    assert len(lines) == 4 and len(heads) == 2 and max(map(len, lines + heads)) <= 100
    assert all(word in heads[0].split() for word in ("reward", "rew", "tok/s", "eta"))
    assert len(heads[0]) == len(lines[0]) and len(heads[0].split()) + 1 == len(lines[0].split())


def test_metrics_without_a_value_are_left_out(tracked):
    for row in rows(tracked[0])[1:]:
        assert "time/logprobs" not in row and "value/mean" not in row and row["perf/tokens_per_second"] > 0
        assert row["update/skipped"] == 0 and row["reward/errors"] == 0  # counts are known


# --- trackers that fail -----------------------------------------------------------------------------------------------


class Fake:
    def __init__(self, broken=()):
        self.broken = broken
        self.got = []

    def __getattr__(self, name):
        def call(*given):
            if name in self.broken:
                raise ConnectionError(f"no {name}")
            self.got.append((name, *given[:1]))

        return call


def all_calls(made):
    made.log(1, {"a": 1.0, "b": None, "c": math.nan})
    made.samples(1, [], {})
    made.log(2, {"a": 2.0})
    made.close()


@pytest.mark.parametrize("broken", [["log"], ["samples"], ["close"], ["log", "samples", "close"]])
def test_a_tracker_that_fails_is_told_once_and_ends_alone(broken, tmp_path, monkeypatch, capsys):
    fakes = {"tensorboard": Fake(broken), "wandb": Fake()}
    makers = {name: lambda *_, fake=fake: fake for name, fake in fakes.items()}
    monkeypatch.setattr(report.page.trackers, "TRACKERS", makers)
    made = Trackers(["tensorboard", "wandb"], tmp_path, {"args": {}}, 0)
    all_calls(made)
    said = capsys.readouterr().out
    assert said.count("warning: --report-to tensorboard failed (ConnectionError: no ") == said.count("warning") == 1
    assert [name for name, *_ in fakes["wandb"].got] == ["log", "samples", "log", "close"]


def test_a_tracker_that_cannot_begin_ends_alone(tmp_path, monkeypatch, capsys):
    other = Fake()

    def fail(*_):
        raise TimeoutError("nobody answers")

    monkeypatch.setattr(report.page.trackers, "TRACKERS", {"wandb": fail, "tensorboard": lambda *_: other})
    made = Trackers(["wandb", "tensorboard"], tmp_path, {"args": {}}, 0)
    all_calls(made)
    assert capsys.readouterr().out.count("--report-to wandb failed (TimeoutError: nobody answers)") == 1
    assert len(other.got) == 4


def test_what_is_not_installed_or_unknown_is_a_mistake(monkeypatch):
    with pytest.raises(UserError, match="--report-to comet: must be one of tensorboard, wandb"):
        check_trackers(["tensorboard", "comet"])
    monkeypatch.setattr(report.page.trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--report-to wandb: wandb is not installed; pip install wandb, or leave"):
        check_trackers(["wandb"])
    cfg = train.parse_args("--model m --data d --out o --steps 1 --report-to wandb".split())
    assert cfg.run.report_to == ("wandb",) and callable(WandB) and callable(TensorBoard)


def test_a_server_that_never_answers_is_given_up(tmp_path):
    code = (
        "import socket, sys, time, os\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "os.environ |= {'WANDB_MODE': 'online', 'WANDB_API_KEY': 'a' * 40, 'NO_PROXY': '*', 'no_proxy': '*'}\n"
        "os.environ['WANDB_BASE_URL'] = f'http://127.0.0.1:{server.getsockname()[1]}'\n"
        "from pathlib import Path\n"
        "from report.page import trackers\n"
        "trackers.INIT_SECONDS, began = 2.0, time.monotonic()\n"
        "made = trackers.Trackers(['wandb'], Path(sys.argv[1]), {'args': {}}, 0)\n"
        "print('gave up', list(made.active), time.monotonic() - began < 60, flush=True)\n"
        "os._exit(0)\n"
    )
    env = os.environ | {"PYTHONPATH": ".", "WANDB_DATA_DIR": str(tmp_path)}
    assert "gave up [] True" in run([sys.executable, "-c", code, tmp_path], env=env).stdout


# --- the line of a step -----------------------------------------------------------------------------------------------

WIDE = {
    "reward/mean": -12345.678, "reward/zero_std_frac": 1.0, "episode/turns": 12.345, "episode/ended_by/error": 0.5,
    "response/tokens": 32768.4, "policy/grad_norm": 1234567.8, "policy/entropy": 12.3456, "perf/mfu": 0.4321,
    "perf/tokens_per_second": 1234567.0, "time/step": 12345.6, "time/rollout": 9876.5, "time/reward": 12345.6,
    "time/update": 1234.5,
}  # fmt: skip


def test_a_step_takes_one_line_of_a_hundred_columns():
    assert len(header_line(99999, WIDE)) == len(step_line(12345, 99999, WIDE, 1e7)) == 100
    lean = {"reward/zero_std_frac": 1.0, "time/step": 0.1}
    assert len(header_line(60, lean)) == len(step_line(1, 60, lean, 5.0)) <= 100
    assert step_line(1, 60, lean, 5.0).split() == "step 1/60 - 1.00 - - - - 0.1 - - - 00:05".split()
    assert [format_fixed_width(x, 6, 3).strip() for x in (0.5, -3.14159, 999.96, 123456.7, 1e12, math.nan)] == [
        "0.500", "-3.142", "999.96", "123457", "1e+12", "nan"]  # fmt: skip


def test_speeds_of_a_step():
    told = {"rollout/tokens": 600.0, "time/rollout": 3.0, "time/update": 2.0, "update/flops": 8 * 989e12}
    assert throughput_metrics(told, 8, "NVIDIA H100 80GB HBM3") == {"perf/tokens_per_second": 200.0, "perf/mfu": 0.5}
    assert throughput_metrics(told, 8, "NVIDIA H100 PCIe")["perf/mfu"] == pytest.approx(0.5 * 989 / 756)
    assert "perf/mfu" not in throughput_metrics(told, 8, "Some GPU 3000") and "perf/mfu" not in throughput_metrics(
        told, 8, None
    )
    assert throughput_metrics({"time/rollout": 0.0, "rollout/tokens": 0.0}, 1, None) == {}
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12


def test_flops_of_an_update_count_each_prompt_once():
    """By hand: a prompt of 3 tokens, responses of 2 and 4, of which the last token is no input."""
    example = Example("a", "shapes", [], [], "1", {})
    prompt = Prompt("a", [1, 2, 3], [], example, [1, 2, 3])
    rollouts = [Rollout(prompt, i, [5] * n, [True] * n, [0.0] * n) for i, n in enumerate((2, 4))]
    costs = FlopCosts(token=100.0, pair=1.0, trained_token=10.0, patch=0.0, image_pair=0.0, window_pair=0.0, window=1)
    tokens, trained = 3 + 1 + 3, 2 + 4
    pairs = (1 + 2 + 3) + 4 + (4 + 5 + 6)
    assert update_flops(rollouts, costs, frozen=False) == pytest.approx(3 * (100 * tokens + 10 * trained + pairs))
    assert update_flops(rollouts, costs, frozen=True) == pytest.approx(2 * (100 * tokens + 10 * trained) + 3 * pairs)
    assert update_flops([], costs, frozen=False) == 0


def test_values_of_nothing_are_left_out():
    ctx, meter = DistContext(0, 1, torch.device("cpu")), Meter()
    nothing = SimpleNamespace(returns=torch.zeros(0), values=torch.zeros(0))
    add_value_metrics(nothing, ctx, meter)
    assert meter.reduce(ctx) == {}
    same = SimpleNamespace(returns=torch.ones(3), values=torch.tensor([1.0, 2.0, 3.0]))
    add_value_metrics(same, ctx, meter)
    assert meter.reduce(ctx) == {"value/mean": 2.0}  # returns without a variance: none of it is explained, or all


# --- progress ---------------------------------------------------------------------------------------------------------


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(report.progress, "LINE_EVERY_SECONDS", 0.1)
    finished = RolloutCounter()
    with sampling(lambda: finished, 80):
        for n in (3, 4):
            finished.add(SimpleNamespace(response_mask=[True] * n + [False]))
        time.sleep(0.25)
    lines = capsys.readouterr().out.splitlines()
    assert 1 <= len(lines) <= 3 and lines[-1] == "  responses: 2 of 80, 7 tokens after 00:00"
    with Progress("short", 1):
        pass
    assert capsys.readouterr().out == ""


def showing():
    return any(thread.name == "progress" for thread in threading.enumerate())


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_there_is_a_bar_that_goes(monkeypatch):
    monkeypatch.setattr(report.progress, "REFRESH_SECONDS", 0.02)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    done = [item for item in iter_with_progress(range(4), "loading") if not time.sleep(0.05)]
    shown = terminal.getvalue()
    assert done == [0, 1, 2, 3] and not showing()
    assert "loading 0/4" in shown and "loading 3/4" in shown and not shown.rsplit("\r", 1)[-1].strip()


def test_progress_of_a_part_that_raises_ends_with_it():
    with pytest.raises(ZeroDivisionError), Progress("x", 3):
        assert showing()
        raise ZeroDivisionError
    assert not showing()


# --- samples ----------------------------------------------------------------------------------------------------------


def record(uid, *samples):
    told = [{"text": text, "finish_reason": "stop", "tokens": len(text), "rewards": {} if reward is None else
             {"reward": reward}, "advantage": 0.0} for text, reward in samples]  # fmt: skip
    return {"uid": uid, "ground_truth": "1", "samples": told}


def test_samples_are_chosen_to_show_what_is_learnt_from():
    flat, uneven = record("flat", ("x", 1.0), ("y", 1.0)), record("uneven", ("m", 0.5), ("b", 0.9), ("w", 0.1))
    failed = record("failed", ("f", None), ("g", None))
    assert most_varied_group([flat, uneven, failed]) is uneven
    assert most_varied_group([flat]) is flat and most_varied_group([failed]) is failed
    one = record("one", ("f", None))
    for shown, texts in ((uneven, "bw"), (flat, "xy"), (failed, "fg"), (one, "f")):
        prompt = Example(shown["uid"], "t", [], [], "1", {})
        lines = format_sample_lines([shown], {shown["uid"]: prompt})[1:]
        assert [line.split()[0] for line in lines] == ["best", "worst"][: len(texts)]
        assert [line.split()[-1] for line in lines] == [repr(text) for text in texts]


def test_long_texts_show_both_ends_and_nothing_acts_on_the_terminal():
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


def said(*parts):
    """What is warned of in steps that change HEALTHY: (how many, change) in turn."""
    warnings = RunWarnings(Path("o"))
    return [line for n, change in parts for _ in range(n) for line in warnings.update(HEALTHY | change)]


@pytest.mark.parametrize("change, match", [
    ({"reward/zero_std_frac": 1.0}, "all samples of a prompt got the same reward .mean 0.5.*--temperature"),
    ({"policy/entropy": 0.03}, "policy/entropy collapsed to 0.03, from 0.4 .*accuracy of 0.50.*--clip-high"),
    ({"response/tokens": 20.0}, "mean response length fell to 20 tokens, from 100.*--kl-coef"),
    ({"response/truncated": 0.5}, "response/truncated rose to .*, from 0.02.*--max-new-tokens"),
    ({"mismatch/kl": 0.02}, "mismatch/kl grew to .*, from 0.001.*--algo-args tis_cap"),
])
def test_warnings_are_said_once_until_it_is_over(change, match):
    once = said((10, {}), (20, change))
    assert len(once) == 1 and re.search(match, once[0]) and once[0].startswith("warning: ")
    assert len(said((10, {}), (20, change), (20, {}), (20, change))) == 2
    assert not said((10, {}), (2, change), (30, {}))  # a few steps are no trend


@pytest.mark.parametrize("change", [
    {},
    {"policy/entropy": 0.01, "reward/accuracy": 0.97, "reward/zero_std_frac": 0.95},  # learnt
    {"response/tokens": 60.0}, {"response/truncated": 0.1}, {"mismatch/kl": 3e-3}, {"mismatch/kl": None},
])
def test_healthy_runs_are_not_warned_of(change):
    assert not said((10, {}), (60, change))


def test_warnings_survive_missing_metrics_and_go_on_after_a_resume():
    warnings = RunWarnings(Path("o"))
    assert not [line for _ in range(9) for line in warnings.update({"step": 0, "eval/accuracy": 0.1})]
    assert not [line for _ in range(9) for line in warnings.update({"reward/zero_std_frac": 0.1})]
    history = [HEALTHY] * 10 + [HEALTHY | {"policy/entropy": 0.01}] * 10
    for row in history:  # as a run that goes on reads them
        warnings.update(row)
    assert not warnings.update(history[-1])  # said before


# --- curves -----------------------------------------------------------------------------------------------------------


def run_rows(n, **more):
    made = []
    for step in range(n + 1):
        row = {"step": step, "reward/mean": step / n, "reward/accuracy": 0.5, "policy/entropy": 1.0,
               "mismatch/kl": 1e-3, "response/tokens": 20.0, "response/truncated": 0.1, "policy/grad_norm": 0.5,
               "time/step": 2.0, "time/rollout": 1.0, "time/update": 0.5}  # fmt: skip
        made.append({"step": 0} if step == 0 else row | more)
        if step % 10 == 0:
            made[-1] |= {"eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6}
    return made


ASYNC = {"async/staleness": 0.8, "async/staleness_max": 2.0, "async/trainer_idle": 0.3, "async/servers_idle": 0.1}


@pytest.mark.parametrize("more", [{}, ASYNC])
def test_panels_are_svgs_that_need_nothing(more):
    curves = run_curves(run_rows(40, **more))
    titles = ["Reward", "Evaluation", "Entropy", "KL", "Response length", "Truncated", "Gradient norm", "Time"]
    titles[7:7] = ["Staleness", "Idle"] if more else []
    assert [curve.title for curve in curves] == titles and all(len(curve.note) > 40 for curve in curves)
    for curve in curves:
        root = ET.fromstring(curve.image)
        tags = {element.tag.rpartition("}")[2] for element in root.iter()}
        links = [value for element in root.iter() for name, value in element.attrib.items() if name.endswith("href")]
        assert root.tag.endswith("svg") and not tags & {"text", "image", "script", "metadata"}
        assert all(link.startswith("#") for link in links) and len(curve.image) < 60_000
    big = run_curves(run_rows(5000))
    assert sum(len(curve.image) for curve in big) < 500_000


def test_what_was_not_measured_has_no_panel():
    assert run_curves([]) == [] and run_curves([{"step": 0}]) == []
    assert [c.title for c in run_curves([{"step": 1, "reward/mean": 0.1, "policy/entropy": None}])] == ["Reward"]
    none = [{"step": 1, "mismatch/kl": 0.0}, {"step": 2, "mismatch/kl": 1e-9}, {"step": 3, "mismatch/kl": 1.0}]
    assert [c.title for c in run_curves(none)] == ["KL"]  # a logarithm has no place for the first


def test_means_of_curves():
    assert thin_curve(([1, 2, 3, 4, 5], [1.0, 3.0, 5.0, 7.0, 9.0]), 3) == [[1.5, 3.5, 5], [2.0, 6.0, 9.0]]
    line = [float(i) for i in range(100)]
    assert smooth(line) == pytest.approx(line)  # a running mean of a straight line is that line
    jump = smooth([0.0] * 50 + [1.0] * 50)
    assert jump[0] == 0 and jump[-1] == 1 and 0 < jump[50] < 1
    runs = [[{"step": s, "m": m} for s, m in of] for of in (((1, 1.0), (2, 4.0), (3, 9.0)), ((1, 3.0), (2, 0.0)))]
    assert mean_line("x", "m", runs) == Line("x", [1, 2], [2.0, 2.0], [1.0, 0.0], [3.0, 4.0])
    assert mean_line("x", "m", runs[:1]) == Line("x", [1, 2, 3], [1.0, 4.0, 9.0])


def write_run(folder, **args):
    folder.mkdir(parents=True)
    settings = {"lr": 1e-3, "seed": 0, "out": str(folder), "data": "train.parquet"} | args
    (folder / "run.json").write_text(json.dumps({"args": settings}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run_rows(20)))
    return folder


def test_runs_are_drawn_over_each_other_by_their_settings(tmp_path, capsys):
    made = [write_run(tmp_path / f"a{i}" / "run", seed=i) for i in range(3)]
    made.append(write_run(tmp_path / "b" / "run", lr=1e-4))
    plot_runs(made, tmp_path / "out")
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("--lr 0.001 (3 runs): ") and told[1].startswith("--lr 0.0001: ") and len(told) == 3
    assert "a band from the lowest to the highest" in told[2]
    assert min(Image.open(tmp_path / "out" / "curves.png").size) > 800
    apart = {Path(end): {"data": end * 50 + "x" * 50} for end in "abc"} | {Path("d"): {}}
    assert [len(runs) for _, runs in group_by_settings(apart)] == [1] * 4  # also where names are shortened to the same
    plot_runs([made[0], made[0].parent / "." / ".." / "a0" / "run"], tmp_path / "once")
    assert "(2 runs)" not in capsys.readouterr().out
    with pytest.raises(UserError, match="--plot-runs .*/none has no run.json"):
        plot_runs([made[0], tmp_path / "none"], tmp_path / "out")
    (made[0] / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n')
    with pytest.raises(UserError, match="--plot-runs .*/a0/run: the run has not finished a step yet"):
        plot_runs(made, tmp_path / "out")


# --- the best evaluation ----------------------------------------------------------------------------------------------


def test_of_equal_evaluations_the_earlier_is_the_best(tmp_path):
    logged = [{"step": s, "eval/accuracy": a} for s, a in ((0, 0.1), (2, 0.7), (4, None), (6, 0.7), (8, 0.2))]
    assert best_evaluation([*logged, {"step": 9}]) == {"accuracy": 0.7, "step": 2}
    assert best_evaluation([]) == {}
    assert run_summary(tmp_path, [])["total_steps"] == 0 and "best" not in run_summary(tmp_path, [])
    summary = run_summary(tmp_path, logged)
    assert summary["best"] == {"accuracy": 0.7, "step": 2, "checkpoint": None}
    assert summary["final_evaluation"] == {"accuracy": 0.2, "step": 8} and "final_reward" not in summary
    rewards = [{"step": s, "eval/reward": r} for s, r in ((0, -2.0), (2, 30.0))]  # a task without an accuracy
    assert best_evaluation(rewards) == {"reward": 30.0, "step": 2}


def test_the_final_reward_is_of_the_last_hundred_episodes(tmp_path):
    """Not of as many steps: of the step that is partly among them its mean counts."""
    found = ((1, 9.0, 48), (2, 1.0, 64), (3, 0.5, 48))
    logged = [{"step": s, "reward/mean": r, "rollout/responses": n} for s, r, n in found]
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


def test_the_best_checkpoint_is_kept_also_by_a_run_that_is_cut_off(quick, tmp_path, monkeypatch):
    test = write_parquet(tmp_path / "test.parquet", shapes_rows(3, "test", 0))
    (tmp_path / "mine.py").write_text(REWARD)
    monkeypatch.setattr(report.log.RunLog, "_write_report", lambda log: None)
    evaluate = train.Evaluation.run_during_training

    def at_step(evaluation, log, stage, step):  # rewards of evaluations get the run's last step
        evaluation.step = step
        return evaluate(evaluation, log, stage, step)

    monkeypatch.setattr(train.Evaluation, "run_during_training", at_step)

    def start(out):
        more = ["--eval-data", test, "--eval-every", 1, "--steps", 6, "--save-every", 3, "--keep", 1, "--keep-best",
                "--reward", f"{tmp_path}/mine.py:score", "--reward-errors", "stop", "--reward-workers", 0,
                "--resume", "auto"]  # fmt: skip
        quick(*more, out=out)

    def left(out):
        return sorted(p.name for p in (tmp_path / out / "checkpoints").iterdir())

    start("whole")
    assert left("whole") == ["step_000002", "step_000006"]  # of two equal ones the earlier
    monkeypatch.setenv("FAILS_AT", "4")
    with pytest.raises(ZeroDivisionError):
        start("cut")
    assert left("cut") == ["step_000002", "step_000003"]
    monkeypatch.delenv("FAILS_AT")
    start("cut")
    assert left("cut") == left("whole") and without_time(tmp_path / "cut") == without_time(tmp_path / "whole")
    told = [json.loads((tmp_path / out / "summary.json").read_text()) for out in ("whole", "cut")]
    for summary in told:
        del summary["seconds"], summary["metrics"]
        assert summary["best"].pop("checkpoint").endswith("checkpoints/step_000002")
    assert told[0] == told[1] and told[0]["best"] == {"reward": pytest.approx(0.6), "step": 2}
    assert resolve_model(str(tmp_path / "cut" / "checkpoints" / "step_000002"))[2]["keep_best"]  # as eval.py finds it


def test_keeping_the_best_needs_evaluations(quick):
    with pytest.raises(UserError, match="--keep-best needs --eval-data"):
        quick("--keep-best")


# --- without what draws, and when asked to end ------------------------------------------------------------------------


def test_a_run_without_matplotlib_says_so_once(quick, monkeypatch, capsys):
    find = report.log.importlib.util.find_spec
    monkeypatch.setattr(report.log.importlib.util, "find_spec", lambda name: name != "matplotlib" and find(name))
    out = quick()
    assert capsys.readouterr().out.count("matplotlib is not installed") == 1
    assert not (out / "curves.png").exists() and "<svg" not in (out / "report.html").read_text()
    assert run_curves(rows(out)) == [], "nor does eval.py draw them"


PARTS = r"""
NAMES = ["saved $5_$", r"$\frac{$", r"\$", "_x", "\ud800", "a\x1b[2J\n"]


def score(response, example):
    return {"reward": len(response) % 3 / 2} | dict.fromkeys(NAMES, 0.5)
"""


def test_parts_of_a_reward_may_have_any_name(quick, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(PARTS, encoding="utf-8")
    out = quick("--reward", f"{tmp_path}/mine.py:score", "--report-to", "tensorboard")
    said = capsys.readouterr().out
    assert "warning: report" not in said and "--report-to tensorboard failed" not in said
    names = ["saved $5_$", r"$\frac{$", r"\$", "_x", r"\ud800", r"a\x1b[2J\n"]
    assert all(rows(out)[-1][f"reward/{name}"] == 0.5 for name in names)
    html = (out / "report.html").read_text(encoding="utf-8")
    labels = [*names[:3], " _x", *names[4:]]
    assert all(f"<!-- {label} -->" in html for label in labels)  # matplotlib's own remark of a text that it drew


def test_a_part_of_a_reward_named_as_an_end_of_a_band_is_a_curve():
    rows = [{"step": i, "reward/x": 0.5} | ({"reward/x_low": 0.2} if i % 2 else {}) for i in range(1, 40)]
    lines = {line.label: line for _, lines in measured_panels(rows) for line in lines}
    assert not lines["x"].low and len(lines["x_low"].steps) == 20


def test_a_report_that_fails_is_a_warning_and_comes_after_the_checkpoint(quick, tmp_path, monkeypatch, capsys):
    test, saved = write_parquet(tmp_path / "test.parquet", shapes_rows(3, "test", 0)), []

    def fail(*_, **__):
        saved.append(sorted(p.name for p in tmp_path.glob("*/checkpoints/step_*")))
        raise RuntimeError("no glyph")

    monkeypatch.setattr(report.page.page, "draw_grid", fail)
    monkeypatch.setattr(report.log, "format_sample_lines", fail)
    quick("--eval-data", test, "--eval-every", 1, "--save-every", 1, "--keep", 9)
    said = capsys.readouterr().out
    assert saved[0] == [] and saved[1:3] == [["step_000001"]] * 2 and saved[3:5] == [["step_000001", "step_000002"]] * 2
    assert said.count("Traceback") == 1 and "report failure 1 of this run: RuntimeError: no glyph" in said
    assert said.count("report failure") == len(saved) and "done: 2 steps" in said


def test_a_large_page_is_written_by_a_process_of_its_own(quick, tmp_path, monkeypatch, capsys):
    """It writes the same files, and a failure gives the same warning."""
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
    said = capsys.readouterr().out
    assert "Traceback" in said and "warning: report failure 1 of this run: " in said and "done: 2 steps" in said


def test_what_cannot_be_given_to_another_process_is_a_warning(tmp_path, monkeypatch, capsys):
    """A full disk for temporary files, or no process to be had, ends no run."""
    monkeypatch.setattr(report.writer, "LARGE_PAGE_CHARS", -1)
    writer, shown = report.writer.Writer(), report.writer.ReportPage("a page")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    for name in ("tempfile.TemporaryFile", "pickle.dump", "subprocess.Popen"):
        with monkeypatch.context() as patch:
            patch.setattr(f"report.writer.{name}", full)
            writer.write(report.page.page.write_pages, tmp_path / "page.html", shown)
    assert writer.failed == 3 and capsys.readouterr().out.count("warning: report failure") == 3


def test_a_page_waits_only_for_one_of_its_own_name(tmp_path, monkeypatch):
    """And it ends with the run: a process that went on would overwrite the pages of the next."""
    monkeypatch.setattr(report.writer, "LARGE_PAGE_CHARS", -1)
    writer, shown = report.writer.Writer(), report.writer.ReportPage("a page")
    (tmp_path / "slow.py").write_text(
        "import os, time\nfrom pathlib import Path\n\n\ndef write(path, shown):\n"
        "    time.sleep(float(os.environ['SLOW']))\n    path.write_text('written')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SLOW", "3")
    monkeypatch.syspath_prepend(tmp_path)
    import slow

    began = time.monotonic()
    for name in ("one", "two"):
        writer.write(slow.write, tmp_path / name, shown)
    assert time.monotonic() - began < 2 and len(writer.running) == 2
    writer.write(slow.write, tmp_path / "one", shown)
    assert time.monotonic() - began > 2.5 and (tmp_path / "one").exists()
    writer.finish([*writer.running])
    assert not writer.running and writer.failed == 0 and (tmp_path / "two").read_text() == "written"
    monkeypatch.setenv("SLOW", "20")
    code = "import sys, time; sys.path[:0] = sys.argv[1:3]; import slow, report.writer as w; w.LARGE_PAGE_CHARS = -1\n"
    code += "writer = w.Writer(); writer.write(slow.write, w.Path(sys.argv[3]), w.ReportPage('a')); time.sleep(1)\n"
    code += "print(*[process.pid for process, _ in writer.running.values()])"
    command = [sys.executable, "-c", code, str(ROOT), str(tmp_path), str(tmp_path / "orphan")]
    pid = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists() and not (tmp_path / "orphan").exists()


def test_a_failure_of_a_tracker_does_not_stop_a_run(quick, monkeypatch, capsys):
    fake = Fake(["log", "samples", "close"])
    monkeypatch.setattr(report.page.trackers, "TRACKERS", dict.fromkeys(report.page.trackers.TRACKERS, lambda *_: fake))
    out = quick("--report-to", "wandb")
    said = capsys.readouterr().out
    assert said.count("--report-to wandb failed (ConnectionError: no log)") == 1 and len(rows(out)) == 2
    assert "done: 2 steps" in said
    assert "<svg" in (out / "report.html").read_text()  # of the last samples: there is no --eval-data
