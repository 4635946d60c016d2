from __future__ import annotations

import asyncio
import base64
import io
import os
import random
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from omnistage.api import media
from omnistage.api.media import PictureSource, decode_picture
from omnistage.api.media_bytes import FileSource, read_data_url, read_local_file
from omnistage.api.media_fetch import MediaFetcher
from omnistage.api.settings import ApiSettings
from omnistage.api.workers import MediaWorkers
from omnistage.contracts.errors import InvalidRequestError, OmniError, PayloadTooLargeError
from tests.api.pictures import data_url, picture_file

MANY = 10**6


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_known_formats(image_format: str) -> None:
    picture = decode_picture(picture_file(image_format=image_format), max_pixels=MANY)
    assert (picture.mode, picture.size) == ("RGB", (16, 12))
    red, green, _ = picture.getpixel((8, 6))
    assert red > 240
    assert green < 20


@pytest.mark.parametrize("image_format", ["TIFF", "ICO", "PPM", "TGA", "PCX"])
def test_other_formats_are_refused(image_format: str) -> None:
    with pytest.raises(InvalidRequestError, match="PNG, JPEG, WEBP, GIF, BMP"):
        decode_picture(picture_file(image_format=image_format), max_pixels=MANY)


@pytest.mark.parametrize(
    ("mode", "colour", "expected_mode", "expected"),
    [
        ("L", 200, "RGB", (200, 200, 200)),
        ("1", 1, "RGB", (255, 255, 255)),
        ("I;16", 200 * 256, "RGB", (200, 200, 200)),
        ("RGBA", (1, 2, 3, 4), "RGBA", (1, 2, 3, 4)),
        ("LA", (9, 0), "RGBA", (9, 9, 9, 0)),
    ],
)
def test_modes_become_rgb_or_rgba(
    mode: str, colour: object, expected_mode: str, expected: tuple[int, ...]
) -> None:
    picture = decode_picture(picture_file(mode, colour=colour), max_pixels=MANY)
    assert (picture.mode, picture.getpixel((0, 0))) == (expected_mode, expected)


def test_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = decode_picture(picture_file(image_format="JPEG", exif=exif), max_pixels=MANY)
    assert upright.size == (12, 16)


def test_the_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("blue", "red")]
    data = picture_file(
        size=(8, 8),
        colour="lime",
        image_format="GIF",
        save_all=True,
        append_images=frames,
    )
    assert decode_picture(data, max_pixels=MANY).getpixel((0, 0)) == (0, 255, 0)


