"""The pages of docs/ link to files and sections that exist, docs/README.md lists them all, and their commands have
valid flags. The commands of docs/data.md, coming_from.md and troubleshooting.md run.   pytest tests/test_docs_links.py
"""

import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import complete
from PIL import Image, ImageColor
from test_docs import ROOT, SCRIPTS, commands, run, sections, write_files
from test_environments_page import RUN
from warm import run_command

import eval as evaluate
import train
from parallel.plan import TOO_FEW, PlanConfig
from prepare_data import DataFormatConfig, read_examples
from report.page.plots import PANELS
from reward import RewardConfig
from rewards.grade import Grader, make_rollout_stub

pytestmark = complete
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "RESULTS.md", ROOT / "CHANGELOG.md"]
LINK = re.compile(r"\]\(([^()\s]+(?:\([^()]*\))?[^()\s]*)\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*?) *$", text, re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        n = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", anchor) is not None for anchor in found)
        found.add(f"{slug}-{n}" if n else slug)
    return found


def broken_links(page: Path) -> list[str]:
    """Return the links of a page whose file or section does not exist."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    broken = []
    for link in LINK.findall(text.replace("\n", " ")):
        name, _, anchor = link.partition("#")
        target = page if not name else page.parent / name
        if not re.match(r"https?://", link) and not (
            target.exists() and (not anchor or anchor in anchors(target))
        ):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_sections_that_exist(page):
    assert broken_links(page) == []


def test_a_broken_link_is_noticed(tmp_path):
    page = tmp_path / "a.md"
    links = "[1](#a-b-c-d) [2](#x-1) [3](#x-2) [4](b.md) [5](a.md#y) [6](https://z#y)"
    page.write_text(f"# A `b-c`, d\n## x\n## x\n{links}")
    assert broken_links(page) == ["#x-2", "b.md", "a.md#y"]


def test_the_index_has_a_question_per_line_and_every_page():
    index = (DOCS / "README.md").read_text()
    questions = [line for line in index.splitlines() if line.startswith("- ")]
    assert len(questions) > 40 and all(re.fullmatch(r"- [A-Z].*\? \[[^]]+\]\([^)]+\)", q) for q in questions)
    linked = {link.partition("#")[0] for link in LINK.findall(index)}
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} <= linked


def find_commands(page: Path) -> list[list[str]]:
    """Return the words of each command for a script in a page's code blocks, from the script on."""
    text = page.read_text()
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.M | re.S) + re.findall(r"^    (?:\$ )?(.*)$", text, re.M)
    found = []
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        if re.match(r"(python|torchrun|\S+/python) ", line) and "..." not in line:
            words = shlex.split(line, comments=True)
            start = next((i for i, word in enumerate(words) if word in SCRIPTS), None)
            found += [words[start:]] if start is not None else []
    return found


@pytest.mark.parametrize("page", PAGES[:-2], ids=lambda page: page.name)
def test_the_commands_of_a_page_have_valid_flags(page, monkeypatch):
    monkeypatch.setattr(evaluate, "resolve_model", lambda *_: ("", None, {"eval_data": "test.parquet"}))
    for script, *words in find_commands(page):
        if "--plan" in words:
            train.parse_args([word for word in words if word != "--plan"], (PlanConfig,), TOO_FEW)
        elif "--resume" not in words:  # it reads the run
            SCRIPTS[script].parse_args(words)


def test_the_pages_have_commands():
    assert sum(len(find_commands(page)) for page in PAGES[:-2]) > 50


# --- commands that run ------------------------------------------------------------------------------------------------


def assert_printed(printed: str, wanted: list[str]) -> None:
    position = 0
    for line in wanted:
        assert line in printed[position:], f"no {line!r} in\n{printed}"
        position = printed.index(line, position) + len(line)


def write_images(folder: Path) -> None:
    for name in "ab":
        Image.new("RGB", (84, 84), "red").save(folder / f"{name}.png")


@pytest.mark.parametrize("page, section", [("data.md", "Train on your own data"), ("coming_from.md", "Data")])
def test_the_conversions_of_a_page_print_what_it_shows(page, section, tmp_path, monkeypatch, capsys):
    text = sections((DOCS / page).read_text())[section]
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path)
    for name, content in re.findall(r"`([\w.]+)`[^`]*:\n\n```\n(.*?)```", text, re.S):
        (tmp_path / name).write_text(content)
    page_commands = [(words, wanted) for words, comment, wanted in commands(text) if not comment]
    for words, wanted in page_commands:
        assert_printed(run(words, capsys), wanted)
    assert page_commands


