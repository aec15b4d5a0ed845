"""Tests of tasks/caption.py: metrics compared with worked examples and COCO's code, penalties, cheats, data, toy.

data/caption_reference.json contains the results of pycocoevalcap 1.2 for `random_captions()`. (This is COCO's code, of
104 MB; parts not used here need Java.) With it installed, `python tests/test_caption.py` writes the file again.
"""

import csv
import io
import json
import math
import pickle
import random
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import cpu_limit
from PIL import Image
from scoring import score_batch

from errors import UserError
from prepare_data import ConvertConfig, ToyConfig, make_file, read_examples
from rewards.grade import check_tasks, grade
from tasks import caption
from tasks.caption import Corpus, bleu4, caption_reward, rouge_l, split_words

DATA = Path(__file__).parent / "data" / "caption_reference.json"
METRICS = ("cider", "bleu4", "rouge_l")
PARTS = {*METRICS, "keywords", "length", "repetition", "reward"}


def random_captions(n=100, seed=0):
    """Yield n pairs (caption, references), with 1 to 5 references of 1 to 16 words. Most captions are a changed
    reference."""
    rng = random.Random(seed)
    words = "a the man woman dog cat red blue small large standing sitting on in near with street table ball".split()

    def sentence():
        return rng.choices(words, k=rng.randint(1, 16))

    for _ in range(n):
        references = [sentence() for _ in range(rng.randint(1, 5))]
        given = list(rng.choice(references)) if rng.random() < 0.8 else sentence()
        for _ in range(rng.randint(0, 4)):
            given[rng.randrange(len(given))] = rng.choice(words)
        if rng.random() < 0.3:
            given = given[: rng.randint(1, len(given))] + given
        yield " ".join(given), [" ".join(reference) for reference in references]


def our_scores():
    rows = [(split_words(given), list(map(split_words, references))) for given, references in random_captions()]
    corpus = Corpus()
    for _, references in rows:
        corpus.add(references)
    return [(corpus.cider(*row), bleu4(*row), rouge_l(*row)) for row in rows]


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_a_hundred_random_captions_score_as_in_cocos_code():
    expected = json.loads(DATA.read_text())
    actual = our_scores()
    assert len(actual) == len(expected) == 100
    for i, metric in enumerate(METRICS):
        assert max(abs(ours[i] - theirs[i]) for ours, theirs in zip(actual, expected, strict=True)) < 1e-6, metric
        assert len({round(theirs[i], 6) for theirs in expected}) > 40  # the scores are not all 0 or 1


def test_bleu_of_nltks_worked_example():
    """nltk.translate.bleu_score.sentence_bleu's docstring has 0.5045... for example 1 of Papineni et al. 2002."""
    references = [
        "It is a guide to action that ensures that the military will forever heed Party commands",
        "It is the guiding principle which guarantees the military forces always being under the command of the Party",
        "It is the practical guide for the army always to heed the directions of the party",
    ]
    given = "It is a guide to action which ensures that the military always obeys the commands of the party"
    bleu = bleu4(tuple(given.split()), [tuple(reference.split()) for reference in references])
    assert bleu == pytest.approx(0.5045666840058485, abs=1e-7)


def test_rouge_l_of_lins_worked_example():
    """Lin 2004, section 3.1, "police killed the gunman": 3/4 and 2/4, whatever beta is, because lengths are equal."""
    reference = [split_words("police killed the gunman")]
    assert rouge_l(split_words("police kill the gunman"), reference) == pytest.approx(3 / 4)
    assert rouge_l(split_words("the gunman kill police"), reference) == pytest.approx(2 / 4)


def test_longest_common_subsequence_equals_the_textbooks():
    assert caption.common_subsequence(tuple("ABCBDAB"), tuple("BDCABA")) == 4  # Cormen et al., figure 15.8
    rng = random.Random(0)
    for _ in range(300):
        a, b = (tuple(rng.choices("abcde", k=rng.randint(0, 90))) for _ in range(2))
        table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
        assert caption.common_subsequence(a, b) == table[-1][-1]


def test_cider_by_hand():
    """With two documents without a common word, each n-gram has weight log 2, and an equal text scores 10."""
    corpus = Corpus()
    ball, dog = split_words("a red ball rolls"), split_words("the dog sleeps outside today")
    corpus.add([ball])
    corpus.add([dog])
    assert corpus.size == 2
    assert corpus.cider(ball, [ball]) == pytest.approx(10) and corpus.cider(ball, [dog]) == 0
    # equal: 3 of 4 words, 2 of 3 pairs, 1 of 2 triples, no 4-gram; cosines: 3/4, 2/3, 1/2, 0
    assert corpus.cider(split_words("a red ball flies"), [ball]) == pytest.approx(10 * (3 / 4 + 2 / 3 + 1 / 2) / 4)
    longer = 10 / 4 * (4 / math.sqrt(20) + 3 / math.sqrt(12) + 2 / math.sqrt(6) + 1 / math.sqrt(2))
    assert corpus.cider(split_words("a red ball rolls away"), [ball]) == pytest.approx(longer * math.exp(-1 / 72))
    assert corpus.cider((), [ball]) == 0 and Corpus().cider(ball, [ball]) == 0  # log(size) is 0


def test_split_words():
    text = "A  man's black-and-white “Café”, No. 5!\n"
    assert split_words(text) == ("a", "man", "s", "black-and-white", "café", "no", "5")
    assert split_words("ＲＥＤ ball") == ("red", "ball") and split_words("?!_ ") == ()


# --- keywords and penalties -------------------------------------------------------------------------------------------


def score_parts(given, *references, keywords=()):
    truth = json.dumps({"references": references or ["a red ball on the green grass"], "keywords": list(keywords)})
    return caption_reward(given, truth)


def test_keywords():
    assert caption.parse_caption_truth("A red ball on the grass.").keywords == [("ball",), ("grass",), ("red",)]
    truth = '["a red ball", "the red ball on grass", "a toy"]'  # words of at least half of the references
    assert caption.parse_caption_truth(truth).keywords == [("ball",), ("red",)]
    for given, share in [("ball", 1 / 3), ("a Red, ball!", 2 / 3), ("redball", 0), ("grass red ball", 1), ("", 0)]:
        assert score_parts(given, "a red ball on the grass")["keywords"] == pytest.approx(share)
    assert score_parts("a traffic light", keywords=["traffic light", "car"])["keywords"] == 0.5
    assert score_parts("a light for traffic", keywords=["traffic light"])["keywords"] == 0


def test_length_penalty():
    ten = "one two three four five six seven eight nine ten"
    for n, penalty in [(10, 0), (15, 0), (7, 0), (18, 0.2), (30, 1), (60, 1), (5, 0.25), (1, 0.85), (0, 1)]:
        given = " ".join(f"w{i}" for i in range(n))
        assert score_parts(given, ten)["length"] == pytest.approx(penalty)
    assert score_parts("w " * 5, ten, "one two three")["length"] == 0  # between the shortest and the longest reference


def test_repetition_penalty():
    assert score_parts("a b c d e f")["repetition"] == 0
    assert score_parts("a b a b a b")["repetition"] == pytest.approx(1 - 2 / 5)
    assert score_parts("ball ball ball ball")["repetition"] == pytest.approx(1 - 1 / 3)
    assert score_parts("a b a b", "x y x y x")["repetition"] == 0  # its references repeat as much


def with_counts(references, corpus):
    """Return a ground truth with the document counts of a corpus, as prepare_data.py writes it."""
    counts = {"documents": corpus.size, "frequency": corpus.document_frequencies(list(map(split_words, references)))}
    return json.dumps({"references": references} | counts)


def test_the_total_is_the_weighted_sum():
    corpus = Corpus()
    for _, references in random_captions():
        corpus.add(list(map(split_words, references)))
    for given, references in random_captions():
        score = caption_reward(given, with_counts(references, corpus))
        assert set(score) == PARTS
        total = sum(weight * score[part] for part, weight in caption.METRIC_WEIGHTS.items())
        assert score["reward"] == pytest.approx(total)


# --- cheats -----------------------------------------------------------------------------------------------------------

REFERENCES = ["two red circles", "there are two red circles", "a drawing of two red circles"]
CHEATS = [  # each must earn less than an honest sentence with one mistake
    "", " ", ".", "circles", "red", "two red circles " * 10, "two red circles " * 999, "two two two red red",
    "two red circles there are two red circles a drawing of two red circles",
    "two red circles, three red circles, two blue circles, four green stars, one yellow square, two red squares",
    "one two three four red green blue yellow circles squares triangles stars", "two\u200b red\u200bcir\u200bcles",
    "Describe the image in one sentence.", "<think>two red circles", "<think>two red circles</think>",
    "two red circles<|im_end|>", "<|im_start|>two red circles", "tw0 r3d c1rcles", "twо rеd сirсlеs",
]  # fmt: skip


def corpus_of_shapes():
    corpus = Corpus()
    for row in caption.toy(300, "train", 0):
        corpus.add(caption.parse_caption_truth(row["reward_model"]["ground_truth"]).references)
    return corpus


def test_cheats_earn_less_than_an_honest_mistake():
    truth = with_counts(REFERENCES, corpus_of_shapes())

    def total(given):
        return caption_reward(given, truth)["reward"]

    honest = [total(text) for text in ("three red circles", "two blue circles", "two red squares")]
    assert all(total(text) < min(honest) for text in CHEATS), [t for t in CHEATS if total(t) >= min(honest)]
    for right in [*REFERENCES, "Two red circles.", "<think>Two? Yes.</think> there are two red circles"]:
        assert total(right) > max(honest) + 0.15
    assert total("red circles two") < total("two red circles") - 0.15
    assert total("") == pytest.approx(-0.5)


# --- ground truths, arbitrary texts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "truth", ["", "...", "[]", "[1]", '["."]', '{"references": "a"}', "{", "[" * 5000, '{"captions": ["a"]}', "[null]"]
)
def test_a_truth_without_a_caption_is_refused(truth):
    with pytest.raises(UserError, match="is neither a caption nor JSON with a list of ref|no reference with a word"):
        caption_reward("a", truth)
    with pytest.raises(UserError, match="row 'row-7': "):
        check_tasks([SimpleNamespace(data_source="caption", ground_truth=truth, extra={}, uid="row-7")])


def test_the_registered_reward_depends_only_on_its_row():
    """Scores depend neither on the process nor on other rows or their order: each row has the counts of its n-grams."""
    corpus, truths = Corpus(), [json.dumps({"references": references}) for _, references in random_captions()]
    for truth in truths:
        corpus.add(caption.parse_caption_truth(truth).references)
    rows = []
    for i, truth in enumerate(truths):
        fields = {
            "documents": corpus.size,
            "frequency": corpus.document_frequencies(caption.parse_caption_truth(truth).references),
        }
        truth = json.dumps(json.loads(truth) | fields)
        rows.append(SimpleNamespace(data_source="caption", extra={}, uid=str(i), ground_truth=truth))
    assert check_tasks(rows) == {"caption": 100}
    given = [text for text, _ in random_captions()]
    scored = score_batch(given, rows)
    caption.parse_caption_truth.cache_clear()
    backwards = score_batch(given[::-1], rows[::-1])[::-1]
    assert (
        scored
        == backwards
        == [pickle.loads(pickle.dumps(grade))(t, r) for t, r in zip(given, rows, strict=True)]
    )
    gaps = []
    for score, text, row, expected in zip(scored, given, rows, json.loads(DATA.read_text()), strict=True):
        assert [score["bleu4"], score["rouge_l"]] == pytest.approx(expected[1:], abs=1e-6)
        words, references = split_words(text), caption.parse_caption_truth(row.ground_truth).references
        own = all(gram in {g for r in references for g in caption.ngrams(r, n)} or corpus.frequency[gram] < 2
                  for n in range(1, 5) for gram in caption.ngrams(words, n))  # fmt: skip
        gaps.append(expected[0] - score["cider"])
        assert not own or score["cider"] == pytest.approx(expected[0], abs=1e-6)  # then it equals COCO's
    assert min(gaps) > -1e-6 and sum(gaps) / len(gaps) < 0.5  # on a scale of 10; never above COCO's
    perfect = score_batch([json.loads(row.ground_truth)["references"][0] for row in rows], rows)
    for row, score in zip(rows, perfect, strict=True):
        words, references = (
            split_words(json.loads(row.ground_truth)["references"][0]),
            caption.parse_caption_truth(row.ground_truth),
        )
        assert score["cider"] == pytest.approx(corpus.cider(words, references.references), abs=1e-6)


def test_odd_captions():
    plain = {"cider": 0.0, "bleu4": 0.0, "rouge_l": 0.0}
    for response in ("", " ", "...", "a " * 4000, "<think>a dog"):
        score = caption_reward(response, '["a dog"]')
        assert score["reward"] < 0 and score.items() >= plain.items() or response.startswith("a ")
    one_word = caption_reward("dog", '["dog"]')
    assert one_word["rouge_l"] == pytest.approx(1) and one_word["cider"] == pytest.approx(
        2.5
    )  # 1 of 4: it has no longer n-grams
    once, twice = (caption_reward("a red dog", json.dumps(["a red dog runs"] * n)) for n in (1, 2))
    assert once == pytest.approx(twice)  # repeating a reference changes nothing
    assert caption_reward("a red dog runs", '["a red dog runs"]')["cider"] == pytest.approx(10)


@pytest.mark.parametrize("counts", [{"documents": 0}, {"documents": "3"}, {"documents": 3, "frequency": [1]},
                                  {"documents": 3, "frequency": {"a": "b"}}, {"documents": None}])  # fmt: skip
def test_invalid_document_counts_are_refused(counts):
    with pytest.raises(UserError, match="invalid document counts; write the file again"):
        caption_reward("a", json.dumps({"references": ["a"]} | counts))


def test_ten_thousand_texts():
    rng = random.Random(0)
    pieces = ["two", "red", "circles", "a", "<think>", "</think>", "<|im_end|>", "\\boxed{", "中文"]
    pieces += list(" ,\n-é\ud800ﬁİ\u200b\u0301𝟒٤_'}")
    texts = [rng.choice(["", " "]).join(rng.choices(pieces, k=rng.randint(0, 40))) for _ in range(10_000)]
    truth = with_counts(REFERENCES, corpus_of_shapes())
    with cpu_limit(100):
        for text in texts:
            score = caption_reward(text, truth)
            assert set(score) == PARTS and all(math.isfinite(value) for value in score.values())
            assert -1 <= score["reward"] <= 1


