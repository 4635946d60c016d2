"""Messages as frames: one version byte and msgpack first, raw buffers behind.

Wire format: frame 0 is `PROTOCOL_VERSION` as one byte followed by the tagged msgpack map of a
`contracts.messages.Message`; frames 1… are the inline buffers its `PayloadRef`s point to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from omnistage.contracts.errors import InvalidRequestError, ProtocolError
from omnistage.contracts.messages import PROTOCOL_VERSION, Message

if TYPE_CHECKING:
    from typing_extensions import Buffer

_VERSION = bytes([PROTOCOL_VERSION])
_ENCODER = msgspec.msgpack.Encoder()


def encode(
    message: Message, buffers: Sequence[memoryview | bytes] = ()
) -> list[bytes | memoryview]:
    """The frames of `message`. Buffers are passed on as views: send before their bytes change.

    Raises `InvalidRequestError` when a field of type Any holds what msgpack cannot carry.
    """
    try:
        head = _VERSION + _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        kind = type(message).__name__
        raise InvalidRequestError(
            f"{kind} cannot be sent: {error}; allowed are None, bool, 64-bit int, float, str, "
            "bytes, lists and string-keyed maps; tensors go into StageData.tensors"
        ) from error
    return [head, *(flat_bytes(buffer) for buffer in buffers)]


class MessageDecoder:
    """Decodes frames into the messages of `union_type`, and into nothing else."""

    def __init__(self, union_type: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union_type, ext_hook=_refuse_extension)

    def decode(self, frames: Sequence[Buffer]) -> tuple[Message, list[memoryview]]:
        """The message and views of the buffers behind it.

        Raises `ProtocolError` that names what is wrong: no frames, another version, an unknown
        tag or field, a wrong type, bytes that are no msgpack.
        """
        if not frames:
            raise ProtocolError("a message without frames")
        head = memoryview(frames[0]).cast("B")
        if not head.nbytes:
            raise ProtocolError("a message whose first frame is empty")
        if head[0] != PROTOCOL_VERSION:
            raise ProtocolError(
                f"peer speaks protocol version {head[0]}, this process {PROTOCOL_VERSION}; "
                "both must run the same release"
            )
        return self._decode_body(head[1:]), [flat_bytes_view(frame) for frame in frames[1:]]

    def _decode_body(self, body: memoryview) -> Message:
        try:
            message: Message = self._decoder.decode(body)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"malformed message: {error}") from error
        return message


def flat_bytes(buffer: memoryview | bytes) -> bytes | memoryview:
    return buffer if isinstance(buffer, bytes) else flat_bytes_view(buffer)


def flat_bytes_view(buffer: Buffer) -> memoryview:
    """A one-dimensional view of the bytes of any contiguous buffer."""
    view = memoryview(buffer)
    if not view.nbytes:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _refuse_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"msgpack extension type {code} is not part of the protocol")
