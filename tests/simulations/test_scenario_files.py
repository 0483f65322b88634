"""Scenarios: what the packaged ones hold, what can be overridden, and how faults are named."""

from __future__ import annotations

import inspect
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import tomli_w
from pydantic import BaseModel, ValidationError

from fedsel_flwr.clients.phones import PhoneModel
from fedsel_flwr.clients.system import SystemModel
from fedsel_flwr.clients.training import TrainingSettings
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.selectors import names
from fedsel_flwr.selectors.registry import selector_class
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.on_flower.app import RUN_KEYS
from fedsel_flwr.simulations.on_flower.building import selector_params
from fedsel_flwr.simulations.scenario import Device, Scenario, Wireless
from fedsel_flwr.simulations.scenario_files import load_scenario, own_parameters, scenario_names

ROOT = Path(__file__).resolve().parents[2]


def own_keys(table: type[BaseModel] = Scenario, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a scenario but for the selectors' parameters, and its type."""
    for key, field in table.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from own_keys(kind, f"{prefix}{key}.")
        elif prefix or key not in ("name", "description", "selectors"):
            yield f"{prefix}{key}", kind


def another(key: str, kind: Any, value: Any) -> Any:
    """A value that is allowed and not the given one."""
    if get_origin(kind) is Literal:
        return next(option for option in get_args(kind) if option not in (value, ""))
    if isinstance(value, tuple):
        return (*value, 2, 3)
    if isinstance(value, str):
        known = {
            "selector": "cs-ucb", "model.name": "cnn", "data.dataset": "mnist",
            "aggregation.averaging": "mean", "aggregation.cooldown": True, "aggregation.missing_columns": "random",
            "aggregation.weighting": "uniform", "aggregation.late": "use",
        }  # fmt: skip
        return known.get(key, "elsewhere")
    if isinstance(value, bool):
        return not value
    if key == "aggregation.late_scale_coff":
        return 10.0
    return value + 1 if isinstance(value, int) else value / 2 or 0.25


def value_at(scenario: Scenario, key: str) -> Any:
    found: Any = scenario.model_dump()
    parts = key.split(".", 2) if key.startswith("selectors.") else key.split(".")
    for part in parts:
        found = found[part]
    return found


SMOKE = load_scenario("smoke")
OTHER_VALUES = {key: another(key, kind, value_at(SMOKE, key)) for key, kind in own_keys()}
"""For every key of a scenario a value that smoke does not have."""


def refused(source: str, overrides: dict[str, Any] | None, *named: str) -> None:
    """A scenario is refused in one line that names these."""
    with pytest.raises(ParameterError) as caught:
        load_scenario(source, overrides)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)
    for part in named:
        assert part in str(caught.value)


