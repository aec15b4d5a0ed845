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

from errors import as_user_error, nearest_path, need
from reward import CurriculumStage, task_name
from rewards.order import CurriculumState, DataOrder, shuffled_batch
from utils import derive_seed, print0

SOLVE_RATE_WEIGHT = 0.25  # the weight of the newest group in an example's running solve rate, once four have been seen
SOLVED_KEY = "solved"
FILTER_BOUNDS = {"least", "most"}
STAGE_KEYS = {"name": str, "from": int, "where": dict, SOLVED_KEY: dict, "order": str, "mix": dict, "reward": dict}


@dataclass(frozen=True)
class CurriculumStageConfig:
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
    def stage(self) -> CurriculumStage:
        """What rewards get."""
        return CurriculumStage(self.name, self.number, self.reward)

    @property
    def column(self) -> str:
        """What `order` is by: a column, or SOLVED; "" without an order."""
        return self.order.removeprefix("-")

    @property
    def needs_solve_rates(self) -> bool:
        """Does it need the running solve rates?"""
        return bool(self.solved) or self.column == SOLVED_KEY


def read_stages(file: str) -> list[CurriculumStageConfig]:
    """Return the stages of --curriculum."""
    with as_user_error((OSError, UnicodeDecodeError), f"--curriculum {file}{nearest_path(file)}"):
        text = Path(file).read_text()
    with as_user_error((ValueError, RecursionError), f"--curriculum {file}: neither TOML nor JSON"):
        read = json.loads(text) if file.endswith(".json") else tomllib.loads(text)
    stages = read.get("stages") if isinstance(read, dict) and set(read) == {"stages"} else None
    need(isinstance(stages, list) and stages, f"--curriculum {file}: expected a list `stages` and nothing else")
    return parse_stages(stages, f"--curriculum {file}")


def parse_stages(stages: Sequence[Any], of: str) -> list[CurriculumStageConfig]:
    specs = [parse_stage(stage, number, f"{of}: stage {number + 1}") for number, stage in enumerate(stages)]
    steps = [spec.first_step for spec in specs]
    need(steps[0] == 0 and all(a < b for a, b in zip(steps, steps[1:], strict=False)),
         f"{of}: stages begin at steps {steps}; the first must be 0, and each after the last")
    return specs


def parse_stage(stage: Any, number: int, told: str) -> CurriculumStageConfig:
    """One stage, its form checked."""
    need(isinstance(stage, dict) and "from" in stage, f"{told} is {stage!r}; give a table with `from`, its first step")
    unknown = sorted(set(stage) - set(STAGE_KEYS))
    need(not unknown, f"{told} has {', '.join(unknown)}; known: {', '.join(STAGE_KEYS)}")
    for key, value in stage.items():
        need(type(value) is STAGE_KEYS[key], f"{told}: {key} is {value!r}, which is no {STAGE_KEYS[key].__name__}")
    spec = CurriculumStageConfig(number, told, *(stage.get(key, kind()) for key, kind in STAGE_KEYS.items()))
    for column, wanted in {SOLVED_KEY: spec.solved, **spec.where}.items():
        if isinstance(wanted, dict):
            good = set(wanted) <= FILTER_BOUNDS and all(map(is_finite_number, wanted.values()))
            need(good, f"{told}: {column} is {wanted}, expected numbers under `least` and `most`")
    least, most = spec.solved.get("least", 0), spec.solved.get("most", 1)
    need(0 <= least <= most <= 1, f"{told}: solved is {spec.solved}, expected shares from 0 to 1, least below most")
    good = all(is_finite_number(share) and share > 0 for share in spec.mix.values())
    need(good, f"{told}: mix is {spec.mix}, expected a share above 0 for each task")
    good = all(isinstance(options, dict) for options in spec.reward.values())
    need(good, f"{told}: reward is {spec.reward}, expected a table of options for each task")
    return spec


def is_finite_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def column_value(example: Any, name: str) -> Any:
    return task_name(example.data_source) if name == "data_source" else example.extra.get(name)


def matches(value: Any, wanted: Any) -> bool:
    """Is a column's value as `where` has it? One that is missing is not."""
    if isinstance(wanted, dict):
        return is_finite_number(value) and wanted.get("least", value) <= value <= wanted.get("most", value)
    return value in (wanted if isinstance(wanted, list) else [wanted])


