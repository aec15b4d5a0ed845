"""The choice of the examples of each step: a shuffle of the data, or a curriculum. It depends only on the step, the
position in the data and the state that checkpoints keep, so a resumed run chooses the same examples."""

from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from errors import need, plug_in
from reward import CurriculumStage, find_tasks, task_name
from utils import derive_seed

# The state of a curriculum, which checkpoints keep: "began", the position in the data where the stage began; "rates",
# uid -> [running mean accuracy of its groups, number of groups]
CurriculumState = dict[str, Any]


def shuffled_batch(position: int, n_examples: int, per_step: int, seed: int) -> list[int]:
    """Return the indices of the examples of the batch at a 0-based position in the data. The position equals the step,
    unless steps sample more than one batch (--max-gen-batches); then checkpoints keep it.

    Each epoch is a fresh shuffle. The examples left over after its last full batch, different ones in each epoch, are
    not used."""
    epoch, batch = divmod(position, n_examples // per_step)
    order = torch.randperm(n_examples, generator=torch.Generator().manual_seed(derive_seed(seed, "order", epoch)))
    return order[batch * per_step : (batch + 1) * per_step].tolist()


class DataOrder:
    """The order of the data in a run without stages. rewards.curriculum.Curriculum has the same methods."""

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
        self, step: int, position: int, index: int, state: CurriculumState, in_flight: Collection[str] | None = None
    ) -> list[Any]:
        return [
            self.examples[i] for i in shuffled_batch(position + index, len(self.examples), self.per_step, self.seed)
        ]

    def after_step(
        self, state: CurriculumState, step: int, position: int, accuracy: Mapping[str, float]
    ) -> CurriculumState:
        return {}

    def metrics(self, step: int, state: CurriculumState) -> dict[str, float]:
        return {}


def find_stages(file: str | None, examples: Sequence[Any]) -> tuple[ModuleType | None, Any]:
    """Return the module rewards.curriculum and the stages of --curriculum; without the flag, the stages of the one
    task of these examples that defines some. Return (None, None) without stages. Raise UserError if several tasks
    define stages."""
    if file == "none":
        return None, None
    if file:
        module = plug_in("rewards.curriculum", f"--curriculum {file}")
        return module, module.read_stages(file)
    present = {task_name(example.data_source) for example in examples}
    tasks = {name: task for name, task in find_tasks().items() if name in present}
    by_task = {name: task.CURRICULUM for name, task in tasks.items() if hasattr(task, "CURRICULUM")}
    need(len(by_task) < 2, f"the tasks {' and '.join(by_task)} all define stages; use --curriculum FILE or none")
    for name, stages in by_task.items():
        module = plug_in("rewards.curriculum", f"the stages of task {name}", "use --curriculum none")
        return module, module.parse_stages(stages, f"the curriculum of task {name}")
    return None, None


def make_order(file: str | None, examples: Sequence[Any], per_step: int, seed: int) -> Any:
    """Return the Curriculum of --curriculum or of the examples' task, or a DataOrder for a run without stages."""
    module, stages = find_stages(file, examples)
    return module.Curriculum(stages, examples, per_step, seed) if module else DataOrder(examples, per_step, seed)


def load_last_stage(file: str | None, examples: Sequence[Any]) -> tuple[int, CurriculumStage]:
    """Return the first step of the last stage, and that stage. Evaluations grade with it, so that their figures are
    comparable."""
    _, stages = find_stages(file, examples)
    return (stages[-1].first_step, stages[-1].stage) if stages else (0, CurriculumStage())
