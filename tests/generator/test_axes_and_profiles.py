"""Axes that change model and case, sweeps of some profiles only, and profiles that cover all pairs."""

from __future__ import annotations

import ast
import itertools
from collections import defaultdict
from pathlib import Path

import pytest
from spec_tools import ROOT, SMALL, generator, project_at, repository

from generator.covering import axis_values_of, covering
from generator.expand import PLAN_AXES, SHAPE_AXES
from generator.spec import Axes
from generator.subtests import Subtest

FA3 = '{ method = "dense", backends = ["fa3"], cases = ["any_page"] },'
SUITE = project_at(ROOT / "suite.toml")


def with_axes(axes: str, *changes: tuple[str, str]) -> str:
    """The small spec without pins, its sweep decode_cg crossed with more axes."""
    text = SMALL.read_text(encoding="utf-8").replace("subtests = 17\nknown_failures = 8\n", "")
    for old, new in ((FA3, FA3.replace("] },", f"], axes = {{ {axes} }} }},")), *changes):
        assert old in text
        text = text.replace(old, new, 1)
    return text


def subtests_of(folder: Path, spec: str, profile: str = "ci") -> list[Subtest]:
    path = folder / "suite.toml"
    path.write_text(spec, encoding="utf-8")
    return project_at(path).matrix(profile).subtests


FLOAT16 = (
    ("page_sizes = [16, 128]", 'page_sizes = [16, 128]\ndtypes = ["float16"]'),
    ("rtol = 2e-2 }\n", "rtol = 2e-2 }\ntolerance.float16 = { atol = 4e-3, rtol = 4e-3 }\n"),
)


def test_every_axis_is_crossed_in_the_order_of_an_id() -> None:
    assert tuple(Axes.model_fields) == SHAPE_AXES + PLAN_AXES


def test_shape_axes_change_model_and_case(tmp_path: Path) -> None:
    axes = 'heads = ["8:1", "6:3"], head_dim = [96], dtype = ["float16"], page_size = [16, 128]'
    made = [item for item in subtests_of(tmp_path, with_axes(axes, *FLOAT16)) if item.sweep == "decode_cg"]
    assert len(made) == 2 * 2 * 4
    chosen = next(
        item for item in made if item.id == "dense.fa3.decode_cg.any_page.q8_kv1.d96.float16.p16.prod_fill.x2"
    )
    model = chosen.model
    assert (model.q_heads, model.kv_heads, model.head_dim, model.v_head_dim) == (8, 1, 96, 96)
    assert (model.dtype, chosen.tolerance.atol, chosen.case.page_size) == ("float16", 4e-3, 16)
    assert len({item.fingerprint for item in made}) == len(made)


def test_a_module_of_several_dtypes_states_each_tolerance(tmp_path: Path) -> None:
    path = repository(tmp_path, with_axes('dtype = ["bfloat16", "float16"]', *FLOAT16))
    text = (path.parent / "generated_tests/test_dense_fa3.py").read_text()
    assert "\nTOLERANCE = Tolerance(atol=0.02, rtol=0.02)\nTOLERANCE_FLOAT16 = Tolerance(atol=0.004" in text
    assert "MODEL_FLOAT16 = replace(MODEL, dtype='float16')".replace("'", '"') in text
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        given = {item.arg: ast.unparse(item.value) for item in call.keywords}
        if given.get("model") in ("MODEL", "MODEL_FLOAT16") and "tolerance" in given:
            assert given["tolerance"].endswith("16") == given["model"].endswith("16")


def test_a_case_at_two_page_sizes_has_two_names(tmp_path: Path) -> None:
    path = repository(tmp_path, with_axes("page_size = [16, 128]"))
    text = (path.parent / "generated_tests/test_dense_fa3.py").read_text()
    assert "\nANY_PAGE = Case(" in text
    assert "\nANY_PAGE_P16 = Case(" in text


