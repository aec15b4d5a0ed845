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
import train  # noqa: E402
from model import Policy  # noqa: E402
from parallel.checkpoint import checkpoint_step, file_checksum, list_checkpoints, read_trainer_state  # noqa: E402
from parallel.models import OptimConfig  # noqa: E402
from report.run_files import read_rows  # noqa: E402
from utils import run_script  # noqa: E402

STEPS, EVERY = 12, 2  # of the run that nothing happens to, and between its checkpoints
BEGUN = 10  # most cases begin after this step: two checkpoints are there, and one more is to come
SCRIPTS = {"train.py": train, "eval.py": eval_script, "merge_lora.py": merge_lora, "prepare_data.py": prepare_data}

# A reward that differs within groups, and misbehaves when its process is told to
REWARD = """
import os, pathlib, time
calls = -2 * (os.environ.get("RANK", "0") == "0")  # rank 0 tries it on two responses
def score(response, example):
    global calls
    calls += 1
    if calls > int(os.environ.get("FAULT_AFTER", 10**9)):
        if "FAULT_SLEEP" in os.environ:
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
            if self.codes[i] is None and (found := os.waitpid(pid, os.WNOHANG))[0]:
                self.codes[i] = os.waitstatus_to_exitcode(found[1])
        return None not in self.codes

    def wait(self, seconds: float = 120.0, text: str | None = None) -> "Run":
        """Wait until all processes have ended, `text` was printed, or the time is over."""
        end = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < end and (text is None or text not in self.text):
            time.sleep(0.01)
        return self

    def send(self, number: int, ranks: list[int] | None = None) -> "Run":
        for i, pid in enumerate(self.pids):
            if self.codes[i] is None and (ranks is None or i in ranks):
                os.kill(pid, number)
        return self

    def kill(self) -> "Run":
        return self.send(signal.SIGKILL).wait(10)


class Toy:
    """A toy model, its data, and run folders to damage."""

    def __init__(self, folder: Path, quick: bool, seed: int):
        self.folder, self.quick, self.seed, self.count = folder, quick, seed, 0
        self.model, self.data, self.reward = folder / "model", folder / "train.parquet", folder / "reward.py"
        self.seconds: dict[int, float] = {}

    def build(self, ranks: set[int]) -> None:
        self.reward.write_text(REWARD)
        fork([functools.partial(demo.make_model, self.model, hidden=64, layers=2)], self.folder / "model.log").wait()
        done = self.run("prepare_data.py", "shapes", "--n", 64, "--split", "train", "--out", self.data).wait()
        assert done.codes == [0], done.text
        for world in sorted(ranks):  # a run without faults, and the same up to BEGUN
            began = time.monotonic()
            for name, steps in (("whole", STEPS), ("begun", BEGUN)):
                done = self.train(self.folder / f"{name}{world}", "--steps", steps, ranks=world).wait()
                assert done.codes == [0] * world, done.text
                self.seconds.setdefault(world, time.monotonic() - began)

    def new(self, parent: Path | None = None) -> Path:
        self.count += 1
        return (parent or self.folder) / f"case_{os.getpid()}_{self.count}"

    def begun(self, ranks: int, parent: Path | None = None) -> Path:
        return shutil.copytree(self.folder / f"begun{ranks}", self.new(parent))

    def run(self, script: str, *argv: object, ranks: int = 1, before: Callable[[int], None] | None = None) -> Run:
        module, words = SCRIPTS[script], [str(word) for word in argv]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        def process(rank: int) -> None:
            where = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            os.environ.update({key: str(value) for key, value in where.items()} if ranks > 1 else {})
            sys.argv = [script, *words]
            if before:
                before(rank)
            run_script(module.main, lambda: module.parse_args(words))

        return fork([functools.partial(process, rank) for rank in range(ranks)], Path(f"{self.new()}.log"))

    def flags(self, out: Path, *more: object) -> list[str]:
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
            *more,
        ]
        return [str(flag) for flag in flags]

    def train(self, out: Path, *more: object, ranks: int = 1, before: Callable[[int], None] | None = None) -> Run:
        return self.run("train.py", *self.flags(out, *more), ranks=ranks, before=before)

    def torchrun(self, out: Path, *more: object, launcher: tuple = ()) -> Run:
        log = Path(f"{self.new()}.log")
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
            started = subprocess.Popen([*command, *self.flags(out, *more)], cwd=ROOT, stdout=file, stderr=file)
        RUNS.append(Run(log, [started.pid]))
        return RUNS[-1]

    def check_resumed(self, out: Path, ranks: int) -> dict[str, bool]:
        """Resume a run to its end; return checks that it equals the run without faults."""
        run = self.train(out, ranks=ranks).wait()
        return {f"resumed: exit {run.codes}\n{run.text[-1500:]}": run.codes == [0] * ranks} | self.equal(
            out, ranks, run
        )

    def equal(self, out: Path, ranks: int, run: Run | None = None) -> dict[str, bool]:
        whole = self.folder / f"whole{ranks}"
        rows = [
            [{k: v for k, v in r.items() if k[:5] not in ("time/", "perf/")} for r in read_rows(x / "metrics.jsonl")]
            for x in (out, whole)
        ]
        checks = {"metrics equal those of the run without faults": rows[0] == rows[1]}
        found = [(list_checkpoints(x) or [None])[-1] for x in (out, whole)]
        same = (
            None not in found
            and [f.name for f in found] == [f"step_{STEPS:06d}"] * 2
            and stored_values(found[0]) == stored_values(found[1])
        )
        # leftovers of a kill are removed with the next checkpoint, if there is one
        saved = run is None or "nothing to do" not in run.text
        left = [p.name for p in (out / "checkpoints").iterdir() if p.name.startswith(".") and saved]
        return checks | {
            "last checkpoint equals that of the run without faults": same,
            f"nothing half written: {left}": not left,
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
    found = list_checkpoints(out)
    for checkpoint in found:
        written = read_trainer_state(checkpoint)["files"]
        if any(file_checksum(checkpoint / name) != wanted for name, wanted in written.items()):
            return False
    return bool(found)


def says(run: Run, *texts: object) -> dict[str, bool]:
    return {f"output contains {str(text)!r}": str(text) in run.text for text in texts}


def one_line(run: Run, *texts: object) -> dict[str, bool]:
    """Return checks of a user error: exit code 1, a one-line message, no traceback."""
    return {
        f"exit {run.codes} is 1": set(run.codes) == {1},
        "no traceback": "Traceback" not in run.text,
        **says(run, "error: ", *texts),
    }


def newest(out: Path) -> int:
    return checkpoint_step((list_checkpoints(out) or [Path("step_0")])[-1])


# ----------------------------------------------------------------------------------------------------------------------
# Kills


def kills(toy: Toy, ranks: int, tally: Tally) -> str:
    """Send SIGKILL at random moments, repeatedly during one run. With two ranks, kill both or one; then the other one
    must end by itself."""
    rng, wanted, ends, after = random.Random(toy.seed + ranks), 3 if toy.quick else 25, [], []
    while tally.cases < wanted:
        out, killed, checks = toy.new(), 0, {}
        while True:
            run = toy.train(out, ranks=ranks)
            if tally.cases + killed < wanted and killed < 12:
                run.wait(rng.uniform(0.05, 1.1 * toy.seconds[ranks]))
            else:
                run.wait()
            if run.ended():
                break
            killed += 1
            if ranks > 1 and rng.random() < 0.5:
                # before both have joined, the other rank may wait for this one to arrive
                began, joined = time.monotonic(), "M parameters" in run.text
                run.send(signal.SIGKILL, [rng.randrange(ranks)]).wait(30 if joined else 0)
                if joined:
                    ends.append(time.monotonic() - began)
                    # exit 0 is right only if the run was complete before the kill
                    complete = newest(out) == STEPS
                    checks[f"kill {killed}: the other rank ended by itself: {run.codes}"] = (
                        run.ended() and (complete or 0 not in run.codes)
                    )
            run.kill()
            after.append(newest(out) if out.exists() else 0)
            checks[f"kill {killed}: checkpoints verify"] = newest(out) == 0 or verified(out)
        checks[f"the last start: exit {run.codes}"] = run.codes == [0] * ranks
        tally.case("random kills", checks | toy.equal(out, ranks), run, max(killed, 1))
    alone = f"; the rank next to a killed one ended itself after {min(ends):.1f} to {max(ends):.1f} s" if ends else ""
    return (
        f"with {sum(x == 0 for x in after)} of them before the first checkpoint; resumed runs equal bit for bit{alone}"
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
        os.write(words, f"{event} {os.path.relpath(path, place)}\n".encode())
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

    words = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sync = os.fsync
    os.fsync = lambda handle: (
        operation("fsync", handle if isinstance(handle, int) else handle.fileno()),
        sync(handle),
    )[1]
    sys.addaudithook(hook)


def operations(toy: Toy, ranks: int, tally: Tally) -> str:
    """Send SIGKILL before each file operation below --out: opening to write, mkdir, rename, unlink, rmdir, fsync. With
    two ranks, kill either."""
    seen, out = [], toy.begun(ranks)
    logs = [Path(f"{toy.new()}.{rank}") for rank in range(ranks)]
    toy.train(out, ranks=ranks, before=lambda rank: count_operations(out, 0, logs[rank])).wait()
    for rank in range(ranks):
        done = logs[rank].read_text().splitlines()
        seen.append(len(done))
        places = range(1 + rank, len(done) + 1, ranks)  # with two ranks every second one
        if toy.quick:
            places = [places[len(done) // 3], places[-2]] if rank == 0 else []
        for at in places:
            out, log = toy.begun(ranks), Path(f"{toy.new()}.ops")
            run = toy.train(
                out,
                ranks=ranks,
                before=lambda r, rank=rank, out=out, at=at, log=log: r == rank and count_operations(out, at, log),
            )
            while run.codes[rank] is None and not run.ended():
                time.sleep(0.01)
            run.kill()
            checks = {
                f"killed there: {run.codes}": run.codes[rank] == -signal.SIGKILL,
                "checkpoints verify": verified(out),
            }
            tally.case(f"rank {rank}, before {done[at - 1]}", checks | toy.check_resumed(out, ranks), run)
    counts = " + ".join(map(str, seen))
    return f"{counts} operations in two steps with a checkpoint made and one deleted; equal bit for bit"


# ----------------------------------------------------------------------------------------------------------------------
# Signals, restarts, silence


def signals(toy: Toy, ranks: int, tally: Tally) -> str:
    """Send five signals that stop a run, one after another during one run; with two ranks only to rank 1."""
    out, took = toy.new(), []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)[
        : 1 if toy.quick else 5
    ]:
        run = toy.train(out, ranks=ranks)
        run.wait(60, f"step {newest(out) + 1:>2}/{STEPS}")
        began = time.monotonic()
        run.send(number, [ranks - 1]).wait(30)
        took.append(time.monotonic() - began)
        told = f"stopped after step {newest(out)} of {STEPS}, saved in {out / 'checkpoints'}"
        checks = {
            f"exit {run.codes} is {128 + number}": run.codes == [128 + number] * ranks,
            "checkpoints verify": verified(out),
        }
        tally.case(number.name, checks | says(run, told, "with --resume auto continues"), run)
    tally.case("the same run to its end", toy.check_resumed(out, ranks))
    return f"saved and ended {min(took):.1f} to {max(took):.1f} s after the signal; resumed, equal bit for bit"


def hurries(toy: Toy, ranks: int, tally: Tally) -> str:
    """Send signals at bad moments: in the set-up, in a long rollout, twice, with a short grace period, to torchrun."""
    out = toy.new()
    run = toy.train(out).wait(60, "examples of up to").send(signal.SIGTERM)
    began = time.monotonic()
    run.wait(20)
    setup = time.monotonic() - began
    checks = {
        f"exit {run.codes}": run.codes == [143],
        f"within 3 s: {setup:.1f}": setup < 3,
        **says(run, "nothing to save"),
    }
    tally.case("SIGTERM in the set-up", checks, run)

    run = toy.train(out, "--max-new-tokens", 6000, "--micro-tokens", 8192).wait(60, "algorithm grpo")
    time.sleep(1)
    began = time.monotonic()
    run.send(signal.SIGTERM).wait(60)
    rollout = time.monotonic() - began
    tally.case(
        "SIGTERM in a long rollout",
        {
            f"exit {run.codes}": run.codes == [143],
            f"ended within 3 s: {rollout:.1f}": rollout < 3,
            **says(run, "no step was finished"),
        },
        run,
    )

    def slow(rank: int) -> None:
        os.environ |= {"FAULT_AFTER": "16", "FAULT_SLEEP": "5"}  # from the second step on

    out = toy.begun(1)
    run = toy.train(out, "--grace-seconds", 0.5, before=slow).wait(60, f"step {BEGUN + 1}/")
    time.sleep(0.7)
    began = time.monotonic()
    run.send(signal.SIGTERM).wait(60)
    grace = time.monotonic() - began
    checks = {
        f"exit {run.codes}": run.codes == [143],
        f"within 1.5 s: {grace:.1f}": grace < 1.5,
        **says(run, "not saved within"),
        "older checkpoints verify": verified(out) and newest(out) == BEGUN,
    }
    tally.case("SIGTERM with a grace period that is too short", checks | toy.check_resumed(out, 1), run)

    out = toy.begun(1)
    run = toy.train(out, before=slow).wait(60, f"step {BEGUN + 1}/")
    time.sleep(0.7)
    run.send(signal.SIGINT).wait(1.3)
    waited = not run.ended()
    run.send(signal.SIGINT).wait(5)
    checks = {
        "the first one waits": waited,
        f"exit {run.codes}": run.codes == [130],
        **says(run, "SIGINT again: not saved"),
        "older checkpoints verify": verified(out) and newest(out) == BEGUN,
    }
    tally.case("Ctrl-C twice", checks | toy.check_resumed(out, 1), run)
    return (
        f"ended: in the set-up after {setup:.1f} s, nothing to save; in a long rollout after {rollout:.1f} s; with a "
        f"grace of 0.5 s "
        f"and a reward that hangs after {grace:.1f} s, not saved, said so, older checkpoint good"
    )


def workers_of(run: Run) -> dict[int, int]:
    """Return the process id of each rank of a torchrun."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            if parent == run.pids[0]:
                variables = dict(
                    v.split("=", 1) for v in folder.joinpath("environ").read_text().split("\0") if "=" in v
                )
                found[int(variables["RANK"])] = int(folder.name)
        except (OSError, KeyError, ValueError):  # it has just ended, or is no worker
            continue
    return found


