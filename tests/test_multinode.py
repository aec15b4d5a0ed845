"""Training on two nodes, which are two torchrun agents on this machine, in network namespaces if these are allowed: the
results are those of one agent, a failure of one node stops the other, and runs/multinode.sh.

    pytest tests/test_multinode.py
"""

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
from conftest import wait_until
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
    """Two network namespaces with a cable between them, like two machines that each have their own loopback."""

    def __init__(self):
        self.names = [f"node{os.getpid()}{letter}" for letter in "ab"]
        self.devices = [f"nd{os.getpid() % 10**8}{letter}" for letter in "ab"]
        self.hosts = ["10.83.0.1", "10.83.0.2"]
        for name in self.names:
            self.ip("netns", "add", name)
        first, second = self.names
        pair = "type veth peer name"
        self.ip("link", "add", self.devices[0], "netns", first, *pair.split(), self.devices[1], "netns", second)
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
    namespaces = Network.__new__(Network)
    namespaces.names = []
    try:
        namespaces.__init__()
    except (OSError, subprocess.CalledProcessError) as error:
        namespaces.close()
        pytest.skip(f"no network namespaces here: {error}")
    yield namespaces
    namespaces.close()


class Nodes:
    """A torchrun agent on each of two nodes; both train the same run."""

    def __init__(self, folder, command, network=None, restarts=0, share=False):
        self.logs, self.agents = [folder / f"node{i}.log" for i in (0, 1)], []
        hosts, port = network.hosts if network else ["127.0.0.1", "127.0.0.2"], free_port()
        for i, log in enumerate(self.logs):
            prefix = ["ip", "netns", "exec", network.names[i]] if network else []
            torchrun = f"""-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint
                {hosts[0]}:{port} --rdzv-conf is_host={int(i == 0)} --local-addr {hosts[i]} --max-restarts {restarts}
                --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGUSR1 --shutdown-timeout 30 train.py""".split()
            env = os.environ | QUIET | {"GLOO_SOCKET_IFNAME": network.devices[i] if network else "lo"}
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = str(int(not share))
            with open(log, "w") as file:
                full_command = list(map(str, [*prefix, sys.executable, *torchrun, *command]))
                options = {"stdout": file, "stderr": file, "stdin": subprocess.DEVNULL}
                self.agents.append(subprocess.Popen(full_command, cwd=ROOT, env=env, **options))

    def text(self, node):
        return self.logs[node].read_text(errors="replace")

    def wait_for(self, text, seconds=300):
        end = time.monotonic() + seconds
        while text not in self.text(0) + self.text(1):
            assert time.monotonic() < end and any(a.poll() is None for a in self.agents), self.text(0)[-3000:]
            time.sleep(0.02)

    def wait(self, seconds=300):
        codes = [agent.wait(seconds) for agent in self.agents]
        return codes

    def workers(self, node):
        """Return the workers of a node: {rank: process id}."""
        pids = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == self.agents[node].pid:
                    env = (folder / "environ").read_text()
                    pids[int(re.search(r"(?:^|\0)RANK=(\d+)", env)[1])] = int(folder.name)
            except (OSError, TypeError):  # the process has just ended, or is not a worker
                continue
        return pids

    def power_off(self, node):
        for pid in (self.agents[node].pid, *self.workers(node).values()):
            os.kill(pid, signal.SIGKILL)

    def close(self):
        for node, agent in enumerate(self.agents):
            if agent.poll() is None:
                self.power_off(node)
                agent.wait()


def free_port():
    """Return a free port whose next higher port is free too."""
    while True:
        with socket.socket() as bound, socket.socket() as probe:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
            if probe.connect_ex(("127.0.0.1", port + 1)):
                return port


@pytest.fixture
def start(tmp_path):
    started = []

    def start_nodes(*args, **options):
        started.append(Nodes(tmp_path, *args, **options))
        return started[-1]

    yield start_nodes
    for nodes in started:
        nodes.close()


