"""Drives the denoising runtime as a replica host would, in this thread, without processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from omnistage.config.pipeline import ExecutionType, StageConfig
from omnistage.config.resolved import ResolvedStage
from omnistage.contracts.errors import OmniError
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Emission, StageRequest
from omnistage.contracts.sampling import OmniDiffusionSamplingParams
from omnistage.diffusion.runtime import DiffusionRuntime

RUNTIME = "omnistage.diffusion.runtime:DiffusionRuntime"


def diffusion_stage(model_path: Any, **changes: Any) -> ResolvedStage:
    config = StageConfig(
        stage_id=0,
        name="diffusion",
        execution_type=ExecutionType.DIFFUSION,
        runtime=RUNTIME,
        final_output=True,
        output_modality=Modality.IMAGE,
    )
    return ResolvedStage(
        stage=config,
        model_path=str(model_path),
        process="inline",
        **{"dtype": "float32", **changes},
    )


@dataclass
class RecordingContext:
    """Cancels its child at checkpoint number `cancel_at` (from 0) and notes all that it is told."""

    cancel_at: int | None = None
    on_checkpoint: Callable[[int], None] | None = None
    rank: int = 0
    world_size: int = 1
    checkpoints: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    kinds_at_checkpoints: list[str] = field(default_factory=list)
    key: RequestKey = ("req", 0)

    def checkpoint(self) -> frozenset[RequestKey]:
        number = self.checkpoints
        self.checkpoints += 1
        self.kinds_at_checkpoints.append(self.operations[-1])
        if self.on_checkpoint is not None:
            self.on_checkpoint(number)
        return frozenset({self.key}) if number == self.cancel_at else frozenset()

    def progress(self, identity: RequestIdentity, step: int, total_steps: int) -> None:
        assert identity.key == self.key
        self.steps.append((step, total_steps))

    def operation(self, kind: str) -> None:
        self.operations.append(kind)

    def finish_later(self, identity: RequestIdentity, work: Callable[[], StageData]) -> None:
        raise AssertionError("nothing is finished later on a CPU")


class Driver:
    """A leader and its one rank."""

    def __init__(self, model_path: Any, **stage_changes: Any) -> None:
        self.stage = diffusion_stage(model_path, **stage_changes)
        self.scheduler = DiffusionRuntime.scheduler(self.stage)
        self.executor = DiffusionRuntime.executor(self.stage, 0, 1)
        self.reports: list[tuple[str, float | None]] = []
        self.description = self.executor.load(lambda *report: self.reports.append(report))

    @property
    def pipeline(self) -> Any:
        return self.executor._variants.base

    def emission(
        self,
        request: StageRequest,
        context: RecordingContext | None = None,
    ) -> Emission:
        """Run one request to its end, as success, failure or cancellation."""
        context = context or RecordingContext(key=request.identity.key)
        self.scheduler.add(request)
        command = self.scheduler.next_command()
        assert command is not None
        try:
            result = self.executor.execute(command, context)
        except OmniError as error:
            (emission,) = self.scheduler.fail(command, error)
        else:
            (emission,) = self.scheduler.complete(command, [result])
        self.executor.release(request.identity.key)
        assert self.scheduler.counts() == (0, 0)
        return emission

    def run(self, request: StageRequest, context: RecordingContext | None = None) -> StageData:
        """The result; raises the request's error."""
        emission = self.emission(request, context)
        if emission.error is not None:
            raise emission.error
        assert emission.final
        assert emission.data is not None
        return emission.data


def diffusion_request(
    prompt: str | None = "a red cat",
    *,
    negative_prompt: str | None = None,
    images: tuple[Any, ...] = (),
    masks: tuple[Any, ...] = (),
    request_id: str = "req",
    priority: int = 0,
    input_complete: bool = True,
    **params: Any,
) -> StageRequest:
    """`images` and `masks` are uint8 arrays."""
    tensors = {f"image_{index}": image for index, image in enumerate(images)}
    tensors |= {f"mask_{index}": mask for index, mask in enumerate(masks)}
    return StageRequest(
        identity=RequestIdentity(request_id=request_id, priority=priority),
        data=StageData(
            modality=Modality.IMAGE if images else Modality.TEXT,
            fields={"prompt": prompt, "negative_prompt": negative_prompt},
            tensors=tensors,
        ),
        params=OmniDiffusionSamplingParams(**params),
        input_complete=input_complete,
    )