def torchrun(toy: Toy, ranks: int, tally: Tally) -> str:
    """Stop torchrun by a signal; and kill or suspend a rank under torchrun --max-restarts, which restarts by itself."""
    out = toy.new()
    run = toy.torchrun(out).wait(120, f"step  2/{STEPS}").send(signal.SIGTERM).wait(60)
    checks = {
        f"exit {run.codes} is none of success": run.codes[0] not in (0, None),
        "checkpoints verify": verified(out),
    }
    tally.case(
        "SIGTERM to torchrun",
        checks | says(run, "stopped after step", "--resume auto continues") | toy.check_resumed(out, 2),
        run,
    )
    took = []
    for number, more in ((signal.SIGKILL, ()), (signal.SIGSTOP, ("--timeout-minutes", 0.1))):
        out = toy.new()
        began = time.monotonic()
        run = toy.torchrun(out, *more, launcher=("--max-restarts", "2", "--shutdown-timeout", "3")).wait(
            120, f"step  3/{STEPS}"
        )
        os.kill(workers_of(run)[1], number)
        run.wait(150)
        took.append(time.monotonic() - began)
        checks = {f"exit {run.codes}": run.codes == [0], **says(run, "resumed from", "--resume auto")} | toy.equal(
            out, 2
        )
        tally.case(
            f"{number.name} to rank 1 under --max-restarts", checks | (says(run, "rank 1 (") if more else {}), run
        )
    return (
        f"killed rank: whole run {took[0]:.0f} s; stopped rank (limit 6 s, torchrun --shutdown-timeout 3 in place of "
        f"30): "
        f"{took[1]:.0f} s; equal bit for bit"
    )


