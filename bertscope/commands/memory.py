"""The commands about memory: estimate, profile, run, fit, plan, why, sweep."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bertscope
from bertscope.calibrations import with_saved
from bertscope.commands.call import CommandLine, note, print_notes, with_progress, write
from bertscope.commands.exit_codes import INTERRUPT
from bertscope.errors import SelectionError, SourceError
from bertscope.files import write_file
from bertscope.reports.memory import COMPUTED, SweepReport, SweepRow
from bertscope.reports.step import NO
from bertscope.settings.rows import rows
from bertscope.settings.run_config import SWEPT

if TYPE_CHECKING:
    from bertscope.reports.memory import LengthsReport, MemoryReport


def _write(path: Path | None, content_of: Callable[[Path], str | bytes], what: str) -> None:
    if path is not None:
        write_file(path, content_of(path))
        note(f"wrote {what} to {path}")


def _write_timeline(call: CommandLine, report: MemoryReport) -> None:
    def made(path: Path) -> str | bytes:
        from bertscope.views.timeline import timeline

        return timeline(report, path.suffix)

    _write(call.timeline, made, "the timeline")


def _lengths(call: CommandLine, **keywords: Any) -> LengthsReport:
    keywords |= {"field": call.lengths_field, "tokenizer": call.tokenizer, "seeds": call.seeds}
    report = with_progress(bertscope.lengths, call.about(call.source()), call.lengths, **keywords)
    call.show_all(report)
    return report


def estimate(call: CommandLine) -> int:
    """Estimate the memory for a step or an epoch; 1: nothing fits on the GPU."""
    if call.show_script:
        write(bertscope.training_script(call.about(call.source())), call.output)
        return 0
    if call.lengths is not None:
        _lengths(call)
        return 0
    wants = [] if call.snapshot is None else ["snapshot"]

    def answer_of(model: str) -> Any:
        source = call.source(model)
        if wants:
            source.require("--snapshot")
        return with_progress(bertscope.estimate, call.about(source, wants))

    reports, extras = zip(*call.each(answer_of), strict=True)
    call.show_all(*reports, **({} if call.others else {"shown_rows": call.rows}))
    if not call.others:
        _write_timeline(call, reports[0])
    if call.snapshot is not None:
        write_file(call.snapshot, extras[0]["snapshot"])
    return int({variant.answer for report in reports for variant in report.variants} == {NO})


def profile(call: CommandLine) -> int:
    """Measure the real step; the table is first, and an output that fails does not prevent the others."""
    from bertscope.measure.profile import INTERRUPTED

    wanted = {"snapshot": call.snapshot, "calibration": call.save}
    about = call.about(call.source(), [name for name, path in wanted.items() if path])
    answer: Any = with_progress(bertscope.profile, about)
    report, extras = answer
    print_notes(report)
    is_shown = call.fmt != "table" or any(variant.measured for variant in report.variants)
    failed = [variant for variant in report.variants if variant.failure]
    with ExitStack() as outputs:  # in the reverse order, each though another fails
        if (calibration := extras.get("calibration")) is not None:
            outputs.callback(_write, call.save, lambda path: with_saved(calibration, path).to_json(), "the calibration")
        if is_shown:
            outputs.callback(_write_timeline, call, report)
        if extras.get("snapshot") is not None:
            outputs.callback(write_file, call.snapshot, extras["snapshot"])
        if is_shown:
            call.show(report, shown_rows=call.rows)
        for variant in failed:
            what = "timed (its memory was measured)" if variant.measured else "measured"
            note(f"{variant.checkpointing} could not be {what}: {variant.failure}")
    if any(INTERRUPTED[1] in variant.failure for variant in failed):
        return INTERRUPT
    # A calibration has the times and the rates of the GPU.
    return 3 if any(call.save is not None or variant.measured is None for variant in failed) else 0


def run(call: CommandLine) -> int:
    """Run a training script on a GPU that is not there."""
    rest = [*(call.arguments or ())]  # of the script, for the next command
    for option in {"--gpu", "--budget", "--fit", "-v", "--verbose"}.intersection(rest):
        note(f"{option} goes to the script; for bertscope, write it before {call.script}")
        del rest[(at := rest.index(option)) : at + (1 if "v" in option else 2)]
    call.given = {**call.given, "arguments": rest}
    about = call.about(call.script, [] if call.snapshot is None else ["snapshot"])
    answer: Any = with_progress(bertscope.run, about, call.arguments or (), module=call.module, fit=call.fit)
    report, extras = answer
    if call.fit:
        call.show(report)
        return 0 if report.largest else 1
    call.show(report, shown_rows=call.rows)
    if report.memory is None:
        for path in filter(None, (call.snapshot, call.timeline)):
            note(f"did not write {path}: the peak is outside the steps")
    elif call.snapshot is not None:
        write_file(call.snapshot, extras["snapshot"])
    if report.memory is not None and call.timeline is not None:
        from bertscope.views.run import step_timeline

        _write(call.timeline, lambda path: step_timeline(report, path.suffix), "the timeline")
    if not report.has_run:
        return 3
    return 1 if report.answer == NO else 0


def fit(call: CommandLine) -> int:
    """Find the largest batch, or the settings with which a batch fits."""
    batch = {} if call.batch is None else {"batch": call.batch}
    if call.lengths is not None:
        return 0 if _lengths(call, search=call.batch is None, exact=call.exact, **batch).fits else 1
    batches = {"batch": call.batch, "batch_total": call.batch_total}
    reports = with_progress(bertscope.fits, call.about(call.source()), **batches, exact=call.exact)
    for number, report in enumerate(reports):
        print_notes(report, has_file=not number)
    call.show_all(*reports, has_notes=False)
    return 0 if any(report.fits for report in reports) else 1


def plan(call: CommandLine) -> int:
    """Find what to recompute; --emit prints what to paste."""
    from bertscope.views import plan as view

    wanted = {"batch": call.batch, "batch_total": call.batch_total, "may_change": call.may_change or ()}
    report = with_progress(bertscope.plan, call.about(call.source()), **wanted)
    print_notes(report)
    if call.emit is None:
        call.show(report)
    elif not report.fits and call.emit != "json":
        note(view.verdict(report))
        return 1
    else:
        write(view.emitted(report, call.emit), call.output)
        if call.output is not None and call.emit == "json" and report.fits:
            use = call.further("estimate", {"plan": call.output})
            note(f"wrote the plan to {call.output}; estimate, profile, fit, report and sweep take it, such as '{use}'")
        elif call.output is not None:
            note(f"wrote the code to {call.output}")
    _write(call.plot, lambda _: view.plan_svg(report), "the plot")
    return 0 if report.fits else 1


def why(call: CommandLine) -> None:
    """Explain what filled a GPU."""
    source = call.source() if call.model else None
    report = with_progress(bertscope.why, call.file, call.about(source))
    if call.plot is not None and not report.timeline:
        raise SelectionError(f"{report.name} has no history: record it with torch.cuda.memory._record_memory_history()")
    call.show_all(report)
    if call.plot is not None:
        from bertscope.views.why import history_svg

        _write(call.plot, lambda _: history_svg(report), "the plot")


def sweep(call: CommandLine) -> int:
    """Estimate every point in a grid, or write a sample grid."""
    from bertscope.views.sweep import ordered

    if call.init:
        path = call.output if call.grid in (None, "-") else Path(call.grid)
        if call.output not in (None, path):
            raise SelectionError(f"--init writes one file; leave {call.grid} or --output {call.output} out")
        if path is not None and path.exists():
            raise SourceError(f"{path} exists; name a new file for the sample")
        write(Path(__file__).with_name("sample_grid.yaml").read_text(encoding="utf-8"), path)
        if path is not None:
            note(f"wrote the sample to {path}")
        return 0
    if call.output is None:
        raise SelectionError("--output is missing; name a file for the results, such as --output results.jsonl")
    blank = SweepRow(key="", point=dict.fromkeys(rows(*SWEPT)))
    ordered(SweepReport(grid="", varied={}, rows=(blank,)), call.sort)  # an error before the work begins
    options = {name: getattr(call, name) for name in ("engine", "workers", "address", "plan", "allow_code")}
    report = with_progress(bertscope.sweep, call.grid or "grid.yaml", call.output, **options)
    call.output = None  # which has the results
    call.show(report, rows=call.rows, sort=call.sort)
    return 0 if report.number(COMPUTED) == len(report.rows) else 1
