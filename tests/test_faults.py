"""Tests of kills, signals, silent ranks, locks and non-finite numbers.   pytest tests/test_faults.py

The first part runs scenarios of benchmarks/faults.py in their short form; the others test the code in this process.
"""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from conftest import complete
from test_train import rows, run, without_time, write_parquet
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import grpo
import train
import utils
from errors import Interrupted, UserError, check_writable
from parallel import watchdog
from parallel.checkpoint import list_checkpoints
from parallel.resume import contains_run
from parallel.watchdog import SIGNALS, SignalHandler, Watchdog
from report.log import SkippedUpdates
from report.run_files import json_line, lock_folder, read_rows, write_text
from report.run_warnings import RunWarnings
from tasks.shapes import shapes_rows
from utils import DistContext, Meter, StepTimer

ROOT = Path(__file__).parent.parent
QUICK, LONG = ("kills", "signals", "numbers", "flips", "one_folder"), ("operations", "hurries", "silence", "torchrun")
DISKS = ("full_disk", "read_only")


def run_scenarios(folder, ranks, names):
    """Run scenarios in one process, because imports take most of the time. Return the rows of the table by name."""
    file = folder / f"{ranks}.json"
    command = [sys.executable, "benchmarks/faults.py", "--short", "--jobs", 2, "--ranks", ranks]
    command += ["--only", ",".join(names), "--json", file]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert file.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return {row["name"]: row for row in json.loads(file.read_text())["rows"]}


@pytest.fixture(scope="module")
def one_rank_rows(tmp_path_factory):
    return run_scenarios(tmp_path_factory.mktemp("faults"), 1, QUICK + DISKS)


@pytest.fixture(scope="module")
def slow_rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    return {(ranks, name): row for ranks, names in ((1, LONG[:2]), (2, QUICK + LONG[2:]))
            for name, row in run_scenarios(folder, ranks, names).items()}


def assert_held(row):
    assert row["cases"] > 0 and row["held"] == row["cases"], "\n".join(row["failures"])


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK + DISKS)
def test_one_process_survives(name, one_rank_rows):
    row = one_rank_rows[name]
    if row["what"].startswith("not run"):
        pytest.skip(row["what"])
    assert_held(row)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, name", [(1, name) for name in LONG[:2]] + [(2, name) for name in QUICK + LONG[2:]])
def test_two_processes_and_long_cases_survive(ranks, name, slow_rows):
    assert_held(slow_rows[ranks, name])


# --- silent ranks ---------------------------------------------------------------------------------------------------


class ProcessEnded(Exception):
    """Raised in place of os._exit."""


class Store:
    """A store in which the heartbeat of each other rank is `heartbeat(rank, now)`."""

    def __init__(self, clock, heartbeat):
        self.clock, self.heartbeat, self.values = clock, heartbeat, {}

    def set(self, key, value):
        self.values[key] = value

    def multi_get(self, keys):
        others = (json.dumps(self.heartbeat(int(key.removeprefix("rank")), self.clock[0])) for key in keys)
        return [self.values.get(key, other).encode() for key, other in zip(keys, others, strict=True)]


@pytest.fixture
def run_watchdog(monkeypatch, capfd):
    """Return run_watchdog(heartbeat), which returns the seconds until rank 0's watchdog ended the run (None: not within
    an hour), and what it printed."""

    def run(heartbeat, phase="rollout", entered=3):
        clock, timer = [1000.0], StepTimer()
        timer.current_phase = phase
        timer.phase_count = entered
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(ProcessEnded(code)))
        rank_0 = Watchdog(DistContext(0, 1, torch.device("cpu")), timer, minutes=1.0)  # one rank: starts no threads
        rank_0.changed_at, rank_0.phase_since, rank_0.heartbeats = [1000.0] * 3, [1000.0] * 3, 3 * rank_0.heartbeats
        rank_0.checked, rank_0.ctx, rank_0.store = (
            rank_0.heartbeats, DistContext(0, 3, torch.device("cpu")), Store(clock, heartbeat)
        )  # fmt: skip
        try:
            while clock[0] < 4600:
                clock[0] += rank_0.period
                rank_0.exchange()
                rank_0.check_ranks()
        except ProcessEnded as end:
            assert end.args == (1,)
            return clock[0] - 1000, capfd.readouterr().err
        return None, capfd.readouterr().err

    return run