def silence(toy: Toy, ranks: int, tally: Tally) -> str:
    """Suspend a rank, or let it hang in a user's reward: the others must name it after --timeout-minutes."""
    limit, took = 0.05, []
    for rank in range(ranks)[: 1 if toy.quick else ranks]:
        out = toy.new()
        run = (
            toy.train(out, "--timeout-minutes", limit, ranks=ranks)
            .wait(60, f"step  3/{STEPS}")
            .send(signal.SIGSTOP, [rank])
        )
        began = time.monotonic()
        while run.codes[1 - rank] is None and time.monotonic() < began + 60:
            time.sleep(0.01)
            run.ended()
        took.append(time.monotonic() - began)
        run.kill()
        checks = {f"exit {run.codes}": run.codes[1 - rank] == 1} | says(run, f"error: rank {rank} (", "--resume auto")
        tally.case(f"rank {rank} stopped", checks | toy.check_resumed(out, ranks), run)

        def hang(r: int, rank=rank) -> None:
            os.environ |= {"FAULT_AFTER": "8", "FAULT_SLEEP": "1000"} if r == rank else {}

        out = toy.begun(ranks)
        run = toy.train(out, "--timeout-minutes", limit, ranks=ranks, before=hang)
        run.wait(60, f"step {BEGUN + 2}/")
        took.append(0.0) if not run.ended() else None
        checks = {f"exit {run.codes}": run.codes == [1] * ranks} | says(
            run, f"error: rank {rank} (", "is still in reward after"
        )
        run.kill()
        tally.case(f"rank {rank} hangs in its reward", checks | toy.check_resumed(out, ranks), run)
    seconds = f"{min(took):.1f} to {max(took):.1f} s with a limit of {60 * limit:.0f} s"
    return f"named after {seconds}, with its stage; equal bit for bit"


