"""Tests of tasks/vqa.py: its grader, and the conversion of rows.

data/vqa_cases.jsonl holds 950 answers to ordinary questions, written down before the grader was tried on them; a third
are wrong: hedges, several answers, negations, contradictions, more or less than was asked. On the first try the grader
was right on 98.0% of 456 of the last 672 cases, and on 94.0% of the other 216, which attack sentences (2 of these are
left out: the grader takes `5 cats` as a number of cats and dogs, and refuses `The letter A`).

data/vqa_reference.jsonl holds 1,000 texts, each with the normal form that the evaluation code of VQA v2 gives it:
`processPunctuation`, then `processDigitArticle`, of github.com/GT-Vision-Lab/VQA as in salesforce-lavis 1.0.2.
"""

import io
import json
import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import cpu_limit
from PIL import Image

from errors import UserError
from prepare_data import DataFormatConfig, main, parse_args, read_examples
from rewards.grade import check_tasks, grade
from sources.cells import listed_choices
from tasks import vqa

HOW_MANY = "How many dogs are there?"
IS_THERE = "Is there a dog on the mat?"
COLOUR = "Is the car red or blue?"
IS_RED = "Is the car red?"
LETTER = "Which letter is on the car?"
KITCHEN = "Could this be a kitchen?"
WHAT = "What color is the bus?"
WHICH = "Which do you see?\nA. red\nB. blue\nC. a dog\nD. three\n Answer in \\boxed{}."


def example(truth: str, question: str = HOW_MANY, **extra) -> SimpleNamespace:
    messages = [{"role": "user", "content": f"<image>{question}"}]
    return SimpleNamespace(data_source="vqa", ground_truth=truth, extra=extra, uid="row-7", messages=messages)


def accuracy(response: str, truth: str, question: str = HOW_MANY, **extra) -> float:
    return grade(response, example(truth, question, **extra))["accuracy"]


def parse_cases(table: str) -> list[tuple[str, str]]:
    """Return (answer, truth) pairs from lines of answers, separated by ` ; ` and followed by `| truth`."""
    lines = [line.rsplit("|", 1) for line in table.strip().splitlines()]
    return [(answer.strip(), truth.strip()) for answers, truth in lines for answer in answers.split(" ; ")]


# --- golden cases, by question ------------------------------------------------------------------------------------

