"""Any source -> one parquet file, and back again: the only place that knows the on-disk format.

    python prepare_data.py geo3k --input hiyouga/geometry3k --split train --out geo3k.parquet
    python prepare_data.py shapes --toy --n 2000 --split train --out shapes.parquet
    python prepare_data.py jsonl --input qa.jsonl --data-source vqa --add-image-marks --out qa.parquet
    python prepare_data.py inspect geo3k.parquet --model Qwen/Qwen2.5-VL-7B-Instruct

Columns: data_source string, prompt list<struct<role, content>>, images list<struct<bytes, path>>,
reward_model struct<style, ground_truth>, extra_info struct<split, index, uid, ...>. Each literal <image> in a
prompt stands for one image, in order. Image files are stored byte for byte as they were found.
"""

import argparse
import importlib
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from errors import Note, UserError, check_writable, existing, writing
from settings import REQUIRED, add_settings, setting
from sources.fetch import fetch_url
from sources.images import FORMATS, IMAGE_ERRORS, check_decodes, decode_image, image_bytes  # noqa: F401, for readers
from sources.look import first_of, print_example, print_statistics, shown
from sources.tables import SPLITS, Record, batch_records, csv_records, data_files, file_names, jsonl_records

MARK = "<image>"
ROLES = ("system", "user", "assistant", "tool")
VIDEOS = ("videos", "video")
SPECIAL = re.compile(r"<\|[^<>|]+\|>")  # what tokenizers like Qwen's read as one special token
MAX_DEPTH = 32  # levels of lists and objects in a row
WORKERS = 8  # threads that check rows: decoding and fetching release the GIL
CHUNK = 64  # rows checked together, so that memory holds a few dozen images beyond the result
ROW_GROUP_ROWS = 128
ROW_GROUP_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Example:
    """One checked row. `images` are encoded files that are known to decode, one per <image> mark in order."""

    uid: str
    data_source: str
    messages: list[dict]
    images: list[bytes]
    ground_truth: str
    extra: dict


@dataclass(slots=True)
class Raw:
    """One row as a source found it, before any check."""

    where: str  # file and row, as messages name it
    number: int  # of the row in its source
    record: dict | str  # by column, or why the source could not read it
    root: Path = Path()  # where relative image paths start
    name: str = ""  # tells its file from others in uids


TRUTH = "reward_model.ground_truth"


@dataclass(frozen=True)
class ReadingConfig:
    """Reading data"""

    prompt_key: str = setting("prompt", "column of the prompt")
    image_key: str = setting("images", "column of the images ('' if there are none)")
    answer_key: str = setting(TRUTH, "column of the answer")
    data_source: str | None = setting(None, "task of all rows, e.g. geo3k, whatever the rows themselves say")
    instruction: str = setting("", "text behind prompts that lack it; geo3k: the text of that task")
    bad_rows: str = setting("error", "what to do with unreadable rows", choices=("error", "skip"))


@dataclass(frozen=True)
class DataConfig(ReadingConfig):
    """Data"""

    data: str = setting(REQUIRED, "training parquet file(s), see prepare_data.py", metavar="FILE")
    eval_data: str | None = setting(None, "parquet file(s) for evaluation during training", metavar="FILE")
    max_prompt_tokens: int = setting(2048, "longer prompts are dropped and counted", least=1)


@dataclass(frozen=True)
class Reading(ReadingConfig):
    """And what is asked where a file is made."""

    split: str | None = None  # of rows that do not say theirs
    system: str = ""  # message put in front
    add_image_marks: bool = False
    fetch: Callable[[str], bytes] | None = None

    def known(self) -> set[str]:
        """All columns that are something else than further information about a row."""
        keys = (self.prompt_key, self.image_key, self.answer_key)
        return {*keys, "data_source", "reward_model", "extra_info", *VIDEOS}

    def check_columns(self, columns: Iterable[str], file: Path) -> None:
        """Raise UserError unless a file has what the keys name."""
        wanted = {
            "--prompt-key": self.prompt_key,
            "--image-key ('' if there are no images)": self.image_key,
            "--answer-key": "reward_model" if self.answer_key == TRUTH else self.answer_key,
        }
        for flag, key in wanted.items():
            if key and key not in columns:
                has = ", ".join(map(str, columns))
                raise UserError(f"{file}: no column {key!r}; it has {has}. Name the right one with {flag}")


