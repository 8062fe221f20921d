"""Who is answered, what is sent, and that the server starts and stops as promised."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from dashboard.app import make_app, serve
from dashboard.components import graph, page
from dashboard.guard import COOKIE, HEADER, is_loopback
from dashboard.state import ViewState
from dashboard.theme import LIGHT
from dashboard.views import overview


@pytest.fixture
def client(small_path: Path) -> FlaskClient:
    return make_app(small_path).server.test_client()


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


# Who is answered.


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", ""])
def test_the_network_is_refused_without_a_token(small_path: Path, host: str) -> None:
    with pytest.raises(ValueError, match="token"):
        serve(small_path, host=host, block=False)


def test_loopback_names() -> None:
    assert all(
        is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")
    )
    assert not any(
        is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.org")
    )


def test_a_name_of_another_site_is_refused(client: FlaskClient) -> None:
    assert client.get("/health", headers={"Host": "localhost:8050"}).status_code == 200
    assert client.get("/health", headers={"Host": "evil.example"}).status_code == 403


@pytest.mark.parametrize("path", ["/", "/health", "/table.csv", "/_dash-layout", "/assets/odc.css"])
def test_nothing_is_given_without_the_token(small_path: Path, path: str) -> None:
    client = make_app(small_path, token="s3cret").server.test_client()
    assert client.get(path).status_code == 401
    assert client.get(f"{path}?token=wrong").status_code == 401
    assert client.get(path, headers={HEADER: "wrong"}).status_code == 401


def test_the_token_opens_by_address_header_and_cookie(small_path: Path) -> None:
    client = make_app(small_path, token="s3cret").server.test_client()
    assert client.get("/health", headers={HEADER: "s3cret"}).status_code == 200
    answer = client.get("/health?token=s3cret")
    assert answer.status_code == 200
    cookie = answer.headers["Set-Cookie"]
    assert cookie.startswith(f"{COOKIE}=") and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert client.get("/health").status_code == 200  # the client keeps the cookie


def test_pages_may_load_nothing_from_elsewhere(client: FlaskClient) -> None:
    policy = client.get("/").headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'") and "http" not in policy


# What is sent.


def callback(client: FlaskClient, path: str, query: str, theme: str = "light") -> str:
    body = {
        "output": "..content.children...nav.children..",
        "outputs": [{"id": "content", "property": "children"},
                    {"id": "nav", "property": "children"}],
        "inputs": [{"id": "url", "property": "pathname", "value": path},
                   {"id": "url", "property": "search", "value": query},
                   {"id": "theme", "property": "data", "value": theme},
                   {"id": "revision", "property": "data", "value": None}],
        "changedPropIds": ["url.search"],
    }  # fmt: skip
    answer = client.post("/_dash-update-component", json=body)
    assert answer.status_code == 200
    return answer.get_data(as_text=True)


@pytest.mark.parametrize("path", ["/", "/residency", "/access", "/memory", "/communication", "/x"])
def test_every_page_is_answered(client: FlaskClient, path: str) -> None:
    text = callback(client, path, "")
    assert "verdict" in text and "could not be computed" not in text


@pytest.mark.parametrize("run", ["..", "../..", "/etc/passwd", "%2e%2e%2f", "..%2Fsecret"])
def test_a_path_as_run_name_gives_nothing(client: FlaskClient, run: str) -> None:
    assert "No such run" in callback(client, "/", f"?run={run}")
    assert client.get(f"/table.csv?view=/&table=steps&run={run}").status_code == 404


def test_tables_are_downloaded_as_csv(client: FlaskClient) -> None:
    answer = client.get("/table.csv?view=/&table=steps&step0=2&step1=3")
    assert answer.mimetype == "text/csv"
    assert [line.split(",")[0] for line in answer.text.splitlines()] == ["step", "3.0", "2.0"]
    assert client.get("/table.csv?view=/&table=nothing").status_code == 404


def test_every_graph_comes_from_the_factory_without_the_upload_button(small, small_path) -> None:
    content = overview.build(small, ViewState(), LIGHT)
    for panel in content.panels:
        config = graph(panel).children[1].config
        assert config["showSendToCloud"] is False
        assert "sendChartToCloud" in config["modeBarButtonsToRemove"]
    sent = json.dumps(page(content, "/", ViewState(), "run").to_plotly_json(), default=repr)
    assert sent.count("Graph(id=") == sent.count("'showSendToCloud': False") == len(content.panels)
    own = Path(overview.__file__).parents[1].rglob("*.py")
    assert [path.name for path in own if "dcc.Graph(" in path.read_text()] == ["components.py"]


def test_a_growing_run_changes_the_revision(record: Callable[..., Path]) -> None:
    path = record(steps=2)
    client = make_app(path).server.test_client()
    body = {
        "output": "revision.data",
        "outputs": {"id": "revision", "property": "data"},
        "inputs": [{"id": "timer", "property": "n_intervals", "value": 1}],
        "state": [{"id": "url", "property": "search", "value": ""},
                  {"id": "revision", "property": "data", "value": None}],
        "changedPropIds": ["timer.n_intervals"],
    }  # fmt: skip
    first = client.post("/_dash-update-component", json=body).get_json()
    known = first["response"]["revision"]["data"]
    body["state"][1]["value"] = known
    same = client.post("/_dash-update-component", json=body)
    assert known not in same.get_data(as_text=True)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.0, "step_s": 0.1}\n')
    second = client.post("/_dash-update-component", json=body).get_json()
    assert second["response"]["revision"]["data"] != known
    assert "Steps 1\\u20133" in callback(client, "/", "") or "Steps 1–3" in callback(
        client, "/", ""
    )


# Start.


def test_serve_returns_an_address_that_answers(small_path: Path) -> None:
    url = serve(small_path, port=0, block=False)
    assert url.startswith("http://127.0.0.1:")
    assert get(f"{url}health") == (200, '{"runs":1,"status":"ok"}\n')


def test_a_taken_port_is_replaced_by_a_free_one(small_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        url = serve(small_path, port=port, block=False)
    assert f":{port}/" not in url
    assert get(f"{url}health")[0] == 200


def test_the_printed_address_carries_the_token(small_path: Path) -> None:
    url = serve(small_path, port=0, block=False, token="a b&c")
    assert url.endswith("/?token=a%20b%26c")
    assert get(url)[0] == 200
    assert get(url.split("?")[0])[0] == 401
