"""The alert rules and their way to a pager, with the real programs: promtool, amtool, Prometheus, Alertmanager.

What is simulated here: the daemons' /metrics (a page this test writes) and PagerDuty (the strict stand-in). The whole chain
runs with the rules' waiting times taken out; the times themselves are what the promtool cases test.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sentinel.shipped import runbook
from sentinel.testing.pagerduty import FakePagerDuty

ALERTS = Path(__file__).parents[2] / "alerts"
RULES = ALERTS / "sentinel.rules.yml"


def run(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(a) for a in argv], cwd=ALERTS, capture_output=True, text=True, check=False)


@pytest.mark.needs("promtool")
def test_rules_load_and_pass_their_cases() -> None:
    """The rules are clean to promtool's linter and every case of when they fire, and when not, holds."""
    linted = run("promtool", "check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    tried = run("promtool", "test", "rules", "sentinel.tests.yml")
    assert tried.returncode == 0, tried.stdout + tried.stderr


@pytest.mark.needs("promtool")
def test_prometheus_example_is_valid() -> None:
    """The example of a Prometheus configuration is one."""
    checked = run("promtool", "check", "config", "--syntax-only", "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.needs("promtool")
def test_every_rule_has_a_case() -> None:
    """No rule stands without a promtool case that makes it fire."""
    tests = (ALERTS / "sentinel.tests.yml").read_text("utf-8")
    for name in re.findall(r"- alert: (\w+)", RULES.read_text("utf-8")):
        assert re.search(rf"alertname: {name}\n\s+exp_alerts:", tests), f"{name} has no case in sentinel.tests.yml"


def test_every_alert_tells_a_person_what_to_do() -> None:
    """Each alert has one of the pager's severities, a summary, and the link of a runbook that exists."""
    blocks = RULES.read_text("utf-8").split("- alert: ")[1:]
    for block in blocks:
        name = block.split("\n", 1)[0]
        severity = re.search(r"labels: \{severity: (\w+)\}", block)
        assert severity and severity[1] in ("critical", "error", "warning", "info", "none"), name
        assert re.search(r"summary: \S", block), name
        link = re.search(r"runbook_url: https://sentinel\.example\.net/runbooks/([a-z-]+)\n", block)
        if severity[1] == "none":
            continue  # the watchdog speaks to a machine
        assert link, name
        assert runbook(link[1]).is_file()


@pytest.mark.needs("amtool")
def test_routing() -> None:
    """The Alertmanager configuration is valid; what a person must see reaches the pager, the watchdog only its switch."""
    checked = run("amtool", "check-config", "alertmanager.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for receiver, labels in (
        ("pagerduty", ["alertname=SentinelNoLeader", "severity=critical"]),
        ("pagerduty", ["alertname=SentinelProbeFailing", "severity=warning"]),
        ("pagerduty", ["alertname=SomebodyElses"]),
        ("dead-man", ["alertname=SentinelWatchdog", "severity=none"]),
    ):
        test = ("amtool", "config", "routes", "test", "--config.file=alertmanager.yml", f"--verify.receivers={receiver}")
        routed = run(*test, *labels)
        assert routed.returncode == 0, routed.stdout + routed.stderr


def targets(url: str) -> dict[str, Any]:
    return {"static_configs": [{"targets": [url.removeprefix("http://").rstrip("/")]}]}


async def test_chain_from_metric_to_page_and_back(
    prometheus: Callable[[dict[str, Any]], Any],
    serve: Callable[[str, list[str]], Any],
    program: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """A role without workers pages once, with its runbook, though the pager is away at first, and resolves by the same key."""
    ratio, fed = [1.0], asyncio.Event()

    async def metrics(_: web.Request) -> web.Response:
        text = f'sentinel_pool_capacity_ratio{{pool="chat",role="prefill"}} {ratio[0]}\nsentinel_leader 1\n'
        text += 'sentinel_node_last_report_timestamp_seconds{node="t01"} 9e9\n'
        return web.Response(text=text)

    async def dead_man(_: web.Request) -> web.Response:
        fed.set()
        return web.Response()

    def of(action: str, alert: str) -> list[dict[str, Any]]:
        return [e for e in pager.events if e["event_action"] == action and e["payload"]["summary"].startswith(f"{alert}: ")]

    async def until(action: str, alert: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while not of(action, alert):
                await asyncio.sleep(0.05)
        return of(action, alert)[0]

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_post("/ping", dead_man)
    async with TestServer(app) as outside, FakePagerDuty() as pager:
        pager.answer_next(503, 503)
        key = tmp_path / "pagerduty.key"
        key.write_text("0123456789abcdef0123456789abcdef\n", "utf-8")
        text = (ALERTS / "alertmanager.yml").read_text("utf-8")
        text = text.replace("/etc/alertmanager/pagerduty.key", str(key))
        text = text.replace("https://dead-man.example.net/ping/sentinel", str(outside.make_url("/ping")))
        text = re.sub(r"(group_wait|group_interval): \w+", r"\1: 1s", text)
        (tmp_path / "alertmanager.yml").write_text(f"global: {{pagerduty_url: '{pager.url}'}}\n{text}", "utf-8")
        alertmanager = serve(
            "alertmanager",
            [
                str(program("prometheus-alertmanager")), f"--config.file={tmp_path / 'alertmanager.yml'}",
                f"--storage.path={tmp_path / 'am'}", "--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=",
            ],
        )  # fmt: skip
        (tmp_path / "sentinel.rules.yml").write_text(re.sub(r"for: \w+", "for: 0s", RULES.read_text("utf-8")), "utf-8")
        seen = prometheus(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(tmp_path / "sentinel.rules.yml")],
                "alerting": {"alertmanagers": [targets(alertmanager.url)]},
                "scrape_configs": [{"job_name": "sentinel-controller", **targets(str(outside.make_url("")))}],
            }
        )
        await alertmanager.ready("/-/ready")
        await seen.ready("/-/ready")
        await seen.wait_for("sentinel_pool_capacity_ratio")
        ratio[0] = 0.0
        event = await until("trigger", "SentinelRoleEmpty")
        assert event["routing_key"] == "0123456789abcdef0123456789abcdef"
        assert event["payload"]["severity"] == "critical"
        assert event["payload"]["summary"] == "SentinelRoleEmpty: No prefill worker of pool chat takes requests."
        assert event["payload"]["component"] == "chat"
        assert event["links"][0]["href"] == "https://sentinel.example.net/runbooks/capacity-short"

        ratio[0] = 1.0
        resolved = await until("resolve", "SentinelRoleEmpty")
        assert resolved["dedup_key"] == event["dedup_key"]
        assert len(of("trigger", "SentinelRoleEmpty")) == 1
        assert [r.status for r in pager.requests][:2] == [503, 503]
        async with asyncio.timeout(60):
            await fed.wait()  # the dead-man's switch has been fed all along
        seen.stop()  # before the servers that they talk to, which would wait for their connections
        alertmanager.stop()
