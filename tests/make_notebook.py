"""Make docs/tour.ipynb from docs/tour.md.

    python tests/make_notebook.py         # write the notebook from the page
    python tests/make_notebook.py --run   # first run the page, and write its outputs and its figure again
"""

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, NOTEBOOK = ROOT / "docs" / "tour.md", ROOT / "docs" / "tour.ipynb"
FIGURE = ROOT / "assets" / "tour_layout.png"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)

START_TEXT = """\
*This notebook is made from [tour.md](tour.md) by `tests/make_notebook.py`.* To start: clone this repository, run
`pip install -r requirements.txt`, and start Jupyter in its folder or in `docs/`. On a machine that has only this
notebook, such as Colab, first run `!git clone ADDRESS repository`, `%cd repository` and
`!pip install -r requirements.txt` in a cell. The next cell finds the repository.
"""
START_CODE = """\
import os
import sys

if os.path.exists("../train.py"):  # Jupyter was started in docs/
    os.chdir("..")
assert os.path.exists("train.py"), f"{os.getcwd()} is not the repository; clone it and change to its folder"
sys.path.insert(0, os.getcwd())
"""


def code_blocks(page: str) -> list[tuple[str, str]]:
    """Return (code, output) of each Python block of a page."""
    return [(code, output or "") for code, output in BLOCK.findall(page)]


def run_blocks(blocks: list[str], namespace: dict[str, Any]) -> Iterator[str]:
    """Run blocks of code one after another in a namespace, and yield what each prints."""
    for number, code in enumerate(blocks):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(code, f"block {number}", "exec"), namespace)
        yield printed.getvalue()


def add_outputs(page: str, outputs: list[str]) -> str:
    """Return the page with these outputs of its blocks."""
    remaining = iter(outputs)

    def replace(match: re.Match) -> str:
        output = next(remaining)
        return f"```python\n{match[1]}```\n" + (f"\n```text\n{output}```\n" if output else "")

    return BLOCK.sub(replace, page)


def make_notebook(page: str) -> str:
    """Return the notebook of a page, as JSON."""
    cells = []

    def add_text(text: str) -> None:
        if text.strip():
            cells.append({"cell_type": "markdown", "metadata": {}, "source": text.strip().splitlines(True)})

    def add_code(code: str, output: str) -> None:
        printed = {"name": "stdout", "output_type": "stream", "text": output.splitlines(True)}
        cells.append({"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [printed] * bool(output),
                      "source": code.strip().splitlines(True)})

    add_text(START_TEXT)
    add_code(START_CODE, "")
    position = 0
    for match in BLOCK.finditer(page):
        add_text(page[position : match.start()])
        add_code(match[1], match[2] or "")
        position = match.end()
    add_text(page[position:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}, indent=1) + "\n"


def main(argv: list[str]) -> None:
    page = PAGE.read_text()
    if "--run" in argv:
        os.chdir(ROOT)
        sys.path.insert(0, str(ROOT))
        namespace = {"__name__": "tour"}
        outputs = list(run_blocks([code for code, _ in code_blocks(page)], namespace))
        page = add_outputs(page, outputs)
        PAGE.write_text(page)
        shutil.copyfile(namespace["folder"] / "layout.png", FIGURE)
    NOTEBOOK.write_text(make_notebook(page))


if __name__ == "__main__":
    main(sys.argv[1:])
