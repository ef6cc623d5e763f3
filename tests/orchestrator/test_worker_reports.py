"""From pytest's reports and the kit's facts to one outcome: doubt never ends in ``passed``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kits import KnownFailure
from kits.errors import MismatchError
from kits.pytest_plugin import pytest_runtest_makereport
from orchestrator.worker_plugin import clip, conclude, recordable
from tests.kits.subtests import make

JOB = {"id": "dense.aa.eager.one", "action": None}
FACTS = {"id": JOB["id"], "outcome": "passed", "failure": None}


def report(when="call", outcome="passed", longrepr=None):
    return SimpleNamespace(
        when=when, passed=outcome == "passed", failed=outcome == "failed", skipped=outcome == "skipped",
        longrepr=longrepr, sections=[],
    )  # fmt: skip


def phases(call="passed", setup="passed", teardown="passed", longrepr="boom"):
    return [
        report("setup", setup, longrepr), report("call", call, longrepr), report("teardown", teardown, longrepr),
    ]  # fmt: skip


def test_a_pass_is_a_pass():
    assert conclude(JOB, phases(), FACTS) == ("passed", "")


@pytest.mark.parametrize(
    ("facts", "reports", "words"),
    [
        (None, phases(), "nothing was checked"),
        (None, phases("skipped", longrepr=("f", 1, "Skipped: because")), "skipped without a typed reason: because"),
        (FACTS, phases(teardown="failed"), "in teardown"),
        (None, phases(setup="failed"), "in setup"),
        (FACTS | {"id": "dense.aa.eager.two"}, phases(), "result of another one"),
        (FACTS | {"outcome": "green"}, phases(), "no outcome"),
        (FACTS | {"outcome": ["passed"]}, phases(), "no outcome"),
        (FACTS | {"outcome": "crashed"}, phases(), "no outcome"),
        (FACTS | {"outcome": "unavailable"}, phases("skipped"), "without a typed reason"),
        (FACTS | {"outcome": "unavailable", "unavailable_kind": "memory"}, phases("skipped"), "typed reason"),
        (FACTS | {"outcome": "known_failure"}, phases("skipped"), "the plan knows no such entry"),
        (FACTS | {"outcome": "skipped_known"}, phases("skipped"), "the plan knows no such entry"),
        (FACTS, phases("failed"), "boom"),
    ],
)
def test_doubt_is_a_failure(facts, reports, words):
    outcome, message = conclude(JOB, reports, facts)
    assert outcome == "failed"
    assert words in message


def test_typed_outcomes_pass_through():
    facts = FACTS | {"outcome": "unavailable", "unavailable_kind": "no_device"}
    calls = [report("setup"), report("call", "skipped", ("f", 1, "no GPU")), report("teardown")]
    assert conclude(JOB, calls, facts) == ("unavailable", "no GPU"), "the phase that was skipped says why"
    known = {"id": JOB["id"], "action": "xfail"}
    assert conclude(known, phases("skipped"), FACTS | {"outcome": "known_failure"})[0] == "known_failure"
    facts = FACTS | {"outcome": "unexpected_pass"}
    assert conclude(known, phases("failed"), facts)[0] == "unexpected_pass"
    assert conclude(known, phases("passed", teardown="failed"), facts)[0] == "failed"


def test_a_known_failure_that_fails_otherwise_says_so_first():
    """As the kit itself reports it, in its facts."""
    entry = KnownFailure(id="entry", action="xfail", kind="bug", reason="a reason", max_abs=(0.5, 1.0))
    subtest = make("x:y", known_failure=entry)
    error = MismatchError("row 1 differs", max_abs=0.3655, wrong=0.8, margin=9.0, row=1)
    item = SimpleNamespace(callspec=SimpleNamespace(params={"subtest": subtest}))
    call = SimpleNamespace(excinfo=SimpleNamespace(value=error))
    hook = pytest_runtest_makereport(item, call)
    next(hook)
    bare = report("call", "failed", "Traceback\n\nMismatchError: row 1 differs")
    bare.user_properties = []
    with pytest.raises(StopIteration) as done:
        hook.send(bare)
    made = done.value.value
    facts = made.user_properties[0][1]
    job = {"id": subtest.id, "action": "xfail"}
    outcome, message = conclude(job, [made], facts | {"id": subtest.id})
    assert outcome == "failed"
    sentence = "not the known failure 'entry' it is declared as: max_abs is 0.3655, outside the stated range 0.5 to 1"
    assert message.splitlines() == [sentence, f"{error.check}: row 1 differs"]
    plain = conclude(job | {"action": None}, [made], facts | {"id": subtest.id})
    assert plain == ("failed", f"{error.check}: row 1 differs"), "only where the plan knows an entry"


def test_an_unexpected_pass_is_said_once():
    """The report's line begins with it."""
    said = "unexpected pass: it is declared as known failure 'entry' but passes; delete this entry"
    facts = FACTS | {"outcome": "unexpected_pass", "failure": {"check": "unexpected_pass", "message": said}}
    job = {"id": JOB["id"], "action": "xfail"}
    words = "it is declared as known failure 'entry' but passes; delete this entry"
    assert conclude(job, phases("failed"), facts) == ("unexpected_pass", words)
    assert conclude(job, phases("failed", longrepr=said), facts | {"failure": None})[1] == words


def test_the_check_is_named_with_the_message():
    facts = FACTS | {"outcome": "failed", "failure": {"check": "kv_integrity", "message": "slot 7 changed"}}
    assert conclude(JOB, phases("failed"), facts) == ("failed", "kv_integrity: slot 7 changed")


def test_facts_that_cannot_be_recorded():
    loop: dict = {}
    loop["loop"] = loop
    assert not recordable(loop)
    assert recordable({("a", "b"): 1, "x": object(), "y": float("nan")})


def test_long_texts_keep_both_ends():
    text = clip("a" * 500 + "b" * 500, 300)
    assert text.startswith("a")
    assert text.endswith("b")
    assert len(text) < 330
