"""Extraction of a row's content from its cells: the prompt, as text with <image> placeholders, and the image cells in
the order of these placeholders."""

import json
import re
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import chain
from string import Formatter

from errors import UserError, as_user_error, need

IMAGE_PLACEHOLDER = "<image>"
TRUTH = "reward_model.ground_truth"  # the column of the answer in the on-disk format
# An image as Qwen's own templates write it, unexpanded or expanded: a run of <|image_pad|> is one image
NATIVE_VISION_TOKENS = r"<\|vision_start\|>(?:(?:<\|image_pad\|>)+|<image>)<\|vision_end\|>|(?:<\|image_pad\|>)+"
NATIVE_VISION_TOKENS = re.compile(
    rf"{NATIVE_VISION_TOKENS}|<image>|<image[ _]?([0-9]{{1,3}})>"
)  # MMMU's `<image 2>` is the row's second image
TEXT_PART_TYPES = ("text", "input_text")
IMAGE_PART_TYPES = ("image", "image_url", "input_image")
IMAGE_FIELDS = ("image", "image_url", "url", "path", "base64", "bytes")  # fields of a part that may hold its image
EMPTY_VALUES = (None, "", [])


def split_column_names(key: str, columns: Collection[str]) -> list[str]:
    """Return the columns that a key names: the key itself if it is a column, else the items of a comma-separated
    list."""
    return [key] if key in columns else [name.strip() for name in key.split(",") if name.strip()]


def image_cells(record: dict, image_key: str) -> list:
    """Return the image cells of a row's columns, in order. A column holds one image or a list; in CSV files a list is
    JSON text."""
    cells = []
    for name in split_column_names(image_key, record):
        value = record.get(name)
        if isinstance(value, str) and value.lstrip().startswith("["):
            with suppress(ValueError, RecursionError):  # text that is not JSON is a file name
                value = json.loads(value)
        cells += value if isinstance(value, list) else [] if value in EMPTY_VALUES else [value]
    return cells


def row_content(record: dict, prompt_key: str, image_key: str, template: str = "") -> tuple[object, list]:
    """Return a row's prompt with a placeholder for each image, and its image cells in the order of the
    placeholders."""
    prompt = fill_template(template, record) if template else record.get(prompt_key)
    return insert_image_placeholders(prompt, image_cells(record, image_key))


def insert_image_placeholders(prompt: object, column: list) -> tuple[object, list]:
    """Return a prompt (a string or messages) with plain text contents and an <image> placeholder for each image; and
    the image cells in the order of the placeholders.

    A placeholder, Qwen's own image tokens, and a content part that holds no image use the next image of the row's
    columns. A numbered placeholder uses the image with that number. Images that remain are appended. A value that is
    neither a string nor a list of messages is returned unchanged. Raise UserError with the reason.
    """
    remaining = deque(enumerate(column))
    placed = []
    numbered = set()

    def place_next(number: int | None = None) -> None:
        if remaining:
            index, cell = remaining.popleft()
            need(number in (None, index),
                 f"has index {number!r:.20}, but the row's next image is {index}; list the images in order")
            placed.append(cell)

    def replace_match(match: re.Match) -> str:
        if match[1]:
            need(0 < int(match[1]) <= len(column), f"{match[0]} in the prompt, but the row has {len(column)} images")
            numbered.add(int(match[1]) - 1)
            placed.append(column[int(match[1]) - 1])
        else:
            place_next()
        return IMAGE_PLACEHOLDER

    def place_part(part: dict) -> str:
        content = parse_content_part(part)
        if isinstance(content, str):
            return NATIVE_VISION_TOKENS.sub(replace_match, content)
        placed.extend(content)
        if not content:
            place_next(part.get("index"))
        return IMAGE_PLACEHOLDER

    def place_message(i: int, message: object) -> object:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            return message | {"content": NATIVE_VISION_TOKENS.sub(replace_match, content)}
        if isinstance(content, list):
            texts = []
            for j, part in enumerate(content):
                with as_user_error(UserError, f"message {i}, part {j}"):
                    texts.append(place_part(part))
            return message | {"content": "".join(texts)}
        return message

    if isinstance(prompt, str):
        prompt = NATIVE_VISION_TOKENS.sub(replace_match, prompt)
    elif isinstance(prompt, list):
        prompt = [place_message(i, message) for i, message in enumerate(prompt)]
    return prompt, placed + [cell for index, cell in remaining if index not in numbered]


