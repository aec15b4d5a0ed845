"""Kills, signals, silent ranks, locks and broken numbers.   pytest tests/test_faults.py

The first part runs scenarios of benchmarks/faults.py in their quick form; the others test the parts in process.
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
    """Rows of the table by name, from one process: its imports are most of the time."""
    file = folder / f"{ranks}.json"
    command = [sys.executable, "benchmarks/faults.py", "--short", "--jobs", 2, "--ranks", ranks]
    command += ["--only", ",".join(names), "--json", file]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert file.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return {row["name"]: row for row in json.loads(file.read_text())["rows"]}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return run_scenarios(tmp_path_factory.mktemp("faults"), 1, QUICK + DISKS)


@pytest.fixture(scope="module")
def slow_ones(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    return {(ranks, name): row for ranks, names in ((1, LONG[:2]), (2, QUICK + LONG[2:]))
            for name, row in run_scenarios(folder, ranks, names).items()}


def held(row):
    assert row["cases"] > 0 and row["held"] == row["cases"], "\n".join(row["failures"])


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK + DISKS)
def test_one_process_survives(name, one_rank):
    row = one_rank[name]
    if row["what"].startswith("not run"):
        pytest.skip(row["what"])
    held(row)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, name", [(1, name) for name in LONG[:2]] + [(2, name) for name in QUICK + LONG[2:]])
def test_two_processes_and_long_cases_survive(ranks, name, slow_ones):
    held(slow_ones[ranks, name])


# --- silent ranks ---------------------------------------------------------------------------------------------------


class Ended(Exception):
    """In place of os._exit."""


class Store:
    """A store whose other ranks say what `word(rank, now)` returns."""

    def __init__(self, clock, word):
        self.clock, self.word, self.mine = clock, word, {}

    def set(self, key, value):
        self.mine[key] = value

    def multi_get(self, keys):
        others = (json.dumps(self.word(int(key.removeprefix("rank")), self.clock[0])) for key in keys)
        return [self.mine.get(key, other).encode() for key, other in zip(keys, others, strict=True)]


@pytest.fixture
def watched(monkeypatch, capfd):
    """watched(word) -> (seconds until rank 0's watch ended the run, or None after an hour; what it said)."""

    def drive(word, stage="rollout", entered=3):
        clock, stages = [1000.0], StepTimer()
        stages.current_phase = stage
        stages.phase_count = entered
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(Ended(code)))
        one = Watchdog(DistContext(0, 1, torch.device("cpu")), stages, minutes=1.0)  # alone, so it does not start
        one.changed_at, one.phase_since, one.heartbeats = [1000.0] * 3, [1000.0] * 3, 3 * one.heartbeats
        one.checked, one.ctx, one.store = one.heartbeats, DistContext(0, 3, torch.device("cpu")), Store(clock, word)
        try:
            while clock[0] < 4600:
                clock[0] += one.period
                one.exchange()
                one.check_ranks()
        except Ended as end:
            assert end.args == (1,)
            return clock[0] - 1000, capfd.readouterr().err
        return None, capfd.readouterr().err

    return drive


def test_a_rank_that_falls_silent_is_named(watched):
    seconds, text = watched(lambda rank, now: [min(now, 1100) if rank == 2 else now, 3, "update", f"host{rank}"])
    assert 160 < seconds <= 170  # silent from 100 on, limit 60, a look every 5
    assert text.startswith("error: rank 2 (host2) has not answered for") and "its last phase: update" in text
    assert "--timeout-minutes 1" in text and "--resume auto" in text


def test_a_rank_that_stays_behind_is_named_with_its_stage(watched):
    """It goes on speaking: its watch is a thread of its own."""
    stages = {0: (3, "score"), 1: (2, "reward"), 2: (3, "score")}
    seconds, text = watched(lambda rank, now: [now, *stages[rank], f"host{rank}"])
    assert 60 < seconds <= 70 and text.startswith("error: rank 1 (host1) is still in reward after")


def test_a_stage_that_takes_all_ranks_long_is_no_fault(watched):
    assert watched(lambda rank, now: [now, 3, "rollout", "host"]) == (None, "")


