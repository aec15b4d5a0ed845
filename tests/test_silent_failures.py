"""docs/silent_failures.md: its tests exist, and its results are those of benchmarks/silent_failures.py.

pytest tests/test_silent_failures.py
"""

import ast
import os
import re
import sys

import pytest
from conftest import ROOT, complete
from warm import run_command

pytestmark = complete  # the benchmark breaks environments too
PAGE = (ROOT / "docs" / "silent_failures.md").read_text()
TESTS = re.findall(r"`(tests/\w+\.py)::(\w+)`", PAGE)


def table_rows(text: str, first_cell: str) -> list[list[str]]:
    """Return the cells of the rows of the table whose header begins with these cells."""
    rows = text.partition(first_cell)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def remove_step(caught_by: str) -> str:
    """Remove the number of the step, which depends on how a CPU rounds."""
    return re.sub(r" in step \d+", "", caught_by)


@pytest.mark.parametrize("file,name", sorted(set(TESTS)))
def test_each_test_that_the_page_names_exists(file, name):
    functions = [node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in functions


def test_each_failure_has_a_thread_and_a_test():
    failures, bugs = table_rows(PAGE, "| failure | reported in"), table_rows(PAGE, "| failure | bug")
    assert len(failures) >= 12 and {row[0] for row in bugs} == {row[0].strip("*") for row in failures}
    for name, threads, _, tests, _ in failures:
        links = re.findall(r"\[([\w.-]+)#(\d+)\]\(https://github.com/[\w-]+/([\w.-]+)/issues/(\d+)\)", threads)
        assert links and threads.count("](") == len(links), name
        assert all(link[:2] == link[2:] for link in links), name
        assert re.search(r"`tests/\w+\.py::\w+`", tests), name


@pytest.mark.slow
def test_the_page_says_what_catches_each_bug():
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = run_command([sys.executable, "benchmarks/silent_failures.py"], env=env, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    header = "| failure | bug | caught by"
    measured = {tuple(row[:2]): remove_step(row[2]) for row in table_rows(f"{done.stdout}\n\n", header)}
    on_page = {tuple(row[:2]): remove_step(row[2]) for row in table_rows(PAGE, header)}
    assert measured == on_page and len(measured) > 30
