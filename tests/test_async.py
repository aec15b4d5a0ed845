"""Tests of sampling ahead (--async-steps): which rollouts are trained, in which order, and how old they are.

pytest tests/test_async.py
"""

import json
import random
import sys
import threading
import time
from bisect import bisect
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_kernels import DEVICE, case, close, small_blocks, tokens_of
from test_train import TORCHRUN, flags, kill_after, rows, run, shapes  # noqa: F401

import grpo
import train
from engines.ahead import Ahead
from engines.launch import RolloutServerConfig, check_engine
from errors import UserError, in_copy
from grpo import Algorithm, PolicyLoss
from kernels import fused_policy_loss
from model import ModelConfig
from parallel.models import Models
from prepare_data import DataConfig, read_examples
from reward import CurriculumStage
from rewards.order import make_order, shuffled_batch
from rollout import Batches, Engine, RolloutConfig, start_rollouts
from utils import DistContext

P, G = 3, 2


class TimestampEngine(Engine):
    """An engine whose log-probabilities are the times at which tokens were sampled. `lag()` returns how many versions
    the weights of a response are behind."""

    def __init__(self, seed=0, lag=lambda: 0, delay=0.002):
        super().__init__()
        self.rng = random.Random(seed)
        self.lag = lag
        self.lock = threading.Lock()
        self.delay = delay
        self.syncs = []  # times
        self.seeds = {}  # uid -> seeds of the calls that sampled it
        self.threads = set()

    def generate(self, prompts, n, sampling, on_rollout=None):
        self.threads.add(threading.current_thread())
        rollouts = start_rollouts(prompts, n)
        for prompt in prompts:
            self.seeds.setdefault(prompt.uid, []).append(sampling.seed)
        for r in self.rng.sample(rollouts, len(rollouts)):
            lag = self.lag()
            for _ in range(3):
                time.sleep(self.delay * self.rng.random() / len(rollouts))
                with self.lock:
                    r.logprobs.append(time.monotonic())
                    r.versions.append(self.weights_version - lag)
            r.response, r.response_mask = [7] * 3, [True] * 3
            on_rollout(r)
        return rollouts

    def load_weights(self, named_tensors=()):
        with self.lock:
            self.syncs.append(time.monotonic())
            self.weights_version += 1
        return {}


class Named(str):
    """An example that is its own uid."""

    @property
    def uid(self):
        return str(self)


class Grader:
    """A grader that records the rollouts of each batch, and the contexts in the order of `collect`."""

    def __init__(self):
        self.submitted, self.contexts = {}, []

    def submit(self, rollout):
        self.submitted.setdefault(rollout.prompt.context.batch, []).append(rollout)

    def collect(self, rollouts):
        [context] = {id(r.prompt.context): r.prompt.context for r in rollouts}.values()
        self.contexts.append(context)
        early = self.submitted.setdefault(context.batch, [])
        early += [r for r in rollouts if r not in early]


class Loop:
    """The calls of train.py's loop to batches, engine and grader. The uid of a prompt is its batch's position and its
    index in the batch."""

    def __init__(self, engine, ahead, steps, stage_of=lambda step: 0, fails=(), max_batches=1, curriculum=None):
        def select_batch(step, position, round, memory, ahead):
            return [Named(f"{position + round}/{place}") for place in range(P)]

        def prompts_of(examples, context):
            if str(examples[0]).partition("/")[0] in fails:
                raise LookupError(f"no image for {examples[0]}")
            return [SimpleNamespace(uid=example.uid, context=context, noised=None) for example in examples]

        cfg = SimpleNamespace(
            run=SimpleNamespace(seed=0, steps=steps),
            rollout=RolloutConfig(prompts_per_step=P),
            servers=RolloutServerConfig(async_steps=ahead),
            algo=Algorithm(group_size=G, max_gen_batches=max_batches),
        )
        curriculum = curriculum or SimpleNamespace(
            stage_index=stage_of, select_batch=select_batch, current_stage=lambda step: CurriculumStage()
        )
        self.batches = Batches(cfg, curriculum, None, None, DistContext(0, 1, None))
        self.batches.make = prompts_of
        self.engine = Ahead(engine, self.batches) if ahead else engine
        self.grader = Grader()

    def take(self, state, position):
        prompts = self.batches.next(state, position)
        rollouts = self.engine.generate(prompts, G, prompts.sampling, on_rollout=self.grader.submit)
        self.grader.collect(rollouts)
        return rollouts


