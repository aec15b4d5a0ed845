"""The motion task, ablations of videos, and film strips.   pytest tests/test_motion.py"""

import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from errors import UserError
from prepare_data import Example, decode_image
from report.ablation import Ablation, check_ablations
from report.page.thumbnails import shown_images
from rollout import identity
from sources.images import encode_png
from sources.videos import Video
from tasks import motion


def frames_of(video):
    return [np.asarray(decode_image(frame))[..., 0].astype(int) for frame in video.frames]


def lit_pixels(frame):
    """Return the coordinates (y, x) of the bright pixels."""
    return np.argwhere(frame > 128)


def read_answer(kind, video):
    """Return the answer as read from the pixels, independently of how they were drawn."""
    spots = [lit_pixels(frame) for frame in frames_of(video)]
    if kind == "count":
        return str(sum(len(spot) > 0 for spot in spots))
    seen = [spot.mean(axis=0) for spot in spots if len(spot)]
    if kind == "order":
        assert len(seen) == 2 and not len(spots[0])
        return "left" if seen[0][1] < 28 else "right"
    steps = np.diff(seen, axis=0)
    assert len(seen) == 4 and (np.ptp(steps, axis=0) == 0).all()
    y, x = steps[0]
    return ("left" if x < 0 else "right") if x else ("up" if y < 0 else "down")


def test_answers_follow_from_the_pixels_and_no_video_is_in_two_splits():
    seen = {split: list(islice(motion.scenes(split, 3), 300)) for split in ("warm", "train", "test")}
    for media, [(kind, prompt, reply, truth)] in seen["train"]:
        [video] = media
        assert read_answer(kind, video) == truth and truth in reply and prompt.startswith("<video>")
        assert all(frame.shape == (56, 56) for frame in frames_of(video))
    contents = {split: {media[0].frames for media, _ in scenes} for split, scenes in seen.items()}
    assert not contents["test"] & (contents["train"] | contents["warm"])


def test_the_frames_of_order_and_of_a_path_are_the_same_either_way():
    """Only the order of the frames tells: first places of a path are as frequent for left as for right."""
    rng = random.Random(0)
    paths = [motion.draw_direction(rng) for _ in range(4000)]
    for axis, answers in ((0, ("left", "right")), (1, ("up", "down"))):
        first = {a: np.array([frames[0][0][axis] for frames, answer in paths if answer == a]) for a in answers}
        last = {a: np.array([frames[-1][0][axis] for frames, answer in paths if answer == a]) for a in answers}
        assert abs(first[answers[0]].mean() - last[answers[1]].mean()) < 1.5  # backwards, a path is one of the other
    orders = [motion.draw_order(rng) for _ in range(4000)]
    for frames, answer in orders:
        places = [place for places in frames for place in places]
        assert len(places) == 2 and {x < 28 for x, _ in places} == {True, False}
        assert (places[0][0] < 28) == (answer == "left")
    middle = Counter(frames[3][0] == next(filter(None, frames))[0] for frames, _ in orders if frames[3])
    assert 0.45 < middle[True] / middle.total() < 0.55


def test_rows_of_the_toy_have_videos_and_the_answer_of_the_reversed_video():
    rows = list(motion.toy(30, "test", 0))
    assert {row["extra_info"]["answer_type"] for row in rows} == set(motion.ANSWER_TYPES)
    for row in rows:
        [video] = row["videos"]
        backwards = Video(tuple(video["frames"][::-1]), video["fps"])
        assert read_answer(row["extra_info"]["answer_type"], backwards) == row["extra_info"]["reversed_answer"]
        assert not row["images"] and video["fps"] == 2


def example(uid, *colours, truth="left", **extra):
    from PIL import Image

    frames = tuple(encode_png(Image.new("RGB", (28, 28), (c, c, c))) for c in colours)
    messages = [{"role": "user", "content": "<video>Where to?"}]
    return Example(uid, "motion", messages, [], truth, extra, [Video(frames, 2.0)])


def colours(example):
    return [int(frame[0, 0]) for frame in frames_of(example.videos[0])]


@pytest.mark.parametrize("kind, expected", [
    ("first_frame", [10] * 5), ("middle_frame", [30] * 5), ("reversed", [50, 40, 30, 20, 10]),
])  # fmt: skip
def test_frames_are_replaced_as_the_ablation_says(kind, expected):
    a = example("a", 10, 20, 30, 40, 50)
    changed = Ablation(kind, [a], identity, 0).reset_fn(a)
    assert colours(changed) == expected and changed.ground_truth == "left" and changed.videos[0].fps == 2
    assert colours(a) == [10, 20, 30, 40, 50]


def test_permuted_frames_are_the_same_frames_in_an_order_that_depends_on_seed_and_row():
    rows = [example(str(i), 10, 20, 30, 40, 50) for i in range(20)]
    orders = [tuple(colours(Ablation("permuted", rows, identity, 0).reset_fn(row))) for row in rows]
    assert all(sorted(order) == [10, 20, 30, 40, 50] for order in orders) and len(set(orders)) > 10
    assert orders == [tuple(colours(Ablation("permuted", rows, identity, 0).reset_fn(row))) for row in rows]
    assert orders != [tuple(colours(Ablation("permuted", rows, identity, 1).reset_fn(row))) for row in rows]


def test_reversed_answer_grades_by_the_answer_of_the_reversed_video():
    row = example("a", 10, 20, reversed_answer="right")
    ablation = Ablation("reversed_answer", [row], identity, 0)
    assert colours(ablation.reset_fn(row)) == [20, 10] and [e.ground_truth for e in ablation.examples] == ["right"]


def test_shuffled_videos_are_another_row_s_with_the_same_number_of_frames():
    rows = [example("a", 10, 20, 30), example("b", 110, 120, 130, 140, 150, 160)]
    a, b = map(Ablation("shuffled", rows, identity, 0).reset_fn, rows)
    assert colours(a) == [110, 130, 150] and colours(b) == [10, 10, 20, 20, 30, 30]
    with pytest.raises(UserError, match="no example has other videos"):
        Ablation("shuffled", rows[:1], identity, 0).reset_fn(rows[0])


def test_an_ablation_without_effect_is_refused():
    video, text = example("a", 10, 20), Example("t", "motion", [{"role": "user", "content": "x"}], [], "1", {})
    check_ablations("--ablate", ["permuted", "blank", "none"], [video, text], "F", None)
    for kinds, rows, message in (
        (["permuted"], [text], "--ablate: no example of F has an image or a video"),
        (["shuffled"], [video, text], "only one example of F has an image or a video"),
        (["reversed_answer"], [video], "row 'a' has no column reversed_answer"),
    ):
        with pytest.raises(UserError, match=message):
            check_ablations("--ablate", kinds, rows, "F", None)
    assert "<video>" not in Ablation("none", [video], identity, 0).reset_fn(video).messages[0]["content"]


def test_a_film_strip_shows_at_most_eight_frames_in_their_place_among_the_images():
    row = example("a", *range(0, 200, 10))
    image = encode_png(decode_image(row.videos[0].frames[0]).resize((56, 28)))
    mixed = Example("m", "motion", [{"role": "user", "content": "<image>a<video>b"}], [image], "1", {}, row.videos)
    first, strip = map(decode_image, shown_images(mixed))
    assert first.size == (56, 28) and strip.size == (8 * 30 - 2, 28)
    shown = [strip.getpixel((30 * i + 5, 5))[0] for i in range(8)]
    assert shown == [0, 30, 50, 80, 110, 140, 160, 190]
    assert shown_images(Example("i", "x", [], [image], "1", {})) == [image]