def test_a_rank_that_is_behind_for_less_than_the_limit_is_no_fault(watched):
    def always_behind(rank, now):
        return [now, int(now - 1000) // 50 * 2 + rank, "rollout", "host"]

    def behind_once(rank, now):
        return [now, 3 - (rank == 1 and now < 1050), "rollout", "host"]

    assert watched(always_behind, entered=10**6) == (None, "")
    assert watched(behind_once) == (None, "")


def test_a_long_stage_counts_from_when_the_others_wait(watched):
    """All take 100 s for a stage, over the limit of 60, and rank 0 a little longer than the others."""
    seconds, text = watched(lambda rank, now: [now, 3 + (now > 1100), "rollout", "host"])
    assert 160 < seconds <= 175 and text.startswith("error: rank 0 (")


def test_a_store_that_is_gone_ends_the_run(monkeypatch, capfd):
    """Rank 0 may hold it: once stopped, it answers no more, and torch's client waits for ever whatever its time-out."""
    clock, answer = [0.0], threading.Event()

    def sleep(seconds):
        time.sleep(0.001)
        clock[0] += seconds

    def gone(keys):
        if clock[0] > 30:
            answer.wait()
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(Ended(code)))
    one = Watchdog(DistContext(0, 1, torch.device("cpu")), StepTimer(), minutes=1.0)  # alone, so it does not start
    one.store = SimpleNamespace(set=lambda *_: None, multi_get=gone)
    exchanging = threading.Thread(target=one._repeat, args=[one.exchange], daemon=True)
    exchanging.start()
    with pytest.raises(Ended):
        one._repeat(one.check_ranks)
    assert exchanging.is_alive() and "error: rank 0 (unknown host) has not answered for" in capfd.readouterr().err
    answer.set()


def test_collectives_wait_longer_than_the_watch(monkeypatch):
    """Else they end first, with an error of the network that names nobody."""
    given = []

    def stand_in(minutes, tp):
        given.append(minutes)
        raise Ended

    monkeypatch.setattr(watchdog, "setup_distributed", stand_in)
    with pytest.raises(Ended):
        train.main(train.parse_args("--model m --data d --out o --steps 1 --timeout-minutes 4".split()))
    assert given[0] > 4 + 2 * 5 / 60


# --- signals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def left(monkeypatch):
    """Signals as they were afterwards; what would have ended the process is noted instead."""
    before, ends = {number: signal.getsignal(number) for number in SIGNALS}, []
    leave = lambda self, number, text="": ends.append((number, text or self.last_message))  # noqa: E731
    monkeypatch.setattr(SignalHandler, "_exit", leave)
    yield ends
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number, until, seconds=5.0):
    """A signal to this process, and some time for the thread that hears it."""
    os.kill(os.getpid(), number)
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        time.sleep(0.01)


def test_the_grace_period_runs_while_the_main_thread_waits_for_another_rank(tmp_path):
    """It is in a C call, as in a collective, and no Python handler can run."""
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
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143 and time.monotonic() - began < 10
    assert "not saved within --grace-seconds 0.3" in process.stderr.read()


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_remembered_until_all_ranks_stand_together(number, left, ctx, capfd):
    interrupt = SignalHandler(grace=60)
    interrupt.enable_saving(lambda: "saved in x; --resume auto continues")
    interrupt.check()  # nothing yet
    assert not interrupt.requested() and interrupt.reduce_signal() == 0
    send(number, interrupt.requested)
    assert interrupt.requested() and interrupt.reduce_signal() == number and not left
    assert f"{number.name}: saving after the current phase" in capfd.readouterr().err
    with pytest.raises(Interrupted, match=f"{number.name}: saved in x; --resume auto continues") as stop:
        interrupt.check()
    assert stop.value.signal_number == number


def test_a_signal_during_the_set_up_ends_at_once(left):
    SignalHandler(grace=60)
    send(signal.SIGTERM, lambda: left)
    assert left[0][0] == signal.SIGTERM and "nothing was trained yet" in left[0][1]


