"""What a family of token models is, and the decorator that declares one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class TokenFamily:
    """One `transformers` class. `build` writes a checkpoint into a folder; tests want
    `checkpoint(name)`, which builds once and caches. `gate` says that the class is there to be
    refused, or served with care: its attention does not do what the interface says."""

    name: str
    architecture: str
    build: Callable[[Path], None]
    gate: bool = False
    notes: str = field(default="", repr=False)


Assembler = Callable[[], tuple["PreTrainedModel", Any]]
"""Makes a model with weights as its class initializes them, and its tokenizer or processor."""


def token_model(architecture: str, *, gate: bool = False) -> Callable[[Assembler], TokenFamily]:
    """Declare the decorated assembler (named as the family, with `_` for `-`)."""

    def declare(assemble: Assembler) -> TokenFamily:
        def build(folder: Path) -> None:
            from .weights import seeded_model

            model, words = seeded_model(assemble)
            model.save_pretrained(folder)
            words.save_pretrained(folder)

        return TokenFamily(
            name=assemble.__name__.replace("_", "-"),
            architecture=architecture,
            build=build,
            gate=gate,
            notes=assemble.__doc__ or "",
        )

    return declare