RIGHT = {
    LETTER: """
B ; b ; the B ; It is B. ; (B) | B
A ; a ; It is A ; It's A. ; that's A | A
    """,
    HOW_MANY: """
3 ; three ; Three ; THREE. ; 3. ; 3.0 ; 03 ; 3 dogs ; three dogs. ; There are three dogs. ; there are 3 | 3
the answer is 3 ; The answer is: 3. ; Answer: 3 ; **3** ; **Answer:** 3 ; I see 3 dogs in the image ; It is 3 | 3
\\text{three} ; \\text{3 dogs} ; $3$ ; <answer>3</answer> ; The number of dogs is 3. ; 3 dogs in total ; the 3 | 3
1 dog ; one dog ; there is one dog ; a dog in the image is 1 ; One. | 1
(3) ; [3] ; Dogs: 3 ; Number of dogs: three ; Total: 3 ; There are 3 dogs! | 3
exactly 1 ; 1 of them ; The picture shows 1 dog. ; I think 1 ; I count 1 dog | 1
0 ; none ; None. ; zero ; no dogs ; There are no dogs. ; 0 dogs | 0
12 ; twelve ; a dozen ; a dozen dogs ; dozen | 12
21 ; twenty-one ; Twenty one dogs ; twenty-one. | 21
105 ; one hundred five ; one hundred and five ; One hundred and five dogs | 105
100 ; a hundred ; one hundred ; hundred | 100
1000 ; 1,000 ; a thousand ; one thousand | 1000
1234567 ; 1,234,567 | 1,234,567
-2 ; −2 ; -2.0 | -2
0.5 ; .5 ; 0.50 | .5
""",
    IS_THERE: """
yes ; Yes. ; YES! ; yeah ; yep ; yup ; true ; correct ; Yes, there is. ; Yes, there is a dog on the mat. | yes
Yes there is ; Yes: a brown dog, next to the cat. ; the answer is yes ; Answer: yes ; yes, 2 of them | Yes
no ; No. ; nope ; nah ; false ; incorrect ; No, there is not. ; No, there isn't. ; There is no dog. | no
No, the mat is empty ; no dog ; No dogs on the mat | NO
it is ; yes there is one ; Yes, definitely. ; Yes, 2 dogs ; dog: yes ; Yes, that's right. ; yes, one dog | yes
no, zero dogs ; No, 0 dogs ; no, none ; No, there is nothing on the mat ; no, that's wrong ; No, the dog is missing | no
No, there is a cat ; No, there is a dog on the floor ; No, there are no dogs ; no, nobody ; dog: no | no
yes | true
no | False
""",
    "Is this a kitchen?": """
It is ; this is | yes
It is not | no
""",
    IS_RED: """
No, blue ; No, it is blue. | no
""",
    KITCHEN: """
Yes, it could be. ; This could be a kitchen | yes
""",
    COLOUR: """
red ; Red ; RED! ; a red ; the red ; It is red. ; It's red ; The car is red. ; "red" ; \\text{red} ; (red) ; red; | red
That's red. ; this car is red | red
blue | blue
gray ; grey ; Grey. | gray
gray ; grey | grey
purple ; violet | violet
gold ; golden | gold
wood ; wooden ; Wooden. ; It is wooden ; It's wooden. | wood
metal ; metallic | metal
wool ; woolen ; woollen | wool
fabric ; cloth | cloth
dog ; dogs ; a dog ; the dogs ; dog's | dog
box ; boxes | boxes
city ; cities | city
movie ; movies | movie
tie ; ties | tie
axe ; axes | axes
glass ; glass. | glass
horse ; horses | horses
bus ; buses | bus
ski ; skis | skis
man ; men ; the man | men
person ; people | people
2 men ; two men ; the two men | two men
t shirt ; T-shirt ; a t-shirt. | t-shirt
dont walk ; don't walk ; don’t walk | don't walk
5% ; 5 % ; 5 percent | 5%
10:30 ; 10:30. | 10:30
st louis ; St. Louis ; st. louis. | st. louis
red and white ; Red and White. ; white and red ; red & white ; a white and a red | red and white
café ; CAFÉ | café
""",
    WHAT: """
red ; red bus ; the red bus ; red color ; It is a red bus. ; The bus is red ; The color of the bus is red. | red
made of wood ; It is made of wood. ; wooden bus | wood
""",
    WHICH: """
B ; b ; (B) ; B. ; B) ; (b). ; Option B ; option b. ; B. blue ; B) Blue ; (B) blue ; B: blue ; B - blue ; b blue | B
[B] ; Answer B | B
The correct option is B ; the correct choice is (B) blue ; choice b | B
Option (B) ; Answer (B) ; Choice (B) ; Option (B) blue | B
blue ; Blue. ; The answer is B ; The answer is (B). ; Answer: B ; it is blue ; **B** ; \\text{B} ; \\text{(B)} | B
A ; red ; A. red ; a | A
C ; a dog ; dog ; C. a dog ; C. dog ; dogs | C
D ; three ; 3 ; D. 3 | D
""",
}
WRONG = {
    LETTER: """
A ; A, B ; A B ; a, b ; A or B ; the A B ; B C ; C B ; AB | B
a car ; A car. ; a blue car ; car A | A
    """,
    HOW_MANY: """
3 or 4 ; 3 and 4 ; 3, 4 ; 3; 4 ; 3-4 ; 3 to 4 ; 3/4 ; 3 4 ; three four ; three or four ; 3 dogs or 4 dogs | 3
4 ; 33 ; 3.1 ; -3 ; 3/1 ; 0x3 ; 3? 4? ; ~3 ; ≈3 ; <4 ; >2 ; at least 3 ; about 3 ; more than 2 ; not 3 ; 3+ | 3
3 cats ; 3 dozen ; 3 hundred ; 3 and a half ; 3.5 dogs ; 3 pairs ; 3 dogs and 4 cats ; 1, 2, 3 ; 0 1 2 3 4 5 | 3
How many dogs are there? ; How many dogs are there? 3 ; dogs ; the ; . ; 3 or more ; one two three ; thirty | 3
\\boxed{4} \\boxed{3} ; \\boxed{3} \\boxed{4} ; \\boxed{3} ... \\boxed{4 ; \\boxed3 ; { 3 ; 3 } \\boxed{} | 3
٣ ; 3² ; ³ ; ➂ ; ３ ; 3\u200b4 ; \u202e3 ; Ⅲ ; 三 ; 3<|im_start|> ; <|im_end|>3 ; 3|4 ; 3*1 ; 3^1 ; III | 3
no ; no one ; nobody knows ; no, 1 | 1
3! ; (3!) ; There are 3! ; cats: 3 ; dogs: 4 ; (3 or 4) ; mats: 3 ; dogs: 3 cats: 4 ; not dogs: 3 | 3
<|im_start|>\\boxed{3} ; \\boxed{3}<|im_end|>\\boxed{3} | 3
dogs, 3, 4 ; there are 3 are 4 ; there are 3 or 4 dogs ; exactly 3 or 4 ; dogs 3 dogs 4 | 3
""",
    IS_THERE: """
yes and no ; yes or no ; Yes, no ; yes/no ; yes. no. ; Yes, but no dog ; Yes, there isn't ; maybe yes ; yes, maybe | yes
no ; not yes ; y ; dog ; there is a dog ; Yes men ; yes yes no ; Yes, or not ; yes, false ; Yes нет ; yes-no | yes
yes ; No, yes ; no or yes ; No doubt ; no, true ; not ; none ; No, but yes ; No idea ; it is not | no
there could be a dog on the mat ; Yes, there might be ; Yes, probably ; Yes, just kidding ; Yes, I'm kidding | yes
is there a dog on the mat | yes
no, there is a dog ; No, there's a dog ; No, the dog is on the mat. ; No, there is one ; No, it is | no
There is no mat ; no mat ; mat: no ; no one is there ; no, that's right ; no, that is right | no
yes, zero dogs ; yes, 0 dogs ; Yes, none. ; yes, there is nothing ; yes, nobody ; yes, without a dog | yes
yes, that's wrong ; Yes, that is wrong. ; yes, it's a lie ; yes, it is missing ; yes, the dog is absent | yes
true, zero dogs ; yes, gone | yes
""",
    IS_RED: """
No, it is red ; no, the car is red | no
""",
    COLOUR: """
red or blue ; red and blue ; red, blue ; red/blue ; red blue ; blue ; not red ; it is not red ; redd | red
gr ay ; gr ey | gray
re d ; r e d ; Is the car red or blue? ; reddish ; dark red ; rеd ; r\u200bed | red
red is blue ; red green blue yellow white black | red
red, blue ; red (blue) ; red. blue ; red; blue ; red - blue ; red/blue ; red is blue ; blue? red! | blue
purple, red ; purple or pink ; purple and red ; purple pink ; purple/red | purple
plane | plan
glasses | glass
glass | glasses
short | shorts
white, red and blue ; red or white ; red ; red and red | red and white
5 | 5%
50% | 50
""",
    WHAT: """
red, bus ; bus, red ; red or bus ; the bus ; red bus blue ; blue bus red ; red (bus) ; red/bus | red
What color is the bus? ; not red ; bus: red ; red color blue color ; is the bus red or not red | red
""",
    WHICH: """
A ; C ; E ; Z ; A, B ; B, C ; A or B ; A B ; AB ; B. red ; (B) red ; A. blue ; red or blue ; red, blue ; b) c) | B
A. red B. blue ; A. red B. blue C. a dog D. three ; not B ; B? or C ; B. or C ; purple ; BB ; option ; B. not ; a-d | B
A dog ; B. dog ; A. dog ; red dog ; A. a dog | A
""",
}