def test_the_grace_period_ends_a_stage_that_does_not(left):
    interrupt = SignalHandler(grace=0.05)
    interrupt.enable_saving(lambda: "saved")
    send(signal.SIGTERM, lambda: left)
    told = "SIGTERM: not saved within --grace-seconds 0.05; continue from the newest checkpoint with --resume auto"
    assert left == [(signal.SIGTERM, told)]


def test_ctrl_c_twice_ends_at_once_but_one_key_press_is_one(left):
    interrupt = SignalHandler(grace=60)
    interrupt.enable_saving(lambda: "saved")
    for _ in range(2):
        send(signal.SIGINT, lambda: False, 0.3)
    assert not left
    interrupt.since -= 2
    send(signal.SIGTERM, lambda: False, 0.2)  # torchrun passes on what it gets: no second Ctrl-C
    assert not left
    send(signal.SIGINT, lambda: left)
    assert left[0][0] == signal.SIGINT and "again: not saved" in left[0][1]


# --- the run's folder -----------------------------------------------------------------------------------------------


def test_a_second_run_in_a_folder_names_the_first(tmp_path):
    lock = lock_folder(tmp_path / "run")
    told = rf"another run writes there \(process {os.getpid()} on .*choose another folder"
    with pytest.raises(UserError, match=told):
        lock_folder(tmp_path / "run", patience=0)
    lock.close()
    lock_folder(tmp_path / "run", patience=0).close()


def test_a_killed_run_holds_no_folder(tmp_path):
    hold = f"import fcntl, time; f = open({str(tmp_path / '.lock')!r}, 'w'); fcntl.flock(f, 2)"
    hold += "; print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="another run"):
        lock_folder(tmp_path, patience=0)
    holder.kill()
    lock_folder(tmp_path, patience=5).close()  # as torchrun does: kill and start again at once
    holder.wait()


def test_metrics_without_a_number_are_null():
    row = {"step": 3, "a": math.nan, "b": -math.inf, "c": 0.5}
    again = json.loads(json_line(row))
    assert again == row | {"a": None, "b": None} and json.loads(json_line(again)) == again  # as a resumed run writes it


def test_a_run_is_what_has_a_step_or_a_checkpoint(tmp_path):
    assert not contains_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n{"step": 1, "lo')
    assert not contains_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert contains_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "checkpoints" / "step_000007").mkdir(parents=True)
    assert not contains_run(tmp_path)  # never completed
    (tmp_path / "checkpoints" / "step_000007" / "trainer.json").write_text("{}")
    assert contains_run(tmp_path)


# --- updates that are left out --------------------------------------------------------------------------------------


@pytest.fixture
def skipped(tmp_path):
    """Of the first of some ranks, of which each other one has met the same updates."""

    class Ranks(DistContext):
        others = ()

        def gather_to_main(self, items):
            return [*items, *self.others]

    return SkippedUpdates(tmp_path, Ranks(0, 1, torch.device("cpu")))


def test_a_skipped_update_is_told_once_with_the_uids_of_all_ranks(skipped, tmp_path, capfd):
    meter = Meter()
    skipped.after_update(math.inf, False, math.nan, ["a", "b"], meter)
    skipped.after_update(math.nan, False, 1.5, ["a"], meter)
    other = [{"loss": 2.0, "norm": math.inf, "uids": ["c"]}, {"loss": 1.0, "norm": math.nan, "uids": ["d"]}]
    type(skipped.ctx).others = (other,)
    skipped.report(7, pytest.fail)
    told = json.loads((tmp_path / "skipped" / "step_000007.json").read_text())
    updates = [{"loss": "nan", "grad_norm": "inf", "uids": ["a", "b", "c"]},
               {"loss": "2.5", "grad_norm": "nan", "uids": ["a", "d"]}]
    assert told == {"step": 7, "in_a_row": 2, "updates": updates} and meter.values["update/skipped"] == 2
    text = "".join(capfd.readouterr())
    assert text.count("warning: step 7 skipped 2 update(s), 2 in a row") == 1 and "the run ends at 10" in text
    skipped.report(8, pytest.fail)  # nothing since
    assert not (tmp_path / "skipped" / "step_000008.json").exists()


