"""A model as judge: any OpenAI-compatible server that sees the images gives a response its score.

    judge = Judge("http://localhost:8000", judge_options(["timeout=30"]), cache=Path("run/judge/rank_0.jsonl"))
    score = await judge.score(response, example)  # from 0 to 1; JudgeError if there is none

It is asked by a template (by default judge.txt), and its answer has to end with the line `Score: N`, N from 0 to 10.
The key comes from the environment alone; no text of ours, and no file, ever holds it. docs/judge.md has an example.
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

LOCAL = re.compile(r"https?://(localhost|127(\.\d+){3}|\[::1\])[:/]")  # servers that no proxy is asked for
TEMPLATE = Path(__file__).with_name("judge.txt")
TEMPLATE_FIELDS = ("{question}", "{truth}", "{response}")  # what a template may hold
MAX_SCORE = 10
MAX_JUDGE_BODY_BYTES = 1 << 20  # of what the server sends for one call
INITIAL_BACKOFF_S = 0.5  # before the first retry; doubled for each further one
MAX_BACKOFF_S = 60.0  # also where the server asks for more
COUNTER_NAMES = "calls cached retries timeouts failed over_budget seconds tokens_in tokens_out".split()
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # formats that servers read; the others are sent as PNG
RETRY_STATUSES = (408, 409, 429)  # and all from 500
STATUS_HINTS = {
    400: "check --judge model, max_tokens, and whether the model sees images (else images=off)",
    401: "set the environment variable that holds the key (JUDGE_API_KEY, or --judge key_env=NAME)",
    403: "the key may not use this model; give another model or key",
    404: "check --judge-url and --judge model",
    413: "the images are too large for the server; prepare smaller ones, or images=off",
}


class JudgeError(Exception):
    """The judge gave a response no score. The text says why, on one line, and never holds the key."""

    in_a_line = True  # a traceback would add nothing


class RetryableJudgeError(JudgeError):
    """One call failed, and another may not; `after`: the seconds that the server asks to wait."""

    def __init__(self, text: str, after: float = 0.0):
        super().__init__(text)
        self.after = after


class UnparsableScore(RetryableJudgeError):
    """An answer that holds no score."""


class JudgeBudgetExceeded(JudgeError):
    """No call is left."""


# --- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JudgeOptions:
    """--judge KEY=VALUE ..."""

    model: str = ""  # by default the first that the server lists
    template: str = ""  # its text; in --judge a file. By default that of judge.txt
    timeout: float = 60.0  # seconds of one call
    tries: int = 3  # calls for one score, at most; of these two for answers that cannot be read
    concurrency: int = 16  # calls at a time, of one process
    calls: int = 0  # the most in this run, all processes and resumptions together; 0: no limit
    tasks: tuple[str, ...] = ()  # whose responses are judged, separated by commas; by default all
    weight: float = 1.0  # of the judge's score in the reward; the rest is the task's own
    max_tokens: int = 512  # of an answer
    images: bool = True  # does the judge see them? on or off
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
    """--judge KEY=VALUE ... checked; reads the template. UserError, which repeats nothing that could be a key."""
    kinds = {f.name: type(f.default) for f in fields(JudgeOptions)}
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if name not in kinds or not equals:
            plain = f" {name}" if equals and re.fullmatch("[a-z_]{1,20}", name) else ""
            raise UserError(f"--judge{plain}: give KEY=VALUE; KEY: {', '.join(kinds)}. The API's key comes from the "
                            "environment alone (JUDGE_API_KEY, or key_env=NAME)")
        values[name] = read_template(text) if name == "template" else parse_option(name, kinds[name], text)
    options = JudgeOptions(**values)
    api_key(options, required="key_env" in values)
    return options


def parse_option(name: str, kind: type, text: str) -> Any:
    """A value of --judge, within its bounds."""
    if kind is bool:
        need(text in ("on", "off"), f"--judge {name}={text}: must be on or off")
        return text == "on"
    if kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is str:
        return text
    with as_user_error(ValueError, f"--judge {name}={text}: must be of type {kind.__name__}"):
        value = kind(text)
    low, high = OPTION_BOUNDS[name]
    need(low <= value <= high, f"--judge {name}={text}: must be from {low} to {high}")  # false for NaN
    return value


def read_template(path: str) -> str:
    with as_user_error((OSError, UnicodeDecodeError), f"--judge template={path}: cannot be read as UTF-8 text"):
        text = Path(path).read_text(encoding="utf-8")
    found = re.findall(r"\{\w+\}", text)
    unknown = ", ".join(sorted(set(found) - set(TEMPLATE_FIELDS)))
    need(not unknown, f"--judge template={path}: unknown {unknown}; it may hold {', '.join(TEMPLATE_FIELDS)}")
    need("{response}" in found, f"--judge template={path}: it must hold {{response}}, what is judged")
    need("Score:" in text, f"--judge template={path}: it must ask for a last line `Score: N`, N from 0 to {MAX_SCORE}")
    return text


def api_key(options: JudgeOptions, required: bool = False) -> str:
    """From the environment, "" where there is none. UserError, without it, if no header can hold it."""
    key = os.environ.get(options.key_env, "").strip()
    need(key or not required, "--judge key_env: there is no environment variable of that name, or it is empty")
    need(re.fullmatch("[!-~]*", key), "the judge's key in the environment holds blanks, or characters beyond ASCII")
    return key


def api_url(url: str) -> str:
    """Up to and with the version: `http://host:8000` -> `http://host:8000/v1`. UserError for what is no such URL; it
    does not repeat a secret in it."""
    need(not re.search("[@?#]", url),
         "--judge-url: it may hold no user, password, query or fragment (not repeated here); the key comes from the "
         "environment variable JUDGE_API_KEY")
    with as_user_error(httpx2.InvalidURL, f"--judge-url {url}: no URL"):
        parts = httpx2.URL(url)
    need(parts.scheme in ("http", "https") and parts.host and parts.port in (None, *range(1, 65536)) and " " not in url,
         f"--judge-url {url}: give http://HOST:PORT or https://HOST, with or without /v1")
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return str(parts.copy_with(path=path if re.search(r"/v\d", path) else f"{path}/v1"))


def resolve_model_name(url: str, options: JudgeOptions) -> JudgeOptions:
    """Return the options with their model, the first that the server lists if none is named. Raise UserError if the
    server cannot be reached, refuses the key, or lists none."""
    judge = Judge(url, options)

    async def ask() -> str:
        async with judge.client:
            return await judge.listed_model()

    with as_user_error(JudgeError, f"--judge-url {judge.url}"):
        return replace(options, model=asyncio.run(ask()))


# --- what is asked ----------------------------------------------------------------------------------------------------

# Characters that are not seen, but could hide a word from what neutralises it
INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]")
# What a server's tokenizer, or our own tags, could read as more than text: `<|im_end|>`, `</s>`, `[INST]`
MARKUP = re.compile(r"<(?=[|/｜a-zA-Z_])|\[(?=/?[A-Z_]{2,}\])")
SCORE = re.compile(r"(score\W{0,8}?)[:：﹕︓]", re.IGNORECASE)


def escape_markup(text: str) -> str:
    """Text that can be quoted to the judge: no special token, no end of a tag, and no line that reads as a score, even
    if all of it came back."""
    text = INVISIBLE.sub("", text.encode(errors="replace").decode())
    return SCORE.sub(r"\1 =", MARKUP.sub(lambda found: found[0] + " ", text))


def question_text(example: Any) -> str:
    """Return what the user's messages ask, with [image 1], [image 2] ... for the marks."""
    asked, numbers = [], itertools.count(1)
    for message in example.messages:
        text = re.sub("<image>", lambda _: f"[image {next(numbers)}]", message["content"])
        asked += [text] if message["role"] != "system" else []
    return "\n\n".join(asked)


