r"""Write 32 toy rows per split of the data sets of runs/recipe.sh, as their authors publish them: the same files,
columns and encodings of images and answers. Answers have the forms that occur there.

    python tests/published_layouts.py FOLDER [NAME ...]    # names of the data sets in runs/recipe.sh; default: all

Columns are those of the dataset cards of hiyouga/geometry3k, AI4Math/MathVista and TIGER-Lab/ViRL39K; of R1-V's data
sets and test questions as its scripts and other trainers' code, which names the columns, read them (docs/recipes.md
names the sources).
"""

import csv
import io
import json
import random
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

N = 32
GEOMETRY = (r"2\sqrt{3}", "60", "3.5", r"\frac{5}{2}", r"8\pi")  # truths of Geometry3K
GEOQA = ("145°", "2√{3}", "5cm", "3.6", r"\frac{1}{2}")  # as written in GeoQA's solutions
VIRL39K = (r"17^\circ", "B", "42", r"\frac{3}{4}", "red", "Yes", r"5 \text{ cm}", "x=3", "(1, 2)", "The lion")


def drawing(rng: random.Random) -> tuple[bytes, int]:
    """Return a PNG file with one to nine discs, and their number."""
    image, n = Image.new("RGB", (96, 64), "white"), rng.randint(1, 9)
    for i in range(n):
        x, y = 4 + 18 * (i % 5), 8 + 28 * (i // 5)
        ImageDraw.Draw(image).ellipse((x, y, x + 14, y + 14), fill=rng.choice(("red", "blue", "green")))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), n


def embedded(data: bytes, path: str | None = None) -> dict:
    """Return a cell of the hub's type Image."""
    return {"bytes": data, "path": path}


def write_parquet(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def geo3k(folder: Path, images: list[tuple[bytes, int]]) -> None:
    for split in ("train", "validation", "test"):
        rows = [{"images": [embedded(data)], "problem": f"<image>Find x in figure {i}.",
                 "answer": GEOMETRY[i % len(GEOMETRY)]} for i, (data, _) in enumerate(images)]
        write_parquet(folder / f"geometry3k/data/{split}-00000-of-00001.parquet", rows)


def clevr(folder: Path, images: list[tuple[bytes, int]]) -> None:
    rows = [{"image": embedded(data, f"CLEVR_trainA_{i:06}.png"), "problem": "How many items are there in the image?",
             "solution": f"<answer> {n} </answer>"} for i, (data, n) in enumerate(images)]
    write_parquet(folder / "clevr/data/train-00000-of-00001.parquet", rows)
    for i, (data, _) in enumerate(images):
        write_file(folder / f"superclevr/images/superCLEVR_new_{i:06}.png", data)
    rows = [{"image_path": f"./images/superCLEVR_new_{i:06}.png", "ground_truth": n,
             "question": "How many different items are there in the image?"} for i, (_, n) in enumerate(images)]
    write_jsonl(folder / "superclevr/test.jsonl", rows)


def geoqa(folder: Path, images: list[tuple[bytes, int]]) -> None:
    truths = [GEOQA[i % len(GEOQA)] for i in range(N)]
    rows = [{"image": embedded(data), "problem": f"What is the measure of angle {i}?",
             "solution": f"<answer> {truths[i]} </answer>"} for i, (data, _) in enumerate(images)]
    write_parquet(folder / "geoqa/data/train-00000-of-00001.parquet", rows)
    (folder / "Geo170K").mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "Geo170K/images.zip", "w") as file:
        for i, (data, _) in enumerate(images):
            file.writestr(f"images/test/{i}.png", data)
    rows = [{"image_path": f"./Geo170K/images/test/{i}.png", "question": f"What is the length of side {i}?",
             "ground_truth": truth} for i, truth in enumerate(truths)]
    write_jsonl(folder / "geoqa_test.jsonl", rows)


def virl39k(folder: Path, images: list[tuple[bytes, int]]) -> None:
    rows = []
    for i in range(N):
        names = [f"images/Processed-{i}-{j}.png" for j in range(1 + i % 2)]  # some questions have two images
        truth = VIRL39K[i % len(VIRL39K)]
        choices = "\nChoices:\nA. 10\nB. 20" if truth == "B" else ""
        rows.append({"question": f"{'<image>' * len(names)}\nSolve problem {i}.{choices}",
                     "answer": rf"\boxed{{{truth}}}", "PassRate_32BTrained": 0.5,
                     "PassRate_7BBase": -1.0, "category": "(GradeSchool) Geometric", "source": "Processed",
                     "qid": f"Processed-{i}", "image": names})
    write_parquet(folder / "virl39k/39Krelease.parquet", rows)
    with zipfile.ZipFile(folder / "virl39k/images.zip", "w") as file:
        for i, row in enumerate(rows):
            for name in row["image"]:
                file.writestr(name, images[i][0])
    rows = []
    for i, (data, n) in enumerate(images):
        choices = [str(n), str(n + 1)] if i % 2 else None
        rows.append({"pid": str(i), "question": "How many discs are there?", "image": f"images/{i}.jpg",
                     "decoded_image": embedded(data), "choices": choices, "unit": None,
                     "precision": None if i % 2 else 1.0, "answer": str(n), "answer_type": "text" if i % 2 else "float",
                     "question_type": "multi_choice" if i % 2 else "free_form", "metadata": {"category": "math-vqa"},
                     "query": "Hint: answer the question. How many discs are there?"})
    write_parquet(folder / "mathvista/data/testmini-00000-of-00001.parquet", rows)


def geospot(folder: Path, images: list[tuple[bytes, int]]) -> None:
    for split in ("train", "test"):
        for i, (data, _) in enumerate(images):
            picture = io.BytesIO()
            Image.open(io.BytesIO(data)).save(picture, "JPEG")
            write_file(folder / f"osv5m/images/{split}/00/{1000 + i}.jpg", picture.getvalue())
        with (folder / f"osv5m/{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "latitude", "longitude", "thumb_original_url", "country", "region", "city"])
            for i in range(N):
                place = ("FR", "Île-de-France", "Paris") if i % 2 else ("JP", "Kyoto", "Kyoto")
                writer.writerow([1000 + i, 35 + i / 8, 2 + i / 8, f"https://example.com/{i}.jpg", *place])


WRITERS = {write.__name__: write for write in (geo3k, clevr, geoqa, virl39k, geospot)}


def write_all(folder: Path, names: Iterable[str] = WRITERS) -> None:
    rng = random.Random(0)
    images = [drawing(rng) for _ in range(N)]
    for name in names:
        WRITERS[name](folder, images)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]), sys.argv[2:] or WRITERS)
