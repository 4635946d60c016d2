"""A prepared prompt becomes a sequence that can be computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from omnistage.ar.block_hash import BlockHasher
from omnistage.ar.description import StageDescription
from omnistage.ar.limits import max_output
from omnistage.ar.options import TokenOptions
from omnistage.ar.prompt import PreparedPrompt
from omnistage.ar.sequence import TokenSequence
from omnistage.ar.stopping import Detokenizer, OutputText
from omnistage.contracts.sampling import OmniTokenSamplingParams

MakeDetokenizer = Callable[[Any, Sequence[int], bool], Detokenizer]
"""(tokenizer, prompt's ids, skip_special_tokens) → the detokenizer of one sequence."""
MakeGrammar = Callable[[Any], Any]
"""A compiled grammar → where one sequence stands in it (`ar.grammar.Grammar`)."""


def make_detokenizer(
    tokenizer: Any, prompt_ids: Sequence[int], skip_special_tokens: bool
) -> Detokenizer:
    from omnistage.ar.detokenizer import IncrementalDetokenizer

    return IncrementalDetokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)


def make_grammar(compiled: Any) -> Any:
    from omnistage.ar.grammar import Grammar

    return Grammar(compiled)


@dataclass(slots=True)
class Beginning:
    options: TokenOptions
    make_detokenizer: MakeDetokenizer
    make_grammar: MakeGrammar
    description: StageDescription | None = None

    def begin(self, sequence: TokenSequence, prompt: PreparedPrompt, compiled: Any) -> None:
        """Raises `InvalidRequestError` for a length that cannot be."""
        known = self.description
        assert known is not None
        sequence.max_output = self._max_output(sequence, len(prompt.token_ids), known)
        if known.tokenizer is None and sequence.params.ignore_eos:
            sequence.params = _endless(sequence.params, sequence.max_output)
        sequence.prompt, sequence.token_ids = prompt, list(prompt.token_ids)
        sequence.num_prompt = len(prompt.token_ids)
        sequence.encoded = not prompt.media
        if prompt.cacheable and self.options.enable_prefix_caching:
            sequence.hasher = BlockHasher(prompt, known.block_size)
        if sequence.params.structured is not None:
            sequence.grammar = self.make_grammar(compiled)
            sequence.bitmask = sequence.grammar.bitmask()
        sequence.text = OutputText(
            params=sequence.params,
            eos_token_ids=known.eos_token_ids,
            max_output=sequence.max_output,
            detokenizer=self._detokenizer(sequence, known),
            grammar=sequence.grammar,
        )

    def _max_output(self, sequence: TokenSequence, num_prompt: int, known: StageDescription) -> int:
        options = self.options
        return max_output(
            sequence.params,
            num_prompt=num_prompt,
            max_model_len=min(known.max_model_len, options.max_model_len or known.max_model_len),
            capacity=known.capacity,
            max_chunk=None if options.enable_chunked_prefill else options.max_num_batched_tokens,
            default_max_tokens=options.default_sampling_params.get("max_tokens"),
        )

    def _detokenizer(self, sequence: TokenSequence, known: StageDescription) -> Detokenizer | None:
        if known.tokenizer is None:
            return None
        return self.make_detokenizer(
            known.tokenizer, sequence.token_ids, sequence.params.skip_special_tokens
        )


def _endless(params: OmniTokenSamplingParams, max_output: int) -> OmniTokenSamplingParams:
    """The end is a word of a text, but no code that a later stage could take: it is not drawn."""
    return msgspec.structs.replace(params, min_tokens=max_output)
