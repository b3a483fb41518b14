"""TensorBoard, Weights & Biases and MLflow: the real ones, read back from their files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxgrad
from fxgrad.errors import LogWarning, OptionError
from fxgrad.integrations.scalars import scalars
from tests.integrations.runs import Kept, Net, chain, differences, seed, train
from tests.trackers import keep_in

# SQLAlchemy on what MLflow does with it.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")

STEPS = [0, 10, 20, 30, 40, 49]


def plain_and_logged(model: type[nn.Module], log: Any) -> list[str]:
    """Where 50 steps with the log differ from those without."""
    seed()
    plain = train(model())
    seed()
    return differences(plain, train(model(), log=log))


def expected() -> list[dict[str, float]]:
    kept = Kept()
    seed()
    train(Net(), log=kept)
    return [scalars(entry) for entry in kept.entries]


# ---- TensorBoard ---------------------------------------------------------------------------------------------------


def events_of(folder: Path) -> Any:
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder), size_guidance={"images": 0})
    found.Reload()
    return found


@pytest.mark.usefixtures("recorder")
def test_tensorboard_has_curves_and_picture(tmp_path: Path) -> None:
    assert plain_and_logged(Net, fxgrad.integrations.TensorBoardLog(tmp_path)) == []
    found, wanted = events_of(tmp_path), expected()
    assert set(found.Tags()["scalars"]) == set(wanted[0])
    for name in wanted[0]:
        assert [event.step for event in found.Scalars(name)] == STEPS
        values = torch.tensor([entry[name] for entry in wanted], dtype=torch.float32).tolist()
        assert [event.value for event in found.Scalars(name)] == values
    pictures = found.Images("fxgrad/gradient_flow")
    assert [picture.step for picture in pictures] == [0]
    assert pictures[0].encoded_image_string.startswith(b"\x89PNG")
    assert min(pictures[0].width, pictures[0].height) > 50


def test_tensorboard_has_findings_as_text_in_a_writer_that_stays_open(tmp_path: Path) -> None:
    tensorboard: Any = pytest.importorskip("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(str(tmp_path))
    train(chain(), 3, fxgrad.integrations.TensorBoardLog(writer, pictures=False))
    writer.add_scalar("mine", 1.0, 0)
    writer.close()
    found = events_of(tmp_path)
    assert found.Tags()["images"] == []
    assert "mine" in found.Tags()["scalars"]
    text = found.Tensors("fxgrad/findings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.startswith("- ERROR vanishing at ")


def test_without_a_converter_curves_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxgrad.render.convert.importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.warns(LogWarning, match="no pictures are logged: .*needs CairoSVG"):
        train(Net(), 3, fxgrad.integrations.TensorBoardLog(tmp_path))
    assert len(events_of(tmp_path).Scalars("gradient/head")) == 2


# ---- Weights & Biases ----------------------------------------------------------------------------------------------


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Offline, and with all that it writes in a folder of the test."""
    keep_in(tmp_path, monkeypatch)
    found: Any = pytest.importorskip("wandb")
    yield found
    found.finish()
    found.teardown()


def logged(file: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format: blocks of 32 KiB, parts with checksum, length and kind."""
    assert file.startswith(b":W&B")
    place, record = 7, b""
    while place < len(file):
        left = 32768 - place % 32768
        if left < 7:  # the end of a block is filled up
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", file[place : place + 7])
        record += file[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole of it, or its last part
            yield record
            record = b""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of the only offline run below a folder."""
    records: Any = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (path,) = folder.rglob("*.wandb")
    rows = []
    for data in logged(path.read_bytes()):
        record = records.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return rows


@pytest.mark.usefixtures("recorder")
def test_wandb_has_metrics_and_picture(wandb: Any, tmp_path: Path) -> None:
    run = wandb.init(project="test")
    assert plain_and_logged(Net, fxgrad.integrations.WandbLog(run)) == []
    run.finish()
    wandb.teardown()  # its process writes the end of the file
    rows, wanted = rows_of(tmp_path), expected()
    assert [row["fxgrad/step"] for row in rows if "fxgrad/step" in row] == STEPS
    for row, entry in zip([row for row in rows if "fxgrad/step" in row], wanted, strict=True):
        assert {name: row[f"fxgrad/{name}"] for name in entry} == entry
    kinds = [row.get("fxgrad/gradient_flow/_type") for row in rows]
    assert [kind for kind in kinds if kind] == ["image-file"]


def test_wandb_rows_of_the_user_are_all_kept_with_their_steps(wandb: Any, tmp_path: Path) -> None:
    run = wandb.init(project="test")
    model = chain()
    with fxgrad.watch(model, log_to=fxgrad.integrations.WandbLog(pictures=False), log_every=2) as watch:
        for step in range(0, 60, 10):
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
            run.log({"mine": step}, step=step)
    assert watch.flow().event.backward == 17
    run.finish()
    wandb.teardown()  # its process writes the end of the file
    rows = rows_of(tmp_path)
    mine = [(row["_step"], row["mine"]) for row in rows if "mine" in row]
    assert mine == [(step, step) for step in range(0, 60, 10)]
    assert [row["fxgrad/step"] for row in rows if "fxgrad/step" in row] == [*range(0, 17, 2), 17]
    assert sum("fxgrad/findings_text/_type" in row for row in rows) >= 1


def test_wandb_without_a_run(wandb: Any) -> None:
    with pytest.raises(OptionError, match=r"no active run: call wandb.init\(\) first"):
        fxgrad.integrations.WandbLog()


# ---- MLflow --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """MLflow with all that it writes in a folder of the tests; making its database takes seconds."""
    folder = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        keep_in(folder, patch)
        found: Any = pytest.importorskip("mlflow")
        found.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        yield found


@pytest.fixture
def mlflow(tracking: Any, tmp_path: Path) -> Any:
    """With an experiment for the test."""
    tracking.create_experiment(tmp_path.name, artifact_location=(tmp_path / "artifacts").as_uri())
    tracking.set_experiment(tmp_path.name)
    yield tracking
    while tracking.active_run() is not None:
        tracking.end_run()


@pytest.mark.usefixtures("recorder")
def test_mlflow_has_metrics_picture_and_findings(mlflow: Any, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        assert plain_and_logged(Net, fxgrad.integrations.MlflowLog()) == []
    client, wanted = mlflow.MlflowClient(), expected()
    for name in wanted[0]:
        history = client.get_metric_history(run.info.run_id, name)
        assert [(metric.step, metric.value) for metric in history] == list(
            zip(STEPS, [entry[name] for entry in wanted], strict=True)
        )
    artifacts = {path.name for path in tmp_path.rglob("artifacts/fxgrad/*")}
    assert artifacts == {"gradient_flow-00000000.svg"}


def test_mlflow_has_findings_in_a_run_that_is_named(mlflow: Any, tmp_path: Path) -> None:
    run = mlflow.MlflowClient().create_run(mlflow.get_experiment_by_name(tmp_path.name).experiment_id)
    train(chain(), 3, fxgrad.integrations.MlflowLog(run.info.run_id, pictures=False))
    (text,) = [path.read_text() for path in tmp_path.rglob("fxgrad/findings-00000000.txt")]
    assert text.startswith("1. ERROR vanishing")


def test_mlflow_without_a_run(mlflow: Any) -> None:
    with pytest.raises(OptionError, match=r"no active run: call mlflow.start_run\(\) first"):
        fxgrad.integrations.MlflowLog()