def judge_image_uri(data: bytes) -> str:
    """An encoded image as a data URI: the stored bytes, or a PNG of them where servers do not read their format."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        kind = "JPEG" if image.format == "MPO" else image.format  # a camera's JPEG with previews behind it
    if kind not in IMAGE_FORMATS:
        file = io.BytesIO()
        decode_image(data).save(file, "PNG")
        kind, data = "PNG", file.getvalue()
    return f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"


# --- what is answered -------------------------------------------------------------------------------------------------


def parse_score(text: str) -> float:
    """The last line `Score: N`, as a number from 0 to 1. Raises Unreadable for anything else: several, out of range,
    other text in the line or behind it."""
    last = text.rstrip().rsplit("\n", 1)[-1]
    found = re.fullmatch(r"Score: ((?:10|[0-9])(?:\.[0-9]{1,4})?)", last)
    if not found or len(re.findall(r"score\s*:", text, re.IGNORECASE)) != 1 or float(found[1]) > MAX_SCORE:
        raise UnparsableScore(f"the answer does not end with one line `Score: N`, N from 0 to {MAX_SCORE}")
    return float(found[1]) / MAX_SCORE


def get_nested(value: Any, *path: str | int) -> Any:
    """Return `value["choices"][0]` by its path, or None if something is missing or of another type."""
    try:
        return reduce(getitem, path, value)
    except (LookupError, TypeError):
        return None


def parse_retry_after(header: str) -> float:
    """Return the seconds of the header; 0 if it holds something else."""
    return float(header) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", header) else 0.0


def backoff_seconds(failed: int, after: float) -> float:
    """Return the seconds to wait before the next call, after `failed` calls that failed: exponential backoff up to
    MAX_WAIT_S, with jitter, but never less than the server asks for."""
    backoff = min(INITIAL_BACKOFF_S * 2 ** (failed - 1), MAX_BACKOFF_S / 1.5) * random.uniform(0.5, 1.5)
    return max(backoff, min(after, MAX_BACKOFF_S))


# --- the judge --------------------------------------------------------------------------------------------------------


class Judge:
    """Scores of responses by a server, for one event loop.

    `cache`: a JSONL file, rank_N.jsonl, with a line for each call and for each score. Scores in all such files of its
    folder are known, so nothing is asked again when a run is resumed. Each of the `world` processes may make its share
    of options.calls; what its own file and all files have spent counts.

    `counts`: calls; cached, scores that took no call of their own; retries; timeouts, calls that took too long; failed,
    responses without a score; over_budget, those for want of calls; seconds, of all calls; tokens_in, tokens_out.
    """

    def __init__(self, url: str, options: JudgeOptions, cache: Path | None = None, world: int = 1):
        self.url = api_url(url)
        self.options = options
        self.template = options.template or TEMPLATE.read_text(encoding="utf-8")
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTER_NAMES, 0))
        self.scores: dict[str, float] = {}
        self.asked: dict[str, asyncio.Task[float]] = {}  # by key, in flight
        self.cache = cache
        own, everyone = self._load_cache(cache) if cache else (0, 0)
        self.left = min(options.calls // world - own, options.calls - everyone) if options.calls else math.inf
        self.key = api_key(options)
        for name in ("httpx2", "httpcore2"):  # what they log of a call could hold the key
            logging.getLogger(name).setLevel(logging.WARNING)
        self.slots = asyncio.Semaphore(options.concurrency)
        self.client = httpx2.AsyncClient(
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {}),
            timeout=None,  # of a whole call: see `call`
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=options.concurrency),
            trust_env=not LOCAL.match(self.url),
        )

    # the cache

    def _load_cache(self, cache: Path) -> tuple[int, int]:
        """Read all files of the cache's folder. Calls so far, of this one and of all."""
        own, everyone, damaged = 0, 0, 0
        with report_write_errors(cache, "the judge's answers"):
            cache.parent.mkdir(parents=True, exist_ok=True)
            for file in sorted(cache.parent.glob("rank_*.jsonl")):
                for line in file.read_bytes().splitlines():
                    try:
                        entry = json.loads(line)
                        if "score" in entry:
                            self.scores[entry["key"]] = float(entry["score"])
                        elif entry["asked"]:
                            everyone += 1
                            own += file.name == cache.name
                    except (ValueError, TypeError, LookupError, RecursionError):
                        damaged += 1
            with cache.open("ab+") as file:
                file.seek(0)
                if not (b"\n" + file.read()).endswith(b"\n"):  # killed within a line
                    file.write(b"\n")
        if damaged:
            print(f"{cache.parent}: {damaged} damaged lines of the judge's answers are left out", file=sys.stderr)
        return own, everyone

    def _append_to_cache(self, entry: dict) -> None:
        if self.cache:
            with report_write_errors(self.cache, "the judge's answers"), self.cache.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    # asking

    async def score(self, response: str, example: Any) -> float:
        """Return the score of a response, from 0 to 1. Equal questions are asked once, also while the first is in
        flight."""
        key, text, images = await asyncio.to_thread(self._build_request, response, example)
        if key in self.scores:
            self.counts["cached"] += 1
            return self.scores[key]
        first = key not in self.asked
        if first:
            self.asked[key] = asyncio.create_task(self._request_score(key, text, images))
            self.asked[key].add_done_callback(lambda _: self.asked.pop(key))
        try:
            score = await self.asked[key]
        except JudgeError as error:
            self.counts["over_budget" if isinstance(error, JudgeBudgetExceeded) else "failed"] += 1
            raise JudgeError(str(error)) from None
        self.counts["cached"] += not first
        return score

    def _build_request(self, response: str, example: Any) -> tuple[str, str, list[bytes]]:
        """The key of the cache, the prompt's text and the images."""
        images = list(example.images) if self.options.images else []
        question, truth = question_text(example), str(example.ground_truth)
        hashes = [hashlib.sha256(image).hexdigest() for image in images]
        asked = json.dumps([self.template, self.options.model, question, truth, response, *hashes])
        key = hashlib.sha256(asked.encode()).hexdigest()[:32]
        tag = f"response-{key[:8]}"
        quoted = f"<{tag}>\n{escape_markup(response)}\n</{tag}>"
        values = dict(zip(TEMPLATE_FIELDS, (question, truth or "(none)", quoted), strict=True))
        return key, re.sub("|".join(TEMPLATE_FIELDS), lambda name: values[name[0]], self.template), images

    async def _request_score(self, key: str, text: str, images: list[bytes]) -> float:
        """The score, of as many calls as it takes and the options allow."""
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
        failed, unreadable = 0, 0
        while key not in self.scores:
            try:
                async with self.slots:
                    self._reserve_call(key)
                    # what could not be read would come again at temperature 0
                    data = await self._request(
                        "POST", "/chat/completions", body | {"temperature": float(unreadable > 0)}
                    )
                self.scores[key] = self._read_score(data)
            except RetryableJudgeError as error:
                failed += 1
                unreadable += isinstance(error, UnparsableScore)
                if failed == self.options.tries or unreadable == 2:
                    raise JudgeError(f"{error} ({failed} calls)") from None
                self.counts["retries"] += 1
                await asyncio.sleep(backoff_seconds(failed, error.after))
        self._append_to_cache({"key": key, "score": self.scores[key]})
        return self.scores[key]

    def _reserve_call(self, key: str) -> None:
        """A call of the budget. Noted before it is made: it counts also if the run is killed during it."""
        if self.left <= 0:
            raise JudgeBudgetExceeded(f"--judge calls={self.options.calls} are used up")
        self.left -= 1
        self.counts["calls"] += 1
        self._append_to_cache({"asked": key})

    async def _request(self, method: str, path: str, body: dict | None = None) -> bytes:
        """What the server answers with status 200, within the time-out. Its redirects are not followed, and the text
        of a transport's own error is not repeated: it can hold what the server sent."""
        start = time.perf_counter()
        try:
            request = self.client.stream(method, self.url + path, json=body)
            async with asyncio.timeout(self.options.timeout), request as answer:
                data = bytearray()
                async for piece in answer.aiter_raw():
                    data += piece
                    if len(data) > MAX_JUDGE_BODY_BYTES:
                        raise UnparsableScore(f"the answer is longer than {MAX_JUDGE_BODY_BYTES} bytes")
        except TimeoutError:
            self.counts["timeouts"] += 1
            raise RetryableJudgeError(f"no answer within {self.options.timeout:g} s") from None
        except httpx2.TransportError as error:
            raise RetryableJudgeError(f"no answer from {self.url}: {type(error).__name__}") from None
        finally:
            self.counts["seconds"] += time.perf_counter() - start
        status = answer.status_code
        if status == 200:
            return bytes(data)
        told = f"the server answered {status}{self._quote_body(data)}"
        if status in RETRY_STATUSES or status >= 500:
            raise RetryableJudgeError(told, parse_retry_after(answer.headers.get("retry-after", "")))
        if 300 <= status < 400:
            raise JudgeError(f"{told}: a redirect, which is not followed; give the final address as --judge-url")
        raise JudgeError(f"{told}; {STATUS_HINTS.get(status, 'it is not asked again')}")

    def _quote_body(self, data: bytes) -> str:
        """The start of what a server says about an error."""
        text = " ".join(INVISIBLE.sub(" ", data.decode(errors="replace")).split())
        if self._contains_api_key(text):
            return " (its text is left out: it holds part of the key)"
        return f" ({text[:200]})" if text else ""

    def _contains_api_key(self, text: str) -> bool:
        """Any six characters of it in a row, in either case."""
        key, text = self.key.casefold(), text.casefold()
        return bool(key) and any(key[i : i + 6] in text for i in range(max(1, len(key) - 5)))

    async def listed_model(self) -> str:
        """Return the options' model, if the server answers or has no list, else the first model that it lists."""
        try:
            data = await self._request("GET", "/models")
        except JudgeError as error:
            if not self.options.model or not re.match(r"the server answered 40[45]\b", str(error)):
                raise
        if self.options.model:
            return self.options.model
        name = get_nested(parse_json(data), "data", 0, "id")
        if not isinstance(name, str) or not name or self._contains_api_key(name):
            raise JudgeError(f"{self.url}/models lists no model; name one with --judge model=NAME")
        return name

    def _read_score(self, data: bytes) -> float:
        """The score that an answer holds; counts its tokens. Raises Unreadable."""
        answer = parse_json(data)
        for name, count in (("tokens_in", "prompt_tokens"), ("tokens_out", "completion_tokens")):
            n = get_nested(answer, "usage", count)
            self.counts[name] += n if isinstance(n, int) and 0 <= n < 10**9 else 0
        text = get_nested(answer, "choices", 0, "message", "content")
        if not isinstance(text, str) or not text.strip():
            raise UnparsableScore("the answer has no text in choices[0].message.content")
        if get_nested(answer, "choices", 0, "finish_reason") == "length":  # `Score: 1` may be the start of `Score: 10`
            raise UnparsableScore(f"the answer is cut off after --judge max_tokens={self.options.max_tokens}; raise it")
        return parse_score(text)


def parse_json(data: bytes) -> Any:
    """JSON; Unreadable for anything else."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise UnparsableScore("the answer is no JSON") from None
