"""The page in a real browser: it draws, filters, opens, obeys the keyboard, and asks nobody for anything."""

from __future__ import annotations

import pytest
from browser import PROGRAM, Browser

from orchestrator.campaign.fakesuite import passing, write_suite
from orchestrator.campaign.pretend import everything_passes, pretend_run
from orchestrator.cli import main

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: apt-get install chromium")

NASTY = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def say(planned):
    if planned.id == "dense.aa.eager.pass_1":
        facts = {"margin": 15.5, "failure": {"check": "compare", "row": 1}}
        return {"outcome": "failed", "message": NASTY, "seconds": 0.3, "attnmatrix": facts}
    if planned.known_failure:
        return {"outcome": "known_failure", "message": "as declared", "seconds": 0.1}
    if planned.id.startswith("mla.bb.decode_cg"):
        return None
    return everything_passes(planned)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    home = tmp_path_factory.mktemp("page")
    ids = passing(12, ("aa", "bb", "cc")) + passing(6, ("aa", "cc"), "decode_cg")
    ids += [id.replace("dense.", "mla.", 1) for id in passing(5, ("aa", "bb"), "decode_cg")]
    suite = write_suite(home / "suite", ids, known={"dense.bb.eager.pass_3": ("xfail", None)})
    folder = pretend_run(suite, home / "run", say=say)
    assert main(["report", str(folder.path)]) == 0
    return folder.path / "index.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    tab = Browser(tmp_path_factory.mktemp("browser"))
    yield tab
    tab.close()


@pytest.fixture
def tab(browser, page):
    browser.events.clear()
    browser.open(page)
    yield browser
    assert browser.problems() == []


def cells(tab) -> list[str]:
    return tab.run("[...document.querySelectorAll('#matrix td button')].map(b => b.title)")


def shown(tab) -> str:
    return tab.run("document.getElementById('shown').textContent")


def test_the_matrix_is_drawn_in_the_order_of_the_spec(tab):
    heads = tab.run("[...document.querySelectorAll('#matrix th')].map(h => h.textContent)")
    assert heads == ["eager", "decode_cg", "dense aa", "dense bb", "dense cc", "mla aa", "mla bb"]
    assert cells(tab)[0] == "dense aa, eager: 1 failed, 11 passed"
    assert tab.run("document.querySelectorAll('#matrix .waffle i').length") == 58
    assert tab.run("document.querySelectorAll('.plots rect').length") > 40
    assert tab.run("document.title") == "Attention matrix: not as expected"


def test_filters_narrow_the_matrix_and_stay_in_the_address(tab, page):
    tab.run("form.elements.backend.value = 'bb'; form.dispatchEvent(new Event('input'))")
    assert shown(tab) == "17 of 58 subtests shown"
    assert {cell.split(",")[0] for cell in cells(tab)} == {"dense bb", "mla bb"}
    tab.click("[data-outcome=not_run]")
    assert shown(tab) == "5 of 58 subtests shown"
    fragment = tab.run("location.hash")
    tab.open(page, fragment)
    assert shown(tab) == "5 of 58 subtests shown"
    tab.run("document.querySelector('button[type=reset]').click()")
    tab.run("new Promise(done => setTimeout(done, 20))")
    assert shown(tab) == "58 of 58 subtests shown"


def test_search_by_words_of_the_id(tab):
    tab.run("form.elements.text.value = 'cc pass_1'; form.dispatchEvent(new Event('input'))")
    assert shown(tab) == "4 of 58 subtests shown"  # pass_1, pass_10, pass_11 and decode_cg's pass_1


def test_the_keyboard_is_enough(tab):
    tab.run("document.querySelector('#matrix td button').focus()")
    tab.press("ArrowRight", 39)
    assert tab.run("document.activeElement.title").startswith("dense aa, decode_cg")
    tab.press("ArrowDown", 40)
    assert tab.run("document.activeElement.title").startswith("dense cc, decode_cg"), "an empty cell is passed over"
    tab.press("ArrowLeft", 37)
    tab.press("ArrowUp", 38)
    assert tab.run("document.activeElement.title").startswith("dense bb, eager")
    tab.press("Enter", 13, "\r")
    assert tab.run("dialog.open")
    assert "1 known failure, 11 passed" in tab.run("document.getElementById('detail-title').textContent")
    tab.press("Escape", 27)
    tab.run("new Promise(done => setTimeout(done, 50))")
    assert not tab.run("dialog.open")
    assert tab.run("document.activeElement.title").startswith("dense bb, eager"), "focus returns to the cell"
    tab.press("/", 191, "/")
    assert tab.run("document.activeElement.name") == "text"


def test_a_cell_opens_ids_message_and_command(tab):
    tab.click("#matrix td button")
    first = tab.run("document.querySelector('.subtest').innerText")
    assert "dense.aa.eager.pass_1" in first
    assert "15.5 of its tolerance" in first
    assert NASTY in first, "foreign text is shown as text"
    assert "python -m pytest '" in first
    second = tab.run("document.querySelectorAll('.subtest')[1].innerText")
    assert "python -m orchestrator run --tests" in second
    assert tab.run("document.title") != "owned"
    tab.click("#close")
    assert not tab.run("dialog.open")


def test_colour_by_margin_and_duration(tab):
    before = tab.run("getComputedStyle(document.querySelector('.waffle i:last-child')).backgroundColor")
    tab.run("form.elements.colour.value = 'margin'; form.dispatchEvent(new Event('input'))")
    assert tab.run("getComputedStyle(document.querySelector('.waffle i:last-child')).backgroundColor") != before
    assert tab.run("document.querySelectorAll('.waffle i.loud').length") == 6, "what went wrong stays marked"
    tab.run("form.elements.colour.value = 'duration'; form.dispatchEvent(new Event('input'))")
    assert tab.run("location.hash") == "#colour=duration"


def test_light_and_dark(tab):
    colours = {}
    for scheme in ("light", "dark"):
        tab.scheme(scheme)
        colours[scheme] = tab.run("getComputedStyle(document.body).backgroundColor")
    assert colours["light"] != colours["dark"]
    tab.click("#theme")
    assert tab.run("getComputedStyle(document.body).backgroundColor") == colours["light"]
    tab.scheme("light")
