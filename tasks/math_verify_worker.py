"""math-verify at arm's length: in child processes, which die when they are late, with so many seconds a batch.

Plain subprocesses of this file rather than multiprocessing: `spawn` would import train.py, and so torch, again, and
`fork` is not safe with CUDA and its threads. sympy can sit in one C call for hours without noticing a Python signal, so
a child has an alarm that Python does not handle: the kernel ends it for certain.
"""

import atexit
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen

from reward import HELPERS, Later, grader_stats

TIMEOUT_S = 3.0  # wall-clock seconds for one comparison
BUDGET_S = 20.0  # for all comparisons of a round in one process, however many hang
WORKERS = max(2, min(4, (os.cpu_count() or 2) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
START_S = 120.0  # importing sympy takes half a second from a local disk, far longer from a busy network one
MEMORY = 4 << 30  # bytes of address space of a child (Linux)
MAX_VERDICTS = 4096  # kept from one batch to the next

Question = tuple[str, str]  # prediction and truth, in LaTeX


def silence(seconds: float) -> None:
    """Where nobody has to know that something takes so long."""


class MathVerify:
    """The child processes, started when first needed and kept, and their verdicts. One of `reward.HELPERS`."""

    def __init__(self):
        self.idle: list[Popen] = []
        # A group repeats its answers; one that hangs costs its time once. None: late or crashed, and so wrong in this
        # batch, and asked again in the next.
        self.verdicts: dict[Question, bool | None] = {}
        self.waiting: dict[Question, None] = {}  # to be asked, in order
        self.collect = False  # whether a batch puts its questions off
        self.left = math.inf  # seconds that the present batch may still spend here
        self.tell: Callable[[float], None] = silence  # see `reward.HELPERS`
        self.lock = threading.Lock()
        os.register_at_fork(after_in_child=self.idle.clear)  # a forked copy of this process must not share the pipes
        atexit.register(self.close)

    def same(self, prediction: str, truth: str) -> bool:
        """Whether math-verify calls two LaTeX strings the same; False, and counted, if that cannot be had in time."""
        question = (prediction, truth)
        if question not in self.verdicts and self.left > 0:
            self.waiting[question] = None
            if self.collect:
                raise Later
            self.ask()
        if question not in self.verdicts:
            grader_stats["cas_budget"] += 1
        return bool(self.verdicts.get(question))

    @contextmanager
    def batch(self, collect: bool, tell: Callable[[float], None] = silence) -> Iterator[None]:
        """BUDGET_S seconds in all for what is asked inside; with `collect`, questions wait until `ask`."""
        kept = list(self.verdicts.items())[-MAX_VERDICTS:]
        self.verdicts = {question: same for question, same in kept if same is not None}
        self.left = BUDGET_S
        self.collect = collect
        self.tell = tell
        try:
            yield
        finally:
            self.left = math.inf
            self.collect = False
            self.tell = silence
            self.waiting.clear()

    def ask(self) -> None:
        """Fill `verdicts` for what waits, WORKERS at a time, as far as that goes in `left` seconds."""
        with self.lock, ThreadPoolExecutor(WORKERS) as pool:
            questions = list(self.waiting)
            if questions:
                self.tell(START_S + min(self.left, TIMEOUT_S * len(questions)))
            self.idle += pool.map(start_worker, range(min(WORKERS, len(questions)) - len(self.idle)))
            until = time.monotonic() + self.left  # only now: a first import may take a minute
            for question, reply in zip(questions, pool.map(partial(self.put, until), questions), strict=True):
                del self.waiting[question]
                if reply != "cas_budget":
                    grader_stats["cas"] += 1
                    self.verdicts[question] = {"true": True, "false": False}.get(reply)
                if reply in ("cas_timeout", "cas_crash"):
                    grader_stats[reply] += 1
            self.left = max(0.0, until - time.monotonic())
            if questions:
                self.tell(0.0)  # the rest of the answer is in the reward's own time

    def put(self, until: float, question: Question) -> str:
        """A child's reply, in a thread: "true" or "false"; else "cas_timeout", "cas_crash" or "cas_budget"."""
        try:
            worker = self.idle.pop()
        except IndexError:
            worker = start_worker()
        seconds = min(TIMEOUT_S, until - time.monotonic())
        if seconds <= 0:
            self.idle.append(worker)
            return "cas_budget"
        with suppress(BrokenPipeError):  # it is dead, and its output ends
            worker.stdin.write(json.dumps([*question, seconds]).encode() + b"\n")
        if reply := worker.stdout.readline():
            self.idle.append(worker)
            return reply.decode().strip()
        with worker:  # closes its pipes and waits
            return "cas_timeout" if worker.wait() == -signal.SIGALRM else "cas_crash"

    def close(self) -> None:
        """End the children, all of which are idle outside of `ask`."""
        while self.idle:
            with self.idle.pop() as worker:  # closes its pipes and waits
                worker.kill()


def start_worker(_: int = 0) -> Popen:
    """A child that is ready for questions."""
    command = [sys.executable, "-m", "tasks.math_verify_worker"]
    root = Path(__file__).parent.parent
    # A session of its own: Ctrl-C is for the trainer.
    worker = Popen(command, cwd=root, stdin=PIPE, stdout=PIPE, bufsize=0, start_new_session=True)
    if worker.stdout.readline() != b"ready\n":
        remedy = "its error is above; does `python -c 'import math_verify'` work? pip install -r requirements.txt"
        raise RuntimeError(f"the math-verify process did not start within {START_S:.0f} s; {remedy}")
    return worker


MATH_VERIFY = MathVerify()
HELPERS.append(MATH_VERIFY)


# --- the child ----------------------------------------------------------------------------------------------------


def has_value(expression: object) -> bool:
    """Without a division by zero or a logarithm of it: sympy takes 48 + 0 * 0^{-1} for 48."""
    import sympy

    nodes = list(sympy.preorder_traversal(expression)) if isinstance(expression, sympy.Basic) else []
    poles = [node.base for node in nodes if isinstance(node, sympy.Pow) and node.exp.could_extract_minus_sign()]
    poles += [node.args[0] for node in nodes if isinstance(node, sympy.log)]
    infinite = any(node in (sympy.zoo, sympy.nan, sympy.oo, -sympy.oo) for node in nodes)
    return not infinite and not any(pole.equals(0) for pole in poles)


def work() -> None:
    """Questions [prediction, truth, seconds] as JSON lines on stdin, `true` or `false` on stdout, until stdin ends."""
    # Late is dead: the kernel sees to it, without asking Python, and also if the trainer is gone.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, START_S)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not be taken for a reply
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        *texts, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        # math-verify's own timeouts are off: they use SIGALRM too, and a C loop never sees them.
        texts = [f"${text.strip().strip('$')}$" for text in texts]
        prediction, truth = (parse(text, [LatexExtractionConfig()], parsing_timeout=None) for text in texts)
        same = bool(prediction and truth) and has_value(prediction[0])
        same = same and verify(truth, prediction, float_rounding=12, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("true" if same else "false", file=replies, flush=True)


if __name__ == "__main__":
    work()
