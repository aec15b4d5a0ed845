"""benchmarks/async.py against closed forms and a loop over iterations.   pytest tests/test_async_bench.py"""

import importlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from warm import run_command

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
from errors import UserError  # noqa: E402

bench = importlib.import_module("async")  # async is a keyword, so `import async` is an error
MODES = {mode.name: mode for mode in bench.MODES}
FREE = bench.Engine(overhead=0.0, weights=1.0, kv=0.0, compute=0.0, flop=0.0, slots=1000)  # one second per iteration


def make_work(length_NG, prompts, prompt=7, prefill=0.0, update=1.0):
    """Return groups with these response lengths, whose prompts all cost the same."""
    length_NG = np.array(length_NG)
    n = len(length_NG)
    columns = (np.full(n, prompt), length_NG, np.full(n, prefill), np.full(n, update))
    return bench.Work(prompts, *columns)


def random_work(seed, prompts=4, samples=3, batches=12):
    rng = np.random.default_rng(seed)
    n = prompts * batches
    length_NG = np.clip(np.exp(rng.normal(2.5, 0.9, (n, samples))), 1, 90).astype(int)
    return bench.Work(prompts, rng.integers(3, 40, n), length_NG, rng.uniform(1e9, 9e9, n), rng.uniform(1, 4, n))


def random_engine(seed):
    rng = np.random.default_rng(seed)
    return bench.Engine(*rng.uniform((0.1, 0.2, 0.001, 0.05), (0.3, 0.9, 0.02, 0.4)), 1e-10, int(rng.integers(2, 9)))


def make_times(servers=1, train=5.0, pause=0.0):
    """Return the times of a run whose training steps take `train` seconds each."""
    return bench.Times(servers, trainers=10**9, rate=1e30, step=train, pause=pause)


# ----------------------------------------------------------------------------------------------------------------------
# A simulation of single iterations


def compute_token_times(queue, engine, work, now):
    """Return the times at which each request of a server gets its tokens if no other request arrives."""
    token_times = {id(r): [] for r in queue}
    waiting, running, has_prompt = list(queue), [], set()
    while waiting or running:
        while waiting and len(running) < engine.slots:
            request = waiting.pop(0)
            if not request["live"]:
                n, prompt = request["done"], request["prompt"]
                flops = bench.COSTS.token * n + bench.COSTS.pair * sum(prompt + i + 0.5 for i in range(n))
                if request["group"] not in has_prompt:
                    flops += work.prefill_N[request["group"] % len(work.prefill_N)]
                    has_prompt.add(request["group"])
                now += flops * engine.flop
            running.append(request)
        context = sum(request["prompt"] + request["done"] + len(token_times[id(request)]) for request in running)
        now += engine.overhead + max(engine.weights + engine.kv * context, engine.compute * len(running))
        for request in running:
            token_times[id(request)].append(now)
        running = [r for r in running if r["done"] + len(token_times[id(r)]) < r["length"]]
    return token_times