def file_with(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


# ---- what the package brings ---------------------------------------------------------------------------------------


def test_names_are_the_files_of_the_package() -> None:
    files = (ROOT / "fedsel_flwr" / "simulations" / "scenarios").glob("*.toml")
    assert scenario_names() == tuple(sorted(path.stem for path in files))


@pytest.mark.parametrize("name", scenario_names())
def test_every_scenario_loads_with_name_and_description(name: str, tmp_path: Path) -> None:
    """And as the run folder keeps it, written as TOML and read again, it is the same scenario."""
    scenario = load_scenario(name, {"selectors.bsfl.data_weights": [1, 2.5, 3]})
    assert scenario.name == name
    assert re.fullmatch(r"\S.{20,}\S", scenario.description)
    scenario.system_model(np.ones(scenario.num_clients, dtype=np.int64), 1000)
    scenario.training.settings()
    assert load_scenario(file_with(tmp_path, tomli_w.dumps(scenario.model_dump()))) == scenario


XIA_SECTION_V = {
    "num_clients": 20, "clients_per_round": 5, "selector": "cs-ucb", "model.name": "logistic", "data.dataset": "mnist",
    "partition.kind": "iid", "training.learning_rate": 0.001, "training.batch_size": 2, "training.local_steps": 1,
    "wireless.bandwidth_hz": 15e3, "wireless.noise_power_dbm": -107, "wireless.access_point_power_dbm": 23,
    "wireless.client_power_dbm": 23, "wireless.path_loss_at_1km_db": 128.1, "wireless.path_loss_slope_db": 37.6,
    "wireless.radius_km": 0.5, "wireless.payload_down_bits": 5000, "wireless.payload_up_bits": 5000,
    "wireless.max_latency_s": 5, "device.samples_per_round": 2, "device.computing_step": 20,
}  # fmt: skip


def test_xia_ideal_is_section_v() -> None:
    scenario = load_scenario("xia-ideal")
    assert {key: value_at(scenario, key) for key in XIA_SECTION_V} == XIA_SECTION_V


def test_system_takes_every_number_of_wireless_and_device() -> None:
    cell = {"seed": 9, "wireless.access_point_power_dbm": 30.0, "system.kind": "cell"}
    system = load_scenario("smoke", OTHER_VALUES | cell).system_model()
    assert (system.num_clients, system.seed) == (11, 9)
    assert (system.downlink.transmit_power_dbm, system.uplink.transmit_power_dbm) == (30.0, 11.5)
    of_channels = ("bandwidth_hz", "noise_power_dbm", "path_loss_at_1km_db", "path_loss_slope_db", "min_distance_km")
    of_cell = ("radius_km", "payload_down_bits", "payload_up_bits", "max_latency_s")
    of_devices = ("samples_per_round", "computing_step", "cycles_per_sample", "effective_capacitance")
    for owner, table, keys in (
        (system.downlink, "wireless", of_channels), (system.uplink, "wireless", of_channels),
        (system, "wireless", of_cell), (system, "device", of_devices),
    ):  # fmt: skip
        for key in keys:
            assert getattr(owner, key) == OTHER_VALUES[f"{table}.{key}"]


def test_phones_take_every_number_of_system() -> None:
    s = load_scenario("smoke", OTHER_VALUES | {"seed": 9, "training.local_steps": 0, "training.local_epochs": 3})
    sizes = np.arange(1, s.num_clients + 1)
    phones = s.system_model(sizes, 1000)
    assert isinstance(phones, PhoneModel)
    keys = {k.removeprefix("system."): v for k, v in OTHER_VALUES.items() if k.startswith("system.")}
    assert (keys.pop("kind"), keys.pop("payload_bytes"), keys.pop("devices")) == ("phones", 0.25, "elsewhere")
    assert (phones.num_clients, phones.seed, phones.payload_bits) == (11, 9, 2.0)
    assert phones.max_latency_s == OTHER_VALUES["wireless.max_latency_s"]
    assert phones.examples == tuple(3.0 * sizes)
    assert len(keys) == 10
    for key, value in keys.items():
        assert getattr(phones, key) == value != getattr(PhoneModel, key)


def test_phones_have_the_defaults_of_their_class_and_the_models_size() -> None:
    scenario = load_scenario("smoke", {"system.kind": "phones"})
    phones = scenario.system_model(np.full(10, 4), 1000)
    assert phones == PhoneModel(num_clients=10, seed=1, examples=[4] * 10, payload_bits=8000)
    for sizes, model_bytes in ((None, 1000), (np.ones(10, dtype=np.int64), 0)):
        with pytest.raises(ParameterError, match=r"examples and the model's bytes"):
            scenario.system_model(sizes, model_bytes)


def test_defaults_are_those_of_the_classes_that_take_them() -> None:
    """Xia's channel and devices stand once, in the classes of the channel and of the system."""
    bare = Scenario(name="bare", num_clients=20)
    assert bare.system_model() == SystemModel(num_clients=20, seed=1)
    assert bare.training.settings() == TrainingSettings(learning_rate=0.1, batch_size=16)
    source = inspect.getsource(Wireless) + inspect.getsource(Device)
    assert re.findall(r"= [\d.e_-]+$", source, flags=re.MULTILINE) == ["= 0"]  # channels, which are the server's


def test_training_settings_take_every_number() -> None:
    values = {
        "learning_rate": 0.05, "batch_size": 4, "local_epochs": 2, "local_steps": 3, "momentum": 0.9,
        "weight_decay": 1e-4, "proximal_mu": 0.1, "augmentation": "crop-flip",
    }  # fmt: skip
    scenario = load_scenario("smoke", {f"training.{key}": value for key, value in values.items()})
    assert scenario.training.settings() == TrainingSettings(**values)
    assert load_scenario("smoke").training.settings().local_steps is None  # 0 in the file: whole passes


# ---- overrides -----------------------------------------------------------------------------------------------------


def test_the_flower_app_lists_the_keys_that_one_changes_by_hand() -> None:
    """Flower overrides only what this table lists; ``set`` takes all others."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    assert config.keys() - set(RUN_KEYS) <= set(OTHER_VALUES)
    assert set(RUN_KEYS) <= config.keys()
    assert len(config) <= 15


PARAMETERS = [f"selectors.{name}.{key}" for name in names() for key in own_parameters(selector_class(name))]


def test_selectors_take_all_but_what_the_scenario_sets() -> None:
    assert {f"selectors.bsfl.{key}" for key in ("min_latency", "alpha", "beta", "data_weights")} <= set(PARAMETERS)
    set_by_the_scenario = ("clients_per_round", "seed", "max_latency")
    own_caps = {f"selectors.{name}.clients_per_round" for name in ("everyone", "fedcs", "pczfl")}
    assert {key for key in PARAMETERS if key.split(".")[2] in set_by_the_scenario} == own_caps


@pytest.mark.parametrize("key", [*OTHER_VALUES, *PARAMETERS])
def test_every_key_can_be_overridden(key: str) -> None:
    before = load_scenario("smoke")
    value = OTHER_VALUES.get(key, 0.75)
    if not key.startswith("selectors."):
        assert value_at(before, key) != value
    after = load_scenario("smoke", {key: value})
    assert value_at(after, key) == value
    assert type(value_at(after, key)) is type(value)
    follows = {"system.kind": "wireless.max_latency_s"}.get(key)
    others = [other for other in OTHER_VALUES if other not in (key, follows)]
    assert [value_at(after, other) for other in others] == [value_at(before, other) for other in others]


@pytest.mark.parametrize("nothing", [None, ""])
def test_none_and_the_empty_string_leave_the_scenarios_own(nothing: str | None) -> None:
    assert load_scenario("smoke", dict.fromkeys([*OTHER_VALUES, *PARAMETERS], nothing)) == load_scenario("smoke")


def test_a_list_is_a_list_and_text_with_commas_stays_text() -> None:
    """Only the command line and Flower's run config, which take text alone, read lists from it."""
    assert load_scenario("smoke", {"partition.sizes": [1500, 1000, 500]}).partition.sizes == (1500, 1000, 500)
    refused("smoke", {"partition.sizes": "1500, 1000"}, "expected a list of numbers, such as 3, 4, 5")
    for wrong in ([5, 2.5], [5, 0]):
        refused("smoke", {"partition.classes_per_client": wrong}, f"partition.classes_per_client.1 = {wrong[1]}")
    assert load_scenario("smoke", {"data.data_dir": "a,b"}).data.data_dir == "a,b"


def test_overrides_add_to_a_table_are_not_changed_and_a_scenario_cannot_be() -> None:
    overrides = {"selectors.bsfl.data_weights": [1, 2], "rounds": 4}
    scenario = load_scenario("smoke", overrides)
    assert scenario.selectors["bsfl"] == {"min_latency": 0.05, "data_weights": [1, 2]}
    assert overrides == {"selectors.bsfl.data_weights": [1, 2], "rounds": 4}
    with pytest.raises(ValidationError, match="frozen"):
        scenario.rounds = 5
    assert load_scenario("smoke").rounds == 3


# ---- files of the user ---------------------------------------------------------------------------------------------


def test_a_file_is_named_after_itself_or_as_it_says(tmp_path: Path) -> None:
    assert load_scenario(file_with(tmp_path, "rounds = 4")).name == "mine"
    assert load_scenario(file_with(tmp_path, 'name = "yours"')).name == "yours"


def test_a_file_is_found_relative_and_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a scenario of the package wins over a folder."""
    file_with(tmp_path, "rounds = 4")
    (tmp_path / "smoke").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_scenario("mine.toml").rounds == 4
    assert load_scenario("smoke").num_clients == 10
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_scenario("~/mine.toml").rounds == 4


# ---- faults --------------------------------------------------------------------------------------------------------


def test_what_is_no_scenario_is_named(tmp_path: Path) -> None:
    refused("nosuch", None, "'nosuch'", *scenario_names())
    refused(str(tmp_path / "none.toml"), None, str(tmp_path / "none.toml"))
    refused(str(tmp_path), None, "is a folder")
    refused(file_with(tmp_path, "rounds = 4\nnum_clients = = 3\n"), None, "mine.toml", "not valid TOML", "line 2")
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe\x00rounds")
    refused(str(tmp_path / "mine.toml"), None, "mine.toml")
    if os.geteuid():  # root may read every file
        os.chmod(tmp_path / "mine.toml", 0)
        refused(str(tmp_path / "mine.toml"), None, "mine.toml")


UNKNOWN = [
    ("bogus = 1", "bogus", ("rounds", "num_clients", "selector", "[training]", "[wireless]")),
    ("[training]\nlearningrate = 1", "training.learningrate", ("training.learning_rate", "training.batch_size")),
    ("[bogus]\nx = 1", "bogus", ("[data]", "[aggregation]")),
    ("[selectors.bsfl]\ngamma = 1", "selectors.bsfl.gamma", ("alpha", "beta", "min_latency", "data_weights")),
]


@pytest.mark.parametrize(("text", "key", "allowed"), UNKNOWN)
def test_unknown_key_in_a_file(text: str, key: str, allowed: tuple[str, ...], tmp_path: Path) -> None:
    refused(file_with(tmp_path, text), None, f"unknown key {key!r}", "mine.toml", "llowed keys are ", *allowed)


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("bogus", "unknown key 'bogus'"),
        ("bogus.x", "unknown key 'bogus'"),
        ("learning_rate", "unknown key 'learning_rate' (did you mean 'training.learning_rate'?)"),
        ("training.learningrate", "unknown key 'training.learningrate'"),
        ("training.rounds", "unknown key 'training.rounds' (did you mean 'rounds'?)"),
        ("selectors.bsfl.gamma", "unknown key 'selectors.bsfl.gamma'"),
        ("selectors.random.gamma", "unknown key 'selectors.random.gamma'"),
        ("selectors.bsfll.alpha", "unknown selector 'bsfll' (did you mean 'bsfl'?)"),
        ("rounds.x", "cannot set 'rounds.x': 'rounds' is a value"),
        # two values for one thing would let one of them win without a word
        ("selectors.cs-ucb.clients_per_round", "'selectors.cs-ucb.clients_per_round'"),
        ("selectors.cs-ucb.seed", "'seed'"),
        ("selectors.cs-ucb.max_latency", "'wireless.max_latency_s'"),
        ("selectors.random.max_latency", "'wireless.max_latency_s' instead of 'selectors.random.max_latency'"),
    ],
)
def test_unknown_key_in_an_override(key: str, named: str) -> None:
    refused("smoke", {key: 1}, named)


@pytest.mark.parametrize("name", ["fedcs", "pczfl"])
def test_a_selector_that_decides_itself_how_many_has_a_cap_of_its_own(name: str) -> None:
    """The scenario's clients_per_round is not its cap; the key in its own table is."""
    scenario = load_scenario("smoke", {"selector": name, f"selectors.{name}.clients_per_round": 2})
    assert selector_params(scenario, {})["clients_per_round"] == 2
    assert "clients_per_round" not in selector_params(load_scenario("smoke", {"selector": name}), {})
    assert max(record.num_selected for record in simulate(scenario, engine="vectorized").history.rounds[1:]) <= 2


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [({}, 5.0), ({"system.kind": "phones"}, 60.0), ({"system.kind": "cell"}, 5.0),
     ({"system.kind": "phones", "wireless.max_latency_s": 7.0}, 7.0), ({"wireless.max_latency_s": 9.0}, 9.0)],
)  # fmt: skip
def test_the_longest_wait_is_that_of_the_strategies_but_in_xias_cell(overrides: dict[str, Any], seconds: float) -> None:
    """5 s for phones, which need 12 s, would leave a newcomer with clients that all fail."""
    scenario = load_scenario("smoke", overrides)
    assert scenario.wireless.max_latency_s == seconds
    assert Scenario.model_validate(scenario.model_dump()) == scenario
    assert inspect.signature(Settings).parameters["max_latency"].default == PhoneModel.max_latency_s == 60.0