def flatten(tables: dict[str, str]) -> list[tuple[str, str, str]]:
    return [(answer, truth, question) for question, table in tables.items() for answer, truth in parse_cases(table)]


def kind(question: str) -> str:
    kinds = {HOW_MANY: "counting", IS_THERE: "existence", COLOUR: "attribute", WHICH: "multiple choice"}
    return kinds.get(question, "open")


@pytest.mark.parametrize("answer, truth, question", flatten(RIGHT))
def test_right(answer, truth, question):
    for response in (answer, f"\\boxed{{{answer}}}", f"<think>4 or \\boxed{{5}}</think>\n{answer}", f" {answer}\n"):
        assert accuracy(response, truth, question, answer_type=kind(question)) == 1.0, response


@pytest.mark.parametrize("answer, truth, question", flatten(WRONG))
def test_wrong(answer, truth, question):
    for response in (answer, f"\\boxed{{{answer}}}", f"<think>{truth}</think> {answer}"):
        assert accuracy(response, truth, question, answer_type=kind(question)) == 0.0, response


def test_ordinary_answers():
    rows = [json.loads(line) for line in (Path(__file__).parent / "data/vqa_cases.jsonl").read_text().splitlines()]
    assert len(rows) == 950 and sum(not row["right"] for row in rows) > 400
    wrong = []
    for row in rows:
        for response in (row["answer"], f"\\boxed{{{row['answer']}}}"):
            earned = accuracy(response, row["truth"], row["question"], answer_type=row["answer_type"])
            wrong += [row] if earned != row["right"] else []
    assert not wrong


# Numbers in words with their values; None marks texts that are not a number.
NUMBERS = {
    "two thousand": 2000, "two thousand five hundred": 2500, "twenty-five hundred": 2500, "2 thousand": 2000,
    "one million two hundred thousand": 1_200_000, "nine hundred ninety nine thousand and one": 999_001,
    "minus 3": -3, "negative twenty-one": -21, "half a dozen": 6, "three dozen": 36, "a pair": 2, "two pairs": 4,
    "a hundred and five": 105, "3 and a half": 3.5, "1.5 million": 1_500_000, "no one": 0, "nobody": 0,
    "three four": None, "twenty twenty": None, "five hundred thousand million": None, "dozens": None, "and five": None,
    "thousand million": None, "two and five": None, "ten five": None, "- 3": None, "": None, "zero five": None,
}  # fmt: skip


