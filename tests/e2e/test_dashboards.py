"""The dashboards: what is committed is what the generator writes, and every query in them is right and finds data.

No Grafana is available where these tests run; nobody has seen the result rendered. What can be checked without one is checked:
the document against the SDK's own model, each query by a PromQL parser, each metric name against the code that exports it,
and each query on a real Prometheus.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import promql_parser
import pytest

from sentinel.sim.rack import GPUS, NODES, PLACES
from sentinel.sim.stage import Stage

TOP = Path(__file__).parents[2]
BOARDS = sorted((TOP / "dashboards").glob("*.json"))


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboards_generate", TOP / "dashboards/generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        if panel["type"] != "row":
            yield panel
        yield from panel.get("panels") or []


def expressions(board: dict[str, Any]) -> list[tuple[str, str]]:
    """(panel title, PromQL) with Grafana's own variables replaced by what they stand for."""
    found = [(panel["title"], target["expr"]) for panel in panels(board) for target in panel["targets"]]
    return [(title, expr.replace("$__rate_interval", "1m").replace("$pool", ".*")) for title, expr in found]


def every_expression() -> list[Any]:
    return [
        pytest.param(expr, id=f"{path.stem}: {title} {n}")
        for path in BOARDS
        for n, (title, expr) in enumerate(expressions(json.loads(path.read_text("utf-8"))))
    ]


def metrics_of(node: Any) -> set[str]:
    """Every metric name in a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        return {str(node.name)}
    if isinstance(node, promql_parser.MatrixSelector):
        return metrics_of(node.vector_selector)
    found: set[str] = set()
    for name in ("lhs", "rhs", "expr", "param"):
        found |= metrics_of(getattr(node, name)) if getattr(node, name, None) is not None else set()
    for argument in getattr(node, "args", None) or []:
        found |= metrics_of(argument)
    return found


def exported() -> set[str]:
    """Every series name that the code can export, from the names written in it."""
    names: set[str] = set()
    for file in (TOP / "sentinel").rglob("*.py"):
        for name in re.findall(r'"(sentinel_[a-z0-9_]+)"', file.read_text("utf-8")):
            names |= {name, f"{name}_total", f"{name}_bucket", f"{name}_count", f"{name}_sum"}
    return names


def test_committed_is_generated(generator: ModuleType) -> None:
    """The committed JSON is, byte for byte, what the generator writes; `make dashboards` brings it up to date."""
    assert {path.name for path in BOARDS} == set(generator.BOARDS)
    for path in BOARDS:
        assert path.read_text("utf-8") == generator.render(path.name), f"{path.name} is out of date: make dashboards"


def test_document_fits_the_model(generator: ModuleType) -> None:
    """Read back by the SDK's own model, the document loses nothing: no key of it is unknown to Grafana."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    for path in BOARDS:
        board = json.loads(path.read_text("utf-8"))
        again = json.loads(JSONEncoder(sort_keys=True, indent=2).encode(Dashboard.from_json(board)))
        assert again == board


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_house_rules(path: Path) -> None:
    """Uneditable, no id of one installation, one data source; each panel has title, description, unit and named queries."""
    board = json.loads(path.read_text("utf-8"))
    assert board["editable"] is False
    assert not board.get("id")
    assert next(v["name"] for v in board["templating"]["list"]) == "ds"
    titles = [panel["title"] for panel in panels(board)]
    assert len(set(titles)) == len(titles)
    for panel in panels(board):
        assert panel["title"] and panel["description"], panel
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert all(refs) and len(set(refs)) == len(refs), panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${ds}"


@pytest.mark.parametrize("expr", every_expression())
def test_query_is_right_and_uses_exported_metrics(expr: str) -> None:
    """Each query parses, its types fit, and it uses only metrics that the code exports."""
    used = metrics_of(promql_parser.parse(expr))
    assert used
    assert used <= exported()


@pytest.mark.needs("promtool")
async def test_queries_find_data(prometheus: Callable[[dict[str, Any]], Any], program: Callable[[str], Path]) -> None:
    """On a Prometheus that scrapes a whole simulated rack with a fault, every query of every dashboard finds something.

    Real: controller, store, three gateways, eighteen agents and what they export. Simulated: the rack's hardware (sentinel.sim).
    """
    victim = "decode-03"
    node, gpu = PLACES[victim].nodes[0], GPUS[1]
    async with Stage() as stage:
        agents = await stage.agent_urls()
        assert set(agents) == set(NODES)
        seen = prometheus(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(TOP / "alerts/sentinel.rules.yml")],
                "scrape_configs": [
                    {"job_name": job, "static_configs": [{"targets": [url.removeprefix("http://") for url in urls]}]}
                    for job, urls in (
                        ("sentinel-controller", [stage.url]), ("sentinel-agent", agents.values()),
                        ("sentinel-gateway", stage.gateways.admin.values()),
                    )
                ],
            }
        )
        await seen.ready("/-/ready")
        await seen.wait_for("count(up == 1) == 22")
        await stage.freeze(victim)
        await stage.set_gpu(node, gpu, lost=True)
        line = f"NVRM: Xid (PCI:{gpu.removesuffix('.0')}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
        await stage.inject_kernel_line(node, line)
        for path in BOARDS:
            for title, expr in expressions(json.loads(path.read_text("utf-8"))):
                assert await seen.wait_for(expr, 30), title

        # The alerts' metrics are there as well, and none of the rules fails on them; what was answered raises no alarm.
        live = {s["metric"]["__name__"] for s in await seen.query('{__name__=~"sentinel_.+"}')}
        rules = re.sub(r"#.*", "", (TOP / "alerts/sentinel.rules.yml").read_text("utf-8"))
        exprs = re.findall(r"expr: (?:\|\n)?((?:.|\n)*?)\n\s+(?:for|labels):", rules)
        used = {name for expr in exprs for name in re.findall(r"sentinel_\w+", expr)}
        assert used <= live, f"used by an alert and not exported by a running rack: {sorted(used - live)}"
        async with aiohttp.ClientSession() as http:
            async with http.get(seen.url + "/api/v1/rules") as answer:
                groups = (await answer.json())["data"]["groups"]
            assert [rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")] == []
            await seen.wait_for('absent(ALERTS{alertname="SentinelFatalXidUnanswered"})', 10)  # seen, and answered
            for url in (stage.url, agents[node], stage.gateways.admin["gateway-1"]):
                async with http.get(url + "/metrics") as answer:
                    text = await answer.read()
                linted = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, check=False)
                assert linted.returncode == 0, linted.stderr.decode()
        seen.stop()
