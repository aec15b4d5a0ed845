"""Extraction of a row's content from its cells: the prompt, as text with <image> and <video> placeholders, and the
cells of images and videos in the order of these placeholders."""

import json
import re
from collections import deque
from collections.abc import Collection, Iterator
from decimal import Decimal
from itertools import chain
from math import isfinite
from string import Formatter

from errors import UserError, as_user_error, need
from sources.cells import CHOICE_COLUMNS, EMPTY_VALUES, list_choices, parse_cell, read_choices

IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER = "<image>", "<video>"
MARK_PATTERN = re.compile(f"({IMAGE_PLACEHOLDER}|{VIDEO_PLACEHOLDER})")  # an image or a video in a message
TRUTH = "reward_model.ground_truth"  # the column of the answer in the on-disk format
VIDEO_COLUMNS = ("videos", "video")
# An image or a video: our placeholder, or how Qwen's own templates write it, unexpanded or expanded (a run of
# <|image_pad|> is one image), or MMMU's `<image 2>`, the row's second image
PLACEHOLDERS = re.compile(
    r"(<\|vision_start\|>)?(?:<\|(image|video)_pad\|>(?:<\|\2_pad\|>)*|<(image|video)>)(?(1)<\|vision_end\|>)"
    r"|<image[ _]?([0-9]{1,3})>"
)
TEXT_PART_TYPES = ("text", "input_text")
MEDIA_PART_TYPES = ("image", "image_url", "input_image", "video", "video_url", "input_video")
VIDEO_OPTIONS = {"video", "fps", "sample_fps", "nframes", "min_frames", "max_frames"}  # fields of a part with a video
MEDIA_FIELDS = ("{}", "{}_url", "url", "path", "base64", "bytes")  # fields of a part that may hold its {image or video}
# as LLaVA, ShareGPT and others call them
ROLE_NAMES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
LIKE_MESSAGES = re.compile(r"""\W*["'](?:role|from|content|value)\\?["']\s*:""")


def split_column_names(key: str, columns: Collection[str]) -> list[str]:
    """Return the columns that a key names: the key itself if it is a column, else the items of a comma-separated
    list."""
    return [key] if key in columns else [name.strip() for name in key.split(",") if name.strip()]


def parse_messages(prompt: object) -> object:
    """Return a prompt's messages with the fields role and content. It may be JSON text of them, and they may have the
    fields from and value. Any other prompt is returned unchanged. Raise UserError for a text that looks like messages
    but cannot be read."""
    messages = parse_cell(prompt)
    messages = [messages] if isinstance(messages, dict) else messages
    if isinstance(messages, list) and all(isinstance(m, dict) and "type" in m and "role" not in m for m in messages):
        messages = [{"role": "user", "content": messages}]  # content parts without their message
    if not isinstance(messages, list) or not all(isinstance(m, dict) and {"role", "from"} & m.keys() for m in messages):
        need(messages is prompt and not (isinstance(prompt, str) and LIKE_MESSAGES.match(prompt)),
             "the prompt is JSON or looks like it, but is no list of {role, content}; write such a list, or plain text")
        return prompt
    converted = []
    for message in messages:
        if "from" in message and message.get("role") is None:
            message = {k: v for k, v in message.items() if k not in ("from", "value", "role", "content")} | {
                "role": message["from"], "content": message.get("value")}
        role = message["role"]
        role = role.lower() if isinstance(role, str) else str(role)
        converted.append(message | {"role": ROLE_NAMES.get(role, role)})
    return converted


def media_cells(record: dict, names: Collection[str]) -> list:
    """Return the image or video cells of a row's columns, in order. A column holds one or a list; in CSV files a list
    is JSON text. Text that is neither is a file name."""
    cells = []
    for name in names:
        value = parse_cell(record.get(name))
        cells += value if isinstance(value, list) else [] if value in EMPTY_VALUES else [value]
    return cells


def row_content(record: dict, prompt_key: str, image_key: str, template: str = "") -> tuple[object, list, list]:
    """Return a row's prompt with a placeholder for each image and video, and its image cells and its video cells in the
    order of the placeholders."""
    prompt = parse_messages(fill_template(template, record) if template else record.get(prompt_key))
    names = split_column_names(image_key, record)
    videos = [name for name in VIDEO_COLUMNS if name not in names]
    return insert_placeholders(prompt, media_cells(record, names), media_cells(record, videos))


