"""What the fast path of a stage tells of its commands."""

from __future__ import annotations

from dataclasses import dataclass, field

from omnistage.models.qwen_image.pipeline import step_options
from tests.checkpoints import checkpoint
from tests.diffusion.concurrent import ManyContext
from tests.diffusion.driver import Driver, diffusion_request


@dataclass
class NotingContext(ManyContext):
    operations: list[str] = field(default_factory=list)

    def operation(self, kind: str) -> None:
        self.operations.append(kind)


def test_a_step_that_compiles_has_the_limit_of_a_compilation(monkeypatch):
    driver = Driver(
        checkpoint("qwen_image"), step_execution=True, options=step_options("QwenImagePipeline")
    )
    fast_path = driver.executor._fast_path
    step = fast_path.family.denoise_step

    def compiling(states):
        fast_path._denoiser.on_compile()
        return step(states)

    monkeypatch.setattr(fast_path.family, "denoise_step", compiling)
    driver.scheduler.add(diffusion_request(height=32, width=32, num_inference_steps=2))
    told = []
    while command := driver.scheduler.next_command():
        context = NotingContext()
        result = driver.executor.execute(command, context)
        list(driver.scheduler.complete(command, [result]))
        told.append((command.name, context.operations))
    assert told == [("encode", []), ("step", ["compile"]), ("step", ["compile"]), ("decode", [])]
