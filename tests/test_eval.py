"""Statistics, the page, and eval.py and merge_lora.py as commands.   pytest tests/test_eval.py"""

import base64
import http.server
import itertools
import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_train import ROOT, TORCHRUN, flags, run, write_parquet

import eval as E
import model as M
from demo import make_model, shapes_rows


def record(kind, accuracies, finish="stop"):
    rewards = [{"accuracy": a, "format": 1.0, "reward": a} for a in accuracies]
    samples = [{"text": "x", "finish_reason": finish, "tokens": 3, "rewards": r} for r in rewards]
    return {"uid": kind + str(accuracies), "answer_type": kind, "ground_truth": "x", "samples": samples}


def test_wilson_interval_equals_the_published_example():
    # Newcombe 1998 (Statistics in Medicine 17), table I: 81/263 and 15/148, 95% score intervals
    assert E.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert E.wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    low, high = E.wilson(0, 20)
    assert low == pytest.approx(0, abs=1e-12) and 0.1 < high < 0.2


def test_mcnemar_equals_enumeration():
    for gained, lost in [(0, 0), (1, 0), (5, 1), (3, 3), (0, 8)]:
        ours = [record("a", [x]) for x in [1.0] * gained + [0.0] * lost + [1.0] * 4]
        base = [record("a", [x]) for x in [0.0] * gained + [1.0] * lost + [1.0] * 4]
        for i, pair in enumerate(zip(ours, base, strict=True)):
            for side in pair:
                side["uid"] = str(i)
        got = E.compare(ours, base)
        n = gained + lost
        as_extreme = sum(abs(sum(bits) - n / 2) >= abs(gained - n / 2) for bits in itertools.product((0, 1), repeat=n))
        assert (got["gained"], got["lost"]) == (gained, lost) and got["mcnemar_p"] == pytest.approx(as_extreme / 2**n)


def test_summary_counts_per_example_and_type():
    records = [record("count", [1.0, 0.0]), record("count", [0.0, 0.0], finish="length"), record("colour", [1.0, 1.0])]
    s = E.summarise(records)
    assert s["accuracy"] == pytest.approx(0.5) and s["pass@2"] == pytest.approx(2 / 3) and s["truncated"] == pytest.approx(1 / 3)
    assert s["by_answer_type"] == {"colour": {"n": 1, "accuracy": 1.0}, "count": {"n": 2, "accuracy": 0.25}}
    low, high = s["accuracy_ci95"]
    assert low < 0.5 < high
    assert E.summarise([record("a", [12.0]), record("a", [-3.0])])["accuracy_ci95"] is None


def test_comparison_refuses_other_examples():
    with pytest.raises(AssertionError, match="same examples"):
        E.compare([record("a", [1.0])], [record("b", [1.0])])


def test_page_escapes_what_the_policy_wrote_and_limits_itself():
    example = SimpleNamespace(messages=[{"role": "user", "content": "<image>is 1 < 2?"}], images=[b"\x89PNG"], uid="u")
    nasty = record("a", [0.0]) | {"uid": "u", "ground_truth": "<b>"}
    nasty["samples"][0]["text"] = "<script>alert(1)</script>"
    page = E.rollout_page("T<i>", {"accuracy": 0.25, "by_answer_type": {"count": {"accuracy": 0.5}}}, [nasty] * 250, {"u": example})
    assert "<script>" not in page and "&lt;script&gt;" in page and "<b>&lt;b&gt;</b>" in page and "T&lt;i&gt;" in page
    assert page.count("<img") == 200 and "The first 200 of 250 prompts" in page and "is 1 &lt; 2?" in page


@pytest.fixture
def data(tmp_path):
    return write_parquet(tmp_path / "test.parquet", shapes_rows(10, "test", 0))