def simulate_by_iteration(work, mode, engine, times, steps):
    pool, sent, now, busy = [], 0, 0.0, 0.0
    totals = {"sampled": 0, "trained": 0, "thrown": 0, "stale": 0, "max": 0, "busy": 0.0, "again": 0}
    for step in range(steps):
        while len({request["group"] for request in pool}) < (mode.k + 1) * work.prompts:
            row = sent % len(work.prompt_N)
            load = [sum(r["server"] == s and not r["end"] for r in pool) for s in range(times.servers)]
            for length in work.length_NG[row]:
                request = {
                    "group": sent, "server": load.index(min(load)), "length": int(length), "done": 0, "live": False,
                }
                pool.append(request | {"prompt": int(work.prompt_N[row]), "versions": [], "end": None})
            sent += 1
        plan = {}
        for server in range(times.servers):
            plan |= compute_token_times([r for r in pool if r["server"] == server and not r["end"]], engine, work, now)
        ends = {id(request): request["end"] or plan[id(request)][-1] for request in pool}
        group_end = {}
        for request in pool:
            group_end[request["group"]] = max(group_end.get(request["group"], 0), ends[id(request)])
        order = sorted((end, g) for g, end in group_end.items()) if mode.first else sorted((g, g) for g in group_end)
        chosen = [g for _, g in order[: work.prompts]]
        costs = [work.update_N[g % len(work.update_N)] for g in chosen]
        train = max(sum(costs) / times.trainers, max(costs)) / times.rate + times.step
        cut = max(now, max(group_end[g] for g in chosen)) + train
        if mode.in_flight == "wait":
            cut = max(cut, max(ends.values()))
        for server in range(times.servers):
            open_ends = [ends[id(r)] for r in pool if r["server"] == server and not r["end"]]
            busy += (min(cut, max(open_ends, default=now)) - now) / times.servers
        for request in pool:
            new = [t for t in plan.get(id(request), []) if t <= cut]
            totals["again"] += 0 if request["live"] or request["end"] else request["done"]
            request["done"] += len(new)
            request["versions"] += [step] * len(new)
            request["end"] = request["end"] or (ends[id(request)] if ends[id(request)] <= cut else None)
            request["live"] = request["done"] > 0 and mode.in_flight != "abort"
            totals["sampled"] += len(new)
        for request in pool:
            if request["group"] in chosen:
                totals["trained"] += request["done"]
                totals["stale"] += sum(step - v for v in request["versions"])
                totals["max"] = max(totals["max"], step - min(request["versions"]))
        pool = [request for request in pool if request["group"] not in chosen]
        oldest = {}
        for request in pool:
            oldest[request["group"]] = min([oldest.get(request["group"], step + 1), *request["versions"]])
        late = {g for g, v in oldest.items() if mode.drop and step + 1 - v > mode.k}
        totals["thrown"] += sum(request["done"] for request in pool if request["group"] in late)
        pool = [request for request in pool if request["group"] not in late]
        now = cut + times.pause
    return totals | {"seconds": now / steps, "busy": busy / now}


@pytest.mark.parametrize("name", [name for name in MODES if name != "colocated"])
@pytest.mark.parametrize("seed", range(4))
def test_sorting_equals_single_iterations(name, seed):
    work, engine = random_work(seed), random_engine(seed + 10)
    for servers, train, pause in ((1, 3.0, 1.7), (3, 20.0, 0.4), (2, 0.0, 0.0)):
        times = bench.Times(servers, trainers=3, rate=1.0, step=train, pause=pause)
        quick = bench.simulate(work, MODES[name], engine, times, steps=7, warmup=0)
        slow = simulate_by_iteration(work, MODES[name], engine, times, steps=7)
        assert quick["seconds"] == pytest.approx(slow["seconds"], rel=1e-9)
        assert [quick[key] for key in ("sampled", "trained", "thrown")] == [
            slow[key] for key in ("sampled", "trained", "thrown")
        ]
        assert quick["staleness"] == pytest.approx(slow["stale"] / slow["trained"])
        assert quick["max_staleness"] == slow["max"]
        assert quick["again"] == pytest.approx(slow["again"] / slow["sampled"])
        assert 1 - quick["server_idle"] == pytest.approx(slow["busy"], rel=1e-9)


# ----------------------------------------------------------------------------------------------------------------------
# Closed forms


def test_one_request_takes_the_expected_time():
    engine = bench.Engine(overhead=0.1, weights=1.0, kv=0.01, compute=0.0, flop=1e-9, slots=4)
    row = bench.simulate(
        make_work([[20]] * 3, 1, prompt=7, prefill=3e9), MODES["K=0"], engine, make_times(1, 5.0, 2.0), 3, 0
    )
    sampling = 3 + 20 * 1.1 + 0.01 * sum(range(7, 27))
    assert row["seconds"] == pytest.approx(sampling + 5 + 2)
    assert row["trainer_idle"] == pytest.approx(1 - 5 / (sampling + 7))
    assert row["server_idle"] == pytest.approx(1 - sampling / (sampling + 7))


def test_many_sequences_are_compute_bound_and_few_memory_bound():
    engine = bench.Engine(overhead=0.0, weights=1.0, kv=0.0, compute=0.25, flop=0.0, slots=64)
    for n, seconds in ((1, 1.0), (4, 1.0), (8, 2.0)):
        row = bench.simulate(make_work([[10] * n], 1), MODES["K=0"], engine, make_times(1, 0.0), 1, 0)
        assert row["seconds"] == pytest.approx(10 * seconds)
    crossing = bench.Engine(0.0, 1.0, 0.25, 1.0, 0.0, 64)  # 2 sequences: compute 2, memory 1 + context / 4
    brute = sum(max(2.0, 1 + 0.25 * (3 + 2 * i)) for i in range(9))
    assert crossing.seconds(9, 2, 3) == pytest.approx(brute)


