"""The gateways of ``streams.py``, each started before the same fake model."""

import json
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import httpx
from environments import environment
from load import request
from paced import MODEL, Script, Shape, serve_longrein, serve_model
from processes import START_S, command, free_port, process, receive

LITELLM, AGENTLIGHTNING = "1.108.14", "1.0.2"
# Its extra "proxy" pins parts that the registry does not have; these it needs where it has no database.
LITELLM_NEEDS = (
    "litellm-proxy-extras==0.4.110",
    "apscheduler==3.11.3",
    "azure-identity==1.27.0",
    "backoff==2.2.1",
    "cryptography==50.0.2",
    "expression==5.8.0",
    "fastapi==0.165.0",
    "fastapi-sso==0.23.0",
    "gunicorn==27.0.1",
    "hiredis==3.5.0",
    "mcp==2.3.0",
    "orjson==3.13.0",
    "pyjwt==2.15.1",
    "pynacl==1.6.2",
    "python-multipart==0.0.34",
    "restrictedpython==8.5",
    "rich==13.9.4",
    "rq==3.0.0",
    "soundfile==0.14.0",
    "tomlkit==0.15.2",
    "uvicorn==0.54.0",
    "uvloop==0.23.0",
    "websockets==15.0.1",
)


class Endpoint(Protocol):
    """One gateway, running."""

    name: str
    pid: int
    port: int

    def open(self, rollouts: Sequence[int], shape: Shape) -> list[bytes]:
        """Begin rollouts; the request of each."""
        ...

    def close(self) -> None:
        """End the rollouts."""
        ...

    def recorded(self) -> int | None:
        """How many of them were recorded token for token; None where nothing is recorded."""
        ...


class Longrein:
    def __init__(self, pid: int, pipe: Connection) -> None:
        self.name = "longrein"
        self.pid = pid
        self.port = receive(pipe, START_S)
        self._pipe = pipe

    def open(self, rollouts: Sequence[int], shape: Shape) -> list[bytes]:
        self._pipe.send(list(rollouts))
        keys = receive(self._pipe, START_S)
        path = "/v1/chat/completions"
        return [request(self.port, path, key, i, shape) for i, key in zip(rollouts, keys, strict=True)]

    def close(self) -> None:
        self._pipe.send("close")
        receive(self._pipe, START_S)

    def recorded(self) -> int | None:
        self._pipe.send("check")
        return int(receive(self._pipe, START_S))


@dataclass
class Plain:
    """An endpoint with one key for all, that keeps nothing of a rollout: LiteLLM's proxy, or the fake model alone."""

    name: str
    pid: int
    port: int
    key: str = "none"

    def open(self, rollouts: Sequence[int], shape: Shape) -> list[bytes]:
        return [request(self.port, "/v1/chat/completions", self.key, i, shape) for i in rollouts]

    def close(self) -> None:
        pass

    def recorded(self) -> int | None:
        return None


@dataclass
class AgentLightning:
    """Its server: a rollout is a part of the path, one key is for all, whole calls become events in memory."""

    pid: int
    port: int
    script: Script
    key: str
    name: str = "agentlightning"
    _opened: dict[str, int] = field(default_factory=dict)

    def api(self, method: str, path: str, **given: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"}
        reply = httpx.request(method, f"http://127.0.0.1:{self.port}/api{path}", headers=headers, timeout=60, **given)
        return reply.raise_for_status()

    def open(self, rollouts: Sequence[int], shape: Shape) -> list[bytes]:
        self._opened = {f"{secrets.token_hex(4)}-{i}": i for i in rollouts}
        self.api("POST", "/rollouts", json=[{"input": "task", "rollout_id": name} for name in self._opened])
        path = "/proxy/rollout/{}/attempt/0/mode/train/openai/v1/chat/completions"
        return [request(self.port, path.format(name), self.key, i, shape) for name, i in self._opened.items()]

    def close(self) -> None:
        self._exact = sum(self._ids(name) == self.script.ids[i] for name, i in self._opened.items())
        for name in self._opened:
            self.api("DELETE", f"/rollouts/{name}")

    def _ids(self, name: str) -> list[int] | None:
        events = self.api("GET", f"/rollouts/{name}/events", params={"format": "triplet"}).json()
        ids = [event["data"]["response_token_ids"] for event in events if event["event_type"] == "model_request"]
        return ids[0] if len(ids) == 1 else None

    def recorded(self) -> int | None:
        return self._exact


@contextmanager
def longrein(script: Script, model: str) -> Iterator[Endpoint]:
    with process(serve_longrein, script, model) as (pid, pipe):
        yield Longrein(pid, pipe)


@contextmanager
def model_alone(script: Script) -> Iterator[Endpoint]:
    with process(serve_model, script) as (pid, pipe):
        yield Plain("the model server alone", pid, receive(pipe, START_S))


@contextmanager
def litellm(script: Script) -> Iterator[Endpoint]:
    """One worker, no database: one key for all, nothing recorded."""
    programs = environment(f"litellm-{LITELLM}", [[f"litellm=={LITELLM}", *LITELLM_NEEDS]])
    key, port = f"sk-{secrets.token_hex(8)}", free_port()
    with model_alone(script) as model, tempfile.TemporaryDirectory(prefix="lr-") as name:
        upstream = {"model": f"hosted_vllm/{MODEL}", "api_base": f"http://127.0.0.1:{model.port}/v1", "api_key": "none"}
        config = {
            "model_list": [{"model_name": MODEL, "litellm_params": upstream}],
            "litellm_settings": {"num_retries": 0, "request_timeout": 600, "telemetry": False},
            "general_settings": {"master_key": key},
        }
        folder = Path(name)
        (folder / "config.yaml").write_text(json.dumps(config))
        arguments = ["--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        settings = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_LOG": "ERROR",
            "LITELLM_MODE": "PRODUCTION",
            # No limit; the default lets 500 connections through to one model server.
            "AIOHTTP_CONNECTOR_LIMIT": "0",
            "AIOHTTP_CONNECTOR_LIMIT_PER_HOST": "0",
        }
        with command([str(programs / "litellm"), *arguments], folder, port, **settings) as pid:
            yield Plain(f"LiteLLM {LITELLM}", pid, port, key)


@contextmanager
def agentlightning(script: Script) -> Iterator[Endpoint]:
    programs = environment(f"agentlightning-{AGENTLIGHTNING}", [[f"agentlightning=={AGENTLIGHTNING}"]], python=(3, 12))
    key, port = secrets.token_hex(8), free_port()
    with model_alone(script) as model, tempfile.TemporaryDirectory(prefix="lr-") as name:
        settings = [f"port={port}", "host=127.0.0.1", f"key={key}", f"default_proxy.model_name={MODEL}"]
        arguments = ["-m", "agentlightning.server", *settings, "hydra.run.dir=.", "hydra.output_subdir=null"]
        with command([str(programs / "python"), *arguments], Path(name), port) as pid:
            server = AgentLightning(pid, port, script, key, f"agentlightning {AGENTLIGHTNING}")
            server.api("POST", "/models", json=[{"model": MODEL, "endpoint": f"http://127.0.0.1:{model.port}/v1"}])
            yield server
