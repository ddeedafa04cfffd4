"""The policy file read: checked on load, refused as a whole, every problem one sentence.

This module exists so that a file somebody wrote becomes rules, or an answer that its author can act on. What always holds: a
policy that cannot be used is refused, in sentences that name the rule or key, what was found and what was wanted.
"""

from __future__ import annotations

import pkgutil
import re
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from typing import Any, get_args

import msgspec

from sentinel.decide.rules.policy import Policy, Rule, Table
from sentinel.decide.rules.policy_check import problems
from sentinel.durations import Duration, parse_duration


class PolicyError(Exception):
    """The policy cannot be used; the sentence says which rule or key, what was found and what was wanted."""


def _hook(kind: type, value: Any) -> Any:
    if kind is Duration:
        return parse_duration(value)
    raise NotImplementedError(kind)


@lru_cache(maxsize=8)  # a term begins with it, and the shell has just read the same text
def load_policy(text: str) -> Policy:
    """Read and check a policy. Raises PolicyError with one sentence, the first that ``examine`` has, when it cannot be used."""
    policy, wrong = examine(text)
    if policy is None or wrong:
        raise PolicyError(wrong[0])
    return policy


def examine(text: str) -> tuple[Policy | None, list[str]]:
    """The policy as far as it can be read, and everything that is wrong with it, one sentence each."""
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib's own error, a number of 5,000 digits, brackets without end
        return None, [f"policy is not valid TOML: {error}"]
    fields = {f.name: f for f in msgspec.structs.fields(Policy)}
    wrong = [f"policy: unknown key {k!r}; wanted {_near(k, fields)}" for k in raw if k not in fields]
    wrong += [f"policy: {k} is missing" for k in fields if k not in raw]
    rules = raw.get("rule", [])
    for name in [k for k in fields if k in raw and k != "rule"]:
        wrong += _misread(raw[name], fields[name].type, name)
    if not isinstance(rules, list):
        wrong.append("policy: rule is no list; wanted [[rule]] tables")
    else:
        for number, rule in enumerate(rules, 1):
            fault = rule.get("fault", "no fault") if isinstance(rule, dict) else "no table"
            wrong += _misread(rule, Rule, f"rule {number} ({fault})")
    if wrong:
        return None, wrong
    policy = msgspec.convert(raw, Policy, dec_hook=_hook)
    return policy, list(problems(policy))


def _misread(value: Any, kind: Any, where: str) -> list[str]:
    """Why a part of the file is not what it should be; empty when it is."""
    fields = {f.name for f in msgspec.structs.fields(kind)} if isinstance(kind, type) and issubclass(kind, Table) else set()
    unknown = [k for k in value if k not in fields] if fields and isinstance(value, dict) else []
    if unknown:
        return [f"policy: {where}: unknown key {k!r}; wanted {_near(k, fields)}" for k in unknown]
    try:
        msgspec.convert(value, kind, dec_hook=_hook)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        message = re.sub(r"Object missing required field `(\w+)`", r"\1 is missing", message)
        message = re.sub(r"Object contains unknown field `(\w+)`", r"unknown key '\1'", message)
        place = re.sub(r"\[.*?\]", "", place.rstrip("`")).lstrip(".")
        choices = _choices(kind, place)
        if choices and message.startswith("Invalid enum value"):
            message = f"{message.removeprefix('Invalid enum value ')}; wanted one of {', '.join(choices)}"
        return [f"policy: {where}: {place + ': ' if place else ''}{message}"]
    return []


def _choices(kind: Any, key: str) -> list[str]:
    """The words that this key may have; empty when it is no choice."""
    field = next((f for f in msgspec.structs.fields(kind) if f.name == key), None) if hasattr(kind, "__struct_fields__") else None
    kinds = [kind] if field is None else [field.type, *get_args(field.type)]
    return [str(c) for k in kinds if isinstance(k, type) and issubclass(k, StrEnum) for c in k]


def _near(key: str, known: Iterable[str]) -> str:
    """What was perhaps meant."""
    names = sorted(known)
    close = get_close_matches(key, names, n=1)
    return repr(close[0]) if close else f"one of {', '.join(names)}"


def default_policy_text() -> str:
    """The policy shipped with the package (package data, as fixed as code)."""
    data = pkgutil.get_data("sentinel.decide", "policy.toml")
    if data is None:
        raise PolicyError("the shipped policy.toml is missing from the installation")
    return data.decode("utf-8")


@lru_cache(maxsize=1)
def default_policy() -> Policy:
    return load_policy(default_policy_text())
