"""What the documents promise about the repository.   pytest tests/test_house.py"""

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

SCRIPTS = sorted(p.name for p in ROOT.glob("*.py"))
FOLDERS = ("engines", "envs", "tasks", "rewards", "sources", "parallel", "layers", "report", "report/page")
OURS = [*SCRIPTS, *(f"{folder}/{p.name}" for folder in FOLDERS for p in sorted((ROOT / folder).glob("*.py")))]
REST = [f"{p.parent.name}/{p.name}" for folder in ("tests", "benchmarks") for p in sorted((ROOT / folder).glob("*.py"))]
TEXTS = ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))]
README = (ROOT / "README.md").read_text()

# What is imported when a file is, comes from a lower level, or from the same folder
LEVELS = {
    "errors": 0, "kernels": 1, "settings": 1, "utils": 1, "layers": 2, "sources": 2, "grpo": 2, "packing": 2,
    "reward": 3, "rewards": 4, "prepare_data": 5, "model": 5, "rollout": 6, "report": 7,
    "parallel": 8, "tasks": 8, "envs": 8, "engines": 9, "eval": 9, "merge_lora": 9, "demo": 9, "train": 10,
}
PLUG_INS = ("engines", "envs", "tasks")  # imported by name, inside functions
# how an engine is started, and compared with the trainer; how episodes are played
NO_PLUG_INS = ("engines.launch", "engines.self_test", "envs._factory", "envs._episodes")

CODE_LINES = {  # each file's size when this was written
    "demo.py": 346, "errors.py": 102, "eval.py": 329, "grpo.py": 430, "kernels.py": 301, "merge_lora.py": 116,
    "model.py": 403, "packing.py": 371, "prepare_data.py": 449, "reward.py": 201, "rollout.py": 363, "train.py": 324,
    "settings.py": 188, "utils.py": 213,
}
WORDS = "pictures? trunks? trees? forests? peers? alike beside warming branch(es)? plants? planted".split()
ALLOWED_WORDS = {
    "tests/test_house.py": ".*", "README.md": "the picture in", "tasks/vqa.py": "FILLER|NEAR = |image picture photo",
    "tasks/pairs.py": "COUNTED = ", "tasks/caption.py": "image picture photo",
}


def imports(name):
    """(imported when the file is, imported inside its functions), of ours, with dots."""
    at_once, later = set(), set()

    def visit(node, found):
        for child in ast.iter_child_nodes(node):
            names = [a.name for a in child.names] if isinstance(child, ast.Import) else []
            names += [child.module] if isinstance(child, ast.ImportFrom) else []
            found |= {n for n in names if n.split(".")[0] in LEVELS}
            visit(child, later if isinstance(child, ast.FunctionDef) else found)

    visit(ast.parse((ROOT / name).read_text()), at_once)
    return at_once, later


def room(name):
    return name.removesuffix(".py").replace("/", ".").split(".")[0]


def code_lines(path, first=0, last=10**9):
    """Lines that hold code: no blanks, comments and docstrings."""
    text = path.read_text()
    others = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        of_text = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(body[0], ast.Expr)
        if of_text and isinstance(body[0].value, ast.Constant):
            others |= set(range(body[0].lineno, body[0].end_lineno + 1))
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in no_code:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return sum(first <= line <= last for line in lines - others)


def test_readme_maps_every_script_and_folder():
    folders = [f"{p}/" for p in (*FOLDERS, "runs", "benchmarks", "tests", "docs")]
    missing = [name for name in SCRIPTS + folders if f"`{name}`" not in README]
    assert not missing and len(SCRIPTS) >= 11
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("name", OURS)
def test_imports_run_one_way(name):
    at_once, later = imports(name)
    for other in at_once:
        lower = LEVELS[room(other)] < LEVELS[room(name)]
        if other in NO_PLUG_INS:
            assert name in ("train.py", "eval.py", "engines/serve.py") or lower or room(other) == room(name)
        elif room(other) in PLUG_INS and other != "envs":  # which says what an environment is
            allowed = room(other) == room(name) or (room(name), room(other)) == ("envs", "tasks")
            assert allowed, f"{name} imports {other} at once"
        else:
            assert lower or room(other) == room(name) or other == "envs", f"{name} imports {other}"
    for other in later - {"model"}:  # by prepare_data.py inspect, which counts tokens with it
        assert room(other) in PLUG_INS or LEVELS[room(other)] < LEVELS[room(name)], f"{name} imports {other}"
    if name in ("grpo.py", "packing.py", "reward.py", "kernels.py"):
        assert not {room(other) for other in at_once | later} & {"model", "rollout", "engines"}


def test_no_file_is_in_an_import_cycle():
    """Not even by way of imports inside functions."""
    modules = {name.removesuffix(".py").replace("/", "."): name for name in OURS}
    arrows = {module: {m for m in set.union(*imports(name)) if m in modules} for module, name in modules.items()}
    for start in modules:
        reached, new = set(), {start}
        while new:
            new = set().union(*(arrows[module] for module in new)) - reached
            reached |= new
        assert start not in reached, f"{start} imports itself, through {sorted(reached)}"


