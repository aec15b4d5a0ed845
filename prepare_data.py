"""Convert data from any source to one parquet file, and read such files. No other code knows the
on-disk format.

    python prepare_data.py geo3k --input hiyouga/geometry3k --split train --out geo3k.parquet
    python prepare_data.py shapes --toy --n 2000 --split train --out shapes.parquet
    python prepare_data.py vqa --input qa.jsonl --out vqa.parquet
    python prepare_data.py jsonl --input qa.jsonl --data-source mine --out qa.parquet
    python prepare_data.py inspect geo3k.parquet --model Qwen/Qwen2.5-VL-7B-Instruct

Columns: data_source string, prompt list<struct<role, content>>, images list<struct<bytes, path>>,
videos list<struct<frames list<binary>, fps>>, reward_model struct<style, ground_truth>, extra_info
struct<split, index, uid, ...>. Each literal <image> and <video> in a prompt stands for one image or
video, in order. Images and the frames of videos are stored unchanged, byte for byte.
"""

import startup  # noqa: F401

import fcntl
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from glob import escape
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tqdm import tqdm

import errors
from errors import ErrorContext, UserError, as_user_error, need, plug_in, printable
from reward import TASKS, find_tasks, load_tasks, task_name, unwrap_truth
from rewards.grade import check_tasks
from settings import REQUIRED, FlagParser, PixelConfig, add_flags, build_config, flag_field, flag_name
from sources import content, tables
from sources.cells import CHOICE_COLUMNS
from sources.content import IMAGE_PLACEHOLDER, TRUTH, drop_none, split_column_names, template_columns
from sources.images import FORMATS, IMAGE_ERRORS, decode_image  # noqa: F401, for readers
from sources.lazy_images import ONE_COLOUR, RowLocation, load_images, print_once, row_locations, sizes_of
from sources.tables import File, Record, expand_data_paths, open_parquet, summarise_bad_rows
from sources.videos import Video, load_videos

ROLES = ("system", "user", "assistant", "tool")
PROMPT_SPECIAL_TOKEN_PATTERN = re.compile(r"<\|[^<>|]+\|>")  # tokenizers such as Qwen's read this as one special token
MAX_DEPTH = 32  # levels of lists and objects in a row
DECODE_THREADS = 8  # threads that check rows: decoding and fetching release the GIL
ROWS_AT_ONCE = 8  # rows that are read and checked together; their images are in memory at the same time
ROW_GROUP_ROWS = 128
ROW_GROUP_BYTES = 4 << 20  # reading a row reads its whole group, in 2 ms; a footer has 1 kB per group


@dataclass(frozen=True, slots=True)
class Example:
    """A checked row. `images` are encoded image files that can be decoded, one per <image> placeholder, in order. Those
    of a parquet file, and the frames of its videos, are read when they are used."""

    uid: str
    data_source: str
    messages: list[dict]
    images: Sequence[bytes]
    ground_truth: str
    extra: dict
    videos: Sequence[Video] = ()  # one per <video> placeholder, in order

    @property
    def pil_images(self) -> list[Image.Image]:
        """Return the images in RGB, decoded at each access."""
        return [decode_image(data) for data in self.images]

    @property
    def image_sizes(self) -> list[tuple[int, int]]:
        """Return (width, height) of each image."""
        return sizes_of(self.images)

    @property
    def video_sizes(self) -> list[tuple[int, float, tuple[int, int]]]:
        """Return (number of frames, frames per second, (width, height)) of each video."""
        return [(len(video.frames), video.fps, sizes_of(video.frames)[0]) for video in self.videos]


PLACEHOLDERS_ADDED = f"had images or videos but no {IMAGE_PLACEHOLDER} or <video> placeholders; added at the start"
NO_IMAGE = "have no image"


@dataclass(slots=True)
class RawRow:
    """A row as a source read it, before any check."""

    location: str  # file and row, for messages
    number: int  # index of the row in its source
    record: dict | str  # values by column, or the reason why the row cannot be read
    root: File = Path()  # where relative image paths start
    name: str = ""  # name of the file in uids
    image_source: RowLocation | None = None  # where its images are read from
    notes: set[str] = field(default_factory=set)  # what is remarkable about it; the rows with each note are counted


