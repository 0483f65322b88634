"""Untrusted folders: code that they name runs only if the user trusts it, nothing leads out, each fault is one line."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.cli import main
from fedsel_flwr.errors import FedSelError, ParameterError
from fedsel_flwr.references import load_reference
from fedsel_flwr.rounds.checkpoints import read_checkpoint, write_checkpoint
from fedsel_flwr.simulations import Comparison, compare, run_options, simulate
from tests.simulations.cut_off_runs import BREAKING, content, smoke, without_pictures
from tests.simulations.plans import but, good, with_value, written

MARKING = """
from pathlib import Path
Path("was_run").touch()
"""
"""Code that leaves something behind as soon as it is imported."""


@pytest.fixture(autouse=True)
def own_code(here: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None) -> None:
    """Code in the working directory; checkpoints come after every round."""
    (here / "mine.py").write_text(BREAKING)
    (here / "marking.py").write_text(MARKING)
    monkeypatch.setattr(run_options, "CHECKPOINT_SHARE", 1.0)


def run_with_code(folder: Path, label: str) -> None:
    """A single run whose scenario names a selector that leaves something behind."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"scenario": "smoke", "selector": label}))
    (folder / "scenario.toml").write_text('selector = "marking:X"\nengine = "vectorized"\nrounds = 2\n')


# ---- code ----------------------------------------------------------------------------------------------------------


