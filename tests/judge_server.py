"""A local server that answers as an OpenAI-compatible one does, or misbehaves in every way that a test asks for.

with JudgeServer(say("Score: 7")) as server:  # server.url; server.asked: what came; server.most: calls at a time
"""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Act = Callable[[BaseHTTPRequestHandler, Any], None]  # (handler, the request's JSON) -> it has answered
MODELS = {"object": "list", "data": [{"id": "toy-judge"}, {"id": "other"}]}


def send(body: object, status: int = 200, **headers: str) -> Act:
    """Bytes as they are, anything else as JSON."""

    def act(handler: BaseHTTPRequestHandler, _: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        for name, value in ({"Content-Length": len(data)} | headers).items():
            handler.send_header(name.replace("_", "-"), str(value))
        handler.end_headers()
        handler.wfile.write(data)

    return act


def completion(text: object, finish_reason: str = "stop") -> dict:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return {"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage}


def say(text: object, finish_reason: str = "stop", wait_s: float = 0.0) -> Act:
    def act(handler: BaseHTTPRequestHandler, asked: Any) -> None:
        time.sleep(wait_s)
        send(completion(text, finish_reason))(handler, asked)

    return act


def prompt_of(asked: dict) -> str:
    """The text of a request."""
    content = asked["messages"][0]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def echo(cut: Callable[[str], str]) -> Act:
    """Says what `cut` makes of the prompt."""
    return lambda handler, asked: send(completion(cut(prompt_of(asked))))(handler, asked)


def raw(*pieces: bytes, every_s: float = 0.0, forever: bool = False) -> Act:
    """These bytes as the whole answer, status line included, one after another; then the connection ends."""

    def act(handler: BaseHTTPRequestHandler, _: Any) -> None:
        handler.close_connection = True
        todo = list(pieces)
        while todo and not handler.server.ending.is_set():
            handler.wfile.write(todo[0] if forever and len(todo) == 1 else todo.pop(0))
            handler.wfile.flush()
            time.sleep(every_s)

    return act


def hang(handler: BaseHTTPRequestHandler, _: Any) -> None:
    handler.close_connection = True
    handler.server.ending.wait(20)


class JudgeServer(ThreadingHTTPServer):
    """Answers calls with `acts` in turn, the last one over and over; lists MODELS."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *acts: Act, models: Act | None = None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.acts = acts
        self.models = models or send(MODELS)
        self.asked: list[dict] = []  # path, headers, json, time
        self.lock = threading.Lock()
        self.now = 0
        self.most = 0
        self.ending = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def calls(self) -> int:
        return sum("chat" in asked["path"] for asked in self.asked)

    def __enter__(self) -> "JudgeServer":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is what many tests are about."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append({"path": self.path, "headers": dict(self.headers), "json": None})
        self.server.models(self, None)

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            asked = {"path": self.path, "headers": dict(self.headers), "json": body, "time": time.monotonic()}
            server.asked.append(asked)
            act = server.acts[min(server.calls, len(server.acts)) - 1]
            server.now += 1
            server.most = max(server.most, server.now)
        try:
            act(self, body)
        finally:
            with server.lock:
                server.now -= 1
