"""docs/environments.md: its file is played by its commands, and says of flags, ends and metrics what is so.

Commands are written and marked as in docs/tasks.md, see test_docs.py.   pytest tests/test_environments_page.py
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
OWN = sections(PAGE)["Write your own"]
COST = 0.05  # of the page's --env-settings

# All commands in one process, which imports everything once
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
def played(tmp_path_factory):
    """The folder in which the page's commands ran."""
    folder = tmp_path_factory.mktemp("own")
    write_files(OWN, folder)
    found = [(words[1:], wanted) for words, mark, wanted in commands(OWN) if not mark]
    script = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}){RUN}"]
    script.append(json.dumps([words for words, _ in found]))
    done = subprocess.run(script, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    at, printed = 0, done.stdout + done.stderr
    for line in [line for _, wanted in found for line in wanted]:
        assert line in printed[at:], f"no {line!r} in\n{printed[at:]}"
        at = printed.index(line, at)
    assert {"prepare_data.py", "demo.py", "train.py", "eval.py"} == {words[0] for words, _ in found}
    return folder


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_was_trained_on_is_what_the_page_says(played):
    examples, _ = read_examples(str(played / "shapes.parquet"), DataFormatConfig())
    by_uid = {example.uid: example for example in examples}
    logged = rows(played / "out" / "uncover" / "metrics.jsonl")
    assert [row["step"] for row in logged] == [1, 2]
    groups = rows(played / "out" / "uncover" / "rollouts" / "step_000001.jsonl")
    samples = [sample for group in groups for sample in group["samples"]]
    for group in groups:
        rewards = []
        for sample in group["samples"]:
            looks = sum(message["role"] == "user" for message in sample["messages"])
            assert sample["turns"] == looks + 1 == len(sample["messages"]) - looks
            paid = sample["turns"] - (sample["ended_by"] == "done")  # also for what was not shown any more
            assert sample["rewards"]["environment"] == pytest.approx(-COST * paid)
            own = grade(sample["text"], by_uid[group["uid"]], finish_reason=sample["finish_reason"])
            rewards.append(own["reward"] - COST * paid)
            assert sample["rewards"]["reward"] == pytest.approx(rewards[-1])
            assert sample["rewards"]["accuracy"] == own["accuracy"]
        for sample, reward in zip(group["samples"], rewards, strict=True):
            gap = (reward - fmean(rewards)) / (stdev(rewards) + 1e-6)
            assert sample["advantage"] == pytest.approx(gap, abs=1e-4)
    assert logged[0]["episode/turns"] == fmean(sample["turns"] for sample in samples) > 1
    assert logged[0]["episode/images"] == logged[0]["episode/turns"] - 1
    paid = [sample["rewards"]["environment"] for sample in samples]
    assert logged[0]["reward/environment"] == pytest.approx(fmean(paid))
    for why in EPISODE_END_REASONS:
        assert logged[0][f"episode/ended_by/{why}"] == fmean(sample["ended_by"] == why for sample in samples)


def test_the_metrics_of_episodes_are_documented(played):
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    logged = rows(played / "out" / "uncover" / "metrics.jsonl")
    of_episodes = {name for row in logged for name in row if "episode/" in name}
    assert len(of_episodes) >= 4 + len(EPISODE_END_REASONS)
    for name in {*of_episodes, "episode/errors", "episode/timeouts", "reward/environment"}:
        assert f"`{re.sub('ended_by/.*', 'ended_by/*', name)}`" in metrics, name


def test_the_evaluation_shows_turns_with_their_images(played):
    out = played / "out" / "uncover" / "eval"
    summary = json.loads((out / "eval.json").read_text())
    assert (summary["n"], summary["samples"]) == (2, 2)
    assert set(summary["ended_by"]) <= set(EPISODE_END_REASONS) and sum(summary["ended_by"].values()) == pytest.approx(
        1
    )
    page = (out / "report.html").read_text()
    asked_for = round(4 * (summary["turns"] - 1))
    assert page.count("<img ") == 2 + asked_for and page.count(">And now?") == asked_for > 0
    assert page.count("You see a quarter of the image.") == 2  # of each prompt


def test_the_environment_of_the_page_by_hand(played):
    env = make_env_factory(EnvConfig(env=f"{played / 'uncover.py'}:Uncover", env_settings=("cost=0.5",))).make()
    examples, _ = read_examples(str(played / "shapes.parquet"), DataFormatConfig())
    messages, quarters = env.reset(examples[0])
    assert messages[1:] == list(examples[0].messages) and messages[0]["role"] == "system"
    for _ in range(3):
        told = env.step("more")
        assert told.reward == -0.5 and not told.done
        quarters += told.images
    assert env.step("more").done and env.step(r"\boxed{3}").done
    whole = examples[0].pil_images[0]
    together = Image.new("RGB", whole.size)
    for i, quarter in enumerate(quarters):
        together.paste(quarter, (quarter.width * (i % 2), quarter.height * (i // 2)))
    assert together.tobytes() == whole.tobytes()


def test_it_is_short_and_the_marked_commands_have_flags_that_are_there(monkeypatch):
    monkeypatch.setattr(evaluate, "resolve_model", lambda *_: ("", None, {}))  # which opens the model
    [block] = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(block.splitlines()) <= 22 and len([line for line in block.splitlines() if line]) <= 20
    told = commands(OWN) + commands(sections(PAGE)["Built-in environments"])
    marked = [words for words, mark, _ in told if mark]
    assert len(marked) == 5
    for words in marked:
        SCRIPTS[words[1]].parse_args(words[2:])


def test_tables_and_numbers_are_those_of_the_code():
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
