"""From a request's text to token ids: the tokenizer of a model, and the limits of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.ar.chat_template import MEDIA_KINDS, render_chat
from omnistage.contracts.errors import CheckpointError, InvalidRequestError
from omnistage.contracts.payloads import StageData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT, PROMPT_TOKEN_IDS, MESSAGES = "prompt", "prompt_token_ids", "messages"
SOURCES = (PROMPT, PROMPT_TOKEN_IDS, MESSAGES)

_CHARS_PER_TOKEN = 16
"""More than texts of any language have on average, long runs of blanks left aside."""


def load_tokenizer(model_path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, or of a GGUF file, with its chat template. From then on it may be
    called by several threads.

    Raises `CheckpointError` when there is none, or when its code comes with the model.
    """
    from transformers import AutoTokenizer

    folder, file = (
        (model_path.parent, model_path.name) if model_path.is_file() else (model_path, None)
    )
    arguments = {"gguf_file": file} if file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **arguments)
        # Settles truncation and padding, which a file may bring along: no later call changes the
        # tokenizer, whose backend cannot be changed and used at once.
        tokenizer("a")
    except Exception as error:  # the files are the user's: what the library raises for them varies
        reason = " ".join(str(error).split())
        raise CheckpointError(f"cannot load the tokenizer of {model_path}: {reason}") from error
    return tokenizer


def prepare_text(
    data: StageData, tokenizer: Any, *, max_model_len: int | None, vocab_size: int
) -> list[int]:
    """The token ids of a request to a model that takes text alone.

    Of the fields "prompt" (str), "prompt_token_ids" and "messages" one must be there. A prompt gets
    the special tokens that its tokenizer adds (unless field "add_special_tokens" is False), a chat
    those of its template only; "tools", "chat_template_kwargs", "add_generation_prompt" and
    "continue_final_message" go to the template. Raises `InvalidRequestError` naming the field.
    """
    source = text_source(data)
    _refuse_media(data)
    if source == PROMPT_TOKEN_IDS:
        ids = checked_ids(data.fields[source], vocab_size)
    elif source == PROMPT:
        special = data.fields.get("add_special_tokens", True)
        ids = encode(tokenizer, data.fields[source], special, max_model_len)
    else:
        ids = encode(tokenizer, chat_text(data, tokenizer), False, max_model_len)
    check_length(len(ids), max_model_len, param=source)
    return ids


def _refuse_media(data: StageData) -> None:
    messages = data.fields.get(MESSAGES) or ()
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    kinds = {str(part.get("type")) for part in parts if isinstance(part, Mapping)}
    media = sorted(kinds.intersection(MEDIA_KINDS)) or sorted(data.tensors)
    if media:
        raise InvalidRequestError(
            f"this model takes text only, no {', '.join(media)}", param=text_source(data)
        )


def text_source(data: StageData) -> str:
    """The one field that holds the input. Raises `InvalidRequestError` for none or several."""
    given = [name for name in SOURCES if data.fields.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"exactly one of {', '.join(SOURCES)} is needed, got {', '.join(given) or 'none'}",
            param=given[-1] if given else PROMPT,
        )
    return given[0]


def chat_text(data: StageData, renderer: Any) -> str:
    """The messages of a request as its chat template, a tokenizer's or a processor's, has them."""
    fields = data.fields
    return render_chat(
        renderer,
        fields[MESSAGES],
        fields.get("tools"),
        fields.get("chat_template_kwargs"),
        add_generation_prompt=fields.get("add_generation_prompt"),
        continue_final_message=fields.get("continue_final_message", False),
    )


def encode(
    tokenizer: Any, text: Any, add_special_tokens: bool, max_model_len: int | None
) -> list[int]:
    """Token ids of a text. Raises `InvalidRequestError` when it is no string, holds lone halves of
    surrogate pairs, which no tokenizer takes, or has many times more tokens than may be: of such a
    text only the beginning is read, since all of it may take minutes."""
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"prompt must be a string, got {type(text).__name__}", param=PROMPT
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text is no valid Unicode: {error.reason} at character {error.start}", param=PROMPT
        ) from error
    if max_model_len is not None and len(text) > 2 * _CHARS_PER_TOKEN * max_model_len:
        beginning = text[: _CHARS_PER_TOKEN * max_model_len]
        _check_beginning(tokenizer, beginning, len(text), max_model_len)
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids
    return ids


def _check_beginning(tokenizer: Any, beginning: str, num_chars: int, max_model_len: int) -> None:
    """Twice the limit leaves no doubt, although the last word may be cut."""
    known = len(tokenizer(beginning, add_special_tokens=False, verbose=False).input_ids)
    if known > 2 * max_model_len:
        raise InvalidRequestError(
            f"the prompt has {num_chars} characters, the first {len(beginning)} of them {known} "
            f"tokens; max_model_len is {max_model_len}: shorten the prompt",
            param=PROMPT,
        )


def checked_ids(ids: Any, vocab_size: int) -> list[int]:
    """Raises `InvalidRequestError` for what is no list of ids of the vocabulary."""
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise InvalidRequestError(
            f"prompt_token_ids must be a list of integers, got {type(ids).__name__}",
            param=PROMPT_TOKEN_IDS,
        )
    for place, one in enumerate(ids):
        if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < vocab_size:
            raise InvalidRequestError(
                f"prompt_token_ids[{place}] is {one!r}; allowed are integers from 0 to "
                f"{vocab_size - 1}",
                param=PROMPT_TOKEN_IDS,
            )
    return list(ids)


def check_length(num_tokens: int, max_model_len: int | None, *, param: str) -> None:
    """Raises `InvalidRequestError` for an empty prompt, or one that leaves no token to generate."""
    if num_tokens == 0:
        raise InvalidRequestError(f"{param} is empty: it has no token to begin with", param=param)
    if max_model_len is not None and num_tokens + 1 > max_model_len:
        raise InvalidRequestError(
            f"the prompt has {num_tokens} tokens, and one to generate makes {num_tokens + 1}; "
            f"max_model_len is {max_model_len}: shorten the prompt",
            param=param,
        )
