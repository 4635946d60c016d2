"""A process with a shared memory connector, driven line by line through its pipes.

`send N` answers with the reference to N MiB of ones, `receive HEX` with the sum of the tensor
(which it keeps), `release HANDLE` and `drop` with "done".
"""

from __future__ import annotations

import sys

import msgspec
import numpy as np

from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import PayloadRef, StageData
from omnistage.transport.shared_memory import SharedMemoryConnector

MIB = 2**20


def main() -> None:
    connector = SharedMemoryConnector(1024)
    kept: list[StageData] = []
    print("ready", flush=True)
    for line in sys.stdin:
        verb, _, argument = line.strip().partition(" ")
        print(answer(connector, kept, verb, argument), flush=True)


def answer(
    connector: SharedMemoryConnector, kept: list[StageData], verb: str, argument: str
) -> str:
    if verb == "send":
        ones = np.ones(int(argument) * MIB, dtype=np.uint8)
        ref, frames = connector.send(StageData(modality=Modality.LATENT, tensors={"x": ones}))
        assert not frames
        return msgspec.msgpack.encode(ref).hex()
    if verb == "receive":
        ref = msgspec.msgpack.decode(bytes.fromhex(argument), type=PayloadRef)
        kept.append(connector.receive(ref, []))
        return str(int(kept[-1].tensors["x"].numpy().sum(dtype=np.int64)))
    if verb == "release":
        connector.release(argument)
    elif verb == "drop":
        kept.clear()
    else:
        raise SystemExit(f"unknown verb {verb!r}")
    return "done"


if __name__ == "__main__":
    main()
