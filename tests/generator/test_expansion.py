"""From spec to subtests: counts, ids, fingerprints, and what a value of the spec does to them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_tools import ONE_LINE, ROOT, SMALL, codes_in, errors_of, project_at

from generator.expand import expand
from generator.matrix import Project

SUITE = project_at(ROOT / "suite.toml")


def ids_of(path: Path, profile: str = "ci") -> list[str]:
    """The ids of a spec, known failures too."""
    return [subtest.id for subtest in project_at(path).matrix(profile).subtests]


def variant(folder: Path, *changes: tuple[str, str]) -> Path:
    """The small spec with replacements, its pins removed."""
    text = SMALL.read_text(encoding="utf-8").replace("subtests = 17\nknown_failures = 8\n", "")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = folder / "suite.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_pinned_profiles_hold() -> None:
    for name, profile in SUITE.spec.profiles.items():
        matrix = SUITE.matrix(name)
        assert profile.subtests in (None, matrix.must_pass)
        assert profile.known_failures in (None, matrix.known_failures)


def test_the_ancestor_lacks_what_padding_like_production_added() -> None:
    ours, theirs = ({item.id for item in SUITE.matrix(name).subtests} for name in ("ci", "ancestor"))
    assert theirs < ours
    assert all(".draft_extend_v2_cg." in id for id in ours - theirs)
    assert {id for id in theirs if ".draft_extend_v2_cg." in id} == {
        id for id in ours if ".draft_extend_v2_cg." in id and id.endswith(".small_real.x2")
    }


@pytest.mark.parametrize("profile", SUITE.spec.profiles)
def test_no_two_subtests_share_id_or_inputs(profile: str) -> None:
    subtests = SUITE.matrix(profile).subtests
    assert len({item.id for item in subtests}) == len(subtests)
    assert len({item.fingerprint for item in subtests}) == len(subtests)


def test_ids_are_safe_and_name_method_backend_and_sweep() -> None:
    for subtest in SUITE.matrix("ci").subtests:
        segments = subtest.id.split(".")
        assert segments[:3] == [subtest.method, subtest.backend, subtest.sweep]
        assert all(segment and set(segment) <= set("abcdefghijklmnopqrstuvwxyz0123456789_") for segment in segments)


def test_a_case_of_no_page_size_takes_the_page_size_of_each_backend() -> None:
    pages = {
        (item.backend, item.case.page_size) for item in SUITE.matrix("ci").subtests if item.shape == "decode3_free"
    }
    assert {("triton", 16), ("fa3", 16), ("fa4", 128)} <= pages


def test_one_line_adds_a_case(tmp_path: Path) -> None:
    before = ids_of(variant(tmp_path))
    after = ids_of(variant(tmp_path, ("case = [\n", f"case = [\n{ONE_LINE}")))
    assert set(before) < set(after)
    assert sorted(set(after) - set(before)) == ["dense.fa3.eager.page_edge", "dense.native.eager.page_edge"]


def test_names_do_not_make_a_fingerprint(tmp_path: Path) -> None:
    def prints(path: Path) -> list[str]:
        return [item.fingerprint for item in project_at(path).matrix("ci").subtests]

    before = prints(variant(tmp_path))
    renamed = (('name = "any_page"', 'name = "free"'), ('"@common", "any_page"', '"@common", "free"'))
    after = prints(variant(tmp_path, *renamed, ('cases = ["any_page"]', 'cases = ["free"]')))
    assert before == after


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scale = 0.2", "scale = 0.3"),
        ("head_dim = 64", "head_dim = 96"),
        ("prefix_lens = [15]", "prefix_lens = [31]"),
        ("extend_lens = [2]", "extend_lens = [3]"),
        ("torch_native:TorchNativeBackend", "torch_native:Other"),
        ("extend_lens = [2],", "extend_lens = [2], model = { kv_heads = 2 },"),
    ],
)  # fmt: skip
def test_every_value_of_the_kernel_makes_a_fingerprint(old: str, new: str, tmp_path: Path) -> None:
    def prints(path: Path) -> dict[str, str]:
        return {item.id: item.fingerprint for item in project_at(path).matrix("ci").subtests}

    name = "dense.native.eager.cross2"
    assert prints(variant(tmp_path))[name] != prints(variant(tmp_path, (old, new)))[name]


def test_rides_apply_where_the_backend_has_the_feature(tmp_path: Path) -> None:
    path = variant(
        tmp_path,
        ('extend_lens = [2], page_size = 16,', 'extend_lens = [2], page_size = 16, rides = { softcap = 20.0 },'),
        ("page_size = 128\n", 'features = ["softcap"]\npage_size = 128\n'),
    )  # fmt: skip
    caps = {item.id: item.model.softcap for item in project_at(path).matrix("ci").subtests}
    assert caps["dense.fa3.eager.cross2"] == 20.0
    assert caps["dense.native.eager.cross2"] is None
    assert caps["dense.fa3.eager.decode3"] is None


def test_what_a_backend_lacks_for_a_method_does_not_ride(tmp_path: Path) -> None:
    path = variant(
        tmp_path,
        ('extend_lens = [2], page_size = 16,', 'extend_lens = [2], page_size = 16, rides = { softcap = 20.0 },'),
        ("page_size = 128\n", 'features = ["softcap"]\nlacks.dense = ["softcap"]\npage_size = 128\n'),
    )  # fmt: skip
    assert {item.model.softcap for item in project_at(path).matrix("ci").subtests} == {None}


def test_known_failures_are_attached_to_what_they_match() -> None:
    for at, entry in enumerate(SUITE.spec.known_failure):
        matrix = SUITE.matrix(entry.profile or "ci")
        matched = [item for item in matrix.subtests if item.known_failure is entry]
        assert len(matched) == matrix.matches[at] == entry.count


def test_a_draft_of_one_chain_is_written_out() -> None:
    chain = next(item for item in SUITE.matrix("ci").subtests if item.id.endswith("draft_extend_v2.eagle_chain.total"))
    assert chain.case.speculation is not None
    assert chain.case.speculation.parents == (-1, 0, 1)
    assert chain.case.extend_lens == (3, 3)


SPEC = """
case = [{cases}]
[suite]
format = 1
[profiles.ci]
[methods.dense]
summary = "dense"
q_heads = 4
kv_heads = 4
head_dim = 64
scale = 0.2
tolerance.bfloat16 = {{ atol = 2e-2, rtol = 2e-2 }}
{backends}
[pad_styles]
small_real = {{ summary = "s" }}
prod_fill = {{ summary = "p" }}
[[sweep]]
name = "decode_cg"
summary = "s"
runner = "cuda_graph"
seq_lens = "total"
axes = {{ pad_style = {pads}, multiplier = {multipliers} }}
cell = [{{ method = "dense", backends = {names}, cases = {members}, axes = {{ layout = {layouts} }} }}]
"""
BACKEND = """
[backends.b{number}]
adapter = "kits.backends.some:Backend{number}"
methods = ["dense"]
modes = ["DECODE"]
runners = ["cuda_graph"]
dtype = "bfloat16"
page_size = 16
page_sizes = [16]
"""
LAYOUTS = ("contiguous", "shuffled_pages", "interleaved_pages", "non_monotonic_extend")


LENGTHS = st.lists(st.integers(1, 99), min_size=1, max_size=4).map(tuple)


def listed(values: object) -> str:
    """A Python list as a TOML array."""
    return repr(list(values)).replace("'", '"')  # type: ignore[call-overload]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    backends=st.integers(1, 3),
    lengths=st.lists(
        st.lists(st.integers(1, 99), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5, unique=True
    ),
    pads=st.sets(st.sampled_from(["small_real", "prod_fill"]), min_size=1).map(sorted),
    multipliers=st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=1, unique=True),
)
def test_a_cell_is_the_product_of_its_axes(
    tmp_path: Path,
    backends: int,
    lengths: list[tuple[int, ...]],
    pads: list[str],
    multipliers: list[int],
    layouts: list[str],
) -> None:
    names = [f"c{number}" for number in range(len(lengths))]
    cases = ", ".join(
        f'{{ name = "{name}", mode = "DECODE", prefix_lens = {list(lens)} }}'
        for name, lens in zip(names, lengths, strict=True)
    )
    spec = SPEC.format(
        cases=cases,
        backends="".join(BACKEND.format(number=number) for number in range(backends)),
        pads=listed(pads),
        multipliers=multipliers,
        names=listed(f"b{number}" for number in range(backends)),
        members=listed(names),
        layouts=listed(layouts),
    )
    path = tmp_path / "suite.toml"
    path.write_text(spec if len(pads) == 2 else unused_pad_removed(spec, pads), encoding="utf-8")
    subtests = expand(Project.open(path).index, "ci")
    wanted = itertools.product(range(backends), names, layouts, pads, multipliers)
    assert [item.id for item in subtests] == [
        f"dense.b{number}.decode_cg.{name}.{layout}.{pad}.x{multiplier}"
        for number, name, layout, pad, multiplier in wanted
    ]
    assert len({item.fingerprint for item in subtests}) == len(subtests)


def unused_pad_removed(spec: str, pads: list[str]) -> str:
    """The spec without the pad style that no sweep uses, which would be an error."""
    return "\n".join(
        line
        for line in spec.split("\n")
        if not line.startswith(("small_real", "prod_fill")) or line.startswith(pads[0])
    )


def test_a_page_size_that_a_backend_lacks_is_an_error(tmp_path: Path) -> None:
    path = variant(
        tmp_path, ("page_sizes = [1, 16]", "page_sizes = [16]"), ("page_size = 16, sets", "page_size = 1, sets")
    )
    assert "E-backend-page" in codes_in(errors_of(path))


def test_the_samples_of_the_readme_fit_the_suite(tmp_path: Path) -> None:
    """A backend and its two cells, and a known failure, pasted as they stand there."""
    samples = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    backend = next(text for text in samples if text.startswith("[backends.mine]"))
    eager, decode = next(text for text in samples if 'backends = ["mine"]' in text).splitlines()
    known = next(text for text in samples if "my-backend-drops-sinks" in text)
    spec = (ROOT / "suite.toml").read_text(encoding="utf-8")
    for sweep, cell in (("eager", eager), ("decode_cg", decode)):
        at = spec.index("cell = [\n", spec.index(f'name = "{sweep}"\n')) + len("cell = [\n")
        spec = spec[:at] + cell + "\n" + spec[at:]
    spec = re.sub(r"^(subtests|known_failures) = \d+\n", "", spec, flags=re.M) + "\n" + backend + "\n" + known
    path = tmp_path / "suite.toml"
    path.write_text(spec, encoding="utf-8")
    mine = [item for item in project_at(path).matrix("ci").subtests if item.backend == "mine"]
    assert len(mine) == 13 + 6
    assert [item.id for item in mine if item.known_failure is not None] == ["dense.mine.eager.decode3"]
