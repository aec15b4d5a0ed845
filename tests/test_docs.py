"""docs/tasks.md: each command runs in an empty folder and prints the output that the page shows.

A line `    $ python ...` is a command; the indented lines below it are pieces of its output, in order. A command that
takes minutes or needs missing files has a `#` comment: only its flags are checked. A block after "`NAME`:" is a file.
"""

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import complete

import demo
import eval as evaluate
import merge_lora
import prepare_data
import train

pytestmark = complete
ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "tasks.md").read_text()
SCRIPTS = {"demo.py": demo, "eval.py": evaluate, "merge_lora.py": merge_lora}
SCRIPTS |= {"prepare_data.py": prepare_data, "train.py": train}


def sections(page: str = PAGE) -> dict[str, str]:
    """Return the text of each section by its name. The text before the first section has the name ""."""
    parts = re.split(r"^## ", page, flags=re.M)
    return {"": parts[0]} | {re.match("[^:\n]*", part)[0]: part for part in parts[1:]}


def commands(text: str) -> list[tuple[list[str], str, list[str]]]:
    """Return (words, comment, lines of output) of each command in a text."""
    parsed: list[tuple[list[str], str, list[str]]] = []
    for line in re.sub(r"^```.*?^```", "", text, flags=re.S | re.M).splitlines():
        if line.startswith("    $ python "):
            words = shlex.split(line.removeprefix("    $ "), comments=True)
            comment = line.partition("  # ")[2]
            parsed.append((words, comment, []))
        elif line.startswith("    ") and line.strip():
            parsed[-1][2].append(line.strip())
    return parsed


def write_files(text: str, folder: Path) -> None:
    for name, content in re.findall(r"`([\w.]+)`:\n\n```(?:python)?\n(.*?)```", text, re.S):
        (folder / name).write_text(content)


def run(words: list[str], capsys) -> str:
    """Run a command and return its output; scripts run in this process, which has already imported everything."""
    if words[1] == "-c":
        return subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True, text=True).stdout
    module = SCRIPTS[words[1]]
    capsys.readouterr()
    args = module.parse_args(words[2:])
    module.main(args)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in sections() if name])
def test_the_commands_of_a_section_print_what_the_page_shows(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "resolve_model", lambda *_: ("", None, {}))  # it would open the model
    introduction, text = sections()[""], sections()[name]
    for words, comment, _ in commands(introduction):
        if not comment and words[1] == "-c":  # it writes the images of the examples
            run(words, capsys)
    write_files(text, tmp_path)
    n_run = 0
    for words, comment, wanted in commands(text):
        if comment:
            SCRIPTS[words[1]].parse_args(words[2:])
            continue
        printed = run(words, capsys)
        n_run += 1
        position = 0
        for line in wanted:
            assert line in printed[position:], f"{shlex.join(words)}: no {line!r} in\n{printed}"
            position = printed.index(line, position) + len(line)
        if "--out" in words:
            assert (tmp_path / words[words.index("--out") + 1]).is_file()
    assert n_run


def test_the_commands_of_the_introduction_write_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, comment, _ in commands(sections()[""]):
        if comment:
            SCRIPTS[words[1]].parse_args(words[2:])
        else:
            run(words, capsys)
    assert {p.name for p in tmp_path.iterdir()} == {"a.png", "b.png", "vqa_toy.parquet"}


def test_a_wrong_command_of_the_page_is_noticed():
    with pytest.raises(SystemExit):
        demo.parse_args(["run", "--tsk", "vqa", "--out", "x"])
    text = "    $ python prepare_data.py vqa --out x  # needs data\n    $ python -c 'print(1)'\n    1\n"
    assert commands(text) == [
        (["python", "prepare_data.py", "vqa", "--out", "x"], "needs data", []),
        (["python", "-c", "print(1)"], "", ["1"]),
    ]


@pytest.mark.parametrize("name", [name for name in sections() if ">>>" in sections()[name]])
def test_the_doctests_of_a_section_pass(name):
    test = doctest.DocTestParser().get_doctest(sections()[name], {}, name, "docs/tasks.md", 0)
    result = doctest.DocTestRunner().run(test)
    assert result.attempted and not result.failed


def test_every_task_has_a_section_and_a_row():
    tasks = {task.name for task in prepare_data.TASKS.values()} if prepare_data.find_tasks() else set()
    assert tasks == set(sections()) - {""}
    readme = (ROOT / "README.md").read_text()
    assert tasks <= set(re.findall(r"`(\w+)`", readme)) and tasks <= set(re.findall(r"^\| \[(\w+)\]", PAGE, re.M))