def test_command_writes_json_and_page_and_compares(toys, data, tmp_path):
    toy = toys["qwen3_vl"]
    done = run([sys.executable, "eval.py", toy, "--data", data, "--baseline", toy, "--max-new-tokens", 3, "--out", tmp_path / "e"])
    result = json.loads((tmp_path / "e" / "eval.json").read_text())
    assert result["n"] == 10 and set(result["by_answer_type"]) == {"count", "colour", "shape", "exists", "angle"}
    assert result["baseline"]["mcnemar_p"] == 1.0 and result["baseline"]["accuracy"] == result["accuracy"]
    assert "accuracy 0.000" in done.stdout and (tmp_path / "e" / "report.html").read_text().count("<img") == 10
    two = run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "eval.py", toy, "--data", data,
               "--samples", 3, "--max-new-tokens", 3, "--out", tmp_path / "e2"])
    again = json.loads((tmp_path / "e2" / "eval.json").read_text())
    assert again["n"] == 10 and again["samples"] == 3 and "pass@3" in again and two.stdout.count("wrote") == 1


@pytest.mark.parametrize("arguments,match", [
    (["nobody/nothing"], "--model 'nobody/nothing'"),
    (["TOY", "--samples", "2", "--temperature", "0"], "copies of one response"),
    (["TOY", "--samples", "0"], "--samples 0"),
    (["TOY", "--temperature", "-1"], "--temperature -1.0 must not be negative"),
    (["TOY", "--top-p", "0"], "--top-p 0.0 must be in (0, 1]"),
    (["TOY", "--limit", "-1"], "--limit -1"),
    (["TOY", "--baseline", "nobody/nothing"], "--model 'nobody/nothing'"),
    (["TOY", "--max-prompt-tokens", "5"], "all 10 prompts exceed --max-prompt-tokens 5"),
    (["EMPTY_RUN"], "without a complete checkpoint"),
])
def test_mistakes_are_one_line(arguments, match, toys, data, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.json").write_text("{}")
    names = {"TOY": str(toys["qwen2_5_vl"]), "EMPTY_RUN": str(tmp_path / "empty")}
    command = [sys.executable, "eval.py", *(names.get(a, a) for a in arguments), "--data", data, "--out", tmp_path / "out"]
    done = run(command, check=False)
    assert done.returncode == 1 and match in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("case,match", [("no_run", "neither a run directory"), ("full_out", "is not empty")])
def test_merge_refuses_what_it_cannot_do(case, match, toys, tmp_path):
    out = tmp_path / "out"
    if case == "full_out":
        out.mkdir()
        (out / "mine.txt").write_text("precious")
        checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
        checkpoint.mkdir(parents=True)
        (checkpoint / "trainer.json").write_text("{}")
        (tmp_path / "run" / "run.json").write_text(json.dumps({"args": {"model": str(toys["qwen2_vl"])}}))
    source = tmp_path / "run" if case == "full_out" else toys["qwen2_vl"]
    done = subprocess.run([sys.executable, "merge_lora.py", source, "--out", out], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and match in done.stderr
    assert not out.exists() or [p.name for p in out.iterdir()] == ["mine.txt"]


def test_merged_folder_is_what_the_run_was_also_with_a_tied_head(tmp_path):
    """Beside the bitwise test of weights in test_train.py: the folder opens, and evaluates as the run does."""
    make_model(tmp_path / "tied", hidden=64, layers=2, vocab=448, tied=True)
    train_file = write_parquet(tmp_path / "train.parquet", shapes_rows(8, "train", 0))
    common = flags(tmp_path / "tied", train_file, tmp_path / "run", "--max-pixels", 4000)
    run([sys.executable, "train.py", *common, "--steps", 1])
    run([*TORCHRUN, 2, "train.py", *common, "--steps", 2, "--resume", "auto"])
    done = run([sys.executable, "merge_lora.py", tmp_path / "run", "--out", tmp_path / "hf"])
    limits = json.loads((tmp_path / "hf" / "preprocessor_config.json").read_text())["size"]
    assert limits["longest_edge"] == 4000  # the run's, not the base's
    run([sys.executable, "merge_lora.py", tmp_path / "run", "--out", tmp_path / "half", "--dtype", "bfloat16"])
    assert "largest log-probability difference" in done.stdout
    texts = []
    for name in ("run", "hf"):
        run([sys.executable, "eval.py", tmp_path / name, "--data", train_file, "--max-new-tokens", 5, "--out", tmp_path / f"e-{name}"])
        texts.append((tmp_path / f"e-{name}" / "report.html").read_text().split("</h1>")[1])
    assert texts[0] == texts[1]
    assert (tmp_path / "hf" / "preprocessor_config.json").is_file()
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("tied", "hf"))
    assert before.keys() == after.keys() and not any(k.startswith("lm_head") for k in after)
    assert any(k.endswith("embed_tokens.weight") and not torch.equal(before[k], after[k]) for k in after)


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as an upload of small files needs."""

    def do_POST(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer, path, status = {}, self.path.split("?")[0], 200
        assert self.headers["Authorization"] == "Bearer hf_secret"
        if path == "/api/repos/create":
            wanted = json.loads(body)
            status = 403 if wanted.get("organization") == "others" else 200
            answer = {"url": f"http://{self.headers['Host']}/{wanted['organization']}/{wanted['name']}", "name": wanted["name"]}
            self.server.made.append(wanted.get("visibility") or wanted.get("private"))  # versions of the client differ
        elif "/preupload/" in path:
            status = 403 if "/others/" in path else 200
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]]}
        elif "/commit/" in path:
            lines = [json.loads(line) for line in body.splitlines()]
            self.server.files |= {x["value"]["path"]: base64.b64decode(x["value"]["content"]) for x in lines if x["key"] == "file"}
            url = f"http://{self.headers['Host']}/me/toy/commit/{'0' * 40}"
            answer = {"commitUrl": url, "commitOid": "0" * 40, "pullRequestUrl": None, "success": True}
        self.reply(status, answer)

    def do_GET(self):
        mine = not self.path.startswith("/api/models/others/absent")
        self.reply(200 if mine else 404, {"id": self.path.removeprefix("/api/models/"), "siblings": []} if mine else {})

    def reply(self, status, answer):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        data = json.dumps(answer).encode()
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_a_merged_adapter_is_uploaded_whole(toys, tmp_path):
    adapted = M.add_lora(M.load_hf(str(toys["qwen2_5_vl"])), M.Lora(2, 4.0))
    M.write_adapter(adapted, str(toys["qwen2_5_vl"]), tmp_path / "adapter")
    hub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    hub.made, hub.files = [], {}
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {"HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": "hf_secret", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "merge_lora.py", tmp_path / "adapter", "--out"]
    try:
        done = run([*command, tmp_path / "hf", "--push", "me/toy"], env=environment)
        refused = [run([*command, tmp_path / out, "--push", f"others/{out}"], check=False, env=environment) for out in ("absent", "there")]
    finally:
        hub.shutdown()
    assert hub.made[0] in ("private", True) and "uploaded" in done.stdout
    written = {str(f.relative_to(tmp_path / "hf")): f.read_bytes() for f in (tmp_path / "hf").rglob("*") if f.is_file()}
    assert hub.files == written and "model.safetensors" in written
    assert [r.returncode for r in refused] == [1, 1] and "Traceback" not in refused[0].stderr + refused[1].stderr
    assert "--push others/absent: the hub gives no such repository" in refused[0].stderr and not (tmp_path / "absent").exists()
    assert "--push others/there: the hub refused" in refused[1].stderr and (tmp_path / "there" / "model.safetensors").exists()
    del environment["HF_TOKEN"]
    refused = run([*command, tmp_path / "no", "--push", "me/toy"], check=False, env=environment)
    assert refused.returncode == 1 and "--push me/toy: not logged in to the hub" in refused.stderr and not (tmp_path / "no").exists()
