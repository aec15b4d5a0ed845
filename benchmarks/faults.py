"""Fault injection: runs must survive kills, signals, full disks, non-finite numbers and flipped bits. Prints a table
with the number of cases that passed in each scenario.

    python benchmarks/faults.py                       # everything: about 20 minutes on two cores
    python benchmarks/faults.py --short --only flips  # a few cases of one scenario

Each case runs the real scripts on a toy model and injects a fault. Then it checks the exit code, the message and the
files left, and that the run, resumed to its end, equals a run without faults bit for bit (all metrics except times, and
the whole last checkpoint). Imports take longer than the runs, so a case is a fork of this process, which has only
imported everything; cases of torchrun are started as a user would. Full and read-only disks are tmpfs mounts that this
script creates, which requires root.
"""

import argparse
import functools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import demo  # noqa: E402
import eval as eval_script  # noqa: E402
import merge_lora  # noqa: E402
import prepare_data  # noqa: E402
import report.log  # noqa: E402
import report.progress  # noqa: E402
import train  # noqa: E402
from model import Policy, Processor  # noqa: E402
from parallel.checkpoint import checkpoint_step, file_checksum, list_checkpoints, read_trainer_state  # noqa: E402
from parallel.models import OptimConfig  # noqa: E402
from report.run_files import read_rows  # noqa: E402
from utils import run_script  # noqa: E402

STEPS, EVERY = 12, 2  # steps of the run without faults, and steps between its checkpoints
START = 10  # most cases continue after this step, with two checkpoints and one more to write
PATIENCE = 300.0  # seconds to wait for an event: only a run that hangs takes this long, even on a busy machine
LOADED, SLEEPS = "M parameters", "the reward sleeps"  # printed by a run when its model is loaded, and by REWARD
SCRIPTS = {"train.py": train, "eval.py": eval_script, "merge_lora.py": merge_lora, "prepare_data.py": prepare_data}

# A reward that differs within groups, and misbehaves after FAULT_AFTER calls on each rank, if the variables FAULT_* are
# set. Rank 0 calls it eight times in the set-up; those calls are numbers -7 to 0.
REWARD = """
import os, pathlib, time
calls = -8 * (os.environ.get("RANK", "0") == "0")
def score(response, example):
    global calls
    calls += 1
    if calls > int(os.environ.get("FAULT_AFTER", 10**9)):
        if "FAULT_SLEEP" in os.environ:
            print("the reward sleeps", flush=True)
            time.sleep(float(os.environ["FAULT_SLEEP"]))
        if "FAULT_REWARD" in os.environ:
            return float(os.environ["FAULT_REWARD"])
        if "FAULT_FILL" in os.environ:
            fill(pathlib.Path(os.environ["FAULT_FILL"]))
    return len(set(response)) / 10 + len(response) % 3
def fill(path):
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            file.truncate(max(0, file.tell() - int(os.environ.get("FAULT_ROOM", 0))))
"""


# ----------------------------------------------------------------------------------------------------------------------
# Running


class Run:
    """The processes of one case, and their output."""

    def __init__(self, log: Path, pids: list[int]):
        self.log, self.pids, self.codes = log, pids, [None] * len(pids)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def ended(self) -> bool:
        for i, pid in enumerate(self.pids):
            if self.codes[i] is None and (child := os.waitpid(pid, os.WNOHANG))[0]:
                self.codes[i] = os.waitstatus_to_exitcode(child[1])
        return None not in self.codes

    def wait(self, text: str | None = None, seconds: float = PATIENCE) -> "Run":
        """Wait until all processes have ended, `text` was printed, or the time is over. Fail if `text` was not printed:
        what a case does next would come at another moment than it should."""
        end = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < end and (text is None or text not in self.text):
            time.sleep(0.01)
        assert text is None or text in self.text, f"{text!r} was not printed:\n{self.text[-1500:]}"
        return self

    def send(self, number: int, ranks: list[int] | None = None) -> "Run":
        for i, pid in enumerate(self.pids):
            if self.codes[i] is None and (ranks is None or i in ranks):
                os.kill(pid, number)
        return self

    def kill(self) -> "Run":
        return self.send(signal.SIGKILL).wait()


