"""What a plan is made for: the shape of a request."""

from __future__ import annotations

from dataclasses import dataclass

from omnistage.contracts.errors import ConfigurationError

_KEYS = {
    "height": "height",
    "width": "width",
    "frames": "num_frames",
    "steps": "num_inference_steps",
    "requests": "the number",
}


@dataclass(frozen=True, kw_only=True)
class RequestShape:
    """`requests` run at a time. `text_tokens` is the length of a prompt for encoders that do not
    pad to a length of their own; None: the planner's assumption for the model. `guided` says
    whether a request has a negative branch, where the model knows one. `steps` weighs what happens
    once a request against what happens in each step."""

    height: int = 1024
    width: int = 1024
    frames: int = 1
    steps: int = 30
    requests: int = 1
    text_tokens: int | None = None
    guided: bool = True

    def __post_init__(self) -> None:
        for name in ("height", "width", "frames", "steps", "requests"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"{_KEYS[name]} of the requests to plan for is {value!r}; it must be a "
                    "positive integer: change it among the default sampling parameters"
                )

    def __str__(self) -> str:
        frames = f", {self.frames} frames" if self.frames > 1 else ""
        batch = f", {self.requests} at a time" if self.requests > 1 else ""
        return f"{self.width}x{self.height}{frames}, {self.steps} steps{batch}"
