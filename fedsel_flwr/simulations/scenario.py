"""Scenario: everything that defines a simulation, with units in the names. Loads neither torch nor Flower."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.clients.device import System as AnySystem
from fedsel_flwr.clients.phones import PhoneModel
from fedsel_flwr.clients.system import SystemModel
from fedsel_flwr.clients.training_settings import examples_per_round
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors.registry import label_of
from fedsel_flwr.simulations.scenario_tables import (
    Aggregation,
    Availability,
    Count,
    Data,
    Device,
    Model,
    NotNegative,
    Partition,
    Probability,
    System,
    Table,
    Training,
    Wireless,
)

CHANGEABLE_ON_RESUME = frozenset({
    "name", "description", "rounds", "simulated_s", "joules", "target_accuracy", "target_rounds", "per_class_accuracy",
    "selectors",
    "data.data_dir", "aggregation.round_timeout_s", "aggregation.wait_timeout_s",
})  # fmt: skip
"""Keys that may change when a run is resumed: its length, the data folder, timeouts, and keys that only reports use."""
MAX_TEXT = 60
"""Longest text of a value, in characters. A longer text is cut and gets a digest."""


class Clients(Table):
    """Clocks and dropout of the clients."""

    energy_score_low: Annotated[float, Field(ge=0, le=1, strict=True)] = 1.0
    """Lowest energy score of PCZFL. Each client's score is drawn once, uniformly from this number to 1."""
    latency_mode: Literal["measured", "model"] = "model"
    """Origin of the computing time: the system model, or the measured time of the training."""
    delay: Literal["virtual", "sleep"] = "virtual"
    """Kind of delay: only counted, or also waited for in real time."""
    failure_probability: Probability = 0.0
    """Probability that a client that trained does not answer, in each round."""
    crash_probability: Probability = 0.0
    """Probability that a client crashes before it trains, in each round."""
    reference_multiplications: NotNegative = 0.0
    """Multiplications of the model for which the devices' speed holds. Another model takes proportionally more or less
    time and energy to compute. With 0, the size of the model has no influence."""


