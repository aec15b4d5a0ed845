"""docs/tour.md and docs/tour.ipynb: every block runs and prints what the page shows.   pytest tests/test_tour.py

After a change of the page: python tests/make_notebook.py --run
"""

import codeop
import json
import re
import subprocess
import sys

import matplotlib
import pytest
import torch.distributed as dist
from make_notebook import FIGURE, NOTEBOOK, PAGE, ROOT, START_CODE, code_blocks, make_notebook, run_blocks

NUMBER = re.compile(r"-?\d+\.\d+")


def check_output(printed: str, expected: str, tolerance: float = 0.0) -> None:
    """Raise AssertionError if two outputs differ. Spaces may differ, and decimal fractions by 2%, two units of their
    last digit and `tolerance`."""
    for line, expected_line in zip(printed.splitlines(), expected.splitlines(), strict=True):
        assert NUMBER.sub("#", line).split() == NUMBER.sub("#", expected_line).split()
        for number, wanted in zip(NUMBER.findall(line), NUMBER.findall(expected_line), strict=True):
            digits = len(wanted.partition(".")[2])
            margin = 0.02 * abs(float(wanted)) + 2.01 * 10**-digits + tolerance
            assert abs(float(number) - float(wanted)) <= margin, f"{line!r} is not {expected_line!r}"


@pytest.fixture
def notebook() -> list[dict]:
    return json.loads(NOTEBOOK.read_text())["cells"]


@pytest.mark.slow
def test_every_block_prints_what_the_page_shows(notebook, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.chdir(ROOT / "docs")  # as Jupyter does
    monkeypatch.setattr(sys, "path", list(sys.path))
    cells = [cell for cell in notebook if cell["cell_type"] == "code"]
    blocks = code_blocks(PAGE.read_text())
    assert len(cells) == len(blocks) + 1 == 20
    namespace = {"__name__": "tour"}
    try:
        printed = list(run_blocks(["".join(cell["source"]) for cell in cells], namespace))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert printed[0] == ""
    *others, last = zip(printed[1:], [output for _, output in blocks], strict=True)
    for output, expected in others:
        check_output(output, expected)
    check_output(*last, tolerance=0.2)  # the rounding of another CPU changes what is sampled after a few steps
    assert namespace["after"] > namespace["before"] + 0.1
    assert (namespace["folder"] / "layout.png").read_bytes()[:4] == FIGURE.read_bytes()[:4] == b"\x89PNG"


def test_the_notebook_is_that_of_the_page(notebook):
    assert NOTEBOOK.read_text() == make_notebook(PAGE.read_text()), "run python tests/make_notebook.py"
    figures = re.findall(r"!\[.*?\]\((.*?)\)", "".join("".join(cell["source"]) for cell in notebook))
    assert [(NOTEBOOK.parent / name).resolve() for name in figures] == [FIGURE]
    assert FIGURE.stat().st_size < 200_000


def test_cells_have_the_fields_of_notebook_format_4_4(notebook):
    document = json.loads(NOTEBOOK.read_text())
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 4)
    fields = {"cell_type", "metadata", "source"}
    for cell in notebook:
        assert cell.keys() == fields | ({"outputs", "execution_count"} if cell["cell_type"] == "code" else set())
        for output in cell.get("outputs", []):
            assert output.keys() == {"name", "output_type", "text"} and output["output_type"] == "stream"


def test_every_line_that_the_page_quotes_is_in_train_py():
    page = re.sub(r"^```.*?^```", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    quoted = [line.strip() for line in page.splitlines() if line.startswith("    ")]
    lines = [line.strip() for line in (ROOT / "train.py").read_text().splitlines()]
    assert len(quoted) == 9
    positions = [lines.index(line) for line in quoted]
    assert positions == sorted(positions)  # in the order of the loop
    phases = re.findall(r"^## Phase (\d): ", page, re.MULTILINE)
    assert phases == [str(n) for n in range(1, 9)]


@pytest.mark.parametrize("folder", [ROOT, ROOT / "docs"], ids=["root", "docs"])
def test_the_first_cell_finds_the_repository(folder):
    code = f"{START_CODE}\nimport errors\nprint(errors.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.stdout.strip() == str(ROOT / "errors.py"), done.stderr


def test_the_first_cell_says_that_the_repository_is_missing(tmp_path):
    done = subprocess.run([sys.executable, "-c", START_CODE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and f"{tmp_path} is not the repository; clone it" in done.stderr


@pytest.mark.parametrize("printed", ["loss 0.53\n", "loss 0.500 nats\n", "loss 0.500\nloss 0.500\n", ""])
def test_a_wrong_output_is_noticed(printed):
    with pytest.raises((AssertionError, ValueError)):
        check_output(printed, "loss 0.500\n")
    check_output("loss  0.51\n", "loss 0.500\n")


def test_blocks_can_be_pasted_into_a_prompt():
    """Before Python 3.13 a prompt needs a blank line after an indented block, and none inside it."""
    for code, _ in code_blocks(PAGE.read_text()):
        statement: list[str] = []
        for line in [*code.splitlines(), ""]:
            statement.append(line)
            if codeop.compile_command("\n".join(statement), symbol="single"):
                statement = []
        assert not any(statement), statement
