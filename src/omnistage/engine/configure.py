"""From what a user names to the resolved configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omnistage.config.deploy import load_deploy
from omnistage.config.overrides import Overrides
from omnistage.config.resolve import resolve_config
from omnistage.config.resolved import OmniConfig
from omnistage.models.registry import find_pipeline


def configure(
    model: str,
    *,
    deploy_config: str | Path | None = None,
    overrides: Overrides | None = None,
    **settings: Any,
) -> OmniConfig:
    """Resolve a model and its settings. Loads no weights.

    `model` is a local directory, a hub id or a bundled model; `settings` are overrides by name
    (`max_num_seqs=4`, `stage_overrides={0: {…}}`). Raises `ConfigurationError`.
    """
    entry = find_pipeline(model)
    deploy = deploy_config if deploy_config is not None else entry.deploy
    return resolve_config(
        entry.pipeline,
        model=model,
        model_path=str(entry.model_path),
        served_model_name=entry.served_name,
        deploy=None if deploy is None else load_deploy(deploy),
        overrides=overrides if overrides is not None else Overrides.from_kwargs(**settings),
    )
