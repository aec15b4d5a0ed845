"""The repository keeps the rules that its documents state.   pytest tests/test_house.py"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from dataclasses import fields
from itertools import chain
from pathlib import Path

import pytest
from conftest import complete
from test_train import ROOT, flags, rows, run, write_parquet

import train
from benchmarks import size

SCRIPTS = sorted(p.name for p in ROOT.glob("*.py"))
FOLDERS = (
    "algorithms", "engines", "envs", "tasks", "rewards", "sources", "parallel", "layers", "report", "report/page",
)  # fmt: skip
PRODUCT = [*SCRIPTS, *(f"{folder}/{p.name}" for folder in FOLDERS for p in sorted((ROOT / folder).glob("*.py")))]
TEST_FILES = [
    f"{p.parent.name}/{p.name}" for folder in ("tests", "benchmarks") for p in sorted((ROOT / folder).glob("*.py"))
]
README = (ROOT / "README.md").read_text()

# Imports at the top of a file come from a lower level or from the same folder
LEVELS = {
    "errors": 0, "startup": 0, "kernels": 1, "settings": 1, "utils": 1, "layers": 2, "sources": 2, "grpo": 2,
    "packing": 2, "reward": 3, "rewards": 4, "prepare_data": 5, "model": 5, "rollout": 6, "report": 7,
    "algorithms": 4, "parallel": 8, "tasks": 8, "envs": 8, "engines": 9, "eval": 9, "merge_lora": 9, "demo": 9,
    "train": 10,
}
PLUG_INS = ("algorithms", "engines", "envs", "tasks")  # imported by name, inside functions
# modules of these folders that may be imported at the top of a file
NO_PLUG_INS = ("engines.launch", "engines.self_test", "envs._factory", "envs._episodes")

# The most tokens of each room (benchmarks/size.py), of "pages" the most lines. A room never grows, unless another gets
# smaller by as much; who makes one smaller lowers its number
MOST_TOKENS = {
    "root": 52177, "engines": 25600, "envs": 7672, "layers": 6799, "parallel": 18153, "report": 23725,
    "rewards": 13840, "sources": 10421, "tasks": 29211, "algorithms": 3535, "tests": 336138,
    "benchmarks and runs": 64623, "pages": 684,
}  # fmt: skip


def find_imports(name):
    """Return the modules of this project that a file imports, as dotted names: (at its top, inside functions)."""
    at_top, later = set(), set()

    def visit(node, modules):
        for child in ast.iter_child_nodes(node):
            names = [a.name for a in child.names] if isinstance(child, ast.Import) else []
            names += [child.module] if isinstance(child, ast.ImportFrom) else []
            modules |= {n for n in names if n.split(".")[0] in LEVELS}
            visit(child, later if isinstance(child, ast.FunctionDef) else modules)

    visit(ast.parse((ROOT / name).read_text()), at_top)
    return at_top, later


def package(name):
    return name.removesuffix(".py").replace("/", ".").split(".")[0]


def count_code_lines(path, first=0, last=10**9):
    """Count the lines of code, without blank lines, comments and docstrings."""
    text = path.read_text()
    docstring_lines = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(body[0], ast.Expr)
        if documented and isinstance(body[0].value, ast.Constant):
            docstring_lines |= set(range(body[0].lineno, body[0].end_lineno + 1))
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return sum(first <= line <= last for line in lines - docstring_lines)


def test_readme_maps_every_script_and_folder():
    folders = [f"{p}/" for p in (*FOLDERS, "runs", "benchmarks", "tests", "docs")]
    missing = [name for name in SCRIPTS + folders if f"`{name}`" not in README]
    assert not missing and len(SCRIPTS) >= 11
    assert len(README.splitlines()) <= 130 and max(map(len, README.splitlines())) <= 120


@pytest.mark.parametrize("name", PRODUCT)
def test_imports_run_one_way(name):
    at_top, later = find_imports(name)
    for other in at_top:
        lower = LEVELS[package(other)] < LEVELS[package(name)]
        if other in NO_PLUG_INS:
            assert name in ("train.py", "eval.py", "engines/serve.py") or lower or package(other) == package(name)
        elif package(other) in PLUG_INS and other != "envs":  # envs defines what an environment is
            allowed = package(other) == package(name) or (package(name), package(other)) == ("envs", "tasks")
            assert allowed, f"{name} imports {other} at its top"
        else:
            assert lower or package(other) == package(name) or other == "envs", f"{name} imports {other}"
    for other in later - {"model"}:  # prepare_data.py inspect counts tokens with it
        assert package(other) in PLUG_INS or LEVELS[package(other)] < LEVELS[package(name)], f"{name} imports {other}"
    if name in ("grpo.py", "packing.py", "reward.py", "kernels.py"):
        assert not {package(other) for other in at_top | later} & {"model", "rollout", "engines"}


def test_no_file_is_in_an_import_cycle():
    """Imports inside functions count too."""
    modules = {name.removesuffix(".py").replace("/", "."): name for name in PRODUCT}
    graph = {module: {m for m in set.union(*find_imports(name)) if m in modules} for module, name in modules.items()}
    for start in modules:
        reached, new = set(), {start}
        while new:
            new = set().union(*(graph[module] for module in new)) - reached
            reached |= new
        assert start not in reached, f"{start} imports itself, through {sorted(reached)}"


@pytest.fixture(scope="module")
def room_sizes():
    if not (ROOT / ".git").exists():
        pytest.skip("rooms are counted in a git checkout")
    tokens, lines, _ = size.measure(ROOT)
    return tokens | {"pages": lines["pages"]}


@pytest.mark.parametrize("room", MOST_TOKENS)
def test_no_room_grows(room, room_sizes):
    now, most = room_sizes[room], MOST_TOKENS[room]
    assert now <= most, f"{room} has {now - most} more than before; make it, or another room, smaller by as much"
    assert now > most - 50 or not now, f"{room} is down to {now}; lower its number in MOST_TOKENS"


def test_every_room_is_in_the_table(room_sizes):
    assert set(room_sizes) - {"core", "first path"} <= set(MOST_TOKENS)


def test_an_f_string_is_one_token():
    assert size.count('x = f"{a + f(b)} and {c!r:>{width}}" "d"\n')[0] == 4


def test_the_training_loop_is_short():
    main = next(n for n in ast.parse((ROOT / "train.py").read_text()).body if getattr(n, "name", "") == "main")
    loop = next(n for n in main.body if isinstance(n, ast.For) and n.target.id == "step")
    branches = ast.If | ast.For | ast.While | ast.Try | ast.IfExp
    assert 30 < count_code_lines(ROOT / "train.py", loop.lineno, loop.end_lineno) <= 70
    assert sum(isinstance(node, branches) for node in ast.walk(loop)) <= 20


@pytest.mark.parametrize("name", PRODUCT + TEST_FILES)
def test_lines_end_at_120_columns(name):
    long = [i for i, line in enumerate((ROOT / name).read_text().splitlines(), 1) if len(line) > 120]
    assert not long, f"{name}: lines {long}"


# Names that several files define on purpose: those that tasks and environments may define (tasks/__init__.py lists
# them), and those of scripts
SHARED_NAMES = """
    INSTRUCTION TOY_INSTRUCTION DEFAULTS DEMO ENV ANSWER_TYPES TOY_TYPES USUAL answerable expert rows scenes toy
    main parse_args Settings
