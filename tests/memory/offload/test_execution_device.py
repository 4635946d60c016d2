"""A pipeline makes its inputs where its models run, wherever weights wait."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.memory.offload.execution_device import declare_execution_device


def pipeline(waits_on: str, vae_on: str):
    from diffusers import DiffusionPipeline, ModelMixin
    from diffusers.configuration_utils import ConfigMixin, register_to_config

    class Part(ModelMixin, ConfigMixin):
        @register_to_config
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

    class Tiny(DiffusionPipeline):
        def __init__(self, text_encoder, transformer, vae) -> None:
            super().__init__()
            self.register_modules(text_encoder=text_encoder, transformer=transformer, vae=vae)

    return Tiny(Part().to(waits_on), Part().to(waits_on), Part().to(vae_on))


@pytest.mark.invariant("MODEL-OFFLOAD-INV-007")
@pytest.mark.parametrize("vae_on", ["cpu", "meta"])
def test_inputs_are_made_where_models_run(vae_on):
    from diffusers.utils.torch_utils import get_module_execution_device

    made = pipeline("cpu", vae_on)
    assert get_module_execution_device(made.text_encoder) == torch.device("cpu")
    undo = declare_execution_device(made, "meta")
    assert made._execution_device == torch.device("meta")
    for part in made.components.values():
        assert get_module_execution_device(part) == torch.device("meta")
    undo()
    undo()
    assert made._execution_device == torch.device("cpu")
    assert not any(hasattr(one, "_hf_hook") for one in made.components.values())


def test_a_pipeline_that_knows_better_is_refused():
    class Stubborn(type(pipeline("cpu", "cpu"))):
        @property
        def _execution_device(self):
            return torch.device("cpu")

    parts = pipeline("cpu", "cpu").components
    made = Stubborn(**parts)
    with pytest.raises(UnsupportedCombinationError, match="would make its inputs on cpu"):
        declare_execution_device(made, "meta")
    assert not any(hasattr(one, "_hf_hook") for one in parts.values())
