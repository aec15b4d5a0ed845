"""Several torchrun agents on this machine, in network namespaces where it allows them: the same training as one's; what
a failure on one node does to the others; runs/multinode.sh.   pytest tests/test_multinode.py"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_train import flags, rows, run, shapes, without_time  # noqa: F401

import engines.serve
import train
from errors import Interrupted, UserError
from parallel import node_checks, watchdog
from parallel.checkpoint import list_checkpoints
from utils import DistContext, StepTimer

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "runs" / "multinode.sh"
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


# --- nodes ------------------------------------------------------------------------------------------------------------


class Network:
    """Two namespaces with a cable between them: as two machines, whose loopback is their own."""

    def __init__(self):
        self.names = [f"node{os.getpid()}{letter}" for letter in "ab"]
        self.devices = [f"nd{os.getpid() % 10**8}{letter}" for letter in "ab"]
        self.hosts = ["10.83.0.1", "10.83.0.2"]
        for name in self.names:
            self.ip("netns", "add", name)
        one, two = self.names
        pair = "type veth peer name"
        self.ip("link", "add", self.devices[0], "netns", one, *pair.split(), self.devices[1], "netns", two)
        for name, device, host in zip(self.names, self.devices, self.hosts, strict=True):
            self.ip("-n", name, "addr", "add", f"{host}/24", "dev", device)
            self.ip("-n", name, "link", "set", device, "up")
            self.ip("-n", name, "link", "set", "lo", "up")

    def ip(self, *words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def cut(self):
        self.ip("-n", self.names[0], "link", "set", self.devices[0], "down")

    def close(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def network():
    made = Network.__new__(Network)
    made.names = []
    try:
        made.__init__()
    except (OSError, subprocess.CalledProcessError) as error:
        made.close()
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.close()


class Nodes:
    """A torchrun on each of two nodes, which train the same run."""

    def __init__(self, folder, command, network=None, restarts=0, share=False):
        self.logs, self.agents = [folder / f"node{i}.log" for i in (0, 1)], []
        hosts, port = network.hosts if network else ["127.0.0.1", "127.0.0.2"], free_port()
        for i, log in enumerate(self.logs):
            where = ["ip", "netns", "exec", network.names[i]] if network else []
            words = f"""-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint
                {hosts[0]}:{port} --rdzv-conf is_host={int(i == 0)} --local-addr {hosts[i]} --max-restarts {restarts}
                --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGUSR1 --shutdown-timeout 30 train.py""".split()
            env = os.environ | QUIET | {"GLOO_SOCKET_IFNAME": network.devices[i] if network else "lo"}
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = str(int(not share))
            with open(log, "w") as file:
                given = list(map(str, [*where, sys.executable, *words, *command]))
                options = {"stdout": file, "stderr": file, "stdin": subprocess.DEVNULL}
                self.agents.append(subprocess.Popen(given, cwd=ROOT, env=env, **options))

    def text(self, node):
        return self.logs[node].read_text(errors="replace")

    def until(self, text, seconds=120):
        end = time.monotonic() + seconds
        while text not in self.text(0) + self.text(1):
            assert time.monotonic() < end and any(a.poll() is None for a in self.agents), self.text(0)[-3000:]
            time.sleep(0.02)

    def wait(self, seconds=120):
        codes = [agent.wait(seconds) for agent in self.agents]
        return codes

    def workers(self, node):
        """rank -> process."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == self.agents[node].pid:
                    env = (folder / "environ").read_text()
                    found[int(re.search(r"(?:^|\0)RANK=(\d+)", env)[1])] = int(folder.name)
            except (OSError, TypeError):  # it has just ended, or is no worker
                continue
        return found

    def power_off(self, node):
        for pid in (self.agents[node].pid, *self.workers(node).values()):
            os.kill(pid, signal.SIGKILL)

    def close(self):
        for node, agent in enumerate(self.agents):
            if agent.poll() is None:
                self.power_off(node)
                agent.wait()