@pytest.mark.parametrize("text, value", NUMBERS.items())
def test_values_of_number_words(text, value):
    assert vqa.quantity(text) == (None if value is None else (value, ""))


@pytest.mark.parametrize("answer", ["2 oclock", "2 o'clock", "two o clock", "2:00", "Two O’Clock"])
def test_times_on_the_hour(answer):
    for truth in ("2 oclock", "2 o'clock", "2:00"):
        assert accuracy(answer, truth, "What time is it?") == 1.0
        assert accuracy("3 oclock", truth, "What time is it?") == 0.0


def test_a_truth_of_many_decimals_is_a_number():
    assert accuracy("0.1234567890123456780", "0.12345678901234567800", "How much?") == 1.0


def test_an_approximation_answers_a_measurement_but_not_a_count():
    assert accuracy("approximately 3", "3") == accuracy("about 3", "3", answer_type="counting") == 0.0
    assert accuracy("approximately 3 meters", "3 m", "How long is it?") == 1.0
    assert accuracy("approximately 4 meters", "3 m", "How long is it?") == 0.0


@pytest.mark.parametrize("truth, question", [("3", HOW_MANY), ("yes", IS_THERE), ("red", COLOUR), ("B", WHICH)])
def test_a_missing_answer_is_wrong(truth, question):
    nothing = ["", " ", ".", "\\boxed{}", "\\boxed{ }", "\\boxed{\\text{}}"]
    nothing += [f"<think>{truth}", f"<think>\\boxed{{{truth}}}"]
    nothing += [f"\\boxed{{{truth}", f"\\boxed{truth}", f"{truth} </think>", question, f"{question} {truth} or not"]
    nothing += [f"{truth}\n\nor", truth * 2, "I do not know", "unanswerable", "None of them."]
    for response in nothing:
        assert accuracy(response, truth, question, answer_type=kind(question)) == 0.0, response


def test_a_plain_answer_that_was_cut_off_is_wrong():
    row = example("3")
    assert grade("3", row, finish_reason="length")["accuracy"] == 0.0  # the full answer may have been 35
    assert grade("\\boxed{3}", row, finish_reason="length")["accuracy"] == 1.0


def test_format():
    for response, earned in (("\\boxed{3}", 1), ("<think>a</think> \\boxed{3}", 1), ("3", 0.9), ("So \\boxed{3}", 0.9)):
        assert grade(response, example("3"))["reward"] == pytest.approx(earned)
    assert grade("\\boxed{3} \\boxed{3}", example("3"))["reward"] == pytest.approx(0.9)
    assert grade("\\boxed{4}", example("3")) == {"accuracy": 0.0, "format": 1.0, "reward": pytest.approx(0.1)}


# --- several references, tolerances, choices ----------------------------------------------------------------------


@pytest.mark.parametrize("n, score", [(0, 0), (1, 1 / 3), (2, 2 / 3), (3, 1), (4, 1), (10, 1)])
def test_soft_accuracy(n, score):
    """If n of ten people gave the answer, it gets min(n / 3, 1), as in the VQA paper (Antol et al. 2015)."""
    answers = ["grey", "Gray", "the grey"] * 4
    truth = json.dumps(answers[:n] + ["black"] * (10 - n))
    assert accuracy("gray", truth, COLOUR) == pytest.approx(score)
    assert accuracy("gray or black", truth, COLOUR) == 0.0


def test_few_references():
    assert accuracy("sofa", '["sofa"]', COLOUR) == 1.0
    assert accuracy("sofa", '["sofa", "chair"]', COLOUR) == 0.5
    assert accuracy("3", '[3, "three", "4", ""]') == pytest.approx(2 / 3)
    assert accuracy("a", "[a, b]", COLOUR) == 0.0  # not JSON, so the text itself is the truth
    with pytest.raises(UserError, match="does not earn full marks"):
        check_tasks([example('["", "."]')])


@pytest.mark.parametrize(
    "answer, tolerance, right",
    [("50.5", 0.5, 1), ("49.5", "0.5", 1), ("50.51", 0.5, 0), ("52.5", "5%", 1), ("52.6", "5%", 0), ("51", None, 0)],
)
def test_tolerance(answer, tolerance, right):
    assert accuracy(answer, "50", "How warm is it?", tolerance=tolerance) == right
    assert accuracy(answer, "50", "How warm is it?", tolerance=tolerance, answer_type="counting") == 0.0  # exact
    assert accuracy("50", "50", "How warm is it?", tolerance=tolerance, answer_type="counting") == 1.0


