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
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from errors import nearest_path, need, refusing
from reward import Stage, task_name
from rewards.order import DataOrder, Memory, batch_of
from utils import derive_seed, print0

NEWEST = 0.25  # the weight of the newest group in an example's running solve rate, once four have been seen
SOLVED = "solved"
BOUNDS = {"least", "most"}
KEYS = {"name": str, "from": int, "where": dict, SOLVED: dict, "order": str, "mix": dict, "reward": dict}


@dataclass(frozen=True)
class StageSpec:
    """A stage, as the file has it."""

    number: int
    told: str = field(compare=False)  # which one of what, for messages
    name: str  # from here on as in KEYS
    first_step: int
    where: Mapping[str, Any]
    solved: Mapping[str, float]
    order: str
    mix: Mapping[str, float]
    reward: Mapping[str, Mapping[str, Any]]  # options by task

    @property
    def stage(self) -> Stage:
        """What rewards get."""
        return Stage(self.name, self.number, self.reward)

    @property
    def column(self) -> str:
        """What `order` is by: a column, or SOLVED; "" without an order."""
        return self.order.removeprefix("-")

    @property
    def by_rate(self) -> bool:
        """Does it need the running solve rates?"""
        return bool(self.solved) or self.column == SOLVED


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
    specs = [spec_of(stage, number, f"{of}: stage {number + 1}") for number, stage in enumerate(stages)]
    steps = [spec.first_step for spec in specs]
    need(steps[0] == 0 and all(a < b for a, b in zip(steps, steps[1:], strict=False)),
         f"{of}: stages begin at steps {steps}; the first must be 0, and each after the last")
    return specs


def spec_of(stage: Any, number: int, told: str) -> StageSpec:
    """One stage, its form checked."""
    need(isinstance(stage, dict) and "from" in stage, f"{told} is {stage!r}; give a table with `from`, its first step")
    unknown = sorted(set(stage) - set(KEYS))
    need(not unknown, f"{told} has {', '.join(unknown)}; known: {', '.join(KEYS)}")
    for key, value in stage.items():
        need(type(value) is KEYS[key], f"{told}: {key} is {value!r}, which is no {KEYS[key].__name__}")
    spec = StageSpec(number, told, *(stage.get(key, kind()) for key, kind in KEYS.items()))
    for column, wanted in {SOLVED: spec.solved, **spec.where}.items():
        if isinstance(wanted, dict):
            good = set(wanted) <= BOUNDS and all(map(is_number, wanted.values()))
            need(good, f"{told}: {column} is {wanted}, expected numbers under `least` and `most`")
    least, most = spec.solved.get("least", 0), spec.solved.get("most", 1)
    need(0 <= least <= most <= 1, f"{told}: solved is {spec.solved}, expected shares from 0 to 1, least below most")
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


class Curriculum(DataOrder):
    """The stages of a run over its examples. UserError for a stage that has too few."""

    def __init__(self, specs: Sequence[StageSpec], examples: Sequence[Any], per_step: int, seed: int):
        super().__init__(examples, per_step, seed)
        self.specs = specs
        self.printed: StageSpec | None = None
        self.shares = list(map(self._shares, specs))  # of each stage: (examples, how many of them in a batch)

    def _shares(self, spec: StageSpec) -> list[tuple[list[int], int]]:
        told, tasks = spec.told, [task_name(example.data_source) for example in self.examples]
        by_column = spec.order and spec.column != SOLVED
        for column in (*spec.where, *([spec.column] if by_column else [])):
            need(column == "data_source" or any(column in example.extra for example in self.examples),
                 f"{told}: no example has a column {column!r} in its extra_info")
        for task in spec.reward:
            need(task in tasks, f"{told}: options for the reward of {task!r}, of which there is no example")
        chosen = [
            i for i, example in enumerate(self.examples)
            if all(fits(column_of(example, column), wanted) for column, wanted in spec.where.items())
        ]  # fmt: skip
        if by_column:  # equal ones stay as they are in the data
            values = {i: column_of(self.examples[i], spec.column) for i in chosen}
            for i, value in values.items():
                row = f"example {self.examples[i].uid!r} has {value!r} there"
                need(is_number(value), f"{told}: order {spec.order!r}: {row}")
            sign = -1 if spec.order.startswith("-") else 1
            chosen.sort(key=lambda i: sign * values[i])
        shares = []
        for task, n in parts_of(self.per_step, spec.mix or {"": 1.0}).items():
            of = [i for i in chosen if task in ("", tasks[i])]
            of_task = f" of task {task}" if task else ""
            need(n > 0, f"{told}: --prompts-per-step {self.per_step} leaves no example{of_task}; raise it or the share")
            need(len(of) >= n, f"{told} has {len(of)} examples{of_task}, and a batch takes {n} of them; loosen `where` "
                 "or lower --prompts-per-step")
            shares.append((of, n))
        return shares

    def number(self, step: int) -> int:
        """Of the stage that a step, counted from 0, belongs to."""
        return sum(spec.first_step <= step for spec in self.specs) - 1

    def stage(self, step: int) -> Stage:
        """What rewards are told; `options` by task. A new stage is printed."""
        spec = self.specs[self.number(step)]
        if spec is not self.printed:
            n = sum(len(of) for of, _ in self.shares[spec.number])
            print0(f"curriculum: after {spec.first_step} steps stage {spec.number + 1} of {len(self.specs)}, "
                   f"{spec.name or 'unnamed'}: {n} of {len(self.examples)} examples")
        self.printed = spec
        return spec.stage

    def stages(self) -> list[tuple[int, Stage]]:
        """Each with its first step."""
        return [(spec.first_step, spec.stage) for spec in self.specs]

    def batch(
        self, step: int, position: int, round: int, memory: Memory, ahead: Collection[str] | None = None
    ) -> list[Any]:
        """The examples of a round of a step that began at a position of the data. `ahead`: where rounds are begun
        before the rates of earlier ones are known, uids that are being sampled; by rates they come last."""
        number = self.number(step)
        spec, chosen = self.specs[number], []
        for of, n in self.shares[number]:
            if spec.by_rate:
                start = round * n if ahead is None else 0
                of = self._by_rate(spec, of, position, memory.get("rates", {}))
                of.sort(key=lambda i: self.examples[i].uid in (ahead or ()))  # stable: they keep their order
            elif spec.order:
                start = (position + round - memory.get("began", 0)) * n
            else:
                start = 0
                of = [of[k] for k in batch_of(position + round, len(of), n, self.seed)]
            chosen += [of[(start + k) % len(of)] for k in range(n)]
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
        metrics = {"curriculum/stage": float(self.number(step))}
        if rates := memory.get("rates"):
            solved = fmean(rate for rate, _ in rates.values())
            metrics |= {"curriculum/tried": float(len(rates)), "curriculum/solved": solved}
        return metrics