LIMITS = tuple(f"aggregation.{key}" for key in ("cooldown", "max_update_norm", "max_examples", "max_participation"))
FAULTS: list[tuple[Any, tuple[str, ...]]] = [
    (0, ("rounds", "training.batch_size")),
    (-0.5, ("training.learning_rate", "simulated_s")),
    (80, ("target_accuracy",)),
    (30, ("clients_per_round",)),  # of 10 clients
    (2**64, ("seed",)),
    (float("inf"), ("wireless.max_latency_s", "joules")),
    (float("nan"), ("training.learning_rate",)),
    (True, ("rounds", "training.learning_rate")),
    (2.5, ("rounds",)),
    ([1, 2], ("rounds",)),
    (3, ("selector", "partition.sizes", "training", "selectors", "selectors.bsfl")),
    ("3", ("rounds", "training.learning_rate", "wireless.noise_power_dbm")),
    *((value, LIMITS) for value in ("yes", "1", -1.0, float("nan"))),
    ("none of them", ("engine", "data.dataset", "model.name")),
]
"""A wrong value, and the keys that refuse it; tests/site/test_scenario_reference.py has every limit and choice."""


@pytest.mark.parametrize(("key", "value"), [(key, value) for value, keys in FAULTS for key in keys])
def test_faults_name_key_and_value(key: str, value: Any) -> None:
    refused("smoke", {key: value}, f"{key} = {value!r}")


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    file = file_with(tmp_path, "rounds = 0\nbogus = 1\n[training]\nbatch_size = 0\n")
    refused(file, None, "rounds = 0", "unknown key 'bogus'", "training.batch_size = 0")