# ---------------------------------------------------------------------------------------------------- checking a row


def to_messages(prompt: object, system: str = "", instruction: str = "") -> list[dict]:
    """A string or a list of {role, content} -> messages.

    `system` is put in front, `instruction` behind the last user message that does not end with it.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not prompt:
        raise UserError("empty prompt")
    if not isinstance(prompt, list):
        raise UserError(f"prompt is a {type(prompt).__name__}, expected a string or a list of messages")
    messages = [{"role": "system", "content": system}] if system else []
    for i, m in enumerate(prompt):
        if not isinstance(m, dict) or not isinstance(m.get("content"), str):
            raise UserError(f"message {i} has no content string; write images as {MARK} marks inside the text")
        if m.get("role") not in ROLES:
            raise UserError(f"message {i} has role {m.get('role')!r}, expected one of {', '.join(ROLES)}")
        if system and m["role"] == "system":
            raise UserError("the prompt already has a system message and --system gives another; drop one")
        if more := [k for k, v in m.items() if k not in ("role", "content") and v is not None]:
            raise UserError(f"message {i} has fields the format cannot hold: {', '.join(more)}")
        messages.append({"role": m["role"], "content": m["content"]})
    questions = [m for m in messages if m["role"] == "user"]
    if not any(m["content"].strip() for m in questions):
        raise UserError("empty prompt: no user message has any text")
    if messages[-1]["role"] == "assistant":
        raise UserError("the last message is the assistant's (an answer left in the prompt?); it must be the user's")
    if not questions[-1]["content"].endswith(instruction):
        questions[-1]["content"] += f" {instruction}"
    for i, m in enumerate(messages):
        if found := SPECIAL.search(m["content"]):
            raise UserError(f"message {i} contains {found[0]!r}, a special token to tokenizers; write it otherwise")
        if "<video>" in m["content"]:
            raise UserError(f"message {i} contains <video>, and videos are not supported; leave such rows out")
    return messages


def to_images(value: object, root: Path, fetch: Callable[[str], bytes] | None = None) -> list[bytes]:
    """An image cell or a list of them, which in CSV is JSON -> encoded files that decode."""
    if value is None or value == "":
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):  # else it is the name of a file
            value = json.loads(value)
    images = []
    for i, cell in enumerate(value if isinstance(value, list) else [value]):
        try:
            data = image_bytes(cell, root, fetch)
            check_decodes(data)
        except UserError as e:
            raise UserError(f"image {i} {e}") from e
        images.append(data)
    return images


def count_marks(messages: list[dict]) -> int:
    """Number of literal <image> marks in all contents."""
    return sum(m["content"].count(MARK) for m in messages)


def check_marks(messages: list[dict], images: int, add_marks: bool) -> None:
    """One mark per image; `add_marks` puts them in front of a prompt without any."""
    marks = count_marks(messages)
    if add_marks and not marks:
        first = next(m for m in messages if m["role"] == "user")
        first["content"] = MARK * images + first["content"]
    elif marks != images:
        remedy = f"the prompt needs one {MARK} per image"
        if not marks:
            remedy = "prepare_data.py --add-image-marks puts the marks in front of the prompt"
        elif not images:
            remedy = "--image-key names the column of the images"
        raise UserError(f"{marks} {MARK} marks in the prompt but {images} images; {remedy}")


def to_truth(value: object) -> str:
    """Ground truth as a string: strings stay, everything else becomes JSON."""
    if value is None or not str(value).strip():
        raise UserError("no ground truth: the answer is missing or empty; --answer-key names its column")
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise UserError(f"ground truth {value!r} is neither a string nor JSON: {e}") from e


def too_deep(value: object, levels: int) -> bool:
    """Whether lists and objects are nested further than our own and others' recursion can be trusted with."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return levels == 0 or any(too_deep(v, levels - 1) for v in inner)


