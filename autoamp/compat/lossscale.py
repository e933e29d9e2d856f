"""The loss scale that a script asks Apex for, as autoamp's."""

from __future__ import annotations

from dataclasses import replace

from ..policy import LossScaleRule
from ..session import Session

MAX_LOSS_SCALE = 2.0**24
"""Apex' default, which says nothing: the policy's bound holds."""


def set_loss_scale(
    session: Session,
    asked: float | str | None,
    least: float | None = None,
    most: float = MAX_LOSS_SCALE,
) -> None:
    """Have losses scaled as a script asks: ``"dynamic"``, a static scale, None: as the policy says.

    AUTO_MIXED_PRECISION_LOSS_SCALE outranks it.
    """
    scale = session.loss_scale
    rule = _rule(scale.rule, asked, least, most)
    if rule != scale.rule and session.settings.loss_scale is None:
        scale.follow(rule)


def _rule(
    rule: LossScaleRule, asked: float | str | None, least: float | None, most: float
) -> LossScaleRule:
    if isinstance(asked, float):
        return replace(rule, mode="static", init=asked)
    if asked == "dynamic" and rule.mode != "dynamic":
        rule = replace(rule, mode="dynamic", init=LossScaleRule().init)
    if rule.mode != "dynamic":
        return rule
    bounds = {} if least is None else {"min": least}
    if most != MAX_LOSS_SCALE:
        bounds["max"] = most
    rule = replace(rule, **bounds)  # type: ignore[arg-type]
    return replace(rule, init=min(max(rule.init, rule.min), rule.max))
