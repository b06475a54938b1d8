"""The screenshots and the animation of the docs, taken from the page as it is.

`python -m tests.server.page_pictures docs/images` takes them anew, with the default model; a test takes them too.
"""

from __future__ import annotations

import asyncio
import io
import sys
import time
from pathlib import Path
from typing import Any

from tests.server.browser import Watched, chromium

WIDTH, HEIGHT = 1280, 1060
_STORY = ("shared-prefix", "memory-pressure", "samples")
_FRAME_SECONDS = 0.4


def take_pictures(watched: Watched, folder: Path, question: str, *, speed: str = "0.5",
                  story: tuple[str, ...] = _STORY) -> list[Path]:
    """A chat, the engine in the middle of a scenario, and a few scenarios as an animation."""
    folder.mkdir(parents=True, exist_ok=True)
    page = watched.open()
    page.fill("#prompt", question)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".figures", timeout=120_000)
    page.screenshot(path=folder / "page-chat.png")
    page.click("#tab-engine")
    page.wait_for_selector("[data-scenario]")
    page.select_option("#speed", speed)
    page.click("[data-scenario=memory-pressure]")
    page.wait_for_function("() => +document.querySelectorAll('[data-host]')[0]?.dataset.host >= 4")
    page.hover(".map", position={"x": 50, "y": 10})
    page.screenshot(path=folder / "page-engine.png")
    page.wait_for_selector("#stage[data-played=memory-pressure]")
    frames: list[Any] = []
    for name in story:
        frames += _film(page, name)
    write_gif(frames, folder / "page.gif")
    return [folder / name for name in ("page-chat.png", "page-engine.png", "page.gif")]


def _film(page: Any, name: str) -> list[Any]:
    from PIL import Image

    def shot() -> Any:
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        return picture.resize((WIDTH * 7 // 10, HEIGHT * 7 // 10), Image.Resampling.LANCZOS)

    frames = [shot()]  # a busy machine may show no more than the end
    page.click(f"[data-scenario={name}]")
    while True:
        began = time.monotonic()
        frames.append(shot())
        if page.get_attribute("#stage", "data-played") == name:
            return frames + [frames[-1]] * 4
        page.wait_for_timeout(1000 * max(0.0, _FRAME_SECONDS - (time.monotonic() - began)))


def write_gif(frames: list[Any], path: Path) -> None:
    from PIL import Image

    # One palette for all, so that colours do not flicker and what stands still costs nothing.
    sheet = Image.new("RGB", (frames[0].width, 8 * frames[0].height))
    for place in range(8):
        sheet.paste(frames[place * (len(frames) - 1) // 7], (0, place * frames[0].height))
    # The page's plain colours as they are, and beside them some far apart: a legend's few pixels must keep theirs.
    plain = [color for _, color in sorted(sheet.getcolors(1 << 24), reverse=True)[:128]]
    apart = sheet.quantize(100, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).getpalette()[:300]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for color in plain for part in color] + apart)
    small = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    small[0].save(path, save_all=True, append_images=small[1:], duration=int(1000 * _FRAME_SECONDS), loop=0,
                  optimize=True, disposal=1)


async def _main(folder: Path) -> None:
    from quire.bench.serving.served import served

    async with served({}, {}) as (address, _, _engine):
        await asyncio.to_thread(_take, address, folder)


def _take(address: str, folder: Path) -> None:
    with chromium() as browser:
        watched = Watched(browser, address, viewport={"width": WIDTH, "height": HEIGHT})
        for path in take_pictures(watched, folder, "Explain in two sentences and a short list what a KV cache is."):
            print(path, path.stat().st_size)
        watched.close()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
