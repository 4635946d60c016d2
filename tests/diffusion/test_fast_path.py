"""What the fast path of a stage does at its start, and tells of its commands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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


def test_a_start_on_a_card_warms_up_each_size_and_says_so(monkeypatch):
    """Played on a CPU, where nothing is compiled."""
    driver = Driver(
        checkpoint("qwen_image"), step_execution=True, options=step_options("QwenImagePipeline")
    )
    fast_path, steps, reports, seen = driver.executor._fast_path, driver.executor._steps, [], []
    check = fast_path.family.check

    def note(state):
        check(state)
        seen.append((state.arguments["width"], state.arguments["height"]))

    monkeypatch.setattr(fast_path.family, "check", note)
    options = replace(fast_path._options, warmup_sizes=("64x32", "32x32"))
    monkeypatch.setattr(fast_path, "_options", options)
    fast_path.warm_up(steps, None, lambda *report: reports.append(report))
    assert reports == []
    monkeypatch.setattr(fast_path, "_on_gpu", True)
    fast_path.warm_up(steps, None, lambda *report: reports.append(report))
    assert seen == [(64, 32)] * 3 + [(32, 32)] * 3
    assert [text.partition(" in ")[0] for text, _ in reports] == [
        "compiling for 64x32",
        "compiled 0 block variants",
        "compiling for 32x32",
        "compiled 0 block variants",
    ]
    assert [fraction for _, fraction in reports] == [0, 0, 0.5, 0.5]
    assert steps.num_states == 0