def split_proportionally(total: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers in these proportions, with this sum."""
    ends = [round(total * part / sum(shares.values())) for part in accumulate(shares.values())]
    return {name: end - start for name, start, end in zip(shares, [0, *ends], ends, strict=False)}


class Curriculum(DataOrder):
    """The stages of a run over its examples. UserError for a stage that has too few."""

    def __init__(self, specs: Sequence[CurriculumStageConfig], examples: Sequence[Any], per_step: int, seed: int):
        super().__init__(examples, per_step, seed)
        self.specs = specs
        self.printed: CurriculumStageConfig | None = None
        self.shares = list(map(self._shares, specs))  # of each stage: (examples, how many of them in a batch)

    def _shares(self, spec: CurriculumStageConfig) -> list[tuple[list[int], int]]:
        told, tasks = spec.told, [task_name(example.data_source) for example in self.examples]
        by_column = spec.order and spec.column != SOLVED_KEY
        for column in (*spec.where, *([spec.column] if by_column else [])):
            need(column == "data_source" or any(column in example.extra for example in self.examples),
                 f"{told}: no example has a column {column!r} in its extra_info")
        for task in spec.reward:
            need(task in tasks, f"{told}: options for the reward of {task!r}, of which there is no example")
        chosen = [
            i for i, example in enumerate(self.examples)
            if all(matches(column_value(example, column), wanted) for column, wanted in spec.where.items())
        ]  # fmt: skip
        if by_column:  # equal ones stay as they are in the data
            values = {i: column_value(self.examples[i], spec.column) for i in chosen}
            for i, value in values.items():
                row = f"example {self.examples[i].uid!r} has {value!r} there"
                need(is_finite_number(value), f"{told}: order {spec.order!r}: {row}")
            sign = -1 if spec.order.startswith("-") else 1
            chosen.sort(key=lambda i: sign * values[i])
        shares = []
        for task, n in split_proportionally(self.per_step, spec.mix or {"": 1.0}).items():
            of = [i for i in chosen if task in ("", tasks[i])]
            of_task = f" of task {task}" if task else ""
            need(n > 0, f"{told}: --prompts-per-step {self.per_step} leaves no example{of_task}; raise it or the share")
            need(len(of) >= n, f"{told} has {len(of)} examples{of_task}, and a batch takes {n} of them; loosen `where` "
                 "or lower --prompts-per-step")
            shares.append((of, n))
        return shares

    def stage_index(self, step: int) -> int:
        """Of the stage that a step, counted from 0, belongs to."""
        return sum(spec.first_step <= step for spec in self.specs) - 1

    def current_stage(self, step: int) -> CurriculumStage:
        """What rewards are told; `options` by task. A new stage is printed."""
        spec = self.specs[self.stage_index(step)]
        if spec is not self.printed:
            n = sum(len(of) for of, _ in self.shares[spec.number])
            print0(f"curriculum: after {spec.first_step} steps stage {spec.number + 1} of {len(self.specs)}, "
                   f"{spec.name or 'unnamed'}: {n} of {len(self.examples)} examples")
        self.printed = spec
        return spec.stage

    def stages(self) -> list[tuple[int, CurriculumStage]]:
        """Each with its first step."""
        return [(spec.first_step, spec.stage) for spec in self.specs]

    def select_batch(
        self, step: int, position: int, round: int, memory: CurriculumState, ahead: Collection[str] | None = None
    ) -> list[Any]:
        """The examples of a round of a step that began at a position of the data. `ahead`: where rounds are begun
        before the rates of earlier ones are known, uids that are being sampled; by rates they come last."""
        number = self.stage_index(step)
        spec, chosen = self.specs[number], []
        for of, n in self.shares[number]:
            if spec.needs_solve_rates:
                start = round * n if ahead is None else 0
                of = self._select_by_solve_rate(spec, of, position, memory.get("rates", {}))
                of.sort(key=lambda i: self.examples[i].uid in (ahead or ()))  # stable: they keep their order
            elif spec.order:
                start = (position + round - memory.get("began", 0)) * n
            else:
                start = 0
                of = [of[k] for k in shuffled_batch(position + round, len(of), n, self.seed)]
            chosen += [of[(start + k) % len(of)] for k in range(n)]
        return [self.examples[i] for i in chosen]

    def _select_by_solve_rate(
        self, spec: CurriculumStageConfig, of: list[int], position: int, rates: dict
    ) -> list[int]:
        """First those that are solved as often as the stage wants, the ones tried least often in front; then those that
        come nearest to it. Equal ones are shuffled."""
        order = torch.Generator().manual_seed(derive_seed(self.seed, "order", position))
        ties = torch.randperm(len(of), generator=order).tolist()
        least, most = spec.solved.get("least", 0.0), spec.solved.get("most", 1.0)
        keys = []
        for place, (i, tie) in enumerate(zip(of, ties, strict=True)):
            rate, tries = rates.get(self.examples[i].uid, (0.0, 0))
            off = max(least - rate, rate - most, 0.0) if tries else 0.0
            rank = {SOLVED_KEY: rate, f"-{SOLVED_KEY}": -rate, "": 0}.get(spec.order, place)  # else they are in order
            keys.append((off, tries, rank, tie, i))
        return [i for *_, i in sorted(keys)]

    def after_step(
        self, memory: CurriculumState, step: int, position: int, solved: Mapping[str, float]
    ) -> CurriculumState:
        """With the mean accuracy of a step's groups, if a stage asks for it; the position is the next step's."""
        began = position if self.stage_index(step + 1) != self.stage_index(step) else memory.get("began", 0)
        if not any(spec.needs_solve_rates for spec in self.specs):
            return {"began": began}
        updated = dict(memory.get("rates", {}))
        for uid, now in sorted(solved.items()):
            rate, tries = updated.get(uid, (now, 0))
            updated[uid] = [rate + (now - rate) * max(SOLVE_RATE_WEIGHT, 1 / (tries + 1)), tries + 1]
        return {"began": began, "rates": updated}

    def metrics(self, step: int, memory: CurriculumState) -> dict[str, float]:
        metrics = {"curriculum/stage": float(self.stage_index(step))}
        if rates := memory.get("rates"):
            solved = fmean(rate for rate, _ in rates.values())
            metrics |= {"curriculum/tried": float(len(rates)), "curriculum/solved": solved}
        return metrics
