"""Local training of a client by stochastic gradient descent, and evaluation, with torch.

The room also has the augmentation "crop-flip" of small images (:func:`crop_flip`). It pads an image by four pixels on
each side and crops it to the former size at a random place. Then it mirrors the image from left to right with
probability 1/2. The padding is zero in the given inputs: the mean pixel in the package's normalized image sets, black
elsewhere. One function draws the views of all images (:func:`draw_views`), and the views are passed in as numbers. So
clients see the same views in training one by one and in batches.

Several small computations run at a time, one for each of several threads on which torch runs single-threaded
(:func:`map_on_threads`).
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import threadpool_limits
from torch import nn
from torch.nn import functional
from torch.optim.sgd import sgd

from fedsel_flwr.checks import IntArray, whole
from fedsel_flwr.clients.objectives import CLASSIFICATION, Objective, fresh_copy
from fedsel_flwr.clients.training_settings import TrainingSettings
from fedsel_flwr.errors import ParameterError

__all__ = ["TrainingSettings", "check_examples", "device_of", "evaluate", "read_only_tensor", "train"]

Inputs = npt.NDArray[np.float32]
Targets = npt.NDArray[np.int64] | npt.NDArray[np.float32]
"""Classes, or numbers to predict."""
Part = TypeVar("Part")
Answer = TypeVar("Answer")

_IDLE: ContextVar[int] = ContextVar("threads that torch had before a block of using_threads left it one", default=1)

PADDING = 4
"""Number of pixels of padding on each side."""
SHIFTS = 2 * PADDING + 1
"""Number of positions of the crop along each axis."""
VIEWS = 2 * SHIFTS**2
"""Number of views of an image."""


def train(
    model: nn.Module,
    inputs: Inputs,
    labels: Targets,
    settings: TrainingSettings,
    generator: np.random.Generator,
    objective: Objective = CLASSIFICATION,
) -> float:
    """Train a model on a client's data by stochastic gradient descent.

    Args:
        model: The received model, changed in place.
        inputs: The client's examples, shape (n, …), n at least 1.
        labels: Their classes, or numbers to predict, shape (n,).
        settings: The settings of training.
        generator: Draws the seed of the dropout, then for each pass a new order of the data. If images are augmented, a
            view of each image follows in each pass. torch's global random state does not change.
        objective: The objective whose loss the steps minimise; the default is cross-entropy.

    Returns:
        The mean over the steps of the batch's mean loss before the step (cross-entropy: in nats), without the proximal
        term. Not finite if the training diverged.

    Raises:
        ParameterError: If there are no examples, or not one label for each, or no images to augment.

    Examples:
        >>> model = nn.Linear(2, 2)
        >>> _ = [nn.init.zeros_(parameter) for parameter in model.parameters()]
        >>> inputs, labels = np.ones((1, 2), dtype=np.float32), np.zeros(1, dtype=np.int64)
        >>> settings = TrainingSettings(learning_rate=0.1, batch_size=1)
        >>> round(train(model, inputs, labels, settings, np.random.default_rng(0)), 4)
        0.6931
    """
    check_examples(inputs, labels)
    check_images(settings, inputs.ndim)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    received = [parameter.detach().clone() for parameter in parameters] if settings.proximal_mu > 0 else []
    momenta: list[torch.Tensor | None] = [None] * len(parameters)
    model.zero_grad()
    steps = settings.steps(len(labels))
    losses: list[float] = []
    device = device_of(model)
    # torch's dropout draws from the global generator, which belongs to the user.
    with in_mode(model, training=True), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        _seed_dropout(int(generator.integers(2**63)), device)
        for rows, views in itertools.islice(_batches(len(labels), settings, generator), steps):
            seen = torch.tensor(inputs[rows], device=device)
            if views is not None:
                seen = crop_flip(seen, torch.tensor(views, device=device))
            loss = objective.loss(model(seen), torch.tensor(labels[rows], device=device))
            loss.backward()  # type: ignore[no-untyped-call]
            # Not strict, because without a proximal term no received parameters are stored.
            for parameter, start in zip(parameters, received, strict=False):
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach() - start, alpha=settings.proximal_mu)  # FedProx's mu (w - w0)
            _step(parameters, momenta, settings)  # Kim (2); GPFL (1), (2)
            losses.append(loss.item())
            model.zero_grad()
    return mean_loss(losses)


def mean_loss(losses: Sequence[float]) -> float:
    """Return the mean of a client's losses before its steps; NaN if its training diverged."""
    # fsum does not depend on the order of its summands, but may raise if some are not finite.
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan


