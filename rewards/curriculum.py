"""Stages of a run: which examples a step trains on, and what their rewards are told.

A file for --curriculum, in TOML or JSON, has a list of stages. All but `from` may be left out:

    [[stages]]
    name = "easy"                       # as it is printed, and handed to the reward
    from = 0                            # its first step; that of the first stage is 0
    where.answer_type = ["count"]       # examples with one of these values in a column of extra_info, or data_source
    where.difficulty = { most = 3 }     # or with a number of at least `least` and at most `most`
    solved = { most = 0.9 }             # or that were solved that often; those never tried are in
    order = "difficulty"                # in this order (-difficulty: downwards; solved: hardest first), not shuffled
    mix = { geo3k = 0.75, vqa = 0.25 }  # shares of a batch, by task
    reward.geospot = { tolerance_km = 500 }  # options of a task's reward

A task may have stages of its own, in the same form: `CURRICULUM` in its file, for runs without --curriculum.
--curriculum none trains without stages.
"""

import json
import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from errors import nearest_path, need, refusing
from reward import Stage, task_name
from rewards.order import Memory, batch_of
from utils import derive_seed, print0

NEWEST = 0.25  # the weight of the newest group in an example's running solve rate, once four have been seen
SOLVED = "solved"
BOUNDS = {"least", "most"}


@dataclass(frozen=True)
class StageSpec:
    """A stage, as the file has it."""

    name: str = ""
    first_step: int = 0
    where: Mapping[str, Any] = field(default_factory=dict)
    solved: Mapping[str, float] = field(default_factory=dict)
    order: str = ""
    mix: Mapping[str, float] = field(default_factory=dict)
    reward: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # options by task
    told: str = field(default="", compare=False)  # which one of what, for messages

    @property
    def by_rate(self) -> bool:
        """Does it need the running solve rates?"""
        return bool(self.solved) or self.order.lstrip("-") == SOLVED

    @property
    def ordered_by(self) -> list[str]:
        """The column of `order`, if it is one."""
        column = self.order.lstrip("-")
        return [column] if column not in ("", SOLVED) else []

    def takes(self, example: Any) -> bool:
        """Is an example one of this stage's?"""
        return all(fits(column_of(example, column), wanted) for column, wanted in self.where.items())


def read_file(file: str) -> list[StageSpec]:
    """Return the stages of --curriculum."""
    with refusing((OSError, UnicodeDecodeError), f"--curriculum {file}{nearest_path(file)}"):
        text = Path(file).read_text()
    with refusing((ValueError, RecursionError), f"--curriculum {file}: neither TOML nor JSON"):
        read = json.loads(text) if file.endswith(".json") else tomllib.loads(text)
    stages = read.get("stages") if isinstance(read, dict) and set(read) == {"stages"} else None
    need(isinstance(stages, list) and stages, f"--curriculum {file}: expected a list `stages` and nothing else")
    return specs_of(stages, f"--curriculum {file}")


def specs_of(stages: Sequence[Any], of: str) -> list[StageSpec]:
    specs = [spec_of(stage, f"{of}: stage {number}") for number, stage in enumerate(stages, 1)]
    steps = [spec.first_step for spec in specs]
    rising = steps[0] == 0 and all(a < b for a, b in zip(steps, steps[1:], strict=False))
    need(rising, f"{of}: stages begin at steps {steps}; the first must be 0, and each after the last")
    return specs


def stage_of(specs: Sequence[StageSpec], number: int) -> Stage:
    return Stage(specs[number].name, number % len(specs), specs[number].reward)


