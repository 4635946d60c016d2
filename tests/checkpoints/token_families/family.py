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


def token_model(
    architecture: str,
    *,
    name: str | None = None,
    gate: bool = False,
    finish: Callable[[PreTrainedModel, Path], None] = lambda model, folder: None,
) -> Callable[[Assembler], TokenFamily]:
    """Declare the decorated assembler, after which the family is called (with `-` for `_`) unless
    it has a `name`. `finish` sees the model with its weights and the folder before it is saved.
    """

    def declare(assemble: Assembler) -> TokenFamily:
        def build(folder: Path) -> None:
            from .weights import seeded_model

            model, words = seeded_model(assemble)
            folder.mkdir()
            finish(model, folder)
            model.save_pretrained(folder)
            words.save_pretrained(folder)

        return TokenFamily(
            name=name or assemble.__name__.replace("_", "-"),
            architecture=architecture,
            build=build,
            gate=gate,
            notes=assemble.__doc__ or "",
        )

    return declare
