"""Reward workers: their number does not change results, hung or dead ones are replaced, and none outlives the run."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import complete, wait_until

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from reward import RewardConfig, RewardContext  # noqa: E402
from rewards import pool  # noqa: E402
from rewards.grade import Grader, make_rollout_stub  # noqa: E402

CODE = r'''
import asyncio, ctypes, os, re, signal, sys, time

def plain(response, example):
    return {"length": len(response), "reward": len(response) % 7 + example.extra["worth"]}

def batch(responses, examples, finish_reasons, step, stage):
    return [len(r) + e.extra["worth"] + step + (f == "length") for r, e, f in zip(responses, examples, finish_reasons)]

async def waits(response, example, step):
    await asyncio.sleep(0.01 * (len(response) % 3))
    return {"length": len(response), "reward": step + example.extra["worth"]}

def bad(response, example):
    if "hang" in response: re.match("(a+)+$", "a" * 60 + "b")  # holds the interpreter for years
    if "sleep" in response: time.sleep(60)
    if "exit" in response: os._exit(3)
    if "segfault" in response: ctypes.string_at(0)
    if "killed" in response: os.kill(os.getpid(), signal.SIGKILL)
    if "sys" in response: sys.exit("no")
    if "deep" in response: return bad(response, example)
    return 1.0

def foreign(response, example):
    if "write" in response or "half" in response:
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                try: os.write(int(name), b"\x00\x00\x00\x05abc" + b"de" * ("write" in response))
                except OSError: pass
    if "half" in response: time.sleep(60)
    if "raises" in response: raise ValueError("\x1b[2J" + "\r5")
    return 1.0

async def bad_async(response, example):
    await asyncio.sleep(0.05)
    if "blocks" in response: time.sleep(60)
    if "sleep" in response: await asyncio.sleep(60)
    if "exit" in response: os._exit(3)
    return 1.0

together = most = 0
async def crowd(response, example):
    global together, most
    together += 1
    most = max(most, together)
    while response == "many" and most <= 20: await asyncio.sleep(0.01)
    together -= 1
    return {"most": most, "reward": 0.0}

def about(response, example, finish_reason, step, stage):
    print("said by", response, flush=False)
    heavy = any(name in sys.modules for name in ("torch", "transformers", "train"))
    return {"pid": os.getpid() % 100_000, "heavy": heavy, "reward": 0}

def pause(response, example):
    time.sleep(float(response))
    return os.getpid() % 100_000

def meet(folder, example):
    open(f"{folder}/{os.getpid()}", "w").close()
    while len(os.listdir(folder)) < 2: time.sleep(0.01)
    return os.getpid() % 100_000
'''


def make_row(n: int, source: str = "mine", truth: str = "3") -> SimpleNamespace:
    return SimpleNamespace(data_source=source, ground_truth=truth, extra={"worth": n % 5}, uid=f"row-{n}", images=[])


def make_responses(texts, rows=None, **context):
    rows = rows or [make_row(0)]
    context = RewardContext(**context)
    return [make_rollout_stub(rows[i % len(rows)], text, context=context) for i, text in enumerate(texts)]


@pytest.fixture
def make_grader(tmp_path):
    """Return a function that makes a Grader with functions of CODE, each given as `[TASK=]function`."""
    (tmp_path / "mine.py").write_text(CODE)
    graders = []

    def build(*names, **settings):
        specs = tuple(f"{n.rpartition('=')[0]}{'=' if '=' in n else ''}{tmp_path}/mine.py:{n.rpartition('=')[2]}"
                      for n in names)
        graders.append(Grader(RewardConfig(reward=specs, **settings)))
        return graders[-1]

    yield build
    for grader in graders:
        grader.close()


def failure_kinds(grader):
    return {i: failure.kind for i, failure in grader.failed.items()}


FIRST_FAILS = """
import os, time
try:
    os.close(os.open("{mark}", os.O_CREAT | os.O_EXCL))
except FileExistsError:
    time.sleep(1)
else:
    raise RuntimeError("no memory")
def score(response, example):
    return 1.0