def command(toys, shapes, out, *extra):  # noqa: F811
    settings = ("--steps", 4, "--save-every", 2, "--resume", "auto", "--no-self-test", "--timeout-minutes", 5)
    return flags(toys["qwen2_5_vl"], shapes[0], out, *settings, "--reward-workers", 0, *extra)


@pytest.fixture(scope="module")
def one_agent(toys, shapes, tmp_path_factory):  # noqa: F811
    """Return a folder with two runs: "four", by one torchrun with four processes, and "one", by a single process."""
    folder = tmp_path_factory.mktemp("one_agent")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4, "train.py"]
    run([*torchrun, *command(toys, shapes, folder / "four", "--replicate", 2)])
    run([sys.executable, "train.py", *command(toys, shapes, folder / "one")])
    return folder


def stored_values(folder):
    """Return the bytes of each file of the last checkpoint after its header, whose entries may be in another order."""
    files = sorted(list_checkpoints(folder)[-1].glob("*.safetensors"))
    return {file.name: data[8 + int.from_bytes(data[:8], "little") :] for file in files if (data := file.read_bytes())}


def same_checkpoint(a, b):
    return len(stored_values(a)) == 4 and stored_values(a) == stored_values(b)


@pytest.mark.slow
def test_two_nodes_train_like_one_and_like_one_process(toys, shapes, one_agent, network, start, tmp_path):  # noqa: F811
    """Replicas are across nodes, shards within a node. With as many processes, results are equal bit for bit."""
    nodes = start(command(toys, shapes, tmp_path / "run", "--replicate", 2), network)
    assert nodes.wait() == [0, 0], nodes.text(0)[-3000:] + nodes.text(1)[-3000:]
    assert without_time(tmp_path / "run") == without_time(one_agent / "four")
    assert same_checkpoint(tmp_path / "run", one_agent / "four")
    single, four = rows(one_agent / "one"), rows(tmp_path / "run")
    assert len(single) == len(four) == 4
    for a, b in zip(single, four, strict=True):
        for key in a.keys() & b.keys():
            if not key.startswith(("time/", "perf/", "balance/", "memory/")):
                assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), key
    assert single[0]["policy/grad_norm"] > 1e-3


@pytest.mark.slow
def test_after_a_killed_rank_all_nodes_restart(toys, shapes, one_agent, network, start, tmp_path):  # noqa: F811
    nodes = start(command(toys, shapes, tmp_path / "run", "--replicate", 2), network, restarts=2)
    nodes.wait_for("step 3/4")
    os.kill(nodes.workers(1)[3], signal.SIGKILL)
    assert nodes.wait() == [0, 0], nodes.text(0)[-3000:] + nodes.text(1)[-3000:]
    assert "resumed from" in nodes.text(0)
    assert without_time(tmp_path / "run") == without_time(one_agent / "four")
    assert same_checkpoint(tmp_path / "run", one_agent / "four")


@pytest.mark.slow
def test_a_signal_to_one_node_stops_all_even_with_restarts(toys, shapes, one_agent, start, tmp_path):  # noqa: F811
    """Otherwise the node that got no signal would restart, and wait ten minutes for the other."""
    arguments = command(toys, shapes, tmp_path / "run", "--replicate", 2)
    nodes = start(arguments, restarts=2)
    nodes.wait_for("step 2/4")
    nodes.agents[1].send_signal(signal.SIGUSR1)
    codes = nodes.wait()
    assert 0 not in codes and "SIGUSR1: stopped after step" in nodes.text(0), nodes.text(0)[-3000:]
    resumed = start(arguments)
    assert resumed.wait() == [0, 0]
    assert without_time(tmp_path / "run") == without_time(one_agent / "four")
    assert same_checkpoint(tmp_path / "run", one_agent / "four")


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["powered off", "cut off"])
def test_a_run_names_a_lost_node_and_resumes(failure, toys, shapes, one_agent, network, start, tmp_path):  # noqa: F811
    arguments = command(toys, shapes, tmp_path / "run", "--replicate", 2)
    arguments[arguments.index("--timeout-minutes") + 1] = 0.2
    nodes = start(arguments, network)
    nodes.wait_for("step 3/4")
    if failure == "cut off":
        network.cut()
    else:
        nodes.power_off(1)
    assert nodes.agents[0].wait(300) == 1
    errors = re.findall(r"^error: rank ([23]) \(\S+ process \d+\) (.*)", nodes.text(0), re.M)
    expected = "has not answered for" if failure == "cut off" else "is gone"
    assert errors and errors[0][1].startswith(expected) and "--resume auto" in errors[0][1], nodes.text(0)[-3000:]
    nodes.close()
    run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4, "train.py", *arguments])
    assert without_time(tmp_path / "run") == without_time(one_agent / "four")


