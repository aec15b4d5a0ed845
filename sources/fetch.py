"""Image files from URLs: only from public addresses, each within a deadline and a size."""

import http.client
import ipaddress
import re
import socket
import string
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlsplit

from errors import UserError, need


def clean_url(url: str) -> str:
    """An http(s) URL with all but its host percent-encoded. Raises ValueError."""
    parts = urlsplit(url)
    need(parts.scheme in ("http", "https") and parts.hostname, "not an http(s) URL with a host")
    need("@" not in parts.netloc, "it holds a user name; fetch such files yourself and give their paths")
    need(parts.port != 0, "port 0")  # others outside 1..65535 raise by themselves
    path, query = (quote(part, safe=string.punctuation) for part in (parts.path, parts.query))
    return parts._replace(path=path, query=query, fragment="").geturl()


NAT64 = ipaddress.ip_network("64:ff9b::/96")  # how IPv6-only networks reach IPv4 hosts: the last 32 bits
PUBLIC_IPV6 = ipaddress.ip_network("2000::/3")  # all that IANA has assigned to the internet


def is_public(address: str) -> bool:
    """Return whether an IP address is on the public internet; one that embeds an IPv4 address counts as that one."""
    ip = ipaddress.ip_address(address)
    if ip in NAT64:
        ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    ip = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None) or ip
    return ip.is_global and not ip.is_multicast and (ip.version == 4 or ip in PUBLIC_IPV6)


def check_literal(host: str) -> None:
    """Raise ValueError if a host that a proxy will look up is a private IP address in any spelling, or localhost."""
    host = host.rstrip(".")
    public = not re.search(r"(^|\.)localhost$|[%\0]", host)
    with suppress(socket.gaierror):  # a name
        [found, *_] = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
        public = is_public(found[4][0])
    need(public, f"{host} is not public (--url-private allows that)")


class Fetcher(urllib.request.HTTPSHandler, urllib.request.HTTPHandler, urllib.request.HTTPRedirectHandler):
    """Connects to addresses that were checked, the very ones, at every redirect too; `close` ends its connections."""

    def __init__(self, private: bool):
        super().__init__()
        self.private = private
        self.closed = False
        self.sockets: list[socket.socket] = []

    def do_open(self, http_class: type, request: urllib.request.Request, **kw) -> http.client.HTTPResponse:
        proxied = request._tunnel_host is not None or request.has_proxy()
        if proxied and not self.private:
            check_literal(unquote(urlsplit(request.full_url).hostname))

        def connection(host: str, **more) -> http.client.HTTPConnection:
            made = http_class(host, **more)
            # TLS is put on top of it, for the host's name. A proxy of the environment may be private
            made._create_connection = partial(self.connect, private=self.private or proxied)
            return made

        return super().do_open(connection, request, **kw)

    def redirect_request(self, request, response, code, message, headers, url: str) -> urllib.request.Request:
        response.close()  # urllib would read its body, however long
        return urllib.request.Request(clean_url(url))

    def connect(
        self, address: tuple[str, int], timeout: float, source: None = None, *, private: bool
    ) -> socket.socket:
        host, port = address
        places = [found[4][:2] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        inside = [ip for ip, _ in places if not is_public(ip)]
        if inside and not private:
            raise ValueError(f"{host} is at {inside[0]}, not public (--url-private allows that)")
        failure = OSError("no address")
        for place in places:
            try:
                connected = socket.create_connection(place, timeout)
            except OSError as e:
                failure = e
                continue
            self.sockets.append(connected.dup())  # the same connection, whatever wraps the first handle
            if self.closed:
                raise TimeoutError("timed out")
            return connected
        raise failure

    def close(self) -> None:
        """End all connections, and any that another thread is about to make: who reads from them reads their end."""
        self.closed = True
        while self.sockets:
            with self.sockets.pop() as connected, suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)


def fetch_once(url: str, timeout: float, max_bytes: int, private: bool) -> bytes:
    """Body of a URL, redirects followed, in `timeout` seconds. Raises OSError, HTTPException or ValueError."""
    fetcher = Fetcher(private)
    opener = urllib.request.build_opener(fetcher)
    opener.addheaders = [("User-Agent", "prepare_data")]
    request = urllib.request.Request(clean_url(url))

    def body() -> bytes:
        with opener.open(request, timeout=timeout) as response:
            data = response.read(max_bytes + 1)
            if len(data) > max_bytes:
                raise ValueError(f"it is larger than {max_bytes / 2**20:g} MiB (raise --url-max-mb)")
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            return data

    # A socket's timeout is per operation, and a header can come byte by byte; looking up a name knows none at all. So a
    # thread does it, which is left behind at the deadline, without its connections.
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(body).result(timeout)
    finally:
        pool.shutdown(wait=False)
        fetcher.close()


def fetch_url(url: str, timeout: float = 20, max_mb: float = 32, tries: int = 3, private: bool = False) -> bytes:
    """Body of an http(s) URL; `timeout` seconds bound each try as a whole. Raises UserError naming the flag to change.

    Addresses that are not public are refused unless `private`, redirects to them too.
    """
    for attempt in range(tries):
        time.sleep(0.5 * attempt)
        try:
            return fetch_once(url, timeout, int(max_mb * 2**20), private)
        except HTTPError as e:
            problem = f"HTTP {e.code} {e.reason}"
            if e.code < 500 and e.code not in (408, 429):
                raise UserError(f"{url} could not be fetched: {problem}; correct or remove the URL") from e
        except (ValueError, http.client.InvalidURL) as e:  # UnicodeErrors of names are ValueErrors
            raise UserError(f"{url} cannot be fetched: {e}; correct or remove the URL") from e
        except (OSError, http.client.HTTPException) as e:  # URLErrors and timeouts are OSErrors
            problem = f"{str(e) or 'timed out'} (--url-timeout {timeout:g})"
    raise UserError(f"{url} could not be fetched in {tries} tries: {problem}; try again or raise --url-tries")
