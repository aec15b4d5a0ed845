"""Curriculum stages: the examples that each step trains on, and the options of their rewards.

A file for --curriculum, in TOML or JSON, has a list of stages. All keys but `from` are optional:

    [[stages]]
    name = "easy"                       # name that is printed and passed to the reward
    from = 0                            # first step of the stage; 0 for the first stage
    where.answer_type = ["count"]       # examples with one of these values in a column of extra_info, or data_source
    where.difficulty = { most = 3 }     # examples with a number of at least `least` and at most `most`
    solved = { most = 0.9 }             # examples with a solve rate in this range, or that were never tried
    mix = { geo3k = 0.75, vqa = 0.25 }  # share of each task in a batch
    reward.geospot = { tolerance_km = 500 }  # options of a task's reward

A task may define its own stages in the same form: `CURRICULUM` in its file, for runs without --curriculum.
--curriculum none trains without stages.
"""

import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from errors import as_user_error, nearest_path, need
from reward import CurriculumStage, task_name
from rewards.order import CurriculumState, DataOrder, shuffled_batch
from settings import is_finite_number
from utils import derive_seed, print0

SOLVE_RATE_WEIGHT = 0.25  # weight of the newest group in an example's running solve rate, once there are four groups
SOLVED_KEY = "solved"
FILTER_BOUNDS = {"least", "most"}
STAGE_KEYS = {"name": str, "from": int, "where": dict, SOLVED_KEY: dict, "mix": dict, "reward": dict}


@dataclass(frozen=True)
class CurriculumStageConfig:
    """A stage as the curriculum file defines it."""

    number: int
    label: str = field(compare=False)  # names the file and the stage in messages
    name: str  # this and the following fields are in the order of STAGE_KEYS
    first_step: int
    where: Mapping[str, Any]
    solved: Mapping[str, float]
    mix: Mapping[str, float]
    reward: Mapping[str, Mapping[str, Any]]  # options by task

    @property
    def stage(self) -> CurriculumStage:
        """The stage that is passed to rewards."""
        return CurriculumStage(self.name, self.number, self.reward)


def read_stages(file: str) -> list[CurriculumStageConfig]:
    """Return the stages of a --curriculum file. Raise UserError if it cannot be read or is invalid."""
    with as_user_error((OSError, UnicodeDecodeError), f"--curriculum {file}{nearest_path(file)}"):
        text = Path(file).read_text()
    with as_user_error((ValueError, RecursionError), f"--curriculum {file}: neither TOML nor JSON"):
        content = json.loads(text) if file.endswith(".json") else tomllib.loads(text)
    tables = content.get("stages") if isinstance(content, dict) and set(content) == {"stages"} else None
    need(isinstance(tables, list) and tables, f"--curriculum {file}: expected a list `stages` and nothing else")
    return parse_stages(tables, f"--curriculum {file}")


def parse_stages(tables: Sequence[Any], source: str) -> list[CurriculumStageConfig]:
    """Return the stages in a list of tables, checked. `source` names the list in messages."""
    stages = [parse_stage(table, number, f"{source}: stage {number + 1}") for number, table in enumerate(tables)]
    steps = [stage.first_step for stage in stages]
    need(steps[0] == 0 and all(a < b for a, b in zip(steps, steps[1:], strict=False)),
         f"{source}: stages begin at steps {steps}; begin the first at 0 and each later one after the one before")
    return stages


def parse_stage(table: Any, number: int, label: str) -> CurriculumStageConfig:
    """Return a stage. Raise UserError if its table is invalid."""
    need(isinstance(table, dict) and "from" in table, f"{label} is {table!r}; give a table with `from`, its first step")
    unknown = sorted(set(table) - set(STAGE_KEYS))
    need(not unknown, f"{label} has unknown keys: {', '.join(unknown)}; known: {', '.join(STAGE_KEYS)}")
    for key, value in table.items():
        need(type(value) is STAGE_KEYS[key], f"{label}: {key} is {value!r}, expected type {STAGE_KEYS[key].__name__}")
    stage = CurriculumStageConfig(
        number, label, *(table.get(key, value_type()) for key, value_type in STAGE_KEYS.items())
    )
    for column, condition in {SOLVED_KEY: stage.solved, **stage.where}.items():
        if isinstance(condition, dict):
            is_valid = set(condition) <= FILTER_BOUNDS and all(map(is_finite_number, condition.values()))
            need(is_valid, f"{label}: {column} is {condition}, expected numbers under `least` and `most`")
    least, most = stage.solved.get("least", 0), stage.solved.get("most", 1)
    need(0 <= least <= most <= 1, f"{label}: solved is {stage.solved}, expected shares from 0 to 1, least below most")
    is_valid = all(is_finite_number(share) and share > 0 for share in stage.mix.values())
    need(is_valid, f"{label}: mix is {stage.mix}, expected a share above 0 for each task")
    is_valid = all(isinstance(options, dict) for options in stage.reward.values())
    need(is_valid, f"{label}: reward is {stage.reward}, expected a table of options for each task")
    return stage


def column_value(example: Any, name: str) -> Any:
    """Return an example's task for "data_source", else its value in a column of extra_info (None if it is missing)."""
    return task_name(example.data_source) if name == "data_source" else example.extra.get(name)


def matches(value: Any, condition: Any) -> bool:
    """Return whether a column's value meets a condition of `where`. A missing value does not meet any."""
    if isinstance(condition, dict):
        return is_finite_number(value) and condition.get("least", value) <= value <= condition.get("most", value)
    return value in (condition if isinstance(condition, list) else [condition])


