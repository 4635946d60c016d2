"""The training loop that both stages share: a schedule by the clock, and CUDA graphs."""

import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.optim import AdamW

Step = Callable[[], dict[str, Tensor]]
RECORDING_WARMUP = 3  # steps that compile and settle before a step is recorded


class Schedule:
    """Counts steps until a limit of steps or of seconds, whichever comes first."""

    def __init__(self, max_steps: int, seconds: float, warmup_steps: int = 200) -> None:
        self.max_steps = max_steps
        self.seconds = seconds
        self.warmup_steps = warmup_steps
        self._step = 0
        self._started = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the first step."""
        return time.monotonic() - self._started

    @property
    def progress(self) -> float:
        """0 at the start, 1 at the end."""
        return min(1.0, max(self._step / self.max_steps, self.elapsed / self.seconds))

    def steps(self) -> Iterator[int]:
        """Yield step numbers from 0 until the end."""
        self._started = time.monotonic()
        while self.progress < 1.0:
            yield self._step
            self._step += 1

    def learning_rate_factor(self) -> float:
        """Linear warm-up by steps, then half a cosine down to zero by progress."""
        warmup = min(1.0, (self._step + 1) / self.warmup_steps)
        return warmup * 0.5 * (1 + math.cos(math.pi * self.progress))


def build_optimizer(groups: list[dict[str, object]], device: torch.device) -> tuple[AdamW, Tensor]:
    """AdamW whose learning rate is a tensor on the device, so that a recorded step can read it."""
    learning_rate = torch.zeros((), device=device)
    on_gpu = device.type == "cuda"
    optimizer = AdamW(groups, lr=learning_rate, betas=(0.9, 0.99), fused=on_gpu, capturable=on_gpu)
    return optimizer, learning_rate


def record(step: Step) -> Step:
    """Record a training step as a CUDA graph: thousands of small launches become one.

    The step must draw its own random batch on the GPU and never wait for a value.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(RECORDING_WARMUP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()

    def replay() -> dict[str, Tensor]:
        graph.replay()
        return outputs

    return replay


def run_steps(
    step: Step,
    schedule: Schedule,
    learning_rate: Tensor,
    peak_learning_rate: float,
    log: Callable[..., None],
) -> None:
    """Run a step, on a cosine schedule of its learning rate, until the schedule ends."""
    for index in schedule.steps():
        learning_rate.fill_(peak_learning_rate * schedule.learning_rate_factor())
        terms = step()
        if index % 20 == 0:  # read a value: it keeps the host from running ahead of the clock
            values = {name: round(term.item(), 5) for name, term in terms.items()}
            if index % 500 == 0:
                log(step=index, seconds=round(schedule.elapsed, 1), **values)