@pytest.mark.parametrize("tolerance", ["some", "-1", "nan", "inf", "%", [1]])
def test_an_invalid_tolerance_is_refused(tolerance):
    with pytest.raises(UserError, match="row 'row-7': tolerance is .*; write a number such as 0.5, or a share"):
        accuracy("3", "3", tolerance=tolerance)


def test_formulas_are_compared_as_written():
    wrong = {"-1/2": "1/2", "x+1": "x-1", "x > 2": "x < 2", "(-1, 4)": "(4,-1)", "(1,2)": "12", "A-": "A+"}
    for truth, other in wrong.items():
        assert accuracy(other, truth, "Which is it?") == 0.0, other
        for answer in (truth, truth.replace(" ", ""), f"${truth}$", f"The answer is {truth}.", truth.replace("-", "−")):
            assert accuracy(answer, truth, "Which is it?") == 1.0, answer
    assert accuracy("3", "(3)", "Which?") == accuracy("t shirt", "t-shirt", "Which?") == 1.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("sin(x)+1", "sin(x)-1"), ("sin(x+1)", "sin(x)+1"), ("cos x - sin x", "cos x + sin x"), ("mx+b", "mx-b")]
    + [("ab/cd", "ab+cd"), ("ab/cd", "ab-cd"), ("AB < CD", "AB > CD"), ("\\angle A > 3", "\\angle A < 3")]
    + [("pH < 7", "pH > 7"), ("Fe2", "Fe2+"), ("A-", "A"), ("A+", "A"), ("-x", "x"), ("C++", "C"), ("Na+", "Na")]
    + [("34", "3,4"), ("1234", "12,34"), ("[3, 4)", "3, 4"), ("(3,4)", "3 and 4")],
)
def test_signs_distinguish_answers(answer, truth):
    for text in (answer, truth):
        assert accuracy(text, text, "Which letter is it?") == 1.0
    assert accuracy(answer, truth, "Which letter is it?") == accuracy(truth, answer, "Which letter is it?") == 0.0


def test_hyphens_dashes_and_lists_of_numbers_are_still_read():
    same = {"covid 19": "covid-19", "black and white": "black-and-white", "- red": "red", "3 and 4": "3,4"}
    same |= {"4, 3": "3, 4", "May 5 2020": "May 5, 2020", "30^{\\circ}": "30°", "\\(3\\)": "3", "pH<7": "pH < 7"}
    for answer, truth in same.items():
        assert accuracy(answer, truth, "Which is it?") == 1.0, answer


def test_half_past_midnight_is_not_noon():
    question = "What time is it?"
    assert accuracy("12:30 am", "0:30", question) == accuracy("00:30", "0:30", question) == 1.0
    assert accuracy("12:30 pm", "0:30", question) == accuracy("12:30 pm", "00:30", question) == 0.0
    assert accuracy("0", "midnight", question) == accuracy("no", "midnight", question) == 0.0


@pytest.mark.parametrize(
    "choices",
    [("x", "-x", "2x"), ("sin x + 1", "sin x - 1"), ("ab + c", "ab - c"), ("log(a)+log(b)", "log(a)-log(b)")]
    + [("$-\\frac{1}{2}x$", "$\\frac{1}{2}x$"), ("C", "C++")],
)
def test_choices_that_differ_by_a_sign(choices):
    for i, text in enumerate(choices):
        right, other = vqa.CHOICE_LETTERS[i], choices[i - 1]
        row = example(right, WHICH, answer_type="multiple choice", choices=list(choices))
        for answer, accuracy in ((text, 1.0), (f"{right}. {text}", 1.0), (other, 0.0), (f"{right}. {other}", 0.0)):
            assert grade(f"\\boxed{{{answer}}}", row)["accuracy"] == accuracy, answer


def test_two_forms_of_an_answer_are_each_right(tmp_path):
    (row,) = convert_rows(tmp_path, [{"question": "How long?", "answer": "['24/7', '3.429']"}])
    assert [grade(a, row)["accuracy"] for a in ("24/7", "3.429", "7/24")] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("truth", ["nan", "NULL", '{"answer": 3}', '["nan", "null"]'])
def test_empty_truths_are_refused(truth):
    with pytest.raises(UserError, match="the ground_truth .*it holds no answer"):
        check_tasks([example(truth)])


@pytest.mark.parametrize("answer", ["(B)", "B. x-1", "Option B", "x-1"])
def test_a_choice_is_recognised_by_letter_or_text(answer):
    assert vqa.choice_letter(answer, [("", "x+1"), ("", "x-1")], vqa.IntegerAnswers()) == "B"