ELSEWHERE = [
    ("selectors.0.name", "theirs/evil.py:X"),
    ("selectors.0.name", "marking:X"),
    ("selectors.0.name", "os:abort"),
    ("scenario.selector", "marking:X"),
    ("scenario.model.name", "marking:net"),
    ("scenario.data.dataset", "theirs/evil.py:data"),
    ("where.ray_address", "10.0.0.9:6379"),
    ("scenario.availability.trace", "/dev/zero"),
    ("scenario.availability.trace", "/proc/kmsg"),
    ("scenario.availability.trace", "/etc/passwd"),
    ("scenario.availability.trace", "theirs/../secret.csv"),
    ("scenario.availability.trace", "pipe"),
    ("scenario.system.devices", "/etc/passwd"),
    ("scenario.data.data_dir", "/etc"),
]
"""Code and files outside of its folder that a plan may name."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("key", "value"), ELSEWHERE)
def test_what_a_plan_names_elsewhere_is_neither_run_nor_read(key: str, value: str, here: Path, refused: Any) -> None:
    os.mkfifo(here / "pipe")
    (here / "secret.csv").write_text("secret\n")
    plan = json.loads(with_value(value, *[int(part) if part.isdecimal() else part for part in key.split(".")]))
    plan["scenario"]["availability"] |= {"kind": "trace"} if "trace" in key else {}
    (written(here / "theirs", json.dumps(plan)) / "evil.py").write_text(MARKING)
    before = {*here.rglob("*")}
    said = refused("compare", "--resume", "theirs", "--quiet")
    assert f"{key.replace('.0', '[0]')} = {value!r}" in said
    assert said.endswith("enter: fedsel compare --resume theirs --quiet --trust")
    assert "root:" not in said
    assert {*here.rglob("*")} == before


def test_code_that_a_single_run_names_is_not_run(here: Path, refused: Any) -> None:
    """Neither by the command nor by ``compare``, whose caller gives the selectors himself."""
    run_with_code(here / "theirs", "evil")
    assert "selectors[0].name = 'marking:X'" in refused("run", "--resume", "theirs")
    run_with_code(here / "compared" / "random-seed1", "random")
    with pytest.raises(FedSelError, match="selector is 'marking:X' there and 'random' here"):
        compare(smoke(2), "random", seeds=[1, 2], folder=here / "compared", resume=True)
    assert not (here / "was_run").exists()


def test_files_of_the_plans_folder_and_shipped_ones_need_no_trust(here: Path, refused: Any) -> None:
    plan = good()
    plan["scenario"]["availability"] |= {"kind": "trace", "trace": "theirs/trace.csv"}
    (written(here / "theirs", json.dumps(plan)) / "trace.csv").write_text("round,client,state\n1,0,down\n")
    assert main(["compare", "--resume", "theirs", "--quiet"]) == 0
    plan["scenario"]["name"] = "phones-704"
    plan["scenario"]["availability"]["trace"] = "phones/availability.csv"
    shutil.rmtree(here / "theirs")
    written(here / "theirs", json.dumps(plan))
    (here / "data").mkdir()
    said = refused("compare", "--resume", "theirs", "--quiet", "--data-dir", "data")
    assert "neither in the working directory nor in the data folder" in said


def test_what_a_killed_process_has_left_is_removed(theirs: Path) -> None:
    for command in (["report"], ["compare", "--quiet", "--resume"]):
        for name in (".comparison.png-abcdefgh", "random-seed1/.run.json-abcdefgh"):
            (theirs / name).mkdir(exist_ok=True)
        assert main([*command, "theirs"]) == 0
        assert not (theirs / ".comparison.png-abcdefgh").exists()


def test_trusted_code_is_loaded(here: Path, refused: Any) -> None:
    written(here / "theirs", with_value("marking:X", "selectors", 0, "name"))
    assert "marking has no 'X'" in refused("compare", "--resume", "theirs", "--trust")
    assert (here / "was_run").exists()


@pytest.mark.parametrize(
    "reference", ["os:abort", "subprocess:run", "builtins:exec", "mine.py:Path.unlink", "torch:os.abort", "this:s"]
)
def test_the_standard_library_is_never_called(reference: str, here: Path, refused: Any) -> None:
    """Trusted or not, and wherever a reference comes from."""
    sys.modules.pop("this", None)
    written(here / "theirs", with_value(reference, "scenario", "model", "name"))
    assert f"model {reference!r} is in Python's standard library" in refused("compare", "--resume", "theirs", "--trust")
    with pytest.raises(ParameterError, match="standard library"):
        load_reference(reference, "selector")
    assert "this" not in sys.modules


def test_a_partial_function_of_ones_own_is_loaded(here: Path) -> None:
    (here / "partly.py").write_text("from functools import partial\ndef net(width): ...\nsmall = partial(net, 3)\n")
    assert load_reference("./partly.py:small", "model").args == (3,)


def test_a_comparison_of_ones_own_code_is_cut_off_and_resumed(here: Path, refused: Any) -> None:
    """The line that is printed, typed as it stands, leaves what an uninterrupted comparison leaves."""
    line = ["compare", "smoke", "--rounds", "6", "--selectors", "./mine.py:Mine,random", "--seeds", "1", "--quiet"]
    assert main([*line, "--runs-dir", "straight"]) == 0
    (here / "broken").touch()
    said = refused(*line, "--runs-dir", "runs 2")
    (here / "broken").unlink()
    told = re.search(r"Mine-seed1: 2 rounds\. Resume with: (fedsel compare --resume .+)$", said)
    assert told, said
    command = shlex.split(told[1])[1:]
    assert command[-1] == "--trust"
    again = refused(*command[:-1])
    assert f"selectors[0].name = '{here}/mine.py:Mine'" in again
    assert again.endswith(f"enter: {told[1]}")
    assert main([*command, "--quiet"]) == 0
    (straight,), (resumed,) = (here / "straight").iterdir(), (here / "runs 2").iterdir()
    assert content(resumed) == content(straight)


# ---- checkpoints elsewhere -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", [[], ["--trust"]], ids=["strange", "trusted"])
def test_checkpoints_elsewhere_are_refused(trust: list[str], here: Path, refused: Any) -> None:
    written(here / "theirs", but(checkpoints={"checkpoint_dir": str(here / "away")}))
    said = refused("run", "--resume", "theirs", *trust)
    assert said.endswith(f"name it: fedsel run --resume theirs{' --trust' * len(trust)} --checkpoint-dir {here}/away")
    assert not (here / "away").exists()


def test_a_run_resumes_from_checkpoints_that_its_reader_names(here: Path, refused: Any) -> None:
    assert main(["run", "smoke", "--engine", "vectorized", "--quiet", "--rounds", "3", "--checkpoint-dir", "kept"]) == 0
    (folder,) = (here / "runs").iterdir()
    again = ["run", "--resume", str(folder), "--quiet"]
    for wrong in ([], ["--checkpoint-dir", "other"]):
        assert "keeps its checkpoints elsewhere" in refused(*again, *wrong)
    assert main([*again, "--checkpoint-dir", "kept"]) == 0
    written(here / "theirs", but())  # knows its own
    assert "--checkpoint-dir" in refused("run", "--resume", "theirs", "--checkpoint-dir", "x")


def test_plans_that_cannot_be_read_are_skipped_and_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They stop nobody's ``--resume``, which names no folder."""
    line = ["compare", "smoke", "--rounds", "2", "--selectors", "random", "--seeds", "1", "--quiet"]
    assert main(line) == 0
    (mine,) = (here / "runs").iterdir()
    for name in ("garbled", "linked", "older"):
        (here / "runs" / name).mkdir()
    (here / "runs" / "garbled" / "plan.json").write_text('{"scenario": "[31m"}')
    (here / "runs" / "linked" / "plan.json").symlink_to(mine / "plan.json")
    (here / "runs" / "older" / "plan.json").write_text("[]")
    os.utime(here / "runs" / "older" / "plan.json", (0, 0))
    (here / "runs" / "folder" / "plan.json").mkdir(parents=True)
    capsys.readouterr()
    assert main([*line, "--resume"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == str(mine)
    linked, garbled = sorted(err.splitlines(), reverse=True)
    assert linked.startswith("fedsel: a folder is skipped: 'runs/linked/plan.json' is a link")
    assert garbled.startswith("fedsel: a folder is skipped: 'runs/garbled/plan.json' is not a plan: scenario = ")


# ---- links ---------------------------------------------------------------------------------------------------------

LINKED = ["journal.jsonl", "flower.log", "checkpoints", "plan.json", "comparison.png", ".lock", "random-seed1",
          "random-seed1/journal.jsonl", "random-seed1/checkpoints", "random-seed1/run.json",
          "random-seed1/checkpoints/round-000001.safetensors.tmp", "random-seed2/scenario.toml"]  # fmt: skip


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of two runs."""
    folder = tmp_path_factory.mktemp("two_runs") / "theirs"
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        compare(smoke(2), "random", seeds=[1, 2], folder=folder)
    return folder


@pytest.fixture
def theirs(two_runs: Path, here: Path) -> Path:
    """A copy of that folder in the working directory."""
    return shutil.copytree(two_runs, here / "theirs")


@pytest.mark.parametrize("name", LINKED)
def test_links_in_a_folder_are_refused_by_name(name: str, theirs: Path, here: Path, refused: Any) -> None:
    """By every command and function that reads or writes a folder; what they lead to stays as it is."""
    link, victim = theirs / name, here / "victim"
    victim.mkdir() if link.suffix == "" else victim.write_text("precious")
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(victim)
    before = {path: path.lstat().st_mtime_ns for path in here.rglob("*")}
    for argv in (["compare", "--resume", "theirs"], ["report", "theirs"]):
        assert f"'theirs/{name}' is a link" in refused(*argv)
    for resume in (False, True):
        with pytest.raises(ParameterError, match=f"theirs/{name}' is a link"):
            compare(smoke(2), "random", seeds=[1, 2], folder="theirs", resume=resume)
    run = theirs / "random-seed1"
    if run in link.parents:
        with pytest.raises(ParameterError, match=f"{name}' is a link"):
            simulate(smoke(2), folder=run)
    assert {path: path.lstat().st_mtime_ns for path in here.rglob("*")} == before


def test_a_saved_comparison_is_not_written_through_links(theirs: Path, here: Path) -> None:
    (here / "saved").mkdir()
    (here / "victim").mkdir()
    (here / "saved" / "random-seed1").symlink_to(here / "victim")
    with pytest.raises(ParameterError, match="saved/random-seed1' is a link"):
        Comparison.load(theirs).save("saved")
    assert not any((here / "victim").iterdir())


def test_the_folder_given_and_those_above_it_may_be_links(here: Path) -> None:
    (here / "disk" / "runs").mkdir(parents=True)
    (here / "runs").symlink_to(here / "disk" / "runs")
    (here / "home").symlink_to(here / "disk")
    line = ["compare", "smoke", "--rounds", "2", "--selectors", "random", "--seeds", "2", "--quiet"]
    assert main([*line, "--runs-dir", "home/runs"]) == 0
    assert main([*line, "--resume"]) == 0
    (folder,) = (here / "disk" / "runs").iterdir()
    (here / "newest").symlink_to(folder)
    assert main(["compare", "--resume", "newest", "--quiet"]) == 0
    assert main(["report", "newest"]) == 0
    assert len(compare(smoke(2), "random", seeds=2, folder="newest", resume=True).runs) == 2


# ---- texts ---------------------------------------------------------------------------------------------------------

NASTY = {
    "a colour": "\x1b[31mrandom", "a colour in one byte": "\x9b31mrandom", "backwards": "\u202emodnar",
    "a line": "random\nfedsel: error", "half a character": "\ud800", "a path": "../random", "a macro": r"\input{x}",
    "nothing": "", "long": "a" * 101,
}  # fmt: skip


@pytest.mark.parametrize("label", NASTY.values(), ids=NASTY)
def test_labels_are_checked_when_they_are_read(label: str, theirs: Path, refused: Any) -> None:
    """As when they are written: they reach the terminal, LaTeX, and names of folders."""
    path = theirs / "random-seed1" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"selector": label}))
    for argv in (["report", "theirs"], ["run", "--resume", "theirs/random-seed1"]):
        assert "is not a run" in refused(*argv)
    if label:
        with pytest.raises(ParameterError, match="label"):
            compare(smoke(), {label: "random"}, seeds=1)
    written(theirs, with_value(label, "selectors", 0, "label"))
    assert "is not a plan" in refused("compare", "--resume", "theirs")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("run.json", "[" * 200_000, "recursion"),
        ("run.json", '{"scenario": "a\\u001b[31mb", "selector": "random"}', "holds control characters"),
        ("run.json", "3", "must hold an object"),
        ("scenario.toml", "rounds = 0\nseed = -1\nnum_clients = 0\njoules = -1\n", "rounds = 0: "),
        ("scenario.toml", f"x = {'[' * 5000}", "recursion"),
        ("scenario.toml", 'description = "\\u001b[31m"\n', "holds control characters"),
    ],
)
def test_a_run_that_was_changed_by_hand_is_refused_in_one_line(
    name: str, text: str, words: str, theirs: Path, refused: Any
) -> None:
    (theirs / "random-seed1" / name).write_text(text)
    for argv in (["report", "theirs"], ["compare", "--resume", "theirs"], ["run", "--resume", "theirs/random-seed1"]):
        assert words in refused(*argv)


def test_a_label_is_no_html(theirs: Path) -> None:
    comparison = Comparison.load(theirs)
    comparison.runs += [replace(run, selector="<b>bold") for run in comparison.runs]
    comparison.reference = "random"
    assert comparison.verdict
    assert "<b>" in comparison.verdict.sentence
    assert "<b>" not in comparison._repr_html_()


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("\x00", r"none of the checkpoints in 'kept' can be used: .*ids must be printable texts .*, got '\\x000'"),
        ("phone", "the history holds client 'phone[0-9]' in round 3, but the scenario has clients 0 to 9"),
        ("9", "the history holds client '9[0-9]' in round 3, but the scenario has clients 0 to 9"),
    ],
)
def test_a_checkpoint_with_ids_of_nobody(before: str, words: str, here: Path) -> None:
    simulate(smoke(2), checkpoint_dir="kept")
    for path in Path("kept").glob("round-*"):
        written = read_checkpoint(path)
        roster = written.state["roster"]
        roster["ids"] = [before + client_id for client_id in roster["ids"]]
        write_checkpoint(path.parent, written)
    with pytest.raises(FedSelError, match=words):
        simulate(smoke(4), folder="run", resume=True, checkpoint_dir="kept")
