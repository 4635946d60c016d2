"""A codec small enough to check by hand, and a driver of the stage in this thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from omnistage.ar.generation.codec import CodecStream
from omnistage.ar.generation.runtime import GenerationRuntime
from omnistage.config.pipeline import ExecutionType, StageConfig
from omnistage.config.resolved import ResolvedStage
from omnistage.contracts.errors import OmniError, as_omni_error
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command, Emission, StageRequest
from omnistage.contracts.sampling import OmniTokenSamplingParams

CODEBOOKS, CODEBOOK_SIZE = 2, 100
SAMPLES_PER_FRAME = 3
NOT_A_NUMBER = CODEBOOK_SIZE - 1
"""As a first code: this frame's audio is NaN."""


class RunningSum:
    """Sample j of a frame is the sum of all its stream's codes so far, plus j / 10."""

    sample_rate = 30
    samples_per_frame = SAMPLES_PER_FRAME
    num_codebooks, codebook_size = CODEBOOKS, CODEBOOK_SIZE
    captured_sizes: tuple[int, ...] = ()

    def __init__(self, max_streams: int) -> None:
        self.max_streams = max_streams
        self.sums: dict[int, float] = {}
        self.batches: list[tuple[int, int]] = []
        self.fail: Callable[[int], None] = lambda batch: None
        self.closed = False

    def begin(self, key: RequestKey) -> CodecStream:
        row = next(row for row in range(self.max_streams) if row not in self.sums)
        self.sums[row] = 0.0
        return CodecStream(key=key, row=row)

    def decode(
        self, streams: Sequence[CodecStream], codes: torch.Tensor, frames: Sequence[int]
    ) -> list[torch.Tensor]:
        self.batches.append((codes.shape[0], codes.shape[1]))
        self.fail(len(streams))
        waves = []
        for stream, ids, count in zip(streams, codes, frames, strict=True):
            real = ids[:count]
            sums = real.sum(1).cumsum(0).float() + self.sums[stream.row]
            self.sums[stream.row] = float(sums[-1])
            sums[real[:, 0] == NOT_A_NUMBER] = float("nan")
            inside = torch.arange(SAMPLES_PER_FRAME) / 10
            waves.append((sums[:, None] + inside).flatten())
            stream.frames += count
        return waves

    def finish(self, stream: CodecStream) -> torch.Tensor:
        return torch.tensor([-1.0])

    def release(self, stream: CodecStream) -> None:
        del self.sums[stream.row]

    def describe(self) -> dict[str, Any]:
        return {"codec": "running sum"}

    def close(self) -> None:
        self.closed = True


def build_running_sum(stage: Any, device: str, max_streams: int, report: Any) -> RunningSum:
    report("nothing to load", 1.0)
    return RunningSum(max_streams)


def expected_audio(codes: np.ndarray) -> np.ndarray:
    sums = np.cumsum(codes.sum(1)).astype(np.float32)
    inside = np.arange(SAMPLES_PER_FRAME, dtype=np.float32) / np.float32(10)
    return np.append((sums[:, None] + inside).ravel(), np.float32(-1.0))


def generation_stage(**changes: Any) -> ResolvedStage:
    options = {
        "codec_model": "tests.ar.generation.codecs:build_running_sum",
        "max_batch_frames": 4096,
    }
    options |= changes.pop("options", {})
    config = StageConfig(
        stage_id=0,
        name="codec",
        execution_type=ExecutionType.LLM_GENERATION,
        runtime="omnistage.ar.generation.runtime:GenerationRuntime",
        final_output=True,
        output_modality=Modality.AUDIO,
    )
    settings = {"max_num_seqs": 8, "dtype": "float32", **changes}
    return ResolvedStage(stage=config, model_path="", process="inline", options=options, **settings)


def codes_data(codes: Any) -> StageData:
    return StageData(modality=Modality.TOKENS, tensors={"codes": np.asarray(codes)})


