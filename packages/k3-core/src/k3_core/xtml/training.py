"""A conversation with its loss mask, for supervised training (training 4, report 8.1)."""

from typing import TYPE_CHECKING, Any

from k3_core.xtml.content import ImagePrompts
from k3_core.xtml.render import conversation_blocks

if TYPE_CHECKING:
    from k3_core.tokenizer import K3Tokenizer


def render_training(
    tokenizer: "K3Tokenizer",
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = "max",
) -> tuple[list[int], list[int]]:
    """Ids of the conversation and, for each, 1 when the model has to generate it, else 0.

    The ids equal `apply_chat_template(..., add_generation_prompt=False)`. The mask is 1 on every
    assistant message from the end of its generation prefix to `<|end_of_msg|>` inclusive, except
    on arguments that are no JSON. It belongs to the token itself: as a label it is shifted along
    with the ids. Raises what `chat_segments` raises.
    """
    ids: list[int] = []
    mask: list[int] = []
    images = ImagePrompts(None)
    for block in conversation_blocks(messages, tools, thinking, thinking_effort, images):
        block_ids = tokenizer.encode_segments(block.segments)
        ids += block_ids
        mask += [int(block.is_target)] * len(block_ids)
    return ids, mask