def bomb(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = (
        chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.invariant("ENTRY-INV-103")
@pytest.mark.parametrize("side", [1001, 9_000, 60_000, 2**31 - 1])
def test_a_bomb_is_refused_by_its_header(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(_: object) -> None:
        raise AssertionError("pixels were decoded")

    monkeypatch.setattr(Image.Image, "load", decoded)
    with pytest.raises(InvalidRequestError, match=r"pixels|corrupt"):
        decode_picture(bomb(side, 1000), max_pixels=MANY)


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_broken_files_are_bad_requests_only(image_format: str) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((24, 24), 90).convert("RGB").save(buffer, image_format)
    whole = buffer.getvalue()
    random_source = random.Random(4)
    refused = 0
    for round_number in range(150):
        data = bytearray(whole)
        if round_number % 2:
            del data[random_source.randrange(1, len(data)) :]
        for _ in range(random_source.randrange(0, 6)):
            data[random_source.randrange(len(data))] = random_source.randrange(256)
        try:
            decode_picture(bytes(data), max_pixels=MANY)
        except InvalidRequestError:
            refused += 1
    assert refused > 50


def test_data_urls() -> None:
    assert read_data_url("data:image/png;base64,YWJj", max_bytes=3) == b"abc"
    assert read_data_url("DATA:;BASE64,YWJj", max_bytes=3) == b"abc"
    for url in (
        "data:",
        "data:image/png,abc",
        "data:image/png;base64,***",
        "data:;base64,YWJ",
        "data:;base64,é",
    ):
        with pytest.raises(InvalidRequestError):
            read_data_url(url, max_bytes=100)
    with pytest.raises(PayloadTooLargeError):
        read_data_url("data:;base64," + base64.b64encode(b"x" * 101).decode(), max_bytes=98)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "allowed"
    root.mkdir()
    (root / "in side.png").write_bytes(b"inside")
    (tmp_path / "outside.png").write_bytes(b"outside")
    (root / "link-out").symlink_to(tmp_path / "outside.png")
    (root / "link-in").symlink_to(root / "in side.png")
    (root / "loop").symlink_to(root / "loop")
    (root / "folder").mkdir()
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "a.png").write_bytes(b"sibling")
    os.mkfifo(root / "pipe")
    return root


@pytest.mark.invariant("ENTRY-INV-210")
@pytest.mark.parametrize("name", ["in%20side.png", "link-in", "folder/../link-in"])
def test_files_below_the_allowed_directory(tree: Path, name: str) -> None:
    url = f"file://{tree}/{name}"
    assert read_local_file(url, root=tree, max_bytes=100) == b"inside"
    with pytest.raises(PayloadTooLargeError):
        read_local_file(url, root=tree, max_bytes=5)


@pytest.mark.invariant("ENTRY-INV-210")
@pytest.mark.parametrize(
    "path",
    [
        "{root}/../outside.png",
        "{root}/%2e%2e/outside.png",
        "{root}/link-out",
        "{root}-not/a.png",
        "{root}/folder",
        "{root}/pipe",
        "{root}/loop",
        "{root}/missing",
        "{root}/%00",
        "/etc/passwd",
        "/dev/zero",
    ],
)
def test_nothing_else(tree: Path, path: str) -> None:
    with pytest.raises(InvalidRequestError):
        read_local_file("file://" + path.format(root=tree), root=tree, max_bytes=100)


@pytest.mark.invariant("ENTRY-INV-210")
def test_no_file_of_another_host_and_none_without_the_flag(tree: Path) -> None:
    with pytest.raises(InvalidRequestError, match="outside"):
        read_local_file(f"file://host{tree}/link-in", root=tree, max_bytes=100)
    with pytest.raises(InvalidRequestError, match="allowed-local-media-path"):
        read_local_file(f"file://{tree}/link-in", root=None, max_bytes=100)


@pytest.fixture
def workers() -> Iterator[MediaWorkers]:
    pool = MediaWorkers(threads=1, max_pending=2)
    yield pool
    pool.close()


def source(settings: ApiSettings, workers: MediaWorkers) -> PictureSource:
    return PictureSource(settings, workers, FileSource(settings, workers, MediaFetcher(settings)))


async def test_the_bounds_hold_for_all_pictures_of_a_request(workers: MediaWorkers) -> None:
    url = data_url(picture_file(size=(20, 10)))
    pictures = source(ApiSettings(max_total_input_pixels=400), workers)
    assert len(await pictures.from_urls([("a", url), ("b", url)])) == 2
    with pytest.raises(InvalidRequestError) as failure:
        await pictures.from_urls([("a", url), ("b", url), ("c", url)])
    assert failure.value.param == "c"


async def test_pictures_that_take_too_long_end(workers: MediaWorkers) -> None:
    class StuckFetcher(MediaFetcher):
        async def fetch(self, url: str, *, max_bytes: int) -> bytes:
            await asyncio.Event().wait()
            raise AssertionError

    settings = ApiSettings(media_timeout_s=0.02)
    pictures = PictureSource(
        settings, workers, FileSource(settings, workers, StuckFetcher(settings))
    )
    with pytest.raises(InvalidRequestError, match="did not arrive"):
        await pictures.from_urls([("a", "https://example.org/a.png")])


@pytest.mark.invariant("ENTRY-INV-201")
async def test_pictures_are_decoded_in_worker_threads(
    workers: MediaWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    decode = media.decode_picture

    def recording(data: bytes, *, max_pixels: int) -> Image.Image:
        threads.append(threading.current_thread().name)
        return decode(data, max_pixels=max_pixels)

    monkeypatch.setattr(media, "decode_picture", recording)
    await source(ApiSettings(), workers).from_urls([("a", data_url(picture_file()))])
    assert len(threads) == 1
    assert threads[0].startswith("omnistage-media")


async def test_waiting_decodes_are_bounded(workers: MediaWorkers) -> None:
    gate = threading.Event()
    try:
        running = [asyncio.ensure_future(workers.run_bounded(gate.wait, 10)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OmniError, match="wait to be read"):
            await workers.run_bounded(bool)
    finally:
        gate.set()
    await asyncio.gather(*running)
    await asyncio.sleep(0.01)
    assert await workers.run_bounded(lambda: "again") == "again"


async def test_inputs_that_take_long_hold_up_no_output(workers: MediaWorkers) -> None:
    gate = threading.Event()
    stuck = asyncio.create_task(workers.run_bounded(gate.wait, 30))
    async with asyncio.timeout(20):
        assert await workers.run(lambda: "made") == "made"
    assert not stuck.done()
    gate.set()
    assert await stuck
