"""The page in a real browser: chat against scripted answers, the engine's view against a real engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.async_llm import AsyncLLM
from quire.server.view.scenarios import SCENARIOS
from tests.server.browser import Watched, chromium
from tests.server.conftest import Serve, Served
from tests.server.page_pictures import HEIGHT, WIDTH, take_pictures, write_gif
from tests.server.scripted import running

ANSWER = """# Facts

Some **bold** and *slanted* text with `code`, a [link](https://example.org/a) and a [bad one](javascript:alert(1)).

- first
- second
  - inner

```python
print("<b>hi</b>")
```

<img src=x onerror="document.title='pwned'"><script>document.title='pwned'</script>

| a | b |
|---|---|
| 1 | 2 |
"""
Open = Callable[..., Watched]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def look(browser: Any) -> Iterator[Open]:
    """Opens pages, and complains in the end about whatever their consoles complained about."""
    with ExitStack() as stack:

        def start(address: str, **options: Any) -> Watched:
            watched = Watched(browser, address, **options)
            stack.callback(watched.close)
            return watched

        yield start


@pytest.fixture(scope="module")
def chat(serve: Serve) -> Served:
    return serve(ANSWER, tokens_at_once=4)


@pytest.fixture(scope="module")
def engine_at(tiny: Path) -> Iterator[str]:
    """The address of a server around a real engine that computes nothing."""

    async def start() -> AsyncLLM:
        return await AsyncLLM.start(str(tiny), executor="dummy", load_format="dummy", device="cpu", num_threads=1,
                                    num_kv_blocks=400, max_model_len=2048, max_num_batched_tokens=256)

    with running(start) as (address, _):
        yield address


def ask(page: Any, text: str = "Hello") -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


# ---- chat


def test_a_chat_turn_streams_and_shows_its_figures(look: Open, chat: Served) -> None:
    page = look(chat.address).open()
    ask(page, "What is a fact?")
    page.wait_for_selector(".message.assistant .figures")
    assert page.inner_text(".message.user .body") == "What is a fact?"
    figures = {part.get_attribute("data-figure"): part.inner_text()
               for part in page.query_selector_all(".figures span")}
    assert re.fullmatch(r"first token after \d+ ms", figures["ttft"])
    assert re.fullmatch(r"(\d+\.\d|–) tok/s", figures["speed"])
    prompt = len(chat.engine.asked[-1][0])
    assert figures["cached"] == f"{prompt // 2} of {prompt} prompt tokens from the cache"
    script = chat.engine.tokenizer
    assert script is not None
    assert figures["tokens"] == f"{len(script.encode(ANSWER, add_special_tokens=False)) + 1} tokens"
    assert page.inner_text("#model") == "scripted"


def test_markdown_is_rendered_and_no_html_of_the_model_is(look: Open, chat: Served) -> None:
    page = look(chat.address).open()
    ask(page)
    page.wait_for_selector(".figures")
    body = page.locator(".message.assistant .body")
    assert body.locator("h1").inner_text() == "Facts"
    assert body.locator("strong").inner_text() == "bold"
    assert body.locator("em").inner_text() == "slanted"
    assert body.locator("li li").inner_text() == "inner"
    assert body.locator("pre code").inner_text() == 'print("<b>hi</b>")'
    assert body.locator("td").all_inner_texts() == ["1", "2"]
    assert body.locator("a").evaluate_all("found => found.map(a => a.href)") == ["https://example.org/a"]
    assert body.locator("img, script, b").count() == 0
    assert "onerror=" in body.inner_text() and "javascript:alert(1)" in body.inner_text()
    assert page.title() != "pwned"


def test_no_text_can_hold_up_the_renderer(look: Open, chat: Served) -> None:
    page = look(chat.address).open()
    nasty = ["**" * 20_000, "`" * 20_000, "> " * 5_000 + "x", "[" * 20_000, "- " * 5_000 + "x", "_a" * 20_000,
             "![](" * 8_000, "| " * 20_000 + "\n|-|", "\\" * 20_000, "\n".join("  " * i + "- x" for i in range(500))]
    seconds = page.evaluate("""async (texts) => {
        const { renderMarkdown } = await import("/page/markdown.js");
        return texts.map((text) => {
            const began = performance.now();
            renderMarkdown(document.createElement("div"), text);
            return (performance.now() - began) / 1000;
        });
    }""", nasty)
    assert max(seconds) < 3.0


def test_stop_ends_the_answer_and_the_request(look: Open, serve: Serve) -> None:
    slow = serve("word " * 200)
    slow.engine.delay = 0.02
    page = look(slow.address).open()
    for press in ("click", "Escape"):
        ask(page)
        page.wait_for_function("() => document.querySelector('.message:last-child .body').innerText.length > 20")
        if press == "click":
            page.click("#stop")
        else:
            page.keyboard.press("Escape")
        page.wait_for_selector(".message:last-child [data-figure=end]")
        assert page.inner_text(".message:last-child [data-figure=end]") == "stopped by you"
        assert "prompt tokens from the cache" in page.inner_text(".message:last-child [data-figure=cached]")
        assert page.is_visible("#send") and not page.is_visible("#stop")
    page.wait_for_timeout(300)
    assert len(slow.engine.aborted) == 2 and slow.engine.running == 0


def test_a_new_chat_during_an_answer_leaves_nothing_of_it(look: Open, serve: Serve) -> None:
    slow = serve("word " * 200)
    slow.engine.delay = 0.02
    page = look(slow.address).open()
    ask(page)
    page.wait_for_function("() => document.querySelector('.message:last-child .body').innerText.length > 20")
    page.click("#clear")
    page.wait_for_selector("#send")
    assert page.is_disabled("#regenerate") and page.is_disabled("#clear")
    assert page.query_selector(".message") is None


def test_an_answer_stopped_before_its_first_word_is_no_part_of_the_conversation(look: Open, serve: Serve) -> None:
    slow = serve("word " * 5)
    slow.engine.delay = 5.0
    page = look(slow.address).open()
    ask(page)
    page.click("#stop")
    assert page.wait_for_selector("[data-figure=end]").inner_text() == "stopped by you"
    slow.engine.delay = 0.0
    page.click("#regenerate")
    page.wait_for_selector("[data-figure=ttft]")
    assert page.locator(".message").count() == 2
    assert slow.engine.asked[-1][0] == slow.engine.asked[-2][0]


def test_regenerate_and_new_chat(look: Open, chat: Served) -> None:
    page = look(chat.address).open()
    ask(page, "One")
    page.wait_for_selector(".figures")
    asked = len(chat.engine.asked)
    first = chat.engine.asked[-1][0]
    page.click("#regenerate")
    page.wait_for_function(
        "() => document.querySelectorAll('.figures').length === 1 && !document.querySelector('#send').hidden")
    assert len(chat.engine.asked) == asked + 1 and chat.engine.asked[-1][0] == first
    ask(page, "Two")
    page.wait_for_function("() => document.querySelectorAll('.figures').length === 2")
    assert len(chat.engine.asked[-1][0]) > len(first) + len(ANSWER)  # the conversation so far is sent along
    page.click("#clear")
    assert page.locator(".message").count() == 0
    ask(page, "One")
    page.wait_for_selector(".figures")
    assert chat.engine.asked[-1][0] == first


def test_parameters_reach_the_engine_and_wrong_ones_are_told(look: Open, chat: Served) -> None:
    page = look(chat.address).open()
    page.click("#settings summary")
    for name, value in (("temperature", "0.3"), ("top_p", "0.8"), ("max_tokens", "7"), ("seed", "5"),
                        ("stop", "zz"), ("system", "Be brief.")):
        page.fill(f"#field-{name}", value)
    ask(page)
    page.wait_for_selector(".figures")
    params = chat.params()
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.3, 0.8, 7, 5)
    assert list(params.stop) == ["zz"]
    assert "Be brief." in chat.engine.tokenizer.decode(chat.engine.asked[-1][0])  # type: ignore[union-attr]
    assert page.inner_text("[data-figure=end]") == "cut off at max_tokens"
    asked = len(chat.engine.asked)
    page.fill("#field-temperature", "9")
    ask(page, "Again")
    page.wait_for_function("() => document.querySelector('#chat-status').textContent.includes('temperature')")
    assert len(chat.engine.asked) == asked
    assert page.input_value("#prompt") == "Again" and page.locator(".message.user").count() == 1


def test_thoughts_are_shown_apart_and_not_sent_back(look: Open, serve: Serve) -> None:
    thinker = serve("<think>Let me see.</think>The answer.", reasoning_parser="think", tokens_at_once=3)
    page = look(thinker.address).open()
    ask(page)
    page.wait_for_selector(".figures")
    assert page.inner_text(".message.assistant .body") == "The answer."
    page.click(".thoughts summary")
    assert "Let me see." in page.inner_text(".thoughts")
    ask(page, "Again")
    page.wait_for_function("() => document.querySelectorAll('.figures').length === 2")
    assert "Let me see." not in thinker.engine.tokenizer.decode(thinker.engine.asked[-1][0])  # type: ignore[union-attr]


def test_calls_are_shown_as_calls_and_go_on_with_what_the_tools_returned(look: Open, serve: Serve) -> None:
    def call(city: str) -> str:
        return f'<tool_call>{{"name": "weather", "arguments": {{"city": "{city}"}}}}</tool_call>'

    caller = serve(f"I ask. {call('Oslo')}{call('Rome')}", tokens_at_once=3)
    page = look(caller.address).open()
    page.click("#settings summary")
    page.fill("#field-tools", "[{")
    ask(page)
    assert "tools" in page.inner_text("#chat-status")
    page.fill("#field-tools", json.dumps([{"type": "function", "function": {"name": "weather"}}]))
    page.press("#prompt", "Enter")
    page.wait_for_selector(".call form")
    assert page.inner_text(".message.assistant .body") == "I ask."
    assert page.locator(".call .name").all_inner_texts() == ["weather", "weather"]
    assert '"city": "Rome"' in page.locator(".call pre").nth(1).inner_text()
    caller.engine.text = "Rain and sun."
    for number, result in enumerate(("rain", "<b>sun</b>")):
        page.locator(".call textarea").first.fill(result)
        page.locator(".call button").first.click()
        assert page.locator(".call .result").nth(number).inner_text() == result
    page.wait_for_function("() => document.querySelectorAll('.figures').length === 2")
    assert page.locator(".message.assistant .body").nth(1).inner_text() == "Rain and sun."
    prompt = caller.engine.tokenizer.decode(caller.engine.asked[-1][0])  # type: ignore[union-attr]
    assert "<tool_response>\nrain\n</tool_response>" in prompt and "<b>sun</b>" in prompt and '"Oslo"' in prompt


def test_what_the_server_refuses_is_shown_under_the_question(look: Open, chat: Served) -> None:
    watched = look(chat.address)
    watched.refusals_expected = True
    page = watched.open()
    page.evaluate("document.querySelector('#field-max_tokens').value = 100000")
    ask(page)
    assert "context is" in page.wait_for_selector(".message .error").inner_text()
    assert page.is_visible("#send")


# ---- keys, and without a page


def test_it_asks_for_the_key_until_it_is_right_and_shows_nothing_before(look: Open, serve: Serve,
                                                                        tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice right-key-1234\n")
    locked = serve("Secret answer", key="right-key-1234", api_key_file=str(tmp_path / "keys"))
    watched = look(locked.address)
    watched.refusals_expected = True
    page = watched.open()
    page.wait_for_selector("#key-dialog[open]")
    assert page.inner_text("#model") == ""
    page.fill("#key", "wrong-key-1234")
    page.keyboard.press("Enter")
    page.wait_for_function("() => !document.querySelector('#key-error').hidden")
    page.fill("#key", "right-key-1234")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('#model').textContent === 'scripted'")
    ask(page)
    page.wait_for_selector(".figures")
    page.reload()
    page.wait_for_function("() => document.querySelector('#model').textContent === 'scripted'")
    assert not page.is_visible("#key-dialog")


def test_the_view_of_the_engine_wants_the_key_too(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("right-key-1234\n")
    locked = serve(api_key_file=str(tmp_path / "keys"))
    for path in ("/v1/engine/events", "/v1/engine/snapshot", "/v1/engine/scenarios"):
        assert locked.http.get(path).status_code == 401
    assert locked.http.post("/v1/engine/scenarios", json={"scenario": "samples"}).status_code == 401
    assert locked.http.get("/").status_code == 200


def test_the_page_can_be_turned_off(serve: Serve) -> None:
    bare = serve(page=False)
    for path in ("/", "/page/app.js", "/v1/engine/events", "/v1/engine/snapshot", "/v1/engine/scenarios"):
        assert bare.http.get(path).status_code == 404
    assert bare.http.get("/v1/models").status_code == 200


def test_its_files_come_from_the_package_alone_and_run_nothing_else(chat: Served) -> None:
    files = [file for file in resources.files("quire.server").joinpath("page").iterdir()
             if file.name.rpartition(".")[2] in ("html", "js", "css", "svg")]
    assert len(files) > 10
    for file in files:
        answer = chat.http.get("/" if file.name == "index.html" else f"/page/{file.name}")
        assert answer.content == file.read_bytes()
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        text = file.read_text()
        assert not re.search(r"(src|href|from|import)[=(\s]*[\"'](https?:)?//", text), file.name
        assert "innerHTML" not in text and "eval(" not in text and "insertAdjacent" not in text


# ---- the engine's view


NOTE_MOST = """() => {
    window.most = {};
    new MutationObserver(() => {
        for (const node of document.querySelectorAll("#engines [data-shared], .engine")) {
            for (const [name, value] of Object.entries(node.dataset)) {
                if (!Number.isNaN(Number(value))) most[name] = Math.max(most[name] ?? 0, Number(value));
            }
        }
    }).observe(document.querySelector("#engines"), { subtree: true, attributes: true, childList: true });
}"""
"""Remembers the highest of each number that the view has shown, so that no moment can be missed."""

SIGHTS: dict[str, dict[str, int]] = {
    "shared-prefix": {"shared": 10, "used": 5},
    "memory-pressure": {"host": 4, "preemptions": 2},
    "long-prompt": {"used": 45},
    "batching": {"waiting": 4},
    "samples": {"shared": 4, "copies": 3},
    "two-stages": {"used": 12},
    "prefill-apart": {"used": 40},
    "speculation": {"used": 4, "steps": 10},
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_scenario_moves_the_view_and_says_what_to_look_for(look: Open, engine_at: str, name: str) -> None:
    page = look(engine_at).open("/#engine")
    page.wait_for_selector(".engine[data-steps]")
    page.evaluate(NOTE_MOST)
    page.select_option("#speed", "2")
    page.click(f"[data-scenario={name}]")
    scenario = SCENARIOS[name]
    page.wait_for_function("count => document.querySelectorAll('.engine[data-steps]').length === count",
                           arg=len(scenario.engines))
    assert scenario.look_for in page.inner_text("#look-for")
    assert "simulated" in page.inner_text("#stage-title")
    page.wait_for_selector(f"#stage[data-played={name}]")
    assert page.locator("#outcome tr").count() == 1 + len(scenario.engines)
    most = page.evaluate("() => most")
    assert {key: value for key, value in SIGHTS[name].items() if most[key] < value} == {}
    pictures = page.locator(".engine canvas").evaluate_all(
        "found => found.map(c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size)")
    assert min(pictures) > 3  # every canvas shows something
    page.click("#back")
    page.wait_for_function("() => document.querySelector('#stage-title').textContent === 'The live engine'")
    assert not page.is_visible("#look-for")


def test_the_outcomes_teach_what_they_should(engine_at: str) -> None:
    def outcome(name: str) -> list[dict[str, Any]]:
        answer = httpx.post(f"{engine_at}/v1/engine/scenarios", json={"scenario": name, "speed": 50}, timeout=60)
        last = [line for line in answer.text.splitlines() if line.startswith("data: ")][-1]
        found: list[dict[str, Any]] = json.loads(last.removeprefix("data: "))["end"]
        return found

    static, continuous = outcome("batching")
    assert continuous["seconds"] < 0.75 * static["seconds"]
    whole, chunked = outcome("long-prompt")
    assert chunked["longest_gap_s"] < whole["longest_gap_s"] / 4
    again, moved = outcome("memory-pressure")
    assert again["tokens_computed_again"] > 0 == moved["tokens_computed_again"] and moved["blocks_moved"] > 0
    assert outcome("shared-prefix")[0]["tokens_from_cache"] == 5 * 160
    assert outcome("samples")[0]["copies_on_write"] == 3
    decode, prefill, both = outcome("prefill-apart")
    assert decode["prompt_tokens_computed"] == 4 * 16 and prefill["prompt_tokens_computed"] == 3 * 600
    assert decode["longest_gap_s"] < both["longest_gap_s"] / 2


def test_the_live_engine_is_shown_at_work_on_requests_of_the_public_api(look: Open, engine_at: str) -> None:
    page = look(engine_at).open("/#engine")
    page.wait_for_selector(".engine[data-steps]")
    assert "live" in page.inner_text(".numbers")
    titles = page.locator(".plots h3").all_inner_texts()
    assert [title.rpartition("(")[2] for title in titles] == ["tok/s)", "ms)", "ms)"]
    for name in ("shared-prefix", "samples"):
        before = int(page.get_attribute(".engine", "data-steps"))
        page.check("#on-live")
        page.click(f"[data-scenario={name}]")
        page.wait_for_selector(f"#stage[data-played={name}]")
        page.wait_for_function("before => +document.querySelector('.engine').dataset.steps > before", arg=before)
        assert page.inner_text("#stage-title") == "The live engine"
        assert SCENARIOS[name].look_for in page.inner_text("#look-for")
        assert not re.search(r"[Rr]equest \d", SCENARIOS[name].look_for)  # on a live engine it has another number
    page.wait_for_function("() => +document.querySelector('[data-cached]').dataset.cached > 20")
    page.wait_for_function("() => +document.querySelector('.engine').dataset.copies > 0")


def test_a_block_tells_its_chain_and_owners_to_mouse_keyboard_and_finger(look: Open, engine_at: str) -> None:
    watched = look(engine_at, has_touch=True)
    page = watched.open("/#engine")
    page.select_option("#speed", "0.5")
    page.click("[data-scenario=shared-prefix]")
    page.wait_for_function("() => +document.querySelector('[data-shared]')?.dataset.shared >= 10")
    detail = page.locator(".map ~ .detail").first
    page.hover(".map", position={"x": 45, "y": 10})
    text = detail.inner_text()
    assert re.search(r"Block 1 is shared: held \d+ times, by sequences 1, 2", text), text
    assert re.search(r"hash chain: [0-9a-f]{8} → [0-9a-f]{8} \(tokens 16–31", text), text
    page.mouse.move(0, 0)
    page.focus(".map")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "Block 2 is shared" in detail.inner_text()
    page.touchscreen.tap(*_inside(page, ".map", 10, 10))
    page.mouse.move(0, 0)
    page.wait_for_function("() => document.querySelector('.map ~ .detail').innerText.includes('Block 0 is')")
    page.focus(".timeline")
    page.keyboard.press("ArrowLeft")
    assert re.search(r"Step \d+: .* decode tokens for \d+ sequences", page.locator(".timeline ~ .detail").inner_text())


def _inside(page: Any, selector: str, x: float, y: float) -> tuple[float, float]:
    box = page.locator(selector).first.bounding_box()
    return box["x"] + x, box["y"] + y


# ---- everybody's screen and hands


@pytest.mark.parametrize("tab", ["/", "/#engine"])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(look: Open, engine_at: str, tab: str) -> None:
    page = look(engine_at, viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True,
                device_scale_factor=3).open(tab)
    if tab == "/":
        ask(page, "x" * 300)
        page.wait_for_selector(".figures")
    else:
        page.select_option("#speed", "4")
        page.tap("[data-scenario=memory-pressure]")
        page.wait_for_selector("#stage[data-played=memory-pressure]")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    wide = page.evaluate("""[...document.querySelectorAll('main *')].filter((node) => node.getClientRects().length
        && node.getBoundingClientRect().right > 361 && !node.closest('.scroll, pre, table'))
        .map((node) => node.className)""")
    assert wide == []
    small = page.evaluate("""[...document.querySelectorAll('button')].filter((node) => node.getClientRects().length
        && node.getBoundingClientRect().height < 27).map((node) => node.textContent)""")
    assert small == []


def test_dark_mode_follows_the_system_and_the_button(look: Open, chat: Served) -> None:
    page = look(chat.address, color_scheme="dark").open()
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    assert page.get_attribute("#theme", "aria-pressed") == "true"
    page.click("#theme")
    light = page.evaluate(ground)
    assert dark == "rgb(18, 22, 27)" and light == "rgb(244, 245, 247)"
    page.reload()
    assert page.evaluate(ground) == light
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ground) == light
    contrast = page.evaluate("""() => ['light', 'dark'].map((theme) => {
        document.documentElement.dataset.theme = theme;
        const style = getComputedStyle(document.documentElement);
        const light = (name) => { const value = style.getPropertyValue(name).trim().slice(1);
            const parts = [0, 2, 4].map((at) => parseInt(value.slice(at, at + 2), 16) / 255)
                .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
            return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]; };
        return ['--ink', '--quiet', '--bad'].map((name) => { const [a, b] = [light(name), light('--paper')];
            return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); });
    })""")
    assert min(min(each) for each in contrast) >= 4.5


def test_the_keyboard_alone_is_enough(look: Open, engine_at: str) -> None:
    page = look(engine_at).open()

    def tab_to(selector: str) -> None:
        for _ in range(60):
            if page.evaluate("s => document.activeElement.matches(s)", selector):
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"{selector} was not reached")

    tab_to("#prompt")
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    page.wait_for_selector(".figures")
    tab_to("#tab-chat")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("[data-scenario=samples]")
    assert page.evaluate("document.activeElement.id") == "tab-engine"
    tab_to("[data-scenario=samples]")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    page.keyboard.press("Enter")
    page.wait_for_selector("#stage[data-played=samples]")
    tab_to(".map")
    page.keyboard.press("ArrowRight")
    assert "Block" in page.locator(".map ~ .detail").first.inner_text()
    unnamed = page.evaluate("""[...document.querySelectorAll('button, input, textarea, select, canvas')]
        .filter((node) => node.getClientRects().length)
        .filter((node) => !(node.ariaLabel || node.textContent.trim() || node.labels?.length || node.title))
        .map((node) => node.outerHTML)""")
    assert unnamed == []


def test_the_animation_keeps_the_colours_of_a_small_legend_apart(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="the package pillow is not installed")
    frame = image.linear_gradient("L").resize((600, 400)).convert("RGB")
    legend = [tuple(color) for color in ((54, 162, 93), (60, 150, 110), (200, 120, 40), (190, 130, 60), (70, 90, 190),
                                         (90, 80, 200), (190, 60, 60), (180, 70, 90))]
    for place, color in enumerate(legend):
        frame.paste(color, (10 + 20 * place, 10, 20 + 20 * place, 20))
    write_gif([frame, frame.rotate(180)], tmp_path / "a.gif")
    with image.open(tmp_path / "a.gif") as picture:
        found = picture.convert("RGB")
    for place, color in enumerate(legend):
        shown = found.getpixel((15 + 20 * place, 15))
        assert max(abs(a - b) for a, b in zip(shown, color, strict=True)) <= 8, (color, shown)


def test_the_pictures_of_the_docs_can_be_taken_anew(browser: Any, engine_at: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="the package pillow is not installed")
    watched = Watched(browser, engine_at, viewport={"width": WIDTH, "height": HEIGHT})
    chat, engine, animation = take_pictures(watched, tmp_path, "Hello", speed="2", story=("shared-prefix",))
    watched.close()
    for path in (chat, engine):
        with image.open(path) as picture:
            assert picture.size == (WIDTH, HEIGHT) and len(picture.convert("RGB").getcolors(1 << 20)) > 50
    with image.open(animation) as picture:
        assert picture.n_frames >= 2  # a busy machine takes few
    assert animation.stat().st_size < 1_500_000