def test_the_example_for_a_laptop_runs(toys, tmp_path, monkeypatch, capsys):
    """Its code and its commands run as they are in docs/data.md, but with a random toy and for one small step."""
    text = sections((DOCS / "data.md").read_text())["Try it on a laptop"]
    [code] = re.findall(r"```python\n(.*?)```", text, re.S)
    (tmp_path / "draw.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    [draw, convert, train_words] = [words for words, *_ in commands(text.replace("\\\n", " "))]
    subprocess.run([sys.executable, *draw[1:]], check=True)
    run(convert, capsys)
    examples, counts = read_examples("discs.parquet", DataFormatConfig())
    prompt = r"<image>Answer in \boxed{}. What colour are they?"
    assert len(examples) == 400 and {e.messages[0]["content"] for e in examples} == {prompt}
    for example in examples[:20]:  # the answer is the colour of the only disc
        colours = Image.open(io.BytesIO(example.images[0])).getcolors()
        [(n, disc)] = [item for item in colours if item[1] != (255, 255, 255)]
        assert n > 350 and disc == ImageColor.getrgb(re.search(rf'"{example.ground_truth}": "(#\w+)"', code)[1])
    small = ["--steps", 1, "--prompts-per-step", 2, "--group-size", 2, "--model", toys["qwen2_5_vl"]]
    done = run_command([sys.executable, ROOT / "train.py", *train_words[2:], *small], tmp_path)
    assert done.returncode == 0, done.stderr
    [row] = [json.loads(line) for line in (tmp_path / "out/discs/metrics.jsonl").read_text().splitlines()]
    assert row["rollout/responses"] == 4 and 0 <= row["reward/mean"] <= 1


def test_the_same_rows_are_read_from_each_kind_of_file(tmp_path, monkeypatch, capsys):
    """As docs/data.md says, `vqa` needs no flag for JSONL, CSV, parquet and a folder of the Hugging Face hub."""
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path)
    image = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}
    (tmp_path / "qa.jsonl").write_text(json.dumps({"image": "a.png", "question": "How many?", "answer": 3}) + "\n")
    (tmp_path / "qa.csv").write_text("image,question,answer\na.png,How many?,3\n")
    table = pa.Table.from_pylist([{"image": image, "question": "How many?", "answer": "3"}])
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for name in ("qa.parquet", "hub/data/train-00000-of-00001.parquet", "hub/data/test-00000-of-00001.parquet"):
        pq.write_table(table, name)
    rows = []
    for name in ("qa.jsonl", "qa.csv", "qa.parquet", "hub", "hub --split test"):
        run(["python", "prepare_data.py", "vqa", "--input", *name.split(), "--out", "out.parquet"], capsys)
        [example], _ = read_examples("out.parquet", train.parse_args(
            ["--model", "m", "--data", "out.parquet", "--out", "o", "--steps", "1"]).data)
        rows.append((example.data_source, example.messages, list(example.images), example.ground_truth))
    assert all(row == rows[0] for row in rows) and rows[0][0] == "vqa" and rows[0][3] == "3"


def test_the_files_of_other_frameworks_are_read_with_the_flags_of_the_page(tmp_path, monkeypatch):
    text = sections((DOCS / "coming_from.md").read_text())["Data"]
    flags_of = {line.split("|")[1].split(":")[0].strip(): line.split("|")[2] for line in text.splitlines()
                if line.startswith("| ")}  # fmt: skip
    write_images(tmp_path)
    image = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "How many?"}]
    verl = {"data_source": "hiyouga/geometry3k", "prompt": [{"role": "user", "content": "<image>Find x."}],
            "images": [image], "ability": "math", "reward_model": {"style": "rule", "ground_truth": "3"},
            "extra_info": {"split": "train", "index": 0, "answer": "3", "question": "<image>Find x."}}  # fmt: skip
    rows = {
        "verl's parquet": verl,
        "EasyR1's parquet": {"images": [image], "problem": "<image>Find x.", "answer": "3"},
        "TRL's dataset as parquet": {"prompt": [{"role": "user", "content": "How many?"}], "image": image,
                                     "solution": "3"},
        "TRL's `prompt` with image parts": {"prompt": [{"role": "user", "content": parts}], "image": image,
                                            "solution": "3"},
    }  # fmt: skip
    for name, row in rows.items():
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "f.parquet")
        cell = flags_of["TRL's dataset as parquet" if flags_of[name].strip().startswith("the same") else name]
        flags = shlex.split(cell.replace("`", "").replace("no flag", ""))
        cfg = train.parse_args(["--model", "m", "--data", str(tmp_path / "f.parquet"), "--out", "o", "--steps", "1",
                                *flags]).data  # fmt: skip
        [example], left_out = read_examples(cfg.data, cfg, check=Grader().check_examples)
        assert not left_out and example.ground_truth == "3" and list(example.images) == [image["bytes"]]
        assert example.messages[0]["content"].startswith("<image>Find x." if "T" not in name[0] else "<image>How many?")


