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

bench = importlib.import_module("async")  # a keyword: `import async` is none
MODES = {mode.name: mode for mode in bench.MODES}
FREE = bench.Engine(overhead=0.0, weights=1.0, kv=0.0, compute=0.0, flop=0.0, slots=1000)  # a second an iteration


def work_of(length_NG, prompts, prompt=7, prefill=0.0, update=1.0):
    """Rounds of groups; all prompts cost the same."""
    length_NG = np.array(length_NG)
    n = len(length_NG)
    columns = (np.full(n, prompt), length_NG, np.full(n, prefill), np.full(n, update))
    return bench.Work(prompts, *columns)


def random_work(seed, prompts=4, samples=3, rounds=12):
    rng = np.random.default_rng(seed)
    n = prompts * rounds
    length_NG = np.clip(np.exp(rng.normal(2.5, 0.9, (n, samples))), 1, 90).astype(int)
    return bench.Work(prompts, rng.integers(3, 40, n), length_NG, rng.uniform(1e9, 9e9, n), rng.uniform(1, 4, n))


def random_engine(seed):
    rng = np.random.default_rng(seed)
    return bench.Engine(*rng.uniform((0.1, 0.2, 0.001, 0.05), (0.3, 0.9, 0.02, 0.4)), 1e-10, int(rng.integers(2, 9)))


def times_of(servers=1, train=5.0, pause=0.0):
    """Every step trains for `train` seconds."""
    return bench.Times(servers, trainers=10**9, rate=1e30, step=train, pause=pause)


# ----------------------------------------------------------------------------------------------------------------------
# One iteration at a time


def token_times(queue, engine, work, now):
    """When each request of a server gets each of its tokens if nothing else comes."""
    now_and_then = {id(r): [] for r in queue}
    waiting, running, has_prompt = list(queue), [], set()
    while waiting or running:
        while waiting and len(running) < engine.slots:
            one = waiting.pop(0)
            if not one["live"]:
                n, prompt = one["done"], one["prompt"]
                flops = bench.COSTS.token * n + bench.COSTS.pair * sum(prompt + i + 0.5 for i in range(n))
                if one["group"] not in has_prompt:
                    flops += work.prefill_N[one["group"] % len(work.prefill_N)]
                    has_prompt.add(one["group"])
                now += flops * engine.flop
            running.append(one)
        context = sum(one["prompt"] + one["done"] + len(now_and_then[id(one)]) for one in running)
        now += engine.overhead + max(engine.weights + engine.kv * context, engine.compute * len(running))
        for one in running:
            now_and_then[id(one)].append(now)
        running = [one for one in running if one["done"] + len(now_and_then[id(one)]) < one["length"]]
    return now_and_then


def slow_simulation(work, mode, engine, times, steps):
    pool, sent, now, busy = [], 0, 0.0, 0.0
    told = {"sampled": 0, "trained": 0, "thrown": 0, "stale": 0, "max": 0, "busy": 0.0, "again": 0}
    for step in range(steps):
        while len({one["group"] for one in pool}) < (mode.k + 1) * work.prompts:
            row = sent % len(work.prompt_N)
            load = [sum(one["server"] == s and not one["end"] for one in pool) for s in range(times.servers)]
            for length in work.length_NG[row]:
                one = {"group": sent, "server": load.index(min(load)), "length": int(length), "done": 0, "live": False}
                pool.append(one | {"prompt": int(work.prompt_N[row]), "versions": [], "end": None})
            sent += 1
        plan = {}
        for server in range(times.servers):
            plan |= token_times([r for r in pool if r["server"] == server and not r["end"]], engine, work, now)
        ends = {id(one): one["end"] or plan[id(one)][-1] for one in pool}
        group_end = {}
        for one in pool:
            group_end[one["group"]] = max(group_end.get(one["group"], 0), ends[id(one)])
        order = sorted((end, g) for g, end in group_end.items()) if mode.first else sorted((g, g) for g in group_end)
        chosen = [g for _, g in order[: work.prompts]]
        costs = [work.update_N[g % len(work.update_N)] for g in chosen]
        train = max(sum(costs) / times.trainers, max(costs)) / times.rate + times.step
        cut = max(now, max(group_end[g] for g in chosen)) + train
        if mode.in_flight == "wait":
            cut = max(cut, max(ends.values()))
        for server in range(times.servers):
            last = [ends[id(r)] for r in pool if r["server"] == server and not r["end"]]
            busy += (min(cut, max(last, default=now)) - now) / times.servers
        for one in pool:
            new = [t for t in plan.get(id(one), []) if t <= cut]
            told["again"] += 0 if one["live"] or one["end"] else one["done"]
            one["done"] += len(new)
            one["versions"] += [step] * len(new)
            one["end"] = one["end"] or (ends[id(one)] if ends[id(one)] <= cut else None)
            one["live"] = one["done"] > 0 and mode.in_flight != "abort"
            told["sampled"] += len(new)
        for one in pool:
            if one["group"] in chosen:
                told["trained"] += one["done"]
                told["stale"] += sum(step - v for v in one["versions"])
                told["max"] = max(told["max"], step - min(one["versions"]))
        pool = [one for one in pool if one["group"] not in chosen]
        oldest = {}
        for one in pool:
            oldest[one["group"]] = min([oldest.get(one["group"], step + 1), *one["versions"]])
        late = {g for g, v in oldest.items() if mode.drop and step + 1 - v > mode.k}
        told["thrown"] += sum(one["done"] for one in pool if one["group"] in late)
        pool = [one for one in pool if one["group"] not in late]
        now = cut + times.pause
    return told | {"seconds": now / steps, "busy": busy / now}


