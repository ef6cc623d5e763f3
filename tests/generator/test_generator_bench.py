"""The benchmark measures what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from generator.bench import PER_CASE, expand_once, main, said, synthetic


@pytest.mark.parametrize("count", [1, PER_CASE, PER_CASE + 1])
def test_a_synthetic_spec_has_at_least_as_many_subtests(count: int, tmp_path: Path) -> None:
    spec = tmp_path / "synthetic.toml"
    spec.write_text(synthetic(count), encoding="utf-8")
    figures = expand_once(spec)
    assert count <= figures["subtests"] < count + PER_CASE
    assert figures["peak_mb"] > 1


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "4000", "--repeat", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split(" of ")[0] for line in lines] == [
        "medians",
        "expand 1200 subtests",
        "expand 2000 subtests",
        "expand 4000 subtests",
        "generate the tests",
        "check",
        "list",
    ]


def test_medians() -> None:
    assert said([3.0, 1.0, 2.0], "s") == "2.00 s (1.00 to 3.00)"