def test_a_reward_of_your_own_needs_no_data_source(tmp_path):
    write_images(tmp_path)
    image = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}
    row = {"images": [image], "problem": "<image>Find x.", "answer": r"\boxed{3}"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "f.parquet")
    write_files(ADAPTERS, tmp_path)
    reward = f"{tmp_path}/my_verl_reward.py:score"
    cfg = train.parse_args(["--model", "m", "--data", str(tmp_path / "f.parquet"), "--out", "o", "--steps", "1",
                            "--prompt-key", "problem", "--answer-key", "answer", "--reward", reward])  # fmt: skip
    [example], _ = read_examples(cfg.data.data, cfg.data, check=Grader(cfg.reward).check_examples)
    assert (example.data_source, example.ground_truth) == ("", r"\boxed{3}")


ADAPTERS = sections((DOCS / "coming_from.md").read_text())["Reward functions"]


@pytest.mark.parametrize("name, right, wrong", [
    ("my_verl_reward", {"acc": 1.0, "reward": 1.0}, {"acc": 0.0, "reward": 0.0}),
    ("my_trl_reward", {"accuracy": 1.0, "short": 0.1, "reward": 1.1}, {"accuracy": 0.0, "short": 0.0, "reward": 0.0}),
    ("my_easyr1_reward", {"overall": 1.0, "accuracy": 1.0, "reward": 1.0},
     {"overall": 0.0, "accuracy": 0.0, "reward": 0.0}),
])  # fmt: skip
def test_the_adapters_grade_like_the_functions_that_they_call(name, right, wrong, tmp_path):
    write_files(ADAPTERS, tmp_path)
    assert len((tmp_path / f"{name}.py").read_text().partition("\n\n\ndef score")[2].splitlines()) <= 5
    example = SimpleNamespace(uid="u", data_source="mine", messages=[], images=[], ground_truth="42", extra={})
    grader = Grader(RewardConfig(reward=(f"{tmp_path}/{name}.py:score",), reward_workers=0, reward_errors="stop"))
    grader.check_examples([example])
    grader.dry_run()
    responses = [make_rollout_stub(example, text) for text in ("It is 42.", "No." * 1000)]
    assert grader.collect(responses) == [pytest.approx(right), pytest.approx(wrong)]
    grader.close()


def test_the_adapter_for_trl_calls_trls_own_rewards(tmp_path):
    """TRL's rewards take the same arguments as the functions of the page."""
    rewards = pytest.importorskip("trl.rewards")
    write_files(ADAPTERS, tmp_path)
    code = (tmp_path / "my_trl_reward.py").read_text().replace("in (accuracy, short)", "in TRL")
    names = {"TRL": (rewards.accuracy_reward, rewards.think_format_reward)}
    exec(code, names)  # noqa: S102  a block of our own page
    example = SimpleNamespace(ground_truth="42")
    graded = names["score"](["<think>\nx\n</think>\n\\boxed{42}", "\\boxed{41}"], [example, example])
    assert graded == [{"accuracy_reward": 1.0, "think_format_reward": 1.0, "reward": 2.0},
                      {"accuracy_reward": 0.0, "think_format_reward": 0.0, "reward": 0.0}]  # fmt: skip


def test_the_commands_to_debug_print_what_the_page_shows(tmp_path):
    text = sections((DOCS / "troubleshooting.md").read_text())["Debug your own code and data"]
    write_files(text, tmp_path)
    page_commands = commands(text)
    assert [words[1] for words, *_ in page_commands] == ["prepare_data.py", "try_reward.py", "demo.py", "train.py"]
    scripts = [words[1:] for words, *_ in page_commands if words[1] in SCRIPTS]
    prelude = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.path.insert(0, '.')"
    code = [sys.executable, "-c", f"{prelude}{RUN}", json.dumps(scripts)]
    done = subprocess.run(code, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    tried = subprocess.run([sys.executable, "-c", f"{prelude}; import try_reward"], cwd=tmp_path, capture_output=True,
                           text=True)  # fmt: skip
    printed = {"try_reward.py": tried.stdout, "train.py": done.stdout + done.stderr}
    for words, _, wanted in page_commands:
        assert_printed(printed.get(words[1], ""), wanted)


# --- docs/curves.md ---------------------------------------------------------------------------------------------------


def test_the_page_of_curves_has_every_panel_and_real_flags():
    text = (DOCS / "curves.md").read_text()
    rows = re.findall(r"^\| \*\*([\w ]+)\*\*(?: \(([\w ]+)\))? \|", text, re.M)
    assert list(dict.fromkeys(name for name, _ in rows)) == [panel.title for panel in PANELS]
    [kl] = [panel for panel in PANELS if panel.title == "KL"]
    assert [label for name, label in rows if name == "KL"] == list(kl.metrics.values())
    known = {f.name.replace("_", "-") for group in fields(train.Config) for f in fields(group.type)} | {"algo-args"}
    eval_flags = {"plot-runs", "baseline", "ablate"}
    flags = set(re.findall(r"`--([a-z-]+)", text))
    assert len(flags) > 15 and flags - eval_flags <= known
