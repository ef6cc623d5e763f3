"""The command line, as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from spec_tools import ROOT, SMALL, generator, repository, with_one_line


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with the small spec and everything generated."""
    return repository(tmp_path, SMALL.read_text(encoding="utf-8")).parent


def add_case(folder: Path) -> None:
    """One more line in the spec."""
    path = folder / "suite.toml"
    path.write_text(with_one_line(path.read_text()))


def test_list_prints_one_id_per_line(small: Path) -> None:
    run = generator("list", cwd=small)
    ids = run.stdout.splitlines()
    assert run.returncode == 0
    assert len(ids) == len(set(ids)) == 17
    assert "dense.fa3.decode_cg.any_page.prod_fill.x2" in ids
    assert not any(".prefix." in id for id in ids)


def test_list_with_known_failures(small: Path) -> None:
    assert len(generator("list", "--known-failures", cwd=small).stdout.splitlines()) == 25


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (["--sweep", "eager"], 5),
        (["--backend", "native"], 2),
        (["--sweep", "eager", "--sweep", "decode_cg", "--backend", "fa3"], 7),
        (["--profile", "ancestor"], 14),
        (["--method", "dense"], 17),
    ],
)
def test_list_filters(small: Path, options: list[str], count: int) -> None:
    assert len(generator("list", *options, cwd=small).stdout.splitlines()) == count


def test_list_says_the_same_without_the_manifest(small: Path) -> None:
    with_manifest = generator("list", "--known-failures", cwd=small).stdout
    (small / "generated_tests/manifest.json").unlink()
    assert generator("list", "--known-failures", cwd=small).stdout == with_manifest


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 1, "subtests": 3, "profile": "ci"}'])
def test_list_does_not_trust_a_broken_manifest(small: Path, text: str) -> None:
    (small / "generated_tests/manifest.json").write_text(text)
    assert len(generator("list", cwd=small).stdout.splitlines()) == 17


def test_list_follows_the_spec_rather_than_an_old_manifest(small: Path) -> None:
    add_case(small)
    assert "dense.native.eager.page_edge" in generator("list", cwd=small).stdout


def test_list_json_has_every_field(small: Path) -> None:
    rows = json.loads(generator("list", "--json", "--known-failures", cwd=small).stdout)
    assert len(rows) == 25
    assert {"id", "node", "case", "model", "adapter", "fingerprint", "tolerance", "known_failure"} <= rows[0].keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sweep", "eagr"], 'error[E-unknown-sweep]: there is no sweep "eagr"; did you mean "eager"?'),
        (["--backend", "fa5"], 'error[E-unknown-backend]: there is no backend "fa5"; did you mean "fa3"?'),
        (["--profile", "cl"], 'error[E-unknown-profile]: there is no profile "cl"; known are ancestor, ci'),
    ],
)
def test_list_names_the_nearest(small: Path, options: list[str], message: str) -> None:
    run = generator("list", *options, cwd=small)
    assert run.returncode == 1
    assert message in run.stderr


def test_explain(small: Path) -> None:
    run = generator("explain", "dense.fa3.draft_extend_v2_cg.eagle_chain.prefix.prod_fill.x2", cwd=small)
    assert run.returncode == 0
    for part in (
        "suite.toml:",
        "accepted_v2_eagle_chain, DRAFT_EXTEND_V2",
        "prod_fill",
        "fa-prefix",
        "fingerprint",
        "python -m pytest 'generated_tests/test_dense_fa3.py::test_draft_extend_v2_cg[",
    ):
        assert part in run.stdout


def test_explain_names_the_nearest(small: Path) -> None:
    run = generator("explain", "dense.fa3.eager.cross3", cwd=small)
    assert run.returncode == 1
    assert "error[E-unknown-id]" in run.stderr
    assert 'did you mean "dense.fa3.eager.cross2"?' in run.stderr


