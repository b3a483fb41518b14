"""What ``fxgrad build`` does and says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fxgrad.native.build import is_building
from fxgrad.native.loader import imported, loader
from fxgrad.native.places import Place, built, place, read_json
from fxgrad.native.starting import build, tail
from fxgrad.record.library import check

#: What to try, by a word of the reason; the last is for any other.
_ADVICE = (
    ("no C++ compiler", "install GCC or Clang (apt install g++, conda install gxx), or name one in CXX"),
    ("headers of Python", "install them, or use a Python that brings them along"),
    ("ninja", "pip install ninja"),
    ("cache", "name a folder that can be written to in TORCH_EXTENSIONS_DIR"),
    ("Windows", "nothing is lost but time: the Python recorder measures the same"),
    ("", "another compiler may do better: CXX=/path/to/g++ fxgrad build"),
)


@dataclass
class BuildReport:
    """What is printed, and whether all is well."""

    good: bool
    lines: list[str] = field(default_factory=list)


def build_now(*, force: bool, progress: Callable[[str], None]) -> BuildReport:
    """Build unless a good library is there; then check it."""
    where = place()
    if where.library.is_file() and not force:
        report = _checked(where)
        report.lines.insert(0, f"already built: {where.library}")
        return report
    outcome = build(force=force, progress=progress)
    if outcome.reason is None:
        report = _checked(where)
        report.lines.insert(0, f"built in {outcome.seconds:.0f} s: {where.library}")
        return report
    advice = next(words for word, words in _ADVICE if word in outcome.reason)
    log = [f"  {line}" for line in tail(where)] if outcome.seconds else []
    lines = [*log, f"the build failed after {outcome.seconds:.0f} s: {outcome.reason}"]
    if log:
        lines.append(f"log: {where.log}")
    return BuildReport(good=False, lines=[*lines, f"try: {advice}"])


def _checked(where: Place) -> BuildReport:
    try:
        module = imported(where)
        wrong = check(module)
    except ImportError as error:
        return BuildReport(good=False, lines=[f"it can't be loaded: {error}", "try: fxgrad build --force"])
    if wrong is not None:
        return BuildReport(
            good=False, lines=[f"self-check failed: {wrong}", "it will not be used", f"log: {where.log}"]
        )
    off = f"; it is switched off here: {loader.reason()}" if loader.off else ""
    return BuildReport(good=True, lines=[f"self-check: agrees with plain torch ({module.variant()} loops){off}"])


def status() -> BuildReport:
    """Whether there is a library, and why not.  Builds nothing."""
    found, own = built(), place()
    if found is not None:
        facts = read_json(found.facts) or {}
        report = _checked(found)
        report.lines = [
            f"built: {found.library}",
            f"by {facts.get('version', 'an unknown compiler')} in {facts.get('seconds', '?')} s",
            *report.lines,
        ]
        return report
    if is_building(own):
        return BuildReport(good=False, lines=["being built", f"log: {own.log}"])
    failed = read_json(own.failure)
    if failed is not None:
        return BuildReport(good=False, lines=[f"the build failed: {failed.get('reason')}", f"log: {own.log}"])
    return BuildReport(good=False, lines=["not built", f"it would be in {own.folder}"])