def some_codes(frames: int, seed: int = 0) -> np.ndarray:
    """None of them NaN."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, NOT_A_NUMBER, (frames, CODEBOOKS))


@dataclass
class Driver:
    """A leader and its rank as the replica drives them; late outputs are built in turn.

    `emissions` by request id; each costs a credit, and `window` of them are given in advance.
    """

    stage: ResolvedStage
    window: int = 1000
    rank: int = 0
    world_size: int = 1
    cancelled: set[RequestKey] = field(default_factory=set)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.scheduler = GenerationRuntime.scheduler(self.stage)
        self.scheduler._clock = lambda: self.now_s
        self.executor = GenerationRuntime.executor(self.stage, 0, 1)
        self.description = self.executor.load(lambda note, fraction: None)
        self.commands: list[Command] = []
        self.emissions: dict[str, list[Emission]] = {}
        self.credits: dict[RequestKey, int] = {}
        self.late: list[tuple[RequestIdentity, Callable[[], StageData]]] = []

    @property
    def model(self) -> Any:
        return self.executor._model

    # the execution context

    def checkpoint(self) -> frozenset[RequestKey]:
        return frozenset(self.cancelled)

    def finish_later(self, identity: RequestIdentity, work: Callable[[], StageData]) -> None:
        if identity.key not in self.cancelled:
            self.late.append((identity, work))

    # the replica

    def add(self, name: str, codes: Any, *, complete: bool = True, priority: int = 0) -> None:
        identity = RequestIdentity(request_id=name, priority=priority)
        self.credits[identity.key] = self.window
        self.scheduler.set_credits(identity.key, self.window)
        self.scheduler.add(
            StageRequest(
                identity=identity,
                data=codes_data(codes),
                params=OmniTokenSamplingParams(),
                input_complete=complete,
            )
        )

    def append(self, name: str, codes: Any, *, epoch: int = 0) -> None:
        self.scheduler.append_input(RequestIdentity(request_id=name), codes_data(codes), epoch)

    def end(self, name: str) -> None:
        self.scheduler.end_input(RequestIdentity(request_id=name), 0)

    def abort(self, name: str) -> None:
        key = (name, 0)
        self.scheduler.abort(key)
        self.executor.release(key)
        self.late = [one for one in self.late if one[0].key != key]

    def give_credits(self, name: str, count: int) -> None:
        self.credits[(name, 0)] += count
        self.scheduler.set_credits((name, 0), self.credits[(name, 0)])

    def step(self, *, deliver: bool = True) -> Command | None:
        command = self.scheduler.next_command()
        if command is None:
            return None
        self.commands.append(command)
        try:
            result = self.executor.execute(command, self)
        except Exception as error:
            self._take(self.scheduler.fail(command, as_omni_error(error)))
        else:
            self._take(self.scheduler.complete(command, [result]))
        if deliver:
            self.deliver()
        return command

    def deliver(self) -> None:
        while self.late:
            identity, work = self.late.pop(0)
            outcome: StageData | OmniError
            try:
                outcome = work()
            except Exception as error:
                outcome = as_omni_error(error)
            self._take(self.scheduler.deliver(identity, outcome))

    def run(self, limit: int = 1000) -> None:
        for _ in range(limit):
            if self.step() is None:
                return
        raise AssertionError(f"not idle after {limit} commands")

    def audio(self, name: str) -> np.ndarray:
        """All of a request's audio so far, whose pieces must join up."""
        pieces, before = [], 0
        for emission in self.emissions.get(name, []):
            assert emission.error is None
            assert emission.data is not None
            assert emission.data.modality is Modality.AUDIO
            assert emission.data.fields["num_samples_before"] == before
            pieces.append(emission.data.tensors["audio"])
            assert pieces[-1].dtype == np.float32
            before += len(pieces[-1])
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.float32)

    def finished(self, name: str) -> bool:
        return [one.final for one in self.emissions.get(name, [])][-1:] == [True]

    def _take(self, emissions: Any) -> None:
        for emission in emissions:
            identity = emission.identity
            self.emissions.setdefault(identity.request_id, []).append(emission)
            self.credits[identity.key] -= 1
            if emission.final or emission.error:
                self.executor.release(identity.key)
            else:
                self.scheduler.set_credits(identity.key, self.credits[identity.key])
