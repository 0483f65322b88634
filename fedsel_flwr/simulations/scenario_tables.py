"""Tables of a scenario: data, partition, model, training, availability, delays, and options of the strategy.

The defaults of the synthetic data, the channel, the devices, the training and the strategy come from the classes that
receive these values.
"""

from __future__ import annotations

from dataclasses import Field as OptionField
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from fedsel_flwr.aggregation import Filter
from fedsel_flwr.clients.phones import PhoneModel
from fedsel_flwr.clients.streams import stream
from fedsel_flwr.clients.system import SystemModel
from fedsel_flwr.clients.training_settings import Augmentation, TrainingSettings
from fedsel_flwr.references import is_reference
from fedsel_flwr.rounds.settings import Options
from fedsel_flwr.selectors.registry import parameter_texts
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
    """Table of a scenario: immutable, and without unknown keys.

    The text below a key is its meaning. It is the key's ``description`` in ``model_fields``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    described_by: ClassVar[tuple[type, ...]] = ()
    """Classes whose section Args describes the keys of the same name that have no text here."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Take the missing descriptions from :attr:`described_by`."""
        texts = {name: text for source in cls.described_by for name, text in parameter_texts(source).items()}
        for name, field in cls.model_fields.items():
            field.description = field.description or texts.get(name)


class Data(Table):
    """Data set: its name, its folder, its validation and test shares, and the synthetic data."""

    dataset: Annotated[
        str, name_or_reference("digits", "mnist", "fashion-mnist", "emnist", "cifar-10", "synthetic-regression")
    ] = "digits"
    """Data set, by its name or as a reference to your own data."""
    data_dir: str = ""
    """Folder of torchvision's data sets and of availability traces. If it is empty, the environment variable
    ``FEDSEL_DATA`` counts."""
    validation_fraction: Fraction = 0.1
    """Share of the training examples that becomes the server's validation set (see ``validation_from``)."""
    validation_from: Literal["train", "test"] = "train"
    """Set from which the validation examples are taken. With "test", they are a share of the test examples, and the
    clients have all training examples."""
    test_fraction: Fraction = 0.2
    """Share of all examples that becomes the test set, for the digits and synthetic data. Other data sets have a test
    set."""
    local_test_fraction: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.0
    """Share of each client's examples that becomes its local test set. If it is 0, a client tests on its training
    examples."""
    synthetic_examples: Count = Synthetic.num_examples
    """Number of examples of the synthetic data."""
    synthetic_features: Count = Synthetic.num_features
    """Number of features of the synthetic data."""
    synthetic_noise: NotNegative = Synthetic.noise
    """Standard deviation of the noise of the synthetic data."""

    def synthetic(self) -> Synthetic:
        """Return the synthetic data of these settings."""
        return Synthetic(
            num_examples=self.synthetic_examples, num_features=self.synthetic_features, noise=self.synthetic_noise
        )


class Availability(Table):
    """Availability of the clients."""

    kind: Literal["always", "bernoulli", "trace"] = "always"
    """Rule of availability: always, in each round with a probability, or by a trace."""
    probability: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.9
    """Probability that a client is available in a round, for the kind "bernoulli"."""
    trace: str = ""
    """CSV file of the kind "trace", as a path relative to the working directory or to the data folder."""
    seconds_per_round: NotNegative = 0.0
    """Seconds of the trace for each round. If it is 0, the simulated clock counts."""


class Partition(Table):
    """Partition of the training examples among the clients.

    The kind "dirichlet" is Kim's client heterogeneity, and "dirichlet-classes" his class heterogeneity. The kind
    "dirichlet-sizes" is GPFL's quadratic program.
    """

    kind: Literal[
        "iid", "dirichlet", "dirichlet-classes", "dirichlet-sizes", "shards", "sizes", "classes", "sampled", "writers"
    ] = "iid"
    """Kind of partition. The kind "writers" gives each client all images of some writers. It is for the data set
    "mnist", and needs the extended labels of QMNIST in the data folder."""
    alpha: Positive = 0.5
    """Concentration of the Dirichlet kinds. A smaller number makes the clients' classes differ more."""
    shards_per_client: Count = 2
    """Number of shards of each client, for the kind "shards"."""
    sizes: Counts = ()
    """Number of examples of each client, for the kind "sizes"."""
    classes_per_client: Counts = ()
    """Number of classes of each client, for the kind "classes"."""
    examples_per_client: Count = 120
    """Number of examples of each client, for the kind "sampled", in which clients may share examples."""


class Model(Table):
    """Model that is trained."""

    name: Annotated[str, name_or_reference("logistic", "mlp", "cnn", "cnn5", "cnn3", "vgg11", "linear")] = "mlp"
    """Model, by its name or as a reference to your own model."""