"""


def test_if_a_worker_fails_to_start_calls_wait_for_the_others_to_start(tmp_path):
    (tmp_path / "slow_start.py").write_text(FIRST_FAILS.format(mark=tmp_path / "mark"))
    os.close(os.open(tmp_path / "mark", os.O_CREAT | os.O_EXCL))
    grader = Grader(RewardConfig(reward=(f"{tmp_path}/slow_start.py:score",), reward_workers=3))
    (tmp_path / "mark").unlink()  # this process has loaded the file; the next one to load it fails
    results = grader.collect(make_responses(["x"] * 20, [make_row(0, "any")]))
    grader.close()
    assert [r["reward"] for r in results] == [1.0] * 20 and not grader.failed


def test_consecutive_slow_calls_are_spread_over_the_workers(tmp_path, monkeypatch):
    """After slow calls a message holds few calls. By its share of the 64 waiting calls a worker would get eight."""
    code = "import time\ndef score(response, example):\n    time.sleep(float(response))\n    return 1\n"
    (tmp_path / "slow.py").write_text(code)
    grader = Grader(RewardConfig(reward=(f"{tmp_path}/slow.py:score",), reward_workers=4))
    grader.collect(make_responses(["0.1"] * 16, [make_row(0, "any")]))
    messages, original = [], pool.WorkerProcess.send_calls

    def record(process, jobs, timed_out):
        messages.append([item.response for job in jobs for item in job.call.items])
        original(process, jobs, timed_out)

    monkeypatch.setattr(pool.WorkerProcess, "send_calls", record)
    grader.collect(make_responses(["0.001"] * 16 + ["0.2"] * 16 + ["0.001"] * 32, [make_row(0, "any")]))
    grader.close()
    slow = [message.count("0.2") for message in messages]
    assert sum(slow) == 16 and max(slow) <= 2 and sum(map(len, messages)) == 64


# --- the number of workers does not matter --------------------------------------------------------------------------


@complete
def test_results_do_not_depend_on_the_number_of_workers_or_the_order(make_grader):
    rng = random.Random(0)
    rows = [make_row(n, source, "5\\sqrt{3}") for n, source in enumerate(["mine", "several", "slow", "geo3k"] * 5)]
    texts = ["x" * rng.randrange(40) + rng.choice(["\\boxed{5\\sqrt3}", "\\boxed{8.66}", ""]) for _ in range(120)]
    expected = []
    for i, text in enumerate(texts):
        n, worth = len(text), rows[i % 20].extra["worth"]
        right = float("\\sqrt3" in text)
        graded = {"accuracy": right, "format": 0.0, "reward": 0.9 * right}
        batch, slow = {"reward": n + worth + 4 + (i % 2)}, {"length": n, "reward": 4 + worth}
        expected.append([{"length": n, "reward": n % 7 + worth}, batch, slow, graded][i % 4])
    for count in (0, 1, 3):
        grader = make_grader("mine=plain", "several=batch", "slow=waits", reward_workers=count)
        assert grader.check_examples(rows) == {"mine": 5, "several": 5, "slow": 5, "geo3k": 5}
        grader.dry_run()
        assert not grader.counts
        for how in ("in order", "shuffled", "half", "none"):
            rollouts = make_responses(texts, rows, step=4)
            for i, r in enumerate(rollouts):
                r.finish_reason = "length" if i % 2 else "stop"
            early = rollouts[: {"half": 60, "none": 0}.get(how, 120)]
            rng.shuffle(early) if how == "shuffled" else None
            for r in early:
                grader.submit(r)
            assert grader.collect(rollouts) == expected, (count, how)
        boxes = sum("boxed" in text for text in texts[3::4])
        assert grader.counts == {"graded": 4 * boxes, "no_box": 4 * (30 - boxes)}
        for e, source in enumerate(["mine", "several"]):  # submitted and never collected; then an empty batch
            grader.submit(make_responses(["a"], [make_row(e, source)])[0])
        assert grader.collect([]) == []


@pytest.mark.parametrize("count", [0, 1, 2])
def test_batches_graded_at_the_same_time_do_not_mix(make_grader, count):
    """With --async-steps a batch is collected while other batches, and an evaluation, are being graded."""
    grader = make_grader("mine=plain", "several=batch", "late=waits", reward_workers=count)
    rows = [make_row(e, source) for e in range(5) for source in ("mine", "several", "late")]
    batches = [
        make_responses(["a" * (7 * step + i) for i in range(30)], rows, batch=step, step=step) for step in range(3)
    ]
    for r in chain(*zip(*batches, strict=True)):
        grader.submit(r)
    for step in (1, 0, 2):
        results = grader.collect(batches[step])
        for i, (result, r) in enumerate(zip(results, batches[step], strict=True)):
            n, worth = len(r.text), r.prompt.example.extra["worth"]
            assert result["reward"] == (n % 7 + worth, n + worth + step, step + worth)[i % 3]
        grader.collect(make_responses(["b"], rows, step=9))  # another batch meanwhile
    assert not grader.submitted


@complete
@pytest.mark.parametrize("count", [0, 2])
def test_counts_belong_to_the_batch_that_is_collected(make_grader, count):
    """Responses of another batch or an evaluation that are graded meanwhile count when those are collected."""
    grader = make_grader(reward_workers=count)
    rows = [make_row(0, "geo3k")] * 3
    with_box, without = make_responses(["\\boxed{a}"] * 3, rows, step=1), make_responses(["a"] * 3, rows, step=2)
    for r in without:
        grader.submit(r)
    with grader.preserve_counts():
        grader.collect(with_box)
        time.sleep(0.5 if count else 0)  # by now the other batch is graded
        assert grader.counts["graded"] == 3 and not grader.counts["no_box"]
    assert not grader.counts
    grader.collect(without)
    assert grader.pop_counts() == {"no_box": 3} and not grader.counts


def test_workers_start_with_the_first_call_stay_and_import_little(make_grader, capfd):
    grader = make_grader("about", reward_workers=2)
    grader.check_examples([make_row(0)])
    assert not grader.pools
    pids = set()
    for _ in range(3):
        results = grader.collect(make_responses([str(i) for i in range(40)]))
        assert not any(r["heavy"] for r in results)
        pids |= {r["pid"] for r in results}
    assert 1 <= len(pids) <= 2 and os.getpid() % 100_000 not in pids
    [pool] = grader.pools.values()
    grader.close()
    assert not pool.processes and not pool.threads and capfd.readouterr().out.count("said by") == 120


def test_workers_share_the_calls_and_grade_during_sampling(make_grader, tmp_path):
    """A call of `meet` ends when two workers have begun one."""
    (folder := tmp_path / "met").mkdir()
    grader = make_grader("meet", reward_workers=2)
    rollouts = make_responses([str(folder)] * 60)
    for r in rollouts:
        grader.submit(r)
    wait_until(lambda: len([*folder.iterdir()]) == 2)  # sampling
    assert {r["reward"] for r in grader.collect(rollouts)} == {int(file.name) % 100_000 for file in folder.iterdir()}


class CountedExample(SimpleNamespace):
    sent = 0

    def __reduce__(self):
        CountedExample.sent += 1
        return SimpleNamespace, (), self.__dict__


def test_an_example_is_sent_once_per_batch(make_grader):
    grader = make_grader("plain", reward_workers=1)
    rows = [CountedExample(**vars(make_row(n))) for n in range(3)]
    for batch in (1, 2):
        assert len(grader.collect(make_responses(["a"] * 60, rows))) == 60
        assert CountedExample.sent == 3 * batch


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["hang", "sleep"])
def test_a_call_that_times_out_fails_and_the_others_are_retried(make_grader, how, capfd):
    texts = [how if i in (3, 20, 21) else "fine" for i in range(40)]
    grader = make_grader("bad", reward_workers=2, reward_timeout=2.0)
    results = grader.collect(make_responses(texts, [make_row(n) for n in range(40)], step=7))
    assert failure_kinds(grader) == {3: "timeouts", 20: "timeouts", 21: "timeouts"}
    assert all((r is None) if i in (3, 20, 21) else (r == {"reward": 1.0}) for i, r in enumerate(results))
    assert grader.counts["reward/timeouts"] == 3 and grader.counts["reward/errors"] == 0
    stderr = capfd.readouterr().err
    assert f"row 'row-3': the reward took longer than --reward-timeout 2 s; for the response '{how}'" in stderr
    assert "3 of 40 rewards failed (3 timeout)" in stderr and "mine.py" in stderr  # the location
    assert grader.collect(make_responses(["fine"] * 3)) == [{"reward": 1.0}] * 3


@pytest.mark.parametrize(
    "how, cause",
    [("exit", "with exit code 3"), ("segfault", "by SIGSEGV"), ("killed", "by SIGKILL"), ("sys", "SystemExit: no"),
     ("deep", "RecursionError")],
)
def test_a_call_that_ends_its_worker_fails(make_grader, how, cause, capfd):
    texts = [how if i in (0, 11) else "fine" for i in range(30)]
    grader = make_grader("bad", reward_workers=1, reward_errors="zero")
    results = grader.collect(make_responses(texts))
    assert failure_kinds(grader) == {0: "errors", 11: "errors"} and cause in capfd.readouterr().err
    assert [r["reward"] for r in results] == [0.0 if i in (0, 11) else 1.0 for i in range(30)]


@pytest.mark.parametrize("how", ["write", "half"])
def test_only_the_call_fails_that_writes_to_others_file_descriptors(make_grader, how, monkeypatch, capfd):
    monkeypatch.setattr(pool, "SEND_TIMEOUT_S", 1)
    grader = make_grader("foreign", reward_workers=1, reward_errors="zero", reward_timeout=20.0)
    results = grader.collect(make_responses([how if i == 4 else "fine" for i in range(9)]))
    assert failure_kinds(grader) == {4: "errors"} and [r["reward"] for r in results] == [1.0] * 4 + [0.0] + [1.0] * 4
    assert "row 'row-0': the reward ended its worker process, by breaking its connection" in capfd.readouterr().err


@pytest.mark.parametrize("count", [0, 1])
def test_a_failure_shows_only_the_users_frames_and_no_control_characters(make_grader, count, capfd):
    make_grader("foreign", reward_workers=count).collect(make_responses(["raises", "fine"]))
    stderr = capfd.readouterr().err
    assert stderr.count("  File ") == stderr.count("mine.py") == 1 and "\x1b" not in stderr and "\r" not in stderr
    assert "row 'row-0': the reward raised ValueError: \\x1b[2J\\r5; for the response 'raises'" in stderr
    assert "raised by the reward of row 'row-0'" in stderr


def test_async_calls_run_concurrently(make_grader):
    grader = make_grader("crowd", reward_workers=1)
    grader.collect(make_responses(["a"]))
    results = grader.collect(make_responses(["many"] * 100))  # each waits until 21 have run at a time
    assert 20 < max(r["most"] for r in results) <= 64


@pytest.mark.parametrize("how, kind, limit", [("sleep", "timeouts", 5.0), ("exit", "errors", 20.0),
                                              ("blocks", "timeouts", 3.0)])  # fmt: skip
def test_the_failing_calls_among_many_async_calls_are_found(make_grader, monkeypatch, how, kind, limit):
    monkeypatch.setattr(pool, "ASYNC_GRACE_S", 1.0)
    texts = [how if i in (2, 17) else "fine" for i in range(40)]
    grader = make_grader("bad_async", reward_timeout=limit)
    results = grader.collect(make_responses(texts))
    assert failure_kinds(grader) == {2: kind, 17: kind}
    assert [r for i, r in enumerate(results) if i not in (2, 17)] == [{"reward": 1.0}] * 38


def test_if_no_worker_can_start_the_calls_fail_and_not_the_run(make_grader, tmp_path, capfd):
    grader = make_grader("plain", reward_workers=1)
    (tmp_path / "mine.py").write_text("raise OSError('no memory')")
    assert grader.collect(make_responses(["a"] * 5)) == [None] * 5
    stderr = capfd.readouterr().err
    assert "no reward worker could start" in stderr and "no memory" in stderr and "ALL of them failed" in stderr
    (tmp_path / "mine.py").write_text(CODE)
    assert grader.collect(make_responses(["ab"])) == [{"length": 2.0, "reward": 2.0}]


def test_an_idle_worker_that_is_killed_is_replaced(make_grader):
    grader = make_grader("plain", reward_workers=1)
    assert grader.collect(make_responses(["ab"])) == [{"length": 2.0, "reward": 2.0}]
    [process] = grader.pools[""].processes
    process.popen.kill()  # as the kernel does when memory runs out
    process.popen.wait()
    assert grader.collect(make_responses(["abc"] * 3)) == [{"length": 3.0, "reward": 3.0}] * 3 and not grader.failed


def test_an_internal_error_ends_the_run(make_grader):
    grader = make_grader("plain", reward_workers=1)
    bad = make_row(0)
    bad.extra["worth"] = lambda: None  # cannot be pickled
    with pytest.raises(RuntimeError, match="talks to --reward-workers"):
        grader.collect(make_responses(["a"], [bad]))


# --- math-verify -----------------------------------------------------------------------------------------------------

HANG = "\\log_{2}{9^{9^{9^9}}}"


@complete
def test_math_verify_has_its_own_time_limit_in_a_worker(make_grader):
    """Its time limit is three seconds, not the call's one. A comparison that times out is wrong, not failed."""
    grader = make_grader(reward_workers=1, reward_timeout=1.0)
    texts = [f"\\boxed{{{a}}}" for a in ("\\log_2 8", HANG, "3", "\\log_2 16", HANG)]
    results = grader.collect(make_responses(texts, [make_row(0, "geo3k")]))
    assert [r["accuracy"] for r in results] == [1, 0, 1, 0, 0] and not grader.failed
    assert grader.counts["cas"] == 3 and grader.counts["cas_timeout"] == 1  # the second time, the timeout is remembered
    assert grader.counts["graded"] == 5


