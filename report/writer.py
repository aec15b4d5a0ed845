"""Writes pages and curves while the run continues. Thousands of responses with formulas take many seconds, in which the
other ranks would wait for rank 0. A thread would not help, as it shares the interpreter with the loop."""

import importlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

from tqdm import tqdm

from errors import describe_error, in_copy, users_traceback
from prepare_data import Example

# the program of the process; multiprocessing would import train.py in it, and so torch
CODE = f"""import ctypes, pickle, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with the run, which may be started again
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
pickle.load(sys.stdin.buffer)()"""
LARGE_PAGE_CHARS = 500_000  # characters of responses; a smaller page is written faster than a process starts


class ReportPage(NamedTuple):
    """What pages show: an evaluation's records with its summary, or a training step's with its metrics."""

    title: str
    records: Sequence[dict] = ()
    examples: Mapping[str, Example] = {}  # by uid, as the model saw them: those of `choose(records, summary)`
    summary: dict = {}
    facts: dict = {}
    others: Mapping[str, Sequence[dict]] = {}  # what other models, or this one without images, said: by their labels
    folder: Path | None = None  # next to the pages, for images in full size


def find_drawing(name: str) -> ModuleType | None:
    """Import a file of report/page/; if whoever made this copy has deleted the folder, say so and return None."""
    if in_copy(f"report.page.{name}"):
        return importlib.import_module(f"report.page.{name}")
    tqdm.write("no pages and no curves are written: report/page/ is not in this copy")
    return None


class Writer:
    """Calls functions that write reports. A failure is only a warning, since the run matters more."""

    def __init__(self):
        self.running: dict[Path, tuple[subprocess.Popen, IO[bytes]]] = {}  # by what they write, with their outputs
        self.failed = 0

    def write(self, function: Callable[[Path, Any], None], path: Path, shown: ReportPage | None) -> None:
        """Call function(path, shown), in a process of its own if there is much to show. Wait for an earlier process
        only if it writes the same path."""
        self.finish([path] if path in self.running else [])
        call = partial(function, path, shown)
        texts = (s["text"] for record in (shown.records if shown else ()) for s in record["samples"])
        self.attempt(call if sum(map(len, texts)) <= LARGE_PAGE_CHARS else partial(self._start, path, call))

    def _start(self, path: Path, call: Callable[[], None]) -> None:
        output = tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as file:
            pickle.dump(call, file)
            file.seek(0)
            # a session of its own, so that Ctrl-C reaches only the run, which then waits for the page
            own = {"stdin": file, "stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
            self.running[path] = subprocess.Popen([sys.executable, "-P", "-c", CODE], **own), output

    def attempt(self, call: Callable[[], None]) -> None:
        """Call a function in this process; print a warning if it raises."""
        try:
            call()
        except Exception as error:  # drawing libraries may raise anything
            self._warn(users_traceback(error), describe_error(error))

    def finish(self, paths: Sequence[Path]) -> None:
        """Wait for the processes that write these paths; print a warning for each that failed."""
        for path in paths:
            process, output = self.running.pop(path)
            if process.wait():
                output.seek(0)
                trace = output.read().decode(errors="replace")
                self._warn(trace, trace.strip().rpartition("\n")[2] or f"exit code {process.returncode}")

    def _warn(self, trace: str, error: str) -> None:
        self.failed += 1  # the first failure is shown with its traceback
        told = f"report failure {self.failed} of this run: {error}; the run continues"
        tqdm.write(f"{trace if self.failed == 1 else ''}warning: {told}")
