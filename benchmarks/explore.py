"""How soon `explore` answers a key, and how much of its start is its own; needs the extra 'explore'.

    python benchmarks/explore.py [--model bert-large-zh] [--unfold]

A key: from pressing it until the app is idle again and has drawn, in a terminal of 120 x 40 without a screen;
while the data is computed beside it, and after. Start: what drawing takes beyond the tree's own data.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time

KEYS = ("down", "enter", "down", "p", "f", "m", "o", "x", "pagedown", "slash", "q", "u", "e", "r", "enter", "n", "x")


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-large-zh")
    parser.add_argument("--unfold", action="store_true")
    arguments = parser.parse_args()
    gc.disable()  # as the command line does
    start = time.perf_counter()
    from bertscope.analyses.explore import explore
    from bertscope.commands.explore import settled
    from bertscope.sources import load
    from bertscope.spec import RunSpec

    reports = explore(load(arguments.model), RunSpec(batch=8, seq=512), folded=not arguments.unfold)
    first = next(reports)
    data_seconds = time.perf_counter() - start
    asyncio.run(shown(first, settled(reports), data_seconds))


async def shown(first, reports, data_seconds: float) -> None:
    """Start the app, press keys while it loads, and again when it has loaded."""
    start = time.perf_counter()
    from bertscope.render.explore import Explorer

    app = Explorer(first, reports)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        own_seconds = time.perf_counter() - start
        print(f"start    {data_seconds:.2f} s for torch and the tree, and {own_seconds:.2f} s until it is drawn")
        loading = []
        while app.report.awaited:
            loading += await pressed(app, pilot)
        print_times("loading", loading)
        print_times("loaded", await pressed(app, pilot) + await pressed(app, pilot))


async def pressed(app, pilot) -> list[tuple[float, str]]:
    """Seconds for each key, and the key."""
    times = []
    for key in KEYS:
        start = time.perf_counter()
        app.simulate_key(key)
        await pilot.pause()
        times.append((time.perf_counter() - start, key))
    return times


def print_times(when: str, times: list[tuple[float, str]]) -> None:
    """Median and the slowest, in milliseconds."""
    slowest, key = max(times)
    median = statistics.median(seconds for seconds, _ in times)
    print(f"{when:8} {1000 * median:.0f} ms a key in the median, {1000 * slowest:.0f} ms the slowest ({key})")


if __name__ == "__main__":
    main()
