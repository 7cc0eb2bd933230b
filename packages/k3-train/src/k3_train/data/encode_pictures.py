"""Text and pictures of a document as token ids, masks and patches.

P patches, H and W rows and columns of a patch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3_core.errors import K3Error
from k3_core.tokenizer import K3Tokenizer
from k3_train.data.documents import Interleaved, Picture
from k3_train.data.image_store import EncodedPicture

MOST_FRAMES = 4


def encode_interleaved(
    tokenizer: K3Tokenizer, entry: Interleaved
) -> tuple[list[int], list[int], list[EncodedPicture]]:
    """(ids, mask, pictures) of `[BOS] parts [EOS]`; [EOS] carries loss, a picture's text none.

    The text of a picture is the image processor's, with the placeholder once for each position.
    """
    ids, mask, pictures = [tokenizer.bos_id], [0], []
    for part in entry.parts:
        if isinstance(part, Picture):
            some_ids, grid, patches_P3HW = encode_picture(tokenizer, part)
            pictures.append(EncodedPicture(len(ids), len(ids) + len(some_ids), grid, patches_P3HW))
            has_loss = False
        else:
            some_ids, has_loss = tokenizer.encode(part.text), part.has_loss
        ids += some_ids
        mask += [int(has_loss)] * len(some_ids)
    return [*ids, tokenizer.eos_id], [*mask, 1], pictures


def encode_picture(
    tokenizer: K3Tokenizer, picture: Picture
) -> tuple[list[int], tuple[int, int, int], npt.NDArray[np.uint8]]:
    """Ids of a picture's text, its grid, and its patches [P, 3, H, W], uint8.

    K3Error for no frame, more than an item may have, or frames of different sizes.
    """
    # Imported here: it imports torch, which a process that encodes text does without.
    from k3_core.image import VideoSettings, image_prompt, video_prompt
    from k3_core.image.preprocess import cut_patches, plan_resize, scaled_rgb

    frames, seconds = picture.frames, picture.seconds
    most = 1 if seconds is None else MOST_FRAMES
    sizes = [frame.size for frame in frames]
    if not 1 <= len(frames) <= most or len(set(sizes)) > 1:
        kind = "an image" if seconds is None else "a clip"
        raise K3Error(f"{kind} of frames {sizes}: give 1 to {most} frames of one size")
    (width, height), video = sizes[0], VideoSettings()
    if seconds is None:
        settings, text = video.image, image_prompt(width, height)
    else:
        settings, text = video.frame, video_prompt(width, height, seconds)
    plan = plan_resize(width, height, settings)
    patches = [cut_patches(scaled_rgb(one, plan, settings), plan, settings) for one in frames]
    ids: list[int] = []
    for token_id in tokenizer.encode(text, allow_special=True):
        repeats = plan.num_tokens if token_id == tokenizer.media_pad_id else 1
        ids += [token_id] * repeats
    return ids, (len(frames), plan.grid_h, plan.grid_w), np.concatenate(patches)
