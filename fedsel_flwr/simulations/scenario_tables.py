"""Tables of a scenario: data, partition, model, training, availability, delays, and options of the strategy.

The defaults of the synthetic data, the channel, the devices, the training and the strategy come from the classes that
receive these values.
"""

from __future__ import annotations

from dataclasses import Field as OptionField
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.clients.phones import PhoneModel
from fedsel_flwr.clients.streams import stream
from fedsel_flwr.clients.system import SystemModel
from fedsel_flwr.clients.training_settings import Augmentation, TrainingSettings
from fedsel_flwr.references import is_reference
from fedsel_flwr.rounds.settings import Options
from fedsel_flwr.wireless import OFDMAChannel

OptionTable = TypeVar("OptionTable", bound=BaseModel)
Numbers = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Synthetic data of a linear model with noise: y = w·x + b + noise, with independent standard normal features x.

    w is normal with variance 1 / num_features, so that w·x has a variance of about 1, and b is standard normal. The
    best R² is about 1 / (1 + noise²).

    Deviations: Ben Ami et al. state neither the number of examples, nor the number of features, nor any distribution.
    We chose all of them. Their non-i.i.d. scenario differs from the i.i.d. one in the amount of data per client
    (section V-A). Here the partition sets these amounts, for example with ``partition.kind = "sizes"``.

    Args:
        num_examples: Number of examples, at least 1.
        num_features: Number of features, at least 1.
        noise: Standard deviation of the noise, at least 0.

    References:
        D. Ben Ami, K. Cohen and Q. Zhao, "Client selection for generalization in accelerated federated learning: a
        multi-armed bandit approach", section V, Figs. 5 and 8: "synthetic data for linear regression".
    """

    num_examples: int = 6000
    num_features: int = 20
    noise: float = 0.5

    def draw(self, seed: int) -> Numbers:
        """Draw the examples.

        Args:
            seed: Seed of the run.

        Returns:
            Inputs, float32 of shape (num_examples, num_features), and the numbers to predict, float32 of shape
            (num_examples,).

        Example:
            >>> inputs, numbers = Synthetic(num_examples=3, num_features=2).draw(seed=1)
            >>> inputs.shape, numbers.shape
            ((3, 2), (3,))
        """
        # The order of the draws is part of the data: another order would give other examples for the same seed.
        generator = stream(seed, "synthetic", 0)
        weights = generator.standard_normal(self.num_features) / np.sqrt(self.num_features)
        bias = generator.standard_normal()
        inputs = generator.standard_normal((self.num_examples, self.num_features))
        noise = self.noise * generator.standard_normal(self.num_examples)
        numbers = inputs @ weights + bias + noise
        return inputs.astype(np.float32), numbers.astype(np.float32)


# Strict, because pydantic would otherwise convert numbers that are given by mistake as text or as booleans.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Probability = Annotated[float, Field(ge=0, le=1, strict=True)]
Fraction = Annotated[float, Field(gt=0, lt=1, strict=True)]
Count = Annotated[int, Field(ge=1, le=10**9, strict=True)]
CountOrZero = Annotated[int, Field(ge=0, le=2**53, strict=True)]
Counts = tuple[Count, ...]

PYTHON_PREFIX = "python "
"""Prefix of the name of a model or of data from Python code. Scenario files cannot refer to such names."""


def name_or_reference(*names: str) -> AfterValidator:
    """Return a validator that accepts these names and references to your own code (:mod:`fedsel_flwr.references`)."""

    def check(value: str) -> str:
        if value not in names and not is_reference(value) and not value.startswith(PYTHON_PREFIX):
            known = ", ".join(map(repr, names))
            raise ValueError(f"expected one of {known}, or package.module:function or ./file.py:function")
        return value

    return AfterValidator(check)


class Table(BaseModel):
    """Table of a scenario: immutable, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Data(Table):
    """Data set: its name, its folder, and its validation and test shares.

    The server's validation set is the share ``validation_fraction`` of the training examples. With ``validation_from``
    = "test" it is this share of the test examples, the rest of them tests, and the clients have all training examples.
    The data sets of torchvision need ``data_dir``. The keys ``synthetic_...`` describe synthetic data.
    ``local_test_fraction`` is the share of each client's examples that become its local test set. If it is 0, a client
    tests on its training examples.
    """

    dataset: Annotated[
        str, name_or_reference("digits", "mnist", "fashion-mnist", "emnist", "cifar-10", "synthetic-regression")
    ] = "digits"
    data_dir: str = ""
    validation_fraction: Fraction = 0.1
    validation_from: Literal["train", "test"] = "train"
    test_fraction: Fraction = 0.2
    local_test_fraction: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.0
    synthetic_examples: Count = Synthetic.num_examples
    synthetic_features: Count = Synthetic.num_features
    synthetic_noise: NotNegative = Synthetic.noise

    def synthetic(self) -> Synthetic:
        """Return the synthetic data of these settings."""
        return Synthetic(
            num_examples=self.synthetic_examples, num_features=self.synthetic_features, noise=self.synthetic_noise
        )


