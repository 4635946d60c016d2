"""From a client's URL to the bytes of a file: where they may come from, and how many."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from omnistage.api.media_fetch import MediaFetcher
from omnistage.api.settings import ApiSettings
from omnistage.api.workers import MediaWorkers
from omnistage.contracts.errors import InvalidRequestError, PayloadTooLargeError


class FileSource:
    """Reads `data:`, `https:` and `file:` URLs as the settings allow; no file is larger than
    `max_media_bytes`."""

    def __init__(self, settings: ApiSettings, workers: MediaWorkers, fetcher: MediaFetcher) -> None:
        self._settings = settings
        self._workers = workers
        self._fetcher = fetcher

    async def load(self, url: str) -> bytes:
        """Time is bounded by the caller. Raises `InvalidRequestError`, `PayloadTooLargeError`."""
        max_bytes = self._settings.max_media_bytes
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return await self._workers.run_bounded(read_data_url, url, max_bytes=max_bytes)
        if scheme == "file":
            root = self._settings.allowed_local_media_path
            return await self._workers.run_bounded(
                read_local_file, url, root=root, max_bytes=max_bytes
            )
        return await self._fetcher.fetch(url, max_bytes=max_bytes)

    async def load_all(
        self, urls: Sequence[tuple[str, str]], what: str, most: tuple[str, int]
    ) -> list[tuple[str, bytes]]:
        """Pairs of parameter name and URL to pairs of parameter name and bytes, in order, within
        `media_timeout_s` and `max_body_bytes` for all. `most` is a limit on their number and its
        name, `what` their plural."""
        if not urls:
            return []
        name, limit = most
        if len(urls) > limit:
            raise InvalidRequestError(
                f"{len(urls)} input {what} are over this server's limit of {limit} ({name})",
                param=urls[0][0],
            )
        try:
            async with asyncio.timeout(self._settings.media_timeout_s):
                return await self._load_each(urls, what)
        except TimeoutError as error:
            raise InvalidRequestError(
                f"the input {what} did not arrive within {self._settings.media_timeout_s:g} s "
                "(media_timeout_s)",
                param=urls[0][0],
            ) from error

    async def _load_each(
        self, urls: Sequence[tuple[str, str]], what: str
    ) -> list[tuple[str, bytes]]:
        settings = self._settings
        files: list[tuple[str, bytes]] = []
        left_bytes = settings.max_body_bytes
        for param, url in urls:
            try:
                data = await self.load(url)
            except InvalidRequestError as error:
                error.param = error.param or param
                raise
            left_bytes -= len(data)
            if len(data) > settings.max_media_bytes or left_bytes < 0:
                raise PayloadTooLargeError(
                    f"the input {what} have too many bytes; at most {settings.max_media_bytes} "
                    f"each (max_media_bytes) and {settings.max_body_bytes} together "
                    "(max_body_bytes) are taken",
                    param=param,
                )
            files.append((param, data))
        return files


def read_data_url(url: str, *, max_bytes: int) -> bytes:
    """The bytes of `data:<type>;base64,…`."""
    header, comma, payload = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise InvalidRequestError('a data URL must read "data:<type>;base64,<data>"')
    if len(payload) > (max_bytes + 2) // 3 * 4:
        raise PayloadTooLargeError(f"the file in the data URL has more than {max_bytes} bytes")
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError("the data is no valid base64") from error


def read_local_file(url: str, *, root: Path | None, max_bytes: int) -> bytes:
    """A regular file below `root`, symlinks followed before that is judged."""
    if root is None:
        raise InvalidRequestError(
            "file: URLs are off (the operator can start the server with --allowed-local-media-path)"
        )
    path = _path_below(url, root.resolve())
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidRequestError("the file: URL names no regular file")
            if status.st_size > max_bytes:
                raise PayloadTooLargeError(
                    f"the file has {status.st_size} bytes; at most {max_bytes} are taken"
                )
            return file.read(max_bytes + 1)
    except OSError as error:
        raise InvalidRequestError("the file: URL names no readable file") from error


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _path_below(url: str, root: Path) -> Path:
    try:
        parts = urlsplit(url)
        path = Path(unquote(parts.path, errors="strict")).resolve()
    except (ValueError, OSError, RuntimeError) as error:
        raise InvalidRequestError("the file: URL is malformed") from error
    if parts.netloc not in ("", "localhost") or not path.is_relative_to(root):
        raise InvalidRequestError("the file: URL lies outside of the directory that is allowed")
    return path
