"""An executor under hand-made plans: no scheduler, one block table a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omnistage.ar.executor import TokenExecutor
from omnistage.ar.prompt import PreparedPrompt
from omnistage.ar.step import COLLECT, STEP, SequenceStart, StepOutcome, StepPlan, StepRow
from omnistage.config.pipeline import ExecutionType, StageConfig
from omnistage.config.resolved import ResolvedStage
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import Command
from omnistage.contracts.sampling import OmniTokenSamplingParams

QWEN3 = "tests.ar.tiny_models:build_qwen3"


def token_stage(token_model: str = QWEN3, *, options: Any = None, **changes: Any) -> ResolvedStage:
    stage = StageConfig(
        stage_id=0,
        name="language_model",
        execution_type=ExecutionType.LLM_AR,
        runtime="omnistage.ar.runtime:TokenRuntime",
        final_output=True,
        output_modality=Modality.TEXT,
    )
    settings = {"model_path": "", "max_num_seqs": 4, "kv_cache_gib": 0.005} | changes
    return ResolvedStage(
        stage=stage,
        process="inline",
        options={"token_model": token_model} | (options or {}),
        **settings,
    )


class Lanes:
    """An execution context that keeps late work until it is asked for."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.late: list[tuple[RequestIdentity, Callable[[], StageData], str]] = []

    def checkpoint(self) -> frozenset[RequestKey]:
        return frozenset()

    def progress(self, identity: RequestIdentity, step: int, total_steps: int) -> None:
        pass

    def operation(self, kind: str) -> None:
        pass

    def finish_later(
        self, identity: RequestIdentity, work: Callable[[], StageData], lane: str = "output"
    ) -> None:
        self.late.append((identity, work, lane))


class HandPlanned:
    """Sequences are named; each gets consecutive blocks of its own."""

    def __init__(self, executor: TokenExecutor) -> None:
        self.executor = executor
        self.context = Lanes()
        executor.load(lambda note, fraction: None)
        self.block_size = executor.execute(command("describe"), self.context).fields["block_size"]
        self._number = 0
        self._next_block = 1
        self.tokens: dict[str, list[int]] = {}

    def start(self, name: str, prompt: list[int], seed: int = 0, **params: Any) -> dict[str, Any]:
        """Fields of the first row of a sequence that computes its whole prompt."""
        values = {"temperature": 0.0} | params
        begin = SequenceStart(
            prompt=PreparedPrompt(token_ids=prompt),
            params=OmniTokenSamplingParams(**values),
            seed=seed,
        )
        self.tokens[name] = []
        return {"begin": begin, "blocks": self.new_blocks(len(prompt) + 64), "decodes": False}

    def new_blocks(self, tokens: int) -> list[int]:
        count = -(-tokens // self.block_size)
        blocks = list(range(self._next_block, self._next_block + count))
        self._next_block += count
        return blocks

    def row(
        self, name: str, start: int, count: int, samples: bool = True, **fields: Any
    ) -> StepRow:
        values: dict[str, Any] = {"decodes": True} | fields
        return StepRow(identity=child(name), start=start, count=count, samples=samples, **values)

    def step(self, *rows: StepRow) -> list[StepOutcome]:
        plan = StepPlan(number=self._number, rows=list(rows))
        self._number += 1
        return self._run(command(STEP, plan=plan))

    def collect(self) -> list[StepOutcome]:
        return self._run(command(COLLECT))

    def _run(self, what: Command) -> list[StepOutcome]:
        outcomes: list[StepOutcome] = self.executor.execute(what, self.context).fields["outcomes"]
        for outcome in outcomes:
            for (name, _), token in outcome.tokens.items():
                self.tokens[name].append(token)
        return outcomes


def child(name: str) -> RequestIdentity:
    return RequestIdentity(request_id=name)


def command(name: str, **fields: Any) -> Command:
    data = StageData(modality=Modality.TOKENS, fields=fields)
    return Command(name=name, identities=(), data=data)
