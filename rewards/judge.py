"""A model as judge: a vision-language model on any OpenAI-compatible server scores responses.

    judge = Judge("http://localhost:8000", judge_options(["timeout=30"]), cache=Path("run/judge/rank_0.jsonl"))
    score = await judge.score(response, example)  # from 0 to 1; raises JudgeError if there is no score

The prompt is made from a template (default: judge.txt), and the judge's reply must end with the line `Score: N`, N from
0 to 10. The API key comes only from the environment; it is never printed or written to a file. docs/judge.md has an
example.
"""

import asyncio
import base64
import hashlib
import io
import itertools
import json
import logging
import math
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import httpx2
from PIL import Image

from errors import UserError, as_user_error, need, report_write_errors
from sources.images import FORMATS, decode_image

LOCAL = re.compile(r"https?://(localhost|127(\.\d+){3}|\[::1\])[:/]")  # servers that are reached without a proxy
TEMPLATE = Path(__file__).with_name("judge.txt")
TEMPLATE_FIELDS = ("{question}", "{truth}", "{response}")  # fields that a template may contain
MAX_SCORE = 10
MAX_JUDGE_BODY_BYTES = 1 << 20  # longest reply of the server to one call
INITIAL_BACKOFF_S = 0.5  # wait before the first retry; doubled for each further one
MAX_BACKOFF_S = 60.0  # longest wait, even if the server asks for a longer one
COUNTER_NAMES = "calls cached retries timeouts failed over_budget seconds tokens_in tokens_out".split()
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # formats that servers read; other images are converted to PNG
RETRY_STATUSES = (408, 409, 429)  # and all statuses from 500
STATUS_HINTS = {
    400: "check --judge model, max_tokens, and whether the model sees images (else images=off)",
    401: "set the environment variable that holds the key (JUDGE_API_KEY, or --judge key_env=NAME)",
    403: "the key may not use this model; use another model or key",
    404: "check --judge-url and --judge model",
    413: "the images are too large for the server; use smaller ones, or images=off",
}


class JudgeError(Exception):
    """An error for a response without a score. Its text, one line, gives the reason and never contains the key."""

    in_a_line = True  # print it without its traceback, which would add nothing


class RetryableJudgeError(JudgeError):
    """A failed call that may be retried. `after` is the number of seconds that the server asks to wait."""

    def __init__(self, text: str, after: float = 0.0):
        super().__init__(text)
        self.after = after


class UnparsableScore(RetryableJudgeError):
    """A reply from which no score can be read."""


class JudgeBudgetExceeded(JudgeError):
    """An error for a response that needs a call when the budget of calls is used up."""


# --- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JudgeOptions:
    """The options of --judge KEY=VALUE ..."""

    model: str = ""  # default: the first model that the server lists
    template: str = ""  # text of the template; --judge names its file. Default: the text of judge.txt
    timeout: float = 60.0  # seconds per call
    tries: int = 3  # most calls for one score; at most two of them may return replies without a readable score
    concurrency: int = 16  # most calls of one process in flight
    calls: int = 0  # most calls in this run, over all processes and resumptions; 0: no limit
    tasks: tuple[str, ...] = ()  # tasks whose responses are judged, separated by commas; default: all
    weight: float = 1.0  # weight of the judge's score in the reward; the task's own reward has the rest
    max_tokens: int = 512  # most tokens of a reply
    images: bool = True  # does the judge see the images? on or off
    key_env: str = "JUDGE_API_KEY"  # name of the environment variable that holds the key


OPTION_BOUNDS = {
    "timeout": (0.01, 3600),
    "tries": (1, 20),
    "concurrency": (1, 1024),
    "calls": (0, 10**12),
    "weight": (0, 1),
    "max_tokens": (1, 10**6),
}


def judge_options(pairs: Sequence[str]) -> JudgeOptions:
    """Return the options of --judge KEY=VALUE ..., checked, with the text of the template. Raise UserError if one is
    invalid; the message repeats nothing that could be a key."""
    types = {f.name: type(f.default) for f in fields(JudgeOptions)}
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if name not in types or not equals:
            harmless = f" {name}" if equals and re.fullmatch("[a-z_]{1,20}", name) else ""
            raise UserError(f"--judge{harmless}: give KEY=VALUE; KEY: {', '.join(types)}. The API key comes from the "
                            "environment alone (JUDGE_API_KEY, or key_env=NAME)")
        values[name] = read_template(text) if name == "template" else parse_option(name, types[name], text)
    options = JudgeOptions(**values)
    api_key(options, required="key_env" in values)
    return options