# ----------------------------------------------------------------------------------------------------------------------
# Numbers


def poison(kind: str, value: float, steps: range) -> None:
    """Set the loss, the gradients or a weight of this process to `value` in these 0-based steps."""
    at = [-1]
    clipped_step, forward, factor = train.clip_and_step, Policy.forward, OptimConfig.lr_factor

    def noted_factor(self, step: int, steps: int) -> float:
        at[0] = step
        return factor(self, step, steps)

    def spoilt_forward(self, *args):
        out = forward(self, *args)
        return out if out.loss is None or at[0] not in steps else out._replace(loss=out.loss * value)

    @torch.no_grad()
    def spoilt_step(model, optimizer, norm):
        ours = [p for p in model.parameters() if p.requires_grad]
        if kind == "gradient" and at[0] in steps:
            next(p.grad for p in ours if p.grad is not None and p.grad.to_local().numel()).to_local().view(-1)[0] = (
                value
            )
        found = clipped_step(model, optimizer, norm)
        if kind == "weight" and at[0] in steps:
            next(p for p in ours if p.to_local().numel()).to_local().view(-1)[0] = value
        return found

    OptimConfig.lr_factor = noted_factor
    if kind == "loss":
        Policy.forward = spoilt_forward
    else:
        train.clip_and_step = spoilt_step


