"""Keys, hosts, origins and types of contents that a server accepts."""

import asyncio
import logging

import pytest
from helpers.runs.served import NAME, call, chat, events, opened, served

import csd
from csd.cli.main import main
from csd.engine.requests.request import LiveSample
from csd.models.demo import toy

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

CHATS = "/v1/chat/completions"
# also paths that no route has
PATHS = ["/", "/health", "/metrics", "/stats", "/version", "/v1/models", "/docs", "/none"]
FOREIGN = ["http://evil.example", "https://localhost.evil.example", "null", "http://localhost:1"]


@pytest.fixture(scope="module")
def service(model):
    return csd.AsyncEngine(model, tokenizer=model._csd_tokenizer, max_tokens=200, budget=4)


def asked(port, path, body=None, key=None, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response = opened(port, path, body, key, headers=named)
    response.read()
    return response.status


@pytest.mark.parametrize("path", PATHS)
def test_every_path_refuses_the_host_of_another_site(port, path):
    assert asked(port, path, Host=f"evil.example:{port}") == 403
    assert asked(port, path, Host="127.0.0.1.evil.example") == 403
    for host in ("localhost", f"127.0.0.1:{port}", "[::1]:80", "LOCALHOST:99"):
        assert asked(port, path, Host=host) == (404 if path in ("/docs", "/none") else 200)


@pytest.mark.parametrize("origin", FOREIGN)
def test_a_page_of_another_origin_is_refused(port, origin):
    assert asked(port, CHATS, chat(), Origin=origin) == 403
    assert asked(port, "/stats", Origin=origin) == 403
    status, answer = asked(port, CHATS, chat(), Origin=f"http://127.0.0.1:{port}"), None
    assert (status, answer) == (200, None)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "a/json"])
def test_a_post_needs_the_type_that_forms_cannot_have(port, kind):
    texts = (CHATS, "/v1/completions", "/v1/responses")
    for path in (*texts, "/tokenize", "/detokenize", "/update_weights"):
        assert asked(port, path, chat(), Content_Type=kind) == 415
    assert asked(port, CHATS, chat(), Content_Type="Application/JSON; charset=utf-8") == 200


def test_named_hosts_and_origins_are_accepted(service):
    """Each remedy that an error names: --allowed-host, --allow-origin and the header."""
    page = "https://page.example"
    with served(service, hosts=("csd.example",), origins=(page,)) as (port, _):
        assert asked(port, "/health", Host="csd.example:80") == 200
        assert asked(port, "/health", Host="other.example") == 403
        response = opened(port, CHATS, chat(), headers={"Origin": page})
        assert (response.status, response.headers["access-control-allow-origin"]) == (200, page)
        response.read()
        wants = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, content-type",
        }
        for origin, status in ((page, 200), ("https://evil.example", 400)):
            response = opened(port, CHATS, method="OPTIONS", headers=wants | {"Origin": origin})
            response.read()
            assert response.status == status
            allowed = response.headers.get("access-control-allow-origin")
            assert allowed == (page if status == 200 else None)
        assert asked(port, CHATS, chat(), Origin="https://evil.example") == 403
    # a key is more than a page can have
    service = csd.AsyncEngine(service.engine, max_tokens=200, budget=4)
    with served(service, keys=("one",)) as (port, _):
        assert asked(port, CHATS, chat(), "one", Host="x.example", Origin=page) == 200
        assert asked(port, CHATS, chat(), "one", Content_Type="text/plain") == 200
        assert asked(port, CHATS, chat(), Host="x.example", Origin=page) == 401


def test_websockets_are_guarded_too():
    from csd.serve.http.app import Guard

    sent = []

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        await send({"type": "websocket.accept"})

    scope = {"type": "websocket", "headers": [(b"host", b"evil.example")]}
    asyncio.run(Guard(app, (), (), True)(scope, None, send))
    asyncio.run(Guard(app, ("evil.example",), (), True)(scope, None, send))
    assert [message["type"] for message in sent] == ["websocket.close", "websocket.accept"]


KEYS = ["", " ", "\t", "ключ", "two words", "a\n", "\x00"]


