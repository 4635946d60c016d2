"""The token runtime's executor: carries out what the scheduler plans, on one device.

With `lag` 1 the outcome of a step is read while the device computes the next.
"""

from __future__ import annotations

import pkgutil
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnistage.ar.grammar import GrammarCompiler
from omnistage.ar.limits import check_ids
from omnistage.ar.media_cache import MediaCache
from omnistage.ar.model import TokenModel
from omnistage.ar.options import TokenOptions, read_token_options
from omnistage.ar.prompt import PreparedPrompt
from omnistage.ar.step import (
    COLLECT,
    DESCRIBE,
    ENCODE,
    PREPARE,
    STEP,
    StepOutcome,
    StepPlan,
)
from omnistage.contracts.errors import (
    InternalError,
    InvalidRequestError,
    OmniError,
    UnsupportedCombinationError,
)
from omnistage.contracts.identity import RequestIdentity, RequestKey
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.runtime import (
    INPUT_LANE,
    Command,
    ExecutionContext,
    LoadReporter,
    StageRequest,
)
from omnistage.platforms.registry import platform_of

if TYPE_CHECKING:
    from omnistage.ar.assembly import Assembly
    from omnistage.ar.payloads import HostCopy
    from omnistage.ar.running import Running
    from omnistage.ar.step_runner import LiveRow, StepResult
    from omnistage.config.resolved import ResolvedStage

MEDIA_CACHE_BYTES = 1 << 30


@dataclass(slots=True, kw_only=True)
class _InFlight:
    """A step whose tokens are on their way to the host. `sampled` are its rows that sample, in the
    order of the tokens; `errors` those that failed before it."""

    number: int
    sampled: list[tuple[RequestKey, Running]]
    tokens: HostCopy | None
    errors: dict[RequestKey, OmniError]


