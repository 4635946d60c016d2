"""What families of several parts do alike when they load the token models of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.ar.causal_lm import position_limit
from omnistage.ar.gate import LENGTHS
from omnistage.attention.paged import NAME, register
from omnistage.contracts.errors import CheckpointError
from omnistage.memory.budget import MemoryBudget
from omnistage.memory.transformers_loader import plan_transformers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omnistage.config.resolved import ResolvedStage
    from omnistage.memory.plan import LoadPlan


def from_folder(cls: Any, folder: Path) -> Any:
    """`cls.from_pretrained`, of local files only. Raises `CheckpointError` saying what is wrong."""
    try:
        return cls.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the files are the user's: what the library raises for them varies
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{cls.__name__} cannot read {folder}: {reason}") from error


def plan_part(
    cls: type,
    stage: ResolvedStage,
    config: Any,
    prefix: str,
    device: str,
    attention: str | Mapping[str, str] = NAME,
) -> LoadPlan:
    """A part for the token runtime. Raises `ConfigurationError` where its weights exceed the
    stage's budget."""
    register()
    plan = plan_transformers(
        cls,
        Path(stage.model_path),
        config=config,
        prefix=prefix,
        dtype=stage.dtype,
        device=device,
        attn_implementation=attention,
    )
    budget = MemoryBudget.of(stage.memory_budget_gib, device)
    budget.check(plan.bytes_by_device, what=plan.cls.__name__)
    return plan


def model_len(stage: ResolvedStage, config: Any) -> int:
    """Tokens of the longest sequence: the model's bound, or the stage's where that is less."""
    limit = position_limit(config)
    return limit if stage.max_model_len is None else min(limit, stage.max_model_len)


def rows_of(stage: ResolvedStage) -> int:
    """The gate at load runs this many sequences, however few the stage may."""
    return max(stage.max_num_seqs, len(LENGTHS))