def run_steps(loop, steps, max_batches=1, seed=0):
    """Run steps of 1 to `max_batches` batches and a sync; return (step, position, rollouts, time) of each batch."""
    rng, position, batches = random.Random(seed), 0, []
    for step in range(steps):
        state = train.TrainState(step, position)
        for _ in range(rng.randint(1, max_batches)):
            batches.append((step, position, loop.take(state, position), time.monotonic()))
            position += 1
        time.sleep(0.003 * rng.random())
        loop.engine.load_weights()
    return batches


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_curriculum_by_solve_rates_draws_all_examples_and_none_twice_at_once(ahead, tmp_path):
    (tmp_path / "stages.toml").write_text('[[stages]]\nname = "a"\nfrom = 0\nsolved = { most = 0.9 }\n')
    examples = [SimpleNamespace(uid=f"e{i}", data_source="x", extra={}) for i in range(24)]
    curriculum = make_order(str(tmp_path / "stages.toml"), examples, 4, 0)
    loop = Loop(TimestampEngine(seed=0), ahead, steps=60, curriculum=curriculum)
    state, counts = {}, Counter()
    for step in range(60):
        rollouts = loop.take(train.TrainState(step, step, curriculum=state), step)
        batch = [group[0].prompt.uid for group in zip(*[iter(rollouts)] * G, strict=True)]
        in_progress = [
            uid for position, drawn in loop.batches.prepared.items() if position > step for uid in drawn.uids
        ]
        assert len(set(batch + in_progress)) == 4 * (1 + min(ahead, 59 - step))
        counts.update(batch)
        rates = {uid: int(uid[1:]) / 24 for uid in batch}
        state = curriculum.after_step(state, step, step + 1, rates)
    assert set(counts) == {example.uid for example in examples}


@pytest.mark.parametrize("max_batches", [1, 3])
@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_no_rollout_is_too_old_lost_or_out_of_order(ahead, max_batches):
    engine = TimestampEngine(seed=ahead)
    loop = Loop(engine, ahead, steps=200, max_batches=max_batches)
    taken = run_steps(loop, 200, max_batches)
    assert [position for _, position, *_ in taken] == list(range(len(taken))) and len(taken) >= 200
    oldest = 0
    for _, position, rollouts, taken_at in taken:
        expected = [(f"{position}/{place}", sample) for place in range(P) for sample in range(G)]
        assert [(r.prompt.uid, r.sample_index) for r in rollouts] == expected
        version = bisect(engine.syncs, taken_at)
        for r in rollouts:
            sampled = [bisect(engine.syncs, moment) for moment in r.logprobs]  # from the times of the syncs
            assert r.versions == sampled and version - min(sampled) <= ahead
            oldest = max(oldest, version - min(sampled))
    assert oldest == ahead  # the bound is reached, so the test could fail
    assert not ahead or not loop.engine.pending  # every sampled batch was trained
    assert all(len(seeds) == 1 for seeds in engine.seeds.values())  # no prompt was sampled twice
    main = threading.main_thread()
    assert (main in engine.threads) == (ahead == 0) and (len(engine.threads) == 1) == (ahead == 0)
    # rewards get the step that trains their batch
    assert [(c.step, c.batch) for c in loop.grader.contexts] == [(step, position) for step, position, *_ in taken]
    assert all(len(graded) == P * G for graded in loop.grader.submitted.values())


@pytest.mark.parametrize("max_batches", [1, 2])
def test_a_batch_sampled_ahead_is_graded_at_once_if_its_step_is_known(max_batches):
    """With --max-gen-batches, the step of a batch sampled ahead is known only when a step takes it."""
    loop = Loop(TimestampEngine(), 2, steps=9, max_batches=max_batches)
    loop.take(train.TrainState(), 0)
    for _, future in loop.engine.pending.values():
        future.result()
    assert sorted(loop.engine.pending) == [1, 2] and sorted(loop.grader.submitted) == (
        [0, 1, 2] if max_batches == 1 else [0]
    )