def test_diff(small: Path) -> None:
    run = generator("diff", "ci", "ancestor", cwd=small)
    assert run.stdout.splitlines() == [
        "-dense.fa3.decode_cg.any_page.small_real.x1",
        "-dense.fa3.decode_cg.any_page.prod_fill.x1",
        "-dense.fa3.decode_cg.any_page.prod_fill.x2",
    ]
    assert generator("diff", "ancestor", "ci", cwd=small).stdout.splitlines()[0].startswith("+dense.fa3")
    assert generator("diff", "ci", "ci", cwd=small).stdout == ""


def test_one_line_more_is_refused_then_pinned_then_clean(small: Path) -> None:
    add_case(small)
    check = generator("check", cwd=small)
    assert check.returncode == 1
    assert "error[E-count]" in check.stderr
    assert "eager: 5 -> 7 (+dense.fa3.eager.page_edge, +dense.native.eager.page_edge)" in check.stderr
    assert generator("generate", cwd=small).returncode == 1
    pinned = generator("generate", "--pin", cwd=small)
    assert pinned.returncode == 0, pinned.stderr
    assert "suite.toml:14: profile ci: subtests = 17 -> 19" in pinned.stdout
    assert generator("check", cwd=small).returncode == 0
    assert "19 subtests must pass" in (small / "README.md").read_text()


def test_pin_edits_nothing_else(small: Path) -> None:
    path = small / "suite.toml"
    before = path.read_text()
    add_case(small)
    edited = path.read_text()
    generator("generate", "--pin", cwd=small)
    assert path.read_text() == edited.replace("subtests = 17", "subtests = 19")
    assert edited != before


def test_another_profile_goes_into_a_folder_of_its_own(small: Path) -> None:
    refused = generator("generate", "--profile", "ancestor", cwd=small)
    assert refused.returncode == 1
    assert "error[E-output]" in refused.stderr
    run = generator("generate", "--profile", "ancestor", "--output", "other", cwd=small)
    assert run.returncode == 0, run.stderr
    assert sorted(path.name for path in (small / "other").iterdir()) == [
        "manifest.json", "test_dense_fa3.py", "test_dense_native.py",
    ]  # fmt: skip
    manifest = json.loads((small / "other/manifest.json").read_text())
    assert manifest["profile"] == "ancestor"
    assert manifest["subtests"][0]["node"].startswith("other/test_dense_native.py::test_eager[")
    assert generator("check", cwd=small).returncode == 0


def test_output_into_a_foreign_folder_is_refused(small: Path) -> None:
    (small / "mine").mkdir()
    (small / "mine/manifest.json").write_text('{"name": "a web application"}')
    run = generator("generate", "--output", "mine", cwd=small)
    assert run.returncode == 1
    assert "error[E-foreign-file]" in run.stderr
    assert [path.name for path in (small / "mine").iterdir()] == ["manifest.json"]
    assert generator("generate", "--output", "suite.toml", cwd=small).returncode == 1


def test_all_errors_go_to_standard_error_with_a_count(small: Path) -> None:
    path = small / "suite.toml"
    path.write_text(
        path.read_text().replace("scale = 0.2", "scale = 1.0").replace('backends = ["native"]', 'backends = ["nativ"]')
    )
    run = generator("check", cwd=small)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.splitlines()[-1] == "2 errors"


def test_errors_lists_every_code(small: Path) -> None:
    from generator.problems import CODES

    listed = [line.split()[0] for line in generator("errors", cwd=small).stdout.splitlines()]
    assert listed == list(CODES)
    assert len(listed) >= 30


def test_a_closed_pipe_is_no_error() -> None:
    run = subprocess.run(
        f"{sys.executable} -m generator list | head -1",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""


@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["check"], ["diff", "ci", "ancestor"]])
def test_torch_is_never_imported(arguments: list[str]) -> None:
    code = (
        "import sys; from generator.cli import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'triton', 'numpy'} & sys.modules.keys(); sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, check=True)


def test_list_reads_the_manifest_alone() -> None:
    """What makes it quick: no library that describes or writes a suite is loaded."""
    code = (
        "import sys; from generator.cli import main; code = main(['list']);"
        "assert not {'jinja2', 'pydantic', 'pytest', 'generator.spec'} & sys.modules.keys(); sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
