"""Printed reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nlflow.denoising.noise.names import has_sigma, verdict_of
from nlflow.desk.formats.media import format_of
from nlflow.desk.terminal import in_shell
from nlflow.errors import format_bytes

_SHOWN = 8  # columns of a table in a summary; --json has all
_TOLD = ("sigma", "sigma_estimated", "sigma_effective", "noise", "confidence", "residual", "seconds")
_NUMBER = r"[\d.e+-]+"
#: What models say of their strength, which has a line of its own.
_SIGMA = re.compile(rf"[:,] sigma {_NUMBER}( in \w+ parts)?((?: (?:to|and) {_NUMBER})*)( in \w+ parts)?( by channel)?")


def line(report: dict[str, Any]) -> str:
    figures = "".join(f", {name} {value}" for name, value in _figures(report))
    nothing = _unchanged(report)
    done = f"sigma {_given_sigma(report)}, {bare(_noise(report))}{figures}, {report['seconds_total']:.2f} s"
    return f"{nothing}; {done}" if nothing else done


def summary(report: dict[str, Any], *, verbose: bool = False) -> list[tuple[str, str]]:
    details = report["denoise"]
    size = " x ".join(map(str, report["shape"]))
    unit = _unit(report)
    nothing = _unchanged(report)
    rows = [("result", nothing)] if nothing else []
    alpha = "; its alpha channel is kept as it is" if report.get("alpha") else ""
    rows += [("input", f"{report['input']}, {report['kind']} of {size}, {report['dtype']}{alpha}")]
    rows += [("noise", bare(_noise(report))), *_doubts(details, report["kind"], removed=not nothing)]
    if has_sigma(details.get("model")):
        more = details.get("sigma_effective") is not None and details["quality"] != "pixels"
        why = "; more than in quiet parts, where compression may have taken some" if more else ""
        rows.append(("sigma", f"{_given_sigma(report)}: standard deviation of the noise, {unit}{why}"))
    rows += [*lost(report["missing"], report.get("hidden", 0), report["shape"], report.get("channel_axis"))]
    rows += [("kept", f"{report['kept']} sample(s)")] if report["kept"] else []
    rows += [("seen", in_shell(text)) for text in details.get("given", ())]
    rows += [*_figures(report), ("time", f"{details.get('seconds', report['seconds_total']):.2f} s")]
    if verbose:
        if bare(_noise(report)) != _noise(report):
            rows.append(("measured", _noise(report)))
        rows += [] if nothing else _taken_for(details)
        if "residual" in details and not nothing:
            rows.append(("removed", f"{_of_all(report, 'residual')}: root mean square of input minus result, {unit}"))
        rows += _how(details)
    rows.append(("written", report["output"]))
    return rows + ([("figure", report["figure"])] if report["figure"] else [])


def lost(missing: int, hidden: int, shape: Sequence[int], channel_axis: int | None) -> list[tuple[str, str]]:
    rows = [("hidden", f"{hidden} pixel(s) by the alpha channel, which stay as they are")] if hidden else []
    others = missing - hidden * (1 if channel_axis is None else shape[channel_axis])
    return [*rows, ("missing", f"{others} sample(s)")] if others else rows


def _doubts(details: dict[str, Any], kind: str, *, removed: bool) -> list[tuple[str, str]]:
    """Return what a verdict that is not sure rests on, and what to do about it where no warning has said that."""
    if details.get("confidence", "") in ("", "high") or not details.get("reasons"):
        return []
    from nlflow.denoising.info import if_wrong

    rows = [("because", in_shell(reason)) for reason in details["reasons"]]
    told = details["confidence"] == "low" or not removed
    return rows if told else [*rows, ("doubt", in_shell(if_wrong({"signal": 1, "image": 2}.get(kind, 3))))]


def bare(noise: str) -> str:
    def where(found: re.Match[str]) -> str:
        return f", stronger{found[3]}" if found[1] and found[3] and found[1] != found[3] else ""

    return _SIGMA.sub(where, noise)


def _taken_for(details: dict[str, Any]) -> list[tuple[str, str]]:
    sigma = details.get("sigma_effective")
    if sigma is None:
        return []
    if details["quality"] == "pixels":
        known = "correlated noise" if details["model"]["spectrum"] is not None else "noise that follows the brightness"
        return [("taken for", f"white noise of sigma {sigma:.4g}: --quality pixels knows no {known}")]
    measured = details["sigma"]
    return [("of quiet parts", f"sigma {measured:.4g}, where it is measured; other parts have more of it")]


def _how(details: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, value in details.items():
        if name not in _TOLD and isinstance(value, bool | int | float | str):
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            shown = format_bytes(float(value)) if name.endswith("_bytes") else shown
            rows.append((name.removesuffix("_bytes").replace("_", " "), shown))
    return rows


def _unit(report: dict[str, Any]) -> str:
    return "in grey levels" if report["kind"] != "signal" and "int" in report["dtype"] else "in the units of the file"


def _unchanged(report: dict[str, Any]) -> str:
    """Return why nothing of IN was denoised, and what OUT is then; empty otherwise."""
    details = report["denoise"]
    prefix = "returned unchanged: "
    parts = report.get("columns") or details.get("volumes") or [details]
    whys = dict.fromkeys(part.get("stopped_by", "") for part in parts)
    if not all(why.startswith(prefix) for why in whys):
        return ""
    lossy = {"jpeg": "JPEG loses digits", "video": "films are"}.get(format_of(Path(report["output"])))
    anew = f"OUT is IN coded anew, as {lossy}" if lossy else "OUT has the samples of IN"
    copied = "OUT is a copy of IN" if report.get("copied") else anew
    if report.get("strength") == 0:
        return f"strength 0: nothing was to be removed; {copied}"
    found = details["sigma_estimated"] and all("no noise to remove" in why for why in whys)
    why = "no noise was found" if found else "; ".join(why.removeprefix(prefix) for why in whys)
    return f"{why}: {copied}"


def _given_sigma(report: dict[str, Any]) -> str:
    origin = report["sigma_given"]
    found = "estimated" if report["denoise"]["sigma_estimated"] else "of the model"
    words = found if origin is None else f"map {origin}" if isinstance(origin, str) else "given"
    strength = report.get("strength", 1.0)
    if isinstance(origin, list) and len(report.get("columns", ())) < 2:  # of channels
        each = ", ".join(f"{strength * one:.4g}" for one in origin)
        return f"{each} (given{f', times {strength:g}' if strength != 1 else ''})"
    if strength == 1 or len(report.get("columns", ())) > 1:
        return f"{_of_all(report, 'sigma')} ({words})"
    return (
        f"{_of_all(report, 'sigma')} ({strength:g} times what was {words.replace('estimated', 'found')})"
        if strength
        else "0 (--strength 0)"
    )


def _noise(report: dict[str, Any]) -> str:
    """Return what the noise was taken to be; of each column of a table where they differ."""
    columns = report.get("columns", ())
    told = [verdict_of(column.get("noise", ""), column.get("confidence", "")) for column in columns[:_SHOWN]]
    if len(set(told)) > 1:
        more = f" and {len(columns) - _SHOWN} more" if len(columns) > _SHOWN else ""
        return "; ".join(f"{column['name']} {text}" for column, text in zip(columns, told, strict=False)) + more
    details = report["denoise"]
    return verdict_of(details["noise"], details.get("confidence", ""))


def _of_all(report: dict[str, Any], name: str) -> str:
    columns = report.get("columns", ())
    if len(columns) < 2:
        details = report["denoise"]
        met = details.get("sigma_effective") if name == "sigma" else None
        return f"{details[name] if met is None else met:.4g}"
    shown = ", ".join(f"{column['name']} {column[name]:.4g}" for column in columns[:_SHOWN])
    return shown + (f" and {len(columns) - _SHOWN} more" if len(columns) > _SHOWN else "")


def _figures(report: dict[str, Any], of: str = "") -> list[tuple[str, str]]:
    columns = report.get("columns", ())
    if len(columns) > 1:
        return [row for column in columns[:_SHOWN] for row in _figures(column, f" {column['name']}")]
    rows = []
    for name, form, unit in (("psnr", ".2f", " dB"), ("snr", ".2f", " dB"), ("ssim", ".4f", "")):
        if report.get(f"{name}_output") is not None:
            before = report[f"{name}_input"]
            shown = "unknown" if before is None else f"{before:{form}}{unit}"
            rows.append((f"{name.upper()}{of}", f"{shown} before, {report[f'{name}_output']:{form}}{unit} after"))
    return rows
