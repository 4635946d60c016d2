"""From checkpoints to placements: what is predicted is what loader and backend then do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from omnistage.contracts.errors import ConfigurationError, UnsupportedCombinationError
from omnistage.engine.configure import configure
from omnistage.memory.offload.discovery import OffloadPlan
from omnistage.memory.offload.factory import make_backend
from omnistage.memory.offload.host import HostBacking
from omnistage.memory.pipeline_loader import load_pipeline
from omnistage.memory.placement import Residency
from omnistage.memory.planning.describe import describe_placement, placement_data
from omnistage.memory.planning.on_device import place_on_device
from omnistage.memory.planning.place import plan_placement
from omnistage.memory.planning.shape import RequestShape
from omnistage.memory.planning.survey import survey_pipeline
from omnistage.memory.planning.work import PHASES
from tests.checkpoints import checkpoint
from tests.memory.offload.fake_device import late_device
from tests.memory.planning.modules import planned
from tests.memory.planning.problems import GIB, MIB, facts_of

SHAPE = RequestShape(height=64, width=64, steps=4)


def stage_of(family: str, **changes):
    (stage,) = configure(str(checkpoint(family)), device="cpu").stages
    return replace(stage, **changes)


def placed(family: str, *, free_bytes: int = GIB, shape: RequestShape = SHAPE, **changes):
    return plan_placement(planned(family), stage_of(family, **changes), facts_of(free_bytes), shape)


@pytest.fixture(scope="module")
def surveyed():
    return survey_pipeline(planned("qwen_image"), stage_of("qwen_image"), SHAPE)


@pytest.mark.invariant("PLAN-INV-002")
@pytest.mark.parametrize("memory", ["auto", "speed", "balanced"])
def test_over_many_budgets_more_is_never_slower(surveyed, memory):
    stage = stage_of("qwen_image", memory=memory)
    steps_s, fits = [], []
    for budget_kib in range(600, 3000, 40):
        budget = replace(stage, memory_budget_gib=budget_kib / 2**20)
        try:
            made = plan_placement(planned_once(), budget, facts_of(GIB), SHAPE, survey=surveyed)
        except ConfigurationError:
            fits.append(False)
            continue
        fits.append(True)
        steps_s.append(made.prediction.step_s)
        assert made.prediction.device_peak_bytes <= budget_kib * 1024
    assert fits == sorted(fits)
    assert True in fits
    assert False in fits
    assert all(later <= sooner * (1 + 1e-5) for sooner, later in pairwise(steps_s))


def planned_once(cache: dict = {}):  # noqa: B006
    return cache.setdefault("plan", planned("qwen_image"))


@pytest.mark.invariant("PLAN-INV-005")
@pytest.mark.parametrize("family", ["qwen_image", "flux", "sd3", "sd15"])
def test_the_loader_and_the_backend_find_what_was_predicted(family):
    with late_device() as platform:
        placement = placed(family, offload="layerwise", memory="minimal")
        loaded = load_pipeline(planned(family), placement=placement)
        backend = make_backend(placement, loaded.host_weights, platform, "cpu")
        backend.enable(loaded.pipeline)
        try:
            found = backend.describe()
            images = {
                name: [block.nbytes for block in weights.blocks.values()]
                for name, weights in loaded.host_weights.items()
            }
            locked_bytes = platform.locked_bytes
        finally:
            backend.disable()
    streamed = {name: one for name, one in placement.components.items() if one.streamed_blocks}
    assert found["slot_bytes"] == max(one.block_bytes for one in streamed.values())
    for name, one in streamed.items():
        assert sum(images[name]) == one.streamed_bytes, name
        assert found["components"][name]["streamed_blocks"] == len(one.streamed_blocks)
    pages_bytes = 2 * 4096 * sum(len(one.streamed_blocks) for one in streamed.values())
    assert abs(locked_bytes - placement.prediction.locked_bytes) <= pages_bytes


@pytest.mark.invariant("PLAN-INV-005")
def test_weights_are_those_of_the_plan():
    plan, placement = planned("qwen_image"), placed("qwen_image")
    assert placement.strategy == "none"
    for name, one in placement.components.items():
        tensors = [source for source in plan.modules[name].sources.values() if source.nbytes]
        rounded = sum(-(-source.nbytes // 512) * 512 for source in tensors)
        assert one.weight_bytes == rounded, name


def test_a_component_that_ties_its_weights_is_counted_once():
    plan = planned("flux")
    encoder = plan.modules["text_encoder_2"]
    assert any(source.tied_to for source in encoder.sources.values())
    placement = placed("flux")
    assert placement.components["text_encoder_2"].weight_bytes < 1.2 * encoder.total_bytes


@pytest.mark.invariant("PLAN-INV-006")
@pytest.mark.parametrize("family", ["sana", "kandinsky3"])
def test_an_unknown_class_is_said_to_be_unknown(family):
    placement = placed(family, free_bytes=8 * GIB)
    assert placement.prediction.step_s is None
    assert any("is unknown to the planner" in reason for reason in placement.reasons)
    assert "a denoising step: unknown" in describe_placement(placement)


def test_a_vision_tower_that_a_prompt_does_not_use_is_said_so():
    reasons = placed("qwen_image", offload="layerwise", memory="minimal").reasons
    assert any("text_encoder: 2 of its blocks do not run for a prompt" in one for one in reasons)


def test_what_is_copied_every_step_is_locked_first():
    assert next(iter(placed("sd3").components)) == "transformer"


@pytest.mark.invariant("PLAN-INV-003")
def test_refusals_before_anything_is_loaded():
    with pytest.raises(ConfigurationError, match=r"nearest that works: memory_budget_gib 0\.05"):
        placed("qwen_image", memory_budget_gib=0.0001)
    with pytest.raises(UnsupportedCombinationError, match="dlo_resident_layers left out"):
        placed("qwen_image", offload="none", dlo_resident_layers=3)
    facts = facts_of(GIB, offload_unavailable_reason="a CPU has one memory")
    with pytest.raises(UnsupportedCombinationError, match="a CPU has one memory"):
        plan_placement(
            planned("qwen_image"), stage_of("qwen_image", offload="layerwise"), facts, SHAPE
        )
    made = plan_placement(planned("qwen_image"), stage_of("qwen_image"), facts, SHAPE)
    assert made.strategy == "none"
    tight = replace(stage_of("qwen_image"), memory_budget_gib=0.0001)
    with pytest.raises(ConfigurationError, match="nearest that works: memory_budget_gib"):
        plan_placement(planned("qwen_image"), tight, facts, SHAPE)


def test_model_level_swaps_encoders_and_denoisers():
    placement = placed("sd3", offload="model")
    swapped = {
        name for name, one in placement.components.items() if one.residency is Residency.SWAPPED
    }
    assert swapped == {"transformer", "text_encoder", "text_encoder_2", "text_encoder_3"}
    assert placement.components["vae"].residency is Residency.RESIDENT
    assert placement.prediction.host_bytes > 0


def test_streamed_blocks_of_a_cast_checkpoint_come_from_the_cache():
    plan = planned("qwen_image", dtype="bfloat16", device="cuda:0")
    stage = stage_of("qwen_image", offload="layerwise", memory="minimal")
    cast = plan_placement(plan, stage, facts_of(GIB), SHAPE)
    assert cast.backing is HostBacking.RUNTIME_CACHE
    without = replace(stage, dlo_runtime_cache="off")
    private = plan_placement(plan, without, facts_of(GIB), SHAPE)
    assert private.backing is HostBacking.PRIVATE
    assert private.prediction.host_bytes >= sum(
        one.streamed_bytes for one in private.components.values()
    )
    mapped = placed("qwen_image", offload="layerwise", memory="minimal")
    assert mapped.backing is HostBacking.CHECKPOINT
    assert mapped.prediction.host_bytes == 0


def test_step_mode_passes_over_the_weights_once():
    two = placed("qwen_image", offload="layerwise", memory="minimal")
    one = placed("qwen_image", offload="layerwise", memory="minimal", step_execution=True)
    assert one.prediction.step_s < two.prediction.step_s
    assert one.prediction.phases_bytes["denoise"] > two.prediction.phases_bytes["denoise"]


def test_quantized_blocks_are_half_the_bytes():
    from omnistage.memory.planning.quantizing import transforms_of

    stage = stage_of("flux", offload="layerwise", memory="minimal", quantization_config="fp8")
    plan = planned("flux", dtype="bfloat16", device="cuda:0")
    facts = facts_of(GIB)
    transforms = transforms_of(plan, stage, facts)
    assert "transformer" in transforms
    half = plan_placement(plan, stage, facts, SHAPE, transforms=transforms)
    whole = plan_placement(planned("flux", dtype="bfloat16", device="cuda:0"), stage, facts, SHAPE)
    ratio = (
        half.components["transformer"].streamed_bytes
        / whole.components["transformer"].streamed_bytes
    )
    assert ratio < 0.9
    assert half.backing is HostBacking.RUNTIME_CACHE


def test_a_description_says_everything():
    placement = placed("qwen_image", offload="layerwise", memory="minimal")
    text, data = describe_placement(placement), placement_data(placement)
    for name in placement.components:
        assert f"  {name}: " in text
    for words in ("streamed: 2 blocks", "page-locked", "a denoising step: ", "link 51.7 GiB/s"):
        assert words in text
    assert text.startswith("offload layerwise (asked for)")
    assert set(data["prediction"]["phases_bytes"]) == set(PHASES)
    assert data["components"]["transformer"]["streamed_blocks"] == [
        "transformer_blocks.0",
        "transformer_blocks.1",
    ]


def test_a_larger_budget_than_the_device_makes_no_memory():
    made = placed("qwen_image", free_bytes=2 * MIB, memory_budget_gib=40)
    assert made.prediction.device_peak_bytes <= 2 * MIB


def test_on_a_device_that_is_here_link_and_operations_are_tried(tmp_path):
    stage = stage_of("qwen_image", weight_cache_dir=str(tmp_path))
    with late_device() as platform:
        made = place_on_device(
            planned("qwen_image"), stage, platform, facts_of(GIB, device="cpu"), SHAPE
        )
        assert not platform.locked
    assert any(reason.endswith(", measured") for reason in made.reasons)
    assert any("times of operations: 100% measured" in reason for reason in made.reasons)
    assert (tmp_path / "op_times.json").is_file()


@pytest.mark.invariant("OFFLOAD-INV-008")
def test_what_a_pipeline_declares_of_its_blocks_is_heard():
    plan = planned("qwen_image")

    class Declared(plan.pipeline_class):
        _offload_plan = OffloadPlan(resident_paths=("transformer.transformer_blocks.0",))

    told, declared = (
        [
            block.path
            for block in survey_pipeline(one, stage_of("qwen_image"), SHAPE)
            .sizes["transformer"]
            .blocks
        ]
        for one in (plan, replace(plan, pipeline_class=Declared))
    )
    assert told[0] == "transformer_blocks.0"
    assert declared == told[1:]


@pytest.mark.invariant("OFFLOAD-INV-008")
def test_what_a_pipeline_declares_of_its_components_is_heard():
    plan = planned("qwen_image")

    class Swaps(plan.pipeline_class):
        _dit_modules = ("text_encoder",)
        _encoder_modules = ("transformer",)

    class Keeps(plan.pipeline_class):
        _encoder_modules = ("text_encoder.model",)
        _resident_modules = ("transformer",)

    def sizes(cls):
        one = replace(plan, pipeline_class=cls)
        return survey_pipeline(one, stage_of("qwen_image"), SHAPE).components

    swaps, keeps = sizes(Swaps), sizes(Keeps)
    assert swaps["text_encoder"].size.part == "denoisers"
    assert (swaps["transformer"].size.part, swaps["transformer"].phase) == ("encoders", "encode")
    assert {name: one.size.part for name, one in keeps.items()} == {
        "text_encoder": "encoders",
        "transformer": "resident",
        "vae": "resident",
    }
    assert [keeps[name].phase for name in ("transformer", "vae")] == ["denoise", "decode"]
    assert keeps["text_encoder"].size.blocks
    assert not keeps["transformer"].size.blocks


@pytest.mark.invariant("OFFLOAD-INV-008")
@pytest.mark.parametrize("strategy", ["layerwise", "model"])
def test_what_is_declared_resident_stays_whatever_else_moves(strategy):
    plan = planned("qwen_image")

    class Keeps(plan.pipeline_class):
        _dit_modules = ("transformer",)
        _encoder_modules = ("text_encoder",)
        _resident_modules = ("vae",)

    stage = stage_of("qwen_image", offload=strategy, memory="minimal")
    made = plan_placement(replace(plan, pipeline_class=Keeps), stage, facts_of(GIB), SHAPE)
    moving = Residency.SWAPPED if strategy == "model" else Residency.STREAMED
    assert made.components["vae"].residency is Residency.RESIDENT
    assert {made.components[one].residency for one in ("transformer", "text_encoder")} == {moving}
    plain = plan_placement(plan, stage, facts_of(GIB), SHAPE)
    assert made.prediction.phases_bytes == plain.prediction.phases_bytes
