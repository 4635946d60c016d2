"""Builds the stages of a checkpoint, each from its own part of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.ar.media_prompts import MediaPrompts
from omnistage.ar.mrope import RopeIndex
from omnistage.ar.part_loading import from_folder, model_len, plan_part, rows_of
from omnistage.attention.paged import NAME
from omnistage.config.checks import suggestion
from omnistage.contracts.errors import CheckpointError, ConfigurationError
from omnistage.memory.budget import MemoryBudget
from omnistage.memory.transformers_loader import (
    load_planned,
    load_tensors,
    plan_transformers,
)
from omnistage.models.qwen2_5_omni.library import opens_speech_of_unpadded_prompts
from omnistage.models.qwen2_5_omni.talker import TalkerModel
from omnistage.models.qwen2_5_omni.talker_prompt import TalkerPrompts
from omnistage.models.qwen2_5_omni.thinker import ThinkerModel
from omnistage.models.qwen2_5_omni.token2wav import Token2Wav
from omnistage.models.qwen2_5_omni.token2wav_options import read_options
from omnistage.models.qwen2_5_omni.voices import read_voices
from omnistage.observability.logging import get_logger

if TYPE_CHECKING:
    import torch

    from omnistage.config.resolved import ResolvedStage
    from omnistage.contracts.runtime import LoadReporter
    from omnistage.memory.plan import LoadPlan

TEXT_EMBEDDINGS = "thinker.model.embed_tokens.weight"
MAX_CODES = 4096
"""Codec ids of one request at most: 82 s of speech, and `generate`'s default. Option `max_codes`
of the talker's `model`; a running request keeps one state of the thinker's for each."""

OPENS_SPEECH = "opens_speech"
"""Option of the talker's `model`: whether codec tokens open the speech. Left out: as the installed
`transformers` does, see `library`."""

TALKER_OPTIONS: dict[str, type] = {
    "voices": list,
    "default_voice": str,
    "max_codes": int,
    OPENS_SPEECH: bool,
}
"""Of its `model`; the first two are what a server lists."""

logger = get_logger(__name__)


def build_thinker(stage: ResolvedStage, device: str, report: LoadReporter) -> ThinkerModel:
    """A `TokenModelFactory`: the part "thinker.". Raises `CheckpointError` naming what is wrong
    with the folder, and `ConfigurationError` where its weights exceed the stage's budget."""
    from transformers import AutoProcessor

    folder = Path(stage.model_path)
    config = _config(folder).thinker_config
    report("loading processor", None)
    processor = from_folder(AutoProcessor, folder)
    module: Any = load_planned(plan_thinker(stage, device), report)
    max_model_len = model_len(stage, config.text_config)
    rope = rope_index(config, config)
    return ThinkerModel(
        module,
        MediaPrompts(config, processor, rope, max_model_len=max_model_len),
        rows=rows_of(stage),
        eos_token_ids=thinker_eos_ids(folder, config, processor.tokenizer),
        max_model_len=max_model_len,
        feeds_talker=stage.options.get("feeds_stages", False),
    )


def build_talker(stage: ResolvedStage, device: str, report: LoadReporter) -> TalkerModel:
    """A `TokenModelFactory`: the part "talker.", the voices, and some of the thinker's text
    embeddings."""
    folder = Path(stage.model_path)
    config, own = _config(folder), _talker_options(stage)
    module: Any = load_planned(plan_talker(stage, device), report)
    voices = read_voices(folder)
    bos_ids = {name: voice.bos_id for name, voice in voices.items()}
    talker = config.talker_config
    text_ids = [*bos_ids.values(), talker.tts_text_end_token_id, talker.tts_text_pad_token_id]
    report("loading text embeddings", None)
    return TalkerModel(
        module,
        _text_embeds(folder, text_ids, module),
        TalkerPrompts(
            talker,
            rope_index(talker, config.thinker_config),
            bos_ids,
            max_codes=own.get("max_codes", MAX_CODES),
            opens_speech=_opens_speech(own.get(OPENS_SPEECH)),
        ),
        rows=rows_of(stage),
        max_model_len=model_len(stage, talker),
        num_codes=config.token2wav_config.dit_config.num_embeds,
    )


