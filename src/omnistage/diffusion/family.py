"""What a model family offers to be run step by step and in batches.

A family knows how its pipeline encodes prompts, what its denoiser takes, and how its latents become
pictures; it uses the pipeline's own methods for all of that. Everything else, the loop included, is
the runtime's. Parity with the pipeline's own call is the family's test.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from omnistage.contracts.errors import InvalidRequestError
from omnistage.contracts.identity import RequestIdentity
from omnistage.diffusion.inputs import DiffusionInputs

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from PIL.Image import Image

MAX_BATCHES = 8
"""Compositions whose unchanging inputs are kept."""

Condition = dict[str, Any]
"""One encoded prompt: tensors by name, each with a leading dimension of 1."""


@dataclass(slots=True, kw_only=True)
class StepRequestState:
    """All that one request keeps between commands. `arguments` are those of the pipeline's call,
    its defaults filled in; `branches` its guidance branches, the conditional one first.

    `latents` has one row an output: (outputs, …). `forward_key` must be equal for requests that
    share a forward. `clean` is the predicted clean latent after the last step, when it was asked
    for.
    """

    identity: RequestIdentity
    inputs: DiffusionInputs
    arguments: dict[str, Any]
    generator: torch.Generator
    branches: tuple[Condition, ...] = ()
    latents: torch.Tensor = None  # type: ignore[assignment]
    scheduler: Any = None
    timesteps: torch.Tensor = None  # type: ignore[assignment]
    forward_key: tuple[Any, ...] = ()
    step_index: int = 0
    clean: torch.Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    timings_s: dict[str, float] = field(default_factory=dict)

    @property
    def total_steps(self) -> int:
        return len(self.timesteps)

    @property
    def num_outputs(self) -> int:
        return int(self.latents.shape[0])

    @property
    def pictures(self) -> tuple[Image, ...]:
        return self.inputs.images


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a denoising batch: one output of one request under one of its conditions."""

    state: StepRequestState
    condition: Condition
    output: int