def test_a_rank_that_falls_silent_is_named(run_watchdog):
    seconds, text = run_watchdog(lambda rank, now: [min(now, 1100) if rank == 2 else now, 3, "update", f"host{rank}"])
    assert 160 < seconds <= 170  # silent after 100 s, with a limit of 60 s, checked every 5 s
    assert text.startswith("error: rank 2 (host2) has not answered for") and "its last phase: update" in text
    assert "--timeout-minutes 1" in text and "--resume auto" in text


def test_a_rank_that_lags_is_named_with_its_phase(run_watchdog):
    """It still sends heartbeats, because its watchdog has its own threads."""
    phases = {0: (3, "score"), 1: (2, "reward"), 2: (3, "score")}
    seconds, text = run_watchdog(lambda rank, now: [now, *phases[rank], f"host{rank}"])
    assert 60 < seconds <= 70 and text.startswith("error: rank 1 (host1) is still in reward after")


def test_a_phase_that_is_long_on_all_ranks_is_no_fault(run_watchdog):
    assert run_watchdog(lambda rank, now: [now, 3, "rollout", "host"]) == (None, "")


def test_a_rank_that_lags_for_less_than_the_limit_is_no_fault(run_watchdog):
    def always_lags(rank, now):
        return [now, int(now - 1000) // 50 * 2 + rank, "rollout", "host"]

    def lags_once(rank, now):
        return [now, 3 - (rank == 1 and now < 1050), "rollout", "host"]

    assert run_watchdog(always_lags, entered=10**6) == (None, "")
    assert run_watchdog(lags_once) == (None, "")


def test_a_long_phase_counts_from_when_the_others_wait(run_watchdog):
    """All ranks take 100 s for a phase, which is over the limit of 60 s, and rank 0 takes longer than the others."""
    seconds, text = run_watchdog(lambda rank, now: [now, 3 + (now > 1100), "rollout", "host"])
    assert 160 < seconds <= 175 and text.startswith("error: rank 0 (")


def test_a_lost_store_ends_the_run(monkeypatch, capfd):
    """Rank 0 may hold the store. If it is stopped, torch's client waits for an answer forever, whatever its timeout."""
    clock, answer = [0.0], threading.Event()

    def sleep(seconds):
        time.sleep(0.001)
        clock[0] += seconds

    def gone(keys):
        if clock[0] > 30:
            answer.wait()
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(ProcessEnded(code)))
    rank_0 = Watchdog(DistContext(0, 1, torch.device("cpu")), StepTimer(), minutes=1.0)  # one rank: starts no threads
    rank_0.store = SimpleNamespace(set=lambda *_: None, multi_get=gone)
    exchanging = threading.Thread(target=rank_0._repeat, args=[rank_0.exchange], daemon=True)
    exchanging.start()
    with pytest.raises(ProcessEnded):
        rank_0._repeat(rank_0.check_ranks)
    assert exchanging.is_alive() and "error: rank 0 (unknown host) has not answered for" in capfd.readouterr().err
    answer.set()


def test_collectives_time_out_after_the_watchdog(monkeypatch):
    """Otherwise they would end the run first, with a network error that names no rank."""
    timeouts = []

    def stand_in(minutes, tp):
        timeouts.append(minutes)
        raise ProcessEnded

    monkeypatch.setattr(watchdog, "setup_distributed", stand_in)
    with pytest.raises(ProcessEnded):
        train.main(train.parse_args("--model m --data d --out o --steps 1 --timeout-minutes 4".split()))
    assert timeouts[0] > 4 + 2 * 5 / 60


# --- signals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def left(monkeypatch):
    """Record each end of the process instead of ending it, and restore the signal handlers afterwards."""
    before, exits = {number: signal.getsignal(number) for number in SIGNALS}, []
    record_exit = lambda self, number, text="": exits.append((number, text or self.last_message))  # noqa: E731
    monkeypatch.setattr(SignalHandler, "_exit", record_exit)
    yield exits
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number, until):
    """Send a signal to this process, and wait until `until()` is true."""
    os.kill(os.getpid(), number)
    end = time.monotonic() + 60
    while not until():
        assert time.monotonic() < end
        time.sleep(0.01)


def send_and_handle(number, interrupt):
    """Send a signal to this process, and wait until the thread of `interrupt` has handled it."""
    handle, handled = interrupt.handle, []
    interrupt.handle = lambda number: handled.append((number, handle(number)))
    send(number, lambda: handled == [(number, None)])
    interrupt.handle = handle