class Availability(Table):
    """Availability: all clients always, each client with a probability, or a trace from the CSV file ``trace``.

    ``trace`` is a path, relative to the working directory or to the data folder. If ``seconds_per_round`` is above 0,
    it converts rounds into the trace's seconds, and the simulated clock is not used.
    """

    kind: Literal["always", "bernoulli", "trace"] = "always"
    probability: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.9
    trace: str = ""
    seconds_per_round: NotNegative = 0.0


class Partition(Table):
    """Partition of the training examples.

    ``sizes`` (kind "sizes") and ``classes_per_client`` (kind "classes") hold one number per client.
    ``examples_per_client`` belongs to the kind "sampled", in which clients may share examples. The kind "dirichlet" is
    Kim's client heterogeneity, and "dirichlet-classes" his class heterogeneity. The kind "dirichlet-sizes" is GPFL's
    quadratic program. The kind "writers" gives each client all images of some writers. It is for the data set "mnist",
    and needs the extended labels of QMNIST in the data folder.
    """

    kind: Literal[
        "iid", "dirichlet", "dirichlet-classes", "dirichlet-sizes", "shards", "sizes", "classes", "sampled", "writers"
    ] = "iid"
    alpha: Positive = 0.5
    shards_per_client: Count = 2
    sizes: Counts = ()
    classes_per_client: Counts = ()
    examples_per_client: Count = 120


class Model(Table):
    """Model that is trained."""

    name: Annotated[str, name_or_reference("logistic", "mlp", "cnn", "cnn5", "cnn3", "vgg11", "linear")] = "mlp"


class Training(Table):
    """Local stochastic gradient descent.

    ``local_steps`` above 0 replaces ``local_epochs``. ``augmentation`` = "crop-flip" pads images by four pixels, crops
    them at random, and mirrors half of them. ``halved_at`` lists rounds; the learning rate is halved at the start of
    each of them.
    """

    learning_rate: Positive = 0.1
    batch_size: Count = 16
    local_epochs: Count = TrainingSettings.local_epochs
    local_steps: CountOrZero = 0
    momentum: Annotated[float, Field(ge=0, lt=1, strict=True)] = TrainingSettings.momentum
    weight_decay: NotNegative = TrainingSettings.weight_decay
    proximal_mu: NotNegative = TrainingSettings.proximal_mu
    augmentation: Augmentation = TrainingSettings.augmentation
    halved_at: Counts = ()

    def settings(self) -> TrainingSettings:
        """Return the training settings of a client."""
        return TrainingSettings(**self.model_dump() | {"local_steps": self.local_steps or None})


class System(Table):
    """System model: Xia's cell (tables ``wireless`` and ``device``), or phones on Wi-Fi.

    All keys except ``kind`` are for phones; ``payload_bytes`` = 0 means the size of the model. From the table
    ``wireless``, phones use only ``max_latency_s`` and ``channels``. ``devices`` is a CSV file with your own devices
    (:mod:`fedsel_flwr.simulations.worlds.devices`). The medians and the ``..._log_sd`` keys are then unused.
    """

    kind: Literal["cell", "phones"] = "cell"
    devices: str = ""
    payload_bytes: NotNegative = 0.0
    seconds_per_example: Positive = PhoneModel.seconds_per_example
    compute_log_sd: NotNegative = PhoneModel.compute_log_sd
    compute_round_cv: NotNegative = PhoneModel.compute_round_cv
    download_bytes_per_s: Positive = PhoneModel.download_bytes_per_s
    download_log_sd: NotNegative = PhoneModel.download_log_sd
    upload_bytes_per_s: Positive = PhoneModel.upload_bytes_per_s
    upload_log_sd: NotNegative = PhoneModel.upload_log_sd
    network_round_cv: NotNegative = PhoneModel.network_round_cv
    compute_power_w: NotNegative = PhoneModel.compute_power_w
    radio_power_w: NotNegative = PhoneModel.radio_power_w


