"""Language models of two to four layers, sized to the tokenizer they are given."""

from ..tokens import qwen2_tokenizer
from .family import token_model

HIDDEN_SIZE = 64
MAX_POSITIONS = 2048


def config(tokenizer, **changes):
    """What most decoders' configurations call the same."""
    values = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
    }
    return values | changes


@token_model("Qwen3ForCausalLM")
def qwen3():
    """With the head tied to the embeddings: one tensor of the two is in the file."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from .weights import loud_for_a_tied_head

    tokenizer = qwen2_tokenizer(MAX_POSITIONS)
    settings = Qwen3Config(**config(tokenizer, tie_word_embeddings=True))
    model = Qwen3ForCausalLM(settings)
    loud_for_a_tied_head(model.model.norm)
    return model, tokenizer