class Toy:
    """A toy model, its data, and the run folders that the cases damage."""

    def __init__(self, folder: Path, quick: bool, seed: int):
        self.folder, self.quick, self.seed, self.count = folder, quick, seed, 0
        self.model, self.data, self.reward = folder / "model", folder / "train.parquet", folder / "reward.py"
        self.seconds: dict[int, float] = {}

    def build(self, ranks: set[int]) -> None:
        self.reward.write_text(REWARD)
        fork([functools.partial(demo.make_model, self.model, hidden=64, layers=2)], self.folder / "model.log").wait()
        done = self.run("prepare_data.py", "shapes", "--n", 64, "--split", "train", "--out", self.data).wait()
        assert done.codes == [0], done.text
        for world in sorted(ranks):  # a run without faults, and the first START steps of one
            began = time.monotonic()
            for name, steps in (("whole", STEPS), ("begun", START)):
                done = self.train(self.folder / f"{name}{world}", "--steps", steps, ranks=world).wait()
                assert done.codes == [0] * world, done.text
                self.seconds.setdefault(world, time.monotonic() - began)
            for text in (LOADED, f"step {START}/"):  # some cases check that a run did not print them
                assert text in done.text, f"{text!r} was not printed:\n{done.text}"

    def new_path(self, parent: Path | None = None) -> Path:
        self.count += 1
        return (parent or self.folder) / f"case_{os.getpid()}_{self.count}"

    def copy_partial_run(self, ranks: int, parent: Path | None = None) -> Path:
        return shutil.copytree(self.folder / f"begun{ranks}", self.new_path(parent))

    def run(self, script: str, *argv: object, ranks: int = 1, before: Callable[[int], None] | None = None) -> Run:
        module, words = SCRIPTS[script], [str(word) for word in argv]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        def process(rank: int) -> None:
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            os.environ.update({key: str(value) for key, value in variables.items()} if ranks > 1 else {})
            sys.argv = [script, *words]
            if before:
                before(rank)
            run_script(module.main, lambda: module.parse_args(words))

        return fork([functools.partial(process, rank) for rank in range(ranks)], Path(f"{self.new_path()}.log"))

    def flags(self, out: Path, *extra: object) -> list[str]:
        flags = [
            "--model",
            self.model,
            "--data",
            self.data,
            "--out",
            out,
            "--reward",
            f"{self.reward}:score",
            "--reward-workers",
            0,
            "--reward-errors",
            "stop",
            "--steps",
            STEPS,
            "--prompts-per-step",
            4,
            "--group-size",
            4,
            "--max-new-tokens",
            6,
            "--micro-tokens",
            2048,
            "--lr",
            1e-3,
            "--save-every",
            EVERY,
            "--no-self-test",
            "--timeout-minutes",
            1,
            "--resume",
            "auto",
            *extra,
        ]
        return [str(flag) for flag in flags]

    def train(self, out: Path, *extra: object, ranks: int = 1, before: Callable[[int], None] | None = None) -> Run:
        return self.run("train.py", *self.flags(out, *extra), ranks=ranks, before=before)

    def torchrun(self, out: Path, *extra: object, launcher: tuple = ()) -> Run:
        log = Path(f"{self.new_path()}.log")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            *launcher,
            "train.py",
        ]
        with open(log, "w") as file:
            started = subprocess.Popen([*command, *self.flags(out, *extra)], cwd=ROOT, stdout=file, stderr=file)
        RUNS.append(Run(log, [started.pid]))
        return RUNS[-1]

    def check_resumed(self, out: Path, ranks: int) -> dict[str, bool]:
        """Resume a run to its end; return checks that it equals the run without faults."""
        run = self.train(out, ranks=ranks).wait()
        return {f"resumed: exit {run.codes}\n{run.text[-1500:]}": run.codes == [0] * ranks} | self.check_equal(
            out, ranks, run
        )

    def check_equal(self, out: Path, ranks: int, run: Run | None = None) -> dict[str, bool]:
        whole = self.folder / f"whole{ranks}"
        rows = [
            [{k: v for k, v in r.items() if k[:5] not in ("time/", "perf/")} for r in read_rows(x / "metrics.jsonl")]
            for x in (out, whole)
        ]
        checks = {"metrics equal those of the run without faults": rows[0] == rows[1]}
        newest_checkpoints = [(list_checkpoints(x) or [None])[-1] for x in (out, whole)]
        same_checkpoint = (
            None not in newest_checkpoints
            and [f.name for f in newest_checkpoints] == [f"step_{STEPS:06d}"] * 2
            and stored_values(newest_checkpoints[0]) == stored_values(newest_checkpoints[1])
        )
        # the next checkpoint, if there is one, removes the leftovers of a kill
        saved = run is None or "nothing to do" not in run.text
        leftovers = [p.name for p in (out / "checkpoints").iterdir() if p.name.startswith(".") and saved]
        return checks | {
            "last checkpoint equals that of the run without faults": same_checkpoint,
            f"nothing half written: {leftovers}": not leftovers,
        }


def stored_values(checkpoint: Path) -> dict[str, bytes]:
    """Return the values in each file of a checkpoint, without its header: safetensors writes metadata in any order."""
    return {
        file.name: data[8 + int.from_bytes(data[:8], "little") :]
        for file in checkpoint.glob("*.safetensors")
        if (data := file.read_bytes())
    }


def fork(bodies: list[Callable[[], None]], log: Path) -> Run:
    pids = []
    log.touch()
    sys.stdout.flush()
    for body in bodies:
        pid = os.fork()
        if pid == 0:
            handle = os.open(log, os.O_WRONLY | os.O_APPEND)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            try:
                body()
            except BaseException:
                traceback.print_exc()
                os._exit(1)  # as Python does
            os._exit(0)
        pids.append(pid)
    run = Run(log, pids)
    RUNS.append(run)
    return run


RUNS: list[Run] = []  # all runs, to kill those that a scenario leaves running


class Tally:
    """The cases of a scenario: how many there were, how many passed, and the failures."""

    def __init__(self):
        self.cases, self.held, self.failures = 0, 0, []

    def case(self, name: str, checks: dict[str, bool], run: Run | None = None, n: int = 1) -> None:
        wrong = [what for what, ok in checks.items() if not ok]
        self.cases += n
        self.held += 0 if wrong else n
        if wrong:
            self.failures.append(
                f"{name}: failed: {'; '.join(wrong)}" + (f"\nend of its output:\n{run.text[-1500:]}" if run else "")
            )


