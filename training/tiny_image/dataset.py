"""Training pairs of scenes and tokenized prompts, made by all processors at once."""

import multiprocessing
import os
import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from training.tiny_image.prompts import training_prompt
from training.tiny_image.render import SceneBatch, batch_scenes
from training.tiny_image.scenes import lay_out, random_training_scene
from training.tiny_image.tokenizer import MAX_SUFFIX_LENGTH, PREFIX_LENGTH, encode_prompts
from transformers import Qwen2Tokenizer

CHUNK = 4096  # pairs that a worker makes at a time


@dataclass
class Pairs:
    """N scenes and a prompt for each.

    ids: int16 [N, 74], right-padded.  lengths: int16 [N], tokens without padding.
    """

    scenes: SceneBatch
    ids: Tensor
    lengths: Tensor

    def to(self, device: torch.device | str) -> "Pairs":
        return Pairs(self.scenes.to(device), self.ids.to(device), self.lengths.to(device))


def _make_chunk(tokenizer: Qwen2Tokenizer, seed: int) -> tuple[np.ndarray, ...]:
    rng = random.Random(seed)
    scenes = [random_training_scene(rng) for _ in range(CHUNK)]
    prompts = [training_prompt(scene, rng) for scene in scenes]
    batch = batch_scenes(scenes, [lay_out(scene, rng) for scene in scenes])
    ids, lengths = encode_prompts(tokenizer, prompts)
    fits = lengths <= PREFIX_LENGTH + MAX_SUFFIX_LENGTH
    columns = (batch.shape, batch.colour, batch.background, batch.disc)
    arrays = tuple(column.numpy()[fits] for column in columns)
    return *arrays, ids[fits].astype(np.int16), lengths[fits].astype(np.int16)


def make_pairs(tokenizer: Qwen2Tokenizer, count: int, seed: int) -> Pairs:
    """About `count` pairs: a prompt that is too long takes its scene along.

    Call it before the process touches an accelerator: the workers are forks.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    seeds = [seed * 1_000_003 + index for index in range(-(-count // CHUNK))]
    with multiprocessing.get_context("fork").Pool() as pool:
        chunks = pool.map(partial(_make_chunk, tokenizer), seeds)
    columns = [
        torch.from_numpy(np.concatenate(column)[:count]) for column in zip(*chunks, strict=True)
    ]
    return Pairs(SceneBatch(*columns[:4]), *columns[4:])
