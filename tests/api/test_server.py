from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from omnistage.api.listener import hang_up_on_dead_readers, open_listener, url_of
from omnistage.api.server import run_server
from omnistage.contracts.errors import ConfigurationError
from tests.api.live_server import GUARD_S

GENERATIONS = "/v1/images/generations"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Served:
    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(GUARD_S):
            return (await self.process.stdout.readline()).decode().strip()

    async def ended(self) -> tuple[int, str]:
        """Exit code and what is left to read."""
        async with asyncio.timeout(GUARD_S):
            output, _ = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, output.decode()


@asynccontextmanager
async def served(behaviour: str = "plain") -> AsyncIterator[Served]:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.api.serve_fake",
        str(port),
        behaviour,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield Served(process, port)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.mark.invariant("ENTRY-INV-203")
def test_a_taken_port_is_an_error_before_any_engine_is_made() -> None:
    def make_engine() -> object:
        raise AssertionError("the engine was made")

    with open_listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigurationError, match=f"port {port} on 127.0.0.1 is taken; use --port"
        ):
            run_server(make_engine, port=port)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("no such host", 8000, "--host"),
        ("127.0.0.1", 70_000, "--port"),
        ("192.0.2.1", 8000, "no address of this machine"),
    ],
)
def test_other_addresses_that_cannot_be_taken(host: str, port: int, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        open_listener(host, port)


@pytest.mark.invariant("ENTRY-INV-200")
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
async def test_a_client_that_reads_nothing_of_its_answer_is_hung_up_on() -> None:
    with open_listener("127.0.0.1", 0) as listener:
        hang_up_on_dead_readers(listener, 0.2)
        loop = asyncio.get_running_loop()
        with socket.create_connection(listener.getsockname()):
            accepted, _ = await loop.sock_accept(listener)
            with accepted:
                accepted.setblocking(False)
                async with asyncio.timeout(GUARD_S):
                    with pytest.raises(TimeoutError, match="timed out"):
                        await loop.sock_sendall(accepted, bytes(64 * 1024 * 1024))


def test_the_url_of_an_ipv6_listener_has_brackets() -> None:
    with open_listener("::1", 0) as listener:
        assert url_of(listener) == f"http://[::1]:{listener.getsockname()[1]}"


async def test_answers_leave_at_once() -> None:
    """Nagle's algorithm is off: else the body of an answer waits for the client's delayed ACK."""
    with open_listener("127.0.0.1", 0) as listener:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def on_connection(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            own = writer.get_extra_info("socket")
            accepted.set_result(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with (
            asyncio.timeout(GUARD_S),
            await asyncio.start_server(on_connection, sock=listener),
        ):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            assert await accepted == 1
            writer.close()


@pytest.mark.invariant("ENTRY-INV-203")
async def test_probes_are_answered_while_the_model_loads() -> None:
    async with served("slow-start") as server:
        assert await server.line() == "start"
        async with httpx.AsyncClient(base_url=server.url) as client:
            for path in ("/health", "/ready"):
                response = await client.get(path)
                assert (response.status_code, response.json()["status"]) == (503, "starting")
            response = await client.post(GENERATIONS, json={"prompt": "x"})
            assert response.status_code == 503
            assert "loading" in response.json()["error"]["message"]
        server.process.send_signal(signal.SIGTERM)
        assert await server.ended() == (0, "shutdown\n")


@pytest.mark.invariant("ENTRY-INV-203")
async def test_a_failed_start_shuts_down_and_raises() -> None:
    async with served("fail-start") as server:
        code, output = await server.ended()
        assert code == 2
        assert output == "start\nshutdown\nerror: the model does not fit\n"


@pytest.mark.invariant("ENTRY-INV-204")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_an_idle_server(number: signal.Signals) -> None:
    async with served() as server:
        assert await server.line() == "start"
        assert await server.line() == f"ready: example/fake-image at {server.url}"
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/ready")).status_code == 200
            server.process.send_signal(number)
            assert await server.ended() == (0, "drain\nshutdown\n")


@pytest.mark.invariant("ENTRY-INV-204")
async def test_draining_refuses_new_work_and_a_second_signal_ends_it() -> None:
    async with served("hold") as server:
        assert [(await server.line()).split(":")[0] for _ in "12"] == ["start", "ready"]
        async with httpx.AsyncClient(base_url=server.url, timeout=GUARD_S) as client:
            running = asyncio.create_task(client.post(GENERATIONS, json={"prompt": "x"}))
            assert await server.line() == "running"
            server.process.send_signal(signal.SIGTERM)
            assert await server.line() == "drain"
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "draining")
            refused = await client.post(GENERATIONS, json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "unavailable")
            assert not running.done()
            server.process.send_signal(signal.SIGTERM)
            assert await server.ended() == (128 + signal.SIGTERM, "shutdown\n")
            await asyncio.gather(running, return_exceptions=True)
