"""The arguments of a public function become the runs of a model, their limit, and the card whose memory counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from bertscope.calibrations import Calibration, calibration_here, calibration_of, calibrations, card_of
from bertscope.errors import SelectionError
from bertscope.gpus import Gpu, find_gpu
from bertscope.reports.training import TrainingFile, TrainingKey
from bertscope.settings.resolve import Layer, Resolved, placed, resolve
from bertscope.settings.rows import SettingError, Settings, rows
from bertscope.settings.run_config import AUTOCAST, CUDA, ESTIMATED, STORED, Limit, RunConfig
from bertscope.sources.model_source import ModelSource
from bertscope.sources.training_files import read_training_file

TrainingArguments = TrainingFile | str | PathLike[str] | None


@dataclass(frozen=True)
class Asked:
    """A question: the layers of its settings, the strongest first, and the training file among them."""

    layers: tuple[Layer, ...]
    compared: Collection[str] = ()  # the settings that may have several values
    records: tuple[type[Settings], ...] = ESTIMATED
    training_file: TrainingFile | None = None

    @classmethod
    def of(
        cls, settings: Mapping[str, Any], layers: Sequence[Layer] = (), *, compared: Collection[str] = (),
        training_file: TrainingArguments = None, records: tuple[type[Settings], ...] = ESTIMATED,
    ) -> Asked:  # fmt: skip
        """Return what keywords, the layers of a front end and a training file ask for.

        The file precedes the defaults of a project, whose precision is not used then.
        """
        asked = [
            Layer(settings, compared=compared, records=records),
            *(layer for layer in layers if not layer.is_default),
        ]
        defaults = [layer for layer in layers if layer.is_default]
        if training_file is None:
            return cls((*asked, *defaults), compared, records)
        file = training_file if isinstance(training_file, TrainingFile) else read_training_file(str(training_file))
        for layer in defaults:
            layer.pop("precision", None)
        own = Layer(file.fields, where=file.path, is_default=True)
        return cls((*asked, own, *defaults), compared, records, file)

    @property
    def named(self) -> set[str]:
        """Return the settings that were asked for, without defaults."""
        return {name for layer in self.layers if not layer.is_default for name in layer}

    def without(self, *names: str) -> Asked:
        """Return the same without the defaults of these settings, for which the function has another meaning."""
        for layer in self.layers:
            for name in names if layer.is_default else ():
                layer.pop(name, None)
        return self

    def resolved(self, source: ModelSource | None = None, /, **defaults: Any) -> Resolved:
        """Return the runs and limits; `defaults` are those of the function, and parameters of own code keep dtypes."""
        own = {"precision": STORED} if source is not None and source.has_own_dtypes else {}
        weakest = Layer(own | defaults, compared=self.compared, is_default=True)
        return resolve(*self.layers, weakest, records=self.records)

    def of_module(self) -> tuple[Any, ...]:
        """Return the records for a module with its inputs; raises SelectionError for a setting that they determine."""
        table = rows(*self.records)
        for layer in self.layers:
            for name in layer:
                if not table[name].of_modules:
                    allowed = ", ".join(key for key, row in table.items() if row.of_modules)
                    raise SelectionError(f"{name} is determined by the module and its inputs; allowed: {allowed}")
        ((run_config, limit, *others),) = self.resolved(precision=STORED).points
        if run_config.precision != STORED and not run_config.autocast:
            raise SelectionError(f"the module determines its dtypes; precision is {STORED} or {AUTOCAST}...")
        if limit != Limit():
            raise SelectionError("gpu and budget are for a step whose inputs are derived from batch and seq")
        return run_config, limit, *others

    def error(self, text: str, *names: str) -> SettingError:
        """Return the error about these settings, which the text names in braces, in the form of their front end."""
        return placed(SettingError(text, names), self.layers)

    def noted(self, runs: Sequence[RunConfig], searched: str = "") -> TrainingFile | None:
        """Return the training file with the settings for which the runs have other values.

        `searched` is the setting that the function searches a value for.
        """
        if self.training_file is None:
            return None
        replaced = []
        for name, value in self.training_file.fields.items():
            used = list(dict.fromkeys(run.flat()[name] for run in runs))
            if name == searched or value not in used:
                words = ", ".join(str(item).lower() for item in used)
                effect = "it is searched" if name == searched else f"an option sets {words}"
                replaced.append(TrainingKey(key=name, value=value, effect=effect))
        return replace(self.training_file, replaced=tuple(replaced))


def calibration_for(limit: Limit, run_config: RunConfig) -> Calibration | None:
    """Return the calibration of the limit's GPU, or of the card of this machine for a run on cuda; None without one."""
    if not limit.calibration or run_config.device != CUDA or not any(calibrations()):
        return None
    if limit.gpu is not None:
        return calibration_of(find_gpu(limit.gpu))
    from bertscope.analyses.calibrate.card import this_card

    here = this_card()
    return calibration_here(*here) if here else None


def card_for(limit: Limit, run_config: RunConfig) -> Gpu | None:
    """Return the card of a run with what a calibration measured; None if no GPU is named or calibrated."""
    known = find_gpu(limit.gpu) if limit.gpu is not None else None
    found = calibration_for(limit, run_config)
    if found is None:
        return known
    return card_of(found) if known is None else found.on(known)
