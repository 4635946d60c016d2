"""Made-up pipelines, for the choice alone: no module and no torch."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from omnistage.config.schema import STAGE_KEYS
from omnistage.memory.budget import DeviceBudget
from omnistage.memory.planning.candidates import Constraints
from omnistage.memory.planning.facts import H200, DeviceFacts
from omnistage.memory.planning.refusal import FREE_STRATEGIES, Problem
from omnistage.memory.planning.sizes import BlockSize, ComponentSize
from omnistage.memory.planning.work import PHASE_OF_PART, ComponentWork, PipelineWork

GIB = 2**30
MIB = 2**20


def facts_of(free_bytes: int, host_bytes: int = 256 * GIB, **more) -> DeviceFacts:
    return DeviceFacts(
        device=more.pop("device", "cuda:0"),
        label="a made-up GPU",
        total_bytes=free_bytes + 64 * MIB,
        free_bytes=free_bytes,
        host_free_bytes=host_bytes,
        rates=H200,
        **more,
    )


def sized(name: str, part: str, blocks_mib: list[int], rest_mib: int, mapped: bool = True):
    return ComponentSize(
        component=name,
        part=part,
        rest_bytes=rest_mib * MIB,
        blocks=tuple(
            BlockSize(path=f"blocks.{i}", image_bytes=one * MIB, resident_bytes=one * MIB)
            for i, one in enumerate(blocks_mib)
        ),
        is_mapped=mapped,
    )


def working(size: ComponentSize, activation_mib: int, block_ms: float, passes: int = 1):
    return ComponentWork(
        component=size.component,
        phase=PHASE_OF_PART[size.part],
        activation_bytes=activation_mib * MIB,
        block_s={block.path: block_ms / 1000 for block in size.blocks},
        rest_s=0.001,
        passes=passes,
    )


def problem(
    sizes, works, *, budget_bytes, facts=None, constraints=None, memory="auto", is_set=False
):
    return Problem(
        sizes={one.component: one for one in sizes},
        work=PipelineWork(components={one.component: one for one in works}, steps=20),
        facts=facts or facts_of(budget_bytes),
        constraints=constraints or Constraints(),
        budget=DeviceBudget(limit_bytes=budget_bytes, is_set=is_set),
        memory=memory,
    )


def qwen_like(budget_gib: float, memory: str = "auto", block_ms: float = 2.3, **more) -> Problem:
    """About the bytes and the times of a 20 B denoiser with a 7 B encoder, at 1024 x 1024."""
    sizes = [
        sized("transformer", "denoisers", [640] * 60, 80),
        sized("text_encoder", "encoders", [450] * 28, 3000),
        sized("vae", "autoencoders", [], 250),
    ]
    works = [
        working(sizes[0], 700, block_ms, passes=2),
        working(sizes[1], 200, 0.5, passes=2),
        working(sizes[2], 2500, 0),
    ]
    return problem(sizes, works, budget_bytes=int(budget_gib * GIB), memory=memory, **more)


@st.composite
def problems(draw, budget_mib: st.SearchStrategy[int] | None = None) -> Problem:
    lists = st.lists(st.integers(1, 40), min_size=0, max_size=6)
    sizes = [sized("transformer", "denoisers", draw(lists), draw(st.integers(1, 20)))]
    if draw(st.booleans()):
        sizes.append(sized("transformer_2", "denoisers", draw(lists), 4))
    for index in range(draw(st.integers(0, 2))):
        mapped = draw(st.booleans())
        sizes.append(sized(f"text_encoder_{index}", "encoders", draw(lists), 5, mapped))
    sizes.append(sized("vae", "autoencoders", [], draw(st.integers(1, 10))))
    works = [
        working(one, draw(st.integers(0, 50)), draw(st.floats(0.01, 5)), draw(st.integers(1, 2)))
        for one in sizes
    ]
    budgets_mib = (
        st.integers(1, 900).map(lambda less: 901 - less) if budget_mib is None else budget_mib
    )
    budget_bytes = draw(budgets_mib) * MIB
    free_bytes = max(budget_bytes, draw(st.integers(1, 600)) * MIB)
    facts = facts_of(free_bytes, draw(st.sampled_from([10_000, 10_000, 40, 1])) * MIB)
    strategies = draw(
        st.sampled_from([FREE_STRATEGIES, FREE_STRATEGIES, ("none",), ("model",), ("layerwise",)])
    )
    constraints = Constraints(
        strategies=strategies,
        resident_layers=draw(st.sampled_from([None, None, 0, 2])),
        runtime_cache=draw(st.sampled_from(["auto", "on", "off"])),
        page_lock_limit_bytes=draw(st.sampled_from([None, None, 0, 30 * MIB])),
    )
    return problem(
        sizes,
        works,
        budget_bytes=budget_bytes,
        facts=facts,
        constraints=constraints,
        memory=draw(st.sampled_from(get_args(STAGE_KEYS["memory"].type))),
        is_set=budget_bytes < free_bytes,
    )
