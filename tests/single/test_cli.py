"""The command line: every wrong value is one line on stderr and exit code 2; options, files and defaults agree."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_cifar import cli, config
from hvd_cifar.errors import UserError
from hvd_cifar.fields import read_file
from tests.ranks import CHECKOUT, environment, mpirun

# A command, and then options of it that are wrong: alone, or together.
WRONG_LINES = """
| | no-such-command | benchmark | benchmark speed
train | --model vgg | --dataset mnist | --batch-size 0 | --batch-size many | --batch-size 1.5 | --global-batch-size -8
train | --batch-size 8 --global-batch-size 16 | --epochs 0 | --epochs 1e308 | --epochs 1e-9 | --epochs nan
train | --clip-norm 1e-300 | --set warmup_epochs=5 --epochs 1 | --max-steps 99999999999999999999999 | --max-steps 0
train | --threads-per-rank 1000000 | --learning-rate 0 | --learning-rate nan | --config ''
train | --set ema_decay=1 | --set lookahead=5 | --set image_scales=0.5,0 | --set momentum=0.9 | --set weight_decay
train | --set augmentation=none | --set learning_rate_factor=0 | --callbacks mine | --callbacks a.py:A, | --seed -1
train | --seed 9223372036854775808 | --precision int8 | --gradient-accumulation 0 | --overlap some
train | --compression bf17 | --bucket-bytes 0 | --bucket-bytes 64KiB --overlap off | --virtual-shards 0
train | --virtual-shards 6 | --virtual-shards 4 --gradient-accumulation 2 | --virtual-shards 4 --sync-batch-norm
train | --virtual-shards 4 --compression fp16 | --virtual-shards 4 --no-deterministic | --check-sync-every -1
train | --deterministic=1 | --record-examples=yes | --quiet=yes | --log-every 0 | --hold-out 0
train | --config /proc/no/file.json | --no-such-option 1 | --batch-size
train | surplus | --image-size 0x64 | --image-size wide | --max-unreadable -1
train | --stall-seconds -1 | --data-dir ~nobody-of-this-name/x | --resume '' | --run-dir ''
evaluate | | --run-dir r --dataset mnist | --run-dir r --model vgg
export | | r | r --to ''
predict | r | '' x.png | r '' | r x.png --json=1
report | | '' | r --output ''
benchmark step | --image-size 5000 | --steps 0 | --json '' | --bucket-bytes 1X | --min-efficiency 90
benchmark allreduce | --max-bytes 2 | --max-bytes 4Q | --max-bytes many | --factor 1
doctor | --hostfile '' | --hostfile f --hosts a:1 | -np 0 | --allreduce tree | --probe-timeout 0
doctor | --job-timeout soon | --json=x | --no-such-option
doctor-job | surplus
"""
WRONG = [
    shlex.split(f"{command} {options}")
    for line in WRONG_LINES.strip().splitlines()
    for command, *parts in [line.split("|")]
    for options in parts
]
WRONG += [["evaluate", "--run-dir", "a\0b"], ["train", "--run-dir", "caf\udce9"], ["train", "--log-every", "9" * 5000]]


@pytest.mark.parametrize("argv", WRONG, ids=lambda argv: " ".join(argv) or "nothing")
def test_a_wrong_value_is_one_line_and_code_2(argv: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.check(argv)
    out, err = capfd.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert len(err.splitlines()) == 1 and err.startswith("hvd_cifar: ") and len(err) < 200
    wrong = [word for word in argv if word.startswith("--")]
    assert not wrong or any(word.partition("=")[0] in err for word in wrong)


def _help(argv: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.check(argv)
    assert ended.value.code == 0
    return str(capfd.readouterr().out)


def test_help_of_train_shows_what_most_people_need_and_help_all_the_rest(capfd: pytest.CaptureFixture[str]) -> None:
    assert all(_help(argv, capfd) for argv in (["--help"], ["doctor", "--help"], ["evaluate", "-h"], ["--version"]))
    text, whole = _help(["train", "--help"], capfd), _help(["train", "--help-all"], capfd)
    named = [config.option_name(name) for names in cli.HELP_OF_TRAIN.values() for name in names if name != "help"]
    assert len(named) == 21 and re.findall(r"^  (--[a-z-]+)", text, re.M) == named and "\nRanks:\n" in text
    assert all(config.option_name(field) in whole for field in config.TrainSettings.model_fields)
    text = " ".join(text.split())
    assert "order of the data and the augmentation. [default: 0]" in text and "[default: ]" not in text


@pytest.mark.parametrize(("lacking", "said"), [("12", "rank 1: "), ("012", "")])
def test_a_file_that_is_wrong_on_one_host_is_told_once(lacking: str, said: str, tmp_path: Path) -> None:
    """Of three ranks the last two have a wrong file, or all. With a right file rank 0 waits."""
    (tmp_path / "settings.json").write_text('{"seed": -1}')
    grace = 4 if said else 60  # rank 1 waits for all of it; rank 0 ends the job at once
    program = f"from hvd_cifar import cli; cli.GRACE_SECONDS = {grace}; "
    program += "cli.main(['train', '--config', 'settings.json'])"
    rank = "export OMPI_COMM_WORLD_LOCAL_RANK=$((OMPI_COMM_WORLD_RANK / 2)); "  # of two hosts
    rank += f'case $OMPI_COMM_WORLD_RANK in [{lacking}]) exec {sys.executable} -c "$0";; esac; exec sleep 60'
    words = [*mpirun(3), "sh", "-c", rank, program]
    env = environment({"PYTHONPATH": str(CHECKOUT)})
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, env=env, cwd=tmp_path)
    told = [line for line in done.stderr.splitlines() if line.startswith("hvd_cifar: ")]
    assert done.returncode == 2 and len(told) == 1 and told[0].startswith(f"hvd_cifar: {said}--seed -1: "), done.stderr


def test_options_outdo_the_file(tmp_path: Path) -> None:
    values = {"model": "resnet32", "batch_size": 64, "learning-rate": 0.25, "deterministic": False}
    (file := tmp_path / "settings.json").write_text(json.dumps(values))
    alone = cli.check(["train", "--config", str(file)])
    assert (alone.model, alone.batch_size, alone.learning_rate, alone.deterministic) == ("resnet32", 64, 0.25, False)
    options = ["--global-batch-size", "96", "--model", "tutorial", "--deterministic"]
    outdone = cli.check(["train", "--config", str(file), *options])
    assert (outdone.model, outdone.batch_size, outdone.global_batch_size) == ("tutorial", None, 96)
    assert outdone.deterministic and not cli.check(["train", *options, "--no-deterministic"]).deterministic


def test_a_run_s_config_reads_back_the_same(tmp_path: Path) -> None:
    given = {"model": "resnet56", "image_size": "8x9", "set": ("image_scales=0.5,1",), "callbacks": "a.py:A,b.c:D"}
    made = config.make(config.TrainSettings, {**given, "run_dir": str(tmp_path)})
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**made.model_dump(mode="json"), "run": {"world_size": 2}}))
    assert cli.check(["train", "--config", str(file)]) == made


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "\0", f'{{"seed": {"9" * 5000}}}', "[" * 100_000])
def test_a_bad_file_is_one_line(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "bad.json").write_text(text)
    with pytest.raises(UserError, match="--config") as raised:
        read_file(file)
    assert len(str(raised.value).splitlines()) == 1 and len(str(raised.value)) < 300


def test_a_file_without_an_end_is_not_read(tmp_path: Path) -> None:
    huge, pipe = tmp_path / "huge", tmp_path / "pipe"
    huge.touch()
    os.truncate(huge, 1 << 40)  # a hole: it takes no disk, and is not read to its end
    os.mkfifo(pipe)  # which does not block
    for place, why in ((huge, "has more than 16,777,216 bytes"), (pipe, "pipe: it is no regular file; give a JSON")):
        with pytest.raises(UserError, match=why):
            read_file(place)


def test_numbers_of_a_recipe_are_set_by_name() -> None:
    found = cli.check(["train", "--set", "weight_decay=0", "--set", "image_scales=0.75,1"])
    assert found.set.model_dump(exclude_none=True) == {"weight_decay": 0.0, "image_scales": (0.75, 1.0)}
    for name, given, words in (
        ("set", ("momentum=0.9",), "--set momentum is no setting"),
        ("set", ("ema_decay=1",), "--set ema_decay 1: input should be less than 1"),
        ("set", ("lookahead",), "write NAME=VALUE, such as weight_decay=0, not lookahead"),
        ("modle", "tutorial", "--modle is no setting"),
    ):
        with pytest.raises(UserError, match=words):
            config.make(config.TrainSettings, {name: given})