def numbers(toy: Toy, ranks: int, tally: Tally) -> str:
    """Put NaN and 1e25 into reward, loss, gradient and weight, on all ranks or one."""
    forever = range(STEPS)
    kinds = ("loss", "gradient", "weight", "reward")
    for who in [list(range(ranks))] if ranks == 1 else [[0, 1], [1]]:
        for value in (float("nan"), 1e25):
            for kind in kinds:
                if toy.quick and (kind, value == value) not in (("loss", False), ("weight", False)):
                    continue

                def spoil(steps: range, rank: int, few=False, kind=kind, value=value, who=who) -> None:
                    if few:  # the run is to end after two skipped updates in a row instead of ten
                        report.log.MAX_SKIPPED = 2
                    if rank in who and kind == "reward":
                        os.environ |= {"FAULT_AFTER": str(16 // ranks), "FAULT_REWARD": str(value)}
                    elif rank in who:
                        poison(kind, value, steps)

                name = f"{kind} {value} on {'all ranks' if len(who) == ranks else f'rank {who}'}"
                out = toy.begun(ranks)
                if kind in ("loss", "gradient"):  # one update is left out, and told
                    run = toy.train(out, ranks=ranks, before=functools.partial(spoil, range(BEGUN, BEGUN + 1))).wait()
                    told = out / "skipped" / f"step_{BEGUN + 1:06d}.json"
                    uids = json.loads(told.read_text())["updates"][0]["uids"] if told.exists() else []
                    checks = {
                        f"exit {run.codes}": run.codes == [0] * ranks,
                        "checkpoints verify": verified(out),
                        "uids": len(uids) > 0,
                    }
                    checks |= {
                        "metrics are JSON": "NaN" not in (out / "metrics.jsonl").read_text(),
                        "to its end": newest(out) == STEPS,
                    }
                    tally.case(f"{name}, once", checks | says(run, f"warning: step {BEGUN + 1} skipped 1 update"), run)
                    out = toy.begun(ranks)
                    run = toy.train(out, ranks=ranks, before=functools.partial(spoil, forever, few=True)).wait()
                    good = list_checkpoints(out)[-1]
                    checks = one_line(run, "2 updates in a row", f"The newest checkpoint is {good}") | {
                        "checkpoints verify": verified(out)
                    }
                    again = toy.train(out, "--steps", STEPS + 1, ranks=ranks).wait()
                    checks |= {f"resumed: exit {again.codes} {again.text[-500:]}": again.codes == [0] * ranks}
                    tally.case(f"{name}, always", checks, run)
                else:  # the run ends, nothing bad is saved, and without the fault it is as if it had not been
                    for step in (BEGUN, BEGUN + 1)[: 1 if kind == "reward" or toy.quick else 2]:
                        out = toy.begun(ranks) if out is None else out
                        run = toy.train(out, ranks=ranks, before=functools.partial(spoil, range(step, step + 1))).wait()
                        checks = {f"exit {run.codes}": set(run.codes) == {1}, "checkpoints verify": verified(out)}
                        checks |= {f"newest {newest(out)}": newest(out) == BEGUN}
                        # the sampler meets a bad weight, unless it belongs to a token that does not occur; then
                        # saving meets it
                        found = ("shapes-train-",) if kind == "reward" else ("not finite", "holds NaN")
                        checks |= {f"output contains one of {found}": any(text in run.text for text in found)}
                        tally.case(f"{name} at step {step + 1}", checks | toy.check_resumed(out, ranks), run)
                        out = None
    return (
        "updates skipped and reported with uids, run stopped after too many in a row; bad rewards and weights end the "
        "run, nothing bad saved"
    )


# ----------------------------------------------------------------------------------------------------------------------
# Files


def flips(toy: Toy, ranks: int, tally: Tally) -> str:
    """Flip a bit, truncate or remove a file in the newest checkpoint: this must be reported and the older one used."""
    rng, names = (
        random.Random(toy.seed),
        sorted(p.name for p in (toy.folder / f"begun{ranks}/checkpoints/step_{BEGUN:06d}").iterdir()),
    )
    for name in names:
        for harm in ("flipped bit",) if toy.quick else ("flipped bit", "flipped bit", "cut", "empty", "missing"):
            if harm == "missing" and name == "trainer.json":
                continue  # then it is no complete checkpoint, as if it had been killed
            out = toy.begun(ranks)
            file = out / "checkpoints" / f"step_{BEGUN:06d}" / name
            data = bytearray(file.read_bytes())
            if harm == "flipped bit":
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes({"cut": data[:-1], "empty": b""}.get(harm, data))
            if harm == "missing":
                file.unlink()
            run = toy.train(out, ranks=ranks).wait()
            older = out / "checkpoints" / f"step_{BEGUN - EVERY:06d}"
            told = says(run, "skipped: ", file, f"resumed from {older}")
            tally.case(
                f"{harm} in {name}", {f"exit {run.codes}": run.codes == [0] * ranks} | told | toy.equal(out, ranks), run
            )
    if ranks == 1 and not toy.quick:
        out = toy.begun(ranks)
        for checkpoint in list_checkpoints(out):
            (checkpoint / names[-1]).write_bytes(b"")
        run = toy.train(out).wait()
        tally.case("both checkpoints damaged", one_line(run, "no intact checkpoint", names[-1]), run)
    return f"in {', '.join(names)}: all reported; the run continued from the older checkpoint, equal bit for bit"


def one_folder(toy: Toy, ranks: int, tally: Tally) -> str:
    """Start a second run in the folder of a running one."""
    out = toy.begun(ranks)
    first = toy.train(
        out, ranks=ranks, before=lambda rank: os.environ.update(FAULT_AFTER="0", FAULT_SLEEP="1000")
    ).wait(60, "resumed from")
    second = toy.train(out, ranks=ranks).wait(60)
    told = f"another run writes there (process {first.pids[0]} "
    checks = one_line(second, told) if ranks == 1 else says(second, told)
    checks["the first run continues"] = not first.ended()
    first.kill()
    tally.case("two runs", checks | toy.check_resumed(out, ranks), second)
    return (
        "the second ends with one line that names the first; after a SIGKILL of the first, a third continues, equal "
        "bit for bit"
    )


@contextmanager
def disk(toy: Toy, bytes_: int) -> Iterator[Path]:
    place = toy.new()
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={bytes_}", "tmpfs", place], check=True, capture_output=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def remount(place: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", place], check=True)