# --- the end of a run ------------------------------------------------------------------------------------------------

ENDS = """
import os, signal, sys, threading, time
from types import SimpleNamespace as N
from reward import RewardConfig
from rewards.grade import Grader, make_rollout_stub
row = N(data_source="mine", ground_truth="3", extra={}, uid="a")
grader = Grader(RewardConfig(reward=(sys.argv[1],), reward_workers=2))
[first] = grader.collect([make_rollout_stub(row, "0")])
[pool] = grader.pools.values()
print(*(process.popen.pid for process in pool.processes), flush=True)
"""


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("ending", ["exit", "exit while it hangs", "SIGKILL while it hangs", "os._exit"])
def test_no_worker_outlives_its_trainer(tmp_path, ending):
    (tmp_path / "mine.py").write_text("import re\ndef f(response, example):\n"
                                      "    if response == 'hang': re.match('(a+)+$', 'a' * 60 + 'b')\n    return 1.0\n")
    code = ENDS
    if "hangs" in ending:
        code += "grader.submit(make_rollout_stub(row, 'hang')); time.sleep(0.5)\n"
    code += {"SIGKILL while it hangs": "os.kill(os.getpid(), 9)", "os._exit": "os._exit(0)"}.get(ending, "")
    done = subprocess.run([sys.executable, "-c", code, f"{tmp_path}/mine.py:f"], cwd=ROOT, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == (-signal.SIGKILL if "SIGKILL" in ending else 0), done.stderr
    pids = list(map(int, done.stdout.split()))
    assert pids
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_worker_whose_trainer_died_before_its_start_ends_at_once():
    ours, theirs = socket.socketpair()
    # the last argument is the trainer's process id, which is not 1
    code = "import sys; from rewards.call import reward_worker_main; reward_worker_main(int(sys.argv[1]), 1)"
    command = [sys.executable, "-c", code, str(theirs.fileno())]
    assert subprocess.run(command, cwd=ROOT, pass_fds=[theirs.fileno()], timeout=300).returncode == 0
    ours.close(), theirs.close()


def test_the_other_worker_takes_the_calls_of_one_that_cannot_be_replaced(tmp_path):
    """An edit breaks the user's file, then one worker dies while the other is idle."""
    code = "import os, time\ndef score(response, example):\n    if response == 'die':\n        time.sleep(1)\n"
    file = tmp_path / "edited.py"
    file.write_text(code + "        os._exit(1)\n    time.sleep(0.01)\n    return float(os.getpid())\n")
    grader, workers = Grader(RewardConfig(reward=(f"{file}:score",), reward_workers=2)), set()
    while len(workers) < 2:  # both must have read the file before the edit
        workers |= {result["reward"] for result in grader.collect(make_responses(["x"] * 20, [make_row(0, "any")]))}
    file.write_text("import nothing_here\n")
    results = grader.collect(make_responses(["x", "x", "x", "die", *["x"] * 36], [make_row(0, "any")]))
    grader.close()
    assert sum(result is None for result in results) == 1


def test_workers_ignore_signals_and_end_only_with_the_trainer(make_grader):
    grader = make_grader("pause", reward_workers=1)
    grader.collect(make_responses(["0"]))
    [process] = grader.pools[""].processes
    pid = process.popen.pid
    assert os.getpgid(pid) == pid != os.getpgid(0)
    [slow] = make_responses(["0.5"])
    grader.submit(slow)
    time.sleep(0.1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert grader.collect([slow]) == [{"reward": pid % 100_000}]