def evaluate(
    model: nn.Module,
    inputs: Inputs | torch.Tensor,
    labels: Targets | torch.Tensor,
    batch_size: int = 256,
    objective: Objective = CLASSIFICATION,
) -> tuple[float, float]:
    """Evaluate a model on examples, with dropout off; the model is not changed.

    Args:
        model: The model.
        inputs: The examples, shape (n, …), n at least 1. A tensor on the model's device stays there.
        labels: Their classes, or numbers to predict, shape (n,).
        batch_size: Number of examples at a time, at least 1; changes the result only by rounding.
        objective: Loss and quality; the default is cross-entropy and the fraction classified correctly.

    Returns:
        The mean loss (cross-entropy: in nats), and the quality.

    Raises:
        ParameterError: If there are no examples, or not one label for each, or `batch_size` is below 1.
    """
    check_examples(inputs, labels)
    batch_size = whole("batch_size", batch_size, 1)
    loss, parts = 0.0, []
    examples, targets = (read_only_tensor(part, device_of(model)) for part in (inputs, labels))
    with torch.no_grad(), in_mode(model, training=False):
        for start in range(0, len(labels), batch_size):
            outputs = model(examples[start : start + batch_size])
            loss += objective.loss(outputs, targets[start : start + batch_size], reduction="sum").item()
            parts.append(outputs)
        # Of all examples at once, because R² is not a mean over batches.
        quality = objective.quality(torch.cat(parts), targets)
    return loss / len(labels), quality