def test_with_equal_lengths_times_add_up_or_overlap():
    work = make_work([[30] * 4] * 60, prompts=3)
    for servers in (1, 3):
        for train in (5.0, 30.0, 70.0):
            times = make_times(servers, train, pause=2.0)
            seconds = {
                name: bench.simulate(work, MODES[name], FREE, times, 10, 3)["seconds"] for name in ("K=0", "K=1 wait")
            }
            assert seconds["K=0"] == pytest.approx(30 + train + 2)
            assert seconds["K=1 wait"] == pytest.approx(max(30, train) + 2)


def test_overlapped_steps_take_as_long_as_the_slower_side():
    times = make_times(1, train=50.0, pause=2.0)
    work = make_work([[30] * 4] * 60, prompts=3)
    for name in ("K=1 keep", "K=1 abort", "K=2 keep"):  # the trainer is slower: it never waits
        row = bench.simulate(work, MODES[name], FREE, times, 10, 3)
        assert row["seconds"] == pytest.approx(52) and row["trainer_idle"] == pytest.approx(2 / 52)
    full = FREE._replace(slots=12)  # room for one batch: the servers wait only for syncs
    for name in ("K=1 keep", "K=2 keep", "K=1 abort"):
        row = bench.simulate(work, MODES[name], full, make_times(1, 4.5, 2.0), 12, 4)
        assert 32 <= row["seconds"] <= 33  # an iteration that a sync interrupts is lost
        assert row["server_idle"] == pytest.approx(2 / row["seconds"])


def test_twice_the_servers_sample_twice_as_fast_if_slots_are_scarce():
    work = make_work([[10] * 4] * 8, prompts=8)
    engine = FREE._replace(slots=4)
    seconds = [bench.simulate(work, MODES["K=0"], engine, make_times(n, 0.0), 1, 0)["seconds"] for n in (1, 2, 8)]
    assert seconds == pytest.approx([80, 40, 10])


def test_the_largest_group_bounds_a_training_step():
    times = bench.Times(1, trainers=10, rate=2.0, step=1.0, pause=0.0)
    assert times.train(np.array([3.0] * 20)) == pytest.approx(60 / 10 / 2 + 1)
    assert times.train(np.array([3.0] * 19 + [40.0])) == pytest.approx(40 / 2 + 1)


# ----------------------------------------------------------------------------------------------------------------------
# Properties for any lengths


@pytest.mark.parametrize("name", MODES)
def test_tokens_are_conserved_and_none_is_too_old(name):
    mode = MODES[name]
    for seed in range(3):
        row = bench.simulate(random_work(seed), mode, random_engine(seed), make_times(2, 9.0, 0.5), 9, 3)
        assert row["sampled"] == row["trained"] + row["thrown"] + row["left"] > 0
        assert row["max_staleness"] <= mode.k or not mode.drop
        assert row["staleness"] <= row["max_staleness"]
        assert (row["thrown"] == 0) or (mode.first and mode.drop)
        assert row["length"] == pytest.approx(0, abs=1e-12) or (mode.first and mode.drop)
        if mode.in_flight == "wait":
            assert row["staleness"] == mode.k  # a batch is sampled completely before the first sync after its start


def test_every_batch_is_trained_once_in_order():
    work = random_work(3)
    row = bench.simulate(work, MODES["K=2 keep"], random_engine(3), make_times(2, 1.0, 0.5), 5, 0)
    assert row["trained"] == work.length_NG[: 5 * work.prompts].sum()


def test_overlap_is_never_slower_when_syncs_are_free():
    for seed in range(12):
        work, engine = random_work(seed), random_engine(seed)
        for train in (2.0, 30.0, 120.0):
            names = ("K=0", "K=1 keep", "K=2 keep")
            seconds = [bench.simulate(work, MODES[n], engine, make_times(2, train), 9, 0)["seconds"] for n in names]
            assert seconds[1] <= seconds[0] * (1 + 1e-9) and seconds[2] <= seconds[0] * (1 + 1e-9), (
                seed,
                train,
                seconds,
            )


