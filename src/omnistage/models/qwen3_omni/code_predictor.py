"""The codes of one frame beyond the first: the talker's code predictor, run for a batch of rows.

Every frame is a sequence of its own of at most `num_code_groups` positions: the talker's hidden
state, its token, then one code after another. Its keys and values stay in one small static cache,
so that a step computes one position a row and the whole frame has static shapes: it can stand in a
captured graph. Recomputing the growing prefix needs as many kernels and about nine times the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from omnistage.contracts.errors import UnsupportedCombinationError
from omnistage.models.qwen3_omni.frame_cache import FrameCache, inside, register

if TYPE_CHECKING:
    import torch

    from omnistage.ar.fusion import Linear

Choose = Callable[["torch.Tensor", int], "torch.Tensor"]
"""(logits (B, V) float32, code group from 1) → codes (B,) int64."""


class FramePredictor:
    """The code predictor `module` (`Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration`)
    for at most `max_rows` frames at once, on the module's device."""

    def __init__(self, module: Any, max_rows: int) -> None:
        import torch

        config = module.config
        self.module = module
        self.groups: int = config.num_code_groups
        window = getattr(config, "sliding_window", None)
        if window is not None and window <= self.groups:
            raise UnsupportedCombinationError(
                f"the code predictor's sliding_window is {window}; it must cover a whole frame "
                f"({self.groups + 1} positions)"
            )
        module.set_attn_implementation(register())
        weight = module.lm_head[0].weight
        shape = (
            config.num_hidden_layers,
            max_rows,
            config.num_key_value_heads,
            self.groups,
            config.head_dim,
        )
        self._keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self._values = torch.zeros_like(self._keys)
        self._positions = torch.arange(self.groups, device=weight.device)[None]

    def fuse(self, product: Linear) -> None:
        """Join projections, let linear layers multiply by `product`, compile the layers."""
        import omnistage.models.qwen3_omni.frame_op  # noqa: F401  (defines the operator)
        from omnistage.ar.compilation import compile_layers
        from omnistage.ar.fusion import fuse_projections, replace_linears

        fuse_projections(self.module.model, product)
        replace_linears(self.module, product)
        compile_layers(list(self.module.model.layers))

    def predict(
        self, hidden: torch.Tensor, tokens: torch.Tensor, embeds: torch.Tensor, choose: Choose
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The frames of B rows, from the hidden states (B, hidden_size) that their tokens (B,) were
        sampled from, and the tokens' own embeddings (B, hidden_size).

        Returns codes (B, num_code_groups) int64, a token itself first, and the sum of their
        embeddings (B, hidden_size). Capturable where `choose` is.
        """
        import torch

        frame = FrameCache(self._keys, self._values)
        codes, parts = [tokens], [embeds]
        inputs = torch.stack((hidden, embeds), dim=1)
        for group in range(1, self.groups):
            logits = self._logits(inputs, group, frame)
            code = choose(logits, group)
            embedded = self.module.model.codec_embedding[group - 1](code)
            codes.append(code)
            parts.append(embedded)
            inputs = embedded.unsqueeze(1)
        return torch.stack(codes, dim=1), torch.stack(parts, dim=1).sum(1)

    def _logits(self, inputs: torch.Tensor, group: int, frame: FrameCache) -> torch.Tensor:
        end = frame.length + inputs.shape[1]
        with inside(frame):
            output = self.module.model(
                inputs_embeds=inputs,
                position_ids=self._positions[:, frame.length : end],
                use_cache=False,
            )
        frame.length = end
        logits: torch.Tensor = self.module.lm_head[group - 1](output.last_hidden_state[:, -1])
        return logits.float()