def verified(out: Path) -> bool:
    """Return whether there is a checkpoint and all checkpoints are as they were written."""
    checkpoints = list_checkpoints(out)
    for checkpoint in checkpoints:
        written = read_trainer_state(checkpoint)["files"]
        if any(file_checksum(checkpoint / name) != checksum for name, checksum in written.items()):
            return False
    return bool(checkpoints)


def check_output(run: Run, *texts: object) -> dict[str, bool]:
    return {f"output contains {str(text)!r}": str(text) in run.text for text in texts}


def check_user_error(run: Run, *texts: object) -> dict[str, bool]:
    """Return checks of a user error: exit code 1, a one-line message, no traceback."""
    return {
        f"exit {run.codes} is 1": set(run.codes) == {1},
        "no traceback": "Traceback" not in run.text,
        **check_output(run, "error: ", *texts),
    }


def newest(out: Path) -> int:
    return checkpoint_step((list_checkpoints(out) or [Path("step_0")])[-1])


# ----------------------------------------------------------------------------------------------------------------------
# Kills


def kills(toy: Toy, ranks: int, tally: Tally) -> str:
    """Send SIGKILL at random moments, repeatedly during one run. With two ranks, kill both or one; then the other one
    must end by itself."""
    rng, n_cases, delays, last_steps = random.Random(toy.seed + ranks), 3 if toy.quick else 25, [], []
    while tally.cases < n_cases:
        out, killed, checks = toy.new_path(), 0, {}
        while True:
            run = toy.train(out, ranks=ranks)
            if tally.cases + killed < n_cases and killed < 12:
                run.wait(seconds=rng.uniform(0.05, 1.1 * toy.seconds[ranks]))
            else:
                run.wait()
            if run.ended():
                break
            killed += 1
            if ranks > 1 and rng.random() < 0.5:
                # until both have joined, the other rank may wait for this one
                began, joined = time.monotonic(), LOADED in run.text
                run.send(signal.SIGKILL, [rng.randrange(ranks)]).wait(seconds=30 if joined else 0)
                if joined:
                    delays.append(time.monotonic() - began)
                    # exit 0 is right only if the run was complete before the kill
                    complete = newest(out) == STEPS
                    checks[f"kill {killed}: the other rank ended by itself: {run.codes}"] = (
                        run.ended() and (complete or 0 not in run.codes)
                    )
            run.kill()
            last_steps.append(newest(out) if out.exists() else 0)
            checks[f"kill {killed}: checkpoints verify"] = newest(out) == 0 or verified(out)
        checks[f"the last start: exit {run.codes}"] = run.codes == [0] * ranks
        tally.case("random kills", checks | toy.check_equal(out, ranks), run, max(killed, 1))
    other_rank = f"; the other rank ended by itself after {min(delays):.1f} to {max(delays):.1f} s" if delays else ""
    return (
        f"with {sum(x == 0 for x in last_steps)} of them before the first checkpoint; resumed runs equal bit for bit"
        f"{other_rank}"
    )