def parse_option(name: str, value_type: type, text: str) -> Any:
    """Return the value of an option of --judge. Raise UserError if it has the wrong type or is out of bounds."""
    if value_type is bool:
        need(text in ("on", "off"), f"--judge {name}={text}: must be on or off")
        return text == "on"
    if value_type is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if value_type is str:
        return text
    with as_user_error(ValueError, f"--judge {name}={text}: must be of type {value_type.__name__}"):
        value = value_type(text)
    low, high = OPTION_BOUNDS[name]
    need(low <= value <= high, f"--judge {name}={text}: must be from {low} to {high}")  # false for NaN
    return value


def read_template(path: str) -> str:
    """Return the text of a template. Raise UserError if it cannot be read, or lacks something that it must contain."""
    with as_user_error((OSError, UnicodeDecodeError), f"--judge template={path}: cannot be read as UTF-8 text"):
        text = Path(path).read_text(encoding="utf-8")
    names = re.findall(r"\{\w+\}", text)
    unknown = ", ".join(sorted(set(names) - set(TEMPLATE_FIELDS)))
    need(not unknown, f"--judge template={path}: unknown {unknown}; it may contain {', '.join(TEMPLATE_FIELDS)}")
    need("{response}" in names, f"--judge template={path}: it must contain {{response}}, the text to judge")
    need("Score:" in text, f"--judge template={path}: it must ask for a last line `Score: N`, N from 0 to {MAX_SCORE}")
    return text


def api_key(options: JudgeOptions, required: bool = False) -> str:
    """Return the API key from the environment, or "" if there is none. Raise UserError, whose message does not repeat
    the key, if a header cannot contain it."""
    key = os.environ.get(options.key_env, "").strip()
    need(key or not required, "--judge key_env: there is no environment variable of that name, or it is empty")
    need(re.fullmatch("[!-~]*", key), "the judge's key in the environment contains blanks or non-ASCII characters")
    return key


def api_url(url: str) -> str:
    """Return the URL up to and including the version: `http://host:8000` -> `http://host:8000/v1`. Raise UserError if
    it is not such a URL; the message does not repeat a secret in it."""
    need(not re.search("[@?#]", url),
         "--judge-url: it must have no user, password, query or fragment (not repeated here); the key comes from the "
         "environment variable JUDGE_API_KEY")
    with as_user_error(httpx2.InvalidURL, f"--judge-url {url}: not a URL"):
        parts = httpx2.URL(url)
    need(parts.scheme in ("http", "https") and parts.host and parts.port in (None, *range(1, 65536)) and " " not in url,
         f"--judge-url {url}: give http://HOST:PORT or https://HOST, with or without /v1")
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return str(parts.copy_with(path=path if re.search(r"/v\d", path) else f"{path}/v1"))


def resolve_model_name(url: str, options: JudgeOptions) -> JudgeOptions:
    """Return the options with a model: by default the first that the server lists. Raise UserError if the server
    cannot be reached, refuses the key, or lists no model."""
    judge = Judge(url, options)

    async def request_name() -> str:
        async with judge.client:
            return await judge.listed_model()

    with as_user_error(JudgeError, f"--judge-url {judge.url}"):
        return replace(options, model=asyncio.run(request_name()))


# --- requests ---------------------------------------------------------------------------------------------------------

# Invisible characters, which could split a word so that the patterns below miss it
INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]")
# Text that the server's tokenizer could read as a special token, or that could close our own tags: `<|im_end|>`,
# `</s>`, `[INST]`
MARKUP = re.compile(r"<(?=[|/｜a-zA-Z_])|\[(?=/?[A-Z_]{2,}\])")
SCORE = re.compile(r"(score\W{0,8}?)[:：﹕︓]", re.IGNORECASE)


def escape_markup(text: str) -> str:
    """Return a text that is safe to quote to the judge, even if the judge repeats all of it: without special tokens,
    ends of tags, and lines that read as a score."""
    text = INVISIBLE.sub("", text.encode(errors="replace").decode())
    return SCORE.sub(r"\1 =", MARKUP.sub(lambda match: match[0] + " ", text))