def test_processes_that_divide_a_model_tell_their_batch_once(tmp_path, monkeypatch):
    """Of four processes, two and two of which divide a model."""
    gathered = [None] * 4

    def gather(items, everyone):
        gathered[rank] = items
        if everyone:
            everyone[:] = gathered

    monkeypatch.setattr(torch.distributed, "gather_object", gather)
    for rank in (3, 2, 1, 0):  # the first comes when all others have told
        skipped = SkippedUpdates(tmp_path, DistContext(rank, 4, torch.device("cpu"), tp=2))
        skipped.after_update(math.inf, False, 1.0 + rank, ["abcd"[rank]], Meter())
        skipped.report(1, pytest.fail)
    update = json.loads((tmp_path / "skipped" / "step_000001.json").read_text())["updates"][0]
    assert update["loss"] == "4.0" and update["uids"] == ["a", "c"]


def test_only_a_step_of_the_optimizer_ends_a_row_of_skipped_updates(skipped):
    meter = Meter()
    skipped.after_update(math.nan, False, 0.0, ["a"], meter)
    skipped.after_update(0.0, False, 0.0, [], meter)  # an update without any gradient
    skipped.after_update(math.nan, False, 0.0, ["a"], meter)
    assert skipped.in_a_row == 2 and meter.values == {"update/skipped": 2, "update/empty": 1, "update/steps": 0}
    skipped.after_update(1.0, True, 0.0, ["a"], meter)
    assert skipped.in_a_row == 0 and meter.values["update/steps"] == 1


def test_a_run_that_only_skips_ends_with_a_checkpoint(skipped):
    for _ in range(10):
        skipped.after_update(math.nan, False, 0.0, ["a"], Meter())
    with pytest.raises(UserError, match="10 updates in a row had a non-finite .* checkpoint is there; lower --lr"):
        skipped.report(3, lambda: "there")


def test_a_step_without_a_signal_is_known():
    def flat(adv, constant, steps):
        warnings = RunWarnings(Path("o"), grpo.ADVANTAGES[adv].grouped)
        warnings.update({"reward/zero_std_frac": constant, "update/steps": steps})
        return warnings.flat_steps == 1

    assert flat("grpo", 1.0, 0) and flat("gae", 1.0, 0)
    assert flat("grpo", 1.0, 1)  # by the KL or the entropy alone
    assert not flat("grpo", 0.9, 0) and not flat("gae", 0.9, 1)
    assert not flat("gae", 1.0, 1)  # prompts may differ where samples of one do not


# --- whole runs, in process -----------------------------------------------------------------------------------------


@pytest.fixture
def start(toys, tmp_path, left):
    """start(reward's code, flags) runs train.main in tmp_path/out."""
    data = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(list(shapes_rows(12, "train", 0))), data)

    def go(body, *more):
        code = f"calls = []\n\n\ndef score(response, example):\n    calls.append(1)\n    {body}\n"
        (tmp_path / "reward.py").write_text(code)
        flags = ["--model", toys["qwen2_5_vl"], "--data", data, "--out", tmp_path / "out", "--prompts-per-step", 2,
                 "--reward", f"{tmp_path}/reward.py:score", "--group-size", 2, "--max-new-tokens", 3, "--no-self-test",
                 "--reward-workers", 0, "--reward-errors", "stop", *more]
        try:
            train.main(train.parse_args(list(map(str, flags))))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    return go


def test_equal_rewards_are_warned_of_and_steps_behind_the_checkpoint_are_nothing_to_do(start, tmp_path, capfd):
    start("return 0.25", "--steps", 7)
    text = "".join(capfd.readouterr())
    assert text.count("warning: in the last 5 steps all samples of a prompt got the same reward (mean 0.25)") == 1
    start("return 0.25", "--steps", 3, "--resume", "auto")
    text = "".join(capfd.readouterr())
    assert "nothing to do: " in text and "step_000007 is from step 7 and --steps is 3" in text and "done:" not in text
    assert list_checkpoints(tmp_path / "out")[-1].name == "step_000007"