def test_ranks_that_fall_silent_after_a_lost_connection_are_named(monkeypatch, capfd):
    def errors_after(later_heartbeats, error):
        # a world of one rank, in which it starts no threads
        dog = watchdog.Watchdog(DistContext(1, 1, torch.device("cpu")), StepTimer(), minutes=1.0)
        dog.ctx = DistContext(1, 3, torch.device("cpu"))
        last_beats = [[7, 3, "update", f"host{rank}"] for rank in range(3)]  # may still be on the way
        dog.heartbeats, dog.store = [[6, *beat[1:]] for beat in last_beats], SimpleNamespace(set=lambda *_: None)

        def sleep(seconds):
            dog.heartbeats = later_heartbeats(dog.heartbeats) if seconds >= 2 * dog.period else last_beats

        monkeypatch.setattr(watchdog, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
        dog._after_error(type(error), error, None)
        return re.findall("^error: .*", capfd.readouterr().err, re.M)

    lost = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    rank_2_lost = errors_after(lambda beats: [*([8, *b[1:]] for b in beats[:2]), beats[2]], lost)
    assert len(rank_2_lost) == 1 and rank_2_lost[0].startswith("error: rank 2 (host2) is gone; continue from")
    assert errors_after(lambda beats: [["left", *beats[0][1:]], [8, *beats[1][1:]], beats[2]], lost) == rank_2_lost
    assert errors_after(lambda beats: beats, lost)[0].startswith("error: rank 0 (which holds the run's store) is gone")
    assert errors_after(lambda beats: beats, ValueError("of a user's reward")) == []


@pytest.mark.parametrize("local_rank, parent, expected", [("0", 5, [5]), ("1", 5, []), ("0", 1, [])])
def test_a_node_that_got_no_signal_signals_its_torchrun(local_rank, parent, expected, monkeypatch):
    """One process per node signals torchrun, unless torchrun has ended and the parent is another process."""
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
    assert killed == expected
    killed.clear()
    with pytest.raises(Interrupted):  # by now the process has received the signal itself
        interrupt.check()
    assert not killed


# --- differences between nodes ----------------------------------------------------------------------------------------


def two_ranks(other_value):
    """Return the context of rank 0 of two. If this rank gathers x, the other one sends `other_value(x)`."""
    ctx = DistContext(0, 2, torch.device("cpu"))
    object.__setattr__(ctx, "gather", lambda mine: [mine, other_value(mine)])
    return ctx


def test_different_flags_on_another_node_are_refused():
    settings = {"lr": 1e-6, "model": "/a/model"}
    node_checks.check_same_settings(settings, two_ranks(lambda mine: ("b", mine[1])))
    with pytest.raises(UserError, match=r"--lr is 1e-06 on rank 0 \(.*\), 0.1 on rank 1 \(b\)"):
        node_checks.check_same_settings(settings, two_ranks(lambda mine: ("b", {"--lr": 0.1})))


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

    def other_node(seen=True, data=None):
        def answer(mine):
            if not isinstance(mine, tuple):
                return mine
            return ("b", data or mine[1]) if isinstance(mine[1], dict) else (seen, "b")

        return two_ranks(answer)

    data = {"--data": examples}
    node_checks.check_shared_storage(tmp_path, data, other_node())
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"--out .*: rank 1 \(b\) does not see"):
        node_checks.check_shared_storage(tmp_path, data, other_node(seen=False))
    with pytest.raises(UserError, match=r"the rows of --data is .* on rank 0 .*, x on rank 1 \(b\); start the"):
        node_checks.check_shared_storage(tmp_path, data, other_node(data={"SHA-256 of the rows of --data": "x"}))
    before = node_checks.hash_examples(examples)
    examples[0].ground_truth = "2"
    assert node_checks.hash_examples(examples) != before