def drop_none(value: object) -> object:
    """Without the None fields that a struct column gives to rows that lack a field."""
    if isinstance(value, list):
        return [drop_none(v) for v in value]
    return {k: drop_none(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def to_extra(record: dict, known: set[str], reward_model: dict) -> dict:
    """extra_info, and whatever else there is without a meaning of its own."""
    extra = record.get("extra_info")
    if not isinstance(extra, dict | None):
        raise UserError(f"extra_info is a {type(extra).__name__}, expected a struct")
    more = {k: v for k, v in reward_model.items() if k not in ("style", "ground_truth")}
    more |= {k: v for k, v in record.items() if k not in known}
    return drop_none(more | (extra or {}))


def build_example(raw: Raw, reading: Reading) -> Example:
    """Check one row completely, decoding each image once. Raises UserError with the reason, without file and row.

    With a split (writing) a row must have a data_source, and rows without split or index get them.
    """
    record = raw.record
    if isinstance(record, str):
        raise UserError(record)
    levels = MAX_DEPTH - 1 if reading.split else MAX_DEPTH  # a column may be written one level deeper, into extra_info
    if too_deep(record, levels):
        raise UserError(f"nested more than {levels} levels deep")
    for key in VIDEOS:
        if key != reading.image_key and record.get(key):
            raise UserError(f"column {key} is not empty, and videos are not supported; leave such rows out")
    messages = to_messages(record.get(reading.prompt_key), reading.system, instruction_of(reading.instruction))
    images = to_images(record.get(reading.image_key) if reading.image_key else None, raw.root, reading.fetch)
    check_marks(messages, len(images), reading.add_image_marks)
    reward_model = record.get("reward_model") if isinstance(record.get("reward_model"), dict) else {}
    in_reward_model = reading.answer_key == TRUTH
    truth = to_truth(reward_model.get("ground_truth") if in_reward_model else record.get(reading.answer_key))
    extra = to_extra(record, reading.known(), reward_model)
    source = reading.data_source or record.get("data_source") or ""
    if not isinstance(source, str):
        raise UserError(f"data_source is a {type(source).__name__}, expected a string; --data-source NAME replaces it")
    if reading.split:
        if not source:
            raise UserError("no data_source; --data-source NAME gives one to every row")
        extra = {"split": reading.split, "index": raw.number} | extra
    # rows without an index are told apart by their number; "row" keeps those apart from real indices
    index = extra.get("index", f"row{raw.number}")
    file = f"{raw.name}/" if raw.name else ""
    uid = str(extra.get("uid", f"{source or 'data'}/{extra.get('split', '-')}/{file}{index}"))
    try:
        json.dumps([messages, truth, extra, uid, source], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as e:
        raise UserError(f"text is not UTF-8 ({e}); save the file as UTF-8") from e
    return Example(uid, source, messages, images, truth, extra)


# ---------------------------------------------------------------------------------------------------- checking all rows


def checked(raws: Iterable[Raw], reading: Reading, bad: list[str]) -> Iterator[Example]:
    """Yield the good rows in order; append one line per bad row (file, row, reason) to `bad`."""

    def attempt(raw: Raw) -> Example | UserError:
        try:
            with Note(f"in {shown(raw.where)}"):
                return build_example(raw, reading)
        except UserError as e:
            return e

    raws = iter(raws)
    taken: dict[str, str] = {}  # uid -> the row that has it
    with ThreadPoolExecutor(WORKERS) as pool:
        while chunk := list(itertools.islice(raws, CHUNK)):
            with closing(pool.map(attempt, chunk)) as results:  # drops what is not begun: Ctrl-C is not to wait for it
                for raw, result in zip(chunk, results, strict=True):
                    if isinstance(result, Example) and result.uid in taken:
                        uid = result.uid[:200]
                        other = taken[result.uid]
                        result = UserError(f"uid {uid!r} is already taken by {other}; make extra_info.uid unique")
                    if isinstance(result, UserError):
                        bad.append(shown(f"{raw.where}: {result}"))
                    else:
                        taken[result.uid] = raw.where
                        yield result


def refuse_bad(bad: list[str], good: int, bad_rows: str) -> None:
    """Raise UserError with the first few bad rows and the count, unless `bad_rows` is "skip" and some are good."""
    if bad_rows not in ("error", "skip"):
        raise UserError(f"--bad-rows is {bad_rows!r}, expected error or skip")
    if bad and (bad_rows == "error" or not good):
        lines = "\n  ".join(first_of(bad))
        remark = " (parquet rows count from 0)" if re.search(r" row \d+: ", lines) else ""  # text files have lines
        remedy = "Mend them, or pass --bad-rows skip to leave them out." if good else "Mend them."
        raise UserError(f"{len(bad)} of {len(bad) + good} rows are bad{remark}:\n  {lines}\n{remedy}")


def good_rows(raws: Iterable[Raw], reading: Reading, bad: list[str], limit: int | None) -> Iterator[Example]:
    """The first `limit` good rows; `bad` gets a line for each other, of which `refuse_bad` judges at the end."""
    good = 0
    for example in itertools.islice(checked(raws, reading, bad), limit):
        good += 1
        yield example
    refuse_bad(bad, good, reading.bad_rows)


# ---------------------------------------------------------------------------------------------------- reading


def table_rows(files: list[Path], records: Callable, reading: Reading, root: Path | None) -> Iterator[Raw]:
    """Rows of the tables that `records(file, reading)` reads, (place, record) each; `number` runs on over the files."""
    numbers = itertools.count()
    for file, name in zip(files, file_names(files), strict=True):
        for place, record in records(file, reading):
            yield Raw(f"{file} {place}", next(numbers), record, root or file.parent, name)


def parquet_records(file: Path, reading: Reading, every_column: bool = False) -> Iterator[tuple[str, Record]]:
    """The place and the row of each row of a parquet file; `every_column`: also those without a meaning here."""
    row = 0
    try:
        with pq.ParquetFile(file) as parquet:
            schema = parquet.schema_arrow
            reading.check_columns(schema.names, file)
            columns = [c for c in schema.names if every_column or c in reading.known()]
            # binary columns other than the images would not survive as extra_info
            binary = [c for c in columns if c not in reading.known() and "binary" in str(schema.field(c).type)]
            if binary:
                print(f"{file}: left out the binary columns {', '.join(binary)}")
            for batch in parquet.iter_batches(CHUNK, columns=[c for c in columns if c not in binary]):
                for record in batch_records(batch):
                    yield f"row {row}", record
                    row += 1
    except (pa.ArrowException, OSError) as e:
        raise UserError(f"{file} is no parquet file, or is damaged near row {row}: {e}") from e
    if row == 0:
        raise UserError(f"{file} has no rows")


def text_records(file: Path, reading: Reading, read: Callable) -> Iterator[tuple[str, Record]]:
    """The place and the row of each row of a text file, as `read(file)` finds them."""
    columns: dict[str, None] = {}
    problem = "it is empty"
    for place, record in read(file):  # rows may leave keys out: a column is missing only if no row has it
        if isinstance(record, dict):
            columns |= dict.fromkeys(record)
        else:
            problem = f"{place}: {record}"
    if not columns:
        raise UserError(f"{file}: no row can be read; {problem}")
    reading.check_columns(columns, file)
    yield from read(file)


def read_examples(
    path: str | Path | list, reading: Reading | None = None, limit: int | None = None
) -> tuple[list[Example], list[str]]:
    """Read and check parquet file(s): ours, verl's, EasyR1's (prompt_key="problem", answer_key="answer").

    Returns the first `limit` good examples, and one line per row left out (only with bad_rows="skip"). A file without
    data sources gives "". Raises UserError naming file, row, reason and remedy.
    """
    reading = reading or Reading()
    bad: list[str] = []
    rows = table_rows(data_files(path), parquet_records, reading, None)
    return list(good_rows(rows, reading, bad, limit)), bad


def reading_of(args: argparse.Namespace | ReadingConfig) -> Reading:
    """What flags or settings say of how to read."""
    return Reading(**{f.name: getattr(args, f.name) for f in fields(Reading) if hasattr(args, f.name)})


def read_flagged(
    path: str, args: argparse.Namespace | ReadingConfig, limit: int | None = None
) -> tuple[list[Example], list[str]]:
    """`read_examples` as flags or settings say."""
    return read_examples(path, reading_of(args), limit)


# ---------------------------------------------------------------------------------------------------- writing

SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "images": pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
    }
)  # and extra_info, a struct whose fields depend on the data


def row_groups(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Groups small enough that a reader never holds much more than ROW_GROUP_BYTES of images."""
    group: list[Example] = []
    size = 0
    for example in examples:
        group.append(example)
        size += sum(map(len, example.images))
        if len(group) == ROW_GROUP_ROWS or size >= ROW_GROUP_BYTES:
            yield group
            group = []
            size = 0
    if group:
        yield group


def without_extra(group: list[Example]) -> pa.RecordBatch:
    """The columns of SCHEMA."""
    rows = [
        {
            "data_source": e.data_source,
            "prompt": e.messages,
            "images": [{"bytes": data, "path": None} for data in e.images],
            "reward_model": {"style": "rule", "ground_truth": e.ground_truth},
        }
        for e in group
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def extra_column(extras: list[dict]) -> pa.StructArray:
    """The extra_info column. A field whose values have no common type is stored as JSON text, and that is said."""
    first = [key for key in ("split", "index", "uid", "answer_type") if any(key in extra for extra in extras)]
    names = dict.fromkeys(itertools.chain(first, *extras))
    columns: dict[str, pa.Array] = {}
    mixed = []
    for name in names:
        values = [extra.get(name) for extra in extras]
        try:
            column = pa.array(values)
        except (pa.ArrowTypeError, pa.ArrowInvalid, OverflowError):
            column = None
        if column is None or "struct<>" in str(column.type):  # parquet has no struct without fields
            mixed.append(name)
            column = pa.array([v if isinstance(v, str | None) else json.dumps(v) for v in values])
        columns[name] = column
    if mixed:
        print(f"extra_info fields of mixed types, stored as JSON text: {', '.join(mixed)}")
    return pa.StructArray.from_arrays(list(columns.values()), list(columns))


def write_examples(examples: Iterable[Example], path: str | Path) -> int:
    """Stream examples into one parquet file, complete or not at all; returns the number of rows.

    The type of extra_info is known only after the last row, so all else, images above all, waits in a draft.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    extras: list[dict] = []
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        draft = Path(folder, "draft")
        final = Path(folder, "final")
        with pq.ParquetWriter(draft, SCHEMA) as writer:
            for group in row_groups(examples):
                writer.write_batch(without_extra(group))
                extras += [drop_none(json.loads(json.dumps(e.extra | {"uid": e.uid}, default=str))) for e in group]
        if not extras:
            raise UserError(f"nothing to write to {path}: the source gave no usable row")
        column = extra_column(extras)
        schema = SCHEMA.append(pa.field("extra_info", column.type))
        done = 0
        with pq.ParquetFile(draft) as source, pq.ParquetWriter(final, schema) as writer:
            for i in range(source.num_row_groups):
                table = source.read_row_group(i)
                writer.write_table(table.append_column("extra_info", column.slice(done, len(table))))
                done += len(table)
        os.replace(final, path)
    return len(extras)


# ---------------------------------------------------------------------------------------------------- sources


all_parquet_records = partial(parquet_records, every_column=True)
SOURCES = {  # of rows in files: how to read one, the column of its answers, the help
    "jsonl": (partial(text_records, read=jsonl_records), "answer", "One JSON object per line."),
    "csv": (
        partial(text_records, read=csv_records),
        "answer",
        "A header line first; an image cell may be a JSON list.",
    ),
    "parquet": (all_parquet_records, TRUTH, "Any layout; columns without a meaning here go to extra_info."),
}


def file_rows(args: argparse.Namespace) -> Iterator[Raw]:
    """Rows of the files that --input names."""
    return table_rows(data_files(args.input), SOURCES[args.source][0], reading_of(args), args.image_root)


def find_tasks() -> list[ModuleType]:
    """The files of tasks/ that have a data recipe: `rows(args) -> Iterator[Raw]` under the names in NAMES."""
    files = sorted((Path(__file__).parent / "tasks").glob("[!_]*.py"))
    modules = [importlib.import_module(f"tasks.{file.stem}") for file in files]
    return [module for module in modules if hasattr(module, "rows")]


@cache
def instruction_of(text: str) -> str:
    """What --instruction stands for: the INSTRUCTION of the task of that name, or else itself."""
    return next((task.INSTRUCTION for task in find_tasks() if text in task.NAMES), text) if text else ""


# ---------------------------------------------------------------------------------------------------- command line


class ShowDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Help with defaults, but for those that say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, "") or action.nargs == 0 else super()._get_help_string(action)


def add_command(commands: argparse._SubParsersAction, names: Sequence[str], about: str) -> argparse.ArgumentParser:
    """A subcommand under one or more names."""
    more = {"help": about, "description": about, "formatter_class": ShowDefaults, "allow_abbrev": False}
    return commands.add_parser(names[0], aliases=names[1:], **more)


def add_source_flags(parser: argparse.ArgumentParser, task: ModuleType | None) -> None:
    """The flags of a task, or of any other source."""
    p = parser.add_argument_group("result")
    p.add_argument("--out", type=Path, required=True, help="parquet file to write")
    p.add_argument("--split", choices=list(SPLITS), default="train", help="which split; stored in extra_info.split")
    p.add_argument("--limit", type=int, help="keep only the first so many good rows")
    p.add_argument("--inspect", action="store_true", help="print rows and statistics of the file written")
    if task:
        p = parser.add_argument_group("toy")
        p.add_argument("--toy", action="store_true", help="rows drawn by the task itself, instead of files")
        p.add_argument("--n", type=int, default=1000, help="how many")
        p.add_argument("--seed", type=int, default=0, help="of the drawing")
    p = parser.add_argument_group("files")
    p.add_argument("--input", nargs="+", required=not task, help="files, globs; of parquet also folders of shards")
    p.add_argument("--image-root", type=Path, help="folder where relative image paths start (default: the file's own)")
    add_settings(parser, ReadingConfig)
    p = parser.add_argument_group("more about rows")
    p.add_argument("--system", default="", help="system message put in front of each prompt")
    p.add_argument("--add-image-marks", action="store_true", help="put <image> marks in front of prompts without any")
    p = parser.add_argument_group("images from URLs")
    p.add_argument("--url-timeout", type=float, default=20.0, help="seconds for one try")
    p.add_argument("--url-max-mb", type=float, default=32.0, help="largest image, MiB")
    p.add_argument("--url-tries", type=int, default=3, help="tries per image")
    p.add_argument("--url-private", action="store_true", help="also from private, loopback and link-local addresses")


def add_source(
    parser: argparse.ArgumentParser, rows_of: Callable, defaults: Mapping[str, object], task: ModuleType | None = None
) -> None:
    """The command of a source, with defaults of its own."""
    add_source_flags(parser, task)
    parser.set_defaults(rows_of=rows_of, **defaults)
    for action in (action for action in parser._actions if action.dest in defaults):
        action.help = action.help.partition(" (default")[0]  # that of all sources; this one's is shown


def add_inspect_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `inspect`."""
    parser.add_argument("file", help="parquet file, folder of shards, glob or comma list")
    parser.add_argument("--limit", type=int, help="only the first so many good rows")
    parser.add_argument("--rows", type=int, default=3, help="how many rows to print in full")
    add_settings(parser, ReadingConfig)
    p = parser.add_argument_group("length of the prompts in tokens")
    p.add_argument("--model", help="model or processor that counts them")
    p.add_argument("--min-pixels", type=int, help="of an image, as in training")
    p.add_argument("--max-pixels", type=int, help="of an image, as in training")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw_text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw_text, allow_abbrev=False)
    about = "what each makes, and its flags: prepare_data.py SOURCE -h"
    sources = parser.add_subparsers(dest="source", metavar="SOURCE", required=True, title="sources", description=about)
    for name, (_, answer_key, about) in SOURCES.items():
        add_source(add_command(sources, [name], about), file_rows, {"answer_key": answer_key})
    for task in find_tasks():
        add_source(add_command(sources, task.NAMES, task.rows.__doc__), task.rows, getattr(task, "DEFAULTS", {}), task)
    add_inspect_flags(add_command(sources, ["inspect"], "Print rows, counts and statistics of parquet file(s)."))
    return parser.parse_args(argv)


def check_flags(args: argparse.Namespace) -> None:
    """Refuse, before any work, what could only fail later."""
    for name in ("n", "limit", "url_tries"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}, expected at least 1")
    if args.source == "inspect":
        return
    if (args.out.exists() and not args.out.is_file()) or existing(args.out.parent).is_file():
        raise UserError(f"--out is {args.out}, expected the parquet file to write, e.g. --out {args.source}.parquet")
    if args.out.resolve() in [Path(i).resolve() for i in args.input or []]:
        raise UserError(f"--out {args.out} is also the --input; write to another file")
    check_writable(args.out.parent, f"--out {args.out}")


def make_file(args: argparse.Namespace) -> None:
    """Rows of a source -> `--out`."""
    limits = {"timeout": args.url_timeout, "max_mb": args.url_max_mb, "tries": args.url_tries}
    fetch = partial(fetch_url, **limits, private=args.url_private)
    bad: list[str] = []
    raws = tqdm(args.rows_of(args), desc=args.source, unit=" rows", disable=None)
    with writing(args.out, f"--out {args.out}"):
        examples = good_rows(raws, replace(reading_of(args), fetch=fetch), bad, args.limit)
        count = write_examples(examples, args.out)
    print(f"wrote {count} rows ({args.out.stat().st_size / 2**20:.1f} MiB) to {args.out}; left out {len(bad)}")
    for line in first_of(bad):
        print("left out:", line)
    if args.inspect:
        main(parse_args(["inspect", str(args.out)]))


def inspect_file(args: argparse.Namespace) -> None:
    """Print some rows of a file, and what all of them have in common."""
    examples, bad = read_flagged(args.file, args, args.limit)
    for example in examples[: args.rows]:
        print_example(example)
    print(f"=== {args.file}: {len(examples)} rows, {len(bad)} left out")
    for line in first_of(bad):
        print("left out:", line)
    processor = None
    if args.model:
        from model import load_processor

        processor = load_processor(args.model, min_pixels=args.min_pixels, max_pixels=args.max_pixels)
    print_statistics(examples, processor)


def main(args: argparse.Namespace) -> None:
    check_flags(args)
    inspect_file(args) if args.source == "inspect" else make_file(args)


if __name__ == "__main__":
    try:
        main(parse_args())
    except UserError as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT
