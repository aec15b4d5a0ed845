"""Writer of pages and curves that does not stop the run. A page with thousands of responses and formulas takes many
seconds, and the other ranks would wait for rank 0. Large pages are therefore written by a separate process; a thread
would not help, because it shares the interpreter with the training loop."""

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

# the program of the separate process; multiprocessing would import train.py there, and so torch
CODE = f"""import ctypes, pickle, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with the run, which may be restarted
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
pickle.load(sys.stdin.buffer)()"""
LARGE_PAGE_CHARS = 500_000  # characters of responses; writing a smaller page is faster than starting a process


class ReportPage(NamedTuple):
    """The content of pages: records of an evaluation with its summary, or of a training step with its metrics."""

    title: str
    records: Sequence[dict] = ()
    examples: Mapping[str, Example] = {}  # by uid, as the model saw them; those of select_records(records, summary)
    summary: dict = {}
    facts: dict = {}  # metrics of the step
    others: Mapping[str, Sequence[dict]] = {}  # records of other models and of ablations, by label
    folder: Path | None = None  # next to the pages, for full-size images
    run: Path | None = None  # the run whose settings, scores and curves the first page shows


def find_drawing(name: str) -> ModuleType | None:
    """Import and return a file of report/page/; if this copy of the code lacks it, print so and return None."""
    if in_copy(f"report.page.{name}"):
        return importlib.import_module(f"report.page.{name}")
    tqdm.write("no pages and no curves are written: report/page/ is not in this copy")
    return None


class Writer:
    """Calls functions that write reports. A failure is only a warning, because the run is more important."""

    def __init__(self):
        self.running: dict[Path, tuple[subprocess.Popen, IO[bytes]]] = {}  # path it writes -> process and its output
        self.failed = 0

    def write(self, function: Callable[[Path, Any], None], path: Path, content: ReportPage | None) -> None:
        """Call function(path, content), in a separate process if the content is large. Wait for an earlier process only
        if it writes the same path."""
        self.finish([path] if path in self.running else [])
        call = partial(function, path, content)
        texts = (s["text"] for record in (content.records if content else ()) for s in record["samples"])
        self.attempt(call if sum(map(len, texts)) <= LARGE_PAGE_CHARS else partial(self._start, path, call))

    def _start(self, path: Path, call: Callable[[], None]) -> None:
        output = tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as file:
            pickle.dump(call, file)
            file.seek(0)
            # in a new session, so that Ctrl-C reaches only the run, which then waits for the page
            options = {"stdin": file, "stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
            self.running[path] = subprocess.Popen([sys.executable, "-P", "-c", CODE], **options), output

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
        self.failed += 1  # only the first failure is printed with its traceback
        message = f"report failure {self.failed} of this run: {error}; the run continues"
        tqdm.write(f"{trace if self.failed == 1 else ''}warning: {message}")