@pytest.mark.parametrize("key", KEYS, ids=map(repr, KEYS))
def test_a_key_that_admits_everyone_or_no_one_is_refused(key, toy_folder, capsys, monkeypatch):
    from csd.serve.http.clients import Clients

    with pytest.raises(ValueError, match="keys must"):
        Clients(("good", key), False)
    assert main(["serve", toy_folder, "--api-key", "good", "--api-key", key]) == 2
    assert "api-key must" in capsys.readouterr().err
    assert main(["serve", toy_folder, "--api-key", "good", "--learn-prior", key]) == 2
    assert "learn-prior must be one of the API keys" in capsys.readouterr().err
    if not key.strip() or not key.isascii():
        monkeypatch.setattr("os.environ", {"CSD_API_KEYS": key})
        assert main(["serve", toy_folder]) == 2
        assert "CSD_API_KEYS must" in capsys.readouterr().err


def test_a_string_is_no_list_of_keys():
    from csd.serve.http.clients import Clients

    with pytest.raises(TypeError, match="list of strings"):
        Clients("secret", False)


def test_a_request_without_a_key_equals_no_key(service):
    with served(csd.AsyncEngine(service.engine, max_tokens=99, budget=4), keys=("k",)) as (port, _):
        for value in ("", "Bearer", "Bearer ", "Basic k", "k", "Bearer  "):
            assert asked(port, "/v1/models", Authorization=value) == 401, value
        assert call(port, "/v1/models", key="k")[0] == 200


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [
        ("0.0.0.0", (), True),
        ("::", (), True),
        ("box.example", (), True),
        ("127.0.0.1", (), False),
        ("::1", (), False),
        ("localhost", (), False),
        ("0.0.0.0", ("k",), False),
    ],
)
def test_listening_for_other_machines_without_keys_warns(service, caplog, host, keys, warns):
    from csd.serve.http import Server, process

    with caplog.at_level(logging.WARNING, "csd"):
        process(Server(service, NAME, keys=keys), host=host)
    assert ("set --api-key" in caplog.text) == warns


def test_connections_fit_the_descriptors(monkeypatch, caplog):
    resource = pytest.importorskip("resource")
    from csd.serve.http.run import OTHER_FILES, connection_limit

    limits = [(256, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append(pair))
    with caplog.at_level(logging.WARNING, "csd"):
        assert connection_limit(1000) == 1000 and limits[-1] == (1000 + OTHER_FILES, 4096)
        assert not caplog.text
        assert connection_limit(9000) == 4096 - OTHER_FILES and limits[-1] == (4096, 4096)
        assert "max_connections is 3968 instead of 9000" in caplog.text


def test_an_answer_names_no_folder_of_the_server(tmp_path):
    model, tokenizer = toy()
    for name in ("weights/a", "weights/b"):
        (tmp_path / name).mkdir(parents=True)
    model.save_pretrained(tmp_path / "weights/a")
    tokenizer.save_pretrained(tmp_path / "weights/a")
    service = csd.AsyncEngine(str(tmp_path / "weights/a"), max_tokens=99, budget=4)
    with served(service, weights_folder=str(tmp_path / "weights")) as (port, _):
        for path, body in (("/update_weights", {"path": "b"}), (CHATS, chat(model="x"))):
            status, answer = call(port, path, body)
            assert status >= 400 and str(tmp_path) not in str(answer), answer


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_while_drawing_names_no_folder_of_the_server(tmp_path, monkeypatch, stream):
    model, tokenizer = toy()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    service = csd.AsyncEngine(str(tmp_path), max_tokens=99, budget=4)

    def unreadable(*_):
        raise OSError(f"{tmp_path}/tokenizer.json cannot be read")

    monkeypatch.setattr(LiveSample, "append", unreadable)
    with served(service) as (port, _):
        if stream:
            *_, answer = events(port, CHATS, chat())
        else:
            _, answer = call(port, CHATS, chat())
    message = answer["error"]["message"]
    assert "[folder]/tokenizer.json cannot be read" in message and str(tmp_path) not in message