@pytest.mark.parametrize("name", [name for name in MODES if name != "colocated"])
@pytest.mark.parametrize("seed", range(4))
def test_sorting_agrees_with_single_iterations(name, seed):
    work, engine = random_work(seed), random_engine(seed + 10)
    for servers, train, pause in ((1, 3.0, 1.7), (3, 20.0, 0.4), (2, 0.0, 0.0)):
        times = bench.Times(servers, trainers=3, rate=1.0, step=train, pause=pause)
        quick = bench.simulate(work, MODES[name], engine, times, steps=7, warmup=0)
        slow = slow_simulation(work, MODES[name], engine, times, steps=7)
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


def test_one_request_alone():
    engine = bench.Engine(overhead=0.1, weights=1.0, kv=0.01, compute=0.0, flop=1e-9, slots=4)
    row = bench.simulate(
        work_of([[20]] * 3, 1, prompt=7, prefill=3e9), MODES["K=0"], engine, times_of(1, 5.0, 2.0), 3, 0
    )
    sampling = 3 + 20 * 1.1 + 0.01 * sum(range(7, 27))
    assert row["seconds"] == pytest.approx(sampling + 5 + 2)
    assert row["trainer_idle"] == pytest.approx(1 - 5 / (sampling + 7))
    assert row["server_idle"] == pytest.approx(1 - sampling / (sampling + 7))


def test_compute_bounds_many_and_memory_bounds_few():
    engine = bench.Engine(overhead=0.0, weights=1.0, kv=0.0, compute=0.25, flop=0.0, slots=64)
    for n, seconds in ((1, 1.0), (4, 1.0), (8, 2.0)):
        row = bench.simulate(work_of([[10] * n], 1), MODES["K=0"], engine, times_of(1, 0.0), 1, 0)
        assert row["seconds"] == pytest.approx(10 * seconds)
    crossing = bench.Engine(0.0, 1.0, 0.25, 1.0, 0.0, 64)  # 2 sequences: compute 2, memory 1 + context / 4
    brute = sum(max(2.0, 1 + 0.25 * (3 + 2 * i)) for i in range(9))
    assert crossing.seconds(9, 2, 3) == pytest.approx(brute)


def test_equal_lengths_one_after_another_and_overlapped():
    work = work_of([[30] * 4] * 60, prompts=3)
    for servers in (1, 3):
        for train in (5.0, 30.0, 70.0):
            times = times_of(servers, train, pause=2.0)
            seconds = {
                name: bench.simulate(work, MODES[name], FREE, times, 10, 3)["seconds"] for name in ("K=0", "K=1 wait")
            }
            assert seconds["K=0"] == pytest.approx(30 + train + 2)
            assert seconds["K=1 wait"] == pytest.approx(max(30, train) + 2)


def test_the_slower_of_the_two_decides_with_keep():
    times = times_of(1, train=50.0, pause=2.0)
    work = work_of([[30] * 4] * 60, prompts=3)
    for name in ("K=1 keep", "K=1 abort", "K=2 keep"):  # the trainer: it never waits
        row = bench.simulate(work, MODES[name], FREE, times, 10, 3)
        assert row["seconds"] == pytest.approx(52) and row["trainer_idle"] == pytest.approx(2 / 52)
    full = FREE._replace(slots=12)  # a round at a time: the servers never wait, but for the syncs
    for name in ("K=1 keep", "K=2 keep", "K=1 abort"):
        row = bench.simulate(work, MODES[name], full, times_of(1, 4.5, 2.0), 12, 4)
        assert 32 <= row["seconds"] <= 33  # a sync ends an iteration
        assert row["server_idle"] == pytest.approx(2 / row["seconds"])


def test_twice_the_servers_sample_twice_as_fast_where_slots_are_short():
    work = work_of([[10] * 4] * 8, prompts=8)
    engine = FREE._replace(slots=4)
    seconds = [bench.simulate(work, MODES["K=0"], engine, times_of(n, 0.0), 1, 0)["seconds"] for n in (1, 2, 8)]
    assert seconds == pytest.approx([80, 40, 10])


def test_the_largest_group_bounds_a_training_step():
    times = bench.Times(1, trainers=10, rate=2.0, step=1.0, pause=0.0)
    assert times.train(np.array([3.0] * 20)) == pytest.approx(60 / 10 / 2 + 1)
    assert times.train(np.array([3.0] * 19 + [40.0])) == pytest.approx(40 / 2 + 1)


# ----------------------------------------------------------------------------------------------------------------------
# What holds for any lengths