def test_dropping_late_groups_favours_short_responses():
    rng = np.random.default_rng(0)
    length_NG = np.where(rng.random((400, 1)) < 0.2, 300, 20).repeat(2, axis=1)
    work = make_work(length_NG, prompts=10)
    rows = {
        n: bench.simulate(work, MODES[n], FREE, make_times(2, 30.0), 20, 5) for n in ("first 1", "any 1", "K=1 keep")
    }
    assert rows["first 1"]["length"] < -0.3 and rows["first 1"]["dropped"] > 0.1
    assert rows["any 1"]["dropped"] == 0 and rows["any 1"]["max_staleness"] > 1
    assert rows["first 1"]["seconds"] < rows["K=1 keep"]["seconds"]


# ----------------------------------------------------------------------------------------------------------------------
# Inputs and outputs


def test_lengths_match_the_figures_that_they_cite():
    rng = np.random.default_rng(0)
    toy, geo3k, reasoning = (bench.LENGTHS[name].draw(rng, 20000, 8) for name in ("toy", "geo3k", "reasoning"))
    assert np.percentile(toy, [50, 90, 95]) == pytest.approx([12 * 30, 28 * 30, 35 * 30], rel=0.02)
    assert toy.max() == 37 * 30 and toy.mean() == pytest.approx(30 * 14.0, rel=0.02)
    assert np.median(geo3k) == pytest.approx(326, rel=0.02) and geo3k.max() == 2048
    assert np.percentile(reasoning, 90) == pytest.approx(20480, rel=0.03) and reasoning.max() == 40960
    for length_NG, share in ((geo3k, 0.5), (reasoning, 0.5)):
        logs = np.log(length_NG)
        assert 1 - logs.var(axis=1, ddof=1).mean() / logs.var() == pytest.approx(share, abs=0.02)


def test_the_engine_has_the_size_of_the_model():
    layer = 3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944
    engine = bench.engine(bench.Machine(), mean_context=800)
    assert engine.weights == pytest.approx(2 * (28 * layer + 3584 * 152064) / (0.8 * 3.35e12))
    assert bench.KV_BYTES == 57344 and engine.slots == 256
    assert bench.engine(bench.Machine(), mean_context=9200).slots == (72e9 - 2 * 8.29e9) // (57344 * 9200)
    assert bench.engine(bench.Machine(tp=2), 800).weights == pytest.approx(engine.weights / 2)
    assert math.isclose(bench.Machine().sync_seconds(), 16.58 / 8.25 + 0.5)


def test_the_command_writes_consistent_figures(tmp_path, capsys):
    flags = "--gpus 8 16 --prompts 8 --prompts-per-gpu 1 --steps 3 --warmup 1 --seeds 2 --lengths toy reasoning".split()
    bench.main(bench.parse_args([*flags, "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]))
    out = capsys.readouterr().out
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 2 * len(MODES)
    assert all(f"\n{name} " in out for name in ("toy", "reasoning")) and out.startswith("Assumptions")
    assert all(setting.metadata["note"] in out for setting in bench.Machine.__dataclass_fields__.values())
    assert (tmp_path / "a.png").stat().st_size > 10_000
    for row in rows:
        case = [other for other in rows if all(other[k] == row[k] for k in ("lengths", "scaling", "gpus"))]
        base = {other["mode"]: other["seconds"] for other in case}
        assert row["vs_colocated"] == pytest.approx(base["colocated"] / row["seconds"])
        assert row["seconds"] == min(row["tried"].values())
        assert row["mode"] == "colocated" or row["servers"] + row["trainers"] == row["gpus"]
        assert row["trainers"] * 80e9 >= 16 * bench.PARAMETERS
    first = [row for row in rows if row["gpus"] == 8 and row["mode"] == "K=1 keep"]
    assert all(set(row["tried"]) == set("123456") for row in first)  # 7 + 1 has no room for the trainer


@pytest.mark.parametrize(
    "flags, name",
    [("--gpus 1", "--gpus"), ("--warmup 32", "--warmup"), ("--memory 10", "--memory"), ("--seeds 0", "--seeds")],
)
def test_errors_name_the_flag(flags, name):
    with pytest.raises(UserError, match=name):
        bench.main(bench.parse_args(["--lengths", "toy", "--scaling", "strong", *flags.split()]))


def test_the_script_prints_errors_in_one_line():
    command = [sys.executable, "benchmarks/async.py", "--gpus", "1"]
    done = run_command(command)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
