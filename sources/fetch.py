"""Download of files that rows name by URL, from object stores or from public web addresses only, with a time and a size
limit."""

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
    """Return an http(s) URL with everything but the host percent-encoded. Raise ValueError for any other URL."""
    parts = urlsplit(url)
    need(parts.scheme in WEB and parts.hostname, "not an http(s) URL with a host")
    need("@" not in parts.netloc, "the URL contains a user name; download the file yourself and use its path")
    need(parts.port != 0, "port 0 is not valid")  # urlsplit itself raises for all other ports outside 1..65535
    path, query = (quote(part, safe=string.punctuation) for part in (parts.path, parts.query))
    return parts._replace(path=path, query=query, fragment="").geturl()


NAT64 = ipaddress.ip_network("64:ff9b::/96")  # how IPv6-only networks reach IPv4 hosts: the last 32 bits
PUBLIC_IPV6 = ipaddress.ip_network("2000::/3")  # all that IANA has assigned to the internet


def is_public(address: str) -> bool:
    """Return whether an IP address is on the public internet. If it embeds an IPv4 address, that address decides."""
    ip = ipaddress.ip_address(address)
    if ip in NAT64:
        ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    ip = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None) or ip
    return ip.is_global and not ip.is_multicast and (ip.version == 4 or ip in PUBLIC_IPV6)


def check_literal(host: str) -> None:
    """Raise ValueError if a host that a proxy will look up is localhost, or a private IP address in any spelling."""
    host = host.rstrip(".")
    public = not re.search(r"(^|\.)localhost$|[%\0]", host)
    with suppress(socket.gaierror):  # the host is a name, not an IP address
        [info, *_] = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
        public = is_public(info[4][0])
    need(public, f"{host} is not public (pass --url-private to allow it)")


class Fetcher(urllib.request.HTTPSHandler, urllib.request.HTTPHandler, urllib.request.HTTPRedirectHandler):
    """An HTTP(S) handler that connects only to the IP addresses that it has checked, also after redirects. `close` ends
    its connections."""

    def __init__(self, private: bool):
        super().__init__()
        self.private = private
        self.closed = False
        self.sockets: list[socket.socket] = []

    def do_open(self, http_class: type, request: urllib.request.Request, **kw) -> http.client.HTTPResponse:
        proxied = request._tunnel_host is not None or request.has_proxy()
        if proxied and not self.private:
            check_literal(unquote(urlsplit(request.full_url).hostname))

        def make_connection(host: str, **kwargs) -> http.client.HTTPConnection:
            connection = http_class(host, **kwargs)
            # http.client adds TLS to this socket, for the host's name. A proxy set in the environment may be private
            connection._create_connection = partial(self.connect, private=self.private or proxied)
            return connection

        return super().do_open(make_connection, request, **kw)

    def redirect_request(self, request, response, code, message, headers, url: str) -> urllib.request.Request:
        response.close()  # urllib would read the whole body, whatever its size
        return urllib.request.Request(clean_url(url))

    def connect(
        self, address: tuple[str, int], timeout: float, source: None = None, *, private: bool
    ) -> socket.socket:
        """Return a socket connected to the first address of the host that answers. Raise UserError if any of its
        addresses is not public, unless `private`."""
        host, port = address
        endpoints = [info[4][:2] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        for ip, _ in endpoints:
            need(private or is_public(ip),
                 f"{host} resolves to {ip}, which is not public (pass --url-private to allow it)")
        for endpoint in endpoints[:-1]:
            with suppress(OSError):
                return self.open_socket(endpoint, timeout)
        return self.open_socket(endpoints[-1], timeout)

    def open_socket(self, endpoint: tuple[str, int], timeout: float) -> socket.socket:
        connected = socket.create_connection(endpoint, timeout)
        self.sockets.append(connected.dup())  # a second handle of the connection, as TLS will wrap the first one
        if self.closed:
            raise TimeoutError
        return connected

    def close(self) -> None:
        """End all connections, and any that another thread is about to make, so that their readers reach the end of
        the data."""
        self.closed = True
        while self.sockets:
            with self.sockets.pop() as connected, suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)


def is_permanent(error: Exception) -> bool:
    """Return whether a retry would fail in the same way."""
    if isinstance(error, HTTPError):
        return error.code < 500 and error.code not in (408, 429)
    # http.client.InvalidURL is not a ValueError; the UnicodeError of an invalid host name is one
    return isinstance(error, ValueError | http.client.InvalidURL | FileNotFoundError | PermissionError)


def fetch(
    file: str | RemoteFile, timeout: float = 20, max_mb: float = 32, tries: int = 3, private: bool = False
) -> bytes:
    """Return the content of a URL of a row, following redirects, or of a file of an object store.

    `timeout` seconds bound each try as a whole. Raise UserError, naming the flag to change, if all tries fail. Unless
    `private`, raise it without a retry if an address, or one that it redirects to, is not public.
    """
    max_bytes = int(max_mb * 2**20)
    web = isinstance(file, str) and url_scheme(file) in WEB
    file = file if web or isinstance(file, RemoteFile) else RemoteFile.from_row_url(file)

    def read(fetcher: Fetcher) -> bytes:
        opener = urllib.request.build_opener(fetcher)
        opener.addheaders = [("User-Agent", "prepare_data")]
        with opener.open(clean_url(file), timeout=timeout) if web else file.fs.open(file.path) as opened:
            data = opened.read(max_bytes + 1)
            need(len(data) <= max_bytes, f"it is larger than {max_mb:g} MiB (raise --url-max-mb)")
            if web and opened.length:
                raise http.client.IncompleteRead(b"", opened.length)
            return data

    for attempt in range(tries):
        time.sleep(0.5 * attempt)
        fetcher = Fetcher(private)
        # A socket's timeout applies to each operation, so a slow server can send a header byte by byte; and a name
        # lookup has no timeout. So a thread does the work; after the deadline it is abandoned, its connections closed.
        pool = ThreadPoolExecutor(1)
        try:
            return pool.submit(read, fetcher).result(timeout)
        except (OSError, ValueError, http.client.HTTPException, *store_errors()) as e:
            reason = describe_error(e).removeprefix("UserError: ")
            if is_permanent(e):
                raise UserError(f"{file} cannot be fetched: {reason}; correct or remove the URL") from e
        finally:
            pool.shutdown(wait=False)
            fetcher.close()
    raise UserError(f"{file} could not be fetched in {tries} tries: {reason}; try again, or raise --url-tries or "
                    f"--url-timeout {timeout:g}")
