"""What the tools for wheels and for the matrix decide; neither builds anything here."""

import pytest

import make_wheel
import matrix


def test_the_wheels_version_names_its_torch():
    assert make_wheel.local_version("2.13.0+cpu") == "+torch2.13.0.cpu"
    assert make_wheel.local_version("2.12.1") == "+torch2.12.1"


def test_a_command_that_fails_ends_the_wheel():
    with pytest.raises(SystemExit, match="wheel: failed with 1: false"):
        make_wheel.run(["false"])


def test_commands_do_not_see_the_checkout(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    make_wheel.run(["sh", "-c", 'test -z "$PYTHONPATH"'])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("....\n12 passed in 3.45s\n", "12 passed"),
        ("=== 1 failed, 12 passed, 2 skipped in 61.20s (0:01:01) ===\n", None),
        ("1 failed, 12 passed in 61.20s (0:01:01)\n", "1 failed, 12 passed"),
        ("no tests\n", ""),
    ],
)
def test_counts_are_those_of_pytest(text, expected):
    found = "1 failed, 12 passed, 2 skipped" if expected is None else expected
    assert matrix.counts(text) == found


def test_the_matrix_goes_on_where_it_stopped(monkeypatch, tmp_path, capsys):
    asked = []

    def pair(python, torch):
        asked.append(torch)
        state = "failed" if torch == "2.12" else "passed"
        return {"state": state, "what": "1 passed"}

    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    monkeypatch.setattr(matrix, "pair", pair)
    assert matrix.main(["--python", "3.11", "--torch", "2.12", "2.13"]) == 1
    assert "python 3.11, torch 2.12: failed, 1 passed" in capsys.readouterr().out
    assert matrix.main(["--python", "3.11", "--torch", "2.12", "2.13"]) == 1
    assert asked == ["2.12", "2.13", "2.12"]


def test_pairs_of_another_call_meanwhile_stay_in_the_table(monkeypatch, tmp_path):
    def pair(python, torch):
        if torch == "2.12":
            matrix.main(["--python", "3.11", "--torch", "2.13"])
        return {"state": "passed", "what": "1 passed"}

    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    monkeypatch.setattr(matrix, "pair", pair)
    matrix.main(["--python", "3.11", "--torch", "2.12"])
    kept = tmp_path / "matrix.json"
    assert set(matrix.read(kept)) == {
        f"python 3.11, torch {t}" for t in ("2.12", "2.13")
    }
    matrix.main(["--python", "3.11", "--torch", "2.13", "--again"])
    assert set(matrix.read(kept)) == {"python 3.11, torch 2.13"}


def test_a_python_that_is_missing_is_no_failure(monkeypatch, tmp_path):
    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    assert matrix.main(["--python", "3.99", "--torch", "2.13"]) == 0
    assert "no python3.99" in (tmp_path / "matrix.json").read_text()


def test_the_tests_of_the_matrix_exist():
    assert all((matrix.ROOT / path).exists() for path in matrix.TESTS)


def test_what_a_command_prints_is_shown_unless_it_fails():
    assert matrix.shown(["echo", "2.13.0"]) == "2.13.0"
    assert matrix.shown(["sh", "-c", "echo 2.13.0; false"]) == ""