def test_a_sweep_of_one_profile_is_in_no_other(tmp_path: Path) -> None:
    spec = SMALL.read_text(encoding="utf-8").replace("subtests = 17\nknown_failures = 8\n", "")
    spec = spec.replace('name = "decode_cg"\n', 'name = "decode_cg"\nprofiles = ["long"]\n')
    more = '[profiles.long]\nextends = "ci"\n[profiles.longer]\nextends = "long"'
    spec = spec.replace('collapse = ["decode_cg"]', more)

    def has_it(profile: str) -> bool:
        return any(item.sweep == "decode_cg" for item in subtests_of(tmp_path, spec, profile))

    assert [has_it(name) for name in ("ci", "ancestor", "long", "longer")] == [False, False, True, True]


def pairs_of(subtests: list[Subtest]) -> set[object]:
    return {pair for item in subtests for pair in itertools.combinations(enumerate(axis_values_of(item)), 2)}


FEATURE_IN_USE = {
    "softcap": lambda model: model.softcap is not None,
    "sinks": lambda model: model.sinks,
    "kv_scales": lambda model: model.k_scale != model.v_scale,
}


def test_every_feature_of_a_backend_is_in_use_in_every_forward_mode() -> None:
    """A backend that forgets its cap in verify alone would pass a suite that caps scores in extend alone."""
    models = defaultdict(list)
    for item in SUITE.matrix("ci").subtests:
        models[item.method, item.backend, item.case.mode].append(item.model)
    unused = {
        (place, feature)
        for place, seen in models.items()
        for feature in SUITE.spec.backends[place[1]].features_for(place[0]) & FEATURE_IN_USE.keys()
        if not any(FEATURE_IN_USE[feature](model) for model in seen)
    }
    assert not unused


def test_where_tokens_can_be_scattered_they_are_under_a_graph_too() -> None:
    """A replay that writes pages out as slots is right wherever the slots of a page are in order."""
    graphs = [item for item in SUITE.matrix("ci").subtests if item.runner != "eager"]
    assert {item.backend for item in graphs if item.layout == "non_monotonic_extend"} == {"triton", "flashinfer"}


@pytest.mark.parametrize("profile", [name for name, item in SUITE.spec.profiles.items() if item.cover])
def test_a_covering_profile_holds_every_pair_of_what_it_extends(profile: str) -> None:
    above = SUITE.spec.profiles[profile].extends
    assert above is not None
    ours, theirs = SUITE.matrix(profile).subtests, SUITE.matrix(above).subtests
    assert {item.id for item in ours} < {item.id for item in theirs}
    assert pairs_of(ours) == pairs_of(theirs)
    assert all(pairs_of([item for item in ours if item is not other]) < pairs_of(ours) for other in ours)


def test_covering_depends_on_nothing_but_the_subtests() -> None:
    everything = SUITE.matrix("ci").subtests
    first = [item.id for item in covering(everything)]
    assert first == [item.id for item in covering(list(everything))]
    assert first == [item.id for item in everything if item.id in set(first)]


def test_covering_takes_the_cheapest_of_subtests_that_look_alike(tmp_path: Path) -> None:
    many = subtests_of(tmp_path, SMALL.read_text(encoding="utf-8"))
    dear = [item._replace(weight=9.0, id=f"{item.id}.dear") for item in many]
    assert not any(item.id.endswith(".dear") for item in covering([*dear, *many]))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_covering_of_hardly_anything(count: int, tmp_path: Path) -> None:
    some = subtests_of(tmp_path, SMALL.read_text(encoding="utf-8"))[:count]
    assert covering(some) == some


def test_the_library_is_imported_by_covering_profiles_only(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys; from generator.cli import main; main(sys.argv[1:]); print('covertable' in sys.modules)"
    folder = repository(tmp_path, SMALL.read_text(encoding="utf-8")).parent
    run = subprocess.run(
        [sys.executable, "-c", code, "--spec", str(folder / "suite.toml"), "check"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.splitlines()[-1] == "False"
    assert generator("check", cwd=folder).returncode == 0