def question_text(example: Any) -> str:
    """Return the texts of all messages but the system's, with [image 1], [image 2] ... in place of <image>."""
    texts, numbers = [], itertools.count(1)
    for message in example.messages:
        text = re.sub("<image>", lambda _: f"[image {next(numbers)}]", message["content"])
        texts += [text] if message["role"] != "system" else []
    return "\n\n".join(texts)


def judge_image_uri(data: bytes) -> str:
    """Return an encoded image as a data URI: the same bytes, or converted to PNG if servers do not read the format."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        image_format = "JPEG" if image.format == "MPO" else image.format  # MPO: a camera's JPEG, followed by previews
    if image_format not in IMAGE_FORMATS:
        file = io.BytesIO()
        decode_image(data).save(file, "PNG")
        image_format, data = "PNG", file.getvalue()
    return f"data:image/{image_format.lower()};base64,{base64.b64encode(data).decode()}"


# --- replies ----------------------------------------------------------------------------------------------------------


def parse_score(text: str) -> float:
    """Return N of the last line `Score: N` as a number from 0 to 1. Raise UnparsableScore for anything else: several
    scores, one out of range, or other text in the line or after it."""
    last = text.rstrip().rsplit("\n", 1)[-1]
    match = re.fullmatch(r"Score: ((?:10|[0-9])(?:\.[0-9]{1,4})?)", last)
    if not match or len(re.findall(r"score\s*:", text, re.IGNORECASE)) != 1 or float(match[1]) > MAX_SCORE:
        raise UnparsableScore(f"the reply does not end with one line `Score: N`, N from 0 to {MAX_SCORE}")
    return float(match[1]) / MAX_SCORE


def get_nested(value: Any, *path: str | int) -> Any:
    """Return for example `value["choices"][0]` for the path "choices", 0; None if a key is missing or a type wrong."""
    try:
        return reduce(getitem, path, value)
    except (LookupError, TypeError):
        return None


def parse_retry_after(header: str) -> float:
    """Return the number of seconds in a Retry-After header, or 0 if it has another form."""
    return float(header) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", header) else 0.0


def backoff_seconds(failed: int, after: float) -> float:
    """Return the seconds to wait before the next call, after `failed` failed calls: exponential backoff with jitter, or
    `after`, the seconds that the server asks for, if they are more; at most MAX_BACKOFF_S."""
    backoff = min(INITIAL_BACKOFF_S * 2 ** (failed - 1), MAX_BACKOFF_S / 1.5) * random.uniform(0.5, 1.5)
    return max(backoff, min(after, MAX_BACKOFF_S))


# --- the judge --------------------------------------------------------------------------------------------------------


class Judge:
    """A client that has responses scored by a server, for use in one event loop.

    `cache` is a JSONL file, rank_N.jsonl, with a line for each call and for each score. The scores in all such files of
    its folder are reused, so a resumed run does not repeat calls. Each of the `world` processes may make an equal part
    of options.calls; calls in its own file count against that part, and calls in all files against the whole.

    `counts`: calls; cached, scores without a new call; retries; timeouts, calls that timed out; failed, responses
    without a score; over_budget, responses without a score because no calls were left; seconds, of all calls;
    tokens_in, tokens_out.
    """

    def __init__(self, url: str, options: JudgeOptions, cache: Path | None = None, world: int = 1):
        self.url = api_url(url)
        self.options = options
        self.template = options.template or TEMPLATE.read_text(encoding="utf-8")
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTER_NAMES, 0))
        self.scores: dict[str, float] = {}
        self.in_flight: dict[str, asyncio.Task[float]] = {}  # by cache key
        self.cache = cache
        own_calls, all_calls = self._load_cache(cache) if cache else (0, 0)
        self.left = min(options.calls // world - own_calls, options.calls - all_calls) if options.calls else math.inf
        self.key = api_key(options)
        for name in ("httpx2", "httpcore2"):  # their debug messages on a call could contain the key
            logging.getLogger(name).setLevel(logging.WARNING)
        self.slots = asyncio.Semaphore(options.concurrency)
        self.client = httpx2.AsyncClient(
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {}),
            timeout=None,  # `_request` limits the time of a whole call
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=options.concurrency),
            trust_env=not LOCAL.match(self.url),
        )

    # the cache

    def _load_cache(self, cache: Path) -> tuple[int, int]:
        """Read the scores in all files of the cache's folder. Return the number of calls in this file and in all."""
        own_calls, all_calls, damaged = 0, 0, 0
        with report_write_errors(cache, "the judge's scores"):
            cache.parent.mkdir(parents=True, exist_ok=True)
            for file in sorted(cache.parent.glob("rank_*.jsonl")):
                for line in file.read_bytes().splitlines():
                    try:
                        entry = json.loads(line)
                        if "score" in entry:
                            self.scores[entry["key"]] = float(entry["score"])
                        elif entry["asked"]:
                            all_calls += 1
                            own_calls += file.name == cache.name
                    except (ValueError, TypeError, LookupError, RecursionError):
                        damaged += 1
            with cache.open("ab+") as file:
                file.seek(0)
                if not (b"\n" + file.read()).endswith(b"\n"):  # the run was killed while it wrote a line
                    file.write(b"\n")
        if damaged:
            print(f"{cache.parent}: skipped {damaged} damaged lines of the judge's cache", file=sys.stderr)
        return own_calls, all_calls

    def _append_to_cache(self, entry: dict) -> None:
        if self.cache:
            with report_write_errors(self.cache, "the judge's scores"), self.cache.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    # calls

    async def score(self, response: str, example: Any) -> float:
        """Return the score of a response, from 0 to 1. Raise JudgeError if there is none. An equal question is sent
        only once: later ones use the cached score, or wait for the call in flight."""
        key, text, images = await asyncio.to_thread(self._build_request, response, example)
        if key in self.scores:
            self.counts["cached"] += 1
            return self.scores[key]
        first = key not in self.in_flight
        if first:
            self.in_flight[key] = asyncio.create_task(self._request_score(key, text, images))
            self.in_flight[key].add_done_callback(lambda _: self.in_flight.pop(key))
        try:
            score = await self.in_flight[key]
        except JudgeError as error:
            self.counts["over_budget" if isinstance(error, JudgeBudgetExceeded) else "failed"] += 1
            raise JudgeError(str(error)) from None
        self.counts["cached"] += not first
        return score

    def _build_request(self, response: str, example: Any) -> tuple[str, str, list[bytes]]:
        """Return the cache key, the text of the prompt, and the images."""
        images = list(example.images) if self.options.images else []
        question, truth = question_text(example), str(example.ground_truth)
        hashes = [hashlib.sha256(image).hexdigest() for image in images]
        content = json.dumps([self.template, self.options.model, question, truth, response, *hashes])
        key = hashlib.sha256(content.encode()).hexdigest()[:32]
        tag = f"response-{key[:8]}"
        quoted = f"<{tag}>\n{escape_markup(response)}\n</{tag}>"
        values = dict(zip(TEMPLATE_FIELDS, (question, truth or "(none)", quoted), strict=True))
        return key, re.sub("|".join(TEMPLATE_FIELDS), lambda match: values[match[0]], self.template), images

    async def _request_score(self, key: str, text: str, images: list[bytes]) -> float:
        """Return the score of a request, after retries within the limits of the options. Raise JudgeError if all calls
        fail."""
        content: Any = text
        if images:
            uris = await asyncio.to_thread(lambda: list(map(judge_image_uri, images)))
            content = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
            content.append({"type": "text", "text": text})
        body = {
            "model": self.options.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.options.max_tokens,
        }
        failed, unparsable = 0, 0
        while key not in self.scores:
            try:
                async with self.slots:
                    self._reserve_call(key)
                    # at temperature 0 the judge would repeat a reply without a readable score
                    data = await self._request(
                        "POST", "/chat/completions", body | {"temperature": float(unparsable > 0)}
                    )
                self.scores[key] = self._read_score(data)
            except RetryableJudgeError as error:
                failed += 1
                unparsable += isinstance(error, UnparsableScore)
                if failed == self.options.tries or unparsable == 2:
                    raise JudgeError(f"{error} ({failed} calls)") from None
                self.counts["retries"] += 1
                await asyncio.sleep(backoff_seconds(failed, error.after))
        self._append_to_cache({"key": key, "score": self.scores[key]})
        return self.scores[key]

    def _reserve_call(self, key: str) -> None:
        """Count a call against the budget. Raise JudgeBudgetExceeded if no call is left. The call is recorded before it
        is made, so that it counts even if the run is killed during it."""
        if self.left <= 0:
            raise JudgeBudgetExceeded(f"--judge calls={self.options.calls} are used up")
        self.left -= 1
        self.counts["calls"] += 1
        self._append_to_cache({"asked": key})

    async def _request(self, method: str, path: str, body: dict | None = None) -> bytes:
        """Make one call and return the body of a reply with status 200. Raise JudgeError for any other outcome.
        Redirects are not followed, and the text of a transport error is not quoted, because it can contain text from
        the server."""
        start = time.perf_counter()
        try:
            request = self.client.stream(method, self.url + path, json=body)
            async with asyncio.timeout(self.options.timeout), request as reply:
                data = bytearray()
                async for piece in reply.aiter_raw():
                    data += piece
                    if len(data) > MAX_JUDGE_BODY_BYTES:
                        raise UnparsableScore(f"the reply is longer than {MAX_JUDGE_BODY_BYTES} bytes")
        except TimeoutError:
            self.counts["timeouts"] += 1
            raise RetryableJudgeError(f"no reply within {self.options.timeout:g} s") from None
        except httpx2.TransportError as error:
            raise RetryableJudgeError(f"no reply from {self.url}: {type(error).__name__}") from None
        finally:
            self.counts["seconds"] += time.perf_counter() - start
        status = reply.status_code
        if status == 200:
            return bytes(data)
        problem = f"the server returned {status}{self._quote_body(data)}"
        if status in RETRY_STATUSES or status >= 500:
            raise RetryableJudgeError(problem, parse_retry_after(reply.headers.get("retry-after", "")))
        if 300 <= status < 400:
            raise JudgeError(f"{problem}: a redirect, which is not followed; give the final address as --judge-url")
        raise JudgeError(f"{problem}; {STATUS_HINTS.get(status, 'this status is not retried')}")

    def _quote_body(self, data: bytes) -> str:
        """Return the beginning of a server's error text, in parentheses, for a message; "" if there is none."""
        text = " ".join(INVISIBLE.sub(" ", data.decode(errors="replace")).split())
        if self._contains_api_key(text):
            return " (its text is omitted: it contains part of the key)"
        return f" ({text[:200]})" if text else ""

    def _contains_api_key(self, text: str) -> bool:
        """Return whether a text contains any six consecutive characters of the API key, in upper or lower case."""
        key, text = self.key.casefold(), text.casefold()
        return bool(key) and any(key[i : i + 6] in text for i in range(max(1, len(key) - 5)))

    async def listed_model(self) -> str:
        """Return the model of the options if one is named, else the first that the server lists. Raise JudgeError if
        the call fails or the server lists no model; a named model does not need a list."""
        try:
            data = await self._request("GET", "/models")
        except JudgeError as error:
            if not self.options.model or not re.match(r"the server returned 40[45]\b", str(error)):
                raise
        if self.options.model:
            return self.options.model
        name = get_nested(parse_json(data), "data", 0, "id")
        if not isinstance(name, str) or not name or self._contains_api_key(name):
            raise JudgeError(f"{self.url}/models lists no model; name one with --judge model=NAME")
        return name

    def _read_score(self, data: bytes) -> float:
        """Return the score in a reply, and count the tokens of the call. Raise UnparsableScore if there is none."""
        reply = parse_json(data)
        for name, field in (("tokens_in", "prompt_tokens"), ("tokens_out", "completion_tokens")):
            n = get_nested(reply, "usage", field)
            self.counts[name] += n if isinstance(n, int) and 0 <= n < 10**9 else 0
        text = get_nested(reply, "choices", 0, "message", "content")
        if not isinstance(text, str) or not text.strip():
            raise UnparsableScore("the reply has no text in choices[0].message.content")
        if get_nested(reply, "choices", 0, "finish_reason") == "length":  # `Score: 1` may be the start of `Score: 10`
            raise UnparsableScore(f"the reply is cut off after --judge max_tokens={self.options.max_tokens}; raise it")
        return parse_score(text)


def parse_json(data: bytes) -> Any:
    """Return the JSON value in a reply. Raise UnparsableScore if it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise UnparsableScore("the reply is not JSON") from None