@pytest.mark.parametrize("piece", ["a", "a ", "a b c ", "-", "a-", "<think>", "</think>", "<|", "\u0301", "ﷺ", " "])
def test_long_texts_are_quick(piece):
    for n in (4000, 100_000):
        with cpu_limit():
            caption_reward(piece * (n // len(piece)), json.dumps(REFERENCES))


# --- data -------------------------------------------------------------------------------------------------------------


def prepare(folder, *files, **options):
    make_file("caption", ToyConfig(input=tuple(map(str, files)), out=str(folder / "out.parquet"), **options))
    return read_examples(folder / "out.parquet", ConvertConfig(out=""))[0]


@pytest.fixture
def image(tmp_path):
    Image.new("RGB", (30, 20), (9, 90, 200)).save(tmp_path / "a.png")
    return tmp_path / "a.png"


def test_rows_of_csv_jsonl_and_parquet(tmp_path, image):
    with open(tmp_path / "one.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "captions", "keywords", "id"])
        writer.writerow(["a.png", '["a blue field", "all blue"]', "blue, field", "7"])
    (tmp_path / "two.jsonl").write_text(json.dumps({"image": "a.png", "caption": "A blue field."}) + "\n")
    cell = {"bytes": image.read_bytes(), "path": "a.png"}
    row = {"image": cell, "text": "a drawing of a blue Pokemon", "keywords": [date(2020, 1, 1)]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "three.parquet")
    one, two, three = prepare(tmp_path, tmp_path / "one.csv", tmp_path / "two.jsonl", tmp_path / "three.parquet")
    counts = {
        "documents": 3,
        "frequency": {"a": 3, "a blue": 3, "a blue field": 2, "blue": 3, "blue field": 2, "field": 2},
    }
    truth_of_csv = {"references": ["a blue field", "all blue"], "keywords": ["blue", "field"]}
    assert json.loads(one.ground_truth) == truth_of_csv | counts
    assert one.extra["id"] == "7"
    assert json.loads(two.ground_truth) == {"references": ["A blue field."], "keywords": []} | counts
    truth = {"references": ["a drawing of a blue Pokemon"], "keywords": ["2020-01-01"]}
    assert json.loads(three.ground_truth) == truth | {"documents": 3, "frequency": ANY}
    for example in (one, two, three):
        assert example.images == [image.read_bytes()] and example.data_source == "caption"
        assert example.messages == [{"role": "user", "content": f"<image>{caption.INSTRUCTION}"}]
    assert check_tasks([one, two, three]) == {"caption": 3}


def test_rows_that_are_wrong_say_why(tmp_path, image):
    good = {"image": "a.png", "caption": "a blue field"}
    for change, message in [
        ({"caption": "..."}, "looked for columns references.* with a word in it"),
        ({"caption": ""}, "with a word in it"),
        ({"caption": [1]}, "nor JSON with a list"),
        ({"caption": "[a"}, "is not a valid JSON list"),
        ({"image": ""}, "no image: looked for columns images, image"),
    ]:
        (tmp_path / "bad.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(good | change) + "\n")
        with pytest.raises(UserError, match=f"bad.jsonl line 2: .*{message}"):
            prepare(tmp_path, tmp_path / "bad.jsonl")
    with pytest.raises(UserError, match="--input: give CSV"):
        prepare(tmp_path)


def test_toy_is_deterministic_and_its_splits_share_no_image(tmp_path):
    train, again = (list(caption.toy(200, "train", 0)) for _ in range(2))
    test, other = list(caption.toy(100, "test", 0)), list(caption.toy(100, "train", 1))
    assert train == again
    assert len({row["images"][0]["bytes"] for row in train + test + other}) == 400
    with Image.open(io.BytesIO(train[0]["images"][0]["bytes"])) as picture:
        assert picture.size == (84, 84)
    assert len({row["reward_model"]["ground_truth"] for row in train}) > 55  # of 64 possible captions
    make_file("caption", ToyConfig(toy=True, n=12, split="test", out=str(tmp_path / "toy.parquet")))
    examples, bad = read_examples(tmp_path / "toy.parquet", ConvertConfig(out=""))
    assert len(examples) == 12 and not bad and check_tasks(examples) == {"caption": 12}
    with pytest.raises(UserError, match="--split 'val': toys have warm, train, test"):
        list(caption.toy(1, "val", 0))


def test_the_documented_example():
    import doctest

    [page] = [p for p in Path(__file__).parent.parent.glob("docs/*.md") if "## caption" in p.read_text()]
    section = page.read_text().partition("## caption")[2].partition("\n## ")[0]
    test = doctest.DocTestParser().get_doctest(section, {}, "caption", str(page), 0)
    result = doctest.DocTestRunner().run(test)
    assert result.attempted >= 5 and result.failed == 0


if __name__ == "__main__":
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    given, references = ({i: x for i, x in enumerate(column)} for column in zip(*random_captions(), strict=True))
    given = {i: [text] for i, text in given.items()}
    cider, rouge = (measure.compute_score(references, given)[1] for measure in (Cider(), Rouge()))
    bleu = Bleu(4).compute_score(references, given, verbose=0)[1][3]
    lines = (json.dumps([float(x) for x in row]) for row in zip(cider, bleu, rouge, strict=True))
    DATA.write_text("[\n" + ",\n".join(lines) + "\n]\n")