def test_choices_come_from_a_column_or_from_the_question():
    given = {"choices": ["red", "blue"], "answer_type": "other"}
    for response in ("B", "blue", "B. blue", "the answer is B"):
        assert accuracy(response, "B", "A or B?", **given) == accuracy(response, "blue", "Which?", **given) == 1.0
    assert accuracy("B. blue", "B", "Which? A. red B. blue", answer_type="multiple_choice") == 1.0
    assert accuracy("B. blue", "B", "Which? (A) red (B) blue", answer_type="Multiple-Choice") == 1.0
    assert accuracy("option B", "B", f"Which? A. red B. blue {vqa.INSTRUCTION}", answer_type="multiple choice") == 1.0
    assert listed_choices("Which? A. red B. blue") == ("red", "blue")
    assert listed_choices("In U.S. A. red") == () == listed_choices("Who is Mr. B. Blue?")
    with pytest.raises(UserError, match="row 'row-7': ground_truth 'c' is none of the choices red, blue"):
        accuracy("c", "C", "A, B or C?", **given)


OPTIONS = "red blue grey purple wood metal dog cat t-shirt café jacket three 4 B C".split()
JOINS = [", ", " or ", " and ", "/", "; ", " - ", " | ", ". ", "? ", " & ", "\n", " vs ", " (", ": ", " nor "]
JOINS += [",", "! ", " + "]


def test_two_answers_never_earn_a_reward():
    """Two answers joined by a sign or a word are wrong; run together, they are right for at most one truth."""
    rng = random.Random(0)
    for _ in range(10_000):
        first, second = rng.sample(OPTIONS, 2)
        templates = ["Is it {} or {}?", "Which, {}/{}?", "What letter is it?", "What {} letter is it?", "Is the {} {}?"]
        question = rng.choice(templates).format(*rng.sample([first, second], 2))
        join = rng.choice([*JOINS, " ", " is ", " are ", " but "])
        lead = rng.choice(["", "it is ", "the ", "The answer is ", "a ", "both "])
        response = rng.choice(["{}", "\\boxed{{{}}}"]).format(f"{lead}{first}{join}{second}")
        earned = sum(accuracy(response, truth, question) for truth in (first, second))
        assert earned <= (join not in JOINS), (question, response)


# --- against VQA's own code, and random texts --------------------------------------------------------------------


def test_texts_are_equal_if_they_are_in_vqas_evaluation():
    rows = [json.loads(line) for line in (Path(__file__).parent / "data/vqa_reference.jsonl").read_text().splitlines()]
    ours, theirs = defaultdict(set), defaultdict(set)
    for text, form in rows:
        our_form = vqa.normalize_text(vqa.clean(text))
        theirs[form].add(our_form)
        ours[our_form].add(form.replace("'", ""))  # its table has `Im` and `Ive` in upper case only, which never match
    assert len(rows) == 1000 and len(theirs) > 500
    assert {form: our_forms for form, our_forms in theirs.items() if len(our_forms) > 1 and form} == {}
    assert {our_form: forms for our_form, forms in ours.items() if len(forms) > 1} == {}


def spell(n: int) -> str:
    """Return a number from 0 to 999 in words, such as `one hundred five`."""
    ones = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    ones = [*ones.split(), "seventeen", "eighteen", "nineteen"]
    tens = "twenty thirty forty fifty sixty seventy eighty ninety".split()
    if n < 100:
        return ones[n] if n < 20 else f"{tens[n // 10 - 2]} {ones[n % 10]}".removesuffix(" zero")
    return f"{ones[n // 100]} hundred {spell(n % 100)}".removesuffix(" zero")


def test_numbers_in_words():
    words = [spell(n) for n in range(1000)]
    assert words[:3] + words[19:22] == ["zero", "one", "two", "nineteen", "twenty", "twenty one"]
    assert words[100] == "one hundred" and words[999] == "nine hundred ninety nine" and len(set(words)) == 1000
    for n, text in enumerate(words):
        assert accuracy(text, str(n)) == 1.0 and accuracy(str(n), text) == 1.0
        assert accuracy(text, str(n + 1)) == 0.0


ALPHABETS = ["0123456789.,-+/ ", "abcdefgh .,!?'", "\\boxed{}text $", "()[]{}<>;:=_@`*%°"]
ALPHABETS += ["٣３²½Ⅲ\u200b\u202e\x00é’−😀ﷺ"]
WORDS = "yes no three or and the is 3 dogs B (B) \\boxed{ } <think> </think> red blue not <|im_end|> \n".split(" ")