def test_the_grace_period_runs_while_the_main_thread_waits_for_another_rank(tmp_path):
    """The main thread is in a C call, as in a collective, so no Python handler can run."""
    code = """
import ctypes
from parallel.watchdog import SignalHandler
interrupt = SignalHandler(0.3)
interrupt.enable_saving(lambda: 'saved')
print('ready', flush=True)
libc, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.sem_init(semaphore, 0, 0)
while True:
    libc.sem_wait(semaphore)
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert "not saved within --grace-seconds 0.3" in process.stderr.read()


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_remembered_until_all_ranks_check(number, left, ctx, capfd):
    interrupt = SignalHandler(grace=60)
    interrupt.enable_saving(lambda: "saved in x; --resume auto continues")
    interrupt.check()  # nothing yet
    assert not interrupt.requested() and interrupt.reduce_signal() == 0
    send_and_handle(number, interrupt)
    assert interrupt.requested() and interrupt.reduce_signal() == number and not left
    assert f"{number.name}: saving after the current phase" in capfd.readouterr().err
    with pytest.raises(Interrupted, match=f"{number.name}: saved in x; --resume auto continues") as stop:
        interrupt.check()
    assert stop.value.signal_number == number


def test_a_signal_during_the_set_up_ends_at_once(left):
    SignalHandler(grace=60)
    send(signal.SIGTERM, lambda: left)
    assert left[0][0] == signal.SIGTERM and "nothing was trained yet" in left[0][1]


def test_the_grace_period_ends_a_phase_that_does_not_end(left):
    interrupt = SignalHandler(grace=0.05)
    interrupt.enable_saving(lambda: "saved")
    send(signal.SIGTERM, lambda: left)
    message = "SIGTERM: not saved within --grace-seconds 0.05; continue from the newest checkpoint with --resume auto"
    assert left == [(signal.SIGTERM, message)]


def test_ctrl_c_twice_ends_at_once_but_one_key_press_is_one(left, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep))
    interrupt = SignalHandler(grace=60)
    interrupt.enable_saving(lambda: "saved")
    for _ in range(2):
        send_and_handle(signal.SIGINT, interrupt)
        clock[0] += 0.9
    assert not left
    clock[0] += 1
    send_and_handle(signal.SIGTERM, interrupt)  # torchrun forwards its signals: this is no second Ctrl-C
    assert not left
    send_and_handle(signal.SIGINT, interrupt)
    assert left[0][0] == signal.SIGINT and "again: not saved" in left[0][1]


# --- the run's folder -----------------------------------------------------------------------------------------------


def test_a_second_run_in_a_folder_names_the_first(tmp_path):
    lock = lock_folder(tmp_path / "run")
    message = rf"another run writes there \(process {os.getpid()} on .*choose another folder"
    with pytest.raises(UserError, match=message):
        lock_folder(tmp_path / "run", patience=0)
    lock.close()
    lock_folder(tmp_path / "run", patience=0).close()


def test_a_killed_run_does_not_lock_its_folder(tmp_path):
    hold = f"import fcntl, time; f = open({str(tmp_path / '.lock')!r}, 'w'); fcntl.flock(f, 2)"
    hold += "; print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="another run"):
        lock_folder(tmp_path, patience=0)
    holder.kill()
    lock_folder(tmp_path, patience=60).close()  # torchrun, too, restarts at once after a kill
    holder.wait()


def test_metrics_that_are_not_finite_are_null():
    row = {"step": 3, "a": math.nan, "b": -math.inf, "c": 0.5}
    again = json.loads(json_line(row))
    assert again == row | {"a": None, "b": None} and json.loads(json_line(again)) == again  # as a resumed run writes it


def test_a_folder_contains_a_run_if_it_has_a_step_or_a_checkpoint(tmp_path):
    assert not contains_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n{"step": 1, "lo')
    assert not contains_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert contains_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "checkpoints" / "step_000007").mkdir(parents=True)
    assert not contains_run(tmp_path)  # this checkpoint was never completed
    (tmp_path / "checkpoints" / "step_000007" / "trainer.json").write_text("{}")
    assert contains_run(tmp_path)


# --- skipped updates ------------------------------------------------------------------------------------------------


@pytest.fixture
def skipped(tmp_path):
    """Return the SkippedUpdates of rank 0. Tests set what the other ranks report for the same updates in `others`."""

    class Ranks(DistContext):
        others = ()

        def gather_to_main(self, items):
            return [*items, *self.others]

    return SkippedUpdates(tmp_path, Ranks(0, 1, torch.device("cpu")))


def test_a_skipped_update_is_reported_once_with_the_uids_of_all_ranks(skipped, tmp_path, capfd):
    meter = Meter()
    skipped.after_update(math.inf, False, math.nan, ["a", "b"], meter)
    skipped.after_update(math.nan, False, 1.5, ["a"], meter)
    other = [{"loss": 2.0, "norm": math.inf, "uids": ["c"]}, {"loss": 1.0, "norm": math.nan, "uids": ["d"]}]
    type(skipped.ctx).others = (other,)
    skipped.report(7, pytest.fail)
    report = json.loads((tmp_path / "skipped" / "step_000007.json").read_text())
    updates = [{"loss": "nan", "grad_norm": "inf", "uids": ["a", "b", "c"]},
               {"loss": "2.5", "grad_norm": "nan", "uids": ["a", "d"]}]
    assert report == {"step": 7, "in_a_row": 2, "updates": updates} and meter.values["update/skipped"] == 2
    text = "".join(capfd.readouterr())
    assert text.count("warning: step 7 skipped 2 of its updates, 2 in a row") == 1 and "the run ends at 10" in text
    skipped.report(8, pytest.fail)  # no updates since
    assert not (tmp_path / "skipped" / "step_000008.json").exists()


def test_a_tensor_parallel_group_reports_its_batch_once(tmp_path, monkeypatch):
    """Four ranks form two tensor-parallel groups."""
    gathered = [None] * 4

    def gather(items, everyone):
        gathered[rank] = items
        if everyone:
            everyone[:] = gathered

    monkeypatch.setattr(torch.distributed, "gather_object", gather)
    for rank in (3, 2, 1, 0):  # rank 0 gathers, so it comes last
        skipped = SkippedUpdates(tmp_path, DistContext(rank, 4, torch.device("cpu"), tp=2))
        skipped.after_update(math.inf, False, 1.0 + rank, ["abcd"[rank]], Meter())
        skipped.report(1, pytest.fail)
    update = json.loads((tmp_path / "skipped" / "step_000001.json").read_text())["updates"][0]
    assert update["loss"] == "4.0" and update["uids"] == ["a", "c"]


def test_only_an_optimizer_step_ends_a_series_of_skipped_updates(skipped):
    meter = Meter()
    skipped.after_update(math.nan, False, 0.0, ["a"], meter)
    skipped.after_update(0.0, False, 0.0, [], meter)  # an update without any gradient
    skipped.after_update(math.nan, False, 0.0, ["a"], meter)
    assert skipped.in_a_row == 2 and meter.values == {"update/skipped": 2, "update/empty": 1, "update/steps": 0}
    skipped.after_update(1.0, True, 0.0, ["a"], meter)
    assert skipped.in_a_row == 0 and meter.values["update/steps"] == 1


def test_a_run_that_skips_every_update_ends_with_a_checkpoint(skipped):
    for _ in range(10):
        skipped.after_update(math.nan, False, 0.0, ["a"], Meter())
    with pytest.raises(UserError, match="10 updates in a row had a non-finite .* checkpoint is there; lower --lr"):
        skipped.report(3, lambda: "there")


def test_steps_without_a_learning_signal_are_counted():
    def flat(adv, constant, steps):
        warnings = RunWarnings(Path("o"), grpo.ADVANTAGES[adv].grouped)
        warnings.update({"reward/zero_std_frac": constant, "update/steps": steps})
        return warnings.flat_steps == 1

    assert flat("grpo", 1.0, 0) and flat("gae", 1.0, 0)
    assert flat("grpo", 1.0, 1)  # updated by the KL or entropy term only
    assert not flat("grpo", 0.9, 0) and not flat("gae", 0.9, 1)
    assert not flat("gae", 1.0, 1)  # prompts may differ even if the samples of each are equal


# --- whole runs, in process -----------------------------------------------------------------------------------------


@pytest.fixture
def start(toys, tmp_path, left):
    """Return start(body, *flags), which runs train.main in tmp_path/out; `body` ends the reward function."""
    data = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(list(shapes_rows(12, "train", 0))), data)

    def run_training(body, *extra):
        code = f"calls = []\n\n\ndef score(response, example):\n    calls.append(1)\n    {body}\n"
        (tmp_path / "reward.py").write_text(code)
        flags = ["--model", toys["qwen2_5_vl"], "--data", data, "--out", tmp_path / "out", "--prompts-per-step", 2,
                 "--reward", f"{tmp_path}/reward.py:score", "--group-size", 2, "--max-new-tokens", 3, "--no-self-test",
                 "--reward-workers", 0, "--reward-errors", "stop", *extra]
        try:
            train.main(train.parse_args(list(map(str, flags))))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    return run_training


def test_equal_rewards_give_a_warning_and_fewer_steps_than_the_checkpoint_has_are_an_error(start, tmp_path, capfd):
    start("return 0.25", "--steps", 7)
    text = "".join(capfd.readouterr())
    assert text.count("warning: in the last 5 steps all samples of a prompt got the same reward (mean 0.25)") == 1
    start("return 0.25", "--steps", 7, "--resume", "auto")
    text = "".join(capfd.readouterr())
    assert "nothing to do: " in text and "step_000007 is from step 7 and --steps is 7" in text and "done:" not in text
    with pytest.raises(UserError, match="--steps 3: .*step_000007 has already done 7"):
        start("return 0.25", "--steps", 3, "--resume", "auto")
    assert "loading" not in "".join(capfd.readouterr())
    assert list_checkpoints(tmp_path / "out")[-1].name == "step_000007"


def test_the_adaptive_kl_coefficient_is_constant_if_nothing_is_trained(start, tmp_path):
    """Rewards are equal and the policy equals its reference, so there is no gradient, and the KL of 0 would lower the
    coefficient."""
    args = ("--algo-args", "kl_in=reward", "kl_target=0.01")
    start("return 1.0", "--algo", "rloo", "--kl-coef", 0.1, *args, "--steps", 3)
    logged = rows(tmp_path / "out")
    assert [row["kl/coef"] for row in logged] == [0.1] * 3 and {row["update/steps"] for row in logged} == {0}


@complete
@pytest.mark.slow
def test_an_interrupted_evaluation_is_repeated_on_resume(toys, tmp_path):
    """After SIGTERM during the last evaluation's grading, the resumed run has the rows of an uninterrupted run."""
    train_data = write_parquet(tmp_path / "train.parquet", shapes_rows(8, "train", 0))
    test_data = write_parquet(tmp_path / "test.parquet", shapes_rows(6, "test", 0))
    (tmp_path / "reward.py").write_text("""
import os, signal
calls = 0
def score(response, example):
    global calls
    calls += 1
    if str(calls) == os.environ.get('SIGNAL_AT'):
        os.kill(os.getpid(), signal.SIGTERM)
    return len(response) % 3
""")

    def start(out, **env):
        flags = ["--model", toys["qwen2_5_vl"], "--data", train_data, "--eval-data", test_data, "--out", tmp_path / out,
                 "--steps", 2, "--reward", f"{tmp_path}/reward.py:score", "--prompts-per-step", 4, "--group-size", 3,
                 "--max-new-tokens", 5, "--lr", 1e-3, "--resume", "auto", "--no-self-test", "--reward-workers", 0]
        return run([sys.executable, "train.py", *flags], check=False, env=os.environ | env)

    whole = start("whole")
    assert whole.returncode == 0, whole.stderr
    trial, evaluation, step = 8, 6, 12
    interrupted = start("cut", SIGNAL_AT=str(trial + evaluation + 2 * step + 2))
    assert interrupted.returncode == 143 and "stopped after step 2 of 2, saved in" in interrupted.stderr, (
        interrupted.stderr
    )
    assert "eval/reward" not in rows(tmp_path / "cut")[-1] and (tmp_path / "cut" / "report.html").exists()
    assert start("cut").returncode == 0
    assert without_time(tmp_path / "cut") == without_time(tmp_path / "whole")
    assert "eval/reward" in rows(tmp_path / "cut")[-1]


