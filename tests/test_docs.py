"""docs/tasks.md: each command is run, in an empty folder, and prints what the page says that it prints.

A line `    $ python ...` is a command, the indented lines below it are pieces of its output, in order. One with a `#`
behind it takes minutes or needs what is not there: its flags are checked, no more. A block behind "`NAME`:" is a file.
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
    """Name of a section -> its text; what stands in front of the first is ""."""
    parts = re.split(r"^## ", page, flags=re.M)
    return {"": parts[0]} | {re.match("[^:\n]*", part)[0]: part for part in parts[1:]}


def commands(text: str) -> list[tuple[list[str], str, list[str]]]:
    """(words, mark, lines of output) of each command in a text."""
    found: list[tuple[list[str], str, list[str]]] = []
    for line in re.sub(r"^```.*?^```", "", text, flags=re.S | re.M).splitlines():
        if line.startswith("    $ python "):
            words = shlex.split(line.removeprefix("    $ "), comments=True)
            mark = line.partition("  # ")[2]
            found.append((words, mark, []))
        elif line.startswith("    ") and line.strip():
            found[-1][2].append(line.strip())
    return found


def write_files(text: str, folder: Path) -> None:
    for name, content in re.findall(r"`([\w.]+)`:\n\n```(?:python)?\n(.*?)```", text, re.S):
        (folder / name).write_text(content)


def run(words: list[str], capsys) -> str:
    """What a command prints; in this process, which has everything imported."""
    if words[1] == "-c":
        return subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True, text=True).stdout
    module = SCRIPTS[words[1]]
    capsys.readouterr()
    given = module.parse_args(words[2:])
    module.main(given)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in sections() if name])
def test_the_commands_of_a_section(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "resolve_model", lambda *_: ("", None, {}))  # which opens the model
    head, text = sections()[""], sections()[name]
    for words, mark, _ in commands(head):
        if not mark and words[1] == "-c":  # the images of the examples
            run(words, capsys)
    write_files(text, tmp_path)
    ran = 0
    for words, mark, wanted in commands(text):
        if mark:
            SCRIPTS[words[1]].parse_args(words[2:])
            continue
        printed = run(words, capsys)
        ran += 1
        at = 0
        for line in wanted:
            assert line in printed[at:], f"{shlex.join(words)}: no {line!r} in\n{printed}"
            at = printed.index(line, at) + len(line)
        if "--out" in words:
            assert (tmp_path / words[words.index("--out") + 1]).is_file()
    assert ran


def test_the_commands_of_the_head(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, mark, _ in commands(sections()[""]):
        if mark:
            SCRIPTS[words[1]].parse_args(words[2:])
        else:
            run(words, capsys)
    assert {p.name for p in tmp_path.iterdir()} == {"a.png", "b.png", "vqa_toy.parquet"}


def test_a_wrong_command_of_the_page_is_noticed():
    with pytest.raises(SystemExit):
        demo.parse_args(["run", "--tsk", "vqa", "--out", "x"])
    told = "    $ python prepare_data.py vqa --out x  # needs data\n    $ python -c 'print(1)'\n    1\n"
    assert commands(told) == [
        (["python", "prepare_data.py", "vqa", "--out", "x"], "needs data", []),
        (["python", "-c", "print(1)"], "", ["1"]),
    ]


@pytest.mark.parametrize("name", [name for name in sections() if ">>>" in sections()[name]])
def test_the_answers_of_a_section(name):
    test = doctest.DocTestParser().get_doctest(sections()[name], {}, name, "docs/tasks.md", 0)
    result = doctest.DocTestRunner().run(test)
    assert result.attempted and not result.failed


def test_every_task_has_a_section_and_a_row():
    tasks = {task.name for task in prepare_data.TASKS.values()} if prepare_data.find_tasks() else set()
    assert tasks == set(sections()) - {""}
    readme = (ROOT / "README.md").read_text()
    first_cells = "".join(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", readme, re.M))
    assert tasks <= set(re.findall(r"`(\w+)`", first_cells))