def spec_of(stage: Any, told: str) -> StageSpec:
    """One stage, its form checked."""
    need(isinstance(stage, dict), f"{told} is {stage!r}, expected a table")
    names = {"from": "first_step"} | {f.name: f.name for f in fields(StageSpec) if f.name not in ("first_step", "told")}
    unknown = sorted(set(stage) - set(names))
    need(not unknown, f"{told} has {', '.join(unknown)}; known: {', '.join(names)}")
    spec = StageSpec(**{names[key]: value for key, value in stage.items()}, told=told)
    need("from" in stage and type(spec.first_step) is int, f"{told}: `from` is {stage.get('from')!r}, not a step")
    need(isinstance(spec.name, str) and isinstance(spec.order, str), f"{told}: name and order must be text")
    for name in ("where", "solved", "mix", "reward"):
        need(isinstance(getattr(spec, name), dict), f"{told}: {name} is {getattr(spec, name)!r}, expected a table")
    for column, wanted in {SOLVED: spec.solved, **spec.where}.items():
        if isinstance(wanted, dict):
            good = set(wanted) <= BOUNDS and all(is_number(bound) for bound in wanted.values())
            need(good, f"{told}: {column} is {wanted}, expected numbers under `least` and `most`")
    least, most = spec.solved.get("least", 0), spec.solved.get("most", 1)
    need(0 <= least <= most <= 1, f"{told}: solved is {spec.solved}, expected shares from 0 to 1, least below most")
    good = spec.order.removeprefix("-")[:1] not in ("", "-") or not spec.order
    need(good, f"{told}: order is {spec.order!r}, expected a column, or - and a column")
    good = all(is_number(share) and share > 0 for share in spec.mix.values())
    need(good, f"{told}: mix is {spec.mix}, expected a share above 0 for each task")
    good = all(isinstance(options, dict) for options in spec.reward.values())
    need(good, f"{told}: reward is {spec.reward}, expected a table of options for each task")
    return spec


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def column_of(example: Any, name: str) -> Any:
    return task_name(example.data_source) if name == "data_source" else example.extra.get(name)


def fits(value: Any, wanted: Any) -> bool:
    """Is a column's value as `where` has it? One that is missing is not."""
    if isinstance(wanted, dict):
        return is_number(value) and wanted.get("least", value) <= value <= wanted.get("most", value)
    return value in (wanted if isinstance(wanted, list) else [wanted])