@dataclass(frozen=True)
class DataFormatConfig:
    """Data format"""

    prompt_key: str = flag_field("prompt", "dataset column of the prompt")
    image_key: str = flag_field("images", "dataset columns of the images, separated by commas; '' for text-only data")
    answer_key: str = flag_field(TRUTH, "dataset column of the ground truth; several (country,city) become one JSON "
                                 "object")
    data_source: str | None = flag_field(None, "task of every row, such as geo3k; overrides the data_source column")
    instruction: str = flag_field("", "text to append to prompts that do not end with it; the name of a task stands "
                                  "for that task's instruction")
    bad_rows: str = flag_field("error", "on unreadable or invalid rows: stop with an error, or skip and count them",
                               choices=("error", "skip"))
    image_root: str | None = flag_field(None, "folder that relative image paths are resolved against; paths outside it "
                                        "are refused (default: the data file's folder, without that restriction)",
                                        metavar="DIR")

    # These are settings only of ConvertConfig, which writes files
    split = None
    system = ""
    prompt_template = ""
    fetch = None  # training does not read from the network

    def known_columns(self) -> set[str]:
        """Return all columns with a fixed meaning; the others are extra information about a row."""
        keys = [self.image_key, self.answer_key] + [self.prompt_key] * (not self.prompt_template)
        names = [name for key in keys for name in (key, *split_column_names(key, ()))]
        return {*names, "data_source", "reward_model", "extra_info", *content.VIDEO_COLUMNS}

    def check_columns(self, columns: Iterable[str], file: File) -> None:
        """Raise UserError if a file lacks a column that the settings name."""
        named = {key: split_column_names(getattr(self, key), columns)
                 for key in ("prompt_key", "image_key", "answer_key")}
        if self.prompt_template:
            named = {"prompt_template": template_columns(self.prompt_template)} | named | {"prompt_key": []}
        remedy = ""
        if not self.split and {"question", "answer"} <= {*columns}:  # without a split, no file is written
            remedy = "; rows of image, question and answer are converted by prepare_data.py vqa --input FILE"
        missing_by_flag: dict[str, list[str]] = {}  # flag -> columns that it names and the file lacks
        for setting_name, names in named.items():
            for name in names:
                column = "reward_model" if name == TRUTH else name
                no_images = name in ("image", "images") and {*content.VIDEO_COLUMNS} & {*columns}
                if not no_images and column not in columns:
                    missing_by_flag.setdefault(flag_name(setting_name), []).append(repr(column))
        missing = [*itertools.chain(*missing_by_flag.values())]
        need(not missing, f"{file}: no column{'s' * (len(missing) > 1)} {', '.join(missing)}; it has "
             f"{', '.join(columns)}. Correct {', '.join(missing_by_flag)}"
             + ", or pass --image-key '' for rows without images" * ("--image-key" in missing_by_flag) + remedy)


@dataclass(frozen=True)
class DataConfig(DataFormatConfig):
    """Data"""

    data: str = flag_field(REQUIRED, "training data: parquet file, folder, glob or comma-separated list; see "
                           "prepare_data.py", metavar="FILE")
    eval_data: str | None = flag_field(None, "evaluation data during training, in the same forms as --data",
                                       metavar="FILE")
    max_prompt_tokens: int = flag_field(2048, "max prompt length in tokens, images included; longer prompts are "
                                        "dropped and counted", least=1)


@dataclass(frozen=True)
class ConvertConfig(DataFormatConfig):
    """Output file"""

    out: str = flag_field(REQUIRED, "parquet file to write", metavar="FILE")
    split: str = flag_field("train", "split to read or generate; stored in extra_info", choices=tuple(tables.SPLITS))
    limit: int | None = flag_field(None, "number of valid rows to write, from the first on (default: all)", least=1)
    inspect: bool = flag_field(False, "also print rows and statistics of the written file")
    input: tuple[str, ...] = flag_field((), "files, globs or URLs (s3://...); for parquet also folders", metavar="FILE")
    system: str = flag_field("", "system message put before each prompt")
    prompt_template: str = flag_field("", "prompt, with columns in braces: '<image>{question}\\nChoices: {choices}'",
                                      metavar="TEXT")
    url_timeout: float = flag_field(20.0, "seconds per try to fetch an image", above=0)
    url_max_mb: float = flag_field(32.0, "max size of an image from a URL, in MiB", above=0)
    url_tries: int = flag_field(3, "tries per URL", least=1)
    url_private: bool = flag_field(False, "also fetch from private, loopback and link-local addresses")

    def fetch(self, file: str | File) -> bytes:
        """Return the content of a file that a row names by URL, or of a file in an object store."""
        fetch = plug_in("sources.fetch", f"{file!s:.80}", "use files on this machine").fetch
        return fetch(file, self.url_timeout, self.url_max_mb, self.url_tries, self.url_private)