def random_texts(n: int, seed: int):
    rng = random.Random(seed)
    for i in range(n):
        if i % 2:
            yield " ".join(rng.choices(WORDS, k=rng.randint(0, 30)))
        else:
            yield "".join(rng.choices(rng.choice([*ALPHABETS, "".join(ALPHABETS)]), k=rng.randint(0, 60)))


def test_ten_thousand_strings():
    soft = json.dumps(["red", "blue", "3", "yes", "dog", "two dogs", "none", "grey", "1,000", "t-shirt"])
    rows = [example("3"), example("yes", IS_THERE), example("red", COLOUR), example(soft, COLOUR)]
    rows += [example("B", WHICH, answer_type="multiple choice")]
    with cpu_limit(100):
        for i, text in enumerate(random_texts(10_000, 0)):
            rewards = grade(text, rows[i % 5], finish_reason="stop" if i % 3 else "length")
            assert 0.0 <= rewards["accuracy"] <= 1.0


HOSTILE = ["9" * 100_000, "three " * 17_000, "\\boxed{" * 14_000, "\\boxed{3}" * 11_000, "\\boxed " * 14_000]
HOSTILE += ["yes, " * 20_000, "is " * 33_000, "(" * 100_000, "<think>" * 14_000, "</think>" * 12_500, " " * 100_000]
PARTS = ("is ", "9", "9,", "\\text{", "a.", "- ", "one ", "-a", "'")
HOSTILE += [f"\\boxed{{{(part * 1000)[:990]}}}" for part in PARTS]
HOSTILE += ["\\boxed{" + "a" * 900 + "}" + "\\boxed{" * 14_000 + "}" * 14_000, "ﷺ" * 900, "\\text{" * 150 + "}" * 150]


@pytest.mark.parametrize("response", HOSTILE, ids=lambda text: text[:20])
def test_hostile_responses_take_no_time(response):
    for row in (example("3"), example("yes", IS_THERE), example("B", WHICH, answer_type="multiple choice")):
        with cpu_limit():
            accuracy = grade(response, row)["accuracy"]
        assert accuracy == (response.startswith("\\boxed{3}") and row.ground_truth == "3")


# --- converting rows ----------------------------------------------------------------------------------------------


def run(*argv) -> None:
    main(parse_args([str(a) for a in argv]))


def convert_rows(folder: Path, rows: list[dict], *flags) -> list:
    """Write rows to a jsonl file, convert it with prepare_data.py and return the examples."""
    Image.new("RGB", (30, 30)).save(folder / "a.png")
    lines = [json.dumps({"image": "a.png"} | row) for row in rows]
    (folder / "qa.jsonl").write_text("\n".join(lines) + "\n")
    run("vqa", "--input", folder / "qa.jsonl", "--out", folder / "qa.parquet", *flags)
    return read_examples(folder / "qa.parquet", DataFormatConfig())[0]


def test_rows_are_converted(tmp_path):
    people = [{"answer": "red", "answer_id": 1}, {"answer": "dark red", "answer_id": 2}]
    rows = [
        {"question": "How many?", "answer": 3, "type": "counting"},
        {"question": "What colour?", "answer": people, "type": "attribute"},
        {"question": "Which?", "answer": "blue", "type": "multiple choice", "choices": ["red", "blue"]},
        {"question": "Which?", "answer": "A", "type": "multiple choice", "choices": {"A": "red", "B": "blue"}},
        {"question": "Is it red?", "answer": True, "type": "existence", "answer_type": "yes/no"},
        {"question": "How warm?", "answer": "20", "tolerance": "5%"},
    ]
    examples = convert_rows(tmp_path, rows)
    assert [e.ground_truth for e in examples] == ["3", '["red", "dark red"]', "B", "A", "true", "20"]
    types = ["counting", "attribute", "multiple choice", "multiple choice", "yes/no", None]
    assert [e.extra.get("answer_type") for e in examples] == types and {e.data_source for e in examples} == {"vqa"}
    assert examples[0].messages[0]["content"] == f"<image>How many? {vqa.INSTRUCTION}"
    assert examples[2].messages[0]["content"] == f"<image>Which?\nA. red\nB. blue\n{vqa.INSTRUCTION}"
    assert check_tasks(examples) == {"vqa": 6}
    answers = ["three", "red", "blue", "(A)", "yes", "21"]
    scores = [grade(answer, e)["accuracy"] for answer, e in zip(answers, examples, strict=True)]
    assert scores == [1.0, 0.5, 1.0, 1.0, 1.0, 1.0]


