"""Where else the numbers of a run go: --report-to tensorboard wandb. Each is installed by whoever wants it.

A tracker gets what metrics.jsonl gets, under the same names and steps, and tables of samples with their images. It must
never stop a run: one that fails is told of once and switched off.
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

from errors import describe_error, need
from prepare_data import Example, decode_image

PROMPTS = 8  # of a table of samples
MAX_TRACKED_IMAGE_SIDE = 512  # pixels of an image's longer side there
INIT_SECONDS = 60.0  # that wandb may take to begin, before it is given up
FINISH_SECONDS = 300.0  # and to send what is left; what is not sent by then is on the disk (wandb sync)


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError if a tracker is unknown or not installed."""
    for name in names:
        need(name in TRACKERS, f"--report-to {name}: must be one of {', '.join(TRACKERS)}")
        need(importlib.util.find_spec(name), f"--report-to {name}: {name} is not installed; pip install {name}, or leave "
             "the flag out")  # fmt: skip


class Trackers:
    """All of a run, on rank 0: what one of them raises ends that one alone."""

    def __init__(self, names: Sequence[str], out: Path, described: Mapping[str, Any], start: int):
        """`described`: what run.json has. `start`: the step that the run goes on after."""
        self.active: dict[str, Any] = dict.fromkeys(names)
        self._each(lambda name: self.active.update({name: TRACKERS[name](out, described, start)}))

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Tell a row of metrics.jsonl, or what comes to one later; only what is a number."""
        numbers = {name: float(x) for name, x in metrics.items() if x is not None and np.isfinite(x)}
        self._each(lambda name: self.active[name].log(step, numbers))

    def samples(self, step: int, records: Sequence[dict], examples: Mapping[str, Example]) -> None:
        """Tell the samples of a step (see report/samples.py), with what their prompts showed, by uid."""
        self._each(lambda name: self.active[name].samples(step, records[:PROMPTS], examples))

    def close(self) -> None:
        self._each(lambda name: self.active.pop(name).close())

    def _each(self, do: Callable[[str], None]) -> None:
        """Turn whatever a tracker raises into a warning, and switch the tracker off."""
        for name in list(self.active):
            try:
                do(name)
            except Exception as error:  # whatever a service or its client comes up with: the run is worth more
                self.active.pop(name, None)
                tqdm.write(f"warning: --report-to {name} failed ({describe_error(error)}); it gets nothing more of this "
                           "run, which goes on; metrics.jsonl has everything")  # fmt: skip


class TensorBoard:
    """OUT/tensorboard. Steps after the checkpoint that a run goes on from are purged: they happen again."""

    def __init__(self, out: Path, described: Mapping[str, Any], start: int):
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(str(out / "tensorboard"), purge_step=start + 1 if start else 0)
        self.board.add_text("configuration", indented(json.dumps(described, indent=2, default=str)), start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.board.add_scalar(name, value, step)
        self.board.flush()

    def samples(self, step: int, records: Sequence[dict], examples: Mapping[str, Example]) -> None:
        for place, record in enumerate(records):
            example = examples[record["uid"]]
            texts = [f"{name}: {text}" for row in rows_of(record, example) for name, text in row.items()]
            self.board.add_text(f"samples/{place}", indented("\n".join(texts)), step)
            # the prompt's, then each episode's
            files = chain(example.images, *(s.get("images", ()) for s in record["samples"]))
            for number, image in enumerate(example_images(files)):
                self.board.add_image(f"samples/{place}/{number}", np.asarray(image), step, dataformats="HWC")

    def close(self) -> None:
        self.board.close()


class WandB:
    """The project is WANDB_PROJECT, or the name of the folder that OUT lies in; the run has OUT's name. Its id is kept
    in OUT, so that a run that goes on is the same there; the steps that happen again are told again."""

    def __init__(self, out: Path, described: Mapping[str, Any], start: int):
        import wandb

        folder = out.absolute()
        os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb"))  # where images wait until they are sent
        kept = out / "wandb_id"
        self.wandb = wandb
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or folder.parent.name or "runs",
            name=folder.name,
            id=kept.read_text().strip() if start and kept.is_file() else None,
            resume="allow",
            dir=str(out),
            config={**described, **described["args"]},
            settings=wandb.Settings(
                init_timeout=INIT_SECONDS,
                login_timeout=int(INIT_SECONDS),
                finish_timeout=FINISH_SECONDS,
                console="off",  # the terminal is the run's
                quiet=True,
            ),
        )
        kept.write_text(self.run.id + "\n")
        # wandb's own count only rises; a run that goes on tells the steps after its checkpoint once more
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({"step": step, **metrics})

    def samples(self, step: int, records: Sequence[dict], examples: Mapping[str, Example]) -> None:
        rows = []
        for record in records:
            example = examples[record["uid"]]
            asked = list(map(self.wandb.Image, example_images(example.images)))
            for row, s in zip(rows_of(record, example), record["samples"], strict=True):
                images = asked + list(map(self.wandb.Image, example_images(s.get("images", ()))))
                rows.append(row | {f"image {i}": image for i, image in enumerate(images, 1)})
        columns = list(dict.fromkeys(chain.from_iterable(rows)))  # prompts have different numbers of images
        data = [[row.get(name) for name in columns] for row in rows]
        self.run.log({"step": step, "samples": self.wandb.Table(columns, data)})

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, type] = {"tensorboard": TensorBoard, "wandb": WandB}  # --report-to NAME, also pip's name


# ----------------------------------------------------------------------------------------------------------------------
# What they show of samples


def example_images(files: Iterable[bytes]) -> list[Image.Image]:
    """Return images as the model saw them, at most LONGEST pixels."""
    images = list(map(decode_image, files))
    for image in images:
        image.thumbnail((MAX_TRACKED_IMAGE_SIDE, MAX_TRACKED_IMAGE_SIDE))
    return images


def rows_of(record: Mapping[str, Any], example: Example) -> list[dict[str, Any]]:
    """Return a row for each sample of a prompt: what was asked and said, episodes turn by turn, and what it earned."""
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
    """Return a text that markdown shows as it is."""
    return "    " + text.replace("\n", "\n    ")
