"""Builds the thinker and the talker of a checkpoint, each from its own part of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.ar.media_prompts import MediaPrompts
from omnistage.ar.part_loading import from_folder, model_len, plan_part, rows_of
from omnistage.attention.paged import NAME
from omnistage.memory.transformers_loader import load_planned, load_tensors
from omnistage.models.qwen3_omni.rope import rope_index
from omnistage.models.qwen3_omni.talker import TalkerModel, project_text
from omnistage.models.qwen3_omni.talker_prompt import TalkerPrompts
from omnistage.models.qwen3_omni.thinker import ThinkerModel

if TYPE_CHECKING:
    from omnistage.config.resolved import ResolvedStage
    from omnistage.contracts.runtime import LoadReporter
    from omnistage.memory.plan import LoadPlan

ATTENTION = {"text_config": NAME}
"""Encoders and code predictor attend by themselves."""
TEXT_EMBEDDINGS = "thinker.model.embed_tokens.weight"


def build_thinker(stage: ResolvedStage, device: str, report: LoadReporter) -> ThinkerModel:
    """A `TokenModelFactory`: the part "thinker.". Raises `CheckpointError` naming what is wrong
    with the folder, and `ConfigurationError` where its weights exceed the stage's budget."""
    from transformers import AutoProcessor

    folder = Path(stage.model_path)
    config = _config(folder)
    report("loading processor", None)
    processor = from_folder(AutoProcessor, folder)
    module: Any = load_planned(plan_thinker(stage, device), report)
    max_model_len = model_len(stage, config.thinker_config.text_config)
    thinker = config.thinker_config
    merge = thinker.vision_config.spatial_merge_size
    rope = rope_index(thinker, thinker.audio_config, merge)
    feeds_talker = stage.options.get("feeds_stages", False)
    return ThinkerModel(
        module,
        MediaPrompts(thinker, processor, rope, max_model_len=max_model_len),
        rows=rows_of(stage),
        eos_token_ids=thinker_eos_ids(folder, config),
        max_model_len=max_model_len,
        accept_layer=config.talker_config.accept_hidden_layer if feeds_talker else None,
    )


def build_talker(stage: ResolvedStage, device: str, report: LoadReporter) -> TalkerModel:
    """A `TokenModelFactory`: the part "talker." and the thinker's text embeddings, which are kept
    as the talker projects them."""
    import torch

    folder = Path(stage.model_path)
    config = _config(folder)
    module: Any = load_planned(plan_talker(stage, device), report)
    report("projecting text embeddings", None)
    embeddings = load_tensors(folder, [TEXT_EMBEDDINGS], dtype=stage.dtype, device=device)
    with torch.inference_mode():
        text_table = project_text(module, embeddings[TEXT_EMBEDDINGS].to(module.dtype))
    return TalkerModel(
        module,
        text_table,
        TalkerPrompts(config, thinker_eos_ids(folder, config)),
        rows=rows_of(stage),
        max_model_len=model_len(stage, config.talker_config.text_config),
    )


def plan_thinker(stage: ResolvedStage, device: str) -> LoadPlan:
    """What `build_thinker` loads, from configurations and headers."""
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

    config = _config(Path(stage.model_path)).thinker_config
    return plan_part(
        Qwen3OmniMoeThinkerForConditionalGeneration, stage, config, "thinker.", device, ATTENTION
    )


def plan_talker(stage: ResolvedStage, device: str) -> LoadPlan:
    """What `build_talker` loads, but for the text embeddings that it projects."""
    from transformers import Qwen3OmniMoeTalkerForConditionalGeneration

    config = _config(Path(stage.model_path)).talker_config
    return plan_part(
        Qwen3OmniMoeTalkerForConditionalGeneration, stage, config, "talker.", device, ATTENTION
    )


def thinker_eos_ids(folder: Path, config: Any) -> frozenset[int]:
    """As `generate` ends the thinker: `generation_config.json` first, else the end of a turn."""
    from transformers import GenerationConfig

    ids = None
    if (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        ids = getattr(generation, "thinker_eos_token_id", None) or generation.eos_token_id
    if ids is None:
        ids = config.im_end_token_id
    return frozenset([ids] if isinstance(ids, int) else ids)


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return from_folder(AutoConfig, folder)