# --- runs/multinode.sh ------------------------------------------------------------------------------------------------


def run_multinode(*words, env, check=True):
    skipped = ("SLURM_", "HF_", "NCCL_", "GLOO_", "OMP_", "VLLM_")  # the script would pass these on
    full_env = {k: v for k, v in os.environ.items() if not k.startswith(skipped)} | {k: str(v) for k, v in env.items()}
    done = subprocess.run(["bash", SCRIPT, *map(str, words)], env=full_env, capture_output=True, text=True, timeout=300)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


TRAINING = ["--model", "m", "--data", "a b.parquet", "--out", "out", "--steps", "3", "--max-new-tokens", "64"]


@pytest.mark.parametrize("mode", ["hand", "ssh", "slurm"])
def test_a_dry_run_prints_every_command(mode, tmp_path):
    env = {"NODES": "a b c d", "SERVERS": 2, "TP": 4, "DRY": 1, "PYTHON": "python", "DIR": "/repo", "HF_HOME": "/hf",
           "HF_TOKEN": "secret"}
    if mode == "slurm":
        (tmp_path / "scontrol").write_text("[ \"$*\" = 'show hostnames [a-d]' ] && printf '%s\\n' a b c d\n")
        (tmp_path / "scontrol").chmod(0o755)
        del env["NODES"], env["DIR"]
        env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "[a-d]", "SLURM_JOB_ID": "7",
                "SLURM_SUBMIT_DIR": "/repo"}
    text = run_multinode(mode, *TRAINING, env=env).stdout
    assert "secret" not in text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    placed = []
    for line in lines:
        words = shlex.split(line)
        if mode == "hand":
            place, line = line.split(": ", 1)
        else:
            place = words[words.index("--nodelist") + 1] if mode == "slurm" else words[-2]
            line = words[-1]
        placed.append((place, shlex.split(line.removeprefix("cd /repo && exec env "))))
    serving, training = placed[:4], placed[4:]
    assert [place for place, _ in placed] == ["c", "c", "d", "d", "a", "b"]
    for number, (place, words) in enumerate(serving):
        gpus = ["0,1,2,3", "4,5,6,7"][number % 2]
        assert words[:5] == ["HF_HOME=/hf", f"CUDA_VISIBLE_DEVICES={gpus}", "python", "-m", "engines.serve"], place
        options = dict(zip(words[5::2], words[6::2], strict=True))
        assert options == {"--model": "m", "--max-new-tokens": "64", "--data": "a b.parquet", "--host": "0.0.0.0",
                           "--port": str(8000 + number % 2), "--gpus": "4"}
    urls = [f"http://{host}:{port}" for host in "cd" for port in (8000, 8001)]
    assert [f"# wait until this succeeds: curl -f {url}/health" in text for url in urls] == [True] * 4
    for place, words in training:
        script_index = words.index("train.py")
        assert words[script_index + 1 :] == [*TRAINING, "--rollout", "server", "--servers", *urls]
        launcher = dict(zip(words[5:script_index:2], words[6:script_index:2], strict=True))
        assert launcher["--nnodes"] == "2" and launcher["--nproc-per-node"] == "8"
        assert launcher["--rdzv-endpoint"] == "a:29500" and launcher["--local-addr"] == place
        assert launcher["--rdzv-conf"] == f"is_host={int(place == 'a')}"
        assert launcher["--rdzv-id"] == ("7" if mode == "slurm" else "run")
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in words[:script_index]


