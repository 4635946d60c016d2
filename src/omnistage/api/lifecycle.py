"""How far the server is in its life. Imports nothing slow: it exists before the HTTP side does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from omnistage.contracts.errors import UnavailableError


class Phase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(slots=True)
class Lifecycle:
    """Whether new work is taken. Only the server moves it, forwards."""

    phase: Phase = Phase.SERVING

    def check_serving(self) -> None:
        if self.phase is Phase.STARTING:
            raise UnavailableError(
                "the model is still loading; GET /ready answers 200 when it is done",
                retry_after_s=5.0,
            )
        if self.phase is Phase.DRAINING:
            raise UnavailableError("the server is shutting down and takes no new requests")