class Scenario(Table):
    """Everything that defines a simulation."""

    name: str
    """Name of the scenario, by default the name of its file."""
    description: str = ""
    """Description of the scenario in the list of scenarios."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 1
    """Seed of all random draws."""
    rounds: Count = 10
    """Number of rounds."""
    num_clients: Annotated[int, Field(ge=1, le=10**7, strict=True)] = 10
    """Number of clients."""
    clients_per_round: Count = 3
    """Number of clients that are selected in a round."""
    target_accuracy: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.8
    """Test accuracy to which times and joules are compared; for a regression, the R² to reach."""
    target_rounds: Count = 15
    """Number of measured accuracies in a row whose mean must be ``target_accuracy``."""
    selector: str = "random"
    """Selector, by its name or as a reference to your own class."""
    api: Literal["legacy", "message"] = "legacy"
    """API of Flower that the Ray engine uses."""
    engine: Literal["ray", "vectorized"] = "ray"
    """Engine: Flower on Ray, or the batched training of all clients of a round in one process."""
    evaluation_every: Count = 1
    """Number of rounds from one evaluation of the global model to the next."""
    per_class_accuracy: Annotated[bool, Field(strict=True)] = False
    """Whether the final model is also evaluated on each client's examples of each class."""
    simulated_s: NotNegative = 0.0
    """Budget of simulated time that can end the run before ``rounds`` are over. With 0, there is no budget."""
    joules: NotNegative = 0.0
    """Budget of energy that can end the run before ``rounds`` are over. With 0, there is no budget."""
    data: Data = Data()
    partition: Partition = Partition()
    model: Model = Model()
    training: Training = Training()
    system: System = System()
    wireless: Wireless = Wireless()
    device: Device = Device()
    clients: Clients = Clients()
    availability: Availability = Availability()
    aggregation: Aggregation = Aggregation()
    selectors: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _default_max_latency(cls, tables: Any) -> Any:
        """Set the default of ``wireless.max_latency_s``: the paper's for Xia's cell, the strategies' for phones."""
        # Done before validation, because afterwards a default looks like a value that the user set.
        if not isinstance(tables, dict):
            return tables
        system, wireless = tables.get("system"), tables.get("wireless", {})
        if isinstance(system, dict) and system.get("kind") == "phones" and isinstance(wireless, dict):
            return tables | {"wireless": {"max_latency_s": PhoneModel.max_latency_s} | wireless}
        return tables

    @model_validator(mode="after")
    def _numbers_fit(self) -> Scenario:
        if self.clients_per_round > self.num_clients:
            raise ValueError(
                f"clients_per_round = {self.clients_per_round} is more than num_clients = {self.num_clients}. "
                "Lower it, or raise num_clients"
            )
        warmup_rounds = self.aggregation.options()["warmup_rounds"]
        if warmup_rounds >= self.rounds:
            raise ValueError(
                f"aggregation.warmup_rounds = {warmup_rounds} leaves no round for the selector, because "
                f"rounds = {self.rounds}. Lower warmup_rounds, or increase rounds"
            )
        return self

    def system_model(
        self,
        sizes: IntArray | None = None,
        model_bytes: int = 0,
        multiplications: int = 0,
        devices: FloatArray | None = None,
    ) -> AnySystem:
        """Return the system model: delays and energy of the clients.

        Args:
            sizes: Number of training examples of each client, shape (num_clients,). Phones need it, Xia's cell does
                not.
            model_bytes: Size of the model when it is sent, in bytes. Used for phones if ``payload_bytes`` is 0.
            multiplications: Multiplications of the model per example; 0 means as many as the reference. Used if
                ``clients.reference_multiplications`` is set.
            devices: Seconds per example, and downlink and uplink in bytes/s, of each client, shape (num_clients, 3).
                None draws phones instead.

        Raises:
            ParameterError: The system model is phones, and sizes or payload are missing.
        """
        reference = self.clients.reference_multiplications
        factor = multiplications / reference if multiplications and reference else 1.0
        if self.system.kind == "cell":
            return self._cell(factor)
        keys = self.system.model_dump(exclude={"kind", "devices", "payload_bytes"})
        keys["seconds_per_example"] *= factor
        payload = self.system.payload_bytes or model_bytes
        if sizes is None or not payload:
            raise ParameterError("system.kind = 'phones' needs the clients' examples and the model's bytes. Give both")
        return PhoneModel(
            num_clients=self.num_clients,
            seed=self.seed,
            examples=examples_per_round(self.training.settings(), sizes),
            payload_bits=8 * payload,
            max_latency_s=self.wireless.max_latency_s,
            devices=None if devices is None else devices * [factor, 1.0, 1.0],
            **keys,
        )

    def model_bytes(self, own: int) -> tuple[float, float]:
        """Return the bytes of a model sent to a client, and of an update sent back.

        Args:
            own: Size of the model itself, in bytes. Used for phones without ``system.payload_bytes``.
        """
        if self.system.kind == "cell":
            return self.wireless.payload_down_bits / 8, self.wireless.payload_up_bits / 8
        payload = float(self.system.payload_bytes or own)
        return payload, payload

    def _cell(self, factor: float) -> SystemModel:
        w, keys = self.wireless, self.device.model_dump()
        keys |= w.model_dump(include={"radius_km", "payload_down_bits", "payload_up_bits", "max_latency_s"})
        # Xia's model has no speed in multiplications, so a model of twice the size counts as twice as many samples.
        keys["samples_per_round"] *= factor
        return SystemModel(
            num_clients=self.num_clients,
            seed=self.seed,
            downlink=w.channel(w.access_point_power_dbm),
            uplink=w.channel(w.client_power_dbm),
            **keys,
        )


def flat_settings(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return every setting in tables within tables, in their order: dotted key -> value.

    >>> flat_settings({"rounds": 5, "selectors": {"bsfl": {"alpha": 0.3}}})
    {'rounds': 5, 'selectors.bsfl.alpha': 0.3}
    """
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= flat_settings(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def course_settings(scenario: Scenario) -> dict[str, str]:
    """Return the settings that determine the course of a run: dotted key -> value as text."""
    kept = {
        key: value
        for key, value in flat_settings(scenario.model_dump()).items()
        if key not in CHANGEABLE_ON_RESUME and not key.startswith("selectors.")
    }
    # Only the table of the selector that runs counts.
    label = label_of(scenario.selector)
    kept |= {f"selectors.{label}.{key}": value for key, value in scenario.selectors.get(label, {}).items()}
    return {key: abbreviate(repr(value)) for key, value in kept.items()}


def abbreviate(text: str) -> str:
    """Return a text; if it is longer than 60 characters, cut it and add its digest.

    >>> abbreviate("0.1")
    '0.1'
    """
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT // 2]}..., SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
