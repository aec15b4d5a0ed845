"""docs/environments.md: its commands run with its example file, and its flags, end reasons and metrics match the code.

Commands are written and marked as in docs/tasks.md; see test_docs.py.   pytest tests/test_environments_page.py
"""

import json
import re
import subprocess
import sys
from dataclasses import fields
from statistics import fmean, stdev

import pytest
from PIL import Image
from test_docs import ROOT, SCRIPTS, commands, sections, write_files

import eval as evaluate
from envs import Environment, Observation
from envs._episodes import MAX_WAIT_SECONDS
from envs._threads import MAX_THREADS
from prepare_data import DataFormatConfig, read_examples
from rewards.grade import grade
from rollout import EPISODE_END_REASONS, EnvConfig, make_env_factory

PAGE = (ROOT / "docs" / "environments.md").read_text()
EXAMPLE = sections(PAGE)["Write your own"]
GYMNASIUM = sections(PAGE)["Gymnasium environments"]
COST = 0.05  # as in the page's --env-settings

# Run all commands in one process, so that everything is imported once
RUN = """
import importlib, json, sys
import torch.distributed as dist
for script, *words in json.loads(sys.argv[1]):
    module = importlib.import_module(script.removesuffix(".py"))
    module.main(module.parse_args(words))
    if dist.is_initialized():
        dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """Run the page's commands. Return the folder in which they ran."""
    folder = tmp_path_factory.mktemp("own")
    write_files(EXAMPLE + GYMNASIUM, folder)
    runs = [(words[1:], expected) for words, mark, expected in commands(EXAMPLE + GYMNASIUM) if not mark]
    script = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}){RUN}"]
    script.append(json.dumps([words for words, _ in runs]))
    done = subprocess.run(script, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    position, printed = 0, done.stdout + done.stderr
    for line in [line for _, expected in runs for line in expected]:
        assert line in printed[position:], f"no {line!r} in\n{printed[position:]}"
        position = printed.index(line, position)
    assert {"prepare_data.py", "demo.py", "train.py", "eval.py"} == {words[0] for words, _ in runs}
    return folder


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_training_uses_the_rewards_that_the_page_describes(run_folder):
    examples, _ = read_examples(str(run_folder / "shapes.parquet"), DataFormatConfig())
    by_uid = {example.uid: example for example in examples}
    logged = rows(run_folder / "out" / "uncover" / "metrics.jsonl")
    assert [row["step"] for row in logged] == [1, 2]
    groups = rows(run_folder / "out" / "uncover" / "rollouts" / "step_000001.jsonl")
    samples = [sample for group in groups for sample in group["samples"]]
    for group in groups:
        rewards = []
        for sample in group["samples"]:
            n_observations = sum(message["role"] == "user" for message in sample["messages"])
            assert sample["turns"] == n_observations + 1 == len(sample["messages"]) - n_observations
            # a request also costs if the episode ends before its observation is shown
            paid = sample["turns"] - (sample["ended_by"] == "done")
            assert sample["rewards"]["environment"] == pytest.approx(-COST * paid)
            graded = grade(sample["text"], by_uid[group["uid"]], finish_reason=sample["finish_reason"])
            rewards.append(graded["reward"] - COST * paid)
            assert sample["rewards"]["reward"] == pytest.approx(rewards[-1])
            assert sample["rewards"]["accuracy"] == graded["accuracy"]
        for sample, reward in zip(group["samples"], rewards, strict=True):
            gap = (reward - fmean(rewards)) / (stdev(rewards) + 1e-6)
            assert sample["advantage"] == pytest.approx(gap, abs=1e-4)
    assert logged[0]["episode/turns"] == fmean(sample["turns"] for sample in samples) > 1
    assert logged[0]["episode/images"] == logged[0]["episode/turns"] - 1
    paid = [sample["rewards"]["environment"] for sample in samples]
    assert logged[0]["reward/environment"] == pytest.approx(fmean(paid))
    for reason in EPISODE_END_REASONS:
        assert logged[0][f"episode/ended_by/{reason}"] == fmean(sample["ended_by"] == reason for sample in samples)


def test_the_metrics_of_episodes_are_documented(run_folder):
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    logged = rows(run_folder / "out" / "uncover" / "metrics.jsonl")
    of_episodes = {name for row in logged for name in row if "episode/" in name}
    assert len(of_episodes) >= 4 + len(EPISODE_END_REASONS)
    for name in {*of_episodes, "episode/errors", "episode/timeouts", "reward/environment"}:
        assert f"`{re.sub('ended_by/.*', 'ended_by/*', name)}`" in metrics, name


def test_the_evaluation_shows_turns_with_their_images(run_folder):
    out = run_folder / "out" / "uncover" / "eval"
    summary = json.loads((out / "eval.json").read_text())
    assert (summary["n"], summary["samples"]) == (2, 2)
    assert set(summary["ended_by"]) <= set(EPISODE_END_REASONS) and sum(summary["ended_by"].values()) == pytest.approx(
        1
    )
    page = (out / "report.html").read_text()
    n_observations = round(4 * (summary["turns"] - 1))
    assert page.count("<img ") == 2 + n_observations and page.count(">And now?") == n_observations > 0
    assert page.count("You see a quarter of the image.") == 2  # once in each prompt


def test_the_pages_environment_by_hand(run_folder):
    env = make_env_factory(EnvConfig(env=f"{run_folder / 'uncover.py'}:Uncover", env_settings=("cost=0.5",))).make()
    examples, _ = read_examples(str(run_folder / "shapes.parquet"), DataFormatConfig())
    messages, quarters = env.reset(examples[0])
    assert messages[1:] == list(examples[0].messages) and messages[0]["role"] == "system"
    for _ in range(3):
        observation = env.step("more")
        assert observation.reward == -0.5 and not observation.done
        quarters += observation.images
    assert env.step("more").done and env.step(r"\boxed{3}").done
    whole = examples[0].pil_images[0]
    together = Image.new("RGB", whole.size)
    for i, quarter in enumerate(quarters):
        together.paste(quarter, (quarter.width * (i % 2), quarter.height * (i // 2)))
    assert together.tobytes() == whole.tobytes()


def test_the_example_of_gymnasium_by_hand(run_folder):
    env = make_env_factory(EnvConfig(env=f"{run_folder / 'arrow.py'}:Arrow")).make()
    examples, _ = read_examples(str(run_folder / "shapes.parquet"), DataFormatConfig())
    sides = set()
    for example in examples:
        text, [image] = env.reset(example)
        assert text == "<image>Is the square left or right?" and image.size == (56, 56)
        side = "left" if image.getpixel((1, 28)) == (255, 255, 255) else "right"
        assert env.step("I do not know") == Observation("No. Look again.", [], 0.0, False)
        assert env.step(f"It is {side}.") == Observation("", [], 1.0, True)
        sides.add(side)
    assert sides == {"left", "right"}
    [row] = rows(run_folder / "out" / "arrow" / "metrics.jsonl")
    assert row["episode/errors"] == 0 and row["episode/turns"] >= 1


def test_the_example_is_short_and_marked_commands_have_valid_flags(monkeypatch):
    monkeypatch.setattr(evaluate, "resolve_model", lambda *_: ("", None, {}))  # it would open the model
    [block] = re.findall(r"```python\n(.*?)```", EXAMPLE, re.S)
    assert len(block.splitlines()) <= 22 and len([line for line in block.splitlines() if line]) <= 20
    page_commands = commands(EXAMPLE) + commands(sections(PAGE)["The built-in environment"])
    marked = [words for words, mark, _ in page_commands if mark]
    assert len(marked) == 3
    for words in marked:
        SCRIPTS[words[1]].parse_args(words[2:])


def test_tables_and_numbers_match_the_code():
    cells = dict(re.findall(r"^\| `--([a-z-]+)` \| (.*?) \|", PAGE, re.M))
    for field in fields(EnvConfig):
        default = cells[field.name.replace("_", "-")].strip("`")
        if field.default not in (None, ()):
            assert default == f"{field.default:g}" if not isinstance(field.default, str) else default == field.default
    ends = sections(PAGE)["What ends an episode"]
    assert tuple(re.findall(r"^\| `(\w+)` \|", ends, re.M))[1:] == EPISODE_END_REASONS
    contract = sections(PAGE)["The two methods"]
    assert re.findall(r"^\| `(\w+)` \|", contract, re.M) == [field.name for field in fields(Observation)]
    assert f"at most {MAX_WAIT_SECONDS} seconds for each call" in PAGE and f"up to {MAX_THREADS} threads" in PAGE
    assert Environment.images_per_turn == 1
