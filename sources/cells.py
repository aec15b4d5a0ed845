"""Values of a row's cells: lists and objects in texts, and the choices that a row offers, from any layout of its
columns."""

import ast
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from string import ascii_uppercase
from typing import Any

from errors import UserError, need

EMPTY_VALUES = (None, "", [])
CHOICE_COLUMNS = ("choices", "options")
# A (MMBench), choice_a (SEED-Bench), option_B, optionC, choice_1
LABEL_COLUMN = re.compile(r"(?:(?:choice|option|opt)[_ ]?([a-jA-J]|[0-9])|([A-J]|a[0-9]))")
LABEL_FIELDS = ("label", "key", "id", "letter")
# "B. dog", "(B) dog", "**B:** dog", "<B> dog", "Option B: dog", "B - dog", "B dog"
LETTERED = r"[\s*(\[<（]*(?:(?:option|choice)\s+)?([A-Z])(?:[.):\]>、．：）*]+\s*|\s+(?:[-–—]\s+)?(?=[^\W_]{2}))(\S.*)"
LETTERED = re.compile(LETTERED, re.DOTALL | re.IGNORECASE)
# the letter before an option of a question: "A. ", "(A)", "**A:** ", "A、"
OPTION = re.compile(r"(?:^|(?<=[\s(（\[<*?？。:：]))([A-Za-z])(?:[.):\]>*]+\s|(?<=\(.)\)|[、．：）])")
OR_LIST = re.compile(r"\b[A-H](?:[\s,/()]+(?:or\s+)?\(?[A-H]\b)+")  # "A, B or C", "A/B"
# "B", "(B)", "Option B", "A, C", "B. dog"
LETTER_TRUTH = r"[\s()\[\]\"*.:$]*(?:(?i:option|choice)\W+)?([A-Ha-h](?:(?:[\s,;&]|and)+[A-H])*)"
LETTER_TRUTH = re.compile(LETTER_TRUTH + r"(?:[\s()\[\]\"*.:$]*|(?:[.):]+\s+|[):])\S.*)", re.DOTALL)
# questions about a letter in the image; `Answer with the option's letter.` and `the letter of a choice` are none
ASKS_LETTER = r"\b(?:what|which|whose)\b(?: (?:grade|note|point|vertex|line|key|row|section)s?|[^.?!\n]*"
ASKS_LETTER += r"(?<!option's )(?<!option )(?<!choice )\b(?:letter|initial|vitamin|blood type|written|printed)s?)"
ASKS_LETTER = re.compile(ASKS_LETTER + r"\b(?! (?:of|from|for|corresponding))", re.IGNORECASE)

Choices = list[tuple[str, object]]  # (label: a capital letter, another label of the data, or "" if it has none; text)


