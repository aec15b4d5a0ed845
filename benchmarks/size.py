"""Size of the code: Python tokens and code lines of each folder and file that git tracks.

    python benchmarks/size.py                  # this checkout, by folder
    python benchmarks/size.py --files          # and by file
    python benchmarks/size.py ../other         # another checkout, counted in the same way

A token is one of Python's `tokenize`, without comments, docstrings, line breaks and indentation, so dense lines do not
make code smaller. A code line is a line that has a token. Tests and benchmarks are counted separately from the product;
so are the templates, styles and scripts of pages, of which only lines that are not blank are counted.
"""

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

FIRST_PATH = ("train.py", "rollout.py", "grpo.py", "reward.py")  # the files to read to understand a training step
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
PAGES = (".html", ".css", ".js", ".j2")


def count(source: str) -> tuple[int, int]:
    """Return the tokens and the code lines of a Python file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens, lines = 0, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.start[0] not in docstrings:
            tokens += 1
            lines |= set(range(token.start[0], token.end[0] + 1))
    return tokens, len(lines)


def main(root: Path, by_file: bool) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    tracked = [Path(name) for name in listed.splitlines() if (root / name).exists()]
    sizes = {file: count((root / file).read_text()) for file in tracked if file.suffix == ".py"}
    tokens: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for file, (n_tokens, n_lines) in sizes.items():
        folder = file.parts[0] if len(file.parts) > 1 else "root"
        part = folder if folder in ("tests", "benchmarks") else "product"
        for name in {folder, part}:
            tokens[name] += n_tokens
            lines[name] += n_lines
        if str(file) in FIRST_PATH:
            tokens["first path"] += n_tokens
            lines["first path"] += n_lines
        if by_file:
            print(f"{n_tokens:8,} {n_lines:7,}  {file}")
    print(f"{'tokens':>8} {'lines':>7}")
    totals = ("first path", "product", "tests", "benchmarks")
    for name in [*sorted(tokens.keys() - set(totals)), *totals]:
        files = f" ({', '.join(FIRST_PATH)})" if name == "first path" else ""
        print(f"{tokens[name]:8,} {lines[name]:7,}  {name}{files}")
    pages = count_lines(root / file for file in tracked if file.suffix in PAGES and file.parts[0] != "tests")
    print(f"{'':8} {pages:7,}  templates, styles and scripts of pages")


def count_lines(files) -> int:
    """Return the number of lines of these files that are not blank."""
    return sum(1 for file in files for line in file.read_text().splitlines() if line.strip())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "root", nargs="?", type=Path, default=Path(__file__).parent.parent, help="checkout to count (default: this one)"
    )
    parser.add_argument("--files", action="store_true", help="also print the size of each file")
    args = parser.parse_args()
    main(args.root, args.files)