def free_port():
    """The port behind it is free too."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            if other.connect_ex(("127.0.0.1", port + 1)):
                return port


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(*args, **options):
        started.append(Nodes(tmp_path, *args, **options))
        return started[-1]

    yield begin
    for one in started:
        one.close()


def command(toys, shapes, out, *more):  # noqa: F811
    settings = ("--steps", 4, "--save-every", 2, "--resume", "auto", "--no-self-test", "--timeout-minutes", 1)
    return flags(toys["qwen2_5_vl"], shapes[0], out, *settings, "--reward-workers", 0, *more)


@pytest.fixture(scope="module")
def one_agent(toys, shapes, tmp_path_factory):  # noqa: F811
    """The run of one torchrun with four processes, and of one process alone."""
    folder = tmp_path_factory.mktemp("one_agent")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4, "train.py"]
    run([*torchrun, *command(toys, shapes, folder / "four", "--replicate", 2)])
    run([sys.executable, "train.py", *command(toys, shapes, folder / "one")])
    return folder


def stored_values(folder):
    """The bytes behind the header of each file of the last checkpoint; the header's own order differs."""
    files = sorted(list_checkpoints(folder)[-1].glob("*.safetensors"))
    return {file.name: data[8 + int.from_bytes(data[:8], "little") :] for file in files if (data := file.read_bytes())}


def same_checkpoint(a, b):
    return len(stored_values(a)) == 4 and stored_values(a) == stored_values(b)


@pytest.mark.slow
def test_two_nodes_of_two_train_as_one_of_four_and_one(toys, shapes, one_agent, network, start, tmp_path):  # noqa: F811
    """Replicas across nodes, shards within. With as many processes bit for bit."""
    nodes = start(command(toys, shapes, tmp_path / "run", "--replicate", 2), network)
    assert nodes.wait() == [0, 0], nodes.text(0)[-3000:] + nodes.text(1)[-3000:]
    assert without_time(tmp_path / "run") == without_time(one_agent / "four")
    assert same_checkpoint(tmp_path / "run", one_agent / "four")
    one, four = rows(one_agent / "one"), rows(tmp_path / "run")
    assert len(one) == len(four) == 4
    for a, b in zip(one, four, strict=True):
        for key in a.keys() & b.keys():
            if not key.startswith(("time/", "perf/", "balance/", "memory/")):
                assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), key
    assert one[0]["policy/grad_norm"] > 1e-3


@pytest.mark.slow
def test_a_killed_rank_is_restarted_on_all_nodes(toys, shapes, one_agent, network, start, tmp_path):  # noqa: F811
    nodes = start(command(toys, shapes, tmp_path / "run", "--replicate", 2), network, restarts=2)
    nodes.until("step 3/4")
    os.kill(nodes.workers(1)[3], signal.SIGKILL)
    assert nodes.wait() == [0, 0], nodes.text(0)[-3000:] + nodes.text(1)[-3000:]
    assert "resumed from" in nodes.text(0)
    assert without_time(tmp_path / "run") == without_time(one_agent / "four")
    assert same_checkpoint(tmp_path / "run", one_agent / "four")


@pytest.mark.slow
def test_a_signal_to_one_node_ends_all_also_with_restarts(toys, shapes, one_agent, start, tmp_path):  # noqa: F811
    """Else the node that got none starts again, and waits ten minutes for the other."""
    given = command(toys, shapes, tmp_path / "run", "--replicate", 2)
    nodes = start(given, restarts=2)
    nodes.until("step 2/4")
    nodes.agents[1].send_signal(signal.SIGUSR1)
    codes = nodes.wait(40)
    assert 0 not in codes and "SIGUSR1: stopped after step" in nodes.text(0), nodes.text(0)[-3000:]
    again = start(given)
    assert again.wait() == [0, 0]
    assert without_time(tmp_path / "run") == without_time(one_agent / "four")
    assert same_checkpoint(tmp_path / "run", one_agent / "four")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["powered off", "cut off"])