""".split()


def top_level_names(name):
    """Yield the names of the functions, classes and constants that a file defines."""
    for node in ast.parse((ROOT / name).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = chain.from_iterable(map(ast.walk, targets))
            yield from (n.id for n in parts if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


@complete
def test_a_name_has_one_meaning():
    """No two files define the same name, so a name means the same everywhere."""
    files_of = {}
    for name in PRODUCT:
        for defined in set(top_level_names(name)):
            files_of.setdefault(defined, []).append(name)
    assert {name: files for name, files in files_of.items() if len(files) > 1 and name not in SHARED_NAMES} == {}
    assert set(SHARED_NAMES) <= set(files_of)
    listed = re.findall(r"`(\w+)", (ROOT / "tasks" / "__init__.py").read_text())
    assert set(listed) == set(SHARED_NAMES) - {"main", "parse_args", "Settings"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_importing_a_script_does_nothing(name, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.dont_write_bytecode = True; import {name[:-3]}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "" and not list(tmp_path.iterdir()), done.stderr


@complete
def test_there_are_few_flags_and_the_docs_list_the_algo_args():
    settings = [f for group in fields(train.Config) for f in fields(group.type)]
    keys = {f.name for f in settings if f.metadata["key"]}
    assert len(settings) - len(keys) + 1 <= 90  # 1 for --algo-args itself
    table = (ROOT / "docs" / "algorithms.md").read_text().partition("| key | default | what |\n|---|---|---|\n")[2]
    rows = table.partition("\n\n")[0].splitlines()
    assert keys == {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])} and len(keys) > 15


@complete
def test_every_setting_has_help_and_is_used():
    settings = [field for group in fields(train.Config) for field in fields(group.type)]
    names = [field.name for field in settings]
    assert 35 <= len(names) == len(set(names)) <= 135
    assert all(len(field.metadata["help"]) > 5 for field in settings)
    text = "".join((ROOT / name).read_text() for name in PRODUCT)
    unused = [name for name in names if not re.search(rf"\.{name}\b(?! *=[^=])", text)]
    assert not unused
    with pytest.raises(SystemExit):
        train.parse_args(["--help"])


@pytest.mark.slow
def test_every_metric_is_documented(toys, tmp_path):
    from tasks.shapes import shapes_rows

    data = write_parquet(tmp_path / "train.parquet", shapes_rows(8, "train", 0))
    common = flags(toys["qwen2_5_vl"], data, tmp_path / "run", "--eval-data", data, "--steps", 1)
    run([sys.executable, "train.py", *common[:6], *common[8:]])  # without --reward
    options = "--algo ppo --algo-args critic=separate --kl-coef 0.1 --max-gen-batches 2 --truncated penalise".split()
    run([sys.executable, "train.py", *flags(toys["qwen2_5_vl"], data, tmp_path / "more", "--steps", 1, *options)])
    keys = {key for name in ("run", "more") for row in rows(tmp_path / name) for key in row}
    documented = set(re.findall(r"`([a-z_]+(?:/[a-zA-Z_*<>@=]+)*)`", (ROOT / "docs" / "metrics.md").read_text()))
    patterns = []
    for name in documented:
        pattern = re.escape(name).replace("=N", r"=\d+")
        patterns.append(re.sub(r"\\\*|<type>|<task>", "[^/]+", pattern))
    missing = sorted(k for k in keys if not any(re.fullmatch(p, k) for p in patterns))
    assert not missing and len(keys) > 35


def test_no_large_or_binary_weight_files_are_tracked():
    if (ROOT / ".git").exists():
        done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        tracked = done.stdout.splitlines()
    else:  # an unpacked archive
        tracked = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")]
    assert "train.py" in tracked
    for name in tracked:
        path = Path(ROOT / name)
        assert not path.exists() or path.stat().st_size < 1_000_000, name
        assert path.suffix not in (".safetensors", ".parquet", ".pt", ".bin"), name


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")) + [ROOT / "README.md", ROOT / "RESULTS.md"], ids=str)
def test_no_page_contains_a_placeholder(page):
    """A placeholder such as TABLE was once published in a page."""
    assert not re.search(r"^(TABLE|FIGURE|TODO|TBD|FIXME)\b", page.read_text(), re.MULTILINE)
