"""Earlier releases of the `tinker` package, unmodified, against one server: the same numbers from all of them.

Each release is installed into a virtual environment of its own, which finds everything else in the one that runs the
tests; a release that cannot be had is skipped. Up to 0.18 all is JSON, 0.23 and 0.24 ask the server, later ones know
protobuf only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crash.place import Place, a_place

pytestmark = pytest.mark.slow

LOOP = """
import json, tarfile, io, urllib.request, warnings
warnings.filterwarnings("ignore")
import tinker
from tinker import types

def done(pending):
    return pending.result() if hasattr(pending, "result") else pending

def datum(tokens, **values):
    inputs = {"target_tokens": tokens[1:], **values}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

service = tinker.ServiceClient()
trainer = done(service.create_lora_training_client(base_model="starter", rank=4, seed=1))
data = [datum([5, 6, 7, 8 + i], weights=[0.0, 1.0, 1.0]) for i in range(3)]
numbers = {"forward": trainer.forward(data, "cross_entropy").result().metrics["loss:sum"]}
for step in range(3):
    backward = trainer.forward_backward(data * 500, "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    numbers[f"loss {step}"] = backward.result().metrics["loss:sum"]
policy = [datum([5, 6, 7, 8], logprobs=[0.0, -1.0, -2.0], advantages=[0.0, 1.0, -0.5])]
for loss in ("importance_sampling", "ppo", "cispo", "dro"):
    numbers[loss] = trainer.forward_backward(policy, loss).result().metrics["loss:sum"]
custom = lambda data, logprobs: (-sum(row.sum() for row in logprobs), {})
numbers["custom"] = trainer.forward_backward_custom([datum([5, 6, 7, 8])], custom).result().metrics["loss:sum"]
trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
sampler = done(trainer.save_weights_and_get_sampling_client())
prompt, params = types.ModelInput.from_ints([5, 6, 7]), types.SamplingParams(max_tokens=4, seed=3)
found = sampler.sample(prompt, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
numbers["sampled"] = [[each.tokens, each.logprobs] for each in found.sequences]
numbers["prompt"] = [found.prompt_logprobs, found.topk_prompt_logprobs]
path = trainer.save_state("one").result().path
again = done(service.create_training_client_from_state_with_optimizer(path))
assert again.forward(data, "cross_entropy").result().metrics == trainer.forward(data, "cross_entropy").result().metrics
rest = service.create_rest_client()
if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
    url = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
    names = tarfile.open(fileobj=io.BytesIO(urllib.request.urlopen(url).read())).getnames()
    assert sorted(names) == ["./adapter_config.json", "./adapter_model.safetensors"], names
try:
    trainer.forward_backward([datum([5, 6], weights=[1.0, 2.0])], "cross_entropy").result()
except tinker.RequestFailedError as error:
    assert "2 entries" in str(error)
print(json.dumps(numbers))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with a_place(tmp_path_factory.mktemp("place"), settings=("tinker=true",)) as place:
        place.start()
        place.await_ready()
        yield place


@pytest.fixture(scope="module")
def current(place: Place) -> dict[str, Any]:
    """The numbers of the release that this environment has."""
    return run(place, Path(sys.executable))


def run(place: Place, python: Path) -> dict[str, Any]:
    env = {"TINKER_BASE_URL": place.url, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
    ran = subprocess.run([python, "-c", LOOP], env=os.environ | env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("version", ["0.8.1", "0.16.1", "0.18.2", "0.23.4", "0.24.1", "0.25.0"])
def test_an_earlier_release_gets_the_same_numbers(
    place: Place, current: dict[str, Any], tmp_path: Path, version: str
) -> None:
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    asked = [python, "-m", "pip", "install", "-q", "--no-deps", f"tinker=={version}"]
    if subprocess.run(asked, capture_output=True, timeout=300).returncode:
        pytest.skip(f"tinker {version} cannot be installed")
    (packages,) = (tmp_path / "lib").glob("python*/site-packages")
    (packages / "zz_others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    found = run(place, python)
    assert found.keys() == current.keys()
    for name, value in found.items():
        assert value == pytest.approx(current[name], rel=1e-4) if isinstance(value, float) else value == current[name]
