"""A reward is one finite number in range, with its evidence, or an error."""

import hashlib
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.agents.rewards import LARGEST, read_reward
from longrein.errors import RewardError
from longrein.records import RewardProfile

PROFILE = RewardProfile("score", scale=2.0, offset=-1.0, raw_range=(0.0, 10.0))
WIDE = RewardProfile(raw_range=(-math.inf, math.inf))


def put(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        (directory / name.replace("_", ".")).write_text(text)
    return directory


def test_the_number_is_scaled_and_its_bytes_are_kept(tmp_path: Path) -> None:
    text = '{"score": 3, "speed": 0.25}\n'
    receipt = read_reward(put(tmp_path, reward_json=text), PROFILE)
    assert (receipt.file, receipt.content, receipt.raw, receipt.reward) == ("reward.json", text, 3.0, 5.0)
    assert receipt.sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_a_text_file_holds_one_number(tmp_path: Path) -> None:
    receipt = read_reward(put(tmp_path, reward_txt=" 2.5e0\n"), PROFILE)
    assert (receipt.file, receipt.content, receipt.raw, receipt.reward) == ("reward.txt", " 2.5e0\n", 2.5, 4.0)


def test_two_files_must_agree(tmp_path: Path) -> None:
    receipt = read_reward(put(tmp_path, reward_json='{"score": 2.0}', reward_txt="2"), PROFILE)
    assert receipt.file == "reward.json"
    with pytest.raises(RewardError, match=r"reward.json says 2 and reward.txt says 1"):
        read_reward(put(tmp_path, reward_txt="1"), PROFILE)
    with pytest.raises(RewardError, match=r"reward.txt: holds 'two'"):
        read_reward(put(tmp_path, reward_txt="two"), PROFILE)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"score": true}', "holds True"),
        ('{"score": "1"}', "holds '1'"),
        ('{"score": null}', "holds None"),
        ('{"score": NaN}', "holds NaN"),
        ('{"score": -Infinity}', "holds -Infinity"),
        ('{"score": 1e999}', "too large"),
        ('{"score": 1%s}' % ("0" * 400), "too large"),
        ('{"score": 1%s}' % ("0" * 5000), "not valid JSON"),
        ('{"score": {"score": 1}}', "expected a number"),
        ('{"score": 1, "other": [2]}', "key 'other'"),
        ('{"score": 1, "score": 1}', "given twice"),
        ('{"points": 1}', "no key 'score', only 'points'"),
        ("{}", "none at all"),
        ("3", "flat map"),
        ("", "not valid JSON"),
        ("[" * 5000, "nested too deeply"),
        ('{"score": 10.5}', "outside 0 to 10"),
        ('{"score": -1}', "tasks.reward.raw_range"),
    ],
)
def test_what_is_no_reward_is_an_error(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(RewardError) as caught:
        read_reward(put(tmp_path, reward_json=text), PROFILE)
    assert says in str(caught.value) and "reward.json" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", ["", "nan", "inf", "1_0", "٣", "0x1", "1 2", "true", "1,5", "1e999"])
def test_text_that_python_might_take_for_a_number_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(RewardError, match=r"reward.txt"):
        read_reward(put(tmp_path, reward_txt=text), WIDE)


def test_only_small_regular_files_are_opened(tmp_path: Path) -> None:
    elsewhere = put(tmp_path, secret_txt="1") / "secret.txt"
    places = {}
    for kind in ("link", "pipe", "folder", "large", "latin", "nothing"):
        places[kind] = tmp_path / kind
        places[kind].mkdir()
    (places["link"] / "reward.txt").symlink_to(elsewhere)
    os.mkfifo(places["pipe"] / "reward.txt")
    (places["folder"] / "reward.txt").mkdir()
    (places["large"] / "reward.txt").write_text("1" + " " * LARGEST)
    (places["latin"] / "reward.txt").write_bytes(b"1\xe9")
    for kind, says in {
        "link": "symbolic link",
        "pipe": "not a regular file",
        "folder": "not a regular file",
        "large": "larger than 64 KiB",
        "latin": "not UTF-8",
        "nothing": "reward missing",
    }.items():
        with pytest.raises(RewardError, match=says):
            read_reward(places[kind], PROFILE)


@given(raw=st.floats(0, 10))
def test_any_number_in_range_is_read_exactly(tmp_path_factory: pytest.TempPathFactory, raw: float) -> None:
    directory = tmp_path_factory.getbasetemp()
    receipt = read_reward(put(directory, reward_json=json.dumps({"score": raw}), reward_txt=repr(raw)), PROFILE)
    assert receipt.raw == raw and receipt.reward == 2.0 * raw - 1.0


@given(content=st.binary(max_size=200))
def test_any_bytes_give_a_finite_reward_or_a_reward_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    directory = tmp_path_factory.getbasetemp() / "any"
    directory.mkdir(exist_ok=True)
    for name in ("reward.json", "reward.txt"):
        for file in directory.iterdir():
            file.unlink()
        (directory / name).write_bytes(content)
        try:
            receipt = read_reward(directory, WIDE)
        except RewardError:
            continue
        assert math.isfinite(receipt.reward) and receipt.content.encode() == content


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(tree=st.dictionaries(st.sampled_from(["reward", "a", "b"]), JSON, max_size=3) | JSON)
def test_json_is_a_reward_exactly_where_it_is_a_flat_map_of_finite_numbers(
    tmp_path_factory: pytest.TempPathFactory, tree: object
) -> None:
    directory = tmp_path_factory.getbasetemp() / "json"
    directory.mkdir(exist_ok=True)
    (directory / "reward.json").write_text(json.dumps(tree))
    good = isinstance(tree, dict) and "reward" in tree
    for value in tree.values() if isinstance(tree, dict) else ():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        good = good and number and math.isfinite(value)
    if good:
        assert isinstance(tree, dict)
        assert read_reward(directory, WIDE).raw == tree["reward"]
    else:
        with pytest.raises(RewardError):
            read_reward(directory, WIDE)