def test_the_adaptive_kl_coefficient_stays_where_nothing_was_trained(start, tmp_path):
    """Equal rewards, and a policy that is still its reference: no gradient, and a KL of 0 that would lower the
    coefficient."""
    args = ("--algo-args", "kl_in=reward", "kl_target=0.01")
    start("return 1.0", "--algo", "rloo", "--kl-coef", 0.1, *args, "--steps", 3)
    logged = rows(tmp_path / "out")
    assert [row["kl/coef"] for row in logged] == [0.1] * 3 and {row["update/steps"] for row in logged} == {0}


@complete
@pytest.mark.slow
def test_an_evaluation_that_a_signal_cut_is_made_up_for(toys, tmp_path):
    """SIGTERM while the last step's evaluation is graded: the resumed run has all rows of one that nobody stopped."""
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
    trial, evaluation, step = 1, 6, 12
    cut = start("cut", SIGNAL_AT=str(trial + evaluation + 2 * step + 3))
    assert cut.returncode == 143 and "stopped after step 2 of 2, saved in" in cut.stderr, cut.stderr
    assert "eval/reward" not in rows(tmp_path / "cut")[-1] and (tmp_path / "cut" / "report.html").exists()
    assert start("cut").returncode == 0
    assert without_time(tmp_path / "cut") == without_time(tmp_path / "whole")
    assert "eval/reward" in rows(tmp_path / "cut")[-1]


def test_a_run_that_ended_before_its_first_step_does_not_block_its_folder(start, tmp_path):
    with pytest.raises(ZeroDivisionError):
        start("return 1 / (3 - len(calls))", "--steps", 1)  # good when it is tried, on two responses
    assert (tmp_path / "out" / "run.json").is_file()
    start("return len(response)", "--steps", 1)
    with pytest.raises(UserError, match="already holds a run"):
        start("return len(response)", "--steps", 1)


# --- what is printed ------------------------------------------------------------------------------------------------

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


def script(folder, end="pass"):
    (folder / "script.py").write_text(SCRIPT.format(root=str(ROOT), end=end))
    return f"{sys.executable} script.py"


@pytest.mark.parametrize("more", ["| head -n 1", "2>&1 | head -n 1", "> /dev/full", "> /dev/full 2>&1"])
def test_output_that_cannot_be_written_ends_nothing(more, tmp_path):
    """In a locale that has neither the characters that are printed nor those that are written to a file."""
    env = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = f"set -o pipefail; {script(tmp_path)} {more}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "done").read_bytes() == "5\u00b0".encode()
    assert done.stdout == ("line 0 of a run: 5\u00b0 \\ud800\n" if "head" in more else "")
    assert "Error" not in done.stderr and done.stderr.count("warning") == (0 if "2>&1" in more else 3000)


def test_what_is_said_of_a_signal_may_reach_nobody(monkeypatch):
    def closed(number, data):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(os, "write", closed)
    watchdog.print_stderr0("SIGTERM: saving")


# --- torchrun -------------------------------------------------------------------------------------------------------


def test_torchrun_ends_with_a_users_error_told_once(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    end = "raise utils.UserError(f'--data nowhere\\x1b[2J: there is no such file')"
    script(tmp_path, end)
    done = subprocess.run([*torchrun, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    told = "error: --data nowhere\\x1b[2J: there is no such file\n"
    assert done.returncode == 1 and done.stderr.count(f"\n{told}") == 1
    assert done.stderr.rstrip(" =\n").endswith(f"traceback : {told.rstrip()}")


def test_errors_that_differ_are_all_heard(tmp_path, monkeypatch, capfd):
    for rank, (text, told) in enumerate([("error: a", 1), ("error: b", 1), ("error: a", 0)]):
        file = tmp_path / str(rank) / "error.json"
        file.parent.mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        assert utils.print_error_once(text) == told and ProcessFailure(rank, 1, 1, str(file)).message["message"] == text
    assert capfd.readouterr().err == "error: a\nerror: b\n"


def test_a_killed_torchrun_takes_its_processes_along(tmp_path):
    """What it starts is sent SIGTERM, as a run is that has to save and end."""
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


def test_a_metrics_file_that_cannot_be_read_is_one_line(tmp_path):
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


def test_places_that_take_no_files_are_one_line(tmp_path, monkeypatch):
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