def test_no_batch_of_the_next_stage_is_started_early():
    loop = Loop(TimestampEngine(), 3, steps=20, stage_of=lambda step: step // 7)
    for step in range(20):
        loop.take(train.TrainState(step, step), step)
        last = min(19, step // 7 * 7 + 6)
        assert sorted(loop.engine.pending) == list(range(step + 1, min(last, step + 3) + 1))
        loop.engine.load_weights()
    assert [context.step for context in loop.grader.contexts] == list(range(20))


def test_groups_that_are_too_old_are_dropped_counted_and_sampled_again():
    lags = iter([5, 0, 0, 0, 5, 5])  # of the 6 responses of the first batch, in shuffled order
    engine = TimestampEngine(lag=lambda: next(lags, 0))
    engine.weights_version = 10
    loop = Loop(engine, 1, steps=1)
    rollouts = loop.take(train.TrainState(), 0)
    assert [r.prompt.uid for r in rollouts] == ["0/0", "0/0", "0/1", "0/1", "0/2", "0/2"]
    assert all(r.versions == [10] * 3 for r in rollouts)
    resampled = [uid for uid, seeds in engine.seeds.items() if len(seeds) > 1]
    assert 1 <= len(resampled) <= 3 and all(len(set(engine.seeds[uid])) == 2 for uid in resampled)
    assert len({loop.batches.sampling(0, times).seed for times in range(3)}) == 3
    assert loop.engine.meter.totals["async/dropped_groups"] == len(resampled)
    assert loop.engine.meter.totals["async/dropped_tokens"] == len(resampled) * G * 3
    [submitted] = loop.grader.submitted.values()
    assert {id(r) for r in rollouts} <= {id(r) for r in submitted} and len(submitted) == (P + len(resampled)) * G


def test_an_error_in_a_batch_is_raised_with_its_traceback_when_the_batch_is_taken():
    engine = TimestampEngine()
    loop = Loop(engine, 2, steps=9, fails=("1",))
    loop.take(train.TrainState(), 0)
    loop.engine.load_weights()
    with pytest.raises(LookupError, match="no image for 1/0") as failure:
        loop.take(train.TrainState(1, 1), 1)
    assert "prompts_of" in [entry.name for entry in failure.traceback]
    assert all(thread.daemon for thread in engine.threads if thread is not threading.main_thread())


def test_an_evaluation_is_sampled_at_once():
    engine = TimestampEngine()
    loop = Loop(engine, 1, steps=9)
    prompts = [SimpleNamespace(uid="e", context=None, noised=None)]
    assert len(loop.engine.generate(prompts, 2, loop.batches.sampling(0), on_rollout=lambda r: None)) == 2
    assert engine.threads == {threading.main_thread()} and not loop.engine.pending


def test_only_servers_sample_ahead():
    for options in ({"async_steps": 2}, {"in_flight": "keep"}):
        with pytest.raises(UserError, match="only for servers, but the engine is --rollout hf; use --rollout server"):
            RolloutServerConfig(**options).check("hf", (), None)
    cfg = RolloutServerConfig(servers=("http://127.0.0.1:9",), async_steps=2, in_flight="keep")
    message = "127.0.0.1:9: no server answers there" if in_copy("engines.server") else "is not in this copy"
    with pytest.raises(UserError, match=message):
        check_engine("server", (), cfg, ModelConfig(model="m"), 1)


# --- the whole loop, with an engine that samples in threads ----------------------------------------------------------


def read_trained(out, world):
    """Return, for each step that all ranks trained, the (position, uids) of its batches in order."""
    ranks = []
    for rank in range(world):
        ranks.append([json.loads(line) for line in Path(f"{out}.{rank}.jsonl").read_text().splitlines()])
    steps = []
    for parts in zip(*ranks, strict=False):
        steps.append([(int(p), sorted(sum((part[p] for part in parts), []))) for p in parts[0]])
    return steps


def check_order(steps, data):
    """Check that the steps trained every batch of the data once and in order."""
    examples, _ = read_examples(str(data), DataConfig(data=str(data)))
    for i, (position, uids) in enumerate(sum(steps, [])):
        assert position == i
        assert uids == sorted(examples[k].uid for k in shuffled_batch(position, len(examples), 4, 0))


@pytest.mark.parametrize("world,batches", [(1, 1), *(pytest.param(2, n, marks=pytest.mark.slow) for n in (1, 3))])
def test_a_resumed_run_trains_every_batch_once_and_in_order(world, batches, toys, shapes, tmp_path):  # noqa: F811
    launch = [*TORCHRUN, world] if world > 1 else [sys.executable]
    server = ["--rollout", "server", "--servers", "http://stand-in:1", "--async-steps", 2]
    common = [*server, "--save-every", 3, "--steps", 9, "--max-gen-batches", batches]
    out = tmp_path / "run"
    command = [*launch, "tests/async_worker.py", *flags(toys["qwen2_5_vl"], shapes[0], out, *common)]
    kill_after(command, out, 5)
    before_kill = read_trained(out, world)
    for rank in range(world):
        Path(f"{out}.{rank}.jsonl").unlink()
    done = run([*command, "--resume", "auto"])
    assert "resumed from" in done.stdout
    resumed = read_trained(out, world)
    resumed_from = resumed[0][0][0]  # the position of the checkpoint
    before_resume = [step for step in before_kill if step[0][0] < resumed_from]
    check_order(before_resume + resumed, shapes[0])
    logged = [row for row in rows(out) if "update/tokens" in row]
    assert [row["step"] for row in logged] == list(range(1, 10)) == list(range(1, len(before_resume + resumed) + 1))
    assert all(row["async/staleness"] <= row["async/staleness_max"] <= 2 for row in logged)
    assert max(row["async/staleness_max"] for row in logged) >= 1
    for row in logged:
        assert 0 <= row["async/mixed"] <= 1 and 0 <= row["async/queue"] <= 3
        assert 0 <= row["async/trainer_idle"] <= 1 and row["async/servers_idle"] == 0.25
        assert row["async/dropped_groups"] == row["async/dropped_tokens"] == 0 and row["async/in_flight"] >= 0


# --- the old policy --------------------------------------------------------------------------------------------------


def count_policy_calls(algo, tokens, trainer_logps):
    """Run phase 4 of a step with a policy that computes `trainer_logps`; return how often the policy was called."""
    calls = []

    def policy(micro, temperature):
        calls.append(temperature)
        return SimpleNamespace(logp_K=trainer_logps[micro.token_index_K], value_K=None, entropy_K=None)

    models = Models(policy, None)
    micro = SimpleNamespace(token_index_K=torch.arange(len(tokens)))
    cfg = SimpleNamespace(algo=algo, rollout=SimpleNamespace(temperature=1.0), run=SimpleNamespace(seed=0))
    train.compute_logprobs_and_values(SimpleNamespace(tokens=tokens, minibatches=[[micro]]), models, cfg)
    return len(calls)


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("old,cap", [("trainer", None), ("trainer", 1.2), ("rollout", None)])
def test_ratios_are_to_the_weights_before_the_update_or_to_those_that_sampled(old, cap, epochs, kernel, monkeypatch):
    n, v = 30, 50
    small_blocks(monkeypatch, 7, v)
    hidden, weight, targets, advantages, noise = case(n, 16, v, scale=2.0)
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp = (x @ w.t()).log_softmax(-1)[torch.arange(n), targets]
    now = logp.detach()
    # on policy the weights before the update are the current ones
    trainer = now if epochs == 1 else now + 0.3 * torch.randn(n, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    sampled = trainer + 0.3 * noise
    ratio = (logp - (trainer if old == "trainer" else sampled)).exp()
    factor = 1.0 if cap is None else (trainer - sampled).exp().clamp(max=cap)
    expected = -(factor * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)).sum()
    expected.backward()

    algo = Algorithm(update_epochs=epochs, old_policy=old, tis_cap=cap)
    algo.check()
    tokens = tokens_of(advantages.cpu(), rollout_logps=sampled.float().cpu())
    assert count_policy_calls(algo, tokens, trainer.float()) == (old == "trainer" and epochs == 2)
    y, u = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total, *_ = fused_policy_loss(y, u, targets, PolicyLoss(algo), tokens, kernel=kernel)
    total.backward()
    for a, b in ((total, expected), (y.grad, x.grad), (u.grad, w.grad)):
        close(a.detach(), b.detach())
    clipped = PolicyLoss(algo)(now.float(), torch.zeros(n, device=DEVICE), tokens)[1]["clipped"].sum()
    # with one epoch, only the ratio to the weights that sampled differs from 1
    assert (clipped > 0) == (old == "rollout" or epochs == 2)


def test_a_kl_penalty_in_the_reward_uses_the_same_old_policy():
    """It uses the engine's log-probabilities, without a forward pass of the trainer."""
    algo = Algorithm(adv="reinforce++", kl="k1", kl_in="reward", kl_coef=0.5, old_policy="rollout")
    tokens = tokens_of(torch.zeros(4), rollout_logps=torch.tensor([-1.0, -2.0, -3.0, -4.0])).to(torch.device("cpu"))
    assert not count_policy_calls(algo, tokens, torch.zeros(4)) and not algo.on_policy
    tokens.rollout, tokens.ref_logps = torch.tensor([0, 0, 1, 1]), torch.full((4,), -2.5)
    arguments = (torch.zeros(1, 2), torch.zeros(1, 2), tokens, torch.ones(2, dtype=torch.bool), algo, 0.5)
    advantages, _ = grpo.compute_advantages(*arguments, moments=lambda x: (0.0, 1.0))
    assert advantages.tolist() == [-1.0, -0.25, 1.0, 0.75]  # sums over the remaining tokens of -0.5 (old - reference)


@pytest.mark.parametrize("options", [{"tis_cap": 2.0}, {"ratio_mask": "0.5,2"}, {"loss": "reinforce"}])
def test_weighting_by_staleness_twice_or_not_at_all_is_refused(options):
    Algorithm(**options).check()
    with pytest.raises(UserError, match="old_policy=rollout"):
        Algorithm(old_policy="rollout", **options).check()
