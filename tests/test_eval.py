"""Statistics, the report page, and the commands eval.py and merge_lora.py.   pytest tests/test_eval.py"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from test_train import TORCHRUN, flags, run, write_parquet

import eval as E
import model as M
from demo import make_model
from errors import UserError
from prepare_data import Example
from report.evaluation import example_answer_type, voted_answer
from report.page import plots
from report.page.page import pages
from report.page.plots import draw_curve
from report.run_files import read_rows
from report.statistics import wilson_interval
from report.writer import ReportPage
from rollout import ExampleList, identity, make_prompts
from tasks.shapes import encode_png, shapes_rows
from utils import DistContext


def record(kind, accuracies, finish="stop"):
    rewards = [{"accuracy": a, "format": 1.0, "reward": a} for a in accuracies]
    samples = [{"text": "x", "finish_reason": finish, "tokens": 3, "rewards": r} for r in rewards]
    fields = {"uid": kind + str(accuracies), "answer_type": kind, "task": "shapes", "source": "shapes", "n_images": 1}
    return fields | {"ground_truth": "x", "groups": {}, "samples": samples}


def paired_records(n, scores, others):
    """Return records of a model and of a baseline on the same n examples."""
    pairs = [(record(str(i), [a]), record(str(i), [b])) for i, (a, b) in enumerate(zip(scores, others, strict=True))]
    for i, pair in enumerate(pairs):
        for side in pair:
            side["uid"] = str(i)
    assert len(pairs) == n
    return map(list, zip(*pairs, strict=True))


def test_an_engine_has_the_models_rotary_tables(toys):
    """As in training, they are fp32 with weights of any dtype; rounded to bfloat16, they would change every token."""
    path = str(toys["qwen2_5_vl"])
    command = ["--data", "-", "--out", "-", "--dtype", "bfloat16", "--rollout", "hf"]
    ctx = DistContext(0, 1, torch.device("cpu"))
    cfg = E.parse_args([path, *command])
    engine = E.load_engine(cfg, path, M.Processor(path), ExampleList([], [0]), None, ctx)
    expected = M.load_hf(path, torch.bfloat16)
    for kind in ("named_buffers", "named_parameters"):
        loaded = dict(getattr(engine.hf, kind)())
        for name, tensor in getattr(expected, kind)():
            assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
    assert engine.has_all_weights and list(expected.named_buffers())


def test_a_tied_head_with_its_own_weights_is_refused(tmp_path):
    """transformers does not tie the head of such a model, so the trained head would never reach the engine."""
    make_model(tmp_path / "toy", tied=True)
    file = tmp_path / "toy/model.safetensors"
    weights = load_file(file)
    embedding = next(name for name in weights if name.endswith("embed_tokens.weight"))
    save_file(weights | {"lm_head.weight": weights[embedding] + 1}, file, metadata={"format": "pt"})
    path = str(tmp_path / "toy")
    cfg = E.parse_args([path, "--data", "-", "--out", "-", "--rollout", "hf"])
    with pytest.raises(UserError, match="toy.: config.json ties the head"):
        E.load_engine(
            cfg, path, M.Processor(path), ExampleList([], [0]), None, DistContext(0, 1, torch.device("cpu"))
        )


def test_comparison_counts_what_changed():
    ours, base = paired_records(10, [1, 1, 1, 0, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1, 0, 0, 1, 1])
    comparison = E.compare_with_baseline(ours, base, "accuracy")
    assert (comparison["gained_uids"], comparison["lost_uids"]) == (["0", "1"], ["3"])
    assert (comparison["gained"], comparison["lost"], comparison["mcnemar_p"]) == (2, 1, 1.0)
    assert comparison["difference"] == pytest.approx(0.1)
    low, high = comparison["difference_ci95"]
    assert -0.35 < low < 0 < 0.1 < high < 0.5
    same = E.compare_with_baseline(ours, ours, "accuracy")
    low, high = same["difference_ci95"]
    assert (same["difference"], same["mcnemar_p"]) == (0, 1.0) and -0.3 < low < 0 < high < 0.3


def test_summary_counts_per_example_and_type():
    records = [record("count", [1.0, 0.0]), record("count", [0.0, 0.0], finish="length"), record("colour", [1.0, 1.0])]
    s = E.summarise(records)
    assert s["accuracy"] == s["avg@2"] == s["pass@1"] == pytest.approx(0.5) and s["pass@2"] == pytest.approx(2 / 3)
    assert s["truncated"] == pytest.approx(1 / 3) and s["metric"] == "accuracy"
    colour, count = s["by_answer_type"]["colour"], s["by_answer_type"]["count"]
    assert (colour["n"], colour["accuracy"], count["n"], count["accuracy"]) == (1, 1.0, 2, 0.25)
    assert colour["accuracy_ci95"] == wilson_interval(1, 1) and s["accuracy_ci95"] == wilson_interval(1.5, 3)
    assert "by_task" not in s and "by_images" not in s and "task_mean" not in s
    assert "by answer_type:" in E.format_summary(s)
    assert "by answer_type:" not in E.format_summary(E.summarise(records[:2]))  # it would repeat the accuracy
    low, high = E.summarise([record("a", [12.0]), record("a", [-3.0])])["accuracy_ci95"]
    assert low < 4.5 < high


def test_tasks_and_groups_are_counted_separately():
    records = [record("a", [1.0]), record("a", [0.0]), record("a", [0.0]), record("a", [1.0])]
    for i, r in enumerate(records):
        tasks, levels = ["one", "one", "one", "two"], ["2", "1", "1", "none"]
        r |= {"task": tasks[i], "source": f"hub/{tasks[i]}", "n_images": 1 + i % 2, "groups": {"level": levels[i]}}
    s = E.summarise(records)
    assert {k: (v["n"], v["accuracy"]) for k, v in s["by_level"].items()} == {"1": (2, 0), "2": (1, 1), "none": (1, 1)}
    assert {k: v["n"] for k, v in s["by_images"].items()} == {"1": 2, "2": 2}
    assert {k: v["n"] for k, v in s["by_source"].items()} == {"hub/one": 3, "hub/two": 1}
    assert s["task_mean"]["accuracy"] == pytest.approx((1 / 3 + 1) / 2) and s["task_mean"]["n_tasks"] == 2
    low, high = s["task_mean"]["accuracy_ci95"]
    assert 0.1 < low < 0.5 and 0.8 < high <= 1.0


def test_a_task_without_accuracy_reports_its_reward():
    records = [record("a", [0.5, 0.75])]
    for s in records[0]["samples"]:
        del s["rewards"]["accuracy"], s["rewards"]["format"]
    summary = E.summarise(records)
    assert summary["metric"] == "reward" and summary["reward"] == summary["avg@2"] == 0.625
    assert not summary.keys() & {"accuracy", "accuracy_ci95", "pass@1", "majority@2", "format"}
    assert summary["by_answer_type"]["a"] == {"n": 1, "reward": 0.625, "reward_ci95": wilson_interval(0.625, 1)}
    assert E.format_summary(summary)[0].startswith("reward 0.625")
    # training prints the first entry alone, so it has to say that rewards failed
    assert E.format_summary(summary | {"failed": 3})[0].endswith("\n  failed rewards, counted as 0: 3")
    assert E.visual_reliance(records, {"none": records}, "reward")["constant"] is None


def test_every_named_reward_has_a_mean_with_its_interval():
    """The mean is over the examples that have the reward. With several tasks, each task has its own means."""
    records = [record("a", [0.5, 1.0]), record("b", [0.0, 1.0]), record("c", [0.5, 0.5])]
    rewards_by_example = [({"country": 1.0, "km": 12.0}, {"country": 0.0}), ({"country": 1.0}, {"country": 1.0}),
                          ({"image_1": 0.5, "image_2": 1.0},) * 2]  # fmt: skip
    for r, rewards_by_sample in zip(records, rewards_by_example, strict=True):
        for s, rewards in zip(r["samples"], rewards_by_sample, strict=True):
            s["rewards"] = rewards | {"reward": s["rewards"]["reward"]}
    one_task = E.summarise(records[:2])["rewards"]
    assert one_task == {"country": {"n": 2, "mean": 0.75, "mean_ci95": wilson_interval(1.5, 2)},
                        "km": {"n": 1, "mean": 12.0, "mean_ci95": (12.0, 12.0)}}  # fmt: skip
    records[2]["task"], records[2]["samples"][1]["rewards"]["accuracy"] = "other", 0.5
    two_tasks = E.summarise(records)
    assert {name: (x["n"], x["mean"]) for name, x in two_tasks["rewards"].items()} == {
        "shapes/country": (2, 0.75), "shapes/km": (1, 12.0), "shapes/reward": (2, 0.625),
        "other/accuracy": (1, 0.5), "other/image_1": (1, 0.5), "other/image_2": (1, 1.0), "other/reward": (1, 0.5),
    }  # fmt: skip
    assert two_tasks["metric"] == "reward" and "task_mean" in two_tasks
    lines = E.format_summary(two_tasks)
    assert "rewards:" in lines and any(line.split()[0] == "shapes/km" and line.endswith("n 1") for line in lines)
    accurate = E.summarise([record("a", [1.0])])
    assert accurate["rewards"].keys() == {"format", "reward"} and accurate["metric"] == "accuracy"


def test_partly_correct_answers_have_no_pass_at_k():
    summary = E.summarise([record("a", [2 / 3, 1.0]), record("b", [0.0, 1 / 3])])
    assert summary["accuracy"] == summary["avg@2"] == pytest.approx(0.5) and "pass@1" not in summary
    mixed = [record("a", [1.0]), record("b", [1.0])]
    del mixed[1]["samples"][0]["rewards"]["accuracy"]
    assert E.summarise(mixed)["metric"] == "reward"


def test_votes_count_the_boxed_answers():
    texts = [r"<think>3</think> \boxed{4}", r"\boxed{4.0}", "5", r"\boxed{5", "<think>so</think> 5"]
    kinds = [voted_answer({"text": text, "finish_reason": "stop"}) for text in texts]
    assert kinds == ["4", "4", "5", r"\boxed{5", "5"]
    assert voted_answer({"text": r"\boxed{4}", "finish_reason": "error"}) is None
    assert voted_answer({"text": "<think>perhaps 4", "finish_reason": "length"}) is None
    r = record("a", [1, 1, 0, 0, 0])
    for sample, text in zip(r["samples"], texts, strict=True):
        sample["text"] = text
    assert E.summarise([r])["majority@5"] == 0.5  # 4 and 5 have two votes each


def test_reliance_says_whether_the_model_uses_the_image():
    truths = ["red", "red", "blue", "green"] * 10
    seen, blind = paired_records(40, [1.0] * 40, [1.0, 0, 0, 0] * 10)
    for records in (seen, blind):
        for r, truth in zip(records, truths, strict=True):
            r |= {"answer_type": "colour", "ground_truth": truth}
    reliance = E.visual_reliance(seen, {"blank": blind, "none": seen}, "accuracy")
    assert reliance["constant"] == 0.5 and reliance["blank"]["drop"] == 0.75
    assert reliance["blank"]["accuracy_ci95"] == wilson_interval(10, 40) and reliance["none"]["drop"] == 0
    assert reliance["said"] == (
        "With white images of the same size the accuracy drops from 1.000 to 0.250, down to the level of chance "
        "(0.500): the model uses the image. With no images at all the accuracy is 1.000, not significantly lower: "
        "no evidence that the model uses the image.")
    guessing = E.visual_reliance(blind, {"blank": blind}, "accuracy")["said"]
    assert guessing.startswith("The accuracy, 0.250, is not significantly above chance, 0.500")
    half, _ = paired_records(40, [1.0, 1.0, 1.0, 0] * 10, [0.0] * 40)
    for r, truth in zip(half, truths, strict=True):
        r |= {"answer_type": "colour", "ground_truth": truth}
    said = E.visual_reliance(seen, {"shuffled": half}, "accuracy")["said"]
    assert "to 0.750, still above chance (0.500): some questions" in said


def test_the_table_of_ablations_has_the_accuracy_of_the_questions_with_images():
    """The drops are from it, and not from the accuracy of all questions."""
    seen, blind = paired_records(8, [1.0] * 4 + [0.0] * 4, [0.0] * 8)
    for r in (*seen[4:], *blind[4:]):
        r["n_images"] = 0
    summary = E.summarise(seen) | {"reliance": E.visual_reliance(seen, {"blank": blind}, "accuracy")}
    [own, blank] = [line.split("  ") for line in E.format_summary(summary) if "images  " in line or "same size" in line]
    assert summary["accuracy"] == 0.5 and "1.000 (" in own[-1] and blank[-1].startswith("drop 1.000")
    examples = {r["uid"]: Example(r["uid"], "shapes", [], [], "x", {}) for r in seen}
    page = next(pages(ReportPage("t", seen, examples, summary), {}))
    assert re.search(r"the original images</th>[^\n]*>1\.000<", page)


def test_ablations_of_frames_count_only_questions_with_videos():
    """Other questions are unchanged, so they would hide a drop and count as right answers to reversed videos."""
    seen, ablated = paired_records(40, [1.0] * 40, [0.0] * 20 + [1.0] * 20)
    for i, (r, other) in enumerate(zip(seen, ablated, strict=True)):
        fields = {"n_videos": int(i < 20), "answer_type": "a", "ground_truth": str(i % 2 if i < 20 else i)}
        r |= fields
        other |= fields
    kinds = ("blank", "permuted", "reversed_answer")
    reliance = E.visual_reliance(seen, dict.fromkeys(kinds, ablated), "accuracy")
    assert {k: (reliance[k]["n"], reliance[k]["drop"]) for k in kinds} == {
        "blank": (40, 0.5), "permuted": (20, 1.0), "reversed_answer": (20, 1.0)}
    assert reliance["own_videos"]["n"] == 20
    table = "\n".join(E.format_summary(E.summarise(seen) | {"reliance": reliance}))
    assert re.search(r"the original images +1.000.*\n  the original videos +1.000.*\n  white images", table), table
    assert "own_videos" not in E.visual_reliance(seen[:20], {"permuted": ablated[:20]}, "accuracy")
    assert reliance["constant"] == 0.25 and "drops from 1.000 to 0.000, down to the level of chance (0.500)" in (
        reliance["said"])
    assert "Of the reversed videos 0.000 get the answer that is right for them." in reliance["said"]


def test_comparison_refuses_different_examples():
    with pytest.raises(AssertionError, match="same examples"):
        E.compare_with_baseline([record("a", [1.0])], [record("b", [1.0])], "accuracy")


# ----------------------------------------------------------------------------------------------------------------------
# What the model sees


def coloured(uid, *images, extra=None):
    files = [encode_png(Image.new("RGB", size, colour)) for size, colour in images]
    messages = [{"role": "user", "content": "<image>" * len(files) + "Which?"}]
    return Example(uid, "shapes", messages, files, "x", extra or {})


def webp_bytes(colour):
    """Return an image with the same pixels as in `coloured`, in another file format."""
    Image.new("RGB", (56, 28), colour).save(file := io.BytesIO(), format="WEBP", lossless=True)
    return file.getvalue()


def test_shuffled_images_have_the_size_of_those_they_replace():
    red, blue, green = "red", "blue", "green"
    examples = [coloured("a", ((56, 28), red)), coloured("b", ((28, 84), blue), ((56, 56), green)),
                coloured("c", ((84, 84), "yellow")), coloured("d")]
    ablation = E.Ablation("shuffled", examples, identity, 0)
    for example in examples:
        other = ablation.reset_fn(example)
        assert other.image_sizes == example.image_sizes and other.messages == example.messages
        colours = {image.getpixel((3, 3)) for image in example.pil_images}
        assert not colours & {image.getpixel((3, 3)) for image in other.pil_images}
        repeated = E.Ablation("shuffled", examples, identity, 0).reset_fn(example)
        assert list(repeated.images) == list(other.images)
    same_pixels = [coloured("a", ((56, 28), red)), coloured("b", ((56, 28), red))]  # the same image in another file
    same_pixels[1] = replace(same_pixels[1], images=[webp_bytes(red)])
    with pytest.raises(ValueError, match="row 'a': shuffled: no example has other images"):
        E.Ablation("shuffled", same_pixels, identity, 0).reset_fn(same_pixels[0])
    with pytest.raises(ValueError, match="row 'a': shuffled: no example has other images"):
        same_bytes = [coloured("a", ((56, 28), red)), coloured("b", ((56, 28), red))]
        E.Ablation("shuffled", same_bytes, identity, 0).reset_fn(same_bytes[0])


def test_without_images_their_placeholders_are_removed(loaded):
    example = coloured("a", ((56, 56), "red"), ((56, 56), "blue"))
    ablation = E.Ablation("none", [example], identity, 0)
    assert ablation.reset_fn(example).messages == [{"role": "user", "content": "Which?"}] and not ablation.blank
    [prompt] = make_prompts([example], loaded["qwen2_5_vl"][1], reset_fn=ablation.reset_fn)
    assert prompt.images == [] and prompt.example is example  # the reward still gets the original example


def test_curve_of_a_run(tmp_path):
    rows = [{"step": 0, "eval/accuracy": 0.2}, {"step": 1, "reward/mean": 0.3}]
    rows += [{"step": 2, "reward/mean": 0.5, "eval/accuracy": 0.6}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_curve(tmp_path, 0.1, tmp_path / "curve.png", "shapes", "accuracy")
    image = Image.open(tmp_path / "curve.png").convert("RGB")
    colours = {tuple(int(code[i : i + 2], 16) for i in (0, 2, 4)) for code in ("1f77b4", "ff7f0e", "2ca02c")}
    assert image.size == (750, 365) and colours <= {colour for _, colour in image.getcolors(1 << 20)}


def test_the_value_on_blank_images_is_one_point_of_the_curve(tmp_path, monkeypatch):
    rows = [{"step": step, "eval/accuracy": 0.2} for step in (0, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = []
    monkeypatch.setattr(plots, "draw_grid", lambda panels, out: drawn.extend(panels))
    draw_curve(tmp_path, 0.1, tmp_path / "curve.png", "shapes", "accuracy")
    assert drawn[0][1][-1][1:3] == ([2], [0.1])


def test_answer_types_are_text():
    values = (5, 0, "count", None, "", 1.5, ["a"])
    kinds = [example_answer_type(SimpleNamespace(extra={"answer_type": kind})) for kind in values]
    assert kinds == ["5", "0", "count", "all", "all", "1.5", "['a']"]
    assert example_answer_type(SimpleNamespace(extra={})) == "all"


def test_the_settings_of_a_run_are_the_defaults(toys, data, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer.json").write_text("{}")
    settings = {
        "model": str(toys["qwen2_5_vl"]), "max_new_tokens": 2048, "max_prompt_tokens": 700, "image_key": "image",
        "max_pixels": 4000, "min_pixels": None, "dtype": "bfloat16", "instruction": "geo3k", "prompt_key": "problem",
        "answer_key": "answer", "data_source": "geo3k", "bad_rows": "skip", "reward": [f"{tmp_path}/mine.py:f"],
        "group_size": 5,
    }
    (tmp_path / "run" / "run.json").write_text(json.dumps({"args": settings}))
    (tmp_path / "mine.py").touch()
    common = ["--data", str(data), "--out", str(tmp_path / "e")]
    reward_flags = ["--reward", f"{tmp_path}/mine.py:f"]
    for path in (tmp_path / "run", checkpoint):
        args = E.parse_args([str(path), *common, *reward_flags, "--image-key", "images", "--dtype", "auto"])
        assert (args.max_new_tokens, args.max_prompt_tokens, args.instruction) == (2048, 700, "geo3k")
        assert (args.max_pixels, args.min_pixels) == (4000, None)
        assert (args.prompt_key, args.answer_key) == ("problem", "answer")
        assert (args.data_source, args.bad_rows) == ("geo3k", "skip")
        assert (args.image_key, args.dtype, args.reward) == ("images", "auto", (*settings["reward"],))
        same_line, *other_lines = E.describe_run_settings(args)
        printed = dict(part.split(" ", 1) for part in same_line.removeprefix("same as in training: ").split(", "))
        assert printed["--max-new-tokens"] == "2048" and printed["--instruction"] == "geo3k"
        assert printed["--prompt-key"] == "problem"
        assert not printed.keys() & {"--dtype", "--model", "--image-key", "--group-size"}
        assert other_lines == ["unlike the run's evaluations: --image-key images (run: image), "
                               f"--dtype auto (run: bfloat16), --data {data} (run: none)"]
    args = E.parse_args([str(tmp_path / "run"), *common, "--reward", "default"])
    printed = "\n".join(E.describe_run_settings(args))
    assert args.reward == () and f"(run: {tmp_path}/mine.py:f)" in printed
    assert E.parse_args([str(tmp_path / "run"), *common, "--reward", "other.py:g"]).reward == ("other.py:g",)
    plain = E.parse_args([str(toys["qwen2_5_vl"]), *common])
    assert (plain.max_new_tokens, plain.max_prompt_tokens, plain.instruction) == (512, 2048, "")
    assert E.describe_run_settings(plain) == []


def test_a_file_is_the_same_by_any_path(toys, tmp_path, monkeypatch):
    """A run stores absolute paths; the same file by a relative path is no other setting, nor another evaluation."""
    (tmp_path / "run" / "checkpoints" / "step_000001").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step_000001" / "trainer.json").write_text("{}")
    settings = {"model": str(toys["qwen2_5_vl"]), "eval_data": f"{tmp_path}/a.parquet,{tmp_path}/b.parquet"}
    (tmp_path / "run" / "run.json").write_text(json.dumps({"args": settings}))
    for name in "abc":
        (tmp_path / f"{name}.parquet").touch()
    monkeypatch.chdir(tmp_path / "run")

    def parse(data):
        return E.parse_args([".", "--data", data, "--out", "../e"])

    for same in ("../a.parquet,../b.parquet", f"../a.parquet,{tmp_path}/b.parquet"):
        assert "unlike" not in "\n".join(E.describe_run_settings(parse(same)))
    printed = "\n".join(E.describe_run_settings(parse("../a.parquet,../c.parquet")))
    assert f"--data ../a.parquet,../c.parquet (run: {settings['eval_data']})" in printed
    assert "--data ../a.parquet,../d.parquet" in "\n".join(E.describe_run_settings(parse("../a.parquet,../d.parquet")))
    (tmp_path / "e").mkdir()
    first = E.evaluation_settings(parse("../a.parquet"))
    (tmp_path / "e" / "eval.json").write_text(json.dumps({"settings": first}))
    E.check_output_dir(parse(f"{tmp_path}/a.parquet"))
    with pytest.raises(UserError, match=r"holds another evaluation: --data was \.\./a\.parquet and is \.\./c\.parquet"):
        E.check_output_dir(parse("../c.parquet"))


def test_the_error_for_an_unknown_flag_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        E.parse_args(["toy", "--dta", "test.parquet", "--out", "e"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: unknown flag --dta (did you mean --data")


def test_out_is_checked_before_anything_is_read(toys, tmp_path, monkeypatch):
    monkeypatch.setattr(E, "setup_distributed", lambda: DistContext(0, 1, torch.device("cpu")))
    refused = "/sys/no" if os.geteuid() == 0 else "/no"  # /sys: nobody makes files there
    with pytest.raises(ValueError, match=f"--out {refused}: .* cannot be written"):
        E.main(E.parse_args([str(toys["qwen2_5_vl"]), "--data", "none.parquet", "--out", refused]))


def test_figures_are_printed_even_if_the_disk_is_full(toys, tmp_path):
    rows = list(shapes_rows(6, "test", 0))
    for row, answer_type in zip(rows, (5, 5, 0, None, None, None), strict=True):
        row["extra_info"]["answer_type"] = answer_type
        row["extra_info"]["uid"] += "\x1b[2J"
    rows[5]["prompt"][0]["content"] += " why?" * 100
    data, out = write_parquet(tmp_path / "test.parquet", rows), tmp_path / "out"
    out.mkdir()
    (out / "eval.json.tmp").symlink_to("/dev/full")
    # the task's own reward would refuse these answer types
    code = "def score(response, example):\n    return float(response == example.ground_truth)\n"
    (tmp_path / "mine.py").write_text(code)
    done = run([sys.executable, "eval.py", toys["qwen2_5_vl"], "--data", data, "--max-new-tokens", 3,
                "--max-prompt-tokens", 200, "--reward", f"{tmp_path}/mine.py:score", "--out", out], check=False)
    assert done.returncode == 1 and "no space left" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert "reward 0.000" in done.stdout and "wrote" not in done.stdout
    types = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert types == ["0", "5", "all"]
    assert "left out: 'shapes-test-0-5\\x1b[2J': " in done.stdout and "\x1b" not in done.stdout


@pytest.fixture
def data(tmp_path):
    return write_parquet(tmp_path / "test.parquet", shapes_rows(10, "test", 0))


def test_command_writes_json_predictions_and_page_and_compares(toys, data, tmp_path):
    toy, out = toys["qwen3_vl"], tmp_path / "e"
    command = [sys.executable, "eval.py", toy, "--data", data, "--max-new-tokens", 3, "--out", out]
    comparisons = ["--baseline", toy, toys["qwen2_5_vl"], "--ablate", "shuffled", "none", "--group-by", "split"]
    done = run([*command, *comparisons])
    result = json.loads((out / "eval.json").read_text())
    assert result["n"] == 10 and set(result["by_answer_type"]) == {"count", "colour", "shape", "exists", "angle"}
    same, other = result["baselines"]
    assert same["mcnemar_p"] == 1.0 and same["accuracy"] == result["accuracy"] and same["gained"] == same["lost"] == 0
    assert (same["path"], other["path"]) == (str(toy), str(toys["qwen2_5_vl"]))
    assert result["by_split"]["test"]["n"] == 10 and set(result["reliance"]) >= {"shuffled", "none", "said"}
    assert "accuracy 0.000 (0.000 to 0.278)" in done.stdout and "no images at all" in done.stdout
    assert (out / "report.html").read_text().count("<img") >= 10
    lines = {f.name: list(map(json.loads, f.read_text().splitlines())) for f in out.glob("predictions*.jsonl")}
    assert set(lines) == {f"predictions{x}.jsonl" for x in ("", "_baseline_1", "_baseline_2", "_ablate_shuffled",
                                                            "_ablate_none")}
    uids = [r["uid"] for r in lines["predictions.jsonl"]]
    assert len(set(uids)) == 10 and all([r["uid"] for r in rows] == uids for rows in lines.values())
    assert lines["predictions.jsonl"] == lines["predictions_baseline_1.jsonl"] != lines["predictions_baseline_2.jsonl"]
    assert E.summarise(lines["predictions.jsonl"])["reward"] == result["reward"]

    before = (out / "eval.json").read_bytes()
    again = run([*command, *comparisons])  # the same evaluation may be repeated
    assert "wrote" in again.stdout and (out / "eval.json").read_bytes() == before
    other = run([*command, *comparisons, "--limit", 4], check=False)
    assert f"error: --out {out} holds another evaluation: --limit was None and is 4" in other.stderr
    assert other.returncode == 1 and (out / "eval.json").read_bytes() == before


def test_several_samples_on_two_processes(toys, data, tmp_path):
    toy, out = toys["qwen3_vl"], tmp_path / "e"
    done = run([*TORCHRUN, 2, "eval.py", toy, "--data", data, "--ablate", "blank", "--samples", 3,
                "--max-new-tokens", 3, "--out", out])
    result = json.loads((out / "eval.json").read_text())
    assert result["n"] == 10 and result["samples"] == 3 and done.stdout.count("wrote") == 1
    assert {"avg@3", "pass@1", "pass@2", "pass@3", "majority@3"} <= result.keys() and "blank" in result["reliance"]
    assert "white images of the same size" in done.stdout


@pytest.mark.slow
def test_eval_reports_the_same_figures_as_training(toys, tmp_path):
    """The figures are equal to the last digit when eval.py gets the run and its --reward."""
    rows = list(shapes_rows(24, "test", 0))
    data = write_parquet(tmp_path / "test.parquet", rows)
    (tmp_path / "length.py").write_text(
        "def score(response, example, finish_reason):\n"
        "    short = finish_reason == 'stop'\n"
        "    return {'accuracy': float(sum(map(ord, response)) % 3 == 0), 'reward': len(response) / 7 - short}\n")
    out = tmp_path / "run"
    settings = ["--steps", 2, "--eval-data", data, "--reward", f"{tmp_path}/length.py:score", "--max-new-tokens", 9,
                "--max-pixels", 4000, "--lr", "0.003"]
    run([sys.executable, "train.py", *flags(toys["qwen2_5_vl"], data, out, *settings)])
    trained = read_rows(out / "metrics.jsonl")[-1]
    done = run([sys.executable, "eval.py", out, "--out", tmp_path / "e", *settings[4:6]])
    result = json.loads((tmp_path / "e" / "eval.json").read_text())
    assert {f"eval/{name}": result[name] for name in ("accuracy", "reward", "truncated")} == {
        name: trained[name] for name in ("eval/accuracy", "eval/reward", "eval/truncated")}
    assert 0 < result["accuracy"] < 1 and result["reward"] != result["accuracy"]
    assert "unlike the run" not in done.stdout and "--max-pixels 4000" in done.stdout
    # the run's folder already has a report
    refused = run([sys.executable, "eval.py", out, "--out", out, *settings[4:6]], check=False)
    assert refused.returncode == 1 and "is a run, whose report.html this would replace" in refused.stderr


@pytest.mark.parametrize("tp", [1, 2])
def test_training_evaluates_every_example_once(tp, toys, tmp_path):
    """This also holds with --tp 2: the two ranks train on the same data but evaluate different examples."""
    data = write_parquet(tmp_path / "test.parquet", shapes_rows(13, "test", 0))
    out = tmp_path / "run"
    settings = ["--steps", 1, "--eval-data", data, "--tp", tp]
    run([*TORCHRUN, 2, "train.py", *flags(toys["qwen2_5_vl"], data, out, *settings)])
    assert [row["eval/n"] for row in read_rows(out / "metrics.jsonl")] == [13, 13]
    uids = [json.loads(line)["uid"] for line in (out / "eval" / "step_000001.jsonl").read_text().splitlines()]
    assert uids == [row["extra_info"]["uid"] for row in shapes_rows(13, "test", 0)]


@pytest.mark.parametrize("arguments,match", [
    (["nobody/nothing"], "MODEL 'nobody/nothing'"),
    (["TOY", "--samples", "2", "--temperature", "0"], "copies of one response"),
    (["TOY", "--samples", "0"], "--samples 0"),
    (["TOY", "--temperature", "-1"], "--temperature -1.0: must be at least 0"),
    (["TOY", "--top-p", "0"], "--top-p 0.0: must be above 0 and at most 1"),
    (["TOY", "--limit", "-1"], "--limit -1"),
    (["TOY", "--vllm", "tensor_parallel_size=2"], "--vllm tensor_parallel_size=2: the engine is hf"),
    (["TOY", "--vllm", "a=1"], "--vllm a=1: the engine is hf; remove --vllm"),
    (["TOY", "--baseline", "nobody/nothing"], "--baseline 'nobody/nothing'"),
    (["TOY", "--max-prompt-tokens", "5"], "no usable prompts: 10 over --max-prompt-tokens 5, 0 with special tokens"),
    (["TOY", "--group-by", "level"], "--group-by level: no such column in"),
    (["TOY", "--env", "look_closer", "--ablate", "none"], "use --ablate blank"),
    (["EMPTY_RUN"], "without a complete checkpoint"),
    (["CODE"], "this model needs custom code"),
])
def test_errors_are_one_line(arguments, match, toys, data, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.json").write_text("{}")
    code = shutil.copytree(toys["qwen2_5_vl"], tmp_path / "code")
    config = json.loads((code / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}
    (code / "config.json").write_text(json.dumps(config))
    (code / "configuration_mine.py").write_text("raise SystemExit('ran')")
    names = {"TOY": str(toys["qwen2_5_vl"]), "EMPTY_RUN": str(tmp_path / "empty"), "CODE": str(code)}
    command = [sys.executable, "eval.py", *(names.get(a, a) for a in arguments), "--data", data]
    done = run([*command, "--out", tmp_path / "out"], check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 1 and match in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert "[y/N]" not in done.stdout


@pytest.mark.parametrize("case,match", [("no_run", "neither a run directory"), ("full_out", "is not empty"),
                                        ("empty", "neither a run directory")])
def test_merge_refuses_what_it_cannot_do(case, match, toys, tmp_path):
    out = tmp_path / "out"
    if case == "full_out":
        out.mkdir()
        (out / "mine.txt").write_text("precious")
        checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
        checkpoint.mkdir(parents=True)
        (checkpoint / "trainer.json").write_text("{}")
        (tmp_path / "run" / "run.json").write_text(json.dumps({"args": {"model": str(toys["qwen2_vl"])}}))
    source = tmp_path / "run" if case == "full_out" else toys["qwen2_vl"]
    if case == "empty":
        source = tmp_path / "empty"
        source.mkdir()
    done = run([sys.executable, "merge_lora.py", source, "--out", out], check=False)
    assert done.returncode == 1 and match in done.stderr and "--model" not in done.stderr
    assert not out.exists() or [p.name for p in out.iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_a_merged_folder_with_a_tied_head_evaluates_as_the_run_does(tmp_path):
    """The merged folder loads and evaluates as the run does. test_train.py compares the weights bit by bit."""
    make_model(tmp_path / "tied", hidden=64, layers=2, vocab=448, tied=True)
    train_file = write_parquet(tmp_path / "train.parquet", shapes_rows(8, "train", 0))
    common = flags(tmp_path / "tied", train_file, tmp_path / "run", "--max-pixels", 4000)
    run([sys.executable, "train.py", *common, "--steps", 1])
    run([*TORCHRUN, 2, "train.py", *common, "--steps", 2, "--resume", "auto"])
    done = run([sys.executable, "merge_lora.py", tmp_path / "run", "--out", tmp_path / "hf"])
    limits = json.loads((tmp_path / "hf" / "preprocessor_config.json").read_text())["size"]
    assert limits["longest_edge"] == 4000  # the run's limit, not the base model's
    run([sys.executable, "merge_lora.py", tmp_path / "run", "--out", tmp_path / "half", "--dtype", "bfloat16"])
    assert "log-probabilities differ from the run's" in done.stdout
    texts = []
    settings = ["--max-new-tokens", 6, "--max-prompt-tokens", 80, "--reward", f"{tmp_path}/reward.py:score"]
    for name, extra_flags in (("run", settings[-2:]), ("hf", settings)):
        out = tmp_path / f"e-{name}"
        done = run([sys.executable, "eval.py", tmp_path / name, "--data", train_file, "--out", out, *extra_flags])
        expected = f"--max-pixels 4000, --reward {tmp_path}/reward.py:score, --max-new-tokens 6, --max-prompt-tokens 80"
        assert (f"same as in training: {expected}" in done.stdout) == (name == "run")
        texts.append((out / "predictions.jsonl").read_text())
    assert texts[0] == texts[1]
    assert (tmp_path / "hf" / "preprocessor_config.json").is_file()
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("tied", "hf"))
    assert before.keys() == after.keys() and not any(k.startswith("lm_head") for k in after)
    assert any(k.endswith("embed_tokens.weight") and not torch.equal(before[k], after[k]) for k in after)