def parse_cell(value: object) -> object:
    """Return the list or object that a text holds as JSON, as in CSV files, or as Python prints it; other values are
    returned unchanged."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return ast.literal_eval(value.strip())
    return value


def is_empty(value: object) -> bool:
    """Return whether a value stands for a missing choice: null, an empty text or list, or NaN."""
    return value in EMPTY_VALUES or value != value or value == "nan"


def are_labels(values: Sequence[str]) -> bool:
    """Return whether values are the letters from A on, or the numbers from 0 or 1 on, in any order."""
    ordered = sorted(values, key=lambda value: (len(value), value.upper()))
    first = {"A": 65, "0": 0, "1": 1}.get(ordered[0].upper())
    return first is not None and all(
        value.upper() == (chr(first + i) if first == 65 else str(first + i)) for i, value in enumerate(ordered))


def read_choices(record: Mapping) -> Choices:
    """Return the choices of a row in the order of their labels, or [] if it has none. Labels that the data gives are
    kept, and choices that are empty at the end are left out.

    They are in the column choices or options, as a list, an object by label, {text, label}, a list of objects, or JSON
    text of these, or in columns of their own: A, B, C; choice_a, choice_b. Raise UserError for any other layout.
    """
    value = next((record[name] for name in CHOICE_COLUMNS if not is_empty(record.get(name))), None)
    if (value := parse_cell(value)) is None:
        matches = {name: LABEL_COLUMN.fullmatch(str(name)) for name in record}
        columns = {match[1] or match[2]: record[name] for name, match in matches.items() if match}
        value = columns if len(columns) > 1 else {}
    if isinstance(value, Mapping) and (lists := [k for k, v in value.items() if isinstance(v, list)]):
        need(len(lists) == len(value) == 2 and len(value[lists[0]]) == len(value[lists[1]]),
             f"choices have the fields {', '.join(map(str, value))}; write a list of texts, or an object by letter")
        value = [dict(zip(lists, pair, strict=True)) for pair in zip(*value.values(), strict=True)]
    if isinstance(value, Mapping):
        pairs = [(str(label).strip(), text) for label, text in value.items()]
    else:
        need(isinstance(value, list), f"choices are {value!r:.80}, expected a list of texts or an object by letter")
        pairs = [split_choice(item, value) for item in value]
    if any(label for label, _ in pairs):
        pairs = [(label.upper() if re.fullmatch("[A-Za-z]", label) else label, text)
                 for label, text in pairs if not is_empty(text)]
    else:
        while pairs and is_empty(pairs[-1][1]):
            pairs.pop()
        need(not any(is_empty(text) for _, text in pairs),
             f"one of the choices {str(value)[:80]} is empty, so the letters of those after it are unclear; remove it")
        pairs = label_by_letter([str(text) for _, text in pairs]) or pairs
    need(all(isinstance(text, str | int | float) for _, text in pairs),
         f"choices are {str(value)[:80]}, expected texts")
    labels = [label for label, _ in pairs]
    if any(labels):
        need(len({*labels}) == len(labels) and all(labels),
             f"choices have the labels {', '.join(labels)}; write a different one for each")
        pairs.sort(key=lambda pair: (len(pair[0]), pair[0]))
        letters = "".join(sorted(labels))
        need(not letters.isalpha() or ascii_uppercase.startswith(letters),
             f"choices have the letters {', '.join(labels)}, expected those from A on without a gap")
    return pairs


def label_by_letter(texts: list[str]) -> Choices:
    """Return the choices of texts that begin with their letters (`B. dog`), or [] if these texts do not. Raise
    UserError if a letter is not that of its position."""
    found = [LETTERED.fullmatch(text) for text in texts]
    letters = [match[1].upper() if match else "" for match in found]
    if texts and all(letters) and are_labels(letters):
        return [(letter, match[2]) for letter, match in zip(letters, found, strict=True)]
    if letters[:2] != ["A", "B"]:
        return []  # also texts such as `C. elegans`
    need(all(given in ("", letter) for letter, given in zip(ascii_uppercase, letters, strict=False)),
         f"the choices begin with the letters {', '.join(filter(None, letters))}; write the texts without letters")
    pairs = zip(ascii_uppercase, found, texts, strict=False)
    return [(letter, match[2] if match else text) for letter, match, text in pairs]  # `All of these` has no letter


def split_choice(item: object, items: list) -> tuple[str, object]:
    """Return the label and the text of an item of a list of choices: {letter: text}, an object with a label and a text,
    or a text without a label. The label's field is named so, or has the letters from A on or the numbers from 0 or 1 on
    in the items."""
    if not isinstance(item, Mapping):
        return "", item
    if len(item) == 1:
        [(label, text)] = item.items()
        return (str(label) if len(str(label)) == 1 else ""), text
    values = {name: [str(other.get(name)) if isinstance(other, Mapping) else "" for other in items] for name in item}
    short = [name for name in item if all(re.fullmatch("[A-Za-z]|[0-9]{1,2}", value) for value in values[name])]
    fields = [name for name in short if str(name).lower() in LABEL_FIELDS]
    fields = fields or [name for name in short if name != "text" and are_labels(values[name])]
    texts = [name for name in item if name not in fields and not is_empty(item[name])]
    need(len(fields) == 1 and len(texts) < 2,
         f"a choice is {str(item)[:80]}, expected a text, or a letter and a text")
    return str(item[fields[0]]), item[texts[0]] if texts else None


def list_choices(choices: Choices) -> str:
    """Return the choices as a prompt lists them, one per line, with the letters from A on."""
    return "".join(f"{letter}. {text}\n" for letter, (_, text) in zip(ascii_uppercase, choices, strict=False))


@lru_cache(4096)  # every response of a group has the same question
def listed_choices(question: str) -> tuple[str, ...]:
    """Return the texts of the choices that a question lists, `A. red B. blue` or line by line, or () if there are not
    two. They are the last letters A, B, C, ... in this order."""
    run: list[re.Match] = []
    for match in OPTION.finditer(question):
        if match[1] in "Aa":
            run = [match]
        elif run and ord(match[1]) == ord(run[-1][1]) + 1:
            run.append(match)
    ends = [match.start() for match in run[1:]] + [len(question)]
    texts = [question[match.end() : end].strip(" \n(*[<（") for match, end in zip(run, ends, strict=False)]
    return tuple(text.partition("\n")[0] for text in texts) if len(run) > 1 else ()


def check_letter(example: Any) -> None:
    """Raise UserError if an Example's truth is the letter of a choice, or letters, that its prompt does not offer: by
    choices of the row's columns or of the prompt, as `A or B`, or by a question about a letter in the image. A small
    letter may be a variable of the question."""
    value = parse_cell(example.ground_truth)
    value = value[0] if isinstance(value, list) and len(value) == 1 else example.ground_truth
    match = LETTER_TRUTH.fullmatch(unicodedata.normalize("NFKC", str(value)))
    question = "\n".join(m["content"] for m in example.messages) if match else ""
    if not match or ASKS_LETTER.search(question):
        return
    variable = rf"(?<![A-Za-z']){match[1]}(?![A-Za-z'])(?! (?!and\b|or\b|is\b)[a-z]{{2}})"  # but no article
    if match[1].islower() and re.search(variable, question):
        return
    letters, choices = {*re.findall("[A-H]", match[1].upper())}, []
    with suppress(UserError):  # other tasks may have such columns
        choices = [rf"(?<!\w){re.escape(str(text).strip())}(?!\w)" for _, text in read_choices(example.extra)]
    n_offered = len(choices) if all(re.search(choice, question) for choice in choices) else 0
    offered = {*ascii_uppercase[: max(n_offered, len(listed_choices(question)))]}
    named = (match[0] for match in OR_LIST.finditer(question) if re.search(r"\bor\b|/", match[0]))
    need(letters <= offered or any(letters <= {*text} for text in named),
         f"the truth {example.ground_truth[:80]!r} names the letter {match[1]}, but the prompt does not offer it; "
         "list the choices in it, as prepare_data.py vqa does for the columns choices, options, or A, B, C, ...; write "
         "the answer's text as the truth; or, if the letter is in the image, ask `Which letter ...?`")
