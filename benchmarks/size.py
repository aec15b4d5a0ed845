"""How much there is to read: code lines of each file, formatted at 120 columns, and what one step takes.

    python benchmarks/size.py                  # this checkout
    python benchmarks/size.py ../other         # another one, in the same way

A code line holds code: no blanks, comments and docstrings. Formatted by `ruff format`, without magic trailing commas,
so that two styles compare. Tests and benchmarks are left out.
"""

import argparse
import ast
import io
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

FIRST_PATH = ("train.py", "rollout.py", "grpo.py", "reward.py")  # what a training step is read in
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
CONFIG = "line-length = 120\nformat.skip-magic-trailing-comma = true\n"


def formatted(source: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(CONFIG)
        config.flush()
        command = [sys.executable, "-m", "ruff", "format", "--config", config.name, "--stdin-filename", "x.py", "-"]
        return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def code_lines(source: str) -> int:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def main(root: Path) -> None:
    sizes = {}
    for file in sorted(root.rglob("*.py")):
        name = str(file.relative_to(root))
        if not name.startswith((".", "tests", "benchmarks")):
            sizes[name] = code_lines(formatted(file.read_text()))
    for name, size in sizes.items():
        print(f"{size:6}  {name}")
    print(f"{sum(sizes.get(name, 0) for name in FIRST_PATH):6}  {', '.join(FIRST_PATH)}")
    print(f"{sum(sizes.values()):6}  in all")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parent.parent, help="a checkout")
    main(parser.parse_args().root)