def insert_placeholders(prompt: object, images: list, videos: Collection = ()) -> tuple[object, list, list]:
    """Return a prompt (a string or messages) with plain text contents and an <image> or <video> placeholder for each
    image and video; and the image cells and the video cells in the order of the placeholders.

    A placeholder, Qwen's own tokens, and a content part that holds no image or video use the next one of the row's
    columns. A numbered placeholder uses the image with that number. Those that remain are appended. A value that is
    neither a string nor a list of messages is returned unchanged. Raise UserError with the reason.
    """
    remaining = {"image": deque(enumerate(images)), "video": deque(enumerate(videos))}
    placed: dict[str, list] = {"image": [], "video": []}
    numbered = set()

    def place_next(kind: str, number: int | None = None) -> None:
        if remaining[kind]:
            index, cell = remaining[kind].popleft()
            need(number in (None, index),
                 f"has index {number!r:.20}, but the row's next {kind} is {index}; list the {kind}s in order")
            placed[kind].append(cell)

    def replace_match(match: re.Match) -> str:
        kind, number = match[2] or match[3] or "image", match[4]
        if number:
            need(0 < int(number) <= len(images),
                 f"{match[0]} in the prompt, but the number of images in its row is {len(images)}")
            numbered.add(int(number) - 1)
            placed[kind].append(images[int(number) - 1])
        else:
            place_next(kind)
        return f"<{kind}>"

    def place_part(part: dict) -> str:
        kind, content = parse_content_part(part)
        if kind == "text":
            return PLACEHOLDERS.sub(replace_match, content)
        placed[kind].extend(content)
        if not content:
            place_next(kind, part.get("index"))
        return f"<{kind}>"

    def place_message(i: int, message: object) -> object:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            return message | {"content": PLACEHOLDERS.sub(replace_match, content)}
        if isinstance(content, list):
            texts = []
            for j, part in enumerate(content):
                with as_user_error(UserError, f"message {i}, part {j}"):
                    texts.append(place_part(part))
            return message | {"content": "".join(texts)}
        return message

    if isinstance(prompt, str):
        prompt = PLACEHOLDERS.sub(replace_match, prompt)
    elif isinstance(prompt, list):
        prompt = [place_message(i, message) for i, message in enumerate(prompt)]
    images = placed["image"] + [cell for index, cell in remaining["image"] if index not in numbered]
    return prompt, images, placed["video"] + [cell for _, cell in remaining["video"]]


def frame_cells(cell: object) -> list | None:
    """Return the image cells of the frames that a video cell lists, or None if it lists none."""
    frames = isinstance(cell, dict) and (cell.get("frames") or cell.get("video"))
    return frames if isinstance(frames, list) else None


def parse_content_part(part: object) -> tuple[str, str | list]:
    """Return ("text", its text) of a content part in OpenAI's or Hugging Face's format, or its kind ("image" or
    "video") with [the image or video], or with [] if it stands for the row's next one.

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
        return "text", text
    need(part_type in MEDIA_PART_TYPES,
         f"has type {part_type!r:.80}, expected one of {', '.join(TEXT_PART_TYPES + MEDIA_PART_TYPES)}")
    kind = "video" if "video" in part_type else "image"
    known = [name.format(kind) for name in MEDIA_FIELDS]
    need(fields or part_type == kind, f"has type {part_type!r} but no {kind}")
    if kind == "video" and len(fields) > 1 and fields.keys() <= VIDEO_OPTIONS:  # Qwen's own form
        return kind, [fields | {"fps": fields.get("sample_fps", fields.get("fps"))}]
    need(len(fields) <= 1 and fields.keys() <= {*known},
         f"has fields {', '.join(map(str, fields))}; {kind} parts may have only one of {', '.join(known)}")
    for name, value in fields.items():
        if isinstance(value, dict) and "url" in value:
            value = value["url"]
        need(value, f"has no {kind} in its field {name}")
        if name == "base64" and not str(value).startswith("data:"):
            value = f"data:;base64,{value}"
        return kind, [value]
    return kind, []


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
    """Return the template filled with a row's values. Raise UserError if a value contains a placeholder: only
    the template itself may."""
    parts = list(template_parts(template))
    text = "".join(chain.from_iterable((text, cell_text(record, name)) for text, name in parts))
    in_template, in_prompt = (
        len(PLACEHOLDERS.findall(t)) for t in ("".join(text for text, _ in parts), text)
    )
    need(in_template == in_prompt,
         f"a column adds {in_prompt - in_template} placeholders to --prompt-template, but only the template "
         "itself may contain them; use --prompt-key for a column whose text contains them")
    return text


def cell_text(record: dict, name: str | None) -> str:
    """Return a value as a template shows it: choices with their letters, strings unchanged, lists with one item per
    line, anything else as JSON."""
    if name is None:
        return ""
    value = record.get(name)
    if name in CHOICE_COLUMNS and not isinstance(parse_cell(value), str | None):
        return list_choices(read_choices({name: value})).rstrip()
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
    if isinstance(truth, float) and isfinite(truth):
        return f"{Decimal(repr(truth)):f}"  # never in the form 1e-05
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