@dataclass(frozen=True)
class ToyConfig(ConvertConfig):
    """Toy rows"""

    toy: bool = flag_field(False, "generate toy rows instead of reading files")
    n: int = flag_field(1000, "number of toy rows", least=1)
    seed: int = flag_field(0, "random seed for the toy rows")


@dataclass(frozen=True)
class InspectConfig(DataFormatConfig, PixelConfig):
    """Inspection"""

    file: str = flag_field(REQUIRED, "parquet file, folder of shards, glob or comma-separated list", positional=True)
    limit: int | None = flag_field(None, "number of valid rows to read, from the first on (default: all)", least=1)
    rows: int = flag_field(3, "number of rows to print in full", least=0)
    model: str | None = flag_field(None, "model or processor to count prompt tokens with")


# ---------------------------------------------------------------------------------------------------- checking a row


def build_messages(prompt: object, system: str, instruction: str) -> list[dict]:
    """Return the checked messages of a prompt, which is a string or a list of {role, content}.

    `system` becomes the first message. `instruction` is appended to the last user message unless it already ends with
    it. Raise UserError with the reason if the prompt is invalid.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    need(prompt, "empty prompt")
    need(isinstance(prompt, list), f"prompt is a {type(prompt).__name__}, expected a string or a list of messages")
    messages = [{"role": "system", "content": system}] if system else []
    for i, m in enumerate(prompt):
        text = m.get("content") if isinstance(m, dict) else None
        need(isinstance(text, str),
             f"message {i} has no content string or parts; write images as {IMAGE_PLACEHOLDER} placeholders in it")
        role = m.get("role")
        need(role in ROLES, f"message {i} has role {role!r}, expected one of {', '.join(ROLES)}")
        need(role != "system" or not system, "the prompt already has a system message; drop --system")
        others = [k for k, v in m.items() if k not in ("role", "content") and v is not None]
        need(not others, f"message {i} has unsupported fields: {', '.join(others)}; remove them")
        for token in PROMPT_SPECIAL_TOKEN_PATTERN.findall(text):
            raise UserError(f"message {i} contains the special token {token!r}; remove or rephrase it")
        messages.append({"role": role, "content": text})
    user_messages = [m for m in messages if m["role"] == "user"]
    need(any(m["content"].strip() for m in user_messages), "empty prompt: no user message has any text")
    need(role != "assistant", "the last message is the assistant's (an answer left in the prompt?); remove it, or name "
         "the same column with --prompt-key and --answer-key to make it the ground truth")
    last = user_messages[-1]
    if not last["content"].endswith(instruction):
        last["content"] += instruction if last["content"].endswith("\n") else f" {instruction}"
    return messages


def add_placeholders(messages: list[dict], n: int, placeholder: str) -> bool:
    """Put a placeholder for each of n images or videos at the start of a prompt without any, and return whether that
    was needed. Raise UserError if a prompt has some placeholders, but not one for each."""
    n_placeholders, kind = sum(m["content"].count(placeholder) for m in messages), placeholder.strip("<>")
    remedy = "or correct --image-key" if placeholder == IMAGE_PLACEHOLDER else "in the column videos"
    need(n_placeholders in (0, n), f"{placeholder} placeholders in the prompt: {n_placeholders}; {kind}s: {n}; write "
         f"one per {kind}, {remedy}")
    first = next(m for m in messages if m["role"] == "user")
    first["content"] = placeholder * (n - n_placeholders) + first["content"]
    return n > n_placeholders


def build_extra_info(record: dict, reading: DataFormatConfig, reward_model: dict) -> dict:
    """Return extra_info, extended by the columns and reward_model fields that have no other use."""
    extra = record.get("extra_info")
    need(isinstance(extra, dict | None), f"extra_info is a {type(extra).__name__}, expected a struct")
    unused = {k: v for k, v in reward_model.items() if k not in ("style", "ground_truth")}
    unused |= {k: v for k, v in record.items() if k not in reading.known_columns()}
    return drop_none(unused | (extra or {}))


def build_example(raw: RawRow, reading: DataFormatConfig) -> Example:
    """Check a row completely, decoding each image once, and return it as an Example. Raise UserError with the reason,
    which does not name file and row.

    With a split (when a file is written) a row must have a data_source, and rows without split or index get them.
    """
    record = raw.record
    if isinstance(record, str):
        raise UserError(record)
    levels = MAX_DEPTH - 1 if reading.split else MAX_DEPTH  # a column may be written one level deeper, into extra_info
    need(not content.is_too_deep(record, levels), f"nested more than {levels} levels deep")
    prompt, *cells = content.row_content(record, reading.prompt_key, reading.image_key, reading.prompt_template)
    if reading.prompt_key == reading.answer_key and isinstance(prompt, list) and prompt:
        *prompt, last = prompt  # a conversation that ends with its answer
        need(prompt and isinstance(last, dict) and last.get("role") == "assistant", "the last message is not the "
             "assistant's, so it is no answer; name the column of the answer with --answer-key")
        record = record | {reading.answer_key: last.get("content")}
    messages = build_messages(prompt, reading.system, resolve_instruction(reading.instruction))
    images, videos = load_images(cells[0], raw, reading), load_videos(cells[1], raw, reading)
    counts = {content.VIDEO_PLACEHOLDER: len(videos), IMAGE_PLACEHOLDER: len(images)}  # images last, to be first
    if any([add_placeholders(messages, n, mark) for mark, n in counts.items()]):
        raw.notes.add(PLACEHOLDERS_ADDED)
    raw.notes |= {NO_IMAGE} if not images and not videos else set()
    reward_model = record.get("reward_model") if isinstance(record.get("reward_model"), dict) else {}
    truth = content.row_truth(record | {TRUTH: reward_model.get("ground_truth")}, reading.answer_key)
    extra = build_extra_info(record, reading, reward_model)
    source = reading.data_source or record.get("data_source") or ""
    remedy = "--data-source NAME sets it for every row"
    need(isinstance(source, str), f"data_source is a {type(source).__name__}, expected a string; {remedy}")
    truth = unwrap_truth(truth) if task_name(source) in TASKS else truth  # unchanged for the user's own tasks
    if reading.split:
        need(source, f"no data_source; {remedy}")
        extra = {"split": reading.split, "index": raw.number} | extra
    # rows without an index are identified by their number; "row" distinguishes these from real indices
    names = extra if reading.split else record.get("extra_info") or {}  # other columns have meanings of their own
    index = names.get("index", f"row{raw.number}")
    file = f"{raw.name}/" if raw.name else ""
    uid = str(names.get("uid", f"{source or 'data'}/{names.get('split', '-')}/{file}{index}"))
    with as_user_error(UnicodeEncodeError, "text is not UTF-8; save the file as UTF-8"):
        json.dumps([messages, truth, extra, uid, source], ensure_ascii=False, default=str).encode()
    return Example(uid, source, messages, images, truth, extra, videos)


# ---------------------------------------------------------------------------------------------------- checking all rows

Check = Callable[[Sequence[Example]], object]


def valid_examples(
    raws: Iterable[RawRow], reading: DataFormatConfig, bad: list, limit: int | None = None, check: Check = len
) -> Iterator[Example]:
    """Yield the first `limit` valid rows in order. For each bad row append a line (file, row, reason) to `bad`; at the
    end `check_bad_rows` raises UserError if bad rows are not allowed. `check` raises UserError for rows that the reward
    cannot grade."""

    def attempt(raw: RawRow) -> Example | UserError:
        try:
            with ErrorContext(f"in {printable(raw.location)}"):
                return build_example(raw, reading)
        except UserError as e:
            return e

    def results() -> Iterator[tuple[RawRow, Example | UserError]]:
        rows, pool = iter(raws), ThreadPoolExecutor(DECODE_THREADS)
        try:
            while chunk := list(itertools.islice(rows, ROWS_AT_ONCE)):
                yield from zip(chunk, pool.map(attempt, chunk), strict=True)
        finally:  # cancel the rows that are not started, so that Ctrl-C does not wait for them
            pool.shutdown(cancel_futures=True)

    taken: dict[str, str] = {}  # uid -> location of the row that has it
    notes: Counter[str] = Counter()
    for raw, result in refuse_lost_images(results()) if reading.split and reading.image_key else results():
        try:
            if isinstance(result, UserError):
                raise result
            need(result.uid not in taken, f"uid {result.uid[:200]!r} is already taken by {taken.get(result.uid)}; make "
                 "extra_info.uid unique")
            check([result])
        except UserError as e:
            bad.append(printable(f"{raw.location}: {e}"))
            continue
        taken[result.uid] = raw.location
        notes.update(raw.notes)
        yield result
        if len(taken) == limit:
            break
    for note, n in sorted(notes.items()):
        # what all rows have in common is the format of the file, unless it names a column of images
        if n < len(taken) or note == ONE_COLOUR or note == NO_IMAGE and reading.split and reading.image_key:
            print_once(f"{n} of {len(taken)} rows {note}")
    check_bad_rows(bad, len(taken), reading.bad_rows)


def refuse_lost_images(
    results: Iterable[tuple[RawRow, Example | UserError]]
) -> Iterator[tuple[RawRow, Example | UserError]]:
    """Yield the results, with a UserError for each row without an image whose file has rows with images."""
    lost = UserError("no image, but other rows of the file have one; correct the row, or convert rows without images "
                     "from a file of their own")
    for _, rows in itertools.groupby(results, lambda item: item[0].name):
        waiting: list | None = []  # rows without an image, until the file's first image; then None
        for raw, result in rows:
            if isinstance(result, Example) and NO_IMAGE not in raw.notes:
                yield from ((other, lost) for other, _ in waiting or ())
                waiting = None
            elif isinstance(result, Example) and waiting is None:
                result = lost
            elif isinstance(result, Example):
                waiting.append((raw, result))
                continue
            yield raw, result
        yield from waiting or ()


def check_bad_rows(bad: list[str], n_valid: int, bad_rows: str) -> None:
    """Raise UserError with the first few bad rows and their number, unless `bad_rows` is "skip" and some rows are
    valid."""
    if bad and (bad_rows == "error" or not n_valid):
        lines = "\n  ".join(summarise_bad_rows(bad))
        remark = " (parquet rows count from 0)" if re.search(r" rows? \d", lines) else ""  # text files have lines
        remedy = "Fix them, or pass --bad-rows skip to leave them out." if n_valid else "Fix them."
        raise UserError(f"{len(bad)} of {len(bad) + n_valid} rows are bad{remark}:\n  {lines}\n{remedy}")


def print_left_out(bad: list[str]) -> None:
    """Print the first few bad rows, and how many more were left out."""
    for line in summarise_bad_rows(bad):
        print("left out:", line)


# ---------------------------------------------------------------------------------------------------- reading


Reader = Callable[[File, DataFormatConfig], Iterator[tuple[str, Record]]]  # yields (location, row) of a file's rows


def parquet_records(file: File, reading: DataFormatConfig) -> Iterator[tuple[str, Record]]:
    """Yield (location, row) of each row of a parquet file. When a file is written, rows also have the columns that have
    no meaning here."""
    row = 0
    try:
        with open_parquet(file) as parquet:
            schema = parquet.schema_arrow
            reading.check_columns(schema.names, file)
            extra = [c for c in schema.names if c not in reading.known_columns()]
            # extra_info is converted to JSON, so it cannot hold binary columns
            binary = [c for c in extra if "binary" in str(schema.field(c).type)]
            if binary and reading.split:
                print(f"{file}: left out the binary columns {', '.join(binary)}")
            columns = [c for c in schema.names if (c in extra or c in reading.known_columns()) and c not in binary]
            need(parquet.metadata.num_rows, f"{file} has no rows")
            for row, record in enumerate(tables.parquet_rows(parquet, columns)):
                yield f"row {row}", record
    except (pa.ArrowException, OSError, *tables.store_errors()) as e:
        raise UserError(f"{file} is not a parquet file, or is damaged near row {row}: {e}; convert other formats "
                        "with prepare_data.py, and copy a damaged file again") from e


def text_records(file: File, reading: DataFormatConfig, file_type: str) -> Iterator[tuple[str, Record]]:
    """Yield (location, row) of each row of a text file, read by sources/text.py. Raise UserError if no row can be read,
    or if no row has a column that the settings name."""
    read = getattr(plug_in("sources.text", f"--input {file}", "convert it to a parquet file elsewhere"),
                   f"{file_type}_records")
    columns: dict[str, None] = {}
    problem = "it is empty"
    for location, record in read(file):  # rows may leave keys out: a column is missing only if no row has it
        if isinstance(record, dict):
            columns |= dict.fromkeys(record)
        else:
            problem = f"{location}: {record}"
    need(columns, f"{file}: no row can be read; {problem}")
    reading.check_columns(columns, file)
    yield from read(file)


def table_rows(files: list[File], reading: DataFormatConfig, records: Reader = parquet_records) -> Iterator[RawRow]:
    """Yield the rows of table files, numbered consecutively over all files."""
    numbers = itertools.count()
    for file, name in zip(files, tables.unique_file_names(files), strict=True):
        for location, record in records(file, reading):
            root = tables.to_path(reading.image_root) if reading.image_root else file.parent
            yield RawRow(f"{file} {location}", next(numbers), record, root, name)


def read_examples(
    path: str | Path | list, reading: DataFormatConfig, limit: int | None = None, check: Check = len
) -> tuple[list[Example], list[str]]:
    """Read and check parquet files in our format, verl's or EasyR1's (prompt_key="problem", answer_key="answer").

    Return the first `limit` valid examples, and one line per row left out (only with bad_rows="skip"). The data_source
    is "" if the file has none. Raise UserError that names file, row, reason and fix. `check` is described in
    `valid_examples`.
    """
    for name in (*(path if isinstance(path, list) else [path]), reading.image_root or ""):
        need(not tables.url_scheme(str(name)),
             f"{name}: training does not read from the network; download it with prepare_data.py parquet --input URL")
    files = expand_data_paths(path)
    for file in files:
        need(file.suffix not in (".jsonl", ".csv"),
             f"{file} is not a parquet file; run prepare_data.py SOURCE --input {file} --out F.parquet; SOURCE is vqa "
             f"for columns image, question and answer, {file.suffix[1:]} for others")
    bad: list[str] = []
    examples = list(valid_examples(lazy_parquet_rows(files, reading), reading, bad, limit, check))
    pa.default_memory_pool().release_unused()
    return examples, bad


def lazy_parquet_rows(files: list[Path], reading: DataFormatConfig) -> Iterator[RawRow]:
    """Yield the rows of parquet files, each with the location that its images are read from."""
    keys = (reading.prompt_key, reading.image_key)
    locations = (location for file in files
                 for location in row_locations(file, Path(reading.image_root or file.parent), *keys))
    for raw, raw.image_source in zip(table_rows(files, reading), locations, strict=False):
        yield raw


# ---------------------------------------------------------------------------------------------------- writing

SCHEMA = pa.schema({
    "data_source": pa.string(),
    "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
    "images": pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})),
    "videos": pa.list_(pa.struct({"frames": pa.list_(pa.binary()), "fps": pa.float64()})),
    "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
})  # and extra_info, a struct whose fields depend on the data


def row_groups(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Yield examples in groups small enough that a reader never holds much more than ROW_GROUP_BYTES of images."""
    group: list[Example] = []
    size = 0
    for example in examples:
        group.append(example)
        size += sum(map(len, itertools.chain(example.images, *(video.frames for video in example.videos))))
        if len(group) == ROW_GROUP_ROWS or size >= ROW_GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def example_to_record(e: Example) -> dict:
    """Return the columns of SCHEMA for an example."""
    return {
        "data_source": e.data_source,
        "prompt": e.messages,
        "images": [{"bytes": data} for data in e.images],
        "videos": [{"frames": list(video.frames), "fps": video.fps} for video in e.videos] or None,
        "reward_model": {"style": "rule", "ground_truth": e.ground_truth},
    }