def test_a_run_that_ended_before_its_first_step_does_not_block_its_folder(start, tmp_path):
    with pytest.raises(ZeroDivisionError):
        start("return 1 / (9 - len(calls))", "--steps", 1)  # passes the trial, on eight responses
    assert (tmp_path / "out" / "run.json").is_file()
    start("return len(response)", "--steps", 1)
    with pytest.raises(UserError, match="already holds a run"):
        start("return len(response)", "--steps", 1)


# --- output ---------------------------------------------------------------------------------------------------------

SCRIPT = r"""
import os, sys
sys.path[0] = {root!r}
import utils

def main(cfg):
    for i in range(3000):
        print("line", i, "of a run: 5\u00b0 \ud800")
        print("warning", i, file=sys.stderr)
    with open("done", "w") as file:
        file.write("5\u00b0")
    {end}

utils.run_script(main, lambda: None)
"""


def write_script(folder, end="pass"):
    (folder / "script.py").write_text(SCRIPT.format(root=str(ROOT), end=end))
    return f"{sys.executable} script.py"


@pytest.mark.parametrize("redirect", ["| head -n 1", "2>&1 | head -n 1", "> /dev/full", "> /dev/full 2>&1"])
def test_output_that_cannot_be_written_does_not_end_the_run(redirect, tmp_path):
    """The locale has neither the characters that are printed nor those that are written to a file."""
    env = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = f"set -o pipefail; {write_script(tmp_path)} {redirect}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "done").read_bytes() == "5\u00b0".encode()
    assert done.stdout == ("line 0 of a run: 5\u00b0 \\ud800\n" if "head" in redirect else "")
    assert "Error" not in done.stderr and done.stderr.count("warning") == (0 if "2>&1" in redirect else 3000)


