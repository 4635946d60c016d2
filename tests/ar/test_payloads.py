"""Late payloads: what later stages get is what each position computed, whatever runs meanwhile."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from omnistage.ar.causal_lm import CausalLM
from omnistage.ar.executor import TokenExecutor
from omnistage.ar.model import ModelBatch, ModelOutput, RunningSequence
from omnistage.ar.payloads import HostCopy, RowPayload
from omnistage.contracts.modalities import Modality
from tests.ar.hand_plans import HandPlanned, token_stage
from tests.ar.real_executor import real_driver
from tests.ar.tiny_models import COMMON, paged, qwen3

WIDTH = COMMON["hidden_size"]
MODEL = "tests.ar.test_payloads:build"
FEEDS = {"feeds_stages": True, "emits_payload": True}
NEW_TOKENS = 24


class Telling(CausalLM):
    """Keeps every position's hidden state; tells those of the prompt, then one a decode step."""

    def __init__(self) -> None:
        super().__init__(paged(qwen3()), tokenizer=None)
        self.states = {"hidden": ((WIDTH,), torch.float32)}
        self._by_row = torch.zeros(17, WIDTH)

    def forward(self, embeds, batch: ModelBatch, arguments) -> ModelOutput:
        hidden = super().forward(embeds, batch, arguments).hidden
        return ModelOutput(hidden=hidden, states={"hidden": hidden})

    def sampled(self, rows, hidden, tokens) -> None:
        self._by_row[rows] = hidden

    def step_payload(self, rows) -> dict[str, torch.Tensor]:
        return {"hidden": self._by_row[rows]}

    def prompt_payload(self, sequence: RunningSequence, states) -> dict[str, torch.Tensor]:
        return {"hidden": states["hidden"]}


def build(stage, device, report) -> Telling:
    return Telling()


@torch.no_grad()
def expected_hidden(ids: list[int]) -> torch.Tensor:
    return qwen3().model(torch.tensor([ids])).last_hidden_state[0]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    base = torch.randint(3, 256, (40,), generator=generator).tolist()
    return [base[:20], [*base[:17], 7], base[:9], [*base[:13], 5]]


@pytest.mark.invariant("AR-INV-204")
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("blocks", [200, 15], ids=["roomy", "preempting"])
def test_payloads_hold_every_position_once(lag, caching, blocks):
    """Also those that came from the prefix cache, and those that were computed twice."""
    token_bytes = 3 * 2 * 2 * 16 * 4 + WIDTH * 4
    stage = token_stage(
        MODEL,
        options=FEEDS,
        enable_prefix_caching=caching,
        block_size=4,
        max_model_len=50,
        max_num_batched_tokens=16,
        kv_cache_gib=(blocks + 0.5) * 4 * token_bytes / (1 << 30),
    )
    driver = real_driver(stage, lag=lag)
    wanted = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "min_tokens": NEW_TOKENS}
    heard = [driver.add(str(i), ids, **wanted) for i, ids in enumerate(prompts())]
    driver.run()
    assert (driver.executor.restarts > 0) == (blocks == 15)
    for ids, one in zip(prompts(), heard, strict=True):
        assert one.error is None
        assert len(one.token_ids) == NEW_TOKENS
        parts = [e.data.tensors["hidden"] for e in one.emissions if e.data.tensors]
        found = torch.cat(parts)
        expected = expected_hidden([*ids, *one.token_ids[:-1]])
        assert expected.abs().mean() > 0.1
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.invariant("AR-INV-204")
def test_tokens_and_payloads_are_bitwise_the_same_built_at_once_or_behind():
    def run(behind: bool) -> tuple[list[int], list[torch.Tensor]]:
        executor = TokenExecutor(token_stage(MODEL, options=FEEDS), 0, 1, lag=int(behind))
        planned = HandPlanned(executor)
        ids = prompts()[0]
        built, waiting = [], []
        first = planned.start("a", ids)
        rows = [planned.row("a", 0, len(ids), wants_payload=True, **first)]
        rows += [planned.row("a", len(ids) + i, 1, wants_payload=True) for i in range(NEW_TOKENS)]
        for row in rows:
            planned.step(row)
            waiting += [work for _, work, _ in planned.context.late]
            planned.context.late.clear()
            if not behind:
                built += [work() for work in waiting]
                waiting.clear()
        planned.collect()
        built += [work() for work in waiting]
        return planned.tokens["a"], [data.tensors["hidden"] for data in built]

    now, later = run(behind=False), run(behind=True)
    assert now[0] == later[0]
    assert [len(part) for part in now[1]] == [20] + [1] * NEW_TOKENS
    assert all(torch.equal(a, b) for a, b in zip(now[1], later[1], strict=True))


class FailedCopy:
    def synchronize(self) -> None:
        raise RuntimeError("the copy failed")


@pytest.mark.invariant("AR-INV-204")
@pytest.mark.parametrize("where", ["in the step", "behind it"])
def test_a_builder_that_fails_fails_its_request_only(where, monkeypatch):
    driver = real_driver(token_stage(MODEL, options=FEEDS))
    assembly = driver.executor.inner._loaded
    tell, copy = assembly.model.prompt_payload, assembly.copier.behind
    unlucky = len(prompts()[1])

    def broken_payload(sequence, states):
        if len(sequence.token_ids) == unlucky:
            raise RuntimeError("no payload")
        return tell(sequence, states)

    def broken_copy(snapshots):
        fails = len(snapshots["hidden"]) == unlucky
        return HostCopy(snapshots, FailedCopy()) if fails else copy(snapshots)

    if where == "in the step":
        monkeypatch.setattr(assembly.model, "prompt_payload", broken_payload)
    else:
        monkeypatch.setattr(assembly.copier, "behind", broken_copy)
    wanted = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "min_tokens": NEW_TOKENS}
    heard = [driver.add(str(i), ids, **wanted) for i, ids in enumerate(prompts())]
    driver.run()
    assert [one.error is not None for one in heard] == [False, True, False, False]
    driver.assert_nothing_held()


def test_parts_of_the_same_name_are_joined_and_own_their_memory():
    step = torch.arange(12.0).view(4, 3)
    make = partial(RowPayload, Modality.TOKENS, HostCopy({"x": torch.zeros(2, 3)}, None))
    data = make(HostCopy({"x": step}, None), 2)()
    assert data.tensors["x"].tolist() == [[0, 0, 0], [0, 0, 0], [6, 7, 8]]
    alone = RowPayload(Modality.TOKENS, None, HostCopy({"x": step}, None), 1)()
    step.zero_()
    assert alone.tensors["x"].tolist() == [[3, 4, 5]]
