"""Strings of a hostile spec stay data: in Python, in Markdown, in JSON, and in paths."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_tools import SMALL, codes_in, errors_of, repository

from generator.literals import Call, Ref, source, string
from generator.tables import inline

PAYLOAD = """'''"); __import__('os').system('touch owned') #\\"""
HOSTILE = [
    PAYLOAD,
    '"""\nimport os\nos.system("touch owned")\n"""',
    "{{ 7 * 7 }}{% raw %}",
    "a\nb\r\n\tc\x00\x1b[31m",
    "\u202e\u2028\ud7ff\U0001f600",
    "| cell | <script>alert(1)</script> [x](javascript:1) `code` ",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_reason_is_inert(text: str, tmp_path: Path) -> None:
    spec = SMALL.read_text(encoding="utf-8")
    quoted = json.dumps(text).replace("\\ud83d\\ude00", "\\U0001f600")
    for key in ("reason", "root_cause", "required_change"):
        line = next(line for line in spec.split("\n") if line.startswith(f"{key} = "))
        spec = spec.replace(line, f"{key} = {quoted}")
    spec = spec.replace('summary = "replayed decode"', f"summary = {quoted}")
    path = repository(tmp_path, spec)
    module = ast.parse((path.parent / "generated_tests/test_dense_fa3.py").read_text())
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    assert {ast.unparse(node.func) for node in calls} <= {
        "Case", "KnownFailure", "Model", "Native", "Speculation", "Tolerance", "partial", "pytest.mark.parametrize",
        "replace", "run", "eager", "decode_cg", "draft_extend_v2_cg", "draft_extend_v2_x4",
    }  # fmt: skip
    reasons = [
        ast.literal_eval(keyword.value) for node in calls for keyword in node.keywords if keyword.arg == "reason"
    ]
    assert reasons == [text]
    for name in ("README.md", "KNOWN_FAILURES.md"):
        written = (path.parent / name).read_text()
        assert "<script>" not in written.replace("\\<script\\>", "")
        assert "](javascript" not in written.replace("\\](javascript", "")
    assert json.loads((path.parent / "generated_tests/manifest.json").read_text())["counts"]["must_pass"] == 17


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('name = "cross2"', 'name = "x\\"); import os #"'),
        ('name = "decode_cg"', 'name = "../../decode"'),
        ("[backends.native]", '[backends."native\\nimport os"]'),
        ("[methods.dense]", '[methods."/etc/passwd"]'),
        ("torch_native:TorchNativeBackend", 'torch_native:Torch\\"\\nimport os'),
        ('id = "fa-prefix"', 'id = "fa\\nprefix"'),
        ("[pad_styles.small_real]", '[pad_styles."small real"]'),
        ("[speculations.eagle_chain]", '[speculations."é"]'),
    ],
)
def test_hostile_names_are_refused(old: str, new: str, tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    text = SMALL.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    assert {"E-unsafe-name", "E-bad-adapter"} & set(codes_in(errors_of(path)))


@given(st.text())
def test_strings_survive_as_literals(text: str) -> None:
    assert ast.literal_eval(string(text)) == text
    assert "\n" not in string(text)


VALUES = st.recursive(
    st.text(max_size=60) | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple),
    max_leaves=12,
)


@given(VALUES, st.integers(0, 100))
def test_values_survive_as_source(value: object, indent: int) -> None:
    assert ast.literal_eval(source(value, indent=indent)) == value


@given(st.dictionaries(st.sampled_from("abcdefgh"), VALUES, max_size=5))
def test_keywords_survive_as_source(keywords: dict[str, object]) -> None:
    call = ast.parse(source(Call("f", keywords, (Ref("X"),))), mode="eval").body
    assert isinstance(call, ast.Call)
    assert ast.unparse(call.args[0]) == "X"
    assert {item.arg: ast.literal_eval(item.value) for item in call.keywords} == keywords


@given(st.text())
def test_markdown_stays_on_its_line(text: str) -> None:
    shown = inline(text)
    assert "\n" not in shown
    assert "\r" not in shown
    for at, character in enumerate(shown):
        if character in "|<>`[]*":
            assert shown[at - 1] == "\\"