def write_examples(examples: Iterable[Example], path: str | Path) -> int:
    """Stream examples into one parquet file, which is written completely or not at all, and return the number of rows.

    The type of extra_info is known only after the last row, so all other columns (above all images) are first written
    to a draft.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    extras: list[dict] = []
    for stale_draft in path.parent.glob(f".{escape(path.name)}.*/draft"):  # unlocked: its process was killed
        with suppress(OSError), stale_draft.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(stale_draft.parent)
    work_folder = tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent)
    with work_folder as folder, (draft := Path(folder, "draft")).open("wb") as lock:
        with suppress(OSError):  # some network file systems do not support locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        final = Path(folder, "final")
        # the page size is checked every 8 rows: by default all images of a row group would share one page
        pages = {"write_batch_size": 8, "write_page_checksum": True}
        with pq.ParquetWriter(draft, SCHEMA, **pages) as writer:
            for group in row_groups(examples):
                writer.write_batch(pa.RecordBatch.from_pylist(list(map(example_to_record, group)), schema=SCHEMA))
                extras += [drop_none(json.loads(json.dumps(e.extra | {"uid": e.uid}, default=str))) for e in group]
        need(extras, f"no rows to write to {path}: the source has no usable row; check --input and its flags")
        column = tables.build_extra_info_column(extras)
        schema = SCHEMA.append(pa.field("extra_info", column.type))
        n_written = 0
        with open_parquet(draft) as source, pq.ParquetWriter(final, schema, **pages) as writer:
            for i in range(source.num_row_groups):
                table = source.read_row_group(i)
                writer.write_table(table.append_column("extra_info", column.slice(n_written, len(table))))
                n_written += len(table)
        os.replace(final, path)
    return len(extras)


# ---------------------------------------------------------------------------------------------------- sources


TABLE_SOURCES: dict[str, tuple[Reader, str, str]] = {  # reader, default --answer-key, help
    "jsonl": (partial(text_records, file_type="jsonl"), "answer", "A JSONL file: one JSON object per line."),
    "csv": (partial(text_records, file_type="csv"), "answer", "A CSV file with a header line; lists as JSON."),
    "parquet": (parquet_records, TRUTH, "A parquet file of any layout; unknown columns go to extra_info."),
}


def resolve_instruction(text: str) -> str:
    """Return the text of --instruction: the instruction of the task with that name, or else the text itself."""
    load_tasks()
    return (text in TASKS and TASKS[text].instruction) or text


def source_rows(source: str, cfg: ConvertConfig) -> Iterator[RawRow]:
    """Return the rows of files, or toy rows generated by a task."""
    if source in TABLE_SOURCES:
        return table_rows(expand_data_paths(cfg.input), cfg, TABLE_SOURCES[source][0])
    task = find_tasks()[source]
    if hasattr(task, "rows") and not getattr(cfg, "toy", False):
        return task.rows(cfg)
    return (RawRow(f"{source} row {i}", i, row) for i, row in enumerate(task.toy(cfg.n, cfg.split, cfg.seed)))


# ---------------------------------------------------------------------------------------------------- command line


def parse_args(argv: list[str] | None = None) -> tuple[str, ConvertConfig | InspectConfig]:
    """Return the source (or "inspect") and its settings."""
    parser = FlagParser(__doc__)
    about = "description and flags of each source: prepare_data.py SOURCE -h"
    sources = parser.add_subparsers(dest="source", metavar="SOURCE", required=True, title="sources", description=about)
    commands = {name: (about, ConvertConfig, {"answer_key": key}) for name, (_, key, about) in TABLE_SOURCES.items()}
    for name, task in find_tasks().items():
        config = ToyConfig if hasattr(task, "toy") else ConvertConfig
        commands[name] = ((task.__doc__ or name).partition("\n")[0], config, getattr(task, "DEFAULTS", {}))
    commands["inspect"] = ("Print rows, counts and statistics of parquet files.", InspectConfig, {})
    for name, (about, config, defaults) in commands.items():
        command = sources.add_parser(name, help=about, description=about)
        add_flags(command, config)
        for action in command._actions:
            if action.dest in defaults:  # the help text has the default that holds for all sources
                action.help = f"{action.help.partition(' (default')[0]} (default: {defaults[action.dest]})"
        command.set_defaults(config=config, **defaults)
    first = " ".join(sys.argv[1:2] if argv is None else argv[:1])
    need(first[:1] == "-" or not re.search("[./]", first), f"{first} is in the place of SOURCE; pass SOURCE --input "
         f"{first} --out FILE.parquet; SOURCE is vqa for columns image, question and answer; csv, jsonl or parquet "
         "for others")
    args = vars(parser.parse_args(argv))
    return args["source"], build_config(args["config"], args)


TRUTH_FORMS = {
    "letters": "[A-Za-z]", "numbers": r"[+-]?[0-9][0-9.,eE+-]*%?", "JSON": r"[\[{].*",
    "texts of over 8 words, which only the same words can earn": r"(?:\S+\s+){8}.*",
}  # fmt: skip


def truth_form(truth: str) -> str:
    """Return the kind of a ground truth, for the summary that prepare_data.py prints."""
    matches = (form for form, pattern in TRUTH_FORMS.items() if re.fullmatch(pattern, truth.strip(), re.DOTALL))
    return next(matches, "short texts")


def check_output_file(source: str, cfg: ConvertConfig) -> None:
    """Raise UserError, before any work, if the file --out cannot be written."""
    out = Path(cfg.out)
    is_new_file = (out.is_file() or not out.exists()) and errors.nearest_existing(out.parent).is_dir()
    need(is_new_file and out.suffix == ".parquet",
         f"--out is {out}, expected the parquet file to write, e.g. --out {source}.parquet")
    inputs = [Path(name).resolve() for name in cfg.input]
    need(out.resolve() not in inputs, f"--out {out} is also the --input; write to another file")
    errors.check_writable(out.parent, f"--out {out}")


def make_file(source: str, cfg: ConvertConfig) -> None:
    """Convert the rows of a source to the parquet file --out."""
    need(not (getattr(cfg, "toy", False) and cfg.input), "--toy makes rows and would ignore --input; leave one out")
    check_output_file(source, cfg)
    template_columns(cfg.prompt_template)
    bad: list[str] = []
    raws = tqdm(source_rows(source, cfg), desc=source, unit=" rows", disable=None)
    # rows whose task is not built in are graded by the user's own reward
    check = partial(check_tasks, graded_elsewhere=lambda example: task_name(example.data_source) not in TASKS)
    forms: Counter[str] = Counter()
    extra: dict[str, None] = {}

    def described(examples: Iterable[Example]) -> Iterator[Example]:
        for example in examples:
            forms[truth_form(example.ground_truth)] += 1
            extra.update(dict.fromkeys(example.extra))
            yield example

    with errors.report_write_errors(Path(cfg.out), f"--out {cfg.out}"):
        count = write_examples(described(valid_examples(raws, cfg, bad, cfg.limit, check)), cfg.out)
    size = Path(cfg.out).stat().st_size / 2**10
    size_text = f"{size:.1f} KiB" if size < 2**10 else f"{size / 2**10:.1f} MiB"
    print(f"wrote {count} row{'s' * (count != 1)} ({size_text}) to {cfg.out}; left out {len(bad)}")
    print("truths:", ", ".join(f"{n} {form}" for form, n in forms.most_common()))
    shown = {"split", "index", "uid", "answer_type", *CHOICE_COLUMNS, *template_columns(cfg.prompt_template)}
    if names := [name for name in extra if name not in shown]:
        print(f"kept in extra_info, not in the prompt: {', '.join(map(printable, names))}")
    print_left_out(bad)
    if cfg.inspect:
        inspect_file(InspectConfig(file=cfg.out))


def inspect_file(cfg: InspectConfig) -> None:
    """Print some rows of a file in full, and statistics of all rows."""
    look = plug_in("sources.inspect_rows", "inspect", "leave it out")
    examples, bad = read_examples(cfg.file, cfg, cfg.limit)
    for example in examples[: cfg.rows]:
        look.print_example(example)
    print(f"=== {cfg.file}: {len(examples)} rows, {len(bad)} left out")
    print_left_out(bad)
    look.print_statistics(examples, cfg.model, cfg.min_pixels, cfg.max_pixels)


def main(command: tuple[str, ConvertConfig | InspectConfig]) -> None:
    source, cfg = command
    inspect_file(cfg) if source == "inspect" else make_file(source, cfg)


if __name__ == "__main__":
    from utils import run_script  # imported here because reward workers import this file but do not need torch

    run_script(main, parse_args)
