"""Tiny random checkpoints in the real Hugging Face layouts: what every parity test runs on.

    from tests.checkpoints import FAMILIES, checkpoint

    family = FAMILIES["flux"]
    pipeline = DiffusionPipeline.from_pretrained(checkpoint("flux"))
    image = pipeline(**family.call, generator=torch.Generator().manual_seed(0)).images[0]

    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"))

Importing this package imports neither torch nor diffusers; building a checkpoint does.
"""

from .families import FAMILIES
from .family import Family
from .store import checkpoint
from .token_families import TOKEN_FAMILIES
from .token_families.family import TokenFamily

__all__ = ["FAMILIES", "TOKEN_FAMILIES", "Family", "TokenFamily", "checkpoint"]