def commands(toy: Toy, parent: Path) -> dict[str, tuple[str, Path, list]]:
    """Return the other scripts that write files: script, written file, arguments."""
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
    """Fill the disk before a checkpoint, a page of rollouts, and the start; and before eval, merge and prepare."""
    size = sum(f.stat().st_size for f in (toy.folder / f"begun{ranks}").rglob("*") if f.is_file())
    one = sum(f.stat().st_size for f in (toy.folder / f"begun{ranks}/checkpoints/step_{BEGUN:06d}").iterdir())

    def fills(rank: int) -> None:  # in the first step, after the trial call, and leaves half of what a checkpoint needs
        os.environ.update(FAULT_AFTER="1", FAULT_FILL=str(filler), FAULT_ROOM=str(one // 2)) if rank == 0 else None

    with disk(toy, size + 4 * one) as place:
        out, filler = toy.begun(ranks, place), place / "filler"
        run = toy.train(out, ranks=ranks, before=fills).wait()
        checks = one_line(run, "no space left", "bytes", "free") | {
            "older checkpoints verify": verified(out) and newest(out) == BEGUN
        }
        checks |= (
            {"metrics of all steps are there": len(read_rows(out / "metrics.jsonl")) == STEPS} if ranks == 1 else {}
        )
        late = toy.train(out, ranks=ranks).wait()
        checks |= says(late, "disk full: a checkpoint needs") | {
            "refused before the first step": f"step {BEGUN + 1}/" not in late.text
        }
        filler.unlink()
        tally.case("a checkpoint", checks | toy.check_resumed(out, ranks), run)
    if ranks > 1:
        return "one line with bytes needed and free, older checkpoints good; after space was made, equal bit for bit"
    with disk(toy, size + 4 * one) as place:
        out = toy.begun(ranks, place)
        filler = place / "filler"
        run = toy.train(out, before=lambda rank: os.environ.update(FAULT_AFTER="0", FAULT_FILL=str(filler))).wait()
        checks = one_line(run, "space left", "bytes free") | {
            "older checkpoints verify": verified(out) and newest(out) == BEGUN
        }
        late = toy.train(out).wait()
        checks |= one_line(late, "space left") | {"refused before loading": "M parameters" not in late.text}
        filler.unlink()
        tally.case("a page, and a start on a full disk", checks | toy.check_resumed(out, ranks), run)
    for name in () if toy.quick else ("eval", "merge", "prepare"):
        with disk(toy, 2**13) as place:
            script, target, argv = commands(toy, place)[name]
            run = toy.run(script, *argv).wait()
            checks = one_line(run, "space left", "bytes free")
            whole = {f"nothing half written: {list(place.iterdir())}": not any(place.iterdir())}
            checks |= says(run, "95% interval") if name == "eval" else whole  # the figures are printed before
            tally.case(name, checks, run)
    return (
        "one line with bytes needed and free, older checkpoints good, nothing half written, eval's figures shown; then "
        "equal bit for bit"
    )


def read_only(toy: Toy, ranks: int, tally: Tally) -> str:
    """Run with a read-only --out."""
    with disk(toy, 2**26) as place:
        out = toy.begun(ranks, place)
        remount(place, "ro")
        run = toy.train(out, ranks=ranks).wait()
        checks = one_line(run, "cannot be written", "Read-only") | {
            "refused before loading": "M parameters" not in run.text
        }
        tally.case("train", checks, run)
        for name, (script, _, argv) in commands(toy, place).items() if ranks == 1 else ():
            run = toy.run(script, *argv).wait()
            checks = one_line(run, "cannot be written", "Read-only") | {
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
    "silence": (silence, (2,), "a rank stops answering"),
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


BROKE_OFF = "broke off because of a bug in this script"


def one(toy: Toy, name: str, ranks: int, result: Path) -> None:
    """Run one scenario on this many ranks in this (separate) process, and write its outcome as JSON."""
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
    finally:
        for run in RUNS:
            run.kill()
        if text == BROKE_OFF or text.startswith("not run"):
            tally.case(name, {text: False})
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
    p.add_argument("--ranks", type=int, choices=(1, 2), help="only with this number of processes (default: 1 and 2)")
    p.add_argument("--short", dest="quick", action="store_true", help="only a few cases of each scenario")
    p.add_argument("--jobs", type=int, default=1, help="scenarios in parallel")
    p.add_argument("--seed", type=int, default=0, help="random seed of moments and bits")
    p.add_argument("--json", type=Path, help="also write the results to this file")
    return p.parse_args()


def main() -> int:
    args = parse_args()
    names = args.only.split(",") if args.only else list(SCENARIOS)
    if unknown := [name for name in names if name not in SCENARIOS]:
        sys.exit(f"error: --only {unknown[0]}: unknown scenario; choose from {', '.join(SCENARIOS)}")
    wanted = []
    for name in names:
        wanted += [(name, ranks) for ranks in SCENARIOS[name][1] if args.ranks in (None, ranks)]
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))  # no TemporaryDirectory: run_script ends children as atexit would
    try:
        toy = Toy(folder, args.quick, args.seed)
        toy.build({ranks for _, ranks in wanted} | {1})
        rows: dict[tuple[str, int], dict] = {}
        running: dict[tuple[str, int], tuple[Run, Path]] = {}
        waiting = list(wanted)
        while waiting or running:
            while waiting and len(running) < args.jobs:
                name, ranks = waiting.pop(0)
                result = toy.folder / f"{name}{ranks}.json"
                running[name, ranks] = (
                    fork([functools.partial(one, toy, name, ranks, result)], toy.folder / f"{name}{ranks}.log"),
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
                    if row["what"] == BROKE_OFF:
                        print(run.text, flush=True)
            time.sleep(0.05)
        done = [rows[key] for key in wanted]
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