def test_a_signal_message_to_a_closed_pipe_is_no_error(monkeypatch):
    def closed(number, data):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(os, "write", closed)
    watchdog.print_stderr0("SIGTERM: saving")


# --- torchrun -------------------------------------------------------------------------------------------------------


def test_torchrun_ends_with_a_users_error_printed_once(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    end = "raise utils.UserError(f'--data nowhere\\x1b[2J: there is no such file')"
    write_script(tmp_path, end)
    done = subprocess.run([*torchrun, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    message = "error: --data nowhere\\x1b[2J: there is no such file\n"
    assert done.returncode == 1 and done.stderr.count(f"\n{message}") == 1
    assert done.stderr.rstrip(" =\n").endswith(f"traceback : {message.rstrip()}")


def test_different_errors_are_all_printed(tmp_path, monkeypatch, capfd):
    for rank, (text, new) in enumerate([("error: a", 1), ("error: b", 1), ("error: a", 0)]):
        file = tmp_path / str(rank) / "error.json"
        file.parent.mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        assert utils.print_error_once(text) == new and ProcessFailure(rank, 1, 1, str(file)).message["message"] == text
    assert capfd.readouterr().err == "error: a\nerror: b\n"


def test_a_killed_torchrun_ends_its_processes(tmp_path):
    """They receive SIGTERM, so that a run saves and ends."""
    code = "import time; from parallel.watchdog import SignalHandler; SignalHandler(5.0); print('ready', flush=True); "
    code += "time.sleep(60)"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    env = os.environ | {"TORCHELASTIC_RUN_ID": "one", "PYTHONPATH": str(ROOT)}
    with open(tmp_path / "log", "w") as log:
        parent = subprocess.Popen([sys.executable, "-c", starts], env=env, stdout=subprocess.PIPE, stderr=log)
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()
        assert parent.stdout.read() == b""  # its child has ended, too
    assert "SIGTERM during the set-up" in (tmp_path / "log").read_text()


# --- files ----------------------------------------------------------------------------------------------------------


def test_an_unreadable_metrics_file_is_an_error_that_names_the_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 1}\n'
    for bad, why in {b'{"st\xffep": 2}\n': "UnicodeDecodeError", b'{"stcp": 2}\n': "KeyError", b"5\n": "TypeError",
                     b'{"step": null}\n': "TypeError", b"{\n": "JSONDecodeError"}.items():  # fmt: skip
        path.write_bytes(good + bad + good)
        with pytest.raises(UserError, match=f"metrics.jsonl line 2: damaged .*{why}.*; remove the line"):
            read_rows(path)
    path.write_bytes(good + b'{"step": 2, "a')
    assert read_rows(path) == [{"step": 1}]
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="metrics.jsonl cannot be read; move it away: .*Is a directory"):
        read_rows(path)


def test_paths_that_cannot_be_written_are_an_error(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--out: .* cannot be written"):
        check_writable(Path("/proc/x"), "--out")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match=r"a.json.* cannot be written \(File too large\)"):
            write_text(tmp_path / "a.json", "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    write_text(tmp_path / "a.json", "5\u00b0 \ud800")
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "5\u00b0 \\ud800"
