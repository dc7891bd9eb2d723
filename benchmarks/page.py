"""The time in which a browser shows the page of a model, next to one with a word, the same script and an empty chart.

    python benchmarks/page.py --model bert-large-zh

The browser is headless Chromium, with a new profile and process for each run; the times are medians of `--runs`.
`words` is the time of the first paint, `charts` that of the last chart, both from the first byte of the page on: what
comes before is the start of the browser.
"""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

PROBE = """<script>
const told = () => {
  const charts = [...document.querySelectorAll(".chart")];
  if (!charts.every((chart) => chart.querySelector("svg"))) return setTimeout(told, 5);
  const now = performance.now(), paint = performance.getEntriesByName("first-contentful-paint")[0];
  const begun = performance.getEntriesByType("navigation")[0].responseStart;
  const words = (paint ? paint.startTime : now) - begun;
  location = "/told" + encodeURIComponent(JSON.stringify({ words, charts: now - begun }));
};
addEventListener("load", () => setTimeout(told));
</script>"""
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


def main() -> None:
    """Print the medians of both pages and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-large-zh")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    server = Pages(written(arguments.model))
    seen: dict[str, list[dict[str, float]]] = {"ours": [], "floor": []}
    for _ in range(arguments.runs):
        for name, times in seen.items():
            times.append(server.opened(name))
    median = {name: {what: statistics.median(time[what] for time in times) for what in ("words", "charts")}
              for name, times in seen.items()}  # fmt: skip
    for name, times in median.items():
        print(f"{name}: words {times['words']:.0f} ms, charts {times['charts']:.0f} ms")
    for what, time in median["ours"].items():
        print(f"{what}, ours / floor: {time / median['floor'][what]:.2f}")


# A page with one word and one empty chart.
FLOOR = """
{% extends "page.html" %}
{% import "parts.html" as parts %}
{% block body %}
<p>chart</p>
{{ parts.chart("nothing", {"kind": "map", "scale": "", "top": 1, "nodes": [[-1, "", 1, "", []]]}) }}
{% endblock %}
"""


def written(model: str) -> dict[str, bytes]:
    """Write the page of a model and the page with one empty chart, each with the probe in its head."""
    from bertscope.views.page.templating import environment

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.html")
        command = [sys.executable, "-m", "bertscope", "report", model, "-o", str(path)]
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603  our command
        floor = environment().from_string(FLOOR).render()
        pages = {"ours": path.read_text(), "floor": floor}
    return {name: text.replace("</head>", f"{PROBE}</head>", 1).encode() for name, text in pages.items()}


class Pages:
    """A local server of the pages; the probe reports its times to `/told`."""

    def __init__(self, pages: dict[str, bytes]) -> None:
        told: queue.Queue[str] = queue.Queue()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.strip("/")
                if name.startswith("told"):
                    told.put(unquote(name.removeprefix("told")))
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(pages.get(name, b""))

            def log_message(self, format: str, *arguments: object) -> None:
                """Print no log line."""

        self.told = told
        self.server = ThreadingHTTPServer(("localhost", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def opened(self, name: str) -> dict[str, float]:
        """Open a page once and return the times that the probe reports."""
        browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if browser is None:
            sys.exit("no browser here; install chromium")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            address = f"http://localhost:{self.server.server_port}/{name}"
            command = [browser, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", address]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603  our command
            try:
                seen: dict[str, float] = json.loads(self.told.get(timeout=60))
            finally:
                process.terminate()
                process.wait()
        return seen


if __name__ == "__main__":
    main()
