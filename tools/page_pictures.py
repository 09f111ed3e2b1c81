"""Take the pictures of the `/kv` page: the embedded model under a load, light and dark.

    python tools/page_pictures.py FOLDER

Needs the extras `engine` and `serve`, playwright and Debian's chromium.
"""

import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from fastapi import FastAPI  # noqa: E402

from pyengine import AsyncEngine, SamplingParams  # noqa: E402
from pyengine.server.dashboard.page import EngineBroadcaster, page_router  # noqa: E402
from tests.support.browser import Served, browser, errors_of  # noqa: E402

SYSTEM = (
    "You are a careful assistant of a library. Answer with one short paragraph, name your "
    "sources, and never invent a title. If you do not know, say so and suggest whom to ask. "
) * 3
SHOTS = [
    f"Example {at}: a reader asks for book {at} and gets shelf {at * 7}. " * 5 for at in range(4)
]
SECONDS = int(sys.argv[2]) if len(sys.argv) > 2 else 75


async def exhausted(items: AsyncIterator[Any]) -> None:
    """Read to the end."""
    async for _ in items:
        pass


async def reader(engine: AsyncEngine, number: int) -> None:
    """Send requests without end: with an example, without, and for several answers."""
    draw = random.Random(number)
    for turn in range(10_000):
        shot = draw.choice(["", *SHOTS, SHOTS[0], SHOTS[0]])
        prompt = SYSTEM + shot + f" Reader {draw.randrange(60)} asks: where is book {turn % 5}?"
        params = SamplingParams(
            temperature=1,
            n=draw.choice([1, 1, 1, 1, 1, 3]),
            max_tokens=draw.randrange(4, 28),
            ignore_eos=True,
            seed=number,
        )
        salt = draw.choice([None, None, None, "branch", "archive"])
        name = f"cmpl-{number:02d}-{turn}"
        await exhausted(engine.generate(prompt, params, name, cache_salt=salt))


def main() -> None:
    """Take one picture in each theme, after a minute."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with AsyncEngine(num_blocks=230, max_num_seqs=40, seed=0) as engine:
        broadcaster, app = EngineBroadcaster(engine, model_name="SmolLM2-135M-Instruct"), FastAPI()
        app.include_router(page_router(lambda _replica: broadcaster))
        with Served(app) as served, browser() as chromium:
            work = [served.submit(reader(engine, number)) for number in range(36)]
            pages = {}
            for theme in ("light", "dark"):
                page = chromium.new_page(
                    viewport={"width": 1440, "height": 1000},
                    color_scheme=theme,
                    device_scale_factor=1.5,
                )
                errors_of(page)
                page.goto(f"{served.url}/kv")
                pages[theme] = page
            pages["light"].wait_for_timeout(1000 * SECONDS)
            pages["dark"].locator("#colour input[value=sharing]").check(force=True)
            pages["dark"].locator("#order input[value=prefix]").check(force=True)
            for theme, page in pages.items():
                page.bring_to_front()
                page.wait_for_timeout(1500)
                page.screenshot(path=folder / f"kv-page-{theme}.png", full_page=True)
            for task in work:
                task.cancel()
            served.submit(broadcaster.close()).result()


if __name__ == "__main__":
    main()
