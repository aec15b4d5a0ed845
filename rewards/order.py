"""Which examples a step trains on: in the order of the data, or as a curriculum says. Functions of the step, so that
resuming is exact."""

from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from errors import need, plug_in
from reward import CurriculumStage, find_tasks, task_name
from utils import derive_seed

# What a curriculum carries from step to step, as checkpoints keep it: "began", the position of the data where the stage
# began; "rates", uid -> [running mean accuracy of its groups, how many there were]
CurriculumState = dict[str, Any]


def shuffled_batch(position: int, n_examples: int, per_step: int, seed: int) -> list[int]:
    """Return the indices of the examples of the batch at a 0-based position of the data, a function of it alone. The
    position is the step, unless steps sample more than once (--max-gen-batches); then checkpoints keep it.

    Each epoch is a fresh shuffle; what is left over after its last full batch (another part each epoch) is not used."""
    epoch, batch = divmod(position, n_examples // per_step)
    order = torch.randperm(n_examples, generator=torch.Generator().manual_seed(derive_seed(seed, "order", epoch)))
    return order[batch * per_step : (batch + 1) * per_step].tolist()


class DataOrder:
    """A run without stages. rewards.curriculum.Curriculum has the same methods."""

    def __init__(self, examples: Sequence[Any], per_step: int, seed: int):
        self.examples = examples
        self.per_step = per_step
        self.seed = seed

    def stage_index(self, step: int) -> int:
        return 0

    def current_stage(self, step: int) -> CurriculumStage:
        return CurriculumStage()

    def stages(self) -> list[tuple[int, CurriculumStage]]:
        return [(0, CurriculumStage())]

    def select_batch(
        self, step: int, position: int, round: int, memory: CurriculumState, ahead: Collection[str] | None = None
    ) -> list[Any]:
        return [
            self.examples[i] for i in shuffled_batch(position + round, len(self.examples), self.per_step, self.seed)
        ]

    def after_step(
        self, memory: CurriculumState, step: int, position: int, solved: Mapping[str, float]
    ) -> CurriculumState:
        return {}

    def metrics(self, step: int, memory: CurriculumState) -> dict[str, float]:
        return {}


def find_stages(file: str | None, examples: Sequence[Any]) -> tuple[ModuleType | None, Any]:
    """Return rewards/curriculum.py and the stages of --curriculum, or else those of the only task of these examples
    that has some; (None, None) without any."""
    if file == "none":
        return None, None
    if file:
        curriculum = plug_in("rewards.curriculum", f"--curriculum {file}")
        return curriculum, curriculum.read_stages(file)
    present = {task_name(example.data_source) for example in examples}
    tasks = {name: task for name, task in find_tasks().items() if name in present}
    own = {name: task.CURRICULUM for name, task in tasks.items() if hasattr(task, "CURRICULUM")}
    need(len(own) < 2, f"the tasks {' and '.join(own)} each have stages of their own; use --curriculum FILE or none")
    for name, stages in own.items():
        curriculum = plug_in("rewards.curriculum", f"the stages of task {name}", "use --curriculum none")
        return curriculum, curriculum.parse_stages(stages, f"the curriculum of task {name}")
    return None, None


def make_order(file: str | None, examples: Sequence[Any], per_step: int, seed: int) -> Any:
    """Return a DataOrder, or the Curriculum of --curriculum or of the examples' task."""
    curriculum, specs = find_stages(file, examples)
    return curriculum.Curriculum(specs, examples, per_step, seed) if curriculum else DataOrder(examples, per_step, seed)


def load_last_stage(file: str | None, examples: Sequence[Any]) -> tuple[int, CurriculumStage]:
    """Return the first step of the last stage, and that stage: evaluations grade for it, so that their figures
    compare."""
    _, specs = find_stages(file, examples)
    return (specs[-1].first_step, specs[-1].stage) if specs else (0, CurriculumStage())
