"""Choices of any layout, and the letters that a prompt offers (sources/cells.py)."""

from types import SimpleNamespace

import pytest

from errors import UserError
from sources.cells import check_letter, listed_choices, read_choices

NAN = float("nan")


def as_labelled(*texts):
    return list(zip("ABCD", texts, strict=False))


@pytest.mark.parametrize("choices, expected", [
    (["dog", "cat", None, NAN], [("", "dog"), ("", "cat")]),
    ({"text": ["1", "2"], "label": ["A", "B"]}, as_labelled("1", "2")),  # a short text is no label
    ({"text": ["5", "7"], "label": ["B", "A"]}, as_labelled("7", "5")),
    ([{"text": "2", "x": "A"}, {"text": "1", "x": "B"}], as_labelled("2", "1")),
    ([{"A": "x"}, {"B": "y"}], as_labelled("x", "y")),
    ({"10": "x", "2": "y", "1": "z"}, [("1", "z"), ("2", "y"), ("10", "x")]),
    (["<B> dog", "<A> cat"], as_labelled("cat", "dog")),
    (["A dog", "B cat"], as_labelled("dog", "cat")),
    (["A - dog", "B - cat"], as_labelled("dog", "cat")),
    (["**A.** dog", "**B.** cat"], as_labelled("dog", "cat")),
    (["Option A: dog", "Option B: cat"], as_labelled("dog", "cat")),
    (["A、dog", "B、cat", "all of these"], as_labelled("dog", "cat", "all of these")),
    (["a + b", "b + a"], [("", "a + b"), ("", "b + a")]),
    (["A dog", "A cat"], [("", "A dog"), ("", "A cat")]),
    (["C. elegans", "E. coli"], [("", "C. elegans"), ("", "E. coli")]),
])  # fmt: skip
def test_choices(choices, expected):
    assert read_choices({"choices": choices}) == expected


@pytest.mark.parametrize("choices", [
    ["dog", None, "cat"], [NAN, "cat"], {"A": "dog", "B": None, "C": "cat"}, ["A. dog", "B. cat", "D. cow"],
    [{"text": "2", "value": "7"}, {"text": "1", "value": "9"}], {"n": 2, "of": 3}, [["a"], ["b"]], "dog",
])  # fmt: skip
def test_choices_whose_letters_are_unclear_are_refused(choices):
    with pytest.raises(UserError, match="choice"):
        read_choices({"choices": choices})


@pytest.mark.parametrize("question, texts", [
    ("Find x.\n(A) 5\n(B) 6", ("5", "6")), ("vitamin C. A. red B. blue", ("red", "blue")),
    ("Find x. A. find x. B. find y.", ("find x.", "find y.")), ("x？A．5 B．6", ("5", "6")),
    ("x **A.** dog **B.** cat", ("dog", "cat")), ("In U.S. A. red", ()), ("Who is Mr. B. Blue?", ()),
    ("Q: Find x.\nA:", ()),
])  # fmt: skip
def test_choices_that_a_question_lists(question, texts):
    assert listed_choices(question) == texts


OFFERED = [("B", "Find x.\nA. 5\nB. 6"), ("Ｂ", "x？A．5 B．6"), ("A, C", "A. 1\nB. 2\nC. 3"),
           ("B. dog", "A. cat B. dog"), ("B", "Is it A or B?"), ("C", "Choose A, B, C or D"), ("B", "A/B/C"),
           ("B", "Which letter is on the hat?"), ("B", "What is the blood type?"), ("B", "What is written on the hat?"),
           ("A", "Which point is nearest?"), ("b", "Express x by a and b"), ("a", "sides a, b and c"),
           ("D.C.", "Where?"), ("A'", "Find"), ("AC", "Find the side")]  # fmt: skip
NOT_OFFERED = [("C", "In triangle ABC, ∠C = 90°, find x"), ("D", "Find x if point D is here.\nA:"), ("Ｂ", "Find x"),
               ("Option B", "Find x"), ('["B"]', "Find x"), ("A, D", "A. 1\nB. 2\nC. 3"), ("B. dog", "Which animal?"),
               ("a", "Is it a dog?"), ("C", "points A, B, C on a circle"), ("C", "What is the length of line AB?"),
               ("B", "Answer with the option's letter.")]  # fmt: skip


@pytest.mark.parametrize("truth, question, offered",
                         [(*case, True) for case in OFFERED] + [(*case, False) for case in NOT_OFFERED])
def test_a_letter_must_be_offered(truth, question, offered):
    example = SimpleNamespace(ground_truth=truth, messages=[{"content": question}], extra={"choices": {"n": 2}})
    if offered:
        return check_letter(example)
    with pytest.raises(UserError, match="names the letter"):
        check_letter(example)


def test_choices_of_columns_offer_a_letter_only_if_the_prompt_has_each_as_a_word():
    extra = {"choices": ["5", "15"]}
    example = SimpleNamespace(ground_truth="B", messages=[{"content": "Is it 5 or 15?"}], extra=extra)
    check_letter(example)
    example.messages = [{"content": "Is it 15?"}]
    with pytest.raises(UserError, match="names the letter B"):
        check_letter(example)