def torch_predict(
    model: nn.Module, batch_size: int = 256
) -> Callable[[Sequence[npt.NDArray[Any]], npt.NDArray[np.float32]], npt.NDArray[np.float64]]:
    """Return a torch model as the function ``predict(arrays, inputs) -> logits`` for evaluation on the server.

    Args:
        model: The model. Each call evaluates a copy.
        batch_size: Number of examples at a time.

    Returns:
        A function from arrays (in the order of the model's state dictionary) and inputs, shape (n, ...), to logits,
        shape (n, n_classes), with dropout off.
    """

    def predict(arrays: Sequence[npt.NDArray[Any]], inputs: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        return outputs(fresh_copy(model, arrays), inputs, batch_size).numpy().astype(np.float64)

    return predict


def outputs(model: nn.Module, inputs: npt.NDArray[np.float32], batch_size: int = 256) -> torch.Tensor:
    """Return a model's outputs on examples, shape (n, ...), on the CPU, with dropout off; the model is not changed."""
    examples = read_only_tensor(inputs, device_of(model))

    def ask(own: nn.Module, first: int) -> torch.Tensor:
        # Inside this function, because gradients are switched off per thread.
        with torch.no_grad():
            answer: torch.Tensor = own(examples[first : first + batch_size])
        return answer

    with in_mode(model, training=False):
        parts = map_on_threads(model, range(0, len(inputs), batch_size), ask)
    return torch.cat(parts).cpu()


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Switch a model's dropout on or off within the block."""
    before = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(before)


def draw_views(generator: np.random.Generator, count: int) -> IntArray:
    """Draw a view for each image, all views with the same probability.

    Args:
        generator: Draws one number for each image.
        count: Number of images.

    Returns:
        One number in [0, `VIEWS`) per image, shape (count,): twice (the crop's row times `SHIFTS` plus its column),
        plus one if mirrored.
    """
    return generator.integers(VIEWS, size=count)


def crop_flip(images: torch.Tensor, views: torch.Tensor) -> torch.Tensor:
    """Crop and mirror images.

    Args:
        images: The images, shape (n, channels, height, width), which are not changed.
        views: The view of each image from :func:`draw_views`, shape (n,), on the images' device.

    Returns:
        New images of the same shape.

    Example:
        >>> image = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
        >>> in_place = 2 * (PADDING * SHIFTS + PADDING)  # the crop at the image's own place
        >>> crop_flip(image, torch.tensor([in_place + 1])).tolist()  # only mirrored
        [[[[2.0, 1.0], [4.0, 3.0]]]]
        >>> crop_flip(image, torch.tensor([in_place + 2])).tolist()  # one column further to the right
        [[[[2.0, 0.0], [4.0, 0.0]]]]
    """
    height, width = images.shape[-2:]
    place, mirrored = views // 2, views % 2 == 1
    # unfold returns a view, so only the windows that are indexed below are copied.
    windows = functional.pad(images, (PADDING,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    each = torch.arange(len(images), device=images.device)
    cropped = windows[each, :, place // SHIFTS, place % SHIFTS]
    return torch.where(mirrored[:, None, None, None], cropped.flip(-1), cropped)


def check_images(settings: TrainingSettings, ndim: int) -> None:
    """Refuse to augment examples that are not images.

    Args:
        settings: The settings of a client's training.
        ndim: Number of axes of the inputs, including the axis of the examples.

    Raises:
        ParameterError: If the settings augment, and the inputs are not of shape (n, channels, height, width).
    """
    if settings.augmentation != "none" and ndim != 4:
        raise ParameterError(
            f"augmentation = {settings.augmentation!r} needs images, inputs of shape (n, channels, height, width); got "
            f"inputs with {ndim} axes. Set augmentation = 'none'."
        )


def _batches(
    count: int, settings: TrainingSettings, generator: np.random.Generator
) -> Iterator[tuple[IntArray, IntArray | None]]:
    """Yield rows and views of one batch after the other, pass after pass, each in a new order, without end."""
    while True:
        order = generator.permutation(count)
        # After the order, as in `Schedule`, because the batched backends must draw the same views.
        views = None if settings.augmentation == "none" else draw_views(generator, count)
        for start in range(0, count, settings.batch_size):
            part = slice(start, start + settings.batch_size)
            yield order[part], None if views is None else views[part]


@torch.no_grad()
def _step(parameters: list[nn.Parameter], momenta: list[torch.Tensor | None], settings: TrainingSettings) -> None:
    """Take a step along the gradients, and store the momenta."""
    moved = [k for k, parameter in enumerate(parameters) if parameter.grad is not None]
    held = [momenta[k] for k in moved]
    # By torch's function, because the first torch.optim.SGD of a process imports torch's compiler. In a client's
    # process this import takes longer than the client's first rounds.
    sgd(
        [parameters[k] for k in moved],
        [parameters[k].grad for k in moved],  # type: ignore[misc]
        held,
        foreach=False,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        lr=settings.learning_rate,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    for k, own in zip(moved, held, strict=True):
        momenta[k] = own


def _seed_dropout(seed: int, device: torch.device) -> None:
    """Seed the generators from which torch's dropout draws."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; the CPU if it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def read_only_tensor(array: npt.NDArray[Any] | torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return an array as a read-only tensor; nothing is copied that is already on the device."""
    with warnings.catch_warnings():
        # torch warns about read-only arrays, but here they are intended.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(array, device=device)


def check_examples(inputs: npt.NDArray[Any] | torch.Tensor, labels: npt.NDArray[Any] | torch.Tensor) -> None:
    """Refuse missing examples, and examples without one label for each."""
    if len(labels) < 1 or len(inputs) != len(labels):
        raise ParameterError(
            f"expected at least one example and one label for each; got {len(inputs)} examples, {len(labels)} labels. "
            "Give a label for each example."
        )


@contextmanager
def single_threaded_pool(count: int) -> Iterator[ThreadPoolExecutor]:
    """Start threads on each of which torch uses one thread; after the block torch uses as many as before.

    Args:
        count: Number of threads.
    """
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(
        count, thread_name_prefix="fedsel-training", initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        with pool:
            yield pool
    finally:
        # set_num_threads in a thread of the pool also sets the initial value of later threads.
        torch.set_num_threads(before)


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Limit torch and NumPy's BLAS to some threads within the block.

    Args:
        count: Number of threads, at least 1.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    idle = _IDLE.set(before if count == 1 else 1)
    try:
        # BLAS too, because its threads keep a core busy for a while after each product, and another process needs that
        # core.
        with threadpool_limits(count):
            yield
    finally:
        _IDLE.reset(idle)
        torch.set_num_threads(before)


def map_on_threads(model: nn.Module, parts: Sequence[Part], ask: Callable[[nn.Module, Part], Answer]) -> list[Answer]:
    """Evaluate a model on each part, on several threads if :func:`using_threads` leaves torch only one of them.

    One thread evaluates a part in either case, so the answers are the same to the last bit.

    Args:
        model: The model, which is not changed. Each thread has a copy. A model that cannot be copied stays on this
            thread.
        parts: The parts, such as the first rows of batches.
        ask: Function of the model, or a copy of it, and a part.

    Returns:
        The answers, in the order of the parts.
    """

    def share(own: nn.Module, numbers: Sequence[int]) -> list[Answer]:
        return [ask(own, parts[i]) for i in numbers]

    threads = min(_IDLE.get(), len(parts))
    if threads < 2:
        return share(model, range(len(parts)))
    try:
        copies = [copy.deepcopy(model) for _ in range(threads)]
    # A user's model may hold objects that cannot be copied, such as a non-leaf tensor, and copying may raise any error.
    except Exception:
        return share(model, range(len(parts)))
    shares = np.array_split(np.arange(len(parts)), threads)
    with single_threaded_pool(threads) as pool:
        futures = [pool.submit(share, one, own.tolist()) for one, own in zip(copies, shares, strict=True)]
        return [answer for future in futures for answer in future.result()]
