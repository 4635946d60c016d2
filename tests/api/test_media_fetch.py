from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpcore
import pytest

from omnistage.api.media_fetch import MediaFetcher, RefusedAddressError
from omnistage.api.settings import ApiSettings
from omnistage.contracts.errors import InvalidRequestError, PayloadTooLargeError

PUBLIC = "93.184.216.34"
OTHER_PUBLIC = "8.8.8.8"
PRIVATE = "10.0.0.7"
MAX_BYTES = 1000


def answer(body: bytes = b"picture", status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def redirect(location: str) -> bytes:
    return answer(b"", "302 Found", f"Location: {location}")


@dataclass
class Net:
    """A resolver and a network in memory, which record what they were asked."""

    names: dict[str, list[list[str]]]
    """Per host the successive answers of the resolver; the last one repeats."""
    answers: list[bytes] = field(default_factory=list)
    resolved: list[str] = field(default_factory=list)
    connected: list[tuple[str, int]] = field(default_factory=list)
    tls_names: list[str | None] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)

    async def resolve(self, host: str, port: int) -> list[str]:
        self.resolved.append(host)
        if host not in self.names:
            raise socket.gaierror("unknown")
        queue = self.names[host]
        return queue.pop(0) if len(queue) > 1 else queue[0]

    def fetcher(self, **settings: Any) -> MediaFetcher:
        return MediaFetcher(ApiSettings(**settings), resolve=self.resolve, inner=Backend(self))


class Stream(httpcore.AsyncMockStream):
    def __init__(self, net: Net, data: bytes) -> None:
        super().__init__([data[i : i + 50] for i in range(0, len(data), 50)])
        self._net = net

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        self._net.sent.append(buffer)

    async def start_tls(
        self,
        ssl_context: Any,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        assert ssl_context.check_hostname
        self._net.tls_names.append(server_hostname)
        return self


class Backend(httpcore.AsyncNetworkBackend):
    def __init__(self, net: Net) -> None:
        self._net = net

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self._net.connected.append((host, port))
        if host in self._net.dead:
            raise httpcore.ConnectError("refused")
        return Stream(self._net, self._net.answers.pop(0))


@pytest.mark.invariant("ENTRY-INV-210")
async def test_the_socket_goes_to_the_checked_number_and_tls_keeps_the_name() -> None:
    net = Net({"pictures.example": [[PUBLIC], [PRIVATE]]}, [answer()])
    data = await net.fetcher().fetch("https://pictures.example/a.png?b=c", max_bytes=MAX_BYTES)
    assert data == b"picture"
    assert net.resolved == ["pictures.example"]
    assert net.connected == [(PUBLIC, 443)]
    assert net.tls_names == ["pictures.example"]
    request = b"".join(net.sent)
    assert request.startswith(b"GET /a.png?b=c HTTP/1.1\r\nHost: pictures.example\r\n")


@pytest.mark.invariant("ENTRY-INV-210")
@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("https://inside.example/", [PRIVATE]),
        ("https://mixed.example/", [PUBLIC, "127.0.0.1"]),
        ("https://mapped.example/", ["::ffff:127.0.0.1"]),
        ("https://nat64.example/", ["64:ff9b::a00:1"]),
        ("https://localhost:8000/", ["127.0.0.1", "::1"]),
        ("https://127.0.0.1/", ["127.0.0.1"]),
        ("https://2130706433/", ["127.0.0.1"]),
        ("https://0x7f.1/", ["127.0.0.1"]),
        ("https://[::1]/", ["::1"]),
        ("https://169.254.169.254/latest/meta-data", ["169.254.169.254"]),
    ],
)
async def test_no_connection_to_a_private_address(url: str, addresses: list[str]) -> None:
    host = url.split("/")[2].split(":8000")[0].strip("[]")
    net = Net({host: [addresses]}, [answer()])
    with pytest.raises(RefusedAddressError, match="private"):
        await net.fetcher().fetch(url, max_bytes=MAX_BYTES)
    assert net.connected == []
    allowed = Net({host: [addresses]}, [answer()])
    fetcher = allowed.fetcher(allow_private_media=True)
    assert await fetcher.fetch(url, max_bytes=MAX_BYTES) == b"picture"


@pytest.mark.invariant("ENTRY-INV-210")
async def test_every_hop_of_a_redirect_is_checked() -> None:
    names = {"a.example": [[PUBLIC]], "b.example": [[OTHER_PUBLIC]], "inside": [[PRIVATE]]}
    net = Net(dict(names), [redirect("https://b.example/x"), answer()])
    assert await net.fetcher().fetch("https://a.example/", max_bytes=MAX_BYTES) == b"picture"
    assert net.connected == [(PUBLIC, 443), (OTHER_PUBLIC, 443)]
    assert net.tls_names == ["a.example", "b.example"]
    for target in ("https://inside/x", "//inside/x"):
        net = Net(dict(names), [redirect(target), answer()])
        with pytest.raises(RefusedAddressError):
            await net.fetcher().fetch("https://a.example/", max_bytes=MAX_BYTES)
        assert net.connected == [(PUBLIC, 443)]


