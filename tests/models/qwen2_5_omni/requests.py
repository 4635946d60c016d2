"""The test requests as stages and as `Omni` take them, and the token models."""

from __future__ import annotations

from functools import cache
from typing import Any

from omnistage.config.resolved import ResolvedStage
from omnistage.contracts.modalities import Modality
from omnistage.contracts.payloads import StageData
from omnistage.contracts.sampling import GenericParams, OmniTokenSamplingParams
from omnistage.models.qwen2_5_omni.loading import build_talker, build_thinker
from omnistage.models.qwen2_5_omni.pipeline import TALKER, THINKER, pipeline_config
from tests.checkpoints import checkpoint
from tests.models.qwen2_5_omni import reference

KINDS = ("image", "audio", "video")
THINKER_PARAMS = OmniTokenSamplingParams(
    temperature=0.0, max_tokens=reference.MAX_TOKENS, ignore_eos=True
)
TALKER_PARAMS = OmniTokenSamplingParams(
    temperature=0.0, max_tokens=reference.MAX_CODES, seed=reference.SEED
)
PARAMS = [THINKER_PARAMS, TALKER_PARAMS, GenericParams()]


def given_media(case: reference.Case) -> dict[str, list[Any]]:
    """By kind, as many as the case names; the sound of a video that has one is the first."""
    counts = {kind: max(case.order(kind), default=-1) + 1 for kind in KINDS}
    if case.sound_in_video:
        counts["audio"] = 1
    return {kind: [reference.media(kind, i) for i in range(n)] for kind, n in counts.items() if n}


def stage_data(case: reference.Case) -> StageData:
    fields: dict[str, Any] = {"messages": reference.messages(case)}
    tensors = {}
    for kind, items in given_media(case).items():
        for index, item in enumerate(items):
            tensors[f"{kind}_{index}"] = item
            if kind == "video":
                fields[f"video_{index}_fps"] = reference.ODD_FPS
    if case.sound_in_video:
        fields["mm_processor_kwargs"] = {"use_audio_in_video": True}
    return StageData(modality=Modality.TEXT, fields=fields, tensors=tensors)


def omni_prompt(case: reference.Case) -> dict[str, Any]:
    media = given_media(case)
    if "video" in media:
        media["video"] = [(item, reference.ODD_FPS) for item in media["video"]]
    prompt = {"messages": reference.messages(case), "multi_modal_data": media}
    if case.sound_in_video:
        prompt["mm_processor_kwargs"] = {"use_audio_in_video": True}
    return prompt


def resolved(stage_id: int, **changes: Any) -> ResolvedStage:
    pipeline = pipeline_config({})
    options = pipeline.options[stage_id] | changes.pop("options", {})
    return ResolvedStage(
        stage=pipeline.stages[stage_id],
        model_path=str(checkpoint(reference.CHECKPOINT)),
        process="inline",
        max_num_seqs=8,
        options=options,
        **changes,
    )


@cache
def thinker_model() -> Any:
    return build_thinker(resolved(THINKER), "cpu", lambda note, fraction: None)


@cache
def talker_model() -> Any:
    return build_talker(resolved(TALKER), "cpu", lambda note, fraction: None)
