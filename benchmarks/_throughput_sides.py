"""One side of `ar_throughput.py`, in a process of its own, which may be another Python's.

    python _throughput_sides.py SIDE FOLDER DTYPE THREADS WORKLOAD

It loads, writes "ready", and for each line of its input runs the workload once and writes
{"elapsed_s": …, "tokens": the tokens of each request}. Imports nothing of this project but for its
own sides.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Round = Callable[[list[list[int]], list[int]], list[list[int]]]
"""prompts, lengths → the tokens generated for each."""
CACHE_TOKENS = 32_768


def main() -> int:
    side, folder, dtype, threads, workload = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print goes to stderr: stdout is for answers.
    given = json.loads(Path(workload).read_text())
    prompts, lengths = given["prompts"], given["lengths"]
    started = time.perf_counter()
    run, about = SIDES[side](folder, dtype, int(threads), given)
    about["load_s"] = round(time.perf_counter() - started, 2)
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        count = int(line)
        started = time.perf_counter()
        tokens = run(prompts[:count], lengths[:count])
        elapsed_s = time.perf_counter() - started
        assert [len(one) for one in tokens] == lengths[:count], f"{side}: lengths differ"
        print(json.dumps({"elapsed_s": elapsed_s, "tokens": tokens}), file=answers, flush=True)
    return 0


def omni(folder: str, dtype: str, threads: int, given: dict[str, Any]) -> tuple[Round, dict]:
    """The whole engine, its stage in a process of its own."""
    from omnistage import Omni, OmniTokenSamplingParams

    engine = Omni(folder, device="cpu", dtype=dtype, log_level="error", **given["engine"])

    def run(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [
                OmniTokenSamplingParams(
                    temperature=0.0, max_tokens=length, ignore_eos=True, delta=False
                )
                for length in lengths
            ],
            use_tqdm=False,
        )
        for output in outputs:
            if output.error is not None:
                raise output.error
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run, {}


def loop(folder: str, dtype: str, threads: int, given: dict[str, Any]) -> tuple[Round, dict]:
    """Scheduler and executor in one thread: the engine without its messages."""
    import itertools

    from _ar_models import loaded_stage
    from _token_loop import TokenLoop

    from omnistage.platforms.cpu import set_cpu_threads

    set_cpu_threads(threads)
    token_loop = TokenLoop(loaded_stage(folder, dtype, **given["engine"]))
    number = itertools.count()

    def run(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        names = [f"request-{next(number)}" for _ in prompts]
        for name, prompt, length in zip(names, prompts, lengths, strict=True):
            how = {"temperature": 0.0, "max_tokens": length, "ignore_eos": True, "delta": False}
            token_loop.add(name, prompt, **how)
        token_loop.run()
        return [token_loop.generated[name] for name in names]

    return run, {"description": token_loop.description}


def _module(folder: str, dtype: str, threads: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    where = Path(folder)
    file = {"gguf_file": where.name} if where.is_file() else {}
    module = AutoModelForCausalLM.from_pretrained(
        where.parent if file else where, dtype=getattr(torch, dtype), local_files_only=True, **file
    )
    module.generation_config.eos_token_id = None
    module.generation_config.pad_token_id = 0
    return module.eval()


def one_by_one(folder: str, dtype: str, threads: int, given: dict[str, Any]) -> tuple[Round, dict]:
    """`transformers.generate`, a request after another."""
    import torch

    module = _module(folder, dtype, threads)

    def run(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        return [
            module.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=length,
                do_sample=False,
            )[0, len(prompt) :].tolist()
            for prompt, length in zip(prompts, lengths, strict=True)
        ]

    return run, {}


def padded(folder: str, dtype: str, threads: int, given: dict[str, Any]) -> tuple[Round, dict]:
    """`transformers.generate` of all prompts, padded on the left, for as long as the longest."""
    import torch

    module = _module(folder, dtype, threads)

    def run(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        made = module.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=max(lengths), do_sample=False
        )
        return [row[width : width + n].tolist() for row, n in zip(made, lengths, strict=True)]

    return run, {}


def continuous(folder: str, dtype: str, threads: int, given: dict[str, Any]) -> tuple[Round, dict]:
    """The manager behind `generate_batch`, which itself knows one length for all requests."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    module = _module(folder, dtype, threads)
    config = ContinuousBatchingConfig(
        page_size=32, num_blocks=CACHE_TOKENS // 32, max_batch_tokens=2048
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        found: dict[str, list[int]] = {}
        with module.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config
        ) as manager:
            for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                manager.add_request(prompt, request_id=str(index), max_new_tokens=length)
            while len(found) < len(prompts):
                result = manager.get_result(timeout=600)
                if result is None or result.error:
                    raise RuntimeError(f"continuous batching: {result and result.error}")
                if result.is_finished():
                    found[result.request_id] = result.generated_tokens
        return [found[str(index)] for index in range(len(prompts))]

    return run, {}


def vllm(folder: str, dtype: str, threads: int, given: dict[str, Any]) -> tuple[Round, dict]:
    """vLLM's own engine, with its defaults for a CPU but for the lengths and the cores."""
    import vllm as library
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype=dtype,
        max_model_len=given["engine"]["max_model_len"],
        max_num_seqs=given["engine"]["max_num_seqs"],
        enable_prefix_caching=False,
        seed=0,
    )

    def run(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [
                SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
                for length in lengths
            ],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run, {"version": library.__version__}


SIDES: dict[str, Callable[..., tuple[Round, dict[str, Any]]]] = {
    "omni": omni,
    "loop": loop,
    "one_by_one": one_by_one,
    "padded": padded,
    "continuous": continuous,
    "vllm": vllm,
}

if __name__ == "__main__":
    sys.exit(main())
