"""The page at `/`: its headers, and a chat in a real browser (serving 9e, the issue's item 8)."""

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from k3_serve.testing import Script

ANSWER = (
    "why not<|close|>think<|sep|><|open|>response<|sep|>{}<|close|>response<|sep|>{}<|end_of_msg|>"
)
CALL = (
    '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|>'
    '<|open|>argument key="at" type="string"<|sep|>sky<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>"
)
MARKUP = '<img src=x onerror="document.title=1"><script>document.title=2</script> \u00fc \U0001f642'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

spec = importlib.util.spec_from_file_location("browser", Path(__file__).parent / "browser.py")
browser_module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(browser_module)


@pytest.fixture
def browser(tmp_path):  # type: ignore[no-untyped-def]
    program = browser_module.find_browser()
    if program is None:
        assert not os.environ.get("K3_REQUIRE_BROWSER"), "install chromium: this run must have it"
        pytest.skip("chromium is not installed")
    found = browser_module.Browser(program, tmp_path / "profile")
    yield found
    found.close()


@pytest.mark.parametrize("path", ["/", "/page/style.css", "/page/chat.js"])
def test_the_files_come_with_a_strict_policy(api, path) -> None:  # type: ignore[no-untyped-def]
    response = api.request("GET", path)
    assert response.status_code == 200
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    # Nothing of another server, no inline script, nothing that takes text for markup.
    assert not re.search(
        r"https?://|innerHTML|outerHTML|insertAdjacentHTML|\son\w+=", response.text
    )
    assert not re.search(r"<script(?![^>]*src=)", response.text)


def ask(browser, text: str, number: int) -> str:  # type: ignore[no-untyped-def]
    """Types a question, sends it with Enter, and waits for the end of answer `number`."""
    browser.evaluate(f"document.getElementById('text').value = {json.dumps(text)}")
    browser.evaluate(
        "document.getElementById('text').dispatchEvent(new KeyboardEvent('keydown',"
        " {key: 'Enter', bubbles: true, cancelable: true}))"
    )
    last = f"document.querySelectorAll('article.assistant')[{number}]"
    browser.wait_for(f"{last}?.dataset.done")
    return last


def test_a_chat_in_a_browser(browser, url, engine, script) -> None:  # type: ignore[no-untyped-def]
    engine.scripts = [script(ANSWER.format(MARKUP, "")), script(ANSWER.format("", CALL))]
    browser.call("Page.navigate", url=url)
    assert browser.wait_for("document.getElementById('model')?.textContent") == "scripted"

    first = ask(browser, "<b>hi</b>", 0)
    part = f"{first}.querySelector"
    assert browser.evaluate(f"{part}('.thinking div').textContent") == "why not"
    assert browser.evaluate(f"{part}('.answer').textContent") == MARKUP
    figures = browser.evaluate(f"{part}('.figures').textContent")
    assert re.search(r"prompt \d+ \u00b7 cached 0 \(0%\)", figures)
    assert f"output {len(script(ANSWER.format(MARKUP, '')))} \u00b7 thinking 7" in figures
    question = browser.evaluate("document.querySelector('article.user .answer').textContent")
    assert question == "<b>hi</b>"
    assert browser.evaluate("document.title") == "K3"  # nothing of it was taken for markup
    assert (
        browser.evaluate("document.querySelectorAll('main img, main script, main b').length") == 0
    )

    tools = json.dumps(json.dumps(TOOLS))
    browser.evaluate(f"document.getElementById('tools').value = {tools}")
    second = ask(browser, "look", 1)
    assert browser.evaluate(f"{second}.querySelector('.call').textContent") == 'look({"at": "sky"})'
    # The conversation was sent as a whole.
    text = engine.tokenizer.decode(engine.requests[1].token_ids)
    assert "<b>hi</b>" in text
    assert MARKUP in text
    assert not browser.errors


def test_an_error_and_a_stop_are_shown(browser, url, engine, script) -> None:  # type: ignore[no-untyped-def]
    browser.call("Page.navigate", url=url)
    browser.wait_for("document.getElementById('model')?.textContent")
    engine.scripts = [Script(error="the logits are not finite")]
    error = "document.querySelectorAll('article.assistant .error')"
    browser.evaluate("document.getElementById('text').value = 'fail'")
    browser.evaluate("document.getElementById('ask').requestSubmit()")
    assert "not finite" in browser.wait_for(f"{error}[0]?.textContent")

    engine.scripts = [Script(script(ANSWER.format("never", ""))[:3], holds=True)]
    browser.evaluate("document.getElementById('text').value = 'wait'")
    browser.evaluate("document.getElementById('ask').requestSubmit()")
    browser.wait_for("document.querySelectorAll('.thinking').length")
    browser.evaluate("document.getElementById('stop').click()")
    assert browser.wait_for(f"{error}[1]?.textContent") == "stopped"
    assert browser.wait_for("!document.getElementById('send').hidden")
    browser.evaluate("document.getElementById('clear').click()")
    assert browser.evaluate("document.querySelectorAll('article').length") == 0
