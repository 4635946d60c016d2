"""Steps of all sizes before the first request, so that none waits for a kernel to be compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnistage.ar.gate_probe import probe_sequences
from omnistage.ar.graphs import graph_sizes
from omnistage.ar.sampling.features import SamplingFeatures
from omnistage.ar.step import SequenceStart, StepRow
from omnistage.attention.paged import SPARE_BLOCK
from omnistage.contracts.identity import RequestIdentity
from omnistage.contracts.sampling import OmniTokenSamplingParams, merge_defaults

if TYPE_CHECKING:
    from omnistage.ar.options import TokenOptions
    from omnistage.ar.running import SequenceTable
    from omnistage.ar.step_runner import StepRunner
    from omnistage.contracts.runtime import LoadReporter

_IDENTITY = RequestIdentity(request_id="warm-up")


def warm_up(
    runner: StepRunner, sequences: SequenceTable, options: TokenOptions, report: LoadReporter
) -> None:
    """Chunks of 8, 16, 32 … tokens up to the widest step, then samples of every graph's size: as
    the deployment's defaults have them, greedy, and plain. All is written to the spare block."""
    widest = min(options.max_num_batched_tokens, runner.cache.plan.max_model_len - 1)
    sizes = [size for size in (1 << power for power in range(3, 20)) if size < widest]
    for size in [*sizes, widest]:
        report(f"warming up with a chunk of {size} tokens", None)
        _run_chunk(runner, sequences, size)
    default = merge_defaults(OmniTokenSamplingParams(), options.default_sampling_params)
    assert isinstance(default, OmniTokenSamplingParams)
    wanted = [SamplingFeatures.of([default]), SamplingFeatures()]
    wanted.append(SamplingFeatures.of([OmniTokenSamplingParams(temperature=1.0)]))
    for features in dict.fromkeys(wanted):
        for size in graph_sizes(options.max_num_seqs):
            runner.warm_sampling(size, features)


def _run_chunk(runner: StepRunner, sequences: SequenceTable, tokens: int) -> None:
    prompt = probe_sequences(runner.model, (tokens,))[0].prompt
    count = min(tokens, len(prompt.token_ids))
    blocks = -(-len(prompt.token_ids) // runner.cache.plan.block_size)
    row = StepRow(
        identity=_IDENTITY,
        start=0,
        count=count,
        samples=True,
        decodes=False,
        blocks=[SPARE_BLOCK] * blocks,
        begin=SequenceStart(prompt=prompt, params=OmniTokenSamplingParams(temperature=0.0), seed=0),
    )
    try:
        runner.run([(row, sequences.take_in(row))])
    finally:
        sequences.release(_IDENTITY.key)
