"""Crop and flip: images as they might also have been taken.

The usual augmentation of small images: four pixels of padding on each side, a crop of the former size at a random
place, and a mirroring from left to right with probability 1/2. The padding is zero in the inputs as they are given:
in the package's normalized image sets the mean pixel, elsewhere black.

Which view of an image is taken is drawn in one place (:func:`draw_views`) and passed in as numbers, so that clients
that train one by one and clients that train together see the same.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from fedsel_flwr.checks import IntArray
from fedsel_flwr.clients.settings import TrainingSettings
from fedsel_flwr.errors import ParameterError

PADDING = 4
"""Pixels on each side."""
SHIFTS = 2 * PADDING + 1
"""Places of the crop along each axis."""
VIEWS = 2 * SHIFTS**2
"""Views of an image."""


def draw_views(generator: np.random.Generator, count: int) -> IntArray:
    """Draw a view for each of so many images, every one as likely.

    Args:
        generator: Draws one number an image.
        count: How many.

    Returns:
        Numbers in [0, `VIEWS`), shape (count,): twice (the crop's row times `SHIFTS` plus its column), plus one if
        mirrored.
    """
    return generator.integers(VIEWS, size=count)


def crop_flip(images: torch.Tensor, views: torch.Tensor) -> torch.Tensor:
    """Return views of images.

    Args:
        images: Shape (n, channels, height, width); left as they are.
        views: What :func:`draw_views` drew for each, shape (n,), on the images' device.

    Returns:
        New images of the same shape.

    Example:
        >>> image = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
        >>> in_place = 2 * (PADDING * SHIFTS + PADDING)  # the crop lies where the image was
        >>> crop_flip(image, torch.tensor([in_place + 1])).tolist()  # only mirrored
        [[[[2.0, 1.0], [4.0, 3.0]]]]
        >>> crop_flip(image, torch.tensor([in_place + 2])).tolist()  # one column further to the right
        [[[[2.0, 0.0], [4.0, 0.0]]]]
    """
    height, width = images.shape[-2:]
    place, mirrored = views // 2, views % 2 == 1
    windows = functional.pad(images, (PADDING,) * 4).unfold(2, height, 1).unfold(3, width, 1)  # a view, no copy
    each = torch.arange(len(images), device=images.device)
    cropped = windows[each, :, place // SHIFTS, place % SHIFTS]
    return torch.where(mirrored[:, None, None, None], cropped.flip(-1), cropped)


def check_images(settings: TrainingSettings, ndim: int) -> None:
    """Refuse to augment what are no images.

    Args:
        settings: How a client trains.
        ndim: Number of axes of the inputs, the examples' own axis included.

    Raises:
        ParameterError: If the settings augment, and the inputs are not of shape (n, channels, height, width).
    """
    if settings.augmentation != "none" and ndim != 4:
        raise ParameterError(
            f"augmentation = {settings.augmentation!r} needs images, inputs of shape (n, channels, height, width); got "
            f"inputs with {ndim} axes: set augmentation = 'none'"
        )
