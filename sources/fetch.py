"""Files that rows name by a URL: of object stores, or of the web from public addresses only, within a deadline and a
size."""

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

from errors import UserError, describe_error, need
from sources.remote import RemoteFile
from sources.tables import store_errors, url_scheme

WEB = ("http", "https")


def clean_url(url: str) -> str:
    """Return an http(s) URL with all but its host percent-encoded. Raise ValueError for any other URL."""
    parts = urlsplit(url)
    need(parts.scheme in WEB and parts.hostname, "not an http(s) URL with a host")
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
        for ip, _ in places:
            need(private or is_public(ip), f"{host} is at {ip}, not public (--url-private allows that)")
        for place in places[:-1]:
            with suppress(OSError):
                return self.dial(place, timeout)
        return self.dial(places[-1], timeout)

    def dial(self, place: tuple[str, int], timeout: float) -> socket.socket:
        connected = socket.create_connection(place, timeout)
        self.sockets.append(connected.dup())  # the same connection, whatever wraps the first handle
        if self.closed:
            raise TimeoutError
        return connected

    def close(self) -> None:
        """End all connections, and any that another thread is about to make: who reads from them reads their end."""
        self.closed = True
        while self.sockets:
            with self.sockets.pop() as connected, suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)


def final(error: Exception) -> bool:
    """Return whether another try would fail in the same way."""
    if isinstance(error, HTTPError):
        return error.code < 500 and error.code not in (408, 429)
    # an InvalidURL is an HTTPException, a UnicodeError of a name a ValueError
    return isinstance(error, ValueError | http.client.InvalidURL | FileNotFoundError | PermissionError)


def fetch(
    file: str | RemoteFile, timeout: float = 20, max_mb: float = 32, tries: int = 3, private: bool = False
) -> bytes:
    """Return the content of a URL in a row, redirects followed, or of a store's file.

    `timeout` seconds bound each try as a whole. Raise UserError, naming the flag to change, if all tries fail; at once
    for addresses that are not public, redirects to them included, unless `private`.
    """
    most = int(max_mb * 2**20)
    web = isinstance(file, str) and url_scheme(file) in WEB
    file = file if web or isinstance(file, RemoteFile) else RemoteFile.from_row_url(file)

    def read(fetcher: Fetcher) -> bytes:
        opener = urllib.request.build_opener(fetcher)
        opener.addheaders = [("User-Agent", "prepare_data")]
        with opener.open(clean_url(file), timeout=timeout) if web else file.fs.open(file.path) as opened:
            data = opened.read(most + 1)
            need(len(data) <= most, f"it is larger than {max_mb:g} MiB (raise --url-max-mb)")
            if web and opened.length:
                raise http.client.IncompleteRead(b"", opened.length)
            return data

    for attempt in range(tries):
        time.sleep(0.5 * attempt)
        fetcher = Fetcher(private)
        # A socket's timeout is per operation, a header can come byte by byte, and looking up a name knows none at all.
        # So a thread does it, which is left behind at the deadline, without its connections.
        pool = ThreadPoolExecutor(1)
        try:
            return pool.submit(read, fetcher).result(timeout)
        except (OSError, ValueError, http.client.HTTPException, *store_errors()) as e:
            why = describe_error(e).removeprefix("UserError: ")
            if final(e):
                raise UserError(f"{file} cannot be fetched: {why}; correct or remove the URL") from e
        finally:
            pool.shutdown(wait=False)
            fetcher.close()
    raise UserError(f"{file} could not be fetched in {tries} tries: {why}; try again, or raise --url-tries or "
                    f"--url-timeout {timeout:g}")