class StepFamily(ABC):
    """Subclassed by `models/<family>/`. One instance serves one loaded pipeline.

    `accepted` are the call's arguments that the family handles besides those of every family; a
    request that sets another is refused. `denoiser` computes `module(**inputs)[0]`.
    """

    accepted: ClassVar[frozenset[str]] = frozenset()
    common: ClassVar[frozenset[str]] = frozenset(
        {
            "prompt",
            "negative_prompt",
            "height",
            "width",
            "num_inference_steps",
            "sigmas",
            "latents",
            "num_images_per_prompt",
            "max_sequence_length",
        }
    )

    def __init__(
        self, pipeline: DiffusionPipeline, denoiser: Callable[..., torch.Tensor] | None = None
    ) -> None:
        self.pipeline: Any = pipeline
        self.denoiser = denoiser or _plain_call(self.module)
        self.in_one_batch = True
        self.joins_lengths = True
        """Whether rows may share a forward whose conditions differ in length."""
        self._batches: dict[tuple[Any, ...], dict[str, Any]] = {}

    @property
    def module(self) -> Any:
        """The denoiser."""
        return self.pipeline.transformer

    @property
    def known_arguments(self) -> frozenset[str]:
        return self.accepted | self.common

    # what a family says ------------------------------------------------------------------------

    def install(self, *, fuse: bool) -> list[Callable[[], None]]:
        """Change the denoiser where batches need it, and where `fuse` allows for speed; returns
        what undoes it, last change last."""
        return []

    @abstractmethod
    def check(self, state: StepRequestState) -> None:
        """Fill height and width and let the pipeline check its inputs (`ValueError`)."""

    @abstractmethod
    def conditions(self, state: StepRequestState) -> list[dict[str, Any]]:
        """What has to be encoded for each guidance branch, the conditional one first: arguments of
        `encode`. Equal ones are encoded once."""

    @abstractmethod
    def encode(self, prompts: Sequence[dict[str, Any]]) -> list[Condition]:
        """Encode several prompts at once, each given by what `conditions` said of it."""

    @abstractmethod
    def prepare(self, state: StepRequestState) -> None:
        """Set `latents`, `scheduler`, `timesteps` and `forward_key` as the pipeline's call does."""

    @abstractmethod
    def static_inputs(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Inputs of the denoiser that no step changes."""

    @abstractmethod
    def moving_inputs(self, latents: torch.Tensor, timesteps: torch.Tensor) -> dict[str, Any]:
        """Inputs that every step changes, for latents (rows, …) and timesteps (rows,)."""

    @abstractmethod
    def guide(self, state: StepRequestState, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Combine the branches' predictions, (outputs, …) each, into one."""

    @abstractmethod
    def decode(self, latents: torch.Tensor, states: Sequence[StepRequestState]) -> torch.Tensor:
        """Pictures (rows, 3, height, width) in [-1, 1] of equally shaped latents."""

    # the four operations -----------------------------------------------------------------------

    def prepare_encode(self, states: Sequence[StepRequestState]) -> None:
        """Encode the prompts of checked requests together."""
        wanted = [self.conditions(state) for state in states]
        distinct: list[dict[str, Any]] = []
        for condition in (one for conditions in wanted for one in conditions):
            if condition not in distinct:
                distinct.append(condition)
        encoded = self.encode(distinct)
        for state, conditions in zip(states, wanted, strict=True):
            state.branches = tuple(encoded[distinct.index(one)] for one in conditions)

    def denoise_step(self, states: Sequence[StepRequestState]) -> list[torch.Tensor]:
        """Each request's guided prediction, from one forward for all requests and branches, or
        one for each branch."""
        branches = max(len(state.branches) for state in states)
        passes = (
            [range(branches)] if self.in_one_batch else [[branch] for branch in range(branches)]
        )
        predicted: dict[tuple[int, int], torch.Tensor] = {}
        for chosen in passes:
            parts = sorted(
                (
                    (index, branch)
                    for index, state in enumerate(states)
                    for branch in chosen
                    if branch < len(state.branches)
                ),
                key=lambda part: _lengths(states[part[0]].branches[part[1]]),
            )
            for together in self._forwards(states, parts):
                outputs = self._forward([(states[index], branch) for index, branch in together])
                predicted |= dict(zip(together, outputs, strict=True))
        return [
            self.guide(state, [predicted[index, branch] for branch in range(len(state.branches))])
            for index, state in enumerate(states)
        ]

    def _forwards(
        self, states: Sequence[StepRequestState], parts: Sequence[tuple[int, int]]
    ) -> list[list[tuple[int, int]]]:
        """`parts`, (index, branch) sorted by length, as those that may share a forward."""
        if self.joins_lengths:
            return [list(parts)] if parts else []

        def lengths(part: tuple[int, int]) -> tuple[int, ...]:
            return _lengths(states[part[0]].branches[part[1]])

        return [list(group) for _, group in itertools.groupby(parts, lengths)]

    def _forward(self, parts: Sequence[tuple[StepRequestState, int]]) -> Sequence[torch.Tensor]:
        """The prediction of each (request, branch)."""
        import torch

        latents = torch.cat([self.model_latents(state) for state, _ in parts])
        timesteps = torch.cat([_timestep(state) for state, _ in parts])
        moving = self.moving_inputs(latents, timesteps)
        predicted = self.denoiser(**self._static(parts), **moving)
        return predicted.split([state.num_outputs for state, _ in parts])

    def pass_once(self, state: StepRequestState) -> None:
        """One pass of the denoiser, on behalf of a request that is not moved by it."""
        self._forward([(state, 0)])

    def step_scheduler(self, state: StepRequestState, prediction: torch.Tensor) -> None:
        """Move a request one step on: the only place where its latents and its index change."""
        timestep = state.timesteps[state.step_index]
        (state.latents,) = state.scheduler.step(
            prediction, timestep, state.latents, return_dict=False
        )
        state.step_index += 1

    def predict_clean(self, state: StepRequestState, prediction: torch.Tensor) -> torch.Tensor:
        """The clean latent that a flow prediction points at: x - sigma v (call it before the
        step)."""
        sigma = state.scheduler.sigmas[state.step_index]
        return (state.latents.float() - sigma * prediction.float()).to(state.latents.dtype)

    def post_decode(
        self, states: Sequence[StepRequestState], latents: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Each request's pictures (outputs, 3, height, width) in [-1, 1]."""
        import torch

        pictures = self.decode(torch.cat(list(latents)), states)
        return list(pictures.split([len(one) for one in latents]))

    # helpers -----------------------------------------------------------------------------------

    def refuse_unknown(self, given: Sequence[str]) -> None:
        """Raises `InvalidRequestError` for an argument that the family does not handle by steps."""
        for name in given:
            if name not in self.known_arguments:
                raise InvalidRequestError(
                    f"{type(self.pipeline).__name__} does not take {name} in step mode, only "
                    f"{', '.join(sorted(self.known_arguments))}; in request mode it takes all",
                    param=name,
                )

    def model_latents(self, state: StepRequestState) -> torch.Tensor:
        """What the denoiser sees of a request: its latents, unless the family adds to them."""
        return state.latents

    def own_scheduler(self, state: StepRequestState) -> Any:
        """A scheduler of the request's own, like the pipeline's or as the request wants it."""
        return copy.deepcopy(state.extra.get("scheduler", self.pipeline.scheduler))

    def _static(self, parts: Sequence[tuple[StepRequestState, int]]) -> dict[str, Any]:
        """Built anew only when the composition of the batch changes."""
        composition = tuple((state.identity.key, branch) for state, branch in parts)
        if composition not in self._batches:
            while len(self._batches) >= MAX_BATCHES:
                self._batches.pop(next(iter(self._batches)))
            rows = [
                Row(state, state.branches[branch], output)
                for state, branch in parts
                for output in range(state.num_outputs)
            ]
            self._batches[composition] = self.static_inputs(rows)
        return self._batches[composition]

    def forget_batches(self) -> None:
        """Let go of the tensors of past batches: somebody has left."""
        self._batches.clear()


def _lengths(condition: Condition) -> tuple[int, ...]:
    """Rows of equal lengths stand side by side in a batch: attention takes them in one call."""
    return tuple(tensor.shape[1] for tensor in condition.values() if tensor.ndim > 2)


def _timestep(state: StepRequestState) -> torch.Tensor:
    return state.timesteps[state.step_index].expand(state.num_outputs)


def _plain_call(module: Any) -> Callable[..., torch.Tensor]:
    def call(**inputs: Any) -> torch.Tensor:
        output: torch.Tensor = module(**inputs, return_dict=False)[0]
        return output

    return call


def stack_rows(rows: Sequence[Row], name: str) -> torch.Tensor:
    """One condition tensor of all rows, (rows, …), padded with zeros along its first own dimension
    to the longest."""
    import torch

    tensors = [row.condition[name] for row in rows]
    if tensors[0].ndim < 3:
        return torch.cat(tensors)
    longest = max(one.shape[1] for one in tensors)
    return torch.cat([_padded(one, longest) for one in tensors])


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """(1, n, …) to (1, length, …)."""
    import torch

    missing = length - tensor.shape[1]
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(1, missing, *tensor.shape[2:])], dim=1)
