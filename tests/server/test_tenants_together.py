"""Two tenants at once, through the clients that people have; and one that does all it can to spoil the other's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("tinker", "0.38")

import tinker

from groupwise.run.job import WorkerContext
from groupwise.run.job_queue import LeaseHeartbeat, Worker
from groupwise.store.adapters import AdapterStore
from groupwise.store.files import WEIGHTS
from groupwise.store.keys import KeyFile
from groupwise.store.ledger import JobState
from groupwise.store.tenants import home_of
from groupwise.types import PolicyVersion
from server.test_tenants import Tenant, tenant
from serving import running
from tinker_wire import tinker_site
from whole_server import Whole

types: Any = tinker.types
SAY: Any = [{"role": "user", "content": "What is 2+2?"}]


@pytest.fixture(scope="module")
def live(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Whole, str]]:
    settings = {"api_key": "owner", "max_queued_jobs": 200}
    with tinker_site(tmp_path_factory.mktemp("state"), model_dir, **settings) as site, running(site.app) as port:
        yield site, f"http://127.0.0.1:{port}"
        assert site.http.portal is not None and site.server.tenants is not None
        for view in site.server.tenants.opened():
            site.http.portal.call(_close, view)


async def _close(server: Any) -> None:
    server.more["tinker"].close()


def make_key(site: Whole, name: str, tenant: str) -> str:
    return KeyFile(site.server.config.state_dir.absolute()).add(name, role="train", tenant=tenant)


def test_two_openai_clients_at_once_have_each_their_own_adapter_of_one_name(
    live: tuple[Whole, str], make_adapter: Callable[..., Path]
) -> None:
    site, url = live
    clients, expected = [], []
    for seed, name in enumerate(("acme", "globex"), start=1):
        it = Tenant(site, name, make_key(site, f"{name}-openai", name))
        clients.append(openai.OpenAI(base_url=f"{url}/v1", api_key=it.key, max_retries=0))
        clients[-1].models.list()  # whose tenant there is now
        upload(url, it.key, make_adapter(site.server.base, seed=seed))

    def asked(client: openai.OpenAI) -> tuple[list[str], list[float]]:
        names = sorted(model.id for model in client.models.list())
        echo: Any = {"echo": True, "logprobs": 0, "max_tokens": 0}
        logprobs = client.completions.create(model="math", prompt=[5, 6, 7, 8], **echo).choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None
        return names, logprobs.token_logprobs

    expected = [asked(client) for client in clients]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda at: asked(clients[at % 2]), range(24)))
    assert expected[0][0] == expected[1][0] and "math@1" in expected[0][0]
    assert expected[0][1] != expected[1][1]
    assert all(each == expected[at % 2] for at, each in enumerate(found))
    mine = clients[0].chat.completions.create(model="math", messages=SAY, max_tokens=2)
    assert clients[0].responses.create(model="math", input="?", max_output_tokens=2).id
    with pytest.raises(openai.NotFoundError):
        clients[1].post("/feedback", cast_to=object, body={"rollout_id": mine.id, "score": 1})


def upload(url: str, key: str, adapter: Path) -> None:
    import io
    import tarfile

    import httpx2

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in ("adapter_config.json", WEIGHTS):
            archive.add(adapter / name, arcname=name)
    given = {"data": {"name": "math", "any_base": "true"}, "files": {"archive": ("a.tar.gz", packed.getvalue())}}
    answer = httpx2.post(f"{url}/v1/adapters/upload", headers={"authorization": f"Bearer {key}"}, timeout=60, **given)
    assert answer.status_code == 200, answer.text


def test_two_unmodified_tinker_clients_see_each_their_own(
    live: tuple[Whole, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, url = live
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    model, prompt = site.server.config.model, types.ModelInput.from_ints([5, 6, 7])
    paths, services = list[str](), list[Any]()
    for name in ("acme", "globex"):
        key = make_key(site, f"{name}-tinker", name)
        services.append(service := tinker.ServiceClient(base_url=url, api_key=f"tml-{key}"))
        trainer = service.create_lora_training_client(model, rank=4)
        datum = types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]})
        trainer.forward_backward([datum], "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        paths.append(trainer.save_weights_for_sampler("kept").result().path)
        sampler = service.create_sampling_client(model_path=paths[-1])
        sampled = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result()
        assert len(sampled.sequences[0].tokens) <= 2
    for mine, service in enumerate(services):
        rest = service.create_rest_client()
        found = rest.list_user_checkpoints().result().checkpoints
        assert [each.tinker_path for each in found] == [paths[mine]]
        with pytest.raises(tinker.APIStatusError) as caught:
            service.create_sampling_client(model_path=paths[1 - mine]).sample(
                prompt, 1, types.SamplingParams(max_tokens=2)
            ).result()
        assert caught.value.status_code == 404
        with pytest.raises(tinker.APIStatusError):
            rest.delete_checkpoint_from_tinker_path(paths[1 - mine]).result()
    for service in services:
        service.close("success").result()


# ---- a healthy tenant beside a poisoned one ----
def work(site: Whole) -> dict[str, list[JobState]]:
    """Do all jobs as the worker would, one after another; how they ended, by tenant."""
    assert site.server.tenants is not None
    whole, state_dir = site.server.tenants.whole(), site.server.config.state_dir
    place = WorkerContext(base=site.server.base, ledger=whole, store=site.server.store, state_dir=state_dir)
    worker, ended = Worker(place, LeaseHeartbeat(whole), name="worker"), dict[str, list[JobState]]()
    while (lease := whole.lease("worker")) is not None:
        worker.do(lease)
        ended.setdefault(lease.job.tenant, []).append(whole.job(lease.job.id).state)
    return ended


def weights(site: Whole, name: str) -> dict[str, str]:
    """The checksum of every version of a tenant."""
    store = AdapterStore(home_of(site.server.config.state_dir, name) / "adapters")
    return {str(info.version): info.files[WEIGHTS][1] for info in store.list()}


def healthy(it: Tenant, round: int) -> None:
    completions = [{"text": text, "reward": reward} for text, reward in (("4", 1.0), ("5", 0.0), ("four", 0.5))]
    group = {"messages": [{"role": "user", "content": f"What is {round}+2?"}], "completions": completions}
    config = {"output_name": "math", "learning_rate": 1e-3, "seed": 3}
    it.ok("POST", "/v1/train/grpo", {"groups": [group], "config": config})


def poison(it: Tenant) -> None:
    """NaN rewards, huge ones and steps, a flood, cancelled jobs, and adapters of the same name."""
    said = '"messages":[{"role":"user","content":"?"}]'
    nan = f'{{"groups":[{{{said},"completions":[{{"text":"a","reward":NaN}},{{"text":"b","reward":0}}]}}]}}'
    headers = {"authorization": f"Bearer {it.key}", "content-type": "application/json"}
    assert it.site.http.post("/v1/train/grpo", content=nan, headers=headers).status_code == 400
    for learning_rate in (1.0, 0.9, 1e-2):
        completions = [{"text": "x" * 30, "reward": 1e6}, {"text": "y", "reward": -1e6}]
        group = {"messages": [{"role": "user", "content": "?" * 20}], "completions": completions}
        config = {"output_name": "math", "learning_rate": learning_rate, "lora_rank": 16}
        jobs = [it.ok("POST", "/v1/train/grpo", {"groups": [group], "config": config})["job_id"] for _ in range(3)]
        it.ok("POST", f"/v1/train/cancel/{jobs[-1]}")
    assert it.ask("POST", "/v1/train/grpo", {"groups": "[" * 5000}).status_code == 400


@pytest.mark.long
def test_a_healthy_tenant_trains_the_same_bytes_beside_a_poisoned_one(model_dir: Path, tmp_path: Path) -> None:
    found, ended = [], dict[str, list[JobState]]()
    for alone in (True, False):
        with tinker_site(tmp_path / str(alone), model_dir, api_key="owner", max_queued_jobs=200) as site:
            it, other = tenant(site, "acme"), tenant(site, "globex")
            for round in range(3):
                if not alone:
                    poison(other)
                healthy(it, round)
                ended = work(site)
                assert ended["acme"] == [JobState.RUNNING]  # published: the server would swap it in now
                complete(site)
            assert alone or len(ended["globex"]) >= 6
            found.append(weights(site, "acme"))
            kept = (home_of(tmp_path / str(alone), "acme") / "adapters" / ".optimizer").glob("*/*")
            assert ["/".join(path.parts[-2:]) for path in kept] == ["math/v000003"]
    assert found[0] == found[1] and list(found[0]) == ["math@1", "math@2", "math@3"]


def complete(site: Whole) -> None:
    """Swap in what was published, as the supervisor does."""
    tenants, portal = site.server.tenants, site.http.portal
    assert tenants is not None and portal is not None
    for job in tenants.whole().published_jobs():
        view = portal.call(tenants.of, job.tenant)
        portal.call(view.policies.swap, PolicyVersion.parse(str(job.version)))
        tenants.whole().complete(job.id)
