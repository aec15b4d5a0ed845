"""Experiment trackers: --report-to tensorboard wandb. They are optional and not installed with this project.

A tracker gets the rows of metrics.jsonl, with the same names and steps, and tables of samples with their images. It
must never stop a run: if one fails, a warning is printed once and the tracker is switched off.
"""

import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from errors import describe_error, nearest, need
from prepare_data import Example, decode_image
from report.page.thumbnails import shown_images

PROMPTS = 8  # per table of samples
MAX_TRACKED_IMAGE_SIDE = 512  # pixels of the longer side of an image
INIT_SECONDS = 60.0  # time limit for the start of wandb
FINISH_SECONDS = 300.0  # time limit for sending the remaining data; unsent data stays on the disk (wandb sync)


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError if a tracker is unknown or not installed."""
    for name in names:
        need(name in TRACKERS, f"--report-to {name}: must be one of {', '.join(TRACKERS)}{nearest(name, TRACKERS)}")
        need(importlib.util.find_spec(name), f"--report-to {name}: {name} is not installed; pip install {name}, or "
             "leave the flag out")  # fmt: skip


class Trackers:
    """All trackers of a run, on rank 0. An exception in one of them switches off only that one."""

    def __init__(self, names: Sequence[str], out: Path, run_info: Mapping[str, Any], start: int):
        """`run_info`: the contents of run.json. `start`: the step after which the run resumes, or 0."""
        self.active: dict[str, Any] = dict.fromkeys(names)
        self._each(lambda name: self.active.update({name: TRACKERS[name](out, run_info, start)}))

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log a row of metrics.jsonl, or metrics added to it later; values that are not finite are left out."""
        numbers = {name: float(x) for name, x in metrics.items() if x is not None and np.isfinite(x)}
        self._each(lambda name: self.active[name].log(step, numbers))

    def samples(self, step: int, records: Sequence[dict], examples: Mapping[str, Example]) -> None:
        """Log the samples of a step (see report/samples.py); `examples` are the prompts as the model saw them, by
        uid."""
        self._each(lambda name: self.active[name].samples(step, records[:PROMPTS], examples))

    def close(self) -> None:
        """Close all trackers."""
        self._each(lambda name: self.active.pop(name).close())

    def _each(self, call: Callable[[str], None]) -> None:
        """Call a function for each tracker. If it raises, print a warning and switch that tracker off."""
        for name in list(self.active):
            try:
                call(name)
            except Exception as error:  # a service or its client may raise anything, and the run is more important
                self.active.pop(name, None)
                tqdm.write(f"warning: --report-to {name} failed ({describe_error(error)}) and is switched off; the run "
                           "continues, and metrics.jsonl has all metrics")  # fmt: skip


class TensorBoard:
    """Writes event files to OUT/tensorboard. A resumed run purges the steps after its checkpoint, as they are
    repeated."""

    def __init__(self, out: Path, run_info: Mapping[str, Any], start: int):
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(str(out / "tensorboard"), purge_step=start + 1 if start else 0)
        self.board.add_text("configuration", indented(json.dumps(run_info, indent=2, default=str)), start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.board.add_scalar(name, value, step)
        self.board.flush()

    def samples(self, step: int, records: Sequence[dict], examples: Mapping[str, Example]) -> None:
        for index, record in enumerate(records):
            example = examples[record["uid"]]
            texts = [f"{name}: {text}" for row in sample_rows(record, example) for name, text in row.items()]
            self.board.add_text(f"samples/{index}", indented("\n".join(texts)), step)
            # the images of the prompt, then those of each episode
            files = chain(shown_images(example), *(s.get("images", ()) for s in record["samples"]))
            for number, image in enumerate(example_images(files)):
                self.board.add_image(f"samples/{index}/{number}", np.asarray(image), step, dataformats="HWC")

    def close(self) -> None:
        self.board.close()


class WandB:
    """Logs to Weights & Biases. The project is WANDB_PROJECT, or the name of the folder that contains OUT; the run has
    the name of OUT. Its id is stored in OUT, so that a resumed run continues the same wandb run; repeated steps are
    logged again."""

    def __init__(self, out: Path, run_info: Mapping[str, Any], start: int):
        import wandb

        folder = out.absolute()
        os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb"))  # where images are stored until they are sent
        id_file = out / "wandb_id"
        self.wandb = wandb
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or folder.parent.name or "runs",
            name=folder.name,
            id=id_file.read_text().strip() if start and id_file.is_file() else None,
            resume="allow",
            dir=str(out),
            config={**run_info, **run_info["args"]},
            settings=wandb.Settings(
                init_timeout=INIT_SECONDS,
                login_timeout=int(INIT_SECONDS),
                finish_timeout=FINISH_SECONDS,
                console="off",  # do not capture the run's output
                quiet=True,
            ),
        )
        id_file.write_text(self.run.id + "\n")
        # wandb's own step can only increase, but a resumed run logs the steps after its checkpoint again
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({"step": step, **metrics})

    def samples(self, step: int, records: Sequence[dict], examples: Mapping[str, Example]) -> None:
        rows = []
        for record in records:
            example = examples[record["uid"]]
            prompt_images = list(map(self.wandb.Image, example_images(shown_images(example))))
            for row, s in zip(sample_rows(record, example), record["samples"], strict=True):
                images = prompt_images + list(map(self.wandb.Image, example_images(s.get("images", ()))))
                rows.append(row | {f"image {i}": image for i, image in enumerate(images, 1)})
        columns = list(dict.fromkeys(chain.from_iterable(rows)))  # the number of images differs between prompts
        data = [[row.get(name) for name in columns] for row in rows]
        self.run.log({"step": step, "samples": self.wandb.Table(columns, data)})

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, type] = {"tensorboard": TensorBoard, "wandb": WandB}  # value of --report-to, also the package name


# ----------------------------------------------------------------------------------------------------------------------
# Content of samples


def example_images(files: Iterable[bytes]) -> list[Image.Image]:
    """Return images as the model saw them, reduced to at most MAX_TRACKED_IMAGE_SIDE pixels."""
    images = list(map(decode_image, files))
    for image in images:
        image.thumbnail((MAX_TRACKED_IMAGE_SIDE, MAX_TRACKED_IMAGE_SIDE))
    return images


def sample_rows(record: Mapping[str, Any], example: Example) -> list[dict[str, Any]]:
    """Return a row for each sample of a prompt: the prompt, the response (episodes turn by turn) and the rewards."""
    prompt = "\n".join(f"{m['role']}: {m['content']}" for m in example.messages)
    rows = []
    for s in record["samples"]:
        turns = [f"{m['role']}: {m['content']}" for m in s.get("messages", ())]
        row = {"uid": record["uid"], "prompt": prompt, "truth": record["ground_truth"]}
        row |= {"response": "\n".join(turns) or s["text"], "finish_reason": s["finish_reason"]}
        row |= {"reward": s["rewards"].get("reward"), "rewards": json.dumps(s["rewards"]), "advantage": s["advantage"]}
        rows.append(row)
    return rows


def indented(text: str) -> str:
    """Return a text as a markdown code block, so that it is shown unchanged."""
    return "    " + text.replace("\n", "\n    ")