def test_csv_and_parquet(tmp_path):
    Image.new("RGB", (30, 30)).save(tmp_path / "a.png")
    (tmp_path / "qa.csv").write_text('image,question,answer,choices\na.png,Which?,red,"[""red"", ""blue""]"\n')
    run("vqa", "--input", tmp_path / "qa.csv", "--out", tmp_path / "1.parquet")
    [first], _ = read_examples(tmp_path / "1.parquet", DataFormatConfig())
    assert first.ground_truth == "A" and first.extra["choices"] == ["red", "blue"]
    keys = ("--prompt-key", "prompt", "--image-key", "images", "--answer-key", "reward_model", "--instruction", "")
    with pytest.raises(UserError, match="expected a file that ends in .json, .jsonl, .csv, .parquet"):
        run("vqa", "--input", tmp_path / "a.png", "--out", tmp_path / "2.parquet")
    with pytest.raises(UserError, match="no column 'answer'; it has .*Correct --answer-key"):
        run("vqa", "--input", tmp_path / "1.parquet", "--out", tmp_path / "2.parquet", *keys[:4])


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"answer": "green", "choices": ["red", "blue"]}, "answer 'green' names 0 of the choices red, blue; give the"),
        ({"answer": "A", "choices": ["B", "A"]}, "answer 'A' names 2 of the choices B, A; give the letter or text"),
        ({"answer": "red", "choices": ["red", "Red"]}, "answer 'red' names 2 of the choices"),
        ({"answer": "red", "choices": ["red"]}, "choices is [('', 'red')], expected 2 to 26 texts"),
        ({"answer": "red", "choices": "red, blue"}, "choices are 'red, blue', expected a list of texts or an"),
        ({"answer": []}, "the answer is an empty list"),
        ({"answer": ""}, "no ground truth"),
    ],
)
def test_ambiguous_rows_are_refused(tmp_path, row, reason):
    with pytest.raises(UserError) as error:
        convert_rows(tmp_path, [{"question": "Which?"} | row])
    assert reason in str(error.value) and "qa.jsonl line 1" in str(error.value)


# --- toy ----------------------------------------------------------------------------------------------------------


def test_toy(tmp_path):
    train, test = list(vqa.toy(200, "train", 0)), list(vqa.toy(200, "test", 0))
    assert train == list(vqa.toy(200, "train", 0)) and train[:50] == list(vqa.toy(50, "train", 0))
    assert train != list(vqa.toy(200, "train", 1))
    images = [{row["image"][0]["bytes"] for row in rows} for rows in (train, test)]
    assert [len(split) for split in images] == [200, 200] and not images[0] & images[1]
    assert [row["extra_info"]["answer_type"] for row in train[:5]] == list(vqa.TOY_TYPES)
    assert Image.open(io.BytesIO(train[0]["image"][0]["bytes"])).size == (84, 84)
    for kind in vqa.TOY_TYPES:  # no answer is right most of the time
        answers = [row["answer"] for row in train if row["extra_info"]["answer_type"] == kind]
        assert max(answers.count(a) for a in answers) <= (0.65 if kind == "existence" else 0.5) * len(answers)
    with pytest.raises(UserError, match="--split 'val': toys have warm, train, test"):
        next(vqa.toy(1, "val", 0))


def test_toy_file(tmp_path):
    run("vqa", "--toy", "--n", 20, "--out", tmp_path / "vqa.parquet")
    examples, _ = read_examples(tmp_path / "vqa.parquet", DataFormatConfig())
    assert check_tasks(examples) == {"vqa": 20} and examples[0].uid == "vqa-train-0-0"
    assert all(grade(f"\\boxed{{{e.ground_truth}}}", e)["reward"] == 1.0 for e in examples)
    assert {e.extra["answer_type"] for e in examples} == set(vqa.TOY_TYPES)
    assert listed_choices(examples[4].messages[0]["content"])


def test_the_example_in_the_docs(tmp_path):
    """The rows of docs/tasks.md convert, and the answers in its table are right and wrong as it says."""
    page = (Path(__file__).parent.parent / "docs" / "tasks.md").read_text()
    text = page.partition("## vqa")[2].partition("\n## ")[0]
    lines = text.split("```")[1].strip().splitlines()
    count, material, choice = convert_rows(tmp_path, list(map(json.loads, lines)))
    assert grade("wood", material)["accuracy"] == 1.0 and grade("red", choice)["accuracy"] == 1.0
    rows = {"a number": count, "`yes`": example("yes", IS_THERE), "text": example("gray", "What colour is the car?")}
    rows["a choice"] = example("B", WHICH, choices=["red", "blue"])
    tried = 0
    for line in text.splitlines():
        name, *cells = [cell.strip() for cell in line.strip("| ").split("|")]
        row = next((row for start, row in rows.items() if name.startswith(start)), None)
        for cell, right in zip(cells if row else (), (1.0, 0.0), strict=False):
            for answer in cell.split("`")[1::2]:
                assert grade(answer, row)["accuracy"] == right, answer
                tried += 1
    assert tried > 20