class Wireless(Table):
    """Wireless channel of Xia et al., section V.

    ``channels`` = 0 means as many channels as clients per round. A client that takes ``max_latency_s`` or longer has
    failed. The default is Xia's 5 s in the cell. It is 60 s for phones, as in the strategies.
    """

    radius_km: Positive = SystemModel.radius_km
    min_distance_km: Positive = OFDMAChannel.min_distance_km
    bandwidth_hz: Positive = OFDMAChannel.bandwidth_hz
    access_point_power_dbm: Finite = OFDMAChannel.transmit_power_dbm
    client_power_dbm: Finite = OFDMAChannel.transmit_power_dbm
    noise_power_dbm: Finite = OFDMAChannel.noise_power_dbm
    path_loss_at_1km_db: Finite = OFDMAChannel.path_loss_at_1km_db
    path_loss_slope_db: Positive = OFDMAChannel.path_loss_slope_db
    payload_down_bits: Positive = SystemModel.payload_down_bits
    payload_up_bits: Positive = SystemModel.payload_up_bits
    max_latency_s: Positive = SystemModel.max_latency_s
    channels: CountOrZero = 0

    def channel(self, transmit_power_dbm: float) -> OFDMAChannel:
        """Return the channel of a sender with this power."""
        return OFDMAChannel(
            bandwidth_hz=self.bandwidth_hz,
            transmit_power_dbm=transmit_power_dbm,
            noise_power_dbm=self.noise_power_dbm,
            path_loss_at_1km_db=self.path_loss_at_1km_db,
            path_loss_slope_db=self.path_loss_slope_db,
            min_distance_km=self.min_distance_km,
        )


class Device(Table):
    """Processors of the clients.

    ``samples_per_round`` is Xia's rho. It does not depend on the examples that the model trains on.
    """

    samples_per_round: Positive = SystemModel.samples_per_round
    computing_step: Positive = SystemModel.computing_step
    cycles_per_sample: NotNegative = SystemModel.cycles_per_sample
    effective_capacitance: NotNegative = SystemModel.effective_capacitance


def with_options(table: type[OptionTable]) -> type[OptionTable]:
    """Add to a table the options of a strategy, which :class:`~fedsel_flwr.rounds.settings.Options` declares, as keys.

    >>> @with_options
    ... class Empty(Table):
    ...     pass
    >>> Empty(over_selection=1).over_selection
    1.0
    """
    keys: dict[str, Any] = {}
    for option in fields(Options):
        if key := option.metadata.get("key"):
            default = option.metadata["unset"] if option.default is None else option.default
            keys[key] = (Annotated[Any, AfterValidator(partial(_option_value, option, key))], default)
    return create_model(table.__name__, __base__=table, __module__=table.__module__, __doc__=table.__doc__, **keys)


def _option_value(option: OptionField[Any], key: str, value: Any) -> Any:
    """Return the checked value of an option's key."""
    unset = option.metadata["unset"]
    # False equals 0, but a boolean is not a number here.
    if option.default is None and value == unset and not isinstance(value, bool):
        return unset
    return option.metadata["check"](key, value)


@with_options
class Aggregation(Table):
    """Aggregation: the base strategy, the filter of models, timeouts, and the options of the strategy.

    ``filter`` = "loss" or "accuracy" applies FedCA's filter on the validation set. If it is empty, the selector's paper
    decides. The other keys are options of the strategy; :class:`fedsel_flwr.rounds.settings.Options` declares and
    explains them. The number 0 and an empty text stand for None.
    """

    filter: Literal["", "loss", "accuracy"] = ""
    base: Literal["fedavg", "fedprox", "fedadam", "fedyogi", "fedavgm"] = "fedavg"
    server_learning_rate: Positive = 0.1
    round_timeout_s: Positive = 600.0

    def options(self) -> dict[str, Any]:
        """Return the strategy's options that this table sets, by their Python names."""
        named = {option.name: option for option in fields(Options) if option.metadata.get("key")}
        values = {name: getattr(self, option.metadata["key"]) for name, option in named.items()}
        unset = {name for name, option in named.items() if option.default is None and not values[name]}
        return {
            "filter": Filter(score=self.filter) if self.filter else None,
            **values,
            **dict.fromkeys(unset),
        }