def build_token2wav(
    stage: ResolvedStage, device: str, max_streams: int, report: LoadReporter
) -> Token2Wav:
    """A `CodecModelFactory`: the part "token2wav." of the stage's checkpoint and its voices. Raises
    `CheckpointError`, and `ConfigurationError` for options that are none."""
    folder = Path(stage.model_path)
    options = read_options(stage)
    talker = _config(folder).talker_config
    return Token2Wav(
        load_planned(plan_token2wav(stage, device), report),
        list(read_voices(folder).values()),
        options,
        vocab_size=talker.vocab_size,
        end_ids=frozenset((talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id)),
        device=device,
        max_streams=max_streams,
    )


def plan_thinker(stage: ResolvedStage, device: str) -> LoadPlan:
    """What `build_thinker` loads, from configurations and headers."""
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration

    config = _config(Path(stage.model_path)).thinker_config
    return plan_part(
        Qwen2_5OmniThinkerForConditionalGeneration,
        stage,
        config,
        "thinker.",
        device,
        attention={"text_config": NAME},
    )


def plan_talker(stage: ResolvedStage, device: str) -> LoadPlan:
    """What `build_talker` loads, but for voices and a few text embeddings."""
    from transformers import Qwen2_5OmniTalkerForConditionalGeneration

    config = _config(Path(stage.model_path)).talker_config
    return plan_part(Qwen2_5OmniTalkerForConditionalGeneration, stage, config, "talker.", device)


def plan_token2wav(stage: ResolvedStage, device: str) -> LoadPlan:
    """What `build_token2wav` loads, from configurations and headers. In float32, as
    `Qwen2_5OmniForConditionalGeneration` runs it whatever the rest is."""
    from transformers import Qwen2_5OmniToken2WavModel

    folder = Path(stage.model_path)
    plan = plan_transformers(
        Qwen2_5OmniToken2WavModel,
        folder,
        config=_config(folder).token2wav_config,
        prefix="token2wav.",
        dtype="float32",
        device=device,
        attn_implementation="sdpa",
    )
    budget = MemoryBudget.of(stage.memory_budget_gib, device)
    budget.check(plan.bytes_by_device, what=plan.cls.__name__)
    return plan


def thinker_eos_ids(folder: Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """As `generate` ends the thinker: `generation_config.json` first, then the thinker's own
    configuration, else the tokenizer's end of a turn."""
    from transformers import GenerationConfig

    ids = None
    if (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        ids = getattr(generation, "thinker_eos_token_id", None) or generation.eos_token_id
    for source in (config, config.text_config):
        ids = ids if ids is not None else getattr(source, "eos_token_id", None)
    if ids is None:
        ids = tokenizer.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids)


def rope_index(config: Any, thinker_config: Any) -> RopeIndex:
    """`config` is the thinker's or the talker's: each names tokens and rates itself."""
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

    return RopeIndex(
        modeling.Qwen2_5OmniPreTrainedModelForConditionalGeneration,
        config,
        thinker_config.vision_config.spatial_merge_size,
    )


def _talker_options(stage: ResolvedStage) -> dict[str, Any]:
    """Raises `ConfigurationError` for what `model` of the talker does not take."""
    own: dict[str, Any] = dict(stage.options.get("model", {}))
    for name, value in own.items():
        if name not in TALKER_OPTIONS:
            raise ConfigurationError(
                f"unknown option model.{name} of stage {stage.stage_id}; "
                f"{suggestion(name, TALKER_OPTIONS)}"
            )
        kind = TALKER_OPTIONS[name]
        if type(value) is not kind or (kind is int and value < 1):
            raise ConfigurationError(f"model.{name} must be of type {kind.__name__}, got {value!r}")
    return own


def _opens_speech(wanted: bool | None) -> bool:
    if wanted is not None:
        return bool(wanted)
    found = opens_speech_of_unpadded_prompts()
    if not found:
        logger.warning(
            "the installed transformers begins speech without the codec tokens that open it, and "
            "so does this server; set options.model.%s=true on the talker for speech as the model "
            "was trained",
            OPENS_SPEECH,
        )
    return found


def _text_embeds(folder: Path, text_ids: list[int], module: Any) -> dict[int, torch.Tensor]:
    table = load_tensors(folder, [TEXT_EMBEDDINGS])[TEXT_EMBEDDINGS]
    wrong = [text_id for text_id in text_ids if not 0 <= text_id < len(table)]
    if wrong:
        raise CheckpointError(f"{folder} names text ids {wrong}; it has embeddings of {len(table)}")
    return {
        text_id: table[text_id].to(module.device, module.dtype, copy=True) for text_id in text_ids
    }


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return from_folder(AutoConfig, folder)