@pytest.mark.parametrize("name", CODE_LINES)
def test_no_script_grows_unnoticed(name):
    assert code_lines(ROOT / name) <= CODE_LINES[name]


def test_the_table_of_sizes_has_every_script():
    assert sorted(CODE_LINES) == SCRIPTS


def test_the_loop_is_short():
    main = next(n for n in ast.parse((ROOT / "train.py").read_text()).body if getattr(n, "name", "") == "main")
    loop = next(n for n in main.body if isinstance(n, ast.For) and n.target.id == "step")
    kinds = ast.If | ast.For | ast.While | ast.Try | ast.IfExp
    assert 30 < code_lines(ROOT / "train.py", loop.lineno, loop.end_lineno) <= 70
    assert sum(isinstance(node, kinds) for node in ast.walk(loop)) <= 20


@pytest.mark.parametrize("name", OURS + REST)
def test_lines_end_at_120_columns(name):
    long = [i for i, line in enumerate((ROOT / name).read_text().splitlines(), 1) if len(line) > 120]
    assert not long, f"{name}: lines {long}"


@pytest.mark.parametrize("name", OURS + TEXTS)
def test_one_word_for_one_thing(name):
    allowed = ALLOWED_WORDS.get(name, "(?!)")
    for line in (ROOT / name).read_text().splitlines():
        found = re.search(rf"\b({'|'.join(WORDS)})\b", line, re.IGNORECASE)
        assert not found or re.search(allowed, line), f"{name}: {found[0]!r} in {line!r}"


# Names that several files define on purpose: what each task and each environment may define (tasks/__init__.py lists
# them), and what each script has
SHARED_NAMES = """
    INSTRUCTION TOY_INSTRUCTION DEFAULTS DEMO ENV ANSWER_TYPES TOY_TYPES USUAL answerable expert rows scenes toy
    main parse_args
""".split()


def top_level_names(name):
    """The functions, classes and constants that a file defines."""
    for node in ast.parse((ROOT / name).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = chain.from_iterable(map(ast.walk, targets))
            yield from (n.id for n in parts if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


@complete
def test_a_name_has_one_meaning():
    """No two files define the same name, so that whoever meets it knows what it is, wherever it is."""
    files_of = {}
    for name in OURS:
        for defined in set(top_level_names(name)):
            files_of.setdefault(defined, []).append(name)
    assert {name: files for name, files in files_of.items() if len(files) > 1 and name not in SHARED_NAMES} == {}
    assert all(len(files_of[name]) > 1 for name in SHARED_NAMES)
    listed = re.findall(r"`(\w+)", (ROOT / "tasks" / "__init__.py").read_text())
    assert set(listed) == set(SHARED_NAMES) - {"main", "parse_args"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_importing_a_script_does_nothing(name, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.dont_write_bytecode = True; import {name[:-3]}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "" and not list(tmp_path.iterdir()), done.stderr


def test_few_flags_and_the_docs_list_what_is_none():
    settings = [f for group in fields(train.Config) for f in fields(group.type)]
    keys = {f.name for f in settings if f.metadata["key"]}
    assert len(settings) - len(keys) + 1 <= 85  # --algo-args itself
    table = (ROOT / "docs" / "algorithms.md").read_text().partition("| key | default | what |\n|---|---|---|\n")[2]
    rows = table.partition("\n\n")[0].splitlines()
    assert keys == {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])} and len(keys) > 15


@complete
def test_every_setting_has_help_and_is_used():
    settings = [field for group in fields(train.Config) for field in fields(group.type)]
    names = [field.name for field in settings]
    assert 35 <= len(names) == len(set(names)) <= 102
    assert all(len(field.metadata["help"]) > 5 for field in settings)
    text = "".join((ROOT / name).read_text() for name in OURS)
    unread = [name for name in names if not re.search(rf"\.{name}\b(?! *=[^=])", text)]
    assert not unread
    with pytest.raises(SystemExit):
        train.parse_args(["--help"])


@pytest.mark.slow
def test_every_metric_is_documented(toys, tmp_path):
    from tasks.shapes import shapes_rows

    data = write_parquet(tmp_path / "train.parquet", shapes_rows(8, "train", 0))
    common = flags(toys["qwen2_5_vl"], data, tmp_path / "run", "--eval-data", data, "--steps", 1)
    run([sys.executable, "train.py", *common[:6], *common[8:]])  # with the task's own reward
    more = "--algo ppo --algo-args critic=separate --kl-coef 0.1 --max-gen-batches 2 --truncated penalise".split()
    run([sys.executable, "train.py", *flags(toys["qwen2_5_vl"], data, tmp_path / "more", "--steps", 1, *more)])
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
def test_no_page_waits_for_its_contents(page):
    """A placeholder such as TABLE was once published in a page."""
    assert not re.search(r"^(TABLE|FIGURE|TODO|TBD|FIXME)\b", page.read_text(), re.MULTILINE)
