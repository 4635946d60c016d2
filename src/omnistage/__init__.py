"""OmniStage: a serving engine for any-to-any models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from omnistage.contracts.outputs import OmniRequestOutput
    from omnistage.contracts.sampling import (
        GenericParams,
        OmniDiffusionSamplingParams,
        OmniTokenSamplingParams,
        StructuredOutput,
    )
    from omnistage.engine.async_omni import AsyncOmni
    from omnistage.engine.omni import Omni

_EXPORTS = {
    "AsyncOmni": "omnistage.engine.async_omni",
    "GenericParams": "omnistage.contracts.sampling",
    "Omni": "omnistage.engine.omni",
    "OmniDiffusionSamplingParams": "omnistage.contracts.sampling",
    "OmniRequestOutput": "omnistage.contracts.outputs",
    "OmniTokenSamplingParams": "omnistage.contracts.sampling",
    "StructuredOutput": "omnistage.contracts.sampling",
}

__all__ = [
    "AsyncOmni",
    "GenericParams",
    "Omni",
    "OmniDiffusionSamplingParams",
    "OmniRequestOutput",
    "OmniTokenSamplingParams",
    "StructuredOutput",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use: `import omnistage` itself stays instant."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'omnistage' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_EXPORTS[name]), name)