def count_operations(out: Path, at: int, log: Path) -> None:
    """Log each file operation of this process below `out`, and kill the process before operation number `at` (0:
    never)."""
    n, place = 0, str(out.resolve())

    def operation(event: str, path: object, folder: int = -1) -> None:
        nonlocal n
        if isinstance(path, int) and event != "fsync":
            return
        path = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fsdecode(path)
        path = os.path.join(os.readlink(f"/proc/self/fd/{folder}") if folder not in (-1, None) else "", path)
        if not os.path.abspath(path).startswith(place):
            return
        n += 1
        os.write(log_fd, f"{event} {os.path.relpath(path, place)}\n".encode())
        if n == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple) -> None:
        if (
            event == "open"
            and isinstance(args[0], str | bytes)
            and args[2] is not None
            and args[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            operation("open", args[0])
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            operation(
                event,
                args[0],
                {"os.rename": 2, "os.mkdir": 2}.get(event, 1) < len(args)
                and args[{"os.rename": 2, "os.mkdir": 2}.get(event, 1)]
                if event != "os.truncate"
                else -1,
            )

    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sync = os.fsync
    os.fsync = lambda handle: (
        operation("fsync", handle if isinstance(handle, int) else handle.fileno()),
        sync(handle),
    )[1]
    sys.addaudithook(hook)


def operations(toy: Toy, ranks: int, tally: Tally) -> str:
    """Send SIGKILL before each file operation below --out: opening to write, mkdir, rename, unlink, rmdir, fsync. With
    two ranks, kill either."""
    n_operations, out = [], toy.copy_partial_run(ranks)
    logs = [Path(f"{toy.new_path()}.{rank}") for rank in range(ranks)]
    toy.train(out, ranks=ranks, before=lambda rank: count_operations(out, 0, logs[rank])).wait()
    for rank in range(ranks):
        logged = logs[rank].read_text().splitlines()
        n_operations.append(len(logged))
        positions = range(1 + rank, len(logged) + 1, ranks)  # with two ranks, every second operation of each
        if toy.quick:
            positions = [positions[len(logged) // 3], positions[-2]] if rank == 0 else []
        for at in positions:
            out, log = toy.copy_partial_run(ranks), Path(f"{toy.new_path()}.ops")
            run = toy.train(
                out,
                ranks=ranks,
                before=lambda r, rank=rank, out=out, at=at, log=log: r == rank and count_operations(out, at, log),
            )
            while run.codes[rank] is None and not run.ended():
                time.sleep(0.01)
            run.kill()
            checks = {
                f"killed before the operation: {run.codes}": run.codes[rank] == -signal.SIGKILL,
                "checkpoints verify": verified(out),
            }
            tally.case(f"rank {rank}, before {logged[at - 1]}", checks | toy.check_resumed(out, ranks), run)
    counts = " + ".join(map(str, n_operations))
    return f"{counts} operations in two steps, which write one checkpoint and delete one; equal bit for bit"


# ----------------------------------------------------------------------------------------------------------------------
# Signals, restarts, silence


def signals(toy: Toy, ranks: int, tally: Tally) -> str:
    """Send the five signals that stop a run, one after another during one run; with two ranks, only to rank 1."""
    out, waits = toy.new_path(), []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)[
        : 1 if toy.quick else 5
    ]:
        run = toy.train(out, ranks=ranks)
        run.wait(f"step {newest(out) + 1:>2}/{STEPS}")
        began = time.monotonic()
        run.send(number, [ranks - 1]).wait()
        waits.append(time.monotonic() - began)
        texts = f"after step {newest(out)} of {STEPS}", out / "checkpoints", "--resume auto"
        checks = {
            f"exit {run.codes} is {128 + number}": run.codes == [128 + number] * ranks,
            "checkpoints verify": verified(out),
        }
        tally.case(number.name, checks | check_output(run, *texts), run)
    tally.case("the same run to its end", toy.check_resumed(out, ranks))
    return f"saved and ended {min(waits):.1f} to {max(waits):.1f} s after the signal; resumed, equal bit for bit"


def hurries(toy: Toy, ranks: int, tally: Tally) -> str:
    """Send signals at bad moments: in the set-up, in a long rollout, with too short a grace period, and twice."""

    def never_returns(rank: int, after: int = 16) -> None:
        """Let the reward sleep from the second step on. If the signal did not end it, the run would not end."""
        os.environ |= {"FAULT_AFTER": str(after), "FAULT_SLEEP": "1000"}

    def never_ends(rank: int) -> None:
        """Sample no end tokens, and print the progress of a rollout soon."""
        banned = Processor.banned_token_ids
        Processor.banned_token_ids = lambda self, size: torch.cat([banned(self, size), torch.tensor(self.eos_ids)])
        report.progress.LINE_EVERY_SECONDS = 0.2

    def stop(run: Run, number: int, text: str) -> float:
        """Send a signal once `text` was printed. Return the seconds until the run ended."""
        run.wait(text)
        began = time.monotonic()
        run.send(number).wait()
        return time.monotonic() - began

    out = toy.new_path()
    run = toy.train(out, before=functools.partial(never_returns, after=-8))
    setup = stop(run, signal.SIGTERM, SLEEPS)
    checks = {f"exit {run.codes}": run.codes == [143], **check_output(run, "during the set-up")}
    tally.case("SIGTERM in the set-up", checks, run)

    run = toy.train(out, "--max-new-tokens", 30_000, "--micro-tokens", 32_768, before=never_ends)
    rollout = stop(run, signal.SIGTERM, "responses: 0 of")
    checks = {f"exit {run.codes}": run.codes == [143], **check_output(run, "no step was finished")}
    tally.case("SIGTERM in a long rollout", checks, run)

    out = toy.copy_partial_run(1)
    run = toy.train(out, "--grace-seconds", 0.5, before=never_returns)
    grace = stop(run, signal.SIGTERM, SLEEPS)
    checks = {
        f"exit {run.codes}": run.codes == [143],
        **check_output(run, "not saved within"),
        "older checkpoints verify": verified(out) and newest(out) == START,
    }
    tally.case("SIGTERM with a grace period that is too short", checks | toy.check_resumed(out, 1), run)

    out = toy.copy_partial_run(1)
    run = toy.train(out, before=never_returns).wait(SLEEPS)
    run.send(signal.SIGINT).wait("SIGINT: saving")
    time.sleep(1.3)  # a second SIGINT counts if it comes more than 1 s after the first was noticed
    waited = not run.ended()
    run.send(signal.SIGINT).wait()
    checks = {
        "the first SIGINT does not end the run at once": waited,
        f"exit {run.codes}": run.codes == [130],
        **check_output(run, "SIGINT again: not saved"),
        "older checkpoints verify": verified(out) and newest(out) == START,
    }
    tally.case("Ctrl-C twice", checks | toy.check_resumed(out, 1), run)
    return (
        f"ended: in the set-up after {setup:.1f} s, nothing to save; in a long rollout after {rollout:.1f} s; with a "
        f"grace of 0.5 s and a reward that hangs, after {grace:.1f} s, not saved and reported, older checkpoint good"
    )


def find_workers(run: Run) -> dict[int, int]:
    """Return the process id of each rank of a torchrun."""
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            if parent == run.pids[0]:
                variables = dict(
                    v.split("=", 1) for v in folder.joinpath("environ").read_text().split("\0") if "=" in v
                )
                pids[int(variables["RANK"])] = int(folder.name)
        except (OSError, KeyError, ValueError):  # the process has just ended, or is not a worker
            continue
    return pids


def torchrun(toy: Toy, ranks: int, tally: Tally) -> str:
    """Stop torchrun with a signal. Kill or suspend a rank under torchrun --max-restarts, which restarts the run."""
    out = toy.new_path()
    run = toy.torchrun(out).wait(f"step  2/{STEPS}").send(signal.SIGTERM).wait()
    checks = {
        f"exit {run.codes} is not 0": run.codes[0] not in (0, None),
        "checkpoints verify": verified(out),
    }
    tally.case(
        "SIGTERM to torchrun",
        checks | check_output(run, "stopped after step", "--resume auto") | toy.check_resumed(out, 2),
        run,
    )
    waits = []
    for number, extra in ((signal.SIGKILL, ()), (signal.SIGSTOP, ("--timeout-minutes", 0.1))):
        out = toy.new_path()
        began = time.monotonic()
        run = toy.torchrun(out, *extra, launcher=("--max-restarts", "2", "--shutdown-timeout", "3"))
        run.wait(f"step  3/{STEPS}")
        os.kill(find_workers(run)[1], number)
        run.wait()
        waits.append(time.monotonic() - began)
        checks = {
            f"exit {run.codes}": run.codes == [0],
            **check_output(run, "resumed from", "--resume auto"),
        } | toy.check_equal(out, 2)
        tally.case(
            f"{number.name} to rank 1 under --max-restarts",
            checks | (check_output(run, "rank 1 (") if extra else {}),
            run,
        )
    return (
        f"killed rank: whole run {waits[0]:.0f} s; stopped rank (limit 6 s, torchrun --shutdown-timeout 3 instead of "
        f"30): "
        f"{waits[1]:.0f} s; equal bit for bit"
    )


def silence(toy: Toy, ranks: int, tally: Tally) -> str:
    """Suspend a rank, or let it hang in a user's reward. The others must name it after --timeout-minutes."""
    limit, waits = 0.05, []
    for rank in range(ranks)[: 1 if toy.quick else ranks]:
        out = toy.new_path()
        run = toy.train(out, "--timeout-minutes", limit, ranks=ranks)
        run.wait(f"step  3/{STEPS}").send(signal.SIGSTOP, [rank])
        began = time.monotonic()
        while run.codes[1 - rank] is None and time.monotonic() < began + PATIENCE:
            time.sleep(0.01)
            run.ended()
        waits.append(time.monotonic() - began)
        run.kill()
        checks = {f"exit {run.codes}": run.codes[1 - rank] == 1} | check_output(
            run, f"error: rank {rank} (", "--resume auto"
        )
        tally.case(f"rank {rank} stopped", checks | toy.check_resumed(out, ranks), run)

        def hang(r: int, rank=rank) -> None:
            os.environ |= {"FAULT_AFTER": "8", "FAULT_SLEEP": "1000"} if r == rank else {}

        out = toy.copy_partial_run(ranks)
        run = toy.train(out, "--timeout-minutes", limit, ranks=ranks, before=hang).wait(SLEEPS)
        began = time.monotonic()
        run.wait()
        waits.append(time.monotonic() - began)
        checks = {f"exit {run.codes}": run.codes == [1] * ranks} | check_output(
            run, f"error: rank {rank} (", "still in reward"
        )
        run.kill()
        tally.case(f"rank {rank} hangs in its reward", checks | toy.check_resumed(out, ranks), run)
    seconds = f"{min(waits):.1f} to {max(waits):.1f} s with a limit of {60 * limit:.0f} s"
    return f"named after {seconds}, with its phase; equal bit for bit"


# ----------------------------------------------------------------------------------------------------------------------
# Numbers


def poison(kind: str, value: float, steps: range) -> None:
    """Put `value` into the loss, a gradient or a weight of this process in these 0-based steps."""
    current_step = [-1]
    clipped_step, forward, factor = train.clip_and_step, Policy.forward, OptimConfig.lr_factor

    def recording_factor(self, step: int, steps: int) -> float:
        current_step[0] = step
        return factor(self, step, steps)

    def corrupt_forward(self, *args):
        out = forward(self, *args)
        return out if out.loss is None or current_step[0] not in steps else out._replace(loss=out.loss * value)

    @torch.no_grad()
    def corrupt_step(model, optimizer, norm):
        trained = [p for p in model.parameters() if p.requires_grad]
        if kind == "gradient" and current_step[0] in steps:
            next(p.grad for p in trained if p.grad is not None and p.grad.to_local().numel()).to_local().view(-1)[0] = (
                value
            )
        result = clipped_step(model, optimizer, norm)
        if kind == "weight" and current_step[0] in steps:
            next(p for p in trained if p.to_local().numel()).to_local().view(-1)[0] = value
        return result

    OptimConfig.lr_factor = recording_factor
    if kind == "loss":
        Policy.forward = corrupt_forward
    else:
        train.clip_and_step = corrupt_step


def numbers(toy: Toy, ranks: int, tally: Tally) -> str:
    """Put NaN and 1e25 into a reward, the loss, a gradient and a weight, on all ranks or on one."""
    forever = range(STEPS)
    kinds = ("loss", "gradient", "weight", "reward")
    for victims in [list(range(ranks))] if ranks == 1 else [[0, 1], [1]]:
        for value in (float("nan"), 1e25):
            for kind in kinds:
                if toy.quick and (kind, value == value) not in (("loss", False), ("weight", False)):
                    continue

                def inject(steps: range, rank: int, stop_early=False, kind=kind, value=value, victims=victims) -> None:
                    if stop_early:  # after two skipped updates in a row instead of ten
                        report.log.MAX_SKIPPED = 2
                    if rank in victims and kind == "reward":
                        os.environ |= {"FAULT_AFTER": str(16 // ranks), "FAULT_REWARD": str(value)}
                    elif rank in victims:
                        poison(kind, value, steps)

                name = f"{kind} {value} on {'all ranks' if len(victims) == ranks else f'rank {victims}'}"
                out = toy.copy_partial_run(ranks)
                if kind in ("loss", "gradient"):  # one update is skipped and reported
                    run = toy.train(out, ranks=ranks, before=functools.partial(inject, range(START, START + 1))).wait()
                    skipped_file = out / "skipped" / f"step_{START + 1:06d}.json"
                    updates = json.loads(skipped_file.read_text())["updates"] if skipped_file.exists() else []
                    checks = {
                        f"exit {run.codes}": run.codes == [0] * ranks,
                        "checkpoints verify": verified(out),
                        "one update was skipped, and has uids": [len(u["uids"]) > 0 for u in updates] == [True],
                    }
                    checks |= {
                        "metrics are JSON": "NaN" not in (out / "metrics.jsonl").read_text(),
                        "ran to its end": newest(out) == STEPS,
                    }
                    checks |= check_output(run, f"warning: step {START + 1} skipped ", skipped_file)
                    tally.case(f"{name}, once", checks, run)
                    out = toy.copy_partial_run(ranks)
                    run = toy.train(out, ranks=ranks, before=functools.partial(inject, forever, stop_early=True)).wait()
                    good = list_checkpoints(out)[-1]
                    checks = check_user_error(run, "2 updates in a row", good) | {
                        "checkpoints verify": verified(out)
                    }
                    resumed = toy.train(out, "--steps", STEPS + 1, ranks=ranks).wait()
                    checks |= {f"resumed: exit {resumed.codes} {resumed.text[-500:]}": resumed.codes == [0] * ranks}
                    tally.case(f"{name}, always", checks, run)
                else:  # the run ends and saves nothing bad; resumed without the fault, it equals a run that had none
                    for step in (START, START + 1)[: 1 if kind == "reward" or toy.quick else 2]:
                        out = toy.copy_partial_run(ranks) if out is None else out
                        run = toy.train(
                            out, ranks=ranks, before=functools.partial(inject, range(step, step + 1))
                        ).wait()
                        checks = {f"exit {run.codes}": set(run.codes) == {1}, "checkpoints verify": verified(out)}
                        checks |= {f"newest checkpoint is of step {newest(out)}": newest(out) == START}
                        # sampling finds a bad weight, unless it belongs to a token that does not occur; then
                        # saving finds it
                        messages = ("shapes-train-",) if kind == "reward" else ("not finite", "holds NaN")
                        checks |= {f"output contains one of {messages}": any(text in run.text for text in messages)}
                        tally.case(f"{name} at step {step + 1}", checks | toy.check_resumed(out, ranks), run)
                        out = None
    return (
        "updates skipped and reported with uids, run stopped after too many in a row; bad rewards and weights end the "
        "run, nothing bad saved"
    )


# ----------------------------------------------------------------------------------------------------------------------
# Files


def flips(toy: Toy, ranks: int, tally: Tally) -> str:
    """Flip a bit in a file of the newest checkpoint, or truncate, empty or remove the file. The run must report it and
    use the older checkpoint."""
    rng, names = (
        random.Random(toy.seed),
        sorted(p.name for p in (toy.folder / f"begun{ranks}/checkpoints/step_{START:06d}").iterdir()),
    )
    for name in names:
        for damage in ("flipped bit",) if toy.quick else ("flipped bit", "flipped bit", "cut", "empty", "missing"):
            if damage == "missing" and name == "trainer.json":
                continue  # without it the checkpoint is incomplete, as after a kill
            out = toy.copy_partial_run(ranks)
            file = out / "checkpoints" / f"step_{START:06d}" / name
            data = bytearray(file.read_bytes())
            if damage == "flipped bit":
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes({"cut": data[:-1], "empty": b""}.get(damage, data))
            if damage == "missing":
                file.unlink()
            run = toy.train(out, ranks=ranks).wait()
            older = out / "checkpoints" / f"step_{START - EVERY:06d}"
            reported = check_output(run, "skipped: ", file, f"resumed from {older}")
            tally.case(
                f"{damage} in {name}",
                {f"exit {run.codes}": run.codes == [0] * ranks} | reported | toy.check_equal(out, ranks),
                run,
            )
    if ranks == 1 and not toy.quick:
        out = toy.copy_partial_run(ranks)
        for checkpoint in list_checkpoints(out):
            (checkpoint / names[-1]).write_bytes(b"")
        run = toy.train(out).wait()
        tally.case("both checkpoints damaged", check_user_error(run, "no intact checkpoint", names[-1]), run)
    return f"in {', '.join(names)}: all reported; the run continued from the older checkpoint, equal bit for bit"


def one_folder(toy: Toy, ranks: int, tally: Tally) -> str:
    """Start a second run in the folder of a running one."""
    out = toy.copy_partial_run(ranks)
    first = toy.train(
        out, ranks=ranks, before=lambda rank: os.environ.update(FAULT_AFTER="0", FAULT_SLEEP="1000")
    ).wait(SLEEPS)
    second = toy.train(out, ranks=ranks).wait()
    texts = "another run", f"process {first.pids[0]} "
    checks = check_user_error(second, *texts) if ranks == 1 else check_output(second, *texts)
    checks["the first run continues"] = not first.ended()
    first.kill()
    tally.case("two runs", checks | toy.check_resumed(out, ranks), second)
    return (
        "the second ends with one line that names the first; after a SIGKILL of the first, a third continues, equal "
        "bit for bit"
    )


@contextmanager
def disk(toy: Toy, bytes_: int) -> Iterator[Path]:
    place = toy.new_path()
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={bytes_}", "tmpfs", place], check=True, capture_output=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def remount(place: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", place], check=True)


def commands(toy: Toy, parent: Path) -> dict[str, tuple[str, Path, list]]:
    """Return the other scripts that write files, by name: (script, written file, arguments)."""
    run = toy.folder / "whole1"
    return {
        "eval": (
            "eval.py",
            parent / "eval",
            [run, "--data", toy.data, "--limit", 8, "--max-new-tokens", 6, "--reward", f"{toy.reward}:score", "--out",
             parent / "eval"],
        ),
        "merge": ("merge_lora.py", parent / "merged", [run, "--out", parent / "merged"]),
        "prepare": (
            "prepare_data.py",
            parent / "x.parquet",
            ["shapes", "--n", 200, "--split", "train", "--out", parent / "x.parquet"],
        ),
    }


def full_disk(toy: Toy, ranks: int, tally: Tally) -> str:
    """Fill the disk before a checkpoint, a page of rollouts and the start of a run; then before eval, merge and
    prepare."""
    size = sum(f.stat().st_size for f in (toy.folder / f"begun{ranks}").rglob("*") if f.is_file())
    needed = sum(f.stat().st_size for f in (toy.folder / f"begun{ranks}/checkpoints/step_{START:06d}").iterdir())

    def fill(rank: int) -> None:  # in the first step, after the trial call; half a checkpoint fits
        os.environ.update(FAULT_AFTER="1", FAULT_FILL=str(filler), FAULT_ROOM=str(needed // 2)) if rank == 0 else None

    with disk(toy, size + 4 * needed) as place:
        out, filler = toy.copy_partial_run(ranks, place), place / "filler"
        run = toy.train(out, ranks=ranks, before=fill).wait()
        checks = check_user_error(run, "no space left", "GB free") | {
            "older checkpoints verify": verified(out) and newest(out) == START
        }
        checks |= (
            {"metrics of all steps are there": len(read_rows(out / "metrics.jsonl")) == STEPS} if ranks == 1 else {}
        )
        late = toy.train(out, ranks=ranks).wait()
        checks |= check_output(late, "error: ", "disk full", "GB") | {
            "refused before the first step": f"step {START + 1}/" not in late.text
        }
        filler.unlink()
        tally.case("a checkpoint", checks | toy.check_resumed(out, ranks), run)
    if ranks > 1:
        return "one line with space needed and free, older checkpoints good; after space was freed, equal bit for bit"
    with disk(toy, size + 4 * needed) as place:
        out = toy.copy_partial_run(ranks, place)
        filler = place / "filler"
        run = toy.train(out, before=lambda rank: os.environ.update(FAULT_AFTER="0", FAULT_FILL=str(filler))).wait()
        checks = check_user_error(run, "space left", "GB free") | {
            "older checkpoints verify": verified(out) and newest(out) == START
        }
        late = toy.train(out).wait()
        checks |= check_user_error(late, "space left") | {"refused before loading": LOADED not in late.text}
        filler.unlink()
        tally.case("a page, and a start on a full disk", checks | toy.check_resumed(out, ranks), run)
    for name in () if toy.quick else ("eval", "merge", "prepare"):
        with disk(toy, 2**13) as place:
            script, target, argv = commands(toy, place)[name]
            run = toy.run(script, *argv).wait()
            checks = check_user_error(run, "space left", "GB free")
            whole = {f"nothing half written: {list(place.iterdir())}": not any(place.iterdir())}
            checks |= check_output(run, "95% interval") if name == "eval" else whole  # eval.py prints its figures first
            tally.case(name, checks, run)
    return (
        "one line with space needed and free, older checkpoints good, nothing half written, eval's figures shown; then "
        "equal bit for bit"
    )


def read_only(toy: Toy, ranks: int, tally: Tally) -> str:
    """Run with a read-only --out."""
    with disk(toy, 2**26) as place:
        out = toy.copy_partial_run(ranks, place)
        remount(place, "ro")
        run = toy.train(out, ranks=ranks).wait()
        checks = check_user_error(run, "cannot be written", "Read-only") | {
            "refused before loading": LOADED not in run.text
        }
        tally.case("train", checks, run)
        for name, (script, _, argv) in commands(toy, place).items() if ranks == 1 else ():
            run = toy.run(script, *argv).wait()
            checks = check_user_error(run, "cannot be written", "Read-only") | {
                "refused before loading": "95% interval" not in run.text
            }
            tally.case(name, checks, run)
    return "one line, before anything is loaded"


# ----------------------------------------------------------------------------------------------------------------------

SCENARIOS: dict[str, tuple[Callable[[Toy, int, Tally], str], tuple[int, ...], str]] = {
    "kills": (kills, (1, 2), "SIGKILL at random moments"),
    "operations": (operations, (1, 2), "SIGKILL before each file operation"),
    "signals": (signals, (1, 2), "TERM, INT, HUP, USR1, XCPU"),
    "hurries": (hurries, (1,), "signals at bad moments"),
    "torchrun": (torchrun, (2,), "torchrun: SIGTERM, --max-restarts"),
    "silence": (silence, (2,), "a rank stops responding"),
    "numbers": (numbers, (1, 2), "NaN and 1e25"),
    "flips": (flips, (1, 2), "damaged checkpoint"),
    "one_folder": (one_folder, (1, 2), "two runs in one folder"),
    "full_disk": (full_disk, (1, 2), "disk full"),
    "read_only": (read_only, (1, 2), "read-only folder"),
}
MOUNTS = ("full_disk", "read_only")


def can_mount(toy: Toy) -> bool:
    try:
        with disk(toy, 2**20):
            return True
    except (subprocess.CalledProcessError, OSError):
        return False


BROKE_OFF = "broke off with an exception"


def run_scenario(toy: Toy, name: str, ranks: int, result: Path) -> None:
    """Run one scenario on this many ranks in this process, a fork for it alone, and write its outcome as JSON."""
    function, _, title = SCENARIOS[name]
    tally, began = Tally(), time.monotonic()
    RUNS.clear()  # the parent's runs belong to other scenarios
    text = BROKE_OFF
    try:
        text = (
            function(toy, ranks, tally)
            if name not in MOUNTS or can_mount(toy)
            else "not run: cannot mount a tmpfs (needs root)"
        )
        if text.startswith("not run"):
            tally.case(name, {text: False})
    except Exception:
        tally.case(name, {f"{BROKE_OFF}:\n{traceback.format_exc()}": False})
    finally:
        for run in RUNS:
            run.kill()
        row = {
            "name": name,
            "scenario": title,
            "ranks": ranks,
            "cases": tally.cases,
            "held": tally.held,
            "what": text,
            "seconds": round(time.monotonic() - began, 1),
            "failures": tally.failures,
        }
        result.write_text(json.dumps(row))


def table(rows: list[dict]) -> str:
    lines = ["| scenario | ranks | cases | passed | what happened | seconds |", "|---|--:|--:|--:|---|--:|"]
    for r in rows:
        lines.append(
            f"| {r['scenario']} | {r['ranks']} | {r['cases']} | {r['held']} | {r['what']} | {r['seconds']:.0f} |"
        )
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--only", help=f"comma-separated scenarios: {', '.join(SCENARIOS)}")
    p.add_argument(
        "--ranks", type=int, choices=(1, 2), help="number of processes (default: scenarios with 1 and with 2)"
    )
    p.add_argument("--short", dest="quick", action="store_true", help="run only a few cases of each scenario")
    p.add_argument("--jobs", type=int, default=1, help="number of scenarios to run in parallel")
    p.add_argument("--seed", type=int, default=0, help="random seed of the moments of kills and of the flipped bits")
    p.add_argument("--json", type=Path, help="also write the results to this file")
    return p.parse_args()


def main() -> int:
    args = parse_args()
    names = args.only.split(",") if args.only else list(SCENARIOS)
    if unknown := [name for name in names if name not in SCENARIOS]:
        sys.exit(f"error: --only {unknown[0]}: unknown scenario; choose from {', '.join(SCENARIOS)}")
    selected = []
    for name in names:
        selected += [(name, ranks) for ranks in SCENARIOS[name][1] if args.ranks in (None, ranks)]
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))  # a TemporaryDirectory would be removed by a child at its exit
    try:
        toy = Toy(folder, args.quick, args.seed)
        toy.build({ranks for _, ranks in selected} | {1})
        rows: dict[tuple[str, int], dict] = {}
        running: dict[tuple[str, int], tuple[Run, Path]] = {}
        waiting = list(selected)
        while waiting or running:
            while waiting and len(running) < args.jobs:
                name, ranks = waiting.pop(0)
                result = toy.folder / f"{name}{ranks}.json"
                running[name, ranks] = (
                    fork(
                        [functools.partial(run_scenario, toy, name, ranks, result)], toy.folder / f"{name}{ranks}.log"
                    ),
                    result,
                )
            for key, (run, result) in list(running.items()):
                if run.ended():
                    del running[key]
                    assert result.exists(), f"{key} ended without a result: {run.text}"
                    row = rows[key] = json.loads(result.read_text())
                    print(
                        f"{row['name']}, {row['ranks']} rank(s): {row['held']} of {row['cases']} passed, "
                        f"{row['seconds']:.0f} s",
                        flush=True,
                    )
                    for failure in row["failures"]:
                        print(f"  FAILED {failure}", flush=True)
            time.sleep(0.05)
        done = [rows[key] for key in selected]
    finally:
        shutil.rmtree(folder)
    cases, held = sum(r["cases"] for r in done), sum(r["held"] for r in done)
    print(
        f"\n{table(done)}\n\n{held} of {cases} cases passed in {(time.monotonic() - began) / 60:.1f} minutes with "
        f"--jobs {args.jobs}"
    )
    if args.json:
        args.json.write_text(
            json.dumps({"rows": done, "cases": cases, "held": held, "quick": args.quick}, indent=2) + "\n"
        )
    return 0 if held == cases else 1


if __name__ == "__main__":
    sys.exit(main())
