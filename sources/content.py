"""What a row says and shows, from its cells: prompts as text with <image> marks, and the image cells of these marks."""

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
# An image as Qwen's own templates write it, once or expanded: a run of <|image_pad|> is one image
NATIVE_VISION_TOKENS = r"<\|vision_start\|>(?:(?:<\|image_pad\|>)+|<image>)<\|vision_end\|>|(?:<\|image_pad\|>)+"
NATIVE_VISION_TOKENS = re.compile(
    rf"{NATIVE_VISION_TOKENS}|<image>|<image[ _]?([0-9]{{1,3}})>"
)  # MMMU's `<image 2>` is the row's second image
TEXT_PART_TYPES = ("text", "input_text")
IMAGE_PART_TYPES = ("image", "image_url", "input_image")
IMAGE_FIELDS = ("image", "image_url", "url", "path", "base64", "bytes")  # fields of a part that may be its image
EMPTY_VALUES = (None, "", [])


def split_column_names(key: str, columns: Collection[str]) -> list[str]:
    """The column that a key names, or those of a comma list."""
    return [key] if key in columns else [name.strip() for name in key.split(",") if name.strip()]


def image_cells(record: dict, image_key: str) -> list:
    """The image cells of a row's columns, in order. A column holds one or a list, which in CSV is JSON."""
    cells = []
    for name in split_column_names(image_key, record):
        value = record.get(name)
        if isinstance(value, str) and value.lstrip().startswith("["):
            with suppress(ValueError, RecursionError):  # else it is the name of a file
                value = json.loads(value)
        cells += value if isinstance(value, list) else [] if value in EMPTY_VALUES else [value]
    return cells


def row_content(record: dict, prompt_key: str, image_key: str, template: str = "") -> tuple[object, list]:
    """A row's prompt with a mark for each image, and its image cells in the order of the marks."""
    prompt = fill_template(template, record) if template else record.get(prompt_key)
    return insert_image_placeholders(prompt, image_cells(record, image_key))


def insert_image_placeholders(prompt: object, column: list) -> tuple[object, list]:
    """A prompt, a string or messages -> the same with texts for contents and a mark for each image; and the images.

    A mark, a native placeholder and a part without an image of its own take the next image of the row's columns. Those
    that are left come last. A numbered mark takes the image of its number. What is no prompt stays as it is. Raises
    UserError with the reason.
    """
    following = deque(enumerate(column))
    placed = []
    numbered = set()

    def place_next(number: int | None = None) -> None:
        if following:
            at, cell = following.popleft()
            need(number in (None, at), f"names image {number!r:.20} of the row where the next is {at}; order them so")
            placed.append(cell)

    def place_mark(mark: re.Match) -> str:
        if mark[1]:
            need(0 < int(mark[1]) <= len(column), f"{mark[0]} in the prompt, but the row has {len(column)} images")
            numbered.add(int(mark[1]) - 1)
            placed.append(column[int(mark[1]) - 1])
        else:
            place_next()
        return IMAGE_PLACEHOLDER

    def place_part(part: dict) -> str:
        content = parse_content_part(part)
        if isinstance(content, str):
            return NATIVE_VISION_TOKENS.sub(place_mark, content)
        placed.extend(content)
        if not content:
            place_next(part.get("index"))
        return IMAGE_PLACEHOLDER

    def place_message(i: int, message: object) -> object:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            return message | {"content": NATIVE_VISION_TOKENS.sub(place_mark, content)}
        if isinstance(content, list):
            texts = []
            for j, part in enumerate(content):
                with as_user_error(UserError, f"message {i}, part {j}"):
                    texts.append(place_part(part))
            return message | {"content": "".join(texts)}
        return message

    if isinstance(prompt, str):
        prompt = NATIVE_VISION_TOKENS.sub(place_mark, prompt)
    elif isinstance(prompt, list):
        prompt = [place_message(i, message) for i, message in enumerate(prompt)]
    return prompt, placed + [cell for at, cell in following if at not in numbered]


