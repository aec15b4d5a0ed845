"""Pages and curves, written beside the run: thousands of responses with formulas take a rank many seconds, in which the
others would wait. A thread would not help, as it shares the interpreter with the loop."""

import importlib.util
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from errors import describe_error, users_traceback
from prepare_data import Example
from report.files import read_rows, write_text
from report.page import page
from report.plots import draw_grid, panels, run_curves

# what the process runs: multiprocessing would import train.py there, and so torch
CODE = f"import pickle, sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r}); pickle.load(sys.stdin.buffer)()"
LARGE = 500_000  # characters of responses on a page; one of fewer is written before a process would have started


class Shown(NamedTuple):
    """What a page shows: an evaluation's records with its summary, or a training step's with its metrics."""

    title: str
    records: Sequence[dict] = ()
    examples: dict[str, Example] = {}
    summary: dict | None = None
    facts: dict | None = None

    def large(self) -> bool:
        """Return whether the page takes longer than starting a process."""
        return sum(len(s["text"]) for record in self.records for s in record["samples"]) > LARGE


def write_samples(path: Path, shown: Shown) -> None:
    """Write the page of a training step's samples."""
    write_text(path, page(*shown[:3], facts=shown.facts))


def write_report(out: Path, shown: Shown | None) -> None:
    """Draw OUT/curves.png from metrics.jsonl, if matplotlib is installed, and write OUT/report.html."""
    rows = read_rows(out / "metrics.jsonl")
    if importlib.util.find_spec("matplotlib"):
        draw_grid(panels(rows), out / "curves.png")
    if shown or not (out / "report.html").exists():  # else the page of before the run was interrupted stays
        shown = shown or Shown(out.name)
        html = page(*shown[:3], summary=shown.summary, facts=shown.facts, curves=run_curves(rows))
        write_text(out / "report.html", html)


class Writer:
    """Makes calls that write reports, one at a time. One that fails is a warning, since the run matters more."""

    def __init__(self):
        self.process: subprocess.Popen | None = None
        self.failed = 0

    def write(self, call: Callable[[], None], large: bool) -> None:
        """Make the call after the one before: here, or, if it is large, in a process that nobody waits for."""
        self.finish()
        if not large:
            self.attempt(call)
            return
        self.output = tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as file:
            pickle.dump(call, file)
            file.seek(0)
            # in a session of its own: Ctrl-C is for the run, which then waits for its last page
            own = {"stdin": file, "stdout": self.output, "stderr": subprocess.STDOUT, "start_new_session": True}
            self.process = subprocess.Popen([sys.executable, "-P", "-c", CODE], **own)

    def attempt(self, call: Callable[[], None]) -> None:
        """Make the call here."""
        try:
            call()
        except Exception as error:  # whatever the libraries that draw come up with
            self._warn(users_traceback(error), describe_error(error))

    def finish(self) -> None:
        """Wait for the call that is being made."""
        if self.process and self.process.wait():
            self.output.seek(0)
            trace = self.output.read().decode(errors="replace")
            self._warn(trace, trace.strip().rpartition("\n")[2] or f"exit code {self.process.returncode}")
        self.process = None

    def _warn(self, trace: str, error: str) -> None:
        self.failed += 1
        trace = trace if self.failed == 1 else ""
        tqdm.write(f"{trace}warning: report failure {self.failed} of this run: {error}; it goes on")
