"""Report a Python or packages that cannot run this project in one line, and print a first line on a terminal, because
importing torch and transformers takes seconds. Scripts import it first; it must stay valid for old Pythons."""

import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SCRIPT = Path(sys.argv[0])
FOLDER = Path(__file__).resolve().parent
REMEDY = "activate the environment of `make demo` (. .venv/bin/activate), or run `pip install -r requirements.txt`"


def list_wrong_packages():
    """Return a text for each package of requirements.txt that is missing or has another version than the pinned one."""
    wrong = []
    for name, pinned in re.findall(r"^([\w-]+)==([\w.]+)", (FOLDER / "requirements.txt").read_text("utf-8"), re.M):
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "missing"
        if found.partition("+")[0] != pinned:  # +cpu is a build of the same version
            wrong.append(f"{name} {pinned} ({found})")
    return wrong


def report_exception(error_type, error, traceback):
    """Print an uncaught exception; then, if packages are not those of requirements.txt, which ones and the remedy. For
    a package that fails to be imported while the script starts, there is no traceback."""
    wrong = list_wrong_packages()
    package = (getattr(error, "name", None) or "").partition(".")[0]
    foreign = not (FOLDER / package).is_dir() and not (FOLDER / f"{package}.py").exists()  # "" is our folder
    importing = not traceback.tb_next or traceback.tb_next.tb_frame.f_code.co_name == "<module>"
    brief = wrong and isinstance(error, ImportError) and foreign and importing
    if not brief:
        sys.__excepthook__(error_type, error, traceback)
    if wrong:
        names = ", ".join(wrong[:3]) + f" and {len(wrong) - 3} more" * (len(wrong) > 3)
        reason = f"error: {error}" if brief else "note"
        print(f"{reason}: {sys.executable} does not have {names}; {REMEDY}", file=sys.stderr)


if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"error: {sys.executable} is Python {sys.version.split()[0]}, but 3.11 to 3.14 is needed; activate the "
             "environment of `make demo` (. .venv/bin/activate), or make one: `make demo PYTHON=python3.12`")
if SCRIPT.resolve().parent == FOLDER:
    sys.excepthook = report_exception
    is_slow = SCRIPT.name != "prepare_data.py"  # which needs no torch
    if is_slow and os.environ.get("RANK", "0") == "0" and sys.stderr and sys.stderr.isatty():
        print(f"{SCRIPT.name}: importing torch and transformers ...", file=sys.stderr, flush=True)