def test_usage_errors_of_the_script_are_one_line():
    for words, env, message in (
        (["slrum"], {"NODES": "a"}, "error: the first argument is slrum; use slurm, ssh or hand"),
        (["ssh"], {"NODES": "a b", "SERVERS": 2}, "error: SERVERS=2 of 2 nodes leaves none for training; lower it"),
        (["ssh"], {}, "error: NODES is missing; set it to host names separated by spaces"),
        (["ssh", "--vllm", "tensor_parallel_size=2"], {"NODES": "a b", "SERVERS": 1},
         "error: --vllm tensor_parallel_size: set the variable TP of this script instead"),
    ):
        done = run_multinode(*words, env=env, check=False)
        assert done.returncode == 1 and done.stderr.strip() == message and not done.stdout
    assert "# NODES     host names" in run_multinode("--help", env={}).stdout


def test_servers_get_the_flags_that_must_agree_with_training():
    argv = ["--model=m", "--data", "a.parquet", "--vllm", "max_num_seqs=8", "block_size=16", "--env-settings", "a=1",
            "b=2", "--lr", "1e-6", "--instruction", "Say it. --now"]
    text = run_multinode("hand", *argv, env={"NODES": "a b", "SERVERS": 1, "GPUS": 1}).stdout
    serve, train = (next(line for line in text.splitlines() if name in line) for name in ("engines.serve", "train.py"))
    words = shlex.split(serve.split("engines.serve ", 1)[1])
    assert words[:9] == ["--model", "m", "--data", "a.parquet", "--env-settings", "a=1", "b=2", "--instruction",
                         "Say it. --now"]
    assert words[9:] == ["--host", "0.0.0.0", "--port", "8000", "--gpus", "1", "--vllm", "max_num_seqs=8",
                         "block_size=16"]
    words = shlex.split(train.split("train.py ", 1)[1])
    assert "--vllm" not in words and words[words.index("--env-settings") :][:5] == ["--env-settings", "a=1", "b=2",
                                                                                   "--lr", "1e-6"]
    flags = set(re.findall(r"--[a-z-]+", SCRIPT.read_text().split('AGREED="')[1].split('"')[0]))
    done = subprocess.run([sys.executable, "-m", "engines.serve", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert flags <= set(re.findall(r"--[a-z-]+", done.stdout))


SSH = """#!/bin/bash
# ssh: runs the command on this machine
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
# python: stands in for torchrun. Both servers must answer by now
for url in "${@: -2}"; do curl -fso /dev/null "$url/health" || exit 9; done
echo "trains ${*: -1}"
trap 'echo saved; exit 1' TERM
if [ -n "$LONG" ]; then while :; do sleep 0.1; done; fi
exit "${CODE:-0}"
"""


@pytest.fixture
def stand_ins(tmp_path):
    for name, text in (("ssh", SSH), ("python", TRAINER), ("server.py", SERVER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python"), "NODES": "a b 127.0.0.1",
            "SERVE": f"{sys.executable} {tmp_path}/server.py", "SERVERS": 1, "GPUS": 2, "SERVER_PORT": free_port(),
            "READY": 30, "DIR": str(tmp_path)}


def have_ended(folder):
    pids = [int(file.read_text()) for file in folder.glob("server[0-9]*")]
    return len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("code", [0, 3])
def test_trainers_begin_when_servers_answer_and_servers_end_with_them(code, stand_ins, tmp_path):
    done = run_multinode("ssh", *TRAINING, env=stand_ins | {"CODE": code}, check=False)
    assert done.returncode == code and done.stdout.count("trains http://127.0.0.1:") == 2, done.stdout + done.stderr
    assert have_ended(tmp_path)


def test_a_server_that_does_not_start_ends_the_script(stand_ins, tmp_path):
    done = run_multinode("ssh", *TRAINING, env=stand_ins | {"FAIL": 1}, check=False)
    assert done.returncode == 1 and "no GPU" in done.stderr and "has ended; see its output above" in done.stderr
    assert "trains" not in done.stdout and have_ended(tmp_path)


def test_a_signal_to_the_script_lets_trainers_save_and_then_ends_servers(stand_ins, tmp_path):
    env = os.environ | {k: str(v) for k, v in stand_ins.items()} | {"LONG": "1"}
    with open(tmp_path / "log", "w") as log:
        script = subprocess.Popen(["bash", SCRIPT, "ssh", *TRAINING], env=env, stdout=log, stderr=log)
    wait_until(lambda: (tmp_path / "log").read_text().count("trains") == 2)
    script.send_signal(signal.SIGUSR1)
    assert script.wait(120) == 1
    text = (tmp_path / "log").read_text()
    assert text.count("saved") == 2 and "the same command with --resume auto to" in text and have_ended(tmp_path), text


def test_the_script_passes_shellcheck():
    tool = shutil.which("shellcheck")
    if not tool:
        pytest.skip("shellcheck is not installed")
    run([tool, SCRIPT])


# --- docs/scale.md ----------------------------------------------------------------------------------------------------

def page_commands():
    page = (ROOT / "docs" / "scale.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)
    return [shlex.split(line, comments=True) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_the_commands_of_the_page_are_valid(tmp_path):
    commands = page_commands()
    assert len(commands) >= 12
    (tmp_path / "scontrol").write_text("printf 'n%s\\n' $(seq $NODES_THERE)\n")
    (tmp_path / "scontrol").chmod(0o755)
    explained = set(re.findall(r"[A-Z_]{2,}", SCRIPT.read_text().split("set -euo")[0]))
    for words in commands:
        if words and words[0] in ("make", "export"):
            continue
        first = next((i for i, word in enumerate(words) if "=" not in word), 0)
        env = dict(word.split("=", 1) for word in words[:first])
        if "train.py" in words:
            train.parse_args(words[words.index("train.py") + 1 :])
            continue
        if "-m" in words or words[first] == "runs/serve.sh":
            engines.serve.parse_args(words[first + (1 if words[first] == "runs/serve.sh" else 3) :])
            continue
        script_index = words.index("runs/multinode.sh")
        assert env.keys() <= explained, env
        if words[first] == "sbatch":
            options = dict(zip(words[first + 1 : script_index : 2], words[first + 2 : script_index : 2], strict=True))
            assert options["--signal"].startswith("B:USR1@") and options.keys() <= {
                "--nodes", "--gpus-per-node", "--signal", "--export"}
            env = dict(word.split("=") for word in options["--export"].split(",")[1:])
            assert env.keys() <= explained, env
            env |= {"NODES_THERE": options["--nodes"], "SLURM_JOB_NODELIST": "n", "SLURM_SUBMIT_DIR": str(ROOT),
                    "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        text = run_multinode(*words[script_index + 1 :], env=env | {"DRY": "1"}).stdout
        lines = [line for line in text.splitlines() if " train.py " in line]
        nodes_there = int(env.get("NODES_THERE", len(env.get("NODES", "").split())))
        assert len(lines) == nodes_there - int(env.get("SERVERS", 0))
        for line in lines:
            inner = shlex.split(line)[-1] if words[script_index + 1] != "hand" else line
            cfg = train.parse_args(shlex.split(inner.split(" train.py ", 1)[1]))
            world = 8 * len(lines)
            cfg.rollout.check(world, cfg.algo.minibatches)
            assert world % cfg.parallel.replicate == 0


def test_a_wrong_command_would_be_noticed():
    with pytest.raises(SystemExit):
        train.parse_args(["--model", "m", "--data", "d", "--out", "o", "--steps", "1", "--replicas", "2"])
