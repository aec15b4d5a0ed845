"""Check the versions of Python and of the packages that every script needs, and print a first line on a terminal,
because importing torch and transformers takes seconds. Scripts import it first; it must stay valid for old Pythons."""

import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SCRIPT = Path(sys.argv[0])
FOLDER = Path(__file__).resolve().parent
REMEDY = "activate the environment of `make demo` (. .venv/bin/activate), or run `pip install -r requirements.txt`"


def check_packages():
    """Exit with one line if a package up to tqdm in requirements.txt is missing; print one line on those that have
    another version than the pinned one."""
    others = []
    for name, pinned in re.findall(r"^([\w-]+)==([\w.]+)", (FOLDER / "requirements.txt").read_text("utf-8"), re.M)[:7]:
        try:
            found = version(name)
        except PackageNotFoundError:
            sys.exit(f"error: {name} is not installed for {sys.executable}; {REMEDY}")
        if found.partition("+")[0] != pinned:  # +cpu is a build of the same version
            others.append(f"{name} {found} instead of {pinned}")
    if others:
        print(f"note: versions that were not tested: {', '.join(others)}; if this fails, {REMEDY}", file=sys.stderr)


if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"error: {sys.executable} is Python {sys.version.split()[0]}, but 3.11 to 3.14 is needed; activate the "
             "environment of `make demo` (. .venv/bin/activate), or make one: `make demo PYTHON=python3.12`")
if SCRIPT.resolve().parent == FOLDER and os.environ.get("RANK", "0") == "0":
    check_packages()
    if sys.stderr and sys.stderr.isatty():
        print(f"{SCRIPT.name}: importing torch and transformers ...", file=sys.stderr, flush=True)