@pytest.mark.parametrize("name", MODES)
def test_tokens_are_conserved_and_none_is_too_old(name):
    mode = MODES[name]
    for seed in range(3):
        row = bench.simulate(random_work(seed), mode, random_engine(seed), times_of(2, 9.0, 0.5), 9, 3)
        assert row["sampled"] == row["trained"] + row["thrown"] + row["left"] > 0
        assert row["max_staleness"] <= mode.k or not mode.drop
        assert row["staleness"] <= row["max_staleness"]
        assert (row["thrown"] == 0) or (mode.first and mode.drop)
        assert row["length"] == pytest.approx(0, abs=1e-12) or (mode.first and mode.drop)
        if mode.in_flight == "wait":
            assert row["staleness"] == mode.k  # all of a round is sampled before the first sync after its beginning


def test_every_round_is_trained_once_in_order():
    work = random_work(3)
    row = bench.simulate(work, MODES["K=2 keep"], random_engine(3), times_of(2, 1.0, 0.5), 5, 0)
    assert row["trained"] == work.length_NG[: 5 * work.prompts].sum()


def test_overlap_is_never_slower_when_syncs_are_free():
    for seed in range(12):
        work, engine = random_work(seed), random_engine(seed)
        for train in (2.0, 30.0, 120.0):
            names = ("K=0", "K=1 keep", "K=2 keep")
            seconds = [bench.simulate(work, MODES[n], engine, times_of(2, train), 9, 0)["seconds"] for n in names]
            assert seconds[1] <= seconds[0] * (1 + 1e-9) and seconds[2] <= seconds[0] * (1 + 1e-9), (
                seed,
                train,
                seconds,
            )


def test_dropping_the_late_favours_the_short():
    rng = np.random.default_rng(0)
    length_NG = np.where(rng.random((400, 1)) < 0.2, 300, 20).repeat(2, axis=1)
    work = work_of(length_NG, prompts=10)
    rows = {n: bench.simulate(work, MODES[n], FREE, times_of(2, 30.0), 20, 5) for n in ("first 1", "any 1", "K=1 keep")}
    assert rows["first 1"]["length"] < -0.3 and rows["first 1"]["dropped"] > 0.1
    assert rows["any 1"]["dropped"] == 0 and rows["any 1"]["max_staleness"] > 1
    assert rows["first 1"]["seconds"] < rows["K=1 keep"]["seconds"]


# ----------------------------------------------------------------------------------------------------------------------
# What goes in, what comes out


def test_lengths_have_the_figures_that_they_cite():
    rng = np.random.default_rng(0)
    toy, geo3k, reasoning = (bench.LENGTHS[name].draw(rng, 20000, 8) for name in ("toy", "geo3k", "reasoning"))
    assert np.percentile(toy, [50, 90, 95]) == pytest.approx([12 * 30, 28 * 30, 35 * 30], rel=0.02)
    assert toy.max() == 37 * 30 and toy.mean() == pytest.approx(30 * 14.0, rel=0.02)
    assert np.median(geo3k) == pytest.approx(326, rel=0.02) and geo3k.max() == 2048
    assert np.percentile(reasoning, 90) == pytest.approx(20480, rel=0.03) and reasoning.max() == 40960
    for length_NG, share in ((geo3k, 0.5), (reasoning, 0.5)):
        logs = np.log(length_NG)
        assert 1 - logs.var(axis=1, ddof=1).mean() / logs.var() == pytest.approx(share, abs=0.02)


def test_the_model_has_the_size_that_it_has():
    layer = 3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944
    engine = bench.engine(bench.Machine(), mean_context=800)
    assert engine.weights == pytest.approx(2 * (28 * layer + 3584 * 152064) / (0.8 * 3.35e12))
    assert bench.KV_BYTES == 57344 and engine.slots == 256
    assert bench.engine(bench.Machine(), mean_context=9200).slots == (72e9 - 2 * 8.29e9) // (57344 * 9200)
    assert bench.engine(bench.Machine(tp=2), 800).weights == pytest.approx(engine.weights / 2)
    assert math.isclose(bench.Machine().sync_seconds(), 16.58 / 8.25 + 0.5)


def test_the_command(tmp_path, capsys):
    small = "--gpus 8 16 --prompts 8 --prompts-per-gpu 1 --steps 3 --warmup 1 --seeds 2 --lengths toy reasoning".split()
    bench.main(bench.parse_args([*small, "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]))
    out = capsys.readouterr().out
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 2 * len(MODES)
    assert all(f"\n{name} " in out for name in ("toy", "reasoning")) and out.startswith("Assumptions")
    assert all(one.metadata["note"] in out for one in bench.Machine.__dataclass_fields__.values())
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
    "flags, told",
    [("--gpus 1", "--gpus"), ("--warmup 32", "--warmup"), ("--memory 10", "--memory"), ("--seeds 0", "--seeds")],
)
def test_mistakes_name_the_flag(flags, told):
    with pytest.raises(UserError, match=told):
        bench.main(bench.parse_args(["--lengths", "toy", "--scaling", "strong", *flags.split()]))


def test_the_script_starts():
    command = [sys.executable, "benchmarks/async.py", "--gpus", "1"]
    done = run_command(command)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