def parse_content_part(part: object) -> str | list:
    """A content part as OpenAI and Hugging Face write it -> its text, or [its image], or [] for the row's next image.

    A struct column gives None to fields that a part lacks. OpenAI's `detail` is left out: --max-pixels is for that.
    """
    need(isinstance(part, dict), f"is a {type(part).__name__}, expected an object such as {{'type': 'text', ...}}")
    kind = part.get("type")
    fields = {k: v for k, v in part.items() if v not in EMPTY_VALUES and k not in ("type", "detail", "index")}
    if kind in TEXT_PART_TYPES:
        text = fields.pop("text", "")
        need(isinstance(text, str), f"has a {type(text).__name__} for its text")
        need(not fields, f"is a text with fields that the format cannot hold: {', '.join(map(str, fields))}")
        return text
    need(kind in IMAGE_PART_TYPES, f"has type {kind!r:.80}; there are {', '.join(TEXT_PART_TYPES + IMAGE_PART_TYPES)}")
    need(fields or kind == "image", f"has type {kind!r} and no image")
    need(len(fields) <= 1 and fields.keys() <= set(IMAGE_FIELDS),
         f"has fields {', '.join(map(str, fields))}; an image has one of {', '.join(IMAGE_FIELDS)}")
    for name, value in fields.items():
        if isinstance(value, dict) and "url" in value:
            value = value["url"]
        need(value, f"has no image in its {name}")
        if name == "base64" and not str(value).startswith("data:"):
            value = f"data:;base64,{value}"
        return [value]
    return []


# --- templates --------------------------------------------------------------------------------------------------------


def template_parts(template: str) -> Iterator[tuple[str, str | None]]:
    r"""The texts of a --prompt-template, each with the column behind it, or None. `\n` is a new line, {{ a brace."""
    with as_user_error(ValueError,
                  f"--prompt-template {template!r}: write columns as {{name}}, and {{{{ and }}}} for braces"):
        for text, name, form, conversion in Formatter().parse(template.replace("\\n", "\n")):
            need(name != "" and not form and not conversion, f"{{{name}}} is no name of a column")
            yield text, name


def template_columns(template: str) -> list[str]:
    return [name for _, name in template_parts(template) if name is not None]


def fill_template(template: str, record: dict) -> str:
    """The template with a row's values. Marks are the template's alone: UserError if a column brings one along."""
    parts = list(template_parts(template))
    text = "".join(chain.from_iterable((text, cell_text(record, name)) for text, name in parts))
    own, found = (
        len(re.findall(IMAGE_PLACEHOLDER, NATIVE_VISION_TOKENS.sub(IMAGE_PLACEHOLDER, t)))
        for t in ("".join(text for text, _ in parts), text)
    )
    need(own == found,
         f"a column brings {found - own} image marks into --prompt-template, where only the template may have them; "
         "--prompt-key takes a column's text with its marks")
    return text


def cell_text(record: dict, name: str | None) -> str:
    """A value as a template shows it: texts as they are, lists an item a line, all else as JSON."""
    if name is None:
        return ""
    value = record.get(name)
    need(value is not None,
         f"no value in column {name!r} of --prompt-template; the row has {', '.join(map(str, record))}")
    need(not isinstance(value, bytes), f"column {name!r} of --prompt-template holds bytes, no text")
    items = value if isinstance(value, list) else [value]
    with as_user_error((TypeError, ValueError), f"column {name!r} of --prompt-template"):
        return "\n".join(item if isinstance(item, str) else json.dumps(item, ensure_ascii=False) for item in items)


# --- values -----------------------------------------------------------------------------------------------------------


def row_truth(record: dict, answer_key: str) -> str:
    """Return the ground truth of a row as a string: a column, or several as one JSON object without those that are
    empty. Strings stay, everything else becomes JSON."""
    names = split_column_names(answer_key, record)
    truth = {name: record.get(name) for name in names if record.get(name) not in (None, "")} or None
    truth = record.get(names[0]) if len(names) == 1 else truth
    need(truth is not None and str(truth).strip(),
         "no ground truth: the answer is missing or empty; --answer-key names its column")
    if isinstance(truth, str):
        return truth
    with as_user_error((TypeError, ValueError), f"ground truth {truth!r} is neither a string nor JSON"):
        return json.dumps(truth, ensure_ascii=False, allow_nan=False)


def is_too_deep(value: object, levels: int) -> bool:
    """Whether lists and objects are nested further than our own and others' recursion can be trusted with."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return levels == 0 or any(is_too_deep(v, levels - 1) for v in inner)


def drop_none(value: object) -> object:
    """Without the None fields that a struct column gives to rows that lack a field."""
    if isinstance(value, list):
        return [drop_none(v) for v in value]
    return {k: drop_none(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value