class TokenExecutor:
    """See `Executor`. `lag` None: 1 on a GPU with `async_scheduling`, 0 on a CPU, where nothing
    would be gained."""

    def __init__(
        self, stage: ResolvedStage, rank: int, world_size: int, *, lag: int | None = None
    ) -> None:
        if world_size > 1:
            raise UnsupportedCombinationError(
                f"a token stage of {world_size} ranks is not there yet; use one device"
            )
        self._stage = stage
        self._options: TokenOptions = read_token_options(stage)
        self._device = stage.devices[rank]
        overlaps = self._device != "cpu" and self._options.async_scheduling
        self._lag = int(overlaps) if lag is None else lag
        self._media = MediaCache(MEDIA_CACHE_BYTES)
        self._in_flight: deque[_InFlight] = deque()
        self._parts: Assembly | None = None
        self._grammars: GrammarCompiler | None = None
        self._steps = self._tokens = 0

    def load(self, report: LoadReporter) -> dict[str, Any]:
        """Build the model by its factory, pass it through the gate, size the cache.

        Raises `UnsupportedCombinationError` for a model that the gate refuses, `ConfigurationError`
        for settings that do not fit.
        """
        from omnistage.ar.assembly import assemble
        from omnistage.attention.paged import register

        register()
        platform_of(self._device).adopt_stream(self._device, urgent=not self._options.entry)
        factory = pkgutil.resolve_name(self._options.token_model)
        model: TokenModel = factory(self._stage, self._device, report)
        self._parts = assemble(model, self._options, self._device, report)
        self._grammars = GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_token_ids)
        plan = self._parts.cache.plan
        return {
            "model_class": type(model.module).__name__,
            "device": self._device,
            "dtype": str(self._parts.dtype).removeprefix("torch."),
            "max_model_len": plan.max_model_len,
            "kv_cache_tokens": (plan.num_blocks - 1) * plan.block_size,
            "kv_cache_bytes": plan.total_bytes,
            "block_size": plan.block_size,
            "max_num_seqs": self._options.max_num_seqs,
            **self._parts.notes,
        }

    def execute(self, command: Command, context: ExecutionContext) -> StageData:
        """See `omnistage.ar.step` for the commands."""
        import torch

        fields = command.data.fields
        with torch.inference_mode():
            if command.name == STEP:
                return self._outcomes(self._step(fields["plan"], context))
            if command.name == COLLECT:
                return self._outcomes(self._collect(0))
            if command.name == PREPARE:
                return self._prepare(fields["requests"], context)
            if command.name == ENCODE:
                return self._encode(fields["identity"], fields["prompt"])
            if command.name == DESCRIBE:
                return self._describe()
        raise InternalError(f"a token executor cannot {command.name!r}")

    def release(self, key: RequestKey) -> None:
        import torch

        if self._parts is not None:
            with torch.inference_mode():
                self._parts.sequences.release(key)

    def control(self, method: str, arguments: dict[str, Any]) -> Any:
        """Methods "tokenize" (a request's fields), "detokenize" ("tokens"), "executor_holds" (how
        many sequences), "executor_stats"."""
        model = self._loaded.model
        if method == "executor_holds":
            return len(self._loaded.sequences)
        if method == "tokenize":
            return self._tokenize(arguments)
        if method == "detokenize":
            if model.tokenizer is None:
                raise InvalidRequestError("this stage has no tokenizer")
            check_ids("tokens", arguments["tokens"], model.vocab_size)
            return {"prompt": model.tokenizer.decode(arguments["tokens"])}
        if method == "executor_stats":
            return {
                **self._loaded.clock.describe(),
                **self._loaded.describe_graphs(),
                "running_sequences": len(self._loaded.sequences),
                "steps": self._steps,
                "tokens": self._tokens,
                "media_cache_bytes": self._media.total_bytes,
                "media_cache_items": len(self._media),
                "kv_cache_bytes": self._loaded.cache.plan.total_bytes,
            }
        raise InvalidRequestError(f"a token stage has no control call {method!r}")

    def held_sequences(self) -> list[RequestKey]:
        """The sequences that have a row of device state."""
        return [] if self._parts is None else self._parts.sequences.keys()

    def close(self) -> None:
        self._in_flight.clear()
        self._media.clear()
        if self._parts is not None and self._parts.graphs is not None:
            self._parts.graphs.close()
        self._parts = self._grammars = None

    # commands ---------------------------------------------------------------------------------

    @property
    def _loaded(self) -> Assembly:
        if self._parts is None:
            raise InternalError("this token executor is not loaded")
        return self._parts

    def _describe(self) -> StageData:
        model, plan = self._loaded.model, self._loaded.cache.plan
        return StageData(
            modality=Modality.TOKENS,
            fields={
                "tokenizer": model.tokenizer,
                "eos_token_ids": model.eos_token_ids,
                "vocab_size": model.vocab_size,
                "num_blocks": plan.num_blocks,
                "block_size": plan.block_size,
                "max_model_len": plan.max_model_len,
                "lag": self._lag,
            },
        )

    def _prepare(self, requests: Sequence[StageRequest], context: ExecutionContext) -> StageData:
        for request in requests:
            context.finish_later(
                request.identity, lambda request=request: self._prepared(request), lane=INPUT_LANE
            )
        return StageData(modality=Modality.TOKENS)

    def _prepared(self, request: StageRequest) -> StageData:
        """Runs in the input thread."""
        import torch

        parts, grammars = self._parts, self._grammars
        if parts is None or grammars is None:
            raise InternalError("this token executor was closed")
        with torch.inference_mode():
            fields: dict[str, Any] = {"prompt": parts.model.prepare(request.data, request.params)}
        if request.params.structured is not None:
            if parts.model.tokenizer is None:
                raise InvalidRequestError("structured output needs a stage with a tokenizer")
            fields["grammar"] = grammars.compile(request.params.structured)
        return StageData(modality=Modality.TOKENS, fields=fields)

    def _encode(self, identity: RequestIdentity, prompt: PreparedPrompt) -> StageData:
        found = {i: self._media.get(item.digest) for i, item in enumerate(prompt.media)}
        missing = [i for i, result in found.items() if result is None]
        if missing:
            results = self._loaded.model.encode([prompt.media[i] for i in missing])
            for index, result in zip(missing, results, strict=True):
                found[index] = result
                self._media.put(prompt.media[index].digest, result)
        self._loaded.sequences.keep_media(identity.key, found)
        return StageData(modality=Modality.TOKENS, fields={"encoded": len(missing)})

    def _step(self, plan: StepPlan, context: ExecutionContext) -> list[StepOutcome]:
        try:
            self._start(plan, context)
            return self._collect(self._lag)
        except BaseException:
            self._in_flight.clear()
            raise

    def _start(self, plan: StepPlan, context: ExecutionContext) -> None:
        from omnistage.ar.outcomes import host_part
        from omnistage.ar.payloads import send_payloads

        errors: dict[RequestKey, OmniError] = {}
        rows: list[LiveRow] = []
        for row in plan.rows:
            try:
                rows.append((row, self._loaded.sequences.take_in(row)))
            except OmniError as error:
                errors[row.identity.key] = error
        result = self._run(rows) if rows else None
        sampled = [(row.identity.key, live) for row, live in rows if row.samples]
        tokens = None if result is None else self._loaded.copier.at_once(host_part(result))
        send_payloads(self._loaded, self._options.output_modality, rows, result, context)
        self._in_flight.append(
            _InFlight(number=plan.number, sampled=sampled, tokens=tokens, errors=errors)
        )
        self._steps += 1

    def _run(self, rows: list[LiveRow]) -> StepResult | None:
        """Timed on the device. Without a lag every step begins when its predecessor was read."""
        clock = self._loaded.clock
        began, follows = clock.begin(), bool(self._in_flight) or self._lag == 0
        result = self._loaded.runner.run(rows)
        clock.end(began, follows=follows)
        return result

    def _collect(self, keep: int) -> list[StepOutcome]:
        """The outcomes of all steps in flight but the last `keep`."""
        outcomes = []
        while len(self._in_flight) > keep:
            outcomes.append(self._read(self._in_flight.popleft()))
        return outcomes

    def _read(self, step: _InFlight) -> StepOutcome:
        from omnistage.ar.outcomes import read_outcome

        outcome = StepOutcome(number=step.number, errors=step.errors)
        if step.tokens is not None:
            read_outcome(outcome, step.sampled, step.tokens.wait())
        self._tokens += len(outcome.tokens)
        return outcome

    def _tokenize(self, arguments: dict[str, Any]) -> dict[str, Any]:
        from omnistage.contracts.sampling import OmniTokenSamplingParams

        model = self._loaded.model
        if model.tokenizer is None:
            raise InvalidRequestError("this stage has no tokenizer")
        data = StageData(modality=Modality.TEXT, fields=arguments)
        tokens = model.prepare(data, OmniTokenSamplingParams()).token_ids
        return {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": self._loaded.cache.plan.max_model_len,
            "token_strs": model.tokenizer.convert_ids_to_tokens(tokens),
        }

    @staticmethod
    def _outcomes(outcomes: list[StepOutcome]) -> StageData:
        return StageData(modality=Modality.TOKENS, fields={"outcomes": outcomes})