class Training(Table):
    """Local stochastic gradient descent."""

    described_by = (TrainingSettings,)

    learning_rate: Positive = 0.1
    batch_size: Count = 16
    local_epochs: Count = TrainingSettings.local_epochs
    local_steps: CountOrZero = 0
    """Number of steps of each client in a round, in place of ``local_epochs``. With 0, ``local_epochs`` counts."""
    momentum: Annotated[float, Field(ge=0, lt=1, strict=True)] = TrainingSettings.momentum
    weight_decay: NotNegative = TrainingSettings.weight_decay
    proximal_mu: NotNegative = TrainingSettings.proximal_mu
    augmentation: Augmentation = TrainingSettings.augmentation
    halved_at: Counts = ()

    def settings(self) -> TrainingSettings:
        """Return the training settings of a client."""
        return TrainingSettings(**self.model_dump() | {"local_steps": self.local_steps or None})


class System(Table):
    """System model: Xia's cell, or phones on Wi-Fi.

    The tables ``wireless`` and ``device`` describe the cell. All keys of this table except ``kind`` are for phones.
    From the table ``wireless``, phones use only ``max_latency_s`` and ``channels``.
    """

    described_by = (PhoneModel,)

    kind: Literal["cell", "phones"] = "cell"
    """Kind of system: the radio cell of Xia's paper, or phones on Wi-Fi."""
    devices: str = ""
    """CSV file with your own devices. The medians and the ``..._log_sd`` keys are then unused. The format is
    described under "Your own devices and links" of the page on simulations."""
    payload_bytes: NotNegative = 0.0
    """Size of the model and of an update when they are sent. With 0, it is the size of the trained model."""
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
    """Wireless channel of Xia et al., section V, and the client deadline."""

    described_by = (SystemModel, OFDMAChannel)

    radius_km: Positive = SystemModel.radius_km
    min_distance_km: Positive = OFDMAChannel.min_distance_km
    bandwidth_hz: Positive = OFDMAChannel.bandwidth_hz
    access_point_power_dbm: Finite = OFDMAChannel.transmit_power_dbm
    """Power with which the access point sends."""
    client_power_dbm: Finite = OFDMAChannel.transmit_power_dbm
    """Power with which a client sends."""
    noise_power_dbm: Finite = OFDMAChannel.noise_power_dbm
    path_loss_at_1km_db: Finite = OFDMAChannel.path_loss_at_1km_db
    path_loss_slope_db: Positive = OFDMAChannel.path_loss_slope_db
    payload_down_bits: Positive = SystemModel.payload_down_bits
    payload_up_bits: Positive = SystemModel.payload_up_bits
    max_latency_s: Positive = SystemModel.max_latency_s
    """Client deadline: a client that takes this long or longer has failed. The default is Xia's 5 s in the
    cell, and 60 s for phones, as in the strategies."""
    channels: CountOrZero = 0
    """Number of clients that transmit at the same time. A larger cohort transmits in waves. With 0, there are as many
    channels as clients per round."""

    def channel(self, transmit_power_dbm: float) -> OFDMAChannel:
        """Return the channel of a sender with this power."""
        keys = self.model_dump(include={field.name for field in fields(OFDMAChannel)})
        return OFDMAChannel(transmit_power_dbm=transmit_power_dbm, **keys)


class Device(Table):
    """Processors of the clients in Xia's cell."""

    described_by = (SystemModel,)

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
    texts = parameter_texts(Options)
    for option in fields(Options):
        if key := option.metadata.get("key"):
            default = option.metadata["unset"] if option.default is None else option.default
            check = AfterValidator(partial(_option_value, option, key))
            keys[key] = (Annotated[Any, check, Field(description=texts.get(option.name))], default)
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

    Most keys are options of the strategy, which :class:`fedsel_flwr.rounds.settings.Options` declares and explains. The
    number 0 and an empty text stand for None.
    """

    filter: Literal["", "loss", "accuracy"] = ""
    """Score of FedCA's filter of models on the validation set. If it is empty, the selector's paper decides."""
    base: Literal["fedavg", "fedprox", "fedadam", "fedyogi", "fedavgm"] = "fedavg"
    """Flower strategy that averages the models."""
    server_learning_rate: Positive = 0.1
    """Learning rate of the server, for the bases "fedadam", "fedyogi" and "fedavgm"."""
    round_timeout_s: Positive = 600.0
    """Real time after which the Ray engine stops waiting for replies to a message."""

    def options(self) -> dict[str, Any]:
        """Return the strategy's options that this table sets, by their Python names."""
        options: dict[str, Any] = {"filter": Filter(score=self.filter) if self.filter else None}
        for option in fields(Options):
            if key := option.metadata.get("key"):
                value = getattr(self, key)
                options[option.name] = None if option.default is None and value == option.metadata["unset"] else value
        return options
