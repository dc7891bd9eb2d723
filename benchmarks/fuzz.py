"""Fuzzing with malformed files and names: each must end soon, with little memory, in one line and exit code 2.

    python benchmarks/fuzz.py --runs 10000

The script damages good files at random (bytes, values, structure, lengths) and runs `count`, `check` or `verify` on
each, in this process. `tests/fuzzing.py` defines the failures: an uncaught exception, an exit code other than 0 (the
damage had no effect), 1 (the answer is no) or 2, more than one line on stderr with 2, unprintable text, more than 10 s
of CPU time or 1 GiB of memory for one file, a remaining child process, a partial file.
`tests/test_fuzz.py` is a short run of the same with a fixed seed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from itertools import cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.fuzzing import cases, judged, kinds


def main() -> int:
    """Run and print a summary; return 1 if a file failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=20261121)
    options = parser.parse_args()
    codes: Counter[tuple[str, int]] = Counter()
    failures, slowest, largest = 0, 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        made = kinds(folder)
        streams = {kind: cases(kind, made[kind], options.seed, folder) for kind in made}
        for _, kind in zip(range(options.runs), cycle(made), strict=False):
            path, arguments = next(streams[kind])
            verdict = judged(list(arguments), folder)
            codes[kind, verdict.code] += 1
            slowest, largest = max(slowest, verdict.seconds), max(largest, verdict.grown)
            if verdict.faults:
                failures += 1
                kept = Path(tempfile.gettempdir()) / f"bertscope-fuzz-{failures}-{path.name if path else 'name'}"
                kept.write_bytes(path.read_bytes() if path else b"")
                words = "; ".join(verdict.faults)
                print(f"FAILED {kind}: {words}; {arguments!a}, kept as {kept}\n{verdict.err[-1500:]!a}")
    for kind in made:
        told = ", ".join(f"exit {code}: {count}" for (which, code), count in sorted(codes.items()) if which == kind)
        print(f"{kind:12s}{told}")
    print(
        f"{sum(codes.values())} runs, {failures} failures, slowest {slowest:.2f} s, "
        f"most memory {largest / 2**20:.0f} MiB more than before"
    )
    return int(failures > 0)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
