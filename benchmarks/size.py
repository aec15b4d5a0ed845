"""Size of the code: Python tokens and code lines of each room (the root and each folder) that git tracks.

    python benchmarks/size.py                  # this checkout, by room
    python benchmarks/size.py --files          # and by file
    python benchmarks/size.py ../other         # another checkout, counted in the same way

A token is one of Python's `tokenize`, without comments, docstrings, line breaks and indentation, so dense lines do not
make code smaller. An f-string is one token, in every version of Python. A code line is a line that has a token. "core"
is everything but methods that a user names on the command line, tests, benchmarks and runs. Of the templates, styles
and scripts of pages only lines that are not blank are counted. tests/test_house.py holds the rooms to a table.
"""

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

FIRST_PATH = ("train.py", "rollout.py", "grpo.py", "reward.py")  # the files to read to understand a training step
OUTSIDE_CORE = ("algorithms", "tests", "benchmarks and runs")
ROOM_NAMES = dict.fromkeys(("benchmarks", "runs"), "benchmarks and runs")
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
# since Python 3.12 an f-string is a start, its parts and an end
STRING_START = {getattr(tokenize, name, None) for name in ("FSTRING_START", "TSTRING_START")}
STRING_END = {getattr(tokenize, name, None) for name in ("FSTRING_END", "TSTRING_END")}
PAGES = (".html", ".css", ".js", ".j2")


def count(source: str) -> tuple[int, int]:
    """Return the tokens and the code lines of a Python file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens, depth, lines = 0, 0, set()  # depth: number of f-strings that the token is inside
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.start[0] not in docstrings:
            tokens += depth == 0
            lines |= set(range(token.start[0], token.end[0] + 1))
        depth += (token.type in STRING_START) - (token.type in STRING_END)
    return tokens, len(lines)


def tracked_files(root: Path) -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.splitlines() if (root / name).exists()]


def measure(root: Path) -> tuple[Counter[str], Counter[str], dict[Path, tuple[int, int]]]:
    """Return the tokens and the code lines of each room, and both of each file. The room "pages" has only lines."""
    tokens: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    sizes = {file: count((root / file).read_text()) for file in tracked_files(root) if file.suffix == ".py"}
    for file, size in sizes.items():
        folder = file.parts[0] if len(file.parts) > 1 else "root"
        room = ROOM_NAMES.get(folder, folder)
        rooms = {room} if room in OUTSIDE_CORE else {room, "core"}
        for name in rooms | ({"first path"} if str(file) in FIRST_PATH else set()):
            tokens[name] += size[0]
            lines[name] += size[1]
    pages = [file for file in tracked_files(root) if file.suffix in PAGES and file.parts[0] != "tests"]
    lines["pages"] = sum(1 for file in pages for line in (root / file).read_text().splitlines() if line.strip())
    return tokens, lines, sizes


def main(root: Path, by_file: bool) -> None:
    tokens, lines, sizes = measure(root)
    if by_file:
        for file, (n_tokens, n_lines) in sizes.items():
            print(f"{n_tokens:8,} {n_lines:7,}  {file}")
    print(f"{'tokens':>8} {'lines':>7}")
    last = ["core", *OUTSIDE_CORE, "first path"]
    for name in [*sorted(tokens.keys() - set(last)), *last]:
        files = f" ({', '.join(FIRST_PATH)})" if name == "first path" else ""
        print(f"{tokens[name]:8,} {lines[name]:7,}  {name}{files}")
    print(f"{'':8} {lines['pages']:7,}  pages: templates, styles and scripts")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "root", nargs="?", type=Path, default=Path(__file__).parent.parent, help="checkout to count (default: this one)"
    )
    parser.add_argument("--files", action="store_true", help="also print the size of each file")
    args = parser.parse_args()
    main(args.root, args.files)