@pytest.mark.invariant("ENTRY-INV-210")
async def test_a_name_that_changes_between_hops_is_checked_again() -> None:
    net = Net({"a.example": [[PUBLIC], [PRIVATE]]}, [redirect("/next"), answer()])
    with pytest.raises(RefusedAddressError):
        await net.fetcher().fetch("https://a.example/", max_bytes=MAX_BYTES)
    assert net.connected == [(PUBLIC, 443)]


@pytest.mark.parametrize(
    "target",
    [
        "http://a.example/",
        "file:///etc/passwd",
        "ftp://a.example/",
        "https://u:p@a.example/",
    ],
)
async def test_redirects_obey_the_rules_of_urls(target: str) -> None:
    net = Net({"a.example": [[PUBLIC]]}, [redirect(target), answer()])
    with pytest.raises(InvalidRequestError):
        await net.fetcher().fetch("https://a.example/", max_bytes=MAX_BYTES)
    assert len(net.connected) == 1


async def test_redirects_are_counted() -> None:
    def net(redirects: int) -> Net:
        hops = [redirect(f"/{hop}") for hop in range(redirects)]
        return Net({"a.example": [[PUBLIC]]}, [*hops, answer()])

    url = "https://a.example/"
    assert await net(2).fetcher(max_redirects=2).fetch(url, max_bytes=MAX_BYTES) == b"picture"
    with pytest.raises(InvalidRequestError, match="more than 2 times"):
        await net(3).fetcher(max_redirects=2).fetch(url, max_bytes=MAX_BYTES)


@pytest.mark.parametrize(
    "url",
    [
        "http://a.example/",
        "gopher://a.example/",
        "a.example/x.png",
        "https:///x",
        "https://user@a.example/",
        "https://a.example:99999/",
        "https://a.example/\u00e9",
        "https://[::1",
        "https://a..example/",
        f"https://a.example/{'x' * 9000}",
        "https://a.example/a b",
        "https://a.example/\x7f",
    ],
)
async def test_urls_that_are_refused_unvisited(url: str) -> None:
    net = Net({"a.example": [[PUBLIC]]}, [answer()])
    with pytest.raises(InvalidRequestError):
        await net.fetcher().fetch(url, max_bytes=MAX_BYTES)
    assert net.sent == []


async def test_http_where_it_is_allowed_and_other_ports_and_names() -> None:
    net = Net({"a.example": [[PUBLIC]], "xn--bcher-kva.example": [[PUBLIC]]}, [answer()] * 2)
    fetcher = net.fetcher(allow_http_media=True)
    await fetcher.fetch("http://a.example:8080/", max_bytes=MAX_BYTES)
    await fetcher.fetch("http://b\u00fccher.example/", max_bytes=MAX_BYTES)
    assert net.connected == [(PUBLIC, 8080), (PUBLIC, 80)]
    assert b"Host: a.example:8080\r\n" in net.sent[0]
    assert b"Host: xn--bcher-kva.example\r\n" in b"".join(net.sent)


async def test_the_next_checked_address_is_tried() -> None:
    net = Net({"a.example": [[PUBLIC, OTHER_PUBLIC]]}, [answer()], dead={PUBLIC})
    assert await net.fetcher().fetch("https://a.example/", max_bytes=MAX_BYTES) == b"picture"
    assert [host for host, _ in net.connected] == [PUBLIC, OTHER_PUBLIC]


@pytest.mark.parametrize(
    "response",
    [
        answer(b"", "404 Not Found"),
        answer(b"", "302 Found"),
        answer(b"x", "200 OK", "Content-Encoding: gzip"),
        b"not http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"",
    ],
)
async def test_answers_that_are_no_picture(response: bytes) -> None:
    net = Net({"a.example": [[PUBLIC]]}, [response])
    with pytest.raises(InvalidRequestError):
        await net.fetcher().fetch("https://a.example/", max_bytes=MAX_BYTES)


async def test_an_unknown_name_is_a_bad_request() -> None:
    with pytest.raises(InvalidRequestError, match="could not be fetched"):
        await Net({}).fetcher().fetch("https://a.example/", max_bytes=MAX_BYTES)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def local_server(handler: Handler) -> AsyncIterator[str]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


LOCAL = ApiSettings(allow_http_media=True, allow_private_media=True)


async def test_a_body_without_end_is_cut_off_on_a_real_socket() -> None:
    closed = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while True:
                writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
                await writer.drain()
        except ConnectionError:
            closed.set()

    async with local_server(endless) as url:
        with pytest.raises(PayloadTooLargeError):
            await MediaFetcher(LOCAL).fetch(url, max_bytes=10_000)
        async with asyncio.timeout(30):
            await closed.wait()


async def test_a_real_socket_delivers() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(b"p" * MAX_BYTES))
        await writer.drain()
        writer.close()

    async with local_server(serve) as url:
        assert len(await MediaFetcher(LOCAL).fetch(url, max_bytes=MAX_BYTES)) == MAX_BYTES
        with pytest.raises(InvalidRequestError, match="start the server with --allow-http-media"):
            await MediaFetcher(ApiSettings()).fetch(url, max_bytes=MAX_BYTES)
        fetcher = MediaFetcher(ApiSettings(allow_http_media=True))
        with pytest.raises(RefusedAddressError):
            await fetcher.fetch(url, max_bytes=MAX_BYTES)