def parse_content_part(part: object) -> str | list:
    """Return the text of a content part in OpenAI's or Hugging Face's format, or [its image], or [] if it stands for
    the row's next image.

    Empty fields are ignored, as a struct column adds None for fields that a part lacks. OpenAI's `detail` is
    ignored too; use --max-pixels. Raise UserError if the part is invalid.
    """
    need(isinstance(part, dict), f"is a {type(part).__name__}, expected an object such as {{'type': 'text', ...}}")
    part_type = part.get("type")
    fields = {k: v for k, v in part.items() if v not in EMPTY_VALUES and k not in ("type", "detail", "index")}
    if part_type in TEXT_PART_TYPES:
        text = fields.pop("text", "")
        need(isinstance(text, str), f"has a text of type {type(text).__name__}, expected a string")
        need(not fields, f"is a text with unsupported fields: {', '.join(map(str, fields))}; remove them")
        return text
    need(part_type in IMAGE_PART_TYPES,
         f"has type {part_type!r:.80}, expected one of {', '.join(TEXT_PART_TYPES + IMAGE_PART_TYPES)}")
    need(fields or part_type == "image", f"has type {part_type!r} but no image")
    need(len(fields) <= 1 and fields.keys() <= set(IMAGE_FIELDS),
         f"has fields {', '.join(map(str, fields))}; an image part may have only one of {', '.join(IMAGE_FIELDS)}")
    for name, value in fields.items():
        if isinstance(value, dict) and "url" in value:
            value = value["url"]
        need(value, f"has no image in its field {name}")
        if name == "base64" and not str(value).startswith("data:"):
            value = f"data:;base64,{value}"
        return [value]
    return []


# --- templates --------------------------------------------------------------------------------------------------------


def template_parts(template: str) -> Iterator[tuple[str, str | None]]:
    r"""Yield the texts of a --prompt-template, each with the name of the column after it, or None. `\n` is a new line,
    {{ and }} are braces."""
    with as_user_error(
        ValueError, f"--prompt-template {template!r}: write columns as {{name}}, and {{{{ and }}}} for braces"
    ):
        for text, name, format_spec, conversion in Formatter().parse(template.replace("\\n", "\n")):
            need(name != "" and not format_spec and not conversion, f"{{{name}}} is not a column name")
            yield text, name


def template_columns(template: str) -> list[str]:
    """Return the names of the columns that a --prompt-template uses."""
    return [name for _, name in template_parts(template) if name is not None]


def fill_template(template: str, record: dict) -> str:
    """Return the template filled with a row's values. Raise UserError if a value contains an image placeholder: only
    the template itself may."""
    parts = list(template_parts(template))
    text = "".join(chain.from_iterable((text, cell_text(record, name)) for text, name in parts))
    in_template, in_prompt = (
        len(re.findall(IMAGE_PLACEHOLDER, NATIVE_VISION_TOKENS.sub(IMAGE_PLACEHOLDER, t)))
        for t in ("".join(text for text, _ in parts), text)
    )
    need(in_template == in_prompt,
         f"a column adds {in_prompt - in_template} image placeholders to --prompt-template, but only the template "
         "itself may contain them; use --prompt-key for a column whose text contains them")
    return text


def cell_text(record: dict, name: str | None) -> str:
    """Return a value as a template shows it: strings unchanged, lists with one item per line, anything else as
    JSON."""
    if name is None:
        return ""
    value = record.get(name)
    need(value is not None,
         f"no value in column {name!r} of --prompt-template; the row has {', '.join(map(str, record))}")
    need(not isinstance(value, bytes), f"column {name!r} of --prompt-template holds bytes, not text")
    items = value if isinstance(value, list) else [value]
    with as_user_error((TypeError, ValueError), f"column {name!r} of --prompt-template"):
        return "\n".join(item if isinstance(item, str) else json.dumps(item, ensure_ascii=False) for item in items)


# --- values -----------------------------------------------------------------------------------------------------------


def row_truth(record: dict, answer_key: str) -> str:
    """Return the ground truth of a row as a string: the value of a column, or of several columns as one JSON object
    without empty values. Strings are returned unchanged, everything else as JSON."""
    names = split_column_names(answer_key, record)
    truth = {name: record.get(name) for name in names if record.get(name) not in (None, "")} or None
    truth = record.get(names[0]) if len(names) == 1 else truth
    need(truth is not None and str(truth).strip(),
         "no ground truth: the answer is missing or empty; name its column with --answer-key")
    if isinstance(truth, str):
        return truth
    with as_user_error((TypeError, ValueError), f"ground truth {truth!r} is neither a string nor JSON"):
        return json.dumps(truth, ensure_ascii=False, allow_nan=False)


def is_too_deep(value: object, levels: int) -> bool:
    """Return whether lists and objects are nested more than `levels` deep, too deep to process recursively."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return levels == 0 or any(is_too_deep(v, levels - 1) for v in inner)


def drop_none(value: object) -> object:
    """Return the value without None fields, which a struct column adds to rows that lack a field."""
    if isinstance(value, list):
        return [drop_none(v) for v in value]
    return {k: drop_none(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value
