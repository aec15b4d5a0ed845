"""Values of a row's cells: lists and objects in texts, and the choices that a row offers, from any layout of its
columns."""

import ast
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from string import ascii_uppercase
from typing import Any

from errors import need

EMPTY_VALUES = (None, "", [])
CHOICE_COLUMNS = ("choices", "options")
# A (MMBench), choice_a (SEED-Bench), option_B, optionC, choice_1
LABEL_COLUMN = re.compile(r"(?:(?:choice|option|opt)[_ ]?([a-jA-J]|[0-9])|([A-J]|a[0-9]))")
# "B. dog", "(B) dog", "B: dog"
LETTERED = re.compile(r"\s*[(\[]?([A-Za-z])(?:[.):\]、．：]|[)\]][.:])\s*(\S.*)", re.DOTALL)
# a question about a letter; `Answer with the option's letter.` and `the letter of a choice` are none
ASKS_LETTER = r"\b(?:what|which|whose)\b[^.?!\n]*(?<!option's )(?<!option )(?<!choice )\b(?:letter|initial|vitamin)s?"
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


def read_choices(record: Mapping) -> Choices:
    """Return the choices of a row in the order of their labels, or [] if it has none. Nulls and empty texts are left
    out, and labels that the data gives are kept.

    They are in the column choices or options, as a list, an object by label, {text, label}, a list of objects, or JSON
    text of these, or in columns of their own: A, B, C; choice_a, choice_b. Raise UserError for any other layout.
    """
    value = next((record[name] for name in CHOICE_COLUMNS if record.get(name) not in EMPTY_VALUES), None)
    if (value := parse_cell(value)) is None:
        matches = {name: LABEL_COLUMN.fullmatch(str(name)) for name in record}
        columns = {match[1] or match[2]: record[name] for name, match in matches.items() if match}
        value = columns if len(columns) > 1 else {}
    if isinstance(value, Mapping) and (lists := [k for k, v in value.items() if isinstance(v, list)]):
        need(len(lists) == len(value) == 2 and len(value[lists[0]]) == len(value[lists[1]]),
             f"choices have the fields {', '.join(map(str, value))}; write a list of texts, or an object by letter")
        value = [dict(zip(lists, pair, strict=True)) for pair in zip(*value.values(), strict=True)]
    if isinstance(value, Mapping):
        pairs = [(str(label).strip(), text) for label, text in value.items() if text not in EMPTY_VALUES]
    else:
        need(isinstance(value, list), f"choices are a {type(value).__name__}, expected a list or an object by letter")
        pairs = [pair for item in value if (pair := labelled(item, value))[1] not in EMPTY_VALUES]
    need(all(isinstance(text, str | int | float) for _, text in pairs),
         f"choices are {str(value)[:80]}, expected texts")
    if not any(label for label, _ in pairs):
        found = [LETTERED.fullmatch(str(text)) for _, text in pairs]
        letters = sorted(match[1].upper() for match in found if match)
        if pairs and letters == list(ascii_uppercase[: len(pairs)]):  # else they are texts such as `C. elegans`
            pairs = [(match[1], match[2]) for match in found]
    pairs = [(label.upper() if re.fullmatch("[A-Za-z]", label) else label, text) for label, text in pairs]
    labels = [label for label, _ in pairs]
    if any(labels):
        need(len({*labels}) == len(labels) and all(labels),
             f"choices have the labels {', '.join(labels)}; write a different one for each")
        pairs.sort(key=lambda pair: pair[0])
        letters = "".join(label for label in sorted(labels))
        need(not letters.isalpha() or ascii_uppercase.startswith(letters),
             f"choices have the letters {', '.join(labels)}, expected those from A on without a gap")
    return pairs


def labelled(item: object, items: list) -> tuple[str, object]:
    """Return the label and the text of an item of a list of choices: {letter: text}, an object with two fields, one of
    which is a short label in all items, or a text without a label."""
    if not isinstance(item, Mapping):
        return "", item
    if len(item) == 1:
        [(label, text)] = item.items()
        return (str(label) if len(str(label)) == 1 else ""), text
    label_fields = [name for name in item if all(
        isinstance(other, Mapping) and re.fullmatch("[A-Za-z]|[0-9]{1,2}", str(other.get(name))) for other in items)]
    texts = [name for name in item if name not in label_fields[:1] and item[name] not in EMPTY_VALUES]
    need(label_fields and len(texts) < 2, f"a choice is {str(item)[:80]}, expected a text, or a letter and a text")
    return str(item[label_fields[0]]), item[texts[0]] if texts else None


def list_choices(choices: Choices) -> str:
    """Return the choices as a prompt lists them, one per line, with the letters from A on."""
    return "".join(f"{letter}. {text}\n" for letter, (_, text) in zip(ascii_uppercase, choices, strict=False))


def check_letter(example: Any) -> None:
    """Raise UserError if an Example's truth is a single letter that its prompt does not offer, in whatever form: all
    choices of the row's columns, the letter of an option, or the letter itself. A small letter may be a variable."""
    if not re.fullmatch(r"\s*[(\[]?[A-Za-h][).\]]?\s*", example.ground_truth):
        return
    letter, question = example.ground_truth.strip("()[]. ").upper(), "\n".join(m["content"] for m in example.messages)
    choices = [str(text).strip() for _, text in read_choices(example.extra)]
    if ASKS_LETTER.search(question) or choices and all(choice in question for choice in choices):
        return
    marked = re.search(rf"(?<![A-Za-z0-9'])[(\[]?{letter}[.):\]、．：]", question, re.IGNORECASE)
    named = re.search(rf"(?<![A-Za-z0-9']){letter}(?![A-Za-z0-9']){' (?![a-z])' if letter == 'A' else ''}", question)
    need(marked or named or letter == "A" and re.search(r"\bA(?: or|,| and|$)", question),
         f"the truth is the letter {letter}, but the prompt does not offer it; prepare_data.py vqa lists the columns "
         "choices, options, or A, B, C, ... in the prompt; or write the answer's text as the truth")