def split_proportionally(total: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Return whole numbers in the proportions of `shares` whose sum is `total`."""
    ends = [round(total * part / sum(shares.values())) for part in accumulate(shares.values())]
    return {name: end - start for name, start, end in zip(shares, [0, *ends], ends, strict=False)}


class Curriculum(DataOrder):
    """The curriculum stages of a run over its examples. Making one raises UserError if a stage has too few examples."""

    def __init__(self, configs: Sequence[CurriculumStageConfig], examples: Sequence[Any], per_step: int, seed: int):
        super().__init__(examples, per_step, seed)
        self.configs = configs
        self.printed: CurriculumStageConfig | None = None
        self.shares = list(map(self._shares, configs))  # per stage and task: (example indices, number in a batch)

    def _shares(self, config: CurriculumStageConfig) -> list[tuple[list[int], int]]:
        """Return the example indices of each task of a stage, and how many of them go in a batch."""
        label, tasks = config.label, [task_name(example.data_source) for example in self.examples]
        for column in config.where:
            need(column == "data_source" or any(column in example.extra for example in self.examples),
                 f"{label}: no example has a column {column!r} in its extra_info")
        for task in config.reward:
            need(task in tasks, f"{label} has options for the reward of {task!r}, but no example has this task")
        chosen = [
            i for i, example in enumerate(self.examples)
            if all(matches(column_value(example, column), condition) for column, condition in config.where.items())
        ]  # fmt: skip
        shares = []
        for task, n in split_proportionally(self.per_step, config.mix or {"": 1.0}).items():
            members = [i for i in chosen if task in ("", tasks[i])]
            of_task = f" of task {task}" if task else ""
            need(n > 0,
                 f"{label}: --prompts-per-step {self.per_step} leaves no example{of_task}; raise it or the share")
            need(len(members) >= n, f"{label} has {len(members)} examples{of_task}, but a batch needs {n}; loosen "
                 "`where` or lower --prompts-per-step")
            shares.append((members, n))
        return shares

    def stage_index(self, step: int) -> int:
        """Return the index of the stage of a step. Both count from 0."""
        return sum(config.first_step <= step for config in self.configs) - 1

    def current_stage(self, step: int) -> CurriculumStage:
        """Return the stage of a step, which is passed to rewards, and print it if it is new. Its `options` are by
        task."""
        config = self.configs[self.stage_index(step)]
        if config is not self.printed:
            n = sum(len(members) for members, _ in self.shares[config.number])
            print0(f"curriculum: after {config.first_step} steps stage {config.number + 1} of {len(self.configs)}, "
                   f"{config.name or 'unnamed'}: {n} of {len(self.examples)} examples")
        self.printed = config
        return config.stage

    def stages(self) -> list[tuple[int, CurriculumStage]]:
        """Return all stages, each with its first step."""
        return [(config.first_step, config.stage) for config in self.configs]

    def select_batch(
        self, step: int, position: int, index: int, state: CurriculumState, in_flight: Collection[str] | None = None
    ) -> list[Any]:
        """Return the examples of batch `index` of a step whose first batch is at `position` in the data.

        `in_flight`: the uids that are being sampled, if batches are sampled before the solve rates of earlier ones are
        known (else None). A stage with solve rates takes these examples last."""
        number = self.stage_index(step)
        chosen = [self._take(self.configs[number], members, n, position, index, state, in_flight)
                  for members, n in self.shares[number]]
        return [self.examples[i] for i in chain.from_iterable(chosen)]

    def _take(
        self, config: CurriculumStageConfig, members: list[int], n: int, position: int, index: int,
        state: CurriculumState, in_flight: Collection[str] | None,
    ) -> list[int]:  # fmt: skip
        """Return the n example indices of a batch, from those of a task or of the whole stage."""
        if not config.solved:
            return [members[k] for k in shuffled_batch(position + index, len(members), n, self.seed)]
        start = index * n if in_flight is None else 0
        members = self._select_by_solve_rate(config, members, position, state.get("rates", {}))
        members.sort(key=lambda i: self.examples[i].uid in (in_flight or ()))  # stable: keeps their order
        return [members[(start + k) % len(members)] for k in range(n)]

    def _select_by_solve_rate(
        self, config: CurriculumStageConfig, members: list[int], position: int, rates: dict
    ) -> list[int]:
        """Sort example indices by their distance to the stage's range of solve rates, then by how often they were
        tried. Ties are shuffled."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", position))
        ties = torch.randperm(len(members), generator=generator).tolist()
        least, most = config.solved.get("least", 0.0), config.solved.get("most", 1.0)
        keys = []
        for i, tie in zip(members, ties, strict=True):
            rate, tries = rates.get(self.examples[i].uid, (0.0, 0))
            distance = max(least - rate, rate - most, 0.0) if tries else 0.0
            keys.append((distance, tries, tie, i))
        return [i for *_, i in sorted(keys)]

    def after_step(
        self, state: CurriculumState, step: int, position: int, accuracy: Mapping[str, float]
    ) -> CurriculumState:
        """Return the state after a step. `accuracy` is the mean accuracy of each group of the step, by uid, and updates
        the solve rates if a stage needs them."""
        if not any(config.solved for config in self.configs):
            return {}
        updated = dict(state.get("rates", {}))
        for uid, newest in sorted(accuracy.items()):
            rate, tries = updated.get(uid, (newest, 0))
            updated[uid] = [rate + (newest - rate) * max(SOLVE_RATE_WEIGHT, 1 / (tries + 1)), tries + 1]
        return {"rates": updated}

    def metrics(self, step: int, state: CurriculumState) -> dict[str, float]:
        metrics = {"curriculum/stage": float(self.stage_index(step))}
        if rates := state.get("rates"):
            solved = fmean(rate for rate, _ in rates.values())
            metrics |= {"curriculum/tried": float(len(rates)), "curriculum/solved": solved}
        return metrics