def test_a_lost_node_is_named_and_the_run_goes_on(how, toys, shapes, one_agent, network, start, tmp_path):  # noqa: F811
    given = command(toys, shapes, tmp_path / "run", "--replicate", 2)
    given[given.index("--timeout-minutes") + 1] = 0.2
    nodes = start(given, network)
    nodes.until("step 3/4")
    if how == "cut off":
        network.cut()
    else:
        nodes.power_off(1)
    assert nodes.agents[0].wait(60) == 1
    named = re.findall(r"^error: rank ([23]) \(\S+ process \d+\) (.*)", nodes.text(0), re.M)
    wanted = "has not answered for" if how == "cut off" else "is gone"
    assert named and named[0][1].startswith(wanted) and "--resume auto" in named[0][1], nodes.text(0)[-3000:]
    nodes.close()
    run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4, "train.py", *given])
    assert without_time(tmp_path / "run") == without_time(one_agent / "four")


def test_who_falls_silent_after_a_lost_connection_is_named(monkeypatch, capfd):
    def told(after, error):
        one = watchdog.Watchdog(
            DistContext(1, 1, torch.device("cpu")), StepTimer(), minutes=1.0
        )  # alone, so it does not start
        one.ctx = DistContext(1, 3, torch.device("cpu"))
        last = [[7, 3, "update", f"host{rank}"] for rank in range(3)]  # which may still be on the way
        one.heartbeats, one.store = [[6, *word[1:]] for word in last], SimpleNamespace(set=lambda *_: None)

        def sleep(seconds):
            one.heartbeats = after(one.heartbeats) if seconds >= 2 * one.period else last

        monkeypatch.setattr(watchdog, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
        one._after_error(type(error), error, None)
        return re.findall("^error: .*", capfd.readouterr().err, re.M)

    lost = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    one_silent = told(lambda words: [*([8, *w[1:]] for w in words[:2]), words[2]], lost)
    assert len(one_silent) == 1 and one_silent[0].startswith("error: rank 2 (host2) is gone; continue from")
    assert told(lambda words: [["left", *words[0][1:]], [8, *words[1][1:]], words[2]], lost) == one_silent
    assert told(lambda words: words, lost)[0].startswith("error: rank 0 (which holds the run's store) is gone")
    assert told(lambda words: words, ValueError("of a user's reward")) == []


@pytest.mark.parametrize("local_rank, parent, told", [("0", 5, [5]), ("1", 5, []), ("0", 1, [])])
def test_torchrun_of_a_node_without_the_signal_is_told(local_rank, parent, told, monkeypatch):
    """By one process of a node; and not whoever adopted them after torchrun's end."""
    killed, before = [], {number: signal.getsignal(number) for number in watchdog.SIGNALS}
    monkeypatch.setattr(os, "getppid", lambda: 5)
    interrupt = watchdog.SignalHandler(60.0)
    for number, handler in before.items():
        signal.signal(number, handler)
    monkeypatch.setattr(os, "getppid", lambda: parent)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    monkeypatch.setattr(interrupt, "reduce_signal", lambda: signal.SIGUSR1)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    interrupt.enable_saving(lambda: "saved")
    with pytest.raises(Interrupted, match="SIGUSR1: saved"):
        interrupt.check()
    assert killed == told
    killed.clear()
    with pytest.raises(Interrupted):  # it has had the signal itself by now
        interrupt.check()
    assert not killed


# --- what nodes may disagree on ---------------------------------------------------------------------------------------


def two(theirs):
    """A context of two ranks; the other says `theirs(what this one says)`."""
    ctx = DistContext(0, 2, torch.device("cpu"))
    object.__setattr__(ctx, "gather", lambda mine: [mine, theirs(mine)])
    return ctx


def test_other_flags_on_another_node_are_refused():
    settings = {"lr": 1e-6, "model": "/a/model"}
    node_checks.check_same_settings(settings, two(lambda mine: ("b", mine[1])))
    with pytest.raises(UserError, match=r"--lr is 1e-06 on rank 0 \(.*\), 0.1 on rank 1 \(b\)"):
        node_checks.check_same_settings(settings, two(lambda mine: ("b", {"--lr": 0.1})))


def test_restarts_that_could_not_work_are_refused(monkeypatch):
    env = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "TORCHELASTIC_MAX_RESTARTS": "3"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(UserError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        node_checks.check_restart_support()
    for name, value in (("TORCHELASTIC_USE_AGENT_STORE", "False"), ("TORCHELASTIC_MAX_RESTARTS", "0")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            node_checks.check_restart_support()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    node_checks.check_restart_support()


def test_a_folder_or_data_that_nodes_do_not_share_is_refused(tmp_path):
    class Rows(list):
        lengths = [5]

    examples = Rows([SimpleNamespace(uid="a", data_source="shapes", messages=[], ground_truth="1")])

    def other(seen=True, data=None):
        def answer(mine):
            if not isinstance(mine, tuple):
                return mine
            return ("b", data or mine[1]) if isinstance(mine[1], dict) else (seen, "b")

        return two(answer)

    data = {"--data": examples}
    node_checks.check_shared_storage(tmp_path, data, other())
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"--out .*: rank 1 \(b\) does not see"):
        node_checks.check_shared_storage(tmp_path, data, other(seen=False))
    with pytest.raises(UserError, match=r"the rows of --data is .* on rank 0 .*, x on rank 1 \(b\); start the"):
        node_checks.check_shared_storage(tmp_path, data, other(data={"SHA-256 of the rows of --data": "x"}))
    before = node_checks.hash_examples(examples)
    examples[0].ground_truth = "2"
    assert node_checks.hash_examples(examples) != before


# --- runs/multinode.sh ------------------------------------------------------------------------------------------------


def multinode(*words, env, check=True):
    others = ("SLURM_", "HF_", "NCCL_", "GLOO_", "OMP_", "VLLM_")  # which it passes on
    given = {k: v for k, v in os.environ.items() if not k.startswith(others)} | {k: str(v) for k, v in env.items()}
    done = subprocess.run(["bash", SCRIPT, *map(str, words)], env=given, capture_output=True, text=True, timeout=120)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


TRAINING = ["--model", "m", "--data", "a b.parquet", "--out", "out", "--steps", "3", "--max-new-tokens", "64"]


@pytest.mark.parametrize("how", ["hand", "ssh", "slurm"])
def test_a_dry_run_prints_every_command(how, tmp_path):
    env = {"NODES": "a b c d", "SERVERS": 2, "TP": 4, "DRY": 1, "PYTHON": "python", "DIR": "/repo", "HF_HOME": "/hf",
           "HF_TOKEN": "secret"}
    if how == "slurm":
        (tmp_path / "scontrol").write_text("[ \"$*\" = 'show hostnames [a-d]' ] && printf '%s\\n' a b c d\n")
        (tmp_path / "scontrol").chmod(0o755)
        del env["NODES"], env["DIR"]
        env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "[a-d]", "SLURM_JOB_ID": "7",
                "SLURM_SUBMIT_DIR": "/repo"}
    text = multinode(how, *TRAINING, env=env).stdout
    assert "secret" not in text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    placed = []
    for line in lines:
        words = shlex.split(line)
        if how == "hand":
            place, line = line.split(": ", 1)
        else:
            place = words[words.index("--nodelist") + 1] if how == "slurm" else words[-2]
            line = words[-1]
        placed.append((place, shlex.split(line.removeprefix("cd /repo && exec env "))))
    serving, training = placed[:4], placed[4:]
    assert [place for place, _ in placed] == ["c", "c", "d", "d", "a", "b"]
    for number, (place, words) in enumerate(serving):
        gpus = ["0,1,2,3", "4,5,6,7"][number % 2]
        assert words[:5] == ["HF_HOME=/hf", f"CUDA_VISIBLE_DEVICES={gpus}", "python", "-m", "engines.serve"], place
        given = dict(zip(words[5::2], words[6::2], strict=True))
        assert given == {"--model": "m", "--max-new-tokens": "64", "--data": "a b.parquet", "--host": "0.0.0.0",
                         "--port": str(8000 + number % 2), "--gpus": "4"}
    urls = [f"http://{host}:{port}" for host in "cd" for port in (8000, 8001)]
    assert [f"# wait until this succeeds: curl -f {url}/health" in text for url in urls] == [True] * 4
    for place, words in training:
        at = words.index("train.py")
        assert words[at + 1 :] == [*TRAINING, "--rollout", "server", "--servers", *urls]
        launcher = dict(zip(words[5:at:2], words[6:at:2], strict=True))
        assert launcher["--nnodes"] == "2" and launcher["--nproc-per-node"] == "8"
        assert launcher["--rdzv-endpoint"] == "a:29500" and launcher["--local-addr"] == place
        assert launcher["--rdzv-conf"] == f"is_host={int(place == 'a')}"
        assert launcher["--rdzv-id"] == ("7" if how == "slurm" else "run")
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in words[:at]


def test_its_mistakes_are_one_line():
    for words, env, told in (
        (["slrum"], {"NODES": "a"}, "error: the first argument is slrum; use slurm, ssh or hand"),
        (["ssh"], {"NODES": "a b", "SERVERS": 2}, "error: SERVERS=2 of 2 nodes leaves none for training; lower it"),
        (["ssh"], {}, "error: NODES is missing; set it to host names separated by spaces"),
        (["ssh", "--vllm", "tensor_parallel_size=2"], {"NODES": "a b", "SERVERS": 1},
         "error: --vllm tensor_parallel_size: set the variable TP of this script instead"),
    ):
        done = multinode(*words, env=env, check=False)
        assert done.returncode == 1 and done.stderr.strip() == told and not done.stdout
    assert "# NODES     host names" in multinode("--help", env={}).stdout


def test_servers_get_what_they_have_to_agree_on():
    more = ["--model=m", "--data", "a.parquet", "--vllm", "max_num_seqs=8", "block_size=16", "--env-settings", "a=1",
            "b=2", "--lr", "1e-6", "--instruction", "Say it. --now"]
    text = multinode("hand", *more, env={"NODES": "a b", "SERVERS": 1, "GPUS": 1}).stdout
    serve, train = (next(line for line in text.splitlines() if what in line) for what in ("engines.serve", "train.py"))
    words = shlex.split(serve.split("engines.serve ", 1)[1])
    assert words[:9] == ["--model", "m", "--data", "a.parquet", "--env-settings", "a=1", "b=2", "--instruction",
                         "Say it. --now"]
    assert words[9:] == ["--host", "0.0.0.0", "--port", "8000", "--gpus", "1", "--vllm", "max_num_seqs=8",
                         "block_size=16"]
    words = shlex.split(train.split("train.py ", 1)[1])
    assert "--vllm" not in words and words[words.index("--env-settings") :][:5] == ["--env-settings", "a=1", "b=2",
                                                                                   "--lr", "1e-6"]
    flags = set(re.findall(r"--[a-z-]+", SCRIPT.read_text().split('AGREED="')[1].split('"')[0]))
    told = subprocess.run([sys.executable, "-m", "engines.serve", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert flags <= set(re.findall(r"--[a-z-]+", told.stdout))


STAND_IN = """#!/bin/bash
# ssh: what is run there is run here
while [ "$1" = -tt ] || [ "$1" = -o ]; do [ "$1" = -o ] && shift; shift; done
shift
exec bash -c "$1"
"""
SERVER = """
import http.server, os, pathlib, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
folder = pathlib.Path(sys.argv[0]).parent
(folder / f"server{port}").write_text(str(os.getpid()))
if "FAIL" in os.environ:
    sys.exit("no GPU")
time.sleep(1)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""
TRAINER = """#!/bin/bash
# python: the place of torchrun. Both servers have to answer by now
for url in "${@: -2}"; do curl -fso /dev/null "$url/health" || exit 9; done
echo "trains ${*: -1}"
trap 'echo saved; exit 1' TERM
if [ -n "$LONG" ]; then while :; do sleep 0.1; done; fi
exit "${CODE:-0}"
"""


@pytest.fixture
def stand_ins(tmp_path):
    for name, text in (("ssh", STAND_IN), ("python", TRAINER), ("server.py", SERVER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python"), "NODES": "a b 127.0.0.1",
            "SERVE": f"{sys.executable} {tmp_path}/server.py", "SERVERS": 1, "GPUS": 2, "SERVER_PORT": free_port(),
            "READY": 30, "DIR": str(tmp_path)}


def gone(folder):
    pids = [int(file.read_text()) for file in folder.glob("server[0-9]*")]
    return len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("code", [0, 3])
def test_trainers_begin_when_servers_answer_and_servers_end_with_them(code, stand_ins, tmp_path):
    done = multinode("ssh", *TRAINING, env=stand_ins | {"CODE": code}, check=False)
    assert done.returncode == code and done.stdout.count("trains http://127.0.0.1:") == 2, done.stdout + done.stderr
    assert gone(tmp_path)


def test_a_server_that_does_not_start_ends_all(stand_ins, tmp_path):
    done = multinode("ssh", *TRAINING, env=stand_ins | {"FAIL": 1}, check=False)
    assert done.returncode == 1 and "no GPU" in done.stderr and "has ended; see its output above" in done.stderr
    assert "trains" not in done.stdout and gone(tmp_path)


def test_a_signal_to_the_script_lets_trainers_save_and_then_ends_servers(stand_ins, tmp_path):
    env = os.environ | {k: str(v) for k, v in stand_ins.items()} | {"LONG": "1"}
    with open(tmp_path / "log", "w") as log:
        script = subprocess.Popen(["bash", SCRIPT, "ssh", *TRAINING], env=env, stdout=log, stderr=log)
    end = time.monotonic() + 40
    while (tmp_path / "log").read_text().count("trains") < 2 and time.monotonic() < end:
        time.sleep(0.05)
    script.send_signal(signal.SIGUSR1)
    assert script.wait(30) == 1
    text = (tmp_path / "log").read_text()
    assert text.count("saved") == 2 and "the same command with --resume auto to" in text and gone(tmp_path), text


def test_the_script_is_clean():
    tool = shutil.which("shellcheck")
    if not tool:
        pytest.skip("shellcheck is not installed")
    run([tool, SCRIPT])


# --- docs/scale.md ----------------------------------------------------------------------------------------------------

def page_commands():
    page = (ROOT / "docs" / "scale.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)
    return [shlex.split(line, comments=True) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_the_commands_of_the_page(tmp_path):
    found = page_commands()
    assert len(found) >= 12
    (tmp_path / "scontrol").write_text("printf 'n%s\\n' $(seq $NODES_THERE)\n")
    (tmp_path / "scontrol").chmod(0o755)
    explained = set(re.findall(r"[A-Z_]{2,}", SCRIPT.read_text().split("set -euo")[0]))
    for words in found:
        if words and words[0] in ("make", "export"):
            continue
        at = next((i for i, word in enumerate(words) if "=" not in word), 0)
        env = dict(word.split("=", 1) for word in words[:at])
        if "train.py" in words:
            train.parse_args(words[words.index("train.py") + 1 :])
            continue
        if "-m" in words or words[at] == "runs/serve.sh":
            engines.serve.parse_args(words[at + (1 if words[at] == "runs/serve.sh" else 3) :])
            continue
        where = words.index("runs/multinode.sh")
        assert env.keys() <= explained, env
        if words[at] == "sbatch":
            given = dict(zip(words[at + 1 : where : 2], words[at + 2 : where : 2], strict=True))
            assert given["--signal"].startswith("B:USR1@") and given.keys() <= {
                "--nodes", "--gpus-per-node", "--signal", "--export"}
            env = dict(word.split("=") for word in given["--export"].split(",")[1:])
            assert env.keys() <= explained, env
            env |= {"NODES_THERE": given["--nodes"], "SLURM_JOB_NODELIST": "n", "SLURM_SUBMIT_DIR": str(ROOT),
                    "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        text = multinode(*words[where + 1 :], env=env | {"DRY": "1"}).stdout
        lines = [line for line in text.splitlines() if " train.py " in line]
        nodes_there = int(env.get("NODES_THERE", len(env.get("NODES", "").split())))
        assert len(lines) == nodes_there - int(env.get("SERVERS", 0))
        for line in lines:
            inner = shlex.split(line)[-1] if words[where + 1] != "hand" else line
            cfg = train.parse_args(shlex.split(inner.split(" train.py ", 1)[1]))
            world = 8 * len(lines)
            cfg.rollout.check(world, cfg.algo.minibatches)
            assert world % cfg.parallel.replicate == 0


def test_a_wrong_command_would_be_noticed():
    with pytest.raises(SystemExit):
        train.parse_args(["--model", "m", "--data", "d", "--out", "o", "--steps", "1", "--replicas", "2"])
