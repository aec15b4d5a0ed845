"""Mutants that the tests kill: how much a file's tests notice, in one checkout or in two.

    python benchmarks/mutants.py .                         # 40 mutants of each file in TESTS
    python benchmarks/mutants.py ../before . --only grpo   # the same mutants in both: does a change weaken the tests?
    python benchmarks/mutants.py . --short                 # one mutant of one file

A mutant is a function with one changed operator, comparison, condition, number, or with a statement or keyword argument
left out. With two checkouts only functions whose source text is in both are changed, in whichever file they are. A
mutant is killed if its file's quick tests fail, or take longer than 60 s. Files are changed in copies of the checkouts,
never in place. Results are kept in --out, so that a second call continues the first. Takes up to a minute per mutant.
"""

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = {  # file -> its own tests
    "train.py": "test_update test_train", "grpo.py": "test_grpo test_algorithms", "reward.py": "test_custom_reward",
    "rollout.py": "test_rollout", "packing.py": "test_packing test_balance", "kernels.py": "test_kernels",
    "report/statistics.py": "test_statistics", "tasks/geospot.py": "test_geospot", "tasks/geometry.py": "test_reward",
    "tasks/vqa.py": "test_vqa", "prepare_data.py": "test_prepare_data test_layouts", "settings.py": "test_settings",
    "eval.py": "test_eval", "rewards/pool.py": "test_workers", "rewards/grade.py": "test_custom_reward",
    "rewards/judge.py": "test_judge", "parallel/checkpoint.py": "test_checkpoint", "parallel/resume.py": "test_train",
    "parallel/loading.py": "test_loading", "engines/server.py": "test_server_engine", "engines/sync.py":
    "test_server_engine", "engines/hf.py": "test_rollout", "envs/_episodes.py": "test_episodes", "sources/tables.py":
    "test_prepare_data test_inputs", "sources/images.py": "test_layouts test_inputs",
}  # fmt: skip
SWAPS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
         ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
         ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.And: ast.Or, ast.Or: ast.And}  # fmt: skip
SECONDS = 60


def changes(function: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (kind, index of the node in ast.walk) of each change that `change` can make."""
    for index, node in enumerate(ast.walk(function)):
        if type(getattr(node, "op", None)) in SWAPS or isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            yield "operator", index
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            yield "constant", index
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield "condition", index
        if isinstance(node, ast.Call) and node.keywords:
            yield "keyword", index
        if isinstance(node, ast.Expr | ast.AugAssign) and not isinstance(node.value, ast.Constant):
            yield "statement", index


def change(function: ast.AST, kind: str, index: int) -> str:
    """Return the source of a function with one change."""
    function = deepcopy(function)
    node = list(ast.walk(function))[index]
    if kind == "operator" and isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif kind == "operator":
        node.op = SWAPS[type(node.op)]()
    elif kind == "constant":
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif kind == "condition":
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif kind == "keyword":
        node.keywords.pop()
    else:
        node.__class__ = ast.Pass
    return ast.unparse(ast.fix_missing_locations(function))


def functions(checkout: Path) -> dict[str, tuple[Path, ast.AST]]:
    """Return source text -> (file, function) of all functions and methods of the product, without nested ones."""
    found = {}
    folders = [path for path in checkout.iterdir() if path.name not in ("tests", "benchmarks") and path.name[0] != "."]
    for file in [*checkout.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]:
        text = file.read_text()
        module = ast.parse(text)
        for owner in [module, *(node for node in module.body if isinstance(node, ast.ClassDef))]:
            for node in owner.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found[ast.get_source_segment(text, node)] = file.relative_to(checkout), node
    return found


def is_killed(checkout: Path, file: Path, node: ast.AST, mutant: tuple[str, int] | None) -> bool:
    """Run the tests of a file with a changed function, in a copy of the checkout. None changes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".venv*", ".git", "out", "demo", "__pycache__"))
        lines = (copy / file).read_text().splitlines()
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        if mutant:
            body = change(node, *mutant).splitlines()
            lines[first - 1 : node.end_lineno] = [" " * node.col_offset + line for line in body]
        (copy / file).write_text("\n".join(lines) + "\n")
        tests = [f"tests/{name}.py" for name in TESTS.get(str(file), "test_train").split()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m",
                   "not slow and not vllm and not sglang and not cuda_paths and not vllm_cuda", *tests]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, cwd=copy, env=env, start_new_session=True, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)  # fmt: skip
        try:
            return process.wait(SECONDS) != 0
        except subprocess.TimeoutExpired:
            return True
        finally:
            subprocess.run(["pkill", "-9", "-s", str(process.pid)], check=False)
            process.wait()


def kill_once(item: tuple[str, tuple | None], checkout: Path, source: dict, out: Path) -> bool:
    """Return whether a mutant of a checkout is killed, from an earlier call's result if there is one."""
    text, mutant = item
    file, node = source[text]
    result = out / f"{hashlib.sha256(f'{checkout}{text}{mutant}'.encode()).hexdigest()[:16]}.json"
    if not result.exists():
        killed = is_killed(checkout, file, node, mutant)
        result.write_text(json.dumps({"mutant": f"{file}:{node.name} {mutant}", "killed": killed, "in": str(checkout)}))
    return json.loads(result.read_text())["killed"]


def main(args: argparse.Namespace) -> None:
    checkouts = [path.resolve() for path in args.checkouts]
    sources = [functions(checkout) for checkout in checkouts]
    args.out.mkdir(parents=True, exist_ok=True)
    for file in [file for file in TESTS if Path(file).stem in (args.only or Path(file).stem)]:
        shared = [text for text, (path, _) in sources[0].items() if str(path) == file and text in sources[-1]]
        drawn = [(text, mutant) for text in shared for mutant in changes(sources[0][text][1])]
        drawn = random.Random(args.seed).sample(drawn, min(args.number, len(drawn)))
        counts = []
        for checkout, source in zip(checkouts, sources, strict=True):
            run = partial(kill_once, checkout=checkout, source=source, out=args.out)
            if run((shared[0], None)):
                counts.append(f"its tests fail or take more than {SECONDS} s")
                continue
            with ThreadPoolExecutor(args.jobs) as pool:
                counts.append(f"{sum(pool.map(run, drawn))} of {len(drawn)}")
        print(file, *counts, sep="\t", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT], help="one or two checkouts")
    parser.add_argument("--only", nargs="*", choices=sorted({Path(file).stem for file in TESTS}), help="files")
    parser.add_argument("--number", type=int, default=40, help="mutants per file")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of mutants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at the same time")
    parser.add_argument("--out", type=Path, default=ROOT / "out/mutants", help="folder of results")
    parser.add_argument("--short", action="store_true", help="one mutant of one file")
    args = parser.parse_args()
    if args.short:
        args.only, args.number = args.only or ["statistics"], 1
    main(args)
