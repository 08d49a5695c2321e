"""Axolotl's datasets and transforms, unchanged, as rows."""

import json

import pytest

from groupwise.bridges.axolotl.data import Settings, rows
from groupwise.config.run import parse_config
from groupwise.errors import DataError, LoadError
from groupwise.tasks.prompts import open_prompts
from reference_files import write_project
from wording import raises

TRANSFORMS = """
def plain(cfg, *args, **kwargs):
    return lambda example: {"prompt": example["question"]}


def everything(cfg, dataset_idx=None, **kwargs):
    def row(example):
        return {"prompt": f"{dataset_idx}: {example['question']}", "length": cfg.sequence_len, "none": cfg.nothing}

    return row, {"remove_columns": "__all__"}


def batched(cfg, **kwargs):
    return lambda rows: {"prompt": [each.upper() for each in rows["question"]]}, {"batched": True}


def nested(cfg, **kwargs):
    return lambda example: {"prompt": f"{cfg.trl.num_generations} {cfg['trl']['beta']}"}


def not_a_function(cfg):
    return {"prompt": "x"}


def fails(cfg):
    return lambda example: {"prompt": example["no such column"]}
"""


@pytest.fixture
def folder(tmp_path):
    write_project(tmp_path, rows=10)
    (tmp_path / "transforms.py").write_text(TRANSFORMS)
    (tmp_path / "a.yaml").write_text("sequence_len: 512\ntrl: {num_generations: 8, beta: 0.1}\n")
    return tmp_path


def read(folder, *types, **more):
    entries = [{"path": "gsm8k.jsonl"} | ({"type": each} if each else {}) for each in types]
    return list(rows(datasets=entries, folder=str(folder), cfg="a.yaml", **more))


def test_a_transform_replaces_its_columns_and_gets_the_tokenizer(folder):
    (folder / "rewards.py").write_text(
        (folder / "rewards.py").read_text().replace("return {", "assert tokenizer.eos_token\n        return {")
    )
    found = read(folder, "rewards.prompt_transform", model="starter")
    assert found[0] == {
        "answer": "1",
        "prompt": [{"role": "user", "content": "What is 0 + 1? Reply with just the number."}],
    }
    assert len(found) == 10


def test_the_rows_are_prompts_of_a_run(folder):
    args = {"datasets": [{"path": "gsm8k.jsonl", "type": "rewards.prompt_transform"}], "folder": str(folder)}
    data = {"source": "groupwise.bridges.axolotl.data:rows", "args": args}
    config = parse_config({"data": data, "rewards": ["rewards:accuracy_reward"]})
    prompts = open_prompts(config.data).known
    assert prompts[1].messages is not None and prompts[1].columns == {"answer": "3"}


def test_options_go_to_map(folder):
    first = read(folder, "transforms.plain")[0]
    assert set(first) == {"question", "answer", "prompt"}
    assert read(folder, "transforms.batched")[0]["prompt"].startswith("WHAT IS 0")
    whole = read(folder, "transforms.everything", "transforms.everything")
    assert set(whole[0]) == {"prompt", "length", "none"}
    assert whole[0]["length"] == 512 and whole[0]["none"] is None
    assert whole[0]["prompt"].startswith("0: ") and whole[-1]["prompt"].startswith("1: ") and len(whole) == 20


def test_the_configuration_is_the_file_with_its_overrides(folder):
    assert read(folder, "transforms.nested")[0]["prompt"] == "8 0.1"
    assert read(folder, "transforms.nested", overrides=["trl.beta=0.5"])[0]["prompt"] == "8 0.5"
    assert Settings({"a": {"b": 1}}).a.b == 1 and Settings().anything is None


def test_held_out_rows_are_no_training_rows(folder):
    train = read(folder, None, part="train", held_out=0.2, seed=3)
    test = read(folder, None, part="test", held_out=0.2, seed=3)
    questions = [each["question"] for each in (*train, *test)]
    assert len(train) == 8 and len(test) == 2 and len(set(questions)) == 10
    assert [each["question"] for each in read(folder, None, part="test", held_out=2, seed=3)] == questions[8:]
    with raises(DataError):
        read(folder, None, part="test", held_out=10)


@pytest.mark.parametrize("suffix", ["json", "csv", "parquet"])
def test_files_of_each_kind(folder, suffix):
    import datasets

    table = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    getattr(table, f"to_{suffix}")(str(folder / f"rows.{suffix}"))
    by_suffix = list(rows(datasets=[{"path": f"rows.{suffix}"}], folder=str(folder)))
    by_files = list(
        rows(datasets=[{"path": ".", "ds_type": suffix, "data_files": f"rows.{suffix}"}], folder=str(folder))
    )
    assert by_suffix == by_files == [{"prompt": "a"}, {"prompt": "b"}]


def test_a_saved_dataset_and_a_slice(folder):
    import datasets

    table = datasets.Dataset.from_list([{"prompt": str(i)} for i in range(6)])
    datasets.DatasetDict({"train": table, "test": table.select([5])}).save_to_disk(str(folder / "saved"))
    assert list(rows(datasets=[{"path": "saved", "split": "test"}], folder=str(folder))) == [{"prompt": "5"}]
    assert len(list(rows(datasets=[{"path": "gsm8k.jsonl", "split": "train[:4]"}], folder=str(folder)))) == 4


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"path": "gsm8k.jsonl", "type": "reward.prompt_transform"}, LoadError),
        ({"path": "gsm8k.jsonl", "type": "rewards.promt_transform"}, LoadError),
        ({"path": "gsm8k.jsonl", "type": "chat_template.default"}, LoadError),
        ({"path": "gsm8k.jsonl", "type": "transforms.not_a_function"}, DataError),
        ({"path": "gsm8k.jsonl", "type": "transforms.fails"}, DataError),
        ({"path": "gsm8k.jsonl", "split": "validation"}, DataError),
    ],
)
def test_what_goes_wrong_is_named(folder, entry, error):
    with raises(error):
        list(rows(datasets=[entry], folder=str(folder)))


def test_a_module_beside_the_file_is_found_from_any_directory(folder, tmp_path_factory, monkeypatch):
    """Axolotl imports it only where the working directory happens to be on the path."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert json.dumps(read(folder, "rewards.prompt_transform")[0])