def parts_of(total: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers in these proportions, with this sum."""
    ends = [round(total * part / sum(shares.values())) for part in accumulate(shares.values())]
    return {name: end - start for name, start, end in zip(shares, [0, *ends], ends, strict=False)}


class Curriculum:
    """The stages of a run over its examples. UserError for a stage that has too few."""

    def __init__(self, specs: Sequence[StageSpec], examples: Sequence[Any], per_step: int, seed: int):
        self.examples = examples
        self.seed = seed
        self.specs = specs
        self.told: StageSpec | None = None  # the stage that was printed last
        self.shares: list[list[tuple[list[int], int]]] = []  # of each stage: (examples, how many of them in a batch)
        for spec in self.specs:
            self.shares.append(self._shares(spec, spec.told, per_step))

    def _shares(self, spec: StageSpec, told: str, per_step: int) -> list[tuple[list[int], int]]:
        tasks = [task_name(example.data_source) for example in self.examples]
        for column in (*spec.where, *spec.ordered_by):
            known = column == "data_source" or any(column in example.extra for example in self.examples)
            need(known, f"{told}: no example has a column {column!r} in its extra_info")
        for task in spec.reward:
            need(task in tasks, f"{told}: options for the reward of {task!r}, of which there is no example")
        chosen = [i for i, example in enumerate(self.examples) if spec.takes(example)]
        if spec.ordered_by:
            chosen = self._sorted(chosen, spec.order, told)
        shares = []
        for task, n in parts_of(per_step, spec.mix or {"": 1.0}).items():
            of = [i for i in chosen if task in ("", tasks[i])]
            of_task = f" of task {task}" if task else ""
            need(n > 0, f"{told}: --prompts-per-step {per_step} leaves no example{of_task}; raise it or the share")
            enough = f"{told} has {len(of)} examples{of_task}, and a batch takes {n} of them"
            need(len(of) >= n, f"{enough}; loosen `where`, or lower --prompts-per-step")
            shares.append((of, n))
        return shares

    def _sorted(self, chosen: list[int], order: str, told: str) -> list[int]:
        """By a column; equal ones as they are in the data."""
        column, sign = order.lstrip("-"), -1 if order.startswith("-") else 1
        values = {i: column_of(self.examples[i], column) for i in chosen}
        for i, value in values.items():
            need(is_number(value), f"{told}: order {order!r}: example {self.examples[i].uid!r} has {value!r} there")
        return sorted(chosen, key=lambda i: sign * values[i])

    def number(self, step: int) -> int:
        """Of the stage that a step, counted from 0, belongs to."""
        return sum(spec.first_step <= step for spec in self.specs) - 1

    def stage(self, step: int) -> Stage:
        """What rewards are told; `options` by task. A new stage is printed."""
        number = self.number(step)
        spec = self.specs[number]
        if spec is not self.told:
            print0(self._described(number))
        self.told = spec
        return stage_of(self.specs, number)

    def stages(self) -> list[tuple[int, Stage]]:
        """Each with its first step."""
        return [(spec.first_step, stage_of(self.specs, i)) for i, spec in enumerate(self.specs)]

    def _described(self, number: int) -> str:
        spec, n = self.specs[number], sum(len(of) for of, _ in self.shares[number])
        more = {"solved": dict(spec.solved), "order": spec.order, "mix": spec.mix, "reward": spec.reward}
        told = "".join(f", {name} {json.dumps(value)}" for name, value in more.items() if value)
        where = f"curriculum: after {spec.first_step} steps stage {number + 1} of {len(self.specs)}"
        return f"{where}, {spec.name or 'unnamed'}: {n} of {len(self.examples)} examples{told}"

    def batch(
        self, step: int, position: int, round: int, memory: Memory, ahead: Collection[str] | None = None
    ) -> list[Any]:
        """The examples of a round of a step that began at a position of the data. `ahead`: where rounds are begun
        before the rates of earlier ones are known, uids that are being sampled; by rates they come last."""
        number = self.number(step)
        spec, chosen = self.specs[number], []
        for of, n in self.shares[number]:
            if spec.by_rate:
                ranked = self._by_rate(spec, of, position, memory.get("rates", {}))
                if ahead is not None:
                    ranked.sort(key=lambda i: self.examples[i].uid in ahead)  # stable: they keep their order
                first = 0 if ahead is not None else round * n
                chosen += [ranked[(first + k) % len(of)] for k in range(n)]
            elif spec.order:
                start = (position + round - memory.get("began", 0)) * n
                chosen += [of[(start + k) % len(of)] for k in range(n)]
            else:
                chosen += [of[k] for k in batch_of(position + round, len(of), n, self.seed)]
        return [self.examples[i] for i in chosen]

    def _by_rate(self, spec: StageSpec, of: list[int], position: int, rates: dict) -> list[int]:
        """First those that are solved as often as the stage wants, the ones tried least often in front; then those that
        come nearest to it. Equal ones are shuffled."""
        order = torch.Generator().manual_seed(derive_seed(self.seed, "order", position))
        ties = torch.randperm(len(of), generator=order).tolist()
        least, most = spec.solved.get("least", 0.0), spec.solved.get("most", 1.0)
        keys = []
        for place, (i, tie) in enumerate(zip(of, ties, strict=True)):
            rate, tries = rates.get(self.examples[i].uid, (0.0, 0))
            off = max(least - rate, rate - most, 0.0) if tries else 0.0
            rank = {SOLVED: rate, f"-{SOLVED}": -rate, "": 0}.get(spec.order, place)  # else they are in order
            keys.append((off, tries, rank, tie, i))
        return [i for *_, i in sorted(keys)]

    def after_step(self, memory: Memory, step: int, position: int, solved: Mapping[str, float]) -> Memory:
        """With the mean accuracy of a step's groups, if a stage asks for it; the position is the next step's."""
        began = position if self.number(step + 1) != self.number(step) else memory.get("began", 0)
        if not any(spec.by_rate for spec in self.specs):
            return {"began": began}
        updated = dict(memory.get("rates", {}))
        for uid, now in sorted(solved.items()):
            rate, tries = updated.get(uid, (now, 0))
            updated[uid] = [rate + (now - rate) * max(NEWEST, 1 / (tries + 1)), tries + 1]
        return {"began": began, "rates": updated}

    def metrics(self, step: int, memory: Memory) -> dict[str, float]:
        rates = memory.get("rates")
        metrics = {"curriculum/stage": float(self.number(step))}
        if rates:
            solved = fmean(rate for rate, _ in rates.values())
            metrics |= {"curriculum/tried": float(len(rates)), "curriculum/solved": solved}
        return metrics
